//! Sends, repeats and receives the messages of connection management, and applies each to its identifier (IBTA vol. 1,
//! 12.9).

use std::cmp::Reverse;
use std::net::IpAddr;

use unirdma_formats::Gid;
use unirdma_formats::cm::{About, GSI_QKEY, GSI_QPN, IpHeader, MAD_BYTES, Mad, Message, Req, reason};
use unirdma_formats::net::Flow;

use super::{CmEventKind, CmId, ETIMEDOUT, Early, Id, Manager, State};
use crate::objects::{MAX_MTU, Note, VrnicId};
use crate::path::{Arrival, Path};
use crate::rx::ReceivedMad;
use crate::where_is::mad_head;

/// Time that a peer has for an answer, encoded: 4.3 s.
pub(super) const RESPONSE_TIMEOUT: u8 = 20;
/// Time that a request waits for a listener, ns, and the most requests that wait. The requests of one vRNIC may take
/// half of the places that the requests of others leave free.
const EARLY_NS: u64 = 200_000_000;
const MAX_EARLY: usize = 1024;
/// Number of times that a message is repeated.
pub(super) const RETRIES: u8 = 15;
/// First interval before a message is repeated, ns. It doubles up to the time of [`RESPONSE_TIMEOUT`]. It is short
/// because on a network that loses packets a connection should not take seconds.
const FIRST_RETRY_NS: u64 = 250_000_000;
/// Stopped timers are removed when there are more timers than this number plus twice the number that the last removal
/// left.
const MAX_STOPPED: usize = 1024;
/// Time of an MRA, encoded: 68 s.
pub(super) const MRA_TIMEOUT: u8 = 24;

pub(super) fn time_ns(encoded: u8) -> u64 {
    4096 << encoded.min(31)
}

impl Manager<'_> {
    /// Sends a MAD from an identifier to its peer.
    pub(super) fn send_mad(&mut self, id: Id, mad: &[u8; MAD_BYTES]) {
        let Some(c) = self.cm.ids.get(id) else { return };
        let (Some(src), Some(to), vrnic) = (c.src, c.remote(), c.vrnic) else { return };
        self.send_mad_to(vrnic, Gid::from_ip(src.ip), to, mad);
    }

    /// Sends a MAD; it may be lost.
    pub(super) fn send_mad_to(&mut self, vrnic: VrnicId, own: Gid, to: Gid, mad: &[u8; MAD_BYTES]) {
        let Some(v) = self.core.objects.vrnics.get(vrnic.0).filter(|v| v.is_linked(Some(own))) else { return };
        let head = mad_head(GSI_QPN, self.cm.psn);
        self.cm.psn = self.cm.psn.advance(1);
        if let Some(there) = self.core.objects.find_vrnic(v.group, to) {
            let flow = Flow::roce(own, to);
            self.core.tap_mad(vrnic, there, &flow, &head, mad);
            self.core.deliver_mad(there, GSI_QKEY, &flow, mad, Note::of(&head));
            return;
        }
        self.core.put_mad(vrnic, own, to, &head, mad);
    }

    /// Delivers MADs between vRNICs of this host, and the MADs that these cause, until none is left. Each MAD causes at
    /// most one more.
    pub fn deliver_local_mads(&mut self) {
        while let Some((vrnic, own, from, mad)) = self.core.mads.pop_front() {
            self.on_mad(vrnic, own, from, &*mad, false);
        }
    }

    /// Handles a packet for QP 1.
    pub fn handle_mad(&mut self, a: &Arrival, bytes: &[u8], mad: &ReceivedMad<'_>) {
        let p = &mad.packet;
        let Some((vrnic, own)) = mad.to.or_else(|| self.mad_target(a.from, p.payload)) else {
            // A message about a connection that has ended is not counted as one from a wrong source, because messages
            // may be late or repeated.
            let drops = &mut self.core.net.drops;
            match Mad::parse(p.payload).map(|m| m.message) {
                None => drops.malformed += 1,
                Some(Message::Req(_) | Message::SidrReq { .. }) => drops.wrong_source += 1,
                Some(_) => drops.no_qp += 1,
            }
            return;
        };
        if mad.to.is_none() {
            let path = Path { from: Some(own.ip()), port: a.port, ..Path::new(a.from) };
            self.core.tap_received(Some(vrnic), path, bytes);
        }
        // No QP of a program has number 1, so a packet from another QPN is dropped.
        if p.deth.qkey != GSI_QKEY || p.deth.src_qp != GSI_QPN {
            self.core.net.drops.bad_state += 1;
            return;
        }
        // For a packet of another virtual layer, the rules were checked when it was received.
        if mad.to.is_some() || self.core.may_hear_mad(vrnic, mad.from, None, p.payload) {
            self.on_mad(vrnic, own, mad.from, p.payload, false);
            self.deliver_local_mads();
        }
    }

    /// Called when the rules have changed: all connections are to be checked again.
    pub fn doubt_all(&mut self) {
        let doubtful = [State::ReqSent, State::RepSent, State::RepReceived, State::Established];
        self.cm.doubts = self.cm.ids.handles(|c| doubtful.contains(&c.state));
    }

    /// Checks up to `most` connections against the rules, and ends those that the rules do not allow. True if
    /// connections may be left to check.
    pub fn recheck(&mut self, most: usize) -> bool {
        for _ in 0..most {
            let Some(id) = self.cm.doubts.pop() else { return false };
            let Some(c) = self.cm.ids.get(id) else { continue };
            if c.remote().is_none_or(|to| self.core.may_connect(c.vrnic, to, c.across)) {
                continue;
            }
            match c.state {
                State::ReqSent | State::RepSent | State::RepReceived => {
                    self.close(id, CmEventKind::Unreachable, -ETIMEDOUT, &[]);
                }
                // For datagrams there is no connection to end.
                State::Established if !c.is_datagram() => self.disconnected(id, -ETIMEDOUT),
                _ => {}
            }
        }
        true
    }

    /// The vRNIC that a plain device's MAD is for, and its GID. A request names the address of the vRNIC; any other MAD
    /// names the communication ID of one of its identifiers.
    fn mad_target(&self, from: IpAddr, mad: &[u8]) -> Option<(VrnicId, Gid)> {
        let by_ip = |private: &[u8]| {
            let own = Gid::from_ip(IpHeader::parse(private)?.0.dst);
            let knows = |group: u32| self.core.net.is_foreign(group, from);
            let found = self
                .core
                .objects
                .vrnics
                .iter()
                .find(|(_, v)| !own.is_zero() && v.gids.contains(&own) && knows(v.group));
            found.map(|(h, _)| (VrnicId(h), own))
        };
        let by_id = |local_id: u32| {
            let c = self.cm.ids.get(*self.cm.by_local_id.get(&local_id)?)?;
            let group = self.core.objects.vrnics.get(c.vrnic.0)?.group;
            // Otherwise a plain device with the same address as a peer of the virtual network could answer for that
            // peer.
            if !self.core.net.is_foreign(group, from) {
                return None;
            }
            Some((c.vrnic, Gid::from_ip(c.src?.ip)))
        };
        match Mad::parse(mad)?.message {
            Message::Req(r) => by_ip(&r.private),
            Message::SidrReq { private, .. } => by_ip(&private),
            Message::SidrRep { request_id, .. } => by_id(request_id),
            Message::Rep(r) => by_id(r.remote_id),
            Message::Mra { remote_id, .. }
            | Message::Rej { remote_id, .. }
            | Message::Rtu { remote_id, .. }
            | Message::Dreq { remote_id, .. }
            | Message::Drep { remote_id, .. } => by_id(remote_id),
        }
    }

    /// Handles a MAD. `last` is set for a request that has waited long enough for a listener: it is refused if there is
    /// none.
    fn on_mad(&mut self, vrnic: VrnicId, own: Gid, from: Gid, bytes: &[u8], last: bool) {
        if !self.core.is_up(vrnic) {
            return;
        }
        let Some(mad) = Mad::parse(bytes) else {
            self.core.net.drops.malformed += 1;
            return;
        };
        let tid = mad.tid;
        if let Message::Req(Req { service_id: service, .. }) | Message::SidrReq { service_id: service, .. } =
            mad.message
            && self.find_listener(vrnic, service, own.ip()).is_none()
            && self.keep_early(vrnic, own, from, service, &mad, last)
        {
            return;
        }
        // An answer is accepted only by an identifier of this vRNIC whose peer is the sender.
        let find = |local_id: u32| -> Option<Id> {
            let h = *self.cm.by_local_id.get(&local_id)?;
            self.cm.ids.get(h).filter(|c| c.vrnic == vrnic && c.remote() == Some(from)).map(|_| h)
        };
        match mad.message {
            Message::Req(r) => self.on_req(vrnic, own, from, tid, &r),
            Message::SidrReq { request_id, service_id, private, .. } => {
                self.on_sidr_req(vrnic, (own, from), tid, request_id, service_id, &private);
            }
            Message::Mra { remote_id, timeout, .. } => {
                if let Some(id) = find(remote_id) {
                    self.on_mra(id, timeout);
                }
            }
            Message::Rej { remote_id, local_id, reason, private, .. } => {
                if let Some(id) = find(remote_id) {
                    self.on_rej(id, local_id, reason, &private);
                }
            }
            Message::Rep(r) => match find(r.remote_id) {
                Some(id) => self.on_rep(id, &r),
                None => {
                    let message = Message::Rej {
                        local_id: r.remote_id,
                        remote_id: r.local_id,
                        about: About::Rep,
                        reason: reason::INVALID_COMM_ID,
                        info: Vec::new(),
                        private: Vec::new(),
                    };
                    self.send_mad_to(vrnic, own, from, &Mad { tid, message }.bytes());
                }
            },
            Message::Rtu { remote_id, local_id, .. } => {
                let of_peer = |c: &CmId| c.remote_id == local_id && c.state == State::RepSent;
                if let Some(id) = find(remote_id).filter(|&h| self.cm.ids.get(h).is_some_and(of_peer)) {
                    self.established(id);
                }
            }
            Message::Dreq { local_id, remote_id, .. } => {
                // A DREQ about an unknown connection is answered too, because that connection has ended.
                let message = Message::Drep { local_id: remote_id, remote_id: local_id, private: Vec::new() };
                let found = find(remote_id);
                self.send_mad_to(vrnic, own, from, &Mad { tid, message }.bytes());
                if let Some(id) = found {
                    self.on_dreq(id, local_id);
                }
            }
            Message::Drep { remote_id, local_id, .. } => {
                let of_peer = |c: &CmId| c.remote_id == local_id && c.state == State::DreqSent;
                if let Some(id) = find(remote_id).filter(|&h| self.cm.ids.get(h).is_some_and(of_peer)) {
                    self.disconnected(id, 0);
                }
            }
            Message::SidrRep { request_id, status, qpn, qkey, private, .. } => {
                if let Some(id) = find(request_id) {
                    self.on_sidr_rep(id, status, qpn, qkey, &private);
                }
            }
        }
    }

    pub(super) fn new_local_id(&mut self, id: Id) -> u32 {
        loop {
            let n = self.core.random.cm_ids.next_u64() as u32;
            if n != 0 && !self.cm.by_local_id.contains_key(&n) {
                self.cm.by_local_id.insert(n, id);
                return n;
            }
        }
    }

    /// Path MTU code between a vRNIC and an address.
    pub(super) fn path_mtu(&self, vrnic: VrnicId, to: IpAddr) -> u8 {
        let here = self
            .core
            .objects
            .vrnics
            .get(vrnic.0)
            .is_some_and(|v| self.core.objects.find_vrnic(v.group, Gid::from_ip(to)).is_some());
        let bytes = if here { MAX_MTU } else { self.core.net.wire_mtu };
        (bytes.max(256).ilog2() - 7) as u8
    }

    /// Sends a message, and repeats it until its timer is stopped.
    pub(super) fn send_until_answered(&mut self, id: Id, mad: &Mad) {
        let bytes = mad.bytes();
        if let Some(c) = self.cm.ids.get_mut(id) {
            (c.sent, c.tries) = (Some(Box::new(bytes)), 0);
        }
        self.arm(id, FIRST_RETRY_NS);
        self.send_mad(id, &bytes);
    }

    pub(super) fn arm(&mut self, id: Id, delay_ns: u64) {
        if let Some(c) = self.cm.ids.get_mut(id) {
            c.timer = c.timer.wrapping_add(1);
            self.cm.timers.push(Reverse((self.core.now.saturating_add(delay_ns), id, c.timer)));
        }
    }

    pub(super) fn stop_timer(&mut self, id: Id) {
        if let Some(c) = self.cm.ids.get_mut(id) {
            c.timer = c.timer.wrapping_add(1);
            c.sent = None;
        }
    }

    /// Keeps a request until there is a listener. False if the request has waited before, or too many requests wait.
    fn keep_early(&mut self, vrnic: VrnicId, own: Gid, from: Gid, service: u64, mad: &Mad, last: bool) -> bool {
        let own_ones = self.cm.early.iter().filter(|e| e.vrnic == vrnic).count();
        let others = self.cm.early.len() - own_ones;
        if last || own_ones >= MAX_EARLY.saturating_sub(others) / 2 {
            return false;
        }
        let mad = Box::new(mad.bytes());
        let known = |e: &Early| e.vrnic == vrnic && e.from == from && e.mad == mad;
        if !self.cm.early.iter().any(known) {
            let until = self.core.now.saturating_add(EARLY_NS);
            self.cm.early.push_back(Early { until, vrnic, own, from, service, mad });
        }
        true
    }

    /// Called when there is a new listener: handles the requests that waited for it.
    pub(super) fn hear_early(&mut self) {
        for e in std::mem::take(&mut self.cm.early) {
            if self.find_listener(e.vrnic, e.service, e.own.ip()).is_some() {
                self.on_mad(e.vrnic, e.own, e.from, &*e.mad, true);
            } else {
                self.cm.early.push_back(e);
            }
        }
    }

    /// Handles the timers that are due; true if a connection's timer was.
    pub fn poll(&mut self) -> bool {
        let now = self.core.now;
        while self.cm.early.front().is_some_and(|e| e.until <= now) {
            let Some(e) = self.cm.early.pop_front() else { break };
            self.on_mad(e.vrnic, e.own, e.from, &*e.mad, true);
            self.deliver_local_mads();
        }
        // Stopped timers are removed only when there are many.
        if self.cm.timers.len() > self.cm.timers_kept * 2 + MAX_STOPPED {
            let ids = &self.cm.ids;
            self.cm.timers.retain(|t| ids.get(t.0.1).is_some_and(|c| c.timer == t.0.2));
            self.cm.timers_kept = self.cm.timers.len();
        }
        let mut found = false;
        while let Some(&Reverse((at, id, timer))) = self.cm.timers.peek() {
            if at > now {
                break;
            }
            self.cm.timers.pop();
            if self.cm.ids.get(id).is_some_and(|c| c.timer == timer) {
                found = true;
                self.on_timer(id);
            }
        }
        if found {
            self.deliver_local_mads();
        }
        found
    }

    fn on_timer(&mut self, id: Id) {
        let Some(c) = self.cm.ids.get_mut(id) else { return };
        if c.state == State::TimeWait {
            c.state = State::Closed;
            self.raise(id, CmEventKind::TimewaitExit, 0, &[]);
            return self.remove_if_nobodys(id);
        }
        if c.state == State::AddrQuery {
            self.raise(id, CmEventKind::AddrError, -ETIMEDOUT, &[]);
            if let Some(c) = self.cm.ids.get_mut(id) {
                (c.state, c.dst) = (State::Bound, None);
            }
            return;
        }
        let Some(sent) = c.sent.clone() else { return };
        c.tries += 1;
        if c.tries <= RETRIES {
            let delay = FIRST_RETRY_NS << c.tries.min(16);
            self.arm(id, delay.min(time_ns(RESPONSE_TIMEOUT)));
            return self.send_mad(id, &sent);
        }
        self.stop_timer(id);
        match self.cm.ids.get(id).map(|c| c.state) {
            Some(State::DreqSent) => self.disconnected(id, -ETIMEDOUT),
            Some(State::ReqSent | State::RepSent) => self.close(id, CmEventKind::Unreachable, -ETIMEDOUT, &[]),
            _ => {}
        }
    }

    /// Ends the connection of an identifier with a failure.
    pub(super) fn close(&mut self, id: Id, kind: CmEventKind, status: i32, private: &[u8]) {
        self.stop_timer(id);
        if let Some(c) = self.cm.ids.get_mut(id) {
            c.state = State::Closed;
        }
        self.raise(id, kind, status, private);
        self.remove_if_nobodys(id);
    }

    fn remove_if_nobodys(&mut self, id: Id) {
        if self.cm.ids.get(id).is_some_and(|c| c.owner.is_none()) {
            self.remove(id);
        }
    }

    fn on_mra(&mut self, id: Id, timeout: u8) {
        let waits = |c: &CmId| matches!(c.state, State::ReqSent | State::RepSent | State::DreqSent);
        if self.cm.ids.get(id).is_some_and(waits) {
            self.arm(id, time_ns(timeout.min(MRA_TIMEOUT)));
        }
    }
}
