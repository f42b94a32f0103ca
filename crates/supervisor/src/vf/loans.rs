//! The part of the pool for the server of leases: contexts, places in the queue, and whether a VF is set up.

use std::collections::BTreeMap;
use std::time::Duration;

use unirdma_device::lock;
use unirdma_formats::Gid;
use unirdma_rnic::VfPath;
use unirdma_vf::{Answer, Change, LeaseId, Phase, Plan, Refusal, Request, Seen, Step, Ticket, VfId, plan};

use super::apply::vf_of;
use super::pool_thread::LOOK_EVERY;
use super::{Pool, PoolState};
use crate::admin::VfAnswers;

/// The VF that the programs of a vRNIC have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Loan {
    pub lease: LeaseId,
    pub vf: VfId,
    pub path: VfPath,
    pub contexts: u32,
}

/// Whether a VF is as its lease wants it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Setup {
    /// Not yet, with what has not happened within the time that it may take.
    Pending(String),
    /// Its verbs device can be opened.
    Ready { verbs: String },
    /// It cannot be used, for this reason.
    Failed(String),
}

impl Pool {
    /// Takes over a look at the kernel: corrects and changes leases by it, and plans. Returns also the time until the
    /// leases must be looked at. Wakes the server of leases.
    pub(super) fn observe(&self, seen: Seen) -> (Plan, Vec<Change>, Duration) {
        let now = self.began.elapsed();
        let mut state = lock(&self.state);
        state.correct_adopted(&seen, now);
        let waiting: BTreeMap<Ticket, String> =
            state.leases.waiting().map(|w| (w.ticket, w.request.vrnic.clone())).collect();
        let changes = state.leases.tick(&self.config, &seen, now);
        for change in &changes {
            if let Change::Granted { ticket, lease, .. } = change {
                let vrnic = waiting.get(ticket).cloned().unwrap_or_default();
                *state.contexts.entry((*lease, vrnic)).or_default() += 1;
            }
        }
        let is_told = |c: &&Change| matches!(c, Change::Granted { .. } | Change::TimedOut { .. });
        state.changes.extend(changes.iter().filter(is_told).cloned());
        state.keep_records_or_log();
        let plan = plan(&self.config, &seen, &state.leases);
        state.seen = seen;
        let timeout = state.leases.next_timeout(&self.config).map_or(LOOK_EVERY, |t| t.saturating_sub(now));
        drop(state);
        super::signal(&self.changed);
        (plan, changes, timeout)
    }

    /// Whether a request could be served if a VF is free.
    ///
    /// # Errors
    /// Why it is refused.
    pub(super) fn serves(&self, request: &Request) -> Result<(), Refusal> {
        lock(&self.state).leases.serves(&self.config, request)
    }

    /// The VF that the programs of a vRNIC have.
    pub(super) fn loan(&self, vrnic: &str) -> Option<Loan> {
        let state = lock(&self.state);
        let lease = state.leases.iter().find(|l| l.is_live() && l.vrnics.contains_key(vrnic))?;
        let (pf, seen) = (self.config.pf_of(&lease.vf)?, state.seen.vf(&lease.vf));
        let gid = Gid::from_ip(pf.addresses_of(lease.vf.index).first()?.addr);
        let netdev_mtu = seen.and_then(|vf| vf.netdev.as_ref()).map_or(0, |n| n.mtu);
        Some(Loan {
            lease: lease.id,
            vf: lease.vf.clone(),
            path: VfPath { gid: gid.0, mtu: path_mtu(netdev_mtu) },
            contexts: lease.vrnics.get(vrnic).map_or(0, |c| c.count),
        })
    }

    /// True if a lease of a group is live.
    pub(super) fn lends_to_group(&self, group: &str) -> bool {
        lock(&self.state).leases.iter().any(|l| l.is_live() && l.group == group)
    }

    /// True if programs may use the VF of a lease.
    pub(super) fn is_live(&self, lease: LeaseId) -> bool {
        lock(&self.state).leases.iter().any(|l| l.id == lease && l.is_live())
    }

    /// Changes the rate of a vRNIC whose programs have a VF.
    pub(super) fn set_rate(&self, vrnic: &str, rate_mbps: u32) {
        let mut state = lock(&self.state);
        state.leases.set_rate(vrnic, rate_mbps);
        state.keep_records_or_log();
        drop(state);
        self.wake();
    }

    /// Asks for a context. It is in the log before anybody knows of it.
    ///
    /// # Errors
    /// The log cannot be written.
    pub(super) fn ask(&self, request: Request) -> std::io::Result<Answer> {
        let (vrnic, now) = (request.vrnic.clone(), self.began.elapsed());
        let mut state = lock(&self.state);
        let state = &mut *state;
        let answer = state.leases.ask(&self.config, &state.seen, request, now);
        let kept = state.keep_records();
        if let (Answer::Has { lease, .. }, Err(_)) = (&answer, &kept) {
            state.leases.end(*lease, &vrnic, now);
        }
        kept?;
        match &answer {
            Answer::Has { lease, vf } => {
                *state.contexts.entry((*lease, vrnic)).or_default() += 1;
                if self.has_steps(state, *lease, vf) {
                    self.wake();
                }
            }
            Answer::Waits { .. } => self.wake(),
            _ => {}
        }
        Ok(answer)
    }

    /// Ends a request of a vRNIC that waits, also if it has just been granted.
    pub(super) fn cancel(&self, ticket: Ticket, vrnic: &str) {
        let mut state = lock(&self.state);
        state.leases.cancel(ticket);
        let is_its = |c: &Change| matches!(c, Change::Granted { ticket: t, .. } | Change::TimedOut { ticket: t } if *t == ticket);
        let at = state.changes.iter().position(is_its);
        let change = at.map(|at| state.changes.remove(at));
        drop(state);
        if let Some(Change::Granted { lease, .. }) = change {
            self.end(lease, vrnic);
        }
    }

    /// Ends a context of a vRNIC.
    pub(super) fn end(&self, lease: LeaseId, vrnic: &str) {
        let now = self.began.elapsed();
        let mut state = lock(&self.state);
        let key = (lease, vrnic.to_owned());
        let Some(count) = state.contexts.get_mut(&key) else { return };
        *count -= 1;
        if *count == 0 {
            state.contexts.remove(&key);
        }
        state.leases.end(lease, vrnic, now);
        state.keep_records_or_log();
        let is_open = state.leases.iter().any(|l| l.id == lease && l.phase == Phase::Open);
        drop(state);
        if !is_open {
            self.wake();
        }
    }

    /// Ends a lease whose device is gone, or whose VF cannot be set up.
    pub(super) fn evict(&self, lease: LeaseId) {
        let mut state = lock(&self.state);
        state.leases.evict(lease, self.began.elapsed());
        state.keep_records_or_log();
        drop(state);
        self.wake();
        super::signal(&self.changed);
    }

    /// The processes that have the device of a lease open, in words.
    pub(super) fn users(&self, lease: LeaseId) -> String {
        let state = lock(&self.state);
        let vf = state.leases.iter().find(|l| l.id == lease).map(|l| &l.vf);
        let users = vf.and_then(|id| state.seen.vf(id).map(|vf| &vf.users).or_else(|| state.seen.leaving.get(id)));
        let users: Vec<String> = users.into_iter().flatten().map(u32::to_string).collect();
        if users.is_empty() { String::new() } else { format!("; processes [{}] have it open", users.join(" ")) }
    }

    /// Counts an answer to a program.
    pub(super) fn count(&self, add: impl FnOnce(&mut VfAnswers)) {
        add(&mut lock(&self.state).answers);
    }

    /// Requests that have waited and got a VF, or have waited for too long, since the last call.
    pub(super) fn take_changes(&self) -> Vec<Change> {
        std::mem::take(&mut lock(&self.state).changes)
    }

    /// The places of the requests that wait, from 1.
    pub(super) fn places(&self) -> BTreeMap<Ticket, u32> {
        lock(&self.state).leases.waiting().zip(1..).map(|(w, place)| (w.ticket, place)).collect()
    }

    /// Whether the VF of a lease is as the lease wants it, as it was seen last.
    pub(super) fn setup(&self, lease: LeaseId) -> Setup {
        let state = lock(&self.state);
        let Some(l) = state.leases.iter().find(|l| l.id == lease && l.is_live()) else {
            return Setup::Failed("the VF is gone".into());
        };
        let vf = state.seen.vf(&l.vf);
        if let Some(what) = vf.and_then(|vf| vf.refused.as_ref()) {
            return Setup::Failed(format!("the kernel refuses to set up VF {}: {what}", l.vf));
        }
        match vf.and_then(|vf| vf.verbs.as_ref()).filter(|_| !self.has_steps(&state, lease, &l.vf)) {
            Some(verbs) if verbs.active => Setup::Ready { verbs: verbs.name.clone() },
            Some(_) => Setup::Pending(format!("the port of VF {} did not become active", l.vf)),
            None => Setup::Pending(format!("VF {} was not set up", l.vf)),
        }
    }

    fn has_steps(&self, state: &PoolState, lease: LeaseId, vf: &VfId) -> bool {
        let plan = plan(&self.config, &state.seen, &state.leases);
        plan.steps.iter().any(|s| vf_of(s) == Some(vf) || matches!(s, Step::Evict { lease: l } if *l == lease))
    }
}

impl PoolState {
    /// Corrects the contexts of leases of the last supervisor. Which of them have ended is not known as long as the VF
    /// has users; when it has none, only those are left that programs have got from this supervisor.
    fn correct_adopted(&mut self, seen: &Seen, now: Duration) {
        for id in std::mem::take(&mut self.adopted) {
            let Some(lease) = self.leases.iter().find(|l| l.id == id && l.phase == Phase::Open) else { continue };
            if seen.vf(&lease.vf).is_none_or(|vf| vf.is_used()) {
                self.adopted.insert(id);
                continue;
            }
            let vrnics: Vec<String> = lease.vrnics.keys().cloned().collect();
            for vrnic in vrnics {
                let count = self.contexts.get(&(id, vrnic.clone())).copied().unwrap_or(0);
                self.leases.recount(id, &vrnic, count, now);
            }
        }
    }
}

/// The largest path MTU, an `ibv_mtu`, of which packets fit into frames of a network device with this MTU: as the
/// kernel's `iboe_get_mtu`, with 96 bytes for the headers of RoCE.
fn path_mtu(netdev_mtu: u32) -> u8 {
    const HEADERS: u32 = 96;
    (1..=5).rev().find(|code| 128 << code <= netdev_mtu.saturating_sub(HEADERS)).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_mtus_leave_room_for_headers() {
        let bytes = |netdev_mtu| 128 << path_mtu(netdev_mtu);
        assert_eq!([0, 600, 1500, 2144, 4096, 4192, 9000].map(bytes), [256, 256, 1024, 2048, 2048, 4096, 4096]);
    }
}
