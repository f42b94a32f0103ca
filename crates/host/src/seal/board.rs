//! What the thread that finds sessions tells those that seal and open packets, what these have dropped, and who was complained of.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use serde::{Deserialize, Serialize};
use unirdma_device::{lock, now_ns};

use super::End;
use super::session::{Refusal, Session};

/// Packets of hosts of a group that were dropped, since they do not show that their sender has the group's secret.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SealDrops {
    /// As packets are without a secret.
    pub unsealed: u64,
    /// With a wrong tag, or of a session that there is not.
    pub wrong_tag: u64,
    /// They came before, or far too late.
    pub replayed: u64,
}

/// What there is to know of a group's secrets.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SealInfo {
    /// Numbers of the secrets that are taken, oldest first.
    pub secrets: Vec<u8>,
    /// Number of the one that this host sends with, if there is one.
    pub sends_with: Option<u8>,
    /// Hosts of the group that have not shown yet that they have one of them.
    pub silent: Vec<IpAddr>,
    /// Hosts that have not shown yet that they have the one that this host sends with, but an older one.
    pub behind: Vec<IpAddr>,
    /// What was dropped.
    pub drops: SealDrops,
    /// The groups that rules join with it, packets to and from which are sealed.
    #[serde(default)]
    pub joined: Vec<PairInfo>,
}

/// What there is to know of the secrets of a group and another one, which a rule joins.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PairInfo {
    /// The other group.
    pub group: String,
    /// Numbers of the secrets that are taken, oldest first. Without any nothing passes between the two.
    pub secrets: Vec<u8>,
    /// Number of the one that this host sends with, if there is one.
    pub sends_with: Option<u8>,
    /// Hosts of the other group that have not shown yet that they have one of them.
    pub silent: Vec<IpAddr>,
    /// Hosts that have not shown yet that they have the one that this host sends with, but an older one.
    pub behind: Vec<IpAddr>,
}

/// What the log says of a host, once a minute at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Complaint {
    /// It sends as if there were no secret.
    Unsealed,
    /// It has another secret.
    OtherSecret,
    /// It seals, and here is no secret.
    Sealed,
    /// It is of a group that a rule joins with this one. One of the two has a secret, but there is none of both.
    NoPair,
}

const COMPLAINT_NS: u64 = 60_000_000_000;

/// Whom a complaint is about: a host, and the name of its group if that is another one.
type About = (IpAddr, Option<String>, Complaint);

/// How packets to and from the other end are sealed.
#[derive(Clone, Default)]
pub(super) struct Way {
    pub sessions: Vec<Arc<Session>>,
    /// Number of the one that is sent with.
    pub send: Option<u64>,
    /// Name of its group, if that is another one.
    pub with: Option<Arc<str>>,
}

/// Everything that is sealed.
#[derive(Clone, Default)]
pub(super) struct Posted {
    /// Of each other end whose packets are sealed, those that have no session included; of none without a secret.
    pub ways: Vec<(End, Way)>,
    /// Hosts that have another group, too, whose packets are not sealed.
    pub plain: BTreeSet<IpAddr>,
}

/// See above.
#[derive(Default)]
pub(crate) struct Board {
    changes: AtomicU64,
    posted: Mutex<Posted>,
    unsealed: AtomicU64,
    wrong_tag: AtomicU64,
    replayed: AtomicU64,
    /// When each was in the log last.
    complaints: Mutex<HashMap<About, u64>>,
}

impl Board {
    /// Another number after each change.
    pub(super) fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    pub(super) fn read(&self) -> Posted {
        lock(&self.posted).clone()
    }

    pub(super) fn post(&self, posted: Posted) {
        *lock(&self.posted) = posted;
        self.changes.fetch_add(1, Ordering::Release);
    }

    /// Counts a packet that was dropped. [`Refusal::Unknown`]: one that is not sealed.
    pub fn drop_packet(&self, why: Refusal) {
        let count = match why {
            Refusal::Unknown => &self.unsealed,
            Refusal::WrongTag => &self.wrong_tag,
            Refusal::Replayed => &self.replayed,
        };
        count.fetch_add(1, Ordering::Relaxed);
    }

    /// What was dropped.
    pub fn drops(&self) -> SealDrops {
        let [unsealed, wrong_tag, replayed] =
            [&self.unsealed, &self.wrong_tag, &self.replayed].map(|n| n.load(Ordering::Relaxed));
        SealDrops { unsealed, wrong_tag, replayed }
    }

    /// Says in the log what is wrong with a host of the group; or with one of another group, if `with` names that.
    pub fn complain(&self, host: IpAddr, group: &str, with: Option<&str>, what: Complaint) {
        let now = now_ns();
        {
            // Only hosts of the group and of those that are joined with it are complained of, so there are few entries.
            let mut complaints = lock(&self.complaints);
            let about: About = (host, with.map(String::from), what);
            if complaints.get(&about).is_some_and(|&at| now < at + COMPLAINT_NS) {
                return;
            }
            complaints.insert(about, now);
        }
        let (of, whose, option) = match with {
            Some(other) => {
                (format!("groups {group} and {other}"), "secret of the two", format!("{group} --with {other}"))
            }
            None => (format!("group {group}"), "group's secret", group.into()),
        };
        let command = format!("`unirdma group set {option} --secret FILE`");
        match what {
            Complaint::Unsealed => tracing::warn!(
                "packets of {of} come from {host} without the {whose} and are dropped. If that host sends them, give it the secret, too: {command}; if not, somebody poses as it"
            ),
            Complaint::OtherSecret => tracing::warn!(
                "{host} has another secret of {of} than this host; nothing passes between the two under it. Give both the same: {command}"
            ),
            Complaint::Sealed => tracing::warn!(
                "{host} has a secret of {of} and this host has none; nothing passes between the two. Give this host the secret, too: {command}"
            ),
            Complaint::NoPair => tracing::warn!(
                "nothing passes between {of}, which a rule joins: one of them has a secret, and the two have none together. Give all hosts of both the same one: {command}"
            ),
        }
    }
}
