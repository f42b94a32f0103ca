/* SPDX-License-Identifier: Apache-2.0 OR MIT
 *
 * A library to preload. It adds IDLE_THREADS threads to the program before the program opens a device. Each
 * does a little work every millisecond, like threads of runtimes and communication libraries.
 */
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

static void *idle(void *arg)
{
	volatile long *count = calloc(1, sizeof *count);

	(void)arg;
	while (count) {
		++*count;
		usleep(1000);
	}
	return NULL;
}

__attribute__((constructor)) static void start(void)
{
	const char *n = getenv("IDLE_THREADS");
	pthread_t t;

	for (int i = n ? atoi(n) : 0; i > 0; i--)
		if (pthread_create(&t, NULL, idle, NULL))
			abort();
}
