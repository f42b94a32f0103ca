//! The software RNIC as an executor: the work of `exec`, `wire` and `datagram` for QPs.

use unirdma_abi::Status;
use unirdma_formats::wire::Packet;
use unirdma_formats::{QpState, QpType, attr_mask};

use crate::core::{Core, OP_NS};
use crate::executor::{Executor, Object, Peer};
use crate::objects::{Connection, Local, Qp, Wait, Wire};
use crate::path::Arrival;
use crate::slab::Handle;

/// Executes all work in this process.
pub(crate) struct Software;

impl Executor<Core> for Software {
    fn gone(&mut self, core: &mut Core, object: Object) {
        if let Object::Qp(qp) = object {
            forget(core, qp);
        }
    }

    fn connect(&mut self, core: &mut Core, qp: Handle<Qp>, peer: Peer) -> Result<(), Status> {
        let adapts = core.net.adapts;
        let q = core.objects.qps.get_mut(qp).ok_or(Status::BadHandle)?;
        match (peer, q.wire_mut()) {
            (Peer::Here(vrnic), _) => q.connection = Connection::Local(Local { vrnic, qp: None, found: None }),
            (Peer::There(path), Some(w)) => w.path = path,
            (Peer::There(path), None) => q.connection = Connection::Wire(Box::new(Wire::new(path, adapts))),
        }
        Ok(())
    }

    fn modified(&mut self, core: &mut Core, qp: Handle<Qp>, mask: u32) {
        let Some(q) = core.objects.qps.get_mut(qp) else { return };
        let psn = q.sq_psn;
        if let Some(w) = q.wire_mut().filter(|_| mask & attr_mask::SQ_PSN != 0) {
            w.start(psn);
        }
    }

    fn reset(&mut self, core: &mut Core, qp: Handle<Qp>) {
        forget(core, qp);
        match core.objects.qps.get_mut(qp).map(|q| &mut q.connection) {
            // The QP stays in its multicast groups.
            Some(Connection::Datagram(d)) => _ = d.fetched.clear(),
            Some(c) => *c = Connection::None,
            None => {}
        }
    }

    fn disconnect(&mut self, core: &mut Core, qp: Handle<Qp>) {
        core.fail_qp(qp, None);
    }

    fn step(&mut self, core: &mut Core, qp: Handle<Qp>, allowance_ns: u64) -> (u64, bool) {
        core.step(qp, allowance_ns)
    }

    fn timer(&mut self, core: &mut Core, qp: Handle<Qp>) {
        match core.objects.qps.get(qp).map(|q| q.wire().is_some()) {
            Some(true) => core.on_wire_timer(qp),
            Some(false) => core.on_local_timer(qp),
            None => {}
        }
    }

    fn packet(&mut self, core: &mut Core, qp: Handle<Qp>, a: &Arrival, p: &Packet<'_>, bytes: &[u8]) {
        match core.objects.qps.get(qp).map(|q| q.typ) {
            Some(QpType::Ud) => core.on_foreign_datagram(qp, a, p, bytes),
            Some(_) => core.on_connected(qp, a, p, bytes),
            None => {}
        }
    }
}

/// Ends the work that a QP has under way. Received packets are acknowledged first, or its peer would wait for answers
/// that never come.
fn forget(core: &mut Core, qp: Handle<Qp>) {
    core.acknowledge_all(qp);
    core.drop_backlog(qp);
    core.objects.unstage(qp);
    core.objects.end_recv(qp);
    core.objects.end_work(qp);
}

impl Core {
    /// Gives QP `h` a turn of about `allowance` nanoseconds. Returns its approximate cost, and whether there is more to
    /// do.
    fn step(&mut self, h: Handle<Qp>, allowance: u64) -> (u64, bool) {
        let mut cost = 0;
        self.objects.pieces.set(0);
        if self.objects.qps.get(h).is_some_and(Qp::has_backlog) {
            cost += self.drain_backlog(h) as u64 * OP_NS + self.pieces_ns();
        }
        if self.objects.qps.get(h).and_then(Qp::wire).is_some_and(Wire::has_arrivals) {
            cost += self.take_up(h, allowance);
        }
        while cost < allowance {
            let Some(q) = self.objects.qps.get(h) else { return (cost, false) };
            if q.broken || q.wait() != Wait::No {
                return (cost, false);
            }
            if q.wire().is_some() && matches!(q.state, QpState::Rtr | QpState::Rts | QpState::Sqd) {
                let (c, again) = self.wire_step(h, allowance - cost);
                if self.objects.qps.get(h).is_some_and(|q| q.state == QpState::Sqd && !q.is_sending()) {
                    self.drained(h);
                }
                return (cost + c, again);
            }
            match q.state {
                // A job fills its receive.
                QpState::Err if q.served_by > 0 => return (cost, false),
                QpState::Err | QpState::Sqe => {
                    if q.wire().is_some_and(|w| !w.is_idle()) {
                        self.acknowledge_all(h);
                    }
                    if !self.flush_one(h) {
                        return (cost, false);
                    }
                    cost += OP_NS;
                }
                QpState::Rts => match self.execute(h) {
                    Some(c) => cost += c + self.pieces_ns(),
                    None => return (cost, false),
                },
                QpState::Sqd if q.work.is_some() => match self.execute(h) {
                    Some(c) => cost += c + self.pieces_ns(),
                    None => return (cost, false),
                },
                QpState::Sqd => {
                    self.drained(h);
                    return (cost, false);
                }
                _ => return (cost, false),
            }
        }
        (cost, true)
    }
}
