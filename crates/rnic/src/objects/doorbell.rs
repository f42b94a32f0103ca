//! Doorbell pages: which QPs their bits stand for, and whether they are polled.

use unirdma_abi as abi;
use unirdma_abi::Status;
use unirdma_mem::Bell;

use super::ids::SessionId;
use super::qp::Qp;
use crate::slab::Handle;

/// A doorbell bit that no page has.
pub(crate) const NO_SLOT: u32 = u32::MAX;

/// A doorbell page. A process has one; a virtual machine has one for each of its processes, so that none can touch
/// another's bits.
///
/// The page has 64 words of 64 bits each, and a summary that says which words were written. Slot *n* has bit *n* / 64
/// of word *n* mod 64 ([`bit_of`]), so that each of the first 64 QPs has a word for itself. The summary then says all:
/// the device does not read such a word, which stays in the cache of the core that posts.
pub(crate) struct DoorbellPage {
    pub session: SessionId,
    /// Its number in its session. 0 names the page of SET_DOORBELL.
    pub number: u32,
    pub bell: Bell,
    /// QPs by slot.
    pub slots: Vec<Option<Handle<Qp>>>,
    /// Slots that no QP has.
    pub free_slots: Vec<u32>,
    /// For each word, the number of QPs that have bits of it, and the sum of their slots.
    pub words: [(u32, u32); abi::DOORBELL_WORDS],
    /// False while the page is polled, true while its driver must kick.
    pub parked: bool,
    /// It has rung, and is in the agenda of its vRNIC.
    pub rung: bool,
    pub last_rung_ns: u64,
}

/// The bit of a doorbell page, counted from the first bit of its first word, that slot `slot` has.
pub(crate) fn bit_of(slot: u32) -> u32 {
    let words = abi::DOORBELL_WORDS as u32;
    slot % words * 64 + slot / words
}

/// The slot that has this bit of a doorbell page.
fn slot_of(bit: u32) -> u32 {
    bit % 64 * abi::DOORBELL_WORDS as u32 + bit / 64
}

impl DoorbellPage {
    /// A page that nobody polls and that no QP has a bit of.
    pub fn new(session: SessionId, number: u32, bell: Bell) -> Self {
        DoorbellPage {
            session,
            number,
            bell,
            slots: Vec::new(),
            free_slots: Vec::new(),
            words: [(0, 0); abi::DOORBELL_WORDS],
            parked: true,
            rung: false,
            last_rung_ns: 0,
        }
    }

    /// The same page with `slots` slots. `free_slots` are free; the others wait for [`DoorbellPage::fill_slot`].
    pub fn with_slots(self, slots: u32, free_slots: Vec<u32>) -> Self {
        DoorbellPage { slots: vec![None; slots as usize], free_slots, ..self }
    }

    /// A slot that no QP has.
    ///
    /// # Errors
    /// `Exhausted` if QPs have all of them.
    pub fn take_slot(&mut self) -> Result<u32, Status> {
        match self.free_slots.pop() {
            Some(slot) => Ok(slot),
            None if self.slots.len() < abi::MAX_QP as usize => {
                self.slots.push(None);
                Ok(self.slots.len() as u32 - 1)
            }
            None => Err(Status::Exhausted),
        }
    }

    /// Gives QP `qp` a slot that was taken.
    pub fn fill_slot(&mut self, slot: u32, qp: Handle<Qp>) {
        if let Some(place) = self.slots.get_mut(slot as usize) {
            *place = Some(qp);
            self.count(slot, true);
        }
    }

    /// A QP that had this slot is gone.
    pub fn free_slot(&mut self, slot: u32) {
        if let Some(place) = self.slots.get_mut(slot as usize) {
            if place.take().is_some() {
                self.count(slot, false);
            }
            self.free_slots.push(slot);
        }
        if !self.is_used() {
            (self.slots, self.free_slots) = (Vec::new(), Vec::new());
        }
    }

    fn count(&mut self, slot: u32, more: bool) {
        let (qps, sum) = &mut self.words[slot as usize % abi::DOORBELL_WORDS];
        (*qps, *sum) = if more { (*qps + 1, *sum + slot) } else { (*qps - 1, *sum - slot) };
    }

    /// True if QPs have bits of it.
    pub fn is_used(&self) -> bool {
        self.free_slots.len() < self.slots.len()
    }

    /// The only QP that has a bit of this word; `None` if there are several or none.
    #[inline]
    pub fn alone_in(&self, word: u32) -> Option<Handle<Qp>> {
        match self.words.get(word as usize) {
            Some(&(1, slot)) => *self.slots.get(slot as usize)?,
            _ => None,
        }
    }

    /// True if several QPs have bits of this word.
    fn is_shared(&self, word: u32) -> bool {
        self.words.get(word as usize).is_some_and(|w| w.0 > 1)
    }

    /// Takes the bits that are set and calls `f` with each QP. A bit that no QP has is ignored. A QP that did not ring
    /// may be among them if the word has recently got its second QP; it then polls its queue for nothing.
    #[inline]
    pub fn take(&self, mut f: impl FnMut(Handle<Qp>)) {
        let mut words = self.bell.take_words();
        while words != 0 {
            let word = words.trailing_zeros();
            words &= words - 1;
            if let Some(qp) = self.alone_in(word) {
                f(qp);
            } else if self.is_shared(word) {
                self.bell.take_bits(word, |bit| {
                    self.slots.get(slot_of(bit) as usize).copied().flatten().into_iter().for_each(&mut f);
                });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use unirdma_mem::Span;

    use super::*;

    fn door() -> DoorbellPage {
        let page = Span::anonymous(4096 + 64);
        let page = page.sub((64 - page.addr() as u64 % 64) % 64, 4096).unwrap();
        DoorbellPage::new(SessionId(Handle::NONE), 0, Bell::new(page).unwrap())
    }

    fn qp(slot: u32) -> Handle<Qp> {
        Handle::from_raw(u64::from(slot) | 1 << 24)
    }

    fn rung(d: &DoorbellPage) -> Vec<Handle<Qp>> {
        let mut got = Vec::new();
        d.take(|qp| got.push(qp));
        got.sort();
        got
    }

    #[test]
    fn each_slot_has_a_bit_for_itself() {
        let bits: BTreeSet<u32> = (0..abi::MAX_QP).map(bit_of).collect();
        assert_eq!((bits.len() as u32, bits.last()), (abi::MAX_QP, Some(&(abi::MAX_QP - 1))));
        assert!((0..abi::MAX_QP).all(|slot| slot_of(bit_of(slot)) == slot));
    }

    #[test]
    fn whoever_rings_is_found_whoever_shares_its_word() {
        let mut d = door();
        for n in 0..200 {
            let slot = d.take_slot().unwrap();
            d.fill_slot(slot, qp(slot));
            assert_eq!(slot, n);
        }
        for slot in [0, 63, 64, 199] {
            d.bell.ring(bit_of(slot));
            assert_eq!(rung(&d), [qp(slot)], "slot {slot}");
        }
        assert!(rung(&d).is_empty());
        // Three of the four slots of word 5 are freed. The QP that is left is found without reading the word, whose
        // bits stay set.
        [5, 133, 197].iter().for_each(|&slot| d.free_slot(slot));
        assert_eq!(d.alone_in(5), Some(qp(69)));
        d.bell.ring(bit_of(69));
        assert_eq!(rung(&d), [qp(69)]);
        // Another QP gets a slot of the word, and the old bit wakes the first QP once more.
        let slot = d.take_slot().unwrap();
        d.fill_slot(slot, qp(slot));
        assert_eq!((slot, d.alone_in(5)), (197, None));
        d.bell.ring(bit_of(slot));
        assert_eq!(rung(&d), [qp(69), qp(197)]);
        d.bell.ring(bit_of(slot));
        assert_eq!(rung(&d), [qp(197)]);
        [69, 197].iter().for_each(|&slot| d.free_slot(slot));
        d.bell.ring(bit_of(69));
        d.bell.ring(abi::MAX_QP - 1);
        assert!(rung(&d).is_empty(), "nobody has these bits");
        assert!(d.is_used());
    }
}
