//! A supervisor takes over the leases in the log of the last one.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::config::Config;
use crate::lease::{Lease, LeaseId, Part, Phase, Purpose};
use crate::leases::Leases;
use crate::log::{Damage, Kept, Record};
use crate::plan::states;
use crate::seen::{Seen, VfId};
use crate::state::{State, Why};

/// A contradiction between the log, the configuration and the kernel, or damage of the log.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum Problem {
    #[error(transparent)]
    Log(#[from] Damage),
    #[error(
        "lease {lease} is dropped: the configuration has no VF {vf} any more; programs that use it go on, and nobody touches it"
    )]
    NotInPool { lease: LeaseId, vf: VfId },
    #[error("lease {lease} of VF {vf} is dropped: lease {other} is newer and has the same VF, or a vRNIC of it")]
    Older { lease: LeaseId, vf: VfId, other: LeaseId },
    #[error(
        "VF {vf} is used without a lease (objects: {objects}, processes: {users:?}); it is free again when these end"
    )]
    Used { vf: VfId, objects: u32, users: BTreeSet<u32> },
}

impl Leases {
    /// The leases of a log, compared with what is seen. Of two leases of one VF the newer one holds: a VF is leased
    /// again only after its last lease has ended. The numbers of contexts are old: [`Leases::recount`] corrects them.
    /// The log must be written anew, with [`Leases::snapshot`].
    pub fn adopt(config: &Config, seen: &Seen, kept: Kept, now: Duration) -> (Leases, Vec<Problem>) {
        let mut problems: Vec<Problem> = kept.damage.into_iter().map(Problem::Log).collect();
        let (mut leases, mut found) = (Leases::default(), BTreeMap::new());
        for record in kept.records {
            match record {
                Record::Lease(lease) => {
                    leases.last_lease = leases.last_lease.max(lease.id.0);
                    found.insert(lease.id, lease);
                }
                Record::Returned(id) => {
                    leases.last_lease = leases.last_lease.max(id.0);
                    found.remove(&id);
                }
                Record::Drain { part, on } => leases.drain(part, on),
            }
        }
        leases.drained.retain(|part| is_in_pool(config, part));
        leases.take_records();
        for (id, mut lease) in found.into_iter().rev() {
            if config.pf_of(&lease.vf).is_none() {
                problems.push(Problem::NotInPool { lease: id, vf: lease.vf });
            } else if let Some(other) = leases.leases.values().find(|newer| excludes(newer, &lease)) {
                problems.push(Problem::Older { lease: id, vf: lease.vf, other: other.id });
            } else {
                restart(&mut lease, seen, now);
                leases.leases.insert(id, lease);
            }
        }
        for (vf, state) in states(config, seen, &leases) {
            if let State::Dirty(Why::Used { objects, users, .. }) = state
                && leases.of(&vf).is_none()
            {
                problems.push(Problem::Used { vf, objects, users });
            }
        }
        (leases, problems)
    }
}

fn is_in_pool(config: &Config, part: &Part) -> bool {
    match part {
        Part::Pf(name) => config.pfs.iter().any(|pf| pf.netdev == *name),
        Part::Vf(vf) => config.pf_of(vf).is_some(),
    }
}

/// True if both cannot be true.
fn excludes(newer: &Lease, older: &Lease) -> bool {
    let shares_vrnic = newer.vrnics.keys().any(|v| older.vrnics.contains_key(v));
    newer.vf == older.vf || (newer.is_live() && older.is_live() && shares_vrnic)
}

/// Gives a lease times of this supervisor.
fn restart(lease: &mut Lease, seen: &Seen, now: Duration) {
    // A VMM may not have opened its VF yet, so that a lent VF without users is still lent.
    let is_unused = lease.purpose == Purpose::Verbs && seen.vf(&lease.vf).is_some_and(|vf| !vf.is_used());
    match &mut lease.phase {
        Phase::Open if is_unused || lease.vrnics.is_empty() => {
            lease.vrnics.clear();
            lease.phase = Phase::Lingers { since: now };
        }
        Phase::Open => {}
        Phase::Lingers { since } | Phase::Returning { since, .. } => *since = now,
    }
}
