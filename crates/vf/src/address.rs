//! Addresses of VF network devices.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// An address with the length of its network part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Address {
    /// The address.
    pub addr: IpAddr,
    /// Bits of the network part.
    pub prefix: u8,
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.addr, self.prefix)
    }
}

impl Address {
    /// The address `n` places later; `None` if a host of this network cannot have it.
    pub fn nth(self, n: u16) -> Option<Address> {
        let addr = match self.addr {
            IpAddr::V4(a) => IpAddr::V4(Ipv4Addr::from_bits(a.to_bits().checked_add(n.into())?)),
            IpAddr::V6(a) => IpAddr::V6(Ipv6Addr::from_bits(a.to_bits().checked_add(n.into())?)),
        };
        (self.contains(addr) && self.is_host(addr)).then_some(Address { addr, ..self })
    }

    /// True if `addr` is in the same network.
    pub fn contains(self, addr: IpAddr) -> bool {
        match (self.addr, addr) {
            (IpAddr::V4(a), IpAddr::V4(b)) => {
                self.prefix <= 32 && (a.to_bits() ^ b.to_bits()).leading_zeros() >= self.prefix.into()
            }
            (IpAddr::V6(a), IpAddr::V6(b)) => {
                self.prefix <= 128 && (a.to_bits() ^ b.to_bits()).leading_zeros() >= self.prefix.into()
            }
            _ => false,
        }
    }

    /// True if a single host of this network can have `addr`.
    fn is_host(self, addr: IpAddr) -> bool {
        match addr {
            IpAddr::V4(a) => {
                let host = a.to_bits() & u32::MAX.checked_shr(self.prefix.into()).unwrap_or(0);
                let last = u32::MAX.checked_shr(self.prefix.into()).unwrap_or(0);
                // The first address of a network names it and the last one is its broadcast, except in a /31 or /32.
                let is_reserved = self.prefix < 31 && (host == 0 || host == last);
                !(is_reserved || a.is_unspecified() || a.is_multicast() || a.is_broadcast() || a.is_loopback())
            }
            IpAddr::V6(a) => {
                !(a.is_unspecified() || a.is_multicast() || a.is_loopback() || a.to_ipv4_mapped().is_some())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_ends_with_its_network() {
        let at = |addr: &str, prefix, n| Address { addr: addr.parse().unwrap(), prefix }.nth(n).map(|a| a.to_string());
        assert_eq!(at("10.0.0.9", 24, 7).unwrap(), "10.0.0.16/24");
        assert_eq!(at("fd00::ffff", 64, 1).unwrap(), "fd00::1:0/64");
        assert_eq!(at("10.0.0.1", 32, 0).unwrap(), "10.0.0.1/32");
        for (addr, prefix, n) in [
            ("10.0.0.254", 24, 1),
            ("10.0.0.254", 24, 2),
            ("10.0.0.0", 24, 0),
            ("10.0.0.1", 33, 0),
            ("127.0.0.1", 8, 0),
            ("255.255.255.255", 32, 1),
            ("::1", 128, 0),
            ("fd00::1", 129, 0),
            ("ff02::1", 64, 0),
        ] {
            assert_eq!(at(addr, prefix, n), None, "{addr}/{prefix} + {n}");
        }
    }
}
