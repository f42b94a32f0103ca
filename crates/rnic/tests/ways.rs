//! The two ways of a message, within a host and between two: programs cannot tell them apart.

use unirdma_abi as abi;
use unirdma_formats::{AsyncEvent, QpState, QpType, WcOpcode, WcStatus, WrOpcode, access};
use unirdma_rnic::Output;
use unirdma_simkit::net::{self, Faults, Net};
use unirdma_simkit::*;

/// One of the simulations of `cargo xtask sim`. Each seed is a program of its own.
#[test]
fn a_program_sees_the_same_on_one_host_and_on_two() {
    let mut all = differ::Report::default();
    for seed in 0..500 {
        println!("cargo xtask sim --differ --seed {seed} --seeds 1 --steps 8");
        all.add(&differ::run(seed, 8));
    }
    // A datagram that has waited takes its QP to ERR while the next one is accepted.
    differ::run(9255, 6);
    // Every operation was done, and every error has occurred.
    use WcOpcode::*;
    let done = [Send, Write, Read, CmpSwap, FetchAdd, BindMw, LocalInv, Flush, AtomicWrite, Recv, RecvWriteImm];
    let done = done.map(|op| (Some(op as u8), WcStatus::Success as u8));
    use WcStatus::*;
    let failed = [LocLenErr, LocQpOpErr, LocProtErr, WrFlushErr, MwBindErr, RemInvReqErr, RemAccessErr, RemOpErr];
    let failed = failed.into_iter().chain([RetryExcErr, RnrRetryExcErr]).map(|status| (None, status as u8));
    for which in done.into_iter().chain(failed) {
        let seen = all.completions.get(&which).copied().unwrap_or(0);
        assert!(seen >= 10, "{which:?}: {seen}, {all:?}");
    }
    use AsyncEvent::*;
    for kind in [CqErr, QpFatal, QpAccessErr, QpReqErr, CommEst, SqDrained, SrqLimitReached, QpLastWqeReached] {
        let seen = all.events.get(&format!("{kind:?}")).copied().unwrap_or(0);
        assert!(seen >= 5, "{kind:?}: {seen}, {all:?}");
    }
}

/// Two connected ends of this type, on one host and on two.
fn each(typ: QpType) -> [(String, Net); 2] {
    [("one host", 1), ("two hosts", 2)].map(|(name, hosts)| {
        let mut net = Net::hosts(hosts, &[typ, typ], 5, Faults::default());
        net.connect(typ, 0, 1, &|a| a);
        net.connect(typ, 1, 0, &|a| a);
        (format!("{typ:?} on {name}"), net)
    })
}

/// An MR of the first `len` bytes of end 1's memory. Returns its key.
fn region(net: &mut Net, flags: u32, len: u64) -> u32 {
    let e = &net.ends[1];
    let (session, pd, backing) = (e.session, e.pd, e.backing());
    net.rnic(1).reg_mr(session, pd, flags, IOVA, len, (backing, vec![9])).unwrap().1
}

/// Only those bytes of a receive are looked up that a message fills: an SGE that it does not reach may name anything
/// (IBTA vol. 1, 9.7.4.1.6, is about the bytes that the responder stores).
#[test]
fn what_no_message_reaches_of_a_receive_needs_no_grant() {
    let sge = |lkey, length| abi::Sge { addr: IOVA, length, lkey };
    for typ in [QpType::Rc, QpType::Uc] {
        for case in 0..7 {
            for (place, mut net) in each(typ) {
                let (short, readable) = (region(&mut net, access::LOCAL_WRITE, 4096), region(&mut net, 0, 4096));
                let (list, len, may) = match case {
                    0 => (vec![sge(short, 8192)], 4096, true),
                    1 => (vec![sge(short, 200), sge(1, 200)], 100, true),
                    2 => (vec![sge(short, 200), sge(readable, 200)], 200, true),
                    3 => (vec![sge(1, 200)], 0, true),
                    4 => (vec![sge(short, 8192)], 4097, false),
                    5 => (vec![sge(short, 200), sge(readable, 200)], 201, false),
                    _ => (vec![sge(1, 200)], 1, false),
                };
                let about = format!("{place}, case {case}");
                net.ends[1].recv(1, &list);
                let from = net.ends[0].sge(0, len);
                net.ends[0].post(wqe(WrOpcode::Send, 2), &[from]);
                net.run(SECOND);
                let seen = [1, 0].map(|end| status(&net.ends[end].done()));
                let sent = if typ == QpType::Rc { WcStatus::RemOpErr } else { WcStatus::Success };
                let want = if may { [WcStatus::Success; 2] } else { [WcStatus::LocProtErr, sent] };
                assert_eq!(seen, want, "{about}");
                assert_eq!(net.state(1) == QpState::Rts as u8, may, "{about}");
            }
        }
    }
}

/// Connects end 1 anew, up to state RTR.
fn only_receive(net: &mut Net, typ: QpType) {
    let (session, qpn, peer) = (net.ends[1].session, net.ends[1].qpn, net.ends[0].qpn);
    net.rnic(1).modify_qp(session, qpn, 1, &abi::QpAttr::default()).unwrap();
    for (mask, attr) in attrs_of(typ, peer, net::gid(0)).into_iter().take(2) {
        net.rnic(1).modify_qp(session, qpn, mask, &attr).unwrap();
    }
}

/// Asynchronous events of all hosts.
fn events(net: &mut Net) -> Vec<AsyncEvent> {
    let mut all = Vec::new();
    net.rnics.iter_mut().for_each(|r| r.drain_outputs(&mut all));
    all.iter().filter_map(|o| if let Output::Async { kind, .. } = o { Some(*kind) } else { None }).collect()
}

/// The first message establishes a connection even if it is refused (IBTA vol. 1, 11.6.3.1).
#[test]
fn a_message_that_is_refused_establishes_a_connection() {
    for (place, mut net) in each(QpType::Rc) {
        only_receive(&mut net, QpType::Rc);
        let sge = net.ends[0].sge(0, 8);
        let write = abi::SqWqe { rkey: 1, ..net.remote(WrOpcode::Write, 1, 0) };
        net.ends[0].post(write, &[sge]);
        net.run(SECOND);
        assert_eq!(status(&net.ends[0].done()), WcStatus::RemAccessErr, "{place}");
        assert_eq!(events(&mut net), [AsyncEvent::CommEst, AsyncEvent::QpAccessErr], "{place}");
    }
}

/// Messages that an unreliable responder drops use their PSNs like others.
#[test]
fn what_is_dropped_takes_its_psns() {
    for (place, mut net) in each(QpType::Uc) {
        let sges = [net.ends[0].sge(0, 3000), net.ends[0].sge(0, 1)];
        let ends = [0, 1].map(|end| (net.ends[end].session, net.ends[end].qpn));
        net.ends[0].post(wqe(WrOpcode::Send, 1), &sges[..1]);
        let write = abi::SqWqe { rkey: 1, ..net.remote(WrOpcode::Write, 2, 0) };
        net.ends[0].post(write, &sges[1..]);
        net.run(SECOND);
        // Packets of 1024 bytes: three, and one.
        let (a, b) = (net.rnic(0).query_qp(ends[0].0, ends[0].1), net.rnic(1).query_qp(ends[1].0, ends[1].1));
        assert_eq!((a.unwrap().sq_psn, b.unwrap().rq_psn), (104, 104), "{place}");
        assert_eq!(net.counters(1).dropped, 2, "{place}");
    }
}

/// A WRITE with immediate data puts nothing into its receive, but that has to be well-formed.
#[test]
fn a_malformed_receive_fails_a_write_with_immediate_data() {
    for typ in [QpType::Rc, QpType::Uc] {
        for (place, mut net) in each(typ) {
            net.ends[1].recv_raw(abi::RqWqe { wr_id: 1, num_sge: 1000, reserved: 0 }, &[]);
            let sge = net.ends[0].sge(0, 100);
            let write = net.remote(WrOpcode::WriteImm, 2, 0);
            net.ends[0].post(write, &[sge]);
            net.run(SECOND);
            assert_eq!(status(&net.ends[1].done()), WcStatus::LocQpOpErr, "{place}");
            let want = if typ == QpType::Rc { WcStatus::RemOpErr } else { WcStatus::Success };
            assert_eq!(status(&net.ends[0].done()), want, "{place}");
        }
    }
}

/// If a message is too long for its receive, packets are stored until one finds no room. The memory of an earlier
/// packet is looked up first.
#[test]
fn the_first_packet_that_cannot_be_stored_says_why() {
    for (length, want) in [(1024, WcStatus::LocProtErr), (1023, WcStatus::LocLenErr)] {
        for (place, mut net) in each(QpType::Rc) {
            net.ends[1].recv(1, &[abi::Sge { addr: IOVA, length, lkey: 1 }]);
            let sge = net.ends[0].sge(0, 3000);
            net.ends[0].post(wqe(WrOpcode::Send, 2), &[sge]);
            net.run(SECOND);
            assert_eq!(status(&net.ends[1].done()), want, "{place}");
        }
    }
}

/// Counters do not depend on the way.
#[test]
fn an_atomic_counts_as_eight_bytes_that_came_in() {
    for (place, mut net) in each(QpType::Rc) {
        for (i, op) in [WrOpcode::CmpSwap, WrOpcode::FetchAdd, WrOpcode::AtomicWrite].into_iter().enumerate() {
            let sge = net.ends[0].sge(0, 8);
            let atomic = net.request(op, 1);
            net.ends[0].post(atomic, &[sge]);
            net.run(SECOND);
            let [sent, received] = [net.counters(0).sent_bytes, net.counters(1).received_bytes];
            assert_eq!((sent, received), (8 * (1 + i as u64), 8 * (1 + i as u64)), "{op:?}, {place}");
        }
    }
}

/// Datagrams wait for a receive, the receive cannot hold one, and the QP fails. The waiting datagrams are dropped, and
/// a later receive is flushed at once.
#[test]
fn a_datagram_qp_that_fails_drops_what_waits_and_flushes_what_comes() {
    for (place, mut net) in each(QpType::Ud) {
        let (ah, qpn) = (net.ah(0, 1), net.ends[1].qpn);
        for i in 0..4 {
            let sge = net.ends[0].sge(0, 100);
            net.ends[0].post_to(wqe(WrOpcode::Send, i), ah, qpn, &[sge]);
        }
        net.run(1_000_000);
        net.ends[1].recv(1, &[abi::Sge { addr: IOVA, length: 200, lkey: 1 }]);
        net.run(SECOND);
        assert_eq!(status(&net.ends[1].done()), WcStatus::LocProtErr, "{place}");
        assert_eq!(net.counters(1).dropped, 3, "{place}");
        net.ends[1].recv(2, &[]);
        net.run(SECOND);
        assert_eq!(status(&net.ends[1].done()), WcStatus::WrFlushErr, "{place}");
    }
}
