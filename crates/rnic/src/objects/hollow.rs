//! Memory with holes: pages of sparse files that are made when somebody touches them ([`unirdma_mem::holes`]). That takes
//! microseconds, or as long as the owner of the file takes who is just making a hole there. So nobody shall do it who has the RNIC:
//! once a hole was touched, jobs reach the memory of its vRNIC, until so many of them have found no further hole.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use unirdma_mem::{Loc, Place};

use crate::budget::Terms;

/// Jobs that must find no hole before memory is touched without a job again.
const CALM_JOBS: u32 = 1_000;
/// The same of memory that somebody was stuck in. A second is long enough to make few of these stops.
const STUCK_JOBS: u32 = 1 << 20;
/// Whoever touched a hole while the RNIC was locked, and then took so long, was stuck, nanoseconds.
const STUCK_NS: u64 = 1_000_000;
/// The same of a job, for which nobody waits but who has made it.
const JOB_STUCK_NS: u64 = 10_000_000;

/// Whether the memory of a vRNIC has holes. All its sessions have the same one. Only who has the RNIC uses it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Hollow(Arc<AtomicU32>);

impl Hollow {
    /// A place in memory of the vRNIC, as it is to be reached now.
    #[inline]
    pub fn place<'a>(&self, place: Place<'a>) -> Place<'a> {
        match (self.0.load(Ordering::Relaxed), place.at()) {
            (0, _) => place,
            (left, Loc::Mapped(span, off)) => {
                Place::new(Loc::Sparse { span, off, waits: left > CALM_JOBS }, place.len())
            }
            _ => place,
        }
    }

    /// True if no hole was touched lately.
    #[inline]
    pub fn is_calm(&self) -> bool {
        self.0.load(Ordering::Relaxed) == 0
    }

    /// A hole was touched.
    pub fn was_touched(&self) {
        self.0.fetch_max(CALM_JOBS, Ordering::Relaxed);
    }

    /// Whoever touched a hole had the RNIC for so long, nanoseconds.
    pub fn was_held(&self, ns: u64) {
        if ns >= STUCK_NS {
            self.0.store(STUCK_JOBS, Ordering::Relaxed);
        }
    }

    /// A job has ended that reached the memory, in which it did or did not touch holes; it took so long, nanoseconds.
    pub fn end_job(&self, touched: bool, ns: u64) {
        match touched {
            true if ns >= JOB_STUCK_NS => self.0.store(STUCK_JOBS, Ordering::Relaxed),
            true => self.was_touched(),
            false => self.0.store(self.0.load(Ordering::Relaxed).saturating_sub(1), Ordering::Relaxed),
        }
    }
}

/// How long jobs may make pages for a vRNIC while others have work. Whoever makes a page keeps a core from the programs there, and from the
/// requests of others, for as long as many requests take.
pub(crate) const PAGE_TIME: Terms = Terms { parts: 8, burst_ns: 10_000_000, most_ns: 1_000_000, step_ns: 0 };

#[cfg(test)]
mod tests {
    use unirdma_mem::Span;

    use super::*;

    #[test]
    fn jobs_reach_memory_with_holes_until_they_find_none() {
        let (h, span) = (Hollow::default(), Span::anonymous(8));
        let at = || h.place(Place::new(Loc::Mapped(&span, 0), 8)).at();
        assert!(!at().takes_time());
        h.was_touched();
        h.was_held(STUCK_NS - 1);
        assert!(at().takes_time() && !at().may_wait());
        (1..CALM_JOBS).for_each(|_| h.end_job(false, JOB_STUCK_NS));
        assert!(at().takes_time());
        h.end_job(true, STUCK_NS);
        (1..CALM_JOBS).for_each(|_| h.end_job(false, 0));
        assert!(at().takes_time());
        h.end_job(false, 0);
        h.end_job(false, 0);
        assert!(!at().takes_time());
    }

    #[test]
    fn memory_that_somebody_was_stuck_in_may_make_others_wait() {
        let (h, span) = (Hollow::default(), Span::anonymous(8));
        let at = || h.place(Place::new(Loc::Mapped(&span, 0), 8)).at();
        h.was_touched();
        h.was_held(STUCK_NS);
        assert!(at().may_wait());
        h.end_job(true, 0);
        assert!(at().may_wait(), "that this hole was filled soon says little of the next one");
        (0..STUCK_JOBS - CALM_JOBS).for_each(|_| h.end_job(false, 0));
        assert!(at().takes_time() && !at().may_wait());
        h.end_job(true, JOB_STUCK_NS);
        assert!(at().may_wait());
    }
}
