/* SPDX-License-Identifier: Apache-2.0 OR MIT
 *
 * Tries to get out of a container: escape HOST_PID HOST_DIR HOME. HOST_PID is the virtual layer's process,
 * HOST_DIR its directory, HOME the home directory of the user that started the container, with files to steal.
 * The working directory is protected. Prints every attack that succeeds, and at the end the number of attempts.
 * Everything is tried twice, the second time as root of a nested user namespace.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/swap.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static int tried;

/* `done`: the attack has succeeded. */
static void attack(int done, const char *what, const char *on)
{
	tried++;
	if (done)
		printf("POSSIBLE: %s %s\n", what, on);
}

static int opens(const char *path, int flags)
{
	int fd = open(path, flags | O_CLOEXEC | O_NONBLOCK, 0600);
	if (fd >= 0)
		close(fd);
	return fd >= 0;
}

static int connects(const char *path)
{
	struct sockaddr_un a = { .sun_family = AF_UNIX };
	int s = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	strncpy(a.sun_path, path, sizeof a.sun_path - 1);
	int done = connect(s, (struct sockaddr *)&a, sizeof a) == 0;
	close(s);
	return done;
}

/* The mounts of a new container: none can be removed or made writable. */
static void mounts(void)
{
	char line[4096], at[1024];
	FILE *f = fopen("/proc/self/mountinfo", "r");
	char *all[256];
	int n = 0;
	while (n < 256 && fgets(line, sizeof line, f))
		if (sscanf(line, "%*s %*s %*s %*s %1023s", at) == 1 && strcmp(at, "/"))
			all[n++] = strdup(at);
	fclose(f);
	attack(n < 10, "nothing is mounted", "");
	while (n--) {
		struct statvfs s;
		int read_only = statvfs(all[n], &s) == 0 && s.f_flag & ST_RDONLY;
		int nosuid = s.f_flag & ST_NOSUID;
		if (read_only)
			attack(!mount(NULL, all[n], NULL, MS_REMOUNT | MS_BIND, NULL), "remount for writing of", all[n]);
		if (nosuid)
			attack(!mount(NULL, all[n], NULL, MS_REMOUNT | MS_BIND | (read_only ? MS_RDONLY : 0), NULL), "setuid on", all[n]);
		attack(!umount2(all[n], 0), "umount of", all[n]);
		attack(!umount2(all[n], MNT_DETACH), "lazy umount of", all[n]);
		free(all[n]);
	}
	mkdir("/tmp/m", 0700);
	attack(!mount("none", "/tmp/m", "proc", 0, NULL), "mount of", "proc");
	attack(!mount("none", "/tmp/m", "sysfs", 0, NULL), "mount of", "sysfs");
	attack(!mount("none", "/tmp/m", "devtmpfs", 0, NULL), "mount of", "devtmpfs");
	attack(!mount("none", "/tmp/m", "debugfs", 0, NULL), "mount of", "debugfs");
	attack(!mount("/dev/vda", "/tmp/m", "ext4", 0, NULL), "mount of", "a disk");
}

static void files(void)
{
	const char *unreadable[] = { "/etc/shadow", "/etc/gshadow", "/etc/sudoers", "/proc/kcore", "/dev/mem", "/dev/kmsg", "/dev/vda" };
	const char *fixed[] = { "/etc/passwd", "/etc/hosts", "/usr/bin/env", "/etc/ld.so.cache", "/proc/sys/kernel/core_pattern",
		"/proc/sys/vm/overcommit_memory", "/proc/sys/kernel/modprobe", "/proc/sysrq-trigger",
		"/proc/sys/fs/file-max", "/proc/sys/kernel/pid_max", "/sys/kernel/mm/transparent_hugepage/enabled", "/sys/power/state",
		"/sys/kernel/uevent_helper", "/sys/fs/cgroup/cgroup.procs", "/sys/fs/cgroup/memory/cgroup.procs",
		"/sys/fs/cgroup/unified/cgroup.procs", "/sys/fs/cgroup/memory/release_agent", "/run/unirdma-lib/libibverbs.so.1",
		"/run/unirdma-lib/librdmacm.so.1", "/proc/1/exe" };
	const char *made[] = { "/x", "/etc/x", "/usr/x", "/var/x", "/var/lib/x", "/dev/x", "/sys/x", "/run/unirdma/x",
		"/run/unirdma-lib/../../etc/x" };
	for (unsigned i = 0; i < sizeof unreadable / sizeof *unreadable; i++)
		attack(opens(unreadable[i], O_RDONLY), "reading", unreadable[i]);
	for (unsigned i = 0; i < sizeof fixed / sizeof *fixed; i++)
		attack(opens(fixed[i], O_WRONLY), "writing", fixed[i]);
	for (unsigned i = 0; i < sizeof made / sizeof *made; i++)
		attack(opens(made[i], O_WRONLY | O_CREAT), "making", made[i]);
	/* Device files would reach the host's devices. */
	struct stat s;
	stat("/etc", &s);
	attack(!mknod("/tmp/disk", S_IFBLK | 0600, s.st_dev) && opens("/tmp/disk", O_RDONLY), "opening", "the disk by its numbers");
	attack(!mknod("/tmp/mem", S_IFCHR | 0600, makedev(1, 1)) && opens("/tmp/mem", O_RDONLY), "opening", "memory by its numbers");
	/* A handle of the root directory of a file system of which the container sees only a part. */
	struct { struct file_handle h; unsigned char bytes[MAX_HANDLE_SZ]; } handle = { .h.handle_bytes = MAX_HANDLE_SZ };
	int id, dir = open(".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (name_to_handle_at(AT_FDCWD, ".", &handle.h, &id, 0) == 0 && handle.h.handle_bytes == 8) {
		memcpy(handle.h.f_handle, (unsigned[]){ 2, 0 }, 8);
		attack(open_by_handle_at(dir, &handle.h, O_RDONLY | O_CLOEXEC) >= 0, "opening", "the host's root directory by its handle");
	}
	close(dir);
	/* Only the descriptors that the program was started with may be open. */
	DIR *d = opendir("/proc/self/fd");
	for (struct dirent *e; (e = readdir(d));)
		if (e->d_name[0] != '.' && atoi(e->d_name) != dirfd(d))
			attack(atoi(e->d_name) > 2, "an inherited descriptor", e->d_name);
	closedir(d);
	const char *known = " null zero full random urandom tty userfaultfd fuse ptmx console fd stdin stdout stderr . .. ";
	d = opendir("/dev");
	for (struct dirent *e; (e = readdir(d));) {
		char name[300];
		snprintf(name, sizeof name, " %s ", e->d_name);
		struct stat m;
		fstatat(dirfd(d), e->d_name, &m, 0);
		attack(!S_ISDIR(m.st_mode) && !strstr(known, name), "a device", e->d_name);
	}
	closedir(d);
}

/* Files that the user's next shell, ssh, git and our own command line read. */
static void home_directory(const char *home)
{
	char path[512];
	const char *secret[] = { ".ssh/id", ".config/unirdma/centre.toml", ".local/share/keyrings/login.keyring", ".bashrc" };
	const char *run[] = { ".bashrc", ".profile", ".bash_profile", ".zshenv", ".gitconfig", ".ssh/authorized_keys", ".ssh/rc", ".local/bin/ls",
		".cargo/bin/cargo", ".new", "new", "plain" };
	const char *before[] = { "", "/proc/1/root", "/proc/self/cwd/../../../../../.." };
	for (unsigned b = 0; b < sizeof before / sizeof *before; b++) {
		for (unsigned i = 0; i < sizeof secret / sizeof *secret; i++) {
			snprintf(path, sizeof path, "%s%s/%s", before[b], home, secret[i]);
			attack(opens(path, O_RDONLY), "reading", path);
		}
		for (unsigned i = 0; i < sizeof run / sizeof *run; i++) {
			snprintf(path, sizeof path, "%s%s/%s", before[b], home, run[i]);
			attack(opens(path, O_WRONLY | O_CREAT), "writing", path);
			attack(!mkdir(path, 0700), "making the directory", path);
		}
	}
	snprintf(path, sizeof path, "%s/plain", home);
	attack(!opens(path, O_RDONLY), "not reading", path);
	attack(getenv("UNIRDMA_TOKEN") != NULL, "a token in", "the environment");
	char all[65536];
	int fd = open("/proc/1/environ", O_RDONLY | O_CLOEXEC);
	ssize_t n = fd < 0 ? 0 : read(fd, all, sizeof all);
	attack(n > 0 && memmem(all, n, "sesame", 6), "a token in", "/proc/1/environ");
	close(fd);
}

/* Names in the working directory that git and other programs act upon. They may exist or not. */
static void working_directory(void)
{
	const char *guarded[] = { ".git", ".envrc", ".vscode", ".idea", "HEAD" };
	char path[64];
	for (unsigned i = 0; i < sizeof guarded / sizeof *guarded; i++) {
		const char *name = guarded[i];
		attack(!unlink(name) || !rmdir(name), "removing", name);
		attack(!rename(name, "moved"), "moving", name);
		attack(!mkdir(name, 0700), "making the directory", name);
		attack(!symlink("/tmp", name), "making the link", name);
		attack(opens(name, O_WRONLY | O_CREAT), "writing", name);
		attack(!mkdir("there", 0700) && !syscall(SYS_renameat2, AT_FDCWD, "there", AT_FDCWD, name, 2), "exchanging", name);
		rmdir("there");
		snprintf(path, sizeof path, "%s/config", name);
		attack(opens(path, O_WRONLY | O_CREAT), "writing", path);
		attack(!link(path, "linked"), "a second name of", path);
	}
	/* Without the mounts inside it. */
	attack(!mount(".", "/tmp/m", NULL, MS_BIND, NULL), "mount of", "the working directory alone");
	attack(!mount("none", "/tmp/m", "overlay", 0, "lowerdir=."), "an overlay of", "the working directory");
}

static void processes(int host)
{
	char path[64];
	attack(!kill(host, 0), "a signal to", "the virtual layer");
	attack(syscall(SYS_pidfd_open, host, 0) >= 0, "a pidfd of", "the virtual layer");
	attack(!ptrace(PTRACE_SEIZE, host, 0, 0), "ptrace of", "the virtual layer");
	snprintf(path, sizeof path, "/proc/%d", host);
	attack(!access(path, F_OK), "seeing", "the virtual layer");
	/* The parent user namespace, by the PID namespace that belongs to it. */
	int pid = open("/proc/self/ns/pid", O_RDONLY | O_CLOEXEC);
	int owner = ioctl(pid, _IO(0xb7, 1));
	attack(owner >= 0 && !setns(owner, CLONE_NEWUSER), "entering", "the user namespace above");
	int user = open("/proc/self/ns/user", O_RDONLY | O_CLOEXEC);
	int above = ioctl(user, _IO(0xb7, 2));
	attack(above >= 0 && !setns(above, CLONE_NEWUSER), "entering", "the parent of its user namespace");
	close(pid);
	close(user);
	attack(prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) != 1, "new privileges by", "setuid programs");
	char c = '\n';
	attack(ioctl(0, TIOCSTI, &c) == 0 || errno != EPERM, "typing into", "the terminal");
}

static void machine(void)
{
	struct timespec t;
	clock_gettime(CLOCK_REALTIME, &t);
	attack(!clock_settime(CLOCK_REALTIME, &t), "setting", "the clock");
	attack(!syscall(SYS_init_module, "", 0, "") || errno == ENOEXEC, "loading", "a module");
	attack(!syscall(SYS_kexec_load, 0, 0, NULL, 0), "loading", "a kernel");
	attack(!syscall(SYS_acct, "/tmp/acct"), "accounting of", "processes");
	attack(!swapoff("/dev/zram0"), "taking away", "swap");
	attack(!syscall(SYS_quotactl, 0x800002, "/dev/vda", 0, NULL), "quotas of", "the disk");
}

static void directories(const char *host)
{
	char path[sizeof((struct sockaddr_un *)0)->sun_path];
	const char *inside[] = { "admin.sock", "host.lock", "vrnics", "vrnics/a/vhost.sock", "vrnics/b/vhost.sock" };
	const char *before[] = { "", "/proc/1/root", "/proc/self/root" };
	for (unsigned b = 0; b < 3; b++)
		for (unsigned i = 0; i < sizeof inside / sizeof *inside; i++) {
			snprintf(path, sizeof path, "%s%s/%s", before[b], host, inside[i]);
			attack(!access(path, F_OK) || connects(path), "reaching", path);
		}
	/* The classic way out of a chroot. Here it must lead to the same root. */
	struct stat root, found;
	stat("/", &root);
	mkdir("/tmp/c", 0700);
	int fd = open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (fork() == 0) {
		if (chroot("/tmp/c") == 0 && fchdir(fd) == 0) {
			for (int i = 0; i < 64; i++)
				if (chdir("..") != 0)
					_exit(0);
			stat(".", &found);
			_exit(found.st_ino != root.st_ino || found.st_dev != root.st_dev);
		}
		_exit(0);
	}
	int status;
	wait(&status);
	attack(status != 0, "getting above", "the root directory");
	close(fd);
}

static void all(int host, const char *host_dir, const char *home)
{
	directories(host_dir);
	files();
	home_directory(home);
	processes(host);
	machine();
	mounts();
	working_directory();
}

static void put(const char *file, const char *text)
{
	int fd = open(file, O_WRONLY | O_CLOEXEC);
	if (fd < 0 || write(fd, text, strlen(text)) < 0)
		printf("%s: %s\n", file, strerror(errno));
	close(fd);
}

int main(int argc, char **argv)
{
	if (argc != 4)
		return 2;
	setvbuf(stdout, NULL, _IOLBF, 0);
	all(atoi(argv[1]), argv[2], argv[3]);
	char map[64], group[64];
	snprintf(map, sizeof map, "0 %d 1", geteuid());
	snprintf(group, sizeof group, "0 %d 1", getegid());
	if (unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWNET) == 0) {
		put("/proc/self/uid_map", map);
		put("/proc/self/setgroups", "deny");
		put("/proc/self/gid_map", group);
		all(atoi(argv[1]), argv[2], argv[3]);
	}
	printf("tried %d ways\n", tried);
	return 0;
}
