/* SPDX-License-Identifier: Apache-2.0 OR MIT
 *
 * Typical programs, on cores that computing threads use too, for `cargo xtask bench busy`. Prints names and numbers.
 *
 *   busy serve WHAT                                   the other end of WHAT by RDMA, once
 *   busy WHAT ADDRESS|tcp|memory COMPUTING SECONDS    WHAT by RDMA, by TCP over the kernel's loopback, or within this
 *                                                     process alone, beside COMPUTING threads that compute
 *
 *   sync           8 B, one message after the other. By RDMA a thread posts a WRITE and polls until it is completed;
 *                  by TCP both ends sleep until data arrives. Times in microseconds.
 *   relay-2, -3    4 KiB, one message after the other, through threads that all spin and pass each message on in
 *                  memory, as in Mooncake: the caller and a thread that posts and polls, or the caller, a thread that
 *                  posts and a thread that polls. By TCP the caller spins, and a thread sleeps until the answer
 *                  arrives. A rate.
 *   requests-1, -64  64 connections, one or all of which have an outstanding request. Each has a CQ with a completion
 *                  channel, and both ends wait for all channels with one epoll, as Valkey does. A rate.
 *   stall          Threads with 16 connections each keep all of them busy, and yield when they have no work. After an
 *                  empty poll of a CQ, a thread polls that CQ again only when an answer is in its memory. The other end
 *                  sleeps in epoll, and gets a signal each millisecond. The longest time without a message, and the
 *                  longest delay of a thread that sleeps for 1 ms at a time, both in milliseconds.
 */
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include "connect.h"
#include "times.h"

enum { CONNECTIONS = 64, SENDERS = 4, PAGE = 4096, SMALL = 8, REQUEST = 64, PORT = 18515, MOST_TIMES = 4000000 };
/* Unanswered messages of a connection of `stall`; receives; sends; sends per completion. */
enum { WINDOW = 32, RECEIVES = 64, SENDS = 128, SIGNALLED = 16 };
enum { ACCESS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE };

struct connection {
	/* Carries the messages. With RDMA it carries only the data by which the ends connect. */
	int socket;
	/* NULL without RDMA. */
	struct ibv_qp *qp;
	struct ibv_cq *cq;
	struct ibv_comp_channel *channel;
	struct ibv_mr *out, *in;
	uint64_t sent, received;
	/* The last poll found nothing, and no message has been posted since. */
	int looked;
	/* Address of messages at the other end. */
	struct place {
		union ibv_gid gid;
		uint64_t addr;
		uint32_t rkey, qpn;
	} theirs;
};

static const char *what;
static struct connection all[CONNECTIONS];
static char out[CONNECTIONS][PAGE] __attribute__((aligned(PAGE))), in[CONNECTIONS][PAGE] __attribute__((aligned(PAGE)));
/* Time of the last message in `answer`, and the longest time between two. */
static double last, silence;
static _Atomic uint64_t asked, posted, done;
static _Atomic int stop;

static int is(const char *name)
{
	return !strncmp(what, name, strlen(name));
}

/* Sends or receives `n` bytes. False if the other end has closed. */
static int move(int s, int sends, void *p, size_t n)
{
	while (n) {
		ssize_t r = sends ? send(s, p, n, MSG_NOSIGNAL) : recv(s, p, n, 0);

		if (r <= 0)
			return 0;
		p = (char *)p + r;
		n -= r;
	}
	return 1;
}

static void post_receive(struct connection *c)
{
	struct ibv_recv_wr wr = { 0 }, *bad;

	CHECK(!ibv_post_recv(c->qp, &wr, &bad));
}

static void make_qp(struct connection *c)
{
	static struct ibv_context *ctx;
	static struct ibv_pd *pd;
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .cap = { SENDS, RECEIVES, 1, 1, REQUEST } };
	struct place mine;
	int i = c - all;

	if (!ctx) {
		struct ibv_device **list = ibv_get_device_list(NULL);

		CHECK(list && list[0] && (ctx = ibv_open_device(list[0])) && (pd = ibv_alloc_pd(ctx)));
	}
	CHECK((c->channel = ibv_create_comp_channel(ctx)) && (c->cq = ibv_create_cq(ctx, SENDS + RECEIVES, NULL, c->channel, 0)));
	CHECK((c->out = ibv_reg_mr(pd, out[i], PAGE, ACCESS)) && (c->in = ibv_reg_mr(pd, in[i], PAGE, ACCESS)));
	init.send_cq = init.recv_cq = c->cq;
	CHECK((c->qp = ibv_create_qp(pd, &init)) && !ibv_req_notify_cq(c->cq, 0));
	mine = (struct place){ .addr = (uintptr_t)in[i], .rkey = c->in->rkey, .qpn = c->qp->qp_num };
	CHECK(!ibv_query_gid(ctx, 1, 0, &mine.gid));
	CHECK(move(c->socket, 1, &mine, sizeof(mine)) && move(c->socket, 0, &c->theirs, sizeof(c->theirs)));
	connect_qp(c->qp, c->theirs.qpn, c->theirs.gid);
	for (int k = 0; k < RECEIVES; k++)
		post_receive(c);
	/* Both are connected. */
	CHECK(move(c->socket, 1, out[i], 1) && move(c->socket, 0, in[i], 1));
}

static void post_write(struct connection *c, enum ibv_wr_opcode opcode, uint32_t size, int flags)
{
	struct ibv_sge sge = { (uintptr_t)c->out->addr, size, c->out->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = opcode, .send_flags = flags,
				  .wr.rdma = { c->theirs.addr, c->theirs.rkey } }, *bad;

	CHECK(!ibv_post_send(c->qp, &wr, &bad));
}

static int is_complete(struct connection *c)
{
	struct ibv_wc wc;
	int n = ibv_poll_cq(c->cq, 1, &wc);

	CHECK(!n || (n == 1 && wc.status == IBV_WC_SUCCESS));
	return n;
}

/* Sends a request or an answer. By RDMA its first word is its number, and the WQE has the data, so the next one
 * cannot overwrite it. */
static void send_message(struct connection *c)
{
	c->sent++;
	if (!c->qp) {
		move(c->socket, 1, out[c - all], REQUEST);
		return;
	}
	*(uint64_t *)out[c - all] = c->sent;
	post_write(c, IBV_WR_RDMA_WRITE_WITH_IMM, REQUEST, IBV_SEND_INLINE | (c->sent % SIGNALLED ? 0 : IBV_SEND_SIGNALED));
}

/* Number of new messages; -1 if the other end has closed. */
static int arrivals(struct connection *c)
{
	struct ibv_wc wc;
	int n, came = 0;

	if (!c->qp)
		return move(c->socket, 0, in[c - all], REQUEST) ? 1 : -1;
	while ((n = ibv_poll_cq(c->cq, 1, &wc))) {
		if (n < 0 || wc.status != IBV_WC_SUCCESS)
			return -1;
		if (wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM) {
			post_receive(c);
			came++;
		}
	}
	return came;
}

static void note_time(void)
{
	double t = seconds();

	if (last && t - last > silence)
		silence = t - last;
	last = t;
}

/* Answers each message with one, until `until` or until the other end closes. Returns the number of messages. */
static uint64_t answer(double until)
{
	struct epoll_event ready[CONNECTIONS + 1], event = { .events = EPOLLIN };
	int epoll = epoll_create1(0), n;
	uint64_t count = 0;

	/* With RDMA, the first socket shows when the other program ends. */
	if (all[0].qp)
		CHECK(!epoll_ctl(epoll, EPOLL_CTL_ADD, all[0].socket, &event));
	for (struct connection *c = all; c < all + CONNECTIONS; c++) {
		event.data.ptr = c;
		CHECK(!epoll_ctl(epoll, EPOLL_CTL_ADD, c->qp ? c->channel->fd : c->socket, &event));
	}
	while ((n = epoll_wait(epoll, ready, CONNECTIONS + 1, 100)) >= 0 || errno == EINTR) {
		for (int i = 0; i < n; i++) {
			struct connection *c = ready[i].data.ptr;
			struct ibv_cq *cq;
			void *context;
			int came;

			if (c && c->qp) {
				CHECK(!ibv_get_cq_event(c->channel, &cq, &context));
				ibv_ack_cq_events(cq, 1);
				CHECK(!ibv_req_notify_cq(cq, 0));
			}
			came = c ? arrivals(c) : -1;
			if (came)
				note_time();
			if (came < 0)
				return count;
			count += came;
			while (came--)
				send_message(c);
		}
		if (seconds() >= until)
			return count;
	}
	CHECK(!"epoll_wait");
	return 0;
}

/* Requests on this number of connections. */
static void requests(int connections, double length)
{
	for (int i = 0; i < connections; i++)
		send_message(&all[i]);
	printf("rate %.3f\n", answer(seconds() + length) / length);
}

static void on_signal(int s)
{
}

/* The other end. */
static void serve(int listener, int connections, int by_rdma)
{
	struct itimerval each_ms = { { 0, 1000 }, { 0, 1000 } };

	for (struct connection *c = all; c < all + connections; c++) {
		CHECK((c->socket = accept(listener, NULL, NULL)) >= 0);
		CHECK(!setsockopt(c->socket, IPPROTO_TCP, TCP_NODELAY, &(int){ 1 }, sizeof(int)));
		if (by_rdma)
			make_qp(c);
	}
	if (is("stall")) {
		signal(SIGALRM, on_signal);
		CHECK(!setitimer(ITIMER_REAL, &each_ms, NULL));
	}
	if (connections > 1)
		answer(1e18);
	else
		while (move(all[0].socket, 0, in[0], is("relay") ? PAGE : SMALL) && move(all[0].socket, 1, out[0], SMALL))
			;
	if (is("stall"))
		printf("silence %.3f\n", silence * 1e3);
}

/* Listens, on any free port if `port` is 0. Returns the address in `at`. */
static int listen_at(in_addr_t address, int port, struct sockaddr_in *at)
{
	socklen_t n = sizeof(*at);
	int s = socket(AF_INET, SOCK_STREAM, 0);

	*at = (struct sockaddr_in){ .sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = address };
	CHECK(!bind(s, (struct sockaddr *)at, n) && !listen(s, CONNECTIONS) && !getsockname(s, (struct sockaddr *)at, &n));
	return s;
}

static void sync_times(double until)
{
	double *t = malloc(MOST_TIMES * sizeof(*t)), end, sum = 0;
	struct connection *c = all;
	long n = 0;

	CHECK(t);
	for (double start = seconds(); start < until && n < MOST_TIMES; start = end) {
		if (c->qp) {
			post_write(c, IBV_WR_RDMA_WRITE, SMALL, IBV_SEND_SIGNALED);
			while (!is_complete(c))
				;
		} else {
			CHECK(move(c->socket, 1, out[0], SMALL) && move(c->socket, 0, in[0], SMALL));
		}
		end = seconds();
		t[n++] = (end - start) * 1e6;
		sum += t[n - 1];
	}
	qsort(t, n, sizeof(*t), ascending);
	printf("mean %.3f\np50 %.3f\np99 %.3f\np99.9 %.3f\nworst %.3f\n", sum / n, t[n / 2], t[n * 99 / 100], t[n * 999 / 1000], t[n - 1]);
}

/* The part of a relay that polls. In memory alone a request is complete when it is posted. */
static void relay_poll(void)
{
	if (!all[0].qp)
		done = posted;
	else if (is_complete(&all[0]))
		done++;
}

static void *relay_poster(void *also_polls)
{
	while (!stop) {
		if (asked != posted) {
			if (all[0].qp)
				post_write(&all[0], IBV_WR_RDMA_WRITE, PAGE, IBV_SEND_SIGNALED);
			posted++;
		}
		if (also_polls)
			relay_poll();
	}
	return NULL;
}

static void *relay_poller(void *unused)
{
	while (!stop)
		relay_poll();
	return NULL;
}

static void *relay_answers(void *unused)
{
	while (move(all[0].socket, 0, in[0], SMALL))
		done++;
	return NULL;
}

static void start(void *(*f)(void *), void *argument)
{
	pthread_t t;

	CHECK(!pthread_create(&t, NULL, f, argument));
}

static void relay(int threads, int by_tcp, double length)
{
	double until;
	uint64_t n = 0;

	if (by_tcp) {
		start(relay_answers, NULL);
	} else {
		start(relay_poster, threads == 2 ? &threads : NULL);
		if (threads == 3)
			start(relay_poller, NULL);
	}
	until = seconds() + length;
	while (seconds() < until) {
		asked = ++n;
		if (by_tcp)
			CHECK(move(all[0].socket, 1, out[0], PAGE));
		while (done != n && seconds() < until)
			;
	}
	printf("rate %.3f\n", done / length);
}

static void *stall_sender(void *first)
{
	struct connection *end = (struct connection *)first + CONNECTIONS / SENDERS;
	int came, idle;

	for (struct connection *c = first; c < end; c++)
		for (int i = 0; i < WINDOW; i++)
			send_message(c);
	while (!stop) {
		idle = 1;
		for (struct connection *c = first; c < end; c++) {
			if (c->looked && *(volatile uint64_t *)in[c - all] <= c->received)
				continue;
			came = arrivals(c);
			/* The other end must not close yet. */
			CHECK(came >= 0 || stop);
			c->looked = !came;
			for (; came > 0; came--, idle = 0) {
				c->received++;
				send_message(c);
			}
		}
		if (idle)
			sched_yield();
	}
	return NULL;
}

static void stall(double length)
{
	struct timespec ms = { .tv_nsec = 1000000 };
	double until, before, late, worst = 0;

	for (int i = 0; i < SENDERS; i++)
		start(stall_sender, &all[CONNECTIONS / SENDERS * i]);
	for (until = seconds() + length; (before = seconds()) < until;) {
		clock_nanosleep(CLOCK_MONOTONIC, 0, &ms, NULL);
		late = seconds() - before - 1e-3;
		worst = late > worst ? late : worst;
	}
	stop = 1;
	printf("sleep %.3f\n", worst * 1e3);
	/* Stops the other end before this program waits for its own threads. */
	shutdown(all[0].socket, SHUT_RDWR);
}

static void *compute(void *unused)
{
	for (volatile uint64_t n = 0; !stop; n++)
		;
	return NULL;
}

int main(int argc, char **argv)
{
	int serves = argc == 3 && !strcmp(argv[1], "serve"), connections, listener;
	const char *way = argc == 5 ? argv[2] : "";
	int by_tcp = !strcmp(way, "tcp");
	struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons(PORT) };
	double length;

	if (!serves && argc != 5)
		return 2;
	what = argv[1 + serves];
	connections = is("requests-") || is("stall") ? CONNECTIONS : 1;
	if (serves) {
		serve(listen_at(htonl(INADDR_ANY), PORT, &to), connections, 1);
		return 0;
	}
	if (by_tcp) {
		listener = listen_at(htonl(INADDR_LOOPBACK), 0, &to);
		if (!fork()) {
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			serve(listener, connections, 0);
			_exit(0);
		}
	} else if (!strcmp(way, "memory")) {
		connections = 0;
	} else {
		CHECK(inet_pton(AF_INET, way, &to.sin_addr) == 1);
	}
	for (struct connection *c = all; c < all + connections; c++) {
		c->socket = socket(AF_INET, SOCK_STREAM, 0);
		CHECK(!connect(c->socket, (struct sockaddr *)&to, sizeof(to)));
		CHECK(!setsockopt(c->socket, IPPROTO_TCP, TCP_NODELAY, &(int){ 1 }, sizeof(int)));
		if (!by_tcp)
			make_qp(c);
	}
	for (int i = atoi(argv[3]); i > 0; i--)
		start(compute, NULL);
	length = atof(argv[4]);
	/* Lets the scheduler learn which threads compute. */
	usleep(300000);
	if (is("sync"))
		sync_times(seconds() + length);
	else if (is("stall"))
		stall(length);
	else if (is("relay-"))
		relay(atoi(what + strlen("relay-")), by_tcp, length);
	else if (is("requests-"))
		requests(atoi(what + strlen("requests-")), length);
	else
		return 2;
	fflush(stdout);
	/* Spinning threads still use objects that exit() would destroy. */
	_exit(0);
}
