//! Polls that rest. A program that spins in more threads than it has cores slows itself down: a thread with empty polls
//! keeps the core from the thread that has work. So a thread that has made only empty polls of a CQ for a while, and
//! was preempted for long meanwhile, gives up its core for a moment. A thread that was not preempted in the last second
//! never rests.
//!
//! Measured by `cargo xtask bench busy --only relay-3`. Three threads that spin on two cores make 170 to 2,700 WRITEs a
//! second, depending on where the kernel puts them; without rests they make 120. Beside three threads that compute they
//! make 500, and 70 without rests. Beside those, `ib_send_lat` takes 20 us on average, and 50 us without rests.

use rustix::thread::nanosleep;
use rustix::time::Timespec;

use crate::clock::{clock_ns, thread_ns};

/// Consecutive empty polls that form a row. They take 40 us; an answer from another host takes less.
const ROW: u32 = 2_048;
/// A thread that was off its core for this time in the second half of a row shares the core with threads that compute,
/// ns. Pollers preempt it for microseconds only.
const KEPT_NS: u64 = 1_000_000;
/// Time after that in which each row ends in a rest, ns. It is remembered because a thread that rests is not preempted.
const SHARED_NS: u64 = 1_000_000_000;

/// The monotonic clock and the CPU time of the thread, ns.
pub(crate) type Clocks = (u64, u64);

/// The empty polls of a CQ. If several threads poll it, their CPU times are mixed up, and a poll may rest without need,
/// or not rest.
#[derive(Default)]
pub(crate) struct PollBackoff {
    /// Empty polls since the last completion.
    polls: u32,
    /// The clocks in the middle of the row.
    middle: Clocks,
    /// Until when rows end in a rest, ns.
    shared_until_ns: u64,
}

impl PollBackoff {
    /// Called when a poll has found something.
    #[inline]
    pub fn found(&mut self) {
        self.polls = 0;
    }

    /// Called after an empty poll. Returns true if the caller should [`rest`].
    #[inline]
    pub fn after_empty_poll(&mut self, clocks: impl FnOnce() -> Clocks) -> bool {
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

/// Gives up the core for a moment.
#[cold]
pub(crate) fn rest() {
    // The kernel's shortest sleep: the thread's timer slack, 50 us if the program has not set it. A signal ends it
    // sooner.
    let _ = nanosleep(&Timespec { tv_sec: 0, tv_nsec: 1 });
}

/// The clocks of this thread.
#[cold]
pub(crate) fn clocks() -> Clocks {
    (clock_ns(), thread_ns())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes a row of empty polls whose second half takes `took_ns`, and runs for `ran_ns` of it. Returns how often a
    /// poll rests.
    fn row(r: &mut PollBackoff, at: u64, took_ns: u64, ran_ns: u64) -> usize {
        let clocks = |i| if i <= ROW / 2 { (at, 0) } else { (at + took_ns, ran_ns) };
        (1..=ROW).filter(|&i| r.after_empty_poll(|| clocks(i))).count()
    }

    #[test]
    fn only_who_polls_in_vain_on_a_shared_core_rests() {
        let mut r = PollBackoff::default();
        assert_eq!(row(&mut r, 0, 50_000_000, 50_000_000), 0, "it has run all the time");
        assert_eq!(row(&mut r, 0, 40_000, 20_000), 0, "a poller had the core");
        assert_eq!(row(&mut r, 0, 3_000_000, 20_000), 1, "others had it");
        assert_eq!(row(&mut r, SHARED_NS, 20_000, 20_000), 1);
        assert_eq!(row(&mut r, 3_000_000 + SHARED_NS, 20_000, 20_000), 0, "that is over");
        assert_eq!(row(&mut r, 0, 3_000_000, 0), 1);
        for _ in 0..10 {
            let rests = (1..ROW).any(|_| r.after_empty_poll(|| (3_000_000, 0)));
            assert!(!rests, "something comes within each row");
            r.found();
        }
    }
}
