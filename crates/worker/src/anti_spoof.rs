//! Anti-spoofing: the frames that a vRNIC may send through its interface must have its own MAC and its own addresses. A
//! router may send with any address.

use std::net::IpAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use unirdma_device::lock;
use unirdma_formats::frame::{self, Refused};
use unirdma_formats::{Gid, Mac};

use unirdma_ipc::counters::FrameDrops;
use unirdma_ipc::vrnic::IpNet;

/// The addresses that a vRNIC's frames may use, and counters of refused frames. Shared by the control thread and the
/// switch.
pub(crate) struct Guard {
    mac: Mac,
    allow_spoof: AtomicBool,
    own: Mutex<Vec<IpAddr>>,
    /// By reason, in the order of [`FrameDrops`].
    refused: [AtomicU64; 6],
}

impl Guard {
    pub fn new(mac: Mac, ips: &[IpNet], allow_spoof: bool) -> Self {
        let guard = Guard { mac, allow_spoof: allow_spoof.into(), own: Mutex::default(), refused: Default::default() };
        guard.set_addresses(ips);
        guard
    }

    /// Sets its addresses, in addition to the link-local address of its MAC.
    pub fn set_addresses(&self, ips: &[IpNet]) {
        let link_local = Gid::link_local(self.mac).ip();
        *lock(&self.own) = ips.iter().map(|i| i.addr).chain([link_local]).collect();
    }

    /// Allows its frames any IP address, or not.
    pub fn set_allow_spoof(&self, on: bool) {
        self.allow_spoof.store(on, Ordering::Relaxed);
    }

    pub fn allows_spoof(&self) -> bool {
        self.allow_spoof.load(Ordering::Relaxed)
    }

    pub fn mac(&self) -> Mac {
        self.mac
    }

    /// True if this is one of its addresses.
    pub fn has(&self, address: IpAddr) -> bool {
        lock(&self.own).contains(&address)
    }

    /// All its addresses.
    pub fn addresses(&self) -> Vec<IpAddr> {
        lock(&self.own).clone()
    }

    /// Counts a frame that the rules did not allow.
    pub fn count_ruled_out(&self) {
        self.refused[5].fetch_add(1, Ordering::Relaxed);
    }

    /// True if the interface may send this frame; otherwise the frame is counted.
    pub fn passes(&self, frame: &[u8]) -> bool {
        let refused = match frame::check(frame, self.mac, &lock(&self.own)) {
            Ok(()) => return true,
            Err(Refused::Mac) => 0,
            Err(_) if self.allows_spoof() => return true,
            Err(Refused::Address) => 1,
            Err(Refused::Neighbour) => 2,
            Err(Refused::Protocol) => 3,
            Err(Refused::Malformed) => 4,
        };
        self.refused[refused].fetch_add(1, Ordering::Relaxed);
        false
    }

    /// The counters of refused frames.
    pub fn drops(&self) -> FrameDrops {
        let [mac, address, neighbour, protocol, malformed, rules] =
            std::array::from_fn(|i| self.refused[i].load(Ordering::Relaxed));
        FrameDrops { mac, address, neighbour, protocol, malformed, rules }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An IPv4 packet from an address, in a frame from a MAC.
    fn packet(mac: Mac, source: [u8; 4]) -> Vec<u8> {
        [&[0xff; 6][..], &mac.0, &[8, 0, 0x45], &[0; 11], &source, &[10, 0, 0, 9]].concat()
    }

    #[test]
    fn addresses_come_and_go_and_a_router_may_send_all_but_another_mac() {
        let ips = ["10.0.0.1"].map(|s| s.parse().unwrap());
        let mac = Mac([2, 0, 10, 0, 0, 1]);
        let guard = Guard::new(mac, &ips, false);
        let (own, other) = (packet(mac, [10, 0, 0, 1]), packet(mac, [10, 0, 0, 2]));
        assert!(guard.passes(&own) && !guard.passes(&other));
        assert!(guard.has("fe80::aff:fe00:1".parse().unwrap()));
        guard.set_addresses(&["10.0.0.2".parse().unwrap()]);
        assert!(!guard.passes(&own) && guard.passes(&other));
        assert!(!guard.passes(&own[..11]), "no source address");
        guard.set_allow_spoof(true);
        assert!(guard.passes(&own) && !guard.passes(&packet(Mac([2; 6]), [10, 0, 0, 1])));
        assert_eq!(guard.drops(), FrameDrops { mac: 1, address: 2, malformed: 1, ..FrameDrops::default() });
    }
}
