//! A limit on a vRNIC's control work while other vRNICs have work.
//!
//! The control thread serves commands, messages and sessions of vRNICs. It needs the RNIC as pollers do, and on few
//! cores shares its core with programs and pollers. A program that sends requests without a pause would keep that
//! thread busy, and others would wait for the RNIC, or get less of that core. So each vRNIC has an allowance: a burst
//! without limit, and then a part of the time. Control work is always measured, but limited only while it delays others
//! ([`Engine::delays_others`]).
//!
//! [`Engine::delays_others`]: crate::engine::Engine::delays_others

use std::cell::Cell;

use unirdma_rnic::{Terms, TimeBudget};

/// A starting program may make about a thousand objects at once. A program sleeps while it waits for an answer; if each
/// answer came as soon as it could be paid for, the program would look for it all the time, so waits have a minimal
/// length.
const TERMS: Terms = Terms { parts: 16, burst_ns: 40_000_000, most_ns: 2_000_000, step_ns: 4_000_000 };

/// The account of one vRNIC.
#[derive(Debug)]
pub(super) struct ControlBudget(Cell<TimeBudget>);

impl Default for ControlBudget {
    fn default() -> Self {
        ControlBudget(Cell::new(TimeBudget::new(&TERMS)))
    }
}

impl ControlBudget {
    /// Charges control work of `took_ns` that ended at `now`.
    pub fn charge(&self, now: u64, took_ns: u64) {
        let mut b = self.0.get();
        b.charge(now, took_ns);
        self.0.set(b);
    }

    /// When the vRNIC's control work may go on, if it has to wait. If no other vRNIC has work, the debt is cancelled.
    pub fn waits_until(&self, now: u64, others_have_work: impl FnOnce() -> bool) -> Option<u64> {
        let mut b = self.0.get();
        let rest_ns = b.wait_ns_if_contended(now, others_have_work);
        self.0.set(b);
        (rest_ns > 0).then_some(now + rest_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_forgiven_delays_nothing() {
        let a = ControlBudget::default();
        let now = 1_000_000_000;
        let busy = || (0..1000).for_each(|_| a.charge(now, 100_000));
        busy();
        assert!(a.waits_until(now, || true).is_some_and(|until| until >= now + TERMS.step_ns));
        assert_eq!(a.waits_until(now, || false), None);
        assert_eq!(a.waits_until(now, || true), None);
        busy();
        assert!(a.waits_until(now, || true).is_some());
    }
}
