//! A lease: one VF for one instance.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::config::Config;
use crate::seen::VfId;

/// The number of a lease. It is used once in the life of a log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct LeaseId(pub u64);

impl fmt::Display for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// How the VF of a lease is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Purpose {
    /// Through its verbs device. vRNICs of one instance and group share it.
    Verbs,
    /// The whole PCI function is lent to a VMM (`unirdma vf lend --vfio`). It is not shared.
    Vfio,
}

/// Where a lease is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Phase {
    /// Contexts of its vRNICs are open.
    Open,
    /// The last context was closed. A vRNIC of the same instance may use the lease again.
    Lingers {
        /// When it was closed.
        since: Duration,
    },
    /// It serves nobody any more. The VF is blocked until it is unused and as it was before.
    Returning {
        /// The beginning.
        since: Duration,
        /// The device went away while contexts were open.
        evicted: bool,
    },
}

/// The open contexts of one vRNIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Contexts {
    /// Their number, at least 1.
    pub count: u32,
    /// The vRNIC's share of the VF's rate, Mbit/s; 0: no limit.
    pub rate_mbps: u32,
}

/// A lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// Its number.
    pub id: LeaseId,
    /// Its VF.
    pub vf: VfId,
    /// The container or virtual machine that has it.
    pub instance: String,
    /// The group of its vRNICs.
    pub group: String,
    /// The group's VLAN; `None` on a PF that serves one group without VLANs.
    pub vlan: Option<u16>,
    /// The limit of the VF, Mbit/s: the sum over its vRNICs; 0: no limit.
    pub rate_mbps: u32,
    /// How the VF is used.
    pub purpose: Purpose,
    /// vRNICs with open contexts.
    pub vrnics: BTreeMap<String, Contexts>,
    /// Where it is in its life.
    pub phase: Phase,
}

impl Lease {
    /// True if its instance may use the VF.
    pub fn is_live(&self) -> bool {
        !matches!(self.phase, Phase::Returning { .. })
    }

    /// True if it has lingered for its time.
    pub(crate) fn is_over(&self, config: &Config, now: Duration) -> bool {
        matches!(self.phase, Phase::Lingers { since } if since.saturating_add(config.linger) <= now)
    }

    /// Counts one more context of a vRNIC.
    pub(crate) fn open(&mut self, vrnic: &str, rate_mbps: u32) {
        let contexts = self.vrnics.entry(vrnic.to_owned()).or_insert(Contexts { count: 0, rate_mbps });
        *contexts = Contexts { count: contexts.count.saturating_add(1), rate_mbps };
        self.phase = Phase::Open;
        self.share_rate();
    }

    /// Changes the number of contexts of a vRNIC. False if the vRNIC has none.
    pub(crate) fn recount(&mut self, vrnic: &str, count: impl FnOnce(u32) -> u32, now: Duration) -> bool {
        let Some(contexts) = self.vrnics.get_mut(vrnic) else { return false };
        contexts.count = count(contexts.count);
        if contexts.count == 0 {
            self.vrnics.remove(vrnic);
        }
        match self.phase {
            Phase::Open if self.vrnics.is_empty() => self.phase = Phase::Lingers { since: now },
            // While a lease lingers or returns, the VF keeps its limit.
            Phase::Open => self.share_rate(),
            _ => {}
        }
        true
    }

    /// Changes the rate of a vRNIC. False if nothing changes.
    pub(crate) fn set_rate(&mut self, vrnic: &str, rate_mbps: u32) -> bool {
        let contexts = self.vrnics.get_mut(vrnic).filter(|c| c.rate_mbps != rate_mbps);
        let Some(contexts) = contexts else { return false };
        contexts.rate_mbps = rate_mbps;
        if self.phase == Phase::Open {
            self.share_rate();
        }
        true
    }

    fn share_rate(&mut self) {
        let mut rates = self.vrnics.values().map(|c| c.rate_mbps);
        let sum = rates.try_fold(0u32, |sum, rate| (rate > 0).then_some(sum.saturating_add(rate)));
        self.rate_mbps = sum.unwrap_or(0);
    }
}

/// A part of the pool.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Part {
    /// All VFs of the PF with this network device.
    Pf(String),
    /// One VF.
    Vf(VfId),
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Part::Pf(pf) => f.write_str(pf),
            Part::Vf(vf) => vf.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contexts_are_counted_and_rates_are_added() {
        let mut l = Lease {
            id: LeaseId(1),
            vf: VfId { pf: "p".into(), index: 0 },
            instance: "i".into(),
            group: "g".into(),
            vlan: None,
            rate_mbps: 0,
            purpose: Purpose::Verbs,
            vrnics: BTreeMap::new(),
            phase: Phase::Open,
        };
        let now = Duration::from_secs(9);
        l.open("a", 100);
        l.open("a", 200);
        l.open("b", 50);
        assert_eq!((l.rate_mbps, l.vrnics["a"].count), (250, 2));
        l.open("c", 0);
        assert_eq!(l.rate_mbps, 0);
        assert!(l.recount("c", |n| n - 1, now) && !l.recount("c", |n| n - 1, now));
        assert!(l.set_rate("a", 70) && !l.set_rate("a", 70) && !l.set_rate("x", 1) && l.rate_mbps == 120);
        assert!(l.recount("a", |_| 0, now) && l.phase == Phase::Open && l.rate_mbps == 50);
        assert!(l.recount("b", |n| n - 1, now) && l.phase == Phase::Lingers { since: now } && l.rate_mbps == 50);
    }
}
