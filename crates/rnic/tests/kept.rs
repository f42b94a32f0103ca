//! Memory that is kept for a vRNIC is on its account, has a limit, and is always given back.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use unirdma_abi as abi;
use unirdma_abi::{CmOp, Status};
use unirdma_formats::{QpType, WrOpcode};
use unirdma_rnic::Account;
use unirdma_simkit::cm::addr;
use unirdma_simkit::net::{Faults, Net, gid};
use unirdma_simkit::*;

/// An account of `most` bytes.
struct Limited {
    most: usize,
    used: AtomicUsize,
}

impl Limited {
    fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// The account of an end's vRNIC from now on.
    fn of(net: &mut Net, end: usize, most: usize) -> Arc<Limited> {
        let account = Arc::new(Limited { most, used: AtomicUsize::new(0) });
        let shared: Arc<dyn Account> = account.clone();
        let vrnic = net.ends[end].vrnic;
        net.rnic(end).set_account(vrnic, &shared);
        account
    }
}

impl Account for Limited {
    fn take(&self, bytes: usize) -> bool {
        let enough = self.used() + bytes <= self.most;
        if enough {
            self.force(bytes);
        }
        enough
    }

    fn force(&self, bytes: usize) {
        self.used.fetch_add(bytes, Ordering::Relaxed);
    }

    fn give(&self, bytes: usize) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// Two UD QPs on one host, and on two.
fn places() -> Vec<(&'static str, Net)> {
    let mut one = Net::hosts(1, &[QpType::Ud; 2], 9, Faults::default());
    one.connect(QpType::Ud, 0, 1, &|a| a);
    one.connect(QpType::Ud, 1, 0, &|a| a);
    vec![("one host", one), ("two hosts", Net::of_type(QpType::Ud, 9, Faults::default(), |a| a))]
}

/// End 0 sends `datagrams` datagrams to a QP of end 1, which takes little time.
fn send(net: &mut Net, ah: u32, dest: u32, datagrams: usize, length: u32) {
    let sge = net.ends[0].sge(0, length);
    for i in 0..datagrams {
        net.ends[0].post_to(wqe(WrOpcode::Send, 1), ah, dest, &[sge]);
        if i % 16 == 15 || i + 1 == datagrams {
            net.run(5_000);
            net.ends[0].poll();
        }
    }
}

#[test]
fn datagrams_without_receives_are_gone_when_their_time_is_over() {
    for pauses in [false, true] {
        for (place, mut net) in places() {
            let account = Limited::of(&mut net, 1, usize::MAX);
            let (ah, dest, session) = (net.ah(0, 1), net.ends[1].qpn, net.ends[1].session);
            send(&mut net, ah, dest, 100, 1000);
            assert!((100_000..130_000).contains(&account.used()), "{place}: {}", account.used());
            if pauses {
                net.rnic(1).pause_session(session);
            }
            net.run(20_000_000);
            assert_eq!((account.used(), net.counters(1).dropped), (0, 100), "{place}");
        }
    }
}

/// A QP without receives keeps at most 1 MiB, and other QPs of its vRNIC keep as much.
#[test]
fn a_qp_keeps_a_part_of_what_its_vrnic_may() {
    const MIB: usize = 1 << 20;
    for (place, mut net) in places() {
        let account = Limited::of(&mut net, 1, usize::MAX);
        let (ah, dest, vrnic) = (net.ah(0, 1), net.ends[1].qpn, net.ends[1].vrnic);
        send(&mut net, ah, dest, 300, 4096);
        let one = account.used();
        assert!((MIB - 8192..=MIB).contains(&one), "{place}: {one}");
        let more: Vec<End> = (0..20)
            .map(|_| {
                let e = End::of_vrnic(net.rnic(1), vrnic, 64, QpType::Ud);
                for (mask, attr) in attrs_of(QpType::Ud, 0, gid(0)) {
                    net.rnic(1).modify_qp(e.session, e.qpn, mask, &attr).unwrap();
                }
                e
            })
            .collect();
        for e in &more {
            let before = account.used();
            send(&mut net, ah, e.qpn, 260, 4096);
            let left = 16 * MIB - before;
            let kept = account.used() - before;
            assert!((left / 2 - 8192..=left / 2).contains(&kept) || kept > MIB - 8192, "{place}: {kept} of {left}");
        }
        assert!(account.used() <= 16 * MIB, "{place}");
        // The datagrams that wait at a QP are freed with it, and at the end nothing is left.
        let before = account.used();
        net.rnic(1).destroy_qp(more[0].session, more[0].qpn).unwrap();
        drop(net.rnic(1).take_dropped());
        assert_eq!(before - account.used(), one, "{place}");
        for session in more.iter().map(|e| e.session).chain([net.ends[1].session]) {
            net.rnic(1).remove_session(session);
        }
        drop(net.rnic(1).take_dropped());
        assert_eq!(account.used(), 0, "{place}");
    }
}

/// A stage is on the account, and so are its records, while they are in use and until the session ends.
#[test]
fn a_stage_is_on_the_account() {
    let (_, mut net) = places().remove(0);
    let account = Limited::of(&mut net, 1, 20_000);
    let session = net.ends[1].session;
    assert_eq!(net.rnic(1).set_stage(session, aligned(64 << 20)), Err(Status::Exhausted));
    net.rnic(1).set_stage(session, aligned(8 << 20)).unwrap();
    assert_eq!(account.used(), 2 * (8 << 20) / 128 / 8);
    net.rnic(1).remove_session(session);
    assert_eq!(account.used(), 0);
}

/// Events of connection management that no program fetches.
#[test]
fn events_of_connections_are_on_the_account() {
    const EVENT: usize = size_of::<abi::CmEvent>();
    let mut net = Net::hosts(1, &[QpType::Ud; 2], 9, Faults::default());
    let account = Limited::of(&mut net, 1, usize::MAX);
    let session = net.ends[1].session;
    let group =
        abi::CmAddr { ip: Ipv4Addr::new(239, 1, 1, 1).to_ipv6_mapped().octets(), family: 4, ..Default::default() };
    let ask = |net: &mut Net, op: CmOp, id: u32, queue: u32| {
        let (src, port_space) = (addr(2, 0), abi::port_space::UDP);
        let r = abi::CmReq { op: op as u8, id, queue, port_space, src, dst: group, ..Default::default() };
        net.rnic(1).cm(session, &r)
    };
    let ids = [3, 4].map(|queue| {
        let id = ask(&mut net, CmOp::Create, 0, queue).unwrap().id;
        ask(&mut net, CmOp::Bind, id, queue).unwrap();
        id
    });
    (0..1000).for_each(|_| _ = ask(&mut net, CmOp::Join, ids[0], 3).unwrap());
    let more = (0..).take_while(|_| ask(&mut net, CmOp::Join, ids[1], 4).is_ok()).count();
    assert_eq!((more, account.used()), (1048, 2048 * EVENT));
    assert_eq!(ask(&mut net, CmOp::Join, ids[0], 3), Err(Status::Exhausted), "of all queues together");
    net.rnic(1).cm_event(session, 3).unwrap();
    ask(&mut net, CmOp::Join, ids[0], 3).unwrap();
    // They move to another queue, are fetched, or go with their identifier.
    assert_eq!(ask(&mut net, CmOp::Migrate, ids[0], 4).unwrap().dropped, 1000);
    assert_eq!(account.used(), 2048 * EVENT);
    (0..48).for_each(|_| _ = net.rnic(1).cm_event(session, 4).unwrap());
    assert_eq!(ask(&mut net, CmOp::Destroy, ids[1], 0).unwrap().dropped, 1000);
    assert_eq!(account.used(), 1000 * EVENT);
    net.rnic(1).remove_session(session);
    assert_eq!(account.used(), 0);
}

/// Copies of requests that get no answer. Without room there are few at a time.
#[test]
fn requests_under_way_are_on_the_account() {
    for most in [usize::MAX, 0] {
        let mut net = Net::of_type(QpType::Rc, 9, Faults::default(), |a| a);
        let account = Limited::of(&mut net, 0, most);
        let (sge, to) = (net.ends[0].sge(0, 100), net.ends[1].sge(0, 200));
        net.cut(1, true);
        (0..16).for_each(|id| _ = net.ends[0].post(wqe(WrOpcode::Send, id), &[sge]));
        (0..16).for_each(|id| net.ends[1].recv(id, &[to]));
        net.run(1_000_000);
        assert_eq!(account.used() > 16 << 10, most > 0);
        net.cut(1, false);
        net.run(SECOND);
        assert_eq!((net.ends[0].poll().len(), net.ends[1].poll().len(), account.used()), (16, 16, 0));
    }
}

/// If the account is full, datagrams without a receive are lost, and datagrams with a receive arrive.
#[test]
fn a_full_account_costs_datagrams_that_find_no_receive() {
    for (place, mut net) in places() {
        let account = Limited::of(&mut net, 1, 10_000);
        let (ah, dest, to) = (net.ah(0, 1), net.ends[1].qpn, net.ends[1].sge(0, 5000));
        send(&mut net, ah, dest, 30, 1000);
        assert!((8_000..=10_000).contains(&account.used()), "{place}");
        assert!(net.counters(1).dropped >= 20, "{place}");
        net.run(20_000_000);
        (0..10).for_each(|id| net.ends[1].recv(id, &[to]));
        net.run(100_000);
        send(&mut net, ah, dest, 10, 4000);
        assert_eq!((net.ends[1].poll().len(), account.used()), (10, 0), "{place}");
    }
}
