//! Connection management: RDMA connections by IP address and port, as in `rdma_cm(7)`, with messages that any RoCE peer
//! understands (IBTA vol. 1, chapter 12; annex A11).
//!
//! It is part of the RNIC and not of the program, so that it answers while the program does something else, and can
//! tell the peers of a program that ends. This file has the identifiers and the commands on them; `connect` makes and
//! ends connections; `protocol` sends, receives and repeats the messages. The program moves its QP itself, with the
//! attributes that CM_QP_ATTR returns.

mod connect;
mod ids;
mod protocol;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use unirdma_abi as abi;
use unirdma_abi::{CmOp, Status, port_space};
use unirdma_formats::cm::MAD_BYTES;
use unirdma_formats::net::HOP_LIMIT;
use unirdma_formats::{Gid, Psn};

use crate::core::Core;
use crate::objects::{SessionId, Taken, VrnicId};
use crate::output::Output;
use crate::slab::{Handle, Slab};

type Result<T> = std::result::Result<T, Status>;

/// Most identifiers of one vRNIC.
const MAX_IDS: usize = 65_536;
/// No multicast group is joined while this number of events waits for a session. (An identifier has few events of other
/// kinds.)
const MAX_EVENTS: usize = 2048;
/// Bytes that a waiting event is charged for.
pub(crate) const EVENT_BYTES: usize = size_of::<abi::CmEvent>();
/// Most identifiers of a vRNIC that share one port. Each request to the port is compared with all of them.
const MAX_SHARERS: usize = 256;
/// Most ports that are tried in search of a free one.
const MAX_PORTS_TRIED: usize = 256;
/// Most requests that wait at one identifier.
const MAX_BACKLOG: u32 = 4096;
/// Ports to choose from if the program names none.
const FREE_PORTS: std::ops::Range<u16> = 32_768..61_000;
/// RNR timer of QPs of connections: 10.24 ms (IBTA vol. 1, table 46). A sender with five retries, which many programs
/// set, gives its peer 50 ms to post a receive. That is longer than the kernel keeps a thread of normal priority from a
/// core that a few others use. On Linux the timer is 655 ms (code 0), so no program counts on a short one.
const MIN_RNR_TIMER: u8 = 20;
/// Default ACK timeout of QPs of connections: 0.54 s.
const ACK_TIMEOUT: u8 = 17;

/// `enum rdma_cm_event_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum CmEventKind {
    AddrResolved = 0,
    AddrError = 1,
    RouteResolved = 2,
    ConnectRequest = 4,
    ConnectResponse = 5,
    Unreachable = 7,
    Rejected = 8,
    Established = 9,
    Disconnected = 10,
    MulticastJoin = 12,
    TimewaitExit = 15,
}

/// Linux's error numbers, which are used as statuses of events.
const ETIMEDOUT: i32 = 110;
const ECONNRESET: i32 = 104;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Idle,
    Bound,
    /// No vRNIC or device with the address is known yet.
    AddrQuery,
    AddrResolved,
    RouteResolved,
    Listening,
    /// A REQ or SIDR_REQ was sent.
    ReqSent,
    /// A REQ or SIDR_REQ was received, and waits for the program's answer.
    ReqReceived,
    RepSent,
    RepReceived,
    Established,
    DreqSent,
    TimeWait,
    /// Refused, failed or disconnected.
    Closed,
}

/// An IP address and a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Addr {
    pub ip: IpAddr,
    pub port: u16,
}

impl Addr {
    fn read(a: &abi::CmAddr) -> Result<Option<Addr>> {
        let v6 = Ipv6Addr::from(a.ip);
        let ip = match a.family {
            0 => return Ok(None),
            4 => IpAddr::V4(v6.to_ipv4_mapped().unwrap_or(Ipv4Addr::UNSPECIFIED)),
            // A mapped address is an IPv4 address.
            6 => v6.to_ipv4_mapped().map_or(IpAddr::V6(v6), IpAddr::V4),
            _ => return Err(Status::BadValue),
        };
        Ok(Some(Addr { ip, port: a.port }))
    }

    fn write(self) -> abi::CmAddr {
        let (ip, family) = match self.ip {
            IpAddr::V4(a) => (a.to_ipv6_mapped().octets(), 4),
            IpAddr::V6(a) => (a.octets(), 6),
        };
        abi::CmAddr { ip, port: self.port, family, ..Default::default() }
    }
}

fn write(a: Option<Addr>) -> abi::CmAddr {
    a.map_or_else(Default::default, Addr::write)
}

/// The attributes of one end's QP that connection messages carry.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Ends {
    pub qpn: u32,
    /// The PSN with which the other end begins to send (IBTA vol. 1, 12.7.31).
    pub psn: u32,
    pub responder_resources: u8,
    pub initiator_depth: u8,
    pub retry_count: u8,
    pub rnr_retry_count: u8,
    pub srq: bool,
    pub flow_control: bool,
}

/// Handle of an identifier. Its session names it by [`CmId::number`].
pub(crate) type Id = Handle<CmId>;

/// An identifier of connection management, the counterpart of `struct rdma_cm_id`.
pub(crate) struct CmId {
    /// The number by which its owner names it.
    pub number: u32,
    /// `None` if the program has destroyed it, and it waits for the peer's last answer.
    pub owner: Option<SessionId>,
    pub vrnic: VrnicId,
    pub queue: u16,
    pub space: u16,
    /// Its connections are XRC connections.
    pub xrc: bool,
    pub state: State,
    pub src: Option<Addr>,
    pub dst: Option<Addr>,
    /// The number of the peer's group if that is not the own group.
    pub across: Option<u32>,
    pub reuse: bool,
    pub one_family: bool,
    pub tos: u8,
    pub ack_timeout: u8,
    pub mtu: u8,
    /// Most requests that may wait, and the number that wait.
    pub backlog: u32,
    pub waiting: u32,
    pub listener: Id,
    /// QPN and Q_Key with which requests for datagrams are answered without an event for the program.
    pub answers: Option<(u32, u32)>,
    /// The own communication ID; 0 if it has none.
    pub local_id: u32,
    pub remote_id: u32,
    pub tid: u64,
    /// True for the end that asked for the connection.
    pub active: bool,
    pub own: Ends,
    pub peer: Ends,
    /// The message that is repeated until it is answered.
    pub sent: Option<Box<[u8; MAD_BYTES]>>,
    pub tries: u8,
    /// Distinguishes this wait from older ones.
    pub timer: u32,
    /// Q_Key of the peer's QP, for datagrams.
    pub peer_qkey: u32,
}

impl CmId {
    pub fn is_datagram(&self) -> bool {
        self.space == port_space::UDP
    }

    pub fn remote(&self) -> Option<Gid> {
        self.dst.map(|d| Gid::from_ip(d.ip))
    }

    fn params(&self) -> abi::CmParam {
        // This end's initiator depth is limited by the peer's responder resources, and the other way round.
        abi::CmParam {
            qpn: self.peer.qpn,
            qkey: if self.is_datagram() { self.peer_qkey } else { 0 },
            responder_resources: self.peer.initiator_depth,
            initiator_depth: self.peer.responder_resources,
            flow_control: self.peer.flow_control.into(),
            retry_count: self.peer.retry_count,
            rnr_retry_count: self.peer.rnr_retry_count,
            srq: self.peer.srq.into(),
            ..Default::default()
        }
    }
}

/// A request that waits a moment for a listener. A server that serves one client after the other may have no listener
/// for a moment, and its next client may be fast.
pub(crate) struct Early {
    pub until: u64,
    pub vrnic: VrnicId,
    pub own: Gid,
    pub from: Gid,
    pub service: u64,
    pub mad: Box<[u8; MAD_BYTES]>,
}

/// The state of connection management of a host.
#[derive(Default)]
pub(crate) struct Cm {
    pub ids: Slab<CmId>,
    /// By owner and number.
    pub numbers: BTreeMap<(SessionId, u32), Id>,
    /// Number of identifiers of each vRNIC.
    pub used: HashMap<VrnicId, usize>,
    /// The identifiers that have a port, by vRNIC, port space and port.
    pub ports: HashMap<(VrnicId, u16, u16), Vec<Id>>,
    pub by_local_id: HashMap<u32, Id>,
    /// The identifiers of received requests, by vRNIC, sender's GID, sender's communication ID, and whether it is for
    /// datagrams.
    pub requests: HashMap<(VrnicId, Gid, u32, bool), Id>,
    pub events: BTreeMap<(SessionId, u16), VecDeque<abi::CmEvent>>,
    /// The memory that the events of each session are charged for.
    pub kept: HashMap<SessionId, Taken>,
    pub timers: BinaryHeap<Reverse<(u64, Id, u32)>>,
    /// Number of timers that were left after stopped ones were removed the last time.
    pub timers_kept: usize,
    /// Requests to services without a listener, in order of their deadlines.
    pub early: VecDeque<Early>,
    pub psn: Psn,
    /// Identifiers whose connections are to be checked again, because the rules have changed.
    pub doubts: Vec<Id>,
}

impl Cm {
    /// When the next timer fires.
    pub fn next_timeout(&self) -> Option<u64> {
        let early = self.early.front().map(|e| e.until);
        self.timers.peek().map(|t| t.0.0).into_iter().chain(early).min()
    }

    /// The listeners of a vRNIC, as text: port space, address and port.
    pub fn listeners(&self, vrnic: VrnicId) -> Vec<String> {
        let space = |c: &CmId| match c.space {
            port_space::TCP => "TCP",
            port_space::UDP => "UDP",
            _ => "IB",
        };
        let listening = self.ids.iter().filter(|(_, c)| c.vrnic == vrnic && c.state == State::Listening);
        let address = |c: &CmId| Some(std::net::SocketAddr::new(c.src?.ip, c.src?.port));
        listening.filter_map(|(_, c)| Some(format!("{} {}", space(c), address(c)?))).collect()
    }

    /// Number of timers, including stopped ones that were not removed yet.
    pub fn pending_timers(&self) -> usize {
        self.timers.len()
    }

    /// CM_EVENT: the next event on a completion event queue.
    pub fn next_event(&mut self, s: SessionId, queue: u32) -> Result<abi::CmEvent> {
        let key = (s, queue_of(queue)?);
        let waiting = self.events.get_mut(&key).ok_or(Status::BadHandle)?;
        let event = waiting.pop_front().ok_or(Status::BadHandle)?;
        if waiting.is_empty() {
            self.events.remove(&key);
        }
        self.let_go(s, 1);
        if event.kind == CmEventKind::ConnectRequest as u32
            && let Some(l) = self.find(s, event.listen_id).and_then(|l| self.ids.get_mut(l))
        {
            l.waiting = l.waiting.saturating_sub(1);
        }
        Ok(event)
    }

    /// The identifier of a session with this number.
    fn find(&self, s: SessionId, number: u32) -> Option<Id> {
        self.numbers.get(&(s, number)).copied()
    }

    /// Ends the charge for `events` events of a session, which do not wait any more.
    fn let_go(&mut self, s: SessionId, events: usize) {
        if let Some(kept) = self.kept.get_mut(&s) {
            kept.give(events * EVENT_BYTES);
            if kept.bytes() == 0 {
                self.kept.remove(&s);
            }
        }
    }
}

/// Connection management together with the core. It moves no QP and touches no memory of a program: it reads addresses,
/// sends messages and raises events for sessions.
pub(crate) struct Manager<'a> {
    pub cm: &'a mut Cm,
    pub core: &'a mut Core,
}

impl Manager<'_> {
    /// The identifier of a session with this number.
    fn own_id(&self, s: SessionId, number: u32) -> Result<Id> {
        self.cm.find(s, number).ok_or(Status::BadHandle)
    }

    /// CM. Returns the number of the identifier and the address that it is bound to.
    pub fn command(&mut self, s: SessionId, r: &abi::CmReq) -> Result<abi::CmResp> {
        let op = CmOp::from_raw(r.op).ok_or(Status::BadValue)?;
        let id = if op == CmOp::Create { self.create(s, r)? } else { self.own_id(s, r.id)? };
        let mut dropped = 0;
        match op {
            CmOp::Create => {}
            CmOp::Destroy => {
                let queue = self.cm.ids.get(id).ok_or(Status::BadHandle)?.queue;
                let waiting = |c: &Cm| c.events.get(&(s, queue)).map_or(0, VecDeque::len);
                let before = waiting(self.cm);
                self.destroy(id);
                let dropped = before.saturating_sub(waiting(self.cm)) as u32;
                self.deliver_local_mads();
                return Ok(abi::CmResp { id: r.id, dropped, ..Default::default() });
            }
            CmOp::Bind => self.bind(id, Addr::read(&r.src)?.ok_or(Status::BadValue)?)?,
            CmOp::ResolveAddr => self.resolve(id, r)?,
            CmOp::ResolveRoute => {
                self.expect(id, &[State::AddrResolved])?.state = State::RouteResolved;
                self.raise(id, CmEventKind::RouteResolved, 0, &[]);
            }
            CmOp::Listen => {
                self.set_answers(s, id, &r.param)?;
                self.listen(id, r.value)?;
            }
            CmOp::Connect => self.connect(id, r)?,
            CmOp::Accept => self.accept(id, r)?,
            CmOp::Reject => self.reject(id, r)?,
            CmOp::Establish => self.establish(id)?,
            CmOp::Disconnect => self.disconnect(id)?,
            CmOp::Migrate => dropped = self.migrate(s, id, r.queue)?,
            CmOp::SetOption => self.set_option(id, r.option, r.value)?,
            CmOp::Join => self.join(id, r)?,
            // Nothing is to be undone: the program attaches its QP to the group, and detaches it.
            CmOp::Leave => {}
        }
        self.deliver_local_mads();
        let (id, src) = self.cm.ids.get(id).map_or((r.id, None), |c| (c.number, c.src));
        Ok(abi::CmResp { id, dropped, src: write(src) })
    }

    fn expect(&mut self, id: Id, states: &[State]) -> Result<&mut CmId> {
        self.cm.ids.get_mut(id).filter(|c| states.contains(&c.state)).ok_or(Status::BadState)
    }

    /// The address vector of the peer of an identifier.
    fn address_vector(&self, c: &CmId) -> Result<abi::AhAttr> {
        self.ah_to(c, c.remote().ok_or(Status::BadState)?)
    }

    fn ah_to(&self, c: &CmId, dgid: Gid) -> Result<abi::AhAttr> {
        let src = c.src.ok_or(Status::BadState)?;
        let own = Gid::from_ip(src.ip);
        let index = self.core.gids(c.vrnic).iter().position(|g| *g == own).ok_or(Status::NoDevice)?;
        let grh = abi::GlobalRoute {
            dgid: dgid.0,
            sgid_index: index as u8,
            hop_limit: HOP_LIMIT,
            traffic_class: c.tos,
            ..Default::default()
        };
        Ok(abi::AhAttr { grh, is_global: 1, port_num: 1, ..Default::default() })
    }

    /// Raises an event for the owner of an identifier.
    fn raise(&mut self, id: Id, kind: CmEventKind, status: i32, private: &[u8]) {
        if let Some(c) = self.cm.ids.get(id)
            && let Some(owner) = c.owner
        {
            let event = self.event(c, 0, kind, status, private);
            self.push_event(owner, c.queue, event);
        }
    }

    /// Raises an event for the owner of a listener: a request has come, whose identifier is `id`.
    fn raise_request(&mut self, listener: Id, id: Id, private: &[u8]) {
        if let (Some(l), Some(c)) = (self.cm.ids.get(listener), self.cm.ids.get(id))
            && let Some(owner) = l.owner
        {
            let event = self.event(c, l.number, CmEventKind::ConnectRequest, 0, private);
            self.push_event(owner, l.queue, event);
        }
    }

    fn event(&self, c: &CmId, listen_id: u32, kind: CmEventKind, status: i32, private: &[u8]) -> abi::CmEvent {
        let mut event = abi::CmEvent {
            id: c.number,
            listen_id,
            kind: kind as u32,
            status,
            src: write(c.src),
            dst: write(c.dst),
            param: abi::CmParam { private_len: private.len() as u8, ..c.params() },
            ah: self.address_vector(c).unwrap_or_default(),
            ..Default::default()
        };
        event.private.as_flattened_mut()[..private.len()].copy_from_slice(private);
        event
    }

    fn push_event(&mut self, owner: SessionId, queue: u16, event: abi::CmEvent) {
        let room = self.core.objects.vrnic_of(owner).map(|v| self.core.objects.other_room(v)).unwrap_or_default();
        self.cm.kept.entry(owner).or_default().force(&room, EVENT_BYTES);
        self.append_event(owner, queue, event);
    }

    /// Appends an event whose memory is charged already.
    fn append_event(&mut self, owner: SessionId, queue: u16, event: abi::CmEvent) {
        self.cm.events.entry((owner, queue)).or_default().push_back(event);
        self.core.push_output(Output::Connection { session: owner, queue });
    }
}

fn queue_of(queue: u32) -> Result<u16> {
    if queue < abi::MAX_CHANNELS { Ok(queue as u16) } else { Err(Status::BadValue) }
}

/// The private data of a command; an error if it is longer than `room`.
fn private_of(r: &abi::CmReq, room: usize) -> Result<&[u8]> {
    r.private.as_flattened().get(..usize::from(r.param.private_len)).filter(|p| p.len() <= room).ok_or(Status::BadValue)
}
