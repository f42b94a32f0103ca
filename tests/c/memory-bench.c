/* SPDX-License-Identifier: Apache-2.0 OR MIT
 *
 * Cost of registering memory: `memory-bench WHAT [quick]`. Prints names and numbers, times in microseconds.
 * `quick` measures nothing useful, and only shows the way of the memory.
 */
#include "memory.h"

static int quick;

static double median(double *x, int n)
{
	qsort(x, n, sizeof *x, ascending);
	return x[n / 2];
}

/* Registers and deregisters the same buffer again and again, or a new one each time. */
static void registrations(size_t n, int fresh)
{
	enum { MOST = 2000 };
	static double regs[MOST], deregs[MOST];
	int count = quick ? 2 : n > 100000 ? 300 : MOST;
	char *p = map_apart(n);

	memset(p, 1, n);
	for (int i = 0; i < count; i++) {
		double start, made;
		struct ibv_mr *mr;

		if (fresh) {
			munmap(p, n);
			p = map_apart(n);
			memset(p, i, n);
		}
		start = seconds();
		mr = reg(p, n);
		made = seconds();
		dereg(mr);
		deregs[i] = (seconds() - made) * 1e6;
		regs[i] = (made - start) * 1e6;
	}
	say("%s-%zu-reg %.2f\n", fresh ? "fresh" : "same", n, median(regs, count));
	say("%s-%zu-dereg %.2f\n", fresh ? "fresh" : "same", n, median(deregs, count));
}

/* A large buffer: the cost of pinning and copying it, of registering it, and of registering it again. */
static void large(void)
{
	enum { ROUNDS = 3 };
	size_t n = quick ? 1 << 20 : 1 << 30;
	double pin[ROUNDS], first[ROUNDS], gone[ROUNDS], again[ROUNDS];
	int locked = 0;

	for (int i = 0; i < ROUNDS; i++) {
		char *from = map_apart(n), *to;
		double start, t;
		struct ibv_mr *mr;

		memset(from, 1, n);
		start = seconds();
		to = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
		CHECK(to != MAP_FAILED);
		/* An ordinary user may lock only little memory. */
		locked = !mlock(to, n);
		memcpy(to, from, n);
		pin[i] = (seconds() - start) * 1e6;
		munmap(to, n);
		start = seconds();
		mr = reg(from, n);
		first[i] = ((t = seconds()) - start) * 1e6;
		dereg(mr);
		gone[i] = ((start = seconds()) - t) * 1e6;
		mr = reg(from, n);
		again[i] = (seconds() - start) * 1e6;
		CHECK(from[n - 1] == 1);
		dereg(mr);
		munmap(from, n);
	}
	say("large-pin %.1f\nlarge-locked %d\nlarge-reg %.1f\nlarge-dereg %.1f\nlarge-again %.1f\n", median(pin, ROUNDS), locked,
	    median(first, ROUNDS), median(gone, ROUNDS), median(again, ROUNDS));
}

/* The cost of a fork while a large sparse buffer is registered. */
static void forks(void)
{
	enum { ROUNDS = 7 };
	size_t n = (size_t)4 << 30;
	char *p = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	double t[ROUNDS];

	CHECK(p != MAP_FAILED);
	memset(p + n / 2, 1, PAGE);
	reg(p, n);
	for (int i = 0; i < ROUNDS; i++) {
		double start = seconds();
		pid_t pid = fork();

		if (!pid)
			_exit(p[n / 2] == 1 ? 3 : 4);
		t[i] = (seconds() - start) * 1e6;
		CHECK(ended(pid) == 3);
	}
	say("fork %.1f\n", median(t, ROUNDS));
}

int main(int argc, char **argv)
{
	quick = argc > 2;
	open_device();
	if (argc > 1 && !strcmp(argv[1], "registrations"))
		for (int fresh = 0; fresh < 2; fresh++) {
			registrations(4096, fresh);
			registrations(1 << 20, fresh);
		}
	else if (argc > 1 && !strcmp(argv[1], "large"))
		large();
	else if (argc > 1 && !strcmp(argv[1], "fork"))
		forks();
	else
		return 2;
	return 0;
}
