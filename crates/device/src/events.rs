//! Delivery of events to a driver: by event virtqueues, which the driver fills with buffers, or by channels, which are
//! sockets.
//!
//! On a virtqueue there is one call for each event, so that a driver may count events with a semaphore eventfd. On a
//! channel each event is one message. Events for which there is no room wait in order, up to a bound; a driver that
//! never makes room loses its own events and nothing else.

use std::collections::{HashMap, VecDeque};
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};

use rustix::event::{PollFd, PollFlags};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, recvmsg};
use unirdma_abi as abi;
use unirdma_link::{BlockingFd, ChannelError, Kept, Ledger, Ticket, signal};
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestMemoryMmap};
use zerocopy::{FromBytes, IntoBytes};

use crate::lock;
use crate::rfc::Rfc;

/// Most events that may wait for room on one queue, unless its vRNIC may have more CQs or QPs than this: then their
/// number, because each CQ or QP has one event that its driver cannot do without. A session may have twice as many.
const MAX_PENDING: usize = 16_384;
/// Bytes charged to the account for a waiting event. A `VecDeque` may have room for twice as many events as it holds.
const PENDING_BYTES: u64 = 2 * size_of::<abi::Event>() as u64;
/// Most event slots that an empty queue keeps allocated.
const SPARE_PENDING: usize = 64;

/// Most descriptors of one message on a socket (`SCM_MAX_FD` of the kernel).
const MAX_DESCRIPTORS: usize = 253;

/// Callback that arranges for [`EventQueues::on_room`] to be called once the other end of a socket is closed and, if
/// the flag is true, once the socket can be written to.
pub type OnRoom = Box<dyn Fn(BorrowedFd<'_>, bool) + Send>;

/// The device's end of an event channel. The driver's end is another file, so its file flags and buffer sizes do not
/// apply here.
struct Channel {
    fd: OwnedFd,
    on_room: OnRoom,
    /// The socket is full, and `on_room` was called.
    full: bool,
    _ticket: Ticket,
}

#[derive(Default)]
struct EventQueue {
    channel: Option<Channel>,
    queue: Option<Queue>,
    call: Option<Arc<BlockingFd>>,
    pending: VecDeque<abi::Event>,
}

struct Inner {
    guest: Option<GuestMemoryMmap>,
    /// By virtqueue index. Completion event queues that have only a channel have higher indices.
    queues: HashMap<u32, EventQueue>,
    /// Events that wait on all queues.
    pending: usize,
    /// Account charge for the waiting events.
    kept: Kept,
    /// Most events that may wait on one queue.
    most: usize,
    /// Channels that were closed, with their queues, while a thread of the driver's program may still wait on the other
    /// end. As with a kernel device, such a thread keeps waiting, so this end stays open as long as the other one.
    closing: Vec<(u32, Channel)>,
}

/// The event queues of a session. Shared by the threads that drain the RNIC's outputs.
pub struct EventQueues {
    inner: Mutex<Inner>,
    /// Set in the RFC mode, which has no events and uses its own virtqueues.
    rfc: Option<Rfc>,
}

/// Sends a notification on a channel that carries no events. If the channel is full, a notification is pending already.
pub(crate) fn tell(channel: &BlockingFd) {
    let _ = rustix::net::send(channel, &[1], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
}

/// Takes all notifications from a channel that carries no events.
///
/// Returns the descriptors that arrived with them, which the caller has to dispose of.
pub fn take_notifications(channel: &BlockingFd) -> Vec<BlockingFd> {
    let mut came = Vec::new();
    let Some(ledger) = channel.ledger().filter(|l| !l.is_overdrawn()) else { return came };
    // Room for all descriptors that a message can carry. The kernel would close any others here and now.
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    // A driver that sends more than 256 bytes at once leaves a rest, which is read with its next notification.
    let _ = recvmsg(channel, &mut [IoSliceMut::new(&mut [0; 256])], &mut control, flags);
    for m in control.drain() {
        if let RecvAncillaryMessage::ScmRights(fds) = m {
            came.extend(fds.map(|fd| BlockingFd::refused(fd, ledger)));
        }
    }
    came
}

/// The index of an event queue by the number of its channel; `None` if there is no such channel.
pub fn queue_of_channel(number: u32) -> Option<u32> {
    match number {
        abi::CHANNEL_ASYNC => Some(abi::VQ_ASYNC),
        n if n < abi::MAX_CHANNELS => Some(abi::VQ_COMP_FIRST + n),
        _ => None,
    }
}

impl Channel {
    fn is_hung_up(&self) -> bool {
        let mut fds = [PollFd::new(&self.fd, PollFlags::empty())];
        let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut fds, Some(&now)).is_ok() && fds[0].revents().contains(PollFlags::HUP)
    }

    /// Sends waiting events until the socket is full.
    fn flush(&mut self, pending: &mut VecDeque<abi::Event>) {
        while !self.full
            && let Some(event) = pending.front()
        {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match rustix::net::send(&self.fd, event.as_bytes(), flags) {
                Ok(_) => _ = pending.pop_front(),
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::NOBUFS | rustix::io::Errno::NOMEM) => {
                    self.full = true;
                    (self.on_room)(self.fd.as_fd(), true);
                }
                // The driver has closed its end.
                Err(_) => pending.clear(),
            }
        }
    }
}

impl EventQueue {
    fn flush(&mut self, guest: Option<&GuestMemoryMmap>) {
        if let Some(channel) = &mut self.channel {
            return channel.flush(&mut self.pending);
        }
        let (Some(queue), Some(guest)) = (&mut self.queue, guest) else { return };
        // A driver may supply buffers that are too small as fast as they are taken, so at most one queue's length of
        // them is taken.
        for _ in 0..queue.size() {
            if self.pending.is_empty() {
                break;
            }
            let Some(chain) = queue.pop_descriptor_chain(guest) else { break };
            let head = chain.head_index();
            let fits = chain.writable().next().filter(|d| d.len() as usize >= size_of::<abi::Event>());
            // A buffer that is too small is given back unused. The event stays.
            let wrote = fits.is_some_and(|d| guest.write_slice(self.pending[0].as_bytes(), d.addr()).is_ok());
            let len = if wrote { size_of::<abi::Event>() as u32 } else { 0 };
            if queue.add_used(guest, head, len).is_err() {
                break;
            }
            if wrote {
                self.pending.pop_front();
            }
            if let Some(call) = &self.call {
                signal(call.as_ref());
            }
        }
    }
}

impl Inner {
    /// Applies `f` to a queue, then delivers the events that can be delivered.
    fn change<R>(&mut self, index: u32, f: impl FnOnce(&mut EventQueue) -> R) -> R {
        let q = self.queues.entry(index).or_default();
        let before = q.pending.len();
        let r = f(q);
        q.flush(self.guest.as_ref());
        let after = q.pending.len();
        if after == 0 && q.pending.capacity() > SPARE_PENDING {
            q.pending = VecDeque::new();
        }
        if after != before {
            self.count(self.pending + after - before);
        }
        r
    }

    /// Sets the number of waiting events.
    fn count(&mut self, pending: usize) {
        self.pending = pending;
        self.kept.set(pending as u64 * PENDING_BYTES);
    }

    /// True if `more` further events may wait on a queue. One event may always wait in an otherwise empty session,
    /// because most are delivered at once.
    fn has_room(&self, index: u32, more: usize) -> bool {
        let of_queue = self.queues.get(&index).map_or(0, |q| q.pending.len());
        of_queue + more <= self.most
            && self.pending + more <= 2 * self.most
            && (self.pending == 0 && more == 1 || self.kept.has_room(more as u64 * PENDING_BYTES))
    }

    fn remove(&mut self, index: u32) -> Option<EventQueue> {
        let q = self.queues.remove(&index)?;
        self.count(self.pending - q.pending.len());
        Some(q)
    }
}

impl EventQueues {
    /// The event queues of a session. `config` says how many CQs and QPs the vRNIC may have. Waiting events are charged
    /// to `ledger`.
    pub(crate) fn new(config: &abi::Config, ledger: Ledger) -> Self {
        let inner = Inner {
            guest: None,
            queues: HashMap::new(),
            pending: 0,
            kept: Kept::new(ledger),
            most: MAX_PENDING.max(config.max_cq as usize).max(config.max_qp as usize),
            closing: Vec::new(),
        };
        EventQueues { inner: Mutex::new(inner), rfc: None }
    }

    /// As [`EventQueues::new`], in the RFC mode.
    pub(crate) fn of_rfc(rfc: Rfc, config: &abi::Config, ledger: Ledger) -> Self {
        EventQueues { rfc: Some(rfc), ..EventQueues::new(config, ledger) }
    }

    pub(crate) fn rfc(&self) -> Option<&Rfc> {
        self.rfc.as_ref()
    }

    /// Delivers a completion event of CQ `cqn` on completion event queue `queue`. `asked`: REQ_NOTIFY_CQ has requested
    /// it. Returns true if the control thread has to serve the session.
    pub fn complete(&self, queue: u16, cqn: u32, asked: bool) -> bool {
        if let Some(rfc) = &self.rfc {
            return rfc.complete(queue.into(), asked);
        }
        let event = abi::Event { kind: abi::EVENT_COMPLETION, handle: cqn, reserved: 0 };
        self.deliver(abi::VQ_COMP_FIRST + u32::from(queue), event);
        false
    }

    /// Delivers an event on the queue with virtqueue index `index`, or keeps it until there is room.
    pub fn deliver(&self, index: u32, event: abi::Event) {
        if let Some(rfc) = &self.rfc {
            return rfc.on_event(&event);
        }
        let inner = &mut *lock(&self.inner);
        // A queue without a virtqueue exists only while its channel is open.
        if inner.has_room(index, 1) && (index < abi::NUM_QUEUES || inner.queues.contains_key(&index)) {
            inner.change(index, |q| q.pending.push_back(event));
        }
    }

    /// Called when the driver has supplied buffers. Returns true if the control thread has to serve the session.
    pub fn on_kick(&self, index: u32) -> bool {
        if let Some(rfc) = &self.rfc {
            rfc.on_kick(index as usize);
            return true;
        }
        let inner = &mut *lock(&self.inner);
        if inner.queues.contains_key(&index) {
            inner.change(index, |_| ());
        }
        false
    }

    /// Called when the channel of a queue has room again, or its other end is closed.
    pub fn on_room(&self, index: u32) {
        let inner = &mut *lock(&self.inner);
        inner.closing.retain(|(of, channel)| *of != index || !channel.is_hung_up());
        if inner.queues.get(&index).is_some_and(|q| q.channel.is_some()) {
            inner.change(index, |q| q.channel.iter_mut().for_each(|c| c.full = false));
        }
    }

    /// Gives a queue a channel, which is then used instead of its virtqueue.
    ///
    /// # Errors
    /// The queue has a channel already.
    pub fn open_channel(&self, index: u32, fd: OwnedFd, ticket: Ticket, on_room: OnRoom) -> Result<(), ChannelError> {
        let inner = &mut *lock(&self.inner);
        if inner.queues.get(&index).is_some_and(|q| q.channel.is_some()) {
            return Err(ChannelError::Open);
        }
        inner.change(index, |q| q.channel = Some(Channel { fd, on_room, full: false, _ticket: ticket }));
        Ok(())
    }

    /// Closes the channel of a queue. Events that wait for room are lost.
    ///
    /// # Errors
    /// The queue has no channel.
    pub fn close_channel(&self, index: u32) -> Result<(), ChannelError> {
        let inner = &mut *lock(&self.inner);
        if inner.queues.get(&index).is_none_or(|q| q.channel.is_none()) {
            return Err(ChannelError::NotOpen);
        }
        if let Some(channel) = inner.remove(index).and_then(|q| q.channel) {
            (channel.on_room)(channel.fd.as_fd(), false);
            // The callback is set up before the test, so that an end between the two is not missed.
            if !channel.is_hung_up() {
                inner.closing.push((index, channel));
            }
        }
        Ok(())
    }

    /// Puts events back at the front of a queue.
    ///
    /// # Errors
    /// The queue has no channel, there is no room, or `bytes` is not a whole number of events.
    pub fn give_back(&self, index: u32, bytes: &[u8]) -> Result<(), ChannelError> {
        let size = size_of::<abi::Event>();
        if bytes.len() % size != 0 {
            return Err(ChannelError::PartialEvent);
        }
        let events: Vec<_> = bytes.chunks_exact(size).filter_map(|b| abi::Event::read_from_bytes(b).ok()).collect();
        let inner = &mut *lock(&self.inner);
        if inner.queues.get(&index).is_none_or(|q| q.channel.is_none()) {
            return Err(ChannelError::NotOpen);
        }
        if !inner.has_room(index, events.len()) {
            return Err(ChannelError::Full);
        }
        inner.change(index, |q| events.into_iter().rev().for_each(|e| q.pending.push_front(e)));
        Ok(())
    }

    /// Drops all waiting events: the objects that they concern no longer exist.
    pub(crate) fn forget_waiting(&self) {
        let inner = &mut *lock(&self.inner);
        inner.queues.values_mut().for_each(|q| q.pending = VecDeque::new());
        inner.count(0);
    }

    pub(crate) fn set_memory(&self, guest: Option<GuestMemoryMmap>) {
        if let Some(rfc) = &self.rfc {
            rfc.set_memory(guest.clone());
        }
        lock(&self.inner).guest = guest;
    }

    pub(crate) fn set_queue(&self, index: u32, queue: Option<Queue>, call: Option<Arc<BlockingFd>>) {
        lock(&self.inner).change(index, |q| {
            q.call = call;
            if q.queue.is_none() || queue.is_none() {
                q.queue = queue;
            }
        });
    }

    /// Takes away the virtqueue of a queue; returns its next index, or `None` if the queue has no virtqueue. Waiting
    /// events stay.
    pub(crate) fn stop(&self, index: u32) -> Option<u16> {
        let queue = lock(&self.inner).queues.get_mut(&index)?.queue.take()?;
        Some(queue.next_avail())
    }

    pub(crate) fn clear(&self) {
        let inner = &mut *lock(&self.inner);
        inner.queues.clear();
        inner.closing.clear();
        inner.count(0);
        self.rfc.iter().for_each(Rfc::clear);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    use std::sync::atomic::{AtomicUsize, Ordering};
    use unirdma_link::{KINDS, Resource};

    struct Scene {
        queues: EventQueues,
        driver: OwnedFd,
        asked: Arc<AtomicUsize>,
    }

    const INDEX: u32 = abi::VQ_COMP_FIRST + 40_000;

    fn ticket() -> Ticket {
        Ledger::default().take(Resource::Descriptors, 1).unwrap()
    }

    fn scene() -> Scene {
        scene_of(Ledger::default())
    }

    fn scene_of(ledger: Ledger) -> Scene {
        let (driver, device) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        let asked = Arc::new(AtomicUsize::new(0));
        let count = asked.clone();
        let on_room = Box::new(move |_: BorrowedFd<'_>, _| _ = count.fetch_add(1, Ordering::Relaxed));
        let queues = EventQueues::new(&abi::Config::default(), ledger);
        queues.open_channel(INDEX, device, ticket(), on_room).unwrap();
        Scene { queues, driver, asked }
    }

    fn event(handle: u32) -> abi::Event {
        abi::Event { kind: abi::EVENT_COMPLETION, handle, reserved: 0 }
    }

    impl Scene {
        fn next(&self) -> Option<u32> {
            let mut bytes = [0u8; 64];
            let (n, _) = rustix::net::recv(&self.driver, &mut bytes[..], RecvFlags::DONTWAIT).ok()?;
            Some(abi::Event::read_from_bytes(&bytes[..n]).unwrap().handle)
        }

        fn all(&self) -> Vec<u32> {
            std::iter::from_fn(|| self.next()).collect()
        }
    }

    #[test]
    fn each_event_is_a_message_of_its_channel() {
        let s = scene();
        (0..3).for_each(|i| s.queues.deliver(INDEX, event(i)));
        s.queues.deliver(INDEX + 1, event(9));
        assert_eq!(s.all(), [0, 1, 2]);
        // An event of a queue that does not exist is lost. A channel that is opened later does not get it.
        assert_eq!(lock(&s.queues.inner).pending, 0);
        assert!(!lock(&s.queues.inner).queues.contains_key(&(INDEX + 1)));
    }

    #[test]
    fn events_that_find_no_room_wait_in_order_and_cost_no_system_calls() {
        let s = scene();
        const N: u32 = 5000;
        (0..N).for_each(|i| s.queues.deliver(INDEX, event(i)));
        assert_eq!(s.asked.load(Ordering::Relaxed), 1, "asked once, not for each event");
        let mut got = s.all();
        assert!(!got.is_empty() && got.len() < N as usize, "{} messages fit", got.len());
        while got.len() < N as usize {
            s.queues.on_room(INDEX);
            let more = s.all();
            assert!(!more.is_empty());
            got.extend(more);
        }
        assert!(got.into_iter().eq(0..N));
        assert_eq!(lock(&s.queues.inner).pending, 0);
    }

    #[test]
    fn what_waits_is_bounded_for_a_queue_and_for_a_session() {
        let ledger = Ledger::of_host([u64::MAX; KINDS]).for_vrnic([None; KINDS]);
        let s = scene_of(ledger.clone());
        let used = || ledger.usage(Resource::Kept).0 / PENDING_BYTES;
        (0..MAX_PENDING as u32 + 5000).for_each(|i| s.queues.deliver(INDEX, event(i)));
        assert_eq!((lock(&s.queues.inner).pending, used()), (MAX_PENDING, MAX_PENDING as u64));
        for i in 0..3 * MAX_PENDING as u32 {
            s.queues.deliver(abi::VQ_COMP_FIRST + i % 100, event(i));
        }
        assert_eq!((lock(&s.queues.inner).pending, used()), (2 * MAX_PENDING, 2 * MAX_PENDING as u64));
        assert!(s.queues.give_back(INDEX, event(1).as_bytes()).is_err());
        s.queues.close_channel(INDEX).unwrap();
        assert_eq!(used(), MAX_PENDING as u64);
        s.queues.clear();
        assert_eq!(used(), 0);
    }

    /// Events that a program gives back are charged like events that were not sent yet, and are refused beyond the
    /// account's room.
    #[test]
    fn what_comes_back_and_waits_is_on_the_account() {
        const MOST: u64 = 3000;
        let ledger = Ledger::of_host([2 * MOST * PENDING_BYTES; KINDS]).for_vrnic([None; KINDS]);
        let used = || ledger.usage(Resource::Kept).0 / PENDING_BYTES;
        let s = scene_of(ledger.clone());
        let many = vec![0; 255 * size_of::<abi::Event>()];
        while s.queues.give_back(INDEX, &many).is_ok() {}
        assert!((MOST - 255..=MOST).contains(&used()), "{}", used());
        // As the program reads the waiting events, the account gets its room back.
        while used() > 0 {
            assert!(!s.all().is_empty());
            s.queues.on_room(INDEX);
        }
        assert!(lock(&s.queues.inner).queues[&INDEX].pending.capacity() <= SPARE_PENDING);
    }

    #[test]
    fn events_that_come_back_are_the_next_ones() {
        let s = scene();
        (0..4).for_each(|i| s.queues.deliver(INDEX, event(i)));
        assert_eq!(s.all(), [0, 1, 2, 3]);
        s.queues.give_back(INDEX, [event(1), event(3)].as_bytes()).unwrap();
        s.queues.deliver(INDEX, event(4));
        assert_eq!(s.all(), [1, 3, 4]);
        assert!(s.queues.give_back(INDEX, &[0; 17]).is_err());
        assert!(s.queues.give_back(INDEX + 1, event(1).as_bytes()).is_err());
    }

    #[test]
    fn a_channel_is_opened_and_closed_once() {
        let s = scene();
        let (_driver, device) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        assert!(s.queues.open_channel(INDEX, device, ticket(), Box::new(|_, _| ())).is_err());
        s.queues.close_channel(INDEX).unwrap();
        assert!(s.queues.close_channel(INDEX).is_err());
        // A thread that waits on the channel keeps waiting until the session ends.
        let waits = |s: &Scene| rustix::net::recv(&s.driver, &mut [0u8; 16][..], RecvFlags::DONTWAIT).map(|(n, _)| n);
        assert_eq!(waits(&s), Err(rustix::io::Errno::AGAIN));
        s.queues.on_room(INDEX);
        assert_eq!((lock(&s.queues.inner).closing.len(), waits(&s)), (1, Err(rustix::io::Errno::AGAIN)));
        s.queues.clear();
        assert_eq!(waits(&s), Ok(0));
    }

    #[test]
    fn a_closed_channel_is_forgotten_when_its_driver_has_closed_it() {
        for late in [false, true] {
            let mut s = scene();
            let null = || std::fs::File::open("/dev/null").unwrap().into();
            if !late {
                s.driver = null();
            }
            s.queues.close_channel(INDEX).unwrap();
            assert_eq!(lock(&s.queues.inner).closing.len(), usize::from(late));
            s.driver = null();
            s.queues.on_room(INDEX);
            assert!(lock(&s.queues.inner).closing.is_empty());
        }
    }

    #[test]
    fn a_driver_that_closed_its_end_loses_its_events_only() {
        let mut s = scene();
        s.driver = std::fs::File::open("/dev/null").unwrap().into();
        (0..1000).for_each(|i| s.queues.deliver(INDEX, event(i)));
        assert_eq!(lock(&s.queues.inner).pending, 0);
    }
}
