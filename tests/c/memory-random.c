/* SPDX-License-Identifier: Apache-2.0 OR MIT
 *
 * `memory-random SEED STEPS [private]`: registers, deregisters, reallocates, forks, remaps and protects memory
 * at random, while threads, a signal handler and a peer store into it. A model has the expected value of every
 * byte. The first difference ends the program with the seed and the step. The steps depend only on the seed;
 * the timing of the other threads does not. Every fourth seed has no threads. With every other seed the signals
 * go to a thread that registers nothing.
 */
#include "memory.h"

enum { BLOCKS = 24, REGIONS = 6, SLOTS = 32, THREADS = 2, COUNTERS = 64 };

static unsigned long long seed_given;
static long step;

static uint64_t state;

static uint32_t any(uint32_t below)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return (uint32_t)(state >> 32) % below;
}

/* A piece of memory. `model` has its expected bytes. */
struct block {
	unsigned char *at, *model;
	size_t size;
	int mapped;    /* From mmap, not from malloc. */
	int protected; /* Read-only for now. */
	int wiped;     /* MADV_WIPEONFORK or MADV_DONTFORK is set: a child does not check it. */
	struct ibv_mr *mr[REGIONS];
	size_t mr_from[REGIONS], mr_size[REGIONS];
};

static struct block blocks[BLOCKS];

__attribute__((format(printf, 1, 2))) static void wrong(const char *format, ...)
{
	va_list args;

	say("seed %llu, step %ld: ", seed_given, step);
	va_start(args, format);
	vdprintf(out, format, args);
	va_end(args);
	say("\n");
	_exit(1);
}

/* Prints the kernel's information about the mappings in a range, for debugging. */
static void show(const unsigned char *p, size_t n)
{
	FILE *f = fopen("/proc/self/smaps", "r");
	unsigned long start, end, at = (unsigned long)p;
	char line[512];
	int inside = 0, head;

	while (f && fgets(line, sizeof line, f)) {
		head = sscanf(line, "%lx-%lx ", &start, &end) == 2;
		if (head)
			inside = start < at + n && end > at;
		if (inside && (head || !strncmp(line, "VmFlags", 7)))
			say("  %s", line);
	}
	if (f)
		fclose(f);
}

static void check(struct block *b, const char *after)
{
	if (memcmp(b->at, b->model, b->size))
		for (size_t i = 0; i < b->size; i++)
			if (b->at[i] != b->model[i])
				wrong("after %s: byte %zu of %zu of block %d is %#x, not %#x", after, i, b->size,
				      (int)(b - blocks), b->at[i], b->model[i]);
}

/* Stores random bytes into a random part. */
static void scribble(struct block *b)
{
	size_t from = any(b->size), n = 1 + any(any(4) ? 100 : 100000);

	if (b->protected)
		return;
	if (n > b->size - from)
		n = b->size - from;
	memset(b->at + from, (int)any(256), n);
	memcpy(b->model + from, b->at + from, n);
}

static int registered(struct block *b)
{
	for (int i = 0; i < REGIONS; i++)
		if (b->mr[i])
			return 1;
	return 0;
}

static void deregister(struct block *b, int i)
{
	if (b->mr[i])
		dereg(b->mr[i]);
	b->mr[i] = NULL;
}

static void deregister_all(struct block *b)
{
	for (int i = 0; i < REGIONS; i++)
		deregister(b, i);
}

/* The model's own memory is never registered, and does not come from the allocator that is tested. */
static unsigned char *model_of(size_t n)
{
	return (unsigned char *)map(n);
}

static void unprotect(struct block *b)
{
	if (b->protected && mprotect(b->at, b->size, PROT_READ | PROT_WRITE))
		wrong("mprotect: %s", strerror(errno));
	b->protected = 0;
}

static void let_go(struct block *b)
{
	check(b, "all");
	/* Some programs deregister too late. */
	if (b->mapped && any(8) == 0) {
		munmap(b->at, b->size);
		deregister_all(b);
	} else {
		deregister_all(b);
		check(b, "the end of all regions");
		unprotect(b);
		if (b->wiped)
			madvise(b->at, b->size, MADV_KEEPONFORK), madvise(b->at, b->size, MADV_DOFORK);
		if (b->mapped)
			munmap(b->at, b->size);
		else
			free(b->at);
	}
	munmap(b->model, b->size);
	memset(b, 0, sizeof *b);
}

static size_t some_size(void)
{
	switch (any(4)) {
	case 0:
		return 1 + any(5000);
	case 1:
		return 1 + any(60000);
	case 2:
		return 100000 + any(400000);
	default:
		return PAGE * (1 + any(100));
	}
}

static void make(struct block *b)
{
	size_t n = some_size();

	b->mapped = any(3) == 0;
	if (b->mapped)
		n = (n + PAGE - 1) / PAGE * PAGE;
	b->size = n;
	b->model = model_of(n);
	b->at = b->mapped ? (unsigned char *)map(n) : any(2) ? calloc(1, n) : malloc(n);
	if (!b->at)
		wrong("no memory");
	if (!b->mapped && any(2)) {
		/* calloc, or mmap, must have given zeros. */
		free(b->at);
		b->at = calloc(1, n);
		if (!b->at)
			wrong("no memory");
		check(b, "calloc");
	} else if (b->mapped) {
		check(b, "mmap");
	}
	for (size_t i = 0; i < n; i++)
		b->model[i] = (unsigned char)(i * 7 + (size_t)step);
	memcpy(b->at, b->model, n);
}

static void resize(struct block *b)
{
	size_t n = some_size(), kept;
	unsigned char *at, *model;

	unprotect(b);
	if (b->mapped) {
		n = (n + PAGE - 1) / PAGE * PAGE;
		deregister_all(b);
		check(b, "the end of all regions");
		/* Half of the times the block is registered: as a whole, because mremap may refuse a mapping
		 * that is registered in parts. */
		if (any(2)) {
			b->mr[0] = reg(b->at, b->size);
			b->mr_from[0] = 0;
			b->mr_size[0] = b->size;
		}
		at = mremap(b->at, b->size, n, MREMAP_MAYMOVE);
		/* Registered parts may be mappings of their own, and so may parts that were registered while
		 * the rest got MADV_DONTFORK. */
		if (at == MAP_FAILED && errno == EFAULT && (registered(b) || b->wiped))
			return;
		if (at == MAP_FAILED) {
			int why = errno;

			show(b->at, b->size);
			errno = why;
			wrong("mremap of block %d from %zu to %zu, %s: %s", (int)(b - blocks), b->size, n,
			      registered(b) ? "registered" : "private", strerror(errno));
		}
	} else {
		deregister_all(b);
		at = realloc(b->at, n);
		if (!at)
			wrong("no memory");
	}
	kept = n < b->size ? n : b->size;
	model = model_of(n);
	memcpy(model, b->model, kept);
	if (n > kept && b->mapped) {
		for (size_t i = kept; i < n; i++)
			if (at[i])
				wrong("byte %zu of the new part after mremap is %#x", i - kept, at[i]);
	} else if (n > kept) {
		memset(at + kept, 0, n - kept);
	}
	munmap(b->model, b->size);
	b->at = at;
	b->model = model;
	b->size = n;
	check(b, "realloc or mremap");
	/* The regions still have the former memory, so no peer may use them any more. */
	deregister_all(b);
	check(b, "the end of regions of memory that has moved");
}

static void register_some(struct block *b)
{
	int i = (int)any(REGIONS);
	size_t from = any(3) ? 0 : any(b->size), n = b->size - from;

	if (b->mr[i] || b->protected)
		return;
	if (any(3) == 0)
		n = 1 + any(n);
	b->mr[i] = reg(b->at + from, n);
	b->mr_from[i] = from;
	b->mr_size[i] = n;
	check(b, "ibv_reg_mr");
}

static void throw_away(struct block *b)
{
	size_t page = (size_t)PAGE, first = ((uintptr_t)b->at + page - 1) / page * page - (uintptr_t)b->at, n;

	if (!b->mapped && b->size < 4 * page)
		return;
	/* While it is registered its pages are pinned, and their content is undefined. */
	deregister_all(b);
	check(b, "the end of all regions");
	unprotect(b);
	first += page * any(4);
	if (first + page > b->size)
		return;
	n = (b->size - first) / page * page;
	n = page * (1 + any(n / page));
	if (any(2)) {
		if (madvise(b->at + first, n, MADV_DONTNEED))
			wrong("MADV_DONTNEED: %s", strerror(errno));
		memset(b->model + first, 0, n);
		check(b, "MADV_DONTNEED");
	} else {
		if (madvise(b->at + first, n, MADV_FREE))
			wrong("MADV_FREE: %s", strerror(errno));
		memset(b->at + first, 0x3c, n);
		memset(b->model + first, 0x3c, n);
		check(b, "MADV_FREE");
	}
}

static void advise(struct block *b)
{
	static const int harmless[] = { MADV_NORMAL, MADV_HUGEPAGE, MADV_NOHUGEPAGE, MADV_DONTDUMP, MADV_DODUMP, MADV_WILLNEED };
	int advice;

	if (!b->mapped)
		return;
	advice = harmless[any(6)];
	if (madvise(b->at, b->size, advice))
		wrong("madvise %d: %s", advice, strerror(errno));
	if (any(4) == 0) {
		int on = !b->wiped;

		if (madvise(b->at, b->size, on ? MADV_DONTFORK : MADV_DOFORK))
			wrong("MADV_DONTFORK or MADV_DOFORK: %s", strerror(errno));
		b->wiped = on;
	}
	check(b, "madvise");
}

static void protect(struct block *b)
{
	if (!b->mapped)
		return;
	if (b->protected) {
		unprotect(b);
	} else {
		if (mprotect(b->at, b->size, PROT_READ))
			wrong("mprotect: %s", strerror(errno));
		b->protected = 1;
		if (can_store((volatile char *)b->at))
			wrong("read-only memory can be written");
	}
	check(b, "mprotect");
}

/* A region of a block that is big enough. */
static int some_region(struct block *b, size_t n)
{
	int first = (int)any(REGIONS);

	for (int i = 0; i < REGIONS; i++) {
		int r = (first + i) % REGIONS;

		if (b->mr[r] && b->mr_size[r] >= n)
			return r;
	}
	return -1;
}

/* The peer moves bytes from one block to another, or counts in one. */
static void transfer(struct block *a, struct block *b)
{
	size_t n = 1 + any(any(3) ? 3000 : 200000), from, to;
	int i, j, status, kind = (int)any(4);

	if (n > a->size)
		n = a->size;
	if (n > b->size)
		n = b->size;
	if (kind == 3 && n < 16)
		return;
	i = some_region(a, n);
	j = some_region(b, n);
	if (i < 0 || j < 0 || a == b || a->protected || b->protected)
		return;
	from = a->mr_from[i] + any(a->mr_size[i] - n + 1);
	to = b->mr_from[j] + any(b->mr_size[j] - n + 1);
	if (kind == 3) {
		uint64_t value;

		from += -(uintptr_t)(a->at + from) % 8;
		to += -(uintptr_t)(b->at + to) % 8;
		memcpy(&value, b->model + to, 8);
		status = rdma_add((uint64_t *)(a->at + from), a->mr[i], (uint64_t *)(b->at + to), b->mr[j]);
		memcpy(a->model + from, &value, 8);
		value++;
		memcpy(b->model + to, &value, 8);
	} else {
		status = kind == 0 ? rdma_write(b->at + to, b->mr[j], a->at + from, a->mr[i], n) :
			 kind == 1 ? rdma_read(b->at + to, b->mr[j], a->at + from, a->mr[i], n) :
				     rdma_send(b->at + to, b->mr[j], a->at + from, a->mr[i], n);
		memcpy(b->model + to, a->model + from, n);
	}
	if (status)
		wrong("RDMA of kind %d, %zu bytes: status %d", kind, n, status);
	check(a, "RDMA from it");
	check(b, "RDMA to it");
}

/* Counters of threads and of the signal handler. Each thread, and the handler, stores only to its own words. */
static char *counters;
static volatile int stop;
static volatile long rounds[THREADS + 1];
static struct ibv_mr *counters_mr[4];

static volatile long *counter(int who, int i)
{
	return (volatile long *)(counters + (size_t)i * (SLOTS * 128)) + who;
}

static void count(int who)
{
	for (int i = 0; i < COUNTERS; i++)
		(*counter(who, i))++;
	rounds[who]++;
}

static sigset_t alarms;

static void *counting(void *arg)
{
	/* Only one thread receives the signals, so the handler's counters have one writer, too. */
	if ((long)arg == 0 && seed_given % 2)
		pthread_sigmask(SIG_UNBLOCK, &alarms, NULL);
	while (!stop) {
		count((int)(long)arg);
		/* All threads share two processors. */
		if (rounds[(long)arg] % 64 == 0)
			usleep(50);
	}
	return NULL;
}

static void tick(int sig)
{
	int saved = errno;

	(void)sig;
	count(THREADS);
	errno = saved;
}

static void churn_counters(void)
{
	int i = (int)any(4);
	size_t size = (size_t)COUNTERS * SLOTS * 128, from;

	if (counters_mr[i]) {
		dereg(counters_mr[i]);
		counters_mr[i] = NULL;
	} else {
		from = any(2) ? 0 : any(size);
		counters_mr[i] = reg(counters + from, 1 + any(size - from));
	}
}

/* A child sees its parent's memory, and neither sees later stores of the other. */
static void fork_once(void)
{
	int go[2], code;
	char c = 0;
	pid_t pid;

	CHECK(!pipe(go));
	pid = fork();
	if (pid < 0)
		wrong("fork: %s", strerror(errno));
	if (!pid) {
		close(go[1]);
		if (read(go[0], &c, 1) != 1)
			_exit(5);
		for (int i = 0; i < BLOCKS; i++) {
			struct block *b = &blocks[i];

			if (!b->at || b->wiped)
				continue;
			check(b, "fork, in the child");
			if (!b->protected)
				memset(b->at, 0xcc, b->size);
		}
		/* The child's counters are from the one moment of the fork. */
		for (int who = 0; who <= THREADS; who++)
			for (int i = 1; i < COUNTERS; i++)
				if (*counter(who, i) > *counter(who, 0) || *counter(who, i) < *counter(who, 0) - 1)
					wrong("fork, in the child: counter %d of %d is %ld, the first %ld", i, who,
					      *counter(who, i), *counter(who, 0));
		_exit(3);
	}
	close(go[0]);
	for (int i = 0; i < 3; i++) {
		struct block *b = &blocks[any(BLOCKS)];

		/* Each process has its own model: the child compares with the model at the time of the fork. */
		if (b->at)
			scribble(b);
	}
	CHECK(write(go[1], &c, 1) == 1);
	close(go[1]);
	code = ended(pid);
	if (code == 1)
		_exit(1);
	if (code != 3)
		wrong("a child ended with %d", code);
	for (int i = 0; i < BLOCKS; i++)
		if (blocks[i].at)
			check(&blocks[i], "fork, in the parent");
}

static void one_step(void)
{
	struct block *b = &blocks[any(BLOCKS)];

	if (!b->at) {
		make(b);
		return;
	}
	switch (any(24)) {
	case 0:
		let_go(b);
		break;
	case 1:
	case 2:
		resize(b);
		break;
	case 3 ... 7:
		register_some(b);
		break;
	case 8 ... 10:
		deregister(b, (int)any(REGIONS));
		check(b, "ibv_dereg_mr");
		break;
	case 11:
		throw_away(b);
		break;
	case 12:
		advise(b);
		break;
	case 13:
		protect(b);
		break;
	case 14 ... 18:
		transfer(b, &blocks[any(BLOCKS)]);
		break;
	case 19:
		churn_counters();
		break;
	case 20:
		if (any(4) == 0)
			fork_once();
		break;
	default:
		scribble(b);
		check(b, "a store");
	}
}

int main(int argc, char **argv)
{
	struct sigaction sa = { .sa_handler = tick, .sa_flags = SA_RESTART };
	struct itimerval every = { { 0, 2000 }, { 0, 2000 } };
	pthread_t t[THREADS];
	long steps, threads;

	if (argc < 3)
		return 2;
	seed_given = strtoull(argv[1], NULL, 10);
	steps = strtol(argv[2], NULL, 10);
	alone = argc > 3 && !strcmp(argv[3], "private");
	state = seed_given * 0x9e3779b97f4a7c15ull + 1;
	for (int i = 0; i < 10; i++)
		any(2);
	connect_to_self();
	counters = map_apart((size_t)COUNTERS * SLOTS * 128);
	sigaction(SIGALRM, &sa, NULL);
	sigemptyset(&alarms);
	sigaddset(&alarms, SIGALRM);
	pthread_sigmask(SIG_BLOCK, &alarms, NULL);
	threads = seed_given % 4 ? THREADS : 0;
	for (long i = 0; i < threads; i++)
		CHECK(!pthread_create(&t[i], NULL, counting, (void *)i));
	if (!threads || seed_given % 2 == 0)
		pthread_sigmask(SIG_UNBLOCK, &alarms, NULL);
	setitimer(ITIMER_REAL, &every, NULL);
	for (step = 0; step < steps; step++)
		one_step();
	memset(&every, 0, sizeof every);
	setitimer(ITIMER_REAL, &every, NULL);
	stop = 1;
	for (int i = 0; i < threads; i++)
		pthread_join(t[i], NULL);
	/* Lets a pending signal arrive. */
	pause_ms(5);
	for (int i = 0; i < 4; i++)
		if (counters_mr[i])
			dereg(counters_mr[i]);
	for (int who = 0; who <= THREADS; who++)
		for (int i = 0; i < COUNTERS; i++)
			if (*counter(who, i) != rounds[who])
				wrong("counter %d of %d is %ld after %ld increments", i, who, *counter(who, i), rounds[who]);
	for (int i = 0; i < BLOCKS; i++)
		if (blocks[i].at)
			let_go(&blocks[i]);
	say("end\n");
	return 0;
}
