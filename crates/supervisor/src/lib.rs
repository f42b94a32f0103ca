//! The supervisor of a host's virtual layer: its administration socket, a worker for each group, the network's sockets
//! and the knowledge about other hosts, metrics, the connection to a control centre, and the keeper, which stores the
//! descriptors that the next supervisor needs.
//!
//! It may depend on the messages to workers ([`unirdma_ipc`]), on confinement, and on the formats below; it does not
//! know the workers' code: it starts this program again, or calls a function that its user gives it
//! ([`Isolation::Threads`]). It must never execute anything for a tenant, nor let one group's worker block another
//! group's. [`serve`] is a supervisor, [`keep`] a keeper.
//!
//! Without the feature `fleet` there is no connection to a control centre, and none of its dependencies.

// What only the control centre's orders use.
#![cfg_attr(not(feature = "fleet"), allow(dead_code))]

pub mod admin;
pub mod cdi;
#[cfg(feature = "fleet")]
mod centre;
mod centre_config;
mod fdstore;
mod firewall;
mod metrics;
mod network;
mod peer_change;
mod peer_source;
mod peers_file;
mod process;
mod service_manager;
mod supervisor;
mod vf;

use std::fs::File;
use std::io::{self, Write};
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use unirdma_ipc::config::EngineConfig;

pub use admin::Client;
pub use centre_config::{CentreConfig, CentreInfo, default_state};
pub use fdstore::keep;
pub use metrics::{DEFAULT_METRICS_VRNICS, MAX_METRICS_VRNICS, MetricsConfig};
pub use network::{Disagreement, SOCKET_BUFFER, TunnelInfo};

/// Configuration of the virtual layer.
#[derive(Clone, Debug)]
pub struct HostConfig {
    /// Its directory.
    pub dir: PathBuf,
    /// The pollers.
    pub engine: EngineConfig,
    /// The network to other hosts; `None`: there is none.
    pub wire: Option<WireConfig>,
    /// The control centre; `None`: this host belongs to no fleet.
    pub centre: Option<CentreConfig>,
    /// The isolation between groups.
    pub isolation: Isolation,
    /// The user as whom workers run if this process is root; `None`: `unirdma` if that exists, else `nobody`.
    pub user: Option<String>,
    /// Metrics for Prometheus; `None`: none.
    pub metrics: Option<MetricsConfig>,
    /// The pool of VFs of this host's real RNICs; `None`: there is none.
    pub vfs: Option<unirdma_vf::Config>,
    /// The files that offer vRNICs and groups to container engines; `None`: none.
    pub cdi: Option<cdi::Cdi>,
    /// The group of users that may administer it, beside its own user; `None`: none.
    pub admin_group: Option<String>,
    /// It ends with its last vRNIC, or after half a minute without one.
    pub ends_unused: bool,
}

/// How the worker of a group runs.
#[derive(Clone, Copy, Debug, Default)]
pub enum Isolation {
    /// As a process: this program, started with the argument `worker`. Its standard input is the socket on which it
    /// has to serve.
    #[default]
    Processes,
    /// As a thread of this process, which runs this function with that socket, for programs other than the virtual
    /// layer itself. It cannot be ended from outside.
    Threads(fn(UnixListener) -> io::Result<()>),
}

/// The network to other hosts.
#[derive(Clone, Debug)]
pub struct WireConfig {
    /// This host's addresses for RoCEv2.
    pub addresses: Vec<IpAddr>,
    /// The peers file, which gives the host of each virtual address; `None`: the control centre gives it.
    pub peers: Option<PathBuf>,
    /// Largest path MTU, bytes; `None`: the largest that the interfaces allow.
    pub mtu: Option<u32>,
    /// React to losses and ECN marks.
    pub congestion_control: bool,
    /// Make and check the invariant CRC. False is only for measurements between two of our own hosts.
    pub icrc: bool,
    /// Check all bits of the ICRC of IPv4 packets that other RNICs sent, with packet sockets.
    pub full_icrc: bool,
    /// Let only the virtual layer send from and to its ports: see [`firewall_rules`].
    pub firewall: bool,
    /// Percentage of incoming packets to lose, to duplicate and to reorder; for tests.
    pub faults: Option<u64>,
}

impl WireConfig {
    /// A network with these addresses. The peers come from a file or, with `None`, from the control centre. The rest is
    /// as without any options.
    pub fn new(addresses: Vec<IpAddr>, peers: Option<PathBuf>) -> WireConfig {
        WireConfig {
            addresses,
            peers,
            mtu: None,
            congestion_control: true,
            icrc: true,
            full_icrc: false,
            firewall: false,
            faults: None,
        }
    }
}

/// The group that always exists.
pub(crate) const DEFAULT_GROUP: &str = "default";
/// Name of the file in the directory that the virtual layer locks.
const LOCK: &str = "host.lock";
/// If the lock is held for this time, a virtual layer holds it. [`served_by`] holds it for moments.
const LOCK_PATIENCE: Duration = Duration::from_millis(100);
/// Name of the administration socket in the directory.
pub const ADMIN_SOCKET: &str = "admin.sock";
/// Name of a vRNIC's vhost-user socket in its own directory.
pub const VHOST_SOCKET: &str = unirdma_abi::container::SOCKET;
/// Name of the vhost-user socket of a vRNIC's network interface, for virtual machines, in the same directory.
pub const NET_SOCKET: &str = "net.sock";
/// Name of a vRNIC's vhost-user socket in the RFC mode, in the same directory.
pub const RFC_SOCKET: &str = "rfc.sock";

/// `/run/unirdma` for root, else `$XDG_RUNTIME_DIR/unirdma`, else a directory of this user in `/tmp`.
pub fn default_dir() -> PathBuf {
    if rustix::process::geteuid().is_root() {
        return "/run/unirdma".into();
    }
    match std::env::var_os("XDG_RUNTIME_DIR") {
        Some(d) => Path::new(&d).join("unirdma"),
        None => format!("/tmp/unirdma-{}", rustix::process::geteuid().as_raw()).into(),
    }
}

/// A directory in `/tmp` that nobody has named is trusted only if it belongs to this user, since anybody can make
/// directories there.
pub(crate) fn check_fallback(dir: &Path) -> io::Result<()> {
    if !dir.starts_with("/tmp") || dir != default_dir() {
        return Ok(());
    }
    let own = rustix::process::geteuid().as_raw();
    match std::fs::symlink_metadata(dir) {
        Ok(m) if m.uid() != own || !m.is_dir() => {
            let text = format!("{} is not this user's own directory; choose another --dir", dir.display());
            Err(io::Error::new(io::ErrorKind::PermissionDenied, text))
        }
        _ => Ok(()),
    }
}

/// The directory of a vRNIC, which its container sees.
pub fn vrnic_dir(base: &Path, name: &str) -> PathBuf {
    base.join("vrnics").join(name)
}

fn context(what: &str, path: &Path) -> impl Fn(io::Error) -> io::Error {
    let text = format!("{what} {}", path.display());
    move |e| io::Error::new(e.kind(), format!("{text}: {e}"))
}

/// Writes a file that only its owner can read, completely or not at all, in place of the one of this name. Returns it,
/// open for writing at its end.
fn replace_file(path: &Path, bytes: &[u8]) -> io::Result<File> {
    let mut new = path.as_os_str().to_owned();
    new.push(".new");
    let mut file = File::options().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    std::fs::rename(&new, path)?;
    Ok(file)
}

/// The process ID of the virtual layer that serves `dir`, or is about to begin or to end; 0 if it is not written yet.
pub fn served_by(dir: &Path) -> Option<u32> {
    let path = dir.join(LOCK);
    let file = File::open(&path).ok()?;
    let is_locked = rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockShared).is_err();
    is_locked.then(|| std::fs::read_to_string(&path).ok()?.trim().parse().ok()).map(Option::unwrap_or_default)
}

/// Locks a directory, for a single virtual layer.
fn lock_dir(dir: &Path) -> io::Result<File> {
    let path = dir.join(LOCK);
    let file = File::options()
        .create(true)
        .truncate(false)
        .read(true)
        .write(true)
        .open(&path)
        .map_err(context("cannot open", &path))?;
    let lock = || rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive);
    let mut locked = lock();
    let limit = Instant::now() + LOCK_PATIENCE;
    while locked.is_err() && Instant::now() < limit {
        std::thread::sleep(Duration::from_millis(5));
        locked = lock();
    }
    match locked {
        Ok(()) => {
            std::fs::write(&path, format!("{}\n", std::process::id()))?;
            Ok(file)
        }
        Err(_) => {
            let pid = std::fs::read_to_string(&path).unwrap_or_default();
            Err(io::Error::new(
                io::ErrorKind::AddrInUse,
                format!(
                    "a virtual layer already serves {} (pid {}); stop it first or choose another --dir",
                    dir.display(),
                    pid.trim()
                ),
            ))
        }
    }
}

/// The rules that [`WireConfig::firewall`] sets for a virtual layer in this directory, as a script for `nft -f`.
///
/// # Errors
/// The peers file is invalid.
pub fn firewall_rules(dir: &Path, addresses: &[IpAddr], peers: &Path) -> io::Result<String> {
    let peers = peers_file::read(peers, addresses).map_err(|e| io::Error::new(io::ErrorKind::InvalidInput, e))?;
    Ok(firewall::rules(dir, addresses, &peers.hosts()))
}

/// Serves until `stop` becomes readable. Calls `ready` when the administration socket answers, and `stopping` before
/// everything ends.
///
/// # Errors
/// One line that says what is wrong: the directory, the lock, the sockets.
pub fn serve(
    config: &HostConfig,
    stop: std::os::fd::BorrowedFd<'_>,
    ready: impl FnOnce(),
    stopping: impl FnOnce(),
) -> io::Result<()> {
    let dir = &config.dir;
    std::fs::DirBuilder::new().recursive(true).mode(0o755).create(dir).map_err(context("cannot create", dir))?;
    let owner = std::fs::metadata(dir).map_err(context("cannot read", dir))?.uid();
    if owner != rustix::process::geteuid().as_raw() {
        let text = format!("{} belongs to another user (uid {owner}); choose another --dir", dir.display());
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
    }
    let _lock = lock_dir(dir)?;
    // Workers inherit the limit.
    unirdma_confine::raise_descriptors();
    if !config.wire.as_ref().is_some_and(|w| w.firewall) {
        firewall::remove_stale(dir);
    }
    let mut manager = service_manager::ServiceManager::find(!config.ends_unused);
    let scrapers = config.metrics.as_ref().map(metrics::listen).transpose()?;
    let identity = config.centre.as_ref().map(supervisor::identity).transpose()?;
    let admin = admin::bind(dir, config.admin_group.as_deref())?;
    let supervisor = supervisor::Supervisor::open(config)?;
    let serve = || {
        let admin = admin.listen()?;
        let metrics = config.metrics.as_ref().zip(scrapers);
        supervisor.start_pool()?;
        let _metrics = metrics.map(|(m, s)| metrics::Metrics::start(s, m, supervisor.clone())).transpose()?;
        identity.map(|i| supervisor.join(i)).transpose()?;
        ready();
        manager.ready(&supervisor.summary());
        supervisor.run(stop, &admin, &mut manager).inspect(|()| stopping())
    };
    let result = serve();
    manager.stopping();
    supervisor.end();
    for f in [fdstore::SOCKET, network::ORDER_FILE] {
        let _ = std::fs::remove_file(dir.join(f));
    }
    for d in ["vrnics", "workers"] {
        let _ = std::fs::remove_dir_all(dir.join(d));
    }
    result
}

/// Waits until a virtual layer answers in `dir`.
///
/// # Errors
/// `TimedOut`, with advice.
pub fn wait_ready(dir: &Path, limit: Duration) -> io::Result<Client> {
    let start = Instant::now();
    loop {
        match Client::connect(dir) {
            Ok(c) => return Ok(c),
            Err(e) if start.elapsed() > limit => return Err(e),
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}
