/* SPDX-License-Identifier: Apache-2.0 OR MIT
 *
 * What rdma-core has added up to version 65: registration with attributes, buffers of the library, capabilities, and
 * calls that are refused as rdma-core refuses them for a provider without them. The functions are looked up, since older headers lack them.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <infiniband/verbs.h>
#include <stdint.h>
#include <string.h>

#include "check.h"

enum { IOVA = 1, ADDR = 2, FD = 4, FD_OFFSET = 8, DMAH = 16, BUF = 32, UNKNOWN = 64, LEN = 5000 };
/* IBV_EVENT_DEVICE_SPEED_CHANGE, IBV_ODP_SUPPORT_FLUSH, IBV_ODP_SUPPORT_ATOMIC_WRITE */
enum { SPEED_CHANGE = 20, ODP_FLUSH = 64, ODP_ATOMIC_WRITE = 128 };

/* struct ibv_mr_init_attr */
struct attr {
	size_t length;
	int access;
	uint64_t comp_mask, iova;
	void *addr;
	int fd;
	uint64_t fd_offset;
	void *dmah, *buf;
};

/* Calls a function of this name and version; all take at most five arguments, none of which is a floating one. */
static uint64_t call(const char *version, const char *name, uint64_t a, uint64_t b, uint64_t c, uint64_t d, uint64_t e)
{
	uint64_t (*f)(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t) = dlvsym(RTLD_DEFAULT, name, version);

	if (!f) {
		printf("%s@%s is missing\n", name, version);
		exit(1);
	}
	errno = 0;
	return f(a, b, c, d, e);
}

#define CALL3(version, name, a, b, c) call(version, name, (uintptr_t)(a), (uintptr_t)(b), (uintptr_t)(c), 0, 0)

static struct ibv_mr *reg(struct ibv_pd *pd, struct attr a)
{
	return (struct ibv_mr *)(uintptr_t)CALL3("IBVERBS_1.15", "ibv_reg_mr_ex", pd, &a, 0);
}

static void is_refused(struct ibv_pd *pd, uint64_t comp_mask, int why)
{
	static char memory[LEN];
	struct attr a = { LEN, IBV_ACCESS_LOCAL_WRITE, comp_mask, 0x10000, memory, 0, 0, NULL, NULL };

	CHECK(!reg(pd, a) && errno == why);
}

static void registers(struct ibv_pd *pd)
{
	static char memory[LEN];
	struct attr a = { LEN, IBV_ACCESS_LOCAL_WRITE, ADDR, 0x10000, memory, -1, 0, NULL, NULL };
	struct ibv_mr *mr = reg(pd, a);

	CHECK(mr && mr->addr == memory && mr->length == LEN && mr->pd == pd && mr->context == pd->context && mr->lkey);
	CHECK(!ibv_dereg_mr(mr));
	a.comp_mask |= IOVA;
	mr = reg(pd, a);
	CHECK(mr && mr->addr == memory && !ibv_dereg_mr(mr));
	is_refused(pd, 0, EINVAL);
	is_refused(pd, ADDR | FD_OFFSET, EINVAL);
	is_refused(pd, FD, EINVAL);
	is_refused(pd, FD | FD_OFFSET | IOVA | ADDR, EINVAL);
	/* The device imports no dmabuf, has no DMA handles, and knows no more. */
	is_refused(pd, FD | FD_OFFSET | IOVA, EOPNOTSUPP);
	is_refused(pd, ADDR | DMAH, EOPNOTSUPP);
	is_refused(pd, ADDR | UNKNOWN, EOPNOTSUPP);
}

static void buffers(struct ibv_pd *pd, struct ibv_pd *other)
{
	void *buf = NULL;
	char *memory = (char *)(uintptr_t)CALL3("IBVERBS_1.17", "ibv_alloc_buf", pd, LEN, &buf);
	struct attr a = { 100, IBV_ACCESS_LOCAL_WRITE, ADDR | BUF, 0, memory + 10, -1, 0, NULL, buf };
	struct ibv_mr *mr;

	CHECK(memory && buf && !((uintptr_t)memory & 4095));
	memset(memory, 1, LEN);
	mr = reg(pd, a);
	CHECK(mr && mr->addr == memory + 10 && mr->length == 100 && mr->pd == pd && !ibv_dereg_mr(mr));
	mr = (struct ibv_mr *)(uintptr_t)call("IBVERBS_1.17", "ibv_reg_buf_mr", (uintptr_t)pd, (uintptr_t)buf, (uintptr_t)memory,
					      LEN, IBV_ACCESS_LOCAL_WRITE);
	CHECK(mr && mr->addr == memory && mr->length == LEN && !ibv_dereg_mr(mr));
	CHECK(!reg(other, a) && errno == EINVAL);
	a.comp_mask = BUF;
	CHECK(!reg(pd, a) && errno == EINVAL);
	a = (struct attr){ LEN, IBV_ACCESS_LOCAL_WRITE, ADDR | BUF, 0, memory + 1, -1, 0, NULL, buf };
	CHECK(!reg(pd, a) && errno == EINVAL);
	CHECK((int)CALL3("IBVERBS_1.18", "ibv_export_buf_dmabuf_fd", buf, 0, 0) == -1 && errno == ENODATA);
	CHECK((CALL3("IBVERBS_1.17", "ibv_free_buf", buf, 0, 0), 1));
}

/* On-demand paging is there for all operations. */
static void paging(struct ibv_context *ctx)
{
	struct ibv_device_attr_ex attr;
	uint32_t both = ODP_FLUSH | ODP_ATOMIC_WRITE;

	CHECK(!ibv_query_device_ex(ctx, NULL, &attr));
	CHECK((attr.odp_caps.per_transport_caps.rc_odp_caps & both) == both && (attr.xrc_odp_caps & both) == both);
}

static void refusals(struct ibv_context *ctx, struct ibv_pd *pd)
{
	struct ibv_alloc_dm_attr dm_attr = { .length = 4096 };
	struct ibv_cq *cq = ibv_create_cq(ctx, 1, NULL, NULL, 0);
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .cap = { 1, 1, 1, 1, 0 } };
	struct ibv_qp *qp = ibv_create_qp(pd, &init);
	struct ibv_dm *dm = ibv_alloc_dm(ctx, &dm_attr);
	/* A counter or a handle begins with its context. */
	void *object[2] = { ctx, NULL };
	uint64_t room[2] = { 1, 1 };
	static const char *const counters[] = {
		"ibv_destroy_comp_cntr", "ibv_set_comp_cntr",  "ibv_set_err_comp_cntr",	 "ibv_inc_comp_cntr",
		"ibv_inc_err_comp_cntr", "ibv_read_comp_cntr", "ibv_read_err_comp_cntr",
	};

	CHECK(cq && qp && dm);
	CHECK((int)CALL3("IBVERBS_1.16", "ibv_query_port_speed", ctx, 1, room) == EOPNOTSUPP);
	CHECK((int)CALL3("IBVERBS_1.16", "ibv_dm_export_dmabuf_fd", dm, 0, 0) == -1 && errno == EOPNOTSUPP);
	CHECK(!CALL3("IBVERBS_1.15", "ibv_alloc_dmah", ctx, room, 0) && errno == EOPNOTSUPP);
	CHECK((int)CALL3("IBVERBS_1.15", "ibv_dealloc_dmah", object, 0, 0) == EOPNOTSUPP);
	CHECK((int)CALL3("IBVERBS_1.18", "_ibv_query_comp_cntr_caps", ctx, room, sizeof(room)) == EOPNOTSUPP);
	CHECK(!room[0] && !room[1]);
	CHECK(!CALL3("IBVERBS_1.18", "ibv_create_comp_cntr", ctx, room, 0) && errno == EOPNOTSUPP);
	for (unsigned i = 0; i < sizeof(counters) / sizeof(*counters); i++)
		CHECK((int)CALL3("IBVERBS_1.18", counters[i], object, room, 0) == EOPNOTSUPP);
	CHECK((int)CALL3("IBVERBS_1.18", "ibv_qp_attach_comp_cntr", qp, object, room) == EOPNOTSUPP);
	CHECK(!strcmp(ibv_event_type_str((enum ibv_event_type)SPEED_CHANGE), "Device link speed change"));
	CHECK(!ibv_free_dm(dm) && !ibv_destroy_qp(qp) && !ibv_destroy_cq(cq));
}

int main(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *ctx;
	struct ibv_pd *pd, *other;

	CHECK(list && list[0] && (ctx = ibv_open_device(list[0])));
	CHECK((pd = ibv_alloc_pd(ctx)) && (other = ibv_alloc_pd(ctx)));
	registers(pd);
	buffers(pd, other);
	paging(ctx);
	refusals(ctx, pd);
	CHECK(!ibv_dealloc_pd(other) && !ibv_dealloc_pd(pd) && !ibv_close_device(ctx));
	ibv_free_device_list(list);
	printf("all newer calls answered\n");
	return 0;
}
