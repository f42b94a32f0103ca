//! Scheduling of the pollers: what a poller does after a round. There are two policies.
//!
//! *Shared*, on few cores: there is one poller for each core, pinned to it, and it sleeps as soon as it has no work. If
//! no poller looks at a doorbell, ringing it sends a kick, and the kick wakes the poller of the core on which the
//! program runs. A thread that has slept preempts a thread that computes, so a program gives up its own core for its
//! own request, and no request waits for a time slice. Each poller has a *twin*, a thread that runs only while its core
//! would be idle, and looks at doorbells then. The twin may lose its core at any moment, so it never takes the RNIC,
//! but wakes its poller.
//!
//! *Dedicated*, on more cores: pollers have cores of their own, on which they spin while any session is polled. There
//! is always one poller; others are added while there is more work than the present ones can do, and removed
//! afterwards. A poller that finds other threads competing for its core sleeps for a while as on shared cores.
//!
//! While any poller is awake, doorbells need no kick. So the last poller that goes to sleep lets the RNIC ask for kicks
//! ([`unirdma_rnic::Core::doze`]), and the first one that wakes undoes that.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use unirdma_confine::{self as confine, Kind, scheduling};
use unirdma_ipc::config::cores;
use unirdma_rnic::Bells;

use super::poller::{Round, Watch};
use super::pollers::{ANSWER_NS, Pollers};
use super::sleepers::{CALL, NAP_NS, Sleeper};

/// Rounds between two checks for kicks of sleeping sessions: rounds with work, and rounds without work, which are
/// shorter. Twins check the clock every `LISTEN_SPINS` looks.
const LISTEN_ROUNDS: u32 = 64;
const LISTEN_SPINS: u32 = 256;
/// Time for which twins look after the last work, ns.
const TWIN_NS: u64 = 500_000;
/// Longest time for which a poller on a shared core works before it sleeps for as long, so that other threads get the
/// core, ns. Pollers have more weight than programs, so a poller that always has work would leave them a tenth. If no
/// other thread wants the core, the twin wakes the poller at once.
pub(super) const TURN_NS: u64 = 200_000;
/// Time for which rounds must leave work over before another dedicated poller is added, ns.
pub(super) const BACKLOG_NS: u64 = 50_000;
/// An added poller is removed after this time without work, ns.
const SPARE_NS: u64 = 1_000_000;
/// Interval at which a spinning dedicated poller checks whether other threads had more than 1/`CROWD_PART` of its core,
/// ns. The start of a program takes more than that part of 20 ms.
const CROWD_NS: u64 = 100_000_000;
const CROWD_PART: u64 = 20;
/// Time for which the poller then sleeps as on a shared core, ns.
const CROWDED_NS: u64 = 1_000_000_000;

/// The next step of a poller.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Then {
    /// Another round.
    Looks,
    /// It sleeps until it is woken, unless there is work.
    Sleeps,
    /// It sleeps although there are datagrams, so that programs can post receives for them.
    Starves,
    /// Its turn has ended: it sleeps although there is work.
    Leaves,
}

/// A poller's history, from which its next step follows.
#[derive(Default)]
pub(super) struct Past {
    /// When it last found work, and when it last woke, ns.
    found_ns: u64,
    woken_ns: u64,
    /// It has woken and found no work since.
    has_woken: bool,
    /// Its twin has woken it: its core was idle, and the program that rang runs on another core.
    by_twin: bool,
    rounds: u32,
    /// Since when it has spun, and its CPU time at that moment, ns; 0 if it has slept since.
    spins_since_ns: u64,
    ran_ns: u64,
    /// Other threads use its core until this time, ns.
    crowded_until_ns: u64,
}

impl Pollers {
    /// The main loop of a poller.
    pub(super) fn poll(&self, watch: &mut Watch) {
        let mut past = Past::default();
        let sleeper = self.sleepers.of(watch.slot);
        sleeper.set_asleep(false);
        while self.goes_on(watch) {
            let round = self.round(watch);
            let found = round.as_ref().is_some_and(|r| r.found);
            let then = match &round {
                Some(r) if found => self.after_work(&mut past, r, watch.job.is_some()),
                _ => self.after_nothing(watch.slot, &mut past, round.as_ref()),
            };
            if then != Then::Looks {
                self.sleep(watch, &mut past, then);
                continue;
            }
            past.rounds = past.rounds.wrapping_add(1);
            if past.rounds % if found { LISTEN_ROUNDS } else { LISTEN_SPINS } == 0 {
                self.take_kicks(sleeper, &sleeper.wait(Some(0)));
            }
        }
    }

    /// The step after a round with work. `carries_job`: the poller has run a job, whose result the RNIC gets in the
    /// next round.
    pub(super) fn after_work(&self, past: &mut Past, round: &Round, carries_job: bool) -> Then {
        past.found_ns = round.ended_ns;
        self.work_goes_on(past);
        match self.shares_cores && !carries_job {
            true if round.starved => Then::Starves,
            true if round.ended_ns.saturating_sub(past.woken_ns) >= TURN_NS => Then::Leaves,
            _ => Then::Looks,
        }
    }

    /// The step after a round that found no work, or was skipped.
    fn after_nothing(&self, slot: usize, past: &mut Past, round: Option<&Round>) -> Then {
        let looks = if self.shares_cores {
            past.by_twin && self.now() < (past.found_ns.max(past.woken_ns) + ANSWER_NS).min(past.woken_ns + TURN_NS)
        } else {
            let idle = round.is_some_and(|r| r.idle);
            let goes = self.grows() && self.is_spare(slot, if idle { 0 } else { past.found_ns.max(past.woken_ns) });
            !goes && !idle && slot < self.wanted() && !self.is_crowded(past)
        };
        if !looks {
            return Then::Sleeps;
        }
        std::hint::spin_loop();
        Then::Looks
    }

    /// True if other threads use the core of a spinning dedicated poller.
    fn is_crowded(&self, past: &mut Past) -> bool {
        if past.spins_since_ns != 0 && past.rounds % LISTEN_SPINS != 0 {
            return false;
        }
        let now = self.now();
        if now < past.crowded_until_ns {
            return true;
        }
        let spun_ns = now.saturating_sub(past.spins_since_ns);
        if past.spins_since_ns != 0 && spun_ns < CROWD_NS {
            return false;
        }
        let ran_ns = scheduling::thread_ns();
        let away_ns = spun_ns.saturating_sub(ran_ns - past.ran_ns);
        let crowded = past.spins_since_ns != 0 && away_ns > spun_ns / CROWD_PART;
        (past.spins_since_ns, past.ran_ns) = (now, ran_ns);
        if crowded {
            past.crowded_until_ns = now + CROWDED_NS;
        }
        crowded
    }

    /// Sleeps until woken. If all other pollers sleep, the sleep is limited or skipped as `then` says.
    fn sleep(&self, watch: &mut Watch, past: &mut Past, then: Then) {
        let sleeper = self.sleepers.of(watch.slot);
        let limit = {
            let mut r = self.rnic.spin_lock();
            let now = r.since_ns();
            sleeper.set_asleep(true);
            // Whether all pollers sleep is decided under the RNIC's lock. A poller that wakes meanwhile takes the lock
            // next.
            if !self.sleepers.all_sleep() {
                None
            } else if then == Then::Leaves {
                sleeper.wake_in(TURN_NS);
                None
            } else {
                let due = r.next_timeout().map(|t| t.saturating_sub(now));
                let works = r.has_runnable() || self.port_is_polled() || due == Some(0);
                let starves = then == Then::Starves;
                let may = (!works || starves) && !self.is_stopping();
                let Some(naps) = may.then(|| r.doze(starves)).flatten() else { return sleeper.set_asleep(false) };
                if naps || starves {
                    sleeper.wake_within(NAP_NS);
                }
                due.filter(|_| !starves)
            }
        };
        let kicks = sleeper.wait(limit);
        sleeper.set_asleep(false);
        if kicks.iter().any(|&t| t != CALL) {
            self.take_kicks(sleeper, &kicks);
        }
        drop(sleeper.twin.last.swap(None));
        (past.has_woken, past.by_twin) = (true, sleeper.twin.called.swap(false, Ordering::Relaxed));
        (past.woken_ns, past.spins_since_ns) = (self.now(), 0);
        // The sleep may have been long, so the poller's copies may be out of date.
        watch.looks_anew();
    }

    /// Called after work: on shared cores, keeps twins awake for a while. A dedicated poller that has just woken wakes
    /// the others.
    fn work_goes_on(&self, past: &mut Past) {
        if !self.shares_cores {
            if std::mem::take(&mut past.has_woken) {
                self.sleepers.all().take(self.wanted()).filter(|s| s.is_asleep()).for_each(Sleeper::call);
            }
            return;
        }
        self.worked_ns.store(past.found_ns, Ordering::Relaxed);
        self.sleepers.all().filter(|s| s.twin.asleep.load(Ordering::Relaxed)).for_each(|s| s.twin.wake());
    }

    /// Called when there is new work: if all pollers sleep, wakes one; on shared cores, the one of this core.
    pub(super) fn call_if_all_sleep(&self) {
        if self.sleepers.all_sleep() {
            let i = if self.shares_cores { rustix::thread::sched_getcpu() } else { 0 };
            self.sleepers.of(i).call();
        }
    }

    /// True if pollers are added and removed with the load.
    pub(super) fn grows(&self) -> bool {
        self.range.0 < self.range.1
    }

    /// Records whether a round has left work over, and adds a poller if that continues.
    pub(super) fn note_backlog(&self, left_over: bool, now: u64) {
        if !left_over || !self.grows() {
            return self.backlog_since_ns.store(0, Ordering::Relaxed);
        }
        let since = self.backlog_since_ns.load(Ordering::Relaxed);
        if since == 0 {
            self.backlog_since_ns.store(now, Ordering::Relaxed);
        } else if now.saturating_sub(since) >= BACKLOG_NS {
            let wanted = self.wanted();
            let one_more = |n: usize| (n == wanted && n < self.range.1).then_some(n + 1);
            if self.wanted.fetch_update(Ordering::SeqCst, Ordering::Relaxed, one_more).is_ok() {
                self.backlog_since_ns.store(now, Ordering::Relaxed);
                self.sleepers.of(wanted).call();
            }
        }
    }

    /// True if the poller in `slot`, which has found no work since `since_ns`, is removed.
    fn is_spare(&self, slot: usize, since_ns: u64) -> bool {
        let long = slot >= self.range.0 && self.now().saturating_sub(since_ns) >= SPARE_NS;
        let last = |n: usize| (n == slot + 1).then_some(slot);
        long && self.wanted.fetch_update(Ordering::SeqCst, Ordering::Relaxed, last).is_ok()
    }

    /// Starts a thread that takes over slot `i` from the thread that has it.
    pub(super) fn start_in_slot(self: &Arc<Self>, i: usize) -> io::Result<()> {
        let (pollers, cores) = (self.clone(), cores());
        let core = self.shares_cores.then(|| cores[i % cores.len()]);
        let thread = self.liveness.give(i);
        let builder = std::thread::Builder::new().name(format!("poller{i}"));
        let started = builder.spawn(move || {
            core.into_iter().for_each(scheduling::pin);
            confine::thread(Kind::Poller);
            let mut watch = Watch::new(i, thread);
            pollers.poll(&mut watch);
            pollers.leave(&mut watch);
        });
        if started.is_err() {
            self.liveness.give_back(i);
        }
        started.map(|_| ())
    }

    /// Starts the twins of all pollers.
    pub(super) fn start_twins(self: &Arc<Self>, cores: &[usize]) -> io::Result<()> {
        for i in 0..self.sleepers.count() {
            let (pollers, core) = (self.clone(), cores[i % cores.len()]);
            std::thread::Builder::new().name(format!("twin{i}")).spawn(move || {
                scheduling::pin(core);
                scheduling::be_idle();
                confine::thread(Kind::Poller);
                pollers.twin(pollers.sleepers.of(i));
            })?;
        }
        Ok(())
    }

    /// The main loop of a twin: wakes the poller of its core when it sees work.
    fn twin(&self, sleeper: &Sleeper) {
        let twin = &sleeper.twin;
        let _ = twin.thread.set(std::thread::current());
        let (mut bells, mut looks) = (None::<Arc<Bells>>, 0u32);
        while !self.is_stopping() {
            if !twin.next.is_empty() && twin.last.is_empty() {
                twin.last.swap(std::mem::replace(&mut bells, twin.next.swap(None)));
                sleeper.call();
            }
            let work = self.jobs_wait.load(Ordering::Relaxed) || self.signs.runnable.load(Ordering::Relaxed);
            if (work || bells.as_ref().is_some_and(|b| b.have_rung())) && sleeper.is_asleep() {
                twin.called.store(true, Ordering::Relaxed);
                sleeper.call();
            }
            looks = looks.wrapping_add(1);
            if looks % LISTEN_SPINS == 0 && self.now().saturating_sub(self.worked_ns.load(Ordering::Relaxed)) > TWIN_NS
            {
                twin.asleep.store(true, Ordering::SeqCst);
                std::thread::park();
                twin.asleep.store(false, Ordering::SeqCst);
            }
            std::hint::spin_loop();
        }
    }

    /// Gives the twins other doorbells to look at. Must be called with the RNIC locked.
    pub(super) fn give_to_twins(&self, changes: u64, bells: impl FnOnce() -> Bells) {
        if self.shares_cores && self.twins_have.swap(changes, Ordering::Relaxed) != changes {
            let bells = Arc::new(bells());
            for s in self.sleepers.all() {
                drop(s.twin.next.swap(Some(bells.clone())));
                s.twin.wake();
            }
        }
    }

    /// Wakes all twins, so that they see that the pollers stop.
    pub(super) fn end_twins(&self) {
        self.sleepers.all().for_each(|s| s.twin.wake());
    }
}
