//! The core type: tables, turns, outputs.

use std::collections::{BTreeMap, HashMap, VecDeque};

use unirdma_abi as abi;
use unirdma_formats::{AsyncEvent, Gid, QpState, QpType};
use unirdma_mem::Bell;

use crate::capture::Tap;
use crate::cm::Cm;
use crate::datagram::{Ah, Backlog};
use crate::job::{Jobs, Waiter};
use crate::mr::{Backing, Mr, MrTable};
use crate::multicast::Multicast;
use crate::objects::{Counters, Cq, Names, Pd, Qp, QpInfo, Session, SessionId, Srq, Used, Vnic, VnicId, Wait};
use crate::pace::{Limit, Share};
use crate::random::{Seed, Streams};
use crate::sched::{Due, Scheduler};
use crate::slab::{Handle, Slab};
use crate::wire::{Route, Tx, WireDrops};
use crate::xrc::{Domains, Xrcd};

/// Most time that a vRNIC's turn takes as far as it can be foretold, nanoseconds.
const TURN_NS: u64 = 6_000;
/// [`Rnic::poll_by`] begins no turn after this time, nanoseconds, so that its caller can let others in.
const ROUND_NS: u64 = 10_000;
/// What one operation takes beside its bytes, roughly, nanoseconds. Turns are planned with estimates, and charged by the clock.
pub(crate) const OP_NS: u64 = 250;
/// What a timer takes that has fired, or the doorbell page of a session, roughly, nanoseconds.
const STEP_NS: u64 = 100;
/// Bytes that are copied in a nanosecond, roughly.
const BYTES_PER_NS: u64 = 8;
/// Most QPs that one round wakes because their time of [`Scheduler::soon`] has come, and most that it wakes because packets can
/// leave again.
pub(crate) const MAX_WOKEN: usize = 64;

/// What it takes to move bytes, roughly, nanoseconds.
pub(crate) fn copy_ns(bytes: u64) -> u64 {
    bytes / BYTES_PER_NS
}

/// Largest path MTU, bytes.
pub(crate) const MAX_MTU: u32 = 4096;

/// Quotas of one vRNIC (X12).
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Limits {
    /// Queue pairs.
    pub max_qp: u32,
    /// Completion queues.
    pub max_cq: u32,
    /// Memory regions.
    pub max_mr: u32,
    /// Protection domains.
    pub max_pd: u32,
    /// Address handles.
    pub max_ah: u32,
    /// Shared receive queues.
    pub max_srq: u32,
    /// Bytes of registered memory, all MRs together.
    pub max_mr_bytes: u64,
    /// Programs that use it at a time (kept by the virtual layer, which knows its connections).
    #[serde(default = "default_sessions")]
    pub max_sessions: u32,
}

fn default_sessions() -> u32 {
    Limits::default().max_sessions
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            max_qp: 16_384,
            max_cq: 16_384,
            max_mr: 65_536,
            max_pd: 4096,
            max_ah: 65_536,
            max_srq: 4096,
            max_mr_bytes: 1 << 47,
            max_sessions: 1024,
        }
    }
}

/// Objects of a vRNIC in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Usage {
    pub sessions: usize,
    pub qps: usize,
    pub cqs: usize,
    /// MRs that the virtual layer maps (ways *direct* and *share*), and their bytes.
    pub mrs_mapped: usize,
    pub bytes_mapped: u64,
    /// MRs whose bytes are copied in and out of the application (way *copy*), and their bytes.
    pub mrs_copied: usize,
    pub bytes_copied: u64,
}

/// MRs whose memory is reached in the same way, for the same reason.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct MrNote {
    /// `direct`, `share` or `copy`.
    pub way: String,
    /// The reason in words.
    pub why: String,
    /// How many MRs.
    pub mrs: usize,
    /// Their bytes.
    pub bytes: u64,
}

/// What makes a vRNIC.
#[derive(Clone, Debug)]
pub struct VnicConfig {
    /// Only vRNICs of one group may connect (U33).
    pub group: u32,
    /// The GID table, in order.
    pub gids: Vec<Gid>,
    /// Quotas.
    pub limits: Limits,
    /// Its part of the RNIC.
    pub share: Share,
}

/// Something a session must be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// A completion event of CQ `cqn` on completion event virtqueue `queue`.
    Completion {
        /// Whom.
        session: SessionId,
        /// Which queue, counted from 0.
        queue: u16,
        /// Which CQ.
        cqn: u32,
    },
    /// The command of this session that was delayed can be answered.
    Released {
        /// Whose.
        session: SessionId,
    },
    /// CM_EVENT has something for completion event virtqueue `queue`.
    Connection {
        /// Whom.
        session: SessionId,
        /// Which queue, counted from 0.
        queue: u16,
    },
    /// An asynchronous event.
    Async {
        /// Whom.
        session: SessionId,
        /// What.
        kind: AsyncEvent,
        /// QPN, CQ handle or port.
        handle: u32,
    },
}

impl Output {
    /// Whom it is for.
    pub fn session(&self) -> SessionId {
        match *self {
            Output::Completion { session, .. }
            | Output::Connection { session, .. }
            | Output::Released { session }
            | Output::Async { session, .. } => session,
        }
    }
}

/// The software RNIC of one host. See the crate's documentation for the order of calls.
pub struct Rnic {
    pub(crate) random: Streams,
    pub(crate) now: u64,
    pub(crate) hints: u32,
    pub(crate) vnics: Slab<Vnic>,
    /// By group and GID.
    pub(crate) by_gid: HashMap<(u32, Gid), Vec<VnicId>>,
    pub(crate) sessions: Slab<Session>,
    pub(crate) pds: Slab<Pd>,
    pub(crate) mrs: MrTable,
    pub(crate) ahs: Slab<Ah>,
    pub(crate) srqs: Slab<Srq>,
    /// XRC SRQs by number.
    pub(crate) srq_numbers: HashMap<u32, Handle<Srq>>,
    pub(crate) xrcds: Slab<Xrcd>,
    pub(crate) domains: Domains,
    pub(crate) cqs: Slab<Cq>,
    pub(crate) qps: Slab<Qp>,
    pub(crate) qpns: HashMap<u32, Handle<Qp>>,
    /// Sessions that are polled.
    pub(crate) active: Vec<SessionId>,
    /// Counts the changes of `active`.
    active_changes: u64,
    pub(crate) sched: Scheduler,
    pub(crate) jobs: Jobs,
    /// Jobs may be done while the core does something else.
    pub(crate) helped: bool,
    outputs: VecDeque<Output>,
    pub(crate) routes: HashMap<(u32, Gid), Route>,
    /// Largest path MTU to other hosts, bytes.
    pub(crate) wire_mtu: u32,
    /// Congestion control is on.
    pub(crate) adapts: bool,
    pub(crate) drops: WireDrops,
    pub(crate) tx: Tx,
    /// QPs that wait for room in `tx`.
    pub(crate) tx_waiting: VecDeque<Handle<Qp>>,
    /// The capture that runs.
    pub(crate) tap: Option<Box<Tap>>,
    /// A datagram has found no receive.
    pub(crate) starved: bool,
    /// The datagram under way on this host.
    pub(crate) datagram: Box<[u8]>,
    pub(crate) cm: Cm,
    pub(crate) multicast: Multicast,
}

impl Rnic {
    /// An RNIC whose random numbers `seed` determines. `hints` are put into each doorbell page.
    pub fn new(seed: impl Into<Seed>, hints: u32) -> Self {
        Rnic {
            mrs: MrTable::default(),
            random: Streams::new(&seed.into()),
            now: 0,
            hints,
            vnics: Slab::default(),
            by_gid: HashMap::new(),
            sessions: Slab::default(),
            pds: Slab::default(),
            ahs: Slab::default(),
            srqs: Slab::default(),
            srq_numbers: HashMap::new(),
            xrcds: Slab::default(),
            domains: Domains::default(),
            cqs: Slab::default(),
            qps: Slab::default(),
            qpns: HashMap::new(),
            active: Vec::new(),
            active_changes: 0,
            sched: Scheduler::default(),
            jobs: Jobs::default(),
            helped: true,
            outputs: VecDeque::new(),
            routes: HashMap::new(),
            wire_mtu: MAX_MTU,
            adapts: true,
            drops: WireDrops::default(),
            tx: Tx::default(),
            tx_waiting: VecDeque::new(),
            tap: None,
            starved: false,
            datagram: vec![0; MAX_MTU as usize].into_boxed_slice(),
            cm: Cm::default(),
            multicast: Multicast::default(),
        }
    }

    /// Tells whether jobs are done by somebody while somebody else has the core. If not, only what may be slow becomes a job.
    pub fn set_helped(&mut self, on: bool) {
        self.helped = on;
    }

    /// Adds a vRNIC; `None` if there are too many.
    pub fn add_vnic(&mut self, c: VnicConfig) -> Option<VnicId> {
        let v = Vnic {
            group: c.group,
            gids: c.gids,
            up: true,
            limits: c.limits,
            limit: Limit::new(c.share),
            used: Used::default(),
            counters: Counters::default(),
        };
        let id = self.vnics.insert(v).map(VnicId)?;
        self.sched.add(id, c.share.weight);
        self.list_gids(id, true);
        self.cm_addresses_changed();
        Some(id)
    }

    /// Removes a vRNIC and all its sessions.
    pub fn remove_vnic(&mut self, id: VnicId) {
        for s in self.sessions.handles(|s| s.vnic == id) {
            self.remove_session(SessionId(s));
        }
        self.cm_forget_vnic(id);
        self.list_gids(id, false);
        self.sched.remove(id);
        self.vnics.remove(id.0);
    }

    /// Gives a vRNIC another part of the RNIC from now on.
    pub fn set_share(&mut self, id: VnicId, share: Share) {
        if let Some(v) = self.vnics.get_mut(id.0) {
            v.limit = Limit::new(share);
            self.sched.set_weight(id, share.weight);
        }
    }

    /// The part of the RNIC that a vRNIC has.
    pub fn share(&self, id: VnicId) -> Share {
        self.vnics.get(id.0).map_or(Share::default(), |v| v.limit.share())
    }

    /// A command of a session took so long, nanoseconds: its vRNIC is charged for it.
    pub fn charge_command(&mut self, s: SessionId, ns: u64) {
        if let Some(s) = self.sessions.get(s.0) {
            self.sched.charge(s.vnic, ns);
        }
    }

    /// How long the RNIC has worked for a vRNIC, nanoseconds.
    pub fn busy_ns(&self, id: VnicId) -> u64 {
        self.sched.busy_ns(id)
    }

    /// The counters of a vRNIC.
    pub fn counters(&self, id: VnicId) -> Option<Counters> {
        self.vnics.get(id.0).map(|v| v.counters)
    }

    /// What a vRNIC has in use.
    pub fn usage(&self, id: VnicId) -> Usage {
        let Some(v) = self.vnics.get(id.0) else { return Usage::default() };
        let Used { sessions, qps, cqs, .. } = v.used;
        let mut u = Usage { sessions, qps, cqs, ..Usage::default() };
        for m in self.mrs_of(id) {
            let (count, bytes) = match m.backing {
                Backing::Process(..) => (&mut u.mrs_copied, &mut u.bytes_copied),
                _ => (&mut u.mrs_mapped, &mut u.bytes_mapped),
            };
            *count += 1;
            *bytes = bytes.saturating_add(m.counted());
        }
        u
    }

    /// The MRs of a vRNIC, without its windows.
    fn mrs_of(&self, id: VnicId) -> impl Iterator<Item = &Mr> {
        let sessions = self.sessions.iter().filter(move |(_, s)| s.vnic == id);
        let mrs = sessions.flat_map(|(_, s)| s.names.mrs.values()).filter_map(|&h| self.mrs.get(h));
        mrs.filter(|m| m.window.is_none())
    }

    /// How the memory of a vRNIC's MRs is reached, and why, as their drivers say.
    pub fn mr_notes(&self, id: VnicId) -> Vec<MrNote> {
        let mut notes: BTreeMap<(&str, &str), (usize, u64)> = BTreeMap::new();
        for m in self.mrs_of(id) {
            let sum = notes.entry((abi::mr_way(m.note), abi::mr_why(m.note))).or_default();
            *sum = (sum.0 + 1, sum.1.saturating_add(m.counted()));
        }
        let note = |((way, why), (mrs, bytes)): ((&str, &str), (usize, u64))| MrNote {
            way: way.into(),
            why: why.into(),
            mrs,
            bytes,
        };
        notes.into_iter().map(note).collect()
    }

    /// The QPs of a vRNIC.
    pub fn queue_pairs(&self, id: VnicId) -> Vec<QpInfo> {
        let name = |q: &Qp| QpInfo {
            qpn: q.qpn,
            kind: format!("{:?}", q.typ).to_uppercase(),
            state: format!("{:?}", q.state).to_uppercase(),
            peer_gid: (q.attr.ah_attr.is_global != 0).then(|| Gid(q.attr.ah_attr.grh.dgid).to_string()),
            peer_qpn: (q.attr.ah_attr.is_global != 0).then_some(q.attr.dest_qp_num),
            peer_host: q.wire.as_ref().map(|w| w.path.to),
            counters: q.counters,
        };
        self.qps.iter().filter(|(_, q)| q.vnic == id).map(|(_, q)| name(q)).collect()
    }

    /// GID table of a vRNIC.
    pub fn gids(&self, id: VnicId) -> &[Gid] {
        self.vnics.get(id.0).map_or(&[], |v| &v.gids)
    }

    /// Adds a frontend of `vnic`.
    pub fn add_session(&mut self, vnic: VnicId) -> Option<SessionId> {
        self.vnics.get(vnic.0)?;
        let s = Session {
            vnic,
            names: Names::new(&mut self.random.numbers),
            bell: None,
            slots: Vec::new(),
            free_slots: Vec::new(),
            parked: true,
            rung: false,
            last_rung_ns: 0,
            away: 0,
            memory: None,
            stage: None,
        };
        let id = self.sessions.insert(s).map(SessionId)?;
        self.count_used(id, |u| u.sessions += 1);
        Some(id)
    }

    /// Frees everything that a session had. Peers of its QPs get no answers any more.
    pub fn remove_session(&mut self, id: SessionId) {
        self.cm_forget_session(id);
        // The QPs first, since they use the others.
        let Some(names) = self.names(id).map(std::mem::take) else { return };
        for h in names.qps {
            while self.leave_qp(h, id) {}
        }
        for h in names.srqs.into_values() {
            self.remove_srq(h);
        }
        for h in names.mrs.into_values() {
            self.remove_mr(h);
        }
        for h in names.ahs.into_values() {
            self.remove_ah(id, h);
        }
        for &h in names.cqs.values() {
            self.cqs.remove(h);
        }
        for &h in names.xrcds.values() {
            self.remove_xrcd(h);
        }
        for &h in names.pds.values() {
            self.pds.remove(h);
        }
        self.count_used(id, |u| {
            u.sessions -= 1;
            u.cqs -= names.cqs.len();
            u.xrcds -= names.xrcds.len();
            u.pds -= names.pds.len();
        });
        self.active.retain(|&s| s != id);
        self.active_changes += 1;
        self.outputs.retain(|o| o.session() != id);
        self.jobs.forget(id);
        self.sessions.remove(id.0);
    }

    /// A session kicked its wake virtqueue: poll it from now on.
    pub fn unpark(&mut self, id: SessionId, now: u64) {
        if let Some(s) = self.sessions.get_mut(id.0) {
            s.last_rung_ns = now;
            if s.parked
                && let Some(bell) = &s.bell
            {
                bell.unpark();
                s.parked = false;
                self.active.push(id);
                self.active_changes += 1;
            }
        }
    }

    /// Lets sessions that have not rung for `idle_ns` sleep. Their next doorbell kicks.
    pub fn park_idle(&mut self, now: u64, idle_ns: u64) {
        let sessions = &mut self.sessions;
        let before = self.active.len();
        self.active.retain(|&h| {
            let Some(s) = sessions.get_mut(h.0) else { return false };
            if now.saturating_sub(s.last_rung_ns) < idle_ns {
                return true;
            }
            s.parked = s.bell.as_ref().is_none_or(|b| b.park());
            !s.parked
        });
        self.active_changes += u64::from(before != self.active.len());
    }

    /// Changes whenever [`Rnic::active_bells`] would.
    pub fn active_changes(&self) -> u64 {
        self.active_changes
    }

    /// The doorbells that [`Rnic::poll`] looks at. Whoever holds copies may look at them without the
    /// RNIC, and need not call [`Rnic::poll`] while none has rung and nothing else is due.
    pub fn active_bells(&self) -> Vec<Bell> {
        let session = |s: &SessionId| self.sessions.get(s.0)?.bell.clone();
        self.active.iter().filter_map(session).collect()
    }

    /// True if QPs have work that [`Rnic::poll`] has not come to yet, or packets wait for the port.
    pub fn has_runnable(&self) -> bool {
        self.sched.has_ready() || self.jobs.has_any() || !self.tx_waiting.is_empty() || !self.tx.packets().is_empty()
    }

    /// True if a vRNIC has a turn to come.
    pub fn has_turns(&self) -> bool {
        self.sched.has_ready()
    }

    /// True while some session is polled or some QP has work.
    pub fn is_busy(&self) -> bool {
        !self.active.is_empty() || self.has_runnable()
    }

    /// When [`Rnic::poll`] must be called again even if nothing rings; `None` for never.
    pub fn next_timeout(&self) -> Option<u64> {
        [self.sched.next_timeout(), self.cm.next_timeout()].into_iter().flatten().min()
    }

    /// Moves all outputs to the end of `out`.
    pub fn drain_outputs(&mut self, out: &mut Vec<Output>) {
        out.extend(self.outputs.drain(..));
    }

    /// Looks at the doorbells and timers, and gives turns for a bounded time; true if there was anything to do. `clock` tells
    /// the time, nanoseconds, which is `began` now, and what is done is measured by it.
    pub fn poll_by(&mut self, began: u64, clock: impl Fn() -> u64) -> bool {
        self.now = began;
        let mut found = self.look_at_bells() | self.wake_soon() | self.poll_cm();
        if !self.tx.is_full() {
            self.wake_tx_waiting();
        }
        let mut spent = 0;
        while spent < ROUND_NS {
            if self.jobs.is_full() {
                break;
            }
            let Some(id) = self.sched.begin_turn(self.now) else { break };
            found = true;
            let estimate = self.turn(id);
            let now = clock().max(self.now);
            // A clock that stands still is that of a simulation.
            let took = if now == began { estimate } else { now - self.now };
            self.now = now;
            spent += took;
            self.sched.end_turn(id, now, took);
        }
        found
    }

    /// As [`Rnic::poll_by`], at a moment: what is done takes no time.
    pub fn poll(&mut self, now: u64) -> bool {
        self.poll_by(now, || now)
    }

    /// Finds the sessions whose doorbells have rung; true if there are any.
    fn look_at_bells(&mut self) -> bool {
        let mut found = false;
        for &id in &self.active {
            if let Some(s) = self.sessions.get_mut(id.0)
                && !s.rung
                && s.bell.as_ref().is_some_and(Bell::has_rung)
            {
                s.rung = true;
                s.last_rung_ns = self.now;
                self.sched.ring(s.vnic, id);
                found = true;
            }
        }
        found
    }

    /// A vRNIC's turn: a doorbell page, timers, and QPs. Returns what it takes, roughly, nanoseconds.
    fn turn(&mut self, id: VnicId) -> u64 {
        let mut ns = STEP_NS;
        if let Some(s) = self.sched.next_rung(id) {
            self.sessions.get_mut(s.0).into_iter().for_each(|s| s.rung = false);
            self.take_bell(s);
        }
        while ns < TURN_NS / 2
            && let Some(due) = self.sched.next_due(id, self.now)
        {
            self.on_due(due);
            ns += STEP_NS;
        }
        while ns < TURN_NS
            && let Some(qp) = self.sched.next_qp(id)
        {
            if let Some(q) = self.qps.get_mut(qp) {
                q.queued = false;
                let (took, again) = self.step(qp, TURN_NS - ns);
                if again {
                    self.make_runnable(qp);
                }
                ns += took;
            }
            ns += OP_NS;
        }
        ns
    }

    /// Takes what a session's doorbell page says.
    fn take_bell(&mut self, id: SessionId) {
        let Some(s) = self.sessions.get_mut(id.0) else { return };
        let Some(bell) = &s.bell else { return };
        let (slots, qps, sched) = (&s.slots, &mut self.qps, &mut self.sched);
        bell.take(slots.len() as u32, |slot| {
            // A bit of a slot that has no QP is the driver's mistake and costs nothing.
            if let Some(&Some(qp)) = slots.get(slot as usize) {
                enqueue(qps, sched, qp);
            }
        });
        let away = bell.away();
        if away != s.away {
            s.away = away;
            for &mr in s.names.mrs.values() {
                self.mrs.get_mut(mr).into_iter().for_each(|m| m.away = away != 0);
            }
            if away == 0 || !self.jobs.fence(id, Waiter::Away(away)) {
                bell.confirm_away(away);
            }
        }
    }

    /// True if a session has posted sends that the RNIC has not come to yet, and that DESTROY_QP of `qpn`, or DESTROY_AH
    /// (`None`), would take away. [`Rnic::poll_by`] executes them, a bounded part at a time.
    ///
    /// A program may destroy a UD QP and its AHs as soon as it has posted its last datagrams. A hardware RNIC has sent them
    /// by the time it gets such a command; pollers that share their core with other programs may not have had a turn.
    /// This is about unreliable QPs only: on a reliable one, only a completion says that a message has left.
    pub fn is_behind(&mut self, now: u64, id: SessionId, qpn: Option<u32>) -> bool {
        let Some(session) = self.sessions.get(id.0) else { return false };
        let vnic = session.vnic;
        if session.bell.as_ref().is_some_and(Bell::has_rung) {
            self.now = now;
            // If the session is parked, its kick is on the way.
            self.unpark(id, now);
            self.take_bell(id);
        }
        let concerned = |h: &Handle<Qp>| {
            self.qps.get(*h).is_some_and(|q| {
                q.owner == id && !q.typ.is_reliable() && qpn.map_or(q.typ == QpType::Ud, |qpn| q.qpn == qpn)
            })
        };
        self.sched.waiting(vnic).any(concerned) || self.tx_waiting.iter().any(concerned)
    }

    /// A timer has fired.
    fn on_due(&mut self, due: Due) {
        match due {
            Due::Wait(qp, timer) => {
                if self.qps.get(qp).is_some_and(|q| q.timer == timer) {
                    self.on_timer(qp);
                }
            }
            Due::Pace(qp) => self.end_pace(qp),
            Due::Events(cq) => self.events_due(cq),
        }
    }

    /// QPs whose time of `soon` has come get their turns.
    fn wake_soon(&mut self) -> bool {
        let woken = (0..MAX_WOKEN).map_while(|_| {
            let qp = self.sched.next_soon(self.now)?;
            self.make_runnable(qp);
            Some(())
        });
        woken.count() > 0
    }

    /// Gives a QP its place in its vRNIC's agenda.
    pub(crate) fn make_runnable(&mut self, qp: Handle<Qp>) {
        enqueue(&mut self.qps, &mut self.sched, qp);
    }

    pub(crate) fn arm_timer(&mut self, qp: Handle<Qp>, delay_ns: u64) {
        let at = self.now.saturating_add(delay_ns);
        let Some(q) = self.qps.get_mut(qp) else { return };
        q.timer = q.timer.wrapping_add(1);
        let (vnic, due) = (q.vnic, Due::Wait(qp, q.timer));
        let (qps, limit) = (&self.qps, 2 * self.qpns.len());
        let stopped = |due: &Due| match *due {
            Due::Wait(qp, timer) => qps.get(qp).is_none_or(|q| q.timer != timer),
            Due::Pace(_) | Due::Events(_) => false,
        };
        self.sched.arm(vnic, at, due, limit, stopped);
    }

    pub(crate) fn push_output(&mut self, o: Output) {
        self.outputs.push_back(o);
    }

    pub(crate) fn emit(&mut self, session: SessionId, kind: AsyncEvent, handle: u32) {
        self.outputs.push_back(Output::Async { session, kind, handle });
        let shared = kind.is_of_qp().then(|| self.qpns.get(&handle).and_then(|&h| self.qps.get(h))).flatten();
        for &(session, _) in shared.iter().flat_map(|q| &q.openers) {
            self.outputs.push_back(Output::Async { session, kind, handle });
        }
    }

    /// Writes a completion of an object that session `whose` owns: only a CQ of the same session gets it. A CQ that overruns dies
    /// with its QPs (R84b).
    pub(crate) fn complete(&mut self, cq: Handle<Cq>, whose: SessionId, mut cqe: abi::Cqe, solicited: bool) {
        cqe.timestamp = self.now;
        cqe.port_num = 1;
        let taken = self.cqs.get_mut(cq).filter(|c| c.owner == whose && !c.dead);
        let alive = taken.is_some();
        let written = taken.is_some_and(|c| c.ring.push(cqe).is_ok());
        if !written && cqe.staged != 0 {
            self.give_stage_back(whose, cqe.staged);
        }
        if alive && !written {
            self.overrun(cq);
        }
        if !written {
            return;
        }
        let Some(c) = self.cqs.get_mut(cq) else { return };
        if c.comp_queue.is_none() {
            return;
        }
        let solicited = solicited || cqe.status != 0;
        if c.moderation.is_none() || self.moderated(cq, solicited) {
            self.notify(cq, solicited);
        }
    }

    /// A completion found no room: the CQ is lost, and the QPs that use it.
    fn overrun(&mut self, cq: Handle<Cq>) {
        let Some(c) = self.cqs.get_mut(cq) else { return };
        c.dead = true;
        let (owner, number) = (c.owner, c.number);
        self.emit(owner, AsyncEvent::CqErr, number);
        let qps = self.sessions.get(owner.0).map(|s| s.names.qps.clone()).unwrap_or_default();
        for h in qps {
            if self.qps.get(h).is_some_and(|q| q.send_cq == cq || q.recv_cq == cq) {
                self.fail_qp(h, Some(AsyncEvent::QpFatal));
            }
        }
    }

    /// Raises the completion event that the program has asked for, if it has.
    fn notify(&mut self, cqn: Handle<Cq>, solicited: bool) {
        let Some(cq) = self.cqs.get_mut(cqn) else { return };
        let Some(queue) = cq.comp_queue else { return };
        let (owner, number) = (cq.owner, cq.number);
        let asked = cq.notify;
        let by_command = asked & abi::NOTIFY_NEXT != 0 || asked & abi::NOTIFY_SOLICITED != 0 && solicited;
        if by_command {
            cq.notify = 0;
        }
        if cq.ring.take_event(solicited) || by_command {
            self.outputs.push_back(Output::Completion { session: owner, queue, cqn: number });
        }
    }

    /// A completion came to a CQ with moderation: true if its event is due. The first that waits sets the time.
    fn moderated(&mut self, cqn: Handle<Cq>, solicited: bool) -> bool {
        let now = self.now;
        let Some(cq) = self.cqs.get_mut(cqn) else { return false };
        let asked = cq.notify | cq.ring.armed();
        let Some(m) = &mut cq.moderation else { return true };
        if asked & abi::NOTIFY_NEXT == 0 && !(solicited && asked != 0) {
            return false;
        }
        m.solicited |= solicited;
        m.waiting += 1;
        if m.waiting >= m.count {
            (m.waiting, m.solicited) = (0, false);
            return true;
        }
        if m.waiting == 1 {
            m.due = now + m.period_ns;
            if !std::mem::replace(&mut m.timed, true) {
                let due = m.due;
                self.arm_events(cqn, due);
            }
        }
        false
    }

    fn arm_events(&mut self, cqn: Handle<Cq>, at: u64) {
        if let Some(s) = self.cqs.get(cqn).and_then(|c| self.sessions.get(c.owner.0)) {
            self.sched.arm(s.vnic, at, Due::Events(cqn), usize::MAX, |_| false);
        }
    }

    /// Reports the completions of a CQ that have waited long enough.
    fn events_due(&mut self, cqn: Handle<Cq>) {
        let now = self.now;
        let Some(m) = self.cqs.get_mut(cqn).and_then(|c| c.moderation.as_mut()) else { return };
        m.timed = m.waiting > 0 && m.due > now;
        if m.timed {
            let due = m.due;
            self.arm_events(cqn, due);
        } else {
            self.end_moderation(cqn);
        }
    }

    /// Reports what waits for an event of a CQ.
    pub(crate) fn end_moderation(&mut self, cqn: Handle<Cq>) {
        let Some(m) = self.cqs.get_mut(cqn).and_then(|c| c.moderation.as_mut()) else { return };
        let (waiting, solicited) = (std::mem::take(&mut m.waiting), std::mem::take(&mut m.solicited));
        if waiting > 0 {
            self.notify(cqn, solicited);
        }
    }

    /// Moves a QP to ERR; its work is flushed in its turn.
    pub(crate) fn fail_qp(&mut self, h: Handle<Qp>, event: Option<AsyncEvent>) {
        self.acknowledge_all(h);
        let Some(q) = self.qps.get_mut(h) else { return };
        let (owner, qpn) = (q.owner, q.qpn);
        let was = std::mem::replace(&mut q.state, QpState::Err);
        if !matches!(q.wait, Wait::Job(_)) {
            q.wait = Wait::No;
        }
        q.timer = q.timer.wrapping_add(1);
        q.backlog = Backlog::default();
        if let Some(w) = &mut q.wire {
            w.clear();
        }
        if was != QpState::Err {
            q.rings.set_rq_notify(true);
            let shares = q.srq.is_some() && q.typ != QpType::XrcRecv;
            if let Some(kind) = event {
                self.emit(owner, kind, qpn);
            }
            if shares {
                self.emit(owner, AsyncEvent::QpLastWqeReached, qpn);
            }
        }
        self.make_runnable(h);
    }

    /// A request of a QP failed: a reliable QP goes to ERR, any other to SQE, where it still receives (IBTA vol. 1,
    /// 10.3.1.6).
    pub(crate) fn fail_requester(&mut self, h: Handle<Qp>) {
        let Some(q) = self.qps.get_mut(h) else { return };
        if q.typ.is_reliable() || !matches!(q.state, QpState::Rts | QpState::Sqd) {
            return self.fail_qp(h, None);
        }
        q.state = QpState::Sqe;
        self.make_runnable(h);
    }
}

fn enqueue(qps: &mut Slab<Qp>, sched: &mut Scheduler, qp: Handle<Qp>) {
    if let Some(q) = qps.get_mut(qp)
        && !std::mem::replace(&mut q.queued, true)
    {
        sched.enqueue(q.vnic, qp);
    }
}
