//! Who runs when: what a poller does after a round that has found nothing. There are two policies.
//!
//! *Shared*, on few cores: one poller for each core, pinned. It sleeps at once. A doorbell that nobody looks at kicks, and the kick wakes the
//! poller of the core where the program runs: a thread that has slept preempts one that computes, so whoever asks gives its own core for
//! it, and nobody waits for a time slice. A core that would be idle has somebody who looks meanwhile, the *twin* of its poller: a thread
//! that has the core only while nobody else wants it. It never takes the RNIC, since it may lose its core at any moment, but wakes its poller.
//!
//! *Dedicated*, on more: pollers have cores for themselves, on which they spin while some session is polled. One is always there; others come
//! while there is more work than those that are there do, and go again. One that finds that others want its core sleeps for a while as on
//! shared cores.
//!
//! While some poller is awake doorbells need no kick. So the last one that goes to sleep lets the RNIC ask for kicks
//! ([`unirdma_rnic::Core::doze`]), and the first one that wakes takes that back.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use unirdma_mem::Slot;
use unirdma_rnic::Bells;

use super::Engine;
use super::poller::{Round, Watch};
use super::sleepers::{CALL, Sleeper};
use crate::confine::{self, Kind, standing};

/// Rounds that find something between two looks for kicks of sessions that sleep, and rounds and a twin's looks that do not, which are shorter.
const LISTEN_ROUNDS: u32 = 64;
const LISTEN_SPINS: u32 = 256;
/// The time in which a program answers, nanoseconds. A poller that its twin has woken looks on for so long after that and after
/// its last work: its core was idle, and a WRITE of 8 B, one by one, takes 0.9 us in the place of 7 us. A dedicated one polls the port
/// for so long at least after a packet.
pub(super) const ANSWER_NS: u64 = 20_000;
/// How long the last one sleeps at most, nanoseconds, while a driver counts on that (`abi::NAPS`), or so that programs post receives.
pub(super) const NAP_NS: u64 = 100_000;
/// How long a poller does not hear the kicks of a vRNIC that kicks for nothing all the time, nanoseconds. To stop and to begin listening takes
/// 2 us for each session of that vRNIC. Beside 64 sessions that kick so, another tenant's WRITEs of 64 KiB made 200 MiB/s when the poller heard
/// them all, and make 17,000 now.
pub(super) const DEAF_NS: u64 = 10_000_000;
/// How long twins look after the last work, nanoseconds.
const TWIN_NS: u64 = 500_000;
/// How long a poller on a shared core works before whoever else wants that core has it for as long, nanoseconds. Pollers have more weight than
/// programs, so one that always has work would leave them a tenth. If nobody wants the core its twin wakes it at once.
pub(super) const TURN_NS: u64 = 200_000;
/// Work must be left over for so long before another dedicated poller comes, nanoseconds.
pub(super) const BACKLOG_NS: u64 = 50_000;
/// One that came so goes when it has found nothing for so long, nanoseconds.
const SPARE_NS: u64 = 1_000_000;
/// How often a dedicated poller that spins looks whether others want its core, nanoseconds: they do if they had a twentieth of it. The start of
/// a program takes more than that of 20 ms.
const CROWD_NS: u64 = 100_000_000;
const CROWD_PART: u64 = 20;
/// After that, the time for which it sleeps as on a shared core, nanoseconds.
const CROWDED_NS: u64 = 1_000_000_000;

/// What a poller does next.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Then {
    /// Another round.
    Looks,
    /// It sleeps until somebody wakes it, unless there is something to do.
    Sleeps,
    /// It sleeps although there are datagrams, so that programs post receives for them.
    Starves,
    /// Its turn has ended: it sleeps although there is work.
    Leaves,
}

/// What a poller remembers of when it had work, and of its core.
#[derive(Default)]
pub(super) struct Past {
    /// When it found something last, and when it woke last, nanoseconds.
    found_ns: u64,
    woken_ns: u64,
    /// It has found nothing since it woke.
    has_woken: bool,
    /// Its twin has woken it: its core was idle, and the program that rang is on another one.
    by_twin: bool,
    rounds: u32,
    /// Since when it has spun, and how long it had run before, nanoseconds; 0 while it has slept since.
    spins_since_ns: u64,
    ran_ns: u64,
    /// Others want its core until then, nanoseconds.
    crowded_until_ns: u64,
}

/// The thread that looks while a core would be idle.
#[derive(Default)]
pub(super) struct Twin {
    asleep: AtomicBool,
    /// It has woken its poller.
    called: AtomicBool,
    /// The doorbells that it is to look at next, and those that it does not look at any more. Its poller frees these: the twin may lose its core for
    /// seconds at any point, so it takes no lock, and allocates and frees nothing.
    next: Slot<Bells>,
    last: Slot<Bells>,
    thread: OnceLock<std::thread::Thread>,
}

impl Engine {
    /// What a poller does until it ends.
    pub(super) fn poll(&self, watch: &mut Watch) {
        let sleeper = self.sleepers.of(watch.seat);
        sleeper.set_asleep(false);
        while self.goes_on(watch) {
            let round = self.round(watch);
            let found = round.as_ref().is_some_and(|r| r.found);
            let then = match &round {
                Some(r) if found => self.after_work(&mut watch.past, r, watch.job.is_some()),
                _ => self.after_nothing(watch, round.as_ref()),
            };
            if then != Then::Looks {
                self.sleep(watch, then);
                continue;
            }
            watch.past.rounds = watch.past.rounds.wrapping_add(1);
            if watch.past.rounds % if found { LISTEN_ROUNDS } else { LISTEN_SPINS } == 0 {
                self.take_kicks(sleeper, &sleeper.wait(Some(0)));
            }
        }
    }

    /// After a round that has found something. With `carries_job` the poller has done a job, and tells the RNIC so in the next round.
    pub(super) fn after_work(&self, past: &mut Past, round: &Round, carries_job: bool) -> Then {
        past.found_ns = round.ended_ns;
        self.work_goes_on(past);
        match self.shares_cores && !carries_job {
            true if round.starved => Then::Starves,
            true if round.ended_ns.saturating_sub(past.woken_ns) >= TURN_NS => Then::Leaves,
            _ => Then::Looks,
        }
    }

    /// After a round, or a look, that has found nothing.
    fn after_nothing(&self, watch: &mut Watch, round: Option<&Round>) -> Then {
        let Watch { seat, past, .. } = watch;
        let looks = if self.shares_cores {
            past.by_twin && self.now() < (past.found_ns.max(past.woken_ns) + ANSWER_NS).min(past.woken_ns + TURN_NS)
        } else {
            let idle = round.is_some_and(|r| r.idle);
            let goes = self.grows() && self.is_spare(*seat, if idle { 0 } else { past.found_ns.max(past.woken_ns) });
            !goes && !idle && *seat < self.wanted() && !self.is_crowded(past)
        };
        if !looks {
            return Then::Sleeps;
        }
        std::hint::spin_loop();
        Then::Looks
    }

    /// True if others want the core of a dedicated poller that spins.
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
        let ran_ns = standing::thread_ns();
        let away_ns = spun_ns.saturating_sub(ran_ns - past.ran_ns);
        let crowded = past.spins_since_ns != 0 && away_ns > spun_ns / CROWD_PART;
        (past.spins_since_ns, past.ran_ns) = (now, ran_ns);
        if crowded {
            past.crowded_until_ns = now + CROWDED_NS;
        }
        crowded
    }

    /// Sleeps until somebody wakes it. If no other poller is awake it does so for a time only, or not at all, as `then` says.
    fn sleep(&self, watch: &mut Watch, then: Then) {
        let sleeper = self.sleepers.of(watch.seat);
        let limit = {
            let mut r = self.rnic.spin_lock();
            let now = r.since_ns();
            sleeper.set_asleep(true);
            // Who has the RNIC decides alone whether all sleep. One that wakes meanwhile takes the RNIC next.
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
        let past = &mut watch.past;
        (past.has_woken, past.by_twin) = (true, sleeper.twin.called.swap(false, Ordering::Relaxed));
        (past.woken_ns, past.spins_since_ns) = (self.now(), 0);
        // It may have slept for long.
        watch.looks_anew();
    }

    /// There was work: on shared cores twins look for more for a while. A dedicated poller that has just woken wakes the others.
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

    /// Somebody has made work: if no poller would see it, one is woken, on shared cores that of this core.
    pub(super) fn call_if_all_sleep(&self) {
        if self.sleepers.all_sleep() {
            let i = if self.shares_cores { rustix::thread::sched_getcpu() } else { 0 };
            self.sleepers.of(i).call();
        }
    }

    /// True if pollers come and go with the load.
    pub(super) fn grows(&self) -> bool {
        self.pollers.0 < self.pollers.1
    }

    /// Notes whether a round has left work over, and lets another poller come if that goes on.
    pub(super) fn note_backlog(&self, left_over: bool, now: u64) {
        if !left_over || !self.grows() {
            return self.backlog_since_ns.store(0, Ordering::Relaxed);
        }
        let since = self.backlog_since_ns.load(Ordering::Relaxed);
        if since == 0 {
            self.backlog_since_ns.store(now, Ordering::Relaxed);
        } else if now.saturating_sub(since) >= BACKLOG_NS {
            let wanted = self.wanted();
            let one_more = |n: usize| (n == wanted && n < self.pollers.1).then_some(n + 1);
            if self.wanted.fetch_update(Ordering::SeqCst, Ordering::Relaxed, one_more).is_ok() {
                self.backlog_since_ns.store(now, Ordering::Relaxed);
                self.sleepers.of(wanted).call();
            }
        }
    }

    /// The poller in `seat` has found nothing since then; true if it goes.
    fn is_spare(&self, seat: usize, since_ns: u64) -> bool {
        let long = seat >= self.pollers.0 && self.now().saturating_sub(since_ns) >= SPARE_NS;
        let last = |n: usize| (n == seat + 1).then_some(seat);
        long && self.wanted.fetch_update(Ordering::SeqCst, Ordering::Relaxed, last).is_ok()
    }

    /// Starts the twins of all pollers.
    pub(super) fn start_twins(self: &Arc<Self>, cores: &[usize]) -> io::Result<()> {
        for i in 0..self.sleepers.count() {
            let (e, core) = (self.clone(), cores[i % cores.len()]);
            std::thread::Builder::new().name(format!("twin{i}")).spawn(move || {
                standing::pin(core);
                standing::be_idle();
                confine::thread(Kind::Poller);
                e.twin(e.sleepers.of(i));
            })?;
        }
        Ok(())
    }

    /// Wakes the poller of its core for what it sees.
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

    /// Gives the twins other doorbells to look at. Only who has the RNIC calls this.
    pub(super) fn give_to_twins(&self, changes: u64, bells: impl FnOnce() -> Bells) {
        if self.shares_cores && self.twins_have.swap(changes, Ordering::Relaxed) != changes {
            let bells = Arc::new(bells());
            for s in self.sleepers.all() {
                drop(s.twin.next.swap(Some(bells.clone())));
                s.twin.wake();
            }
        }
    }

    /// Wakes all twins, so that they end.
    pub(super) fn end_twins(&self) {
        self.sleepers.all().for_each(|s| s.twin.wake());
    }
}

impl Twin {
    fn wake(&self) {
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }
}
