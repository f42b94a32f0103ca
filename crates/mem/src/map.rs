//! Mappings of files that somebody else owns, and memory files of our own.

use std::any::Any;
use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, MremapFlags, ProtFlags};

use crate::Span;
use crate::fds::Known;
use crate::guard::{self, Slot};
use crate::holes::Account;

/// Why a file could not be mapped.
#[derive(Debug)]
pub enum MapError {
    /// Not a memory file: an access to a mapping could wait for a file system.
    NotMemory,
    /// The range leaves the file, is empty, or is not page aligned.
    BadRange,
    /// The kernel refused.
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
    /// Its slot in the table of mappings whose faults are survived, once it has one.
    slot: Option<Slot>,
    /// A value of the mapping's creator that lives as long as the mapping.
    _hold: Box<dyn Any + Send + Sync>,
}

// SAFETY: owns an address range and nothing else; unmapping works from any thread.
unsafe impl Send for Mapping {}
// SAFETY: as for Send; it has no methods that touch the memory.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        self.slot.iter().for_each(guard::forget);
        // SAFETY: the range is this mapping's own; no Span of it is left, since each holds this.
        let _ = unsafe { rustix::mm::munmap(self.ptr.as_ptr().cast(), self.len) };
    }
}

fn page() -> u64 {
    rustix::param::page_size() as u64
}

/// Reserves addresses: `len` bytes from a multiple of `align` on, both whole pages.
fn reserve(len: usize, align: usize, hold: Box<dyn Any + Send + Sync>) -> Result<Mapping, MapError> {
    let slack = align - page() as usize;
    let all = len.checked_add(slack).ok_or(MapError::BadRange)?;
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: a fresh anonymous mapping at an address of the kernel's choice.
    let p = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), all, ProtFlags::empty(), flags) }?;
    let before = (p as usize).next_multiple_of(align) - p as usize;
    // SAFETY: both parts lie in the mapping that was just made, which nobody knows yet, and outside of what is kept.
    unsafe {
        if before > 0 {
            let _ = rustix::mm::munmap(p, before);
        }
        if slack > before {
            let _ = rustix::mm::munmap(p.cast::<u8>().add(before + len).cast(), slack - before);
        }
    }
    let ptr = NonNull::new(p.cast::<u8>().wrapping_add(before)).ok_or(MapError::BadRange)?;
    Ok(Mapping { ptr, len, slot: None, _hold: hold })
}

/// Maps `len` bytes of a memory file at an address that the kernel chooses and where a page of that file may begin.
///
/// Never at an address that is taken already (`MAP_FIXED`): files can refuse to be mapped, because of a seal or since
/// no huge page is free, and the kernel has then unmapped the previous mapping. A thread that maps something at that
/// moment would be given those addresses.
fn map_anywhere(fd: BorrowedFd<'_>, off: u64, len: usize) -> Result<NonNull<u8>, MapError> {
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a fresh mapping at an address of the kernel's choice.
    let p = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, prot, MapFlags::SHARED, fd, off) }?;
    NonNull::new(p.cast()).ok_or(MapError::BadRange)
}

/// Moves a fresh mapping of `len` bytes to `at` in the range that `into` has reserved.
fn move_into(into: Mapping, at: *mut u8, piece: NonNull<u8>, len: usize) -> Result<Mapping, MapError> {
    let piece = piece.as_ptr().cast();
    // SAFETY: nobody knows the mapping yet, and its new place is a part of the range that `into` owns.
    let moved = unsafe { rustix::mm::mremap_fixed(piece, len, len, MremapFlags::MAYMOVE, at.cast()) };
    match moved {
        Ok(_) => Ok(into),
        Err(e) => {
            // The kernel has no memory left for its own tables, and may have unmapped the place already. The range is
            // given up, with what was held for it: unmapping it could meet a mapping that somebody else has made there
            // since.
            std::mem::forget(into);
            // SAFETY: as above.
            let _ = unsafe { rustix::mm::munmap(piece, len) };
            Err(e.into())
        }
    }
}

/// Page size of a file that is memory (tmpfs, memfd, hugetlbfs), so that touching it cannot wait for a file server;
/// `None` for another kind of file.
fn page_of(fd: BorrowedFd<'_>) -> Option<u64> {
    const TMPFS_MAGIC: u64 = 0x0102_1994;
    const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;
    // Only memory files have seals. Asked first, since a file server may let `fstatfs` wait.
    rustix::fs::fcntl_get_seals(fd).ok()?;
    let s = rustix::fs::fstatfs(fd).ok()?;
    match s.f_type as u64 {
        TMPFS_MAGIC => Some(page()),
        HUGETLBFS_MAGIC => Some(s.f_bsize as u64).filter(|&n| n >= page() && n.is_power_of_two()),
        _ => None,
    }
}

/// True if `fd` is memory that can be mapped.
pub fn is_memory(fd: BorrowedFd<'_>) -> bool {
    page_of(fd).is_some()
}

/// Maps bytes `[off, off + len)` of a memory file that a peer sent.
///
/// # Errors
/// See [`MapError`]. `off` must be page aligned.
pub fn map_file(fd: BorrowedFd<'_>, off: u64, len: u64) -> Result<Span, MapError> {
    map_pieces(&[(fd, off, len)], Box::new(()), None)
}

/// Maps pieces of memory files one after the other into one contiguous window (U20). All but the last
/// must be whole pages of their files long. `hold` is kept as long as the window is mapped. `account` counts the pages
/// that this process makes in holes of the files; huge pages come from what an operator has set aside, and are not
/// counted.
///
/// # Errors
/// See [`MapError`].
pub fn map_pieces(
    pieces: &[(BorrowedFd<'_>, u64, u64)],
    hold: Box<dyn Any + Send + Sync>,
    account: Option<Arc<dyn Account>>,
) -> Result<Span, MapError> {
    let (mut total, mut room, mut align) = (0u64, 0u64, page());
    let mut small = Vec::new();
    for (i, &(fd, off, len)) in pieces.iter().enumerate() {
        let unit = page_of(fd).ok_or(MapError::NotMemory)?;
        let size = rustix::fs::fstat(fd)?.st_size as u64;
        let in_file = off.checked_add(len).is_some_and(|end| end <= size);
        let whole = len % unit == 0 || i + 1 == pieces.len();
        // A piece begins in the window only where a page of its file may begin.
        if len == 0 || off % unit != 0 || total % unit != 0 || !in_file || !whole {
            return Err(MapError::BadRange);
        }
        align = align.max(unit);
        if unit == page() {
            small.push((total, len.next_multiple_of(unit)));
        }
        // The kernel maps whole pages, of any size, and replaces mappings that lie behind.
        room = len.checked_next_multiple_of(unit).and_then(|n| total.checked_add(n)).ok_or(MapError::BadRange)?;
        total = total.checked_add(len).ok_or(MapError::BadRange)?;
    }
    let usable = |n: u64| usize::try_from(n).map_err(|_| MapError::BadRange);
    let mut mapping = match *pieces {
        [(fd, off, _)] => {
            Mapping { ptr: map_anywhere(fd, off, usable(room)?)?, len: usable(room)?, slot: None, _hold: hold }
        }
        _ => {
            let mut mapping = reserve(usable(room)?, usable(align)?, hold)?;
            let mut at = mapping.ptr.as_ptr();
            for (i, &(fd, off, len)) in pieces.iter().enumerate() {
                let left = mapping.ptr.as_ptr().addr() + mapping.len - at.addr();
                let len = if i + 1 == pieces.len() { left } else { usable(len)? };
                mapping = move_into(mapping, at, map_anywhere(fd, off, len)?, len)?;
                at = at.wrapping_add(len);
            }
            mapping
        }
    };
    let start = mapping.ptr.as_ptr() as usize;
    let counted = account.is_some();
    let slot = guard::remember(start, mapping.len, account);
    mapping.slot = Some(slot.ok_or_else(|| MapError::Os(io::Error::other("too many mappings")))?);
    if counted && small.len() == pieces.len() {
        guard::watch_holes(start, mapping.len).map_err(MapError::Os)?;
    } else if counted {
        for (off, len) in small {
            guard::watch_holes(start + usable(off)?, usable(len)?).map_err(MapError::Os)?;
        }
    }
    let (ptr, len) = (mapping.ptr, usable(total)?);
    // SAFETY: the whole range is mapped read-write for the life of `mapping`.
    Ok(unsafe { Span::new(ptr, len, Arc::new(mapping)) })
}

/// Maps `len` bytes of memory that a device file offers at `off`: rings that the kernel's driver has made. A child of
/// this process does not inherit them.
///
/// # Errors
/// `BadRange` if `off` is not page aligned or there are no bytes, or the errors of `mmap(2)`.
pub fn map_device(fd: BorrowedFd<'_>, off: u64, len: u64) -> Result<Span, MapError> {
    let len = usize::try_from(len).map_err(|_| MapError::BadRange)?;
    if len == 0 || off % page() != 0 {
        return Err(MapError::BadRange);
    }
    let ptr = map_anywhere(fd, off, len)?;
    let mapping = Mapping { ptr, len, slot: None, _hold: Box::new(()) };
    // A device that refuses this shares its rings with children, which must leave them alone.
    // SAFETY: advice for the mapping that was just made.
    let _ = unsafe { rustix::mm::madvise(ptr.as_ptr().cast(), len, Advice::LinuxDontFork) };
    // SAFETY: the whole range is mapped read-write for the life of `mapping`.
    Ok(unsafe { Span::new(ptr, len, Arc::new(mapping)) })
}

impl Span {
    /// True if it is a window of a mapped file whose memory is gone (see [`guard`]).
    pub fn is_broken(&self) -> bool {
        self.owner().downcast_ref::<Mapping>().and_then(|m| m.slot.as_ref()).is_some_and(Slot::is_broken)
    }
}

/// Gives a file of our own its size. Beyond the process's `RLIMIT_FSIZE` that is an error and no signal: SIGXFSZ would
/// end a program that knows nothing of this file.
///
/// # Errors
/// Those of `ftruncate(2)`: `EFBIG` beyond the limit.
pub fn set_size(fd: BorrowedFd<'_>, len: u64) -> rustix::io::Result<()> {
    if rustix::process::getrlimit(rustix::process::Resource::Fsize).current.is_none() {
        return rustix::fs::ftruncate(fd, len);
    }
    // The kernel sends the signal to this thread, which removes it again, unless one was pending before. SAFETY: signal
    // sets of this function; masks and pending signals are this thread's.
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
    /// Those of `memfd_create(2)`, `ftruncate(2)` (also `EFBIG` where it raises SIGXFSZ, see [`set_size`]) and
    /// `mmap(2)`.
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
    use crate::copy_mapped;
    use crate::holes::Room;
    use std::sync::atomic::{AtomicU64, Ordering};

    #[test]
    fn pieces_come_in_order_whatever_their_place_in_the_file() {
        let f = MemFd::new(c"t", 3 * 4096).unwrap();
        for i in 0..3u32 {
            f.span().store32(i as usize * 4096, i + 1, Ordering::Relaxed);
        }
        let m =
            map_pieces(&[(f.fd(), 8192, 4096), (f.fd(), 0, 4096), (f.fd(), 4096, 100)], Box::new(()), None).unwrap();
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
    fn memory_of_a_device_is_mapped_as_a_whole() {
        let f = MemFd::new(c"t", 3 * 4096).unwrap();
        f.span().store32(4096, 7, Ordering::Relaxed);
        let m = map_device(f.fd(), 4096, 8192).unwrap();
        assert_eq!((m.len(), m.load32(0, Ordering::Relaxed)), (8192, 7));
        assert!(matches!(map_device(f.fd(), 1, 4096), Err(MapError::BadRange)));
        assert!(matches!(map_device(f.fd(), 0, 0), Err(MapError::BadRange)));
    }

    fn truncatable(len: u64, flags: MemfdFlags) -> Option<std::os::fd::OwnedFd> {
        let fd = rustix::fs::memfd_create(c"t", MemfdFlags::CLOEXEC | flags).ok()?;
        rustix::fs::ftruncate(&fd, len).unwrap();
        Some(fd)
    }

    #[test]
    fn a_truncated_file_reads_as_zeros_and_is_broken_as_a_whole() {
        guard::install().unwrap();
        let fd = truncatable(8192, MemfdFlags::empty()).unwrap();
        let m = map_file(fd.as_fd(), 0, 8192).unwrap();
        let (first, second) = (m.sub(0, 4096).unwrap(), m.sub(4096, 4096).unwrap());
        m.store32(0, 5, Ordering::Relaxed);
        m.store32(4096, 7, Ordering::Relaxed);
        rustix::fs::ftruncate(&fd, 4096).unwrap();
        let before = guard::broken();
        assert!(!first.is_broken());
        assert_eq!(m.load32(4096, Ordering::Relaxed), 0);
        assert!(guard::broken() > before && first.is_broken() && second.is_broken());
        // The rest of the file is out of reach, too.
        assert_eq!(m.load32(0, Ordering::Relaxed), 0);
        m.store32(4096, 9, Ordering::Relaxed);
        assert_eq!(m.load32(4096, Ordering::Relaxed), 9);
        let mut fds = [rustix::event::PollFd::from_borrowed_fd(guard::events().unwrap(), rustix::event::PollFlags::IN)];
        assert_eq!(rustix::event::poll(&mut fds, Some(&rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 })), Ok(1));
    }

    fn mappings() -> usize {
        std::fs::read_to_string("/proc/self/maps").unwrap().lines().count()
    }

    /// Every second page of a window is touched after all of them have gone. That makes one mapping, not one for each
    /// page.
    #[test]
    fn a_window_breaks_once_however_many_pages_are_gone() {
        const PAGES: u64 = 4096;
        guard::install().unwrap();
        let fd = truncatable(PAGES * 4096, MemfdFlags::empty()).unwrap();
        let m = map_file(fd.as_fd(), 0, PAGES * 4096).unwrap();
        rustix::fs::ftruncate(&fd, 0).unwrap();
        let before = mappings();
        std::thread::scope(|s| {
            for t in 0..2 {
                let m = m.clone();
                s.spawn(move || (t..PAGES).step_by(4).for_each(|p| m.store32(p as usize * 4096, 1, Ordering::Relaxed)));
            }
        });
        assert!(m.is_broken() && mappings() < before + 1000, "{} mappings", mappings() - before);
        // The next window at this address does not find the old bytes.
        let (at, len) = (m.addr(), m.len());
        drop(m);
        let spare = (0..64)
            .map(|_| map_file(truncatable(len as u64, MemfdFlags::empty()).unwrap().as_fd(), 0, len as u64).unwrap());
        for again in spare.collect::<Vec<_>>() {
            if again.addr() == at {
                assert_eq!(again.load32(0, Ordering::Relaxed), 0);
            }
        }
    }

    /// Files that refuse to be mapped leave the addresses of others alone.
    #[test]
    fn who_maps_at_the_same_time_as_a_refused_file_keeps_its_memory() {
        const LEN: usize = 2 << 20;
        let fd = |flags| truncatable(LEN as u64, flags);
        let (good, sealed) = (fd(MemfdFlags::empty()).unwrap(), fd(MemfdFlags::ALLOW_SEALING).unwrap());
        rustix::fs::fcntl_add_seals(&sealed, SealFlags::WRITE).unwrap();
        // A place without a free huge page.
        let huge =
            fd(MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB).filter(|f| map_file(f.as_fd(), 0, LEN as u64).is_err());
        let refused: Vec<_> = [Some(sealed), huge].into_iter().flatten().collect();
        let ends = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|s| {
            s.spawn(|| {
                let prot = ProtFlags::READ | ProtFlags::WRITE;
                while !ends.load(Ordering::Relaxed) {
                    // SAFETY: a fresh mapping of this thread alone.
                    unsafe {
                        let p = rustix::mm::mmap_anonymous(std::ptr::null_mut(), LEN, prot, MapFlags::PRIVATE).unwrap();
                        // It fails if something is not mapped.
                        rustix::mm::madvise(p, LEN, rustix::mm::Advice::LinuxDontNeed).expect("it is mapped");
                        rustix::mm::munmap(p, LEN).unwrap();
                    }
                }
            });
            for _ in 0..5000 {
                for file in &refused {
                    let (good, file) = ((good.as_fd(), 0, LEN as u64), (file.as_fd(), 0, LEN as u64));
                    assert!(map_pieces(&[file], Box::new(()), None).is_err());
                    assert!(map_pieces(&[good, file], Box::new(()), None).is_err());
                }
            }
            ends.store(true, Ordering::Relaxed);
        });
    }

    /// A window of a file with huge pages covers whole ones, so that the kernel maps nothing over its neighbours.
    #[test]
    fn huge_pages_are_mapped_whole_and_may_vanish() {
        const HUGE: u64 = 2 << 20;
        guard::install().unwrap();
        let Some(fd) = truncatable(HUGE, MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB) else {
            return eprintln!("skipped: the kernel has no huge pages of 2 MiB");
        };
        let m = match map_file(fd.as_fd(), 0, 4096) {
            Ok(m) => m,
            Err(e) => return eprintln!("skipped: no huge page is free ({e}); sysctl vm.nr_hugepages"),
        };
        assert_eq!((m.len(), m.addr() as u64 % HUGE), (4096, 0));
        m.store32(0, 1, Ordering::Relaxed);
        rustix::fs::ftruncate(&fd, 0).unwrap();
        assert_eq!((m.load32(0, Ordering::Relaxed), m.is_broken()), (0, true));
        assert!(matches!(map_file(fd.as_fd(), 4096, 4096), Err(MapError::BadRange)));
    }

    /// Counts the bytes that were made, up to a limit, and the number of steps.
    #[derive(Default)]
    struct Counter {
        limit: u64,
        used: AtomicU64,
        steps: AtomicU64,
    }

    impl Account for Counter {
        fn take(&self, bytes: u64) -> Room {
            let more = |used: u64| (used + bytes <= self.limit).then_some(used + bytes);
            let taken = self.used.fetch_update(Ordering::SeqCst, Ordering::SeqCst, more);
            taken.map_or(Room::None, |_| Room::Enough)
        }
        fn end(&self, taken: u64, made: u64) {
            self.steps.fetch_add(1, Ordering::SeqCst);
            self.used.fetch_sub(taken - made, Ordering::SeqCst);
        }
    }

    /// A window of a sparse file that has some of its pages, and its account; `None` if pages cannot be counted here.
    fn counted(
        pages: u64,
        there: std::ops::Range<u64>,
        limit: u64,
    ) -> Option<(Span, Arc<Counter>, std::os::fd::OwnedFd)> {
        guard::install().unwrap();
        if let Err(why) = guard::counts_holes() {
            eprintln!("skipped: {why}");
            return None;
        }
        let fd = truncatable(pages * 4096, MemfdFlags::empty()).unwrap();
        let len = (there.end - there.start) * 4096;
        if len > 0 {
            rustix::fs::fallocate(&fd, rustix::fs::FallocateFlags::empty(), there.start * 4096, len).unwrap();
        }
        let counter = Arc::new(Counter { limit, ..Counter::default() });
        let m = map_pieces(&[(fd.as_fd(), 0, pages * 4096)], Box::new(()), Some(counter.clone())).unwrap();
        Some((m, counter, fd))
    }

    #[test]
    fn pages_that_are_made_in_holes_are_counted_and_others_are_not() {
        let Some((m, counter, fd)) = counted(1000, 100..200, u64::MAX) else { return };
        (100..200).for_each(|p| m.store32(p * 4096, 1, Ordering::Relaxed));
        assert_eq!(counter.used.load(Ordering::SeqCst), 0);
        // Page by page, from two threads, with existing pages in between.
        std::thread::scope(|s| {
            for _ in 0..2 {
                s.spawn(|| (0..1000).for_each(|p| m.store32(p * 4096 + 4, p as u32, Ordering::Relaxed)));
            }
        });
        assert_eq!(counter.used.load(Ordering::SeqCst), 900 * 4096);
        assert!((0..1000).all(|p| m.load32(p * 4096 + 4, Ordering::Relaxed) == p as u32));
        // Holes that are made again are filled again.
        let flags = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&fd, flags, 4096, 8192).unwrap();
        assert_eq!((m.load32(8192, Ordering::Relaxed), m.load32(4096, Ordering::Relaxed)), (0, 0));
        assert_eq!((counter.used.load(Ordering::SeqCst), m.is_broken()), (902 * 4096, false));
    }

    #[test]
    fn holes_are_filled_in_each_piece_of_a_window_and_up_to_the_last_page_of_the_room() {
        let Some((_, _, fd)) = counted(64, 0..0, 0) else { return };
        let piece = |page: u64, pages: u64| (fd.as_fd(), page * 4096, pages * 4096);
        let counter = Arc::new(Counter { limit: 9 * 4096, ..Counter::default() });
        let pieces = [piece(5, 1), piece(0, 2), piece(30, 1), piece(40, 5)];
        let m = map_pieces(&pieces, Box::new(()), Some(counter.clone())).unwrap();
        (0..9).for_each(|p| m.store32(p * 4096, 100 + p as u32, Ordering::Relaxed));
        assert_eq!((counter.used.load(Ordering::SeqCst), m.is_broken()), (9 * 4096, false));
        let whole = map_file(fd.as_fd(), 0, 64 * 4096).unwrap();
        let there = [5, 0, 1, 30, 40, 41, 42, 43, 44].map(|p| whole.load32(p * 4096, Ordering::Relaxed));
        assert_eq!(there, std::array::from_fn(|p| 100 + p as u32));
    }

    /// A long copy announces its length, so that its pages are made in one step.
    #[test]
    fn the_pages_of_one_copy_are_made_in_one_step() {
        const BYTES: usize = 64 << 10;
        let Some((m, counter, fd)) = counted(64, 20..22, u64::MAX) else { return };
        let steps = || counter.steps.swap(0, Ordering::SeqCst);
        let made = || counter.used.load(Ordering::SeqCst) / 4096;
        m.write(0, &[1; BYTES]);
        assert_eq!((steps(), made()), (1, 16));
        // Existing pages divide the missing ones.
        m.write(16 * 4096 + 100, &[2; BYTES]);
        assert_eq!((steps(), made()), (2, 31));
        let (other, from) = (Span::anonymous(BYTES), Span::anonymous(4096));
        copy_mapped((&m, 40 * 4096), (&other, 0), BYTES).unwrap();
        assert_eq!((steps(), made()), (1, 47));
        // A finished copy has no effect on later ones.
        let flags = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&fd, flags, 0, BYTES as u64).unwrap();
        copy_mapped((&from, 0), (&m, 4096), 4096).unwrap();
        assert_eq!((steps(), made()), (1, 48));
    }

    /// If the room is less than a copy needs, it is used up.
    #[test]
    fn a_copy_gets_the_pages_that_there_is_room_for() {
        let Some((m, counter, _fd)) = counted(64, 0..0, 5 * 4096) else { return };
        m.write(0, &[1; 20_000]);
        assert_eq!((counter.used.load(Ordering::SeqCst), m.is_broken()), (5 * 4096, false));
    }

    #[test]
    fn a_window_whose_account_is_full_breaks() {
        let Some((m, counter, _fd)) = counted(64, 0..1, 8 * 4096) else { return };
        (0..64).step_by(2).take(9).for_each(|p| m.store32(p * 4096, 1, Ordering::Relaxed));
        assert_eq!((counter.used.load(Ordering::SeqCst), m.is_broken()), (8 * 4096, false));
        m.store32(63 * 4096, 1, Ordering::Relaxed);
        assert_eq!((counter.used.load(Ordering::SeqCst), m.is_broken()), (8 * 4096, true));
        assert_eq!(m.load32(0, Ordering::Relaxed), 0, "it is other memory as a whole");
        drop(m);
        assert_eq!(Arc::strong_count(&counter), 1);
    }
}
