//! A thread that finds out whether the control thread or the switch is stuck. While a worker has no sessions, it sleeps.
//!
//! Pollers are looked after by [`crate::seats`]: there, private memory of a program may take its time. Nothing that the threads here do
//! may wait for a tenant, so if one is stuck all the same, the worker cannot be saved. It ends, and is started anew.

use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use unirdma_device::lock;

use crate::confine::{self, Kind};
use crate::pulse::Pulse;

/// Time between two looks.
const LOOK: Duration = Duration::from_millis(500);
/// A thread that works without a pause from one look to the next for so many looks is reported.
const LONG: u32 = 3;
/// Then it is stuck for good. (Looks are counted, and not time, since the whole machine may have paused.) A supervisor that is stopped
/// within a message holds up the control thread for less long.
const STUCK: u32 = 40;

/// What the watchdog sees.
#[derive(Default)]
struct Seen {
    pulses: [(&'static str, Arc<Pulse>); 2],
    /// It has something to guard; it ends.
    wanted: Mutex<(bool, bool)>,
    changed: Condvar,
}

/// The watchdog; its thread ends with [`Watchdog::stop`].
pub(super) struct Watchdog(Arc<Seen>);

impl Watchdog {
    /// Starts it. `report` is called with the name of a thread that has been stuck for so long, in seconds, at most once a second.
    ///
    /// # Errors
    /// Those of thread creation.
    pub fn start(
        control: Arc<Pulse>,
        switch: Arc<Pulse>,
        report: impl Fn(&'static str, u64) + Send + 'static,
    ) -> std::io::Result<Self> {
        let pulses = [("control thread", control), ("switch", switch)];
        let seen = Arc::new(Seen { pulses, ..Seen::default() });
        let me = seen.clone();
        std::thread::Builder::new().name("watchdog".into()).spawn(move || {
            confine::thread(Kind::Watcher);
            me.run(report);
        })?;
        Ok(Watchdog(seen))
    }

    /// Whether there are sessions.
    pub fn guard(&self, sessions: bool) {
        let mut wanted = lock(&self.0.wanted);
        if std::mem::replace(&mut wanted.0, sessions) != sessions {
            self.0.changed.notify_one();
        }
    }

    /// Ends its thread.
    pub fn stop(&self) {
        lock(&self.0.wanted).1 = true;
        self.0.changed.notify_one();
    }
}

impl Seen {
    fn run(&self, report: impl Fn(&'static str, u64)) {
        let mut same = [(0, 0); 2];
        loop {
            let mut wanted = lock(&self.wanted);
            while !wanted.0 && !wanted.1 {
                wanted = self.changed.wait(wanted).unwrap_or_else(std::sync::PoisonError::into_inner);
            }
            if wanted.1 {
                return;
            }
            drop(self.changed.wait_timeout(wanted, LOOK));
            for ((name, pulse), (before, looks)) in self.pulses.iter().zip(&mut same) {
                let since = pulse.since_ns();
                *looks = if since != 0 && since == *before { *looks + 1 } else { 0 };
                *before = since;
                let seconds = u64::from(*looks) * LOOK.as_millis() as u64 / 1000;
                if *looks >= LONG && *looks % 2 == 0 {
                    report(name, seconds);
                }
                if *looks >= STUCK {
                    tracing::error!("the {name} has been stuck for {seconds} s; this worker ends");
                    std::process::exit(1);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn a_thread_that_works_for_long_is_reported_and_one_that_waits_is_not() {
        let (control, switch) = (Arc::new(Pulse::default()), Arc::new(Pulse::default()));
        let (told, heard) = mpsc::channel();
        let report = move |name, seconds| told.send((name, seconds)).unwrap();
        let dog = Watchdog::start(control.clone(), switch.clone(), report).unwrap();
        // Without sessions nobody looks.
        control.begin();
        assert!(heard.recv_timeout(Duration::from_secs(2)).is_err());
        control.rest();
        switch.begin();
        dog.guard(true);
        let (name, seconds) = heard.recv_timeout(Duration::from_secs(20)).unwrap();
        assert_eq!(name, "switch");
        assert!((1..10).contains(&seconds), "{seconds}");
        switch.rest();
        while heard.recv_timeout(Duration::from_secs(2)).is_ok() {}
        dog.stop();
    }
}
