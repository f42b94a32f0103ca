/* SPDX-License-Identifier: Apache-2.0 OR MIT
 *
 * A child has its own copy of registered memory, however it is created.
 */
#include "memory.h"

#include <dlfcn.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <spawn.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/stat.h>

enum { SIZE = 4 << 20, PAGES = SIZE / PAGE };

extern char **environ;
static char *buffer;
static struct ibv_mr *buffer_mr;

static void begin(void)
{
	connect_to_self();
	buffer = map_apart(SIZE);
	fill(buffer, SIZE, 1);
	buffer_mr = reg(buffer, SIZE);
}

/* A child checks the buffer and changes all of it. */
static void in_child(void)
{
	long bad = spoiled(buffer, SIZE, 1);

	fill(buffer, SIZE, 100);
	_exit(bad || spoiled(buffer, SIZE, 100) ? 4 : 3);
}

/* Checks the parent's memory afterwards. The peer still reaches it. */
static void after(const char *name, pid_t pid)
{
	char *text;

	if (pid < 0) {
		say("%s: %s\n", name, strerror(errno));
		return;
	}
	say("%s: child %d", name, ended(pid));
	say(", pages that it changed: %ld", spoiled(buffer, SIZE, 1));
	text = buffer + 9 * PAGE;
	if (rdma_write(text, buffer_mr, buffer, buffer_mr, 100))
		say(", the peer cannot write");
	say(", the peer wrote %d\n", !memcmp(text, buffer, 100));
	fill(buffer, SIZE, 1);
}

static void simple_fork(const char *name)
{
	pid_t pid = fork();

	if (!pid)
		in_child();
	after(name, pid);
}

static void plain(void)
{
	begin();
	for (int i = 0; i < 5; i++)
		simple_fork("fork");
	/* A grandchild, and the memory of the child after that. */
	{
		pid_t pid = fork();

		if (!pid) {
			pid_t second = fork();

			if (!second)
				in_child();
			if (ended(second) != 3)
				_exit(5);
			in_child();
		}
		after("fork in a child", pid);
	}
	dereg(buffer_mr);
	buffer_mr = reg(buffer, SIZE);
	simple_fork("registered once more");
}

/* The parent changes the memory after the fork: the child must not see it. */
static void parent_writes(void)
{
	int go[2], status;
	pid_t pid;
	char c;

	begin();
	CHECK(!pipe(go));
	pid = fork();
	if (!pid) {
		CHECK(read(go[0], &c, 1) == 1);
		_exit(spoiled(buffer, SIZE, 1) ? 4 : 3);
	}
	memset(buffer, 'p', SIZE);
	CHECK(!rdma_write(buffer + SIZE / 2, buffer_mr, buffer, buffer_mr, SIZE / 2));
	CHECK(write(go[1], "x", 1) == 1);
	status = ended(pid);
	say("child: %d\n", status);
}

static void no_handlers(void)
{
	pid_t pid;

	begin();
	pid = _Fork();
	if (!pid)
		in_child();
	after("_Fork", pid);
	pid = syscall(SYS_fork);
	if (!pid)
		in_child();
	after("raw fork", pid);
	pid = syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
	if (!pid)
		in_child();
	after("raw clone", pid);
}

/* Children that share the address space until they call exec. */
static void exec(void)
{
	char *args[] = { "true", NULL }, line[16] = "";
	pid_t pid;
	FILE *f;

	begin();
	pid = vfork();
	if (!pid) {
		execv("/bin/true", args);
		_exit(1);
	}
	after("vfork", pid);
	CHECK(!posix_spawn(&pid, "/bin/true", NULL, NULL, args, environ));
	after("posix_spawn", pid);
	say("system: %d\n", system("true"));
	f = popen("echo hello", "r");
	CHECK(f && fgets(line, sizeof line, f));
	say("popen: %d %s", pclose(f), line);
	pid = fork();
	if (!pid) {
		execv("/bin/true", args);
		_exit(1);
	}
	after("fork and exec", pid);
	pid = vfork();
	if (!pid) {
		buffer[5] = 'v';
		_exit(3);
	}
	say("vfork: child %d", ended(pid));
	say(", shares memory: %d\n", buffer[5] == 'v');
	fill(buffer, SIZE, 1);
	after("after all", fork() ?: (in_child(), 0));
}

static volatile int forks, bad_children;

static void fork_handler(int sig)
{
	int saved = errno;
	pid_t pid = fork();

	(void)sig;
	if (!pid)
		_exit(spoiled(buffer, SIZE, 1) ? 4 : 3);
	forks++;
	if (pid < 0 || ended(pid) != 3)
		bad_children++;
	errno = saved;
}

static void in_handler(void)
{
	struct sigaction sa = { .sa_handler = fork_handler, .sa_flags = SA_RESTART };
	struct itimerval every = { { 0, 10000 }, { 0, 10000 } };
	char *p[256] = { 0 };
	unsigned seed = 1;
	long wrong = 0;

	begin();
	sigaction(SIGALRM, &sa, NULL);
	setitimer(ITIMER_REAL, &every, NULL);
	while (forks < 40) {
		int i;

		seed = seed * 1103515245 + 12345;
		i = seed >> 16 & 255;
		if (p[i] && *p[i] != (char)i)
			wrong++;
		free(p[i]);
		p[i] = malloc(16 + (seed >> 8 & 0xfff));
		*p[i] = i;
	}
	memset(&every, 0, sizeof every);
	setitimer(ITIMER_REAL, &every, NULL);
	say("children that went wrong: %d; blocks that went wrong: %ld\n", bad_children, wrong);
	simple_fork("afterwards");
}

static void no_descriptors(void)
{
	struct rlimit r = { 256, 256 };
	int fd, last = -1;

	begin();
	setrlimit(RLIMIT_NOFILE, &r);
	while ((fd = dup(0)) >= 0)
		last = fd;
	simple_fork("no descriptor");
	close(last);
	simple_fork("one descriptor");
}

static void chrooted(void)
{
	char dir[] = "/tmp/unirdma-memory-XXXXXX";

	begin();
	CHECK(mkdtemp(dir));
	if (chroot(dir) || chdir("/"))
		say("chroot: %s\n", strerror(errno));
	simple_fork("chrooted");
}

static void little_space(void)
{
	long pages = 0;
	struct rlimit r;
	FILE *f;

	begin();
	f = fopen("/proc/self/statm", "r");
	CHECK(f && fscanf(f, "%ld", &pages) == 1);
	fclose(f);
	r.rlim_cur = r.rlim_max = pages * PAGE + SIZE / 2;
	setrlimit(RLIMIT_AS, &r);
	simple_fork("RLIMIT_AS");
}

static void deny(int call)
{
	struct sock_filter f[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = { 4, f };

	CHECK(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) && !prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program));
}

static void forbidden(void)
{
	static const struct { const char *name; int call; } calls[] = {
		{ "pipe2", SYS_pipe2 }, { "openat", SYS_openat }, { "memfd_create", SYS_memfd_create },
		{ "userfaultfd", SYS_userfaultfd }, { "read", SYS_read },
	};

	begin();
	for (unsigned i = 0; i < sizeof calls / sizeof *calls; i++) {
		pid_t pid = fork();

		/* In a child with a device of its own, because the filter cannot be removed. */
		if (!pid) {
			ctx = NULL;
			begin();
			deny(calls[i].call);
			simple_fork(calls[i].name);
			_exit(3);
		}
		say("child: %d\n", ended(pid));
	}
}

static void own_prepare(void)
{
	buffer[0] = 'b';
}

static void own_parent(void)
{
	buffer[1] = 'p';
}

static void own_child(void)
{
	buffer[2] = 'c';
}

static void own_handlers(void)
{
	pid_t pid;

	pthread_atfork(own_prepare, own_parent, own_child);
	begin();
	pid = fork();
	if (!pid)
		_exit(buffer[0] == 'b' && buffer[1] != 'p' && buffer[2] == 'c' ? 3 : 4);
	say("child: %d", ended(pid));
	say(", parent has '%c' '%c' %d\n", buffer[0], buffer[1], buffer[2]);
}

static volatile int stop;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void *writer(void *arg)
{
	volatile long *first = (long *)buffer, *last = (long *)(buffer + SIZE - 8);

	(void)arg;
	for (long i = 1; !stop; i++) {
		*first = i;
		__sync_synchronize();
		*last = i;
		__sync_synchronize();
	}
	return NULL;
}

static void take(void)
{
	pthread_mutex_lock(&lock);
}

static void leave(void)
{
	pthread_mutex_unlock(&lock);
}

static void *locking_writer(void *arg)
{
	volatile long *first = (long *)buffer, *last = (long *)(buffer + SIZE - 8);

	(void)arg;
	for (long i = 1; !stop; i++) {
		pthread_mutex_lock(&lock);
		*first = i;
		*last = i;
		pthread_mutex_unlock(&lock);
	}
	return NULL;
}

/* The child's memory is a snapshot of one moment. */
static void snapshot_of(const char *name, void *(*run)(void *))
{
	volatile long *first = (long *)buffer, *last = (long *)(buffer + SIZE - 8);
	int torn = 0, died = 0, changed = 0;
	pthread_t t;

	*first = *last = 0;
	stop = 0;
	CHECK(!pthread_create(&t, NULL, run, NULL));
	for (int i = 0; i < 20; i++) {
		pid_t pid = fork();
		int code;

		if (!pid) {
			long a = *first, b = *last;

			if (a - b != 0 && (run == locking_writer || a - b != 1))
				_exit(4);
			pause_ms(2);
			_exit(*first == a && *last == b ? 3 : 5);
		}
		code = ended(pid);
		torn += code == 4;
		changed += code == 5;
		died += code > 5;
	}
	stop = 1;
	pthread_join(t, NULL);
	say("%s: torn %d, changed afterwards %d, died %d\n", name, torn, changed, died);
}

static void snapshot(void)
{
	/* Keeps the thread out of the middle of a round when its parent forks. */
	pthread_atfork(take, leave, leave);
	begin();
	snapshot_of("stores", writer);
	snapshot_of("stores under a lock that fork takes", locking_writer);
}

static char *others[200];

static void *unmapper(void *arg)
{
	(void)arg;
	for (int i = 0; i < 200; i++) {
		munmap(others[i], 16 * PAGE);
		usleep(300);
	}
	stop = 1;
	return NULL;
}

static void *registrar(void *arg)
{
	char *p = arg;

	for (int i = 0; !stop; i++)
		dereg(reg(p + i % 8 * PAGE, 8 * PAGE));
	return NULL;
}

/* Other threads register and unmap while this one forks. */
static void racing(void)
{
	pthread_t t, u;
	int bad = 0;
	char *p;

	begin();
	p = map_apart(16 * PAGE);
	fill(p, 16 * PAGE, 50);
	for (int i = 0; i < 200; i++) {
		others[i] = map_apart(16 * PAGE);
		memset(others[i], 1, 16 * PAGE);
		dereg(reg(others[i], 16 * PAGE));
		if (i % 2)
			reg(others[i], 16 * PAGE);
	}
	stop = 0;
	CHECK(!pthread_create(&t, NULL, unmapper, NULL));
	CHECK(!pthread_create(&u, NULL, registrar, p));
	for (int i = 0; i < 30; i++) {
		pid_t pid = fork();

		if (!pid) {
			long n = spoiled(buffer, SIZE, 1) + spoiled(p, 16 * PAGE, 50);

			memset(p, 0, 16 * PAGE);
			_exit(n ? 4 : 3);
		}
		bad += ended(pid) != 3;
	}
	stop = 1;
	pthread_join(t, NULL);
	pthread_join(u, NULL);
	say("children that went wrong: %d; pages lost: %ld %ld\n", bad, spoiled(buffer, SIZE, 1), spoiled(p, 16 * PAGE, 50));
	memset(buffer, 7, 8);
	say("the peer still writes: %d", rdma_write(buffer + PAGE, buffer_mr, buffer, buffer_mr, 8));
	say(", %d\n", buffer[PAGE + 7]);
}

static void *fork_often(void *arg)
{
	long bad = 0;

	(void)arg;
	for (int i = 0; i < 8; i++) {
		pid_t pid = fork();

		if (!pid)
			_exit(spoiled(buffer, SIZE, 1) ? 4 : 3);
		bad += ended(pid) != 3;
	}
	return (void *)bad;
}

static void many_threads(void)
{
	pthread_t t[4];
	long bad = 0;

	begin();
	for (int i = 0; i < 4; i++)
		CHECK(!pthread_create(&t[i], NULL, fork_often, NULL));
	for (int i = 0; i < 4; i++) {
		void *r;

		pthread_join(t[i], &r);
		bad += (long)r;
	}
	say("children of four threads that went wrong: %ld\n", bad);
	simple_fork("afterwards");
}

/* Parts that a child does not have, cannot access, or gets as zeros. */
static void parts(void)
{
	pid_t pid;

	begin();
	CHECK(!madvise(buffer + SIZE / 2, SIZE / 4, MADV_DONTFORK));
	CHECK(!mprotect(buffer + SIZE / 4 * 3, SIZE / 4, PROT_NONE));
	pid = fork();
	if (!pid) {
		int code = spoiled(buffer, SIZE / 2, 1) ? 0 : 1;

		code += can_load(buffer + SIZE / 2) ? 0 : 2;
		code += can_load(buffer + SIZE - 1) ? 0 : 4;
		mprotect(buffer + SIZE / 4 * 3, SIZE / 4, PROT_READ | PROT_WRITE);
		code += spoiled(buffer + SIZE / 4 * 3, SIZE / 4, 1 + PAGES / 4 * 3) ? 0 : 8;
		memset(buffer, 0, SIZE / 2);
		memset(buffer + SIZE / 4 * 3, 0, SIZE / 4);
		_exit(code);
	}
	say("child: %d\n", ended(pid));
	CHECK(!mprotect(buffer, SIZE, PROT_READ | PROT_WRITE));
	say("pages that it changed: %ld\n", spoiled(buffer, SIZE, 1));
	CHECK(!mprotect(buffer, SIZE / 4, PROT_READ));
	pid = fork();
	if (!pid)
		_exit((spoiled(buffer, SIZE / 2, 1) ? 0 : 1) + (can_store(buffer) ? 0 : 2) + (can_store(buffer + SIZE / 4) ? 4 : 0));
	say("child of read-only memory: %d\n", ended(pid));
	dereg(buffer_mr);
	pid = fork();
	if (!pid)
		_exit(can_load(buffer + SIZE / 2) ? 1 : 2);
	say("MADV_DONTFORK, not registered any more: %d\n", ended(pid));
}

/* MADV_DONTFORK is set before the memory is registered, and cleared for half of it during the registration. */
static void ends_dontfork(void)
{
	connect_to_self();
	buffer = map_apart(SIZE);
	fill(buffer, SIZE, 1);
	CHECK(!madvise(buffer, SIZE, MADV_DONTFORK));
	buffer_mr = reg(buffer, SIZE);
	for (int i = 0; i < 6; i++) {
		pid_t pid;

		if (i == 1)
			CHECK(!madvise(buffer + SIZE / 4, SIZE / 2, MADV_DOFORK));
		if (i == 3)
			dereg(buffer_mr);
		if (i == 5)
			CHECK(!madvise(buffer, SIZE, MADV_DOFORK));
		pid = fork();
		if (!pid) {
			int code = can_load(buffer) ? 1 : 0;

			code += can_load(buffer + SIZE / 4) && !spoiled(buffer + SIZE / 4, SIZE / 2, 1 + PAGES / 4) ? 2 : 0;
			code += can_load(buffer + SIZE - 1) ? 4 : 0;
			_exit(code);
		}
		say("fork %d, child has: %d\n", i, ended(pid));
	}
	say("pages that changed: %ld\n", spoiled(buffer, SIZE, 1));
}

/* The library is loaded, used and unloaded, as by a plug-in. */
static void plug_in(void)
{
	char *p = map_apart(SIZE);
	pid_t pid;

	fill(p, SIZE, 1);
	for (int i = 0; i < 2 && !alone; i++) {
		void *lib = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);
		struct ibv_device **list;
		struct ibv_context *c;
		struct ibv_pd *d;
		struct ibv_mr *mr;

		CHECK(lib);
		list = ((struct ibv_device **(*)(int *))dlsym(lib, "ibv_get_device_list"))(NULL);
		CHECK(list && list[0]);
		c = ((struct ibv_context *(*)(struct ibv_device *))dlsym(lib, "ibv_open_device"))(list[0]);
		d = ((struct ibv_pd *(*)(struct ibv_context *))dlsym(lib, "ibv_alloc_pd"))(c);
		mr = ((struct ibv_mr *(*)(struct ibv_pd *, void *, size_t, int))dlsym(lib, "ibv_reg_mr"))(d, p, SIZE, 7);
		CHECK(c && d && mr);
		/* The second time it does not deregister its region. */
		if (i == 0) {
			CHECK(!((int (*)(struct ibv_mr *))dlsym(lib, "ibv_dereg_mr"))(mr));
			CHECK(!((int (*)(struct ibv_pd *))dlsym(lib, "ibv_dealloc_pd"))(d));
			CHECK(!((int (*)(struct ibv_context *))dlsym(lib, "ibv_close_device"))(c));
		}
		dlclose(lib);
		pid = fork();
		if (!pid) {
			memset(p, 0, SIZE);
			_exit(3);
		}
		if (ended(pid) != 3 || spoiled(p, SIZE, 1))
			say("round %d: a child changes its parent's memory\n", i);
	}
	pid = fork();
	if (!pid) {
		memset(p, 0, SIZE);
		_exit(3);
	}
	say("child: %d", ended(pid));
	say("; pages that it changed: %ld\n", spoiled(p, SIZE, 1));
}

/* Operations of a child on regions and on the device do not affect the parent's. */
static void child_lets_go(void)
{
	pid_t pid;

	begin();
	pid = fork();
	if (!pid) {
		if (!alone)
			ibv_dereg_mr(buffer_mr);
		exit(0);
	}
	after("child that deregisters", pid);
	pid = fork();
	if (!pid) {
		if (!alone) {
			ibv_destroy_qp(qp);
			ibv_destroy_cq(cq);
			ibv_dereg_mr(buffer_mr);
			ibv_dealloc_pd(pd);
			ibv_close_device(ctx);
		}
		exit(0);
	}
	after("child that closes all", pid);
	dereg(buffer_mr);
	buffer_mr = reg(buffer, SIZE);
	after("registered once more", fork() ?: (in_child(), 0));
}

/* A child opens the device itself, and registers its inherited memory. */
static void child_registers(void)
{
	pid_t pid;

	begin();
	pid = fork();
	if (!pid) {
		struct ibv_mr *mr;

		connect_to_self();
		mr = reg(buffer, SIZE);
		memcpy(buffer, "child", 6);
		if (rdma_write(buffer + SIZE / 2, mr, buffer, mr, 6) || strcmp(buffer + SIZE / 2, "child"))
			_exit(4);
		dereg(mr);
		madvise(buffer, SIZE, MADV_DONTNEED);
		_exit(not_zero(buffer, SIZE) ? 5 : 3);
	}
	after("child with a device of its own", pid);
}

static const struct a_case cases[] = {
	{ "plain", plain },	    { "parent-writes", parent_writes }, { "no-handlers", no_handlers }, { "exec", exec },
	{ "handler", in_handler },  { "descriptors", no_descriptors }, { "chroot", chrooted },	{ "space", little_space },
	{ "forbidden", forbidden }, { "own-handlers", own_handlers }, { "snapshot", snapshot },	{ "racing", racing },
	{ "threads", many_threads }, { "parts", parts },	    { "dofork", ends_dontfork },    { "plug-in", plug_in },
	{ "lets-go", child_lets_go }, { "registers", child_registers }, { NULL, NULL },
};

int main(int argc, char **argv)
{
	return run_case(argc, argv, cases);
}
