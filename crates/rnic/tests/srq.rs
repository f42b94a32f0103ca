//! Shared receive queues: many QPs take from one ring, on one host and over the network.

use unirdma_abi as abi;
use unirdma_formats::{AsyncEvent, QpType, WcStatus, WrOpcode};
use unirdma_mem::QpRings;
use unirdma_rnic::{CreateQp, Output, SrqAttr};
use unirdma_simkit::net::{Faults, Net};
use unirdma_simkit::*;
use zerocopy::IntoBytes;

/// An SRQ of end 1, whose QP is replaced by one that uses it.
struct Shared {
    srq: u32,
    ctrl: unirdma_mem::Span,
    rings: QpRings,
    prod: u32,
}

impl Shared {
    fn new(net: &mut Net, limit: u32) -> Shared {
        let (session, pd) = (net.ends[1].session, net.ends[1].pd);
        let cap = abi::QpCap { max_recv_wr: 16, max_recv_sge: 2, ..Default::default() };
        let layout = abi::QpLayout::of(&cap).unwrap();
        let ctrl = aligned(128);
        let rings = QpRings::receive_only(ctrl.clone(), aligned(layout.rq_bytes()), layout).unwrap();
        let attr = SrqAttr { max_wr: 16, max_sge: 2, limit, xrc: None };
        let (srq, _) = net.rnic(1).create_srq(session, pd, attr, rings.clone()).unwrap();
        Shared { srq, ctrl, rings, prod: 0 }
    }

    fn recv(&mut self, wr_id: u64, sge: abi::Sge) {
        let head = abi::RqWqe { wr_id, num_sge: 1, reserved: 0 };
        self.rings.rq_put(self.prod, 0, head.as_bytes());
        self.rings.rq_put(self.prod, abi::RQ_DATA, [sge].as_bytes());
        self.prod += 1;
        self.rings.set_rq_prod(self.prod);
    }

    /// Replaces the QP of end `i` by one that takes its receives here.
    fn attach(&self, net: &mut Net, i: usize, typ: QpType) {
        let e = &net.ends[i];
        let (session, old) = (e.session, e.qpn);
        let cap = abi::QpCap { max_send_wr: 16, max_send_sge: 4, ..Default::default() };
        let layout = abi::QpLayout::of(&cap).unwrap();
        let rings = QpRings::new(aligned(128), aligned(layout.sq_bytes()), aligned(layout.rq_bytes()), layout).unwrap();
        let create = CreateQp {
            pd: e.pd,
            send_cq: e.cqn,
            recv_cq: e.cqn,
            srq: Some(self.srq),
            xrcd: None,
            door: 0,
            sig_all: false,
            cap,
            rings: rings.clone(),
        };
        let (qpn, slot) = net.rnic(i).create_qp(session, typ as u8, create).unwrap();
        net.rnic(i).destroy_qp(session, old).unwrap();
        let e = &mut net.ends[i];
        (e.qpn, e.slot, e.rings) = (qpn, slot, rings);
    }
}

fn places(typ: QpType, limit: u32) -> Vec<(&'static str, Net, Shared)> {
    [("one host", 1), ("two hosts", 2)]
        .into_iter()
        .map(|(name, hosts)| {
            let mut net = Net::hosts(hosts, &[typ, typ], 9, Faults::default());
            let shared = Shared::new(&mut net, limit);
            shared.attach(&mut net, 1, typ);
            net.connect(typ, 0, 1, &|a| a);
            net.connect(typ, 1, 0, &|a| a);
            (name, net, shared)
        })
        .collect()
}

fn events(net: &mut Net) -> Vec<AsyncEvent> {
    let mut out = Vec::new();
    net.rnic(1).drain_outputs(&mut out);
    let kind = |o| if let Output::Async { kind, .. } = o { Some(kind) } else { None };
    out.into_iter().filter_map(kind).filter(|k| *k != AsyncEvent::CommEst).collect()
}

#[test]
fn receives_come_from_the_shared_queue_in_order() {
    for typ in [QpType::Rc, QpType::Uc, QpType::Ud] {
        for (place, mut net, mut shared) in places(typ, 0) {
            let ah = net.ah(0, 1);
            let (dest, sge) = (net.ends[1].qpn, net.ends[0].sge(0, 300));
            for id in 0..5 {
                let to = net.ends[1].sge(id * 1000, 1000);
                shared.recv(id, to);
                net.ends[0].post_to(wqe(WrOpcode::Send, id), ah, dest, &[sge]);
            }
            net.run(SECOND);
            assert_eq!(net.ends[0].poll().len(), 5, "{typ:?}, {place}");
            let got: Vec<_> = net.ends[1].poll().iter().map(|c| (c.wr_id, c.status)).collect();
            assert_eq!(got, [0, 1, 2, 3, 4].map(|i| (i, 0)), "{typ:?}, {place}");
        }
    }
}

#[test]
fn the_limit_event_comes_once() {
    for (place, mut net, mut shared) in places(QpType::Rc, 3) {
        let (to, from) = (net.ends[1].sge(0, 100), net.ends[0].sge(0, 100));
        for id in 0..4 {
            shared.recv(id, to);
        }
        let send = |net: &mut Net| {
            net.ends[0].post(wqe(WrOpcode::Send, 1), &[from]);
            net.run(10_000_000);
            events(net)
        };
        assert_eq!(send(&mut net), [], "{place}");
        assert_eq!(send(&mut net), [AsyncEvent::SrqLimitReached], "{place}");
        assert_eq!(send(&mut net), [], "{place}");
        let session = net.ends[1].session;
        assert_eq!(net.rnic(1).query_srq(session, shared.srq).unwrap().limit, 0);
        // Armed again while it is due: the event comes at once.
        net.rnic(1).modify_srq(session, shared.srq, 2).unwrap();
        assert_eq!(events(&mut net), [AsyncEvent::SrqLimitReached], "{place}");
        assert_eq!(net.rnic(1).modify_srq(session, shared.srq, 17).unwrap_err(), abi::Status::BadValue);
    }
}

#[test]
fn an_empty_shared_queue_is_not_ready() {
    for (place, mut net, mut shared) in places(QpType::Rc, 0) {
        let (to, from) = (net.ends[1].sge(0, 100), net.ends[0].sge(0, 100));
        net.ends[0].post(wqe(WrOpcode::Send, 1), &[from]);
        net.run(500_000);
        assert!(net.ends[0].poll().is_empty());
        shared.recv(7, to);
        net.run(SECOND);
        assert_eq!(status(&net.ends[0].done()), WcStatus::Success, "{place}");
        assert_eq!(net.ends[1].done().wr_id, 7);
        // A datagram waits a moment there, too.
    }
    for (place, mut net, mut shared) in places(QpType::Ud, 0) {
        let ah = net.ah(0, 1);
        let (to, from, dest) = (net.ends[1].sge(0, 200), net.ends[0].sge(0, 100), net.ends[1].qpn);
        net.ends[0].post_to(wqe(WrOpcode::Send, 1), ah, dest, &[from]);
        net.run(2_000_000);
        shared.recv(7, to);
        net.run(100_000);
        assert_eq!(net.ends[1].done().wr_id, 7, "{place}");
    }
}

#[test]
fn a_qp_that_fails_takes_no_more_and_says_so() {
    for (place, mut net, mut shared) in places(QpType::Rc, 0) {
        let to = net.ends[1].sge(0, 100);
        shared.recv(1, to);
        // A WRITE to where nothing may be written.
        let (bad, from) = (abi::SqWqe { rkey: 1, ..net.remote(WrOpcode::Write, 1, 0) }, net.ends[0].sge(0, 100));
        net.ends[0].post(bad, &[from]);
        net.run(SECOND);
        assert_eq!(events(&mut net), [AsyncEvent::QpAccessErr, AsyncEvent::QpLastWqeReached], "{place}");
        // The receive was not flushed, because all QPs share it.
        assert!(net.ends[1].poll().is_empty(), "{place}");
        let (session, qpn, pd) = (net.ends[1].session, net.ends[1].qpn, net.ends[1].pd);
        assert_eq!(net.rnic(1).destroy_srq(session, shared.srq).unwrap_err(), abi::Status::Busy);
        net.rnic(1).destroy_qp(session, qpn).unwrap();
        let mr = net.ends[1].mr;
        net.rnic(1).dereg_mr(session, mr).unwrap();
        assert_eq!(net.rnic(1).destroy_pd(session, pd).unwrap_err(), abi::Status::Busy);
        net.rnic(1).destroy_srq(session, shared.srq).unwrap();
        assert_eq!(net.rnic(1).destroy_srq(session, shared.srq).unwrap_err(), abi::Status::BadHandle);
        net.rnic(1).destroy_pd(session, pd).unwrap();
    }
}

#[test]
fn a_jumping_index_breaks_the_shared_queue() {
    for (place, mut net, shared) in places(QpType::Rc, 0) {
        shared.rings.set_rq_prod(1000);
        let from = net.ends[0].sge(0, 100);
        net.ends[0].post(wqe(WrOpcode::Send, 1), &[from]);
        net.run(SECOND);
        let got = events(&mut net);
        assert!(got.contains(&AsyncEvent::SrqErr) && got.contains(&AsyncEvent::QpFatal), "{place}: {got:?}");
        assert_ne!(status(&net.ends[0].done()), WcStatus::Success);
    }
}

#[test]
fn a_queue_that_is_resized_keeps_its_receives() {
    for typ in [QpType::Rc, QpType::Ud] {
        let mut net = Net::hosts(2, &[typ, typ], 3, Faults::default());
        let mut shared = Shared::new(&mut net, 0);
        shared.attach(&mut net, 1, typ);
        net.connect(typ, 0, 1, &|a| a);
        net.connect(typ, 1, 0, &|a| a);
        let to = net.ends[1].sge(0, 1000);
        (0..5).for_each(|i| shared.recv(i, to));
        let session = net.ends[1].session;
        let ring = |entries: u32| {
            let cap = abi::QpCap { max_recv_wr: entries, max_recv_sge: 2, ..Default::default() };
            abi::QpLayout::of(&cap).unwrap()
        };
        let ctrl = shared.ctrl.clone();
        let small = QpRings::receive_only(ctrl.clone(), aligned(ring(4).rq_bytes()), ring(4)).unwrap();
        assert_eq!(net.rnic(1).resize_srq(session, shared.srq, small), Err(unirdma_abi::Status::BadValue));
        let large = QpRings::receive_only(ctrl, aligned(ring(64).rq_bytes()), ring(64)).unwrap();
        let mut slot = vec![0; ring(64).rq_stride as usize];
        for i in 0..5 {
            shared.rings.rq_copy(i, &mut slot);
            large.rq_put(i, 0, &slot);
        }
        net.rnic(1).resize_srq(session, shared.srq, large.clone()).unwrap();
        shared.rings = large;
        (5..40).for_each(|i| shared.recv(i, to));
        let ah = if typ == QpType::Ud { net.ah(0, 1) } else { 0 };
        let (sge, dest) = (net.ends[0].sge(0, 100), net.ends[1].qpn);
        for i in 0..40 {
            net.ends[0].post_to(wqe(WrOpcode::Send, i), ah, dest, &[sge]);
            net.run(SECOND / 100);
            net.ends[0].poll();
        }
        let got: Vec<u64> = net.ends[1].poll().iter().map(|c| c.wr_id).collect();
        assert_eq!(got, (0..40).collect::<Vec<_>>());
        assert_eq!(net.rnic(1).query_srq(session, shared.srq).unwrap().max_wr, 64);
    }
}
