/* SPDX-License-Identifier: Apache-2.0 OR MIT
 *
 * A small RDMA program with threads and a child, for AddressSanitizer, ThreadSanitizer and valgrind. It has no
 * error that they could find.
 */
#include "memory.h"

enum { SIZE = 100000 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static long registered;

static void *work(void *arg)
{
	for (long i = 0; i < 20; i++) {
		/* An odd address and length: adjacent bytes must not be touched. */
		char *p = malloc(SIZE + i * 1000 + (long)arg);
		struct ibv_mr *mr;

		CHECK(p);
		memset(p, 1, SIZE);
		mr = reg(p + 1, SIZE - 1);
		memset(p, 2, SIZE);
		dereg(mr);
		CHECK(p[0] == 2 && p[SIZE - 1] == 2);
		p = realloc(p, 3 * SIZE);
		CHECK(p && p[SIZE - 1] == 2);
		free(p);
		pthread_mutex_lock(&lock);
		registered++;
		pthread_mutex_unlock(&lock);
	}
	return NULL;
}

static void small(void)
{
	char *from = calloc(1, SIZE), *to = calloc(1, SIZE);
	struct ibv_mr *from_mr, *to_mr;
	pthread_t t[3];
	pid_t pid;

	connect_to_self();
	from_mr = reg(from, SIZE);
	to_mr = reg(to, SIZE);
	memset(from, 'x', SIZE);
	say("WRITE: %d", rdma_write(to, to_mr, from, from_mr, SIZE));
	say(" '%c'\n", to[SIZE - 1]);
	memset(from, 'y', SIZE);
	say("SEND: %d", rdma_send(to, to_mr, from, from_mr, SIZE));
	say(" '%c'\n", to[SIZE - 1]);
	for (long i = 0; i < 3; i++)
		CHECK(!pthread_create(&t[i], NULL, work, (void *)i));
	for (int i = 0; i < 3; i++)
		pthread_join(t[i], NULL);
	say("registered by threads: %ld\n", registered);
	pid = fork();
	if (!pid) {
		memset(to, 'c', SIZE);
		_exit(from[5] == 'y' ? 3 : 4);
	}
	say("child: %d", ended(pid));
	say(", its parent has '%c'\n", to[0]);
	dereg(from_mr);
	dereg(to_mr);
	if (!alone)
		CHECK(!ibv_destroy_qp(qp) && !ibv_destroy_cq(cq) && !ibv_dealloc_pd(pd) && !ibv_close_device(ctx));
	free(from);
	free(to);
}

static const struct a_case cases[] = { { "small", small }, { NULL, NULL } };

int main(int argc, char **argv)
{
	return run_case(argc, argv, cases);
}
