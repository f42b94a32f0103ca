//! `cargo xtask bench memory`: the cost of the way of memory for programs. Each figure has a peer in the same run.

use std::collections::{BTreeMap, BTreeSet};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use harness::{Lab, Output, Result, Running, compile, compile_as, figures, median, own_user, packages, print_json};
use serde::Serialize;

use super::rows;

#[derive(Serialize)]
struct Report {
    topology: String,
    rows: Vec<Row>,
    /// Figures that were not measured, with the reasons.
    skipped: Vec<String>,
}

/// One figure.
#[derive(Serialize)]
struct Row {
    what: String,
    user: &'static str,
    value: f64,
    unit: &'static str,
    /// The peer's value, in the same unit; `None` for a goal that is a number.
    peer: Option<f64>,
    peer_is: &'static str,
    /// Value over peer.
    ratio: Option<f64>,
    goal: Option<String>,
    met: Option<bool>,
    /// How the program's memory was reached: the ways of its regions.
    way: String,
}

/// Goal of a figure, or of its ratio if it has a peer.
#[derive(Clone, Copy)]
enum Goal {
    AtLeast(f64),
    AtMost(f64),
}

impl Goal {
    fn met(self, x: f64) -> bool {
        match self {
            Goal::AtLeast(g) => x >= g,
            Goal::AtMost(g) => x <= g,
        }
    }

    fn text(self) -> String {
        match self {
            Goal::AtLeast(g) => format!(">= {g}"),
            Goal::AtMost(g) => format!("<= {g}"),
        }
    }
}

struct Bench<'a> {
    user: &'static str,
    lab: &'a Lab,
    rows: &'a mut Vec<Row>,
    skipped: &'a mut Vec<String>,
}

impl Bench<'_> {
    fn row(
        &mut self,
        what: &str,
        value: (f64, &'static str),
        peer: Option<(f64, &'static str)>,
        goal: Option<Goal>,
        way: &str,
    ) {
        let ratio = peer.map(|p| value.0 / p.0);
        self.rows.push(Row {
            what: what.into(),
            user: self.user,
            value: value.0,
            unit: value.1,
            peer: peer.map(|p| p.0),
            peer_is: peer.map_or("", |p| p.1),
            ratio,
            goal: goal.map(Goal::text),
            met: goal.map(|g| g.met(ratio.unwrap_or(value.0))),
            way: way.into(),
        });
    }

    /// Runs a part of the measurement. Its error is reported at the end.
    fn part(&mut self, name: &str, f: impl FnOnce(&mut Self) -> Result<()>) {
        eprintln!("{name} ({})", self.user);
        if let Err(e) = f(self) {
            self.skipped.push(format!("{name} ({}): {}", self.user, e.trim()));
        }
    }

    /// Runs perftest in two containers. Returns the rows of its client.
    fn perftest(&self, environment: &str, command: &str) -> Result<Vec<Vec<f64>>> {
        let server = format!("env {environment} {command}");
        rows(command, self.lab.pair(("a", &server), ("b", &format!("{server} 10.0.0.1")), &[])?)
    }

    /// The ways of the regions of perftest's client.
    fn perftest_way(&self, environment: &str, command: &str) -> Result<String> {
        let server = format!("env {environment} {command} -n 10");
        let client = format!("env UNIRDMA_TRACE=1 {environment} {command} -n 10 10.0.0.1");
        Ok(ways(&self.lab.pair(("a", &server), ("b", &client), &[])?.1))
    }

    /// Bandwidth between programs with four threads, relative to programs with one.
    fn threads(&mut self) -> Result<()> {
        const COMMAND: &str = "ib_write_bw -s 1048576 -n 3000";
        let library = compile_as(self.lab, "idle-threads", "idle-threads.so", &["-shared", "-fPIC", "-pthread"])?;
        let four = format!("IDLE_THREADS=3 LD_PRELOAD={library}");
        let (mut with, mut without) = (Vec::new(), Vec::new());
        for _ in 0..5 {
            without.push(self.perftest("", COMMAND)?[0][3]);
            with.push(self.perftest(&four, COMMAND)?[0][3]);
        }
        let way = self.perftest_way(&four, "ib_write_bw -s 1048576")?;
        let one = (median(without), "one thread");
        self.row("WRITE 1 MiB, four threads", (median(with), "MiB/s"), Some(one), Some(Goal::AtLeast(0.9)), &way);
        Ok(())
    }

    /// Measures the way *copy*, where it is the only one.
    fn copy(&mut self) -> Result<()> {
        let (mut sends, mut memcpys, mut rates) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..3 {
            memcpys.push(super::local::memcpy(1 << 20));
            sends.push(self.perftest("UNIRDMA_MR=copy", "ib_send_bw -s 1048576 -n 1000")?[0][3]);
            rates.push(self.perftest("UNIRDMA_MR=copy", "ib_send_bw -s 64 -n 100000")?[0][4]);
        }
        let way = self.perftest_way("UNIRDMA_MR=copy", "ib_send_bw -s 1048576")?;
        let peer = (median(memcpys), "one memcpy");
        self.row("copy: SEND 1 MiB", (median(sends), "MiB/s"), Some(peer), Some(Goal::AtLeast(0.4)), &way);
        self.row("copy: SEND 64 B", (median(rates), "M/s"), None, Some(Goal::AtLeast(1.0)), &way);
        Ok(())
    }

    /// Runs `memory-bench`. Returns its figures by name, and the ways of its regions.
    fn own(&self, exe: &str, what: &str) -> Result<(BTreeMap<String, f64>, String)> {
        let o = self.lab.spawn("a", &[], &format!("timeout 80 {exe} {what}"))?.finish();
        if !o.ok() {
            return Err(format!("{what}: {:?} {}", o.code, o.text));
        }
        let traced = self.lab.spawn("a", &[], &format!("env UNIRDMA_TRACE=1 {exe} {what} quick"))?.finish();
        Ok((figures(&o.text), ways(&traced)))
    }

    fn registrations(&mut self) -> Result<()> {
        let exe = compile(self.lab, "memory-bench", &["-libverbs", "-pthread"])?;
        let (of, way) = self.own(&exe, "registrations")?;
        let get = |k: &str| of.get(k).copied().ok_or(format!("no {k}"));
        for (size, name, goal) in [(4096, "4 KiB", 10.0), (1 << 20, "1 MiB", 60.0)] {
            for buffer in ["same", "fresh"] {
                let at = |call: &str| get(&format!("{buffer}-{size}-{call}"));
                let (reg, dereg) = (at("reg")?, at("dereg")?);
                self.row(
                    &format!("ibv_reg_mr, {name}, {buffer} buffer"),
                    (reg, "us"),
                    None,
                    Some(Goal::AtMost(goal)),
                    &way,
                );
                let both = format!("  with ibv_dereg_mr, {name}, {buffer}");
                self.row(&both, (reg + dereg, "us"), None, None, &way);
            }
        }
        let (of, way) = self.own(&exe, "large")?;
        let get = |k: &str| of.get(k).map(|v| v / 1e3).ok_or(format!("no {k}"));
        let locked = get("large-locked")? > 0.0;
        let peer_is = if locked { "mmap, POPULATE, mlock, memcpy" } else { "mmap, POPULATE, memcpy (no mlock)" };
        let peer = (get("large-pin")?, peer_is);
        self.row("register 1 GiB", (get("large-reg")?, "ms"), Some(peer), Some(Goal::AtMost(1.25)), &way);
        self.row(
            "  again, right after it ended",
            (get("large-again")?, "ms"),
            Some(peer),
            Some(Goal::AtMost(0.01)),
            &way,
        );
        let (of, way) = self.own(&exe, "fork")?;
        let fork = of.get("fork").map(|v| v / 1e3).ok_or("no fork")?;
        self.row("fork, 4 GiB registered, a page used", (fork, "ms"), None, Some(Goal::AtMost(5.0)), &way);
        Ok(())
    }

    /// OpenMPI over UCX between two containers, relative to OpenMPI's own shared memory.
    fn mpi(&mut self) -> Result<()> {
        let agent = self.lab.dir.join("agent");
        // Two hosts have separate temporary directories, where mpirun's agents keep their per-host state.
        let script = format!(
            "#!/bin/sh\nhost=$1; shift\nexport TMPDIR={0}/tmp-$host; mkdir -p \"$TMPDIR\"\n\
             exec {1} --dir {0}/run run --vrnic \"$host\" --net host --bind {0} -- sh -c \"$*\"\n",
            self.lab.dir.display(),
            self.lab.exe().display()
        );
        std::fs::write(&agent, script).map_err(|e| e.to_string())?;
        Command::new("chmod").arg("+x").arg(&agent).status().map_err(|e| e.to_string())?;
        let netpipe = "NPopenmpi -l 1048576 -u 1048576 -p 0 -n 1000";
        let alone = format!("mpirun -np 2 --oversubscribe --mca pml ob1 --mca btl self,vader {netpipe}");
        let ucx = format!(
            "mpirun -np 2 -H a:1,b:1 --mca plm_rsh_agent {} --mca pml ucx --mca osc ^ucx --mca oob_tcp_if_include lo \
             -x UCX_TLS=rc,self -x UCX_NET_DEVICES=unirdma0:1 {netpipe}",
            agent.display()
        );
        let (mut own, mut over) = (Vec::new(), Vec::new());
        let mut way = String::new();
        for _ in 0..3 {
            own.push(gigabits(&self.mpirun(&alone, None)?)?);
            over.push(gigabits(&self.mpirun(&ucx, Some(&mut way))?)?);
        }
        let peer = (median(own), "OpenMPI's shared memory");
        self.row("OpenMPI over UCX, 1 MiB", (median(over), "Gbit/s"), Some(peer), Some(Goal::AtLeast(1.5)), &way);
        Ok(())
    }

    /// Runs mpirun. Meanwhile reads the way of the memory of vRNIC a.
    fn mpirun(&self, command: &str, way: Option<&mut String>) -> Result<Output> {
        let mut c = Command::new("timeout");
        c.args(["60", "sh", "-c", &format!("exec {command}")]).stdin(Stdio::null()).current_dir(&self.lab.dir);
        c.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
        let mut running = Running::start(c, &self.lab.dir.join("mpirun.log"))?;
        let start = Instant::now();
        let mut seen = BTreeSet::new();
        while way.is_some() && !running.has_ended() && start.elapsed() < Duration::from_secs(60) {
            let o = self.lab.unirdma(&["vrnic", "show", "a", "--json"]);
            let bytes = |key: &str| json_number(&o.text, key).filter(|&n| n >= 1 << 20);
            seen.extend(bytes("bytes_mapped").map(|_| "mapped"));
            seen.extend(bytes("bytes_copied").map(|_| "copied"));
            std::thread::sleep(Duration::from_millis(200));
        }
        if let Some(w) = way {
            *w = seen.into_iter().collect::<Vec<_>>().join(", ");
        }
        let o = running.finish();
        if o.ok() { Ok(o) } else { Err(format!("{command}: {:?} {}", o.code, o.text)) }
    }
}

/// The ways in a trace, and the number of regions of each.
fn ways(o: &Output) -> String {
    let mut count: BTreeMap<String, u32> = BTreeMap::new();
    for l in o.text.lines().filter(|l| l.contains("ibv_reg_mr")) {
        // "way Share: the fastest", or without the reason.
        if let Some((_, w)) = l.split_once(", way ") {
            *count.entry(w.split(':').next().unwrap_or(w).trim().to_lowercase()).or_default() += 1;
        }
    }
    count.iter().map(|(w, n)| format!("{w} ({n})")).collect::<Vec<_>>().join(", ")
}

fn json_number(text: &str, key: &str) -> Option<u64> {
    let rest = text.split_once(&format!("\"{key}\":"))?.1.trim_start();
    rest[..rest.find(|c: char| !c.is_ascii_digit())?].parse().ok()
}

/// NetPIPE's bandwidth.
fn gigabits(o: &Output) -> Result<f64> {
    let line = o.text.lines().find_map(|l| l.split_once("-->"));
    let mbps = line.and_then(|l| l.1.split_whitespace().next()?.parse::<f64>().ok());
    mbps.map(|m| m / 1e3).ok_or(format!("NetPIPE: {}", o.text))
}

pub(super) fn memory(json: bool) -> Result<()> {
    packages::ensure(&[packages::RUN])?;
    eprintln!("building");
    harness::build()?;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let topology = format!("{cores} cores; two programs, each in a container, and one virtual layer");
    let (mut table, mut skipped) = (Vec::new(), Vec::new());
    let mut users = Vec::new();
    if harness::uid() == 0 {
        users.push(("root", Lab::start(None)?));
    }
    users.push(("ordinary user", Lab::start(Some(own_user()))?));
    for (i, (user, lab)) in users.iter().enumerate() {
        lab.vrnic("a", &["--ip", "10.0.0.1"])?;
        lab.vrnic("b", &["--ip", "10.0.0.2"])?;
        let mut b = Bench { user, lab, rows: &mut table, skipped: &mut skipped };
        b.part("four threads", Bench::threads);
        b.part("registration and fork", Bench::registrations);
        if i == 0 {
            b.part("the way copy", Bench::copy);
            if packages::ensure(&[packages::MPI]).is_ok() {
                b.part("OpenMPI over UCX", Bench::mpi);
            } else {
                b.skipped.push("OpenMPI over UCX: openmpi-bin and netpipe-openmpi are not installed".into());
            }
        }
    }
    let report = Report { topology, rows: table, skipped };
    if json {
        return print_json(&report);
    }
    print(&report);
    Ok(())
}

fn print(r: &Report) {
    println!("topology: {}\n", r.topology);
    println!(
        "{:38} {:13} {:>10} {:6} {:>10} {:>8} {:>8} {:5} {:16} peer",
        "", "user", "value", "", "peer", "ratio", "goal", "", "way"
    );
    for row in &r.rows {
        let or_none = |x: Option<f64>, digits: usize| x.map_or_else(|| "-".into(), |x| format!("{x:.digits$}"));
        println!(
            "{:38} {:13} {:>10.2} {:6} {:>10} {:>8} {:>8} {:5} {:16} {}",
            row.what,
            row.user,
            row.value,
            row.unit,
            or_none(row.peer, 2),
            or_none(row.ratio, 3),
            row.goal.as_deref().unwrap_or("-"),
            row.met.map_or("", |met| if met { "met" } else { "MISS" }),
            row.way,
            row.peer_is
        );
    }
    for s in &r.skipped {
        println!("\nnot measured: {s}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_of_other_programs_is_read() {
        let out = |text: &str| Output { code: Some(0), text: text.into() };
        let o = out("Now starting\n  0: 1048576 bytes    999 times -->  60199.32 Mbps in     132.89 usec\n");
        assert!((gigabits(&o).expect("a figure") - 60.19932).abs() < 1e-9);
        assert!(gigabits(&out("mpirun: error\n")).is_err());
        assert_eq!(
            ways(&out(
                "ibv_reg_mr(0x1, 4096, 0x1) = key 0x5, way Copy\nibv_reg_mr(..) = key 0x6, way Copy: threads\nx\n"
            )),
            "copy (2)"
        );
        assert_eq!(json_number("{\n \"bytes_mapped\": 1234,\n", "bytes_mapped"), Some(1234));
        assert_eq!(json_number("{}", "bytes_mapped"), None);
    }
}
