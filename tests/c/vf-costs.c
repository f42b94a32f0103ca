/* SPDX-License-Identifier: Apache-2.0 OR MIT
 *
 * The control path of a verbs device, alone or by a vRNIC that has a VF.
 *
 *   vf-costs DEVICE times   prints names and numbers: medians of times in microseconds
 *   vf-costs DEVICE calls   for count-calls: MRs are registered and deregistered in section 1, and QPs are connected in
 *                           section 2, CALLS times each; in section 3, REQUESTS writes are posted and polled
 */
#include <infiniband/verbs.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check.h"
#include "times.h"

enum { PAGE = 4096, MIB = 1 << 20, LARGEST = 64 * MIB, CQES = 64, MORE_CQES = 256 };
enum { TIMES = 31, FEW = 5, CALLS = 20, REQUESTS = 1000 };
enum { ACCESS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE };
/* The system call of count-calls, and its sections. */
enum { SECTION = 1000, OTHER = 0, REGISTRATION = 1, CONNECTION = 2, REQUEST = 3 };
/* Time between connections, so that the virtual layer sleeps when the next message comes, us. */
enum { PAUSE_US = 20000 };

static struct ibv_device *device;
static struct ibv_context *ctx;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static union ibv_gid gid;
static int gid_index;
static char *memory;
static double times[16][TIMES];

static void open_device(const char *name)
{
	static const uint8_t v4[12] = { [10] = 0xff, 0xff };
	struct ibv_device **list = ibv_get_device_list(NULL);

	CHECK(list);
	for (; *list; list++)
		if (!strcmp(ibv_get_device_name(*list), name))
			device = *list;
	CHECK(device && (ctx = ibv_open_device(device)));
	/* The GID that is an IPv4 address. */
	for (;; gid_index++) {
		CHECK(gid_index < 32 && !ibv_query_gid(ctx, 1, gid_index, &gid));
		if (!memcmp(&gid, v4, sizeof(v4)))
			break;
	}
	CHECK((pd = ibv_alloc_pd(ctx)) && (cq = ibv_create_cq(ctx, CQES, NULL, NULL, 0)));
	memory = mmap(NULL, LARGEST, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
	CHECK(memory != MAP_FAILED);
}

static struct ibv_qp *make_qp(void)
{
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .cap = { 16, 16, 1, 1, 0 } };
	struct ibv_qp *qp = ibv_create_qp(pd, &init);

	CHECK(qp);
	return qp;
}

static void to_init(struct ibv_qp *qp)
{
	struct ibv_qp_attr init = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = ACCESS };

	CHECK(!ibv_modify_qp(qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
}

/* Connects a QP to itself. */
static void to_rts(struct ibv_qp *qp)
{
	struct ibv_qp_attr rtr = { .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = qp->qp_num,
				   .max_dest_rd_atomic = 1, .min_rnr_timer = 12,
				   .ah_attr = { .is_global = 1, .port_num = 1,
						.grh = { .dgid = gid, .sgid_index = gid_index, .hop_limit = 4 } } };
	struct ibv_qp_attr rts = { .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7,
				   .max_rd_atomic = 1 };

	CHECK(!ibv_modify_qp(qp, &rtr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
					       IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
	CHECK(!ibv_modify_qp(qp, &rts, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
					       IBV_QP_MAX_QP_RD_ATOMIC));
}

/* Notes the time since `since` as the `i`th of a column. Returns the time. */
static double note(int column, int i, double since)
{
	double now = seconds();

	times[column][i] = now - since;
	return seconds();
}

static void say(const char *name, int column, int n)
{
	qsort(times[column], n, sizeof(double), ascending);
	printf("%s %.3f\n", name, times[column][n / 2] * 1e6);
}

static void time_context(void)
{
	for (int i = 0; i < FEW; i++) {
		double t = seconds();
		struct ibv_context *c = ibv_open_device(device);

		CHECK(c);
		t = note(0, i, t);
		CHECK(!ibv_close_device(c));
		note(1, i, t);
	}
	say("context-create", 0, FEW);
	say("context-destroy", 1, FEW);
}

static void time_objects(void)
{
	for (int i = 0; i < TIMES; i++) {
		double t = seconds();
		struct ibv_pd *p = ibv_alloc_pd(ctx);
		struct ibv_cq *c;
		struct ibv_qp *q;

		CHECK(p);
		t = note(0, i, t);
		CHECK(!ibv_dealloc_pd(p));
		t = note(1, i, t);
		c = ibv_create_cq(ctx, CQES, NULL, NULL, 0);
		CHECK(c);
		t = note(2, i, t);
		CHECK(!ibv_resize_cq(c, MORE_CQES));
		t = note(3, i, t);
		CHECK(!ibv_destroy_cq(c));
		t = note(4, i, t);
		q = make_qp();
		t = note(5, i, t);
		to_init(q);
		t = note(6, i, t);
		to_rts(q);
		t = note(7, i, t);
		CHECK(!ibv_destroy_qp(q));
		note(8, i, t);
	}
	say("pd-create", 0, TIMES);
	say("pd-destroy", 1, TIMES);
	say("cq-create", 2, TIMES);
	say("cq-modify", 3, TIMES);
	say("cq-destroy", 4, TIMES);
	say("qp-create", 5, TIMES);
	say("qp-init", 6, TIMES);
	say("qp-rts", 7, TIMES);
	say("qp-destroy", 8, TIMES);
}

static void time_registration(const char *name, size_t bytes, int n)
{
	char line[32];

	for (int i = 0; i < n; i++) {
		double t = seconds();
		struct ibv_mr *mr = ibv_reg_mr(pd, memory, bytes, ACCESS);

		CHECK(mr);
		t = note(0, i, t);
		CHECK(!ibv_dereg_mr(mr));
		note(1, i, t);
	}
	snprintf(line, sizeof(line), "mr-%s-create", name);
	say(line, 0, n);
	snprintf(line, sizeof(line), "mr-%s-destroy", name);
	say(line, 1, n);
}

/* Writes to its own memory. */
static void write_once(struct ibv_qp *qp, struct ibv_mr *mr)
{
	struct ibv_sge sge = { .addr = (uintptr_t)memory, .length = 64, .lkey = mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
				  .send_flags = IBV_SEND_SIGNALED,
				  .wr.rdma = { .remote_addr = (uintptr_t)memory + PAGE / 2, .rkey = mr->rkey } };
	struct ibv_send_wr *bad;
	struct ibv_wc wc;
	int n;

	CHECK(!ibv_post_send(qp, &wr, &bad));
	while (!(n = ibv_poll_cq(cq, 1, &wc)))
		;
	CHECK(n == 1 && wc.status == IBV_WC_SUCCESS);
}

static void count_calls(void)
{
	struct ibv_qp *qps[CALLS + 1];
	struct ibv_mr *mr;
	double began;

	for (int i = 0; i <= CALLS; i++)
		to_init(qps[i] = make_qp());
	/* The first of each may load what the others use. */
	to_rts(qps[CALLS]);
	CHECK(!ibv_dereg_mr(ibv_reg_mr(pd, memory, PAGE, ACCESS)));
	syscall(SECTION, REGISTRATION);
	for (int i = 0; i < CALLS; i++) {
		struct ibv_mr *mr = ibv_reg_mr(pd, memory, PAGE, ACCESS);

		CHECK(mr && !ibv_dereg_mr(mr));
	}
	began = seconds();
	for (int i = 0; i < CALLS; i++) {
		syscall(SECTION, OTHER);
		usleep(PAUSE_US);
		syscall(SECTION, CONNECTION);
		to_rts(qps[i]);
	}
	syscall(SECTION, OTHER);
	CHECK((mr = ibv_reg_mr(pd, memory, PAGE, ACCESS)));
	write_once(qps[CALLS], mr);
	syscall(SECTION, REQUEST);
	for (int i = 0; i < REQUESTS; i++)
		write_once(qps[CALLS], mr);
	syscall(SECTION, OTHER);
	printf("each %d times, connections in %.0f seconds\n", CALLS, seconds() - began);
}

int main(int argc, char **argv)
{
	CHECK(argc == 3);
	open_device(argv[1]);
	if (!strcmp(argv[2], "calls")) {
		count_calls();
		return 0;
	}
	time_context();
	time_objects();
	time_registration("4096", PAGE, TIMES);
	time_registration("1048576", MIB, TIMES);
	time_registration("67108864", LARGEST, FEW);
	return 0;
}
