/* SPDX-License-Identifier: Apache-2.0 OR MIT
 *
 * What a hostile program of a vRNIC with a VF tries. It ends with an error if something succeeds that must not.
 *
 *   vf-attack nodes                reach device nodes of VFs, and send frames of its own making
 *   vf-attack keep                 close the connection of its lease, and go on with its context until it is killed
 *   vf-attack flood SOCKET         send requests and junk to the lease socket, and read nothing, until it is killed
 *   vf-attack late SOCKET          end a lease with the answer unread, and read it at SIGUSR1
 *   vf-attack names GID...         name real GIDs as destinations, by the library
 *   vf-attack serve DEVICE         be the peer of `reach`, past the library
 *   vf-attack reach DEVICE         send to `serve` past the library: the kernel takes the real GIDs
 *   vf-attack exhaust COUNT BYTES  make objects, and pin as much memory as RLIMIT_MEMLOCK, here so many bytes, allows
 *   vf-attack sealed PROGRAM...    execute a program for which seccomp refuses the ioctl of verbs
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <netinet/in.h>
#include <rdma/ib_user_ioctl_cmds.h>
#include <rdma/rdma_user_ioctl.h>
#include <rdma/rdma_user_ioctl_cmds.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "check.h"

enum { PAGE = 4096, GRH = 40, QKEY = 0x11111111, CQES = 32, RECEIVES = 4, TCP_PORT = 18700, NODES = 8 };
enum { ACCESS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE };
enum { RC, UC, UD, TYPES };
/* The kind of an answer at the lease socket. */
enum { HAS = 4 };

static const enum ibv_qp_type types[TYPES] = { IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_UD };
static const char *const names[TYPES] = { "rc", "uc", "ud" };

/* Ends the program if an attack succeeds. */
#define REFUSED(what, is_refused)                                             \
	do {                                                                  \
		if (is_refused) {                                             \
			printf("%s: %s\n", what, strerror(errno));            \
		} else {                                                      \
			printf("%s: succeeds\n", what);                       \
			exit(1);                                              \
		}                                                             \
	} while (0)

/* Opens the device of this name, or the first one. */
static struct ibv_context *open_device(const char *name)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *ctx;

	CHECK(list);
	while (*list && name && strcmp(ibv_get_device_name(*list), name))
		list++;
	CHECK(*list);
	ctx = ibv_open_device(*list);
	CHECK(ctx);
	return ctx;
}

/* True if a path cannot be opened, or is no device of this kind: a container's /dev/infiniband/uverbs0 is /dev/null. */
static int is_out_of_reach(const char *path, unsigned int kind)
{
	int fd = open(path, O_RDWR);
	struct stat st;

	return fd < 0 || (!fstat(fd, &st) && major(st.st_rdev) != kind);
}

/* Other devices' nodes, a second descriptor of the own device, and QPs and sockets that take whole frames. */
static void reach_nodes(void)
{
	struct ibv_context *ctx = open_device(NULL);
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	struct ibv_cq *cq = ibv_create_cq(ctx, CQES, NULL, NULL, 0);
	struct ibv_qp_init_attr of = { .send_cq = cq, .recv_cq = cq, .cap = { 1, 1, 1, 1, 0 },
				       .qp_type = IBV_QPT_RAW_PACKET };
	char path[64];
	struct stat own;

	CHECK(pd && cq && !fstat(ctx->cmd_fd, &own) && S_ISCHR(own.st_mode));
	for (int i = 0; i < NODES; i++) {
		snprintf(path, sizeof(path), "/dev/infiniband/uverbs%d", i);
		REFUSED(path, is_out_of_reach(path, major(own.st_rdev)));
	}
	/* Numbers of this device and of those around it. */
	for (int i = -NODES; i <= NODES; i++) {
		dev_t of_node = makedev(major(own.st_rdev), minor(own.st_rdev) + i);

		REFUSED("mknod", mknod("/tmp/node", S_IFCHR | 0666, of_node));
	}
	snprintf(path, sizeof(path), "/proc/self/fd/%d", ctx->cmd_fd);
	REFUSED("a second descriptor", open(path, O_RDWR) < 0);
	REFUSED("permissions for all", fchmod(ctx->cmd_fd, 0666));
	REFUSED("raw packets of verbs", !ibv_create_qp(pd, &of));
	REFUSED("raw packets of sockets", socket(AF_PACKET, SOCK_RAW, 0) < 0);
	printf("all refused\n");
}

/* Ends the connection of the lease, which is a descriptor of this process. */
static void close_lease(void)
{
	struct sockaddr_un to;
	int closed = 0;

	for (int fd = 0; fd < 65536; fd++) {
		socklen_t length = sizeof(to);

		memset(&to, 0, sizeof(to));
		if (getpeername(fd, (struct sockaddr *)&to, &length) || !strstr(to.sun_path, "lease.sock"))
			continue;
		CHECK(!shutdown(fd, SHUT_RDWR) && !close(fd));
		closed++;
	}
	CHECK(closed == 1);
}

static void keep(void)
{
	static char memory[PAGE];
	struct ibv_context *ctx = open_device(NULL);
	struct ibv_pd *pd;

	close_lease();
	pd = ibv_alloc_pd(ctx);
	CHECK(pd && ibv_reg_mr(pd, memory, PAGE, ACCESS));
	printf("goes on\n");
	for (;;)
		pause();
}

struct ask {
	uint32_t version, reserved[3];
};

static const struct ask ask = { .version = 1 };

static int connect_lease(const char *path)
{
	struct sockaddr_un to = { .sun_family = AF_UNIX };
	int s = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

	strncpy(to.sun_path, path, sizeof(to.sun_path) - 1);
	CHECK(s >= 0 && !connect(s, (struct sockaddr *)&to, sizeof(to)));
	return s;
}

/* Sends a message with a descriptor of /dev/null. */
static void send_with_descriptor(int s)
{
	static int null = -1;
	char control[CMSG_SPACE(sizeof(int))] = { 0 };
	struct iovec part = { (void *)&ask, sizeof(ask) };
	struct msghdr m = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control) };
	struct cmsghdr *c = CMSG_FIRSTHDR(&m);

	if (null < 0)
		null = open("/dev/null", O_RDWR);
	c->cmsg_level = SOL_SOCKET;
	c->cmsg_type = SCM_RIGHTS;
	c->cmsg_len = CMSG_LEN(sizeof(int));
	memcpy(CMSG_DATA(c), &null, sizeof(int));
	sendmsg(s, &m, MSG_DONTWAIT | MSG_NOSIGNAL);
}

/* Connections that are kept for a while, each with one of these: a request, two at once, junk, nothing. */
static void flood(const char *path)
{
	enum { CONNECTIONS = 128 };
	static char junk[2048];
	int all[CONNECTIONS];

	memset(all, -1, sizeof(all));
	memset(junk, 0xa5, sizeof(junk));
	for (long n = 0;; n++) {
		int *s = &all[n % CONNECTIONS];

		if (n == CONNECTIONS)
			printf("floods\n");
		if (*s >= 0)
			close(*s);
		*s = connect_lease(path);
		switch (n % 8) {
		case 0:
		case 1:
		case 2:
			send(*s, &ask, sizeof(ask), MSG_DONTWAIT | MSG_NOSIGNAL);
			break;
		case 3:
			send(*s, &ask, sizeof(ask), MSG_DONTWAIT | MSG_NOSIGNAL);
			send(*s, &ask, sizeof(ask), MSG_DONTWAIT | MSG_NOSIGNAL);
			break;
		case 4:
			send_with_descriptor(*s);
			break;
		case 5:
			send(*s, junk, sizeof(junk), MSG_DONTWAIT | MSG_NOSIGNAL);
			break;
		case 6:
			send(*s, junk, sizeof(ask) - 1, MSG_DONTWAIT | MSG_NOSIGNAL);
			break;
		default:
			break;
		}
	}
}

/* Waits for SIGUSR1. */
static void wait_for_signal(const sigset_t *set)
{
	int signal;

	CHECK(!sigwait(set, &signal));
}

/* A descriptor that is on its way belongs to no process. */
static void late(const char *path)
{
	struct ib_uverbs_ioctl_hdr context = { .length = sizeof(context), .object_id = UVERBS_OBJECT_DEVICE,
					       .method_id = UVERBS_METHOD_GET_CONTEXT, .driver_id = RDMA_DRIVER_RXE };
	char control[CMSG_SPACE(sizeof(int))], told[256];
	struct iovec to = { told, sizeof(told) };
	struct msghdr m = { .msg_iov = &to, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control) };
	struct cmsghdr *c;
	int s, fd = -1;
	sigset_t set;

	sigemptyset(&set);
	sigaddset(&set, SIGUSR1);
	CHECK(!sigprocmask(SIG_BLOCK, &set, NULL));
	s = connect_lease(path);
	CHECK(send(s, &ask, sizeof(ask), 0) == sizeof(ask));
	/* The answer is there, and its first byte says that the program has a VF. */
	CHECK(recv(s, told, sizeof(told), MSG_PEEK) == sizeof(told) && told[0] == HAS);
	CHECK(!shutdown(s, SHUT_WR));
	printf("does not read\n");
	wait_for_signal(&set);
	CHECK(recvmsg(s, &m, MSG_CMSG_CLOEXEC) == sizeof(told));
	c = CMSG_FIRSTHDR(&m);
	CHECK(c && c->cmsg_type == SCM_RIGHTS);
	memcpy(&fd, CMSG_DATA(c), sizeof(int));
	printf("context: %s\n", ioctl(fd, RDMA_VERBS_IOCTL, &context) ? strerror(errno) : "works");
	for (;;)
		pause();
}

/* The functions with which names are given: those of the library, or those of rdma-core. */
struct calls {
	int (*modify_qp)(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask);
	struct ibv_ah *(*create_ah)(struct ibv_pd *pd, struct ibv_ah_attr *attr);
	int (*query_gid)(struct ibv_context *ctx, uint8_t port, int index, union ibv_gid *gid);
};

struct user {
	struct calls calls;
	struct ibv_context *ctx;
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	struct ibv_mr *mr;
	struct ibv_qp *qps[TYPES];
	char memory[PAGE];
};

/* What the two programs tell each other. */
struct peer {
	union ibv_gid gid;
	uint32_t qpns[TYPES], rkey;
	uint64_t address;
};

static struct user me;

static void make_objects(const char *device)
{
	me.ctx = open_device(device);
	CHECK(me.pd = ibv_alloc_pd(me.ctx));
	CHECK(me.cq = ibv_create_cq(me.ctx, CQES, NULL, NULL, 0));
	CHECK(me.mr = ibv_reg_mr(me.pd, me.memory, PAGE, ACCESS));
	for (int i = 0; i < TYPES; i++) {
		struct ibv_qp_init_attr of = { .send_cq = me.cq, .recv_cq = me.cq, .qp_type = types[i],
					       .cap = { 4, RECEIVES, 1, 1, 0 }, .sq_sig_all = 1 };

		CHECK(me.qps[i] = ibv_create_qp(me.pd, &of));
	}
}

static struct ibv_ah_attr path_to(union ibv_gid to, int sgid_index)
{
	return (struct ibv_ah_attr){ .is_global = 1, .port_num = 1,
				     .grh = { .dgid = to, .sgid_index = sgid_index, .hop_limit = 64 } };
}

static void to_init(int type)
{
	struct ibv_qp_attr init = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = QKEY,
				    .qp_access_flags = type == UD ? 0 : ACCESS };

	CHECK(!me.calls.modify_qp(me.qps[type], &init,
				  IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
					  (type == UD ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS)));
}

/* Returns 0, or an errno. */
static int to_rtr(int type, uint32_t qpn, union ibv_gid to, int sgid_index)
{
	struct ibv_qp_attr rtr = { .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = qpn,
				   .max_dest_rd_atomic = 1, .min_rnr_timer = 12, .ah_attr = path_to(to, sgid_index) };
	int mask = IBV_QP_STATE;

	if (type != UD)
		mask |= IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
	if (type == RC)
		mask |= IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
	return me.calls.modify_qp(me.qps[type], &rtr, mask);
}

static void to_rts(int type)
{
	/* rxe takes 7 retries as an unlimited number of them. */
	struct ibv_qp_attr rts = { .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 6, .rnr_retry = 6,
				   .max_rd_atomic = 1 };
	int mask = IBV_QP_STATE | IBV_QP_SQ_PSN;

	if (type == RC)
		mask |= IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
	CHECK(!me.calls.modify_qp(me.qps[type], &rts, mask));
}

static void name_all(char **gids)
{
	me.calls = (struct calls){ ibv_modify_qp, ibv_create_ah, NULL };
	make_objects(NULL);
	to_init(RC);
	to_init(UC);
	for (; *gids; gids++) {
		struct ibv_ah_attr path;
		union ibv_gid gid;

		CHECK(inet_pton(AF_INET6, *gids, &gid) == 1);
		path = path_to(gid, 0);
		printf("%s\n", *gids);
		REFUSED("rc", (errno = to_rtr(RC, me.qps[RC]->qp_num, gid, 0)));
		REFUSED("uc", (errno = to_rtr(UC, me.qps[UC]->qp_num, gid, 0)));
		REFUSED("ah", !ibv_create_ah(me.pd, &path));
	}
	printf("all refused\n");
}

/* Finds rdma-core's own functions, as any program can. Without our library, they are the same. */
static void find_real(void)
{
	void *real = dlopen("/usr/lib/x86_64-linux-gnu/libibverbs.so.1", RTLD_NOW | RTLD_NOLOAD);

	if (!real)
		real = dlopen("/lib/x86_64-linux-gnu/libibverbs.so.1", RTLD_NOW | RTLD_NOLOAD);
	CHECK(real);
	me.calls.modify_qp = dlvsym(real, "ibv_modify_qp", "IBVERBS_1.1");
	me.calls.create_ah = dlvsym(real, "ibv_create_ah", "IBVERBS_1.1");
	me.calls.query_gid = dlvsym(real, "ibv_query_gid", "IBVERBS_1.1");
	CHECK(me.calls.modify_qp && me.calls.create_ah && me.calls.query_gid);
}

/* The index of the real GID that is an IPv4 address. */
static int find_gid(union ibv_gid *gid)
{
	static const uint8_t v4[12] = { [10] = 0xff, 0xff };

	for (int i = 0;; i++) {
		CHECK(i < 32 && !me.calls.query_gid(me.ctx, 1, i, gid));
		if (!memcmp(gid, v4, sizeof(v4)))
			return i;
	}
}

/* A connection to the other program, or from it. */
static int meet(int serves)
{
	struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons(TCP_PORT),
				  .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	int s = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1, connection;

	CHECK(s >= 0);
	if (!serves) {
		CHECK(!connect(s, (struct sockaddr *)&to, sizeof(to)));
		return s;
	}
	CHECK(!setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)));
	CHECK(!bind(s, (struct sockaddr *)&to, sizeof(to)) && !listen(s, 1));
	printf("listens\n");
	connection = accept(s, NULL, NULL);
	CHECK(connection >= 0 && !close(s));
	return connection;
}

static void exchange(int s, const void *own, void *theirs, size_t length)
{
	CHECK(send(s, own, length, MSG_NOSIGNAL) == (ssize_t)length);
	CHECK(recv(s, theirs, length, MSG_WAITALL) == (ssize_t)length);
}

/* Waits for the other program. */
static void meet_again(int s)
{
	char one = 0;

	exchange(s, &one, &one, 1);
}

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec * 1e-9;
}

/* Counts the messages that have come. If `all` are to come, waits for them. */
static void count_arrived(int all)
{
	double limit = now() + 20;
	int n[TYPES] = { 0 }, total = 0;
	struct ibv_wc wc;
	int written;

	do {
		while (ibv_poll_cq(me.cq, 1, &wc) > 0)
			for (int i = 0; i < TYPES; i++)
				if (wc.status == IBV_WC_SUCCESS && wc.qp_num == me.qps[i]->qp_num) {
					n[i]++;
					total++;
				}
	} while (all && total < TYPES && now() < limit);
	written = *(volatile char *)me.memory == 'w';
	for (int i = 0; i < TYPES; i++)
		printf("%s: %d arrived\n", names[i], n[i]);
	printf("memory: %s\n", written ? "written" : "untouched");
}

/* Sends a message of each type and an RDMA WRITE, and waits for their completions. */
static void send_all(const struct peer *peer, struct ibv_ah *ah)
{
	struct ibv_sge from = { .addr = (uintptr_t)me.memory, .length = 8, .lkey = me.mr->lkey };
	struct ibv_send_wr *bad, wr = { .sg_list = &from, .num_sge = 1, .opcode = IBV_WR_SEND };
	int left = TYPES + 1;
	struct ibv_wc wc;

	me.memory[0] = 'w';
	for (int i = TYPES - 1; i >= 0; i--) {
		wr.wr_id = i;
		if (i == UD) {
			wr.wr.ud.ah = ah;
			wr.wr.ud.remote_qpn = peer->qpns[UD];
			wr.wr.ud.remote_qkey = QKEY;
		}
		CHECK(!ibv_post_send(me.qps[i], &wr, &bad));
	}
	wr.opcode = IBV_WR_RDMA_WRITE;
	wr.wr.rdma.remote_addr = peer->address;
	wr.wr.rdma.rkey = peer->rkey;
	CHECK(!ibv_post_send(me.qps[RC], &wr, &bad));
	while (left)
		if (ibv_poll_cq(me.cq, 1, &wc) > 0) {
			printf("%s sent: %s\n", names[wc.wr_id], ibv_wc_status_str(wc.status));
			left--;
		}
}

static void go_past(const char *device, int serves, int all)
{
	struct peer own = { 0 }, peer;
	struct ibv_ah_attr path;
	struct ibv_ah *ah;
	int s, index;

	make_objects(device);
	find_real();
	index = find_gid(&own.gid);
	own.address = (uintptr_t)me.memory;
	own.rkey = me.mr->rkey;
	for (int i = 0; i < TYPES; i++)
		own.qpns[i] = me.qps[i]->qp_num;
	s = meet(serves);
	exchange(s, &own, &peer, sizeof(own));
	for (int i = 0; i < TYPES; i++) {
		struct ibv_sge to = { .addr = (uintptr_t)me.memory + PAGE / 2, .length = GRH + 8, .lkey = me.mr->lkey };
		struct ibv_recv_wr *bad, wr = { .sg_list = &to, .num_sge = 1 };

		to_init(i);
		for (int n = 0; serves && n < RECEIVES; n++)
			CHECK(!ibv_post_recv(me.qps[i], &wr, &bad));
		CHECK(!to_rtr(i, peer.qpns[i], peer.gid, index));
		to_rts(i);
	}
	path = path_to(peer.gid, index);
	ah = me.calls.create_ah(me.pd, &path);
	CHECK(ah);
	printf("connected\n");
	meet_again(s);
	if (!serves)
		send_all(&peer, ah);
	meet_again(s);
	if (serves)
		count_arrived(all);
}

/* Registers memory until the kernel refuses. Returns the number of bytes. */
static size_t pin_all(struct ibv_pd *pd, size_t most)
{
	enum { MIB = 1 << 20 };

	for (size_t pinned = 0;; pinned += MIB) {
		char *part = mmap(NULL, MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

		CHECK(part != MAP_FAILED && pinned <= most);
		if (!ibv_reg_mr(pd, part, MIB, ACCESS)) {
			printf("memory: %s\n", strerror(errno));
			return pinned;
		}
	}
}

static void exhaust(int count, size_t bytes)
{
	struct rlimit lock = { bytes, bytes };
	struct ibv_context *ctx = open_device(NULL);
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	int made = 0, status;
	pid_t child;

	CHECK(pd && !setrlimit(RLIMIT_MEMLOCK, &lock));
	for (; made < count; made++) {
		struct ibv_cq *cq = ibv_create_cq(ctx, 1, NULL, NULL, 0);
		struct ibv_qp_init_attr of = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
					       .cap = { 1, 1, 1, 1, 0 } };

		if (!cq || !ibv_create_qp(pd, &of)) {
			printf("objects: %s\n", strerror(errno));
			break;
		}
	}
	printf("has %d QPs and CQs\n", made);
	printf("has pinned %zu MiB\n", pin_all(pd, bytes) >> 20);
	child = fork();
	CHECK(child >= 0);
	if (!child) {
		printf("a second process has pinned %zu MiB\n", pin_all(pd, bytes) >> 20);
		for (;;)
			pause();
	}
	CHECK(waitpid(child, &status, 0) == child);
}

/* What a strict profile of a container's runtime does. */
static void seal(char **program)
{
	struct sock_filter filter[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_ioctl, 0, 3),
		/* The lower half of the second argument. */
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[1])),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)RDMA_VERBS_IOCTL, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog all = { sizeof(filter) / sizeof(filter[0]), filter };

	CHECK(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
	CHECK(!prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &all));
	execvp(program[0], program);
	CHECK(!"executed");
}

int main(int argc, char **argv)
{
	const char *mode = argc > 1 ? argv[1] : "", *first = argc > 2 ? argv[2] : "";

	setvbuf(stdout, NULL, _IOLBF, 0);
	if (!strcmp(mode, "nodes"))
		reach_nodes();
	else if (!strcmp(mode, "keep"))
		keep();
	else if (!strcmp(mode, "flood"))
		flood(first);
	else if (!strcmp(mode, "late"))
		late(first);
	else if (!strcmp(mode, "names"))
		name_all(argv + 2);
	else if (!strcmp(mode, "serve"))
		go_past(first, 1, argc > 3);
	else if (!strcmp(mode, "reach"))
		go_past(first, 0, 0);
	else if (!strcmp(mode, "exhaust") && argc > 3)
		exhaust(atoi(first), strtoul(argv[3], NULL, 10));
	else if (!strcmp(mode, "sealed") && argc > 2)
		seal(argv + 2);
	else
		return 2;
	return 0;
}
