//! `cargo xtask bench workers`: the cost of a worker for each group, the time to replace a worker that died, and how
//! many busy groups share the cores.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use harness::{Lab, Result, Running, median, packages, print_json};
use serde::Serialize;

use super::cpu_of;

/// Time for which bytes are counted, and for which programs run before that.
const TIME: Duration = Duration::from_secs(5);
const BEFORE: Duration = Duration::from_secs(2);
/// Number of times that a worker is killed.
const KILLS: u32 = 20;
/// Time for which idle workers are observed.
const IDLE: Duration = Duration::from_secs(5);

#[derive(Serialize)]
struct Report {
    cores: usize,
    groups: usize,
    busy: usize,
    rows: Vec<Row>,
}

#[derive(Serialize)]
struct Row {
    what: &'static str,
    value: f64,
    unit: &'static str,
    goal: Option<Goal>,
    met: bool,
}

#[derive(Clone, Copy, Serialize)]
enum Goal {
    AtLeast(f64),
    AtMost(f64),
}

fn row(what: &'static str, value: f64, unit: &'static str, goal: Option<Goal>) -> Row {
    let met = match goal {
        None => true,
        Some(Goal::AtLeast(g)) => value >= g,
        Some(Goal::AtMost(g)) => value <= g,
    };
    Row { what, value, unit, goal, met }
}

fn ms(d: Duration) -> f64 {
    d.as_secs_f64() * 1e3
}

/// Creates groups of two vRNICs. Returns the milliseconds for each group.
fn make(lab: &Lab, groups: usize) -> Result<Vec<f64>> {
    let mut took = Vec::new();
    for i in 0..groups {
        let group = format!("g{i}");
        let began = Instant::now();
        let o = lab.unirdma(&["group", "add", &group]);
        if !o.ok() {
            return Err(o.text);
        }
        took.push(ms(began.elapsed()));
        lab.vrnic(&format!("a{i}"), &["--ip", "10.0.0.1", "--group", &group])?;
        lab.vrnic(&format!("b{i}"), &["--ip", "10.0.0.2", "--group", &group])?;
    }
    Ok(took)
}

/// Number of bytes that each vRNIC has sent.
fn sent(lab: &Lab) -> Result<BTreeMap<String, f64>> {
    let o = lab.unirdma(&["vrnic", "ls", "--json"]);
    let all: serde_json::Value = serde_json::from_str(&o.text).map_err(|e| format!("{e}: {}", o.text))?;
    let one = |v: &serde_json::Value| Some((v["name"].as_str()?.to_string(), v["counters"]["sent_bytes"].as_f64()?));
    Ok(all.as_array().into_iter().flatten().filter_map(one).collect())
}

/// MB/s of a pair in each of the first groups, all at once.
fn rates(lab: &Lab, pairs: usize) -> Result<Vec<f64>> {
    let command = "ib_write_bw -D 1000 -s 65536";
    let start = |name: char, more: &str| -> Result<Vec<Running>> {
        (0..pairs).map(|i| lab.spawn(&format!("{name}{i}"), &[], &format!("{command} {more}"))).collect()
    };
    let mut servers = start('a', "")?;
    for s in &mut servers {
        if !s.wait_listening(|| false) {
            return Err(format!("a server does not listen: {}", s.text()));
        }
    }
    let mut clients = start('b', "10.0.0.1")?;
    let names: Vec<String> = (0..pairs).map(|i| format!("b{i}")).collect();
    let began = Instant::now();
    // Waits until each pair transfers data.
    loop {
        let now = sent(lab)?;
        if names.iter().all(|n| now.get(n).is_some_and(|&b| b > 0.0)) {
            break;
        }
        for c in &mut clients {
            if c.has_ended() {
                return Err(format!("a client has ended: {}", c.text()));
            }
        }
        if began.elapsed() > Duration::from_secs(60) {
            return Err("not all programs have begun in 60 s".into());
        }
        std::thread::sleep(Duration::from_millis(200));
    }
    std::thread::sleep(BEFORE);
    let (before, began) = (sent(lab)?, Instant::now());
    std::thread::sleep(TIME);
    let (after, took) = (sent(lab)?, began.elapsed().as_secs_f64());
    let rate = |n: &String| (after.get(n).unwrap_or(&0.0) - before.get(n).unwrap_or(&0.0)) / took / 1e6;
    Ok(names.iter().map(rate).collect())
}

/// Milliseconds from the death of a group's worker until its successor answers for a vRNIC.
fn restarts(lab: &Lab, group: &str, vrnic: &str) -> Result<Vec<f64>> {
    (0..KILLS)
        .map(|_| {
            // A worker that dies soon after its start is restarted with a delay.
            std::thread::sleep(Duration::from_millis(200));
            let (pid, _) = lab.worker(group)?;
            let began = Instant::now();
            // SAFETY: a process that this lab's virtual layer has started; no memory is passed.
            unsafe { libc::kill(pid, libc::SIGKILL) };
            while !lab.unirdma(&["vrnic", "show", vrnic]).ok() {
                if began.elapsed() > Duration::from_secs(10) {
                    return Err(format!("the worker of {group} does not come back"));
                }
            }
            Ok(ms(began.elapsed()))
        })
        .collect()
}

/// Private memory of a process in KiB, from `/proc/PID/smaps_rollup`.
fn memory(pid: i32) -> Option<f64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?;
    let field =
        |name: &str| text.lines().find_map(|l| l.strip_prefix(name)?.split_whitespace().next()?.parse::<f64>().ok());
    Some(field("Private_Dirty:")? + field("Private_Clean:")?)
}

pub(super) fn workers(json: bool, groups: usize, busy: usize) -> Result<()> {
    packages::ensure(&[packages::RUN])?;
    eprintln!("building");
    harness::build()?;
    let busy = busy.min(groups);
    let lab = Lab::start(None)?;
    eprintln!("{groups} groups");
    let took = make(&lab, groups)?;
    let mut rows = vec![row("a group and its worker are made: median", median(took), "ms", Some(Goal::AtMost(20.0)))];
    let pids: Vec<i32> = lab.workers()?.iter().map(|w| w.1).filter(|&p| p > 0).collect();
    let kib: Vec<f64> = pids.iter().filter_map(|&p| memory(p)).collect();
    let mean = kib.iter().sum::<f64>() / kib.len() as f64 / 1024.0;
    rows.push(row("memory of an idle worker: mean", mean, "MiB", Some(Goal::AtMost(5.0))));
    let before = cpu_of(&pids);
    std::thread::sleep(IDLE);
    let cpu = (cpu_of(&pids) - before) / IDLE.as_secs_f64() / pids.len() as f64 * 100.0;
    rows.push(row("CPU of an idle worker: mean", cpu, "%", Some(Goal::AtMost(0.01))));
    eprintln!("a worker that is killed {KILLS} times");
    let back = restarts(&lab, "g0", "a0")?;
    let worst = back.iter().copied().fold(0.0, f64::max);
    rows.push(row("killed worker: back with its vRNICs, median", median(back), "ms", Some(Goal::AtMost(100.0))));
    rows.push(row("  worst", worst, "ms", None));
    if busy > 0 {
        eprintln!("one busy pair");
        let one = rates(&lab, 1)?[0];
        eprintln!("{busy} busy pairs");
        let all = rates(&lab, busy)?;
        let sum: f64 = all.iter().sum();
        let slowest = all.iter().copied().fold(f64::MAX, f64::min);
        rows.push(row("64 KiB WRITEs, one pair alone", one, "MB/s", None));
        rows.push(row("all busy pairs together, over one alone", sum / one, "", Some(Goal::AtLeast(0.8))));
        rows.push(row("the slowest pair, over the mean", slowest / (sum / busy as f64), "", Some(Goal::AtLeast(0.5))));
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let report = Report { cores, groups, busy, rows };
    if json {
        return print_json(&report);
    }
    println!(
        "{cores} cores; {groups} groups of two vRNICs, {busy} of them with a busy pair of programs in containers\n"
    );
    for r in &report.rows {
        let goal = match r.goal {
            None => String::new(),
            Some(Goal::AtLeast(g)) => format!("at least {g}"),
            Some(Goal::AtMost(g)) => format!("at most {g}"),
        };
        let missed = if r.met { "" } else { "  MISSED" };
        println!("{:46} {:>10.3} {:5} {goal}{missed}", r.what, r.value, r.unit);
    }
    Ok(())
}
