//! Work queue elements: copied from the rings and checked, completed, flushed.

use unirdma_abi as abi;
use unirdma_formats::{QpState, QpType, WcOpcode, WcStatus, WrOpcode, send_flags, wc_flags};
use unirdma_mem::QpRings;
use zerocopy::IntoBytes;

use crate::objects::{Qp, Recv, Work};
use crate::rnic::Rnic;
use crate::slab::Handle;

impl Rnic {
    /// Completes the WQE at the head of the SQ.
    pub(crate) fn retire(&mut self, h: Handle<Qp>, w: &Work, status: WcStatus) {
        let Some(q) = self.qps.get_mut(h) else { return };
        q.busy = false;
        q.sq_cons = q.sq_cons.wrapping_add(1);
        q.rings.set_sq_cons(q.sq_cons);
        let signaled = q.sig_all || w.wqe.send_flags & send_flags::SIGNALED != 0 || status != WcStatus::Success;
        let op = WrOpcode::from_raw(w.wqe.opcode.into());
        let returns = op.is_some_and(WrOpcode::stores_locally);
        let cqe = abi::Cqe {
            wr_id: w.wqe.wr_id,
            status: status as u8,
            opcode: op.map_or(0, |o| o.wc() as u8),
            byte_len: if returns { w.total as u32 } else { 0 },
            qp_num: q.qpn,
            wqe_index: q.sq_cons,
            ..abi::Cqe::default()
        };
        let (cq, whose) = (q.send_cq, q.owner);
        let is_send = op.is_some_and(WrOpcode::is_send);
        self.count(h, |c| match status {
            WcStatus::Success => {
                c.sent_wrs += 1;
                c.sent_bytes += w.total;
                c.wire.rdma_sends += u64::from(is_send);
            }
            WcStatus::WrFlushErr => {}
            _ => c.errors += 1,
        });
        if signaled {
            self.complete(cq, whose, cqe, false);
        }
    }

    /// Completes the receive that QP `ph` has under way.
    pub(crate) fn finish_recv(&mut self, ph: Handle<Qp>, d: RecvDone) {
        let placed = d.status == WcStatus::Success && !d.write;
        let staged = self.finish_stage(ph, placed, d.byte_len);
        self.set_receiving(ph, false);
        let Some(p) = self.qps.get_mut(ph) else { return };
        let with_imm = if d.imm.is_some() { wc_flags::WITH_IMM } else { 0 };
        let with_inv = if d.invalidated.is_some() { wc_flags::WITH_INV } else { 0 };
        let with_grh = if d.grh.is_some() { wc_flags::GRH } else { 0 };
        let cqe = abi::Cqe {
            wr_id: p.recv.as_ref().map_or(0, |r| r.wr_id),
            status: d.status as u8,
            opcode: if d.write { WcOpcode::RecvWriteImm } else { WcOpcode::Recv } as u8,
            wc_flags: (with_imm | with_inv | with_grh) as u16,
            byte_len: d.byte_len as u32,
            imm: d.imm.or(d.invalidated).unwrap_or(0),
            qp_num: p.qpn,
            src_qp: d.src_qp,
            sl: d.grh.unwrap_or(0),
            wqe_index: p.rq_cons,
            staged,
            ..abi::Cqe::default()
        };
        let (cq, whose) = (p.recv_cq, p.memory);
        self.count(ph, |c| {
            if d.status == WcStatus::Success {
                c.received_wrs += 1;
                c.received_bytes += d.byte_len;
                c.wire.rdma_recvs += u64::from(!d.write);
            } else {
                c.errors += u64::from(d.status != WcStatus::WrFlushErr);
            }
        });
        self.complete(cq, whose, cqe, d.solicited);
    }

    /// Takes the receive WQE at the head of QP `h`'s RQ, or of its SRQ, unless one is taken already: a message that was
    /// broken off before its end leaves its receive to the next.
    pub(crate) fn take_recv(&mut self, h: Handle<Qp>) -> Result<(), NoRecv> {
        let p = self.qps.get_mut(h).ok_or(NoRecv::Broken)?;
        let (rings, cons, max_sge) = match p.srq {
            None => (&p.rings, &mut p.rq_cons, p.cap.max_recv_sge),
            Some(_) if p.receiving => return Ok(()),
            Some(srq) => match self.srqs.get_mut(srq).filter(|s| !s.broken) {
                Some(s) => (&s.rings, &mut s.cons, s.max_sge),
                None => return Err(NoRecv::Broken),
            },
        };
        match rings.rq_pending(*cons) {
            Err(_) => {
                if let Some(srq) = p.srq {
                    self.break_srq(srq);
                }
                return Err(NoRecv::Broken);
            }
            Ok(_) if p.receiving => return Ok(()),
            Ok(0) => return Err(NoRecv::Empty),
            Ok(_) => {}
        }
        let recv = p.recv.as_mut().ok_or(NoRecv::Broken)?;
        load_recv(rings, *cons, max_sge, recv);
        *cons = cons.wrapping_add(1);
        rings.set_rq_cons(*cons);
        let srq = p.srq;
        self.set_receiving(h, true);
        if let Some(srq) = srq {
            self.check_srq_limit(srq);
        }
        Ok(())
    }

    /// QP `h` has taken a receive, or is done with it. The target of an XRC connection uses its SRQ for so long.
    pub(crate) fn set_receiving(&mut self, h: Handle<Qp>, receiving: bool) {
        let Some(q) = self.qps.get_mut(h) else { return };
        let changed = std::mem::replace(&mut q.receiving, receiving) != receiving;
        if let Some(srq) = q.srq.filter(|_| changed && q.typ == QpType::XrcRecv) {
            self.use_srq(srq, receiving);
        }
    }

    /// Flushes one work request of a QP in ERR (IBTA vol. 1, 10.3.1.7), or in SQE, where receives stay; false if none is
    /// left.
    pub(crate) fn flush_one(&mut self, h: Handle<Qp>) -> bool {
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
        if q.state == QpState::Sqe {
            return false;
        }
        let wr_id = if q.receiving {
            self.set_receiving(h, false);
            self.unstage(h);
            self.qps.get(h).and_then(|q| q.recv.as_ref()).map_or(0, |r| r.wr_id)
        } else if rq > 0 {
            let head = q.rings.rq_head(q.rq_cons);
            q.rq_cons = q.rq_cons.wrapping_add(1);
            q.rings.set_rq_cons(q.rq_cons);
            head.wr_id
        } else {
            return false;
        };
        let Some(q) = self.qps.get(h) else { return false };
        let cqe = abi::Cqe {
            wr_id,
            status: WcStatus::WrFlushErr as u8,
            opcode: WcOpcode::Recv as u8,
            qp_num: q.qpn,
            wqe_index: q.rq_cons,
            ..abi::Cqe::default()
        };
        let (cq, whose) = (q.recv_cq, q.memory);
        self.complete(cq, whose, cqe, false);
        true
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
    w.found = None;
    w.stall.over();
    let op = WrOpcode::from_raw(w.wqe.opcode.into()).ok_or(WcStatus::LocQpOpErr)?;
    let staged = w.wqe.send_flags & send_flags::STAGED != 0;
    let may_be_staged = (op.is_send() || matches!(op, WrOpcode::Write | WrOpcode::WriteImm))
        && w.wqe.send_flags & send_flags::INLINE == 0;
    let known = send_flags::SUPPORTED | send_flags::STAGED;
    if w.wqe.send_flags & !known != 0 || staged && !may_be_staged || !q.typ.allows(op) {
        return Err(WcStatus::LocQpOpErr);
    }
    if w.wqe.send_flags & send_flags::INLINE != 0 {
        let n = usize::from(w.wqe.inline_len);
        let may = !op.stores_locally() && !op.is_local() && op != WrOpcode::Flush;
        let most = op.inline_bytes(q.cap.max_inline_data);
        let data = w.inline.get_mut(..n).filter(|_| may && n as u32 <= most);
        if !data.is_some_and(|d| q.rings.sq_data(at, d)) {
            return Err(WcStatus::LocQpOpErr);
        }
        w.total = n as u64;
        return check_length(op, w);
    }
    let n = usize::from(w.wqe.num_sge);
    let sges = w.sges.get_mut(..n).filter(|_| n as u32 <= q.cap.max_send_sge);
    if !sges.is_some_and(|s| q.rings.sq_data(at, s.as_mut_bytes())) {
        return Err(WcStatus::LocQpOpErr);
    }
    w.num_sge = n;
    w.total = w.sges[..n].iter().map(|s| u64::from(s.length)).sum();
    if op.is_local() || op == WrOpcode::Flush {
        (w.num_sge, w.total) = (0, 0);
    }
    check_length(op, w)
}

/// Atomics are of 8 bytes; those that fetch may have more room.
fn check_length(op: WrOpcode, w: &mut Work) -> Result<(), WcStatus> {
    if op.is_atomic() && w.total < 8 || op == WrOpcode::AtomicWrite && w.total != 8 {
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
    /// The rkey whose grant it took back.
    pub invalidated: Option<u32>,
    pub byte_len: u64,
    pub src_qp: u32,
    pub solicited: bool,
    /// A datagram, its header before the data: the service level that tells the header's kind.
    pub grh: Option<u8>,
}

impl RecvDone {
    /// It got no message.
    pub fn flushed() -> Self {
        RecvDone {
            status: WcStatus::WrFlushErr,
            write: false,
            imm: None,
            invalidated: None,
            byte_len: 0,
            src_qp: 0,
            solicited: false,
            grh: None,
        }
    }

    /// Success, for a message from the QP that `q` is connected to.
    pub fn of(q: &Qp) -> Self {
        RecvDone {
            status: WcStatus::Success,
            write: false,
            imm: None,
            invalidated: None,
            byte_len: 0,
            src_qp: q.attr.dest_qp_num,
            solicited: false,
            grh: None,
        }
    }
}

/// Why there is no receive.
pub(crate) enum NoRecv {
    /// None is posted.
    Empty,
    /// The ring's index jumped.
    Broken,
}

/// Copies receive WQE `at` of a ring and notes whether it is well-formed.
fn load_recv(rings: &QpRings, at: u32, max_sge: u32, r: &mut Recv) {
    let head = rings.rq_head(at);
    let n = head.num_sge as usize;
    let sges = r.sges.get_mut(..n).filter(|_| head.num_sge <= max_sge);
    r.valid = sges.is_some_and(|s| rings.rq_data(at, s.as_mut_bytes()));
    r.wr_id = head.wr_id;
    r.num_sge = if r.valid { n } else { 0 };
    r.total = r.sges[..r.num_sge].iter().map(|s| u64::from(s.length)).sum();
}
