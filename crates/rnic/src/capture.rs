//! Capture: packets as pcap records, those of the network as they are, and those that a message between two vRNICs of
//! this host would have been.
//!
//! It lies in the RNIC, not below the port, because only here it is known which vRNIC a packet belongs to. While nobody
//! captures it costs one look at an `Option`.

use std::net::IpAddr;

use unirdma_formats::net::{Flow, MAX_IP_UDP_BYTES, VXLAN_PORT, seal};
use unirdma_formats::{Gid, pcap};

use crate::objects::VnicId;
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

/// A capture that runs.
pub(crate) struct Tap {
    pub what: Capture,
    pub records: Vec<u8>,
    pub lost: u64,
}

/// Bytes of records between two calls of [`crate::Core::take_captured`]; more are lost.
const MAX_RECORDS: usize = 8 << 20;

impl Tap {
    /// Appends a packet: what `flow` says of its headers, then `body`, whose last four bytes are room for the ICRC.
    /// `outer` of the body's first bytes belong to an encapsulation.
    pub fn packet(&mut self, now: u64, flow: &Flow, outer: usize, body: &mut [u8]) {
        seal(body, outer, flow.envelope());
        let mut head = [0; MAX_IP_UDP_BYTES];
        let n = flow.put(&mut head, body.len());
        let all = n + body.len();
        let kept = all.min(self.what.snap as usize);
        if self.records.len() + pcap::RECORD_BYTES + kept > MAX_RECORDS {
            self.lost += 1;
            return;
        }
        self.records.extend(pcap::record(self.what.epoch_ns + now, kept as u32, all as u32));
        self.records.extend(head[..n].iter().chain(&*body).take(kept));
    }

    /// The flow between this host and another.
    pub fn outer_flow(&self, path: &Path, inward: bool, encapsulated: bool) -> Flow {
        let host = path.to;
        let own = path.from.or_else(|| self.what.hosts.iter().copied().find(|h| h.is_ipv4() == host.is_ipv4()));
        let (own, host) = (Gid::from_ip(own.unwrap_or(host)), Gid::from_ip(host));
        let flow = if inward { Flow::roce(host, own) } else { Flow::roce(own, host) };
        let dst_port = if encapsulated { VXLAN_PORT } else { flow.dst_port };
        Flow { src_port: path.port, dst_port, traffic_class: path.class, ..flow }
    }
}
