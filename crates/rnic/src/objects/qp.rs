//! Queue pairs.

use unirdma_abi as abi;
use unirdma_formats::cm::GSI_QPN;
use unirdma_formats::{Gid, Psn, QpState, QpType, Qpn};
use unirdma_mem::QpRings;

use super::datagram::Datagrams;
use super::doorbell::DoorbellPage;
use super::ids::{SessionId, VrnicId};
use super::mr::Reach;
use super::queues::{Cq, Pd, Srq, Xrcd};
use super::send_op::{Recv, SendOp, Wait};
use super::vrnic::Counters;
use super::wire::Wire;
use crate::pace::Pace;
use crate::slab::Handle;

/// The arguments for creating a QP. The device has resolved handles and rings already.
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
    /// Doorbell page handle; 0: the page of SET_DOORBELL.
    pub door: u32,
    /// Every send is signaled.
    pub sig_all: bool,
    /// Capabilities, already within limits.
    pub cap: abi::QpCap,
    /// The rings.
    pub rings: QpRings,
}

pub(crate) struct Qp {
    pub owner: SessionId,
    /// Others that have opened it, with their handle of its XRC domain.
    pub openers: Vec<(SessionId, Handle<Xrcd>)>,
    /// The session whose memory requests of this QP and of its peer access: the owner's, or the session of the XRC SRQ
    /// that a message is for.
    pub memory: SessionId,
    /// XRC domain: its handle and which it is.
    pub xrcd: Option<(Handle<Xrcd>, u32)>,
    pub vrnic: VrnicId,
    pub pd: Handle<Pd>,
    pub qpn: Qpn,
    pub typ: QpType,
    /// It is its vRNIC's UD QP for the general services: to others its number is 1.
    pub gsi: bool,
    /// Its requests may name memory by bus address, because its doorbell page is the driver's own, the page of
    /// SET_DOORBELL.
    pub by_bus: bool,
    /// Its doorbell bit.
    pub door: Handle<DoorbellPage>,
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
    pub connection: Connection,
    /// Its own address in its connection.
    pub own: Option<Gid>,
    /// Its packets leave and come in: the port is up, and has this address.
    pub linked: bool,
    /// A rule forbids its connection. Cleared when a request of a reliable QP fails for this reason.
    pub denied: bool,
    /// The send WQE under execution, which stays here between its steps. A connection to another host keeps several in
    /// `flight` instead.
    pub work: Option<Box<SendOp>>,
    /// The receive WQE that a message is being put into.
    pub recv: Option<Box<Recv>>,
    /// The number of jobs that copy from or to the memory that it answers for.
    pub served_by: u32,
    /// Whether its session pauses.
    pub pause: Pause,
    /// Distinguishes the timer of its present wait from older ones.
    pub timer: u32,
    /// It is in its vRNIC's agenda.
    pub queued: bool,
    /// The driver moved an index of a ring too far: the rings are never read again.
    pub broken: bool,
    /// COMM_EST was raised.
    pub established: bool,
    pub pace: Pace,
    pub counters: Counters,
}

/// Whether a QP pauses with its session: it has no turns, and accepts no messages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Pause {
    /// It does not pause.
    #[default]
    No,
    /// It pauses.
    Yes,
    /// It pauses, and its timer has fired meanwhile.
    Overdue,
}

/// The peer of a QP.
#[derive(Default)]
pub(crate) enum Connection {
    /// None, or not yet; also while its [`Wire`] is worked on.
    #[default]
    None,
    /// A QP of a vRNIC of this host.
    Local(Local),
    /// A QP of another host.
    Wire(Box<Wire>),
    /// It is a UD QP: each WQE names its destination.
    Datagram(Datagrams),
}

/// A connection within this host.
#[derive(Clone, Copy)]
pub(crate) struct Local {
    pub vrnic: VrnicId,
    /// The peer QP when it was last seen.
    pub qp: Option<Handle<Qp>>,
    /// For a restored connection: PSN and result of an atomic of the peer that was executed here and that the peer had
    /// not completed.
    pub found: Option<(Psn, u64)>,
}

impl Connection {
    /// The connection of a new QP, or of one that was reset.
    pub fn of_type(typ: QpType) -> Self {
        if typ == QpType::Ud { Connection::Datagram(Datagrams::default()) } else { Connection::None }
    }
}

impl Qp {
    /// The source QP number in its packets.
    pub fn source(&self) -> u32 {
        if self.gsi { GSI_QPN } else { self.qpn.0 }
    }

    pub fn wire(&self) -> Option<&Wire> {
        if let Connection::Wire(w) = &self.connection { Some(w) } else { None }
    }

    pub fn wire_mut(&mut self) -> Option<&mut Wire> {
        if let Connection::Wire(w) = &mut self.connection { Some(w) } else { None }
    }

    pub fn local(&self) -> Option<Local> {
        if let Connection::Local(l) = self.connection { Some(l) } else { None }
    }

    pub fn datagrams(&self) -> Option<&Datagrams> {
        if let Connection::Datagram(d) = &self.connection { Some(d) } else { None }
    }

    pub fn datagrams_mut(&mut self) -> Option<&mut Datagrams> {
        if let Connection::Datagram(d) = &mut self.connection { Some(d) } else { None }
    }

    /// True if its connection leads to another host or a plain device.
    pub fn leaves_host(&self) -> bool {
        // `Connection::None` is included because `with_wire` takes the `Wire` out of the QP while it works on it.
        matches!(self.connection, Connection::Wire(_) | Connection::None)
    }

    /// True if datagrams wait for a receive.
    pub fn has_backlog(&self) -> bool {
        self.datagrams().is_some_and(|d| !d.backlog.is_empty())
    }

    /// The memory that the QP, or its peer, may access by keys that grant `access`.
    pub fn reach(&self, access: u32) -> Reach {
        Reach { pd: self.pd, session: self.memory, access }
    }

    /// The QP number that it is connected to, or was given as destination.
    pub fn dest(&self) -> Qpn {
        Qpn(self.attr.dest_qp_num)
    }

    /// Why its send queue waits.
    pub fn wait(&self) -> Wait {
        self.work.as_ref().map_or(Wait::No, |w| w.wait)
    }

    /// True if messages may come in: in RTR and every later state but ERR, while it has a link and does not pause.
    pub fn receives(&self) -> bool {
        matches!(self.state, QpState::Rtr | QpState::Rts | QpState::Sqd | QpState::Sqe)
            && !self.broken
            && self.linked
            && self.pause == Pause::No
    }

    /// True if this session owns it or has opened it.
    pub fn is_open_to(&self, s: SessionId) -> bool {
        self.owner == s || self.openers.iter().any(|o| o.0 == s)
    }

    /// True while it is in SQD and a send WQE is under way.
    pub fn is_draining(&self) -> bool {
        self.state == QpState::Sqd && self.is_sending()
    }

    /// True while a send WQE is under way.
    pub fn is_sending(&self) -> bool {
        self.work.is_some() || self.wire().is_some_and(Wire::is_busy)
    }
}

/// A QP as it is shown to people.
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
    /// Its counters.
    pub counters: Counters,
}
