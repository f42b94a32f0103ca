//! Connection management between two vRNICs: of one host, of two hosts, and over a network that loses messages.

use std::net::IpAddr;

use unirdma_abi as abi;
use unirdma_abi::{CmOp, Status, port_space};
use unirdma_formats::cm::{Message, reason};
use unirdma_formats::wire::{Deth, Extra, Op, Opcode, Packet, Part, Transport};
use unirdma_formats::{Gid, QpState, QpType, WcStatus, WrOpcode, rnr_timer_ns};
use unirdma_rnic::CmEventKind::*;
use unirdma_rnic::{Arrival, Limits, Share, VrnicConfig};
use unirdma_simkit::cm::*;
use unirdma_simkit::net::{Faults, Net, arrival, gid, host};
use unirdma_simkit::*;

#[test]
fn a_connection_is_made_used_and_ended() {
    for (place, mut cm) in Cm::each() {
        let (a, b) = cm.connected();
        // Each end answers the number of READs and atomics that the other end may have outstanding.
        let attr = |cm: &mut Cm, end: usize| {
            let (s, qpn) = (cm.net.ends[end].session, cm.net.ends[end].qpn);
            cm.net.rnic(end).query_qp(s, qpn).unwrap()
        };
        let (x, y) = (attr(&mut cm, 0), attr(&mut cm, 1));
        assert_eq!((x.max_rd_atomic, x.max_dest_rd_atomic), (5, 3), "{place}");
        assert_eq!((y.max_rd_atomic, y.max_dest_rd_atomic), (3, 5), "{place}");
        assert_eq!((x.path_mtu, y.retry_cnt, x.rnr_retry), (y.path_mtu, 6, 7), "{place}");
        assert_eq!((x.sq_psn, y.sq_psn), (y.rq_psn, x.rq_psn), "{place}");
        assert_ne!(x.sq_psn, x.rq_psn, "{place}");
        let to = cm.net.ends[1].sge(0, 100);
        cm.net.ends[1].recv(1, &[to]);
        let from = cm.net.ends[0].sge(0, 100);
        cm.net.ends[0].post(wqe(WrOpcode::Send, 2), &[from]);
        cm.net.run(SECOND);
        assert_eq!(cm.net.ends[0].done().status, WcStatus::Success as u8, "{place}");
        assert_eq!(cm.net.ends[1].done().byte_len, 100, "{place}");
        cm.ask(0, CmOp::Disconnect, a, |_| ()).unwrap();
        cm.net.run(SECOND / 10);
        cm.event(0, Disconnected);
        cm.event(1, Disconnected);
        cm.ask(1, CmOp::Disconnect, b, |_| ()).unwrap();
        cm.net.run(2 * SECOND);
        cm.event(0, TimewaitExit);
        cm.event(1, TimewaitExit);
    }
}

#[test]
fn a_request_says_who_asks_and_with_what() {
    for (place, mut cm) in Cm::each() {
        let l = cm.listen(1);
        cm.connect(b"hello");
        cm.net.run(SECOND / 10);
        let e = cm.event(1, ConnectRequest);
        assert_eq!((e.listen_id, e.dst.ip, e.src.ip, e.src.port), (l, gid(0).0, gid(1).0, PORT), "{place}");
        assert!(e.dst.port >= 32_768, "{place}");
        // From this end's point of view.
        assert_eq!((e.param.responder_resources, e.param.initiator_depth), (5, 3), "{place}");
        assert_eq!(&e.private.as_flattened()[..6], b"hello\0", "{place}");
        assert_eq!(e.param.private_len, 56, "{place}");
    }
}

#[test]
fn refusals_say_why() {
    for (place, mut cm) in Cm::each() {
        cm.connect(b"");
        cm.net.run(SECOND / 10);
        assert!(cm.events(0).is_empty(), "{place}: somebody may listen yet");
        cm.net.run(SECOND / 5);
        assert_eq!(cm.event(0, Rejected).status, i32::from(reason::INVALID_SERVICE), "{place}");
        cm.listen(1);
        cm.connect(b"");
        cm.net.run(SECOND / 10);
        let b = cm.event(1, ConnectRequest).id;
        cm.ask(1, CmOp::Reject, b, |r| {
            r.param.private_len = 3;
            r.private[0][..3].copy_from_slice(b"why");
        })
        .unwrap();
        cm.net.run(SECOND / 10);
        let e = cm.event(0, Rejected);
        assert_eq!((e.status, &e.private[0][..4]), (i32::from(reason::CONSUMER), &b"why\0"[..]), "{place}");
        // A listener that goes away refuses the requests that its program has not seen.
        let l = cm.ask(1, CmOp::Create, 0, |_| ()).unwrap();
        cm.ask(1, CmOp::Bind, l, |r| r.src = addr(2, PORT + 1)).unwrap();
        cm.ask(1, CmOp::Listen, l, |_| ()).unwrap();
        let c = cm.ask(0, CmOp::Create, 0, |_| ()).unwrap();
        cm.ask(0, CmOp::ResolveAddr, c, |r| r.dst = addr(2, PORT + 1)).unwrap();
        cm.ask(0, CmOp::ResolveRoute, c, |_| ()).unwrap();
        cm.ask(0, CmOp::Connect, c, |_| ()).unwrap();
        cm.net.run(SECOND / 10);
        cm.events(0);
        cm.ask(1, CmOp::Destroy, l, |_| ()).unwrap();
        cm.net.run(SECOND / 10);
        assert_eq!(cm.event(0, Rejected).status, i32::from(reason::CONSUMER), "{place}");
        assert!(cm.events(1).is_empty(), "{place}");
    }
}

#[test]
fn whoever_ends_is_missed_at_once() {
    for (place, mut cm) in Cm::each() {
        let (a, _) = cm.connected();
        cm.ask(0, CmOp::Destroy, a, |_| ()).unwrap();
        cm.net.run(SECOND / 10);
        cm.event(1, Disconnected);
        assert_eq!(cm.ask(0, CmOp::Disconnect, a, |_| ()), Err(Status::BadHandle), "{place}");
    }
    for (_, mut cm) in Cm::each() {
        cm.connected();
        let s = cm.net.ends[0].session;
        cm.net.rnic(0).remove_session(s);
        cm.net.run(SECOND / 10);
        cm.event(1, Disconnected);
    }
}

#[test]
fn nobody_there_is_unreachable_after_all_tries() {
    let mut cm = Cm::new(2, port_space::TCP, 5, Faults::default());
    cm.listen(1);
    cm.net.cut(0, true);
    cm.connect(b"");
    cm.net.run(40 * SECOND);
    assert!(cm.events(0).is_empty());
    cm.net.run(40 * SECOND);
    assert_eq!(cm.event(0, Unreachable).status, -110);
}

#[test]
fn an_address_that_nobody_has_is_an_error_after_its_time() {
    for (place, mut cm) in Cm::each() {
        let id = cm.ask(0, CmOp::Create, 0, |_| ()).unwrap();
        // A program may try again.
        for _ in 0..2 {
            cm.ask(0, CmOp::ResolveAddr, id, |r| (r.dst, r.value) = (addr(99, PORT), 2000)).unwrap();
            assert_eq!(cm.ask(0, CmOp::ResolveRoute, id, |_| ()), Err(Status::BadState), "{place}");
            assert_eq!(cm.ask(0, CmOp::ResolveAddr, id, |r| r.dst = addr(2, PORT)), Err(Status::BadState), "{place}");
            cm.net.run(2 * SECOND - SECOND / 10);
            assert!(cm.events(0).is_empty(), "{place}");
            cm.net.run(SECOND / 5);
            let e = cm.event(0, AddrError);
            assert_eq!((e.id, e.status, e.dst), (id, -110, addr(99, PORT)), "{place}");
        }
        cm.ask(0, CmOp::ResolveAddr, id, |r| r.dst = addr(2, PORT)).unwrap();
        cm.event(0, AddrResolved);
        cm.net.run(10 * SECOND);
        assert!(cm.events(0).is_empty(), "{place}");
    }
}

#[test]
fn an_address_that_appears_meanwhile_is_found() {
    let mut cm = Cm::new(1, port_space::TCP, 5, Faults::default());
    let wait = |cm: &mut Cm, last: u8| {
        let id = cm.ask(0, CmOp::Create, 0, |_| ()).unwrap();
        cm.ask(0, CmOp::ResolveAddr, id, |r| (r.dst, r.value) = (addr(last, PORT), 60_000)).unwrap();
        cm.net.run(SECOND);
        assert!(cm.events(0).is_empty());
        id
    };
    // A vRNIC is added, in the same group and in another.
    let id = wait(&mut cm, 99);
    let config = |group| VrnicConfig { group, gids: vec![ip(99)], limits: Limits::default(), share: Share::default() };
    cm.net.rnic(0).add_vrnic(config(77)).unwrap();
    assert!(cm.events(0).is_empty());
    let new = cm.net.rnic(0).add_vrnic(config(0)).unwrap();
    assert_eq!(cm.event(0, AddrResolved).id, id);
    // A vRNIC gets another address.
    let id = wait(&mut cm, 98);
    cm.net.rnic(0).set_gids(new, vec![ip(99), ip(98)]);
    assert_eq!(cm.event(0, AddrResolved).id, id);
    // A program that has destroyed the identifier gets no event.
    let id = wait(&mut cm, 97);
    cm.ask(0, CmOp::Destroy, id, |_| ()).unwrap();
    cm.net.rnic(0).set_gids(new, vec![ip(97)]);
    cm.net.run(100 * SECOND);
    assert!(cm.events(0).is_empty());
}

/// A program that resolves and gives up, again and again, makes the virtual layer remember nothing.
#[test]
fn timers_that_were_stopped_do_not_pile_up() {
    let mut cm = Cm::new(1, port_space::TCP, 5, Faults::default());
    for _ in 0..20_000 {
        let id = cm.ask(0, CmOp::Create, 0, |_| ()).unwrap();
        cm.ask(0, CmOp::ResolveAddr, id, |r| (r.dst, r.value) = (addr(99, PORT), u32::MAX)).unwrap();
        cm.net.rnic(0).poll(0);
        cm.ask(0, CmOp::Destroy, id, |_| ()).unwrap();
    }
    assert!(cm.net.rnic(0).pending_timers() < 5000, "{} timers", cm.net.rnic(0).pending_timers());
}

/// As the kernel's own peers do: each begins where the other's message says.
#[test]
fn each_end_begins_where_the_other_says() {
    let (_, mut cm) = Cm::each().into_iter().nth(1).unwrap();
    let sent = cm.connected();
    let psn = |cm: &mut Cm, end: usize, id: u32, state: QpState| {
        let s = cm.net.ends[end].session;
        let (_, a) = cm.net.rnic(end).cm_qp_attr(s, id, state as u32).unwrap();
        if state == QpState::Rtr { a.rq_psn } else { a.sq_psn }
    };
    let requests = cm.net.mads.iter().filter_map(|m| match &m.message {
        Message::Req(r) => Some(r.psn),
        Message::Rep(r) => Some(r.psn),
        _ => None,
    });
    let [req, rep] = requests.collect::<Vec<_>>()[..] else { panic!("one REQ, one REP") };
    assert_eq!((psn(&mut cm, 0, sent.0, QpState::Rtr), psn(&mut cm, 0, sent.0, QpState::Rts)), (req, rep));
    assert_eq!((psn(&mut cm, 1, sent.1, QpState::Rtr), psn(&mut cm, 1, sent.1, QpState::Rts)), (rep, req));
}

/// A receiver that shares its core with others may get it back only after 30 ms, the time slice of a busy poller.
#[test]
fn a_receive_may_come_after_a_slice_of_somebody_else() {
    let (_, mut cm) = Cm::each().into_iter().nth(1).unwrap();
    let (id, _) = cm.connected();
    let s = cm.net.ends[0].session;
    let (_, a) = cm.net.rnic(0).cm_qp_attr(s, id, QpState::Rtr as u32).unwrap();
    let retries = 5;
    assert!(retries * rnr_timer_ns(a.min_rnr_timer) > 30_000_000);
}

/// A program may take minutes to accept: the peer is asked to wait.
#[test]
fn a_slow_program_is_waited_for() {
    let mut cm = Cm::new(2, port_space::TCP, 5, Faults::default());
    cm.listen(1);
    let a = cm.connect(b"");
    cm.net.run(100 * SECOND);
    assert!(cm.events(0).is_empty());
    let b = cm.event(1, ConnectRequest).id;
    cm.ready(1, b);
    cm.accept(b);
    cm.net.run(SECOND / 10);
    cm.event(0, ConnectResponse);
    cm.ready(0, a);
}

#[test]
fn a_full_backlog_makes_peers_ask_again() {
    let mut cm = Cm::new(2, port_space::TCP, 5, Faults::default());
    cm.listen(1);
    for _ in 0..6 {
        cm.connect(b"");
    }
    cm.net.run(SECOND / 10);
    assert_eq!(cm.events(1).len(), 4);
    cm.net.run(2 * SECOND);
    assert_eq!(cm.events(1).len(), 2);
}

#[test]
fn lost_doubled_and_late_messages_change_nothing() {
    for seed in 0..60 {
        let faults = Faults { loss: 200, duplication: 100, reordering: 200, corruption: 0 };
        let mut cm = Cm::new(2, port_space::TCP, seed, faults);
        cm.listen(1);
        let a = cm.connect(b"x");
        cm.net.run(30 * SECOND);
        let b = cm.event(1, ConnectRequest).id;
        cm.ready(1, b);
        cm.accept(b);
        cm.net.run(30 * SECOND);
        cm.event(0, ConnectResponse);
        cm.ready(0, a);
        cm.ask(0, CmOp::Establish, a, |_| ()).unwrap();
        cm.net.run(30 * SECOND);
        cm.event(1, Established);
        cm.ask(1, CmOp::Disconnect, b, |_| ()).unwrap();
        cm.net.run(30 * SECOND);
        for end in 0..2 {
            let kinds: Vec<u32> = cm.events(end).iter().map(|e| e.kind).collect();
            assert_eq!(kinds, [Disconnected as u32, TimewaitExit as u32], "seed {seed}, end {end}");
        }
    }
}

#[test]
fn datagram_services_are_found() {
    for hosts in [1, 2] {
        let mut cm = Cm::new(hosts, port_space::UDP, 5, Faults::default());
        cm.listen(1);
        let a = cm.connect(b"who");
        cm.net.run(SECOND / 10);
        let e = cm.event(1, ConnectRequest);
        assert_eq!((&e.private[0][..3], e.param.private_len), (&b"who"[..], 180));
        let b = e.id;
        cm.accept(b);
        cm.net.run(SECOND / 10);
        let e = cm.event(0, Established);
        assert_eq!((e.param.qpn, e.param.qkey), (cm.net.ends[1].qpn, 0x0123_4567));
        assert_eq!(e.ah.grh.dgid, gid(1).0);
        for end in 0..2 {
            cm.ready(end, if end == 0 { a } else { b });
        }
        let s = cm.net.ends[0].session;
        let pd = cm.net.ends[0].pd;
        let ah = cm.net.rnic(0).create_ah(s, pd, &e.ah).unwrap();
        let to = cm.net.ends[1].sge(0, 200);
        cm.net.ends[1].recv(1, &[to]);
        let from = cm.net.ends[0].sge(0, 100);
        let dest_qpn = e.param.qpn;
        cm.net.ends[0].post(abi::SqWqe { ah, dest_qpn, qkey: e.param.qkey, ..wqe(WrOpcode::Send, 2) }, &[from]);
        cm.net.run(SECOND);
        assert_eq!(cm.net.ends[1].done().byte_len, 140);
    }
    let mut cm = Cm::new(2, port_space::UDP, 5, Faults::default());
    cm.connect(b"");
    cm.net.run(SECOND / 2);
    assert_eq!(cm.event(0, Unreachable).status, 1);
}

/// The program of the service is not asked; of two that share a port by reuse, the later one is found.
#[test]
fn datagram_services_are_answered_for() {
    const REUSE_ADDRESS: u8 = 1;
    for hosts in [1, 2] {
        let mut cm = Cm::new(hosts, port_space::UDP, 5, Faults::default());
        let own = cm.net.ends[1].qpn;
        let vrnic = cm.net.ends[1].vrnic;
        let other = End::of_vrnic(cm.net.rnic(1), vrnic, 64, QpType::Ud);
        let answers = |cm: &mut Cm, qpn: u32, qkey: u32, reuse: bool| {
            let id = cm.ask(1, CmOp::Create, 0, |_| ()).unwrap();
            cm.ask(1, CmOp::SetOption, id, |r| (r.option, r.value) = (REUSE_ADDRESS, reuse.into())).unwrap();
            cm.ask(1, CmOp::Bind, id, |r| r.src = addr(2, PORT))?;
            cm.ask(1, CmOp::Listen, id, |r| (r.param.qpn, r.param.qkey) = (qpn, qkey))
        };
        assert_eq!(answers(&mut cm, other.qpn, 0, true), Err(Status::BadHandle), "another program's QP");
        let expect = |cm: &mut Cm, qkey: u32| {
            let a = cm.connect(b"");
            cm.net.run(SECOND / 10);
            let e = cm.event(0, Established);
            assert_eq!((e.param.qpn, e.param.qkey), (own, qkey), "{hosts} hosts");
            assert!(cm.events(1).is_empty());
            cm.ask(0, CmOp::Destroy, a, |_| ()).unwrap();
        };
        cm.ask(1, CmOp::Create, 0, |_| ()).unwrap();
        let first = answers(&mut cm, own, 0, true).unwrap();
        expect(&mut cm, 0x0123_4567);
        assert_eq!(answers(&mut cm, own, 5, false), Err(Status::AddressInUse));
        let second = answers(&mut cm, own, 7, true).unwrap();
        expect(&mut cm, 7);
        cm.ask(1, CmOp::Destroy, second, |_| ()).unwrap();
        expect(&mut cm, 0x0123_4567);
        cm.ask(1, CmOp::Destroy, first, |_| ()).unwrap();
        cm.connect(b"");
        cm.net.run(SECOND / 2);
        cm.event(0, Unreachable);
    }
}

#[test]
fn a_server_between_two_listeners_is_waited_for() {
    for space in [port_space::TCP, port_space::UDP] {
        for hosts in [1, 2] {
            let mut cm = Cm::new(hosts, space, 5, Faults::default());
            cm.connect(b"x");
            cm.net.run(SECOND / 10);
            cm.listen(1);
            cm.net.run(SECOND / 100);
            cm.event(1, ConnectRequest);
            cm.net.run(SECOND);
            assert!(cm.events(0).is_empty());
        }
    }
}

#[test]
fn events_that_leave_their_queue_are_counted() {
    let mut cm = Cm::new(1, port_space::TCP, 5, Faults::default());
    let s = cm.net.ends[0].session;
    let ask = |cm: &mut Cm, op, id| {
        let r = abi::CmReq { op: op as u8, id, queue: QUEUE + 1, ..Default::default() };
        cm.net.rnic(0).cm(s, &r).unwrap().dropped
    };
    let ids = [cm.resolved(), cm.resolved()];
    for id in ids {
        cm.ask(0, CmOp::Connect, id, |_| ()).unwrap();
    }
    cm.net.run(SECOND);
    assert_eq!(ask(&mut cm, CmOp::Migrate, ids[0]), 1, "nobody listens: the refusal waits");
    assert_eq!(ask(&mut cm, CmOp::Migrate, ids[0]), 1, "it goes with the identifier");
    assert_eq!(ask(&mut cm, CmOp::Destroy, ids[0]), 1);
    assert_eq!(ask(&mut cm, CmOp::Destroy, ids[1]), 1);
    assert!(cm.events(0).is_empty());
}

#[test]
fn addresses_belong_to_one_at_a_time() {
    let mut cm = Cm::new(1, port_space::TCP, 5, Faults::default());
    let mut bind = |end: usize, a: abi::CmAddr, reuse: bool| {
        let id = cm.ask(end, CmOp::Create, 0, |_| ()).unwrap();
        if reuse {
            cm.ask(end, CmOp::SetOption, id, |r| (r.option, r.value) = (abi::cm_option::REUSE_ADDRESS, 1)).unwrap();
        }
        cm.ask(end, CmOp::Bind, id, |r| r.src = a).map(|_| id)
    };
    bind(0, addr(1, 500), false).unwrap();
    assert_eq!(bind(0, addr(1, 500), false), Err(Status::AddressInUse));
    assert_eq!(bind(0, addr(1, 500), true), Err(Status::AddressInUse));
    let any = abi::CmAddr { ip: [0; 16], family: 6, ..addr(0, 500) };
    assert_eq!(bind(0, any, false), Err(Status::AddressInUse));
    // Another vRNIC has ports of its own, and cannot bind to an address of this one.
    bind(1, addr(2, 500), false).unwrap();
    assert_eq!(bind(1, addr(1, 501), false), Err(Status::NoDevice));
    bind(0, addr(1, 502), true).unwrap();
    bind(0, addr(1, 502), true).unwrap();
}

/// As in the kernel, whatever addresses the vRNIC has.
#[test]
fn loopback_is_bound_as_a_wildcard_of_its_family() {
    let mut cm = Cm::new(1, port_space::TCP, 5, Faults::default());
    let loopback = |ip: &str, port| {
        let ip: IpAddr = ip.parse().unwrap();
        abi::CmAddr { ip: Gid::from_ip(ip).0, family: if ip.is_ipv4() { 4 } else { 6 }, ..addr(0, port) }
    };
    let mut bind = |end: usize, a: abi::CmAddr| {
        let id = cm.ask(end, CmOp::Create, 0, |_| ()).unwrap();
        cm.ask(end, CmOp::Bind, id, |r| r.src = a).map(|_| id)
    };
    // The administrator has given these vRNICs no IPv6 address.
    for (port, ip) in [(600, "127.0.0.1"), (601, "127.8.7.6"), (602, "::1")] {
        bind(0, loopback(ip, port)).unwrap();
    }
    assert_eq!(bind(0, addr(1, 600)), Err(Status::AddressInUse));
    bind(0, addr(1, 500)).unwrap();
    assert_eq!(bind(0, loopback("127.0.0.1", 500)), Err(Status::AddressInUse));
    // An identifier that listens there gets requests for the vRNIC's addresses of that family.
    let l = bind(1, loopback("127.0.0.1", PORT)).unwrap();
    cm.ask(1, CmOp::Listen, l, |_| ()).unwrap();
    cm.connect(b"");
    cm.net.run(SECOND / 10);
    let e = cm.event(1, ConnectRequest);
    assert_eq!((e.listen_id, e.src.ip), (l, gid(1).0));
    // A connection to loopback is one to the vRNIC's own address.
    let c = cm.ask(1, CmOp::Create, 0, |_| ()).unwrap();
    cm.ask(1, CmOp::ResolveAddr, c, |r| (r.src, r.dst) = (loopback("127.0.0.1", 0), loopback("127.0.0.1", PORT)))
        .unwrap();
    cm.net.run(SECOND / 10);
    let e = cm.event(1, AddrResolved);
    assert_eq!((e.src.ip, e.dst.ip), (gid(1).0, gid(1).0));
}

#[test]
fn other_sessions_identifiers_are_not_there() {
    let (_, mut cm) = Cm::each().into_iter().next().unwrap();
    let l = cm.listen(1);
    for op in 2..=15u8 {
        let r = abi::CmReq { op, id: l, ..Default::default() };
        let s = cm.net.ends[0].session;
        assert_eq!(cm.net.rnic(0).cm(s, &r).unwrap_err(), Status::BadHandle, "operation {op}");
    }
    let s = cm.net.ends[0].session;
    assert_eq!(cm.net.rnic(0).cm_qp_attr(s, l, 1).unwrap_err(), Status::BadHandle);
    for op in [0, 16, 255] {
        let r = abi::CmReq { op, id: l, ..Default::default() };
        assert_eq!(cm.net.rnic(0).cm(s, &r).unwrap_err(), Status::BadValue);
    }
}

/// Every operation in every state: no panic, and an error where it makes no sense.
#[test]
fn operations_at_the_wrong_time_are_refused() {
    let mut rng = unirdma_rnic::Rng::new(3);
    for round in 0..300 {
        let space = if round % 2 == 0 { port_space::TCP } else { port_space::UDP };
        let mut cm = Cm::new(2, space, round, Faults { loss: 100, ..Faults::default() });
        cm.listen(1);
        let mut ids = [vec![], vec![]];
        for _ in 0..60 {
            let end = (rng.next_u64() % 2) as usize;
            let op = CmOp::from_raw(1 + (rng.next_u64() % 15) as u8).unwrap();
            let known: &Vec<u32> = &ids[end];
            let id = if known.is_empty() { 7 } else { known[rng.next_u64() as usize % known.len()] };
            let (value, to) = (rng.next_u64() as u32 % 40, addr(1 + (rng.next_u64() % 3) as u8, PORT));
            let made = cm.ask(end, op, id, |r| {
                (r.value, r.option, r.dst, r.src) = (value, value as u8 % 5, to, abi::CmAddr::default());
                r.param.private_len = value as u8 * 6;
            });
            if let (CmOp::Create, Ok(id)) = (op, made) {
                ids[end].push(id);
            }
            cm.net.run(rng.next_u64() % SECOND);
            for (end, ids) in ids.iter_mut().enumerate() {
                ids.extend(cm.events(end).iter().map(|e| e.id));
            }
        }
    }
}

#[test]
fn multicast_reaches_every_member_on_every_host() {
    let types = [QpType::Ud; 4];
    let mut net = Net::hosts(2, &types, 5, Faults::default());
    for i in 0..4 {
        net.connect(QpType::Ud, i, 0, &|a| a);
    }
    let group = Gid::from_ip([239, 1, 2, 3].into());
    let (s, qpn) = (net.ends[0].session, net.ends[0].qpn);
    assert_eq!(net.rnic(0).attach_mcast(s, qpn, gid(1)), Err(Status::BadValue));
    assert_eq!(net.rnic(1).attach_mcast(s, qpn, group), Err(Status::BadHandle));
    for i in [0, 1, 2] {
        let (s, qpn) = (net.ends[i].session, net.ends[i].qpn);
        net.rnic(i).attach_mcast(s, qpn, group).unwrap();
        net.rnic(i).attach_mcast(s, qpn, group).unwrap();
    }
    let send = |net: &mut Net| {
        for i in 0..4 {
            let to = net.ends[i].sge(0, 200);
            net.ends[i].recv(1, &[to]);
        }
        let (s, pd) = (net.ends[3].session, net.ends[3].pd);
        let ah = net.rnic(3).create_ah(s, pd, &address(group)).unwrap();
        let from = net.ends[3].sge(0, 100);
        net.ends[3].post_to(wqe(WrOpcode::Send, 2), ah, 0xff_ffff, &[from]);
        net.run(SECOND);
        [0, 1, 2].map(|i| net.ends[i].poll().len())
    };
    assert_eq!(send(&mut net), [1, 1, 1]);
    // The sender is no member.
    assert_eq!(net.ends[3].poll().len(), 1);
    let (s, qpn) = (net.ends[1].session, net.ends[1].qpn);
    net.rnic(1).detach_mcast(s, qpn, group).unwrap();
    assert_eq!(net.rnic(1).detach_mcast(s, qpn, group), Err(Status::BadValue));
    let (s, qpn) = (net.ends[2].session, net.ends[2].qpn);
    net.rnic(2).destroy_qp(s, qpn).unwrap();
    assert_eq!(send(&mut net)[..2], [1, 0]);
}

/// A datagram to very many members takes many turns: others have theirs in between, and each member gets it once.
#[test]
fn a_datagram_to_many_members_lets_others_have_their_turns() {
    const MEMBERS: usize = 60;
    let mut p = Pair::new();
    let a = p.a.vrnic;
    let group = Gid::from_ip([239, 1, 2, 3].into());
    let ud = |rnic: &mut unirdma_rnic::Rnic, vrnic| {
        let e = End::of_vrnic(rnic, vrnic, 64, QpType::Ud);
        for (mask, attr) in attrs_of(QpType::Ud, 0, gid(0)) {
            rnic.modify_qp(e.session, e.qpn, mask, &attr).unwrap();
        }
        e
    };
    let mut members: Vec<End> = (0..MEMBERS).map(|_| ud(&mut p.rnic, a)).collect();
    let mut sender = ud(&mut p.rnic, a);
    for m in &mut members {
        p.rnic.attach_mcast(m.session, m.qpn, group).unwrap();
        let sge = m.sge(0, 200);
        m.recv(1, &[sge]);
    }
    let ah = p.rnic.create_ah(sender.session, sender.pd, &address(group)).unwrap();
    let from = sender.sge(0, 100);
    sender.post_to(wqe(WrOpcode::Send, 2), ah, 0xff_ffff, &[from]);
    let mut had = 0;
    let mut rounds = 0;
    while had < MEMBERS {
        let to = abi::SqWqe { remote_addr: IOVA, rkey: p.a.key, ..wqe(WrOpcode::Write, 3) };
        p.b.post(to, &[p.b.sge(0, 8)]);
        p.rnic.poll(p.now);
        assert_eq!(p.b.poll().len(), 1, "another vRNIC has a turn in each round");
        let now: usize = members.iter_mut().map(|m| m.poll().len()).sum();
        assert!(now <= 32, "{now} members in one round");
        had += now;
        rounds += 1;
        assert!(rounds < 1000, "{had} members after {rounds} rounds");
    }
    p.settle();
    assert_eq!((had, sender.poll().len(), members.iter_mut().map(|m| m.poll().len()).sum()), (MEMBERS, 1, 0_usize));
}

/// A plain device sends to a group by its IP address, and receives from it in that way. A device that is not known
/// reaches nobody.
#[test]
fn multicast_reaches_plain_devices_and_comes_from_them() {
    let mut net = Net::hosts(1, &[QpType::Ud; 2], 5, Faults::default());
    for i in 0..2 {
        net.connect(QpType::Ud, i, 0, &|a| a);
    }
    let (device, ip) = (host(7), IpAddr::from([239, 1, 2, 3]));
    let group = Gid::from_ip(ip);
    let plain = unirdma_rnic::Route { host: device, foreign: true, vni: 0 };
    net.rnics[0].set_routes([((0, Gid::from_ip(device)), plain)].into_iter().collect());
    assert_eq!(net.rnics[0].multicast_changes(), Some(vec![]));
    let (s, qpn) = (net.ends[1].session, net.ends[1].qpn);
    net.rnics[0].attach_mcast(s, qpn, group).unwrap();
    assert_eq!(net.rnics[0].multicast_changes(), Some(vec![ip]));
    assert_eq!(net.rnics[0].multicast_changes(), None);

    let send = Opcode { transport: Transport::Ud, op: Op::Send(Part::Only), extra: Extra::None };
    let mut p = Packet::new(send, 0xff_ffff, 0);
    p.deth = Deth { qkey: QKEY, src_qp: 17 };
    let mut bytes = vec![0; 64];
    let head = p.put(&mut bytes, 4);
    bytes.truncate(head);
    bytes.extend_from_slice(b"data");
    let to = net.ends[1].sge(0, 200);
    net.ends[1].recv(1, &[to]);
    let to = |from, to| Arrival { to, ..arrival(from) };
    net.rnics[0].handle_packet(0, &to(host(8), ip), &bytes);
    net.rnics[0].handle_packet(0, &to(device, [239, 1, 2, 4].into()), &bytes);
    assert_eq!((net.rnics[0].wire_drops().wrong_source, net.ends[1].poll().len()), (2, 0));
    net.rnics[0].handle_packet(0, &to(device, ip), &bytes);
    let c = net.ends[1].done();
    assert_eq!((c.src_qp, c.byte_len, net.ends[1].bytes(40, 4)), (17, 44, b"data".to_vec()));

    let (s, pd) = (net.ends[0].session, net.ends[0].pd);
    let ah = net.rnics[0].create_ah(s, pd, &address(group)).unwrap();
    let from = net.ends[0].sge(0, 100);
    net.ends[0].post_to(wqe(WrOpcode::Send, 2), ah, 0xff_ffff, &[from]);
    while poll(&mut net.rnics[0], 1) {}
    let sent: Vec<_> = net.rnics[0].tx().packets().iter().map(|p| (p.path.to, p.path.from, p.outer())).collect();
    assert_eq!(sent, [(ip, Some(gid(0).ip()), 0)]);

    net.rnics[0].destroy_qp(net.ends[1].session, qpn).unwrap();
    assert_eq!(net.rnics[0].multicast_changes(), Some(vec![]));
}
