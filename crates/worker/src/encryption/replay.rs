//! Received packet numbers of a session: a sliding window that ends at the greatest number (RFC 6479).

const WORDS: usize = 65;
/// A packet is accepted if its number is less than this below the greatest one.
pub(super) const WINDOW: u64 = 64 * (WORDS as u64 - 1);

/// The window. A number is checked before its packet is authenticated, and recorded afterwards.
pub(super) struct Window {
    greatest: u64,
    /// A ring of bits, one for each number.
    seen: Box<[u64; WORDS]>,
}

impl Window {
    /// No packet was received.
    pub fn new() -> Self {
        Window { greatest: 0, seen: Box::new([0; WORDS]) }
    }

    fn place(n: u64) -> (usize, u64) {
        ((n / 64 % WORDS as u64) as usize, 1 << (n % 64))
    }

    /// True if the number is within or above the window, and no packet with it was received.
    pub fn is_new(&self, n: u64) -> bool {
        let (word, bit) = Window::place(n);
        n > self.greatest || self.greatest - n < WINDOW && self.seen[word] & bit == 0
    }

    /// Records a packet with this number.
    pub fn note(&mut self, n: u64) {
        if n > self.greatest {
            let words = (n / 64 - self.greatest / 64).min(WORDS as u64);
            for i in 0..words {
                self.seen[((n / 64 - i) % WORDS as u64) as usize] = 0;
            }
            self.greatest = n;
        }
        let (word, bit) = Window::place(n);
        self.seen[word] |= bit;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use unirdma_rnic::Rng;

    #[test]
    fn each_number_is_new_once_in_whatever_order() {
        let mut rng = Rng::new(7);
        let (mut window, mut came, mut greatest) = (Window::new(), BTreeSet::new(), 0u64);
        for _ in 0..200_000 {
            let n = match rng.next_u64() % 100 {
                // Sometimes many packets are lost, even more than the window covers.
                0 => greatest + rng.next_u64() % (2 * WINDOW),
                _ => (greatest + 40).saturating_sub(rng.next_u64() % (WINDOW + 400)),
            };
            let expected = !came.contains(&n) && n + WINDOW > greatest;
            assert_eq!(window.is_new(n), expected, "{n} after {greatest}");
            if expected {
                window.note(n);
                came.insert(n);
                greatest = greatest.max(n);
            }
        }
        assert!(WINDOW >= 1024 && came.len() > 10_000, "{} numbers", came.len());
    }
}
