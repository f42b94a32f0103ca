/* SPDX-License-Identifier: Apache-2.0 OR MIT
 *
 * A hostile process of a virtual machine. It writes junk to everything that the device's driver has mapped into
 * it, and requests access to objects of others. Prints `broken: ...` if it succeeds in something forbidden.
 *
 *   guest-hostile SECONDS SEED RKEY VADDR QPN GID-INDEX     key, address and QPN of a victim; hexadecimal
 */
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096ul
#define SLOT_ID 0x5ca1ab1e0ddba11ull
#define STAGED (1u << 31)
#define ADDRESS (1u << 30)

static uint64_t state;
static uint32_t victim_rkey, victim_qpn;
static uint64_t victim_addr;
static int gid_index;

static uint64_t rnd(void)
{
	state ^= state << 13;
	state ^= state >> 7;
	return state ^= state << 17;
}

static void die(const char *what)
{
	printf("cannot: %s\n", what);
	exit(3);
}

/* A mapped area of the device. */
struct area {
	volatile uint32_t *words;
	size_t len;
	uint64_t offset;
};

static int areas(struct area *all, int max)
{
	char line[512], rights[8];
	unsigned long from, to, offset;
	FILE *f = fopen("/proc/self/maps", "r");
	int n = 0;

	while (f && n < max && fgets(line, sizeof(line), f)) {
		if (!strstr(line, "/dev/infiniband/uverbs") || sscanf(line, "%lx-%lx %7s %lx", &from, &to, rights, &offset) != 4 || rights[1] != 'w')
			continue;
		all[n++] = (struct area){ (void *)from, to - from, offset };
	}
	if (f)
		fclose(f);
	return n;
}

struct device {
	struct ibv_context *ctx;
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	struct ibv_srq *srq;
	struct ibv_mr *mr;
	struct ibv_qp *rc[2], *ud;
	struct ibv_ah *ah;
	union ibv_gid gid;
	uint8_t *data;
	struct area bell;
};

#define DATA (16 * PAGE)

static struct ibv_qp *new_qp(struct device *d, enum ibv_qp_type type, struct ibv_srq *srq)
{
	struct ibv_qp_init_attr init = {
		.send_cq = d->cq, .recv_cq = d->cq, .srq = srq, .qp_type = type,
		.cap = { .max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 2, .max_recv_sge = 2 },
	};
	struct ibv_qp *qp = ibv_create_qp(d->pd, &init);

	if (!qp)
		die("ibv_create_qp");
	return qp;
}

static void to_rts(struct device *d, struct ibv_qp *qp, uint32_t peer)
{
	int rc = qp->qp_type == IBV_QPT_RC;
	struct ibv_qp_attr a = {
		.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = 15, .qkey = 0x11111111, .path_mtu = IBV_MTU_1024,
		.dest_qp_num = peer, .max_rd_atomic = 1, .max_dest_rd_atomic = 1, .min_rnr_timer = 1, .timeout = 8, .retry_cnt = 1, .rnr_retry = 1,
		.ah_attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = d->gid, .sgid_index = gid_index, .hop_limit = 1 } },
	};

	if (ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | (rc ? IBV_QP_ACCESS_FLAGS : IBV_QP_QKEY)))
		die("INIT");
	a.qp_state = IBV_QPS_RTR;
	if (ibv_modify_qp(qp, &a, IBV_QP_STATE | (rc ? IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
						 IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER : 0)))
		die("RTR");
	a.qp_state = IBV_QPS_RTS;
	if (ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_SQ_PSN | (rc ? IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
							 IBV_QP_MAX_QP_RD_ATOMIC : 0)))
		die("RTS");
}

static void make(struct device *d)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_srq_init_attr srq = { .attr = { .max_wr = 16, .max_sge = 1 } };
	struct ibv_ah_attr ah = { .is_global = 1, .port_num = 1 };

	d->ctx = list && list[0] ? ibv_open_device(list[0]) : NULL;
	if (!d->ctx || ibv_query_gid(d->ctx, 1, gid_index, &d->gid))
		die("the device");
	/* The doorbell page is mapped with the context. */
	if (areas(&d->bell, 1) != 1)
		die("a doorbell page");
	d->pd = ibv_alloc_pd(d->ctx);
	d->cq = ibv_create_cq(d->ctx, 64, NULL, NULL, 0);
	d->data = aligned_alloc(PAGE, DATA);
	memset(d->data, 0xa5, DATA);
	d->mr = ibv_reg_mr(d->pd, d->data, DATA, 7);
	d->srq = ibv_create_srq(d->pd, &srq);
	if (!d->pd || !d->cq || !d->mr || !d->srq)
		die("objects");
	d->rc[0] = new_qp(d, IBV_QPT_RC, NULL);
	d->rc[1] = new_qp(d, IBV_QPT_RC, d->srq);
	d->ud = new_qp(d, IBV_QPT_UD, NULL);
	to_rts(d, d->rc[0], d->rc[1]->qp_num);
	to_rts(d, d->rc[1], d->rc[0]->qp_num);
	to_rts(d, d->ud, 0);
	ah.grh.dgid = d->gid;
	ah.grh.sgid_index = gid_index;
	d->ah = ibv_create_ah(d->pd, &ah);
	if (!d->ah)
		die("ibv_create_ah");
}

/* Rings all doorbells of this process. A command makes the device look at them. */
static void ring(struct device *d)
{
	int i;

	for (i = 0; i < 64; i++)
		((volatile uint64_t *)d->bell.words)[16 + i] = ~0ull;
	((volatile uint64_t *)d->bell.words)[8] = ~0ull;
	ibv_req_notify_cq(d->cq, 0);
}

static int write_to(struct device *d, struct ibv_qp *qp, uint64_t addr, uint32_t rkey, uint64_t id)
{
	struct ibv_sge sge = { (uintptr_t)d->data, 64, d->mr->lkey };
	struct ibv_send_wr *bad, wr = {
		.wr_id = id, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED,
		.wr.rdma = { addr, rkey },
	};

	return ibv_post_send(qp, &wr, &bad);
}

/* Status of the next completion; -1 if none arrives. */
static int status(struct device *d)
{
	struct ibv_wc wc;
	time_t end = time(NULL) + 10;

	while (time(NULL) <= end)
		if (ibv_poll_cq(d->cq, 1, &wc) > 0)
			return wc.status;
	return -1;
}

/* Address of the WQE with this number. */
static volatile uint32_t *find(struct area *all, int n, uint64_t id, struct area *in)
{
	size_t i, k;

	for (i = 0; i < (size_t)n; i++)
		for (k = 32; k + 2 < all[i].len / 4; k += 2)
			if (*(volatile uint64_t *)(all[i].words + k) == id) {
				*in = all[i];
				return all[i].words + k;
			}
	return NULL;
}

/* A WQE that names memory of the machine by its bus address. */
static void by_bus_address(struct device *d)
{
	struct area all[64], in;
	int n = areas(all, 64), got;
	volatile uint32_t *first, *second, *third;
	size_t i, stride;

	if (write_to(d, d->rc[0], (uintptr_t)d->data + PAGE, d->mr->rkey, SLOT_ID) || status(d) ||
	    write_to(d, d->rc[0], (uintptr_t)d->data + PAGE, d->mr->rkey, SLOT_ID + 1) || status(d))
		die("WRITEs of its own");
	first = find(all, n, SLOT_ID, &in);
	second = find(all, n, SLOT_ID + 1, &in);
	if (!first || !second || second <= first)
		die("a ring of its own");
	stride = second - first;
	third = second + stride;
	for (i = 0; i < stride; i++)
		third[i] = second[i];
	memset(d->data + PAGE, 0x5a, 64);
	third[3] |= STAGED;			/* send_flags */
	third[16] = 16 << 20;			/* the kernel's text */
	third[17] = third[19] = 0;
	__atomic_store_n(in.words, 3, __ATOMIC_RELEASE);
	ring(d);
	got = status(d);
	for (i = 0; i < 64 && d->data[PAGE + i] == 0x5a; i++)
		;
	if (got == IBV_WC_SUCCESS || i < 64)
		printf("broken: it reads memory by bus address\n");
	else if (got != IBV_WC_LOC_QP_OP_ERR)
		printf("broken: a WQE with a bus address has status %d\n", got);
}

/* Uses another process's key, and its QPN. */
static void as_another(struct device *d)
{
	struct ibv_sge sge = { (uintptr_t)d->data, 64, d->mr->lkey };
	struct ibv_send_wr *bad, wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED };
	struct ibv_qp *qp = new_qp(d, IBV_QPT_RC, NULL);

	if (write_to(d, d->rc[1], victim_addr, victim_rkey, 1) || status(d) != IBV_WC_REM_ACCESS_ERR)
		printf("broken: a key of another process is taken\n");
	to_rts(d, qp, victim_qpn);
	if (write_to(d, qp, victim_addr, victim_rkey, 2) || status(d) != IBV_WC_RETRY_EXC_ERR)
		printf("broken: a QP of another process answers\n");
	wr.wr.ud.ah = d->ah;
	wr.wr.ud.remote_qpn = victim_qpn;
	wr.wr.ud.remote_qkey = 0x11111111;
	if (ibv_post_send(d->ud, &wr, &bad) || status(d) < 0)
		printf("broken: a datagram does not leave\n");
}

/* Tries to map other processes' rings and pages by offset, through all files that it has of the device. */
static void map_others(struct device *d)
{
	struct area all[64];
	int fds[2] = { d->ctx->cmd_fd, open("/dev/infiniband/uverbs0", O_RDWR) }, n = areas(all, 64), f, i, own;
	uint64_t page;
	size_t pages;

	for (f = 0; f < 2; f++)
		for (page = 0; page < 20000; page++) {
			uint64_t at = page < 4096 ? page * PAGE : rnd() % (1ull << (12 + page % 40)) * PAGE;
			void *p;

			pages = 1 + rnd() % 8;
			p = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fds[f], at);
			if (p == MAP_FAILED)
				continue;
			for (i = own = 0; i < n; i++)
				own |= f == 0 && at == all[i].offset;
			if (!own)
				printf("broken: offset %llx can be mapped\n", (unsigned long long)at);
			munmap(p, pages * PAGE);
		}
	close(fds[1]);
}

static uint32_t word(void)
{
	switch (rnd() % 8) {
	case 0: return 0;
	case 1: return ~0u;
	case 2: return rnd() % 64;
	case 3: return victim_rkey;
	case 4: return victim_qpn;
	case 5: return 1u << rnd() % 32;
	default: return rnd();
	}
}

/* Writes something like a WQE at a random place where the device may read one. */
static void wqe(struct area *a)
{
	volatile uint32_t *w = a->words + (128 + rnd() % (a->len - 256)) / 64 * 16;

	if (w + 24 > a->words + a->len / 4)
		return;
	w[2] = rnd() % 16 | (1 + rnd() % 2) << 8 | (uint32_t)(rnd() % 128) << 16;
	w[3] = word() & (STAGED | ADDRESS | 15);
	w[5] = rnd() % 2 ? victim_rkey : word();
	*(volatile uint64_t *)(w + 6) = rnd() % 2 ? victim_addr : rnd();
	w[12] = rnd() % 32;
	w[13] = rnd() % 2 ? victim_qpn : word();
	w[14] = 0x11111111;
	*(volatile uint64_t *)(w + 16) = rnd() % 2 ? victim_addr : rnd() % (1ull << 30);
	w[18] = rnd() % 5000;
	w[19] = rnd() % 2 ? victim_rkey : word();
}

/* Writes junk to all mapped areas, and makes the device read it. */
static void junk(struct device *d)
{
	struct area all[64];
	int n = areas(all, 64), i;
	time_t end = time(NULL) + 1 + rnd() % 2;
	struct ibv_wc wc[8];

	while (time(NULL) < end) {
		for (i = 0; i < 500; i++) {
			struct area *a = &all[rnd() % n];

			if (a->len > PAGE / 2 && rnd() % 2)
				wqe(a);
			else if (rnd() % 2)
				a->words[rnd() % 32] = word();
			else
				a->words[rnd() % (a->len / 4)] = word();
		}
		ring(d);
		if (rnd() % 16 == 0)
			ibv_poll_cq(d->cq, 8, wc);
		if (rnd() % 8 == 0)
			write_to(d, d->rc[rnd() % 2], victim_addr, victim_rkey, rnd());
		if (rnd() % 64 == 0) {
			struct ibv_qp_attr a = { .qp_state = rnd() % 7 };

			ibv_modify_qp(d->rc[rnd() % 2], &a, IBV_QP_STATE);
		}
	}
}

int main(int argc, char **argv)
{
	time_t end;
	int children = 0, crashed = 0, how;
	uint64_t seed;

	if (argc != 7)
		die("six arguments");
	end = time(NULL) + atoi(argv[1]);
	seed = strtoull(argv[2], NULL, 0);
	victim_rkey = strtoul(argv[3], NULL, 16);
	victim_addr = strtoull(argv[4], NULL, 16);
	victim_qpn = strtoul(argv[5], NULL, 16);
	gid_index = atoi(argv[6]);
	/* A process that writes junk to its own rings may hang or crash. */
	do {
		pid_t child = fork();

		if (child == 0) {
			struct device d = { 0 };

			alarm(20);
			setvbuf(stdout, NULL, _IONBF, 0);
			state = seed + 1 + children;
			for (how = 0; how < 8; how++)
				rnd();
			make(&d);
			if (children == 0) {
				by_bus_address(&d);
				_exit(0);
			}
			if (children == 1) {
				as_another(&d);
				map_others(&d);
				_exit(0);
			}
			junk(&d);
			if (children % 2)
				_exit(0);
			/* Destroys its broken objects in order. */
			for (how = 0; how < 2; how++)
				ibv_destroy_qp(d.rc[how]);
			ibv_destroy_qp(d.ud);
			ibv_destroy_srq(d.srq);
			ibv_destroy_cq(d.cq);
			_exit(0);
		}
		if (child < 0 || waitpid(child, &how, 0) != child)
			die("a child");
		if (WIFEXITED(how) && WEXITSTATUS(how) == 3)
			return 3;
		crashed += WIFSIGNALED(how) != 0;
		children++;
	} while (time(NULL) < end || children < 3);
	printf("%d hostile processes, %d of them crashed by what they wrote\n", children, crashed);
	return 0;
}
