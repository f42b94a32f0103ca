//! Commands that need a long search: commands of other sessions are executed meanwhile, commands of the same session
//! wait.

use std::sync::Arc;

use unirdma_abi as abi;
use unirdma_abi::{Command, Status};
use unirdma_device::BackgroundLookup;
use unirdma_formats::QpType;
use unirdma_link::{BlockingFd, DriverQueue, Handler, KINDS, Ledger, Memory, RegionDesc, Resource, Segment, Vring};
use unirdma_mem::MemFd;
use zerocopy::IntoBytes;

use crate::table::{OWN_VF, resolve};
use crate::world::{Kind, NOBODY, NoPollers, Side, World};

const SIZE: u16 = 8;
const CONTROL: usize = abi::VQ_CONTROL as usize;
/// Address of the pages to be registered.
const PAGES_AT: u64 = 1 << 52;
/// Number of pages of a long list.
const LONG: u64 = 600;

/// The driver's half of a control queue.
struct Control {
    queue: DriverQueue,
    buffers: u64,
    vring: Vring,
}

impl Control {
    fn new(side: &mut Side) -> Self {
        let at = side.take(DriverQueue::bytes(SIZE));
        let buffers = side.take(4096 * usize::from(SIZE));
        let queue = DriverQueue::new(side.span(at, DriverQueue::bytes(SIZE)), SIZE);
        let (desc, avail, used) = queue.addresses();
        let bus = |address: u64| at + (address - desc);
        let [desc, avail, used] = [desc, avail, used].map(bus);
        let vring = Vring { size: SIZE, desc, avail, used, enabled: true, addressed: true, ..Vring::default() };
        side.dev.vring_changed(CONTROL, &vring);
        Control { queue, buffers, vring }
    }

    /// Sends a command with descriptors `slot` and `slot + 1`.
    fn send(&mut self, side: &Side, slot: u16, c: Command, request: &[u8]) {
        let at = self.buffers + u64::from(slot) * 4096;
        let head = abi::ReqHeader { command: c as u8, ..Default::default() };
        let bytes = [head.as_bytes(), request].concat();
        side.write(at, &bytes);
        let (request, response) = (
            Segment { addr: at, len: bytes.len() as u32, write: false },
            Segment { addr: at + 2048, len: 1024, write: true },
        );
        self.queue.publish(slot, &[request, response]);
    }

    /// The slot and status of the next response.
    fn answer(&mut self, side: &Side) -> Option<(u16, u8)> {
        let (slot, _) = self.queue.pop_used()?;
        let mut status = [0];
        side.span(self.buffers + u64::from(slot) * 4096 + 2048, 1).read(0, &mut status);
        Some((slot, status[0]))
    }
}

/// A session with a second region, whose pages a list names in the wrong order.
struct Registering {
    side: Side,
    control: Control,
    request: Vec<u8>,
    /// Removes the second region.
    before: Memory,
    ledger: Ledger,
}

impl Registering {
    fn new(mut side: Side) -> Self {
        let control = Control::new(&mut side);
        let ledger = Ledger::of_host([1 << 40; KINDS]).for_vrnic([None; KINDS]);
        let mut memory = Memory::new(ledger.clone());
        side.add_own_region(&mut memory);
        let before = memory.clone();
        let file = MemFd::new(c"pages", LONG as usize * 4096).unwrap();
        let desc = RegionDesc { bus_addr: PAGES_AT, size: LONG * 4096, ..Default::default() };
        let fd = file.fd().try_clone_to_owned().unwrap();
        memory.add(desc, BlockingFd::refused(fd, &ledger)).unwrap();
        side.dev.memory_changed(&memory, &[]);
        let list = side.take(LONG as usize * 8);
        (0..LONG).for_each(|i| side.write(list + i * 8, (PAGES_AT + (LONG - 1 - i) * 4096).as_bytes()));
        let request = abi::RegUserMrReq {
            pages_addr: list,
            npages: LONG as u32,
            start: PAGES_AT,
            length: LONG * 4096,
            ..side.mr_request()
        };
        Registering { side, control, request: request.as_bytes().into(), before, ledger }
    }

    /// Sends the command and another one behind it, and returns the background lookup of the first.
    fn begin(&mut self) -> BackgroundLookup {
        self.control.send(&self.side, 0, Command::RegUserMr, &self.request);
        self.control.send(&self.side, 2, Command::CreatePd, &[]);
        self.lookup()
    }

    fn lookup(&mut self) -> BackgroundLookup {
        assert!(self.side.dev.serve_control());
        assert_eq!(self.control.answer(&self.side), None, "both wait");
        self.side.pollers.lookup().expect("a lookup")
    }

    fn answers(&mut self) -> Vec<(u16, u8)> {
        while self.side.dev.serve_control() {}
        std::iter::from_fn(|| self.control.answer(&self.side)).collect()
    }

    fn pieces(&self) -> u64 {
        self.ledger.usage(Resource::Pieces).0
    }
}

#[test]
fn other_sessions_go_on_while_a_long_list_is_looked_up() {
    let World { me, mut other, .. } = World::new();
    let mut r = Registering::new(me);
    let lookup = r.begin();
    let mut control = Control::new(&mut other);
    for _ in 0..3 {
        control.send(&other, 0, Command::CreatePd, &[]);
        assert!(other.dev.serve_control());
        assert_eq!(control.answer(&other), Some((0, 0)));
        assert!(!r.side.dev.serve_control(), "it has nothing to do yet");
    }
    lookup.run();
    assert_eq!(r.answers(), [(0, 0), (2, 0)]);
    assert_eq!(r.pieces(), LONG);
    assert!(r.side.pollers.lookup().is_none());
    // A short list is searched at once.
    r.control.send(&r.side, 4, Command::RegUserMr, r.side.mr_request().as_bytes());
    assert_eq!(r.answers(), [(4, 0)]);
    assert_eq!(Arc::<NoPollers>::strong_count(&r.side.pollers), 2);
}

/// A command that needs to know something of another host waits for its answer, or for the end of the time for it.
#[test]
fn other_sessions_go_on_while_another_host_is_asked() {
    let w = World::new();
    w.lend(Some(OWN_VF), None);
    w.route_elsewhere(NOBODY);
    let World { mut me, mut other, .. } = w;
    let (mut mine, mut control) = (Control::new(&mut me), Control::new(&mut other));
    mine.send(&me, 0, Command::Resolve, resolve(NOBODY, QpType::Rc).as_bytes());
    mine.send(&me, 2, Command::CreatePd, &[]);
    assert!(me.dev.serve_control());
    control.send(&other, 0, Command::CreatePd, &[]);
    assert!(other.dev.serve_control());
    assert_eq!(control.answer(&other), Some((0, 0)));
    assert!(!me.dev.serve_control(), "it has nothing to do yet");
    assert_eq!(mine.answer(&me), None, "both wait");
    // A queue that is started anew begins with the command.
    assert_eq!(me.dev.stop_vring(CONTROL), Some(0));
    me.dev.vring_changed(CONTROL, &mine.vring);
    assert!(me.dev.serve_control());
    assert_eq!(mine.answer(&me), None);
    me.wait_in_vain();
    while me.dev.serve_control() {}
    assert_eq!([mine.answer(&me), mine.answer(&me)], [Some((0, Status::Unreachable as u8)), Some((2, 0))]);
}

#[test]
fn memory_that_goes_before_its_search_ends_is_no_memory() {
    let mut r = Registering::new(World::new().me);
    let lookup = r.begin();
    let removed = 1;
    r.side.dev.memory_changed(&r.before.clone(), &[removed]);
    lookup.run();
    assert_eq!((r.pieces(), r.answers()), (LONG, vec![(0, Status::BadAddress as u8), (2, 0)]));
    assert_eq!(r.pieces(), 0);
}

/// A frontend that stops its queue finds the command unanswered, and the next queue begins with it.
#[test]
fn a_queue_that_stops_meanwhile_has_the_command_once_more() {
    let mut r = Registering::new(World::new().me);
    let lookup = r.begin();
    let base = r.side.dev.stop_vring(CONTROL);
    assert_eq!(base, Some(0));
    lookup.run();
    assert_eq!(r.pieces(), 0, "nobody wants it");
    r.side.dev.vring_changed(CONTROL, &r.control.vring);
    let again = r.lookup();
    again.run();
    assert_eq!(r.answers(), [(0, 0), (2, 0)]);
}

/// If a driver changes a request while its background lookup runs, it is another request, and the memory found for the
/// first one is given back.
#[test]
fn what_was_found_is_for_the_request_that_asked_for_it() {
    let mut r = Registering::new(World::new().me);
    let lookup = r.begin();
    lookup.run();
    assert_eq!(r.pieces(), LONG);
    let create_pd = abi::ReqHeader { command: Command::CreatePd as u8, ..Default::default() };
    r.side.write(r.control.buffers, create_pd.as_bytes());
    // The new request has the same length, which is too long for its command.
    assert_eq!(r.answers(), [(0, Status::BadLength as u8), (2, 0)]);
    assert_eq!(r.pieces(), 0);
}

#[test]
fn a_session_that_ends_gives_back_what_is_found_for_it() {
    let mut r = Registering::new(World::new().me);
    let first = r.begin();
    r.side.dev.reset();
    first.run();
    assert_eq!(r.pieces(), 0);
    let _ = r.side.make(Kind::Pd);
    let mut r = Registering::new(World::new().me);
    let second = r.begin();
    second.run();
    let (ledger, side) = (r.ledger.clone(), r.side);
    assert_eq!(ledger.usage(Resource::Pieces).0, LONG);
    drop(side);
    assert_eq!(ledger.usage(Resource::Pieces).0, 0);
}
