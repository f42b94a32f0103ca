//! Waiting for a process that moves pages (section 7.5 of the specification): memory of the way *copy* cannot be
//! reached then, and a request that needs it is tried again, for a bounded time.

/// The time between two tries grows with the wait, within these bounds, ns.
const SHORTEST_NS: u64 = 5_000;
const LONGEST_NS: u64 = 1_000_000;
/// If the pages of a process cannot be reached for this time, the request fails, ns. A process could claim for ever
/// that it moves its pages.
const PATIENCE_NS: u64 = 5_000_000_000;

/// A request's wait for memory that moves.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Stall {
    /// Since when it waits, and when it tries again.
    pub now: Option<(u64, u64)>,
}

impl Stall {
    /// The memory moves. Returns the time to the next try, or `None` if it has waited long enough.
    pub fn again(&mut self, now: u64) -> Option<u64> {
        let since = self.now.map_or(now, |w| w.0);
        let waited = now.saturating_sub(since);
        if waited >= PATIENCE_NS {
            self.now = None;
            return None;
        }
        let delay = (waited / 4).clamp(SHORTEST_NS, LONGEST_NS);
        self.now = Some((since, now + delay));
        Some(delay)
    }

    /// There is no room for the request now. It is tried again after `delay_ns`, any number of times.
    pub fn rest(&mut self, now: u64, delay_ns: u64) {
        self.now = Some((now, now + delay_ns));
    }

    /// When the next try is due, if it waits.
    pub fn due(&self) -> Option<u64> {
        self.now.map(|w| w.1)
    }

    /// True if the time for the next try has not come.
    pub fn holds(&self, now: u64) -> bool {
        self.due().is_some_and(|at| now < at)
    }

    /// The memory was reached.
    pub fn over(&mut self) {
        self.now = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_waits_longer_each_time_but_not_for_ever() {
        let mut s = Stall::default();
        let (mut now, mut tries) = (100, 0);
        assert!(!s.holds(now));
        while let Some(delay) = s.again(now) {
            assert!(s.holds(now) && s.holds(now + delay - 1) && !s.holds(now + delay));
            assert!(delay <= LONGEST_NS);
            now += delay;
            tries += 1;
        }
        assert!((PATIENCE_NS..PATIENCE_NS + LONGEST_NS).contains(&(now - 100)));
        assert!(tries < 6000, "{tries} tries");
        assert!(!s.holds(now));
        assert_eq!(s.again(now), Some(SHORTEST_NS), "the next request has its own patience");
    }
}
