//! `cargo xtask bench isolation`: two programs that write to each other, alone, beside an honest neighbour, and during
//! each attack that tries to take time from others, in the group of the attacker. Then one program under limits that a
//! control centre has set, and how exactly they hold.

use std::path::Path;

use attack::fixture::{Figures, Place, Scene, VICTIMS, Worse};
use attack::list::{Attack, COMPUTING, HONEST, Program, Way};
use attack::{LIMIT_SAME as LIMIT, Limits, judges_time, time_note};
use harness::{Result, fleet::Fleet, packages, pollers, print_json};
use serde::Serialize;

use super::rows;

/// The program that runs at the same time as the victim.
struct Neighbour {
    name: &'static str,
    /// `None` if there is no neighbour.
    program: Option<Program>,
}

const ALONE: Neighbour = Neighbour { name: "alone", program: None };
const BUSY: Neighbour = Neighbour { name: "honest neighbour, 1 MiB WRITEs", program: Some(HONEST) };
const COMPUTES: Neighbour = Neighbour { name: "a program that only computes", program: Some(COMPUTING) };
/// Neighbours that are not attacks.
const OTHERS: [Neighbour; 3] = [ALONE, BUSY, COMPUTES];

#[derive(Serialize)]
struct Report {
    topology: String,
    runs: u32,
    /// Limit: how many times worse than beside the honest neighbour a figure may be.
    limit: f64,
    /// Figures beyond this limit make the exit code 1. False on a machine with few cores, where limits are coarse.
    judges_time: bool,
    rows: Vec<Row>,
    limits: Vec<Limited>,
}

/// Largest deviation from a limit of the control centre, percent.
const EXACT: f64 = 3.0;

/// A limit that the control centre sets, and a program of perftest that is subject to it.
struct CentreLimit {
    name: &'static str,
    /// The limit as `unirdma apply` takes it.
    share: &'static str,
    command: &'static str,
    /// The measured value in the unit of the limit, from perftest's columns.
    measured: fn(&[f64]) -> Option<f64>,
    expected: f64,
    unit: &'static str,
}

const LIMITS: [CentreLimit; 2] = [
    CentreLimit {
        name: "limit of the centre: 100 Mbit/s",
        share: "rate = 100_000_000",
        command: "ib_write_bw -F -s 65536 -D 5",
        measured: |r| r.get(3).map(|mib| mib * f64::from(1 << 20) * 8.0 / 1e6),
        expected: 100.0,
        unit: "Mbit/s",
    },
    CentreLimit {
        name: "limit of the centre: 10,000 operations/s",
        share: "ops = 10_000",
        command: "ib_write_bw -F -s 8 -D 5",
        measured: |r| r.get(4).map(|millions| millions * 1e6),
        expected: 10_000.0,
        unit: "operations/s",
    },
];

/// Measurement of a program under a limit.
#[derive(Serialize)]
struct Limited {
    name: &'static str,
    expected: f64,
    measured: f64,
    unit: &'static str,
    /// Deviation from the limit, percent; negative if the program got less.
    off_percent: f64,
}

impl Limited {
    /// True if the program got no more than the limit and, where time is judged, no less. On few cores other work may
    /// have taken the time.
    fn holds(&self, judges_time: bool) -> bool {
        self.off_percent <= EXACT && (!judges_time || self.off_percent >= -EXACT)
    }
}

/// Measures limits that a control centre sets for a host.
fn limited(wanted: &[&CentreLimit]) -> Result<Vec<Limited>> {
    if wanted.is_empty() {
        return Ok(Vec::new());
    }
    if harness::uid() != 0 {
        eprintln!("limits of a control centre are not measured: its hosts are network namespaces, which need root");
        return Ok(Vec::new());
    }
    let fleet = Fleet::start(1)?;
    let group = "[[group]]\nname = \"blue\"\nranges = [\"10.1.0.0/16\"]\n";
    let vrnic = |name: &str, ip: &str, share: &str| {
        format!(
            "[[vrnic]]\nname = \"{name}\"\ngroup = \"blue\"\nhost = \"h0\"\nips = [\"{ip}\"]\nshare = {{ {share} }}\n"
        )
    };
    let measure = |l: &&CentreLimit| {
        eprintln!("{}", l.name);
        fleet.apply(&format!("{group}{}{}", vrnic("a", "10.1.0.1", ""), vrnic("b", "10.1.0.2", l.share)))?;
        fleet.wait_for(0, "a")?;
        fleet.wait_for(0, "b")?;
        fleet.wait_applied()?;
        let client = format!("{} 10.1.0.1", l.command);
        let columns = rows(l.command, fleet.labs[0].pair(("a", l.command), ("b", &client), &[])?)?.pop();
        let measured =
            columns.as_deref().and_then(l.measured).ok_or(format!("{} printed too few columns", l.command))?;
        let off_percent = (measured / l.expected - 1.0) * 100.0;
        Ok(Limited { name: l.name, expected: l.expected, measured, unit: l.unit, off_percent })
    };
    wanted.iter().map(measure).collect()
}

#[derive(Serialize)]
struct Row {
    neighbour: &'static str,
    /// Medians over the runs; `None` if there is no result.
    figures: Option<Figures>,
    /// Medians of how many times worse each figure is than beside the honest neighbour in the same run.
    times_worse: Option<Worse>,
    /// An attack during which there was no result, silence, or a figure beyond its limit.
    beyond: bool,
    /// Reason for a missing result: the victim got no answer, or the attack is impossible here.
    note: Option<String>,
}

/// How a measurement ended.
enum Outcome {
    Measured(Figures),
    /// The victim's programs, or the virtual layer, failed.
    Failed(String),
    /// The attack is impossible here.
    Skipped(String),
}

impl Row {
    /// `coarse`: on few cores, the figures beside a program that only computes.
    fn of(
        neighbour: &Neighbour,
        is_attack: bool,
        outcomes: &[Outcome],
        honest: &[Outcome],
        coarse: Option<&[Outcome]>,
    ) -> Row {
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
        let figures = Figures::medians(&all);
        row.figures = Some(figures);
        let pairs: Vec<(Figures, Figures)> =
            outcomes.iter().zip(honest).filter_map(|(a, h)| Some((measured(a)?, measured(h)?))).collect();
        row.times_worse = Worse::medians(&pairs);
        let medians = |of: &[Outcome]| Figures::medians(&of.iter().filter_map(measured).collect::<Vec<_>>());
        let is_beyond = match coarse {
            None => row.times_worse.is_some_and(|w| w.is_beyond(LIMIT)),
            Some(c) => !Limits::of(Place::Same, medians(honest), Some(medians(c))).beyond(figures).is_empty(),
        };
        row.beyond = is_attack && (is_beyond || figures.is_silent());
        row
    }
}

/// One measurement beside `neighbour`, on a virtual layer of its own.
fn measure(programs: &Path, neighbour: &Neighbour) -> Result<Outcome> {
    let scene = Scene::start(programs)?;
    let victims = scene.victims(Place::Same)?;
    let attacker = match neighbour.program.map(|p| scene.attacker(&p)).transpose()? {
        Some(Err(why)) => return Ok(Outcome::Skipped(why)),
        Some(Ok(attacker)) => Some(attacker),
        None => None,
    };
    let figures = victims.measure();
    let ended = attacker.map_or(Ok(()), attack::fixture::Attacker::end);
    Ok(match figures.and_then(|f| ended.map(|()| f)) {
        Ok(f) => Outcome::Measured(f),
        Err(why) => Outcome::Failed(why),
    })
}

fn neighbour(attack: &Attack) -> Option<Neighbour> {
    if let Way::Program(p) = attack.way { Some(Neighbour { name: attack.name, program: Some(p) }) } else { None }
}

pub(super) fn isolation(json: bool, only: Option<&str>, runs: u32) -> Result<()> {
    let limits: Vec<&CentreLimit> = LIMITS.iter().filter(|l| only.is_none_or(|o| l.name.contains(o))).collect();
    let attacks = match attack::wanted(only, |a| a.takes_time) {
        Err(_) if !limits.is_empty() => Vec::new(),
        attacks => attacks?,
    };
    packages::ensure(&[packages::RUN])?;
    eprintln!("building");
    let rows = beside_neighbours(attacks, runs)?;
    harness::build()?;
    let limits = limited(&limits)?;
    let report = Report {
        topology: format!("{}; the victim on the first core, its neighbour on the last one", pollers().0),
        runs,
        limit: LIMIT,
        judges_time: judges_time(),
        rows,
        limits,
    };
    if json {
        print_json(&report)?;
    } else {
        print(&report);
    }
    let inexact = report.limits.iter().filter(|l| !l.holds(report.judges_time)).count();
    if inexact > 0 {
        return Err(format!("{inexact} limits of the control centre do not hold within {EXACT} %"));
    }
    match report.rows.iter().filter(|r| r.beyond).count() {
        0 => Ok(()),
        n if report.judges_time => {
            Err(format!("{n} attacks slow their neighbours down more than {LIMIT} times as much as honest work"))
        }
        n => Err(format!("beside {n} attacks the victims are beyond their limits")),
    }
}

/// Measures the victims beside each neighbour. Empty if there is no attack to try.
fn beside_neighbours(attacks: Vec<&Attack>, runs: u32) -> Result<Vec<Row>> {
    if attacks.is_empty() {
        return Ok(Vec::new());
    }
    let programs = Scene::build()?;
    let neighbours: Vec<Neighbour> = OTHERS.into_iter().chain(attacks.into_iter().filter_map(neighbour)).collect();
    let mut outcomes: Vec<Vec<Outcome>> = neighbours.iter().map(|_| Vec::new()).collect();
    for run in 1..=runs {
        for (neighbour, outcomes) in neighbours.iter().zip(&mut outcomes) {
            // A neighbour without a result is not measured again.
            if outcomes.iter().all(|o| matches!(o, Outcome::Measured(_))) {
                eprintln!("run {run} of {runs}: {}", neighbour.name);
                outcomes.push(measure(&programs, neighbour)?);
            }
        }
    }
    let coarse = (!judges_time()).then(|| &outcomes[2][..]);
    let row = |(i, n): (usize, &Neighbour)| Row::of(n, i >= OTHERS.len(), &outcomes[i], &outcomes[1], coarse);
    Ok(neighbours.iter().enumerate().map(row).collect())
}

fn print(r: &Report) {
    if !r.rows.is_empty() {
        print_rows(r);
    }
    for l in &r.limits {
        let verdict = if l.holds(r.judges_time) { "" } else { "  BEYOND" };
        println!("{:42} {:>10.1} {:12} {:>+6.2} %{verdict}", l.name, l.measured, l.unit, l.off_percent);
    }
}

fn print_rows(r: &Report) {
    println!("topology: {}\nmedians of {VICTIMS} victims, and of {} runs{}\n", r.topology, r.runs, time_note());
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
        let row = |is_attack, outcomes: &[Outcome]| Row::of(&BUSY, is_attack, outcomes, &honest, None);
        // Twice as slow in one run of three.
        let once = [measured(4.0, 10.0, 1000.0), measured(4.0, 10.0, 1000.0), measured(2.0, 10.0, 1000.0)];
        assert!(!row(true, &once).beyond);
        let slow = [measured(2.0, 10.0, 600.0), measured(4.0, 10.0, 600.0), measured(2.0, 10.0, 1000.0)];
        let slow = row(true, &slow);
        let coarse = |mib_s| Row::of(&BUSY, true, &[measured(2.0, 99.0, mib_s)], &honest, Some(&honest)).beyond;
        assert!(!coarse(400.0) && coarse(300.0));
        assert!(slow.beyond && slow.times_worse.is_some_and(|w| w.bandwidth > 1.6 && w.p50 < 1.1));
        assert!(!row(false, &[measured(9.0, 99.0, 1.0)]).beyond, "no attack");
        let hung = row(true, &[measured(2.0, 10.0, 1000.0), Outcome::Failed("no completion".into())]);
        assert!(hung.beyond && hung.figures.is_none());
        assert!(!row(true, &[Outcome::Skipped("no /dev/fuse".into())]).beyond);
    }
}
