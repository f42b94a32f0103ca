/* SPDX-License-Identifier: Apache-2.0 OR MIT
 *
 * Facts about the kernel's verbs devices on which the way `vf` rests. Each command prints what happened, a line each.
 *
 *   rnic-facts register DEVICE BYTES   register memory
 *   rnic-facts events DEVICE           be connected to itself, and print asynchronous events and statuses of
 *                                      completions until it is killed
 *   rnic-facts passed NODE             open a device node, and use it as another user
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <rdma/ib_user_ioctl_cmds.h>
#include <rdma/ib_user_verbs.h>
#include <rdma/rdma_user_ioctl.h>
#include <rdma/rdma_user_ioctl_cmds.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check.h"

enum { PAGE = 4096, NOBODY = 65534, PERIOD_MS = 100 };
enum { ACCESS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE };

static struct ibv_context *open_device(const char *name)
{
	struct ibv_device **list = ibv_get_device_list(NULL);

	for (; list && *list; list++)
		if (!strcmp(ibv_get_device_name(*list), name)) {
			struct ibv_context *ctx = ibv_open_device(*list);

			CHECK(ctx);
			return ctx;
		}
	printf("there is no device %s\n", name);
	exit(1);
}

static void say(const char *what, int failed)
{
	printf("%s: %s\n", what, failed ? strerror(errno) : "works");
}

static void register_memory(const char *device, size_t bytes)
{
	struct ibv_pd *pd = ibv_alloc_pd(open_device(device));
	void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	CHECK(pd && memory != MAP_FAILED);
	say("register", !ibv_reg_mr(pd, memory, bytes, ACCESS));
}

/* The index of the GID that is an IPv4 address. */
static int find_gid(struct ibv_context *ctx, union ibv_gid *gid)
{
	static const uint8_t v4[12] = { [10] = 0xff, 0xff };
	int index = 0;

	for (;; index++) {
		CHECK(index < 32 && !ibv_query_gid(ctx, 1, index, gid));
		if (!memcmp(gid, v4, sizeof(v4)))
			return index;
	}
}

/* Connects a QP to itself. */
static void connect_to_itself(struct ibv_qp *qp)
{
	struct ibv_qp_attr init = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = ACCESS };
	struct ibv_qp_attr rtr = { .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = qp->qp_num,
				   .max_dest_rd_atomic = 1, .min_rnr_timer = 12,
				   .ah_attr = { .is_global = 1, .port_num = 1, .grh.hop_limit = 4 } };
	struct ibv_qp_attr rts = { .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 1 };

	rtr.ah_attr.grh.sgid_index = find_gid(qp->context, &rtr.ah_attr.grh.dgid);
	CHECK(!ibv_modify_qp(qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	CHECK(!ibv_modify_qp(qp, &rtr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
					       IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
	CHECK(!ibv_modify_qp(qp, &rts, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
					       IBV_QP_MAX_QP_RD_ATOMIC));
}

static void print_events(const char *device)
{
	static char memory[PAGE] __attribute__((aligned(PAGE)));
	struct ibv_context *ctx = open_device(device);
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	struct ibv_cq *cq = ibv_create_cq(ctx, 64, NULL, NULL, 0);
	struct ibv_qp_init_attr of = { .send_cq = cq, .recv_cq = cq, .cap = { 16, 16, 1, 1, 0 }, .qp_type = IBV_QPT_RC,
				       .sq_sig_all = 1 };
	struct ibv_mr *mr = pd ? ibv_reg_mr(pd, memory, PAGE, ACCESS) : NULL;
	struct ibv_qp *qp = pd ? ibv_create_qp(pd, &of) : NULL;
	struct pollfd async = { .fd = ctx->async_fd, .events = POLLIN };
	int last_status = -1;

	CHECK(cq && mr && qp);
	connect_to_itself(qp);
	for (;;) {
		struct ibv_sge from = { .addr = (uintptr_t)memory, .length = 8, .lkey = mr->lkey };
		struct ibv_send_wr *bad, wr = { .sg_list = &from, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
						.wr.rdma = { (uintptr_t)memory + 64, mr->rkey } };
		struct ibv_async_event event;
		struct ibv_wc wc;

		ibv_post_send(qp, &wr, &bad);
		CHECK(poll(&async, 1, PERIOD_MS) >= 0);
		if (async.revents & POLLIN && !ibv_get_async_event(ctx, &event)) {
			printf("event: %s\n", ibv_event_type_str(event.event_type));
			ibv_ack_async_event(&event);
		}
		while (ibv_poll_cq(cq, 1, &wc) > 0) {
			if ((int)wc.status != last_status)
				printf("status: %s\n", ibv_wc_status_str(wc.status));
			last_status = wc.status;
		}
	}
}

/* A command of ib_user_verbs.h by ioctl. */
static int invoke(int fd, uint64_t command, const void *in, size_t in_bytes, void *out, size_t out_bytes)
{
	struct {
		struct ib_uverbs_ioctl_hdr hdr;
		struct ib_uverbs_attr attrs[3];
	} r = {
		.hdr = { .length = sizeof(r), .object_id = UVERBS_OBJECT_DEVICE, .method_id = UVERBS_METHOD_INVOKE_WRITE,
			 .num_attrs = 3, .driver_id = RDMA_DRIVER_RXE },
		.attrs = {
			{ .attr_id = UVERBS_ATTR_WRITE_CMD, .len = sizeof(command), .flags = UVERBS_ATTR_F_MANDATORY, .data = command },
			{ .attr_id = UVERBS_ATTR_CORE_IN, .len = in_bytes, .flags = UVERBS_ATTR_F_MANDATORY, .data = (uintptr_t)in },
			{ .attr_id = UVERBS_ATTR_CORE_OUT, .len = out_bytes, .flags = UVERBS_ATTR_F_MANDATORY, .data = (uintptr_t)out },
		},
	};

	/* Input of 8 bytes and less stands in the attribute itself. */
	if (in_bytes <= 8)
		memcpy(&r.attrs[1].data, in, in_bytes);
	return ioctl(fd, RDMA_VERBS_IOCTL, &r);
}

static void use_passed(const char *node)
{
	struct ib_uverbs_ioctl_hdr context = { .length = sizeof(context), .object_id = UVERBS_OBJECT_DEVICE,
					       .method_id = UVERBS_METHOD_GET_CONTEXT, .driver_id = RDMA_DRIVER_RXE };
	struct ib_uverbs_alloc_pd pd = {};
	struct ib_uverbs_alloc_pd_resp made;
	struct {
		struct ib_uverbs_cmd_hdr hdr;
		struct ib_uverbs_alloc_pd pd;
	} written = { .hdr = { IB_USER_VERBS_CMD_ALLOC_PD, sizeof(written) / 4, sizeof(made) / 4 } };
	int fd = open(node, O_RDWR | O_CLOEXEC);

	CHECK(fd >= 0 && !setgroups(0, NULL) && !setresgid(NOBODY, NOBODY, NOBODY) && !setresuid(NOBODY, NOBODY, NOBODY));
	say("open", open(node, O_RDWR | O_CLOEXEC) < 0);
	say("context by ioctl", ioctl(fd, RDMA_VERBS_IOCTL, &context));
	say("PD by ioctl", invoke(fd, IB_USER_VERBS_CMD_ALLOC_PD, &pd, sizeof(pd), &made, sizeof(made)));
	written.pd.response = (uintptr_t)&made;
	say("PD by write", write(fd, &written, sizeof(written)) < 0);
}

int main(int argc, char **argv)
{
	setvbuf(stdout, NULL, _IOLBF, 0);
	if (argc == 4 && !strcmp(argv[1], "register"))
		register_memory(argv[2], strtoul(argv[3], NULL, 10));
	else if (argc == 3 && !strcmp(argv[1], "events"))
		print_events(argv[2]);
	else if (argc == 3 && !strcmp(argv[1], "passed"))
		use_passed(argv[2]);
	else
		return 2;
	return 0;
}
