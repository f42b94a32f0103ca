//! `cargo xtask attack`.

use std::process::ExitCode;

use clap::Parser;

/// Try every known attack, with victims in the attacker's group and in another one: performance of the victims,
/// survival of processes, and release of resources
#[derive(Parser)]
#[command(name = "cargo xtask attack", bin_name = "xtask attack")]
#[command(
    after_help = "Examples:\n  cargo xtask attack                          about 25 minutes\n  cargo xtask attack --list\n  cargo xtask attack --only sigbus --runs 1\n  cargo xtask attack --only guest --runs 1 --seconds 600\n  cargo xtask attack --json > attack.json\n  cargo xtask attack --matrix --runs 1        the published matrices: what is left to victims beside each attacker\n\nAn attack is broken, and the exit code 1, if the virtual layer or a worker of it ends, if programs that begin meanwhile get no device or\nwrong bytes, if a victim waits more than a second for a WRITE, if descriptors, mappings or memory are not given back, or, on four cores and\nmore, if a victim's figure is more than 1.5 times worse than beside an honest busy neighbour (1.2 times in another group than the attacker's).\nOn fewer cores p50 and bandwidth may be 3 times worse (2 times in another group), or 1.2 times worse than beside a program that only
computes, whichever is worse, and p99 counts in another group only, from 1 ms on."
)]
struct Cli {
    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
    /// Only the attacks whose name contains this
    #[arg(long, value_name = "NAME")]
    only: Option<String>,
    /// How often each attack is tried; medians count
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// Seconds for which each attack runs before the victims measure
    #[arg(long, value_name = "N", default_value_t = 0)]
    seconds: u64,
    /// Print the attacks' names and what they do
    #[arg(long, exclusive = true)]
    list: bool,
    /// Print the published matrices (Husky, HT-Verbs): for each attacker, the performance that remains for three
    /// kinds of victims, as a table in Markdown; ratios do not fail the run
    #[arg(long, conflicts_with = "seconds")]
    matrix: bool,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    harness::cleanup::guarded("xtask", || {
        let only = cli.only.as_deref();
        let done = match cli {
            Cli { list: true, .. } => {
                attack::print_list();
                Ok(())
            }
            Cli { json, runs, matrix: true, .. } => attack::matrix::run(json, only, runs),
            Cli { json, runs, seconds, .. } => attack::run(json, only, runs, seconds),
        };
        harness::cleanup::exit_code("xtask", done)
    })
}
