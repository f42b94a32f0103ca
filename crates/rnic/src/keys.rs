//! Numbers that cannot be guessed: a seeded generator and a permutation of the key space.

/// SplitMix64, seeded by the caller, so that one seed replays a whole run.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// A generator that `seed` determines.
    pub fn new(seed: u64) -> Self {
        Rng(seed)
    }
    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

/// A secret permutation of 32-bit numbers: a balanced Feistel network of four rounds. It turns a table
/// index and a tag into a key that looks random, and back without a look-up.
#[derive(Clone, Debug)]
pub struct KeyCipher([u64; 4]);

impl KeyCipher {
    /// Draws the secret.
    pub fn new(rng: &mut Rng) -> Self {
        KeyCipher(std::array::from_fn(|_| rng.next_u64()))
    }

    #[inline]
    fn round(&self, i: usize, half: u32) -> u32 {
        (mix(self.0[i] ^ u64::from(half)) >> 24) as u32 & 0xffff
    }

    /// The key of `plain`.
    #[inline]
    pub fn seal(&self, plain: u32) -> u32 {
        let (mut l, mut r) = (plain >> 16, plain & 0xffff);
        for i in 0..4 {
            (l, r) = (r, l ^ self.round(i, r));
        }
        l << 16 | r
    }

    /// The number whose key is `key`.
    #[inline]
    pub fn open(&self, key: u32) -> u32 {
        let (mut l, mut r) = (key >> 16, key & 0xffff);
        for i in (0..4).rev() {
            (l, r) = (r ^ self.round(i, l), l);
        }
        l << 16 | r
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_undoes_seal() {
        let c = KeyCipher::new(&mut Rng::new(7));
        for i in (0..100_000u32).chain([u32::MAX, 1 << 31]) {
            assert_eq!(c.open(c.seal(i)), i);
        }
    }

    #[test]
    fn neighbours_have_no_neighbouring_keys() {
        let c = KeyCipher::new(&mut Rng::new(7));
        let near = (0..10_000u32).filter(|&i| c.seal(i).abs_diff(c.seal(i + 1)) < 1 << 16).count();
        assert!(near < 10, "{near} of 10000 pairs are close");
    }
}
