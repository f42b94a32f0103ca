//! Connections within a host of which one end leaves the host. They have no packets that could get lost. Both ends
//! become ends of a connection over the wire. A message within a host is either done or not done, and takes its PSNs
//! when it is done, so both ends agree on the next PSN. A message under way starts again at its first byte, and a
//! receive that it had begun to fill is filled from its start. An atomic that was executed, but whose result is not
//! stored yet, becomes a request whose answer was lost: its responder keeps the result and does not execute the atomic
//! again.
//!
//! A connection that has become one over the wire stays one. When both ends are on one host again, its packets go to
//! that host's own address.

use unirdma_abi as abi;
use unirdma_formats::net::source_port;
use unirdma_formats::{Gid, QpState, WrOpcode, class_of, psn_count};

use crate::core::Core;
use crate::objects::{Connection, Flight, Local, Qp, VrnicId, Wait, Wire};
use crate::path::Path;
use crate::slab::Handle;
use crate::wire::READ_PACKETS;

impl Core {
    /// The QP at the other end of a connection within this host, if that QP is connected to this one.
    fn other_end(&self, h: Handle<Qp>) -> Option<&Qp> {
        let q = self.objects.qps.get(h)?;
        let p = self.objects.qps.get(*self.objects.qpns.get(&q.dest())?)?;
        let local = |q: &Qp| q.local().map(|l| l.vrnic);
        let agrees = local(p) == Some(q.vrnic) && p.dest() == q.qpn && p.typ == q.typ.peer();
        (local(q) == Some(p.vrnic) && agrees).then_some(p)
    }

    /// The result of an atomic that QP `h` has executed for its peer, and that the peer has not completed yet.
    pub(crate) fn found_at(&self, h: Handle<Qp>) -> Option<u64> {
        let q = self.objects.qps.get(h)?;
        let Some(p) = self.other_end(h) else {
            return q.local()?.found.filter(|(psn, _)| *psn == q.rq_psn).map(|(_, value)| value);
        };
        p.work.as_ref().filter(|_| p.sq_psn == q.rq_psn)?.found
    }

    /// Turns connections between a vRNIC and others of this host into connections over the wire, at both ends.
    pub(crate) fn move_to_wire(&mut self, id: VrnicId) {
        let crosses = |q: &Qp| q.local().is_some_and(|peer| (peer.vrnic == id) != (q.vrnic == id));
        let ends = self.objects.qps.handles(crosses).into_iter().map(|h| {
            let own = self.objects.qps.get(h).map_or(0, |q| q.mtu);
            // Packets are as large as both ends and the network allow.
            let mtu = self.other_end(h).map_or(own, |p| p.mtu).min(own).min(self.net.wire_mtu);
            (h, mtu, self.found_at(h))
        });
        for (h, mtu, found) in ends.collect::<Vec<_>>() {
            self.go_over_the_wire(h, mtu, found);
        }
    }

    /// Looks for the other end of a connection within a host whose QP `h` was restored. If the other end is on this
    /// host and has a connection within the host too, they are coupled. If the other end has gone over the wire, or is
    /// on another host, this end goes over the wire as well. If its place is unknown, nothing changes, and requests get
    /// no answer.
    pub(crate) fn recouple(&mut self, h: Handle<Qp>) {
        let objects = &self.objects;
        let Some(q) = objects.qps.get(h) else { return };
        let Some(v) = objects.vrnics.get(q.vrnic.0) else { return };
        let gid = Gid(q.attr.ah_attr.grh.dgid);
        let there = self.way_to(v, q.own.unwrap_or_default(), gid);
        let (own, linked, mtu) = (q.vrnic, q.linked, q.mtu.min(self.net.wire_mtu));
        if let Some(here) = objects.find_vrnic(v.group, gid) {
            let other = objects.qpns.get(&q.dest()).and_then(|&p| Some((p, objects.qps.get(p)?)));
            let connected = other.filter(|(_, p)| p.vrnic == here && p.dest() == q.qpn);
            let Some((ph, p)) = connected.filter(|(_, p)| !matches!(p.connection, Connection::None)) else { return };
            if p.local().is_some() {
                self.couple(h, here);
                return self.couple(ph, own);
            }
        } else if there.is_none_or(|path| path.to.is_unspecified()) {
            return;
        }
        let found = self.found_at(h);
        self.go_over_the_wire(h, mtu, found);
        if let Some(w) = self.objects.qps.get_mut(h).and_then(Qp::wire_mut) {
            w.path = w.path.led(there, linked);
        }
    }

    /// Records that the other end of QP `h`'s connection belongs to `peer`, a vRNIC of this host. A message under way
    /// starts over.
    fn couple(&mut self, h: Handle<Qp>, peer: VrnicId) {
        if let Some(q) = self.objects.qps.get_mut(h) {
            q.connection = Connection::Local(Local { vrnic: peer, qp: None, found: None });
            q.work.iter_mut().for_each(|w| (w.started, w.done) = (false, 0));
        }
    }

    /// Turns QP `h`'s connection within this host into one over the wire, which leads to no host yet. `found` is the
    /// result of [`Core::found_at`].
    pub(crate) fn go_over_the_wire(&mut self, h: Handle<Qp>, mtu: u32, found: Option<u64>) {
        let adapts = self.net.adapts;
        let Some(q) = self.objects.qps.get_mut(h) else { return };
        q.connection = Connection::None;
        if !matches!(q.state, QpState::Rtr | QpState::Rts | QpState::Sqd | QpState::Sqe) {
            return;
        }
        let abi::AhAttr { grh, sl, .. } = q.attr.ah_attr;
        let port = source_port(self.net.first_port, grh.flow_label, q.qpn.0, q.attr.dest_qp_num);
        let path = Path { port, class: class_of(grh.traffic_class, sl), ..Path::nowhere() };
        let mut w = Box::new(Wire::new(path, adapts));
        w.start(q.sq_psn);
        q.mtu = mtu;
        if let Some(value) = found {
            w.resp.atomics.push_back((q.rq_psn, value));
            w.resp.msn = 1;
            q.rq_psn = q.rq_psn.advance(1);
        }
        if matches!(q.state, QpState::Rts | QpState::Sqd)
            && let Some(mut work) = q.work.take()
        {
            (work.started, work.done, work.found, work.wait) = (false, 0, None, Wait::No);
            (w.retries_left, w.rnr_left) = (work.retries_left, work.rnr_left);
            let op = work.op;
            let packets = if op.is_local() { 0 } else { psn_count(work.total, mtu) };
            let messages = if op == WrOpcode::Read { packets.div_ceil(READ_PACKETS) } else { packets.min(1) };
            let (first, ssn) = (q.sq_psn, w.ssn);
            q.sq_psn = first.advance(packets);
            w.ssn = ssn.wrapping_add(messages);
            w.flight.push_back(Flight { work, first, packets, ssn, status: None });
        }
        q.timer = q.timer.wrapping_add(1);
        q.connection = Connection::Wire(w);
        self.make_runnable(h);
    }
}
