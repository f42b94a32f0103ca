//! Which workers of this host want the cores: a table in memory that all of them share, with a time for each.
//!
//! Where pollers share their cores with programs, everybody yields, and a yield gives up more than a time slice: two threads that yield to
//! each other after each request have the core only for one request each time that a thread which works without a pause is done with its
//! slice. Within a worker the time of such threads is limited while others have work ([`Engine::keeps_others_from_work`]). Between workers
//! nobody would know, and the kernel takes the yields for what they are.
//!
//! A worker that wants the cores is *keen* if its programs often ring doorbells for work (`engine::zeal`). A busy poller of another worker gives
//! up more than its slice when it yields only if some worker is keen. A poller that looks in vain, or only repeats what cannot succeed yet,
//! yields after each look too: it would have ten turns in which nothing gets done.
//!
//! The table is a courtesy and no more. A worker that writes what is not so limits others as if it had work, or leaves them as free as if
//! nobody had any.
//!
//! [`Engine::keeps_others_from_work`]: crate::engine::Engine::keeps_others_from_work

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use unirdma_mem::{MapError, MemFd, Span, map_file};

/// Workers with numbers that differ by a multiple of this have one place, and do not see each other.
const PLACES: usize = 1024;
const BYTES: usize = PLACES * size_of::<u64>();
/// How long a worker wants the cores after it has done something, nanoseconds: longer than others may keep it from saying so again.
const WANT_NS: u64 = 10_000_000;
/// It says so again after this, nanoseconds.
const SAY_NS: u64 = 1_000_000;
/// The lowest bit of a time in the table is this: the worker is keen. In [`Demand::looked`]: another worker is keen.
const KEEN: u64 = 1;
/// In [`Demand::looked`]: another worker wants the cores.
const WANTED: u64 = 2;
/// What a look has found is believed for so long, nanoseconds.
const LOOK_NS: u64 = 50_000;

/// The table, as one worker has it.
pub(crate) struct Demand {
    table: Span,
    place: usize,
    /// When this worker has said that it wants the cores.
    said_ns: AtomicU64,
    /// When one of this worker's pollers was keen last.
    keen_ns: AtomicU64,
    /// When it has looked whether another one does, and what it found: the time, and in the two lowest bits the answer.
    looked: AtomicU64,
}

/// A table for the workers of a host.
///
/// # Errors
/// Those of `memfd_create(2)`, `ftruncate(2)` and `mmap(2)`.
pub(crate) fn table() -> io::Result<OwnedFd> {
    MemFd::new(c"unirdma demand", BYTES).map_err(failed)?.fd().try_clone_to_owned()
}

fn failed(e: MapError) -> io::Error {
    io::Error::other(e.to_string())
}

/// Where in the table a place is, bytes.
fn offset(place: usize) -> usize {
    place * size_of::<u64>()
}

impl Demand {
    /// The table, for the worker with this number.
    ///
    /// # Errors
    /// The descriptor is not that of a table.
    pub fn of_table(table: &OwnedFd, number: u32) -> io::Result<Demand> {
        Ok(Demand::new(map_file(table.as_fd(), 0, BYTES as u64).map_err(failed)?, number))
    }

    fn new(table: Span, number: u32) -> Demand {
        let place = number as usize % PLACES;
        Demand { table, place, said_ns: AtomicU64::new(0), keen_ns: AtomicU64::new(0), looked: AtomicU64::new(0) }
    }

    /// This worker has done something at time `now`, and may have more to do. `keen`: the poller that did it is asked for work often.
    #[inline]
    pub fn want(&self, now: u64, keen: bool) {
        // Each store takes the cache line from the cores of the other pollers, so there are few.
        if keen && now.saturating_sub(self.keen_ns.load(Ordering::Relaxed)) >= SAY_NS {
            self.keen_ns.store(now, Ordering::Relaxed);
        }
        if now.saturating_sub(self.said_ns.load(Ordering::Relaxed)) >= SAY_NS {
            self.said_ns.store(now, Ordering::Relaxed);
            let keen = now.saturating_sub(self.keen_ns.load(Ordering::Relaxed)) < WANT_NS;
            self.table.store64(offset(self.place), (now + WANT_NS) & !KEEN | u64::from(keen), Ordering::Relaxed);
        }
    }

    /// True if another worker wants the cores.
    pub fn is_of_others(&self, now: u64) -> bool {
        self.look(now) & WANTED != 0
    }

    /// True if another worker that wants the cores is keen.
    pub fn is_of_keen_others(&self, now: u64) -> bool {
        self.look(now) & KEEN != 0
    }

    /// What was found lately, as [`Demand::looked`] has it.
    fn look(&self, now: u64) -> u64 {
        let looked = self.looked.load(Ordering::Relaxed);
        if now.saturating_sub(looked) < LOOK_NS {
            return looked;
        }
        // Nobody may want them for longer than `WANT_NS`, so a later time is not believed.
        let wanted = now + 1..=now + WANT_NS;
        let others = (0..PLACES).filter(|&p| p != self.place);
        let found = others
            .map(|p| self.table.load64(offset(p), Ordering::Relaxed))
            .filter(|at| wanted.contains(&(at & !KEEN)))
            .fold(0, |found, at| found | WANTED | at & KEEN);
        let looked = now & !(WANTED | KEEN) | found;
        self.looked.store(looked, Ordering::Relaxed);
        looked
    }
}

/// That of a worker that is alone.
#[cfg(test)]
impl Default for Demand {
    fn default() -> Demand {
        Demand::new(Span::anonymous(BYTES), 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEGAN: u64 = 1_000_000_000;

    #[test]
    fn a_worker_sees_what_others_want_and_not_what_it_wants_itself() {
        let table = table().unwrap();
        let [a, b] = [1, 2].map(|number| Demand::of_table(&table, number).unwrap());
        assert!(!a.is_of_others(BEGAN) && !b.is_of_others(BEGAN));
        a.want(BEGAN, false);
        let looks = BEGAN + LOOK_NS;
        assert!(!a.is_of_others(looks) && b.is_of_others(looks));
        // It says so again only after a while.
        a.want(BEGAN + SAY_NS / 2, false);
        assert!(b.is_of_others(BEGAN + WANT_NS - 1) && !b.is_of_others(BEGAN + WANT_NS + LOOK_NS));
        a.want(BEGAN + 2 * SAY_NS, false);
        assert!(b.is_of_others(BEGAN + WANT_NS + 2 * LOOK_NS));
    }

    #[test]
    fn what_was_found_counts_for_a_moment() {
        let table = table().unwrap();
        let [a, b] = [1, 2].map(|number| Demand::of_table(&table, number).unwrap());
        assert!(!b.is_of_others(BEGAN));
        a.want(BEGAN, false);
        assert!(!b.is_of_others(BEGAN + LOOK_NS - 4) && b.is_of_others(BEGAN + LOOK_NS));
    }

    #[test]
    fn a_worker_is_keen_for_as_long_as_one_of_its_pollers_is_asked_often() {
        let table = table().unwrap();
        let [a, b] = [1, 2].map(|number| Demand::of_table(&table, number).unwrap());
        let mut now = BEGAN;
        let mut after = |ns: u64, keen: bool| {
            now += ns;
            a.want(now, keen);
            (b.is_of_others(now + LOOK_NS), b.is_of_keen_others(now + LOOK_NS))
        };
        assert_eq!(after(SAY_NS, false), (true, false));
        assert_eq!(after(SAY_NS, true), (true, true));
        // Another poller of the same worker is asked seldom.
        assert_eq!(after(SAY_NS, false), (true, true));
        assert_eq!(after(WANT_NS, false), (true, false));
    }

    #[test]
    fn a_keen_worker_is_believed_at_once() {
        let table = table().unwrap();
        let [a, b] = [1, 2].map(|number| Demand::of_table(&table, number).unwrap());
        a.want(BEGAN, true);
        assert!(b.is_of_keen_others(BEGAN));
    }

    #[test]
    fn nobody_wants_the_cores_for_longer_than_it_may() {
        let table = table().unwrap();
        let [a, b] = [1, 2].map(|number| Demand::of_table(&table, number).unwrap());
        a.table.store64(offset(a.place), u64::MAX, Ordering::Relaxed);
        assert!(!b.is_of_others(BEGAN));
    }

    #[test]
    fn only_a_table_is_one() {
        let small = MemFd::new(c"x", 4096).unwrap().fd().try_clone_to_owned().unwrap();
        assert!(Demand::of_table(&small, 1).is_err());
        let (a, _b) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(Demand::of_table(&a.into(), 1).is_err());
    }
}
