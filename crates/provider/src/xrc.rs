//! XRC domains. The kernel knows the file of a domain, and the processes that share it.

use std::os::raw::c_int;

use unirdma_verbs_abi::*;

use crate::ibverbs::*;
use crate::memory::room;
use crate::{code, done, null};

pub unsafe extern "C" fn open(ctx: *mut ibv_context, attr: *mut ibv_xrcd_init_attr) -> *mut ibv_xrcd {
    let xrcd = match room::<verbs_xrcd>() {
        Ok(xrcd) => Box::into_raw(xrcd).cast::<verbs_xrcd>(),
        Err(e) => return null(e),
    };
    let (mut cmd, mut resp) = (OpenXrcd::new(), OpenXrcdAnswer::new());
    let size = size_of::<verbs_xrcd>() as c_int;
    // SAFETY: the caller's context and attributes, a domain that nobody else knows, and room for command and answer.
    unsafe {
        let r = ibv_cmd_open_xrcd(ctx, xrcd, size, attr, &mut cmd, OpenXrcd::SIZE, &mut resp, OpenXrcdAnswer::SIZE);
        if r != 0 {
            drop(Box::from_raw(xrcd));
            return null(r);
        }
        &raw mut (*xrcd).xrcd
    }
}

pub unsafe extern "C" fn close(xrcd: *mut ibv_xrcd) -> c_int {
    let xrcd = xrcd.cast::<verbs_xrcd>();
    // SAFETY: the caller passes its domain, which `open` has boxed.
    unsafe {
        let r = ibv_cmd_close_xrcd(xrcd);
        if r == 0 {
            drop(Box::from_raw(xrcd));
        }
        code(done(r))
    }
}
