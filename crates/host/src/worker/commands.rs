//! Control queues: when the control thread looks at them, by a kick or without one, and for whose commands it waits.

use unirdma_abi as abi;

use super::{Lingering, Session, Worker, channels};
use crate::engine::Engine;

/// How long the control queue of a session is looked at after its last command, nanoseconds. Programs send commands in
/// quick succession, and one that is found by a look costs neither side a wake-up.
const LINGER_NS: u64 = 50_000;
/// What a look that finds nothing costs others on this core, roughly, nanoseconds: two changes of threads.
const LOOK_NS: u64 = 1_500;
/// Only a command that follows another one of its session within this time is taken for one of several, nanoseconds.
const QUICK_NS: u64 = 200_000;
/// If a look comes so long after the one before, somebody computes on this core, nanoseconds.
const CROWD_NS: u64 = 100_000;
/// Then there are no looks for this long, nanoseconds: who sleeps and is woken has its core sooner than who waits in turn.
/// Twice as long each time that this is found again right afterwards, up to the maximum.
const CROWDED_NS: u64 = 500_000_000;
const CROWDED_MAX_NS: u64 = 16_000_000_000;
/// Rounds of looks, and nanoseconds of serving, between two looks at everything else.
const LINGER_ROUNDS: u32 = 16;
const LINGER_TURN_NS: u64 = 100_000;

impl Worker {
    pub(super) fn on_kick(&mut self, id: u64, vring: usize) {
        if [abi::VQ_CONTROL as usize, channels::CONTROL].contains(&vring) {
            if let Some(kick) = self.sessions.get(&id).and_then(|s| s.conn.kicks.get(&channels::CONTROL)) {
                drop(unirdma_device::take_notifications(&kick.fd));
            }
            if !self.serve(id) {
                self.idle_kicks.note(self.engine.now());
            }
        } else if self.sessions.get(&id).is_some_and(|s| s.conn.device.events().on_kick(vring as u32)) {
            self.serve(id);
        }
    }

    /// Serves the sessions whose command was held back until jobs had ended, or that the pollers leave something to.
    pub(super) fn on_released(&mut self) {
        for released in self.engine.released() {
            let session = self.sessions.iter().find(|(_, s)| s.conn.device.session() == released).map(|(&id, _)| id);
            if let Some(id) = session {
                self.serve(id);
            }
        }
    }

    /// Executes commands of a session, and looks for more for a while if there were some just before. False if there were none: then
    /// nothing was done that others would have to hear of, and the RNIC is not asked.
    pub(super) fn serve(&mut self, session: u64) -> bool {
        let Some(s) = self.sessions.get_mut(&session) else { return false };
        let now = self.engine.now();
        if let Some(from_ns) = s.commands_wait(&self.engine, now) {
            self.look_at(session, from_ns, from_ns);
            return false;
        }
        if !s.conn.device.serve_control() {
            return false;
        }
        let quick = now - s.served_ns < QUICK_NS && now >= self.crowded_until_ns;
        s.served_ns = now;
        s.pays_since(&self.engine, now);
        // What has come since the driver was told not to kick is served by the look that ends the lingering.
        if quick || !s.conn.device.listen() {
            self.look_at(session, now, if quick { now + LINGER_NS } else { now });
        }
        self.ask_for_qpns();
        self.engine.after_command();
        true
    }

    /// The control queue of a session is looked at without a kick, unless it is already.
    fn look_at(&mut self, session: u64, from_ns: u64, until_ns: u64) {
        if let Some(s) = self.sessions.get_mut(&session)
            && !std::mem::replace(&mut s.lingers, true)
        {
            self.lingering.push(Lingering { session, from_ns, until_ns });
        }
    }

    /// How long it is until control queues are to be looked at without a kick, nanoseconds.
    pub(super) fn until_next_look(&self, now: u64) -> Option<u64> {
        self.lingering.iter().map(|l| l.from_ns.saturating_sub(now)).min()
    }

    /// Looks at the control queues of sessions that sent a command just now, each in its turn.
    pub(super) fn linger(&mut self) {
        let began = self.engine.now();
        let mut last = None;
        for _ in 0..LINGER_ROUNDS {
            let now = self.engine.now();
            if self.until_next_look(now) != Some(0) || now - began > LINGER_TURN_NS {
                return;
            }
            if let Some(last) = last.filter(|last| now - last > CROWD_NS)
                && last >= self.crowded_until_ns
            {
                let again = last - self.crowded_until_ns < CROWDED_NS;
                self.crowded_ns = if again { (self.crowded_ns * 2).min(CROWDED_MAX_NS) } else { CROWDED_NS };
                self.crowded_until_ns = now + self.crowded_ns;
            }
            let crowded = now < self.crowded_until_ns;
            let (sessions, engine) = (&mut self.sessions, &self.engine);
            let mut served = false;
            self.lingering.retain_mut(|l| {
                let Some(s) = sessions.get_mut(&l.session) else { return false };
                if l.from_ns > now {
                    return true;
                }
                if let Some(from_ns) = s.commands_wait(engine, now) {
                    l.from_ns = from_ns;
                    return true;
                }
                // At the end, what came between the last look and the driver's news that it must kick again is served.
                // A queue that then has nothing to serve is broken, and is left alone until its next kick.
                let ends = crowded || now >= l.until_ns;
                let began = engine.now();
                let found =
                    s.conn.device.serve_control() || ends && !s.conn.device.listen() && s.conn.device.serve_control();
                served |= found;
                if found {
                    (s.served_ns, l.until_ns) = (now, now + LINGER_NS);
                    s.pays_since(engine, began);
                } else {
                    s.allowance.charge(now, LOOK_NS);
                }
                s.lingers = found || !ends;
                s.lingers
            });
            last = (!served).then_some(now);
            if served {
                self.engine.after_command();
            } else {
                self.engine.pause();
            }
        }
    }
}

impl Session {
    /// Until when its commands have to wait. In the RFC mode work requests come the same way, which the RNIC's own shares are for.
    fn commands_wait(&self, engine: &Engine, now: u64) -> Option<u64> {
        if self.conn.device.is_rfc() { None } else { self.waits_until(engine, now) }
    }
}
