//! A budget of time for one user of a shared resource, while others want the resource too: a burst at once, and then a
//! fixed part of the time.

/// Parameters of a [`TimeBudget`].
#[derive(Debug)]
pub struct Terms {
    /// The user's share is one `parts`-th of the time.
    pub parts: u64,
    /// Time that may be used at once after a pause, ns.
    pub burst_ns: u64,
    /// Most that one piece of work is charged, ns. The user then does not pay for time in which the kernel ran another
    /// program in the middle of the work.
    pub most_ns: u64,
    /// Shortest rest of a user that has exceeded its budget, ns. It may use its share of this time at once afterwards.
    pub step_ns: u64,
}

/// The account of one user (generic cell rate algorithm, ITU-T I.371).
#[derive(Clone, Copy, Debug)]
pub struct TimeBudget {
    terms: &'static Terms,
    /// Theoretical arrival time, ns: the time at which a user that used exactly its share from the beginning would have
    /// used the same total.
    paid_ns: u64,
}

impl TimeBudget {
    /// An account with an unused burst.
    pub const fn new(terms: &'static Terms) -> Self {
        TimeBudget { terms, paid_ns: 0 }
    }

    /// Charges work that took `took_ns` and ended at time `now`. A user may have used more than its budget while no
    /// other user wanted the time. Of such use, no more than the burst counts.
    pub fn charge(&mut self, now: u64, took_ns: u64) {
        let Terms { parts, burst_ns, most_ns, .. } = *self.terms;
        self.paid_ns = self.paid_ns.clamp(now, now + burst_ns * parts) + took_ns.min(most_ns) * parts;
    }

    /// Time until the user may work again, ns; 0 if it may work now.
    pub fn rest_ns(&self, now: u64) -> u64 {
        let Terms { parts, burst_ns, step_ns, .. } = *self.terms;
        match self.paid_ns.saturating_sub(now + burst_ns * parts) {
            0 => 0,
            rest => rest + step_ns,
        }
    }

    /// Like [`TimeBudget::rest_ns`], but if no other user wants the time, returns 0 and clears the account, which
    /// restores the burst.
    pub fn wait_ns_if_contended(&mut self, now: u64, others: impl FnOnce() -> bool) -> u64 {
        let rest = self.rest_ns(now);
        if rest > 0 && !others() {
            self.paid_ns = 0;
            return 0;
        }
        rest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TERMS: Terms = Terms { parts: 8, burst_ns: 10_000_000, most_ns: 1_000_000, step_ns: 0 };
    const SECOND: u64 = 1_000_000_000;

    /// Uses 10 us whenever the budget allows it, from time `now` on, for `ns`. Returns the total used.
    fn used(b: &mut TimeBudget, mut now: u64, ns: u64) -> u64 {
        let (end, mut used) = (now + ns, 0);
        while now < end {
            match b.rest_ns(now) {
                0 => {
                    now += 10_000;
                    b.charge(now, 10_000);
                    used += 10_000;
                }
                rest => now += rest,
            }
        }
        used
    }

    #[test]
    fn a_burst_is_free_and_then_there_is_a_part_of_the_time() {
        const STEPS: Terms = Terms { step_ns: 4_000_000, ..TERMS };
        for terms in [&TERMS, &STEPS] {
            let mut b = TimeBudget::new(terms);
            let all = used(&mut b, SECOND, SECOND);
            let due = TERMS.burst_ns + SECOND / TERMS.parts;
            assert!(all.abs_diff(due) < due / 50, "{all} of {due}");
            let rested = used(&mut b, 10 * SECOND, TERMS.burst_ns);
            assert!(
                rested.abs_diff(TERMS.burst_ns) < TERMS.burst_ns / 50,
                "after a pause there is a burst again: {rested}"
            );
        }
    }

    #[test]
    fn whoever_has_to_wait_does_so_for_a_step() {
        const STEPS: Terms = Terms { step_ns: 4_000_000, ..TERMS };
        let mut b = TimeBudget::new(&STEPS);
        (0..11).for_each(|_| b.charge(SECOND, TERMS.most_ns));
        assert_eq!(b.rest_ns(SECOND), TERMS.most_ns * TERMS.parts + STEPS.step_ns);
    }

    #[test]
    fn what_was_used_while_nobody_else_wanted_it_is_owed_up_to_the_burst_or_forgotten() {
        let mut b = TimeBudget::new(&TERMS);
        (0..1000).for_each(|_| b.charge(SECOND, 100_000));
        assert_eq!(b.rest_ns(SECOND), 100_000 * TERMS.parts);
        assert_eq!(b.wait_ns_if_contended(SECOND, || true), 100_000 * TERMS.parts);
        assert_eq!(b.wait_ns_if_contended(SECOND, || false), 0);
        assert_eq!(b.wait_ns_if_contended(SECOND, || true), 0);
        assert_eq!(used(&mut b, SECOND, TERMS.burst_ns), TERMS.burst_ns);
    }

    #[test]
    fn a_piece_that_was_interrupted_stops_nobody_for_long() {
        let mut b = TimeBudget::new(&TERMS);
        b.charge(SECOND, u64::MAX);
        assert_eq!(b.rest_ns(SECOND), 0);
    }
}
