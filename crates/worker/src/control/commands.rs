//! Control queues: commands are executed after a kick, unless their vRNIC has used up its allowance of the control
//! thread's time.

use std::os::fd::AsFd;

use rustix::event::epoll;
use unirdma_abi as abi;

use super::{Paused, Session, Worker, channels};
use crate::engine::Engine;

/// Approximate cost of a spurious kick, ns: the control thread wakes and sleeps again.
const KICK_NS: u64 = 5_000;

/// Keys of a session's control queue: the channel of a process, and the virtqueue of a machine.
const KICKS: [usize; 2] = [channels::CONTROL, abi::VQ_CONTROL as usize];

impl Worker {
    pub(super) fn on_kick(&mut self, id: u64, vring: usize) {
        let Some(s) = self.sessions.get(&id) else { return };
        if !KICKS.contains(&vring) {
            if s.conn.device.events().on_kick(vring as u32) {
                self.serve(id);
            }
            return;
        }
        if let Some(kick) = s.conn.kicks.get(&channels::CONTROL) {
            drop(unirdma_device::take_notifications(&kick.fd));
        }
        if !self.serve(id)
            && let Some(s) = self.sessions.get(&id)
        {
            let now = self.engine.now();
            s.allowance.charge(now, KICK_NS);
            if let Some(until_ns) = s.waits_until(&self.engine, now) {
                self.pause_commands(id, until_ns);
            }
        }
    }

    /// Stops serving a session's control queue and watching its kicks until a certain time.
    fn pause_commands(&mut self, id: u64, until_ns: u64) {
        let Some(s) = self.sessions.get_mut(&id) else { return };
        if !std::mem::replace(&mut s.commands_pause, true) {
            for kick in KICKS.iter().filter_map(|k| s.conn.kicks.get(k)) {
                let _ = epoll::delete(&self.epoll, kick.fd.as_fd());
            }
            self.paused.push(Paused::Commands(until_ns, id));
        }
    }

    /// Ends the pause of [`Worker::pause_commands`].
    pub(super) fn resume_commands(&mut self, id: u64) {
        let Some(s) = self.sessions.get_mut(&id) else { return };
        s.commands_pause = false;
        for kick in KICKS.iter().filter_map(|k| s.conn.kicks.get(k)) {
            let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
            let _ = epoll::add(&self.epoll, kick.fd.as_fd(), epoll::EventData::new_u64(kick.token), flags);
        }
        // A queue that signals commands but has none is broken. It is left alone until its next kick.
        if !self.serve(id) && self.sessions.get_mut(&id).is_some_and(|s| !s.conn.device.listen()) {
            self.serve(id);
        }
    }

    /// Serves the sessions whose command was held back until jobs had ended, and those that pollers have handed over.
    pub(super) fn on_released(&mut self) {
        for released in self.engine.delivery().released() {
            let session = self.sessions.iter().find(|(_, s)| s.conn.device.session() == released).map(|(&id, _)| id);
            if let Some(id) = session {
                self.serve(id);
            }
        }
    }

    /// Executes commands of a session. False if there were none: then nothing has changed, and the RNIC was not used.
    /// Also true if commands have to wait.
    pub(super) fn serve(&mut self, session: u64) -> bool {
        let Some(s) = self.sessions.get_mut(&session) else { return false };
        let began = self.engine.now();
        if let Some(until_ns) = s.commands_wait(&self.engine, began) {
            self.pause_commands(session, until_ns);
            return true;
        }
        if !s.conn.device.serve_control() {
            return false;
        }
        s.pays_since(&self.engine, began);
        // More commands came than a turn may execute, or arrived after kicks were suppressed.
        if !s.conn.device.listen() {
            self.pause_commands(session, began);
        }
        self.ask_for_qpns();
        self.engine.after_command();
        true
    }
}

impl Session {
    /// When its commands may be executed, if they have to wait. In the RFC mode they never do, because work requests
    /// come the same way, and the RNIC's scheduler limits those.
    fn commands_wait(&self, engine: &Engine, now: u64) -> Option<u64> {
        if self.conn.device.is_rfc() { None } else { self.waits_until(engine, now) }
    }
}
