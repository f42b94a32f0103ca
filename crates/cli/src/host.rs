//! `unirdma host`.

use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use clap::Args;
use unirdma_ipc::config::{EngineConfig, Polling};
use unirdma_supervisor::cdi::{self, Cdi};
use unirdma_supervisor::{
    CentreConfig, DEFAULT_METRICS_VRNICS, HostConfig, Isolation, MAX_METRICS_VRNICS, MetricsConfig, WireConfig,
    default_dir, default_state, firewall_rules, keep, serve,
};
use unirdma_worker::{Alone, work};

use crate::confine;
use crate::errors::{self, context};
use crate::process;
use crate::vfs::VfArgs;

pub(crate) const EXAMPLES: &str = "Examples:
  unirdma host                                           vRNICs of this host only
  unirdma host --polling dedicated --pollers 1-4         one core for nothing but RDMA, and up to four under load
  unirdma host --address 192.168.7.1 --peers peers.txt   and of other hosts, by RoCEv2 (UDP port 4791)
  unirdma host --address 192.168.7.1 --peers peers.txt --firewall         and no other user of this host may pretend to be it
  unirdma host --address 192.168.7.1 --peers peers.txt --firewall=print   the rules for that
  unirdma host --address 192.168.7.1 --centre https://192.168.7.100:7471 --join TOKEN     of a fleet; later starts need no --join
  unirdma host --user rdma                               as root: workers run as the user `rdma`
  unirdma host --vf-pf ens1f0,vfs=8,vlan,10.50.0.10/24   as root: a pool of 8 VFs of a real RNIC, see `unirdma vf ls`
  unirdma host --cdi /etc/cdi                            podman, docker and containerd find the vRNICs there
  unirdma host --metrics 127.0.0.1:9751                  metrics for Prometheus at http://127.0.0.1:9751/metrics
  unirdma host --print-config > host.toml                a file with all options, to be edited
  unirdma host --config host.toml                        with the options of that file

Each group has a worker, a process of its own, which is started anew if it dies (see `unirdma status`). If `unirdma host` itself is killed, the
workers serve on, and the next `unirdma host` with the same directory takes them over. Ctrl-C and SIGTERM end all of them.

The peers file has a line for each vRNIC of another host: its virtual address, its group, its host's address:
  10.0.0.2      default  192.168.7.2
  192.168.7.9   default  192.168.7.9  foreign    # a plain RoCEv2 device, for instance the kernel's rxe
and may have the number that a group has between hosts (VNI), which is else given out by the order of names:
  group blue vni 42
and rules by which groups may talk to each other, also on one host (then with --address 127.0.0.1):
  rule allow from group:blue to group:default both
One file can serve all hosts: lines about a host itself say nothing to it, but to groups that a rule joins with theirs. `unirdma status` says who disagrees.

A foreign peer knows a vRNIC by its GID, so give that vRNIC this host's own address: vrnic add x --ip 192.168.7.1";

#[derive(Args)]
pub(crate) struct HostArgs {
    /// Read options from this file (TOML): each key is the name of an option without its dashes. Options of the command
    /// line and the environment win over the file
    #[arg(long = "config", id = "config", value_name = "FILE")]
    _config: Option<PathBuf>,
    /// Print all options with their values as such a file, and end
    #[arg(long = "print-config", id = "print_config")]
    _print_config: bool,
    /// Polling threads of each group, or fewest and most: more than the fewest come and go with the load [default: one
    /// for each core if they share them, else 1 to half as many as cores]
    #[arg(long, value_name = "N[-MOST]", value_parser = parse_pollers)]
    pollers: Option<(usize, usize)>,
    /// Whether polling threads share their cores with programs: auto (they do on up to 3 cores), shared (one for each
    /// core, which sleeps while it has nothing to do) or dedicated (they have cores for themselves, and spin)
    #[arg(long, value_name = "HOW", default_value = "auto", value_parser = ["auto", "shared", "dedicated"])]
    polling: String,
    /// How long a vRNIC is polled after its last doorbell before it must wake the host, in microseconds
    #[arg(long, value_name = "US", default_value_t = 500, value_parser = clap::value_parser!(u64).range(0..=1_000_000))]
    spin_us: u64,
    /// Serve other hosts too: the file that says which virtual addresses live where, read again when it changes
    #[arg(long, value_name = "FILE", requires = "address", group = "others")]
    peers: Option<PathBuf>,
    /// Join the fleet of this control centre, which says what vRNICs this host has and where the vRNICs of other hosts
    /// are. Several centres of the fleet with commas between them: if one is away the next one is asked
    #[arg(long, value_name = "https://ADDR:PORT[,...]", requires = "address", group = "others")]
    centre: Option<String>,
    /// The token by which this host joins the fleet; it is needed once
    #[arg(long, value_name = "TOKEN", requires = "centre", env = "UNIRDMA_JOIN", hide_env_values = true)]
    join: Option<String>,
    /// This host's name in the fleet [default: the machine's name]
    #[arg(long, value_name = "HOST", requires = "centre")]
    name: Option<String>,
    /// Where this host keeps its key, its certificate and what the control centre has said [default: /var/lib/unirdma
    /// for root, else $XDG_STATE_HOME/unirdma]
    #[arg(long, value_name = "DIR", requires = "centre")]
    state: Option<PathBuf>,
    /// This host's address on the network to other hosts; once for IPv4, once for IPv6. Hosts of a centre that both
    /// have both use IPv4
    #[arg(long, value_name = "IP", requires = "others")]
    address: Vec<IpAddr>,
    /// Largest path MTU to other hosts, in bytes: 256, 512, 1024, 2048 or 4096 [default: what the interface takes]
    #[arg(long, value_name = "BYTES", requires = "others", value_parser = ["256", "512", "1024", "2048", "4096"])]
    mtu: Option<String>,
    /// Congestion control of connections: slow down after losses and ECN marks as DCQCN does, or never
    #[arg(long, value_name = "HOW", requires = "others", default_value = "dcqcn", value_parser = ["dcqcn", "off"])]
    congestion_control: String,
    /// Check the invariant CRC of plain devices' IPv4 packets with their IP headers, all 32 bits of it, not 16; slower,
    /// and only for root (CAP_NET_RAW) on Linux 6.2 or later
    #[arg(long, requires = "others")]
    full_icrc: bool,
    /// Let nobody but the virtual layer send from this host's address to other hosts as RoCEv2 and VXLAN do, by rules
    /// of nftables that are removed at the end (root); `print` shows the rules and ends, for every user
    #[arg(long, value_name = "HOW", requires = "others", num_args = 0..=1, require_equals = true, default_missing_value = "on", value_parser = ["on", "print"])]
    firewall: Option<String>,
    /// The user that workers, the processes that serve groups, run as; for root only [default: unirdma if there is such
    /// a user, else nobody]
    #[arg(long, value_name = "NAME")]
    user: Option<String>,
    /// The users of this group may use the virtual layer as its own user may: make and remove vRNICs, run programs with
    /// them, capture their packets
    #[arg(long, value_name = "NAME")]
    admin_group: Option<String>,
    /// Serve metrics for Prometheus at http://ADDR:PORT/metrics. Anyone who can connect can read the names and the
    /// activity of groups and vRNICs
    #[arg(long, value_name = "ADDR:PORT")]
    metrics: Option<SocketAddr>,
    /// Most vRNICs that have metrics of their own, up to 20,000; all are in the sums of their groups
    #[arg(long, value_name = "N", requires = "metrics", default_value_t = DEFAULT_METRICS_VRNICS as u64,
          value_parser = clap::value_parser!(u64).range(0..=MAX_METRICS_VRNICS as u64))]
    metrics_vrnics: u64,
    #[command(flatten)]
    vfs: VfArgs,
    /// Directory with files (CDI) by which podman, docker and containerd find the vRNICs, or `off` [default:
    /// /var/run/cdi if root serves the default directory, else off]
    #[arg(long, value_name = "DIR|off")]
    cdi: Option<PathBuf>,
    /// End with the last vRNIC. `unirdma run` starts such a virtual layer if there is none
    #[arg(long, hide = true)]
    ends_unused: bool,
    /// Neither make nor check the invariant CRC; for measurements only, with the same at the peer
    #[arg(long, hide = true, requires = "others", conflicts_with = "full_icrc")]
    no_icrc: bool,
    /// Percent of incoming packets to lose, to double and to reorder; for tests only
    #[arg(long, value_name = "PERCENT", hide = true, requires = "others", value_parser = clap::value_parser!(u64).range(0..=50))]
    faults: Option<u64>,
    /// Fixes the random numbers that QPNs and keys are made of; for tests only
    #[arg(long, value_name = "N", hide = true)]
    seed: Option<u64>,
}

/// A text that is no number of pollers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("give a number of threads from 1 to 256, or fewest and most of them: 4, or 1-4")]
struct PollersError;

/// Reads `4` or `1-4`.
fn parse_pollers(text: &str) -> Result<(usize, usize), PollersError> {
    let (fewest, most) = text.split_once('-').unwrap_or((text, text));
    let number = |n: &str| n.parse().ok().filter(|n| (1..=256).contains(n));
    match (number(fewest), number(most)) {
        (Some(fewest), Some(most)) if fewest <= most => Ok((fewest, most)),
        _ => Err(PollersError),
    }
}

/// Blocks the signals that ask the process to end, and returns a descriptor that is readable once one has come. Threads
/// started later inherit the mask, so no thread gets the signals. SIGHUP is not among them if it was ignored before, as
/// by `nohup`.
pub(crate) fn termination() -> io::Result<OwnedFd> {
    let all = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP];
    signals(if process::is_ignored(libc::SIGHUP) { &all[..2] } else { &all })
}

/// Blocks these signals, and returns a descriptor from which they are read.
pub(crate) fn signals(which: &[libc::c_int]) -> io::Result<OwnedFd> {
    // SAFETY: the set is initialized by sigemptyset; signalfd returns a descriptor that nobody else owns.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        for &s in which {
            libc::sigaddset(&mut set, s);
        }
        libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut());
        let fd = libc::signalfd(-1, &set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK);
        if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(OwnedFd::from_raw_fd(fd)) }
    }
}

/// Prints which signal has ended this program, and its sender. `signals`: the descriptor that [`termination`] returned.
pub(crate) fn log_signal(signals: BorrowedFd<'_>) {
    const SIZE: usize = size_of::<libc::signalfd_siginfo>();
    let mut bytes = [0; SIZE];
    if rustix::io::read(signals, &mut bytes) == Ok(SIZE) {
        // SAFETY: the kernel has written a whole structure, of integers.
        let info = unsafe { bytes.as_ptr().cast::<libc::signalfd_siginfo>().read_unaligned() };
        eprintln!("unirdma: ends by {}", cause(&info));
    }
}

/// A signal and its sender, in words.
fn cause(info: &libc::signalfd_siginfo) -> String {
    let signal = match info.ssi_signo as i32 {
        libc::SIGINT => "SIGINT".into(),
        libc::SIGTERM => "SIGTERM".into(),
        libc::SIGHUP => "SIGHUP".into(),
        other => format!("signal {other}"),
    };
    let (pid, uid) = (info.ssi_pid, info.ssi_uid);
    if info.ssi_code == libc::SI_KERNEL {
        return format!("{signal} of its terminal");
    }
    if pid == 0 {
        return format!("{signal} from a process outside of its PID namespace (uid {uid})");
    }
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    let name: String = name.trim_end().chars().filter(|c| !c.is_control()).collect();
    let name = if name.is_empty() { String::new() } else { format!("{name}, ") };
    format!("{signal} from process {pid} ({name}uid {uid})")
}

pub(crate) fn host(dir: PathBuf, args: &HostArgs) -> io::Result<()> {
    if args.ends_unused {
        // It outlives the command that started it, and somebody may wait for the end of a pipe that the command was
        // given.
        confine::close_descriptors(false)?;
    }
    if let (Some("print"), Some(peers)) = (args.firewall.as_deref(), &args.peers) {
        let rules = firewall_rules(&dir, &args.address, peers)?;
        return io::stdout().write_all(rules.as_bytes());
    }
    if args.firewall.as_deref() == Some("print") {
        let text = "--firewall=print shows the rules for the hosts of a peers file: give --peers";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    if let Some(parent) = dir.parent().filter(|p| !p.exists()) {
        let (dir, parent) = (dir.display(), parent.display());
        let text = format!("cannot make {dir}: there is no directory {parent}; make it, or correct --dir");
        return Err(io::Error::new(io::ErrorKind::NotFound, text));
    }
    let vfs = args.vfs.config()?;
    log_to_stderr();
    let stop = termination()?;
    let polling = match args.polling.as_str() {
        "shared" => Polling::Shared,
        "dedicated" => Polling::Dedicated,
        _ => Polling::Auto,
    };
    let engine = EngineConfig { polling, pollers: args.pollers, spin_us: args.spin_us, seed: args.seed };
    engine.too_many_pollers().into_iter().for_each(|line| eprintln!("unirdma: {line}"));
    let shown = dir.display().to_string();
    let centre = args.centre.as_ref().map(|url| CentreConfig {
        url: url.clone(),
        token: args.join.clone(),
        name: args.name.clone(),
        state: args.state.clone().unwrap_or_else(default_state),
    });
    let wire = (args.peers.is_some() || centre.is_some()).then(|| WireConfig {
        addresses: args.address.clone(),
        peers: args.peers.clone(),
        mtu: args.mtu.as_ref().and_then(|m| m.parse().ok()),
        congestion_control: args.congestion_control != "off",
        icrc: !args.no_icrc,
        full_icrc: args.full_icrc,
        firewall: args.firewall.is_some(),
        faults: args.faults,
    });
    let most_vrnics = usize::try_from(args.metrics_vrnics).unwrap_or(MAX_METRICS_VRNICS);
    let metrics = args.metrics.map(|address| MetricsConfig { address, most_vrnics });
    let cdi = engines(&dir, args.cdi.as_deref())?;
    let isolation = Isolation::Processes;
    let (user, ends_unused) = (args.user.clone(), args.ends_unused);
    let admin_group = args.admin_group.clone();
    let config = HostConfig { dir, engine, wire, centre, isolation, user, metrics, vfs, cdi, admin_group, ends_unused };
    let ready = || eprintln!("unirdma: serving {shown} (pid {}); stop with Ctrl-C or SIGTERM", std::process::id());
    serve(&config, stop.as_fd(), ready, || log_signal(stop.as_fd()))
}

/// The files for container engines that the option asks for.
fn engines(dir: &Path, option: Option<&Path>) -> io::Result<Option<Cdi>> {
    let directory = match option {
        Some(off) if off == "off" => return Ok(None),
        Some(directory) => std::path::absolute(directory)?,
        None if rustix::process::geteuid().is_root() && dir == default_dir() => cdi::DIRECTORY.into(),
        None => return Ok(None),
    };
    let made = std::fs::create_dir_all(&directory);
    match made.map_err(context(format!("cannot make {} for container engines", directory.display()))) {
        Ok(()) => Ok(Some(Cdi { directory, program: std::env::current_exe()? })),
        Err(e) if option.is_none() => {
            eprintln!(
                "unirdma: {}; they will find no vRNICs (--cdi off: none are wanted)",
                errors::plain(&e.to_string())
            );
            Ok(None)
        }
        Err(e) => Err(e),
    }
}

/// Logs to standard error: warnings and errors, or as UNIRDMA_LOG says.
pub(crate) fn log_to_stderr() {
    let filter = tracing_subscriber::EnvFilter::try_from_env("UNIRDMA_LOG").unwrap_or_else(|_| "warn".into());
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr).init();
}

/// The listening socket that is our standard input. The supervisor connects to it.
fn door() -> io::Result<UnixListener> {
    log_to_stderr();
    // The name that our other programs have in lists of processes, which would otherwise show `exe`.
    let _ = rustix::thread::set_name(c"unirdma");
    let door = io::stdin().as_fd().try_clone_to_owned()?;
    if !rustix::net::sockopt::socket_acceptconn(&door).unwrap_or(false) {
        let text = "this is what `unirdma host` starts, and not for people";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    Ok(door.into())
}

/// Serves the vRNICs of a group. The group's name is an argument so that lists of processes show it.
pub(crate) fn worker() -> io::Result<()> {
    work(door()?, Alone::Waits)
}

/// Keeps what the next supervisor needs.
pub(crate) fn keeper() -> io::Result<()> {
    keep(&door()?)
}

#[cfg(test)]
mod tests {
    use super::{cause, parse_pollers};

    #[test]
    fn the_end_has_a_cause() {
        let of = |ssi_signo: i32, ssi_code, ssi_pid, ssi_uid| {
            // SAFETY: a structure of integers, all of which may be zero.
            let mut info: libc::signalfd_siginfo = unsafe { std::mem::zeroed() };
            (info.ssi_signo, info.ssi_code, info.ssi_pid, info.ssi_uid) =
                (ssi_signo as u32, ssi_code, ssi_pid, ssi_uid);
            cause(&info)
        };
        let me = std::process::id();
        let name = std::fs::read_to_string("/proc/self/comm").unwrap();
        assert_eq!(
            of(libc::SIGTERM, libc::SI_USER, me, 7),
            format!("SIGTERM from process {me} ({}, uid 7)", name.trim())
        );
        assert_eq!(of(libc::SIGHUP, libc::SI_USER, u32::MAX, 0), format!("SIGHUP from process {} (uid 0)", u32::MAX));
        assert_eq!(
            of(libc::SIGTERM, libc::SI_USER, 0, 0),
            "SIGTERM from a process outside of its PID namespace (uid 0)"
        );
        assert_eq!(of(libc::SIGINT, libc::SI_KERNEL, 0, 0), "SIGINT of its terminal");
    }

    #[test]
    fn pollers_are_a_number_or_two() {
        assert_eq!((parse_pollers("4"), parse_pollers("1-4")), (Ok((4, 4)), Ok((1, 4))));
        for bad in ["", "0", "257", "4-1", "1-", "-4", "0-4", "1-4-5", "many"] {
            assert!(parse_pollers(bad).is_err(), "{bad}");
        }
    }
}
