//! The way *share*: private pages of the application are moved into a memory file at the same address, so
//! that the virtual layer maps them too and a transfer is one copy.
//!
//! Moving is copy, then replace the mapping. A store between the two would be lost, so it is done only
//! while nobody else can store: the process has one thread, and its signals are held. (A process with
//! more threads keeps its pages private and uses the way *copy*.)
//!
//! A child that `fork(2)` makes would share the moved pages with its parent. A fork handler gives it
//! private copies before `fork` returns on either side: the parent waits for that.

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, AtomicUsize, Ordering};

use rustix::fs::{MemfdFlags, SealFlags};

use crate::maps::{Vma, vmas};

/// Bytes that are moved at a time: what is held twice meanwhile.
const CHUNK: u64 = 16 << 20;
const PAGE: u64 = 4096;

/// Ranges that were ever moved; a fork without any costs nothing.
static MOVED: AtomicUsize = AtomicUsize::new(0);
static FORKS: AtomicU32 = AtomicU32::new(0);
/// A fork is under way: its handlers share the two statics below.
static FORKING: AtomicBool = AtomicBool::new(false);
/// The moved mappings at the time of a fork. The child must find them without allocating: until it has
/// its own pages, its heap may be its parent's.
static AT_FORK: AtomicPtr<Vec<Vma>> = AtomicPtr::new(std::ptr::null_mut());
/// The pipe on which a forked child says that it has its own pages.
static PIPE: [AtomicI32; 2] = [AtomicI32::new(-1), AtomicI32::new(-1)];

/// How often this process was forked off another since devices were opened: contexts of an older number are a parent's.
#[inline]
pub(crate) fn forks() -> u32 {
    FORKS.load(Ordering::Relaxed)
}

/// Arranges for forks, once. Called before the first context is used.
pub(crate) fn install_fork_handlers() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: registers three functions that live as long as this library; glibc drops them when
        // the library is unloaded.
        unsafe { libc::pthread_atfork(Some(before_fork), Some(after_in_parent), Some(after_in_child)) };
    });
}

extern "C" fn before_fork() {
    while FORKING.swap(true, Ordering::Acquire) {
        std::thread::yield_now();
    }
    if MOVED.load(Ordering::SeqCst) == 0 {
        return;
    }
    let moved: Vec<Vma> = vmas(0, u64::MAX).unwrap_or_default().into_iter().filter(Vma::is_ours).collect();
    AT_FORK.store(Box::into_raw(Box::new(moved)), Ordering::SeqCst);
    let mut fds = [-1; 2];
    // SAFETY: fds has room for two descriptors.
    if unsafe { libc::pipe2(fds.as_mut_ptr(), libc::O_CLOEXEC) } == 0 {
        PIPE[0].store(fds[0], Ordering::SeqCst);
        PIPE[1].store(fds[1], Ordering::SeqCst);
    }
}

fn take_pipe(i: usize) -> Option<OwnedFd> {
    let fd = PIPE[i].swap(-1, Ordering::SeqCst);
    // SAFETY: before_fork made the descriptor and nobody else owns it.
    (fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd) })
}

extern "C" fn after_in_parent() {
    drop(take_pipe(1));
    if let Some(done) = take_pipe(0) {
        // Ends with the child's byte, or with the child.
        while let Err(rustix::io::Errno::INTR) = rustix::io::read(&done, &mut [0u8; 1]) {}
    }
    let list = AT_FORK.swap(std::ptr::null_mut(), Ordering::SeqCst);
    if !list.is_null() {
        // SAFETY: before_fork boxed it; the child has its own copy of the pointer and of the memory.
        drop(unsafe { Box::from_raw(list) });
    }
    FORKING.store(false, Ordering::Release);
}

extern "C" fn after_in_child() {
    FORKS.fetch_add(1, Ordering::SeqCst);
    drop(take_pipe(0));
    if let Some(done) = take_pipe(1) {
        // SAFETY: before_fork made the list and the parent waits with freeing it. It is only read.
        if let Some(list) = unsafe { AT_FORK.load(Ordering::SeqCst).as_ref() } {
            for v in list {
                make_private(v);
            }
        }
        let _ = rustix::io::write(&done, &[1]);
    }
    FORKING.store(false, Ordering::Release);
}

fn prot(v: &Vma) -> i32 {
    let bit = |on: bool, p: i32| if on { p } else { 0 };
    bit(v.read, libc::PROT_READ) | bit(v.write, libc::PROT_WRITE) | bit(v.exec, libc::PROT_EXEC)
}

/// Replaces a moved mapping by a private copy at the same address. The only thread is this one.
fn make_private(v: &Vma) {
    let mut at = v.start;
    while at < v.end {
        let n = CHUNK.min(v.end - at) as usize;
        // SAFETY: a fresh mapping is filled from a mapped, readable range and then takes its place;
        // contents and protection at the address are as before.
        unsafe {
            let rw = libc::PROT_READ | libc::PROT_WRITE;
            let copy = libc::mmap(std::ptr::null_mut(), n, rw, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0);
            if copy == libc::MAP_FAILED {
                return;
            }
            std::ptr::copy_nonoverlapping(at as *const u8, copy.cast(), n);
            if prot(v) != rw {
                libc::mprotect(copy, n, prot(v));
            }
            libc::mremap(copy, n, n, libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED, at as *mut libc::c_void);
        }
        at += n as u64;
    }
}

/// Holds all signals of this thread until dropped.
struct HoldSignals(libc::sigset_t);

impl HoldSignals {
    fn new() -> Self {
        // SAFETY: both sets are initialized by the calls that write them.
        unsafe {
            let (mut all, mut old) = (std::mem::zeroed(), std::mem::zeroed());
            libc::sigfillset(&mut all);
            libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut old);
            HoldSignals(old)
        }
    }
}

impl Drop for HoldSignals {
    fn drop(&mut self) {
        // SAFETY: restores the mask that `new` saved.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.0, std::ptr::null_mut()) };
    }
}

/// Moves the pages `[v.start, v.end)` into a new memory file. The caller has made sure that this is the
/// only thread and that the range is movable memory.
///
/// # Errors
/// The memory is as it was, byte for byte, whatever part of it was moved.
pub(crate) fn move_pages(v: &Vma) -> std::io::Result<OwnedFd> {
    let fd = rustix::fs::memfd_create(c"unirdma-mr", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&fd, v.end - v.start)?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    let pagemap = std::fs::File::open("/proc/self/pagemap")?;
    let mut present = vec![0u8; (CHUNK / PAGE) as usize * 8];
    MOVED.fetch_add(1, Ordering::SeqCst);
    let _held = HoldSignals::new();
    let mut at = v.start;
    while at < v.end {
        let n = CHUNK.min(v.end - at);
        let entries = &mut present[..(n / PAGE) as usize * 8];
        std::os::unix::fs::FileExt::read_exact_at(&pagemap, entries, at / PAGE * 8)?;
        // From here to the mmap nothing may store into the range: no allocation, no formatting.
        copy_chunk(&fd, at - v.start, at, entries, v.shared)?;
        // SAFETY: replaces private pages by a shared mapping of the file that holds the same bytes;
        // nobody else runs in this address space.
        let r = unsafe {
            libc::mmap(
                at as *mut libc::c_void,
                n as usize,
                prot(v),
                libc::MAP_SHARED | libc::MAP_FIXED,
                fd.as_raw_fd(),
                (at - v.start) as i64,
            )
        };
        if r == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error());
        }
        at += n;
    }
    Ok(fd)
}

/// Writes those pages of a chunk that exist; the others are holes, and read as zeros on both sides. The page
/// table knows what private memory exists; shared memory may exist without being in it.
fn copy_chunk(fd: &OwnedFd, off: u64, addr: u64, pagemap: &[u8], shared: bool) -> std::io::Result<()> {
    // Bits 63 and 62: present, swapped.
    let exists = |i: usize| shared || pagemap[i * 8 + 7] & 0xc0 != 0;
    let pages = pagemap.len() / 8;
    let mut i = 0;
    while i < pages {
        if !exists(i) {
            i += 1;
            continue;
        }
        let first = i;
        while i < pages && exists(i) {
            i += 1;
        }
        let (mut at, end) = (first as u64 * PAGE, i as u64 * PAGE);
        while at < end {
            // SAFETY: the pages are mapped and readable; the kernel copies them.
            let n = unsafe {
                libc::pwrite(fd.as_raw_fd(), (addr + at) as *const libc::c_void, (end - at) as usize, (off + at) as i64)
            };
            match n {
                1.. => at += n as u64,
                _ => return Err(std::io::Error::last_os_error()),
            }
        }
    }
    Ok(())
}

/// A descriptor of this process that is open on the memory file `inode` for reading and writing.
pub(crate) fn find_open_file(inode: u64) -> Option<OwnedFd> {
    let here: Vec<i32> =
        std::fs::read_dir("/proc/self/fd").ok()?.filter_map(|e| e.ok()?.file_name().to_str()?.parse().ok()).collect();
    here.into_iter().find_map(|n| {
        // SAFETY: the descriptor is only borrowed for the two calls; if it was closed meanwhile they fail.
        let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(n) };
        let same = rustix::fs::fstat(fd).is_ok_and(|s| s.st_ino == inode);
        let writable = rustix::fs::fcntl_getfl(fd).is_ok_and(|f| f.contains(rustix::fs::OFlags::RDWR));
        let memory = rustix::fs::fstatfs(fd).is_ok_and(|s| s.f_type as u64 == 0x0102_1994);
        (same && writable && memory).then(|| fd.try_clone_to_owned().ok()).flatten()
    })
}

/// Opens a shared memory object by the name under which it is mapped.
pub(crate) fn open_by_name(v: &Vma) -> Option<OwnedFd> {
    let file = v
        .path
        .starts_with("/dev/shm/")
        .then(|| std::fs::File::options().read(true).write(true).open(&v.path).ok())??;
    let same = rustix::fs::fstat(file.as_fd()).is_ok_and(|s| s.st_ino == v.inode);
    same.then(|| file.into())
}
