//! `cargo xtask bench`: figures relative to a peer in the same run.

mod ab;
mod busy;
mod engine;
mod isolation;
mod local;
mod memory;
mod vf;
mod vm;
mod wire;
mod workers;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use harness::{Result, cleanup, tcp};

/// Measure
#[derive(Parser)]
#[command(name = "cargo xtask bench", bin_name = "xtask bench")]
struct Cli {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
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
        #[arg(long, value_name = "PART", value_parser = wire::PARTS)]
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
    /// Latency, bandwidth, processor time and control path of a vRNIC that has a VF, relative to the VF alone, in a
    /// virtual machine; needs root
    #[command(
        after_help = "Examples:\n  cargo xtask bench vf\n  cargo xtask bench vf --runs 5 --json > vf.json\n\nWhat the machine is made of is downloaded once, into target/vm."
    )]
    Vf {
        /// Print JSON instead of a table
        #[arg(long)]
        json: bool,
        /// How often each figure is measured; medians count
        #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
        runs: u32,
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
    /// The other end of a TCP measurement
    #[command(hide = true)]
    TcpPeer { to: std::net::SocketAddr },
    /// Measures TCP against a process in another network namespace
    #[command(hide = true)]
    TcpBench { listen: std::net::SocketAddr, netns: String },
}

fn run(what: What) -> Result<()> {
    match what {
        What::Local { json, svg } => local::local(json, &svg),
        What::Ab { rev, runs, only, json } => ab::ab(&rev, runs, only.as_deref(), json),
        What::Busy { json, only, runs } => busy::busy(json, only.as_deref(), runs),
        What::Engine { runs, json } => engine::engine(runs as usize, json),
        What::Isolation { json, only, runs } => isolation::isolation(json, only.as_deref(), runs),
        What::Memory { json } => memory::memory(json),
        What::Workers { groups, busy, json } => workers::workers(json, groups.into(), busy.into()),
        What::Vf { json, runs } => vf::vf(json, runs),
        What::Vm { json, kernel, runs } => vm::vm(json, kernel.as_deref(), runs),
        What::Wire { json, only } => wire::wire(json, &only),
        What::TcpPeer { to } => tcp::peer(to),
        What::TcpBench { listen, netns } => wire::tcp(listen, &netns),
    }
}

fn main() -> ExitCode {
    let what = Cli::parse().what;
    // These two are started by a measurement, which ends them.
    let is_started = matches!(what, What::TcpPeer { .. } | What::TcpBench { .. });
    let work = || cleanup::exit_code("xtask", run(what));
    if is_started { work() } else { cleanup::guarded("xtask", work) }
}

/// Processor time of a process, and of its children that have ended, in seconds.
fn cpu_times(pid: impl std::fmt::Display) -> (f64, f64) {
    /// Ticks per second.
    const TICKS: f64 = 100.0;
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let after = stat.rsplit(')').next().unwrap_or_default();
    let field = |i: usize| after.split_whitespace().nth(i).and_then(|w| w.parse::<f64>().ok()).unwrap_or(0.0) / TICKS;
    (field(11) + field(12), field(13) + field(14))
}

/// Processor time that processes have used, in seconds.
fn cpu_of(pids: &[i32]) -> f64 {
    pids.iter().map(|pid| cpu_times(pid).0).sum()
}

/// Rows of numbers of a client. Fails unless server and client both succeeded.
fn rows(command: &str, (s, c): (harness::Output, harness::Output)) -> Result<Vec<Vec<f64>>> {
    let rows = harness::rows(&c.text);
    if rows.is_empty() || !s.ok() || !c.ok() {
        return Err(format!("{command} failed:\nserver: {}\nclient: {}", s.text, c.text));
    }
    Ok(rows)
}
