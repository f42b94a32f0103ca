/* SPDX-License-Identifier: Apache-2.0 OR MIT
 *
 * Tag matching from one QP to another of the same device: messages that match a tagged buffer, messages that do
 * not, and the reports to the program. See ibv_post_srq_ops(3) and rdma-core's tag_matching.md.
 */
#include <errno.h>
#include <infiniband/tm_types.h>
#include <infiniband/verbs.h>
#include <endian.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"

enum { ROOM = 4096, TMH = sizeof(struct ibv_tmh), HEADERS = TMH + sizeof(struct ibv_rvh) };

static char memory[16][ROOM];
static struct ibv_context *ctx;
static struct ibv_pd *pd;
static struct ibv_mr *mr;
static struct ibv_comp_channel *channel;
static struct ibv_cq_ex *cq, *sender_cq;
static struct ibv_srq *srq;

/* The buffers of the receiver, of the sender, and of the sender's rendezvous. */
static char *const tagged = memory[0], *const plain = memory[4], *const out = memory[8], *const far = memory[9], *const fin = memory[10];

struct done {
	uint64_t wr_id, tag;
	int status, opcode;
	unsigned flags, len, app;
};

static struct done next(struct ibv_cq_ex *from)
{
	struct ibv_poll_cq_attr attr = { 0 };
	struct ibv_wc_tm_info info;
	struct done d;
	long tries = 0;

	while (ibv_start_poll(from, &attr))
		CHECK(++tries < 50000000);
	ibv_wc_read_tm_info(from, &info);
	d = (struct done){ from->wr_id, info.tag, from->status, ibv_wc_read_opcode(from), ibv_wc_read_wc_flags(from),
			   ibv_wc_read_byte_len(from), info.priv };
	ibv_end_poll(from);
	return d;
}

static int nothing(struct ibv_cq_ex *from)
{
	struct ibv_poll_cq_attr attr = { 0 };

	for (int i = 0; i < 1000; i++)
		if (!ibv_start_poll(from, &attr)) {
			ibv_end_poll(from);
			return 0;
		}
	return 1;
}

static struct ibv_sge sge(char *at, unsigned len)
{
	return (struct ibv_sge){ (uintptr_t)at, len, mr->lkey };
}

/* Posts one list operation. `op` receives the handle. */
static int operate(struct ibv_ops_wr *op)
{
	struct ibv_ops_wr *bad = NULL;
	int r = ibv_post_srq_ops(srq, op, &bad);

	CHECK(!r || bad == op);
	return r;
}

static unsigned add(uint64_t id, uint64_t tag, uint64_t mask, struct ibv_sge *s, int n, int flags, unsigned count)
{
	struct ibv_ops_wr op = { .wr_id = 1000 + id, .opcode = IBV_WR_TAG_ADD, .flags = flags };

	op.tm.unexpected_cnt = count;
	op.tm.add.recv_wr_id = id;
	op.tm.add.sg_list = s;
	op.tm.add.num_sge = n;
	op.tm.add.tag = tag;
	op.tm.add.mask = mask;
	CHECK(!operate(&op));
	return op.tm.handle;
}

static int other(int opcode, unsigned handle, int flags, unsigned count)
{
	struct ibv_ops_wr op = { .wr_id = 77, .opcode = opcode, .flags = flags };

	op.tm.handle = handle;
	op.tm.unexpected_cnt = count;
	return operate(&op);
}

static void receive(uint64_t id, char *at)
{
	struct ibv_sge s = sge(at, ROOM);
	struct ibv_recv_wr wr = { .wr_id = id, .sg_list = &s, .num_sge = 1 }, *bad;

	CHECK(!ibv_post_srq_recv(srq, &wr, &bad));
}

static void send_message(struct ibv_qp *qp, unsigned char op, uint64_t tag, const char *data, unsigned len)
{
	struct ibv_tmh h = { .opcode = op, .app_ctx = htobe32(0xabcd), .tag = htobe64(tag) };
	struct ibv_sge s = sge(out, TMH + len);
	struct ibv_send_wr wr = { .sg_list = &s, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED }, *bad;
	struct done d;

	memcpy(out, &h, TMH);
	memcpy(out + TMH, data, len);
	CHECK(!ibv_post_send(qp, &wr, &bad));
	d = next(sender_cq);
	CHECK(d.status == IBV_WC_SUCCESS && d.opcode == IBV_WC_SEND);
}

static void send_rendezvous(struct ibv_qp *qp, uint64_t tag, unsigned len)
{
	struct ibv_rvh r = { htobe64((uintptr_t)far), htobe32(mr->rkey), htobe32(len) };

	send_message(qp, IBV_TMH_RNDV, tag, (char *)&r, sizeof(r));
}

static void move(struct ibv_qp *qp, uint32_t peer, union ibv_gid gid)
{
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = IBV_ACCESS_REMOTE_READ };

	CHECK(!ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	a = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = peer, .max_dest_rd_atomic = 4, .min_rnr_timer = 1,
				  .ah_attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = gid, .hop_limit = 64 } } };
	CHECK(!ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
					     IBV_QP_MIN_RNR_TIMER));
	a = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 4 };
	CHECK(!ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC));
}

static void eager(struct ibv_qp *qp)
{
	struct ibv_sge two[] = { sge(tagged, 3), sge(tagged + 100, 10) }, small = sge(tagged, 2);
	unsigned handle;
	struct done d;

	/* Into two pieces; the first of two that match; a mask. */
	add(1, 0x10, 0xff, two, 2, IBV_OPS_SIGNALED, 0);
	add(2, 0x10, ~0ull, &small, 1, 0, 0);
	d = next(cq);
	CHECK(d.wr_id == 1001 && d.opcode == IBV_WC_TM_ADD && !d.status && !d.flags);
	send_message(qp, IBV_TMH_EAGER, 0x710, "hello", 5);
	d = next(cq);
	CHECK(d.wr_id == 1 && d.opcode == IBV_WC_TM_RECV && d.flags == (IBV_WC_TM_MATCH | IBV_WC_TM_DATA_VALID) && d.len == 5);
	CHECK(d.tag == 0x710 && d.app == 0xabcd && !memcmp(tagged, "hel", 3) && !memcmp(tagged + 100, "lo", 2));
	/* Longer than its buffer. */
	send_message(qp, IBV_TMH_EAGER, 0x10, "hello", 5);
	d = next(cq);
	CHECK(d.wr_id == 2 && d.status == IBV_WC_LOC_LEN_ERR);
	/* No tag, and too short for a header. */
	send_message(qp, IBV_TMH_NO_TAG, 0x10, "plain", 5);
	d = next(cq);
	CHECK(d.wr_id >= 100 && d.opcode == IBV_WC_TM_NO_TAG && d.len == TMH + 5 && !memcmp(plain + (d.wr_id - 100) * ROOM + TMH, "plain", 5));
	receive(d.wr_id, plain + (d.wr_id - 100) * ROOM);
	/* A handle is valid once. */
	handle = add(3, 1, ~0ull, &small, 1, 0, 0);
	CHECK(!other(IBV_WR_TAG_DEL, handle, IBV_OPS_SIGNALED, 0));
	d = next(cq);
	CHECK(d.wr_id == 77 && d.opcode == IBV_WC_TM_DEL && d.status == IBV_WC_SUCCESS);
	CHECK(!other(IBV_WR_TAG_DEL, handle, 0, 0));
	CHECK(next(cq).status == IBV_WC_TM_ERR);
}

static void unexpected(struct ibv_qp *qp)
{
	struct ibv_sge s = sge(tagged, ROOM);
	struct done d;

	send_message(qp, IBV_TMH_EAGER, 5, "first", 5);
	d = next(cq);
	CHECK(d.opcode == IBV_WC_TM_RECV && !(d.flags & IBV_WC_TM_MATCH) && d.len == TMH + 5);
	receive(d.wr_id, plain + (d.wr_id - 100) * ROOM);
	/* Until the program reports that it has handled that message, a new buffer takes no later message. */
	add(4, 5, ~0ull, &s, 1, IBV_OPS_SIGNALED, 0);
	d = next(cq);
	CHECK(d.opcode == IBV_WC_TM_ADD && d.flags == IBV_WC_TM_SYNC_REQ);
	send_message(qp, IBV_TMH_EAGER, 5, "second", 6);
	d = next(cq);
	CHECK(!(d.flags & IBV_WC_TM_MATCH));
	receive(d.wr_id, plain + (d.wr_id - 100) * ROOM);
	CHECK(!other(IBV_WR_TAG_SYNC, 0, IBV_OPS_SIGNALED | IBV_OPS_TM_SYNC, 2));
	d = next(cq);
	CHECK(d.opcode == IBV_WC_TM_SYNC && !d.flags);
	send_message(qp, IBV_TMH_EAGER, 5, "third", 5);
	d = next(cq);
	CHECK(d.wr_id == 4 && d.flags & IBV_WC_TM_MATCH && !memcmp(tagged, "third", 5));
}

static void rendezvous(struct ibv_qp *qp)
{
	struct ibv_sge s = sge(tagged, ROOM), small = sge(tagged, HEADERS + 8), f = sge(fin, ROOM);
	struct ibv_recv_wr wr = { .wr_id = 9, .sg_list = &f, .num_sge = 1 }, *bad;
	struct ibv_tmh h;
	struct done d;

	memset(far, 'f', ROOM);
	CHECK(!ibv_post_recv(qp, &wr, &bad));
	add(5, 8, ~0ull, &s, 1, 0, 0);
	send_rendezvous(qp, 8, 3000);
	d = next(cq);
	CHECK(d.wr_id == 5 && d.flags == IBV_WC_TM_MATCH && d.tag == 8 && d.app == 0xabcd);
	/* The sender is notified without another poll by the receiver. */
	d = next(sender_cq);
	CHECK(d.opcode == IBV_WC_RECV && d.wr_id == 9 && d.len == HEADERS);
	memcpy(&h, fin, TMH);
	CHECK(h.opcode == IBV_TMH_FIN && be64toh(h.tag) == 8 && be32toh(h.app_ctx) == 0xabcd);
	d = next(cq);
	CHECK(d.wr_id == 5 && d.flags == IBV_WC_TM_DATA_VALID && d.len == 3000 && !memcmp(tagged, far, 3000));
	/* More data than the buffer has room for: the program gets the headers and continues by itself. */
	add(6, 8, ~0ull, &small, 1, 0, 0);
	send_rendezvous(qp, 8, 3000);
	d = next(cq);
	CHECK(d.wr_id == 6 && d.status == IBV_WC_TM_RNDV_INCOMPLETE && !memcmp(tagged, out, HEADERS));
	/* A message that ends the program's own rendezvous matches no tag. */
	send_message(qp, IBV_TMH_FIN, 8, "", 0);
	d = next(cq);
	CHECK(d.opcode == IBV_WC_RECV && d.wr_id >= 100);
	receive(d.wr_id, plain + (d.wr_id - 100) * ROOM);
	CHECK(nothing(cq) && nothing(sender_cq));
}

/* A sleeping program is notified of list operations. */
static void events(void)
{
	struct pollfd p = { channel->fd, POLLIN, 0 };
	struct ibv_cq *of;
	void *user;

	CHECK(!ibv_req_notify_cq(ibv_cq_ex_to_cq(cq), 0));
	CHECK(!other(IBV_WR_TAG_SYNC, 0, IBV_OPS_SIGNALED, 0));
	CHECK(poll(&p, 1, 5000) == 1 && !ibv_get_cq_event(channel, &of, &user) && of == ibv_cq_ex_to_cq(cq));
	ibv_ack_cq_events(of, 1);
	CHECK(next(cq).opcode == IBV_WC_TM_SYNC);
}

static void wrong_input(struct ibv_qp *member)
{
	struct ibv_srq_init_attr_ex a = { .attr = { 8, 1, 0 }, .comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_TM,
					  .srq_type = IBV_SRQT_TM, .pd = pd, .tm_cap = { 4, 4 } };
	struct ibv_sge s = sge(out, 1), outside = { (uintptr_t)memory + sizeof(memory), 1, mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &s, .num_sge = 1, .opcode = IBV_WR_SEND }, *bad;
	struct ibv_ops_wr op = { .opcode = IBV_WR_TAG_ADD };

	CHECK(!ibv_create_srq_ex(ctx, &a) && errno == EINVAL);
	CHECK(ibv_post_send(member, &wr, &bad) == EINVAL && bad == &wr);
	CHECK(other(7, 0, 0, 0) == EINVAL && other(IBV_WR_TAG_SYNC, 0, 8, 0) == EINVAL);
	op.tm.add.sg_list = &outside;
	op.tm.add.num_sge = 1;
	CHECK(operate(&op) == EINVAL);
	op.tm.add.num_sge = 1 << 30;
	CHECK(operate(&op) == EINVAL);
	for (int i = 0; i < 8; i++)
		add(i, 1, ~0ull, &s, 1, 0, 0);
	op.tm.add.num_sge = 0;
	CHECK(operate(&op) == ENOMEM);
	for (int i = 0; i < 4; i++)
		CHECK(!other(IBV_WR_TAG_SYNC, 0, IBV_OPS_SIGNALED, 0));
	CHECK(other(IBV_WR_TAG_SYNC, 0, IBV_OPS_SIGNALED, 0) == ENOMEM);
	CHECK(ibv_destroy_srq(srq) == EBUSY);
}

int main(void)
{
	struct ibv_cq_init_attr_ex ca = { .cqe = 100, .wc_flags = IBV_WC_STANDARD_FLAGS | IBV_WC_EX_WITH_TM_INFO };
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_device_attr_ex attr;
	union ibv_gid gid;

	CHECK(list && list[0] && (ctx = ibv_open_device(list[0])));
	CHECK(!ibv_query_device_ex(ctx, NULL, &attr) && attr.tm_caps.flags & IBV_TM_CAP_RC && attr.tm_caps.max_sge >= 2);
	CHECK(!ibv_query_gid(ctx, 1, 0, &gid));
	CHECK((pd = ibv_alloc_pd(ctx)) && (channel = ibv_create_comp_channel(ctx)));
	CHECK((mr = ibv_reg_mr(pd, memory, sizeof(memory), IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ)));
	CHECK((sender_cq = ibv_create_cq_ex(ctx, &ca)));
	ca.channel = channel;
	CHECK((cq = ibv_create_cq_ex(ctx, &ca)));

	struct ibv_srq_init_attr_ex sa = { .attr = { 8, 1, 0 },
					   .comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_CQ | IBV_SRQ_INIT_ATTR_TM,
					   .srq_type = IBV_SRQT_TM, .pd = pd, .cq = ibv_cq_ex_to_cq(cq), .tm_cap = { 8, 4 } };
	CHECK((srq = ibv_create_srq_ex(ctx, &sa)));

	struct ibv_qp_init_attr qa = { .send_cq = ibv_cq_ex_to_cq(sender_cq), .recv_cq = ibv_cq_ex_to_cq(sender_cq), .cap = { 8, 8, 1, 1, 0 },
				       .qp_type = IBV_QPT_RC };
	struct ibv_qp *sender = ibv_create_qp(pd, &qa);
	qa = (struct ibv_qp_init_attr){ .send_cq = ibv_cq_ex_to_cq(cq), .recv_cq = ibv_cq_ex_to_cq(cq), .srq = srq, .qp_type = IBV_QPT_RC };
	struct ibv_qp *member = ibv_create_qp(pd, &qa);
	CHECK(sender && member);
	move(sender, member->qp_num, gid);
	move(member, sender->qp_num, gid);
	for (int i = 0; i < 3; i++)
		receive(100 + i, plain + i * ROOM);

	eager(sender);
	unexpected(sender);
	rendezvous(sender);
	events();
	wrong_input(member);

	/* A QP is destroyed while the other end has a request that was not polled. */
	send_rendezvous(sender, 1, 1);
	CHECK(!ibv_destroy_qp(member) && !ibv_destroy_qp(sender));
	CHECK(!ibv_destroy_srq(srq) && !ibv_destroy_cq(ibv_cq_ex_to_cq(cq)) && !ibv_destroy_cq(ibv_cq_ex_to_cq(sender_cq)));
	CHECK(!ibv_dereg_mr(mr) && !ibv_destroy_comp_channel(channel) && !ibv_dealloc_pd(pd) && !ibv_close_device(ctx));
	ibv_free_device_list(list);
	printf("tags matched\n");
	return 0;
}
