/* SPDX-License-Identifier: Apache-2.0 OR MIT
 *
 * Costs of operations on a device, for `cargo xtask bench vm`. It runs in guests and in containers. Prints
 * names and numbers: times in microseconds, bandwidth in MiB/s.
 *
 *   vm-bench DEVICE self                   WRITEs and SENDs between two QPs of this process
 *   vm-bench DEVICE serve                  the other end of `call`, once
 *   vm-bench DEVICE call ADDRESS           WRITEs and SENDs to another process, and TCP to it
 *   vm-bench DEVICE register               MRs of fresh memory
 *   vm-bench DEVICE notify COUNT PAUSE_US poll|event
 *                                          WRITEs, each after a pause, that wait until /tmp/go is there and gone before and after
 */
#include <arpa/inet.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "check.h"
#include "times.h"

enum { LARGE = 1 << 20, SMALL = 2, WARM_UP = 50, TIMES = 1000, RECEIVES = WARM_UP + TIMES, DEPTH = 32, PAGE = 4096, PORT = 18515 };
enum { ACCESS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE };
/* Longest time for a figure, s. */
#define LIMIT_S 3.0
#define LIMIT_OF_ONE_S 60.0

/* Data by which one end connects to the other. */
struct peer {
	union ibv_gid gid;
	uint64_t addr;
	uint32_t rkey;
	uint32_t qpn;
};

/* A request to the other end of a TCP connection. Size 0 ends it. */
struct order {
	uint32_t size;
	uint32_t count;
	/* Each message is echoed, or one byte follows the last message. */
	uint32_t echo;
	/* Both ends spin; otherwise both sleep until data arrives. */
	uint32_t spin;
};

static char out[LARGE] __attribute__((aligned(PAGE))), in[LARGE] __attribute__((aligned(PAGE)));
static struct ibv_context *ctx;
static struct ibv_pd *pd;
static struct ibv_mr *out_mr, *in_mr;
static struct ibv_comp_channel *channel;
static struct ibv_port_attr port;
static union ibv_gid gid;
static int gid_index;

/* Median and 99 % of times in seconds. */
static void say_times(const char *name, double *t, int n)
{
	qsort(t, n, sizeof(*t), ascending);
	printf("%s-p50 %.3f\n%s-p99 %.3f\n", name, t[n / 2] * 1e6, name, t[n * 99 / 100] * 1e6);
}

static void open_device(const char *name)
{
	static const uint8_t v4[12] = { [10] = 0xff, 0xff };
	struct ibv_device **list = ibv_get_device_list(NULL);

	CHECK(list);
	for (int i = 0; list[i]; i++)
		if (!strcmp(ibv_get_device_name(list[i]), name))
			ctx = ibv_open_device(list[i]);
	CHECK(ctx && !ibv_query_port(ctx, 1, &port));
	/* The GID that is an IPv4 address. */
	while (memcmp(&gid, v4, sizeof(v4)) || !gid.raw[12])
		CHECK(!ibv_query_gid(ctx, 1, ++gid_index - 1, &gid) && gid_index < 32);
	gid_index--;
	CHECK((pd = ibv_alloc_pd(ctx)) && (channel = ibv_create_comp_channel(ctx)));
	CHECK((out_mr = ibv_reg_mr(pd, out, LARGE, ACCESS)) && (in_mr = ibv_reg_mr(pd, in, LARGE, ACCESS)));
}

static struct ibv_qp *make(void)
{
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .cap = { DEPTH, RECEIVES, 1, 1, SMALL } };
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = ACCESS };
	struct ibv_qp *qp;

	init.send_cq = ibv_create_cq(ctx, DEPTH, NULL, channel, 0);
	init.recv_cq = ibv_create_cq(ctx, RECEIVES, NULL, NULL, 0);
	CHECK(init.send_cq && init.recv_cq && (qp = ibv_create_qp(pd, &init)));
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	for (int i = 0; i < RECEIVES; i++) {
		struct ibv_sge sge = { (uintptr_t)in, SMALL, in_mr->lkey };
		struct ibv_recv_wr wr = { .sg_list = &sge, .num_sge = 1 }, *bad;

		CHECK(!ibv_post_recv(qp, &wr, &bad));
	}
	return qp;
}

static struct peer describe(struct ibv_qp *qp)
{
	return (struct peer){ .gid = gid, .addr = (uintptr_t)in, .rkey = in_mr->rkey, .qpn = qp->qp_num };
}

static void join(struct ibv_qp *qp, const struct peer *to)
{
	struct ibv_ah_attr path = { .is_global = 1, .port_num = 1,
				    .grh = { .dgid = to->gid, .sgid_index = gid_index, .hop_limit = 64 } };
	struct ibv_qp_attr rtr = { .qp_state = IBV_QPS_RTR, .path_mtu = port.active_mtu, .dest_qp_num = to->qpn,
				   .max_dest_rd_atomic = 1, .min_rnr_timer = 1, .ah_attr = path };
	struct ibv_qp_attr rts = { .qp_state = IBV_QPS_RTS, .timeout = 18, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 1 };

	CHECK(!ibv_modify_qp(qp, &rtr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
			     IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
	CHECK(!ibv_modify_qp(qp, &rts, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
			     IBV_QP_MAX_QP_RD_ATOMIC));
}

static void post(struct ibv_qp *qp, const struct peer *to, enum ibv_wr_opcode opcode, uint32_t size)
{
	struct ibv_sge sge = { (uintptr_t)out, size, out_mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = opcode,
				  .send_flags = IBV_SEND_SIGNALED | (size <= SMALL ? IBV_SEND_INLINE : 0),
				  .wr.rdma = { to->addr, to->rkey } }, *bad;

	CHECK(!ibv_post_send(qp, &wr, &bad));
}

/* Polls until a request is completed. Reading the clock is slow in a guest, so that is not done each time. */
static void completion(struct ibv_qp *qp)
{
	uint64_t polls = 0;
	double limit = 0;
	struct ibv_wc wc;
	int n;

	while (!(n = ibv_poll_cq(qp->send_cq, 1, &wc))) {
		if (++polls % 65536)
			continue;
		limit = limit ? limit : seconds() + LIMIT_OF_ONE_S;
		CHECK(seconds() < limit);
	}
	CHECK(n == 1 && wc.status == IBV_WC_SUCCESS);
}

static void latency(const char *name, struct ibv_qp *qp, const struct peer *to, enum ibv_wr_opcode opcode)
{
	static double t[TIMES];
	double limit = seconds() + LIMIT_S;
	int n = 0;

	for (int i = 0; i < WARM_UP; i++) {
		post(qp, to, opcode, SMALL);
		completion(qp);
	}
	while (n < TIMES && (n < 100 || seconds() < limit)) {
		double start = seconds();

		post(qp, to, opcode, SMALL);
		completion(qp);
		t[n++] = seconds() - start;
	}
	say_times(name, t, n);
}

static void bandwidth(struct ibv_qp *qp, const struct peer *to, uint32_t size)
{
	int depth = size < LARGE ? DEPTH : 4, under_way = 0, done = -depth;
	double start = seconds(), limit = start + LIMIT_S / 2;

	/* The first requests, while the queue fills, are not counted. */
	for (; done < 2 * depth || seconds() < limit; done++) {
		for (; under_way < depth; under_way++)
			post(qp, to, IBV_WR_RDMA_WRITE, size);
		completion(qp);
		under_way--;
		if (!done)
			start = seconds();
	}
	done--;
	printf("write-%u %.2f\n", size, (double)done * size / (1 << 20) / (seconds() - start));
	for (; under_way; under_way--)
		completion(qp);
}

static void operations(struct ibv_qp *qp, const struct peer *to)
{
	latency("write-2", qp, to, IBV_WR_RDMA_WRITE);
	latency("send-2", qp, to, IBV_WR_SEND);
	bandwidth(qp, to, 65536);
	bandwidth(qp, to, LARGE);
}

/* Connects two QPs of this process. Returns the first one; `to` receives the data of the second. */
static struct ibv_qp *pair(struct peer *to)
{
	struct ibv_qp *a = make(), *b = make();
	struct peer back = describe(a);

	*to = describe(b);
	join(a, to);
	join(b, &back);
	return a;
}

static void move(int s, int writes, void *p, size_t n)
{
	while (n) {
		ssize_t r = writes ? send(s, p, n, MSG_NOSIGNAL) : recv(s, p, n, 0);

		CHECK(r > 0 || (r < 0 && errno == EAGAIN));
		if (r > 0) {
			p = (char *)p + r;
			n -= r;
		}
	}
}

static void set_spinning(int s, int spins)
{
	CHECK(!fcntl(s, F_SETFL, spins ? O_NONBLOCK : 0));
}

static void tcp_latency(int s, const char *name, int spin)
{
	static double t[TIMES];
	struct order order = { SMALL, WARM_UP + TIMES / 2, 1, spin };

	move(s, 1, &order, sizeof(order));
	set_spinning(s, spin);
	for (int i = -WARM_UP; i < TIMES / 2; i++) {
		double start = seconds();

		move(s, 1, out, SMALL);
		move(s, 0, in, SMALL);
		if (i >= 0)
			t[i] = seconds() - start;
	}
	set_spinning(s, 0);
	say_times(name, t, TIMES / 2);
}

static void tcp_bandwidth(int s, uint32_t size)
{
	struct order order = { size, (64 << 20) / size, 0, 0 };
	double start = seconds();

	move(s, 1, &order, sizeof(order));
	for (uint32_t i = 0; i < order.count; i++)
		move(s, 1, out, size);
	move(s, 0, in, 1);
	printf("tcp-%u %.2f\n", size, (double)size * order.count / (1 << 20) / (seconds() - start));
}

static void exchange(int s, struct ibv_qp *qp, struct peer *to)
{
	struct peer mine = describe(qp);

	CHECK(!setsockopt(s, IPPROTO_TCP, TCP_NODELAY, &(int){ 1 }, sizeof(int)));
	move(s, 1, &mine, sizeof(mine));
	move(s, 0, to, sizeof(*to));
	join(qp, to);
	/* Both are connected. */
	move(s, 1, out, 1);
	move(s, 0, in, 1);
}

static void serve(void)
{
	struct sockaddr_in any = { .sin_family = AF_INET, .sin_port = htons(PORT) };
	int l = socket(AF_INET, SOCK_STREAM, 0), s;
	struct order order;
	struct peer to;

	CHECK(!setsockopt(l, SOL_SOCKET, SO_REUSEADDR, &(int){ 1 }, sizeof(int)));
	CHECK(!bind(l, (struct sockaddr *)&any, sizeof(any)) && !listen(l, 1) && (s = accept(l, NULL, NULL)) >= 0);
	exchange(s, make(), &to);
	for (;;) {
		move(s, 0, &order, sizeof(order));
		if (!order.size)
			return;
		CHECK(order.size <= LARGE);
		set_spinning(s, order.spin);
		for (uint32_t i = 0; i < order.count; i++) {
			move(s, 0, in, order.size);
			if (order.echo)
				move(s, 1, in, order.size);
		}
		set_spinning(s, 0);
		if (!order.echo)
			move(s, 1, out, 1);
	}
}

static void call(const char *address)
{
	struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons(PORT) };
	int s = socket(AF_INET, SOCK_STREAM, 0);
	struct ibv_qp *qp = make();
	struct order end = { 0 };
	struct peer peer;

	CHECK(inet_pton(AF_INET, address, &to.sin_addr) == 1 && !connect(s, (struct sockaddr *)&to, sizeof(to)));
	exchange(s, qp, &peer);
	operations(qp, &peer);
	tcp_latency(s, "tcp-sleep", 0);
	tcp_latency(s, "tcp-spin", 1);
	tcp_bandwidth(s, 65536);
	tcp_bandwidth(s, LARGE);
	move(s, 1, &end, sizeof(end));
}

static void registrations(void)
{
	static const struct {
		size_t pages;
		int times;
	} all[] = { { 1, 200 }, { 16, 200 }, { 256, 100 }, { 4096, 15 }, { 65536, 3 } };
	static double made[200], gone[200];

	for (size_t k = 0; k < sizeof(all) / sizeof(*all); k++) {
		size_t n = all[k].pages * PAGE;
		char name[64];

		for (int i = 0; i < all[k].times; i++) {
			char *p = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
			struct ibv_mr *mr;
			double start, t;

			CHECK(p != MAP_FAILED);
			memset(p, 1, n);
			start = seconds();
			CHECK((mr = ibv_reg_mr(pd, p, n, ACCESS)));
			t = seconds();
			CHECK(!ibv_dereg_mr(mr));
			gone[i] = seconds() - t;
			made[i] = t - start;
			munmap(p, n);
		}
		snprintf(name, sizeof(name), "reg-%zu", all[k].pages);
		say_times(name, made, all[k].times);
		snprintf(name, sizeof(name), "dereg-%zu", all[k].pages);
		say_times(name, gone, all[k].times);
	}
}

/* Waits until /tmp/go exists, or does not exist any more. */
static void wait_for(int there)
{
	while ((access("/tmp/go", F_OK) == 0) != there)
		usleep(10000);
}

static void notify(int count, int pause_us, int by_events)
{
	struct peer to;
	struct ibv_qp *qp = pair(&to);
	struct ibv_cq *cq;
	void *context;

	printf("ready\n");
	fflush(stdout);
	wait_for(1);
	for (int i = 0; i < count; i++) {
		if (pause_us)
			usleep(pause_us);
		if (by_events)
			CHECK(!ibv_req_notify_cq(qp->send_cq, 0));
		post(qp, &to, IBV_WR_RDMA_WRITE, SMALL);
		if (by_events) {
			CHECK(!ibv_get_cq_event(channel, &cq, &context) && cq == qp->send_cq);
			ibv_ack_cq_events(cq, 1);
		}
		completion(qp);
	}
	printf("done\n");
	fflush(stdout);
	wait_for(0);
}

int main(int argc, char **argv)
{
	const char *what = argc > 2 ? argv[2] : "";
	struct peer to;

	if (argc > 2)
		open_device(argv[1]);
	if (!strcmp(what, "self") && argc == 3)
		operations(pair(&to), &to);
	else if (!strcmp(what, "serve") && argc == 3)
		serve();
	else if (!strcmp(what, "call") && argc == 4)
		call(argv[3]);
	else if (!strcmp(what, "register") && argc == 3)
		registrations();
	else if (!strcmp(what, "notify") && argc == 6)
		notify(atoi(argv[3]), atoi(argv[4]), !strcmp(argv[5], "event"));
	else
		return 2;
	return 0;
}
