//! What was registered only for a moment. Moving memory costs a copy on the way to the file and one on the way back; for a
//! program that registers a buffer for each message that is more than the message. Its buffers are left where they are
//! (way *copy*), and moved later if an MR lives longer than was expected.

/// Ranges that are remembered.
const RECENT: usize = 16;
/// So many brief MRs in a row say that the next ones will be brief too, wherever they lie.
const ROW: u32 = 8;
/// An MR is brief if it lives less than this times what moving its memory costs.
const WORTH: u64 = 10;

/// Nanoseconds that moving `bytes` to the file and back costs, roughly.
pub(crate) fn cost_ns(bytes: u64) -> u64 {
    100_000 + bytes
}

/// Nanoseconds after which an MR of `bytes` has lived long enough to be worth moving.
pub(crate) fn worth_ns(bytes: u64) -> u64 {
    cost_ns(bytes).saturating_mul(WORTH)
}

/// The memory of it. Times do not matter here, only what came of them.
pub(crate) struct History {
    recent: [(u64, u64); RECENT],
    next: usize,
    row: u32,
}

impl History {
    pub const fn new() -> Self {
        History { recent: [(0, 0); RECENT], next: 0, row: 0 }
    }

    /// An MR over `[lo, hi)` has ended after `life_ns`.
    pub fn note(&mut self, lo: u64, hi: u64, life_ns: u64) {
        let known = self.recent.iter_mut().find(|r| r.0 < hi && lo < r.1);
        if life_ns >= worth_ns(hi - lo) {
            self.row = 0;
            if let Some(r) = known {
                *r = (0, 0);
            }
            return;
        }
        self.row = self.row.saturating_add(1);
        match known {
            Some(r) => *r = (r.0.min(lo), r.1.max(hi)),
            None => {
                self.recent[self.next] = (lo, hi);
                self.next = (self.next + 1) % RECENT;
            }
        }
    }

    /// True if an MR over `[lo, hi)` will probably be brief.
    pub fn expects_brief(&self, lo: u64, hi: u64) -> bool {
        self.row >= ROW || self.recent.iter().any(|r| r.0 < hi && lo < r.1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_that_came_back_soon_are_expected_to_do_so_again() {
        let mut h = History::new();
        assert!(!h.expects_brief(0, 4096));
        h.note(0, 4096, 1000);
        assert!(h.expects_brief(0, 4096) && !h.expects_brief(4096, 8192));
        h.note(0, 4096, 1_000_000_000);
        assert!(!h.expects_brief(0, 4096));
    }

    #[test]
    fn many_brief_ones_speak_for_all() {
        let mut h = History::new();
        for i in 0..8 {
            assert!(!h.expects_brief(1 << 40, (1 << 40) + 1));
            h.note(i * 8192, i * 8192 + 4096, 0);
        }
        assert!(h.expects_brief(1 << 40, (1 << 40) + 1));
        h.note(1 << 40, (1 << 40) + 4096, 1_000_000_000);
        assert!(!h.expects_brief(1 << 40, (1 << 40) + 1));
    }
}
