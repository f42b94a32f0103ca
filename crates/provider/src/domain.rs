//! Protection domains, thread domains, parent domains.

use std::ffi::c_void;
use std::os::raw::c_int;

use unirdma_queues::domain;
use unirdma_verbs_abi::*;

use crate::ibverbs::*;
use crate::{code, done, null};

pub unsafe extern "C" fn alloc_pd(ctx: *mut ibv_context) -> *mut ibv_pd {
    let mut pd = ibv_pd { context: ctx, handle: 0 };
    let (mut cmd, mut resp) = (AllocPd::new(), AllocPdAnswer::new());
    // SAFETY: the caller's context, a PD that nobody else knows, and room for command and answer.
    match unsafe { ibv_cmd_alloc_pd(ctx, &mut pd, &mut cmd, AllocPd::SIZE, &mut resp, AllocPdAnswer::SIZE) } {
        0 => domain::new_pd(pd),
        r => null(r),
    }
}

pub unsafe extern "C" fn dealloc_pd(pd: *mut ibv_pd) -> c_int {
    // SAFETY: the caller passes its PD.
    code(unsafe { domain::dealloc_pd(pd, |pd| done(ibv_cmd_dealloc_pd(pd))) })
}

pub unsafe extern "C" fn alloc_td(ctx: *mut ibv_context, attr: *mut u32) -> *mut c_void {
    // SAFETY: the caller passes attributes, which begin with their comp_mask.
    unsafe { domain::alloc_td(ctx, attr) }.unwrap_or_else(null)
}

pub unsafe extern "C" fn dealloc_td(td: *mut c_void) -> c_int {
    // SAFETY: the caller passes its thread domain.
    code(unsafe { domain::dealloc_td(td) }.map(|_| ()))
}

pub unsafe extern "C" fn alloc_parent_domain(
    ctx: *mut ibv_context,
    attr: *mut ibv_parent_domain_init_attr,
) -> *mut ibv_pd {
    // SAFETY: the caller passes its attributes.
    unsafe { domain::alloc_parent(ctx, &*attr) }.unwrap_or_else(null)
}
