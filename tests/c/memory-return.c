/* SPDX-License-Identifier: Apache-2.0 OR MIT
 *
 * Memory whose last region is deregistered is as before: private memory with its content and its flags.
 */
#include "memory.h"

enum { SIZE = 1 << 20, PAGES = SIZE / PAGE };

/* Kilobytes of a range that are in huge pages. */
static long huge_kb(const char *p, size_t n)
{
	FILE *f = fopen("/proc/self/smaps", "r");
	unsigned long start, end, at = (unsigned long)p;
	long kb = 0, here;
	char line[512];
	int inside = 0;

	CHECK(f);
	while (fgets(line, sizeof line, f)) {
		if (sscanf(line, "%lx-%lx ", &start, &end) == 2)
			inside = start < at + n && end > at;
		if (inside && sscanf(line, "AnonHugePages: %ld", &here) == 1)
			kb += here;
	}
	fclose(f);
	return kb;
}

/* Returns memory that was registered and deregistered. */
static char *returned(size_t n, int seed)
{
	char *p = map_apart(n);

	fill(p, n, seed);
	dereg(reg(p, n));
	return p;
}

static void content(void)
{
	char *p;

	open_device();
	p = returned(SIZE, 1);
	say("pages that lost their content: %ld\n", spoiled(p, SIZE, 1));
	fill(p, SIZE, 2);
	dereg(reg(p + 5 * PAGE + 7, 3 * PAGE));
	dereg(reg(p + 100, 1));
	say("after parts of it: %ld\n", spoiled(p, SIZE, 2));
	say("mappings: %d\n", mappings(p, SIZE));
}

static void dontneed(void)
{
	char *p;

	open_device();
	p = returned(SIZE, 1);
	say("madvise(MADV_DONTNEED): %d\n", madvise(p, SIZE, MADV_DONTNEED));
	say("pages that are not zero: %ld of %d\n", not_zero(p, SIZE), PAGES);
	fill(p, SIZE, 3);
	say("pages that do not keep what is stored then: %ld\n", spoiled(p, SIZE, 3));
	/* The second half is still registered, the first is not. */
	{
		struct ibv_mr *all = reg(p, SIZE), *half = reg(p + SIZE / 2, SIZE / 2);

		dereg(all);
		madvise(p, SIZE / 2, MADV_DONTNEED);
		say("half of it: %ld pages are not zero, %ld of the other half changed\n", not_zero(p, SIZE / 2),
		    spoiled(p + SIZE / 2, SIZE / 2, 3 + PAGES / 2));
		dereg(half);
	}
	madvise(p, SIZE, MADV_DONTNEED);
	say("all of it: %ld pages are not zero\n", not_zero(p, SIZE));
}

static void lazy_free(void)
{
	char *p;

	open_device();
	p = returned(SIZE, 1);
	say("madvise(MADV_FREE): %d\n", madvise(p, SIZE, MADV_FREE));
	fill(p, SIZE, 9);
	say("pages that do not keep what is stored then: %ld\n", spoiled(p, SIZE, 9));
}

static void grow(void)
{
	char *p, *q;

	open_device();
	p = returned(SIZE, 1);
	q = mremap(p, SIZE, 4 * SIZE, MREMAP_MAYMOVE);
	say("mremap to four times the size: %s\n", q == MAP_FAILED ? strerror(errno) : "done");
	if (q == MAP_FAILED)
		return;
	say("pages that lost their content: %ld\n", spoiled(q, SIZE, 1));
	say("the new part can be used: %d, %d\n", can_store(q + SIZE), can_store(q + 4 * SIZE - 1));
	say("pages of it that are not zero: %ld\n", not_zero(q + SIZE, 3 * SIZE));
	q = mremap(q, 4 * SIZE, SIZE / 2, 0);
	say("mremap to half of the size: %s\n", q == MAP_FAILED ? strerror(errno) : "done");
	say("pages that lost their content: %ld\n", spoiled(q, SIZE / 2, 1));
	dereg(reg(q, SIZE / 2));
	p = mremap(q, SIZE / 4, SIZE / 4, MREMAP_MAYMOVE | MREMAP_FIXED, map(SIZE / 4));
	say("a part is moved: %s, %ld and %ld pages lost their content\n", p == MAP_FAILED ? strerror(errno) : "done",
	    spoiled(p, SIZE / 4, 1), spoiled(q + SIZE / 4, SIZE / 4, 1 + PAGES / 4));
}

static void child(void)
{
	pid_t pid;
	char *p;

	open_device();
	p = returned(SIZE, 1);
	pid = fork();
	if (!pid) {
		long bad = spoiled(p, SIZE, 1);

		fill(p, SIZE, 100);
		_exit(bad ? 1 : 0);
	}
	say("child: %d", ended(pid));
	say("; pages that it changed for its parent: %ld\n", spoiled(p, SIZE, 1));
	/* Forms of fork that run no handlers. */
	pid = syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
	if (!pid) {
		memset(p, 0, SIZE);
		_exit(4);
	}
	say("child of clone: %d", ended(pid));
	say("; pages that it changed: %ld\n", spoiled(p, SIZE, 1));
}

/* The flags of memory in smaps with one more flag: before, during and after registration. */
static void one_flag(const char *name, int advice, const char *flag)
{
	struct ibv_mr *mr;
	char *p = map_apart(4 << 20), line[64];

	fill(p, 4 << 20, 1);
	if (advice < 0 ? mlock(p, SIZE) : madvise(p, 4 << 20, advice))
		say("%s: %s\n", name, strerror(errno));
	snprintf(line, sizeof line, "%s", name);
	say_flags(line, p, advice < 0 ? SIZE : 4 << 20, flag);
	mr = reg(p, 4 << 20);
	snprintf(line, sizeof line, "%s, registered", name);
	/* For pages that are wiped in a child or left out of it, the case of fork checks the effect. */
	if (advice != MADV_WIPEONFORK)
		say_flags(line, p, advice < 0 ? SIZE : 4 << 20, flag);
	dereg(mr);
	snprintf(line, sizeof line, "%s, not any more", name);
	say_flags(line, p, advice < 0 ? SIZE : 4 << 20, flag);
	say("%s, content: %ld pages lost\n", name, spoiled(p, 4 << 20, 1));
}

static void flags(void)
{
	struct ibv_mr *mr;
	char *p;

	open_device();
	one_flag("mlock", -1, "lo ");
	one_flag("MADV_DONTDUMP", MADV_DONTDUMP, "dd ");
	one_flag("MADV_DONTFORK", MADV_DONTFORK, "dc ");
	one_flag("MADV_WIPEONFORK", MADV_WIPEONFORK, "wf ");
	one_flag("MADV_HUGEPAGE", MADV_HUGEPAGE, "hg ");
	one_flag("MADV_NOHUGEPAGE", MADV_NOHUGEPAGE, "nh ");
	/* Flags that the program has not set. */
	p = map_apart(SIZE);
	fill(p, SIZE, 1);
	mr = reg(p, SIZE);
	dereg(mr);
	say_flags("no flags", p, SIZE, "sh lo dd dc wf hg nh io pf ");
}

/* Huge pages become huge pages again. */
static void huge(void)
{
	size_t n = 8 << 20, large = 2 << 20;
	char *p = map(n + large);
	long before;

	open_device();
	p += -(uintptr_t)p % large;
	say("MADV_HUGEPAGE: %d\n", madvise(p, n, MADV_HUGEPAGE));
	fill(p, n, 1);
	before = huge_kb(p, n);
	dereg(reg(p, n));
	say("content: %ld pages lost; huge pages are kept: %d\n", spoiled(p, n, 1), huge_kb(p, n) >= before);
}

static void locked(void)
{
	char *p;
	long before;
	struct ibv_mr *mr;

	open_device();
	p = map_apart(SIZE);
	fill(p, SIZE, 1);
	before = proc_number("/proc/self/status", "VmLck:");
	CHECK(!mlock(p, SIZE / 2));
	say("locked: %ld kB\n", proc_number("/proc/self/status", "VmLck:") - before);
	mr = reg(p, SIZE);
	say("locked, registered: %ld kB\n", proc_number("/proc/self/status", "VmLck:") - before);
	CHECK(!mlock(p + SIZE / 2, SIZE / 4));
	say("a part locked while registered: %ld kB\n", proc_number("/proc/self/status", "VmLck:") - before);
	CHECK(!munlock(p, SIZE / 4));
	say("a part unlocked while registered: %ld kB\n", proc_number("/proc/self/status", "VmLck:") - before);
	dereg(mr);
	say("locked, not any more: %ld kB\n", proc_number("/proc/self/status", "VmLck:") - before);
	munlock(p, SIZE);
	say("unlocked: %ld kB\n", proc_number("/proc/self/status", "VmLck:") - before);
}

static void neighbours(void)
{
	char *p;
	struct ibv_mr *mr[PAGES];

	open_device();
	p = map_apart(SIZE);
	fill(p, SIZE, 1);
	for (int i = 0; i < PAGES; i += 2)
		mr[i] = reg(p + i * PAGE, 100);
	for (int i = 0; i < PAGES; i += 2)
		dereg(mr[i]);
	say("every other page was a region: %d mappings, %ld pages lost\n", mappings(p, SIZE), spoiled(p, SIZE, 1));
	for (int i = 0; i < PAGES; i++)
		dereg(reg(p + i * PAGE, PAGE));
	say("each page was one: %d mappings, %ld pages lost\n", mappings(p, SIZE), spoiled(p, SIZE, 1));
	/* A mapping of two protections has two parts before and after. */
	CHECK(!mprotect(p, SIZE / 2, PROT_READ));
	dereg(reg_with(p, SIZE, 0));
	say("two protections: %d mappings, %ld pages lost, stores: %d %d\n", mappings(p, SIZE), spoiled(p, SIZE, 1),
	    can_store(p), can_store(p + SIZE - 1));
}

/* A mapping that was moved from another address (as by realloc) is one mapping afterwards, too. */
static void moved_before(void)
{
	char *p, *q;

	open_device();
	p = map_apart(SIZE);
	fill(p, SIZE, 1);
	q = mremap(p, SIZE, SIZE, MREMAP_MAYMOVE | MREMAP_FIXED, map_apart(SIZE));
	CHECK(q != MAP_FAILED);
	say("mappings: %d\n", mappings(q, SIZE));
	dereg(reg(q + SIZE / 4, SIZE / 4));
	say("a part was registered: %d, pages lost %ld\n", mappings(q, SIZE), spoiled(q, SIZE, 1));
	p = mremap(q, SIZE, 2 * SIZE, MREMAP_MAYMOVE);
	say("mremap: %s\n", p == MAP_FAILED ? strerror(errno) : "done");
}

/* A part of a mapping without any touched page. */
static void untouched(void)
{
	char *p, *q;

	open_device();
	p = map_apart(SIZE);
	dereg(reg(p + SIZE / 4, SIZE / 4));
	say("a part was registered: %d\n", mappings(p, SIZE));
	p[SIZE - 1] = p[SIZE / 4] = 1;
	dereg(reg(p + SIZE / 2, SIZE / 4));
	say("two pages touched, another part registered: %d\n", mappings(p, SIZE));
	dereg(reg(p + SIZE - PAGE, PAGE));
	say("the last page: %d\n", mappings(p, SIZE));
	q = mremap(p, SIZE, 2 * SIZE, MREMAP_MAYMOVE);
	say("mremap: %s\n", q == MAP_FAILED ? strerror(errno) : "done");
}

static void protection(void)
{
	char *p;

	open_device();
	p = returned(SIZE, 1);
	CHECK(!mprotect(p, SIZE / 2, PROT_READ));
	CHECK(!mprotect(p + SIZE / 2, SIZE / 2, PROT_NONE));
	say("read-only: load %d, store %d\n", can_load(p), can_store(p));
	say("no access: load %d, store %d\n", can_load(p + SIZE / 2), can_store(p + SIZE / 2));
	CHECK(!mprotect(p, SIZE, PROT_READ | PROT_WRITE));
	say("pages that lost their content: %ld\n", spoiled(p, SIZE, 1));
	CHECK(!munmap(p + PAGE, PAGE));
	say("a page is gone: load %d\n", can_load(p + PAGE));
	CHECK(mmap(p + PAGE, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == p + PAGE);
	say("and another one there: %ld pages are not zero\n", not_zero(p + PAGE, PAGE));
}

static void overlap(void)
{
	static const int orders[6][3] = { { 0, 1, 2 }, { 0, 2, 1 }, { 1, 0, 2 }, { 1, 2, 0 }, { 2, 0, 1 }, { 2, 1, 0 } };
	char *from = map(PAGE);
	struct ibv_mr *from_mr;

	connect_to_self();
	from_mr = reg(from, PAGE);
	for (int o = 0; o < 6; o++) {
		char *p = map_apart(SIZE), *at[3] = { p, p + SIZE / 4 + 50, p + SIZE / 2 };
		struct ibv_mr *mr[3];

		fill(p, SIZE, 1);
		for (int i = 0; i < 3; i++)
			mr[i] = reg(at[i], SIZE / 2);
		for (int i = 0; i < 3; i++) {
			for (int j = i; j < 3; j++) {
				/* A byte that the peer writes into each remaining region. */
				size_t off = 3000 * (o + 1) + j;
				char old = at[orders[o][j]][off], now;

				from[0] = old ^ 0x55;
				if (rdma_write(at[orders[o][j]] + off, mr[orders[o][j]], from, from_mr, 1))
					say("order %d, %d of 3 gone: the peer cannot write\n", o, i);
				now = at[orders[o][j]][off];
				if (now != (char)(old ^ 0x55))
					say("order %d, %d of 3 gone: what the peer wrote is not there\n", o, i);
				at[orders[o][j]][off] = old;
			}
			dereg(mr[orders[o][i]]);
		}
		madvise(p, SIZE / 2, MADV_DONTNEED);
		say("order %d: %ld pages not zero, %ld pages lost\n", o, not_zero(p, SIZE / 2),
		    spoiled(p + SIZE / 2, SIZE / 2, 1 + PAGES / 2));
	}
}

static void allocator(void)
{
	unsigned seed = 7;
	struct { unsigned char *p; size_t n; int pattern; } b[64] = { 0 };
	long lost = 0, old = 0;

	open_device();
	for (int step = 0; step < 4000; step++) {
		size_t n;
		int i;

		seed = seed * 1664525u + 1013904223u;
		i = seed >> 20 & 63;
		n = seed >> 8 & 1 ? 100 + (seed >> 9 & 0x3fff) : 100000 + (seed >> 9 & 0xfffff);
		if (b[i].p) {
			if (seed & 2) {
				unsigned char *q = realloc(b[i].p, n);

				CHECK(q);
				for (size_t j = 0; j < n && j < b[i].n; j += 61)
					lost += q[j] != b[i].pattern;
				b[i].p = q;
				b[i].n = n;
				memset(q, b[i].pattern, n);
			} else {
				free(b[i].p);
				b[i].p = NULL;
			}
			continue;
		}
		b[i].p = calloc(1, n);
		b[i].n = n;
		b[i].pattern = 1 + step % 255;
		CHECK(b[i].p);
		for (size_t j = 0; j < n; j++)
			old += b[i].p[j] != 0;
		memset(b[i].p, b[i].pattern, n);
		if (step % 3 == 0)
			dereg(reg(b[i].p, n));
	}
	say("bytes of calloc that are not zero: %ld; bytes that realloc has lost: %ld\n", old, lost);
}

/* Memory that is a private mapping of a file: after MADV_DONTNEED it has the file's content. */
static void of_a_file(void)
{
	char name[] = "/tmp/unirdma-memory-XXXXXX", *p;
	int fd = mkstemp(name);
	static char page[PAGE];

	CHECK(fd >= 0 && !unlink(name));
	memset(page, 'F', PAGE);
	for (int i = 0; i < 16; i++)
		CHECK(write(fd, page, PAGE) == PAGE);
	open_device();
	p = mmap(NULL, 16 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
	CHECK(p != MAP_FAILED);
	memset(p, 'M', 8 * PAGE);
	dereg(reg(p, 16 * PAGE));
	say("stored '%c', of the file '%c'\n", p[0], p[12 * PAGE]);
	page[0] = 'f';
	CHECK(pwrite(fd, page, 1, 0) == 1 && pwrite(fd, page, 1, 12 * PAGE) == 1);
	say("the file changes: stored '%c', of the file '%c'\n", p[0], p[12 * PAGE]);
	madvise(p, 16 * PAGE, MADV_DONTNEED);
	say("after MADV_DONTNEED '%c', '%c', '%c'\n", p[0], p[PAGE], p[12 * PAGE]);
}

static char data[8 * PAGE] = { 1 }, bss[8 * PAGE];
static __thread char tls[2 * PAGE];

/* Uses a megabyte and a half of stack. */
static int deep(int left)
{
	volatile char frame[PAGE];

	frame[0] = frame[PAGE - 1] = (char)left;
	return left ? deep(left - 1) + (frame[0] == frame[PAGE - 1]) : 0;
}

/* Memory that is not from mmap: the program's data, its stack, the stack of a thread. */
static void own(void)
{
	char stack[4 * PAGE], *places[4] = { data, bss, tls, stack }, *heap = sbrk(8 * PAGE);
	static const char *names[4] = { "data", "bss", "TLS", "stack" };
	struct ibv_mr *mr[4], *heap_mr;
	pid_t pid;

	connect_to_self();
	CHECK(heap != (void *)-1);
	memset(heap, 'h', 8 * PAGE);
	heap_mr = reg(heap, 8 * PAGE);
	for (int i = 0; i < 4; i++) {
		memset(places[i], 'a' + i, 2 * PAGE);
		mr[i] = reg(places[i], 2 * PAGE);
		say("%s: the peer reads %d", names[i], rdma_read(heap, heap_mr, places[i] + 10, mr[i], PAGE));
		say(" '%c', writes %d", heap[0], rdma_write(places[i], mr[i], heap + PAGE, heap_mr, PAGE));
		say(" '%c'\n", places[i][PAGE - 1]);
	}
	say("the stack grows: %d\n", deep(400));
	pid = fork();
	if (!pid) {
		for (int i = 0; i < 4; i++)
			places[i][0] = 'z';
		_exit(places[0][2 * PAGE - 1] == 'a' && places[3][2 * PAGE - 1] == 'd' ? 3 : 4);
	}
	say("child: %d\n", ended(pid));
	for (int i = 0; i < 4; i++) {
		dereg(mr[i]);
		say("%s: '%c' '%c'\n", names[i], places[i][0], places[i][2 * PAGE - 1]);
	}
	say("the stack grows: %d\n", deep(400));
	dereg(heap_mr);
	say("the heap grows: %d, content '%c'\n", can_store(sbrk(8 * PAGE)), heap[3 * PAGE]);
	sbrk(-8 * PAGE);
	say("the end of the heap moves: %d\n", sbrk(-4 * PAGE) != (void *)-1);
	say("heap: '%c'\n", heap[3 * PAGE]);
}

/* Read-only memory can be registered for reading, and stays read-only. */
static void read_only(void)
{
	char *p, *q = map(PAGE);
	struct ibv_mr *mr, *q_mr;

	connect_to_self();
	q_mr = reg(q, PAGE);
	p = map_apart(4 * PAGE);
	memset(p, 'r', 4 * PAGE);
	CHECK(!mprotect(p, 4 * PAGE, PROT_READ));
	mr = reg_with(p, 4 * PAGE, IBV_ACCESS_REMOTE_READ);
	say("the peer reads: %d", rdma_read(q, q_mr, p, mr, 100));
	say(" '%c'\n", q[99]);
	say("store: %d\n", can_store(p));
	dereg(mr);
	say("store: %d, content '%c'\n", can_store(p), p[0]);
}

/* A large sparse buffer with one used page takes no more memory after deregistration. */
static void sparse(void)
{
	size_t n = (size_t)1 << 30;
	char *p = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	long before;

	CHECK(p != MAP_FAILED);
	open_device();
	memset(p + n / 2, 1, PAGE);
	dereg(reg(p, PAGE));
	before = proc_number("/proc/self/status", "VmRSS:");
	dereg(reg(p, n));
	say("more than 16 MiB more memory: %d\n", proc_number("/proc/self/status", "VmRSS:") - before > 16384);
	say("content: %d %d %d\n", p[0], p[n / 2], p[n - 1]);
}

static const struct a_case cases[] = {
	{ "content", content },	    { "dontneed", dontneed },	{ "free", lazy_free },	  { "grow", grow },
	{ "child", child },	    { "flags", flags },		{ "huge", huge },	    { "locked", locked },	  { "neighbours", neighbours }, { "moved-before", moved_before },
	{ "untouched", untouched },
	{ "protection", protection }, { "overlap", overlap },	{ "allocator", allocator }, { "file", of_a_file },
	{ "own", own },		    { "read-only", read_only }, { "sparse", sparse },	  { NULL, NULL },
};

int main(int argc, char **argv)
{
	return run_case(argc, argv, cases);
}
