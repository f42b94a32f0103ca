//! Objects: very many, very large, created and destroyed without pause, and used after destruction.

use std::collections::VecDeque;
use std::path::Path;
use std::time::Duration;

use unirdma_abi as abi;
use unirdma_formats::{Gid, QpType, WrOpcode};
use unirdma_mem::MemFd;
use unirdma_testkit::{Program, Queue, Scripted};
use zerocopy::{FromBytes, IntoBytes};

use crate::{MTU_4096, Until, broken, ready};

pub(crate) fn regmr(socket: &Path, until: Until) {
    let mut s = Scripted::new(socket);
    let request = s.mr_request(s.hostile.bus(0), 4096);
    let mut register = || s.ask::<abi::MrResp>(abi::Command::RegUserMr, &request).mrn;
    for _ in 0..60_000 {
        register();
    }
    ready();
    while !until.over() {
        let mrn = s.ask::<abi::MrResp>(abi::Command::RegUserMr, &request).mrn;
        s.order(abi::Command::DeregMr, &abi::HandleReq { handle: mrn, reserved: 0 });
    }
}

/// Registers lists of pages that are never contiguous: short ones, in which each page is a mapping of its own, and the
/// longest ones.
pub(crate) fn pages(socket: &Path, until: Until) {
    const PAGE: u64 = 4096;
    /// Lengths of the longest list that the device takes, and of the longest that it maps.
    const LONGEST: u64 = 1 << 20;
    const MAPPED: u64 = 512;
    let mut s = Scripted::new(socket);
    let file = MemFd::new(c"pages", 4 * PAGE as usize + LONGEST as usize * 8).expect("memory file");
    let at = s.add_memory(&file);
    let list: Vec<u64> = (0..LONGEST).map(|i| at + i % 2 * 2 * PAGE).collect();
    file.span().write(4 * PAGE as usize, list.as_bytes());
    let register = |s: &mut Scripted, npages: u64| {
        let request = abi::RegUserMrReq {
            start: 0,
            pages_addr: at + 4 * PAGE,
            npages: npages as u32,
            ..s.mr_request(0, npages * PAGE)
        };
        let (status, data) = s.hostile.command(abi::Command::RegUserMr as u8, request.as_bytes());
        (status == 0).then(|| abi::MrResp::read_from_prefix(&data).expect("a whole response").0.mrn)
    };
    ready();
    while !until.over() {
        let lists = [[LONGEST; 4].as_slice(), &[MAPPED; 150]].concat();
        let made: Vec<u32> = lists.into_iter().filter_map(|n| register(&mut s, n)).collect();
        for handle in made {
            s.order(abi::Command::DeregMr, &abi::HandleReq { handle, reserved: 0 });
        }
    }
}

/// Tries to put a completion into another tenant's CQ. An XRC target lives on after the CQ in which its receives
/// completed is destroyed. The CQ that another tenant creates next must not be taken for it.
pub(crate) fn cqaba(socket: &Path, victim: &Path, until: Until) {
    /// `IBV_QPS_ERR`.
    const ERR: u8 = 6;
    ready();
    while !until.over() {
        let mut s = Scripted::new(socket);
        let xrcd = abi::CreateXrcdReq::default();
        let xrcdn = s.ask::<abi::HandleResp>(abi::Command::CreateXrcd, &xrcd).handle;
        let (sender, target) = (s.queue_of(QpType::XrcSend, 16, 0), s.queue_of(QpType::XrcRecv, 1, xrcdn));
        s.connect(&sender, s.gid, target.qpn, MTU_4096);
        s.connect(&target, s.gid, sender.qpn, MTU_4096);
        let (ring, ctrl) = (s.alloc(4096), s.alloc(128));
        let make_cq = |s: &mut Scripted| s.make_cq(64, s.hostile.bus(ring), s.hostile.bus(ctrl), abi::NO_COMP_QUEUE);
        make_cq(&mut s);
        let (ctrl, ring) = (s.alloc(128), s.alloc(4096));
        let srq = abi::CreateSrqReq {
            pdn: s.pdn,
            max_wr: 16,
            max_sge: 1,
            ctrl_addr: s.hostile.bus(ctrl),
            ring_addr: s.hostile.bus(ring),
            is_xrc: 1,
            xrcdn,
            cqn: s.cqn,
            ..Default::default()
        };
        let srq: abi::CreateSrqResp = s.ask(abi::Command::CreateSrq, &srq);
        // A message that names the SRQ makes the SRQ's CQ the CQ of the target. There is no receive, so the message
        // waits.
        let send = abi::SqWqe { opcode: WrOpcode::Send as u8, dest_qpn: srq.number, ..Default::default() };
        s.write_wqe(&sender, 0, send, abi::Sge::default());
        s.post(&sender, 1);
        std::thread::sleep(Duration::from_millis(20));
        let one = |handle: u32| abi::HandleReq { handle, reserved: 0 };
        s.order(abi::Command::DestroyQp, &one(sender.qpn));
        s.order(abi::Command::DestroySrq, &one(srq.srqn));
        s.order(abi::Command::DestroyCq, &one(s.cqn));
        // If the generation in a handle had 12 bits, it would wrap after these CQs.
        for _ in 0..4095 {
            make_cq(&mut s);
            s.order(abi::Command::DestroyCq, &one(s.cqn));
        }
        let other = Program::new(victim, 4096);
        s.receive(&target, &[1, 2, 3]);
        s.set_state(&target, ERR);
        std::thread::sleep(Duration::from_millis(20));
        let mut came = None;
        other.cq.poll(16, |_, c| came = Some(*c)).expect("the victim polls its CQ");
        if let Some(c) = came {
            return broken(&format!("the victim polled a completion of QP {:#x}, which is the attacker's", c.qp_num));
        }
    }
}

/// An IPv4 address and a port in the form of connection management.
fn cm_address(ip: [u8; 4], port: u16) -> abi::CmAddr {
    abi::CmAddr { ip: Gid::from_ip(ip.into()).0, port, family: 4, ..Default::default() }
}

/// Sends a request to connection management. Returns the identifier of the answer, or `None` if it is refused.
fn cm(s: &mut Scripted, op: abi::CmOp, request: abi::CmReq) -> Option<u32> {
    let request = abi::CmReq { op: op as u8, ..request };
    let (status, data) = s.hostile.command(abi::Command::Cm as u8, request.as_bytes());
    (status == 0).then(|| abi::CmResp::read_from_prefix(&data).expect("a whole response").0.id)
}

/// Multicast joins whose events are never read.
pub(crate) fn cmjoin(socket: &Path, until: Until) {
    /// Number of identifiers. Each joins until it is refused.
    const IDS: u32 = 250;
    let mut s = Scripted::new(socket);
    let own = abi::CmAddr { ip: s.gid, family: 4, ..Default::default() };
    let group = cm_address([224, 0, 0, 9], 0);
    ready();
    while !until.over() {
        let mut ids = Vec::new();
        for queue in 0..IDS {
            let new = abi::CmReq { port_space: abi::port_space::UDP, queue, ..Default::default() };
            let Some(id) = cm(&mut s, abi::CmOp::Create, new) else { break };
            ids.push(id);
            cm(&mut s, abi::CmOp::Bind, abi::CmReq { id, src: own, ..Default::default() });
            let join = abi::CmReq { id, dst: group, ..Default::default() };
            while !until.over() && cm(&mut s, abi::CmOp::Join, join).is_some() {}
        }
        for id in ids {
            cm(&mut s, abi::CmOp::Destroy, abi::CmReq { id, ..Default::default() });
        }
    }
}

/// Requests for connections, to a listener that accepts none.
pub(crate) fn cmreq(socket: &Path, until: Until) {
    const PORT: u16 = 7471;
    const QUEUE: u32 = 0;
    /// Number of identifiers that are open at a time.
    const IDS: usize = 1000;
    let mut s = Scripted::new(socket);
    let own = abi::CmAddr { ip: s.gid, port: PORT, family: 4, ..Default::default() };
    let new = abi::CmReq { port_space: abi::port_space::TCP, queue: QUEUE, ..Default::default() };
    let q = s.queue(1);
    let listener = cm(&mut s, abi::CmOp::Create, new).expect("an identifier");
    cm(&mut s, abi::CmOp::Bind, abi::CmReq { id: listener, src: own, ..Default::default() }).expect("a free port");
    let listen = abi::CmReq { id: listener, value: u32::MAX, ..Default::default() };
    cm(&mut s, abi::CmOp::Listen, listen).expect("a listener");
    ready();
    let mut open = VecDeque::new();
    while !until.over() {
        if open.len() == IDS {
            let id = open.pop_front().unwrap_or_default();
            cm(&mut s, abi::CmOp::Destroy, abi::CmReq { id, ..Default::default() });
        }
        let Some(id) = cm(&mut s, abi::CmOp::Create, new) else { continue };
        open.push_back(id);
        let param = abi::CmParam { qpn: q.qpn, ..Default::default() };
        for op in [abi::CmOp::ResolveAddr, abi::CmOp::ResolveRoute, abi::CmOp::Connect] {
            cm(&mut s, op, abi::CmReq { id, dst: own, param, value: 1000, ..Default::default() });
        }
    }
}

/// Sessions that create the most QPs that they may and end at once, so that the virtual layer destroys the QPs.
pub(crate) fn teardown(socket: &Path, until: Until) {
    ready();
    while !until.over() {
        let mut s = Scripted::new(socket);
        let queues: Vec<Queue> = (0..abi::MAX_QP).map(|_| s.queue(1)).collect();
        for pair in queues.chunks_exact(2).take(256) {
            s.connect(&pair[0], s.gid, pair[1].qpn, MTU_4096);
            s.connect(&pair[1], s.gid, pair[0].qpn, MTU_4096);
        }
    }
}

/// Creates the most objects of each kind that a session may have, again and again.
pub(crate) fn exhausted(socket: &Path, until: Until) {
    ready();
    while !until.over() {
        let mut s = Scripted::new(socket);
        let (ring, ctrl) = (s.alloc(4096), s.alloc(128));
        let (ring, ctrl) = (s.hostile.bus(ring), s.hostile.bus(ctrl));
        let comp_queue = abi::NO_COMP_QUEUE;
        let cq = abi::CreateCqReq { cqe: 1, entries: 1, ring_addr: ring, ctrl_addr: ctrl, comp_queue, reserved: 0 };
        let srq = abi::CreateSrqReq { pdn: s.pdn, max_wr: 1, ring_addr: ring, ctrl_addr: ctrl, ..Default::default() };
        let grh = abi::GlobalRoute { dgid: s.gid, ..Default::default() };
        let attr = abi::AhAttr { grh, is_global: 1, port_num: 1, ..Default::default() };
        let ah = abi::CreateAhReq { pdn: s.pdn, reserved: 0, attr };
        let window = abi::AllocMwReq { pdn: s.pdn, mw_type: 1 };
        let null = abi::HandleReq { handle: s.pdn, reserved: 0 };
        let xrcd = abi::CreateXrcdReq::default();
        let kinds: [(abi::Command, &[u8]); 7] = [
            (abi::Command::CreatePd, &[]),
            (abi::Command::CreateCq, cq.as_bytes()),
            (abi::Command::CreateSrq, srq.as_bytes()),
            (abi::Command::CreateAh, ah.as_bytes()),
            (abi::Command::AllocMw, window.as_bytes()),
            (abi::Command::AllocNullMr, null.as_bytes()),
            (abi::Command::CreateXrcd, xrcd.as_bytes()),
        ];
        for (command, request) in kinds {
            while !until.over() && s.hostile.command(command as u8, request).0 == 0 {}
        }
    }
}
