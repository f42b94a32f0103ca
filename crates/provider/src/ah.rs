//! Address handles.

use std::os::raw::c_int;

use unirdma_verbs_abi::*;

use crate::ibverbs::*;
use crate::memory::room;
use crate::{code, done, null};

#[repr(C)]
struct AhObj {
    c: ibv_ah,
    /// The device's handle, by which WQEs name the AH. The handle in `c` is the kernel's.
    handle: u32,
}

/// The device's handle of an AH.
///
/// # Safety
/// `ah` is an AH of this provider.
#[inline]
pub unsafe fn handle(ah: *mut ibv_ah) -> u32 {
    // SAFETY: by the contract.
    unsafe { (*ah.cast::<AhObj>()).handle }
}

pub unsafe extern "C" fn create(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah {
    let ah = match room::<AhObj>() {
        Ok(ah) => Box::into_raw(ah).cast::<AhObj>(),
        Err(e) => return null(e),
    };
    let mut resp = AhAnswer::new();
    // SAFETY: the caller's PD and attributes, an AH that nobody else knows, and room for the answer.
    unsafe {
        let r = ibv_cmd_create_ah(pd, ah.cast(), attr, &mut resp, AhAnswer::SIZE);
        if r != 0 {
            drop(Box::from_raw(ah));
            return null(r);
        }
        (*ah).handle = resp.driver.ah;
    }
    ah.cast()
}

pub unsafe extern "C" fn destroy(ah: *mut ibv_ah) -> c_int {
    // SAFETY: the caller passes its AH, which `create` has boxed.
    unsafe {
        let r = ibv_cmd_destroy_ah(ah);
        if r == 0 {
            drop(Box::from_raw(ah.cast::<AhObj>()));
        }
        code(done(r))
    }
}
