//! Limits of the memory of this process that is kept for a vRNIC: packets and datagrams that wait, and notifications
//! for its programs.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Most bytes of a vRNIC's packets and payloads that wait for jobs, or for the packets that are made of them.
const JOB_BYTES: usize = 4 << 20;
/// Most bytes of a vRNIC's datagrams that wait for receives.
const DATAGRAM_BYTES: usize = 16 << 20;
/// Most bytes of a vRNIC's copies of requests that are under way to other hosts, beside the first few of each QP.
const COPY_BYTES: usize = 64 << 20;

/// The account of a vRNIC for memory of this process.
pub trait Account: Send + Sync {
    /// Takes `bytes` bytes more; false if fewer are left.
    fn take(&self, bytes: usize) -> bool;
    /// Takes `bytes` bytes more, even if fewer are left.
    fn force(&self, bytes: usize);
    /// Gives `bytes` bytes back.
    fn give(&self, bytes: usize);
}

/// An account without a limit.
struct Unlimited;

impl Account for Unlimited {
    fn take(&self, _: usize) -> bool {
        true
    }

    fn force(&self, _: usize) {}

    fn give(&self, _: usize) {}
}

/// Memory of this process that may be kept for one vRNIC.
pub(crate) struct Rooms {
    /// Packets and payloads that wait for jobs.
    pub jobs: Room,
    /// Datagrams that wait for receives.
    pub datagrams: Room,
    /// Copies of requests that are under way.
    pub copies: Room,
    /// All else.
    pub others: Room,
}

impl Rooms {
    pub fn new(account: &Arc<dyn Account>) -> Self {
        let room = |most| Room(Arc::new(Kept { most, bytes: AtomicUsize::new(0), account: account.clone() }));
        Rooms {
            jobs: room(JOB_BYTES),
            datagrams: room(DATAGRAM_BYTES),
            copies: room(COPY_BYTES),
            others: room(usize::MAX),
        }
    }
}

impl Default for Rooms {
    fn default() -> Self {
        let account: Arc<dyn Account> = Arc::new(Unlimited);
        Rooms::new(&account)
    }
}

struct Kept {
    most: usize,
    bytes: AtomicUsize,
    account: Arc<dyn Account>,
}

/// The bytes of one kind that are kept for a vRNIC.
#[derive(Clone)]
pub(crate) struct Room(Arc<Kept>);

impl Room {
    /// The number of bytes that are kept.
    pub fn bytes(&self) -> usize {
        self.0.bytes.load(Ordering::Relaxed)
    }
}

impl Default for Room {
    fn default() -> Self {
        Rooms::default().others
    }
}

impl fmt::Debug for Room {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", self.bytes(), self.0.most)
    }
}

/// A part of a vRNIC's room. It is given back when this is dropped.
#[derive(Debug, Default)]
pub(crate) struct Taken {
    room: Option<Room>,
    bytes: usize,
}

impl Taken {
    /// Takes `bytes` bytes more from `room`; false if fewer are left.
    pub fn take(&mut self, room: &Room, bytes: usize) -> bool {
        let enough = room.bytes() + bytes <= room.0.most && room.0.account.take(bytes);
        if enough {
            self.add(room, bytes);
        }
        enough
    }

    /// Takes `bytes` bytes more from the room that it already has bytes of; false if fewer are left. Does nothing if it
    /// has no bytes of a room.
    pub fn more(&mut self, bytes: usize) -> bool {
        self.room.clone().is_none_or(|room| self.take(&room, bytes))
    }

    /// As [`Taken::take`]; false also if it would then have more than half of the bytes that all others leave. So an
    /// object that takes all that it can leaves something to every other one.
    pub fn take_part(&mut self, room: &Room, bytes: usize) -> bool {
        let others = room.bytes().saturating_sub(self.bytes);
        self.bytes + bytes <= room.0.most.saturating_sub(others) / 2 && self.take(room, bytes)
    }

    /// As [`Taken::take`], even if fewer bytes are left.
    pub fn force(&mut self, room: &Room, bytes: usize) {
        room.0.account.force(bytes);
        self.add(room, bytes);
    }

    fn add(&mut self, room: &Room, bytes: usize) {
        if self.bytes == 0 {
            self.room = Some(room.clone());
        }
        room.0.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.bytes += bytes;
    }

    /// The number of bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Gives `bytes` bytes back.
    pub fn give(&mut self, bytes: usize) {
        if let Some(room) = self.room.as_ref().filter(|_| bytes > 0) {
            room.0.bytes.fetch_sub(bytes, Ordering::Relaxed);
            room.0.account.give(bytes);
        }
        self.bytes -= bytes;
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.give(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An account of 1000 bytes.
    #[derive(Default)]
    struct Thousand(AtomicUsize);

    impl Account for Thousand {
        fn take(&self, bytes: usize) -> bool {
            let enough = self.0.load(Ordering::Relaxed) + bytes <= 1000;
            enough.then(|| self.force(bytes)).is_some()
        }

        fn force(&self, bytes: usize) {
            self.0.fetch_add(bytes, Ordering::Relaxed);
        }

        fn give(&self, bytes: usize) {
            self.0.fetch_sub(bytes, Ordering::Relaxed);
        }
    }

    #[test]
    fn what_is_kept_is_on_the_account_until_it_is_dropped() {
        let account = Arc::new(Thousand::default());
        let shared: Arc<dyn Account> = account.clone();
        let rooms = Rooms::new(&shared);
        let [mut a, mut b, mut c] = [(); 3].map(|()| Taken::default());
        assert!(a.take(&rooms.jobs, 600) && b.take(&rooms.datagrams, 300) && !c.take(&rooms.jobs, 101));
        c.force(&rooms.others, 400);
        assert_eq!((account.0.load(Ordering::Relaxed), c.bytes()), (1300, 400));
        a.give(500);
        drop((b, c));
        assert_eq!(account.0.load(Ordering::Relaxed), 100);
        drop(a);
        assert_eq!(account.0.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn room_is_given_back_however_its_part_ends() {
        let room = Rooms::default().jobs;
        let (mut a, mut b) = (Taken::default(), Taken::default());
        assert!(a.take(&room, JOB_BYTES - 10) && b.take(&room, 10));
        assert!(!b.take(&room, 1) && !a.take(&room, 1));
        b.give(4);
        assert!(a.take(&room, 4));
        a.force(&room, 100);
        drop(a);
        assert!(b.take(&room, JOB_BYTES - 6) && !b.take(&room, 1));
        drop(b);
        assert_eq!(room.bytes(), 0);
    }

    #[test]
    fn each_may_have_half_of_what_the_others_leave() {
        let room = Rooms::default().datagrams;
        let mut all: Vec<Taken> = (0..4).map(|_| Taken::default()).collect();
        let most = |t: &mut Taken| {
            while t.take_part(&room, 1 << 10) {}
            t.bytes() * 16 / DATAGRAM_BYTES
        };
        assert_eq!(all.iter_mut().map(most).collect::<Vec<_>>(), [8, 4, 2, 1]);
        all.remove(0);
        assert_eq!(all.iter_mut().map(most).sum::<usize>(), 12);
    }
}
