//! Descriptors that programs can make slow to close.
//!
//! `close(2)` may wait for the peer of a socket that lingers, for the server of a FUSE file, or for the holder of a
//! lock of a pipe or an epoll set. It may also close others: descriptors in unread messages of a socket. So descriptors
//! that a program has sent, and sockets that it writes to, are [`BlockingFd`]: a thread of the account's closer closes
//! them.
//! Only memory files are closed at once.
//!
//! The descriptors of one vRNIC are closed one after the other, so a vRNIC delays only itself. A descriptor stays on
//! the account of its vRNIC until it is closed.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::accounts::{Ledger, Resource, Ticket};

/// A descriptor that may be slow to close, on an account. When it is dropped, the account's closer closes it, if
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
            closer.clone().close(held.ticket.account(), Box::new(held));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::accounts::KINDS;
    use crate::closer::Closer;
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
    use std::time::{Duration, Instant};

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
        let threads = closer.threads();
        assert!((1..=3).contains(&threads), "{threads} threads");
        drop(peers);
        until(|| used(&slow) == 0);
        assert!(began.elapsed() < Duration::from_secs(10));
        until(|| closer.threads() == 0);
        assert!(closer.is_idle());
    }

    #[test]
    fn memory_files_are_closed_at_once() {
        let closer = Closer::new(|| panic!("no thread is needed"));
        let ledger = Ledger::of_host([1000; KINDS]).with_closer(closer.clone()).for_vrnic([None; KINDS]);
        drop(foreign(rustix::fs::memfd_create(c"m", rustix::fs::MemfdFlags::CLOEXEC).unwrap(), &ledger));
        assert_eq!((used(&ledger), closer.threads()), (0, 0));
    }
}
