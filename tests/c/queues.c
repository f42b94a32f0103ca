/* SPDX-License-Identifier: Apache-2.0 OR MIT
 *
 * Queues as programs use them, from a device to itself: the extended CQ and QP, a resized CQ, QPs that are
 * reset and destroyed while completions wait, shared receives, datagrams, events, and threads that share a CQ.
 * It runs in containers and in guests.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "check.h"

enum { MEMORY = 1 << 16, PAGE = 4096, THREADS = 4, ROUNDS = 200, BURST = 20, LIMIT_S = 20, QKEY = 1 };
enum { ACCESS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ };

static char memory[MEMORY] __attribute__((aligned(PAGE)));
static struct ibv_context *ctx;
static struct ibv_pd *pd;
static struct ibv_mr *mr;
static union ibv_gid gid;
static int gid_index;

static time_t now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec;
}

/* The GID that is an IPv4 address. */
static void find_gid(void)
{
	static const uint8_t v4[12] = { [10] = 0xff, 0xff };

	while (memcmp(&gid, v4, sizeof(v4)) || !gid.raw[12])
		CHECK(!ibv_query_gid(ctx, 1, ++gid_index - 1, &gid) && gid_index < 32);
	gid_index--;
}

static void to(struct ibv_qp *qp, uint32_t peer)
{
	struct ibv_ah_attr path = { .is_global = 1, .port_num = 1, .grh = { .dgid = gid, .sgid_index = gid_index, .hop_limit = 4 } };
	struct ibv_qp_attr init = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = ACCESS, .qkey = QKEY };
	struct ibv_qp_attr rtr = { .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = peer, .max_dest_rd_atomic = 4,
				   .min_rnr_timer = 1, .ah_attr = path };
	struct ibv_qp_attr rts = { .qp_state = IBV_QPS_RTS, .timeout = 18, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 4 };
	int rc = qp->qp_type == IBV_QPT_RC;

	CHECK(!ibv_modify_qp(qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | (rc ? IBV_QP_ACCESS_FLAGS : IBV_QP_QKEY)));
	CHECK(!ibv_modify_qp(qp, &rtr, !rc ? IBV_QP_STATE :
			     IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
			     IBV_QP_MIN_RNR_TIMER));
	CHECK(!ibv_modify_qp(qp, &rts, IBV_QP_STATE | IBV_QP_SQ_PSN | (!rc ? 0 : IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
			     IBV_QP_MAX_QP_RD_ATOMIC)));
}

static struct ibv_qp *make(struct ibv_cq *cq, enum ibv_qp_type type, struct ibv_srq *srq)
{
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .srq = srq, .qp_type = type, .cap = { 64, 64, 2, 2, 64 } };
	struct ibv_qp *qp = ibv_create_qp(pd, &init);

	CHECK(qp && init.cap.max_inline_data >= 64);
	CHECK(!ibv_qp_to_qp_ex(qp));
	return qp;
}

static void receive(struct ibv_qp *qp, struct ibv_srq *srq, char *at, int length)
{
	struct ibv_sge sge = { (uintptr_t)at, length, mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = 7, .sg_list = &sge, .num_sge = 1 }, *bad;

	CHECK(!(srq ? ibv_post_srq_recv(srq, &wr, &bad) : ibv_post_recv(qp, &wr, &bad)));
}

static void send_from(struct ibv_qp *qp, char *at, int length, uint32_t lkey)
{
	struct ibv_sge sge = { (uintptr_t)at, length, lkey };
	struct ibv_send_wr wr = { .wr_id = 8, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED };
	struct ibv_send_wr *bad;

	CHECK(!ibv_post_send(qp, &wr, &bad));
}

/* A message from one QP to the other. */
static void message(struct ibv_qp *from, struct ibv_qp *to_qp)
{
	receive(to_qp, NULL, memory, 64);
	send_from(from, memory + PAGE, 64, mr->lkey);
}

/* Takes `n` completions, which must succeed. */
static void take(struct ibv_cq *cq, int n)
{
	time_t begin = now();
	struct ibv_wc wc;

	while (n > 0) {
		int got = ibv_poll_cq(cq, 1, &wc);

		CHECK(got >= 0 && now() - begin < LIMIT_S);
		if (!got)
			sched_yield();
		CHECK(!got || wc.status == IBV_WC_SUCCESS);
		n -= got;
	}
}

static void wait_a_moment(void)
{
	nanosleep(&(struct timespec){ .tv_nsec = 300000000 }, NULL);
}

static void poll_extended(struct ibv_cq_ex *cq, uint64_t wr_id, enum ibv_wc_opcode opcode)
{
	struct ibv_poll_cq_attr attr = { 0 };
	time_t begin = now();
	int r;

	while ((r = ibv_start_poll(cq, &attr)) == ENOENT) {
		CHECK(now() - begin < LIMIT_S);
		sched_yield();
	}
	CHECK(!r && cq->status == IBV_WC_SUCCESS && cq->wr_id == wr_id && ibv_wc_read_opcode(cq) == opcode);
	ibv_end_poll(cq);
}

static void extended(void)
{
	struct ibv_cq_init_attr_ex cq_attr = { .cqe = 100, .wc_flags = IBV_WC_STANDARD_FLAGS };
	struct ibv_cq_ex *cq = ibv_create_cq_ex(ctx, &cq_attr);
	struct ibv_qp_init_attr_ex attr = { .qp_type = IBV_QPT_RC, .cap = { 16, 16, 2, 2, 64 }, .pd = pd,
					    .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
					    .send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_READ };
	struct ibv_qp_ex *x;
	struct ibv_qp *qp;

	CHECK(cq);
	attr.send_cq = attr.recv_cq = ibv_cq_ex_to_cq(cq);
	CHECK((qp = ibv_create_qp_ex(ctx, &attr)) && (x = ibv_qp_to_qp_ex(qp)));
	to(qp, qp->qp_num);
	ibv_wr_start(x);
	x->wr_id = 1;
	x->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_rdma_write(x, mr->rkey, (uintptr_t)memory + 100);
	ibv_wr_set_inline_data(x, "hello", 5);
	x->wr_id = 2;
	ibv_wr_rdma_read(x, mr->rkey, (uintptr_t)memory + 100);
	ibv_wr_set_sge(x, mr->lkey, (uintptr_t)memory + 200, 5);
	CHECK(!ibv_wr_complete(x));
	poll_extended(cq, 1, IBV_WC_RDMA_WRITE);
	poll_extended(cq, 2, IBV_WC_RDMA_READ);
	CHECK(!memcmp(memory + 200, "hello", 5));
	ibv_wr_start(x);
	ibv_wr_rdma_write(x, mr->rkey, (uintptr_t)memory + 100);
	ibv_wr_abort(x);
	CHECK(!ibv_destroy_qp(qp) && !ibv_destroy_cq(ibv_cq_ex_to_cq(cq)));
}

static void changes(void)
{
	struct ibv_cq *cq = ibv_create_cq(ctx, 64, NULL, NULL, 0);
	struct ibv_qp *a = make(cq, IBV_QPT_RC, NULL), *b = make(cq, IBV_QPT_RC, NULL);
	struct ibv_qp_attr reset = { .qp_state = IBV_QPS_RESET }, attr;
	struct ibv_qp_init_attr init;
	struct ibv_wc wc[4];

	to(a, b->qp_num);
	to(b, a->qp_num);
	for (int i = 0; i < BURST; i++)
		message(a, b);
	wait_a_moment();
	CHECK(ibv_resize_cq(cq, BURST));
	CHECK(!ibv_resize_cq(cq, 500) && cq->cqe >= 500);
	for (int i = 0; i < BURST; i++)
		message(a, b);
	take(cq, 4 * BURST);

	/* A library may also keep the completion of a destroyed QP. */
	message(a, b);
	wait_a_moment();
	CHECK(!ibv_destroy_qp(b));
	CHECK(ibv_poll_cq(cq, 4, wc) >= 1);
	send_from(a, memory, 64, mr->lkey);
	CHECK(!ibv_modify_qp(a, &reset, IBV_QP_STATE) && !ibv_poll_cq(cq, 4, wc));
	to(a, a->qp_num);
	message(a, a);
	take(cq, 2);

	send_from(a, memory, 64, mr->lkey ^ 0x100);
	while (!ibv_poll_cq(cq, 1, wc))
		sched_yield();
	CHECK(wc[0].status == IBV_WC_LOC_PROT_ERR && wc[0].wr_id == 8);
	CHECK(!ibv_query_qp(a, &attr, IBV_QP_STATE, &init) && attr.qp_state == IBV_QPS_ERR);
	CHECK(ibv_destroy_cq(cq) == EBUSY && ibv_dealloc_pd(pd) == EBUSY);
	CHECK(!ibv_destroy_qp(a) && !ibv_destroy_cq(cq));
}

static void shared_receives(void)
{
	struct ibv_cq *cq = ibv_create_cq(ctx, 64, NULL, NULL, 0);
	struct ibv_srq_init_attr init = { .attr = { 32, 2, 0 } };
	struct ibv_srq *srq = ibv_create_srq(pd, &init);
	struct ibv_srq_attr attr = { .srq_limit = 5 };
	struct pollfd fd = { .fd = ctx->async_fd, .events = POLLIN };
	struct ibv_async_event event;
	struct ibv_qp *qp;

	CHECK(srq);
	qp = make(cq, IBV_QPT_RC, srq);
	to(qp, qp->qp_num);
	for (int i = 0; i < 10; i++)
		receive(NULL, srq, memory, 64);
	CHECK(!ibv_modify_srq(srq, &attr, IBV_SRQ_LIMIT));
	attr.srq_limit = 0;
	CHECK(!ibv_query_srq(srq, &attr) && attr.srq_limit == 5);
	for (int i = 0; i < 8; i++)
		send_from(qp, memory + PAGE, 64, mr->lkey);
	take(cq, 16);
	CHECK(poll(&fd, 1, LIMIT_S * 1000) == 1 && !ibv_get_async_event(ctx, &event));
	CHECK(event.event_type == IBV_EVENT_SRQ_LIMIT_REACHED && event.element.srq == srq);
	ibv_ack_async_event(&event);
	CHECK(!ibv_destroy_qp(qp) && !ibv_destroy_srq(srq) && !ibv_destroy_cq(cq));
}

static void datagrams(void)
{
	struct ibv_comp_channel *channel = ibv_create_comp_channel(ctx);
	struct ibv_cq *cq = ibv_create_cq(ctx, 8, &gid, channel, 0), *got;
	struct ibv_qp *qp = make(cq, IBV_QPT_UD, NULL);
	struct ibv_ah_attr path = { .is_global = 1, .port_num = 1, .grh = { .dgid = gid, .sgid_index = gid_index, .hop_limit = 4 } };
	struct ibv_ah *ah = ibv_create_ah(pd, &path);
	struct ibv_sge sge = { (uintptr_t)memory + PAGE, 32, mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND, .wr.ud = { ah, qp->qp_num, QKEY } }, *bad;
	union ibv_gid group = { .raw = { 0xff, 0x0e, [10] = 0xff, 0xff, 239, 1, 2, 3 } };
	void *context;
	struct ibv_wc wc;

	CHECK(ah);
	to(qp, 0);
	receive(qp, NULL, memory, 300);
	CHECK(!ibv_req_notify_cq(cq, 0) && !ibv_post_send(qp, &wr, &bad));
	CHECK(!ibv_get_cq_event(channel, &got, &context) && got == cq && context == &gid);
	ibv_ack_cq_events(cq, 1);
	CHECK(ibv_poll_cq(cq, 1, &wc) == 1 && wc.status == IBV_WC_SUCCESS && wc.byte_len == sizeof(struct ibv_grh) + 32);
	CHECK(wc.wc_flags & IBV_WC_GRH && wc.src_qp == qp->qp_num);
	CHECK(!ibv_init_ah_from_wc(ctx, 1, &wc, (struct ibv_grh *)memory, &path) && !memcmp(&path.grh.dgid, &gid, sizeof(gid)));
	CHECK(!ibv_attach_mcast(qp, &group, 0) && !ibv_detach_mcast(qp, &group, 0));
	CHECK(!ibv_destroy_ah(ah) && !ibv_destroy_qp(qp) && !ibv_destroy_cq(cq) && !ibv_destroy_comp_channel(channel));
}

/* The CQ of all threads, and the number of completed WRITEs of each, whichever thread polled them. */
static struct ibv_cq *common;
static int completed[THREADS];

static void *writer(void *p)
{
	long t = (long)p;
	char *from = memory + t * PAGE, *into = from + PAGE / 2;
	struct ibv_sge sge = { (uintptr_t)from, 64, mr->lkey };
	struct ibv_send_wr wr = { .wr_id = t, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
				  .send_flags = IBV_SEND_SIGNALED, .wr.rdma = { (uintptr_t)into, mr->rkey } }, *bad;
	struct ibv_qp *qp = make(common, IBV_QPT_RC, NULL);
	time_t begin = now();
	struct ibv_wc wc;

	to(qp, qp->qp_num);
	for (int i = 0; i < ROUNDS; i++) {
		memset(from, i, 64);
		CHECK(!ibv_post_send(qp, &wr, &bad));
		while (__atomic_load_n(&completed[t], __ATOMIC_SEQ_CST) == i) {
			int got = ibv_poll_cq(common, 1, &wc);

			CHECK(got >= 0 && now() - begin < 2 * LIMIT_S);
			if (!got)
				sched_yield();
			CHECK(!got || (wc.status == IBV_WC_SUCCESS && wc.wr_id < THREADS));
			if (got)
				__atomic_fetch_add(&completed[wc.wr_id], 1, __ATOMIC_SEQ_CST);
		}
		CHECK(!memcmp(from, into, 64));
	}
	CHECK(!ibv_destroy_qp(qp));
	return NULL;
}

static void threads(void)
{
	pthread_t all[THREADS];

	CHECK((common = ibv_create_cq(ctx, 200, NULL, NULL, 0)));
	for (long t = 0; t < THREADS; t++)
		CHECK(!pthread_create(&all[t], NULL, writer, (void *)t));
	for (int t = 0; t < THREADS; t++)
		pthread_join(all[t], NULL);
	CHECK(!ibv_destroy_cq(common));
}

int main(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);

	CHECK(list && list[0] && (ctx = ibv_open_device(list[0])));
	find_gid();
	CHECK((pd = ibv_alloc_pd(ctx)) && (mr = ibv_reg_mr(pd, memory, MEMORY, ACCESS)));
	extended();
	changes();
	shared_receives();
	datagrams();
	threads();
	CHECK(!ibv_reg_mr(pd, (void *)PAGE, PAGE, ACCESS));
	CHECK(!ibv_dereg_mr(mr) && !ibv_dealloc_pd(pd) && !ibv_close_device(ctx));
	ibv_free_device_list(list);
	puts("all queues worked");
	return 0;
}
