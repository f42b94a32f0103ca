//! Copies WQEs from the rings, checks, completes and flushes them.

use unirdma_abi as abi;
use unirdma_formats::{QpState, QpType, WcOpcode, WcStatus, WrOpcode, send_flags};
use zerocopy::IntoBytes;

use crate::core::Core;
use crate::objects::{Qp, SendOp, Wait};
use crate::slab::Handle;

impl Core {
    /// Completes the WQE at the head of the SQ.
    pub(crate) fn retire(&mut self, h: Handle<Qp>, w: &SendOp, status: WcStatus) {
        let Some(q) = self.objects.qps.get_mut(h) else { return };
        q.sq_cons = q.sq_cons.wrapping_add(1);
        q.rings.set_sq_cons(q.sq_cons);
        let signaled = q.sig_all || w.wqe.send_flags & send_flags::SIGNALED != 0 || status != WcStatus::Success;
        let returns = w.op.stores_locally();
        let cqe = abi::Cqe {
            wr_id: w.wqe.wr_id,
            status: status as u8,
            opcode: w.op.wc() as u8,
            byte_len: if returns { w.total as u32 } else { 0 },
            qp_num: q.qpn.0,
            wqe_index: q.sq_cons,
            ..abi::Cqe::default()
        };
        let (cq, whose) = (q.send_cq, q.owner);
        let (is_send, leaves) = (w.op.is_send(), q.leaves_host());
        self.objects.count(h, |c| match status {
            WcStatus::Success => {
                c.sent_wrs += 1;
                c.sent_bytes += w.total;
                c.wire.rdma_sends += u64::from(is_send);
                if leaves {
                    c.wire.sent_wrs += 1;
                    c.wire.sent_bytes += w.total;
                }
            }
            WcStatus::WrFlushErr => {}
            _ => {
                c.errors += 1;
                c.failed.note(status);
                c.wire.retry_exceeded_err += u64::from(leaves && status == WcStatus::RetryExcErr);
            }
        });
        if signaled {
            self.complete(cq, whose, cqe, false);
        }
    }

    /// Flushes one work request of a QP in ERR (IBTA vol. 1, 10.3.1.7) or in SQE, where receives stay. False if none is
    /// left. If a rule has ended the connection, the first request flushed fails with RETRY_EXC_ERR instead, even if it
    /// is posted later.
    pub(crate) fn flush_one(&mut self, h: Handle<Qp>) -> bool {
        let Some(q) = self.objects.qps.get_mut(h) else { return false };
        let (sq, rq) = (q.rings.sq_pending(q.sq_cons), q.rings.rq_pending(q.rq_cons));
        let (Ok(sq), Ok(rq)) = (sq, rq) else {
            self.break_qp(h);
            return false;
        };
        if q.work.is_some() || sq > 0 {
            let work = q.work.take().unwrap_or_else(|| {
                let mut w = self.objects.spare.work();
                load_head(q, q.sq_cons, &mut w);
                w
            });
            let severed = q.typ.is_reliable() && std::mem::take(&mut q.denied);
            self.retire(h, &work, if severed { WcStatus::RetryExcErr } else { WcStatus::WrFlushErr });
            self.objects.spare.keep_work(work);
            return true;
        }
        if q.state == QpState::Sqe {
            return false;
        }
        let wr_id = if q.recv.is_some() {
            self.objects.unstage(h);
            self.objects.end_recv(h).unwrap_or_default()
        } else if rq > 0 {
            let head = q.rings.rq_head(q.rq_cons);
            q.rq_cons = q.rq_cons.wrapping_add(1);
            q.rings.set_rq_cons(q.rq_cons);
            head.wr_id
        } else {
            return false;
        };
        let Some(q) = self.objects.qps.get(h) else { return false };
        let cqe = abi::Cqe {
            wr_id,
            status: WcStatus::WrFlushErr as u8,
            opcode: WcOpcode::Recv as u8,
            qp_num: q.qpn.0,
            wqe_index: q.rq_cons,
            ..abi::Cqe::default()
        };
        let (cq, whose) = (q.recv_cq, q.memory);
        self.complete(cq, whose, cqe, false);
        true
    }
}

/// Copies the head of SQ WQE number `at`. False if the opcode is unknown.
fn load_head(q: &Qp, at: u32, w: &mut SendOp) -> bool {
    w.wqe = q.rings.sq_head(at);
    let op = WrOpcode::from_raw(w.wqe.opcode.into());
    w.op = op.unwrap_or(WrOpcode::Send);
    w.wait = Wait::No;
    w.started = false;
    w.served = 0;
    w.done = 0;
    w.total = 0;
    w.num_sge = 0;
    w.retries_left = q.attr.retry_cnt;
    w.rnr_left = q.attr.rnr_retry;
    w.found = None;
    w.stall.over();
    op.is_some()
}

/// Copies SQ WQE number `at` and checks its form.
pub(crate) fn load(q: &Qp, at: u32, w: &mut SendOp) -> Result<(), WcStatus> {
    if !load_head(q, at, w) {
        return Err(WcStatus::LocQpOpErr);
    }
    let op = w.op;
    let staged = w.wqe.send_flags & send_flags::STAGED != 0;
    let may_be_staged = (op.is_send() || matches!(op, WrOpcode::Write | WrOpcode::WriteImm))
        && w.wqe.send_flags & send_flags::INLINE == 0;
    let address = if q.typ == QpType::Ud { send_flags::ADDRESS } else { 0 };
    let known = send_flags::SUPPORTED | send_flags::STAGED | address;
    // A process in a guest posts to its queues itself, and must not reach the rest of the guest's memory.
    let foreign = (staged || op == WrOpcode::RegMr) && !q.by_bus;
    if w.wqe.send_flags & !known != 0 || staged && !may_be_staged || foreign || !q.typ.allows(op) {
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

/// Checks the length of atomics: 8 bytes. The local buffer of an atomic that returns a value may be larger.
fn check_length(op: WrOpcode, w: &mut SendOp) -> Result<(), WcStatus> {
    if op.is_atomic() && w.total < 8 || op == WrOpcode::AtomicWrite && w.total != 8 {
        return Err(WcStatus::LocLenErr);
    }
    if op.is_atomic() {
        w.total = 8;
    }
    Ok(())
}
