//! `unirdma run`: a container of one process tree with its own user, mount and network namespace.
//!
//! The parent stays outside, holds the connection that keeps the interface attached, and ends with the
//! command's exit code. The child unshares, waits for its id maps, sets up network and mounts, and
//! executes the command.

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::{Args, ValueEnum};
use rustix::mount::MountPropagationFlags;
use rustix::thread::UnshareFlags;
use unirdma_host::admin::{Request, Response};
use unirdma_host::{Client, VrnicInfo, fdpass};

pub(crate) const EXAMPLES: &str = "Examples:
  unirdma run --vrnic a -- ibv_devinfo -v
  unirdma run --vrnic a --net host -- ./my_server   # share the host's network

Exit code: that of the command; 127 if it does not exist, 126 if it cannot be run.";

#[derive(Args)]
pub(crate) struct RunArgs {
    /// The vRNIC that the container gets
    #[arg(long, value_name = "NAME")]
    vrnic: String,
    /// Network: an interface with the vRNIC's address, or the host's network as it is
    #[arg(long, value_enum, default_value_t = Net::Own)]
    net: Net,
    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "CMD")]
    command: Vec<OsString>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Net {
    Own,
    Host,
}

/// The directory with our libibverbs: beside the program, or where packages put it.
fn library_dir() -> io::Result<PathBuf> {
    if let Some(d) = std::env::var_os("UNIRDMA_LIBDIR") {
        return Ok(d.into());
    }
    let exe = std::env::current_exe()?;
    let beside = exe.parent().map(|p| p.join("dropin"));
    let candidates = [beside, Some("/usr/lib/unirdma".into()), Some("/usr/local/lib/unirdma".into())];
    let found = candidates.into_iter().flatten().find(|d| d.join("libibverbs.so.1").exists());
    found.ok_or_else(|| io::Error::other("libibverbs.so.1 is not beside this program; build all with `cargo build --release`, or name its directory in UNIRDMA_LIBDIR"))
}

fn parse_mac(text: &str) -> io::Result<[u8; 6]> {
    let bytes: Vec<u8> = text.split(':').filter_map(|h| u8::from_str_radix(h, 16).ok()).collect();
    bytes.try_into().map_err(|_| io::Error::other(format!("the virtual layer gave the MAC `{text}`")))
}

pub(crate) fn run(dir: &Path, args: &RunArgs) -> io::Result<u8> {
    let mut client = Client::connect(dir)?;
    let Response::Vrnic(info) = client.ask(&Request::VrnicShow { name: args.vrnic.clone() }, None)? else {
        return Err(io::Error::other("unexpected answer of the virtual layer"));
    };
    let libs = library_dir()?;
    let (ours, theirs) = UnixStream::pair()?;
    // SAFETY: this program has one thread, so the child may run ordinary code.
    let pid = match unsafe { libc::fork() } {
        -1 => return Err(io::Error::last_os_error()),
        0 => {
            drop((client, ours));
            child(dir, args, &info, &libs, theirs);
        }
        pid => pid,
    };
    drop(theirs);
    match parent(&mut client, args, pid, ours) {
        Ok(()) => {
            let code = wait(pid)?;
            // Who runs the next container at once finds the vRNIC free. A virtual layer that is gone has no container left.
            let _ = client.ask(&Request::Detach, None);
            Ok(code)
        }
        Err(e) => {
            // SAFETY: the child is ours and was not waited for yet.
            unsafe { libc::kill(pid, libc::SIGKILL) };
            let _ = wait(pid);
            Err(e)
        }
    }
}

/// Steps that need a party outside of the new namespaces.
fn parent(client: &mut Client, args: &RunArgs, pid: i32, mut sock: UnixStream) -> io::Result<()> {
    let mut step = [0];
    if sock.read(&mut step)? == 0 {
        return Ok(());
    }
    map_ids(pid)?;
    sock.write_all(b"m")?;
    if args.net == Net::Own {
        let (_, Some(fd)) = fdpass::receive(sock.as_fd(), &mut step)? else { return Ok(()) };
        client.ask(&Request::Attach { name: args.vrnic.clone() }, Some(fd.as_fd()))?;
        sock.write_all(b"a")?;
    }
    Ok(())
}

/// As root all ids are the same inside; an ordinary user has one id, and it is the same too.
fn map_ids(pid: i32) -> io::Result<()> {
    let write = |file: &str, text: String| {
        let path = format!("/proc/{pid}/{file}");
        std::fs::write(&path, text).map_err(|e| io::Error::new(e.kind(), format!("cannot write {path}: {e}")))
    };
    let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
    if uid.is_root() && write("uid_map", "0 0 4294967295".into()).is_ok() {
        return write("gid_map", "0 0 4294967295".into());
    }
    write("uid_map", format!("{0} {0} 1", uid.as_raw()))?;
    write("setgroups", "deny".into())?;
    write("gid_map", format!("{0} {0} 1", gid.as_raw()))
}

static CHILD: std::sync::atomic::AtomicI32 = std::sync::atomic::AtomicI32::new(0);

extern "C" fn pass_on(signal: i32) {
    // SAFETY: kill is async-signal-safe; the child is ours until it was waited for.
    unsafe { libc::kill(CHILD.load(std::sync::atomic::Ordering::Relaxed), signal) };
}

/// Waits for the child, passing termination signals on to it; its exit code.
fn wait(pid: i32) -> io::Result<u8> {
    CHILD.store(pid, std::sync::atomic::Ordering::Relaxed);
    // SAFETY: installs a handler that only calls kill. Ctrl-C reaches the child by itself.
    unsafe {
        libc::signal(libc::SIGTERM, pass_on as *const () as usize);
        libc::signal(libc::SIGINT, libc::SIG_IGN);
    }
    loop {
        let mut status = 0;
        // SAFETY: waits for our own child.
        if unsafe { libc::waitpid(pid, &mut status, 0) } == pid {
            let signaled = libc::WIFSIGNALED(status);
            return Ok(if signaled { 128 + libc::WTERMSIG(status) as u8 } else { libc::WEXITSTATUS(status) as u8 });
        }
        let e = io::Error::last_os_error();
        if e.kind() != io::ErrorKind::Interrupted {
            return Err(e);
        }
    }
}

/// Becomes the container; ends the process.
fn child(dir: &Path, args: &RunArgs, info: &VrnicInfo, libs: &Path, sock: UnixStream) -> ! {
    let e = match enter(dir, args, info, sock) {
        Ok(()) => {
            let old = std::env::var_os("LD_LIBRARY_PATH").filter(|v| !v.is_empty());
            let mut path = libs.as_os_str().to_owned();
            if let Some(old) = old {
                path.push(":");
                path.push(old);
            }
            let mut c = Command::new(&args.command[0]);
            c.args(&args.command[1..]).env("LD_LIBRARY_PATH", path).env("UNIRDMA_DIR", dir);
            c.exec()
        }
        Err(e) => {
            eprintln!("unirdma: {e}");
            std::process::exit(1);
        }
    };
    let name = args.command[0].to_string_lossy();
    // A directory of PATH that may not be searched must not look like a command that may not be run.
    let path = std::env::var_os("PATH").unwrap_or_default();
    let nowhere = !name.contains('/') && !std::env::split_paths(&path).any(|d| d.join(&*name).exists());
    let (code, why) = match e.kind() {
        io::ErrorKind::NotFound => (127, "there is no such command".to_string()),
        io::ErrorKind::PermissionDenied if nowhere => (127, "there is no such command in PATH".to_string()),
        _ => (126, e.to_string()),
    };
    eprintln!("unirdma: cannot run {name}: {why}");
    std::process::exit(code);
}

fn enter(dir: &Path, args: &RunArgs, info: &VrnicInfo, mut sock: UnixStream) -> io::Result<()> {
    let context = |what: &str| {
        let what = what.to_string();
        move |e: rustix::io::Errno| io::Error::other(format!("{what}: {e}"))
    };
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL)).map_err(context("prctl"))?;
    let mut spaces = UnshareFlags::NEWUSER | UnshareFlags::NEWNS;
    if args.net == Net::Own {
        spaces |= UnshareFlags::NEWNET;
    }
    // SAFETY: the process has one thread and shares no descriptor table with another.
    unsafe { rustix::thread::unshare_unsafe(spaces) }
        .map_err(context("cannot make namespaces (are user namespaces allowed? sysctl user.max_user_namespaces)"))?;
    sock.write_all(b"u")?;
    let mut step = [0];
    sock.read_exact(&mut step).map_err(|_| io::Error::other("the container was not set up"))?;
    // Nothing that is mounted here shows outside; only this vRNIC's directory shows inside (U18).
    rustix::mount::mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
        .map_err(context("mount"))?;
    if let Err(e) = crate::devices::set_up(dir, info, args.net == Net::Own) {
        eprintln!("unirdma: programs that look for devices in /sys or /dev will find none: {e}");
    }
    rustix::mount::mount_bind(&info.dir, dir).map_err(context("cannot mount the vRNIC's directory"))?;
    if args.net == Net::Own {
        let fd = crate::net::set_up(parse_mac(&info.mac)?, info.mtu, &info.ips)?;
        fdpass::send(sock.as_fd(), b"f", Some(fd.as_fd()))?;
        sock.read_exact(&mut step).map_err(|_| io::Error::other("the interface was not attached"))?;
    }
    Ok(())
}
