//! Takes receives from their queue, and completes them. The target of an XRC connection takes each receive from the SRQ
//! that the message names.

use unirdma_abi as abi;
use unirdma_formats::{AsyncEvent, QpType, WcOpcode, WcStatus, wc_flags};
use unirdma_mem::QpRings;
use zerocopy::IntoBytes;

use crate::core::Core;
use crate::objects::{Qp, Recv, Srq};
use crate::slab::Handle;

impl Core {
    /// Completes the receive that QP `ph` has taken.
    pub(crate) fn finish_recv(&mut self, ph: Handle<Qp>, d: RecvDone) {
        let placed = d.status == WcStatus::Success && !d.write;
        let staged = self.objects.finish_stage(ph, placed, d.byte_len);
        let wr_id = self.objects.end_recv(ph).unwrap_or_default();
        let Some(p) = self.objects.qps.get(ph) else { return };
        let with_imm = if d.imm.is_some() { wc_flags::WITH_IMM } else { 0 };
        let with_inv = if d.invalidated.is_some() { wc_flags::WITH_INV } else { 0 };
        let with_grh = if d.grh.is_some() { wc_flags::GRH } else { 0 };
        let cqe = abi::Cqe {
            wr_id,
            status: d.status as u8,
            opcode: if d.write { WcOpcode::RecvWriteImm } else { WcOpcode::Recv } as u8,
            wc_flags: (with_imm | with_inv | with_grh) as u16,
            byte_len: d.byte_len as u32,
            imm: d.imm.or(d.invalidated).unwrap_or(0),
            qp_num: p.qpn.0,
            src_qp: d.src_qp,
            sl: d.grh.unwrap_or(0),
            wqe_index: p.rq_cons,
            staged,
            ..abi::Cqe::default()
        };
        let (cq, whose) = (p.recv_cq, p.memory);
        let from_afar = d.datagram_from_afar || p.leaves_host();
        self.objects.count(ph, |c| {
            if d.status == WcStatus::Success {
                c.received_wrs += 1;
                c.received_bytes += d.byte_len;
                c.wire.rdma_recvs += u64::from(!d.write);
                if from_afar {
                    c.wire.received_wrs += 1;
                    c.wire.received_bytes += d.byte_len;
                }
            } else {
                c.errors += u64::from(d.status != WcStatus::WrFlushErr);
                c.failed.note(d.status);
            }
        });
        self.complete(cq, whose, cqe, d.solicited);
    }

    /// Takes the receive WQE at the head of QP `h`'s RQ or SRQ, unless the QP has one already: a message that ended
    /// early leaves its receive to the next message.
    pub(crate) fn take_recv(&mut self, h: Handle<Qp>) -> Result<(), NoRecv> {
        let p = self.objects.qps.get_mut(h).ok_or(NoRecv::Broken)?;
        let (rings, cons, max_sge) = match p.srq {
            None => (&p.rings, &mut p.rq_cons, p.cap.max_recv_sge),
            Some(_) if p.recv.is_some() => return Ok(()),
            Some(srq) => match self.objects.srqs.get_mut(srq).filter(|s| !s.broken) {
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
            Ok(_) if p.recv.is_some() => return Ok(()),
            Ok(0) => return Err(NoRecv::Empty),
            Ok(_) => {}
        }
        let mut recv = self.objects.spare.recv();
        load_recv(rings, *cons, max_sge, &mut recv);
        *cons = cons.wrapping_add(1);
        rings.set_rq_cons(*cons);
        p.recv = Some(recv);
        if let Some(srq) = p.srq {
            // The target of an XRC connection counts as a user of the SRQ while a message is under way.
            if p.typ == QpType::XrcRecv {
                self.objects.use_srq(srq, true);
            }
            self.check_srq_limit(srq);
        }
        Ok(())
    }

    /// Selects SRQ `number` for the message that begins at QP `h`: the QP uses its PD, its session, its receives and
    /// its CQ from now on. False if the QP has no such SRQ. A QP of another type uses its own receives; the initiator
    /// of an XRC connection has none, so the result for it is false too.
    pub(crate) fn select_srq(&mut self, h: Handle<Qp>, number: u32) -> bool {
        let Some(q) = self.objects.qps.get_mut(h) else { return false };
        if q.typ != QpType::XrcRecv {
            return q.typ != QpType::XrcSend;
        }
        let Some(&srq) = self.objects.srq_numbers.get(&number) else { return false };
        let Some(s) = self.objects.srqs.get(srq) else { return false };
        let Some(x) = s.xrc.filter(|x| q.xrcd.is_some_and(|own| own.1 == x.domain)) else { return false };
        let to = (s.pd, s.owner, Some(srq), x.cq);
        if q.recv.is_some() && q.srq != Some(srq) {
            // A message that ended early has left its receive, and this message uses another SRQ.
            self.finish_recv(h, RecvDone::flushed());
        }
        if let Some(q) = self.objects.qps.get_mut(h) {
            (q.pd, q.memory, q.srq, q.recv_cq) = to;
        }
        true
    }

    /// Raises the limit event of an SRQ if it is due, and disarms it.
    pub(crate) fn check_srq_limit(&mut self, srq: Handle<Srq>) {
        let Some(q) = self.objects.srqs.get_mut(srq).filter(|q| q.limit > 0 && !q.broken) else { return };
        if q.rings.rq_pending(q.cons).is_ok_and(|left| left < q.limit) {
            q.limit = 0;
            let (owner, number) = (q.owner, q.number);
            self.emit(owner, AsyncEvent::SrqLimitReached, number);
        }
    }

    /// Fails an SRQ because its index jumped. The QPs that use it fail when they take a receive.
    pub(crate) fn break_srq(&mut self, srq: Handle<Srq>) {
        let Some(q) = self.objects.srqs.get_mut(srq) else { return };
        if !std::mem::replace(&mut q.broken, true) {
            let (owner, number) = (q.owner, q.number);
            self.emit(owner, AsyncEvent::SrqErr, number);
        }
    }
}

/// How a receive ended.
#[derive(Clone, Copy)]
pub(crate) struct RecvDone {
    pub status: WcStatus,
    /// A WRITE with immediate.
    pub write: bool,
    pub imm: Option<u32>,
    /// The rkey that was invalidated.
    pub invalidated: Option<u32>,
    pub byte_len: u64,
    pub src_qp: u32,
    pub solicited: bool,
    /// For a datagram, whose header is stored before its data: the service level of the completion, which says which
    /// kind of header that is.
    pub grh: Option<u8>,
    /// True for a datagram from another host or a plain device.
    pub datagram_from_afar: bool,
}

impl RecvDone {
    /// A receive without a message.
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
            datagram_from_afar: false,
        }
    }

    /// Success of a message from the peer that `q` is connected to.
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
            datagram_from_afar: false,
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

/// Copies receive WQE `at` of a ring, and notes whether it is well-formed.
fn load_recv(rings: &QpRings, at: u32, max_sge: u32, r: &mut Recv) {
    let head = rings.rq_head(at);
    let n = head.num_sge as usize;
    let sges = r.sges.get_mut(..n).filter(|_| head.num_sge <= max_sge);
    r.valid = sges.is_some_and(|s| rings.rq_data(at, s.as_mut_bytes()));
    r.wr_id = head.wr_id;
    r.num_sge = if r.valid { n } else { 0 };
    r.total = r.sges[..r.num_sge].iter().map(|s| u64::from(s.length)).sum();
}
