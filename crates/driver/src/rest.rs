//! Polls that rest. A program that spins in more threads than it has cores stops itself: who polls in vain keeps the thread from its core
//! that would make the work. So a thread that has polled a CQ in vain for long, and was kept from its core meanwhile, lets others have it
//! for a moment. On a core that nobody else wants no poll ever rests.
//!
//! `cargo xtask bench busy --only relay-3` shows it: three threads that spin on two cores make 170 to 2,700 WRITEs a second, by how the kernel
//! places them, and 120 without rests; beside three that compute 500, and 70 without. `ib_send_lat` beside those takes 20 us on average, and 50
//! without.

use rustix::thread::nanosleep;
use rustix::time::{ClockId, Timespec};

use crate::context::clock_ns;

/// So many polls in vain, one after the other, are a row: 40 us, in which an answer from another host comes.
const ROW: u32 = 2_048;
/// Who was kept from its core for so long in half a row shares it with threads that compute, nanoseconds. The virtual layer takes it for
/// some microseconds at a time.
const KEPT_NS: u64 = 1_000_000;
/// After that each row ends in a rest for so long, nanoseconds. While a thread rests, nothing can keep it from its core.
const SHARED_NS: u64 = 1_000_000_000;

/// Time of the system, and that for which this thread has run, nanoseconds.
pub(crate) type Clocks = (u64, u64);

/// Polls in vain of a CQ. If several threads poll it, their times are mixed up: then a poll rests that need not, or does not.
#[derive(Default)]
pub(crate) struct Rest {
    /// Polls in vain since one that found something.
    polls: u32,
    /// In the middle of the row.
    middle: Clocks,
    /// The core is shared until then, nanoseconds.
    shared_until_ns: u64,
}

impl Rest {
    /// A poll has found something.
    #[inline]
    pub fn found(&mut self) {
        self.polls = 0;
    }

    /// A poll was in vain; true if it should [`rest`].
    #[inline]
    pub fn in_vain(&mut self, clocks: impl FnOnce() -> Clocks) -> bool {
        self.polls = self.polls.wrapping_add(1);
        self.polls % (ROW / 2) == 0 && self.half_a_row(clocks())
    }

    #[cold]
    fn half_a_row(&mut self, (now, ran): Clocks) -> bool {
        if self.polls % ROW != 0 {
            self.middle = (now, ran);
            return false;
        }
        let away_ns = now.saturating_sub(self.middle.0).saturating_sub(ran.saturating_sub(self.middle.1));
        if away_ns >= KEPT_NS {
            self.shared_until_ns = now + SHARED_NS;
        }
        now < self.shared_until_ns
    }
}

/// Lets others have the core for a moment.
#[cold]
pub(crate) fn rest() {
    // The kernel's shortest sleep: the thread's timer slack, 50 us if the program has not set it. A signal ends it sooner.
    let _ = nanosleep(&Timespec { tv_sec: 0, tv_nsec: 1 });
}

/// The clocks of this thread.
#[cold]
pub(crate) fn clocks() -> Clocks {
    (clock_ns(ClockId::Monotonic), clock_ns(ClockId::ThreadCPUTime))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Polls in vain for a row, the second half of which takes so long and runs so long; how often a poll rests.
    fn row(r: &mut Rest, at: u64, took_ns: u64, ran_ns: u64) -> usize {
        let clocks = |i| if i <= ROW / 2 { (at, 0) } else { (at + took_ns, ran_ns) };
        (1..=ROW).filter(|&i| r.in_vain(|| clocks(i))).count()
    }

    #[test]
    fn only_who_polls_in_vain_on_a_shared_core_rests() {
        let mut r = Rest::default();
        assert_eq!(row(&mut r, 0, 50_000_000, 50_000_000), 0, "it has run all the time");
        assert_eq!(row(&mut r, 0, 40_000, 20_000), 0, "a poller had the core");
        assert_eq!(row(&mut r, 0, 3_000_000, 20_000), 1, "others had it");
        assert_eq!(row(&mut r, SHARED_NS, 20_000, 20_000), 1);
        assert_eq!(row(&mut r, 3_000_000 + SHARED_NS, 20_000, 20_000), 0, "that is over");
        assert_eq!(row(&mut r, 0, 3_000_000, 0), 1);
        for _ in 0..10 {
            let rests = (1..ROW).any(|_| r.in_vain(|| (3_000_000, 0)));
            assert!(!rests, "something comes within each row");
            r.found();
        }
    }
}
