//! Control commands: that each of R11 to R28 succeeds, and how it refuses a bad handle, a handle of another session,
//! and more than there may be.

use unirdma_abi::rfc::{self, Nothing};
use unirdma_abi::{Command, Status};
use unirdma_ipc::vrnic::AddVrnic;
use unirdma_testkit::TestHost;
use unirdma_testkit::rfc::{RfcDriver, qp_request};
use zerocopy::{Immutable, IntoBytes};

use crate::world::{IP, RC, Side, one};

type Done = Result<Nothing, u8>;

const BAD_HANDLE: Done = Err(Status::BadHandle as u8);
const BAD_VALUE: Done = Err(Status::BadValue as u8);

/// Two sessions of one vRNIC. The second one must not reach the objects of the first.
fn sessions(f: impl FnOnce(&mut AddVrnic)) -> (TestHost, Side, RfcDriver) {
    let host = TestHost::start();
    let socket = host.add_with("a", IP[0], f).with_file_name("rfc.sock");
    let mine = Side::new(RfcDriver::new(&socket, IP[0]), RC);
    let other = RfcDriver::new(&socket, IP[0]);
    (host, mine, other)
}

fn handle(handle: u32) -> rfc::Handle {
    rfc::Handle { handle: handle.into() }
}

/// Sends a command and returns only its status.
fn tried(d: &mut RfcDriver, c: Command, r: &(impl IntoBytes + Immutable)) -> Done {
    match d.request(&[&[c as u8], r.as_bytes()].concat(), 512)[0] {
        0 => Ok(Nothing {}),
        status => Err(status),
    }
}

#[test]
fn r11_r47_query_port_tells_the_attributes_of_port_1() {
    let (_host, mut d) = one();
    let p: rfc::PortAttr = d.command(Command::QueryPort, &rfc::QueryPort { port: 1 }).unwrap();
    assert_eq!((p.state, p.phys_state, p.max_mtu, p.port_cap_flags.get()), (4, 5, 5, 1 << 16));
    assert!((1..=5).contains(&p.active_mtu) && p.phys_mtu.get() == 128 << p.active_mtu);
    assert_eq!((p.gid_tbl_len.get(), p.pkey_tbl_len.get(), p.max_msg_sz.get()), (32, 1, 1 << 31));
    assert_eq!((p.active_width, p.active_speed.get(), p.bad_pkey_cntr.get(), p.qkey_viol_cntr.get()), (2, 32, 0, 0));
    for port in [0, 2, 255] {
        assert_eq!(tried(&mut d, Command::QueryPort, &rfc::QueryPort { port }), BAD_VALUE);
    }
}

#[test]
fn r12_r30_create_cq_returns_the_virtqueue_that_is_free() {
    let (_host, mut d) = one();
    let cqs: Vec<_> = (0..3).map(|_| d.cq(16)).collect();
    assert_eq!(cqs.iter().map(|c| c.cqn).collect::<Vec<u32>>(), [1, 2, 3]);
    d.destroy_cq(&cqs[1]).unwrap();
    assert_eq!([d.cq(16).cqn, d.cq(16).cqn], [2, 4]);
    // If the response has room for it, the device returns the real capacity (R84p).
    let answer = d.request(&[&[Command::CreateCq as u8][..], &100u32.to_le_bytes()].concat(), 9);
    assert_eq!(answer[5..], 128u32.to_le_bytes());
    for cqe in [0, 4097, u32::MAX] {
        assert_eq!(tried(&mut d, Command::CreateCq, &rfc::CreateCq { cqe: cqe.into() }), BAD_VALUE);
    }
}

#[test]
fn r12_r14_r19_r21_what_a_vrnic_may_not_have_is_refused() {
    let (_host, mut s, mut other) = sessions(|v| (v.max_cq, v.max_qp, v.max_mr) = (Some(2), Some(2), Some(2)));
    let exhausted: Done = Err(Status::Exhausted as u8);
    // Both sessions share the quota of the vRNIC.
    let cq = other.cq(16);
    assert_eq!(tried(&mut s.d, Command::CreateCq, &rfc::CreateCq { cqe: 16.into() }), exhausted);
    let pd = other.pd();
    other.qp(pd, &cq, RC);
    assert_eq!(tried(&mut s.d, Command::CreateQp, &qp_request(s.pd, s.cq.cqn, s.cq.cqn, RC)), exhausted);
    other.mr(pd, 4096, 1);
    let dma = rfc::GetDmaMr { pdn: s.pd.into(), access_flags: 1.into() };
    assert_eq!(tried(&mut s.d, Command::GetDmaMr, &dma), exhausted);
    let (start, (pages, npages)) = (s.d.take(4096), s.d.page_list(0, 4096));
    let r = rfc::RegUserMr {
        pdn: s.pd.into(),
        start: start.into(),
        length: 4096.into(),
        pages: pages.into(),
        npages: npages.into(),
        ..rfc::RegUserMr::default()
    };
    s.d.memory().write((pages - unirdma_testkit::rfc::BUS) as usize, &start.to_le_bytes());
    assert_eq!(tried(&mut s.d, Command::RegUserMr, &r), exhausted);
    let max = s.d.config.max_pd.get();
    let refused = (0..=max).find_map(|_| tried(&mut s.d, Command::CreatePd, &Nothing {}).err());
    assert_eq!(refused, Some(Status::Exhausted as u8));
    // The quota is available again after the session ends.
    drop(other);
    let again = || s.d.request(&[&[Command::CreateCq as u8][..], &16u32.to_le_bytes()].concat(), 5);
    let mut again = again;
    unirdma_testkit::rfc::wait_for("the session's end", || (again()[0] == 0).then_some(()));
}

#[test]
fn r12_r21_there_are_as_many_cqs_and_qps_as_virtqueues() {
    let (_host, mut s, _) = sessions(|v| (v.max_cq, v.max_qp) = (Some(1000), Some(1000)));
    let create = rfc::CreateCq { cqe: 1.into() };
    assert!((1..127).all(|_| tried(&mut s.d, Command::CreateCq, &create).is_ok()));
    assert_eq!(tried(&mut s.d, Command::CreateCq, &create), Err(Status::Exhausted as u8));
    let create = qp_request(s.pd, s.cq.cqn, 127, RC);
    assert!((1..64).all(|_| tried(&mut s.d, Command::CreateQp, &create).is_ok()));
    assert_eq!(tried(&mut s.d, Command::CreateQp, &create), Err(Status::Exhausted as u8));
}

#[test]
fn r13_destroy_cq() {
    let (_host, mut s, mut other) = sessions(|_| ());
    let spare = s.d.cq(16);
    assert_eq!(tried(&mut other, Command::DestroyCq, &handle(spare.cqn)), BAD_HANDLE, "of another session");
    for cqn in [0, 77, 128, 255, u32::MAX] {
        assert_eq!(tried(&mut s.d, Command::DestroyCq, &handle(cqn)), BAD_HANDLE);
    }
    assert_eq!(tried(&mut s.d, Command::DestroyCq, &handle(s.cq.cqn)), Err(Status::Busy as u8));
    assert!(s.d.destroy_cq(&spare).is_ok());
    assert_eq!(tried(&mut s.d, Command::DestroyCq, &handle(spare.cqn)), BAD_HANDLE);
}

#[test]
fn r14_r15_create_and_destroy_pd() {
    let (_host, mut s, mut other) = sessions(|_| ());
    let pd = s.d.pd();
    assert_ne!(pd, s.pd);
    assert_eq!(tried(&mut other, Command::DestroyPd, &handle(pd)), BAD_HANDLE);
    assert_eq!(tried(&mut s.d, Command::DestroyPd, &handle(s.pd)), Err(Status::Busy as u8));
    assert!(tried(&mut s.d, Command::DestroyPd, &handle(pd)).is_ok());
    assert_eq!(tried(&mut s.d, Command::DestroyPd, &handle(pd)), BAD_HANDLE);
}

#[test]
fn r16_r46_get_dma_mr() {
    let (_host, mut s, mut other) = sessions(|_| ());
    let get = |pdn: u32, flags: u32| rfc::GetDmaMr { pdn: pdn.into(), access_flags: flags.into() };
    let made: rfc::MrCreated = s.d.command(Command::GetDmaMr, &get(s.pd, 15)).unwrap();
    assert_eq!(made.lkey, made.rkey);
    assert_eq!(tried(&mut other, Command::GetDmaMr, &get(s.pd, 15)), BAD_HANDLE);
    assert_eq!(tried(&mut s.d, Command::GetDmaMr, &get(s.pd ^ 1, 15)), BAD_HANDLE);
    // ZERO_BASED, HUGETLB and RELAXED_ORDERING are accepted. Remote stores need LOCAL_WRITE. ON_DEMAND and unknown
    // flags are refused.
    for (flags, done) in [(1 << 5, true), (1 << 7, true), (1 << 20, true), (2, false), (8, false), (1 << 6, false)] {
        assert_eq!(tried(&mut s.d, Command::GetDmaMr, &get(s.pd, flags)).is_ok(), done, "{flags:#x}");
    }
    for bit in [8, 9, 21, 31] {
        assert_eq!(tried(&mut s.d, Command::GetDmaMr, &get(s.pd, 1 << bit)), BAD_VALUE, "{bit}");
    }
}

#[test]
fn r17_r18_r34_fast_registration_is_not_offered() {
    let (_host, mut s, _) = sessions(|_| ());
    let create = rfc::CreateMr { pdn: s.pd.into(), access_flags: 1.into(), max_num_sg: 4.into() };
    assert_eq!(tried(&mut s.d, Command::CreateMr, &create), Err(Status::Unsupported as u8));
    let map = rfc::MapMrSg { mrn: s.mr.mrn.into(), npages: 1.into(), ..rfc::MapMrSg::default() };
    assert_eq!(tried(&mut s.d, Command::MapMrSg, &map), Err(Status::Unsupported as u8));
}

#[test]
fn r19_r35_register_user_mr() {
    let (_host, mut s, mut other) = sessions(|_| ());
    let start = s.d.take(3 * 4096);
    let (pages, npages) = s.d.page_list(start, 3 * 4096);
    let good = rfc::RegUserMr {
        pdn: s.pd.into(),
        access_flags: 15.into(),
        start: (0x5000u64 + 100).into(),
        length: (3u64 * 4096 - 100).into(),
        virt_addr: 64.into(),
        pages: pages.into(),
        npages: npages.into(),
    };
    let mut reg = |r: rfc::RegUserMr| tried(&mut s.d, Command::RegUserMr, &r);
    assert!(reg(good).is_ok());
    // R35: the list must have exactly the pages that the range covers.
    for n in [0, 1, 2, 4, u32::MAX] {
        assert_eq!(reg(rfc::RegUserMr { npages: n.into(), ..good }), BAD_VALUE, "{n} pages");
    }
    assert_eq!(reg(rfc::RegUserMr { pages: 0.into(), ..good }), BAD_VALUE);
    assert_eq!(reg(rfc::RegUserMr { pages: (pages + 1).into(), ..good }), BAD_VALUE);
    assert_eq!(reg(rfc::RegUserMr { length: u64::MAX.into(), ..good }), BAD_VALUE);
    assert_eq!(reg(rfc::RegUserMr { access_flags: (1 << 6).into(), ..good }), BAD_VALUE);
    let far = reg(rfc::RegUserMr { pages: (1 << 40).into(), ..good });
    assert_eq!(far, Err(Status::BadAddress as u8), "the list is outside of the memory");
    assert_eq!(reg(rfc::RegUserMr { pdn: (s.pd ^ 1).into(), ..good }), BAD_HANDLE);
    assert!(reg(rfc::RegUserMr { length: 0.into(), npages: 0.into(), pages: 0.into(), ..good }).is_ok());
    let list = (pages - unirdma_testkit::rfc::BUS) as usize;
    for (page, status) in [(start + 1, Status::BadValue), (1 << 40, Status::BadAddress)] {
        s.d.memory().write(list + 8, &page.to_le_bytes());
        assert_eq!(tried(&mut s.d, Command::RegUserMr, &good), Err(status as u8));
    }
    let start = other.take(3 * 4096);
    let (pages, _) = other.page_list(start, 3 * 4096);
    let theirs = tried(&mut other, Command::RegUserMr, &rfc::RegUserMr { pages: pages.into(), ..good });
    assert_eq!(theirs, BAD_HANDLE, "a PD of another session");
}

#[test]
fn r20_deregister_mr() {
    let (_host, mut s, mut other) = sessions(|_| ());
    assert_eq!(tried(&mut other, Command::DeregMr, &handle(s.mr.mrn)), BAD_HANDLE);
    assert_eq!(tried(&mut s.d, Command::DeregMr, &handle(s.mr.mrn ^ 1)), BAD_HANDLE);
    assert!(tried(&mut s.d, Command::DeregMr, &handle(s.mr.mrn)).is_ok());
    assert_eq!(tried(&mut s.d, Command::DeregMr, &handle(s.mr.mrn)), BAD_HANDLE);
}

#[test]
fn r21_r36_r40_create_qp() {
    let (_host, mut s, mut other) = sessions(|_| ());
    let r = qp_request(s.pd, s.cq.cqn, s.cq.cqn, RC);
    let made: Vec<_> = (2..=4).map(|typ| s.d.try_qp(&rfc::CreateQp { qp_type: typ, ..r }).unwrap()).collect();
    for (i, qp) in made.iter().enumerate() {
        assert_eq!((qp.sq.index, qp.rq.index), (130 + 2 * i as u32, 131 + 2 * i as u32), "a pair");
    }
    // There is only one GSI QP.
    let gsi = rfc::CreateQp { qp_type: rfc::qp_type::GSI, ..r };
    assert!(tried(&mut s.d, Command::CreateQp, &gsi).is_ok());
    assert_eq!(tried(&mut s.d, Command::CreateQp, &gsi), Err(Status::Exhausted as u8));
    for typ in [rfc::qp_type::SMI, 5, 9, 10, 255] {
        let refused = tried(&mut s.d, Command::CreateQp, &rfc::CreateQp { qp_type: typ, ..r });
        assert_eq!(refused, Err(Status::Unsupported as u8), "type {typ}");
    }
    let bad = [
        rfc::CreateQp { pdn: (s.pd ^ 1).into(), ..r },
        rfc::CreateQp { send_cqn: 9.into(), ..r },
        rfc::CreateQp { recv_cqn: 0.into(), ..r },
    ];
    for r in bad {
        assert_eq!(tried(&mut s.d, Command::CreateQp, &r), BAD_HANDLE);
    }
    let large = [
        rfc::CreateQp { max_send_wr: 1025.into(), ..r },
        rfc::CreateQp { max_recv_wr: u32::MAX.into(), ..r },
        rfc::CreateQp { max_send_sge: 33.into(), ..r },
        rfc::CreateQp { max_recv_sge: 33.into(), ..r },
        rfc::CreateQp { max_inline_data: 1025.into(), ..r },
    ];
    for r in large {
        assert_eq!(tried(&mut s.d, Command::CreateQp, &r), BAD_VALUE);
    }
    let cq = other.cq(4);
    let theirs = qp_request(s.pd, cq.cqn, cq.cqn, RC);
    assert_eq!(tried(&mut other, Command::CreateQp, &theirs), BAD_HANDLE, "a PD of another session");
}

#[test]
fn r24_destroy_qp() {
    let (_host, mut s, mut other) = sessions(|_| ());
    assert_eq!(tried(&mut other, Command::DestroyQp, &handle(s.qp.qpn)), BAD_HANDLE);
    assert_eq!(tried(&mut s.d, Command::DestroyQp, &handle(s.qp.qpn ^ 1)), BAD_HANDLE);
    s.d.destroy_qp(&s.qp).unwrap();
    assert_eq!(tried(&mut s.d, Command::DestroyQp, &handle(s.qp.qpn)), BAD_HANDLE);
    let again = s.d.qp(s.pd, &s.cq, RC);
    assert_eq!(again.sq.index, s.qp.sq.index, "the pair is free again");
    assert_ne!(again.qpn, s.qp.qpn, "its number is not");
}

#[test]
fn r25_query_pkey() {
    let (_host, mut d) = one();
    let query = |port: u32, index: u16| rfc::QueryPkey { port: port.into(), index: index.into() };
    assert_eq!(d.command::<rfc::Pkey>(Command::QueryPkey, &query(1, 0)).unwrap().pkey.get(), 0xffff);
    for (port, index) in [(0, 0), (2, 0), (1, 1)] {
        assert_eq!(tried(&mut d, Command::QueryPkey, &query(port, index)), BAD_VALUE);
    }
}

#[test]
fn r26_r27_gids_are_those_that_were_granted() {
    let (_host, mut s, mut other) = sessions(|_| ());
    let gid = s.d.gid;
    let add = |gid, index: u16, port: u32, gid_type: u32| rfc::AddGid {
        gid,
        gid_type: gid_type.into(),
        index: index.into(),
        port_num: port.into(),
    };
    let denied: Done = Err(Status::Denied as u8);
    let theirs = unirdma_formats::Gid::from_ip("10.0.0.9".parse().unwrap()).0;
    assert_eq!(tried(&mut s.d, Command::AddGid, &add(theirs, 1, 1, 2)), denied);
    assert_eq!(tried(&mut s.d, Command::AddGid, &add([0; 16], 1, 1, 2)), denied);
    for (index, port, gid_type) in [(1, 2, 2), (1, 0, 2), (1, 1, 1), (1, 1, 0), (32, 1, 2)] {
        assert_eq!(tried(&mut s.d, Command::AddGid, &add(gid, index, port, gid_type)), BAD_VALUE);
    }
    assert!(tried(&mut s.d, Command::AddGid, &add(gid, 31, 1, 2)).is_ok());
    let del = |index: u16, port: u32| rfc::DelGid { index: index.into(), port: port.into() };
    assert_eq!(tried(&mut s.d, Command::DelGid, &del(31, 2)), BAD_VALUE);
    assert_eq!(tried(&mut s.d, Command::DelGid, &del(30, 1)), BAD_HANDLE);
    assert_eq!(tried(&mut other, Command::DelGid, &del(31, 1)), BAD_HANDLE, "each session has its own table");
    assert!(tried(&mut s.d, Command::DelGid, &del(31, 1)).is_ok());
    assert!(tried(&mut s.d, Command::DelGid, &del(0, 1)).is_ok());
    // A GID that was removed from the table cannot be a source.
    assert_eq!(s.d.connect(s.qp.qpn, RC, gid, 5), BAD_VALUE);
    s.d.add_gid(0, gid).unwrap();
    s.d.move_to(s.qp.qpn, 0).unwrap();
    s.d.connect(s.qp.qpn, RC, gid, 5).unwrap();
}

#[test]
fn r28_request_notify_cq_of_bad_handles_and_flags() {
    let (_host, mut s, mut other) = sessions(|_| ());
    let ask = |cqn: u32, flags: u32| rfc::ReqNotify { cqn: cqn.into(), flags: flags.into() };
    assert!((1..=3).all(|flags| tried(&mut s.d, Command::ReqNotifyCq, &ask(s.cq.cqn, flags)).is_ok()));
    for flags in [0, 4, u32::MAX] {
        assert_eq!(tried(&mut s.d, Command::ReqNotifyCq, &ask(s.cq.cqn, flags)), BAD_VALUE);
    }
    assert_eq!(tried(&mut s.d, Command::ReqNotifyCq, &ask(99, 2)), BAD_HANDLE);
    assert_eq!(tried(&mut other, Command::ReqNotifyCq, &ask(s.cq.cqn, 2)), BAD_HANDLE);
}

#[test]
fn r11_to_r28_requests_and_responses_have_exact_lengths() {
    let (_host, mut d) = one();
    // Lengths of each command's request and response data.
    let sizes = [
        (1, 1, 161),
        (2, 4, 4),
        (3, 4, 0),
        (4, 0, 4),
        (5, 4, 0),
        (6, 8, 12),
        (7, 12, 12),
        (8, 32, 4),
        (9, 44, 12),
        (10, 4, 0),
        (11, 66, 4),
        (12, 137, 0),
        (13, 8, 129),
        (14, 4, 0),
        (15, 6, 2),
        (16, 26, 0),
        (17, 6, 0),
        (18, 8, 0),
    ];
    let bad = [Status::BadLength as u8];
    for (code, request, response) in sizes {
        let bytes = |n: usize| [vec![code], vec![0; n]].concat();
        assert_eq!(d.request(&bytes(request + 1), 512), bad, "command {code}, too long");
        assert!(request == 0 || d.request(&bytes(request - 1), 512) == bad, "command {code}, too short");
        if response > 0 {
            assert_eq!(d.request(&bytes(request), response), bad, "command {code}, no room for its response");
        }
        assert_ne!(d.request(&bytes(request), 1 + response), bad, "command {code}");
    }
}
