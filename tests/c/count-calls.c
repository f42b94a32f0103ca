/* SPDX-License-Identifier: Apache-2.0 OR MIT
 *
 * count-calls PROGRAM ARGUMENT...   runs a program, and prints how many system calls all its threads have made: each
 *                                   number with its count, and the sum
 *
 * A program that calls syscall(SECTION, n) has the calls that follow counted in section n, from 0, where it begins.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

/* Of waitpid(2), if PTRACE_O_TRACESYSGOOD is set. */
enum { SYSTEM_CALL = SIGTRAP | 0x80 };
/* Numbers of system calls are below this. */
enum { CALLS = 1024 };
/* The kernel has no such system call. */
enum { SECTION = 1000, SECTIONS = 8 };

int main(int argc, char **argv)
{
	static unsigned long of[SECTIONS][CALLS];
	unsigned long sum = 0, section = 0;
	int status, code = 1;
	pid_t child;

	CHECK(argc > 1);
	child = fork();
	CHECK(child >= 0);
	if (!child) {
		CHECK(!ptrace(PTRACE_TRACEME, 0, 0, 0));
		raise(SIGSTOP);
		execvp(argv[1], argv + 1);
		_exit(127);
	}
	CHECK(waitpid(child, &status, 0) == child);
	CHECK(!ptrace(PTRACE_SETOPTIONS, child, 0,
		      PTRACE_O_TRACESYSGOOD | PTRACE_O_TRACECLONE | PTRACE_O_TRACEFORK | PTRACE_O_EXITKILL));
	CHECK(!ptrace(PTRACE_SYSCALL, child, 0, 0));
	for (;;) {
		pid_t pid = waitpid(-1, &status, __WALL);
		int signal = 0;

		if (pid < 0)
			break;
		if (!WIFSTOPPED(status)) {
			if (pid == child)
				code = WIFEXITED(status) ? WEXITSTATUS(status) : 1;
			continue;
		}
		if (WSTOPSIG(status) == SYSTEM_CALL) {
			struct __ptrace_syscall_info info;

			ptrace(PTRACE_GET_SYSCALL_INFO, pid, sizeof(info), &info);
			if (info.op != PTRACE_SYSCALL_INFO_ENTRY || info.entry.nr >= CALLS)
				;
			else if (info.entry.nr == SECTION)
				section = info.entry.args[0] < SECTIONS ? info.entry.args[0] : 0;
			else
				of[section][info.entry.nr]++;
		} else if (WSTOPSIG(status) != SIGTRAP && WSTOPSIG(status) != SIGSTOP) {
			signal = WSTOPSIG(status);
		}
		ptrace(PTRACE_SYSCALL, pid, 0, signal);
	}
	for (int i = 0; i < SECTIONS; i++)
		for (int n = 0; n < CALLS; n++) {
			sum += of[i][n];
			if (of[i][n])
				printf("section %d, call %d: %lu\n", i, n, of[i][n]);
		}
	printf("system calls: %lu\n", sum);
	return code;
}
