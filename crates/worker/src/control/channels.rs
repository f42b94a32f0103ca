//! The event channels of sessions: sockets by which a process gets events and calls, and kicks the device.
//!
//! The device makes both ends and gives one of them to the process. So whatever a process does to its end, such as
//! making it blocking or changing its buffer size, does not affect the device's end, and a write to that never waits.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::net::sockopt::set_socket_oobinline;
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, shutdown, socketpair};
use unirdma_abi as abi;
use unirdma_device::queue_of_channel;
use unirdma_link::{BlockingFd, ChannelError, Resource};

use super::{Conn, Worker};

/// Keys of the channels that kick, in the same number space as vrings. Wake channels come last.
pub(super) const CONTROL: usize = abi::NUM_QUEUES as usize;
pub(super) const WAKE: usize = CONTROL + 1;

/// Tokens of event channels in the control thread's epoll set: this bit, the session, the event queue.
const TOKEN: u64 = 1 << 63;
const INDEX_BITS: u32 = 20;
const _: () = assert!(abi::VQ_COMP_FIRST + abi::MAX_CHANNELS < 1 << INDEX_BITS);

fn token(session: u64, index: u32) -> u64 {
    TOKEN | session << INDEX_BITS | u64::from(index)
}

/// Session and event queue of a token; `None` if it is not the token of an event channel.
pub(super) fn of_token(token: u64) -> Option<(u64, u32)> {
    let mask = (1 << INDEX_BITS) - 1;
    (token & TOKEN != 0).then_some(((token & !TOKEN) >> INDEX_BITS, (token & mask) as u32))
}

/// A pair of sockets: the device's end and the process's end.
fn pair(kind: SocketType) -> rustix::io::Result<(OwnedFd, OwnedFd)> {
    socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)
}

/// Opens channel `number`; returns the process's end.
pub(super) fn open(conn: &mut Conn, number: u32) -> Result<OwnedFd, ChannelError> {
    if conn.device.is_rfc() {
        return Err(ChannelError::Rfc);
    }
    let key = match (number, number.checked_sub(abi::CHANNEL_WAKE)) {
        (abi::CHANNEL_CONTROL, _) => CONTROL,
        (_, Some(i @ 0..abi::MAX_WAKES)) => WAKE + i as usize,
        _ => return open_events(conn, number),
    };
    if conn.kicks.contains_key(&key) || conn.changed.contains_key(&key) {
        return Err(ChannelError::Open);
    }
    let ticket = conn.ledger.take(Resource::Descriptors, 1).ok_or(ChannelError::Exhausted("descriptors"))?;
    if key >= WAKE {
        // The pollers only watch for edges and never read it, so a process that reads it or fills it harms only itself.
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let ours = eventfd(0, flags)?;
        let theirs = rustix::io::fcntl_dupfd_cloexec(&ours, 0)?;
        conn.changed.insert(key, Some(Arc::new(BlockingFd::new(ours, ticket))));
        return Ok(theirs);
    }
    let (ours, theirs) = pair(SocketType::STREAM)?;
    set_socket_oobinline(&ours, true)?;
    // Unread messages of the process are dropped together with the socket, perhaps slowly.
    let ours = Arc::new(BlockingFd::new(ours, ticket));
    conn.device.set_control_channel(Some(ours.clone()));
    conn.changed.insert(key, Some(ours));
    Ok(theirs)
}

fn open_events(conn: &Conn, number: u32) -> Result<OwnedFd, ChannelError> {
    let index = queue_of_channel(number).ok_or(ChannelError::Unknown(number))?;
    let ticket = conn.ledger.take(Resource::Descriptors, 1).ok_or(ChannelError::Exhausted("event channels"))?;
    let (ours, theirs) = pair(SocketType::SEQPACKET)?;
    // The process sends nothing on an event channel.
    shutdown(&ours, Shutdown::Read)?;
    // The socket is watched only once it is full, and then for one event.
    let once = epoll::EventFlags::ONESHOT;
    let token = token(conn.id, index);
    epoll::add(&conn.epoll, &ours, epoll::EventData::new_u64(token), once)?;
    let epoll = conn.epoll.clone();
    let on_room = move |fd: BorrowedFd<'_>, room: bool| {
        // The end of the other side is always reported.
        let flags = if room { epoll::EventFlags::OUT | once } else { once };
        let _ = epoll::modify(&epoll, fd, epoll::EventData::new_u64(token), flags);
    };
    conn.device.events().open_channel(index, ours, ticket, Box::new(on_room))?;
    Ok(theirs)
}

/// Closes event channel `number`. Channels that kick are closed with the session.
pub(super) fn close(conn: &Conn, number: u32) -> Result<(), ChannelError> {
    let index = queue_of_channel(number).ok_or(ChannelError::NotClosable(number))?;
    conn.device.events().close_channel(index)
}

/// Puts events back at the front of a channel.
pub(super) fn give_back(conn: &Conn, number: u32, events: &[u8]) -> Result<(), ChannelError> {
    let index = queue_of_channel(number).ok_or(ChannelError::Unknown(number))?;
    conn.device.events().give_back(index, events)
}

impl Worker {
    /// Called when a full channel has room again, or the process has closed its end.
    pub(super) fn on_room(&mut self, session: u64, index: u32) {
        if let Some(s) = self.sessions.get(&session) {
            s.conn.device.events().on_room(index);
        }
    }
}

/// The number of the wake channel that has this key, if the key belongs to one. A guest's wake virtqueue is channel 0.
pub(super) fn wake_channel(key: usize) -> Option<usize> {
    if key == abi::VQ_WAKE as usize { Some(0) } else { key.checked_sub(WAKE) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_names_session_and_queue() {
        let last = abi::VQ_COMP_FIRST + abi::MAX_CHANNELS - 1;
        for (session, index) in [(1, abi::VQ_ASYNC), (77, last), (1 << 40, 3)] {
            assert_eq!(of_token(token(session, index)), Some((session, index)));
        }
        assert_eq!(of_token(77), None);
    }
}
