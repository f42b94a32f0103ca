//! Event channels: a descriptor to poll and block on, which has one message for each event.
//!
//! The descriptor is one end of a socket. The virtual layer has the other end, and sends each event as a message. So
//! the descriptor can be polled in all ways, made non-blocking, passed on and waited on, like the descriptor of a
//! kernel's event queue. It reads as closed once the virtual layer is gone.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError, RwLock};

use rustix::io::Errno as Os;
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, socket_with};
use unirdma_abi as abi;
use unirdma_mem::fds::Known;
use zerocopy::FromBytes;

use crate::{Result, errno, lock};

const EVENT: usize = size_of::<abi::Event>();

/// The program's end of an event channel.
pub struct EventSource {
    number: u32,
    socket: RwLock<Known>,
    raw: i32,
    /// Held while events are taken out and put back.
    sorting: Mutex<()>,
    silenced: AtomicBool,
}

fn event(bytes: &[u8]) -> Option<abi::Event> {
    abi::Event::read_from_bytes(bytes).ok()
}

impl EventSource {
    pub(crate) fn new(number: u32, socket: OwnedFd) -> Result<Self> {
        let socket = Known::new(socket).map_err(|e| errno(&e))?;
        let raw = socket.as_raw_fd();
        Ok(EventSource {
            number,
            socket: RwLock::new(socket),
            raw,
            sorting: Mutex::new(()),
            silenced: AtomicBool::new(false),
        })
    }

    /// Number of the channel.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// The descriptor, for the C structures.
    pub fn raw_fd(&self) -> i32 {
        self.raw
    }

    /// The next event. Waits for it, unless the descriptor was made non-blocking.
    ///
    /// This is a cancellation point: `pthread_cancel(3)` may unwind the stack from here, with all callers up to the C
    /// program. So neither this function nor a caller may hold a lock or a value to drop meanwhile. Callers must not be
    /// `extern "C-unwind"`: this library is built to abort where Rust code unwinds, and such functions abort for every
    /// unwinding, while unwinding passes through `extern "C"` functions as through C functions.
    ///
    /// # Errors
    /// `EAGAIN` if there is none, `EINTR` by a signal whose handler does not restart calls, `EIO` once the virtual
    /// layer is gone.
    pub fn next(&self) -> Result<abi::Event> {
        loop {
            let mut bytes = [0u8; EVENT];
            // SAFETY: `bytes` has room for `EVENT` bytes. This is the C library's function, not the system call, so
            // that it can be cancelled.
            let n = unsafe { libc::recv(self.raw, bytes.as_mut_ptr().cast(), EVENT, 0) };
            match n {
                0 => return Err(libc::EIO),
                // SAFETY: this thread's own errno.
                ..0 => match unsafe { *libc::__errno_location() } {
                    libc::EAGAIN if self.silenced.load(Ordering::Relaxed) => return Err(libc::EIO),
                    e => return Err(e),
                },
                _ => {}
            }
            // The virtual layer sends whole events only.
            if let Some(e) = event(&bytes[..n as usize]) {
                return Ok(e);
            }
        }
    }

    /// The next event, if there is one.
    pub fn try_next(&self) -> Option<abi::Event> {
        self.take().ok()
    }

    /// The next event, without waiting.
    ///
    /// # Errors
    /// `EAGAIN` if there is none, `EIO` once the virtual layer is gone.
    pub fn take(&self) -> Result<abi::Event> {
        let socket = self.socket.read().unwrap_or_else(PoisonError::into_inner);
        let mut bytes = [0u8; EVENT];
        loop {
            let got = socket
                .get()
                .map_err(|_| Os::BADF)
                .and_then(|s| rustix::net::recv(s, &mut bytes[..], RecvFlags::DONTWAIT));
            match got {
                Err(Os::INTR) => {}
                Err(Os::AGAIN) if !self.silenced.load(Ordering::Relaxed) => return Err(libc::EAGAIN),
                Ok((0, _)) | Err(_) => return Err(libc::EIO),
                // The virtual layer sends whole events only.
                Ok((n, _)) => {
                    if let Some(e) = event(&bytes[..n]) {
                        return Ok(e);
                    }
                }
            }
        }
    }

    /// Drops waiting events that are not to be kept. `put_back` returns the others to the head of the channel.
    ///
    /// The virtual layer has to return them, because only its end can send to this one.
    pub(crate) fn retain(&self, keep: impl Fn(&abi::Event) -> bool, put_back: impl FnOnce(&[abi::Event])) {
        let _sorting = lock(&self.sorting);
        let kept: Vec<_> = std::iter::from_fn(|| self.try_next()).filter(keep).collect();
        if !kept.is_empty() {
            put_back(&kept);
        }
    }

    /// True once it announces no loss any more.
    pub fn is_silenced(&self) -> bool {
        self.silenced.load(Ordering::Relaxed)
    }

    /// Makes the descriptor not readable any more, instead of for ever: the virtual layer is gone, and the program
    /// knows.
    pub fn silence(&self) {
        let mut socket = self.socket.write().unwrap_or_else(PoisonError::into_inner);
        self.silenced.store(true, Ordering::Relaxed);
        // Replaces the socket, which the other side has closed, by a socket to which nobody sends.
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        if let Ok(silent) = socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None) {
            socket.replace(silent);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags};
    use rustix::net::{SendFlags, send, socketpair};
    use zerocopy::IntoBytes;

    fn pair() -> (EventSource, OwnedFd) {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        (EventSource::new(5, ours).unwrap(), theirs)
    }

    fn raise(to: &OwnedFd, handle: u32) {
        send(to, abi::Event { kind: 1, handle, reserved: 0 }.as_bytes(), SendFlags::empty()).unwrap();
    }

    fn is_readable(e: &EventSource) -> bool {
        let socket = e.socket.read().unwrap();
        let mut fds = [PollFd::new(&*socket, PollFlags::IN)];
        let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut fds, Some(&now)).unwrap() > 0
    }

    #[test]
    fn each_message_is_an_event_and_the_end_is_an_error() {
        let (e, peer) = pair();
        assert!(e.try_next().is_none() && !is_readable(&e));
        raise(&peer, 1);
        send(&peer, b"short", SendFlags::empty()).unwrap();
        raise(&peer, 2);
        raise(&peer, 3);
        drop(peer);
        assert_eq!([e.next().unwrap().handle, e.next().unwrap().handle], [1, 2], "what was sent before the end comes");
        assert_eq!(e.take().unwrap().handle, 3);
        assert_eq!((e.next().unwrap_err(), e.take().unwrap_err()), (libc::EIO, libc::EIO));
    }

    #[test]
    fn taking_does_not_wait() {
        let (e, peer) = pair();
        assert_eq!(e.take().unwrap_err(), libc::EAGAIN);
        send(&peer, b"short", SendFlags::empty()).unwrap();
        raise(&peer, 1);
        assert_eq!(e.take().unwrap().handle, 1);
    }

    #[test]
    fn a_loss_that_was_told_is_not_announced_again() {
        let (e, peer) = pair();
        drop(peer);
        assert!(is_readable(&e));
        let number = e.raw_fd();
        e.silence();
        assert!(!is_readable(&e) && e.raw_fd() == number);
        assert_eq!(e.next().unwrap_err(), libc::EIO);
        assert!(e.try_next().is_none());
    }

    #[test]
    fn events_that_are_kept_go_back_and_others_are_gone() {
        let (e, peer) = pair();
        (0..6).for_each(|i| raise(&peer, i));
        e.retain(|e| e.handle % 3 == 1, |kept| kept.iter().for_each(|e| raise(&peer, e.handle + 100)));
        assert_eq!([e.try_next().unwrap().handle, e.try_next().unwrap().handle], [101, 104]);
        assert!(!is_readable(&e));
        raise(&peer, 0);
        e.retain(|_| false, |_| panic!("there is nothing to put back"));
        assert!(!is_readable(&e));
    }
}
