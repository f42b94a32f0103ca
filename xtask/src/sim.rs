//! `cargo xtask sim`: the simulations of the kit, seed by seed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::{panic, process};

use unirdma_simkit::{connection, fabric};

/// Runs all simulations with each of these seeds. What finds something wrong panics; then the process says how to repeat the
/// seed, and fails.
pub(crate) fn run(first: u64, seeds: u64, steps: u64) {
    let current = Arc::new(AtomicU64::new(first));
    let (default, failed) = (panic::take_hook(), current.clone());
    panic::set_hook(Box::new(move |info| {
        default(info);
        let seed = failed.load(Ordering::Relaxed);
        eprintln!("xtask: seed {seed} failed; to repeat it: cargo xtask sim --seed {seed} --seeds 1 --steps {steps}");
        process::exit(1);
    }));
    let (mut caught, mut heard, mut moves) = (0, 0, 0);
    for seed in (0..seeds).map(|i| first.wrapping_add(i)) {
        println!("seed {seed}");
        current.store(seed, Ordering::Relaxed);
        connection::run(seed, steps);
        for report in [fabric::run(seed, steps), fabric::run_moving(seed, steps)] {
            caught += report.caught;
            heard += report.heard;
            moves += report.moves;
        }
    }
    println!("{caught} corrupted packets were recognized, {heard} multicast messages heard, {moves} vRNICs moved");
}
