//! Mappings of files that somebody else owns, and memory files of our own.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

use crate::fds::Known;
use crate::{Span, guard};

/// Why a file could not be mapped.
#[derive(Debug)]
pub enum MapError {
    /// Not a memory file: mapping it could block on somebody's file system.
    NotMemory,
    /// The range leaves the file, is empty, or is not page aligned.
    BadRange,
    /// The kernel said no.
    Os(io::Error),
}

impl std::fmt::Display for MapError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            MapError::NotMemory => write!(f, "the descriptor is no memfd or shared memory file"),
            MapError::BadRange => write!(f, "the range is empty, unaligned, or leaves the file"),
            MapError::Os(e) => write!(f, "{e}"),
        }
    }
}

impl From<rustix::io::Errno> for MapError {
    fn from(e: rustix::io::Errno) -> Self {
        MapError::Os(e.into())
    }
}

/// A mapping that is unmapped when the last [`Span`] of it goes.
struct Mapping {
    ptr: NonNull<u8>,
    len: usize,
}

// SAFETY: owns an address range and nothing else; unmapping works from any thread.
unsafe impl Send for Mapping {}
// SAFETY: as for Send; it has no methods that touch the memory.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        guard::forget(self.ptr.as_ptr() as usize);
        // SAFETY: the range was mapped by `reserve`; no Span of it is left, since each holds this.
        let _ = unsafe { rustix::mm::munmap(self.ptr.as_ptr().cast(), self.len) };
    }
}

fn page() -> u64 {
    rustix::param::page_size() as u64
}

fn reserve(len: usize) -> Result<Mapping, MapError> {
    // SAFETY: a fresh anonymous mapping at an address of the kernel's choice.
    let p = unsafe {
        rustix::mm::mmap_anonymous(
            std::ptr::null_mut(),
            len,
            ProtFlags::empty(),
            MapFlags::PRIVATE | MapFlags::NORESERVE,
        )
    }?;
    let ptr = NonNull::new(p.cast::<u8>()).ok_or(MapError::BadRange)?;
    Ok(Mapping { ptr, len })
}

/// True if `fd` is memory (tmpfs, memfd, hugetlbfs), so that touching it cannot wait for a file server.
fn is_memory(fd: BorrowedFd<'_>) -> bool {
    const TMPFS_MAGIC: u64 = 0x0102_1994;
    const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;
    rustix::fs::fstatfs(fd).is_ok_and(|s| [TMPFS_MAGIC, HUGETLBFS_MAGIC].contains(&(s.f_type as u64)))
}

/// Maps bytes `[off, off + len)` of a memory file that a peer sent.
///
/// # Errors
/// See [`MapError`]. `off` must be page aligned.
pub fn map_file(fd: BorrowedFd<'_>, off: u64, len: u64) -> Result<Span, MapError> {
    map_pieces(&[(fd, off, len)])
}

/// Maps pieces of memory files one after the other into one contiguous window (U20). All but the last
/// must be whole pages long.
///
/// # Errors
/// See [`MapError`].
pub fn map_pieces(pieces: &[(BorrowedFd<'_>, u64, u64)]) -> Result<Span, MapError> {
    let mut total = 0u64;
    for (i, &(fd, off, len)) in pieces.iter().enumerate() {
        if !is_memory(fd) {
            return Err(MapError::NotMemory);
        }
        let size = rustix::fs::fstat(fd)?.st_size as u64;
        let in_file = off.checked_add(len).is_some_and(|end| end <= size);
        let whole = len % page() == 0 || i + 1 == pieces.len();
        if len == 0 || off % page() != 0 || !in_file || !whole {
            return Err(MapError::BadRange);
        }
        total = total.checked_add(len).ok_or(MapError::BadRange)?;
    }
    let len = usize::try_from(total).map_err(|_| MapError::BadRange)?;
    let mapping = reserve(len)?;
    let mut at = mapping.ptr.as_ptr();
    for &(fd, off, len) in pieces {
        // SAFETY: replaces a part of the range that `mapping` reserved and owns.
        unsafe {
            rustix::mm::mmap(
                at.cast(),
                len as usize,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::FIXED,
                fd,
                off,
            )
        }?;
        at = at.wrapping_add(len as usize);
    }
    if !guard::remember(mapping.ptr.as_ptr() as usize, len) {
        return Err(MapError::Os(io::Error::other("too many mappings")));
    }
    let ptr = mapping.ptr;
    // SAFETY: the whole range is mapped read-write for the life of `mapping`.
    Ok(unsafe { Span::new(ptr, len, Arc::new(mapping)) })
}

/// Gives a file of our own its size. Beyond the process's `RLIMIT_FSIZE` that is an error and no signal: SIGXFSZ would end
/// a program that knows nothing of this file.
///
/// # Errors
/// Those of `ftruncate(2)`: `EFBIG` beyond the limit.
pub fn set_size(fd: BorrowedFd<'_>, len: u64) -> rustix::io::Result<()> {
    if rustix::process::getrlimit(rustix::process::Resource::Fsize).current.is_none() {
        return rustix::fs::ftruncate(fd, len);
    }
    // The kernel sends the signal to this thread, which takes it off again, unless one was pending before.
    // SAFETY: signal sets of this function; masks and pending signals are this thread's.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        let (mut old, mut pending) = (set, set);
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, libc::SIGXFSZ);
        libc::pthread_sigmask(libc::SIG_BLOCK, &set, &mut old);
        libc::sigpending(&mut pending);
        let r = rustix::fs::ftruncate(fd, len);
        if r == Err(rustix::io::Errno::FBIG) && libc::sigismember(&pending, libc::SIGXFSZ) == 0 {
            let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
            libc::sigtimedwait(&set, std::ptr::null_mut(), &now);
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, &old, std::ptr::null_mut());
        r
    }
}

/// A sealed memory file of our own, mapped here, to be shared.
pub struct MemFd {
    fd: Known,
    span: Span,
}

impl MemFd {
    /// A zeroed file of `len` bytes, rounded up to pages. It cannot shrink.
    ///
    /// # Errors
    /// Those of `memfd_create(2)`, `ftruncate(2)` (also `EFBIG` where it raises SIGXFSZ, see [`set_size`]) and `mmap(2)`.
    pub fn new(name: &CStr, len: usize) -> Result<Self, MapError> {
        let len = (len as u64).checked_next_multiple_of(page()).ok_or(MapError::BadRange)?;
        let file = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        let fd = Known::new(file).map_err(MapError::Os)?;
        set_size(fd.as_fd(), len)?;
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let span = map_file(fd.as_fd(), 0, len)?;
        Ok(MemFd { fd, span })
    }

    /// The descriptor to send.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// The memory.
    pub fn span(&self) -> &Span {
        &self.span
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;

    #[test]
    fn pieces_come_in_order_whatever_their_place_in_the_file() {
        let f = MemFd::new(c"t", 3 * 4096).unwrap();
        for i in 0..3u32 {
            f.span().store32(i as usize * 4096, i + 1, Ordering::Relaxed);
        }
        let m = map_pieces(&[(f.fd(), 8192, 4096), (f.fd(), 0, 4096), (f.fd(), 4096, 100)]).unwrap();
        assert_eq!(m.len(), 8292);
        let at = |o| m.load32(o, Ordering::Relaxed);
        assert_eq!((at(0), at(4096), at(8192)), (3, 1, 2));
    }

    /// In a child: the limit is the process's.
    #[test]
    fn a_file_beyond_the_limit_is_an_error_and_no_signal() {
        // SAFETY: the child makes system calls and memory files, and ends.
        unsafe {
            let child = libc::fork();
            if child == 0 {
                let limit = libc::rlimit { rlim_cur: 1 << 20, rlim_max: 1 << 20 };
                libc::setrlimit(libc::RLIMIT_FSIZE, &limit);
                let too_big = |r| matches!(r, Err(MapError::Os(e)) if io::Error::raw_os_error(&e) == Some(libc::EFBIG));
                let refused = too_big(MemFd::new(c"t", 2 << 20)) && too_big(MemFd::new(c"t", 2 << 20));
                let works = MemFd::new(c"t", 1 << 20).is_ok();
                // A signal that was pending before stays so.
                let mut set: libc::sigset_t = std::mem::zeroed();
                libc::sigemptyset(&mut set);
                libc::sigaddset(&mut set, libc::SIGXFSZ);
                libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut());
                libc::raise(libc::SIGXFSZ);
                let refused_again = too_big(MemFd::new(c"t", 2 << 20));
                libc::sigpending(&mut set);
                let kept = libc::sigismember(&set, libc::SIGXFSZ) == 1;
                libc::_exit(i32::from(!(refused && works && refused_again && kept)));
            }
            let mut status = -1;
            assert_eq!(libc::waitpid(child, &mut status, 0), child);
            assert_eq!(status, 0, "the child ended with status {status:#x}");
        }
    }

    #[test]
    fn what_is_not_memory_or_leaves_the_file_is_refused() {
        let f = MemFd::new(c"t", 4096).unwrap();
        assert!(matches!(map_file(f.fd(), 0, 4097), Err(MapError::BadRange)));
        assert!(matches!(map_file(f.fd(), 1, 10), Err(MapError::BadRange)));
        assert!(matches!(map_file(f.fd(), 0, 0), Err(MapError::BadRange)));
        assert!(matches!(map_file(f.fd(), !4095, 8192), Err(MapError::BadRange)));
        let exe = std::fs::File::open("/proc/self/exe").unwrap();
        assert!(matches!(map_file(exe.as_fd(), 0, 4096), Err(MapError::NotMemory)));
    }

    #[test]
    fn a_truncated_file_reads_as_zeros_instead_of_ending_the_process() {
        guard::install();
        let fd = rustix::fs::memfd_create(c"t", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, 8192).unwrap();
        let m = map_file(fd.as_fd(), 0, 8192).unwrap();
        m.store32(4096, 7, Ordering::Relaxed);
        rustix::fs::ftruncate(&fd, 4096).unwrap();
        let before = guard::faults();
        assert_eq!(m.load32(4096, Ordering::Relaxed), 0);
        assert_eq!(guard::faults(), before + 1);
        m.store32(4096, 9, Ordering::Relaxed);
        assert_eq!(m.load32(4096, Ordering::Relaxed), 9);
    }
}
