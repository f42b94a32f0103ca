//! One of the two worlds: it executes the program's acts and records their visible results.

use std::collections::{BTreeMap, HashMap};

use unirdma_abi as abi;
use unirdma_formats::{
    AsyncEvent, QpState, QpType, WcOpcode, WcStatus, WrOpcode, attr_mask as m, send_flags, wc_flags,
};
use unirdma_mem::{CqTail, ProcMem};
use unirdma_rnic::{Backing, CreateQp, OpenXrcd, Output, SessionId};
use zerocopy::IntoBytes;

use super::program::{
    Act, At, Attributes, Change, GONE, Key, Kind, Piece, Queue, REGIONS, Request, To, USED, WINDOWS, iova,
};
use super::{EVENTS, Seen};
use crate::net::{Faults, Net, gid};
use crate::xrc::{SharedQueue, XrcSrq};
use crate::{CAP, QKEY, Queues, address, attrs_of, create_of, new_cq, pattern, wqe};

/// Longer than any backoff of doorbell polling.
const MUTED_NS: u64 = 100_000;

/// The objects of one program in one world. The end of the network has its session, its first PD and its memory.
struct Side {
    other_pd: u32,
    /// Handles and keys.
    regions: Vec<(u32, u32)>,
    windows: Vec<(u32, u32)>,
    /// Numbers and rings.
    cqs: Vec<(u32, CqTail)>,
    srq: SharedQueue,
    xrc: XrcSrq,
    /// Address handles: to the peer, to the peer in the other PD, to itself.
    ahs: [u32; 3],
}

/// A QP of a program.
struct Member {
    queues: Queues,
    /// Indices of its program's CQs for sends and for receives; `None` for the target of an XRC connection.
    cqs: Option<[usize; 2]>,
}

/// Two programs, on one host or on two.
pub(super) struct World {
    pub name: &'static str,
    net: Net,
    kinds: Vec<Kind>,
    sides: Vec<Side>,
    qps: BTreeMap<At, Member>,
    /// Names of all QPs that existed, by QPN.
    names: HashMap<u32, String>,
    /// Bit mask of the regions that are reached as private memory of a process.
    private: u64,
}

impl World {
    /// The world of a seed on `hosts` hosts. The bits of `private` say which regions are reached as private memory of a
    /// process.
    pub fn new(name: &'static str, hosts: usize, seed: u64, kinds: &[Kind], private: u64) -> World {
        let mut net = Net::hosts(hosts, &[QpType::Rc, QpType::Rc], seed, Faults::default());
        let sides = (0..2).map(|end| Side::new(&mut net, end)).collect();
        let kinds = kinds.to_vec();
        let mut w = World { name, net, kinds, sides, qps: BTreeMap::new(), names: HashMap::new(), private };
        for end in 0..2 {
            w.fill(end, 0, &pattern(USED as usize, seed << 1 | end as u64));
            for region in 0..REGIONS.len() {
                let made = w.register(end, region);
                w.sides[end].regions.push(made);
            }
            let (session, gone) = (w.net.ends[end].session, w.sides[end].regions[GONE].0);
            w.net.rnic(end).dereg_mr(session, gone).unwrap();
            for i in 0..WINDOWS * w.kinds.len() {
                let made = w.window(end, i);
                w.sides[end].windows.push(made);
            }
        }
        for c in 0..w.kinds.len() {
            for end in 0..2 {
                w.make_cqs((end, c));
                w.make_qp((end, c));
            }
        }
        w
    }

    fn type_of(&self, (end, c): At) -> QpType {
        let typ = self.kinds[c].typ;
        if end == 0 { typ } else { typ.peer() }
    }

    fn session(&self, end: usize) -> SessionId {
        self.net.ends[end].session
    }

    fn register(&mut self, end: usize, region: usize) -> (u32, u32) {
        let (r, e) = (REGIONS[region], &self.net.ends[end]);
        let memory = e.memory.sub(r.at, r.len).unwrap();
        let private = self.private >> (8 * end + region) & 1 != 0;
        let backing = if private {
            Backing::Process(ProcMem::of_self().unwrap(), memory.addr() as u64)
        } else {
            Backing::Mapped(memory)
        };
        let (session, pd) = (e.session, if r.main { e.pd } else { self.sides[end].other_pd });
        self.net.rnic(end).reg_mr(session, pd, r.access, iova(region), r.len, (backing, vec![7])).unwrap()
    }

    fn window(&mut self, end: usize, i: usize) -> (u32, u32) {
        let (session, pd) = (self.session(end), self.net.ends[end].pd);
        self.net.rnic(end).alloc_mw(session, pd, 1 + (i % WINDOWS) as u32).unwrap()
    }

    fn make_cqs(&mut self, at: At) {
        let (kind, session) = (self.kinds[at.1], self.session(at.0));
        for _ in 0..2 {
            let cq = new_cq(self.net.rnic(at.0), session, if kind.tiny { 4 } else { 64 });
            self.sides[at.0].cqs.push(cq);
        }
    }

    fn make_qp(&mut self, at: At) {
        let (end, c) = at;
        let (kind, typ, session) = (self.kinds[c], self.type_of(at), self.session(end));
        let (side, e) = (&self.sides[end], &self.net.ends[end]);
        let target = typ == QpType::XrcRecv;
        let [send, recv] = [2 * c, 2 * c + usize::from(!kind.one_cq)];
        let create = if target {
            CreateQp { xrcd: Some(side.xrc.xrcd), ..create_of(0, 0, 0) }
        } else {
            let srq = (kind.shared && typ != QpType::XrcSend).then_some(side.srq.srq);
            let rings = create_of(e.pd, side.cqs[send].0, side.cqs[recv].0);
            CreateQp { srq, sig_all: kind.sig_all, ..rings }
        };
        let bell = e.bell.clone();
        let queues = Queues::new(self.net.rnic(end), session, bell, typ as u8, create);
        self.names.insert(queues.qpn, format!("QP {c} of program {end}"));
        self.qps.insert(at, Member { queues, cqs: (!target).then_some([send, recv]) });
    }

    /// Executes these acts, and then records the state that a program can see.
    pub fn perform(&mut self, acts: &[Act]) -> Seen {
        let mut seen = Seen::default();
        for act in acts {
            self.act(act, &mut seen);
        }
        self.look(&mut seen);
        seen
    }

    fn act(&mut self, act: &Act, seen: &mut Seen) {
        match act {
            Act::Connect(c, a, late) => {
                for end in 0..2 {
                    let done = self.connect((end, *c), *a, *late == Some(end));
                    seen.note("commands", format!("connect QP {c} of program {end}: {done:?}"));
                }
            }
            Act::Recv { queue, wr_id, pieces, num_sge } => {
                let sges = self.sges(pieces);
                let head = abi::RqWqe { wr_id: *wr_id, num_sge: num_sge.unwrap_or(sges.len() as u32), reserved: 0 };
                match *queue {
                    Queue::Own(at) => self.member(at).queues.recv_raw(head, &sges),
                    Queue::Shared(end) => self.sides[end].srq.recv_raw(head, &sges),
                    Queue::Xrc(end) => self.sides[end].xrc.recv_raw(head, &sges),
                }
            }
            Act::Send { qp, wr_id, request } => self.send(*qp, *wr_id, request),
            Act::Modify(at, change) => {
                let done = self.modify(*at, *change);
                seen.note("commands", format!("{change:?} of {at:?}: {done:?}"));
            }
            Act::Arm(at, solicited) => {
                let flags = if *solicited { abi::NOTIFY_SOLICITED } else { abi::NOTIFY_NEXT };
                for cq in self.qps[at].cqs.into_iter().flatten() {
                    let (session, cqn) = (self.session(at.0), self.sides[at.0].cqs[cq].0);
                    self.net.rnic(at.0).req_notify_cq(session, cqn, flags).unwrap();
                }
            }
            Act::Limit(queue, limit) => {
                let (end, srq) = match *queue {
                    Queue::Shared(end) => (end, self.sides[end].srq.srq),
                    Queue::Xrc(end) => (end, self.sides[end].xrc.srq),
                    Queue::Own(_) => return,
                };
                let session = self.session(end);
                let done = self.net.rnic(end).modify_srq(session, srq, *limit);
                seen.note("commands", format!("limit {limit} of {queue:?}: {done:?}"));
            }
            Act::Renew(end, region) => {
                let (session, mr) = (self.session(*end), self.sides[*end].regions[*region].0);
                let done = self.net.rnic(*end).dereg_mr(session, mr);
                if done.is_ok() {
                    self.sides[*end].regions[*region] = self.register(*end, *region);
                }
                seen.note("commands", format!("deregister region {region} of program {end}: {done:?}"));
            }
            Act::RenewWindow(end, i) => {
                let (session, mw) = (self.session(*end), self.sides[*end].windows[*i].0);
                self.net.rnic(*end).dealloc_mw(session, mw).unwrap();
                self.sides[*end].windows[*i] = self.window(*end, *i);
            }
            Act::Replace(at) => {
                let (session, qpn) = (self.session(at.0), self.qps[at].queues.qpn);
                self.net.rnic(at.0).destroy_qp(session, qpn).unwrap();
                self.make_qp(*at);
            }
            Act::Run(ns) => {
                // After spurious doorbells a vRNIC's doorbells are not polled for up to 50 us, and no timer says when
                // polling resumes.
                self.net.run(MUTED_NS);
                self.net.run(*ns - MUTED_NS);
            }
        }
    }

    fn member(&mut self, at: At) -> &mut Member {
        self.qps.get_mut(&at).unwrap()
    }

    fn connect(&mut self, at: At, a: Attributes, late: bool) -> Result<(), abi::Status> {
        let (end, c) = at;
        let (session, qpn, peer) = (self.session(end), self.qps[&at].queues.qpn, self.qps[&(1 - end, c)].queues.qpn);
        self.modify(at, Change::Reset)?;
        let typ = self.type_of(at);
        for (mask, attr) in attrs_of(typ, peer, gid(1 - end)) {
            if late && attr.qp_state == QpState::Rts as u8 {
                break;
            }
            let attr = abi::QpAttr {
                path_mtu: a.mtu,
                timeout: a.timeout,
                retry_cnt: a.retry_cnt,
                rnr_retry: a.rnr_retry,
                min_rnr_timer: a.min_rnr_timer,
                qp_access_flags: a.access,
                max_rd_atomic: a.reads,
                max_dest_rd_atomic: a.reads,
                ..attr
            };
            self.net.rnic(end).modify_qp(session, qpn, mask, &attr)?;
        }
        Ok(())
    }

    fn modify(&mut self, at: At, change: Change) -> Result<(), abi::Status> {
        let (session, qpn) = (self.session(at.0), self.qps[&at].queues.qpn);
        let to = |state: QpState| abi::QpAttr { qp_state: state as u8, ..Default::default() };
        let (mask, attr) = match change {
            Change::Error => (m::STATE, to(QpState::Err)),
            Change::Drain => {
                (m::STATE | m::EN_SQD_ASYNC_NOTIFY, abi::QpAttr { en_sqd_async_notify: 1, ..to(QpState::Sqd) })
            }
            Change::Send => (m::STATE, to(QpState::Rts)),
            Change::Reset => (m::STATE, to(QpState::Reset)),
            Change::Init => (m::STATE, to(QpState::Init)),
            Change::Access(flags) => (m::ACCESS_FLAGS, abi::QpAttr { qp_access_flags: flags, ..Default::default() }),
        };
        let done = self.net.rnic(at.0).modify_qp(session, qpn, mask, &attr);
        if change == Change::Reset && done.is_ok() {
            self.member(at).queues.restart();
        }
        done
    }

    fn key(&self, key: Key) -> u32 {
        match key {
            Key::Region(end, region) => self.sides[end].regions[region].1,
            Key::Window(end, i) => self.sides[end].windows[i].1,
            Key::Nearly(end) => self.sides[end].regions[0].1 ^ 1,
            Key::Nobodys => 0xffff_ff01,
        }
    }

    fn sges(&self, pieces: &[Piece]) -> Vec<abi::Sge> {
        let sge = |p: &Piece| abi::Sge { addr: iova(p.region) + p.off, length: p.len, lkey: self.key(p.key) };
        pieces.iter().map(sge).collect()
    }

    fn send(&mut self, at: At, wr_id: u64, r: &Request) {
        let (end, c) = at;
        let sges = self.sges(&r.pieces);
        let (mut rkey, other) = (self.key(r.rkey), self.key(r.other));
        let (mut compare_add, mut swap, mut imm) = (r.operands.0, r.operands.1, r.imm);
        match r.op {
            WrOpcode::BindMw => {
                // A window gets another key each time that it is bound.
                rkey = rkey & !0xff | u32::from(rkey as u8).wrapping_add(1) & 0xff;
                if let Key::Window(e, i) = r.rkey {
                    self.sides[e].windows[i].1 = rkey;
                }
                (compare_add, swap) = (r.operands.0, r.operands.1 << 32 | u64::from(other));
            }
            WrOpcode::LocalInv | WrOpcode::SendInv => imm = other,
            _ => {}
        }
        let peer = (1 - end, c);
        let (dest_qpn, ah, qkey) = match self.kinds[c].typ {
            QpType::XrcSend => (self.sides[1 - end].xrc.number, 0, 0),
            QpType::Ud => {
                let qpn = self.qps[&peer].queues.qpn;
                let ahs = self.sides[end].ahs;
                match r.to {
                    To::Peer => (qpn, ahs[0], QKEY),
                    To::Nobody => (0xff_fffe, ahs[0], QKEY),
                    To::WrongKey => (qpn, ahs[0], QKEY ^ 1),
                    To::OwnKey => (qpn, ahs[0], 1 << 31),
                    To::OtherHandle => (qpn, ahs[1], QKEY),
                    To::NoHandle => (qpn, 0xfff_ffff, QKEY),
                    To::Itself => (self.qps[&at].queues.qpn, ahs[2], QKEY),
                }
            }
            _ => (0, 0, 0),
        };
        let w = abi::SqWqe {
            opcode: r.raw_op.unwrap_or(r.op as u8),
            num_sge: r.num_sge.unwrap_or(sges.len() as u8),
            inline_len: r.inline.unwrap_or(0),
            send_flags: r.flags,
            imm,
            rkey,
            remote_addr: r.addr,
            compare_add,
            swap,
            ah,
            dest_qpn,
            qkey,
            ..wqe(r.op, wr_id)
        };
        let q = &mut self.member(at).queues;
        if r.flags & send_flags::INLINE != 0 {
            let bytes = vec![wr_id as u8; usize::from(r.inline.unwrap_or(0)).min(CAP.max_inline_data as usize)];
            q.rings.sq_put(q.sq_prod, abi::SQ_DATA, &bytes);
        } else {
            q.rings.sq_put(q.sq_prod, abi::SQ_DATA, sges.as_bytes());
        }
        q.post_raw(w);
    }

    /// Polls, takes events and queries.
    fn look(&mut self, seen: &mut Seen) {
        for end in 0..2 {
            let own = self.net.ends[end].poll();
            self.note_completions(end, "of the XRC SRQ", own, seen);
            for cq in 0..self.sides[end].cqs.len() {
                let (_, tail) = &mut self.sides[end].cqs[cq];
                let some: Vec<abi::Cqe> = std::iter::from_fn(|| tail.pop()).collect();
                tail.release();
                self.note_completions(end, &cq.to_string(), some, seen);
            }
        }
        for host in 0..self.net.rnics.len() {
            let mut outputs = Vec::new();
            self.net.rnics[host].drain_outputs(&mut outputs);
            for o in outputs {
                // Sessions of two hosts may have the same number.
                let end = if self.net.rnics.len() == 2 { host } else { usize::from(o.session() == self.session(1)) };
                self.note_output(end, &o, seen);
            }
        }
        let all: Vec<At> = self.qps.keys().copied().collect();
        let attrs: BTreeMap<At, abi::QpAttr> = all.iter().map(|&at| (at, self.query(at))).collect();
        for &at in &all {
            let connected = [at, (1 - at.0, at.1)].iter().all(|at| attrs[at].qp_state == QpState::Rts as u8);
            self.note_qp(at, &attrs[&at], connected, seen);
        }
        for end in 0..2 {
            let session = self.session(end);
            let srqs = [self.sides[end].srq.srq, self.sides[end].xrc.srq]
                .map(|srq| self.net.rnic(end).query_srq(session, srq));
            let free = [self.sides[end].srq.free(), self.sides[end].xrc.free()];
            seen.note(&format!("SRQs of program {end}"), format!("{srqs:?}, free {free:?}"));
            let c = self.net.counters(end);
            let same = (c.sent_wrs, c.sent_bytes, c.received_wrs, c.received_bytes, c.errors, c.failed);
            let lost = (c.dropped + c.qkey_violations, c.wire.rdma_sends, c.wire.rdma_recvs);
            seen.note(&format!("counters of program {end}"), format!("{same:?}, {lost:?}"));
        }
    }

    fn note_completions(&self, end: usize, cq: &str, cqes: Vec<abi::Cqe>, seen: &mut Seen) {
        for c in cqes {
            let status = WcStatus::from_raw(c.status.into());
            let qp = self.names.get(&c.qp_num);
            // The fields that are defined for a completion with an error (`ibv_poll_cq(3)`), and the slots that it
            // frees.
            let mut text = format!("{} {status:?} {qp:?} index {} vendor {}", c.wr_id, c.wqe_index, c.vendor_err);
            if c.status == 0 {
                let inv = u32::from(c.wc_flags) & wc_flags::WITH_INV != 0;
                let imm = if inv { self.window_of(end, c.imm) } else { format!("{:x}", c.imm) };
                text += &format!(
                    " {:?} {} bytes flags {:x} imm {imm} from {:?} sl {} port {} pkey {} staged {}",
                    WcOpcode::from_raw(c.opcode.into()),
                    c.byte_len,
                    c.wc_flags,
                    self.names.get(&c.src_qp),
                    c.sl,
                    c.port_num,
                    c.pkey_index,
                    c.staged
                );
            }
            seen.note(&format!("completions of program {end}, CQ {cq}"), text);
            seen.completions.push(c);
        }
    }

    fn window_of(&self, end: usize, key: u32) -> String {
        let i = self.sides[end].windows.iter().position(|w| w.1 == key);
        format!("key of window {i:?}")
    }

    fn note_output(&self, end: usize, o: &Output, seen: &mut Seen) {
        let side = &self.sides[end];
        let cq = |number: u32| side.cqs.iter().position(|cq| cq.0 == number);
        match o {
            Output::Async { kind, handle, .. } => {
                let whom = match kind {
                    k if k.is_of_qp() => self.names.get(handle).cloned().unwrap_or_default(),
                    AsyncEvent::CqErr => format!("CQ {:?} of program {end}", cq(*handle)),
                    _ => format!("the {} SRQ of program {end}", if side.srq.srq == *handle { "plain" } else { "XRC" }),
                };
                seen.note(&format!("{EVENTS}{whom}"), format!("{kind:?}"));
            }
            Output::Completion { cqn, .. } => {
                seen.note(&format!("completion events of CQ {:?} of program {end}", cq(*cqn)), "one".into());
            }
            o => seen.note(&format!("other outputs for program {end}"), format!("{o:?}")),
        }
    }

    fn query(&mut self, at: At) -> abi::QpAttr {
        let (session, qpn) = (self.session(at.0), self.qps[&at].queues.qpn);
        self.net.rnic(at.0).query_qp(session, qpn).unwrap()
    }

    fn note_qp(&self, at: At, a: &abi::QpAttr, connected: bool, seen: &mut Seen) {
        let q = &self.qps[&at].queues;
        let room = (q.rings.sq_free(q.sq_prod), q.rings.rq_free(q.rq_prod));
        let state = QpState::from_raw(a.qp_state.into()).unwrap();
        let mut text = format!("{state:?} draining {} free {room:?}", a.sq_draining);
        if connected {
            text += &format!(" next PSNs {} {}", a.sq_psn, a.rq_psn);
        }
        seen.note(&format!("QP {} of program {}", at.1, at.0), text);
        seen.states.insert(at, a.qp_state);
        seen.room.insert(at, room);
    }

    /// Memory of a program.
    pub fn memory(&self, end: usize, off: u64, len: u64) -> Vec<u8> {
        self.net.ends[end].bytes(off as usize, len as usize)
    }

    /// Writes to memory of a program.
    pub fn fill(&self, end: usize, off: u64, bytes: &[u8]) {
        self.net.ends[end].fill(off as usize, bytes);
    }
}

impl Side {
    fn new(net: &mut Net, end: usize) -> Side {
        let session = net.session(end);
        let private = OpenXrcd { key: None, create: true, exclusive: false };
        let (e, home) = (&net.ends[end], net.rnics.len().min(1 + end) - 1);
        let rnic = &mut net.rnics[home];
        let srq = SharedQueue::new(rnic, e, None);
        let xrc = XrcSrq::new(rnic, e, private);
        let other_pd = rnic.create_pd(session).unwrap();
        let ahs = [(e.pd, 1 - end), (other_pd, 1 - end), (e.pd, end)]
            .map(|(pd, to)| rnic.create_ah(session, pd, &address(gid(to))).unwrap());
        Side { other_pd, regions: Vec::new(), windows: Vec::new(), cqs: Vec::new(), srq, xrc, ahs }
    }
}
