//! Memory regions.

use std::ffi::c_void;

use unirdma_driver as driver;
use unirdma_verbs_abi::*;

use unirdma_formats::access::ZERO_BASED;

use crate::device::context;
use crate::trace::trace;
use crate::{code, lock, null};

#[repr(C)]
pub(crate) struct MrObj {
    c: ibv_mr,
    mr: driver::Mr,
    range: Range,
    /// A null MR. Its PD may be deallocated before it, which also ends the MR.
    is_null: bool,
}

unsafe fn register(pd: *mut ibv_pd, addr: *mut c_void, length: usize, iova: u64, access: u32) -> *mut ibv_mr {
    let iova = if access & ZERO_BASED != 0 { 0 } else { iova };
    // SAFETY: by the contract.
    unsafe { register_named(pd, addr, length, iova, access, addr) }
}

/// Makes the C object of an MR for the program.
///
/// # Safety
/// `c` names the caller's PD, and its context.
unsafe fn keep(c: ibv_mr, mr: driver::Mr, range: Range) -> *mut ibv_mr {
    // SAFETY: by the contract.
    let ctx = unsafe {
        crate::domain::hold(c.pd);
        context(c.context)
    };
    ctx.born();
    let (key, obj) = (mr.key, Box::into_raw(Box::new(MrObj { c, mr, range, is_null: false })));
    lock(&ctx.mrs).insert(key, obj);
    obj.cast()
}

/// As `register`, for an MR that its program knows under another address.
///
/// # Safety
/// `pd` is the caller's.
pub(crate) unsafe fn register_named(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: u32,
    name: *mut c_void,
) -> *mut ibv_mr {
    // Fails before anything is looked up, which takes memory.
    if driver::HEAP.is_low() {
        return null(libc::ENOMEM);
    }
    // SAFETY: the caller passes its PD.
    let (c, pdn) = unsafe { ((*pd).context, (*pd).handle) };
    // SAFETY: a PD's context is open.
    let ctx = unsafe { context(c) };
    let range = Range { addr, length, iova_offset: iova.wrapping_sub(addr as u64), access };
    match register_range(&ctx.driver, pdn, range) {
        Ok(mr) => {
            let (way, why) = mr.way();
            trace!("ibv_reg_mr({addr:p}, {length}, {access:#x}) = key {:#x}, way {way:?}: {}", mr.key, why.text());
            let c = ibv_mr { context: c, pd, addr: name, length, handle: mr.mrn, lkey: mr.key, rkey: mr.key };
            // SAFETY: the caller's PD.
            unsafe { keep(c, mr, range) }
        }
        Err(e) => {
            trace!("ibv_reg_mr({addr:p}, {length}, {access:#x}): errno {e}");
            null(e)
        }
    }
}

pub unsafe extern "C" fn x_ibv_reg_mr(pd: *mut ibv_pd, addr: *mut c_void, length: usize, access: i32) -> *mut ibv_mr {
    // SAFETY: the caller's PD; the range is checked against the address space.
    unsafe { register(pd, addr, length, addr as u64, access as u32) }
}

pub unsafe extern "C" fn x_ibv_reg_mr_iova(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: i32,
) -> *mut ibv_mr {
    // SAFETY: as ibv_reg_mr.
    unsafe { register(pd, addr, length, iova, access as u32) }
}

pub unsafe extern "C" fn x_ibv_reg_mr_iova2(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: u32,
) -> *mut ibv_mr {
    // SAFETY: as ibv_reg_mr.
    unsafe { register(pd, addr, length, iova, access) }
}

/// The device cannot import the memory of other devices, because memory behind such a descriptor need not be mappable.
/// Programs that ask (NCCL, UCX) copy through the host's memory after this answer; they take any other error for a
/// device that could.
pub unsafe extern "C" fn x_ibv_reg_dmabuf_mr(
    _pd: *mut ibv_pd,
    offset: u64,
    length: usize,
    _iova: u64,
    fd: i32,
    _access: i32,
) -> *mut ibv_mr {
    trace!("ibv_reg_dmabuf_mr(offset {offset:#x}, {length}, fd {fd})");
    null(libc::EOPNOTSUPP)
}

/// Parameters of a registration.
#[derive(Clone, Copy)]
struct Range {
    addr: *mut c_void,
    length: usize,
    /// Distance of the address that WQEs use from `addr`.
    iova_offset: u64,
    access: u32,
}

const REREG_TRANSLATION: i32 = 1;
const REREG_PD: i32 = 2;
const REREG_ACCESS: i32 = 4;
/// `IBV_REREG_MR_ERR_INPUT`: bad input; the MR is as it was.
const REREG_ERR_INPUT: i32 = -1;
/// `IBV_REREG_MR_ERR_CMD`: the device has refused; the MR is as it was.
const REREG_ERR_CMD: i32 = -4;

/// Makes a new registration first, which then takes the old one's place, so that a failure changes nothing. The keys
/// stay.
pub unsafe extern "C" fn x_ibv_rereg_mr(
    mr: *mut ibv_mr,
    flags: i32,
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: i32,
) -> i32 {
    // SAFETY: the caller passes its MR.
    let obj = unsafe { &mut *mr.cast::<MrObj>() };
    let translation = flags & REREG_TRANSLATION != 0;
    let known = REREG_TRANSLATION | REREG_PD | REREG_ACCESS;
    let bad = flags == 0
        || flags & !known != 0
        || obj.is_null
        || translation && (addr.is_null() || length == 0)
        || flags & REREG_PD != 0 && pd.is_null();
    trace!("ibv_rereg_mr({:#x}, flags {flags:#x})", obj.c.lkey);
    if bad {
        crate::set_errno(libc::EINVAL);
        return REREG_ERR_INPUT;
    }
    let mut range = obj.range;
    if translation {
        range = Range { addr, length, iova_offset: 0, ..range };
    }
    if flags & REREG_ACCESS != 0 {
        range.access = access as u32;
    }
    let pd = if flags & REREG_PD != 0 { pd } else { obj.c.pd };
    // SAFETY: the MR's context is open; the PD is the caller's.
    let (ctx, pdn) = unsafe { (context(obj.c.context), (*pd).handle) };
    let replaced = register_range(&ctx.driver, pdn, range).and_then(|new| obj.mr.replace(new));
    trace!("ibv_rereg_mr: {replaced:?}");
    if let Err(e) = replaced {
        crate::set_errno(e);
        return REREG_ERR_CMD;
    }
    // SAFETY: both are PDs of this library.
    unsafe {
        crate::domain::hold(pd);
        crate::domain::release(obj.c.pd);
    }
    (obj.range, obj.c.pd, obj.c.addr, obj.c.length) = (range, pd, range.addr, range.length);
    0
}

/// The address in this process of an SGE's bytes, if its MR exists, belongs to this PD, and lets the device write to
/// it.
pub(crate) fn memory(ctx: &crate::device::ContextObj, pdn: u32, s: &unirdma_abi::Sge) -> Option<*mut u8> {
    // SAFETY: the table holds live MRs only, and is locked; an MR's PD lives.
    let (range, of) = lock(&ctx.mrs).get(&s.lkey).map(|&mr| unsafe { ((*mr).range, (*(*mr).c.pd).handle) })?;
    let skip = s.addr.wrapping_sub(range.iova_offset).wrapping_sub(range.addr as u64);
    let end = skip.checked_add(s.length.into())?;
    let may = of == pdn && range.access & unirdma_formats::access::LOCAL_WRITE != 0 && end <= range.length as u64;
    may.then(|| range.addr.cast::<u8>().wrapping_add(skip as usize))
}

fn register_range(ctx: &std::sync::Arc<driver::Context>, pdn: u32, r: Range) -> Result<driver::Mr, i32> {
    let addr = r.addr as u64;
    driver::Mr::register(ctx, pdn, addr, r.length as u64, addr.wrapping_add(r.iova_offset), r.access)
}

/// `ibv_advise_mr(3)`: pages of an on-demand MR are looked up at each access, so there is nothing to prefetch. The
/// request is checked as a device would.
pub(crate) unsafe extern "C" fn advise_mr(pd: *mut ibv_pd, advice: u32, flags: u32, list: *mut ibv_sge, n: u32) -> i32 {
    const LAST_ADVICE: u32 = 2;
    const FLUSH: u32 = 1;
    // SAFETY: the caller passes its PD; its context is open.
    let ctx = unsafe { context((*pd).context) };
    trace!("ibv_advise_mr(advice {advice}, {n} ranges)");
    if advice > LAST_ADVICE || flags & !FLUSH != 0 || n == 0 || list.is_null() {
        return libc::EINVAL;
    }
    for i in 0..n as usize {
        // SAFETY: the caller's list has `n` elements.
        let s = unsafe { *list.add(i) };
        // SAFETY: the table holds live MRs only, and is locked.
        let found = lock(&ctx.mrs).get(&s.lkey).map(|&mr| unsafe { ((*mr).c.pd, (*mr).range) });
        let Some((mr_pd, range)) = found else { return libc::ENOENT };
        let start = range.addr as u64;
        let end = start.saturating_add(range.length as u64);
        if mr_pd != pd {
            return libc::ENOENT;
        }
        // Advice 1 is `IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE`.
        if advice == 1 && range.access & unirdma_formats::access::LOCAL_WRITE == 0 {
            return libc::EPERM;
        }
        if s.addr < start || s.addr.saturating_add(s.length.into()) > end {
            return libc::EFAULT;
        }
    }
    0
}

pub(crate) unsafe extern "C" fn alloc_null_mr(pd: *mut ibv_pd) -> *mut ibv_mr {
    // SAFETY: the caller passes its PD; its context is open.
    let (c, pdn) = unsafe { ((*pd).context, (*pd).handle) };
    // SAFETY: as above.
    let ctx = unsafe { context(c) };
    match driver::Mr::null(&ctx.driver, pdn) {
        Ok(mr) => {
            trace!("ibv_alloc_null_mr() = key {:#x}", mr.key);
            let addr = std::ptr::null_mut();
            let range = Range { addr, length: 0, iova_offset: 0, access: unirdma_formats::access::LOCAL_WRITE };
            let c = ibv_mr { context: c, pd, addr, length: 0, handle: mr.mrn, lkey: mr.key, rkey: 0 };
            ctx.born();
            Box::into_raw(Box::new(MrObj { c, mr, range, is_null: true })).cast()
        }
        Err(e) => null(e),
    }
}

pub unsafe extern "C" fn x_ibv_dereg_mr(mr: *mut ibv_mr) -> i32 {
    // SAFETY: the caller passes its MR, boxed in `register`.
    let mut obj = unsafe { Box::from_raw(mr.cast::<MrObj>()) };
    // SAFETY: an MR's context is open, or kept for its sake.
    let ctx = unsafe { context(obj.c.context) };
    let r = obj.mr.deregister();
    trace!("ibv_dereg_mr({:#x}) = {r:?}", obj.c.lkey);
    if obj.is_null {
        // If the device does not have it any more, it went with its PD.
        ctx.gone();
        return 0;
    }
    if r.is_err() {
        let _ = Box::into_raw(obj);
    } else {
        lock(&ctx.mrs).remove(&obj.c.lkey);
        // SAFETY: its PD lives.
        unsafe { crate::domain::release(obj.c.pd) };
        ctx.gone();
    }
    code(r)
}
