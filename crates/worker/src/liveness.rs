//! Detection of stuck threads of a worker. One thread, the watcher, checks the [`Heartbeat`] of each other thread, and
//! acts if that thread is stuck.
//!
//! * A poller has a seat. A job may access private memory of a process, and that process can make the access wait as
//!   long as it likes. After [`SLOW_NS`] a new thread takes the seat, and the stuck thread ends when its access
//!   returns. After [`GIVE_UP_NS`] the job is given up. A vRNIC has few such jobs at a time
//!   ([`unirdma_rnic::Core::note_slow`]), so there are few stuck threads.
//! * The control thread and the switch never wait for a tenant. If one of them is stuck all the same, it is reported
//!   after [`LONG`] checks. After [`STUCK`] checks the worker ends and is started anew. Checks are counted instead of
//!   time, since the whole machine may have paused.
//!
//! While there are neither sessions nor jobs, the watcher sleeps.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{Builder, Thread};
use std::time::Duration;

use unirdma_confine::{self as confine, Kind};
use unirdma_device::now_ns;

use crate::engine::{CachePadded, Engine};

/// Time after which a job is slow, ns: usually longer than a thread waits for a core on a busy machine.
const SLOW_NS: u64 = 10_000_000;
/// Time after which a job is given up, ns.
const GIVE_UP_NS: u64 = 5_000_000_000;
/// Interval of checks while there are sessions, ns. While there are jobs, seats are checked more often.
const LOOK_NS: u64 = 500_000_000;
/// A thread that works without a pause for more checks than this is reported.
const LONG: u32 = 3;
/// Checks after which a thread counts as stuck for good. This is longer than a supervisor that is stopped within a
/// message can delay the control thread.
const STUCK: u32 = 40;

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

    fn since_ns(&self) -> u64 {
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
    seats: Vec<PollerSlot>,
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
        Liveness { seats: (0..pollers).map(|_| PollerSlot::default()).collect(), ..Liveness::default() }
    }

    /// Gives a seat to a thread that is about to start. Returns that thread's number.
    pub fn give(&self, seat: usize) -> u64 {
        self.seats[seat].holder.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// Returns a seat to the thread that had it, because the new thread could not start.
    pub fn give_back(&self, seat: usize) {
        self.seats[seat].holder.fetch_sub(1, Ordering::SeqCst);
    }

    /// True while the thread has the seat.
    pub fn has(&self, seat: usize, thread: u64) -> bool {
        self.seats[seat].holder.load(Ordering::SeqCst) == thread
    }

    /// Runs `f`, a job that may be slow, for the thread that has the seat. False if the thread has lost the seat
    /// meanwhile.
    pub fn do_slow(&self, seat: usize, thread: u64, job: u64, f: impl FnOnce()) -> bool {
        let s = &self.seats[seat];
        s.job.store(job, Ordering::Relaxed);
        let since_ns = s.pulse.begin();
        self.set(&self.jobs, true);
        f();
        s.pulse.end(since_ns);
        self.has(seat, thread)
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
}

/// Starts the watcher, which ends with the engine. `report` is called at most once a second, with the name of a stuck
/// thread and for how many seconds it has been stuck.
///
/// # Errors
/// Errors of thread creation.
pub(crate) fn watch(engine: &Arc<Engine>, report: impl Fn(&'static str, u64) + Send + 'static) -> io::Result<()> {
    let e = engine.clone();
    let watcher = Builder::new().name("watcher".into()).spawn(move || {
        confine::thread(Kind::Watcher);
        run(&e, report);
    })?;
    let _ = engine.liveness.watcher.set(watcher.thread().clone());
    Ok(())
}

fn run(engine: &Arc<Engine>, report: impl Fn(&'static str, u64)) {
    let Liveness { seats, control, switch, sessions, jobs, .. } = &engine.liveness;
    // Slow jobs, with their start times.
    let mut slow = Vec::new();
    // For each thread: its start time at the last check, and for how many checks it has been the same.
    let mut others = [("control thread", control, 0, 0), ("switch", switch, 0, 0)];
    let mut looked_ns = 0;
    while !engine.is_stopping() {
        let now = now_ns();
        slow.extend((0..seats.len()).filter_map(|seat| replace_slow(engine, seat, now)));
        if now - looked_ns >= LOOK_NS {
            looked_ns = now;
            for (job, _) in slow.extract_if(.., |s| now.saturating_sub(s.1) > GIVE_UP_NS) {
                engine.rnic.lock().give_up(job);
                engine.after_command();
            }
            for (name, pulse, before, looks) in &mut others {
                let since_ns = pulse.since_ns();
                *looks = if since_ns != 0 && since_ns == *before { *looks + 1 } else { 0 };
                *before = since_ns;
                check_thread(name, *looks, &report);
            }
            // In this order, since a job that begins after the store wakes this thread.
            jobs.store(false, Ordering::SeqCst);
            jobs.fetch_or(seats.iter().any(|s| s.pulse.since_ns() != 0), Ordering::SeqCst);
        }
        if jobs.load(Ordering::SeqCst) {
            std::thread::park_timeout(Duration::from_nanos(SLOW_NS / 5));
        } else if sessions.load(Ordering::SeqCst) || !slow.is_empty() {
            std::thread::park_timeout(Duration::from_nanos(LOOK_NS));
        } else {
            std::thread::park();
        }
    }
}

/// Gives a seat to a new thread if its present one runs a slow job. Returns the job and its start time.
fn replace_slow(engine: &Arc<Engine>, seat: usize, now: u64) -> Option<(u64, u64)> {
    let s = &engine.liveness.seats[seat];
    let (since_ns, job) = (s.pulse.since_ns(), s.job.load(Ordering::Relaxed));
    // If the watcher ends the work, no other job has begun since the pulse was read, so `job` is its number.
    if since_ns == 0 || now.saturating_sub(since_ns) <= SLOW_NS || !s.pulse.end(since_ns) {
        return None;
    }
    if engine.seat_thread(seat).is_ok() {
        tracing::debug!(poller = seat, job, "memory of a program is slow; another thread polls");
    }
    engine.rnic.lock().note_slow(job);
    Some((job, since_ns))
}

/// Reports a thread that has worked without a pause for `looks` checks, or ends the worker.
fn check_thread(name: &'static str, looks: u32, report: impl Fn(&'static str, u64)) {
    let seconds = u64::from(looks) * LOOK_NS / 1_000_000_000;
    if looks > LONG && looks.is_multiple_of(2) {
        report(name, seconds);
    }
    if looks >= STUCK {
        tracing::error!("the {name} has been stuck for {seconds} s; this worker ends");
        std::process::exit(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, channel};
    use std::time::Instant;
    use unirdma_ipc::config::EngineConfig;

    /// An engine with one poller, and its watcher's reports.
    fn start() -> (Arc<Engine>, Receiver<(&'static str, u64)>) {
        let config = EngineConfig { pollers: Some((1, 1)), ..EngineConfig::default() };
        let engine = Engine::start(&config, None).unwrap();
        let (sender, reports) = channel();
        watch(&engine, move |name, seconds| sender.send((name, seconds)).unwrap()).unwrap();
        (engine, reports)
    }

    #[test]
    fn a_thread_that_is_stuck_loses_its_seat_and_a_fast_one_keeps_it() {
        let (engine, _reports) = start();
        let l = &engine.liveness;
        // This thread takes the seat of the only poller, which ends.
        let me = l.give(0);
        for job in 0..100 {
            assert!(l.do_slow(0, me, job, || ()));
        }
        let began = Instant::now();
        let seated = l.do_slow(0, me, 100, || {
            while l.has(0, me) {
                assert!(began.elapsed() < Duration::from_secs(30), "nobody has taken the seat");
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        assert!(!seated);
        assert!(began.elapsed() >= Duration::from_nanos(SLOW_NS));
        // The thread that has the seat now keeps it until it is stuck itself.
        std::thread::sleep(Duration::from_millis(50));
        assert!(l.has(0, me + 1));
        engine.stop();
    }

    #[test]
    fn a_thread_that_works_for_long_is_reported_and_one_that_waits_is_not() {
        let (engine, reports) = start();
        let l = &engine.liveness;
        // Without sessions the watcher does not check.
        l.control.begin();
        assert!(reports.recv_timeout(Duration::from_secs(2)).is_err());
        l.control.rest();
        l.switch.begin();
        l.guard(true);
        let (name, seconds) = reports.recv_timeout(Duration::from_secs(20)).unwrap();
        assert_eq!(name, "switch");
        assert!((1..10).contains(&seconds), "{seconds}");
        l.switch.rest();
        while reports.recv_timeout(Duration::from_secs(2)).is_ok() {}
        engine.stop();
    }
}
