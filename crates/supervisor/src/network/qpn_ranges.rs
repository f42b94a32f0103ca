//! The division of a host's QPNs among its groups, in units of 16,384, so that 1,024 groups can have one unit each.
//!
//! A group begins with one unit. It gets another one while it has fewer than an eighth of all units, and fewer than
//! half of all units are taken: the other half is reserved for future groups.

use unirdma_formats::Qpn;
use unirdma_ipc::network::Range;

/// QPNs of one unit.
pub(super) const UNIT: u32 = 16_384;
/// Number of all units.
const UNITS: u32 = (Qpn::MASK + 1) / UNIT;
/// Most units of one group.
const MAX_OF_GROUP: u32 = UNITS / 8;
/// Number of taken units from which on no group gets another one.
const MAX_FURTHER: u32 = UNITS / 2;

/// The taken units.
pub(super) struct QpnRanges {
    taken: Vec<bool>,
    /// Start of the next search. It advances, so that the numbers of a removed group stay unused for a long time.
    next: u32,
}

impl QpnRanges {
    pub fn new() -> Self {
        QpnRanges { taken: vec![false; UNITS as usize], next: 0 }
    }

    /// Takes a first unit for a group.
    pub fn first(&mut self) -> Option<Range> {
        let found = (0..UNITS).map(|i| (self.next + i) % UNITS).find(|&n| !self.taken[n as usize])?;
        self.taken[found as usize] = true;
        self.next = (found + 1) % UNITS;
        Some((found * UNIT, UNIT))
    }

    /// Takes another unit for a group that has these ranges.
    pub fn further(&mut self, has: &[Range]) -> Option<Range> {
        let of_group = has.iter().map(|r| r.1).sum::<u32>() / UNIT;
        let all = self.taken.iter().filter(|t| **t).count() as u32;
        if of_group < MAX_OF_GROUP && all < MAX_FURTHER { self.first() } else { None }
    }

    /// Takes the units of ranges that a group has already; false if one of them is taken.
    pub fn take(&mut self, ranges: &[Range]) -> bool {
        let units = || ranges.iter().flat_map(|&(start, length)| start / UNIT..(start + length) / UNIT);
        let whole = ranges.iter().all(|&(start, length)| {
            start % UNIT == 0 && length % UNIT == 0 && start.checked_add(length).is_some_and(|end| end <= UNITS * UNIT)
        });
        if !whole || units().any(|u| self.taken[u as usize]) {
            return false;
        }
        units().for_each(|u| self.taken[u as usize] = true);
        true
    }

    /// Frees the units of these ranges.
    pub fn give_back(&mut self, ranges: &[Range]) {
        for &(start, length) in ranges {
            (start / UNIT..(start + length) / UNIT).for_each(|u| self.taken[u as usize] = false);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_grows_to_an_eighth_and_leaves_half_to_others() {
        let mut ranges = QpnRanges::new();
        let mut groups: Vec<Vec<Range>> = (0..6).map(|_| vec![ranges.first().unwrap()]).collect();
        assert_eq!(groups[1], [(UNIT, UNIT)]);
        for g in &mut groups {
            while let Some(r) = ranges.further(g) {
                g.push(r);
            }
        }
        let sizes: Vec<u32> = groups.iter().map(|g| g.len() as u32).collect();
        assert_eq!(sizes, [128, 128, 128, 126, 1, 1]);
        let more = std::iter::from_fn(|| ranges.first()).count();
        assert_eq!(more as u32, UNITS / 2);
        // Freed units can be taken again, and no unit is taken twice.
        ranges.give_back(&groups[3]);
        assert!(ranges.take(&groups[3][5..]) && !ranges.take(&groups[3][..6]) && ranges.take(&groups[3][..5]));
        assert!(
            !ranges.take(&[(1, UNIT)])
                && !ranges.take(&[(0, UNIT * 2000)])
                && !ranges.take(&[(u32::MAX - UNIT + 1, UNIT)])
        );
    }

    #[test]
    fn a_number_rests_before_it_comes_back() {
        let mut ranges = QpnRanges::new();
        let first = ranges.first().unwrap();
        ranges.give_back(&[first]);
        assert_eq!(ranges.first(), Some((UNIT, UNIT)));
        for _ in 0..UNITS - 2 {
            ranges.first();
        }
        assert_eq!((ranges.first(), ranges.first()), (Some(first), None));
    }
}
