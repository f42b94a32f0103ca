//! `unirdma run`: a container of one process tree with a vRNIC. This is the part outside of the container.
//!
//! The parent holds the connection that keeps the interface attached, takes the steps that need a process outside of
//! the container, passes signals on, and ends with the command's exit code. `sandbox` is the child's part.

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use rustix::process::PidfdFlags;
use rustix::thread::UnshareFlags;
use unirdma_abi::container::MAX_VRNICS;
use unirdma_ipc::fdpass;
use unirdma_ipc::vrnic::VrnicInfo;
use unirdma_supervisor::Client;
use unirdma_supervisor::admin::Request;

use crate::bind::{self, Bind};
use crate::carried;
use crate::home::{self, Show};
use crate::idmap;
use crate::mounts::Host;
use crate::process::{self, Foreground};
use crate::sandbox::{self, GO, MAP_IDS, OUTER, READY, Sandbox};
use crate::sysfs::{self, Device};
use crate::unnamed::{self, Taken};
use crate::vrnics;
use crate::workdir;

pub(crate) const EXAMPLES: &str = "Examples:
  unirdma run -- ib_write_bw                              # prints the address of its vRNIC, such as 10.77.0.1
  unirdma run -- ib_write_bw 10.77.0.1                    # in a second terminal: its peer
  unirdma run --vrnic a -- ibv_devinfo -v
  unirdma run --vrnic a --device-name mlx5_0 -- ib_write_bw -d mlx5_0
  unirdma run --vrnic a --vrnic b -- ucx_perftest ...     # two devices, unirdma0 and unirdma1
  unirdma run --vrnic a --net host -- ./my_server         # share the host's network
  unirdma run --vrnic a --bind /data:ro --bind /scratch -- ./my_job
  unirdma run --vrnic a --bind /dev/nvidia0 --bind /dev/nvidiactl --bind /dev/nvidia-uvm -- ./my_job
  unirdma exec --vrnic a -- bash                          # a second command in the same container

Without --vrnic, a virtual layer is started if none serves the directory. It ends with its last vRNIC.

The command sees the host's files, read-only, and no other processes than its own. It can write to /tmp, /var/tmp, /run and /dev/shm, and
in the home directory to .cache, .config, .local/share and .local/state, all of which are its own and end with it. It can write to the working
directory if that lies below the home directory, or is the user's own within /tmp or /var/tmp; there .git, .envrc, .vscode and
.idea are read-only, and so is HEAD if there is no repository; those that are missing are sockets meanwhile, so that nobody makes them. Of the
home directory, nothing else that begins with a dot shows. Other directories are given by --bind. If root starts it, the root user inside is
an unprivileged user outside, with root's rights in the working directory and in what is given by --bind.

Exit code: that of the command; 127 if it does not exist, 126 if it cannot be run, 128 and the signal if one ended it.";

#[derive(Args)]
pub(crate) struct RunArgs {
    /// The vRNIC that the container gets; may be given more than once for vRNICs of one group [default: one of group
    /// `default` that nothing uses, else a new one, which ends with the command]
    #[arg(long, value_name = "NAME", conflicts_with = "new")]
    vrnic: Vec<String>,
    /// A new vRNIC of group `default`, which ends with the command, also if there are others that nothing uses
    #[arg(long)]
    new: bool,
    /// Do not print which vRNIC it is
    #[arg(long, short)]
    quiet: bool,
    /// Network: an interface with the vRNIC's address, or the host's network as it is
    #[arg(long, value_enum, default_value_t = Net::Own)]
    net: Net,
    /// Give a directory or file to the container, at the same place or at DST; may be given more than once
    #[arg(long, value_name = "SRC[:DST][:ro]", value_parser = bind::parse)]
    bind: Vec<Bind>,
    /// How the home directory shows
    #[arg(long, value_enum, value_name = "HOW", default_value_t = Show::Ro)]
    home: Show,
    /// Name of the RDMA device, 1 to 63 letters, digits, `_`, `.`, `-`, for programs and scripts that ask for one, such
    /// as mlx5_0. Devices of further vRNICs count on from it: mlx5_1
    #[arg(long, value_name = "NAME", default_value = "unirdma0", value_parser = device_name)]
    device_name: String,
    /// Do not preload our library into every program. Programs that bring a libibverbs of their own then find no device
    #[arg(long)]
    no_preload: bool,
    /// Print on standard error which user the inside user is outside, and what rights it has in the directories that it
    /// is given
    #[arg(long)]
    explain: bool,
    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "CMD")]
    command: Vec<OsString>,
}

/// The name of a device, which becomes a directory and must fit into the structures of libibverbs.
fn device_name(name: &str) -> Result<String, &'static str> {
    let fits = (1..=63).contains(&name.len()) && !name.starts_with(['.', '-']);
    let ok = fits && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"_.-".contains(&b));
    ok.then(|| name.to_string()).ok_or("a device's name is 1 to 63 letters, digits, `_`, `.`, `-`")
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Net {
    Own,
    Host,
}

/// The directory with our libibverbs: beside the program, below the program's prefix, where packages put it, or written
/// by a program that carries it.
pub(crate) fn library_dir() -> io::Result<PathBuf> {
    if let Some(d) = std::env::var_os("UNIRDMA_LIBDIR") {
        return Ok(d.into());
    }
    let exe = std::env::current_exe()?;
    let beside = exe.parent().map(|p| p.join("dropin"));
    let lib = exe.parent().and_then(Path::parent).map(|prefix| prefix.join("lib"));
    let of_debian = format!("{}-linux-gnu/unirdma", std::env::consts::ARCH);
    let candidates = [beside, lib.as_ref().map(|l| l.join(of_debian)), lib.as_ref().map(|l| l.join("unirdma"))];
    let found = candidates.into_iter().flatten().find(|d| d.join("libibverbs.so.1").exists());
    let found = found.map_or_else(carried::directory, |found| Ok(Some(found)))?;
    found.ok_or_else(|| io::Error::other("libibverbs.so.1 is not beside this program; build all with `cargo build --release`, or name its directory in UNIRDMA_LIBDIR"))
}

/// The names of a container's devices, of which the first is `first`.
///
/// # Errors
/// The longest one is too long.
pub(crate) fn device_names(first: &str, count: usize) -> io::Result<Vec<String>> {
    if count == 1 {
        return Ok(vec![first.into()]);
    }
    let before = first.trim_end_matches(|c: char| c.is_ascii_digit());
    let number: usize =
        if before == first { Ok(0) } else { first[before.len()..].parse() }.map_err(io::Error::other)?;
    let names = (0..count).map(|i| device_name(&format!("{before}{}", number.saturating_add(i))));
    names.collect::<Result<_, _>>().map_err(|e| io::Error::other(format!("--device-name {first}: {e}")))
}

/// The vRNICs that were asked for, each with the connection that holds it.
///
/// # Errors
/// One line: there is none of a name, or they cannot be in one container.
fn named(dir: &Path, names: &[String]) -> io::Result<Vec<(Client, VrnicInfo)>> {
    check_count(names.len())?;
    let mut all = Vec::new();
    for name in names {
        let mut client = Client::connect(dir)?;
        let info = vrnics::show(&mut client, name)?;
        add_to(&mut all, client, info)?;
    }
    Ok(all)
}

/// Checks how many vRNICs a container is to have.
pub(crate) fn check_count(vrnics: usize) -> io::Result<()> {
    if vrnics > MAX_VRNICS {
        return Err(io::Error::other(format!("a container has at most {MAX_VRNICS} vRNICs")));
    }
    Ok(())
}

/// Adds a vRNIC to a container's.
///
/// # Errors
/// One line: they cannot be in one container.
pub(crate) fn add_to(all: &mut Vec<(Client, VrnicInfo)>, client: Client, info: VrnicInfo) -> io::Result<()> {
    let name = &info.name;
    if all.iter().any(|(_, other)| other.name == *name) {
        return Err(io::Error::other(format!("vRNIC {name} is given twice")));
    }
    if let Some((_, first)) = all.first().filter(|(_, first)| first.group != info.group) {
        let (a, b) = (&first.group, &info.group);
        return Err(io::Error::other(format!(
            "vRNIC {} is of group {a}, and {name} of group {b}: all vRNICs of a container are of one group",
            first.name
        )));
    }
    all.push((client, info));
    Ok(())
}

/// The devices of a container, with their names and their interfaces' names.
pub(crate) fn devices<'a>(vrnics: &'a [VrnicInfo], names: &'a [String], interfaces: &'a [String]) -> Vec<Device<'a>> {
    let all = vrnics.iter().zip(names.iter().zip(interfaces)).enumerate();
    all.map(|(number, (info, (name, interface)))| Device { info, name, number, interface }).collect()
}

pub(crate) fn run(dir: &Path, args: &RunArgs) -> io::Result<u8> {
    let (held, host) = if args.vrnic.is_empty() {
        // Nothing is started for a command that cannot run.
        let Taken { client, info, host } = library_dir().and_then(|_| unnamed::take(dir, args.new, args.quiet))?;
        (vec![(client, info)], host)
    } else {
        (named(dir, &args.vrnic)?, None)
    };
    let (mut clients, vrnics): (Vec<_>, Vec<_>) = held.into_iter().unzip();
    let names = device_names(&args.device_name, vrnics.len())?;
    let interfaces: Vec<_> = (0..vrnics.len()).map(|number| format!("eth{number}")).collect();
    let devices = devices(&vrnics, &names, &interfaces);
    let libraries = library_dir()?;
    home::forget_tokens();
    let homes = home::all(args.home)?;
    let working = workdir::find(dir, &homes);
    if let Some((working, why)) = working.as_ref().and_then(|w| Some((w, w.guard.as_ref().err()?))) {
        eprintln!("unirdma: the working directory {} is read-only: {why}", working.path.display());
    }
    let sandbox = Sandbox {
        dir,
        host: Host::All,
        vrnics: &vrnics.iter().map(|v| Path::new(&v.dir)).collect::<Vec<_>>(),
        devices: &devices,
        libraries: Some(&libraries),
        own_net: args.net == Net::Own,
        homes: &homes,
        working: working.as_ref(),
        binds: &args.bind,
        preload: !args.no_preload,
        explain: args.explain,
        execute: &|lost| sandbox::execute(&args.command, lost),
    };
    let (code, network) = contain(&sandbox, &mut clients)?;
    // Frees the vRNICs before this command ends, so that the next container can have them at once. An error is ignored:
    // a virtual layer that is gone has no container left. The virtual layer still passes on the last frames that the
    // container sent, which needs the container's network; so the network is dropped afterwards.
    let detached: io::Result<Vec<_>> = clients.iter_mut().map(|c| c.ask(&Request::Detach, None)).collect();
    drop(network);
    if let (Err(_), Some(host)) = (detached, host) {
        unnamed::wait_for_end(dir, host);
    }
    Ok(code)
}

/// Starts a container and waits until its command has ended. `clients`: connections that hold the vRNICs of its
/// devices. Returns the command's exit code, and a descriptor that keeps the container's own network alive.
///
/// # Errors
/// The container could not be started. A step inside that fails is an exit code, and has printed why.
pub(crate) fn contain(sandbox: &Sandbox<'_>, clients: &mut Vec<Client>) -> io::Result<(u8, Option<OwnedFd>)> {
    let (ours, theirs) = UnixStream::pair()?;
    let foreground = Foreground::now();
    let (pid, nested) = match fork()? {
        (Some(pid), nested) => (pid, nested),
        (None, nested) => {
            clients.clear();
            drop(ours);
            sandbox::first_process(sandbox, theirs, nested)
        }
    };
    drop(theirs);
    match serve(clients, sandbox.dir, sandbox.devices, pid, ours, nested, || process::pass_signals_to(pid, false)) {
        Ok(network) => {
            let code = process::wait(pid)?.code;
            foreground.restore();
            Ok((code, network))
        }
        Err(e) => {
            process::kill(pid);
            let _ = process::wait(pid);
            Err(e)
        }
    }
}

/// Forks the container's first process. It has the rights of this user (false) or, if those do not suffice, its rights
/// in a user namespace of its own (true).
pub(crate) fn fork() -> io::Result<(Option<i32>, bool)> {
    match process::fork(OUTER) {
        Ok(pid) => Ok((pid, false)),
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
            let hint = "are user namespaces allowed? sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns";
            let nested = process::fork(OUTER | UnshareFlags::NEWUSER);
            nested.map(|pid| (pid, true)).map_err(|e| io::Error::other(format!("cannot make namespaces: {e} ({hint})")))
        }
        Err(e) => Err(io::Error::other(format!("cannot make namespaces: {e}"))),
    }
}

/// Takes the steps that need a process outside of the container's namespaces: of the container whose first process is
/// `pid`. The process at the other end of `sock` takes the steps inside; `ready` is called before it goes on. Returns a
/// descriptor that keeps the container's network alive, if it has one of its own. Returns early if the other process
/// has failed; it has printed why.
pub(crate) fn serve(
    clients: &mut [Client],
    dir: &Path,
    devices: &[Device<'_>],
    pid: i32,
    mut sock: UnixStream,
    nested: bool,
    ready: impl FnOnce(),
) -> io::Result<Option<OwnedFd>> {
    let mut step = [0];
    if nested {
        if sock.read(&mut step)? == 0 || step != [MAP_IDS] {
            return Ok(None);
        }
        map_ids(pid)?;
        sock.write_all(&[MAP_IDS])?;
    }
    let mut came = loop {
        let (1, came) = fdpass::receive(sock.as_fd(), &mut step)? else { return Ok(None) };
        if step == [READY] {
            break came.into_iter();
        }
        let Some(net) = sysfs::Net::of_step(step[0]) else { return Ok(None) };
        sysfs::serve(devices, came, dir, net);
    };
    let first = rustix::process::Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidInput)?;
    let pidfd = rustix::process::pidfd_open(first, PidfdFlags::empty())?;
    for (client, device) in clients.iter_mut().zip(devices) {
        let name = &device.info.name;
        if let Some(frames) = came.next() {
            client.ask(&Request::Attach { name: name.into() }, Some(frames.as_fd()))?;
        }
        client.ask(&Request::Container { name: name.into() }, Some(pidfd.as_fd()))?;
    }
    ready();
    sock.write_all(&[GO])?;
    Ok(came.next())
}

/// Maps ids of the user namespace in which the container is built to the same ids here: all ids for root, only its own
/// for an ordinary user.
fn map_ids(pid: i32) -> io::Result<()> {
    let (process, user) = (pid.to_string(), idmap::user());
    if user.0 == 0 && idmap::write(&process, "uid_map", &all_ids("uid_map")).is_ok() {
        return idmap::write(&process, "gid_map", &all_ids("gid_map"));
    }
    idmap::map_only(&process, user)
}

/// All ids of this process's user namespace, each mapped to itself.
fn all_ids(file: &str) -> String {
    let own = std::fs::read_to_string(format!("/proc/self/{file}")).unwrap_or_default();
    let line = |l: &str| {
        let words: Vec<&str> = l.split_whitespace().collect();
        Some(format!("{0} {0} {1}\n", words.first()?, words.get(2)?))
    };
    own.lines().filter_map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::device_names;

    #[test]
    fn devices_count_on_from_the_first_name() {
        assert_eq!(device_names("mlx5_0", 1).unwrap(), ["mlx5_0"]);
        assert_eq!(device_names("mlx5_0", 3).unwrap(), ["mlx5_0", "mlx5_1", "mlx5_2"]);
        assert_eq!(device_names("mlx5_9", 2).unwrap(), ["mlx5_9", "mlx5_10"]);
        assert_eq!(device_names("rdma", 2).unwrap(), ["rdma0", "rdma1"]);
        assert_eq!(device_names("7", 2).unwrap(), ["7", "8"]);
        assert!(device_names(&"x".repeat(63), 2).is_err());
        assert!(device_names(&"9".repeat(40), 2).is_err());
    }
}
