//! The extended post interface (`ibv_create_qp_ex(3)`, `ibv_wr_post(3)`): requests built call by call.

use unirdma_driver::SendBatch;
use unirdma_formats::QpType;
use unirdma_queues::builder::{self, ExtendedQp};
use unirdma_verbs_abi::*;

use crate::null;
use crate::qp::{QpObj, create};
use crate::trace::trace;
use crate::xrcd::handle_of;

const MASK_PD: u32 = 1;
const MASK_XRCD: u32 = 1 << 1;
const MASK_CREATE_FLAGS: u32 = 1 << 2;
const MASK_SEND_OPS: u32 = 1 << 6;

pub(crate) type Builder = builder::Builder<SendBatch<'static>>;

// SAFETY: a QP for which `builder::fill` was called has a builder. Its batch has the lock of the SQ, and is gone before
// the QP: wr_complete and wr_abort end it.
unsafe impl ExtendedQp for QpObj {
    type Batch = SendBatch<'static>;

    unsafe fn builder(qp: *mut ibv_qp_ex) -> *mut Builder {
        // SAFETY: by the contract.
        unsafe { &raw mut **(*qp.cast::<QpObj>()).builder.as_mut().unwrap_unchecked() }
    }

    unsafe fn begin(qp: *mut ibv_qp_ex) -> (SendBatch<'static>, Result<(), i32>) {
        // SAFETY: by the contract.
        let obj = unsafe { &*qp.cast::<QpObj>() };
        // Before RTS nothing may be posted.
        let may = if obj.c.qp_base.state < 3 { Err(libc::EINVAL) } else { Ok(()) };
        (obj.qp.whole_send_batch(), may)
    }

    unsafe fn typ(qp: *mut ibv_qp_ex) -> QpType {
        // SAFETY: by the contract.
        unsafe { (*qp.cast::<QpObj>()).typ }
    }

    unsafe fn ah(ah: *mut ibv_ah) -> u32 {
        // SAFETY: by the contract.
        unsafe { (*ah).handle }
    }
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
        let offered = QpType::from_raw(a.qp_type).map_or(0, builder::send_ops);
        if a.send_ops_flags & !offered != 0 {
            return null(libc::EOPNOTSUPP);
        }
        made_for = Some(Box::new(Builder::new()));
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

/// The extended interface of a QP that was created with it; otherwise NULL.
pub unsafe extern "C" fn x_ibv_qp_to_qp_ex(qp: *mut ibv_qp) -> *mut ibv_qp_ex {
    // SAFETY: the caller passes its QP.
    if unsafe { (*qp.cast::<QpObj>()).builder.is_some() } { qp.cast() } else { std::ptr::null_mut() }
}
