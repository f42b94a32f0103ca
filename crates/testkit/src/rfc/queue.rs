//! Virtqueues of the driver, and completion queues.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use unirdma_abi::rfc;
use unirdma_link::{DriverQueue, Segment};
use unirdma_mem::Span;
use zerocopy::FromBytes;

use super::{BUS, PAGE};

/// Longest time to wait for an answer: the machine may be busy with other work.
const PATIENCE: Duration = Duration::from_secs(20);
/// Bytes of a completion.
pub(super) const CQE_ROOM: u32 = size_of::<rfc::Cqe>() as u32;

fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("eventfd")
}

/// A virtqueue with a buffer for each of its chains.
pub struct Virtqueue {
    /// Index of the virtqueue.
    pub index: u32,
    /// The driver's half.
    pub queue: DriverQueue,
    memory: Span,
    /// Bus address of the buffers.
    buffers: u64,
    room: u32,
    free: Vec<u16>,
    pub(super) kick: OwnedFd,
    pub(super) call: OwnedFd,
}

impl Virtqueue {
    /// Bus address of the buffer of a chain.
    pub fn buffer(&self, head: u16) -> u64 {
        self.buffers + u64::from(head) * u64::from(self.room)
    }

    /// Kicks the device.
    pub fn kick(&self) {
        let _ = rustix::io::write(&self.kick, &1u64.to_ne_bytes());
    }

    /// True if the device has called since the last call of this function.
    pub fn was_called(&self) -> bool {
        rustix::io::read(&self.call, &mut [0; 8]).is_ok()
    }

    /// Takes back the chains that the device has used. Returns the number of bytes that it wrote into each.
    pub fn reclaim(&mut self) -> Vec<u32> {
        let mut lens = Vec::new();
        while let Some((head, len)) = self.queue.pop_used() {
            self.free.push(head);
            lens.push(len);
        }
        lens
    }

    /// Number of chains that the device does not have.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Publishes bytes as one descriptor that the device reads. False if the device has all chains.
    pub fn post(&mut self, bytes: &[u8]) -> bool {
        self.reclaim();
        let Some(head) = self.free.pop() else { return false };
        let at = self.buffer(head);
        self.memory.write((at - BUS) as usize, bytes);
        self.publish(head, &[Segment { addr: at, len: bytes.len() as u32, write: false }]);
        true
    }

    /// Publishes any chain that begins at descriptor `head`.
    pub fn publish(&mut self, head: u16, chain: &[Segment]) {
        if self.queue.publish(head, chain) {
            self.kick();
        }
    }

    /// Takes a free chain, which the caller publishes.
    pub fn take_free(&mut self) -> Option<u16> {
        self.free.pop()
    }

    /// Publishes all free chains as buffers that the device writes, `len` bytes each.
    pub fn fill(&mut self, len: u32) {
        for head in std::mem::take(&mut self.free) {
            let addr = self.buffer(head);
            self.publish(head, &[Segment { addr, len, write: true }]);
        }
    }
}

/// A completion queue.
pub struct RfcCq {
    /// Number of the CQ.
    pub cqn: u32,
    /// Its virtqueue.
    pub vq: Virtqueue,
}

impl RfcCq {
    /// Takes the next completion, if there is one, and returns its buffer to the device.
    pub fn poll(&mut self) -> Option<rfc::Cqe> {
        let cqe = self.take()?;
        self.vq.fill(CQE_ROOM);
        Some(cqe)
    }

    /// As [`RfcCq::poll`], but keeps the buffer.
    pub fn take(&mut self) -> Option<rfc::Cqe> {
        let (head, len) = self.vq.queue.pop_used()?;
        assert_eq!(len, CQE_ROOM, "a completion has {CQE_ROOM} bytes");
        self.vq.free.push(head);
        let mut bytes = [0; CQE_ROOM as usize];
        self.vq.memory.read((self.vq.buffer(head) - BUS) as usize, &mut bytes);
        rfc::Cqe::read_from_bytes(&bytes).ok()
    }

    /// Waits for the next completion.
    ///
    /// # Panics
    /// If none comes.
    pub fn wait(&mut self) -> rfc::Cqe {
        wait_for("a completion", || self.poll())
    }

    /// Waits a moment and checks that no completion arrives.
    ///
    /// # Panics
    /// If a completion arrives.
    pub fn stays_empty(&mut self) {
        std::thread::sleep(Duration::from_millis(20));
        let got = self.poll();
        assert!(got.is_none(), "{got:?}");
    }
}

/// Waits until `f` returns something.
///
/// # Panics
/// If it never does.
pub fn wait_for<T>(what: &str, mut f: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(t) = f() {
            return t;
        }
        assert!(began.elapsed() < PATIENCE, "waiting for {what}");
        std::thread::yield_now();
    }
}

/// A virtqueue of `chains` chains with `room` bytes each, at offset `used` of the memory. Advances `used`.
pub(super) fn new_queue(memory: &Span, used: &mut usize, index: u32, chains: u16, room: u32) -> Virtqueue {
    let rings = DriverQueue::bytes(chains).next_multiple_of(PAGE as usize);
    let buffers = (usize::from(chains) * room as usize).next_multiple_of(PAGE as usize);
    let at = *used;
    *used += rings + buffers;
    let window = memory.sub(at as u64, rings as u64).expect("the driver's memory is used up");
    let queue = DriverQueue::new(window, chains);
    Virtqueue {
        index,
        queue,
        memory: memory.clone(),
        buffers: BUS + (at + rings) as u64,
        room,
        free: (0..chains).rev().collect(),
        kick: event(),
        call: event(),
    }
}
