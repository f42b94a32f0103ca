//! Limit on the log lines that a tenant can cause, for each vRNIC.

use std::sync::atomic::{AtomicU64, Ordering};

/// Most lines of one vRNIC in [`WINDOW_NS`].
const LINES: u64 = 10;
/// Length of the window, ns.
const WINDOW_NS: u64 = 10_000_000_000;

/// The number of lines that a vRNIC has caused in the present window.
#[derive(Debug, Default)]
pub struct LogLimit {
    since_ns: AtomicU64,
    lines: AtomicU64,
}

impl LogLimit {
    /// `Some` if a line may be written now, with the number of lines that were left out before it.
    pub fn next(&self, now_ns: u64) -> Option<u64> {
        let since = self.since_ns.load(Ordering::Relaxed);
        let fresh = since == 0 || now_ns.saturating_sub(since) >= WINDOW_NS;
        let begins =
            || self.since_ns.compare_exchange(since, now_ns.max(1), Ordering::Relaxed, Ordering::Relaxed).is_ok();
        if fresh && begins() {
            return Some(self.lines.swap(1, Ordering::Relaxed).saturating_sub(LINES));
        }
        (self.lines.fetch_add(1, Ordering::Relaxed) < LINES).then_some(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_a_few_lines_and_a_number() {
        let l = LogLimit::default();
        let written = |from: u64, n: u64| (0..n).filter_map(|i| l.next(from + i)).collect::<Vec<_>>();
        assert_eq!(written(1000, 500), [0; 10]);
        assert_eq!(written(1000 + WINDOW_NS, 3), [490, 0, 0]);
        assert_eq!(written(1000 + 2 * WINDOW_NS, 20), [0; 10]);
    }
}
