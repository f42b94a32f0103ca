//! Requests to the kernel by netlink, on blocking sockets: a request, then all messages of the answer.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NLMSG_DONE, NLMSG_ERROR, NLMSG_NOOP, NLMSG_OVERRUN,
};
use netlink_sys::{Socket, SocketAddr};
use rustix::net::sockopt::{Timeout, set_socket_timeout};

/// Bytes of a message's header: length, type, flags, sequence number, port.
pub(super) const HEADER_BYTES: usize = 16;
/// Longest time without a message of an answer. The kernel answers at once, except while another process has the
/// lock of rtnetlink.
const PATIENCE: Duration = Duration::from_secs(10);
/// Times that a dump is asked for if the kernel says that its table changed meanwhile.
const TRIES: u32 = 4;

/// A message of the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Message {
    pub kind: u16,
    pub flags: u16,
    pub sequence: u32,
    pub body: Vec<u8>,
}

/// A socket for requests.
pub(super) struct Requests {
    socket: Socket,
    sequence: u32,
}

impl Requests {
    /// # Errors
    /// There is no such protocol.
    pub fn open(protocol: isize) -> io::Result<Requests> {
        let mut socket = Socket::new(protocol)?;
        socket.bind_auto()?;
        set_socket_timeout(&socket, Timeout::Recv, Some(PATIENCE))?;
        Ok(Requests { socket, sequence: 0 })
    }

    /// Asks for something, which may be a dump (`NLM_F_DUMP` in `flags`). Returns the messages of the answer.
    ///
    /// # Errors
    /// The kernel's error, or that it does not answer.
    pub fn ask(&mut self, kind: u16, flags: u16, body: &[u8]) -> io::Result<Vec<Message>> {
        for _ in 0..TRIES {
            if let Some(answer) = self.ask_once(kind, flags, body)? {
                return Ok(answer);
            }
        }
        Err(io::Error::other("a table of the kernel changes all the time"))
    }

    /// Asks the kernel to change something.
    ///
    /// # Errors
    /// The kernel's error, or that it does not answer.
    pub fn change(&mut self, kind: u16, flags: u16, body: &[u8]) -> io::Result<()> {
        self.ask(kind, flags | NLM_F_ACK, body).map(drop)
    }

    /// `None`: the dump was interrupted.
    fn ask_once(&mut self, kind: u16, flags: u16, body: &[u8]) -> io::Result<Option<Vec<Message>>> {
        self.sequence = self.sequence.wrapping_add(1);
        let request = encode(kind, flags | NLM_F_REQUEST, self.sequence, body);
        self.socket.send_to(&request, &SocketAddr::new(0, 0), 0)?;
        let (mut answer, mut is_whole) = (Vec::new(), true);
        loop {
            let (bytes, from) = self.socket.recv_from_full()?;
            if from.port_number() != 0 {
                // Any process may send to a netlink socket.
                continue;
            }
            for message in Messages(&bytes).filter(|m| m.sequence == self.sequence) {
                is_whole &= message.flags & NLM_F_DUMP_INTR == 0;
                match message.kind {
                    NLMSG_DONE | NLMSG_ERROR => {
                        return check(&message.body).map(|()| is_whole.then_some(answer));
                    }
                    NLMSG_NOOP => {}
                    NLMSG_OVERRUN => return Err(io::Error::other("messages of the kernel were lost")),
                    _ => {
                        answer.push(message);
                        if flags & (NLM_F_DUMP | NLM_F_ACK) == 0 {
                            return Ok(Some(answer));
                        }
                    }
                }
            }
        }
    }
}

/// The result at the beginning of the last message: 0, or a negative errno.
fn check(body: &[u8]) -> io::Result<()> {
    match body.first_chunk().map_or(0, |code| i32::from_ne_bytes(*code)) {
        code if code < 0 => Err(io::Error::from_raw_os_error(code.saturating_neg())),
        _ => Ok(()),
    }
}

fn encode(kind: u16, flags: u16, sequence: u32, body: &[u8]) -> Vec<u8> {
    let length = (HEADER_BYTES + body.len()) as u32;
    [&length.to_ne_bytes()[..], &kind.to_ne_bytes(), &flags.to_ne_bytes(), &sequence.to_ne_bytes(), &[0; 4], body]
        .concat()
}

/// The messages of a datagram. Ends at the first one that is malformed.
struct Messages<'a>(&'a [u8]);

impl Iterator for Messages<'_> {
    type Item = Message;

    fn next(&mut self) -> Option<Message> {
        let [a, b, c, d, e, f, g, h, i, j, k, l, ..] = *self.0.first_chunk::<HEADER_BYTES>()?;
        let length = u32::from_ne_bytes([a, b, c, d]) as usize;
        let body = self.0.get(HEADER_BYTES..length)?.to_vec();
        self.0 = self.0.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some(Message {
            kind: u16::from_ne_bytes([e, f]),
            flags: u16::from_ne_bytes([g, h]),
            sequence: u32::from_ne_bytes([i, j, k, l]),
            body,
        })
    }
}

/// A socket on which the kernel tells changes. What it says does not matter.
pub(super) struct Notices(Socket);

impl Notices {
    /// Listens to groups of a protocol. Groups that this kernel does not have are left out.
    ///
    /// # Errors
    /// There is no such protocol.
    pub fn open(protocol: isize, groups: &[u32]) -> io::Result<Notices> {
        let mut socket = Socket::new(protocol)?;
        socket.bind_auto()?;
        socket.set_non_blocking(true)?;
        for group in groups {
            let _ = socket.add_membership(*group);
        }
        Ok(Notices(socket))
    }

    /// Discards what has come, also that something was lost.
    pub fn drain(&self) {
        let mut room = [0; 1];
        loop {
            match rustix::net::recv(&self.0, &mut room, rustix::net::RecvFlags::empty()) {
                Ok(_) | Err(rustix::io::Errno::NOBUFS | rustix::io::Errno::INTR) => {}
                Err(_) => return,
            }
        }
    }
}

impl AsFd for Notices {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_taken_apart_and_malformed_ones_end_them() {
        let one = encode(16, 2, 7, b"abcde");
        let two = encode(17, 0, 8, b"");
        let mut padded = one.clone();
        padded.resize(one.len().next_multiple_of(4), 0);
        let all = [&padded[..], &two].concat();
        let kinds = |bytes: &[u8]| Messages(bytes).map(|m| (m.kind, m.sequence, m.body.len())).collect::<Vec<_>>();
        assert_eq!(kinds(&all), [(16, 7, 5), (17, 8, 0)]);
        for cut in 0..all.len() {
            assert!(kinds(&all[..cut]).len() < 2);
        }
        for length in [0u32, 1, 15, u32::MAX] {
            let mut wrong = all.clone();
            wrong[..4].copy_from_slice(&length.to_ne_bytes());
            assert_eq!(kinds(&wrong), []);
        }
    }

    #[test]
    fn the_kernel_answers() {
        let mut requests = Requests::open(netlink_sys::protocols::NETLINK_ROUTE).unwrap();
        // RTM_GETLINK of `lo`, which has the number 1.
        let body = [&[0; 4][..], &1u32.to_ne_bytes(), &[0; 8]].concat();
        assert_eq!(requests.ask(18, 0, &body).unwrap().len(), 1);
        let none = [&[0; 4][..], &i32::MAX.to_ne_bytes(), &[0; 8]].concat();
        assert_eq!(requests.ask(18, 0, &none).unwrap_err().raw_os_error(), Some(libc::ENODEV));
    }
}
