//! SIGBUS under a foreign mapping hurts only the mapping's owner. Its causes are a file that its owner truncated, a
//! hole for which there is no memory or no room on its owner's account, and a missing huge page.
//!
//! [`remember`] keeps the ranges of foreign mappings in a fixed table of atomics. The handler looks the fault up there
//! and puts memory of our own under the *whole* range, so that one range faults once, whatever its pages are, and
//! mappings become fewer and not more. That memory belongs to a file made beforehand, in which each address has its own
//! place: the mapping counts against no limit of memory, and threads that fault at the same time put the same bytes
//! there. Then the range is broken, and [`events`] says that one is. Any other SIGBUS takes its default course.
//!
//! A hole for which there is room is filled by the handler ([`crate::holes`]), and nothing breaks.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use rustix::event::EventfdFlags;
use rustix::fs::{FallocateFlags, MemfdFlags};

use crate::holes::{self, Account, Filled, Room, Watch};

/// Foreign mappings that may exist at once.
pub const MAX_MAPPINGS: usize = 65_536;
/// Bytes of the file that replaces memory that is gone: as many as there are addresses.
const SPARE_BYTES: u64 = 1 << 47;
/// Faults in one range before the handler gives up: threads may fault at the same time, but nothing faults again
/// afterwards.
const MAX_FAULTS: u32 = 10_000;
/// Number of times in succession that a page of one range was there already when it was to be made. Then the page is
/// there but cannot be used.
const MAX_IDLE: u32 = 10_000;
/// Pages that are made at once for a thread that goes from page to page by small accesses. It gets a signal for every
/// fourth page only.
const RUN: usize = 4;

struct Range {
    start: AtomicUsize,
    len: AtomicUsize,
    /// Faults in it.
    faults: AtomicU32,
    /// The account of the pages that are made in its holes, in a box. Null: the kernel makes the pages, and nobody
    /// counts them.
    account: AtomicPtr<Arc<dyn Account>>,
    /// The end of the pages that were made last.
    next: AtomicUsize,
    idle: AtomicU32,
}

static RANGES: [Range; MAX_MAPPINGS] = [const {
    Range {
        start: AtomicUsize::new(0),
        len: AtomicUsize::new(0),
        faults: AtomicU32::new(0),
        account: AtomicPtr::new(null_mut()),
        next: AtomicUsize::new(0),
        idle: AtomicU32::new(0),
    }
}; MAX_MAPPINGS];
/// Number of slots that were ever used, so that look-ups stay short; and where the search for a free slot begins.
static HIGH: AtomicUsize = AtomicUsize::new(0);
static NEXT: AtomicUsize = AtomicUsize::new(0);
static BROKEN: AtomicU64 = AtomicU64::new(0);
static INSTALLED: OnceLock<Installed> = OnceLock::new();

/// Resources that the handler needs, made beforehand.
struct Installed {
    /// The file that replaces memory that is gone.
    spare: OwnedFd,
    /// Counts the ranges that broke, and the accounts that have little room left.
    event: OwnedFd,
    /// The userfaultfd that finds holes, or why there is none.
    watch: io::Result<Watch>,
    page: usize,
}

/// The place of a range in the table.
#[derive(Debug)]
pub(crate) struct Slot(usize);

impl Slot {
    /// True if memory of the range was gone, so that all of it is our own memory now.
    pub fn is_broken(&self) -> bool {
        RANGES[self.0].faults.load(Ordering::SeqCst) != 0
    }
}

/// Adds a range of whole pages, with the account of the pages in its holes; `None` if the table is full.
pub(crate) fn remember(start: usize, len: usize, account: Option<Arc<dyn Account>>) -> Option<Slot> {
    let first = NEXT.load(Ordering::Relaxed);
    for i in (first..MAX_MAPPINGS).chain(0..first) {
        let r = &RANGES[i];
        // The length goes in last and comes out first, so that the handler never sees half a range.
        if r.start.compare_exchange(0, start, Ordering::SeqCst, Ordering::Relaxed).is_ok() {
            r.faults.store(0, Ordering::SeqCst);
            r.next.store(0, Ordering::Relaxed);
            r.idle.store(0, Ordering::Relaxed);
            r.account.store(account.map_or(null_mut(), |a| Box::into_raw(Box::new(a))), Ordering::SeqCst);
            r.len.store(len, Ordering::SeqCst);
            HIGH.fetch_max(i + 1, Ordering::SeqCst);
            NEXT.store((i + 1) % MAX_MAPPINGS, Ordering::Relaxed);
            return Some(Slot(i));
        }
    }
    None
}

/// Removes a range, which is about to be unmapped.
pub(crate) fn forget(slot: &Slot) {
    let r = &RANGES[slot.0];
    let len = r.len.swap(0, Ordering::SeqCst);
    let start = r.start.load(Ordering::SeqCst);
    if let Some(i) = INSTALLED.get().filter(|_| slot.is_broken()) {
        // Nobody else may find the bytes that were written there.
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let _ = rustix::fs::fallocate(&i.spare, flags, start as u64, len as u64);
    }
    let account = r.account.swap(null_mut(), Ordering::SeqCst);
    if !account.is_null() {
        // SAFETY: `remember` made it of a box. The handler uses it only while somebody accesses the range, and nobody
        // does any more.
        drop(unsafe { Box::from_raw(account) });
    }
    r.start.store(0, Ordering::SeqCst);
    NEXT.fetch_min(slot.0, Ordering::Relaxed);
}

/// Counts the pages in the holes of a range on its account from now on. If that is impossible, the kernel makes the
/// pages. No part of the range may be of a file with huge pages.
///
/// # Errors
/// The kernel has no memory for that.
pub(crate) fn watch_holes(start: usize, len: usize) -> io::Result<()> {
    match INSTALLED.get() {
        Some(Installed { watch: Ok(watch), .. }) => watch.begin(start, len),
        _ => Ok(()),
    }
}

/// `Ok` if the pages that are made in holes are counted.
///
/// # Errors
/// The reason in words.
pub fn counts_holes() -> Result<(), String> {
    match INSTALLED.get() {
        Some(Installed { watch: Ok(_), .. }) => Ok(()),
        Some(Installed { watch: Err(e), .. }) => Err(format!("no userfaultfd: {e}")),
        None => Err("no handler is installed".into()),
    }
}

/// True if a touch of a hole is handled here. An application has no handler.
pub(crate) fn watches_holes() -> bool {
    INSTALLED.get().is_some_and(|i| i.watch.is_ok())
}

/// Number of foreign mappings whose memory was gone, since the process started.
pub fn broken() -> u64 {
    BROKEN.load(Ordering::Relaxed)
}

/// A descriptor that becomes readable whenever a foreign mapping breaks, or an account says [`Room::Little`]. Any
/// number of threads may watch it, edge-triggered; it must not be read. `None` before [`install`].
pub fn events() -> Option<BorrowedFd<'static>> {
    INSTALLED.get().map(|i| i.event.as_fd())
}

/// Installs the handler, once. The virtual layer calls it at start; an application's library does not,
/// since signal dispositions are the application's.
///
/// # Errors
/// Those of `memfd_create(2)`, `ftruncate(2)` and `eventfd(2)`. Without userfaultfd(2) nobody counts holes
/// ([`counts_holes`]).
pub fn install() -> io::Result<()> {
    if INSTALLED.get().is_some() {
        return Ok(());
    }
    let spare = rustix::fs::memfd_create(c"spare", MemfdFlags::CLOEXEC)?;
    crate::set_size(spare.as_fd(), SPARE_BYTES)?;
    let event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
    // If another thread was faster, its descriptors are used, and its handler.
    let installed = Installed { spare, event, watch: Watch::open(), page: rustix::param::page_size() };
    if INSTALLED.set(installed).is_ok() {
        // SAFETY: an all-zero sigaction is valid; the handler below is async-signal-safe.
        unsafe {
            let mut sa: libc::sigaction = std::mem::zeroed();
            sa.sa_sigaction = on_sigbus as *const () as usize;
            sa.sa_flags = libc::SA_SIGINFO;
            libc::sigaction(libc::SIGBUS, &sa, std::ptr::null_mut());
        }
    }
    Ok(())
}

/// Makes the descriptor of [`events`] readable.
fn notify(i: &Installed) {
    let one = 1u64;
    // SAFETY: a plain system call that writes eight bytes of a local variable to our own descriptor, which never
    // blocks.
    unsafe { libc::write(i.event.as_raw_fd(), (&raw const one).cast(), 8) };
}

/// Makes the page at `addr`, if it lies in a hole and the range's account has room; false if not.
fn fill(i: &Installed, range: &Range, end: usize, addr: usize) -> bool {
    let (Ok(watch), account) = (&i.watch, range.account.load(Ordering::SeqCst)) else { return false };
    // SAFETY: `remember` put it there, and `forget` takes it away only when nobody accesses the range.
    let Some(account) = (unsafe { account.as_ref() }) else { return false };
    holes::note(addr);
    let at = addr & !(i.page - 1);
    let next = if range.next.load(Ordering::Relaxed) == at { RUN * i.page } else { i.page };
    let copied = (addr - at + holes::copied_from(addr)).next_multiple_of(i.page);
    let run = next.max(copied).min(end - at) as u64;
    let make = |bytes| make_pages(i, watch, account.as_ref(), at, bytes);
    let filled = match make(run) {
        // A run may need more room than there is, or reach into the next piece of the range.
        Filled::Impossible if run > i.page as u64 => make(i.page as u64),
        filled => filled,
    };
    match filled {
        Filled::Bytes(made) => {
            range.next.store(at + made as usize, Ordering::Relaxed);
            range.idle.store(0, Ordering::Relaxed);
            true
        }
        Filled::Nothing => range.idle.fetch_add(1, Ordering::Relaxed) < MAX_IDLE,
        Filled::Impossible => false,
    }
}

/// Makes pages that the account has room for.
fn make_pages(i: &Installed, watch: &Watch, account: &dyn Account, at: usize, bytes: u64) -> Filled {
    match account.take(bytes) {
        Room::Enough => {}
        Room::Little => notify(i),
        Room::None => return Filled::Impossible,
    }
    let filled = watch.fill(at, bytes);
    let made = if let Filled::Bytes(n) = filled { n } else { 0 };
    account.end(bytes, made);
    filled
}

/// Makes the page at `addr`, or puts memory of our own under the range that contains it. False if there is no such
/// range, or if that does not help.
fn replace(addr: usize) -> bool {
    let high = HIGH.load(Ordering::SeqCst);
    let found = RANGES[..high].iter().find_map(|r| {
        let (start, len) = (r.start.load(Ordering::SeqCst), r.len.load(Ordering::SeqCst));
        (addr.wrapping_sub(start) < len).then_some((r, start, len))
    });
    let (Some((range, start, len)), Some(i)) = (found, INSTALLED.get()) else { return false };
    // A range that another thread has just replaced has no holes.
    if range.faults.load(Ordering::SeqCst) == 0 && fill(i, range, start + len, addr) {
        return true;
    }
    let faults = range.faults.fetch_add(1, Ordering::SeqCst);
    if faults >= MAX_FAULTS {
        return false;
    }
    // SAFETY: a plain system call; the range is one that this process mapped for a peer, whole, and that nobody unmaps
    // while somebody accesses it.
    let mapped = unsafe {
        libc::mmap(
            start as *mut _,
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_FIXED | libc::MAP_NORESERVE,
            i.spare.as_raw_fd(),
            start as libc::off_t,
        )
    };
    if mapped == libc::MAP_FAILED {
        return false;
    }
    if faults == 0 {
        BROKEN.fetch_add(1, Ordering::Relaxed);
        notify(i);
    }
    true
}

extern "C" fn on_sigbus(sig: i32, info: *mut libc::siginfo_t, _ctx: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid siginfo to an SA_SIGINFO handler.
    let addr = unsafe { (*info).si_addr() } as usize;
    // SAFETY: the C library's location of this thread's errno, which the interrupted code may be about to read.
    let errno = unsafe { *libc::__errno_location() };
    let replaced = replace(addr);
    // SAFETY: as above; restores the default action; the faulting instruction runs again and ends the process.
    unsafe {
        *libc::__errno_location() = errno;
        if !replaced {
            libc::signal(sig, libc::SIG_DFL);
        }
    }
}
