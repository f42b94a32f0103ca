//! Doorbell pages that are polled, and which of them the next poll reads.
//!
//! A poll reads at most [`PAGES_PER_POLL`] pages of each vRNIC, and the next poll goes on where it ended. So a vRNIC
//! whose many pages ring all the time costs the others no more than one with few, and each doorbell is seen after a
//! bounded number of polls.

use std::ops::Range;

use unirdma_mem::Bell;

use crate::objects::{DoorbellPage, VrnicId};
use crate::slab::Handle;

/// Most pages of one vRNIC that one poll reads.
pub(crate) const PAGES_PER_POLL: usize = 8;

/// The part of a list that the last poll has read.
#[derive(Default)]
struct Window {
    begin: usize,
    end: usize,
}

impl Window {
    /// The part of a list of `len` entries that the next poll reads. After the end of the list it begins anew.
    #[inline]
    fn next(&mut self, len: usize) -> Range<usize> {
        self.begin = if self.end < len { self.end } else { 0 };
        self.end = len.min(self.begin + PAGES_PER_POLL);
        self.begin..self.end
    }

    /// Entry `i` of the list is gone, and those after it have moved down.
    fn removed(&mut self, i: usize) {
        self.begin -= usize::from(i < self.begin);
        self.end -= usize::from(i < self.end);
    }
}

/// The polled pages of one vRNIC; at least one.
pub(crate) struct Group {
    vrnic: VrnicId,
    doors: Vec<Handle<DoorbellPage>>,
    window: Window,
}

impl Group {
    pub fn vrnic(&self) -> VrnicId {
        self.vrnic
    }

    /// Moves on to the pages that the next poll reads.
    #[inline]
    pub fn look(&mut self) -> &[Handle<DoorbellPage>] {
        &self.doors[self.window.next(self.doors.len())]
    }

    /// This poll reads none of them.
    pub fn pass_over(&mut self) {
        self.window.begin = self.window.end;
    }
}

/// The doorbell pages that are polled.
#[derive(Default)]
pub(crate) struct Polled {
    groups: Vec<Group>,
    /// Counts the changes of the set of pages.
    changes: u64,
}

impl Polled {
    pub fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// The polled pages of the vRNICs for which `of` is true.
    pub fn doors(&self, of: impl Fn(VrnicId) -> bool) -> impl Iterator<Item = Handle<DoorbellPage>> {
        self.groups.iter().filter(move |g| of(g.vrnic)).flat_map(|g| g.doors.iter().copied())
    }

    /// The vRNICs that have polled pages.
    pub fn vrnics(&self) -> impl Iterator<Item = VrnicId> {
        self.groups.iter().map(|g| g.vrnic)
    }

    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// Adds a page, which must not be in it.
    pub fn add(&mut self, vrnic: VrnicId, door: Handle<DoorbellPage>) {
        self.changes += 1;
        match self.groups.iter_mut().find(|g| g.vrnic == vrnic) {
            Some(g) => g.doors.push(door),
            None => self.groups.push(Group { vrnic, doors: vec![door], window: Window::default() }),
        }
    }

    /// Removes a page, if it is in it.
    pub fn remove(&mut self, door: Handle<DoorbellPage>) {
        self.retain(|g| 0..g.doors.len(), |d| d != door);
    }

    /// Removes those pages that the last poll has read and for which `keep` is false.
    pub fn retain_looked(&mut self, keep: impl FnMut(Handle<DoorbellPage>) -> bool) {
        self.retain(|g| g.window.begin..g.window.end, keep);
    }

    fn retain(&mut self, of: impl Fn(&Group) -> Range<usize>, mut keep: impl FnMut(Handle<DoorbellPage>) -> bool) {
        for g in &mut self.groups {
            for i in of(g).rev() {
                if !keep(g.doors[i]) {
                    g.doors.remove(i);
                    g.window.removed(i);
                    self.changes += 1;
                }
            }
        }
        self.groups.retain(|g| !g.doors.is_empty());
    }

    /// Copies of the doorbells. `bell` gets the doorbell of a page.
    pub fn bells(&self, bell: impl Fn(Handle<DoorbellPage>) -> Option<Bell>) -> Bells {
        let of = |g: &Group| (g.doors.iter().filter_map(|&d| bell(d)).collect(), Window::default());
        Bells { groups: self.groups.iter().map(of).collect() }
    }

    /// The pages of each vRNIC.
    #[inline]
    pub fn groups(&mut self) -> impl Iterator<Item = &mut Group> {
        self.groups.iter_mut()
    }
}

/// Copies of the polled doorbells, for a thread that reads them without having the RNIC.
#[derive(Default)]
pub struct Bells {
    /// The doorbells of each vRNIC.
    groups: Vec<(Vec<Bell>, Window)>,
}

impl Bells {
    /// True if one of them has rung.
    pub fn have_rung(&self) -> bool {
        self.groups.iter().flat_map(|g| &g.0).any(Bell::has_rung)
    }

    /// Reads some doorbells of each vRNIC, the next ones each time; true if one of them has rung.
    #[inline]
    pub fn look(&mut self) -> bool {
        self.groups.iter_mut().any(|(bells, window)| bells[window.next(bells.len())].iter().any(Bell::has_rung))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vrnic(n: u64) -> VrnicId {
        VrnicId(Handle::from_raw(n | 1 << 24))
    }

    fn door(n: u64) -> Handle<DoorbellPage> {
        Handle::from_raw(n | 1 << 24)
    }

    /// The pages that one poll reads.
    fn look(p: &mut Polled) -> Vec<Handle<DoorbellPage>> {
        p.groups().flat_map(|g| g.look().to_vec()).collect()
    }

    #[test]
    fn few_pages_are_looked_at_each_time_and_many_in_turn() {
        let mut p = Polled::default();
        p.add(vrnic(1), door(0));
        let n = 3 * PAGES_PER_POLL as u64 + 1;
        (1..=n).for_each(|i| p.add(vrnic(2), door(i)));
        let mut seen = vec![0; n as usize + 1];
        for _ in 0..8 {
            let of_look = look(&mut p);
            assert!(of_look.len() <= 1 + PAGES_PER_POLL);
            (0..=n).for_each(|i| seen[i as usize] += usize::from(of_look.contains(&door(i))));
        }
        assert_eq!(seen[0], 8);
        assert!(seen[1..].iter().all(|&times| times == 2), "{seen:?}");
    }

    #[test]
    fn only_what_was_looked_at_goes_and_nothing_is_passed_over() {
        let mut p = Polled::default();
        (0..20).for_each(|i| p.add(vrnic(1), door(i)));
        let (first, changes) = (look(&mut p), p.changes());
        p.retain_looked(|s| s == first[3]);
        assert_eq!(p.changes() - changes, PAGES_PER_POLL as u64 - 1);
        let rest: Vec<_> = (PAGES_PER_POLL as u64..20).map(door).collect();
        assert_eq!([look(&mut p), look(&mut p)].concat(), rest);
        assert_eq!(look(&mut p)[0], first[3]);
        p.remove(first[3]);
        p.remove(door(9));
        let mut left = [look(&mut p), look(&mut p)].concat();
        left.sort();
        left.dedup();
        assert_eq!(left.len(), rest.len() - 1);
        left.into_iter().for_each(|s| p.remove(s));
        assert!(p.is_empty() && look(&mut p).is_empty());
        p.retain_looked(|_| false);
    }
}
