//! The random program: its acts, phase by phase, in terms that mean the same in both worlds.

mod request;

use std::collections::{BTreeMap, BTreeSet};

use unirdma_formats::{QpType, WrOpcode, access};

use super::Seen;
use crate::ALL;
use unirdma_rnic::Rng;

/// A QP: the number of its program, and of its connection.
pub(super) type At = (usize, usize);

/// The memory regions of each program, at these places of its memory.
pub(super) const REGIONS: [Region; 7] = [
    Region { at: 0, len: 3 * PART, access: ALL | access::MW_BIND | access::FLUSH_GLOBAL, main: true },
    Region { at: 3 * PART, len: SMALL, access: access::LOCAL_WRITE, main: true },
    Region { at: 3 * PART + SMALL, len: SMALL, access: 0, main: true },
    Region { at: 3 * PART + 2 * SMALL, len: SMALL, access: access::REMOTE_READ, main: true },
    Region { at: 3 * PART + 3 * SMALL, len: SMALL, access: access::LOCAL_WRITE | access::REMOTE_WRITE, main: true },
    Region { at: 3 * PART + 4 * SMALL, len: SMALL, access: ALL, main: false },
    Region { at: 3 * PART + 5 * SMALL, len: SMALL, access: ALL, main: true },
];
/// Indices in [`REGIONS`]: the region that only its program may write, that can only be sent from, that peers may only
/// READ, that peers may write, that lies in another PD, and that is deregistered before anything begins.
const OWN: usize = 1;
const SOURCE: usize = 2;
const READABLE: usize = 3;
const WRITABLE: usize = 4;
const OTHER_PD: usize = 5;
pub(super) const GONE: usize = 6;
/// Size of a part of the first region, which has three. In each phase messages come from one of the first two and go to
/// the other; the third one is for receives.
const PART: u64 = 1 << 16;
const SMALL: u64 = 1 << 13;
/// Bytes of a program's memory that it uses.
pub(super) const USED: u64 = 3 * PART + 6 * SMALL;
/// Number of windows that each program has for each connection, which only that connection names: one of type 1 and one
/// of type 2.
pub(super) const WINDOWS: usize = 2;

/// Length and access of a window that covers all memory and access that peers name.
const WHOLE: (u64, u64) = (2 * PART, ALL as u64);

/// A memory region of a program.
#[derive(Clone, Copy)]
pub(super) struct Region {
    /// Where it begins in the program's memory.
    pub at: u64,
    pub len: u64,
    pub access: u32,
    /// The region is in the PD of the QPs.
    pub main: bool,
}

/// The first virtual address of a region.
pub(super) fn iova(region: usize) -> u64 {
    (1 + region as u64) << 24
}

/// The kind of a connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kind {
    /// The type of the QP of program 0. The QP of program 1 has the peer type.
    pub typ: QpType,
    /// Receives come from the program's SRQ.
    pub shared: bool,
    /// Every send is signaled.
    pub sig_all: bool,
    /// Sends and receives complete to one CQ.
    pub one_cq: bool,
    /// The CQs have four entries only.
    pub tiny: bool,
}

/// A key, as the program names it. Regions and windows are named by program and number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Key {
    Region(usize, usize),
    Window(usize, usize),
    /// The key of the program's first region, with a wrong low bit.
    Nearly(usize),
    Nobodys,
}

/// An SGE: an offset in a region of the program, and the key under which it is named.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    pub region: usize,
    pub off: u64,
    pub len: u32,
    pub key: Key,
}

/// A receive queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Queue {
    Own(At),
    Shared(usize),
    Xrc(usize),
}

impl Queue {
    /// The program that owns the queue.
    pub fn end(self) -> usize {
        match self {
            Queue::Own((end, _)) | Queue::Shared(end) | Queue::Xrc(end) => end,
        }
    }
}

/// A send request.
#[derive(Clone, Debug)]
pub(super) struct Request {
    pub op: WrOpcode,
    /// A wrong opcode that replaces `op`.
    pub raw_op: Option<u8>,
    pub flags: u32,
    pub pieces: Vec<Piece>,
    /// A wrong number of SGEs that replaces the length of `pieces`.
    pub num_sge: Option<u8>,
    /// Bytes of data in the WQE.
    pub inline: Option<u16>,
    /// The remote key, or the key of the window to bind.
    pub rkey: Key,
    pub addr: u64,
    /// The key to invalidate, or the lkey of the region that a window is bound to.
    pub other: Key,
    pub imm: u32,
    /// Operands of an atomic; length and access of a window; length of a FLUSH.
    pub operands: (u64, u64),
    /// Destination of a datagram.
    pub to: To,
}

/// The destination of a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum To {
    Peer,
    Nobody,
    /// With another Q_Key.
    WrongKey,
    /// With the Q_Key of the sender's QP.
    OwnKey,
    /// With an address handle of another PD.
    OtherHandle,
    /// With an invalid address handle.
    NoHandle,
    /// To the sender's own QP.
    Itself,
}

/// Attributes with which a connection is made, of both requester and responder.
#[derive(Clone, Copy, Debug)]
pub(super) struct Attributes {
    pub mtu: u8,
    pub timeout: u8,
    pub retry_cnt: u8,
    pub rnr_retry: u8,
    pub min_rnr_timer: u8,
    pub access: u32,
    /// `max_rd_atomic` of the requester and `max_dest_rd_atomic` of the responder.
    pub reads: u8,
}

/// A change of the state or access of a QP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    Error,
    Drain,
    /// From SQD or SQE.
    Send,
    Reset,
    /// To INIT. Most states refuse it.
    Init,
    Access(u32),
}

/// An act of a program, or a time that passes.
#[derive(Clone, Debug)]
pub(super) enum Act {
    /// Both QPs go to RESET and then to RTS. The QP of the program in the last field stays in RTR.
    Connect(usize, Attributes, Option<usize>),
    Recv {
        queue: Queue,
        wr_id: u64,
        pieces: Vec<Piece>,
        num_sge: Option<u32>,
    },
    Send {
        qp: At,
        wr_id: u64,
        request: Request,
    },
    Modify(At, Change),
    /// Arms both CQs of the QP for the next completion event, or for the next solicited one.
    Arm(At, bool),
    Limit(Queue, u32),
    /// Deregisters a region and registers it anew.
    Renew(usize, usize),
    /// Frees a window and makes another one.
    RenewWindow(usize, usize),
    /// Destroys a QP and makes another one in its place.
    Replace(At),
    /// Nanoseconds pass. Each phase ends with a long time in which everything comes to rest.
    Run(u64),
}

/// Time in which everything comes to rest that does not retry for ever.
pub(super) const REST: u64 = crate::SECOND / 2;
/// Shorter than the RNR timers of [`SLOW_RNR`], longer than the round trip of a packet.
const MOMENT: u64 = 300_000;
const SLOW_RNR: [u8; 2] = [12, 14];

/// The program of a seed, and its knowledge of the worlds.
pub(super) struct Program {
    rng: Rng,
    pub kinds: Vec<Kind>,
    attributes: Vec<Attributes>,
    /// States of all QPs when the last phase ended.
    states: BTreeMap<At, u8>,
    /// Free slots of all queues when the last phase ended, of requests and receives.
    room: BTreeMap<At, (u32, u32)>,
    /// Receives that have not completed.
    pub receives: BTreeMap<u64, (Queue, Vec<Piece>)>,
    /// Receives that were lost with their QP in the current phase.
    pub gone: BTreeMap<u64, (Queue, Vec<Piece>)>,
    /// Requests of the current phase.
    pub sent: Vec<(At, u64, Request)>,
    /// Windows that are bound to [`WHOLE`], by program and number.
    bound: BTreeSet<(usize, usize)>,
    next_wr: u64,
    phase: u64,
    /// For each program and region, the number of bytes that were allocated as targets in the current phase.
    given: [[u64; REGIONS.len()]; 2],
    /// Offset of the next receive in the third part, of each program.
    cursor: [u64; 2],
}

impl Program {
    pub fn new(seed: u64) -> Program {
        let mut rng = Rng::new(seed ^ 0xd1ff);
        let some = 1 + rng.next_u64() as usize % 3;
        let kinds = (0..some).map(|_| {
            let typ = [QpType::Rc, QpType::Rc, QpType::Rc, QpType::Uc, QpType::Ud, QpType::XrcSend];
            let bits = rng.next_u64();
            Kind {
                typ: typ[bits as usize % typ.len()],
                // A UC QP may keep a receive for a message that was aborted. Another QP of the SRQ would wait for that
                // receive.
                shared: bits >> 8 & 3 == 0 && bits as usize % typ.len() != 3,
                sig_all: bits >> 10 & 3 == 0,
                one_cq: bits >> 12 & 1 == 0,
                tiny: bits >> 16 & 15 == 0,
            }
        });
        let kinds: Vec<Kind> = kinds.collect();
        let none = Attributes { mtu: 1, timeout: 8, retry_cnt: 0, rnr_retry: 0, min_rnr_timer: 1, access: 0, reads: 1 };
        Program {
            rng,
            attributes: vec![none; kinds.len()],
            kinds,
            states: BTreeMap::new(),
            room: BTreeMap::new(),
            receives: BTreeMap::new(),
            gone: BTreeMap::new(),
            sent: Vec::new(),
            bound: BTreeSet::new(),
            next_wr: 1,
            phase: 0,
            given: [[0; REGIONS.len()]; 2],
            cursor: [0; 2],
        }
    }

    fn below(&mut self, n: u64) -> u64 {
        self.rng.next_u64() % n
    }

    /// True once in `n` times.
    fn once_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize]
    }

    /// The queue from which a QP takes its receives.
    pub fn queue_of(&self, (end, c): At) -> Queue {
        match self.kinds[c].typ {
            QpType::XrcSend => Queue::Xrc(end),
            _ if self.kinds[c].shared => Queue::Shared(end),
            _ => Queue::Own((end, c)),
        }
    }

    /// Updates the program's knowledge with the results of a phase.
    pub fn learn(&mut self, seen: &Seen) {
        for cqe in &seen.completions {
            self.receives.remove(&cqe.wr_id);
        }
        for ((end, _), wr_id, r) in &self.sent {
            let done = seen.completions.iter().any(|c| c.wr_id == *wr_id && c.status == 0);
            match (r.op, r.rkey, r.other) {
                (WrOpcode::BindMw, Key::Window(e, i), _) if done && r.operands == WHOLE => {
                    self.bound.insert((e, i));
                }
                (WrOpcode::BindMw, Key::Window(e, i), _) => {
                    self.bound.remove(&(e, i));
                }
                (WrOpcode::LocalInv, _, Key::Window(e, i)) if e == *end => {
                    self.bound.remove(&(e, i));
                }
                (WrOpcode::SendInv, _, Key::Window(e, i)) => {
                    self.bound.remove(&(e, i));
                }
                _ => {}
            }
        }
        (self.states, self.room) = (seen.states.clone(), seen.room.clone());
    }

    /// The acts of the next phase. At its end everything has come to rest.
    pub fn phase(&mut self) -> Vec<Act> {
        self.phase += 1;
        self.sent.clear();
        self.gone.clear();
        self.given = [[0; REGIONS.len()]; 2];
        let mut acts = Vec::new();
        for c in 0..self.kinds.len() {
            self.begin_phase_of(c, &mut acts);
        }
        if self.once_in(6) {
            let (end, region) = (self.below(2) as usize, self.below(6) as usize);
            acts.push(Act::Renew(end, region));
        }
        if self.once_in(8) {
            let all = WINDOWS * self.kinds.len();
            let (end, window) = (self.below(2) as usize, self.below(all as u64) as usize);
            self.bound.remove(&(end, window));
            acts.push(Act::RenewWindow(end, window));
        }
        let mut busy = Vec::new();
        let mut late = Vec::new();
        for c in 0..self.kinds.len() {
            // Only one program of a connection sends in a phase. Otherwise the order of its sends and its receives
            // would depend on time.
            let from = if self.kinds[c].typ == QpType::XrcSend { 0 } else { self.below(2) as usize };
            let queue = self.queue_of((1 - from, c));
            if busy.contains(&queue) || self.once_in(4) {
                continue;
            }
            busy.push(queue);
            self.traffic((from, c), queue, &mut acts, &mut late);
        }
        for end in 0..2 {
            if self.once_in(5) {
                let (limit, queue) = (self.below(18) as u32, self.pick(&[Queue::Shared(end), Queue::Xrc(end)]));
                acts.insert(0, Act::Limit(queue, limit));
            }
        }
        if !late.is_empty() {
            acts.push(Act::Run(MOMENT));
            acts.append(&mut late);
        }
        acts.push(Act::Run(REST));
        acts
    }

    /// Connects a connection if it has failed (five of six times) or at random (one of eight times). Arms CQs.
    fn begin_phase_of(&mut self, c: usize, acts: &mut Vec<Act>) {
        let states = [0, 1].map(|end| self.states.get(&(end, c)).copied().unwrap_or(0));
        let works = states == [3, 3];
        if self.kinds[c].tiny && self.phase > 1 {
            // CQs that have overrun, and their QPs, stay unusable.
            return;
        }
        if !works && !self.once_in(6) || self.once_in(8) {
            for end in 0..2 {
                if self.once_in(6) {
                    acts.push(Act::Replace((end, c)));
                }
            }
            let any = [0, ALL & 6, ALL & 3, 8 | 1];
            let access = if self.once_in(6) { self.pick(&any) } else { ALL | access::FLUSH_GLOBAL };
            let a = Attributes {
                mtu: 1 + self.below(5) as u8,
                timeout: self.pick(&[8, 10, 12]),
                retry_cnt: self.below(4) as u8,
                rnr_retry: self.pick(&[0, 1, 2, 6, 7]),
                min_rnr_timer: self.pick(&[1, 6, 12, 14]),
                access,
                reads: if self.once_in(10) { 0 } else { 1 + self.below(4) as u8 },
            };
            self.attributes[c] = a;
            let late = self.once_in(4).then(|| self.below(2) as usize);
            acts.push(Act::Connect(c, a, late));
            for end in 0..2 {
                self.lose((end, c));
                self.room.insert((end, c), (16, 16));
            }
        }
        for end in 0..2 {
            if self.once_in(3) {
                acts.push(Act::Arm((end, c), self.once_in(2)));
            }
        }
    }

    /// Adds requests of a QP, and the receives for them.
    fn traffic(&mut self, from: At, queue: Queue, acts: &mut Vec<Act>, late: &mut Vec<Act>) {
        let (end, c) = from;
        let (kind, a) = (self.kinds[c], self.attributes[c]);
        let room = self.room.get(&from).map_or(16, |r| r.0).min(if kind.tiny { 5 } else { 6 });
        let some = if room == 0 { 0 } else { 1 + self.below(room.into()) };
        let spoils = self.once_in(2) && !kind.tiny;
        let requests: Vec<Request> = (0..some).map(|_| self.request(from, spoils)).collect();
        let needed = requests.iter().filter(|r| r.raw_op.is_none() && r.op.consumes_recv());
        let lengths: Vec<u64> = needed.map(|r| self.room_for(kind, r)).collect();
        let waiting = self.receives.values().filter(|(q, _)| *q == queue).count();
        let free = match queue {
            Queue::Own(at) => self.room.get(&at).map_or(16, |r| r.1) as usize,
            _ => 16 - waiting.min(16),
        };
        let missing = lengths.len().saturating_sub(waiting);
        // A requester that retries for ever must find its receives. Another one may find them in time, or never.
        let endless = a.rnr_retry == 7 && kind.typ.is_reliable();
        let in_time = endless || a.rnr_retry > 0 && SLOW_RNR.contains(&a.min_rnr_timer);
        let later = self.once_in(3) && in_time && kind.typ.is_reliable();
        let extra = self.below(3) as usize;
        let count = if !kind.tiny && !endless && self.once_in(5) {
            self.below(missing as u64 + 1) as usize
        } else {
            missing + extra
        };
        let mut receives = Vec::new();
        for i in 0..count.min(free) {
            let len = lengths.get(i + lengths.len().min(waiting)).copied().unwrap_or(500);
            if let Some(r) = self.receive(1 - end, queue, len, spoils) {
                receives.push(r);
            }
        }
        // Without room for the receives the requester would retry for ever.
        if endless && receives.len() < missing {
            acts.append(&mut receives);
            return;
        }
        if later {
            late.append(&mut receives)
        } else {
            acts.append(&mut receives)
        }
        for request in requests {
            let wr_id = self.wr_id();
            self.sent.push((from, wr_id, request.clone()));
            acts.push(Act::Send { qp: from, wr_id, request });
        }
        // The receiving QP is replaced while the requester waits for it, or before the requester begins.
        if self.once_in(24) {
            let at = (1 - end, c);
            if self.once_in(2) {
                acts.push(Act::Replace(at))
            } else {
                late.push(Act::Replace(at))
            }
            self.lose(at);
            late.retain(|act| !matches!(act, Act::Recv { queue, .. } if *queue == Queue::Own(at)));
        }
        // These changes precede the QP's first turn, so no request is in progress yet.
        if self.once_in(10) {
            let mut at = (self.below(2) as usize, c);
            let flags = self.pick(&[0, 1, 2 | 1, 4, ALL]);
            let change = [Change::Error, Change::Drain, Change::Reset, Change::Init, Change::Access(flags)];
            let change = self.pick(&change);
            if change == Change::Drain {
                // The receiver is never drained: it would have drained already, or fail first by a message.
                at = from;
            }
            acts.push(Act::Modify(at, change));
            if change == Change::Drain && self.once_in(2) {
                late.push(Act::Modify(at, Change::Send));
            }
            if change == Change::Reset {
                self.lose(at);
            }
        }
    }

    /// Moves the receives of a QP's own queue from `receives` to `gone`.
    fn lose(&mut self, at: At) {
        let all = std::mem::take(&mut self.receives);
        let (lost, left) = all.into_iter().partition(|(_, (queue, _))| *queue == Queue::Own(at));
        self.gone.extend::<BTreeMap<_, _>>(lost);
        self.receives = left;
    }

    fn wr_id(&mut self) -> u64 {
        self.next_wr += 1;
        self.next_wr
    }
}
