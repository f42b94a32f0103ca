//! The sockets of the port and of the tunnel, as the supervisor makes them. Workers get them ready for use: a worker changes no option of a
//! socket.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use serde::{Deserialize, Serialize};
use unirdma_formats::net::VXLAN_PORT;
use unirdma_formats::wire::ROCE_PORT;

pub(crate) use super::socket::mark;
use super::socket::{ECN_CAPABLE, SOL_UDP, enlarge_buffers, set};
use crate::network::interface_index;
use crate::steer::{self, Instruction, Table};

/// What every socket of a virtual layer has.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Options {
    /// What the kernel marks packets with.
    pub mark: Option<u32>,
    /// IPv4 packets come by packet sockets: the UDP sockets only hold their port.
    pub full_icrc: bool,
}

/// A port of an address that workers share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) enum Kind {
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

/// Takes a port of an address, which nobody else has, for sockets that share it. Nothing comes in by this one.
///
/// # Errors
/// One line: which address, and why.
pub(crate) fn claim(kind: Kind, addr: IpAddr) -> io::Result<UdpSocket> {
    let udp = UdpSocket::bind(SocketAddr::new(addr, kind.port())).map_err(|e| kind.failed(addr, &e))?;
    // Only now: another virtual layer of the same user could share the port otherwise.
    sockopt::set_socket_reuseport(&udp, true)?;
    prepare(&udp, kind, addr)?;
    steer::attach(&udp, libc::SO_ATTACH_FILTER, &[steer::end(0)])?;
    Ok(udp)
}

/// A further socket of a port that this host has claimed.
///
/// # Errors
/// Those of sockets, and one line if somebody has the port.
pub(crate) fn share(kind: Kind, addr: IpAddr, o: Options) -> io::Result<UdpSocket> {
    let family = if addr.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let fd = rustix::net::socket_with(family, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    sockopt::set_socket_reuseport(&fd, true)?;
    // Before the socket has its port, so that it gets no packet without them.
    let udp = UdpSocket::from(fd);
    prepare(&udp, kind, addr)?;
    o.mark.map_or(Ok(()), |m| mark(&udp, m))?;
    if kind == Kind::Roce && addr.is_ipv4() && o.full_icrc {
        // What comes in comes by a packet socket. This socket takes packets one by one, so that the kernel joins none: it does not
        // keep the Identification of each.
        set(&udp, SOL_UDP, libc::UDP_GRO, 0);
        steer::attach(&udp, libc::SO_ATTACH_FILTER, &[steer::end(0)])?;
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
        // What this host's own vRNICs send to each other does not go through the network.
        (_, IpAddr::V4(_)) => _ = udp.set_multicast_loop_v4(false),
        (_, IpAddr::V6(_)) => _ = udp.set_multicast_loop_v6(false),
    }
    receiving(udp, addr)
}

/// A socket that sends from its port, and receives nothing: peers send to port 4791.
///
/// # Errors
/// Those of sockets: somebody else has the port.
pub(crate) fn flow(from: SocketAddr, o: Options) -> io::Result<UdpSocket> {
    let udp = UdpSocket::bind(from)?;
    steer::attach(&udp, libc::SO_ATTACH_FILTER, &[steer::end(0)])?;
    lock_filter(&udp)?;
    configure(&udp, from.ip())?;
    o.mark.map_or(Ok(()), |m| mark(&udp, m))?;
    Ok(udp)
}

/// A socket for packets to an IP multicast group, on the interfaces of these addresses.
///
/// # Errors
/// Those of sockets.
pub(crate) fn multicast(group: IpAddr, addresses: &[IpAddr]) -> io::Result<UdpSocket> {
    let family = if group.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let fd = rustix::net::socket_with(family, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    // Other workers, and other virtual layers of this host, may listen to the same group.
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

/// Takes a socket out of those that share its port, at once and whoever else has it open: it is bound to an interface that does not
/// exist. Its place is the last one's then (`reuseport_detach_sock` of the kernel), as if it had been closed by all.
pub(crate) fn depart(udp: &UdpSocket) {
    const SO_BINDTOIFINDEX: i32 = 62;
    set(udp, libc::SOL_SOCKET, SO_BINDTOIFINDEX, i32::MAX);
}

/// From now on nobody changes what the kernel lets in by this socket, nor, through this socket, the steering of its port.
///
/// # Errors
/// Those of SO_LOCK_FILTER.
pub(crate) fn lock_filter(fd: &impl AsFd) -> io::Result<()> {
    let done = set(fd, libc::SOL_SOCKET, libc::SO_LOCK_FILTER, 1);
    if done { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Options of every socket of RoCEv2.
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

/// Options of a socket that also receives: it shows marks, and takes packets joined. Over IPv6 too, devices send no UDP checksum
/// (annex A17).
fn receiving(udp: &UdpSocket, addr: IpAddr) -> io::Result<()> {
    configure(udp, addr)?;
    let _ = match addr {
        IpAddr::V4(_) => set(udp, libc::IPPROTO_IP, libc::IP_RECVTOS, 1),
        IpAddr::V6(_) => {
            set(udp, SOL_UDP, libc::UDP_NO_CHECK6_RX, 1) && set(udp, libc::IPPROTO_IPV6, libc::IPV6_RECVTCLASS, 1)
        }
    };
    if !set(udp, SOL_UDP, libc::UDP_GRO, 1) {
        return Err(io::Error::new(
            io::ErrorKind::Unsupported,
            format!("UDP sockets of {addr} lack GRO (Linux 5.0 or later has it): {}", io::Error::last_os_error()),
        ));
    }
    Ok(())
}

/// A packet socket on the interface of an address that lets in what its filter says; at first that is `program`.
///
/// # Errors
/// One line that says what is wrong and what to do.
pub(crate) fn packets(addr: Ipv4Addr, program: &[Instruction]) -> io::Result<OwnedFd> {
    bind_packets(addr, program).map_err(|e| {
        let text = format!("--full-icrc takes packet sockets ({e}): run as root, or with CAP_NET_RAW");
        io::Error::new(e.kind(), text)
    })
}

fn bind_packets(addr: Ipv4Addr, program: &[Instruction]) -> io::Result<OwnedFd> {
    // Until it is bound to a protocol, below, it receives nothing.
    // SAFETY: no memory is passed.
    let fd = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call has just made it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    enlarge_buffers(&fd);
    steer::attach(&fd, libc::SO_ATTACH_FILTER, program)?;
    // A packet that was not cut yet, since it never left this machine, comes whole: the first option says how it is to be cut,
    // the second where its IP header is.
    if ![libc::PACKET_VNET_HDR, libc::PACKET_AUXDATA].into_iter().all(|o| set(&fd, libc::SOL_PACKET, o, 1)) {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: all zero is a valid address.
    let mut to: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    to.sll_family = libc::AF_PACKET as u16;
    to.sll_protocol = (libc::ETH_P_IP as u16).to_be();
    to.sll_ifindex = interface_index(addr.into()) as i32;
    let size = size_of::<libc::sockaddr_ll>() as u32;
    // SAFETY: the address has the size that is given.
    let done = unsafe { libc::bind(fd.as_raw_fd(), std::ptr::from_ref(&to).cast(), size) };
    if done == 0 { Ok(fd) } else { Err(io::Error::last_os_error()) }
}

/// Keeps whole packets for this host, to UDP port 4791 of this address, whose destination QPN has a value other than 0 in `table`;
/// QPN 1 has the value `manager`.
pub(crate) fn roce_to(addr: Ipv4Addr, table: &Table, manager: u32) -> Vec<Instruction> {
    // Among what the kernel knows of a packet.
    const PACKET_TYPE: u32 = -0x1000_i32 as u32 + 4;
    const THIS_HOST: u32 = 0;
    const IP: u32 = steer::IP_HEADER;
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
        [Instruction { code: load, jt: 0, jf: 0, k: offset }, Instruction { code: compare, jt, jf, k }, steer::end(0)]
    };
    checks.into_iter().flat_map(check).chain(steer::by_qpn_of_ipv4(table, manager)).collect()
}
