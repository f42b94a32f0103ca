//! Threads that close descriptors which may be slow to close. Those of one account are closed one after the other, so
//! an account delays only itself.

use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Most threads, and so most accounts whose descriptors are being closed at one time.
const MAX_THREADS: usize = 32;
/// A thread ends after this time without work.
const IDLE: Duration = Duration::from_secs(1);

/// A value whose drop closes a descriptor.
type Slow = Box<dyn Any + Send>;

/// Drops what is slow to drop, by its own threads. Clones share the threads.
#[derive(Clone, Debug)]
pub struct Closer(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    work: Condvar,
    /// Called by each thread at its start.
    begin: fn(),
}

#[derive(Debug, Default)]
struct State {
    /// What is to be dropped, by account. An account is present while something of it waits or is being dropped.
    queues: HashMap<usize, VecDeque<Slow>>,
    /// Accounts for which something waits and nothing is being dropped.
    ready: VecDeque<usize>,
    threads: usize,
    /// Threads without work, including those that were just started.
    idle: usize,
}

impl Closer {
    /// Threads are started on demand, by the thread that calls [`Closer::close`]. Each calls `begin` first.
    pub fn new(begin: fn()) -> Self {
        Closer(Arc::new(Shared { state: Mutex::default(), work: Condvar::new(), begin }))
    }

    /// Lets a thread drop `what`, after everything that was given for the same account before.
    pub(crate) fn close(&self, account: usize, what: Slow) {
        let mut state = self.0.state.lock().unwrap_or_else(PoisonError::into_inner);
        match state.queues.get_mut(&account) {
            Some(queue) => queue.push_back(what),
            None => {
                state.queues.insert(account, VecDeque::from([what]));
                state.ready.push_back(account);
            }
        }
        if state.ready.len() <= state.idle {
            self.0.work.notify_one();
        } else if state.threads < MAX_THREADS {
            let shared = self.0.clone();
            // If no thread can be started, the next call tries again.
            if std::thread::Builder::new().name("unirdma-closer".into()).spawn(move || shared.run()).is_ok() {
                state.threads += 1;
                state.idle += 1;
            }
        }
    }
}

#[cfg(test)]
impl Closer {
    /// The number of threads.
    pub(crate) fn threads(&self) -> usize {
        self.0.state.lock().unwrap().threads
    }

    /// True if nothing waits or is being dropped.
    pub(crate) fn is_idle(&self) -> bool {
        self.0.state.lock().unwrap().queues.is_empty()
    }
}

impl Shared {
    fn run(&self) {
        (self.begin)();
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.idle -= 1;
        loop {
            let Some(account) = state.ready.pop_front() else {
                state.idle += 1;
                let (woken, waited) = self.work.wait_timeout(state, IDLE).unwrap_or_else(PoisonError::into_inner);
                state = woken;
                state.idle -= 1;
                if waited.timed_out() && state.ready.is_empty() {
                    break;
                }
                continue;
            };
            let slow = state.queues.get_mut(&account).and_then(VecDeque::pop_front);
            drop(state);
            drop(slow);
            state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            if state.queues.get(&account).is_some_and(VecDeque::is_empty) {
                state.queues.remove(&account);
            } else {
                state.ready.push_back(account);
            }
        }
        state.threads -= 1;
    }
}
