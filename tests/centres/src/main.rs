//! `cargo xtask test centres`: the long form of the black-box test with several control centres.

use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use harness::{Result, cleanup, packages};

/// Two control centres on one etcd: vRNICs are made while the allocating one is killed, then etcd is stopped, and
/// killed
#[derive(Parser)]
#[command(
    name = "cargo xtask test centres",
    bin_name = "xtask test centres",
    after_help = "Example:\n  cargo xtask test centres --calls 1000 --seconds 30"
)]
struct Cli {
    /// How many vRNICs
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(8..=50_000))]
    calls: u32,
    /// Seconds for which etcd is away, each time
    #[arg(long, value_name = "N", default_value_t = 30)]
    seconds: u64,
}

fn run(cli: &Cli) -> Result<()> {
    packages::ensure(&[packages::RUN, packages::ETCD])?;
    harness::build()?;
    centres::run(cli.calls as usize, Duration::from_secs(cli.seconds), true)
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    cleanup::guarded("xtask", || cleanup::exit_code("xtask", run(&cli)))
}
