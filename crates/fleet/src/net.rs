//! Addresses and networks in text form, and sets of taken addresses.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::str::FromStr;

/// Why a text is no address or network.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// It is not an address.
    #[error("`{0}` is no IP address; write 10.0.0.1 or fd00::1")]
    Address(String),
    /// A network without the length of its prefix.
    #[error("`{0}` has no prefix length; write 10.0.0.0/16")]
    NoPrefix(String),
    /// The prefix is longer than the address, or no number.
    #[error("`{text}`: the prefix length must be 0 to {most}")]
    Prefix {
        /// The network as it was written.
        text: String,
        /// The number of bits of the address.
        most: u8,
    },
}

/// An address with the length of its network part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Net {
    /// The address.
    pub addr: IpAddr,
    /// Bits of the network part.
    pub prefix: u8,
}

impl fmt::Display for Net {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.addr, self.prefix)
    }
}

impl FromStr for Net {
    type Err = AddressError;

    fn from_str(s: &str) -> Result<Net, AddressError> {
        let (addr, prefix) = s.split_once('/').ok_or_else(|| AddressError::NoPrefix(s.into()))?;
        let addr = address(addr)?;
        let most = width(addr);
        let prefix = prefix.bytes().all(|b| b.is_ascii_digit()).then(|| prefix.parse().ok()).flatten();
        match prefix.filter(|p| *p <= most) {
            Some(prefix) => Ok(Net { addr, prefix }),
            None => Err(AddressError::Prefix { text: s.into(), most }),
        }
    }
}

/// Parses an address.
///
/// # Errors
/// It is not an address.
pub fn address(s: &str) -> Result<IpAddr, AddressError> {
    s.parse().map_err(|_| AddressError::Address(s.into()))
}

fn width(addr: IpAddr) -> u8 {
    if addr.is_ipv4() { 32 } else { 128 }
}

/// An address as a number. IPv4 and IPv6 addresses have different numbers, because IPv4-mapped IPv6 addresses are not
/// allowed for vRNICs.
fn number(addr: IpAddr) -> u128 {
    match addr {
        IpAddr::V4(a) => a.to_ipv6_mapped().to_bits(),
        IpAddr::V6(a) => a.to_bits(),
    }
}

fn of_number(n: u128) -> IpAddr {
    Ipv6Addr::from_bits(n).to_canonical()
}

/// True if a vRNIC can have this address.
pub fn is_usable(addr: IpAddr) -> bool {
    match addr {
        IpAddr::V4(a) => !(a.is_unspecified() || a.is_multicast() || a.is_broadcast() || a.is_loopback()),
        IpAddr::V6(a) => {
            let link_local = a.segments()[0] & 0xffc0 == 0xfe80;
            !(a.is_unspecified() || a.is_multicast() || a.is_loopback() || a.to_ipv4_mapped().is_some() || link_local)
        }
    }
}

impl Net {
    /// True if `addr` is in the network.
    pub fn contains(&self, addr: IpAddr) -> bool {
        self.addr.is_ipv4() == addr.is_ipv4() && {
            let (first, last) = self.bounds();
            (first..=last).contains(&number(addr))
        }
    }

    /// The network's first and last address.
    fn bounds(&self) -> (u128, u128) {
        let rest = width(self.addr) - self.prefix;
        let mask = if rest == 128 { u128::MAX } else { (1 << rest) - 1 };
        let first = number(self.addr) & !mask;
        (first, first | mask)
    }

    /// The network without host bits.
    pub fn network(&self) -> Net {
        Net { addr: of_number(self.bounds().0), prefix: self.prefix }
    }

    /// The first and the last address that a vRNIC may have. The network's address and the broadcast address are
    /// excluded.
    fn hosts(&self) -> (u128, u128) {
        let (first, last) = self.bounds();
        match (self.addr.is_ipv4(), last - first) {
            (_, 0 | 1) => (first, last),
            (true, _) => (first + 1, last - 1),
            (false, _) => (first + 1, last),
        }
    }
}

/// Taken numbers, as runs without gaps. The next free one is found without visiting each taken one.
#[derive(Clone, Debug, Default)]
pub struct Taken(BTreeMap<u128, u128>);

impl Taken {
    /// Takes a free number.
    fn take_number(&mut self, n: u128) {
        let (mut first, mut last) = (n, n);
        if let Some(next) = n.checked_add(1).and_then(|next| self.0.remove(&next)) {
            last = next;
        }
        if let Some((&start, &end)) = self.0.range(..n).next_back()
            && end + 1 == n
        {
            first = start;
        }
        self.0.insert(first, last);
    }

    fn run_of(&self, n: u128) -> Option<(u128, u128)> {
        self.0.range(..=n).next_back().map(|(&a, &b)| (a, b)).filter(|&(_, end)| end >= n)
    }

    fn free_number(&mut self, n: u128) {
        if let Some((first, last)) = self.run_of(n) {
            self.0.remove(&first);
            if first < n {
                self.0.insert(first, n - 1);
            }
            if n < last {
                self.0.insert(n + 1, last);
            }
        }
    }

    /// Takes an address.
    pub fn take(&mut self, addr: IpAddr) {
        if !self.has(addr) {
            self.take_number(number(addr));
        }
    }

    /// Gives an address back.
    pub fn free(&mut self, addr: IpAddr) {
        self.free_number(number(addr));
    }

    /// True if an address is taken.
    pub fn has(&self, addr: IpAddr) -> bool {
        self.run_of(number(addr)).is_some()
    }

    /// The lowest number from `from` to `last` that is in neither `self` nor `others`.
    fn next(&self, others: &[&Taken], from: u128, last: u128) -> Option<u128> {
        let mut n = from;
        while n <= last {
            match std::iter::once(self).chain(others.iter().copied()).find_map(|t| t.run_of(n)) {
                Some((_, end)) => n = end.checked_add(1)?,
                None => return Some(n),
            }
        }
        None
    }

    /// A free address of `net` that is not in `others`: the next one after `after`, or else the lowest. A returned
    /// address is thus reused as late as possible.
    pub fn find(&self, net: &Net, others: &[&Taken], after: Option<IpAddr>) -> Option<IpAddr> {
        let (first, last) = net.hosts();
        let from = after.map_or(first, |a| number(a).saturating_add(1)).max(first);
        self.next(others, from, last).or_else(|| self.next(others, first, last)).map(of_number)
    }

    /// The lowest free number of a range.
    pub fn find_number(&self, first: u32, last: u32) -> Option<u32> {
        self.next(&[], first.into(), last.into()).and_then(|n| u32::try_from(n).ok())
    }

    /// Takes a number that is not an address.
    pub fn take_id(&mut self, n: u32) {
        if self.run_of(n.into()).is_none() {
            self.take_number(n.into());
        }
    }

    /// Returns a number that is not an address.
    pub fn free_id(&mut self, n: u32) {
        self.free_number(n.into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn net(s: &str) -> Net {
        s.parse().unwrap()
    }

    #[test]
    fn networks_are_read_and_bounded() {
        assert_eq!(net("10.1.2.3/16").network().to_string(), "10.1.0.0/16");
        assert_eq!(net("fd00::7/64").network().to_string(), "fd00::/64");
        assert!(net("10.0.0.0/8").contains("10.255.0.1".parse().unwrap()));
        assert!(!net("10.0.0.0/8").contains("11.0.0.1".parse().unwrap()));
        assert!(!net("0.0.0.0/0").contains("fd00::1".parse().unwrap()));
        assert!(net("::/0").contains("fd00::1".parse().unwrap()));
        for bad in ["10.0.0.1", "10.0.0.0/33", "x/3", "10.0.0.0/", "10.0.0.0/+8", "fd00::/129"] {
            assert!(bad.parse::<Net>().is_err(), "{bad}");
        }
    }

    #[test]
    fn addresses_are_given_in_turn_and_the_ends_of_a_network_never() {
        let (n, mut taken, mut last) = (net("10.0.0.0/29"), Taken::default(), None);
        let mut given = Vec::new();
        while let Some(a) = taken.find(&n, &[], last) {
            taken.take(a);
            last = Some(a);
            given.push(a.to_string());
        }
        assert_eq!(given, ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.5", "10.0.0.6"]);
        taken.free("10.0.0.2".parse().unwrap());
        assert_eq!(taken.find(&n, &[], last).unwrap().to_string(), "10.0.0.2");
        let mut other = Taken::default();
        other.take("10.0.0.2".parse().unwrap());
        assert_eq!(taken.find(&n, &[&other], None), None);
        assert_eq!(Taken::default().find(&net("fd00::/127"), &[], None).unwrap().to_string(), "fd00::");
    }

    proptest! {
        #[test]
        fn runs_have_what_a_set_has(steps in proptest::collection::vec((any::<bool>(), 0u32..64), 0..300)) {
            let (mut taken, mut set) = (Taken::default(), BTreeSet::new());
            for (take, n) in steps {
                if take { taken.take_id(n); set.insert(n); } else { taken.free_id(n); set.remove(&n); }
                prop_assert_eq!(taken.find_number(0, 63), (0..64).find(|n| !set.contains(n)));
                prop_assert!((0..64).all(|n| taken.run_of(n.into()).is_some() == set.contains(&n)));
                let runs: Vec<_> = taken.0.iter().collect();
                prop_assert!(runs.windows(2).all(|w| w[0].1 + 1 < *w[1].0));
            }
        }
    }
}
