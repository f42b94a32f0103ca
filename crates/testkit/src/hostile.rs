//! A frontend that sends messages which no correct driver sends.

use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use unirdma_abi as abi;
use unirdma_link::{DriverQueue, Frontend, RegionDesc, Segment};
use unirdma_mem::{MemFd, Span};
use zerocopy::IntoBytes;

/// Bus address of the hostile frontend's only region.
pub const BUS: u64 = 1 << 50;
const SIZE: usize = 4 << 20;
const REQUEST: u64 = 0x1_0000;
const RESPONSE: u64 = 0x2_0000;

/// A session whose control virtqueue takes any bytes, and whose memory can be written directly.
pub struct Hostile {
    /// The link.
    pub frontend: Frontend,
    queue: DriverQueue,
    memfd: MemFd,
    kick: OwnedFd,
    call: OwnedFd,
    wake: OwnedFd,
}

impl Hostile {
    /// Connects and sets up the control virtqueue.
    ///
    /// # Panics
    /// If that fails.
    pub fn new(socket: &Path) -> Self {
        let mut frontend = Frontend::connect(socket).expect("connect");
        let memfd = MemFd::new(c"hostile", SIZE).expect("memfd");
        let user = memfd.span().addr() as u64;
        let d = RegionDesc { bus_addr: BUS, size: SIZE as u64, user_addr: user, mmap_offset: 0 };
        frontend.add_region(d, memfd.fd()).expect("region");
        let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("eventfd");
        let (kick, call, wake) = (event(), event(), event());
        let queue = DriverQueue::new(memfd.span().sub(0, 4096).expect("span"), 4);
        let (desc, avail, used) = queue.addresses();
        frontend.set_call(abi::VQ_CONTROL, call.as_fd()).expect("call");
        frontend.set_kick(abi::VQ_CONTROL, kick.as_fd()).expect("kick");
        frontend.set_vring(abi::VQ_CONTROL, 4, desc, avail, used).expect("vring");
        frontend.set_kick(abi::VQ_WAKE, wake.as_fd()).expect("kick");
        Hostile { frontend, queue, memfd, kick, call, wake }
    }

    /// The memory that is shared with the virtual layer.
    pub fn memory(&self) -> &Span {
        self.memfd.span()
    }

    /// A descriptor of that memory.
    ///
    /// # Panics
    /// If there are no descriptors left.
    pub fn fd(&self) -> OwnedFd {
        self.memfd.fd().try_clone_to_owned().expect("descriptor")
    }

    /// Bus address of byte `off` of it.
    pub fn bus(&self, off: u64) -> u64 {
        BUS + off
    }

    /// Stops the control virtqueue and restarts it where it was, as a VMM does when it pauses its guest.
    ///
    /// # Panics
    /// If that fails.
    pub fn restart_control(&mut self) {
        let base = self.frontend.stop_vring(abi::VQ_CONTROL).expect("stop");
        let (d, a, u) = self.queue.addresses();
        self.frontend.set_call(abi::VQ_CONTROL, self.call.as_fd()).expect("call");
        self.frontend.set_kick(abi::VQ_CONTROL, self.kick.as_fd()).expect("kick");
        self.frontend.set_vring_at(abi::VQ_CONTROL, 4, base, d, a, u).expect("vring");
    }

    /// True if the control virtqueue was called since the last call of this function.
    pub fn was_called(&self) -> bool {
        rustix::io::read(&self.call, &mut [0; 8]).is_ok()
    }

    /// Disables calls of the control virtqueue.
    pub fn be_quiet(&self) {
        self.queue.be_quiet();
    }

    /// Offset of the control virtqueue's available ring in the memory.
    pub fn available_ring(&self) -> usize {
        self.queue.addresses().1 as usize - self.memory().addr()
    }

    /// Kicks the wake virtqueue.
    pub fn wake(&self) {
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Sends any bytes as a control request with `room` bytes for the response. Returns the response, or `None` if
    /// nothing arrives in five seconds.
    pub fn request(&mut self, bytes: &[u8], room: u32) -> Option<Vec<u8>> {
        self.memory().write(REQUEST as usize, bytes);
        let mut chain = Vec::new();
        if !bytes.is_empty() {
            chain.push(Segment { addr: BUS + REQUEST, len: bytes.len() as u32, write: false });
        }
        if room > 0 || chain.is_empty() {
            chain.push(Segment { addr: BUS + RESPONSE, len: room, write: true });
        }
        self.chain(&chain)
    }

    /// Publishes any chain. Returns the bytes that the device wrote where the response belongs.
    pub fn chain(&mut self, chain: &[Segment]) -> Option<Vec<u8>> {
        self.queue.publish(0, chain);
        self.kick();
        self.answer()
    }

    /// Kicks the control virtqueue.
    pub fn kick(&self) {
        let _ = rustix::io::write(&self.kick, &1u64.to_ne_bytes());
    }

    /// As [`Hostile::command`] for a command without data, but kicks only if the device asks for kicks. Returns whether
    /// it kicked, and the status.
    ///
    /// # Panics
    /// If nothing comes back.
    pub fn command_as_asked(&mut self, c: u8) -> (bool, u8) {
        let head = abi::ReqHeader { command: c, ..Default::default() };
        self.memory().write(REQUEST as usize, head.as_bytes());
        let request = Segment { addr: BUS + REQUEST, len: size_of::<abi::ReqHeader>() as u32, write: false };
        let kicked = self.queue.publish(0, &[request, Segment { addr: BUS + RESPONSE, len: 1024, write: true }]);
        if kicked {
            self.kick();
        }
        (kicked, self.answer().expect("an answer")[0])
    }

    fn answer(&mut self) -> Option<Vec<u8>> {
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(5) {
            if let Some((_, len)) = self.queue.pop_used() {
                let mut v = vec![0; len.min(4096) as usize];
                self.memory().read(RESPONSE as usize, &mut v);
                return Some(v);
            }
            std::thread::yield_now();
        }
        None
    }

    /// Sends a command with a well-formed header. Returns status and data of the response.
    ///
    /// # Panics
    /// If nothing comes back.
    pub fn command(&mut self, c: u8, data: &[u8]) -> (u8, Vec<u8>) {
        let head = abi::ReqHeader { command: c, ..Default::default() };
        let answer = self.request(&[head.as_bytes(), data].concat(), 1024).expect("an answer");
        assert!(answer.len() >= 8, "a response of {} bytes to command {c}", answer.len());
        (answer[0], answer[8..].to_vec())
    }

    /// Writes raw bytes to a new connection, then reads answers for a moment.
    pub fn raw(socket: &Path, bytes: &[u8]) {
        let Ok(mut s) = UnixStream::connect(socket) else { return };
        let _ = s.set_read_timeout(Some(Duration::from_millis(2)));
        let _ = s.set_write_timeout(Some(Duration::from_millis(100)));
        let _ = s.write_all(bytes);
        let _ = s.read(&mut [0; 4096]);
    }
}
