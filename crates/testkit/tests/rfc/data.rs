//! The data path: R39, R42 to R44, R50 to R63.

use unirdma_abi::rfc::{Atomic, QpAttr, SqReq, opcode as op, send_flags, wc_flags};
use unirdma_formats::WrOpcode;
use unirdma_testkit::Program;
use unirdma_testkit::rfc::send;
use zerocopy::IntoBytes;

use crate::world::{ALL_ACCESS, QKEY, RC, RTS, Side, UC, UD, one, pair, wc};

const ERR: u8 = 6;

/// A send WQE with an atomic in its union.
fn atomic(opcode: u32, wr_id: u64, part: Atomic) -> SqReq {
    let mut r = send(opcode, wr_id);
    r.set_part(&part);
    r
}

#[test]
fn r50_r52_a_send_is_gathered_sent_and_completed_after_its_ack() {
    let (_host, mut a, mut b) = pair(RC);
    b.receive(70, 0, 4096);
    a.put(100, b"gathered ");
    a.put(9000, b"from two places");
    a.qp.send(send(op::SEND, 7), &[a.mr.sge(100, 9), a.mr.sge(9000, 15)]);
    let c = a.cq.wait();
    assert_eq!((c.wr_id.get(), c.status, c.opcode, c.qp_num.get()), (7, wc::SUCCESS, op::SEND as u8, a.qp.qpn));
    let c = b.cq.wait();
    assert_eq!((c.wr_id.get(), c.status, c.opcode, c.byte_len.get()), (70, wc::SUCCESS, op::RECV, 24));
    assert_eq!((c.qp_num.get(), c.wc_flags.get(), c.port_num), (b.qp.qpn, 0, 1));
    assert_eq!(b.bytes(0, 24), b"gathered from two places");
    // Without a receive there is no ACK. The only completion comes after the last retry.
    for s in [&mut a, &mut b] {
        s.d.move_to(s.qp.qpn, 0).unwrap();
    }
    a.d.connect_with(a.qp.qpn, RC, b.d.gid, b.qp.qpn, |x| QpAttr { rnr_retry: 2, ..x }).unwrap();
    b.d.connect(b.qp.qpn, RC, a.d.gid, a.qp.qpn).unwrap();
    a.send(op::SEND, 8, 0, 8);
    let c = a.cq.wait();
    assert_eq!((c.wr_id.get(), c.status), (8, wc::RNR_RETRY_EXC_ERR));
}

#[test]
fn r50_send_with_imm_brings_its_immediate_as_it_is() {
    let (_host, mut a, mut b) = pair(RC);
    b.receive(1, 0, 64);
    let r = SqReq { ex: 0x0a0b_0c0d.into(), ..send(op::SEND_WITH_IMM, 2) };
    a.qp.send(r, &[a.mr.sge(0, 8)]);
    assert_eq!(a.cq.wait().opcode, op::SEND_WITH_IMM as u8, "the opcode of its WQE");
    let c = b.cq.wait();
    assert_eq!((c.opcode, c.wc_flags.get(), c.ex.get()), (op::RECV, wc_flags::WITH_IMM, 0x0a0b_0c0d));
    // No data is needed beside it (V15).
    b.receive(3, 0, 64);
    a.qp.send(r, &[]);
    assert_eq!((b.cq.wait().byte_len.get(), a.cq.wait().status), (0, wc::SUCCESS));
}

#[test]
fn r50_the_union_of_a_send_that_is_no_datagram_is_not_looked_at() {
    let (_host, mut a, mut b) = pair(RC);
    b.receive(1, 0, 64);
    let mut r = send(op::SEND, 2);
    r.wr.as_mut_bytes().fill(0xff);
    a.qp.send(r, &[a.mr.sge(0, 8)]);
    assert_eq!((a.cq.wait().status, b.cq.wait().status), (wc::SUCCESS, wc::SUCCESS));
}

#[test]
fn r50_r52_a_datagram_goes_where_its_wqe_says_and_completes_when_it_is_sent() {
    let (_host, mut a, mut b) = pair(UD);
    b.receive(1, 0, 256);
    b.receives_are_taken();
    a.put(0, b"datagram");
    let mut r = send(op::SEND, 2);
    r.set_part(&a.qp.to(b.d.gid, b.qp.qpn, QKEY));
    a.qp.send(r, &[a.mr.sge(0, 8)]);
    let c = b.cq.wait();
    assert_eq!((c.byte_len.get(), c.wc_flags.get(), c.src_qp.get()), (48, wc_flags::GRH, a.qp.qpn));
    assert_eq!(b.bytes(40, 8), b"datagram", "40 bytes of header come first (R84l)");
    assert_eq!(a.cq.wait().status, wc::SUCCESS);
    // The destination QP does not exist; the send completes nevertheless.
    r.set_part(&a.qp.to(b.d.gid, 0x123, QKEY));
    a.qp.send(r, &[a.mr.sge(0, 8)]);
    assert_eq!(a.cq.wait().status, wc::SUCCESS);
    // A datagram with another Q_Key is dropped.
    b.receive(3, 0, 256);
    r.set_part(&a.qp.to(b.d.gid, b.qp.qpn, QKEY + 1));
    a.qp.send(r, &[a.mr.sge(0, 8)]);
    assert_eq!(a.cq.wait().status, wc::SUCCESS);
    b.cq.stays_empty();
}

#[test]
fn r50_an_address_vector_of_another_pd_port_or_gid_is_refused() {
    let (_host, mut a, b) = pair(UD);
    type Change = fn(&mut unirdma_abi::rfc::Av);
    let changes: [Change; 3] =
        [|av| av.pdn = (av.pdn.get() + 1).into(), |av| av.port = 2.into(), |av| av.gid_index = 3];
    for change in changes {
        let mut ud = a.qp.to(b.d.gid, b.qp.qpn, QKEY);
        change(&mut ud.av);
        let mut r = send(op::SEND, 9);
        r.set_part(&ud);
        a.qp.send(r, &[a.mr.sge(0, 8)]);
        let c = a.cq.wait();
        assert_eq!((c.wr_id.get(), c.status), (9, wc::LOC_QP_OP_ERR));
        // A UD QP is in SQE now, and can go on.
        a.d.move_to(a.qp.qpn, RTS).unwrap();
    }
}

#[test]
fn r51_r53_receiver_validates_lkey_fills_and_completes() {
    let (_host, mut a, mut b) = pair(RC);
    // Two SGEs, filled in their order.
    b.qp.receive(1, &[b.mr.sge(0, 4), b.mr.sge(100, 60)]);
    a.put(0, b"scattered");
    a.send(op::SEND, 1, 0, 9);
    assert_eq!((a.cq.wait().status, b.cq.wait().byte_len.get()), (wc::SUCCESS, 9));
    assert_eq!((b.bytes(0, 4), b.bytes(100, 5)), (b"scat".to_vec(), b"tered".to_vec()));
    // A key that the driver does not have: nothing is written, and the sender gets an error.
    let mut sge = b.mr.sge(200, 64);
    sge.lkey = (b.mr.lkey ^ 0x5555).into();
    b.qp.receive(2, &[sge]);
    a.send(op::SEND, 2, 0, 9);
    let c = b.cq.wait();
    assert_eq!((c.wr_id.get(), c.status), (2, wc::LOC_PROT_ERR));
    assert_ne!(a.cq.wait().status, wc::SUCCESS);
    assert_eq!((b.bytes(200, 9), b.state()), (vec![0; 9], ERR));
}

#[test]
fn r53_a_receive_that_is_too_small_fails_at_both_ends() {
    let (_host, mut a, mut b) = pair(RC);
    b.receive(1, 0, 4);
    a.send(op::SEND, 1, 0, 100);
    assert_eq!((b.cq.wait().status, a.cq.wait().status), (wc::LOC_LEN_ERR, wc::REM_INV_REQ_ERR));
}

#[test]
fn r52_a_sender_whose_lkey_is_wrong_sends_nothing() {
    let (_host, mut a, mut b) = pair(RC);
    b.receive(1, 0, 64);
    // Each case has one fault: an invalid key, an MR of another PD, or one byte too many.
    let other_pd = a.d.pd();
    let other = a.d.mr(other_pd, 4096, ALL_ACCESS);
    let mut wrong = a.mr.sge(0, 8);
    wrong.lkey = 1.into();
    let bad = [wrong, other.sge(0, 8), a.mr.sge((64 << 10) - 4, 8)];
    for (i, sge) in bad.into_iter().enumerate() {
        a.qp.send(send(op::SEND, i as u64), &[sge]);
        let c = a.cq.wait();
        assert_eq!((c.wr_id.get(), c.status), (i as u64, wc::LOC_PROT_ERR), "{i}");
        a.d.move_to(a.qp.qpn, 0).unwrap();
        b.d.move_to(b.qp.qpn, 0).unwrap();
        crate::world::connect(&mut a, &mut b, RC);
    }
    b.cq.stays_empty();
}

#[test]
fn r54_r55_a_read_fills_its_buffer_and_completes() {
    let (_host, mut a, mut b) = pair(RC);
    let data: Vec<u8> = (0..20_000u32).map(|i| i as u8).collect();
    b.put(1000, &data);
    let remote = b.mr.remote(1000);
    a.rdma(op::RDMA_READ, 5, (40, 20_000), remote);
    let c = a.cq.wait();
    assert_eq!((c.wr_id.get(), c.status, c.opcode), (5, wc::SUCCESS, op::RDMA_READ as u8));
    assert_eq!(a.bytes(40, 20_000), data);
    b.cq.stays_empty();
}

#[test]
fn r55_the_responder_of_a_read_validates_the_rkey_and_the_requester_its_lkey() {
    let (_host, mut a, mut b) = pair(RC);
    let mut wrong = b.mr.remote(0);
    wrong.rkey = 77.into();
    let local_only = b.d.mr(b.pd, 4096, 1);
    let beyond = b.mr.remote((64 << 10) - 4);
    for remote in [wrong, local_only.remote(0), beyond] {
        a.rdma(op::RDMA_READ, 1, (0, 8), remote);
        assert_eq!(a.cq.wait().status, wc::REM_ACCESS_ERR);
        for side in [&mut a, &mut b] {
            side.d.move_to(side.qp.qpn, 0).unwrap();
        }
        crate::world::connect(&mut a, &mut b, RC);
    }
    let read_only = a.d.mr(a.pd, 4096, 4);
    let mut r = send(op::RDMA_READ, 2);
    r.set_part(&b.mr.remote(0));
    a.qp.send(r, &[read_only.sge(0, 8)]);
    assert_eq!(a.cq.wait().status, wc::LOC_PROT_ERR, "memory without LOCAL_WRITE takes no answer");
}

#[test]
fn r56_r57_a_write_is_placed_and_completes_at_its_sender_only() {
    let (_host, mut a, mut b) = pair(RC);
    a.put(0, b"written");
    let remote = b.mr.remote(500);
    a.rdma(op::RDMA_WRITE, 4, (0, 7), remote);
    let c = a.cq.wait();
    assert_eq!((c.wr_id.get(), c.status, c.opcode), (4, wc::SUCCESS, op::RDMA_WRITE as u8));
    assert_eq!(b.bytes(500, 7), b"written");
    b.cq.stays_empty();
}

#[test]
fn r56_r57_a_write_with_imm_takes_a_receive_and_completes_at_both_ends() {
    let (_host, mut a, mut b) = pair(RC);
    b.receive(9, 0, 64);
    a.put(0, b"written");
    let mut r = SqReq { ex: 0xfeed.into(), ..send(op::RDMA_WRITE_WITH_IMM, 4) };
    r.set_part(&b.mr.remote(600));
    a.qp.send(r, &[a.mr.sge(0, 7)]);
    assert_eq!(a.cq.wait().opcode, op::RDMA_WRITE_WITH_IMM as u8);
    let c = b.cq.wait();
    assert_eq!((c.wr_id.get(), c.opcode, c.byte_len.get()), (9, op::RECV_RDMA_WITH_IMM, 7));
    assert_eq!((c.wc_flags.get(), c.ex.get()), (wc_flags::WITH_IMM, 0xfeed));
    assert_eq!((b.bytes(600, 7), b.bytes(0, 7)), (b"written".to_vec(), vec![0; 7]));
}

#[test]
fn r57_keys_of_a_write_are_validated_at_both_ends() {
    let (_host, mut a, mut b) = pair(RC);
    let mut wrong = b.mr.remote(0);
    wrong.rkey = 78.into();
    a.rdma(op::RDMA_WRITE, 1, (0, 8), wrong);
    assert_eq!((a.cq.wait().status, b.bytes(0, 8)), (wc::REM_ACCESS_ERR, vec![0; 8]));
    for side in [&mut a, &mut b] {
        side.d.move_to(side.qp.qpn, 0).unwrap();
    }
    crate::world::connect(&mut a, &mut b, RC);
    let mut r = send(op::RDMA_WRITE, 2);
    r.set_part(&b.mr.remote(0));
    let mut sge = a.mr.sge(0, 8);
    sge.lkey = 79.into();
    a.qp.send(r, &[sge]);
    assert_eq!(a.cq.wait().status, wc::LOC_PROT_ERR);
}

#[test]
fn r58_r59_atomics_change_the_word_and_return_what_was_there() {
    let (_host, mut a, mut b) = pair(RC);
    b.put(64, &100u64.to_le_bytes());
    let at = b.mr.remote(64);
    let part = |compare_add: u64, swap: u64| Atomic {
        remote_addr: at.remote_addr,
        compare_add: compare_add.into(),
        swap: swap.into(),
        rkey: at.rkey,
    };
    let word = |s: &Side, off| u64::from_le_bytes(s.bytes(off, 8).try_into().unwrap());
    let steps = [
        (op::ATOMIC_FETCH_AND_ADD, part(5, 0), 100, 105),
        (op::ATOMIC_CMP_AND_SWP, part(105, 7), 105, 7),
        (op::ATOMIC_CMP_AND_SWP, part(105, 8), 7, 7),
    ];
    for (opcode, part, found, left) in steps {
        a.qp.send(atomic(opcode, 1, part), &[a.mr.sge(8, 8)]);
        let c = a.cq.wait();
        assert_eq!((c.status, c.opcode, c.byte_len.get()), (wc::SUCCESS, opcode as u8, 8));
        assert_eq!((word(&a, 8), word(&b, 64)), (found, left));
    }
    // At an address that is no multiple of 8 (R84t), and with another key.
    let unaligned = Atomic { remote_addr: (at.remote_addr.get() + 4).into(), ..part(1, 1) };
    a.qp.send(atomic(op::ATOMIC_FETCH_AND_ADD, 2, unaligned), &[a.mr.sge(8, 8)]);
    assert_eq!(a.cq.wait().status, wc::REM_INV_REQ_ERR);
    for side in [&mut a, &mut b] {
        side.d.move_to(side.qp.qpn, 0).unwrap();
    }
    crate::world::connect(&mut a, &mut b, RC);
    a.qp.send(atomic(op::ATOMIC_FETCH_AND_ADD, 3, Atomic { rkey: 5.into(), ..part(1, 1) }), &[a.mr.sge(8, 8)]);
    assert_eq!((a.cq.wait().status, word(&b, 64)), (wc::REM_ACCESS_ERR, 7));
}

#[test]
fn r60_r61_r62_r63_without_mem_mgt_extensions_invalidation_and_registration_are_errors() {
    let (_host, mut a, mut b) = pair(RC);
    for opcode in [op::LOCAL_INV, op::SEND_WITH_INV, op::RDMA_READ_WITH_INV, op::REG_MR] {
        let mut r = SqReq { ex: a.mr.rkey.into(), ..send(opcode, 6) };
        r.set_part(&b.mr.remote(0));
        a.qp.send(r, &[]);
        let c = a.cq.wait();
        assert_eq!((c.wr_id.get(), c.status, c.opcode), (6, wc::LOC_QP_OP_ERR, opcode as u8));
        for side in [&mut a, &mut b] {
            side.d.move_to(side.qp.qpn, 0).unwrap();
        }
        crate::world::connect(&mut a, &mut b, RC);
    }
    // The MR still grants the same access.
    let remote = b.mr.remote(0);
    a.rdma(op::RDMA_READ, 7, (0, 8), remote);
    assert_eq!(a.cq.wait().status, wc::SUCCESS);
}

#[test]
fn r39_a_list_that_is_not_as_long_as_num_sge_says_is_refused() {
    let (_host, mut a, mut b) = pair(RC);
    b.receive(1, 0, 64);
    let head = SqReq { num_sge: 2.into(), ..send(op::SEND, 11) };
    let one = a.mr.sge(0, 8);
    let short = [head.as_bytes(), one.as_bytes()].concat();
    let many = vec![one; 200];
    let long = [SqReq { num_sge: 200.into(), ..head }.as_bytes(), &many.as_bytes()[..1000]].concat();
    let shapes = [short, [head.as_bytes(), &[0; 33]].concat(), head.as_bytes()[..74].to_vec(), long];
    for bytes in shapes {
        assert!(a.qp.sq.post(&bytes));
        let c = a.cq.wait();
        assert_eq!((c.wr_id.get(), c.status), (11, wc::LOC_QP_OP_ERR), "{} bytes", bytes.len());
        for side in [&mut a, &mut b] {
            side.d.move_to(side.qp.qpn, 0).unwrap();
        }
        crate::world::connect(&mut a, &mut b, RC);
    }
    // The device checks a receive only when a message comes for it.
    let head = unirdma_abi::rfc::RqReq { num_sge: 2.into(), wr_id: 12.into() };
    assert!(b.qp.rq.post(&[head.as_bytes(), b.mr.sge(0, 8).as_bytes()].concat()));
    a.send(op::SEND, 13, 0, 8);
    let c = b.cq.wait();
    assert_eq!((c.wr_id.get(), c.status), (12, wc::LOC_QP_OP_ERR));
    assert_ne!(a.cq.wait().status, wc::SUCCESS);
}

#[test]
fn r42_unknown_opcodes_and_r43_unknown_flags_are_refused() {
    let (_host, mut a, mut b) = pair(RC);
    // Opcodes that only the native mode knows, and unknown ones.
    let opcodes = [8, 14, 15, 0xff, 0x102].map(|o| send(o, 1));
    let flags = [send_flags::IP_CSUM, 1 << 5, 1 << 30, 1 << 31];
    let flagged = flags.map(|f| SqReq { send_flags: f.into(), ..send(op::SEND, 1) });
    for r in opcodes.into_iter().chain(flagged) {
        a.qp.send(r, &[a.mr.sge(0, 8)]);
        assert_eq!(a.cq.wait().status, wc::LOC_QP_OP_ERR, "{r:?}");
        for side in [&mut a, &mut b] {
            side.d.move_to(side.qp.qpn, 0).unwrap();
        }
        crate::world::connect(&mut a, &mut b, RC);
    }
}

#[test]
fn r43_inline_data_follows_the_wqe() {
    let (_host, mut a, mut b) = pair(RC);
    b.receive(1, 0, 256);
    a.qp.send_inline(send(op::SEND, 2), b"in the WQE itself");
    assert_eq!((a.cq.wait().status, b.cq.wait().byte_len.get()), (wc::SUCCESS, 17));
    assert_eq!(b.bytes(0, 17), b"in the WQE itself");
    let mut r = send(op::RDMA_WRITE, 3);
    r.set_part(&b.mr.remote(300));
    a.qp.send_inline(r, b"odd");
    assert_eq!((a.cq.wait().status, b.bytes(300, 3)), (wc::SUCCESS, b"odd".to_vec()));
    a.qp.send_inline(send(op::SEND, 4), &[0; 1000]);
    assert_eq!(a.cq.wait().status, wc::LOC_QP_OP_ERR, "more than max_inline_data");
}

#[test]
fn r43_a_fenced_send_waits_for_the_reads_before_it() {
    let (_host, mut a, mut b) = pair(RC);
    for round in 0..20u8 {
        b.put(0, &[round; 8192]);
        b.receive(1, 20_000, 8192);
        let remote = b.mr.remote(0);
        a.rdma(op::RDMA_READ, 1, (0, 8192), remote);
        // It sends the data that the READ has brought.
        let r = SqReq { send_flags: (send_flags::FENCE | send_flags::SIGNALED).into(), ..send(op::SEND, 2) };
        a.qp.send(r, &[a.mr.sge(0, 8192)]);
        assert_eq!([a.cq.wait(), a.cq.wait()].map(|c| (c.wr_id.get(), c.status)), [(1, 0), (2, 0)]);
        b.cq.wait();
        assert_eq!(b.bytes(20_000, 8192), vec![round; 8192]);
    }
}

#[test]
fn r43_unsignaled_sends_leave_no_completion_and_their_chains_come_back() {
    let (_host, mut a, b) = pair(RC);
    let remote = b.mr.remote(0);
    let mut r = SqReq { send_flags: 0.into(), ..send(op::RDMA_WRITE, 1) };
    r.set_part(&remote);
    // Many more requests than the send queue and the completion queue hold.
    for round in 0..20 {
        for _ in 0..31 {
            a.qp.send(r, &[a.mr.sge(0, 8)]);
        }
        a.rdma(op::RDMA_WRITE, 100 + round, (0, 8), remote);
        assert_eq!(a.cq.wait().wr_id.get(), 100 + round);
        a.qp.sq.reclaim();
        assert_eq!(a.qp.sq.free(), usize::from(unirdma_testkit::rfc::CHAINS), "all chains are back");
    }
}

#[test]
fn r44_completions_come_in_order_and_many_laps_of_each_queue() {
    let (_host, mut a, mut b) = pair(RC);
    let (mut sent, mut got) = (0, 0);
    while got < 1000 {
        while sent < 1000 && sent - got < 40 {
            b.receive(sent, 0, 64);
            a.put(0, &sent.to_le_bytes());
            a.qp.send_inline(send(op::SEND, sent), &sent.to_le_bytes());
            sent += 1;
        }
        let (s, r) = (a.cq.wait(), b.cq.wait());
        assert_eq!((s.wr_id.get(), r.wr_id.get(), s.status, r.status), (got, got, 0, 0));
        got += 1;
    }
}

#[test]
fn r40_an_unreliable_connection_writes_and_sends() {
    let (_host, mut a, mut b) = pair(UC);
    b.receive(1, 0, 64);
    a.put(0, b"unreliable");
    a.send(op::SEND, 2, 0, 10);
    assert_eq!((a.cq.wait().status, b.cq.wait().byte_len.get()), (wc::SUCCESS, 10));
    let remote = b.mr.remote(100);
    a.rdma(op::RDMA_WRITE, 3, (0, 10), remote);
    assert_eq!(a.cq.wait().status, wc::SUCCESS);
    a.rdma(op::RDMA_READ, 4, (0, 10), remote);
    assert_eq!(a.cq.wait().status, wc::LOC_QP_OP_ERR, "there is no READ on UC");
}

#[test]
fn r41_r44_work_that_waits_is_flushed_in_err() {
    let (_host, mut a, mut b) = pair(RC);
    for i in 0..5 {
        b.receive(i, 0, 64);
    }
    b.d.move_to(b.qp.qpn, ERR).unwrap();
    for i in 0..5 {
        let c = b.cq.wait();
        assert_eq!((c.wr_id.get(), c.status, c.opcode), (i, wc::WR_FLUSH_ERR, op::RECV));
    }
    // Later requests are flushed too, sends before receives.
    for i in 0..3 {
        b.send(op::SEND, 10 + i, 0, 8);
        let c = b.cq.wait();
        assert_eq!((c.wr_id.get(), c.status, c.opcode), (10 + i, wc::WR_FLUSH_ERR, op::SEND as u8));
    }
    // The first request fails by its own fault, the others are flushed.
    let remote = unirdma_abi::rfc::Rdma { rkey: 1.into(), ..b.mr.remote(0) };
    a.rdma(op::RDMA_WRITE, 1, (0, 8), remote);
    a.send(op::SEND, 2, 0, 8);
    let got = [a.cq.wait(), a.cq.wait()].map(|c| (c.wr_id.get(), c.status));
    assert!(got[0].0 == 1 && got[0].1 != 0 && got[1] == (2, wc::WR_FLUSH_ERR), "{got:?}");
}

#[test]
fn r16_addresses_of_a_dma_mr_are_those_of_the_bus() {
    let (_host, mut a, mut b) = pair(RC);
    let dma: unirdma_abi::rfc::MrCreated =
        a.d.command(
            unirdma_abi::Command::GetDmaMr,
            &unirdma_abi::rfc::GetDmaMr { pdn: a.pd.into(), access_flags: ALL_ACCESS.into() },
        )
        .unwrap();
    let at = a.d.take(4096);
    a.d.memory().write((at - unirdma_testkit::rfc::BUS) as usize, b"bus address");
    b.receive(1, 0, 64);
    let sge = unirdma_abi::rfc::Sge { addr: at.into(), length: 11.into(), lkey: dma.lkey };
    a.qp.send(send(op::SEND, 2), &[sge]);
    assert_eq!((a.cq.wait().status, b.cq.wait().status), (wc::SUCCESS, wc::SUCCESS));
    assert_eq!(b.bytes(0, 11), b"bus address");
    let outside = unirdma_abi::rfc::Sge { addr: 4096.into(), ..sge };
    a.qp.send(send(op::SEND, 3), &[outside]);
    assert_eq!(a.cq.wait().status, wc::LOC_PROT_ERR, "no memory of this session");
}

#[test]
fn r19_pages_lie_anywhere_and_are_one_range_to_verbs() {
    let (_host, mut d) = one();
    let pd = d.pd();
    let start = d.take(8 * 4096);
    // Pages 5, 0, 3. The range covers a part of the first and of the last.
    let list = d.take(4096);
    for (i, page) in [5u64, 0, 3].into_iter().enumerate() {
        d.memory().write((list - unirdma_testkit::rfc::BUS) as usize + 8 * i, &(start + 4096 * page).to_le_bytes());
    }
    let r = unirdma_abi::rfc::RegUserMr {
        pdn: pd.into(),
        access_flags: ALL_ACCESS.into(),
        start: 0x1234_5f00.into(),
        length: (0x100u64 + 4096 + 0x80).into(),
        virt_addr: 0x9000_0f00.into(),
        pages: list.into(),
        npages: 3.into(),
    };
    let made: unirdma_abi::rfc::MrCreated = d.command(unirdma_abi::Command::RegUserMr, &r).unwrap();
    let mut s = Side::new(d, RC);
    // Two QPs of the same driver, connected with each other.
    let mut other = s.d.qp(pd, &s.cq, RC);
    let mine = s.d.qp(pd, &s.cq, RC);
    let gid = s.d.gid;
    s.d.connect(mine.qpn, RC, gid, other.qpn).unwrap();
    s.d.connect(other.qpn, RC, gid, mine.qpn).unwrap();
    let mut w = send(op::RDMA_WRITE, 1);
    w.set_part(&unirdma_abi::rfc::Rdma { remote_addr: 0x9000_0f80.into(), rkey: made.rkey });
    let data: Vec<u8> = (0..4096u32 + 0x100).map(|i| (i % 251) as u8).collect();
    s.put(0, &data);
    let in_pd = s.d.mr(pd, 8192, ALL_ACCESS);
    s.d.write(&in_pd, 0, &data);
    other.send(w, &[in_pd.sge(0, data.len() as u32)]);
    assert_eq!(s.cq.wait().status, wc::SUCCESS);
    let page = |n: u64, off: u64, len: usize| {
        let mut v = vec![0; len];
        s.d.memory().read((start + 4096 * n + off - unirdma_testkit::rfc::BUS) as usize, &mut v);
        v
    };
    assert_eq!(page(5, 0xf80, 0x80), data[..0x80]);
    assert_eq!(page(0, 0, 4096), data[0x80..0x80 + 4096]);
    assert_eq!(page(3, 0, 0x80), data[0x80 + 4096..]);
    assert_eq!(page(3, 0x80, 16), [0; 16]);
}

#[test]
fn a_driver_of_this_mode_and_a_native_program_talk_to_each_other() {
    let host = unirdma_testkit::TestHost::start();
    let d = unirdma_testkit::rfc::RfcDriver::new(&host.add_rfc("a", "10.0.0.1"), "10.0.0.1");
    let mut a = Side::new(d, RC);
    let native = Program::new(&host.add("b", "10.0.0.2"), 1 << 16);
    native.connect_to(a.d.gid, a.qp.qpn, |x| unirdma_abi::QpAttr { path_mtu: 3, ..x }).unwrap();
    let gid = unirdma_formats::Gid::from_ip("10.0.0.2".parse().unwrap()).0;
    a.d.connect(a.qp.qpn, RC, gid, native.qp.qpn).unwrap();
    native.recv(0, 64).unwrap();
    a.put(0, b"to a native one");
    a.send(op::SEND, 1, 0, 15);
    assert_eq!((a.cq.wait().status, native.wait().unwrap().byte_len), (wc::SUCCESS, 15));
    assert_eq!((0..15).map(|i| native.byte(i)).collect::<Vec<u8>>(), b"to a native one");
    // And back, by a READ of the data that arrived.
    let remote =
        unirdma_abi::rfc::Rdma { remote_addr: (native.buf.as_ptr() as u64).into(), rkey: native.mr.key.into() };
    a.rdma(op::RDMA_READ, 2, (1000, 15), remote);
    assert_eq!((a.cq.wait().status, a.bytes(1000, 15)), (wc::SUCCESS, b"to a native one".to_vec()));
    a.receive(3, 2000, 64);
    let wqe = unirdma_abi::SqWqe {
        opcode: WrOpcode::SendImm as u8,
        send_flags: 2,
        imm: 0xabc,
        ..unirdma_abi::SqWqe::default()
    };
    let sge = unirdma_abi::Sge { addr: native.buf.as_ptr() as u64, length: 15, lkey: native.mr.key };
    // SAFETY: the data is a gather list, nothing is read here.
    unsafe { native.qp.send_batch().push(&wqe, unirdma_driver::SendWr::Sges(&[sge])) }.unwrap();
    let c = a.cq.wait();
    assert_eq!((c.wr_id.get(), c.ex.get(), native.wait().unwrap().status), (3, 0xabc, 0));
    assert_eq!(a.bytes(2000, 15), b"to a native one");
}
