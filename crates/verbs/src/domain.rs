//! Protection domains, thread domains, parent domains.

use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};

use unirdma_abi as abi;
use unirdma_abi::Command;
use unirdma_verbs_abi::*;

use crate::device::context;
use crate::trace::trace;
use crate::{code, null};

/// A PD, or a parent domain, which stands for the PD that it was made from.
#[repr(C)]
struct PdObj {
    c: ibv_pd,
    /// The PD of a parent domain.
    of: *mut PdObj,
    td: *mut TdObj,
    /// Objects in this PD, and parent domains that were made from it. Objects of a parent domain are in its PD for the
    /// device: only here is it known that they name it.
    users: AtomicUsize,
}

/// An object is in a PD from now on, which cannot go before it.
///
/// # Safety
/// `pd` is NULL or one of this library.
pub(crate) unsafe fn hold(pd: *mut ibv_pd) {
    // SAFETY: by the contract.
    if let Some(p) = unsafe { pd.cast::<PdObj>().as_ref() } {
        p.users.fetch_add(1, Ordering::Relaxed);
    }
}

/// An object has left its PD.
///
/// # Safety
/// As for [`hold`], which was called before.
pub(crate) unsafe fn release(pd: *mut ibv_pd) {
    // SAFETY: by the contract.
    if let Some(p) = unsafe { pd.cast::<PdObj>().as_ref() } {
        p.users.fetch_sub(1, Ordering::Relaxed);
    }
}

#[repr(C)]
pub(crate) struct TdObj {
    context: *mut ibv_context,
    users: AtomicUsize,
}

pub unsafe extern "C" fn x_ibv_alloc_pd(c: *mut ibv_context) -> *mut ibv_pd {
    // SAFETY: the caller passes its context.
    let ctx = unsafe { context(c) };
    let r: Result<abi::HandleResp, i32> = ctx.driver.command(Command::CreatePd, &[0u8; 0]);
    trace!("ibv_alloc_pd() = {r:?}");
    match r {
        Ok(r) => {
            ctx.born();
            let c = ibv_pd { context: c, handle: r.handle };
            let (of, td) = (std::ptr::null_mut(), std::ptr::null_mut());
            Box::into_raw(Box::new(PdObj { c, of, td, users: AtomicUsize::new(0) })).cast()
        }
        Err(e) => null(e),
    }
}

pub unsafe extern "C" fn x_ibv_dealloc_pd(pd: *mut ibv_pd) -> i32 {
    // SAFETY: the caller passes its PD, boxed below or above; its context is open.
    let (ctx, obj) = unsafe { (context((*pd).context), &*pd.cast::<PdObj>()) };
    if obj.users.load(Ordering::Relaxed) > 0 {
        return code(Err(libc::EBUSY));
    }
    let handle = obj.c.handle;
    // SAFETY: NULL, or what this parent domain was made from, which cannot go before it.
    match unsafe { (obj.of.as_ref(), obj.td.as_ref()) } {
        (Some(of), td) => {
            of.users.fetch_sub(1, Ordering::Relaxed);
            if let Some(td) = td {
                td.users.fetch_sub(1, Ordering::Relaxed);
            }
        }
        (None, _) => {
            let r = ctx.driver.command_void(Command::DestroyPd, &abi::HandleReq { handle, reserved: 0 });
            trace!("ibv_dealloc_pd({handle:#x}) = {r:?}");
            if r.is_err() && !ctx.driver.is_dead() {
                return code(r);
            }
        }
    }
    // SAFETY: boxed, and nothing refers to it any more.
    unsafe { drop(Box::from_raw(pd.cast::<PdObj>())) };
    ctx.gone();
    0
}

/// True for a parent domain whose objects one thread uses at a time.
///
/// # Safety
/// `pd` is NULL or one of this library.
pub(crate) unsafe fn has_thread_domain(pd: *mut ibv_pd) -> bool {
    // SAFETY: by the contract.
    unsafe { pd.cast::<PdObj>().as_ref() }.is_some_and(|p| !p.td.is_null())
}

/// A thread domain: queues of its parent domains take no lock.
pub(crate) unsafe extern "C" fn alloc_td(c: *mut ibv_context, attr: *mut u32) -> *mut c_void {
    // SAFETY: the caller passes attributes, which begin with their comp_mask.
    if unsafe { *attr } != 0 {
        return null(libc::EINVAL);
    }
    trace!("ibv_alloc_td()");
    // SAFETY: the caller passes its context.
    unsafe { context(c) }.born();
    Box::into_raw(Box::new(TdObj { context: c, users: AtomicUsize::new(0) })).cast()
}

pub(crate) unsafe extern "C" fn dealloc_td(td: *mut c_void) -> i32 {
    // SAFETY: the caller passes its thread domain.
    let obj = unsafe { &*td.cast::<TdObj>() };
    if obj.users.load(Ordering::Relaxed) > 0 {
        return code(Err(libc::EBUSY));
    }
    // SAFETY: its context is open; boxed in alloc_td.
    unsafe {
        context(obj.context).gone();
        drop(Box::from_raw(td.cast::<TdObj>()));
    }
    0
}

const ALLOCATORS: u32 = 1;
const PD_CONTEXT: u32 = 2;

/// A parent domain. Its allocators are for memory of queues, which lies in memory files here: they are accepted, and
/// never needed.
pub(crate) unsafe extern "C" fn alloc_parent_domain(
    c: *mut ibv_context,
    attr: *mut ibv_parent_domain_init_attr,
) -> *mut ibv_pd {
    // SAFETY: the caller passes its attributes.
    let a = unsafe { &*attr };
    trace!("ibv_alloc_parent_domain(comp_mask {:#x})", a.comp_mask);
    if a.comp_mask & !(ALLOCATORS | PD_CONTEXT) != 0 {
        return null(libc::EOPNOTSUPP);
    }
    // SAFETY: a PD of the caller, or NULL.
    let Some(of) = (unsafe { a.pd.cast::<PdObj>().as_ref() }) else { return null(libc::EINVAL) };
    let half = a.comp_mask & ALLOCATORS != 0 && (a.alloc.is_null() || a.free.is_null());
    if of.c.context != c || half {
        return null(libc::EINVAL);
    }
    // SAFETY: NULL or a thread domain of the caller.
    let td = unsafe { a.td.cast::<TdObj>().as_ref() };
    if td.is_some_and(|td| td.context != c) {
        return null(libc::EINVAL);
    }
    of.users.fetch_add(1, Ordering::Relaxed);
    if let Some(td) = td {
        td.users.fetch_add(1, Ordering::Relaxed);
    }
    // SAFETY: the caller passes its context.
    unsafe { context(c) }.born();
    let pd = ibv_pd { context: c, handle: of.c.handle };
    let obj = PdObj { c: pd, of: a.pd.cast(), td: a.td.cast(), users: AtomicUsize::new(0) };
    Box::into_raw(Box::new(obj)).cast()
}
