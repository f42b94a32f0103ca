//! Memory windows.

use unirdma_abi as abi;
use unirdma_abi::Command;
use unirdma_driver::SendWr;
use unirdma_queues::requests::bind_window;
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

/// Binds a window of type 1.
pub(crate) unsafe extern "C" fn bind_mw(qp: *mut ibv_qp, mw: *mut ibv_mw, bind: *mut ibv_mw_bind) -> i32 {
    // SAFETY: the caller passes its QP, window and attributes.
    let (obj, w, b) = unsafe { (&*qp.cast::<QpObj>(), &mut *mw, &*bind) };
    // SAFETY: objects of the caller; there is no inline data.
    let r = unsafe {
        bind_window(&obj.c.qp_base, w, b).and_then(|(rkey, head)| {
            obj.qp.send_batch().push(&head, SendWr::Sges(&[]))?;
            Ok(rkey)
        })
    };
    trace!("ibv_bind_mw({} bytes) = {r:x?}", b.bind_info.length);
    code(r.map(|rkey| w.rkey = rkey))
}
