//! XRC domains and extended shared receive queues.

use unirdma_abi as abi;
use unirdma_abi::Command;
use unirdma_driver::Qp;
use unirdma_formats::QpType;
use unirdma_verbs_abi::*;

use crate::device::context;
use crate::srq::{SrqObj, create};
use crate::tm::{SRQ_TM, SRQT_TM};
use crate::trace::trace;
use crate::{code, null};

/// `IBV_XRCD_INIT_ATTR_*`.
const MASK_FD: u32 = 1;
const MASK_OFLAGS: u32 = 2;
/// `IBV_SRQ_INIT_ATTR_*`.
const SRQ_TYPE: u32 = 1;
const SRQ_PD: u32 = 2;
const SRQ_XRCD: u32 = 4;
const SRQ_CQ: u32 = 8;
const SRQT_BASIC: u32 = 0;
const SRQT_XRC: u32 = 1;

#[repr(C)]
pub(crate) struct XrcdObj {
    c: ibv_xrcd,
    pub handle: u32,
}

pub(crate) unsafe extern "C" fn open_xrcd(c: *mut ibv_context, attr: *mut ibv_xrcd_init_attr) -> *mut ibv_xrcd {
    // SAFETY: the caller passes its context and attributes.
    let (ctx, a) = unsafe { (context(c), &*attr) };
    if a.comp_mask & MASK_FD == 0 || a.comp_mask & MASK_OFLAGS == 0 || a.comp_mask & !(MASK_FD | MASK_OFLAGS) != 0 {
        return null(libc::EINVAL);
    }
    let flag = |bit: i32, is: u32| if a.oflags & bit != 0 { is } else { 0 };
    let mut r = abi::CreateXrcdReq {
        flags: flag(libc::O_CREAT, abi::XRCD_CREATE) | flag(libc::O_EXCL, abi::XRCD_EXCLUSIVE),
        ..Default::default()
    };
    if a.fd >= 0 {
        // SAFETY: all zero is valid; the descriptor is the caller's, or refused.
        let found = unsafe {
            let mut s: libc::stat = std::mem::zeroed();
            if libc::fstat(a.fd, &mut s) == 0 { Ok((s.st_dev, s.st_ino)) } else { Err(libc::EBADF) }
        };
        match found {
            Ok((dev, ino)) => (r.dev, r.ino, r.flags) = (dev, ino, r.flags | abi::XRCD_SHARED),
            Err(e) => return null(e),
        }
    }
    let made: Result<abi::HandleResp, i32> = ctx.driver.command(Command::CreateXrcd, &r);
    trace!("ibv_open_xrcd() = {made:?}");
    match made {
        Ok(h) => {
            ctx.born();
            Box::into_raw(Box::new(XrcdObj { c: ibv_xrcd { context: c }, handle: h.handle })).cast()
        }
        Err(e) => null(e),
    }
}

pub(crate) unsafe extern "C" fn close_xrcd(xrcd: *mut ibv_xrcd) -> i32 {
    // SAFETY: the caller passes its domain; its context is open.
    let (obj, ctx) = unsafe { (&*xrcd.cast::<XrcdObj>(), context((*xrcd).context)) };
    let r = ctx.driver.command_void(Command::DestroyXrcd, &abi::HandleReq { handle: obj.handle, reserved: 0 });
    trace!("ibv_close_xrcd() = {r:?}");
    if r.is_err() && !ctx.driver.is_dead() {
        return code(r);
    }
    // SAFETY: boxed in open_xrcd.
    unsafe { drop(Box::from_raw(xrcd.cast::<XrcdObj>())) };
    ctx.gone();
    0
}

/// `IBV_QP_OPEN_ATTR_*`: number, XRC domain, context, type.
const OPEN_NUM: u32 = 1;
const OPEN_XRCD: u32 = 2;
const OPEN_CONTEXT: u32 = 4;
const OPEN_TYPE: u32 = 8;

pub(crate) unsafe extern "C" fn open_qp(c: *mut ibv_context, attr: *mut ibv_qp_open_attr) -> *mut ibv_qp {
    // SAFETY: the caller passes its context and attributes.
    let (ctx, a) = unsafe { (context(c), &*attr) };
    let needed = OPEN_NUM | OPEN_XRCD | OPEN_TYPE;
    // SAFETY: a domain of the caller, or NULL.
    let xrcd = unsafe { handle_of(a.xrcd) }.filter(|_| a.comp_mask & !OPEN_CONTEXT == needed);
    let (Some(xrcd), Some(typ @ QpType::XrcRecv)) = (xrcd, QpType::from_raw(a.qp_type)) else {
        return null(libc::EINVAL);
    };
    let made = Qp::open(&ctx.driver, xrcd, a.qp_num);
    trace!("ibv_open_qp({:#x}) = {:?}", a.qp_num, made.as_ref().map(|_| ()));
    match made {
        Ok(qp) => {
            let given = if a.comp_mask & OPEN_CONTEXT != 0 { a.qp_context } else { std::ptr::null_mut() };
            // SAFETY: integers and pointers.
            let mut init: ibv_qp_init_attr = unsafe { std::mem::zeroed() };
            (init.qp_context, init.qp_type) = (given, a.qp_type);
            // SAFETY: the caller's context; such a QP has no PD.
            unsafe { crate::qp::wrap(c, std::ptr::null_mut(), &init, qp, typ, 0, None) }.cast()
        }
        Err(e) => null(e),
    }
}

/// The handle of a program's XRC domain.
///
/// # Safety
/// `xrcd` is NULL or one of this library.
pub(crate) unsafe fn handle_of(xrcd: *mut ibv_xrcd) -> Option<u32> {
    // SAFETY: by the contract.
    unsafe { xrcd.cast::<XrcdObj>().as_ref() }.map(|x| x.handle)
}

pub(crate) unsafe extern "C" fn create_srq_ex(c: *mut ibv_context, init: *mut ibv_srq_init_attr_ex) -> *mut ibv_srq {
    // SAFETY: the caller passes its context and attributes.
    let a = unsafe { &mut *init };
    let given = |bit: u32| a.comp_mask & bit != 0;
    let typ = if given(SRQ_TYPE) { a.srq_type } else { SRQT_BASIC };
    if a.comp_mask & !(SRQ_TYPE | SRQ_PD | SRQ_XRCD | SRQ_CQ | SRQ_TM) != 0 || typ > SRQT_TM {
        return null(libc::EOPNOTSUPP);
    }
    // SAFETY: a PD of the caller, if there is one.
    if !given(SRQ_PD) || a.pd.is_null() || unsafe { (*a.pd).context } != c {
        return null(libc::EINVAL);
    }
    if typ == SRQT_TM {
        if !given(SRQ_CQ) || !given(SRQ_TM) {
            return null(libc::EINVAL);
        }
        // SAFETY: the caller's PD and CQ.
        return unsafe { crate::tm::create(c, a) };
    }
    let mut xrc = None;
    if typ == SRQT_XRC {
        // SAFETY: objects of the caller, or NULL.
        let (xrcd, cq) = unsafe { (handle_of(a.xrcd).filter(|_| given(SRQ_XRCD)), a.cq.as_ref()) };
        let (Some(xrcd), Some(cq)) = (xrcd, cq.filter(|_| given(SRQ_CQ))) else { return null(libc::EINVAL) };
        xrc = Some((xrcd, cq.handle));
    }
    // SAFETY: the caller's PD.
    unsafe { create(a.pd, a.srq_context, &mut a.attr, xrc) }
}

pub(crate) unsafe extern "C" fn get_srq_num(srq: *mut ibv_srq, number: *mut u32) -> i32 {
    // SAFETY: the caller passes its SRQ.
    match unsafe { &*srq.cast::<SrqObj>() }.srq.number {
        0 => libc::EINVAL,
        n => {
            // SAFETY: room for a number.
            unsafe { *number = n };
            0
        }
    }
}
