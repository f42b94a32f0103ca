//! The fabric simulation with a fixed budget, and a host that is lost for good.

use unirdma_abi as abi;
use unirdma_formats::{QpType, WcStatus, WrOpcode};
use unirdma_simkit::net::{Faults, Net};
use unirdma_simkit::*;

/// One of the simulations of `cargo xtask sim`. Each seed is a fabric and traffic of its own.
#[test]
fn every_message_has_an_allowed_outcome() {
    let mut heard = 0;
    for seed in 0..60 {
        println!("cargo xtask sim --seed {seed} --seeds 1 --steps 15");
        heard += fabric::run(seed, 15).heard;
    }
    assert!(heard > 0);
}

/// The same while vRNICs are saved, removed and restored at random moments, on the same host or another one. `cargo
/// xtask sim` runs this simulation as well.
#[test]
fn vrnics_move_and_nothing_is_lost() {
    let mut moves = 0;
    for seed in 0..64 {
        println!("cargo xtask sim --seed {seed} --seeds 1 --steps 15");
        moves += fabric::run_moving(seed, 15).moves;
    }
    assert!(moves > 1000, "{moves}");
}

/// A seed gives the same run again, so that a failure can be repeated.
#[test]
fn a_seed_replays() {
    for seed in 0..12 {
        for run in [fabric::run, fabric::run_moving] {
            let first = run(seed, 15);
            (0..4).for_each(|_| assert_eq!(run(seed, 15), first, "seed {seed}"));
        }
    }
}

/// A peer that is cut off for good costs only its own connections an error.
#[test]
fn a_lost_host_is_an_error_of_its_peers_alone() {
    let mut net = Net::hosts(3, &[QpType::Rc; 6], 5, Faults::default());
    // 0 on host 0 with 1 on host 1; 3 on host 0 with 5 on host 2.
    for (a, b) in [(0, 1), (1, 0), (3, 5), (5, 3)] {
        net.connect(QpType::Rc, a, b, &|a| a);
    }
    net.cut(1, true);
    let write = |net: &mut Net, a: usize, b: usize| {
        let (sge, key) = (net.ends[a].sge(0, 5000), net.ends[b].key);
        net.ends[a].post(abi::SqWqe { remote_addr: IOVA, rkey: key, ..wqe(WrOpcode::Write, 1) }, &[sge]);
    };
    write(&mut net, 0, 1);
    write(&mut net, 3, 5);
    net.run(SECOND);
    assert_eq!(status(&net.ends[0].done()), WcStatus::RetryExcErr);
    assert_eq!(status(&net.ends[3].done()), WcStatus::Success);
}
