//! SIGBUS under a foreign mapping (a file that its owner truncated) costs its owner only.
//!
//! [`remember`] keeps the ranges of foreign mappings in a fixed table of atomics. The handler looks the
//! fault up there and puts a private zero page under it; any other SIGBUS takes its default course.

use std::sync::Once;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Foreign mappings that may exist at once.
pub const MAX_MAPPINGS: usize = 65_536;

struct Range {
    start: AtomicUsize,
    len: AtomicUsize,
}

static RANGES: [Range; MAX_MAPPINGS] =
    [const { Range { start: AtomicUsize::new(0), len: AtomicUsize::new(0) } }; MAX_MAPPINGS];
/// Slots ever used, so that look-ups stay short.
static HIGH: AtomicUsize = AtomicUsize::new(0);
static FAULTS: AtomicU64 = AtomicU64::new(0);

/// Adds a range; false if the table is full.
pub(crate) fn remember(start: usize, len: usize) -> bool {
    for (i, r) in RANGES.iter().enumerate() {
        // The length goes in last and comes out first, so that the handler never sees half a range.
        if r.start.compare_exchange(0, start, Ordering::SeqCst, Ordering::Relaxed).is_ok() {
            r.len.store(len, Ordering::SeqCst);
            HIGH.fetch_max(i + 1, Ordering::SeqCst);
            return true;
        }
    }
    false
}

/// Removes the range that starts at `start`.
pub(crate) fn forget(start: usize) {
    let high = HIGH.load(Ordering::SeqCst);
    if let Some(r) = RANGES[..high].iter().find(|r| r.start.load(Ordering::SeqCst) == start) {
        r.len.store(0, Ordering::SeqCst);
        r.start.store(0, Ordering::SeqCst);
    }
}

/// Pages of foreign mappings that vanished and were replaced by zeros, since the process started.
pub fn faults() -> u64 {
    FAULTS.load(Ordering::Relaxed)
}

/// Installs the handler, once. The virtual layer calls it at start; an application's library does not,
/// since signal dispositions are the application's.
pub fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: an all-zero sigaction is valid; the handler below is async-signal-safe.
        unsafe {
            let mut sa: libc::sigaction = std::mem::zeroed();
            sa.sa_sigaction = on_sigbus as *const () as usize;
            sa.sa_flags = libc::SA_SIGINFO;
            libc::sigaction(libc::SIGBUS, &sa, std::ptr::null_mut());
        }
    });
}

extern "C" fn on_sigbus(sig: i32, info: *mut libc::siginfo_t, _ctx: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid siginfo to an SA_SIGINFO handler.
    let addr = unsafe { (*info).si_addr() } as usize;
    let high = HIGH.load(Ordering::SeqCst);
    let ours = RANGES[..high].iter().any(|r| {
        let (start, len) = (r.start.load(Ordering::SeqCst), r.len.load(Ordering::SeqCst));
        addr.wrapping_sub(start) < len
    });
    if ours {
        let page = addr & !4095;
        // SAFETY: mmap and sigaction are plain system calls; the page lies in a range that this
        // process mapped for a peer and that the peer emptied.
        let r = unsafe {
            libc::mmap(
                page as *mut _,
                4096,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED,
                -1,
                0,
            )
        };
        if r != libc::MAP_FAILED {
            FAULTS.fetch_add(1, Ordering::Relaxed);
            return;
        }
    }
    // SAFETY: restores the default action; the faulting instruction runs again and ends the process.
    unsafe { libc::signal(sig, libc::SIG_DFL) };
}
