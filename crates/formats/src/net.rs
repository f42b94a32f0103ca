//! The headers below RoCEv2: IPv4 or IPv6, UDP, and VXLAN around an Ethernet frame.
//!
//! They are needed wherever a whole packet is seen: in the 40 bytes that a datagram's receiver finds before its data,
//! in the encapsulation of datagrams between hosts, and in captures. RFC 791, 8200, 768, 7348; annex A17.

use std::net::IpAddr;

use crate::Gid;
use crate::wire::{Envelope, ICRC_BYTES, icrc};

/// Bytes of the area before a datagram's data (IBTA vol. 1, 8.3; annex A17).
pub const GRH_BYTES: usize = 40;
/// Bytes of an Ethernet header.
pub const ETH_BYTES: usize = 14;
/// Most bytes of IP and UDP headers.
pub const MAX_IP_UDP_BYTES: usize = 48;
/// Bytes of a VXLAN header.
pub const VXLAN_BYTES: usize = 8;
/// UDP port of VXLAN.
pub const VXLAN_PORT: u16 = 4789;
/// First UDP source port of flows; the last one is [`SOURCE_PORTS`] - 1 higher. Each port is a socket, so that not all
/// 16,384 are used.
pub const FIRST_SOURCE_PORT: u16 = 0xc000;
/// Number of UDP source ports that flows are spread over.
pub const SOURCE_PORTS: u16 = 64;
/// Hop limit of packets whose sender gave none.
pub const HOP_LIMIT: u8 = 64;
const IP_UDP: u8 = 17;

/// The two ends of a packet, and the other fields of its IP header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Flow {
    /// Source address.
    pub src: IpAddr,
    /// Destination address, of the same family.
    pub dst: IpAddr,
    /// UDP source port.
    pub src_port: u16,
    /// UDP destination port.
    pub dst_port: u16,
    /// Type of service, or traffic class.
    pub traffic_class: u8,
    /// Time to live, or hop limit.
    pub hop_limit: u8,
    /// IPv4 Identification.
    pub ip_id: u16,
}

impl Flow {
    /// RoCEv2 from one GID to another.
    pub fn roce(src: Gid, dst: Gid) -> Flow {
        let (mut src, mut dst) = (src.ip(), dst.ip());
        if src.is_ipv4() != dst.is_ipv4() {
            let v6 = |ip: IpAddr| if let IpAddr::V4(a) = ip { a.to_ipv6_mapped().into() } else { ip };
            (src, dst) = (v6(src), v6(dst));
        }
        let port = crate::wire::ROCE_PORT;
        Flow { src, dst, src_port: port, dst_port: port, traffic_class: 0, hop_limit: HOP_LIMIT, ip_id: 0 }
    }

    /// The header fields that the ICRC of its packets covers.
    pub fn envelope(&self) -> Envelope {
        Envelope { src: self.src, dst: self.dst, src_port: self.src_port, ip_id: self.ip_id }
    }

    /// Ethernet type of its packets.
    pub fn ether_type(&self) -> u16 {
        if self.src.is_ipv4() { 0x0800 } else { 0x86dd }
    }

    /// Bytes of its IP and UDP headers.
    pub fn header_bytes(&self) -> usize {
        self.ip_bytes() + 8
    }

    fn ip_bytes(&self) -> usize {
        if self.src.is_ipv4() { 20 } else { 40 }
    }

    /// Writes the IP header of a packet with `after` bytes after it. Returns the length of the header.
    fn put_ip(&self, out: &mut [u8], after: usize) -> usize {
        let n = self.ip_bytes();
        let out = &mut out[..n];
        match (self.src, self.dst) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => {
                out.copy_from_slice(&[0; 20]);
                (out[0], out[1]) = (0x45, self.traffic_class);
                out[2..4].copy_from_slice(&((n + after) as u16).to_be_bytes());
                out[4..6].copy_from_slice(&self.ip_id.to_be_bytes());
                // Do not fragment.
                (out[6], out[8], out[9]) = (0x40, self.hop_limit, IP_UDP);
                out[12..16].copy_from_slice(&src.octets());
                out[16..20].copy_from_slice(&dst.octets());
                let sum = checksum(out);
                out[10..12].copy_from_slice(&sum.to_be_bytes());
            }
            (src, dst) => {
                let class = u32::from(self.traffic_class);
                out[..4].copy_from_slice(&(6 << 28 | class << 20).to_be_bytes());
                out[4..6].copy_from_slice(&(after as u16).to_be_bytes());
                (out[6], out[7]) = (IP_UDP, self.hop_limit);
                out[8..24].copy_from_slice(&Gid::from_ip(src).0);
                out[24..40].copy_from_slice(&Gid::from_ip(dst).0);
            }
        }
        n
    }

    /// Writes IP and UDP headers of a packet with `payload` bytes of UDP payload. Returns their length. The UDP
    /// checksum is 0, none (annex A17).
    ///
    /// # Panics
    /// If `out` is shorter than [`Flow::header_bytes`].
    pub fn put(&self, out: &mut [u8], payload: usize) -> usize {
        let n = self.put_ip(out, 8 + payload);
        let udp = &mut out[n..n + 8];
        udp[..2].copy_from_slice(&self.src_port.to_be_bytes());
        udp[2..4].copy_from_slice(&self.dst_port.to_be_bytes());
        udp[4..6].copy_from_slice(&((8 + payload) as u16).to_be_bytes());
        udp[6..].fill(0);
        n + 8
    }

    /// The first bytes of a received datagram, before its data: the IPv6 header, or 20 undefined bytes and the IPv4
    /// header.
    pub fn grh(&self, payload: usize) -> [u8; GRH_BYTES] {
        let mut b = [0; GRH_BYTES];
        let skip = GRH_BYTES - self.ip_bytes();
        self.put_ip(&mut b[skip..], 8 + payload);
        b
    }

    /// Reads IP and UDP headers: the flow and the UDP payload. `None` for anything else, fragments and IP options too.
    pub fn parse(packet: &[u8]) -> Option<(Flow, &[u8])> {
        let (src, dst, rest, traffic_class, hop_limit, ip_id): (IpAddr, IpAddr, _, _, _, _) = match packet.first()? >> 4
        {
            4 => {
                let (h, _) = packet.split_first_chunk::<20>()?;
                let total = usize::from(u16::from_be_bytes([h[2], h[3]]));
                let fragment = u16::from_be_bytes([h[6], h[7]]) & 0x3fff != 0;
                if h[0] != 0x45 || fragment || h[9] != IP_UDP || checksum(h) != 0 {
                    return None;
                }
                let ip = |at: usize| IpAddr::from([h[at], h[at + 1], h[at + 2], h[at + 3]]);
                let id = u16::from_be_bytes([h[4], h[5]]);
                (ip(12), ip(16), packet.get(20..total)?, h[1], h[8], id)
            }
            6 => {
                let (h, rest) = packet.split_first_chunk::<40>()?;
                if h[6] != IP_UDP {
                    return None;
                }
                let ip = |at: usize| Gid(h[at..at + 16].try_into().unwrap_or_default());
                let v6 = |g: Gid| IpAddr::from(g.0);
                let class = (u16::from_be_bytes([h[0], h[1]]) >> 4) as u8;
                (v6(ip(8)), v6(ip(24)), rest.get(..usize::from(u16::from_be_bytes([h[4], h[5]])))?, class, h[7], 0)
            }
            _ => return None,
        };
        let (udp, _) = rest.split_first_chunk::<8>()?;
        let word = |at: usize| u16::from_be_bytes([udp[at], udp[at + 1]]);
        let payload = rest.get(8..usize::from(word(4)))?;
        Some((Flow { src, dst, src_port: word(0), dst_port: word(2), traffic_class, hop_limit, ip_id }, payload))
    }
}

/// The two GIDs in a datagram's first 40 bytes, source first; `None` if they are no header.
pub fn parse_grh(grh: &[u8; GRH_BYTES]) -> Option<(Gid, Gid)> {
    let v4 = &grh[20..];
    if grh[0] >> 4 != 6 {
        let ip = |at: usize| Gid::from_ip([v4[at], v4[at + 1], v4[at + 2], v4[at + 3]].into());
        return (v4[0] == 0x45 && checksum(v4) == 0).then(|| (ip(12), ip(16)));
    }
    let gid = |at: usize| Gid(grh[at..at + 16].try_into().unwrap_or_default());
    Some((gid(8), gid(24)))
}

/// UDP source port of a flow, by which networks spread flows over equal paths (annex A17, 17.9.2). It depends on the
/// 20-bit flow label or, if that is 0, on the numbers of the two ends. It is one of [`SOURCE_PORTS`] ports from `first`
/// on.
pub fn source_port(first: u16, flow_label: u32, own: u32, peer: u32) -> u16 {
    let both = u64::from(own) * u64::from(peer);
    let all = if flow_label == 0 { both } else { flow_label.into() };
    let folded = (0..64).step_by(6).fold(0, |folded, at| folded ^ all >> at) as u16;
    first + folded % SOURCE_PORTS
}

/// The VXLAN header of network identifier `vni`.
pub fn vxlan(vni: u32) -> [u8; VXLAN_BYTES] {
    let mut b = [0; VXLAN_BYTES];
    b[0] = 8;
    b[4..].copy_from_slice(&(vni << 8).to_be_bytes());
    b
}

/// The VXLAN header of network identifier `vni`, from a sender whose own network is `from`. The first three reserved
/// bytes contain `from`.
pub fn vxlan_from(vni: u32, from: u32) -> [u8; VXLAN_BYTES] {
    let mut b = vxlan(vni);
    b[1..4].copy_from_slice(&from.to_be_bytes()[1..]);
    b
}

/// The own network of the sender of a packet with this VXLAN header; `None` if that is the network of the packet.
pub fn vxlan_source(header: &[u8; VXLAN_BYTES]) -> Option<u32> {
    let from = u32::from_be_bytes([0, header[1], header[2], header[3]]);
    (from != 0).then_some(from)
}

/// Puts the ICRC at the end of a packet, whose base transport header is at `outer`. `plain` is its envelope unless it
/// carries an encapsulation with it: VXLAN, Ethernet, IP and UDP headers.
pub fn seal(bytes: &mut [u8], outer: usize, plain: Envelope) {
    let inside = bytes.get(VXLAN_BYTES + ETH_BYTES..).filter(|_| outer > 0).and_then(Flow::parse);
    let e = inside.map_or(plain, |(f, _)| f.envelope());
    let Some(end) = bytes.len().checked_sub(ICRC_BYTES).filter(|&n| n >= outer) else { return };
    let crc = icrc(&e, &bytes[outer..end]);
    bytes[end..].copy_from_slice(&crc.to_le_bytes());
}

/// Internet checksum (RFC 1071); 0 over a header with a correct checksum.
fn checksum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks(2).map(|c| u32::from(u16::from_be_bytes([c[0], c.get(1).copied().unwrap_or(0)])));
    let sum: u32 = words.sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    !((folded & 0xffff) + (folded >> 16)) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gid(s: &str) -> Gid {
        Gid::from_ip(s.parse().unwrap())
    }

    #[test]
    fn flows_have_source_ports() {
        let ports = |label: &dyn Fn(u32) -> u32| {
            let all = (0..1000).map(|i| source_port(FIRST_SOURCE_PORT, label(i), 0x12_3456 + i, 0xab_cdef));
            all.collect::<std::collections::BTreeSet<u16>>()
        };
        let all: Vec<u16> = (FIRST_SOURCE_PORT..FIRST_SOURCE_PORT + SOURCE_PORTS).collect();
        assert!(ports(&|_| 0).into_iter().eq(all.iter().copied()));
        assert!(ports(&|i| 1 + i * 977).into_iter().eq(all));
        assert_eq!(ports(&|_| 0xf_ffff).len(), 1);
        assert_eq!(source_port(7000, 0, 5, 7), source_port(7000, 0, 7, 5));
        assert!((7000..7064).contains(&source_port(7000, 0, 5, 7)));
    }

    #[test]
    fn headers_are_read_as_they_were_written() {
        for (a, b) in [("10.0.0.1", "10.0.0.2"), ("fd00::1", "fd00::2"), ("fd00::1", "10.0.0.2")] {
            let flow = Flow { traffic_class: 0xb8, hop_limit: 3, ..Flow::roce(gid(a), gid(b)) };
            let mut packet = vec![0; flow.header_bytes()];
            assert_eq!(flow.put(&mut packet, 7), packet.len());
            packet.extend([9; 7]);
            assert_eq!(Flow::parse(&packet), Some((flow, &[9; 7][..])));
            for cut in 0..packet.len() {
                assert_eq!(Flow::parse(&packet[..cut]), None, "{cut} bytes");
            }
            assert_eq!(parse_grh(&flow.grh(7)), Some((gid(a), gid(b))), "{a} {b}");
        }
        assert_eq!(parse_grh(&[0; GRH_BYTES]), None);
    }

    #[test]
    fn the_checksum_is_that_of_rfc_1071() {
        let header = [0x45, 0, 0, 0x34, 0, 0, 0x40, 0, 0x40, 0x11, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2];
        assert_eq!(checksum(&header), 0x26b7);
        assert_eq!(checksum(&[]), 0xffff);
    }

    #[test]
    fn vxlan_carries_24_bits() {
        assert_eq!(vxlan(0x12_3456), [8, 0, 0, 0, 0x12, 0x34, 0x56, 0]);
        assert_eq!(vxlan_from(0x12_3456, 0xabcd), [8, 0, 0xab, 0xcd, 0x12, 0x34, 0x56, 0]);
        assert_eq!((vxlan_source(&vxlan(7)), vxlan_source(&vxlan_from(7, 9))), (None, Some(9)));
    }
}
