//! `cargo xtask`: the project's own commands. `demo` shows programs, `test` checks everything.
//!
//! It has few dependencies, so that the first demonstration comes soon. Commands that need more are programs of other
//! packages, which it starts.

mod demo;
mod dispatch;
mod test;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use harness::{Result, book, cleanup, cluster, conformance, package, tcp, vm};

/// Commands of the uniRDMA project.
#[derive(Parser)]
#[command(name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run Debian's own RDMA programs between two containers and compare with TCP
    Demo,
    /// Check everything: format, lints, unit and property tests, real programs
    #[command(args_conflicts_with_subcommands = true)]
    Test {
        #[command(subcommand)]
        what: Option<Test>,
        /// Only the black-box tests whose name contains this
        #[arg(long, value_name = "TEXT")]
        only: Option<String>,
    },
    /// Simulate hosts and a network that loses, duplicates and reorders packets, with random traffic; programs that
    /// must have the same results on one host and on two; or a fleet with its control centres
    Sim,
    /// Measure a control centre with a thousand hosts and 100,000 vRNICs: time, memory, and bytes for each kind of
    /// change
    Scale,
    /// Try every known attack, with victims in the attacker's group and in another one: performance of the victims,
    /// survival of processes, and release of resources
    Attack,
    /// Run a fleet in network namespaces: hosts, a control centre, and programs between all pairs of thirty vRNICs,
    /// which must connect exactly where the rules allow; needs root
    #[command(after_help = "Examples:\n  cargo xtask cluster\n  cargo xtask cluster --hosts 5")]
    Cluster {
        /// How many hosts
        #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=16))]
        hosts: u8,
    },
    /// Run Debian's RDMA programs in virtual machines whose guests have vRNICs; needs root
    #[command(
        after_help = "Examples:\n  cargo xtask vm                              tests, in guests with two kernels\n  cargo xtask vm --kernel 6.1 --only bw\n  cargo xtask vm --kernel unstable            the newest kernel that Debian has, which is downloaded first\n  cargo xtask vm --rounds 50 --only again     reloads and restarts, 50 times each\n  cargo xtask vm -- ibv_devinfo -v            one command in a guest\n  cargo xtask vm --shell                      a guest's console; `exit` ends the guest\n  cargo xtask vm rnic                         a machine with the VFs of a real RNIC\n\nWhat the guests are made of is downloaded once, into target/vm. The guest with a command or a shell has the vRNIC `guest` with\nthe address 10.0.0.1; the vRNIC `peer` beside it has 10.0.0.2 and is for a container."
    )]
    #[command(args_conflicts_with_subcommands = true)]
    Vm {
        #[command(subcommand)]
        what: Option<Machines>,
        /// Which kernel: 6.12 (Debian 13), 6.1 (Debian 12), or `unstable` for the kernel of Debian's unstable release
        #[arg(long, value_name = "RELEASE")]
        kernel: Option<String>,
        /// Only the tests whose name contains this
        #[arg(long, value_name = "TEXT")]
        only: Option<String>,
        /// How often each guest restarts, and reloads its driver, while peers are connected; a hostile process runs for
        /// four seconds in each round
        #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
        rounds: u32,
        /// Start a guest and take the terminal as its console
        #[arg(long, conflicts_with_all = ["only", "command"])]
        shell: bool,
        /// Download and build the parts of guests, and start none
        #[arg(long, conflicts_with_all = ["only", "shell", "command"])]
        build: bool,
        /// Run rdma-core's own tests in guests, on a vRNIC and on the kernel's own soft RNIC; with --only, on the vRNIC
        /// alone
        #[arg(long, conflicts_with_all = ["shell", "build", "command"])]
        conformance: bool,
        /// Run this in a guest
        #[arg(last = true, value_name = "COMMAND", conflicts_with = "only")]
        command: Vec<String>,
    },
    /// Look at the control centre's web page in Chromium, with a fleet whose hosts report traffic, and keep pictures of
    /// it
    Page,
    /// Make a book of the documents, in target/book, and check its links
    Book,
    /// Build a package of the product, in target/package
    #[command(
        after_help = "Examples:\n  cargo xtask package wheel && pip install target/package/unirdma-*.whl\n  cargo xtask package deb && sudo apt install ./target/package/unirdma_*.deb ./target/package/unirdma-libs_*.deb\n  cargo xtask package tar"
    )]
    Package {
        #[command(subcommand)]
        what: Package,
    },
    /// Measure
    Bench,
    /// The other end of a TCP measurement
    #[command(hide = true)]
    TcpPeer { to: std::net::SocketAddr },
}

#[derive(Subcommand)]
enum Machines {
    /// VFs of a real RNIC, in a virtual machine with four VFs: facts about the kernel, the pool, leases, and
    /// Debian's programs on VFs
    Rnic {
        /// Only the tests whose name contains this
        #[arg(long, value_name = "TEXT")]
        only: Option<String>,
    },
}

#[derive(Subcommand)]
enum Package {
    /// For Python's pip: the program, and fixtures of pytest
    Wheel,
    /// Manual pages, one for each command, in target/package/man
    Man,
    /// For Debian: the program with its service, libraries, control centre, and what virtual machines need
    Deb,
    /// An archive with install.sh, for other distributions
    Tar,
}

#[derive(Subcommand)]
enum Test {
    /// Compare programs' views of their own memory with and without a vRNIC; then run random sequences until the time
    /// is over
    #[command(
        after_help = "Examples:\n  cargo xtask test memory\n  cargo xtask test memory --only memory-fork\n  cargo xtask test memory --only memory-random --seed 1234 --seconds 0"
    )]
    Memory {
        /// Seconds; the current seed is finished
        #[arg(long, value_name = "N", default_value_t = 600)]
        seconds: u64,
        /// The first seed of the random sequences
        #[arg(long, value_name = "S", default_value_t = 1)]
        seed: u64,
        /// Only the tests whose name contains this
        #[arg(long, value_name = "TEXT")]
        only: Option<String>,
    },
    /// Two control centres on one etcd: vRNICs are made while the allocating one is killed, then etcd is stopped, and
    /// killed
    Centres,
}

fn run(command: Command) -> Result<()> {
    match command {
        Command::Demo => demo::run(),
        Command::Test { what: Some(Test::Memory { seconds, seed, only }), .. } => {
            test::memory(seconds, seed, only.as_deref())
        }
        Command::Test { what: None, only } => test::run(only.as_deref()),
        Command::Cluster { hosts } => cluster::run(hosts.into()),
        Command::Vm { what: Some(Machines::Rnic { only }), .. } => test::real_rnic(only.as_deref()),
        Command::Vm { kernel, build: true, .. } => vm::build(kernel.as_deref()),
        Command::Vm { kernel, shell: true, .. } => vm::shell(kernel.as_deref()),
        Command::Vm { kernel, only, conformance: true, .. } => {
            conformance::in_guests(kernel.as_deref(), only.as_deref())
        }
        Command::Vm { kernel, command, only, rounds, .. } if command.is_empty() => {
            test::guests(kernel.as_deref(), only.as_deref(), rounds)
        }
        Command::Vm { kernel, command, .. } => vm::command(kernel.as_deref(), &command.join(" ")),
        Command::Book => {
            println!("{}", book::make()?.display());
            Ok(())
        }
        Command::Package { what } => {
            let made = match what {
                Package::Wheel => vec![package::wheel()?],
                Package::Man => vec![package::man()?],
                Package::Deb => package::deb()?,
                Package::Tar => vec![package::tar()?],
            };
            made.iter().for_each(|file| println!("{}", file.display()));
            Ok(())
        }
        Command::TcpPeer { to } => tcp::peer(to),
        Command::Sim
        | Command::Scale
        | Command::Attack
        | Command::Page
        | Command::Bench
        | Command::Test { what: Some(Test::Centres), .. } => Err("another program does this".into()),
    }
}

fn main() -> ExitCode {
    if let Some(e) = dispatch::exec() {
        eprintln!("xtask: {e}");
        return ExitCode::FAILURE;
    }
    let command = Cli::parse().command;
    // A measurement has started it, and ends it.
    let is_started = matches!(command, Command::TcpPeer { .. });
    let work = || cleanup::exit_code("xtask", run(command));
    if is_started { work() } else { cleanup::guarded("xtask", work) }
}
