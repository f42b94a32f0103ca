//! Execution of work requests between two QPs of this host. The code is requester and responder in one.
//!
//! Checks, order of completions and errors are the same as for packets (IBTA vol. 1, chapter 9), but one copy takes the
//! place of the packets (T08). A message is copied in slices, so that other work does not wait for a long message. Each
//! slice looks its keys up again, because they may have become invalid.

use unirdma_formats::{
    MAX_MSG_BYTES, QpState, QpType, Rkey, WcStatus, WrOpcode, access, ack_timeout_ns, psn_count, rnr_timer_ns,
    send_flags,
};
use unirdma_mem::Fault;

use super::receive::RecvDone;
use super::responder::{BAD_RECV, INVALID, NO_ACCESS, Refusal, Request, check_form};
use super::wqe::load;
use crate::access::{Side, list, local_side, recv_side, remote_side};
use crate::core::{Core, OP_NS, copy_ns};
use crate::job::{CopyMode, JobResult};
use crate::objects::{Qp, SendOp, VrnicId, Wait};
use crate::slab::Handle;

/// Most bytes that are copied at once while the core is held.
pub(crate) const SMALL_SLICE: u64 = 64 << 10;

/// Smallest slice, in bytes, that a job copies if other work could use the core meanwhile. A shorter slice is copied at
/// once, which takes less time than a job.
pub(super) const JOB_BYTES: u64 = 16 << 10;

/// Time before a request that found no room tries again, ns: room in the receiver's stage, or among the jobs of its
/// vRNIC.
const FULL_NS: u64 = 5_000;

/// The outcome of one step of a request.
pub(crate) enum Outcome {
    /// More slices are left.
    Progress,
    /// Done.
    Done,
    /// It has to wait, as [`Wait`] says: the peer does not answer, no receive is posted, memory moves, or there is no
    /// room for its packet.
    Waits,
    /// A job copies its next slice.
    Copies,
    /// Failed with this status.
    Failed(WcStatus),
}

impl Core {
    /// Executes one slice of the WQE at the head of the SQ. Returns the estimated time of the slice, ns, or `None` if
    /// there is nothing to do now.
    pub(crate) fn execute(&mut self, h: Handle<Qp>) -> Option<u64> {
        if !self.may_send(h) {
            return None;
        }
        let q = self.objects.qps.get_mut(h)?;
        let mut status = None;
        let mut work = match q.work.take() {
            Some(work) => work,
            None => match q.rings.sq_pending(q.sq_cons) {
                Ok(0) => return None,
                Ok(_) => {
                    let mut work = self.objects.spare.work();
                    status = load(q, q.sq_cons, &mut work).err();
                    work
                }
                Err(_) => {
                    self.break_qp(h);
                    return None;
                }
            },
        };
        let typ = q.typ;
        let (before, began, served) = (work.done, !work.started, work.served);
        let outcome = match status {
            Some(s) => Outcome::Failed(s),
            None if work.op.is_local() => self.execute_alone(h, &mut work),
            None if typ == QpType::Ud => self.send_datagram(h, &mut work),
            None if work.started => self.slice(h, &mut work),
            None => self.begin(h, &mut work),
        };
        let moved = work.done.saturating_sub(before);
        let copies = u64::from(work.served.saturating_sub(served));
        let cost = OP_NS + copy_ns(moved) + copies * (OP_NS + copy_ns(work.total)) + self.tap_ns(h, moved);
        self.has_sent(h, u64::from(began), moved);
        let more = !matches!(outcome, Outcome::Waits | Outcome::Copies);
        self.conclude(h, work, outcome);
        more.then_some(cost)
    }

    /// Completes a request that has ended. Any other request stays with QP `h`.
    fn conclude(&mut self, h: Handle<Qp>, work: Box<SendOp>, outcome: Outcome) {
        match outcome {
            Outcome::Progress | Outcome::Waits | Outcome::Copies => {
                if let Some(q) = self.objects.qps.get_mut(h) {
                    q.work = Some(work);
                }
                return;
            }
            Outcome::Done => self.retire(h, &work, WcStatus::Success),
            Outcome::Failed(status) => {
                self.retire(h, &work, status);
                self.fail_requester(h);
            }
        }
        self.objects.spare.keep_work(work);
    }

    /// Executes a request that involves only the requester.
    fn execute_alone(&mut self, h: Handle<Qp>, w: &mut SendOp) -> Outcome {
        match self.execute_local(h, w) {
            Err(status) => Outcome::Failed(status),
            Ok(false) => {
                w.started = true;
                self.waits_for_room(h, w)
            }
            Ok(true) => Outcome::Done,
        }
    }

    /// Executes a request that involves only the requester. False if it is to be executed again, because a job still
    /// reaches memory by the grant that it revokes.
    ///
    /// # Errors
    /// The status with which it completes.
    pub(crate) fn execute_local(&mut self, h: Handle<Qp>, w: &SendOp) -> Result<bool, WcStatus> {
        let freed = self.objects.execute_local(h, w)?;
        if freed.is_some_and(|freed| self.jobs.withdraw(freed)) {
            return Ok(false);
        }
        if w.op == WrOpcode::LocalInv {
            self.objects.invalidate(h, Rkey(w.wqe.imm));
        }
        Ok(true)
    }

    /// The requester's checks of a request: length, local keys, initiator depth.
    pub(crate) fn check_local(&self, q: &Qp, w: &SendOp) -> Result<(), WcStatus> {
        if w.total > MAX_MSG_BYTES {
            return Err(WcStatus::LocLenErr);
        }
        if !self.objects.memory().allows(local_side(q, w), w.total) {
            return Err(WcStatus::LocProtErr);
        }
        if may_return(q, w) { Ok(()) } else { Err(WcStatus::LocQpOpErr) }
    }

    /// Checks a request at both ends, and executes its first slice if the peer is ready for it.
    fn begin(&mut self, h: Handle<Qp>, w: &mut SendOp) -> Outcome {
        if let Some(ph) = self.copy_at_once(h, w) {
            return self.moved(h, ph, w, w.total, Ok(()));
        }
        let Some(q) = self.objects.qps.get(h) else { return Outcome::Failed(WcStatus::FatalErr) };
        if let Err(status) = self.check_local(q, w) {
            return Outcome::Failed(status);
        }
        let Some(ph) = self.objects.answering_peer(h) else { return self.no_answer(h, w) };
        self.establish(ph);
        if let Err(refusal) = self.check_remote(ph, w) {
            return self.refused(h, ph, w, refusal);
        }
        w.started = true;
        self.slice(h, w)
    }

    /// The responder's checks. Takes the receive WQE that a SEND or a WRITE with immediate consumes.
    fn check_remote(&mut self, ph: Handle<Qp>, w: &SendOp) -> Result<(), Refusal> {
        if !self.select_srq(ph, w.wqe.dest_qpn) {
            return Err(INVALID);
        }
        let p = self.objects.qps.get(ph).ok_or(Refusal::Silent)?;
        let (r, is_send, takes_recv) = (request(w), w.op.is_send(), w.op.consumes_recv());
        check_form(p, &r)?;
        // In packets, the key of a WRITE is in the first one, and its immediate data, which take the receive, are in
        // the last one.
        let first_takes_recv = is_send || w.total <= p.mtu.into();
        if takes_recv && first_takes_recv {
            self.take_recv(ph)?;
        }
        let p = self.objects.qps.get(ph).ok_or(Refusal::Silent)?;
        self.objects.check_keys(p, &r)?;
        if !takes_recv {
            return Ok(());
        }
        if !first_takes_recv {
            self.take_recv(ph)?;
        }
        let p = self.objects.qps.get(ph).ok_or(Refusal::Silent)?;
        let recv = p.recv.as_ref().ok_or(Refusal::Silent)?;
        if let Err(refusal) = self.objects.check_recv(recv, is_send.then_some(w.total)) {
            return Err(self.objects.first_refusal(p, recv, refusal));
        }
        if is_send && !self.objects.stage_receive(self.now, ph, w.total) { Err(Refusal::Full) } else { Ok(()) }
    }

    /// Applies a responder's refusal to both ends.
    fn refused(&mut self, h: Handle<Qp>, ph: Handle<Qp>, w: &mut SendOp, refusal: Refusal) -> Outcome {
        let reliable = self.objects.qps.get(h).is_some_and(|q| q.typ.is_reliable());
        if self.tap.is_some()
            && let Some(code) = self.objects.qps.get(ph).and_then(|p| refusal.syndrome(p))
        {
            self.tap_refused(h, w, code);
        }
        match refusal {
            Refusal::Broken => {
                self.break_qp(ph);
                self.no_answer(h, w)
            }
            Refusal::Silent | Refusal::Moves => self.no_answer(h, w),
            Refusal::NotReady if reliable => self.not_ready(h, ph, w),
            Refusal::Full => self.waits_for_room(h, w),
            _ if reliable || refusal.fails_unreliable() => {
                let event = self.end_refused(ph, refusal);
                self.fail_qp(ph, event);
                if let Some(status) = refusal.requester().filter(|_| reliable) {
                    return Outcome::Failed(status);
                }
                self.take_psns(h, Some(ph), w.total);
                Outcome::Done
            }
            _ => {
                self.objects.count_dropped(ph);
                self.take_psns(h, Some(ph), w.total);
                Outcome::Done
            }
        }
    }

    /// Advances the PSNs by the packets of a message of QP `h` that is done or was dropped. If the message reached peer
    /// `ph`, the peer expects the same next PSN.
    fn take_psns(&mut self, h: Handle<Qp>, ph: Option<Handle<Qp>>, total: u64) {
        let Some(q) = self.objects.qps.get_mut(h) else { return };
        q.sq_psn = q.sq_psn.advance(psn_count(total, q.mtu));
        let psn = q.sq_psn;
        if let Some(p) = ph.and_then(|ph| self.objects.qps.get_mut(ph)) {
            p.rq_psn = psn;
        }
    }

    /// Executes the next slice of a request that has begun, or makes a job for it.
    fn slice(&mut self, h: Handle<Qp>, w: &mut SendOp) -> Outcome {
        let Some(ph) = self.objects.answering_peer(h) else { return self.no_answer(h, w) };
        match w.op {
            WrOpcode::Write | WrOpcode::WriteImm | WrOpcode::Read => self.copy_slice(h, ph, w),
            op if op.is_send() => self.copy_slice(h, ph, w),
            _ => self.execute_word(h, ph, w),
        }
    }

    /// Copies the next slice of a message, or makes a job for it.
    fn copy_slice(&mut self, h: Handle<Qp>, ph: Handle<Qp>, w: &mut SendOp) -> Outcome {
        let (Some(q), Some(p)) = (self.objects.qps.get(h), self.objects.qps.get(ph)) else {
            return self.no_answer(h, w);
        };
        let (tables, left) = (self.objects.memory(), w.total - w.done);
        let (own, other) = ((q.memory, q.vrnic), (p.memory, p.vrnic));
        let [from, to] = ends(q, p, w);
        let (source, target) = if w.op == WrOpcode::Read { (other, own) } else { (own, other) };
        let tapped = self.most_tapped(q);
        let most = tapped.unwrap_or(left).min(left);
        let n = most.min(SMALL_SLICE);
        // A captured message is copied in this turn, so that the capture's time is measured and charged.
        let long = left >= JOB_BYTES && tapped.is_none();
        let others = || self.has_helpers && (self.jobs.are_flying() || self.sched.has_others(q.vrnic));
        let careful = long && self.objects.vrnics.get(q.vrnic.0).is_some_and(|v| v.memory_state.is_slow());
        let copied = if careful || long && others() { None } else { tables.copy(from, to, w.done, n) };
        if let Some(copied) = copied {
            return self.moved(h, ph, w, copied.unwrap_or(0), copied.map(|_| ()));
        }
        let rest_ns = self.rest_of([q.vrnic, p.vrnic]);
        if rest_ns > 0 {
            return self.rests(h, w, rest_ns);
        }
        let ends = [(from, source.0, source.1), (to, target.0, target.1)];
        let manner = CopyMode { keeps: tapped.is_some(), careful };
        let made = self.jobs.make(&tables, [h, ph], ends, (w.done, most), manner);
        let outcome = self.waits_for_job(h, ph, w, made);
        if most == left && matches!(outcome, Outcome::Copies) {
            self.extend_job(h, ph, w.op);
        }
        outcome
    }

    /// Time, ns, for which jobs may not make pages in the holes of these vRNICs' memory; 0 if they may. It is not 0 if
    /// many pages were made for one of the vRNICs and other vRNICs have work.
    pub(super) fn rest_of(&self, ids: [VrnicId; 2]) -> u64 {
        let rest_ns = |id: VrnicId| {
            let rest_ns = self.objects.vrnics.get(id.0).map_or(0, |v| v.page_time.rest_ns(self.now));
            if rest_ns > 0 && self.has_work_for_others(Some(id)) { rest_ns } else { 0 }
        };
        rest_ns(ids[0]).max(rest_ns(ids[1]))
    }

    /// Handles the result of making a job for request `w` of QP `h`: the request waits for the job, tries again later
    /// if no job can be made now, or fails if its memory is not there.
    pub(super) fn waits_for_job(&mut self, h: Handle<Qp>, ph: Handle<Qp>, w: &mut SendOp, made: JobResult) -> Outcome {
        match made {
            JobResult::Job(number) => {
                self.objects.serve(ph);
                w.wait = Wait::Job(number);
                Outcome::Copies
            }
            JobResult::Slow if self.waits_for_memory(h, w) => Outcome::Waits,
            JobResult::Slow => Outcome::Failed(WcStatus::LocProtErr),
            JobResult::Full => self.waits_for_room(h, w),
            JobResult::Nothing(fault) => self.moved(h, ph, w, 0, Err(fault)),
        }
    }

    /// Extends the job that was just made for the WQE at the head of the SQ to the WQEs behind it, if they are of the
    /// same opcode, WRITE or READ. A WQE that the job does not reach is loaded again in its turn.
    fn extend_job(&mut self, h: Handle<Qp>, ph: Handle<Qp>, op: WrOpcode) {
        if !matches!(op, WrOpcode::Write | WrOpcode::Read) || self.is_limited(h) {
            return;
        }
        for i in 1.. {
            let (Some(q), Some(p)) = (self.objects.qps.get(h), self.objects.qps.get(ph)) else { return };
            if !matches!(q.typ, QpType::Rc | QpType::Uc) || q.rings.sq_pending(q.sq_cons).is_ok_and(|n| n <= i) {
                return;
            }
            let mut next = self.objects.spare.work();
            let at = q.sq_cons.wrapping_add(i);
            let loaded = load(q, at, &mut next).is_ok() && next.op == op && self.check_local(q, &next).is_ok();
            let tables = self.objects.memory();
            let wanted = loaded && self.objects.check_request(p, &request(&next)).is_ok();
            match wanted.then(|| self.jobs.extend(&tables, ends(q, p, &next), next.total)).flatten() {
                Some(requests) => requests.push_back(next),
                None => return self.objects.spare.keep_work(next),
            }
        }
    }

    /// Handles the result of copying the next `n` bytes of a request: continues, completes or fails the request.
    pub(super) fn moved(
        &mut self,
        h: Handle<Qp>,
        ph: Handle<Qp>,
        w: &mut SendOp,
        n: u64,
        moved: Result<(), Fault>,
    ) -> Outcome {
        let op = w.op;
        // The responder is the source of a READ, so source and destination of a fault are swapped.
        match moved.map_err(|fault| if op == WrOpcode::Read { fault.reversed() } else { fault }) {
            Ok(()) => w.stall.over(),
            Err(fault) if fault.passes() && self.waits_for_memory(h, w) => return Outcome::Waits,
            Err(fault) if fault.lasting() == Fault::Source => return Outcome::Failed(WcStatus::LocProtErr),
            Err(_) => {
                return self.refused(h, ph, w, if op.is_send() { BAD_RECV } else { NO_ACCESS });
            }
        }
        // When a SEND with invalidate completes, no job may reach memory by the revoked grant any more. If one still
        // does, the last slice is copied once more later.
        let invalidates = op == WrOpcode::SendInv && w.done + n == w.total;
        if invalidates
            && let Some(freed) = self.objects.take_back(ph, Rkey(w.wqe.imm))
            && self.jobs.withdraw(freed)
        {
            return self.waits_for_room(h, w);
        }
        w.done += n;
        if self.tap.is_some() {
            self.tap_slice(h, w, w.done - n);
        }
        if w.done < w.total {
            return Outcome::Progress;
        }
        if invalidates {
            self.objects.invalidate(ph, Rkey(w.wqe.imm));
        }
        if op.consumes_recv() {
            self.finish_local(ph, h, w);
        } else if op != WrOpcode::Read {
            self.objects.count(ph, |c| c.received_bytes += w.total);
        }
        self.take_psns(h, Some(ph), w.total);
        Outcome::Done
    }

    /// Handles the end of job `number` of QP `h`. `first` is the number of bytes copied for the WQE at the head of the
    /// SQ (0 is possible), or the old value if it is an atomic. Every WQE in `next` was copied whole. `kept` holds the
    /// copied bytes if they are captured.
    pub(crate) fn copied(
        &mut self,
        [h, peer]: [Handle<Qp>; 2],
        number: u64,
        first: Result<u64, Fault>,
        next: impl IntoIterator<Item = Box<SendOp>>,
        kept: &mut Vec<u8>,
    ) {
        // The result is dropped if the QP was reset or destroyed meanwhile.
        let Some(q) = self.objects.qps.get_mut(h).filter(|q| q.wait() == Wait::Job(number)) else { return };
        let goes_on = |state| matches!(state, QpState::Rts | QpState::Sqd);
        q.work.iter_mut().for_each(|w| w.wait = Wait::No);
        let sends = goes_on(q.state);
        if let Some(mut w) = q.work.take_if(|_| sends) {
            let first = match first {
                // The next step stores the old value.
                Ok(found) if w.op.is_atomic() && w.found.is_none() => {
                    w.found = Some(found);
                    Ok(0)
                }
                Ok(_) if w.op == WrOpcode::AtomicWrite => Ok(w.total),
                Err(fault) if w.found.is_some() => Err(fault.reversed()),
                first => first,
            };
            self.has_sent(h, 0, first.unwrap_or(0));
            self.tap_kept(w.done, kept);
            self.end_copy(h, peer, w, first);
            self.tap_kept(0, kept);
        }
        for w in next {
            // Each must be at the head of the SQ now.
            if self.objects.qps.get(h).is_some_and(|q| q.work.is_none() && goes_on(q.state)) {
                let bytes = w.total;
                self.has_sent(h, 1, bytes);
                self.end_copy(h, peer, w, Ok(bytes));
            } else {
                self.objects.spare.keep_work(w);
            }
        }
        self.make_runnable(h);
    }

    /// Continues a request of QP `h` after a job has copied bytes to or from `peer`.
    fn end_copy(&mut self, h: Handle<Qp>, peer: Handle<Qp>, mut w: Box<SendOp>, copied: Result<u64, Fault>) {
        let outcome = match self.objects.answering_peer(h) {
            Some(ph) if ph == peer || h == peer => self.moved(h, ph, &mut w, copied.unwrap_or(0), copied.map(|_| ())),
            _ => self.no_answer(h, &mut w),
        };
        self.conclude(h, w, outcome);
    }

    /// The peer does not answer: tries `retry_cnt` more times, once for each ACK timeout (IBTA vol. 1, 9.9.2.1.1).
    pub(super) fn no_answer(&mut self, h: Handle<Qp>, w: &mut SendOp) -> Outcome {
        let Some(q) = self.objects.qps.get_mut(h) else { return Outcome::Failed(WcStatus::RetryExcErr) };
        if !q.typ.is_reliable() {
            self.take_psns(h, None, w.total);
            return Outcome::Done;
        }
        w.wait = Wait::Ack;
        match ack_timeout_ns(q.attr.timeout) {
            Some(ns) => self.arm_timer(h, ns),
            None => q.timer = q.timer.wrapping_add(1),
        }
        // A message that was under way begins again when the peer answers.
        w.started = false;
        w.done = 0;
        Outcome::Waits
    }

    /// The peer has no receive: waits for the peer's RNR timer (IBTA vol. 1, 9.7.5.2.8).
    fn not_ready(&mut self, h: Handle<Qp>, ph: Handle<Qp>, w: &mut SendOp) -> Outcome {
        if w.rnr_left == 0 {
            return Outcome::Failed(WcStatus::RnrRetryExcErr);
        }
        if w.rnr_left < 7 {
            w.rnr_left -= 1;
        }
        let delay = self.objects.qps.get(ph).map_or(0, |p| rnr_timer_ns(p.attr.min_rnr_timer));
        w.wait = Wait::Rnr;
        self.arm_timer(h, delay);
        self.objects.count(h, |c| c.rnr_waits += 1);
        Outcome::Waits
    }

    /// Lets request `w` of QP `h` try again after [`FULL_NS`], because there is no room for it now.
    pub(crate) fn waits_for_room(&mut self, h: Handle<Qp>, w: &mut SendOp) -> Outcome {
        self.rests(h, w, FULL_NS)
    }

    /// Lets request `w` try again after `ns` nanoseconds.
    pub(super) fn rests(&mut self, h: Handle<Qp>, w: &mut SendOp, ns: u64) -> Outcome {
        w.wait = Wait::Memory;
        self.arm_timer(h, ns);
        Outcome::Waits
    }

    /// Lets request `w` try again later, because memory that it needs moves. False if it has waited long enough.
    pub(crate) fn waits_for_memory(&mut self, h: Handle<Qp>, w: &mut SendOp) -> bool {
        let Some(delay) = w.stall.again(self.now) else { return false };
        w.wait = Wait::Memory;
        self.arm_timer(h, delay);
        true
    }

    /// Completes the receive that QP `ph` has taken, with request `w` of QP `h` on this host.
    fn finish_local(&mut self, ph: Handle<Qp>, h: Handle<Qp>, w: &SendOp) {
        let src_qp = self.objects.qps.get(h).map_or(0, |q| q.qpn.0);
        let done = RecvDone {
            status: WcStatus::Success,
            write: w.op == WrOpcode::WriteImm,
            imm: w.op.has_imm().then_some(w.wqe.imm),
            invalidated: (w.op == WrOpcode::SendInv).then_some(w.wqe.imm),
            byte_len: w.total,
            src_qp,
            solicited: w.wqe.send_flags & send_flags::SOLICITED != 0,
            grh: None,
            datagram_from_afar: false,
        };
        self.finish_recv(ph, done);
    }

    /// Called when the wait of a request of QP `h` to a QP of this host has ended.
    pub(crate) fn on_local_timer(&mut self, h: Handle<Qp>) {
        self.make_runnable(h);
        let Some(w) = self.objects.qps.get_mut(h).and_then(|q| q.work.as_mut()) else { return };
        if std::mem::take(&mut w.wait) != Wait::Ack {
            return;
        }
        self.objects.count(h, |c| c.timeouts += 1);
        let answers = self.objects.answering_peer(h).is_some();
        let Some(q) = self.objects.qps.get_mut(h) else { return };
        let Some(w) = &mut q.work else { return };
        if answers {
            w.retries_left = q.attr.retry_cnt;
        } else if w.retries_left > 0 {
            w.retries_left -= 1;
        } else if let Some(w) = q.work.take() {
            self.retire(h, &w, WcStatus::RetryExcErr);
            self.objects.spare.keep_work(w);
            self.fail_qp(h, None);
        }
    }
}

/// The fields of a request that its responder checks.
#[inline]
pub(super) fn request(w: &SendOp) -> Request {
    let len = if w.op == WrOpcode::Flush { w.wqe.compare_add } else { w.total };
    Request { op: w.op, va: w.wqe.remote_addr, rkey: Rkey(w.wqe.rkey), len, word: w.wqe.imm, pending: 0 }
}

/// False if the request returns data and QP `q` may have no such requests outstanding.
#[inline]
pub(super) fn may_return(q: &Qp, w: &SendOp) -> bool {
    !w.op.returns_data() || q.attr.max_rd_atomic != 0
}

/// Source and destination of the bytes of a request of QP `q` to QP `p`.
#[inline(always)]
pub(super) fn ends<'a>(q: &'a Qp, p: &'a Qp, w: &'a SendOp) -> [Side<'a>; 2] {
    match w.op {
        WrOpcode::Read => [remote_side(p, w), local_side(q, w)],
        op if op.is_send() => {
            let nowhere = list(p, &[], access::LOCAL_WRITE);
            [local_side(q, w), p.recv.as_ref().map_or(nowhere, |r| recv_side(p, r))]
        }
        _ => [local_side(q, w), remote_side(p, w)],
    }
}
