//! The extended post interface (`ibv_wr_post(3)`): requests built call by call.

use std::ffi::c_void;

use unirdma_abi as abi;
use unirdma_formats::{QpType, WrOpcode, send_flags};
use unirdma_verbs_abi::*;

use crate::requests::bind_request;
use crate::{Batch, Result, SendWr};

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

/// The operations that a QP of type `typ` may be created with, as bits of `enum ibv_qp_create_send_ops_flags`.
pub fn send_ops(typ: QpType) -> u64 {
    OPS.iter().filter(|o| typ.allows(o.1)).fold(0, |m, o| m | 1 << o.0)
}

/// The object of a QP; for C an `ibv_qp_ex`.
///
/// # Safety
/// `builder` and `begin` must answer for every QP that [`fill`] was called for. The batch of `begin` must keep other
/// threads from beginning one. By its type it may outlive the QP, but it is dropped before that.
pub unsafe trait ExtendedQp {
    /// Its sends.
    type Batch: Batch;

    /// The requests under construction.
    ///
    /// # Safety
    /// `qp` is such a QP.
    unsafe fn builder(qp: *mut ibv_qp_ex) -> *mut Builder<Self::Batch>;

    /// Begins a batch, and returns the error with which it ends if there is a batch already.
    ///
    /// # Safety
    /// `qp` is such a QP.
    unsafe fn begin(qp: *mut ibv_qp_ex) -> (Self::Batch, Result<()>);

    /// The QP's type.
    ///
    /// # Safety
    /// `qp` is such a QP.
    unsafe fn typ(qp: *mut ibv_qp_ex) -> QpType;

    /// The device's handle of an AH.
    ///
    /// # Safety
    /// `ah` is an AH of the same library.
    unsafe fn ah(ah: *mut ibv_ah) -> u32;
}

/// Requests between `ibv_wr_start` and `ibv_wr_complete`. `batch` holds the lock of the SQ meanwhile, so that only one
/// thread uses the builder.
pub struct Builder<B> {
    batch: Option<B>,
    /// The request whose setters are being called.
    head: Option<abi::SqWqe>,
    sges: [abi::Sge; abi::MAX_SGE as usize],
    num_sge: usize,
    inline: [u8; abi::MAX_INLINE as usize],
    error: i32,
}

impl<B: Batch> Builder<B> {
    /// Without requests.
    #[allow(clippy::new_without_default)]
    pub fn new() -> Self {
        Builder {
            batch: None,
            head: None,
            sges: [abi::Sge::default(); abi::MAX_SGE as usize],
            num_sge: 0,
            inline: [0; abi::MAX_INLINE as usize],
            error: 0,
        }
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
/// [`fill`] was called for `qp`, and only the thread between `wr_start` and `wr_complete` calls this.
unsafe fn builder<'a, Q: ExtendedQp + 'a>(qp: *mut ibv_qp_ex) -> &'a mut Builder<Q::Batch> {
    // SAFETY: by the contract.
    unsafe { &mut *Q::builder(qp) }
}

/// Puts the functions into a QP.
pub fn fill<Q: ExtendedQp>(x: &mut ibv_qp_ex) {
    x.wr_atomic_cmp_swp = Some(atomic_cmp_swp::<Q>);
    x.wr_atomic_fetch_add = Some(atomic_fetch_add::<Q>);
    x.wr_atomic_write = Some(atomic_write::<Q>);
    x.wr_flush = Some(flush::<Q>);
    x.wr_bind_mw = Some(bind_mw::<Q>);
    x.wr_local_inv = Some(local_inv::<Q>);
    x.wr_send_inv = Some(send_inv::<Q>);
    x.wr_rdma_read = Some(rdma_read::<Q>);
    x.wr_rdma_write = Some(rdma_write::<Q>);
    x.wr_rdma_write_imm = Some(rdma_write_imm::<Q>);
    x.wr_send = Some(send::<Q>);
    x.wr_send_imm = Some(send_imm::<Q>);
    x.wr_set_ud_addr = Some(set_ud_addr::<Q>);
    x.wr_set_xrc_srqn = Some(set_xrc_srqn::<Q>);
    x.wr_set_inline_data = Some(set_inline_data::<Q>);
    x.wr_set_inline_data_list = Some(set_inline_data_list::<Q>);
    x.wr_set_sge = Some(set_sge::<Q>);
    x.wr_set_sge_list = Some(set_sge_list::<Q>);
    x.wr_start = Some(start::<Q>);
    x.wr_complete = Some(complete::<Q>);
    x.wr_abort = Some(abort::<Q>);
}

unsafe extern "C" fn start<Q: ExtendedQp>(qp: *mut ibv_qp_ex) {
    // SAFETY: the caller passes its QP. From here on this thread alone has the builder, since it has the batch.
    let (b, (batch, begun)) = unsafe {
        let begun = Q::begin(qp);
        (builder::<Q>(qp), begun)
    };
    b.batch = Some(batch);
    b.head = None;
    b.error = begun.err().unwrap_or(0);
}

unsafe extern "C" fn complete<Q: ExtendedQp>(qp: *mut ibv_qp_ex) -> i32 {
    // SAFETY: this thread has called wr_start.
    let b = unsafe { builder::<Q>(qp) };
    b.flush();
    let (error, batch) = (b.error, b.batch.take());
    match batch {
        Some(batch) if error != 0 => batch.abort(),
        // Published when it is dropped.
        batch => drop(batch),
    }
    error
}

unsafe extern "C" fn abort<Q: ExtendedQp>(qp: *mut ibv_qp_ex) {
    // SAFETY: this thread has called wr_start.
    let b = unsafe { builder::<Q>(qp) };
    b.head = None;
    if let Some(batch) = b.batch.take() {
        batch.abort();
    }
}

/// Begins a request.
///
/// # Safety
/// This thread has called `wr_start`.
unsafe fn begin<Q: ExtendedQp>(qp: *mut ibv_qp_ex, op: WrOpcode, change: impl FnOnce(&mut abi::SqWqe)) {
    // SAFETY: by the contract.
    let (b, typ, wr_id, wr_flags) = unsafe { (builder::<Q>(qp), Q::typ(qp), (*qp).wr_id, (*qp).wr_flags) };
    b.flush();
    if !typ.allows(op) {
        return b.fail(libc::EINVAL);
    }
    let flags = wr_flags & send_flags::SUPPORTED & !send_flags::INLINE;
    let mut head = abi::SqWqe { wr_id, opcode: op as u8, send_flags: flags, ..abi::SqWqe::default() };
    change(&mut head);
    b.num_sge = 0;
    b.head = Some(head);
}

macro_rules! requests {
    ($($name:ident($($arg:ident: $t:ty),*) $op:ident |$w:ident| $body:expr;)*) => {
        $(unsafe extern "C" fn $name<Q: ExtendedQp>(qp: *mut ibv_qp_ex, $($arg: $t),*) {
            // SAFETY: called between wr_start and wr_complete.
            unsafe { begin::<Q>(qp, WrOpcode::$op, |$w| $body) }
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

unsafe extern "C" fn atomic_write<Q: ExtendedQp>(qp: *mut ibv_qp_ex, rkey: u32, addr: u64, value: *const c_void) {
    // SAFETY: called between wr_start and wr_complete, with 8 bytes of the caller.
    unsafe {
        begin::<Q>(qp, WrOpcode::AtomicWrite, |w| (w.rkey, w.remote_addr) = (rkey, addr));
        set_inline_data_list::<Q>(qp, 1, &ibv_data_buf { addr: value.cast_mut(), length: 8 });
    }
}

unsafe extern "C" fn flush<Q: ExtendedQp>(
    qp: *mut ibv_qp_ex,
    rkey: u32,
    addr: u64,
    len: usize,
    placement: u8,
    level: u8,
) {
    const LEVELS: u8 = 2;
    // SAFETY: called between wr_start and wr_complete.
    unsafe {
        if placement == 0 || placement > 3 || level >= LEVELS || len as u64 > u64::from(u32::MAX) {
            return builder::<Q>(qp).fail(libc::EINVAL);
        }
        let word = unirdma_formats::wire::flush::word(placement, level);
        begin::<Q>(qp, WrOpcode::Flush, |w| {
            (w.rkey, w.remote_addr, w.compare_add, w.imm) = (rkey, addr, len as u64, word);
        });
    }
}

unsafe extern "C" fn bind_mw<Q: ExtendedQp>(
    qp: *mut ibv_qp_ex,
    mw: *mut ibv_mw,
    rkey: u32,
    info: *const ibv_mw_bind_info,
) {
    // SAFETY: called between wr_start and wr_complete, with the caller's window and MR.
    unsafe {
        if (*(*mw).pd).handle != (*(*qp).qp_base.pd).handle {
            return builder::<Q>(qp).fail(libc::EINVAL);
        }
        let bind = bind_request(rkey, &*info);
        begin::<Q>(qp, WrOpcode::BindMw, |w| *w = abi::SqWqe { wr_id: w.wr_id, send_flags: w.send_flags, ..bind });
    }
}

unsafe extern "C" fn set_ud_addr<Q: ExtendedQp>(
    qp: *mut ibv_qp_ex,
    ah: *mut ibv_ah,
    remote_qpn: u32,
    remote_qkey: u32,
) {
    // SAFETY: called between wr_start and wr_complete, with the caller's AH.
    let (b, ah) = unsafe { (builder::<Q>(qp), Q::ah(ah)) };
    if let Some(head) = &mut b.head {
        (head.ah, head.dest_qpn, head.qkey) = (ah, remote_qpn, remote_qkey);
    }
}

unsafe extern "C" fn set_xrc_srqn<Q: ExtendedQp>(qp: *mut ibv_qp_ex, srqn: u32) {
    // SAFETY: called between wr_start and wr_complete.
    if let Some(head) = unsafe { &mut builder::<Q>(qp).head } {
        head.dest_qpn = srqn;
    }
}

unsafe extern "C" fn set_sge<Q: ExtendedQp>(qp: *mut ibv_qp_ex, lkey: u32, addr: u64, length: u32) {
    // SAFETY: called between wr_start and wr_complete.
    let b = unsafe { builder::<Q>(qp) };
    (b.sges[0], b.num_sge) = (abi::Sge { addr, length, lkey }, 1);
}

unsafe extern "C" fn set_sge_list<Q: ExtendedQp>(qp: *mut ibv_qp_ex, n: usize, list: *const ibv_sge) {
    // SAFETY: called between wr_start and wr_complete.
    let b = unsafe { builder::<Q>(qp) };
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

unsafe extern "C" fn set_inline_data<Q: ExtendedQp>(qp: *mut ibv_qp_ex, addr: *mut c_void, length: usize) {
    // SAFETY: as set_inline_data_list.
    unsafe { set_inline_data_list::<Q>(qp, 1, &ibv_data_buf { addr, length }) }
}

unsafe extern "C" fn set_inline_data_list<Q: ExtendedQp>(qp: *mut ibv_qp_ex, n: usize, list: *const ibv_data_buf) {
    // SAFETY: called between wr_start and wr_complete.
    let b = unsafe { builder::<Q>(qp) };
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
