//! Processes that move their pages: requests that need their memory wait, and nothing else is noticed.

use unirdma_abi as abi;
use unirdma_formats::{QpType, WcStatus, WrOpcode};
use unirdma_simkit::net::{Faults, Net};
use unirdma_simkit::*;

const MS: u64 = 1_000_000;
/// The ACK timeout of these tests' QPs is 67 ms: nothing may wait for it.
const SOON: u64 = 20 * MS;

/// Two QPs on one host, and on two. The memory of both is reached through their processes. Any timeout and any missing
/// receive is an error.
fn places(typ: QpType) -> Vec<(&'static str, Net)> {
    let mut places = mapped_places(typ);
    for (_, net) in &mut places {
        for i in 0..2 {
            net.go_through_process(i);
        }
    }
    places
}

/// The same with memory that the virtual layer maps.
fn mapped_places(typ: QpType) -> Vec<(&'static str, Net)> {
    let strict = |a| abi::QpAttr { retry_cnt: 0, rnr_retry: 0, ..a };
    let mut one = Net::hosts(1, &[typ, typ], 9, Faults::default());
    one.connect(typ, 0, 1, &strict);
    one.connect(typ, 1, 0, &strict);
    vec![("one host", one), ("two hosts", Net::of_type(typ, 9, Faults::default(), strict))]
}

fn request(net: &Net, op: WrOpcode, id: u64) -> abi::SqWqe {
    abi::SqWqe { compare_add: 3, swap: 9, ..net.remote(op, id, 0) }
}

/// Posts a request of every kind between the two ends' first bytes, with one end's process moving for `ms`. Returns
/// bytes.
fn every_request(typ: QpType, ops: &[WrOpcode], mover: usize, ms: u64) {
    for (place, mut net) in places(typ) {
        for (i, &op) in ops.iter().enumerate() {
            let about = format!("{place}, {typ:?} {op:?}, end {mover} moves");
            let len = if op.is_atomic() || op == WrOpcode::AtomicWrite { 8 } else { 30_000 };
            let (mine, theirs) = (pattern(len, i as u64), pattern(len, 77 + i as u64));
            net.ends[0].fill(0, &mine);
            net.ends[1].fill(0, &theirs);
            if op.consumes_recv() {
                let sge = net.ends[1].sge(0, 30_000);
                net.ends[1].recv(50, &[sge]);
            }
            let before = u64::from_ne_bytes(theirs[..8].try_into().unwrap());
            net.ends[mover].bell.begin_move();
            let w = request(&net, op, i as u64);
            let sge = net.ends[0].sge(0, len as u32);
            net.ends[0].post(w, &[sge]);
            net.run(ms * MS);
            let (a, b) = (net.ends[0].bytes(0, len), net.ends[1].bytes(0, len));
            let stores_here = op.stores_locally();
            // The memory of the end that moves is not written. An atomic may have been executed at the other end.
            if mover == 0 || !op.is_atomic() {
                assert_eq!(a, mine, "{about}");
            }
            if mover == 1 || stores_here && !op.is_atomic() {
                assert_eq!(b, theirs, "{about}");
            }
            assert_eq!(net.ends[0].poll(), [], "{about}");
            assert!(net.ends[mover].bell.is_awaited() && !net.ends[mover].bell.is_copying(), "{about}");
            net.ends[mover].bell.end_move();
            net.run(SOON);
            let done = net.ends[0].done();
            assert_eq!((status(&done), done.wr_id), (WcStatus::Success, i as u64), "{about}");
            assert_eq!(net.ends[1].poll().len(), usize::from(op.consumes_recv()), "{about}");
            let (a, b) = (net.ends[0].bytes(0, len), net.ends[1].bytes(0, len));
            match op {
                WrOpcode::Read => assert_eq!(a, theirs, "{about}"),
                WrOpcode::FetchAdd | WrOpcode::CmpSwap => {
                    let after = before.wrapping_add(if op == WrOpcode::FetchAdd { 3 } else { 0 });
                    assert_eq!((a, b), (theirs, after.to_ne_bytes().to_vec()), "{about}: once");
                }
                _ => assert_eq!(b, mine, "{about}"),
            }
            assert!(!net.ends[mover].bell.is_awaited());
            assert_eq!(net.counters(0).timeouts, 0, "{about}");
        }
        assert_eq!((net.state(0), net.state(1)), (3, 3), "{place}");
    }
}

const RC_OPS: [WrOpcode; 9] = [
    WrOpcode::Write,
    WrOpcode::WriteImm,
    WrOpcode::Send,
    WrOpcode::SendImm,
    WrOpcode::Read,
    WrOpcode::FetchAdd,
    WrOpcode::CmpSwap,
    WrOpcode::AtomicWrite,
    WrOpcode::Send,
];

#[test]
fn requests_wait_for_their_own_process() {
    every_request(QpType::Rc, &RC_OPS, 0, 2);
    every_request(QpType::Uc, &[WrOpcode::Write, WrOpcode::SendImm], 0, 2);
}

#[test]
fn requests_wait_for_the_peers_process() {
    every_request(QpType::Rc, &RC_OPS, 1, 2);
    // Longer than the ACK timeout, but no timeout is counted.
    every_request(QpType::Rc, &[WrOpcode::Send, WrOpcode::Read], 0, 500);
}

/// Requests that are under way when the process begins to move, and more that come in meanwhile.
#[test]
fn a_stream_goes_on_where_it_was() {
    for mover in [0, 1] {
        for (place, mut net) in places(QpType::Rc) {
            let data = pattern(MR_BYTES, 5);
            net.ends[0].fill(0, &data);
            for i in 0..8 {
                let w = net.remote(if i % 2 == 0 { WrOpcode::Write } else { WrOpcode::Read }, i, i * 100_000);
                let sge = net.ends[0].sge(i * 100_000, 100_000);
                net.ends[1].fill(i as usize * 100_000, &pattern(100_000, 100 + i));
                net.ends[0].post(w, &[sge]);
            }
            for _ in 0..40 {
                net.run(MS / 50);
                net.ends[mover].bell.begin_move();
                net.run(MS / 10);
                net.ends[mover].bell.end_move();
            }
            net.run(SOON);
            let got: Vec<_> = net.ends[0].poll().iter().map(|c| (c.wr_id, c.status)).collect();
            assert_eq!(got, (0..8).map(|i| (i, 0)).collect::<Vec<_>>(), "{place}, {mover}");
            for i in 0..8usize {
                let want =
                    if i % 2 == 0 { data[i * 100_000..][..100_000].to_vec() } else { pattern(100_000, 100 + i as u64) };
                assert_eq!(net.ends[0].bytes(i * 100_000, 100_000), want, "{place}, {mover}, {i}");
                assert_eq!(net.ends[1].bytes(i * 100_000, 100_000), want, "{place}, {mover}, {i}");
            }
        }
    }
}

/// A fork: the memory of all MRs is somewhere else for a moment, also of those that are made meanwhile.
#[test]
fn memory_that_is_away_is_left_alone() {
    for mover in [0, 1] {
        for (place, mut net) in mapped_places(QpType::Rc) {
            let (mine, theirs) = (pattern(50_000, 5), pattern(50_000, 6));
            net.ends[0].fill(0, &mine);
            net.ends[1].fill(100_000, &theirs);
            let bell = net.ends[mover].bell.clone();
            bell.set_away(7);
            net.run(MS);
            assert!(bell.is_left_alone(7) && !bell.is_left_alone(8), "{place}, {mover}");
            for (i, op) in [WrOpcode::Write, WrOpcode::Read].into_iter().enumerate() {
                let at = i * 100_000;
                let (w, sge) = (net.remote(op, i as u64, at as u64), net.ends[0].sge(at as u64, 50_000));
                net.ends[0].post(w, &[sge]);
            }
            net.run(2 * MS);
            assert_eq!(net.ends[0].poll(), [], "{place}, {mover}");
            assert_eq!(
                (net.ends[1].bytes(0, 50_000), net.ends[0].bytes(100_000, 50_000)),
                (vec![0; 50_000], vec![0; 50_000])
            );
            // Another period, begun before the device has seen the end of the first one.
            bell.set_away(0);
            bell.set_away(8);
            assert!(!bell.is_left_alone(8));
            net.run(MS);
            assert!(bell.is_left_alone(8), "{place}, {mover}");
            bell.set_away(0);
            net.run(SOON);
            let got: Vec<_> = net.ends[0].poll().iter().map(|c| (c.wr_id, c.status)).collect();
            assert_eq!(got, [(0, 0), (1, 0)], "{place}, {mover}");
            assert_eq!((net.ends[1].bytes(0, 50_000), net.ends[0].bytes(100_000, 50_000)), (mine, theirs));
            assert!(bell.is_left_alone(0));
        }
    }
}

#[test]
fn datagrams_wait_for_both() {
    for mover in [0, 1] {
        for (place, mut net) in places(QpType::Ud) {
            let (ah, dest) = (net.ah(0, 1), net.ends[1].qpn);
            let data = pattern(1000, 3);
            net.ends[0].fill(0, &data);
            for i in 0..3 {
                let to = net.ends[1].sge(10_000 * (1 + i), 2000);
                net.ends[1].recv(i, &[to]);
            }
            net.ends[mover].bell.begin_move();
            let sge = net.ends[0].sge(0, 1000);
            for i in 0..3 {
                net.ends[0].post_to(wqe(WrOpcode::Send, 10 + i), ah, dest, &[sge]);
            }
            net.run(2 * MS);
            assert_eq!(net.ends[1].poll(), [], "{place}, {mover}");
            assert_eq!(net.ends[1].bytes(10_000, 2000), [0; 2000], "{place}, {mover}");
            net.ends[mover].bell.end_move();
            net.run(SOON);
            let sent: Vec<_> = net.ends[0].poll().iter().map(|c| (c.wr_id, c.status)).collect();
            assert_eq!(sent, [(10, 0), (11, 0), (12, 0)], "{place}, {mover}");
            let got: Vec<_> = net.ends[1].poll().iter().map(|c| (c.wr_id, c.status, c.byte_len)).collect();
            assert_eq!(got, [(0, 0, 1040), (1, 0, 1040), (2, 0, 1040)], "{place}, {mover}");
            for i in 1..4 {
                assert_eq!(net.ends[1].bytes(10_000 * i + 40, 1000), data, "{place}, {mover}");
            }
        }
    }
}

/// A driver that announces a move of pages and never ends it costs each of its peers one request only.
#[test]
fn a_liar_is_not_waited_for_for_ever() {
    for (op, at_peer, status_there) in [
        (WrOpcode::Write, WcStatus::RemAccessErr, None),
        (WrOpcode::Read, WcStatus::RemAccessErr, None),
        (WrOpcode::Send, WcStatus::RemOpErr, Some(WcStatus::LocProtErr)),
    ] {
        for (place, mut net) in places(QpType::Rc) {
            if op == WrOpcode::Send {
                let sge = net.ends[1].sge(0, 1000);
                net.ends[1].recv(1, &[sge]);
            }
            net.ends[1].bell.begin_move();
            let sge = net.ends[0].sge(0, 1000);
            let w = net.remote(op, 1, 0);
            net.ends[0].post(w, &[sge]);
            net.run(20 * SECOND);
            let done = net.ends[0].done();
            // Over a network the requester's ACK timeout may be shorter.
            let gave_up = place == "two hosts" && status(&done) == WcStatus::RetryExcErr;
            assert!(gave_up || status(&done) == at_peer, "{place}, {op:?}: {:?}", status(&done));
            if let (Some(there), false) = (status_there, gave_up) {
                assert_eq!(status(&net.ends[1].done()), there, "{place}");
            }
        }
    }
}
