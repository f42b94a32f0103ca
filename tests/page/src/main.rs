//! `cargo xtask page`: all checks of the control centre's web page, or a fleet to look at.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use harness::{Result, cleanup, packages};
use page::{CHECKS, Visit};

/// Look at the control centre's web page in Chromium, with a fleet whose hosts report traffic, and keep pictures of
/// it
#[derive(Parser)]
#[command(
    name = "cargo xtask page",
    bin_name = "xtask page",
    after_help = "Examples:\n  cargo xtask page                      all checks; the pictures are in target/page\n  cargo xtask page --stay               a fleet to look at, until interrupted"
)]
struct Cli {
    /// Directory of the pictures
    #[arg(long, value_name = "DIR", default_value = "target/page")]
    out: PathBuf,
    /// Only the checks whose name contains this
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Start the fleet, print the address of its page, and check nothing
    #[arg(long, conflicts_with = "only")]
    stay: bool,
    /// Do not build `unirdma` first
    #[arg(long)]
    built: bool,
}

fn run(cli: &Cli) -> Result<()> {
    packages::ensure(&[packages::RUN, packages::PAGE])?;
    if !cli.built {
        harness::build()?;
    }
    if cli.stay {
        return page::stay();
    }
    let mut failed = 0;
    let mut began = Instant::now();
    let mut visit = Visit::start(&cli.out)?;
    for check in CHECKS.iter().filter(|c| cli.only.as_ref().is_none_or(|o| c.name.contains(o))) {
        let done = visit.check(check);
        let ms = std::mem::replace(&mut began, Instant::now()).elapsed().as_millis();
        match done {
            Ok(()) => println!("{} ... ok, {ms} ms", check.name),
            Err(e) => {
                failed += 1;
                println!("{} ... FAILED, {ms} ms\n{e}", check.name);
            }
        }
    }
    println!("pictures are in {}", cli.out.display());
    if failed == 0 { Ok(()) } else { Err(format!("{failed} checks of the page failed")) }
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    cleanup::guarded("xtask", || cleanup::exit_code("xtask", run(&cli)))
}
