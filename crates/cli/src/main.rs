//! `unirdma`: the command line of the virtual layer.
//!
//! Parses arguments, talks to the administration socket, prints. It must hold no state of its own, and
//! say in one line on standard error what is wrong and what to do; the exit code is then not 0.
//!
//! Without the feature `fleet`, which is on by default, the commands about fleets are left out, and what they need is
//! not built.

#![cfg_attr(not(feature = "fleet"), allow(dead_code))]

mod bind;
mod capture;
mod carried;
mod cdi;
mod check;
mod completion;
mod confine;
mod container;
mod doctor;
mod errors;
mod exec;
#[cfg(feature = "fleet")]
mod fleet;
mod home;
mod host;
mod host_config;
mod idmap;
mod loader;
mod man;
mod masked;
mod mounts;
mod net;
mod output;
mod print;
mod process;
mod sandbox;
mod secret;
mod sysfs;
mod top;
mod units;
mod unnamed;
mod vfs;
mod vm_run;
mod vmm_args;
mod vmm_files;
mod vrnics;
mod wait;
mod with;
mod workdir;

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::process::ExitCode;

use anstyle::AnsiColor;
use clap::{Args, CommandFactory, Parser, Subcommand};
use unirdma_ipc::vrnic::{AddVrnic, IpNet, SetHeld, SetShare, Way};
use unirdma_supervisor::admin::{Request, Response};
use unirdma_supervisor::{Client, default_dir};

/// Virtual RDMA NICs for containers, on machines without RDMA hardware.
#[derive(Parser)]
#[command(name = "unirdma", version, after_help = EXAMPLES)]
struct Cli {
    /// Directory of the virtual layer [default: /run/unirdma as root, else $XDG_RUNTIME_DIR/unirdma]
    #[arg(long, global = true, value_name = "DIR", env = "UNIRDMA_HOST_DIR")]
    dir: Option<PathBuf>,
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "Examples:
  unirdma run -- ib_write_bw                      an unmodified verbs program with a vRNIC of its own
  unirdma with 2 -- pytest                        tests of a project, with a virtual layer of their own
  unirdma host &                                  serve vRNICs on this host
  unirdma vrnic add a --ip 10.0.0.1               make two vRNICs
  unirdma vrnic add b --ip 10.0.0.2
  unirdma run --vrnic a -- ib_write_bw &          a program in the container of a
  unirdma run --vrnic b -- ib_write_bw 10.0.0.1   and its peer
  unirdma exec --vrnic a -- bash                  a second command in the container of a
  unirdma vm run --vrnic b --image disk.qcow2     a virtual machine that has it
  unirdma check                                   whether programs use RDMA, or fell back to TCP
  unirdma vrnic show a --json                     what it did
  unirdma top                                     what all of them do at this moment";

#[derive(Subcommand)]
enum Command {
    /// Serve vRNICs on this host until interrupted
    #[command(after_help = host::EXAMPLES)]
    Host(Box<host::HostArgs>),
    /// Serve the vRNICs of a group. `unirdma host` starts it, without these arguments being parsed, see `main`
    #[command(hide = true)]
    Worker {
        /// The group, so that lists of processes show it
        #[arg(value_name = "GROUP")]
        _group: Option<String>,
    },
    /// Keep what the next `unirdma host` needs if this one is killed. `unirdma host` starts it
    #[command(hide = true)]
    Keeper,
    /// Make, list, show and remove vRNICs
    Vrnic {
        #[command(subcommand)]
        command: VrnicCommand,
    },
    /// Make, list and remove groups: only vRNICs of one group may connect, and each group has a process of its own
    Group {
        #[command(subcommand)]
        command: GroupCommand,
    },
    /// Show the rules by which vRNICs of different groups may talk to each other, or vRNICs of one group may not
    Rule {
        #[command(subcommand)]
        command: RuleCommand,
    },
    /// Make a secret of a group, in a new file that only its owner can read
    #[command(after_help = secret::EXAMPLES, args_conflicts_with_subcommands = true)]
    Secret {
        #[cfg(feature = "fleet")]
        #[command(subcommand)]
        command: Option<fleet::SecretCommand>,
        /// The file, which must not exist yet
        file: Option<PathBuf>,
    },
    /// Run a command with a virtual layer of its own, for tests: nothing is installed, and nothing is left behind
    #[command(after_help = with::EXAMPLES)]
    With(with::WithArgs),
    /// Run a command as a container that has a vRNIC, or several
    #[command(after_help = container::EXAMPLES)]
    Run(container::RunArgs),
    /// Run another command in a vRNIC's container
    #[command(after_help = exec::EXAMPLES)]
    Exec(exec::ExecArgs),
    /// Say whether programs use RDMA: which libibverbs each process has, what went by RDMA and by Ethernet, how
    /// memory is reached
    #[command(after_help = check::EXAMPLES)]
    Check(check::CheckArgs),
    /// Serve container engines, which run this for their containers
    #[command(hide = true)]
    Cdi {
        #[command(subcommand)]
        command: cdi::CdiCommand,
    },
    /// Say whether this machine has what uniRDMA needs, and what to do about what it lacks
    #[command(after_help = doctor::EXAMPLES)]
    Doctor(doctor::DoctorArgs),
    /// Start a virtual machine that has a vRNIC
    Vm {
        #[command(subcommand)]
        command: vm_run::VmCommand,
    },
    /// Show the VFs of this host's real RNICs, and take them out of use
    Vf {
        #[command(subcommand)]
        command: vfs::VfCommand,
    },
    /// Capture packets, also those that never left this host, until interrupted
    #[command(after_help = capture::EXAMPLES)]
    Capture(capture::CaptureArgs),
    /// Show the present activity of vRNICs: a table that is refreshed, or one for scripts
    #[command(after_help = top::EXAMPLES)]
    Top(top::TopArgs),
    /// Show the virtual layer itself: its processes, their confinement, its network
    Status {
        #[command(flatten)]
        out: Out,
    },
    /// Print a script that completes commands and names in a shell
    #[command(after_help = completion::EXAMPLES)]
    Completion(completion::CompletionArgs),
    /// Write the manual pages into a directory
    #[command(hide = true)]
    Man {
        /// The directory, which is made if it does not exist
        dir: PathBuf,
    },
    #[cfg(feature = "fleet")]
    #[command(flatten)]
    Fleet(fleet::FleetCommand),
}

#[derive(Args)]
struct Out {
    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
    /// Print only the names of what is listed or shown, and nothing about a change
    #[arg(long, short, conflicts_with = "json")]
    quiet: bool,
}

#[derive(Subcommand)]
enum VrnicCommand {
    /// Make a vRNIC
    #[command(
        after_help = "Examples:\n  unirdma vrnic add a                                  the next free 10.77.x.y in group `default`\n  unirdma vrnic add b --ip 10.0.0.2 --ip fd00::2 --group blue\n  unirdma vrnic add r --ip 10.0.0.254 --allow-spoof    a router: its eth0 sends with the addresses of others\n  unirdma vrnic add c --group blue --way vf            its programs have a VF of this host's real RNIC (docs/user/real-rnic.md)\n\nWhat a container sends by eth0 must have addresses of its vRNIC; other frames are refused, and counted in `vrnic show`."
    )]
    Add(AddArgs),
    /// Change a vRNIC's weight, limits or permissions while its programs run
    #[command(
        after_help = "Examples:\n  unirdma vrnic set a --weight 300            three times the time of a vRNIC of its group with the default weight, when both want it\n  unirdma vrnic set a --rate 10G --ops 2M     at most 10 Gbit/s and 2 million requests a second\n  unirdma vrnic set a --rate none             as fast as it can again\n  unirdma vrnic set r --allow-spoof on        `r` routes for others, so it sends with their addresses\n  unirdma vrnic set a --max-mappings 1000     its programs' memory takes at most 1,000 mappings of the virtual layer"
    )]
    Set {
        /// Name of the vRNIC
        name: String,
        /// Whether its eth0 may send with any IP address, answer ARP for any, and advertise routes
        #[arg(long, value_name = "on|off")]
        allow_spoof: Option<Switched>,
        #[command(flatten)]
        share: ShareArgs,
        #[command(flatten)]
        held: HeldArgs,
        #[command(flatten)]
        out: Out,
    },
    /// List vRNICs
    #[command(
        visible_alias = "list",
        after_help = "Examples:\n  unirdma vrnic ls\n  unirdma vrnic ls --group blue\n  unirdma vrnic rm $(unirdma vrnic ls --group blue -q)"
    )]
    Ls {
        /// Only the vRNICs of this group
        #[arg(long)]
        group: Option<String>,
        #[command(flatten)]
        out: Out,
    },
    /// Show vRNICs, all if none is named: addresses, objects, counters; or the arguments to start a virtual machine
    /// with one
    #[command(
        after_help = "Examples:\n  unirdma vrnic show a\n  unirdma vrnic show a --json\n  unirdma vrnic show a b                         two of them; with --json a list\n  unirdma vm preload name.so                     # QEMU has no name for this kind of device, and wants one\n  LD_PRELOAD=./name.so qemu-system-x86_64 -enable-kvm $(unirdma vrnic show a --qemu --memory 4G) disk.qcow2\n  unirdma vrnic show a --libvirt=domain --memory 4G >a.xml\n\n`unirdma vm run` does the two in one step. The virtual machine needs a driver in its kernel and a provider for its rdma-core: see docs/user/virtual-machines.md.\nQEMU 11.1 and later have the device that this takes."
    )]
    Show {
        /// Names of the vRNICs
        #[arg(value_name = "NAME")]
        names: Vec<String>,
        #[command(flatten)]
        vmm: vmm_args::VmmArgs,
        /// The virtual machine's memory, as the VMM takes it
        #[arg(long, default_value = "2G", value_name = "SIZE")]
        memory: String,
        #[command(flatten)]
        out: Out,
    },
    /// Wait until vRNICs exist, are in use or free, or are gone
    #[command(after_help = wait::EXAMPLES)]
    Wait(wait::WaitArgs),
    /// Set the link of a vRNIC up or down: its programs see it as a cable that is plugged in or pulled out
    #[command(
        after_help = "Examples:\n  unirdma vrnic link a down    connections of `a` retry, and fail if it stays down\n  unirdma vrnic link a up"
    )]
    Link {
        /// Name of the vRNIC
        name: String,
        /// The new state of its link
        state: LinkState,
        #[command(flatten)]
        out: Out,
    },
    /// Give a vRNIC an address, or take one away, while its programs run
    Ip {
        #[command(subcommand)]
        command: IpCommand,
    },
    /// Move a vRNIC of a fleet, which no program uses, to another host; it keeps its addresses
    #[cfg(feature = "fleet")]
    #[command(after_help = "Example:\n  unirdma vrnic move a h2")]
    Move {
        /// Name of the vRNIC
        name: String,
        /// Name of the host
        host: String,
        #[command(flatten)]
        centre: fleet::Centre,
    },
    /// Remove vRNICs
    #[command(
        visible_alias = "del",
        after_help = "Examples:\n  unirdma vrnic rm a\n  unirdma vrnic rm $(unirdma vrnic ls -q)    all that no program uses"
    )]
    Rm {
        /// Names of the vRNICs
        #[arg(required = true, value_name = "NAME")]
        names: Vec<String>,
        /// Also if it is in use: its programs lose their device
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        out: Out,
    },
}

#[derive(Args)]
struct ShareArgs {
    /// Share of its group's worker, relative to the weights of the group's other vRNICs, while they want it too
    /// [default: 100]
    #[arg(long, value_name = "1-10000", value_parser = clap::value_parser!(u32).range(1..=i64::from(unirdma_ipc::vrnic::MAX_WEIGHT)))]
    weight: Option<u32>,
    /// Most bits a second that its programs send, with K, M, G or T, as 2.5G or 100Mbit/s, or `none` [default: none]
    #[arg(long, value_name = "BITS", value_parser = units::bits)]
    rate: Option<u64>,
    /// Most work requests a second that its programs begin, with K, M or G, or `none` [default: none]
    #[arg(long, value_name = "N", value_parser = units::rate)]
    ops: Option<u64>,
    /// How far ahead of --rate and --ops it may be after a pause, with us, ms or s [default: 10ms]
    #[arg(long, value_name = "TIME", value_parser = units::micros)]
    burst: Option<u64>,
}

impl ShareArgs {
    fn set(self) -> SetShare {
        SetShare { weight: self.weight, rate_bps: self.rate, ops: self.ops, burst_us: self.burst }
    }
}

#[derive(Args)]
struct AddArgs {
    /// Name: 1 to 32 letters, digits, `_`, `.`, `-`
    name: String,
    /// Virtual address, IPv4 or IPv6, with an optional prefix length; may be given more than once
    #[arg(long, value_name = "IP[/PREFIX]")]
    ip: Vec<IpNet>,
    /// Group [default: default]
    #[arg(long)]
    group: Option<String>,
    /// Most queue pairs
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_qp: Option<u32>,
    /// Most completion queues
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_cq: Option<u32>,
    /// Most memory regions and memory windows together
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_mr: Option<u32>,
    /// Most bytes of registered memory, all memory regions together
    #[arg(long, value_name = "BYTES")]
    max_mr_bytes: Option<u64>,
    /// Most programs that use it at a time
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_sessions: Option<u32>,
    /// Its eth0 may send with any IP address, answer ARP for any, and advertise routes: for routers and proxies only
    #[arg(long)]
    allow_spoof: bool,
    /// Way of its programs' data: the software RNIC, or a VF of this host's real RNIC. `auto` is a VF if the pool
    /// serves its group
    #[arg(long, value_enum, default_value_t = WayArg::Soft)]
    way: WayArg,
    /// vRNICs with the same instance may share a VF, for instance in one container [default: its own name]
    #[arg(long, value_name = "NAME")]
    instance: Option<String>,
    #[command(flatten)]
    share: ShareArgs,
    #[command(flatten)]
    held: HeldArgs,
    #[command(flatten)]
    out: Out,
}

#[derive(Clone, Copy, PartialEq, clap::ValueEnum)]
enum WayArg {
    Soft,
    Vf,
    Auto,
}

impl From<WayArg> for Way {
    fn from(way: WayArg) -> Way {
        match way {
            WayArg::Soft => Way::Soft,
            WayArg::Vf => Way::Vf,
            WayArg::Auto => Way::Auto,
        }
    }
}

impl AddArgs {
    fn request(self) -> (AddVrnic, Out) {
        let add = AddVrnic {
            name: self.name,
            ips: self.ip,
            group: self.group,
            max_qp: self.max_qp,
            max_cq: self.max_cq,
            max_mr: self.max_mr,
            max_mr_bytes: self.max_mr_bytes,
            max_sessions: self.max_sessions,
            allow_spoof: self.allow_spoof,
            way: self.way.into(),
            instance: self.instance,
            share: self.share.set(),
            held: self.held.set(),
        };
        (add, self.out)
    }
}

#[derive(Args)]
struct HeldArgs {
    /// Most descriptors that its programs make their group's worker hold, or `none` [default: none, which means half of
    /// what the group's other vRNICs leave, also for the limits below]
    #[arg(long, value_name = "N", value_parser = units::most)]
    max_descriptors: Option<u64>,
    /// Most mappings of memory files
    #[arg(long, value_name = "N", value_parser = units::most)]
    max_mappings: Option<u64>,
    /// Most bytes of addresses that these mappings take
    #[arg(long, value_name = "BYTES", value_parser = units::most)]
    max_address_space: Option<u64>,
    /// Most pieces of MRs that are page lists of more than 512 pieces, which are kept as lists and not mapped
    #[arg(long, value_name = "N", value_parser = units::most)]
    max_pieces: Option<u64>,
    /// Most bytes of pages that transfers make in sparse memory files of its programs; a program that needs more loses
    /// its device. It may be more than half of what the others leave
    #[arg(long, value_name = "BYTES", value_parser = units::most)]
    max_filled: Option<u64>,
}

impl HeldArgs {
    fn set(self) -> SetHeld {
        SetHeld {
            max_descriptors: self.max_descriptors,
            max_mappings: self.max_mappings,
            max_address_space: self.max_address_space,
            max_pieces: self.max_pieces,
            max_filled: self.max_filled,
        }
    }
}

#[derive(Clone, Copy, PartialEq, clap::ValueEnum)]
enum Switched {
    On,
    Off,
}

#[derive(Clone, Copy, PartialEq, clap::ValueEnum)]
enum LinkState {
    Up,
    Down,
}

#[derive(Subcommand)]
enum IpCommand {
    /// Give it an address: its programs are told of the new GID
    #[command(
        after_help = "Example:\n  unirdma vrnic ip add a fd00::7/64\n\nThe interface of a container that runs already is its own: there, add the address with `ip addr add` too."
    )]
    Add(IpArgs),
    /// Take an address away: connections that use it break, and its place in the GID table becomes empty
    #[command(after_help = "Example:\n  unirdma vrnic ip rm a fd00::7")]
    Rm(IpArgs),
}

#[derive(Args)]
struct IpArgs {
    /// Name of the vRNIC
    name: String,
    /// Virtual address, IPv4 or IPv6, with an optional prefix length
    #[arg(value_name = "IP[/PREFIX]")]
    ip: IpNet,
    #[command(flatten)]
    out: Out,
}

#[derive(Subcommand)]
enum RuleCommand {
    /// List the rules that are in force on this host
    #[command(
        visible_alias = "list",
        after_help = "Example:\n  unirdma rule ls --json\n\nRules are lines of the peers file (unirdma host --address IP --peers FILE):\n  rule allow from group:blue to group:default both\n  rule deny from vrnic:blue/10.0.0.7 to group:default priority 10\nWithout a rule vRNICs of one group may talk to each other, and those of different groups may not. docs/rules.md has the details."
    )]
    Ls {
        #[command(flatten)]
        out: Out,
    },
}

#[derive(Subcommand)]
enum GroupCommand {
    /// Make a group
    #[command(
        after_help = "Examples:\n  unirdma group add blue\n  unirdma group add blue --weight 300\n  unirdma group add blue --secret blue.secret    packets between hosts are sealed (`unirdma secret blue.secret` makes one)\n  unirdma group add blue --vlan 100       its vRNICs may have VFs of real RNICs, in this VLAN"
    )]
    Add {
        /// Name: 1 to 32 letters, digits, `_`, `.`, `-`
        name: String,
        /// Share of the processors that its worker gets where they are scarce, 1 to 10,000; `unirdma group ls` says
        /// whether it has an effect
        #[arg(long, value_name = "W", default_value_t = 100)]
        weight: u32,
        /// File with a secret that all hosts of the group have: packets between them are encrypted, and others are
        /// dropped
        #[arg(long, value_name = "FILE")]
        secret: Option<PathBuf>,
        /// VLAN that keeps it apart on VFs of real RNICs, 1 to 4094; 0: none
        #[arg(long, value_name = "N")]
        vlan: Option<u16>,
        #[command(flatten)]
        out: Out,
    },
    /// Change a group while programs run
    #[command(
        after_help = "Examples:\n  unirdma group set blue --weight 300     three times the processor time of a group with the default weight, when both want it\n  unirdma group set blue --secret new.secret   sends with a new secret to hosts that have it, too; takes the one before it on\n  unirdma group set blue --forget-old     takes the current secret only, once all hosts have it\n  unirdma group set blue --secret none    no secret any more\n  unirdma group set blue --vlan 100       the VLAN of the VFs that its vRNICs get from now on\n  unirdma group set blue --with red --secret pair.secret    seals packets between the two groups, which a rule joins"
    )]
    Set {
        /// Name of the group
        name: String,
        /// Share of the processors that its worker gets where they are scarce, 1 to 10,000
        #[arg(long, value_name = "W")]
        weight: Option<u32>,
        /// The secret is for packets between the group and this other one, which a rule joins with it. All hosts of
        /// both groups need it
        #[arg(long, value_name = "GROUP")]
        with: Option<String>,
        /// File with a new secret, which the hosts of the group may be given one after the other, or `none`
        #[arg(long, value_name = "FILE|none", conflicts_with = "forget_old")]
        secret: Option<PathBuf>,
        /// Accept no secret but the current one any more
        #[arg(long)]
        forget_old: bool,
        /// VLAN that keeps it apart on VFs of real RNICs, 1 to 4094; 0: none. Programs that have a VF keep its VLAN
        #[arg(long, value_name = "N")]
        vlan: Option<u16>,
        #[command(flatten)]
        out: Out,
    },
    /// List groups, their weights, and the number (VNI) that each has between hosts
    #[command(visible_alias = "list")]
    Ls {
        #[command(flatten)]
        out: Out,
    },
    /// Remove a group that has no vRNICs
    #[command(visible_alias = "del")]
    Rm {
        /// Name of the group
        name: String,
        #[command(flatten)]
        out: Out,
    },
}

fn main() -> ExitCode {
    if cfg!(panic = "unwind") {
        abort_on_panics();
    }
    // `unirdma host` starts these two. They use no parser, which would leave the text of `--help` in the memory of each
    // worker.
    match std::env::args_os().nth(1).as_deref().and_then(OsStr::to_str) {
        Some("worker") => ended(host::worker().map(|()| 0)),
        Some("keeper") => ended(host::keeper().map(|()| 0)),
        _ => {
            completion::answer(Cli::command);
            ended(command(host_config::parse()))
        }
    }
}

/// Ends the process when a thread panics, as release builds do, so that nothing that the thread left half done is
/// served.
fn abort_on_panics() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        report(info);
        std::process::abort();
    }));
}

fn ended(result: io::Result<u8>) -> ExitCode {
    match result {
        Ok(code) => ExitCode::from(code),
        Err(e) => ExitCode::from(report(&e)),
    }
}

/// Prints an error. Returns the exit code.
fn report(e: &io::Error) -> u8 {
    anstream::eprintln!("{} {}", print::coloured(AnsiColor::Red, "unirdma:"), errors::plain(&e.to_string()));
    1
}

fn command(cli: Cli) -> io::Result<u8> {
    let dir = cli.dir.unwrap_or_else(default_dir);
    // Containers and their programs may change directory.
    let dir = std::path::absolute(&dir).unwrap_or(dir);
    match cli.command {
        Command::Host(args) => host::host(dir, &args).map(|()| 0),
        Command::Worker { .. } => host::worker().map(|()| 0),
        Command::Keeper => host::keeper().map(|()| 0),
        Command::Run(args) => container::run(&dir, &args),
        Command::With(args) => with::with(&args),
        Command::Exec(args) => exec::exec(&dir, &args),
        Command::Check(args) => check::check(&dir, &args),
        Command::Cdi { command } => cdi::run(&dir, &command),
        Command::Doctor(args) => doctor::doctor(&dir, &args),
        Command::Vm { command } => vm_run::vm(&dir, command),
        Command::Vrnic { command } => vrnic(&dir, command),
        Command::Group { command } => group(&dir, command),
        Command::Rule { command: RuleCommand::Ls { out } } => ask(&dir, &Request::RuleList, &out),
        #[cfg(feature = "fleet")]
        Command::Secret { command: Some(command), .. } => fleet::secret(command),
        Command::Secret { file, .. } => secret::make(file.as_deref()).map(|()| 0),
        Command::Vf { command } => vfs::vf(&dir, command),
        Command::Capture(args) => capture::run(&dir, &args).map(|()| 0),
        Command::Top(args) => top::run(&dir, args).map(|()| 0),
        Command::Status { out } => ask(&dir, &Request::Status, &out),
        Command::Completion(args) => completion::print(&args).map(|()| 0),
        Command::Man { dir } => man::write(Cli::command(), &dir).map(|()| 0),
        #[cfg(feature = "fleet")]
        Command::Fleet(command) => fleet::run(command),
    }
}

fn vrnic(dir: &std::path::Path, command: VrnicCommand) -> io::Result<u8> {
    match command {
        VrnicCommand::Add(args) => {
            let (add, out) = args.request();
            ask(dir, &Request::VrnicAdd(add), &out)
        }
        VrnicCommand::Set { name, allow_spoof, share, held, out } => {
            let allow_spoof = allow_spoof.map(|s| s == Switched::On);
            ask(dir, &Request::VrnicSet { name, share: share.set(), allow_spoof, held: held.set() }, &out)
        }
        VrnicCommand::Ls { group, out } => list(dir, group.as_deref(), &out),
        VrnicCommand::Show { names, vmm, memory, out } => show(dir, names, &vmm, &memory, &out),
        VrnicCommand::Wait(args) => wait::wait(dir, &args),
        VrnicCommand::Link { name, state, out } => {
            ask(dir, &Request::VrnicLink { name, up: state == LinkState::Up }, &out)
        }
        VrnicCommand::Ip { command } => {
            let (IpArgs { name, ip, out }, add) = match command {
                IpCommand::Add(args) => (args, true),
                IpCommand::Rm(args) => (args, false),
            };
            ask(dir, &Request::VrnicAddress { name, ip, add }, &out)
        }
        #[cfg(feature = "fleet")]
        VrnicCommand::Move { name, host, centre } => fleet::move_vrnic(name, host, &centre),
        VrnicCommand::Rm { names, force, out } => remove(dir, names, force, &out),
    }
}

/// Lists the vRNICs of a group, or all.
fn list(dir: &std::path::Path, group: Option<&str>, out: &Out) -> io::Result<u8> {
    let mut client = Client::connect(dir)?;
    let mut listed = client.ask(&Request::VrnicList, None)?;
    if let (Some(group), Response::Vrnics(all)) = (group, &mut listed) {
        all.retain(|v| v.group == group);
        if all.is_empty() {
            let groups = vrnics::all_names(&mut client)?.groups;
            if !groups.iter().any(|g| g == group) {
                return Err(io::Error::other(format!("there is no group {group} (there are: {})", groups.join(", "))));
            }
        }
    }
    print::response(&listed, out)?;
    Ok(0)
}

/// Shows these vRNICs, or all. Those that are missing are reported, and the others are shown.
fn show(dir: &std::path::Path, names: Vec<String>, vmm: &vmm_args::VmmArgs, memory: &str, out: &Out) -> io::Result<u8> {
    let mut client = Client::connect(dir)?;
    if vmm.is_asked() {
        let [name] = names.as_slice() else {
            return Err(io::Error::other("arguments of a virtual machine are those of one vRNIC: name it"));
        };
        let shown = vrnics::show(&mut client, name)?;
        return print::line(&vmm.text(dir, &shown, memory)?.unwrap_or_default()).map(|()| 0);
    }
    // JSON of one that was named is an object, else it is a list.
    let one = names.len() == 1;
    let names = if names.is_empty() { vrnics::names(&mut client)? } else { names };
    let (mut found, mut code) = (Vec::new(), 0);
    for name in &names {
        match vrnics::show(&mut client, name) {
            Ok(shown) => found.push(shown),
            Err(e) => code = report(&e),
        }
    }
    if !(one && found.is_empty()) {
        print::vrnics(&found, one, out)?;
    }
    Ok(code)
}

/// Removes these vRNICs. Those that cannot be removed are reported, and the others are removed.
fn remove(dir: &std::path::Path, names: Vec<String>, force: bool, out: &Out) -> io::Result<u8> {
    let mut client = Client::connect(dir)?;
    let mut code = 0;
    for name in names {
        if let Err(e) = client.ask(&Request::VrnicRemove { name, force }, None) {
            code = report(&e);
        }
    }
    if code == 0 {
        print::response(&Response::Done, out)?;
    }
    Ok(code)
}

fn group(dir: &std::path::Path, command: GroupCommand) -> io::Result<u8> {
    match command {
        GroupCommand::Add { name, weight, secret, vlan, out } => {
            let file = secret.as_deref().map(secret::open).transpose()?;
            let request = Request::GroupAdd { name, weight: Some(weight), secret: file.is_some(), vlan };
            ask_with(dir, &request, file.as_ref().map(AsFd::as_fd), &out)
        }
        GroupCommand::Set { name, weight, with, secret, forget_old, vlan, out } => {
            let (change, file) = secret::change(secret.as_deref(), forget_old)?;
            let request = Request::GroupSet { name, weight, with, secret: change, vlan };
            ask_with(dir, &request, file.as_ref().map(AsFd::as_fd), &out)
        }
        GroupCommand::Ls { out } => ask(dir, &Request::GroupList, &out),
        GroupCommand::Rm { name, out } => ask(dir, &Request::GroupRemove { name }, &out),
    }
}

fn ask(dir: &std::path::Path, request: &Request, out: &Out) -> io::Result<u8> {
    ask_with(dir, request, None, out)
}

/// Sends a request with a descriptor, and prints the answer.
fn ask_with(dir: &std::path::Path, request: &Request, fd: Option<BorrowedFd<'_>>, out: &Out) -> io::Result<u8> {
    let response: Response = Client::connect(dir)?.ask(request, fd)?;
    print::response(&response, out)?;
    Ok(0)
}

#[cfg(all(test, feature = "fleet"))]
mod tests {
    use super::*;

    #[test]
    fn each_command_has_one_meaning() {
        // Checks, among others, that no name stands for two commands.
        Cli::command().debug_assert();
        let secret =
            |args: &[&str]| Cli::try_parse_from([&["unirdma", "secret"], args].concat()).map(|cli| cli.command);
        assert!(matches!(secret(&["blue.secret"]), Ok(Command::Secret { command: None, file: Some(_) })));
        assert!(matches!(secret(&["rotate", "blue"]), Ok(Command::Secret { command: Some(_), file: None })));
    }

    /// The help of a command and of those below it, as a document.
    fn reference(command: &mut clap::Command, text: &mut String) {
        let depth = if text.is_empty() { "#" } else { "##" };
        let help = command.render_help().to_string();
        let lines: Vec<&str> = help.lines().map(str::trim_end).collect();
        let name = command.get_bin_name().unwrap_or(command.get_name()).to_owned();
        *text += &format!("{depth} {name}\n\n```text\n{}\n```\n\n", lines.join("\n"));
        command.get_subcommands_mut().filter(|c| !c.is_hide_set()).for_each(|c| reference(c, text));
    }

    /// Commands, with no text of this machine's environment.
    fn without_values(command: clap::Command) -> clap::Command {
        command.mut_args(|arg| arg.hide_env_values(true)).mut_subcommands(without_values)
    }

    /// `OVERWRITE=1 cargo test -p unirdma-cli reference` writes it anew.
    #[test]
    fn the_reference_is_the_help_of_all_commands() {
        let mut commands = without_values(Cli::command()).disable_help_subcommand(true);
        commands.build();
        let mut text = String::new();
        reference(&mut commands, &mut text);
        let text = text.trim_end().to_owned() + "\n";
        let file = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/cli.md");
        if std::env::var_os("OVERWRITE").is_some() {
            std::fs::write(&file, &text).unwrap();
        }
        let written = std::fs::read_to_string(&file).unwrap_or_default();
        assert!(written == text, "docs/cli.md is not what --help says: OVERWRITE=1 writes it anew");
    }

    #[test]
    fn completed_arguments_exist() {
        let mut commands = Cli::command();
        commands.build();
        for (argument, exists) in completion::known(&commands) {
            assert!(exists, "{argument}");
        }
    }
}
