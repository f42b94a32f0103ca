/* SPDX-License-Identifier: Apache-2.0 OR MIT
 *
 * Common code of the programs of `cargo xtask test memory`. Each is started as `PROGRAM CASE [private]` and
 * prints, line by line, its observations of its own memory. With `private` there is no RNIC: registration does
 * nothing, RDMA is memcpy, and a wait for an event is a read of an empty pipe. A run with a vRNIC must print
 * the same lines.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "times.h"

enum { PAGE = 4096 };

/* Not every program uses all of this. */
#define COMMON static __attribute__((unused))

COMMON int alone; /* True if there is no vRNIC. */
COMMON struct ibv_context *ctx;
COMMON struct ibv_pd *pd;
COMMON struct ibv_cq *cq;
COMMON struct ibv_qp *qp;
COMMON int out = 1;

#define ACCESS (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC)

/* Without a buffer, so that a forked child does not print its parent's lines again. */
#define say(...) dprintf(out, __VA_ARGS__)

COMMON void open_device(void)
{
	struct ibv_device **list;

	if (alone)
		return;
	list = ibv_get_device_list(NULL);
	CHECK(list && list[0]);
	ctx = ibv_open_device(list[0]);
	CHECK(ctx);
	ibv_free_device_list(list);
	pd = ibv_alloc_pd(ctx);
	CHECK(pd);
}

/* Opens the device, with a QP that is connected to itself: the program is its own peer. */
COMMON void connect_to_self(void)
{
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = ACCESS };
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .cap = { 512, 512, 1, 1, 0 } };
	union ibv_gid gid;

	open_device();
	if (alone)
		return;
	cq = ibv_create_cq(ctx, 1024, NULL, NULL, 0);
	CHECK(cq);
	init.send_cq = init.recv_cq = cq;
	qp = ibv_create_qp(pd, &init);
	CHECK(qp && !ibv_query_gid(ctx, 1, 0, &gid));
	CHECK(!ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	a = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = qp->qp_num,
				  .max_dest_rd_atomic = 4, .min_rnr_timer = 12 };
	a.ah_attr.is_global = 1;
	a.ah_attr.port_num = 1;
	a.ah_attr.grh.dgid = gid;
	a.ah_attr.grh.hop_limit = 64;
	CHECK(!ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
				     IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
	a = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 4 };
	CHECK(!ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
				     IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC));
}

/* Registers a region. With private memory the result is only not NULL. */
COMMON struct ibv_mr *reg_with(void *at, size_t n, int access)
{
	static struct ibv_mr none;
	struct ibv_mr *mr = alone ? &none : ibv_reg_mr(pd, at, n, access);

	if (!mr) {
		say("ibv_reg_mr of %zu bytes: %s\n", n, strerror(errno));
		exit(1);
	}
	return mr;
}

COMMON struct ibv_mr *reg(void *at, size_t n)
{
	return reg_with(at, n, ACCESS);
}

COMMON void dereg(struct ibv_mr *mr)
{
	CHECK(alone || !ibv_dereg_mr(mr));
}

/* Takes one completion. Returns its status. */
COMMON int completion(void)
{
	struct ibv_wc wc;
	int n;

	while (!(n = ibv_poll_cq(cq, 1, &wc)))
		;
	CHECK(n == 1);
	return wc.status;
}

COMMON void post(int opcode, void *local, struct ibv_mr *lmr, void *remote, struct ibv_mr *rmr, size_t n)
{
	struct ibv_sge sge = { (uintptr_t)local, n, lmr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = opcode, .send_flags = IBV_SEND_SIGNALED }, *bad;

	if (opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
		wr.wr.atomic.remote_addr = (uintptr_t)remote;
		wr.wr.atomic.rkey = rmr->rkey;
		wr.wr.atomic.compare_add = 1;
	} else if (rmr) {
		wr.wr.rdma.remote_addr = (uintptr_t)remote;
		wr.wr.rdma.rkey = rmr->rkey;
	}
	CHECK(!ibv_post_send(qp, &wr, &bad));
}

/* The peer makes an RDMA WRITE into `to`. Returns the status. */
COMMON int rdma_write(void *to, struct ibv_mr *to_mr, void *from, struct ibv_mr *from_mr, size_t n)
{
	if (alone) {
		memmove(to, from, n);
		return 0;
	}
	post(IBV_WR_RDMA_WRITE, from, from_mr, to, to_mr, n);
	return completion();
}

/* The peer makes an RDMA READ of `from`. Returns the status. */
COMMON int rdma_read(void *to, struct ibv_mr *to_mr, void *from, struct ibv_mr *from_mr, size_t n)
{
	if (alone) {
		memmove(to, from, n);
		return 0;
	}
	post(IBV_WR_RDMA_READ, to, to_mr, from, from_mr, n);
	return completion();
}

/* Adds 1 to a word of registered memory by RDMA. `old` receives the old value. */
COMMON int rdma_add(uint64_t *old, struct ibv_mr *old_mr, uint64_t *word, struct ibv_mr *word_mr)
{
	if (alone) {
		*old = __atomic_fetch_add(word, 1, __ATOMIC_SEQ_CST);
		return 0;
	}
	post(IBV_WR_ATOMIC_FETCH_AND_ADD, old, old_mr, word, word_mr, 8);
	return completion();
}

/* Sends `n` bytes by a SEND that arrives in `to`. */
COMMON int rdma_send(void *to, struct ibv_mr *to_mr, void *from, struct ibv_mr *from_mr, size_t n)
{
	struct ibv_sge sge = { (uintptr_t)to, n, to_mr->lkey };
	struct ibv_recv_wr wr = { .sg_list = &sge, .num_sge = 1 }, *bad;
	int a, b;

	if (alone) {
		memmove(to, from, n);
		return 0;
	}
	CHECK(!ibv_post_recv(qp, &wr, &bad));
	post(IBV_WR_SEND, from, from_mr, NULL, NULL, n);
	a = completion();
	b = completion();
	return a ? a : b;
}

COMMON char *map(size_t n)
{
	char *p = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	CHECK(p != MAP_FAILED);
	return p;
}

/* A mapping without neighbours that it could be merged with. */
COMMON char *map_apart(size_t n)
{
	char *p = mmap(NULL, n + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	CHECK(p != MAP_FAILED && !mprotect(p + PAGE, n, PROT_READ | PROT_WRITE));
	return p + PAGE;
}

/* Fills each page with a byte of its own. */
COMMON void fill(char *p, size_t n, int seed)
{
	for (size_t i = 0; i < n; i += PAGE)
		memset(p + i, 1 + (seed + i / PAGE) % 250, n - i < PAGE ? n - i : PAGE);
}

/* Number of pages that differ from the data of `fill`. */
COMMON long spoiled(const char *p, size_t n, int seed)
{
	char page[PAGE];
	long bad = 0;

	for (size_t i = 0; i < n; i += PAGE) {
		memset(page, 1 + (seed + i / PAGE) % 250, PAGE);
		bad += memcmp(p + i, page, n - i < PAGE ? n - i : PAGE) != 0;
	}
	return bad;
}

/* Number of pages with a byte that is not zero. */
COMMON long not_zero(const char *p, size_t n)
{
	static const char page[PAGE];
	long bad = 0;

	for (size_t i = 0; i < n; i += PAGE)
		bad += memcmp(p + i, page, n - i < PAGE ? n - i : PAGE) != 0;
	return bad;
}

COMMON void pause_ms(long ms)
{
	struct timespec t = { ms / 1000, ms % 1000 * 1000000 };

	while (nanosleep(&t, &t) && errno == EINTR)
		;
}

/* Waits for a child. Returns its exit code, or 1000 plus the signal's number if it was killed. */
COMMON int ended(pid_t child)
{
	int status;

	while (waitpid(child, &status, 0) < 0)
		CHECK(errno == EINTR);
	return WIFSIGNALED(status) ? 1000 + WTERMSIG(status) : WEXITSTATUS(status);
}

COMMON sigjmp_buf after_fault;

COMMON void on_fault(int sig)
{
	(void)sig;
	siglongjmp(after_fault, 1);
}

/* True if a store to this byte does not fault. The byte keeps its value. */
COMMON int can_store(volatile char *p)
{
	struct sigaction sa = { .sa_handler = on_fault }, segv, bus;
	int fine = 0;

	sigaction(SIGSEGV, &sa, &segv);
	sigaction(SIGBUS, &sa, &bus);
	if (!sigsetjmp(after_fault, 1)) {
		*p = *p;
		fine = 1;
	}
	sigaction(SIGSEGV, &segv, NULL);
	sigaction(SIGBUS, &bus, NULL);
	return fine;
}

COMMON int can_load(volatile char *p)
{
	struct sigaction sa = { .sa_handler = on_fault }, segv, bus;
	int fine = 0;

	sigaction(SIGSEGV, &sa, &segv);
	sigaction(SIGBUS, &sa, &bus);
	if (!sigsetjmp(after_fault, 1)) {
		(void)*p;
		fine = 1;
	}
	sigaction(SIGSEGV, &segv, NULL);
	sigaction(SIGBUS, &bus, NULL);
	return fine;
}

/* The number after `key` in a file of /proc; -1 if there is none. */
COMMON long proc_number(const char *file, const char *key)
{
	FILE *f = fopen(file, "r");
	char line[512];
	long value = -1;

	CHECK(f);
	while (value < 0 && fgets(line, sizeof line, f))
		if (!strncmp(line, key, strlen(key)))
			value = strtol(line + strlen(key), NULL, 10);
	fclose(f);
	return value;
}

/* Number of mappings in a range. */
COMMON int mappings(const char *p, size_t n)
{
	FILE *f = fopen("/proc/self/maps", "r");
	unsigned long start, end, at = (unsigned long)p;
	char line[512];
	int count = 0;

	CHECK(f);
	while (fgets(line, sizeof line, f))
		if (sscanf(line, "%lx-%lx ", &start, &end) == 2 && start < at + n && end > at)
			count++;
	fclose(f);
	return count;
}

/* Prints those of the `wanted` flags (two letters and a space each) that all mappings of a range have in
 * /proc/self/smaps. */
COMMON void say_flags(const char *when, const char *p, size_t n, const char *wanted)
{
	FILE *f = fopen("/proc/self/smaps", "r");
	unsigned long start, end, at = (unsigned long)p;
	char line[512], has[64] = "";
	int inside = 0;

	CHECK(f);
	strcpy(has, wanted);
	while (fgets(line, sizeof line, f)) {
		if (sscanf(line, "%lx-%lx ", &start, &end) == 2)
			inside = start < at + n && end > at;
		if (!inside || strncmp(line, "VmFlags:", 8))
			continue;
		for (char *w = has; *w; w += 3) {
			char flag[5] = { ' ', w[0], w[1], ' ', 0 };

			if (!strstr(line, flag))
				w[0] = w[1] = '-';
		}
	}
	fclose(f);
	say("%s: %s\n", when, has);
}

struct a_case {
	const char *name;
	void (*run)(void);
};

COMMON int run_case(int argc, char **argv, const struct a_case *cases)
{
	alone = argc > 2 && !strcmp(argv[2], "private");
	for (; cases->name; cases++) {
		if (argc < 2)
			printf("%s\n", cases->name);
		else if (!strcmp(argv[1], cases->name)) {
			cases->run();
			say("end\n");
			return 0;
		}
	}
	return argc < 2 ? 0 : 2;
}
