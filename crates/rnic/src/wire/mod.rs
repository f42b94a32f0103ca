//! The transport over a network: reliable connections in RoCEv2 packets, sans-IO (IBTA vol. 1, chapter 9).
//!
//! A QP whose destination GID lies on another host has a [`Wire`]: the state of its requester and completer
//! (`requester`) and of its responder (`responder`), and packets that wait for jobs (`deferred_packets`). Packets come
//! in by
//! [`crate::Rnic::handle_packet`] and leave through [`crate::Tx`], from the base transport header up to the payload's
//! padding; IP, UDP and
//! the invariant CRC are the port's.

mod deferred_packets;
mod requester;
mod responder;

use unirdma_formats::wire::{Extra, Op, Opcode, Packet, Transport};
use unirdma_formats::{Psn, QpState, QpType};

use crate::core::Core;
use crate::objects::{Connection, Qp, Wire};
use crate::path::{Arrival, Path};
use crate::slab::Handle;
use deferred_packets::Direction;
pub(crate) use requester::{READ_PACKETS, request_packet};

/// Least time between two congestion notifications to one QP, ns (DCQCN's N).
const CNP_INTERVAL_NS: u64 = 50_000;

impl Core {
    /// A packet for QP `h`, which may be connected.
    pub(crate) fn on_connected(&mut self, h: Handle<Qp>, a: &Arrival, p: &Packet<'_>, bytes: &[u8]) {
        let Some(q) = self.objects.qps.get(h) else { return };
        let Some(wire) = q.wire() else {
            self.net.drops.no_qp += 1;
            return;
        };
        if wire.path.to != a.from || !self.net.tx.takes(&wire.path, a) {
            self.net.drops.wrong_source += 1;
            return;
        }
        let transport = match p.opcode.transport {
            Transport::Rc => q.typ == QpType::Rc,
            Transport::Uc => q.typ == QpType::Uc,
            Transport::Xrc => matches!(q.typ, QpType::XrcSend | QpType::XrcRecv),
            Transport::Ud => false,
            Transport::Cnp => true,
        };
        if !q.receives() || !transport {
            self.net.drops.bad_state += 1;
            return;
        }
        let path = Path { port: a.port, ..wire.path };
        self.objects.count(h, |c| c.wire.rcvd_pkts += 1);
        if self.tap.is_some() {
            self.tap_received(self.objects.vrnic_of_qp(h), path, bytes);
        }
        self.with_wire(h, |core, w| {
            if a.congested {
                core.notify_congestion(h, w);
            }
            match p.opcode.op {
                Op::Ack if p.opcode.transport == Transport::Uc => w.taken_up_to(Psn::new(p.psn)),
                Op::Ack | Op::AtomicAck | Op::ReadResponse(_) => core.take_in(h, w, Direction::Answers, p),
                Op::Cnp => {
                    core.objects.count(h, |c| c.wire.rp_cnp_handled += 1);
                    w.cc.notified();
                }
                _ => core.take_in(h, w, Direction::Requests, p),
            }
        });
        self.make_runnable(h);
    }

    /// A marked packet came in. Notifies its sender (annex A17), but not of each one.
    fn notify_congestion(&mut self, h: Handle<Qp>, w: &mut Wire) {
        self.objects.count(h, |c| c.wire.np_ecn_marked_roce_packets += 1);
        if !self.net.adapts || self.now < w.cnp_after || self.net.tx.is_full() {
            return;
        }
        w.cnp_after = self.now + CNP_INTERVAL_NS;
        let Some(dest) = self.objects.qps.get(h).map(|q| q.attr.dest_qp_num) else { return };
        let opcode = Opcode { transport: Transport::Cnp, op: Op::Cnp, extra: Extra::None };
        let mut p = Packet::new(opcode, dest, 0);
        p.becn = true;
        self.net.tx.put(w.path, None, &p, &[]);
        self.note_sent(h, &w.path);
        self.objects.count(h, |c| c.wire.np_cnp_sent += 1);
    }

    /// QP `h` has put a packet for `path` into [`crate::Tx`]; without a link it is lost.
    pub(crate) fn note_sent(&mut self, h: Handle<Qp>, path: &Path) {
        if path.cut {
            return self.objects.count(h, |c| c.wire.send_err += 1);
        }
        if self.tap.is_some() {
            self.tap_sent(self.objects.vrnic_of_qp(h));
        }
        self.objects.count(h, |c| c.wire.sent_pkts += 1);
    }

    /// Runs `f` with the wire state of QP `h` taken out. If the QP fails meanwhile, its wire state is cleared before it
    /// is put back.
    fn with_wire<R>(&mut self, h: Handle<Qp>, f: impl FnOnce(&mut Self, &mut Wire) -> R) -> Option<R> {
        let q = self.objects.qps.get_mut(h)?;
        let mut w = match std::mem::take(&mut q.connection) {
            Connection::Wire(w) => w,
            other => {
                q.connection = other;
                return None;
            }
        };
        let r = f(self, &mut w);
        if self.objects.qps.get(h).is_some_and(|q| q.state == QpState::Err) {
            self.send_last_ack(h, &mut w);
        }
        if let Some(q) = self.objects.qps.get_mut(h) {
            match q.state {
                QpState::Err => w.clear(&mut self.objects.spare),
                QpState::Sqe => {
                    w.clear_requests(&mut self.objects.spare);
                    w.start(q.sq_psn);
                }
                _ => {}
            }
            q.connection = Connection::Wire(w);
        }
        Some(r)
    }

    /// Acknowledges what QP `h` has received, before the QP is reset, destroyed or flushed; otherwise its peer would
    /// wait for an ACK that never comes.
    pub(crate) fn acknowledge_all(&mut self, h: Handle<Qp>) {
        self.with_wire(h, |rnic, w| rnic.send_last_ack(h, w));
    }

    /// A turn of a connected QP: responses first, then requests. Returns its cost, and whether it has more to do.
    pub(crate) fn wire_step(&mut self, h: Handle<Qp>, allowance: u64) -> (u64, bool) {
        let turn = self.with_wire(h, |rnic, w| {
            let mut cost = 0;
            while cost < allowance {
                if rnic.net.tx.is_full() {
                    if !std::mem::replace(&mut w.waits_for_tx, true) {
                        rnic.net.tx_waiting.push_back(h);
                    }
                    return (cost, false);
                }
                let answered = rnic.respond(h, w);
                match answered.or_else(|| rnic.request(h, w)) {
                    Some(c) => {
                        if answered.is_none() {
                            w.resp.hurry();
                        }
                        cost += c + rnic.pieces_ns();
                    }
                    None => {
                        rnic.arm_wire(h, w);
                        return (cost, false);
                    }
                }
            }
            rnic.arm_wire(h, w);
            (cost, true)
        });
        turn.unwrap_or((0, false))
    }

    /// Makes sure that a timer is in the heap that fires no later than this QP needs it.
    fn arm_wire(&mut self, h: Handle<Qp>, w: &mut Wire) {
        let rnr = if w.rnr_until > self.now { w.rnr_until } else { u64::MAX };
        let need = w.deadline.min(rnr).min(w.memory_due(self.now));
        if need < w.timer_at {
            w.timer_at = need;
            self.arm_timer(h, need.saturating_sub(self.now));
        }
    }

    /// The timer of a connected QP fired.
    pub(crate) fn on_wire_timer(&mut self, h: Handle<Qp>) {
        self.with_wire(h, |core, w| {
            w.timer_at = u64::MAX;
            // A QP that has failed is flushed in its turn, and counts no timeout.
            if w.deadline <= core.now && core.objects.qps.get(h).is_some_and(|q| q.state != QpState::Err) {
                core.on_timeout(h, w);
            }
            core.arm_wire(h, w);
        });
        self.make_runnable(h);
    }
}
