//! A stream socket: its calls, which wait until its connection is ready.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use super::connection::{Connection, Ready, State, check, errno};
use super::protocol::*;
use super::wait::{Progress, look, wait};
use super::{Endpoint, Received, set_option};
use crate::lock;
use crate::rdmacm::*;

/// A socket of this library.
pub(super) struct Socket {
    inner: Mutex<Connection>,
    nonblocking: AtomicBool,
}

impl Socket {
    fn of(inner: Connection) -> Socket {
        Socket { inner: Mutex::new(inner), nonblocking: AtomicBool::new(false) }
    }

    pub fn create() -> Result<Socket, i32> {
        Connection::create().map(Socket::of)
    }

    /// Waits until `f` has an answer; `EAGAIN` if the caller or the socket does not wait.
    fn wait<R>(&self, dontwait: bool, f: impl FnMut(&mut Connection) -> Option<Result<R, i32>>) -> Result<R, i32> {
        wait(&self.inner, !dontwait && !self.nonblocking.load(Ordering::Relaxed), f)
    }

    /// The error that prevents sending, if there is one.
    fn send_error(c: &Connection) -> Option<i32> {
        match c.state {
            State::Connecting => None,
            State::Connected if c.writable => None,
            State::Connected => Some(libc::EPIPE),
            State::Ended if c.error != 0 => Some(c.error),
            State::Ended => Some(libc::ECONNRESET),
            _ => Some(libc::ENOTCONN),
        }
    }

    /// Writes into memory that the peer has mapped at `offset`. Writes fewer bytes, or none, if not all of them are
    /// mapped.
    pub fn write_at(&self, bytes: &[u8], offset: u64, dontwait: bool) -> Result<usize, i32> {
        let mut done = 0;
        let r = self.wait(dontwait, |inner| {
            if let Some(e) = Self::send_error(inner) {
                return Some(Err(e));
            }
            match inner.write_at(&bytes[done..], offset.wrapping_add(done as u64)) {
                Ok((n, more)) => {
                    done += n;
                    (done == bytes.len() || !more).then_some(Ok(()))
                }
                Err(e) => Some(Err(e)),
            }
        });
        // The receiver learns of the data only from its memory, and a program that waits for an answer there makes no
        // calls. So the virtual layer gets its turn now.
        lock(&self.inner).progress();
        if done > 0 { Ok(done) } else { r.map(|()| 0) }
    }

    pub fn map(&self, buf: *mut c_void, len: usize, peer_writes: bool, offset: Option<u64>) -> Result<u64, i32> {
        lock(&self.inner).map(buf, len, peer_writes, offset)
    }

    pub fn unmap(&self, buf: *mut c_void, len: usize) -> Result<(), i32> {
        lock(&self.inner).unmap(buf, len)
    }

    /// Number of mappings that the peer may announce.
    pub fn table(&self) -> u32 {
        lock(&self.inner).table
    }

    /// Sets this number for the socket, or for the sockets that it accepts; in steps of 256 above 128.
    ///
    /// # Errors
    /// `EINVAL` once it connects.
    pub fn set_table(&self, n: u32) -> Result<(), i32> {
        let mut inner = lock(&self.inner);
        if !matches!(inner.state, State::Idle | State::Bound | State::Listening) {
            return Err(libc::EINVAL);
        }
        inner.table = from_scale(to_scale(n));
        Ok(())
    }
}

impl Endpoint for Socket {
    fn fd(&self) -> i32 {
        let inner = lock(&self.inner);
        // SAFETY: a socket that was created or accepted has a channel.
        unsafe { (*inner.channel).fd }
    }

    fn nonblocking(&self) -> &AtomicBool {
        &self.nonblocking
    }

    fn stream(&self) -> Option<&Socket> {
        Some(self)
    }

    fn bind(&self, addr: *const libc::sockaddr) -> Result<(), i32> {
        let mut inner = lock(&self.inner);
        if inner.state != State::Idle {
            return Err(libc::EINVAL);
        }
        // SAFETY: the caller's address.
        check(unsafe { x_rdma_bind_addr(inner.id, addr.cast_mut()) })?;
        inner.state = State::Bound;
        Ok(())
    }

    fn listen(&self, backlog: i32) -> Result<(), i32> {
        let mut inner = lock(&self.inner);
        if !matches!(inner.state, State::Idle | State::Bound | State::Listening) {
            return Err(libc::EINVAL);
        }
        // SAFETY: the socket's own identifier.
        check(unsafe { x_rdma_listen(inner.id, backlog) })?;
        inner.state = State::Listening;
        Ok(())
    }

    fn connect(&self, addr: *const libc::sockaddr) -> Result<(), i32> {
        {
            let mut inner = lock(&self.inner);
            match inner.state {
                State::Connected => return Err(libc::EISCONN),
                State::Connecting => {}
                State::Idle | State::Bound => {
                    // SAFETY: the caller's address.
                    check(unsafe { x_rdma_resolve_addr(inner.id, std::ptr::null_mut(), addr.cast_mut(), 2000) })?;
                    inner.state = State::Connecting;
                }
                _ => return Err(libc::EINVAL),
            }
        }
        let r = self.wait(false, |inner| match inner.state {
            State::Connected => Some(Ok(())),
            State::Ended => Some(Err(if inner.error != 0 { inner.error } else { libc::ECONNRESET })),
            _ => None,
        });
        r.map_err(|e| if e == libc::EAGAIN { libc::EINPROGRESS } else { e })
    }

    fn accept(&self) -> Result<Arc<dyn Endpoint>, i32> {
        let mut new = self.wait(false, |inner| {
            if inner.state != State::Listening {
                return Some(Err(libc::EINVAL));
            }
            inner.waiting.pop_front().map(Ok)
        })?;
        // The new socket gets a channel of its own.
        // SAFETY: the channel and the identifier are this library's.
        unsafe {
            let channel = x_rdma_create_event_channel();
            if channel.is_null() {
                return Err(errno());
            }
            libc::fcntl((*channel).fd, libc::F_SETFL, libc::O_NONBLOCK);
            new.channel = channel;
            check(x_rdma_migrate_id(new.id, channel))?;
        }
        new.answer()?;
        let socket = Socket::of(new);
        // A program that does not wait may have the other end of this connection, too.
        if !self.nonblocking.load(Ordering::Relaxed) {
            socket.wait(false, |inner| (inner.state != State::Connecting).then_some(Ok(())))?;
        }
        Ok(Arc::new(socket))
    }

    fn send(&self, bytes: &[u8], dontwait: bool, _to: *const libc::sockaddr) -> Result<usize, i32> {
        let mut done = 0;
        let r = self.wait(dontwait, |inner| {
            if let Some(e) = Self::send_error(inner) {
                return Some(Err(e));
            }
            match inner.send(&bytes[done..]) {
                Ok(n) => done += n,
                Err(e) => return Some(Err(e)),
            }
            (done == bytes.len()).then_some(Ok(()))
        });
        // Bytes that were sent count, even if an error came after them.
        if done > 0 { Ok(done) } else { r.map(|()| 0) }
    }

    fn recv(&self, bytes: &mut [u8], flags: i32) -> Result<Received, i32> {
        let [all, peek, dontwait] = [libc::MSG_WAITALL, libc::MSG_PEEK, libc::MSG_DONTWAIT].map(|f| flags & f != 0);
        let mut done = 0;
        let r = self.wait(dontwait, |inner| {
            if matches!(inner.state, State::Idle | State::Bound | State::Listening) {
                return Some(Err(libc::ENOTCONN));
            }
            done += inner.receive(&mut bytes[done..], peek);
            let over = inner.state == State::Ended || !inner.readable;
            let enough = done == bytes.len() || done > 0 && !all || peek && done > 0;
            (enough || over).then_some(Ok(()))
        });
        let bytes = if done > 0 { Ok(done) } else { r.map(|()| 0) }?;
        Ok(Received { bytes, from: if bytes > 0 { self.name(true).ok() } else { None } })
    }

    fn shutdown(&self, how: i32) -> Result<(), i32> {
        let (read, write) = (how != libc::SHUT_WR, how != libc::SHUT_RD);
        {
            let mut inner = lock(&self.inner);
            inner.progress();
            if read {
                inner.readable = false;
            }
            if !write || inner.state != State::Connected || !inner.writable {
                return Ok(());
            }
            inner.writable = false;
        }
        // Everything that was sent must arrive before the peer is told of the end. This waits on a non-blocking socket
        // too, because nobody would send the rest after an `rclose`.
        wait(&self.inner, true, |inner| (inner.may_end() || inner.state != State::Connected).then_some(Ok(())))?;
        let mut inner = lock(&self.inner);
        if inner.state != State::Connected {
            return Ok(());
        }
        let kind = if inner.readable { CTRL_SHUTDOWN } else { CTRL_DISCONNECT };
        inner.control(message(OP_CTRL, kind))?;
        if kind == CTRL_DISCONNECT {
            drop(inner);
            let _ = wait(&self.inner, true, |i| (i.all_arrived() || i.state != State::Connected).then_some(Ok(())));
            lock(&self.inner).hang_up();
        }
        Ok(())
    }

    fn poll(&self, arm: bool) -> (Ready, Vec<i32>) {
        look(&self.inner, arm)
    }

    fn take_error(&self) -> i32 {
        std::mem::take(&mut lock(&self.inner).error)
    }

    fn name(&self, peer: bool) -> Result<libc::sockaddr_storage, i32> {
        let inner = lock(&self.inner);
        // SAFETY: the socket's own identifier.
        let addr = unsafe { &(*inner.id).route.addr };
        Ok(if peer { addr.dst } else { addr.src })
    }

    fn set_option(&self, option: i32, value: u32) -> Result<(), i32> {
        set_option(lock(&self.inner).id, option, value)
    }
}
