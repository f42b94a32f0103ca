//! The claims of an Ethernet frame about its sender: the source address of its packet, and the link-layer address that
//! ARP and neighbour discovery announce. RFC 826, 5227, 791, 8200, 4861, 6980, 7112.
//!
//! Frames are hostile. A frame that a receiver could read in another way than this parser is refused: VLAN tags, other
//! protocols, a chain of extension headers that does not fit into a packet's first fragment, contradictory options.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::Mac;
use crate::net::ETH_BYTES;

/// Why a sender may not send a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// The Ethernet source address belongs to somebody else.
    Mac,
    /// The source address of its IP packet belongs to somebody else.
    Address,
    /// ARP or neighbour discovery that announces the place of somebody else, or speaks as a router.
    Neighbour,
    /// Neither IPv4, IPv6 nor ARP, or with a VLAN tag.
    Protocol,
    /// Too short, or it could be read in two ways.
    Malformed,
}

/// The claims of a frame about its sender, beside the Ethernet source address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Claims {
    /// Source address of an IP packet; `None` for ARP, and for a packet of a sender that has no address yet.
    pub source: Option<IpAddr>,
    /// The address whose place it announces.
    pub located: Option<IpAddr>,
    /// The link-layer address that it announces.
    pub link: Option<Mac>,
    /// It speaks as a router: an advertisement or a redirect.
    pub router: bool,
}

const IPV4: u16 = 0x0800;
const ARP: u16 = 0x0806;
const IPV6: u16 = 0x86dd;
const IGMP: u8 = 2;
const TCP: u8 = 6;
const ICMPV6: u8 = 58;
const ROUTER_SOLICITATION: u8 = 133;
const SOLICITATION: u8 = 135;
const REDIRECT: u8 = 137;
/// Most extension headers of an IPv6 packet; each kind may occur once, or twice.
const MAX_EXTENSIONS: usize = 8;

impl Claims {
    /// Reads a frame.
    ///
    /// # Errors
    /// The frame cannot be read, or can be read in more than one way.
    pub fn read(frame: &[u8]) -> Result<Claims, Refused> {
        let (head, packet) = frame.split_first_chunk::<ETH_BYTES>().ok_or(Refused::Malformed)?;
        match u16::from_be_bytes([head[12], head[13]]) {
            IPV4 => ipv4(packet),
            ARP => arp(packet),
            IPV6 => ipv6(packet),
            _ => Err(Refused::Protocol),
        }
    }

    /// Checks that all claims are true of a sender with this MAC and these addresses.
    ///
    /// # Errors
    /// The claim that is not true.
    pub fn check(&self, mac: Mac, own: &[IpAddr]) -> Result<(), Refused> {
        let is_own = |a: &IpAddr| own.contains(a);
        if !self.source.iter().all(is_own) {
            return Err(Refused::Address);
        }
        if self.router || self.link.is_some_and(|l| l != mac) || !self.located.iter().all(is_own) {
            return Err(Refused::Neighbour);
        }
        Ok(())
    }
}

/// The kind of a frame, as the rules for traffic distinguish them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Talk {
    /// ARP or neighbour discovery: it looks for somebody, or answers.
    Neighbour,
    /// Asks for a TCP connection.
    Opening,
    /// Any other TCP segment.
    Segment,
    /// Anything else.
    Other,
}

/// Source, destination and kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heading {
    /// Source or sender; `None` for a sender that has no address yet.
    pub from: Option<IpAddr>,
    /// Destination; for ARP and a neighbour solicitation, the address that is looked for.
    pub to: IpAddr,
    /// Its kind.
    pub talk: Talk,
}

impl Heading {
    /// Reads a frame that [`Claims::read`] can read; `None` for others.
    pub fn read(frame: &[u8]) -> Option<Heading> {
        let (head, packet) = frame.split_first_chunk::<ETH_BYTES>()?;
        let named = |from: IpAddr| (!from.is_unspecified()).then_some(from);
        let v4 = |p: &[u8], at: usize| Some(IpAddr::from(*p.get(at..)?.first_chunk::<4>()?));
        match u16::from_be_bytes([head[12], head[13]]) {
            ARP => {
                let (from, to) = (v4(packet, 14)?, v4(packet, 24)?);
                Some(Heading { from: named(from), to, talk: Talk::Neighbour })
            }
            IPV4 => {
                let (from, to) = (v4(packet, 12)?, v4(packet, 16)?);
                let first = word(packet, 6)? & 0x1fff == 0;
                let payload = packet.get(usize::from(packet[0] & 15) * 4..);
                let talk = if packet[9] == TCP && first { segment(payload?)? } else { Talk::Other };
                Some(Heading { from: named(from), to, talk })
            }
            IPV6 => {
                let (from, to) = (v6(packet, 8)?, IpAddr::from(v6(packet, 24)?));
                let (talk, to) = match last_header(*packet.get(6)?, packet.get(40..)?).ok()? {
                    Last::Tcp(payload) => (segment(payload)?, to),
                    Last::Icmp { message, .. } => match *message.first()? {
                        SOLICITATION => (Talk::Neighbour, v6(message, 8)?.into()),
                        ROUTER_SOLICITATION..=REDIRECT => (Talk::Neighbour, to),
                        _ => (Talk::Other, to),
                    },
                    Last::Other => (Talk::Other, to),
                };
                Some(Heading { from: named(from.into()), to, talk })
            }
            _ => None,
        }
    }
}

fn segment(tcp: &[u8]) -> Option<Talk> {
    const SYN: u8 = 2;
    const ACK: u8 = 16;
    Some(if tcp.get(13)? & (SYN | ACK) == SYN { Talk::Opening } else { Talk::Segment })
}

/// Checks that a sender with this MAC and these addresses may send a frame.
///
/// # Errors
/// The reason why it may not.
pub fn check(frame: &[u8], mac: Mac, own: &[IpAddr]) -> Result<(), Refused> {
    if frame.get(6..12).ok_or(Refused::Malformed)? != mac.0 {
        return Err(Refused::Mac);
    }
    Claims::read(frame)?.check(mac, own)
}

fn word(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes([*bytes.get(at)?, *bytes.get(at + 1)?]))
}

fn v6(bytes: &[u8], at: usize) -> Option<Ipv6Addr> {
    bytes.get(at..)?.first_chunk::<16>().map(|b| Ipv6Addr::from(*b))
}

fn ipv4(p: &[u8]) -> Result<Claims, Refused> {
    let (h, _) = p.split_first_chunk::<20>().ok_or(Refused::Malformed)?;
    if h[0] >> 4 != 4 || h[0] & 15 < 5 {
        return Err(Refused::Malformed);
    }
    let source = Ipv4Addr::from([h[12], h[13], h[14], h[15]]);
    // A member of a multicast group may report it before it has an address (RFC 3376, 4.2.13). DHCP is not needed here.
    let nobody = source.is_unspecified() && h[9] == IGMP;
    Ok(Claims { source: (!nobody).then_some(source.into()), ..Claims::default() })
}

fn arp(p: &[u8]) -> Result<Claims, Refused> {
    let (h, _) = p.split_first_chunk::<28>().ok_or(Refused::Malformed)?;
    let operation = u16::from_be_bytes([h[6], h[7]]);
    // Ethernet and IPv4, whose addresses have 6 and 4 bytes; a request or a reply.
    if h[..6] != [0, 1, 8, 0, 6, 4] || !(1..=2).contains(&operation) {
        return Err(Refused::Neighbour);
    }
    let link = Mac([h[8], h[9], h[10], h[11], h[12], h[13]]);
    let sender = Ipv4Addr::from([h[14], h[15], h[16], h[17]]);
    // A probe asks whether anybody has an address, and announces nothing (RFC 5227, 2.1.1).
    let probe = sender.is_unspecified() && operation == 1;
    Ok(Claims { located: (!probe).then_some(sender.into()), link: Some(link), ..Claims::default() })
}

fn ipv6(p: &[u8]) -> Result<Claims, Refused> {
    let (h, rest) = p.split_first_chunk::<40>().ok_or(Refused::Malformed)?;
    if h[0] >> 4 != 6 {
        return Err(Refused::Malformed);
    }
    let source = v6(h, 8).ok_or(Refused::Malformed)?;
    let payload = rest.get(..word(h, 4).ok_or(Refused::Malformed)?.into()).ok_or(Refused::Malformed)?;
    match last_header(h[6], payload)? {
        Last::Icmp { message, fragmented } => icmpv6(message, source, fragmented),
        Last::Tcp(_) | Last::Other => Ok(Claims { source: Some(source.into()), ..Claims::default() }),
    }
}

/// The header at the end of the chain of extension headers.
enum Last<'a> {
    Icmp { message: &'a [u8], fragmented: bool },
    Tcp(&'a [u8]),
    Other,
}

fn last_header(mut next: u8, mut rest: &[u8]) -> Result<Last<'_>, Refused> {
    const HOP_BY_HOP: u8 = 0;
    const ROUTING: u8 = 43;
    const FRAGMENT: u8 = 44;
    const AUTHENTICATION: u8 = 51;
    const DESTINATION: u8 = 60;
    let mut fragmented = false;
    for _ in 0..=MAX_EXTENSIONS {
        let bytes = match next {
            ICMPV6 => return Ok(Last::Icmp { message: rest, fragmented }),
            TCP => return Ok(Last::Tcp(rest)),
            HOP_BY_HOP | ROUTING | DESTINATION => 8 + 8 * usize::from(*rest.get(1).ok_or(Refused::Malformed)?),
            AUTHENTICATION => 8 + 4 * usize::from(*rest.get(1).ok_or(Refused::Malformed)?),
            FRAGMENT => {
                let place = word(rest, 2).ok_or(Refused::Malformed)?;
                // Only the first fragment has headers.
                if place >> 3 != 0 {
                    return Ok(Last::Other);
                }
                fragmented = place & 1 != 0;
                8
            }
            _ => return Ok(Last::Other),
        };
        next = *rest.first().ok_or(Refused::Malformed)?;
        rest = rest.get(bytes..).ok_or(Refused::Malformed)?;
    }
    Err(Refused::Malformed)
}

/// A message of ICMPv6 from `source`.
fn icmpv6(m: &[u8], source: Ipv6Addr, fragmented: bool) -> Result<Claims, Refused> {
    const REPORT: u8 = 131;
    const DONE: u8 = 132;
    const ROUTER_ADVERTISEMENT: u8 = 134;
    const ADVERTISEMENT: u8 = 136;
    const REPORT_2: u8 = 143;
    const SOURCE_LINK: u8 = 1;
    const TARGET_LINK: u8 = 2;
    let kind = *m.first().ok_or(Refused::Malformed)?;
    let says = Claims { source: Some(source.into()), ..Claims::default() };
    // A sender without an address looks for duplicates and routers, and reports its groups (RFC 4861, 4.1 and 4.3; RFC
    // 3590).
    let unnamed = Claims { source: says.source.filter(|_| !source.is_unspecified()), ..says };
    let (options_at, claims) = match kind {
        REPORT | DONE | REPORT_2 => return Ok(unnamed),
        ROUTER_ADVERTISEMENT | REDIRECT => return Ok(Claims { router: true, ..says }),
        ROUTER_SOLICITATION => (8, unnamed),
        SOLICITATION => (24, unnamed),
        ADVERTISEMENT => (24, Claims { located: Some(v6(m, 8).ok_or(Refused::Malformed)?.into()), ..says }),
        _ => return Ok(says),
    };
    // A receiver must ignore it then (RFC 6980, 5).
    if fragmented {
        return Err(Refused::Neighbour);
    }
    let mut options = m.get(options_at..).ok_or(Refused::Malformed)?;
    let mut link = None;
    while let Some(&option) = options.first() {
        let bytes = 8 * usize::from(*options.get(1).ok_or(Refused::Malformed)?);
        let body = options.get(..bytes).filter(|b| !b.is_empty()).ok_or(Refused::Malformed)?;
        if matches!(option, SOURCE_LINK | TARGET_LINK) {
            let told = Mac(*body[2..].first_chunk().ok_or(Refused::Malformed)?);
            if link.replace(told).is_some_and(|l| l != told) {
                return Err(Refused::Malformed);
            }
        }
        options = &options[bytes..];
    }
    let located = claims.located.or(claims.source.filter(|_| link.is_some()));
    Ok(Claims { link, located, ..claims })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ME: Mac = Mac([2, 0, 10, 0, 0, 3]);
    const OTHER: Mac = Mac([2, 0, 10, 0, 0, 2]);

    fn ip(s: &str) -> IpAddr {
        s.parse().unwrap()
    }

    fn own() -> [IpAddr; 3] {
        ["10.0.0.3", "fd00::3", "fe80::aff:fe00:3"].map(ip)
    }

    fn tried(frame: &[u8]) -> Result<(), Refused> {
        check(frame, ME, &own())
    }

    fn ethernet(kind: u16, packet: &[u8]) -> Vec<u8> {
        [&[0xff; 6][..], &ME.0, &kind.to_be_bytes(), packet].concat()
    }

    fn octets(s: &str) -> Vec<u8> {
        match ip(s) {
            IpAddr::V4(a) => a.octets().to_vec(),
            IpAddr::V6(a) => a.octets().to_vec(),
        }
    }

    fn ipv4_from(source: &str, protocol: u8) -> Vec<u8> {
        let mut p = vec![0; 40];
        (p[0], p[9]) = (0x45, protocol);
        p[12..16].copy_from_slice(&octets(source));
        ethernet(IPV4, &p)
    }

    fn arp_of(operation: u8, link: Mac, sender: &str) -> Vec<u8> {
        let head = [0, 1, 8, 0, 6, 4, 0, operation];
        ethernet(ARP, &[&head[..], &link.0, &octets(sender), &[0; 6], &octets("10.0.0.1")].concat())
    }

    fn ipv6_from(source: &str, next: u8, payload: &[u8]) -> Vec<u8> {
        let length = (payload.len() as u16).to_be_bytes();
        let head = [0x60, 0, 0, 0, length[0], length[1], next, 255];
        ethernet(IPV6, &[&head[..], &octets(source), &octets("ff02::1"), payload].concat())
    }

    /// A message of neighbour discovery about `target`, with an option of kind `option`.
    fn nd(kind: u8, target: &str, option: u8, link: Mac) -> Vec<u8> {
        let head = [kind, 0, 0, 0, 0, 0, 0, 0];
        [&head[..], &octets(target), &[option, 1], &link.0].concat()
    }

    #[test]
    fn a_sender_speaks_for_itself_only() {
        let good = [
            ipv4_from("10.0.0.3", 17),
            ipv4_from("0.0.0.0", IGMP),
            arp_of(1, ME, "10.0.0.3"),
            arp_of(2, ME, "10.0.0.3"),
            arp_of(1, ME, "0.0.0.0"),
            ipv6_from("fd00::3", 17, &[0; 8]),
            ipv6_from("fe80::aff:fe00:3", ICMPV6, &nd(135, "fd00::1", 1, ME)),
            ipv6_from("fd00::3", ICMPV6, &nd(136, "fd00::3", 2, ME)),
            // Looks for duplicates, for routers, and reports a group: a report has an extension header.
            ipv6_from("::", ICMPV6, &nd(135, "fd00::3", 14, ME)),
            ipv6_from("::", ICMPV6, &[133, 0, 0, 0, 0, 0, 0, 0]),
            ipv6_from("::", 0, &[&[ICMPV6, 0, 5, 2, 0, 0, 1, 0][..], &[143, 0, 0, 0, 0, 0, 0, 0]].concat()),
            // Fragments: the first with its headers, and one that has none.
            ipv6_from("fd00::3", 44, &[&[17, 0, 0, 1, 0, 0, 0, 1][..], &[0; 16]].concat()),
            ipv6_from("fd00::3", 44, &[&[60, 0, 0, 9, 0, 0, 0, 1][..], &[0xff; 16]].concat()),
        ];
        for f in &good {
            assert_eq!(tried(f), Ok(()), "{f:02x?}");
        }
        let behind = |next: u8| {
            ipv6_from("fd00::3", next, &[&[ICMPV6, 0, 1, 4, 0, 0, 0, 0][..], &nd(136, "fd00::2", 2, ME)].concat())
        };
        let bad = [
            (ipv4_from("10.0.0.2", 17), Refused::Address),
            (ipv4_from("0.0.0.0", 17), Refused::Address),
            (ipv6_from("fd00::2", 17, &[0; 8]), Refused::Address),
            (ipv6_from("::", 17, &[0; 8]), Refused::Address),
            (ipv6_from("::ffff:10.0.0.3", 17, &[0; 8]), Refused::Address),
            (arp_of(2, ME, "10.0.0.2"), Refused::Neighbour),
            (arp_of(1, ME, "10.0.0.2"), Refused::Neighbour),
            (arp_of(2, OTHER, "10.0.0.3"), Refused::Neighbour),
            (arp_of(2, ME, "0.0.0.0"), Refused::Neighbour),
            (arp_of(4, ME, "10.0.0.3"), Refused::Neighbour),
            (ipv6_from("fd00::3", ICMPV6, &nd(136, "fd00::2", 2, ME)), Refused::Neighbour),
            (ipv6_from("fd00::3", ICMPV6, &nd(136, "fd00::3", 2, OTHER)), Refused::Neighbour),
            (ipv6_from("fd00::3", ICMPV6, &nd(135, "fd00::1", 1, OTHER)), Refused::Neighbour),
            (ipv6_from("fd00::2", ICMPV6, &nd(135, "fd00::1", 1, ME)), Refused::Address),
            (ipv6_from("::", ICMPV6, &nd(135, "fd00::3", 1, OTHER)), Refused::Neighbour),
            (ipv6_from("fe80::aff:fe00:3", ICMPV6, &nd(134, "fd00::1", 1, ME)), Refused::Neighbour),
            (ipv6_from("fe80::aff:fe00:3", ICMPV6, &nd(137, "fd00::1", 2, ME)), Refused::Neighbour),
            // An advertisement behind other headers, and in the first of several fragments.
            (behind(0), Refused::Neighbour),
            (behind(60), Refused::Neighbour),
            (behind(43), Refused::Neighbour),
            (
                ipv6_from("fd00::3", 44, &[&[ICMPV6, 0, 0, 1, 0, 0, 0, 1][..], &nd(136, "fd00::3", 2, ME)].concat()),
                Refused::Neighbour,
            ),
            // A first fragment that hides the next header from us, and a chain without an end.
            (ipv6_from("fd00::3", 44, &[60, 0, 0, 1, 0, 0, 0, 1, ICMPV6, 1, 0, 0, 0, 0, 0, 0]), Refused::Malformed),
            (ipv6_from("fd00::3", 60, &[60, 0, 0, 0, 0, 0, 0, 0].repeat(20)), Refused::Malformed),
            (ethernet(0x8100, &[&[0, 0][..], &ARP.to_be_bytes(), &[0; 28]].concat()), Refused::Protocol),
            (ethernet(0x88cc, &[0; 46]), Refused::Protocol),
            (ethernet(46, &[0; 46]), Refused::Protocol),
        ];
        for (f, why) in &bad {
            assert_eq!(tried(f), Err(*why), "{f:02x?}");
        }
        let mut stolen = good[0].clone();
        stolen[6..12].copy_from_slice(&OTHER.0);
        assert_eq!(tried(&stolen), Err(Refused::Mac));
    }

    #[test]
    fn two_options_that_differ_and_one_of_no_length_are_refused() {
        let two = [nd(135, "fd00::1", 1, ME), [&[1, 1][..], &OTHER.0].concat()].concat();
        assert_eq!(tried(&ipv6_from("fd00::3", ICMPV6, &two)), Err(Refused::Malformed));
        let endless = [nd(135, "fd00::1", 1, ME), vec![1, 0, 0, 0, 0, 0, 0, 0]].concat();
        assert_eq!(tried(&ipv6_from("fd00::3", ICMPV6, &endless)), Err(Refused::Malformed));
    }

    #[test]
    fn whatever_is_cut_is_refused() {
        let message = nd(136, "fd00::3", 2, ME);
        let whole = [
            (ipv4_from("10.0.0.3", 17), ETH_BYTES + 20),
            (arp_of(1, ME, "10.0.0.3"), ETH_BYTES + 28),
            (ipv6_from("fd00::3", ICMPV6, &message), ETH_BYTES + 40 + message.len()),
        ];
        for (frame, needed) in whole {
            for cut in 0..needed {
                assert_eq!(tried(&frame[..cut]), Err(Refused::Malformed), "{cut} bytes of {frame:02x?}");
            }
            assert_eq!(tried(&frame[..needed]), Ok(()));
        }
        // The packet is whole, but ends inside of the message.
        for cut in 1..message.len() {
            let refused = tried(&ipv6_from("fd00::3", ICMPV6, &message[..cut]));
            // A message without its option is a message.
            assert_eq!(refused, if cut == 24 { Ok(()) } else { Err(Refused::Malformed) }, "{cut} bytes");
        }
    }

    #[test]
    fn who_talks_to_whom_and_who_begins() {
        let to =
            |f: &mut Vec<u8>, at: usize, s: &str| f[ETH_BYTES + at..][..octets(s).len()].copy_from_slice(&octets(s));
        let heading = |from: &str, to: &str, talk| Some(Heading { from: Some(ip(from)), to: ip(to), talk });
        let mut tcp = ipv4_from("10.0.0.3", TCP);
        to(&mut tcp, 16, "10.0.0.1");
        for (flags, talk) in
            [(0x02, Talk::Opening), (0x12, Talk::Segment), (0x10, Talk::Segment), (0xc2, Talk::Opening)]
        {
            tcp[ETH_BYTES + 20 + 13] = flags;
            assert_eq!(Heading::read(&tcp), heading("10.0.0.3", "10.0.0.1", talk), "{flags:x}");
        }
        // A later fragment has no TCP header.
        (tcp[ETH_BYTES + 7], tcp[ETH_BYTES + 20 + 13]) = (9, 2);
        assert_eq!(Heading::read(&tcp), heading("10.0.0.3", "10.0.0.1", Talk::Other));
        let arp = arp_of(1, ME, "10.0.0.3");
        assert_eq!(Heading::read(&arp), heading("10.0.0.3", "10.0.0.1", Talk::Neighbour));
        assert_eq!(Heading::read(&arp_of(1, ME, "0.0.0.0")).unwrap().from, None);
        let asks = ipv6_from("fd00::3", ICMPV6, &nd(135, "fd00::1", 1, ME));
        assert_eq!(Heading::read(&asks), heading("fd00::3", "fd00::1", Talk::Neighbour));
        let ping = ipv6_from("fd00::3", ICMPV6, &[128, 0, 0, 0]);
        assert_eq!(Heading::read(&ping), heading("fd00::3", "ff02::1", Talk::Other));
        let mut syn = [0; 20];
        syn[13] = 2;
        let behind = [&[TCP, 0, 1, 4, 0, 0, 0, 0][..], &syn].concat();
        assert_eq!(Heading::read(&ipv6_from("fd00::3", 60, &behind)), heading("fd00::3", "ff02::1", Talk::Opening));
        assert_eq!(Heading::read(&ethernet(0x88cc, &[0; 46])), None);
        for frame in [tcp, arp, asks, ping] {
            (0..frame.len()).for_each(|n| _ = Heading::read(&frame[..n]));
        }
    }

    proptest! {
        #[test]
        fn no_frame_panics_or_passes_with_a_foreign_source(
            kind in prop::sample::select(vec![IPV4, ARP, IPV6, 0x8100]),
            next in prop::sample::select(vec![0u8, 17, 43, 44, 51, ICMPV6, 60]),
            mine in any::<bool>(),
            flips in prop::collection::vec((0usize..120, any::<u8>()), 0..6),
            mut packet in prop::collection::vec(any::<u8>(), 0..160),
        ) {
            if kind == IPV6 && packet.len() >= 40 {
                let length = (packet.len() as u16 - 40).to_be_bytes();
                (packet[0], packet[6]) = (0x60, next);
                packet[4..6].copy_from_slice(&length);
                if mine {
                    packet[8..24].copy_from_slice(&octets("fd00::3"));
                }
            }
            let mut frame = ethernet(kind, &packet);
            for (at, value) in flips {
                if let Some(b) = frame.get_mut(at) {
                    *b = value;
                }
            }
            let _ = Heading::read(&frame);
            if tried(&frame).is_ok() && frame[12..14] == IPV6.to_be_bytes() {
                let source = Ipv6Addr::from(*frame[22..].first_chunk::<16>().unwrap());
                prop_assert!(source.is_unspecified() || own().contains(&source.into()));
            }
        }
    }
}
