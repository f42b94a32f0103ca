//! `unirdma with`: a command with a virtual layer of its own, for the tests of other projects. It takes the place of
//! `modprobe rdma_rxe`.
//!
//! The command is in no sandbox: it runs as its user, sees what its user sees, and may use `unirdma` as who has started
//! the virtual layer. Where the kernel allows it, a mount namespace adds what programs look for besides: the device in
//! `/sys` and `/dev`, our libraries in the place of the system's, and the preloaded one. Elsewhere it has its
//! environment only.

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use clap::Args;
use rustix::mount::MountPropagationFlags;
use rustix::thread::UnshareFlags;
use unirdma_ipc::fdpass;
use unirdma_supervisor::admin::Request;
use unirdma_supervisor::served_by;

use crate::errors::{self, context};
use crate::process::{self, Foreground};
use crate::sysfs::{self, Device, Net};
use crate::{container, loader, mounts, sandbox, unnamed};

pub(crate) const EXAMPLES: &str = "Examples:
  unirdma with 1 -- pytest -q                    the tests of a project, which find a device
  unirdma with 1 -- sh -c 'ib_write_bw & sleep 1; ib_write_bw localhost'
  unirdma with 2 -- bash                         a shell; its other vRNIC is for a container:
      unirdma run --vrnic v2 -- ibv_devinfo
  unirdma with 1 --bare -- ./tests               without namespaces, as where they are not allowed

The vRNICs are v1, v2 and so on. The command has v1, and the machine's own network. UNIRDMA_HOST_DIR is set for it, so `unirdma` in it
means this virtual layer. When the command ends, what it has left running ends, and the virtual layer.

Exit code: that of the command; 127 if it does not exist, 126 if it cannot be run, 128 and the signal if one ended it.";

#[derive(Args)]
pub(crate) struct WithArgs {
    /// How many vRNICs
    #[arg(value_name = "N", value_parser = clap::value_parser!(u8).range(1..=100))]
    count: u8,
    /// Make no namespaces: the command finds the vRNIC by its environment only, and not in /sys and /dev
    #[arg(long)]
    bare: bool,
    /// Do not print the vRNICs' addresses
    #[arg(long, short)]
    quiet: bool,
    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "CMD")]
    command: Vec<OsString>,
}

/// A directory of this command alone, which is removed at the end.
struct Private(PathBuf);

impl Private {
    fn make() -> io::Result<Private> {
        let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|d| d.is_dir());
        let within = runtime.unwrap_or_else(std::env::temp_dir);
        for number in 0..100 {
            let path = within.join(format!("unirdma-with-{}-{number}", std::process::id()));
            match std::fs::DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) => return Ok(Private(path)),
                // Left by one that was killed, or somebody else's.
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                Err(e) => return Err(context(format!("cannot make a directory in {}", within.display()))(e)),
            }
        }
        Err(io::Error::other(format!("cannot make a directory in {}: it has too many of them", within.display())))
    }
}

impl Drop for Private {
    fn drop(&mut self) {
        if let Err(e) = std::fs::remove_dir_all(&self.0) {
            eprintln!("unirdma: cannot remove {}: {e}", self.0.display());
        }
    }
}

pub(crate) fn with(args: &WithArgs) -> io::Result<u8> {
    let libraries = container::library_dir()?;
    let private = Private::make()?;
    let (dir, staging) = (private.0.join("host"), private.0.join("staging"));
    for made in [&dir, &staging] {
        std::fs::create_dir(made)?;
    }
    // Signals wait until the command can have them.
    process::hold_signals(true);
    let names: Vec<String> = (1..=args.count).map(|n| format!("v{n}")).collect();
    let (mut client, vrnics) = unnamed::start(&dir, &names)?;
    let host = served_by(&dir);
    if !args.quiet {
        let addresses = vrnics.iter().map(|v| {
            let all: Vec<String> = v.ips.iter().map(|ip| ip.addr.to_string()).collect();
            format!("{} with address {}", v.name, all.join(", "))
        });
        let addresses: Vec<String> = addresses.collect();
        eprintln!("unirdma: vRNIC {} (the command has v1; all end with it)", addresses.join("; "));
    }
    // What the command leaves behind becomes a child of this process.
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
    let device = Device { info: &vrnics[0], name: "unirdma0", number: 0 };
    let (ours, theirs) = UnixStream::pair()?;
    let foreground = Foreground::now();
    let Some(pid) = process::fork(UnshareFlags::empty())? else {
        drop((client, ours));
        run(args, device, &dir, &staging, &libraries, theirs)
    };
    drop(theirs);
    process::pass_signals_to(pid, false);
    process::hold_signals(false);
    serve_sysfs(&ours, device, &dir);
    let code = process::wait(pid);
    foreground.restore();
    process::end_children(|child| Some(child) != host);
    let _ = client.ask(&Request::Detach, None);
    drop(client);
    if let Some(host) = host {
        // The command may have made more vRNICs.
        process::terminate(host);
        unnamed::wait_for_end(&dir, host);
    }
    Ok(code?.code)
}

/// Serves the device's files in `/sys`, once the command's process has mounted them.
fn serve_sysfs(mut sock: &UnixStream, device: Device<'_>, dir: &Path) {
    let Ok((1, came)) = fdpass::receive(sock.as_fd(), &mut [0]) else { return };
    for files in came {
        if let Err(e) = sysfs::serve(files, dir, device, Net::Host) {
            eprintln!("unirdma: the files of the RDMA device in /sys cannot be read: {e}");
        }
    }
    let _ = sock.write_all(&[sandbox::GO]);
}

/// The command's process.
fn run(args: &WithArgs, device: Device<'_>, dir: &Path, staging: &Path, libraries: &Path, mut sock: UnixStream) -> ! {
    let end = |e: &io::Error| sandbox::fail(e);
    if let Err(e) = sandbox::end_with_parent() {
        end(&e);
    }
    let mut preloads = false;
    if !args.bare {
        match enter_namespaces() {
            Ok(()) => preloads = add_device(device, staging, libraries, &mut sock),
            Err(e) => eprintln!(
                "unirdma: no namespaces, so the command finds the vRNIC by its environment only, and not in /sys and /dev: {}",
                errors::plain(&e.to_string())
            ),
        }
    }
    drop(sock);
    let mut variables = vec![("UNIRDMA_HOST_DIR", dir.into())];
    if !preloads {
        let mut all = libraries.join(loader::PRELOAD).into_os_string();
        if let Some(old) = std::env::var_os("LD_PRELOAD").filter(|v| !v.is_empty()) {
            all.push(":");
            all.push(old);
        }
        variables.push(("LD_PRELOAD", all));
    }
    process::hold_signals(false);
    sandbox::execute_with(&args.command, libraries, &[PathBuf::from(&device.info.dir)], variables, None)
}

/// Enters a mount namespace and, for an ordinary user, a user namespace with that user alone.
fn enter_namespaces() -> io::Result<()> {
    let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
    let users = if uid.is_root() { UnshareFlags::empty() } else { UnshareFlags::NEWUSER };
    // SAFETY: the process has one thread and shares no descriptor table with another.
    unsafe { rustix::thread::unshare_unsafe(users | UnshareFlags::NEWNS) }?;
    if !users.is_empty() {
        std::fs::write("/proc/self/setgroups", "deny")?;
        std::fs::write("/proc/self/uid_map", format!("{0} {0} 1", uid.as_raw()))?;
        std::fs::write("/proc/self/gid_map", format!("{0} {0} 1", gid.as_raw()))?;
    }
    Ok(rustix::mount::mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?)
}

/// Adds what programs look for to this mount namespace. What cannot be added is left out, with a line. Returns whether
/// all programs preload our library.
fn add_device(device: Device<'_>, staging: &Path, libraries: &Path, sock: &mut UnixStream) -> bool {
    let told = |what: &str, e: &io::Error| eprintln!("unirdma: {what}: {}", errors::plain(&e.to_string()));
    let preloads = loader::set_up(staging, (libraries, libraries), std::iter::empty())
        .inspect_err(|e| told("programs that bring a libibverbs of their own find the vRNIC by LD_PRELOAD only", e));
    if let Err(e) = loader::cover(libraries) {
        told("programs that lose their environment will find no device", &e);
    }
    if let Err(e) = mounts::add_to_dev(staging, Path::new("infiniband/uverbs0")) {
        told("/dev/infiniband/uverbs0 is missing", &e);
    }
    match sysfs::set_up(staging, &[device], Net::Host) {
        Ok(files) if !files.is_empty() => {
            let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
            // The command may look there at once.
            let _ = fdpass::send(sock.as_fd(), &[Net::Host.step()], &files).and_then(|_| sock.read_exact(&mut [0]));
        }
        Ok(_) => {}
        Err(e) => told("programs that look for devices in /sys will find none", &e),
    }
    preloads.is_ok()
}
