//! Every control command and every status that it can give: a table of requests to [`unirdma_device::Device::execute`].
#![allow(missing_docs)]

mod lookups;
mod table;
mod world;

use std::collections::BTreeSet;

use table::{OWN_VF, PEER_VF, resolve, rows};
use unirdma_abi as abi;
use unirdma_abi::{CmOp, Command, Status};
use unirdma_formats::{QpState, QpType};
use unirdma_link::{Handler, Vring};
use unirdma_rnic::Share;
use world::{Kind, OWN, PEER, World, gid, to};
use zerocopy::{FromBytes, IntoBytes};

/// Bytes of the request and of the response of each command, without headers.
macro_rules! define_sizes {
    ($($name:ident = $code:literal, $handler:ident($req:ident) -> $resp:ident;)*) => {
        fn sizes(c: Command) -> (usize, usize) {
            match c { $(Command::$name => (size_of::<abi::$req>(), size_of::<abi::$resp>()),)* }
        }
    };
}
abi::for_each_command!(define_sizes);

const HEADER: usize = size_of::<abi::RespHeader>();

#[test]
fn every_command_gives_what_the_table_says() {
    for row in rows() {
        let (c, what) = (row.command, row.what);
        let w = World::new();
        let request = (row.good)(&w);
        let (status, data) = w.me.call(c, &request, 1024);
        assert_eq!(status, row.gives as u8, "{c:?} {what}");
        let length = if row.gives == Status::Ok { sizes(c).1 } else { 0 };
        assert_eq!((request.len(), data.len()), (sizes(c).0, length), "{c:?} {what}");
        for (status, why, request) in row.refused {
            let w = World::new();
            let (given, data) = w.me.call(c, &request(&w), 1024);
            assert_eq!((given, data.len()), (status as u8, 0), "{c:?} {what}: {why}");
        }
    }
}

#[test]
fn a_wrong_length_changes_nothing() {
    for row in rows() {
        let (c, w) = (row.command, World::new());
        let request = (row.good)(&w);
        let bad = |data: &[u8], room| assert_eq!(w.me.call(c, data, room).0, Status::BadLength as u8, "{c:?}");
        if let Some((_, shorter)) = request.split_last() {
            bad(shorter, 1024);
            bad(&[], 1024);
        }
        bad(&[&request[..], &[0]].concat(), 1024);
        bad(&[0; 1024], 1024);
        bad(&request, HEADER + sizes(c).1 - 1);
        let (status, _) = w.me.call(c, &request, HEADER + sizes(c).1);
        assert_eq!(status, row.gives as u8, "{c:?} {} after requests of wrong lengths", row.what);
    }
}

#[test]
fn a_handle_of_nothing_or_of_another_session_is_bad() {
    for row in rows() {
        for (at, kind) in row.handles {
            let w = World::new();
            let mut request = (row.good)(&w);
            for handle in [u32::MAX, 0, w.other.make(kind)] {
                request[at..at + 4].copy_from_slice(&handle.to_le_bytes());
                let (status, _) = w.me.call(row.command, &request, 1024);
                let (c, what) = (row.command, row.what);
                assert_eq!(status, Status::BadHandle as u8, "{c:?} {what}: {kind:?} {handle:#x} at {at}");
            }
        }
    }
}

#[test]
fn what_makes_something_is_exhausted_in_the_end() {
    for row in rows().into_iter().filter(|r| r.ends) {
        let w = World::new();
        let request = (row.good)(&w);
        let last = (0..70_000).map(|_| w.me.call(row.command, &request, 1024).0).find(|s| *s != 0);
        assert_eq!(last, Some(Status::Exhausted as u8), "{:?} {}", row.command, row.what);
    }
}

#[test]
fn unknown_commands_are_unsupported_and_no_header_is_a_bad_length() {
    let w = World::new();
    for raw in (0..=u8::MAX).filter(|raw| Command::from_raw(*raw).is_none()) {
        let request = [raw, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3];
        assert_eq!(w.me.dev.execute(&request, 1024)[0], Status::Unsupported as u8, "{raw}");
    }
    let create_pd = [Command::CreatePd as u8, 0, 0, 0, 0, 0, 0, 0];
    for n in 0..create_pd.len() {
        assert_eq!(w.me.dev.execute(&create_pd[..n], 1024), [Status::BadLength as u8, 0, 0, 0, 0, 0, 0, 0]);
    }
}

#[test]
fn query_device_has_the_configuration_space_and_what_follows_from_it() {
    let d: abi::QueryDeviceResp = World::new().me.ok(Command::QueryDevice, &abi::Nothing {});
    assert_eq!((d.config.max_qp, d.max_mw, d.max_res_rd_atom, d.max_qp_init_rd_atom), (3, 5, 3 * 128, 128));
    // RC is 2, UC 3, UD 4 and the XRC initiator 9.
    assert_eq!((d.rate_limit_qp_types, d.max_cq_count), (0b10_0001_1100, u16::MAX));
    assert!(d.name.starts_with(b"a\0"));
}

#[test]
fn programs_on_vfs_reach_each_other_by_the_gids_of_the_vfs() {
    let w = World::new();
    let way = || w.me.ok::<abi::QueryDeviceResp>(Command::QueryDevice, &abi::Nothing {}).way;
    assert_eq!(way(), abi::WAY_SOFT);
    w.lend(Some(OWN_VF), Some(PEER_VF));
    assert_eq!(way(), abi::WAY_VF);
    let reach = |to: &str, typ| {
        let r: abi::ResolveResp = w.me.ok(Command::Resolve, &resolve(to, typ));
        (r.dgid, r.max_mtu)
    };
    for typ in [QpType::Rc, QpType::Uc, QpType::Ud] {
        for (to, vf) in [(PEER, PEER_VF), (OWN, OWN_VF)] {
            assert_eq!(reach(to, typ), (gid(vf), 3), "{to} {typ:?}");
        }
    }
    // The addresses of VFs are in GRHs of datagrams. No connection is made by them.
    for vf in [PEER_VF, OWN_VF] {
        assert_eq!(reach(vf, QpType::Ud), (gid(vf), 3), "{vf}");
        for typ in [QpType::Rc, QpType::Uc] {
            let status = w.me.call(Command::Resolve, resolve(vf, typ).as_bytes(), 1024).0;
            assert_eq!(status, Status::Unreachable as u8, "{vf} {typ:?}");
        }
    }
    assert_eq!(reach("239.1.1.1", QpType::Ud), (gid("239.1.1.1"), 3));
    let name = |real: &str| w.me.ok::<abi::NameGidResp>(Command::NameGid, &abi::NameGidReq { real: gid(real) }).gid;
    assert_eq!((name(OWN_VF), name(PEER_VF)), (gid(OWN), gid(PEER)));
    // vRNICs of one instance share a VF, which has the name of the first one.
    w.lend(Some(PEER_VF), Some(PEER_VF));
    assert_eq!(name(PEER_VF), gid(PEER));
    let gone = w.me.call(Command::NameGid, abi::NameGidReq { real: gid(OWN_VF) }.as_bytes(), 1024).0;
    assert_eq!(gone, Status::Unreachable as u8);
}

#[test]
fn a_soft_qp_does_not_reach_programs_on_a_vf() {
    let w = World::new();
    let qp = w.me.qp(QpType::Rc);
    w.me.ok::<abi::Nothing>(Command::ModifyQp, &w.me.modify(qp.qpn, QpState::Init, PEER, 9));
    let connect = || w.me.call(Command::ModifyQp, w.me.modify(qp.qpn, QpState::Rtr, PEER, 9).as_bytes(), 1024).0;
    let attr = to(PEER);
    let ah = || {
        let request = abi::CreateAhReq { pdn: w.me.make(Kind::Pd), attr, ..Default::default() };
        w.me.call(Command::CreateAh, request.as_bytes(), 1024).0
    };
    w.lend(None, Some(PEER_VF));
    assert_eq!((connect(), ah()), (Status::Unreachable as u8, Status::Unreachable as u8));
    w.lend(None, None);
    assert_eq!((connect(), ah()), (0, 0));
}

/// Connection management carries the numbers of a VF's QPs, which are none of this RNIC.
#[test]
fn a_program_on_a_vf_names_qps_of_the_vf() {
    let w = World::new();
    let listen = |qpn| {
        let param = abi::CmParam { qpn, ..Default::default() };
        let request = abi::CmReq { param, ..w.me.cm_request(CmOp::Listen, w.me.id(abi::port_space::UDP)) };
        w.me.call(Command::Cm, request.as_bytes(), 1024).0
    };
    assert_eq!(listen(0x11), Status::BadHandle as u8);
    w.lend(Some(OWN_VF), None);
    assert_eq!((listen(0x11), listen(0xff_ffff)), (0, 0));
    assert_eq!(listen(1 << 24), Status::BadHandle as u8);
}

/// A vRNIC may have more in all its sessions than one session is told (R06, R07).
#[test]
fn limits_are_within_the_ranges_of_the_specification() {
    for (limit, max_qp, max_cq) in [(0, 1, 1), (7, 7, 7), (u32::MAX, abi::MAX_QP, abi::MAX_CQ)] {
        let w = World::with(|c| (c.max_qp, c.max_cq) = (limit, limit));
        let space = abi::Config::read_from_prefix(&w.me.dev.config()).unwrap().0;
        let device: abi::QueryDeviceResp = w.me.ok(Command::QueryDevice, &abi::Nothing {});
        for c in [space, device.config] {
            assert_eq!((c.max_qp, c.max_cq), (max_qp, max_cq), "{limit}");
        }
    }
}

/// The port is as fast as the operator lets the vRNIC be.
#[test]
fn the_port_has_the_speed_of_the_limit() {
    let w = World::new();
    let port = |rate_bps: u64| {
        w.me.set_share(Share { rate_bps, ..Share::default() });
        let p: abi::QueryPortResp = w.me.ok(Command::QueryPort, &abi::QueryPortReq { port: 1, reserved: 0 });
        (p.active_speed, p.active_width)
    };
    assert_eq!(port(0), (32, 2), "no limit");
    for (rate, link) in [(1, (1, 1)), (2_500_000_000, (1, 1)), (10_000_000_000, (1, 2)), (10_000_000_001, (2, 2))] {
        assert_eq!(port(rate), link, "{rate}");
    }
    assert_eq!((port(100_000_000_000), port(u64::MAX)), ((32, 2), (128, 2)));
}

/// The commands of a feature that the driver has not named are refused until the device is reset.
#[test]
fn a_declined_feature_cannot_be_used() {
    let mut w = World::new();
    let window = |w: &World| {
        let request = abi::AllocMwReq { pdn: w.me.make(Kind::Pd), mw_type: 2 };
        w.me.call(Command::AllocMw, request.as_bytes(), 1024).0
    };
    let begin = |w: &World, features| {
        w.me.ok::<abi::NewSessionResp>(Command::NewSession, &abi::NewSessionReq { features, reserved: 0 });
    };
    assert_eq!(window(&w), 0, "a process says nothing, and has all");
    begin(&w, abi::FEATURE_GSI | abi::FEATURE_FAST_REG);
    assert_eq!(window(&w), Status::Unsupported as u8);
    let first = abi::AllocMwReq { pdn: w.me.make(Kind::Pd), mw_type: 1 };
    assert_eq!(w.me.call(Command::AllocMw, first.as_bytes(), 1024).0, 0, "type 1 needs no feature");
    begin(&w, abi::FEATURE_INVALIDATE);
    assert_eq!(window(&w), 0);
    begin(&w, 0);
    w.me.dev.reset();
    assert_eq!(window(&w), 0);
}

#[test]
fn a_new_session_has_nothing_of_the_one_before() {
    let w = World::new();
    let (qpn, pd, mapped) = (w.me.make(Kind::Qp), w.me.make(Kind::Pd), w.me.make(Kind::Mapped));
    w.me.make(Kind::Mr);
    let others = w.other.make(Kind::Pd);
    w.me.make(Kind::Doorbell);
    let begin = abi::NewSessionReq { features: abi::FEATURE_INVALIDATE, reserved: 0 };
    let resp: abi::NewSessionResp = w.me.ok(Command::NewSession, &begin);
    assert_eq!(resp.features, abi::FEATURE_INVALIDATE);
    let bad = Status::BadHandle as u8;
    let handle = |h: u32| abi::HandleReq { handle: h, reserved: 0 };
    for (c, h) in [(Command::DestroyQp, qpn), (Command::DestroyPd, pd), (Command::UnmapRuns, mapped)] {
        assert_eq!(w.me.call(c, handle(h).as_bytes(), 1024).0, bad, "{c:?}");
    }
    // A refused command uses up no quota and returns no number. The session has no doorbell page.
    w.me.forget_doorbell();
    assert_eq!(w.me.call(Command::CreateQp, w.me.qp_request(QpType::Rc).as_bytes(), 1024).0, Status::BadState as u8);
    let numbers: Vec<u32> = (0..8).map(|_| w.me.make(Kind::Pd)).collect();
    assert!(!numbers.contains(&pd) && !numbers.contains(&mapped));
    w.me.make(Kind::Qp);
    assert_eq!(w.other.call(Command::DestroyPd, handle(others).as_bytes(), 1024).0, 0, "the other session");
}

#[test]
fn a_stopped_control_queue_pauses_the_session() {
    let mut w = World::new();
    let (a, b) = (w.me.qp(QpType::Rc), w.me.qp(QpType::Rc));
    w.me.connect(a.qpn, b.qpn);
    let ring = w.me.take(8192);
    let running = Vring {
        size: 64,
        desc: ring,
        avail: ring + 4096,
        used: ring + 6144,
        enabled: true,
        addressed: true,
        ..Vring::default()
    };
    let state = |w: &World| {
        let q: abi::QueryQpResp = w.me.ok(Command::QueryQp, &abi::QueryQpReq { qpn: a.qpn, attr_mask: 0 });
        u32::from(q.attr.qp_state)
    };
    w.me.dev.vring_changed(abi::VQ_CONTROL as usize, &running);
    assert_eq!(w.me.dev.stop_vring(abi::VQ_CONTROL as usize), Some(0));
    // An opcode that no QP accepts.
    w.me.post(&a, &abi::SqWqe { opcode: 99, ..Default::default() });
    w.me.poll();
    assert_eq!(state(&w), QpState::Rts as u32);
    w.me.dev.vring_changed(abi::VQ_CONTROL as usize, &running);
    w.me.poll();
    assert_eq!(state(&w), QpState::Err as u32);
}

/// After a machine is reset, another driver may have other data where the objects were.
#[test]
fn a_control_queue_that_begins_anew_ends_the_session_before_anything_is_written() {
    let mut w = World::new();
    let (a, b) = (w.me.qp(QpType::Rc), w.me.qp(QpType::Rc));
    w.me.connect(a.qpn, b.qpn);
    let ring = w.me.take(8192);
    let running = |base| Vring {
        size: 64,
        desc: ring,
        avail: ring + 4096,
        used: ring + 6144,
        base,
        enabled: true,
        addressed: true,
        ..Vring::default()
    };
    w.me.dev.vring_changed(abi::VQ_CONTROL as usize, &running(7));
    assert_eq!(w.me.dev.stop_vring(abi::VQ_CONTROL as usize), Some(7));
    // The driver before has posted this request, and the device would complete it.
    w.me.post(&a, &abi::SqWqe { opcode: 99, ..Default::default() });
    let before = w.me.image();
    w.me.dev.vring_changed(abi::VQ_CONTROL as usize, &running(0));
    w.me.poll();
    assert!(w.me.image() == before, "something was written");
    let query = abi::QueryQpReq { qpn: a.qpn, attr_mask: 0 };
    assert_eq!(w.me.call(Command::QueryQp, query.as_bytes(), 1024).0, Status::BadHandle as u8);
}

/// A driver that begins anew has its whole quota at once, although the objects before it are freed in small steps.
#[test]
fn what_is_dead_keeps_nobody_from_the_quota() {
    let most = 3 * unirdma_rnic::MAX_TORN_DOWN as u32 + 5;
    let w = World::with_mrs(most);
    let make = |pd: u32| w.me.call(Command::AllocNullMr, abi::HandleReq { handle: pd, reserved: 0 }.as_bytes(), 1024).0;
    for _ in 0..3 {
        let pd = w.me.make(Kind::Pd);
        assert!((0..most).all(|_| make(pd) == 0));
        assert_eq!(make(pd), Status::Exhausted as u8);
        w.me.ok::<abi::NewSessionResp>(Command::NewSession, &abi::NewSessionReq::default());
        assert!(w.me.has_dead());
        assert_eq!(make(pd), Status::BadHandle as u8);
    }
}

#[test]
fn scattered_pages_serve_as_rings_and_doorbell() {
    let w = World::new();
    let at = w.me.take(8 * 4096);
    let pages: Vec<(u64, u64)> = [6, 1, 4, 3].iter().map(|i| (at + i * 4096, 4096)).collect();
    let addr = w.me.map(&pages).addr;
    let doorbell: abi::HandleResp = w.me.ok(Command::CreateDoorbell, &abi::SetDoorbellReq { addr });
    let (sq_addr, rq_addr, ctrl_addr) = (addr + 4096, addr + 8192, addr + 12288);
    let request =
        abi::CreateQpReq { doorbell: doorbell.handle, sq_addr, rq_addr, ctrl_addr, ..w.me.qp_request(QpType::Rc) };
    let qp: abi::CreateQpResp = w.me.ok(Command::CreateQp, &request);
    let peer = w.me.qp(QpType::Rc);
    w.me.connect(qp.qpn, peer.qpn);
    // An opcode that no QP accepts. The RNIC reads it from the second page of the range, after a doorbell in the first.
    let wqe = abi::SqWqe { opcode: 99, ..Default::default() };
    w.me.write(at + 4096, wqe.as_bytes());
    w.me.store(at + 3 * 4096, 1);
    w.me.ring_at(at + 6 * 4096, qp.db_slot);
    w.me.poll();
    let state: abi::QueryQpResp = w.me.ok(Command::QueryQp, &abi::QueryQpReq { qpn: qp.qpn, attr_mask: 0 });
    assert_eq!(u32::from(state.attr.qp_state), QpState::Err as u32);
    // The QP that uses the range keeps its memory.
    let other = abi::CreateQpReq { ctrl_addr: addr + 16384, ..request };
    assert_eq!(w.me.call(Command::CreateQp, other.as_bytes(), 1024).0, Status::BadAddress as u8);
}

#[test]
fn bits_of_one_page_are_no_bits_of_another() {
    let w = World::new();
    let doorbell = w.me.make(Kind::Doorbell);
    let bad = abi::CreateQpReq { doorbell: doorbell ^ 1 << 30, ..w.me.qp_request(QpType::Rc) };
    assert_eq!(w.me.call(Command::CreateQp, bad.as_bytes(), 1024).0, Status::BadHandle as u8);
    let foreign = abi::CreateQpReq { doorbell: w.other.make(Kind::Doorbell), ..w.me.qp_request(QpType::Rc) };
    assert_eq!(w.me.call(Command::CreateQp, foreign.as_bytes(), 1024).0, Status::BadHandle as u8);
    let mine: abi::CreateQpResp =
        w.me.ok(Command::CreateQp, &abi::CreateQpReq { doorbell, ..w.me.qp_request(QpType::Rc) });
    let main = w.me.qp(QpType::Rc);
    assert_eq!((mine.db_slot, main.slot), (0, 0));
    // A page is removed together with its last QP.
    let destroy = |c, h| w.me.call(c, abi::HandleReq { handle: h, reserved: 0 }.as_bytes(), 1024).0;
    assert_eq!(destroy(Command::DestroyDoorbell, doorbell), Status::Busy as u8);
    assert_eq!(destroy(Command::DestroyQp, mine.qpn), 0);
    assert_eq!(destroy(Command::DestroyDoorbell, doorbell), 0);
    assert_eq!(destroy(Command::DestroyDoorbell, doorbell), Status::BadHandle as u8);
}

/// The statuses of each command that [`rows`] provokes, without those that every command or every handle can give.
fn provoked(c: Command) -> BTreeSet<String> {
    let rows = rows().into_iter().filter(|r| r.command == c);
    let statuses = rows.flat_map(|r| {
        let ends = r.ends.then_some(Status::Exhausted);
        r.refused.iter().map(|x| x.0).chain(ends).chain([r.gives]).collect::<Vec<Status>>()
    });
    statuses.filter(|s| ![Status::Ok, Status::BadLength, Status::BadHandle].contains(s)).map(name).collect()
}

/// The name of a status in the specification: `BadValue` is BAD_VALUE.
fn name(s: impl std::fmt::Debug) -> String {
    let mut out = String::new();
    for c in format!("{s:?}").chars() {
        if c.is_uppercase() && !out.is_empty() {
            out.push('_');
        }
        out.push(c.to_ascii_uppercase());
    }
    out
}

#[test]
fn the_table_has_all_commands_operations_and_statuses() {
    let commands: BTreeSet<String> = rows().iter().map(|r| name(r.command)).collect();
    assert_eq!(commands, Command::ALL.iter().map(name).collect());
    let made: BTreeSet<u8> =
        rows().iter().filter(|r| r.command == Command::Cm).map(|r| (r.good)(&World::new())[0]).collect();
    assert_eq!(made, (1..=u8::MAX).filter(|raw| CmOp::from_raw(*raw).is_some()).collect());
    let mut statuses: BTreeSet<String> = Command::ALL.iter().flat_map(|c| provoked(*c)).collect();
    // These have tests of their own above.
    statuses.extend([Status::Ok, Status::BadLength, Status::BadHandle].map(name));
    assert_eq!(statuses, Status::ALL.iter().map(name).collect());
}

/// Section 6.2 lists the codes, the commands and the statuses that they give, and no others.
#[test]
fn the_specification_has_the_same_table() {
    let spec = include_str!("../../../../docs/spec/virtio-rdma.md");
    let section = spec.split("### 6.2").nth(1).and_then(|s| s.split("### 6.3").next()).expect("section 6.2");
    let mut commands = Vec::new();
    for line in section.lines().filter(|l| l.starts_with("| ")) {
        let columns: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let &[code, command, _, _, statuses] = &columns[..] else { panic!("{line}") };
        let Ok(code) = code.parse::<u8>() else { continue };
        let c = Command::from_raw(code).expect(line);
        assert_eq!(command.split(' ').next(), Some(&*name(c)), "{line}");
        let words = statuses.split(|c: char| !c.is_ascii_uppercase() && c != '_');
        let named: BTreeSet<String> =
            words.filter(|w| Status::ALL.iter().any(|s| name(s) == *w)).map(Into::into).collect();
        let named = named.into_iter().filter(|n| *n != name(Status::BadHandle)).collect();
        assert_eq!(provoked(c), named, "what the test provokes, and what the specification says: {line}");
        commands.push(code);
    }
    assert_eq!(commands, Command::ALL.iter().map(|c| *c as u8).collect::<Vec<u8>>());
}
