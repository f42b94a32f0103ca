//! The rounds of a poller, the jobs that it runs between them, and the handling of kicks.

use std::sync::atomic::Ordering;

use unirdma_device::{RnicGuard, now_ns};
use unirdma_rnic::{Bells, Job, Output, SessionId};

use super::pollers::Pollers;
use super::port_io::PortIo;
use super::sleepers::{CALL, PORT, Sleeper};

/// Looks at the doorbells between two rounds that detect idle sessions and park them.
pub(super) const LOOKS_BETWEEN_ROUNDS: u32 = 64;
/// Size of a poller's buffer for copies between two processes, bytes.
pub(super) const SCRATCH_BYTES: usize = 64 << 10;
/// Most rounds of the RNIC, each under a lock hold of its own, before their events are delivered.
const ROUNDS_AT_ONCE: u32 = 8;
/// Most spins of a poller while another thread still wants the RNIC, before it takes the RNIC again.
const MOST_PAUSES: u32 = 300;
/// A round with work in the RNIC skips the port if the port was asked within this time, ns. So a reply leaves one
/// system call earlier.
const ASKED_NS: u64 = 3_000;

/// State of a poller between two rounds.
pub(super) struct Watch {
    /// The poller's slot, and the number of its thread.
    pub(super) slot: usize,
    pub(super) thread: u64,
    /// [`unirdma_rnic::Core::active_changes`] when `bells` was copied.
    changes: u64,
    bells: Bells,
    looks: u32,
    out: Vec<Output>,
    /// A job that was run, whose result the RNIC has not got yet.
    pub(super) job: Option<Box<Job>>,
    scratch: Box<[u8]>,
}

impl Watch {
    pub(super) fn new(slot: usize, thread: u64) -> Self {
        Watch {
            slot,
            thread,
            changes: 0,
            bells: Bells::default(),
            looks: 0,
            out: Vec::new(),
            job: None,
            scratch: vec![0; SCRATCH_BYTES].into_boxed_slice(),
        }
    }

    /// Makes the next look one at the RNIC.
    pub(super) fn looks_anew(&mut self) {
        self.looks = u32::MAX;
    }
}

/// Result of one round.
pub(super) struct Round {
    pub found: bool,
    /// Datagrams arrived for which there was no receive: programs should run now.
    pub starved: bool,
    /// No work was found, and no session is polled.
    pub idle: bool,
    /// When the RNIC was released, ns.
    pub ended_ns: u64,
}

impl Pollers {
    /// True if the RNIC must be taken even if the port has no packets: a doorbell has rung, a timer is due, or `watch`
    /// is out of date.
    #[inline]
    fn needs_round(&self, watch: &mut Watch) -> bool {
        watch.looks = watch.looks.wrapping_add(1);
        watch.changes != self.signs.changes.load(Ordering::Acquire)
            || watch.bells.look()
            || self.signs.runnable.load(Ordering::Acquire)
            || watch.looks % LOOKS_BETWEEN_ROUNDS == 0
            || self.is_due()
    }

    /// True if a timer of the RNIC has fired. Does not read the clock while no timer runs.
    #[inline]
    fn is_due(&self) -> bool {
        let due_ns = self.signs.due_ns.load(Ordering::Acquire);
        due_ns != u64::MAX && due_ns <= self.now()
    }

    /// One round of a poller, with at most one job; `None` if there is no work or another poller has the RNIC.
    pub(super) fn round(&self, watch: &mut Watch) -> Option<Round> {
        let done = watch.job.take();
        let comes_back = done.is_some();
        let jobs_wait = self.jobs_wait.load(Ordering::Relaxed);
        let calls = comes_back || jobs_wait || self.needs_round(watch);
        if !calls && !self.port_is_polled() {
            return None;
        }
        let port = self.port.as_ref();
        let mut net = port.and_then(PortIo::try_lock);
        let received = port.zip(net.as_mut()).is_some_and(|(port, n)| {
            let now = self.now();
            (!calls || now.saturating_sub(n.asked_ns) >= ASKED_NS) && port.receive(n, now, &self.rnic)
        });
        // If the port has no packets either, the RNIC is not needed.
        if !calls && !received && net.as_ref().is_none_or(|n| n.out.packets().is_empty()) {
            return None;
        }
        let mut r = if comes_back || received { self.rnic.spin_lock() } else { self.rnic.try_lock()? };
        let now = r.since_ns();
        r.rouse();
        if let Some(job) = done {
            r.end_job(job);
        }
        let mut found = r.poll_by(now, now_ns) || received || comes_back;
        for _ in 1..ROUNDS_AT_ONCE {
            if !r.has_turns() || r.has_jobs() || r.is_in_vain() || r.is_starved() {
                break;
            }
            // No other thread takes the RNIC in between, except for a job.
            r = self.reacquire(r.release());
            let since = r.since_ns();
            found |= r.poll_by(since, now_ns);
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
        let starved = r.take_starved();
        if watch.job.as_ref().is_some_and(|job| job.may_wait()) {
            self.steps_out(watch, &mut r);
        }
        self.publish(&r);
        if watch.changes != r.active_changes() {
            watch.changes = r.active_changes();
            watch.bells = r.active_bells();
            self.give_to_twins(watch.changes, || r.active_bells());
        }
        let delivering = self.delivery.begin(&watch.out);
        let end = r.release();
        self.note_backlog(left_over, end);
        self.delivery.deliver(&mut watch.out);
        drop(delivering);
        if let Some((port, net)) = port.zip(net.as_mut()) {
            port.send(net, now);
        }
        drop(net);
        if watch.job.is_some() {
            self.do_job(watch);
        }
        Some(Round { found, starved, idle, ended_ns: end })
    }

    /// Called before a job that may take long: lets other pollers look meanwhile, or lets doorbells kick.
    fn steps_out(&self, watch: &Watch, r: &mut RnicGuard<'_>) {
        self.sleepers.of(watch.slot).set_asleep(true);
        if self.sleepers.all_sleep() && (r.next_timeout().is_some() || r.doze(false) != Some(false)) {
            self.sleepers.all().for_each(Sleeper::call);
        }
    }

    /// Takes the RNIC again, which this poller released at time `end`, after giving other threads a chance.
    fn reacquire(&self, end: u64) -> RnicGuard<'_> {
        let waited = self.rnic.let_in();
        let mut pauses = 0;
        while self.rnic.is_wanted() && pauses < MOST_PAUSES {
            std::hint::spin_loop();
            pauses += 1;
        }
        if waited || pauses > 0 { self.rnic.spin_lock() } else { self.rnic.take_again(end) }
    }

    /// Runs the poller's job. If it takes long, another thread may have the poller's slot afterwards.
    fn do_job(&self, watch: &mut Watch) {
        let Some(job) = &mut watch.job else { return };
        let (number, scratch) = (job.number(), &mut watch.scratch);
        let has_slot = if job.may_wait() {
            let has_slot = self.liveness.do_slow(watch.slot, watch.thread, number, || job.run(scratch, now_ns));
            if has_slot {
                self.sleepers.of(watch.slot).set_asleep(false);
            }
            has_slot
        } else {
            job.run(scratch, now_ns);
            true
        };
        if !has_slot {
            self.leave(watch);
        }
    }

    /// Called when the thread has lost its slot: returns its finished job to the RNIC.
    pub(super) fn leave(&self, watch: &mut Watch) {
        if let Some(job) = watch.job.take() {
            self.rnic.lock().end_job(job);
            self.after_command();
        }
    }

    /// True while the pollers run and the thread has its slot.
    pub(super) fn goes_on(&self, watch: &Watch) -> bool {
        !self.is_stopping() && self.liveness.has(watch.slot, watch.thread)
    }

    /// Handles kicks, after which their sessions are polled. A vRNIC whose kicks are mostly spurious is ignored for a
    /// moment, so that it does not keep the poller on a core that others use.
    pub(super) fn take_kicks(&self, sleeper: &Sleeper, tokens: &[u64]) {
        if tokens.is_empty() {
            return;
        }
        let mut for_nothing = Vec::new();
        let mut r = self.rnic.lock();
        let now = self.now();
        for &token in tokens {
            match token {
                PORT => self.port.iter().for_each(|p| p.poll(now)),
                CALL => {}
                session if r.kick(SessionId::from_number(session), now) => for_nothing.push(session),
                _ => {}
            }
        }
        self.publish(&r);
        drop(r);
        for_nothing.into_iter().for_each(|session| sleeper.leave_out(session));
    }
}
