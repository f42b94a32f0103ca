//! `cargo xtask scale`: measures a real control centre (in another process) with many hosts that have no data path (in
//! this process).

mod run;

use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;

/// Measure a control centre with many hosts and vRNICs.
#[derive(Parser)]
struct Args {
    /// The program `unirdma`
    exe: std::path::PathBuf,
    #[arg(long)]
    hosts: usize,
    #[arg(long)]
    vrnics: usize,
    #[arg(long)]
    groups: usize,
    #[arg(long)]
    moves: usize,
    #[arg(long)]
    quiet: u64,
    #[arg(long)]
    json: bool,
}

fn measure(args: Args) -> std::io::Result<bool> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    // Two descriptors for each host, at most.
    let most = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: most, maximum: most })?;
    let scratch = run::Scratch::new()?;
    let (hosts, vrnics, groups, moves) = (args.hosts, args.vrnics, args.groups, args.moves);
    let (exe, dir, quiet) = (args.exe, scratch.path().into(), Duration::from_secs(args.quiet));
    let options = run::Options { exe, dir, hosts, vrnics, groups, moves, quiet };
    let began = std::time::Instant::now();
    let say = |text: &str| eprintln!("{:>6.1} s: {text}", began.elapsed().as_secs_f64());
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let report = runtime.block_on(run::run(&options, &say))?;
    if args.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        println!("{report}");
    }
    let failures = [report.wrong(), report.slow()].concat();
    failures.iter().for_each(|f| eprintln!("scale: {f}"));
    Ok(failures.is_empty())
}

fn main() -> ExitCode {
    match measure(Args::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("scale: {e}");
            ExitCode::FAILURE
        }
    }
}
