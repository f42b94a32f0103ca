//! `cargo xtask test`: all checks. Each prints a closing line.

use std::time::Instant;

use harness::{Output, Result, packages, vm};

/// Processor time of all children that have ended, and of theirs, seconds (proc_pid_stat(5)).
fn cpu_s() -> u64 {
    const TICKS_PER_S: u64 = 100;
    let text = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The name of the program stands in brackets and may have spaces.
    let fields = text.rsplit(')').next().unwrap_or_default().split_whitespace();
    fields.skip(13).take(2).filter_map(|f| f.parse::<u64>().ok()).sum::<u64>() / TICKS_PER_S
}

fn cargo(args: &[&str], env: &[(&str, &str)]) -> Result<()> {
    println!("\n== cargo {}", args.join(" "));
    let mut c = harness::cargo();
    c.args(args).envs(env.iter().copied());
    let (began, cpu) = (Instant::now(), cpu_s());
    let status = c.status().map_err(|e| format!("cargo: {e}"))?;
    println!("took {} s, {} s of processor time", began.elapsed().as_secs(), cpu_s() - cpu);
    if status.success() { Ok(()) } else { Err(format!("cargo {} failed ({status})", args.join(" "))) }
}

/// A component of the toolchain that a minimal installation lacks.
fn has(component: &str) -> bool {
    harness::cargo().args([component, "--version"]).output().is_ok_and(|o| o.status.success())
}

/// Arguments of cargo for the black-box tests. As a part of the workspace, so that what the unit tests were built with
/// serves here, too.
const BLACK_BOX: [&str; 5] = ["test", "--workspace", "--test", "blackbox", "--"];

/// Runs the black-box tests whose names contain `only`, with these parameters.
fn black_box(only: Option<&str>, parameters: &[(&str, &str)]) -> Result<()> {
    let mut args = BLACK_BOX.to_vec();
    if let Some(text) = only {
        args.extend(["--", text]);
    }
    cargo(&args, parameters)
}

/// Runs one set of black-box tests while another one runs, whose output is printed afterwards.
fn black_box_sets(now: &str, beside: &str) -> Result<()> {
    let set = |name| [("BLACKBOX_TOPIC", name)];
    let mut other = harness::cargo();
    other.args(BLACK_BOX).envs(set(beside));
    let other = std::thread::spawn(move || Output::of(&mut other));
    let done = black_box(None, &set(now));
    let other = other.join().map_err(|_| "the thread that waits for black-box tests panicked")?;
    println!("\n== the black-box tests `{beside}`\n{}", other.text);
    done?;
    if other.ok() { Ok(()) } else { Err(format!("the black-box tests `{beside}` failed")) }
}

pub(crate) fn run(only: Option<&str>) -> Result<()> {
    if only.is_some() {
        return black_box(only, &[]);
    }
    packages::ensure(packages::ALL)?;
    // The parts of virtual machines are downloaded meanwhile. If that fails, the tests that need them report it.
    let download = std::thread::spawn(|| drop(vm::Parts::fetch()));
    if has("fmt") {
        cargo(&["fmt", "--all", "--check"], &[])?;
    } else {
        println!("skipped: cargo fmt (rustfmt is not installed)");
    }
    if has("clippy") {
        cargo(&["clippy", "--workspace", "--all-targets", "--quiet", "--", "-D", "warnings"], &[])?;
    } else {
        println!("skipped: cargo clippy (clippy is not installed)");
    }
    // Documentation has no examples to test, and benchmarks build the example programs that they need.
    cargo(&["test", "--workspace", "--exclude", "blackbox", "--tests", "--quiet"], &[])?;
    let loom = [("RUSTFLAGS", "--cfg loom"), ("CARGO_TARGET_DIR", "target/loom")];
    cargo(&["test", "--package", "unirdma-mem", "--release", "--quiet", "--lib", "loom"], &loom)?;
    let _ = download.join();
    black_box(None, &[("BLACKBOX_TOPIC", "alone")])?;
    black_box_sets("machines", "beside")
}

/// `cargo xtask test memory`: the black-box tests of memory, then random sequences from `seed` on until the time is
/// over.
pub(crate) fn memory(seconds: u64, seed: u64, only: Option<&str>) -> Result<()> {
    let (seconds, seed) = (seconds.to_string(), seed.to_string());
    black_box(only, &[("BLACKBOX_TOPIC", "memory"), ("BLACKBOX_SECONDS", &seconds), ("BLACKBOX_SEED", &seed)])
}

/// `cargo xtask vm`: the black-box tests with guests, with one kernel if `kernel` names it. `rounds`: how often guests
/// restart in each test.
pub(crate) fn guests(kernel: Option<&str>, only: Option<&str>, rounds: u32) -> Result<()> {
    vm::prepare()?;
    // An unknown kernel is reported once, not by each test.
    vm::Systems::parts(kernel)?;
    let rounds = rounds.to_string();
    let mut parameters = vec![("BLACKBOX_TOPIC", "guest"), ("BLACKBOX_ROUNDS", &rounds)];
    parameters.extend(kernel.map(|k| ("BLACKBOX_KERNEL", k)));
    black_box(only, &parameters)
}

/// `cargo xtask vm rnic`: the black-box tests with the VFs of a real RNIC, also the long ones.
pub(crate) fn real_rnic(only: Option<&str>) -> Result<()> {
    black_box(only, &[("BLACKBOX_TOPIC", "rnic"), ("BLACKBOX_LONG", "1")])
}
