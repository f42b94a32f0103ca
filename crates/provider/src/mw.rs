//! Memory windows.

use std::os::raw::c_int;

use unirdma_queues::requests::bind_window;
use unirdma_verbs_abi::*;

use crate::ibverbs::*;
use crate::memory::room;
use crate::qp::QpObj;
use crate::{code, done, null};

pub unsafe extern "C" fn alloc(pd: *mut ibv_pd, typ: u32) -> *mut ibv_mw {
    const TYPES: std::ops::RangeInclusive<u32> = 1..=2;
    if !TYPES.contains(&typ) {
        return null(libc::EINVAL);
    }
    let mw = match room::<ibv_mw>() {
        Ok(mw) => Box::into_raw(mw).cast::<ibv_mw>(),
        Err(e) => return null(e),
    };
    let (mut cmd, mut resp) = (AllocMw::new(), AllocMwAnswer::new());
    // SAFETY: the caller's PD, a window that nobody else knows, and room for command and answer.
    unsafe {
        let r = ibv_cmd_alloc_mw(pd, typ, mw, &mut cmd, AllocMw::SIZE, &mut resp, AllocMwAnswer::SIZE);
        if r != 0 {
            drop(Box::from_raw(mw));
            return null(r);
        }
    }
    mw
}

pub unsafe extern "C" fn dealloc(mw: *mut ibv_mw) -> c_int {
    // SAFETY: the caller passes its window, which `alloc` has boxed.
    unsafe {
        let r = ibv_cmd_dealloc_mw(mw);
        if r == 0 {
            drop(Box::from_raw(mw));
        }
        code(done(r))
    }
}

/// Binds a window of type 1.
pub unsafe extern "C" fn bind(qp: *mut ibv_qp, mw: *mut ibv_mw, bind: *mut ibv_mw_bind) -> c_int {
    // SAFETY: the caller passes its QP, window and attributes.
    let (obj, w, b) = unsafe { (&*qp.cast::<QpObj>(), &mut *mw, &*bind) };
    // SAFETY: objects of the caller.
    let r = unsafe { bind_window(&*qp, w, b) }.and_then(|(rkey, head)| obj.push_alone(&head).map(|()| rkey));
    code(r.map(|rkey| w.rkey = rkey))
}
