/* SPDX-License-Identifier: Apache-2.0 OR MIT
 *
 * Waits for events, and the descriptors of those waits. All that a program may do to a wait (cancel it,
 * interrupt it, stop and continue the process) and to a descriptor (poll it in all ways, make it non-blocking,
 * close it behind the library's back) has the same effect as with the kernel's event queues.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

/* An event that was raised arrives within SOON_MS. An event that has not arrived within NEVER_MS was not
 * raised. */
enum { SOON_MS = 10000, NEVER_MS = 100, PAUSE_US = 100000, LIMIT = 500, OWN = 16, ROUNDS = 500 };

static struct ibv_context *ctx;
static struct ibv_pd *pd;
static struct ibv_comp_channel *channel;
static struct rdma_event_channel *cm;
static volatile int handlers_run, signals;

/* A CQ on the channel, and a QP in the error state, which flushes each receive at once. */
struct source {
	struct ibv_cq *cq;
	struct ibv_qp *qp;
};

static struct source make_source(void)
{
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .cap = { 4, 64, 1, 1, 0 } };
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1 };
	struct source s;

	CHECK((s.cq = ibv_create_cq(ctx, 64, NULL, channel, 0)));
	init.send_cq = init.recv_cq = s.cq;
	CHECK((s.qp = ibv_create_qp(pd, &init)));
	CHECK(!ibv_modify_qp(s.qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	attr.qp_state = IBV_QPS_ERR;
	CHECK(!ibv_modify_qp(s.qp, &attr, IBV_QP_STATE));
	return s;
}

static void destroy_source(struct source *s)
{
	CHECK(!ibv_destroy_qp(s->qp));
	CHECK(!ibv_destroy_cq(s->cq));
}

static int readable(int fd, int ms)
{
	struct pollfd p = { fd, POLLIN, 0 };
	int n = poll(&p, 1, ms);

	CHECK(n >= 0 && (n == 0 || p.revents == POLLIN));
	return n;
}

/* Raises one more event of a source. */
static void raise_event(struct source *s)
{
	struct ibv_recv_wr wr = { 0 }, *bad;

	CHECK(!ibv_req_notify_cq(s->cq, 0));
	CHECK(!ibv_post_recv(s->qp, &wr, &bad));
}

static void wait_completion(struct source *s)
{
	struct ibv_wc wc;

	while (!ibv_poll_cq(s->cq, 1, &wc))
		;
}

static int take_event(void)
{
	struct ibv_cq *cq;
	void *x;
	int r = ibv_get_cq_event(channel, &cq, &x);

	if (!r)
		ibv_ack_cq_events(cq, 1);
	return r;
}

static void *raise_later(void *s)
{
	usleep(2 * PAUSE_US);
	raise_event(s);
	return NULL;
}

/* --- cancellation --- */

static void on_unwind(void *unused)
{
	handlers_run++;
}

static void *wait_for(void *what)
{
	struct ibv_async_event async;
	struct rdma_cm_event *event;
	struct rdma_cm_id *id = what;

	pthread_cleanup_push(on_unwind, NULL);
	if (what == channel)
		take_event();
	else if (what == ctx)
		ibv_get_async_event(ctx, &async);
	else if (what == cm)
		rdma_get_cm_event(cm, &event);
	else
		rdma_get_request(id, &id);
	pthread_cleanup_pop(0);
	return NULL;
}

/* The handlers that the compiler makes of pthread_cleanup_push (-fexceptions) unwind the stack. */
static void cancel(void *what)
{
	int before = handlers_run;
	pthread_t t;
	void *r;

	CHECK(!pthread_create(&t, NULL, wait_for, what));
	usleep(PAUSE_US);
	CHECK(!pthread_cancel(t));
	CHECK(!pthread_join(t, &r) && r == PTHREAD_CANCELED);
	CHECK(handlers_run == before + 1);
}

static void cancellation(void)
{
	struct rdma_addrinfo hints = { .ai_flags = RAI_PASSIVE, .ai_port_space = RDMA_PS_TCP }, *info;
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .cap = { 1, 1, 1, 1, 0 } };
	struct rdma_cm_id *listener;

	for (int i = 0; i < 3; i++) {
		cancel(channel);
		cancel(ctx);
		cancel(cm);
	}
	CHECK(!rdma_getaddrinfo(NULL, "7471", &hints, &info));
	CHECK(!rdma_create_ep(&listener, info, NULL, &init));
	rdma_freeaddrinfo(info);
	CHECK(!rdma_listen(listener, 1));
	cancel(listener);
	rdma_destroy_ep(listener);
}

static void *wait_on(void *channel)
{
	struct rdma_cm_event *event;

	rdma_get_cm_event(channel, &event);
	return NULL;
}

/* A thread that waits on a channel while that is destroyed keeps waiting: close(2) wakes nobody, and programs
 * exit on errors. */
static void destroyed_meanwhile(void)
{
	struct rdma_event_channel *c = rdma_create_event_channel();
	pthread_t t;
	void *r;

	CHECK(c && !pthread_create(&t, NULL, wait_on, c));
	usleep(PAUSE_US);
	rdma_destroy_event_channel(c);
	usleep(PAUSE_US);
	CHECK(pthread_tryjoin_np(t, &r) == EBUSY);
	CHECK(!pthread_cancel(t) && !pthread_join(t, &r) && r == PTHREAD_CANCELED);
}

/* --- signals --- */

static void on_signal(int unused)
{
	signals++;
}

static void handle(int flags)
{
	struct sigaction a = { .sa_handler = on_signal, .sa_flags = flags };

	CHECK(!sigaction(SIGUSR1, &a, NULL));
}

static void *interrupt(void *thread)
{
	usleep(PAUSE_US);
	CHECK(!pthread_kill(*(pthread_t *)thread, SIGUSR1));
	return NULL;
}

static void interruption(struct source *s)
{
	pthread_t me = pthread_self(), t, u;
	pid_t child;
	int status;

	handle(0);
	CHECK(!pthread_create(&t, NULL, interrupt, &me));
	CHECK(take_event() == -1 && errno == EINTR && signals == 1);
	CHECK(!pthread_join(t, NULL));

	handle(SA_RESTART);
	CHECK(!pthread_create(&t, NULL, interrupt, &me) && !pthread_create(&u, NULL, raise_later, s));
	CHECK(!take_event() && signals == 2);
	CHECK(!pthread_join(t, NULL) && !pthread_join(u, NULL));

	if (!(child = fork())) {
		usleep(PAUSE_US / 2);
		kill(getppid(), SIGSTOP);
		usleep(PAUSE_US / 2);
		kill(getppid(), SIGCONT);
		_exit(0);
	}
	CHECK(!pthread_create(&u, NULL, raise_later, s));
	CHECK(!take_event());
	CHECK(!pthread_join(u, NULL) && waitpid(child, &status, 0) == child && !status);

	/* A debugger attaches and detaches. */
	prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);
	if (!(child = fork())) {
		usleep(PAUSE_US / 2);
		if (ptrace(PTRACE_ATTACH, getppid(), NULL, NULL) || waitpid(getppid(), &status, __WALL) < 0)
			_exit(1);
		_exit(ptrace(PTRACE_DETACH, getppid(), NULL, NULL) != 0);
	}
	CHECK(!pthread_create(&u, NULL, raise_later, s));
	CHECK(!take_event());
	CHECK(!pthread_join(u, NULL) && waitpid(child, &status, 0) == child && !status);
}

/* --- descriptors --- */

static void polling(struct source *s)
{
	struct epoll_event e = { .events = EPOLLIN | EPOLLET }, got;
	int set = epoll_create1(0), outer = epoll_create1(0), copy = dup(channel->fd);

	CHECK(!readable(channel->fd, 0));
	CHECK(!fcntl(channel->fd, F_SETFL, fcntl(channel->fd, F_GETFL) | O_NONBLOCK));
	CHECK(take_event() == -1 && errno == EAGAIN);
	CHECK(!epoll_ctl(set, EPOLL_CTL_ADD, copy, &e));
	e.events = EPOLLIN | EPOLLEXCLUSIVE;
	CHECK(!epoll_ctl(set, EPOLL_CTL_ADD, channel->fd, &e));
	e.events = EPOLLIN;
	CHECK(!epoll_ctl(outer, EPOLL_CTL_ADD, set, &e));
	signals = 0;
	CHECK(!fcntl(channel->fd, F_SETOWN, getpid()) && !fcntl(channel->fd, F_SETSIG, SIGUSR1));
	CHECK(!fcntl(channel->fd, F_SETFL, O_NONBLOCK | O_ASYNC));
	/* The first event is not read. The second one is an edge nevertheless. */
	for (int i = 1; i <= 2; i++) {
		raise_event(s);
		while (!signals)
			;
		signals = 0;
		CHECK(epoll_wait(outer, &got, 1, SOON_MS) == 1);
		CHECK(epoll_wait(set, &got, 1, 0) == 1);
	}
	CHECK(!take_event() && readable(copy, 0) && !take_event() && !readable(copy, 0));
	CHECK(take_event() == -1 && errno == EAGAIN);
	CHECK(!fcntl(channel->fd, F_SETFL, 0));
	CHECK(!close(set) && !close(outer) && !close(copy));
}

/* The events of a destroyed CQ are discarded. Events of other CQs stay, in order. */
static void stale_events(void)
{
	struct source a = make_source(), b = make_source(), c = make_source();
	struct source *order[] = { &a, &b, &a, &c, &a, &b };
	struct ibv_cq *cq;
	void *x;

	for (int i = 0; i < 6; i++) {
		raise_event(order[i]);
		/* A request before this event is sent would cause the same event. */
		wait_completion(order[i]);
		usleep(PAUSE_US / 10);
	}
	destroy_source(&a);
	for (int i = 1; i <= 2; i++) {
		CHECK(readable(channel->fd, SOON_MS) && !ibv_get_cq_event(channel, &cq, &x));
		CHECK(cq == (i == 1 ? b.cq : c.cq));
		ibv_ack_cq_events(cq, 1);
	}
	CHECK(readable(channel->fd, 0));
	destroy_source(&b);
	CHECK(!readable(channel->fd, NEVER_MS));
	destroy_source(&c);

	/* Also events that are being sent when the CQ is destroyed. */
	for (int i = 0; i < ROUNDS; i++) {
		a = make_source();
		raise_event(&a);
		wait_completion(&a);
		destroy_source(&a);
		CHECK(!readable(channel->fd, 0));
	}
	CHECK(!readable(channel->fd, NEVER_MS));
}

static int descriptors(void)
{
	int n = 0;

	for (int i = 0; i < LIMIT; i++)
		n += fcntl(i, F_GETFD) >= 0;
	return n;
}

/* The process opens channels up to its limit of descriptors, one each, all closed on exec, none of them
 * standard output. */
static void numbers(void)
{
	struct ibv_comp_channel *all[LIMIT];
	int before = descriptors(), n = 0;

	while (n < LIMIT && (all[n] = ibv_create_comp_channel(ctx))) {
		CHECK(all[n]->fd > 2 && fcntl(all[n]->fd, F_GETFD) == FD_CLOEXEC);
		n++;
	}
	CHECK(errno == EMFILE);
	/* All except number 0, which is closed. */
	CHECK(n == LIMIT - 1 - before && descriptors() == LIMIT - 1);
	while (n)
		CHECK(!ibv_destroy_comp_channel(all[--n]));
	CHECK(descriptors() == before);
}

/* A program that closes all unknown descriptors, and reuses their numbers, loses its device, but no data. */
static void closed_unseen(struct source *s)
{
	struct ibv_recv_wr wr = { 0 }, *bad;
	char path[] = "/tmp/unirdma-waits-XXXXXX";
	struct ibv_cq *cq = s->cq;
	struct stat st;
	int file, n;

	usleep(PAUSE_US);
	closefrom(3);
	CHECK((file = mkstemp(path)) >= 0 && !unlink(path));
	while ((n = dup(file)) >= 0)
		;
	CHECK(errno == EMFILE && descriptors() == LIMIT);
	CHECK(!ibv_reg_mr(pd, path, sizeof(path), 0));
	CHECK(!ibv_create_comp_channel(ctx));
	/* The layer still believes that the program sleeps. The first notification is the one that could go to
	 * the wrong file. */
	for (int i = 0; i < 10; i++)
		ibv_post_recv(s->qp, &wr, &bad);
	ibv_req_notify_cq(cq, 0);
	for (int i = 0; i < 10000; i++) {
		struct ibv_wc wc;

		ibv_poll_cq(cq, 1, &wc);
	}
	CHECK(take_event() == -1);
	ibv_destroy_qp(s->qp);
	ibv_destroy_cq(cq);
	ibv_destroy_comp_channel(channel);
	ibv_dealloc_pd(pd);
	ibv_close_device(ctx);
	rdma_destroy_event_channel(cm);
	CHECK(!fstat(file, &st) && st.st_size == 0);
	CHECK(lseek(file, 0, SEEK_CUR) == 0);
	/* The number of the channel belongs to the program, which passed it to be closed. */
	CHECK(descriptors() == LIMIT);
}

int main(void)
{
	struct rlimit limit = { LIMIT, LIMIT };
	struct ibv_device **list;
	struct source s;
	int before;

	alarm(60);
	CHECK(!setrlimit(RLIMIT_NOFILE, &limit));
	/* Standard input is closed, and must stay closed. */
	close(0);
	before = descriptors();
	CHECK((list = ibv_get_device_list(NULL)) && list[0]);
	CHECK((ctx = ibv_open_device(list[0])));
	ibv_free_device_list(list);
	CHECK(descriptors() - before <= OWN);
	CHECK((pd = ibv_alloc_pd(ctx)) && (channel = ibv_create_comp_channel(ctx)) && (cm = rdma_create_event_channel()));
	CHECK(channel->fd > 2 && cm->fd > 2 && ctx->async_fd > 2 && ctx->cmd_fd > 2 && fcntl(0, F_GETFD) < 0);
	s = make_source();
	cancellation();
	destroyed_meanwhile();
	interruption(&s);
	polling(&s);
	stale_events();
	numbers();
	closed_unseen(&s);
	printf("all waits ended\n");
	return 0;
}
