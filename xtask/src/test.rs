//! `cargo xtask test`: all checks. Each prints a closing line.

use std::process::Command;
use std::time::Instant;

use crate::{Result, centres, harness, packages, suite, vm};

fn cargo(args: &[&str], env: &[(&str, &str)]) -> Result<()> {
    println!("\n== cargo {}", args.join(" "));
    let mut c = Command::new("cargo");
    c.args(args).current_dir(harness::root());
    for (k, v) in env {
        c.env(k, v);
    }
    let began = Instant::now();
    match c.status() {
        Ok(s) if s.success() => {
            println!("took {} s", began.elapsed().as_secs());
            Ok(())
        }
        Ok(s) => Err(format!("cargo {} failed ({s})", args.join(" "))),
        Err(e) => Err(format!("cargo {}: {e}", args.join(" "))),
    }
}

/// A component of the toolchain that a minimal installation lacks.
fn has(component: &str) -> bool {
    Command::new("cargo").args([component, "--version"]).output().is_ok_and(|o| o.status.success())
}

pub(crate) fn run(only: Option<&str>) -> Result<()> {
    packages::ensure(&[packages::RUN, packages::TEST, packages::MEMORY, packages::PAGE])?;
    if only.is_none() {
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
        // Documentation has no examples to test, and the suite builds the example programs that it needs.
        cargo(&["test", "--workspace", "--tests", "--quiet"], &[])?;
        let loom = [("RUSTFLAGS", "--cfg loom"), ("CARGO_TARGET_DIR", "target/loom")];
        cargo(&["test", "--package", "unirdma-mem", "--release", "--quiet", "--lib", "loom"], &loom)?;
        let _ = download.join();
    }
    println!("\n== black-box tests with Debian's programs");
    harness::build()?;
    suite::run(only)
}

/// The long form of the suite's test with several control centres.
pub(crate) fn centres(calls: u32, seconds: u64) -> Result<()> {
    packages::ensure(&[packages::RUN, packages::TEST])?;
    harness::build()?;
    centres::run(calls as usize, std::time::Duration::from_secs(seconds), true)
}
