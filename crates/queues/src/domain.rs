//! Protection domains as C programs have them, thread domains, and parent domains, which are a PD and a thread domain
//! in one.
//!
//! The device does not know parent domains: their objects are in their PD.

use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};

use unirdma_verbs_abi::*;

use crate::Result;

/// A PD, or a parent domain, which stands for the PD that it was made from.
#[repr(C)]
struct PdObj {
    c: ibv_pd,
    /// The PD of a parent domain.
    of: *mut PdObj,
    td: *mut TdObj,
    /// Objects in this PD that [`hold`] counts, and parent domains that were made from it. To the device, objects of a
    /// parent domain are in its PD; only this count knows that they name the parent domain.
    users: AtomicUsize,
}

/// A thread domain.
#[repr(C)]
struct TdObj {
    context: *mut ibv_context,
    users: AtomicUsize,
}

/// Adds an object to a PD. The PD cannot be destroyed before the object has left it.
///
/// # Safety
/// `pd` is NULL or one of this module.
pub unsafe fn hold(pd: *mut ibv_pd) {
    // SAFETY: by the contract.
    if let Some(p) = unsafe { pd.cast::<PdObj>().as_ref() } {
        p.users.fetch_add(1, Ordering::Relaxed);
    }
}

/// An object has left its PD.
///
/// # Safety
/// As for [`hold`], which was called before.
pub unsafe fn release(pd: *mut ibv_pd) {
    // SAFETY: by the contract.
    if let Some(p) = unsafe { pd.cast::<PdObj>().as_ref() } {
        p.users.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The object of a PD.
pub fn new_pd(c: ibv_pd) -> *mut ibv_pd {
    let (of, td) = (std::ptr::null_mut(), std::ptr::null_mut());
    Box::into_raw(Box::new(PdObj { c, of, td, users: AtomicUsize::new(0) })).cast()
}

/// Ends a PD, by `destroy`, or a parent domain.
///
/// # Errors
/// `EBUSY` while something is in it, or the error of `destroy`; the PD lives on.
///
/// # Safety
/// `pd` is one of this module, which nobody uses.
pub unsafe fn dealloc_pd(pd: *mut ibv_pd, destroy: impl FnOnce(*mut ibv_pd) -> Result<()>) -> Result<()> {
    // SAFETY: by the contract.
    let obj = unsafe { &*pd.cast::<PdObj>() };
    if obj.users.load(Ordering::Relaxed) > 0 {
        return Err(libc::EBUSY);
    }
    // SAFETY: NULL, or the origin of this parent domain, which cannot go before it.
    match unsafe { (obj.of.as_ref(), obj.td.as_ref()) } {
        (Some(of), td) => {
            of.users.fetch_sub(1, Ordering::Relaxed);
            if let Some(td) = td {
                td.users.fetch_sub(1, Ordering::Relaxed);
            }
        }
        (None, _) => destroy(pd)?,
    }
    // SAFETY: boxed, and nothing refers to it any more.
    unsafe { drop(Box::from_raw(pd.cast::<PdObj>())) };
    Ok(())
}

/// True for a parent domain whose objects one thread uses at a time.
///
/// # Safety
/// `pd` is NULL or one of this module.
pub unsafe fn has_thread_domain(pd: *mut ibv_pd) -> bool {
    // SAFETY: by the contract.
    unsafe { pd.cast::<PdObj>().as_ref() }.is_some_and(|p| !p.td.is_null())
}

/// Makes a thread domain: queues of its parent domains take no lock.
///
/// # Errors
/// `EINVAL` for unknown attributes.
///
/// # Safety
/// `attr` begins with its `comp_mask`.
pub unsafe fn alloc_td(context: *mut ibv_context, attr: *mut u32) -> Result<*mut c_void> {
    // SAFETY: by the contract.
    if unsafe { *attr } != 0 {
        return Err(libc::EINVAL);
    }
    Ok(Box::into_raw(Box::new(TdObj { context, users: AtomicUsize::new(0) })).cast())
}

/// Destroys a thread domain, and returns its context.
///
/// # Errors
/// `EBUSY` while parent domains have it.
///
/// # Safety
/// `td` is one of this module.
pub unsafe fn dealloc_td(td: *mut c_void) -> Result<*mut ibv_context> {
    // SAFETY: by the contract.
    let obj = unsafe { &*td.cast::<TdObj>() };
    if obj.users.load(Ordering::Relaxed) > 0 {
        return Err(libc::EBUSY);
    }
    let context = obj.context;
    // SAFETY: boxed in alloc_td; nothing refers to it any more.
    unsafe { drop(Box::from_raw(td.cast::<TdObj>())) };
    Ok(context)
}

/// Makes a parent domain. Its allocators are for the memory of queues, which here is the device's or the kernel's: they
/// are accepted, and never needed.
///
/// # Errors
/// `EOPNOTSUPP` for unknown attributes, `EINVAL` for objects of another context or half a pair of allocators.
///
/// # Safety
/// The attributes are valid, and the objects in them are NULL or of this module.
pub unsafe fn alloc_parent(context: *mut ibv_context, a: &ibv_parent_domain_init_attr) -> Result<*mut ibv_pd> {
    const ALLOCATORS: u32 = 1;
    const PD_CONTEXT: u32 = 2;
    if a.comp_mask & !(ALLOCATORS | PD_CONTEXT) != 0 {
        return Err(libc::EOPNOTSUPP);
    }
    // SAFETY: by the contract.
    let of = unsafe { a.pd.cast::<PdObj>().as_ref() }.ok_or(libc::EINVAL)?;
    let half = a.comp_mask & ALLOCATORS != 0 && (a.alloc.is_null() || a.free.is_null());
    if of.c.context != context || half {
        return Err(libc::EINVAL);
    }
    // SAFETY: by the contract.
    let td = unsafe { a.td.cast::<TdObj>().as_ref() };
    if td.is_some_and(|td| td.context != context) {
        return Err(libc::EINVAL);
    }
    of.users.fetch_add(1, Ordering::Relaxed);
    if let Some(td) = td {
        td.users.fetch_add(1, Ordering::Relaxed);
    }
    let c = ibv_pd { context, handle: of.c.handle };
    let obj = PdObj { c, of: a.pd.cast(), td: a.td.cast(), users: AtomicUsize::new(0) };
    Ok(Box::into_raw(Box::new(obj)).cast())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ptr::{null_mut, without_provenance_mut};

    #[test]
    fn a_parent_domain_keeps_what_it_was_made_from() {
        let context: *mut ibv_context = without_provenance_mut(8);
        let pd = new_pd(ibv_pd { context, handle: 7 });
        let mut attr = ibv_parent_domain_init_attr {
            pd,
            td: null_mut(),
            comp_mask: 0,
            alloc: null_mut(),
            free: null_mut(),
            pd_context: null_mut(),
        };
        // SAFETY: objects of this module, which live as long as they are used.
        unsafe {
            assert_eq!(alloc_td(context, &mut 1), Err(libc::EINVAL));
            attr.td = alloc_td(context, &mut 0).unwrap();
            assert_eq!(alloc_parent(without_provenance_mut(16), &attr), Err(libc::EINVAL));
            attr.comp_mask = 1;
            assert_eq!(alloc_parent(context, &attr), Err(libc::EINVAL));
            attr.comp_mask = 4;
            assert_eq!(alloc_parent(context, &attr), Err(libc::EOPNOTSUPP));
            attr.comp_mask = 2;
            let parent = alloc_parent(context, &attr).unwrap();
            assert_eq!((*parent).handle, 7);
            assert!(has_thread_domain(parent) && !has_thread_domain(pd) && !has_thread_domain(null_mut()));
            assert_eq!(dealloc_pd(pd, |_| unreachable!()), Err(libc::EBUSY));
            assert_eq!(dealloc_td(attr.td), Err(libc::EBUSY));
            hold(parent);
            assert_eq!(dealloc_pd(parent, |_| unreachable!()), Err(libc::EBUSY));
            release(parent);
            // It is no object of the device.
            assert_eq!(dealloc_pd(parent, |_| unreachable!()), Ok(()));
            assert_eq!(dealloc_td(attr.td), Ok(context));
            assert_eq!(dealloc_pd(pd, |_| Err(libc::EIO)), Err(libc::EIO));
            assert_eq!(dealloc_pd(pd, |_| Ok(())), Ok(()));
        }
    }
}
