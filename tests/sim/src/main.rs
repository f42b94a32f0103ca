//! `cargo xtask sim`: runs the simulations of the kit for many seeds: of the RNIC, and of a fleet with its control
//! centres. It starts no processes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::{panic, process};

use clap::Parser;
use unirdma_simkit::{connection, differ, fabric, fleet};

/// Simulate hosts and a network that loses, duplicates and reorders packets, with random traffic; programs that
/// must have the same results on one host and on two; or a fleet with its control centres
#[derive(Parser)]
#[command(
    name = "cargo xtask sim",
    bin_name = "xtask sim",
    after_help = "Examples:\n  cargo xtask sim                            seeds 0 to 99\n  cargo xtask sim --seed 1234 --seeds 1      one seed again\n  cargo xtask sim --differ --seeds 5000      the same programs on one host and on two, and nothing else\n  cargo xtask sim --fleet --seeds 1000       hosts, centres and their store, with crashes and partitions"
)]
struct Cli {
    /// The first seed
    #[arg(long, value_name = "S", default_value_t = 0)]
    seed: u64,
    /// How many seeds
    #[arg(long, value_name = "N", default_value_t = 100)]
    seeds: u64,
    /// Steps for each seed: eight requests on one connection, twenty on a fabric of four hosts, a phase of a
    /// program; ten seconds of a fleet
    #[arg(long, value_name = "N", default_value_t = 6)]
    steps: u64,
    /// The simulation of a fleet
    #[arg(long, conflicts_with = "differ")]
    fleet: bool,
    /// Only programs on one host and on two, which must have the same results
    #[arg(long)]
    differ: bool,
}

/// Calls `run` with each of these seeds. If `run` panics, prints how to repeat the seed, and fails.
fn each(first: u64, seeds: u64, options: String, mut run: impl FnMut(u64)) {
    let current = Arc::new(AtomicU64::new(first));
    let (default, failed) = (panic::take_hook(), current.clone());
    panic::set_hook(Box::new(move |info| {
        default(info);
        let seed = failed.load(Ordering::Relaxed);
        eprintln!("xtask: seed {seed} failed; to repeat it: cargo xtask sim --seed {seed} --seeds 1{options}");
        process::exit(1);
    }));
    for seed in (0..seeds).map(|i| first.wrapping_add(i)) {
        println!("seed {seed}");
        current.store(seed, Ordering::Relaxed);
        run(seed);
    }
}

/// Runs the simulations of the RNIC.
fn run(first: u64, seeds: u64, steps: u64) {
    let (mut caught, mut heard, mut moves) = (0, 0, 0);
    each(first, seeds, format!(" --steps {steps}"), |seed| {
        connection::run(seed, steps);
        differ::run(seed, steps);
        for report in [fabric::run(seed, steps), fabric::run_moving(seed, steps)] {
            caught += report.caught;
            heard += report.heard;
            moves += report.moves;
        }
    });
    println!("{caught} corrupted packets were recognized, {heard} multicast messages heard, {moves} vRNICs moved");
}

/// Runs programs on one host and on two, which must have the same results.
fn run_differ(first: u64, seeds: u64, steps: u64) {
    let mut all = differ::Report::default();
    each(first, seeds, format!(" --steps {steps} --differ"), |seed| all.add(&differ::run(seed, steps)));
    let of = |ok: bool| {
        all.completions.iter().filter(|((opcode, _), _)| opcode.is_some() == ok).map(|(_, n)| n).sum::<u64>()
    };
    let events: u64 = all.events.values().sum();
    println!("{} completions with success, {} with an error, {events} events", of(true), of(false));
}

/// Runs the simulation of a fleet.
fn run_fleet(first: u64, seeds: u64, steps: u64) {
    let mut all = fleet::Report::default();
    each(first, seeds, format!(" --steps {steps} --fleet"), |seed| {
        let one = fleet::run(seed, steps);
        all.changes += one.changes;
        all.refused += one.refused;
        all.crashes += one.crashes;
        all.elections += one.elections;
        all.connections += one.connections;
        all.ended += one.ended;
    });
    println!(
        "{} changes kept, {} calls refused, {} crashes, {} elections; {} connections made, {} ended by changes",
        all.changes, all.refused, all.crashes, all.elections, all.connections, all.ended
    );
}

fn main() {
    let Cli { seed, seeds, steps, fleet, differ } = Cli::parse();
    let run = match (fleet, differ) {
        (true, _) => run_fleet,
        (_, true) => run_differ,
        _ => run,
    };
    run(seed, seeds, steps);
}
