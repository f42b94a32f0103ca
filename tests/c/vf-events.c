/* SPDX-License-Identifier: Apache-2.0 OR MIT
 *
 * A program on a VF whose device is taken away while it has traffic. It has a context for each way to wait for
 * asynchronous events: in ibv_get_async_event, by poll, by epoll with edges, and by select. It prints each event, and
 * ends when all contexts have got IBV_EVENT_DEVICE_FATAL once, a second one has not come, and they are closed.
 *
 *   vf-events          as above
 *   vf-events keep     keep everything open after the fatal event, until it is killed
 *   vf-events port     end when a port has failed and become active again
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <unistd.h>

#include "check.h"

enum { BLOCKS, POLLS, EPOLLS, SELECTS, WAYS };
enum { PAGE = 4096, PERIOD_MS = 20, QUIET_MS = 1000 };
enum { ACCESS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE };

static const char *const names[WAYS] = { "blocks", "polls", "epolls", "selects" };

struct user {
	int way;
	struct ibv_context *ctx;
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	struct ibv_mr *mr;
	struct ibv_qp *qp;
	char memory[PAGE];
	pthread_t thread;
	volatile int done;
};

static struct user users[WAYS];
static enum ibv_event_type last_event = IBV_EVENT_DEVICE_FATAL;

/* A QP that is connected to itself. */
static void make(struct user *u, struct ibv_device *device)
{
	struct ibv_qp_init_attr of = { .cap = { 16, 16, 1, 1, 0 }, .qp_type = IBV_QPT_RC, .sq_sig_all = 1 };
	struct ibv_qp_attr init = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = ACCESS };
	struct ibv_qp_attr rtr = { .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .max_dest_rd_atomic = 1,
				   .min_rnr_timer = 12,
				   .ah_attr = { .is_global = 1, .port_num = 1, .grh.hop_limit = 4 } };
	struct ibv_qp_attr rts = { .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7,
				   .max_rd_atomic = 1 };

	CHECK(u->ctx = ibv_open_device(device));
	CHECK(u->pd = ibv_alloc_pd(u->ctx));
	CHECK(u->cq = ibv_create_cq(u->ctx, 64, NULL, NULL, 0));
	CHECK(u->mr = ibv_reg_mr(u->pd, u->memory, PAGE, ACCESS));
	of.send_cq = of.recv_cq = u->cq;
	CHECK(u->qp = ibv_create_qp(u->pd, &of));
	rtr.dest_qp_num = u->qp->qp_num;
	CHECK(!ibv_query_gid(u->ctx, 1, 0, &rtr.ah_attr.grh.dgid));
	CHECK(!ibv_modify_qp(u->qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	CHECK(!ibv_modify_qp(u->qp, &rtr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
						  IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
	CHECK(!ibv_modify_qp(u->qp, &rts, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
						  IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC));
}

/* Sends, whether that works or not. Returns the number of requests that were done. */
static int send_some(struct user *u)
{
	struct ibv_sge from = { .addr = (uintptr_t)u->memory, .length = 8, .lkey = u->mr->lkey };
	struct ibv_send_wr *bad, wr = { .sg_list = &from, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
					.wr.rdma = { (uintptr_t)u->memory + 64, u->mr->rkey } };
	struct ibv_wc wc;
	int done = 0;

	ibv_post_send(u->qp, &wr, &bad);
	while (ibv_poll_cq(u->cq, 1, &wc) > 0)
		done += wc.status == IBV_WC_SUCCESS;
	return done;
}

static void set_nonblocking(struct user *u)
{
	int flags = fcntl(u->ctx->async_fd, F_GETFL);

	CHECK(flags >= 0 && !fcntl(u->ctx->async_fd, F_SETFL, flags | O_NONBLOCK));
}

/* Waits until the descriptor is readable. `set` is an epoll set that has it. */
static void wait_readable(struct user *u, int set)
{
	struct pollfd one = { .fd = u->ctx->async_fd, .events = POLLIN };
	struct epoll_event event;
	fd_set read_set;
	int n;

	FD_ZERO(&read_set);
	FD_SET(u->ctx->async_fd, &read_set);
	if (u->way == POLLS)
		n = poll(&one, 1, -1);
	else if (u->way == EPOLLS)
		n = epoll_wait(set, &event, 1, -1);
	else
		n = select(u->ctx->async_fd + 1, &read_set, NULL, NULL, NULL);
	CHECK(n == 1);
}

static void *wait_for_events(void *argument)
{
	struct user *u = argument;
	struct epoll_event edge = { .events = EPOLLIN | EPOLLET };
	struct ibv_async_event event;
	int set = epoll_create1(EPOLL_CLOEXEC), count = 0;

	CHECK(set >= 0 && !epoll_ctl(set, EPOLL_CTL_ADD, u->ctx->async_fd, &edge));
	if (u->way != BLOCKS)
		set_nonblocking(u);
	do {
		if (u->way != BLOCKS)
			wait_readable(u, set);
		for (;;) {
			if (ibv_get_async_event(u->ctx, &event)) {
				CHECK(u->way != BLOCKS && errno == EAGAIN);
				break;
			}
			printf("%s: %s\n", names[u->way], ibv_event_type_str(event.event_type));
			ibv_ack_async_event(&event);
			count += event.event_type == last_event;
			if (count && u->way == BLOCKS)
				break;
		}
	} while (!count);
	u->done = 1;
	if (last_event != IBV_EVENT_DEVICE_FATAL)
		return NULL;
	/* The fatal event comes once, and is not announced again. */
	set_nonblocking(u);
	usleep(QUIET_MS * 1000);
	while (!ibv_get_async_event(u->ctx, &event)) {
		ibv_ack_async_event(&event);
		count += event.event_type == IBV_EVENT_DEVICE_FATAL;
	}
	CHECK(errno == EAGAIN || errno == EIO);
	printf("%s: %d fatal\n", names[u->way], count);
	return NULL;
}

static void interrupt(int signal)
{
	(void)signal;
}

int main(int argc, char **argv)
{
	const char *mode = argc > 1 ? argv[1] : "";
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct sigaction restarts = { .sa_handler = interrupt, .sa_flags = SA_RESTART };
	int left = WAYS;

	setvbuf(stdout, NULL, _IOLBF, 0);
	if (!strcmp(mode, "port"))
		last_event = IBV_EVENT_PORT_ACTIVE;
	CHECK(list && *list && !sigaction(SIGUSR1, &restarts, NULL));
	for (int way = 0; way < WAYS; way++) {
		users[way].way = way;
		make(&users[way], *list);
	}
	for (int way = 0; way < WAYS; way++)
		while (!send_some(&users[way]))
			;
	for (int way = 0; way < WAYS; way++)
		CHECK(!pthread_create(&users[way].thread, NULL, wait_for_events, &users[way]));
	printf("has traffic\n");
	while (left) {
		left = WAYS;
		for (int way = 0; way < WAYS; way++) {
			send_some(&users[way]);
			left -= users[way].done;
		}
		/* A call that waits goes on after a signal. */
		if (!users[BLOCKS].done)
			pthread_kill(users[BLOCKS].thread, SIGUSR1);
		usleep(PERIOD_MS * 1000);
	}
	printf("all were told\n");
	for (int way = 0; way < WAYS; way++)
		CHECK(!pthread_join(users[way].thread, NULL));
	while (!strcmp(mode, "keep"))
		pause();
	for (int way = 0; way < WAYS; way++) {
		struct user *u = &users[way];

		/* The kernel may have taken the objects away already. */
		ibv_destroy_qp(u->qp);
		ibv_dereg_mr(u->mr);
		ibv_destroy_cq(u->cq);
		ibv_dealloc_pd(u->pd);
		CHECK(!ibv_close_device(u->ctx));
	}
	ibv_free_device_list(list);
	printf("closed\n");
	return 0;
}
