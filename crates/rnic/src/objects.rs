//! The objects of a vRNIC.

use std::collections::BTreeSet;
use std::sync::Arc;

use unirdma_abi as abi;
use unirdma_formats::{Gid, Psn, QpState, QpType};
use unirdma_mem::{Bell, CqRing, QpRings};

use crate::datagram::{Ah, Backlog};
use crate::mr::{Mr, Resolve};
use crate::pace::{Limit, Pace};
use crate::random::Rng;
use crate::rnic::Limits;
use crate::slab::{ByNumber, Handle};
use crate::stage::{Stage, Staged};
use crate::stall::Stall;
use crate::wire::Wire;
use crate::xrc::{XrcSrq, Xrcd};

/// A vRNIC of this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct VnicId(pub(crate) Handle<Vnic>);

/// One frontend of a vRNIC: a process of a container, or a VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SessionId(pub(crate) Handle<Session>);

impl SessionId {
    /// The session with this number; there may be none.
    pub fn from_number(n: u64) -> Self {
        SessionId(Handle::from_raw(n))
    }

    /// Its number, which no later session has.
    pub fn number(self) -> u64 {
        self.0.raw()
    }
}

/// What a vRNIC has done, or one of its QPs, since it was created.
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
    /// What went over the network.
    pub wire: WireCounters,
}

/// Packets of a vRNIC or of one of its QPs, under the names of rxe's `hw_counters`, and for congestion those of mlx5's.
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
    /// Of those sent, packets sent again.
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
    /// Packets received that the network had marked as congested (ECN).
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

pub(crate) struct Vnic {
    pub group: u32,
    pub gids: Vec<Gid>,
    /// Its link is up.
    pub up: bool,
    pub limits: Limits,
    pub limit: Limit,
    /// What its sessions have in use.
    pub used: Used,
    pub counters: Counters,
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
    pub ahs: usize,
    pub srqs: usize,
    pub xrcds: usize,
}

/// What a session calls its objects. No number is used twice, and none means anything to another session. The first one is
/// random, so that a driver that takes another session's numbers for its own gets an error.
#[derive(Default)]
pub(crate) struct Names {
    last: u32,
    pub pds: ByNumber<Handle<Pd>>,
    pub cqs: ByNumber<Handle<Cq>>,
    pub mrs: ByNumber<Handle<Mr>>,
    pub ahs: ByNumber<Handle<Ah>>,
    pub srqs: ByNumber<Handle<Srq>>,
    pub xrcds: ByNumber<Handle<Xrcd>>,
    /// QPs that it owns or has opened.
    pub qps: BTreeSet<Handle<Qp>>,
}

impl Names {
    pub fn new(random: &mut Rng) -> Self {
        Names { last: random.next_u64() as u32 >> 1, ..Names::default() }
    }

    /// A new number; `None` after at least 2^31 of them.
    pub fn next(&mut self) -> Option<u32> {
        self.last = self.last.checked_add(1)?;
        Some(self.last)
    }
}

pub(crate) struct Session {
    pub vnic: VnicId,
    pub names: Names,
    pub bell: Option<Bell>,
    pub slots: Vec<Option<Handle<Qp>>>,
    pub free_slots: Vec<u32>,
    /// False while the session is polled, true while it must kick.
    pub parked: bool,
    /// Its doorbell has rung, and its vRNIC knows.
    pub rung: bool,
    pub last_rung_ns: u64,
    /// Not 0 while the memory of its MRs is somewhere else: what its driver has said last.
    pub away: u32,
    pub memory: Option<Arc<dyn Resolve>>,
    pub stage: Option<Stage>,
}

impl Session {
    /// A QP that had this doorbell bit is gone.
    pub fn free_slot(&mut self, slot: u32) {
        if let Some(s) = self.slots.get_mut(slot as usize) {
            *s = None;
            self.free_slots.push(slot);
        }
    }
}

pub(crate) struct Pd {
    /// MRs, windows, AHs, SRQs and QPs in it.
    pub uses: u32,
}

pub(crate) struct Cq {
    pub owner: SessionId,
    /// What its owner calls it.
    pub number: u32,
    /// Queues of QPs, and XRC SRQs, that complete to it.
    pub uses: u32,
    pub ring: CqRing,
    pub comp_queue: Option<u16>,
    /// Set by REQ_NOTIFY_CQ: `NOTIFY_*` flags, served once.
    pub notify: u32,
    pub moderation: Option<Moderation>,
    pub dead: bool,
}

/// How a CQ's completion events wait for each other (`ibv_modify_cq(3)`): one comes after `count` completions or
/// `period_ns` after the first, whatever is earlier.
#[derive(Clone, Copy, Default)]
pub(crate) struct Moderation {
    pub count: u16,
    pub period_ns: u64,
    /// Completions that wait for an event, and whether one of them is solicited.
    pub waiting: u16,
    pub solicited: bool,
    /// When the first of them is to be reported, ns; and whether a timer runs, which may have been set for earlier ones.
    pub due: u64,
    pub timed: bool,
}

/// A shared receive queue.
pub(crate) struct Srq {
    pub owner: SessionId,
    /// What its owner calls it.
    pub number: u32,
    /// QPs that take their receives here, and targets of XRC connections that are putting a message into one.
    pub uses: u32,
    pub pd: Handle<Pd>,
    pub rings: QpRings,
    pub max_wr: u32,
    pub max_sge: u32,
    pub cons: u32,
    /// An event is raised once, when fewer receives than this are left; 0: none.
    pub limit: u32,
    /// An index jumped: the ring is never looked at again.
    pub broken: bool,
    pub xrc: Option<XrcSrq>,
}

/// What a QP is created from; handles and rings already resolved by the device.
pub struct CreateQp {
    /// PD handle.
    pub pd: u32,
    /// CQ handle for sends.
    pub send_cq: u32,
    /// CQ handle for receives.
    pub recv_cq: u32,
    /// SRQ handle, if receives come from there.
    pub srq: Option<u32>,
    /// XRC domain handle, of the target of an XRC connection, which has no PD and CQs.
    pub xrcd: Option<u32>,
    /// Every send is signaled.
    pub sig_all: bool,
    /// Capabilities, already within limits.
    pub cap: abi::QpCap,
    /// The rings.
    pub rings: QpRings,
}

/// Why a QP's send queue stands still.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    No,
    /// No answer: try again at the deadline.
    Ack,
    /// No receive at the peer: try again at the deadline.
    Rnr,
    /// No room for a datagram's packet.
    Tx,
    /// The process of some memory moves its pages or is slow, or there is no room in the receiver's stage or among the jobs: try
    /// again at the deadline.
    Memory,
    /// The job with this number copies.
    Job(u64),
}

/// A send WQE under execution: a private copy, so that the driver cannot change it after it was checked.
pub(crate) struct Work {
    pub wqe: abi::SqWqe,
    pub sges: [abi::Sge; abi::MAX_SGE as usize],
    pub num_sge: usize,
    pub inline: [u8; abi::MAX_INLINE as usize],
    pub total: u64,
    pub done: u64,
    /// Checked, and under way at the peer.
    pub started: bool,
    pub retries_left: u8,
    pub rnr_left: u8,
    /// What an atomic has found at the peer, if it has been there.
    pub found: Option<u64>,
    pub stall: Stall,
}

impl Default for Work {
    fn default() -> Self {
        Work {
            wqe: abi::SqWqe::default(),
            sges: [abi::Sge::default(); abi::MAX_SGE as usize],
            num_sge: 0,
            inline: [0; abi::MAX_INLINE as usize],
            total: 0,
            done: 0,
            started: false,
            retries_left: 0,
            rnr_left: 0,
            found: None,
            stall: Stall::default(),
        }
    }
}

/// A receive WQE that a message is being put into.
pub(crate) struct Recv {
    pub wr_id: u64,
    pub sges: [abi::Sge; abi::MAX_SGE as usize],
    pub num_sge: usize,
    pub total: u64,
    /// The WQE was well-formed.
    pub valid: bool,
    /// Where its message waits to be placed.
    pub staged: Option<Staged>,
}

impl Default for Recv {
    fn default() -> Self {
        Recv {
            wr_id: 0,
            sges: [abi::Sge::default(); abi::MAX_SGE as usize],
            num_sge: 0,
            total: 0,
            valid: false,
            staged: None,
        }
    }
}

pub(crate) struct Qp {
    pub owner: SessionId,
    /// Others that have opened it, with their handle of its XRC domain.
    pub openers: Vec<(SessionId, Handle<Xrcd>)>,
    /// Whose memory its requests and those of its peer reach: its owner's, or that of the XRC SRQ that a message is for.
    pub memory: SessionId,
    /// XRC domain: its handle and which it is.
    pub xrcd: Option<(Handle<Xrcd>, u32)>,
    pub vnic: VnicId,
    pub pd: Handle<Pd>,
    pub qpn: u32,
    pub typ: QpType,
    pub slot: u32,
    pub sig_all: bool,
    pub send_cq: Handle<Cq>,
    pub recv_cq: Handle<Cq>,
    pub srq: Option<Handle<Srq>>,
    pub cap: abi::QpCap,
    pub rings: QpRings,
    pub state: QpState,
    pub attr: abi::QpAttr,
    pub sq_cons: u32,
    pub rq_cons: u32,
    pub sq_psn: Psn,
    pub rq_psn: Psn,
    pub mtu: u32,
    pub peer_vnic: Option<VnicId>,
    /// Its own address in its connection.
    pub own: Option<Gid>,
    /// Its packets leave and come in: the port is up, and has this address.
    pub linked: bool,
    /// Handle of the peer QP when it was last seen.
    pub peer: Option<Handle<Qp>>,
    /// Taken out while it is executed; `busy` says that it holds a WQE.
    pub work: Option<Box<Work>>,
    pub busy: bool,
    pub recv: Option<Box<Recv>>,
    /// `recv` holds a WQE that a message has begun to fill.
    pub receiving: bool,
    /// Jobs that copy from or to the memory that it answers for.
    pub served_by: u32,
    pub wait: Wait,
    /// Distinguishes this wait's timer from older ones.
    pub timer: u32,
    pub queued: bool,
    /// An index jumped: the rings are never looked at again.
    pub broken: bool,
    pub established: bool,
    /// The state of a connection to another host.
    pub wire: Option<Box<Wire>>,
    pub pace: Pace,
    /// Datagrams that wait a moment for a receive.
    pub backlog: Backlog,
    /// Multicast groups that it is attached to.
    pub groups: Vec<Gid>,
    pub counters: Counters,
}

/// A QP as it is shown.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct QpInfo {
    /// Its number.
    pub qpn: u32,
    /// RC, UC or UD.
    pub kind: String,
    /// Its state.
    pub state: String,
    /// GID that it is connected to.
    pub peer_gid: Option<String>,
    /// QP that it is connected to.
    pub peer_qpn: Option<u32>,
    /// The peer's host, if it is another one.
    pub peer_host: Option<std::net::IpAddr>,
    /// What it has done.
    pub counters: Counters,
}

impl Qp {
    /// True if messages may come in: in RTR and every later state but ERR, while it has a link.
    pub fn receives(&self) -> bool {
        matches!(self.state, QpState::Rtr | QpState::Rts | QpState::Sqd | QpState::Sqe) && !self.broken && self.linked
    }

    /// True if it is this session's, or one that this session has opened.
    pub fn is_open_to(&self, s: SessionId) -> bool {
        self.owner == s || self.openers.iter().any(|o| o.0 == s)
    }

    /// True while a send WQE is under way.
    pub fn is_sending(&self) -> bool {
        self.busy || self.wire.as_ref().is_some_and(|w| w.is_busy())
    }
}
