//! The simulation of a fabric: many hosts with many QPs of every type, on a network that loses, duplicates, reorders
//! and corrupts packets, and that is partitioned for a while.
//!
//! Each seed has its own fabric and traffic. Every message must have an outcome that its transport allows.

mod check;

use std::collections::VecDeque;
use std::sync::Arc;

use unirdma_abi as abi;
use unirdma_formats::{QpType, WcStatus, WrOpcode, access};
use unirdma_mem::Span;
use unirdma_rnic::{OpenXrcd, Resolve, Rng};

use crate::cm::Meeting;
use crate::multicast::Group;
use crate::net::{Faults, Net};
use crate::xrc::{XrcSrq, connect_target};
use crate::{IOVA, MR_BYTES, SECOND, pattern, status, wqe};

const HOSTS: usize = 4;
/// Ends `2 i` and `2 i + 1` are a pair.
const PAIRS: usize = 9;
const SLOT: u64 = 16_384;
/// `retry_cnt` of the reliable connections.
const RETRIES: u8 = 7;
/// Most messages of an end. Its first slots are for WRITEs, the others for receives.
const MESSAGES: u64 = 12;
/// Requests of a step.
const REQUESTS: u64 = 20;

// Offsets in an end's memory: the data that peers READ, which never changes; the destination of its own READs; the
// results of its atomics; and the counter that its peer's atomics add to.
const SOURCE: u64 = 0xb_0000;
const READS: u64 = 0xc_0000;
const RESULTS: u64 = 0xf_0000;
const COUNTER: u64 = 0xf_1000;

/// Runs the simulation of a seed and checks all outcomes. Panics if one is not allowed.
pub fn run(seed: u64, steps: u64) -> Report {
    let mut fabric = Fabric::new(seed);
    fabric.run(steps);
    fabric.check()
}

/// As [`run`], while vRNICs move: at random moments one is saved, removed, and restored on some host. Panics if an
/// outcome is not allowed.
pub fn run_moving(seed: u64, steps: u64) -> Report {
    // In every other fabric the ends of a pair are on one host at first.
    let mut fabric = Fabric::with_homes(seed, |end| (end >> (seed & 1)) % HOSTS);
    fabric.net.wander = [2, 10, 50, 250][seed as usize / 2 % 4];
    fabric.run(steps);
    fabric.check()
}

/// Statistics of a simulation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Corrupted packets that the ICRC revealed.
    pub caught: u64,
    /// Multicast messages that members received from each other.
    pub heard: u64,
    /// Times a vRNIC was restored.
    pub moves: u64,
    /// Digest of all packets and the times at which they were sent.
    pub digest: u64,
}

/// A message that an end has sent: number, opcode, length.
type Sent = (u64, WrOpcode, u32);

/// A fabric, its traffic, and the outcome of the traffic.
pub struct Fabric {
    net: Net,
    rng: Rng,
    types: Vec<QpType>,
    ahs: Vec<u32>,
    /// SRQs of the ends whose peer is the initiator of an XRC connection. These ends send nothing.
    shared: Vec<Option<XrcSrq>>,
    /// QPNs of the target QPs of XRC connections, by the end whose session has them.
    targets: Vec<Option<u32>>,
    /// Connections that were made by address.
    meetings: Vec<Meeting>,
    /// Its members are the ends after the pairs.
    group: Group,
    /// For each RC end, the rkey of a window, or of an MR that a request has registered, over all of its memory.
    windows: Vec<u32>,
    sent: Vec<Vec<Sent>>,
    /// For each end, numbers of receives that are posted later than their messages.
    late: Vec<VecDeque<u64>>,
    /// Completions of each end's sends.
    done: Vec<Vec<abi::Cqe>>,
    /// Completions of each end's receives.
    received: Vec<Vec<abi::Cqe>>,
    seed: u64,
}

fn peer(end: usize) -> usize {
    end ^ 1
}

/// True if the transport of this type repeats lost packets.
fn reliable(typ: QpType) -> bool {
    !matches!(typ, QpType::Uc | QpType::Ud)
}

/// Bytes of message `n` of an end. They begin with the number.
fn message(seed: u64, end: usize, n: u64, len: u32) -> Vec<u8> {
    let mut bytes = pattern(len as usize, seed << 32 | (end as u64) << 16 | n);
    for (b, v) in bytes.iter_mut().zip(n.to_le_bytes()) {
        *b = v;
    }
    bytes
}

/// The data at [`SOURCE`] in an end's memory.
fn source(seed: u64, end: usize) -> Vec<u8> {
    pattern(2 * SLOT as usize, seed << 32 | 0xffff << 16 | end as u64)
}

/// Offset from [`SOURCE`] of the data that message `n` READs.
fn offset(n: u64) -> u64 {
    n * 977 % SLOT
}

/// The operand of message `n` if it is a fetch-and-add.
fn addend(n: u64) -> u64 {
    3 * n + 1
}

/// Offset in the peer's memory of the data that message `n` WRITEs, or of receive `n`.
fn slot(op: WrOpcode, n: u64) -> u64 {
    let receive = matches!(op, WrOpcode::Send | WrOpcode::SendImm | WrOpcode::SendInv);
    (n + if receive { MESSAGES } else { 0 }) * SLOT
}

/// Binds a memory window (type 2) over all memory of an end. Returns its rkey.
fn window(net: &mut Net, end: usize) -> u32 {
    let e = &net.ends[end];
    let (session, pd, backing) = (e.session, e.pd, e.backing());
    let flags = access::LOCAL_WRITE | access::MW_BIND;
    let (_, lkey) = net.rnic(end).reg_mr(session, pd, flags, IOVA, MR_BYTES as u64, (backing, vec![9])).unwrap();
    let (_, key) = net.rnic(end).alloc_mw(session, pd, 2).unwrap();
    let key = key ^ 0x55;
    let swap = u64::from(access::REMOTE_WRITE) << 32 | u64::from(lkey);
    let bind = wqe(WrOpcode::BindMw, 0);
    net.ends[end].post_raw(abi::SqWqe { rkey: key, remote_addr: IOVA, compare_add: MR_BYTES as u64, swap, ..bind });
    net.run(1000);
    assert_eq!(status(&net.ends[end].done()), WcStatus::Success);
    key
}

/// The memory of an end by bus address, followed by a list of its pages.
struct Ram {
    memory: Span,
    list: Span,
}

impl Resolve for Ram {
    fn resolve(&self, addr: u64, len: u64) -> Option<(&Span, u64)> {
        let (span, off) = match addr.checked_sub(MR_BYTES as u64) {
            None => (&self.memory, addr),
            Some(off) => (&self.list, off),
        };
        (off.checked_add(len)? <= span.len() as u64).then_some((span, off))
    }
}

/// As [`window`], but an MR that a request registers.
fn registered(net: &mut Net, end: usize) -> u32 {
    const PAGES: u32 = MR_BYTES as u32 / 4096;
    let list = Span::anonymous(8 * PAGES as usize);
    (0..PAGES as usize).for_each(|i| list.write(8 * i, &(4096 * i as u64).to_le_bytes()));
    let e = &net.ends[end];
    let (session, pd, memory) = (e.session, e.pd, e.memory.clone());
    net.rnic(end).set_memory(session, Arc::new(Ram { memory, list }));
    let flags = access::LOCAL_WRITE | access::REMOTE_WRITE;
    let (_, key) = net.rnic(end).create_mr(session, pd, flags, PAGES, Arc::new(())).unwrap();
    let key = key ^ 0x55;
    net.ends[end].post_raw(abi::SqWqe {
        rkey: key,
        remote_addr: IOVA,
        compare_add: MR_BYTES as u64,
        swap: MR_BYTES as u64,
        imm: flags,
        ah: 12,
        dest_qpn: PAGES,
        ..wqe(WrOpcode::RegMr, 0)
    });
    net.run(1000);
    assert_eq!(status(&net.ends[end].done()), WcStatus::Success);
    key
}

impl Fabric {
    /// The fabric of a seed, with all its connections.
    pub fn new(seed: u64) -> Fabric {
        Self::with_homes(seed, |end| end % HOSTS)
    }

    fn with_homes(seed: u64, home: impl Fn(usize) -> usize) -> Fabric {
        let mut rng = Rng::new(seed ^ 0xfab);
        let types: Vec<QpType> = (0..PAIRS)
            .map(|_| [QpType::Rc, QpType::Rc, QpType::Uc, QpType::Ud, QpType::XrcSend][rng.next_u64() as usize % 5])
            .flat_map(|t| if t == QpType::XrcSend { [t, QpType::Rc] } else { [t, t] })
            .collect();
        let faults = Faults { loss: 10, duplication: 10, reordering: 10, corruption: 10 };
        let all: Vec<QpType> = types.iter().copied().chain([QpType::Ud; HOSTS]).collect();
        let mut net = Net::homes(HOSTS, &all, seed, faults, home);
        // In three of four fabrics a third of the ends have memory that is reached through their process, by delayed
        // jobs.
        net.late_ns = [0, 3_000, 20_000, 100_000][seed as usize / 3 % 4];
        for end in 0..all.len() {
            if net.late_ns > 0 && rng.next_u64() % 3 == 0 {
                net.go_through_process(end);
            }
        }
        let mtu = 1 + (seed % 5) as u8;
        let mut ahs = Vec::new();
        let mut shared: Vec<Option<XrcSrq>> = types.iter().map(|_| None).collect();
        let mut targets = vec![None; types.len()];
        let mut meetings = Vec::new();
        // The retries last longer than a partition of the network, so that no connection fails by it.
        let patient = |a| abi::QpAttr { path_mtu: mtu, timeout: 16, retry_cnt: RETRIES, rnr_retry: 7, ..a };
        for (end, &typ) in types.iter().enumerate() {
            if typ == QpType::XrcSend {
                let to = net.ends.remove(peer(end));
                let private = OpenXrcd { key: None, create: true, exclusive: false };
                let queue = XrcSrq::new(net.rnic(peer(end)), &to, private);
                net.ends.insert(peer(end), to);
                targets[peer(end)] = Some(connect_target(&mut net, end, peer(end), queue.xrcd, &patient));
                shared[peer(end)] = Some(queue);
            } else if typ == QpType::Rc && end % 4 == 1 && shared[end].is_none() {
                // Every other pair of RC QPs connects by address. That happens here, while one end is unused: its QP is
                // in RESET.
                meetings.push(Meeting::new(&mut net, end, peer(end)));
            } else if shared[end].is_none() && !(typ == QpType::Rc && end % 4 == 0) {
                net.connect(typ, end, peer(end), &patient);
            }
            ahs.push(net.ah(end, peer(end)));
        }
        let mut windows = vec![0; types.len()];
        for end in (0..types.len()).filter(|&e| types[e] == QpType::Rc) {
            net.ends[end].fill(SOURCE as usize, &source(seed, end));
            if shared[end].is_none() {
                let fast = end % 3 == 0 && !net.ends[end].in_process;
                windows[end] = if fast { registered(&mut net, end) } else { window(&mut net, end) };
            }
        }
        let none = || vec![Vec::new(); types.len()];
        let group = Group::new(&mut net, (types.len()..all.len()).collect(), seed);
        Fabric {
            meetings,
            group,
            net,
            rng,
            ahs,
            shared,
            targets,
            windows,
            sent: vec![Vec::new(); types.len()],
            late: vec![VecDeque::new(); types.len()],
            done: none(),
            received: none(),
            types,
            seed,
        }
    }

    /// Posts twenty requests in each step and lets time pass between them, then waits until all are done.
    pub fn run(&mut self, steps: u64) {
        for i in 0..steps * REQUESTS {
            self.post();
            if i % 7 == 3 {
                self.group.send(&mut self.net, i / 7);
            }
            if self.rng.next_u64() % 4 == 0 {
                let time = self.rng.next_u64() % 200_000;
                self.net.run(time);
                self.poll();
                if self.net.wander > 0 {
                    let end = self.rng.next_u64() as usize % self.types.len();
                    self.post_late(end);
                }
            }
            // Sometimes a host is cut off, for a shorter time than the retries take.
            if i % 50 == 25 {
                let host = self.rng.next_u64() as usize % HOSTS;
                self.net.cut(host, true);
                self.net.run(500_000_000);
                self.net.cut(host, false);
                // Every connection retries before the next host is cut off.
                self.net.run(300_000_000);
            }
        }
        (0..self.types.len()).for_each(|end| self.post_late(end));
        // All vRNICs that are away come back, and none leaves any more.
        self.net.wander = 0;
        self.net.run(60 * SECOND);
        self.poll();
    }

    /// Posts a request at a random end, unless that has sent all of its messages, and a receive at its peer. Some
    /// messages of unreliable transports get no receive.
    fn post(&mut self) {
        let end = self.rng.next_u64() as usize % self.types.len();
        let n = self.sent[end].len() as u64;
        let typ = self.types[end];
        if n >= MESSAGES || self.shared[end].is_some() {
            return;
        }
        let op = self.opcode(typ, n);
        let max = if typ == QpType::Ud { 256 } else { SLOT - 40 };
        let eight = matches!(op, WrOpcode::FetchAdd | WrOpcode::AtomicWrite);
        let len = if eight { 8 } else { 8 + (self.rng.next_u64() % (max - 8)) as u32 };
        let bytes = message(self.seed, end, n, len);
        // The upper half of an end's memory has the data that it sends, the lower half receives.
        let from = MR_BYTES as u64 / 2 + slot(WrOpcode::Write, n);
        self.net.ends[end].fill(from as usize, &bytes);
        let to = peer(end);
        if op.consumes_recv() && (reliable(typ) || self.rng.next_u64() % 8 != 0) {
            // While vRNICs move, some receives are posted late, so that messages meet a peer that is not ready.
            let moving = reliable(typ) && self.net.wander > 0;
            if moving && (!self.late[to].is_empty() || self.rng.next_u64() % 4 == 0) {
                self.late[to].push_back(n);
            } else {
                self.post_recv(to, n);
            }
        }
        let local = match op {
            WrOpcode::Read => READS + n * SLOT,
            WrOpcode::FetchAdd => RESULTS + 8 * n,
            _ => from,
        };
        let remote = match op {
            WrOpcode::Read => SOURCE + offset(n),
            WrOpcode::FetchAdd => COUNTER,
            _ => slot(op, n),
        };
        let by_window = op == WrOpcode::Write && typ == QpType::Rc && self.rng.next_u64() % 2 == 0;
        let rkey = if by_window { self.windows[to] } else { self.net.ends[to].key };
        let imm = if op == WrOpcode::SendInv { self.windows[to] } else { n as u32 };
        let sge = self.net.ends[end].sge(local, len);
        let w = abi::SqWqe { remote_addr: IOVA + remote, rkey, imm, compare_add: addend(n), ..wqe(op, n) };
        let number = self.shared[to].as_ref().map(|queue| queue.number);
        let (ah, qpn) = (self.ahs[end], number.unwrap_or(self.net.ends[to].qpn));
        self.net.ends[end].post_to(w, ah, qpn, &[sge]);
        self.sent[end].push((n, op, len));
    }

    /// Posts the receive with this number.
    fn post_recv(&mut self, end: usize, n: u64) {
        let sge = self.net.ends[end].sge(slot(WrOpcode::Send, n), SLOT as u32);
        match &mut self.shared[end] {
            Some(queue) => queue.recv(n, &[sge]),
            None => self.net.ends[end].recv(n, &[sge]),
        }
    }

    /// Posts the receives of an end that are late.
    fn post_late(&mut self, end: usize) {
        while let Some(n) = self.late[end].pop_front() {
            self.post_recv(end, n);
        }
    }

    /// An operation for message `n` of an end of this type.
    fn opcode(&mut self, typ: QpType, n: u64) -> WrOpcode {
        let ops = [
            WrOpcode::Send,
            WrOpcode::SendImm,
            WrOpcode::Write,
            WrOpcode::WriteImm,
            WrOpcode::Read,
            WrOpcode::FetchAdd,
            WrOpcode::AtomicWrite,
        ];
        let some = match typ {
            QpType::Ud => 2,
            QpType::Uc => 4,
            _ => ops.len(),
        };
        let op = ops[self.rng.next_u64() as usize % some];
        // The last message invalidates the window.
        if typ == QpType::Rc && n + 1 == MESSAGES { WrOpcode::SendInv } else { op }
    }

    fn poll(&mut self) {
        for end in 0..self.types.len() {
            for c in self.net.ends[end].poll() {
                let all = if c.opcode >= 128 { &mut self.received } else { &mut self.done };
                all[end].push(c);
            }
        }
    }
}
