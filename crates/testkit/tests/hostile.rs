//! Every message of a frontend is answered or ignored. The virtual layer stays up and other vRNICs work.
#![allow(missing_docs)]

use std::cell::RefCell;

use proptest::prelude::*;
use unirdma_abi as abi;
use unirdma_formats::WrOpcode;
use unirdma_link::Segment;
use unirdma_testkit::{Hostile, Program, Scene, TestHost, connect};
use zerocopy::{FromBytes, IntoBytes};

fn config(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, failure_persistence: None, max_shrink_iters: 200, ..ProptestConfig::default() }
}

/// A vhost-user message that is nearly right: a known request, odd flags, a payload of odd words.
fn message() -> impl Strategy<Value = Vec<u8>> {
    let word = prop_oneof![Just(0u64), Just(1), Just(u64::MAX), 0..300u64, any::<u64>(), Just(1 << 50)];
    let flags = prop_oneof![4 => Just(1u32), 4 => Just(9), 1 => any::<u32>()];
    let size = prop_oneof![8 => Just(None), 1 => any::<u32>().prop_map(Some), 1 => (0..5000u32).prop_map(Some)];
    let request = prop_oneof![4 => 0..50u32, 1 => unirdma_link::OPEN_CHANNEL..unirdma_link::RETURN_EVENTS + 2];
    (request, flags, proptest::collection::vec(word, 0..8), size).prop_map(|(req, flags, words, size)| {
        let payload: Vec<u8> = words.iter().flat_map(|w| w.to_ne_bytes()).collect();
        let head = [req, flags, size.unwrap_or(payload.len() as u32)];
        head.iter().flat_map(|w| w.to_ne_bytes()).chain(payload).collect()
    })
}

#[test]
fn random_vhost_user_streams_cost_their_sender_only() {
    let scene = Scene::start();
    proptest!(config(300), |(stream in proptest::collection::vec(message(), 1..6))| {
        Hostile::raw(&scene.evil, &stream.concat());
    });
    scene.check();
    proptest!(config(100), |(noise in proptest::collection::vec(any::<u8>(), 0..200))| {
        Hostile::raw(&scene.evil, &noise);
    });
    scene.check();
}

#[test]
fn a_refused_request_is_answered_and_the_session_goes_on() {
    use vhost::vhost_user::message::FrontendReq as R;
    let scene = Scene::start();
    let mut h = Hostile::new(&scene.evil);
    let refused: &[(R, &[u8])] = &[
        (R::SET_VRING_NUM, &[0xff; 8]),
        (R::SET_VRING_NUM, &[0, 0, 0, 0, 3, 0, 0, 0]),
        (R::SET_VRING_ADDR, &[0; 40]),
        (R::SET_VRING_ENABLE, &[0, 0, 0, 0, 7, 0, 0, 0]),
        (R::SET_FEATURES, &[0xff; 8]),
        (R::SET_PROTOCOL_FEATURES, &[0xff; 8]),
        (R::SET_VRING_KICK, &[0; 8]),
        (R::SET_CONFIG, &[0; 16]),
        (R::ADD_MEM_REG, &[0; 40]),
        (R::REM_MEM_REG, &[1; 40]),
        (R::SET_MEM_TABLE, &[2, 0, 0, 0, 0, 0, 0, 0]),
        (R::IOTLB_MSG, &[]),
        (R::SET_LOG_BASE, &[0; 16]),
    ];
    for (req, payload) in refused {
        let e = h.frontend.tell(*req, payload, &[], true).expect_err("refused");
        assert_eq!(e.kind(), std::io::ErrorKind::InvalidInput, "{req:?}: {e}");
    }
    let null = std::fs::File::open("/dev/null").unwrap();
    let fd = std::os::fd::AsFd::as_fd(&null);
    for req in [R::SET_VRING_KICK, R::SET_VRING_CALL] {
        assert!(h.frontend.tell(req, &0u64.to_ne_bytes(), &[fd], true).is_err(), "{req:?} takes eventfds only");
    }
    assert_eq!(h.command(abi::Command::QueryDevice as u8, &[]).0, 0, "the session works as before");
    scene.check();
}

/// Channels that do not exist, channels that are never read, and events that no device has raised.
#[test]
fn event_channels_cost_their_session_only() {
    use rustix::net::{RecvFlags, SendFlags, recv, send};
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    // The virtual layer raises its descriptor limit to the hard limit. This test reaches it.
    let most = getrlimit(Resource::Nofile).maximum.map_or(8192, |n| n.min(8192));
    setrlimit(Resource::Nofile, Rlimit { current: Some(most), maximum: Some(most) }).unwrap();
    let scene = Scene::start();
    let mut h = Hostile::new(&scene.evil);
    let open = |h: &mut Hostile, n| h.frontend.open_channel(n).map_err(|e| e.raw_os_error());
    for n in [abi::MAX_CHANNELS, abi::MAX_CHANNELS + 7, u32::MAX / 2, abi::CHANNEL_CONTROL - 1] {
        assert_eq!(open(&mut h, n).unwrap_err(), Some(24), "channel {n:#x}");
        assert!(h.frontend.close_channel(n).is_err() && h.frontend.return_events(n, &[event(1)]).is_err());
    }
    let last = abi::MAX_CHANNELS - 1;
    let socket = open(&mut h, last).unwrap();
    assert!(open(&mut h, last).is_err(), "open already");
    // Events that a frontend returns come back on its own channel, in any number and with any contents.
    for i in 0..400 {
        let many: Vec<_> = (0..250).map(|k| event(i * 250 + k)).collect();
        if h.frontend.return_events(last, &many).is_err() {
            break;
        }
    }
    assert!(recv(&socket, &mut [0; 64][..], RecvFlags::DONTWAIT).is_ok_and(|(n, _)| n == 16));
    // The device's end of the socket accepts no data.
    assert!(send(&socket, &[0; 64], SendFlags::DONTWAIT | SendFlags::NOSIGNAL).is_err());
    drop(socket);
    h.frontend.close_channel(last).unwrap();
    assert!(h.frontend.close_channel(last).is_err());
    // Unrequested notifications, more than the socket holds.
    for n in [abi::CHANNEL_CONTROL, abi::CHANNEL_WAKE] {
        let socket = open(&mut h, n).unwrap();
        assert!(open(&mut h, n).is_err() && h.frontend.close_channel(n).is_err());
        for _ in 0..100_000 {
            let _ = send(&socket, &[7; 100], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        }
    }
    assert_eq!(h.command(abi::Command::QueryDevice as u8, &[]).0, 0, "the session works as before");
    scene.check();
    // More channels than a vRNIC may have.
    let mut channels = Vec::new();
    let refused = (0..abi::MAX_CHANNELS).find(|&n| open(&mut h, n).map(|fd| channels.push(fd)).is_err());
    assert!(refused.is_some_and(|n| n > 100), "{refused:?}");
    scene.check();
    drop(h);
    // The channels end with their session.
    for c in channels {
        assert_eq!(recv(&c, &mut [0; 64][..], RecvFlags::empty()).map(|(n, _)| n), Ok(0));
    }
    scene.check();
}

fn event(handle: u32) -> abi::Event {
    abi::Event { kind: abi::EVENT_COMPLETION, handle, reserved: 0 }
}

#[test]
fn a_memory_table_replaces_all_regions_at_once() {
    use vhost::vhost_user::message::FrontendReq as R;
    let scene = Scene::start();
    let mut h = Hostile::new(&scene.evil);
    let extra = unirdma_mem::MemFd::new(c"extra", 8192).unwrap();
    let user = h.memory().addr() as u64;
    let table: Vec<u64> = [2u64, h.bus(0), 4 << 20, user, 0, 1 << 53, 8192, 1 << 53, 0].to_vec();
    let fd = h.fd();
    h.frontend.tell(R::SET_MEM_TABLE, table.as_bytes(), &[std::os::fd::AsFd::as_fd(&fd), extra.fd()], true).unwrap();
    let pd = h.command(abi::Command::CreatePd as u8, &[]);
    let pdn = abi::HandleResp::read_from_prefix(&pd.1).unwrap().0.handle;
    let mr = abi::RegUserMrReq { pdn, access_flags: 1, start: 1 << 53, length: 8192, ..Default::default() };
    assert_eq!(h.command(abi::Command::RegUserMr as u8, mr.as_bytes()).0, 0);
    let beyond = abi::RegUserMrReq { length: 8193, ..mr };
    assert_eq!(h.command(abi::Command::RegUserMr as u8, beyond.as_bytes()).0, abi::Status::BadAddress as u8);
    // Pages in any order, and GET_DMA_MR.
    h.memory().write(0x5_0000, [(1u64 << 53) + 4096, 1 << 53].as_bytes());
    let pages = abi::RegUserMrReq { start: 100, length: 5000, pages_addr: h.bus(0x5_0000), npages: 2, ..mr };
    assert_eq!(h.command(abi::Command::RegUserMr as u8, pages.as_bytes()).0, 0);
    let one = abi::RegUserMrReq { npages: 1, ..pages };
    assert_eq!(h.command(abi::Command::RegUserMr as u8, one.as_bytes()).0, abi::Status::BadValue as u8);
    let dma = abi::GetDmaMrReq { pdn, access_flags: 1 };
    assert_eq!(h.command(abi::Command::GetDmaMr as u8, dma.as_bytes()).0, 0);
    scene.check();
}

#[test]
fn random_control_commands_get_an_error_code() {
    let scene = Scene::start();
    let h = RefCell::new(Hostile::new(&scene.evil));
    // Valid handles of another tenant must not work either.
    let foreign = [scene.good.0.qp.qpn, scene.good.0.cq.cqn, scene.good.0.mr.mrn];
    let word =
        prop_oneof![Just(0u32), Just(1), Just(u32::MAX), any::<u32>(), proptest::sample::select(foreign.to_vec())];
    let data = proptest::collection::vec(word, 0..45);
    proptest!(config(600), |(c in any::<u8>(), words in data, room in prop_oneof![Just(1024u32), 0..16u32])| {
        let bytes: Vec<u8> = [u32::from(c % 48), 0].iter().chain(&words).flat_map(|w| w.to_ne_bytes()).collect();
        let answer = h.borrow_mut().request(&bytes, room);
        prop_assert!(answer.is_some(), "no answer to command {}", c % 48);
    });
    let d = h.borrow_mut().command(abi::Command::QueryDevice as u8, &[]);
    assert_eq!(d.0, 0);
    for handle in foreign {
        for c in [abi::Command::DestroyQp, abi::Command::DestroyCq, abi::Command::DeregMr, abi::Command::DestroyPd] {
            let data = abi::HandleReq { handle, reserved: 0 };
            assert_eq!(h.borrow_mut().command(c as u8, data.as_bytes()).0, abi::Status::BadHandle as u8, "{c:?}");
        }
    }
    scene.check();
}

#[test]
fn exact_lengths_are_demanded() {
    let scene = Scene::start();
    let mut h = Hostile::new(&scene.evil);
    for c in abi::Command::ALL {
        for len in [3, 7, 500] {
            let (status, _) = h.command(*c as u8, &vec![0; len]);
            assert_eq!(status, abi::Status::BadLength as u8, "{c:?} with {len} bytes");
        }
    }
    assert_eq!(h.request(&[], 64).unwrap()[0], abi::Status::BadLength as u8);
    // Buffers outside memory, and a chain without a readable part.
    assert_eq!(h.chain(&[Segment { addr: 12, len: 64, write: false }]), Some(vec![]));
    assert!(h.chain(&[Segment { addr: u64::MAX - 8, len: 64, write: true }]).is_some());
    scene.check();
}

/// Creates a QP of the hostile session whose rings lie at offset 0x10000 x 4.
fn make_qp(h: &mut Hostile) -> (u32, u32, u64) {
    let at = 0x4_0000;
    assert_eq!(h.command(abi::Command::SetDoorbell as u8, h.bus(0x3_0000).as_bytes()).0, 0);
    let pd = h.command(abi::Command::CreatePd as u8, &[]);
    let pdn = abi::HandleResp::read_from_prefix(&pd.1).unwrap().0.handle;
    let cq = abi::CreateCqReq {
        cqe: 16,
        entries: 16,
        ring_addr: h.bus(at + 0x8000),
        ctrl_addr: h.bus(at + 0x9000),
        comp_queue: 0,
        reserved: 0,
    };
    let cq = h.command(abi::Command::CreateCq as u8, cq.as_bytes());
    let cqn = abi::HandleResp::read_from_prefix(&cq.1).unwrap().0.handle;
    let cap = abi::QpCap { max_send_wr: 16, max_recv_wr: 16, max_send_sge: 4, max_recv_sge: 4, max_inline_data: 64 };
    let qp = abi::CreateQpReq {
        pdn,
        qp_type: 2,
        send_cqn: cqn,
        recv_cqn: cqn,
        cap,
        ctrl_addr: h.bus(at),
        sq_addr: h.bus(at + 0x1000),
        rq_addr: h.bus(at + 0x4000),
        ..Default::default()
    };
    let r = h.command(abi::Command::CreateQp as u8, qp.as_bytes());
    assert_eq!(r.0, 0);
    let r = abi::CreateQpResp::read_from_prefix(&r.1).unwrap().0;
    (r.qpn, r.db_slot, at)
}

/// The three steps to RTS, towards `peer_qpn` at 10.0.0.`ip`.
fn to_rts(h: &mut Hostile, qpn: u32, peer_qpn: u32, ip: u8) {
    use unirdma_formats::attr_mask as m;
    let dgid = unirdma_formats::Gid::from_ip(std::net::IpAddr::from([10, 0, 0, ip])).0;
    let attr = abi::QpAttr {
        port_num: 1,
        qp_access_flags: 15,
        path_mtu: 3,
        dest_qp_num: peer_qpn,
        max_dest_rd_atomic: 1,
        max_rd_atomic: 1,
        min_rnr_timer: 1,
        timeout: 8,
        retry_cnt: 1,
        rnr_retry: 1,
        ah_attr: abi::AhAttr {
            grh: abi::GlobalRoute { dgid, ..Default::default() },
            is_global: 1,
            port_num: 1,
            ..Default::default()
        },
        ..Default::default()
    };
    let steps = [
        (1, m::PKEY_INDEX | m::PORT | m::ACCESS_FLAGS),
        (2, m::AV | m::PATH_MTU | m::DEST_QPN | m::RQ_PSN | m::MAX_DEST_RD_ATOMIC | m::MIN_RNR_TIMER),
        (3, m::TIMEOUT | m::RETRY_CNT | m::RNR_RETRY | m::SQ_PSN | m::MAX_QP_RD_ATOMIC),
    ];
    for (state, mask) in steps {
        let req = abi::ModifyQpReq { qpn, attr_mask: m::STATE | mask, attr: abi::QpAttr { qp_state: state, ..attr } };
        assert_eq!(h.command(abi::Command::ModifyQp as u8, req.as_bytes()).0, 0);
    }
}

#[test]
fn random_rings_and_doorbells_break_their_own_qp_only() {
    let scene = Scene::start();
    let word = prop_oneof![Just(0u64), Just(1), any::<u64>(), Just(u64::MAX), 0..40u64];
    let words = proptest::collection::vec((0..0xa000u64 / 8, word), 1..60);
    proptest!(config(60), |(ring in words, bells in proptest::collection::vec(any::<u64>(), 64), prods in any::<(u32, u32)>(), own in any::<bool>())| {
        let mut h = Hostile::new(&scene.evil);
        let (qpn, slot, at) = make_qp(&mut h);
        let peer = if own { (qpn, 3) } else { (scene.good.1.qp.qpn, 2) };
        to_rts(&mut h, qpn, peer.0, peer.1);
        for (i, w) in &ring {
            h.memory().write((at + i * 8) as usize, &w.to_ne_bytes());
        }
        h.memory().write(at as usize, &(prods.0 % 40).to_ne_bytes());
        h.memory().write(at as usize + 4, &(prods.1 % 40).to_ne_bytes());
        let page = 0x3_0000;
        for (i, w) in bells.iter().enumerate() {
            h.memory().write(page + abi::DB_BITS + i * 8, &w.to_ne_bytes());
        }
        h.memory().write(page + abi::DB_BITS + slot as usize / 64 * 8, &u64::MAX.to_ne_bytes());
        h.memory().write(page + abi::DB_SUMMARY, &u64::MAX.to_ne_bytes());
        h.wake();
        prop_assert_eq!(h.command(abi::Command::QueryDevice as u8, &[]).0, 0);
    });
    scene.check();
}

#[test]
fn others_get_all_their_work_done_meanwhile() {
    let scene = Scene::start();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|s| {
        s.spawn(|| {
            let mut h = Hostile::new(&scene.evil);
            let (qpn, slot, at) = make_qp(&mut h);
            to_rts(&mut h, qpn, qpn, 3);
            let mut n = 0u32;
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                n = n.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                // Endless posts of junk, with indices in and out of range, and all doorbells rung.
                h.memory().write(at as usize, &(n >> 20).to_ne_bytes());
                h.memory().write(0x3_0000 + abi::DB_BITS + slot as usize / 64 * 8, &u64::MAX.to_ne_bytes());
                h.memory().write(0x3_0000 + abi::DB_SUMMARY, &u64::MAX.to_ne_bytes());
                h.wake();
                if n % 64 == 0 {
                    h.command((n >> 8) as u8 % 30, &n.to_ne_bytes());
                    Hostile::raw(&scene.evil, &[n as u8; 40]);
                }
            }
        });
        let (a, b) = &scene.good;
        for i in 0..2000 {
            a.post(WrOpcode::Write, b, i % 100 * 64, 4096).unwrap();
            assert_eq!(a.wait().unwrap().status, 0, "write {i}");
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    scene.check();
}

#[test]
fn memory_that_is_taken_away_grants_nothing() {
    let scene = Scene::start();
    let fd = rustix::fs::memfd_create(c"shrinks", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, 1 << 20).unwrap();
    let desc = unirdma_link::RegionDesc { bus_addr: 1 << 52, size: 1 << 20, user_addr: 1 << 52, mmap_offset: 0 };
    let pages = abi::RegUserMrReq {
        pdn: 0,
        start: 1 << 52,
        length: 8192,
        pages_addr: 1 << 52,
        npages: 2,
        ..Default::default()
    };
    let mut h = Hostile::new(&scene.evil);
    h.frontend.add_region(desc, std::os::fd::AsFd::as_fd(&fd)).unwrap();
    h.frontend.remove_region(desc).unwrap();
    assert_ne!(h.command(abi::Command::RegUserMr as u8, pages.as_bytes()).0, 0);
    assert_ne!(h.command(abi::Command::SetDoorbell as u8, (1u64 << 52).as_bytes()).0, 0);
    // A file shrinks while the device uses it. The device finds that its page list is gone, answers, and ends the
    // session.
    h.frontend.add_region(desc, std::os::fd::AsFd::as_fd(&fd)).unwrap();
    rustix::fs::ftruncate(&fd, 0).unwrap();
    assert_ne!(h.command(abi::Command::RegUserMr as u8, pages.as_bytes()).0, 0);
    scene.check();
}

#[test]
fn a_killed_program_gives_its_peer_what_hardware_would() {
    let host = TestHost::start();
    let (a, b) = (host.add("a", "10.0.0.1"), host.add("b", "10.0.0.2"));
    let p = Program::new(&a, 4096);
    {
        let q = Program::new(&b, 4096);
        connect(&p, &q);
        p.post(WrOpcode::Write, &q, 0, 8).unwrap();
        assert_eq!(p.wait().unwrap().status, 0);
        p.post(WrOpcode::Send, &q, 0, 8).unwrap();
        // No receive is posted; then the peer ends without notice.
    }
    let c = p.wait().unwrap();
    assert_eq!(c.status, 12, "IBV_WC_RETRY_EXC_ERR");
    let shown = host.ask(&unirdma_supervisor::admin::Request::VrnicShow { name: "b".into() }).unwrap();
    let unirdma_supervisor::admin::Response::Vrnic(v) = shown else { panic!() };
    assert_eq!((v.sessions, v.qps, v.cqs, v.mrs_mapped + v.mrs_copied), (0, 0, 0, 0));
}

#[test]
fn a_lost_virtual_layer_is_a_fatal_event_and_error_codes() {
    let mut host = TestHost::start();
    let p = Program::new(&host.add("a", "10.0.0.1"), 4096);
    host.stop();
    let e = p.ctx.next_async().unwrap();
    assert_eq!(e.kind, unirdma_formats::AsyncEvent::DeviceFatal as u32);
    assert!(p.ctx.next_async().is_err(), "told once");
    assert!(p.cq.poll(1, |_, _| ()).is_err());
    assert!(p.qp.query().is_err());
    assert!(p.qp.destroy().is_ok() && p.cq.destroy().is_ok(), "what is gone needs no destroying");
}

#[test]
fn messages_of_two_gigabytes_arrive_and_longer_ones_are_refused() {
    let host = TestHost::start();
    let (a, b) = (host.add("a", "10.0.0.1"), host.add("b", "10.0.0.2"));
    let len = unirdma_formats::MAX_MSG_BYTES as usize;
    let (mut p, q) = (Program::new(&a, len + 4096), Program::new(&b, len));
    connect(&p, &q);
    let places = || (0..len).step_by(99_991).chain([len - 1]);
    places().for_each(|i| p.buf[i] = (i * 7 + i / 4096) as u8 | 1);
    q.recv(0, len).unwrap();
    p.post(WrOpcode::Send, &q, 0, len).unwrap();
    assert_eq!((p.wait().unwrap().status, q.wait().unwrap().byte_len as usize), (0, len));
    assert!(places().all(|i| q.byte(i) == p.byte(i) && q.byte(i) != 0));
    p.post(WrOpcode::Send, &q, 0, len + 1).unwrap();
    assert_eq!(p.wait().unwrap().status, unirdma_formats::WcStatus::LocLenErr as u8);
}

/// QEMU reconnects without pause if it does not get its network interface.
#[test]
fn who_gets_no_network_interface_waits_a_moment() {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;
    use std::time::{Duration, Instant};
    let scene = Scene::start();
    let path = scene.evil.with_file_name("net.sock");
    // GET_FEATURES, version 1, no payload; the answer has 20 bytes.
    let ask = |s: &mut UnixStream| {
        s.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        s.write_all([1u32, 1, 0].as_bytes()).unwrap();
        s.read(&mut [0; 64]).unwrap_or(0)
    };
    let mut first = UnixStream::connect(&path).unwrap();
    assert_eq!(ask(&mut first), 20);
    let start = Instant::now();
    let mut second = UnixStream::connect(&path).unwrap();
    assert_eq!(ask(&mut second), 0, "it ends without an answer");
    assert!(start.elapsed() >= Duration::from_millis(900), "after {:?}", start.elapsed());
    drop(first);
    let free = || ask(&mut UnixStream::connect(&path).unwrap()) == 20;
    assert!((0..3).any(|_| free()), "the interface is free again");
    // Enough connections at once that some of them are closed at once.
    let _first = UnixStream::connect(&path).unwrap();
    let many: Vec<_> = (0..100).filter_map(|_| UnixStream::connect(&path).ok()).collect();
    scene.check();
    drop(many);
    scene.check();
}
