//! Creates, binds, resolves, migrates and destroys identifiers.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use unirdma_abi as abi;
use unirdma_abi::{Status, cm_option, port_space};
use unirdma_formats::cm::{UDP_QKEY, reason};
use unirdma_formats::{Gid, QpState, Qpn, access, attr_mask as m};

use super::{
    ACK_TIMEOUT, Addr, CmEventKind, CmId, EVENT_BYTES, Ends, FREE_PORTS, Id, MAX_BACKLOG, MAX_EVENTS, MAX_IDS,
    MAX_PORTS_TRIED, MAX_SHARERS, MIN_RNR_TIMER, Manager, Result, State, queue_of, write,
};
use crate::multicast::MULTICAST_QPN;
use crate::objects::{SessionId, VrnicId};

/// True if an address to bind means all addresses of the vRNIC: a wildcard address, or a loopback address, which no
/// device has.
pub(super) fn is_any(ip: IpAddr) -> bool {
    ip.is_unspecified() || ip.is_loopback()
}

impl Manager<'_> {
    pub(super) fn create(&mut self, s: SessionId, r: &abi::CmReq) -> Result<Id> {
        let vrnic = self.core.objects.vrnic_of(s)?;
        let queue = queue_of(r.queue)?;
        if ![port_space::TCP, port_space::UDP, port_space::IB].contains(&r.port_space) {
            return Err(Status::Unsupported);
        }
        let id = self.insert(vrnic, s, queue, r.port_space)?;
        self.cm.ids.get_mut(id).ok_or(Status::BadHandle)?.xrc = r.option == abi::CM_XRC;
        Ok(id)
    }

    pub(super) fn insert(&mut self, vrnic: VrnicId, owner: SessionId, queue: u16, space: u16) -> Result<Id> {
        if self.cm.used.get(&vrnic).is_some_and(|used| *used >= MAX_IDS) {
            return Err(Status::Exhausted);
        }
        let number = self.core.objects.new_number(owner)?;
        let id = CmId {
            number,
            owner: Some(owner),
            vrnic,
            queue,
            space,
            xrc: false,
            state: State::Idle,
            src: None,
            dst: None,
            across: None,
            reuse: false,
            one_family: false,
            tos: 0,
            ack_timeout: ACK_TIMEOUT,
            mtu: 0,
            backlog: 0,
            waiting: 0,
            listener: Id::NONE,
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
        let id = self.cm.ids.insert(id).ok_or(Status::Exhausted)?;
        self.cm.numbers.insert((owner, number), id);
        *self.cm.used.entry(vrnic).or_default() += 1;
        Ok(id)
    }

    /// True if `id`, when bound to `ip`, could not have the same port as `other`.
    fn conflicts(&self, id: Id, other: Id, ip: IpAddr) -> bool {
        let (Some(a), Some(b)) = (self.cm.ids.get(id), self.cm.ids.get(other)) else { return false };
        let Some(there) = b.src else { return false };
        let families = |wild: IpAddr, one: bool, ip: IpAddr| wild.is_ipv4() == ip.is_ipv4() || wild.is_ipv6() && !one;
        let meets = there.ip == ip
            || is_any(there.ip) && families(there.ip, b.one_family, ip)
            || is_any(ip) && families(ip, a.one_family, there.ip);
        meets && !(a.reuse && b.reuse && (b.state != State::Listening || b.answers.is_some()))
    }

    pub(super) fn bind(&mut self, id: Id, to: Addr) -> Result<()> {
        self.expect(id, &[State::Idle])?;
        let c = self.cm.ids.get(id).ok_or(Status::BadHandle)?;
        let (ip, vrnic, space) = (to.ip, c.vrnic, c.space);
        let v = self.core.objects.vrnics.get(vrnic.0).ok_or(Status::BadHandle)?;
        if !is_any(ip) && !v.gids.contains(&Gid::from_ip(ip)) {
            return Err(Status::NoDevice);
        }
        let port = if to.port != 0 {
            let taken = self.cm.ports.get(&(vrnic, space, to.port)).map_or(&[][..], |ids| ids);
            if taken.len() >= MAX_SHARERS || taken.iter().any(|&other| self.conflicts(id, other, ip)) {
                return Err(Status::AddressInUse);
            }
            to.port
        } else {
            let n = u64::from(FREE_PORTS.end - FREE_PORTS.start);
            let first = self.core.random.cm_ports.next_u64() % n;
            let free = |p: &u16| !self.cm.ports.contains_key(&(vrnic, space, *p));
            let mut some = (0..n).map(|i| FREE_PORTS.start + ((first + i) % n) as u16).take(MAX_PORTS_TRIED);
            some.find(free).ok_or(Status::AddressInUse)?
        };
        self.cm.ports.entry((vrnic, space, port)).or_default().push(id);
        let c = self.expect(id, &[State::Idle])?;
        (c.src, c.state) = (Some(Addr { ip, port }), State::Bound);
        Ok(())
    }

    pub(super) fn resolve(&mut self, id: Id, r: &abi::CmReq) -> Result<()> {
        let mut dst = Addr::read(&r.dst)?.ok_or(Status::BadValue)?;
        if self.expect(id, &[State::Idle, State::Bound])?.state == State::Idle {
            let any = match dst.ip {
                IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
                IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
            };
            self.bind(id, Addr::read(&r.src)?.unwrap_or(Addr { ip: any, port: 0 }))?;
        }
        let c = self.expect(id, &[State::Bound])?;
        let (vrnic, bound) = (c.vrnic, c.src.ok_or(Status::BadState)?);
        if !is_any(bound.ip) && bound.ip.is_ipv4() != dst.ip.is_ipv4() {
            return Err(Status::BadValue);
        }
        let v = self.core.objects.vrnics.get(vrnic.0).ok_or(Status::BadHandle)?;
        let own = v.first(dst.ip.is_ipv4()).map(|g| g.ip()).ok_or(Status::NoDevice)?;
        if dst.ip.is_loopback() {
            dst.ip = own;
        }
        let c = self.expect(id, &[State::Bound])?;
        let ip = if is_any(bound.ip) { own } else { bound.ip };
        (c.src, c.dst, c.state) = (Some(Addr { ip, ..bound }), Some(dst), State::AddrQuery);
        if !self.reach(id) {
            self.arm(id, u64::from(r.value) * 1_000_000);
        }
        Ok(())
    }

    /// Resolves the destination of an identifier in state `AddrQuery` if a vRNIC or device with that address is known
    /// now. True if it is resolved.
    fn reach(&mut self, id: Id) -> bool {
        let Some(c) = self.cm.ids.get(id).filter(|c| c.state == State::AddrQuery) else { return false };
        let (Some(dst), Some(v)) = (c.dst, self.core.objects.vrnics.get(c.vrnic.0)) else { return false };
        let (group, gid) = (v.group, Gid::from_ip(dst.ip));
        let (vrnic, across) = (c.vrnic, self.core.across(group, gid));
        let allowed = || gid.ip().is_multicast() || self.core.may_ask(vrnic, gid, across);
        let there = self.core.is_reachable(group, gid) && allowed();
        if there {
            self.stop_timer(id);
            if let Some(c) = self.cm.ids.get_mut(id) {
                (c.state, c.across) = (State::AddrResolved, across);
            }
            self.raise(id, CmEventKind::AddrResolved, 0, &[]);
        }
        there
    }

    /// Called when addresses have been added: resolves the identifiers that wait for one of them.
    pub fn addresses_changed(&mut self) {
        for id in self.cm.ids.handles(|c| c.state == State::AddrQuery) {
            self.reach(id);
        }
    }

    /// If the program names a QP, its QPN and Q_Key answer requests for datagrams from now on, and the program gets no
    /// events for them.
    pub(super) fn set_answers(&mut self, s: SessionId, id: Id, p: &abi::CmParam) -> Result<()> {
        if p.qpn == 0 {
            return Ok(());
        }
        let vrnic = self.core.objects.vrnic_of(s)?;
        // The QPs of a program that has a VF are the VF's, whose numbers are not known here.
        let is_of_vf = self.core.objects.vf_of(vrnic).is_some() && p.qpn <= Qpn::MASK;
        if !is_of_vf {
            self.core.objects.own_qp(s, Qpn(p.qpn))?;
        }
        let c = self.cm.ids.get_mut(id).filter(|c| c.is_datagram()).ok_or(Status::BadValue)?;
        c.answers = Some((p.qpn, if p.qkey == 0 { UDP_QKEY } else { p.qkey }));
        Ok(())
    }

    pub(super) fn listen(&mut self, id: Id, backlog: u32) -> Result<()> {
        if self.expect(id, &[State::Idle, State::Bound, State::Listening])?.state == State::Idle {
            self.bind(id, Addr { ip: IpAddr::V6(Ipv6Addr::UNSPECIFIED), port: 0 })?;
        }
        let c = self.expect(id, &[State::Bound, State::Listening])?;
        c.backlog = if backlog == 0 { 1024 } else { backlog.min(MAX_BACKLOG) };
        let (key, src) = ((c.vrnic, c.space, c.src.map_or(0, |a| a.port)), c.src);
        let shares = c.reuse && c.answers.is_some();
        // Identifiers that connect may share an address. Identifiers that listen may not, unless all of them answer
        // requests without their program; then the last one answers.
        let others = self.cm.ports.get(&key).into_iter().flatten().filter(|&&o| o != id);
        let taken = others.filter_map(|&o| self.cm.ids.get(o)).any(|o| {
            o.state == State::Listening
                && !(shares && o.reuse && o.answers.is_some())
                && (o.src == src || o.src.is_some_and(|a| is_any(a.ip)) && !o.one_family)
        });
        if taken {
            return Err(Status::AddressInUse);
        }
        self.expect(id, &[State::Bound, State::Listening])?.state = State::Listening;
        self.hear_early();
        Ok(())
    }

    pub(super) fn set_option(&mut self, id: Id, option: u8, value: u32) -> Result<()> {
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

    /// Moves an identifier to another event queue. Returns the number of its events that have left the old queue.
    pub(super) fn migrate(&mut self, s: SessionId, id: Id, queue: u32) -> Result<u32> {
        let queue = queue_of(queue)?;
        let c = self.cm.ids.get_mut(id).ok_or(Status::BadHandle)?;
        let (old, number) = (std::mem::replace(&mut c.queue, queue), c.number);
        let waiting = self.cm.events.remove(&(s, old)).unwrap_or_default();
        let (moved, stay): (VecDeque<_>, VecDeque<_>) = waiting.into_iter().partition(|e| e.id == number);
        if !stay.is_empty() {
            self.cm.events.insert((s, old), stay);
        }
        let n = moved.len() as u32;
        for e in moved {
            self.append_event(s, queue, e);
        }
        Ok(n)
    }

    /// Joins a multicast group. The event is raised at once, because a group's address is its GID (annex A17) and no
    /// other host has to be asked.
    pub(super) fn join(&mut self, id: Id, r: &abi::CmReq) -> Result<()> {
        let group = Addr::read(&r.dst)?.filter(|a| a.ip.is_multicast()).ok_or(Status::BadValue)?;
        let c = self.cm.ids.get(id).filter(|c| c.is_datagram() && c.src.is_some()).ok_or(Status::BadState)?;
        let (owner, queue) = (c.owner.ok_or(Status::BadHandle)?, c.queue);
        if self.cm.kept.get(&owner).is_some_and(|kept| kept.bytes() >= MAX_EVENTS * EVENT_BYTES) {
            return Err(Status::Exhausted);
        }
        let event = abi::CmEvent {
            id: c.number,
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

    /// CM_QP_ATTR: the attributes with which a QP goes to `state` for a connection, and their mask.
    pub fn qp_attr(&self, s: SessionId, number: u32, state: u32) -> Result<(u32, abi::QpAttr)> {
        let c = self.cm.ids.get(self.own_id(s, number)?).ok_or(Status::BadHandle)?;
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
                a.ah_attr = self.address_vector(c)?;
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

    /// Destroys the identifiers of a session that has ended.
    pub fn forget_session(&mut self, s: SessionId) {
        while self.forget_ids(s, usize::MAX) {}
    }

    /// Drops the events of a session, which no program fetches any more, and destroys up to `most` of its identifiers.
    /// True if identifiers may be left.
    pub fn forget_ids(&mut self, s: SessionId, most: usize) -> bool {
        while let Some((&key, _)) = self.cm.events.range((s, 0)..=(s, u16::MAX)).next() {
            self.cm.events.remove(&key);
        }
        self.cm.kept.remove(&s);
        let mut left = most;
        while let Some((&key, &id)) = self.cm.numbers.range((s, 0)..=(s, u32::MAX)).next().filter(|_| left > 0) {
            self.cm.numbers.remove(&key);
            self.destroy(id);
            left -= 1;
        }
        self.deliver_local_mads();
        left == 0
    }

    /// Removes all identifiers of a vRNIC that has been removed, also those that wait for their peer's last answer.
    pub fn forget_vrnic(&mut self, vrnic: VrnicId) {
        self.cm.early.retain(|e| e.vrnic != vrnic);
        for id in self.cm.ids.handles(|c| c.vrnic == vrnic) {
            self.remove(id);
        }
        self.cm.used.remove(&vrnic);
    }

    /// Destroys an identifier: requests to it are refused, and its connection is ended.
    pub(super) fn destroy(&mut self, id: Id) {
        let Some(c) = self.cm.ids.get_mut(id) else { return };
        let Some(owner) = c.owner.take() else { return };
        let (queue, state, number) = (c.queue, c.state, c.number);
        self.cm.numbers.remove(&(owner, number));
        let mut refused = Vec::new();
        if let Some(events) = self.cm.events.get_mut(&(owner, queue)) {
            let before = events.len();
            events.retain(|e| {
                if e.listen_id == number {
                    refused.push(e.id);
                }
                e.id != number && e.listen_id != number
            });
            let gone = before - events.len();
            if events.is_empty() {
                self.cm.events.remove(&(owner, queue));
            }
            self.cm.let_go(owner, gone);
        }
        for r in refused {
            if let Ok(r) = self.own_id(owner, r) {
                self.destroy(r);
            }
        }
        self.release_port(id);
        match state {
            State::ReqReceived | State::ReqSent | State::RepSent | State::RepReceived => {
                self.refuse(id, reason::CONSUMER, &[]);
            }
            State::Established if self.cm.ids.get(id).is_some_and(|c| !c.is_datagram()) => {
                // The identifier exists until the peer has answered.
                return self.send_dreq(id);
            }
            State::DreqSent => return,
            _ => {}
        }
        self.remove(id);
    }

    fn release_port(&mut self, id: Id) {
        let Some(c) = self.cm.ids.get(id) else { return };
        let Some(src) = c.src else { return };
        let key = (c.vrnic, c.space, src.port);
        if let Some(users) = self.cm.ports.get_mut(&key) {
            users.retain(|u| *u != id);
            if users.is_empty() {
                self.cm.ports.remove(&key);
            }
        }
    }

    pub(super) fn remove(&mut self, id: Id) {
        self.release_port(id);
        let Some(c) = self.cm.ids.remove(id) else { return };
        if let Some(owner) = c.owner {
            self.cm.numbers.remove(&(owner, c.number));
        }
        if let Some(used) = self.cm.used.get_mut(&c.vrnic) {
            *used -= 1;
        }
        self.cm.by_local_id.remove(&c.local_id);
        if let (Some(peer), false) = (c.remote(), c.active) {
            self.cm.requests.remove(&(c.vrnic, peer, c.remote_id, c.is_datagram()));
        }
    }
}
