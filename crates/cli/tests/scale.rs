//! A small `cargo xtask scale`: thirty hosts without a data path at a real centre.

#[path = "../examples/scale/run/mod.rs"]
mod run;

#[test]
fn hosts_have_what_is_declared_and_hear_of_what_concerns_them() {
    let scratch = run::Scratch::new().unwrap();
    let options = run::Options {
        exe: env!("CARGO_BIN_EXE_unirdma").into(),
        dir: scratch.path().into(),
        hosts: 30,
        vrnics: 1_000,
        groups: 100,
        moves: 20,
        quiet: std::time::Duration::from_secs(1),
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let report = runtime.block_on(run::run(&options, &|_| ())).unwrap();
    println!("{report}");
    assert_eq!(report.wrong(), [""; 0]);
    // The time limits of a move are checked only by `cargo xtask scale`, where nothing else runs.
    report.slow().iter().for_each(|line| println!("{line}"));
    let moved = report.changes.iter().find(|c| c.what == "vRNIC moved").unwrap();
    assert!(moved.times == 20 && moved.told_most > 1 && moved.bytes_most > 0);
}
