//! Capture of packets: packets of the network, and the packets that a message between two vRNICs of this host would
//! have been.
//!
//! Capture is part of the RNIC, not of the port below it, because only the RNIC knows which vRNIC a packet belongs to.
//! Without a capture the cost is one test of an `Option`. A captured packet costs one copy of the bytes that are kept.
//! The caller takes the packets, and makes pcap records with ICRCs from them without holding the RNIC.

use std::net::IpAddr;

use unirdma_formats::net::{Flow, MAX_IP_UDP_BYTES, VXLAN_PORT, seal};
use unirdma_formats::wire::ICRC_BYTES;
use unirdma_formats::{Gid, pcap};

use crate::objects::{MAX_MTU, VrnicId};
use crate::path::Path;

/// Parameters of a capture.
#[derive(Clone, Debug, Default)]
pub struct Capture {
    /// Captures only packets of this vRNIC; `None` captures all.
    pub vrnic: Option<VrnicId>,
    /// Most bytes of a packet that are kept.
    pub snap: u32,
    /// The time at which the RNIC's clock was 0, ns since 1970.
    pub epoch_ns: u64,
    /// This host's addresses.
    pub hosts: Vec<IpAddr>,
}

/// A captured packet.
struct Seen {
    at_ns: u64,
    flow: Flow,
    /// Number of bytes at the beginning of the body that belong to an encapsulation.
    outer: usize,
    /// Number of bytes of the body, its ICRC included.
    all: usize,
    /// Number of bytes of the body that are kept: all of them, or those before the cut.
    kept: usize,
}

/// Captured packets that are not pcap records yet.
#[derive(Default)]
pub struct Captured {
    snap: usize,
    seen: Vec<Seen>,
    /// The kept bytes of all bodies, one body after the other.
    bytes: Vec<u8>,
}

/// Most bytes of padding after a payload.
const MOST_PADDING: usize = 3;

/// Most memory for packets between two calls of [`crate::Core::take_captured`], bytes. Further packets are lost and
/// counted.
const MAX_BYTES: usize = 8 << 20;

impl Captured {
    /// True if there are no packets.
    pub fn is_empty(&self) -> bool {
        self.seen.is_empty()
    }

    /// Drops the packets, and keeps the memory for later ones.
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

/// A running capture.
pub(crate) struct Tap {
    pub what: Capture,
    pub captured: Captured,
    pub lost: u64,
    /// Buffer for the payload of one packet.
    pub payload: Box<[u8]>,
    /// The bytes that a job has copied of the message whose packets are being captured, after their offset in the
    /// message.
    pub copied: (u64, Vec<u8>),
}

impl Tap {
    pub fn new(what: Capture) -> Self {
        let captured = Captured { snap: what.snap as usize, ..Captured::default() };
        Tap { captured, what, lost: 0, payload: vec![0; MAX_MTU as usize].into(), copied: (0, Vec::new()) }
    }

    /// Appends a packet. `flow` gives the fields of its IP and UDP headers. `parts` are the bytes of its body, at least
    /// those that are to be kept; if payload is missing, the packet is cut there. The body has `all` bytes, of which
    /// the last four are the ICRC. Its first `outer` bytes belong to an encapsulation.
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

    /// Clears `empty`, and exchanges it for the packets captured so far.
    pub fn take(&mut self, empty: &mut Captured) {
        empty.clear();
        empty.snap = self.captured.snap;
        std::mem::swap(&mut self.captured, empty);
    }

    /// The flow of packets on the network between this host and the host of `path`.
    pub fn outer_flow(&self, path: &Path, inward: bool, encapsulated: bool) -> Flow {
        let host = path.to;
        let own = path.from.or_else(|| self.what.hosts.iter().copied().find(|h| h.is_ipv4() == host.is_ipv4()));
        let (own, host) = (Gid::from_ip(own.unwrap_or(host)), Gid::from_ip(host));
        let flow = if inward { Flow::roce(host, own) } else { Flow::roce(own, host) };
        let (src_port, dst_port) = if encapsulated { (VXLAN_PORT, VXLAN_PORT) } else { (path.port, flow.dst_port) };
        Flow { src_port, dst_port, traffic_class: path.class, ..flow }
    }
}
