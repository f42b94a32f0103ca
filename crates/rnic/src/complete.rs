//! Completions, their events, and the failure of QPs.

use unirdma_abi as abi;
use unirdma_formats::{AsyncEvent, QpState, QpType};

use crate::core::Core;
use crate::objects::{Cq, Qp, SessionId, Wait};
use crate::output::Output;
use crate::sched::Due;
use crate::slab::Handle;

impl Core {
    /// Writes a completion of an object that session `whose` owns. Only a CQ of the same session accepts it. A CQ that
    /// overruns fails together with its QPs (R84b).
    pub(crate) fn complete(&mut self, cq: Handle<Cq>, whose: SessionId, mut cqe: abi::Cqe, solicited: bool) {
        cqe.timestamp = self.now;
        cqe.port_num = 1;
        let taken = self.objects.cqs.get_mut(cq).filter(|c| c.owner == whose && !c.dead);
        let alive = taken.is_some();
        let written = taken.is_some_and(|c| c.ring.push(cqe).is_ok());
        if !written && cqe.staged != 0 {
            self.objects.give_stage_back(whose, cqe.staged);
        }
        if alive && !written {
            self.overrun(cq);
        }
        if !written {
            return;
        }
        let Some(c) = self.objects.cqs.get_mut(cq) else { return };
        if c.comp_queue.is_none() {
            return;
        }
        let solicited = solicited || cqe.status != 0;
        if c.moderation.is_none() || self.moderated(cq, solicited) {
            self.notify(cq, solicited);
        }
    }

    /// Handles a completion that finds no room in its CQ: the CQ fails, and with it the QPs that use it.
    fn overrun(&mut self, cq: Handle<Cq>) {
        let Some(c) = self.objects.cqs.get_mut(cq) else { return };
        c.dead = true;
        let (owner, number) = (c.owner, c.number);
        self.emit(owner, AsyncEvent::CqErr, number);
        let qps = self.objects.sessions.get(owner.0).map(|s| s.names.qps.clone()).unwrap_or_default();
        for h in qps {
            if self.objects.qps.get(h).is_some_and(|q| q.send_cq == cq || q.recv_cq == cq) {
                self.fail_qp(h, Some(AsyncEvent::QpFatal));
            }
        }
    }

    /// Raises a completion event if the program has asked for one.
    fn notify(&mut self, cqn: Handle<Cq>, solicited: bool) {
        let Some(cq) = self.objects.cqs.get_mut(cqn) else { return };
        let Some(queue) = cq.comp_queue else { return };
        let (owner, number) = (cq.owner, cq.number);
        let asked = cq.notify;
        let by_command = asked & abi::NOTIFY_NEXT != 0 || asked & abi::NOTIFY_SOLICITED != 0 && solicited;
        if by_command {
            cq.notify = 0;
        }
        if cq.ring.take_event(solicited) || by_command {
            self.outputs.push_back(Output::Completion { session: owner, queue, cqn: number, asked: by_command });
        }
    }

    /// Counts a completion in a CQ with moderation; true if an event is due now. The first completion that waits starts
    /// the period.
    fn moderated(&mut self, cqn: Handle<Cq>, solicited: bool) -> bool {
        let now = self.now;
        let Some(cq) = self.objects.cqs.get_mut(cqn) else { return false };
        let asked = cq.notify | cq.ring.armed();
        let Some(m) = &mut cq.moderation else { return true };
        if asked & abi::NOTIFY_NEXT == 0 && !(solicited && asked != 0) {
            return false;
        }
        m.solicited |= solicited;
        m.waiting += 1;
        if m.waiting >= m.count {
            (m.waiting, m.solicited) = (0, false);
            return true;
        }
        if m.waiting == 1 {
            m.due = now + m.period_ns;
            if !std::mem::replace(&mut m.timed, true) {
                let due = m.due;
                self.arm_events(cqn, due);
            }
        }
        false
    }

    pub(crate) fn arm_events(&mut self, cqn: Handle<Cq>, at: u64) {
        if let Some(s) = self.objects.cqs.get(cqn).and_then(|c| self.objects.sessions.get(c.owner.0)) {
            let vrnic = s.vrnic;
            self.arm(vrnic, at, Due::Events(cqn));
        }
    }

    /// Called when the timer of a CQ with moderation fires: reports the completions if their period is over, and else
    /// sets the timer again.
    pub(crate) fn events_due(&mut self, cqn: Handle<Cq>) {
        let now = self.now;
        let Some(m) = self.objects.cqs.get_mut(cqn).and_then(|c| c.moderation.as_mut()) else { return };
        m.timed = m.waiting > 0 && m.due > now;
        if m.timed {
            let due = m.due;
            self.arm_events(cqn, due);
        } else {
            self.end_moderation(cqn);
        }
    }

    /// Reports the completions of a CQ that wait for an event.
    pub(crate) fn end_moderation(&mut self, cqn: Handle<Cq>) {
        let Some(m) = self.objects.cqs.get_mut(cqn).and_then(|c| c.moderation.as_mut()) else { return };
        let (waiting, solicited) = (std::mem::take(&mut m.waiting), std::mem::take(&mut m.solicited));
        if waiting > 0 {
            self.notify(cqn, solicited);
        }
    }

    /// Moves a QP to ERR. When its turn comes, the QP acknowledges what it has received, and its work requests are
    /// flushed.
    pub(crate) fn fail_qp(&mut self, h: Handle<Qp>, event: Option<AsyncEvent>) {
        let Some(q) = self.objects.qps.get_mut(h) else { return };
        let (owner, qpn) = (q.owner, q.qpn);
        let was = std::mem::replace(&mut q.state, QpState::Err);
        if let Some(w) = q.work.as_mut().filter(|w| !matches!(w.wait, Wait::Job(_))) {
            w.wait = Wait::No;
        }
        q.timer = q.timer.wrapping_add(1);
        if was != QpState::Err {
            q.rings.set_rq_notify(true);
            let shares = q.srq.is_some() && q.typ != QpType::XrcRecv;
            if let Some(kind) = event {
                self.emit(owner, kind, qpn.0);
            }
            if shares {
                self.emit(owner, AsyncEvent::QpLastWqeReached, qpn.0);
            }
        }
        let dropped = self.drop_backlog(h);
        if dropped > 0 {
            self.objects.count(h, |c| c.dropped += dropped as u64);
        }
        self.make_runnable(h);
    }

    /// Handles the failure of a request: a reliable QP goes to ERR, any other QP to SQE, where it still receives (IBTA
    /// vol. 1, 10.3.1.6).
    pub(crate) fn fail_requester(&mut self, h: Handle<Qp>) {
        let Some(q) = self.objects.qps.get_mut(h) else { return };
        if q.typ.is_reliable() || !matches!(q.state, QpState::Rts | QpState::Sqd) {
            return self.fail_qp(h, None);
        }
        q.state = QpState::Sqe;
        self.make_runnable(h);
    }

    /// Fails a QP because an index of one of its rings jumped. The QP's sessions get an event; other QPs are not
    /// affected.
    pub(crate) fn break_qp(&mut self, h: Handle<Qp>) {
        if let Some(q) = self.objects.qps.get_mut(h) {
            q.broken = true;
        }
        self.objects.end_work(h);
        self.fail_qp(h, Some(AsyncEvent::QpFatal));
    }

    pub(crate) fn drained(&mut self, h: Handle<Qp>) {
        let Some(q) = self.objects.qps.get_mut(h) else { return };
        if std::mem::take(&mut q.attr.en_sqd_async_notify) != 0 {
            let (owner, qpn) = (q.owner, q.qpn);
            self.emit(owner, AsyncEvent::SqDrained, qpn.0);
        }
    }

    pub(crate) fn establish(&mut self, ph: Handle<Qp>) {
        let Some(p) = self.objects.qps.get_mut(ph) else { return };
        if p.state == QpState::Rtr && !std::mem::replace(&mut p.established, true) {
            let (owner, qpn) = (p.owner, p.qpn);
            self.emit(owner, AsyncEvent::CommEst, qpn.0);
        }
    }
}
