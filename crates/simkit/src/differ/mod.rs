//! The differential simulation: one random program is executed within a host and between two hosts. Both executions
//! must have the same results.
//!
//! Each seed has its own program: connections of all types between two programs with their memory, requests and
//! receives of which many are wrong, and commands in between (`program`). Two worlds execute it, one with both programs
//! on one host and one with two hosts and a network that loses nothing (`world`). The memory regions that are reached
//! as private memory of a process differ between the worlds.
//!
//! The program consists of phases. In a phase requests are posted, and then time passes until everything has come to
//! rest. At the end of each phase these are compared: the completions of each CQ in order, the asynchronous events of
//! each object in order, completion events, the results of commands, of QUERY_QP and of QUERY_SRQ, free slots,
//! counters, and memory.
//!
//! These results may differ; the simulation avoids or ignores them:
//!
//! | result | reason |
//! |---|---|
//! | order of completions of different CQs, of events of different objects | unspecified; the network takes time |
//! | data of a message that failed or was dropped (`doubts`) | its first packets may be stored (IBTA vol. 1, 9.7.4.1) |
//! | all but `wr_id`, status, `qp_num` and vendor error of a completion with an error | undefined by `ibv_poll_cq(3)` |
//! | results of both ends of a connection that act at once, if one of them fails | which end is first depends on time |
//! | which of several QPs gets a receive of an SRQ | depends on time; so one QP at a time sends to an SRQ |
//! | whether a QP fails with more outstanding READs than its peer takes | depends on time; so both have one limit |
//! | requests after the one whose completion overran a CQ | they may have been sent already |
//! | PSNs of a connection that has failed | each packet takes a PSN; a local message takes its PSNs when it completes |
//! | QPs with another MTU, PSN or destination than their peer has | packets do not name their sender |
//! | a READ, then a SEND without fence that invalidates its window | only a fence orders them (IBTA vol. 1, table 76) |
//! | whether `dropped` or `qkey_violations` counts a datagram | its QP may be failing by a slow receive at that time |
//! | which of two faults is reported, receive or invalidation | the key comes last; so at most one is wrong |
//! | RNR NAKs, timeouts, and the counters of packets | they count tries and packets |

mod program;
mod world;

use std::collections::BTreeMap;
use std::fmt::Write;

use unirdma_abi as abi;
use unirdma_formats::{QpType, WcOpcode, WrOpcode};
use unirdma_rnic::Rng;

use crate::pattern;
use program::{Act, At, Key, Program, REGIONS, USED, iova};
use world::World;

/// Statistics of a simulation. A test can check with them that it has covered enough.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Number of completions by opcode and status. Completions with an error have no opcode.
    pub completions: BTreeMap<(Option<u8>, u8), u64>,
    /// Number of asynchronous events by kind.
    pub events: BTreeMap<String, u64>,
}

impl Report {
    /// Adds the statistics of another simulation.
    pub fn add(&mut self, other: &Report) {
        other.completions.iter().for_each(|(k, n)| *self.completions.entry(*k).or_default() += n);
        other.events.iter().for_each(|(k, n)| *self.events.entry(k.clone()).or_default() += n);
    }

    fn count(&mut self, seen: &Seen) {
        for c in &seen.completions {
            let opcode = (c.status == 0).then_some(c.opcode);
            *self.completions.entry((opcode, c.status)).or_default() += 1;
        }
        for (_, what) in seen.channels.iter().filter(|(of, _)| of.starts_with(EVENTS)) {
            what.iter().for_each(|kind| *self.events.entry(kind.clone()).or_default() += 1);
        }
    }
}

/// Prefix of the names of channels with asynchronous events.
const EVENTS: &str = "events of ";

/// The results that a world shows at the end of a phase.
#[derive(Default)]
struct Seen {
    /// Results in order, by the object that they are of.
    channels: BTreeMap<String, Vec<String>>,
    completions: Vec<abi::Cqe>,
    states: BTreeMap<At, u8>,
    /// Free slots for requests and receives.
    room: BTreeMap<At, (u32, u32)>,
}

impl Seen {
    fn note(&mut self, of: &str, what: String) {
        self.channels.entry(of.into()).or_default().push(what);
    }
}

/// Runs the program of a seed in both worlds. Panics at the first difference, with all acts and results until then.
pub fn run(seed: u64, phases: u64) -> Report {
    let mut program = Program::new(seed);
    let mut rng = Rng::new(seed ^ 0xc09e);
    let mut worlds = [("one host", 1), ("two hosts", 2)].map(|(name, hosts)| {
        // One region in four is private memory.
        let private = rng.next_u64() & rng.next_u64();
        World::new(name, hosts, seed, &program.kinds, private)
    });
    let mut report = Report::default();
    let mut trace = format!("{:?}\n", program.kinds);
    for n in 0..phases {
        let acts = program.phase();
        let seen = worlds.each_mut().map(|w| w.perform(&acts));
        describe(&mut trace, n, &acts, &worlds, &seen);
        let doubts = doubts(&program, &seen[0]);
        if let Some(difference) = difference(&seen).or_else(|| memory_difference(&worlds, &doubts)) {
            let again = format!("cargo xtask sim --differ --seed {seed} --seeds 1 --steps {phases}");
            panic!("{trace}\nseed {seed}, phase {n}: {difference}\nto repeat it: {again}");
        }
        for &(end, off, len) in &doubts {
            let bytes = pattern(len as usize, seed ^ off);
            worlds.iter().for_each(|w| w.fill(end, off, &bytes));
        }
        report.count(&seen[0]);
        program.learn(&seen[0]);
    }
    report
}

/// Appends the acts and the results of a phase.
fn describe(trace: &mut String, n: u64, acts: &[Act], worlds: &[World; 2], seen: &[Seen; 2]) {
    let _ = writeln!(trace, "phase {n}");
    for act in acts {
        let _ = writeln!(trace, "  {act:?}");
    }
    for (w, s) in worlds.iter().zip(seen) {
        for (of, what) in &s.channels {
            let _ = writeln!(trace, "  {}: {of}: {}", w.name, what.join("; "));
        }
    }
}

/// Describes the first channel whose contents differ.
fn difference([a, b]: &[Seen; 2]) -> Option<String> {
    let mut all = a.channels.keys().chain(b.channels.keys());
    let of = all.find(|of| a.channels.get(*of) != b.channels.get(*of))?;
    let text = |s: &Seen| s.channels.get(of).map_or("nothing".into(), |v| v.join("\n    "));
    Some(format!("{of} differ\n  one host:\n    {}\n  two hosts:\n    {}", text(a), text(b)))
}

/// Memory that may differ after this phase: receives and targets of messages that failed or were dropped, since part of
/// their data may have arrived. Each is a program, an offset and a length.
fn doubts(program: &Program, seen: &Seen) -> Vec<(usize, u64, u64)> {
    let status = |wr_id: u64| seen.completions.iter().find(|c| c.wr_id == wr_id);
    let broken = |wr_id: u64| status(wr_id).is_some_and(|c| !matches!(c.status, 0 | 5));
    let mut found = Vec::new();
    let mut doubt = |end: usize, region: usize, off: u64, len: u64| {
        let r = REGIONS[region];
        if off < r.len {
            found.push((end, r.at + off, len.min(r.len - off)));
        }
    };
    let mut risky = Vec::new();
    for (at, wr_id, r) in &program.sent {
        let unreliable = program.kinds[at.1].typ == QpType::Uc;
        if !broken(*wr_id) && !unreliable {
            continue;
        }
        let peer = 1 - at.0;
        if r.op.is_send() {
            risky.push((peer, at.1));
        }
        if r.op.stores_locally() {
            r.pieces.iter().for_each(|p| doubt(at.0, p.region, p.off, p.len.into()));
        }
        if r.op == WrOpcode::WriteImm {
            let region = if let Key::Region(_, region) = r.rkey { region } else { 0 };
            let len = r.pieces.iter().map(|p| u64::from(p.len)).sum::<u64>() + u64::from(r.inline.unwrap_or(0));
            doubt(peer, region, r.addr.wrapping_sub(iova(region)), len);
        }
    }
    for (wr_id, (queue, pieces)) in program.receives.iter().chain(&program.gone) {
        let end = queue.end();
        let at_risk = risky.iter().any(|&at| program.queue_of(at) == *queue);
        let mut skip = match status(*wr_id) {
            Some(c) if c.status == 0 && c.opcode == WcOpcode::Recv as u8 => u64::from(c.byte_len),
            _ => 0,
        };
        if !at_risk && !broken(*wr_id) {
            continue;
        }
        for p in pieces {
            let held = skip.min(p.len.into());
            doubt(end, p.region, p.off + held, u64::from(p.len) - held);
            skip -= held;
        }
    }
    found
}

/// Describes the first difference of memory outside `doubts`.
fn memory_difference([a, b]: &[World; 2], doubts: &[(usize, u64, u64)]) -> Option<String> {
    for end in 0..2 {
        let [mut one, mut two] = [a, b].map(|w| w.memory(end, 0, USED));
        for &(_, off, len) in doubts.iter().filter(|d| d.0 == end) {
            let all = off as usize..(off + len) as usize;
            one[all.clone()].fill(0);
            two[all].fill(0);
        }
        if let Some(at) = (0..one.len()).find(|&i| one[i] != two[i]) {
            let until = (at..one.len()).rev().find(|&i| one[i] != two[i]).unwrap_or(at);
            let region = REGIONS.iter().rposition(|r| r.at <= at as u64).unwrap_or(0);
            let off = at as u64 - REGIONS[region].at;
            return Some(format!(
                "memory of program {end} differs from {at} to {until} (region {region}, offset {off}): {:02x?} on one host, {:02x?} on two",
                &one[at..(at + 8).min(one.len())],
                &two[at..(at + 8).min(one.len())]
            ));
        }
    }
    None
}
