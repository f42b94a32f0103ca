//! A thread that runs the background lookups of sessions ([`BackgroundLookup`]) for the control thread. It is started
//! on demand, and ends a second after its last background lookup. vRNICs take turns, so a vRNIC with many background
//! lookups delays another one's by at most one of its own.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::ops::Bound;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use unirdma_device::{BackgroundLookup, lock};
use unirdma_rnic::{SessionId, VrnicId};

use unirdma_confine::{self as confine, Kind};

/// Time for which the thread waits for another background lookup.
const IDLE: Duration = Duration::from_secs(1);

/// Called after each background lookup, with its session.
type Tell = Box<dyn Fn(SessionId) + Send + Sync>;

/// The thread's queue of background lookups.
pub(crate) struct Background {
    state: Mutex<State<(SessionId, BackgroundLookup)>>,
    work: Condvar,
    tell: Tell,
}

/// Waiting background lookups by vRNIC.
struct State<T, K = VrnicId> {
    waiting: BTreeMap<K, VecDeque<T>>,
    /// The vRNIC whose background lookup was taken last.
    last: Option<K>,
    /// The thread exists.
    runs: bool,
}

impl<T, K> Default for State<T, K> {
    fn default() -> Self {
        State { waiting: BTreeMap::new(), last: None, runs: false }
    }
}

impl<T, K: Ord + Copy> State<T, K> {
    /// The next background lookup: of the vRNIC that follows the last one.
    fn next(&mut self) -> Option<T> {
        let after = self.last.and_then(|last| self.waiting.range((Bound::Excluded(last), Bound::Unbounded)).next());
        let vrnic = *after.or_else(|| self.waiting.iter().next())?.0;
        self.last = Some(vrnic);
        let queue = self.waiting.get_mut(&vrnic)?;
        let lookup = queue.pop_front();
        if queue.is_empty() {
            self.waiting.remove(&vrnic);
        }
        lookup
    }
}

impl Background {
    pub fn new(tell: Tell) -> Arc<Self> {
        Arc::new(Background { state: Mutex::default(), work: Condvar::new(), tell })
    }

    /// Queues a background lookup. `tell` is called when it is done. If no thread can be started, it is run at once.
    pub fn take(self: &Arc<Self>, vrnic: VrnicId, session: SessionId, lookup: BackgroundLookup) {
        let mut state = lock(&self.state);
        state.waiting.entry(vrnic).or_default().push_back((session, lookup));
        self.work.notify_one();
        if state.runs {
            return;
        }
        state.runs = self.start().is_ok();
        if !state.runs {
            while let Some((session, lookup)) = state.next() {
                lookup.run();
                (self.tell)(session);
            }
        }
    }

    fn start(self: &Arc<Self>) -> io::Result<()> {
        let background = self.clone();
        std::thread::Builder::new().name("background".into()).spawn(move || {
            confine::thread(Kind::Background);
            background.run();
        })?;
        Ok(())
    }

    fn run(&self) {
        let mut state = lock(&self.state);
        loop {
            if let Some((session, lookup)) = state.next() {
                drop(state);
                lookup.run();
                (self.tell)(session);
                state = lock(&self.state);
                continue;
            }
            let (woken, waited) = self.work.wait_timeout(state, IDLE).unwrap_or_else(PoisonError::into_inner);
            state = woken;
            if waited.timed_out() && state.waiting.is_empty() {
                state.runs = false;
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vrnics_take_turns_whatever_each_has() {
        let mut state = State::<u32, char>::default();
        let add = |state: &mut State<u32, char>, vrnic, n| state.waiting.entry(vrnic).or_default().push_back(n);
        (0..4).for_each(|n| add(&mut state, 'b', n));
        assert_eq!(state.next(), Some(0));
        (10..12).for_each(|n| add(&mut state, 'a', n));
        add(&mut state, 'c', 20);
        let rest: Vec<u32> = std::iter::from_fn(|| state.next()).collect();
        assert_eq!(rest, [20, 10, 1, 11, 2, 3]);
        assert!(state.waiting.is_empty());
    }
}
