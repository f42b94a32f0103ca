//! The port: RoCEv2 packets over UDP sockets, many in one system call.
//!
//! For sending, packets of one size and path are joined into one buffer that the kernel splits (UDP_SEGMENT); for
//! receiving, the kernel joins packets (UDP_GRO). The invariant CRC is made and checked here, since it covers the IP
//! header.
//!
//! The ICRC covers the IPv4 Identification, which a UDP socket does not show. In packets from this port, the
//! Identification is the number of the segment. For any other packet, [`UdpPort`] checks that *some* Identification
//! makes the ICRC correct (`icrc`). [`PacketPort`] sees the IP header and checks the ICRC exactly.

mod icrc;
mod packet;
mod socket;
mod udp;

use std::net::IpAddr;
use std::os::fd::{BorrowedFd, OwnedFd};

use unirdma_rnic::{Arrival, Tx};

use unirdma_ipc::counters::PortCounters;

use crate::encryption::Opened;
pub(crate) use packet::PacketPort;
pub(crate) use udp::UdpPort;

/// Transport of packets to and from other hosts.
pub trait Port: Send {
    /// Seals and sends packets from the front of `tx`, until the network accepts no more.
    fn send(&mut self, tx: &mut Tx);
    /// Hands a bounded number of incoming packets to `f`, after checking and removing the ICRC. True if there were any.
    fn receive(&mut self, f: &mut dyn FnMut(Arrival, &[u8])) -> bool;
    /// Adds sockets by which packets to IP multicast groups arrive.
    fn join(&mut self, sockets: Vec<(IpAddr, OwnedFd)>);
    /// Stops receiving packets to IP multicast groups other than these.
    fn leave_others(&mut self, groups: &[IpAddr]);
    /// Descriptors that become readable when a packet arrives.
    fn descriptors(&self) -> Vec<BorrowedFd<'_>>;
    /// Totals since the start.
    fn counters(&self) -> PortCounters;
}

/// Handles the outcome of opening a packet.
fn take(opened: Opened<'_>, arrival: Arrival, icrc_errors: &mut u64, f: &mut dyn FnMut(Arrival, &[u8])) {
    match opened {
        Opened::Sealed(source, body) => f(Arrival { source, sealed: true, ..arrival }, body),
        Opened::Plain(body) => f(arrival, body),
        Opened::WrongIcrc => *icrc_errors += 1,
        Opened::Dropped => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::encryption::Seals;
    use std::net::UdpSocket;
    use std::os::fd::{AsFd, AsRawFd};
    use std::sync::Arc;
    use unirdma_formats::net::{FIRST_SOURCE_PORT, SOURCE_PORTS};
    use unirdma_formats::wire::ROCE_PORT;
    use unirdma_ipc::network::ECN_CAPABLE;

    /// Sets an option of type int; true if the kernel accepts it.
    pub fn set(fd: &impl AsFd, level: i32, name: i32, value: i32) -> bool {
        // SAFETY: the option is an int, whose size is given.
        unsafe { libc::setsockopt(fd.as_fd().as_raw_fd(), level, name, std::ptr::from_ref(&value).cast(), 4) == 0 }
    }

    /// A socket with the options that matter to a port, of those that the supervisor sets.
    fn socket(addr: IpAddr, port: u16) -> UdpSocket {
        let udp = UdpSocket::bind((addr, port)).unwrap();
        let options = match addr {
            IpAddr::V4(_) => [
                (libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_PROBE),
                (libc::IPPROTO_IP, libc::IP_TOS, ECN_CAPABLE),
                (libc::IPPROTO_IP, libc::IP_RECVTOS, 1),
                (libc::SOL_UDP, libc::UDP_GRO, 1),
            ],
            IpAddr::V6(_) => [
                (libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, libc::IP_PMTUDISC_PROBE),
                (libc::IPPROTO_IPV6, libc::IPV6_TCLASS, ECN_CAPABLE),
                (libc::SOL_UDP, libc::UDP_NO_CHECK6_RX, 1),
                (libc::SOL_UDP, libc::UDP_GRO, 1),
            ],
        };
        assert!(options.into_iter().all(|(level, name, value)| set(&udp, level, name, value)));
        for (force, plain) in [(libc::SO_RCVBUFFORCE, libc::SO_RCVBUF), (libc::SO_SNDBUFFORCE, libc::SO_SNDBUF)] {
            assert!([force, plain].into_iter().any(|name| set(&udp, libc::SOL_SOCKET, name, 16 << 20)));
        }
        udp
    }

    /// A port that has all sockets of an address.
    pub fn alone(addr: IpAddr) -> UdpPort {
        let mut port = UdpPort::new(FIRST_SOURCE_PORT, true, Seals::new(Arc::default(), "default"));
        port.add(addr, socket(addr, ROCE_PORT));
        for flow in FIRST_SOURCE_PORT..FIRST_SOURCE_PORT + SOURCE_PORTS {
            assert!(port.add_flow(addr, flow, socket(addr, flow)));
        }
        port
    }
}
