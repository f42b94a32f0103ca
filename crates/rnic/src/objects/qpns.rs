//! The numbers that QPs may get. Hosts divide them among several RNICs, so that the QPN of a packet identifies the
//! RNIC.

use unirdma_formats::Qpn;

/// Random draws that may hit taken numbers before the free ones are searched in order.
const DRAWS: u32 = 64;

/// Ranges of QPNs: first number and length.
pub(crate) struct QpnSpace {
    ranges: Vec<(u32, u32)>,
}

/// All numbers.
impl Default for QpnSpace {
    fn default() -> Self {
        QpnSpace { ranges: vec![(0, Qpn::MASK + 1)] }
    }
}

/// True for a number that a QP may have: 0 and 1 are the management QPs, and the last one stands for a multicast group.
pub(crate) fn is_ordinary(qpn: u32) -> bool {
    (2..Qpn::MASK).contains(&qpn)
}

impl QpnSpace {
    /// The numbers of these ranges, which do not overlap.
    pub fn new(ranges: &[(u32, u32)]) -> Self {
        QpnSpace { ranges: ranges.to_vec() }
    }

    /// The number of QPNs.
    pub fn len(&self) -> u32 {
        let special = [0, 1, Qpn::MASK].into_iter().filter(|&n| self.contains(n)).count() as u32;
        self.size() - special
    }

    /// A number for which `is_free` is true, or `None` if none is left. `draw` gives random numbers.
    pub fn draw(&self, mut draw: impl FnMut() -> u64, is_free: impl Fn(u32) -> bool) -> Option<u32> {
        let is_free = |n: u32| is_ordinary(n) && is_free(n);
        let size = self.size();
        if size == 0 {
            return None;
        }
        let mut place = 0;
        for _ in 0..DRAWS {
            place = (draw() % u64::from(size)) as u32;
            if is_free(self.at(place)) {
                return Some(self.at(place));
            }
        }
        (place..size).chain(0..place).map(|i| self.at(i)).find(|&n| is_free(n))
    }

    fn contains(&self, n: u32) -> bool {
        self.ranges.iter().any(|&(start, length)| n.checked_sub(start).is_some_and(|i| i < length))
    }

    fn size(&self) -> u32 {
        self.ranges.iter().map(|r| r.1).sum()
    }

    /// Number `place` of the ranges, one after the other.
    fn at(&self, mut place: u32) -> u32 {
        for &(start, length) in &self.ranges {
            if place < length {
                return start + place;
            }
            place -= length;
        }
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Rng;
    use std::collections::BTreeSet;

    #[test]
    fn each_number_is_drawn_once_and_no_special_one() {
        let mut rng = Rng::new(3);
        let last = Qpn::MASK - 9;
        let space = QpnSpace::new(&[(0, 10), (500, 100), (last, 10)]);
        assert_eq!(space.len(), 117);
        let mut taken = BTreeSet::new();
        while let Some(n) = space.draw(|| rng.next_u64(), |n| !taken.contains(&n)) {
            assert!(taken.insert(n));
        }
        let expected: BTreeSet<u32> = (2..10).chain(500..600).chain(last..Qpn::MASK).collect();
        assert_eq!(taken, expected);
        assert_eq!(QpnSpace::new(&[]).draw(|| 0, |_| true), None);
        assert_eq!(QpnSpace::default().len(), (1 << 24) - 3);
    }
}
