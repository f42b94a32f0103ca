//! The scheduler: the order of turns, and their cost.
//!
//! vRNICs share the RNIC by time. Each has an agenda: doorbells that have rung, timers, and QPs with work. All work for
//! an agenda is measured in nanoseconds and charged to it, divided by the vRNIC's weight; the agenda that has been
//! charged least has the next turn (start-time fair queueing). Deficit round robin would need to know the cost of a
//! turn before it begins, but the cost of a timer, a retry or a doorbell is known only afterwards. A vRNIC that has
//! nothing to do saves up no time for later.
//!
//! The scheduler knows vRNICs, QPs, CQs and sessions by their handles only.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, VecDeque};

use crate::objects::{Cq, DoorbellPage, Qp, VrnicId, VrnicKind};
use crate::slab::{Handle, SideTable};

/// Delay of a QP that asks for a turn in a moment, ns. The ACK of a message waits for this time, so that it can leave
/// together with the program's own reply, in one system call.
pub(crate) const MOMENT_NS: u64 = 5_000;
/// Virtual nanoseconds of a nanosecond at weight 1.
const SCALE: u64 = 1 << 16;
/// Stopped timers of a vRNIC are removed when it has this number of timers more than twice those that were left the
/// last time.
const MANY_TIMERS: usize = 1024;
/// Empty turns and kicks of a vRNIC in succession that cost it nothing: a program's request may be executed before the
/// program rings.
const FEW_IN_VAIN: u64 = 4;
/// For each further one, its doorbells are not polled for this time longer, ns.
const MUTE_STEP_NS: u64 = 1_000;
/// Longest time for which they are not polled, ns.
const MUTE_NS: u64 = 50_000;

/// The purpose of a timer of a vRNIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Due {
    /// The wait of a QP is over, if it is still the wait with this number.
    Wait(Handle<Qp>, u32),
    /// A QP with a rate limit, or of a vRNIC with one, may send again.
    Pace(Handle<Qp>),
    /// Datagrams of a QP have waited long enough for a receive, or may have one now.
    Backlog(Handle<Qp>),
    /// Completions of a CQ with moderation are to be reported.
    Events(Handle<Cq>),
}

/// The work that a vRNIC has to do, and its accounts.
struct Agenda {
    weight: u32,
    /// Time that it was charged, virtual nanoseconds.
    charged: u64,
    /// Time that the RNIC has worked for it, nanoseconds.
    busy_ns: u64,
    /// It is in [`Scheduler::ready`], or has its turn.
    queued: bool,
    /// Turns and kicks in succession that found nothing to do.
    in_vain: u64,
    /// Its doorbells are not polled before this time, nanoseconds.
    muted_until: u64,
    /// True from [`Scheduler::starve`] until its next turn.
    starved: bool,
    /// Its place in [`Scheduler::wakes`]; `u64::MAX` for none.
    wakes_at: u64,
    /// Doorbell pages that have rung.
    rung: VecDeque<Handle<DoorbellPage>>,
    /// QPs with work, in turn.
    run: VecDeque<Handle<Qp>>,
    timers: BinaryHeap<Reverse<(u64, Due)>>,
    /// The number of timers that were left when stopped ones were removed the last time.
    timers_kept: usize,
}

impl Agenda {
    fn has_work(&self) -> bool {
        !self.run.is_empty() || !self.rung.is_empty()
    }

    /// A turn or a kick found nothing to do.
    fn note_vain(&mut self, now: u64) {
        self.in_vain += 1;
        if self.in_vain > FEW_IN_VAIN {
            self.muted_until = now + ((self.in_vain - FEW_IN_VAIN) * MUTE_STEP_NS).min(MUTE_NS);
        }
    }
}

/// See the module's documentation.
#[derive(Default)]
pub(crate) struct Scheduler {
    agendas: SideTable<VrnicKind, Agenda>,
    /// vRNICs with work, in the order of their charges when they were added.
    ready: BinaryHeap<Reverse<(u64, VrnicId)>>,
    /// When the first timer of each vRNIC that has one fires.
    wakes: BTreeSet<(u64, VrnicId)>,
    /// The charge of the vRNIC of the last turn when that turn began, virtual nanoseconds.
    clock: u64,
    /// QPs that want a turn in a moment, with the time of that turn. The delay is the same for all, so they are in
    /// order.
    soon: VecDeque<(u64, Handle<Qp>)>,
}

impl Scheduler {
    pub fn add(&mut self, id: VrnicId, weight: u32) {
        let agenda = Agenda {
            weight: weight.max(1),
            charged: self.clock,
            busy_ns: 0,
            queued: false,
            in_vain: 0,
            muted_until: 0,
            starved: false,
            wakes_at: u64::MAX,
            rung: VecDeque::new(),
            run: VecDeque::new(),
            timers: BinaryHeap::new(),
            timers_kept: 0,
        };
        self.agendas.insert(id.0, agenda);
    }

    pub fn remove(&mut self, id: VrnicId) {
        if let Some(a) = self.agendas.remove(id.0) {
            self.wakes.remove(&(a.wakes_at, id));
        }
    }

    pub fn set_weight(&mut self, id: VrnicId, weight: u32) {
        if let Some(a) = self.agendas.get_mut(id.0) {
            a.weight = weight.max(1);
        }
    }

    /// Nanoseconds that the RNIC has worked for a vRNIC.
    pub fn busy_ns(&self, id: VrnicId) -> u64 {
        self.agendas.get(id.0).map_or(0, |a| a.busy_ns)
    }

    /// True if some vRNIC is ready for a turn.
    pub fn has_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    /// The vRNICs that are ready for a turn, in no order.
    pub fn ready(&self) -> impl Iterator<Item = VrnicId> {
        self.ready.iter().map(|r| r.0.1)
    }

    /// True if there is other work beside the QP of this vRNIC that has its turn.
    pub fn has_others(&self, id: VrnicId) -> bool {
        self.has_ready() || self.agendas.get(id.0).is_some_and(|a| !a.run.is_empty())
    }

    /// The earliest time at which [`Scheduler::begin_turn`] or [`Scheduler::next_soon`] returns something without any
    /// further call.
    pub fn next_timeout(&self) -> Option<u64> {
        let soon = self.soon.front().map(|s| s.0);
        self.wakes.first().map(|w| w.0).into_iter().chain(soon).min()
    }

    /// Adds a QP that has work. The caller makes sure that a QP is in the agenda once at most.
    pub fn enqueue(&mut self, id: VrnicId, qp: Handle<Qp>) {
        if let Some(a) = self.agendas.get_mut(id.0) {
            a.run.push_back(qp);
            self.queue(id);
        }
    }

    /// Adds a doorbell page that has rung. The caller makes sure that a page is in the agenda once at most.
    pub fn ring(&mut self, id: VrnicId, door: Handle<DoorbellPage>) {
        if let Some(a) = self.agendas.get_mut(id.0) {
            a.rung.push_back(door);
            self.queue(id);
        }
    }

    /// Gives a QP a turn at time `at`, which is not before the time of an earlier call.
    pub fn soon(&mut self, at: u64, qp: Handle<Qp>) {
        self.soon.push_back((at, qp));
    }

    /// A QP whose time of [`Scheduler::soon`] has come.
    pub fn next_soon(&mut self, now: u64) -> Option<Handle<Qp>> {
        self.soon.front().filter(|s| s.0 <= now)?;
        self.soon.pop_front().map(|s| s.1)
    }

    /// Sets a timer. `stopped` is true for older timers that have been stopped.
    pub fn arm(&mut self, id: VrnicId, at: u64, due: Due, stopped: impl Fn(&(u64, Due)) -> bool) {
        let Some(a) = self.agendas.get_mut(id.0) else { return };
        // The timer of a wait that is over stays until it fires, which may be hours later, so the number of such timers
        // is bounded here. Each such walk visits at most twice the timers that were set since the last one.
        if a.timers.len() > MANY_TIMERS + 2 * a.timers_kept {
            a.timers.retain(|Reverse(timer)| !stopped(timer));
            a.timers_kept = a.timers.len();
        }
        a.timers.push(Reverse((at, due)));
        self.set_wake(id);
    }

    /// The timers of a vRNIC, stopped ones included, and when each fires.
    pub fn timers(&self, id: VrnicId) -> impl Iterator<Item = (u64, Due)> {
        self.agendas.get(id.0).into_iter().flat_map(|a| a.timers.iter().map(|t| t.0))
    }

    /// A timer of the vRNIC that is due.
    pub fn next_due(&mut self, id: VrnicId, now: u64) -> Option<Due> {
        let a = self.agendas.get_mut(id.0)?;
        let due = a.timers.peek().filter(|t| t.0.0 <= now)?.0.1;
        a.timers.pop();
        Some(due)
    }

    /// True if polling the doorbells of the vRNIC is worth its time: all pages that have rung had their turn, and the
    /// vRNIC does not keep ringing for nothing. Polling costs a cache miss for each page.
    pub fn listens(&self, id: VrnicId, now: u64) -> bool {
        self.agendas.get(id.0).is_some_and(|a| a.rung.is_empty() && a.muted_until <= now)
    }

    /// A doorbell page of the vRNIC that has rung.
    pub fn next_rung(&mut self, id: VrnicId) -> Option<Handle<DoorbellPage>> {
        self.agendas.get_mut(id.0)?.rung.pop_front()
    }

    /// A QP of the vRNIC that has work.
    pub fn next_qp(&mut self, id: VrnicId) -> Option<Handle<Qp>> {
        self.agendas.get_mut(id.0)?.run.pop_front()
    }

    /// The QPs of a vRNIC that wait for their turn.
    pub fn waiting(&self, id: VrnicId) -> impl Iterator<Item = &Handle<Qp>> {
        self.agendas.get(id.0).into_iter().flat_map(|a| &a.run)
    }

    /// The vRNIC that has the next turn. The caller reports the cost of the turn by [`Scheduler::end_turn`].
    pub fn begin_turn(&mut self, now: u64) -> Option<VrnicId> {
        while let Some(&(at, id)) = self.wakes.first()
            && at <= now
        {
            self.wakes.pop_first();
            if let Some(a) = self.agendas.get_mut(id.0) {
                a.wakes_at = u64::MAX;
                self.queue(id);
            }
        }
        while let Some(Reverse((key, id))) = self.ready.pop() {
            let Some(a) = self.agendas.get_mut(id.0) else { continue };
            if a.charged > key {
                // It was charged for something else meanwhile.
                self.ready.push(Reverse((a.charged, id)));
                continue;
            }
            self.clock = self.clock.max(key);
            a.starved = false;
            return Some(id);
        }
        None
    }

    /// Ends the turn of a vRNIC, which took `ns` nanoseconds and found nothing to do if it was `in_vain`. If there is
    /// more to do, the vRNIC gets another turn.
    pub fn end_turn(&mut self, id: VrnicId, now: u64, ns: u64, in_vain: bool) {
        self.charge(id, ns);
        let Some(a) = self.agendas.get_mut(id.0) else { return };
        a.queued = false;
        if in_vain {
            a.note_vain(now)
        } else {
            a.in_vain = 0
        }
        if a.has_work() || a.timers.peek().is_some_and(|t| t.0.0 <= now) {
            self.queue(id);
        } else {
            self.set_wake(id);
        }
    }

    /// The vRNIC kicked, and no doorbell had rung.
    pub fn spurious_kick(&mut self, id: VrnicId, now: u64) {
        self.agendas.get_mut(id.0).into_iter().for_each(|a| a.note_vain(now));
    }

    /// True while the doorbells of the vRNIC are not polled because it keeps ringing or kicking for nothing.
    pub fn is_muted(&self, id: VrnicId, now: u64) -> bool {
        self.agendas.get(id.0).is_some_and(|a| a.muted_until > now)
    }

    /// A turn of the vRNIC, or a datagram for it, found no receive.
    pub fn starve(&mut self, id: VrnicId) {
        self.agendas.get_mut(id.0).into_iter().for_each(|a| a.starved = true);
    }

    /// True since [`Scheduler::starve`] until the vRNIC's next turn.
    pub fn is_starved(&self, id: VrnicId) -> bool {
        self.agendas.get(id.0).is_some_and(|a| a.starved)
    }

    /// Charges a vRNIC for `ns` nanoseconds of work.
    pub fn charge(&mut self, id: VrnicId, ns: u64) {
        if let Some(a) = self.agendas.get_mut(id.0) {
            a.busy_ns += ns;
            a.charged += ns * SCALE / u64::from(a.weight);
        }
    }

    /// Puts a vRNIC among those that are ready.
    fn queue(&mut self, id: VrnicId) {
        let Some(a) = self.agendas.get_mut(id.0) else { return };
        if !std::mem::replace(&mut a.queued, true) {
            a.charged = a.charged.max(self.clock);
            self.ready.push(Reverse((a.charged, id)));
        }
    }

    /// Makes sure that a vRNIC is woken by its first timer.
    fn set_wake(&mut self, id: VrnicId) {
        let Some(a) = self.agendas.get_mut(id.0) else { return };
        let at = a.timers.peek().map_or(u64::MAX, |t| t.0.0);
        if at != a.wakes_at && !a.queued {
            self.wakes.remove(&(a.wakes_at, id));
            a.wakes_at = at;
            if at != u64::MAX {
                self.wakes.insert((at, id));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vrnic(n: u64) -> VrnicId {
        VrnicId(Handle::from_raw(n | 1 << 24))
    }

    fn qp(n: u64) -> Handle<Qp> {
        Handle::from_raw(n | 1 << 24)
    }

    /// Gives `turns` turns of `ns(vRNIC)` to vRNICs that always have work. Returns the number of turns that each had.
    fn share(s: &mut Scheduler, ids: &[VrnicId], turns: usize, ns: impl Fn(usize) -> u64) -> Vec<usize> {
        let mut had = vec![0; ids.len()];
        for &id in ids {
            s.enqueue(id, qp(1));
        }
        for _ in 0..turns {
            let id = s.begin_turn(0).unwrap();
            let i = ids.iter().position(|&v| v == id).unwrap();
            assert_eq!(s.next_qp(id), Some(qp(1)));
            s.enqueue(id, qp(1));
            s.end_turn(id, 0, ns(i), false);
            had[i] += 1;
        }
        had
    }

    #[test]
    fn time_is_shared_by_weight_whatever_a_turn_costs() {
        let mut s = Scheduler::default();
        let ids = [vrnic(1), vrnic(2), vrnic(3)];
        s.add(ids[0], 100);
        s.add(ids[1], 100);
        s.add(ids[2], 300);
        let had = share(&mut s, &ids, 1000, |i| [1000, 100, 1000][i]);
        let time = [had[0] * 1000, had[1] * 100, had[2] * 1000];
        assert!(time[0].abs_diff(time[1]) <= 1000, "{time:?}");
        assert!(time[2].abs_diff(3 * time[0]) <= 3000, "{time:?}");
    }

    #[test]
    fn who_had_nothing_to_do_saves_up_no_time_and_who_was_charged_beside_a_turn_waits() {
        let mut s = Scheduler::default();
        let ids = [vrnic(1), vrnic(2)];
        s.add(ids[0], 100);
        s.add(ids[1], 100);
        share(&mut s, &ids[..1], 100, |_| 1000);
        let had = share(&mut s, &ids, 100, |_| 1000);
        assert!(had[0].abs_diff(had[1]) <= 2, "{had:?}");
        s.charge(ids[0], 50_000);
        let mut had = [0, 0];
        for _ in 0..60 {
            let id = s.begin_turn(0).unwrap();
            s.next_qp(id);
            s.enqueue(id, qp(1));
            s.end_turn(id, 0, 1000, false);
            had[usize::from(id == ids[1])] += 1;
        }
        assert!((50..=56).contains(&had[1]), "{had:?}");
    }

    #[test]
    fn timers_wake_their_vrnic_and_only_it() {
        let mut s = Scheduler::default();
        let (a, b) = (vrnic(1), vrnic(2));
        s.add(a, 100);
        s.add(b, 100);
        let never = |_: &(u64, Due)| false;
        s.arm(a, 500, Due::Wait(qp(1), 1), never);
        s.arm(a, 300, Due::Pace(qp(2)), never);
        s.arm(b, 400, Due::Wait(qp(3), 1), never);
        assert_eq!(s.next_timeout(), Some(300));
        assert_eq!(s.begin_turn(299), None);
        assert_eq!(s.begin_turn(300), Some(a));
        assert_eq!((s.next_due(a, 300), s.next_due(a, 300)), (Some(Due::Pace(qp(2))), None));
        s.end_turn(a, 300, 10, false);
        assert_eq!(s.next_timeout(), Some(400));
        s.remove(b);
        assert_eq!(s.next_timeout(), Some(500));
        assert_eq!(s.begin_turn(1000), Some(a));
        // A timer that was due and not taken in this turn is taken in the next.
        s.end_turn(a, 1000, 10, false);
        assert_eq!(s.begin_turn(1000), Some(a));
        assert_eq!(s.next_due(a, 1000), Some(Due::Wait(qp(1), 1)));
        s.end_turn(a, 1000, 10, false);
        assert_eq!((s.begin_turn(2000), s.next_timeout()), (None, None));
    }

    #[test]
    fn stopped_timers_do_not_pile_up() {
        let mut s = Scheduler::default();
        let a = vrnic(1);
        s.add(a, 100);
        for i in 0..100_000u32 {
            s.arm(a, 1 << 40, Due::Wait(qp(1), i), |d| d.1 != Due::Wait(qp(1), i));
        }
        assert!(s.agendas.get(a.0).unwrap().timers.len() <= MANY_TIMERS + 3);
        assert_eq!(s.wakes.len(), 1);
    }
}
