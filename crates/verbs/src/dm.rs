//! Device memory, which both the virtual layer and the program have mapped. It is reached by copies and by zero-based
//! MRs.

use std::ffi::c_void;

use unirdma_driver as driver;
use unirdma_formats::access;
use unirdma_verbs_abi::*;

use crate::device::context;
use crate::mr::register_named;
use crate::trace::trace;
use crate::{code, null};

/// Largest piece, bytes, as `ibv_query_device_ex` reports it.
pub(crate) const MAX_BYTES: u64 = 16 << 20;
/// Copies are made of whole words, as on hardware with such memory.
const WORD: u64 = 4;
const MAX_LOG_ALIGN: u32 = 12;

#[repr(C)]
pub(crate) struct DmObj {
    c: ibv_dm,
    memory: driver::Buffer,
    len: u64,
}

pub(crate) unsafe extern "C" fn alloc_dm(c: *mut ibv_context, attr: *mut ibv_alloc_dm_attr) -> *mut ibv_dm {
    // SAFETY: the caller passes its context and attributes.
    let (ctx, a) = unsafe { (context(c), &*attr) };
    trace!("ibv_alloc_dm({} bytes)", a.length);
    if a.comp_mask != 0 || a.log_align_req > MAX_LOG_ALIGN {
        return null(libc::EINVAL);
    }
    if a.length as u64 > MAX_BYTES {
        return null(libc::ENOMEM);
    }
    match driver::Buffer::new(a.length) {
        Ok(memory) => {
            ctx.born();
            let c = ibv_dm {
                context: c,
                memcpy_to_dm: Some(copy_to),
                memcpy_from_dm: Some(copy_from),
                comp_mask: 0,
                handle: 0,
            };
            Box::into_raw(Box::new(DmObj { c, memory, len: a.length as u64 })).cast()
        }
        Err(e) => null(e),
    }
}

pub(crate) unsafe extern "C" fn free_dm(dm: *mut ibv_dm) -> i32 {
    trace!("ibv_free_dm()");
    // SAFETY: the caller gives its memory back, boxed in alloc_dm; MRs keep what they use mapped.
    unsafe {
        let obj = Box::from_raw(dm.cast::<DmObj>());
        context(obj.c.context).gone();
    }
    0
}

impl DmObj {
    /// The address of `[off, off + len)`, if the range is valid.
    fn range(&self, off: u64, len: usize) -> Result<*mut u8, i32> {
        let len = len as u64;
        let inside = off.checked_add(len).is_some_and(|end| end <= self.len);
        if off % WORD != 0 || len % WORD != 0 || !inside {
            return Err(libc::EINVAL);
        }
        Ok((self.memory.addr() as u64 + off) as *mut u8)
    }
}

unsafe extern "C" fn copy_to(dm: *mut ibv_dm, off: u64, host: *const c_void, len: usize) -> i32 {
    // SAFETY: the caller passes its memory.
    match unsafe { &*dm.cast::<DmObj>() }.range(off, len) {
        Ok(to) => {
            // SAFETY: checked above; the caller vouches for its own bytes.
            unsafe { std::ptr::copy(host.cast::<u8>(), to, len) };
            0
        }
        Err(e) => code(Err(e)),
    }
}

unsafe extern "C" fn copy_from(host: *mut c_void, dm: *mut ibv_dm, off: u64, len: usize) -> i32 {
    // SAFETY: the caller passes its memory.
    match unsafe { &*dm.cast::<DmObj>() }.range(off, len) {
        Ok(from) => {
            // SAFETY: checked above; the caller vouches for its own room.
            unsafe { std::ptr::copy(from, host.cast::<u8>(), len) };
            0
        }
        Err(e) => code(Err(e)),
    }
}

pub(crate) unsafe extern "C" fn reg_dm_mr(
    pd: *mut ibv_pd,
    dm: *mut ibv_dm,
    off: u64,
    len: usize,
    flags: u32,
) -> *mut ibv_mr {
    // SAFETY: the caller passes its memory.
    let obj = unsafe { &*dm.cast::<DmObj>() };
    // Its addresses mean nothing to programs (ibv_alloc_dm(3)).
    if flags & access::ZERO_BASED == 0 {
        return null(libc::EINVAL);
    }
    match obj.range(off, len) {
        // SAFETY: the caller's PD; the range is ours.
        Ok(at) => unsafe { register_named(pd, at.cast(), len, 0, flags, std::ptr::null_mut()) },
        Err(e) => null(e),
    }
}
