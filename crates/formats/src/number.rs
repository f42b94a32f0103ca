//! Tables by the numbers of this crate.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Values by numbers that are random or counted, such as keys and handles. It is not for numbers that a peer chooses,
/// because the peer could choose them so that the table gets slow.
pub type ByNumber<T> = HashMap<u32, T, BuildHasherDefault<NumberHash>>;

/// The hash of [`ByNumber`]: one multiplication.
#[derive(Default)]
pub struct NumberHash(u64);

impl Hasher for NumberHash {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&b| self.write_u32(b.into()));
    }
    fn write_u32(&mut self, n: u32) {
        self.0 = (self.0 ^ u64::from(n)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_count_are_spread_over_both_ends_of_the_hash() {
        let hash = |n: u32| {
            let mut h = NumberHash::default();
            h.write_u32(n);
            h.finish()
        };
        // A hash map takes the bucket from the lower bits, and distinguishes neighbours by the upper seven.
        let places =
            |f: fn(u64) -> u64| (0..1024).map(|n| f(hash(n))).collect::<std::collections::HashSet<u64>>().len();
        assert_eq!((places(|h| h % 1024), places(|h| h >> 57)), (1024, 128));
    }
}
