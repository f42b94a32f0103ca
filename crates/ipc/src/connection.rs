//! A connection between the supervisor and a worker or the keeper. A message is its length and its JSON text, with
//! descriptors sent along.
//!
//! A receiver has a deadline for a whole message. The supervisor does not trust a worker, so the length of a message is
//! limited, too. Descriptors that the caller did not expect are closed when it drops them.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::fdpass;

/// Longest message, bytes: the answer to `vrnic show` of a vRNIC with very many QPs.
const MAX_BYTES: usize = 64 << 20;
const LENGTH_BYTES: usize = 4;

/// One end of a connection: a non-blocking stream socket.
pub struct Connection(OwnedFd);

fn timed_out() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "no answer in time")
}

fn bad(what: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

impl Connection {
    /// # Errors
    /// The socket cannot be made non-blocking.
    pub fn new(socket: OwnedFd) -> io::Result<Connection> {
        rustix::io::ioctl_fionbio(&socket, true)?;
        Ok(Connection(socket))
    }

    /// Waits until the socket can be read or written.
    fn wait(&self, flags: PollFlags, until: Instant) -> io::Result<()> {
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let time = rustix::time::Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
            match poll(&mut [PollFd::new(&self.0, flags)], Some(&time)) {
                Ok(0) => return Err(timed_out()),
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// Sends a message with at most [`fdpass::MOST`] descriptors.
    ///
    /// # Errors
    /// `TimedOut`, `BrokenPipe` and others of `sendmsg(2)`.
    pub fn send(&self, message: &impl Serialize, fds: &[BorrowedFd<'_>], patience: Duration) -> io::Result<()> {
        let until = Instant::now() + patience;
        let mut bytes = vec![0; LENGTH_BYTES];
        serde_json::to_writer(&mut bytes, message)?;
        let len = bytes.len() - LENGTH_BYTES;
        if len > MAX_BYTES {
            return Err(bad("the message is too long"));
        }
        bytes[..LENGTH_BYTES].copy_from_slice(&(len as u32).to_le_bytes());
        let (mut at, mut fds) = (0, fds);
        while at < bytes.len() {
            match fdpass::send(self.0.as_fd(), &bytes[at..], fds) {
                Ok(n) => (at, fds) = (at + n, &[]),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => self.wait(PollFlags::OUT, until)?,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// Receives a message and its descriptors.
    ///
    /// # Errors
    /// `TimedOut`; `UnexpectedEof`: the other side is gone; `InvalidData`: the message is not of type `T`.
    pub fn receive<T: DeserializeOwned>(&self, patience: Duration) -> io::Result<(T, Vec<OwnedFd>)> {
        let until = Instant::now() + patience;
        let mut fds = Vec::new();
        let mut head = [0; LENGTH_BYTES];
        self.fill(&mut head, &mut fds, until)?;
        let len = u32::from_le_bytes(head) as usize;
        if len > MAX_BYTES {
            return Err(bad("the message is too long"));
        }
        let mut bytes = vec![0; len];
        self.fill(&mut bytes, &mut fds, until)?;
        Ok((serde_json::from_slice(&bytes).map_err(bad)?, fds))
    }

    fn fill(&self, buf: &mut [u8], fds: &mut Vec<OwnedFd>, until: Instant) -> io::Result<()> {
        let mut at = 0;
        while at < buf.len() {
            match fdpass::receive(self.0.as_fd(), &mut buf[at..]) {
                Ok((0, _)) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok((n, came)) => {
                    at += n;
                    fds.extend(came);
                    if fds.len() > fdpass::MOST {
                        return Err(bad("too many descriptors"));
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => self.wait(PollFlags::IN, until)?,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    const SOON: Duration = Duration::from_millis(50);
    const LATE: Duration = Duration::from_secs(20);

    fn pair() -> (Connection, Connection) {
        let (a, b) = UnixStream::pair().unwrap();
        (Connection::new(a.into()).unwrap(), Connection::new(b.into()).unwrap())
    }

    #[test]
    fn long_messages_and_descriptors_arrive_together() {
        let (a, b) = pair();
        let text = "x".repeat(3 << 20);
        std::thread::scope(|s| {
            s.spawn(|| {
                a.send(&text, &[a.as_fd(), b.as_fd()], LATE).unwrap();
                a.send(&7, &[], LATE).unwrap();
            });
            let (got, fds) = b.receive::<String>(LATE).unwrap();
            assert_eq!((got == text, fds.len()), (true, 2));
            let (got, fds) = b.receive::<u32>(LATE).unwrap();
            assert_eq!((got, fds.len()), (7, 0));
        });
    }

    #[test]
    fn who_is_slow_or_lies_is_told_from_who_is_gone() {
        let (a, b) = pair();
        let kind = |r: io::Result<(u32, Vec<OwnedFd>)>| r.unwrap_err().kind();
        assert_eq!(kind(b.receive(SOON)), io::ErrorKind::TimedOut);
        // Half a message.
        fdpass::send(a.as_fd(), &[9, 0, 0], &[]).unwrap();
        assert_eq!(kind(b.receive(SOON)), io::ErrorKind::TimedOut);
        for message in [&[0xff; 4][..], b"\x03\0\0\0{x}", b"\x02\0\0\0\"\xff"] {
            let (a, b) = pair();
            fdpass::send(a.as_fd(), message, &[]).unwrap();
            assert_eq!(kind(b.receive(SOON)), io::ErrorKind::InvalidData);
        }
        let (a, b) = pair();
        drop(a);
        assert_eq!(kind(b.receive(SOON)), io::ErrorKind::UnexpectedEof);
        // Nobody reads.
        let (a, _b) = pair();
        let e = a.send(&"x".repeat(8 << 20), &[], SOON).unwrap_err();
        assert_eq!(e.kind(), io::ErrorKind::TimedOut);
    }
}
