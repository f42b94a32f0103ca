//! Remembers memory that was registered only briefly. Moving memory costs one copy into the file and one back. For a
//! program that registers a buffer for each message, that is more than the message itself. So its buffers are left
//! where they are (way *copy*), and are moved later if an MR lives longer than expected. An MR that requests have used
//! much was worth its move, however short its life was.

/// Number of ranges that are remembered.
const RECENT: usize = 16;
/// After this number of brief MRs in a row, the next ones are expected to be brief too, wherever they lie.
const ROW: u32 = 8;
/// An MR is brief if it lives less than `WORTH` times the cost of moving its memory.
const WORTH: u64 = 10;

/// Time that the way *share* saves for each access by a request, ns, and number of bytes for which it saves one more
/// ns. Measured between two programs of one host with two cores: a short WRITE by *copy* is a system call at each end,
/// and 1 MiB goes at a fifth of memcpy's speed.
const SAVED_NS: u64 = 500;
const SAVED_PER_BYTES: u64 = 3;

/// Accesses and bytes that requests have read and written by the key of an MR.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Served {
    pub accesses: u64,
    pub bytes: u64,
}

impl Served {
    /// Time that *share* saves, ns.
    fn saved_ns(self) -> u64 {
        self.accesses.saturating_mul(SAVED_NS).saturating_add(self.bytes / SAVED_PER_BYTES)
    }
}

/// True if an MR of `bytes` that has ended after `life_ns` may have been worth its move because of its accesses, but
/// not because of its age alone.
pub(crate) fn depends_on_service(bytes: u64, life_ns: u64) -> bool {
    (cost_ns(bytes)..worth_ns(bytes)).contains(&life_ns)
}

/// Approximate cost of moving `bytes` to the file and back, ns.
pub(crate) fn cost_ns(bytes: u64) -> u64 {
    100_000 + bytes
}

/// Age from which an MR of `bytes` was worth moving, ns.
pub(crate) fn worth_ns(bytes: u64) -> u64 {
    cost_ns(bytes).saturating_mul(WORTH)
}

/// Outcomes of recent MRs, without times.
pub(crate) struct ReuseHistory {
    recent: [(u64, u64); RECENT],
    next: usize,
    row: u32,
}

impl ReuseHistory {
    pub const fn new() -> Self {
        ReuseHistory { recent: [(0, 0); RECENT], next: 0, row: 0 }
    }

    /// Notes that an MR over `[lo, hi)` has ended after `life_ns`, in which it has served `served`.
    pub fn note(&mut self, lo: u64, hi: u64, life_ns: u64, served: Served) {
        let known = self.recent.iter_mut().find(|r| r.0 < hi && lo < r.1);
        if life_ns >= worth_ns(hi - lo) || served.saved_ns() >= cost_ns(hi - lo) {
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

    const IDLE: Served = Served { accesses: 0, bytes: 0 };

    /// MRs of 256 MiB that live for a second each: the accesses that they served decide, and not the decision before.
    #[test]
    fn what_an_mr_has_served_counts_as_well_as_its_age() {
        const LEN: u64 = 256 << 20;
        const LIFE_NS: u64 = 1_000_000_000;
        assert!(depends_on_service(LEN, LIFE_NS));
        assert!(!depends_on_service(LEN, 3 * LIFE_NS) && !depends_on_service(LEN, LIFE_NS / 10));
        let large = |bytes| Served { accesses: bytes >> 16, bytes };
        let mut h = ReuseHistory::new();
        h.note(0, LEN, LIFE_NS, large(4 << 30));
        assert!(!h.expects_brief(0, LEN));
        h.note(0, LEN, LIFE_NS, large(LEN));
        assert!(h.expects_brief(0, LEN));
        (0..ROW as u64).for_each(|i| h.note(i * LEN, (i + 1) * LEN, LIFE_NS, IDLE));
        // By *copy* a program accesses less in the same time, which is still much.
        h.note(0, LEN, LIFE_NS, large(3 << 29));
        assert!(!h.expects_brief(0, LEN));
        h.note(0, LEN, LIFE_NS, Served { accesses: 1 << 20, bytes: 64 << 20 });
        assert!(!h.expects_brief(0, LEN));
    }

    #[test]
    fn pages_that_came_back_soon_are_expected_to_do_so_again() {
        let mut h = ReuseHistory::new();
        assert!(!h.expects_brief(0, 4096));
        h.note(0, 4096, 1000, IDLE);
        assert!(h.expects_brief(0, 4096) && !h.expects_brief(4096, 8192));
        h.note(0, 4096, 1_000_000_000, IDLE);
        assert!(!h.expects_brief(0, 4096));
    }

    #[test]
    fn many_brief_ones_speak_for_all() {
        let mut h = ReuseHistory::new();
        for i in 0..8 {
            assert!(!h.expects_brief(1 << 40, (1 << 40) + 1));
            h.note(i * 8192, i * 8192 + 4096, 0, IDLE);
        }
        assert!(h.expects_brief(1 << 40, (1 << 40) + 1));
        h.note(1 << 40, (1 << 40) + 4096, 1_000_000_000, IDLE);
        assert!(!h.expects_brief(1 << 40, (1 << 40) + 1));
    }
}
