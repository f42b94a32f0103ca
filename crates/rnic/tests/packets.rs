//! Packets, datagrams and atomics for memory that only jobs access: what happens before the job is done, and when it
//! ends.

use unirdma_abi as abi;
use unirdma_formats::{QpType, WcStatus, WrOpcode, attr_mask as m};
use unirdma_simkit::net::{Faults, Net};
use unirdma_simkit::*;

const MS: u64 = 1_000_000;

/// Ends 0 and 1 are connected, and so are 2 and 3, each pair over the wire. The memory of the ends in `slow` is
/// accessed through their processes, by jobs that are not done before the test does them.
fn net(typ: QpType, slow: &[usize]) -> Net {
    let mut net = Net::hosts(2, &[typ; 4], 9, Faults::default());
    for (a, b) in [(0, 1), (1, 0), (2, 3), (3, 2)] {
        net.connect(typ, a, b, &|a| abi::QpAttr { retry_cnt: 7, ..a });
    }
    slow.iter().for_each(|&end| net.go_through_process(end));
    net.keeps_jobs = true;
    net
}

fn post(net: &mut Net, op: WrOpcode, wr_id: u64, off: u64, len: u32) {
    let (w, sge) = (net.request(op, wr_id), net.ends[0].sge(off, len));
    net.ends[0].post(abi::SqWqe { remote_addr: IOVA + off, ..w }, &[sge]);
}

fn recv(net: &mut Net, end: usize, wr_id: u64, off: u64, len: u32) {
    let sge = net.ends[end].sge(off, len);
    net.ends[end].recv(wr_id, &[sge]);
}

fn done(net: &mut Net, end: usize) -> Vec<(u64, WcStatus)> {
    net.ends[end].poll().iter().map(|c| (c.wr_id, status(c))).collect()
}

/// Does all jobs until none is left. Returns their number.
fn do_all(net: &mut Net) -> usize {
    let mut count = 0;
    while !net.kept.is_empty() {
        for (host, mut job) in std::mem::take(&mut net.kept) {
            job.run(&mut [0; 4096], || 0);
            let now = net.now;
            net.rnics[host].at(now).end_job(job);
            count += 1;
        }
        net.run(MS);
    }
    count
}

/// The ends of a pair whose memory is not accessed wait, and another pair on the same hosts is not affected.
fn others_go_on(net: &mut Net) {
    let (w, sge) =
        (abi::SqWqe { rkey: net.ends[3].key, ..net.remote(WrOpcode::Write, 77, 0) }, net.ends[2].sge(0, 10_000));
    net.ends[2].post(w, &[sge]);
    net.run(MS);
    assert_eq!(done(net, 2), [(77, WcStatus::Success)]);
}

#[test]
fn what_is_sent_is_read_by_a_job() {
    for op in [WrOpcode::Write, WrOpcode::Send] {
        let mut net = net(QpType::Rc, &[0]);
        recv(&mut net, 1, 5, 0, 200_000);
        net.ends[0].fill(0, &pattern(200_000, 1));
        post(&mut net, op, 1, 0, 200_000);
        net.run(MS);
        assert_eq!((net.kept.len(), net.ends[1].bytes(0, 200_000)), (1, vec![0; 200_000]), "{op:?}");
        others_go_on(&mut net);
        // No job has read the memory yet.
        net.ends[0].fill(0, &pattern(200_000, 2));
        assert_eq!(do_all(&mut net), 4, "64 KiB at a time");
        assert_eq!(
            (done(&mut net, 0), net.ends[1].bytes(0, 200_000)),
            (vec![(1, WcStatus::Success)], pattern(200_000, 2))
        );
        assert_eq!(net.counters(0).wire.retransmitted_pkts, 0);
    }
}

/// Bytes that were read for one request are not sent for another one, whose data may be newer.
#[test]
fn each_request_is_read_anew() {
    let mut net = net(QpType::Rc, &[0]);
    net.ends[0].fill(0, &[1; 3000]);
    for id in 0..2 {
        let (w, sge) = (net.remote(WrOpcode::Write, id, id * 10_000), net.ends[0].sge(0, 3000));
        net.ends[0].post(w, &[sge]);
    }
    net.run(MS);
    net.do_kept();
    net.run(MS);
    assert_eq!(done(&mut net, 0), [(0, WcStatus::Success)]);
    net.ends[0].fill(0, &[2; 3000]);
    assert_eq!(do_all(&mut net), 1);
    assert_eq!((net.ends[1].bytes(0, 3000), net.ends[1].bytes(10_000, 3000)), (vec![1; 3000], vec![2; 3000]));
}

#[test]
fn nothing_is_answered_before_a_job_has_stored_it() {
    for op in [WrOpcode::Write, WrOpcode::WriteImm, WrOpcode::Send] {
        let mut net = net(QpType::Rc, &[1]);
        let data = pattern(100_000, 1);
        net.ends[0].fill(0, &data);
        recv(&mut net, 1, 5, 0, 100_000);
        post(&mut net, op, 1, 0, 100_000);
        // Longer than the ACK timeout. Packets that are sent again are executed once.
        net.run(100 * MS);
        assert_eq!((net.kept.len(), net.ends[1].bytes(0, 100_000)), (1, vec![0; 100_000]), "{op:?}");
        assert!(net.counters(0).timeouts > 0 && net.ends[0].poll().is_empty() && net.ends[1].poll().is_empty());
        others_go_on(&mut net);
        do_all(&mut net);
        assert_eq!((done(&mut net, 0), net.ends[1].bytes(0, 100_000)), (vec![(1, WcStatus::Success)], data), "{op:?}");
        let received = if op == WrOpcode::Write { vec![] } else { vec![(5, WcStatus::Success)] };
        assert_eq!(done(&mut net, 1), received, "{op:?}");
    }
}

#[test]
fn packets_that_wait_are_stored_together() {
    for (op, slow) in [(WrOpcode::Write, 1), (WrOpcode::Send, 1), (WrOpcode::Read, 0)] {
        let mut net = net(QpType::Rc, &[slow]);
        recv(&mut net, 1, 5, 0, 60_000);
        post(&mut net, op, 1, 0, 60_000);
        net.run(MS);
        assert_eq!(do_all(&mut net), 2, "{op:?}: one for the first packet, and one for the other 58");
        assert_eq!((done(&mut net, 0), net.counters(0).wire.retransmitted_pkts), (vec![(1, WcStatus::Success)], 0));
    }
}

/// Packets that need no job wait behind one that does, and are executed in order.
#[test]
fn the_order_of_a_queue_holds() {
    let mut net = net(QpType::Rc, &[]);
    let mapped = net.ends[1].key;
    net.go_through_process(1);
    net.ends[0].fill(0, &[7; 8]);
    recv(&mut net, 1, 50, 500, 8);
    let ops =
        [WrOpcode::Write, WrOpcode::FetchAdd, WrOpcode::Read, WrOpcode::Write, WrOpcode::Send, WrOpcode::AtomicWrite];
    for (i, op) in ops.into_iter().enumerate() {
        let from = if op.stores_locally() { 100 * i as u64 } else { 0 };
        let (w, sge) = (net.request(op, i as u64), net.ends[0].sge(from, 8));
        // The second WRITE goes to memory that is mapped.
        let rkey = if i == 3 { mapped } else { w.rkey };
        net.ends[0].post(abi::SqWqe { rkey, remote_addr: IOVA + if i == 3 { 800 } else { 0 }, ..w }, &[sge]);
    }
    net.run(MS);
    assert_eq!((net.kept.len(), net.ends[1].bytes(800, 8)), (1, vec![0; 8]));
    do_all(&mut net);
    assert_eq!(done(&mut net, 0), (0..6).map(|i| (i, WcStatus::Success)).collect::<Vec<_>>());
    let (found, sum) = (u64::from_ne_bytes([7; 8]), (u64::from_ne_bytes([7; 8]) + 3).to_ne_bytes());
    assert_eq!((net.ends[0].bytes(100, 8), net.ends[0].bytes(200, 8)), (found.to_ne_bytes().to_vec(), sum.to_vec()));
    assert_eq!(
        (net.ends[1].bytes(0, 8), net.ends[1].bytes(800, 8), net.ends[1].bytes(500, 8)),
        (vec![7; 8], vec![7; 8], vec![7; 8])
    );
}

#[test]
fn answers_are_read_and_stored_by_jobs() {
    for slow in [0, 1] {
        let mut net = net(QpType::Rc, &[slow]);
        net.ends[1].fill(0, &pattern(150_000, 3));
        post(&mut net, WrOpcode::Read, 1, 0, 150_000);
        net.run(100 * MS);
        assert_eq!((net.kept.len(), net.ends[0].bytes(0, 150_000)), (1, vec![0; 150_000]), "{slow}");
        others_go_on(&mut net);
        do_all(&mut net);
        assert_eq!(
            (done(&mut net, 0), net.ends[0].bytes(0, 150_000)),
            (vec![(1, WcStatus::Success)], pattern(150_000, 3))
        );
        if slow == 0 {
            assert_eq!(net.counters(0).timeouts, 0, "the peer has answered in time");
        }
    }
}

#[test]
fn memory_that_a_command_takes_away_is_left_alone() {
    for op in [WrOpcode::Write, WrOpcode::Send, WrOpcode::Read, WrOpcode::FetchAdd] {
        let mut net = net(QpType::Rc, &[1]);
        net.ends[0].fill(0, &[7; 1000]);
        recv(&mut net, 1, 5, 0, 1000);
        post(&mut net, op, 1, 0, if op.is_atomic() { 8 } else { 1000 });
        net.run(MS);
        let (session, mr) = (net.ends[1].session, net.ends[1].mr);
        net.rnic(1).dereg_mr(session, mr).unwrap();
        assert!(!net.rnic(1).delay_command(session), "nobody has begun");
        do_all(&mut net);
        assert_eq!(net.ends[1].bytes(0, 1000), vec![0; 1000], "{op:?}");
        // The packet whose job was stopped is tried again, and the key is gone.
        let (here, there) = match op {
            WrOpcode::Send => (WcStatus::RemOpErr, vec![(5, WcStatus::LocProtErr)]),
            _ => (WcStatus::RemAccessErr, vec![(5, WcStatus::WrFlushErr)]),
        };
        assert_eq!((done(&mut net, 0), done(&mut net, 1)), (vec![(1, here)], there), "{op:?}");
    }
}

#[test]
fn a_command_for_something_else_delays_a_packet_and_no_more() {
    for slow in [0, 1] {
        let mut net = net(QpType::Rc, &[slow]);
        net.ends[0].fill(0, &[7; 1000]);
        post(&mut net, WrOpcode::Write, 1, 0, 1000);
        net.run(MS);
        let session = net.ends[slow].session;
        assert!(!net.rnic(slow).delay_command(session));
        assert_eq!(do_all(&mut net), 2, "it was stopped, and is done again");
        assert_eq!((done(&mut net, 0), net.ends[1].bytes(0, 1000)), (vec![(1, WcStatus::Success)], vec![7; 1000]));
    }
}

/// Memory that is slow for too long costs its connection. Requests for it wait meanwhile.
#[test]
fn memory_that_never_answers_is_given_up() {
    let cases = [
        (WrOpcode::Write, 1, WcStatus::RemAccessErr),
        (WrOpcode::Send, 1, WcStatus::RemOpErr),
        (WrOpcode::Read, 1, WcStatus::RemAccessErr),
        (WrOpcode::FetchAdd, 1, WcStatus::RemAccessErr),
        (WrOpcode::Write, 0, WcStatus::LocProtErr),
        (WrOpcode::Read, 0, WcStatus::LocProtErr),
    ];
    for (op, slow, want) in cases {
        let mut net = net(QpType::Rc, &[slow]);
        recv(&mut net, 1, 5, 0, 1000);
        post(&mut net, op, 1, 0, if op.is_atomic() { 8 } else { 1000 });
        net.run(MS);
        let (host, stuck) = net.kept.pop().unwrap();
        net.rnics[host].at(net.now).note_slow(stuck.number());
        others_go_on(&mut net);
        net.rnics[host].at(net.now).give_up(stuck.number());
        net.run(SECOND);
        assert!(net.kept.is_empty(), "{op:?}");
        assert_eq!((done(&mut net, 0), net.state(0)), (vec![(1, want)], 6), "{op:?}");
        // At last the memory answers. This has no effect any more, except for a receive that could have been written
        // until now.
        net.ends[0].fill(0, &[9; 1000]);
        let mut stuck = stuck;
        stuck.run(&mut [0; 4096], || 0);
        net.rnics[host].at(net.now).end_job(stuck);
        net.run(SECOND);
        assert_eq!(net.ends[1].bytes(0, 1000), vec![0; 1000], "{op:?}");
        assert!(net.ends[1].poll().iter().all(|c| c.status != 0), "{op:?}");
    }
}

/// While a job waits that will write a receive, the receive is not its program's.
#[test]
fn a_receive_is_flushed_when_its_job_has_ended() {
    let mut net = net(QpType::Rc, &[1]);
    recv(&mut net, 1, 5, 0, 1000);
    recv(&mut net, 1, 6, 0, 1000);
    post(&mut net, WrOpcode::Send, 1, 0, 1000);
    net.run(MS);
    let (session, qpn) = (net.ends[1].session, net.ends[1].qpn);
    let err = abi::QpAttr { qp_state: 6, ..Default::default() };
    net.rnic(1).modify_qp(session, qpn, m::STATE, &err).unwrap();
    net.run(MS);
    assert!(net.ends[1].poll().is_empty());
    net.do_kept();
    net.run(MS);
    assert_eq!(done(&mut net, 1), [(5, WcStatus::WrFlushErr), (6, WcStatus::WrFlushErr)]);
}

#[test]
fn a_qp_that_was_reset_hears_of_no_old_job() {
    for (op, slow) in [(WrOpcode::Write, 0), (WrOpcode::Write, 1), (WrOpcode::Read, 0), (WrOpcode::Read, 1)] {
        let mut net = net(QpType::Rc, &[slow]);
        post(&mut net, op, 1, 0, 1000);
        net.run(MS);
        for (a, b) in [(0, 1), (1, 0)] {
            let (session, qpn) = (net.ends[a].session, net.ends[a].qpn);
            net.rnic(a).modify_qp(session, qpn, m::STATE, &abi::QpAttr::default()).unwrap();
            net.ends[a].sq_prod = 0;
            net.ends[a].rings.set_sq_prod(0);
            net.connect(QpType::Rc, a, b, &|a| a);
        }
        do_all(&mut net);
        assert!(net.ends[0].poll().is_empty(), "{op:?} {slow}");
        net.ends[0].fill(0, &[8; 1000]);
        post(&mut net, WrOpcode::Write, 2, 0, 1000);
        net.run(MS);
        do_all(&mut net);
        assert_eq!((done(&mut net, 0), net.ends[1].bytes(0, 1000)), (vec![(2, WcStatus::Success)], vec![8; 1000]));
    }
}

#[test]
fn datagrams_wait_for_jobs_at_both_ends() {
    for slow in [0, 1] {
        for hosts in [1, 2] {
            let mut net = Net::hosts(hosts, &[QpType::Ud; 2], 9, Faults::default());
            net.connect(QpType::Ud, 0, 1, &|a| a);
            net.connect(QpType::Ud, 1, 0, &|a| a);
            net.go_through_process(slow);
            net.keeps_jobs = true;
            let (ah, dest) = (net.ah(0, 1), net.ends[1].qpn);
            for i in 0..3 {
                net.ends[0].fill(i as usize * 1000, &pattern(1000, i));
                recv(&mut net, 1, i, 10_000 * (1 + i), 2000);
                let sge = net.ends[0].sge(i * 1000, 1000);
                net.ends[0].post_to(wqe(WrOpcode::Send, 10 + i), ah, dest, &[sge]);
            }
            // Longer than a datagram waits for a receive. A datagram that has its receive is not dropped.
            net.run(5 * MS);
            assert_eq!(
                (net.kept.len(), net.ends[1].poll().len(), net.ends[1].bytes(10_000, 2000)),
                (1, 0, vec![0; 2000])
            );
            assert_eq!(do_all(&mut net), 3);
            let got: Vec<_> = net.ends[1].poll().iter().map(|c| (c.wr_id, c.status, c.byte_len)).collect();
            assert_eq!(got, [(0, 0, 1040), (1, 0, 1040), (2, 0, 1040)], "{slow}, {hosts}");
            assert_eq!(done(&mut net, 0).len(), 3);
            for i in 0..3 {
                assert_eq!(
                    net.ends[1].bytes(10_000 * (1 + i as usize) + 40, 1000),
                    pattern(1000, i),
                    "{slow}, {hosts}"
                );
            }
        }
    }
}

#[test]
fn a_datagram_for_memory_that_never_answers_fails_its_receive() {
    let mut net = Net::hosts(2, &[QpType::Ud; 2], 9, Faults::default());
    net.connect(QpType::Ud, 0, 1, &|a| a);
    net.connect(QpType::Ud, 1, 0, &|a| a);
    net.go_through_process(1);
    net.keeps_jobs = true;
    let (ah, dest, sge) = (net.ah(0, 1), net.ends[1].qpn, net.ends[0].sge(0, 100));
    recv(&mut net, 1, 1, 0, 2000);
    net.ends[0].post_to(wqe(WrOpcode::Send, 2), ah, dest, &[sge]);
    net.run(MS);
    let (host, job) = net.kept.pop().unwrap();
    net.rnics[host].at(net.now).note_slow(job.number());
    net.rnics[host].at(net.now).give_up(job.number());
    net.run(MS);
    assert_eq!((done(&mut net, 1), net.state(1)), (vec![(1, WcStatus::LocProtErr)], 6));
}

/// A message of an unreliable connection is stored completely or dropped, and so are later messages.
#[test]
fn unreliable_connections_go_through_jobs_too() {
    for slow in [0, 1] {
        let mut net = net(QpType::Uc, &[slow]);
        net.ends[0].fill(0, &pattern(30_000, 1));
        for (i, op) in [WrOpcode::Write, WrOpcode::Send, WrOpcode::WriteImm].into_iter().enumerate() {
            recv(&mut net, 1, 50 + i as u64, 10_000 * i as u64, 10_000);
            post(&mut net, op, i as u64, 10_000 * i as u64, 10_000);
        }
        net.run(MS);
        assert_eq!((net.kept.len(), net.ends[1].bytes(0, 30_000)), (1, vec![0; 30_000]));
        do_all(&mut net);
        assert_eq!(done(&mut net, 1), [(50, WcStatus::Success), (51, WcStatus::Success)]);
        // The SEND went into the first receive.
        let want = pattern(30_000, 1);
        assert_eq!(net.ends[1].bytes(0, 10_000), want[10_000..20_000], "{slow}");
        assert_eq!(net.ends[1].bytes(20_000, 10_000), want[20_000..], "{slow}");
        assert_eq!((net.counters(1).dropped, net.counters(1).wire.out_of_seq_request), (0, 0));
    }
}

/// A peer that goes on sending while a job is stuck takes no more memory than an inbox has. It must send the rest
/// again.
#[test]
fn an_inbox_that_is_full_loses_packets_like_a_network() {
    let mut net = Net::of_type(QpType::Rc, 9, Faults::default(), |a| abi::QpAttr { path_mtu: 5, ..a });
    net.go_through_process(1);
    net.keeps_jobs = true;
    let data = pattern(MR_BYTES, 1);
    net.ends[0].fill(0, &data);
    post(&mut net, WrOpcode::Write, 1, 0, MR_BYTES as u32);
    net.run(100 * MS);
    assert_eq!(net.kept.len(), 1);
    assert!(net.counters(1).dropped > 0);
    do_all(&mut net);
    net.run(SECOND);
    do_all(&mut net);
    assert_eq!((done(&mut net, 0), net.ends[1].bytes(0, MR_BYTES) == data), (vec![(1, WcStatus::Success)], true));
}

/// An atomic that a job has executed is not executed again when its vRNIC, or its requester's vRNIC, is restored.
#[test]
fn an_executed_atomic_is_not_repeated_by_a_move() {
    for (hosts, mover) in [(1, 0), (1, 1), (2, 0), (2, 1)] {
        for executed in [false, true] {
            let mut net = Net::homes(2, &[QpType::Rc; 2], 9, Faults::default(), |end| end % hosts);
            net.connect(QpType::Rc, 0, 1, &|a| abi::QpAttr { retry_cnt: 7, ..a });
            net.connect(QpType::Rc, 1, 0, &|a| abi::QpAttr { retry_cnt: 7, ..a });
            net.go_through_process(1);
            net.keeps_jobs = true;
            net.ends[1].fill(0, &100u64.to_ne_bytes());
            post(&mut net, WrOpcode::FetchAdd, 1, 0, 8);
            net.run(MS);
            let (host, mut job) = net.kept.pop().unwrap();
            if executed {
                job.run(&mut [0; 4096], || 0);
            }
            net.leave(mover, 1, MS);
            if !executed {
                job.run(&mut [0; 4096], || 0);
            }
            net.rnics[host].at(net.now).end_job(job);
            net.keeps_jobs = false;
            net.run(10 * SECOND);
            let about = format!("{hosts} hosts, end {mover} moves, executed: {executed}");
            assert_eq!(done(&mut net, 0), [(1, WcStatus::Success)], "{about}");
            let words = [0, 1].map(|end: usize| u64::from_ne_bytes(net.ends[end].bytes(0, 8).try_into().unwrap()));
            assert_eq!(words, [100, 103], "{about}");
        }
    }
}
