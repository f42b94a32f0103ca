//! Where captured packets go: out of the RNIC, and to whoever asked for them.

use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::time::SystemTime;

use rustix::net::SendFlags;
use unirdma_device::lock;
use unirdma_formats::pcap;
use unirdma_rnic::{Capture, VnicId};

use crate::engine::Engine;

/// Where captured packets go.
pub(crate) struct Sink {
    /// The administration connection that asked.
    id: u64,
    to: OwnedFd,
    lost: u64,
}

impl Engine {
    /// Sends what the RNIC captures to `to`, for administration connection `id`; false if somebody else captures.
    pub fn start_capture(&self, id: u64, to: OwnedFd, vnic: Option<VnicId>, snap: u32, hosts: Vec<IpAddr>) -> bool {
        let mut sink = lock(&self.capture);
        if sink.is_some() {
            return false;
        }
        *sink = Some(Sink { id, to, lost: 0 });
        let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let epoch_ns = (since_1970.as_nanos() as u64).saturating_sub(self.now());
        self.rnic.lock().start_capture(Capture { vnic, snap, epoch_ns, hosts });
        true
    }

    /// Ends the capture of administration connection `id`, if it has one; how many packets were lost.
    pub fn stop_capture(&self, id: u64) -> Option<u64> {
        let ended = lock(&self.capture).take_if(|s| s.id == id)?;
        let lost = self.rnic.lock().stop_capture();
        Some(ended.lost + lost)
    }

    /// Hands over what was captured, taken off the RNIC before.
    pub(crate) fn hand_over(&self, records: &[u8]) {
        let mut sink = lock(&self.capture);
        let Some(sink) = sink.as_mut() else { return };
        for record in pcap::records(records) {
            // A reader that is too slow loses packets.
            let sent = rustix::net::send(&sink.to, record, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
            sink.lost += u64::from(sent.is_err());
        }
    }
}
