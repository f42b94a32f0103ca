//! A virtual machine's network interface: a virtio network device whose frames come from, and go to, the Ethernet
//! switch of its vRNIC's group.
//!
//! It offers no offloads. A frame is one descriptor chain that begins with a 12-byte header (virtio 1.3, 5.1.6), whose
//! fields are unused.

use std::io::{Read, Write};
use std::sync::{Arc, Mutex};

use unirdma_link::{BlockingFd, Handler, Memory, Vring};
use unirdma_mem::protocol;
use virtio_queue::{Queue, QueueT};
use vm_memory::{GuestAddress, GuestMemoryMmap};

use crate::{AvailFlags, Full, LogLimit, lock, make_queue, now_ns};

/// Receive virtqueue: carries frames to the driver.
pub const NET_RX: usize = 0;
/// Transmit virtqueue: carries frames from the driver.
pub const NET_TX: usize = 1;
/// `VIRTIO_NET_F_MTU`: the frontend may tell its driver an MTU.
const F_MTU: u64 = 1 << 3;
/// Bytes of the header before each frame.
const HEADER: usize = 12;

#[derive(Default)]
struct Ring {
    queue: Option<Queue>,
    call: Option<Arc<BlockingFd>>,
}

impl Ring {
    /// Returns a chain to the driver, with `bytes` bytes written.
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
    /// Owns the regions that `guest` is a view of. Not used otherwise.
    memory: Memory,
    guest: Option<GuestMemoryMmap>,
    rings: [Ring; 2],
}

/// The network device. The control thread sets it up, and the switch moves its frames.
#[derive(Default)]
pub struct NetDevice(Mutex<Inner>);

impl NetDevice {
    /// Hands a frame to the driver. If no buffer is long enough, the frame is dropped, as on a wire.
    pub fn send(&self, frame: &[u8]) {
        let Inner { guest, rings, .. } = &mut *lock(&self.0);
        let (Some(guest), ring) = (guest, &mut rings[NET_RX]) else { return };
        let Some(chain) = ring.queue.as_mut().and_then(|q| q.pop_descriptor_chain(&*guest)) else { return };
        let head = chain.head_index();
        let mut header = [0; HEADER];
        // num_buffers = 1, for drivers that read it.
        header[10] = 1;
        let put = |mut w: virtio_queue::Writer<'_>| {
            let fits = w.available_bytes() >= HEADER + frame.len();
            fits && w.write_all(&header).is_ok() && w.write_all(frame).is_ok()
        };
        let put = chain.writer(&*guest).is_ok_and(put);
        ring.end(guest, head, if put { HEADER + frame.len() } else { 0 });
    }

    /// Takes the driver's next frame into `frame`, and returns its length. A frame that is too long or has no header
    /// gives 0.
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

/// The frontend of an interface (a VMM), as seen by the link. Changed kick descriptors are kept in `changed` until the
/// thread that watches them takes them.
pub struct NetFrontend {
    /// The interface.
    pub device: Arc<NetDevice>,
    /// New kick descriptor of the transmit vring, if it has changed; `Some(None)` if there is none any more.
    pub changed: Option<Option<Arc<BlockingFd>>>,
    /// The vRNIC's name, for the log.
    pub vrnic: String,
    /// Limit on the log lines that it causes.
    pub log: Arc<LogLimit>,
}

impl NetFrontend {
    /// Starts vring `index`, or stops it if `v` is `None`, and then returns the index that it had got to.
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
    /// Empty: a VMM passes MAC and MTU to the driver itself.
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
