//! Execution of work requests between two QPs of this host: requester and responder in one.
//!
//! The checks, the order of completions and the errors are those of the wire (IBTA vol. 1, chapter 9);
//! what the wire does with packets is one copy here (T08). A message moves in slices so that nobody
//! waits for a long one; each slice looks its keys up again, because they may be gone by then.

use unirdma_abi as abi;
use unirdma_formats::{
    AsyncEvent, MAX_MSG_BYTES, QpState, WcOpcode, WcStatus, WrOpcode, access, ack_timeout_ns, psn_count, rnr_timer_ns,
    send_flags, wc_flags,
};
use unirdma_mem::{Fault, atomic_u64};
use zerocopy::IntoBytes;

use crate::access::{Side, Tables, list, local_side, remote_access, remote_side};
use crate::objects::{Qp, Recv, Wait, Work};
use crate::rnic::{OP_COST, Rnic};

/// Most bytes that move before keys are looked up again.
const SLICE: u64 = 128 << 10;

/// What became of a request.
enum Outcome {
    /// More slices to come.
    Progress,
    /// Done.
    Done,
    /// Nobody answers, or no receive is there: a timer is armed.
    Waits,
    /// Failed with this status.
    Failed(WcStatus),
}

impl Rnic {
    /// Gives QP `h` a turn worth `allowance`; returns what it cost and whether it has more to do.
    pub(crate) fn step(&mut self, h: u32, allowance: u64) -> (u64, bool) {
        let mut cost = 0;
        while cost < allowance {
            let Some(q) = self.qps.get(h) else { return (cost, false) };
            if q.broken || q.wait != Wait::No {
                return (cost, false);
            }
            if q.wire.is_some() && matches!(q.state, QpState::Rtr | QpState::Rts | QpState::Sqd) {
                let (c, again) = self.wire_step(h, allowance);
                if self.qps.get(h).is_some_and(|q| q.state == QpState::Sqd && !q.is_sending()) {
                    self.drained(h);
                }
                return (c, again);
            }
            match q.state {
                QpState::Err => {
                    if !self.flush_one(h) {
                        return (cost, false);
                    }
                    cost += OP_COST;
                }
                QpState::Rts => match self.execute(h) {
                    Some(c) => cost += c,
                    None => return (cost, false),
                },
                QpState::Sqd if q.busy => match self.execute(h) {
                    Some(c) => cost += c,
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

    fn drained(&mut self, h: u32) {
        let Some(q) = self.qps.get_mut(h) else { return };
        if std::mem::take(&mut q.attr.en_sqd_async_notify) != 0 {
            let (owner, qpn) = (q.owner, q.qpn);
            self.emit(owner, AsyncEvent::SqDrained, qpn);
        }
    }

    /// Executes one slice of the WQE at the head of the SQ; its cost, or `None` if there is nothing to do.
    fn execute(&mut self, h: u32) -> Option<u64> {
        let q = self.qps.get_mut(h)?;
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
        let before = work.done;
        let outcome = match status {
            Some(s) => Outcome::Failed(s),
            None if work.started => self.slice(h, &mut work),
            None => self.begin(h, &mut work),
        };
        let mut cost = OP_COST + work.done - before;
        match outcome {
            Outcome::Progress => {}
            Outcome::Waits => cost = 0,
            Outcome::Done => self.retire(h, &work, WcStatus::Success),
            Outcome::Failed(status) => {
                self.retire(h, &work, status);
                self.fail_qp(h, None);
            }
        }
        if let Some(q) = self.qps.get_mut(h) {
            q.work = Some(work);
        }
        (cost > 0).then_some(cost)
    }

    /// What a requester checks of a request before it leaves: length, local keys, initiator depth.
    pub(crate) fn check_local(&self, q: &Qp, w: &Work, op: WrOpcode) -> Result<(), WcStatus> {
        let tables = Tables { mrs: &self.mrs, sessions: &self.sessions };
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
    fn begin(&mut self, h: u32, w: &mut Work) -> Outcome {
        let Some(q) = self.qps.get(h) else { return Outcome::Failed(WcStatus::FatalErr) };
        let Some(op) = WrOpcode::from_raw(w.wqe.opcode.into()) else { return Outcome::Failed(WcStatus::LocQpOpErr) };
        if let Err(status) = self.check_local(q, w, op) {
            return Outcome::Failed(status);
        }
        let Some(ph) = self.answering_peer(h) else { return self.no_answer(h, w) };
        let Some(p) = self.qps.get(ph) else { return self.no_answer(h, w) };
        let tables = Tables { mrs: &self.mrs, sessions: &self.sessions };

        // The responder's checks, IBTA vol. 1, 9.7.4.1.
        let need = remote_access(op);
        if need != 0 {
            let remote = remote_side(p, w, op);
            let misaligned = op.is_atomic() && w.wqe.remote_addr % 8 != 0;
            let no_resources = op.returns_data() && p.attr.max_dest_rd_atomic == 0;
            if misaligned || no_resources {
                self.fail_qp(ph, Some(AsyncEvent::QpReqErr));
                return Outcome::Failed(WcStatus::RemInvReqErr);
            }
            if p.attr.qp_access_flags & need != need || !tables.allows(remote, w.total) {
                self.fail_qp(ph, Some(AsyncEvent::QpAccessErr));
                return Outcome::Failed(WcStatus::RemAccessErr);
            }
        }
        if op.consumes_recv()
            && let Err(outcome) = self.take_recv(h, ph, w, op)
        {
            return outcome;
        }
        self.establish(ph);
        w.started = true;
        self.slice(h, w)
    }

    /// Takes the receive WQE that a SEND or a WRITE with immediate consumes.
    fn take_recv(&mut self, h: u32, ph: u32, w: &mut Work, op: WrOpcode) -> Result<(), Outcome> {
        let Some(p) = self.qps.get_mut(ph) else { return Err(self.no_answer(h, w)) };
        let pending = p.rings.rq_pending(p.rq_cons);
        // A message that was broken off before its end left its receive here: it serves this one.
        match pending {
            Err(_) => {
                self.break_qp(ph);
                return Err(self.no_answer(h, w));
            }
            Ok(0) if !p.receiving => return Err(self.not_ready(h, ph, w)),
            Ok(_) => {}
        }
        begin_recv(p);
        let Some(recv) = p.recv.take() else { return Err(self.no_answer(h, w)) };
        let valid = recv.valid;
        // IBTA vol. 1, 9.7.4.1.6 and 9.9.6.3: what each side sees of a receive that does not fit.
        let is_send = matches!(op, WrOpcode::Send | WrOpcode::SendImm);
        let tables = Tables { mrs: &self.mrs, sessions: &self.sessions };
        let errors = if !valid {
            Some((WcStatus::LocQpOpErr, WcStatus::RemOpErr))
        } else if is_send && w.total > recv.total {
            Some((WcStatus::LocLenErr, WcStatus::RemInvReqErr))
        } else if is_send && !tables.allows(list(p, &recv.sges[..recv.num_sge], access::LOCAL_WRITE), w.total) {
            Some((WcStatus::LocProtErr, WcStatus::RemOpErr))
        } else {
            None
        };
        p.recv = Some(recv);
        match errors {
            None => Ok(()),
            Some((at_responder, at_requester)) => {
                self.finish_local(ph, h, w, at_responder);
                self.fail_qp(ph, None);
                Err(Outcome::Failed(at_requester))
            }
        }
    }

    /// Moves the next slice of a request that has begun.
    fn slice(&mut self, h: u32, w: &mut Work) -> Outcome {
        let Some(op) = WrOpcode::from_raw(w.wqe.opcode.into()) else { return Outcome::Failed(WcStatus::FatalErr) };
        let Some(ph) = self.answering_peer(h) else { return self.no_answer(h, w) };
        let (Some(q), Some(p)) = (self.qps.get(h), self.qps.get(ph)) else { return self.no_answer(h, w) };
        let tables = Tables { mrs: &self.mrs, sessions: &self.sessions };
        let local = local_side(q, w, op);
        let n = SLICE.min(w.total - w.done);
        let moved = match op {
            WrOpcode::Send | WrOpcode::SendImm => {
                let recv = p.recv.as_ref().map_or(&[][..], |r| &r.sges[..r.num_sge]);
                tables.copy(local, list(p, recv, access::LOCAL_WRITE), w.done, n, &mut self.scratch)
            }
            WrOpcode::Write | WrOpcode::WriteImm => {
                tables.copy(local, remote_side(p, w, op), w.done, n, &mut self.scratch)
            }
            // The responder is the source of a READ: swap what a fault means.
            WrOpcode::Read => tables
                .copy(remote_side(p, w, op), local, w.done, n, &mut self.scratch)
                .map_err(|f| if f == Fault::Source { Fault::Destination } else { Fault::Source }),
            WrOpcode::CmpSwap | WrOpcode::FetchAdd => {
                tables.at(remote_side(p, w, op), 0, 8).ok_or(Fault::Destination).and_then(|(at, _)| {
                    let (add, swap) = (w.wqe.compare_add, w.wqe.swap);
                    let old = match op {
                        WrOpcode::CmpSwap => atomic_u64(at, |v| if v == add { swap } else { v }),
                        _ => atomic_u64(at, |v| v.wrapping_add(add)),
                    }?;
                    let bytes = old.to_ne_bytes();
                    tables.copy(Side::Inline(&bytes), local, 0, 8, &mut self.scratch).map_err(|_| Fault::Source)
                })
            }
        };
        match moved {
            Ok(()) => {}
            Err(Fault::Source) => return Outcome::Failed(WcStatus::LocProtErr),
            Err(Fault::Destination) if matches!(op, WrOpcode::Send | WrOpcode::SendImm) => {
                self.finish_local(ph, h, w, WcStatus::LocProtErr);
                self.fail_qp(ph, None);
                return Outcome::Failed(WcStatus::RemOpErr);
            }
            Err(Fault::Destination) => {
                self.fail_qp(ph, Some(AsyncEvent::QpAccessErr));
                return Outcome::Failed(WcStatus::RemAccessErr);
            }
        }
        w.done += n;
        if w.done < w.total {
            return Outcome::Progress;
        }
        let mtu = q.mtu;
        let packets = psn_count(w.total, mtu);
        if op.consumes_recv() {
            self.finish_local(ph, h, w, WcStatus::Success);
        } else if op != WrOpcode::Read
            && let Some(v) = self.vnic_of_qp(ph)
        {
            v.counters.received_bytes += w.total;
        }
        if let Some(q) = self.qps.get_mut(h) {
            q.sq_psn = q.sq_psn.advance(packets);
        }
        if let Some(p) = self.qps.get_mut(ph) {
            p.rq_psn = p.rq_psn.advance(packets);
        }
        Outcome::Done
    }

    /// The peer QP, if it would answer: connected to us, able to receive, and at our PSN.
    fn answering_peer(&mut self, h: u32) -> Option<u32> {
        let q = self.qps.get(h)?;
        let (dest, vnic) = (q.attr.dest_qp_num, q.peer_vnic?);
        let cached = q.peer.filter(|&p| self.qps.get(p).is_some_and(|p| p.qpn == dest));
        let ph = match cached {
            Some(p) => p,
            None => *self.qpns.get(&dest)?,
        };
        let p = self.qps.get(ph)?;
        let receives = matches!(p.state, QpState::Rtr | QpState::Rts | QpState::Sqd | QpState::Sqe) && !p.broken;
        let connected = p.vnic == vnic && p.attr.dest_qp_num == q.qpn && p.peer_vnic == Some(q.vnic);
        let in_sequence = p.rq_psn == q.sq_psn;
        if !(receives && connected && in_sequence) {
            return None;
        }
        if cached.is_none()
            && let Some(q) = self.qps.get_mut(h)
        {
            q.peer = Some(ph);
        }
        Some(ph)
    }

    /// The peer is silent: `retry_cnt` more tries, one each ACK timeout (IBTA vol. 1, 9.9.2.1.1).
    fn no_answer(&mut self, h: u32, w: &mut Work) -> Outcome {
        let Some(q) = self.qps.get_mut(h) else { return Outcome::Failed(WcStatus::RetryExcErr) };
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
    fn not_ready(&mut self, h: u32, ph: u32, w: &mut Work) -> Outcome {
        if w.rnr_left == 0 {
            return Outcome::Failed(WcStatus::RnrRetryExcErr);
        }
        if w.rnr_left < 7 {
            w.rnr_left -= 1;
        }
        let delay = self.qps.get(ph).map_or(0, |p| rnr_timer_ns(p.attr.min_rnr_timer));
        if let Some(q) = self.qps.get_mut(h) {
            q.wait = Wait::Rnr;
        }
        self.arm_timer(h, delay);
        if let Some(v) = self.vnic_of_qp(h) {
            v.counters.rnr_waits += 1;
        }
        Outcome::Waits
    }

    /// A wait of QP `h` is over.
    pub(crate) fn on_timer(&mut self, h: u32) {
        let Some(q) = self.qps.get_mut(h) else { return };
        if q.wire.is_some() {
            return self.on_wire_timer(h);
        }
        let was = std::mem::replace(&mut q.wait, Wait::No);
        if was == Wait::Ack {
            let answers = self.answering_peer(h).is_some();
            if let Some(v) = self.vnic_of_qp(h) {
                v.counters.timeouts += 1;
            }
            let Some(q) = self.qps.get_mut(h) else { return };
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
            if let Some(q) = self.qps.get_mut(h) {
                q.work = Some(w);
            }
        }
        self.make_runnable(h);
    }

    /// Completes the WQE at the head of the SQ.
    pub(crate) fn retire(&mut self, h: u32, w: &Work, status: WcStatus) {
        let Some(q) = self.qps.get_mut(h) else { return };
        q.busy = false;
        q.sq_cons = q.sq_cons.wrapping_add(1);
        q.rings.set_sq_cons(q.sq_cons);
        let signaled = q.sig_all || w.wqe.send_flags & send_flags::SIGNALED != 0 || status != WcStatus::Success;
        let op = WrOpcode::from_raw(w.wqe.opcode.into());
        let returns = op.is_some_and(|o| o.returns_data());
        let cqe = abi::Cqe {
            wr_id: w.wqe.wr_id,
            status: status as u8,
            opcode: op.map_or(0, |o| o.wc() as u8),
            byte_len: if returns { w.total as u32 } else { 0 },
            qp_num: q.qpn,
            wqe_index: q.sq_cons,
            ..abi::Cqe::default()
        };
        let cq = q.send_cq;
        if let Some(v) = self.vnic_of_qp(h) {
            match status {
                WcStatus::Success => {
                    v.counters.sent_wrs += 1;
                    v.counters.sent_bytes += w.total;
                }
                WcStatus::WrFlushErr => {}
                _ => v.counters.errors += 1,
            }
        }
        if signaled {
            self.complete(cq, cqe, false);
        }
    }

    /// Completes the receive that QP `ph` has under way for request `w` of QP `h` on this host.
    fn finish_local(&mut self, ph: u32, h: u32, w: &Work, status: WcStatus) {
        let src_qp = self.qps.get(h).map_or(0, |q| q.qpn);
        let op = WrOpcode::from_raw(w.wqe.opcode.into());
        let done = RecvDone {
            status,
            write: op == Some(WrOpcode::WriteImm),
            imm: op.is_some_and(|o| o.has_imm()).then_some(w.wqe.imm),
            byte_len: w.total,
            src_qp,
            solicited: w.wqe.send_flags & send_flags::SOLICITED != 0,
        };
        self.finish_recv(ph, done);
    }

    /// Completes the receive that QP `ph` has under way.
    pub(crate) fn finish_recv(&mut self, ph: u32, d: RecvDone) {
        let Some(p) = self.qps.get_mut(ph) else { return };
        p.receiving = false;
        let cqe = abi::Cqe {
            wr_id: p.recv.as_ref().map_or(0, |r| r.wr_id),
            status: d.status as u8,
            opcode: if d.write { WcOpcode::RecvWriteImm } else { WcOpcode::Recv } as u8,
            wc_flags: if d.imm.is_some() { wc_flags::WITH_IMM as u16 } else { 0 },
            byte_len: d.byte_len as u32,
            imm: d.imm.unwrap_or(0),
            qp_num: p.qpn,
            src_qp: d.src_qp,
            wqe_index: p.rq_cons,
            ..abi::Cqe::default()
        };
        let cq = p.recv_cq;
        if let Some(v) = self.vnic_of_qp(ph) {
            if d.status == WcStatus::Success {
                v.counters.received_wrs += 1;
                v.counters.received_bytes += d.byte_len;
            } else {
                v.counters.errors += 1;
            }
        }
        self.complete(cq, cqe, d.solicited);
    }

    /// Flushes one work request of a QP in ERR (IBTA vol. 1, 10.3.1.7); false if none is left.
    fn flush_one(&mut self, h: u32) -> bool {
        let Some(q) = self.qps.get_mut(h) else { return false };
        let (sq, rq) = (q.rings.sq_pending(q.sq_cons), q.rings.rq_pending(q.rq_cons));
        let (Ok(sq), Ok(rq)) = (sq, rq) else {
            self.break_qp(h);
            return false;
        };
        if q.busy || sq > 0 {
            let Some(mut w) = q.work.take() else { return false };
            if !q.busy {
                w.wqe = q.rings.sq_head(q.sq_cons);
            }
            self.retire(h, &w, WcStatus::WrFlushErr);
            if let Some(q) = self.qps.get_mut(h) {
                q.work = Some(w);
            }
            return true;
        }
        let wr_id = if std::mem::take(&mut q.receiving) {
            q.recv.as_ref().map_or(0, |r| r.wr_id)
        } else if rq > 0 {
            let head = q.rings.rq_head(q.rq_cons);
            q.rq_cons = q.rq_cons.wrapping_add(1);
            q.rings.set_rq_cons(q.rq_cons);
            head.wr_id
        } else {
            return false;
        };
        let cqe = abi::Cqe {
            wr_id,
            status: WcStatus::WrFlushErr as u8,
            opcode: WcOpcode::Recv as u8,
            qp_num: q.qpn,
            wqe_index: q.rq_cons,
            ..abi::Cqe::default()
        };
        let cq = q.recv_cq;
        self.complete(cq, cqe, false);
        true
    }

    /// A ring index jumped: the QP is lost, its sender hears of it, nobody else does.
    pub(crate) fn break_qp(&mut self, h: u32) {
        if let Some(q) = self.qps.get_mut(h) {
            q.broken = true;
            q.busy = false;
        }
        self.fail_qp(h, Some(AsyncEvent::QpFatal));
    }

    pub(crate) fn establish(&mut self, ph: u32) {
        let Some(p) = self.qps.get_mut(ph) else { return };
        if p.state == QpState::Rtr && !std::mem::replace(&mut p.established, true) {
            let (owner, qpn) = (p.owner, p.qpn);
            self.emit(owner, AsyncEvent::CommEst, qpn);
        }
    }

    pub(crate) fn vnic_of_qp(&mut self, h: u32) -> Option<&mut crate::objects::Vnic> {
        let v = self.qps.get(h)?.vnic;
        self.vnics.get_mut(v.0)
    }
}

/// Copies SQ WQE number `at` and checks its form.
pub(crate) fn load(q: &Qp, at: u32, w: &mut Work) -> Result<(), WcStatus> {
    w.wqe = q.rings.sq_head(at);
    w.started = false;
    w.done = 0;
    w.total = 0;
    w.num_sge = 0;
    w.retries_left = q.attr.retry_cnt;
    w.rnr_left = q.attr.rnr_retry;
    let op = WrOpcode::from_raw(w.wqe.opcode.into()).ok_or(WcStatus::LocQpOpErr)?;
    if w.wqe.send_flags & !send_flags::SUPPORTED != 0 {
        return Err(WcStatus::LocQpOpErr);
    }
    if w.wqe.send_flags & send_flags::INLINE != 0 {
        let n = usize::from(w.wqe.inline_len);
        let may = !matches!(op, WrOpcode::Read | WrOpcode::CmpSwap | WrOpcode::FetchAdd);
        let data = w.inline.get_mut(..n).filter(|_| may && n as u32 <= q.cap.max_inline_data);
        if !data.is_some_and(|d| q.rings.sq_data(at, d)) {
            return Err(WcStatus::LocQpOpErr);
        }
        w.total = n as u64;
        return Ok(());
    }
    let n = usize::from(w.wqe.num_sge);
    let sges = w.sges.get_mut(..n).filter(|_| n as u32 <= q.cap.max_send_sge);
    if !sges.is_some_and(|s| q.rings.sq_data(at, s.as_mut_bytes())) {
        return Err(WcStatus::LocQpOpErr);
    }
    w.num_sge = n;
    w.total = w.sges[..n].iter().map(|s| u64::from(s.length)).sum();
    if op.is_atomic() && w.total < 8 {
        return Err(WcStatus::LocLenErr);
    }
    if op.is_atomic() {
        w.total = 8;
    }
    Ok(())
}

/// How a receive ended.
#[derive(Clone, Copy)]
pub(crate) struct RecvDone {
    pub status: WcStatus,
    /// A WRITE with immediate.
    pub write: bool,
    pub imm: Option<u32>,
    pub byte_len: u64,
    pub src_qp: u32,
    pub solicited: bool,
}

impl RecvDone {
    /// Success, for a message from the QP that `q` is connected to.
    pub fn of(q: &Qp) -> Self {
        RecvDone {
            status: WcStatus::Success,
            write: false,
            imm: None,
            byte_len: 0,
            src_qp: q.attr.dest_qp_num,
            solicited: false,
        }
    }
}

/// Takes the receive WQE at the head of the RQ, which must not be empty, unless one is taken already.
pub(crate) fn begin_recv(p: &mut Qp) {
    if p.receiving {
        return;
    }
    let Some(mut recv) = p.recv.take() else { return };
    load_recv(p, &mut recv);
    p.recv = Some(recv);
    p.rq_cons = p.rq_cons.wrapping_add(1);
    p.rings.set_rq_cons(p.rq_cons);
    p.receiving = true;
}

/// Copies the receive WQE at the head of the RQ and notes whether it is well-formed.
fn load_recv(p: &Qp, r: &mut Recv) {
    let head = p.rings.rq_head(p.rq_cons);
    let n = head.num_sge as usize;
    let sges = r.sges.get_mut(..n).filter(|_| head.num_sge <= p.cap.max_recv_sge);
    r.valid = sges.is_some_and(|s| p.rings.rq_data(p.rq_cons, s.as_mut_bytes()));
    r.wr_id = head.wr_id;
    r.num_sge = if r.valid { n } else { 0 };
    r.total = r.sges[..r.num_sge].iter().map(|s| u64::from(s.length)).sum();
}
