//! Processes that the supervisor starts: this program with another argument.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

/// Environment variables that a started process inherits.
const VARIABLES: [&str; 2] = ["UNIRDMA_LOG", "RUST_BACKTRACE"];
/// Disables restartable sequences (rseq(2)) in the C library. Nothing here uses them, and with them the kernel writes
/// to a thread's memory at each switch to it. This takes 0.1 us in pollers that give their core away for each request.
const TUNABLES: (&str, &str) = ("GLIBC_TUNABLES", "glibc.pthread.rseq=0");

/// A process started by a supervisor.
pub(crate) struct Child {
    pid: u32,
    pidfd: OwnedFd,
    /// `None`: its parent was an earlier supervisor.
    own: Option<std::process::Child>,
}

/// Starts this program with other arguments; `input` becomes its standard input.
///
/// # Errors
/// One line.
pub(crate) fn start(arguments: &[&str], input: OwnedFd) -> io::Result<Child> {
    // The program is not found by its path, where another program may be by now.
    let mut c = Command::new("/proc/self/exe");
    c.arg0("unirdma").args(arguments).current_dir("/").env_clear();
    c.envs(std::env::vars_os().filter(|(name, _)| VARIABLES.iter().any(|v| name == v)));
    c.env(TUNABLES.0, TUNABLES.1);
    // In a group of its own: signals that a terminal sends to the supervisor's process group are only for the
    // supervisor.
    c.stdin(Stdio::from(input)).stdout(Stdio::null()).process_group(0);
    let failed = |e: io::Error| io::Error::new(e.kind(), format!("cannot start another process: {e}"));
    let mut own = c.spawn().map_err(failed)?;
    let pid = own.id();
    match pidfd(pid) {
        Ok(pidfd) => Ok(Child { pid, pidfd, own: Some(own) }),
        Err(e) => {
            let _ = own.kill();
            let _ = own.wait();
            Err(failed(e))
        }
    }
}

fn pidfd(pid: u32) -> io::Result<OwnedFd> {
    let pid = Pid::from_raw(pid as i32).ok_or(io::ErrorKind::InvalidInput)?;
    Ok(pidfd_open(pid, PidfdFlags::empty())?)
}

impl Child {
    /// A process that another supervisor started.
    ///
    /// # Errors
    /// There is no such process.
    pub fn adopt(pid: u32) -> io::Result<Child> {
        Ok(Child { pid, pidfd: pidfd(pid)?, own: None })
    }

    /// As [`Child::adopt`], with the process's descriptor.
    pub fn of_pidfd(pid: u32, pidfd: OwnedFd) -> Child {
        Child { pid, pidfd, own: None }
    }

    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// A descriptor that becomes readable when the process has ended.
    pub fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    pub fn has_ended(&self) -> bool {
        let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(&self.pidfd, PollFlags::IN)], Some(&now)) != Ok(0)
    }

    /// Ends it at once, by SIGKILL.
    pub fn kill(&self) {
        let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
    }

    /// Waits until it has ended. Returns in words how it ended, if that is known.
    pub fn wait(&mut self) -> String {
        match &mut self.own {
            Some(child) => child.wait().map_or_else(|e| e.to_string(), |s| s.to_string()),
            None => {
                let _ = poll(&mut [PollFd::new(&self.pidfd, PollFlags::IN)], None);
                "how is not known".into()
            }
        }
    }
}
