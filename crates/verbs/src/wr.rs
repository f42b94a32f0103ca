//! The extended post interface (`ibv_create_qp_ex(3)`, `ibv_wr_post(3)`): requests built call by call.

use std::ffi::c_void;

use unirdma_abi as abi;
use unirdma_driver::{SendBatch, SendWr};
use unirdma_formats::{QpType, WrOpcode, send_flags};
use unirdma_verbs_abi::*;

use crate::mw::bind_request;
use crate::null;
use crate::qp::{QpObj, create};
use crate::trace::trace;
use crate::xrcd::handle_of;

const MASK_PD: u32 = 1;
const MASK_XRCD: u32 = 1 << 1;
const MASK_CREATE_FLAGS: u32 = 1 << 2;
const MASK_SEND_OPS: u32 = 1 << 6;

/// Bits of `enum ibv_qp_create_send_ops_flags`, and the opcodes that they stand for.
const OPS: [(u32, WrOpcode); 12] = [
    (0, WrOpcode::Write),
    (1, WrOpcode::WriteImm),
    (2, WrOpcode::Send),
    (3, WrOpcode::SendImm),
    (4, WrOpcode::Read),
    (5, WrOpcode::CmpSwap),
    (6, WrOpcode::FetchAdd),
    (7, WrOpcode::LocalInv),
    (8, WrOpcode::BindMw),
    (9, WrOpcode::SendInv),
    (11, WrOpcode::Flush),
    (12, WrOpcode::AtomicWrite),
];

/// Requests between `ibv_wr_start` and `ibv_wr_complete`. The lock of the SQ is held by `batch` meanwhile, so that one
/// thread has it all.
pub(crate) struct Builder {
    batch: Option<SendBatch<'static>>,
    /// The request whose setters are being called.
    head: Option<abi::SqWqe>,
    sges: [abi::Sge; abi::MAX_SGE as usize],
    num_sge: usize,
    inline: [u8; abi::MAX_INLINE as usize],
    error: i32,
}

impl Builder {
    fn new() -> Box<Self> {
        Box::new(Builder {
            batch: None,
            head: None,
            sges: [abi::Sge::default(); abi::MAX_SGE as usize],
            num_sge: 0,
            inline: [0; abi::MAX_INLINE as usize],
            error: 0,
        })
    }

    fn fail(&mut self, e: i32) {
        if self.error == 0 {
            self.error = e;
        }
    }

    /// Writes the request under construction into the SQ.
    fn flush(&mut self) {
        let (Some(head), Some(batch)) = (self.head.take(), &mut self.batch) else { return };
        let n = usize::from(head.inline_len);
        let piece = [abi::Sge { addr: self.inline.as_ptr() as u64, length: n as u32, lkey: 0 }];
        let data = if head.send_flags & send_flags::INLINE != 0 {
            SendWr::Inline(&piece)
        } else {
            SendWr::Sges(&self.sges[..self.num_sge])
        };
        // SAFETY: inline data lies in this object.
        let pushed = unsafe { batch.push(&head, data) };
        if let Err(e) = pushed {
            self.fail(e);
        }
    }
}

/// The builder of an extended QP.
///
/// # Safety
/// `qp` was created with send operations, and only the thread between `wr_start` and `wr_complete` calls this.
unsafe fn builder<'a>(qp: *mut ibv_qp_ex) -> &'a mut Builder {
    // SAFETY: by the contract; a QP with these functions has a builder.
    unsafe { (*qp.cast::<QpObj>()).builder.as_mut().unwrap_unchecked() }
}

pub(crate) unsafe extern "C" fn create_qp_ex(c: *mut ibv_context, init: *mut ibv_qp_init_attr_ex) -> *mut ibv_qp {
    // SAFETY: the caller passes its context and attributes.
    let a = unsafe { &mut *init };
    trace!("ibv_create_qp_ex(comp_mask {:#x})", a.comp_mask);
    let known = MASK_PD | MASK_XRCD | MASK_CREATE_FLAGS | MASK_SEND_OPS;
    if a.comp_mask & !known != 0 || a.comp_mask & MASK_CREATE_FLAGS != 0 && a.create_flags != 0 {
        return null(libc::EOPNOTSUPP);
    }
    // SAFETY: a domain of the caller, if there is one.
    let xrcdn = if a.comp_mask & MASK_XRCD != 0 { unsafe { handle_of(a.xrcd) } } else { None };
    let target = QpType::from_raw(a.qp_type) == Some(QpType::XrcRecv);
    // SAFETY: a PD of the caller, if there is one.
    if !target && (a.comp_mask & MASK_PD == 0 || a.pd.is_null() || unsafe { (*a.pd).context } != c) {
        return null(libc::EINVAL);
    }
    let pd = if target { std::ptr::null_mut() } else { a.pd };
    let mut made_for = None;
    if a.comp_mask & MASK_SEND_OPS != 0 {
        let typ = QpType::from_raw(a.qp_type);
        let offered = |op: WrOpcode| typ.is_some_and(|t| t.allows(op));
        let bits = OPS.iter().filter(|o| offered(o.1)).fold(0u64, |m, o| m | 1 << o.0);
        if a.send_ops_flags & !bits != 0 {
            return null(libc::EOPNOTSUPP);
        }
        made_for = Some(Builder::new());
    }
    let mut plain = ibv_qp_init_attr {
        qp_context: a.qp_context,
        send_cq: a.send_cq,
        recv_cq: a.recv_cq,
        srq: a.srq,
        cap: a.cap,
        qp_type: a.qp_type,
        sq_sig_all: a.sq_sig_all,
    };
    // SAFETY: as ibv_create_qp_ex(3) demands.
    let qp = unsafe { create(c, pd, &mut plain, xrcdn, made_for) };
    a.cap = plain.cap;
    qp
}

/// The extended interface of a QP that was created for it; else NULL.
pub unsafe extern "C" fn x_ibv_qp_to_qp_ex(qp: *mut ibv_qp) -> *mut ibv_qp_ex {
    // SAFETY: the caller passes its QP.
    if unsafe { (*qp.cast::<QpObj>()).builder.is_some() } { qp.cast() } else { std::ptr::null_mut() }
}

/// Puts the functions into a QP.
pub(crate) fn fill(x: &mut ibv_qp_ex) {
    x.wr_atomic_cmp_swp = Some(atomic_cmp_swp);
    x.wr_atomic_fetch_add = Some(atomic_fetch_add);
    x.wr_atomic_write = Some(atomic_write);
    x.wr_flush = Some(flush);
    x.wr_bind_mw = Some(bind_mw);
    x.wr_local_inv = Some(local_inv);
    x.wr_send_inv = Some(send_inv);
    x.wr_rdma_read = Some(rdma_read);
    x.wr_rdma_write = Some(rdma_write);
    x.wr_rdma_write_imm = Some(rdma_write_imm);
    x.wr_send = Some(send);
    x.wr_send_imm = Some(send_imm);
    x.wr_set_ud_addr = Some(set_ud_addr);
    x.wr_set_xrc_srqn = Some(set_xrc_srqn);
    x.wr_set_inline_data = Some(set_inline_data);
    x.wr_set_inline_data_list = Some(set_inline_data_list);
    x.wr_set_sge = Some(set_sge);
    x.wr_set_sge_list = Some(set_sge_list);
    x.wr_start = Some(start);
    x.wr_complete = Some(complete);
    x.wr_abort = Some(abort);
}

unsafe extern "C" fn start(qp: *mut ibv_qp_ex) {
    // SAFETY: the caller passes its QP.
    let obj = unsafe { &*qp.cast::<QpObj>() };
    let batch = obj.qp.whole_send_batch();
    // SAFETY: the batch is gone before its QP is: wr_complete and wr_abort end it. From here on this thread alone has
    // the builder, since it has the lock of the SQ.
    let (b, batch) = unsafe { (builder(qp), std::mem::transmute::<SendBatch<'_>, SendBatch<'static>>(batch)) };
    b.batch = Some(batch);
    b.head = None;
    // In the states before RTS nothing may be posted.
    b.error = if obj.c.qp_base.state < 3 { libc::EINVAL } else { 0 };
}

unsafe extern "C" fn complete(qp: *mut ibv_qp_ex) -> i32 {
    // SAFETY: this thread has called wr_start.
    let b = unsafe { builder(qp) };
    b.flush();
    let (error, batch) = (b.error, b.batch.take());
    match batch {
        Some(batch) if error != 0 => batch.abort(),
        // Published when it is dropped.
        batch => drop(batch),
    }
    error
}

unsafe extern "C" fn abort(qp: *mut ibv_qp_ex) {
    // SAFETY: this thread has called wr_start.
    let b = unsafe { builder(qp) };
    b.head = None;
    if let Some(batch) = b.batch.take() {
        batch.abort();
    }
}

/// Begins a request.
///
/// # Safety
/// This thread has called `wr_start`.
unsafe fn begin(qp: *mut ibv_qp_ex, op: WrOpcode, change: impl FnOnce(&mut abi::SqWqe)) {
    // SAFETY: by the contract.
    let (b, obj) = unsafe { (builder(qp), &*qp.cast::<QpObj>()) };
    b.flush();
    if !obj.typ.allows(op) {
        return b.fail(libc::EINVAL);
    }
    let flags = obj.c.wr_flags & send_flags::SUPPORTED & !send_flags::INLINE;
    let mut head = abi::SqWqe { wr_id: obj.c.wr_id, opcode: op as u8, send_flags: flags, ..abi::SqWqe::default() };
    change(&mut head);
    b.num_sge = 0;
    b.head = Some(head);
}

macro_rules! requests {
    ($($name:ident($($arg:ident: $t:ty),*) $op:ident |$w:ident| $body:expr;)*) => {
        $(unsafe extern "C" fn $name(qp: *mut ibv_qp_ex, $($arg: $t),*) {
            // SAFETY: called between wr_start and wr_complete.
            unsafe { begin(qp, WrOpcode::$op, |$w| $body) }
        })*
    };
}
requests! {
    send() Send |_w| ();
    send_imm(imm: u32) SendImm |w| w.imm = imm;
    send_inv(rkey: u32) SendInv |w| w.imm = rkey;
    local_inv(rkey: u32) LocalInv |w| w.imm = rkey;
    rdma_write(rkey: u32, addr: u64) Write |w| (w.rkey, w.remote_addr) = (rkey, addr);
    rdma_write_imm(rkey: u32, addr: u64, imm: u32) WriteImm |w| (w.rkey, w.remote_addr, w.imm) = (rkey, addr, imm);
    rdma_read(rkey: u32, addr: u64) Read |w| (w.rkey, w.remote_addr) = (rkey, addr);
    atomic_cmp_swp(rkey: u32, addr: u64, compare: u64, swap: u64) CmpSwap
        |w| (w.rkey, w.remote_addr, w.compare_add, w.swap) = (rkey, addr, compare, swap);
    atomic_fetch_add(rkey: u32, addr: u64, add: u64) FetchAdd
        |w| (w.rkey, w.remote_addr, w.compare_add) = (rkey, addr, add);
}

unsafe extern "C" fn atomic_write(qp: *mut ibv_qp_ex, rkey: u32, addr: u64, value: *const c_void) {
    // SAFETY: called between wr_start and wr_complete, with 8 bytes of the caller.
    unsafe {
        begin(qp, WrOpcode::AtomicWrite, |w| (w.rkey, w.remote_addr) = (rkey, addr));
        set_inline_data_list(qp, 1, &ibv_data_buf { addr: value.cast_mut(), length: 8 });
    }
}

unsafe extern "C" fn flush(qp: *mut ibv_qp_ex, rkey: u32, addr: u64, len: usize, placement: u8, level: u8) {
    const LEVELS: u8 = 2;
    // SAFETY: called between wr_start and wr_complete.
    unsafe {
        if placement == 0 || placement > 3 || level >= LEVELS || len as u64 > u64::from(u32::MAX) {
            return builder(qp).fail(libc::EINVAL);
        }
        let word = unirdma_formats::wire::flush::word(placement, level);
        begin(qp, WrOpcode::Flush, |w| {
            (w.rkey, w.remote_addr, w.compare_add, w.imm) = (rkey, addr, len as u64, word);
        });
    }
}

unsafe extern "C" fn bind_mw(qp: *mut ibv_qp_ex, mw: *mut ibv_mw, rkey: u32, info: *const ibv_mw_bind_info) {
    // SAFETY: called between wr_start and wr_complete, with the caller's window and MR.
    unsafe {
        if (*(*mw).pd).handle != (*(*qp).qp_base.pd).handle {
            return builder(qp).fail(libc::EINVAL);
        }
        let bind = bind_request(rkey, &*info);
        begin(qp, WrOpcode::BindMw, |w| *w = abi::SqWqe { wr_id: w.wr_id, send_flags: w.send_flags, ..bind });
    }
}

unsafe extern "C" fn set_ud_addr(qp: *mut ibv_qp_ex, ah: *mut ibv_ah, remote_qpn: u32, remote_qkey: u32) {
    // SAFETY: called between wr_start and wr_complete, with the caller's AH.
    let (b, ah) = unsafe { (builder(qp), (*ah).handle) };
    if let Some(head) = &mut b.head {
        (head.ah, head.dest_qpn, head.qkey) = (ah, remote_qpn, remote_qkey);
    }
}

unsafe extern "C" fn set_xrc_srqn(qp: *mut ibv_qp_ex, srqn: u32) {
    // SAFETY: called between wr_start and wr_complete.
    if let Some(head) = unsafe { &mut builder(qp).head } {
        head.dest_qpn = srqn;
    }
}

unsafe extern "C" fn set_sge(qp: *mut ibv_qp_ex, lkey: u32, addr: u64, length: u32) {
    // SAFETY: called between wr_start and wr_complete.
    let b = unsafe { builder(qp) };
    (b.sges[0], b.num_sge) = (abi::Sge { addr, length, lkey }, 1);
}

unsafe extern "C" fn set_sge_list(qp: *mut ibv_qp_ex, n: usize, list: *const ibv_sge) {
    // SAFETY: called between wr_start and wr_complete.
    let b = unsafe { builder(qp) };
    if n > b.sges.len() {
        return b.fail(libc::EINVAL);
    }
    for i in 0..n {
        // SAFETY: the caller's list has `n` elements.
        let s = unsafe { *list.add(i) };
        b.sges[i] = abi::Sge { addr: s.addr, length: s.length, lkey: s.lkey };
    }
    b.num_sge = n;
}

unsafe extern "C" fn set_inline_data(qp: *mut ibv_qp_ex, addr: *mut c_void, length: usize) {
    // SAFETY: as set_inline_data_list.
    unsafe { set_inline_data_list(qp, 1, &ibv_data_buf { addr, length }) }
}

unsafe extern "C" fn set_inline_data_list(qp: *mut ibv_qp_ex, n: usize, list: *const ibv_data_buf) {
    // SAFETY: called between wr_start and wr_complete.
    let b = unsafe { builder(qp) };
    let mut at = 0usize;
    for i in 0..n {
        // SAFETY: the caller's list has `n` elements.
        let piece = unsafe { *list.add(i) };
        let Some(room) = at.checked_add(piece.length).and_then(|end| b.inline.get_mut(at..end)) else {
            return b.fail(libc::EINVAL);
        };
        if piece.length > 0 {
            // SAFETY: the caller vouches for its data; it is copied now.
            room.copy_from_slice(unsafe { std::slice::from_raw_parts(piece.addr.cast(), piece.length) });
        }
        at += piece.length;
    }
    let returns =
        b.head.as_ref().is_some_and(|h| WrOpcode::from_raw(h.opcode.into()).is_some_and(|o| o.stores_locally()));
    if returns {
        return b.fail(libc::EINVAL);
    }
    if let Some(head) = &mut b.head {
        head.send_flags |= send_flags::INLINE;
        head.inline_len = at as u16;
    }
}
