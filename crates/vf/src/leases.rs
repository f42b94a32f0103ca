//! The leases of a pool, the requests that wait for a VF, and the parts of the pool that take no new leases.
//!
//! No VF has two leases. One vRNIC has contexts on one VF only, and one VF serves vRNICs of one instance and one group.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use crate::config::{Config, Dry, Isolation, PfConfig};
use crate::lease::{Lease, LeaseId, Part, Phase, Purpose};
use crate::log::Record;
use crate::seen::{Seen, VfId};
use crate::state::{State, is_returned, state};

/// Requests of one instance that may wait, at most.
const MAX_WAITING: usize = 64;
/// VLANs that a group can have (IEEE 802.1Q).
const VLANS: std::ops::RangeInclusive<u16> = 1..=4094;

/// A request for a context of a vRNIC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// The container or virtual machine.
    pub instance: String,
    /// The vRNIC.
    pub vrnic: String,
    /// Its group.
    pub group: String,
    /// The group's VLAN, if it has one.
    pub vlan: Option<u16>,
    /// The limit of the vRNIC, Mbit/s; 0: no limit.
    pub rate_mbps: u32,
    /// Only VFs of this PF. Two vRNICs of an instance have VFs on two PFs in this way.
    pub pf: Option<String>,
    /// How the VF is used.
    pub purpose: Purpose,
    /// The answer when no VF is free, in place of the pool's.
    pub when_dry: Option<Dry>,
}

/// The answer to a [`Request`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Answer {
    /// It has a VF, and this context is counted.
    Has { lease: LeaseId, vf: VfId },
    /// It waits, at this place among all that wait, from 1. A [`Change`] tells the end.
    Waits { ticket: Ticket, place: usize },
    /// No VF is free; it gets the software RNIC.
    Soft,
    /// It gets nothing.
    Refused(Refusal),
}

/// Why a request is refused, and what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum Refusal {
    #[error("no VF is free; end a program that uses one, or choose to wait or the software RNIC")]
    Dry,
    #[error("no VF is free, and {MAX_WAITING} requests of `{0}` wait already; end some of its programs")]
    TooManyWait(String),
    #[error("no PF of the pool has the name `{0}`; name one of the configuration")]
    NotNamed(String),
    #[error("no PF serves the group `{0}`; give the group a VLAN, or a PF of its own")]
    NoPf(String),
    #[error("{0} is no VLAN; give the group one of 1 to 4094")]
    Vlan(u16),
    #[error("VLAN {vlan} is that of the group `{group}`; give each group another one")]
    VlanTaken { vlan: u16, group: String },
    #[error(
        "the group `{group}` has leases or requests with the VLAN {vlan}; the new VLAN holds when these have ended"
    )]
    VlanChanged { group: String, vlan: u16 },
    #[error(
        "the vRNIC `{0}` has a VF, or waits for one, with another instance, group, PF or purpose; end its programs"
    )]
    Elsewhere(String),
}

/// The name of a request that waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// A request that waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiter {
    /// Its name.
    pub ticket: Ticket,
    /// The request itself.
    pub request: Request,
    /// When it gives up.
    pub until: Duration,
}

/// A change made by [`Leases::tick`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Change {
    /// A request that waited has a VF, and its context is counted.
    Granted { ticket: Ticket, lease: LeaseId, vf: VfId },
    /// A request has waited for too long.
    TimedOut { ticket: Ticket },
    /// A lease serves nobody any more. What still uses its VF must be ended.
    Ended { lease: LeaseId, vf: VfId },
    /// The VF of a lease can be leased again.
    Returned { lease: LeaseId, vf: VfId },
}

/// The leases of a pool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Leases {
    pub(crate) leases: BTreeMap<LeaseId, Lease>,
    pub(crate) drained: BTreeSet<Part>,
    pub(crate) last_lease: u64,
    last_ticket: u64,
    waiting: VecDeque<Waiter>,
    /// Changes that are not in the log yet.
    records: Vec<Record>,
}

impl Leases {
    /// All leases.
    pub fn iter(&self) -> impl Iterator<Item = &Lease> {
        self.leases.values()
    }

    /// Requests that wait, in order.
    pub fn waiting(&self) -> impl Iterator<Item = &Waiter> {
        self.waiting.iter()
    }

    /// Parts of the pool that take no new leases.
    pub fn drained(&self) -> impl Iterator<Item = &Part> {
        self.drained.iter()
    }

    /// The lease that a VF has.
    pub fn of(&self, vf: &VfId) -> Option<&Lease> {
        self.leases.values().find(|l| l.vf == *vf)
    }

    /// Asks for one context of a vRNIC.
    pub fn ask(&mut self, config: &Config, seen: &Seen, request: Request, now: Duration) -> Answer {
        if let Err(refusal) = self.check(config, &request) {
            return Answer::Refused(refusal);
        }
        if let Some((lease, vf)) = self.grant(config, seen, &request, now) {
            return Answer::Has { lease, vf };
        }
        match request.when_dry.unwrap_or(config.when_dry) {
            Dry::Soft => Answer::Soft,
            Dry::Refuse => Answer::Refused(Refusal::Dry),
            Dry::Wait(_) if self.count_waiting(&request.instance) >= MAX_WAITING => {
                Answer::Refused(Refusal::TooManyWait(request.instance))
            }
            Dry::Wait(time) => {
                self.last_ticket += 1;
                let ticket = Ticket(self.last_ticket);
                self.waiting.push_back(Waiter { ticket, request, until: now.saturating_add(time) });
                Answer::Waits { ticket, place: self.waiting.len() }
            }
        }
    }

    /// Whether a request could be served if a VF is free.
    ///
    /// # Errors
    /// Why it is refused.
    pub fn serves(&self, config: &Config, request: &Request) -> Result<(), Refusal> {
        self.check(config, request)
    }

    /// Changes the rate of a vRNIC that has contexts.
    pub fn set_rate(&mut self, vrnic: &str, rate_mbps: u32) {
        let ids: Vec<LeaseId> = self.leases.values().filter(|l| l.vrnics.contains_key(vrnic)).map(|l| l.id).collect();
        for id in ids {
            self.change(id, |l| l.set_rate(vrnic, rate_mbps));
        }
    }

    /// Ends a request that waits.
    pub fn cancel(&mut self, ticket: Ticket) {
        self.waiting.retain(|w| w.ticket != ticket);
    }

    /// Ends one context of a vRNIC. Does nothing if the lease has none of this vRNIC.
    pub fn end(&mut self, lease: LeaseId, vrnic: &str, now: Duration) {
        self.change(lease, |l| l.recount(vrnic, |count| count.saturating_sub(1), now));
    }

    /// Corrects the number of contexts of a vRNIC, after [`Leases::adopt`].
    pub fn recount(&mut self, lease: LeaseId, vrnic: &str, count: u32, now: Duration) {
        self.change(lease, |l| l.recount(vrnic, |_| count, now));
    }

    /// Ends a lease whose device is gone, or cannot be set up. The contexts that are still open belong to nobody.
    pub fn evict(&mut self, lease: LeaseId, now: Duration) {
        self.change(lease, |l| {
            let is_live = l.is_live();
            if is_live {
                l.phase = Phase::Returning { since: now, evicted: true };
            }
            is_live
        });
    }

    /// Takes a part of the pool out of use, or back. Leases on it go on until they end, without lingering.
    pub fn drain(&mut self, part: Part, on: bool) {
        let is_changed = if on { self.drained.insert(part.clone()) } else { self.drained.remove(&part) };
        if is_changed {
            self.records.push(Record::Drain { part, on });
        }
    }

    /// Ends leases that have lingered, returns VFs, and serves the requests that wait.
    pub fn tick(&mut self, config: &Config, seen: &Seen, now: Duration) -> Vec<Change> {
        let mut changes = Vec::new();
        let ids: Vec<LeaseId> = self.leases.keys().copied().collect();
        for id in ids {
            let Some(lease) = self.leases.get(&id) else { continue };
            let vf = lease.vf.clone();
            match lease.phase {
                Phase::Lingers { .. } if lease.is_over(config, now) || self.is_drained(&vf) => {
                    self.change(id, |l| {
                        l.phase = Phase::Returning { since: now, evicted: false };
                        true
                    });
                    changes.push(Change::Ended { lease: id, vf });
                }
                Phase::Returning { .. } if is_returned(config, seen, lease) => {
                    self.leases.remove(&id);
                    self.records.push(Record::Returned(id));
                    changes.push(Change::Returned { lease: id, vf });
                }
                _ => {}
            }
        }
        // While a request is looked at, `waiting` has those before it that got nothing.
        for waiter in std::mem::take(&mut self.waiting) {
            let ticket = waiter.ticket;
            if let Some((lease, vf)) = self.grant(config, seen, &waiter.request, now) {
                changes.push(Change::Granted { ticket, lease, vf });
            } else if waiter.until <= now {
                changes.push(Change::TimedOut { ticket });
            } else {
                self.waiting.push_back(waiter);
            }
        }
        changes
    }

    /// When to call [`Leases::tick`] at the latest.
    pub fn next_timeout(&self, config: &Config) -> Option<Duration> {
        let lingers = self.leases.values().filter_map(|l| match l.phase {
            Phase::Lingers { since } => Some(since.saturating_add(config.linger)),
            _ => None,
        });
        lingers.chain(self.waiting.iter().map(|w| w.until)).min()
    }

    /// Changes since the last call, for the log.
    pub fn take_records(&mut self) -> Vec<Record> {
        std::mem::take(&mut self.records)
    }

    /// A whole log, in place of one that has grown.
    pub fn snapshot(&self) -> Vec<Record> {
        // The number of the last lease is kept, also when that has been returned.
        let last = Record::Returned(LeaseId(self.last_lease));
        let drained = self.drained.iter().map(|part| Record::Drain { part: part.clone(), on: true });
        [last].into_iter().chain(drained).chain(self.leases.values().cloned().map(Record::Lease)).collect()
    }

    fn check(&self, config: &Config, request: &Request) -> Result<(), Refusal> {
        if let Some(pf) = request.pf.as_ref().filter(|name| !config.pfs.iter().any(|pf| pf.netdev == **name)) {
            return Err(Refusal::NotNamed(pf.clone()));
        }
        if let Some(vlan) = request.vlan.filter(|v| !VLANS.contains(v)) {
            return Err(Refusal::Vlan(vlan));
        }
        if !config.pfs.iter().any(|pf| fits(request, pf)) {
            return Err(Refusal::NoPf(request.group.clone()));
        }
        let leased = self.leases.values().filter_map(|l| Some((&l.group, l.vlan?)));
        let waiting = self.waiting.iter().filter_map(|w| Some((&w.request.group, w.request.vlan?)));
        if let Some(wanted) = request.vlan {
            for (group, vlan) in leased.chain(waiting) {
                match (*group == request.group, vlan == wanted) {
                    (true, false) => return Err(Refusal::VlanChanged { group: group.clone(), vlan }),
                    (false, true) => return Err(Refusal::VlanTaken { vlan, group: group.clone() }),
                    _ => {}
                }
            }
        }
        let mut leases = self.leases.values().filter(|l| l.is_live() && l.vrnics.contains_key(&request.vrnic));
        let mut waiting = self.waiting.iter().map(|w| &w.request).filter(|r| r.vrnic == request.vrnic);
        let is_same = |r: &Request| {
            // A VF that is lent by VFIO has one context.
            r.purpose == Purpose::Verbs
                && (&r.instance, &r.group, r.vlan, &r.pf, r.purpose)
                    == (&request.instance, &request.group, request.vlan, &request.pf, request.purpose)
        };
        if leases.any(|l| !can_join(l, request)) || waiting.any(|r| !is_same(r)) {
            return Err(Refusal::Elsewhere(request.vrnic.clone()));
        }
        Ok(())
    }

    /// A context on a lease that its instance has already, or on a free VF.
    fn grant(&mut self, config: &Config, seen: &Seen, request: &Request, now: Duration) -> Option<(LeaseId, VfId)> {
        let id = self.joinable(config, request, now).or_else(|| self.take_free(config, seen, request))?;
        let lease = self.change(id, |l| {
            l.open(&request.vrnic, request.rate_mbps);
            true
        })?;
        Some((id, lease.vf.clone()))
    }

    /// The lease of this vRNIC, else one of its instance that takes more vRNICs.
    fn joinable(&self, config: &Config, request: &Request, now: Duration) -> Option<LeaseId> {
        let has = |l: &&Lease| l.vrnics.contains_key(&request.vrnic);
        let live = || self.leases.values().filter(|l| can_join(l, request) && !l.is_over(config, now));
        live().find(has).or_else(|| live().find(|l| !self.is_drained(&l.vf))).map(|l| l.id)
    }

    /// Begins a lease of a free VF that no request before this one waits for.
    fn take_free(&mut self, config: &Config, seen: &Seen, request: &Request) -> Option<LeaseId> {
        let is_wanted = |pf: &PfConfig| self.waiting.iter().any(|w| fits(&w.request, pf));
        let (pf, vf) = config.vfs().filter(|(pf, _)| fits(request, pf) && !is_wanted(pf)).find(|(pf, vf)| {
            !self.is_drained(vf) && self.of(vf).is_none() && state(config, pf, vf, seen, None) == State::Ready
        })?;
        self.last_lease = self.last_lease.checked_add(1)?;
        let id = LeaseId(self.last_lease);
        let lease = Lease {
            id,
            vf,
            instance: request.instance.clone(),
            group: request.group.clone(),
            vlan: request.vlan.filter(|_| pf.isolation == Isolation::Vlan),
            rate_mbps: request.rate_mbps,
            purpose: request.purpose,
            vrnics: BTreeMap::new(),
            phase: Phase::Open,
        };
        self.leases.insert(id, lease);
        Some(id)
    }

    /// Changes a lease, and keeps that for the log if `change` says so.
    fn change(&mut self, id: LeaseId, change: impl FnOnce(&mut Lease) -> bool) -> Option<&Lease> {
        let lease = self.leases.get_mut(&id)?;
        if change(lease) {
            self.records.push(Record::Lease(lease.clone()));
        }
        Some(lease)
    }

    fn is_drained(&self, vf: &VfId) -> bool {
        self.drained.iter().any(|part| match part {
            Part::Pf(pf) => *pf == vf.pf,
            Part::Vf(one) => one == vf,
        })
    }

    fn count_waiting(&self, instance: &str) -> usize {
        self.waiting.iter().filter(|w| w.request.instance == instance).count()
    }
}

/// True if the VFs of a PF can serve a request.
fn fits(request: &Request, pf: &PfConfig) -> bool {
    request.pf.as_ref().is_none_or(|name| *name == pf.netdev)
        && match &pf.isolation {
            Isolation::Vlan => request.vlan.is_some(),
            Isolation::Fabric(group) => *group == request.group,
        }
}

/// True if a lease can serve a request, too.
fn can_join(lease: &Lease, request: &Request) -> bool {
    lease.is_live()
        && lease.purpose == Purpose::Verbs
        && request.purpose == Purpose::Verbs
        && (&lease.instance, &lease.group) == (&request.instance, &request.group)
        && (lease.vlan.is_none() || lease.vlan == request.vlan)
        && request.pf.as_ref().is_none_or(|pf| *pf == lease.vf.pf)
}
