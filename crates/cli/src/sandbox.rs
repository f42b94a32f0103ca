//! The inside of `unirdma run`: the work of a container's first process, until the command in it has ended.
//!
//! The order matters. The tree of mounts is built with all rights of this process. A user namespace below it then takes
//! these rights away, so that nothing of the tree can be undone. The namespaces that the command may change (network,
//! IPC, host name) belong to that user namespace. The user and the network namespace exist before the tree, because
//! id-mapped mounts need the one, and the container's /sys the other.

use std::convert::Infallible;
use std::ffi::OsString;
use std::fs;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::mount::{MountAttrFlags, MountPropagationFlags};
use rustix::process::DumpableBehavior;
use rustix::thread::UnshareFlags;
use unirdma_formats::Mac;
use unirdma_ipc::fdpass;

use crate::bind::Bind;
use crate::errors::{self, context};
use crate::home::{Home, Show};
use crate::idmap::{Ids, Namespaces};
use crate::mounts::{self, Built, Host, LIBRARIES, Plan};
use crate::net::Interface;
use crate::sysfs::{self, Device, Live, Net};
use crate::workdir::Working;
use crate::{confine, loader, process};

/// Parameters of a container.
pub(crate) struct Sandbox<'a> {
    /// The virtual layer's directory.
    pub dir: &'a Path,
    /// The part of the host that it shows.
    pub host: Host,
    /// The vRNICs' directories.
    pub vrnics: &'a [&'a Path],
    /// The RDMA devices that its programs see.
    pub devices: &'a [Device<'a>],
    /// The directory of our libraries, if its programs use the vRNICs by them.
    pub libraries: Option<&'a Path>,
    pub own_net: bool,
    pub homes: &'a [Home],
    pub working: Option<&'a Working>,
    pub binds: &'a [Bind],
    /// Every program preloads our library.
    pub preload: bool,
    /// Print the ids and rights that the container has.
    pub explain: bool,
    /// Executes the command. Gets the working directory if the container does not have it.
    pub execute: &'a dyn Fn(Option<&Path>) -> Infallible,
}

/// Namespaces in which the first process begins, and namespaces that it makes within its user namespace.
pub(crate) const OUTER: UnshareFlags = UnshareFlags::NEWNS.union(UnshareFlags::NEWPID);
const INNER: UnshareFlags =
    UnshareFlags::NEWNS.union(UnshareFlags::NEWIPC).union(UnshareFlags::NEWUTS).union(UnshareFlags::NEWCGROUP);

/// Steps that need a process outside, as bytes of the protocol between both sides.
pub(crate) const MAP_IDS: u8 = b'm';
pub(crate) const READY: u8 = b'r';
pub(crate) const GO: u8 = b'g';

/// Waits until the outside has taken its step.
fn wait_for_outside(mut sock: &UnixStream) -> io::Result<()> {
    sock.read_exact(&mut [0]).map_err(|_| io::Error::other("the container was not set up"))
}

/// The first process: sets up the container, runs the command, and ends with its exit code. Everything else in the
/// container ends with it. `nested`: it is in a user namespace already, because it had no right to make the others
/// without one.
pub(crate) fn first_process(sandbox: &Sandbox<'_>, sock: UnixStream, nested: bool) -> ! {
    process::hold_signals(true);
    let lost = match set_up(sandbox, sock, nested) {
        Ok(lost) => lost,
        Err(e) => fail(&e),
    };
    let child = match process::fork(UnshareFlags::empty()) {
        Ok(Some(child)) => child,
        Ok(None) => {
            process::hold_signals(false);
            match (sandbox.execute)(lost.as_deref()) {}
        }
        Err(e) => fail(&e),
    };
    process::pass_signals_to(child, true);
    process::hold_signals(false);
    // This process is also the parent of all processes whose own parents have ended.
    loop {
        match process::wait(-1) {
            Ok(ended) if ended.pid == child => std::process::exit(ended.code.into()),
            Ok(_) => {}
            Err(e) => fail(&e),
        }
    }
}

pub(crate) fn fail(e: &io::Error) -> ! {
    eprintln!("unirdma: {}", errors::plain(&e.to_string()));
    std::process::exit(1);
}

/// Ends this process when its parent ends.
pub(crate) fn end_with_parent() -> io::Result<()> {
    Ok(rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?)
}

/// Does everything before the command runs. Returns the working directory if the container does not have it.
fn set_up(sandbox: &Sandbox<'_>, sock: UnixStream, nested: bool) -> io::Result<Option<PathBuf>> {
    end_with_parent()?;
    confine::check_standard_descriptors()?;
    if nested {
        (&sock).write_all(&[MAP_IDS])?;
        wait_for_outside(&sock)?;
    }
    let working = std::env::current_dir().ok();
    let ids = Ids::choose();
    rustix::mount::mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
        .map_err(context("cannot keep mounts to the container"))?;
    let homes = sandbox.homes.iter().map(|h| &*h.path);
    if let Some(libraries) = sandbox.libraries.filter(|_| sandbox.preload)
        && let Err(e) = loader::set_up(sandbox.dir, (libraries, Path::new(LIBRARIES)), homes.chain([sandbox.dir]))
    {
        let why = errors::plain(&e.to_string());
        eprintln!("unirdma: programs that bring a libibverbs of their own will find no device: {why}");
    }
    let flags =
        MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    let proc = mounts::mount_new("proc", &[], flags).map_err(|e| {
        let hint = "parts of this machine's own /proc are hidden, as docker does without --security-opt systempaths=unconfined";
        if e.kind() == io::ErrorKind::PermissionDenied { io::Error::new(e.kind(), format!("{e}: {hint}")) } else { e }
    })?;
    let Namespaces { users, network } = ids.namespaces(proc.as_fd(), sandbox.own_net)?;
    let net = network.map_or(Ok(Net::Host), |network| enter_network(&network, sandbox.host))?;
    if !sandbox.devices.is_empty() {
        show_devices(sandbox.dir, sandbox.devices, net, &sock)?;
    }
    let plan = Plan {
        dir: sandbox.dir,
        host: sandbox.host,
        vrnics: sandbox.vrnics,
        libraries: sandbox.libraries,
        covered: &loader::resolved(),
        homes: sandbox.homes,
        working: sandbox.working,
        starts_in: working.as_deref(),
        binds: sandbox.binds,
        ids,
        users: users.as_fd(),
    };
    let built = mounts::build(&plan, &proc)?;
    drop(proc);
    ids.enter(&users).map_err(context("cannot enter the container's user namespace"))?;
    drop(users);
    // SAFETY: the process has one thread and shares no descriptor table with another.
    unsafe { rustix::thread::unshare_unsafe(INNER) }.map_err(context("cannot make namespaces"))?;
    // A change of the user id has cleared the death signal and the dumpable flag.
    end_with_parent()?;
    // `unirdma exec` finds the namespaces through this process. Other processes of the container find nothing of use in
    // it.
    rustix::process::set_dumpable_behavior(DumpableBehavior::Dumpable)?;
    let network = match sandbox.own_net {
        true => crate::net::set_up(&interfaces(sandbox.devices)?, true)?,
        false => Vec::new(),
    };
    let passed: Vec<_> = network.iter().map(AsFd::as_fd).collect();
    fdpass::send(sock.as_fd(), &[READY], &passed)?;
    drop(passed);
    wait_for_outside(&sock)?;
    confine::confine().map_err(context("cannot confine the command"))?;
    if sandbox.explain {
        explain(sandbox, &ids, nested, &built);
    }
    drop((sock, network));
    confine::close_descriptors(false)?;
    Ok(go_to(working))
}

/// Makes the /sys of this mount namespace show the devices. `dir`: the virtual layer's directory. `sock`: leads to the
/// process outside.
fn show_devices(dir: &Path, devices: &[Device<'_>], net: Net, sock: &UnixStream) -> io::Result<()> {
    match sysfs::set_up(Path::new(sysfs::SYS), dir, devices, net, Live::make(devices)) {
        // From here on the outside serves the files, which later steps may touch.
        Ok(files) if !files.is_empty() => {
            let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
            fdpass::send(sock.as_fd(), &[net.step()], &files).map(drop)?;
        }
        Ok(_) => {}
        Err(e) => {
            let e = errors::plain(&e.to_string());
            eprintln!("unirdma: programs that look for devices in /sys will find none: {e}");
        }
    }
    Ok(())
}

/// Enters the container's network namespace for good, and mounts a /sys that shows it.
fn enter_network(network: &OwnedFd, host: Host) -> io::Result<Net> {
    let kind = Some(rustix::thread::LinkNameSpaceType::Network);
    rustix::thread::move_into_link_name_space(network.as_fd(), kind)
        .map_err(context("cannot enter the container's network namespace"))?;
    let Err(e) = sysfs::mount_own() else { return Ok(Net::Own) };
    if host == Host::System {
        // Programs of the system alone do not look for interfaces there.
        return Ok(Net::OwnUnseen);
    }
    let hint = match e.kind() {
        io::ErrorKind::PermissionDenied => {
            ": parts of this machine's own /sys are hidden, as docker and `unirdma with` do"
        }
        _ => "",
    };
    let e = errors::plain(&e.to_string());
    eprintln!("unirdma: /sys/class/net shows other interfaces than the container's: {e}{hint}");
    Ok(Net::OwnUnseen)
}

/// The network interfaces of devices.
pub(crate) fn interfaces<'a>(devices: &[Device<'a>]) -> io::Result<Vec<Interface<'a>>> {
    let of = |Device { info, interface, .. }: &Device<'a>| {
        let mac: Result<Mac, _> = info.mac.parse();
        let mac = mac.map_err(|_| io::Error::other(format!("the virtual layer gave the MAC `{}`", info.mac)))?;
        Ok(Interface { name: interface, mac: mac.0, mtu: info.mtu, ips: &info.ips })
    };
    devices.iter().map(of).collect()
}

/// Goes to the working directory or, if the container does not have it, to the home directory or `/`. Returns the
/// working directory if the container does not have it.
pub(crate) fn go_to(working: Option<PathBuf>) -> Option<PathBuf> {
    let working = working?;
    if rustix::process::chdir(&working).is_ok() {
        return None;
    }
    let home = std::env::var_os("HOME").unwrap_or_default();
    let _ = rustix::process::chdir(&home).or_else(|_| rustix::process::chdir("/"));
    Some(working)
}

/// Executes the command in the container with our libraries first. `lost`: the working directory, if the container does
/// not have it.
pub(crate) fn execute(command: &[OsString], lost: Option<&Path>) -> ! {
    execute_with(command, Path::new(LIBRARIES), &mounts::vrnics(), Vec::new(), lost)
}

/// A variable that lists files, with one more before those that it has.
pub(crate) fn before(variable: &str, mut file: OsString) -> OsString {
    if let Some(others) = std::env::var_os(variable).filter(|v| !v.is_empty()) {
        file.push(":");
        file.push(others);
    }
    file
}

/// Executes the command with our libraries and vRNICs from these directories, and with more variables.
pub(crate) fn execute_with(
    command: &[OsString],
    libraries: &Path,
    vrnics: &[PathBuf],
    more: Vec<(&str, OsString)>,
    lost: Option<&Path>,
) -> ! {
    if let Some(why) = loader::unserved(&command[0]) {
        eprintln!("unirdma: {} will not find the vRNIC: it {why}", command[0].display());
    }
    let path = before("LD_LIBRARY_PATH", libraries.into());
    let mut c = Command::new(&command[0]);
    let vrnics = std::env::join_paths(vrnics).unwrap_or_default();
    c.args(&command[1..]).env("LD_LIBRARY_PATH", path).env("UNIRDMA_DIR", vrnics).envs(more);
    if Path::new("/etc/ld.so.preload").exists() {
        // Otherwise AddressSanitizer refuses to run after another library.
        let mut options = std::env::var_os("ASAN_OPTIONS").filter(|o| !o.is_empty()).unwrap_or_default();
        options.push(if options.is_empty() { "" } else { ":" });
        options.push("verify_asan_link_order=0");
        c.env("ASAN_OPTIONS", options);
    }
    let e = c.exec();
    let name = command[0].to_string_lossy();
    // A directory of PATH that may not be searched must not look like a command that may not be run.
    let path = std::env::var_os("PATH").unwrap_or_default();
    let nowhere = !name.contains('/') && !std::env::split_paths(&path).any(|d| d.join(&*name).exists());
    let (code, mut why) = match e.kind() {
        io::ErrorKind::NotFound => (127, "there is no such command".to_string()),
        io::ErrorKind::PermissionDenied if nowhere => (127, "there is no such command in PATH".to_string()),
        _ => (126, e.to_string()),
    };
    if let Some(lost) = lost.filter(|_| name.contains('/')) {
        let dir = lost.display();
        why +=
            &format!(" in the container, which does not have the working directory {dir}; give it with --bind {dir}");
    }
    eprintln!("unirdma: cannot run {name}: {}", errors::plain(&why));
    std::process::exit(code);
}

/// Prints on standard error the ids and rights that the container has.
fn explain(sandbox: &Sandbox<'_>, ids: &Ids, nested: bool, built: &Built) {
    let users = match (ids.are_mapped(), ids.count) {
        (true, 1) => format!("root inside is uid {} outside; there are no other ids", ids.outside.0),
        (true, n) => format!("uids 0 to {} inside are {} on outside", n - 1, ids.outside.0),
        (false, _) => format!("uid {} inside and outside", ids.outside.0),
    };
    let rights = |owned: bool| match (owned, ids.are_mapped()) {
        (true, true) => "its files have the same owners as outside (id-mapped mount)",
        (true, false) => "as it is",
        (false, _) => "what its permissions give to others (id-mapped mounts are not possible there)",
    };
    eprintln!("unirdma: users: {users}");
    if nested {
        eprintln!("unirdma: made without root's rights");
    }
    for home in sandbox.homes {
        let what = match home.show {
            Show::Rw => rights(built.home == Some(true)),
            Show::Ro => "read-only, without names that begin with a dot; what its permissions give to this user",
            Show::None => "empty, and the container's own",
        };
        let kind = if home.by_variable { "directory" } else { "home directory" };
        eprintln!("unirdma: {kind} {}: {what}", home.path.display());
    }
    if let Some((working, &owned)) = sandbox.working.zip(built.working.as_ref()) {
        let guarded = match working.guard {
            Ok(_) => format!("{} in it are read-only", working.guarded().join(", ")),
            Err(_) => "read-only".into(),
        };
        eprintln!("unirdma: working directory {}: {}; {guarded}", working.path.display(), rights(owned));
    }
    for (bind, &owned) in sandbox.binds.iter().zip(&built.binds) {
        let kind = if bind.read_only { ", read-only" } else { "" };
        eprintln!("unirdma: {}{kind}: {}", bind.target.display(), rights(owned));
    }
    let full = fs::File::options().read(true).write(true).open("/dev/userfaultfd").is_ok();
    eprintln!("unirdma: /dev/userfaultfd: {}", if full { "yes" } else { "no" });
}
