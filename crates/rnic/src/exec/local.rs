//! Execution of work requests between two QPs of this host: requester and responder in one.
//!
//! The checks, the order of completions and the errors are those of the wire (IBTA vol. 1, chapter 9);
//! what the wire does with packets is one copy here (T08). A message moves in slices so that nobody
//! waits for a long one; each slice looks its keys up again, because they may be gone by then.

use unirdma_formats::wire::syndrome;
use unirdma_formats::{
    AsyncEvent, MAX_MSG_BYTES, QpState, QpType, WcStatus, WrOpcode, access, ack_timeout_ns, psn_count, rnr_timer_ns,
    send_flags,
};
use unirdma_mem::{Fault, atomic_u64};

use super::receive::{NoRecv, RecvDone};
use super::wqe::load;
use crate::access::{list, local_side, may_flush, recv_side, remote_access, remote_side};
use crate::core::{Core, OP_NS, copy_ns};
use crate::job::Made;
use crate::objects::{Qp, Wait, Work};
use crate::slab::Handle;

/// Most bytes that a job moves. Then keys are looked up again.
const SLICE: u64 = 128 << 10;
/// Most bytes that move at once, while the core is held.
const SMALL_SLICE: u64 = 64 << 10;

/// At least so many bytes are moved by a job, if somebody else could use the core meanwhile. Fewer are moved at once: they take less
/// time than it takes to come back.
const JOB_BYTES: u64 = 16 << 10;

/// Time between two looks for room in the receiver's stage, or among the jobs of a vRNIC, ns.
const FULL_NS: u64 = 5_000;

/// What became of a request.
pub(crate) enum Outcome {
    /// More slices to come.
    Progress,
    /// Done.
    Done,
    /// Nobody answers, no receive is there, or memory moves: a timer is armed. Or there is no room for its packet.
    Waits,
    /// A job copies its next slice.
    Copies,
    /// Failed with this status.
    Failed(WcStatus),
}

/// Why the responder does not execute a request.
enum Refusal {
    /// It does not answer at all.
    Silent,
    /// No receive is posted.
    NotReady,
    /// There is no room for its message now.
    Full,
    /// The request is wrong: what the requester sees, and the responder's event.
    Request(WcStatus, AsyncEvent),
    /// The receive is wrong: what each side sees.
    Receive { responder: WcStatus, requester: WcStatus },
}

const NO_ACCESS: Refusal = Refusal::Request(WcStatus::RemAccessErr, AsyncEvent::QpAccessErr);
const BAD_RECV: Refusal = Refusal::Receive { responder: WcStatus::LocProtErr, requester: WcStatus::RemOpErr };

impl Core {
    /// Executes one slice of the WQE at the head of the SQ; what that takes, roughly, nanoseconds, or `None` if there is nothing to do.
    pub(crate) fn execute(&mut self, h: Handle<Qp>) -> Option<u64> {
        if !self.may_send(h) {
            return None;
        }
        let q = self.objects.qps.get_mut(h)?;
        let mut work = q.work.take()?;
        let mut status = None;
        if !q.busy {
            match q.rings.sq_pending(q.sq_cons) {
                Ok(0) => {
                    q.work = Some(work);
                    return None;
                }
                Ok(_) => status = load(q, q.sq_cons, &mut work).err(),
                Err(_) => {
                    q.work = Some(work);
                    self.break_qp(h);
                    return None;
                }
            }
            q.busy = true;
        }
        let typ = q.typ;
        let (before, began) = (work.done, !work.started);
        let local = WrOpcode::from_raw(work.wqe.opcode.into()).is_some_and(WrOpcode::is_local);
        let outcome = match status {
            Some(s) => Outcome::Failed(s),
            None if local => match self.objects.execute_local(h, &work) {
                WcStatus::Success => Outcome::Done,
                s => Outcome::Failed(s),
            },
            None if typ == QpType::Ud => self.send_datagram(h, &mut work),
            None if work.started => self.slice(h, &mut work),
            None => self.begin(h, &mut work),
        };
        let moved = work.done.saturating_sub(before);
        let cost = OP_NS + copy_ns(moved);
        self.has_sent(h, u64::from(began), moved);
        let more = !matches!(outcome, Outcome::Waits | Outcome::Copies);
        self.conclude(h, work, outcome);
        more.then_some(cost)
    }

    /// Completes a request if it has ended, and gives its WQE back to QP `h`.
    fn conclude(&mut self, h: Handle<Qp>, work: Box<Work>, outcome: Outcome) {
        match outcome {
            Outcome::Progress | Outcome::Waits | Outcome::Copies => {}
            Outcome::Done => self.retire(h, &work, WcStatus::Success),
            Outcome::Failed(status) => {
                self.retire(h, &work, status);
                self.fail_requester(h);
            }
        }
        if let Some(q) = self.objects.qps.get_mut(h) {
            q.work = Some(work);
        }
    }

    /// What a requester checks of a request before it leaves: length, local keys, initiator depth.
    pub(crate) fn check_local(&self, q: &Qp, w: &Work, op: WrOpcode) -> Result<(), WcStatus> {
        let tables = self.objects.memory();
        if w.total > MAX_MSG_BYTES {
            return Err(WcStatus::LocLenErr);
        }
        if !tables.allows(local_side(q, w, op), w.total) {
            return Err(WcStatus::LocProtErr);
        }
        if op.returns_data() && q.attr.max_rd_atomic == 0 {
            return Err(WcStatus::LocQpOpErr);
        }
        Ok(())
    }

    /// Checks a request at both ends and, if the peer is ready for it, executes its first slice.
    fn begin(&mut self, h: Handle<Qp>, w: &mut Work) -> Outcome {
        let Some(q) = self.objects.qps.get(h) else { return Outcome::Failed(WcStatus::FatalErr) };
        let Some(op) = WrOpcode::from_raw(w.wqe.opcode.into()) else { return Outcome::Failed(WcStatus::LocQpOpErr) };
        if let Err(status) = self.check_local(q, w, op) {
            return Outcome::Failed(status);
        }
        let Some(ph) = self.objects.answering_peer(h) else { return self.no_answer(h, w) };
        if let Err(refusal) = self.check_remote(ph, w, op) {
            return self.refused(h, ph, w, refusal);
        }
        self.establish(ph);
        w.started = true;
        self.slice(h, w)
    }

    /// The responder's checks (IBTA vol. 1, 9.7.4.1). Takes the receive WQE that a SEND or a WRITE with immediate consumes.
    fn check_remote(&mut self, ph: Handle<Qp>, w: &Work, op: WrOpcode) -> Result<(), Refusal> {
        if !self.aim(ph, w.wqe.dest_qpn) {
            return Err(Refusal::Request(WcStatus::RemInvReqErr, AsyncEvent::QpReqErr));
        }
        let p = self.objects.qps.get(ph).ok_or(Refusal::Silent)?;
        let tables = self.objects.memory();
        let need = remote_access(op);
        if op == WrOpcode::Flush {
            let (word, key, addr, len) = (w.wqe.imm, w.wqe.rkey, w.wqe.remote_addr, w.wqe.compare_add);
            return if may_flush(&tables, p, word, key, addr, len) { Ok(()) } else { Err(NO_ACCESS) };
        }
        if need != 0 {
            let words = op.is_atomic() || op == WrOpcode::AtomicWrite;
            let misaligned = words && w.wqe.remote_addr % 8 != 0;
            let no_resources = op.returns_data() && p.attr.max_dest_rd_atomic == 0;
            if misaligned || no_resources {
                return Err(Refusal::Request(WcStatus::RemInvReqErr, AsyncEvent::QpReqErr));
            }
            if p.attr.qp_access_flags & need != need || !tables.allows(remote_side(p, w, op), w.total) {
                return Err(NO_ACCESS);
            }
        }
        if !op.consumes_recv() {
            return Ok(());
        }
        if op == WrOpcode::SendInv && !self.objects.may_invalidate(p, w.wqe.imm) {
            return Err(NO_ACCESS);
        }
        match self.take_recv(ph) {
            Ok(()) => {}
            Err(NoRecv::Empty) => return Err(Refusal::NotReady),
            Err(NoRecv::Broken) => {
                self.break_qp(ph);
                return Err(Refusal::Silent);
            }
        }
        let p = self.objects.qps.get(ph).ok_or(Refusal::Silent)?;
        let tables = self.objects.memory();
        let recv = p.recv.as_ref().ok_or(Refusal::Silent)?;
        let is_send = op != WrOpcode::WriteImm;
        // IBTA vol. 1, 9.7.4.1.6 and 9.9.6.3: what each side sees of a receive that does not fit.
        if !recv.valid {
            Err(Refusal::Receive { responder: WcStatus::LocQpOpErr, requester: WcStatus::RemOpErr })
        } else if is_send && w.total > recv.total {
            Err(Refusal::Receive { responder: WcStatus::LocLenErr, requester: WcStatus::RemInvReqErr })
        } else if is_send && !tables.allows(list(p, &recv.sges[..recv.num_sge], access::LOCAL_WRITE), w.total) {
            Err(BAD_RECV)
        } else {
            if is_send && !self.objects.stage_receive(self.now, ph, w.total) { Err(Refusal::Full) } else { Ok(()) }
        }
    }

    /// What a responder's refusal would be on the wire (IBTA vol. 1, table 46); `None` for no answer.
    fn syndrome(&self, ph: Handle<Qp>, refusal: &Refusal) -> Option<u8> {
        Some(match refusal {
            Refusal::Silent | Refusal::Full => return None,
            Refusal::NotReady => syndrome::RNR_NAK | self.objects.qps.get(ph)?.attr.min_rnr_timer,
            Refusal::Request(WcStatus::RemAccessErr, _) => syndrome::NAK_ACCESS,
            Refusal::Receive { requester: WcStatus::RemOpErr, .. } => syndrome::NAK_OPERATION,
            _ => syndrome::NAK_INVALID,
        })
    }

    /// What a responder's refusal means to the two ends.
    fn refused(&mut self, h: Handle<Qp>, ph: Handle<Qp>, w: &mut Work, refusal: Refusal) -> Outcome {
        let reliable = self.objects.qps.get(h).is_some_and(|q| q.typ.is_reliable());
        if self.tap.is_some()
            && let (Some(op), Some(code)) = (WrOpcode::from_raw(w.wqe.opcode.into()), self.syndrome(ph, &refusal))
        {
            self.tap_request(h, w, op, code);
        }
        match refusal {
            Refusal::Silent => self.no_answer(h, w),
            Refusal::NotReady if reliable => self.not_ready(h, ph, w),
            Refusal::Full => self.waits_for_room(h),
            Refusal::Request(status, event) if reliable => {
                self.fail_qp(ph, Some(event));
                Outcome::Failed(status)
            }
            Refusal::Receive { responder, requester } if reliable || responder != WcStatus::LocLenErr => {
                self.finish_local(ph, h, w, responder);
                self.fail_qp(ph, None);
                if reliable { Outcome::Failed(requester) } else { Outcome::Done }
            }
            // An unreliable responder drops what it cannot take, and the requester never hears of it (IBTA vol. 1, 9.8.3).
            _ => {
                self.objects.count_dropped(ph);
                Outcome::Done
            }
        }
    }

    /// Moves the next slice of a request that has begun, or lets a job move it.
    fn slice(&mut self, h: Handle<Qp>, w: &mut Work) -> Outcome {
        let Some(op) = WrOpcode::from_raw(w.wqe.opcode.into()) else { return Outcome::Failed(WcStatus::FatalErr) };
        let Some(ph) = self.objects.answering_peer(h) else { return self.no_answer(h, w) };
        let (Some(q), Some(p)) = (self.objects.qps.get(h), self.objects.qps.get(ph)) else {
            return self.no_answer(h, w);
        };
        let tables = self.objects.memory();
        let local = local_side(q, w, op);
        let left = w.total - w.done;
        let (from, to) = match op {
            WrOpcode::Send | WrOpcode::SendImm | WrOpcode::SendInv => {
                let nowhere = list(p, &[], access::LOCAL_WRITE);
                (local, p.recv.as_ref().map_or(nowhere, |r| recv_side(p, r)))
            }
            WrOpcode::Read => (remote_side(p, w, op), local),
            _ => (local, remote_side(p, w, op)),
        };
        let copies = op.is_send() || matches!(op, WrOpcode::Write | WrOpcode::WriteImm | WrOpcode::Read);
        if copies {
            let n = left.min(SMALL_SLICE);
            let others = self.helped && (self.jobs.are_flying() || self.sched.has_others(q.vnic));
            let copied = if left >= JOB_BYTES && others { None } else { tables.copy(from, to, w.done, n) };
            if let Some(moved) = copied {
                return self.moved(h, ph, w, n, moved);
            }
            let (own, other) = ((q.memory, q.vnic), (p.memory, p.vnic));
            let [f, t] = if op == WrOpcode::Read { [other, own] } else { [own, other] };
            let ends = [(from, f.0, f.1), (to, t.0, t.1)];
            return match self.jobs.make(&tables, [h, ph], ends, w.done, left.min(SLICE)) {
                Made::Job(number) => {
                    self.objects.qps.get_mut(ph).into_iter().for_each(|p| p.served_by += 1);
                    self.objects.qps.get_mut(h).into_iter().for_each(|q| q.wait = Wait::Job(number));
                    Outcome::Copies
                }
                Made::Slow if self.waits_for_memory(h, w) => Outcome::Waits,
                Made::Slow => Outcome::Failed(WcStatus::LocProtErr),
                Made::Full => self.waits_for_room(h),
                Made::Nothing(fault) => self.moved(h, ph, w, 0, Err(fault)),
            };
        }
        let moved = match op {
            WrOpcode::AtomicWrite => {
                let mut value = [0; 8];
                let to = tables.at(to, 0, 8).ok_or(Fault::Destination);
                let loaded = tables.load(local, 0, &mut value);
                loaded.and(to).and_then(|(at, _)| atomic_u64(at, |_| u64::from_ne_bytes(value))).map(|_| ())
            }
            WrOpcode::CmpSwap | WrOpcode::FetchAdd => {
                tables.at(remote_side(p, w, op), 0, 8).ok_or(Fault::Destination).and_then(|(at, _)| {
                    let (add, swap) = (w.wqe.compare_add, w.wqe.swap);
                    let old = match (w.found, op) {
                        (Some(old), _) => old,
                        (None, WrOpcode::CmpSwap) => atomic_u64(at, |v| if v == add { swap } else { v })?,
                        (None, _) => atomic_u64(at, |v| v.wrapping_add(add))?,
                    };
                    // It is executed once, even if its result cannot be stored at once.
                    w.found = Some(old);
                    tables.store(local_side(q, w, op), 0, &old.to_ne_bytes()).map_err(Fault::reversed)
                })
            }
            // What was copied before is visible.
            _ => Ok(()),
        };
        self.moved(h, ph, w, left, moved)
    }

    /// The next `n` bytes of a request were moved, or not; goes on with it, or completes it.
    fn moved(&mut self, h: Handle<Qp>, ph: Handle<Qp>, w: &mut Work, n: u64, moved: Result<(), Fault>) -> Outcome {
        let Some(op) = WrOpcode::from_raw(w.wqe.opcode.into()) else { return Outcome::Failed(WcStatus::FatalErr) };
        // The responder is the source of a READ: swap what a fault means.
        match moved.map_err(|fault| if op == WrOpcode::Read { fault.reversed() } else { fault }) {
            Ok(()) => w.stall.over(),
            Err(fault) if fault.passes() && self.waits_for_memory(h, w) => return Outcome::Waits,
            Err(fault) if fault.lasting() == Fault::Source => return Outcome::Failed(WcStatus::LocProtErr),
            Err(_) => {
                return self.refused(h, ph, w, if op.is_send() { BAD_RECV } else { NO_ACCESS });
            }
        }
        w.done += n;
        if w.done < w.total {
            return Outcome::Progress;
        }
        let Some(mtu) = self.objects.qps.get(h).map(|q| q.mtu) else { return Outcome::Done };
        let packets = psn_count(w.total, mtu);
        if op == WrOpcode::SendInv {
            self.objects.invalidate(ph, w.wqe.imm);
        }
        if op.consumes_recv() {
            self.finish_local(ph, h, w, WcStatus::Success);
        } else if op != WrOpcode::Read {
            self.objects.count(ph, |c| c.received_bytes += w.total);
        }
        if self.tap.is_some() {
            self.tap_request(h, w, op, syndrome::ACK);
        }
        let Some(q) = self.objects.qps.get_mut(h) else { return Outcome::Done };
        q.sq_psn = q.sq_psn.advance(packets);
        let psn = q.sq_psn;
        if let Some(p) = self.objects.qps.get_mut(ph) {
            p.rq_psn = psn;
        }
        Outcome::Done
    }

    /// Job `number` has copied `bytes` for a request of QP `h`, or not.
    pub(crate) fn copied(&mut self, [h, peer]: [Handle<Qp>; 2], number: u64, bytes: u64, result: Result<(), Fault>) {
        // If the QP has been reset meanwhile, what it did then is over.
        let Some(q) = self.objects.qps.get_mut(h).filter(|q| q.wait == Wait::Job(number)) else { return };
        q.wait = Wait::No;
        let goes_on = matches!(q.state, QpState::Rts | QpState::Sqd);
        let work = if goes_on { q.work.take() } else { None };
        if let Some(mut w) = work {
            let outcome = match self.objects.answering_peer(h) {
                Some(ph) if ph == peer => self.moved(h, ph, &mut w, bytes, result),
                _ => self.no_answer(h, &mut w),
            };
            self.has_sent(h, 0, bytes);
            self.conclude(h, w, outcome);
        }
        self.make_runnable(h);
    }

    /// The peer is silent: `retry_cnt` more tries, one each ACK timeout (IBTA vol. 1, 9.9.2.1.1).
    fn no_answer(&mut self, h: Handle<Qp>, w: &mut Work) -> Outcome {
        let Some(q) = self.objects.qps.get_mut(h) else { return Outcome::Failed(WcStatus::RetryExcErr) };
        if !q.typ.is_reliable() {
            return Outcome::Done;
        }
        q.wait = Wait::Ack;
        match ack_timeout_ns(q.attr.timeout) {
            Some(ns) => self.arm_timer(h, ns),
            None => q.timer = q.timer.wrapping_add(1),
        }
        // A message that was under way starts over when the peer answers again.
        w.started = false;
        w.done = 0;
        Outcome::Waits
    }

    /// The peer has no receive: it says when to come back (IBTA vol. 1, 9.7.5.2.8).
    fn not_ready(&mut self, h: Handle<Qp>, ph: Handle<Qp>, w: &mut Work) -> Outcome {
        if w.rnr_left == 0 {
            return Outcome::Failed(WcStatus::RnrRetryExcErr);
        }
        if w.rnr_left < 7 {
            w.rnr_left -= 1;
        }
        let delay = self.objects.qps.get(ph).map_or(0, |p| rnr_timer_ns(p.attr.min_rnr_timer));
        if let Some(q) = self.objects.qps.get_mut(h) {
            q.wait = Wait::Rnr;
        }
        self.arm_timer(h, delay);
        self.objects.count(h, |c| c.rnr_waits += 1);
        Outcome::Waits
    }

    /// There is no room for a request of QP `h` now: it is tried again in a moment.
    fn waits_for_room(&mut self, h: Handle<Qp>) -> Outcome {
        if let Some(q) = self.objects.qps.get_mut(h) {
            q.wait = Wait::Memory;
        }
        self.arm_timer(h, FULL_NS);
        Outcome::Waits
    }

    /// Memory that request `w` needs moves: it is tried again in a moment. False if it has waited long enough.
    pub(crate) fn waits_for_memory(&mut self, h: Handle<Qp>, w: &mut Work) -> bool {
        let Some(delay) = w.stall.again(self.now) else { return false };
        if let Some(q) = self.objects.qps.get_mut(h) {
            q.wait = Wait::Memory;
        }
        self.arm_timer(h, delay);
        true
    }

    /// Completes the receive that QP `ph` has under way for request `w` of QP `h` on this host.
    fn finish_local(&mut self, ph: Handle<Qp>, h: Handle<Qp>, w: &Work, status: WcStatus) {
        let src_qp = self.objects.qps.get(h).map_or(0, |q| q.qpn);
        let op = WrOpcode::from_raw(w.wqe.opcode.into());
        let done = RecvDone {
            status,
            write: op == Some(WrOpcode::WriteImm),
            imm: op.is_some_and(|o| o.has_imm()).then_some(w.wqe.imm),
            invalidated: (op == Some(WrOpcode::SendInv)).then_some(w.wqe.imm),
            byte_len: w.total,
            src_qp,
            solicited: w.wqe.send_flags & send_flags::SOLICITED != 0,
            grh: None,
        };
        self.finish_recv(ph, done);
    }

    /// A wait of QP `h` is over.
    pub(crate) fn on_timer(&mut self, h: Handle<Qp>) {
        let Some(q) = self.objects.qps.get_mut(h) else { return };
        if q.wire.is_some() {
            return self.on_wire_timer(h);
        }
        let was = std::mem::replace(&mut q.wait, Wait::No);
        if was == Wait::Ack {
            let answers = self.objects.answering_peer(h).is_some();
            self.objects.count(h, |c| c.timeouts += 1);
            let Some(q) = self.objects.qps.get_mut(h) else { return };
            let Some(mut w) = q.work.take() else { return };
            let exhausted = !answers && w.retries_left == 0;
            if answers {
                w.retries_left = q.attr.retry_cnt;
            } else {
                w.retries_left = w.retries_left.saturating_sub(1);
            }
            if exhausted {
                self.retire(h, &w, WcStatus::RetryExcErr);
                self.fail_qp(h, None);
            }
            if let Some(q) = self.objects.qps.get_mut(h) {
                q.work = Some(w);
            }
        }
        self.make_runnable(h);
    }
}
