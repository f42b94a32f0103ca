//! Event virtqueues: the driver fills them with buffers, the device writes one event into each.
//!
//! One call for each event, so that a driver may count them with a semaphore eventfd. An event that
//! finds no buffer waits, in order, up to a bound; a driver that never gives buffers loses its own
//! events and nothing else.

use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::Mutex;

use unirdma_abi as abi;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestMemoryMmap};
use zerocopy::IntoBytes;

use crate::lock;

/// Most events that wait for buffers on one queue.
const MAX_PENDING: usize = 65_536;

#[derive(Default)]
struct EventQueue {
    queue: Option<Queue>,
    call: Option<OwnedFd>,
    pending: VecDeque<abi::Event>,
}

#[derive(Default)]
struct Inner {
    guest: Option<GuestMemoryMmap>,
    queues: HashMap<u16, EventQueue>,
}

/// The event queues of a session. Shared by the threads that drain the RNIC's outputs.
#[derive(Default)]
pub struct EventQueues(Mutex<Inner>);

/// Adds one to an eventfd. A counter that is full has been signaled anyway; its owner may have made it
/// blocking meanwhile, so that is undone first.
pub(crate) fn signal(fd: &OwnedFd) {
    let _ = rustix::fs::fcntl_setfl(fd, rustix::fs::OFlags::NONBLOCK);
    let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
}

impl EventQueue {
    fn flush(&mut self, guest: &GuestMemoryMmap) {
        let Some(queue) = &mut self.queue else { return };
        while !self.pending.is_empty() {
            let Some(chain) = queue.pop_descriptor_chain(guest) else { break };
            let head = chain.head_index();
            let fits = chain.writable().next().filter(|d| d.len() as usize >= size_of::<abi::Event>());
            // A buffer that is too small is given back unused and costs its event nothing.
            let wrote = fits.is_some_and(|d| guest.write_slice(self.pending[0].as_bytes(), d.addr()).is_ok());
            let len = if wrote { size_of::<abi::Event>() as u32 } else { 0 };
            if queue.add_used(guest, head, len).is_err() {
                break;
            }
            if wrote {
                self.pending.pop_front();
            }
            if let Some(call) = &self.call {
                signal(call);
            }
        }
    }
}

impl EventQueues {
    /// Delivers an event on virtqueue `index`, or keeps it until there is a buffer.
    pub fn deliver(&self, index: u16, event: abi::Event) {
        let inner = &mut *lock(&self.0);
        let q = inner.queues.entry(index).or_default();
        if q.pending.len() < MAX_PENDING {
            q.pending.push_back(event);
        }
        if let Some(guest) = &inner.guest {
            q.flush(guest);
        }
    }

    /// The driver gave buffers.
    pub fn on_kick(&self, index: u16) {
        let inner = &mut *lock(&self.0);
        if let (Some(guest), Some(q)) = (&inner.guest, inner.queues.get_mut(&index)) {
            q.flush(guest);
        }
    }

    pub(crate) fn set_memory(&self, guest: Option<GuestMemoryMmap>) {
        lock(&self.0).guest = guest;
    }

    pub(crate) fn set_queue(&self, index: u16, queue: Option<Queue>, call: Option<OwnedFd>) {
        let inner = &mut *lock(&self.0);
        let q = inner.queues.entry(index).or_default();
        q.call = call;
        if q.queue.is_none() || queue.is_none() {
            q.queue = queue;
        }
        if let Some(guest) = &inner.guest {
            q.flush(guest);
        }
    }

    pub(crate) fn stop(&self, index: u16) -> u16 {
        lock(&self.0).queues.remove(&index).and_then(|q| q.queue).map_or(0, |q| q.next_avail())
    }

    pub(crate) fn clear(&self) {
        lock(&self.0).queues.clear();
    }
}
