/* SPDX-License-Identifier: Apache-2.0 OR MIT
 *
 * A program of a vRNIC that asks for a VF: prints what it is told at the lease socket, a line each, and whether a
 * context can be made by the descriptor that it gets. Then it waits, also after the end of the connection.
 *
 *   lease SOCKET           ask, as another user
 *   lease SOCKET BYTES     send so many bytes instead of a request
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <grp.h>
#include <rdma/ib_user_ioctl_cmds.h>
#include <rdma/ib_user_ioctl_verbs.h>
#include <rdma/rdma_user_ioctl.h>
#include <rdma/rdma_user_ioctl_cmds.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "check.h"

enum { NOBODY = 65534, VERSION = 1, MOST_BYTES = 4096 };
enum { WAITS = 1, SOFT, REFUSED, HAS, EVICTED };

struct ask {
	uint32_t version, reserved[3];
};

struct told {
	uint32_t kind, place;
	uint8_t gid[16];
	uint64_t rdev;
	char node[32], device[64], text[128];
};

_Static_assert(sizeof(struct told) == 256, "as in the specification");

/* Receives a message, and the descriptor that comes with it. False at the end of the connection. */
static int receive(int s, struct told *told, int *fd)
{
	char control[CMSG_SPACE(sizeof(int))];
	struct iovec to = { told, sizeof(*told) };
	struct msghdr m = { .msg_iov = &to, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control) };
	ssize_t n = recvmsg(s, &m, MSG_CMSG_CLOEXEC);
	struct cmsghdr *c = CMSG_FIRSTHDR(&m);

	*fd = -1;
	if (n <= 0)
		return 0;
	CHECK(n == sizeof(*told));
	if (c && c->cmsg_type == SCM_RIGHTS)
		memcpy(fd, CMSG_DATA(c), sizeof(int));
	return 1;
}

static void use(int fd, const struct told *told)
{
	struct ib_uverbs_ioctl_hdr context = { .length = sizeof(context), .object_id = UVERBS_OBJECT_DEVICE,
					       .method_id = UVERBS_METHOD_GET_CONTEXT, .driver_id = RDMA_DRIVER_RXE };
	char gid[INET6_ADDRSTRLEN];
	struct stat st;

	CHECK(inet_ntop(AF_INET6, told->gid, gid, sizeof(gid)) && !fstat(fd, &st));
	printf("has %s of %s, GID %s\n", told->node, told->device, gid);
	printf("number: %s\n", st.st_rdev == told->rdev ? "right" : "wrong");
	printf("context: %s\n", ioctl(fd, RDMA_VERBS_IOCTL, &context) ? strerror(errno) : "works");
}

int main(int argc, char **argv)
{
	struct sockaddr_un to = { .sun_family = AF_UNIX };
	static char bytes[MOST_BYTES];
	size_t length = argc > 2 ? strtoul(argv[2], NULL, 10) : sizeof(struct ask);
	int s = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0), fd;
	struct ask ask = { .version = VERSION };
	struct told told;

	if (argc < 2 || length > sizeof(bytes))
		return 2;
	setvbuf(stdout, NULL, _IOLBF, 0);
	memcpy(bytes, &ask, sizeof(ask));
	strncpy(to.sun_path, argv[1], sizeof(to.sun_path) - 1);
	CHECK(s >= 0 && !connect(s, (struct sockaddr *)&to, sizeof(to)));
	/* The directory above the vRNIC's is closed to others; a container sees the vRNIC's only. */
	CHECK(!setgroups(0, NULL) && !setresgid(NOBODY, NOBODY, NOBODY) && !setresuid(NOBODY, NOBODY, NOBODY));
	CHECK(!length || send(s, bytes, length, 0) == (ssize_t)length);
	while (receive(s, &told, &fd))
		switch (told.kind) {
		case WAITS:
			printf("waits at %u\n", told.place);
			break;
		case SOFT:
			printf("soft: %s\n", told.text);
			break;
		case REFUSED:
			printf("refused: %s\n", told.text);
			break;
		case HAS:
			use(fd, &told);
			break;
		case EVICTED:
			printf("evicted: %s\n", told.text);
			break;
		default:
			printf("kind %u\n", told.kind);
		}
	printf("end\n");
	/* The descriptor stays open. */
	for (;;)
		pause();
}
