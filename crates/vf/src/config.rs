//! The operator's configuration of the pool.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::time::Duration;

use unirdma_formats::{Gid, Mac};

use crate::address::Address;
use crate::seen::VfId;

/// The pool of a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// PFs whose VFs are the pool. No other PF is touched.
    pub pfs: Vec<PfConfig>,
    /// The answer when no VF is free; a request can ask for another one.
    pub when_dry: Dry,
    /// How long a lease stays with its instance after its last context.
    pub linger: Duration,
}

/// A PF of the pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PfConfig {
    /// The name of its network device.
    pub netdev: String,
    /// The number of VFs that belong to the pool, at most.
    pub vfs: u16,
    /// The isolation between groups on its VFs.
    pub isolation: Isolation,
    /// First addresses for its VFs: VF `n` gets the `n`th address from each of them.
    pub addresses: Vec<Address>,
    /// Makes a verbs device of the kernel's software RNIC for each VF. Only for tests without an RNIC.
    pub rxe: bool,
}

/// The isolation between groups on the VFs of one PF.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Isolation {
    /// The VLAN of each group, which the NIC adds and removes (VST).
    Vlan,
    /// Nothing. Only this group uses the PF.
    Fabric(String),
}

/// The answer to a request when no VF is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dry {
    /// It waits for at most this time, in order.
    Wait(Duration),
    /// It gets the software RNIC.
    Soft,
    /// It is refused.
    Refuse,
}

/// A wrong value of a configuration, and what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum ConfigError {
    #[error("`{0}` is no name of a network device; it must have 1 to 15 characters, without spaces and slashes")]
    Name(String),
    #[error("PF `{0}` is named twice; name it once, with all its VFs")]
    Twice(String),
    #[error("PF `{0}` has no VFs; give at least 1, or do not name the PF")]
    NoVfs(String),
    #[error("PF `{0}` serves a group without a name; name the group, or choose VLANs")]
    NoGroup(String),
    #[error("PF `{0}` has no addresses for its VFs; give the first one, such as 10.50.0.16/24")]
    NoAddresses(String),
    #[error("PF `{pf}`: {first} is not the first of {vfs} addresses of hosts; choose one with room behind it")]
    Addresses { pf: String, first: Address, vfs: u16 },
    #[error("PFs `{one}` and `{other}` both give {addr} to a VF; choose ranges that do not overlap")]
    SameAddress { one: String, other: String, addr: IpAddr },
    #[error(
        "PFs `{one}` and `{other}` both have a VF with the MAC {mac}, which is made from the last 32 bits of its first address; choose ranges that differ in these"
    )]
    SameMac { one: String, other: String, mac: Mac },
    #[error("a wait of 0 seconds for a free VF is a refusal; give the time, or choose to refuse")]
    NoWait,
}

impl Config {
    /// Checks the configuration. The number of VFs that a PF can have is compared when it is seen ([`crate::plan`]).
    ///
    /// # Errors
    /// The first wrong value.
    pub fn check(&self) -> Result<(), ConfigError> {
        if self.when_dry == Dry::Wait(Duration::ZERO) {
            return Err(ConfigError::NoWait);
        }
        let mut names = BTreeSet::new();
        let (mut addresses, mut macs) = (HashMap::new(), HashMap::new());
        for pf in &self.pfs {
            pf.check()?;
            let one = || pf.netdev.clone();
            if !names.insert(&pf.netdev) {
                return Err(ConfigError::Twice(one()));
            }
            for index in 0..pf.vfs {
                for Address { addr, .. } in pf.addresses_of(index) {
                    if let Some(other) = addresses.insert(addr, &pf.netdev) {
                        return Err(ConfigError::SameAddress { one: one(), other: other.clone(), addr });
                    }
                }
                let mac = pf.mac_of(index);
                if let Some(other) = macs.insert(mac, &pf.netdev) {
                    return Err(ConfigError::SameMac { one: one(), other: other.clone(), mac });
                }
            }
        }
        Ok(())
    }

    /// All VFs of the pool, whether the kernel has them or not.
    pub fn vfs(&self) -> impl Iterator<Item = (&PfConfig, VfId)> {
        self.pfs.iter().flat_map(|pf| (0..pf.vfs).map(move |index| (pf, VfId { pf: pf.netdev.clone(), index })))
    }

    /// The PF of a VF; `None` if the VF does not belong to the pool.
    pub fn pf_of(&self, vf: &VfId) -> Option<&PfConfig> {
        self.pfs.iter().find(|pf| pf.netdev == vf.pf && vf.index < pf.vfs)
    }

    /// The pool's other VFs in the networks of a VF. Two VFs of one host do not find each other by ARP.
    pub(crate) fn neighbours(&self, pf: &PfConfig, index: u16) -> BTreeMap<IpAddr, Mac> {
        let own = pf.addresses_of(index);
        let others = self.vfs().filter(|(p, vf)| p.netdev != pf.netdev || vf.index != index);
        others
            .flat_map(|(p, vf)| p.addresses_of(vf.index).into_iter().map(move |a| (a.addr, p.mac_of(vf.index))))
            .filter(|(addr, _)| own.iter().any(|o| o.contains(*addr)))
            .collect()
    }
}

impl PfConfig {
    fn check(&self) -> Result<(), ConfigError> {
        let name = || self.netdev.clone();
        let is_bad = |c: char| c == '/' || c.is_whitespace() || c.is_control();
        // The kernel's rules for names (`dev_valid_name`).
        if !(1..=15).contains(&self.netdev.len())
            || self.netdev.contains(is_bad)
            || [".", ".."].contains(&&*self.netdev)
        {
            return Err(ConfigError::Name(name()));
        }
        if self.vfs == 0 {
            return Err(ConfigError::NoVfs(name()));
        }
        if self.isolation == Isolation::Fabric(String::new()) {
            return Err(ConfigError::NoGroup(name()));
        }
        if self.addresses.is_empty() {
            return Err(ConfigError::NoAddresses(name()));
        }
        let is_short = |first: &&Address| first.nth(0).is_none() || first.nth(self.vfs - 1).is_none();
        match self.addresses.iter().find(is_short) {
            Some(&first) => Err(ConfigError::Addresses { pf: name(), first, vfs: self.vfs }),
            None => Ok(()),
        }
    }

    /// The addresses of a VF's network device.
    pub fn addresses_of(&self, index: u16) -> Vec<Address> {
        self.addresses.iter().filter_map(|first| first.nth(index)).collect()
    }

    /// The MAC of a VF. It follows from the VF's first address, which is unique in its network. It does not change with
    /// leases: a VF takes a new MAC only when its driver is bound anew.
    pub fn mac_of(&self, index: u16) -> Mac {
        let bits = self.addresses_of(index).first().map_or(0, |a| Gid::from_ip(a.addr).low_bits());
        let [a, b, c, d] = bits.to_be_bytes();
        Mac([0x02, b'V', a, b, c, d])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pf(netdev: &str, vfs: u16, first: &str) -> PfConfig {
        let addresses = vec![Address { addr: first.parse().unwrap(), prefix: 24 }];
        PfConfig { netdev: netdev.into(), vfs, isolation: Isolation::Vlan, addresses, rxe: false }
    }

    fn checked(pfs: Vec<PfConfig>) -> Result<(), ConfigError> {
        let linger = Duration::from_secs(5);
        Config { pfs, when_dry: Dry::Refuse, linger }.check()
    }

    #[test]
    fn wrong_values_are_named() {
        assert_eq!(checked(vec![pf("a", 126, "10.0.0.1"), pf("b", 1, "10.0.0.127")]), Ok(()));
        let wrong = [
            (vec![pf("", 1, "10.0.0.1")], "`` is no name"),
            (vec![pf("a/b", 1, "10.0.0.1")], "`a/b` is no name"),
            (vec![pf("a", 1, "10.0.0.1"), pf("a", 1, "10.0.0.9")], "`a` is named twice"),
            (vec![pf("a", 0, "10.0.0.1")], "`a` has no VFs"),
            (vec![PfConfig { isolation: Isolation::Fabric("".into()), ..pf("a", 1, "10.0.0.1") }], "without a name"),
            (vec![PfConfig { addresses: vec![], ..pf("a", 1, "10.0.0.1") }], "`a` has no addresses"),
            (vec![pf("a", 3, "10.0.0.253")], "10.0.0.253/24 is not the first of 3"),
            (vec![pf("a", 3, "10.0.0.1"), pf("b", 1, "10.0.0.3")], "`b` and `a` both give 10.0.0.3"),
            (vec![pf("a", 1, "fd00:1::1"), pf("b", 1, "fd00:2::1")], "the MAC 02:56:00:00:00:01"),
        ];
        for (pfs, what) in wrong {
            let e = checked(pfs).unwrap_err().to_string();
            assert!(e.contains(what), "{e}");
        }
        let wait = Config { pfs: vec![], when_dry: Dry::Wait(Duration::ZERO), linger: Duration::ZERO };
        assert_eq!(wait.check(), Err(ConfigError::NoWait));
    }

    #[test]
    fn neighbours_are_the_pools_other_vfs_in_the_same_network() {
        let pfs = vec![pf("a", 2, "10.0.0.1"), pf("b", 2, "10.0.0.3"), pf("c", 2, "10.0.1.1")];
        let config = Config { pfs, when_dry: Dry::Refuse, linger: Duration::ZERO };
        let found = config.neighbours(&config.pfs[0], 1);
        let text: Vec<String> = found.iter().map(|(ip, mac)| format!("{ip} {mac}")).collect();
        assert_eq!(text, ["10.0.0.1 02:56:0a:00:00:01", "10.0.0.3 02:56:0a:00:00:03", "10.0.0.4 02:56:0a:00:00:04"]);
    }
}
