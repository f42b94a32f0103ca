//! `cargo xtask scale`: many hosts at one real control centre. The example `scale` of `unirdma-cli` plays the hosts and
//! measures. The centre is `unirdma control` as it is released.

use std::process::{Command, ExitCode};

use clap::Parser;
use harness::{Result, cleanup};

/// Measure a control centre with a thousand hosts and 100,000 vRNICs: time, memory, and bytes for each kind of
/// change
#[derive(Parser)]
#[command(
    name = "cargo xtask scale",
    bin_name = "xtask scale",
    after_help = "Examples:\n  cargo xtask scale                                   some minutes, and 7 GiB of memory\n  cargo xtask scale --hosts 100 --vrnics 10000\n  cargo xtask scale --groups 1000 --json > scale.json\n\nIt fails, with the exit code 1, if a host does not have exactly what it must have, if 99 of 100 moves take more than 100 ms until all\nhosts concerned know them, if a host is sent more than 10 KiB for a change, if a host is told of what does not concern it, or if one is\ntold everything that it has already. A host to which the group is new is told all of the group; that is shown beside it."
)]
struct Scale {
    /// How many hosts, each with a certificate and a connection of its own
    #[arg(long, value_name = "N", default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(10..=10_000))]
    hosts: u32,
    /// How many vRNICs
    #[arg(long, value_name = "N", default_value_t = 100_000, value_parser = clap::value_parser!(u32).range(1_000..=1_000_000))]
    vrnics: u32,
    /// How many groups; a tenth of the vRNICs if left out
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(100..=60_000))]
    groups: Option<u32>,
    /// How many vRNICs are moved, one after the other
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(5..=10_000))]
    moves: u32,
    /// Print JSON instead of tables
    #[arg(long)]
    json: bool,
}

fn run(scale: &Scale) -> Result<()> {
    eprintln!("building");
    harness::build()?;
    let program = harness::build_example("unirdma-cli", "scale")?;
    let groups = scale.groups.unwrap_or((scale.vrnics / 10).clamp(100, 60_000));
    let mut c = Command::new(&program);
    c.arg(harness::unirdma());
    let counts = [("--hosts", scale.hosts), ("--vrnics", scale.vrnics), ("--groups", groups), ("--moves", scale.moves)];
    counts.iter().for_each(|(name, n)| _ = c.arg(name).arg(n.to_string()));
    c.args(["--quiet", "10"]).args(scale.json.then_some("--json"));
    match c.status() {
        Ok(s) if s.success() => Ok(()),
        Ok(s) => Err(format!("the fleet is not as it must be ({s})")),
        Err(e) => Err(format!("{}: {e}", program.display())),
    }
}

fn main() -> ExitCode {
    let scale = Scale::parse();
    cleanup::guarded("xtask", || cleanup::exit_code("xtask", run(&scale)))
}
