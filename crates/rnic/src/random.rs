//! Random numbers by ChaCha20, a stream for each use: numbers that somebody has seen do not help to guess later ones.

use rand_chacha::ChaCha20Rng;
use rand_chacha::rand_core::{Rng as _, SeedableRng};

/// The seed of all random numbers of an RNIC.
#[derive(Clone)]
pub struct Seed([u8; 32]);

impl From<[u8; 32]> for Seed {
    fn from(bytes: [u8; 32]) -> Self {
        Seed(bytes)
    }
}

/// A known seed, so that a run can be repeated.
impl From<u64> for Seed {
    fn from(n: u64) -> Self {
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&n.to_le_bytes());
        Seed(bytes)
    }
}

/// A stream of random numbers.
#[derive(Clone, Debug)]
pub struct Rng(ChaCha20Rng);

impl Rng {
    /// The stream that `seed` determines.
    pub fn new(seed: impl Into<Seed>) -> Self {
        Rng(ChaCha20Rng::from_seed(seed.into().0))
    }

    fn stream(seed: &Seed, number: u64) -> Self {
        let mut rng = Rng::new(seed.clone());
        rng.0.set_stream(number);
        rng
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0.next_u64()
    }
}

/// A stream for each use, so that visible numbers of one stream do not help to guess those from another one.
pub(crate) struct Rngs {
    pub qpns: Rng,
    pub keys: Rng,
    pub psns: Rng,
    pub srq_numbers: Rng,
    pub cm_ids: Rng,
    pub cm_ports: Rng,
    pub numbers: Rng,
    pub where_is: Rng,
}

impl Rngs {
    pub fn new(seed: &Seed) -> Self {
        let stream = |number| Rng::stream(seed, number);
        Rngs {
            qpns: stream(1),
            keys: stream(2),
            psns: stream(3),
            srq_numbers: stream(4),
            cm_ids: stream(5),
            cm_ports: stream(6),
            numbers: stream(7),
            where_is: stream(8),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_repeats_its_streams_and_no_two_are_alike() {
        let all = |seed: u64| {
            let s = Rngs::new(&seed.into());
            [s.qpns, s.keys, s.psns, s.srq_numbers, s.cm_ids, s.cm_ports, s.numbers, s.where_is, Rng::new(seed)]
                .map(|mut r| r.next_u64())
        };
        assert_eq!(all(7), all(7));
        let mut seen: Vec<u64> = all(7).into_iter().chain(all(8)).collect();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), 18);
    }
}
