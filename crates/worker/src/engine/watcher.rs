//! Detection of stuck threads of a worker. One thread, the watcher, checks the [`Heartbeat`] of each other thread, and
//! acts if that thread is stuck.
//!
//! * A poller has a slot. A job may access private memory of a process, and that process can make the access wait as
//!   long as it likes. After [`SLOW_NS`] a new thread takes the slot, and the stuck thread ends when its access
//!   returns. After [`GIVE_UP_NS`] the job is given up. A vRNIC has few such jobs at a time
//!   ([`unirdma_rnic::Core::note_slow`]), so there are few stuck threads.
//! * The control thread and the switch never wait for a tenant. If one of them is stuck all the same, it is reported
//!   after [`LONG`] checks. After [`STUCK`] checks the worker ends and is started anew. Checks are counted instead of
//!   time, since the whole machine may have paused.
//!
//! While there are neither sessions nor jobs, the watcher sleeps.
//!
//! [`Heartbeat`]: crate::liveness::Heartbeat

use std::io;
use std::sync::Arc;
use std::thread::Builder;
use std::time::Duration;

use unirdma_confine::{self as confine, Kind};
use unirdma_device::now_ns;

use super::pollers::Pollers;

/// Time after which a job is slow, ns: usually longer than a thread waits for a core on a busy machine.
const SLOW_NS: u64 = 10_000_000;
/// Time after which a job is given up, ns.
const GIVE_UP_NS: u64 = 5_000_000_000;
/// Interval of checks while there are sessions, ns. While there are jobs, slots are checked more often.
const LOOK_NS: u64 = 500_000_000;
/// A thread that works without a pause for more checks than this is reported.
const LONG: u32 = 3;
/// Checks after which a thread counts as stuck for good. This is longer than a supervisor that is stopped within a
/// message can delay the control thread.
const STUCK: u32 = 40;

/// Starts the watcher, which ends with the pollers. `report` is called at most once a second, with the name of a stuck
/// thread and for how many seconds it has been stuck.
///
/// # Errors
/// Errors of thread creation.
pub(crate) fn watch(pollers: &Arc<Pollers>, report: impl Fn(&'static str, u64) + Send + 'static) -> io::Result<()> {
    let p = pollers.clone();
    let watcher = Builder::new().name("watcher".into()).spawn(move || {
        confine::thread(Kind::Watcher);
        run(&p, report);
    })?;
    pollers.liveness.set_watcher(watcher.thread().clone());
    Ok(())
}

fn run(pollers: &Arc<Pollers>, report: impl Fn(&'static str, u64)) {
    let liveness = &pollers.liveness;
    // Slow jobs, with their start times.
    let mut slow = Vec::new();
    // For each thread: its start time at the last check, and for how many checks it has been the same.
    let mut others = [("control thread", &liveness.control, 0, 0), ("switch", &liveness.switch, 0, 0)];
    let mut looked_ns = 0;
    while !pollers.is_stopping() {
        let now = now_ns();
        slow.extend((0..liveness.slots()).filter_map(|slot| replace_slow(pollers, slot, now)));
        if now - looked_ns >= LOOK_NS {
            looked_ns = now;
            for (job, _) in slow.extract_if(.., |s| now.saturating_sub(s.1) > GIVE_UP_NS) {
                pollers.rnic.lock().give_up(job);
                pollers.after_command();
            }
            for (name, pulse, before, looks) in &mut others {
                let since_ns = pulse.since_ns();
                *looks = if since_ns != 0 && since_ns == *before { *looks + 1 } else { 0 };
                *before = since_ns;
                check_thread(name, *looks, &report);
            }
            liveness.recount_jobs();
        }
        if liveness.has_jobs() {
            std::thread::park_timeout(Duration::from_nanos(SLOW_NS / 5));
        } else if liveness.has_sessions() || !slow.is_empty() {
            std::thread::park_timeout(Duration::from_nanos(LOOK_NS));
        } else {
            std::thread::park();
        }
    }
}

/// Gives a slot to a new thread if its present one runs a slow job. Returns the job and its start time.
fn replace_slow(pollers: &Arc<Pollers>, slot: usize, now: u64) -> Option<(u64, u64)> {
    let (job, since_ns) = pollers.liveness.take_slow(slot, now, SLOW_NS)?;
    if pollers.start_in_slot(slot).is_ok() {
        tracing::debug!(poller = slot, job, "memory of a program is slow; another thread polls");
    }
    pollers.rnic.lock().note_slow(job);
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

    /// One poller, and its watcher's reports.
    fn start() -> (Arc<Pollers>, Receiver<(&'static str, u64)>) {
        let config = EngineConfig { pollers: Some((1, 1)), ..EngineConfig::default() };
        let pollers = Pollers::start(&config, None).unwrap();
        let (sender, reports) = channel();
        watch(&pollers, move |name, seconds| sender.send((name, seconds)).unwrap()).unwrap();
        (pollers, reports)
    }

    #[test]
    fn a_thread_that_is_stuck_loses_its_seat_and_a_fast_one_keeps_it() {
        let (pollers, _reports) = start();
        let l = &pollers.liveness;
        // This thread takes the slot of the only poller, which ends.
        let me = l.give(0);
        for job in 0..100 {
            assert!(l.do_slow(0, me, job, || ()));
        }
        let began = Instant::now();
        let has_slot = l.do_slow(0, me, 100, || {
            while l.has(0, me) {
                assert!(began.elapsed() < Duration::from_secs(30), "nobody has taken the slot");
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        assert!(!has_slot);
        assert!(began.elapsed() >= Duration::from_nanos(SLOW_NS));
        // The thread that has the slot now keeps it until it is stuck itself.
        std::thread::sleep(Duration::from_millis(50));
        assert!(l.has(0, me + 1));
        pollers.stop();
    }

    #[test]
    fn a_thread_that_works_for_long_is_reported_and_one_that_waits_is_not() {
        let (pollers, reports) = start();
        let l = &pollers.liveness;
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
        pollers.stop();
    }
}
