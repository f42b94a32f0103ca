/* SPDX-License-Identifier: Apache-2.0 OR MIT
 *
 * The time, and a comparison of times.
 */
#include <time.h>

static inline double seconds(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec * 1e-9;
}

/* For qsort(3). */
static inline int ascending(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}
