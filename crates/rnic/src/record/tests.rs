//! Inconsistent records, each wrong in one place.

use std::sync::Arc;

use unirdma_abi as abi;
use unirdma_formats::{Gid, QpType, WrOpcode, attr_mask as m, send_flags};
use unirdma_mem::{Bell, CqRing, QpRings, Span};
use zerocopy::IntoBytes;

use super::check::check;
use super::data::*;
use super::*;
use crate::objects::{Backing, CreateQp, Limits, OpenXrcd, Resolve, SrqAttr, VrnicConfig, VrnicId};
use crate::path::Route;
use crate::rnic::Rnic;

fn aligned(len: usize) -> Span {
    let s = Span::anonymous(len + 64);
    s.sub((64 - s.addr() as u64 % 64) % 64, len as u64).unwrap()
}

/// Memory of a session, from bus address 0 on.
struct Ram(Span);

impl Resolve for Ram {
    fn resolve(&self, addr: u64, len: u64) -> Option<(&Span, u64)> {
        (addr.checked_add(len)? <= self.0.len() as u64).then_some((&self.0, addr))
    }
}

fn gid(n: u8) -> Gid {
    Gid::from_ip(std::net::IpAddr::from([10, 0, 0, n]))
}

fn rings(cap: &abi::QpCap) -> QpRings {
    let layout = abi::QpLayout::of(cap).unwrap();
    QpRings::new(aligned(128), aligned(layout.sq_bytes()), aligned(layout.rq_bytes()), layout).unwrap()
}

fn attr(peer_qpn: u32, peer: Gid) -> [(u32, abi::QpAttr); 3] {
    let a = abi::QpAttr {
        port_num: 1,
        path_mtu: 3,
        dest_qp_num: peer_qpn,
        max_dest_rd_atomic: 4,
        max_rd_atomic: 4,
        timeout: 14,
        qkey: 5,
        ah_attr: abi::AhAttr {
            grh: abi::GlobalRoute { dgid: peer.0, ..Default::default() },
            is_global: 1,
            port_num: 1,
            ..Default::default()
        },
        ..Default::default()
    };
    let rtr = m::AV | m::PATH_MTU | m::DEST_QPN | m::RQ_PSN | m::MAX_DEST_RD_ATOMIC | m::MIN_RNR_TIMER;
    let rts = m::TIMEOUT | m::RETRY_CNT | m::RNR_RETRY | m::SQ_PSN | m::MAX_QP_RD_ATOMIC;
    [
        (m::STATE | m::PKEY_INDEX | m::PORT | m::ACCESS_FLAGS, abi::QpAttr { qp_state: 1, ..a }),
        (m::STATE | rtr, abi::QpAttr { qp_state: 2, ..a }),
        (m::STATE | rts, abi::QpAttr { qp_state: 3, ..a }),
    ]
}

/// A vRNIC with an object of each kind: an RC QP with requests under way to another host, a UD QP in a group, and the
/// target of an XRC connection.
fn full() -> VrnicData {
    let mut rnic = Rnic::new(7, 0);
    let config = VrnicConfig { group: 3, gids: vec![gid(1)], limits: Limits::default(), share: Default::default() };
    let vrnic: VrnicId = rnic.add_vrnic(config).unwrap();
    let route = Route { host: [192, 168, 0, 2].into(), foreign: false, vni: 5 };
    rnic.set_routes([((3, gid(2)), route)].into_iter().collect());
    let s = rnic.add_session(vrnic).unwrap();
    let bell = Bell::new(aligned(4096)).unwrap();
    rnic.set_doorbell(s, bell.clone()).unwrap();
    rnic.unpark(s, 0);
    rnic.set_stage(s, aligned(8192)).unwrap();
    let pd = rnic.create_pd(s).unwrap();
    let cq = rnic.create_cq(s, CqRing::new(aligned(128), aligned(4096), 64).unwrap(), Some(0)).unwrap();
    let flags = unirdma_formats::access::MR_SUPPORTED;
    let backing = Backing::Mapped(aligned(4096));
    let (_, key) = rnic.reg_mr(s, pd, flags, 0x1000, 4096, (backing, vec![1])).unwrap();
    let (_, window) = rnic.alloc_mw(s, pd, 2).unwrap();
    let (_, fast) = rnic.create_mr(s, pd, unirdma_formats::access::FAST_SUPPORTED, 2, Arc::new(())).unwrap();
    rnic.set_memory(s, Arc::new(Ram(Span::anonymous(1 << 14))));
    let xrcd = rnic.create_xrcd(s, OpenXrcd { key: Some((1, 2)), create: true, exclusive: false }).unwrap();
    let cap = abi::QpCap { max_send_wr: 8, max_recv_wr: 8, max_send_sge: 2, max_recv_sge: 2, max_inline_data: 64 };
    let layout = abi::QpLayout::of(&cap).unwrap();
    let queue = QpRings::receive_only(aligned(128), aligned(layout.rq_bytes()), layout).unwrap();
    let a = SrqAttr { max_wr: 8, max_sge: 2, limit: 0, xrc: Some((xrcd, cq)) };
    rnic.create_srq(s, pd, a, queue).unwrap();
    let create = |xrcd: Option<u32>| CreateQp {
        pd,
        send_cq: cq,
        recv_cq: cq,
        srq: None,
        xrcd,
        door: 0,
        sig_all: false,
        cap,
        rings: rings(&cap),
    };
    let rc = create(None);
    let sq = rc.rings.clone();
    let (qpn, slot) = rnic.create_qp(s, QpType::Rc as u8, rc).unwrap();
    let page = Bell::new(aligned(4096)).unwrap();
    let door = rnic.create_doorbell(s, page).unwrap();
    let (ud, _) = rnic.create_qp(s, QpType::Ud as u8, CreateQp { door, ..create(None) }).unwrap();
    rnic.create_qp(s, QpType::XrcRecv as u8, create(Some(xrcd))).unwrap();
    rnic.attach_mcast(s, ud, Gid::from_ip([239, 1, 1, 1].into())).unwrap();
    let steps = attr(9, gid(2));
    rnic.create_ah(s, pd, &abi::AhAttr { static_rate: 2, ..steps[0].1.ah_attr }).unwrap();
    for (mask, a) in steps {
        rnic.modify_qp(s, qpn, mask, &a).unwrap();
    }
    // A window is bound, pages are registered, then a WRITE of two packets and an atomic are sent. The list of pages is
    // zeros.
    let register = abi::SqWqe {
        opcode: WrOpcode::RegMr as u8,
        rkey: fast,
        remote_addr: 0x1001,
        compare_add: 5000,
        ah: 12,
        dest_qpn: 2,
        ..Default::default()
    };
    sq.sq_put(3, 0, register.as_bytes());
    let ops = [(WrOpcode::BindMw, 0), (WrOpcode::Write, 2000), (WrOpcode::FetchAdd, 8)];
    for (at, (op, length)) in (0..).zip(ops) {
        let bind = op == WrOpcode::BindMw;
        let w = abi::SqWqe {
            opcode: op as u8,
            num_sge: u8::from(!bind),
            send_flags: send_flags::SIGNALED,
            rkey: window ^ 1,
            remote_addr: 0x1000,
            compare_add: 100,
            swap: u64::from(key),
            ..Default::default()
        };
        sq.sq_put(at, 0, w.as_bytes());
        sq.sq_put(at, abi::SQ_DATA, abi::Sge { addr: 0x1000, length, lkey: key }.as_bytes());
    }
    sq.set_sq_prod(4);
    bell.ring(slot);
    let ask =
        |op: abi::CmOp, id| abi::CmReq { op: op as u8, id, port_space: abi::port_space::TCP, ..Default::default() };
    let id = rnic.cm(s, &ask(abi::CmOp::Create, 0)).unwrap().id;
    rnic.cm(s, &ask(abi::CmOp::Listen, id)).unwrap();
    while rnic.poll(0) {}
    rnic.save_vrnic(0, vrnic).unwrap().0
}

fn rc(d: &mut VrnicData) -> &mut QpData {
    d.qps.iter_mut().find(|q| q.typ == QpType::Rc as u8).unwrap()
}

fn target(d: &mut VrnicData) -> &mut QpData {
    d.qps.iter_mut().find(|q| q.typ == QpType::XrcRecv as u8).unwrap()
}

fn wire(d: &mut VrnicData) -> &mut WireData {
    let ConnectionData::Wire(w) = &mut rc(d).connection else { panic!("not connected") };
    w
}

fn datagrams(d: &mut VrnicData) -> &mut Vec<GidBytes> {
    let ud = d.qps.iter_mut().find_map(|q| match &mut q.connection {
        ConnectionData::Datagram { groups, .. } => Some(groups),
        _ => None,
    });
    ud.unwrap()
}

/// The MR that work requests register.
fn fast(d: &mut VrnicData) -> &mut MrData {
    d.sessions[0].mrs.iter_mut().find(|m| m.pages.is_some()).unwrap()
}

fn list(d: &mut VrnicData) -> &mut PagesData {
    fast(d).pages.as_mut().unwrap()
}

fn window(d: &mut VrnicData) -> &mut MrData {
    d.sessions[0].mrs.iter_mut().find(|m| matches!(m.kind, MrKind::Window { .. })).unwrap()
}

/// A change of a record, and the error that follows.
type Case = (fn(&mut VrnicData), &'static str);

const NOBODY: At = At { session: 1, number: 7 };

const CASES: &[Case] = &[
    (|d| d.sessions.push(d.sessions[0].clone()), "session 1: stands there twice"),
    (|d| d.last_session = 0, "session 1: a value is out of range: its number"),
    (|d| d.gids.push(d.gids[0]), "GID ::ffff:10.0.0.1: stands there twice"),
    (|d| d.share.weight = 0, "the vRNIC: a value is out of range: its weight"),
    (|d| d.limits.max_qp = 2, "the vRNIC: more QPs than its quota"),
    (|d| d.limits.max_cq = 0, "the vRNIC: more CQs than its quota"),
    (|d| d.limits.max_mr_bytes = 4095, "the vRNIC: more bytes of memory than its quota"),
    (|d| d.qps.push(d.qps[0].clone()), "stands there twice"),
    (|d| rc(d).qpn = 1, "QP 1: a value is out of range: its number"),
    (|d| rc(d).owner = 2, "there is no such session"),
    (|d| rc(d).memory = Some(2), "there is no such session"),
    (|d| rc(d).pd = None, "there is no such PD or CQ"),
    (|d| rc(d).pd = Some(NOBODY), "there is no such PD"),
    (|d| rc(d).send_cq = Some(NOBODY), "there is no such CQ"),
    (|d| rc(d).recv_cq = Some(NOBODY), "there is no such CQ"),
    (|d| rc(d).srq = Some(NOBODY), "there is no such SRQ"),
    (|d| rc(d).xrcd = Some(7), "there is no such XRC domain"),
    (|d| target(d).xrcd = None, "a value is out of range: its XRC domain"),
    (|d| target(d).openers.push(NOBODY), "there is no such XRC domain"),
    (|d| rc(d).slot = Some((0, 1)), "stands there twice"),
    (|d| rc(d).slot = None, "session 1: a value is out of range: a doorbell bit"),
    (|d| d.sessions[0].doors[0].free_slots.push(0), "session 1: stands there twice"),
    (|d| d.sessions[0].doors[1].slots = 9, "session 1: a value is out of range: a doorbell bit"),
    (|d| d.sessions[0].doors.truncate(1), "there is no such doorbell page"),
    (|d| d.sessions[0].doors[1].number = 0, "doorbell page of session 1: stands there twice"),
    (|d| d.sessions[0].doors[0].slots = 9, "session 1: a value is out of range: a doorbell bit"),
    (|d| rc(d).typ = 1, "a value is out of range: its type"),
    (|d| rc(d).state = 7, "a value is out of range: its state"),
    (|d| rc(d).mtu = 1000, "a value is out of range: its path MTU"),
    (|d| rc(d).sq_psn = 1 << 24, "a value is out of range: a PSN"),
    (|d| rc(d).attr.0.timeout = 32, "a value is out of range: an attribute"),
    (|d| rc(d).cap.0.max_send_sge = 33, "a value is out of range: its capabilities"),
    (|d| rc(d).layout.sq_entries = 0, "a value is out of range: the size of its rings"),
    (|d| rc(d).layout.rq_entries = 3, "a value is out of range: the size of its rings"),
    (|d| rc(d).layout.sq_stride = 64, "a value is out of range: the size of its rings"),
    (|d| rc(d).wait = Some(WaitData { why: WaitKind::Ack, due_ns: None }), "a value is out of range: its wait"),
    (
        |d| rc(d).connection = ConnectionData::Datagram { backlog: vec![], groups: vec![] },
        "a value is out of range: its connection",
    ),
    (|d| datagrams(d).push([1; 16]), "a value is out of range: a multicast group"),
    (|d| datagrams(d).push(Gid::from_ip([239, 1, 1, 1].into()).0), "stands there twice"),
    (|d| wire(d).una = 1 << 24, "a value is out of range: a PSN"),
    (|d| wire(d).next = 5, "a value is out of range: a PSN"),
    (|d| wire(d).cursor = 9, "a value is out of range: its requests"),
    (|d| wire(d).cursor = 0, "a value is out of range: its place among its requests"),
    (|d| wire(d).flight[0].first = 1, "a value is out of range: the PSN of a request"),
    (|d| wire(d).flight[0].packets = 3, "a value is out of range: the packets of a request"),
    (|d| wire(d).flight[1].status = Some(77), "a value is out of range: the status of a request"),
    (|d| wire(d).flight[0].work.wqe.0.opcode = 99, "a value is out of range: the operation of a request"),
    (|d| wire(d).flight[0].work.total = 5000, "a value is out of range: a request"),
    (|d| wire(d).flight[0].work.done = 5000, "a value is out of range: a request"),
    (|d| wire(d).flight[0].work.found = Some(1), "a value is out of range: what an atomic has found"),
    (|d| wire(d).flight[0].work.sges = vec![Raw(abi::Sge::default()); 33], "a value is out of range: a request"),
    (|d| wire(d).flight[0].work.inline = vec![0; 2000], "a value is out of range: a request"),
    (|d| wire(d).retries_left = 8, "a value is out of range: its retries"),
    (|d| wire(d).window.packets = 1, "a value is out of range: its window"),
    (|d| wire(d).window.alpha = 1 << 20, "a value is out of range: its window"),
    (|d| wire(d).responder.message = Some(MessageData::Send), "a value is out of range: the message under way"),
    (|d| wire(d).responder.atomics.push((1 << 24, 0)), "a value is out of range: a PSN"),
    (|d| wire(d).responder.answers.push(read(Some(NOBODY), None)), "there is no such PD"),
    (|d| wire(d).responder.answers.push(read(None, Some(2))), "there is no such session"),
    (
        |d| wire(d).responder.answers.push(AnswerData::Nak { psn: 0, msn: 0, code: 0, fails: Some(Some(999)) }),
        "a value is out of range: an event",
    ),
    (|d| rc(d).recv = Some(recv(2)), "there is no such session"),
    (|d| rc(d).recv = Some(recv(1)), "there is no such record of a stage"),
    (|d| d.sessions[0].stage.as_mut().unwrap().bytes = 1, "the stage of session 1: a value is out of range: its size"),
    (
        |d| d.sessions[0].stage.as_mut().unwrap().cursor = 0,
        "the stage of session 1: a value is out of range: its cursor",
    ),
    (
        |d| d.sessions[0].stage.as_mut().unwrap().given = vec![(0, 1)],
        "the stage of session 1: a value is out of range: a record",
    ),
    (
        |d| d.sessions[0].stage.as_mut().unwrap().given = vec![(9, 99)],
        "the stage of session 1: a value is out of range: a record",
    ),
    (
        |d| d.sessions[0].stage.as_mut().unwrap().given = vec![(9, 3), (11, 2)],
        "the stage of session 1: a value is out of range: a record",
    ),
    (|d| d.sessions[0].pds.extend_from_within(..), "stands there twice"),
    (|d| d.sessions[0].last_name = 5, "a value is out of range: its number"),
    (|d| d.sessions[0].cqs[0].entries = 3, "a value is out of range: its size"),
    (|d| d.sessions[0].cqs[0].notify = 8, "a value is out of range: its arming"),
    (|d| d.sessions[0].srqs[0].pd = 7, "there is no such PD"),
    (|d| d.sessions[0].srqs[0].limit = 9, "a value is out of range: its size"),
    (|d| d.sessions[0].srqs[0].xrc.as_mut().unwrap().xrcd = 7, "there is no such XRC domain"),
    (|d| d.sessions[0].srqs[0].xrc.as_mut().unwrap().cq = 7, "there is no such CQ"),
    (
        |d| d.sessions[0].srqs[0].xrc.as_mut().unwrap().number = 0,
        "the XRC SRQ with number 0: a value is out of range: its number",
    ),
    (|d| d.sessions[0].mrs[0].pd = 7, "there is no such PD"),
    (|d| d.sessions[0].mrs[0].len = u64::MAX, "a value is out of range: its length"),
    (|d| fast(d).pages = None, "there is no such list of pages"),
    (|d| fast(d).len += 4096, "a value is out of range: its pages"),
    (|d| fast(d).iova += 1, "a value is out of range: its pages"),
    (|d| fast(d).access = unirdma_formats::access::MW_BIND, "a value is out of range: its pages"),
    (|d| fast(d).regions = vec![1], "a value is out of range: its pages"),
    (|d| list(d).most = 1, "a value is out of range: its pages"),
    (|d| list(d).most = 1 << 30, "a value is out of range: its pages"),
    (|d| list(d).granting = u32::MAX, "a value is out of range: its pages"),
    (|d| list(d).shift = 64, "a value is out of range: its pages"),
    (|d| list(d).pages.as_mut().unwrap()[1] = 1, "a value is out of range: its pages"),
    (|d| list(d).pages = None, "a value is out of range: its pages"),
    (
        |d| {
            let pages = fast(d).pages.clone();
            window(d).pages = pages;
        },
        "a value is out of range: its pages",
    ),
    (
        |d| {
            let parent = fast(d).number;
            window(d).kind = MrKind::Window { second: true, qpn: None, bound: Some((parent, 0)) };
        },
        "a value is out of range: the MR that it is bound to",
    ),
    (|d| window(d).key = d.sessions[0].mrs[0].key ^ 3, "stands there twice"),
    (|d| window(d).kind = MrKind::Window { second: true, qpn: None, bound: Some((7, 0)) }, "there is no such MR"),
    (|d| window(d).len = 5000, "a value is out of range: the range that it is bound to"),
    (|d| d.sessions[0].ahs[0].pd = 7, "there is no such PD"),
    (|d| d.sessions[0].ahs[0].static_rate = 1, "a value is out of range: its static rate"),
    (|d| d.sessions[0].ahs[0].flow.src = [0u16; 8].into(), "a value is out of range: an address"),
    (
        |d| d.sessions[0].outputs.push(OutputData::Async { kind: 999, handle: 0 }),
        "session 1: a value is out of range: an event",
    ),
    (|d| d.cm.ids[0].owner = Some(2), "there is no such session"),
    (|d| d.cm.ids[0].state = 99, "a value is out of range: its state"),
    (|d| d.cm.ids[0].listener = Some(1), "there is no such listener"),
    (|d| d.cm.ids[0].sent = Some(vec![0; 255]), "a value is out of range: its message"),
    (|d| d.cm.ids[0].requested = true, "a value is out of range: its peer"),
    (|d| d.cm.ids.push(d.cm.ids[0].clone()), "stands there twice"),
    (|d| d.cm.ports[0].ids.push(5), "the vRNIC: there is no such identifier of a port"),
    (|d| d.cm.ports[0].port ^= 1, "a value is out of range: its port"),
    (|d| d.cm.ports.push(d.cm.ports[0].clone()), "the vRNIC: stands there twice"),
    (
        |d| d.cm.events.push(EventsData { session: 2, queue: 0, events: vec![] }),
        "the events on queue 0 of session 2: there is no such session",
    ),
    (
        |d| d.cm.early.push(EarlyData { until_ns: 0, own: [0; 16], from: [0; 16], service: 0, mad: vec![] }),
        "the vRNIC: a value is out of range: a request that waits",
    ),
];

fn read(pd: Option<At>, memory: Option<u32>) -> AnswerData {
    AnswerData::Read { psn: 0, msn: 0, va: 0, rkey: 0, len: 1, done: 0, pd, memory, again: false }
}

fn recv(owner: u32) -> RecvData {
    RecvData {
        wr_id: 0,
        sges: vec![],
        valid: true,
        staged: Some(StagedData { owner, record: 128, data: 192, room: 8 }),
    }
}

#[test]
fn a_record_that_is_inconsistent_anywhere_says_where() {
    let good = full();
    assert_eq!(check(&good), Ok(()));
    for (i, (change, expected)) in CASES.iter().enumerate() {
        let mut bad = good.clone();
        change(&mut bad);
        let Err(flaw) = check(&bad) else { panic!("case {i}, {expected}: nothing was found") };
        assert!(flaw.to_string().ends_with(expected), "case {i}: {flaw}, and not {expected}");
        // Its bytes are refused, too, although their checksum is right.
        let bytes = Record(bad).to_bytes().unwrap();
        assert_eq!(Record::from_bytes(&bytes), Err(RecordError::Inconsistent(flaw)), "case {i}");
    }
}
