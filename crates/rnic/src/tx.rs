//! Packets that wait for the port.

use std::collections::BTreeSet;
use std::convert::Infallible;

use unirdma_formats::net::{ETH_BYTES, Flow, MAX_IP_UDP_BYTES, VXLAN_BYTES, vxlan, vxlan_from};
use unirdma_formats::wire::{ICRC_BYTES, MAX_HEADER_BYTES, Packet, padding};

use crate::path::{Arrival, Path};

/// Packets that wait for the port, in one flat buffer.
pub struct Tx {
    bytes: Box<[u8]>,
    used: usize,
    packets: Vec<TxPacket>,
    /// Number of packets at the beginning of `packets` that were sent already.
    gone: usize,
    sealed: Sealed,
}

/// Packets between virtual layers that carry a tail after their ICRC. The tail proves which group they come from. Only
/// the hosts know its content.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sealed {
    /// Bytes of a tail.
    pub tail: usize,
    /// All packets have a tail.
    pub all: bool,
    /// Packets to and from other groups with these numbers have a tail.
    pub across: BTreeSet<u32>,
}

impl Sealed {
    /// True if packets of this path have a tail. Packets of plain devices never have one; they leave from an address of
    /// the vRNIC ([`Path::from`]).
    fn holds(&self, path: &Path) -> bool {
        path.from.is_none() && (self.all || path.across.is_some_and(|(peer, _)| self.across.contains(&peer)))
    }
}

/// A packet of [`Tx`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TxPacket {
    /// Its source and its destination.
    pub path: Path,
    start: usize,
    len: usize,
    outer: usize,
    tail: usize,
}

/// Capacity of [`Tx`], bytes. While [`TX_FULL`] bytes or more are in use, QPs wait, and messages of connection
/// management and congestion notifications are lost.
const TX_BYTES: usize = 1 << 20;
const TX_FULL: usize = TX_BYTES - (64 << 10);
/// Where the P_Key lies in a BTH.
const PKEY_AT: usize = 2;

/// Most bytes that an encapsulation puts before a packet.
pub const MAX_OUTER_BYTES: usize = VXLAN_BYTES + ETH_BYTES + MAX_IP_UDP_BYTES;

/// MAC address, both ways, of the frames that carry datagrams between virtual layers. No vRNIC has it.
pub const DATAGRAM_MAC: [u8; 6] = *b"\x06RoCEv";

impl TxPacket {
    /// Length in bytes, with the ICRC and the tail.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Bytes after the ICRC. The RNIC does not know their content; see [`Sealed`].
    pub fn tail(&self) -> usize {
        self.tail
    }

    /// Bytes of the headers of an encapsulation before the base transport header: 0, or VXLAN, Ethernet, IP and UDP.
    pub fn outer(&self) -> usize {
        self.outer
    }

    /// Always false: a packet has at least a BTH.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Default for Tx {
    fn default() -> Self {
        Tx {
            bytes: vec![0; TX_BYTES].into_boxed_slice(),
            used: 0,
            packets: Vec::with_capacity(4096),
            gone: 0,
            sealed: Sealed::default(),
        }
    }
}

impl Tx {
    /// The packets that are not sent yet, in order.
    pub fn packets(&self) -> &[TxPacket] {
        &self.packets[self.gone..]
    }

    /// From now on these packets have room for a tail, and are accepted from other hosts only with a valid one.
    pub fn set_sealed(&mut self, sealed: Sealed) {
        self.sealed = sealed;
    }

    /// Exchanges the waiting packets with the packets of `other`. Later packets have tails as before.
    pub fn exchange(&mut self, other: &mut Tx) {
        std::mem::swap(self, other);
        std::mem::swap(&mut self.sealed, &mut other.sealed);
    }

    fn tail_of(&self, path: &Path) -> usize {
        if self.sealed.holds(path) { self.sealed.tail } else { 0 }
    }

    /// True if a packet that came in on a path may be taken. A sealed packet must come from the group of the path's
    /// peer, and a packet that must be sealed must be sealed.
    pub(crate) fn takes(&self, path: &Path, a: &Arrival) -> bool {
        if a.sealed { a.source == path.across.map(|(peer, _)| peer) } else { !self.sealed.holds(path) }
    }

    /// Bytes of a packet: headers, payload and padding, then room for the ICRC and the tail.
    pub fn bytes(&mut self, p: &TxPacket) -> &mut [u8] {
        &mut self.bytes[p.start..p.start + p.len]
    }

    /// Bytes of `n` packets from number `at` on, which lie one after the other.
    pub fn span(&self, at: usize, n: usize) -> &[u8] {
        let packets = &self.packets()[at..at + n];
        match (packets.first(), packets.last()) {
            (Some(first), Some(last)) => &self.bytes[first.start..last.start + last.len],
            _ => &[],
        }
    }

    /// The first `n` packets are sent, or lost.
    pub fn sent(&mut self, n: usize) {
        self.gone += n;
        if self.gone >= self.packets.len() {
            (self.used, self.gone) = (0, 0);
            self.packets.clear();
        }
    }

    /// Appends a packet that is complete except for its ICRC.
    pub fn push_raw(&mut self, path: Path, bytes: &[u8]) {
        let (start, end, tail) = (self.used, self.used + bytes.len(), self.tail_of(&path));
        let Some(room) = self.bytes.get_mut(start..end + ICRC_BYTES + tail) else { return };
        room[..bytes.len()].copy_from_slice(bytes);
        self.used = end + ICRC_BYTES + tail;
        self.packets.push(TxPacket { path, start, len: self.used - start, outer: 0, tail });
    }

    pub(crate) fn is_full(&self) -> bool {
        self.used >= TX_FULL
    }

    /// Appends a packet with this payload; inside VXLAN as with [`Tx::push_datagram`].
    pub(crate) fn put(&mut self, path: Path, inside: Option<(u32, Flow)>, head: &Packet<'_>, data: &[u8]) {
        let fill = |to: &mut [u8]| {
            to.copy_from_slice(data);
            Ok(())
        };
        let Ok(()): Result<(), Infallible> = self.push_datagram(path, inside, head, data.len(), fill);
    }

    /// Appends a packet whose payload `fill` writes; nothing if it fails.
    pub(crate) fn push<E>(
        &mut self,
        path: Path,
        head: &Packet<'_>,
        len: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        self.push_datagram(path, None, head, len, fill)
    }

    /// As [`Tx::push`], for a datagram: inside VXLAN with this network identifier, in an IP packet of this flow.
    pub(crate) fn push_datagram<E>(
        &mut self,
        path: Path,
        inside: Option<(u32, Flow)>,
        head: &Packet<'_>,
        len: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let (start, tail) = (self.used, self.tail_of(&path));
        let lost = path.cut || path.to.is_unspecified();
        if lost || self.bytes.len() - start < MAX_OUTER_BYTES + MAX_HEADER_BYTES + len + 3 + ICRC_BYTES + tail {
            // Callers ask `is_full` first, so that there is room. If there is none, the packet counts as lost in the
            // network.
            return Ok(());
        }
        let mut outer = 0;
        if let Some((vni, flow)) = inside {
            let mut put = |bytes: &[u8]| {
                self.bytes[start + outer..start + outer + bytes.len()].copy_from_slice(bytes);
                outer += bytes.len();
            };
            put(&path.across.map_or(vxlan(vni), |(_, own)| vxlan_from(vni, own)));
            put(&ethernet(&flow));
            let udp = head.opcode.header_bytes() + len + padding(len) + ICRC_BYTES;
            outer += flow.put(&mut self.bytes[start + outer..], udp);
        }
        let at = start + outer + head.put(&mut self.bytes[start + outer..], len);
        if inside.is_none() {
            self.bytes[start + PKEY_AT..][..2].copy_from_slice(&path.pkeys.0.to_be_bytes());
        }
        fill(&mut self.bytes[at..at + len])?;
        let end = at + len + padding(len);
        self.bytes[at + len..end].fill(0);
        self.used = end + ICRC_BYTES + tail;
        self.packets.push(TxPacket { path, start, len: self.used - start, outer, tail });
        Ok(())
    }
}

/// The Ethernet header of a datagram between virtual layers.
pub(crate) fn ethernet(flow: &Flow) -> [u8; ETH_BYTES] {
    let mut b = [0; ETH_BYTES];
    b[..6].copy_from_slice(&DATAGRAM_MAC);
    b[6..12].copy_from_slice(&DATAGRAM_MAC);
    b[12..].copy_from_slice(&flow.ether_type().to_be_bytes());
    b
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_takes_what_its_peers_group_has_sealed_or_what_need_not_be() {
        let host = [192, 168, 7, 2].into();
        let own = Path::new(host).between(7, 7);
        let [red, blue] = [8, 9].map(|vni| Path::new(host).between(7, vni));
        let device = Path { from: Some([192, 168, 7, 1].into()), ..Path::new(host) };
        let plain =
            Arrival { from: host, port: 0, to: host, congested: false, group: None, source: None, sealed: false };
        let sealed = |source| Arrival { source, sealed: true, ..plain };
        let arrivals = [plain, sealed(None), sealed(Some(8)), sealed(Some(9))];
        let mut tx = Tx::default();
        // Packets within the group, of groups red and blue, and of a plain device: which are taken, and which sent ones
        // have a tail.
        let mut table = |all: bool, across: &[u32]| {
            tx.set_sealed(Sealed { tail: 28, all, across: across.iter().copied().collect() });
            [own, red, blue, device].map(|p| (arrivals.map(|a| tx.takes(&p, &a)), tx.tail_of(&p)))
        };
        let (yes, no) = (true, false);
        let [of_own, of_red, of_blue] = [[no, yes, no, no], [no, no, yes, no], [no, no, no, yes]];
        let open = |sealed: [bool; 4]| ([yes, sealed[1], sealed[2], sealed[3]], 0);
        assert_eq!(table(no, &[]), [open(of_own), open(of_red), open(of_blue), open(of_own)]);
        assert_eq!(table(no, &[8]), [open(of_own), (of_red, 28), open(of_blue), open(of_own)]);
        assert_eq!(table(yes, &[8]), [(of_own, 28), (of_red, 28), (of_blue, 28), open(of_own)]);
    }
}
