/* SPDX-License-Identifier: Apache-2.0 OR MIT
 *
 * Descriptors, limits and waits: effects of the library on a program, apart from its memory.
 */
#include "memory.h"

#include <dirent.h>
#include <grp.h>
#include <rdma/rdma_cma.h>
#include <sys/prctl.h>
#include <sys/stat.h>

enum { SIZE = 8 << 20 };

static int descriptors(void)
{
	int n = 0;

	for (int i = 0; i < 70000; i++)
		n += fcntl(i, F_GETFD) >= 0;
	return n;
}

/* Checks that a buffer can be registered and that the peer can write into it. */
static void use(const char *name, size_t n)
{
	char *p = map(n), *from = map(PAGE);
	struct ibv_mr *a, *b;

	memset(p, 1, n);
	a = reg(p, n);
	b = reg(from, PAGE);
	strcpy(from, "text");
	say("%s: the peer writes %d", name, rdma_write(p + n - 100, a, from, b, 5));
	say(" '%s'\n", p + n - 100);
	dereg(a);
	dereg(b);
	madvise(p, n, MADV_DONTNEED);
	say("%s: pages that are not zero after MADV_DONTNEED: %ld\n", name, not_zero(p, n));
}

/* Descriptors 0 to 2 are closed. The library must not use them, because the program writes there. */
static void std_closed(void)
{
	out = fcntl(1, F_DUPFD, 100);
	CHECK(out >= 0);
	close(0);
	close(1);
	close(2);
	connect_to_self();
	for (int i = 0; i < 3; i++)
		say("descriptor %d is open: %d\n", i, fcntl(i, F_GETFD) >= 0);
	for (int i = 0; i < 100; i++) {
		fprintf(stderr, "a line of a log, number %d\n", i);
		printf("a line, number %d\n", i);
	}
	fflush(stdout);
	use("closed", SIZE);
	for (int i = 0; i < 3; i++)
		say("descriptor %d is open: %d\n", i, fcntl(i, F_GETFD) >= 0);
}

/* The program closes all descriptors above 2, as daemons do, and its own files get their numbers. */
static void close_all(void)
{
	char name[] = "/tmp/unirdma-memory-XXXXXX";
	long written = 0;
	int fds[40];

	connect_to_self();
	use("before", 100000);
	CHECK(!syscall(SYS_close_range, 3, ~0u, 0));
	for (int i = 0; i < 40; i++) {
		strcpy(name + sizeof name - 7, "XXXXXX");
		fds[i] = mkstemp(name);
		CHECK(fds[i] >= 0 && !unlink(name));
	}
	/* These operations may fail, but no data may get into the program's files. */
	if (!alone) {
		char *p = map(PAGE);
		struct ibv_mr *mr = ibv_reg_mr(pd, p, PAGE, 7);
		struct ibv_cq *more;
		struct ibv_wc wc;

		if (mr) {
			struct ibv_sge sge = { (uintptr_t)p, 8, mr->lkey };
			struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE }, *bad;

			wr.wr.rdma.remote_addr = (uintptr_t)p + 100;
			wr.wr.rdma.rkey = mr->rkey;
			for (int i = 0; i < 20; i++) {
				ibv_post_send(qp, &wr, &bad);
				pause_ms(2);
				ibv_poll_cq(cq, 1, &wc);
			}
		}
		more = ibv_create_cq(ctx, 10, NULL, NULL, 0);
		if (more)
			ibv_destroy_cq(more);
	}
	for (int i = 0; i < 40; i++) {
		struct stat s;

		CHECK(!fstat(fds[i], &s));
		written += s.st_size;
	}
	say("bytes in the program's files: %ld\n", written);
}

/* Number of descriptors of a program with a device, a QP, and 100 regions. All are above 2. */
static void count(void)
{
	int before = descriptors(), lowest;
	struct ibv_comp_channel *channel[100];
	char *p = map(200 * PAGE);

	connect_to_self();
	for (int i = 0; i < 100; i++) {
		memset(p + 2 * i * PAGE, 1, PAGE);
		reg(p + 2 * i * PAGE, PAGE);
	}
	say("at most 16 descriptors: %d\n", descriptors() - before <= 16);
	if (descriptors() - before > 16)
		say("descriptors: %d\n", descriptors() - before);
	before = descriptors();
	if (!alone)
		for (int i = 0; i < 100; i++)
			CHECK((channel[i] = ibv_create_comp_channel(ctx)));
	say("at most one for each channel: %d\n", descriptors() - before <= 100);
	if (descriptors() - before > 100)
		say("descriptors of 100 channels: %d\n", descriptors() - before);
	if (!alone)
		for (int i = 0; i < 100; i++)
			CHECK(!ibv_destroy_comp_channel(channel[i]));
	say("descriptors that are left: %d\n", descriptors() - before);
	lowest = open("/dev/null", O_RDONLY);
	/* Programs that use select(2) need low numbers. */
	say("the next file of the program is below 20: %d\n", lowest < 20);
}

/* The program opens channels up to its limit of descriptors. */
static void channels(void)
{
	struct rlimit r = { 1024, 1024 };
	int made = 0;

	setrlimit(RLIMIT_NOFILE, &r);
	open_device();
	if (alone)
		while (made < 900 && dup(0) >= 0)
			made++;
	else
		while (made < 900 && ibv_create_comp_channel(ctx))
			made++;
	say("channels: %d\n", made);
}

static void few_descriptors(void)
{
	struct rlimit r = { 64, 64 };
	char *p = map(200 * PAGE);
	int n = 0;

	setrlimit(RLIMIT_NOFILE, &r);
	connect_to_self();
	memset(p, 1, 200 * PAGE);
	for (int i = 0; i < 80; i++)
		n += reg(p + 2 * i * PAGE, PAGE) != NULL;
	say("regions: %d; another file can be opened: %d\n", n, open("/dev/null", O_RDONLY) >= 0);
	while (dup(0) >= 0)
		;
	use("no descriptor is left", 100000);
}

static void file_size(void)
{
	struct rlimit r = { 100000, 100000 };
	int fd;
	char name[] = "/tmp/unirdma-memory-XXXXXX", page[PAGE] = { 1 };
	long n = 0;

	setrlimit(RLIMIT_FSIZE, &r);
	connect_to_self();
	use("RLIMIT_FSIZE", SIZE);
	/* The limit still holds for the program. */
	signal(SIGXFSZ, SIG_IGN);
	fd = mkstemp(name);
	CHECK(fd >= 0 && !unlink(name));
	for (int i = 0; i < 30; i++) {
		ssize_t w = write(fd, page, PAGE);

		n += w > 0 ? w : 0;
	}
	say("bytes that the program could write: %ld\n", n);
}

static void file_size_later(void)
{
	struct rlimit r = { 100000, 100000 };

	connect_to_self();
	setrlimit(RLIMIT_FSIZE, &r);
	use("RLIMIT_FSIZE, later", SIZE);
}

/* With little address space there are errors, but no signals. */
static void little_space(void)
{
	long pages = 0;
	char *p = map(SIZE);
	struct rlimit r;
	FILE *f;

	connect_to_self();
	memset(p, 1, SIZE);
	f = fopen("/proc/self/statm", "r");
	CHECK(f && fscanf(f, "%ld", &pages) == 1);
	fclose(f);
	r.rlim_cur = r.rlim_max = pages * PAGE + (1 << 20);
	setrlimit(RLIMIT_AS, &r);
	for (int i = 0; i < 3000 && !alone; i++)
		if (!ibv_reg_mr(pd, p + i, SIZE - 5000, 7))
			break;
	for (int i = 0; i < 300 && !alone; i++)
		if (!ibv_create_cq(ctx, 4096, NULL, NULL, 0))
			break;
	for (int i = 0; i < 300 && !alone; i++)
		if (!ibv_create_comp_channel(ctx) || !ibv_alloc_pd(ctx))
			break;
	say("the program lives; bytes are as they were: %d\n", p[0] == 1 && p[SIZE - 1] == 1);
}

/* The program gives up its privileges, or its view of the files, after it has opened the device. */
static void other_user(void)
{
	connect_to_self();
	if (geteuid() == 0) {
		int r = 0;

		r |= setgroups(0, NULL);
		r |= setresgid(65534, 65534, 65534);
		r |= setresuid(65534, 65534, 65534);
		/* Containers of ordinary users have only one user. */
		(void)r;
	}
	use("another user", 1 << 20);
}

static void not_dumpable(void)
{
	connect_to_self();
	prctl(PR_SET_DUMPABLE, 0);
	use("not dumpable", 1 << 20);
}

static void chrooted(void)
{
	char dir[] = "/tmp/unirdma-memory-XXXXXX";

	connect_to_self();
	CHECK(mkdtemp(dir));
	if (chroot(dir) || chdir("/"))
		say("chroot: %s\n", strerror(errno));
	use("chrooted", 1 << 20);
}

static void locked_all(void)
{
	connect_to_self();
	/* Only future mappings: the library's own memory may exceed the limit of an ordinary user. */
	say("mlockall: %d\n", mlockall(MCL_FUTURE));
	use("all locked", 1 << 20);
	munlockall();
	use("not locked", 1 << 20);
}

/* Waits. Without a vRNIC each is a read of an empty pipe. */
static struct ibv_comp_channel *channel;
static struct rdma_event_channel *cm;
static int pipes[2];

static const char *const waits[] = { "ibv_get_cq_event", "ibv_get_async_event", "rdma_get_cm_event" };

static void prepare(void)
{
	open_device();
	if (alone) {
		CHECK(!pipe(pipes));
		return;
	}
	channel = ibv_create_comp_channel(ctx);
	cq = ibv_create_cq(ctx, 16, NULL, channel, 0);
	cm = rdma_create_event_channel();
	CHECK(channel && cq && cm && !ibv_req_notify_cq(cq, 0));
}

static int wait_for(int which)
{
	struct rdma_cm_event *event;
	struct ibv_async_event async;
	struct ibv_cq *of;
	void *context;
	char c;

	if (alone)
		return read(pipes[0], &c, 1) == 1 ? 0 : -1;
	switch (which) {
	case 0:
		return ibv_get_cq_event(channel, &of, &context);
	case 1:
		return ibv_get_async_event(ctx, &async);
	default:
		return rdma_get_cm_event(cm, &event);
	}
}

static volatile int returned, returned_errno;
static int cleaned;

static void cleanup(void *arg)
{
	(void)arg;
	cleaned++;
}

static void *wait_thread(void *arg)
{
	int r;

	pthread_cleanup_push(cleanup, NULL);
	r = wait_for((long)arg);
	returned_errno = r ? errno : 0;
	returned = 1;
	pthread_cleanup_pop(0);
	return NULL;
}

static void too_long(int sig)
{
	(void)sig;
	if (write(out, "the wait does not end\n", 22) < 0)
		_exit(8);
	_exit(7);
}

/* Starts a thread that waits, calls `f` with it, prints whether it still waits, and cancels it. */
static void while_waiting(const char *what, void (*f)(pthread_t))
{
	prepare();
	signal(SIGALRM, too_long);
	for (long i = 0; i < 3; i++) {
		pthread_t t;
		void *result;

		returned = cleaned = 0;
		CHECK(!pthread_create(&t, NULL, wait_thread, (void *)i));
		pause_ms(100);
		f(t);
		pause_ms(100);
		if (returned)
			say("%s, %s: returned, %s\n", waits[i], what, returned_errno ? strerror(returned_errno) : "as if there were an event");
		else
			say("%s, %s: still waits\n", waits[i], what);
		alarm(3);
		pthread_cancel(t);
		pthread_join(t, &result);
		alarm(0);
		say("canceled: %d, cleaned up: %d\n", result == PTHREAD_CANCELED, cleaned);
	}
}

static void nothing(pthread_t t)
{
	(void)t;
}

static void cancel(void)
{
	while_waiting("left alone", nothing);
}

static void handler(int sig)
{
	(void)sig;
}

static void some_signals(pthread_t t)
{
	for (int i = 0; i < 5; i++) {
		pthread_kill(t, SIGUSR1);
		pause_ms(10);
	}
}

static void restart(void)
{
	struct sigaction sa = { .sa_handler = handler, .sa_flags = SA_RESTART };

	sigaction(SIGUSR1, &sa, NULL);
	while_waiting("SA_RESTART", some_signals);
}

static void no_restart(void)
{
	struct sigaction sa = { .sa_handler = handler };

	sigaction(SIGUSR1, &sa, NULL);
	while_waiting("no SA_RESTART", some_signals);
}

static void stop_and_continue(pthread_t t)
{
	pid_t me = getpid(), pid = fork();

	(void)t;
	if (!pid) {
		kill(me, SIGSTOP);
		pause_ms(50);
		kill(me, SIGCONT);
		_exit(0);
	}
	ended(pid);
}

static void stopped(void)
{
	while_waiting("SIGSTOP and SIGCONT", stop_and_continue);
}

static void attach(pthread_t t)
{
	char line[128];

	(void)t;
	snprintf(line, sizeof line, "timeout -s INT 0.5 strace -f -o /dev/null -p %d 2> /dev/null", getpid());
	prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);
	/* strace was attached for a while if it ends with 124. Otherwise it could not attach. */
	say("strace: %d\n", WEXITSTATUS(system(line)));
}

static void traced(void)
{
	while_waiting("strace", attach);
}

static const struct a_case cases[] = {
	{ "std-closed", std_closed }, { "close-all", close_all },	  { "count", count },	    { "channels", channels },
	{ "few-descriptors", few_descriptors }, { "file-size", file_size }, { "file-size-later", file_size_later },
	{ "little-space", little_space }, { "other-user", other_user }, { "not-dumpable", not_dumpable }, { "chroot", chrooted },
	{ "mlockall", locked_all },   { "cancel", cancel },	  { "restart", restart },   { "no-restart", no_restart },
	{ "stop", stopped },	      { "strace", traced },	  { NULL, NULL },
};

int main(int argc, char **argv)
{
	return run_case(argc, argv, cases);
}
