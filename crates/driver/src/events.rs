//! Event virtqueues, driver side: a descriptor to poll and block on, and one event for each readable unit.

use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{EventfdFlags, epoll, eventfd};
use unirdma_abi as abi;
use unirdma_link::{DriverQueue, Frontend, Segment};

use crate::arena::{Arena, Block};
use crate::{Errno, Result, errno, lock};

/// Buffers of an event queue. More events than these wait in the device.
const SLOTS: u16 = 64;
const EVENT: usize = size_of::<abi::Event>();

/// One event virtqueue.
///
/// Its descriptor is an epoll set over the queue's call eventfd (a semaphore: one unit an event) and over
/// the hang-up of the vhost-user socket. It can be polled, nested in other epoll sets and made
/// non-blocking, as the descriptor of a completion channel must be.
pub struct EventSource {
    index: u32,
    epoll: OwnedFd,
    call: OwnedFd,
    kick: OwnedFd,
    queue: Mutex<Queue>,
    hung_up: AtomicBool,
}

struct Queue {
    used: DriverQueue,
    ring: Block,
    buffers: Block,
    /// Events that were taken from the ring, and are still announced.
    kept: VecDeque<abi::Event>,
}

impl EventSource {
    pub(crate) fn new(index: u32, f: &mut Frontend, arena: &mut Arena) -> Result<Self> {
        let os = |e: rustix::io::Errno| e.raw_os_error();
        let call = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK | EventfdFlags::SEMAPHORE).map_err(os)?;
        let kick = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(os)?;
        let set = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(os)?;
        epoll::add(&set, &call, epoll::EventData::new_u64(0), epoll::EventFlags::IN).map_err(os)?;
        epoll::add(&set, f.socket(), epoll::EventData::new_u64(1), epoll::EventFlags::RDHUP).map_err(os)?;
        let ring = arena.alloc(f, DriverQueue::bytes(SLOTS), 64)?;
        let buffers = arena.alloc(f, EVENT * usize::from(SLOTS), 64)?;
        let mut queue = DriverQueue::new(ring.span.clone(), SLOTS);
        for i in 0..SLOTS {
            queue.publish(i, &[slot(&buffers, i)]);
        }
        let (d, a, u) = queue.addresses();
        f.set_vring(index, SLOTS, d, a, u, kick.as_fd(), call.as_fd()).map_err(|e| errno(&e))?;
        Ok(EventSource {
            index,
            epoll: set,
            call,
            kick,
            queue: Mutex::new(Queue { used: queue, ring, buffers, kept: VecDeque::new() }),
            hung_up: AtomicBool::new(false),
        })
    }

    /// The descriptor to poll.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Index of the virtqueue.
    pub fn index(&self) -> u32 {
        self.index
    }

    /// The next event. Waits for it, unless the descriptor was made non-blocking.
    ///
    /// # Errors
    /// `EAGAIN` if there is none, `EINTR`, `EIO` once the virtual layer is gone.
    pub fn next(&self) -> Result<abi::Event> {
        loop {
            let mut unit = [0; 8];
            match rustix::io::read(&self.call, &mut unit) {
                Ok(_) => {
                    if let Some(e) = self.take() {
                        return Ok(e);
                    }
                    continue;
                }
                Err(rustix::io::Errno::AGAIN) => {}
                Err(e) => return Err(e.raw_os_error()),
            }
            if self.hung_up.load(Ordering::Relaxed) {
                return Err(libc::EIO);
            }
            let nonblocking =
                rustix::fs::fcntl_getfl(&self.epoll).is_ok_and(|f| f.contains(rustix::fs::OFlags::NONBLOCK));
            self.wait(nonblocking)?;
        }
    }

    /// The next event, if there is one.
    pub fn try_next(&self) -> Option<abi::Event> {
        let mut unit = [0; 8];
        rustix::io::read(&self.call, &mut unit).ok()?;
        self.take()
    }

    fn wait(&self, nonblocking: bool) -> Result<()> {
        let mut events = [const { std::mem::MaybeUninit::<epoll::Event>::uninit() }; 2];
        let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
        let (ready, _) =
            epoll::wait(&self.epoll, &mut events, nonblocking.then_some(&now)).map_err(|e| e.raw_os_error())?;
        if ready.iter().any(|e| e.data.u64() == 0) {
            return Ok(());
        }
        if ready.is_empty() {
            return Err(libc::EAGAIN);
        }
        self.hung_up.store(true, Ordering::Relaxed);
        Err(libc::EIO)
    }

    fn take(&self) -> Option<abi::Event> {
        let queue = &mut *lock(&self.queue);
        queue.kept.pop_front().or_else(|| self.pop(queue))
    }

    fn pop(&self, queue: &mut Queue) -> Option<abi::Event> {
        let (head, len) = queue.used.pop_used()?;
        let head = head % SLOTS;
        let event = (len as usize >= EVENT).then(|| queue.buffers.span.read_obj(usize::from(head) * EVENT));
        queue.used.publish(head, &[slot(&queue.buffers, head)]);
        let _ = rustix::io::write(&self.kick, &1u64.to_ne_bytes());
        event
    }

    /// Drops the events that wait and are not to be kept: the descriptor does not announce them any more.
    pub fn retain(&self, keep: impl Fn(&abi::Event) -> bool) {
        let queue = &mut *lock(&self.queue);
        let mut kept = VecDeque::new();
        let mut unit = [0; 8];
        while rustix::io::read(&self.call, &mut unit).is_ok() {
            kept.extend(queue.kept.pop_front().or_else(|| self.pop(queue)).filter(&keep));
        }
        let n = kept.len() as u64;
        kept.append(&mut queue.kept);
        queue.kept = kept;
        if n > 0 {
            let _ = rustix::io::write(&self.call, &n.to_ne_bytes());
        }
    }

    /// Stops watching for the hang-up, so that its one event does not repeat.
    pub(crate) fn forget_socket(&self, socket: BorrowedFd<'_>) {
        let _ = epoll::delete(&self.epoll, socket);
    }

    pub(crate) fn close(self, f: &mut Frontend, arena: &mut Arena) {
        let _: std::result::Result<(), Errno> = f.stop_vring(self.index).map(|_| ()).map_err(|e| errno(&e));
        let queue = self.queue.into_inner().unwrap_or_else(|e| e.into_inner());
        arena.free(queue.ring);
        arena.free(queue.buffers);
    }

    /// The raw descriptor, for the C structures.
    pub fn raw_fd(&self) -> i32 {
        self.epoll.as_raw_fd()
    }
}

fn slot(buffers: &Block, i: u16) -> Segment {
    Segment { addr: buffers.bus + u64::from(i) * EVENT as u64, len: EVENT as u32, write: true }
}
