//! One tag-matching SRQ: its receives, its tagged buffers, and the READs of rendezvous.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use unirdma_abi as abi;
use unirdma_driver as driver;
use unirdma_driver::SendWr;
use unirdma_formats::{QpState, QpType, WcStatus, WrOpcode, attr_mask, send_flags};

use super::list::{EAGER, Entry, FIN, Header, List, RENDEZVOUS, RVH, Rendezvous, TMH};
use super::*;
use crate::device::ContextObj;

/// Requests in a member's SQ: two for each rendezvous.
const SEND_QUEUE: u32 = 128;
/// Bits of `wr_id`: a request of this module, and among these the message that ends a rendezvous.
const SENT: u64 = 1 << 63;
const ENDING: u64 = 1 << 62;

/// Capabilities of a QP whose SQ belongs to the SRQ.
pub(crate) const MEMBER: abi::QpCap = abi::QpCap {
    max_send_wr: SEND_QUEUE,
    max_recv_wr: 0,
    max_send_sge: MAX_SGE,
    max_recv_sge: 0,
    max_inline_data: (TMH + RVH) as u32,
};

/// A receive that the program has posted.
struct Receive {
    wr_id: u64,
    sges: Vec<abi::Sge>,
}

/// A READ of a rendezvous's data from its sender.
struct Fetch {
    qpn: u32,
    entry: Entry,
    from: Rendezvous,
    /// The message that tells the sender that its buffer is free.
    fin: [u8; TMH + RVH],
}

pub(super) struct TagSrq {
    ctx: &'static ContextObj,
    srq: *const SrqObj,
    pub list: List,
    receives: HashMap<u64, Receive>,
    next: u64,
    fetches: HashMap<u64, Fetch>,
    /// Fetches that wait for room in their QP's SQ.
    waiting: VecDeque<u64>,
    pub operations_qp: driver::Qp,
    /// Completions of list operations, in order.
    pub operations: VecDeque<abi::Cqe>,
    most_operations: u32,
}

/// True if a member's completion is for a request of this module.
pub(super) fn is_sent(cqe: &abi::Cqe) -> bool {
    cqe.wr_id & SENT != 0
}

/// Makes a QP that completes each posted request: it is in the error state.
pub(super) fn operations_qp(ctx: &Arc<driver::Context>, pdn: u32, cqn: u32, most: u32) -> Result<driver::Qp, i32> {
    let qp = driver::Qp::create(
        ctx,
        &driver::QpInit {
            pdn,
            qp_type: QpType::Rc as u8,
            sig_all: true,
            send_cqn: cqn,
            recv_cqn: cqn,
            srqn: None,
            xrcdn: None,
            cap: abi::QpCap { max_send_wr: most, ..abi::QpCap::default() },
            alone: false,
        },
    )?;
    let attr = abi::QpAttr { qp_state: QpState::Err as u8, ..abi::QpAttr::default() };
    if let Err(e) = qp.modify(attr_mask::STATE, &attr) {
        let _ = qp.destroy();
        return Err(e);
    }
    Ok(qp)
}

/// Copies `len` bytes within this process. A program may have registered memory that does not exist, as for on-demand
/// paging; then nothing or only a part is copied, and the process does not crash.
fn move_bytes(from: &[libc::iovec], to: &[libc::iovec], len: usize) -> Option<()> {
    if len == 0 {
        return Some(());
    }
    let n = |v: &[libc::iovec]| v.len() as libc::c_ulong;
    // SAFETY: registered memory of the program, or this module's own; the kernel checks that it is there.
    let moved = unsafe { libc::process_vm_readv(libc::getpid(), to.as_ptr(), n(to), from.as_ptr(), n(from), 0) };
    (usize::try_from(moved) == Ok(len)).then_some(())
}

impl TagSrq {
    pub fn new(
        ctx: &'static ContextObj,
        srq: *const SrqObj,
        list: List,
        operations_qp: driver::Qp,
        most: u32,
    ) -> TagSrq {
        TagSrq {
            ctx,
            srq,
            list,
            receives: HashMap::new(),
            next: 0,
            fetches: HashMap::new(),
            waiting: VecDeque::new(),
            operations_qp,
            operations: VecDeque::new(),
            most_operations: most,
        }
    }

    fn number(&mut self) -> u64 {
        self.next = (self.next + 1) & (ENDING - 1);
        self.next
    }

    /// Posts a receive.
    pub fn post(&mut self, wr_id: u64, sges: Vec<abi::Sge>) -> Result<(), i32> {
        let n = self.number();
        // SAFETY: the SRQ takes this out of its CQ before it goes.
        unsafe { &(*self.srq).srq }.recv_batch().push(n, &sges)?;
        self.receives.insert(n, Receive { wr_id, sges });
        Ok(())
    }

    /// True if no further list operation may wait.
    pub fn is_busy(&self) -> bool {
        self.operations.len() >= self.most_operations as usize
    }

    /// Completes a list operation.
    pub fn tell(&mut self, done: abi::Cqe) -> Result<(), i32> {
        let head = abi::SqWqe { opcode: WrOpcode::Send as u8, ..abi::SqWqe::default() };
        // SAFETY: no inline data.
        unsafe { self.operations_qp.send_batch().push(&head, SendWr::Sges(&[])) }?;
        self.operations.push_back(done);
        Ok(())
    }

    fn memory(&self, s: &abi::Sge) -> Option<*mut u8> {
        // SAFETY: the SRQ lives, and its PD with it.
        let pdn = unsafe { (*(*self.srq).c.pd).handle };
        crate::mr::memory(self.ctx, pdn, s)
    }

    /// True if all of it is memory of the SRQ's PD to which messages may be written.
    pub fn can_write(&self, sges: &[abi::Sge]) -> bool {
        sges.iter().all(|s| self.memory(s).is_some())
    }

    /// The places of at most `len` bytes from `skip` on; `None` if an MR is gone.
    fn pieces(&self, sges: &[abi::Sge], mut skip: usize, mut len: usize) -> Option<Vec<libc::iovec>> {
        let mut v = Vec::with_capacity(sges.len());
        for s in sges {
            let all = s.length as usize;
            let before = skip.min(all);
            skip -= before;
            let n = (all - before).min(len);
            if n > 0 {
                v.push(libc::iovec { iov_base: self.memory(s)?.wrapping_add(before).cast(), iov_len: n });
                len -= n;
            }
        }
        Some(v)
    }

    /// Copies `len` bytes of a message, from `skip` on, to a buffer that is large enough.
    fn copy(&self, from: &[abi::Sge], skip: usize, to: &[abi::Sge], len: usize) -> Option<()> {
        move_bytes(&self.pieces(from, skip, len)?, &self.pieces(to, 0, len)?, len)
    }

    /// Handles a completed receive: a message, or an error.
    pub fn received(&mut self, cqe: &abi::Cqe) -> Done {
        let mut done = Done { cqe: *cqe, ..Done::default() };
        let Some(receive) = self.receives.remove(&cqe.wr_id) else { return done };
        done.cqe.wr_id = receive.wr_id;
        if cqe.status != 0 || cqe.opcode != WC_RECV {
            return done;
        }
        let len = cqe.byte_len as usize;
        let mut head = [0u8; TMH + RVH];
        let n = len.min(head.len());
        let to = [libc::iovec { iov_base: head.as_mut_ptr().cast(), iov_len: n }];
        if self.pieces(&receive.sges, 0, n).and_then(|from| move_bytes(&from, &to, n)).is_none() {
            return done;
        }
        let header = Header::parse(&head[..n]);
        let rendezvous = Rendezvous::parse(&head[..n]);
        match header {
            Some(h) if h.op == EAGER || h.op == RENDEZVOUS && rendezvous.is_some() => {
                done.cqe.opcode = WC_TM_RECV;
                let Some(entry) = self.list.take(h.tag) else { return done };
                (done.tag, done.app_ctx, done.cqe.wr_id) = (h.tag, h.app_ctx, entry.wr_id);
                let from = rendezvous.filter(|_| h.op == RENDEZVOUS);
                self.matched(&mut done.cqe, &receive, head, entry, from);
                // The receive buffer is free again, and takes the next message.
                let _ = self.post(receive.wr_id, receive.sges);
            }
            Some(h) if h.op == FIN => {}
            _ => done.cqe.opcode = WC_TM_NO_TAG,
        }
        done
    }

    /// Copies a message to its buffer, or, with `from`, begins to fetch its data.
    fn matched(
        &mut self,
        cqe: &mut abi::Cqe,
        receive: &Receive,
        head: [u8; TMH + RVH],
        entry: Entry,
        from: Option<Rendezvous>,
    ) {
        cqe.wc_flags |= WC_MATCH;
        let Some(from) = from else {
            let len = cqe.byte_len as usize - TMH;
            cqe.byte_len = len as u32;
            if len as u64 > entry.room() {
                cqe.status = WcStatus::LocLenErr as u8;
            } else if self.copy(&receive.sges, TMH, &entry.sges, len).is_none() {
                cqe.status = WcStatus::LocProtErr as u8;
            } else {
                cqe.wc_flags |= WC_DATA_VALID;
            }
            return;
        };
        cqe.byte_len = from.len;
        if u64::from(from.len) > entry.room() {
            // The program continues from here, so it gets the headers.
            let n = entry.room().min((TMH + RVH) as u64) as usize;
            let _ = self.copy(&receive.sges, 0, &entry.sges, n);
            cqe.status = TM_RNDV_INCOMPLETE;
            return;
        }
        let mut fin = head;
        fin[0] = FIN;
        let n = self.number();
        self.fetches.insert(n, Fetch { qpn: cqe.qp_num, entry, from, fin });
        self.waiting.push_back(n);
    }

    /// Posts the READs that wait for this QP, while there is room, each with the message that ends its rendezvous.
    pub fn fetch(&mut self, qp: &driver::Qp) {
        let fetches = &self.fetches;
        self.waiting.retain(|n| {
            let Some(f) = fetches.get(n) else { return false };
            if f.qpn != qp.qpn {
                return true;
            }
            let mut left = f.from.len;
            let mut sges = Vec::with_capacity(f.entry.sges.len());
            for s in &f.entry.sges {
                let length = s.length.min(left);
                left -= length;
                if length > 0 {
                    sges.push(abi::Sge { length, ..*s });
                }
            }
            let read = abi::SqWqe {
                wr_id: SENT | n,
                opcode: WrOpcode::Read as u8,
                send_flags: send_flags::SIGNALED,
                remote_addr: f.from.addr,
                rkey: f.from.rkey,
                ..abi::SqWqe::default()
            };
            let end = abi::SqWqe {
                wr_id: SENT | ENDING | n,
                opcode: WrOpcode::Send as u8,
                send_flags: send_flags::SIGNALED | send_flags::FENCE | send_flags::INLINE,
                ..abi::SqWqe::default()
            };
            let fin = abi::Sge { addr: f.fin.as_ptr() as u64, length: f.fin.len() as u32, lkey: 0 };
            let mut batch = qp.send_batch();
            // SAFETY: the inline data is this fetch's own.
            let pushed = unsafe {
                let first = batch.push(&read, SendWr::Sges(&sges));
                first.and_then(|()| batch.push(&end, SendWr::Inline(&[fin])))
            };
            if pushed.is_err() {
                batch.abort();
            }
            pushed.is_err()
        });
    }

    /// Handles the completion of a READ, or of the message behind it.
    pub fn sent(&mut self, cqe: &abi::Cqe) -> Option<Done> {
        if cqe.wr_id & ENDING != 0 {
            return None;
        }
        let f = self.fetches.remove(&(cqe.wr_id & !SENT))?;
        let flags = if cqe.status == 0 { WC_DATA_VALID } else { 0 };
        let cqe = abi::Cqe { wr_id: f.entry.wr_id, opcode: WC_TM_RECV, wc_flags: flags, byte_len: f.from.len, ..*cqe };
        Some(Done { cqe, ..Done::default() })
    }

    /// Called when a QP is gone or was reset: drops its fetches.
    pub fn forget(&mut self, qpn: u32) {
        self.fetches.retain(|_, f| f.qpn != qpn);
    }
}
