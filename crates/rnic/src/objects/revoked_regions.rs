//! Memory regions that a session has lost while MRs lie in them. From that moment on, each lookup treats such an MR as
//! dead. It is freed later, by a walk over the MRs of the session in the order of their numbers, a part at a time.

use std::collections::HashSet;

use super::mr::Mr;

/// The lost regions of a session whose MRs are not all freed.
#[derive(Default)]
pub(crate) struct Revoked {
    /// Regions whose MRs the present walk frees.
    now: HashSet<u64>,
    /// Regions that were lost since it began. The next walk is for them.
    then: HashSet<u64>,
    /// Number of times that regions were lost.
    times: u32,
    /// The walk goes on at MRs with this number.
    pub next: u32,
}

impl Revoked {
    /// These regions are gone.
    pub fn add(&mut self, regions: &[u64]) {
        self.times = self.times.wrapping_add(1);
        self.then.extend(regions);
    }

    /// True while a walk is to be done.
    pub fn looks(&self) -> bool {
        !self.now.is_empty()
    }

    /// The present walk has come to the last MR. True if there is another one to do, from the first MR on.
    pub fn begin_look(&mut self) -> bool {
        self.now = std::mem::take(&mut self.then);
        self.next = 0;
        !self.now.is_empty()
    }

    /// True if an MR lies in a lost region. A session may have many regions, and an MR may lie in many. So a negative
    /// answer is kept at the MR until further regions are lost.
    pub fn concerns(&self, m: &Mr) -> bool {
        if m.checked.get() == self.times {
            return false;
        }
        let gone = m.regions.iter().any(|r| self.now.contains(r) || self.then.contains(r));
        if !gone {
            m.checked.set(self.times);
        }
        gone
    }
}
