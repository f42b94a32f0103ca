//! What the thread that finds sessions tells those that seal and open packets, what these have dropped, and who was complained of.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use serde::{Deserialize, Serialize};
use unirdma_device::{lock, now_ns};

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
}

const COMPLAINT_NS: u64 = 60_000_000_000;

/// How packets to and from a host are sealed.
#[derive(Clone, Default)]
pub(super) struct Way {
    pub sessions: Vec<Arc<Session>>,
    /// Number of the one that is sent with.
    pub send: Option<u64>,
}

/// See above.
#[derive(Default)]
pub(crate) struct Board {
    changes: AtomicU64,
    /// Of each host of the group, those that have no session included; of none without a secret.
    posted: Mutex<Vec<(IpAddr, Way)>>,
    unsealed: AtomicU64,
    wrong_tag: AtomicU64,
    replayed: AtomicU64,
    complaints: Mutex<HashMap<(IpAddr, Complaint), u64>>,
}

impl Board {
    /// Another number after each change.
    pub(super) fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    pub(super) fn read(&self) -> Vec<(IpAddr, Way)> {
        lock(&self.posted).clone()
    }

    pub(super) fn post(&self, posted: Vec<(IpAddr, Way)>) {
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

    /// Says in the log what is wrong with a host of the group.
    pub fn complain(&self, host: IpAddr, group: &str, what: Complaint) {
        let now = now_ns();
        {
            // Only hosts of the group are complained of, so there are as many entries as those at most, thrice.
            let mut complaints = lock(&self.complaints);
            if complaints.get(&(host, what)).is_some_and(|&at| now < at + COMPLAINT_NS) {
                return;
            }
            complaints.insert((host, what), now);
        }
        match what {
            Complaint::Unsealed => tracing::warn!(
                "packets of group {group} come from {host} without the group's secret and are dropped. If that host sends them, give it the secret, too: `unirdma group set {group} --secret FILE`; if not, somebody poses as it"
            ),
            Complaint::OtherSecret => tracing::warn!(
                "{host} has another secret of group {group} than this host; nothing passes between the two under it. Give both the same: `unirdma group set {group} --secret FILE`"
            ),
            Complaint::Sealed => tracing::warn!(
                "{host} has a secret of group {group} and this host has none; nothing passes between the two. Give this host the secret, too: `unirdma group set {group} --secret FILE`"
            ),
        }
    }
}
