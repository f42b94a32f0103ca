/* SPDX-License-Identifier: Apache-2.0 OR MIT
 *
 * Registers memory and transfers data after the program has changed its user, or has made itself not dumpable,
 * so that it may not open /proc/self/mem and similar files. Each case is a process of its own. Without an
 * argument all cases run.
 */
#define _GNU_SOURCE
#include <grp.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "connect.h"

enum { SETUID = 1, UNDUMPABLE = 2, THREAD = 4, EARLY = 8, CLOSED = 16, CASES = 32 };

static struct ibv_context *ctx;

static void *idle(void *unused)
{
	(void)unused;
	for (;;)
		pause();
	return NULL;
}

static void open_device(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);

	CHECK(list && list[0] && (ctx = ibv_open_device(list[0])));
}

static void traffic(void)
{
	enum { SIZE = 64 << 20, USED = 1 << 20 };
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	struct ibv_cq *cq = ibv_create_cq(ctx, 16, NULL, NULL, 0);
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .cap = { 4, 4, 1, 1, 0 } };
	union ibv_gid gid;
	struct ibv_mr *mr[2];
	struct ibv_qp *qp[2];
	unsigned char *p[2];
	int i;

	CHECK(pd && cq && !ibv_query_gid(ctx, 1, 0, &gid));
	for (i = 0; i < 2; i++) {
		p[i] = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		CHECK(p[i] != MAP_FAILED);
		memset(p[i] + 5000, 7 + i, USED);
		CHECK(mr[i] = ibv_reg_mr(pd, p[i], SIZE, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ));
		CHECK(qp[i] = ibv_create_qp(pd, &init));
	}
	connect_qp(qp[0], qp[1]->qp_num, gid);
	connect_qp(qp[1], qp[0]->qp_num, gid);
	transfer(qp[0], IBV_WR_RDMA_WRITE, mr[0], mr[1], 4000, USED);
	CHECK(!p[1][4999] && p[1][5000] == 7 && p[1][4000 + USED - 1] == 7 && p[1][4000 + USED] == 8);
	p[1][SIZE - 1] = 42;
	transfer(qp[0], IBV_WR_RDMA_READ, mr[0], mr[1], SIZE - USED, USED);
	CHECK(p[0][SIZE - 1] == 42 && !p[0][SIZE - 2]);
	for (i = 0; i < 2; i++)
		CHECK(!ibv_dereg_mr(mr[i]));
	CHECK(p[1][5000] == 7 && p[1][4000 + USED] == 8 && p[0][SIZE - 1] == 42);
}

static void run(int is)
{
	pthread_t thread;

	if (is & EARLY)
		open_device();
	if (is & CLOSED)
		CHECK(!close_range(3, ~0U, 0));
	if (is & SETUID)
		CHECK(!setgroups(0, NULL) && !setgid(1000) && !setuid(1000));
	if (is & UNDUMPABLE)
		CHECK(!prctl(PR_SET_DUMPABLE, 0));
	if (is & THREAD)
		CHECK(!pthread_create(&thread, NULL, idle, NULL));
	if (!(is & EARLY))
		open_device();
	traffic();
}

int main(int argc, char **argv)
{
	int is, status, failed = 0;
	char number[12];

	if (argc > 1) {
		run(atoi(argv[1]));
		return 0;
	}
	for (is = 0; is < CASES; is++) {
		pid_t pid;

		if (is & SETUID && geteuid())
			continue;
		/* A context does not survive the closing of its descriptors. A process that closes all of them
		 * and then drops its rights cannot copy, which a process with threads may need. */
		if (is & CLOSED && (is & (EARLY | THREAD) || getenv("UNIRDMA_MR")))
			continue;
		snprintf(number, sizeof(number), "%d", is);
		pid = fork();
		if (!pid) {
			execl("/proc/self/exe", argv[0], number, NULL);
			_exit(127);
		}
		CHECK(pid > 0 && waitpid(pid, &status, 0) == pid);
		if (status) {
			printf("failed:%s%s%s%s%s\n", is & SETUID ? " another user" : "", is & UNDUMPABLE ? " not dumpable" : "",
			       is & THREAD ? " a thread" : "", is & EARLY ? " opened before" : "", is & CLOSED ? " descriptors closed" : "");
			failed = 1;
		}
	}
	if (!failed)
		puts("all rights were enough");
	return failed;
}
