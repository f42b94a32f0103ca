//! Requester and completer: work requests to packets, answers to completions (IBTA vol. 1, 9.7.2 to 9.7.6, 9.9.2).

use unirdma_formats::wire::{Aeth, AtomicEth, Extra, Op, Opcode, Packet, Part, Reth, syndrome};
use unirdma_formats::{Psn, QpState, WcStatus, WrOpcode, ack_timeout_ns, credits, psn_count, rnr_timer_ns, send_flags};
use unirdma_mem::Fault;

use super::deferred_packets::FULL_NS;
use crate::access::{NeedsJob, local_side};
use crate::core::{Core, OP_NS, copy_ns};
use crate::exec::{load, status_of_nak};
use crate::job::{JobResult, MAX_PAYLOAD};
use crate::objects::{Flight, PacketRun, Qp, SendOp, Wire, transport_of};
use crate::slab::Handle;

/// Most WQEs of one QP that are under way at once.
const MAX_FLIGHT: usize = 256;
/// A READ is split into requests of this many packets, each a READ of its own to the responder, so that the window
/// limits responses, too.
pub(crate) const READ_PACKETS: u32 = 32;
/// Within a message, every packet at a multiple of this number asks for an ACK. On an unreliable connection, the
/// packets with every 16th PSN ask the peer's host to report the packets that it has taken.
const ACK_EVERY: u32 = 16;
/// On an unreliable connection, packets count as lost unless the peer's host reports them as taken within this time,
/// ns.
const TAKEN_WITHIN_NS: u64 = 50_000_000;

/// Packet `index` of the `packets` of request `w`, without its payload, and the length of the payload. A READ asks for
/// `span` packets from there on.
pub(crate) fn request_packet(
    q: &Qp,
    w: &SendOp,
    psn: Psn,
    index: u32,
    packets: u32,
    span: u32,
) -> (Packet<'static>, usize) {
    let op = w.op;
    let ends = index + span == packets;
    let part = Part::of(index == 0, ends);
    let wqe = &w.wqe;
    let kind = match op {
        WrOpcode::Send | WrOpcode::SendImm | WrOpcode::SendInv => Op::Send(part),
        // These are never sent, so the value does not matter.
        WrOpcode::LocalInv | WrOpcode::BindMw | WrOpcode::RegMr => Op::Send(part),
        WrOpcode::Write | WrOpcode::WriteImm => Op::Write(part),
        WrOpcode::Read => Op::ReadRequest,
        WrOpcode::CmpSwap => Op::CmpSwap,
        WrOpcode::FetchAdd => Op::FetchAdd,
        WrOpcode::AtomicWrite => Op::AtomicWrite,
        WrOpcode::Flush => Op::Flush,
    };
    let transport = transport_of(q.typ);
    let extra = match op {
        _ if !ends => Extra::None,
        WrOpcode::SendInv => Extra::Invalidate,
        _ if op.has_imm() => Extra::Imm,
        _ => Extra::None,
    };
    let mut head = Packet::new(Opcode { transport, op: kind, extra }, q.attr.dest_qp_num, psn.get());
    (head.extra, head.flush, head.srqn) = (wqe.imm, wqe.imm, wqe.dest_qpn);
    head.solicited = ends && op.consumes_recv() && wqe.send_flags & send_flags::SOLICITED != 0;
    let mtu = u64::from(q.mtu);
    let off = u64::from(index) * mtu;
    let left = w.total - off.min(w.total);
    head.reth = match op {
        WrOpcode::Read => {
            let len = left.min(u64::from(span) * mtu);
            Reth { va: wqe.remote_addr.wrapping_add(off), rkey: wqe.rkey, dma_len: len as u32 }
        }
        WrOpcode::Flush => Reth { va: wqe.remote_addr, rkey: wqe.rkey, dma_len: wqe.compare_add as u32 },
        _ => Reth { va: wqe.remote_addr, rkey: wqe.rkey, dma_len: w.total as u32 },
    };
    let (swap_add, compare) = if op == WrOpcode::CmpSwap { (wqe.swap, wqe.compare_add) } else { (wqe.compare_add, 0) };
    head.atomic = AtomicEth { va: wqe.remote_addr, rkey: wqe.rkey, swap_add, compare };
    (head, if op.stores_locally() { 0 } else { left.min(mtu) as usize })
}

impl Core {
    /// Sends one packet, or takes one WQE. Returns its cost, or `None` if there is nothing to do now.
    pub(super) fn request(&mut self, h: Handle<Qp>, w: &mut Wire) -> Option<u64> {
        if w.rnr_until > self.now {
            return None;
        }
        if w.cursor == w.flight.len() && !self.admit(h, w) {
            return None;
        }
        let i = w.cursor;
        if w.flight.get(i)?.work.stall.holds(self.now) {
            return None;
        }
        if !self.may_send(h) {
            return None;
        }
        let q = self.objects.qps.get(h)?;
        let f = w.flight.get(i)?;
        let op = f.work.op;
        match f.status {
            // It was registered before. The requests before it are being sent again.
            Some(WcStatus::Success) => {
                w.cursor += 1;
                return Some(OP_NS);
            }
            // Everything before it must be answered first.
            Some(_) => return if i == 0 { self.fail_head(h, w) } else { None },
            None if op == WrOpcode::RegMr => return self.register_at(h, w, i),
            // It has its turn when everything before it is answered.
            None if op.is_local() => return if i == 0 { self.local_head(h, w) } else { None },
            None => {}
        }
        let f = w.flight.get(i)?;
        let index = w.next.since(f.first);
        let off = u64::from(index) * u64::from(q.mtu);
        let begins = index == 0;
        if begins && f.work.wqe.send_flags & send_flags::FENCE != 0 && !w.reads.is_empty() {
            return None;
        }
        // The PSNs that this packet uses: a READ request uses the PSNs of its responses.
        let span = if op == WrOpcode::Read { (READ_PACKETS - index % READ_PACKETS).min(f.packets - index) } else { 1 };
        let outstanding = w.next.since(w.una);
        if outstanding != 0 && outstanding + span > w.cc.packets {
            return None;
        }
        let unanswered = !q.typ.is_reliable();
        let held_back = unanswered && w.is_held_back();
        let untaken = w.next.since(w.taken);
        if held_back && untaken >= w.cc.packets {
            w.deadline = w.deadline.min(self.now + TAKEN_WITHIN_NS);
            return None;
        }
        // Without a credit only one message at a time is sent.
        if begins && op.consumes_recv() && outstanding != 0 && w.lacks_credit(f.ssn) {
            return None;
        }
        if op.returns_data() && w.reads.len() >= usize::from(q.attr.max_rd_atomic) {
            return None;
        }
        let ends = index + span == f.packets;
        let (mut head, len) = request_packet(q, &f.work, w.next, index, f.packets, span);
        let full = outstanding + span + 1 >= w.cc.packets;
        head.ack_req = match unanswered {
            false => ends || full || index % ACK_EVERY == ACK_EVERY - 1,
            true => w.path.is_ours() && (untaken + 1 >= w.cc.packets || w.next.get() % ACK_EVERY == ACK_EVERY - 1),
        };
        let tables = self.objects.memory();
        let local = local_side(q, &f.work);
        let number = q.sq_cons.wrapping_add(i as u32);
        let had = w.fetched.bytes(number, off);
        if let Err(miss) = self.net.tx.push(w.path, &head, len, |to| tables.load(local, off, to, had)) {
            let fault = match miss {
                NeedsJob::Fault(fault) => fault,
                NeedsJob::Job => self.fetch_payload(h, w, number, off)?,
            };
            return self.lacks_payload(w, fault);
        }
        w.flight[i].work.stall.over();
        if w.fetched.ends_at(number, off + len as u64) {
            self.jobs.keep_buffer(w.fetched.clear());
        }
        self.note_sent(h, &w.path);
        let again = w.next.is_before(w.high);
        w.next = w.next.advance(span);
        if !again {
            w.high = w.next;
        }
        if ends {
            w.cursor += 1;
        }
        if op.returns_data() {
            w.reads.push_back(w.next);
        }
        if unanswered {
            self.advance(h, w, w.next);
            if !held_back {
                w.taken = w.next;
                w.cc.grow(1);
                if w.cc.adapts {
                    self.spread(h, w.cc.packets);
                }
            }
        } else if w.deadline == u64::MAX {
            w.deadline = self.deadline(h);
        }
        if again {
            self.objects.count(h, |c| c.wire.retransmitted_pkts += 1);
        }
        self.has_sent(h, u64::from(begins && !again), len as u64);
        Some(copy_ns(len as u64) + OP_NS)
    }

    /// The payload of the request at the cursor lies in the private memory of a process, from byte `off` of its message
    /// on. Lets a job read as much of it as may be sent now. Returns the fault if that is impossible; `None` if the
    /// request waits.
    fn fetch_payload(&mut self, h: Handle<Qp>, w: &mut Wire, number: u32, off: u64) -> Option<Fault> {
        let (q, f) = (self.objects.qps.get(h)?, w.flight.get_mut(w.cursor)?);
        let may_be_sent = w.cc.packets.saturating_sub(w.next.since(w.una)).max(1);
        let bytes = (f.work.total - off).min(u64::from(may_be_sent) * u64::from(q.mtu)).min(MAX_PAYLOAD);
        let from = (local_side(q, &f.work), q.memory, q.vrnic);
        let to = (&mut w.fetched, &self.objects.room(q.vrnic));
        match self.jobs.fetch(&self.objects.memory(), h, from, (number, off, bytes), to) {
            JobResult::Job(_) => None,
            JobResult::Full => {
                f.work.stall.rest(self.now, FULL_NS);
                None
            }
            JobResult::Slow => Some(Fault::SourceMoves),
            JobResult::Nothing(fault) => Some(fault),
        }
    }

    /// The payload of the request at the cursor could not be read: the request is tried again in a moment, or fails.
    fn lacks_payload(&mut self, w: &mut Wire, fault: Fault) -> Option<u64> {
        let f = w.flight.get_mut(w.cursor)?;
        if fault.passes() && f.work.stall.again(self.now).is_some() {
            return None;
        }
        // The memory is gone since the request was checked.
        f.status = Some(WcStatus::LocProtErr);
        Some(OP_NS)
    }

    fn deadline(&self, h: Handle<Qp>) -> u64 {
        let code = self.objects.qps.get(h).map_or(0, |q| q.attr.timeout);
        ack_timeout_ns(code).map_or(u64::MAX, |ns| self.now.saturating_add(ns))
    }

    /// Takes the next WQE of the SQ and gives it its PSNs; false if there is none or none may be taken.
    fn admit(&mut self, h: Handle<Qp>, w: &mut Wire) -> bool {
        let Some(q) = self.objects.qps.get(h) else { return false };
        if q.state != QpState::Rts || w.flight.len() >= MAX_FLIGHT {
            return false;
        }
        let at = q.sq_cons.wrapping_add(w.flight.len() as u32);
        match q.rings.sq_pending(q.sq_cons) {
            Ok(n) if n as usize > w.flight.len() => {}
            Ok(_) => return false,
            Err(_) => {
                self.break_qp(h);
                return false;
            }
        }
        let vrnic = q.vrnic;
        if !w.copies.may_grow(w.flight.len(), || self.objects.copies_room(vrnic)) {
            return false;
        }
        let mut work = self.objects.spare.work();
        let mut status = load(q, at, &mut work).err();
        let op = work.op;
        let Some(q) = self.objects.qps.get(h) else { return false };
        if status.is_none() {
            status = self.check_local(q, &work).err();
        }
        let sends = status.is_none() && !op.is_local();
        let packets = if sends { psn_count(work.total, q.mtu) } else { 0 };
        let Some(q) = self.objects.qps.get_mut(h) else { return false };
        if w.flight.is_empty() {
            (w.retries_left, w.rnr_left) = (q.attr.retry_cnt, q.attr.rnr_retry);
        }
        let first = q.sq_psn;
        q.sq_psn = q.sq_psn.advance(packets);
        let ssn = w.ssn;
        let messages = if op == WrOpcode::Read { packets.div_ceil(READ_PACKETS) } else { packets.min(1) };
        w.ssn = w.ssn.wrapping_add(messages);
        w.flight.push_back(Flight { work, first, packets, ssn, status });
        true
    }

    /// Executes the REG_MR at this place of the flight. It need not wait for earlier requests, because the MR is free;
    /// only its completion waits for them.
    fn register_at(&mut self, h: Handle<Qp>, w: &mut Wire, i: usize) -> Option<u64> {
        let f = w.flight.get_mut(i)?;
        f.status = Some(self.objects.execute_local(h, &f.work).err().unwrap_or(WcStatus::Success));
        if f.status == Some(WcStatus::Success) {
            w.cursor += 1;
            self.retire_answered(h, w);
        }
        Some(OP_NS)
    }

    /// Executes the request at the head, of which nothing is sent.
    fn local_head(&mut self, h: Handle<Qp>, w: &mut Wire) -> Option<u64> {
        let f = w.flight.front_mut()?;
        match self.execute_local(h, &f.work) {
            Err(status) => {
                f.status = Some(status);
                return self.fail_head(h, w);
            }
            Ok(false) => {
                f.work.stall.rest(self.now, FULL_NS);
                return None;
            }
            Ok(true) => {}
        }
        let f = w.pop_flight()?;
        w.cursor = w.cursor.saturating_sub(1);
        self.retire(h, &f.work, WcStatus::Success);
        self.objects.spare.keep_work(f.work);
        Some(OP_NS)
    }

    /// The WQE at the head failed before it was sent.
    fn fail_head(&mut self, h: Handle<Qp>, w: &mut Wire) -> Option<u64> {
        let f = w.pop_flight()?;
        self.retire(h, &f.work, f.status.unwrap_or(WcStatus::FatalErr));
        self.objects.spare.keep_work(f.work);
        self.fail_requester(h);
        None
    }

    /// The request at the head failed at the responder, or was never answered.
    fn fail_request(&mut self, h: Handle<Qp>, w: &mut Wire, status: WcStatus) {
        if let Some(f) = w.flight.front_mut() {
            f.status = Some(status);
        }
        self.fail_head(h, w);
    }

    /// Everything before `to` is answered.
    fn answered(&mut self, h: Handle<Qp>, w: &mut Wire, to: Psn) {
        w.cc.grow(to.since(w.una));
        self.advance(h, w, to);
    }

    /// Packets before `to` are not waited for any more.
    fn advance(&mut self, h: Handle<Qp>, w: &mut Wire, to: Psn) {
        let n = to.since(w.una);
        if n == 0 {
            return;
        }
        w.una = to;
        w.recovering = false;
        if w.next.is_before(to) {
            w.next = to;
        }
        while w.reads.front().is_some_and(|&end| !to.is_before(end)) {
            w.reads.pop_front();
        }
        self.retire_answered(h, w);
        if w.next == to {
            // If the cursor stood further back, it skips requests that were answered meanwhile.
            w.cursor = w.find(to).unwrap_or(w.flight.iter().take_while(|f| f.packets > 0).count());
        }
        w.deadline = if w.una == w.high { u64::MAX } else { self.deadline(h) };
        if let Some(q) = self.objects.qps.get(h) {
            (w.retries_left, w.rnr_left) = (q.attr.retry_cnt, q.attr.rnr_retry);
        }
    }

    /// Completes the requests at the head whose packets are answered, and the REG_MRs there that were executed.
    fn retire_answered(&mut self, h: Handle<Qp>, w: &mut Wire) {
        let una = w.una;
        let done = |f: &Flight| f.status == Some(WcStatus::Success) || f.packets > 0 && !una.is_before(f.end());
        while w.flight.front().is_some_and(done) {
            let Some(f) = w.pop_flight() else { break };
            w.cursor = w.cursor.saturating_sub(1);
            self.retire(h, &f.work, WcStatus::Success);
            self.objects.spare.keep_work(f.work);
        }
    }

    /// Answers before `to` are implied; true if that is so, false if data of a READ or atomic is missing before it,
    /// which is then asked for again (IBTA vol. 1, 9.7.5.1.4).
    fn advance_to(&mut self, h: Handle<Qp>, w: &mut Wire, to: Psn) -> bool {
        let limit = w.data_limit(to);
        self.answered(h, w, limit);
        if limit != to && !w.recovering {
            w.recovering = true;
            w.cc.cut(w.una, w.high);
            w.go_back(limit);
            self.objects.count(h, |c| {
                c.wire.implied_nak += 1;
                c.wire.completer_retry_err += 1;
            });
        }
        limit == to
    }

    /// An ACK, NAK, READ response or atomic response.
    pub(super) fn on_response(&mut self, h: Handle<Qp>, w: &mut Wire, run: PacketRun<'_>) {
        let p = run.first;
        let psn = Psn::new(p.psn);
        // An answer to a packet that was answered before, or never sent, means nothing.
        if psn.since(w.una) >= w.high.since(w.una) {
            return;
        }
        match p.opcode.op {
            Op::ReadResponse(_) | Op::AtomicAck => self.on_data(h, w, psn, run),
            _ => self.on_ack(h, w, psn, p.aeth),
        }
    }

    fn on_ack(&mut self, h: Handle<Qp>, w: &mut Wire, psn: Psn, Aeth { syndrome: code, msn }: Aeth) {
        match code >> 5 {
            0 => {
                w.credit_limit = credits(code).map(|c| msn.wrapping_add(c));
                self.advance_to(h, w, psn.advance(1));
            }
            1 => {
                if !self.advance_to(h, w, psn) {
                    return;
                }
                self.objects.count(h, |c| c.wire.rcvd_rnr_err += 1);
                if w.rnr_left == 0 {
                    self.objects.count(h, |c| c.wire.retry_rnr_exceeded_err += 1);
                    return self.fail_request(h, w, WcStatus::RnrRetryExcErr);
                }
                if w.rnr_left < 7 {
                    w.rnr_left -= 1;
                }
                w.rnr_until = self.now.saturating_add(rnr_timer_ns(code & 0x1f));
                w.deadline = u64::MAX;
                w.go_back(psn);
                self.objects.count(h, |c| c.rnr_waits += 1);
            }
            3 => {
                if !self.advance_to(h, w, psn) {
                    return;
                }
                let status = match code {
                    syndrome::NAK_SEQUENCE => {
                        self.objects.count(h, |c| c.wire.rcvd_seq_err += 1);
                        w.cc.cut(w.una, w.high);
                        w.go_back(psn);
                        return;
                    }
                    code => status_of_nak(code),
                };
                if let Some(status) = status {
                    self.fail_request(h, w, status);
                }
            }
            // A reserved syndrome is ignored.
            _ => {}
        }
    }

    /// Data of a READ or atomic. It must be the next data that is missing.
    fn on_data(&mut self, h: Handle<Qp>, w: &mut Wire, psn: Psn, run: PacketRun<'_>) {
        let p = run.first;
        if !self.advance_to(h, w, psn) {
            return;
        }
        let Some(f) = w.flight.front().filter(|f| f.packets > 0 && psn.since(f.first) < f.packets) else { return };
        let op = f.work.op;
        let Some(q) = self.objects.qps.get(h) else { return };
        let off = u64::from(psn.since(f.first)) * u64::from(q.mtu);
        let original = p.original.to_ne_bytes();
        let (data, want): (&[u8], u64) = match (op, p.opcode.op) {
            (WrOpcode::Read, Op::ReadResponse(_)) => (p.payload, (f.work.total - off).min(q.mtu.into())),
            (WrOpcode::CmpSwap | WrOpcode::FetchAdd, Op::AtomicAck) => (&original, 8),
            // The answer is a READ response without payload (annex A19).
            (WrOpcode::AtomicWrite | WrOpcode::Flush, Op::ReadResponse(_)) => (p.payload, 0),
            // A response of the wrong kind (IBTA vol. 1, 9.9.2.2): the responder is broken.
            _ => return self.fail_request(h, w, WcStatus::BadRespErr),
        };
        if data.len() as u64 != want {
            return self.fail_request(h, w, WcStatus::BadRespErr);
        }
        let (tables, to) = (self.objects.memory(), local_side(q, &f.work));
        let stored = match w.inbox.known() {
            Some(done) => done.map(|_| ()).map_err(NeedsJob::Fault),
            None => tables.store(to, off, data),
        };
        let stored = match stored {
            Ok(()) => Ok(()),
            Err(NeedsJob::Fault(fault)) => Err(fault),
            Err(NeedsJob::Job) => {
                let (bytes, packets) = if op == WrOpcode::Read { run.within(f.work.total - off) } else { (data, 1) };
                match self.jobs.store(&tables, h, (to, q.memory, q.vrnic), off, &[bytes]) {
                    JobResult::Job(number) => return w.inbox.wait(number, packets),
                    JobResult::Full | JobResult::Slow => Err(Fault::DestinationMoves),
                    JobResult::Nothing(fault) => Err(fault),
                }
            }
        };
        let Some(f) = w.flight.front_mut() else { return };
        match stored {
            Ok(()) => {
                f.work.stall.over();
                self.answered(h, w, psn.advance(1));
            }
            Err(fault) if fault.passes() && f.work.stall.again(self.now).is_some() => {
                // The response is treated as lost, and is asked for again when the memory can be reached. This counts
                // as no timeout.
                w.recovering = true;
                w.go_back(psn);
                w.deadline = u64::MAX;
            }
            Err(_) => self.fail_request(h, w, WcStatus::LocProtErr),
        }
    }

    /// The oldest packet got no answer in time (IBTA vol. 1, 9.9.2.1.1).
    pub(super) fn on_timeout(&mut self, h: Handle<Qp>, w: &mut Wire) {
        if self.objects.qps.get(h).is_some_and(|q| !q.typ.is_reliable()) {
            return w.is_unheard();
        }
        if w.una == w.high {
            w.deadline = u64::MAX;
            return;
        }
        if !w.inbox.is_empty() {
            // The peer has answered; its answer waits for a job.
            w.deadline = self.deadline(h);
            return;
        }
        self.objects.count(h, |c| {
            c.timeouts += 1;
            c.wire.completer_retry_err += 1;
        });
        if w.retries_left == 0 {
            return self.fail_request(h, w, WcStatus::RetryExcErr);
        }
        w.retries_left -= 1;
        w.recovering = false;
        w.cc.cut(w.una, w.high);
        w.go_back(w.una);
        w.deadline = self.deadline(h);
    }
}
