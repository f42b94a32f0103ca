//! Sessions of programs and guests: accepting them, their messages, and their end.

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::Arc;

use rustix::event::epoll;
use rustix::net::SocketFlags;
use unirdma_abi as abi;
use unirdma_device::Device;
use unirdma_link::{Backend, BlockingFd, Ledger, Memory, Progress, Refusal, Resource};
use unirdma_rnic::SessionId;

use super::{
    BURST, Conn, Kick, Mode, OF_POLLERS, PAUSE_NS, Paused, RefusedHandler, RefusedSession, Session, Source, Worker,
    channels,
};

/// Most programs of one vRNIC that read its configuration while it is at its session limit. A new one replaces the
/// oldest.
const MAX_LOOKERS: usize = 64;

impl Worker {
    pub(super) fn on_listener(&mut self, name: &str, mode: Mode) {
        let Some(v) = self.vrnics.get_mut(name) else { return };
        let began = self.engine.now();
        if let Some(until_ns) = v.accepts_from(&self.engine, began) {
            let (token, listener) = v.listener(mode);
            let _ = epoll::delete(&self.epoll, listener);
            self.sources.remove(token);
            return self.paused.push(Paused::Listener(until_ns, name.into(), mode));
        }
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let Ok(sock) = rustix::net::accept_with(&v.listener(mode).1, flags) else { return };
        // The program may have sent descriptors already, which are closed together with the socket.
        let Some(ticket) = v.ledger.take(Resource::Descriptors, 1) else {
            return drop(BlockingFd::refused(sock, &v.ledger));
        };
        let sock = BlockingFd::new(sock, ticket);
        // Urgent data is received in line. Otherwise the kernel would drop urgent bytes and their descriptors, in the
        // receiving thread.
        if rustix::net::sockopt::set_socket_oobinline(&sock, true).is_err() {
            return;
        }
        if v.sessions >= v.limits.max_sessions as usize {
            // Logged once, not for each program that tries.
            if !std::mem::replace(&mut v.full, true) {
                let max = v.limits.max_sessions;
                tracing::warn!(vrnic = name, max, "too many programs; further ones get EUSERS (--max-sessions)");
            }
            let (handler, ledger) = (RefusedHandler(v.identity.clone(), mode), v.ledger.clone());
            return self.add_looker(name, sock, handler, ledger);
        }
        let (rnic, engine) = (self.engine.rnic.clone(), self.engine.clone());
        let (identity, ledger, allowance) = (v.identity.clone(), v.ledger.clone(), v.allowance.clone());
        let device = match mode {
            Mode::Native => Device::new(rnic, identity, engine, ledger.clone()),
            Mode::Rfc => Device::new_rfc(rnic, identity, engine, ledger.clone()),
        };
        let Some(device) = device else { return };
        let Some(ticket) = ledger.take(Resource::Descriptors, 1) else { return };
        let id = self.next_token;
        // The process may be gone while another one still holds its socket.
        let pidfd = rustix::net::sockopt::socket_peercred(&sock)
            .ok()
            .and_then(|c| rustix::process::pidfd_open(c.pid, rustix::process::PidfdFlags::empty()).ok());
        let mut tokens = Vec::new();
        let Ok(token) = self.watch(sock.as_fd(), Source::Socket(id), false) else { return };
        tokens.push(token);
        if let Some(p) = &pidfd
            && let Ok(token) = self.watch(p.as_fd(), Source::Exit(id), false)
        {
            tokens.push(token);
        }
        // The session is counted from here on, where nothing can fail any more.
        if let Some(v) = self.vrnics.get_mut(name) {
            v.sessions += 1;
        }
        self.engine.delivery().add_session(device.session(), device.events());
        let backend = Backend::new(sock, abi::NUM_QUEUES as usize, ledger.clone());
        let epoll = self.epoll.clone();
        let conn = Conn { id, device, kicks: HashMap::new(), changed: HashMap::new(), epoll, ledger };
        let session = Session {
            vrnic: name.into(),
            backend,
            conn,
            _pidfd: pidfd,
            tokens,
            commands_pause: false,
            allowance,
            _ticket: ticket,
        };
        session.pays_since(&self.engine, began);
        self.sessions.insert(id, session);
    }

    fn add_looker(&mut self, name: &str, sock: BlockingFd, handler: RefusedHandler, ledger: Ledger) {
        let mut others = self.lookers.iter().filter(|(_, l)| l.vrnic == name).map(|(&id, _)| id);
        if let (Some(oldest), true) = (others.next(), others.count() + 1 >= MAX_LOOKERS) {
            self.end_look(oldest);
        }
        let id = self.next_token;
        let Ok(token) = self.watch(sock.as_fd(), Source::Socket(id), false) else { return };
        let backend = Backend::look_only(sock, ledger, Refusal::TooManyUsers);
        self.lookers.insert(id, RefusedSession { vrnic: name.into(), backend, handler, token });
    }

    pub(super) fn end_look(&mut self, id: u64) {
        self.note_half(id, false);
        if let Some(l) = self.lookers.remove(&id) {
            self.sources.remove(&l.token);
            let _ = epoll::delete(&self.epoll, l.backend.socket());
        }
    }

    /// Ends the pauses that are over.
    pub(super) fn resume(&mut self) {
        if self.paused.is_empty() {
            return;
        }
        let now = self.engine.now();
        let (over, paused) = std::mem::take(&mut self.paused).into_iter().partition(|p| p.until_ns() <= now);
        self.paused = paused;
        for p in over {
            match p {
                Paused::Listener(_, name, mode) => self.resume_listener(name, mode, now),
                Paused::Session(_, id) => self.resume_session(id),
                Paused::Commands(_, id) => self.resume_commands(id),
            }
        }
    }

    /// Accepts programs again, if the vRNIC allows it.
    fn resume_listener(&mut self, name: String, mode: Mode, now: u64) {
        let Some(v) = self.vrnics.get_mut(&name) else { return };
        if let Some(until_ns) = v.accepts_from(&self.engine, now) {
            return self.paused.push(Paused::Listener(until_ns, name, mode));
        }
        let token = self.next_token;
        let listener = v.listener(mode);
        let added = epoll::add(&self.epoll, &listener.1, epoll::EventData::new_u64(token), epoll::EventFlags::IN);
        if added.is_err() {
            return self.paused.push(Paused::Listener(now + PAUSE_NS, name, mode));
        }
        listener.0 = token;
        self.next_token += 1;
        self.sources.insert(token, Source::Listener(name, mode));
    }

    /// Takes messages of a session again.
    fn resume_session(&mut self, id: u64) {
        let Some(s) = self.sessions.get(&id) else { return };
        let Some(&token) = s.tokens.first() else { return };
        let data = epoll::EventData::new_u64(token);
        if epoll::add(&self.epoll, s.backend.socket(), data, epoll::EventFlags::IN).is_err() {
            self.close(id);
            self.engine.after_command();
        }
    }

    pub(super) fn on_socket(&mut self, id: u64) {
        if let Some(l) = self.lookers.get_mut(&id) {
            let open = matches!(l.backend.on_readable(&mut l.handler, BURST), Ok(Progress::Open));
            let half = l.backend.is_half();
            self.note_half(id, open && half);
            if !open {
                self.end_look(id);
            }
            return;
        }
        if self.on_machine_socket(id) {
            return;
        }
        let Some(s) = self.sessions.get_mut(&id) else { return };
        let began = self.engine.now();
        if let Some(until_ns) = s.waits_until(&self.engine, began) {
            let _ = epoll::delete(&self.epoll, s.backend.socket());
            return self.paused.push(Paused::Session(until_ns, id));
        }
        let before = s.conn.device.session();
        let result = s.backend.on_readable(&mut s.conn, BURST);
        let after = s.conn.device.session();
        if before != after {
            self.engine.delivery().remove_session(before);
            self.engine.delivery().add_session(after, s.conn.device.events());
        }
        let (changed, half) = (std::mem::take(&mut s.conn.changed), s.backend.is_half());
        let rfc = s.conn.device.is_rfc();
        s.pays_since(&self.engine, began);
        self.note_half(id, half);
        // A queue that is started may hold commands (in the RFC mode also WQEs) for which no kick will come.
        let begins = changed.contains_key(&(abi::VQ_CONTROL as usize)) || rfc && !changed.is_empty();
        for (vring, fd) in changed {
            self.set_kick(id, vring, fd);
        }
        match result {
            Ok(Progress::Open) => {}
            Ok(Progress::Closed) => self.close(id),
            Err(e) => {
                self.note(id, |left_out, vrnic| {
                    tracing::warn!(session = id, vrnic, error = %e, left_out, "vhost-user session closed");
                });
                self.close(id);
            }
        }
        self.engine.after_command();
        if begins {
            self.serve(id);
        }
    }

    fn set_kick(&mut self, id: u64, vring: usize, fd: Option<Arc<BlockingFd>>) {
        let Some(s) = self.sessions.get_mut(&id) else { return };
        let device_session = s.conn.device.session();
        let wakes = channels::wake_channel(vring).filter(|_| !s.conn.device.is_rfc());
        if let Some(old) = s.conn.kicks.remove(&vring) {
            self.unwatch_kick(device_session, vring, &old);
        }
        let Some(fd) = fd else { return };
        let token = match wakes {
            Some(channel) => self.engine.pollers().watch(device_session, channel, fd.clone()).map(|()| OF_POLLERS),
            None => self.watch(fd.as_fd(), Source::Kick(id, vring), true),
        };
        match (token, self.sessions.get_mut(&id)) {
            (Ok(token), Some(s)) => {
                s.conn.kicks.insert(vring, Kick { token, fd });
            }
            (Err(e), _) => self.note(id, |left_out, vrnic| {
                tracing::warn!(session = id, vrnic, vring, error = %e, left_out, "kick descriptor refused");
            }),
            _ => {}
        }
    }

    /// Writes a line that a session has caused to the log, unless its vRNIC has caused too many. The arguments of
    /// `line` are the number of lines left out and the vRNIC's name.
    pub(super) fn note(&self, session: u64, line: impl FnOnce(u64, &str)) {
        let Some(s) = self.sessions.get(&session) else { return };
        let limit = self.vrnics.get(&s.vrnic).map(|v| &v.identity.log);
        if let Some(left_out) = limit.and_then(|l| l.next(self.engine.now())) {
            line(left_out, &s.vrnic);
        }
    }

    /// Stops watching a kick descriptor. Closing it would not suffice, because other processes may hold the same open
    /// file.
    fn unwatch_kick(&mut self, session: SessionId, vring: usize, kick: &Kick) {
        if kick.token == OF_POLLERS {
            self.engine.pollers().unwatch(session, channels::wake_channel(vring).unwrap_or_default(), &kick.fd);
        } else {
            let _ = epoll::delete(&self.epoll, kick.fd.as_fd());
            self.sources.remove(&kick.token);
        }
    }

    /// Checks which of the pages that transfers have allocated in sparse files of a vRNIC's programs are still there.
    pub(super) fn recount(&self, vrnic: &str) {
        let sessions = self.sessions.values().filter(|s| s.vrnic == vrnic).map(|s| s.backend.memory());
        let machines = self.machines.values().filter(|m| m.is_of(vrnic)).map(|m| m.memory());
        sessions.chain(machines).for_each(Memory::recount);
    }

    /// Called when memory of a program is gone, or when a vRNIC has filled many pages of sparse files. A program whose
    /// memory is gone loses its session, as if the device had been removed.
    pub(super) fn on_broken(&mut self) {
        for (name, v) in self.vrnics.iter().filter(|(_, v)| v.ledger.wants_recount()) {
            self.recount(name);
            v.ledger.was_recounted();
        }
        self.end_broken_machines();
        let broken: Vec<u64> =
            self.sessions.iter().filter(|(_, s)| s.backend.memory().is_broken()).map(|(&id, _)| id).collect();
        for id in broken {
            let overfilled = self.sessions.get(&id).is_some_and(|s| s.backend.memory().is_overfilled());
            self.note(id, |left_out, vrnic| {
                let why = match overfilled {
                    true => {
                        "transfers have made as many pages of its sparse files as the vRNIC may have (--max-filled)"
                    }
                    false => "its file was truncated, or there is no memory left",
                };
                tracing::warn!(session = id, vrnic, why, left_out, "memory of a program is gone; its session ends");
            });
            self.close(id);
        }
        self.engine.after_command();
    }

    /// Ends a session and frees all that it had.
    pub(super) fn close(&mut self, id: u64) {
        self.note_half(id, false);
        let began = self.engine.now();
        let Some(s) = self.sessions.remove(&id) else { return };
        for t in &s.tokens {
            self.sources.remove(t);
        }
        for (&vring, kick) in &s.conn.kicks {
            self.unwatch_kick(s.conn.device.session(), vring, kick);
        }
        let _ = epoll::delete(&self.epoll, s.backend.socket());
        self.engine.delivery().remove_session(s.conn.device.session());
        if let Some(v) = self.vrnics.get_mut(&s.vrnic) {
            v.sessions -= 1;
            v.full = false;
        }
        let allowance = s.allowance.clone();
        // The session's objects and descriptors are freed here, which is control work, too.
        drop(s);
        let now = self.engine.now();
        allowance.charge(now, now.saturating_sub(began));
    }
}
