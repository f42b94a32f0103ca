//! Scattered pages that a driver has mapped into one range of bus addresses (MAP_RUNS).
//!
//! The addresses are the device's own: they have a bit that is not set in any address of a frontend's memory. Users of
//! a range keep its memory mapped.

use std::collections::BTreeMap;

use unirdma_abi as abi;
use unirdma_link::{Kept, Ledger};
use unirdma_mem::Span;

/// Most ranges of a session, plus [`RANGES_OF_QUEUE`] for each of its queues: a ring may lie in one range, and a larger
/// ring that will replace it in another.
const MAX_RANGES: usize = 1024;
const RANGES_OF_QUEUE: usize = 2;
/// Bytes charged to the account for a range: its entries in two B-trees.
const RANGE_BYTES: u64 = 128;
/// Unmapped gap between two ranges, so that an access beyond the end of one range does not reach the next.
const GAP: u64 = 4096;

/// The ranges of one session.
#[derive(Default)]
pub(crate) struct Mapped {
    /// By start address, with the range's handle.
    ranges: BTreeMap<u64, (u32, Span)>,
    by_handle: BTreeMap<u32, u64>,
    /// Bytes of addresses that were given out. Addresses are never reused.
    given: u64,
    kept: Kept,
}

impl Mapped {
    /// No ranges. Later ones are charged to `ledger`.
    pub fn new(ledger: Ledger) -> Self {
        Mapped { kept: Kept::new(ledger), ..Mapped::default() }
    }

    /// True if there is room for a further range of `len` bytes in a session that has `queues` queues.
    pub fn has_room(&self, len: u64, queues: usize) -> bool {
        self.ranges.len() < MAX_RANGES + RANGES_OF_QUEUE * queues
            && self.given.saturating_add(len) < 1 << 62
            && self.kept.has_room(RANGE_BYTES)
    }

    /// Adds `span` as range `handle`, and returns its address.
    pub fn add(&mut self, handle: u32, span: Span) -> u64 {
        let addr = abi::MAPPED_RUNS + self.given;
        self.given += (span.len() as u64).next_multiple_of(GAP) + GAP;
        self.ranges.insert(addr, (handle, span));
        self.by_handle.insert(handle, addr);
        self.count();
        addr
    }

    /// Removes a range; false if there is none with this handle.
    pub fn remove(&mut self, handle: u32) -> bool {
        let known = self.by_handle.remove(&handle).and_then(|addr| self.ranges.remove(&addr)).is_some();
        self.count();
        known
    }

    fn count(&mut self) {
        self.kept.set(self.ranges.len() as u64 * RANGE_BYTES);
    }

    /// The memory at `addr`, if `len` bytes lie within one range.
    pub fn span(&self, addr: u64, len: u64) -> Option<Span> {
        let (start, (_, span)) = self.ranges.range(..=addr).next_back()?;
        span.sub(addr - start, len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use unirdma_link::{KINDS, Resource};

    #[test]
    fn a_range_has_its_addresses_until_it_is_forgotten() {
        let mut m = Mapped::default();
        let [a, b] = [(7, 8192), (9, 4096)].map(|(handle, len)| m.add(handle, Span::anonymous(len)));
        assert!(a & b & abi::MAPPED_RUNS != 0 && a != b);
        assert_eq!(m.span(a + 4096, 4096).map(|s| s.len()), Some(4096));
        assert!(m.span(a + 4096, 4097).is_none() && m.span(a + 8192, 1).is_none() && m.span(a - 1, 1).is_none());
        assert!(m.span(u64::MAX, 1).is_none() && m.span(b, u64::MAX).is_none());
        assert!(m.remove(7) && !m.remove(7) && m.span(a, 1).is_none() && m.span(b, 4096).is_some());
        assert_ne!(m.add(11, Span::anonymous(8192)), a);
    }

    #[test]
    fn ranges_have_a_limit_and_are_on_the_account() {
        let ledger = Ledger::of_host([u64::MAX; KINDS]).for_vrnic([None; KINDS]);
        let used = || ledger.usage(Resource::Kept).0;
        let mut m = Mapped::new(ledger.clone());
        let page = Span::anonymous(4096);
        let fill = |m: &mut Mapped, queues| {
            let made = (m.ranges.len() as u32..)
                .take_while(|&i| m.has_room(4096, queues).then(|| m.add(i, page.clone())).is_some());
            made.count()
        };
        assert_eq!((fill(&mut m, 0), fill(&mut m, 10)), (MAX_RANGES, 10 * RANGES_OF_QUEUE));
        assert_eq!(used(), (MAX_RANGES + 10 * RANGES_OF_QUEUE) as u64 * RANGE_BYTES);
        assert!(m.remove(0) && m.has_room(4096, 10));
        drop(m);
        assert_eq!(used(), 0);
        let poor = Ledger::of_host([3 * RANGE_BYTES; KINDS]).for_vrnic([None; KINDS]);
        assert_eq!(fill(&mut Mapped::new(poor), 0), 1, "half of what there is");
    }
}
