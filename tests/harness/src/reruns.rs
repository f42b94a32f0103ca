//! The reruns that tests make, each with its reason. There are no others.

use crate::{Output, Result};

/// perftest compares the processor's clock with the system's, and prints no figures if the machine was busy meanwhile.
/// The pair of programs is then run once more.
///
/// # Errors
/// If one of them cannot be started.
pub fn of_perftest(run: impl Fn() -> Result<(Output, Output)>) -> Result<(Output, Output)> {
    let gave_up = |o: &Output| o.text.contains("Can't produce a report");
    let (server, client) = run()?;
    if gave_up(&server) || gave_up(&client) { run() } else { Ok((server, client)) }
}

/// A receiver that gets no core for some milliseconds loses packets, as UC and UD allow, and programs that use these
/// wait for them until their time is over. Such a pair of programs is run up to six times. If `lost` tells the number
/// of lost packets, the pair is repeated only if that has grown.
///
/// # Errors
/// The error of the last run.
pub fn of_lost_packets(lost: impl Fn() -> Option<u64>, run: impl Fn() -> Result<()>) -> Result<()> {
    const RUNS: usize = 6;
    let mut result = Ok(());
    for _ in 0..RUNS {
        let before = lost();
        result = run();
        if result.is_ok() || before.is_some() && lost() == before {
            break;
        }
    }
    result
}

/// Some of rdma-core's tests assume that posted requests complete at once, which is not always so with emulated
/// processors. If at most two of them fail in a guest, these are run up to three times more by themselves.
///
/// # Errors
/// The error of the last run.
pub fn of_emulated(failed: usize, first: Result<()>, run: impl Fn() -> Result<()>) -> Result<()> {
    const MAY_FAIL: usize = 2;
    const MORE_RUNS: usize = 3;
    let mut result = first;
    for _ in 0..MORE_RUNS {
        if result.is_ok() || !(1..=MAY_FAIL).contains(&failed) {
            break;
        }
        result = run();
    }
    result
}
