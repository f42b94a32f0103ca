//! Descriptors that programs can make slow to close, and the threads that close them.
//!
//! `close(2)` may wait for the peer of a socket that lingers, for the server of a FUSE file, or for the holder of a
//! lock of a pipe or an epoll set. It may also close others: descriptors in unread messages of a socket. So descriptors
//! that a program has sent, and sockets that it writes to, are [`BlockingFd`]: a thread of the [`Closer`] closes them.
//! Only memory files are closed at once.
//!
//! The descriptors of one vRNIC are closed one after the other, so a vRNIC delays only itself. A descriptor stays on
//! the account of its vRNIC until it is closed.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::accounts::{Ledger, Resource, Ticket};

/// Most threads, and so most vRNICs whose descriptors are being closed at one time.
const MAX_THREADS: usize = 32;
/// A thread ends after this time without work.
const IDLE: Duration = Duration::from_secs(1);

/// A descriptor that may be slow to close, on an account. When it is dropped, the account's [`Closer`] closes it, if
/// there is one.
#[derive(Debug)]
pub struct BlockingFd(Option<Held>);

#[derive(Debug)]
struct Held {
    // Declared first, so that it is closed before the account is relieved.
    fd: OwnedFd,
    ticket: Ticket,
}

impl BlockingFd {
    /// A descriptor with its ticket.
    pub fn new(fd: OwnedFd, ticket: Ticket) -> Self {
        BlockingFd(Some(Held { fd, ticket }))
    }

    /// A descriptor that exists already, charged whether the account has room or not. It has to be dropped soon.
    pub fn refused(fd: OwnedFd, ledger: &Ledger) -> Self {
        BlockingFd::new(fd, ledger.charge(Resource::Descriptors, 1))
    }

    pub(crate) fn is_beyond(&self) -> bool {
        self.0.as_ref().is_some_and(|h| h.ticket.is_beyond())
    }

    /// The account of the descriptor.
    pub fn ledger(&self) -> Option<&Ledger> {
        self.0.as_ref().map(|h| h.ticket.ledger())
    }

    /// The descriptor and its ticket, for callers who know that closing it does not wait.
    pub(crate) fn into_parts(mut self) -> Option<(OwnedFd, Ticket)> {
        self.0.take().map(|h| (h.fd, h.ticket))
    }
}

impl AsFd for BlockingFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.0 {
            Some(held) => held.fd.as_fd(),
            None => unreachable!("it is taken by who consumes it only"),
        }
    }
}

impl Drop for BlockingFd {
    fn drop(&mut self) {
        if let Some(held) = self.0.take()
            && let Some(closer) = held.ticket.closer()
            && !unirdma_mem::is_memory(held.fd.as_fd())
        {
            closer.clone().close(held);
        }
    }
}

/// Closes descriptors of several accounts. Clones share the threads.
#[derive(Clone, Debug)]
pub struct Closer(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    work: Condvar,
    /// Called by each thread at its start.
    begin: fn(),
}

#[derive(Debug, Default)]
struct State {
    /// Descriptors to be closed, by account. An account is present while one of its descriptors waits or is being
    /// closed.
    lanes: HashMap<usize, VecDeque<Held>>,
    /// Accounts that have waiting descriptors, none of which is being closed.
    ready: VecDeque<usize>,
    threads: usize,
    /// Threads without work, including those that were just started.
    idle: usize,
}

impl Closer {
    /// Threads are started on demand, by the thread that drops a descriptor.
    pub fn new(begin: fn()) -> Self {
        Closer(Arc::new(Shared { state: Mutex::default(), work: Condvar::new(), begin }))
    }

    fn close(&self, held: Held) {
        let mut state = self.0.state.lock().unwrap_or_else(PoisonError::into_inner);
        let account = held.ticket.account();
        match state.lanes.get_mut(&account) {
            Some(lane) => lane.push_back(held),
            None => {
                state.lanes.insert(account, VecDeque::from([held]));
                state.ready.push_back(account);
            }
        }
        if state.ready.len() <= state.idle {
            self.0.work.notify_one();
        } else if state.threads < MAX_THREADS {
            let shared = self.0.clone();
            // If no thread can be started, the next descriptor tries again.
            if std::thread::Builder::new().name("unirdma-closer".into()).spawn(move || shared.run()).is_ok() {
                state.threads += 1;
                state.idle += 1;
            }
        }
    }
}

impl Shared {
    fn run(&self) {
        (self.begin)();
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.idle -= 1;
        loop {
            let Some(account) = state.ready.pop_front() else {
                state.idle += 1;
                let (woken, waited) = self.work.wait_timeout(state, IDLE).unwrap_or_else(PoisonError::into_inner);
                state = woken;
                state.idle -= 1;
                if waited.timed_out() && state.ready.is_empty() {
                    break;
                }
                continue;
            };
            let held = state.lanes.get_mut(&account).and_then(VecDeque::pop_front);
            drop(state);
            drop(held);
            state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            if state.lanes.get(&account).is_some_and(VecDeque::is_empty) {
                state.lanes.remove(&account);
            } else {
                state.ready.push_back(account);
            }
        }
        state.threads -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::accounts::KINDS;
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
    use std::time::Instant;

    /// A TCP socket whose `close` waits until its peer is closed.
    fn lingering() -> (OwnedFd, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut s = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (peer, _) = listener.accept().unwrap();
        s.set_nonblocking(true).unwrap();
        while s.write(&[0; 1 << 16]).is_ok() {}
        rustix::net::sockopt::set_socket_linger(&s, Some(Duration::from_secs(600))).unwrap();
        s.set_nonblocking(false).unwrap();
        (s.into(), peer)
    }

    fn foreign(fd: OwnedFd, l: &Ledger) -> BlockingFd {
        BlockingFd::new(fd, l.take(Resource::Descriptors, 1).unwrap())
    }

    fn used(l: &Ledger) -> u64 {
        l.usage(Resource::Descriptors).0
    }

    fn until(what: impl Fn() -> bool) {
        let began = Instant::now();
        while !what() {
            assert!(began.elapsed() < Duration::from_secs(10));
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn who_is_slow_holds_up_its_own_account_only() {
        let closer = Closer::new(|| ());
        let host = Ledger::of_host([1000; KINDS]).with_closer(closer.clone());
        let (slow, other) = (host.for_vrnic([None; KINDS]), host.for_vrnic([None; KINDS]));
        let (fds, peers): (Vec<_>, Vec<_>) = (0..3).map(|_| lingering()).unzip();
        let began = Instant::now();
        fds.into_iter().for_each(|fd| drop(foreign(fd, &slow)));
        for _ in 0..100 {
            drop(foreign(rustix::pipe::pipe().unwrap().0, &other));
        }
        until(|| used(&other) == 0);
        assert_eq!(used(&slow), 3);
        let threads = closer.0.state.lock().unwrap().threads;
        assert!((1..=3).contains(&threads), "{threads} threads");
        drop(peers);
        until(|| used(&slow) == 0);
        assert!(began.elapsed() < Duration::from_secs(10));
        until(|| closer.0.state.lock().unwrap().threads == 0);
        assert!(closer.0.state.lock().unwrap().lanes.is_empty());
    }

    #[test]
    fn memory_files_are_closed_at_once() {
        let closer = Closer::new(|| panic!("no thread is needed"));
        let ledger = Ledger::of_host([1000; KINDS]).with_closer(closer.clone()).for_vrnic([None; KINDS]);
        drop(foreign(rustix::fs::memfd_create(c"m", rustix::fs::MemfdFlags::CLOEXEC).unwrap(), &ledger));
        assert_eq!((used(&ledger), closer.0.state.lock().unwrap().threads), (0, 0));
    }
}
