//! `unirdma with`: a command with a virtual layer of its own, for the tests of other projects. It takes the place of
//! `modprobe rdma_rxe`.
//!
//! The command is in no sandbox: it runs as its user, sees what its user sees, and may manage the virtual layer. Where
//! the kernel allows it, a mount namespace adds what programs look for: the device in `/sys` and `/dev`, our libraries
//! in the place of the system's, and the preloaded one. Elsewhere the command has its environment only.

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::Args;
use rustix::mount::MountPropagationFlags;
use rustix::thread::UnshareFlags;
use unirdma_ipc::fdpass;
use unirdma_ipc::vrnic::{InvalidValue, IpNet};
use unirdma_supervisor::admin::{Request, TakeVrnic};
use unirdma_supervisor::served_by;

use crate::errors::{self, context};
use crate::process::{self, Foreground};
use crate::sandbox::{GO, READY};
use crate::sysfs::{self, Device, Live, Net};
use crate::{container, idmap, loader, mounts, net, sandbox, unnamed};

pub(crate) const EXAMPLES: &str = "Examples:
  unirdma with 1 -- pytest -q                    the tests of a project, which find a device
  unirdma with 1 -- sh -c 'ib_write_bw & sleep 1; ib_write_bw localhost'
  unirdma with 2 -- bash                         a shell; its other vRNIC is for a container:
      unirdma run --vrnic v2 -- ibv_devinfo
  unirdma with 1 --ip host -- ./tests            v1 has the machine's own address, as a device of rxe would
  unirdma with 1 --bare -- ./tests               without namespaces, as where they are not allowed

The vRNICs are v1, v2 and so on. The command has v1, and the machine's own network. UNIRDMA_HOST_DIR is set for it, so `unirdma` in it
means this virtual layer. When the command ends, so do the processes that it has left, and the virtual layer.

Exit code: that of the command; 127 if it does not exist, 126 if it cannot be run, 128 and the signal if one ended it.";

#[derive(Args)]
pub(crate) struct WithArgs {
    /// How many vRNICs
    #[arg(value_name = "N", value_parser = clap::value_parser!(u8).range(1..=100))]
    count: u8,
    /// Address of v1: one of this machine's, so that programs which ask for the address of an interface find v1 by it;
    /// `host`: the one by which the machine reaches others [default: 10.77.0.1, which no interface has]
    #[arg(long, value_name = "IP|host")]
    ip: Option<Address>,
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

/// The address of v1.
#[derive(Clone, Copy)]
enum Address {
    Host,
    Given(IpNet),
}

impl FromStr for Address {
    type Err = InvalidValue;

    fn from_str(text: &str) -> Result<Address, InvalidValue> {
        if text == "host" { Ok(Address::Host) } else { text.parse().map(Address::Given) }
    }
}

impl Address {
    fn get(self) -> io::Result<IpNet> {
        let Address::Given(ip) = self else { return net::own_address() };
        Ok(ip)
    }
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
    let named = |n| TakeVrnic { new: true, name: Some(format!("v{n}")), ..TakeVrnic::default() };
    let mut all: Vec<_> = (1..=args.count).map(named).collect();
    all[0].ips.extend(args.ip.map(Address::get).transpose()?);
    let (mut client, vrnics) = unnamed::start(&dir, &all)?;
    let host = served_by(&dir);
    if !args.quiet {
        let all: Vec<String> = vrnics.iter().map(unnamed::with_addresses).collect();
        eprintln!("unirdma: vRNIC {} (the command has v1; all end with it)", all.join("; "));
    }
    // Processes that the command leaves behind become children of this one.
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
    let foreground = Foreground::now();
    let start = Start {
        command: &args.command,
        device: Device { info: &vrnics[0], name: "unirdma0", number: 0, interface: "" },
        dir: &dir,
        staging: &staging,
        libraries: &libraries,
    };
    let pid = match start.begin(!args.bare) {
        Err(e) if !args.bare => {
            eprintln!(
                "unirdma: no namespaces, so the command finds the vRNIC by its environment only, and not in /sys and \
                 /dev: {}",
                errors::plain(&e.to_string())
            );
            start.begin(false)?
        }
        begun => begun?,
    };
    process::pass_signals_to(pid, false);
    process::hold_signals(false);
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

/// The command and what it needs.
struct Start<'a> {
    command: &'a [OsString],
    device: Device<'a>,
    /// The virtual layer's directory.
    dir: &'a Path,
    staging: &'a Path,
    libraries: &'a Path,
}

/// The command's process could not have its namespaces; the reason follows. Otherwise it sends [`READY`], with the
/// descriptors of files to serve.
const FAILED: u8 = b'f';

impl Start<'_> {
    /// Starts the command, in a mount namespace of its own if `own` says so. Returns its process.
    ///
    /// # Errors
    /// There is no such namespace, and no process.
    fn begin(&self, own: bool) -> io::Result<i32> {
        let (mut ours, theirs) = UnixStream::pair()?;
        let user = idmap::user();
        let spaces = match (own, user.0 == 0) {
            (false, _) => UnshareFlags::empty(),
            (true, true) => UnshareFlags::NEWNS,
            (true, false) => UnshareFlags::NEWNS | UnshareFlags::NEWUSER,
        };
        let Some(pid) = process::fork(spaces)? else {
            drop(ours);
            self.run(spaces, user, theirs)
        };
        drop(theirs);
        let mut step = [0];
        let (count, files) = fdpass::receive(ours.as_fd(), &mut step)?;
        if (count, step[0]) != (1, READY) {
            let mut why = String::new();
            let _ = ours.read_to_string(&mut why);
            process::wait(pid)?;
            return Err(io::Error::other(why));
        }
        sysfs::serve(&[self.device], files, self.dir, Net::Host);
        ours.write_all(&[GO])?;
        Ok(pid)
    }

    /// The command's process.
    fn run(&self, spaces: UnshareFlags, user: (u32, u32), mut sock: UnixStream) -> ! {
        if let Err(e) = sandbox::end_with_parent().and_then(|()| prepare(spaces, user)) {
            let _ = sock.write_all(&[FAILED]).and_then(|()| sock.write_all(e.to_string().as_bytes()));
            std::process::exit(1);
        }
        let (mut preloads, mut files) = (false, Vec::new());
        if !spaces.is_empty() {
            (preloads, files) = add_device(self.device, self.staging, self.libraries);
        }
        let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        // The command may look into the files at once.
        let told = fdpass::send(sock.as_fd(), &[READY], &files).and_then(|_| sock.read_exact(&mut [0]));
        if told.is_err() {
            std::process::exit(1);
        }
        drop(sock);
        let mut variables = vec![("UNIRDMA_HOST_DIR", self.dir.into())];
        if !preloads {
            let library = self.libraries.join(loader::PRELOAD).into_os_string();
            variables.push(("LD_PRELOAD", sandbox::before("LD_PRELOAD", library)));
        }
        process::hold_signals(false);
        let vrnic = PathBuf::from(&self.device.info.dir);
        sandbox::execute_with(self.command, self.libraries, &[vrnic], variables, None)
    }
}

/// Makes new namespaces of this process usable: a user namespace with the user's own id, a mount namespace whose mounts
/// stay in it.
fn prepare(spaces: UnshareFlags, user: (u32, u32)) -> io::Result<()> {
    if spaces.contains(UnshareFlags::NEWUSER) {
        idmap::map_only("self", user)?;
    }
    if spaces.is_empty() {
        return Ok(());
    }
    Ok(rustix::mount::mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?)
}

/// Adds what programs look for to this mount namespace. What cannot be added is left out, with a line. Returns whether
/// all programs preload our library, and the files of the device to serve.
fn add_device(device: Device<'_>, staging: &Path, libraries: &Path) -> (bool, Vec<OwnedFd>) {
    let told = |what: &str, e: &io::Error| eprintln!("unirdma: {what}: {}", errors::plain(&e.to_string()));
    let preloads = loader::set_up(staging, (libraries, libraries), std::iter::empty())
        .inspect_err(|e| told("programs that bring a libibverbs of their own find the vRNIC by LD_PRELOAD only", e));
    if let Err(e) = loader::cover(libraries) {
        told("the system's own libibverbs stays where it is", &e);
    }
    if let Err(e) = mounts::add_to_dev(staging, Path::new("infiniband/uverbs0")) {
        told("/dev/infiniband/uverbs0 is missing", &e);
    }
    let files = sysfs::set_up(Path::new(sysfs::SYS), staging, &[device], Net::Host, Live::make(&[device]))
        .inspect_err(|e| told("programs that look for devices in /sys will find none", e));
    (preloads.is_ok(), files.unwrap_or_default())
}
