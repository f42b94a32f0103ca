/* SPDX-License-Identifier: Apache-2.0 OR MIT
 *
 * Makes the number of connections in the first argument, each with three MRs in malloc's heap that share pages
 * with their neighbours, and then the number of objects of each kind that ibv_query_device promises. One more
 * must fail with ENOMEM.
 */
#include <malloc.h>
#include <sys/resource.h>

#include "connect.h"

static struct ibv_context *ctx;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static union ibv_gid gid;
static char *memory;

static void *make_pd(void) { return ibv_alloc_pd(ctx); }
static void *make_cq(void) { return ibv_create_cq(ctx, 1, NULL, NULL, 0); }
static void *make_mr(void) { return ibv_reg_mr(pd, memory + 100, 5000, IBV_ACCESS_LOCAL_WRITE); }

static void *make_qp(void)
{
	struct ibv_qp_init_attr a = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .cap = { 1, 1, 1, 1, 0 } };

	return ibv_create_qp(pd, &a);
}

static void *make_srq(void)
{
	struct ibv_srq_init_attr a = { .attr = { .max_wr = 1, .max_sge = 1 } };

	return ibv_create_srq(pd, &a);
}

static void *make_ah(void)
{
	struct ibv_ah_attr a = { .is_global = 1, .port_num = 1, .grh = { .dgid = gid, .hop_limit = 64 } };

	return ibv_create_ah(pd, &a);
}

/* Makes objects until there are `most`, including the `there` that exist. */
static void fill(const char *what, void *(*make)(void), int there, int most)
{
	void *made;

	do {
		errno = 0;
		made = make();
		there += !!made;
	} while (made && there <= most);
	printf("%s: %d of %d, then %s\n", what, there, most, strerror(errno));
	CHECK(there == most && errno == ENOMEM);
}

int main(int argc, char **argv)
{
	enum { CHANNELS = 900 };
	int i, k, n = argc > 1 ? atoi(argv[1]) : 2000;
	struct rlimit files;
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_device_attr attr;
	struct ibv_comp_channel *channel = NULL;
	struct connection {
		struct ibv_cq *cq;
		struct ibv_qp *qp;
		struct ibv_mr *mr[3];
	} *all = calloc(n, sizeof(*all)), *first = &all[0], *last = &all[n - 1];

	mallopt(M_MMAP_THRESHOLD, 64 << 20);
	CHECK(!getrlimit(RLIMIT_NOFILE, &files));
	files.rlim_cur = files.rlim_max;
	CHECK(!setrlimit(RLIMIT_NOFILE, &files));
	CHECK(list && list[0] && (ctx = ibv_open_device(list[0])) && (pd = ibv_alloc_pd(ctx)));
	CHECK(!ibv_query_gid(ctx, 1, 0, &gid) && !ibv_query_device(ctx, &attr));
	for (i = 0; i < n; i++) {
		struct ibv_qp_init_attr a = { .qp_type = IBV_QPT_RC, .cap = { 128, 128, 1, 1, 0 } };

		if (i < CHANNELS)
			CHECK(channel = ibv_create_comp_channel(ctx));
		CHECK(all[i].cq = a.send_cq = a.recv_cq = ibv_create_cq(ctx, 256, NULL, channel, 0));
		CHECK(all[i].qp = ibv_create_qp(pd, &a));
		for (k = 0; k < 3; k++) {
			size_t size = k ? 1 << 20 : 64 << 10;
			char *p = malloc(size);

			CHECK(p);
			memset(p, k, 5000);
			CHECK(all[i].mr[k] = ibv_reg_mr(pd, p, size, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE));
		}
	}
	connect_qp(last->qp, first->qp->qp_num, gid);
	connect_qp(first->qp, last->qp->qp_num, gid);
	strcpy((char *)last->mr[1]->addr + 7, "some words");
	transfer(last->qp, IBV_WR_RDMA_WRITE, last->mr[1], first->mr[2], 7, 11);
	CHECK(!strcmp((char *)first->mr[2]->addr + 7, "some words"));
	printf("%d connections\n", n);
	fflush(stdout);

	CHECK((cq = ibv_create_cq(ctx, 1, NULL, NULL, 0)) && (memory = malloc(1 << 20)));
	CHECK(ibv_reg_mr(pd, memory, 1 << 20, IBV_ACCESS_LOCAL_WRITE));
	fill("QPs", make_qp, n, attr.max_qp);
	fill("CQs", make_cq, n + 1, attr.max_cq);
	fill("SRQs", make_srq, 0, attr.max_srq);
	fill("PDs", make_pd, 1, attr.max_pd);
	fill("AHs", make_ah, 0, attr.max_ah);
	fill("MRs", make_mr, 3 * n + 1, attr.max_mr);
	puts("as many as promised");
	return 0;
}
