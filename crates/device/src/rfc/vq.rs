//! The device's half of one data virtqueue of the RFC mode.
//!
//! Chains of an SQ or RQ are taken when their WQE is copied, and returned in order when the RNIC has finished the WQE.
//! A chain of a CQ is taken and returned when there is a completion for it.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use unirdma_link::{BlockingFd, signal};
use unirdma_mem::protocol;
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{GuestAddress, GuestMemoryMmap};

use crate::{AvailFlags, Full};

/// Most buffers of a CQ that are skipped as too small before the others get a turn.
const MAX_SMALL: u32 = 32;

/// Content of a chain of an SQ or RQ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Taken {
    /// The number of bytes that were copied into the buffer.
    Bytes(usize),
    /// The chain is longer than any WQE, or has memory outside the session, or a part that is writable for the device.
    Bad,
}

#[derive(Default)]
pub(super) struct Vq {
    queue: Option<Queue>,
    call: Option<Arc<BlockingFd>>,
    /// Chains that were taken and not returned, with the numbers of their WQEs.
    heads: VecDeque<(u16, u32)>,
    /// Index at which the queue was stopped. If it is started there again, its chains still belong to the device.
    stopped_at: Option<u16>,
    /// The queue is served without kicks.
    pub active: bool,
    /// Kicks are suppressed.
    quiet: bool,
}

impl Vq {
    /// Called when the driver has set up or changed the queue. `base` is its first index.
    pub fn set(&mut self, queue: Option<Queue>, base: u16, call: Option<Arc<BlockingFd>>, guest: &GuestMemoryMmap) {
        self.call = call;
        if self.queue.is_some() && queue.is_some() {
            return;
        }
        self.queue = queue;
        self.quiet = false;
        let Some(q) = &mut self.queue else { return };
        if self.stopped_at.take() != Some(base) {
            self.heads.clear();
        }
        // Chains that still belong to the device were taken before index `base`, and are not in the used ring yet.
        if let Ok(used) = q.used_idx(guest, Ordering::Acquire) {
            q.set_next_used(used.0);
        }
    }

    /// Stops the queue; returns the index from which it goes on.
    pub fn stop(&mut self, guest: Option<&GuestMemoryMmap>) -> Option<u16> {
        self.active = false;
        // Kicks are enabled, since the next server of the queue may wait for them.
        guest.into_iter().for_each(|guest| _ = self.listen(guest));
        let at = self.queue.take()?.next_avail();
        self.stopped_at = Some(at);
        Some(at)
    }

    /// Takes a chain that the device reads, for WQE `number`, and copies its bytes once; `None` if there is no chain.
    pub fn take(&mut self, guest: &GuestMemoryMmap, buffer: &mut [u8], number: u32) -> Option<Taken> {
        let chain = self.queue.as_mut()?.pop_descriptor_chain(guest)?;
        self.heads.push_back((chain.head_index(), number));
        let writable = chain.clone().writable().next().is_some();
        let Ok(mut reader) = chain.reader(guest) else { return Some(Taken::Bad) };
        let n = reader.available_bytes();
        let whole = !writable && buffer.get_mut(..n).is_some_and(|b| reader.read_exact(b).is_ok());
        Some(if whole { Taken::Bytes(n) } else { Taken::Bad })
    }

    /// Returns the chains of WQEs with numbers before `end`.
    pub fn give_back(&mut self, guest: &GuestMemoryMmap, end: u32) {
        let Some(q) = &mut self.queue else { return };
        let mut any = false;
        // Numbers wrap around.
        while let Some(&(head, number)) = self.heads.front()
            && (end.wrapping_sub(number) as i32) > 0
        {
            self.heads.pop_front();
            any |= q.add_used(guest, head, 0).is_ok();
        }
        if any {
            self.call(guest);
        }
    }

    /// Returns all chains unused, those that were taken as well as those in the available ring.
    pub fn give_all_back(&mut self, guest: Option<&GuestMemoryMmap>) {
        if let (Some(guest), Some(q)) = (guest, &mut self.queue) {
            for (head, _) in self.heads.drain(..) {
                let _ = q.add_used(guest, head, 0);
            }
            for _ in 0..q.size() {
                let Some(chain) = q.pop_descriptor_chain(guest) else { break };
                let _ = q.add_used(guest, chain.head_index(), 0);
            }
            self.call(guest);
        }
        self.heads.clear();
    }

    /// Writes the value of `next` into the next buffer of a CQ. Buffers with less than `N` bytes are returned unused.
    /// `None` if there is no buffer, or after [`MAX_SMALL`] of them; otherwise, whether `next` had a value.
    pub fn put<const N: usize>(
        &mut self,
        guest: &GuestMemoryMmap,
        next: impl FnOnce() -> Option<[u8; N]>,
    ) -> Option<bool> {
        let q = self.queue.as_mut()?;
        for _ in 0..MAX_SMALL {
            let chain = q.pop_descriptor_chain(guest)?;
            let head = chain.head_index();
            let Some(mut writer) = chain.writer(guest).ok().filter(|w| w.available_bytes() >= N) else {
                let _ = q.add_used(guest, head, 0);
                continue;
            };
            let Some(bytes) = next() else {
                q.go_to_previous_position();
                return Some(false);
            };
            let _ = writer.write_all(&bytes);
            let _ = q.add_used(guest, head, N as u32);
            return Some(true);
        }
        None
    }

    /// Calls the driver, unless it suppresses calls.
    pub fn call(&self, guest: &GuestMemoryMmap) {
        let (Some(q), Some(call)) = (&self.queue, &self.call) else { return };
        let flags = AvailFlags { guest, addr: GuestAddress(q.avail_ring()) };
        if protocol::must_notify(&Full, &flags) {
            signal(call.as_ref());
        }
    }

    /// Suppresses kicks from now on.
    pub fn be_quiet(&mut self, guest: &GuestMemoryMmap) {
        if let Some(q) = self.queue.as_mut().filter(|_| !self.quiet) {
            self.quiet = q.disable_notification(guest).is_ok();
        }
    }

    /// Enables kicks again; false if chains wait already.
    pub fn listen(&mut self, guest: &GuestMemoryMmap) -> bool {
        self.quiet = false;
        self.queue.as_mut().is_none_or(|q| !q.enable_notification(guest).unwrap_or(false))
    }
}
