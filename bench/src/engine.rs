//! `cargo xtask bench engine`: the rate at which the RNIC and its pollers execute requests without any program. The
//! test kit's example `engine` measures; this module prints.

use std::process::Command;

use harness::{Result, median, print_json};
use serde::Serialize;

#[derive(Serialize)]
struct Report {
    topology: String,
    /// Number of runs. Each figure is the median over them.
    runs: usize,
    rows: Vec<Row>,
    nothing: Vec<Nothing>,
    stages: Stages,
    latency: Latency,
}

/// Cost of the parts of a WRITE with one poller, ns: the difference between WRITEs with and without that part.
#[derive(Debug, PartialEq, Serialize)]
struct Stages {
    /// Takes the WQE, checks it, and frees its slot: a WRITE of no bytes.
    wqe_ns: f64,
    /// Looks up two keys and copies 8 bytes.
    copy_ns: f64,
    /// Writes a completion.
    completion_ns: f64,
}

fn stages(line: &str) -> Option<Stages> {
    let mut words = line.strip_prefix("stages ")?.split_whitespace().map_while(|w| w.parse::<f64>().ok());
    let mut ns = || words.next().map(|rate| 1e9 / rate);
    let (none, copied, completed) = (ns()?, ns()?, ns()?);
    Some(Stages { wqe_ns: none, copy_ns: copied - none, completion_ns: completed - copied })
}

/// Time from the post of a WRITE of 8 bytes until its slot is free again, with one poller on a core of its own.
#[derive(Debug, PartialEq, Serialize)]
struct Latency {
    p50_ns: u64,
    p99_ns: u64,
    /// Time that a word takes from one core to the other.
    hop_ns: u64,
    hops: f64,
}

fn latency(line: &str) -> Option<Latency> {
    let mut words = line.strip_prefix("latency ")?.split_whitespace().map_while(|w| w.parse::<u64>().ok());
    let (p50_ns, p99_ns, hop_ns) = (words.next()?, words.next()?, words.next()?);
    Some(Latency { p50_ns, p99_ns, hop_ns, hops: p50_ns as f64 / hop_ns as f64 })
}

#[derive(Serialize)]
struct Row {
    pollers: u32,
    /// Length of a WRITE.
    bytes: u64,
    millions_s: f64,
    mib_s: f64,
    /// Time from one WRITE to the next, of all pairs together.
    ns: f64,
    /// Rate relative to one poller.
    ratio: f64,
    /// Times for which the lock of the RNIC was held: median, 99.9th percentile, maximum.
    held_p50_ns: u64,
    held_p999_ns: u64,
    held_worst_ns: u64,
}

/// Parses a line of the example about WRITEs of one size.
fn row(line: &str) -> Option<Row> {
    let mut words = line.strip_prefix("row ")?.split_whitespace();
    let (pollers, bytes) = (words.next()?.parse().ok()?, words.next()?.parse::<u64>().ok()?);
    let rate: f64 = words.next()?.parse().ok()?;
    let mib_s = rate * bytes as f64 / f64::from(1 << 20);
    let mut ns = || words.next()?.parse().ok();
    let (held_p50_ns, held_p999_ns, held_worst_ns) = (ns()?, ns()?, ns()?);
    let (millions_s, ns) = (rate / 1e6, 1e9 / rate);
    Some(Row { pollers, bytes, millions_s, mib_s, ns, ratio: 1.0, held_p50_ns, held_p999_ns, held_worst_ns })
}

/// Durations of steps that only read the clock for 3 us, on several cores at once: the time that the machine takes for
/// itself.
#[derive(Debug, PartialEq, Serialize)]
struct Nothing {
    threads: u32,
    p50_ns: u64,
    p999_ns: u64,
    worst_ns: u64,
}

fn nothing(line: &str) -> Option<Nothing> {
    let mut words = line.strip_prefix("nothing ")?.split_whitespace();
    let threads = words.next()?.parse().ok()?;
    let mut ns = || words.next()?.parse().ok();
    Some(Nothing { threads, p50_ns: ns()?, p999_ns: ns()?, worst_ns: ns()? })
}

/// Sets the speed of each row relative to the row with one poller and the same size.
fn compare(rows: &mut [Row]) {
    for i in 0..rows.len() {
        let alone = rows.iter().find(|r| r.pollers == 1 && r.bytes == rows[i].bytes).map(|r| r.ns);
        rows[i].ratio = alone.map_or(1.0, |ns| ns / rows[i].ns);
    }
}

/// Output of one run of the example, with all figures in order.
struct Run {
    rows: Vec<Row>,
    nothing: Vec<Nothing>,
    stages: Stages,
    latency: Latency,
}

impl Run {
    fn new(text: &str) -> Option<Run> {
        let mut rows: Vec<Row> = text.lines().filter_map(row).collect();
        compare(&mut rows);
        let nothing = text.lines().filter_map(nothing).collect();
        Some(Run { rows, nothing, stages: text.lines().find_map(stages)?, latency: text.lines().find_map(latency)? })
    }

    /// The figures that differ from run to run.
    fn figures(&mut self) -> Vec<Figure<'_>> {
        let mut all = Vec::new();
        for r in &mut self.rows {
            all.extend([&mut r.millions_s, &mut r.mib_s, &mut r.ns, &mut r.ratio].map(Figure::Real));
            all.extend([&mut r.held_p50_ns, &mut r.held_p999_ns, &mut r.held_worst_ns].map(Figure::Whole));
        }
        for n in &mut self.nothing {
            all.extend([&mut n.p50_ns, &mut n.p999_ns, &mut n.worst_ns].map(Figure::Whole));
        }
        let (s, l) = (&mut self.stages, &mut self.latency);
        all.extend([&mut s.wqe_ns, &mut s.copy_ns, &mut s.completion_ns, &mut l.hops].map(Figure::Real));
        all.extend([&mut l.p50_ns, &mut l.p99_ns, &mut l.hop_ns].map(Figure::Whole));
        all
    }

    /// The median of each figure over several runs.
    fn median(mut runs: Vec<Run>) -> Option<Run> {
        let values: Vec<Vec<f64>> = runs.iter_mut().map(|r| r.figures().iter().map(Figure::get).collect()).collect();
        let mut run = runs.pop()?;
        for (i, figure) in run.figures().into_iter().enumerate() {
            figure.set(median(values.iter().filter_map(|v| v.get(i).copied())));
        }
        Some(run)
    }
}

/// A figure of a run.
enum Figure<'a> {
    Real(&'a mut f64),
    Whole(&'a mut u64),
}

impl Figure<'_> {
    fn get(&self) -> f64 {
        match self {
            Figure::Real(x) => **x,
            Figure::Whole(n) => **n as f64,
        }
    }

    fn set(self, value: f64) {
        match self {
            Figure::Real(x) => *x = value,
            Figure::Whole(n) => *n = value as u64,
        }
    }
}

pub(super) fn engine(runs: usize, json: bool) -> Result<()> {
    eprintln!("building");
    let program = harness::build_example("unirdma-testkit", "engine")?;
    let mut all = Vec::new();
    for n in 1..=runs {
        eprintln!("run {n} of {runs}: WRITEs of 8 B to 1 MiB with one poller and with two");
        let o = Command::new(&program).output().map_err(|e| format!("{}: {e}", program.display()))?;
        let run = Run::new(&String::from_utf8_lossy(&o.stdout)).filter(|_| o.status.success());
        let failed = || format!("{} failed: {}", program.display(), String::from_utf8_lossy(&o.stderr));
        all.push(run.ok_or_else(failed)?);
    }
    let Run { rows, nothing, stages, latency } = Run::median(all).ok_or("--runs must be at least 1")?;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let topology =
        format!("{cores} cores; two pairs of vRNICs, one QP each that writes; send queues that are always full");
    let report = Report { topology, runs, rows, nothing, stages, latency };
    if json {
        return print_json(&report);
    }
    println!("topology: {}; medians of {} runs\n", report.topology, report.runs);
    println!(
        "{:>8} {:>10} {:>9} {:>9} {:>11} {:>10}   lock held: {:>7} {:>7} {:>9}",
        "pollers", "WRITE of", "M/s", "MiB/s", "ns a WRITE", "one poller", "p50 us", "p99.9", "worst"
    );
    let us = |ns: u64| ns as f64 / 1e3;
    for r in &report.rows {
        println!(
            "{:>8} {:>8} B {:>9.3} {:>9.0} {:>11.1} {:>9.2}x {:>19.1} {:>7.1} {:>9.1}",
            r.pollers,
            r.bytes,
            r.millions_s,
            r.mib_s,
            r.ns,
            r.ratio,
            us(r.held_p50_ns),
            us(r.held_p999_ns),
            us(r.held_worst_ns)
        );
    }
    println!("\nbeside it, steps of a thread that do nothing for 3 us: what is longer the machine took for itself");
    for n in &report.nothing {
        let times = [n.p50_ns, n.p999_ns, n.worst_ns].map(us);
        println!("{:>8} {:>78.1} {:>7.1} {:>9.1}", n.threads, times[0], times[1], times[2]);
    }
    let s = &report.stages;
    println!("\none poller, a WRITE of 8 B with a completion, by stage:");
    println!(
        "WQE taken, checked and given back {:.0} ns; keys and copy {:.0} ns; completion {:.0} ns",
        s.wqe_ns, s.copy_ns, s.completion_ns
    );
    let l = &report.latency;
    println!(
        "\none poller with a core for itself, nobody yields: a WRITE of 8 B, from its post until its slot is free again"
    );
    println!("p50 {} ns, p99 {} ns; from core to core {} ns: {:.1} hops", l.p50_ns, l.p99_ns, l.hop_ns, l.hops);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_become_bandwidth_and_time() {
        let r = row("row 2 65536 1000000.0 100 200 300").expect("a row");
        assert_eq!((r.pollers, r.bytes, r.ns), (2, 65536, 1000.0));
        assert_eq!((r.held_p50_ns, r.held_p999_ns, r.held_worst_ns), (100, 200, 300));
        assert!((r.mib_s - 62500.0).abs() < 1e-6 && (r.millions_s - 1.0).abs() < 1e-9);
        assert!(row("warning: nothing").is_none() && row("row 2 65536 1000000.0").is_none());
        let mut rows = [row("row 1 65536 500000.0 1 2 3").expect("a row"), r];
        compare(&mut rows);
        assert_eq!(rows.map(|r| r.ratio), [1.0, 2.0]);
        let parts = Stages { wqe_ns: 100.0, copy_ns: 25.0, completion_ns: 75.0 };
        assert_eq!(stages("stages 10000000 8000000 5000000"), Some(parts));
        assert_eq!(
            latency("latency 800 1500 200"),
            Some(Latency { p50_ns: 800, p99_ns: 1500, hop_ns: 200, hops: 4.0 })
        );
        assert_eq!(nothing("nothing 2 7 8 9"), Some(Nothing { threads: 2, p50_ns: 7, p999_ns: 8, worst_ns: 9 }));
        assert!(nothing("nothing 2 7").is_none());
        let text =
            |n: u32| format!("row 1 8 {n}000 1 2 {n}\nnothing 1 2 3 {n}\nstages 3 2 1\nlatency {n}00 9 100\nmore");
        let runs = [3, 9, 1].iter().filter_map(|&n| Run::new(&text(n))).collect();
        let m = Run::median(runs).expect("a run");
        assert_eq!((m.rows[0].millions_s, m.rows[0].held_worst_ns), (0.003, 3));
        assert_eq!((m.nothing[0].worst_ns, m.latency.p50_ns, m.latency.hops), (3, 300, 3.0));
        assert!(Run::median(Vec::new()).is_none() && Run::new("row 1 8 1000 1 2 3").is_none());
        assert!(latency("row 2 65536 1000000.0").is_none() && latency("latency 1 2").is_none());
    }
}
