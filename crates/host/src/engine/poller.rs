//! The thread of a poller: its rounds of the RNIC, the jobs that it does between them, when it gives its core away, and when it sleeps.

use std::mem::MaybeUninit;
use std::sync::atomic::Ordering;

use rustix::event::epoll;
use unirdma_device::{RnicGuard, lock, now_ns};
use unirdma_rnic::{Bells, Job, Output, SessionId};

use super::again::Again;
use super::zeal::Zeal;
use super::{Engine, PORT, SCRATCH_BYTES, slice};

/// Work must be left over for so long before another poller comes, nanoseconds.
pub(super) const BACKLOG_NS: u64 = 50_000;
/// A poller that came with the load goes when it has found nothing for so long, nanoseconds.
const SPARE_NS: u64 = 1_000_000;
/// Rounds between two looks at the kicks of sleeping sessions: while nothing is found and each round
/// yields, while nothing is found and rounds are short, and while busy.
const KICK_ROUNDS_YIELDING: u32 = 8;
const KICK_ROUNDS_SPINNING: u32 = 256;
const KICK_ROUNDS_BUSY: u32 = 64;
/// The most time between two such looks, as long as the poller has its core, and the least after one that has found only kicks for
/// nothing, nanoseconds. Rounds are not enough to count: one that yields to a program that computes lasts as long as the kernel lets
/// that program run.
const KICK_NS: u64 = 100_000;
/// Looks at the doorbells between two rounds that find idle sessions and let them sleep.
pub(super) const LOOKS_BETWEEN_ROUNDS: u32 = 64;
/// Rounds of the RNIC, each with the lock for itself, before their events are delivered.
const ROUNDS_AT_ONCE: u32 = 8;
/// Yields of a poller to a thread that wants the RNIC, before it takes the RNIC again.
const MOST_PAUSES: u32 = 16;
/// How long a busy poller keeps others off its core, nanoseconds.
const SHARE_NS: u64 = 2_000_000;
/// The same while whoever it lets in gives the core back soon.
const SHORT_SHARE_NS: u64 = 100_000;
/// What a busy poller gives up when it yields while another worker is keen on the cores, nanoseconds: its time slice. As long as the slices of
/// ten threads that yield to each other.
const GIVEN_NS: u64 = 30_000_000;
/// A pause that took so long was taken by somebody who computes, nanoseconds.
const LONG_PAUSE_NS: u64 = 100_000;
/// Rounds that took so long together did much, nanoseconds: more than a few programs that each wait for an answer can ask for.
const LONG_ROUND_NS: u64 = 1_500;
/// How long its poller then keeps the RNIC, nanoseconds.
const KEEP_NS: u64 = 15_000;
/// A round that has work of the RNIC does not ask the port for packets if it was asked so short a time ago, nanoseconds: a reply leaves
/// one system call earlier.
const ASKED_NS: u64 = 3_000;

/// What a poller has and looks at between two rounds.
pub(super) struct Watch {
    /// The poller's seat, and the number of its thread.
    seat: usize,
    thread: u64,
    /// [`unirdma_rnic::Core::active_changes`] when `bells` was copied.
    changes: u64,
    bells: Bells,
    looks: u32,
    rounds: u32,
    /// Whether programs ask this poller for work often.
    zeal: Zeal,
    /// When the poller looked for kicks last, and whether it found only kicks for nothing.
    listened_ns: u64,
    heard_in_vain: bool,
    /// When the poller let others in, after it had done something.
    paused_ns: u64,
    /// How long it then keeps them off its core, nanoseconds.
    share_ns: u64,
    /// A yield gives up [`GIVEN_NS`], and not what the kernel takes for a slice.
    generous: bool,
    /// Whether it looks at the RNIC once more after a small round, before it lets others in.
    again: Again,
    /// How often it has left the RNIC to a thread that wants it, since it had the RNIC last.
    pauses: u32,
    /// Until when it leaves the RNIC to another poller.
    left_until_ns: u64,
    out: Vec<Output>,
    /// The job that it has done, which the RNIC has not heard of yet.
    job: Option<Box<Job>>,
    scratch: Box<[u8]>,
}

impl Watch {
    pub(super) fn new(seat: usize, thread: u64) -> Self {
        Watch {
            seat,
            thread,
            changes: 0,
            bells: Bells::default(),
            looks: 0,
            rounds: 0,
            zeal: Zeal::default(),
            listened_ns: 0,
            heard_in_vain: false,
            paused_ns: 0,
            share_ns: SHARE_NS,
            generous: false,
            again: Again::default(),
            pauses: 0,
            left_until_ns: 0,
            out: Vec::new(),
            job: None,
            scratch: vec![0; SCRATCH_BYTES].into_boxed_slice(),
        }
    }
}

/// What came of listening for kicks.
#[derive(PartialEq, Eq)]
enum Heard {
    Nothing,
    /// Kicks of sessions that are polled already.
    InVain,
    Something,
}

/// What came of one look at the RNIC.
pub(super) struct Round {
    found: bool,
    /// It found little, did it, and left nothing: programs have their turn now.
    rests: bool,
    /// Programs had rung doorbells, not only in vain.
    asked: bool,
    idle: bool,
    sleep_ns: Option<u64>,
    /// When the RNIC was given back, nanoseconds.
    ended_ns: u64,
}

impl Engine {
    /// True if the RNIC must be taken, whatever the port has: a doorbell rang, time is due, or `watch` is out of date.
    #[inline]
    fn needs_round(&self, watch: &mut Watch) -> bool {
        watch.looks = watch.looks.wrapping_add(1);
        watch.changes != self.signs.changes.load(Ordering::Acquire)
            || watch.bells.look()
            || self.signs.runnable.load(Ordering::Acquire)
            || watch.looks % LOOKS_BETWEEN_ROUNDS == 0
            || self.is_due()
    }

    /// True if a timer of the RNIC has fired. While none runs, that needs no look at the clock.
    #[inline]
    fn is_due(&self) -> bool {
        let due_ns = self.signs.due_ns.load(Ordering::Acquire);
        due_ns != u64::MAX && due_ns <= self.now()
    }

    /// A poller that did much, and will do more, keeps the RNIC for a moment: its caches are warm, and the other core
    /// is for somebody else. Until then the others do not look again.
    fn left_to_other(&self, watch: &mut Watch) -> bool {
        // A look at the clock takes as long as all the other looks together.
        if watch.left_until_ns == 0 && self.busy.poller.load(Ordering::Relaxed) == watch.seat {
            return false;
        }
        let now = self.now();
        if now >= watch.left_until_ns && self.busy.poller.load(Ordering::Relaxed) != watch.seat {
            watch.left_until_ns = self.busy.until_ns.load(Ordering::Relaxed);
        }
        now < watch.left_until_ns
    }

    /// One look at the RNIC by a poller, and one job if there is any; `None` if nothing calls for it or another poller has it.
    pub(super) fn round(&self, watch: &mut Watch) -> Option<Round> {
        let done = watch.job.take();
        let comes_back = done.is_some();
        let jobs_wait = self.jobs_wait.load(Ordering::Relaxed);
        let obliged = comes_back || jobs_wait;
        if !obliged && self.left_to_other(watch) {
            return None;
        }
        let calls = obliged || self.needs_round(watch);
        if !calls && !self.port_is_polled() {
            return None;
        }
        if !comes_back && self.rnic.is_wanted() && watch.pauses < MOST_PAUSES {
            watch.pauses += 1;
            return None;
        }
        watch.pauses = 0;
        let mut net = self.net.as_ref().and_then(|n| n.try_lock().ok());
        let received = net.as_mut().is_some_and(|n| {
            let now = self.now();
            (!calls || now.saturating_sub(n.asked_ns) >= ASKED_NS) && self.receive(n, now)
        });
        // If the port has nothing, nobody needs the RNIC.
        if !calls && !received && net.as_ref().is_none_or(|n| n.out.packets().is_empty()) {
            return None;
        }
        let mut r = if comes_back || received { self.rnic.spin_lock() } else { self.rnic.try_lock()? };
        let now = r.since_ns();
        if let Some(job) = done {
            if job.has_made_pages() {
                r.set_crowded(self.shares_cores_with_workers());
            }
            r.end_job(job);
        }
        let mut found = r.poll_by(now, now_ns) || received || comes_back;
        let mut rang = r.has_rung();
        for _ in 1..ROUNDS_AT_ONCE {
            if !r.has_turns() || r.has_jobs() || r.is_in_vain() || r.is_starved() {
                break;
            }
            // Nobody else takes it in between, unless for a job.
            self.keep(watch, r.since_ns() + KEEP_NS);
            r = self.reacquire(r.release());
            let since = r.since_ns();
            found |= r.poll_by(since, now_ns);
            rang |= r.has_rung();
        }
        if !found {
            r.park_idle(now, self.idle_ns);
        }
        let left_over = r.has_turns() || r.has_jobs();
        watch.job = r.take_job();
        if self.grows() {
            r.set_helped(self.wanted() > 1);
        }
        r.drain_outputs(&mut watch.out);
        let sends = net.as_mut().is_some_and(|n| {
            if n.out.packets().is_empty() {
                r.tx().exchange(&mut n.out);
            }
            !n.out.packets().is_empty()
        });
        let found = found || sends || watch.job.is_some();
        let idle = !found && !r.is_busy() && !self.port_is_polled();
        if idle {
            // Under the lock, so that whoever makes work afterwards sees it.
            self.sleeping.store(true, Ordering::SeqCst);
        }
        let sleep_ns = r.next_timeout().map(|t| t.saturating_sub(now));
        let gives_way = r.take_starved() || r.is_in_vain();
        let small = !left_over && !r.are_jobs_under_way() && !received && !sends;
        self.publish(&r);
        if watch.changes != r.active_changes() {
            watch.changes = r.active_changes();
            watch.bells = r.active_bells();
        }
        let delivering = self.begin_delivery(&watch.out);
        let end = r.release();
        if end - now >= LONG_ROUND_NS || watch.job.is_some() {
            self.keep(watch, end);
        }
        // Poller 0 may sleep until a time that is not right any more.
        if comes_back && self.sleeping.load(Ordering::SeqCst) {
            self.kick();
        }
        self.note_backlog(left_over, end);
        self.deliver(&mut watch.out);
        drop(delivering);
        if let Some(net) = &mut net {
            self.send(net, now);
        }
        drop(net);
        if watch.job.is_some() {
            self.do_job(watch);
        } else if gives_way {
            self.pause();
        }
        let rests = found && small && !gives_way && end - now < LONG_ROUND_NS;
        Some(Round { found, rests, asked: rang && !gives_way, idle, sleep_ns, ended_ns: end })
    }

    /// True if pollers come and go with the load.
    fn grows(&self) -> bool {
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
                self.wake_others();
            }
        }
    }

    /// The poller in `seat` has found nothing for long; true if it goes.
    fn is_spare(&self, seat: usize, idle_since_ns: u64) -> bool {
        let long = self.grows() && self.now().saturating_sub(idle_since_ns) >= SPARE_NS;
        let last = |n: usize| (n == seat + 1 && seat >= self.pollers.0).then_some(seat);
        long && self.wanted.fetch_update(Ordering::SeqCst, Ordering::Relaxed, last).is_ok()
    }

    /// The poller in `seat` sleeps until there is work for it.
    fn rest(&self, seat: usize) {
        let mut wakes = lock(&self.wakes);
        while self.wanted() <= seat && !self.is_stopping() {
            wakes = self.woken.wait(wakes).unwrap_or_else(|e| e.into_inner());
        }
    }

    /// A poller keeps the RNIC for a moment after time `since`.
    fn keep(&self, watch: &mut Watch, since: u64) {
        watch.left_until_ns = 0;
        self.busy.poller.store(watch.seat, Ordering::Relaxed);
        self.busy.until_ns.store(since + KEEP_NS, Ordering::Relaxed);
    }

    /// Takes the RNIC again, which this poller gave back at time `end`, after others could.
    fn reacquire(&self, end: u64) -> RnicGuard<'_> {
        let waited = self.rnic.let_in();
        let mut pauses = 0;
        while self.rnic.is_wanted() && pauses < MOST_PAUSES {
            std::thread::yield_now();
            pauses += 1;
        }
        if waited || pauses > 0 { self.rnic.spin_lock() } else { self.rnic.take_again(end) }
    }

    /// Does the job that a poller has. If it takes long, somebody else has the poller's seat afterwards.
    fn do_job(&self, watch: &mut Watch) {
        let Some(job) = &mut watch.job else { return };
        let (number, scratch) = (job.number(), &mut watch.scratch);
        let seated = if job.may_wait() {
            self.seats.do_slow(watch.seat, watch.thread, number, || job.run(scratch, now_ns))
        } else {
            job.run(scratch, now_ns);
            true
        };
        if !seated {
            self.leave(watch);
        }
    }

    /// A poller has lost its seat: what it has done goes back to the RNIC.
    pub(super) fn leave(&self, watch: &mut Watch) {
        if let Some(job) = watch.job.take() {
            self.rnic.lock().end_job(job);
            self.after_command();
        }
    }

    /// A poller that is busy all the time lets others on its core in now and then: one of them may have been interrupted
    /// in a round of another virtual layer, which then waits for it as a whole.
    fn share_core(&self, watch: &mut Watch) {
        let now = self.now();
        if self.yields && now - watch.paused_ns > watch.share_ns {
            self.give_way(watch, self.demand.is_of_keen_others(now));
            let back = self.now();
            // Programs that look for completions come and go at once, but one that computes keeps the core for a time slice.
            watch.share_ns = if back - now > LONG_PAUSE_NS { SHARE_NS } else { SHORT_SHARE_NS };
            watch.paused_ns = back;
        }
    }

    /// After a round that found something: lets others on its core in, if it is time.
    fn after_work(&self, watch: &mut Watch, round: &Round) {
        if self.yields {
            if round.asked {
                watch.zeal.was_asked();
            }
            self.demand.want(round.ended_ns, watch.zeal.is_keen());
        }
        if !(round.rests && self.yields) {
            watch.again.ends(true);
            return self.share_core(watch);
        }
        watch.paused_ns = round.ended_ns;
        if !watch.again.begins() {
            self.give_way(watch, false);
        }
    }

    /// After a look that found nothing: lets others run. If it was the look that is made once more after a small round, this is the yield
    /// that was put off for it.
    fn after_nothing(&self, watch: &mut Watch) {
        watch.zeal.looked_in_vain();
        if watch.again.ends(false) { self.give_way(watch, false) } else { self.pause() }
    }

    /// Lets others run, and for longer than usual if `generous`. Two threads of another worker that yield to each other after each request give
    /// up two slices for it. If a busy poller gave up one for each of its shares, they would have one request in a share. It stays so until
    /// it is one of those that yield after each request: a change takes microseconds, and puts the poller among its rivals anew.
    fn give_way(&self, watch: &mut Watch, generous: bool) {
        if std::mem::replace(&mut watch.generous, generous) != generous {
            // Who may not choose is as fair as the kernel.
            let _ = slice::set(if generous { GIVEN_NS } else { 0 });
        }
        self.pause();
    }

    pub(super) fn first_poller(&self, watch: &mut Watch) {
        let idle_rounds = if self.yields { KICK_ROUNDS_YIELDING } else { KICK_ROUNDS_SPINNING };
        while self.goes_on(watch) {
            watch.rounds = watch.rounds.wrapping_add(1);
            match self.round(watch) {
                Some(r) if r.idle => {
                    let kicks = self.await_kicks(r.sleep_ns);
                    self.sleeping.store(false, Ordering::SeqCst);
                    self.take_kicks(kicks);
                }
                Some(r) if r.found => {
                    self.after_work(watch, &r);
                    if self.asleep.load(Ordering::Relaxed) > 0 {
                        self.wake_others();
                    }
                    self.hears(watch, KICK_ROUNDS_BUSY, Some(r.ended_ns));
                }
                _ => {
                    // Some sessions are polled while others sleep and kick.
                    if !self.hears(watch, idle_rounds, None) {
                        self.after_nothing(watch);
                    }
                }
            }
        }
    }

    pub(super) fn other_poller(&self, watch: &mut Watch) {
        let mut idle_since_ns = self.now();
        while self.goes_on(watch) {
            if self.wanted() <= watch.seat || self.is_spare(watch.seat, idle_since_ns) {
                self.rest(watch.seat);
                idle_since_ns = self.now();
                continue;
            }
            // Read before the look, so that a wake in between is not lost.
            let seen = *lock(&self.wakes);
            match self.round(watch) {
                // Nobody has anything to do.
                Some(r) if r.idle && self.is_spare(watch.seat, 0) => self.rest(watch.seat),
                Some(r) if r.idle => {
                    self.asleep.fetch_add(1, Ordering::SeqCst);
                    let mut wakes = lock(&self.wakes);
                    while *wakes == seen {
                        wakes = self.woken.wait(wakes).unwrap_or_else(|e| e.into_inner());
                    }
                    drop(wakes);
                    self.asleep.fetch_sub(1, Ordering::SeqCst);
                }
                Some(r) if r.found => {
                    idle_since_ns = self.now();
                    self.after_work(watch, &r);
                    self.hears(watch, KICK_ROUNDS_BUSY, Some(r.ended_ns));
                }
                _ => {
                    if !self.hears(watch, KICK_ROUNDS_BUSY, None) {
                        self.after_nothing(watch);
                    }
                }
            }
        }
    }

    /// True while the engine runs and the poller has its seat.
    fn goes_on(&self, watch: &Watch) -> bool {
        !self.is_stopping() && self.seats.has(watch.seat, watch.thread)
    }

    /// Looks for kicks if it is time, and takes them; false if there were none. Poller 0 does so on behalf of all, in one of `every` rounds at
    /// least. Where pollers share their cores the others look now and then too: a program that computes may keep poller 0 from its core.
    /// `recent_ns` is when the poller looked at the clock last, if that was in this round: each look at it delays a request.
    fn hears(&self, watch: &mut Watch, every: u32, recent_ns: Option<u64>) -> bool {
        // Rounds that do not yield are short, and need no look at the clock.
        let clocked = self.yields || watch.heard_in_vain;
        let now = if clocked { recent_ns.unwrap_or_else(|| self.now()) } else { watch.listened_ns };
        let is_first = watch.seat == 0;
        let by_rounds = is_first && watch.rounds % every == 0 && !watch.heard_in_vain;
        if !by_rounds && now.saturating_sub(watch.listened_ns) < KICK_NS {
            return false;
        }
        if is_first {
            self.sleeping.store(false, Ordering::SeqCst);
        } else if self.sleeping.load(Ordering::SeqCst) {
            return false;
        }
        let kicks = self.await_kicks(Some(0));
        let heard = if kicks.is_empty() { Heard::Nothing } else { self.take_kicks(kicks) };
        (watch.listened_ns, watch.heard_in_vain) = (self.now(), heard == Heard::InVain);
        // Each kick is told to one poller only, and poller 0 may have begun to sleep meanwhile, for as long as there was nothing to do.
        if !is_first && heard != Heard::Nothing && self.sleeping.load(Ordering::SeqCst) {
            self.kick();
        }
        heard != Heard::Nothing
    }

    /// Waits for kicks, up to the limit: the tokens of those that came.
    fn await_kicks(&self, limit_ns: Option<u64>) -> Vec<u64> {
        let mut events = [MaybeUninit::<epoll::Event>::uninit(); 64];
        let limit = limit_ns.map(|ns| rustix::time::Timespec {
            tv_sec: (ns / 1_000_000_000) as i64,
            tv_nsec: (ns % 1_000_000_000) as i64,
        });
        match epoll::wait(&self.epoll, &mut events, limit.as_ref()) {
            Ok((ready, _)) => ready.iter().map(|e| e.data.u64()).collect(),
            Err(_) => Vec::new(),
        }
    }

    /// Takes kicks, after which their sessions are polled.
    fn take_kicks(&self, tokens: Vec<u64>) -> Heard {
        {
            let events = self.events.read().unwrap_or_else(|e| e.into_inner());
            let sessions = tokens.iter().filter(|&&t| t < PORT);
            sessions.filter_map(|&t| events.get(&SessionId::from_number(t))).for_each(|q| q.on_wake());
        }
        let mut r = self.rnic.lock();
        let now = self.now();
        let mut heard = Heard::InVain;
        for token in tokens {
            if token == PORT {
                self.poll_port(now);
            }
            if token >= PORT || r.unpark(SessionId::from_number(token), now) {
                heard = Heard::Something;
            }
        }
        let busy = r.is_busy() || self.port_is_polled();
        self.publish(&r);
        drop(r);
        if busy {
            self.wake_others();
        }
        heard
    }
}
