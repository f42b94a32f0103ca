//! Memory made by the kernel or for C: rings to map, and zeroed objects.

use std::alloc::{Layout, alloc_zeroed};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;

use unirdma_mem::{MapError, Span, map_device};
use unirdma_verbs_abi::ibv_context;

/// The errno for an answer of the kernel that makes no sense.
pub const NONSENSE: i32 = libc::EPROTO;

/// Maps `size` bytes that the kernel driver offers at `offset`.
///
/// # Errors
/// The errno of `mmap(2)`, or [`NONSENSE`].
///
/// # Safety
/// `ctx` is a context with an open device file.
pub unsafe fn map(ctx: *mut ibv_context, offset: u64, size: u64) -> Result<Span, i32> {
    // SAFETY: the descriptor is open as long as the context.
    let fd = unsafe { BorrowedFd::borrow_raw((*ctx).cmd_fd) };
    map_device(fd, offset, size).map_err(|e| match e {
        MapError::Os(e) => e.raw_os_error().unwrap_or(libc::EIO),
        _ => NONSENSE,
    })
}

/// Zeroed memory for an object that C knows by its address before it is complete.
///
/// # Errors
/// `ENOMEM`.
pub fn room<T>() -> Result<Box<MaybeUninit<T>>, i32> {
    const { assert!(size_of::<T>() > 0) };
    // SAFETY: the layout is of more than 0 bytes.
    let p = unsafe { alloc_zeroed(Layout::new::<MaybeUninit<T>>()) };
    if p.is_null() {
        return Err(libc::ENOMEM);
    }
    // SAFETY: just allocated with the layout of the type, to which no bytes are invalid.
    Ok(unsafe { Box::from_raw(p.cast()) })
}
