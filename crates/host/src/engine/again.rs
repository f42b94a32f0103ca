//! Whether a poller looks at the RNIC once more before it gives its core to the program that it has done something for.
//!
//! Who waits for that may be a program on another core, which runs, and answers at once. Then the poller has the answer, too, before it has
//! switched to the program on its own core, and two switches of threads are saved. Two programs on the poller's core never answer so soon, and
//! each look makes them wait. So the poller learns from its looks.

/// See the module.
#[derive(Default)]
pub(super) struct Again {
    /// Small rounds, after each of which it could look once more.
    rounds: u8,
    /// It looks after each small round while this is not 0. Looks that find something add to it, others take from it.
    score: u8,
    /// It looks now.
    looks: bool,
}

impl Again {
    /// What a look that finds something adds: it saves some four times as much as one for nothing takes.
    const FOUND: u8 = 4;
    const MOST: u8 = 16;
    /// Looks in one of so many rounds are made in any case.
    const EVERY: u8 = 16;

    /// A small round has found something. True if the poller looks once more before it lets others in; it does so once.
    pub fn begins(&mut self) -> bool {
        if self.ends(true) {
            return false;
        }
        self.rounds = self.rounds.wrapping_add(1);
        self.looks = self.score > 0 || self.rounds % Self::EVERY == 0;
        self.looks
    }

    /// A look at the RNIC has found something, or nothing. True if it was one of those that are made once more.
    pub fn ends(&mut self, found: bool) -> bool {
        let looked = std::mem::take(&mut self.looks);
        if looked {
            let score = if found { self.score + Self::FOUND } else { self.score.saturating_sub(1) };
            self.score = score.min(Self::MOST);
        }
        looked
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How often a poller looks once more in so many rounds, if each such look finds that.
    fn looks(a: &mut Again, rounds: usize, found: bool) -> usize {
        let look = |_: &usize| a.begins() && (if found { !a.begins() } else { a.ends(false) });
        (0..rounds).filter(look).count()
    }

    #[test]
    fn looks_that_find_something_are_made_after_each_round_and_others_seldom() {
        let mut a = Again::default();
        assert_eq!(looks(&mut a, 160, false), 10);
        assert!(looks(&mut a, 160, true) >= 145);
        let more = usize::from(Again::MOST);
        assert!((10..=10 + more).contains(&looks(&mut a, 160, false)));
    }

    #[test]
    fn one_in_five_looks_has_to_find_something() {
        let mut a = Again::default();
        looks(&mut a, 40, true);
        let every_fifth = |a: &mut Again| (looks(a, 4, false), looks(a, 1, true));
        assert!((0..100).all(|_| every_fifth(&mut a) == (4, 1)), "four in vain take what one has added");
        looks(&mut a, 100, false);
        assert_eq!(a.score, 0);
    }
}
