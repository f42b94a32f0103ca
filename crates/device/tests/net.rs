//! The network interface of a virtual machine: frames between a driver's virtqueues and the switch.
#![allow(missing_docs)]

use std::sync::Arc;

use unirdma_device::{NET_TX, NetDevice, NetFrontend};
use unirdma_link::{BlockingFd, DriverQueue, Handler, Ledger, Memory, RegionDesc, Segment, Vring};
use unirdma_mem::{MemFd, Span};

const BUS: u64 = 1 << 40;
const SIZE: u16 = 8;
/// Start of the buffers.
const BUFFERS: u64 = 3 << 14;
const HEADER: usize = 12;

/// A machine: its memory, and the driver's side of its queues. The first queue is for incoming frames.
struct Machine {
    memory: MemFd,
    queues: [DriverQueue; 2],
    front: NetFrontend,
}

impl Machine {
    fn new() -> Machine {
        let memory = MemFd::new(c"machine", 1 << 20).unwrap();
        let device = Arc::new(NetDevice::default());
        let mut front = NetFrontend { device, changed: None, vrnic: "a".into(), log: Arc::default() };
        let mut regions = Memory::default();
        let region = RegionDesc { bus_addr: BUS, size: 1 << 20, ..Default::default() };
        let fd = memory.fd().try_clone_to_owned().unwrap();
        regions.add(region, BlockingFd::refused(fd, &Ledger::default())).unwrap();
        front.memory_changed(&regions, &[]);
        let queues = [0, 1].map(|i| {
            let at = (i as u64 + 1) << 14;
            let q = DriverQueue::new(memory.span().sub(at, 1 << 14).unwrap(), SIZE);
            let bus = |addr: u64| BUS + addr - memory.span().addr() as u64;
            let (desc, avail, used) = q.addresses();
            let (desc, avail, used) = (bus(desc), bus(avail), bus(used));
            let v = Vring { size: SIZE, desc, avail, used, enabled: true, addressed: true, ..Vring::default() };
            front.vring_changed(i, &v);
            q
        });
        Machine { memory, queues, front }
    }

    fn span(&self, at: u64, len: usize) -> Span {
        self.memory.span().sub(BUFFERS + at, len as u64).unwrap()
    }

    /// Gives a buffer for a frame of `len` bytes.
    fn room(&mut self, head: u16, at: u64, len: usize) {
        let segment = Segment { addr: BUS + BUFFERS + at, len: (HEADER + len) as u32, write: true };
        self.queues[0].publish(head, &[segment]);
    }

    /// Sends a frame, its header in a buffer of its own.
    fn send(&mut self, head: u16, frame: &[u8]) {
        self.span(0x8000, HEADER).write(0, &[0; HEADER]);
        self.span(0x9000, frame.len()).write(0, frame);
        let part = |at: u64, len: usize| Segment { addr: BUS + BUFFERS + at, len: len as u32, write: false };
        self.queues[1].publish(head, &[part(0x8000, HEADER), part(0x9000, frame.len())]);
    }

    fn received(&self) -> Option<Vec<u8>> {
        let mut frame = vec![0; 2000];
        self.front.device.receive(&mut frame).map(|n| frame[..n].to_vec())
    }
}

#[test]
fn frames_pass_both_ways() {
    let mut m = Machine::new();
    let frame: Vec<u8> = (0..1514u32).map(|i| i as u8).collect();
    for round in 0..20 {
        assert_eq!(m.received(), None);
        m.send(2, &frame);
        assert_eq!(m.received(), Some(frame.clone()));
        assert_eq!((m.queues[1].pop_used(), m.queues[1].pop_used()), (Some((2, 0)), None), "round {round}");
        m.room(3, 64, 1514);
        m.front.device.send(&frame);
        assert_eq!(m.queues[0].pop_used(), Some((3, (HEADER + 1514) as u32)));
        let mut got = vec![0; HEADER + 1514];
        m.span(64, got.len()).read(0, &mut got);
        assert_eq!((&got[..HEADER], &got[HEADER..]), (&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0][..], &frame[..]));
    }
}

#[test]
fn what_does_not_fit_is_dropped_and_its_buffer_comes_back() {
    let mut m = Machine::new();
    m.front.device.send(&[1; 60]);
    m.room(0, 0, 59);
    m.room(1, 0x1000, 60);
    m.front.device.send(&[1; 60]);
    m.front.device.send(&[2; 60]);
    assert_eq!((m.queues[0].pop_used(), m.queues[0].pop_used()), (Some((0, 0)), Some((1, 72))));
    m.send(0, &[7; 2001]);
    assert_eq!(m.received(), Some(Vec::new()));
    // No room for a header.
    m.queues[1].publish(0, &[Segment { addr: BUS + BUFFERS, len: 11, write: false }]);
    assert_eq!(m.received(), Some(Vec::new()));
    m.queues[1].publish(0, &[Segment { addr: 5, len: 100, write: false }]);
    assert_eq!(m.received(), Some(Vec::new()));
    m.send(0, &[8; 60]);
    assert_eq!(m.received(), Some(vec![8; 60]));
}

#[test]
fn a_stopped_queue_is_left_alone_and_goes_on_where_it_was() {
    let mut m = Machine::new();
    m.send(0, &[1; 60]);
    assert_eq!(m.received(), Some(vec![1; 60]));
    assert_eq!(m.front.stop_vring(NET_TX), Some(1));
    m.send(0, &[2; 60]);
    assert_eq!(m.received(), None);
    let (desc, avail, used) = m.queues[1].addresses();
    let bus = |addr: u64| BUS + addr - m.memory.span().addr() as u64;
    let (desc, avail, used) = (bus(desc), bus(avail), bus(used));
    let v = Vring { size: SIZE, desc, avail, used, base: 1, enabled: true, addressed: true, ..Vring::default() };
    m.front.vring_changed(NET_TX, &v);
    assert_eq!(m.received(), Some(vec![2; 60]));
}
