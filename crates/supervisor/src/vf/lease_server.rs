//! The thread that answers programs at the lease sockets of vRNICs (`unirdma_abi::lease`).
//!
//! It waits for no program, worker or step of the pool: sockets are non-blocking, workers are told by threads of their
//! own, and a VF that is not set up yet is looked at again when the pool has changed. Whatever a program does wrong, or
//! does not do, ends its own connection only. What its vRNIC can make this thread hold and do has bounds: connections,
//! and accepted connections in a time.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, Shutdown, SocketFlags, accept_with, recv, shutdown};
use unirdma_abi::lease::{self, Ask, Told};
use unirdma_device::lock;
use unirdma_ipc::fdpass;
use unirdma_ipc::vrnic::Way;
use unirdma_rnic::VfPath;
use unirdma_vf::{Answer, Change, LeaseId, Refusal, Ticket};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::lender::{Borrower, Lender};
use super::loans::Setup;
use super::sysfs_copy;
use super::tree::{Node, Number, Roots};

/// Time for a program to ask after it has connected.
const ASK_TIME: Duration = Duration::from_secs(10);
/// Time for a VF to be set up, and for the group's worker to learn of it.
const SETUP_TIME: Duration = Duration::from_secs(10);
/// Most connections of all vRNICs.
const MAX_CONNECTIONS: usize = 8192;
/// Connections of one vRNIC that are accepted in each [`ACCEPT_TIME`]. Each may cost a write to the log of leases, and
/// a call of a worker.
const MAX_ACCEPTED: u32 = 16;
const ACCEPT_TIME: Duration = Duration::from_millis(100);
/// Longest wait for events.
const LONG: Duration = Duration::from_secs(60);

/// Tells a vRNIC's worker on a separate thread which VF its programs have, and calls the function afterwards.
pub(crate) type Tell = Box<dyn Fn(String, Box<dyn FnOnce() + Send>) + Send>;
/// Opens a device node.
type Open = Box<dyn Fn(&Node) -> io::Result<OwnedFd> + Send>;

/// A connection, which is one context of a vRNIC.
struct Client {
    vrnic: String,
    /// The socket at which it was accepted. Another vRNIC of the same name has another one.
    listener: Arc<OwnedFd>,
    socket: OwnedFd,
    state: State,
}

/// The state of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// It has not asked yet.
    Silent { until: Instant },
    /// It waits, and was told this place.
    Waits { ticket: Ticket, place: u32 },
    /// It has a context on a VF that is being set up.
    Prepares { lease: LeaseId, until: Instant },
    /// It has a VF.
    Has { lease: LeaseId },
    /// It has the software RNIC.
    Soft,
}

/// The knowledge of a vRNIC's worker.
#[derive(Default)]
struct Knowledge {
    vf: Option<VfPath>,
    /// It is being told this.
    pending: Option<Option<VfPath>>,
}

/// Accepted connections since a time.
struct Accepted {
    since: Instant,
    count: u32,
}

pub(super) struct LeaseServer {
    lender: Arc<Lender>,
    roots: Roots,
    tell: Tell,
    open: Open,
    clients: BTreeMap<u64, Client>,
    next_client: u64,
    /// By vRNIC.
    accepted: BTreeMap<String, Accepted>,
    known: BTreeMap<String, Knowledge>,
    /// vRNICs whose workers have been told.
    told: Arc<Mutex<Vec<String>>>,
    /// vRNICs in whose directories a device is shown, and for which lease.
    shown: BTreeMap<String, LeaseId>,
}

/// Why a VF that is set up cannot be handed over.
#[derive(Debug, thiserror::Error)]
enum HandOverError {
    #[error("{0} has no device node")]
    NoNode(String),
    #[error("{0} cannot be shown to the program: {1}")]
    Copy(String, io::Error),
    #[error("{}: {error}", .node.display())]
    Open { node: PathBuf, error: io::Error },
    #[error("the descriptor cannot be sent: {0}")]
    Send(io::Error),
}

/// The cause of a refusal, as in [`VF_REFUSALS`](crate::admin::VF_REFUSALS).
#[derive(Clone, Copy)]
enum Cause {
    Dry,
    Timeout,
    Limit,
    Setup,
    Unfit,
}

impl From<&Refusal> for Cause {
    fn from(refusal: &Refusal) -> Cause {
        match refusal {
            Refusal::Dry => Cause::Dry,
            Refusal::TooManyWait(_) => Cause::Limit,
            _ => Cause::Unfit,
        }
    }
}

/// An answer that ends a connection or leaves it in a state.
enum Next {
    Stays(State),
    Ends,
}

impl LeaseServer {
    pub fn new(lender: Arc<Lender>, tell: Tell) -> LeaseServer {
        let roots = lender.pool.as_ref().map_or_else(Roots::default, |p| p.roots.clone());
        let given = lender.pool.as_ref().map(|p| p.given.clone());
        let open = move |node: &Node| match &given {
            Some(given) => given.open(node),
            None => Err(io::ErrorKind::NotFound.into()),
        };
        LeaseServer::with(lender, roots, tell, Box::new(open))
    }

    fn with(lender: Arc<Lender>, roots: Roots, tell: Tell, open: Open) -> LeaseServer {
        let mut server = LeaseServer {
            lender,
            roots,
            tell,
            open,
            clients: BTreeMap::new(),
            next_client: 0,
            accepted: BTreeMap::new(),
            known: BTreeMap::new(),
            told: Arc::default(),
            shown: BTreeMap::new(),
        };
        server.find_shown();
        server
    }

    /// The devices that the last supervisor has shown to programs that may still have them.
    fn find_shown(&mut self) {
        let vrnics: Vec<String> = lock(&self.lender.served).keys().cloned().collect();
        for vrnic in vrnics {
            match self.lender.pool.as_ref().and_then(|p| p.loan(&vrnic)) {
                Some(loan) => _ = self.shown.insert(vrnic, loan.lease),
                None => sysfs_copy::hide(&self.lender.vrnics, &vrnic),
            }
        }
    }

    pub fn run(mut self) {
        while !self.lender.is_stopping() {
            self.turn();
        }
    }

    /// Waits for events, and handles them.
    fn turn(&mut self) {
        let now = Instant::now();
        self.accepted.retain(|_, a| now < a.since + ACCEPT_TIME);
        let listeners: Vec<(String, Arc<OwnedFd>)> =
            lock(&self.lender.served).iter().map(|(name, s)| (name.clone(), s.listener.clone())).collect();
        let is_paused = |name: &String| self.accepted.get(name).is_some_and(|a| a.count >= MAX_ACCEPTED);
        let open: Vec<&(String, Arc<OwnedFd>)> = listeners.iter().filter(|(name, _)| !is_paused(name)).collect();
        let ids: Vec<u64> = self.clients.keys().copied().collect();
        let own = [Some(self.lender.wake.as_fd()), self.lender.pool.as_ref().map(|p| p.changed.as_fd())];
        let own: Vec<_> = own.into_iter().flatten().collect();
        let fds = own.iter().copied();
        let fds = fds.chain(open.iter().map(|(_, l)| l.as_fd())).chain(self.clients.values().map(|c| c.socket.as_fd()));
        let mut fds: Vec<PollFd<'_>> = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        let time = self.next_timeout(now);
        let time = Timespec { tv_sec: time.as_secs() as i64, tv_nsec: i64::from(time.subsec_nanos()) };
        let _ = poll(&mut fds, Some(&time));
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        own.iter().for_each(|fd| _ = rustix::io::read(fd, &mut [0; 8]));
        let (of_listeners, of_clients) = ready[own.len()..].split_at(open.len());
        let callers: Vec<(String, Arc<OwnedFd>)> =
            open.into_iter().zip(of_listeners).filter(|(_, ready)| **ready).map(|(l, _)| l.clone()).collect();
        let senders: Vec<u64> =
            ids.into_iter().zip(of_clients).filter(|(_, ready)| **ready).map(|(id, _)| id).collect();
        self.note_told();
        senders.into_iter().for_each(|id| self.receive(id));
        for (vrnic, listener) in callers {
            self.accept(&vrnic, &listener);
        }
        self.take_changes();
        self.look_after_clients();
        self.tell_workers();
        self.hide_unused();
    }

    /// Time until something must be looked at without an event.
    fn next_timeout(&self, now: Instant) -> Duration {
        let deadlines = self.clients.values().filter_map(|c| match c.state {
            State::Silent { until } | State::Prepares { until, .. } => Some(until),
            _ => None,
        });
        let pauses = self.accepted.values().filter(|a| a.count >= MAX_ACCEPTED).map(|a| a.since + ACCEPT_TIME);
        let next = deadlines.chain(pauses).min();
        // Not a moment too early.
        next.map_or(LONG, |t| t.saturating_duration_since(now) + Duration::from_millis(1)).min(LONG)
    }

    fn accept(&mut self, vrnic: &str, listener: &Arc<OwnedFd>) {
        let now = Instant::now();
        loop {
            let accepted = self.accepted.entry(vrnic.into()).or_insert(Accepted { since: now, count: 0 });
            if accepted.count >= MAX_ACCEPTED {
                return;
            }
            let socket = match accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(socket) => socket,
                Err(Errno::INTR | Errno::CONNABORTED) => continue,
                Err(Errno::AGAIN) => return,
                Err(e) => {
                    // No descriptors, for instance.
                    tracing::warn!(vrnic, error = %e, "no program is accepted for a lease");
                    accepted.count = MAX_ACCEPTED;
                    return;
                }
            };
            accepted.count += 1;
            let most = lock(&self.lender.served).get(vrnic).map_or(0, |s| s.borrower.max_programs);
            let count = self.clients.values().filter(|c| c.vrnic == vrnic).count();
            if count >= most as usize {
                let text = format!("{count} programs of the vRNIC have a context already; it may have {most}");
                self.send_refusal(&socket, Cause::Limit, &text);
            } else if self.clients.len() >= MAX_CONNECTIONS {
                self.send_refusal(&socket, Cause::Limit, "too many programs of this host have contexts");
            } else {
                let state = State::Silent { until: now + ASK_TIME };
                let client = Client { vrnic: vrnic.into(), listener: listener.clone(), socket, state };
                self.next_client += 1;
                self.clients.insert(self.next_client, client);
            }
        }
    }

    /// Reads what a program has sent.
    fn receive(&mut self, id: u64) {
        let Some(client) = self.clients.get(&id) else { return };
        // One byte more than a request. Descriptors that come along are dropped by the kernel.
        let mut buffer = [0; size_of::<Ask>() + 1];
        let length = match recv(&client.socket, &mut buffer, RecvFlags::TRUNC) {
            Ok((_, length)) => length,
            Err(Errno::AGAIN | Errno::INTR) => return,
            Err(_) => 0,
        };
        let ask = Ask::read_from_prefix(&buffer).ok().map(|(ask, _)| ask).filter(|_| length == size_of::<Ask>());
        match (client.state, ask) {
            (State::Silent { .. }, Some(Ask { version: lease::VERSION, .. })) => self.ask(id),
            (State::Silent { .. }, Some(Ask { version, .. })) => {
                let text = format!("the request has version {version}, and {} is known here", lease::VERSION);
                self.refuse(id, Cause::Unfit, &text);
            }
            // The end of the context, or nothing that is known.
            _ => self.end(id),
        }
    }

    /// Answers a request.
    fn ask(&mut self, id: u64) {
        let Some(client) = self.clients.get(&id) else { return };
        let vrnic = client.vrnic.clone();
        let Some(borrower) = self.borrower(client) else { return self.end(id) };
        if self.clients.values().any(|c| c.vrnic == vrnic && c.state == State::Soft) {
            return self.give_soft(id, "another program of the vRNIC has the software RNIC");
        }
        let Some(pool) = self.lender.pool.clone() else {
            return self.deny(id, &borrower, Cause::Unfit, &super::LendError::NoPool.to_string());
        };
        if let Err(e) = self.lender.check(&vrnic, &borrower) {
            return self.deny(id, &borrower, Cause::Unfit, &e.to_string());
        }
        match pool.ask(borrower.request(&vrnic)) {
            Ok(Answer::Has { lease, .. }) => self.prepare(id, lease),
            Ok(Answer::Waits { ticket, .. }) => {
                pool.count(|a| a.waits += 1);
                self.set(id, State::Waits { ticket, place: 0 });
            }
            Ok(Answer::Soft) => self.give_soft(id, "no VF is free"),
            Ok(Answer::Refused(refusal)) => self.refuse(id, Cause::from(&refusal), &refusal.to_string()),
            Err(e) => self.refuse(id, Cause::Setup, &format!("the log of leases cannot be written: {e}")),
        }
    }

    fn borrower(&self, client: &Client) -> Option<Borrower> {
        let served = lock(&self.lender.served);
        let served = served.get(&client.vrnic).filter(|s| Arc::ptr_eq(&s.listener, &client.listener))?;
        Some(served.borrower.clone())
    }

    fn set(&mut self, id: u64, state: State) {
        self.clients.get_mut(&id).into_iter().for_each(|c| c.state = state);
    }

    fn prepare(&mut self, id: u64, lease: LeaseId) {
        self.set(id, State::Prepares { lease, until: Instant::now() + SETUP_TIME });
    }

    /// Gives a program of a vRNIC that cannot have a VF the software RNIC, if that is allowed and no other one of its
    /// programs has a VF.
    fn deny(&mut self, id: u64, borrower: &Borrower, cause: Cause, why: &str) {
        let Some(client) = self.clients.get(&id) else { return };
        let others = self.clients.iter().any(|(i, c)| {
            *i != id && c.vrnic == client.vrnic && matches!(c.state, State::Has { .. } | State::Prepares { .. })
        });
        let has_vf = others || self.lender.pool.as_ref().is_some_and(|p| p.loan(&client.vrnic).is_some());
        if borrower.way == Way::Auto && !has_vf { self.give_soft(id, why) } else { self.refuse(id, cause, why) }
    }

    fn give_soft(&mut self, id: u64, why: &str) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        client.state = State::Soft;
        if let Some(pool) = &self.lender.pool {
            pool.count(|a| a.soft += 1);
        }
        if send(&client.socket, &message(lease::SOFT, why), None).is_err() {
            self.end(id);
        }
    }

    fn refuse(&mut self, id: u64, cause: Cause, why: &str) {
        if let Some(client) = self.clients.get(&id) {
            tracing::info!(vrnic = client.vrnic, why, "a program gets no VF");
            self.send_refusal(&client.socket, cause, why);
        }
        self.end(id);
    }

    fn send_refusal(&self, socket: &OwnedFd, cause: Cause, why: &str) {
        if let Some(pool) = &self.lender.pool {
            pool.count(|a| a.refusals[cause as usize] += 1);
        }
        send_last(socket, &message(lease::REFUSED, why));
    }

    /// Ends a connection and what it has.
    fn end(&mut self, id: u64) {
        let Some(client) = self.clients.remove(&id) else { return };
        let Some(pool) = &self.lender.pool else { return };
        match client.state {
            State::Waits { ticket, .. } => pool.cancel(ticket, &client.vrnic),
            State::Prepares { lease, .. } | State::Has { lease } => pool.end(lease, &client.vrnic),
            State::Silent { .. } | State::Soft => {}
        }
    }

    /// Programs that have waited get a VF, or not.
    fn take_changes(&mut self) {
        let Some(pool) = self.lender.pool.clone() else { return };
        for change in pool.take_changes() {
            let (Change::Granted { ticket, .. } | Change::TimedOut { ticket }) = change else { continue };
            let is_its = |c: &Client| matches!(c.state, State::Waits { ticket: t, .. } if t == ticket);
            let Some(id) = self.clients.iter().find(|(_, c)| is_its(c)).map(|(id, _)| *id) else { continue };
            match change {
                Change::Granted { lease, .. } => self.prepare(id, lease),
                _ => {
                    self.set(id, State::Soft);
                    self.refuse(id, Cause::Timeout, "no VF has become free in time");
                }
            }
        }
    }

    fn look_after_clients(&mut self) {
        let now = Instant::now();
        let places = self.lender.pool.as_ref().map(|p| p.places()).unwrap_or_default();
        let ids: Vec<u64> = self.clients.keys().copied().collect();
        for id in ids {
            let Some(client) = self.clients.get(&id) else { continue };
            let next = match (client.state, self.borrower(client)) {
                (State::Has { lease }, borrower) => self.keep(client, lease, borrower.is_some()),
                (_, None) => {
                    self.send_refusal(&client.socket, Cause::Unfit, "the vRNIC was removed");
                    Next::Ends
                }
                (State::Silent { until }, _) if until <= now => Next::Ends,
                (State::Waits { ticket, place }, _) => match places.get(&ticket).filter(|p| **p != place) {
                    Some(&place) => match send(&client.socket, &Told { place, ..message(lease::WAITS, "") }, None) {
                        Ok(()) => Next::Stays(State::Waits { ticket, place }),
                        Err(_) => Next::Ends,
                    },
                    None => Next::Stays(client.state),
                },
                (State::Prepares { lease, until }, Some(borrower)) => {
                    self.lend(id, lease, until <= now, &borrower);
                    continue;
                }
                (state, _) => Next::Stays(state),
            };
            match next {
                Next::Stays(state) => self.set(id, state),
                Next::Ends => self.end(id),
            }
        }
    }

    /// Whether a program that has a VF keeps it.
    fn keep(&self, client: &Client, lease: LeaseId, is_served: bool) -> Next {
        let is_live = self.lender.pool.as_ref().is_some_and(|p| p.is_live(lease));
        if is_served && is_live {
            return Next::Stays(client.state);
        }
        let why = if is_served { "the VF is gone" } else { "the vRNIC was removed" };
        if let Some(pool) = self.lender.pool.as_ref() {
            pool.count(|a| a.evicted += 1);
        }
        send_last(&client.socket, &message(lease::EVICTED, why));
        Next::Ends
    }

    /// Gives a program its VF when that is set up and the worker knows it.
    fn lend(&mut self, id: u64, lease: LeaseId, is_late: bool, borrower: &Borrower) {
        let (Some(client), Some(pool)) = (self.clients.get(&id), self.lender.pool.clone()) else { return };
        let vrnic = client.vrnic.clone();
        let why = match pool.setup(lease) {
            Setup::Failed(why) => why,
            Setup::Ready { verbs } => {
                let path = pool.loan(&vrnic).filter(|l| l.lease == lease).map(|l| l.path);
                let is_known = path.is_some() && self.known.get(&vrnic).is_some_and(|k| k.vf == path);
                match (path.filter(|_| is_known), is_late) {
                    (Some(path), _) => match self.hand_over(id, lease, path, &verbs) {
                        Ok(()) => return self.set(id, State::Has { lease }),
                        Err(e) => e.to_string(),
                    },
                    (None, false) => return,
                    (None, true) => "the worker of the group does not answer".into(),
                }
            }
            Setup::Pending(_) if !is_late => return,
            Setup::Pending(what) => format!("{what} within {} s", SETUP_TIME.as_secs()),
        };
        let is_used = |c: &Client| c.state == State::Has { lease };
        self.set(id, State::Silent { until: Instant::now() + ASK_TIME });
        pool.end(lease, &vrnic);
        if !self.clients.values().any(is_used) {
            // So that the next request does not get the same VF.
            pool.evict(lease);
        }
        self.deny(id, borrower, Cause::Setup, &why);
    }

    /// Shows the device to a program, and sends it a descriptor.
    fn hand_over(&mut self, id: u64, lease: LeaseId, path: VfPath, verbs: &str) -> Result<(), HandOverError> {
        let Some(client) = self.clients.get(&id) else { return Ok(()) };
        let node = self.roots.nodes().remove(verbs).ok_or_else(|| HandOverError::NoNode(verbs.into()))?;
        let name = node.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if self.shown.get(&client.vrnic) != Some(&lease) {
            sysfs_copy::show(&self.roots, &self.lender.vrnics, &client.vrnic, verbs, &name)
                .map_err(|e| HandOverError::Copy(verbs.into(), e))?;
            self.shown.insert(client.vrnic.clone(), lease);
        }
        // This process has the descriptor for this moment only.
        let fd = (self.open)(&node).map_err(|e| HandOverError::Open { node: node.path.clone(), error: e })?;
        let mut told = Told { gid: path.gid, rdev: rdev(node.number), ..message(lease::HAS, "") };
        put(&mut told.node, &name);
        put(&mut told.device, verbs);
        send(&client.socket, &told, Some(&fd)).map_err(HandOverError::Send)
    }

    fn note_told(&mut self) {
        for vrnic in std::mem::take(&mut *lock(&self.told)) {
            if let Some(known) = self.known.get_mut(&vrnic)
                && let Some(vf) = known.pending.take()
            {
                known.vf = vf;
            }
        }
    }

    /// Lets the workers know which vRNICs have which VFs.
    fn tell_workers(&mut self) {
        let vrnics: Vec<String> = lock(&self.lender.served).keys().cloned().collect();
        self.known.retain(|vrnic, known| known.pending.is_some() || vrnics.binary_search(vrnic).is_ok());
        let Some(pool) = self.lender.pool.clone() else { return };
        for vrnic in vrnics {
            let has = pool.loan(&vrnic).map(|l| l.path);
            let known = self.known.entry(vrnic.clone()).or_default();
            if known.pending.is_some() || known.vf == has {
                continue;
            }
            known.pending = Some(has);
            let (told, lender, name) = (self.told.clone(), self.lender.clone(), vrnic.clone());
            let done = move || {
                lock(&told).push(name);
                super::signal(&lender.wake);
            };
            (self.tell)(vrnic, Box::new(done));
        }
    }

    /// Takes away the devices of vRNICs whose programs have no VF any more.
    fn hide_unused(&mut self) {
        let Some(pool) = &self.lender.pool else { return };
        let vrnics = &self.lender.vrnics;
        self.shown.retain(|vrnic, lease| {
            let has = pool.loan(vrnic).is_some_and(|l| l.lease == *lease);
            if !has {
                sysfs_copy::hide(vrnics, vrnic);
            }
            has
        });
    }
}

fn rdev((major, minor): Number) -> u64 {
    rustix::fs::makedev(major, minor)
}

/// A message with a text, and nothing else.
fn message(kind: u32, text: &str) -> Told {
    let mut told = Told { kind, ..Told::new_zeroed() };
    put(&mut told.text, text);
    told
}

/// Puts a text, shortened if it must be, and a zero byte into a field.
fn put(field: &mut [u8], text: &str) {
    let most = (0..=text.len().min(field.len() - 1)).rev().find(|n| text.is_char_boundary(*n)).unwrap_or(0);
    field[..most].copy_from_slice(&text.as_bytes()[..most]);
}

/// Sends a message. A program that does not read its messages does not get them, which is an error.
fn send(socket: &OwnedFd, told: &Told, fd: Option<&OwnedFd>) -> io::Result<()> {
    let fds: Vec<_> = fd.iter().map(AsFd::as_fd).collect();
    fdpass::send(socket.as_fd(), told.as_bytes(), &fds).map(drop)
}

/// Sends a message before the connection is closed. The program's requests that were not read are read away first:
/// the kernel would otherwise give the program `ECONNRESET` in the place of the message.
fn send_last(socket: &OwnedFd, told: &Told) {
    let _ = send(socket, told, None);
    // Nothing can be sent to this side from now on, so the loop ends.
    let _ = shutdown(socket, Shutdown::Read);
    while recv(socket, &mut [0; size_of::<Ask>()], RecvFlags::empty()).is_ok_and(|(_, length)| length > 0) {}
}

#[cfg(test)]
mod tests;
