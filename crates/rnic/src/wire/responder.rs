//! Responder: packets to memory and receives, and the answers (IBTA vol. 1, 9.7.4, 9.7.5, 9.9.3).

use unirdma_formats::wire::{Aeth, Extra, Op, Opcode, Packet, Part, syndrome};
use unirdma_formats::{AsyncEvent, NO_CREDITS, Psn, QpType, Rkey, WrOpcode, access, credit_code, psn_count};
use unirdma_mem::Fault;

use super::deferred_packets::{FULL_NS, later};
use crate::access::{NeedsJob, Side, recv_side, remote, remote_access};
use crate::core::{Core, OP_NS, copy_ns};
use crate::exec::{BAD_RECV, INVALID, NO_ACCESS, RecvDone, Refusal, Request, check_form, word_of};
use crate::job::{JobResult, MAX_PAYLOAD, Word};
use crate::objects::{Answer, Message, PacketRun, Qp, Wire, transport_of};
use crate::sched::MOMENT_NS;
use crate::slab::Handle;

/// The answer that bytes are read for: always the oldest one, which remains the oldest until they were sent.
const FRONT: u32 = 0;

/// Where the payload of a message goes.
#[derive(Clone, Copy)]
enum To {
    /// Into the receive that the QP has taken.
    Receive,
    /// To an address of remote memory.
    Remote(Rkey, u64),
}

/// The request of a packet, while `pending` earlier requests wait for their answers.
fn request(op: WrOpcode, p: &Packet<'_>, pending: usize) -> Request {
    let (va, rkey, len) = match op {
        op if op.is_atomic() => (p.atomic.va, Rkey(p.atomic.rkey), 8),
        WrOpcode::SendInv => (0, Rkey(0), 0),
        _ => (p.reth.va, Rkey(p.reth.rkey), u64::from(p.reth.dma_len)),
    };
    let word = if op == WrOpcode::Flush { p.flush } else { p.extra };
    Request { op, va, rkey, len, word, pending }
}

impl Core {
    /// A request came in.
    pub(super) fn on_request(&mut self, h: Handle<Qp>, w: &mut Wire, run: PacketRun<'_>) {
        let p = run.first;
        let Some(expected) = self.objects.qps.get(h).map(|q| q.rq_psn) else { return };
        if w.resp.failed {
            return;
        }
        let psn = Psn::new(p.psn);
        if self.objects.qps.get(h).is_some_and(|q| q.typ == QpType::Uc) {
            if self.on_unreliable(h, w, run, expected) && p.ack_req && w.path.is_ours() {
                w.resp.ack(psn);
            }
            return;
        }
        if psn != expected {
            return if psn.is_before(expected) { self.duplicate(h, w, p, expected) } else { self.gap(h, w, expected) };
        }
        (w.resp.nak_sent, w.resp.missed) = (false, false);
        self.establish(h);
        match self.perform(h, w, run) {
            Ok(packets) => {
                if let Some(q) = self.objects.qps.get_mut(h) {
                    q.rq_psn = q.rq_psn.advance(packets);
                }
                let answered = matches!(p.opcode.op, Op::Send(_) | Op::Write(_));
                if answered && p.ack_req {
                    let waiting = !w.resp.answers.is_empty();
                    let due = w.resp.ack_due;
                    w.resp.ack(psn);
                    if w.resp.message.is_none() {
                        w.resp.ack_due = if waiting { due } else { self.delay_ack(h) };
                    }
                }
            }
            Err(Refusal::Later) => {}
            Err(refusal) => self.refuse(h, w, psn, refusal),
        }
    }

    /// Answers the request with this PSN, which is refused.
    fn refuse(&mut self, h: Handle<Qp>, w: &mut Wire, psn: Psn, refusal: Refusal) {
        let Some(code) = self.objects.qps.get(h).and_then(|q| refusal.syndrome(q)) else {
            return match refusal {
                // The packets that follow are a gap, for which no NAK is sent.
                Refusal::Moves | Refusal::Full => (w.resp.nak_sent, w.resp.missed) = (true, true),
                _ => self.break_qp(h),
            };
        };
        if refusal != Refusal::NotReady {
            let event = self.end_refused(h, refusal);
            return w.resp.fail(psn, code, event);
        }
        w.resp.nak_sent = true;
        w.resp.push(Answer::Nak { psn, msn: w.resp.msn, code, fails: None });
        self.objects.count(h, |c| c.wire.send_rnr_err += 1);
    }

    fn perform(&mut self, h: Handle<Qp>, w: &mut Wire, run: PacketRun<'_>) -> Result<u32, Refusal> {
        let p = run.first;
        let begins = !matches!(p.opcode.op, Op::Send(part) | Op::Write(part) if !part.begins());
        if begins && w.resp.message.is_none() && !self.select_srq(h, p.srqn) {
            return Err(INVALID);
        }
        match p.opcode.op {
            Op::Send(part) => self.on_send(h, w, run, part),
            Op::Write(part) => self.on_write(h, w, run, part),
            Op::ReadRequest => self.on_read(h, w, p),
            Op::AtomicWrite => self.on_atomic_write(h, w, p),
            Op::Flush => self.on_flush(h, w, p),
            _ => self.on_atomic(h, w, p),
        }
    }

    /// A packet of an unreliable connection (IBTA vol. 1, 9.8.2): a message with a gap, or one that cannot be taken, is
    /// dropped, and the next message may begin at any PSN. False if the packet waits, and comes here once more.
    fn on_unreliable(&mut self, h: Handle<Qp>, w: &mut Wire, run: PacketRun<'_>, expected: Psn) -> bool {
        let p = run.first;
        let psn = Psn::new(p.psn);
        let (Op::Send(part) | Op::Write(part)) = p.opcode.op else { return true };
        if psn != expected {
            self.objects.count(h, |c| c.wire.out_of_seq_request += 1);
        }
        let unfinished = w.resp.message.is_some();
        if unfinished && (psn != expected || part.begins()) {
            w.resp.message = None;
            self.objects.count_dropped(h);
        }
        if let Some(q) = self.objects.qps.get_mut(h) {
            q.rq_psn = psn.advance(1);
        }
        if w.resp.message.is_none() && !part.begins() {
            return true;
        }
        self.establish(h);
        match self.perform(h, w, run) {
            Ok(_) => {}
            Err(Refusal::Later) => {
                self.objects.qps.get_mut(h).into_iter().for_each(|q| q.rq_psn = psn);
                return false;
            }
            Err(Refusal::Broken) => self.break_qp(h),
            Err(refusal) if refusal.fails_unreliable() => {
                let event = self.end_refused(h, refusal);
                self.fail_qp(h, event);
            }
            Err(_) => {
                w.resp.message = None;
                w.resp.stall.over();
                self.objects.count_dropped(h);
            }
        }
        true
    }

    /// A packet before this one was lost (IBTA vol. 1, 9.7.5.2.2): one NAK for each gap.
    fn gap(&mut self, h: Handle<Qp>, w: &mut Wire, expected: Psn) {
        if !w.resp.nak_sent {
            w.resp.nak_sent = true;
            w.resp.push(Answer::Nak { psn: expected, msn: w.resp.msn, code: syndrome::NAK_SEQUENCE, fails: None });
        }
        self.objects.count(h, |c| c.wire.out_of_seq_request += 1);
    }

    /// A request that was executed before (IBTA vol. 1, 9.7.5.1.3): it gets the same answer and is not executed again.
    fn duplicate(&mut self, h: Handle<Qp>, w: &mut Wire, p: &Packet<'_>, expected: Psn) {
        self.objects.count(h, |c| c.wire.duplicate_request += 1);
        let psn = Psn::new(p.psn);
        match p.opcode.op {
            Op::Send(_) | Op::Write(_) => w.resp.ack(expected.advance(0xff_ffff)),
            Op::ReadRequest => {
                let Some(q) = self.objects.qps.get(h) else { return };
                let now = (q.pd, q.memory, q.srq, q.recv_cq);
                if !self.select_srq(h, p.srqn) {
                    return;
                }
                let Some(q) = self.objects.qps.get(h) else { return };
                // A duplicate asks for no more than was asked for before.
                let inside = psn_count(p.reth.dma_len.into(), q.mtu) <= expected.since(psn);
                if inside && self.objects.check_request(q, &request(WrOpcode::Read, p, 0)).is_ok() {
                    self.queue_read(h, w, p, true);
                }
                // The message of several packets that is under way goes on in its own memory.
                if let Some(q) = self.objects.qps.get_mut(h) {
                    (q.pd, q.memory, q.srq, q.recv_cq) = now;
                }
            }
            Op::AtomicWrite | Op::Flush => self.queue_answer(h, w, psn, true),
            _ => {
                if let Some(&(_, value)) = w.resp.atomics.iter().find(|a| a.0 == psn) {
                    w.resp.push(Answer::Atomic { psn, msn: w.resp.msn, value, again: true });
                }
            }
        }
    }

    /// Checks that a packet continues the message that has begun, and that its length is right for its place.
    fn continues(&self, h: Handle<Qp>, w: &Wire, p: &Packet<'_>, part: Part, is_send: bool) -> Result<(), Refusal> {
        let mtu = self.objects.qps.get(h).map_or(0, |q| q.mtu as usize);
        let right_message = match w.resp.message {
            None => part.begins(),
            Some(Message::Send) => is_send && !part.begins(),
            Some(Message::Write { .. }) => !is_send && !part.begins(),
        };
        let n = p.payload.len();
        let right_length = match part {
            Part::First | Part::Middle => n == mtu,
            Part::Last => (1..=mtu).contains(&n),
            Part::Only => n <= mtu,
        };
        if right_message && right_length { Ok(()) } else { Err(INVALID) }
    }

    fn on_send(&mut self, h: Handle<Qp>, w: &mut Wire, run: PacketRun<'_>, part: Part) -> Result<u32, Refusal> {
        let p = run.first;
        self.continues(h, w, p, part, true)?;
        if part.begins() {
            self.take_recv(h)?;
            w.resp.got = 0;
        }
        let invalidated = (p.opcode.extra == Extra::Invalidate).then_some(p.extra);
        if invalidated.is_some() {
            self.check(h, w, WrOpcode::SendInv, p)?;
        }
        let n = p.payload.len() as u64;
        if part.begins() {
            // The length of a message of several packets is not known yet.
            let room = self.objects.qps.get(h).and_then(|q| q.recv.as_ref()).map_or(0, |r| r.total);
            let _ = self.objects.stage_receive(self.now, h, if part.ends() { n.min(room) } else { room });
        }
        let recv = self.objects.qps.get(h).and_then(|q| q.recv.as_ref()).ok_or(Refusal::Broken)?;
        let room = recv.total;
        self.objects.check_recv(recv, Some(w.resp.got + n))?;
        match self.store(h, w, To::Receive, run, room)? {
            Ok(()) => {}
            Err(fault) if w.resp.waits(fault, self.now) => return Err(Refusal::Moves),
            Err(_) => return Err(BAD_RECV),
        }
        w.resp.stall.over();
        // A message that fails takes nothing back. If a job still uses the grant, this packet is stored once more when
        // it comes again.
        if let Some(key) = invalidated
            && let Some(freed) = self.objects.take_back(h, Rkey(key))
            && self.jobs.withdraw(freed)
        {
            w.resp.stall.rest(self.now, FULL_NS);
            return Err(Refusal::Full);
        }
        w.resp.got += n;
        let q = self.objects.qps.get(h).ok_or(Refusal::Broken)?;
        let imm = (p.opcode.extra == Extra::Imm).then_some(p.extra);
        let done = RecvDone {
            byte_len: w.resp.got,
            imm,
            invalidated,
            write: false,
            solicited: p.solicited,
            ..RecvDone::of(q)
        };
        w.resp.message = (!part.ends()).then_some(Message::Send);
        if part.ends() {
            w.resp.msn = w.resp.msn.wrapping_add(1);
            if let Some(key) = invalidated {
                self.objects.invalidate(h, Rkey(key));
            }
            self.finish_recv(h, done);
        }
        Ok(1)
    }

    fn on_write(&mut self, h: Handle<Qp>, w: &mut Wire, run: PacketRun<'_>, part: Part) -> Result<u32, Refusal> {
        let p = run.first;
        self.continues(h, w, p, part, false)?;
        let (va, rkey, len) = match w.resp.message {
            Some(Message::Write { va, rkey, len }) => (va, rkey, len),
            _ => (p.reth.va, Rkey(p.reth.rkey), u64::from(p.reth.dma_len)),
        };
        let got = if part.begins() { 0 } else { w.resp.got };
        let asked = part.begins().then(|| request(WrOpcode::Write, p, 0));
        if let Some(r) = &asked {
            check_form(self.objects.qps.get(h).ok_or(Refusal::Silent)?, r)?;
        }
        let imm = (p.opcode.extra == Extra::Imm).then_some(p.extra);
        if imm.is_some() {
            self.take_recv(h)?;
        }
        if let Some(r) = &asked {
            self.objects.check_keys(self.objects.qps.get(h).ok_or(Refusal::Silent)?, r)?;
        }
        if imm.is_some() {
            let recv = self.objects.qps.get(h).and_then(|q| q.recv.as_ref()).ok_or(Refusal::Broken)?;
            self.objects.check_recv(recv, None)?;
        }
        let n = p.payload.len() as u64;
        if got + n > len || part.ends() && got + n != len {
            return Err(INVALID);
        }
        w.resp.got = got;
        let stored = self.store(h, w, To::Remote(rkey, va), run, len)?;
        self.reached(w, stored)?;
        w.resp.got = got + n;
        w.resp.message = (!part.ends()).then_some(Message::Write { va, rkey, len });
        if part.ends() {
            w.resp.msn = w.resp.msn.wrapping_add(1);
            let q = self.objects.qps.get(h).ok_or(Refusal::Broken)?;
            if imm.is_some() {
                let done = RecvDone { byte_len: len, imm, write: true, solicited: p.solicited, ..RecvDone::of(q) };
                self.finish_recv(h, done);
            } else {
                self.objects.count(h, |c| {
                    c.received_bytes += len;
                    c.wire.received_bytes += len;
                });
            }
        }
        Ok(1)
    }

    /// Stores the payload of the first packet of a run, or lets a job store as much of the run as the message has
    /// `room` for.
    fn store(
        &mut self,
        h: Handle<Qp>,
        w: &mut Wire,
        to: To,
        run: PacketRun<'_>,
        room: u64,
    ) -> Result<Result<(), Fault>, Refusal> {
        if let Some(done) = w.resp.inbox.known() {
            return Ok(done.map(|_| ()));
        }
        let q = self.objects.qps.get(h).ok_or(Refusal::Broken)?;
        let to = match to {
            To::Receive => recv_side(q, q.recv.as_ref().ok_or(Refusal::Broken)?),
            To::Remote(key, va) => remote(q, access::REMOTE_WRITE, key, va),
        };
        let (tables, got) = (self.objects.memory(), w.resp.got);
        Ok(match tables.store(to, got, run.first.payload) {
            Ok(()) => Ok(()),
            Err(NeedsJob::Fault(fault)) => Err(fault),
            Err(NeedsJob::Job) => {
                let (bytes, packets) = run.within(room - got);
                let made = self.jobs.store(&tables, h, (to, q.memory, q.vrnic), got, &[bytes]);
                Err(later(w, made, packets, self.now)?)
            }
        })
    }

    /// Executes an operation on a word of remote memory, or lets a job do that. Returns the value that was there
    /// before.
    fn operate(
        &mut self,
        h: Handle<Qp>,
        w: &mut Wire,
        key: Rkey,
        va: u64,
        (op, word): (WrOpcode, Word),
    ) -> Result<u64, Refusal> {
        let q = self.objects.qps.get(h).ok_or(Refusal::Silent)?;
        let (tables, to) = (self.objects.memory(), remote(q, remote_access(op), key, va));
        let found = match w.resp.inbox.known() {
            Some(done) => done,
            None => match tables.word(to, word) {
                Ok(found) => Ok(found),
                Err(NeedsJob::Fault(fault)) => Err(fault),
                Err(NeedsJob::Job) => {
                    let made = self.jobs.word(&tables, [h, h], None, (to, q.memory, q.vrnic), word);
                    Err(later(w, made, 1, self.now)?)
                }
            },
        };
        self.reached(w, found)
    }

    /// The data found in remote memory, or why the request is not executed.
    fn reached<R>(&self, w: &mut Wire, r: Result<R, Fault>) -> Result<R, Refusal> {
        match r {
            Ok(found) => {
                w.resp.stall.over();
                Ok(found)
            }
            Err(fault) if w.resp.waits(fault, self.now) => Err(Refusal::Moves),
            Err(_) => Err(NO_ACCESS),
        }
    }

    /// Makes the responder's checks of a request that `p` begins, or completes.
    fn check(&self, h: Handle<Qp>, w: &Wire, op: WrOpcode, p: &Packet<'_>) -> Result<(), Refusal> {
        let q = self.objects.qps.get(h).ok_or(Refusal::Silent)?;
        if op.returns_data() && w.resp.message.is_some() {
            return Err(INVALID);
        }
        let pending = if op.returns_data() { w.resp.reads_waiting() } else { 0 };
        self.objects.check_request(q, &request(op, p, pending))
    }

    fn queue_read(&self, h: Handle<Qp>, w: &mut Wire, p: &Packet<'_>, again: bool) {
        let Some(of) = self.objects.qps.get(h).map(|q| q.reach(access::REMOTE_READ)) else { return };
        let (va, rkey, len) = (p.reth.va, Rkey(p.reth.rkey), p.reth.dma_len.into());
        w.resp.push(Answer::Read { psn: Psn::new(p.psn), msn: w.resp.msn, va, rkey, len, done: 0, of, again });
    }

    fn on_read(&mut self, h: Handle<Qp>, w: &mut Wire, p: &Packet<'_>) -> Result<u32, Refusal> {
        self.check(h, w, WrOpcode::Read, p)?;
        let mtu = self.objects.qps.get(h).ok_or(Refusal::Silent)?.mtu;
        w.resp.msn = w.resp.msn.wrapping_add(1);
        self.queue_read(h, w, p, false);
        Ok(psn_count(p.reth.dma_len.into(), mtu))
    }

    /// Queues the answer to an atomic write or a flush: a READ response without payload (annex A19).
    fn queue_answer(&self, h: Handle<Qp>, w: &mut Wire, psn: Psn, again: bool) {
        let Some(of) = self.objects.qps.get(h).map(|q| q.reach(access::REMOTE_READ)) else { return };
        w.resp.push(Answer::Read { psn, msn: w.resp.msn, va: 0, rkey: Rkey(0), len: 0, done: 0, of, again });
    }

    fn on_atomic_write(&mut self, h: Handle<Qp>, w: &mut Wire, p: &Packet<'_>) -> Result<u32, Refusal> {
        let value = <[u8; 8]>::try_from(p.payload).map_err(|_| INVALID)?;
        if p.reth.dma_len != 8 {
            return Err(INVALID);
        }
        self.check(h, w, WrOpcode::AtomicWrite, p)?;
        let write = (WrOpcode::AtomicWrite, Word::Write(u64::from_ne_bytes(value)));
        self.operate(h, w, Rkey(p.reth.rkey), p.reth.va, write)?;
        w.resp.msn = w.resp.msn.wrapping_add(1);
        self.queue_answer(h, w, Psn::new(p.psn), false);
        self.objects.count(h, |c| {
            c.received_bytes += 8;
            c.wire.received_bytes += 8;
        });
        Ok(1)
    }

    fn on_flush(&mut self, h: Handle<Qp>, w: &mut Wire, p: &Packet<'_>) -> Result<u32, Refusal> {
        self.check(h, w, WrOpcode::Flush, p)?;
        w.resp.msn = w.resp.msn.wrapping_add(1);
        self.queue_answer(h, w, Psn::new(p.psn), false);
        Ok(1)
    }

    fn on_atomic(&mut self, h: Handle<Qp>, w: &mut Wire, p: &Packet<'_>) -> Result<u32, Refusal> {
        let op = if p.opcode.op == Op::CmpSwap { WrOpcode::CmpSwap } else { WrOpcode::FetchAdd };
        self.check(h, w, op, p)?;
        let a = p.atomic;
        let compare_add = if op == WrOpcode::CmpSwap { a.compare } else { a.swap_add };
        let value = self.operate(h, w, Rkey(a.rkey), a.va, (op, word_of(op, compare_add, a.swap_add)))?;
        let psn = Psn::new(p.psn);
        w.resp.msn = w.resp.msn.wrapping_add(1);
        let q = self.objects.qps.get(h).ok_or(Refusal::Silent)?;
        if w.resp.atomics.len() >= usize::from(q.attr.max_dest_rd_atomic) {
            w.resp.atomics.pop_front();
        }
        w.resp.atomics.push_back((psn, value));
        w.resp.push(Answer::Atomic { psn, msn: w.resp.msn, value, again: false });
        self.objects.count(h, |c| {
            c.received_bytes += 8;
            c.wire.received_bytes += 8;
        });
        Ok(1)
    }

    /// Gives QP `h` a turn soon, for an ACK; returns when that turn is.
    fn delay_ack(&mut self, h: Handle<Qp>) -> u64 {
        let due = self.now.saturating_add(MOMENT_NS);
        self.sched.soon(due, h);
        self.objects.count(h, |c| c.wire.ack_deferred += 1);
        due
    }

    /// Sends the ACK that waits: its QP will not have another turn.
    pub(super) fn send_last_ack(&mut self, h: Handle<Qp>, w: &mut Wire) {
        w.resp.hurry();
        if matches!(w.resp.answers.front(), Some(Answer::Ack { .. })) && !self.net.tx.is_full() {
            self.respond(h, w);
        }
    }

    /// Lets a job read some of the bytes that the oldest answer, of a READ, sends next, and that lie in the private
    /// memory of a process. Returns the fault if that is impossible; `None` if the answer waits.
    fn fetch_answer(&mut self, h: Handle<Qp>, w: &mut Wire) -> Option<Fault> {
        let Some(&Answer::Read { va, rkey, len, done, of, .. }) = w.resp.answers.front() else { return None };
        let q = self.objects.qps.get(h)?;
        let from = (Side::Remote { reach: of, qpn: q.qpn, key: rkey, addr: va }, of.session, q.vrnic);
        let bytes = (len - done).min(MAX_PAYLOAD);
        let to = (&mut w.resp.fetched, &self.objects.room(q.vrnic));
        match self.jobs.fetch(&self.objects.memory(), h, from, (FRONT, done, bytes), to) {
            JobResult::Job(_) => None,
            JobResult::Full => {
                w.resp.stall.rest(self.now, FULL_NS);
                None
            }
            JobResult::Slow => Some(Fault::SourceMoves),
            JobResult::Nothing(fault) => Some(fault),
        }
    }

    /// Sends one packet of the oldest answer. Returns its cost, or `None` if there is none, or none yet.
    pub(super) fn respond(&mut self, h: Handle<Qp>, w: &mut Wire) -> Option<u64> {
        if w.resp.missed && !w.resp.stall.holds(self.now) {
            w.resp.missed = false;
            let psn = self.objects.qps.get(h)?.rq_psn;
            w.resp.push(Answer::Nak { psn, msn: w.resp.msn, code: syndrome::NAK_SEQUENCE, fails: None });
        }
        let a = *w.resp.answers.front()?;
        if matches!(a, Answer::Read { .. }) && w.resp.stall.holds(self.now) {
            return None;
        }
        if matches!(a, Answer::Ack { .. }) && w.resp.answers.len() == 1 && self.now < w.resp.ack_due {
            return None;
        }
        let q = self.objects.qps.get(h)?;
        let (dest, transport) = (q.attr.dest_qp_num, transport_of(q.typ));
        let head = |op: Op, psn: Psn, code: u8, msn: u32| {
            let mut p = Packet::new(Opcode { transport, op, extra: Extra::None }, dest, psn.get());
            p.aeth = Aeth { syndrome: code, msn };
            p
        };
        let mut bytes = 0;
        let mut fails = None;
        match a {
            Answer::Ack { psn, msn } => {
                // End-to-end credits: the receives that are posted now.
                // No receive of a shared receive queue is promised to one QP.
                let posted = q.rings.rq_pending(q.rq_cons).ok().filter(|_| q.srq.is_none() && q.typ != QpType::XrcRecv);
                let credits = posted.map_or(NO_CREDITS, credit_code);
                self.net.tx.put(w.path, None, &head(Op::Ack, psn, credits, msn), &[]);
            }
            Answer::Nak { psn, msn, code, fails: f } => {
                fails = f;
                self.net.tx.put(w.path, None, &head(Op::Ack, psn, code, msn), &[]);
            }
            Answer::Atomic { psn, msn, value, .. } => {
                let p = Packet { original: value, ..head(Op::AtomicAck, psn, syndrome::ACK, msn) };
                self.net.tx.put(w.path, None, &p, &[]);
            }
            Answer::Read { psn, msn, va, rkey, len, done, of, again } => {
                let n = (len - done).min(q.mtu.into());
                let ends = done + n == len;
                let p = head(Op::ReadResponse(Part::of(done == 0, ends)), psn, syndrome::ACK, msn);
                let tables = self.objects.memory();
                let from = Side::Remote { reach: of, qpn: q.qpn, key: rkey, addr: va };
                bytes = n;
                let had = w.resp.fetched.bytes(FRONT, done);
                let sent = match self.net.tx.push(w.path, &p, n as usize, |to| tables.load(from, done, to, had)) {
                    Ok(()) => Ok(()),
                    Err(NeedsJob::Fault(fault)) => Err(fault),
                    Err(NeedsJob::Job) => Err(self.fetch_answer(h, w)?),
                };
                if w.resp.fetched.ends_at(FRONT, done + n) {
                    self.jobs.keep_buffer(w.resp.fetched.clear());
                }
                match sent {
                    Ok(()) if !ends => {
                        let next = Answer::Read { psn: psn.advance(1), msn, va, rkey, len, done: done + n, of, again };
                        w.resp.answers[0] = next;
                    }
                    Ok(()) => {}
                    Err(fault) if w.resp.waits(fault, self.now) => return None,
                    Err(_) => {
                        // The memory is gone since it was checked.
                        let code = syndrome::NAK_ACCESS;
                        w.resp.failed = true;
                        let event = Some(Some(AsyncEvent::QpAccessErr));
                        w.resp.answers[0] = Answer::Nak { psn, msn, code, fails: event };
                        return Some(OP_NS);
                    }
                }
                w.resp.stall.over();
                if !ends {
                    self.note_sent(h, &w.path);
                    return Some(copy_ns(n) + OP_NS);
                }
            }
        }
        w.resp.answers.pop_front();
        self.note_sent(h, &w.path);
        if let Some(event) = fails {
            self.fail_qp(h, event);
        }
        Some(copy_ns(bytes) + OP_NS)
    }
}
