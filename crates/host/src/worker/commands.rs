//! Control queues: commands are executed when a kick says so, unless their vRNIC has had more than its part of the control thread's time.

use std::os::fd::AsFd;

use rustix::event::epoll;
use unirdma_abi as abi;

use super::{Paused, Session, Worker, channels};
use crate::engine::Engine;

/// What a kick for nothing costs, roughly, nanoseconds: the control thread is woken, and sleeps again.
const KICK_NS: u64 = 5_000;

/// The kicks of a session's control queue, by the channel of a process or by the virtqueue of a machine.
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

    /// A session's control queue is looked at after a time, and its kicks wait until then.
    fn pause_commands(&mut self, id: u64, until_ns: u64) {
        let Some(s) = self.sessions.get_mut(&id) else { return };
        if !std::mem::replace(&mut s.commands_pause, true) {
            for kick in KICKS.iter().filter_map(|k| s.conn.kicks.get(k)) {
                let _ = epoll::delete(&self.epoll, kick.fd.as_fd());
            }
            self.paused.push(Paused::Commands(until_ns, id));
        }
    }

    /// The end of such a pause.
    pub(super) fn resume_commands(&mut self, id: u64) {
        let Some(s) = self.sessions.get_mut(&id) else { return };
        s.commands_pause = false;
        for kick in KICKS.iter().filter_map(|k| s.conn.kicks.get(k)) {
            let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
            let _ = epoll::add(&self.epoll, kick.fd.as_fd(), epoll::EventData::new_u64(kick.token), flags);
        }
        // A queue that has nothing to serve although it says so is broken, and is left alone until its next kick.
        if !self.serve(id) && self.sessions.get_mut(&id).is_some_and(|s| !s.conn.device.listen()) {
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

    /// Executes commands of a session. False if there were none: then nothing was done that others would have to hear of, and the RNIC is
    /// not asked. True also if they have to wait.
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
        // More have come than a turn has room for, or since the driver was told that it need not kick.
        if !s.conn.device.listen() {
            self.pause_commands(session, began);
        }
        self.ask_for_qpns();
        self.engine.after_command();
        true
    }
}

impl Session {
    /// Until when its commands have to wait. In the RFC mode work requests come the same way, which the RNIC's own shares are for.
    fn commands_wait(&self, engine: &Engine, now: u64) -> Option<u64> {
        if self.conn.device.is_rfc() { None } else { self.waits_until(engine, now) }
    }
}
