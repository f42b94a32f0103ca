//! The port while programs run: its link and its addresses; and changes of a working QP: its rate limit, the sizes of
//! its queues, and the programs that share it.

use unirdma_abi as abi;
use unirdma_abi::Status;
use unirdma_formats::{AsyncEvent, Gid, QpType, WcStatus, WrOpcode, attr_mask as m};
use unirdma_mem::QpRings;
use unirdma_rnic::{OpenXrcd, Output};
use unirdma_simkit::net::{Faults, Net, gid};
use unirdma_simkit::xrc::{XrcSrq, connect_target};
use unirdma_simkit::*;

/// Two connected QPs on one host, and on two.
fn places(typ: QpType) -> [(&'static str, Net); 2] {
    [("one host", 1), ("two hosts", 2)].map(|(place, hosts)| {
        let mut net = Net::hosts(hosts, &[typ, typ], 5, Faults::default());
        net.connect(typ, 0, 1, &|a| a);
        net.connect(typ, 1, 0, &|a| a);
        (place, net)
    })
}

fn write(net: &mut Net) {
    let (w, sge) = (net.remote(WrOpcode::Write, 1, 0), net.ends[0].sge(0, 3000));
    net.ends[0].post(w, &[sge]);
}

/// Asynchronous events that the ends of one host got since the last call.
fn events(net: &mut Net) -> [Vec<AsyncEvent>; 2] {
    let mut all = Vec::new();
    net.rnics[0].drain_outputs(&mut all);
    [0, 1].map(|i| {
        let session = net.ends[i].session;
        let kind = |o: &Output| match *o {
            Output::Async { session: to, kind, .. } if to == session => Some(kind),
            _ => None,
        };
        all.iter().filter_map(kind).collect()
    })
}

#[test]
fn without_a_link_nobody_answers_until_it_is_back() {
    for down in [0, 1] {
        for (place, mut net) in places(QpType::Rc) {
            let vrnic = net.ends[down].vrnic;
            net.rnic(down).set_link(vrnic, false);
            assert!(!net.rnic(down).is_up(vrnic));
            write(&mut net);
            // Three retries of 67 ms each.
            net.run(SECOND / 10);
            assert_eq!(net.ends[0].poll().len(), 0, "{place}, {down} is down");
            net.rnic(down).set_link(vrnic, true);
            net.run(SECOND);
            assert_eq!(net.ends[0].done().status, 0, "{place}, {down} was down");
            net.rnic(down).set_link(vrnic, false);
            write(&mut net);
            net.run(SECOND);
            assert_eq!(status(&net.ends[0].done()), WcStatus::RetryExcErr, "{place}, {down} is down");
            assert_eq!(net.counters(down).wire.link_downed, 2);
            let unsent = net.counters(0).wire.send_err;
            assert_eq!(unsent > 0, down == 0 && place == "two hosts", "{place}, {down} was down: {unsent}");
        }
    }
}

#[test]
fn datagrams_and_connection_requests_stop_at_a_port_that_is_down() {
    for down in [0, 1] {
        for (place, mut net) in places(QpType::Ud) {
            let vrnic = net.ends[down].vrnic;
            net.rnic(down).set_link(vrnic, false);
            let ah = net.ah(0, 1);
            let (sge, dest, to) = (net.ends[0].sge(0, 10), net.ends[1].qpn, net.ends[1].sge(0, 100));
            (0..2).for_each(|i| net.ends[1].recv(i, &[to]));
            for (up, arrived) in [(false, 0), (true, 1)] {
                net.rnic(down).set_link(vrnic, up);
                net.ends[0].post_to(wqe(WrOpcode::Send, 1), ah, dest, &[sge]);
                net.run(SECOND);
                assert_eq!(net.ends[0].done().status, 0, "{place}");
                assert_eq!(net.ends[1].poll().len(), arrived, "{place}, up: {up}");
            }
        }
    }
}

#[test]
fn every_program_of_the_port_hears_of_changes_and_no_other() {
    let (_, mut net) = places(QpType::Rc).into_iter().next().unwrap();
    let vrnic = net.ends[0].vrnic;
    events(&mut net);
    for up in [false, false, true] {
        net.rnic(0).set_link(vrnic, up);
    }
    net.rnic(0).set_gids(vrnic, vec![gid(0), ip(9)]);
    net.rnic(0).set_gids(vrnic, vec![gid(0), ip(9)]);
    let expected = vec![AsyncEvent::PortErr, AsyncEvent::PortActive, AsyncEvent::GidChange];
    assert_eq!(events(&mut net), [expected, vec![]]);
}

#[test]
fn an_address_that_is_taken_away_serves_nobody() {
    for (place, mut net) in places(QpType::Rc) {
        let (vrnic, session, pd) = (net.ends[0].vrnic, net.ends[0].session, net.ends[0].pd);
        net.rnic(0).set_gids(vrnic, vec![Gid::default(), ip(9)]);
        assert_eq!(net.rnic(0).gids(vrnic), [Gid::default(), ip(9)]);
        // A hole in the GID table is no address to connect from.
        assert_eq!(net.rnic(0).create_ah(session, pd, &address(gid(1))), Err(Status::BadValue), "{place}");
        write(&mut net);
        net.run(SECOND);
        assert_eq!(status(&net.ends[0].done()), WcStatus::RetryExcErr, "{place}");
        let other = abi::AhAttr {
            grh: abi::GlobalRoute { sgid_index: 1, dgid: gid(1).0, ..Default::default() },
            ..address(gid(1))
        };
        net.rnic(0).create_ah(session, pd, &other).unwrap();
    }
}

#[test]
fn a_connection_whose_address_is_back_goes_on() {
    for (place, mut net) in places(QpType::Rc) {
        let vrnic = net.ends[0].vrnic;
        net.rnic(0).set_gids(vrnic, vec![ip(9)]);
        write(&mut net);
        net.run(SECOND / 10);
        net.rnic(0).set_gids(vrnic, vec![ip(9), gid(0)]);
        net.run(SECOND);
        assert_eq!(net.ends[0].done().status, 0, "{place}");
    }
}

/// 1 MB at 80 Mbit/s takes 0.1 s, at any size of the messages.
#[test]
fn a_rate_limit_holds_and_can_be_changed() {
    for typ in [QpType::Rc, QpType::Uc] {
        for size in [10_000, 250_000] {
            for (place, mut net) in places(typ) {
                let (session, qpn) = (net.ends[0].session, net.ends[0].qpn);
                let limit = |kbps| abi::QpAttr { rate_limit: kbps, ..Default::default() };
                net.rnic(0).modify_qp(session, qpn, m::RATE_LIMIT, &limit(80_000)).unwrap();
                let send = |net: &mut Net, bytes: u32| {
                    let start = net.now;
                    for i in 0..bytes / size {
                        let (w, sge) = (net.remote(WrOpcode::Write, u64::from(i), 0), net.ends[0].sge(0, size));
                        net.ends[0].post(w, &[sge]);
                        while net.ends[0].poll().is_empty() {
                            net.run(1_000_000);
                        }
                    }
                    (net.now - start) / 1_000_000
                };
                let took = send(&mut net, 1_000_000);
                assert!((60..220).contains(&took), "{typ:?}, {place}, {size}: {took} ms");
                assert_eq!(net.rnics[0].query_qp(session, qpn).unwrap().rate_limit, 80_000);
                net.rnic(0).modify_qp(session, qpn, m::RATE_LIMIT, &limit(0)).unwrap();
                net.run(SECOND / 10);
                let took = send(&mut net, 1_000_000);
                assert!(took <= 110, "{typ:?}, {place}, {size}: {took} ms without a limit");
            }
        }
    }
}

/// 1 MB at 2.5 Gbit/s takes 3.2 ms, and at a `rate_limit` below that longer.
#[test]
fn a_static_rate_of_an_address_holds() {
    const BYTES: u32 = 10_000;
    for (rate, rate_limit, ms) in [(2, 0, 2..6), (2, 1_000_000, 7..11), (2, 10_000_000, 2..6), (7, 0, 0..2)] {
        for typ in [QpType::Rc, QpType::Uc] {
            for (place, mut net) in places(typ) {
                let (session, qpn) = (net.ends[0].session, net.ends[0].qpn);
                net.rnic(0).modify_qp(session, qpn, m::STATE, &abi::QpAttr::default()).unwrap();
                let with_rate =
                    |a: abi::QpAttr| abi::QpAttr { ah_attr: abi::AhAttr { static_rate: rate, ..a.ah_attr }, ..a };
                net.connect(typ, 0, 1, &with_rate);
                let limit = abi::QpAttr { rate_limit, ..Default::default() };
                net.rnic(0).modify_qp(session, qpn, m::RATE_LIMIT, &limit).unwrap();
                let start = net.now;
                for _ in 0..10 {
                    let (w, sge) = (net.remote(WrOpcode::Write, 1, 0), net.ends[0].sge(0, BYTES));
                    (0..10).for_each(|_| _ = net.ends[0].post(w, &[sge]));
                    let mut done = 0;
                    while done < 10 {
                        net.run(10_000);
                        done += net.ends[0].poll().len();
                    }
                }
                let took = (net.now - start) / 1_000_000;
                assert!(ms.contains(&took), "{typ:?}, {place}, rate {rate}, {rate_limit}: {took} ms");
            }
        }
    }
}

#[test]
fn datagrams_are_as_fast_as_their_addresses_say() {
    for (place, mut net) in places(QpType::Ud) {
        let (session, pd, to) = (net.ends[0].session, net.ends[0].pd, net.ends[1].qpn);
        let with_rate = |static_rate| abi::AhAttr { static_rate, ..address(gid(1)) };
        let [slow, fast] = [2, 0].map(|rate| net.rnic(0).create_ah(session, pd, &with_rate(rate)).unwrap());
        for (ah, ms) in [(slow, 2..5), (fast, 0..2)] {
            let (start, sge) = (net.now, net.ends[0].sge(0, 1000));
            for i in 0..1000 {
                net.ends[0].post_to(wqe(WrOpcode::Send, i), ah, to, &[sge]);
                while net.ends[0].poll().is_empty() {
                    net.run(500);
                }
            }
            let took = (net.now - start) / 1_000_000;
            assert!(ms.contains(&took), "{place}: {took} ms");
        }
    }
}

#[test]
fn a_rate_that_does_not_exist_is_refused() {
    let [(_, mut net), _] = places(QpType::Rc);
    let (session, pd, qpn) = (net.ends[0].session, net.ends[0].pd, net.ends[0].qpn);
    let to = abi::AhAttr { static_rate: 1, ..address(gid(1)) };
    assert_eq!(net.rnic(0).create_ah(session, pd, &to), Err(Status::BadValue));
    let sqd = abi::QpAttr { qp_state: 4, ah_attr: to, ..Default::default() };
    net.rnic(0).modify_qp(session, qpn, m::STATE, &sqd).unwrap();
    assert_eq!(net.rnic(0).modify_qp(session, qpn, m::AV, &sqd), Err(Status::BadValue));
    let other = abi::QpAttr { ah_attr: abi::AhAttr { static_rate: 2, ..to }, ..sqd };
    net.rnic(0).modify_qp(session, qpn, m::AV, &other).unwrap();
    assert_eq!(net.rnic(0).query_qp(session, qpn).unwrap().ah_attr.static_rate, 2);
}

/// Other rings for `entries` requests each way, with the requests that wait in the rings of an end.
fn rings_of(e: &End, ctrl_of: &QpRings, entries: u32) -> QpRings {
    let cap = abi::QpCap {
        max_send_wr: entries,
        max_recv_wr: entries,
        max_send_sge: 4,
        max_recv_sge: 4,
        max_inline_data: 256,
    };
    let layout = abi::QpLayout::of(&cap).unwrap();
    let rings = ctrl_of.with_rings(aligned(layout.sq_bytes()), aligned(layout.rq_bytes()), layout).unwrap();
    let mut wqe = vec![0; layout.sq_stride.max(layout.rq_stride) as usize];
    for i in 1..=entries.min(16) {
        let at = e.sq_prod.wrapping_sub(i);
        e.rings.sq_copy(at, &mut wqe);
        rings.sq_put(at, 0, &wqe[..layout.sq_stride as usize]);
        let at = e.rq_prod.wrapping_sub(i);
        e.rings.rq_copy(at, &mut wqe);
        rings.rq_put(at, 0, &wqe[..layout.rq_stride as usize]);
    }
    rings
}

#[test]
fn queues_change_their_size_under_work() {
    for (place, mut net) in places(QpType::Rc) {
        // Sends wait for receives at the other end, which posts them one by one.
        let sge = net.ends[0].sge(0, 3000);
        (0..10).for_each(|i| _ = net.ends[0].post(wqe(WrOpcode::Send, i), &[sge]));
        let to = net.ends[1].sge(0, 3000);
        (0..3).for_each(|i| net.ends[1].recv(i, &[to]));
        net.run(1_000_000);
        for (i, entries) in [(0, 64), (1, 32)] {
            let rings = rings_of(&net.ends[i], &net.ends[i].rings, entries);
            let (session, qpn) = (net.ends[i].session, net.ends[i].qpn);
            net.rnic(i).resize_qp(session, qpn, rings.clone()).unwrap();
            net.ends[i].rings = rings;
            assert_eq!(net.rnic(i).query_qp(session, qpn).unwrap().cap.max_send_wr, entries, "{place}");
        }
        (10..30).for_each(|i| _ = net.ends[0].post(wqe(WrOpcode::Send, i), &[sge]));
        (3..30).for_each(|i| net.ends[1].recv(i, &[to]));
        net.run(SECOND);
        for i in [0, 1] {
            let ids: Vec<(u64, u8)> = net.ends[i].poll().iter().map(|c| (c.wr_id, c.status)).collect();
            assert_eq!(ids, (0..30).map(|i| (i, 0)).collect::<Vec<_>>(), "{place}, end {i}");
        }
    }
}

#[test]
fn rings_that_do_not_hold_what_waits_are_refused() {
    let (_, mut net) = places(QpType::Rc).into_iter().next().unwrap();
    let to = net.ends[0].sge(0, 10);
    (0..5).for_each(|i| net.ends[0].recv(i, &[to]));
    let (session, qpn, other) = (net.ends[0].session, net.ends[0].qpn, net.ends[1].session);
    let small = rings_of(&net.ends[0], &net.ends[0].rings, 4);
    assert_eq!(net.rnic(0).resize_qp(session, qpn, small), Err(Status::BadValue));
    let fits = rings_of(&net.ends[0], &net.ends[0].rings, 8);
    assert_eq!(net.rnic(0).resize_qp(other, qpn, fits.clone()), Err(Status::BadHandle));
    net.rnic(0).resize_qp(session, qpn, fits).unwrap();
}

#[test]
fn the_target_of_an_xrc_connection_lives_as_long_as_one_program_has_it_open() {
    const FILE: OpenXrcd = OpenXrcd { key: Some((1, 2)), create: true, exclusive: false };
    for hosts in [1, 2] {
        let mut net = Net::hosts(hosts, &[QpType::XrcSend, QpType::Rc], 3, Faults::default());
        let (vrnic, first) = (net.ends[1].vrnic, net.ends[1].session);
        let other = End::of_vrnic(net.rnic(1), vrnic, 64, QpType::Rc);
        let own = net.ends.remove(1);
        let a = XrcSrq::new(net.rnic(1), &own, FILE);
        let mut b = XrcSrq::new(net.rnic(1), &other, FILE);
        net.ends.push(own);
        let qpn = connect_target(&mut net, 0, 1, a.xrcd, &|a| a);
        let second = other.session;
        assert_eq!(net.rnic(1).open_qp(second, a.xrcd, qpn), Err(Status::BadHandle));
        assert_eq!(net.rnic(1).open_qp(second, b.xrcd, qpn ^ 1), Err(Status::BadValue));
        assert_eq!(net.rnic(1).query_qp(second, qpn).err(), Some(Status::BadHandle));
        net.rnic(1).open_qp(second, b.xrcd, qpn).unwrap();
        net.rnic(1).remove_session(first);
        assert_eq!(net.rnic(1).query_qp(second, qpn).unwrap().qp_state, 3, "it lives on");
        b.recv(4, &[other.sge(0, 4000)]);
        let sge = net.ends[0].sge(0, 3000);
        net.ends[0].post(abi::SqWqe { dest_qpn: b.number, ..wqe(WrOpcode::Send, 1) }, &[sge]);
        net.run(SECOND);
        assert_eq!(net.ends[0].done().status, 0, "{hosts} hosts");
        net.rnic(1).destroy_qp(second, qpn).unwrap();
        assert_eq!(net.rnic(1).query_qp(second, qpn).err(), Some(Status::BadHandle));
    }
}
