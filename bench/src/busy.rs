//! `cargo xtask bench busy`: typical programs, on cores that computing threads use too. Each is measured together with
//! a peer in the same run. `tests/c/busy.c` has the programs and describes them.

use std::collections::BTreeMap;
use std::process::Command;

use harness::{Lab, Result, Running, compile, figures, median, named, packages, print_json};
use serde::Serialize;

/// How long one program is measured, in seconds.
const SECONDS: &str = "2";
/// Longest allowed silence of a connection, in addition to the delay of a thread that sleeps, ms.
const MOST_SILENCE_MS: f64 = 50.0;

struct Case {
    /// Its name in the program.
    name: &'static str,
    says: &'static str,
    /// Names of the figures that the program prints.
    figures: &'static [&'static str],
    unit: &'static str,
    peers: &'static [Peer],
}

#[derive(Clone, Copy)]
enum Peer {
    /// The same by TCP over the kernel's loopback, in no container.
    Tcp,
    /// The same threads, which pass the token through memory alone.
    Memory,
    /// A thread of the program that sleeps.
    Sleeper,
}

impl Peer {
    fn name(self) -> &'static str {
        match self {
            Peer::Tcp => "TCP loopback",
            Peer::Memory => "memory alone",
            Peer::Sleeper => "a sleeping thread",
        }
    }
}

const CASES: [Case; 6] = [
    Case {
        name: "sync",
        says: "WRITE 8 B, one by one",
        figures: &["mean", "p50", "p99", "p99.9", "worst"],
        unit: "us",
        peers: &[Peer::Tcp],
    },
    Case {
        name: "stall",
        says: "64 connections, longest silence",
        figures: &["silence"],
        unit: "ms",
        peers: &[Peer::Sleeper],
    },
    Case {
        name: "relay-2",
        says: "WRITE 4 KiB by two spinning threads",
        figures: &["rate"],
        unit: "1/s",
        peers: &[Peer::Memory, Peer::Tcp],
    },
    Case {
        name: "relay-3",
        says: "WRITE 4 KiB by three spinning threads",
        figures: &["rate"],
        unit: "1/s",
        peers: &[Peer::Memory, Peer::Tcp],
    },
    Case { name: "requests-1", says: "1 of 64 CQs on one epoll", figures: &["rate"], unit: "1/s", peers: &[Peer::Tcp] },
    Case { name: "requests-64", says: "64 CQs on one epoll", figures: &["rate"], unit: "1/s", peers: &[Peer::Tcp] },
];

#[derive(Serialize)]
struct Report {
    topology: String,
    /// Number of runs. Each figure is the median over them.
    runs: u32,
    rows: Vec<Row>,
    /// Figures that were not measured, with the reasons.
    skipped: Vec<String>,
    /// Silences that exceed their limit.
    failed: Vec<String>,
}

#[derive(Serialize)]
struct Row {
    program: &'static str,
    figure: &'static str,
    says: &'static str,
    /// Number of threads that compute at the same time.
    computing: usize,
    unit: &'static str,
    ours: f64,
    peer: f64,
    peer_is: &'static str,
    /// Ours over the peer's.
    ratio: f64,
}

struct Bench {
    lab: Lab,
    /// The program.
    exe: String,
}

impl Bench {
    /// Figures of the program between two containers.
    fn ours(&self, name: &str, computing: usize) -> Result<BTreeMap<String, f64>> {
        let (server, client) =
            (format!("{} serve {name}", self.exe), format!("{} {name} 10.0.0.1 {computing} {SECONDS}", self.exe));
        let (s, c) = self.lab.pair(("a", &server), ("b", &client), &[])?;
        if s.ok() && c.ok() {
            return Ok(figures(&format!("{}{}", s.text, c.text)));
        }
        Err(format!("server: {:?} {}; client: {:?} {}", s.code, s.text.trim(), c.code, c.text.trim()))
    }

    /// Figures of the program without RDMA.
    fn without(&self, name: &str, way: &str, computing: usize) -> Result<BTreeMap<String, f64>> {
        let mut c = Command::new(&self.exe);
        c.args([name, way, &computing.to_string(), SECONDS]);
        let o = Running::start(c, &self.lab.dir.join("peer.log"))?.finish();
        if o.ok() { Ok(figures(&o.text)) } else { Err(format!("{way}: {:?} {}", o.code, o.text.trim())) }
    }

    /// One run: pairs of our figure and a peer's figure.
    fn once(&self, case: &Case, computing: usize) -> Result<Vec<(f64, f64)>> {
        let ours = self.ours(case.name, computing)?;
        let get = |of: &BTreeMap<String, f64>, name: &str| of.get(name).copied().ok_or(format!("no {name}"));
        let mut pairs = Vec::new();
        for peer in case.peers {
            let theirs = match peer {
                Peer::Tcp => self.without(case.name, "tcp", computing)?,
                Peer::Memory => self.without(case.name, "memory", computing)?,
                Peer::Sleeper => BTreeMap::from([(case.figures[0].into(), get(&ours, "sleep")?)]),
            };
            for figure in case.figures {
                pairs.push((get(&ours, figure)?, get(&theirs, figure)?));
            }
        }
        Ok(pairs)
    }

    fn rows(&self, case: &Case, computing: usize, runs: u32) -> Result<Vec<Row>> {
        let all = (0..runs).map(|_| self.once(case, computing)).collect::<Result<Vec<_>>>()?;
        let peers = case.peers.iter().flat_map(|p| case.figures.iter().map(move |&f| (p.name(), f)));
        let row = |(i, (peer_is, figure))| {
            let of = |f: fn((f64, f64)) -> f64| median(all.iter().map(|run| f(run[i])));
            Row {
                program: case.name,
                figure,
                says: case.says,
                computing,
                unit: case.unit,
                ours: of(|p| p.0),
                peer: of(|p| p.1),
                peer_is,
                ratio: of(|p| p.0 / p.1),
            }
        };
        Ok(peers.enumerate().map(row).collect())
    }
}

pub(super) fn busy(json: bool, only: Option<&str>, runs: u32) -> Result<()> {
    let chosen = named(CASES.iter().collect(), |c| c.name, only, "program")?;
    packages::ensure(&[packages::RUN])?;
    eprintln!("building");
    harness::build()?;
    let lab = Lab::start(None)?;
    lab.vrnic("a", &["--ip", "10.0.0.1"])?;
    lab.vrnic("b", &["--ip", "10.0.0.2"])?;
    let exe = compile(&lab, "busy", &["-libverbs", "-pthread"])?;
    let bench = Bench { lab, exe };
    let cores = harness::cores().len();
    let (mut rows, mut skipped) = (Vec::new(), Vec::new());
    for case in chosen {
        for computing in [0, cores, cores + 1] {
            eprintln!("{} beside {computing} computing threads", case.name);
            match bench.rows(case, computing, runs) {
                Ok(more) => rows.extend(more),
                Err(e) => skipped.push(format!("{} beside {computing}: {e}", case.name)),
            }
        }
    }
    let failed = rows.iter().filter_map(too_silent).collect();
    let report = Report { topology: harness::topology(), runs, rows, skipped, failed };
    if json {
        print_json(&report)?;
    } else {
        print(&report);
    }
    if report.failed.is_empty() { Ok(()) } else { Err(report.failed.join("; ")) }
}

/// Checks the silence in a row. Returns a description if it is too long.
fn too_silent(row: &Row) -> Option<String> {
    let Row { program, figure, computing, ours, peer, .. } = row;
    (*figure == "silence" && ours - peer > MOST_SILENCE_MS).then(|| {
        format!("{program} beside {computing} computing threads: connections are silent for {ours:.0} ms, a thread that sleeps for {peer:.0} ms; {MOST_SILENCE_MS} ms more are allowed")
    })
}

fn print(r: &Report) {
    println!("topology: {}; runs: {} (medians count)\n", r.topology, r.runs);
    println!(
        "{:12} {:7} {:38} {:>9} {:>12} {:>12} {:>8}  {:4} peer",
        "program", "figure", "", "computing", "ours", "peer", "ratio", "unit"
    );
    for w in &r.rows {
        println!(
            "{:12} {:7} {:38} {:>9} {:>12.2} {:>12.2} {:>8.3}  {:4} {}",
            w.program, w.figure, w.says, w.computing, w.ours, w.peer, w.ratio, w.unit, w.peer_is
        );
    }
    println!(
        "\nTimes (us, ms) are better if they are less, rates (1/s) if they are more. Computing threads belong to the client."
    );
    for s in &r.skipped {
        println!("not measured: {s}");
    }
}
