//! The network interface that a virtual machine has beside its vRNIC: a virtio network device, whose frames come from and go to the
//! Ethernet switch of the vRNIC's group.
//!
//! It offers no offload: a frame is one chain of descriptors, behind a header of 12 bytes (virtio 1.3, 5.1.6) that says nothing.

use std::io::{Read, Write};
use std::sync::{Arc, Mutex};

use unirdma_link::{Foreign, Handler, Memory, Vring};
use unirdma_mem::protocol;
use virtio_queue::{Queue, QueueT};
use vm_memory::{GuestAddress, GuestMemoryMmap};

use crate::{AvailFlags, Full, LogLimit, lock, make_queue, now_ns};

/// The virtqueue by which the driver gets frames, and the one by which it sends them.
pub const NET_RX: usize = 0;
/// As [`NET_RX`].
pub const NET_TX: usize = 1;
/// `VIRTIO_NET_F_MTU`: the frontend may tell its driver an MTU.
const F_MTU: u64 = 1 << 3;
/// Bytes of the header before each frame.
const HEADER: usize = 12;

#[derive(Default)]
struct Ring {
    queue: Option<Queue>,
    call: Option<Arc<Foreign>>,
}

impl Ring {
    /// Gives a chain back, with so many bytes in it.
    fn end(&mut self, guest: &GuestMemoryMmap, head: u16, bytes: usize) {
        let Some(queue) = &mut self.queue else { return };
        let _ = queue.add_used(guest, head, bytes as u32);
        let flags = AvailFlags { guest, addr: GuestAddress(queue.avail_ring()) };
        if let Some(call) = self.call.as_ref().filter(|_| protocol::must_notify(&Full, &flags)) {
            unirdma_link::signal(call.as_ref());
        }
    }
}

#[derive(Default)]
struct Inner {
    /// What `guest` is a view of, and no more than that.
    memory: Memory,
    guest: Option<GuestMemoryMmap>,
    rings: [Ring; 2],
}

/// The interface. The control thread sets it up, and the switch moves its frames.
#[derive(Default)]
pub struct NetDevice(Mutex<Inner>);

impl NetDevice {
    /// Hands a frame to the driver. Without a buffer that is long enough it is dropped, as a wire would.
    pub fn send(&self, frame: &[u8]) {
        let Inner { guest, rings, .. } = &mut *lock(&self.0);
        let (Some(guest), ring) = (guest, &mut rings[NET_RX]) else { return };
        let Some(chain) = ring.queue.as_mut().and_then(|q| q.pop_descriptor_chain(&*guest)) else { return };
        let head = chain.head_index();
        let mut header = [0; HEADER];
        // One buffer, for drivers that count them.
        header[10] = 1;
        let put = |mut w: virtio_queue::Writer<'_>| {
            let fits = w.available_bytes() >= HEADER + frame.len();
            fits && w.write_all(&header).is_ok() && w.write_all(frame).is_ok()
        };
        let put = chain.writer(&*guest).is_ok_and(put);
        ring.end(guest, head, if put { HEADER + frame.len() } else { 0 });
    }

    /// Takes the next frame that the driver sends; the bytes that it has put into `frame`. One that is too long, or has no header, is
    /// empty.
    pub fn receive(&self, frame: &mut [u8]) -> Option<usize> {
        let Inner { guest, rings, .. } = &mut *lock(&self.0);
        let (Some(guest), ring) = (guest, &mut rings[NET_TX]) else { return None };
        let chain = ring.queue.as_mut()?.pop_descriptor_chain(&*guest)?;
        let head = chain.head_index();
        let take = |mut r: virtio_queue::Reader<'_>| {
            let n = r.available_bytes().checked_sub(HEADER).filter(|&n| n <= frame.len())?;
            r.read_exact(&mut [0; HEADER]).ok()?;
            r.read_exact(&mut frame[..n]).ok()?;
            Some(n)
        };
        let n = chain.reader(&*guest).ok().and_then(take).unwrap_or(0);
        ring.end(guest, head, 0);
        Some(n)
    }
}

/// The frontend of an interface, a VMM, as the link sees it. The kick descriptors of vrings that have changed are kept for whoever
/// watches them.
pub struct NetFrontend {
    /// The interface.
    pub device: Arc<NetDevice>,
    /// The kick descriptor by which the driver says that it sends; `None`: it has none any more.
    pub changed: Option<Option<Arc<Foreign>>>,
    /// The vRNIC's name, for the log.
    pub vrnic: String,
    /// What it causes in the log.
    pub log: Arc<LogLimit>,
}

impl NetFrontend {
    /// Starts a vring, or stops it; where it had got to if it was started.
    fn set(&mut self, index: usize, v: Option<&Vring>) -> Option<u16> {
        if index == NET_TX {
            self.changed = Some(v.and_then(|v| v.kick.clone()));
        }
        let inner = &mut *lock(&self.device.0);
        let ring = inner.rings.get_mut(index)?;
        let Some(v) = v else { return std::mem::take(ring).queue.map(|q| q.next_avail()) };
        ring.call = v.call.clone();
        if ring.queue.is_none() || !v.enabled {
            ring.queue = inner.guest.as_ref().and_then(|guest| make_queue(v, guest));
        }
        None
    }
}

impl Handler for NetFrontend {
    fn features(&self) -> u64 {
        F_MTU
    }
    /// It has none: a VMM gives its driver MAC and MTU by itself.
    fn config(&self) -> Vec<u8> {
        Vec::new()
    }
    fn memory_changed(&mut self, memory: &Memory, _: &[u64]) {
        let inner = &mut *lock(&self.device.0);
        (inner.guest, inner.memory) = (memory.guest(), memory.clone());
    }
    fn vring_changed(&mut self, index: usize, v: &Vring) {
        self.set(index, Some(v));
    }
    fn stop_vring(&mut self, index: usize) -> Option<u16> {
        self.set(index, None)
    }
    fn reset(&mut self) {
        self.set(NET_RX, None);
        self.set(NET_TX, None);
    }
    fn refused(&self, request: u32, why: &str) {
        if let Some(left_out) = self.log.next(now_ns()) {
            tracing::warn!(vrnic = %self.vrnic, request, why, left_out, "vhost-user request of a network interface refused");
        }
    }
}
