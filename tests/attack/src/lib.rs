//! `cargo xtask attack`: tries every known attack against a virtual layer with victims in the attacker's group and in
//! another one, and reports the results.

pub mod checks;
pub mod fixture;
pub mod list;
pub mod matrix;
pub mod resource_usage;

use std::path::Path;
use std::time::Duration;

use serde::Serialize;

use fixture::{Figures, Place, Scene, VICTIMS, Victims, Worse};
use harness::{Lab, Result, named, packages, print_json, topology};
use list::{ATTACKS, Attack, COMPUTING, HONEST, Program, Way};
use resource_usage::Footprint;

/// Limit for victims in the attacker's group: how many times worse a figure may be than beside the honest neighbour.
pub const LIMIT_SAME: f64 = 1.5;
/// The same limit for victims in another group.
const LIMIT_OTHER: f64 = 1.2;
/// With fewer cores than this, the attacker, the victims, the pollers and all other programs share the cores. The
/// placement of threads then moves a figure further than most attacks do, so limits are coarse ([`Limits`]).
const CORES_TO_JUDGE_TIME: usize = 4;
/// Coarse limits for the attacker's group and for another one: how many times worse than beside the honest neighbour.
const FEW_CORES: [f64; 2] = [3.0, 2.0];
/// A coarse limit is at least this many times the figure beside a program that only computes.
const BESIDE_COMPUTING: f64 = 1.2;
/// Coarse limit for p99 of a WRITE in another group, us.
const P99_OTHER_US: f64 = 1e3;
/// A victim that waits longer than this for one WRITE counts as unanswered on any machine, us. A victim's figure is the
/// median of the longest waits of [`VICTIMS`] programs.
const SILENCE_US: f64 = 1e6;

/// True if this machine has enough cores for the fine limits.
pub fn judges_time() -> bool {
    harness::cores().len() >= CORES_TO_JUDGE_TIME
}

/// The note in the tables about the limits on few cores.
pub fn time_note() -> String {
    let [same, other] = FEW_CORES;
    match judges_time() {
        true => String::new(),
        false => format!(
            "; on fewer than {CORES_TO_JUDGE_TIME} cores p50 and 64 KiB may be {same} times worse than beside the honest neighbour in its \
             group and {other} times in another one, or {BESIDE_COMPUTING} times worse than beside a program that computes, and p99 counts in \
             another group only, if it is over {P99_OTHER_US} us"
        ),
    }
}

/// Limits for the figures of victims in one place.
#[derive(Clone, Copy)]
pub struct Limits {
    p50_us: f64,
    p99_us: f64,
    mib_s: f64,
}

impl Limits {
    /// Limits from the figures beside the honest neighbour and, on few cores, beside a program that only computes.
    pub fn of(place: Place, honest: Figures, computing: Option<Figures>) -> Limits {
        let [of_few, limit, p99_us] = match place {
            Place::Same => [FEW_CORES[0], LIMIT_SAME, f64::INFINITY],
            Place::Other => [FEW_CORES[1], LIMIT_OTHER, P99_OTHER_US],
        };
        let Some(c) = computing else {
            return Limits {
                p50_us: honest.p50_us * limit,
                p99_us: honest.p99_us * limit,
                mib_s: honest.mib_s / limit,
            };
        };
        Limits {
            p50_us: (honest.p50_us * of_few).max(c.p50_us * BESIDE_COMPUTING),
            p99_us,
            mib_s: (honest.mib_s / of_few).min(c.mib_s / BESIDE_COMPUTING),
        }
    }

    /// The figures that exceed their limits, each with its limit.
    pub fn beyond(&self, f: Figures) -> Vec<String> {
        let mut all = Vec::new();
        let mut most = |name: &str, is: f64, limit: f64| {
            if is > limit {
                all.push(format!("{name} is {is:.1} us, limit {limit:.1}"));
            }
        };
        most("p50", f.p50_us, self.p50_us);
        most("p99", f.p99_us, self.p99_us);
        if f.mib_s < self.mib_s {
            all.push(format!("64 KiB reaches {:.0} MiB/s, limit {:.0}", f.mib_s, self.mib_s));
        }
        if f.is_silent() {
            all.push(format!("one WRITE took {:.1} s", f.worst_us / 1e6));
        }
        all
    }
}
/// Most bytes that the virtual layer may log during an attack, and in each additional second of a longer attack: each
/// vRNIC may cause ten lines in ten seconds.
const LOG_BYTES: u64 = 64 << 10;
const LOG_BYTES_A_SECOND: u64 = 512;

#[derive(Serialize)]
struct Report {
    topology: String,
    runs: u32,
    limit_same_group: f64,
    limit_other_group: f64,
    /// The fine limits apply; false on a machine with few cores, where limits are coarse.
    judges_time: bool,
    /// Medians of all measurements of victims beside honest neighbours, for each place. `times_worse` is relative to
    /// them.
    honest_same_group: Figures,
    honest_other_group: Figures,
    rows: Vec<Row>,
}

#[derive(Serialize)]
struct Row {
    attack: &'static str,
    /// Limits that are exceeded, and other failures. Empty if there are none.
    broken: Vec<String>,
    /// Reason why it was not tried.
    skipped: Option<String>,
    /// The virtual layer's process is still the same and answers.
    host_alive: Option<bool>,
    /// All workers are still the same processes. `None` if there are no workers.
    workers_alive: Option<bool>,
    same_group: Option<Measured>,
    other_group: Option<Measured>,
    /// Programs that start during the attack, in both groups, get their devices and the right bytes.
    new_programs: Option<bool>,
    /// The virtual layer's processes before the attack and after it, and the highest value of each resource during it.
    before: Footprint,
    during: Option<resource_usage::Held>,
    after: Footprint,
}

#[derive(Serialize)]
struct Measured {
    /// Medians over the runs.
    figures: Figures,
    /// Beside the honest neighbour, in the same runs.
    honest: Figures,
    /// How many times worse each figure is than the median beside the honest neighbour over all attacks.
    times_worse: Worse,
}

/// Result of one run of an attack.
#[derive(Default)]
struct Outcome {
    broken: Vec<String>,
    skipped: Option<String>,
    host_alive: Option<bool>,
    workers_alive: Option<bool>,
    /// For each place, the figures beside the honest neighbour and during the attack.
    figures: [Option<(Figures, Figures)>; 2],
    new_programs: Option<bool>,
    before: Footprint,
    during: Option<resource_usage::Held>,
    after: Footprint,
}

impl Outcome {
    fn skipped(why: &str) -> Outcome {
        Outcome { skipped: Some(why.into()), ..Outcome::default() }
    }

    fn note(&mut self, result: Result<()>) -> bool {
        let ok = result.is_ok();
        self.broken.extend(result.err());
        ok
    }

    /// Checks the virtual layer after the attack. For `seconds` of it the victims did not measure.
    fn conclude(&mut self, scene: &mut Scene, seconds: u64) {
        match Footprint::settled(&scene.lab, &self.before) {
            Ok((after, given_back)) => {
                self.workers_alive = after.workers_as(&self.before);
                self.after = after;
                if !given_back {
                    self.broken.push("what it took is not given back".into());
                }
                if self.workers_alive == Some(false) {
                    self.broken.push("a worker ended".into());
                }
                self.host_alive = Some(true);
            }
            Err(why) => {
                self.host_alive = Some(false);
                let log = std::fs::read_to_string(scene.lab.dir.join("host.log")).unwrap_or_default();
                let last = log.lines().last().unwrap_or_default().to_string();
                self.broken.push(scene.lab.how_it_ended().map_or(why, |how| format!("the host ended ({how}): {last}")));
            }
        }
        let log = std::fs::metadata(scene.lab.dir.join("host.log")).map_or(0, |m| m.len());
        if log > LOG_BYTES + LOG_BYTES_A_SECOND * seconds {
            self.broken.push(format!("{log} bytes of log"));
        }
    }
}

/// Measures victims beside an honest neighbour, then starts `program`, waits `seconds`, and measures them again. Uses a
/// virtual layer of its own.
fn beside(programs: &Path, program: &Program, seconds: u64) -> Result<Outcome> {
    let mut scene = Scene::start(programs)?;
    Place::ALL.iter().try_for_each(|&p| scene.check(p))?;
    let honest = {
        let victims = [scene.victims(Place::Same)?, scene.victims(Place::Other)?];
        let _neighbour = scene.attacker(&HONEST)??;
        let [same, other] = victims.map(Victims::measure);
        [same?, other?]
    };
    // Everything that is allocated once has been allocated by now.
    let mut outcome = Outcome { before: Footprint::of(&scene.lab)?, ..Outcome::default() };
    let victims = Place::ALL.map(|p| scene.victims(p));
    match scene.attacker(program) {
        Err(e) => outcome.broken.push(e),
        Ok(Err(why)) => return Ok(Outcome::skipped(&why)),
        Ok(Ok(attacker)) => {
            std::thread::sleep(Duration::from_secs(seconds));
            let look = |outcome: &mut Outcome| match Footprint::of(&scene.lab) {
                Ok(now) => outcome.during = Some(outcome.during.unwrap_or_default().max(now.sum())),
                Err(why) => outcome.broken.push(why),
            };
            look(&mut outcome);
            for (i, victims) in victims.into_iter().enumerate() {
                match victims.and_then(Victims::measure) {
                    Ok(f) => outcome.figures[i] = Some((f, honest[i])),
                    Err(e) => outcome.broken.push(e),
                }
                look(&mut outcome);
            }
            let checks = Place::ALL.map(|p| outcome.note(scene.check(p)));
            outcome.new_programs = Some(checks == [true; 2]);
            outcome.note(attacker.end());
        }
    }
    outcome.conclude(&mut scene, seconds);
    Ok(outcome)
}

/// Figures of victims in each place beside a program that only computes.
fn beside_computing(programs: &Path) -> Result<[Figures; 2]> {
    let scene = Scene::start(programs)?;
    let victims = [scene.victims(Place::Same)?, scene.victims(Place::Other)?];
    let _neighbour = scene.attacker(&COMPUTING)??;
    let [same, other] = victims.map(Victims::measure);
    Ok([same?, other?])
}

/// Runs a check of the black-box tests on a virtual layer of its own.
fn checked(programs: &Path, check: fn(&Lab) -> Result<()>) -> Result<Outcome> {
    let mut scene = Scene::start(programs)?;
    Place::ALL.iter().try_for_each(|&p| scene.check(p))?;
    let mut outcome = Outcome { before: Footprint::of(&scene.lab)?, ..Outcome::default() };
    outcome.note(check(&scene.lab));
    outcome.conclude(&mut scene, 0);
    Ok(outcome)
}

fn attempt(programs: &Path, attack: &Attack, seconds: u64) -> Result<Outcome> {
    match attack.way {
        Way::Program(p) => beside(programs, &p, seconds),
        Way::Check { needs_root: true, .. } if harness::uid() != 0 => {
            Ok(Outcome::skipped("it takes root to set it up"))
        }
        Way::Check { check, .. } => checked(programs, check),
        Way::Elsewhere(place) => Ok(Outcome::skipped(place)),
    }
}

impl Row {
    /// `usual` has the medians of the figures of victims beside honest neighbours, for each place.
    fn of(attack: &'static str, outcomes: Vec<Outcome>, usual: [Figures; 2], limits: [Limits; 2]) -> Row {
        let measured = |i: usize| {
            let (beside_it, honest): (Vec<Figures>, Vec<Figures>) =
                outcomes.iter().filter_map(|o| o.figures[i]).unzip();
            if beside_it.is_empty() || beside_it.len() < outcomes.len() {
                return None;
            }
            let (figures, honest) = (Figures::medians(&beside_it), Figures::medians(&honest));
            Some(Measured { figures, honest, times_worse: Worse::than(figures, usual[i]) })
        };
        let (same_group, other_group) = (measured(0), measured(1));
        let all = |f: fn(&Outcome) -> Option<bool>| {
            let said: Vec<bool> = outcomes.iter().filter_map(f).collect();
            (!said.is_empty()).then(|| said.iter().all(|&ok| ok))
        };
        let (host_alive, workers_alive) = (all(|o| o.host_alive), all(|o| o.workers_alive));
        let new_programs = all(|o| o.new_programs);
        let mut broken: Vec<String> = outcomes.iter().flat_map(|o| o.broken.clone()).collect();
        broken.dedup();
        let places = [(&same_group, "its group"), (&other_group, "another group")];
        for ((m, place), limits) in places.into_iter().zip(limits) {
            let beyond = m.iter().flat_map(|m| limits.beyond(m.figures));
            broken.extend(beyond.map(|what| format!("victims in {place}: {what}")));
        }
        let skipped = outcomes.iter().find_map(|o| o.skipped.clone());
        // The last run. A run with a failure is always the last one.
        let last = outcomes.into_iter().next_back().unwrap_or_default();
        let (before, during, after) = (last.before, last.during, last.after);
        Row {
            attack,
            broken,
            skipped,
            host_alive,
            workers_alive,
            same_group,
            other_group,
            new_programs,
            before,
            during,
            after,
        }
    }
}

/// Figures of victims in a place beside an honest neighbour: medians over the measurements before all attacks. A single
/// one may be half or twice as large, depending on where the kernel has put threads.
fn usual<'a>(outcomes: impl Iterator<Item = &'a Outcome>, place: usize) -> Figures {
    Figures::medians(&outcomes.filter_map(|o| o.figures[place]).map(|(_, honest)| honest).collect::<Vec<_>>())
}

/// Prints the list for `--list`.
pub fn print_list() {
    for a in ATTACKS {
        println!("{:16} {}", a.name, a.what);
    }
}

/// The attacks whose names contain `only`.
///
/// # Errors
/// If there is none.
pub fn wanted(only: Option<&str>, which: impl Fn(&Attack) -> bool) -> Result<Vec<&'static Attack>> {
    named(ATTACKS.iter().filter(|a| which(a)).collect(), |a| a.name, only, "attack")
}

/// `cargo xtask attack`: tries the attacks whose names contain `only`, and prints a report.
///
/// # Errors
/// The number of attacks that do more than they may, or the step that failed.
pub fn run(json: bool, only: Option<&str>, runs: u32, seconds: u64) -> Result<()> {
    let attacks = wanted(only, |_| true)?;
    packages::ensure(&[packages::RUN])?;
    eprintln!("building");
    let programs = Scene::build()?;
    let mut outcomes: Vec<Vec<Outcome>> = attacks.iter().map(|_| Vec::new()).collect();
    let computing = if judges_time() { None } else { Some(beside_computing(&programs)?) };
    for run in 1..=runs {
        for (attack, outcomes) in attacks.iter().zip(&mut outcomes) {
            let is_measured = |o: &Outcome| o.broken.is_empty() && o.skipped.is_none() && o.figures[0].is_some();
            // An attack that was skipped or had a failure is not tried again.
            if outcomes.iter().all(is_measured) {
                eprintln!("run {run} of {runs}: {}", attack.name);
                let failed = |why| Outcome { broken: vec![why], ..Outcome::default() };
                outcomes.push(attempt(&programs, attack, seconds).unwrap_or_else(failed));
            }
        }
    }
    let usual = [0, 1].map(|place| usual(outcomes.iter().flatten(), place));
    let limits = [0, 1].map(|i| Limits::of(Place::ALL[i], usual[i], computing.map(|c| c[i])));
    let rows: Vec<Row> = attacks.iter().zip(outcomes).map(|(a, o)| Row::of(a.name, o, usual, limits)).collect();
    let [honest_same_group, honest_other_group] = usual;
    let report = Report {
        topology: topology(),
        runs,
        limit_same_group: LIMIT_SAME,
        limit_other_group: LIMIT_OTHER,
        judges_time: judges_time(),
        honest_same_group,
        honest_other_group,
        rows,
    };
    if json {
        print_json(&report)?;
    } else {
        print(&report);
    }
    match report.rows.iter().filter(|r| !r.broken.is_empty()).count() {
        0 => Ok(()),
        n => Err(format!("{n} of {} attacks do more than they may", report.rows.len())),
    }
}

fn yes(b: Option<bool>) -> &'static str {
    match b {
        Some(true) => "yes",
        Some(false) => "NO",
        None => "-",
    }
}

fn print(r: &Report) {
    let has_workers = r.rows.iter().any(|row| row.workers_alive.is_some());
    let workers = |text: &str| if has_workers { format!(" {text:>7}") } else { String::new() };
    println!(
        "topology: {}; beside them the attack\nmedians of {VICTIMS} victims, and of {} runs{}",
        r.topology,
        r.runs,
        time_note()
    );
    for (f, place) in [(&r.honest_same_group, "its group"), (&r.honest_other_group, "another group")] {
        // The medians are NaN if no attack was measured.
        if !f.p50_us.is_nan() {
            println!(
                "beside an honest neighbour in {place}: p50 {:.2} us, p99 {:.1} us, 64 KiB {:.0} MiB/s",
                f.p50_us, f.p99_us, f.mib_s
            );
        }
    }
    println!();
    println!(
        "{:16} {:>5}{} {:^21} {:^21} {:>5}  {:^20} {:^20} {:^20}",
        "",
        "host",
        workers("workers"),
        "its group, worse by",
        "other group",
        "new",
        "descriptors",
        "mappings",
        "MiB"
    );
    println!(
        "{:16} {:>5}{} {:>7}{:>7}{:>7} {:>7}{:>7}{:>7} {:>5}  {:^20} {:^20} {:^20}",
        "attack",
        "alive",
        workers("alive"),
        "p50",
        "p99",
        "64 KiB",
        "p50",
        "p99",
        "64 KiB",
        "progs",
        "before>most>after",
        "before>most>after",
        "before>most>after"
    );
    for row in &r.rows {
        print!("{:16}", row.attack);
        if let Some(why) = &row.skipped {
            println!(" not tried: {why}");
            continue;
        }
        print!(" {:>5}{}", yes(row.host_alive), workers(yes(row.workers_alive)));
        for m in [&row.same_group, &row.other_group] {
            match m {
                Some(Measured { times_worse: w, .. }) => {
                    print!(" {:>7.2}{:>7.2}{:>7.2}", w.p50, w.p99, w.bandwidth);
                }
                _ => print!(" {:>7}{:>7}{:>7}", "-", "-", "-"),
            }
        }
        let (before, after) = (row.before.sum(), row.after.sum());
        let most = row.during.unwrap_or_default().max(before).max(after);
        let most = resource_usage::Held { rss_kib: most.rss_kib.max(row.after.peak_rss_kib()), ..most };
        let three = |f: fn(&resource_usage::Held) -> u64| format!("{}>{}>{}", f(&before), f(&most), f(&after));
        println!(
            " {:>5}  {:^20} {:^20} {:^20}{}",
            yes(row.new_programs),
            three(|h| h.descriptors),
            three(|h| h.mappings),
            three(|h| h.rss_kib >> 10),
            if row.broken.is_empty() { "" } else { "  BROKEN" }
        );
    }
    println!();
    for row in &r.rows {
        row.broken.iter().for_each(|why| println!("{}: {why}", row.attack));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(times: f64) -> (Figures, Figures) {
        let of = |times: f64| Figures { p50_us: 4.0, p99_us: 100.0 * times, worst_us: 1e3, mib_s: 1e4 };
        (of(times), of(1.0))
    }

    fn outcome(same: f64, other: f64) -> Outcome {
        Outcome { figures: [same, other].map(|t| Some(figures(t))), host_alive: Some(true), ..Outcome::default() }
    }

    const USUAL: Figures = Figures { p50_us: 4.0, p99_us: 100.0, worst_us: 1e3, mib_s: 1e4 };

    fn limits(computing: Option<Figures>) -> [Limits; 2] {
        Place::ALL.map(|p| Limits::of(p, USUAL, computing))
    }

    #[test]
    fn a_row_is_broken_by_what_is_beyond_its_limit_in_the_median() {
        let row = |all: Vec<Outcome>| Row::of("x", all, [USUAL; 2], limits(None));
        assert!(row(vec![outcome(1.4, 1.1)]).broken.is_empty());
        assert!(row(vec![outcome(1.4, 1.1), outcome(9.0, 9.0), outcome(0.9, 0.9)]).broken.is_empty());
        let one = row(vec![outcome(1.4, 1.3)]);
        assert_eq!(one.broken, ["victims in another group: p99 is 130.0 us, limit 120.0"]);
        assert!(one.host_alive == Some(true) && one.workers_alive.is_none());
        assert_eq!(row(vec![outcome(1.6, 1.3)]).broken.len(), 2);
    }

    #[test]
    fn on_few_cores_limits_are_coarse_and_silence_counts() {
        let computing = Figures { p50_us: 20.0, ..USUAL };
        let row = |all: Vec<Outcome>| Row::of("x", all, [USUAL; 2], limits(Some(computing))).broken;
        assert!(row(vec![outcome(99.0, 9.0)]).is_empty());
        assert_eq!(row(vec![outcome(1.0, 11.0)]), ["victims in another group: p99 is 1100.0 us, limit 1000.0"]);
        let mut slow = outcome(1.0, 1.0);
        slow.figures[0].as_mut().unwrap().0 = Figures { p50_us: 25.0, mib_s: 3000.0, ..USUAL };
        slow.figures[1].as_mut().unwrap().0 = Figures { p50_us: 23.0, mib_s: 5100.0, worst_us: 2e6, ..USUAL };
        let expected = [
            "victims in its group: p50 is 25.0 us, limit 24.0",
            "victims in its group: 64 KiB reaches 3000 MiB/s, limit 3333",
            "victims in another group: one WRITE took 2.0 s",
        ];
        assert_eq!(row(vec![slow]), expected);
    }

    #[test]
    fn what_is_usual_beside_an_honest_neighbour_is_the_median_of_all() {
        let lucky = Outcome { figures: [Some((figures(1.0).0, figures(0.1).0)), None], ..Outcome::default() };
        let all = [outcome(9.0, 9.0), lucky, outcome(1.0, 1.0)];
        let usual = usual(all.iter(), 0);
        assert_eq!(usual.p99_us, figures(1.0).1.p99_us);
        // So a lucky honest measurement just before an attack does not make the attack look worse.
        let [_, lucky, _] = all;
        assert!(Row::of("x", vec![lucky], [usual; 2], limits(None)).broken.is_empty());
    }

    #[test]
    fn what_broke_in_one_run_is_said_and_has_no_figures() {
        let mut second = outcome(1.0, 1.0);
        second.figures[0] = None;
        second.broken.push("no completion".into());
        second.host_alive = Some(false);
        let row = Row::of("x", vec![outcome(1.0, 1.0), second], [USUAL; 2], limits(None));
        assert_eq!((row.broken, row.host_alive), (vec!["no completion".to_string()], Some(false)));
        assert!(row.same_group.is_none() && row.other_group.is_some());
    }
}
