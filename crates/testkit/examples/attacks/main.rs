//! Tenants that try to slow their neighbours down, and a pair of programs that feels it. `cargo xtask bench isolation` runs
//! each of them as a process against the vRNICs of a running virtual layer.
//!
//! An attack prints `ready` when it begins, or `skip: REASON` if it cannot be done here, and ends after its time. The victim
//! prints `ready` when its programs are connected, measures once it has read a line, and prints its figures, a name and a
//! number on each line.

mod memory;
mod victim;

use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use unirdma_abi as abi;
use unirdma_formats::WrOpcode;
use unirdma_mem::MemFd;
use unirdma_testkit::{Program, Queue, Scripted, connect};
use zerocopy::{FromBytes, IntoBytes};

const USAGE: &str = "usage: attacks NAME SECONDS SOCKET [ARGUMENT]
  victim SECONDS SOCKET SOCKET         measures WRITEs between two vRNICs
  honest SECONDS SOCKET SOCKET         WRITEs of 1 MiB between two vRNICs, without a pause
  rnr SECONDS SOCKET QPS               SENDs to QPs that never post a receive
  bells SECONDS SOCKET                 64 sessions ring all their doorbell bits
  flood SECONDS SOCKET                 one QP posts WRITEs of 64 B without a pause
  slowmm SECONDS SOCKET fuse|fork      READs of memory that is slow to reach
  regmr SECONDS SOCKET                 registers and deregisters memory beside 60,000 MRs
  capw SECONDS SOCKET                  WRITEs of 128 MiB with the smallest MTU, for a vRNIC that is captured
  pages SECONDS SOCKET                 registers lists of very many pages";

/// `IBV_MTU_256` and `IBV_MTU_4096`.
const MTU_256: u8 = 1;
const MTU_4096: u8 = 5;

/// How long an attack goes on.
#[derive(Clone, Copy)]
struct Until(Instant);

impl Until {
    fn over(self) -> bool {
        Instant::now() >= self.0
    }

    fn sleep(self) {
        std::thread::sleep(self.0.saturating_duration_since(Instant::now()));
    }
}

fn ready() {
    println!("ready");
}

/// A well-behaved neighbour that is as busy as it can be.
fn honest(from: &Path, to: &Path, until: Until) {
    const LEN: usize = 1 << 20;
    let (a, b) = (Program::new(from, LEN), Program::new(to, LEN));
    connect(&a, &b);
    let post = || a.post(WrOpcode::Write, &b, 0, LEN).expect("post");
    (0..8).for_each(|_| post());
    ready();
    while !until.over() {
        a.wait().expect("a completion");
        post();
    }
}

/// SENDs whose receivers are never ready: each is tried again after the shortest RNR timer, at no cost to this process.
fn rnr(socket: &Path, mut qps: u32, until: Until) {
    let mut sessions = Vec::new();
    while qps > 0 {
        let some = qps.min(abi::MAX_QP);
        qps -= some;
        let mut s = Scripted::new(socket);
        let queues: Vec<Queue> = (0..some).map(|_| s.queue(1)).collect();
        for pair in queues.chunks_exact(2) {
            s.connect(&pair[0], s.gid, pair[1].qpn, MTU_4096);
            s.connect(&pair[1], s.gid, pair[0].qpn, MTU_4096);
        }
        sessions.push((s, queues));
    }
    for (s, queues) in &sessions {
        for q in queues {
            s.write(q, 0, WrOpcode::Send, abi::Sge::default(), (0, 0));
            s.post(q, 1);
        }
    }
    ready();
    until.sleep();
}

fn bells(socket: &Path, until: Until) {
    let sessions: Vec<Scripted> = (0..64).map(|_| Scripted::new(socket)).collect();
    ready();
    while !until.over() {
        sessions.iter().for_each(Scripted::ring_all);
    }
}

fn flood(socket: &Path, until: Until) {
    let mut s = Scripted::new(socket);
    let (q, _) = s.pair(4096, MTU_4096);
    let data = s.alloc(128);
    let mr = s.mr(s.hostile.bus(data), 128);
    let local = abi::Sge { addr: 0, length: 64, lkey: mr.lkey };
    for i in 0..q.entries() {
        s.write(&q, i, WrOpcode::Write, local, (64, mr.rkey));
    }
    ready();
    while !until.over() {
        let executed = s.executed(&q);
        if s.posted(&q).wrapping_sub(executed) < q.entries() / 2 {
            s.post(&q, executed.wrapping_add(q.entries()));
        }
        std::thread::sleep(Duration::from_micros(100));
    }
}

fn regmr(socket: &Path, until: Until) {
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

/// Posts one request after the other, each in the next slot of the SQ, and waits for it without a busy loop.
fn one_by_one(s: &Scripted, q: &Queue, until: Until, mut write: impl FnMut(u32)) {
    while !until.over() {
        let index = s.posted(q);
        write(index);
        s.post(q, index.wrapping_add(1));
        while s.executed(q) == index && !until.over() {
            std::thread::sleep(Duration::from_micros(20));
        }
    }
}

/// Large WRITEs that are very many packets to who captures them.
fn capw(socket: &Path, until: Until) {
    const LEN: u64 = 128 << 20;
    let mut s = Scripted::new(socket);
    let file = MemFd::new(c"capw", 2 * LEN as usize).expect("memory file");
    let at = s.add_memory(&file);
    let mr = s.mr(at, 2 * LEN);
    let (q, _) = s.pair(16, MTU_256);
    ready();
    let local = abi::Sge { addr: 0, length: LEN as u32, lkey: mr.lkey };
    one_by_one(&s, &q, until, |i| s.write(&q, i, WrOpcode::Write, local, (LEN, mr.rkey)));
}

/// Registers lists of pages of which none joins its neighbour, so that each is a mapping of its own.
fn pages(socket: &Path, until: Until) {
    const PAGE: u64 = 4096;
    /// The longest list that the device takes, and one of which two nearly use up the mappings that a process may have.
    const LONGEST: u64 = 1 << 20;
    const HALF_OF_ALL: u64 = 32_700;
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
        let lists = [LONGEST, HALF_OF_ALL, HALF_OF_ALL, LONGEST];
        let made: Vec<u32> = lists.into_iter().filter_map(|n| register(&mut s, n)).collect();
        for handle in made {
            s.order(abi::Command::DeregMr, &abi::HandleReq { handle, reserved: 0 });
        }
    }
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let (Some(&name), Some(Ok(seconds))) = (words.first(), words.get(1).map(|s| s.parse::<f64>())) else {
        eprintln!("{USAGE}");
        return ExitCode::FAILURE;
    };
    let until = Until(Instant::now() + Duration::from_secs_f64(seconds));
    let result = match (name, &words[2..]) {
        ("victim", [a, b]) => victim::measure(Path::new(a), Path::new(b), seconds),
        (_, [socket, more @ ..]) => {
            let socket = Path::new(socket);
            match (name, more) {
                ("honest", [to]) => honest(socket, Path::new(to), until),
                ("rnr", [qps]) => rnr(socket, qps.parse().expect("a number of QPs"), until),
                ("bells", []) => bells(socket, until),
                ("flood", []) => flood(socket, until),
                ("slowmm", ["fuse"]) => memory::fuse(socket, until),
                ("slowmm", ["fork"]) => memory::fork(socket, until),
                ("regmr", []) => regmr(socket, until),
                ("capw", []) => capw(socket, until),
                ("pages", []) => pages(socket, until),
                _ => {
                    eprintln!("{USAGE}");
                    return ExitCode::FAILURE;
                }
            }
            Ok(())
        }
        _ => Err(USAGE.into()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("{e}");
            ExitCode::FAILURE
        }
    }
}
