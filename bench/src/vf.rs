//! `cargo xtask bench vf`: a vRNIC that has a VF, relative to a VF without us, in a virtual machine whose network card
//! has VFs with the kernel's soft RNIC.

use std::collections::BTreeMap;
use std::time::Duration;

use harness::vm::{self, Task, Vfs};
use harness::{Result, figures, median, print_json, within};
use serde::Serialize;

const DIR: &str = "/tmp/bench";
/// Longest time until the virtual layer serves and VFs are set up. The machine is emulated.
const SOON: Duration = Duration::from_secs(120);
/// The VF that is measured without us. The vRNIC has another one.
const ALONE: usize = 3;
const BYTES: u64 = 64 << 10;
const WRITES: u64 = 1_000;
/// Columns of perftest: its typical latency in microseconds, and its average bandwidth in MiB/s.
const LATENCY: usize = 4;
const BANDWIDTH: usize = 3;
/// Ticks per second in /proc/stat.
const TICKS_PER_S: f64 = 100.0;

#[derive(Serialize)]
struct Report {
    topology: String,
    runs: u32,
    control: Vec<Figure>,
    data: Vec<Figure>,
}

#[derive(Serialize)]
struct Figure {
    name: String,
    unit: &'static str,
    /// On a VF without us.
    alone: f64,
    /// On a VF, as a vRNIC's.
    vf: f64,
    vf_over_alone: f64,
}

impl Figure {
    /// The medians of pairs of values.
    fn new(name: &str, unit: &'static str, pairs: &[(f64, f64)]) -> Figure {
        let (alone, vf) = (median(pairs.iter().map(|p| p.0)), median(pairs.iter().map(|p| p.1)));
        Figure { name: name.into(), unit, alone, vf, vf_over_alone: median(pairs.iter().map(|p| p.1 / p.0)) }
    }
}

/// Whose programs they are.
#[derive(Clone, Copy)]
enum Side {
    Alone,
    Vf,
}

struct Bench<'a> {
    vfs: &'a Vfs,
    /// The verbs device of the VF that is measured without us, and the index of its GID.
    alone: (String, u32),
    _host: Task,
}

impl<'a> Bench<'a> {
    /// Starts a virtual layer with a pool, and waits until its VFs can be given out.
    fn start(vfs: &'a Vfs) -> Result<Bench<'a>> {
        let pool = "pf,vfs=4,fabric=default,10.50.0.10/24,rxe --vf-linger 60s";
        let host = vfs.spawn(&format!("exec unirdma --dir {DIR} host --vf-pf {pool}"))?;
        let info = || -> Result<serde_json::Value> {
            let o = vfs.run(&format!("unirdma --dir {DIR} vf ls --json"))?;
            Ok(serde_json::from_str(&o.text).unwrap_or_default())
        };
        let are_ready = || {
            let info = info()?;
            let all = info["vfs"].as_array().map(Vec::as_slice).unwrap_or_default();
            Ok(host.has_ended() || all.len() > ALONE && all.iter().all(|vf| vf["kind"] == "ready"))
        };
        within(SOON, are_ready, "the VFs are not ready").map_err(|e| format!("{e}: {}", host.text()))?;
        if host.has_ended() {
            return Err(host.text());
        }
        vfs.must(&format!("unirdma --dir {DIR} vrnic add a --way vf --ip 10.0.0.1"))?;
        let verbs = info()?["vfs"][ALONE]["verbs"].as_str().ok_or("a VF has no verbs device")?.to_owned();
        let gid = vfs.gid(&verbs, ALONE as u32)?;
        Ok(Bench { vfs, alone: (verbs, gid), _host: host })
    }

    /// The command of a perftest program.
    fn perftest(&self, side: Side, program: &str) -> String {
        let (verbs, gid) = &self.alone;
        match side {
            Side::Alone => format!("timeout 300 {program} -d {verbs} -x {gid}"),
            // In the network of the machine, by which both ends tell each other their numbers.
            Side::Vf => format!("timeout 300 unirdma --dir {DIR} run --vrnic a --net host -- {program}"),
        }
    }

    /// Runs a server and a client on one device. Returns a column of the client's result, and the processor time of
    /// the whole machine, in seconds.
    fn pair(&self, side: Side, program: &str, column: usize) -> Result<(f64, f64)> {
        let command = self.perftest(side, program);
        let server = self.vfs.spawn(&command)?;
        let listens = || Ok(server.has_ended() || self.vfs.run("netstat -ltn")?.text.contains(":18515"));
        within(SOON, listens, "the server does not listen").map_err(|e| format!("{e}: {}", server.text()))?;
        let before = self.busy()?;
        let client = self.vfs.run(&format!("{command} 127.0.0.1"))?;
        let busy = self.busy()? - before;
        let row = crate::rows(&command, (server.finish(), client))?.pop().unwrap_or_default();
        row.get(column).map(|value| (*value, busy)).ok_or_else(|| format!("{command}: {row:?}"))
    }

    /// The processor time that the machine has used since its start, in seconds (proc_stat(5)).
    fn busy(&self) -> Result<f64> {
        let text = self.vfs.must("head -n 1 /proc/stat")?;
        let fields: Vec<f64> = text.split_whitespace().skip(1).filter_map(|f| f.parse().ok()).collect();
        let idle = fields.iter().skip(3).take(2).sum::<f64>();
        Ok((fields.iter().take(8).sum::<f64>() - idle) / TICKS_PER_S)
    }

    /// Times of the control path, in turn on both sides.
    fn control(&self, runs: u32) -> Result<Vec<Figure>> {
        let mut pairs: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
        for _ in 0..runs {
            let alone = figures(&self.vfs.must(&format!("vf-costs {} times", self.alone.0))?);
            let run = format!("unirdma --dir {DIR} run --vrnic a -- vf-costs unirdma0 times");
            let vf = figures(&self.vfs.must(&run)?);
            for (name, alone) in alone {
                let vf = vf.get(&name).copied().unwrap_or(f64::NAN);
                pairs.entry(name).or_default().push((alone, vf));
            }
        }
        Ok(pairs.iter().map(|(name, all)| Figure::new(name, "us", all)).collect())
    }

    /// Latency, bandwidth and processor time of WRITE, in turn on both sides.
    fn data(&self, runs: u32) -> Result<Vec<Figure>> {
        let gigabytes = (BYTES * WRITES) as f64 / 1e9;
        let (mut latency, mut bandwidth, mut busy) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..runs {
            let both = |program: &str, column| -> Result<[(f64, f64); 2]> {
                Ok([self.pair(Side::Alone, program, column)?, self.pair(Side::Vf, program, column)?])
            };
            let [alone, vf] = both("ib_write_lat -F -s 2 -n 1000", LATENCY)?;
            latency.push((alone.0, vf.0));
            let [alone, vf] = both(&format!("ib_write_bw -F -s {BYTES} -n {WRITES}"), BANDWIDTH)?;
            bandwidth.push((alone.0, vf.0));
            busy.push((alone.1 / gigabytes, vf.1 / gigabytes));
        }
        Ok(vec![
            Figure::new("WRITE, 2 B, one way", "us", &latency),
            Figure::new("WRITE, 64 KiB", "MiB/s", &bandwidth),
            Figure::new("processor time of WRITE, 64 KiB", "s/GB", &busy),
        ])
    }
}

pub(super) fn vf(json: bool, runs: u32) -> Result<()> {
    eprintln!("building");
    vm::prepare()?;
    eprintln!("starting the machine");
    let vfs = Vfs::start_without_vfs()?;
    let bench = Bench::start(&vfs)?;
    eprintln!("objects and registration");
    let control = bench.control(runs)?;
    eprintln!("data");
    let data = bench.data(runs)?;
    let topology = "one machine with 2 processors, which QEMU emulates (no KVM); its network card has 4 VFs with the \
                    kernel's soft RNIC on each. Server and client use one VF, and share the processors with the soft RNIC"
        .into();
    let report = Report { topology, runs, control, data };
    if json { print_json(&report) } else { report.print() }
}

impl Report {
    fn print(&self) -> Result<()> {
        println!("topology: {}", self.topology);
        println!("medians of {} runs in turn; the ratio is the median of those of each turn\n", self.runs);
        println!("{:40} {:>12} {:>12} {:>9}", "", "alone", "vf", "vf/alone");
        for f in self.control.iter().chain(&self.data) {
            let name = format!("{} [{}]", f.name, f.unit);
            println!("{name:40} {:>12.2} {:>12.2} {:>8.2}x", f.alone, f.vf, f.vf_over_alone);
        }
        Ok(())
    }
}
