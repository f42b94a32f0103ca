/* SPDX-License-Identifier: Apache-2.0 OR MIT
 *
 * Ends a test program that finds an error, and prints the place.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#define CHECK(x)                                                                        \
	do {                                                                            \
		if (!(x)) {                                                             \
			printf("line %d: %s (errno %d)\n", __LINE__, #x, errno);        \
			exit(1);                                                        \
		}                                                                       \
	} while (0)
