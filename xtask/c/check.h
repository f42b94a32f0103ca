/* SPDX-License-Identifier: Apache-2.0 OR MIT
 *
 * Ends a test program that finds something wrong, and says where.
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
