//! Memory regions.

use std::ffi::c_void;

use unirdma_driver as driver;
use unirdma_verbs_abi::*;

use crate::device::context;
use crate::trace::trace;
use crate::{code, null};

#[repr(C)]
struct MrObj {
    c: ibv_mr,
    mr: driver::Mr,
}

unsafe fn register(pd: *mut ibv_pd, addr: *mut c_void, length: usize, iova: u64, access: u32) -> *mut ibv_mr {
    // SAFETY: the caller passes its PD.
    let (c, pdn) = unsafe { ((*pd).context, (*pd).handle) };
    // SAFETY: a PD's context is open.
    let ctx = unsafe { context(c) };
    match driver::Mr::register(&ctx.driver, pdn, addr as u64, length as u64, iova, access) {
        Ok(mr) => {
            trace!("ibv_reg_mr({addr:p}, {length}, {access:#x}) = key {:#x}, way {:?}", mr.key, mr.way);
            ctx.born();
            let c = ibv_mr { context: c, pd, addr, length, handle: mr.mrn, lkey: mr.key, rkey: mr.key };
            Box::into_raw(Box::new(MrObj { c, mr })).cast()
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

/// Memory that is shared with the virtual layer from the start (rdma-core 65).
pub unsafe extern "C" fn x_ibv_alloc_buf(_pd: *mut ibv_pd, size: usize, buf: *mut *mut driver::Buffer) -> *mut c_void {
    match driver::Buffer::new(size) {
        Ok(b) => {
            let addr = b.addr() as *mut c_void;
            trace!("ibv_alloc_buf({size}) = {addr:p}");
            // SAFETY: the caller passes room for the handle.
            unsafe { *buf = Box::into_raw(Box::new(b)) };
            addr
        }
        Err(e) => null(e),
    }
}

pub unsafe extern "C" fn x_ibv_free_buf(buf: *mut driver::Buffer) {
    trace!("ibv_free_buf()");
    if !buf.is_null() {
        // SAFETY: boxed in ibv_alloc_buf, given back once.
        unsafe { drop(Box::from_raw(buf)) };
    }
}

pub unsafe extern "C" fn x_ibv_reg_buf_mr(
    pd: *mut ibv_pd,
    buf: *mut driver::Buffer,
    addr: *mut c_void,
    length: usize,
    access: i32,
) -> *mut ibv_mr {
    // SAFETY: the caller passes a live handle of ibv_alloc_buf.
    if !unsafe { &*buf }.holds(addr as usize, length) {
        return null(libc::EINVAL);
    }
    // SAFETY: as ibv_reg_mr.
    unsafe { register(pd, addr, length, addr as u64, access as u32) }
}

/// Not offered yet: `IBV_REREG_MR_ERR_INPUT`, which says that the MR is as it was.
pub unsafe extern "C" fn x_ibv_rereg_mr(
    _mr: *mut ibv_mr,
    _flags: i32,
    _pd: *mut ibv_pd,
    _addr: *mut c_void,
    _length: usize,
    _access: i32,
) -> i32 {
    trace!("ibv_rereg_mr: not supported");
    crate::set_errno(libc::EOPNOTSUPP);
    -1
}

pub unsafe extern "C" fn x_ibv_dereg_mr(mr: *mut ibv_mr) -> i32 {
    // SAFETY: the caller passes its MR, boxed in `register`.
    let mut obj = unsafe { Box::from_raw(mr.cast::<MrObj>()) };
    let r = obj.mr.deregister();
    trace!("ibv_dereg_mr({:#x}) = {r:?}", obj.c.lkey);
    if r.is_err() {
        let _ = Box::into_raw(obj);
    } else {
        // SAFETY: an MR's context is open, or kept for its sake.
        unsafe { context(obj.c.context) }.gone();
    }
    code(r)
}
