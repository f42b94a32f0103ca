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
pub(crate) mod open;
mod packet;
mod socket;
mod udp;

use std::net::IpAddr;
use std::os::fd::{BorrowedFd, OwnedFd};

use unirdma_rnic::{Arrival, Tx};

use crate::encryption::Opened;
pub(crate) use packet::PacketPort;
pub(crate) use udp::UdpPort;

/// Transport of packets to and from other hosts.
pub(crate) trait Port: Send {
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

/// Counters of a port.
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

impl std::ops::AddAssign for PortCounters {
    fn add_assign(&mut self, o: Self) {
        let PortCounters { sent, received, icrc_errors, send_errors } = self;
        *sent += o.sent;
        *received += o.received;
        *icrc_errors += o.icrc_errors;
        *send_errors += o.send_errors;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::encryption::Seals;
    use std::net::SocketAddr;
    use std::sync::Arc;
    use unirdma_formats::net::{FIRST_SOURCE_PORT, SOURCE_PORTS};

    /// A port that has all sockets of an address.
    pub fn alone(addr: IpAddr) -> UdpPort {
        let mut port = UdpPort::new(FIRST_SOURCE_PORT, true, Seals::new(Arc::default(), "default"));
        port.add(addr, open::share(open::Kind::Roce, addr, open::Options::default()).unwrap());
        for flow in FIRST_SOURCE_PORT..FIRST_SOURCE_PORT + SOURCE_PORTS {
            let from = SocketAddr::new(addr, flow);
            assert!(port.add_flow(addr, flow, open::flow(from, open::Options::default()).unwrap()));
        }
        port
    }
}
