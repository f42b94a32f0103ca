/* SPDX-License-Identifier: Apache-2.0 OR MIT
 *
 * Loads libibverbs as plug-ins do (dlopen, RTLD_LOCAL), forks a child that does not use verbs, and runs four
 * threads that write and read back through QPs that are connected to themselves.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <infiniband/verbs.h>

#define THREADS 4
#define ROUNDS 500
#define BYTES 20000

static void *lib;
static struct ibv_context *ctx;

#define CHECK(c) do { if (!(c)) { fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #c); exit(1); } } while (0)

static void *sym(const char *name)
{
	void *p = dlsym(lib, name);

	CHECK(p);
	return p;
}

#define CALL(name) ((__typeof__(&name))sym(#name))

static void to_rts(struct ibv_qp *qp, union ibv_gid gid)
{
	struct ibv_qp_attr a = {
		.qp_state = IBV_QPS_INIT, .port_num = 1,
		.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ,
		.path_mtu = IBV_MTU_4096, .dest_qp_num = qp->qp_num, .max_dest_rd_atomic = 1, .max_rd_atomic = 1,
		.min_rnr_timer = 1, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7,
		.ah_attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = gid, .hop_limit = 64 } },
	};

	CHECK(!CALL(ibv_modify_qp)(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	a.qp_state = IBV_QPS_RTR;
	CHECK(!CALL(ibv_modify_qp)(qp, &a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
				   IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
	a.qp_state = IBV_QPS_RTS;
	CHECK(!CALL(ibv_modify_qp)(qp, &a, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
				   IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC));
}

static void transfer(struct ibv_qp *qp, struct ibv_cq *cq, enum ibv_wr_opcode op, char *local, char *remote, struct ibv_mr *mr)
{
	struct ibv_sge sge = { (uintptr_t)local, BYTES, mr->lkey };
	struct ibv_send_wr *bad, wr = { .sg_list = &sge, .num_sge = 1, .opcode = op, .send_flags = IBV_SEND_SIGNALED };
	struct ibv_wc wc;
	int n;

	wr.wr.rdma.remote_addr = (uintptr_t)remote;
	wr.wr.rdma.rkey = mr->rkey;
	CHECK(!ibv_post_send(qp, &wr, &bad));
	while (!(n = ibv_poll_cq(cq, 1, &wc)))
		;
	CHECK(n == 1 && wc.status == IBV_WC_SUCCESS);
}

static void *work(void *arg)
{
	long me = (long)arg;
	struct ibv_pd *pd = CALL(ibv_alloc_pd)(ctx);
	struct ibv_cq *cq = CALL(ibv_create_cq)(ctx, 16, NULL, NULL, 0);
	char *buf = malloc(3 * BYTES);
	struct ibv_mr *mr;
	struct ibv_qp *qp;
	union ibv_gid gid;

	CHECK(pd && cq && buf);
	/* The macro uses version IBVERBS_1.8 when flags are not constant; the plain symbol serves as well. */
	mr = ((struct ibv_mr *(*)(struct ibv_pd *, void *, size_t, int))sym("ibv_reg_mr"))(
		pd, buf, 3 * BYTES, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ);
	CHECK(mr);
	struct ibv_qp_init_attr init = {
		.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 },
	};
	qp = CALL(ibv_create_qp)(pd, &init);
	CHECK(qp && !CALL(ibv_query_gid)(ctx, 1, 0, &gid));
	to_rts(qp, gid);
	for (int i = 0; i < ROUNDS; i++) {
		memset(buf, (int)(me * 50 + i), BYTES);
		transfer(qp, cq, IBV_WR_RDMA_WRITE, buf, buf + BYTES, mr);
		transfer(qp, cq, IBV_WR_RDMA_READ, buf + 2 * BYTES, buf + BYTES, mr);
		CHECK(!memcmp(buf, buf + 2 * BYTES, BYTES));
	}
	CHECK(CALL(ibv_dealloc_pd)(pd) == EBUSY);
	CHECK(!CALL(ibv_destroy_qp)(qp) && !CALL(ibv_dereg_mr)(mr) && !CALL(ibv_destroy_cq)(cq) && !CALL(ibv_dealloc_pd)(pd));
	free(buf);
	return NULL;
}

int main(void)
{
	pthread_t t[THREADS];
	struct ibv_device **list;
	int status, n;
	pid_t child;

	lib = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);
	CHECK(lib);
	list = ((struct ibv_device **(*)(int *))sym("ibv_get_device_list"))(&n);
	CHECK(list && n == 1);
	ctx = CALL(ibv_open_device)(list[0]);
	CHECK(ctx);
	CALL(ibv_free_device_list)(list);
	child = fork();
	if (!child) {
		char *p = malloc(100000);

		memset(p, 1, 100000);
		free(p);
		_exit(7);
	}
	CHECK(waitpid(child, &status, 0) == child && WEXITSTATUS(status) == 7);
	/* One round in the only thread, where pages are shared. Then many threads, where they are copied. */
	work((void *)0);
	for (long i = 0; i < THREADS; i++)
		CHECK(!pthread_create(&t[i], NULL, work, (void *)i));
	for (int i = 0; i < THREADS; i++)
		pthread_join(t[i], NULL);
	CHECK(!CALL(ibv_close_device)(ctx));
	dlclose(lib);
	puts("all threads done");
	return 0;
}
