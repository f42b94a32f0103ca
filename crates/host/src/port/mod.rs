//! The port: RoCEv2 packets in UDP sockets, many to a system call.
//!
//! Sending joins packets of one size and path into one buffer that the kernel cuts (UDP_SEGMENT); receiving takes what
//! it has joined (UDP_GRO). The invariant CRC is sealed and checked here, since it covers the IP header.
//!
//! The ICRC covers the IPv4 Identification, which a UDP socket does not show. Packets that this port sends have the
//! number of their segment. Of any other packet [`UdpPort`] checks that *some* Identification makes the ICRC right (`icrc`);
//! [`PacketPort`] sees the IP header, and checks it as it is.

mod icrc;
pub(crate) mod open;
mod packet;
mod socket;
mod udp;

use std::net::IpAddr;
use std::os::fd::{BorrowedFd, OwnedFd};

use unirdma_rnic::{Arrival, Tx};

use crate::seal::Opened;
pub(crate) use packet::PacketPort;
pub(crate) use udp::UdpPort;

/// What carries packets to other hosts and back.
pub(crate) trait Port: Send {
    /// Seals and sends packets from the front of `tx`, as many as the network takes now.
    fn send(&mut self, tx: &mut Tx);
    /// Hands each packet that has come in, its ICRC checked and cut off, to `f`; a bounded number.
    fn receive(&mut self, f: &mut dyn FnMut(Arrival, &[u8])) -> bool;
    /// From now on packets to these IP multicast groups come in by these sockets.
    fn join(&mut self, sockets: Vec<(IpAddr, OwnedFd)>);
    /// From now on packets to other IP multicast groups than these do not come in.
    fn leave_others(&mut self, groups: &[IpAddr]);
    /// What becomes readable when a packet comes in.
    fn descriptors(&self) -> Vec<BorrowedFd<'_>>;
    /// Totals since the start.
    fn counters(&self) -> PortCounters;
}

/// Hands on what came of a packet.
fn take(opened: Opened<'_>, arrival: Arrival, icrc_errors: &mut u64, f: &mut dyn FnMut(Arrival, &[u8])) {
    match opened {
        Opened::Sealed(source, body) => f(Arrival { source, sealed: true, ..arrival }, body),
        Opened::Plain(body) => f(arrival, body),
        Opened::WrongIcrc => *icrc_errors += 1,
        Opened::Dropped => {}
    }
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
    use crate::seal::Seals;
    use std::net::SocketAddr;
    use std::sync::Arc;
    use unirdma_formats::net::{FIRST_SOURCE_PORT, SOURCE_PORTS};

    /// A port that has an address for itself.
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
