//! States of QPs, and virtqueues that exist as long as their objects: R22, R23, R31 to R33, R37, R38, R41.

use unirdma_abi::rfc::{self, opcode as op};
use unirdma_abi::{Command, Status};
use unirdma_formats::attr_mask as m;
use unirdma_testkit::rfc::{CHAINS, send};

use crate::world::{RC, RTS, Side, UD, connect, one, pair, two, wc};

const RESET: u8 = 0;
const INIT: u8 = 1;
const RTR: u8 = 2;
const SQD: u8 = 4;
const ERR: u8 = 6;

#[test]
fn r22_r23_r41_attributes_are_those_that_were_set() {
    let (_host, mut s) = one_side();
    let gid = s.d.gid;
    s.d.add_gid(5, gid).unwrap();
    let grh =
        rfc::GlobalRoute { dgid: gid, flow_label: 0xabcde.into(), sgid_index: 5, hop_limit: 7, traffic_class: 32 };
    let a = rfc::QpAttr {
        qp_state: INIT,
        port_num: 1,
        qp_access_flags: 5.into(),
        path_mtu: 3,
        dest_qp_num: 0x123456.into(),
        rq_psn: 0x77.into(),
        sq_psn: 0x99.into(),
        max_rd_atomic: 3,
        max_dest_rd_atomic: 6,
        min_rnr_timer: 12,
        timeout: 14,
        retry_cnt: 5,
        rnr_retry: 6,
        ah_attr: rfc::AhAttr { grh, sl: 2, port_num: 1, ah_flags: rfc::AH_GRH, ..rfc::AhAttr::default() },
        ..rfc::QpAttr::default()
    };
    let rtr = m::AV | m::PATH_MTU | m::DEST_QPN | m::RQ_PSN | m::MAX_DEST_RD_ATOMIC | m::MIN_RNR_TIMER;
    let rts = m::SQ_PSN | m::TIMEOUT | m::RETRY_CNT | m::RNR_RETRY | m::MAX_QP_RD_ATOMIC;
    s.d.modify(s.qp.qpn, m::STATE | m::PKEY_INDEX | m::PORT | m::ACCESS_FLAGS, a).unwrap();
    s.d.modify(s.qp.qpn, m::STATE | rtr, rfc::QpAttr { qp_state: RTR, ..a }).unwrap();
    s.d.modify(s.qp.qpn, m::STATE | rts, rfc::QpAttr { qp_state: RTS, ..a }).unwrap();
    let q = s.d.query(s.qp.qpn).unwrap();
    let expected = rfc::QpAttr { qp_state: RTS, cur_qp_state: RTS, cap: q.cap, ..a };
    assert_eq!(q, expected);
    // The real capacities of the queues (R84p).
    assert_eq!((q.cap.max_send_wr.get(), q.cap.max_recv_wr.get(), q.cap.max_send_sge.get()), (1024, 1024, 4));
    assert!(q.cap.max_inline_data.get() >= 128);
    s.d.modify(s.qp.qpn, m::STATE | m::RATE_LIMIT, rfc::QpAttr { qp_state: RTS, rate_limit: 900.into(), ..a }).unwrap();
    assert_eq!(s.d.query(s.qp.qpn).unwrap().rate_limit.get(), 900);
}

fn one_side() -> (unirdma_testkit::TestHost, Side) {
    let (host, d) = one();
    (host, Side::new(d, RC))
}

#[test]
fn r22_r41_what_does_not_go_together_changes_nothing() {
    let (_host, mut s) = one_side();
    let qpn = s.qp.qpn;
    let init = m::PKEY_INDEX | m::PORT | m::ACCESS_FLAGS;
    let a = rfc::QpAttr { qp_state: INIT, port_num: 1, ..rfc::QpAttr::default() };
    let (state, value) = (Err(Status::BadState as u8), Err(Status::BadValue as u8));
    assert_eq!(s.d.modify(qpn, m::STATE, a), state, "attributes are missing");
    assert_eq!(s.d.modify(qpn, m::STATE | init | m::QKEY, a), state, "one too many");
    assert_eq!(s.d.modify(qpn, m::STATE, rfc::QpAttr { qp_state: RTS, ..a }), state, "there is no such transition");
    assert_eq!(s.d.modify(qpn, m::STATE | init, rfc::QpAttr { port_num: 2, ..a }), value);
    assert_eq!(s.d.modify(qpn, m::STATE | init, rfc::QpAttr { pkey_index: 1.into(), ..a }), value);
    assert_eq!(s.d.modify(qpn, m::STATE | init, rfc::QpAttr { qp_state: 7, ..a }), value);
    for bit in [m::CAP, m::ALT_PATH, m::PATH_MIG_STATE, 1 << 21, 1 << 24, 1 << 31] {
        assert!(s.d.modify(qpn, m::STATE | init | bit, a).is_err(), "{bit:#x}");
    }
    assert_eq!(s.state(), RESET);
    assert_eq!(s.d.modify(qpn ^ 1, m::STATE | init, a), Err(Status::BadHandle as u8));
    assert_eq!(s.d.query(qpn ^ 1).err(), Some(Status::BadHandle as u8));
    s.d.modify(qpn, m::STATE | init, a).unwrap();
    let nobody = [9; 16];
    s.d.connect(qpn, RC, nobody, 5).unwrap_err();
    assert!([INIT, RESET].contains(&s.state()));
}

#[test]
fn r22_r23_a_qp_of_another_session_is_none() {
    let (host, mut s) = one_side();
    let socket = host.dir().join("vrnics/a/rfc.sock");
    let mut other = unirdma_testkit::rfc::RfcDriver::new(&socket, crate::world::IP[0]);
    assert_eq!(other.query(s.qp.qpn).err(), Some(Status::BadHandle as u8));
    assert_eq!(other.move_to(s.qp.qpn, ERR), Err(Status::BadHandle as u8));
    assert_eq!(s.state(), RESET);
}

#[test]
fn r41_all_states_of_a_qp_and_a_drained_send_queue() {
    let (_host, mut a, mut b) = pair(RC);
    assert_eq!(a.state(), RTS);
    a.d.move_to(a.qp.qpn, SQD).unwrap();
    assert_eq!(a.state(), SQD);
    let remote = b.mr.remote(0);
    a.rdma(op::RDMA_WRITE, 1, (0, 8), remote);
    a.cq.stays_empty();
    assert_eq!(a.d.query(a.qp.qpn).unwrap().sq_draining, 0);
    a.d.move_to(a.qp.qpn, RTS).unwrap();
    assert_eq!(a.cq.wait().status, wc::SUCCESS);
    a.d.move_to(a.qp.qpn, ERR).unwrap();
    assert_eq!(a.state(), ERR);
    a.d.move_to(a.qp.qpn, RESET).unwrap();
    assert_eq!(a.state(), RESET);
    b.d.move_to(b.qp.qpn, RESET).unwrap();
    connect(&mut a, &mut b, RC);
    a.rdma(op::RDMA_WRITE, 2, (0, 8), remote);
    assert_eq!(a.cq.wait().status, wc::SUCCESS);
}

#[test]
fn r41_a_reset_takes_what_was_posted_away_and_gives_its_chains_back() {
    let (_host, mut a, mut b) = pair(RC);
    a.d.move_to(a.qp.qpn, SQD).unwrap();
    let remote = b.mr.remote(0);
    for i in 0..5 {
        a.rdma(op::RDMA_WRITE, i, (0, 8), remote);
        a.receive(i, 0, 64);
    }
    a.d.move_to(a.qp.qpn, RESET).unwrap();
    a.qp.sq.reclaim();
    a.qp.rq.reclaim();
    assert_eq!((a.qp.sq.free(), a.qp.rq.free()), (CHAINS.into(), CHAINS.into()));
    a.cq.stays_empty();
    b.d.move_to(b.qp.qpn, RESET).unwrap();
    connect(&mut a, &mut b, RC);
    a.rdma(op::RDMA_WRITE, 9, (0, 8), remote);
    assert_eq!(a.cq.wait().wr_id.get(), 9);
    a.cq.stays_empty();
}

#[test]
fn r31_r32_completions_wait_until_their_virtqueue_is_there_and_has_buffers() {
    let (_host, [a, mut b]) = two();
    let mut a = Side::new(a, RC);
    let pd = b.pd();
    let made: rfc::CqCreated = b.command(Command::CreateCq, &rfc::CreateCq { cqe: 16.into() }).unwrap();
    let cqn = made.cqn.get();
    let mut qp = b.try_qp(&unirdma_testkit::rfc::qp_request(pd, cqn, cqn, RC)).unwrap();
    let mr = b.mr(pd, 4096, 15);
    b.connect(qp.qpn, RC, a.d.gid, a.qp.qpn).unwrap();
    a.d.connect(a.qp.qpn, RC, b.gid, qp.qpn).unwrap();
    for i in 0..3 {
        qp.receive(i, &[mr.sge(0, 64)]);
        a.send(op::SEND, i, 0, 8);
        assert_eq!(a.cq.wait().status, wc::SUCCESS);
    }
    let vq = b.new_queue(cqn, CHAINS, 38);
    b.start(&vq).unwrap();
    let mut cq = unirdma_testkit::rfc::RfcCq { cqn, vq };
    cq.stays_empty();
    cq.vq.fill(38);
    assert_eq!([cq.wait(), cq.wait(), cq.wait()].map(|c| c.wr_id.get()), [0, 1, 2]);
}

#[test]
fn r32_a_buffer_that_is_too_small_is_given_back_and_costs_no_completion() {
    let (_host, mut a, b) = pair(RC);
    let mut cq = a.d.cq_without_buffers(16, 8);
    let mut qp = a.d.qp(a.pd, &cq, RC);
    let mut other = Side::new(b.d, RC);
    a.d.connect(qp.qpn, RC, other.d.gid, other.qp.qpn).unwrap();
    other.d.connect(other.qp.qpn, RC, a.d.gid, qp.qpn).unwrap();
    cq.vq.fill(37);
    let mut r = send(op::RDMA_WRITE, 5);
    r.set_part(&other.mr.remote(0));
    qp.send(r, &[a.mr.sge(0, 8)]);
    let mut back = Vec::new();
    unirdma_testkit::rfc::wait_for("the buffers", || {
        back.extend(cq.vq.reclaim());
        (back.len() == 8).then_some(())
    });
    assert_eq!(back, [0; 8]);
    cq.vq.fill(38);
    assert_eq!(cq.wait().wr_id.get(), 5);
}

#[test]
fn r33_the_virtqueue_of_a_destroyed_cq_is_reset_and_serves_the_next() {
    let (_host, mut a, mut b) = pair(RC);
    let mut first = a.d.cq(16);
    let command = rfc::Handle { handle: first.cqn.into() };
    a.d.command::<rfc::Nothing>(Command::DestroyCq, &command).unwrap();
    // Its buffers come back, so that a driver that cannot reset one virtqueue goes on with it.
    assert_eq!(first.vq.reclaim(), vec![0; CHAINS.into()]);
    assert_eq!(a.d.stop(first.cqn), CHAINS);
    let mut second = a.d.cq(16);
    assert_eq!(second.cqn, first.cqn);
    let mut qp = a.d.qp(a.pd, &second, RC);
    b.d.move_to(b.qp.qpn, RESET).unwrap();
    a.d.connect(qp.qpn, RC, b.d.gid, b.qp.qpn).unwrap();
    b.d.connect(b.qp.qpn, RC, a.d.gid, qp.qpn).unwrap();
    let mut r = send(op::RDMA_WRITE, 5);
    r.set_part(&b.mr.remote(0));
    qp.send(r, &[a.mr.sge(0, 8)]);
    assert_eq!(second.wait().wr_id.get(), 5);
}

#[test]
fn r37_sends_wait_until_their_virtqueue_is_there() {
    let (_host, mut a, mut b) = pair(RC);
    // Stops and restarts the SQ as a VMM does: the virtqueue keeps its index, and requests that were posted meanwhile
    // are executed.
    let base = a.d.stop(a.qp.sq.index);
    let remote = b.mr.remote(0);
    a.rdma(op::RDMA_WRITE, 5, (0, 8), remote);
    a.cq.stays_empty();
    a.d.start_at(&a.qp.sq, base).unwrap();
    assert_eq!(a.cq.wait().wr_id.get(), 5);
    a.rdma(op::RDMA_WRITE, 6, (0, 8), remote);
    assert_eq!(a.cq.wait().wr_id.get(), 6);
    b.cq.stays_empty();
    // The SQ may be stopped while the device polls it. The driver kicks again afterwards.
    for i in 0..200 {
        a.rdma(op::RDMA_WRITE, i, (0, 8), remote);
        assert_eq!(a.cq.wait().wr_id.get(), i);
        if i % 10 == 0 {
            let base = a.d.stop(a.qp.sq.index);
            a.d.start_at(&a.qp.sq, base).unwrap();
        }
    }
}

#[test]
fn r37_r38_chains_in_flight_outlive_a_stop_but_not_a_reset() {
    let (_host, mut a, mut b) = pair(RC);
    a.receive(1, 0, 64);
    // The device has taken the receive and keeps it.
    b.cq.stays_empty();
    let base = a.d.stop(a.qp.rq.index);
    assert_eq!(base, 1);
    a.d.start_at(&a.qp.rq, base).unwrap();
    b.send(op::SEND, 2, 0, 8);
    assert_eq!((a.cq.wait().wr_id.get(), b.cq.wait().status), (1, wc::SUCCESS));
    assert_eq!(a.qp.rq.reclaim(), [0]);
    // A new virtqueue has none of the earlier chains.
    a.receive(3, 0, 64);
    b.cq.stays_empty();
    a.d.stop(a.qp.rq.index);
    a.qp.rq = a.d.new_queue(a.qp.rq.index, CHAINS, 1100);
    a.d.start(&a.qp.rq).unwrap();
    b.send(op::SEND, 4, 0, 8);
    assert_eq!((a.cq.wait().wr_id.get(), b.cq.wait().status), (3, wc::SUCCESS));
    assert!(a.qp.rq.reclaim().is_empty());
    a.receive(5, 0, 64);
    b.send(op::SEND, 6, 0, 8);
    assert_eq!((a.cq.wait().wr_id.get(), b.cq.wait().status), (5, wc::SUCCESS));
    assert_eq!(a.qp.rq.reclaim(), [0]);
}

#[test]
fn r38_the_virtqueues_of_a_destroyed_qp_are_reset_and_serve_the_next() {
    let (_host, mut a, mut b) = pair(RC);
    for i in 0..4 {
        a.receive(i, 0, 64);
    }
    a.d.move_to(a.qp.qpn, SQD).unwrap();
    a.send(op::SEND, 9, 0, 8);
    a.d.command::<rfc::Nothing>(Command::DestroyQp, &rfc::Handle { handle: a.qp.qpn.into() }).unwrap();
    assert_eq!((a.qp.sq.reclaim(), a.qp.rq.reclaim()), (vec![0], vec![0; 4]));
    a.cq.stays_empty();
    for _ in 0..3 {
        a.d.stop(a.qp.sq.index);
        a.d.stop(a.qp.rq.index);
        let old = a.qp.sq.index;
        a.qp = a.d.qp(a.pd, &a.cq, RC);
        assert_eq!(a.qp.sq.index, old);
        b.d.move_to(b.qp.qpn, RESET).unwrap();
        connect(&mut a, &mut b, RC);
        let remote = b.mr.remote(0);
        a.rdma(op::RDMA_WRITE, 5, (0, 8), remote);
        assert_eq!(a.cq.wait().status, wc::SUCCESS);
        a.d.command::<rfc::Nothing>(Command::DestroyQp, &rfc::Handle { handle: a.qp.qpn.into() }).unwrap();
    }
}

#[test]
fn r24_datagrams_that_were_posted_before_their_qp_is_destroyed_are_sent() {
    let (_host, mut a, mut b) = pair(UD);
    for i in 0..10 {
        b.receive(i, 100 * i, 100);
    }
    b.receives_are_taken();
    let mut r = send(op::SEND, 1);
    r.set_part(&a.qp.to(b.d.gid, b.qp.qpn, crate::world::QKEY));
    (0..10).for_each(|_| a.qp.send(r, &[a.mr.sge(0, 8)]));
    a.d.destroy_qp(&a.qp).unwrap();
    assert!((0..10).all(|i| b.cq.wait().wr_id.get() == i));
}
