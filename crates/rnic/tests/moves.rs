//! vRNICs that are saved and restored: work under way goes on where they are restored, exactly once.

use unirdma_abi as abi;
use unirdma_formats::{QpType, WcStatus, WrOpcode, attr_mask as m};
use unirdma_mem::ProcMem;
use unirdma_rnic::*;
use unirdma_simkit::cm::Meeting;
use unirdma_simkit::net::{Faults, Net, gid};
use unirdma_simkit::*;

const MS: u64 = 1_000_000;

#[test]
fn datagrams_keep_their_traffic_class_when_their_receiver_moves() {
    let mut net = Net::hosts(2, &[QpType::Ud; 2], 9, Faults::default());
    net.connect(QpType::Ud, 0, 1, &|a| a);
    let (session, pd, to) = (net.ends[0].session, net.ends[0].pd, net.ends[1].qpn);
    let with = |traffic_class, sl| {
        let mut there = abi::AhAttr { sl, ..address(gid(1)) };
        there.grh.traffic_class = traffic_class;
        there
    };
    // Without a class the service level has one.
    let of_ah = [(with(0x2b, 3), 0x28), (with(1, 3), 0x60), (with(0, 9), 0)]
        .map(|(there, class)| (net.rnic(0).create_ah(session, pd, &there).unwrap(), class));
    for (after_move, (ah, class)) in of_ah.map(|a| (false, a)).into_iter().chain(of_ah.map(|a| (true, a))) {
        if after_move {
            net.rnics[0].reroute(0, gid(1));
        }
        let sge = net.ends[0].sge(0, 8);
        net.ends[0].post_to(wqe(WrOpcode::Send, 1), ah, to, &[sge]);
        net.rnics[0].poll(net.now);
        let tx = net.rnics[0].tx();
        let classes: Vec<u8> = tx.packets().iter().map(|p| p.path.class).collect();
        tx.sent(classes.len());
        // The two bits of ECN are the network's.
        assert_eq!(classes, [class], "after a move: {after_move}");
    }
}

#[test]
fn packets_of_a_connection_have_the_class_of_its_address() {
    for (traffic_class, sl, class) in [(0, 0, 0), (0x6b, 0, 0x68), (0x6b, 5, 0x68), (0, 5, 0xa0)] {
        let mut net = Net::hosts(2, &[QpType::Rc; 2], 9, Faults::default());
        let to = |mut a: abi::QpAttr| {
            (a.ah_attr.sl, a.ah_attr.grh.traffic_class) = (sl, traffic_class);
            a
        };
        net.connect(QpType::Rc, 0, 1, &to);
        let (w, sge) = (net.remote(WrOpcode::Write, 1, 0), net.ends[0].sge(0, 8));
        net.ends[0].post(w, &[sge]);
        net.rnics[0].poll(net.now);
        let classes: Vec<u8> = net.rnics[0].tx().packets().iter().map(|p| p.path.class).collect();
        assert_eq!(classes, [class], "traffic class {traffic_class}, level {sl}");
    }
}

/// A long message between two vRNICs of a host is copied in slices. After `rounds` of them one vRNIC moves to the other
/// host.
#[test]
fn a_message_within_a_host_goes_on_between_hosts() {
    const BYTES: usize = 500_000;
    for op in [WrOpcode::Write, WrOpcode::WriteImm, WrOpcode::Send, WrOpcode::SendImm, WrOpcode::Read] {
        for (mover, rounds) in (0..2).flat_map(|mover| (0..8).map(move |rounds| (mover, rounds))) {
            let about = format!("{op:?}, end {mover} moves after {rounds} rounds");
            let mut net = Net::together(QpType::Rc);
            let [mine, theirs] = [1, 2].map(|salt| pattern(BYTES, salt));
            net.ends[0].fill(0, &mine);
            net.ends[1].fill(0, &theirs);
            if op.consumes_recv() {
                let sge = net.ends[1].sge(0, BYTES as u32);
                net.ends[1].recv(50, &[sge]);
            }
            let (w, sge) = (net.request(op, 1), net.ends[0].sge(0, BYTES as u32));
            net.ends[0].post(w, &[sge]);
            (0..rounds).for_each(|_| _ = net.rnics[0].poll(0));
            net.leave(mover, 1, 0);
            net.run(SECOND);
            assert_eq!(status(&net.ends[0].done()), WcStatus::Success, "{about}");
            assert_eq!(net.ends[1].poll().len(), usize::from(op.consumes_recv()), "{about}");
            let (to, expected) = if op == WrOpcode::Read { (0, theirs) } else { (1, mine) };
            assert!(net.ends[to].bytes(0, BYTES) == expected, "{about}");
            // Later requests go over the wire as well, both ways.
            for end in [0, 1] {
                let (sge, key) = (net.ends[end].sge(0, 100), net.ends[1 - end].key);
                let w = abi::SqWqe { remote_addr: IOVA, rkey: key, ..wqe(WrOpcode::Write, 5) };
                net.ends[end].post(w, &[sge]);
                net.run(SECOND);
                assert_eq!(status(&net.ends[end].done()), WcStatus::Success, "{about}");
            }
        }
    }
}

/// An atomic whose result could not be stored yet has been executed. Wherever the two ends are afterwards, it is not
/// executed again.
#[test]
fn an_atomic_is_executed_once() {
    for (op, mover, to) in [WrOpcode::FetchAdd, WrOpcode::CmpSwap]
        .into_iter()
        .flat_map(|op| [(op, 0, 0), (op, 0, 1), (op, 1, 0), (op, 1, 1)])
    {
        let about = format!("{op:?}, end {mover} moves to host {to}");
        let mut net = Net::together(QpType::Rc);
        net.go_through_process(0);
        net.ends[1].fill(0, &3u64.to_ne_bytes());
        net.ends[0].bell.begin_move();
        let (w, sge) = (net.request(op, 1), net.ends[0].sge(64, 8));
        net.ends[0].post(w, &[sge]);
        net.run(MS);
        assert!(net.ends[0].poll().is_empty(), "{about}");
        let after = if op == WrOpcode::FetchAdd { 6u64 } else { 9 };
        assert_eq!(net.ends[1].bytes(0, 8), after.to_ne_bytes(), "{about}");
        net.leave(mover, to, MS);
        net.run(2 * MS);
        net.ends[0].bell.end_move();
        net.run(SECOND);
        assert_eq!(status(&net.ends[0].done()), WcStatus::Success, "{about}");
        assert_eq!(net.ends[1].bytes(0, 8), after.to_ne_bytes(), "{about}: once");
        assert_eq!(net.ends[0].bytes(64, 8), 3u64.to_ne_bytes(), "{about}");
    }
}

/// A request that waits for a receive goes on waiting, and its retries go on.
#[test]
fn a_wait_for_a_receive_outlives_a_move() {
    for mover in [0, 1] {
        let mut net = Net::together(QpType::Rc);
        let (w, sge) = (net.request(WrOpcode::Send, 1), net.ends[0].sge(0, 100));
        net.ends[0].post(w, &[sge]);
        net.run(MS);
        assert!(net.counters(0).rnr_waits > 0);
        net.leave(mover, 1, 5 * MS);
        net.run(20 * MS);
        let sge = net.ends[1].sge(0, 100);
        net.ends[1].recv(2, &[sge]);
        net.run(SECOND);
        assert_eq!((status(&net.ends[0].done()), net.ends[1].done().wr_id), (WcStatus::Success, 2));
    }
}

/// A copy that a thread does at the moment of the save is stopped, and done again elsewhere.
#[test]
fn a_copy_under_way_is_stopped() {
    const BYTES: usize = 100_000;
    for mover in [0, 1] {
        let mut net = Net::together(QpType::Rc);
        for end in [0, 1] {
            net.ends[end].fill(0, &pattern(BYTES, end as u64));
            let (to, key) = (IOVA + BYTES as u64, net.ends[1 - end].key);
            let w = abi::SqWqe { remote_addr: to, rkey: key, ..wqe(WrOpcode::Write, 1) };
            let sge = net.ends[end].sge(0, BYTES as u32);
            net.ends[end].post(w, &[sge]);
        }
        // Both vRNICs have work, so both copies become jobs. A round ends after it has made one.
        let jobs = [(); 2].map(|()| {
            net.rnics[0].poll(0);
            net.rnics[0].take_job().unwrap()
        });
        let session = net.ends[mover].session;
        net.leave(mover, 1, MS);
        assert!(!net.rnics[0].has_copies(session), "nobody has begun");
        for mut job in jobs {
            job.run(&mut [0; 4096], || 0);
            net.rnics[0].end_job(job);
        }
        assert_eq!(net.ends[1].bytes(BYTES, BYTES), vec![0; BYTES], "it was stopped before it began");
        net.run(SECOND);
        for end in [0, 1] {
            assert_eq!(status(&net.ends[end].done()), WcStatus::Success);
            assert!(net.ends[1 - end].bytes(BYTES, BYTES) == pattern(BYTES, end as u64));
        }
    }
}

/// Connections are made, used and ended by address while both ends move about.
#[test]
fn connections_are_made_and_ended_on_the_move() {
    let mut moves = 0;
    for seed in 0..60 {
        let faults = Faults { loss: 20, duplication: 20, reordering: 20, corruption: 5 };
        let mut net = Net::homes(3, &[QpType::Rc; 2], seed, faults, |end| end * (seed & 1) as usize);
        net.wander = 300;
        let meeting = Meeting::new(&mut net, 0, 1);
        meeting.end(&mut net, seed as usize & 1);
        moves += net.moves;
    }
    assert!(moves > 60, "{moves}");
}

/// One RNIC has saved two vRNICs at one moment, and another one restores them, in either order. Connections between
/// them are within the host then as they were before.
#[test]
fn what_was_saved_together_is_within_a_host_again() {
    for (op, first) in [(WrOpcode::Write, 0), (WrOpcode::Write, 1), (WrOpcode::Send, 0), (WrOpcode::FetchAdd, 1)] {
        let mut net = Net::together(QpType::Rc);
        let len = if op == WrOpcode::FetchAdd { 8 } else { 500_000 };
        let mine = pattern(len, 1);
        net.ends[0].fill(0, &mine);
        if op == WrOpcode::Send {
            let sge = net.ends[1].sge(0, len as u32);
            net.ends[1].recv(50, &[sge]);
        }
        let (w, sge) = (net.request(op, 1), net.ends[0].sge(0, len as u32));
        net.ends[0].post(w, &[sge]);
        net.rnics[0].poll(0);
        net.rnics[0].poll(0);
        let saved = [0, 1].map(|end| net.rnics[0].save_vrnic(0, net.ends[end].vrnic).unwrap());
        let mut memory = [0, 1].map(|end| net.rnics[0].take_vrnic(0, net.ends[end].vrnic).unwrap().1);
        let mut rnic = Rnic::new(77, 0);
        for end in [first, 1 - first] {
            net.ends[end].vrnic = rnic.restore_vrnic(0, &saved[end], &mut memory[end]).unwrap();
            // There are no answers before both are there, and nothing is lost by that.
            while poll(&mut rnic, 0) {}
        }
        net.rnics[0] = rnic;
        net.run(SECOND);
        assert_eq!(status(&net.ends[0].done()), WcStatus::Success, "{op:?}");
        assert_eq!(net.ends[1].poll().len(), usize::from(op.consumes_recv()), "{op:?}");
        if op == WrOpcode::FetchAdd {
            assert_eq!(net.ends[1].bytes(0, 8), 3u64.to_ne_bytes());
        } else {
            assert!(net.ends[1].bytes(0, len) == mine, "{op:?}");
        }
        let info = net.rnics[0].queue_pairs(net.ends[0].vrnic);
        assert_eq!((info[0].peer_host, info[0].counters.wire.sent_pkts), (None, 0), "{op:?}: without packets");
    }
}

/// A program may connect to a vRNIC that is moving, also one of its own host, and uses the connection when the vRNIC is
/// there.
#[test]
fn a_connection_is_made_while_its_peer_moves() {
    for (home, to) in [(0, 0), (0, 1), (1, 0)] {
        let mut net = Net::homes(2, &[QpType::Rc; 2], 9, Faults::default(), |end| end * home);
        let patient = |a| abi::QpAttr { retry_cnt: 7, ..a };
        net.leave(1, to, SECOND / 10);
        net.connect(QpType::Rc, 0, 1, &patient);
        let (w, sge) = (net.request(WrOpcode::Write, 1), net.ends[0].sge(0, 100));
        net.ends[0].post(w, &[sge]);
        net.run(SECOND / 20);
        assert!(net.ends[0].poll().is_empty());
        net.connect(QpType::Rc, 1, 0, &patient);
        net.run(SECOND);
        assert_eq!(status(&net.ends[0].done()), WcStatus::Success, "from host {home} to host {to}");
    }
}

/// Reports that were due are made where the vRNIC is restored: events, and completions that wait for more of them.
#[test]
fn events_and_armings_are_kept() {
    let mut net = Net::together(QpType::Rc);
    let (session, cqn) = (net.ends[0].session, net.ends[0].cqn);
    net.rnic(0).modify_cq(session, cqn, 5, 1000).unwrap();
    net.rnic(0).req_notify_cq(session, cqn, abi::NOTIFY_NEXT).unwrap();
    let (w, sge) = (net.request(WrOpcode::Write, 1), net.ends[0].sge(0, 100));
    net.ends[0].post(w, &[sge]);
    net.run(100_000);
    let err = abi::QpAttr { qp_state: 6, ..Default::default() };
    let vrnic = net.ends[0].vrnic;
    net.rnic(0).set_link(vrnic, false);
    net.leave(0, 1, 0);
    net.come_back(0);
    let session = net.ends[0].session;
    let mut out = Vec::new();
    net.rnics[1].drain_outputs(&mut out);
    assert_eq!(out.len(), 1, "{out:?}");
    assert_eq!(out[0].session(), session);
    assert!(matches!(out[0], Output::Async { kind: unirdma_formats::AsyncEvent::PortErr, handle: 1, .. }));
    assert!(!net.rnics[1].is_up(net.ends[0].vrnic));
    net.run(2 * MS);
    out.clear();
    net.rnics[1].drain_outputs(&mut out);
    assert_eq!(out, [Output::Completion { session, queue: 0, cqn, asked: true }], "the period is over");
    assert_eq!(net.ends[0].done().wr_id, 1);
    let qpn = net.ends[0].qpn;
    net.rnic(0).modify_qp(session, qpn, m::STATE, &err).unwrap();
}

/// The object numbers of a session go on where they were.
#[test]
fn numbers_go_on() {
    let mut net = Net::together(QpType::Rc);
    let last = net.ends[0].mr;
    net.leave(0, 1, 0);
    net.come_back(0);
    let session = net.ends[0].session;
    assert_eq!(net.rnic(0).create_pd(session), Ok(last + 1));
    let vrnic = net.ends[0].vrnic;
    let second = net.rnic(0).add_session(vrnic).unwrap();
    assert_eq!(net.rnics[1].numbered_sessions(vrnic), [(1, session), (2, second)]);
}

/// The driver places a message in the stage after the move, and a datagram waits for its receive during the move.
#[test]
fn what_waits_for_a_program_waits_on() {
    let mut net = Net::together(QpType::Ud);
    let ah = net.ah(0, 1);
    let qpn = net.ends[1].qpn;
    net.ends[0].fill(0, &pattern(200, 3));
    let sge = net.ends[0].sge(0, 200);
    net.ends[0].post_to(wqe(WrOpcode::Send, 1), ah, qpn, &[sge]);
    net.run(MS);
    assert_eq!(net.ends[0].done().wr_id, 1);
    net.leave(1, 1, MS);
    net.run(2 * MS);
    let sge = net.ends[1].sge(0, 1000);
    net.ends[1].recv(2, &[sge]);
    net.run(MS);
    let done = net.ends[1].done();
    assert_eq!((done.wr_id, done.byte_len, net.counters(1).dropped), (2, 240, 0));
    assert_eq!(net.ends[1].bytes(40, 200), pattern(200, 3));
    // The AH of the vRNIC that stayed leads to the vRNIC that moved.
    let sge = net.ends[1].sge(0, 1000);
    net.ends[1].recv(3, &[sge]);
    let sge = net.ends[0].sge(0, 200);
    net.ends[0].post_to(wqe(WrOpcode::Send, 4), ah, qpn, &[sge]);
    net.run(MS);
    assert_eq!((net.ends[0].done().wr_id, net.ends[1].done().wr_id), (4, 3));

    let mut net = Net::together(QpType::Rc);
    let stage = aligned(16 << 10);
    let e = &net.ends[1];
    let backing = Backing::Process(ProcMem::of_self().unwrap(), e.memory.addr() as u64);
    let (session, pd, flags) = (e.session, e.pd, ALL | unirdma_formats::access::STAGE);
    net.rnic(1).set_stage(session, stage.clone()).unwrap();
    let (_, key) = net.rnic(1).reg_mr(session, pd, flags, IOVA, MR_BYTES as u64, (backing, vec![8])).unwrap();
    net.ends[1].key = key;
    for round in 0..20u64 {
        let bytes = pattern(5000, round);
        net.ends[0].fill(0, &bytes);
        let (to, from) = (net.ends[1].sge(0, 5000), net.ends[0].sge(0, 5000));
        net.ends[1].recv(round, &[to]);
        net.ends[0].post(wqe(WrOpcode::Send, round), &[from]);
        // It moves before, while and after the message comes in.
        let now = net.now;
        (0..round % 4).for_each(|_| _ = net.rnics[0].poll(now));
        net.leave(1, (round % 2) as usize, 0);
        net.run(SECOND);
        net.leave(1, (round % 2) as usize, 0);
        net.run(MS);
        assert_eq!(net.ends[0].done().wr_id, round);
        let done = net.ends[1].done();
        assert_ne!(done.staged, 0);
        let mut got = vec![0; 5000];
        stage.read(done.staged as usize + abi::stage_head(1), &mut got);
        assert!(got == bytes, "round {round}");
        stage.store32(done.staged as usize, 0, std::sync::atomic::Ordering::Release);
    }
}

/// Two programs of a vRNIC that share an XRC domain and a target still share them after a move, and the target lives on
/// for the second one when the first one has destroyed it.
#[test]
fn shared_domains_and_targets_are_kept() {
    let mut net = Net::homes(2, &[QpType::XrcSend, QpType::Rc], 9, Faults::default(), |_| 0);
    let vrnic = net.ends[1].vrnic;
    let mut second = End::of_vrnic(net.rnic(1), vrnic, 64, QpType::Rc);
    let shared = OpenXrcd { key: Some((1, 2)), create: true, exclusive: false };
    let first = std::mem::replace(&mut net.ends[1], End::new(&mut Rnic::new(1, 0), 9, 99));
    let mut queues = [&first, &second].map(|e| xrc::XrcSrq::new(net.rnic(1), e, shared));
    net.ends[1] = first;
    let target = xrc::connect_target(&mut net, 0, 1, queues[0].xrcd, &|a| abi::QpAttr { retry_cnt: 7, ..a });
    net.rnic(1).open_qp(second.session, queues[1].xrcd, target).unwrap();
    net.leave(1, 1, MS);
    net.come_back(1);
    let vrnic = net.ends[1].vrnic;
    second.session = net.rnics[1].numbered_sessions(vrnic)[1].1;
    for round in 0..2u64 {
        for (to, queue) in queues.iter_mut().enumerate() {
            let number = queue.number;
            let sge = if to == 0 { net.ends[1].sge(0, 1000) } else { second.sge(0, 1000) };
            queue.recv(round, &[sge]);
            let sge = net.ends[0].sge(0, 500);
            net.ends[0].post(abi::SqWqe { dest_qpn: number, ..wqe(WrOpcode::Send, round) }, &[sge]);
            net.run(SECOND);
            assert_eq!(status(&net.ends[0].done()), WcStatus::Success, "round {round}, to {to}");
            let done = if to == 0 { net.ends[1].done() } else { second.done() };
            assert_eq!((done.wr_id, done.byte_len), (round, 500));
        }
        if round == 0 {
            let session = net.ends[1].session;
            net.rnic(1).destroy_qp(session, target).unwrap();
            net.leave(1, 0, 0);
            net.come_back(1);
            let vrnic = net.ends[1].vrnic;
            second.session = net.rnics[0].numbered_sessions(vrnic)[1].1;
        }
    }
    assert!(net.rnic(1).destroy_qp(second.session, target).is_ok());
    assert!(net.rnic(1).destroy_xrcd(second.session, queues[1].xrcd).is_err(), "its SRQ is in it");
}

/// A vRNIC with a rate limit has it after a move, too, and has not saved up anything.
#[test]
fn limits_are_kept() {
    let mut net = Net::together(QpType::Rc);
    let vrnic = net.ends[0].vrnic;
    // 10 MB a second.
    let share = Share { weight: 7, rate_bps: 80_000_000, ops: 1000, burst_us: 0 };
    net.rnic(0).set_share(vrnic, share);
    for i in 0..10 {
        let (w, sge) = (net.request(WrOpcode::Write, i), net.ends[0].sge(0, 50_000));
        net.ends[0].post(w, &[sge]);
    }
    net.run(20 * MS);
    net.leave(0, 1, 0);
    net.run(20 * MS);
    let early = net.ends[0].poll().len();
    assert!((2..=8).contains(&early), "{early} of 10 in 40 ms");
    net.run(SECOND);
    assert_eq!(early + net.ends[0].poll().len(), 10);
    let vrnic = net.ends[0].vrnic;
    assert_eq!(net.rnics[1].share(vrnic), share);
}
