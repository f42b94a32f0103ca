//! The contents of a record. These types are separate from the live ones, so that the live ones can change: a change
//! here is a new version of the format.
//!
//! Times are nanoseconds from the moment of the save, and a time that has passed is 0. A state has one encoding only:
//! objects are in the order of their numbers, and queues in their own order. Structures of the device's binary
//! interface are stored as their bytes.

use std::fmt;
use std::marker::PhantomData;
use std::net::IpAddr;

use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use unirdma_abi as abi;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::objects::{Counters, Failures, Limits, WireCounters};
use crate::pace::Share;

/// A structure of the device's binary interface, as its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Raw<T>(pub T);

impl<T: IntoBytes + Immutable> Serialize for Raw<T> {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_bytes(self.0.as_bytes())
    }
}

impl<'de, T: FromBytes> Deserialize<'de> for Raw<T> {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct Bytes<T>(PhantomData<T>);
        impl<T: FromBytes> Visitor<'_> for Bytes<T> {
            type Value = Raw<T>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{} bytes", size_of::<T>())
            }
            fn visit_bytes<E: de::Error>(self, b: &[u8]) -> Result<Raw<T>, E> {
                T::read_from_bytes(b).map(Raw).map_err(|_| E::invalid_length(b.len(), &self))
            }
        }
        d.deserialize_bytes(Bytes(PhantomData))
    }
}

/// Bytes of a GID.
pub(crate) type GidBytes = [u8; 16];

/// An object, by its session and its number there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(crate) struct At {
    pub session: u32,
    pub number: u32,
}

/// A structure of numbers, with its conversion from the live structure and back. A new field of the live structure does
/// not compile until it is here.
macro_rules! twin {
    ($(#[$doc:meta])* $name:ident of $live:ident { $($f:ident: $t:ty),* $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
        pub(crate) struct $name { $(pub $f: $t),* }

        impl $name {
            pub fn save(live: &$live) -> Self {
                let $live { $($f),* } = live;
                $name { $($f: (*$f).into()),* }
            }

            pub fn restore(&self) -> $live {
                let $name { $($f),* } = self;
                $live { $($f: (*$f).into()),* }
            }
        }
    };
}

twin! {
    LimitsData of Limits {
        max_qp: u32, max_cq: u32, max_mr: u32, max_pd: u32, max_ah: u32, max_srq: u32, max_mr_bytes: u64, max_sessions: u32,
    }
}

twin! { ShareData of Share { weight: u32, rate_bps: u64, ops: u64, burst_us: u64 } }

twin! {
    CountersData of Counters {
        sent_wrs: u64, sent_bytes: u64, received_wrs: u64, received_bytes: u64, rnr_waits: u64, timeouts: u64, errors: u64,
        dropped: u64, qkey_violations: u64, pkey_violations: u64, refused: u64, failed: FailuresData, wire: WireCountersData,
    }
}

twin! { FailuresData of Failures { retries: u64, rnr_retries: u64, remote: u64, local: u64, other: u64 } }

impl From<Failures> for FailuresData {
    fn from(live: Failures) -> Self {
        FailuresData::save(&live)
    }
}

impl From<FailuresData> for Failures {
    fn from(data: FailuresData) -> Self {
        data.restore()
    }
}

twin! {
    WireCountersData of WireCounters {
        sent_pkts: u64, send_err: u64, link_downed: u64, rcvd_pkts: u64, retransmitted_pkts: u64, duplicate_request: u64,
        out_of_seq_request: u64, ack_deferred: u64, send_rnr_err: u64, rcvd_rnr_err: u64, rcvd_seq_err: u64, implied_nak: u64,
        completer_retry_err: u64, rdma_sends: u64, rdma_recvs: u64, sent_wrs: u64, sent_bytes: u64,
        received_wrs: u64, received_bytes: u64, np_ecn_marked_roce_packets: u64, np_cnp_sent: u64,
        rp_cnp_handled: u64, retry_exceeded_err: u64, retry_rnr_exceeded_err: u64,
    }
}

impl From<WireCounters> for WireCountersData {
    fn from(live: WireCounters) -> Self {
        WireCountersData::save(&live)
    }
}

impl From<WireCountersData> for WireCounters {
    fn from(data: WireCountersData) -> Self {
        data.restore()
    }
}

/// A vRNIC with all its objects.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct VrnicData {
    pub group: u32,
    pub gids: Vec<GidBytes>,
    pub up: bool,
    pub limits: LimitsData,
    pub share: ShareData,
    /// When the bytes and operations sent so far would be over at the rates of the limits.
    pub bits_ns: u64,
    pub ops_ns: u64,
    pub counters: CountersData,
    /// Peers that talk with it although only one side may begin.
    pub begun: Vec<GidBytes>,
    /// The number of the session that was made last.
    pub last_session: u32,
    pub sessions: Vec<SessionData>,
    /// The QPs of all sessions, by QPN.
    pub qps: Vec<QpData>,
    pub cm: CmData,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct SessionData {
    pub number: u32,
    /// The number of its newest object.
    pub last_name: u32,
    pub doors: Vec<DoorData>,
    pub paused: bool,
    pub memory: bool,
    pub stage: Option<StageData>,
    pub away: u32,
    pub pds: Vec<u32>,
    pub cqs: Vec<CqData>,
    pub xrcds: Vec<XrcdData>,
    pub srqs: Vec<SrqData>,
    pub mrs: Vec<MrData>,
    pub ahs: Vec<AhData>,
    pub outputs: Vec<OutputData>,
}

/// A doorbell page: its number (0: the page of SET_DOORBELL), its slots, and the free ones in the order in which they
/// became free.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct DoorData {
    pub number: u32,
    pub slots: u32,
    pub free_slots: Vec<u32>,
}

/// The granules of a stage that are in use.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct StageData {
    pub bytes: u64,
    /// Records: first granule and count.
    pub given: Vec<(u32, u32)>,
    pub cursor: u64,
    /// How long ago the driver was last seen to have given one back.
    pub released_ns: Option<u64>,
}

/// A notification that a session has not got yet.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum OutputData {
    Completion { queue: u16, cqn: u32 },
    Released,
    Connection { queue: u16 },
    Async { kind: u32, handle: u32 },
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct CqData {
    pub number: u32,
    pub entries: u32,
    /// Completions written, and the arming that was served last.
    pub prod: u32,
    pub served: u32,
    pub comp_queue: Option<u16>,
    pub notify: u32,
    pub moderation: Option<ModerationData>,
    pub dead: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct ModerationData {
    pub count: u16,
    pub period_ns: u64,
    pub waiting: u16,
    pub solicited: bool,
    /// When the first completion that waits is to be reported.
    pub due_ns: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct XrcdData {
    pub number: u32,
    /// Device and inode of the file by which programs share it.
    pub file: Option<(u64, u64)>,
}

/// Sizes of a QP's rings.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct LayoutData {
    pub sq_entries: u32,
    pub sq_stride: u32,
    pub rq_entries: u32,
    pub rq_stride: u32,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct SrqData {
    pub number: u32,
    pub pd: u32,
    pub layout: LayoutData,
    pub max_wr: u32,
    pub max_sge: u32,
    pub cons: u32,
    pub limit: u32,
    pub broken: bool,
    pub xrc: Option<XrcSrqData>,
}

/// The properties of an XRC SRQ: domain and CQ of the same session, and its number in packets.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct XrcSrqData {
    pub xrcd: u32,
    pub cq: u32,
    pub number: u32,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct MrData {
    pub number: u32,
    pub key: u32,
    pub pd: u32,
    pub access: u32,
    pub iova: u64,
    pub len: u64,
    pub regions: Vec<u64>,
    pub note: u32,
    pub kind: MrKind,
    /// Of an MR that work requests register.
    pub pages: Option<PagesData>,
}

/// A list of pages: the most pages, the access flags that it may grant, the logarithm of the page size, the offset in
/// the first page, and the pages if it is registered.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct PagesData {
    pub most: u32,
    pub granting: u32,
    pub shift: u32,
    pub skip: u64,
    pub pages: Option<Vec<u64>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum MrKind {
    Region(WayData),
    /// A window: whether it is of type 2, its QP, and if it is bound, the MR of the session and the offset there.
    Window {
        second: bool,
        qpn: Option<u32>,
        bound: Option<(u32, u64)>,
    },
}

/// How an MR's bytes are reached.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum WayData {
    Mapped,
    Process,
    Session,
    Null,
    Pages,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct AhData {
    pub number: u32,
    pub pd: u32,
    pub flow: FlowData,
    /// UDP source port of its packets between hosts.
    pub port: u16,
    pub static_rate: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct FlowData {
    pub src: IpAddr,
    pub dst: IpAddr,
    pub src_port: u16,
    pub dst_port: u16,
    pub traffic_class: u8,
    pub hop_limit: u8,
    pub ip_id: u16,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct QpData {
    pub qpn: u32,
    pub typ: u8,
    pub gsi: bool,
    pub owner: u32,
    /// Others that have opened it, each with its number of the XRC domain.
    pub openers: Vec<At>,
    /// The session whose memory it reaches; `None` if that session is gone, as below.
    pub memory: Option<u32>,
    /// The owner's number of the XRC domain.
    pub xrcd: Option<u32>,
    pub pd: Option<At>,
    pub send_cq: Option<At>,
    pub recv_cq: Option<At>,
    pub srq: Option<At>,
    /// Its doorbell bit: the number of the page, and the bit.
    pub slot: Option<(u32, u32)>,
    pub sig_all: bool,
    pub cap: Raw<abi::QpCap>,
    pub layout: LayoutData,
    pub state: u8,
    pub attr: Raw<abi::QpAttr>,
    pub sq_cons: u32,
    pub rq_cons: u32,
    pub sq_psn: u32,
    pub rq_psn: u32,
    pub mtu: u32,
    pub own: Option<GidBytes>,
    pub connection: ConnectionData,
    /// The request under way between QPs of one host, or to be flushed; or the datagram.
    pub work: Option<WorkData>,
    /// The receive that a message is being put into.
    pub recv: Option<RecvData>,
    pub wait: Option<WaitData>,
    pub broken: bool,
    pub established: bool,
    /// When its rate limit allows the next packet.
    pub pace_ns: u64,
    pub counters: CountersData,
}

/// How a QP is connected.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum ConnectionData {
    None,
    /// Without packets, to a QP of the same host.
    Local {
        /// The result of an atomic of the peer that was executed here and that the peer has not completed yet.
        found: Option<u64>,
    },
    Wire(Box<WireData>),
    /// It is a UD QP: the datagrams that wait for receives, and the multicast groups that it is attached to.
    Datagram {
        backlog: Vec<HeldData>,
        groups: Vec<GidBytes>,
    },
}

/// Why a send queue stands still, and until when.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct WaitData {
    pub why: WaitKind,
    /// `None`: for ever.
    pub due_ns: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum WaitKind {
    Ack,
    Rnr,
    Memory,
}

/// A wait for memory that moves: since when, and the time to the next try.
pub(crate) type StallData = Option<(u64, u64)>;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct WorkData {
    pub wqe: Raw<abi::SqWqe>,
    pub sges: Vec<Raw<abi::Sge>>,
    pub inline: Vec<u8>,
    pub total: u64,
    pub done: u64,
    pub started: bool,
    pub retries_left: u8,
    pub rnr_left: u8,
    pub found: Option<u64>,
    pub stall: StallData,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct RecvData {
    pub wr_id: u64,
    pub sges: Vec<Raw<abi::Sge>>,
    pub valid: bool,
    pub staged: Option<StagedData>,
}

/// A record of the stage of session `owner`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct StagedData {
    pub owner: u32,
    pub record: u32,
    pub data: u64,
    pub room: u64,
}

/// A datagram that waits for a receive.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct HeldData {
    pub until_ns: u64,
    pub flow: FlowData,
    pub data: Vec<u8>,
    pub imm: Option<u32>,
    pub src_qp: u32,
    pub solicited: bool,
    pub wire: bool,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct WireData {
    /// UDP source port, and the traffic class of the packets.
    pub port: u16,
    pub class: u8,
    pub flight: Vec<FlightData>,
    pub una: u32,
    pub next: u32,
    pub high: u32,
    pub cursor: u32,
    pub reads: Vec<u32>,
    pub retries_left: u8,
    pub rnr_left: u8,
    pub ssn: u32,
    pub credit_limit: Option<u32>,
    /// When the oldest packet without an answer is given up; `None` for never.
    pub deadline_ns: Option<u64>,
    pub rnr_ns: u64,
    pub recovering: bool,
    pub window: WindowData,
    pub cnp_ns: u64,
    pub responder: ResponderData,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct FlightData {
    pub work: WorkData,
    pub first: u32,
    pub packets: u32,
    pub ssn: u32,
    pub status: Option<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct WindowData {
    pub packets: u32,
    pub threshold: u32,
    pub acked: u32,
    pub alpha: u32,
    pub cut_until: u32,
    pub adapts: bool,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct ResponderData {
    pub msn: u32,
    pub message: Option<MessageData>,
    pub got: u64,
    pub nak_sent: bool,
    pub failed: bool,
    pub answers: Vec<AnswerData>,
    pub stall: StallData,
    pub missed: bool,
    pub atomics: Vec<(u32, u64)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum MessageData {
    Send,
    Write { va: u64, rkey: u32, len: u64 },
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum AnswerData {
    Ack {
        psn: u32,
        msn: u32,
    },
    Read {
        psn: u32,
        msn: u32,
        va: u64,
        rkey: u32,
        len: u64,
        done: u64,
        pd: Option<At>,
        memory: Option<u32>,
        again: bool,
    },
    Atomic {
        psn: u32,
        msn: u32,
        value: u64,
        again: bool,
    },
    Nak {
        psn: u32,
        msn: u32,
        code: u8,
        fails: Option<Option<u32>>,
    },
}

/// Connection management.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct CmData {
    pub ids: Vec<CmIdData>,
    pub ports: Vec<PortData>,
    pub early: Vec<EarlyData>,
    pub events: Vec<EventsData>,
}

/// The owners of a port, in the order in which they bound it, as indexes into the list of identifiers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct PortData {
    pub space: u16,
    pub port: u16,
    pub ids: Vec<u32>,
}

/// A connection request that came before a program listened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct EarlyData {
    pub until_ns: u64,
    pub own: GidBytes,
    pub from: GidBytes,
    pub service: u64,
    pub mad: Vec<u8>,
}

/// The events that wait on a queue of a session.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct EventsData {
    pub session: u32,
    pub queue: u16,
    pub events: Vec<Raw<abi::CmEvent>>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct CmIdData {
    /// Its number in its owner's session.
    pub number: u32,
    /// `None`: its program has given it back.
    pub owner: Option<u32>,
    pub queue: u16,
    pub space: u16,
    pub xrc: bool,
    pub state: u8,
    pub src: Option<(IpAddr, u16)>,
    pub dst: Option<(IpAddr, u16)>,
    pub reuse: bool,
    pub one_family: bool,
    pub tos: u8,
    pub ack_timeout: u8,
    pub mtu: u8,
    pub backlog: u32,
    pub waiting: u32,
    /// Index of the identifier that listened.
    pub listener: Option<u32>,
    pub answers: Option<(u32, u32)>,
    pub local_id: u32,
    pub remote_id: u32,
    pub tid: u64,
    pub active: bool,
    pub own: EndsData,
    pub peer: EndsData,
    pub sent: Option<Vec<u8>>,
    pub tries: u8,
    /// When its timer fires.
    pub timer_ns: Option<u64>,
    pub peer_qkey: u32,
    /// A repetition of its request is known as such.
    pub requested: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct EndsData {
    pub qpn: u32,
    pub psn: u32,
    pub responder_resources: u8,
    pub initiator_depth: u8,
    pub retry_count: u8,
    pub rnr_retry_count: u8,
    pub srq: bool,
    pub flow_control: bool,
}
