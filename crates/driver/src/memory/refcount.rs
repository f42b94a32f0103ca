//! The number of MRs over each part of the memory file. Pure bookkeeping.

use std::collections::BTreeMap;

/// Ranges of a number line, each with the number of its holders. Ranges without a holder are left out.
#[derive(Default)]
pub(crate) struct Refcounts(BTreeMap<u64, (u64, u32)>);

impl Refcounts {
    pub const fn new() -> Self {
        Refcounts(BTreeMap::new())
    }

    /// Makes `at` a boundary.
    fn split(&mut self, at: u64) {
        if let Some((_, held)) = self.0.range_mut(..at).next_back()
            && held.0 > at
        {
            let (end, n) = *held;
            held.0 = at;
            self.0.insert(at, (end, n));
        }
    }

    /// Joins the ranges on both sides of `at` if they have the same number of holders.
    fn join(&mut self, at: u64) {
        let Some(&(end, n)) = self.0.get(&at) else { return };
        if let Some((_, before)) = self.0.range_mut(..at).next_back()
            && *before == (at, n)
        {
            before.0 = end;
            self.0.remove(&at);
        }
    }

    /// Adds a holder to `[lo, hi)`.
    pub fn add(&mut self, lo: u64, hi: u64) {
        self.split(lo);
        self.split(hi);
        let mut at = lo;
        while at < hi {
            match self.0.range_mut(at..hi).next() {
                Some((&start, held)) if start == at => {
                    held.1 += 1;
                    at = held.0;
                }
                next => {
                    let end = next.map_or(hi, |(&start, _)| start);
                    self.0.insert(at, (end, 1));
                    at = end;
                }
            }
        }
        self.join(lo);
        self.join(hi);
    }

    /// Removes a holder from `[lo, hi)`. All of it must be held.
    pub fn remove(&mut self, lo: u64, hi: u64) {
        self.split(lo);
        self.split(hi);
        let mut at = lo;
        while let Some((&start, held)) = self.0.range_mut(at..hi).next() {
            at = held.0;
            held.1 -= 1;
            if held.1 == 0 {
                self.0.remove(&start);
            }
        }
        self.join(lo);
        self.join(hi);
    }

    /// The first range in `[lo, hi)` without a holder.
    pub fn first_free(&self, lo: u64, hi: u64) -> Option<(u64, u64)> {
        let mut at = lo;
        if let Some((_, &(end, _))) = self.0.range(..=lo).next_back()
            && end > at
        {
            at = end;
        }
        while at < hi {
            match self.0.range(at..hi).next() {
                Some((&start, &(end, _))) if start == at => at = end,
                next => return Some((at, next.map_or(hi, |(&start, _)| start))),
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_free_when_the_last_holder_goes() {
        let mut c = Refcounts::default();
        c.add(0, 8);
        c.add(4, 12);
        assert_eq!(c.first_free(0, 20), Some((12, 20)));
        c.remove(0, 8);
        assert_eq!(c.first_free(0, 12), Some((0, 4)));
        assert_eq!(c.first_free(4, 12), None);
        c.add(0, 2);
        assert_eq!(c.first_free(0, 12), Some((2, 4)));
        c.remove(4, 12);
        c.remove(0, 2);
        assert!(c.0.is_empty());
    }

    #[test]
    fn what_is_held_alike_is_one_range() {
        let mut c = Refcounts::default();
        c.add(0, 100);
        for i in 0..50 {
            c.add(i * 2, i * 2 + 1);
        }
        for i in 0..50 {
            c.remove(i * 2, i * 2 + 1);
        }
        assert_eq!(c.0.len(), 1);
    }

    #[test]
    fn it_counts_as_an_array_does() {
        // A small generator: the order of operations is the same in each run.
        let mut seed = 12345u64;
        let mut next = |n: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33) % n
        };
        let (mut c, mut model, mut held) = (Refcounts::default(), [0u32; 64], Vec::new());
        for _ in 0..5000 {
            if next(2) == 0 || held.is_empty() {
                let lo = next(60);
                let hi = lo + 1 + next(63 - lo);
                c.add(lo, hi);
                held.push((lo, hi));
                model[lo as usize..hi as usize].iter_mut().for_each(|n| *n += 1);
            } else {
                let (lo, hi) = held.swap_remove(next(held.len() as u64) as usize);
                c.remove(lo, hi);
                model[lo as usize..hi as usize].iter_mut().for_each(|n| *n -= 1);
            }
            let free: Vec<u64> = (0..64).filter(|&i| model[i as usize] == 0).collect();
            let mut found = Vec::new();
            let mut at = 0;
            while let Some((lo, hi)) = c.first_free(at, 64) {
                found.extend(lo..hi);
                at = hi;
            }
            assert_eq!(found, free);
        }
    }
}
