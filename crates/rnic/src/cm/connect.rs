//! Makes and ends connections: the requests of programs, and the effect of their peers' messages on an identifier.

use std::net::IpAddr;

use unirdma_abi as abi;
use unirdma_abi::{Status, port_space};
use unirdma_formats::cm::{About, IpHeader, Mad, Message, Rep, Req, UDP_QKEY, reason, sidr, user_bytes};
use unirdma_formats::wire::DEFAULT_PKEY;
use unirdma_formats::{Gid, Psn};

use super::ids::is_any;
use super::protocol::{MRA_TIMEOUT, RESPONSE_TIMEOUT, RETRIES, time_ns};
use super::{Addr, CmEventKind, CmId, ECONNRESET, Ends, Id, MAX_BACKLOG, Manager, Result, State, private_of};
use crate::objects::{MAX_RD_ATOMIC, VrnicId};

/// Prefix of the service IDs of connections over IP: bits 24 and above. The port space and the port follow (annex A11).
const IP_SERVICE: u64 = 1 << 24;
/// Value of the transport field of a REQ that refers to the field extended transport.
const EXTENDED_TRANSPORT: u8 = 3;

fn service_id(space: u16, port: u16) -> u64 {
    IP_SERVICE | u64::from(space & 0xff) << 16 | u64::from(port)
}

impl Manager<'_> {
    // The active side: asks for a connection.

    pub(super) fn connect(&mut self, id: Id, r: &abi::CmReq) -> Result<()> {
        let c = self.expect(id, &[State::RouteResolved])?;
        let (datagram, vrnic, across) = (c.is_datagram(), c.vrnic, c.across);
        let (Some(src), Some(dst)) = (c.src, c.dst) else { return Err(Status::BadState) };
        if !self.core.may_ask(vrnic, Gid::from_ip(dst.ip), across) {
            self.core.count_refused(vrnic);
            return Err(Status::Unreachable);
        }
        let private = private_of(r, if datagram { user_bytes::SIDR_REQ } else { user_bytes::REQ })?;
        let private = IpHeader { src_port: src.port, src: src.ip, dst: dst.ip }.before(private);
        let (local_id, psn) = (self.new_local_id(id), self.core.random.psns.next_u64() as u32 & 0xff_ffff);
        let mtu = self.path_mtu(vrnic, dst.ip);
        let c = self.expect(id, &[State::RouteResolved])?;
        let service_id = service_id(c.space, dst.port);
        (c.local_id, c.tid, c.mtu, c.active) = (local_id, u64::from(local_id), mtu, true);
        c.own = ends(&r.param, psn);
        let message = if datagram {
            Message::SidrReq { request_id: local_id, pkey: DEFAULT_PKEY, service_id, private }
        } else {
            Message::Req(Req {
                local_id,
                service_id,
                qpn: c.own.qpn,
                responder_resources: c.own.responder_resources,
                initiator_depth: c.own.initiator_depth,
                remote_response_timeout: RESPONSE_TIMEOUT,
                local_response_timeout: RESPONSE_TIMEOUT,
                flow_control: c.own.flow_control,
                transport: if c.xrc { EXTENDED_TRANSPORT } else { 0 },
                extended_transport: u8::from(c.xrc),
                psn,
                retry_count: c.own.retry_count,
                pkey: DEFAULT_PKEY,
                mtu,
                rnr_retry_count: c.own.rnr_retry_count,
                max_cm_retries: RETRIES,
                srq: c.own.srq,
                local_lid: 0xffff,
                remote_lid: 0xffff,
                local_gid: Gid::from_ip(src.ip),
                remote_gid: Gid::from_ip(dst.ip),
                traffic_class: c.tos,
                hop_limit: unirdma_formats::net::HOP_LIMIT,
                subnet_local: false,
                ack_timeout: c.ack_timeout,
                guid: u64::from(local_id),
                private,
                ..Req::default()
            })
        };
        let mad = Mad { tid: c.tid, message };
        c.state = State::ReqSent;
        self.send_until_answered(id, &mad);
        Ok(())
    }

    pub(super) fn on_rej(&mut self, id: Id, remote_id: u32, why: u16, private: &[u8]) {
        let Some(c) = self.cm.ids.get_mut(id) else { return };
        match c.state {
            State::ReqSent => {
                c.remote_id = remote_id;
                self.close(id, CmEventKind::Rejected, why.into(), private);
            }
            State::RepSent | State::RepReceived => self.close(id, CmEventKind::Rejected, why.into(), private),
            _ => {}
        }
    }

    pub(super) fn on_rep(&mut self, id: Id, r: &Rep) {
        let Some(c) = self.cm.ids.get_mut(id) else { return };
        match c.state {
            State::ReqSent => {
                c.remote_id = r.local_id;
                c.peer = Ends {
                    qpn: r.qpn,
                    psn: r.psn,
                    responder_resources: r.responder_resources,
                    initiator_depth: r.initiator_depth,
                    retry_count: 0,
                    rnr_retry_count: r.rnr_retry_count,
                    srq: r.srq,
                    flow_control: r.flow_control,
                };
                // The REP carries the values that the peer grants. They may be smaller than those that were asked for.
                c.own.initiator_depth = r.responder_resources.min(MAX_RD_ATOMIC);
                c.own.responder_resources = r.initiator_depth.min(MAX_RD_ATOMIC);
                c.own.rnr_retry_count = r.rnr_retry_count;
                c.state = State::RepReceived;
                self.stop_timer(id);
                self.raise(id, CmEventKind::ConnectResponse, 0, &r.private);
            }
            // The RTU was lost.
            State::Established if c.active && c.remote_id == r.local_id => self.send_rtu(id),
            _ => {}
        }
    }

    fn send_rtu(&mut self, id: Id) {
        let Some(c) = self.cm.ids.get(id) else { return };
        let message = Message::Rtu { local_id: c.local_id, remote_id: c.remote_id, private: Vec::new() };
        let mad = Mad { tid: c.tid, message }.bytes();
        self.send_mad(id, &mad);
    }

    /// Called when the QP of an identifier is ready. The active side then sends the RTU; the passive side does not wait
    /// for the RTU any more.
    pub(super) fn establish(&mut self, id: Id) -> Result<()> {
        let c = self.expect(id, &[State::RepReceived, State::RepSent])?;
        if c.state == State::RepSent {
            self.established(id);
            return Ok(());
        }
        c.state = State::Established;
        self.send_rtu(id);
        Ok(())
    }

    pub(super) fn established(&mut self, id: Id) {
        self.stop_timer(id);
        if let Some(c) = self.cm.ids.get_mut(id) {
            c.state = State::Established;
        }
        self.raise(id, CmEventKind::Established, 0, &[]);
    }

    // The passive side: is asked for a connection.

    /// The identifier that listens to a service at an address.
    pub(super) fn find_listener(&self, vrnic: VrnicId, service: u64, ip: IpAddr) -> Option<Id> {
        if service >> 24 != IP_SERVICE >> 24 {
            return None;
        }
        let (space, port) = (0x100 | (service >> 16 & 0xff) as u16, service as u16);
        let users = self.cm.ports.get(&(vrnic, space, port))?;
        let takes = |c: &CmId| {
            let wild = |a: Addr| is_any(a.ip) && (a.ip.is_ipv4() == ip.is_ipv4() || a.ip.is_ipv6() && !c.one_family);
            c.state == State::Listening && c.src.is_some_and(|a| a.ip == ip || wild(a))
        };
        users.iter().rev().copied().find(|&u| self.cm.ids.get(u).is_some_and(takes))
    }

    /// Makes the identifier of a received request; `None` if it cannot be accepted now.
    fn new_request(
        &mut self,
        listener: Id,
        own: Gid,
        from: Gid,
        remote_id: u32,
        tid: u64,
        ip: &IpHeader,
    ) -> Option<Id> {
        let l = self.cm.ids.get_mut(listener)?;
        if l.waiting >= l.backlog.min(MAX_BACKLOG) {
            return None;
        }
        let (vrnic, owner, queue, space, tos, timeout) = (l.vrnic, l.owner, l.queue, l.space, l.tos, l.ack_timeout);
        let port = l.src.map_or(0, |a| a.port);
        let id = self.insert(vrnic, owner?, queue, space).ok()?;
        let across = self.core.objects.vrnics.get(vrnic.0).and_then(|v| self.core.across(v.group, from));
        self.cm.ids.get_mut(listener)?.waiting += 1;
        let local_id = self.new_local_id(id);
        let c = self.cm.ids.get_mut(id)?;
        (c.state, c.listener, c.local_id, c.remote_id, c.tid) =
            (State::ReqReceived, listener, local_id, remote_id, tid);
        (c.tos, c.ack_timeout, c.across) = (tos, timeout, across);
        c.src = Some(Addr { ip: own.ip(), port });
        c.dst = Some(Addr { ip: from.ip(), port: ip.src_port });
        self.cm.requests.insert((vrnic, from, remote_id, space == port_space::UDP), id);
        Some(id)
    }

    pub(super) fn on_req(&mut self, vrnic: VrnicId, own: Gid, from: Gid, tid: u64, r: &Req) {
        if let Some(&id) = self.cm.requests.get(&(vrnic, from, r.local_id, false)) {
            return self.on_req_again(id);
        }
        let refuse = |rnic: &mut Self, reason: u16| {
            let message = Message::Rej {
                local_id: 0,
                remote_id: r.local_id,
                about: About::Req,
                reason,
                info: Vec::new(),
                private: Vec::new(),
            };
            rnic.send_mad_to(vrnic, own, from, &Mad { tid, message }.bytes());
        };
        let listener = self.find_listener(vrnic, r.service_id, own.ip());
        let (Some(listener), Some((ip, user))) = (listener, IpHeader::parse(&r.private)) else {
            return refuse(self, reason::INVALID_SERVICE);
        };
        const INVALID_PATH_MTU: u16 = 26;
        const INVALID_TRANSPORT: u16 = 9;
        let mtu = self.path_mtu(vrnic, from.ip());
        if r.mtu == 0 || r.mtu > mtu {
            return refuse(self, INVALID_PATH_MTU);
        }
        let xrc = r.transport == EXTENDED_TRANSPORT && r.extended_transport == 1;
        if r.transport != 0 && !xrc || self.cm.ids.get(listener).is_some_and(|l| l.xrc != xrc) {
            return refuse(self, INVALID_TRANSPORT);
        }
        // `None` means, for example, that the backlog is full. The peer repeats its request.
        let Some(id) = self.new_request(listener, own, from, r.local_id, tid, &ip) else { return };
        let psn = self.core.random.psns.next_u64() as u32 & 0xff_ffff;
        let Some(c) = self.cm.ids.get_mut(id) else { return };
        (c.mtu, c.xrc) = (r.mtu, xrc);
        c.ack_timeout = r.ack_timeout;
        // The peer's values hold until the program chooses others. The retry counts stay: the peer chooses how often
        // this end tries.
        c.own = Ends {
            psn,
            responder_resources: r.initiator_depth.min(MAX_RD_ATOMIC),
            initiator_depth: r.responder_resources.min(MAX_RD_ATOMIC),
            retry_count: r.retry_count,
            rnr_retry_count: r.rnr_retry_count,
            ..Ends::default()
        };
        c.peer = Ends {
            qpn: r.qpn,
            psn: r.psn,
            responder_resources: r.responder_resources,
            initiator_depth: r.initiator_depth,
            retry_count: r.retry_count,
            rnr_retry_count: r.rnr_retry_count,
            srq: r.srq,
            flow_control: r.flow_control,
        };
        self.raise_request(listener, id, user);
    }

    /// Handles a repeated request: its answer was lost, or there is no answer yet.
    fn on_req_again(&mut self, id: Id) {
        let Some(c) = self.cm.ids.get(id) else { return };
        match (c.state, &c.sent) {
            (State::ReqReceived, _) => {
                let message = Message::Mra {
                    local_id: c.local_id,
                    remote_id: c.remote_id,
                    about: About::Req,
                    timeout: MRA_TIMEOUT,
                    private: Vec::new(),
                };
                let mad = Mad { tid: c.tid, message }.bytes();
                self.send_mad(id, &mad);
            }
            (_, Some(sent)) => {
                let sent = sent.clone();
                self.send_mad(id, &sent);
            }
            _ => {}
        }
    }

    pub(super) fn accept(&mut self, id: Id, r: &abi::CmReq) -> Result<()> {
        let c = self.expect(id, &[State::ReqReceived])?;
        let datagram = c.is_datagram();
        let private = private_of(r, if datagram { user_bytes::SIDR_REP } else { user_bytes::REP })?.to_vec();
        if datagram {
            c.state = State::Established;
            let service_id = service_id(c.space, c.src.map_or(0, |a| a.port));
            let mad = Mad {
                tid: c.tid,
                message: Message::SidrRep {
                    request_id: c.remote_id,
                    status: sidr::OK,
                    qpn: r.param.qpn,
                    service_id,
                    qkey: if r.param.qkey == 0 { UDP_QKEY } else { r.param.qkey },
                    info: Vec::new(),
                    private,
                },
            };
            let bytes = mad.bytes();
            // It is sent again if the request is repeated.
            c.sent = Some(Box::new(bytes));
            self.send_mad(id, &bytes);
            return Ok(());
        }
        let most = |wanted: u8, offered: u8| if wanted == u8::MAX { offered } else { wanted }.min(MAX_RD_ATOMIC);
        c.own = Ends {
            initiator_depth: most(r.param.initiator_depth, c.own.initiator_depth),
            responder_resources: most(r.param.responder_resources, c.own.responder_resources),
            retry_count: c.own.retry_count,
            rnr_retry_count: c.own.rnr_retry_count,
            ..ends(&r.param, c.own.psn)
        };
        let rep = Rep {
            local_id: c.local_id,
            remote_id: c.remote_id,
            qpn: c.own.qpn,
            psn: c.own.psn,
            responder_resources: c.own.responder_resources,
            initiator_depth: c.own.initiator_depth,
            ack_delay: 15,
            flow_control: c.own.flow_control,
            rnr_retry_count: r.param.rnr_retry_count.min(7),
            srq: c.own.srq,
            guid: u64::from(c.local_id),
            private,
            ..Rep::default()
        };
        c.state = State::RepSent;
        let mad = Mad { tid: c.tid, message: Message::Rep(rep) };
        self.send_until_answered(id, &mad);
        Ok(())
    }

    pub(super) fn reject(&mut self, id: Id, r: &abi::CmReq) -> Result<()> {
        let c = self.expect(id, &[State::ReqReceived, State::RepReceived])?;
        let room = if c.is_datagram() { user_bytes::SIDR_REP } else { user_bytes::REJ };
        let private = private_of(r, room)?;
        self.refuse(id, if r.value == 0 { reason::CONSUMER } else { r.value as u16 }, private);
        Ok(())
    }

    /// Tells the peer of an identifier that there will be no connection.
    pub(super) fn refuse(&mut self, id: Id, reason: u16, private: &[u8]) {
        let Some(c) = self.cm.ids.get_mut(id) else { return };
        let about = match c.state {
            State::ReqReceived => About::Req,
            State::RepReceived => About::Rep,
            _ => About::Other,
        };
        let private = private.to_vec();
        let message = if c.is_datagram() {
            if c.active {
                c.state = State::Closed;
                return;
            }
            let service_id = service_id(c.space, c.src.map_or(0, |a| a.port));
            let (request_id, status) = (c.remote_id, sidr::REJECTED);
            Message::SidrRep { request_id, status, qpn: 0, service_id, qkey: 0, info: Vec::new(), private }
        } else {
            // The reason for giving up an own request is always TIMEOUT.
            let reason = if c.state == State::ReqSent { reason::TIMEOUT } else { reason };
            Message::Rej { local_id: c.local_id, remote_id: c.remote_id, about, reason, info: Vec::new(), private }
        };
        c.state = State::Closed;
        let mad = Mad { tid: c.tid, message }.bytes();
        self.stop_timer(id);
        if let Some(c) = self.cm.ids.get_mut(id) {
            c.sent = Some(Box::new(mad));
        }
        self.send_mad(id, &mad);
    }

    // Ending a connection.

    pub(super) fn disconnect(&mut self, id: Id) -> Result<()> {
        let c =
            self.expect(id, &[State::Established, State::RepSent, State::TimeWait, State::Closed, State::DreqSent])?;
        match c.state {
            State::Established | State::RepSent if !c.is_datagram() => self.send_dreq(id),
            // The connection has ended already, or this end has sent a DREQ.
            State::TimeWait | State::Closed | State::DreqSent => {}
            _ => return Err(Status::BadState),
        }
        Ok(())
    }

    pub(super) fn send_dreq(&mut self, id: Id) {
        let Some(c) = self.cm.ids.get_mut(id) else { return };
        c.state = State::DreqSent;
        let (local_id, remote_id, remote_qpn) = (c.local_id, c.remote_id, c.peer.qpn);
        let message = Message::Dreq { local_id, remote_id, remote_qpn, private: Vec::new() };
        let mad = Mad { tid: c.tid, message };
        self.send_until_answered(id, &mad);
    }

    pub(super) fn on_dreq(&mut self, id: Id, remote_id: u32) {
        let Some(c) = self.cm.ids.get(id).filter(|c| c.remote_id == remote_id) else { return };
        match c.state {
            State::Established | State::DreqSent | State::RepSent => self.disconnected(id, 0),
            State::RepReceived => self.close(id, CmEventKind::Rejected, -ECONNRESET, &[]),
            _ => {}
        }
    }

    /// Ends a connection. The identifier stays in `TimeWait` for the ACK timeout, because packets of the connection may
    /// still arrive (IBTA vol. 1, 12.9.8.4), and then raises `TimewaitExit`.
    pub(super) fn disconnected(&mut self, id: Id, status: i32) {
        self.stop_timer(id);
        let Some(c) = self.cm.ids.get_mut(id) else { return };
        c.state = State::TimeWait;
        let (wait, gone) = (time_ns(c.ack_timeout), c.owner.is_none());
        if gone {
            return self.remove(id);
        }
        self.raise(id, CmEventKind::Disconnected, status, &[]);
        self.arm(id, wait);
    }

    // Datagrams: resolution of service IDs.

    pub(super) fn on_sidr_req(
        &mut self,
        vrnic: VrnicId,
        (own, from): (Gid, Gid),
        tid: u64,
        request: u32,
        service: u64,
        private: &[u8],
    ) {
        if let Some(&id) = self.cm.requests.get(&(vrnic, from, request, true)) {
            if let Some(sent) = self.cm.ids.get(id).and_then(|c| c.sent.clone()) {
                self.send_mad(id, &sent);
            }
            return;
        }
        let listener = self.find_listener(vrnic, service, own.ip());
        let answers = listener.and_then(|l| self.cm.ids.get(l)?.answers);
        let (None, Some(listener), Some((ip, user))) = (answers, listener, IpHeader::parse(private)) else {
            let (status, (qpn, qkey)) = answers.map_or((sidr::UNSUPPORTED, (0, 0)), |a| (sidr::OK, a));
            let (info, private) = (Vec::new(), Vec::new());
            let message =
                Message::SidrRep { request_id: request, status, qpn, service_id: service, qkey, info, private };
            return self.send_mad_to(vrnic, own, from, &Mad { tid, message }.bytes());
        };
        let Some(id) = self.new_request(listener, own, from, request, tid, &ip) else { return };
        self.raise_request(listener, id, user);
    }

    pub(super) fn on_sidr_rep(&mut self, id: Id, status: u8, qpn: u32, qkey: u32, private: &[u8]) {
        let Some(c) = self.cm.ids.get_mut(id).filter(|c| c.is_datagram() && c.state == State::ReqSent) else { return };
        if status != sidr::OK {
            return self.close(id, CmEventKind::Unreachable, status.into(), private);
        }
        c.peer.qpn = qpn;
        c.peer_qkey = qkey;
        c.state = State::Established;
        self.stop_timer(id);
        self.raise(id, CmEventKind::Established, 0, private);
    }
}

/// The attributes of a program's QP for the peer. A retry count has three bits: larger values become 7, as in the
/// kernel.
fn ends(p: &abi::CmParam, psn: u32) -> Ends {
    Ends {
        qpn: p.qpn & unirdma_formats::Qpn::MASK,
        psn: Psn::new(psn).get(),
        responder_resources: p.responder_resources.min(MAX_RD_ATOMIC),
        initiator_depth: p.initiator_depth.min(MAX_RD_ATOMIC),
        retry_count: p.retry_count.min(7),
        rnr_retry_count: p.rnr_retry_count.min(7),
        srq: p.srq != 0,
        flow_control: p.flow_control != 0,
    }
}
