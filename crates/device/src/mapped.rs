//! Scattered pages that a driver has asked to have as one range of bus addresses (MAP_RUNS).
//!
//! The addresses are the device's own: they have a bit that no memory of a frontend has. What uses the memory keeps it mapped.

use std::collections::BTreeMap;

use unirdma_abi as abi;
use unirdma_mem::Span;

/// Most ranges of one session.
const MAX_RANGES: usize = 65_536;
/// Between two ranges nothing lies, so that who leaves one does not get into the next.
const GAP: u64 = 4096;

/// The ranges of one session.
#[derive(Default)]
pub(crate) struct Mapped {
    /// By the address where each begins; with its handle.
    ranges: BTreeMap<u64, (u32, Span)>,
    by_handle: BTreeMap<u32, u64>,
    /// Bytes of addresses that were given out; none comes back.
    given: u64,
}

impl Mapped {
    /// True if there is no room for a further range of `len` bytes.
    pub fn is_full(&self, len: u64) -> bool {
        self.ranges.len() >= MAX_RANGES || self.given.saturating_add(len) >= 1 << 62
    }

    /// Gives `span` an address, and the name `handle`.
    pub fn add(&mut self, handle: u32, span: Span) -> u64 {
        let addr = abi::MAPPED_RUNS + self.given;
        self.given += (span.len() as u64).next_multiple_of(GAP) + GAP;
        self.ranges.insert(addr, (handle, span));
        self.by_handle.insert(handle, addr);
        addr
    }

    /// Forgets a range; false if there is none of that name.
    pub fn remove(&mut self, handle: u32) -> bool {
        self.by_handle.remove(&handle).and_then(|addr| self.ranges.remove(&addr)).is_some()
    }

    /// A part of a range.
    pub fn span(&self, addr: u64, len: u64) -> Option<Span> {
        let (start, (_, span)) = self.ranges.range(..=addr).next_back()?;
        span.sub(addr - start, len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
