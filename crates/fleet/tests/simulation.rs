//! The simulation of a fleet, with a fixed budget. `cargo xtask sim --fleet` runs any seed.

use unirdma_simkit::fleet;

#[test]
fn fleets_come_to_rest_as_declared() {
    for seed in 0..12 {
        println!("seed {seed}");
        let report = fleet::run(seed, 6);
        assert!(report.changes > 10 && report.connections > 10, "seed {seed} has seen something: {report:?}");
    }
}

#[test]
fn a_seed_replays() {
    assert_eq!(fleet::run(7, 4), fleet::run(7, 4));
    assert_ne!(fleet::run(7, 4).digest, fleet::run(8, 4).digest);
}
