//! Learned places of Ethernet addresses: the host at which each address of a group was seen. The number is limited for
//! each host, so that no host fills the table. An address stays at its host while the host uses it.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// Most learned addresses of one host. Frames to further addresses go to all hosts of their group.
const MAX_OF_HOST: u32 = 4096;
/// An address that was not seen for this time may move to another host, and is forgotten when its host has too many.
const STALE: Duration = Duration::from_secs(60);
/// Shortest interval between two searches for stale addresses.
const LOOK: Duration = Duration::from_secs(10);

struct Place {
    host: IpAddr,
    seen: Instant,
}

#[derive(Default)]
pub(super) struct Learned {
    places: HashMap<(u32, [u8; 6]), Place>,
    of_host: HashMap<IpAddr, u32>,
    looked: Option<Instant>,
}

impl Learned {
    /// Forgets everything.
    pub fn clear(&mut self) {
        *self = Learned::default();
    }

    /// The host of an address, if it is known.
    pub fn host(&self, group: u32, mac: [u8; 6]) -> Option<IpAddr> {
        Some(self.places.get(&(group, mac))?.host)
    }

    /// Records that a host has used an address; false if the address is at another host.
    pub fn note(&mut self, group: u32, mac: [u8; 6], host: IpAddr, now: Instant) -> bool {
        if let Some(p) = self.places.get_mut(&(group, mac)) {
            let moved = p.host != host;
            if moved && now - p.seen < STALE {
                return false;
            }
            p.seen = now;
            if !moved {
                return true;
            }
            self.forget(group, mac);
        }
        if self.of_host.get(&host).is_some_and(|&n| n >= MAX_OF_HOST) {
            self.forget_stale(now);
        }
        let count = self.of_host.entry(host).or_default();
        if *count < MAX_OF_HOST {
            *count += 1;
            self.places.insert((group, mac), Place { host, seen: now });
        }
        true
    }

    /// Forgets one address.
    pub fn forget(&mut self, group: u32, mac: [u8; 6]) {
        if let Some(p) = self.places.remove(&(group, mac))
            && let Some(n) = self.of_host.get_mut(&p.host)
        {
            *n -= 1;
        }
    }

    fn forget_stale(&mut self, now: Instant) {
        if self.looked.is_some_and(|l| now - l < LOOK) {
            return;
        }
        self.looked = Some(now);
        let Learned { places, of_host, .. } = self;
        places.retain(|_, p| now - p.seen < STALE);
        of_host.clear();
        for p in places.values() {
            *of_host.entry(p.host).or_default() += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_stays_at_its_host_while_that_uses_it() {
        let [a, b]: [IpAddr; 2] = [[192, 168, 0, 1], [192, 168, 0, 2]].map(IpAddr::from);
        let (mut l, start) = (Learned::default(), Instant::now());
        let mac = [2, 0, 10, 0, 0, 1];
        assert!(l.note(3, mac, a, start) && !l.note(3, mac, b, start + STALE / 2));
        assert!(l.note(3, mac, a, start + STALE / 2) && !l.note(3, mac, b, start + STALE));
        assert!(l.note(4, mac, b, start), "another group");
        assert_eq!((l.host(3, mac), l.host(4, mac), l.host(5, mac)), (Some(a), Some(b), None));
        assert!(l.note(3, mac, b, start + 2 * STALE));
        assert_eq!(l.host(3, mac), Some(b));
        assert_eq!((l.of_host[&a], l.of_host[&b]), (0, 2));
    }

    #[test]
    fn one_host_fills_its_own_part_only() {
        let [a, b]: [IpAddr; 2] = [[192, 168, 0, 1], [192, 168, 0, 2]].map(IpAddr::from);
        let (mut l, start) = (Learned::default(), Instant::now());
        let mac = |n: u32| [2, 0, 0, (n >> 16) as u8, (n >> 8) as u8, n as u8];
        for n in 0..3 * MAX_OF_HOST {
            assert!(l.note(0, mac(n), a, start));
        }
        assert_eq!((l.places.len(), l.of_host[&a]), (MAX_OF_HOST as usize, MAX_OF_HOST));
        assert!(l.note(0, mac(1 << 20), b, start));
        assert_eq!(l.host(0, mac(1 << 20)), Some(b));
        // Later, stale addresses make room.
        let last = mac(3 * MAX_OF_HOST);
        assert!(l.note(0, last, a, start + STALE));
        assert_eq!((l.host(0, last), l.places.len()), (Some(a), 1));
    }
}
