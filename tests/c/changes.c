/* SPDX-License-Identifier: Apache-2.0 OR MIT
 *
 * Changes that a program may make to a working QP: the sizes of its queues (IBV_QP_CAP), its rate limit
 * (ibv_modify_qp_rate_limit(3)), and the processes that share the target of an XRC connection (ibv_open_qp(3)).
 * It also checks when the structure of a failed QP shows the failure. All of it runs again in a thread domain,
 * whose queues take no lock.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <net/if.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "times.h"

enum { SIZE = 100000, BEFORE = 10, AFTER = 100 };

static char memory[2][SIZE];
static struct ibv_context *ctx;
static struct ibv_pd *pd;
static struct ibv_mr *mr;
static struct ibv_cq *cq;
static union ibv_gid gid;

static struct ibv_context *open_device(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *c;

	CHECK(list && list[0]);
	c = ibv_open_device(list[0]);
	CHECK(c);
	ibv_free_device_list(list);
	return c;
}

static void connect_to(struct ibv_qp *qp, uint32_t peer)
{
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = IBV_ACCESS_REMOTE_WRITE };

	CHECK(!ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	a = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = peer,
				  .max_dest_rd_atomic = 1, .min_rnr_timer = 1 };
	a.ah_attr.is_global = 1;
	a.ah_attr.port_num = 1;
	a.ah_attr.grh.dgid = gid;
	a.ah_attr.grh.hop_limit = 1;
	CHECK(!ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
				     IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
	a = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 1 };
	CHECK(!ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
				     IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC));
}

static struct ibv_qp *make_qp(void)
{
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .sq_sig_all = 1 };
	struct ibv_qp *qp;

	init.cap = (struct ibv_qp_cap){ BEFORE, BEFORE, 1, 1, 16 };
	qp = ibv_create_qp(pd, &init);
	CHECK(qp);
	return qp;
}

static int post_send(struct ibv_qp *qp, uint64_t id, unsigned len)
{
	struct ibv_sge s = { (uintptr_t)memory[0], len, mr->lkey };
	struct ibv_send_wr wr = { .wr_id = id, .sg_list = &s, .num_sge = 1, .opcode = IBV_WR_SEND }, *bad;

	return ibv_post_send(qp, &wr, &bad);
}

static int post_recv(struct ibv_qp *qp, uint64_t id)
{
	struct ibv_sge s = { (uintptr_t)memory[1], SIZE, mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = id, .sg_list = &s, .num_sge = 1 }, *bad;

	return ibv_post_recv(qp, &wr, &bad);
}

/* Takes `n` completions of each QP, which must come in order. */
static void drain(struct ibv_qp *a, uint64_t first_a, struct ibv_qp *b, uint64_t first_b, int n)
{
	int done = 0;

	while (done < 2 * n) {
		struct ibv_wc wc;

		if (ibv_poll_cq(cq, 1, &wc) < 1)
			continue;
		CHECK(wc.status == IBV_WC_SUCCESS);
		CHECK(wc.wr_id == (wc.qp_num == a->qp_num ? first_a++ : first_b++));
		CHECK(wc.qp_num == a->qp_num || wc.qp_num == b->qp_num);
		done++;
	}
}

static int resize(struct ibv_qp *qp, unsigned sends, unsigned receives, unsigned sges)
{
	struct ibv_qp_attr a = { .cap = { sends, receives, sges, sges, 16 } };

	return ibv_modify_qp(qp, &a, IBV_QP_CAP);
}

static void sizes(struct ibv_qp *a, struct ibv_qp *b)
{
	struct ibv_qp_init_attr init;
	struct ibv_qp_attr attr;
	int i;

	/* Sends wait for receives while both queues grow, and then shrink until the waiting sends no longer
	 * fit. */
	for (i = 0; i < BEFORE; i++)
		CHECK(!post_send(a, i, 1000));
	CHECK(!resize(a, AFTER, AFTER, 1));
	CHECK(resize(a, 2, AFTER, 1) == EINVAL);
	CHECK(resize(a, AFTER, AFTER, 2) == EINVAL);
	CHECK(resize(a, 1 << 30, AFTER, 1) == EINVAL);
	for (; i < AFTER; i++)
		CHECK(!post_send(a, i, 1000));
	for (i = 0; i < 4; i++)
		CHECK(!post_recv(b, i));
	CHECK(!resize(b, AFTER, AFTER, 1));
	for (; i < AFTER; i++)
		CHECK(!post_recv(b, i));
	drain(a, 0, b, 0, AFTER);
	CHECK(!ibv_query_qp(a, &attr, IBV_QP_CAP, &init) && attr.cap.max_send_wr >= AFTER && attr.cap.max_send_sge == 1);
	CHECK(!resize(a, 2, 2, 1));
	CHECK(!ibv_query_qp(a, &attr, IBV_QP_CAP, &init) && attr.cap.max_send_wr == 2);
	CHECK(!resize(a, BEFORE, BEFORE, 1));
}

/* Time of ten messages: 8 Mbit, at 80 Mbit/s 0.1 s. */
static double ten(struct ibv_qp *a, struct ibv_qp *b)
{
	double start = seconds();
	int i;

	for (i = 0; i < 10; i++) {
		CHECK(!post_recv(b, i));
		CHECK(!post_send(a, i, SIZE));
	}
	drain(a, 0, b, 0, 10);
	return seconds() - start;
}

static void rates(struct ibv_qp *a, struct ibv_qp *b)
{
	struct ibv_device_attr_ex dev;
	struct ibv_qp_rate_limit_attr limit = { .rate_limit = 80000 };
	struct ibv_qp_attr attr = { .rate_limit = 0 };
	struct ibv_qp_init_attr init;
	double limited;

	CHECK(!ibv_query_device_ex(ctx, NULL, &dev));
	CHECK(ibv_is_qpt_supported(dev.packet_pacing_caps.supported_qpts, IBV_QPT_RC));
	CHECK(dev.packet_pacing_caps.qp_rate_limit_min <= 80000 && dev.packet_pacing_caps.qp_rate_limit_max >= 80000);
	CHECK(!ibv_modify_qp_rate_limit(a, &limit));
	limited = ten(a, b);
	CHECK(limited > 0.07);
	CHECK(!ibv_query_qp(a, &attr, IBV_QP_RATE_LIMIT, &init) && attr.rate_limit == 80000);
	attr = (struct ibv_qp_attr){ .rate_limit = 0 };
	CHECK(!ibv_modify_qp(a, &attr, IBV_QP_RATE_LIMIT));
	usleep(100000);
	CHECK(ten(a, b) < limited);
	limit.comp_mask = 1;
	CHECK(ibv_modify_qp_rate_limit(a, &limit) == EINVAL);
}

static struct ibv_xrcd *open_domain(struct ibv_context *c, int fd)
{
	struct ibv_xrcd_init_attr a = { .comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS, .fd = fd,
					.oflags = O_CREAT };
	struct ibv_xrcd *x = ibv_open_xrcd(c, &a);

	CHECK(x);
	return x;
}

static struct ibv_qp *open_target(struct ibv_context *c, struct ibv_xrcd *x, uint32_t number, int type)
{
	struct ibv_qp_open_attr a = { .qp_num = number, .xrcd = x, .qp_context = &gid, .qp_type = type };

	a.comp_mask = IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD | IBV_QP_OPEN_ATTR_CONTEXT | IBV_QP_OPEN_ATTR_TYPE;
	return ibv_open_qp(c, &a);
}

/* The structure of a failed QP shows the failure only after the program has queried the state (UCX posts to the
 * QP between the two). */
static void states(struct ibv_qp *qp)
{
	struct ibv_sge sge = { (uintptr_t)memory[0], 8, mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED };
	struct ibv_send_wr *bad;
	struct ibv_qp_init_attr init;
	struct ibv_qp_attr attr;
	struct ibv_wc wc;
	int n;

	wr.wr.rdma.remote_addr = (uintptr_t)memory[1];
	wr.wr.rdma.rkey = mr->rkey ^ 0x5a5a5a5a;
	CHECK(!ibv_post_send(qp, &wr, &bad));
	while (!(n = ibv_poll_cq(cq, 1, &wc)))
		;
	CHECK(n == 1 && wc.status == IBV_WC_REM_ACCESS_ERR && qp->state == IBV_QPS_RTS);
	CHECK(!ibv_query_qp(qp, &attr, IBV_QP_CAP, &init) && qp->state == IBV_QPS_RTS);
	CHECK(!ibv_query_qp(qp, &attr, IBV_QP_STATE, &init) && attr.qp_state == IBV_QPS_ERR && qp->state == IBV_QPS_ERR);
}

/* Another process opens the target. Its creator destroys it then. */
static void share(void)
{
	struct ibv_qp_init_attr_ex init = { .qp_type = IBV_QPT_XRC_RECV, .comp_mask = IBV_QP_INIT_ATTR_XRCD };
	int fd = open("/tmp", O_TMPFILE | O_RDWR, 0600), to[2], from[2], status;
	struct ibv_xrcd *x = open_domain(ctx, fd);
	struct ibv_qp *made;
	uint32_t number = 0;
	pid_t child;

	CHECK(fd >= 0 && !pipe(to) && !pipe(from));
	child = fork();
	CHECK(child >= 0);
	if (!child) {
		struct ibv_context *c = open_device();
		struct ibv_xrcd *mine = open_domain(c, fd);
		struct ibv_qp_init_attr i;
		struct ibv_qp_attr a;
		struct ibv_qp *qp;

		CHECK(read(to[0], &number, sizeof(number)) == sizeof(number));
		CHECK(!open_target(c, mine, number ^ 1, IBV_QPT_XRC_RECV) && errno == EINVAL);
		CHECK(!open_target(c, mine, number, IBV_QPT_RC) && errno == EINVAL);
		qp = open_target(c, mine, number, IBV_QPT_XRC_RECV);
		CHECK(qp && qp->qp_num == number && qp->qp_context == &gid);
		CHECK(write(from[1], "o", 1) == 1);
		/* The creator has destroyed its own handle. */
		CHECK(read(to[0], &number, sizeof(number)) == sizeof(number));
		CHECK(!ibv_query_qp(qp, &a, IBV_QP_STATE, &i) && a.qp_state == IBV_QPS_RESET);
		a = (struct ibv_qp_attr){ .qp_state = IBV_QPS_INIT, .port_num = 1 };
		CHECK(!ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
		CHECK(ibv_close_xrcd(mine) == EBUSY);
		CHECK(!ibv_destroy_qp(qp) && !ibv_close_xrcd(mine) && !ibv_close_device(c));
		exit(0);
	}
	close(from[1]);
	init.xrcd = x;
	made = ibv_create_qp_ex(ctx, &init);
	CHECK(made);
	number = made->qp_num;
	CHECK(write(to[1], &number, sizeof(number)) == sizeof(number));
	CHECK(read(from[0], &status, 1) == 1);
	CHECK(!ibv_destroy_qp(made));
	CHECK(write(to[1], &number, sizeof(number)) == sizeof(number));
	CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
	CHECK(!ibv_close_xrcd(x));
	close(fd);
}

static void work(void)
{
	struct ibv_qp *a = make_qp(), *b = make_qp();

	connect_to(a, b->qp_num);
	connect_to(b, a->qp_num);
	sizes(a, b);
	rates(a, b);
	states(a);
	CHECK(!ibv_destroy_qp(a) && !ibv_destroy_qp(b) && !ibv_destroy_cq(cq));
}

/* The same with objects that one thread uses. */
static void alone(void)
{
	struct ibv_td_init_attr none = { 0 };
	struct ibv_td *td = ibv_alloc_td(ctx, &none);
	struct ibv_pd *plain = pd;
	struct ibv_parent_domain_init_attr attr = { .pd = pd, .td = td };
	struct ibv_cq_init_attr_ex cx = { .cqe = 4 * AFTER, .comp_mask = IBV_CQ_INIT_ATTR_MASK_PD };

	CHECK(td);
	CHECK((pd = ibv_alloc_parent_domain(ctx, &attr)));
	cx.parent_domain = pd;
	CHECK((cq = ibv_cq_ex_to_cq(ibv_create_cq_ex(ctx, &cx))));
	CHECK(ibv_dealloc_td(td) == EBUSY);
	work();
	CHECK(!ibv_dealloc_pd(pd) && !ibv_dealloc_td(td));
	pd = plain;
}

/* The network device of each GID is the container's. */
static void network_device(void)
{
	struct ibv_gid_entry e, table[16];
	unsigned want = if_nametoindex("eth0");
	ssize_t n = ibv_query_gid_table(ctx, table, 16, 0), i;

	CHECK(want && n > 0);
	CHECK(!ibv_query_gid_ex(ctx, 1, 0, &e, 0) && e.ndev_ifindex == want);
	for (i = 0; i < n; i++)
		CHECK(table[i].ndev_ifindex == want);
}

int main(void)
{
	struct ibv_mr *null_mr;

	setvbuf(stdout, NULL, _IONBF, 0);
	ctx = open_device();
	CHECK(!ibv_query_gid(ctx, 1, 0, &gid));
	network_device();
	CHECK((pd = ibv_alloc_pd(ctx)));
	CHECK((mr = ibv_reg_mr(pd, memory, sizeof(memory), IBV_ACCESS_LOCAL_WRITE)));
	CHECK((cq = ibv_create_cq(ctx, 4 * AFTER, NULL, NULL, 0)));
	work();
	alone();
	/* A null MR holds no reference to its PD, and may be deregistered after it. */
	CHECK((null_mr = ibv_alloc_null_mr(pd)));
	CHECK(!ibv_dereg_mr(mr) && !ibv_dealloc_pd(pd) && !ibv_dereg_mr(null_mr));
	share();
	CHECK(!ibv_close_device(ctx));
	printf("all changes made\n");
	return 0;
}
