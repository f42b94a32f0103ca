//! Which packets of a session have come: a window that slides behind the greatest number (RFC 6479).

const WORDS: usize = 65;
/// How far behind the greatest number a packet may come.
pub(super) const WINDOW: u64 = 64 * (WORDS as u64 - 1);

/// The window. A number is looked up before its packet is believed, and noted afterwards.
pub(super) struct Window {
    greatest: u64,
    /// A ring of bits, one for each number.
    seen: Box<[u64; WORDS]>,
}

impl Window {
    /// Nothing has come.
    pub fn new() -> Self {
        Window { greatest: 0, seen: Box::new([0; WORDS]) }
    }

    fn place(n: u64) -> (usize, u64) {
        ((n / 64 % WORDS as u64) as usize, 1 << (n % 64))
    }

    /// True if a packet with this number has not come yet, and could be told from one that has.
    pub fn is_new(&self, n: u64) -> bool {
        let (word, bit) = Window::place(n);
        n > self.greatest || self.greatest - n < WINDOW && self.seen[word] & bit == 0
    }

    /// A packet with this number has come.
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
                // Now and then many are lost, also more than the window is wide.
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
