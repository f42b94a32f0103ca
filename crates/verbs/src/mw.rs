//! Memory windows.

use unirdma_abi as abi;
use unirdma_abi::Command;
use unirdma_driver::SendWr;
use unirdma_formats::{access, send_flags};
use unirdma_queues::requests::bind_request;
use unirdma_verbs_abi::*;

use crate::device::context;
use crate::qp::QpObj;
use crate::trace::trace;
use crate::{code, null};

const TYPE_1: u32 = 1;
const TYPE_2: u32 = 2;

pub(crate) unsafe extern "C" fn alloc_mw(pd: *mut ibv_pd, typ: u32) -> *mut ibv_mw {
    // SAFETY: the caller passes its PD; its context is open.
    let (c, pdn) = unsafe { ((*pd).context, (*pd).handle) };
    // SAFETY: as above.
    let ctx = unsafe { context(c) };
    if typ != TYPE_1 && typ != TYPE_2 {
        return null(libc::EINVAL);
    }
    let made: Result<abi::MrResp, i32> = ctx.driver.command(Command::AllocMw, &abi::AllocMwReq { pdn, mw_type: typ });
    trace!("ibv_alloc_mw(type {typ}) = {:?}", made.as_ref().map(|m| m.rkey));
    match made {
        Ok(m) => {
            ctx.born();
            // SAFETY: the caller's PD, which the object names.
            unsafe { crate::domain::hold(pd) };
            Box::into_raw(Box::new(ibv_mw { context: c, pd, rkey: m.rkey, handle: m.mrn, mw_type: typ }))
        }
        Err(e) => null(e),
    }
}

pub(crate) unsafe extern "C" fn dealloc_mw(mw: *mut ibv_mw) -> i32 {
    // SAFETY: the caller passes its window; its context is open.
    let (ctx, handle) = unsafe { (context((*mw).context), (*mw).handle) };
    let r = ctx.driver.command_void(Command::DeallocMw, &abi::HandleReq { handle, reserved: 0 });
    trace!("ibv_dealloc_mw() = {r:?}");
    if r.is_err() && !ctx.driver.is_dead() {
        return code(r);
    }
    // SAFETY: boxed in alloc_mw; its PD lives.
    unsafe {
        crate::domain::release((*mw).pd);
        drop(Box::from_raw(mw));
    }
    ctx.gone();
    0
}

/// The next key of a window: the lower 8 bits are its user's (`ibv_inc_rkey(3)`).
fn next_key(rkey: u32) -> u32 {
    rkey & 0xffff_ff00 | rkey.wrapping_add(1) & 0xff
}

/// Windows of type 1: the key changes with each binding.
pub(crate) unsafe extern "C" fn bind_mw(qp: *mut ibv_qp, mw: *mut ibv_mw, bind: *mut ibv_mw_bind) -> i32 {
    // SAFETY: the caller passes its QP, window and attributes.
    let (obj, w, b) = unsafe { (&*qp.cast::<QpObj>(), &mut *mw, &*bind) };
    let info = &b.bind_info;
    let known = access::MW_SUPPORTED | access::OPTIONAL_RANGE;
    // SAFETY: objects of the caller; the MR may be NULL, and the target of an XRC connection has no PD.
    let other_pd = unsafe {
        let pd = (*w.pd).handle;
        let other = |of: *mut ibv_pd| of.as_ref().is_none_or(|p| p.handle != pd);
        info.mr.as_ref().is_some_and(|m| other(m.pd)) || other(obj.c.qp_base.pd)
    };
    if other_pd || info.mr.is_null() && info.length > 0 || info.mw_access_flags & !known != 0 {
        return code(Err(libc::EINVAL));
    }
    if obj.c.qp_base.state != 3 {
        return code(Err(libc::EINVAL));
    }
    let rkey = next_key(w.rkey);
    // SAFETY: as above.
    let mut head = unsafe { bind_request(rkey, info) };
    (head.wr_id, head.send_flags) = (b.wr_id, b.send_flags & send_flags::SUPPORTED & !send_flags::INLINE);
    // SAFETY: no inline data.
    let r = unsafe { obj.qp.send_batch().push(&head, SendWr::Sges(&[])) };
    trace!("ibv_bind_mw({rkey:#x}, {} bytes) = {r:?}", info.length);
    if r.is_ok() {
        w.rkey = rkey;
    }
    code(r)
}
