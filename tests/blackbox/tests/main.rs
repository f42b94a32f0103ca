//! Black-box tests: the built programs in containers, on several hosts and in virtual machines, used as a user would,
//! with Debian's own RDMA programs, wrong input, and lost peers.
//!
//! `cargo test -p blackbox -- TEXT` runs the tests whose names contain TEXT, and fails if there are none; `--list`
//! prints all names. Each test works without the others. What the selected tests use is built and installed first.
//!
//! Environment variables: `BLACKBOX_TOPIC` is the only topic whose tests there are, or the only set of topics:
//! `alone`, `machines`, `beside`. `BLACKBOX_KERNEL` and `BLACKBOX_ROUNDS` are for guests, `BLACKBOX_LONG` adds
//! the long tests of VFs, `BLACKBOX_SEED` and `BLACKBOX_SECONDS` are for memory; `cargo xtask` sets them.
//! `UNIRDMA_TEST_BUILT`: nothing is built first.

mod attacks;
mod c_programs;
mod captures;
mod changes;
mod command_line;
mod connecting;
mod documents;
mod engines;
mod etcd;
mod fleet;
mod guest;
mod isolation;
mod kernel;
mod loader;
mod losses;
mod memory;
mod network;
mod package;
mod page;
mod podman;
mod programs;
mod pyverbs;
mod rnic;
mod rules;
mod sandbox;
mod secret;
mod several;
mod suite;
mod support;
mod sysfs;
mod two_hosts;
mod unnamed;
mod vmm;
mod watching;
mod with;
mod workers;
mod wrong_input;

use std::process::ExitCode;
use std::time::Instant;

use harness::{cleanup, packages};
use libtest_mimic::Arguments;
use suite::{Test, Tests};

/// Adds the tests of a topic.
type Add = fn(&mut Tests);

/// Tests that measure, look at all processes of this machine, or lose datagrams on a busy machine.
const ALONE: &[(&str, Add)] = &[
    ("programs", programs::tests),
    ("isolation", isolation::tests),
    ("workers", workers::tests),
    ("attacks", attacks::tests),
    ("c_programs", c_programs::tests),
    ("losses", losses::tests),
    ("two_hosts", two_hosts::tests),
    ("fleet", fleet::tests),
];

/// Tests in virtual machines. [`BESIDE`] may run at the same time.
const MACHINES: &[(&str, Add)] = &[("kernel", kernel::tests), ("guest", guest::tests), ("rnic", rnic::tests)];

/// Tests that may run while others do.
const BESIDE: &[(&str, Add)] = &[
    ("pyverbs", pyverbs::tests),
    ("connecting", connecting::tests),
    ("network", network::tests),
    ("rules", rules::tests),
    ("secret", secret::tests),
    ("captures", captures::tests),
    ("changes", changes::tests),
    ("watching", watching::tests),
    ("unnamed", unnamed::tests),
    ("with", with::tests),
    ("loader", loader::tests),
    ("several", several::tests),
    ("wrong_input", wrong_input::tests),
    ("sandbox", sandbox::tests),
    ("vmm", vmm::tests),
    ("sysfs", sysfs::tests),
    ("engines", engines::tests),
    ("podman", podman::tests),
    ("command_line", command_line::tests),
    ("documents", documents::tests),
    ("etcd", etcd::tests),
    ("package", package::tests),
    ("page", page::tests),
    ("memory", memory::tests),
];

/// All tests.
fn all() -> Vec<Test> {
    let mut tests = Tests::default();
    let selected = std::env::var("BLACKBOX_TOPIC").ok();
    for (set, topics) in [("alone", ALONE), ("machines", MACHINES), ("beside", BESIDE)] {
        for (topic, add) in topics {
            if selected.as_deref().is_none_or(|s| s == set || s == *topic) {
                tests.named(topic);
                add(&mut tests);
            }
        }
    }
    tests.into_list()
}

/// Installs and builds what tests use.
fn prepare(tests: &[&Test]) -> harness::Result<()> {
    let mut needed: Vec<packages::Needed> = tests.iter().flat_map(|t| t.packages).copied().collect();
    needed.sort_unstable();
    needed.dedup();
    packages::ensure(&needed)?;
    eprintln!("building");
    harness::build()
}

/// Runs the tests that the arguments select. False if one failed.
fn run(args: &Arguments, tests: Vec<Test>) -> harness::Result<bool> {
    let selected: Vec<&Test> = tests.iter().filter(|t| !args.is_filtered_out(&t.trial)).collect();
    if let (Some(text), true) = (&args.filter, selected.is_empty()) {
        return Err(format!("no test has `{text}` in its name; `cargo test -p blackbox -- --list` prints all names"));
    }
    prepare(&selected)?;
    let done = libtest_mimic::run(args, tests.into_iter().map(|t| t.trial).collect());
    println!("time by topic: {}", suite::times());
    Ok(!done.has_failed())
}

fn main() -> ExitCode {
    let mut args = Arguments::from_args();
    args.test_threads.get_or_insert(1);
    if args.list {
        let _ = libtest_mimic::run(&args, all().into_iter().map(|t| t.trial).collect());
        return ExitCode::SUCCESS;
    }
    cleanup::guarded("blackbox", || {
        let begin = Instant::now();
        let done = run(&args, all()).map(|ok| memory::go_on(&args, begin) && ok);
        match done {
            Ok(true) => ExitCode::SUCCESS,
            // As the built-in harness does.
            Ok(false) => ExitCode::from(101),
            Err(e) => cleanup::exit_code("blackbox", Err(e)),
        }
    })
}
