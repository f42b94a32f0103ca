//! Quotas of a vRNIC: each can be reached, affects its own vRNIC only, and is available again when an object is
//! destroyed.

use unirdma_abi as abi;
use unirdma_abi::Status;
use unirdma_formats::QpType;
use unirdma_mem::{CqRing, ProcMem, QpRings};
use unirdma_rnic::{Backing, CreateQp, Limits, OpenXrcd, Rnic, SessionId, Share, SrqAttr, VrnicConfig};
use unirdma_simkit::*;

const FEW: u32 = 3;

/// Makes an object, given a PD and a CQ; returns its number.
type Make = fn(&mut Rnic, SessionId, u32, u32) -> Result<u32, Status>;
type Destroy = fn(&mut Rnic, SessionId, u32) -> Result<(), Status>;

fn rings() -> QpRings {
    let layout = abi::QpLayout::of(&cap()).unwrap();
    QpRings::new(aligned(128), aligned(layout.sq_bytes()), aligned(layout.rq_bytes()), layout).unwrap()
}

fn cap() -> abi::QpCap {
    abi::QpCap { max_send_wr: 4, max_recv_wr: 4, max_send_sge: 1, max_recv_sge: 1, max_inline_data: 0 }
}

fn create_qp(r: &mut Rnic, s: SessionId, pd: u32, cq: u32) -> Result<u32, Status> {
    create_qp_of(QpType::Rc, r, s, pd, cq)
}

fn create_qp_of(typ: QpType, r: &mut Rnic, s: SessionId, pd: u32, cq: u32) -> Result<u32, Status> {
    let create = CreateQp {
        pd,
        send_cq: cq,
        recv_cq: cq,
        srq: None,
        xrcd: None,
        door: 0,
        sig_all: false,
        cap: cap(),
        rings: rings(),
    };
    r.create_qp(s, typ as u8, create).map(|q| q.0)
}

fn create_srq(r: &mut Rnic, s: SessionId, pd: u32, _: u32) -> Result<u32, Status> {
    let layout = abi::QpLayout::of(&cap()).unwrap();
    let rings = QpRings::receive_only(aligned(128), aligned(layout.rq_bytes()), layout).unwrap();
    r.create_srq(s, pd, SrqAttr { max_wr: 4, max_sge: 1, limit: 0, xrc: None }, rings).map(|q| q.0)
}

fn reg_mr(r: &mut Rnic, s: SessionId, pd: u32, bytes: u64) -> Result<u32, Status> {
    r.reg_mr(s, pd, 1, 0, bytes, (Backing::Mapped(aligned(bytes as usize)), Vec::new())).map(|m| m.0)
}

const OBJECTS: [(&str, Make, Destroy); 8] = [
    ("PD", |r, s, _, _| r.create_pd(s), |r, s, n| r.destroy_pd(s, n)),
    (
        "CQ",
        |r, s, _, _| r.create_cq(s, CqRing::new(aligned(128), aligned(64 * 4), 4).unwrap(), None),
        |r, s, n| r.destroy_cq(s, n),
    ),
    ("QP", create_qp, |r, s, n| r.destroy_qp(s, n)),
    ("MR", |r, s, pd, _| reg_mr(r, s, pd, 8), |r, s, n| r.dereg_mr(s, n)),
    ("MW", |r, s, pd, _| r.alloc_mw(s, pd, 1).map(|m| m.0), |r, s, n| r.dealloc_mw(s, n)),
    ("AH", |r, s, pd, _| r.create_ah(s, pd, &address(ip(1))), |r, s, n| r.destroy_ah(s, n)),
    ("SRQ", create_srq, |r, s, n| r.destroy_srq(s, n)),
    (
        "XRCD",
        |r, s, _, _| r.create_xrcd(s, OpenXrcd { create: true, ..OpenXrcd::default() }),
        |r, s, n| r.destroy_xrcd(s, n),
    ),
];

/// A session with a PD and a CQ.
fn session(r: &mut Rnic, vrnic: unirdma_rnic::VrnicId) -> (SessionId, u32, u32) {
    let s = r.add_session(vrnic).unwrap();
    r.set_doorbell(s, unirdma_mem::Bell::new(aligned(4096)).unwrap()).unwrap();
    let cq = r.create_cq(s, CqRing::new(aligned(128), aligned(64 * 4), 4).unwrap(), None).unwrap();
    (s, r.create_pd(s).unwrap(), cq)
}

#[test]
fn every_quota_is_reached_and_freed() {
    let few = Limits {
        max_qp: FEW,
        max_cq: FEW + 2,
        max_mr: FEW,
        max_pd: FEW + 2,
        max_ah: FEW,
        max_srq: FEW,
        max_mr_bytes: 1000,
        ..Limits::default()
    };
    let mut r = Rnic::new(1, 0);
    let mut vrnic =
        |n, limits| r.add_vrnic(VrnicConfig { group: 0, gids: vec![ip(n)], limits, share: Share::default() }).unwrap();
    let (tight, free) = (vrnic(1, few), vrnic(2, Limits::default()));
    // Two programs share the quota of their vRNIC.
    let (a, b, other) = (session(&mut r, tight), session(&mut r, tight), session(&mut r, free));
    for (what, make, destroy) in OBJECTS {
        let mut made = Vec::new();
        let refused = loop {
            let (s, pd, cq) = [a, b][made.len() % 2];
            match make(&mut r, s, pd, cq) {
                Ok(n) => made.push((s, n)),
                Err(e) => break e,
            }
        };
        assert_eq!(refused, Status::Exhausted, "{what}");
        let limit = if what == "XRCD" { FEW + 2 } else { FEW };
        assert_eq!(made.len(), limit as usize, "{what}");
        make(&mut r, other.0, other.1, other.2).unwrap_or_else(|e| panic!("{what}: {e:?}"));
        let (s, n) = made.pop().unwrap();
        destroy(&mut r, s, n).unwrap();
        assert_eq!(destroy(&mut r, s, n), Err(Status::BadHandle), "{what}");
        made.push((a.0, make(&mut r, a.0, a.1, a.2).unwrap()));
        for (s, n) in made {
            destroy(&mut r, s, n).unwrap();
        }
    }
    let mr = reg_mr(&mut r, a.0, a.1, 600).unwrap();
    assert_eq!(reg_mr(&mut r, b.0, b.1, 401), Err(Status::Exhausted));
    reg_mr(&mut r, b.0, b.1, 400).unwrap();
    r.dereg_mr(a.0, mr).unwrap();
    reg_mr(&mut r, b.0, b.1, 600).unwrap();
}

/// A doorbell page has a bit for each QP of its session, and no more.
#[test]
fn a_session_has_as_many_qps_as_doorbell_bits() {
    let mut r = Rnic::new(1, 0);
    let vrnic = r
        .add_vrnic(VrnicConfig { group: 0, gids: vec![ip(1)], limits: Limits::default(), share: Share::default() })
        .unwrap();
    let (a, b) = (session(&mut r, vrnic), session(&mut r, vrnic));
    let qps: Vec<u32> = (0..abi::MAX_QP).map(|_| create_qp(&mut r, a.0, a.1, a.2).unwrap()).collect();
    assert_eq!(create_qp(&mut r, a.0, a.1, a.2), Err(Status::Exhausted));
    create_qp(&mut r, b.0, b.1, b.2).unwrap();
    r.destroy_qp(a.0, qps[7]).unwrap();
    create_qp(&mut r, a.0, a.1, a.2).unwrap();
}

#[test]
fn a_multicast_group_has_room_for_so_many_qps() {
    let mut r = Rnic::new(1, 0);
    let vrnic = r
        .add_vrnic(VrnicConfig { group: 0, gids: vec![ip(1)], limits: Limits::default(), share: Share::default() })
        .unwrap();
    let (s, pd, cq) = session(&mut r, vrnic);
    let group = unirdma_formats::Gid::from_ip("239.1.1.1".parse().unwrap());
    let attach = |r: &mut Rnic| {
        let qpn = create_qp_of(QpType::Ud, r, s, pd, cq).unwrap();
        r.attach_mcast(s, qpn, group).map(|()| qpn)
    };
    let qps: Vec<u32> = (0..unirdma_rnic::MAX_MULTICAST_QPS).map(|_| attach(&mut r).unwrap()).collect();
    assert_eq!(attach(&mut r), Err(Status::Exhausted));
    r.detach_mcast(s, qps[0], group).unwrap();
    attach(&mut r).unwrap();
}

/// A QP may be attached to 64 groups. The quota of a vRNIC has 64 attachments for each of 1024 QPs.
#[test]
fn attachments_to_multicast_groups_have_a_quota() {
    let mut r = Rnic::new(1, 0);
    let vrnic = |r: &mut Rnic, n| {
        let limits = Limits::default();
        r.add_vrnic(VrnicConfig { group: 0, gids: vec![ip(n)], limits, share: Share::default() }).unwrap()
    };
    let (mine, others) = (vrnic(&mut r, 1), vrnic(&mut r, 2));
    let (mine, others) = (session(&mut r, mine), session(&mut r, others));
    let gid = |qp: usize, n: u8| unirdma_formats::Gid::from_ip([239, (qp >> 8) as u8, qp as u8, n].into());
    let mut qps = Vec::new();
    let refused = (0..).find_map(|i| {
        let qpn = create_qp_of(QpType::Ud, &mut r, mine.0, mine.1, mine.2).unwrap();
        qps.push(qpn);
        (0..64).find_map(|n| r.attach_mcast(mine.0, qpn, gid(i, n)).err())
    });
    assert_eq!((refused, qps.len()), (Some(Status::Exhausted), 1025));
    let qpn = create_qp_of(QpType::Ud, &mut r, others.0, others.1, others.2).unwrap();
    assert!((0..64).all(|n| r.attach_mcast(others.0, qpn, gid(0, n)).is_ok()), "others have their own");
    assert_eq!(r.attach_mcast(others.0, qpn, gid(0, 64)), Err(Status::Exhausted));
    // An attachment is given back with its QP, and when the QP leaves a group.
    r.destroy_qp(mine.0, qps[0]).unwrap();
    assert!((0..64).all(|n| r.attach_mcast(mine.0, qps[1024], gid(2000, n)).is_ok()));
    r.detach_mcast(mine.0, qps[1], gid(1, 0)).unwrap();
    r.attach_mcast(mine.0, qps[1], gid(1, 1)).unwrap();
    r.attach_mcast(mine.0, qps[1], gid(1, 64)).unwrap();
}

/// A session with many objects is freed in parts, and others have the RNIC in between.
#[test]
fn a_program_that_ends_frees_all_of_its_quota() {
    let few = Limits {
        max_qp: 1,
        max_cq: 2,
        max_mr: 1,
        max_pd: 2,
        max_ah: 1,
        max_srq: 1,
        max_mr_bytes: 8,
        ..Limits::default()
    };
    let mut r = Rnic::new(1, 0);
    let vrnic = r.add_vrnic(VrnicConfig { group: 0, gids: vec![ip(1)], limits: few, share: Share::default() }).unwrap();
    for round in 0..3 {
        let (s, pd, cq) = session(&mut r, vrnic);
        for (what, make, _) in OBJECTS.into_iter().filter(|o| o.0 != "MW") {
            make(&mut r, s, pd, cq).unwrap_or_else(|e| panic!("{round}, {what}: {e:?}"));
        }
        r.remove_session(s);
        assert_eq!(r.usage(vrnic), unirdma_rnic::Usage::default());
    }
}

/// An object that another object uses cannot be destroyed.
#[test]
fn uses_are_counted() {
    let mut r = Rnic::new(1, 0);
    let vrnic = r
        .add_vrnic(VrnicConfig { group: 0, gids: vec![ip(1)], limits: Limits::default(), share: Share::default() })
        .unwrap();
    let (s, pd, cq) = session(&mut r, vrnic);
    for (what, make, destroy) in OBJECTS.into_iter().filter(|o| !["PD", "CQ", "XRCD"].contains(&o.0)) {
        let n = make(&mut r, s, pd, cq).unwrap();
        assert_eq!(r.destroy_pd(s, pd), Err(Status::Busy), "{what}");
        if what == "QP" {
            assert_eq!(r.destroy_cq(s, cq), Err(Status::Busy));
        }
        destroy(&mut r, s, n).unwrap();
    }
    // REREG_MR to another PD takes the use with it.
    let second = r.create_pd(s).unwrap();
    let (mr, by) = (reg_mr(&mut r, s, pd, 8).unwrap(), reg_mr(&mut r, s, second, 16).unwrap());
    r.rereg_mr(s, mr, by).unwrap();
    r.destroy_pd(s, pd).unwrap();
    assert_eq!(r.destroy_pd(s, second), Err(Status::Busy));
    r.dereg_mr(s, mr).unwrap();
    r.destroy_pd(s, second).unwrap();
    r.destroy_cq(s, cq).unwrap();
    assert_eq!(r.usage(vrnic), unirdma_rnic::Usage { sessions: 1, ..Default::default() });
}

/// Counters of mapped memory, of copied memory, and of windows, which are neither.
#[test]
fn memory_is_counted_by_the_way_that_it_is_reached() {
    let mut r = Rnic::new(1, 0);
    let vrnic = r
        .add_vrnic(VrnicConfig { group: 0, gids: vec![ip(1)], limits: Limits::default(), share: Share::default() })
        .unwrap();
    let (s, pd, _) = session(&mut r, vrnic);
    let used = |r: &Rnic| {
        let u = r.usage(vrnic);
        (u.mrs_mapped, u.bytes_mapped, u.mrs_copied, u.bytes_copied)
    };
    let process = || (Backing::Process(ProcMem::of_self().unwrap(), 0), vec![]);
    let mapped = reg_mr(&mut r, s, pd, 100).unwrap();
    let copied = r.reg_mr(s, pd, 1, 0, 7, process()).unwrap().0;
    // The whole memory of a process does not count as bytes.
    let whole = r.reg_mr(s, pd, 1, 0, u64::MAX >> 1, process()).unwrap().0;
    let window = r.alloc_mw(s, pd, 1).unwrap().0;
    assert_eq!(used(&r), (1, 100, 2, 7));
    // MR `mapped` gets the memory of MR `copied`.
    r.rereg_mr(s, mapped, copied).unwrap();
    assert_eq!(used(&r), (0, 0, 2, 7));
    r.dealloc_mw(s, window).unwrap();
    r.dereg_mr(s, whole).unwrap();
    assert_eq!(used(&r), (0, 0, 1, 7));
    r.dereg_mr(s, mapped).unwrap();
    assert_eq!(used(&r), (0, 0, 0, 0));
}
