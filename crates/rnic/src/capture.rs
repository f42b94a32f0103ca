//! Capture: packets of the network as they are, and those that a message between two vRNICs of this host would have been.
//!
//! It lies in the RNIC, not below the port, because only here it is known which vRNIC a packet belongs to. While nobody
//! captures it costs one look at an `Option`. A packet that is captured costs one copy of the bytes that are kept;
//! whoever takes the packets off the RNIC makes pcap records of them, with their ICRCs, without having the RNIC.

use std::net::IpAddr;

use unirdma_formats::net::{Flow, MAX_IP_UDP_BYTES, VXLAN_PORT, seal};
use unirdma_formats::wire::ICRC_BYTES;
use unirdma_formats::{Gid, pcap};

use crate::objects::{MAX_MTU, VnicId};
use crate::path::Path;

/// What is captured, and how.
#[derive(Clone, Debug, Default)]
pub struct Capture {
    /// Only packets of this vRNIC.
    pub vnic: Option<VnicId>,
    /// Bytes of a packet that are kept.
    pub snap: u32,
    /// Nanoseconds since 1970 when the RNIC's clock was 0.
    pub epoch_ns: u64,
    /// This host's addresses.
    pub hosts: Vec<IpAddr>,
}

/// A packet that was captured.
struct Seen {
    at_ns: u64,
    flow: Flow,
    /// Bytes of the body that belong to an encapsulation.
    outer: usize,
    /// Bytes of the body, its ICRC included.
    all: usize,
    /// How many of them are kept: all, or those that come before the cut.
    kept: usize,
}

/// Packets that were captured and are not pcap records yet.
#[derive(Default)]
pub struct Captured {
    snap: usize,
    seen: Vec<Seen>,
    /// What is kept of the bodies, one after the other.
    bytes: Vec<u8>,
}

/// Most bytes of padding after a payload.
const MOST_PADDING: usize = 3;

/// Memory of the packets between two calls of [`crate::Core::take_captured`], bytes; more packets are lost.
const MAX_BYTES: usize = 8 << 20;

impl Captured {
    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.seen.is_empty()
    }

    /// Forgets them, and keeps the memory for others.
    pub fn clear(&mut self) {
        self.seen.clear();
        self.bytes.clear();
    }

    /// Makes a pcap record of each packet, and calls `f` with it.
    pub fn records(&self, mut f: impl FnMut(&[u8])) {
        let (mut record, mut rest) = (Vec::new(), &self.bytes[..]);
        for s in &self.seen {
            let (body, others) = rest.split_at(s.kept);
            rest = others;
            let mut head = [0; MAX_IP_UDP_BYTES];
            let n = s.flow.put(&mut head, s.all);
            let size = self.snap.min(n + s.kept);
            record.clear();
            record.extend(pcap::record(s.at_ns, size as u32, (n + s.all) as u32));
            record.extend_from_slice(&head[..n]);
            record.extend_from_slice(body);
            if s.kept == s.all {
                seal(&mut record[pcap::RECORD_BYTES + n..], s.outer, s.flow.envelope());
            }
            record.truncate(pcap::RECORD_BYTES + size);
            f(&record);
        }
    }
}

/// A capture that runs.
pub(crate) struct Tap {
    pub what: Capture,
    pub captured: Captured,
    pub lost: u64,
    /// Room for the payload of one packet.
    pub payload: Box<[u8]>,
    /// What a job has copied of the message whose packets are captured, and from which byte on.
    pub copied: (u64, Vec<u8>),
}

impl Tap {
    pub fn new(what: Capture) -> Self {
        let captured = Captured { snap: what.snap as usize, ..Captured::default() };
        Tap { captured, what, lost: 0, payload: vec![0; MAX_MTU as usize].into(), copied: (0, Vec::new()) }
    }

    /// Appends a packet: `flow` says what is in its IP and UDP headers, and `parts` are the bytes of its body, at least those that are
    /// kept; if payload is missing, no more is kept. The body has `all` bytes, of which the last four are the ICRC. `outer` of its first
    /// bytes belong to an encapsulation.
    pub fn packet(&mut self, now: u64, flow: &Flow, outer: usize, parts: &[&[u8]], all: usize) {
        let (c, before) = (&mut self.captured, flow.header_bytes());
        // The ICRC covers all bytes before it.
        let whole = c.snap + ICRC_BYTES >= before + all;
        let kept = if whole { all } else { c.snap.saturating_sub(before) };
        let given = parts.iter().map(|p| p.len()).sum::<usize>();
        let kept = if given + MOST_PADDING + ICRC_BYTES < all { kept.min(given) } else { kept };
        let used = c.bytes.len() + c.seen.len() * size_of::<Seen>();
        if used + kept + size_of::<Seen>() > MAX_BYTES {
            self.lost += 1;
            return;
        }
        c.seen.push(Seen { at_ns: self.what.epoch_ns + now, flow: *flow, outer, all, kept });
        let end = c.bytes.len() + kept;
        for part in parts {
            let n = part.len().min(end - c.bytes.len());
            c.bytes.extend_from_slice(&part[..n]);
        }
        c.bytes.resize(end, 0);
    }

    /// Exchanges the packets so far for `empty`, which is cleared.
    pub fn take(&mut self, empty: &mut Captured) {
        empty.clear();
        empty.snap = self.captured.snap;
        std::mem::swap(&mut self.captured, empty);
    }

    /// The flow between this host and another.
    pub fn outer_flow(&self, path: &Path, inward: bool, encapsulated: bool) -> Flow {
        let host = path.to;
        let own = path.from.or_else(|| self.what.hosts.iter().copied().find(|h| h.is_ipv4() == host.is_ipv4()));
        let (own, host) = (Gid::from_ip(own.unwrap_or(host)), Gid::from_ip(host));
        let flow = if inward { Flow::roce(host, own) } else { Flow::roce(own, host) };
        let (src_port, dst_port) = if encapsulated { (VXLAN_PORT, VXLAN_PORT) } else { (path.port, flow.dst_port) };
        Flow { src_port, dst_port, traffic_class: path.class, ..flow }
    }
}
