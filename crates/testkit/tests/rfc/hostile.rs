//! A hostile driver harms only itself, and a session of this mode obeys the limits of all sessions.

use unirdma_abi::rfc::{self, opcode as op};
use unirdma_link::Segment;
use unirdma_supervisor::admin::{Request, Response};
use unirdma_testkit::rfc::{BUS, RfcDriver, send, wait_for};
use unirdma_testkit::{Scene, TestHost};

use crate::world::{IP, RC, Side, connect, pair, wc};

/// A driver on the third vRNIC of a scene.
fn evil(s: &Scene) -> Side {
    let socket = s.evil.with_file_name("rfc.sock");
    Side::new(RfcDriver::new(&socket, "10.0.0.3"), RC)
}

/// Connects the QP of a driver with another QP of the same driver.
fn alone(s: &mut Side) -> unirdma_testkit::rfc::RfcQp {
    let other = s.d.qp(s.pd, &s.cq, RC);
    let gid = s.d.gid;
    s.d.connect(s.qp.qpn, RC, gid, other.qpn).unwrap();
    s.d.connect(other.qpn, RC, gid, s.qp.qpn).unwrap();
    other
}

#[test]
fn bad_chains_in_a_send_queue_fail_one_by_one() {
    let scene = Scene::start();
    let mut s = evil(&scene);
    let chains: [&[Segment]; 5] = [
        // Outside memory, across its end, across the end of the address space, with a writable part, and empty.
        &[Segment { addr: 4096, len: 75, write: false }],
        &[Segment { addr: BUS + (32 << 20) - 8, len: 75, write: false }],
        &[Segment { addr: u64::MAX - 8, len: 75, write: false }],
        &[Segment { addr: BUS, len: 75, write: false }, Segment { addr: BUS, len: 75, write: true }],
        &[Segment { addr: BUS, len: 0, write: false }],
    ];
    for chain in chains {
        let other = alone(&mut s);
        s.qp.sq.publish(0, chain);
        let c = s.cq.wait();
        assert_eq!((c.status, c.qp_num.get()), (wc::LOC_QP_OP_ERR, s.qp.qpn));
        s.qp.sq.queue.pop_used().expect("its chain comes back");
        s.d.move_to(s.qp.qpn, 0).unwrap();
        s.d.destroy_qp(&other).unwrap();
        scene.check();
    }
}

#[test]
fn a_chain_without_end_is_one_bad_request() {
    let scene = Scene::start();
    let mut s = evil(&scene);
    alone(&mut s);
    // Descriptor 1 leads to descriptor 1.
    let (desc, ..) = s.qp.sq.queue.addresses();
    let at = desc as usize - s.d.memory().addr() + 16;
    let looped = [BUS.to_le_bytes().to_vec(), 75u32.to_le_bytes().to_vec(), vec![1, 0, 1, 0]].concat();
    s.qp.sq.publish(0, &[Segment { addr: BUS, len: 75, write: false }]);
    assert_eq!(s.cq.wait().status, wc::LOC_QP_OP_ERR, "there are zeros, which are a WRITE to nowhere");
    s.d.memory().write(at, &looped);
    s.qp.sq.publish(2, &[Segment { addr: BUS, len: 75, write: false }]);
    s.d.memory().write(at + 16, &looped);
    s.qp.sq.kick();
    s.cq.wait();
    scene.check();
}

#[test]
fn kicks_of_virtqueues_without_objects_and_indices_that_jump_do_nothing() {
    use std::sync::atomic::Ordering;
    let scene = Scene::start();
    let mut s = evil(&scene);
    for index in [5, 60, 127, 200, 255] {
        let mut vq = s.d.new_queue(index, 8, 128);
        s.d.start(&vq).unwrap();
        (0..8).for_each(|_| assert!(vq.post(&[0xff; 80])));
        (0..100).for_each(|_| vq.kick());
        assert!(vq.reclaim().is_empty());
    }
    alone(&mut s);
    let (_, avail, _) = s.qp.sq.queue.addresses();
    let at = avail as usize - s.d.memory().addr() + 2;
    let right = s.d.memory().load16(at, Ordering::Relaxed);
    s.d.memory().store16(at, right.wrapping_add(1000), Ordering::SeqCst);
    (0..10).for_each(|_| s.qp.sq.kick());
    scene.check();
    s.cq.stays_empty();
    s.d.memory().store16(at, right, Ordering::SeqCst);
    s.qp.send_inline(send(op::RDMA_WRITE, 1), b"x");
    assert_eq!((s.cq.wait().wr_id.get(), s.cq.poll()), (1, None));
    scene.check();
}

#[test]
fn a_driver_that_posts_more_than_there_is_room_for_is_served_as_room_comes() {
    let (_host, mut a, b) = pair(RC);
    // One chain, named 60,000 times: the device takes as many as its ring holds, and then as many as were executed.
    let mut r = send(op::RDMA_WRITE, 1);
    r.send_flags = 0.into();
    r.set_part(&b.mr.remote(0));
    for _ in 0..2000 {
        a.qp.sq.reclaim();
        if !a.qp.sq.post(zerocopy::IntoBytes::as_bytes(&r)) {
            // Without completions, chains come back when the driver kicks.
            a.qp.sq.kick();
            std::thread::yield_now();
        }
    }
    wait_for("a free chain", || {
        a.qp.sq.kick();
        a.qp.sq.reclaim();
        (a.qp.sq.free() > 0).then_some(())
    });
    let remote = b.mr.remote(0);
    a.rdma(op::RDMA_WRITE, 7, (0, 8), remote);
    assert_eq!((a.cq.wait().wr_id.get(), a.state()), (7, 3));
}

#[test]
fn a_session_that_pauses_does_nothing_and_goes_on() {
    let (_host, mut a, mut b) = pair(RC);
    let remote = b.mr.remote(0);
    a.put(0, &[7; 8]);
    let mr = b.mr;
    b.d.pause(|d| {
        a.rdma(op::RDMA_WRITE, 2, (0, 8), remote);
        std::thread::sleep(std::time::Duration::from_millis(5));
        assert_eq!(d.read(&mr, 0, 8), [0; 8]);
    });
    // The peer may have used up its retries meanwhile.
    if a.cq.wait().status != wc::SUCCESS {
        for s in [&mut a, &mut b] {
            s.d.move_to(s.qp.qpn, 0).unwrap();
        }
        connect(&mut a, &mut b, RC);
        a.rdma(op::RDMA_WRITE, 3, (0, 8), remote);
        assert_eq!(a.cq.wait().status, wc::SUCCESS);
    }
    assert_eq!(b.bytes(0, 8), [7; 8]);
}

#[test]
fn memory_that_goes_takes_its_mrs_and_virtqueues_along() {
    let (_host, mut a, mut b) = pair(RC);
    let region = unirdma_link::RegionDesc {
        bus_addr: BUS,
        size: 32 << 20,
        user_addr: b.d.memory().addr() as u64,
        mmap_offset: 0,
    };
    b.d.frontend.remove_region(region).unwrap();
    let remote = b.mr.remote(0);
    a.rdma(op::RDMA_WRITE, 1, (0, 8), remote);
    assert_eq!(a.cq.wait().status, wc::REM_ACCESS_ERR);
    b.qp.sq.kick();
    a.d.query(a.qp.qpn).unwrap();
}

#[test]
fn a_vrnic_has_as_many_sessions_of_both_modes_as_it_may() {
    let host = TestHost::start();
    let socket = host.add_with("a", IP[0], |v| v.max_sessions = Some(1)).with_file_name("rfc.sock");
    let d = RfcDriver::new(&socket, IP[0]);
    let mut second = unirdma_link::Frontend::connect(&socket).unwrap();
    // It may read the configuration space.
    let config = second.config(128).unwrap();
    assert_eq!(config, zerocopy::IntoBytes::as_bytes(&d.config));
    let refused = second.open_channel(0).unwrap_err();
    assert!(refused.raw_os_error().is_some(), "{refused}");
    assert!(unirdma_link::Frontend::connect(&socket).unwrap().set_vring(0, 8, 0, 0, 0).is_err());
    drop(d);
    wait_for("the session's end", || {
        let shown = host.ask(&Request::VrnicShow { name: "a".into() });
        matches!(shown, Ok(Response::Vrnic(v)) if v.sessions == 0).then_some(())
    });
    RfcDriver::new(&socket, IP[0]);
}

#[test]
fn what_a_session_holds_is_on_the_account_of_its_vrnic_and_ends_with_it() {
    let host = TestHost::start();
    let socket = host.add_with("a", IP[0], |v| v.held.max_address_space = Some(40 << 20)).with_file_name("rfc.sock");
    let mut s = Side::new(RfcDriver::new(&socket, IP[0]), RC);
    // 32 MiB are the driver's memory, and the rings of its objects count too.
    let most = (0..64).take_while(|_| {
        let r = rfc::CreateQp {
            max_send_sge: 32.into(),
            max_recv_sge: 32.into(),
            ..unirdma_testkit::rfc::qp_request(s.pd, s.cq.cqn, s.cq.cqn, RC)
        };
        s.d.try_qp(&r).is_ok()
    });
    let made = most.count();
    assert!((1..20).contains(&made), "{made} QPs of 1 MiB each");
    drop(s);
    let mut again = Side::new(
        wait_for("the session's end", || {
            let shown = host.ask(&Request::VrnicShow { name: "a".into() });
            let gone = matches!(shown, Ok(Response::Vrnic(v)) if v.sessions == 0 && v.qps == 0);
            gone.then(|| RfcDriver::new(&socket, IP[0]))
        }),
        RC,
    );
    alone(&mut again);
}

#[test]
fn random_commands_and_elements_end_no_session_but_their_own() {
    let scene = Scene::start();
    let mut s = evil(&scene);
    let mut seed = 0x1234_5678_9abc_def1u64;
    let mut random = move || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed
    };
    for _ in 0..1500 {
        let len = (random() % 150) as usize;
        let mut bytes: Vec<u8> = (0..=len).map(|_| random() as u8).collect();
        bytes[0] = (random() % 20) as u8;
        // Uses existing handles now and then.
        if bytes.len() > 8 && random() % 2 == 0 {
            let known = [s.qp.qpn, s.pd, s.cq.cqn, s.mr.mrn][(random() % 4) as usize];
            bytes[1..5].copy_from_slice(&known.to_le_bytes());
        }
        assert!(!s.d.request(&bytes, 200).is_empty());
        let wqe: Vec<u8> = (0..random() % 200).map(|_| random() as u8).collect();
        if random() % 2 == 0 {
            s.qp.sq.post(&wqe)
        } else {
            s.qp.rq.post(&wqe)
        };
        s.cq.poll();
    }
    scene.check();
    drop(s);
    scene.check();
}
