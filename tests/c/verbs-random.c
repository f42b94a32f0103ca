/* SPDX-License-Identifier: Apache-2.0 OR MIT
 *
 * Calls the functions of libibverbs and librdmacm with random arguments, valid and not: objects of two contexts
 * are mixed, attributes are extreme, states are wrong. Every call returns success or an errno, objects in use
 * cannot be destroyed, at the end all objects can be destroyed, and data still arrives. Under valgrind it also
 * finds damage to memory.
 *
 *   verbs-random SEED STEPS
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <netinet/tcp.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>
#include <rdma/rsocket.h>

#define MANY 12
#define BYTES (1 << 20)
#define MAX_ERRNO 4095

static unsigned long long seed, state;
static long step;
static const char *last = "none";

#define CHECK(c) do { if (!(c)) { \
	fprintf(stderr, "%s:%d: %s (seed %llu, step %ld, call %s, errno %d)\n", __FILE__, __LINE__, #c, seed, step, last, errno); \
	exit(1); } } while (0)

static unsigned long long rnd64(void)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return state;
}

static unsigned rnd(unsigned n)
{
	return (rnd64() >> 20) % n;
}

/* A value that is small, at a limit, or random. */
static unsigned long long odd(void)
{
	static const unsigned long long border[] = { 0, 1, 2, 255, 256, 4095, 4096, 4097, 65535, 65536, 0x7fffffff, 0x80000000,
						     0xffffffff, 1ull << 32, 1ull << 63, ~0ull };

	switch (rnd(3)) {
	case 0:
		return rnd(20);
	case 1:
		return border[rnd(sizeof(border) / sizeof(*border))];
	default:
		return rnd64();
	}
}

/* `usual`, or one time in `n` a random value. */
#define MOSTLY(usual, n) (rnd(n) ? (usual) : odd())

/* The objects of one type, in no order. */
struct pool {
	void *at[MANY];
	int n;
};

static struct pool pds, mrs, cqs, cqxs, channels, qps, srqs, ahs, mws, dms, xrcds, tds, ids, queues, socks;
static struct ibv_context *ctx[2];
static char *arena, *hole;

static void *pick(struct pool *p)
{
	return p->n ? p->at[rnd(p->n)] : NULL;
}

static void keep(struct pool *p, void *x)
{
	if (!x) {
		CHECK(errno > 0 && errno < MAX_ERRNO);
		return;
	}
	CHECK(p->n < MANY);
	p->at[p->n++] = x;
}

static void forget(struct pool *p, void *x)
{
	for (int i = 0; i < p->n; i++)
		if (p->at[i] == x)
			p->at[i] = p->at[--p->n];
}

/* Checks a result in the style of libibverbs: 0 or an errno. */
static int code(int r)
{
	CHECK(r >= 0 && r < MAX_ERRNO);
	return r;
}

/* Checks a result in the style of librdmacm and of some older functions: 0, or -1 and errno. */
static int minus(int r)
{
	CHECK(r == 0 || (r == -1 && errno > 0 && errno < MAX_ERRNO));
	return r;
}

static struct ibv_context *any_ctx(void)
{
	return ctx[rnd(2)];
}

static struct ibv_cq *any_cq(void)
{
	struct ibv_cq_ex *x = rnd(3) ? NULL : pick(&cqxs);

	return x ? ibv_cq_ex_to_cq(x) : pick(&cqs);
}

/* A random address: in the arena, across its end, or without memory. */
static void *any_addr(void)
{
	switch (rnd(8)) {
	case 0:
		return hole + rnd(8192);
	case 1:
		return arena + BYTES - rnd(64);
	default:
		return arena + rnd(BYTES);
	}
}

static size_t any_len(void)
{
	return MOSTLY(rnd(BYTES / 2), 6);
}

static void memory(void)
{
	struct ibv_pd *pd = pick(&pds);
	struct ibv_mr *mr = pick(&mrs);
	struct ibv_dm *dm = pick(&dms);
	struct ibv_mw *mw = pick(&mws);
	struct ibv_qp *qp = pick(&qps);
	struct ibv_sge range = { (uintptr_t)any_addr(), rnd(70000), mr ? mr->lkey : 0 };
	struct ibv_alloc_dm_attr dm_attr = { MOSTLY(rnd(10000), 4), MOSTLY(3, 4), MOSTLY(0, 4) };
	/* Never the implicit MR with write access, because it covers all memory of this program. */
	unsigned access = MOSTLY(rnd(64), 4) & ~IBV_ACCESS_ON_DEMAND;
	char buf[256] = "";
	struct ibv_mw_bind bind = { .wr_id = 1, .send_flags = MOSTLY(IBV_SEND_SIGNALED, 3) };

	switch (rnd(14)) {
	case 0: case 1: case 2: case 3:
		last = "reg_mr";
		if (pd && mrs.n < MANY)
			keep(&mrs, !rnd(8) ? ibv_alloc_null_mr(pd) : rnd(2) ? ibv_reg_mr(pd, any_addr(), any_len(), access)
					  : ibv_reg_mr_iova(pd, any_addr(), any_len(), odd(), access));
		break;
	case 4: case 5:
		last = "dereg_mr";
		if (mr && !code(ibv_dereg_mr(mr)))
			forget(&mrs, mr);
		break;
	case 6:
		last = "rereg_mr";
		if (mr)
			CHECK(ibv_rereg_mr(mr, MOSTLY(rnd(8), 4), pd, any_addr(), any_len(), access) >= -4);
		break;
	case 7:
		last = "advise_mr";
		if (pd)
			code(ibv_advise_mr(pd, MOSTLY(rnd(3), 3), MOSTLY(rnd(2), 4), &range, rnd(2)));
		break;
	case 8:
		last = "alloc_dm";
		if (dms.n < MANY)
			keep(&dms, ibv_alloc_dm(any_ctx(), &dm_attr));
		break;
	case 9:
		last = "dm";
		if (dm && rnd(2))
			code(ibv_memcpy_to_dm(dm, MOSTLY(rnd(8192), 4), buf, rnd(sizeof(buf))));
		else if (dm)
			code(ibv_memcpy_from_dm(buf, dm, MOSTLY(rnd(8192), 4), rnd(sizeof(buf))));
		if (dm && !rnd(3) && !code(ibv_free_dm(dm)))
			forget(&dms, dm);
		break;
	case 10:
		last = "reg_dm_mr";
		if (pd && dm && mrs.n < MANY)
			keep(&mrs, ibv_reg_dm_mr(pd, dm, MOSTLY(rnd(4096), 4), MOSTLY(rnd(4096), 4), access | IBV_ACCESS_ZERO_BASED));
		break;
	case 11:
		last = "alloc_mw";
		if (pd && mws.n < MANY)
			keep(&mws, ibv_alloc_mw(pd, MOSTLY(1 + rnd(2), 4)));
		break;
	case 12:
		last = "bind_mw";
		if (mw && mr && qp) {
			bind.bind_info = (struct ibv_mw_bind_info){ mr, (uintptr_t)any_addr(), any_len(), access };
			code(ibv_bind_mw(qp, mw, &bind));
		}
		break;
	default:
		last = "dealloc_mw";
		if (mw && !code(ibv_dealloc_mw(mw)))
			forget(&mws, mw);
	}
}

static void domains(void)
{
	struct ibv_pd *pd = pick(&pds);
	struct ibv_xrcd *xrcd = pick(&xrcds);
	struct ibv_td *td = pick(&tds);
	struct ibv_ah *ah = pick(&ahs);
	struct ibv_td_init_attr td_attr = { .comp_mask = MOSTLY(0, 4) };
	struct ibv_parent_domain_init_attr parent = { .pd = pd, .td = td, .comp_mask = MOSTLY(0, 4) & ~3u };
	struct ibv_xrcd_init_attr xa = { .comp_mask = MOSTLY(3, 4), .fd = MOSTLY(-1, 4), .oflags = MOSTLY(O_CREAT, 4) };
	struct ibv_ah_attr aa = { .is_global = MOSTLY(1, 4), .port_num = MOSTLY(1, 4), .sl = odd(),
				  .grh = { .sgid_index = MOSTLY(rnd(4), 4), .hop_limit = 64, .traffic_class = odd() } };

	ibv_query_gid(any_ctx(), 1, 0, &aa.grh.dgid);
	if (!rnd(4))
		aa.grh.dgid.global.interface_id = rnd64();
	switch (rnd(10)) {
	case 0: case 1:
		last = "alloc_pd";
		if (pds.n < MANY)
			keep(&pds, ibv_alloc_pd(any_ctx()));
		break;
	case 2:
		last = "dealloc_pd";
		if (pd && !code(ibv_dealloc_pd(pd)))
			forget(&pds, pd);
		break;
	case 3:
		last = "alloc_td";
		if (tds.n < MANY)
			keep(&tds, ibv_alloc_td(any_ctx(), &td_attr));
		break;
	case 4:
		last = "dealloc_td";
		if (td && !code(ibv_dealloc_td(td)))
			forget(&tds, td);
		break;
	case 5:
		last = "alloc_parent_domain";
		if (pds.n < MANY)
			keep(&pds, ibv_alloc_parent_domain(any_ctx(), &parent));
		break;
	case 6:
		last = "open_xrcd";
		if (xrcds.n < MANY)
			keep(&xrcds, ibv_open_xrcd(any_ctx(), &xa));
		break;
	case 7:
		last = "close_xrcd";
		if (xrcd && !code(ibv_close_xrcd(xrcd)))
			forget(&xrcds, xrcd);
		break;
	case 8:
		last = "create_ah";
		if (pd && ahs.n < MANY)
			keep(&ahs, ibv_create_ah(pd, &aa));
		break;
	default:
		last = "destroy_ah";
		if (ah && !code(ibv_destroy_ah(ah)))
			forget(&ahs, ah);
	}
}

static void drain_cq(struct ibv_cq *cq)
{
	struct ibv_wc wc[8];
	int n;

	for (int i = 0; i < 64 && (n = ibv_poll_cq(cq, 8, wc)) > 0; i++)
		while (n--)
			CHECK(ibv_wc_status_str(wc[n].status));
}

static void completion(void)
{
	struct ibv_comp_channel *ch = pick(&channels);
	struct ibv_cq *cq = any_cq(), *of;
	struct ibv_cq_ex *x = pick(&cqxs);
	struct ibv_cq_init_attr_ex xa = { .cqe = MOSTLY(1 + rnd(200), 4), .comp_vector = MOSTLY(0, 6), .wc_flags = MOSTLY(rnd(0x2000), 3),
					  .channel = rnd(2) ? ch : NULL, .comp_mask = MOSTLY(0, 4), .flags = MOSTLY(rnd(4), 4) };
	struct ibv_modify_cq_attr ma = { MOSTLY(IBV_CQ_ATTR_MODERATE, 4), { odd(), odd() } };
	struct ibv_poll_cq_attr pa = { MOSTLY(0, 4) };
	struct ibv_wc_tm_info tm;
	struct ibv_context *c = any_ctx();
	void *user;

	if (xa.comp_mask)
		xa.comp_mask &= ~(unsigned)IBV_CQ_INIT_ATTR_MASK_PD;
	switch (rnd(11)) {
	case 0:
		last = "create_comp_channel";
		if (channels.n < MANY) {
			ch = ibv_create_comp_channel(c);
			keep(&channels, ch);
			CHECK(!ch || !fcntl(ch->fd, F_SETFL, O_NONBLOCK));
		}
		break;
	case 1:
		last = "destroy_comp_channel";
		if (ch && !code(ibv_destroy_comp_channel(ch)))
			forget(&channels, ch);
		break;
	case 2: case 3:
		last = "create_cq";
		if (cqs.n < MANY)
			keep(&cqs, ibv_create_cq(c, MOSTLY(1 + rnd(200), 3), NULL, rnd(2) ? ch : NULL, MOSTLY(0, 6)));
		break;
	case 4:
		last = "create_cq_ex";
		if (cqxs.n < MANY)
			keep(&cqxs, ibv_create_cq_ex(c, &xa));
		break;
	case 5:
		last = "destroy_cq";
		if ((cq = pick(&cqs)) && !code(ibv_destroy_cq(cq)))
			forget(&cqs, cq);
		if (x && !rnd(3) && !code(ibv_destroy_cq(ibv_cq_ex_to_cq(x))))
			forget(&cqxs, x);
		break;
	case 6:
		last = "resize_cq";
		if (cq)
			code(ibv_resize_cq(cq, MOSTLY(1 + rnd(300), 3)));
		break;
	case 7:
		last = "modify_cq";
		if (cq)
			code(ibv_modify_cq(cq, &ma));
		break;
	case 8:
		last = "req_notify_cq";
		if (cq)
			code(ibv_req_notify_cq(cq, rnd(2)));
		if (ch && !minus(ibv_get_cq_event(ch, &of, &user)))
			ibv_ack_cq_events(of, 1);
		break;
	case 9:
		last = "poll_cq";
		if (cq)
			drain_cq(cq);
		break;
	default:
		last = "start_poll";
		if (!x || code(ibv_start_poll(x, &pa)))
			break;
		do {
			ibv_wc_read_opcode(x);
			ibv_wc_read_vendor_err(x);
			ibv_wc_read_tm_info(x, &tm);
			CHECK(ibv_wc_status_str(x->status));
		} while (!code(ibv_next_poll(x)));
		ibv_end_poll(x);
	}
}

/* Attributes for the next state of a QP. Some are made wrong now and then. */
static int any_qp_attr(struct ibv_qp *qp, struct ibv_qp_attr *a)
{
	static const int init = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT;
	static const int rtr = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
	static const int rts = IBV_QP_STATE | IBV_QP_SQ_PSN;
	int rc = qp->qp_type == IBV_QPT_RC, ud = qp->qp_type == IBV_QPT_UD;
	struct ibv_qp *peer = rnd(3) ? qp : pick(&qps);

	*a = (struct ibv_qp_attr){
		.cur_qp_state = rnd(8), .path_mtu = MOSTLY(1 + rnd(5), 8), .qkey = MOSTLY(0x1234, 8), .rq_psn = MOSTLY(0, 8),
		.sq_psn = MOSTLY(0, 8), .dest_qp_num = MOSTLY(peer->qp_num, 8), .qp_access_flags = MOSTLY(rnd(16), 8),
		.pkey_index = MOSTLY(0, 8), .port_num = MOSTLY(1, 8), .max_rd_atomic = MOSTLY(rnd(16), 8),
		.max_dest_rd_atomic = MOSTLY(rnd(16), 8), .min_rnr_timer = MOSTLY(1, 8), .timeout = MOSTLY(rnd(12), 8),
		.retry_cnt = MOSTLY(rnd(8), 8), .rnr_retry = MOSTLY(rnd(7), 8), .rate_limit = odd(),
		.cap = { odd(), odd(), odd(), odd(), odd() },
		.ah_attr = { .is_global = MOSTLY(1, 8), .port_num = MOSTLY(1, 8),
			     .grh = { .hop_limit = 64, .sgid_index = MOSTLY(rnd(2), 8) } },
	};
	ibv_query_gid(qp->context, 1, a->ah_attr.grh.sgid_index & 1, &a->ah_attr.grh.dgid);
	if (!rnd(6)) {
		a->qp_state = MOSTLY(rnd(8), 3);
		return MOSTLY(rnd(1 << 21), 2);
	}
	switch (qp->state) {
	case IBV_QPS_RESET:
		a->qp_state = IBV_QPS_INIT;
		return init | (ud ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS);
	case IBV_QPS_INIT:
		a->qp_state = IBV_QPS_RTR;
		return ud ? IBV_QP_STATE : rc ? rtr | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER : rtr;
	case IBV_QPS_RTR:
		a->qp_state = IBV_QPS_RTS;
		return rc ? rts | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC : rts;
	case IBV_QPS_RTS:
		a->qp_state = rnd(4) ? IBV_QPS_RTS : IBV_QPS_SQD;
		return IBV_QP_STATE | (rnd(4) ? 0 : IBV_QP_EN_SQD_ASYNC_NOTIFY);
	case IBV_QPS_SQD:
		a->qp_state = IBV_QPS_RTS;
		return IBV_QP_STATE;
	default:
		a->qp_state = rnd(2) ? IBV_QPS_RESET : IBV_QPS_RTS;
		return IBV_QP_STATE;
	}
}

static void qp_objects(void)
{
	struct ibv_pd *pd = pick(&pds);
	struct ibv_qp *qp = pick(&qps);
	struct ibv_srq *srq = pick(&srqs);
	struct ibv_xrcd *xrcd = pick(&xrcds);
	struct ibv_cq *cq = any_cq();
	struct ibv_qp_cap cap = { MOSTLY(1 + rnd(100), 5), MOSTLY(1 + rnd(100), 5), MOSTLY(1 + rnd(8), 5), MOSTLY(1 + rnd(8), 5),
				  MOSTLY(rnd(300), 5) };
	struct ibv_qp_init_attr ia = { .send_cq = any_cq(), .recv_cq = any_cq(), .srq = rnd(3) ? NULL : srq, .cap = cap,
				       .qp_type = MOSTLY(2 + rnd(3), 5), .sq_sig_all = rnd(2) };
	struct ibv_qp_init_attr_ex xa = { .send_cq = ia.send_cq, .recv_cq = ia.recv_cq, .srq = ia.srq, .cap = cap,
					  .qp_type = MOSTLY(2 + rnd(10), 5), .pd = pd, .xrcd = xrcd,
					  .comp_mask = MOSTLY(rnd(0x80), 6) & ~(unsigned)IBV_QP_INIT_ATTR_IND_TABLE,
					  .send_ops_flags = MOSTLY(rnd(0x400), 3), .create_flags = MOSTLY(0, 4) };
	struct ibv_srq_init_attr sa = { .attr = { MOSTLY(1 + rnd(100), 5), MOSTLY(1 + rnd(4), 5), odd() } };
	struct ibv_srq_init_attr_ex sx = { .attr = sa.attr, .comp_mask = MOSTLY(rnd(32), 3), .srq_type = MOSTLY(rnd(3), 4), .pd = pd,
					   .xrcd = xrcd, .cq = cq, .tm_cap = { MOSTLY(1 + rnd(8), 6), MOSTLY(1 + rnd(8), 6) } };
	struct ibv_srq_attr srq_attr = { odd(), odd(), odd() };
	struct ibv_qp_rate_limit_attr limit = { .rate_limit = rnd(2) ? 0 : 1000000 + odd(), .comp_mask = MOSTLY(0, 4) };
	struct ibv_qp_open_attr oa = { .comp_mask = MOSTLY(15, 4), .xrcd = xrcd, .qp_type = MOSTLY(IBV_QPT_XRC_RECV, 4) };
	struct ibv_qp_attr a;
	union ibv_gid gid = { .raw = { 0xff, 0x0e, [15] = rnd(8) } };
	unsigned number;
	int mask;

	switch (rnd(19)) {
	case 16:
		last = "modify_qp(sizes)";
		if (qp) {
			a = (struct ibv_qp_attr){ .cap = cap };
			code(ibv_modify_qp(qp, &a, IBV_QP_CAP | MOSTLY(0, 4)));
		}
		break;
	case 17:
		last = "modify_qp_rate_limit";
		if (qp)
			code(ibv_modify_qp_rate_limit(qp, &limit));
		break;
	case 18:
		last = "open_qp";
		if (qps.n < MANY) {
			oa.qp_num = qp ? qp->qp_num : odd();
			keep(&qps, ibv_open_qp(any_ctx(), &oa));
		}
		break;
	case 0: case 1: case 2:
		last = "create_qp";
		if (pd && qps.n < MANY)
			keep(&qps, ibv_create_qp(pd, &ia));
		break;
	case 3:
		last = "create_qp_ex";
		if (qps.n < MANY && (xa.comp_mask & IBV_QP_INIT_ATTR_PD || xrcd) && pd)
			keep(&qps, ibv_create_qp_ex(any_ctx(), &xa));
		break;
	case 4:
		last = "destroy_qp";
		if (qp && !rnd(2) && !code(ibv_destroy_qp(qp)))
			forget(&qps, qp);
		break;
	case 5: case 6: case 7: case 8: case 9:
		last = "modify_qp";
		if (qp) {
			mask = any_qp_attr(qp, &a);
			code(ibv_modify_qp(qp, &a, mask));
		}
		break;
	case 10:
		last = "query_qp";
		if (qp)
			code(ibv_query_qp(qp, &a, MOSTLY(rnd(1 << 21), 2), &ia));
		break;
	case 11:
		last = "create_srq";
		if (pd && srqs.n < MANY)
			keep(&srqs, rnd(2) ? ibv_create_srq(pd, &sa) : ibv_create_srq_ex(any_ctx(), &sx));
		break;
	case 12:
		last = "destroy_srq";
		if (srq && !rnd(2) && !code(ibv_destroy_srq(srq)))
			forget(&srqs, srq);
		break;
	case 13:
		last = "modify_srq";
		if (srq) {
			code(ibv_modify_srq(srq, &srq_attr, MOSTLY(rnd(4), 4)));
			code(ibv_query_srq(srq, &srq_attr));
			code(ibv_get_srq_num(srq, &number));
		}
		break;
	case 14:
		last = "attach_mcast";
		if (qp && rnd(2))
			code(ibv_attach_mcast(qp, &gid, MOSTLY(0xc001, 4)));
		else if (qp)
			code(ibv_detach_mcast(qp, &gid, MOSTLY(0xc001, 4)));
		break;
	default:
		last = "query_qp_data_in_order";
		if (qp)
			CHECK(ibv_query_qp_data_in_order(qp, MOSTLY(rnd(8), 3), rnd(2)) >= 0);
	}
}

static int any_sge(struct ibv_sge *s, int inlined)
{
	int n = rnd(5);

	for (int i = 0; i < n; i++) {
		struct ibv_mr *mr = pick(&mrs);

		/* The call itself reads inline data, so its memory must exist. */
		s[i].addr = inlined ? (uintptr_t)arena + rnd(BYTES / 2) : (uintptr_t)any_addr();
		s[i].length = inlined ? MOSTLY(rnd(200), 8) & 0xffff : MOSTLY(rnd(5000), 8);
		s[i].lkey = mr ? MOSTLY(mr->lkey, 8) : odd();
	}
	return n;
}

static void work(void)
{
	struct ibv_qp *qp = pick(&qps);
	struct ibv_srq *srq = pick(&srqs);
	struct ibv_mr *mr = pick(&mrs);
	struct ibv_mw *mw = pick(&mws);
	struct ibv_ah *ah = pick(&ahs);
	struct ibv_sge sge[3][8] = { 0 };
	struct ibv_send_wr wr[3] = { 0 }, *bad_send = NULL;
	struct ibv_recv_wr rr[3] = { 0 }, *bad_recv = NULL;
	int n = 1 + rnd(3), r;

	for (int i = 0; i < n; i++) {
		unsigned flags = MOSTLY(rnd(8), 8);

		wr[i].wr_id = rnd64();
		wr[i].next = i + 1 < n ? wr + i + 1 : NULL;
		wr[i].sg_list = sge[i];
		wr[i].opcode = MOSTLY(rnd(10), 8);
		wr[i].send_flags = flags;
		wr[i].num_sge = any_sge(sge[i], !!(flags & IBV_SEND_INLINE));
		wr[i].imm_data = rnd64();
		if (qp && qp->qp_type == IBV_QPT_UD) {
			if (!ah)
				return;
			wr[i].wr.ud.ah = ah;
			wr[i].wr.ud.remote_qpn = MOSTLY(qp->qp_num, 4);
			wr[i].wr.ud.remote_qkey = MOSTLY(0x1234, 4);
			wr[i].opcode = MOSTLY(IBV_WR_SEND, 4);
		} else if (wr[i].opcode == IBV_WR_BIND_MW) {
			if (!mw || !mr)
				return;
			wr[i].bind_mw.mw = mw;
			wr[i].bind_mw.rkey = MOSTLY(ibv_inc_rkey(mw->rkey), 4);
			wr[i].bind_mw.bind_info = (struct ibv_mw_bind_info){ mr, (uintptr_t)any_addr(), any_len(), rnd(64) };
		} else {
			wr[i].wr.atomic.remote_addr = (uintptr_t)any_addr() & ~(rnd(4) ? 7ull : 0);
			wr[i].wr.atomic.rkey = 0;
			if (wr[i].opcode == IBV_WR_ATOMIC_CMP_AND_SWP || wr[i].opcode == IBV_WR_ATOMIC_FETCH_AND_ADD)
				wr[i].wr.atomic.rkey = mr ? MOSTLY(mr->rkey, 4) : odd();
			else
				wr[i].wr.rdma.rkey = mr ? MOSTLY(mr->rkey, 4) : odd();
		}
		rr[i] = (struct ibv_recv_wr){ .wr_id = i, .next = i + 1 < n ? rr + i + 1 : NULL, .sg_list = sge[i], .num_sge = wr[i].num_sge };
		if (!rnd(12))
			wr[i].num_sge = rr[i].num_sge = odd();
		/* Lists have the stated length, or are too long for any QP. */
		if (wr[i].num_sge > 8 && wr[i].num_sge < 1000)
			wr[i].num_sge = rr[i].num_sge = 1000000;
	}
	if (qp && rnd(2)) {
		last = "post_send";
		if ((r = code(ibv_post_send(qp, wr, &bad_send))))
			CHECK(bad_send >= wr && bad_send < wr + n);
	} else if (qp && rnd(2)) {
		last = "post_recv";
		if ((r = code(ibv_post_recv(qp, rr, &bad_recv))))
			CHECK(bad_recv >= rr && bad_recv < rr + n);
	} else if (srq) {
		last = "post_srq_recv";
		if ((r = code(ibv_post_srq_recv(srq, rr, &bad_recv))))
			CHECK(bad_recv >= rr && bad_recv < rr + n);
	}
}

/* Buffers with tags, for SRQs that match them and for others. */
static void tags(void)
{
	static unsigned handles[8];
	struct ibv_srq *srq = pick(&srqs);
	struct ibv_sge sge[8] = { 0 };
	struct ibv_ops_wr op = { .wr_id = rnd64(), .opcode = MOSTLY(rnd(3), 8), .flags = MOSTLY(rnd(4), 8) }, *bad = NULL;
	unsigned *handle = handles + rnd(8);

	op.tm.unexpected_cnt = MOSTLY(rnd(4), 4);
	op.tm.handle = MOSTLY(*handle, 4);
	op.tm.add.recv_wr_id = rnd64();
	op.tm.add.sg_list = sge;
	op.tm.add.num_sge = any_sge(sge, 0);
	op.tm.add.tag = rnd(4);
	op.tm.add.mask = MOSTLY(3, 4);
	if (!srq)
		return;
	last = "post_srq_ops";
	if (code(ibv_post_srq_ops(srq, &op, &bad)))
		CHECK(bad == &op);
	else if (op.opcode == IBV_WR_TAG_ADD)
		*handle = op.tm.handle;
}

static void queries(void)
{
	struct ibv_context *c = any_ctx();
	struct ibv_device_attr_ex dx;
	struct ibv_query_device_ex_input in = { MOSTLY(0, 4) };
	struct ibv_device_attr d;
	struct ibv_port_attr p;
	struct ibv_gid_entry entries[4];
	struct ibv_values_ex values = { .comp_mask = odd() };
	struct ibv_async_event e;
	struct pollfd ready = { c->async_fd, POLLIN, 0 };
	union ibv_gid gid;
	__be16 pkey;
	int i = odd();

	last = "queries";
	code(ibv_query_device(c, &d));
	code(ibv_query_device_ex(c, &in, &dx));
	code(ibv_query_port(c, MOSTLY(1, 2), &p));
	CHECK(ibv_query_gid(c, MOSTLY(1, 3), odd(), &gid) <= 0);
	CHECK(ibv_query_pkey(c, MOSTLY(1, 3), odd(), &pkey) <= 0);
	CHECK(ibv_get_pkey_index(c, MOSTLY(1, 3), odd()) >= -1);
	code(ibv_query_gid_ex(c, MOSTLY(1, 3), odd(), entries, MOSTLY(0, 3)));
	CHECK(ibv_query_gid_table(c, entries, rnd(5), MOSTLY(0, 3)) < 5);
	code(ibv_query_rt_values_ex(c, &values));
	CHECK(ibv_node_type_str(i) && ibv_port_state_str(i) && ibv_event_type_str(i) && ibv_wc_status_str(i));
	CHECK(ibv_rate_to_mult(i) >= -1 && ibv_rate_to_mbps(i) >= -1 && mult_to_ibv_rate(i) >= 0 && mbps_to_ibv_rate(i) >= 0);
	while (poll(&ready, 1, 0) == 1 && ready.revents & POLLIN) {
		last = "get_async_event";
		CHECK(!ibv_get_async_event(c, &e));
		CHECK(ibv_event_type_str(e.event_type));
		ibv_ack_async_event(&e);
	}
}

/* Calls without a length assume the length of the address's family. */
union any_sockaddr {
	struct sockaddr_in v4;
	struct sockaddr_in6 v6;
};

static union any_sockaddr any_sockaddr(void)
{
	union any_sockaddr a = { .v6 = { 0 } };

	a.v4.sin_family = MOSTLY(AF_INET, 8);
	a.v4.sin_port = htons(MOSTLY(7000 + rnd(4), 3));
	a.v4.sin_addr.s_addr = rnd(4) ? inet_addr("10.0.0.1") : rnd(2) ? htonl(INADDR_ANY) : rnd64();
	return a;
}

static int destroy_id(struct rdma_cm_id *id)
{
	if (id->qp)
		rdma_destroy_qp(id);
	return minus(rdma_destroy_id(id));
}

static void connections(void)
{
	static const int spaces[] = { RDMA_PS_TCP, RDMA_PS_UDP, RDMA_PS_IB, RDMA_PS_IPOIB };
	struct rdma_event_channel *q = pick(&queues);
	struct rdma_cm_id *id = pick(&ids), *made = NULL;
	union any_sockaddr src = any_sockaddr(), dst = any_sockaddr();
	char private[256] = "private";
	struct rdma_conn_param param = { .private_data = private, .private_data_len = MOSTLY(rnd(50), 3), .responder_resources = odd(),
					 .initiator_depth = odd(), .retry_count = odd(), .rnr_retry_count = odd(), .qp_num = odd() };
	struct rdma_cm_event *e;
	struct pollfd ready = { q ? q->fd : -1, POLLIN, 0 };
	struct ibv_qp_attr a = { .qp_state = MOSTLY(rnd(4), 3) };
	struct ibv_qp_init_attr qa = { .cap = { MOSTLY(8, 8), MOSTLY(8, 8), MOSTLY(2, 8), MOSTLY(2, 8), 0 },
				       .qp_type = MOSTLY(IBV_QPT_RC + rnd(3), 8) };
	int mask, value = odd();

	if (!q || !rnd(20)) {
		last = "rdma_create_event_channel";
		if (queues.n < 3)
			keep(&queues, rdma_create_event_channel());
		return;
	}
	if (rnd(2) && poll(&ready, 1, 0) == 1) {
		last = "rdma_get_cm_event";
		CHECK(!rdma_get_cm_event(q, &e));
		CHECK(rdma_event_str(e->event));
		if (e->event == RDMA_CM_EVENT_CONNECT_REQUEST)
			made = e->id;
		minus(rdma_ack_cm_event(e));
		if (made && ids.n < MANY)
			keep(&ids, made);
		else if (made)
			minus(rdma_destroy_id(made));
		return;
	}
	if (!id || !rnd(6)) {
		last = "rdma_create_id";
		if (ids.n < MANY && !minus(rdma_create_id(q, &made, NULL, MOSTLY(spaces[rnd(4)], 6))))
			keep(&ids, made);
		return;
	}
	switch (rnd(18)) {
	case 0: case 1:
		last = "rdma_bind_addr";
		minus(rdma_bind_addr(id, (void *)&src));
		break;
	case 2: case 3:
		last = "rdma_resolve_addr";
		minus(rdma_resolve_addr(id, rnd(2) ? NULL : (void *)&src, (void *)&dst, MOSTLY(100, 3) & 0x7ff));
		break;
	case 4:
		last = "rdma_resolve_route";
		minus(rdma_resolve_route(id, 100));
		break;
	case 5:
		last = "rdma_listen";
		minus(rdma_listen(id, odd()));
		break;
	case 6: case 7:
		last = "rdma_connect";
		minus(rdma_connect(id, &param));
		break;
	case 8:
		last = "rdma_accept";
		minus(rdma_accept(id, rnd(4) ? &param : NULL));
		break;
	case 9:
		last = "rdma_reject";
		minus(rdma_reject(id, private, rnd(256)));
		break;
	case 10:
		last = "rdma_disconnect";
		minus(rdma_disconnect(id));
		break;
	case 11:
		last = "rdma_set_option";
		minus(rdma_set_option(id, MOSTLY(rnd(2), 4), MOSTLY(rnd(6), 4), &value, MOSTLY(rnd(5), 8) & 7 ? 4 : 1));
		break;
	case 12:
		last = "rdma_init_qp_attr";
		minus(rdma_init_qp_attr(id, &a, &mask));
		break;
	case 13:
		last = "rdma_establish";
		minus(rnd(2) ? rdma_establish(id) : rdma_notify(id, rnd(20)));
		break;
	case 14:
		last = "rdma_join_multicast";
		dst.v4.sin_addr.s_addr = inet_addr("239.1.2.3");
		minus(rnd(2) ? rdma_join_multicast(id, (void *)&dst, NULL) : rdma_leave_multicast(id, (void *)&dst));
		rdma_get_src_port(id);
		rdma_get_dst_port(id);
		break;
	case 15: case 16:
		last = "rdma_create_qp";
		if (rnd(3))
			minus(rdma_create_qp(id, rnd(3) ? NULL : pick(&pds), &qa));
		else if (id->qp)
			rdma_destroy_qp(id);
		break;
	default:
		last = "rdma_destroy_id";
		if (rnd(2) && !destroy_id(id))
			forget(&ids, id);
		else if (ids.n && pick(&ids) != id && rnd(2))
			minus(rdma_migrate_id(id, pick(&queues)));
	}
}

/* Checks a result in the style of sockets: bytes, or -1 and errno. */
static long bytes(long r, size_t most)
{
	CHECK(r == -1 ? errno > 0 && errno < MAX_ERRNO : r >= 0 && (size_t)r <= most);
	return r;
}

/* Sockets are in the pool as their descriptors plus one. None of their calls blocks. */
static void keep_socket(int fd)
{
	bytes(fd, 1 << 20);
	if (fd < 0)
		return;
	minus(rfcntl(fd, F_SETFL, O_NONBLOCK));
	CHECK(rfcntl(fd, F_GETFL, 0) & O_NONBLOCK);
	keep(&socks, (void *)(long)(fd + 1));
}

static void sockets(void)
{
	static const int levels[] = { SOL_SOCKET, IPPROTO_TCP, IPPROTO_IPV6, SOL_RDMA };
	static const int names[] = { SO_REUSEADDR, SO_RCVBUF, SO_ERROR, TCP_NODELAY, RDMA_SQSIZE, RDMA_IOMAPSIZE, RDMA_INLINE };
	int fd = (int)(long)pick(&socks) - 1, value = odd(), level = levels[rnd(4)], name = names[rnd(7)];
	union any_sockaddr a = any_sockaddr();
	struct sockaddr_storage from;
	socklen_t len = MOSTLY(sizeof(from), 4) & 0xff, four = MOSTLY(4, 4);
	size_t n = rnd(3) ? rnd(9000) : rnd(200000);
	struct iovec iov[3] = { { arena, rnd(3000) }, { NULL, 0 }, { arena + 4096, rnd(3000) } };
	struct msghdr msg = { .msg_name = rnd(2) ? &a : NULL, .msg_namelen = sizeof(a.v4), .msg_iov = iov, .msg_iovlen = rnd(4) };
	struct pollfd p[2] = { { fd, POLLIN | POLLOUT, 0 }, { (int)(long)pick(&socks) - 1, POLLIN, 0 } };
	int flags = MSG_DONTWAIT | (rnd(4) ? 0 : MSG_PEEK);

	if (fd < 0 || !rnd(8)) {
		last = "rsocket";
		if (socks.n < MANY)
			keep_socket(rsocket(MOSTLY(AF_INET, 6), MOSTLY(SOCK_STREAM + rnd(2), 6), MOSTLY(0, 4)));
		return;
	}
	last = "rsockets";
	switch (rnd(20)) {
	case 0: case 1:
		minus(rbind(fd, (void *)&a, sizeof(a.v4)));
		break;
	case 2:
		minus(rlisten(fd, odd()));
		break;
	case 3: case 4:
		last = "raccept";
		if (socks.n < MANY)
			keep_socket(raccept(fd, rnd(2) ? (void *)&from : NULL, &len));
		break;
	case 5: case 6:
		last = "rconnect";
		minus(rconnect(fd, (void *)&a, sizeof(a.v4)));
		break;
	case 7: case 8:
		last = "rsend";
		bytes(rnd(2) ? rsend(fd, arena, n, flags) : rsendto(fd, arena, n, flags, (void *)&a, sizeof(a.v4)), n);
		break;
	case 9: case 10:
		last = "rrecv";
		bytes(rnd(2) ? rrecv(fd, arena, n, flags) : rrecvfrom(fd, arena, n, flags, (void *)&from, &len), n);
		break;
	case 11:
		last = "rwritev";
		bytes(rnd(2) ? rwritev(fd, iov, msg.msg_iovlen) : rsendmsg(fd, &msg, flags), 6000);
		break;
	case 12:
		last = "rreadv";
		msg.msg_name = rnd(2) ? &from : NULL;
		bytes(rnd(2) ? rreadv(fd, iov, msg.msg_iovlen) : rrecvmsg(fd, &msg, flags), 6000);
		break;
	case 13: case 14:
		last = "rpoll";
		bytes(rpoll(p, 1 + rnd(2), rnd(2)), 2);
		break;
	case 15:
		last = "rsetsockopt";
		minus(rsetsockopt(fd, level, name, &value, four & 4 ? 4 : 0));
		minus(rgetsockopt(fd, level, name, &value, &four));
		break;
	case 16:
		last = "rgetsockname";
		minus(rgetsockname(fd, (void *)&from, &len));
		len = sizeof(from);
		minus(rgetpeername(fd, (void *)&from, &len));
		break;
	case 17:
		last = "riomap";
		if (riomap(fd, arena + 65536, MOSTLY(4096, 4) & 0x1ffff, MOSTLY(PROT_WRITE, 4), 0, MOSTLY(0, 2)) != -1)
			minus(riounmap(fd, arena + 65536, 4096));
		if (riowrite(fd, arena, rnd(5000), MOSTLY(0, 2), flags) == (size_t)-1)
			CHECK(errno > 0);
		break;
	case 18:
		last = "rshutdown";
		if (!rnd(3))
			minus(rshutdown(fd, rnd(3)));
		break;
	default:
		last = "rclose";
		if (rnd(2) && !minus(rclose(fd)))
			forget(&socks, (void *)(long)(fd + 1));
		minus(rclose(MOSTLY(-1, 4) | 1 << 20));
	}
}

static int close_socket(void *s)
{
	return rclose((int)(long)s - 1);
}

#define DESTROY_ALL(pool, call, type) do { last = #call; while ((pool).n) { \
	type *x = (pool).at[0]; CHECK(!call(x)); forget(&(pool), x); } } while (0)

static int destroy_cq_ex(struct ibv_cq_ex *x)
{
	return ibv_destroy_cq(ibv_cq_ex_to_cq(x));
}

/* Destroys everything, users first, and parents of PDs after the domains made of them. */
static void clean_up(void)
{
	int before;

	DESTROY_ALL(socks, close_socket, void);
	DESTROY_ALL(ids, destroy_id, struct rdma_cm_id);
	last = "rdma_destroy_event_channel";
	while (queues.n)
		rdma_destroy_event_channel(queues.at[--queues.n]);
	DESTROY_ALL(qps, ibv_destroy_qp, struct ibv_qp);
	DESTROY_ALL(srqs, ibv_destroy_srq, struct ibv_srq);
	DESTROY_ALL(xrcds, ibv_close_xrcd, struct ibv_xrcd);
	DESTROY_ALL(cqs, ibv_destroy_cq, struct ibv_cq);
	DESTROY_ALL(cqxs, destroy_cq_ex, struct ibv_cq_ex);
	DESTROY_ALL(channels, ibv_destroy_comp_channel, struct ibv_comp_channel);
	DESTROY_ALL(mws, ibv_dealloc_mw, struct ibv_mw);
	DESTROY_ALL(mrs, ibv_dereg_mr, struct ibv_mr);
	DESTROY_ALL(dms, ibv_free_dm, struct ibv_dm);
	DESTROY_ALL(ahs, ibv_destroy_ah, struct ibv_ah);
	last = "dealloc_pd";
	do {
		before = pds.n;
		for (int i = pds.n - 1; i >= 0; i--)
			if (!code(ibv_dealloc_pd(pds.at[i])))
				pds.at[i] = pds.at[--pds.n];
	} while (pds.n && pds.n < before);
	CHECK(!pds.n);
	DESTROY_ALL(tds, ibv_dealloc_td, struct ibv_td);
}

/* Checks that a QP that is connected to itself can write data. */
static void still_works(struct ibv_context *c)
{
	struct ibv_pd *pd = ibv_alloc_pd(c);
	struct ibv_cq *cq = ibv_create_cq(c, 4, NULL, NULL, 0);
	struct ibv_qp_init_attr ia = { .send_cq = cq, .recv_cq = cq, .cap = { 1, 1, 1, 1, 0 }, .qp_type = IBV_QPT_RC };
	struct ibv_mr *mr = ibv_reg_mr(pd, arena, BYTES, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	struct ibv_qp *qp = ibv_create_qp(pd, &ia);
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = IBV_ACCESS_REMOTE_WRITE };
	struct ibv_sge sge = { (uintptr_t)arena, 4096, mr ? mr->lkey : 0 };
	struct ibv_send_wr *bad, wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED };
	struct ibv_wc wc = { 0 };

	last = "still works";
	CHECK(pd && cq && mr && qp);
	memset(arena, 0x5a, 4096);
	memset(arena + 8192, 0, 4096);
	wr.wr.rdma.remote_addr = (uintptr_t)arena + 8192;
	wr.wr.rdma.rkey = mr->rkey;
	CHECK(!ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	a = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = qp->qp_num,
				  .ah_attr = { .is_global = 1, .port_num = 1, .grh = { .hop_limit = 64 } },
				  .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 1, .max_dest_rd_atomic = 1 };
	CHECK(!ibv_query_gid(c, 1, 0, &a.ah_attr.grh.dgid));
	CHECK(!ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
			     IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
	a.qp_state = IBV_QPS_RTS;
	CHECK(!ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
			     IBV_QP_MAX_QP_RD_ATOMIC));
	CHECK(!ibv_post_send(qp, &wr, &bad));
	while (!ibv_poll_cq(cq, 1, &wc))
		;
	CHECK(wc.status == IBV_WC_SUCCESS && !memcmp(arena, arena + 8192, 4096));
	CHECK(!ibv_destroy_qp(qp) && !ibv_destroy_cq(cq) && !ibv_dereg_mr(mr) && !ibv_dealloc_pd(pd));
}

int main(int argc, char **argv)
{
	static void (*const calls[])(void) = { memory, domains, completion, completion, qp_objects, qp_objects, work, work, work, tags,
					       queries, connections, connections, sockets, sockets };
	long steps = argc > 2 ? atol(argv[2]) : 0;
	struct ibv_device **list;

	if (argc != 3 || steps <= 0) {
		fprintf(stderr, "usage: %s SEED STEPS\n", argv[0]);
		return 2;
	}
	seed = strtoull(argv[1], NULL, 0);
	state = seed * 0x9e3779b97f4a7c15ull + 1;
	arena = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	hole = mmap(NULL, BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(arena != MAP_FAILED && hole != MAP_FAILED);
	list = ibv_get_device_list(NULL);
	CHECK(list && list[0]);
	for (int i = 0; i < 2; i++)
		CHECK((ctx[i] = ibv_open_device(list[0])));
	ibv_free_device_list(list);
	for (step = 0; step < steps; step++) {
		errno = 0;
		calls[rnd(sizeof(calls) / sizeof(*calls))]();
	}
	clean_up();
	for (int i = 0; i < 2; i++) {
		still_works(ctx[i]);
		CHECK(!ibv_close_device(ctx[i]));
	}
	printf("%ld calls with seed %llu: all objects destroyed, data arrives\n", steps, seed);
	return 0;
}
