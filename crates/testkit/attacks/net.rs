//! The network interface of a virtual machine with a hostile driver and VMM: frames of any kind and length, rings full
//! of junk, and memory that is added and removed.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use unirdma_link::{DriverQueue, Segment};
use unirdma_mem::MemFd;
use vhost::vhost_user::message::FrontendReq as R;
use zerocopy::IntoBytes;

use crate::random::Random;
use crate::{Until, broken, ready};

const SIZE: u64 = 1 << 20;
const BUS: u64 = 1 << 40;
const ENTRIES: u16 = 64;
/// Offsets of the two rings, and of the buffers.
const RINGS: [u64; 2] = [0, 0x4000];
const BUFFERS: u64 = 0x8000;
/// Bytes of the header before each frame.
const HEADER: usize = 12;
/// Most bytes of a frame.
const FRAME: u64 = 12_000;
/// Number of steps of one connection.
const STEPS: u32 = 20_000;

struct Interface {
    socket: UnixStream,
    memory: MemFd,
    queues: [DriverQueue; 2],
    kick: OwnedFd,
    r: Random,
    present: bool,
}

impl Interface {
    fn new(path: &Path, seed: u64) -> std::io::Result<Interface> {
        let socket = UnixStream::connect(path)?;
        let memory = MemFd::new(c"machine", SIZE as usize).expect("memory file");
        let queues = RINGS.map(|at| DriverQueue::new(memory.span().sub(at, 0x4000).expect("a ring"), ENTRIES));
        let kick = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let mut i = Interface { socket, memory, queues, kick, r: Random::new(seed), present: false };
        i.tell(R::SET_OWNER, &[], &[]);
        // Version 1, protocol features; REPLY_ACK and CONFIGURE_MEM_SLOTS.
        i.tell(R::SET_FEATURES, &(1u64 << 32 | 1 << 30).to_ne_bytes(), &[]);
        i.tell(R::SET_PROTOCOL_FEATURES, &(1u64 << 3 | 1 << 15).to_ne_bytes(), &[]);
        i.memory_change();
        i.start();
        Ok(i)
    }

    /// Sends a request and does not read the answer: the socket has room for some answers, and the connection is short.
    fn tell(&mut self, request: R, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        let _ = unirdma_link::send(self.socket.as_fd(), request as u32, 0, payload, fds);
    }

    fn memory_change(&mut self) {
        let user = self.memory.span().addr() as u64;
        let region = [0, BUS, SIZE, user, 0];
        if self.present {
            self.tell(R::REM_MEM_REG, region.as_bytes(), &[]);
        } else {
            let fd = self.memory.fd().try_clone_to_owned().expect("descriptor");
            self.tell(R::ADD_MEM_REG, region.as_bytes(), &[fd.as_fd()]);
        }
        self.present = !self.present;
    }

    /// Sets up both rings at their offsets.
    fn start(&mut self) {
        let kick = self.kick.try_clone().expect("descriptor");
        for index in 0..2u32 {
            let (desc, avail, used) = self.queues[index as usize].addresses();
            let state = |num: u32| [index, num];
            self.tell(R::SET_VRING_NUM, state(ENTRIES.into()).as_bytes(), &[]);
            self.tell(R::SET_VRING_BASE, state(0).as_bytes(), &[]);
            self.tell(R::SET_VRING_ADDR, [u64::from(index), desc, used, avail, 0].as_bytes(), &[]);
            self.tell(R::SET_VRING_KICK, &u64::from(index).to_ne_bytes(), &[kick.as_fd()]);
            self.tell(R::SET_VRING_ENABLE, state(1).as_bytes(), &[]);
        }
    }

    fn kick(&self) {
        let _ = rustix::io::write(&self.kick, &1u64.to_ne_bytes());
    }

    /// Offset of a random buffer.
    fn buffer(&mut self) -> u64 {
        BUFFERS + self.r.below(SIZE - BUFFERS - FRAME - 64)
    }

    /// Posts a frame with its own address or another one, of a random kind.
    fn frame(&mut self) {
        let at = self.buffer();
        let len = match self.r.below(8) {
            0 => self.r.below(20),
            1 => self.r.below(FRAME),
            _ => 42 + self.r.below(1500),
        };
        let mut bytes = vec![0; HEADER + len as usize];
        bytes.fill_with(|| self.r.next() as u8);
        let mac = |n: u64| [2, 0, 10, 0, 0, n as u8];
        if len > 42 && self.r.below(8) > 0 {
            let to = if self.r.below(2) == 0 { [0xff; 6] } else { mac(1 + self.r.below(4)) };
            let kind = [0x0806u16, 0x0800, 0x86dd, 0x8100, 0x88cc][self.r.below(5) as usize];
            bytes[..HEADER].fill(0);
            bytes[HEADER..][..6].copy_from_slice(&to);
            bytes[HEADER + 6..][..6].copy_from_slice(&mac(1 + self.r.below(4)));
            bytes[HEADER + 12..][..2].copy_from_slice(&kind.to_be_bytes());
            if self.r.below(2) == 0 {
                // The beginning of an ARP or IP header.
                bytes[HEADER + 14..][..6].copy_from_slice(if kind == 0x0806 {
                    &[0, 1, 8, 0, 6, 4]
                } else {
                    &[0x45, 0, 5, 0, 0, 0]
                });
            }
        }
        self.memory.span().write(at as usize, &bytes);
        let cut = self.r.below(bytes.len() as u64);
        let addr = if self.r.below(20) == 0 { self.r.next() } else { BUS + at };
        let part = |from: u64, len: u64| Segment { addr: addr.wrapping_add(from), len: len as u32, write: false };
        let chain = [part(0, cut), part(cut, bytes.len() as u64 - cut)];
        let head = self.r.below(32) as u16 * 2;
        self.queues[1].publish(head, &chain);
        self.queues[1].pop_used();
    }

    /// Posts a receive buffer for a frame, or for a part of one.
    fn room(&mut self) {
        let at = BUS + self.buffer();
        let len = [0, 11, 12, 60, 2000, FRAME][self.r.below(6) as usize] as u32;
        let head = self.r.below(u64::from(ENTRIES)) as u16;
        self.queues[0].publish(head, &[Segment { addr: at, len, write: self.r.below(8) > 0 }]);
        self.queues[0].pop_used();
    }

    fn step(&mut self) {
        match self.r.below(64) {
            0 => {
                let at = RINGS[self.r.below(2) as usize] + self.r.below(0x1000);
                let word = self.r.next();
                self.memory.span().write(at as usize, word.as_bytes());
            }
            1 if self.r.below(16) == 0 => self.memory_change(),
            2 if self.r.below(16) == 0 => self.start(),
            3 if self.r.below(16) == 0 => {
                let words = [(); 5].map(|()| self.r.next() >> self.r.below(64));
                let request = [R::SET_VRING_ADDR, R::SET_VRING_BASE, R::SET_VRING_NUM][self.r.below(3) as usize];
                let len = if request as u32 == R::SET_VRING_ADDR as u32 { 40 } else { 8 };
                self.tell(request, &words.as_bytes()[..len], &[]);
            }
            4..=20 => self.room(),
            _ => self.frame(),
        }
        if self.r.below(4) == 0 {
            self.kick();
        }
    }
}

/// Attacks the network interface that belongs to the device of this socket. Reconnects now and then.
pub(crate) fn interface(socket: &Path, until: Until) {
    let path = socket.with_file_name("net.sock");
    let (mut seed, mut refused) = (1, 0);
    ready();
    while !until.over() {
        // The previous connection may not have ended yet.
        match Interface::new(&path, seed) {
            Ok(mut i) => {
                for _ in 0..STEPS {
                    if until.over() {
                        break;
                    }
                    i.step();
                }
                refused = 0;
            }
            Err(_) if refused < 100 => refused += 1,
            Err(e) => return broken(&format!("no network interface: {e}")),
        }
        std::thread::sleep(Duration::from_millis(10));
        seed += 1;
    }
}
