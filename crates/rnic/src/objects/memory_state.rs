//! The cost of touching the memory of a vRNIC. The kernel maps a page at the first access, which takes much longer than
//! copying it. It makes a missing page of a sparse file at that moment, too ([`unirdma_mem::holes`]), which takes
//! microseconds, or as long as the owner of the file likes while he punches a hole there. All others wait while a
//! thread does this that has the RNIC. Therefore, once such an access was seen, jobs make the accesses, until many jobs
//! have seen none:
//!
//! | state    | entered when                                    | what only jobs do there                    | ends after        |
//! |----------|-------------------------------------------------|--------------------------------------------|-------------------|
//! | mapped   |                                                 | nothing                                    |                   |
//! | unmapped | a turn or a job copied less than a byte in a ns | long copies, with many looks at the clock  | [`UNMAPPED`] jobs |
//! | sparse   | a hole was touched                              | everything                                 | [`SPARSE`] jobs   |
//! | stuck    | a hole was touched, which took very long        | everything, one job at a time              | [`STUCK`] jobs    |
//!
//! The state is a number of jobs. An event raises it to the number of a state, and never lowers it. Each job that finds
//! no hole lowers it by 1. So stuck memory becomes sparse, then unmapped, and then mapped. In unmapped memory, only
//! jobs that copy at least a byte in a ns lower it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use unirdma_mem::{Loc, Place};

use crate::budget::Terms;

/// Sixteen: a program that keeps touching new pages has at most one slow turn for each sixteen jobs that are not slow.
const UNMAPPED: u32 = 16;
/// A thousand: a program that keeps making holes has one turn in which pages are made for about a thousand jobs.
const SPARSE: u32 = 1_000;
/// About as many jobs as run in a second, so that turns are rarely stuck.
const STUCK: u32 = 1 << 20;
/// A turn that touched a hole and took this time was stuck there, nanoseconds.
const STUCK_TURN_NS: u64 = 1_000_000;
/// The same time for a job. Jobs touch many holes, and some of them are interrupted for a few milliseconds by other
/// programs.
const STUCK_JOB_NS: u64 = 10_000_000;

/// Time that jobs may take to make pages for a vRNIC while others have work. A job that makes a page takes a core from
/// programs, and time from the requests of others, for as long as many requests take.
pub(crate) const PAGE_TIME: Terms = Terms { parts: 8, burst_ns: 10_000_000, most_ns: 1_000_000, step_ns: 0 };

/// The state of the memory of a vRNIC. The vRNIC and all its sessions share it. Only the thread that has the RNIC uses
/// it.
#[derive(Clone, Debug, Default)]
pub(crate) struct MemoryState(Arc<AtomicU32>);

impl MemoryState {
    #[inline]
    fn jobs_to_come(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }

    /// Unmapped, or a state of higher cost: careful jobs make long copies.
    #[inline]
    pub fn is_slow(&self) -> bool {
        self.jobs_to_come() > 0
    }

    /// Sparse or stuck: only jobs touch it.
    #[inline]
    pub fn is_sparse(&self) -> bool {
        self.jobs_to_come() > UNMAPPED
    }

    /// A place in memory of the vRNIC, with the state that it has now.
    #[inline]
    pub fn place<'a>(&self, place: Place<'a>) -> Place<'a> {
        match place.at() {
            Loc::Mapped(span, off) if self.is_sparse() => {
                Place::new(Loc::Sparse { span, off, waits: self.jobs_to_come() > SPARSE }, place.len())
            }
            _ => place,
        }
    }

    /// A hole was touched.
    pub fn touch_hole(&self) {
        self.raise(SPARSE);
    }

    /// A turn has ended that took `took_ns`. It has touched a hole, or else it was slow.
    pub fn end_turn(&self, touched: bool, took_ns: u64) {
        self.raise(if touched { holes(took_ns, STUCK_TURN_NS) } else { UNMAPPED });
    }

    /// A job has ended that took `took_ns`. It has touched holes, or else it has copied `bytes` from mapping to
    /// mapping.
    pub fn end_job(&self, touched: bool, bytes: u64, took_ns: u64) {
        if touched {
            self.raise(holes(took_ns, STUCK_JOB_NS));
        } else if self.is_sparse() || took_ns < bytes {
            self.0.store(self.jobs_to_come().saturating_sub(1), Ordering::Relaxed);
        } else if bytes > 0 {
            self.raise(UNMAPPED);
        }
    }

    fn raise(&self, state: u32) {
        self.0.fetch_max(state, Ordering::Relaxed);
    }
}

/// The state of memory in which holes were touched.
fn holes(took_ns: u64, stuck_ns: u64) -> u32 {
    if took_ns < stuck_ns { SPARSE } else { STUCK }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_transitions() {
        /// Mapped memory, and memory of each other state in which one job has found no hole.
        const BEFORE: [u32; 4] = [0, UNMAPPED - 1, SPARSE - 1, STUCK - 1];
        const FEWER: [u32; 4] = [0, UNMAPPED - 2, SPARSE - 2, STUCK - 2];
        const IS_SPARSE: [u32; 4] = [SPARSE, SPARSE, SPARSE, STUCK - 1];
        let after = |event: fn(&MemoryState)| {
            BEFORE.map(|n| {
                let m = MemoryState(Arc::new(n.into()));
                event(&m);
                m.jobs_to_come()
            })
        };
        assert_eq!(after(|m| m.touch_hole()), IS_SPARSE);
        assert_eq!(after(|m| m.end_turn(false, STUCK_TURN_NS)), [UNMAPPED, UNMAPPED, SPARSE - 1, STUCK - 1]);
        assert_eq!(after(|m| m.end_turn(true, STUCK_TURN_NS - 1)), IS_SPARSE);
        assert_eq!(after(|m| m.end_turn(true, STUCK_TURN_NS)), [STUCK; 4]);
        assert_eq!(after(|m| m.end_job(true, 8192, STUCK_JOB_NS - 1)), IS_SPARSE);
        assert_eq!(after(|m| m.end_job(true, 8192, STUCK_JOB_NS)), [STUCK; 4]);
        assert_eq!(after(|m| m.end_job(false, 8192, 8191)), FEWER);
        assert_eq!(after(|m| m.end_job(false, 8192, 8192)), [UNMAPPED, UNMAPPED, SPARSE - 2, STUCK - 2]);
        assert_eq!(after(|m| m.end_job(false, 0, STUCK_JOB_NS)), [0, UNMAPPED - 1, SPARSE - 2, STUCK - 2]);
    }

    #[test]
    fn what_only_jobs_touch_and_what_may_make_them_wait() {
        let span = unirdma_mem::Span::anonymous(8);
        let of = |n: u32| {
            let m = MemoryState(Arc::new(n.into()));
            let at = m.place(Place::new(Loc::Mapped(&span, 0), 8)).at();
            (m.is_slow(), at.takes_time(), at.may_wait())
        };
        assert_eq!((of(0), of(1), of(UNMAPPED)), ((false, false, false), (true, false, false), (true, false, false)));
        assert_eq!((of(UNMAPPED + 1), of(SPARSE)), ((true, true, false), (true, true, false)));
        assert_eq!((of(SPARSE + 1), of(STUCK)), ((true, true, true), (true, true, true)));
    }
}
