//! What a vRNIC's control work may take while others have work.
//!
//! Commands, messages and sessions of a vRNIC are served by the control thread, which shares its core with programs and pollers. A
//! program that asks for something without a pause would keep that thread busy all the time, and everybody else would have a part of
//! that core less. So each vRNIC has an allowance: as much as it likes for a moment, and then a part of the time. It is measured always,
//! and counts only while another vRNIC of the worker has work.

use std::cell::Cell;

/// The part of a core that a vRNIC's control work may take for long: one in so many.
const PART: u64 = 16;
/// What it may take at once after a pause, nanoseconds: a program that starts may make some thousand objects.
const BURST_NS: u64 = 40_000_000;
/// Who has to wait does so for this long at least, nanoseconds, and then has its part of this time at once. A program that waits for an
/// answer sleeps meanwhile; one that had each answer as soon as it could be paid for would look for it all the time.
const STEP_NS: u64 = 4_000_000;
/// Most that one piece of work is charged with, nanoseconds: whoever is interrupted by the kernel meanwhile does not pay for that.
const MOST_NS: u64 = 2_000_000;

/// The account of one vRNIC.
#[derive(Debug, Default)]
pub(super) struct Allowance {
    /// When all that it has had would be paid for by its part of the time, nanoseconds.
    paid_ns: Cell<u64>,
}

impl Allowance {
    /// Control work that ended at time `now` took so long, nanoseconds.
    pub fn charge(&self, now: u64, took_ns: u64) {
        self.paid_ns.set(self.paid_ns.get().max(now) + took_ns.min(MOST_NS) * PART);
    }

    /// Until when the vRNIC's control work has to wait. If nobody else has work, what it has had is forgiven.
    pub fn waits_until(&self, now: u64, others_have_work: impl FnOnce() -> bool) -> Option<u64> {
        let until = self.paid_ns.get().saturating_sub(BURST_NS * PART);
        if until <= now {
            return None;
        }
        if !others_have_work() {
            self.paid_ns.set(0);
            return None;
        }
        Some(until + STEP_NS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Serves pieces of work of 5 us whenever they are allowed, from `now` on, for `ns`; how long they took in all.
    fn serve(a: &Allowance, mut now: u64, ns: u64) -> u64 {
        let (end, mut took) = (now + ns, 0);
        while now < end {
            now = a.waits_until(now, || true).unwrap_or(now) + 5_000;
            a.charge(now, 5_000);
            took += 5_000;
        }
        took
    }

    #[test]
    fn a_burst_is_free_and_then_there_is_a_part_of_the_time() {
        let a = Allowance::default();
        let began = 1_000_000_000;
        let took = serve(&a, began, 1_000_000_000);
        let due = BURST_NS + 1_000_000_000 / PART;
        assert!(took.abs_diff(due) < due / 50, "{took} of {due}");
        let rested = serve(&a, 10 * began, BURST_NS);
        assert!(rested.abs_diff(BURST_NS) < BURST_NS / 50, "after a pause there is a burst again: {rested}");
    }

    #[test]
    fn what_is_forgiven_delays_nothing() {
        let a = Allowance::default();
        let now = 1_000_000_000;
        (0..1000).for_each(|_| a.charge(now, 100_000));
        assert!(a.waits_until(now, || true).is_some());
        assert_eq!(a.waits_until(now, || false), None);
        assert_eq!(a.waits_until(now, || true), None);
        let took = serve(&a, now, BURST_NS);
        assert!(took.abs_diff(BURST_NS) < BURST_NS / 50, "{took}");
    }

    #[test]
    fn a_piece_that_was_interrupted_does_not_stop_its_vrnic_for_long() {
        let a = Allowance::default();
        a.charge(1_000_000_000, u64::MAX);
        assert_eq!(a.waits_until(1_000_000_000, || true), None);
    }
}
