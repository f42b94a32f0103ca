//! The port as packet sockets: it sees the IPv4 header of incoming packets, and checks the ICRC with it.

use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use unirdma_formats::net::Flow;
use unirdma_formats::wire::Envelope;
use unirdma_ipc::counters::PortCounters;
use unirdma_rnic::{Arrival, Tx};

use super::icrc::open;
use super::socket::{Inbox, ip_header_at, is_behind, is_congested};
use super::{Port, UdpPort, take};
use crate::encryption::Opened;

/// Bytes of a `virtio_net_hdr`.
const VNET_BYTES: usize = 10;

/// Packet sockets for incoming IPv4 packets; the UDP port does everything else.
pub(crate) struct PacketPort {
    udp: UdpPort,
    /// Each socket with a flag: it is read too slowly, which is reported to senders as congestion.
    sockets: Vec<(OwnedFd, bool)>,
    inbox: Inbox,
    received: u64,
    icrc_errors: u64,
}

impl PacketPort {
    /// A port that receives packets to these addresses by these packet sockets.
    pub fn new(mut udp: UdpPort, sockets: Vec<(Ipv4Addr, OwnedFd)>) -> Self {
        sockets.iter().for_each(|s| udp.silence(s.0.into()));
        let sockets = sockets.into_iter().map(|s| (s.1, false)).collect();
        PacketPort { udp, sockets, inbox: Inbox::new(), received: 0, icrc_errors: 0 }
    }
}

/// Size of the packets into which this one has to be split, according to the `virtio_net_hdr` before it; `None` for a
/// single packet.
fn segment_size(header: &[u8; VNET_BYTES]) -> Option<usize> {
    let size = u16::from_ne_bytes([header[4], header[5]]);
    (header[1] != 0 && size > 0).then_some(size.into())
}

impl Port for PacketPort {
    fn send(&mut self, tx: &mut Tx) {
        self.udp.send(tx);
    }

    fn receive(&mut self, f: &mut dyn FnMut(Arrival, &[u8])) -> bool {
        let PacketPort { udp, sockets, inbox, received, icrc_errors } = self;
        let mut any = udp.receive(f);
        let seals = &mut udp.seals;
        for (s, behind) in sockets {
            let taken = inbox.receive(s.as_fd(), |i| {
                let Some((head, frame)) = i.bytes.split_first_chunk_mut::<VNET_BYTES>() else { return };
                let Some(packet) = ip_header_at(i.header).and_then(|at| frame.get_mut(at..)) else { return };
                // A packet with a damaged header is ignored; the kernel drops such packets, too.
                let Some((flow, payload)) = Flow::parse(packet) else { return };
                let (at, len) = (flow.header_bytes(), payload.len());
                let Some(payload) = packet.get_mut(at..at + len) else { return };
                let congested = is_congested(flow.traffic_class) || *behind;
                let arrival = Arrival {
                    from: flow.src,
                    port: flow.src_port,
                    to: flow.dst,
                    congested,
                    group: None,
                    source: None,
                    sealed: false,
                };
                let segment = segment_size(head).unwrap_or(payload.len()).max(1);
                let mut opener = seals.opener(flow.src);
                for (number, packet) in payload.chunks_mut(segment).enumerate() {
                    *received += 1;
                    let ip_id = flow.ip_id.wrapping_add(number as u16);
                    let e = Envelope { ip_id, ..flow.envelope() };
                    let opened = match &mut opener {
                        Some(opener) => opener.open(flow.dst, packet, |p| open(&e, p)),
                        None => Opened::unsealed(packet, |p| open(&e, p)),
                    };
                    take(opened, arrival, icrc_errors, f);
                }
            });
            any |= taken > 0;
            *behind = is_behind(s.as_fd(), taken);
        }
        any
    }

    fn join(&mut self, sockets: Vec<(IpAddr, OwnedFd)>) {
        self.udp.join(sockets);
    }

    fn leave_others(&mut self, groups: &[IpAddr]) {
        self.udp.leave_others(groups);
    }

    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        let packets = self.sockets.iter().map(|s| s.0.as_fd());
        packets.chain(self.udp.descriptors()).collect()
    }

    fn counters(&self) -> PortCounters {
        let c = self.udp.counters();
        PortCounters { received: c.received + self.received, icrc_errors: c.icrc_errors + self.icrc_errors, ..c }
    }
}
