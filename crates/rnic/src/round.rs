//! Rounds and turns. A round polls doorbells and timers, and then gives turns to vRNICs in the order of the scheduler.

use unirdma_formats::{QpType, Qpn};
use unirdma_mem::holes;

use crate::core::{Core, OP_NS, enqueue};
use crate::exec::SMALL_SLICE;
use crate::job::Waiter;
use crate::objects::{DoorbellPage, Pause, Qp, SessionId, VrnicId, Wait};
use crate::sched::Due;
use crate::slab::{Handle, Slab};

/// Longest estimated turn of a vRNIC, nanoseconds.
const TURN_NS: u64 = 2_000;
/// A round begins no turn after this time, nanoseconds, so that its caller can let others in. The last turn makes it up
/// to twice as long, if requests are short.
const ROUND_NS: u64 = 1_500;
/// Approximate cost of a round beside its turns, nanoseconds. A vRNIC whose turn ends a round early is charged with it.
/// Otherwise that time would be on nobody's account, and the others would have less than their part (`attack`:
/// backlog).
const ROUND_REST_NS: u64 = 500;
/// Approximate cost of a timer that has fired, or of a doorbell page that has rung, nanoseconds.
const STEP_NS: u64 = 100;
/// Approximate cost of polling a session's doorbell page, nanoseconds.
const LOOK_NS: u64 = 30;
/// Most QPs that one round wakes because their time of [`Scheduler::soon`](crate::sched::Scheduler::soon) has come, and
/// most that it wakes because packets can leave again.
const MAX_WOKEN: usize = 64;

impl Core {
    /// True if QPs have work that [`crate::Rnic::poll`] has not come to yet, or packets wait for the port.
    pub fn has_runnable(&self) -> bool {
        self.sched.has_ready()
            || self.jobs.has_any()
            || !self.net.tx_waiting.is_empty()
            || !self.net.tx.packets().is_empty()
    }

    /// True if a vRNIC has a turn to come.
    pub fn has_turns(&self) -> bool {
        self.sched.has_ready()
    }

    /// True while a session is polled and does not ask for kicks, or a QP has work.
    pub fn is_busy(&self) -> bool {
        !self.polled.is_empty() && !self.dozes || self.has_runnable()
    }

    /// True if the last round of [`crate::Rnic::poll_by`] ended with a doorbell that had no request behind it, and no
    /// other vRNIC had a turn to come. Such doorbells cost their program nothing, so the caller should let programs run
    /// before it polls again.
    pub fn is_in_vain(&self) -> bool {
        self.in_vain
    }

    /// When a turn is due even if nothing rings; `None` for never.
    pub(crate) fn next_turn(&self) -> Option<u64> {
        self.sched.next_timeout()
    }

    /// Polls doorbells and timers, and gives turns for a bounded time; true if there was anything to do.
    pub(crate) fn round(&mut self, began: u64, clock: impl Fn() -> u64) -> bool {
        let mut found = self.look_at_bells();
        found |= self.wake_soon();
        if !self.net.tx.is_full() {
            self.wake_tx_waiting();
        }
        self.in_vain = false;
        let starved = std::mem::take(&mut self.starved);
        let mut spent = 0;
        while spent < ROUND_NS && !self.jobs.is_full() {
            let Some(id) = self.sched.begin_turn(self.now) else { break };
            found = true;
            self.objects.touched.set(None);
            let (estimate, in_vain) = self.turn(id);
            let now = clock().max(self.now);
            // The clock of a simulation stands still during a round.
            let took = if now == began { estimate } else { now - self.now };
            self.now = now;
            spent += took;
            self.sched.end_turn(id, now, took, in_vain);
            let owner = self.objects.touched.take();
            // A turn copies about one slice. If that takes more nanoseconds than a slice has bytes, its pages were not
            // mapped.
            if (owner.is_some() || took > SMALL_SLICE)
                && let Some(v) = self.objects.vrnics.get(owner.unwrap_or(id).0)
            {
                v.memory_state.end_turn(owner.is_some(), took);
            }
            // A job is done only after the caller has given the core back. The turn of another vRNIC would delay it,
            // and this vRNIC would get less than its part, because it cannot go on before its job has ended.
            if self.jobs.has_any() {
                break;
            }
            if in_vain && self.sched.ready().all(|other| other == id) {
                self.in_vain = true;
                break;
            }
            // Programs should run, and post receives, before more datagrams come.
            if self.starved {
                self.sched.charge(id, ROUND_REST_NS);
                self.sched.starve(id);
                break;
            }
        }
        self.starved |= starved;
        found
    }

    /// Polls some doorbells of each vRNIC that has polled sessions; true if any have rung.
    fn look_at_bells(&mut self) -> bool {
        let mut found = false;
        let (doors, qps) = (&mut self.objects.doors, &self.objects.qps);
        let (sched, now) = (&mut self.sched, self.now);
        // While no vRNIC has work, polling takes time from nobody.
        let charged = sched.has_ready();
        for group in self.polled.groups() {
            let vrnic = group.vrnic();
            if !sched.listens(vrnic, now) {
                group.pass_over();
                continue;
            }
            let looked = group.look();
            for &h in looked {
                let Some(d) = doors.get_mut(h).filter(|d| !d.rung) else { continue };
                let words = d.bell.rung_words();
                if words == 0 {
                    continue;
                }
                d.rung = true;
                d.last_rung_ns = now;
                sched.ring(vrnic, h);
                found = true;
                if let Some(qp) = d.alone_in(words.trailing_zeros()) {
                    expect(qps, qp);
                }
            }
            if charged {
                sched.charge(vrnic, looked.len() as u64 * LOOK_NS);
            }
        }
        found
    }

    /// A vRNIC's turn: a doorbell page, timers, and QPs. Returns its approximate cost, nanoseconds, and whether nothing
    /// was done.
    fn turn(&mut self, id: VrnicId) -> (u64, bool) {
        let (mut ns, touched) = (STEP_NS, holes::touched().times);
        let (mut in_vain, jobs) = (true, self.jobs.made());
        if let Some(door) = self.sched.next_rung(id) {
            self.objects.doors.get_mut(door).into_iter().for_each(|d| d.rung = false);
            self.take_bell(door);
        }
        while ns < TURN_NS / 2
            && let Some(due) = self.sched.next_due(id, self.now)
        {
            self.on_due(due);
            in_vain = false;
            ns += STEP_NS;
        }
        while ns < TURN_NS
            && let Some(qp) = self.sched.next_qp(id)
        {
            if let Some(q) = self.objects.qps.get_mut(qp) {
                q.queued = false;
                if q.pause != Pause::No {
                    continue;
                }
                let (took, again) = self.execute_with(|e, core| e.step(core, qp, TURN_NS - ns));
                if again {
                    self.make_runnable(qp);
                }
                in_vain &= took == 0;
                ns += took;
            }
            ns += OP_NS;
            // Pages that were made in holes of rings or other memory took more time than was estimated.
            if holes::touched().times != touched {
                break;
            }
        }
        (ns, in_vain && self.jobs.made() == jobs)
    }

    /// Takes the bits that are set in a doorbell page.
    fn take_bell(&mut self, h: Handle<DoorbellPage>) {
        let Some(d) = self.objects.doors.get_mut(h) else { return };
        let (qps, sched) = (&mut self.objects.qps, &mut self.sched);
        d.take(|qp| {
            expect(qps, qp);
            enqueue(qps, sched, qp);
        });
        // The other words of a page are for sessions of processes, which have one page.
        if d.number != 0 {
            return;
        }
        let (id, away) = (d.session, d.bell.away());
        if let Some(s) = self.objects.sessions.get_mut(id.0)
            && away != s.away
        {
            s.away = away;
            if away == 0 || !self.jobs.fence(id, Waiter::Away(away)) {
                d.bell.confirm_away(away);
            }
        }
    }

    /// True if a session has posted sends that the RNIC has not executed yet, and that DESTROY_QP of `qpn`, or
    /// DESTROY_AH (`None`), would take away. [`crate::Rnic::poll_by`] executes them, a bounded part at a time, and
    /// [`Core::take_brief_job`] returns the copies that it leaves to others.
    ///
    /// A program may destroy a UD QP and its AHs as soon as it has posted its last datagrams. A hardware RNIC has sent
    /// them by the time it gets such a command; pollers that share their core with other programs may not have had a
    /// turn. This concerns unreliable QPs only: on a reliable one, only a completion says that a message has left.
    pub fn is_behind(&mut self, now: u64, id: SessionId, qpn: Option<u32>) -> bool {
        let Some(session) = self.objects.sessions.get(id.0) else { return false };
        let vrnic = session.vrnic;
        for door in self.objects.doors_of(id) {
            if self.objects.doors.get(door).is_some_and(|d| d.bell.has_rung()) {
                self.now = now;
                // If the page is parked, its kick is on the way.
                self.unpark_door(door, now);
                self.take_bell(door);
            }
        }
        let concerned = |h: &Handle<Qp>| {
            self.objects.qps.get(*h).is_some_and(|q| {
                q.owner == id && !q.typ.is_reliable() && qpn.map_or(q.typ == QpType::Ud, |qpn| q.qpn == Qpn(qpn))
            })
        };
        self.sched.waiting(vrnic).any(concerned)
            || self.net.tx_waiting.iter().any(concerned)
            || self.jobs.copies_for(concerned)
    }

    /// A timer has fired.
    fn on_due(&mut self, due: Due) {
        match due {
            Due::Wait(qp, timer) => {
                let Some(q) = self.objects.qps.get_mut(qp).filter(|q| q.timer == timer) else { return };
                if q.pause == Pause::No {
                    self.execute_with(|e, core| e.timer(core, qp));
                } else {
                    q.pause = Pause::Overdue;
                }
            }
            Due::Pace(qp) => self.end_pace(qp),
            Due::Backlog(qp) => self.backlog_due(qp),
            Due::Events(cq) => self.events_due(cq),
        }
    }

    /// Gives QPs their turns whose time of `soon` has come.
    fn wake_soon(&mut self) -> bool {
        let woken = (0..MAX_WOKEN).map_while(|_| {
            let qp = self.sched.next_soon(self.now)?;
            self.make_runnable(qp);
            Some(())
        });
        woken.count() > 0
    }

    /// There is room in [`crate::Tx`] again: QPs that have waited for it get their turns.
    pub(crate) fn wake_tx_waiting(&mut self) {
        for _ in 0..MAX_WOKEN {
            let Some(h) = self.net.tx_waiting.pop_front() else { return };
            if let Some(q) = self.objects.qps.get_mut(h) {
                if let Some(w) = q.work.as_mut().filter(|w| w.wait == Wait::Tx) {
                    w.wait = Wait::No;
                }
                q.wire_mut().into_iter().for_each(|w| w.waits_for_tx = false);
            }
            self.make_runnable(h);
        }
    }
}

/// Prefetches the send queue of a QP, which will be read in a moment.
fn expect(qps: &Slab<Qp>, qp: Handle<Qp>) {
    if let Some(q) = qps.get(qp) {
        q.rings.expect_sq(q.sq_cons);
    }
}
