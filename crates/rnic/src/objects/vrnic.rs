//! vRNICs: their addresses, quotas and counters.

use std::collections::{HashSet, VecDeque};
use std::ops::AddAssign;

use unirdma_formats::{Gid, WcStatus};

use super::buffer_limits::Rooms;
use super::memory_state::MemoryState;
use super::mr::Mr;
use super::qp::Qp;
use crate::budget::TimeBudget;
use crate::pace::{Limit, Share};
use crate::slab::Handle;

/// The configuration of a vRNIC.
#[derive(Clone, Debug)]
pub struct VrnicConfig {
    /// Only vRNICs of one group may connect (U33).
    pub group: u32,
    /// The GID table, in order.
    pub gids: Vec<Gid>,
    /// Quotas.
    pub limits: Limits,
    /// Its part of the RNIC.
    pub share: Share,
}

/// How the VF of a real RNIC is reached by which the programs of a vRNIC talk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct VfPath {
    /// Its GID (RoCE v2).
    pub gid: [u8; 16],
    /// The largest path MTU that it takes, an `ibv_mtu`.
    pub mtu: u8,
}

/// The way of a vRNIC's programs to their peers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct VfUse {
    /// Programs ask for a lease of a VF before they open the device.
    pub asks: bool,
    /// The VF that its programs have at present. Their QPs are none of this RNIC.
    pub vf: Option<VfPath>,
}

/// Quotas of one vRNIC (X12).
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Limits {
    /// Queue pairs.
    pub max_qp: u32,
    /// Completion queues.
    pub max_cq: u32,
    /// Memory regions.
    pub max_mr: u32,
    /// Protection domains.
    pub max_pd: u32,
    /// Address handles.
    pub max_ah: u32,
    /// Shared receive queues.
    pub max_srq: u32,
    /// Bytes of registered memory, all MRs together.
    pub max_mr_bytes: u64,
    /// Programs that use it at a time (kept by the virtual layer, which knows its connections).
    #[serde(default = "default_sessions")]
    pub max_sessions: u32,
}

fn default_sessions() -> u32 {
    Limits::default().max_sessions
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            max_qp: 16_384,
            max_cq: 16_384,
            max_mr: 65_536,
            max_pd: 4096,
            max_ah: 65_536,
            max_srq: 4096,
            max_mr_bytes: 1 << 47,
            max_sessions: 1024,
        }
    }
}

/// Objects of a vRNIC in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Usage {
    pub sessions: usize,
    pub qps: usize,
    pub cqs: usize,
    /// MRs that the virtual layer maps (ways *direct* and *share*), and their bytes.
    pub mrs_mapped: usize,
    pub bytes_mapped: u64,
    /// MRs whose bytes are copied in and out of the application (way *copy*), and their bytes.
    pub mrs_copied: usize,
    pub bytes_copied: u64,
}

/// MRs whose memory is reached in the same way, for the same reason.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct MrNote {
    /// `direct`, `share` or `copy`.
    pub way: String,
    /// The reason in words.
    pub why: String,
    /// How many MRs.
    pub mrs: usize,
    /// Their bytes.
    pub bytes: u64,
}

pub(crate) struct Vrnic {
    pub group: u32,
    pub gids: Vec<Gid>,
    /// Its link is up.
    pub up: bool,
    pub vf_use: VfUse,
    pub limits: Limits,
    pub limit: Limit,
    /// The resources that its sessions use.
    pub used: Used,
    /// The number of the newest session.
    pub last_session: u32,
    pub counters: Counters,
    /// Notifications that woke a session of it, or were to: kicks, and in a virtual machine exits.
    pub kicks: u64,
    /// The memory that is kept for its packets, datagrams and events.
    pub rooms: Rooms,
    /// The state of the memory of its sessions.
    pub memory_state: MemoryState,
    /// How long pages were made for it.
    pub page_time: TimeBudget,
    /// Peers that talk with it although the rules let only one side begin.
    pub begun: Begun,
    /// Its QP for the general services. Without one, connection management gets its messages.
    pub gsi: Option<Handle<Qp>>,
}

/// Addresses where only one of both sides may begin, and that side has begun, so that the other one may answer. The
/// oldest are forgotten first.
#[derive(Default)]
pub(crate) struct Begun {
    order: VecDeque<Gid>,
    known: HashSet<Gid>,
}

impl Begun {
    /// Most addresses that are remembered.
    const MAX: usize = 4096;

    pub fn note(&mut self, gid: Gid) {
        if self.known.insert(gid) {
            self.order.push_back(gid);
        }
        if self.order.len() > Self::MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.known.remove(&oldest);
        }
    }

    pub fn has(&self, gid: Gid) -> bool {
        self.known.contains(&gid)
    }

    /// All of them, the oldest first.
    pub fn all(&self) -> impl Iterator<Item = Gid> {
        self.order.iter().copied()
    }
}

impl Vrnic {
    /// True if packets from this own address may leave; `None` stands for no address in particular.
    pub fn is_linked(&self, own: Option<Gid>) -> bool {
        self.up && own.is_none_or(|gid| self.gids.contains(&gid))
    }

    /// Its first address of a family.
    pub fn first(&self, is_ipv4: bool) -> Option<Gid> {
        self.gids.iter().copied().find(|g| !g.is_zero() && g.ip().is_ipv4() == is_ipv4)
    }

    /// The GID at an index, unless there is a hole.
    pub fn gid(&self, index: u8) -> Option<Gid> {
        self.gids.get(usize::from(index)).copied().filter(|g| !g.is_zero())
    }
}

/// Objects that count against the quotas of a vRNIC.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Used {
    pub sessions: usize,
    pub pds: usize,
    pub cqs: usize,
    pub qps: usize,
    /// MRs and windows.
    pub mrs: usize,
    pub mr_bytes: u64,
    /// MRs of the way *copy*, which are among `mrs`, and their bytes, which are among `mr_bytes`.
    pub copied: usize,
    pub copied_bytes: u64,
    /// Windows, which are among `mrs`.
    pub windows: usize,
    pub ahs: usize,
    pub srqs: usize,
    pub xrcds: usize,
    /// Attachments of its QPs to multicast groups.
    pub attached: usize,
}

impl Used {
    /// An MR or a window more.
    pub fn add_mr(&mut self, m: &Mr) {
        let copied = m.is_copied();
        self.mrs += 1;
        self.mr_bytes += m.counted();
        self.copied += usize::from(copied);
        self.copied_bytes += if copied { m.counted() } else { 0 };
        self.windows += usize::from(m.window.is_some());
    }

    /// An MR or a window less.
    pub fn remove_mr(&mut self, m: &Mr) {
        let copied = m.is_copied();
        self.mrs -= 1;
        self.mr_bytes = self.mr_bytes.saturating_sub(m.counted());
        self.copied -= usize::from(copied);
        self.copied_bytes -= if copied { m.counted() } else { 0 };
        self.windows -= usize::from(m.window.is_some());
    }
}

/// Counters of a vRNIC or of a QP since its creation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Counters {
    /// Work requests completed with success, as requester.
    pub sent_wrs: u64,
    /// Payload bytes of SEND, WRITE and atomics sent, and of READ returned.
    pub sent_bytes: u64,
    /// Receive work requests completed with success.
    pub received_wrs: u64,
    /// Payload bytes that peers put into this vRNIC's memory.
    pub received_bytes: u64,
    /// Times a request found no receive and waited.
    pub rnr_waits: u64,
    /// Times a request got no answer and was tried again.
    pub timeouts: u64,
    /// Work requests completed with an error, flushes not counted.
    pub errors: u64,
    /// Messages for UC and UD QPs that were dropped: no receive, too long, no access.
    pub dropped: u64,
    /// Datagrams with another Q_Key than their QP's.
    pub qkey_violations: u64,
    /// Packets from the network for this vRNIC or QP with another P_Key than its group's.
    #[serde(default)]
    pub pkey_violations: u64,
    /// Connections, address handles, datagrams and connection requests that a rule did not allow.
    pub refused: u64,
    /// Which errors they were.
    #[serde(default)]
    pub failed: Failures,
    /// Packets over the network.
    pub wire: WireCounters,
}

/// Work requests completed with an error, by what kind of error that was; flushes are not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Failures {
    /// Nobody answered (RETRY_EXC_ERR).
    pub retries: u64,
    /// The peer never had a receive (RNR_RETRY_EXC_ERR).
    pub rnr_retries: u64,
    /// The peer refused the request: access, length, or what it could not do (REM_*).
    pub remote: u64,
    /// The request, the receive or its memory was wrong on this side (LOC_*, MW_BIND_ERR).
    pub local: u64,
    /// Any other.
    pub other: u64,
}

impl Failures {
    #[cold]
    pub(crate) fn note(&mut self, status: WcStatus) {
        let kind = match status {
            WcStatus::Success | WcStatus::WrFlushErr => return,
            WcStatus::RetryExcErr => &mut self.retries,
            WcStatus::RnrRetryExcErr => &mut self.rnr_retries,
            WcStatus::RemAccessErr | WcStatus::RemInvReqErr | WcStatus::RemOpErr => &mut self.remote,
            WcStatus::LocLenErr | WcStatus::LocQpOpErr | WcStatus::LocProtErr | WcStatus::MwBindErr => &mut self.local,
            WcStatus::BadRespErr | WcStatus::FatalErr => &mut self.other,
        };
        *kind += 1;
    }
}

/// Packets of a vRNIC or of a QP, named as in rxe's `hw_counters`, and for congestion as in mlx5's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct WireCounters {
    /// Packets sent.
    pub sent_pkts: u64,
    /// Packets that could not be sent, since there was no link.
    pub send_err: u64,
    /// Times a link that it had went down.
    pub link_downed: u64,
    /// Packets received for one of its QPs.
    pub rcvd_pkts: u64,
    /// Packets sent again; `sent_pkts` includes them.
    pub retransmitted_pkts: u64,
    /// Requests received again.
    pub duplicate_request: u64,
    /// Requests received after a gap.
    pub out_of_seq_request: u64,
    /// ACKs that waited for the program's own reply.
    pub ack_deferred: u64,
    /// RNR NAKs sent.
    pub send_rnr_err: u64,
    /// RNR NAKs received.
    pub rcvd_rnr_err: u64,
    /// NAKs received for a gap.
    pub rcvd_seq_err: u64,
    /// Gaps noticed in READ and atomic responses.
    pub implied_nak: u64,
    /// Times requests were sent again because their answers did not come.
    pub completer_retry_err: u64,
    /// SENDs completed as requester.
    pub rdma_sends: u64,
    /// SENDs received.
    pub rdma_recvs: u64,
    /// Part of [`Counters::sent_wrs`] that went to other hosts or plain devices. Datagrams to multicast groups are not
    /// counted here.
    #[serde(default)]
    pub sent_wrs: u64,
    /// Their payload bytes.
    #[serde(default)]
    pub sent_bytes: u64,
    /// Part of [`Counters::received_wrs`] whose message came from there.
    #[serde(default)]
    pub received_wrs: u64,
    /// Part of [`Counters::received_bytes`] that came from there.
    #[serde(default)]
    pub received_bytes: u64,
    /// Packets received that the network had marked as congested (ECN), or that waited in a socket more than half full.
    pub np_ecn_marked_roce_packets: u64,
    /// Congestion notifications sent.
    pub np_cnp_sent: u64,
    /// Congestion notifications received.
    pub rp_cnp_handled: u64,
    /// Requests given up because nobody answered.
    pub retry_exceeded_err: u64,
    /// Requests given up because the peer never had a receive.
    pub retry_rnr_exceeded_err: u64,
}

/// Sums of structures of numbers. A new field does not compile until it is here.
macro_rules! sums {
    ($name:ident { $($f:ident),* $(,)? }) => {
        impl AddAssign for $name {
            fn add_assign(&mut self, o: Self) {
                let $name { $($f),* } = self;
                $(*$f += o.$f;)*
            }
        }
    };
}

sums! {
    Counters {
        sent_wrs, sent_bytes, received_wrs, received_bytes, rnr_waits, timeouts, errors, dropped, qkey_violations,
        pkey_violations, refused, failed, wire,
    }
}
sums! { Failures { retries, rnr_retries, remote, local, other } }
sums! {
    WireCounters {
        sent_pkts, send_err, link_downed, rcvd_pkts, retransmitted_pkts, duplicate_request, out_of_seq_request, ack_deferred,
        send_rnr_err, rcvd_rnr_err, rcvd_seq_err, implied_nak, completer_retry_err, rdma_sends, rdma_recvs, sent_wrs, sent_bytes,
        received_wrs, received_bytes, np_ecn_marked_roce_packets, np_cnp_sent, rp_cnp_handled, retry_exceeded_err,
        retry_rnr_exceeded_err,
    }
}
