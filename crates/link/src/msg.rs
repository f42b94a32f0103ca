//! Framing: a header of 12 bytes, a payload, and file descriptors that arrive with the first byte.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};

use crate::accounts::{Ledger, Resource};
use crate::blocking_fd::BlockingFd;

/// Longest payload that is parsed, in bytes.
pub const MAX_PAYLOAD: usize = 4096;
/// Longest payload that is skipped and answered with an error. Beyond it the stream is lost.
const MAX_SKIP: usize = 1 << 20;
/// Most file descriptors of one message.
pub const MAX_FDS: usize = 32;
/// Most descriptors that can arrive at once (`SCM_MAX_FD` of the kernel). The kernel would close any for which there is
/// no room, in the receiving thread.
const MAX_CAME: usize = 253;
const HEADER: usize = 12;

/// Requests that vhost-user does not have (specification, section 8.1): opens an event channel.
pub const OPEN_CHANNEL: u32 = 0x5275_0001;
/// Closes an event channel.
pub const CLOSE_CHANNEL: u32 = 0x5275_0002;
/// Gives back events that were read from a channel.
pub const RETURN_EVENTS: u32 = 0x5275_0003;

/// Header flags.
pub(crate) const VERSION: u32 = 1;
pub(crate) const REPLY: u32 = 4;
pub(crate) const NEED_REPLY: u32 = 8;

/// A message as received.
#[derive(Debug)]
pub struct Message {
    /// Raw request code.
    pub request: u32,
    /// Header flags.
    pub flags: u32,
    /// At most [`MAX_PAYLOAD`] bytes.
    pub payload: Vec<u8>,
    /// Descriptors that arrived with the message.
    pub fds: Vec<BlockingFd>,
    /// The payload was longer than [`MAX_PAYLOAD`]; the rest was dropped.
    pub oversized: bool,
}

/// Assembles one message at a time from a socket that may be non-blocking.
#[derive(Default)]
pub struct Receiver {
    head: [u8; HEADER],
    have: usize,
    payload: Vec<u8>,
    fds: Vec<BlockingFd>,
    /// The account of the descriptors.
    ledger: Ledger,
}

impl Receiver {
    /// A receiver that charges descriptors to `ledger`.
    pub fn new(ledger: Ledger) -> Self {
        Receiver { ledger, ..Receiver::default() }
    }

    /// True if a part of a message was received.
    pub fn is_half(&self) -> bool {
        self.have > 0
    }

    fn word(&self, i: usize) -> u32 {
        u32::from_ne_bytes([self.head[i], self.head[i + 1], self.head[i + 2], self.head[i + 3]])
    }

    /// Reads available bytes; returns a message once it is whole, or `Ok(None)` at the end of the stream.
    ///
    /// # Errors
    /// `WouldBlock` until a message is whole; `InvalidData` if the stream cannot be followed any more, or if more
    /// descriptors arrive than a message or the account may have.
    pub fn receive(&mut self, sock: BorrowedFd<'_>) -> io::Result<Option<Message>> {
        while self.have < HEADER {
            if self.ledger.is_overdrawn() {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "too many descriptors wait to be closed"));
            }
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_CAME))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut iov = [IoSliceMut::new(&mut self.head[self.have..])];
            let got = recvmsg(sock, &mut iov, &mut control, RecvFlags::CMSG_CLOEXEC)?;
            for m in control.drain() {
                if let RecvAncillaryMessage::ScmRights(fds) = m {
                    self.fds.extend(fds.map(|fd| BlockingFd::new(fd, self.ledger.charge(Resource::Descriptors, 1))));
                }
            }
            if self.fds.len() > MAX_FDS || self.fds.iter().any(BlockingFd::is_beyond) {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "too many descriptors beside a message"));
            }
            if got.bytes == 0 {
                return Ok(None);
            }
            self.have += got.bytes;
        }
        let size = self.word(8) as usize;
        if size > MAX_SKIP {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "vhost-user message of over 1 MiB"));
        }
        while self.payload.len() < size {
            let at = self.payload.len();
            self.payload.resize(size.min(at + (64 << 10)), 0);
            match rustix::net::recv(sock, &mut self.payload[at..], RecvFlags::empty()) {
                Ok((_, 0)) => return Ok(None),
                Ok((_, n)) => self.payload.truncate(at + n),
                Err(e) => {
                    self.payload.truncate(at);
                    return Err(e.into());
                }
            }
        }
        self.have = 0;
        let mut payload = std::mem::take(&mut self.payload);
        let oversized = size > MAX_PAYLOAD;
        payload.truncate(MAX_PAYLOAD);
        Ok(Some(Message {
            request: self.word(0),
            flags: self.word(4),
            payload,
            fds: std::mem::take(&mut self.fds),
            oversized,
        }))
    }
}

/// Sends a message.
///
/// # Errors
/// Errors of `sendmsg(2)`; `WriteZero` if the socket took only a part.
pub fn send(sock: BorrowedFd<'_>, request: u32, flags: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut bytes = Vec::with_capacity(HEADER + payload.len());
    for w in [request, flags | VERSION, payload.len() as u32] {
        bytes.extend_from_slice(&w.to_ne_bytes());
    }
    bytes.extend_from_slice(payload);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "too many file descriptors"));
    }
    let n = sendmsg(sock, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL)?;
    if n < bytes.len() { Err(io::ErrorKind::WriteZero.into()) } else { Ok(()) }
}
