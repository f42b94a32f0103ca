//! The driver half of a split virtqueue (virtio 1.3, section 2.7), over a [`Span`].
//!
//! Each slot is one chain of descriptors that its caller describes anew each time; there are as many
//! chains in flight as the caller keeps track of. Neither event suppression nor indirect descriptors.

use std::sync::atomic::{Ordering, fence};

use unirdma_mem::Span;

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

    /// Descriptors.
    pub fn size(&self) -> u16 {
        self.size
    }

    /// Publishes a chain whose descriptors are `head`, `head + 1`, ... Kick the device afterwards.
    ///
    /// # Panics
    /// If the chain leaves the table.
    pub fn publish(&mut self, head: u16, chain: &[Segment]) {
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
        fence(Ordering::Release);
        self.mem.write(avail + 2, &self.next_avail.to_le_bytes());
        fence(Ordering::SeqCst);
    }

    /// The next chain that the device has used: its head and the bytes written.
    pub fn pop_used(&mut self) -> Option<(u16, u32)> {
        let used = Self::used_off(self.size);
        let mut idx = [0; 2];
        self.mem.read(used + 2, &mut idx);
        if u16::from_le_bytes(idx) == self.last_used {
            return None;
        }
        fence(Ordering::Acquire);
        let at = used + 4 + 8 * usize::from(self.last_used % self.size);
        let (id, len): (u32, u32) = {
            let e: [u32; 2] = self.mem.read_obj(at);
            (e[0], e[1])
        };
        self.last_used = self.last_used.wrapping_add(1);
        Some((id as u16, len))
    }
}
