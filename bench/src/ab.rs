//! `cargo xtask bench ab REV`: measures the builds of this tree and of another commit in turn, so that a slow phase of
//! the machine affects both.

use std::path::{Path, PathBuf};
use std::process::Command;

use harness::{Lab, Link, Result, TwoHosts, median, packages, print_json, topology};
use serde::Serialize;

use super::rows;

/// One figure of perftest.
struct Figure {
    name: &'static str,
    command: &'static str,
    unit: Unit,
    /// Measured between two hosts, not between two containers of one.
    wire: bool,
}

/// The column of perftest that has the figure.
#[derive(Clone, Copy)]
enum Unit {
    /// Typical latency.
    Us,
    /// Average bandwidth.
    MibS,
    /// Message rate.
    MillionsS,
}

impl Unit {
    fn text(self) -> &'static str {
        match self {
            Unit::Us => "us",
            Unit::MibS => "MiB/s",
            Unit::MillionsS => "M/s",
        }
    }

    fn column(self) -> usize {
        match self {
            Unit::Us | Unit::MillionsS => 4,
            Unit::MibS => 3,
        }
    }

    /// How many times better `new` is than `old`, above 1 for an improvement in any unit.
    fn ratio(self, old: f64, new: f64) -> f64 {
        if let Unit::Us = self { old / new } else { new / old }
    }
}

const fn local(name: &'static str, command: &'static str, unit: Unit) -> Figure {
    Figure { name, command, unit, wire: false }
}

const FIGURES: [Figure; 12] = [
    local("write latency, 2 B", "ib_write_lat -s 2 -n 100000", Unit::Us),
    local("write latency, 8 B", "ib_write_lat -s 8 -n 100000", Unit::Us),
    local("send latency, 2 B", "ib_send_lat -s 2 -n 100000", Unit::Us),
    local("send latency, 8 B", "ib_send_lat -s 8 -n 100000", Unit::Us),
    local("write bandwidth, 64 KiB", "ib_write_bw -s 65536 -n 200000", Unit::MibS),
    local("write bandwidth, 1 MiB", "ib_write_bw -s 1048576 -n 15000", Unit::MibS),
    local("send bandwidth, 64 KiB", "ib_send_bw -s 65536 -n 200000", Unit::MibS),
    local("read bandwidth, 64 KiB", "ib_read_bw -s 65536 -n 200000", Unit::MibS),
    local("write rate, 64 B", "ib_write_bw -s 64 -q 1 -n 1000000", Unit::MillionsS),
    local("send rate, 64 B", "ib_send_bw -s 64 -q 1 -n 1000000", Unit::MillionsS),
    Figure { wire: true, ..local("wire: write bandwidth, 64 KiB", "ib_write_bw -s 65536 -n 30000", Unit::MibS) },
    Figure { wire: true, ..local("wire: send latency, 2 B", "ib_send_lat -s 2 -n 40000", Unit::Us) },
];

/// MTU of the veth pair between two hosts.
const MTU: u32 = 9000;

#[derive(Serialize)]
struct Report {
    topology: String,
    /// The other commit, and the commit of this tree.
    old: String,
    new: String,
    runs: u32,
    rows: Vec<Row>,
    /// Figures that were not measured, with the reasons.
    skipped: Vec<String>,
}

#[derive(Serialize)]
struct Row {
    figure: &'static str,
    unit: &'static str,
    /// Medians over the runs.
    old: f64,
    new: f64,
    /// How many times better the new build was, over all pairs of runs: the median, the least and the most.
    ratio: f64,
    least: f64,
    most: f64,
    /// Each pair: old, new.
    pairs: Vec<(f64, f64)>,
}

impl Row {
    fn of(f: &Figure, pairs: Vec<(f64, f64)>) -> Row {
        let ratios: Vec<f64> = pairs.iter().map(|&(old, new)| f.unit.ratio(old, new)).collect();
        Row {
            figure: f.name,
            unit: f.unit.text(),
            old: median(pairs.iter().map(|p| p.0)),
            new: median(pairs.iter().map(|p| p.1)),
            ratio: median(ratios.iter().copied()),
            least: ratios.iter().copied().fold(f64::INFINITY, f64::min),
            most: ratios.iter().copied().fold(f64::NEG_INFINITY, f64::max),
            pairs,
        }
    }
}

/// Output of `git` with these arguments, in this tree.
fn git(args: &[&str]) -> Result<String> {
    let o = Command::new("git").args(args).current_dir(harness::root()).output().map_err(|e| format!("git: {e}"))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_string();
    if o.status.success() { Ok(text(&o.stdout)) } else { Err(format!("git {}: {}", args.join(" "), text(&o.stderr))) }
}

/// Builds another commit in a worktree of its own, which is kept for the next time. Returns the path of its `unirdma`.
fn build_commit(commit: &str) -> Result<PathBuf> {
    let tree = harness::root().join("target/ab").join(commit);
    let _ = git(&["worktree", "prune"]);
    if !tree.join("Cargo.toml").exists() {
        git(&["worktree", "add", "--quiet", "--force", "--detach", &tree.display().to_string(), commit])?;
    }
    harness::build_in(&tree)?;
    Ok(tree.join("target/release/unirdma"))
}

/// The running hosts of one build. Dropping this value ends them.
struct Build {
    local: Option<Lab>,
    wire: Option<TwoHosts>,
}

impl Build {
    fn start(unirdma: &Path, name: &str, local: bool, wire: bool) -> Result<Build> {
        let mut build = Build { local: None, wire: None };
        if local {
            let lab = build.local.insert(Lab::start_of(unirdma, None, None, &[])?);
            lab.vrnic("a", &["--ip", "10.0.0.1"])?;
            lab.vrnic("b", &["--ip", "10.0.0.2"])?;
        }
        if wire {
            build.wire = Some(TwoHosts::start_of(unirdma, Link { name, ipv6: false, mtu: MTU, args: &[] })?);
        }
        Ok(build)
    }

    fn measure(&self, f: &Figure) -> Result<f64> {
        let client = format!("{} 10.0.0.1", f.command);
        let done = match (&self.local, &self.wire) {
            (_, Some(two)) if f.wire => two.pair(f.command, &client)?,
            (Some(lab), _) => lab.pair(("a", f.command), ("b", &client), &[])?,
            _ => return Err(format!("no hosts for {}", f.name)),
        };
        let row = rows(f.command, done)?.pop().unwrap_or_default();
        row.get(f.unit.column()).copied().ok_or(format!("{} printed too few columns", f.command))
    }
}

pub(super) fn ab(rev: &str, runs: u32, only: Option<&str>, json: bool) -> Result<()> {
    packages::ensure(&[packages::RUN])?;
    let commit = git(&["rev-parse", "--verify", "--quiet", &format!("{rev}^{{commit}}")])
        .map_err(|_| format!("there is no commit {rev}"))?;
    let commit = git(&["rev-parse", "--short=12", &commit])?;
    let wanted = |f: &&Figure| only.is_none_or(|o| f.name.contains(o));
    let mut figures: Vec<&Figure> = FIGURES.iter().filter(wanted).collect();
    if figures.is_empty() {
        let names = FIGURES.map(|f| f.name).join("; ");
        return Err(format!("no figure's name contains {}; there are: {names}", only.unwrap_or_default()));
    }
    let mut skipped = Vec::new();
    if harness::uid() != 0 {
        skipped.extend(figures.iter().filter(|f| f.wire).map(|f| format!("{}: two hosts need root", f.name)));
        figures.retain(|f| !f.wire);
    }
    let (local, wire) = (figures.iter().any(|f| !f.wire), figures.iter().any(|f| f.wire));
    eprintln!("building {commit}");
    let old = build_commit(&commit)?;
    eprintln!("building this tree");
    harness::build()?;
    let new = harness::unirdma();
    let mut pairs: Vec<Vec<(f64, f64)>> = figures.iter().map(|_| Vec::new()).collect();
    for run in 1..=runs {
        let (a, b) = (Build::start(&old, "a", local, wire)?, Build::start(&new, "b", local, wire)?);
        for (f, pairs) in figures.iter().zip(&mut pairs) {
            eprintln!("run {run} of {runs}: {}", f.name);
            // The builds take turns in running first, because the second run may find the machine in another state.
            if run % 2 == 1 {
                let old = a.measure(f)?;
                pairs.push((old, b.measure(f)?));
            } else {
                let new = b.measure(f)?;
                pairs.push((a.measure(f)?, new));
            }
        }
    }
    let changed = if git(&["status", "--porcelain", "--untracked-files=no"])?.is_empty() { "" } else { ", changed" };
    let report = Report {
        topology: topology(),
        old: format!("{rev} ({commit})"),
        new: format!("this tree ({}{changed})", git(&["rev-parse", "--short=12", "HEAD"])?),
        runs,
        rows: figures.iter().zip(pairs).map(|(f, pairs)| Row::of(f, pairs)).collect(),
        skipped,
    };
    if json {
        return print_json(&report);
    }
    print(&report);
    Ok(())
}

fn print(r: &Report) {
    println!("topology: {}\nold: {}; new: {}; {} pairs\n", r.topology, r.old, r.new, r.runs);
    println!("{:30} {:>12} {:>12} {:6} {:>10}   {:17}", "", "old", "new", "", "new/old", "least and most");
    for row in &r.rows {
        println!(
            "{:30} {:>12.2} {:>12.2} {:6} {:>10.3}   {:.3} to {:.3}",
            row.figure, row.old, row.new, row.unit, row.ratio, row.least, row.most
        );
    }
    println!("\nold and new are medians; new/old is the median of the pairs, above 1 where the new build is better");
    for s in &r.skipped {
        println!("not measured: {s}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn above_one_is_better_whatever_the_unit() {
        let pairs = vec![(2.0, 1.0), (4.0, 1.0), (2.0, 2.0)];
        let latency = Row::of(&local("l", "", Unit::Us), pairs.clone());
        assert_eq!((latency.old, latency.new, latency.ratio), (2.0, 1.0, 2.0));
        assert_eq!((latency.least, latency.most), (1.0, 4.0));
        let bandwidth = Row::of(&local("b", "", Unit::MibS), pairs);
        assert_eq!((bandwidth.ratio, bandwidth.least, bandwidth.most), (0.5, 0.25, 1.0));
    }
}
