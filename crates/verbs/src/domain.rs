//! Protection domains, thread domains, parent domains.

use std::ffi::c_void;

use unirdma_abi as abi;
use unirdma_abi::Command;
use unirdma_queues::domain;
use unirdma_verbs_abi::*;

use crate::device::context;
use crate::trace::trace;
use crate::{code, null};

pub(crate) use domain::{has_thread_domain, hold, release};

pub unsafe extern "C" fn x_ibv_alloc_pd(c: *mut ibv_context) -> *mut ibv_pd {
    // SAFETY: the caller passes its context.
    let ctx = unsafe { context(c) };
    let r: Result<abi::HandleResp, i32> = ctx.driver.command(Command::CreatePd, &[0u8; 0]);
    trace!("ibv_alloc_pd() = {r:?}");
    match r {
        Ok(r) => {
            ctx.born();
            domain::new_pd(ibv_pd { context: c, handle: r.handle })
        }
        Err(e) => null(e),
    }
}

pub unsafe extern "C" fn x_ibv_dealloc_pd(pd: *mut ibv_pd) -> i32 {
    // SAFETY: the caller passes its PD; its context is open.
    let (ctx, handle) = unsafe { (context((*pd).context), (*pd).handle) };
    let destroy = |_| {
        let r = ctx.driver.command_void(Command::DestroyPd, &abi::HandleReq { handle, reserved: 0 });
        trace!("ibv_dealloc_pd({handle:#x}) = {r:?}");
        if ctx.driver.is_dead() { Ok(()) } else { r }
    };
    // SAFETY: the caller passes its PD.
    let r = unsafe { domain::dealloc_pd(pd, destroy) };
    if r.is_ok() {
        ctx.gone();
    }
    code(r)
}

/// Allocates a thread domain. Queues of its parent domains take no lock.
pub(crate) unsafe extern "C" fn alloc_td(c: *mut ibv_context, attr: *mut u32) -> *mut c_void {
    trace!("ibv_alloc_td()");
    // SAFETY: the caller passes its context, and attributes, which begin with their comp_mask.
    unsafe {
        match domain::alloc_td(c, attr) {
            Ok(td) => {
                context(c).born();
                td
            }
            Err(e) => null(e),
        }
    }
}

pub(crate) unsafe extern "C" fn dealloc_td(td: *mut c_void) -> i32 {
    // SAFETY: the caller passes its thread domain; its context is open.
    unsafe { code(domain::dealloc_td(td).map(|c| context(c).gone())) }
}

pub(crate) unsafe extern "C" fn alloc_parent_domain(
    c: *mut ibv_context,
    attr: *mut ibv_parent_domain_init_attr,
) -> *mut ibv_pd {
    // SAFETY: the caller passes its context and attributes.
    unsafe {
        trace!("ibv_alloc_parent_domain(comp_mask {:#x})", (*attr).comp_mask);
        match domain::alloc_parent(c, &*attr) {
            Ok(pd) => {
                context(c).born();
                pd
            }
            Err(e) => null(e),
        }
    }
}
