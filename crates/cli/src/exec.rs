//! `unirdma exec`: runs another command in a vRNIC's container.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use clap::Args;
use rustix::process::{DumpableBehavior, Pid, PidfdFlags, pidfd_open};
use rustix::thread::{ThreadNameSpaceType, UnshareFlags};
use unirdma_supervisor::{Client, VHOST_SOCKET};

use crate::mounts;
use crate::process::{self, Foreground};
use crate::{confine, home, idmap, sandbox, vrnics};

pub(crate) const EXAMPLES: &str = "Examples:
  unirdma run --vrnic a -- bash          in one terminal
  unirdma exec --vrnic a -- ibv_devinfo  in another one: the same container

The command ends when the container ends, which is when the command of `unirdma run` ends.

Exit code: that of the command; 127 if it does not exist, 126 if it cannot be run, 128 and the signal if one ended it.";

#[derive(Args)]
pub(crate) struct ExecArgs {
    /// The vRNIC whose container the command is for
    #[arg(long, value_name = "NAME")]
    vrnic: String,
    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "CMD")]
    command: Vec<OsString>,
}

/// The first process of the vRNIC's container. A PID may be reused, a pidfd is not: the pidfd is right if the virtual
/// layer still reports the same PID after the pidfd was opened.
fn first_process(client: &mut Client, name: &str) -> io::Result<(OwnedFd, String)> {
    for _ in 0..10 {
        let info = vrnics::show(client, name)?;
        let Some(pid) = info.container.and_then(Pid::from_raw) else { break };
        let Ok(pidfd) = pidfd_open(pid, PidfdFlags::empty()) else { continue };
        if vrnics::show(client, name)?.container == info.container {
            return Ok((pidfd, info.dir));
        }
    }
    Err(io::Error::other(format!("vRNIC {name} has no container; start one with `unirdma run --vrnic {name} -- CMD`")))
}

pub(crate) fn exec(dir: &Path, args: &ExecArgs) -> io::Result<u8> {
    let mut client = Client::connect(dir)?;
    let (pidfd, vrnic) = first_process(&mut client, &args.vrnic)?;
    drop(client);
    confine::check_standard_descriptors()?;
    home::forget_tokens();
    let identity = |dir: &Path| std::fs::metadata(dir.join(VHOST_SOCKET)).map(|m| (m.dev(), m.ino()));
    let expected = identity(Path::new(&vrnic))?;
    let working = std::env::current_dir().ok();
    let foreground = Foreground::now();
    idmap::leave_groups();
    // Root of the container may do anything to processes of its user namespace, and the child below is still root
    // outside when it joins that namespace.
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    // All at once: the right to enter each namespace depends on the others.
    let spaces = ThreadNameSpaceType::USER
        | ThreadNameSpaceType::MOUNT
        | ThreadNameSpaceType::PROCESS_ID
        | ThreadNameSpaceType::NETWORK
        | ThreadNameSpaceType::INTER_PROCESS_COMMUNICATION
        | ThreadNameSpaceType::HOST_NAME_AND_NIS_DOMAIN_NAME
        | ThreadNameSpaceType::CONTROL_GROUP;
    let name = &args.vrnic;
    rustix::thread::move_into_thread_name_spaces(pidfd.as_fd(), spaces).map_err(|e| match e {
        rustix::io::Errno::SRCH => io::Error::other(format!("the container of vRNIC {name} has just ended")),
        e => io::Error::other(format!(
            "cannot enter the container of vRNIC {name} ({e}); only who has started it and root can"
        )),
    })?;
    if !mounts::vrnics().iter().any(|dir| identity(dir).ok() == Some(expected)) {
        return Err(io::Error::other(format!(
            "what runs as the container of vRNIC {name} is none that has this vRNIC"
        )));
    }
    let child = match process::fork(UnshareFlags::empty())? {
        Some(child) => child,
        None => {
            // Only a process in the container's PID namespace has a /proc/self there.
            let ready = idmap::become_first_user()
                .and_then(|()| sandbox::end_with_parent())
                .and_then(|()| confine::confine())
                .and_then(|()| confine::close_descriptors(true));
            if let Err(e) = ready {
                sandbox::fail(&e);
            }
            let lost = sandbox::go_to(working);
            sandbox::execute(&args.command, lost.as_deref())
        }
    };
    process::pass_signals_to(child, false);
    let code = process::wait(child)?.code;
    foreground.restore();
    Ok(code)
}
