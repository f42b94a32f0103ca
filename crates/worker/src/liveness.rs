//! What the watcher (`engine::watcher`) knows of a worker's threads: since when each has worked, and which thread has
//! the slot of each poller.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::Thread;

use unirdma_device::now_ns;

use crate::cache_padded::CachePadded;

/// Since when a thread has worked, ns; 0 while it waits.
#[derive(Default)]
pub(crate) struct Heartbeat(AtomicU64);

impl Heartbeat {
    /// Called when the thread begins to work. Returns the time.
    pub fn begin(&self) -> u64 {
        let now = now_ns();
        self.0.store(now, Ordering::SeqCst);
        now
    }

    /// Called when the thread begins to wait.
    pub fn rest(&self) {
        self.0.store(0, Ordering::SeqCst);
    }

    /// Since when the thread has worked, ns; 0 while it waits.
    pub fn since_ns(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }

    /// Ends the work that began at `since_ns`. False if it was ended before, by its thread or by the watcher.
    fn end(&self, since_ns: u64) -> bool {
        self.0.compare_exchange(since_ns, 0, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }
}

/// A poller's slot, which one thread has at a time.
#[derive(Default)]
struct PollerSlot {
    /// Number of the thread that has it.
    holder: AtomicU64,
    /// Runs while that thread does a job that may be slow.
    pulse: Heartbeat,
    /// Number of the job.
    job: AtomicU64,
}

/// State that the watcher of a worker checks.
#[derive(Default)]
pub(crate) struct Liveness {
    slots: Vec<PollerSlot>,
    pub control: CachePadded<Heartbeat>,
    pub switch: CachePadded<Heartbeat>,
    /// There are sessions.
    sessions: AtomicBool,
    /// There are jobs, or there were some since the last check.
    jobs: AtomicBool,
    watcher: OnceLock<Thread>,
}

impl Liveness {
    pub fn new(pollers: usize) -> Self {
        Liveness { slots: (0..pollers).map(|_| PollerSlot::default()).collect(), ..Liveness::default() }
    }

    /// Gives a slot to a thread that is about to start. Returns that thread's number.
    pub fn give(&self, slot: usize) -> u64 {
        self.slots[slot].holder.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// Returns a slot to the thread that had it, because the new thread could not start.
    pub fn give_back(&self, slot: usize) {
        self.slots[slot].holder.fetch_sub(1, Ordering::SeqCst);
    }

    /// True while the thread has the slot.
    pub fn has(&self, slot: usize, thread: u64) -> bool {
        self.slots[slot].holder.load(Ordering::SeqCst) == thread
    }

    /// Runs `f`, a job that may be slow, for the thread that has the slot. False if the thread has lost the slot
    /// meanwhile.
    pub fn do_slow(&self, slot: usize, thread: u64, job: u64, f: impl FnOnce()) -> bool {
        let s = &self.slots[slot];
        s.job.store(job, Ordering::Relaxed);
        let since_ns = s.pulse.begin();
        self.set(&self.jobs, true);
        f();
        s.pulse.end(since_ns);
        self.has(slot, thread)
    }

    /// Tells the watcher whether there are sessions.
    pub fn guard(&self, sessions: bool) {
        self.set(&self.sessions, sessions);
    }

    fn set(&self, flag: &AtomicBool, on: bool) {
        if flag.load(Ordering::SeqCst) != on {
            flag.store(on, Ordering::SeqCst);
            self.wake();
        }
    }

    /// Makes the watcher check at once.
    pub fn wake(&self) {
        self.watcher.get().into_iter().for_each(Thread::unpark);
    }

    // --- for the watcher ---

    /// Sets the watcher, which [`Liveness::wake`] wakes.
    pub fn set_watcher(&self, watcher: Thread) {
        let _ = self.watcher.set(watcher);
    }

    /// Number of slots.
    pub fn slots(&self) -> usize {
        self.slots.len()
    }

    /// The job that the thread in a slot has run for more than `slow_ns`, and since when. Each job is returned
    /// once.
    pub fn take_slow(&self, slot: usize, now: u64, slow_ns: u64) -> Option<(u64, u64)> {
        let s = &self.slots[slot];
        let (since_ns, job) = (s.pulse.since_ns(), s.job.load(Ordering::Relaxed));
        // If the watcher ends the work, no other job has begun since the pulse was read, so `job` is its number.
        let slow = since_ns != 0 && now.saturating_sub(since_ns) > slow_ns && s.pulse.end(since_ns);
        slow.then_some((job, since_ns))
    }

    /// Looks whether any job runs, for [`Liveness::has_jobs`].
    pub fn recount_jobs(&self) {
        // In this order, since a job that begins after the store wakes the watcher.
        self.jobs.store(false, Ordering::SeqCst);
        self.jobs.fetch_or(self.slots.iter().any(|s| s.pulse.since_ns() != 0), Ordering::SeqCst);
    }

    /// True if there are jobs, or there were some since the last [`Liveness::recount_jobs`].
    pub fn has_jobs(&self) -> bool {
        self.jobs.load(Ordering::SeqCst)
    }

    /// True if there are sessions.
    pub fn has_sessions(&self) -> bool {
        self.sessions.load(Ordering::SeqCst)
    }
}
