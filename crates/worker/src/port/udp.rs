//! The port as UDP sockets.

use std::io;
use std::net::{IpAddr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use unirdma_formats::net::{SOURCE_PORTS, VXLAN_PORT, seal};
use unirdma_formats::wire::{Envelope, ICRC_BYTES, ROCE_PORT};
use unirdma_ipc::counters::PortCounters;
use unirdma_ipc::network::ECN_CAPABLE;
use unirdma_rnic::{Arrival, Tx, TxPacket};

use super::icrc::Checker;
use super::socket::{BATCH, Inbox, NO_HEADER, Room, add_control, is_behind, notes, sockaddr};
use super::{Port, take};
use crate::encryption::{End, Opened, Seals, Sender, mark_datagram};

/// Most packets in one UDP_SEGMENT buffer (the kernel's UDP_MAX_SEGMENTS).
const MAX_SEGMENTS: usize = 64;
/// Most bytes of one UDP datagram.
const MAX_DATAGRAM: usize = 65_000;
/// The socket by which packets leave: a plain one with the source port of a flow, or one of the tunnel's.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Exit {
    Plain(usize, u16),
    Tunnel(usize),
}

struct Socket {
    addr: IpAddr,
    udp: UdpSocket,
    /// The socket only holds its port: another socket receives the packets.
    silent: bool,
    /// The socket is read too slowly. This counts as congestion, which senders are told before the kernel drops
    /// packets.
    behind: bool,
    /// Send-only sockets, one for each UDP source port; `None` if another process has the port.
    flows: Vec<Option<UdpSocket>>,
}

impl Socket {
    /// The socket and source port of a flow. A flow whose port another process has uses the receiving socket.
    fn outlet(&self, first: u16, flow: u16) -> (&UdpSocket, u16) {
        let number = flow.checked_sub(first);
        match number.and_then(|n| self.flows.get(usize::from(n))) {
            Some(Some(udp)) => (udp, flow),
            _ => (&self.udp, ROCE_PORT),
        }
    }
}

/// UDP sockets on port 4791 of this host's addresses, and sockets of IP multicast groups.
pub(crate) struct UdpPort {
    sockets: Vec<Socket>,
    /// Sockets by which VXLAN packets leave: receivers accept them from the VXLAN port only.
    tunnel: Vec<(IpAddr, Arc<UdpSocket>)>,
    inbox: Inbox,
    room: Room,
    checker: Checker,
    counters: PortCounters,
    /// UDP source port of the first flow.
    first_port: u16,
    icrc: bool,
    /// Sealing of packets to and from the group's hosts, if the group has a secret.
    pub(super) seals: Seals,
    /// Number of waiting packets, from the front, that were sealed already when the network did not accept them.
    closed: usize,
}

impl UdpPort {
    /// A port without sockets, whose flows use source ports from `first_port` on. `icrc`: whether the ICRC is made and
    /// checked.
    pub fn new(first_port: u16, icrc: bool, seals: Seals) -> Self {
        UdpPort {
            sockets: Vec::new(),
            tunnel: Vec::new(),
            inbox: Inbox::new(),
            room: Room::new(),
            checker: Checker::default(),
            counters: PortCounters::default(),
            first_port,
            icrc,
            seals,
            closed: 0,
        }
    }

    /// Adds the socket of an address or of an IP multicast group.
    pub fn add(&mut self, addr: IpAddr, udp: UdpSocket) {
        self.sockets.push(Socket { addr, udp, silent: false, behind: false, flows: Vec::new() });
    }

    /// Adds the sending socket of a flow for an address; false if there is no such flow or address.
    pub fn add_flow(&mut self, addr: IpAddr, flow: u16, udp: UdpSocket) -> bool {
        let number = flow.checked_sub(self.first_port).filter(|&n| n < SOURCE_PORTS);
        let socket = self.sockets.iter_mut().find(|s| s.addr == addr);
        let (Some(n), Some(s)) = (number, socket) else { return false };
        s.flows.resize_with(SOURCE_PORTS.into(), || None);
        s.flows[usize::from(n)] = Some(udp);
        true
    }

    /// Adds the socket with port 4789 of an address. It sends VXLAN packets to hosts of the same address family.
    pub fn add_tunnel(&mut self, addr: IpAddr, udp: Arc<UdpSocket>) {
        self.tunnel.push((addr, udp));
    }

    /// Marks the socket of an address as one that receives nothing.
    pub fn silence(&mut self, addr: IpAddr) {
        self.sockets.iter_mut().filter(|s| s.addr == addr).for_each(|s| s.silent = true);
    }

    /// The socket by which a packet leaves, and its source port; `None` if it cannot be sent.
    fn exit(&self, p: &TxPacket) -> Option<Exit> {
        if p.tail() > 0 && !self.seals.reaches(end_of(p)) {
            return None;
        }
        if p.outer() == 0 {
            return Some(Exit::Plain(self.socket_for(p)?, p.path.port));
        }
        Some(Exit::Tunnel(self.tunnel.iter().position(|(a, _)| a.is_ipv4() == p.path.to.is_ipv4())?))
    }

    /// Drops the first `n` packets, which were sent or lost.
    fn gone(&mut self, tx: &mut Tx, n: usize) {
        tx.sent(n);
        self.closed = self.closed.saturating_sub(n);
    }

    fn socket_for(&self, p: &TxPacket) -> Option<usize> {
        let fits = |s: &Socket| match p.path.from {
            Some(from) => s.addr == from,
            None => s.addr.is_ipv4() == p.path.to.is_ipv4(),
        };
        self.sockets.iter().position(fits)
    }
}

/// The destination of a packet.
fn end_of(p: &TxPacket) -> End {
    (p.path.to, p.path.across.map(|(peer, _)| peer))
}

/// The number of `packets`, from the front, that one buffer can carry: all of one path and one size, only the last may
/// be shorter.
fn batch(packets: &[TxPacket]) -> usize {
    let first = &packets[0];
    if first.path.to.is_multicast() {
        // Not every interface can split multicast packets.
        return 1;
    }
    let mut bytes = 0;
    let mut n = 0;
    for p in packets.iter().take(MAX_SEGMENTS) {
        bytes += p.len();
        let same = p.path == first.path && (p.outer() == 0) == (first.outer() == 0) && p.tail() == first.tail();
        if !same || p.len() > first.len() || bytes > MAX_DATAGRAM {
            break;
        }
        n += 1;
        if p.len() < first.len() {
            break;
        }
    }
    n.max(1)
}

/// Seals a packet. The tag covers what the ICRC would cover, so the ICRC is set to 0. A datagram in the tunnel needs
/// its ICRC, because the RNIC checks it.
fn close(bytes: &mut [u8], p: &TxPacket, sender: &mut Sender) {
    let end = bytes.len() - p.tail();
    if p.outer() > 0 {
        let (src, dst) = (p.path.to, p.path.to);
        // The addresses come from the inner IP header.
        seal(&mut bytes[..end], p.outer(), Envelope { src, dst, src_port: VXLAN_PORT, ip_id: 0 });
        mark_datagram(bytes);
    } else {
        bytes[end - ICRC_BYTES..end].fill(0);
    }
    sender.seal(bytes);
}

impl Port for UdpPort {
    fn send(&mut self, tx: &mut Tx) {
        self.seals.refresh();
        while !tx.packets().is_empty() {
            let mut headers = [NO_HEADER; BATCH];
            let mut iovs = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; BATCH];
            let mut counts = [0; BATCH];
            let Some(exit) = self.exit(&tx.packets()[0]) else {
                self.counters.send_errors += 1;
                self.gone(tx, 1);
                continue;
            };
            let (src, fd, src_port) = match exit {
                Exit::Plain(socket, flow) => {
                    let src = self.sockets[socket].addr;
                    let (udp, src_port) = self.sockets[socket].outlet(self.first_port, flow);
                    (src, udp.as_raw_fd(), src_port)
                }
                Exit::Tunnel(i) => (self.tunnel[i].0, self.tunnel[i].1.as_raw_fd(), VXLAN_PORT),
            };
            let (mut at, mut messages) = (0, 0);
            while messages < BATCH && at < tx.packets().len() {
                let first = tx.packets()[at];
                if self.exit(&first) != Some(exit) {
                    break;
                }
                let n = batch(&tx.packets()[at..]);
                let (dst, closed) = (first.path.to, self.closed.saturating_sub(at));
                let sealed = if first.tail() > 0 { self.seals.sender(end_of(&first), first.outer() > 0) } else { None };
                if let Some(sender) = sealed {
                    for i in closed..n {
                        let p = tx.packets()[at + i];
                        close(tx.bytes(&p), &p, sender);
                    }
                } else if self.icrc {
                    for i in 0..n {
                        let p = tx.packets()[at + i];
                        let ip_id = if src.is_ipv4() { i as u16 } else { 0 };
                        seal(tx.bytes(&p), p.outer(), Envelope { src, dst, src_port, ip_id });
                    }
                }
                let span = tx.span(at, n);
                iovs[messages] = libc::iovec { iov_base: span.as_ptr().cast_mut().cast(), iov_len: span.len() };
                let encapsulated = first.outer() > 0;
                let port = if encapsulated { VXLAN_PORT } else { ROCE_PORT };
                let (name, control) = (&mut self.room.names[messages], &mut self.room.controls[messages]);
                let h = &mut headers[messages].msg_hdr;
                (*name, h.msg_namelen) = sockaddr(first.path.to, port);
                h.msg_name = std::ptr::from_mut(name).cast();
                h.msg_iov = &mut iovs[messages];
                h.msg_iovlen = 1;
                if n > 1 {
                    add_control(h, control, libc::SOL_UDP, libc::UDP_SEGMENT, first.len() as u16);
                }
                // Without the control message, the class is ECN_CAPABLE. Sockets of the tunnel have no default, since
                // frames are not ECN-capable.
                let class = i32::from(first.path.class) | ECN_CAPABLE;
                match first.path.to {
                    _ if first.path.class == 0 && !encapsulated => {}
                    IpAddr::V4(_) => add_control(h, control, libc::IPPROTO_IP, libc::IP_TOS, class),
                    IpAddr::V6(_) => add_control(h, control, libc::IPPROTO_IPV6, libc::IPV6_TCLASS, class),
                }
                counts[messages] = n;
                at += n;
                messages += 1;
            }
            self.closed = self.closed.max(at);
            // SAFETY: `messages` headers are filled in, and everything that they point to lives until after the call.
            let done = unsafe { libc::sendmmsg(fd, headers.as_mut_ptr(), messages as u32, libc::MSG_DONTWAIT) };
            if done > 0 {
                let n: usize = counts[..done as usize].iter().sum();
                self.counters.sent += n as u64;
                self.gone(tx, n);
                continue;
            }
            match io::Error::last_os_error().raw_os_error() {
                Some(libc::EAGAIN | libc::ENOBUFS) => return,
                Some(libc::EINTR) => {}
                // An ICMP error for an earlier packet, or a packet that the network refuses: treated as lost.
                _ => {
                    self.counters.send_errors += counts[0] as u64;
                    self.gone(tx, counts[0]);
                }
            }
        }
    }

    fn receive(&mut self, f: &mut dyn FnMut(Arrival, &[u8])) -> bool {
        let UdpPort { sockets, inbox, checker, counters, icrc, seals, .. } = self;
        let mut any = false;
        for Socket { addr, udp, behind, .. } in sockets.iter_mut().filter(|s| !s.silent) {
            let taken = inbox.receive(udp.as_fd(), |i| {
                let (segment, marked) = notes(i.header);
                let congested = marked || *behind;
                let Some((from, port)) = i.from else { return };
                let arrival = Arrival { from, port, to: *addr, congested, group: None, source: None, sealed: false };
                let size = segment.unwrap_or(i.bytes.len()).max(1);
                let mut opener = seals.opener(from);
                for (number, packet) in i.bytes.chunks_mut(size).enumerate() {
                    counters.received += 1;
                    let ip_id = if addr.is_ipv4() { number as u16 } else { 0 };
                    let e = Envelope { src: from, dst: *addr, src_port: port, ip_id };
                    let plain = |p| match *icrc {
                        true => checker.open(&e, p),
                        false => p.split_last_chunk::<ICRC_BYTES>().map(|s| s.0),
                    };
                    let opened = match &mut opener {
                        Some(opener) => opener.open(*addr, packet, plain),
                        None => Opened::unsealed(packet, plain),
                    };
                    take(opened, arrival, &mut counters.icrc_errors, f);
                }
            });
            any |= taken > 0;
            *behind = is_behind(udp.as_fd(), taken);
        }
        any
    }

    fn join(&mut self, sockets: Vec<(IpAddr, OwnedFd)>) {
        for (group, fd) in sockets {
            if group.is_multicast() && !self.sockets.iter().any(|s| s.addr == group) {
                self.add(group, fd.into());
            }
        }
    }

    fn leave_others(&mut self, groups: &[IpAddr]) {
        self.sockets.retain(|s| !s.addr.is_multicast() || groups.contains(&s.addr));
    }

    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        self.sockets.iter().filter(|s| !s.silent).map(|s| s.udp.as_fd()).collect()
    }

    fn counters(&self) -> PortCounters {
        self.counters
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::port::socket::control_messages;
    use crate::port::tests::{alone, set};
    use unirdma_formats::net::FIRST_SOURCE_PORT;
    use unirdma_formats::wire::icrc;

    #[test]
    fn packets_travel_between_two_addresses() {
        let mut a = alone("127.0.47.1".parse().unwrap());
        let b = "127.0.47.2".parse().unwrap();
        let mut b_port = alone(b);
        let mut tx = Tx::default();
        for i in 0..250u32 {
            let port = if i < 100 { ROCE_PORT } else { FIRST_SOURCE_PORT + i as u16 / 100 };
            let path = unirdma_rnic::Path { port, ..unirdma_rnic::Path::new(b) };
            tx.push_raw(path, &vec![i as u8; if i == 150 { 40 } else { 600 }]);
        }
        a.send(&mut tx);
        let mut got = Vec::new();
        while b_port.receive(&mut |a, bytes| got.push((a.from, a.port, bytes.to_vec()))) {}
        assert_eq!(got.len(), 250);
        assert!(got.iter().enumerate().all(|(i, g)| g.0.to_string() == "127.0.47.1" && g.2[0] == i as u8));
        assert_eq!((a.counters().sent, b_port.counters().icrc_errors), (250, 0));
        // Each flow has its own source port.
        let ports: Vec<u16> = got.chunk_by(|a, b| a.1 == b.1).map(|g| g[0].1).collect();
        assert_eq!(ports, [ROCE_PORT, FIRST_SOURCE_PORT + 1, FIRST_SOURCE_PORT + 2]);
    }

    #[test]
    fn packets_that_wait_in_a_socket_more_than_half_full_are_congested() {
        let (from, to): (IpAddr, IpAddr) = ("127.0.47.9".parse().unwrap(), "127.0.47.10".parse().unwrap());
        let (mut sender, mut port) = (alone(from), alone(to));
        // All systems allow a buffer of this size.
        assert!(set(&port.sockets[0].udp, libc::SOL_SOCKET, libc::SO_RCVBUF, 200_000));
        // Sends `n` packets. Result: runs of packets with equal congestion flags, and their lengths.
        let mut runs = |n: u16| {
            let mut tx = Tx::default();
            for i in 0..n {
                // Packets of different flows are not joined, so each takes memory of its own.
                let path = unirdma_rnic::Path { port: FIRST_SOURCE_PORT + i % 2, ..unirdma_rnic::Path::new(to) };
                tx.push_raw(path, &[7; 600]);
            }
            sender.send(&mut tx);
            let mut got = Vec::new();
            while port.receive(&mut |a, _| got.push(a.congested)) {}
            got.chunk_by(|a, b| a == b).map(|c| (c[0], c.len())).collect::<Vec<_>>()
        };
        assert_eq!(runs(40), [(false, 40)]);
        let full = runs(4000);
        let [(false, BATCH), (true, n), (false, _)] = full[..] else { panic!("{full:?}") };
        assert!(n >= BATCH, "{full:?}");
        assert_eq!(runs(40), [(false, 40)]);
    }

    #[test]
    fn packets_without_a_udp_checksum_are_taken_over_ipv6() {
        let here: IpAddr = "::1".parse().unwrap();
        let mut port = alone(here);
        let device = UdpSocket::bind((here, 0)).unwrap();
        assert!(set(&device, libc::SOL_UDP, libc::UDP_NO_CHECK6_TX, 1));
        let src_port = device.local_addr().unwrap().port();
        let crc = icrc(&Envelope { src: here, dst: here, src_port, ip_id: 0 }, &[7; 40]);
        device.send_to(&[&[7; 40][..], &crc.to_le_bytes()].concat(), (here, ROCE_PORT)).unwrap();
        let mut got = Vec::new();
        port.receive(&mut |a, bytes| got.push((a.from, a.port, bytes.to_vec())));
        assert_eq!(got, [(here, src_port, vec![7; 40])]);
    }

    #[test]
    fn packets_carry_the_traffic_class_of_their_path() {
        let (from, to): (IpAddr, IpAddr) = ("127.0.47.7".parse().unwrap(), "127.0.47.8".parse().unwrap());
        let mut port = alone(from);
        let device = UdpSocket::bind((to, ROCE_PORT)).unwrap();
        assert!(set(&device, libc::IPPROTO_IP, libc::IP_RECVTOS, 1));
        let mut tx = Tx::default();
        for class in [0, 0x68, 0x68, 0] {
            tx.push_raw(unirdma_rnic::Path { class, ..unirdma_rnic::Path::new(to) }, &[7; 40]);
        }
        port.send(&mut tx);
        let mut classes = Vec::new();
        Inbox::new().receive(device.as_fd(), |i| {
            control_messages(i.header, |level, typ, data| {
                assert_eq!((level, typ), (libc::IPPROTO_IP, libc::IP_TOS));
                // SAFETY: the message is a byte.
                classes.push(unsafe { *data });
            });
        });
        // The network may mark each packet as congested.
        assert_eq!(classes, [2, 0x6a, 0x6a, 2]);
    }
}
