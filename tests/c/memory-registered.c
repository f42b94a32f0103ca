/* SPDX-License-Identifier: Apache-2.0 OR MIT
 *
 * Operations on memory while it is registered. The results must be those for private memory whose pages an RNIC
 * has pinned.
 */
#include "memory.h"

#include <linux/futex.h>
#include <sys/ptrace.h>
#include <sys/prctl.h>

enum { SIZE = 1 << 20, PAGES = SIZE / PAGE };

static char *from;
static struct ibv_mr *from_mr;

/* Registers a buffer, and one page with text for the peer to write. */
static struct ibv_mr *begin(char **p)
{
	struct ibv_mr *mr;

	connect_to_self();
	from = map(PAGE);
	from_mr = reg(from, PAGE);
	*p = map_apart(SIZE);
	fill(*p, SIZE, 1);
	mr = reg(*p, SIZE);
	return mr;
}

/* The peer writes a text to an address. Returns the status. */
static int put(char *to, struct ibv_mr *mr, const char *text)
{
	strcpy(from, text);
	return rdma_write(to, mr, from, from_mr, strlen(text) + 1);
}

static void grow(void)
{
	struct ibv_mr *mr;
	char *p, *q;

	mr = begin(&p);
	q = mremap(p, SIZE, 2 * SIZE, MREMAP_MAYMOVE);
	say("mremap to twice the size: %s\n", q == MAP_FAILED ? strerror(errno) : "done");
	if (q == MAP_FAILED)
		return;
	say("pages lost: %ld; of the new part not zero: %ld\n", spoiled(q, SIZE, 1), not_zero(q + SIZE, SIZE));
	memset(q + SIZE, 5, SIZE);
	say("the new part keeps what is stored: %d %d\n", q[SIZE], q[2 * SIZE - 1]);
	dereg(mr);
	say("not registered any more: %ld pages lost, %d %d\n", spoiled(q, SIZE, 1), q[SIZE], q[2 * SIZE - 1]);
	say("mappings: %d\n", mappings(q, 2 * SIZE));
	p = mremap(q, 2 * SIZE, 3 * SIZE, MREMAP_MAYMOVE);
	say("mremap once more: %s\n", p == MAP_FAILED ? strerror(errno) : "done");
	if (p != MAP_FAILED)
		q = p;
	fill(q, 2 * SIZE, 7);
	mr = reg(q, 2 * SIZE);
	say("registered anew: the peer writes %d", put(q + SIZE - 2, mr, "over the seam"));
	say(" '%s'\n", q + SIZE - 2);
}

/* Only a part in the middle is registered. The program still sees one mapping. */
static void grow_part(void)
{
	struct ibv_mr *mr, *part;
	size_t n = 2 * SIZE;
	char *p, *q;

	mr = begin(&p);
	dereg(mr);
	part = reg(p + SIZE / 4, SIZE / 4);
	q = mremap(p, SIZE, n, MREMAP_MAYMOVE);
	say("mremap of a mapping with a registered part: %s\n", q == MAP_FAILED ? strerror(errno) : "done");
	if (q == MAP_FAILED) {
		q = p;
		n = SIZE;
	}
	say("pages lost: %ld; of the new part not zero: %ld\n", spoiled(q, SIZE, 1), not_zero(q + SIZE, n - SIZE));
	dereg(part);
	say("not registered any more: %ld pages lost\n", spoiled(q, SIZE, 1));
	p = mremap(q, n, 3 * SIZE, MREMAP_MAYMOVE);
	say("mremap then: %s\n", p == MAP_FAILED ? strerror(errno) : "done");
	if (p == MAP_FAILED)
		return;
	say("pages lost: %ld; of the new part not zero: %ld\n", spoiled(p, SIZE, 1), not_zero(p + SIZE, 2 * SIZE));
	part = reg(p, PAGE);
	say("mprotect: %d", mprotect(p, 3 * SIZE, PROT_READ));
	say(", madvise: %d", madvise(p, 3 * SIZE, MADV_DONTDUMP));
	say(", munmap: %d\n", munmap(p, 3 * SIZE));
	dereg(part);
}

static void shrink(void)
{
	struct ibv_mr *mr;
	char *p, *q;

	mr = begin(&p);
	q = mremap(p, SIZE, SIZE / 2, 0);
	say("mremap to half of the size: %s\n", q == p ? "done" : "failed");
	say("pages lost: %ld; the rest is there: %d\n", spoiled(p, SIZE / 2, 1), can_load(p + SIZE / 2));
	say("the peer writes %d", put(p + 100, mr, "here"));
	say(" '%s'\n", p + 100);
	dereg(mr);
	fill(p, SIZE / 2, 1);
	say("not registered any more: %ld pages lost, the rest is there: %d\n", spoiled(p, SIZE / 2, 1),
	    can_load(p + SIZE / 2));
}

static void move(void)
{
	struct ibv_mr *mr;
	char *p, *to = map(SIZE), *q;

	mr = begin(&p);
	q = mremap(p, SIZE, SIZE, MREMAP_MAYMOVE | MREMAP_FIXED, to);
	say("mremap to another address: %s\n", q == to ? "done" : strerror(errno));
	if (q != to)
		return;
	say("pages lost: %ld; the old address is mapped: %d\n", spoiled(q, SIZE, 1), can_load(p));
	fill(q, SIZE, 2);
	dereg(mr);
	say("not registered any more: %ld pages lost\n", spoiled(q, SIZE, 2));
	say("mappings: %d\n", mappings(q, SIZE));
	madvise(q, SIZE, MADV_DONTNEED);
	say("after MADV_DONTNEED: %ld pages are not zero\n", not_zero(q, SIZE));
}

/* A part in the middle is moved, and other memory takes its place. */
static void move_part(void)
{
	struct ibv_mr *mr;
	char *p, *to = map(SIZE / 4), *q;

	mr = begin(&p);
	q = mremap(p + SIZE / 4, SIZE / 4, SIZE / 4, MREMAP_MAYMOVE | MREMAP_FIXED, to);
	say("a part is moved: %s\n", q == to ? "done" : strerror(errno));
	if (q != to)
		return;
	CHECK(mmap(p + SIZE / 4, SIZE / 4, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) ==
	      p + SIZE / 4);
	say("pages lost: %ld %ld %ld; not zero: %ld\n", spoiled(p, SIZE / 4, 1), spoiled(q, SIZE / 4, 1 + PAGES / 4),
	    spoiled(p + SIZE / 2, SIZE / 2, 1 + PAGES / 2), not_zero(p + SIZE / 4, SIZE / 4));
	memset(p + SIZE / 4, 'n', SIZE / 4);
	dereg(mr);
	say("not registered any more: %ld %ld %ld, '%c'\n", spoiled(p, SIZE / 4, 1), spoiled(q, SIZE / 4, 1 + PAGES / 4),
	    spoiled(p + SIZE / 2, SIZE / 2, 1 + PAGES / 2), p[SIZE / 4]);
	mr = reg(p, SIZE);
	say("registered anew: the peer writes %d", put(p + SIZE / 4 + 5, mr, "anew"));
	say(" '%s'\n", p + SIZE / 4 + 5);
	dereg(mr);
	say("pages lost: %ld\n", spoiled(q, SIZE / 4, 1 + PAGES / 4));
}

static void unmap_part(void)
{
	struct ibv_mr *mr;
	char *p;

	mr = begin(&p);
	CHECK(!munmap(p + SIZE / 4, SIZE / 4));
	say("a part is unmapped: load %d %d %d\n", can_load(p + SIZE / 4 - 1), can_load(p + SIZE / 4), can_load(p + SIZE / 2));
	say("pages lost: %ld %ld\n", spoiled(p, SIZE / 4, 1), spoiled(p + SIZE / 2, SIZE / 2, 1 + PAGES / 2));
	say("the peer writes beside it: %d", put(p + 10, mr, "one"));
	say(" %d", put(p + SIZE - 10, mr, "two"));
	say(" '%s' '%s'\n", p + 10, p + SIZE - 10);
	CHECK(mmap(p + SIZE / 4, SIZE / 4, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) ==
	      p + SIZE / 4);
	say("another mapping there: %ld pages are not zero\n", not_zero(p + SIZE / 4, SIZE / 4));
	fill(p, SIZE, 3);
	dereg(mr);
	say("not registered any more: %ld pages lost\n", spoiled(p, SIZE, 3));
	mr = reg(p, SIZE);
	dereg(mr);
	say("registered once more: %ld pages lost\n", spoiled(p, SIZE, 3));
}

/* The buffer is unmapped before it is deregistered, as by programs that free first. */
static void unmap_all(void)
{
	struct ibv_mr *mr;
	char *p, *q;

	mr = begin(&p);
	CHECK(!munmap(p, SIZE));
	say("unmapped: load %d\n", can_load(p));
	q = mmap(p, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
	say("the address is free: %d\n", q == p);
	fill(q, SIZE, 9);
	dereg(mr);
	say("what is there now: %ld pages lost\n", spoiled(q, SIZE, 9));
	mr = reg(q, SIZE);
	say("registered: the peer writes %d", put(q + 100, mr, "again"));
	say(" '%s'\n", q + 100);
	dereg(mr);
	madvise(q, SIZE, MADV_DONTNEED);
	say("after MADV_DONTNEED: %ld pages are not zero\n", not_zero(q, SIZE));
}

static void protect(void)
{
	struct ibv_mr *mr;
	char *p;

	mr = begin(&p);
	CHECK(!mprotect(p, SIZE / 2, PROT_READ));
	say("read-only: load %d, store %d\n", can_load(p), can_store(p));
	CHECK(!mprotect(p + SIZE / 4, SIZE / 4, PROT_NONE));
	say("no access: load %d, store %d\n", can_load(p + SIZE / 4), can_store(p + SIZE / 4));
	say("the rest: store %d\n", can_store(p + SIZE / 2));
	CHECK(!mprotect(p, SIZE / 2, PROT_READ | PROT_WRITE));
	say("pages lost: %ld, store %d\n", spoiled(p, SIZE, 1), can_store(p));
	say("the peer writes %d", put(p + SIZE / 4, mr, "text"));
	say(" '%s'\n", p + SIZE / 4);
	CHECK(!mprotect(p, SIZE, PROT_READ));
	dereg(mr);
	say("not registered any more, read-only: load %d, store %d\n", can_load(p), can_store(p));
	CHECK(!mprotect(p, SIZE, PROT_READ | PROT_WRITE));
	fill(p, SIZE, 4);
	say("pages lost: %ld\n", spoiled(p, SIZE, 4));
	CHECK(!mprotect(p, SIZE, PROT_READ | PROT_WRITE | PROT_EXEC));
	memcpy(p, "\xb8\x2a\x00\x00\x00\xc3", 6);
	mr = reg(p, SIZE);
	say("code in it runs: %d\n", ((int (*)(void))(uintptr_t)p)());
	dereg(mr);
	say("and after: %d\n", ((int (*)(void))(uintptr_t)p)());
}

static void advice(void)
{
	static const struct { const char *name; int advice; } harmless[] = {
		{ "MADV_NORMAL", MADV_NORMAL }, { "MADV_SEQUENTIAL", MADV_SEQUENTIAL }, { "MADV_RANDOM", MADV_RANDOM },
		{ "MADV_WILLNEED", MADV_WILLNEED }, { "MADV_HUGEPAGE", MADV_HUGEPAGE }, { "MADV_NOHUGEPAGE", MADV_NOHUGEPAGE },
		{ "MADV_DONTDUMP", MADV_DONTDUMP }, { "MADV_DODUMP", MADV_DODUMP }, { "MADV_DONTFORK", MADV_DONTFORK },
		{ "MADV_COLD", 20 }, { "MADV_PAGEOUT", 21 }, { "MADV_POPULATE_READ", 22 }, { "MADV_POPULATE_WRITE", 23 },
	};
	struct ibv_mr *mr;
	char *p;

	mr = begin(&p);
	for (unsigned i = 0; i < sizeof harmless / sizeof *harmless; i++) {
		int r = madvise(p, SIZE, harmless[i].advice);

		say("%s: %d, pages lost %ld\n", harmless[i].name, r, spoiled(p, SIZE, 1));
	}
	dereg(mr);
	say("not registered any more: %ld pages lost\n", spoiled(p, SIZE, 1));
}

/* Pages are discarded while the RNIC has them pinned. */
static void dontneed(void)
{
	struct ibv_mr *mr;
	char *p;

	mr = begin(&p);
	say("MADV_DONTNEED while it is registered: %d\n", madvise(p, SIZE / 2, MADV_DONTNEED));
	say("pages that are not zero: %ld\n", not_zero(p, SIZE / 2));
	say("MADV_FREE while it is registered: %d\n", madvise(p, SIZE / 2, MADV_FREE));
	say("the other half: %ld pages lost\n", spoiled(p + SIZE / 2, SIZE / 2, 1 + PAGES / 2));
	fill(p, SIZE, 6);
	say("stored anew: %ld pages lost\n", spoiled(p, SIZE, 6));
	dereg(mr);
	say("not registered any more: %ld pages lost\n", spoiled(p, SIZE, 6));
	madvise(p, SIZE, MADV_DONTNEED);
	say("after MADV_DONTNEED: %ld pages are not zero\n", not_zero(p, SIZE));
}

/* Flags that a program sets during the registration are in force then, and afterwards. */
static void flags(void)
{
	struct ibv_mr *mr;
	pid_t pid;
	char *p;

	mr = begin(&p);
	say("MADV_DONTFORK: %d\n", madvise(p, SIZE / 4, MADV_DONTFORK));
	pid = fork();
	if (!pid)
		_exit(can_load(p) * 2 + can_load(p + SIZE / 2));
	say("child has the part, the rest: %d\n", ended(pid));
	say("MADV_DOFORK: %d\n", madvise(p, SIZE / 4, MADV_DOFORK));
	pid = fork();
	if (!pid) {
		int n = can_load(p) * 2 + can_load(p + SIZE / 2);

		memset(p, 0, SIZE);
		_exit(n);
	}
	say("child has the part, the rest: %d", ended(pid));
	say("; pages that it changed: %ld\n", spoiled(p, SIZE, 1));
	say("MADV_WIPEONFORK: %d\n", madvise(p + SIZE / 2, SIZE / 4, MADV_WIPEONFORK));
	pid = fork();
	if (!pid)
		_exit((p[SIZE / 2] == 0) * 2 + (p[SIZE / 4] != 0));
	say("child has zeros there, not elsewhere: %d\n", ended(pid));
	say("MADV_KEEPONFORK: %d\n", madvise(p + SIZE / 2, SIZE / 4, MADV_KEEPONFORK));
	say("MADV_DONTDUMP: %d\n", madvise(p, SIZE / 4, MADV_DONTDUMP));
	say("mlock: %d\n", mlock(p, SIZE / 4));
	dereg(mr);
	say_flags("a part, after", p, SIZE / 4, "lo dd ");
	say_flags("the rest, after", p + SIZE / 4, SIZE - SIZE / 4, "lo dd dc wf sh ");
	say("pages lost: %ld\n", spoiled(p, SIZE, 1));
}

/* Access by other processes: /proc/self/mem, process_vm_readv, ptrace. */
static void seen_by_others(void)
{
	struct iovec local, remote;
	char buffer[64], *p;
	struct ibv_mr *mr;
	pid_t pid, me = getpid();
	int fd, forked[2];

	mr = begin(&p);
	CHECK(!pipe(forked));
	strcpy(p + 5000, "registered");
	fd = open("/proc/self/mem", O_RDWR);
	CHECK(fd >= 0);
	say("/proc/self/mem reads %zd", pread(fd, buffer, 11, (off_t)(uintptr_t)p + 5000));
	say(" '%s'", buffer);
	say(", writes %zd", pwrite(fd, "written", 8, (off_t)(uintptr_t)p + 9000));
	say(" '%s'\n", p + 9000);
	close(fd);
	prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);
	pid = fork();
	if (!pid) {
		long word;

		/* Memory is moved at a fork. If the kernel cannot wait for the move, the peer must. */
		CHECK(read(forked[0], buffer, 1) == 1);
		local = (struct iovec){ buffer, 11 };
		remote = (struct iovec){ p + 5000, 11 };
		say("process_vm_readv: %zd", process_vm_readv(me, &local, 1, &remote, 1, 0));
		say(" '%s'\n", buffer);
		strcpy(buffer, "by a peer");
		local.iov_len = remote.iov_len = 10;
		remote.iov_base = p + 20000;
		say("process_vm_writev: %zd\n", process_vm_writev(me, &local, 1, &remote, 1, 0));
		if (ptrace(PTRACE_ATTACH, me, 0, 0))
			_exit(2);
		waitpid(me, NULL, 0);
		errno = 0;
		word = ptrace(PTRACE_PEEKDATA, me, p + 5000, 0);
		say("ptrace reads '%.8s'\n", (char *)&word);
		memcpy(&word, "poked!!", 8);
		say("ptrace writes %ld\n", ptrace(PTRACE_POKEDATA, me, p + 40000, word));
		ptrace(PTRACE_DETACH, me, 0, 0);
		_exit(0);
	}
	CHECK(write(forked[1], "", 1) == 1);
	say("child: %d\n", ended(pid));
	say("the program sees '%s' and '%s'\n", p + 20000, p + 40000);
	say("the peer writes %d", put(p + 60000, mr, "RDMA"));
	say(" '%s'\n", p + 60000);
}

/* System calls with buffers in registered memory: pipes, files, sockets. */
static void system_calls(void)
{
	char name[] = "/tmp/unirdma-memory-XXXXXX", *p;
	int fd = mkstemp(name), pipes[2];
	struct iovec v;
	struct ibv_mr *mr;

	CHECK(fd >= 0 && !unlink(name) && !pipe(pipes));
	mr = begin(&p);
	say("write to a file: %zd\n", pwrite(fd, p, SIZE, 0));
	memset(p, 0, SIZE);
	say("read of it: %zd", pread(fd, p, SIZE, 0));
	say(", pages lost %ld\n", spoiled(p, SIZE, 1));
	say("write to a pipe: %zd", write(pipes[1], p + 3 * PAGE, PAGE));
	say(", read of it: %zd", read(pipes[0], p, PAGE));
	say(", same %d\n", !memcmp(p, p + 3 * PAGE, PAGE));
	fill(p, SIZE, 1);
	/* Pages that a pipe keeps. Deregistration must not change the data in the pipe. */
	v = (struct iovec){ p, 4 * PAGE };
	say("vmsplice: %zd\n", vmsplice(pipes[1], &v, 1, 0));
	dereg(mr);
	say("read of it: %zd", read(pipes[0], p + 8 * PAGE, 4 * PAGE));
	say(", pages lost %ld\n", spoiled(p + 8 * PAGE, 4 * PAGE, 1));
	say("pages lost: %ld\n", spoiled(p, 8 * PAGE, 1));
}

/* A core dump contains registered memory, unless the program has set MADV_DONTDUMP. The case `core-dump` dies
 * to make one. */
static void core_dump(void)
{
	char *p = map_apart(SIZE);
	char *secret = map_apart(SIZE);
	struct rlimit r = { RLIM_INFINITY, RLIM_INFINITY };

	getrlimit(RLIMIT_CORE, &r);
	r.rlim_cur = r.rlim_max;
	setrlimit(RLIMIT_CORE, &r);
	open_device();
	for (int i = 0; i < PAGES; i++) {
		snprintf(p + i * PAGE, PAGE, "this page is %s", "dumped");
		snprintf(secret + i * PAGE, PAGE, "this page is %s", "secret");
	}
	madvise(secret, SIZE, MADV_DONTDUMP);
	reg(p, SIZE);
	reg(secret, SIZE);
	abort();
}

static void core(void)
{
	char dir[] = "/tmp/unirdma-memory-XXXXXX", pattern[128] = "", name[64], block[PAGE];
	FILE *f = fopen("/proc/sys/kernel/core_pattern", "r");
	long dumped = 0, secret = 0;
	pid_t pid;
	int fd;

	CHECK(f && fgets(pattern, sizeof pattern, f) && mkdtemp(dir));
	fclose(f);
	if (strcmp(pattern, "core\n")) {
		say("core dumps go elsewhere: %s", pattern);
		return;
	}
	pid = fork();
	if (!pid) {
		char self[256] = "";

		CHECK(readlink("/proc/self/exe", self, sizeof self - 1) > 0 && !chdir(dir));
		execl(self, self, "core-dump", alone ? "private" : NULL, NULL);
		_exit(1);
	}
	say("child: %d\n", ended(pid));
	snprintf(name, sizeof name, "%s/core", dir);
	fd = open(name, O_RDONLY);
	if (fd < 0) {
		snprintf(name, sizeof name, "%s/core.%d", dir, pid);
		fd = open(name, O_RDONLY);
	}
	if (fd < 0) {
		say("no core file: %s\n", strerror(errno));
		return;
	}
	while (read(fd, block, PAGE) == PAGE) {
		dumped += !memcmp(block, "this page is dumped", 19);
		secret += !memcmp(block, "this page is secret", 19);
	}
	say("pages in the core file: %ld of %d; pages that should not be there: %ld\n", dumped, PAGES, secret);
	unlink(name);
	rmdir(dir);
}

static int *word, futex_flag;

static void *waiter(void *arg)
{
	struct timespec limit = { 3, 0 };

	(void)arg;
	return (void *)(syscall(SYS_futex, word, FUTEX_WAIT | futex_flag, 0, &limit, NULL, 0) ? (long)errno : 0L);
}

static void wake_while(const char *what, void (*change)(void))
{
	pthread_t t;
	void *result;

	*word = 0;
	CHECK(!pthread_create(&t, NULL, waiter, NULL));
	pause_ms(100);
	change();
	*word = 1;
	syscall(SYS_futex, word, FUTEX_WAKE | futex_flag, 1, NULL, NULL, 0);
	pthread_join(t, &result);
	/* A thread that slept during the change may be woken to check again, but must not be forgotten. */
	say("%s: %s\n", what, (long)result == ETIMEDOUT ? "forgotten" : "woken");
}

static char *futex_memory;
static struct ibv_mr *futex_mr;

static void futex_reg(void)
{
	futex_mr = reg(futex_memory, SIZE);
}

static void futex_dereg(void)
{
	dereg(futex_mr);
}

/* A thread that waits for a word of memory is woken, whatever was registered meanwhile. */
static void futex(void)
{
	open_device();
	futex_memory = map_apart(SIZE);
	word = (int *)(futex_memory + 5 * PAGE);
	for (int i = 0; i < 2; i++) {
		futex_flag = i ? 0 : FUTEX_PRIVATE_FLAG;
		wake_while(i ? "FUTEX_WAIT, registered meanwhile" : "FUTEX_WAIT_PRIVATE, registered meanwhile", futex_reg);
		wake_while(i ? "deregistered meanwhile" : "private, deregistered meanwhile", futex_dereg);
	}
}

static const struct a_case cases[] = {
	{ "grow", grow },	    { "grow-part", grow_part }, { "shrink", shrink },	{ "move", move },	    { "move-part", move_part },
	{ "unmap-part", unmap_part }, { "unmap-all", unmap_all }, { "protect", protect },   { "advice", advice },
	{ "dontneed", dontneed },   { "flags", flags },		{ "others", seen_by_others }, { "system-calls", system_calls },
	{ "core", core },	    { "futex", futex },		{ NULL, NULL },
};

int main(int argc, char **argv)
{
	static const struct a_case dump[] = { { "core-dump", core_dump }, { NULL, NULL } };

	/* Not a case of its own. */
	if (argc > 1 && !strcmp(argv[1], "core-dump"))
		return run_case(argc, argv, dump);
	return run_case(argc, argv, cases);
}
