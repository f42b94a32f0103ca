//! The seats of the pollers: which thread has which, and what happens if one is stuck in memory that is slow.
//!
//! A job may go through private memory of a process, and so wait for as long as that process likes. The thread that does it keeps
//! its seat for [`SLOW_NS`]. Then a new thread takes the seat, and the stuck one ends when it comes back. The jobs of one vRNIC
//! that are stuck at a time are few ([`unirdma_rnic::Core::note_slow`]), and so are the stuck threads.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use unirdma_device::{lock, now_ns};

use crate::engine::Engine;

/// A job that takes so long is slow, nanoseconds: longer than a thread waits for a core on a busy machine, mostly.
const SLOW_NS: u64 = 10_000_000;
/// A job that takes so long is given up, nanoseconds.
const GIVE_UP_NS: u64 = 5_000_000_000;
/// Time between two looks at the seats, while there is something to see.
const LOOK: Duration = Duration::from_millis(2);
/// Looks at empty seats before the watcher sleeps until it is needed again.
const EMPTY_LOOKS: u32 = 100;

/// A poller's seat.
struct Seat {
    /// Number of the thread that has it.
    holder: AtomicU64,
    /// Since when that thread does a job that may be slow, nanoseconds; 0: it does none.
    since_ns: AtomicU64,
    /// Which job.
    job: AtomicU64,
}

/// A job whose thread has lost its seat.
struct Stuck {
    job: u64,
    since_ns: u64,
}

/// All seats, and what the watcher of them waits for.
pub(crate) struct Seats {
    seats: Vec<Seat>,
    threads: AtomicU64,
    /// The watcher looks, or is about to.
    watched: AtomicBool,
    wake: Mutex<bool>,
    woken: Condvar,
}

impl Seats {
    pub fn new(count: usize) -> Self {
        let seat = |_| Seat { holder: AtomicU64::new(0), since_ns: AtomicU64::new(0), job: AtomicU64::new(0) };
        Seats {
            seats: (0..count).map(seat).collect(),
            threads: AtomicU64::new(0),
            watched: AtomicBool::new(false),
            wake: Mutex::new(false),
            woken: Condvar::new(),
        }
    }

    /// Gives a seat to a thread that is about to start. Returns that thread's number, and the number of the one before.
    pub fn give(&self, seat: usize) -> (u64, u64) {
        let thread = self.threads.fetch_add(1, Ordering::Relaxed) + 1;
        self.seats[seat].since_ns.store(0, Ordering::SeqCst);
        (thread, self.seats[seat].holder.swap(thread, Ordering::SeqCst))
    }

    /// Gives a seat back to the thread that had it: the other one could not start.
    pub fn give_back(&self, seat: usize, thread: u64) {
        self.seats[seat].holder.store(thread, Ordering::SeqCst);
    }

    /// True if a thread has its seat still.
    pub fn has(&self, seat: usize, thread: u64) -> bool {
        self.seats[seat].holder.load(Ordering::SeqCst) == thread
    }

    /// Runs `f`, a job that may be slow, for the thread that has this seat; false if the thread has lost its seat meanwhile.
    pub fn do_slow(&self, seat: usize, thread: u64, job: u64, f: impl FnOnce()) -> bool {
        let s = &self.seats[seat];
        s.job.store(job, Ordering::SeqCst);
        s.since_ns.store(now_ns(), Ordering::SeqCst);
        if !self.watched.swap(true, Ordering::SeqCst) {
            self.wake_watcher();
        }
        f();
        let has = self.has(seat, thread);
        if has {
            s.since_ns.store(0, Ordering::SeqCst);
        }
        has
    }

    pub fn wake_watcher(&self) {
        *lock(&self.wake) = true;
        self.woken.notify_one();
    }

    fn wait(&self) {
        let mut wake = lock(&self.wake);
        while !std::mem::take(&mut *wake) {
            wake = self.woken.wait(wake).unwrap_or_else(std::sync::PoisonError::into_inner);
        }
    }
}

/// Gives the seats of stuck threads to new ones, until the engine stops.
pub(crate) fn watch(engine: &Arc<Engine>) {
    let seats = engine.seats();
    let (mut stuck, mut empty) = (Vec::<Stuck>::new(), 0);
    while !engine.is_stopping() {
        let now = now_ns();
        for (i, s) in seats.seats.iter().enumerate() {
            let (thread, job) = (s.holder.load(Ordering::SeqCst), s.job.load(Ordering::SeqCst));
            let since_ns = s.since_ns.load(Ordering::SeqCst);
            empty = if since_ns == 0 { empty } else { 0 };
            let unchanged = s.holder.load(Ordering::SeqCst) == thread && s.job.load(Ordering::SeqCst) == job;
            if since_ns != 0 && now.saturating_sub(since_ns) > SLOW_NS && unchanged {
                engine.rnic.lock().note_slow(job);
                if engine.seat_thread(i).is_ok() {
                    tracing::debug!(poller = i, job, "memory of a program is slow; another thread polls");
                    stuck.push(Stuck { job, since_ns });
                }
            }
        }
        stuck.retain(|s| {
            let over = now.saturating_sub(s.since_ns) > GIVE_UP_NS;
            if over {
                engine.rnic.lock().give_up(s.job);
                engine.after_command();
            }
            !over
        });
        empty += 1;
        if empty < EMPTY_LOOKS || !stuck.is_empty() {
            std::thread::sleep(LOOK);
            continue;
        }
        seats.watched.store(false, Ordering::SeqCst);
        // A job that began before that store is seen now; one that begins later wakes this thread.
        if seats.seats.iter().all(|s| s.since_ns.load(Ordering::SeqCst) == 0) {
            seats.wait();
        }
        empty = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::demand::Demand;
    use crate::engine::EngineConfig;
    use std::time::Instant;

    #[test]
    fn a_thread_that_is_stuck_loses_its_seat_and_a_fast_one_keeps_it() {
        let config = EngineConfig { pollers: Some((1, 1)), ..EngineConfig::default() };
        let engine = Engine::start(&config, None, Demand::default()).unwrap();
        let seats = engine.seats();
        // This thread takes the seat of the only poller, which ends.
        let (me, _) = seats.give(0);
        for job in 0..100 {
            assert!(seats.do_slow(0, me, job, || ()));
        }
        let began = Instant::now();
        let seated = seats.do_slow(0, me, 100, || {
            while seats.has(0, me) {
                assert!(began.elapsed() < Duration::from_secs(30), "nobody has taken the seat");
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        assert!(!seated);
        assert!(began.elapsed() >= Duration::from_nanos(SLOW_NS));
        // The one who has it now is seated until it is stuck itself.
        let holder = seats.seats[0].holder.load(Ordering::SeqCst);
        std::thread::sleep(Duration::from_millis(50));
        assert!(seats.has(0, holder) && holder > me);
        engine.stop();
    }
}
