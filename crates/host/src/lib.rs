//! The virtual layer of one host: vRNICs by name, their sessions, the pollers, the switch of the
//! containers' taps, and the administration socket.
//!
//! Knows all layers below. One thread owns the control path (vhost-user, control queues, administration),
//! one or more pollers execute work requests, one thread switches Ethernet frames. It must never let one
//! vRNIC's frontend block another's.

pub mod admin;
mod control;
mod engine;
mod faults;
pub mod fdpass;
mod firewall;
mod guard;
mod network;
mod peers;
mod port;
mod seats;
mod steer;
mod switch;
mod tap;
mod tunnel;
mod vrnic;

use std::fs::File;
use std::io;
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

pub use admin::Client;
pub use engine::{EngineConfig, Polling};
pub use guard::FrameDrops;
pub use network::Disagreement;
pub use port::PortCounters;
pub use tunnel::{TunnelDrops, TunnelInfo};
pub use unirdma_device::HoldTimes;
pub use unirdma_rnic::MrNote;
pub use vrnic::{AddVrnic, Held, IpNet, LedgerInfo, MAX_BURST_US, MAX_WEIGHT, SetHeld, SetShare, VrnicInfo};

/// How to run the virtual layer.
#[derive(Clone, Debug)]
pub struct HostConfig {
    /// Its directory.
    pub dir: PathBuf,
    /// The pollers.
    pub engine: EngineConfig,
    /// The network; `None`: no other hosts.
    pub wire: Option<WireConfig>,
}

/// How other hosts are reached.
#[derive(Clone, Debug)]
pub struct WireConfig {
    /// This host's addresses for RoCEv2.
    pub addresses: Vec<IpAddr>,
    /// The file that says which virtual addresses live where.
    pub peers: PathBuf,
    /// Largest path MTU, bytes; `None`: what the interfaces take.
    pub mtu: Option<u32>,
    /// Heed losses and ECN marks.
    pub congestion_control: bool,
    /// Make and check the invariant CRC; false is for measurements between two of our own hosts only.
    pub icrc: bool,
    /// Check all bits of the ICRC of IPv4 packets that others sent, by packet sockets.
    pub full_icrc: bool,
    /// Only the virtual layer sends from and to its ports: see [`firewall_rules`].
    pub firewall: bool,
    /// Percent of incoming packets to lose, to double and to reorder; for tests.
    pub faults: Option<u64>,
}

/// The group that always exists.
pub(crate) const DEFAULT_GROUP: &str = "default";
/// Name of the administration socket in the directory.
pub const ADMIN_SOCKET: &str = "admin.sock";
/// Name of a vRNIC's vhost-user socket in its own directory.
pub const VHOST_SOCKET: &str = "vhost.sock";

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

/// Anybody may make a directory in `/tmp`, so one that nobody has named is believed only if it is this user's own.
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

/// The directory of a vRNIC: what its container may see.
pub fn vrnic_dir(base: &Path, name: &str) -> PathBuf {
    base.join("vrnics").join(name)
}

fn context(what: &str, path: &Path) -> impl Fn(io::Error) -> io::Error {
    let text = format!("{what} {}", path.display());
    move |e| io::Error::new(e.kind(), format!("{text}: {e}"))
}

/// Holds the lock of a directory: one virtual layer each.
fn lock_dir(dir: &Path) -> io::Result<File> {
    let path = dir.join("host.lock");
    let file = File::options()
        .create(true)
        .truncate(false)
        .read(true)
        .write(true)
        .open(&path)
        .map_err(context("cannot open", &path))?;
    match rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
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

/// The rules that [`WireConfig::firewall`] sets for a virtual layer of this directory, as a script for `nft -f`.
///
/// # Errors
/// The peers file is bad.
pub fn firewall_rules(dir: &Path, addresses: &[IpAddr], peers: &Path) -> io::Result<String> {
    let peers = network::read(peers, addresses).map_err(|e| io::Error::new(io::ErrorKind::InvalidInput, e))?;
    Ok(firewall::rules(dir, addresses, &peers.hosts()))
}

/// Serves until `stop` becomes readable. `ready` is called once the administration socket answers.
///
/// # Errors
/// One line that says what is wrong: the directory, the lock, the sockets.
pub fn serve(config: &HostConfig, stop: std::os::fd::BorrowedFd<'_>, ready: impl FnOnce()) -> io::Result<()> {
    unirdma_mem::guard::install()?;
    control::raise_limit();
    let dir = &config.dir;
    std::fs::DirBuilder::new().recursive(true).mode(0o755).create(dir).map_err(context("cannot create", dir))?;
    let owner = std::fs::metadata(dir).map_err(context("cannot read", dir))?.uid();
    if owner != rustix::process::geteuid().as_raw() {
        let text = format!("{} belongs to another user (uid {owner}); choose another --dir", dir.display());
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
    }
    let _lock = lock_dir(dir)?;
    let vrnics = dir.join("vrnics");
    let _ = std::fs::remove_dir_all(&vrnics);
    std::fs::create_dir(&vrnics).map_err(context("cannot create", &vrnics))?;
    std::fs::set_permissions(&vrnics, PermissionsExt::from_mode(0o700))?;
    firewall::remove_stale(dir);
    let mut wire = config.wire.as_ref().map(|w| network::Network::open(w, dir)).transpose()?;
    let enrolled = wire.as_mut().map(|n| n.enroll(DEFAULT_GROUP, 0)).transpose()?;
    let way = enrolled.map(|(e, sockets)| Ok::<_, io::Error>((network::open_worker(&e, sockets)?, e))).transpose()?;
    let (port, tunnel, enrolment) = way.map_or((None, None, None), |((p, t), e)| (Some(p), Some(t), Some(e)));
    let engine = engine::Engine::start(&config.engine, port)?;
    if let Some(e) = enrolment {
        let mut rnic = engine.rnic.lock();
        rnic.set_wire_mtu(e.mtu);
        rnic.set_congestion_control(e.congestion_control);
        e.addresses.first().into_iter().for_each(|&host| rnic.set_own_host(host));
    }
    let switch = switch::Switch::start(tunnel, engine.clone())?;
    let admin = admin::listen(&dir.join(ADMIN_SOCKET))?;
    let result = control::Control::new(dir.clone(), engine.clone(), switch, admin, wire)?.run(stop, ready);
    engine.stop();
    let _ = std::fs::remove_file(dir.join(ADMIN_SOCKET));
    let _ = std::fs::remove_file(dir.join(network::ORDER_FILE));
    let _ = std::fs::remove_dir_all(&vrnics);
    result
}

/// Waits until a virtual layer answers in `dir`.
///
/// # Errors
/// `TimedOut` with what to do.
pub fn wait_ready(dir: &Path, limit: Duration) -> io::Result<Client> {
    let start = std::time::Instant::now();
    loop {
        match Client::connect(dir) {
            Ok(c) => return Ok(c),
            Err(e) if start.elapsed() > limit => return Err(e),
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}
