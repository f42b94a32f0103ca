/* SPDX-License-Identifier: Apache-2.0 OR MIT
 *
 * Other threads and processes store into memory while it is registered and deregistered again and again: no
 * store may be lost, no system call into it may fail.
 */
#include "memory.h"

#include <dlfcn.h>
#include <linux/io_uring.h>
#include <sys/prctl.h>
#include <ucontext.h>

enum { SIZE = 1 << 20, WORDS = 64, STRIDE = SIZE / WORDS };

/* Duration of each case, s. */
static const double ENOUGH = 0.4;

static char *buffer;
static volatile int stop;

static volatile long *word(int i)
{
	return (volatile long *)(buffer + (size_t)i * STRIDE);
}

static void make_buffer(void)
{
	buffer = map_apart(SIZE);
	memset(buffer, 0, SIZE);
	stop = 0;
}

/* Registers and deregisters all of the buffer, halves of it, and pages of it, for a while. */
static void churn(void)
{
	double end = seconds() + ENOUGH;

	for (int i = 0; seconds() < end || i < 20; i++) {
		struct ibv_mr *half = NULL, *all;

		if (i % 3 == 0)
			half = reg(buffer + SIZE / 4 + 100, SIZE / 2);
		all = i % 3 == 2 ? reg(buffer + i % 200 * PAGE, 5 * PAGE) : reg(buffer, SIZE);
		if (half)
			dereg(half);
		dereg(all);
		/* Yields, because the other threads may need this processor. */
		if (i % 8 == 0)
			usleep(100);
	}
}

struct adder {
	pthread_t thread;
	int first;
	long rounds;
};

static void *add(void *arg)
{
	struct adder *a = arg;

	while (!stop) {
		for (int i = 0; i < WORDS; i++)
			word(i)[a->first]++;
		a->rounds++;
	}
	return NULL;
}

/* Two threads, each with words of its own. No word is atomic. */
static void threads(void)
{
	struct adder a[2];
	long lost = 0, rounds = 1;

	open_device();
	make_buffer();
	for (int i = 0; i < 2; i++) {
		a[i] = (struct adder){ .first = i };
		CHECK(!pthread_create(&a[i].thread, NULL, add, &a[i]));
	}
	churn();
	stop = 1;
	for (int i = 0; i < 2; i++) {
		pthread_join(a[i].thread, NULL);
		rounds *= a[i].rounds > 0;
		for (int j = 0; j < WORDS; j++)
			lost += word(j)[i] != a[i].rounds;
	}
	say("words of threads that lost increments: %ld; threads ran: %ld\n", lost, rounds);
}

static volatile long ticks;

static void tick(int sig)
{
	(void)sig;
	for (int i = 0; i < WORDS; i++)
		word(i)[2]++;
	ticks++;
}

static void signals(void)
{
	struct sigaction sa = { .sa_handler = tick, .sa_flags = SA_RESTART };
	struct itimerval every = { { 0, 300 }, { 0, 300 } };
	long lost = 0;

	open_device();
	make_buffer();
	sigaction(SIGALRM, &sa, NULL);
	setitimer(ITIMER_REAL, &every, NULL);
	churn();
	memset(&every, 0, sizeof every);
	setitimer(ITIMER_REAL, &every, NULL);
	for (int i = 0; i < WORDS; i++)
		lost += word(i)[2] != ticks;
	say("words of a signal handler that lost increments: %ld; it ran: %d\n", lost, ticks > 0);
}

/* Another process writes by process_vm_writev. */
static void peer_process(void)
{
	volatile long *shared = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	pid_t me = getpid(), pid;

	CHECK(shared != MAP_FAILED);
	open_device();
	make_buffer();
	prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);
	pid = fork();
	if (!pid) {
		long failed = 0, lost = 0;

		for (long round = 1; !shared[0]; round++) {
			long got;
			struct iovec mine = { &round, 8 }, back = { &got, 8 }, theirs = { NULL, 8 };

			int fine[WORDS];

			for (int i = 0; i < WORDS; i++) {
				theirs.iov_base = buffer + (size_t)i * STRIDE;
				fine[i] = process_vm_writev(me, &mine, 1, &theirs, 1, 0) == 8;
			}
			for (int i = 0; i < WORDS; i++) {
				theirs.iov_base = buffer + (size_t)i * STRIDE;
				got = 0;
				fine[i] &= process_vm_readv(me, &back, 1, &theirs, 1, 0) == 8;
				failed += !fine[i];
				lost += fine[i] && got != round;
			}
			shared[1] = round;
		}
		shared[2] = failed;
		shared[3] = lost;
		_exit(0);
	}
	while (!shared[1])
		usleep(100);
	churn();
	shared[0] = 1;
	ended(pid);
	say("stores of a peer process that were lost: %ld\n", shared[3]);
	say("its calls that failed: %ld\n", shared[2]);
}

/* Another thread's system calls read and write the buffer. */
static long call_failures, call_losses, call_rounds;

static void *call(void *arg)
{
	int pipes[2], zero = open("/dev/zero", O_RDONLY);

	(void)arg;
	CHECK(!pipe(pipes) && zero >= 0);
	for (long round = 1; !stop; round++) {
		for (int i = 0; i < WORDS; i += 7) {
			long got = 0;

			call_failures += write(pipes[1], &round, 8) != 8;
			call_failures += read(pipes[0], buffer + (size_t)i * STRIDE + 24, 8) != 8;
			call_failures += write(pipes[1], buffer + (size_t)i * STRIDE + 24, 8) != 8;
			call_failures += read(pipes[0], &got, 8) != 8;
			call_losses += got != round;
			call_failures += read(zero, buffer + (size_t)i * STRIDE + 512, 2 * PAGE) != 2 * PAGE;
		}
		call_rounds = round;
	}
	return NULL;
}

static void system_calls(void)
{
	pthread_t t;

	open_device();
	make_buffer();
	CHECK(!pthread_create(&t, NULL, call, NULL));
	while (!call_rounds)
		usleep(100);
	churn();
	stop = 1;
	pthread_join(t, NULL);
	say("system calls of another thread that failed: %ld; stores lost: %ld\n", call_failures, call_losses);
}

/* RDMA WRITEs of the peer into one region, while another region of the same pages is registered and
 * deregistered. */
static void other_region(const char *name, int access)
{
	char *from = map(PAGE);
	struct ibv_mr *from_mr, *mr;
	long failed = 0, lost = 0, added = 0;
	double end;
	int i;

	make_buffer();
	from_mr = reg(from, PAGE);
	mr = reg_with(buffer, SIZE, access);
	end = seconds() + ENOUGH;
	for (long round = 1; seconds() < end; round++) {
		struct ibv_mr *second;

		*(long *)from = round;
		for (i = 0; i < WORDS && !alone; i++)
			post(IBV_WR_RDMA_WRITE, from, from_mr, buffer + (size_t)i * STRIDE, mr, 8);
		for (i = 0; i < WORDS && alone; i++)
			*word(i) = round;
		second = reg(buffer, SIZE);
		for (i = 0; i < WORDS && !alone; i++)
			failed += completion() != 0;
		for (i = 0; i < WORDS; i++)
			lost += *word(i) != round;
		for (i = 0; i < 4 && !alone; i++)
			post(IBV_WR_ATOMIC_FETCH_AND_ADD, from + 64, from_mr, (void *)(word(i * 9) + 3), second, 8);
		if (alone)
			for (i = 0; i < 4; i++)
				word(i * 9)[3]++;
		for (i = 0; i < 4 && !alone; i++)
			failed += completion() != 0;
		dereg(second);
		added = round;
	}
	for (i = 0; i < 4; i++)
		lost += word(i * 9)[3] != added;
	dereg(mr);
	for (i = 0; i < WORDS; i++)
		lost += *word(i) != added;
	say("%s: requests that failed: %ld; stores lost: %ld\n", name, failed, lost);
	dereg(from_mr);
}

static void regions(void)
{
	connect_to_self();
	other_region("another region", ACCESS);
}

static void on_demand(void)
{
	connect_to_self();
	other_region("a region on demand", ACCESS | IBV_ACCESS_ON_DEMAND);
}

static void *idle(void *arg)
{
	(void)arg;
	while (!stop)
		usleep(500);
	return NULL;
}

/* One region is registered while there is another thread, the next one after that thread has ended. */
static void thread_ends(void)
{
	char *from = map(PAGE);
	struct ibv_mr *from_mr, *mr;
	long failed = 0, lost = 0;
	pthread_t t;

	connect_to_self();
	make_buffer();
	from_mr = reg(from, PAGE);
	CHECK(!pthread_create(&t, NULL, idle, NULL));
	mr = reg(buffer, SIZE);
	stop = 1;
	pthread_join(t, NULL);
	for (long round = 1; round < 100; round++) {
		struct ibv_mr *second;

		*(long *)from = round;
		for (int i = 0; i < WORDS && !alone; i++)
			post(IBV_WR_RDMA_WRITE, from, from_mr, buffer + (size_t)i * STRIDE, mr, 8);
		for (int i = 0; i < WORDS && alone; i++)
			*word(i) = round;
		second = reg(buffer, SIZE);
		for (int i = 0; i < WORDS && !alone; i++)
			failed += completion() != 0;
		for (int i = 0; i < WORDS; i++)
			lost += *word(i) != round;
		dereg(second);
	}
	say("requests that failed: %ld; stores lost: %ld\n", failed, lost);
}

/* An io_uring with its rings mapped. */
struct uring {
	int fd;
	char *sq, *cq;
	struct io_uring_sqe *sqes;
	struct io_uring_params params;
};

/* Reads or writes a file by the registered buffer 0. Returns the result. */
static int uring_do(struct uring *u, int opcode, int file, void *at, unsigned n)
{
	struct io_uring_params *p = &u->params;
	unsigned *tail = (unsigned *)(u->sq + p->sq_off.tail), *head = (unsigned *)(u->cq + p->cq_off.head);
	struct io_uring_cqe *done = (struct io_uring_cqe *)(u->cq + p->cq_off.cqes);
	int result;

	u->sqes[0] = (struct io_uring_sqe){ .opcode = opcode, .fd = file, .len = n, .addr = (uintptr_t)at };
	((unsigned *)(u->sq + p->sq_off.array))[*tail % p->sq_entries] = 0;
	__atomic_store_n(tail, *tail + 1, __ATOMIC_RELEASE);
	CHECK(syscall(SYS_io_uring_enter, u->fd, 1, 1, IORING_ENTER_GETEVENTS, NULL, 0) == 1);
	result = done[*head % p->cq_entries].res;
	__atomic_store_n(head, *head + 1, __ATOMIC_RELEASE);
	return result;
}

/* A buffer whose pages the kernel has pinned for io_uring. */
static void uring(void)
{
	char name[] = "/tmp/unirdma-memory-XXXXXX", *page = map(PAGE);
	struct uring u = { .fd = -1 };
	int file = mkstemp(name);
	struct ibv_mr *mr, *page_mr;
	struct iovec v;

	CHECK(file >= 0 && !unlink(name));
	u.fd = syscall(SYS_io_uring_setup, 4, &u.params);
	if (u.fd < 0) {
		say("no io_uring: %s\n", strerror(errno));
		return;
	}
	connect_to_self();
	u.sq = mmap(NULL, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, u.fd, IORING_OFF_SQ_RING);
	u.cq = mmap(NULL, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, u.fd, IORING_OFF_CQ_RING);
	u.sqes = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, u.fd, IORING_OFF_SQES);
	if (u.sq == MAP_FAILED)
		u.sq = u.cq = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, u.fd, IORING_OFF_SQ_RING);
	CHECK(u.sq != MAP_FAILED && u.cq != MAP_FAILED && (void *)u.sqes != MAP_FAILED);
	make_buffer();
	v = (struct iovec){ buffer, 16 * PAGE };
	CHECK(!syscall(SYS_io_uring_register, u.fd, IORING_REGISTER_BUFFERS, &v, 1));
	page_mr = reg(page, PAGE);
	for (int round = 0; round < 3; round++) {
		mr = reg(buffer, SIZE);
		memset(page, 'D' + round, PAGE);
		CHECK(pwrite(file, page, PAGE, 0) == PAGE);
		say("the kernel reads into it: %d", uring_do(&u, IORING_OP_READ_FIXED, file, buffer + round * PAGE, PAGE));
		say(" '%c'\n", buffer[round * PAGE]);
		memset(page, 'P' + round, PAGE);
		buffer[8 * PAGE] = 'w';
		say("the peer writes %d", rdma_write(buffer + 8 * PAGE + 1, mr, page, page_mr, 1));
		say(", the kernel writes from it: %d", uring_do(&u, IORING_OP_WRITE_FIXED, file, buffer + 8 * PAGE, 2));
		CHECK(pread(file, page, 2, 0) == 2);
		say(" '%.2s'\n", page);
		dereg(mr);
		say("not registered any more: %d", uring_do(&u, IORING_OP_READ_FIXED, file, buffer + 12 * PAGE, 2));
		say(" '%.2s'\n", buffer + 12 * PAGE);
	}
}

static ucontext_t main_context, coroutine_context;
static struct ibv_mr *coroutine_mr;
static volatile long sum;

static void coroutine(void)
{
	volatile long x[64];
	long s = 0;

	for (int i = 0; i < 64; i++)
		x[i] = i;
	for (int i = 0; i < 3; i++) {
		coroutine_mr = reg(buffer, 16 * SIZE);
		for (int j = 0; j < 64; j++)
			s += x[j];
		dereg(coroutine_mr);
		for (int j = 0; j < 64; j++)
			s += x[j];
	}
	coroutine_mr = reg(buffer, 16 * SIZE);
	sum = s;
	swapcontext(&coroutine_context, &main_context);
}

/* The stack of the function that registers is in the region. */
static void coroutines(void)
{
	for (int place = 0; place < 3; place++) {
		char *from = map(PAGE);
		struct ibv_mr *from_mr;

		connect_to_self();
		buffer = map_apart(16 * SIZE);
		from_mr = reg(from, PAGE);
		getcontext(&coroutine_context);
		coroutine_context.uc_stack.ss_sp = buffer + (place ? place * 8 * SIZE - SIZE : SIZE / 2);
		coroutine_context.uc_stack.ss_size = SIZE / 2;
		coroutine_context.uc_link = &main_context;
		makecontext(&coroutine_context, coroutine, 0);
		swapcontext(&main_context, &coroutine_context);
		strcpy(from, "for a stack");
		say("place %d: sum %ld", place, sum);
		say(", the peer writes %d", rdma_write(buffer + 100, coroutine_mr, from, from_mr, 12));
		say(" '%s'\n", buffer + 100);
	}
}

/* A second copy of the library registers what the first one has registered. */
static void second_copy(void)
{
	char *from = map(PAGE);
	struct ibv_mr *from_mr, *mr;

	connect_to_self();
	make_buffer();
	from_mr = reg(from, PAGE);
	mr = reg(buffer, SIZE);
	for (int round = 0; round < 3; round++) {
		if (!alone) {
			static void *lib;
			struct ibv_device **list;
			static struct ibv_context *c;
			static struct ibv_pd *d;
			struct ibv_mr *other;

			if (!lib) {
				lib = dlmopen(LM_ID_NEWLM, "libibverbs.so.1", RTLD_NOW);
				CHECK(lib);
				list = ((struct ibv_device **(*)(int *))dlsym(lib, "ibv_get_device_list"))(NULL);
				CHECK(list && list[0]);
				c = ((struct ibv_context *(*)(struct ibv_device *))dlsym(lib, "ibv_open_device"))(list[0]);
				CHECK(c);
				d = ((struct ibv_pd *(*)(struct ibv_context *))dlsym(lib, "ibv_alloc_pd"))(c);
				CHECK(d);
			}
			other = ((struct ibv_mr *(*)(struct ibv_pd *, void *, size_t, int))dlsym(lib, "ibv_reg_mr"))(
				d, buffer, SIZE, 7);
			CHECK(other);
			snprintf(from, PAGE, "round %d", round);
			say("the peer writes %d", rdma_write(buffer + 5000, mr, from, from_mr, 10));
			CHECK(!((int (*)(struct ibv_mr *))dlsym(lib, "ibv_dereg_mr"))(other));
		} else {
			snprintf(from, PAGE, "round %d", round);
			say("the peer writes %d", rdma_write(buffer + 5000, mr, from, from_mr, 10));
		}
		say(" '%s'", buffer + 5000);
		snprintf(from, PAGE, "later %d", round);
		say(" %d", rdma_write(buffer + 5000, mr, from, from_mr, 10));
		say(" '%s'\n", buffer + 5000);
	}
	dereg(mr);
	madvise(buffer, SIZE, MADV_DONTNEED);
	say("after MADV_DONTNEED: %ld pages are not zero\n", not_zero(buffer, SIZE));
}

static void *register_all(void *arg)
{
	long lost = 0, number = (long)arg;
	char *own = map_apart(64 * PAGE);

	for (int i = 0; i < 150; i++) {
		struct ibv_mr *a, *b;

		fill(own, 64 * PAGE, i);
		a = reg(own + i % 7 * PAGE, 50 * PAGE);
		/* A part of the memory that all threads use. */
		b = reg(buffer + (i * 13 + number) % 200 * PAGE, 20 * PAGE);
		word(number)[number]++;
		lost += spoiled(own, 64 * PAGE, i);
		dereg(a);
		lost += spoiled(own, 64 * PAGE, i);
		dereg(b);
		word(number)[number]++;
		if (i % 10 == 9) {
			munmap(own, 64 * PAGE);
			own = map_apart(64 * PAGE);
		}
	}
	return (void *)(lost + (word(number)[number] != 300));
}

static void eight_threads(void)
{
	pthread_t t[8];
	long lost = 0;

	open_device();
	make_buffer();
	for (long i = 0; i < 8; i++)
		CHECK(!pthread_create(&t[i], NULL, register_all, (void *)i));
	for (int i = 0; i < 8; i++) {
		void *r;

		pthread_join(t[i], &r);
		lost += (long)r;
	}
	say("pages and increments that eight threads lost: %ld\n", lost);
	madvise(buffer, SIZE, MADV_DONTNEED);
	say("after MADV_DONTNEED: %ld pages are not zero\n", not_zero(buffer, SIZE));
}

/* Many regions in one mapping. */
static void many(char *p, size_t n, const char *name)
{
	enum { COUNT = 65536 };
	static struct ibv_mr *mr[COUNT];
	int made = 0, gone = 0;

	memset(p, 1, n);
	for (int i = 0; i < COUNT; i++) {
		mr[i] = alone ? reg(p, PAGE) : ibv_reg_mr(pd, p + (size_t)i % 4096 * PAGE + i / 4096, PAGE - 100, 7);
		if (!mr[i]) {
			say("%s: region %d: %s\n", name, i, strerror(errno));
			break;
		}
		made++;
	}
	for (int i = 0; i < made; i++)
		gone += alone || !ibv_dereg_mr(mr[i]);
	say("%s: %d regions were made, %d are gone\n", name, made, gone);
}

static void many_private(void)
{
	open_device();
	many(map_apart((size_t)4096 * PAGE), (size_t)4096 * PAGE, "private memory");
}

static void many_shared(void)
{
	char *p = mmap(NULL, (size_t)4096 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	CHECK(p != MAP_FAILED);
	open_device();
	many(p, (size_t)4096 * PAGE, "shared memory");
}

/* Memory that is shared from the start stays shared. */
static void shared_memory(void)
{
	char *p = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0), *from = map(PAGE);
	struct ibv_mr *mr, *from_mr;
	pid_t pid;

	CHECK(p != MAP_FAILED);
	connect_to_self();
	from_mr = reg(from, PAGE);
	mr = reg(p, SIZE);
	pid = fork();
	if (!pid) {
		strcpy(p + 8192, "child");
		_exit(3);
	}
	say("child: %d", ended(pid));
	say(", its parent sees '%s'\n", p + 8192);
	strcpy(from, "peer");
	say("the peer writes %d", rdma_write(p + 100, mr, from, from_mr, 5));
	say(" '%s'\n", p + 100);
	dereg(mr);
	pid = fork();
	if (!pid) {
		strcpy(p + 8192, "later");
		_exit(3);
	}
	say("child: %d", ended(pid));
	say(", its parent sees '%s'\n", p + 8192);
}

static const struct a_case cases[] = {
	{ "threads", threads },	  { "signals", signals },     { "peer-process", peer_process }, { "system-calls", system_calls },
	{ "regions", regions },	  { "on-demand", on_demand }, { "thread-ends", thread_ends },	{ "io_uring", uring },
	{ "coroutine", coroutines }, { "second-copy", second_copy }, { "eight-threads", eight_threads }, { "many-private", many_private },
	{ "many-shared", many_shared },
	{ "shared", shared_memory }, { NULL, NULL },
};

int main(int argc, char **argv)
{
	return run_case(argc, argv, cases);
}
