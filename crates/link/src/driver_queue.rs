//! The driver's side of a split virtqueue (virtio 1.3, section 2.7), over a [`Span`].
//!
//! Each slot is one chain of descriptors, which its caller describes anew each time. The caller keeps track of the
//! chains in flight. The flags of both rings suppress notifications; there are no event indices and no indirect
//! descriptors.

use std::sync::atomic::{Ordering, fence};

use unirdma_mem::Span;
use unirdma_mem::protocol::{self, Fence, Word16};

/// One buffer of a chain.
#[derive(Clone, Copy, Debug)]
pub struct Segment {
    /// Bus address.
    pub addr: u64,
    /// Bytes.
    pub len: u32,
    /// The device writes it.
    pub write: bool,
}

/// A little-endian word of the queue.
struct Word<'a>(&'a Span, usize);

impl Word16 for Word<'_> {
    fn load(&self) -> u16 {
        u16::from_le(self.0.load16(self.1, Ordering::Acquire))
    }
    fn store(&self, v: u16) {
        self.0.store16(self.1, v.to_le(), Ordering::Release);
    }
}

struct Full;

impl Fence for Full {
    fn fence(&self) {
        fence(Ordering::SeqCst);
    }
}

const F_NEXT: u16 = 1;
const F_WRITE: u16 = 2;

/// A split virtqueue, driver side.
pub struct DriverQueue {
    mem: Span,
    size: u16,
    next_avail: u16,
    last_used: u16,
}

impl DriverQueue {
    /// Bytes that a queue of `size` descriptors takes.
    pub fn bytes(size: u16) -> usize {
        Self::used_off(size) + 6 + 8 * usize::from(size)
    }

    fn avail_off(size: u16) -> usize {
        16 * usize::from(size)
    }

    fn used_off(size: u16) -> usize {
        (Self::avail_off(size) + 6 + 2 * usize::from(size)).next_multiple_of(64)
    }

    /// A queue in `mem`, which must be zero and at least [`DriverQueue::bytes`] long.
    ///
    /// # Panics
    /// If it is shorter or `size` is no power of two.
    pub fn new(mem: Span, size: u16) -> Self {
        assert!(size.is_power_of_two() && mem.len() >= Self::bytes(size));
        DriverQueue { mem, size, next_avail: 0, last_used: 0 }
    }

    /// Addresses of the three parts: descriptors, available ring, used ring.
    pub fn addresses(&self) -> (u64, u64, u64) {
        let base = self.mem.addr() as u64;
        (base, base + Self::avail_off(self.size) as u64, base + Self::used_off(self.size) as u64)
    }

    /// Number of descriptors.
    pub fn size(&self) -> u16 {
        self.size
    }

    /// Publishes a chain with the descriptors `head`, `head + 1`, ...; true if the device wants a kick for it. An
    /// unneeded kick does no harm.
    ///
    /// # Panics
    /// If the chain leaves the table.
    pub fn publish(&mut self, head: u16, chain: &[Segment]) -> bool {
        assert!(usize::from(head) + chain.len() <= usize::from(self.size) && !chain.is_empty());
        for (i, s) in chain.iter().enumerate() {
            let at = (usize::from(head) + i) * 16;
            let last = i + 1 == chain.len();
            let flags = if last { 0 } else { F_NEXT } | if s.write { F_WRITE } else { 0 };
            self.mem.write(at, &s.addr.to_le_bytes());
            self.mem.write(at + 8, &s.len.to_le_bytes());
            self.mem.write(at + 12, &flags.to_le_bytes());
            self.mem.write(at + 14, &(head + i as u16 + 1).to_le_bytes());
        }
        let avail = Self::avail_off(self.size);
        let slot = usize::from(self.next_avail % self.size);
        self.mem.write(avail + 4 + 2 * slot, &head.to_le_bytes());
        self.next_avail = self.next_avail.wrapping_add(1);
        let used = Self::used_off(self.size);
        protocol::announce(&Full, &Word(&self.mem, avail + 2), self.next_avail, &Word(&self.mem, used))
    }

    /// Suppresses calls while the caller polls the used ring.
    pub fn be_quiet(&self) {
        Word(&self.mem, Self::avail_off(self.size)).store(protocol::VRING_QUIET);
    }

    /// Enables calls again before the caller sleeps; false if [`Self::pop_used`] has a chain already, and then calls
    /// stay suppressed.
    pub fn listen(&self) -> bool {
        let (avail, used) = (Self::avail_off(self.size), Self::used_off(self.size));
        protocol::listen(&Full, &Word(&self.mem, avail), &Word(&self.mem, used + 2), self.last_used)
    }

    /// The next chain that the device has used: its head and the number of bytes written.
    pub fn pop_used(&mut self) -> Option<(u16, u32)> {
        let used = Self::used_off(self.size);
        if Word(&self.mem, used + 2).load() == self.last_used {
            return None;
        }
        let at = used + 4 + 8 * usize::from(self.last_used % self.size);
        let (id, len): (u32, u32) = {
            let e: [u32; 2] = self.mem.read_obj(at);
            (e[0], e[1])
        };
        self.last_used = self.last_used.wrapping_add(1);
        Some((id as u16, len))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEGMENT: Segment = Segment { addr: 0x1000, len: 8, write: true };

    fn aligned(len: usize) -> Span {
        let s = Span::anonymous(len + 64);
        s.sub((64 - s.addr() as u64 % 64) % 64, len as u64).unwrap()
    }

    /// The device's side: uses the chain that was published last.
    fn serve(mem: &Span, n: u16) {
        let used = DriverQueue::used_off(2);
        let at = used + 4 + 8 * usize::from((n - 1) % 2);
        mem.write(at, &0u32.to_le_bytes());
        mem.write(at + 4, &8u32.to_le_bytes());
        mem.store16(used + 2, n.to_le(), Ordering::Release);
    }

    #[test]
    fn a_device_that_looks_by_itself_is_not_kicked() {
        let mem = aligned(DriverQueue::bytes(2));
        let mut q = DriverQueue::new(mem.clone(), 2);
        assert!(q.publish(0, &[SEGMENT]), "a device that has said nothing wants kicks");
        mem.store16(DriverQueue::used_off(2), protocol::VRING_QUIET, Ordering::Release);
        assert!(!q.publish(0, &[SEGMENT]));
        // Undefined flag bits suppress nothing.
        mem.store16(DriverQueue::used_off(2), !protocol::VRING_QUIET, Ordering::Release);
        assert!(q.publish(0, &[SEGMENT]));
    }

    #[test]
    fn who_sleeps_asks_for_calls_and_looks_once_more() {
        let mem = aligned(DriverQueue::bytes(2));
        let mut q = DriverQueue::new(mem.clone(), 2);
        let flags = || mem.load16(DriverQueue::avail_off(2), Ordering::Acquire);
        q.be_quiet();
        for n in 1..=5 {
            q.publish(0, &[SEGMENT]);
            assert_eq!(flags(), protocol::VRING_QUIET);
            assert!(q.listen(), "there is nothing yet");
            assert_eq!(flags(), 0);
            q.be_quiet();
            serve(&mem, n);
            assert!(!q.listen(), "an answer is there");
            assert_eq!(flags(), protocol::VRING_QUIET);
            assert_eq!(q.pop_used(), Some((0, 8)));
            assert_eq!(q.pop_used(), None);
        }
    }
}
