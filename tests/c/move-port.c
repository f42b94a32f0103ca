/* Moves a port of IPv4: while this program runs, a process of the control group DIR, or of one below it, that binds the
 * port FROM gets the port TO. So a program can run beside a part of the kernel that has its port already.
 *
 *   move-port DIR FROM TO
 */
#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/bpf.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static void check(int good, const char *what)
{
    if (!good) {
        perror(what);
        exit(1);
    }
}

static int bpf(int command, union bpf_attr *attr)
{
    return syscall(SYS_bpf, command, attr, sizeof(*attr));
}

int main(int argc, char **argv)
{
    if (argc != 4) {
        fprintf(stderr, "usage: %s DIR FROM TO\n", argv[0]);
        return 2;
    }
    const int from = htons(atoi(argv[2])), to = htons(atoi(argv[3]));
    const short port = offsetof(struct bpf_sock_addr, user_port);
    const struct bpf_insn program[] = {
        { .code = BPF_LDX | BPF_MEM | BPF_W, .dst_reg = BPF_REG_2, .src_reg = BPF_REG_1, .off = port },
        { .code = BPF_JMP | BPF_JNE | BPF_K, .dst_reg = BPF_REG_2, .off = 2, .imm = from },
        { .code = BPF_ALU64 | BPF_MOV | BPF_K, .dst_reg = BPF_REG_2, .imm = to },
        { .code = BPF_STX | BPF_MEM | BPF_W, .dst_reg = BPF_REG_1, .src_reg = BPF_REG_2, .off = port },
        { .code = BPF_ALU64 | BPF_MOV | BPF_K, .dst_reg = BPF_REG_0, .imm = 1 },
        { .code = BPF_JMP | BPF_EXIT },
    };
    static char log[65536];
    union bpf_attr load;
    memset(&load, 0, sizeof(load));
    load.prog_type = BPF_PROG_TYPE_CGROUP_SOCK_ADDR;
    load.expected_attach_type = BPF_CGROUP_INET4_BIND;
    load.insns = (unsigned long)program;
    load.insn_cnt = sizeof(program) / sizeof(program[0]);
    load.license = (unsigned long)"MIT";
    load.log_buf = (unsigned long)log;
    load.log_size = sizeof(log);
    load.log_level = 1;
    int fd = bpf(BPF_PROG_LOAD, &load);
    if (fd < 0)
        fputs(log, stderr);
    check(fd >= 0, "loading the program");
    int group = open(argv[1], O_RDONLY | O_DIRECTORY);
    check(group >= 0, argv[1]);
    union bpf_attr link;
    memset(&link, 0, sizeof(link));
    link.link_create.prog_fd = fd;
    link.link_create.target_fd = group;
    link.link_create.attach_type = BPF_CGROUP_INET4_BIND;
    check(bpf(BPF_LINK_CREATE, &link) >= 0, "attaching the program");
    puts("moved");
    fflush(stdout);
    pause();
    return 0;
}
