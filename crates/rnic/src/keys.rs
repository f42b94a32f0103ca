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

/// A secret permutation of 24-bit numbers: a balanced Feistel network of four rounds. It turns the place in a table
/// into the upper bits of a key that looks random, and back without a look-up.
#[derive(Clone, Debug)]
pub struct KeyCipher([u64; 4]);

impl KeyCipher {
    /// Draws the secret.
    pub fn new(rng: &mut Rng) -> Self {
        KeyCipher(std::array::from_fn(|_| rng.next_u64()))
    }

    #[inline]
    fn round(&self, i: usize, half: u32) -> u32 {
        (mix(self.0[i] ^ u64::from(half)) >> 24) as u32 & 0xfff
    }

    /// The sealed form of `plain`, of which 24 bits count.
    #[inline]
    pub fn seal(&self, plain: u32) -> u32 {
        let (mut l, mut r) = (plain >> 12 & 0xfff, plain & 0xfff);
        for i in 0..4 {
            (l, r) = (r, l ^ self.round(i, r));
        }
        l << 12 | r
    }

    /// The number whose sealed form is `key`.
    #[inline]
    pub fn open(&self, key: u32) -> u32 {
        let (mut l, mut r) = (key >> 12 & 0xfff, key & 0xfff);
        for i in (0..4).rev() {
            (l, r) = (r ^ self.round(i, l), l);
        }
        l << 12 | r
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_undoes_seal() {
        let c = KeyCipher::new(&mut Rng::new(7));
        for i in (0..100_000u32).chain([0xff_ffff, 1 << 23]) {
            assert_eq!(c.open(c.seal(i)), i);
        }
    }

    #[test]
    fn neighbours_have_no_neighbouring_keys() {
        let c = KeyCipher::new(&mut Rng::new(7));
        let near = (0..10_000u32).filter(|&i| c.seal(i).abs_diff(c.seal(i + 1)) < 1 << 8).count();
        assert!(near < 10, "{near} of 10000 pairs are close");
    }
}
