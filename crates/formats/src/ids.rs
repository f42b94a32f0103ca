//! Newtypes for numbers that must not be mixed.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::str::FromStr;

macro_rules! number {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub u32);
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:#x}", self.0)
            }
        }
    };
}

number!(
    /// A queue pair number, 24 bits.
    Qpn
);
number!(
    /// A local key: authorizes its holder's own WQEs to use a memory region.
    Lkey
);
number!(
    /// A remote key: authorizes a peer to reach a memory region.
    Rkey
);

impl Qpn {
    /// Bits that a QPN may use.
    pub const MASK: u32 = 0xff_ffff;
}

/// A packet sequence number, 24 bits, arithmetic modulo 2^24 (IBTA vol. 1, 9.7.2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Psn(u32);

impl Psn {
    /// Takes the low 24 bits of `raw`.
    pub fn new(raw: u32) -> Self {
        Psn(raw & 0xff_ffff)
    }
    /// The number, below 2^24.
    pub fn get(self) -> u32 {
        self.0
    }
    /// The PSN `n` packets later.
    pub fn advance(self, n: u32) -> Self {
        Psn::new(self.0.wrapping_add(n))
    }
    /// Packets from `earlier` to this one, modulo 2^24.
    pub fn since(self, earlier: Psn) -> u32 {
        self.0.wrapping_sub(earlier.0) & 0xff_ffff
    }
    /// True if this PSN lies in the half of the number space before `other` (IBTA vol. 1, 9.7.2).
    pub fn is_before(self, other: Psn) -> bool {
        self.since(other) >= 0x80_0000
    }
}

/// A global identifier, 128 bits in network order.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    /// The GID of an IP address: IPv4 becomes the IPv4-mapped `::ffff:a.b.c.d` (annex A17).
    pub fn from_ip(ip: IpAddr) -> Self {
        match ip {
            IpAddr::V4(v4) => Gid(v4.to_ipv6_mapped().octets()),
            IpAddr::V6(v6) => Gid(v6.octets()),
        }
    }
    /// The IP address that this GID stands for.
    pub fn ip(self) -> IpAddr {
        let v6 = Ipv6Addr::from(self.0);
        v6.to_ipv4_mapped().map_or(IpAddr::V6(v6), IpAddr::V4)
    }
    /// The link-local GID of a MAC address: `fe80::` and its modified EUI-64 (RFC 4291, appendix A).
    pub fn link_local(mac: Mac) -> Self {
        let guid = mac.guid().0.to_be_bytes();
        let mut raw = [0; 16];
        raw[..2].copy_from_slice(&[0xfe, 0x80]);
        raw[8..].copy_from_slice(&guid);
        Gid(raw)
    }
    /// Its last 32 bits: of an IPv4 address, all of it.
    pub fn low_bits(self) -> u32 {
        u128::from_be_bytes(self.0) as u32
    }
    /// True for the all-zero GID, which names nobody.
    pub fn is_zero(self) -> bool {
        self.0 == [0; 16]
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.ip() {
            IpAddr::V4(v4) => write!(f, "::ffff:{v4}"),
            IpAddr::V6(v6) => write!(f, "{v6}"),
        }
    }
}

impl fmt::Debug for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A 48-bit Ethernet address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Mac(pub [u8; 6]);

impl Mac {
    /// The EUI-64 of this address with the universal/local bit flipped.
    pub fn guid(self) -> Guid {
        let m = self.0;
        Guid(u64::from_be_bytes([m[0] ^ 2, m[1], m[2], 0xff, 0xfe, m[3], m[4], m[5]]))
    }
}

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let m = self.0;
        write!(f, "{:02x}:{:02x}:{:02x}:{:02x}:{:02x}:{:02x}", m[0], m[1], m[2], m[3], m[4], m[5])
    }
}

/// A text is no Ethernet address such as `02:00:00:00:00:01`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoMac;

impl FromStr for Mac {
    type Err = NoMac;

    fn from_str(text: &str) -> Result<Mac, NoMac> {
        let bytes: Result<Vec<u8>, _> = text.split(':').map(|part| u8::from_str_radix(part, 16)).collect();
        bytes.ok().and_then(|bytes| bytes.try_into().ok()).map(Mac).ok_or(NoMac)
    }
}

/// A node GUID (EUI-64), as a number in host order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Guid(pub u64);

impl fmt::Display for Guid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let v = self.0;
        write!(f, "{:04x}:{:04x}:{:04x}:{:04x}", v >> 48, v >> 32 & 0xffff, v >> 16 & 0xffff, v & 0xffff)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_that_are_no_mac_are_refused() {
        assert_eq!("02:56:0a:32:00:0a".parse(), Ok(Mac([0x02, 0x56, 0x0a, 0x32, 0, 0x0a])));
        for wrong in ["", "02:56", "02:56:0a:32:00:0a:0b", "02:56:0a:32:00:zz"] {
            assert_eq!(wrong.parse::<Mac>(), Err(NoMac));
        }
    }

    #[test]
    fn psn_wraps_at_24_bits() {
        assert_eq!(Psn::new(0xff_ffff).advance(1).get(), 0);
        assert_eq!(Psn::new(0xff_fffe).advance(0x100_0003).get(), 1);
        assert_eq!(Psn::new(2).since(Psn::new(0xff_fffe)), 4);
        assert!(Psn::new(0xff_fffe).is_before(Psn::new(2)) && !Psn::new(2).is_before(Psn::new(2)));
    }

    #[test]
    fn gids_and_ips_are_each_others_inverse() {
        for text in ["10.1.2.3", "fd00::17", "fe80::1"] {
            let ip: IpAddr = text.parse().unwrap();
            assert_eq!(Gid::from_ip(ip).ip(), ip);
        }
        assert_eq!(Gid::from_ip("10.0.0.1".parse().unwrap()).to_string(), "::ffff:10.0.0.1");
    }

    #[test]
    fn link_local_is_the_kernels_eui64_address() {
        let mac = Mac([0x02, 0x00, 10, 0, 0, 1]);
        assert_eq!(Gid::link_local(mac).to_string(), "fe80::aff:fe00:1");
    }
}
