//! Holes of sparse memory files. The kernel charges a page to the process that touches it first, so a program could let
//! the virtual layer make pages that nobody counts. With a userfaultfd the kernel makes no page at such a touch and
//! raises SIGBUS instead; [`crate::guard`] then asks the [`Account`] of the mapping, and makes the page itself.
//! Touching pages that are there costs nothing more.

use std::cell::Cell;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{Ordering, compiler_fence};

const API: libc::c_ulong = 0xc018_aa3f;
const REGISTER: libc::c_ulong = 0xc020_aa00;
/// `UFFDIO_REGISTER` as the second argument of `ioctl(2)`, for filters of system calls.
pub const WATCH_REQUEST: u32 = REGISTER as u32;
const ZEROPAGE: libc::c_ulong = 0xc020_aa04;
/// `UFFDIO_ZEROPAGE`, as above.
pub const FILL_REQUEST: u32 = ZEROPAGE as u32;

const VERSION: u64 = 0xaa;
const FEATURE_MISSING_SHMEM: u64 = 1 << 5;
const FEATURE_SIGBUS: u64 = 1 << 7;
const USER_MODE_ONLY: i32 = 1;
const MODE_MISSING: u64 = 1;

/// The answer of an account about pages that are about to be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Room {
    /// They are counted.
    Enough,
    /// They are counted, and somebody should check ([`crate::guard::events`]) how many of the earlier ones are still
    /// there.
    Little,
    /// There is no room for them.
    None,
}

/// The account of pages that are made in the holes of a mapping's files. Its methods are called in a signal handler:
/// they use atomics only.
pub trait Account: Send + Sync {
    /// Counts `bytes`, if there is room.
    fn take(&self, bytes: u64) -> Room;

    /// Follows each [`Account::take`] that found room: of `taken` bytes that were counted, `made` were made. The others
    /// count no more.
    fn end(&self, taken: u64, made: u64);
}

/// The holes that a thread has touched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Touched {
    /// Number of times. A run of pages that is made at once counts as one.
    pub times: u64,
    /// The address that it touched last.
    pub last: usize,
}

thread_local! {
    static TOUCHED: Cell<Touched> = const { Cell::new(Touched { times: 0, last: 0 }) };
    /// The addresses that the present copy of this thread reads and writes, and its length. Only for copies of more
    /// than a page.
    static COPY: Cell<([usize; 2], usize)> = const { Cell::new(([0; 2], 0)) };
}

/// Copies `len` bytes from `src` to `dst`, and lets the pages of holes in either range be made at once instead of one
/// by one.
///
/// # Safety
/// That of [`std::ptr::copy`].
pub(crate) unsafe fn copy(src: *const u8, dst: *mut u8, len: usize) {
    COPY.set(([src.addr(), dst.addr()], len));
    // The handler that reads it interrupts this thread.
    compiler_fence(Ordering::SeqCst);
    // SAFETY: by the contract.
    unsafe { std::ptr::copy(src, dst, len) };
    compiler_fence(Ordering::SeqCst);
    COPY.set(([0; 2], 0));
}

/// Bytes from `addr` on that the present copy of this thread will touch; 0 if there is none. It is called in a signal
/// handler.
pub(crate) fn copied_from(addr: usize) -> usize {
    let (starts, len) = COPY.get();
    starts.iter().map(|start| len.saturating_sub(addr.wrapping_sub(*start))).max().unwrap_or(0)
}

/// The holes with an account that this thread has touched. A thread that has a lock of several tenants thus finds out
/// whether it has touched one, and whose memory it was.
#[inline]
pub fn touched() -> Touched {
    TOUCHED.get()
}

/// This thread has touched a hole. It is called in a signal handler: the variables need no initialization and no
/// destructor.
pub(crate) fn note(addr: usize) {
    TOUCHED.set(Touched { times: TOUCHED.get().times + 1, last: addr });
}

/// A userfaultfd that raises SIGBUS.
pub(crate) struct Watch(OwnedFd);

/// The result of making pages.
pub(crate) enum Filled {
    /// This number of bytes is there now.
    Bytes(u64),
    /// No page was made, because another thread has made the first one, or because mappings change at this moment.
    Nothing,
    /// No page is possible: the file has no such page, or there is no memory.
    Impossible,
}

impl Watch {
    /// # Errors
    /// The kernel or a container offers no userfaultfd to this process, or none with these features.
    pub fn open() -> io::Result<Self> {
        // SAFETY: makes a descriptor, which nobody else owns.
        let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK | USER_MODE_ONLY) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: as above.
        let watch = Watch(unsafe { OwnedFd::from_raw_fd(fd as RawFd) });
        let mut api = [VERSION, FEATURE_MISSING_SHMEM | FEATURE_SIGBUS, 0];
        watch.ioctl(API, api.as_mut_ptr()).map_err(io::Error::from_raw_os_error)?;
        Ok(watch)
    }

    /// Raises SIGBUS from now on in each thread that touches a hole in the range.
    ///
    /// # Errors
    /// Those of `UFFDIO_REGISTER`.
    pub fn begin(&self, at: usize, len: usize) -> io::Result<()> {
        let mut arg = [at as u64, len as u64, MODE_MISSING, 0];
        self.ioctl(REGISTER, arg.as_mut_ptr()).map_err(io::Error::from_raw_os_error)
    }

    /// Makes the pages of a range, up to the first one that is there. It is called in a signal handler.
    pub fn fill(&self, at: usize, len: u64) -> Filled {
        let mut arg = [at as u64, len, 0, 0];
        let done = self.ioctl(ZEROPAGE, arg.as_mut_ptr());
        // The kernel returns the number of bytes that it has made, or a negative error.
        match (done, arg[3].cast_signed()) {
            (Ok(()), _) => Filled::Bytes(len),
            (Err(_), bytes) if bytes > 0 => Filled::Bytes(bytes.cast_unsigned()),
            (Err(libc::EEXIST | libc::EAGAIN), _) => Filled::Nothing,
            _ => Filled::Impossible,
        }
    }

    /// The error is an errno.
    fn ioctl(&self, request: libc::c_ulong, arg: *mut u64) -> Result<(), i32> {
        // SAFETY: each caller passes a structure of that request, as long as it says.
        let r = unsafe { libc::ioctl(self.0.as_raw_fd(), request, arg) };
        // SAFETY: the C library's location of this thread's errno.
        if r == 0 { Ok(()) } else { Err(unsafe { *libc::__errno_location() }) }
    }
}
