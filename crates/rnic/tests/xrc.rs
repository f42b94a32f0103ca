//! Extended reliable connections, on one host and over the wire: each message goes to the shared receive queue that it
//! names, of any program.

use unirdma_abi as abi;
use unirdma_abi::Status;
use unirdma_formats::{QpType, WcStatus, WrOpcode, attr_mask};
use unirdma_mem::{CqRing, CqTail, QpRings};
use unirdma_rnic::{CreateQp, OpenXrcd, SrqAttr};
use unirdma_simkit::net::{Faults, Net};
use unirdma_simkit::xrc::{XrcSrq, connect_target};
use unirdma_simkit::*;
use zerocopy::IntoBytes;

const FILE: OpenXrcd = OpenXrcd { key: Some((1, 2)), create: true, exclusive: false };

/// An initiator (end 0) connected to a target in the session of end 1; another program of the same vRNIC as end 1.
struct Xrc {
    net: Net,
    target: u32,
    other: End,
    a: XrcSrq,
    b: XrcSrq,
}

fn each() -> [(&'static str, Xrc); 2] {
    [1, 2].map(|hosts| {
        let mut net = Net::hosts(hosts, &[QpType::XrcSend, QpType::Rc], 3, Faults::default());
        let vrnic = net.ends[1].vrnic;
        let other = End::of_vrnic(net.rnic(1), vrnic, 64, QpType::Rc);
        let end = net.ends.remove(1);
        let a = XrcSrq::new(net.rnic(1), &end, FILE);
        let b = XrcSrq::new(net.rnic(1), &other, OpenXrcd { create: false, ..FILE });
        net.ends.push(end);
        let target = connect_target(&mut net, 0, 1, a.xrcd, &|a| a);
        (["one host", "two hosts"][hosts - 1], Xrc { net, target, other, a, b })
    })
}

impl Xrc {
    fn post(&mut self, w: abi::SqWqe, number: u32, len: u32) -> u8 {
        let sge = self.net.ends[0].sge(0, len);
        self.net.ends[0].post(abi::SqWqe { dest_qpn: number, ..w }, &[sge]);
        self.net.run(SECOND);
        self.net.ends[0].done().status
    }
}

#[test]
fn messages_go_to_the_queue_that_they_name() {
    for (place, mut x) in each() {
        x.net.ends[0].fill(0, &[5; 3000]);
        let (to_a, to_b) = (x.net.ends[1].sge(0, 4000), x.other.sge(0, 4000));
        for i in 0..3 {
            x.a.recv(10 + i, &[to_a]);
            x.b.recv(20 + i, &[to_b]);
        }
        let (a, b) = (x.a.number, x.b.number);
        for number in [b, a, a, b] {
            assert_eq!(x.post(wqe(WrOpcode::Send, 1), number, 3000), WcStatus::Success as u8, "{place}");
        }
        let got = |e: &mut End| e.poll().iter().map(|c| (c.wr_id, c.byte_len, c.qp_num)).collect::<Vec<_>>();
        let t = x.target;
        assert_eq!(got(&mut x.net.ends[1]), [(10, 3000, t), (11, 3000, t)], "{place}");
        assert_eq!(got(&mut x.other), [(20, 3000, t), (21, 3000, t)], "{place}");
        assert_eq!(x.other.bytes(0, 3000), [5; 3000], "{place}");
    }
}

#[test]
fn memory_is_that_of_the_queues_program() {
    for (place, mut x) in each() {
        x.net.ends[0].fill(0, &[6; 3000]);
        let (a, b) = (x.a.number, x.b.number);
        let write = |key: u32| abi::SqWqe { rkey: key, remote_addr: IOVA, ..wqe(WrOpcode::Write, 1) };
        let key = x.other.key;
        assert_eq!(x.post(write(key), b, 3000), WcStatus::Success as u8, "{place}");
        assert_eq!(x.other.bytes(0, 3000), [6; 3000], "{place}");
        x.other.fill(0, &[7; 3000]);
        let read = abi::SqWqe { opcode: WrOpcode::Read as u8, ..write(key) };
        assert_eq!(x.post(read, b, 3000), WcStatus::Success as u8, "{place}");
        assert_eq!(x.net.ends[0].bytes(0, 3000), [7; 3000], "{place}");
        let add = abi::SqWqe { opcode: WrOpcode::FetchAdd as u8, compare_add: 1, ..write(key) };
        assert_eq!(x.post(add, b, 8), WcStatus::Success as u8, "{place}");
        // The other program's key is not valid for this queue's memory.
        assert_eq!(x.post(write(key), a, 100), WcStatus::RemAccessErr as u8, "{place}");
    }
}

#[test]
fn a_queue_of_another_domain_is_none() {
    for (place, mut x) in each() {
        let private = OpenXrcd { key: None, create: true, exclusive: false };
        let foreign = XrcSrq::new(x.net.rnic(1), &x.other, private);
        let status = x.post(wqe(WrOpcode::Send, 1), foreign.number, 10);
        assert_eq!(status, WcStatus::RemInvReqErr as u8, "{place}");
    }
    let (_, mut x) = each().into_iter().next().unwrap();
    assert_eq!(x.post(wqe(WrOpcode::Send, 1), 12345, 10), WcStatus::RemInvReqErr as u8);
}

#[test]
fn what_is_in_use_stays() {
    let (_, mut x) = each().into_iter().next().unwrap();
    let (s, other) = (x.net.ends[1].session, x.other.session);
    let rnic = &mut x.net.rnics[0];
    assert_eq!(rnic.destroy_xrcd(s, x.a.xrcd), Err(Status::Busy));
    assert_eq!(rnic.destroy_cq(other, x.other.cqn), Err(Status::Busy));
    assert_eq!(rnic.destroy_xrcd(other, x.a.xrcd), Err(Status::BadHandle));
    rnic.destroy_srq(s, x.a.srq).unwrap();
    rnic.destroy_qp(s, x.target).unwrap();
    rnic.destroy_xrcd(s, x.a.xrcd).unwrap();
    let open = |exclusive, create, key| OpenXrcd { key: Some((key, 0)), create, exclusive };
    assert_eq!(rnic.create_xrcd(s, OpenXrcd { exclusive: true, ..FILE }), Err(Status::BadValue));
    assert_eq!(rnic.create_xrcd(s, open(false, false, 9)), Err(Status::BadHandle));
    rnic.create_xrcd(s, open(true, true, 9)).unwrap();
    assert_eq!(x.post(wqe(WrOpcode::Send, 1), x.b.number, 10), WcStatus::RetryExcErr as u8);
}

/// A queue with a receive that a message is being written to stays, and so does its CQ, until the message is complete.
#[test]
fn a_queue_that_a_message_goes_into_stays() {
    for (place, mut x) in each() {
        let to = x.net.ends[1].sge(0, 4000);
        x.a.recv(10, &[to]);
        let (s, bell) = (x.net.ends[1].session, x.net.ends[1].bell.clone());
        // The memory of the receive is away for a moment, so that the message waits.
        bell.set_away(1);
        x.net.run(0);
        let sge = x.net.ends[0].sge(0, 3000);
        x.net.ends[0].post(abi::SqWqe { dest_qpn: x.a.number, ..wqe(WrOpcode::Send, 1) }, &[sge]);
        x.net.run(1_000_000);
        assert_eq!(x.net.rnic(1).destroy_srq(s, x.a.srq), Err(Status::Busy), "{place}");
        bell.set_away(0);
        x.net.run(SECOND);
        assert_eq!(x.net.ends[0].done().status, WcStatus::Success as u8, "{place}");
        assert_eq!(x.net.ends[1].done().wr_id, 10, "{place}");
        x.net.rnic(1).destroy_srq(s, x.a.srq).unwrap();
    }
}

/// A target has sent its messages to a CQ that was destroyed. Whatever number of CQs is made afterwards, none of them
/// gets the completions of the target.
#[test]
fn completions_for_a_cq_that_is_gone_reach_nobody() {
    let (_, mut x) = each().into_iter().next().unwrap();
    let s = x.net.ends[1].session;
    let rnic = &mut x.net.rnics[0];
    let ring = || CqRing::new(aligned(128), aligned(64 * 64), 64).unwrap();
    let cq = rnic.create_cq(s, ring(), None).unwrap();
    let cap = abi::QpCap { max_recv_wr: 16, max_recv_sge: 1, ..Default::default() };
    let layout = abi::QpLayout::of(&cap).unwrap();
    let rings = || QpRings::new(aligned(128), aligned(layout.sq_bytes()), aligned(layout.rq_bytes()), layout).unwrap();
    let queue = SrqAttr { max_wr: 16, max_sge: 1, limit: 0, xrc: Some((x.a.xrcd, cq)) };
    let receives = QpRings::receive_only(aligned(128), aligned(layout.rq_bytes()), layout).unwrap();
    let (srq, number) = rnic.create_srq(s, x.net.ends[1].pd, queue, receives.clone()).unwrap();
    let own = rings();
    let target = CreateQp {
        pd: 0,
        send_cq: 0,
        recv_cq: 0,
        srq: None,
        xrcd: Some(x.a.xrcd),
        door: 0,
        sig_all: false,
        cap,
        rings: own.clone(),
    };
    let (target, _) = rnic.create_qp(s, QpType::XrcRecv as u8, target).unwrap();
    let (sender, qpn) = (x.net.ends[0].session, x.net.ends[0].qpn);
    rnic.modify_qp(sender, qpn, attr_mask::STATE, &abi::QpAttr::default()).unwrap();
    for (mask, attr) in attrs_of(QpType::XrcSend, target, unirdma_simkit::net::gid(1)) {
        rnic.modify_qp(sender, qpn, mask, &attr).unwrap();
    }
    for (mask, attr) in attrs_of(QpType::XrcRecv, qpn, unirdma_simkit::net::gid(0)) {
        rnic.modify_qp(s, target, mask, &attr).unwrap();
    }
    // A message without data, so that the target knows the CQ.
    receives.rq_put(0, 0, abi::RqWqe { wr_id: 1, num_sge: 0, reserved: 0 }.as_bytes());
    receives.set_rq_prod(1);
    x.net.ends[0].post(abi::SqWqe { dest_qpn: number, ..wqe(WrOpcode::Send, 1) }, &[]);
    x.net.run(SECOND);
    assert_eq!(x.net.ends[0].done().status, WcStatus::Success as u8);
    let rnic = &mut x.net.rnics[0];
    rnic.destroy_srq(s, srq).unwrap();
    rnic.destroy_cq(s, cq).unwrap();
    // The victim makes CQs in its place, as many as 12 bits can distinguish.
    let victim = x.other.session;
    let mut last: Option<(u32, CqTail)> = None;
    for _ in 0..4096 {
        if let Some((old, _)) = last.take() {
            rnic.destroy_cq(victim, old).unwrap();
        }
        let (ctrl, entries) = (aligned(128), aligned(64 * 64));
        let made = rnic.create_cq(victim, CqRing::new(ctrl.clone(), entries.clone(), 64).unwrap(), None).unwrap();
        last = Some((made, CqTail::new(ctrl, entries, 64).unwrap()));
    }
    own.rq_put(0, 0, abi::RqWqe { wr_id: 666, num_sge: 0, reserved: 0 }.as_bytes());
    own.set_rq_prod(3);
    rnic.modify_qp(s, target, attr_mask::STATE, &abi::QpAttr { qp_state: 6, ..Default::default() }).unwrap();
    x.net.run(SECOND);
    assert!(last.unwrap().1.pop().is_none());
}
