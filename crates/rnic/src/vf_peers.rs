//! The VFs of vRNICs on other hosts, as those hosts have said, and the questions that wait for an answer.
//!
//! An answer holds for [`LIFE_NS`]. A connection is made at once or not at all, so no host has to be told when a lease
//! ends, and no host keeps a list of those that have asked. Later the GID is asked about again. A session has one
//! question at a time, since its commands are executed one after the other. The memory is bounded by the table of
//! routes.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;

use unirdma_formats::{Gid, Psn};

use crate::objects::{SessionId, VfPath, VrnicId};

/// Time for which an answer is believed, ns.
pub(crate) const LIFE_NS: u64 = 1_000_000_000;
/// Longest time to wait for an answer, ns.
pub(crate) const PATIENCE_NS: u64 = 1_000_000_000;
/// Time before the first repetition of a question, ns. It doubles with each repetition.
pub(crate) const FIRST_REPEAT_NS: u64 = 50_000_000;
/// Most vRNICs that are asked whether they have a VF. They share it, or have had it one after the other.
const MAX_HOLDERS: usize = 8;

/// Questions to other hosts about VFs since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct VfQuestions {
    /// Asked, repetitions not counted.
    pub asked: u64,
    /// Those without an answer in time.
    pub unanswered: u64,
}

impl std::ops::AddAssign for VfQuestions {
    fn add_assign(&mut self, o: Self) {
        let VfQuestions { asked, unanswered } = self;
        *asked += o.asked;
        *unanswered += o.unanswered;
    }
}

/// The last answer about a GID.
struct Told {
    host: IpAddr,
    path: VfPath,
    at_ns: u64,
    /// Orders the GIDs that have the same VF.
    order: u64,
}

/// The question of a session.
pub(crate) struct Ask {
    pub vrnic: VrnicId,
    pub group: u32,
    pub own: Gid,
    pub gid: Gid,
    pub tid: u64,
    /// It is repeated then, unless it is over before.
    pub due_ns: u64,
    pub wait_ns: u64,
    pub until_ns: u64,
    /// It was answered, or its time is over.
    pub is_over: bool,
}

#[derive(Default)]
pub(crate) struct VfPeers {
    /// By group and GID.
    told: HashMap<(u32, Gid), Told>,
    /// The GIDs of `told`, by group, VF's GID, and [`Told::order`].
    holders: BTreeMap<(u32, Gid, u64), Gid>,
    next_order: u64,
    pub asks: HashMap<SessionId, Ask>,
    pub by_tid: HashMap<u64, SessionId>,
    pub due: BTreeSet<(u64, SessionId)>,
    pub psn: Psn,
    pub counts: VfQuestions,
}

impl VfPeers {
    /// When the next question is to be repeated, or is over.
    pub fn next_timeout(&self) -> Option<u64> {
        self.due.first().map(|&(at, _)| at)
    }

    /// Notes an answer of the host of a GID, at a time. `None`: its programs have no VF.
    pub fn tell(&mut self, key: (u32, Gid), host: IpAddr, path: Option<VfPath>, at_ns: u64) {
        let Some(path) = path else { return self.forget(key) };
        if let Some(t) = self.told.get_mut(&key).filter(|t| t.path.gid == path.gid) {
            (t.host, t.path, t.at_ns) = (host, path, at_ns);
            return;
        }
        self.forget(key);
        let order = self.next_order;
        self.next_order += 1;
        self.told.insert(key, Told { host, path, at_ns, order });
        self.holders.insert((key.0, Gid(path.gid), order), key.1);
    }

    pub fn forget(&mut self, key: (u32, Gid)) {
        if let Some(t) = self.told.remove(&key) {
            self.holders.remove(&(key.0, Gid(t.path.gid), t.order));
        }
    }

    /// The VF of a GID that is at this host, if its answer still holds.
    pub fn believed(&self, key: (u32, Gid), host: IpAddr, now_ns: u64) -> Option<VfPath> {
        let told = self.told.get(&key).filter(|t| t.host == host && now_ns.saturating_sub(t.at_ns) < LIFE_NS);
        told.map(|t| t.path)
    }

    /// The GIDs whose hosts have named this VF, the first one first. The answers may be too old.
    pub fn holders(&self, group: u32, vf: Gid) -> Vec<Gid> {
        let of_vf = self.holders.range((group, vf, 0)..=(group, vf, u64::MAX));
        of_vf.map(|(_, &gid)| gid).take(MAX_HOLDERS).collect()
    }

    /// Ends the question of a session. Returns the GID that it was about, if it was over.
    pub fn end(&mut self, s: SessionId) -> Option<Gid> {
        let a = self.asks.remove(&s)?;
        self.by_tid.remove(&a.tid);
        self.due.remove(&(a.due_ns, s));
        a.is_over.then_some(a.gid)
    }

    /// The question of a session is over.
    pub fn finish(&mut self, s: SessionId) -> bool {
        let Some(a) = self.asks.get_mut(&s) else { return false };
        self.due.remove(&(a.due_ns, s));
        !std::mem::replace(&mut a.is_over, true)
    }

    /// Forgets the answers about GIDs that `keeps` refuses.
    pub fn retain(&mut self, keeps: impl Fn((u32, Gid), IpAddr) -> bool) {
        let gone: Vec<(u32, Gid)> = self.told.iter().filter(|(k, t)| !keeps(**k, t.host)).map(|(&k, _)| k).collect();
        gone.into_iter().for_each(|key| self.forget(key));
    }

    /// The route to a GID has changed.
    pub fn reroute(&mut self, key: (u32, Gid), host: Option<IpAddr>) {
        if self.told.get(&key).is_some_and(|t| Some(t.host) != host) {
            self.forget(key);
        }
    }

    /// A session has ended, or begins anew.
    pub fn forget_session(&mut self, s: SessionId) {
        self.end(s);
    }
}
