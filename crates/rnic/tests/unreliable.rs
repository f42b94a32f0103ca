//! UC and UD: arriving data is right, messages that cannot be taken are dropped and counted, and the sender never
//! waits.

use unirdma_abi as abi;
use unirdma_formats::net::parse_grh;
use unirdma_formats::{QpType, WcStatus, WrOpcode, attr_mask as m, send_flags, wc_flags};
use unirdma_simkit::net::{Faults, Net, gid};
use unirdma_simkit::*;

/// Two QPs on one host, and on two.
fn places(typ: QpType) -> Vec<(&'static str, Net)> {
    let mut one = Net::hosts(1, &[typ, typ], 9, Faults::default());
    one.connect(typ, 0, 1, &|a| a);
    one.connect(typ, 1, 0, &|a| a);
    vec![("one host", one), ("two hosts", Net::of_type(typ, 9, Faults::default(), |a| a))]
}

#[test]
fn uc_carries_sends_and_writes() {
    for (place, mut net) in places(QpType::Uc) {
        let data = pattern(10_000, 1);
        net.ends[0].fill(0, &data);
        let to = net.ends[1].sge(50_000, 20_000);
        net.ends[1].recv(7, &[to]);
        net.ends[1].recv(8, &[to]);
        let sge = net.ends[0].sge(0, 10_000);
        let write = net.remote(WrOpcode::Write, 1, 100_000);
        net.ends[0].post(write, &[sge]);
        let with_imm = abi::SqWqe { imm: 5, ..net.remote(WrOpcode::WriteImm, 2, 200_000) };
        net.ends[0].post(with_imm, &[sge]);
        net.ends[0].post(abi::SqWqe { imm: 6, ..wqe(WrOpcode::SendImm, 3) }, &[sge]);
        net.run(SECOND);
        let sent: Vec<_> = net.ends[0].poll().iter().map(|c| (c.wr_id, c.status)).collect();
        assert_eq!(sent, [(1, 0), (2, 0), (3, 0)], "{place}");
        let got: Vec<_> = net.ends[1].poll().iter().map(|c| (c.wr_id, c.imm, c.byte_len)).collect();
        assert_eq!(got, [(7, 5, 10_000), (8, 6, 10_000)], "{place}");
        for off in [50_000, 100_000, 200_000] {
            assert_eq!(net.ends[1].bytes(off, 10_000), data, "{place}, {off}");
        }
    }
}

#[test]
fn uc_drops_what_it_cannot_take_and_goes_on() {
    for (place, mut net) in places(QpType::Uc) {
        let sge = net.ends[0].sge(0, 3000);
        // No receive; a wrong key; a receive that is too short, which stays for the next message.
        net.ends[0].post(wqe(WrOpcode::Send, 1), &[sge]);
        net.run(SECOND);
        let bad = abi::SqWqe { rkey: 1, ..net.remote(WrOpcode::Write, 2, 0) };
        net.ends[0].post(bad, &[sge]);
        let small = net.ends[1].sge(0, 2000);
        net.ends[1].recv(5, &[small]);
        net.ends[0].post(wqe(WrOpcode::Send, 3), &[sge]);
        let short = net.ends[0].sge(0, 1500);
        net.ends[0].post(wqe(WrOpcode::Send, 4), &[short]);
        net.run(SECOND);
        let sent: Vec<_> = net.ends[0].poll().iter().map(|c| (c.wr_id, c.status)).collect();
        assert_eq!(sent, [(1, 0), (2, 0), (3, 0), (4, 0)], "{place}");
        let c = net.ends[1].done();
        assert_eq!((c.wr_id, c.byte_len, c.status), (5, 1500, 0), "{place}");
        assert_eq!(net.counters(1).dropped, 3, "{place}");
        assert_eq!((net.state(0), net.state(1)), (3, 3), "{place}");
    }
}

/// A request that fails at its sender stops the send queue alone; the program takes it back to RTS.
#[test]
fn an_unreliable_sender_recovers_from_sqe() {
    for typ in [QpType::Uc, QpType::Ud] {
        for (place, mut net) in places(typ) {
            let mut ah = net.ah(0, 1);
            let (sge, dest) = (net.ends[0].sge(0, 100), net.ends[1].qpn);
            let foreign = abi::Sge { lkey: 1, ..sge };
            net.ends[0].post_to(wqe(WrOpcode::Send, 1), ah, dest, &[foreign]);
            net.ends[0].post_to(wqe(WrOpcode::Send, 2), ah, dest, &[sge]);
            net.run(SECOND);
            let got: Vec<_> = net.ends[0].poll().iter().map(status).collect();
            assert_eq!(got, [WcStatus::LocProtErr, WcStatus::WrFlushErr], "{typ:?}, {place}");
            assert_eq!(net.state(0), 5);
            let (session, qpn) = (net.ends[0].session, net.ends[0].qpn);
            let rts = abi::QpAttr { qp_state: 3, ..Default::default() };
            net.rnic(0).modify_qp(session, qpn, m::STATE, &rts).unwrap();
            if typ == QpType::Ud {
                // The address of an AH that was destroyed is not valid.
                net.rnic(0).destroy_ah(session, ah).unwrap();
                net.ends[0].post_to(wqe(WrOpcode::Send, 3), ah, dest, &[sge]);
                net.run(SECOND);
                assert_eq!(status(&net.ends[0].done()), WcStatus::LocQpOpErr);
                net.rnic(0).modify_qp(session, qpn, m::STATE, &rts).unwrap();
                ah = net.ah(0, 1);
            }
            let to = net.ends[1].sge(0, 500);
            net.ends[1].recv(9, &[to]);
            net.ends[0].post_to(wqe(WrOpcode::Send, 4), ah, dest, &[sge]);
            net.run(SECOND);
            assert_eq!(net.ends[0].done().wr_id, 4, "{typ:?}, {place}");
            assert_eq!(net.ends[1].done().wr_id, 9, "{typ:?}, {place}");
        }
    }
}

#[test]
fn a_datagram_arrives_with_the_header_of_its_sender() {
    for (place, mut net) in places(QpType::Ud) {
        let data = pattern(4096, 2);
        net.ends[0].fill(0, &data);
        let ah = net.ah(0, 1);
        let (src, dest) = (net.ends[0].qpn, net.ends[1].qpn);
        for (id, len) in [(1, 0u32), (2, 5), (3, 4096)] {
            let to = net.ends[1].sge(10_000, 40 + len);
            net.ends[1].recv(id, &[to]);
            let sge = net.ends[0].sge(0, len);
            net.ends[0].post_to(abi::SqWqe { imm: 77, ..wqe(WrOpcode::SendImm, id) }, ah, dest, &[sge]);
            net.run(SECOND);
            assert_eq!(status(&net.ends[0].done()), WcStatus::Success, "{place}");
            let c = net.ends[1].done();
            assert_eq!((c.wr_id, c.byte_len, c.imm, c.src_qp), (id, 40 + len, 77, src), "{place}");
            assert_eq!(u32::from(c.wc_flags), wc_flags::GRH | wc_flags::WITH_IMM);
            assert_eq!(c.sl, 0xa);
            let grh: [u8; 40] = net.ends[1].bytes(10_000, 40).try_into().unwrap();
            assert_eq!(parse_grh(&grh), Some((gid(0), gid(1))), "{place}");
            assert_eq!(net.ends[1].bytes(10_040, len as usize), data[..len as usize], "{place}");
        }
    }
}

#[test]
fn a_datagram_that_nobody_takes_is_dropped() {
    for (place, mut net) in places(QpType::Ud) {
        let ah = net.ah(0, 1);
        let (dest, sge) = (net.ends[1].qpn, net.ends[0].sge(0, 100));
        let send = wqe(WrOpcode::Send, 1);
        // No receive, another Q_Key, a receive without room for the header, no such QP.
        net.ends[0].post_to(send, ah, dest, &[sge]);
        net.run(SECOND);
        let small = net.ends[1].sge(0, 139);
        net.ends[1].recv(1, &[small]);
        net.ends[0].post(abi::SqWqe { ah, dest_qpn: dest, qkey: QKEY ^ 1, ..send }, &[sge]);
        net.ends[0].post_to(send, ah, dest, &[sge]);
        net.ends[0].post_to(send, ah, dest ^ 1, &[sge]);
        net.run(SECOND);
        assert!(net.ends[0].poll().iter().all(|c| c.status == 0), "{place}");
        assert!(net.ends[1].poll().is_empty(), "{place}");
        let c = net.counters(1);
        assert_eq!((c.dropped, c.qkey_violations), (2, 1), "{place}");
        // A Q_Key with its highest bit set stands for the QP's own. The receive is still there.
        let sge = net.ends[0].sge(0, 99);
        net.ends[0].post(abi::SqWqe { ah, dest_qpn: dest, qkey: 1 << 31, ..send }, &[sge]);
        net.run(SECOND);
        assert_eq!(net.ends[1].done().byte_len, 139, "{place}");
    }
}

#[test]
fn a_datagram_longer_than_the_mtu_is_its_senders_mistake() {
    for (place, mut net) in places(QpType::Ud) {
        let ah = net.ah(0, 1);
        let (dest, sge) = (net.ends[1].qpn, net.ends[0].sge(0, 4097));
        net.ends[0].post_to(wqe(WrOpcode::Send, 1), ah, dest, &[sge]);
        net.run(SECOND);
        assert_eq!(status(&net.ends[0].done()), WcStatus::LocLenErr, "{place}");
    }
}

#[test]
fn addresses_are_checked_when_the_handle_is_made() {
    let mut net = Net::of_type(QpType::Ud, 4, Faults::default(), |a| a);
    let (session, pd, other) = (net.ends[0].session, net.ends[0].pd, net.ends[1].pd);
    let good = address(gid(1));
    let rnic = net.rnic(0);
    let mut refused = |pd, a| rnic.create_ah(session, pd, &a).unwrap_err();
    assert_eq!(refused(pd, abi::AhAttr { is_global: 0, ..good }), abi::Status::BadValue);
    assert_eq!(refused(pd, abi::AhAttr { port_num: 2, ..good }), abi::Status::BadValue);
    assert_eq!(
        refused(pd, abi::AhAttr { grh: abi::GlobalRoute { sgid_index: 9, ..good.grh }, ..good }),
        abi::Status::BadValue
    );
    assert_eq!(refused(pd, address(ip(99))), abi::Status::Unreachable);
    assert_eq!(refused(other ^ 0x55, good), abi::Status::BadHandle);
    let ah = rnic.create_ah(session, pd, &good).unwrap();
    assert_eq!(rnic.destroy_pd(session, pd).unwrap_err(), abi::Status::Busy);
    rnic.destroy_ah(session, ah).unwrap();
    assert_eq!(rnic.destroy_ah(session, ah).unwrap_err(), abi::Status::BadHandle);
}

#[test]
fn read_and_atomics_are_not_for_unreliable_queues() {
    for typ in [QpType::Uc, QpType::Ud] {
        for op in [WrOpcode::Read, WrOpcode::CmpSwap, WrOpcode::FetchAdd] {
            let mut net = Net::of_type(typ, 4, Faults::default(), |a| a);
            let sge = net.ends[0].sge(0, 8);
            let w = net.remote(op, 1, 0);
            net.ends[0].post(w, &[sge]);
            net.run(SECOND);
            assert_eq!(status(&net.ends[0].done()), WcStatus::LocQpOpErr, "{typ:?} {op:?}");
        }
    }
}

/// A program that posts its receives a little late loses nothing; one that is very late loses datagrams.
#[test]
fn a_datagram_waits_a_moment_for_its_receive() {
    for (place, mut net) in places(QpType::Ud) {
        let ah = net.ah(0, 1);
        let (dest, sge) = (net.ends[1].qpn, net.ends[0].sge(0, 1000));
        let to = net.ends[1].sge(0, 2000);
        for id in 1..=10 {
            net.ends[0].post_to(wqe(WrOpcode::Send, id), ah, dest, &[sge]);
        }
        net.run(9_000_000);
        for id in 1..=5 {
            net.ends[1].recv(id, &[to]);
        }
        net.run(500_000);
        let got: Vec<u64> = net.ends[1].poll().iter().map(|c| c.wr_id).collect();
        assert_eq!(got, [1, 2, 3, 4, 5], "{place}");
        net.run(1_000_000);
        net.ends[1].recv(6, &[to]);
        net.run(SECOND);
        assert!(net.ends[1].poll().is_empty(), "{place}");
        assert_eq!(net.counters(1).dropped, 5, "{place}");
    }
}

/// A round ends with the first turn whose datagrams find no receive, so that programs can post some. The next round
/// goes on in any case.
#[test]
fn a_round_ends_when_a_datagram_finds_no_receive() {
    let mut net = Net::hosts(1, &[QpType::Ud; 4], 9, Faults::default());
    for (from, to) in [(0, 1), (2, 3)] {
        net.connect(QpType::Ud, from, to, &|a| a);
        net.connect(QpType::Ud, to, from, &|a| a);
    }
    net.run(SECOND);
    for (from, to) in [(0, 1), (2, 3)] {
        let (ah, dest, sge) = (net.ah(from, to), net.ends[to].qpn, net.ends[from].sge(0, 100));
        net.ends[from].post_to(wqe(WrOpcode::Send, 1), ah, dest, &[sge]);
    }
    let now = net.now;
    let sent = |net: &mut Net| [0, 2].map(|end: usize| net.ends[end].poll().len()).iter().sum::<usize>();
    assert!(!net.rnic(0).is_starved());
    for _ in 0..2 {
        net.rnic(0).poll(now);
        assert_eq!((sent(&mut net), net.rnic(0).is_starved()), (1, true));
    }
    assert!(net.rnic(0).take_starved() && !net.rnic(0).is_starved());
}

/// Even while the device sleeps so that programs can post receives, it sees the doorbells of others.
#[test]
fn programs_that_lack_receives_keep_nobody_awake_for_a_moment() {
    let mut net = Net::hosts(1, &[QpType::Ud; 3], 9, Faults::default());
    net.connect(QpType::Ud, 0, 1, &|a| a);
    net.connect(QpType::Ud, 1, 0, &|a| a);
    net.run(SECOND);
    let (ah, dest, sge) = (net.ah(0, 1), net.ends[1].qpn, net.ends[0].sge(0, 100));
    net.ends[0].post_to(wqe(WrOpcode::Send, 1), ah, dest, &[sge]);
    let now = net.now;
    net.rnic(0).poll(now);
    assert!(net.rnic(0).take_starved());
    let ring = |net: &mut Net, end: usize| _ = net.ends[end].bell.ring(net.ends[end].slot);
    ring(&mut net, 0);
    assert_eq!([false, true].map(|starves| net.rnic(0).doze(starves)), [None, Some(false)]);
    ring(&mut net, 2);
    assert_eq!(net.rnic(0).doze(true), None);
    // Its next turn ends that.
    while net.rnic(0).poll(now) {}
    ring(&mut net, 0);
    assert_eq!(net.rnic(0).doze(true), None);
}

/// More datagrams than fit between RNIC and port wait for room; none is lost.
#[test]
fn datagrams_wait_for_the_port() {
    let mut net = Net::of_type(QpType::Ud, 4, Faults::default(), |a| a);
    let ah = net.ah(0, 1);
    let (dest, sge) = (net.ends[1].qpn, net.ends[0].sge(0, 4096));
    let mut sent = 0;
    // The port takes nothing for a while: the buffer fills up.
    for _ in 0..40 {
        for _ in 0..16 {
            net.ends[0].post_to(
                abi::SqWqe { send_flags: send_flags::SIGNALED, ..wqe(WrOpcode::Send, 1) },
                ah,
                dest,
                &[sge],
            );
        }
        while poll(&mut net.rnics[0], 0) {}
        let done = net.ends[0].poll().len();
        sent += done;
        if done < 16 {
            break;
        }
    }
    let before = net.rnics[0].tx().packets().len();
    assert_eq!((before, sent % 16 > 0), (sent, true), "it is full");
    net.run(SECOND);
    assert_eq!(net.ends[0].poll().len(), 16 - sent % 16);
    assert_eq!(net.counters(1).wire.rcvd_pkts, sent as u64 / 16 * 16 + 16);
}

/// A program posts its last datagrams and destroys its AH and its QP at once, while no poller has a turn.
#[test]
fn datagrams_posted_before_their_objects_are_destroyed_are_sent() {
    for destroys_ah in [true, false] {
        for (place, mut net) in places(QpType::Ud) {
            let ah = net.ah(0, 1);
            let (dest, sge, to) = (net.ends[1].qpn, net.ends[0].sge(0, 1000), net.ends[1].sge(0, 2000));
            let (session, qpn, other) = (net.ends[0].session, net.ends[0].qpn, net.ends[1].session);
            (1..=10).for_each(|id| net.ends[1].recv(id, &[to]));
            net.run(SECOND);
            let now = net.now;
            // An idle session is not polled, but its doorbell is seen all the same.
            net.rnic(0).park_idle(now, 0);
            assert!(!net.rnic(0).is_behind(now, session, None), "{place}");
            for id in 1..=10 {
                net.ends[0].post_to(wqe(WrOpcode::Send, id), ah, dest, &[sge]);
            }
            let of = (!destroys_ah).then_some(qpn);
            let rnic = net.rnic(0);
            assert!(!rnic.is_behind(now, session, Some(qpn ^ 1)), "{place}: another QP");
            if place == "one host" {
                assert!(!rnic.is_behind(now, other, None), "another session");
            }
            assert!(rnic.is_behind(now, session, of), "{place}");
            while rnic.is_behind(now, session, of) {
                rnic.poll(now);
            }
            if destroys_ah {
                rnic.destroy_ah(session, ah).unwrap();
            }
            rnic.destroy_qp(session, qpn).unwrap();
            net.run(SECOND);
            let got: Vec<u64> = net.ends[1].poll().iter().map(|c| c.wr_id).collect();
            assert_eq!(got, (1..=10).collect::<Vec<_>>(), "{place}");
            assert_eq!((net.counters(0).sent_wrs, net.counters(0).errors), (10, 0), "{place}");
        }
    }
}

/// On a reliable QP only a completion says that a message has left, so a command does not wait for posted sends.
#[test]
fn only_unreliable_sends_come_before_a_command() {
    for (typ, of_its_qp, of_ahs) in [(QpType::Rc, false, false), (QpType::Uc, true, false), (QpType::Ud, true, true)] {
        for (place, mut net) in places(typ) {
            let (session, qpn, dest) = (net.ends[0].session, net.ends[0].qpn, net.ends[1].qpn);
            let (ah, sge) = (net.ah(0, 1), net.ends[0].sge(0, 100));
            net.ends[0].post_to(wqe(WrOpcode::Send, 1), ah, dest, &[sge]);
            let now = net.now;
            let behind = (net.rnic(0).is_behind(now, session, Some(qpn)), net.rnic(0).is_behind(now, session, None));
            assert_eq!(behind, (of_its_qp, of_ahs), "{typ:?}, {place}");
            net.run(SECOND);
            assert!(!net.rnic(0).is_behind(now, session, Some(qpn)), "{typ:?}, {place}");
        }
    }
}

/// Traffic to and from other hosts has its own counters, for connections and for datagrams, also for datagrams that
/// wait for a receive.
#[test]
fn counters_say_what_went_over_the_network() {
    for typ in [QpType::Rc, QpType::Uc, QpType::Ud] {
        for (place, mut net) in places(typ) {
            let (from, to) = (net.ends[0].sge(0, 1000), net.ends[1].sge(50_000, 2000));
            let send = |net: &mut Net, id| match typ {
                QpType::Ud => {
                    let (ah, dest) = (net.ah(0, 1), net.ends[1].qpn);
                    net.ends[0].post_to(wqe(WrOpcode::Send, id), ah, dest, &[from]);
                }
                _ => {
                    net.ends[0].post(wqe(WrOpcode::Send, id), &[from]);
                }
            };
            net.ends[1].recv(1, &[to]);
            send(&mut net, 1);
            net.run(SECOND);
            // This one comes before its receive; UC loses such messages.
            let mut received = 1000;
            if typ != QpType::Uc {
                send(&mut net, 2);
                net.run(100_000);
                net.ends[1].recv(2, &[to]);
                net.run(SECOND);
                received += 1000;
            }
            if typ != QpType::Ud {
                let write = net.remote(WrOpcode::Write, 3, 0);
                net.ends[0].post(write, &[from]);
                net.run(SECOND);
                received += 1000;
            }
            let (sender, receiver) = (net.counters(0), net.counters(1));
            let requests = if typ == QpType::Rc { 3 } else { 2 };
            let receives = received / 1000 - u64::from(typ != QpType::Ud);
            let grhs = if typ == QpType::Ud { 40 * receives } else { 0 };
            assert_eq!((sender.sent_wrs, sender.sent_bytes), (requests, requests * 1000), "{typ:?}, {place}");
            assert_eq!(
                (receiver.received_wrs, receiver.received_bytes),
                (receives, received + grhs),
                "{typ:?}, {place}"
            );
            let (out, back) = (sender.wire, receiver.wire);
            let over = (out.sent_wrs, out.sent_bytes, back.received_wrs, back.received_bytes);
            let expected = match place {
                "one host" => (0, 0, 0, 0),
                _ => (requests, requests * 1000, receives, received + grhs),
            };
            assert_eq!(over, expected, "{typ:?}, {place}");
        }
    }
}

#[test]
fn errors_are_counted_by_their_kind() {
    for (place, mut net) in places(QpType::Rc) {
        let sge = net.ends[0].sge(0, 1000);
        let bad = abi::SqWqe { rkey: 1, ..net.remote(WrOpcode::Write, 1, 0) };
        net.ends[0].post(bad, &[sge]);
        // Flushed, which is no error of its own.
        net.ends[0].post(wqe(WrOpcode::Send, 2), &[sge]);
        net.run(SECOND);
        let c = net.counters(0);
        assert_eq!((c.errors, c.failed.remote, c.failed.local, c.failed.retries), (1, 1, 0, 0), "{place}");
    }
    for (place, mut net) in places(QpType::Ud) {
        let (ah, dest, sge) = (net.ah(0, 1), net.ends[1].qpn, net.ends[0].sge(0, 5000));
        net.ends[0].post_to(wqe(WrOpcode::Send, 1), ah, dest, &[sge]);
        net.run(SECOND);
        let c = net.counters(0);
        assert_eq!((c.errors, c.failed.local, c.wire.sent_wrs), (1, 1, 0), "{place}");
    }
}

/// A WRITE of 1 MiB over UC, which is 1,024 packets. The sender gets no acknowledgement, but the peer's host reports
/// the packets that it has taken.
fn write_much(net: &mut Net) -> u64 {
    let sge = net.ends[0].sge(0, 1 << 20);
    let write = net.remote(WrOpcode::Write, 1, 0);
    net.ends[0].post(write, &[sge]);
    let (before, began) = (net.counters(0).wire.sent_pkts, net.now);
    while net.ends[0].poll().is_empty() {
        assert!(net.now - began < SECOND, "{} packets sent", net.counters(0).wire.sent_pkts - before);
        net.run(1_000_000);
    }
    net.now - began
}

#[test]
fn an_unreliable_sender_waits_until_the_peers_host_has_taken_its_window() {
    let mut net = Net::of_type(QpType::Uc, 9, Faults::default(), |a| a);
    assert!(write_much(&mut net) < 40_000_000, "nothing is lost, so no timer ends a wait");
    let (sender, receiver) = (net.counters(0).wire, net.counters(1).wire);
    assert_eq!(receiver.rcvd_pkts, sender.sent_pkts);
    // One answer stands for all packets that came together, and the widest window is 512 packets.
    assert!(receiver.sent_pkts >= sender.sent_pkts / 512, "the receiver's host has said what it has taken");
    // Now the host takes nothing any more. The sender learns that gradually, and floods nobody meanwhile.
    net.faults.loss = 1000;
    let sge = net.ends[0].sge(0, 1 << 20);
    let write = net.remote(WrOpcode::Write, 2, 0);
    net.ends[0].post(write, &[sge]);
    net.run(200_000_000);
    let flood = net.counters(0).wire.sent_pkts - sender.sent_pkts;
    assert!(flood < 1024, "{flood} packets to a host that takes none");
    net.run(SECOND);
    assert_eq!(net.ends[0].done().wr_id, 2, "an unreliable request ends whether anybody takes it or not");
}

#[test]
fn an_unreliable_sender_does_not_wait_for_a_host_that_never_says_what_it_takes() {
    let mut net = Net::of_type(QpType::Uc, 9, Faults { loss: 1000, ..Faults::default() }, |a| a);
    let first = write_much(&mut net);
    assert!((50_000_000..200_000_000).contains(&first), "{first}");
    assert!(write_much(&mut net) < 40_000_000);
}
