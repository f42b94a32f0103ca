//! Rules between groups, and within one. What they allow works on one host and between two. What they do not allow, or
//! no longer allow, fails as on a network without a route.

use unirdma_abi as abi;
use unirdma_abi::{CmOp, Status};
use unirdma_formats::{Gid, QpState, QpType, WcStatus, WrOpcode, attr_mask};
use unirdma_rnic::CmEventKind::*;
use unirdma_simkit::cm::*;
use unirdma_simkit::net::{Net, gid};
use unirdma_simkit::*;

const BOTH: &str = "allow from group:red to group:blue both";
const ONE_WAY: &str = "allow from group:red to group:blue";

/// Ends of this type in red, blue and green, on one host and on two.
fn each(typ: QpType) -> [(&'static str, Net); 2] {
    [1, 2].map(|n| (["one host", "two hosts"][n - 1], Net::groups(n, &[typ; 3], &[0, 1, 2], |end| end % n)))
}

/// Tries to take the QP of end `a` to RTR, connected to `b`.
fn reach(net: &mut Net, typ: QpType, a: usize, b: usize) -> Result<(), Status> {
    let (s, qpn) = (net.session(a), net.ends[a].qpn);
    let steps = attrs_of(typ, net.ends[b].qpn, gid(b));
    net.rnic(a).modify_qp(s, qpn, attr_mask::STATE, &abi::QpAttr::default()).unwrap();
    steps[..2].iter().try_for_each(|(mask, attr)| net.rnic(a).modify_qp(s, qpn, *mask, attr))
}

fn connect(net: &mut Net, typ: QpType) {
    net.connect(typ, 0, 1, &|a| a);
    net.connect(typ, 1, 0, &|a| a);
}

/// Takes the QPs of ends 0 and 1 to RESET.
fn reset(net: &mut Net) {
    for end in [0, 1] {
        let (s, qpn) = (net.session(end), net.ends[end].qpn);
        net.rnic(end).modify_qp(s, qpn, attr_mask::STATE, &abi::QpAttr::default()).unwrap();
        (net.ends[end].sq_prod, net.ends[end].rq_prod) = (0, 0);
    }
}

/// Statuses of all completions of an end.
fn statuses(net: &mut Net, end: usize) -> Vec<WcStatus> {
    net.ends[end].poll().iter().map(status).collect()
}

fn write(net: &mut Net, wr_id: u64) {
    let (from, w) = (net.ends[0].sge(0, 5000), net.remote(WrOpcode::Write, wr_id, 0));
    net.ends[0].post(w, &[from]);
}

fn refused(net: &Net, end: usize) -> u64 {
    net.counters(end).refused
}

#[test]
fn only_a_rule_joins_two_groups_and_a_third_one_stays_outside() {
    for (place, mut net) in each(QpType::Rc) {
        assert_eq!(reach(&mut net, QpType::Rc, 0, 1), Err(Status::Unreachable), "{place}");
        assert_eq!(refused(&net, 0), 1, "{place}");
        // QPs that are connected by hand have no side that begins: either direction will do.
        for rule in [BOTH, ONE_WAY, "allow from group:blue to group:red"] {
            net.rules(&[rule]);
            connect(&mut net, QpType::Rc);
            write(&mut net, 1);
            net.run(SECOND);
            assert_eq!(statuses(&mut net, 0), [WcStatus::Success], "{place}: {rule}");
            for (a, b) in [(0, 2), (2, 0), (1, 2), (2, 1)] {
                let (s, pd) = (net.session(a), net.ends[a].pd);
                assert_eq!(
                    net.rnic(a).create_ah(s, pd, &address(gid(b))),
                    Err(Status::Unreachable),
                    "{place}: {a} {b}"
                );
            }
            reset(&mut net);
        }
    }
}

#[test]
fn a_connection_that_loses_its_rule_fails_as_one_that_has_lost_its_way() {
    for (place, mut net) in each(QpType::Rc) {
        net.rules(&[BOTH]);
        connect(&mut net, QpType::Rc);
        let to = net.ends[1].sge(0, 100);
        net.ends[1].recv(9, &[to]);
        // Three writes are under way, of which none has arrived.
        (1..4).for_each(|n| write(&mut net, n));
        net.run(0);
        net.rules(&[]);
        net.run(SECOND / 10);
        let ended = [WcStatus::RetryExcErr, WcStatus::WrFlushErr, WcStatus::WrFlushErr];
        assert_eq!(statuses(&mut net, 0), ended, "{place}");
        assert_eq!(statuses(&mut net, 1), [WcStatus::WrFlushErr], "{place}");
        assert_eq!([0, 1].map(|e| net.state(e)), [QpState::Err as u8; 2], "{place}");
        assert_eq!(net.ends[1].bytes(0, 8), [0; 8], "{place}: nothing came through");
        assert_eq!((refused(&net, 0), refused(&net, 1)), (1, 1), "{place}");
        assert_eq!(reach(&mut net, QpType::Rc, 0, 1), Err(Status::Unreachable), "{place}");
        // With the rule back in force, all is as at first.
        net.rules(&[BOTH]);
        reset(&mut net);
        connect(&mut net, QpType::Rc);
        write(&mut net, 1);
        net.run(SECOND);
        assert_eq!(statuses(&mut net, 0), [WcStatus::Success], "{place}");
    }
}

#[test]
fn another_rule_ends_nobody_elses_connection() {
    for (place, mut net) in each(QpType::Rc) {
        net.rules(&[BOTH]);
        connect(&mut net, QpType::Rc);
        net.rules(&[ONE_WAY, "allow from group:green to group:blue", "deny from group:green to group:red"]);
        write(&mut net, 1);
        net.run(SECOND);
        assert_eq!(statuses(&mut net, 0), [WcStatus::Success], "{place}");
        assert_eq!([0, 1].map(|e| net.state(e)), [QpState::Rts as u8; 2], "{place}");
    }
}

#[test]
fn a_denial_within_a_group_ends_what_it_hits_and_spares_the_rest() {
    for hosts in [1, 2] {
        let mut net = Net::groups(hosts, &[QpType::Rc; 4], &[0; 4], |end| end % hosts);
        for (a, b) in [(0, 1), (2, 3)] {
            net.connect(QpType::Rc, a, b, &|a| a);
            net.connect(QpType::Rc, b, a, &|a| a);
        }
        // It was posted, but the device has not taken it yet.
        write(&mut net, 1);
        net.rules(&["deny from vrnic:red/10.0.0.1 to group:red both"]);
        net.run(SECOND);
        assert_eq!(statuses(&mut net, 0), [WcStatus::RetryExcErr], "{hosts} hosts");
        let states = [0, 1, 2, 3].map(|e| net.state(e));
        assert_eq!(states.map(|s| s == QpState::Err as u8), [true, true, false, false], "{hosts} hosts");
        assert_eq!(reach(&mut net, QpType::Rc, 0, 2), Err(Status::Unreachable), "{hosts} hosts");
        // It may still talk to itself.
        let (s, pd) = (net.session(0), net.ends[0].pd);
        assert!(net.rnic(0).create_ah(s, pd, &address(gid(0))).is_ok());
    }
}

#[test]
fn an_idle_connection_ends_and_an_unreliable_one_loses_what_it_sends() {
    for (place, mut net) in each(QpType::Rc) {
        net.rules(&[BOTH]);
        connect(&mut net, QpType::Rc);
        net.rules(&[]);
        net.run(SECOND / 10);
        assert_eq!([0, 1].map(|e| net.state(e)), [QpState::Err as u8; 2], "{place}");
        // The program learns the reason from its next requests.
        (1..3).for_each(|n| write(&mut net, n));
        net.run(SECOND / 10);
        assert_eq!(statuses(&mut net, 0), [WcStatus::RetryExcErr, WcStatus::WrFlushErr], "{place}");
    }
    for (place, mut net) in each(QpType::Uc) {
        net.rules(&[BOTH]);
        connect(&mut net, QpType::Uc);
        for (rules, arrives) in [(&[][..], false), (&[BOTH][..], true)] {
            net.rules(rules);
            net.ends[1].fill(0, &[0; 8]);
            net.ends[0].fill(0, &[7; 8]);
            write(&mut net, 1);
            net.run(SECOND / 10);
            assert_eq!(statuses(&mut net, 0), [WcStatus::Success], "{place}");
            assert_eq!(net.ends[1].bytes(0, 8) == [7; 8], arrives, "{place}");
        }
    }
}

#[test]
fn one_way_a_datagram_may_be_answered_and_a_rule_that_goes_cuts_address_handles() {
    for (place, mut net) in each(QpType::Ud) {
        (0..2).for_each(|end| net.connect(QpType::Ud, end, 1 - end, &|a| a));
        net.rules(&[ONE_WAY]);
        let send = |net: &mut Net, from: usize, ah: u32| {
            let to = net.ends[1 - from].sge(0, 200);
            net.ends[1 - from].recv(1, &[to]);
            let (sge, qpn) = (net.ends[from].sge(0, 100), net.ends[1 - from].qpn);
            net.ends[from].post_to(wqe(WrOpcode::Send, 2), ah, qpn, &[sge]);
            net.run(SECOND / 10);
            assert_eq!(statuses(net, from), [WcStatus::Success], "{place}");
            statuses(net, 1 - from).len()
        };
        // Blue may not begin.
        let (s, pd) = (net.session(1), net.ends[1].pd);
        assert_eq!(net.rnic(1).create_ah(s, pd, &address(gid(0))), Err(Status::Unreachable), "{place}");
        let out = net.ah(0, 1);
        assert_eq!(send(&mut net, 0, out), 1, "{place}");
        let back = net.ah(1, 0);
        assert_eq!(send(&mut net, 1, back), 1, "{place}: the answer");
        net.rules(&[]);
        assert_eq!(send(&mut net, 0, out), 0, "{place}: without a rule");
        net.ends[1].poll();
        net.rules(&[BOTH]);
        assert_eq!(send(&mut net, 0, out), 1, "{place}: again");
    }
}

#[test]
fn multicast_reaches_those_to_whom_its_sender_may_begin_to_talk() {
    for (place, mut net) in each(QpType::Ud) {
        let group = Gid::from_ip([239, 1, 2, 3].into());
        for end in 0..3 {
            net.connect(QpType::Ud, end, 0, &|a| a);
            let (s, qpn) = (net.session(end), net.ends[end].qpn);
            net.rnic(end).attach_mcast(s, qpn, group).unwrap();
        }
        for (rule, from, heard) in [(ONE_WAY, 0, [1, 1, 0]), (ONE_WAY, 1, [0, 1, 0]), (BOTH, 1, [1, 1, 0])] {
            net.rules(&[rule]);
            for end in 0..3 {
                let to = net.ends[end].sge(0, 200);
                net.ends[end].recv(1, &[to]);
            }
            let (s, pd) = (net.session(from), net.ends[from].pd);
            let ah = net.rnic(from).create_ah(s, pd, &address(group)).unwrap();
            let sge = net.ends[from].sge(0, 100);
            net.ends[from].post_to(wqe(WrOpcode::Send, 2), ah, 0xff_ffff, &[sge]);
            net.run(SECOND / 10);
            let mut got = [0, 1, 2].map(|end| net.ends[end].poll().len());
            got[from] -= 1;
            assert_eq!(got, heard, "{place}: {rule}, from {from}");
        }
    }
}

#[test]
fn one_way_a_connection_is_asked_for_and_ends_when_its_rule_goes() {
    for (place, mut cm) in Cm::apart() {
        cm.net.rules(&["allow from group:blue to group:red"]);
        let id = cm.ask(0, CmOp::Create, 0, |_| ()).unwrap();
        cm.ask(0, CmOp::ResolveAddr, id, |r| (r.dst, r.value) = (addr(2, PORT), 100)).unwrap();
        cm.net.run(SECOND);
        cm.event(0, AddrError);
        cm.net.rules(&[ONE_WAY]);
        let (a, _) = cm.connected();
        write(&mut cm.net, 1);
        cm.net.run(SECOND / 10);
        assert_eq!(statuses(&mut cm.net, 0), [WcStatus::Success], "{place}");
        cm.net.rules(&[]);
        cm.net.run(SECOND / 10);
        cm.event(0, Disconnected);
        cm.event(1, Disconnected);
        assert_eq!([0, 1].map(|e| cm.net.state(e)), [QpState::Err as u8; 2], "{place}");
        cm.ask(0, CmOp::Destroy, a, |_| ()).unwrap();
    }
}

/// A QP that guesses the number of a QP of another group, on a host that it may send to, reaches nothing, because the
/// P_Keys differ.
#[test]
fn a_packet_for_the_qp_of_another_group_is_dropped() {
    let mut net = Net::groups(2, &[QpType::Rc; 4], &[0, 1, 2, 2], |end| usize::from(end == 1 || end == 3));
    net.rules(&[BOTH]);
    net.connect(QpType::Rc, 3, 2, &|a| a);
    // Red says that its peer is blue's, but names green's QP, which is connected to the same host.
    let (s, qpn, victim) = (net.session(0), net.ends[0].qpn, net.ends[3].qpn);
    for (mask, attr) in attrs_of(QpType::Rc, victim, gid(1)) {
        net.rnic(0).modify_qp(s, qpn, mask, &attr).unwrap();
    }
    let (from, w) =
        (net.ends[0].sge(0, 100), abi::SqWqe { remote_addr: IOVA, rkey: net.ends[3].key, ..wqe(WrOpcode::Write, 1) });
    net.ends[0].post(w, &[from]);
    net.run(SECOND);
    assert_eq!(statuses(&mut net, 0), [WcStatus::RetryExcErr]);
    assert!(net.rnics[1].wire_drops().bad_pkey >= 4, "{:?}", net.rnics[1].wire_drops());
    assert_eq!(net.counters(3).wire.rcvd_pkts, 0);
}
