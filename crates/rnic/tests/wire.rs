//! Two RNICs and a bad network between them: every request completes once, in order, with the right data.

use std::net::IpAddr;

use unirdma_abi as abi;
use unirdma_formats::cm;
use unirdma_formats::wire::{Deth, Op, Opcode, Packet, Reth, Transport};
use unirdma_formats::{QpType, WcStatus, WrOpcode, attr_mask as m, send_flags};
use unirdma_rnic::Rng;
use unirdma_simkit::connection;
use unirdma_simkit::net::{Faults, Net, arrival, host};
use unirdma_simkit::*;

#[test]
fn a_good_network_delivers() {
    for mtu in 1..=5 {
        connection::run_with(mtu.into(), Faults::default(), mtu, 6);
    }
}

/// One of the two simulations of `cargo xtask sim`, with a fixed budget. Each seed is a network and traffic of its own.
#[test]
fn a_bad_network_changes_nothing_but_the_time() {
    for seed in 0..60 {
        println!("cargo xtask sim --seed {seed} --seeds 1 --steps 6");
        connection::run(seed, 6);
    }
}

#[test]
fn a_terrible_network_too() {
    for seed in 100..110 {
        connection::run_with(seed, Faults { loss: 100, duplication: 100, reordering: 200, corruption: 10 }, 3, 6);
    }
}

/// Duplicates that the network makes must not count against the limit of outstanding requests.
#[test]
fn a_network_that_sends_everything_twice_does_no_harm() {
    for seed in 200..215 {
        connection::run_with(
            seed,
            Faults { duplication: 1000, reordering: 300, ..Faults::default() },
            1 + (seed % 5) as u8,
            3,
        );
    }
}

/// Random packets from the right host to the right QP, near the expected PSN, with no right key: no panic, and memory
/// stays as it is; the QP serves again once it was reset.
#[test]
fn nonsense_from_the_peer_costs_its_own_connection_only() {
    for seed in 0..40 {
        let mut net = Net::new(seed, Faults::default(), |a| a);
        let mut rng = Rng::new(seed);
        let data = pattern(MR_BYTES, seed);
        for e in &net.ends {
            e.fill(0, &data);
        }
        let payload = pattern(5000, seed);
        for i in 0..2000 {
            let to = (i % 2) as usize;
            let r = rng.next_u64();
            let mut bytes = vec![0; 64];
            if let Some(opcode) = Opcode::from_raw(r as u8) {
                let near = 100u32.wrapping_add((r >> 8) as u32 % 5).wrapping_sub(2);
                let mut p = Packet::new(opcode, net.ends[to].qpn, near);
                (p.ack_req, p.solicited) = (r >> 20 & 1 != 0, r >> 21 & 1 != 0);
                p.reth = Reth { va: IOVA, rkey: (r >> 32) as u32, dma_len: (r >> 24) as u32 & 0xffff };
                p.atomic.va = IOVA;
                p.atomic.rkey = (r >> 32) as u32;
                p.aeth.syndrome = (r >> 40) as u8;
                let len = [0, 4, 1023, 1024, 1025, 4096][(r >> 48) as usize % 6];
                let n = p.put(&mut bytes, len);
                bytes.truncate(n);
                bytes.extend_from_slice(&payload[..len + unirdma_formats::wire::padding(len)]);
            }
            if r >> 60 == 0 {
                let at = (r >> 50) as usize % bytes.len();
                bytes[at] ^= r as u8;
            }
            let now = net.now;
            net.rnics[to].handle_packet(now, &arrival(host(1 - to)), &bytes);
            if i % 16 == 0 {
                net.run(1000);
            }
        }
        net.run(SECOND);
        for e in &net.ends {
            assert_eq!(e.bytes(0, MR_BYTES), data, "seed {seed}");
        }
        // Both ends start again.
        for i in 0..2 {
            let (session, qpn) = (net.ends[i].session, net.ends[i].qpn);
            net.rnics[i].modify_qp(session, qpn, m::STATE, &abi::QpAttr::default()).unwrap();
            for (mask, attr) in attrs(&net.ends[1 - i], ip(2 - i as u8)) {
                net.rnics[i].modify_qp(session, qpn, mask, &attr).unwrap();
            }
            net.ends[i].poll();
        }
        let w = net.remote(WrOpcode::Write, 9, 0);
        let sge = net.ends[0].sge(64, 3000);
        net.ends[0].post(w, &[sge]);
        net.run(SECOND);
        assert_eq!(status(&net.ends[0].done()), WcStatus::Success, "seed {seed}");
        assert_eq!(net.ends[1].bytes(0, 3000), data[64..3064]);
    }
}

#[test]
fn sequence_numbers_wrap() {
    let mut net = Net::new(5, Faults { loss: 20, ..Faults::default() }, |a| abi::QpAttr {
        sq_psn: 0xff_fff0,
        rq_psn: 0xff_fff0,
        retry_cnt: 7,
        ..a
    });
    let data = pattern(400_000, 1);
    net.ends[0].fill(0, &data);
    let (w, r) = (net.remote(WrOpcode::Write, 1, 0), net.remote(WrOpcode::Read, 2, 0));
    let (from, to) = (net.ends[0].sge(0, 400_000), net.ends[0].sge(500_000, 400_000));
    net.ends[0].post(w, &[from]);
    net.ends[0].post(r, &[to]);
    net.run(60 * SECOND);
    assert_eq!(net.ends[0].poll().iter().map(|c| c.status).collect::<Vec<_>>(), [0, 0]);
    assert_eq!(net.ends[0].bytes(500_000, 400_000), data);
}

#[test]
fn silence_ends_after_the_time_that_the_attributes_give() {
    let mut net = Net::new(1, Faults::default(), |a| a);
    net.cut(0, true);
    let w = net.remote(WrOpcode::Write, 1, 0);
    let sge = net.ends[0].sge(0, 8);
    net.ends[0].post(w, &[sge]);
    // timeout 14 is 67.1 ms; retry_cnt 3: four tries.
    net.run(4 * 67_108_864 - 1);
    assert!(net.ends[0].poll().is_empty());
    net.run(1);
    assert_eq!(status(&net.ends[0].done()), WcStatus::RetryExcErr);
    assert_eq!(net.counters(0).wire.retransmitted_pkts, 3);
}

#[test]
fn no_receive_is_waited_for_and_then_an_error() {
    let mut net = Net::new(1, Faults::default(), |a| a);
    let (w, sge) = (wqe(WrOpcode::Send, 1), net.ends[0].sge(0, 100));
    net.ends[0].post(w, &[sge]);
    net.run(1_000_000);
    assert!(net.counters(0).wire.rcvd_rnr_err > 0);
    let r = net.ends[1].sge(0, 100);
    net.ends[1].recv(5, &[r]);
    net.run(10_000_000);
    assert_eq!(status(&net.ends[0].done()), WcStatus::Success);
    assert_eq!(net.ends[1].done().wr_id, 5);
    net.ends[0].post(w, &[sge]);
    net.run(SECOND);
    assert_eq!(status(&net.ends[0].done()), WcStatus::RnrRetryExcErr);
}

/// A program may end as soon as it has its message: the sender's ACK must not be lost with the QP.
#[test]
fn the_last_message_is_acknowledged_before_its_qp_goes() {
    let endings: [fn(&mut Net); 3] = [
        |n| n.rnics[1].destroy_qp(n.ends[1].session, n.ends[1].qpn).unwrap(),
        |n| n.rnics[1].remove_session(n.ends[1].session),
        |n| {
            let err = abi::QpAttr { qp_state: 6, ..Default::default() };
            n.rnics[1].modify_qp(n.ends[1].session, n.ends[1].qpn, m::STATE, &err).unwrap();
        },
    ];
    for (i, end) in endings.into_iter().enumerate() {
        let mut net = Net::new(1, Faults::default(), |a| a);
        let (to, from) = (net.ends[1].sge(0, 100), net.ends[0].sge(0, 100));
        net.ends[1].recv(1, &[to]);
        net.ends[0].post(wqe(WrOpcode::Send, 1), &[from]);
        while net.ends[1].poll().is_empty() {
            net.run(500);
        }
        end(&mut net);
        net.run(20_000);
        assert_eq!(status(&net.ends[0].done()), WcStatus::Success, "ending {i}");
    }
}

/// A sender that has no credit tries one message at a time, instead of a window full of them.
#[test]
fn credits_keep_a_sender_from_sending_in_vain() {
    let mut net = Net::new(1, Faults::default(), |a| abi::QpAttr { rnr_retry: 7, ..a });
    let (to, from) = (net.ends[1].sge(0, 2000), net.ends[0].sge(0, 2000));
    for round in 0..3 {
        for id in 0..2 {
            net.ends[1].recv(id, &[to]);
        }
        for id in 0..8 {
            net.ends[0].post(wqe(WrOpcode::Send, id), &[from]);
        }
        net.run(10_000_000);
        assert_eq!(net.ends[0].poll().len(), 2, "round {round}");
        for id in 2..8 {
            net.ends[1].recv(id, &[to]);
            net.run(10_000_000);
        }
        assert_eq!(net.ends[0].poll().len(), 6);
    }
    // Each of the refused tries was one packet or two, never also the messages behind it.
    let c = net.counters(0).wire;
    assert!(c.retransmitted_pkts <= 3 * c.rcvd_rnr_err, "{c:?}");
}

#[test]
fn the_responder_refuses_what_hardware_refuses() {
    type Change = fn(&mut abi::SqWqe);
    let cases: &[(&str, Change, WcStatus)] = &[
        ("rkey", |w| w.rkey ^= 1, WcStatus::RemAccessErr),
        ("range", |w| w.remote_addr += MR_BYTES as u64, WcStatus::RemAccessErr),
        ("alignment", |w| (w.opcode, w.remote_addr) = (WrOpcode::FetchAdd as u8, IOVA + 1), WcStatus::RemInvReqErr),
        ("read rkey", |w| (w.opcode, w.rkey) = (WrOpcode::Read as u8, 0), WcStatus::RemAccessErr),
    ];
    for (name, change, want) in cases {
        let mut net = Net::new(3, Faults::default(), |a| a);
        let mut w = net.remote(WrOpcode::Write, 1, 0);
        change(&mut w);
        let sge = net.ends[0].sge(0, 8);
        let good = net.remote(WrOpcode::Write, 0, 64);
        net.ends[0].post(good, &[sge]);
        net.ends[0].post(w, &[sge]);
        net.ends[0].post(good, &[sge]);
        net.run(SECOND);
        let got: Vec<WcStatus> = net.ends[0].poll().iter().map(status).collect();
        assert_eq!(got, [WcStatus::Success, *want, WcStatus::WrFlushErr], "{name}");
        let state = net.rnics[1].query_qp(net.ends[1].session, net.ends[1].qpn).unwrap().qp_state;
        assert_eq!(state, 6, "{name}: the responder's QP");
    }
}

#[test]
fn a_receive_that_is_too_short_fails_both_sides() {
    let mut net = Net::new(3, Faults::default(), |a| a);
    let r = net.ends[1].sge(0, 1500);
    net.ends[1].recv(1, &[r]);
    let sge = net.ends[0].sge(0, 4000);
    net.ends[0].post(wqe(WrOpcode::Send, 9), &[sge]);
    net.run(SECOND);
    assert_eq!(status(&net.ends[0].done()), WcStatus::RemInvReqErr);
    assert_eq!(status(&net.ends[1].done()), WcStatus::LocLenErr);
}

/// A marked network slows its sender down, also one that gets no answers; without congestion control it does not.
#[test]
fn congestion_marks_shrink_the_window() {
    for typ in [QpType::Rc, QpType::Uc] {
        let mut time = Vec::new();
        for (marked, control) in [(false, true), (true, true), (true, false)] {
            let mut net = Net::hosts(2, &[typ, typ], 3, Faults::default());
            for i in 0..2 {
                net.rnics[i].set_congestion_control(control);
                net.connect(typ, i, 1 - i, &|a| a);
            }
            net.congested = marked;
            let (sge, w) = (net.ends[0].sge(0, 900_000), net.remote(WrOpcode::Write, 1, 0));
            net.ends[0].post(w, &[sge]);
            let start = net.now;
            while net.ends[0].poll().is_empty() {
                net.run(10_000);
            }
            time.push(net.now - start);
            if typ == QpType::Uc {
                // Its requests are complete before their packets have arrived.
                net.run(100_000);
            }
            let (sender, receiver) = (net.counters(0).wire, net.counters(1).wire);
            assert_eq!(receiver.np_ecn_marked_roce_packets > 800, marked);
            assert_eq!(sender.rp_cnp_handled > 0, marked && control);
            assert_eq!(receiver.np_cnp_sent, sender.rp_cnp_handled);
            // At most one notification in 50 us.
            assert!(receiver.np_cnp_sent <= 1 + (net.now - start) / 50_000);
        }
        assert!(time[1] > 3 * time[0] && time[2] <= time[0], "{typ:?}: {time:?}");
    }
}

#[test]
fn forged_packets_change_nothing() {
    let mut net = Net::new(3, Faults::default(), |a| a);
    net.ends[1].fill(0, &[7; 64]);
    let only = Opcode {
        transport: Transport::Rc,
        op: Op::Write(unirdma_formats::wire::Part::Only),
        extra: unirdma_formats::wire::Extra::None,
    };
    let mut p = Packet::new(only, net.ends[1].qpn, 100);
    p.reth = Reth { va: IOVA, rkey: net.ends[1].key, dma_len: 4 };
    let bytes = |p: &Packet<'_>| {
        let mut b = vec![0; 64];
        let n = p.put(&mut b, 4);
        b.truncate(n + 4);
        b
    };
    // A packet from another host, to an unknown QP, with a foreign P_Key, and garbage.
    net.rnics[1].handle_packet(0, &arrival(IpAddr::from([192, 168, 0, 9])), &bytes(&p));
    net.rnics[1].handle_packet(0, &arrival(host(0)), &bytes(&Packet { dest_qp: p.dest_qp ^ 1, ..p }));
    net.rnics[1].handle_packet(0, &arrival(host(0)), &bytes(&Packet { pkey: 0x1234, ..p }));
    net.rnics[1].handle_packet(0, &arrival(host(0)), &bytes(&p)[..20]);
    let d = net.rnics[1].wire_drops();
    assert_eq!((d.wrong_source, d.no_qp, d.bad_pkey, d.malformed), (1, 1, 1, 1));
    assert_eq!((net.counters(1).pkey_violations, net.counters(0).pkey_violations), (1, 0));
    net.run(SECOND);
    assert_eq!(net.ends[1].bytes(0, 64), [7; 64]);
}

/// Messages of connection management that belong to no connection are counted by their kind.
#[test]
fn messages_for_no_connection_are_counted() {
    let mut net = Net::new(3, Faults::default(), |a| a);
    let mut take = |mad: &[u8]| {
        let only = unirdma_formats::wire::Part::Only;
        let send = Opcode { transport: Transport::Ud, op: Op::Send(only), extra: unirdma_formats::wire::Extra::None };
        let mut p = Packet::new(send, cm::GSI_QPN, 0);
        p.deth = Deth { qkey: cm::GSI_QKEY, src_qp: cm::GSI_QPN };
        let mut bytes = vec![0; 64 + mad.len()];
        let n = p.put(&mut bytes, mad.len());
        bytes.truncate(n);
        bytes.extend_from_slice(mad);
        net.rnics[1].handle_packet(0, &arrival(host(0)), &bytes);
        let d = net.rnics[1].wire_drops();
        (d.wrong_source, d.no_qp, d.malformed)
    };
    let bytes = |message| cm::Mad { tid: 1, message }.bytes();
    let late = cm::Message::Drep { local_id: 5, remote_id: 6, private: Vec::new() };
    assert_eq!(take(&bytes(late)), (0, 1, 0), "of a connection that is gone");
    assert_eq!(take(&bytes(cm::Message::Req(cm::Req::default()))), (1, 1, 0), "of a stranger");
    assert_eq!(take(&[0xff; 256]), (1, 1, 1));
}

#[test]
fn a_drained_queue_says_so_and_goes_on() {
    let mut net = Net::new(3, Faults::default(), |a| a);
    let sge = net.ends[0].sge(0, 100_000);
    let w = net.remote(WrOpcode::Write, 1, 0);
    net.ends[0].post(w, &[sge]);
    net.run(10);
    let sqd = abi::QpAttr { qp_state: 4, en_sqd_async_notify: 1, ..Default::default() };
    net.rnics[0].modify_qp(net.ends[0].session, net.ends[0].qpn, m::STATE | m::EN_SQD_ASYNC_NOTIFY, &sqd).unwrap();
    net.ends[0].post(abi::SqWqe { send_flags: send_flags::SIGNALED | send_flags::FENCE, wr_id: 2, ..w }, &[sge]);
    net.run(SECOND);
    assert_eq!(net.ends[0].done().wr_id, 1);
    let rts = abi::QpAttr { qp_state: 3, ..Default::default() };
    net.rnics[0].modify_qp(net.ends[0].session, net.ends[0].qpn, m::STATE, &rts).unwrap();
    net.run(SECOND);
    assert_eq!(net.ends[0].done().wr_id, 2);
}
