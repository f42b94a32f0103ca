//! `cargo xtask bench isolation`: two programs that write to each other, alone, beside an honest neighbour, and beside each
//! attack. The programs are the test kit's example `attacks`, which says what each of them does.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde::Serialize;

use super::{figures, median, print_json, topology};
use crate::lab::{self, Lab, Running};
use crate::{Result, packages};

/// A figure may be so many times worse than beside the honest neighbour.
const LIMIT: f64 = 1.5;
/// The victim measures its latency for so long, and its bandwidth for so long.
const SECONDS: &str = "1";
/// An attack ends by itself after this, if it is not ended before.
const ATTACK_SECONDS: &str = "120";
/// How long an attack may prepare itself.
const PREPARATION: Duration = Duration::from_secs(60);
/// How long an attack goes on before the victim measures.
const BEGIN: Duration = Duration::from_millis(300);

/// Who works beside the victim.
struct Neighbour {
    name: &'static str,
    /// The program's name and its arguments after time and socket; nothing if there is no neighbour.
    program: Option<(&'static str, &'static str)>,
    /// The administrator captures the neighbour's packets meanwhile.
    captured: bool,
}

impl Neighbour {
    const fn of(name: &'static str, program: &'static str, argument: &'static str) -> Neighbour {
        Neighbour { name, program: Some((program, argument)), captured: false }
    }
}

const ALONE: Neighbour = Neighbour { name: "alone", program: None, captured: false };
const HONEST: Neighbour = Neighbour::of("honest neighbour, 1 MiB WRITEs", "honest", "");
const ATTACKS: [Neighbour; 9] = [
    Neighbour::of("rnr 1024", "rnr", "1024"),
    Neighbour::of("rnr 16384", "rnr", "16384"),
    Neighbour::of("bells", "bells", ""),
    Neighbour::of("flood", "flood", ""),
    Neighbour::of("slowmm fuse", "slowmm", "fuse"),
    Neighbour::of("slowmm fork", "slowmm", "fork"),
    Neighbour::of("regmr", "regmr", ""),
    Neighbour { captured: true, ..Neighbour::of("capw", "capw", "") },
    Neighbour::of("pages", "pages", ""),
];

#[derive(Serialize)]
struct Report {
    topology: String,
    runs: u32,
    /// How many times worse than beside the honest neighbour a figure may be.
    limit: f64,
    rows: Vec<Row>,
}

#[derive(Serialize)]
struct Row {
    neighbour: &'static str,
    /// Medians over the runs; nothing if there is no result.
    figures: Option<Figures>,
    /// Medians of how many times worse each figure is than beside the honest neighbour in the same run.
    times_worse: Option<Worse>,
    /// An attack that is beyond the limit.
    beyond: bool,
    /// Why there is no result: the victim got no answer, or the attack cannot be done here.
    note: Option<String>,
}

/// What the victim measured.
#[derive(Clone, Copy, Serialize)]
struct Figures {
    /// From posting a WRITE of 8 B to its completion.
    p50_us: f64,
    p99_us: f64,
    worst_us: f64,
    /// WRITEs of 64 KiB.
    mib_s: f64,
}

#[derive(Clone, Copy, Serialize)]
struct Worse {
    p50: f64,
    p99: f64,
    bandwidth: f64,
}

/// How a measurement ended.
enum Outcome {
    Measured(Figures),
    /// The victim's programs, or the virtual layer, did not do their work.
    Failed(String),
    /// The attack cannot be done here.
    Skipped(String),
}

impl Row {
    fn of(neighbour: &Neighbour, is_attack: bool, outcomes: &[Outcome], honest: &[Outcome]) -> Row {
        let note = outcomes.iter().find_map(|o| match o {
            Outcome::Measured(_) => None,
            Outcome::Failed(why) | Outcome::Skipped(why) => Some(why.clone()),
        });
        let failed = outcomes.iter().any(|o| matches!(o, Outcome::Failed(_)));
        let mut row = Row {
            neighbour: neighbour.name,
            figures: None,
            times_worse: None,
            beyond: is_attack && failed,
            note: note.clone(),
        };
        if note.is_some() {
            return row;
        }
        let measured = |o: &Outcome| if let Outcome::Measured(f) = o { Some(*f) } else { None };
        let all: Vec<Figures> = outcomes.iter().filter_map(measured).collect();
        let of = |f: fn(&Figures) -> f64| median(all.iter().map(f));
        row.figures = Some(Figures {
            p50_us: of(|f| f.p50_us),
            p99_us: of(|f| f.p99_us),
            worst_us: of(|f| f.worst_us),
            mib_s: of(|f| f.mib_s),
        });
        let pairs: Vec<(Figures, Figures)> =
            outcomes.iter().zip(honest).filter_map(|(a, h)| Some((measured(a)?, measured(h)?))).collect();
        if !pairs.is_empty() {
            let of = |f: fn(&(Figures, Figures)) -> f64| median(pairs.iter().map(f));
            let worse = Worse {
                p50: of(|(a, h)| a.p50_us / h.p50_us),
                p99: of(|(a, h)| a.p99_us / h.p99_us),
                bandwidth: of(|(a, h)| h.mib_s / a.mib_s),
            };
            row.beyond = is_attack && [worse.p50, worse.p99, worse.bandwidth].iter().any(|&w| w > LIMIT);
            row.times_worse = Some(worse);
        }
        row
    }
}

/// Waits until a program says that it is ready, or why it cannot be.
fn wait_ready(program: &mut Running) -> Result<Option<String>> {
    let start = Instant::now();
    while start.elapsed() < PREPARATION {
        let ended = program.has_ended();
        let text = program.text();
        if let Some(why) = text.lines().find_map(|l| l.strip_prefix("skip: ")) {
            return Ok(Some(why.into()));
        }
        if text.lines().any(|l| l == "ready") {
            return Ok(None);
        }
        if ended {
            return Err(format!("ended: {text}"));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Err(format!("was not ready after {} s", PREPARATION.as_secs()))
}

/// One measurement beside `neighbour`, on a virtual layer of its own.
fn measure(programs: &Path, neighbour: &Neighbour) -> Result<Outcome> {
    let lab = Lab::start(None)?;
    for (name, ip) in [("a", "10.0.0.1"), ("b", "10.0.0.2"), ("c", "10.0.0.3"), ("d", "10.0.0.4")] {
        lab.vrnic(name, &["--ip", ip])?;
    }
    let program = |name: &str, seconds: &str| {
        let mut c = Command::new(programs);
        c.args([name, seconds]);
        c
    };
    let mut victim = program("victim", SECONDS);
    victim.args([lab.socket("a"), lab.socket("b")]).stdin(Stdio::piped());
    let mut victim = Running::start(victim, &lab.dir.join("victim.log"))?;
    wait_ready(&mut victim).map_err(|e| format!("the victim {e}"))?;

    // Dropped, and so killed, before the victim and the virtual layer, which may wait for it.
    let mut beside = None;
    let mut capture = None;
    if let Some((name, argument)) = neighbour.program {
        let mut c = program(name, ATTACK_SECONDS);
        c.arg(lab.socket("c")).stdin(Stdio::null());
        match (name, argument) {
            ("honest", _) => c.arg(lab.socket("d")),
            (_, "") => &mut c,
            (_, argument) => c.arg(argument),
        };
        let running = beside.insert(Running::start(c, &lab.dir.join("neighbour.log"))?);
        if let Some(why) = wait_ready(running).map_err(|e| format!("{} {e}", neighbour.name))? {
            return Ok(Outcome::Skipped(why));
        }
        if neighbour.captured {
            capture = Some(lab.start_unirdma(&["capture", "--vrnic", "c", "-w", "/dev/null"])?);
        }
        std::thread::sleep(BEGIN);
    }
    let go = victim.stdin().ok_or("the victim has no input")?.write_all(b"go\n");
    go.map_err(|e| format!("the victim: {e}"))?;
    let done = victim.finish();
    let ended = beside.as_mut().is_some_and(Running::has_ended);
    let neighbour_says = beside.as_ref().map(Running::text).unwrap_or_default();
    drop((capture, beside));
    if !lab.unirdma(&["status"]).ok() {
        let log = std::fs::read_to_string(lab.dir.join("host.log")).unwrap_or_default();
        return Ok(Outcome::Failed(format!("the virtual layer ended: {}", log.lines().last().unwrap_or_default())));
    }
    if ended {
        return Err(format!("{} ended too soon: {neighbour_says}", neighbour.name));
    }
    if !done.ok() {
        return Ok(Outcome::Failed(done.text.lines().last().unwrap_or("the victim was killed").into()));
    }
    let of = figures(&done.text);
    let get = |k: &str| of.get(k).copied().ok_or(format!("the victim printed no {k}: {}", done.text));
    Ok(Outcome::Measured(Figures {
        p50_us: get("p50_us")?,
        p99_us: get("p99_us")?,
        worst_us: get("worst_us")?,
        mib_s: get("mib_s")?,
    }))
}

pub(crate) fn isolation(json: bool, only: Option<&str>, runs: u32) -> Result<()> {
    packages::ensure(&[packages::RUN])?;
    eprintln!("building");
    lab::build()?;
    let programs = lab::build_example("attacks")?;
    let wanted = |n: &&Neighbour| only.is_none_or(|o| n.name.contains(o));
    let attacks: Vec<&Neighbour> = ATTACKS.iter().filter(wanted).collect();
    if attacks.is_empty() {
        let names = ATTACKS.map(|a| a.name).join(", ");
        return Err(format!("no attack's name contains {}; there are: {names}", only.unwrap_or_default()));
    }
    let neighbours: Vec<&Neighbour> = [&ALONE, &HONEST].into_iter().chain(attacks).collect();
    let mut outcomes: Vec<Vec<Outcome>> = neighbours.iter().map(|_| Vec::new()).collect();
    for run in 1..=runs {
        for (neighbour, outcomes) in neighbours.iter().zip(&mut outcomes) {
            // What was not measured once is not measured again.
            if outcomes.iter().all(|o| matches!(o, Outcome::Measured(_))) {
                eprintln!("run {run} of {runs}: {}", neighbour.name);
                outcomes.push(measure(&programs, neighbour)?);
            }
        }
    }
    let row = |(i, n): (usize, &&Neighbour)| Row::of(n, i >= 2, &outcomes[i], &outcomes[1]);
    let rows = neighbours.iter().enumerate().map(row).collect();
    let report = Report { topology: topology(), runs, limit: LIMIT, rows };
    if json {
        print_json(&report)?;
    } else {
        print(&report);
    }
    match report.rows.iter().filter(|r| r.beyond).count() {
        0 => Ok(()),
        n => Err(format!("{n} attacks slow their neighbours down more than {LIMIT} times as much as honest work")),
    }
}

fn print(r: &Report) {
    println!("topology: {}; beside them the neighbour\nmedians of {} runs\n", r.topology, r.runs);
    println!("{:32} {:^33} {:>12}   {:^26}", "", "WRITE of 8 B [us]", "64 KiB", "times worse than honest");
    println!(
        "{:32} {:>10} {:>10} {:>11} {:>12}   {:>8} {:>8} {:>8}",
        "neighbour", "p50", "p99", "worst", "[MiB/s]", "p50", "p99", "64 KiB"
    );
    for row in &r.rows {
        print!("{:32}", row.neighbour);
        match (&row.figures, &row.times_worse) {
            (Some(f), Some(w)) => print!(
                " {:>10.1} {:>10.1} {:>11.1} {:>12.0}   {:>8.2} {:>8.2} {:>8.2}",
                f.p50_us, f.p99_us, f.worst_us, f.mib_s, w.p50, w.p99, w.bandwidth
            ),
            (Some(f), None) => print!(" {:>10.1} {:>10.1} {:>11.1} {:>12.0}", f.p50_us, f.p99_us, f.worst_us, f.mib_s),
            _ => print!(" {}", row.note.as_deref().unwrap_or("no result")),
        }
        println!("{}", if row.beyond { "  BEYOND" } else { "" });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(p50_us: f64, p99_us: f64, mib_s: f64) -> Outcome {
        Outcome::Measured(Figures { p50_us, p99_us, worst_us: p99_us, mib_s })
    }

    #[test]
    fn an_attack_is_judged_by_the_median_of_its_pairs() {
        let honest = [measured(2.0, 10.0, 1000.0), measured(4.0, 10.0, 1000.0), measured(2.0, 10.0, 1000.0)];
        let row = |is_attack, outcomes: &[Outcome]| Row::of(&ATTACKS[0], is_attack, outcomes, &honest);
        // Twice as slow in one run of three.
        let once = [measured(4.0, 10.0, 1000.0), measured(4.0, 10.0, 1000.0), measured(2.0, 10.0, 1000.0)];
        assert!(!row(true, &once).beyond);
        let slow = [measured(2.0, 10.0, 600.0), measured(4.0, 10.0, 600.0), measured(2.0, 10.0, 1000.0)];
        let slow = row(true, &slow);
        assert!(slow.beyond && slow.times_worse.is_some_and(|w| w.bandwidth > 1.6 && w.p50 < 1.1));
        assert!(!row(false, &[measured(9.0, 99.0, 1.0)]).beyond, "no attack");
        let hung = row(true, &[measured(2.0, 10.0, 1000.0), Outcome::Failed("no completion".into())]);
        assert!(hung.beyond && hung.figures.is_none());
        assert!(!row(true, &[Outcome::Skipped("no /dev/fuse".into())]).beyond);
    }
}
