//! Functions that this library does not offer. Each reports an error, and none ends the program.

use std::ffi::{CStr, c_char, c_void};

use unirdma_verbs_abi::*;

use crate::set_errno;
use crate::trace::trace;

fn name(p: *const c_char) -> String {
    // SAFETY: the trampolines pass a string of this library's text.
    unsafe { CStr::from_ptr(p) }.to_string_lossy().into_owned()
}

pub(crate) extern "C" fn stub_null(n: *const c_char) -> *mut c_void {
    trace!("{}: not supported", name(n));
    set_errno(libc::EOPNOTSUPP);
    std::ptr::null_mut()
}

pub(crate) extern "C" fn stub_errno(n: *const c_char) -> i32 {
    trace!("{}: not supported", name(n));
    set_errno(libc::EOPNOTSUPP);
    libc::EOPNOTSUPP
}

pub(crate) extern "C" fn stub_minus_one(n: *const c_char) -> i32 {
    stub_errno(n);
    -1
}

/// There are no completion counters. As in rdma-core, the answer is zeroed for programs that do not look at the error.
pub unsafe extern "C" fn x__ibv_query_comp_cntr_caps(_c: *mut ibv_context, caps: *mut c_void, size: usize) -> i32 {
    // SAFETY: the caller passes `size` bytes of room.
    unsafe { std::ptr::write_bytes(caps.cast::<u8>(), 0, size) };
    stub_errno(c"ibv_query_comp_cntr_caps".as_ptr())
}

/// Nothing to prepare for contexts of our own: a forked child must not use its parent's devices, and gets pages of its
/// own. The real library is told.
pub extern "C" fn x_ibv_fork_init() -> i32 {
    trace!("ibv_fork_init()");
    crate::hosted::fork_init()
}

/// `IBV_FORK_UNNEEDED`, unless a real library answers.
pub extern "C" fn x_ibv_is_fork_initialized() -> i32 {
    crate::hosted::is_fork_initialized().unwrap_or(2)
}

pub unsafe extern "C" fn x_ibv_dontfork_range(base: *mut c_void, size: usize) -> i32 {
    // SAFETY: the caller's range.
    unsafe { crate::hosted::fork_range(base, size, true) }
}

pub unsafe extern "C" fn x_ibv_dofork_range(base: *mut c_void, size: usize) -> i32 {
    // SAFETY: the caller's range.
    unsafe { crate::hosted::fork_range(base, size, false) }
}

/// Data of a WRITE arrives in order, both as a whole and in each 128 bytes; see `docs/spec/virtio-rdma.md`, section
/// 7.6.
pub unsafe extern "C" fn x_ibv_query_qp_data_in_order(_qp: *mut ibv_qp, _op: u32, flags: u32) -> i32 {
    const RETURN_CAPS: u32 = 1;
    const WHOLE_MSG: i32 = 1;
    const ALIGNED_128_BYTES: i32 = 2;
    if flags & RETURN_CAPS != 0 { WHOLE_MSG | ALIGNED_128_BYTES } else { 1 }
}
