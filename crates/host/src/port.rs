//! The port: RoCEv2 packets in UDP sockets, many to a system call.
//!
//! Sending joins packets of one size and path into one buffer that the kernel cuts (UDP_SEGMENT); receiving takes what
//! it has joined (UDP_GRO). The invariant CRC is sealed and checked here, since it covers the IP header.
//!
//! The ICRC covers the IPv4 Identification, which a UDP socket does not show. Packets that this port sends have the
//! number of their segment. Of any other packet the port checks that *some* Identification makes the ICRC right: the
//! CRC is linear, so those form a 16-dimensional space that is computed once for each length.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use unirdma_formats::net::{FIRST_SOURCE_PORT, SOURCE_PORTS, VXLAN_PORT, seal};
use unirdma_formats::wire::{Envelope, ICRC_BYTES, ROCE_PORT, icrc};
use unirdma_rnic::{Arrival, Tx, TxPacket};

/// What carries packets to other hosts and back.
pub(crate) trait Port: Send {
    /// Seals and sends packets from the front of `tx`, as many as the network takes now.
    fn send(&mut self, tx: &mut Tx);
    /// Hands each packet that has come in, its ICRC checked and cut off, to `f`; a bounded number.
    fn receive(&mut self, f: &mut dyn FnMut(Arrival, &[u8])) -> bool;
    /// From now on packets to these IP multicast groups come in, and to no others.
    fn join(&mut self, groups: &[IpAddr]);
    /// What becomes readable when a packet comes in.
    fn descriptors(&self) -> Vec<BorrowedFd<'_>>;
    /// Totals since the start.
    fn counters(&self) -> PortCounters;
}

/// What a port has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct PortCounters {
    /// Packets sent.
    pub sent: u64,
    /// Packets received.
    pub received: u64,
    /// Received with a wrong ICRC, and dropped.
    pub icrc_errors: u64,
    /// Not sent, because the network refused them.
    pub send_errors: u64,
}

/// Most packets in one UDP_SEGMENT buffer (the kernel's UDP_MAX_SEGMENTS).
const MAX_SEGMENTS: usize = 64;
/// Most bytes of one UDP datagram.
const MAX_DATAGRAM: usize = 65_000;
/// Datagrams of one system call.
const BATCH: usize = 16;
const BUFFER: usize = 1 << 16;
/// Most IP multicast groups, each with a socket of its own.
const MAX_GROUPS: usize = 256;
/// Wanted socket buffers, bytes.
const SOCKET_BUFFER: i32 = 16 << 20;
const SOL_UDP: i32 = 17;
/// ECT(0) of RFC 3168.
const ECN_CAPABLE: i32 = 2;

struct Socket {
    addr: IpAddr,
    udp: UdpSocket,
    /// Sockets that only send, from a port each; none, or [`SOURCE_PORTS`], each made when first used. `Some(None)`: somebody else has the port.
    flows: Vec<Option<Option<UdpSocket>>>,
}

impl Socket {
    fn new(addr: IpAddr, udp: UdpSocket) -> Self {
        Socket { addr, udp, flows: Vec::new() }
    }

    /// The socket of a flow and its port. A flow whose port somebody else has leaves by the socket that receives.
    fn outlet(&mut self, flow: u16) -> (&UdpSocket, u16) {
        let number = flow.checked_sub(FIRST_SOURCE_PORT).filter(|&n| n < SOURCE_PORTS);
        if let Some(n) = number.map(usize::from) {
            self.flows.resize_with(SOURCE_PORTS.into(), || None);
            let from = SocketAddr::new(self.addr, flow);
            if let Some(udp) = self.flows[n].get_or_insert_with(|| bind_flow(from).ok()) {
                return (udp, flow);
            }
        }
        (&self.udp, ROCE_PORT)
    }
}

/// UDP sockets on port 4791 of this host's addresses.
pub(crate) struct UdpPort {
    sockets: Vec<Socket>,
    buffers: Vec<u8>,
    spaces: HashMap<usize, IdSpace>,
    counters: PortCounters,
    icrc: bool,
}

impl UdpPort {
    /// Binds port 4791 of each address; `icrc`: makes and checks it.
    ///
    /// # Errors
    /// One line that says what is wrong and what to do.
    pub fn open(addresses: &[IpAddr], icrc: bool) -> io::Result<Self> {
        let sockets = addresses.iter().map(|&addr| bind(addr).map(|udp| Socket::new(addr, udp)));
        Ok(UdpPort {
            sockets: sockets.collect::<io::Result<_>>()?,
            buffers: vec![0; BATCH * BUFFER],
            spaces: HashMap::new(),
            counters: PortCounters::default(),
            icrc,
        })
    }

    fn socket_for(&self, p: &TxPacket) -> Option<usize> {
        let fits = |s: &Socket| match p.path.from {
            Some(from) => s.addr == from,
            None => s.addr.is_ipv4() == p.path.to.is_ipv4(),
        };
        self.sockets.iter().position(fits)
    }
}

/// Sets an option that is an int; true if the kernel took it.
fn set(udp: &UdpSocket, level: i32, name: i32, value: i32) -> bool {
    // SAFETY: the option is an int, whose size is given.
    unsafe { libc::setsockopt(udp.as_raw_fd(), level, name, std::ptr::from_ref(&value).cast(), 4) == 0 }
}

/// Gives a socket buffers for a burst. The FORCE variants need CAP_NET_ADMIN; without it the system's limit holds.
pub(crate) fn enlarge_buffers(udp: &UdpSocket) {
    for (force, plain) in [(libc::SO_RCVBUFFORCE, libc::SO_RCVBUF), (libc::SO_SNDBUFFORCE, libc::SO_SNDBUF)] {
        let _ = set(udp, libc::SOL_SOCKET, force, SOCKET_BUFFER) || set(udp, libc::SOL_SOCKET, plain, SOCKET_BUFFER);
    }
}

fn bind(addr: IpAddr) -> io::Result<UdpSocket> {
    let udp = UdpSocket::bind(SocketAddr::new(addr, ROCE_PORT)).map_err(|e| {
        let text = match e.kind() {
            io::ErrorKind::AddrInUse => format!(
                "UDP port {ROCE_PORT} of {addr} is in use (another virtual layer, or a soft RNIC of the kernel: `rdma link`); stop that or give another --address"
            ),
            io::ErrorKind::AddrNotAvailable => {
                format!("{addr} is no address of this host; `ip address` lists those it has")
            }
            _ => format!("cannot bind UDP port {ROCE_PORT} of {addr}: {e}"),
        };
        io::Error::new(e.kind(), text)
    })?;
    // What this host's own vRNICs send to each other does not go through the network.
    let _ = match addr {
        IpAddr::V4(_) => udp.set_multicast_loop_v4(false),
        IpAddr::V6(_) => udp.set_multicast_loop_v6(false),
    };
    receiving(udp, addr)
}

/// A socket that sends from its port, and receives nothing: peers send to port 4791.
fn bind_flow(from: SocketAddr) -> io::Result<UdpSocket> {
    let udp = UdpSocket::bind(from)?;
    drop_incoming(&udp)?;
    configure(&udp, from.ip())?;
    Ok(udp)
}

/// Lets the kernel drop what comes in by a socket.
fn drop_incoming(udp: &UdpSocket) -> io::Result<()> {
    // BPF_RET | BPF_K: keep 0 bytes.
    let mut nothing = libc::sock_filter { code: 6, jt: 0, jf: 0, k: 0 };
    let program = libc::sock_fprog { len: 1, filter: &mut nothing };
    let size = size_of::<libc::sock_fprog>() as u32;
    let value = std::ptr::from_ref(&program).cast();
    // SAFETY: the option is a program of one instruction, which lives until after the call.
    let done = unsafe { libc::setsockopt(udp.as_raw_fd(), libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, value, size) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// A socket for packets to an IP multicast group, on the interfaces of these addresses.
fn bind_group(group: IpAddr, addresses: &[IpAddr]) -> io::Result<UdpSocket> {
    use rustix::net::{AddressFamily, SocketType, bind, socket, sockopt};
    let family = if group.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let fd = socket(family, SocketType::DGRAM, None)?;
    // Other virtual layers of this host may listen to the same group.
    sockopt::set_socket_reuseaddr(&fd, true)?;
    bind(&fd, &SocketAddr::new(group, ROCE_PORT))?;
    let udp = UdpSocket::from(fd);
    for &a in addresses {
        match (group, a) {
            (IpAddr::V4(group), IpAddr::V4(a)) => udp.join_multicast_v4(&group, &a)?,
            (IpAddr::V6(group), IpAddr::V6(_)) => udp.join_multicast_v6(&group, crate::wire::interface_index(a))?,
            _ => {}
        }
    }
    receiving(udp, group)
}

/// Options of every socket of the port.
fn configure(udp: &UdpSocket, addr: IpAddr) -> io::Result<()> {
    udp.set_nonblocking(true)?;
    enlarge_buffers(udp);
    // DF, so that the Identification is that of the segment, and nothing is cut on the way. The network may mark packets
    // instead of dropping them; a kernel that cannot say so costs congestion control only.
    let (df, _) = match addr {
        IpAddr::V4(_) => (
            set(udp, libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_PROBE),
            set(udp, libc::IPPROTO_IP, libc::IP_TOS, ECN_CAPABLE),
        ),
        IpAddr::V6(_) => (
            set(udp, libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, libc::IP_PMTUDISC_PROBE),
            set(udp, libc::IPPROTO_IPV6, libc::IPV6_TCLASS, ECN_CAPABLE),
        ),
    };
    if df { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// A socket that also receives: it shows marks, and takes packets joined.
fn receiving(udp: UdpSocket, addr: IpAddr) -> io::Result<UdpSocket> {
    configure(&udp, addr)?;
    let _ = match addr {
        IpAddr::V4(_) => set(&udp, libc::IPPROTO_IP, libc::IP_RECVTOS, 1),
        IpAddr::V6(_) => set(&udp, libc::IPPROTO_IPV6, libc::IPV6_RECVTCLASS, 1),
    };
    if !set(&udp, SOL_UDP, libc::UDP_GRO, 1) {
        return Err(io::Error::new(
            io::ErrorKind::Unsupported,
            format!("UDP sockets of {addr} lack GRO (Linux 5.0 or later has it): {}", io::Error::last_os_error()),
        ));
    }
    Ok(udp)
}

/// A socket address as the kernel takes it, and its length.
fn sockaddr(ip: IpAddr, port: u16) -> (libc::sockaddr_storage, u32) {
    // SAFETY: all zero is a valid storage.
    let mut s: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
    let p: *mut libc::sockaddr_storage = &mut s;
    // SAFETY: the storage is large enough and aligned for both.
    let len = unsafe {
        match ip {
            IpAddr::V4(a) => {
                let v4 = p.cast::<libc::sockaddr_in>();
                (*v4).sin_family = libc::AF_INET as u16;
                (*v4).sin_port = port.to_be();
                (*v4).sin_addr.s_addr = u32::from_ne_bytes(a.octets());
                size_of::<libc::sockaddr_in>()
            }
            IpAddr::V6(a) => {
                let v6 = p.cast::<libc::sockaddr_in6>();
                (*v6).sin6_family = libc::AF_INET6 as u16;
                (*v6).sin6_port = port.to_be();
                (*v6).sin6_addr.s6_addr = a.octets();
                size_of::<libc::sockaddr_in6>()
            }
        }
    };
    (s, len as u32)
}

fn sender(s: &libc::sockaddr_storage) -> Option<(IpAddr, u16)> {
    let p: *const libc::sockaddr_storage = s;
    // SAFETY: the family says which of the two it is.
    unsafe {
        match i32::from(s.ss_family) {
            libc::AF_INET => {
                let v4 = &*p.cast::<libc::sockaddr_in>();
                Some((Ipv4Addr::from(v4.sin_addr.s_addr.to_ne_bytes()).into(), u16::from_be(v4.sin_port)))
            }
            libc::AF_INET6 => {
                let v6 = &*p.cast::<libc::sockaddr_in6>();
                Some((Ipv6Addr::from(v6.sin6_addr.s6_addr).into(), u16::from_be(v6.sin6_port)))
            }
            _ => None,
        }
    }
}

/// Room for two control messages with an int each.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
struct Control([u8; 64]);

/// How many of `packets`, from the first, one buffer can carry: one path, one size, only the last shorter.
fn batch(packets: &[TxPacket]) -> usize {
    let first = &packets[0];
    if first.path.to.is_multicast() {
        // Not every interface cuts these.
        return 1;
    }
    let mut bytes = 0;
    let mut n = 0;
    for p in packets.iter().take(MAX_SEGMENTS) {
        bytes += p.len();
        let same = p.path == first.path && (p.outer() == 0) == (first.outer() == 0);
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

impl Port for UdpPort {
    fn send(&mut self, tx: &mut Tx) {
        while !tx.packets().is_empty() {
            // SAFETY: all zero is a valid value of each.
            let mut headers: [libc::mmsghdr; BATCH] = unsafe { std::mem::zeroed() };
            // SAFETY: as above.
            let mut iovs: [libc::iovec; BATCH] = unsafe { std::mem::zeroed() };
            let mut controls = [Control([0; 64]); BATCH];
            let mut names = [sockaddr(Ipv4Addr::UNSPECIFIED.into(), 0); BATCH];
            let mut counts = [0; BATCH];
            let flow = tx.packets()[0].path.port;
            let Some(socket) = self.socket_for(&tx.packets()[0]) else {
                self.counters.send_errors += 1;
                tx.sent(1);
                continue;
            };
            let src = self.sockets[socket].addr;
            let (udp, src_port) = self.sockets[socket].outlet(flow);
            let fd = udp.as_raw_fd();
            let (mut at, mut messages) = (0, 0);
            while messages < BATCH && at < tx.packets().len() {
                let first = tx.packets()[at];
                if self.socket_for(&first) != Some(socket) || first.path.port != flow {
                    break;
                }
                let n = batch(&tx.packets()[at..]);
                for i in 0..if self.icrc { n } else { 0 } {
                    let p = tx.packets()[at + i];
                    let ip_id = if src.is_ipv4() { i as u16 } else { 0 };
                    seal(tx.bytes(&p), p.outer(), Envelope { src, dst: p.path.to, src_port, ip_id });
                }
                let span = tx.span(at, n);
                iovs[messages] = libc::iovec { iov_base: span.as_ptr().cast_mut().cast(), iov_len: span.len() };
                let port = if first.outer() == 0 { ROCE_PORT } else { VXLAN_PORT };
                names[messages] = sockaddr(first.path.to, port);
                let h = &mut headers[messages].msg_hdr;
                h.msg_name = std::ptr::from_mut(&mut names[messages].0).cast();
                h.msg_namelen = names[messages].1;
                h.msg_iov = &mut iovs[messages];
                h.msg_iovlen = 1;
                if n > 1 {
                    h.msg_control = std::ptr::from_mut(&mut controls[messages]).cast();
                    // SAFETY: the control buffer holds one message with a u16; the macros stay inside.
                    unsafe {
                        h.msg_controllen = libc::CMSG_SPACE(2) as usize;
                        let c = libc::CMSG_FIRSTHDR(h);
                        (*c).cmsg_level = SOL_UDP;
                        (*c).cmsg_type = libc::UDP_SEGMENT;
                        (*c).cmsg_len = libc::CMSG_LEN(2) as usize;
                        libc::CMSG_DATA(c).cast::<u16>().write_unaligned(first.len() as u16);
                    }
                }
                counts[messages] = n;
                at += n;
                messages += 1;
            }
            // SAFETY: `messages` headers are filled in, and all that they point to lives until after the call.
            let done = unsafe { libc::sendmmsg(fd, headers.as_mut_ptr(), messages as u32, libc::MSG_DONTWAIT) };
            if done > 0 {
                let n: usize = counts[..done as usize].iter().sum();
                self.counters.sent += n as u64;
                tx.sent(n);
                continue;
            }
            match io::Error::last_os_error().raw_os_error() {
                Some(libc::EAGAIN | libc::ENOBUFS) => return,
                Some(libc::EINTR) => {}
                // An ICMP error of an earlier packet, or a packet that the network does not take: as if lost.
                _ => {
                    self.counters.send_errors += counts[0] as u64;
                    tx.sent(counts[0]);
                }
            }
        }
    }

    fn receive(&mut self, f: &mut dyn FnMut(Arrival, &[u8])) -> bool {
        let mut any = false;
        for s in 0..self.sockets.len() {
            // SAFETY: all zero is a valid value of each.
            let mut headers: [libc::mmsghdr; BATCH] = unsafe { std::mem::zeroed() };
            // SAFETY: as above.
            let mut iovs: [libc::iovec; BATCH] = unsafe { std::mem::zeroed() };
            // SAFETY: as above.
            let mut names: [libc::sockaddr_storage; BATCH] = unsafe { std::mem::zeroed() };
            let mut controls = [Control([0; 64]); BATCH];
            for (i, buffer) in self.buffers.chunks_exact_mut(BUFFER).enumerate() {
                iovs[i] = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: BUFFER };
                let h = &mut headers[i].msg_hdr;
                h.msg_name = std::ptr::from_mut(&mut names[i]).cast();
                h.msg_namelen = size_of::<libc::sockaddr_storage>() as u32;
                h.msg_iov = &mut iovs[i];
                h.msg_iovlen = 1;
                h.msg_control = std::ptr::from_mut(&mut controls[i]).cast();
                h.msg_controllen = size_of::<Control>();
            }
            let Socket { addr, udp, .. } = &self.sockets[s];
            // SAFETY: BATCH headers are filled in, and all that they point to lives until after the call.
            let n = unsafe {
                libc::recvmmsg(
                    udp.as_raw_fd(),
                    headers.as_mut_ptr(),
                    BATCH as u32,
                    libc::MSG_DONTWAIT,
                    std::ptr::null_mut(),
                )
            };
            for i in 0..n.max(0) as usize {
                any = true;
                let len = headers[i].msg_len as usize;
                let (segment, congested) = notes(&headers[i].msg_hdr);
                let segment = segment.unwrap_or(len).max(1);
                let Some((from, src_port)) = sender(&names[i]) else { continue };
                let whole = &self.buffers[i * BUFFER..i * BUFFER + len];
                for (number, packet) in whole.chunks(segment).enumerate() {
                    self.counters.received += 1;
                    let ip_id = if addr.is_ipv4() { number as u16 } else { 0 };
                    let e = Envelope { src: from, dst: *addr, src_port, ip_id };
                    let body = if self.icrc {
                        open(&mut self.spaces, &e, packet)
                    } else {
                        packet.split_last_chunk::<ICRC_BYTES>().map(|s| s.0)
                    };
                    match body {
                        Some(body) => f(Arrival { from, port: src_port, to: *addr, congested }, body),
                        None => self.counters.icrc_errors += 1,
                    }
                }
            }
        }
        any
    }

    fn join(&mut self, groups: &[IpAddr]) {
        self.sockets.retain(|s| !s.addr.is_multicast() || groups.contains(&s.addr));
        let own: Vec<IpAddr> = self.sockets.iter().map(|s| s.addr).filter(|a| !a.is_multicast()).collect();
        for &addr in groups.iter().take(MAX_GROUPS) {
            if self.sockets.iter().any(|s| s.addr == addr) {
                continue;
            }
            match bind_group(addr, &own) {
                Ok(udp) => self.sockets.push(Socket::new(addr, udp)),
                Err(e) => tracing::warn!("plain devices cannot be heard in multicast group {addr}: {e}"),
            }
        }
    }

    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        self.sockets.iter().map(|s| s.udp.as_fd()).collect()
    }

    fn counters(&self) -> PortCounters {
        self.counters
    }
}

/// Size of the packets that the kernel has joined, and whether they carry a congestion mark. It joins only packets that
/// are alike in this.
fn notes(h: &libc::msghdr) -> (Option<usize>, bool) {
    const CONGESTION_EXPERIENCED: u8 = 3;
    let (mut segment, mut marks) = (None, 0u8);
    // SAFETY: the kernel has filled in the control buffer and its length; the macros stay inside. The first byte of an
    // int in host order holds its low bits.
    unsafe {
        let mut c = libc::CMSG_FIRSTHDR(h);
        while !c.is_null() {
            let data = libc::CMSG_DATA(c);
            match ((*c).cmsg_level, (*c).cmsg_type) {
                (SOL_UDP, libc::UDP_GRO) => segment = Some(data.cast::<i32>().read_unaligned() as usize),
                (libc::IPPROTO_IP, libc::IP_TOS) => marks = *data,
                (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => marks = data.cast::<i32>().read_unaligned() as u8,
                _ => {}
            }
            c = libc::CMSG_NXTHDR(h, c);
        }
    }
    (segment, marks & 3 == CONGESTION_EXPERIENCED)
}

/// The body of a packet whose ICRC is right.
fn open<'a>(spaces: &mut HashMap<usize, IdSpace>, e: &Envelope, packet: &'a [u8]) -> Option<&'a [u8]> {
    let (body, crc) = packet.split_last_chunk::<ICRC_BYTES>()?;
    let wrong = icrc(e, body) ^ u32::from_le_bytes(*crc);
    if wrong == 0 {
        return Some(body);
    }
    if e.src.is_ipv6() {
        return None;
    }
    let space = spaces.entry(body.len()).or_insert_with(|| IdSpace::new(e, body));
    space.contains(wrong).then_some(body)
}

/// The changes of a packet's ICRC that changes of the IPv4 Identification make: a linear space over bits, as a basis
/// with distinct leading bits.
struct IdSpace([u32; 32]);

impl IdSpace {
    fn new(e: &Envelope, body: &[u8]) -> Self {
        let zero = icrc(&Envelope { ip_id: 0, ..*e }, body);
        let mut basis = IdSpace([0; 32]);
        for bit in 0..16 {
            let change = icrc(&Envelope { ip_id: 1 << bit, ..*e }, body) ^ zero;
            let rest = basis.reduce(change);
            if rest != 0 {
                basis.0[rest.ilog2() as usize] = rest;
            }
        }
        basis
    }

    fn reduce(&self, mut v: u32) -> u32 {
        for bit in (0..32).rev() {
            if v >> bit & 1 != 0 {
                v ^= self.0[bit];
            }
        }
        v
    }

    fn contains(&self, change: u32) -> bool {
        self.reduce(change) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_identification_is_taken_and_no_changed_byte() {
        let mut spaces = HashMap::new();
        let e = Envelope { src: [10, 0, 0, 1].into(), dst: [10, 0, 0, 2].into(), src_port: 49_152, ip_id: 0 };
        for len in [12, 16, 1040, 4112] {
            let body: Vec<u8> = (0..len).map(|i| (i * 7) as u8).collect();
            for id in [0, 1, 63, 0x1234, 0xffff] {
                let mut packet = body.clone();
                packet.extend(icrc(&Envelope { ip_id: id, ..e }, &body).to_le_bytes());
                assert_eq!(open(&mut spaces, &e, &packet), Some(&body[..]), "length {len}, id {id:#x}");
                for at in [0, len / 2, len + 2] {
                    let mut bad = packet.clone();
                    bad[at] ^= 0x10;
                    assert_eq!(open(&mut spaces, &e, &bad), None, "length {len}, byte {at}");
                }
            }
        }
        assert_eq!(open(&mut spaces, &e, &[1, 2]), None);
    }

    #[test]
    fn packets_travel_between_two_addresses() {
        let mut a = UdpPort::open(&["127.0.47.1".parse().unwrap()], true).unwrap();
        let b = "127.0.47.2".parse().unwrap();
        let mut b_port = UdpPort::open(&[b], true).unwrap();
        assert_eq!(UdpPort::open(&[b], true).err().unwrap().kind(), io::ErrorKind::AddrInUse);
        let none = UdpPort::open(&["203.0.113.1".parse().unwrap()], true);
        assert!(none.err().unwrap().to_string().contains("no address of this host"));
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
        // Each flow has a source port of its own.
        let ports: Vec<u16> = got.chunk_by(|a, b| a.1 == b.1).map(|g| g[0].1).collect();
        assert_eq!(ports, [ROCE_PORT, FIRST_SOURCE_PORT + 1, FIRST_SOURCE_PORT + 2]);
    }
}
