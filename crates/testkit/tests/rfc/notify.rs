//! Notification and overflow of completion queues: R28, R45, and the cases that R84b leaves open.

use unirdma_abi::rfc::{self, Nothing, opcode as op, send_flags};
use unirdma_abi::{Command, NOTIFY_NEXT, NOTIFY_SOLICITED};
use unirdma_testkit::rfc::{RfcCq, RfcDriver, send, wait_for};

use crate::world::{RC, Side, connect, pair, wc};

fn ask(d: &mut RfcDriver, cq: &RfcCq, flags: u32) {
    let r = rfc::ReqNotify { cqn: cq.cqn.into(), flags: flags.into() };
    d.command::<Nothing>(Command::ReqNotifyCq, &r).unwrap();
}

fn called(cq: &RfcCq) {
    wait_for("a call", || cq.vq.was_called().then_some(()));
}

fn write(a: &mut Side, b: &Side, wr_id: u64) {
    let remote = b.mr.remote(0);
    a.rdma(op::RDMA_WRITE, wr_id, (0, 8), remote);
}

#[test]
fn r28_r45_the_next_completion_calls_once() {
    let (_host, mut a, b) = pair(RC);
    write(&mut a, &b, 1);
    a.cq.wait();
    assert!(!a.cq.vq.was_called(), "nobody has asked");
    for round in 0..20 {
        ask(&mut a.d, &a.cq, NOTIFY_NEXT);
        assert!(!a.cq.vq.was_called());
        write(&mut a, &b, round);
        called(&a.cq);
        assert_eq!(a.cq.wait().wr_id.get(), round, "the completion is there when the call comes");
        write(&mut a, &b, 100);
        a.cq.wait();
        assert!(!a.cq.vq.was_called(), "once");
    }
}

#[test]
fn r45_solicited_waits_for_a_solicited_completion_or_an_error() {
    let (_host, mut a, mut b) = pair(RC);
    for i in 0..3 {
        b.receive(i, 0, 64);
    }
    ask(&mut b.d, &b.cq, NOTIFY_SOLICITED);
    a.send(op::SEND, 1, 0, 8);
    assert_eq!((a.cq.wait().status, b.cq.wait().status), (wc::SUCCESS, wc::SUCCESS));
    std::thread::sleep(std::time::Duration::from_millis(10));
    assert!(!b.cq.vq.was_called());
    let flags = send_flags::SOLICITED | send_flags::SIGNALED;
    a.qp.send(rfc::SqReq { send_flags: flags.into(), ..send(op::SEND, 2) }, &[a.mr.sge(0, 8)]);
    called(&b.cq);
    assert_eq!(b.cq.wait().status, wc::SUCCESS);
    ask(&mut b.d, &b.cq, NOTIFY_SOLICITED);
    b.d.move_to(b.qp.qpn, 6).unwrap();
    called(&b.cq);
    assert_eq!(b.cq.wait().status, wc::WR_FLUSH_ERR);
}

#[test]
fn r28_a_driver_that_asks_looks_and_sleeps_misses_nothing() {
    let (_host, mut a, mut b) = pair(RC);
    // Completions come at any moment between the poll and the arming.
    let n = 300;
    let mut got = 0;
    for i in 0..n {
        b.receive(i, 0, 64);
        if i % 32 == 31 {
            for k in 0..32 {
                a.send(op::SEND, k, 0, 8);
            }
            while got <= i {
                ask(&mut b.d, &b.cq, NOTIFY_NEXT);
                match b.cq.poll() {
                    Some(c) => assert_eq!(c.wr_id.get(), got),
                    None => {
                        called(&b.cq);
                        assert_eq!(b.cq.wait().wr_id.get(), got);
                    }
                }
                got += 1;
            }
            (0..32).for_each(|_| assert_eq!(a.cq.wait().status, wc::SUCCESS));
        }
    }
}

#[test]
fn r28_a_completion_that_had_to_wait_for_a_buffer_calls_when_it_has_one() {
    let (_host, mut a, b) = pair(RC);
    let mut cq = a.d.cq_without_buffers(8, 8);
    let mut b = Side::new(b.d, RC);
    a.qp = a.d.qp(a.pd, &cq, RC);
    connect(&mut a, &mut b, RC);
    ask(&mut a.d, &cq, NOTIFY_NEXT);
    write(&mut a, &b, 1);
    std::thread::sleep(std::time::Duration::from_millis(10));
    assert!(!cq.vq.was_called());
    cq.vq.fill(38);
    called(&cq);
    assert_eq!(cq.wait().wr_id.get(), 1);
}

#[test]
fn r44_many_completions_that_waited_for_buffers_come_in_order() {
    let (_host, mut a, b) = pair(RC);
    let mut cq = a.d.cq_without_buffers(256, 128);
    let mut b = Side::new(b.d, RC);
    a.qp = a.d.qp(a.pd, &cq, RC);
    connect(&mut a, &mut b, RC);
    for i in 0..200 {
        // Chains come back although no completion can be reported.
        wait_for("a free chain", || {
            a.qp.sq.kick();
            a.qp.sq.reclaim();
            (a.qp.sq.free() > 0).then_some(())
        });
        write(&mut a, &b, i);
    }
    cq.vq.fill(38);
    assert!((0..200).all(|i| cq.wait().wr_id.get() == i));
    cq.stays_empty();
}

#[test]
fn r45_a_driver_that_wants_no_calls_gets_none() {
    let (_host, mut a, b) = pair(RC);
    a.cq.vq.queue.be_quiet();
    ask(&mut a.d, &a.cq, NOTIFY_NEXT);
    write(&mut a, &b, 1);
    a.cq.wait();
    std::thread::sleep(std::time::Duration::from_millis(10));
    assert!(!a.cq.vq.was_called());
}

#[test]
fn r44_completions_beyond_those_that_a_cq_holds_lose_it_and_its_qps() {
    let (_host, mut a, b) = pair(RC);
    let mut b = Side::new(b.d, RC);
    let mut cq = a.d.cq_without_buffers(4, 8);
    a.qp = a.d.qp(a.pd, &cq, RC);
    connect(&mut a, &mut b, RC);
    for i in 0..4 {
        write(&mut a, &b, i);
    }
    std::thread::sleep(std::time::Duration::from_millis(20));
    assert_eq!(a.state(), 3, "four wait in the device");
    write(&mut a, &b, 4);
    wait_for("the overrun", || (a.state() == 6).then_some(()));
    cq.vq.fill(38);
    let kept: Vec<u64> = (0..4).map(|_| cq.wait().wr_id.get()).collect();
    assert_eq!(kept, [0, 1, 2, 3]);
    cq.stays_empty();
    // Another CQ of the session is unaffected.
    a.qp = a.d.qp(a.pd, &a.cq, RC);
    b.d.move_to(b.qp.qpn, 0).unwrap();
    connect(&mut a, &mut b, RC);
    write(&mut a, &b, 9);
    assert_eq!(a.cq.wait().wr_id.get(), 9);
}
