//! Whether programs ask a poller for something so often that its worker is keen on the cores (`demand`).

/// See the module.
#[derive(Default)]
pub(super) struct Zeal(u16);

impl Zeal {
    /// Each time that a poller is asked adds this, and each look in vain takes 1 away. So a poller stays keen if it looks in vain fewer than
    /// sixteen times for each time that it is asked.
    const ASKED: u16 = 16;
    const KEEN: u16 = 8 * Self::ASKED;
    const MOST: u16 = 2 * Self::KEEN;

    /// A look has found something that a program has asked for.
    pub fn was_asked(&mut self) {
        self.0 = (self.0 + Self::ASKED).min(Self::MOST);
    }

    /// A look has found nothing.
    pub fn looked_in_vain(&mut self) {
        self.0 = self.0.saturating_sub(1);
    }

    /// True if it is asked often.
    pub fn is_keen(&self) -> bool {
        self.0 >= Self::KEEN
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether a poller is keen that is asked so many times, and then looks in vain so many times, again and again.
    fn is_keen(asked: u16, in_vain: u16) -> bool {
        let mut z = Zeal::default();
        let mut keen = false;
        for _ in 0..100 {
            (0..asked).for_each(|_| z.was_asked());
            keen = z.is_keen();
            (0..in_vain).for_each(|_| z.looked_in_vain());
        }
        keen
    }

    #[test]
    fn a_poller_is_keen_that_is_asked_for_something_in_one_of_sixteen_looks() {
        assert!(is_keen(1, 0) && is_keen(1, 10) && is_keen(10, 100));
        assert!(!is_keen(1, 20) && !is_keen(3, 250));
    }
}
