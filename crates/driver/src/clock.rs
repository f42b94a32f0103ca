//! The clocks that the library reads.

use rustix::time::{ClockId, clock_gettime};

/// The monotonic clock, ns.
pub(crate) fn clock_ns() -> u64 {
    ns(ClockId::Monotonic)
}

/// CPU time of the calling thread, ns.
pub(crate) fn thread_ns() -> u64 {
    ns(ClockId::ThreadCPUTime)
}

fn ns(clock: ClockId) -> u64 {
    let t = clock_gettime(clock);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}
