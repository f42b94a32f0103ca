//! Connection management: RDMA connections by IP address and port, as `rdma_cm(7)` has them, with messages that any
//! RoCE peer understands (IBTA vol. 1, chapter 12; annex A11).
//!
//! It lies with the RNIC, not in the program: it answers while the program does something else, and what a program that
//! ends was connected to hears of it. Here are the identifiers and the commands on them; `connect` makes and ends
//! connections, `protocol` sends, receives and repeats the messages. A QP is its owner's: CM_QP_ATTR says how to move it.

mod connect;
mod protocol;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use unirdma_abi as abi;
use unirdma_abi::{CmOp, Status, cm_option, port_space};
use unirdma_formats::cm::{MAD_BYTES, UDP_QKEY, reason};
use unirdma_formats::net::HOP_LIMIT;
use unirdma_formats::{Gid, Psn, QpState, access, attr_mask as m};

use crate::multicast::MULTICAST_QPN;
use crate::objects::{SessionId, VnicId};
use crate::rnic::{Output, Rnic};
use crate::slab::Numbered;

type Result<T> = std::result::Result<T, Status>;

/// Identifiers of one vRNIC.
const MAX_IDS: usize = 65_536;
/// Events that wait on a queue, beyond which no group is joined. (An identifier has few others at a time.)
const MAX_EVENTS: usize = 65_536;
/// Requests that wait at an identifier, at most.
const MAX_BACKLOG: u32 = 4096;
/// Ports that are given when none is asked for.
const FREE_PORTS: std::ops::Range<u16> = 32_768..61_000;
/// RNR timer of QPs of connections: 0.64 ms.
const MIN_RNR_TIMER: u8 = 12;
/// ACK timeout of QPs of connections unless set: 0.54 s.
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

/// Linux's ETIMEDOUT, ECONNRESET: statuses of events.
const ETIMEDOUT: i32 = 110;
const ECONNRESET: i32 = 104;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Idle,
    Bound,
    /// Nobody has the address yet.
    AddrQuery,
    AddrResolved,
    RouteResolved,
    Listening,
    /// A REQ or SIDR_REQ was sent.
    ReqSent,
    /// A request waits for its program.
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
    ip: IpAddr,
    port: u16,
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

/// What one end of a connection says of its QP.
#[derive(Clone, Copy, Debug, Default)]
struct Ends {
    qpn: u32,
    /// Where the other end shall begin to send (IBTA vol. 1, 12.7.31).
    psn: u32,
    responder_resources: u8,
    initiator_depth: u8,
    retry_count: u8,
    rnr_retry_count: u8,
    srq: bool,
    flow_control: bool,
}

/// An identifier of connection management: what `struct rdma_cm_id` stands for.
pub(crate) struct CmId {
    /// `None`: its program has given it back, and it waits for its last answer.
    owner: Option<SessionId>,
    vnic: VnicId,
    queue: u16,
    space: u16,
    /// Its connections are XRC's.
    xrc: bool,
    state: State,
    src: Option<Addr>,
    dst: Option<Addr>,
    reuse: bool,
    one_family: bool,
    tos: u8,
    ack_timeout: u8,
    mtu: u8,
    /// Requests that may wait, and how many do.
    backlog: u32,
    waiting: u32,
    listener: u32,
    /// Requests for datagrams are answered with this QPN and Q_Key, and the program never hears of them.
    answers: Option<(u32, u32)>,
    /// 0: none.
    local_id: u32,
    remote_id: u32,
    tid: u64,
    /// It asked for the connection.
    active: bool,
    own: Ends,
    peer: Ends,
    /// The message that is sent again until it is answered.
    sent: Option<Box<[u8; MAD_BYTES]>>,
    tries: u8,
    /// Distinguishes this wait from older ones.
    timer: u32,
    /// Of the peer's QP, for datagrams.
    peer_qkey: u32,
}

impl CmId {
    fn is_datagram(&self) -> bool {
        self.space == port_space::UDP
    }

    fn remote(&self) -> Option<Gid> {
        self.dst.map(|d| Gid::from_ip(d.ip))
    }

    fn params(&self) -> abi::CmParam {
        // What the peer can hold is what this end may ask for, and the other way round.
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

/// A request that waits a moment for somebody to listen: a server that serves one client after the other is between two
/// listeners now and then, and its next client may be fast.
struct Early {
    /// `None` until time is known.
    until: Option<u64>,
    vnic: VnicId,
    own: Gid,
    from: Gid,
    service: u64,
    mad: Box<[u8; MAD_BYTES]>,
}

/// The connection management of a host.
#[derive(Default)]
pub(crate) struct Cm {
    ids: Numbered<CmId>,
    /// How many each vRNIC has.
    used: HashMap<VnicId, usize>,
    /// Of each vRNIC, port space and port: who has it.
    ports: HashMap<(VnicId, u16, u16), Vec<u32>>,
    by_local_id: HashMap<u32, u32>,
    /// Requests that came in: of a vRNIC, from a GID, with a communication ID, for datagrams or not.
    requests: HashMap<(VnicId, Gid, u32, bool), u32>,
    events: HashMap<(SessionId, u16), VecDeque<abi::CmEvent>>,
    /// Messages between vRNICs of this host.
    local: VecDeque<(VnicId, Gid, Gid, Box<[u8; MAD_BYTES]>)>,
    timers: BinaryHeap<Reverse<(u64, u32, u32)>>,
    /// How many there were when those that were stopped had last been thrown away.
    timers_kept: usize,
    /// Timers that begin when time is known.
    fresh: Vec<(u64, u32, u32)>,
    /// Requests to services that nobody listens to yet, in order of their deadlines.
    early: VecDeque<Early>,
    psn: Psn,
}

impl Cm {
    /// When something is due; at once if a timer has not begun.
    pub fn next_timeout(&self) -> Option<u64> {
        if !self.fresh.is_empty() || self.early.back().is_some_and(|e| e.until.is_none()) {
            return Some(0);
        }
        self.timers.peek().map(|t| t.0.0).into_iter().chain(self.early.front().and_then(|e| e.until)).min()
    }
}

impl Rnic {
    /// Where programs of a vRNIC listen: port space, address and port.
    pub fn listeners(&self, vnic: VnicId) -> Vec<String> {
        let space = |c: &CmId| match c.space {
            port_space::TCP => "TCP",
            port_space::UDP => "UDP",
            _ => "IB",
        };
        let listening = self.cm.ids.iter().filter(|(_, c)| c.vnic == vnic && c.state == State::Listening);
        let address = |c: &CmId| Some(std::net::SocketAddr::new(c.src?.ip, c.src?.port));
        listening.filter_map(|(_, c)| Some(format!("{} {}", space(c), address(c)?))).collect()
    }

    /// Timers of connection management, with those that were stopped and not yet thrown away.
    pub fn pending_timers(&self) -> usize {
        self.cm.timers.len() + self.cm.fresh.len()
    }

    fn own_id(&mut self, s: SessionId, id: u32) -> Result<&mut CmId> {
        self.cm.ids.get_mut(id).filter(|c| c.owner == Some(s)).ok_or(Status::BadHandle)
    }

    /// CM. Returns the identifier and the address that it is bound to.
    ///
    /// # Errors
    /// `BadState` for what its state does not allow, `BadValue`, `AddressInUse`, `NoDevice` for an address that is not
    /// the vRNIC's, `Unreachable`, `Exhausted`.
    pub fn cm(&mut self, s: SessionId, r: &abi::CmReq) -> Result<abi::CmResp> {
        let op = CmOp::from_raw(r.op).ok_or(Status::BadValue)?;
        let id = if op == CmOp::Create { self.cm_create(s, r)? } else { r.id };
        self.own_id(s, id)?;
        let mut dropped = 0;
        match op {
            CmOp::Create => {}
            CmOp::Destroy => {
                let queue = self.own_id(s, id)?.queue;
                let waiting = |c: &Cm| c.events.get(&(s, queue)).map_or(0, VecDeque::len);
                let before = waiting(&self.cm);
                self.cm_destroy(id);
                let dropped = before.saturating_sub(waiting(&self.cm)) as u32;
                self.deliver_local_mads();
                return Ok(abi::CmResp { id, dropped, ..Default::default() });
            }
            CmOp::Bind => self.cm_bind(id, Addr::read(&r.src)?.ok_or(Status::BadValue)?)?,
            CmOp::ResolveAddr => self.cm_resolve(id, r)?,
            CmOp::ResolveRoute => {
                self.expect(id, &[State::AddrResolved])?.state = State::RouteResolved;
                self.raise(id, CmEventKind::RouteResolved, 0, &[]);
            }
            CmOp::Listen => {
                self.cm_answers(s, id, &r.param)?;
                self.cm_listen(id, r.value)?;
            }
            CmOp::Connect => self.cm_connect(id, r)?,
            CmOp::Accept => self.cm_accept(id, r)?,
            CmOp::Reject => self.cm_reject(id, r)?,
            CmOp::Establish => self.cm_establish(id)?,
            CmOp::Disconnect => self.cm_disconnect(id)?,
            CmOp::Migrate => dropped = self.cm_migrate(s, id, r.queue)?,
            CmOp::SetOption => self.cm_set(id, r.option, r.value)?,
            CmOp::Join => self.cm_join(id, r)?,
            // Joining attaches nothing: the program attaches its QP, and detaches it.
            CmOp::Leave => {}
        }
        self.deliver_local_mads();
        let src = self.cm.ids.get(id).and_then(|c| c.src);
        Ok(abi::CmResp { id, dropped, src: write(src) })
    }

    /// CM_EVENT: the next event on a completion event queue.
    ///
    /// # Errors
    /// `BadHandle` if there is none.
    pub fn cm_event(&mut self, s: SessionId, queue: u32) -> Result<abi::CmEvent> {
        let queue = queue_of(queue)?;
        let event = self.cm.events.get_mut(&(s, queue)).and_then(VecDeque::pop_front).ok_or(Status::BadHandle)?;
        if event.kind == CmEventKind::ConnectRequest as u32
            && let Some(l) = self.cm.ids.get_mut(event.listen_id)
        {
            l.waiting = l.waiting.saturating_sub(1);
        }
        Ok(event)
    }

    fn expect(&mut self, id: u32, states: &[State]) -> Result<&mut CmId> {
        self.cm.ids.get_mut(id).filter(|c| states.contains(&c.state)).ok_or(Status::BadState)
    }

    fn cm_create(&mut self, s: SessionId, r: &abi::CmReq) -> Result<u32> {
        let vnic = self.vnic_of(s)?;
        let queue = queue_of(r.queue)?;
        if ![port_space::TCP, port_space::UDP, port_space::IB].contains(&r.port_space) {
            return Err(Status::Unsupported);
        }
        let id = self.cm_insert(vnic, Some(s), queue, r.port_space)?;
        self.own_id(s, id)?.xrc = r.option == abi::CM_XRC;
        Ok(id)
    }

    fn cm_insert(&mut self, vnic: VnicId, owner: Option<SessionId>, queue: u16, space: u16) -> Result<u32> {
        let used = self.cm.used.entry(vnic).or_default();
        if *used >= MAX_IDS {
            return Err(Status::Exhausted);
        }
        *used += 1;
        let id = CmId {
            owner,
            vnic,
            queue,
            space,
            xrc: false,
            state: State::Idle,
            src: None,
            dst: None,
            reuse: false,
            one_family: false,
            tos: 0,
            ack_timeout: ACK_TIMEOUT,
            mtu: 0,
            backlog: 0,
            waiting: 0,
            listener: 0,
            answers: None,
            local_id: 0,
            remote_id: 0,
            tid: 0,
            active: false,
            own: Ends::default(),
            peer: Ends::default(),
            sent: None,
            tries: 0,
            timer: 0,
            peer_qkey: UDP_QKEY,
        };
        Ok(self.cm.ids.insert(id))
    }

    /// True if two identifiers may not have one port at a time.
    fn conflicts(&self, id: u32, other: u32, ip: IpAddr) -> bool {
        let (Some(a), Some(b)) = (self.cm.ids.get(id), self.cm.ids.get(other)) else { return false };
        let Some(there) = b.src else { return false };
        let any = |ip: IpAddr| ip.is_unspecified();
        let families = |wild: IpAddr, one: bool, ip: IpAddr| wild.is_ipv4() == ip.is_ipv4() || wild.is_ipv6() && !one;
        let meets = there.ip == ip
            || any(there.ip) && families(there.ip, b.one_family, ip)
            || any(ip) && families(ip, a.one_family, there.ip);
        meets && !(a.reuse && b.reuse && (b.state != State::Listening || b.answers.is_some()))
    }

    fn cm_bind(&mut self, id: u32, to: Addr) -> Result<()> {
        self.expect(id, &[State::Idle])?;
        let ip = self.local_ip(id, to.ip)?;
        let c = self.cm.ids.get(id).ok_or(Status::BadHandle)?;
        let (vnic, space) = (c.vnic, c.space);
        let port = if to.port != 0 {
            let taken = self.cm.ports.get(&(vnic, space, to.port)).into_iter().flatten();
            if taken.copied().any(|other| self.conflicts(id, other, ip)) {
                return Err(Status::AddressInUse);
            }
            to.port
        } else {
            let n = u64::from(FREE_PORTS.end - FREE_PORTS.start);
            let first = self.random.cm_ports.next_u64() % n;
            let free = |p: &u16| !self.cm.ports.contains_key(&(vnic, space, *p));
            let mut all = (0..n).map(|i| FREE_PORTS.start + ((first + i) % n) as u16);
            all.find(free).ok_or(Status::AddressInUse)?
        };
        self.cm.ports.entry((vnic, space, port)).or_default().push(id);
        let c = self.expect(id, &[State::Idle])?;
        (c.src, c.state) = (Some(Addr { ip, port }), State::Bound);
        Ok(())
    }

    /// The vRNIC's own address that `ip` stands for: loopback is its first one.
    fn local_ip(&self, id: u32, ip: IpAddr) -> Result<IpAddr> {
        let c = self.cm.ids.get(id).ok_or(Status::BadHandle)?;
        let v = self.vnics.get(c.vnic.0).ok_or(Status::BadHandle)?;
        if ip.is_unspecified() || v.gids.contains(&Gid::from_ip(ip)) {
            return Ok(ip);
        }
        let loopback = v.first(ip.is_ipv4()).filter(|_| ip.is_loopback()).map(|g| g.ip());
        loopback.ok_or(Status::NoDevice)
    }

    fn cm_resolve(&mut self, id: u32, r: &abi::CmReq) -> Result<()> {
        let mut dst = Addr::read(&r.dst)?.ok_or(Status::BadValue)?;
        if dst.ip.is_loopback() {
            dst.ip = self.local_ip(id, dst.ip)?;
        }
        if self.expect(id, &[State::Idle, State::Bound])?.state == State::Idle {
            let any = match dst.ip {
                IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
                IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
            };
            self.cm_bind(id, Addr::read(&r.src)?.unwrap_or(Addr { ip: any, port: 0 }))?;
        }
        let c = self.expect(id, &[State::Bound])?;
        let (vnic, bound) = (c.vnic, c.src.ok_or(Status::BadState)?);
        if !bound.ip.is_unspecified() && bound.ip.is_ipv4() != dst.ip.is_ipv4() {
            return Err(Status::BadValue);
        }
        let v = self.vnics.get(vnic.0).ok_or(Status::BadHandle)?;
        let own = v.first(dst.ip.is_ipv4()).map(|g| g.ip()).ok_or(Status::NoDevice)?;
        let c = self.expect(id, &[State::Bound])?;
        let ip = if bound.ip.is_unspecified() { own } else { bound.ip };
        (c.src, c.dst, c.state) = (Some(Addr { ip, ..bound }), Some(dst), State::AddrQuery);
        if !self.cm_reach(id) {
            self.arm_cm(id, u64::from(r.value) * 1_000_000);
        }
        Ok(())
    }

    /// The destination of an identifier that waits for it is resolved, if somebody has the address now.
    fn cm_reach(&mut self, id: u32) -> bool {
        let Some(c) = self.cm.ids.get(id).filter(|c| c.state == State::AddrQuery) else { return false };
        let (Some(dst), Some(v)) = (c.dst, self.vnics.get(c.vnic.0)) else { return false };
        let (group, gid) = (v.group, Gid::from_ip(dst.ip));
        let there =
            dst.ip.is_multicast() || self.find_vnic(group, gid).is_some() || self.routes.contains_key(&(group, gid));
        if there {
            self.stop_timer(id);
            if let Some(c) = self.cm.ids.get_mut(id) {
                c.state = State::AddrResolved;
            }
            self.raise(id, CmEventKind::AddrResolved, 0, &[]);
        }
        there
    }

    /// Addresses have appeared: whoever waits for one may go on.
    pub(crate) fn cm_addresses_changed(&mut self) {
        for id in self.cm.ids.handles(|c| c.state == State::AddrQuery) {
            self.cm_reach(id);
        }
    }

    /// Notes the QP with which requests for datagrams are answered without asking the program, if it names one.
    fn cm_answers(&mut self, s: SessionId, id: u32, p: &abi::CmParam) -> Result<()> {
        if p.qpn == 0 {
            return Ok(());
        }
        self.own_qp(s, p.qpn)?;
        let c = self.cm.ids.get_mut(id).filter(|c| c.is_datagram()).ok_or(Status::BadValue)?;
        c.answers = Some((p.qpn, if p.qkey == 0 { UDP_QKEY } else { p.qkey }));
        Ok(())
    }

    fn cm_listen(&mut self, id: u32, backlog: u32) -> Result<()> {
        if self.expect(id, &[State::Idle, State::Bound, State::Listening])?.state == State::Idle {
            self.cm_bind(id, Addr { ip: IpAddr::V6(Ipv6Addr::UNSPECIFIED), port: 0 })?;
        }
        let c = self.expect(id, &[State::Bound, State::Listening])?;
        c.backlog = if backlog == 0 { 1024 } else { backlog.min(MAX_BACKLOG) };
        let (key, src) = ((c.vnic, c.space, c.src.map_or(0, |a| a.port)), c.src);
        let shares = c.reuse && c.answers.is_some();
        // An address may be shared by identifiers that connect, not by ones that listen, but for those that answer by themselves:
        // there the last one does.
        let others = self.cm.ports.get(&key).into_iter().flatten().filter(|&&o| o != id);
        let taken = others.filter_map(|&o| self.cm.ids.get(o)).any(|o| {
            o.state == State::Listening
                && !(shares && o.reuse && o.answers.is_some())
                && (o.src == src || o.src.is_some_and(|a| a.ip.is_unspecified()) && !o.one_family)
        });
        if taken {
            return Err(Status::AddressInUse);
        }
        self.expect(id, &[State::Bound, State::Listening])?.state = State::Listening;
        self.hear_early();
        Ok(())
    }

    fn cm_set(&mut self, id: u32, option: u8, value: u32) -> Result<()> {
        let c = self.cm.ids.get_mut(id).ok_or(Status::BadHandle)?;
        match option {
            cm_option::TOS => c.tos = value as u8,
            cm_option::REUSE_ADDRESS => c.reuse = value != 0,
            cm_option::ONE_FAMILY => c.one_family = value != 0,
            cm_option::ACK_TIMEOUT if value <= 31 => c.ack_timeout = value as u8,
            _ => return Err(Status::BadValue),
        }
        Ok(())
    }

    /// Returns how many events have left the old queue.
    fn cm_migrate(&mut self, s: SessionId, id: u32, queue: u32) -> Result<u32> {
        let queue = queue_of(queue)?;
        let old = std::mem::replace(&mut self.own_id(s, id)?.queue, queue);
        let waiting = self.cm.events.remove(&(s, old)).unwrap_or_default();
        let (moved, stay): (VecDeque<_>, VecDeque<_>) = waiting.into_iter().partition(|e| e.id == id);
        self.cm.events.insert((s, old), stay);
        let n = moved.len() as u32;
        for e in moved {
            self.push_event(s, queue, e);
        }
        Ok(n)
    }

    /// A multicast group's address is its GID (annex A17): nobody is asked.
    fn cm_join(&mut self, id: u32, r: &abi::CmReq) -> Result<()> {
        let group = Addr::read(&r.dst)?.filter(|a| a.ip.is_multicast()).ok_or(Status::BadValue)?;
        let c = self.cm.ids.get(id).filter(|c| c.is_datagram() && c.src.is_some()).ok_or(Status::BadState)?;
        let (owner, queue) = (c.owner.ok_or(Status::BadHandle)?, c.queue);
        if self.cm.events.get(&(owner, queue)).is_some_and(|e| e.len() >= MAX_EVENTS) {
            return Err(Status::Exhausted);
        }
        let event = abi::CmEvent {
            id,
            listen_id: r.value,
            kind: CmEventKind::MulticastJoin as u32,
            src: write(c.src),
            dst: group.write(),
            param: abi::CmParam { qpn: MULTICAST_QPN, qkey: UDP_QKEY, ..Default::default() },
            ah: self.ah_to(c, Gid::from_ip(group.ip))?,
            ..Default::default()
        };
        self.push_event(owner, queue, event);
        Ok(())
    }

    /// CM_QP_ATTR: what a QP needs to go to `state` for a connection; the attributes and their mask.
    ///
    /// # Errors
    /// `BadState` if the connection is not that far.
    pub fn cm_qp_attr(&mut self, s: SessionId, id: u32, state: u32) -> Result<(u32, abi::QpAttr)> {
        self.own_id(s, id)?;
        let c = self.cm.ids.get(id).ok_or(Status::BadHandle)?;
        let state = QpState::from_raw(state).ok_or(Status::BadValue)?;
        let mut a = abi::QpAttr { qp_state: state as u8, port_num: 1, ..Default::default() };
        let datagram = c.is_datagram();
        let mask = match state {
            QpState::Init if datagram => {
                a.qkey = UDP_QKEY;
                m::PKEY_INDEX | m::PORT | m::QKEY
            }
            QpState::Init => {
                a.qp_access_flags = access::REMOTE_WRITE | access::REMOTE_READ | access::REMOTE_ATOMIC;
                m::PKEY_INDEX | m::PORT | m::ACCESS_FLAGS
            }
            QpState::Rtr if datagram => 0,
            QpState::Rts if datagram => m::SQ_PSN,
            QpState::Rtr if c.peer.qpn != 0 => {
                a.ah_attr = self.cm_ah(c)?;
                (a.path_mtu, a.dest_qp_num, a.rq_psn) = (c.mtu, c.peer.qpn, c.own.psn);
                (a.max_dest_rd_atomic, a.min_rnr_timer) = (c.own.responder_resources, MIN_RNR_TIMER);
                m::AV | m::PATH_MTU | m::DEST_QPN | m::RQ_PSN | m::MAX_DEST_RD_ATOMIC | m::MIN_RNR_TIMER
            }
            QpState::Rts if c.peer.qpn != 0 => {
                (a.timeout, a.retry_cnt, a.rnr_retry) = (c.ack_timeout, c.own.retry_count, c.own.rnr_retry_count);
                (a.sq_psn, a.max_rd_atomic) = (c.peer.psn, c.own.initiator_depth);
                m::TIMEOUT | m::RETRY_CNT | m::RNR_RETRY | m::SQ_PSN | m::MAX_QP_RD_ATOMIC
            }
            QpState::Err => 0,
            _ => return Err(Status::BadState),
        };
        Ok((m::STATE | mask, a))
    }

    /// The address vector that leads to the peer of an identifier.
    fn cm_ah(&self, c: &CmId) -> Result<abi::AhAttr> {
        self.ah_to(c, c.remote().ok_or(Status::BadState)?)
    }

    fn ah_to(&self, c: &CmId, dgid: Gid) -> Result<abi::AhAttr> {
        let src = c.src.ok_or(Status::BadState)?;
        let own = Gid::from_ip(src.ip);
        let index = self.gids(c.vnic).iter().position(|g| *g == own).ok_or(Status::NoDevice)?;
        let grh = abi::GlobalRoute {
            dgid: dgid.0,
            sgid_index: index as u8,
            hop_limit: HOP_LIMIT,
            traffic_class: c.tos,
            ..Default::default()
        };
        Ok(abi::AhAttr { grh, is_global: 1, port_num: 1, ..Default::default() })
    }

    /// Tells the owner of an identifier that something has happened.
    fn raise(&mut self, id: u32, kind: CmEventKind, status: i32, private: &[u8]) {
        self.raise_for(id, id, 0, kind, status, private);
    }

    /// As [`Rnic::raise`], on the queue of identifier `at`.
    fn raise_for(&mut self, at: u32, id: u32, listen_id: u32, kind: CmEventKind, status: i32, private: &[u8]) {
        let Some(c) = self.cm.ids.get(id) else { return };
        let Some(to) = self.cm.ids.get(at) else { return };
        let (Some(owner), queue) = (to.owner, to.queue) else { return };
        let mut event = abi::CmEvent {
            id,
            listen_id,
            kind: kind as u32,
            status,
            src: write(c.src),
            dst: write(c.dst),
            param: abi::CmParam { private_len: private.len() as u8, ..c.params() },
            ah: self.cm_ah(c).unwrap_or_default(),
            ..Default::default()
        };
        event.private.as_flattened_mut()[..private.len()].copy_from_slice(private);
        self.push_event(owner, queue, event);
    }

    fn push_event(&mut self, owner: SessionId, queue: u16, event: abi::CmEvent) {
        self.cm.events.entry((owner, queue)).or_default().push_back(event);
        self.push_output(Output::Connection { session: owner, queue });
    }

    /// A session is gone: its identifiers are given back.
    pub(crate) fn cm_forget_session(&mut self, s: SessionId) {
        for id in self.cm.ids.handles(|c| c.owner == Some(s)) {
            self.cm_destroy(id);
        }
        self.cm.events.retain(|k, _| k.0 != s);
        self.deliver_local_mads();
    }

    /// A vRNIC is gone: so are connections that waited for their last answer.
    pub(crate) fn cm_forget_vnic(&mut self, vnic: VnicId) {
        self.cm.early.retain(|e| e.vnic != vnic);
        for id in self.cm.ids.handles(|c| c.vnic == vnic) {
            self.cm_remove(id);
        }
        self.cm.used.remove(&vnic);
    }

    /// An identifier is given back: requests to it are refused, what is connected is disconnected.
    fn cm_destroy(&mut self, id: u32) {
        let Some(c) = self.cm.ids.get_mut(id) else { return };
        let Some(owner) = c.owner.take() else { return };
        let (queue, state) = (c.queue, c.state);
        let waiting = self.cm.events.get_mut(&(owner, queue));
        let mut refused = Vec::new();
        if let Some(events) = waiting {
            events.retain(|e| {
                if e.listen_id == id {
                    refused.push(e.id);
                }
                e.id != id && e.listen_id != id
            });
        }
        for r in refused {
            self.cm_destroy(r);
        }
        self.release_port(id);
        match state {
            State::ReqReceived | State::ReqSent | State::RepSent | State::RepReceived => {
                self.refuse(id, reason::CONSUMER, &[]);
            }
            State::Established if self.cm.ids.get(id).is_some_and(|c| !c.is_datagram()) => {
                // It stays until the peer has answered.
                return self.send_dreq(id);
            }
            State::DreqSent => return,
            _ => {}
        }
        self.cm_remove(id);
    }

    fn release_port(&mut self, id: u32) {
        let Some(c) = self.cm.ids.get(id) else { return };
        let Some(src) = c.src else { return };
        let key = (c.vnic, c.space, src.port);
        if let Some(users) = self.cm.ports.get_mut(&key) {
            users.retain(|u| *u != id);
            if users.is_empty() {
                self.cm.ports.remove(&key);
            }
        }
    }

    fn cm_remove(&mut self, id: u32) {
        self.release_port(id);
        let Some(c) = self.cm.ids.remove(id) else { return };
        if let Some(used) = self.cm.used.get_mut(&c.vnic) {
            *used -= 1;
        }
        self.cm.by_local_id.remove(&c.local_id);
        if let (Some(peer), false) = (c.remote(), c.active) {
            self.cm.requests.remove(&(c.vnic, peer, c.remote_id, c.is_datagram()));
        }
    }
}

fn queue_of(queue: u32) -> Result<u16> {
    if queue < abi::MAX_CHANNELS { Ok(queue as u16) } else { Err(Status::BadValue) }
}

/// The private data of a request, within its room.
fn private_of(r: &abi::CmReq, room: usize) -> Result<&[u8]> {
    r.private.as_flattened().get(..usize::from(r.param.private_len)).filter(|p| p.len() <= room).ok_or(Status::BadValue)
}
