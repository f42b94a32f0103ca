//! Data shared by the thread that establishes sessions and the threads that seal and open packets: sessions, counters
//! of dropped packets, and recent complaints.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use unirdma_device::{lock, now_ns};

use unirdma_ipc::counters::SealDrops;

use super::End;
use super::session::{Refusal, Session};

/// A warning about a host, which is logged at most once a minute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Complaint {
    /// It sends packets that are not sealed.
    Unsealed,
    /// It has another secret.
    OtherSecret,
    /// It seals packets, and this host has no secret.
    Sealed,
    /// It is in a group that a rule joins with this one. One of the groups has a secret, but the pair has none.
    NoPair,
}

const COMPLAINT_NS: u64 = 60_000_000_000;

/// The subject of a complaint: a host, the name of its group if that is another one, and the kind of complaint.
type About = (IpAddr, Option<String>, Complaint);

/// The sealing of packets to and from one other end.
#[derive(Clone, Default)]
pub(super) struct SessionEntry {
    pub sessions: Vec<Arc<Session>>,
    /// Number of the session with which packets are sealed.
    pub send: Option<u64>,
    /// Name of its group, if that is another one.
    pub with: Option<Arc<str>>,
}

/// All sealing state.
#[derive(Clone, Default)]
pub(super) struct PublishedSessions {
    /// Every other end whose packets are sealed, even without a session. Empty without a secret.
    pub ways: Vec<(End, SessionEntry)>,
    /// Hosts that also have another group, whose packets are not sealed.
    pub plain: BTreeSet<IpAddr>,
}

/// Connects the thread that establishes sessions with the threads that use them.
#[derive(Default)]
pub(crate) struct SessionTable {
    changes: AtomicU64,
    published: Mutex<PublishedSessions>,
    unsealed: AtomicU64,
    wrong_tag: AtomicU64,
    replayed: AtomicU64,
    /// When each complaint was last logged.
    complaints: Mutex<HashMap<About, u64>>,
}

impl SessionTable {
    /// A number that differs after each change.
    pub(super) fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    pub(super) fn read(&self) -> PublishedSessions {
        lock(&self.published).clone()
    }

    pub(super) fn publish(&self, published: PublishedSessions) {
        *lock(&self.published) = published;
        self.changes.fetch_add(1, Ordering::Release);
    }

    /// Counts a dropped packet. [`Refusal::Unknown`] means that the packet was not sealed.
    pub fn drop_packet(&self, why: Refusal) {
        let count = match why {
            Refusal::Unknown => &self.unsealed,
            Refusal::WrongTag => &self.wrong_tag,
            Refusal::Replayed => &self.replayed,
        };
        count.fetch_add(1, Ordering::Relaxed);
    }

    /// Counters of dropped packets.
    pub fn drops(&self) -> SealDrops {
        let [unsealed, wrong_tag, replayed] =
            [&self.unsealed, &self.wrong_tag, &self.replayed].map(|n| n.load(Ordering::Relaxed));
        SealDrops { unsealed, wrong_tag, replayed }
    }

    /// Logs a complaint about a host of the group, or of the other group if `with` names one.
    pub fn complain(&self, host: IpAddr, group: &str, with: Option<&str>, what: Complaint) {
        let now = now_ns();
        {
            // Complaints concern only hosts of the group and of joined groups, so there are few entries.
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
