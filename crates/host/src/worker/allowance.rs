//! What a vRNIC's control work may take while others have work.
//!
//! Commands, messages and sessions of a vRNIC are served by the control thread, which needs the RNIC as pollers do, and on few cores shares
//! its core with programs and pollers. A program that asks for something without a pause would keep that thread busy all the time, and everybody
//! else would wait for the RNIC, or have a part of that core less. So each vRNIC has an allowance: as much as it likes for a moment, and then a
//! part of the time. It is measured always, and counts only while others are kept from work ([`Engine::keeps_others_from_work`]).
//!
//! [`Engine::keeps_others_from_work`]: crate::engine::Engine::keeps_others_from_work

use std::cell::Cell;

use unirdma_rnic::{Terms, TimeBudget};

/// A program that starts may make some thousand objects at once. One that waits for an answer sleeps meanwhile; if it had each answer
/// as soon as that could be paid for, it would look for it all the time, so it waits in steps.
const TERMS: Terms = Terms { parts: 16, burst_ns: 40_000_000, most_ns: 2_000_000, step_ns: 4_000_000 };

/// The account of one vRNIC.
#[derive(Debug)]
pub(super) struct Allowance(Cell<TimeBudget>);

impl Default for Allowance {
    fn default() -> Self {
        Allowance(Cell::new(TimeBudget::new(&TERMS)))
    }
}

impl Allowance {
    /// Control work that ended at time `now` took so long, nanoseconds.
    pub fn charge(&self, now: u64, took_ns: u64) {
        let mut b = self.0.get();
        b.charge(now, took_ns);
        self.0.set(b);
    }

    /// Until when the vRNIC's control work has to wait. If nobody else has work, what it has had is forgiven.
    pub fn waits_until(&self, now: u64, others_have_work: impl FnOnce() -> bool) -> Option<u64> {
        let mut b = self.0.get();
        let rest_ns = b.rest_ns_beside(now, others_have_work);
        self.0.set(b);
        (rest_ns > 0).then_some(now + rest_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_forgiven_delays_nothing() {
        let a = Allowance::default();
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
