//! The sockets of the port and of the tunnel, which the supervisor makes. Workers get them ready for use, and change no
//! socket options.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use serde::{Deserialize, Serialize};
use unirdma_formats::net::VXLAN_PORT;
use unirdma_formats::wire::ROCE_PORT;
use unirdma_ipc::network::ECN_CAPABLE;

use super::bpf::{self, Instruction, Table};
use super::interface::interface_index;

/// Requested size of socket buffers, bytes.
pub const SOCKET_BUFFER: i32 = 16 << 20;

/// Options of every socket of a virtual layer.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Options {
    /// The mark of the sockets' packets.
    pub mark: Option<u32>,
    /// IPv4 packets are received by packet sockets: the UDP sockets only hold their port.
    pub full_icrc: bool,
}

/// A port of an address that workers share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(super) enum Kind {
    /// RoCEv2.
    Roce,
    /// VXLAN.
    Tunnel,
}

impl Kind {
    fn port(self) -> u16 {
        match self {
            Kind::Roce => ROCE_PORT,
            Kind::Tunnel => VXLAN_PORT,
        }
    }

    fn failed(self, addr: IpAddr, e: &io::Error) -> io::Error {
        let port = self.port();
        let text = match (self, e.kind()) {
            (Kind::Tunnel, _) => format!("cannot bind UDP port {port} of {addr} for VXLAN: {e}"),
            (_, io::ErrorKind::AddrInUse) => format!(
                "UDP port {port} of {addr} is in use (another virtual layer, or a soft RNIC of the kernel: `rdma link`); stop that or give another --address"
            ),
            (_, io::ErrorKind::AddrNotAvailable) => {
                format!("{addr} is no address of this host; `ip address` lists those it has")
            }
            _ => format!("cannot bind UDP port {port} of {addr}: {e}"),
        };
        io::Error::new(e.kind(), text)
    }
}

/// Sets an option of type int; true if the kernel accepts it.
pub(super) fn set(fd: &impl AsFd, level: i32, name: i32, value: i32) -> bool {
    // SAFETY: the option is an int, whose size is given.
    unsafe { libc::setsockopt(fd.as_fd().as_raw_fd(), level, name, std::ptr::from_ref(&value).cast(), 4) == 0 }
}

/// Requests large socket buffers for bursts. The FORCE variants need CAP_NET_ADMIN; without it the system's limit
/// applies.
fn enlarge_buffers(fd: &impl AsFd) {
    for (force, plain) in [(libc::SO_RCVBUFFORCE, libc::SO_RCVBUF), (libc::SO_SNDBUFFORCE, libc::SO_SNDBUF)] {
        let _ = set(fd, libc::SOL_SOCKET, force, SOCKET_BUFFER) || set(fd, libc::SOL_SOCKET, plain, SOCKET_BUFFER);
    }
}

/// Sets the mark of the packets that a socket sends. Needs CAP_NET_ADMIN.
///
/// # Errors
/// Errors of SO_MARK.
pub(super) fn mark(fd: &impl AsFd, mark: u32) -> io::Result<()> {
    let done = set(fd, libc::SOL_SOCKET, libc::SO_MARK, mark.cast_signed());
    if done { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Claims a port of an address, which no other socket may have, for sockets that share it. This socket receives
/// nothing.
///
/// # Errors
/// One line: the address and the reason.
pub(super) fn claim(kind: Kind, addr: IpAddr) -> io::Result<UdpSocket> {
    let udp = UdpSocket::bind(SocketAddr::new(addr, kind.port())).map_err(|e| kind.failed(addr, &e))?;
    // Set only after the bind: otherwise another virtual layer of the same user could share the port.
    sockopt::set_socket_reuseport(&udp, true)?;
    prepare(&udp, kind, addr)?;
    bpf::attach(&udp, libc::SO_ATTACH_FILTER, &[bpf::end(0)])?;
    Ok(udp)
}

/// Another socket of a port that this host has claimed.
///
/// # Errors
/// Errors of sockets, or one line if another process has the port.
pub(super) fn share(kind: Kind, addr: IpAddr, o: Options) -> io::Result<UdpSocket> {
    let family = if addr.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let fd = rustix::net::socket_with(family, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    sockopt::set_socket_reuseport(&fd, true)?;
    // Before the socket gets its port, so that no packet arrives without these options.
    let udp = UdpSocket::from(fd);
    prepare(&udp, kind, addr)?;
    o.mark.map_or(Ok(()), |m| mark(&udp, m))?;
    if kind == Kind::Roce && addr.is_ipv4() && o.full_icrc {
        // Packets arrive by a packet socket. This socket must not enable GRO: if the kernel joined packets, it would
        // not keep the Identification of each.
        set(&udp, libc::SOL_UDP, libc::UDP_GRO, 0);
        bpf::attach(&udp, libc::SO_ATTACH_FILTER, &[bpf::end(0)])?;
    }
    rustix::net::bind(&udp, &SocketAddr::new(addr, kind.port())).map_err(|e| kind.failed(addr, &e.into()))?;
    Ok(udp)
}

fn prepare(udp: &UdpSocket, kind: Kind, addr: IpAddr) -> io::Result<()> {
    match (kind, addr) {
        (Kind::Tunnel, _) => {
            udp.set_nonblocking(true)?;
            enlarge_buffers(udp);
            return Ok(());
        }
        // Packets between vRNICs of this host do not go through the network.
        (_, IpAddr::V4(_)) => _ = udp.set_multicast_loop_v4(false),
        (_, IpAddr::V6(_)) => _ = udp.set_multicast_loop_v6(false),
    }
    receiving(udp, addr)
}

/// A socket that sends from its port and receives nothing: peers send to port 4791.
///
/// # Errors
/// Errors of sockets: another process has the port.
pub(super) fn flow(from: SocketAddr, o: Options) -> io::Result<UdpSocket> {
    let udp = UdpSocket::bind(from)?;
    bpf::attach(&udp, libc::SO_ATTACH_FILTER, &[bpf::end(0)])?;
    lock_filter(&udp)?;
    configure(&udp, from.ip())?;
    o.mark.map_or(Ok(()), |m| mark(&udp, m))?;
    Ok(udp)
}

/// A socket for packets to an IP multicast group, on the interfaces of these addresses.
///
/// # Errors
/// Errors of sockets.
pub(super) fn multicast(group: IpAddr, addresses: &[IpAddr]) -> io::Result<UdpSocket> {
    let family = if group.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let fd = rustix::net::socket_with(family, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    // Other workers, and other virtual layers of this host, may receive from the same group.
    sockopt::set_socket_reuseaddr(&fd, true)?;
    rustix::net::bind(&fd, &SocketAddr::new(group, ROCE_PORT))?;
    let udp = UdpSocket::from(fd);
    for &a in addresses {
        match (group, a) {
            (IpAddr::V4(group), IpAddr::V4(a)) => udp.join_multicast_v4(&group, &a)?,
            (IpAddr::V6(group), IpAddr::V6(_)) => udp.join_multicast_v6(&group, interface_index(a))?,
            _ => {}
        }
    }
    receiving(&udp, group)?;
    Ok(udp)
}

/// Removes a socket at once from the sockets that share its port, even if other processes have it open: binds it to an
/// interface that does not exist. The last socket takes its place then (`reuseport_detach_sock` of the kernel), as if
/// all processes had closed it.
pub(super) fn depart(udp: &UdpSocket) {
    const SO_BINDTOIFINDEX: i32 = 62;
    set(udp, libc::SOL_SOCKET, SO_BINDTOIFINDEX, i32::MAX);
}

/// Locks the filter of this socket, and keeps anybody from changing the steering of its port through this socket.
///
/// # Errors
/// Errors of SO_LOCK_FILTER.
pub(super) fn lock_filter(fd: &impl AsFd) -> io::Result<()> {
    let done = set(fd, libc::SOL_SOCKET, libc::SO_LOCK_FILTER, 1);
    if done { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Options of every RoCEv2 socket.
fn configure(udp: &UdpSocket, addr: IpAddr) -> io::Result<()> {
    udp.set_nonblocking(true)?;
    enlarge_buffers(udp);
    // DF is set, so that the Identification equals the segment's number and packets are not fragmented. The network may
    // mark packets instead of dropping them; on a kernel that cannot set this, only congestion control is missing.
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

/// Options of a socket that also receives: it reports congestion marks and joins packets. Over IPv6, too, devices send
/// no UDP checksum (annex A17).
fn receiving(udp: &UdpSocket, addr: IpAddr) -> io::Result<()> {
    configure(udp, addr)?;
    let _ = match addr {
        IpAddr::V4(_) => set(udp, libc::IPPROTO_IP, libc::IP_RECVTOS, 1),
        IpAddr::V6(_) => {
            set(udp, libc::SOL_UDP, libc::UDP_NO_CHECK6_RX, 1) && set(udp, libc::IPPROTO_IPV6, libc::IPV6_RECVTCLASS, 1)
        }
    };
    if !set(udp, libc::SOL_UDP, libc::UDP_GRO, 1) {
        return Err(io::Error::new(
            io::ErrorKind::Unsupported,
            format!("UDP sockets of {addr} lack GRO (Linux 5.0 or later has it): {}", io::Error::last_os_error()),
        ));
    }
    Ok(())
}

/// A packet socket on the interface of an address. It receives packets that its filter accepts, which is `program` at
/// first.
///
/// # Errors
/// One line: the problem and its remedy.
pub(super) fn packets(addr: Ipv4Addr, program: &[Instruction]) -> io::Result<OwnedFd> {
    bind_packets(addr, program).map_err(|e| {
        let text = format!("--full-icrc takes packet sockets ({e}): run as root, or with CAP_NET_RAW");
        io::Error::new(e.kind(), text)
    })
}

fn bind_packets(addr: Ipv4Addr, program: &[Instruction]) -> io::Result<OwnedFd> {
    // The socket receives nothing until it is bound to a protocol below.
    // SAFETY: no memory is passed.
    let fd = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just made.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    enlarge_buffers(&fd);
    bpf::attach(&fd, libc::SO_ATTACH_FILTER, program)?;
    // A packet that never left this machine arrives without having been split. The first option reports how to split
    // it, the second the offset of its IP header.
    if ![libc::PACKET_VNET_HDR, libc::PACKET_AUXDATA].into_iter().all(|o| set(&fd, libc::SOL_PACKET, o, 1)) {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: an all-zero address is valid.
    let mut to: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    to.sll_family = libc::AF_PACKET as u16;
    to.sll_protocol = (libc::ETH_P_IP as u16).to_be();
    to.sll_ifindex = interface_index(addr.into()) as i32;
    let size = size_of::<libc::sockaddr_ll>() as u32;
    // SAFETY: the address has the given size.
    let done = unsafe { libc::bind(fd.as_raw_fd(), std::ptr::from_ref(&to).cast(), size) };
    if done == 0 { Ok(fd) } else { Err(io::Error::last_os_error()) }
}

/// Accepts whole packets to this host and to UDP port 4791 of this address, if the value of their destination QPN in
/// `table` is not 0. QPN 1 has the value `manager`.
pub(super) fn roce_to(addr: Ipv4Addr, table: &Table, manager: u32) -> Vec<Instruction> {
    // Offset of the packet type in the kernel's packet metadata (SKF_AD_OFF + SKF_AD_PKTTYPE).
    const PACKET_TYPE: u32 = -0x1000_i32 as u32 + 4;
    const THIS_HOST: u32 = 0;
    const IP: u32 = bpf::IP_HEADER;
    let (word, half, byte) = (0x20, 0x28, 0x30);
    let (equal, any_bit) = (0x15, 0x45);
    let checks = [
        (word, PACKET_TYPE, equal, THIS_HOST),
        // Version 4 without options; not a fragment; UDP.
        (byte, IP, equal, 0x45),
        (half, IP + 6, any_bit, 0x3fff),
        (byte, IP + 9, equal, libc::IPPROTO_UDP as u32),
        (word, IP + 16, equal, addr.to_bits()),
        (half, IP + 22, equal, ROCE_PORT.into()),
    ];
    let check = |(load, offset, compare, k)| {
        let (jt, jf) = if compare == equal { (1, 0) } else { (0, 1) };
        [Instruction { code: load, jt: 0, jf: 0, k: offset }, Instruction { code: compare, jt, jf, k }, bpf::end(0)]
    };
    checks.into_iter().flat_map(check).chain(bpf::by_qpn_of_ipv4(table, manager)).collect()
}
