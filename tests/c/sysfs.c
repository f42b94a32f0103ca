/* SPDX-License-Identifier: Apache-2.0 OR MIT
 *
 * Files of the RDMA device in /sys.
 * sysfs table: compares the GID table with its files. sysfs wait COUNT: the same once the table has COUNT entries.
 * sysfs hostile: tries to write, and opens and keeps more files than are served at a time. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#define DEVICE "/sys/class/infiniband/unirdma0"
#define STATE DEVICE "/ports/1/state"

/* Reads a file into `text`, without the end of the line. Returns 0 or an errno. */
static int contents(const char *path, char *text, size_t size)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return errno;
	ssize_t n = read(fd, text, size - 1);
	int e = n < 0 ? errno : 0;
	close(fd);
	text[n < 0 ? 0 : n] = 0;
	text[strcspn(text, "\n")] = 0;
	return e;
}

static int of_gid(const char *directory, int index, char *text, size_t size)
{
	char path[200];
	snprintf(path, sizeof path, DEVICE "/ports/1/%s/%d", directory, index);
	return contents(path, text, size);
}

static int wrong(const char *what, int index, const char *text)
{
	printf("GID %d: %s: %s\n", index, what, text);
	return 1;
}

static int compare(struct ibv_context *c, int entries)
{
	struct ibv_gid_entry table[256];
	struct ibv_port_attr port;
	int n = 0, bad = 0;
	for (int tries = 0; tries < 300 && (n = ibv_query_gid_table(c, table, 256, 0)) < entries; tries++)
		usleep(50000);
	if (n < entries || ibv_query_port(c, 1, &port))
		return wrong("the table is short", n, "");
	/* The files may be a little older than the table. */
	usleep(300000);
	for (int i = 0; i < port.gid_tbl_len; i++) {
		char gid[100] = "", type[100] = "", net[100] = "";
		struct in6_addr address;
		struct ibv_gid_entry *entry = NULL;
		for (int k = 0; k < n; k++)
			if ((int)table[k].gid_index == i)
				entry = &table[k];
		if (of_gid("gids", i, gid, sizeof gid) || inet_pton(AF_INET6, gid, &address) != 1)
			bad |= wrong("no address", i, gid);
		int no_type = of_gid("gid_attrs/types", i, type, sizeof type);
		int no_net = of_gid("gid_attrs/ndevs", i, net, sizeof net);
		if (!entry && (no_type != EINVAL || no_net != EINVAL || strcmp(gid, "0000:0000:0000:0000:0000:0000:0000:0000")))
			bad |= wrong("it is empty, but has attributes", i, type);
		if (entry && memcmp(&address, entry->gid.raw, 16))
			bad |= wrong("another address", i, gid);
		if (entry && (strcmp(type, "RoCE v2") || strcmp(net, "eth0")))
			bad |= wrong("wrong attributes", i, type);
	}
	return bad;
}

static int hostile(void)
{
	char text[100];
	int bad = 0, opened = 0, refused = 0;
	bad |= open(STATE, O_WRONLY) >= 0 || open(STATE, O_RDWR) >= 0 || truncate(STATE, 0) == 0;
	bad |= open(DEVICE "/new", O_CREAT | O_WRONLY, 0600) >= 0 || mkdir(DEVICE "/new", 0700) == 0;
	bad |= unlink(STATE) == 0 || rename(STATE, DEVICE "/new") == 0 || symlink("/", DEVICE "/new") == 0;
	bad |= chmod(STATE, 0777) == 0 || setxattr(STATE, "user.x", "", 0, 0) == 0;
	if (bad)
		puts("a file could be changed");
	struct rlimit most;
	getrlimit(RLIMIT_NOFILE, &most);
	most.rlim_cur = most.rlim_max;
	setrlimit(RLIMIT_NOFILE, &most);
	for (int i = 0; i < 5000; i++) {
		int fd = open(STATE, O_RDONLY);
		refused += fd < 0 && errno == ENFILE;
		opened += fd >= 0;
	}
	printf("%s opened\n", opened <= 4096 && opened + refused == 5000 ? "4096 at most are" : "too many are");
	/* What was opened before can still be read. */
	if (read(10, text, sizeof text) <= 0)
		puts("an open file cannot be read");
	return bad;
}

int main(int argc, char **argv)
{
	if (argc > 1 && !strcmp(argv[1], "hostile"))
		return hostile();
	struct ibv_device **all = ibv_get_device_list(NULL);
	struct ibv_context *c = all && all[0] ? ibv_open_device(all[0]) : NULL;
	if (!c)
		return wrong("no device", 0, "");
	if (argc > 2)
		puts("begun");
	fflush(stdout);
	int bad = compare(c, argc > 2 ? atoi(argv[2]) : 1);
	puts(bad ? "different" : "same");
	return bad;
}
