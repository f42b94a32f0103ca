//! Many hosts with many QPs of every type on a network that loses, doubles, reorders, corrupts, and parts for a while.
//! `cargo xtask sim` runs it; a seed is a network and traffic of its own.
#![allow(missing_docs)]

mod common;

use common::cm::Meeting;
use common::group::Group;
use common::net::{Faults, Net};
use common::shared::{Shared, target};
use common::*;
use unirdma_abi as abi;
use unirdma_formats::{QpType, WcStatus, WrOpcode, access, wc_flags};
use unirdma_rnic::{OpenXrcd, Rng};

const HOSTS: usize = 4;
/// Ends `2 i` and `2 i + 1` are a pair.
const PAIRS: usize = 9;
const SLOT: u64 = 16_384;
/// `retry_cnt` of the reliable connections.
const RETRIES: u8 = 7;
/// Most messages of an end: the first slots are for WRITEs, the others for receives.
const MESSAGES: u64 = 12;

// Where in an end's memory: what peers READ, which never changes; what it READs itself; what its atomics return; and the
// counter that its peer's atomics add to.
const SOURCE: u64 = 0xb_0000;
const READS: u64 = 0xc_0000;
const RESULTS: u64 = 0xf_0000;
const COUNTER: u64 = 0xf_1000;

/// What an end has sent: number of the message, opcode, length.
type Sent = (u64, WrOpcode, u32);

struct Traffic {
    net: Net,
    rng: Rng,
    types: Vec<QpType>,
    ahs: Vec<u32>,
    /// Receives of ends whose peer is the initiator of an XRC connection; those send nothing themselves.
    shared: Vec<Option<Shared>>,
    /// Connections that were made by address.
    meetings: Vec<Meeting>,
    /// Its members are the ends after the pairs.
    group: Group,
    /// What members heard of each other.
    heard: u64,
    /// Keys of windows of all memory, of ends of type RC.
    windows: Vec<u32>,
    sent: Vec<Vec<Sent>>,
    /// Completions of each end's sends and receives.
    done: Vec<Vec<abi::Cqe>>,
    received: Vec<Vec<abi::Cqe>>,
    seed: u64,
}

fn peer(end: usize) -> usize {
    end ^ 1
}

/// Bytes of message `n` of an end. The number stands in front.
fn message(seed: u64, end: usize, n: u64, len: u32) -> Vec<u8> {
    let mut bytes = pattern(len as usize, seed << 32 | (end as u64) << 16 | n);
    for (b, v) in bytes.iter_mut().zip(n.to_le_bytes()) {
        *b = v;
    }
    bytes
}

fn source(seed: u64, end: usize) -> Vec<u8> {
    pattern(2 * SLOT as usize, seed << 32 | 0xffff << 16 | end as u64)
}

/// Where message `n` READs, if it does, and what it adds, if it is an atomic.
fn offset(n: u64) -> u64 {
    n * 977 % SLOT
}

fn addend(n: u64) -> u64 {
    3 * n + 1
}

/// A memory window (type 2) of all memory of an end.
fn window(net: &mut Net, end: usize) -> u32 {
    let e = &net.ends[end];
    let (session, pd, backing) = (e.session, e.pd, unirdma_rnic::Backing::Mapped(e.memory.clone()));
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

impl Traffic {
    fn new(seed: u64) -> Traffic {
        let mut rng = Rng::new(seed ^ 0xfab);
        let types: Vec<QpType> = (0..PAIRS)
            .map(|_| [QpType::Rc, QpType::Rc, QpType::Uc, QpType::Ud, QpType::XrcSend][rng.next_u64() as usize % 5])
            .flat_map(|t| if t == QpType::XrcSend { [t, QpType::Rc] } else { [t, t] })
            .collect();
        let faults = Faults { loss: 10, duplication: 10, reordering: 10, corruption: 10 };
        let all: Vec<QpType> = types.iter().copied().chain([QpType::Ud; HOSTS]).collect();
        let mut net = Net::hosts(HOSTS, &all, seed, faults);
        let mtu = 1 + (seed % 5) as u8;
        let mut ahs = Vec::new();
        let mut shared: Vec<Option<Shared>> = types.iter().map(|_| None).collect();
        let mut meetings = Vec::new();
        // Long enough that a network that parts for a while kills no connection.
        let patient = |a| abi::QpAttr { path_mtu: mtu, timeout: 16, retry_cnt: RETRIES, rnr_retry: 7, ..a };
        for (end, &typ) in types.iter().enumerate() {
            if typ == QpType::XrcSend {
                let to = net.ends.remove(peer(end));
                let private = OpenXrcd { key: None, create: true, exclusive: false };
                let queue = Shared::new(net.rnic(peer(end)), &to, private);
                net.ends.insert(peer(end), to);
                target(&mut net, end, peer(end), queue.xrcd, &patient);
                shared[peer(end)] = Some(queue);
            } else if typ == QpType::Rc && end % 4 == 1 && shared[end].is_none() {
                // Every other pair of RC QPs meets by address, from here on: one end is not in use yet.
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
                windows[end] = window(&mut net, end);
            }
        }
        let none = || vec![Vec::new(); types.len()];
        let group = Group::new(&mut net, (types.len()..all.len()).collect(), seed);
        Traffic {
            meetings,
            group,
            heard: 0,
            net,
            rng,
            ahs,
            shared,
            windows,
            sent: vec![Vec::new(); types.len()],
            done: none(),
            received: none(),
            types,
            seed,
        }
    }

    /// Where message `n` is written to, or the receive with this number lies.
    fn slot(op: WrOpcode, n: u64) -> u64 {
        let receive = matches!(op, WrOpcode::Send | WrOpcode::SendImm | WrOpcode::SendInv);
        (n + if receive { MESSAGES } else { 0 }) * SLOT
    }

    /// Posts a receive at the peer, sometimes late or not at all for those that need no answer, and a send.
    fn step(&mut self) {
        let end = self.rng.next_u64() as usize % self.types.len();
        let n = self.sent[end].len() as u64;
        let typ = self.types[end];
        if n >= MESSAGES || self.shared[end].is_some() {
            return;
        }
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
        let mut op = ops[self.rng.next_u64() as usize % some];
        // The last one takes the window away.
        if typ == QpType::Rc && n + 1 == MESSAGES {
            op = WrOpcode::SendInv;
        }
        let max = if typ == QpType::Ud { 256 } else { SLOT - 40 };
        let eight = matches!(op, WrOpcode::FetchAdd | WrOpcode::AtomicWrite);
        let len = if eight { 8 } else { 8 + (self.rng.next_u64() % (max - 8)) as u32 };
        let bytes = message(self.seed, end, n, len);
        // Upper half: what this end sends. Lower half: what it receives.
        let from = MR_BYTES as u64 / 2 + Self::slot(WrOpcode::Write, n);
        self.net.ends[end].fill(from as usize, &bytes);
        let to = peer(end);
        let reliable = !matches!(typ, QpType::Uc | QpType::Ud);
        if op.consumes_recv() && (reliable || self.rng.next_u64() % 8 != 0) {
            let sge = self.net.ends[to].sge(Self::slot(WrOpcode::Send, n), SLOT as u32);
            match &mut self.shared[to] {
                Some(queue) => queue.recv(n, sge),
                None => self.net.ends[to].recv(n, &[sge]),
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
            _ => Self::slot(op, n),
        };
        let by_window = op == WrOpcode::Write && typ == QpType::Rc && self.rng.next_u64() % 2 == 0;
        let rkey = if by_window { self.windows[to] } else { self.net.ends[to].key };
        let imm = if op == WrOpcode::SendInv { self.windows[to] } else { n as u32 };
        let sge = self.net.ends[end].sge(local, len);
        let target = abi::SqWqe { remote_addr: IOVA + remote, rkey, imm, compare_add: addend(n), ..wqe(op, n) };
        let number = self.shared[to].as_ref().map(|queue| queue.number);
        let (ah, qpn) = (self.ahs[end], number.unwrap_or(self.net.ends[to].qpn));
        self.net.ends[end].post_to(target, ah, qpn, &[sge]);
        self.sent[end].push((n, op, len));
    }

    fn poll(&mut self) {
        for end in 0..self.types.len() {
            for c in self.net.ends[end].poll() {
                let all = if c.opcode >= 128 { &mut self.received } else { &mut self.done };
                all[end].push(c);
            }
        }
    }

    fn run(&mut self, steps: u64) {
        for i in 0..steps * 20 {
            self.step();
            if i % 7 == 3 {
                self.group.send(&mut self.net, i / 7);
            }
            if self.rng.next_u64() % 4 == 0 {
                let time = self.rng.next_u64() % 200_000;
                self.net.run(time);
                self.poll();
            }
            // Sometimes a host is cut off, for less time than the retries take.
            if i % 50 == 25 {
                let host = self.rng.next_u64() as usize % HOSTS;
                self.net.cut(host, true);
                self.net.run(500_000_000);
                self.net.cut(host, false);
                // Every connection is tried again before the next one is cut off.
                self.net.run(300_000_000);
            }
        }
        self.net.run(60 * SECOND);
        self.poll();
        self.heard = self.group.check(&mut self.net);
        for (by, m) in self.meetings.drain(..).enumerate() {
            m.end(&mut self.net, by);
        }
    }

    fn check(&self) {
        let seed = self.seed;
        for end in 0..self.types.len() {
            let (typ, to) = (self.types[end], peer(end));
            let sent = &self.sent[end];
            // Every request completes once, in order, without an error, unless its connection was given up.
            let done: Vec<(u64, WcStatus)> = self.done[end].iter().map(|c| (c.wr_id, status(c))).collect();
            if !matches!(typ, QpType::Uc | QpType::Ud) && [end, to].iter().any(|&e| self.gave_up(e)) {
                self.check_given_up(end, &done);
                continue;
            }
            let all: Vec<(u64, WcStatus)> = sent.iter().map(|s| (s.0, WcStatus::Success)).collect();
            assert_eq!(done, all, "seed {seed}, {typ:?} end {end}");
            let consuming: Vec<&Sent> = sent.iter().filter(|s| s.1.consumes_recv()).collect();
            let received = &self.received[to];
            if !matches!(typ, QpType::Uc | QpType::Ud) {
                let lens: Vec<u32> = received.iter().map(|c| c.byte_len).collect();
                assert_eq!(lens, consuming.iter().map(|s| s.2).collect::<Vec<_>>(), "seed {seed}, {typ:?} end {to}");
                self.check_connected(end);
                continue;
            }
            // What arrived was sent, and is whole. The network may have changed its order, or made two of one.
            for c in received {
                assert_eq!(status(c), WcStatus::Success, "seed {seed}, {typ:?} end {to}");
                let skip = if typ == QpType::Ud { 40 } else { 0 };
                let write = c.opcode == 129;
                let n = if write { u64::from(c.imm) } else { self.number(to, c.wr_id, skip) };
                let &(_, op, len) =
                    sent.get(n as usize).unwrap_or_else(|| panic!("seed {seed}: message {n} was never sent"));
                assert_eq!(c.byte_len, len + skip as u32, "seed {seed}, {typ:?} end {to}, message {n}");
                assert_eq!(op == WrOpcode::WriteImm, write);
                let at = Self::slot(op, if write { n } else { c.wr_id }) as usize + skip;
                let got = self.net.ends[to].bytes(at, len as usize);
                assert!(got == message(seed, end, n, len), "seed {seed}, {typ:?} end {to}, message {n}");
            }
        }
    }

    /// True if an end has repeated a request as often as it may.
    fn gave_up(&self, end: usize) -> bool {
        self.done[end].iter().any(|c| status(c) == WcStatus::RetryExcErr)
    }

    /// What a connection may do that one of its ends gave up: for that the network must have lost a packet of the connection for each
    /// try. What was done before was done in order, and all that came after it is flushed.
    fn check_given_up(&self, end: usize, done: &[(u64, WcStatus)]) {
        let (seed, typ, to) = (self.seed, self.types[end], peer(end));
        let lost = self.net.lost_between(end, to);
        assert!(lost > u32::from(RETRIES), "seed {seed}, {typ:?} end {end} gave up after {lost} losses: {done:?}");
        let numbers: Vec<u64> = self.sent[end].iter().map(|s| s.0).collect();
        assert_eq!(done.iter().map(|d| d.0).collect::<Vec<_>>(), numbers, "seed {seed}, {typ:?} end {end}");
        let rest = done.iter().skip_while(|d| d.1 == WcStatus::Success).map(|d| d.1).collect::<Vec<_>>();
        let flushed = rest.iter().skip(1).all(|&s| s == WcStatus::WrFlushErr);
        assert!(
            flushed && rest.first().is_none_or(|&s| s == WcStatus::RetryExcErr),
            "seed {seed}, end {end}: {done:?}"
        );
    }

    /// What a reliable connection must have done: everything, once, in order.
    fn check_connected(&self, end: usize) {
        let (seed, typ, to) = (self.seed, self.types[end], peer(end));
        let (here, there) = (&self.net.ends[end], &self.net.ends[to]);
        let (source, mut counter) = (source(seed, to), 0);
        for &(n, op, len) in &self.sent[end] {
            let what = format!("seed {seed}, {typ:?} end {to}, message {n}, {op:?}");
            let bytes = len as usize;
            match op {
                WrOpcode::Read => {
                    let from = offset(n) as usize;
                    assert!(here.bytes((READS + n * SLOT) as usize, bytes) == source[from..from + bytes], "{what}");
                }
                WrOpcode::FetchAdd => {
                    let found = here.bytes((RESULTS + 8 * n) as usize, 8);
                    assert_eq!(u64::from_ne_bytes(found.try_into().unwrap()), counter, "{what}");
                    counter += addend(n);
                }
                _ => assert!(there.bytes(Self::slot(op, n) as usize, bytes) == message(seed, end, n, len), "{what}"),
            }
        }
        let last = there.bytes(COUNTER as usize, 8);
        assert_eq!(u64::from_ne_bytes(last.try_into().unwrap()), counter, "seed {seed}, {typ:?} end {to}");
        let invalidated = self.received[to].iter().filter(|c| u32::from(c.wc_flags) & wc_flags::WITH_INV != 0);
        let invalidated: Vec<u32> = invalidated.map(|c| c.imm).collect();
        let asked = self.sent[end].iter().any(|s| s.1 == WrOpcode::SendInv);
        assert_eq!(invalidated, Vec::from_iter(asked.then_some(self.windows[to])), "seed {seed}, {typ:?} end {to}");
    }

    /// The number that stands in the receive of `wr_id`.
    fn number(&self, end: usize, wr_id: u64, skip: usize) -> u64 {
        let at = Self::slot(WrOpcode::Send, wr_id) as usize + skip;
        u64::from_le_bytes(self.net.ends[end].bytes(at, 8).try_into().unwrap())
    }
}

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(default)
}

#[test]
fn every_message_has_an_allowed_outcome() {
    let first = setting("UNIRDMA_SIM_SEED", 0);
    let (mut caught, mut heard) = (0, 0);
    for seed in first..first + setting("UNIRDMA_SIM_SEEDS", 60) {
        println!("seed {seed}");
        let mut t = Traffic::new(seed);
        t.run(setting("UNIRDMA_SIM_STEPS", 15));
        t.check();
        caught += t.net.caught;
        heard += t.heard;
    }
    println!("{caught} corrupted packets were recognized, {heard} multicast messages heard");
    assert!(heard > 0);
}

/// A peer that is cut off for good costs its own connection an error and nobody else anything.
#[test]
fn a_lost_host_is_an_error_of_its_peers_alone() {
    let mut net = Net::hosts(3, &[QpType::Rc; 6], 5, Faults::default());
    // 0 on host 0 with 1 on host 1; 3 on host 0 with 5 on host 2.
    for (a, b) in [(0, 1), (1, 0), (3, 5), (5, 3)] {
        net.connect(QpType::Rc, a, b, &|a| a);
    }
    net.cut(1, true);
    let write = |net: &mut Net, a: usize, b: usize| {
        let (sge, key) = (net.ends[a].sge(0, 5000), net.ends[b].key);
        net.ends[a].post(abi::SqWqe { remote_addr: IOVA, rkey: key, ..wqe(WrOpcode::Write, 1) }, &[sge]);
    };
    write(&mut net, 0, 1);
    write(&mut net, 3, 5);
    net.run(SECOND);
    assert_eq!(status(&net.ends[0].done()), WcStatus::RetryExcErr);
    assert_eq!(status(&net.ends[3].done()), WcStatus::Success);
}
