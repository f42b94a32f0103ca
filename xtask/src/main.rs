//! `cargo xtask`: the project's own commands. `demo` shows programs, `test` checks everything, `vm` does so in virtual
//! machines, `bench` measures, `attack` tries attacks.
//!
//! Of the workspace it depends on the simulation kit, for `sim`, and on the messages of a fleet, for the hosts of
//! `page`. For everything else it uses the built programs as a user would.

mod attack;
mod bench;
mod centres;
mod cleanup;
mod cluster;
mod conformance;
mod demo;
mod fleet;
mod harness;
mod memory;
mod packages;
mod page;
mod scale;
mod sim;
mod siw;
mod suite;
mod tcp;
mod test;
mod vm;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

type Result<T> = std::result::Result<T, String>;

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
    #[command(
        after_help = "Examples:\n  cargo xtask sim                            seeds 0 to 99\n  cargo xtask sim --seed 1234 --seeds 1      one seed again\n  cargo xtask sim --differ --seeds 5000      the same programs on one host and on two, and nothing else\n  cargo xtask sim --fleet --seeds 1000       hosts, centres and their store, with crashes and partitions"
    )]
    Sim {
        /// The first seed
        #[arg(long, value_name = "S", default_value_t = 0)]
        seed: u64,
        /// How many seeds
        #[arg(long, value_name = "N", default_value_t = 100)]
        seeds: u64,
        /// Steps for each seed: eight requests on one connection, twenty on a fabric of four hosts, a phase of a
        /// program; ten seconds of a fleet
        #[arg(long, value_name = "N", default_value_t = 6)]
        steps: u64,
        /// The simulation of a fleet
        #[arg(long, conflicts_with = "differ")]
        fleet: bool,
        /// Only programs on one host and on two, which must have the same results
        #[arg(long)]
        differ: bool,
    },
    /// Measure a control centre with a thousand hosts and 100,000 vRNICs: time, memory, and bytes for each kind of
    /// change
    Scale(scale::Scale),
    /// Try every known attack, with victims in the attacker's group and in another one: performance of the victims,
    /// survival of processes, and release of resources
    #[command(
        after_help = "Examples:\n  cargo xtask attack                          about 25 minutes\n  cargo xtask attack --list\n  cargo xtask attack --only sigbus --runs 1\n  cargo xtask attack --only guest --runs 1 --seconds 600\n  cargo xtask attack --json > attack.json\n  cargo xtask attack --matrix --runs 1        the published matrices: what is left to victims beside each attacker\n\nAn attack is broken, and the exit code 1, if the virtual layer or a worker of it ends, if programs that begin meanwhile get no device or\nwrong bytes, if a victim waits more than a second for a WRITE, if descriptors, mappings or memory are not given back, or, on four cores and\nmore, if a victim's figure is more than 1.5 times worse than beside an honest busy neighbour (1.2 times in another group than the attacker's).\nOn fewer cores p50 and bandwidth may be 3 times worse (2 times in another group), or 1.2 times worse than beside a program that only
computes, whichever is worse, and p99 counts in another group only, from 1 ms on."
    )]
    Attack {
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
    },
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
        after_help = "Examples:\n  cargo xtask vm                              tests, in guests with two kernels\n  cargo xtask vm --kernel 6.1 --only bw\n  cargo xtask vm --kernel unstable            the newest kernel that Debian has, which is downloaded first\n  cargo xtask vm --rounds 50 --only again     reloads and restarts, 50 times each\n  cargo xtask vm -- ibv_devinfo -v            one command in a guest\n  cargo xtask vm --shell                      a guest's console; `exit` ends the guest\n\nWhat the guests are made of is downloaded once, into target/vm. The guest with a command or a shell has the vRNIC `guest` with\nthe address 10.0.0.1; the vRNIC `peer` beside it has 10.0.0.2 and is for a container."
    )]
    Vm {
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
    #[command(
        after_help = "Examples:\n  cargo xtask page                      all checks; the pictures are in target/page\n  cargo xtask page --stay               a fleet to look at, until interrupted"
    )]
    Page {
        /// Directory of the pictures
        #[arg(long, value_name = "DIR", default_value = "target/page")]
        out: std::path::PathBuf,
        /// Only the checks whose name contains this
        #[arg(long, value_name = "TEXT")]
        only: Option<String>,
        /// Start the fleet, print the address of its page, and check nothing
        #[arg(long, conflicts_with = "only")]
        stay: bool,
        /// Do not build `unirdma` first
        #[arg(long)]
        built: bool,
    },
    /// Measure
    Bench {
        #[command(subcommand)]
        what: Bench,
    },
    /// The other end of a TCP measurement
    #[command(hide = true)]
    TcpPeer { to: std::net::SocketAddr },
    /// Measures TCP against a process in another network namespace
    #[command(hide = true)]
    TcpBench { listen: std::net::SocketAddr, netns: String },
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
    #[command(after_help = "Example:\n  cargo xtask test centres --calls 1000 --seconds 30")]
    Centres {
        /// How many vRNICs
        #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(8..=50_000))]
        calls: u32,
        /// Seconds for which etcd is away, each time
        #[arg(long, value_name = "N", default_value_t = 30)]
        seconds: u64,
    },
}

#[derive(Subcommand)]
enum Bench {
    /// Latency, bandwidth and message rate of this tree and of another commit, measured in turn; with root also between
    /// two hosts
    #[command(
        after_help = "Examples:\n  cargo xtask bench ab main\n  cargo xtask bench ab HEAD~3 --runs 9 --only latency\n  cargo xtask bench ab v0.1 --only wire --json > ab.json\n\nThe other commit is built in target/ab. How far apart two builds of one commit are on this machine: cargo xtask bench ab HEAD"
    )]
    Ab {
        /// The other commit, by any name that git knows
        rev: String,
        /// How many pairs of runs; medians count
        #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
        runs: u32,
        /// Only the figures whose name contains this
        #[arg(long, value_name = "TEXT")]
        only: Option<String>,
        /// Print JSON instead of a table
        #[arg(long)]
        json: bool,
    },
    /// Typical programs, on cores that computing threads use too: their speed relative to TCP and to the limits of the
    /// machine
    #[command(
        after_help = "Examples:\n  cargo xtask bench busy\n  cargo xtask bench busy --only sync --runs 5\n  cargo xtask bench busy --json > busy.json\n\nThe programs are sync, stall, relay-2, relay-3, requests-1 and requests-64. Each is measured beside no threads, one for each core, and\none more, that compute."
    )]
    Busy {
        /// Print JSON instead of a table
        #[arg(long)]
        json: bool,
        /// Only the programs whose name contains this
        #[arg(long, value_name = "TEXT")]
        only: Option<String>,
        /// How often each program is measured; medians count
        #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
        runs: u32,
    },
    /// Latency and bandwidth between two hosts joined by a veth pair, relative to TCP over the same pair, and in one
    /// virtual machine relative to the kernel's soft RDMA devices, rxe and siw; needs root
    #[command(
        after_help = "Examples:\n  cargo xtask bench wire\n  cargo xtask bench wire --only guest\n  cargo xtask bench wire --json > wire.json"
    )]
    Wire {
        /// Print JSON instead of tables
        #[arg(long)]
        json: bool,
        /// Measure only this; may be given more than once: the two hosts, the cost of the invariant CRC, the virtual
        /// machine, the cost of a secret of the group
        #[arg(long, value_name = "PART", value_parser = bench::PARTS)]
        only: Vec<String>,
    },
    /// The RNIC alone: WRITEs between pairs of vRNICs from send queues that are always full, without programs
    #[command(
        after_help = "Examples:\n  cargo xtask bench engine\n  cargo xtask bench engine --runs 5\n  cargo xtask bench engine --json > engine.json"
    )]
    Engine {
        /// How often to run it; medians count
        #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
        runs: u32,
        /// Print JSON instead of a table
        #[arg(long)]
        json: bool,
    },
    /// Latency and bandwidth of two programs beside an honest neighbour, and during attacks by a neighbour; fails if an
    /// attack slows them down more than 1.5 times as much (on four cores and more; limits are coarser on fewer), or
    /// leaves them without an answer. Then, as root, how exactly the limits of a control centre hold
    #[command(
        after_help = "Examples:\n  cargo xtask bench isolation\n  cargo xtask bench isolation --only rnr --runs 5\n  cargo xtask bench isolation --json > isolation.json"
    )]
    Isolation {
        /// Print JSON instead of a table
        #[arg(long)]
        json: bool,
        /// Only the attacks whose name contains this
        #[arg(long, value_name = "TEXT")]
        only: Option<String>,
        /// How often each neighbour is measured; medians count
        #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
        runs: u32,
    },
    /// The cost of each way of an application's memory: programs with threads, MPI, registration, fork
    #[command(after_help = "Examples:\n  cargo xtask bench memory\n  cargo xtask bench memory --json > memory.json")]
    Memory {
        /// Print JSON instead of a table
        #[arg(long)]
        json: bool,
    },
    /// Latency, bandwidth, processor time and events between two containers of this host, relative to TCP loopback and
    /// memcpy
    #[command(
        after_help = "Examples:\n  cargo xtask bench local\n  cargo xtask bench local --json > local.json\n  cargo xtask bench local --svg local.svg"
    )]
    Local {
        /// Print JSON instead of tables
        #[arg(long)]
        json: bool,
        /// Write the plot here
        #[arg(long, value_name = "FILE", default_value = "target/bench-local.svg")]
        svg: std::path::PathBuf,
    },
    /// Operations, bandwidth, registration and notifications of a guest's vRNIC, relative to the kernel's soft RNIC and
    /// TCP in the same guest, and to containers; needs root
    #[command(
        after_help = "Examples:\n  cargo xtask bench vm\n  cargo xtask bench vm --kernel 6.1 --runs 5\n  cargo xtask bench vm --json > vm.json\n\nWhat the guest is made of is downloaded once, into target/vm. QEMU emulates its processors, so ratios within the guest say more than\nthose to containers."
    )]
    Vm {
        /// Print JSON instead of tables
        #[arg(long)]
        json: bool,
        /// Which kernel: 6.12 (Debian 13), 6.1 (Debian 12), or `unstable` for the kernel of Debian's unstable release
        #[arg(long, value_name = "RELEASE")]
        kernel: Option<String>,
        /// How often each figure is measured; medians count
        #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
        runs: u32,
    },
    /// The cost of a worker for each group, the time to replace a killed one, and how busy groups share the cores
    #[command(
        after_help = "Examples:\n  cargo xtask bench workers\n  cargo xtask bench workers --groups 1000 --busy 0\n  cargo xtask bench workers --json > workers.json"
    )]
    Workers {
        /// How many groups of two vRNICs
        #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u16).range(1..))]
        groups: u16,
        /// In how many of them programs are busy, at most all
        #[arg(long, value_name = "N", default_value_t = 100)]
        busy: u16,
        /// Print JSON instead of a table
        #[arg(long)]
        json: bool,
    },
}

fn main() -> ExitCode {
    let command = Cli::parse().command;
    match cleanup::watch() {
        Ok(None) => {}
        Ok(Some(code)) => return code,
        Err(e) => {
            eprintln!("xtask: cannot start itself again, to end what it starts: {e}");
            return ExitCode::FAILURE;
        }
    }
    let result = match command {
        Command::Demo => demo::run(),
        Command::Test { what: Some(Test::Memory { seconds, seed, only }), .. } => {
            memory::run(seconds, seed, only.as_deref())
        }
        Command::Test { what: Some(Test::Centres { calls, seconds }), .. } => test::centres(calls, seconds),
        Command::Test { what: None, only } => test::run(only.as_deref()),
        Command::Sim { seed, seeds, steps, fleet, differ } => {
            let run = match (fleet, differ) {
                (true, _) => sim::run_fleet,
                (_, true) => sim::run_differ,
                _ => sim::run,
            };
            run(seed, seeds, steps);
            Ok(())
        }
        Command::Scale(scale) => scale::run(&scale),
        Command::Attack { list: true, .. } => {
            attack::print_list();
            Ok(())
        }
        Command::Attack { json, only, runs, matrix: true, .. } => attack::matrix::run(json, only.as_deref(), runs),
        Command::Attack { json, only, runs, seconds, .. } => attack::run(json, only.as_deref(), runs, seconds),
        Command::Bench { what: Bench::Local { json, svg } } => bench::local(json, &svg),
        Command::Bench { what: Bench::Ab { rev, runs, only, json } } => bench::ab(&rev, runs, only.as_deref(), json),
        Command::Bench { what: Bench::Busy { json, only, runs } } => bench::busy(json, only.as_deref(), runs),
        Command::Bench { what: Bench::Engine { runs, json } } => bench::engine(runs as usize, json),
        Command::Bench { what: Bench::Isolation { json, only, runs } } => bench::isolation(json, only.as_deref(), runs),
        Command::Bench { what: Bench::Memory { json } } => bench::memory(json),
        Command::Bench { what: Bench::Workers { groups, busy, json } } => {
            bench::workers(json, groups.into(), busy.into())
        }
        Command::Bench { what: Bench::Vm { json, kernel, runs } } => bench::vm(json, kernel.as_deref(), runs),
        Command::Bench { what: Bench::Wire { json, only } } => bench::wire(json, &only),
        Command::Cluster { hosts } => cluster::run(hosts.into()),
        Command::Page { out, only, stay, built } => {
            page::run(&page::Options { out: &out, only: only.as_deref(), stay, built })
        }
        Command::Vm { kernel, build: true, .. } => vm::build(kernel.as_deref()),
        Command::Vm { kernel, shell: true, .. } => vm::shell(kernel.as_deref()),
        Command::Vm { kernel, only, conformance: true, .. } => {
            conformance::in_guests(kernel.as_deref(), only.as_deref())
        }
        Command::Vm { kernel, command, only, rounds, .. } if command.is_empty() => {
            suite::guests(kernel.as_deref(), only.as_deref(), rounds)
        }
        Command::Vm { kernel, command, .. } => vm::command(kernel.as_deref(), &command.join(" ")),
        Command::TcpPeer { to } => tcp::peer(to),
        Command::TcpBench { listen, netns } => bench::tcp(listen, &netns),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("xtask: {e}");
            ExitCode::FAILURE
        }
    }
}
