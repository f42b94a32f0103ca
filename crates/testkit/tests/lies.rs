//! Memory that vanishes, and descriptors that misbehave. A program that gives them to the virtual layer loses its own
//! session at most.
#![allow(missing_docs)]

use std::io::{IoSlice, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{FallocateFlags, MemfdFlags, ftruncate, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use unirdma_abi as abi;
use unirdma_formats::WrOpcode;
use unirdma_ipc::vrnic::SetHeld;
use unirdma_link::RegionDesc;
use unirdma_mem::MemFd;
use unirdma_supervisor::admin::{Request, Response};
use unirdma_testkit::{Hostile, Program, Scene, Scripted};
use vhost::vhost_user::message::FrontendReq;
use zerocopy::IntoBytes;

const BYTES: u64 = 64 << 20;
const AT: u64 = 1 << 53;
/// `IBV_MTU_4096`.
const MTU: u8 = 5;

fn truncatable(len: u64) -> OwnedFd {
    let fd = memfd_create(c"lie", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, len).unwrap();
    fd
}

fn region(bus_addr: u64, size: u64) -> RegionDesc {
    RegionDesc { bus_addr, size, user_addr: bus_addr, mmap_offset: 0 }
}

/// Checks that the session of vRNIC `evil` has ended and that the good programs can still communicate.
fn check_that_the_liar_has_lost(scene: &Scene) {
    let sessions = || match scene.host.ask(&Request::VrnicShow { name: "evil".into() }) {
        Ok(Response::Vrnic(v)) => v.sessions,
        r => panic!("no vRNIC: {r:?}"),
    };
    let began = Instant::now();
    while sessions() > 0 {
        assert!(began.elapsed() < Duration::from_secs(10), "the session goes on");
        std::thread::sleep(Duration::from_millis(1));
    }
    scene.check();
}

#[test]
fn who_truncates_a_file_of_its_memory_loses_its_session() {
    let scene = Scene::start();
    let mut s = Scripted::new(&scene.evil);
    let file = truncatable(BYTES);
    s.hostile.frontend.add_region(region(AT, BYTES), file.as_fd()).unwrap();
    let key = s.mr(AT, BYTES);
    let (q, _) = s.pair(1024, MTU);
    for i in 0..1024 {
        let local = abi::Sge { addr: u64::from(i) * 8192, length: 4096, lkey: key.lkey };
        s.write(&q, i, WrOpcode::Write, local, (BYTES / 2 + u64::from(i) * 8192, key.rkey));
    }
    ftruncate(&file, 0).unwrap();
    s.post(&q, 1024);
    check_that_the_liar_has_lost(&scene);
}

/// Every poller reads the doorbell page.
#[test]
fn who_truncates_its_doorbell_page_loses_its_session() {
    let scene = Scene::start();
    let mut h = Hostile::new(&scene.evil);
    let file = truncatable(4096);
    h.frontend.add_region(region(AT, 4096), file.as_fd()).unwrap();
    assert_eq!(h.command(abi::Command::SetDoorbell as u8, AT.as_bytes()).0, 0);
    ftruncate(&file, 0).unwrap();
    h.wake();
    check_that_the_liar_has_lost(&scene);
    // The vRNIC serves the next program.
    let _next = Program::new(&scene.evil, 4096);
    scene.check();
}

/// A blocking call descriptor that becomes full at any moment.
#[test]
fn a_full_eventfd_holds_nobody_up() {
    let scene = Scene::start();
    let mut h = Hostile::new(&scene.evil);
    let call = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
    rustix::io::write(&call, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    h.frontend.set_call(abi::VQ_CONTROL, call.as_fd()).unwrap();
    let over = AtomicBool::new(false);
    std::thread::scope(|t| {
        t.spawn(|| {
            while !over.load(SeqCst) {
                let _ = rustix::fs::fcntl_setfl(&call, rustix::fs::OFlags::empty());
            }
        });
        for _ in 0..2000 {
            assert_eq!(h.command(abi::Command::QueryDevice as u8, &[]).0, 0);
        }
        over.store(true, SeqCst);
    });
    scene.check();
}

/// A driver that supplies buffers as fast as the device takes them, each too small for the event that waits.
#[test]
fn buffers_that_hold_nothing_are_not_taken_for_ever() {
    const SIZE: usize = 4;
    let scene = Scene::start();
    let mut h = Hostile::new(&scene.evil);
    let memory = h.memory().clone();
    let (desc, avail, used, buffer) = (0x10_0000, 0x10_1000, 0x10_2000, 0x10_3000);
    for i in 0..SIZE {
        memory.write(desc + 16 * i, h.bus(buffer).as_bytes());
        // A writable buffer of one byte.
        memory.write(desc + 16 * i + 8, [1u32, 2].as_bytes());
        memory.write(avail + 4 + 2 * i, (i as u16).as_bytes());
    }
    let user = memory.addr() as u64;
    let kick = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
    h.frontend.set_kick(abi::VQ_ASYNC, kick.as_fd()).unwrap();
    let at = |off: usize| user + off as u64;
    h.frontend.set_vring(abi::VQ_ASYNC, SIZE as u16, at(desc), at(avail), at(used)).unwrap();
    let taken = || memory.load16(used + 2, SeqCst);
    let over = AtomicBool::new(false);
    std::thread::scope(|t| {
        t.spawn(|| {
            while !over.load(SeqCst) {
                memory.store16(avail + 2, taken().wrapping_add(SIZE as u16), SeqCst);
            }
        });
        std::thread::sleep(Duration::from_millis(10));
        scene.host.ask(&Request::VrnicLink { name: "evil".into(), up: false }).unwrap();
        std::thread::sleep(Duration::from_millis(300));
        let first = taken();
        assert!(first <= 4 * SIZE as u16, "{first} buffers");
        scene.host.ask(&Request::VrnicLink { name: "evil".into(), up: true }).unwrap();
        scene.check();
        over.store(true, SeqCst);
    });
}

/// Descriptors with each byte of a header that never ends.
#[test]
fn descriptors_beside_half_a_message_are_few_and_not_for_ever() {
    use std::io::Read;
    let scene = Scene::start();
    let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let part = |s: &UnixStream, fds: usize| {
        let many = vec![event.as_fd(); fds];
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(32))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&many)));
        sendmsg(s, &[IoSlice::new(&[0])], &mut control, SendFlags::NOSIGNAL)
    };
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let before = open();
    let mut ends = |s: &UnixStream| s.try_clone().unwrap().read(&mut [0]).map_or(true, |n| n == 0);
    let s = UnixStream::connect(&scene.evil).unwrap();
    let _ = part(&s, 30).and_then(|_| part(&s, 30));
    assert!(ends(&s), "more descriptors than a message may have");
    // The most sessions that a vRNIC may have, each with the most descriptors that it may send.
    let sessions: Vec<UnixStream> = (0..500).map(|_| UnixStream::connect(&scene.evil).unwrap()).collect();
    let began = Instant::now();
    sessions.iter().for_each(|s| _ = part(s, 32));
    scene.check();
    let _next = Program::new(&scene.host.add("c", "10.0.0.4"), 4096);
    assert!(sessions.iter().all(&mut ends), "nobody sends the rest");
    assert!(began.elapsed() < Duration::from_secs(30) && began.elapsed() > Duration::from_secs(2));
    drop(sessions);
    check_that_the_liar_has_lost(&scene);
    assert!(open() < before + 100, "{} descriptors, {before} before", open());
}

/// Sparse files take address space but no memory.
#[test]
fn regions_leave_addresses_for_others() {
    let scene = Scene::start();
    let mut h = Hostile::new(&scene.evil);
    let file = truncatable(1 << 42);
    let taken = (0..200).take_while(|&i| h.frontend.add_region(region(AT + (i << 42), 1 << 42), file.as_fd()).is_ok());
    let taken = taken.count();
    assert!((4..=24).contains(&taken), "{taken} regions of 4 TiB");
    let _other = Program::new(&scene.host.add("c", "10.0.0.4"), 1 << 20);
    scene.check();
}

/// Page lists whose pages are not contiguous: short ones are mapped, long ones are kept as lists.
#[test]
fn page_lists_leave_mappings_and_memory_for_others() {
    const PAGES: usize = 20_000;
    let scene = Scene::start();
    let pieces = SetHeld { max_pieces: Some(50_000), ..Default::default() };
    let socket = scene.host.add_with("lists", "10.0.0.5", |v| v.held = pieces);
    let mut s = Scripted::new(&socket);
    let file = truncatable(PAGES as u64 * 8192);
    s.hostile.frontend.add_region(region(AT, PAGES as u64 * 8192), file.as_fd()).unwrap();
    let list = s.alloc(PAGES as u64 * 8);
    for i in 0..PAGES {
        s.hostile.memory().write(list as usize + 8 * i, (AT + 8192 * i as u64).as_bytes());
    }
    for (pages, most) in [(PAGES, 2..=2), (512, 20..=64)] {
        let bytes = pages as u64 * 4096;
        let request =
            abi::RegUserMrReq { pages_addr: s.hostile.bus(list), npages: pages as u32, ..s.mr_request(AT, bytes) };
        let mut made = 0;
        let refused = loop {
            match s.hostile.command(abi::Command::RegUserMr as u8, request.as_bytes()).0 {
                0 => made += 1,
                status => break status,
            }
            assert!(made < 100, "{made} lists of {pages} pages");
        };
        assert_eq!(refused, abi::Status::Exhausted as u8);
        assert!(most.contains(&made), "{made} lists of {pages} pages");
    }
    let _other = Program::new(&scene.host.add("c", "10.0.0.4"), 1 << 20);
    scene.check();
}

/// A message from one page list to another one.
#[test]
fn long_page_lists_are_memory_like_any_other() {
    const PAGES: u64 = 1000;
    let scene = Scene::start();
    let mut s = Scripted::new(&scene.evil);
    let file = MemFd::new(c"pages", 4 * PAGES as usize * 4096).unwrap();
    let at = s.add_memory(&file);
    let list = s.alloc(PAGES * 8);
    let mut mr = |odd: u64| {
        // Every other page, in descending order.
        let page = |i: u64| 2 * (PAGES - 1 - i) + odd;
        (0..PAGES).for_each(|i| s.hostile.memory().write((list + 8 * i) as usize, (at + page(i) * 4096).as_bytes()));
        let bus = s.hostile.bus(list);
        let request = abi::RegUserMrReq { pages_addr: bus, npages: PAGES as u32, ..s.mr_request(at, PAGES * 4096) };
        s.ask::<abi::MrResp>(abi::Command::RegUserMr, &request)
    };
    let (from, to) = (mr(0), mr(1));
    (0..PAGES as usize).for_each(|i| file.span().store32(i * 8192, i as u32 + 7, SeqCst));
    let (q, _) = s.pair(4, MTU);
    let all = abi::Sge { addr: 0, length: PAGES as u32 * 4096, lkey: from.lkey };
    s.write(&q, 0, WrOpcode::Write, all, (0, to.rkey));
    s.post(&q, 1);
    let began = Instant::now();
    while s.executed(&q) != 1 {
        assert!(began.elapsed() < Duration::from_secs(10));
        std::thread::sleep(Duration::from_millis(1));
    }
    for i in 0..PAGES as usize {
        assert_eq!(file.span().load32(i * 8192 + 4096, SeqCst), i as u32 + 7, "page {i}");
    }
    scene.check();
}

/// WRITEs allocate the pages of sparse files. These pages are charged to the vRNIC; pages that existed before are not,
/// and punched holes are credited again. A session that needs more than the limit ends.
#[test]
fn pages_of_sparse_files_are_made_up_to_a_limit() {
    const LIMIT: u64 = 8 << 20;
    const LEN: u64 = 32 << 20;
    /// Bytes of a WRITE.
    const PART: u64 = 64 << 10;
    let scene = Scene::start();
    if let Err(why) = unirdma_mem::guard::counts_holes() {
        return println!("skipped: {why}");
    }
    let set = SetHeld { max_filled: Some(LIMIT), ..SetHeld::default() };
    let set = Request::VrnicSet { name: "evil".into(), share: Default::default(), allow_spoof: None, held: set };
    scene.host.ask(&set).unwrap();
    let filled = || match scene.host.ask(&Request::VrnicShow { name: "evil".into() }) {
        Ok(Response::Vrnic(v)) => (v.held.filled.used, v.held.filled.limit),
        r => panic!("no vRNIC: {r:?}"),
    };
    let (before, _) = filled();
    let mut s = Scripted::new(&scene.evil);
    let [dense, sparse] = [truncatable(LEN), truncatable(LEN)];
    rustix::fs::fallocate(&dense, FallocateFlags::empty(), 0, LEN).unwrap();
    s.hostile.frontend.add_region(region(AT, LEN), dense.as_fd()).unwrap();
    s.hostile.frontend.add_region(region(2 * AT, LEN), sparse.as_fd()).unwrap();
    let (from, to) = (s.mr(AT, LEN), s.mr(2 * AT, LEN));
    let (q, _) = s.pair(1024, MTU);
    // Posts WRITEs from the dense file to the first `bytes` of the sparse one.
    let fill = |bytes: u64| {
        let first = s.posted(&q);
        for i in 0..bytes / PART {
            let local = abi::Sge { addr: i * PART, length: PART as u32, lkey: from.lkey };
            s.write(&q, first.wrapping_add(i as u32), WrOpcode::Write, local, (i * PART, to.rkey));
        }
        s.post(&q, first.wrapping_add((bytes / PART) as u32));
        let began = Instant::now();
        while s.executed(&q) != s.posted(&q) && began.elapsed() < Duration::from_secs(5) {
            std::thread::sleep(Duration::from_millis(1));
        }
        s.executed(&q) == s.posted(&q)
    };
    for _ in 0..5 {
        assert!(fill(LIMIT / 2));
        let (used, limit) = filled();
        assert!((LIMIT / 2..LIMIT * 3 / 4).contains(&used) && limit == LIMIT, "{used} of {limit} bytes");
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&sparse, flags, 0, LEN).unwrap();
        let (used, _) = filled();
        assert!(used < LIMIT / 4, "{used} bytes after the hole");
    }
    // Some of the first session's bytes are still charged: the pages of its rings.
    assert!(fill(LIMIT / 2));
    assert!(!fill(2 * LIMIT), "more than it may have");
    check_that_the_liar_has_lost(&scene);
    assert_eq!(filled().0, before);
    let made = rustix::fs::fstat(&sparse).unwrap().st_blocks as u64 * 512;
    assert!(made <= LIMIT, "{made} bytes are there");
}

/// A TCP socket with unread data. Closing it blocks until its peer is closed.
fn lingering() -> (OwnedFd, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut s = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (peer, _) = listener.accept().unwrap();
    s.set_nonblocking(true).unwrap();
    while s.write(&[0; 1 << 16]).is_ok() {}
    rustix::net::sockopt::set_socket_linger(&s, Some(Duration::from_secs(600))).unwrap();
    s.set_nonblocking(false).unwrap();
    (s.into(), peer)
}

/// Sends bytes together with a descriptor. A thread of its own closes the descriptor here, because the last close
/// blocks.
fn beside(s: impl AsFd, bytes: &[u8], fd: OwnedFd, flags: SendFlags) -> bool {
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [fd.as_fd()];
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    let sent = sendmsg(s, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL | flags);
    std::thread::spawn(move || drop(fd));
    sent.is_ok()
}

/// Descriptors whose closing blocks, everywhere a program can send them.
#[test]
fn who_sends_descriptors_that_are_slow_to_close_holds_up_nobody() {
    let scene = Scene::start();
    let held = || match scene.host.ask(&Request::VrnicShow { name: "evil".into() }) {
        Ok(Response::Vrnic(v)) => v.held.descriptors.used,
        r => panic!("no vRNIC: {r:?}"),
    };
    let mut peers = Vec::new();
    let mut slow = || {
        let (fd, peer) = lingering();
        peers.push(peer);
        fd
    };
    let began = Instant::now();
    // With a message that takes a descriptor, which refuses these, and with a message that takes none.
    let mut h = Hostile::new(&scene.evil);
    let session = UnixStream::connect(&scene.evil).unwrap();
    for request in [FrontendReq::SET_VRING_KICK, FrontendReq::SET_VRING_CALL, FrontendReq::SET_OWNER] {
        let message = [[request as u32, 1, 8].as_bytes(), 0u64.as_bytes()].concat();
        assert!(beside(&session, &message[..1], slow(), SendFlags::empty()));
        // This process has closed its own descriptor by now, so the virtual layer has the last one.
        std::thread::sleep(Duration::from_millis(50));
        (&session).write_all(&message[1..]).unwrap();
    }
    // Over the channel of notifications.
    let channel = h.frontend.open_channel(abi::CHANNEL_CONTROL).unwrap();
    (0..3).for_each(|_| assert!(beside(&channel, &[1], slow(), SendFlags::empty())));
    // With half a message, with one that is too long, and after bytes that end the session.
    for bytes in [&[0][..], &[0xff; 12], &[0; 4096]] {
        let s = UnixStream::connect(&scene.evil).unwrap();
        (0..3).for_each(|_| _ = beside(&s, bytes, slow(), SendFlags::empty()));
    }
    // With an urgent byte, which a read skips.
    let s = UnixStream::connect(&scene.evil).unwrap();
    if beside(&s, &[0], slow(), SendFlags::OOB) {
        let _ = (&s).write_all(&[0; 4]);
    }
    drop(h);
    std::thread::sleep(Duration::from_millis(100));
    scene.check();
    let _others = [&scene.evil, &scene.host.add("c", "10.0.0.4")].map(|socket| Program::new(socket, 4096));
    scene.check();
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    let waiting = held();
    assert!(waiting > 10, "{waiting} descriptors are on the account");
    drop(peers);
    while held() > waiting - 5 {
        assert!(began.elapsed() < Duration::from_secs(20), "{} descriptors are on the account still", held());
        std::thread::sleep(Duration::from_millis(10));
    }
}
