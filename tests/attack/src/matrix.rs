//! `cargo xtask attack --matrix`: the attackers and victims of published matrices, as a table of the performance that
//! remains for the victims. No ratio fails the run.

use std::path::Path;

use harness::{Result, median, named, packages, print_json, topology};
use serde::Serialize;

use super::fixture::{Kind, Place, Scene, VICTIMS};
use super::list::{Argument, Program};
use super::resource_usage::Footprint;

/// An attacker of a matrix. `name` is its name in the test kit's program `field`.
struct Attacker {
    name: &'static str,
    what: &'static str,
}

const fn attacker(name: &'static str, what: &'static str) -> Attacker {
    Attacker { name, what }
}

/// First a program without RDMA, then Husky's attackers (NSDI 2023) by the resource that each exhausts, then the three
/// of HT-Verbs (2025).
const ATTACKERS: &[Attacker] = &[
    attacker("compute", "a program that only computes"),
    attacker("write-1m", "bandwidth: WRITEs of 1 MiB, 16 QPs"),
    attacker("read-1m", "bandwidth: READs of 1 MiB, 16 QPs"),
    attacker("send-1m", "bandwidth: SENDs of 1 MiB, 16 QPs"),
    attacker("write-4k", "bandwidth: WRITEs of 4 KiB, 16 QPs"),
    attacker("read-4k", "bandwidth: READs of 4 KiB, 16 QPs"),
    attacker("send-4k", "bandwidth: SENDs of 4 KiB, 16 QPs"),
    attacker("write-257", "bus: WRITEs of 257 B, 16 QPs"),
    attacker("write-129", "bus: WRITEs of 129 B, 16 QPs"),
    attacker("write-8", "rate: WRITEs of 8 B, 64 QPs"),
    attacker("read-8", "rate: READs of 8 B, 64 QPs"),
    attacker("send-8", "rate: SENDs of 8 B, 64 QPs"),
    attacker("cas-8", "rate: compare and swap, 64 QPs"),
    attacker("faa-8", "rate: fetch and add, 64 QPs"),
    attacker("rnr-short", "rate: RC SENDs without receives, RNR timer 0.01 ms"),
    attacker("rnr-long", "rate: RC SENDs without receives, RNR timer 655 ms"),
    attacker("uc-no-recv", "rate: UC SENDs without receives"),
    attacker("ud-no-recv", "rate: UD SENDs without receives"),
    attacker("qps-512", "caches: WRITEs of 512 B, 512 QPs"),
    attacker("mrs-write", "caches: WRITEs through 4,096 MRs of 512 B"),
    attacker("mrs-read", "caches: READs through 4,096 MRs of 512 B"),
    attacker("mrs-send", "caches: SENDs through 4,096 MRs of 512 B"),
    attacker("mrs-1m", "caches: WRITEs of 4 KiB through 1,024 MRs of 1 MiB"),
    attacker("mr-1g", "caches: WRITEs of 4 KiB all over an MR of 1 GiB"),
    attacker("register", "caches: registers and deregisters, one PD"),
    attacker("register-pd", "caches: registers and deregisters, a PD for each"),
    attacker("deep-rq-rc", "caches: SENDs into receive queues of 4,096, RC"),
    attacker("deep-rq-ud", "caches: SENDs into receive queues of 4,096, UD"),
    attacker("read-16k", "caches: READs of 16 KiB, 16 QPs"),
    attacker("ht-queues-rc", "queue flooding: QPs and CQs made and destroyed, RC"),
    attacker("ht-queues-uc", "queue flooding: QPs and CQs made and destroyed, UC"),
    attacker("ht-write", "cache depletion: WRITEs of 64 B at ever new addresses"),
    attacker("ht-read", "cache depletion: READs of 64 B at ever new addresses"),
    attacker("ht-flood", "verbs flooding: WRITEs of no bytes, 64 QPs"),
];

/// Performance that remains for victims in one place: with the attacker / alone, and for latency alone / with, so that
/// less is always worse. 1 means that the attacker has no effect.
#[derive(Clone, Copy, Serialize)]
struct Left {
    /// Bandwidth of WRITEs of 64 KiB.
    write_64k: f64,
    /// Latency of WRITEs of 8 B, median.
    write_8: f64,
    /// Bandwidth of SENDs of 4 KiB on eight connections.
    send_4k: f64,
}

#[derive(Serialize)]
struct Row {
    attacker: &'static str,
    what: &'static str,
    /// Medians over the runs; `None` if a victim got no result.
    same_group: Option<Left>,
    other_group: Option<Left>,
    /// Failures during the attack, apart from slow victims.
    broken: Vec<String>,
}

#[derive(Serialize)]
struct Report {
    topology: String,
    runs: u32,
    rows: Vec<Row>,
}

/// Measurements of the victims of one place.
#[derive(Clone, Copy)]
struct Measured {
    mib_s: f64,
    p50_us: f64,
    many_mib_s: f64,
}

impl Left {
    fn of(alone: Measured, with: Measured) -> Left {
        Left {
            write_64k: with.mib_s / alone.mib_s,
            write_8: alone.p50_us / with.p50_us,
            send_4k: with.many_mib_s / alone.many_mib_s,
        }
    }

    fn medians(all: &[Left]) -> Option<Left> {
        let of = |f: fn(&Left) -> f64| median(all.iter().map(f));
        (!all.is_empty()).then(|| Left {
            write_64k: of(|l| l.write_64k),
            write_8: of(|l| l.write_8),
            send_4k: of(|l| l.send_4k),
        })
    }
}

/// Starts and connects victims of both kinds in one place. Returns a function that measures them.
fn victims(scene: &Scene, place: Place) -> Result<impl FnOnce() -> Result<Measured>> {
    let (pair, many) = (scene.victims(place)?, scene.victims_of(Kind::Many, place)?);
    Ok(move || {
        let pair = pair.measure()?;
        let [many_mib_s] = many.measured(["mib_s"])?;
        Ok(Measured { mib_s: pair.mib_s, p50_us: pair.p50_us, many_mib_s })
    })
}

/// One run with an attacker, on a virtual layer of its own.
fn beside(programs: &Path, name: &'static str) -> Result<[Left; 2]> {
    let mut scene = Scene::start(programs)?;
    let alone = [victims(&scene, Place::Same)?()?, victims(&scene, Place::Other)?()?];
    let before = Footprint::of(&scene.lab)?;
    let waiting = [victims(&scene, Place::Same)?, victims(&scene, Place::Other)?];
    let program = Program::Kit { name: "field", argument: Argument::Word(name), captured: false };
    let with = {
        let attacker = scene.attacker(&program)??;
        let [same, other] = waiting.map(|measure| measure());
        attacker.end()?;
        [same?, other?]
    };
    let (after, given_back) = Footprint::settled(&scene.lab, &before)
        .map_err(|why| scene.lab.how_it_ended().map_or(why, |how| format!("the host ended ({how})")))?;
    match () {
        () if after.workers_as(&before) == Some(false) => Err("a worker ended".into()),
        () if !given_back => Err("what it took is not given back".into()),
        () => Ok([Left::of(alone[0], with[0]), Left::of(alone[1], with[1])]),
    }
}

/// Runs the attackers whose name contains `only`.
///
/// # Errors
/// If no attacker has such a name, or something other than a ratio is wrong during one of them.
pub fn run(json: bool, only: Option<&str>, runs: u32) -> Result<()> {
    let wanted = named(ATTACKERS.iter().collect(), |a| a.name, only, "attacker")?;
    packages::ensure(&[packages::RUN])?;
    eprintln!("building");
    let programs = Scene::build()?;
    let row = |a: &&Attacker| {
        let (mut left, mut broken): (Vec<[Left; 2]>, Vec<String>) = Default::default();
        for run in 1..=runs {
            eprintln!("run {run} of {runs}: {}", a.name);
            match beside(&programs, a.name) {
                Ok(l) => left.push(l),
                Err(why) => broken.push(why),
            }
        }
        let place = |i: usize| Left::medians(&left.iter().map(|l| l[i]).collect::<Vec<_>>());
        Row { attacker: a.name, what: a.what, same_group: place(0), other_group: place(1), broken }
    };
    let report = Report { topology: topology(), runs, rows: wanted.iter().map(row).collect() };
    if json {
        print_json(&report)?;
    } else {
        print(&report);
    }
    match report.rows.iter().filter(|r| !r.broken.is_empty()).count() {
        0 => Ok(()),
        n => Err(format!("beside {n} of {} attackers more than time was lost", report.rows.len())),
    }
}

/// Prints a Markdown table.
fn print(r: &Report) {
    println!("topology: {}; the attacker on the last core", r.topology);
    println!("medians of {VICTIMS} victims, and of {} runs: what is left to a victim, 1 is all\n", r.runs);
    println!(
        "| attacker | what it does | its group: 64 KiB | 8 B | 4 KiB x 8 | another group: 64 KiB | 8 B | 4 KiB x 8 |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    for row in &r.rows {
        print!("| {} | {} |", row.attacker, row.what);
        for left in [row.same_group, row.other_group] {
            match left {
                Some(Left { write_64k, write_8, send_4k }) => {
                    print!(" {write_64k:.2} | {write_8:.2} | {send_4k:.2} |");
                }
                None => print!(" - | - | - |"),
            }
        }
        println!();
    }
    for row in &r.rows {
        row.broken.iter().for_each(|why| println!("{}: {why}", row.attacker));
    }
}
