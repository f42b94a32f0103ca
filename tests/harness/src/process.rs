//! Programs that run in a container or on this host, and their output.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::Result;

/// Longest time for a program.
const LIMIT: Duration = Duration::from_secs(90);

/// Result of a program.
#[derive(Debug, Default)]
pub struct Output {
    /// Exit code; `None` if it was killed or took too long.
    pub code: Option<i32>,
    /// Standard output and standard error together.
    pub text: String,
}

impl Output {
    /// Runs a command without input to its end.
    pub fn of(c: &mut Command) -> Output {
        match c.stdin(Stdio::null()).output() {
            Ok(o) => Output {
                code: o.status.code(),
                text: String::from_utf8_lossy(&[o.stdout, o.stderr].concat()).into_owned(),
            },
            Err(e) => Output { code: None, text: e.to_string() },
        }
    }

    /// True if it succeeded.
    pub fn ok(&self) -> bool {
        self.code == Some(0)
    }

    /// The text with one space for each line break and indentation, to look for sentences in wrapped lines.
    pub fn unwrapped(&self) -> String {
        self.text.split_whitespace().collect::<Vec<_>>().join(" ")
    }
}

/// Runs a command to its end, which must be a success. `what`: its name.
pub(crate) fn succeed(what: &str, command: &mut Command) -> Result<()> {
    let o = Output::of(command);
    if o.ok() { Ok(()) } else { Err(format!("{what}: {}", o.text)) }
}

/// A running program.
pub struct Running {
    child: Child,
    log: PathBuf,
    pub(crate) limit: Instant,
}

impl Running {
    /// Starts a command whose output goes to `log`.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start(mut c: Command, log: &Path) -> Result<Running> {
        let out = File::create(log).map_err(|e| e.to_string())?;
        let err = out.try_clone().map_err(|e| e.to_string())?;
        let child = c.stdout(out).stderr(err).spawn().map_err(|e| e.to_string())?;
        Ok(Running { child, log: log.to_path_buf(), limit: Instant::now() + LIMIT })
    }

    /// Its standard input, if that is a pipe. It stays open until the end.
    pub fn stdin(&mut self) -> Option<&mut std::process::ChildStdin> {
        self.child.stdin.as_mut()
    }

    /// Waits until a process of the container listens on TCP, `otherwise` returns true, or the program ends.
    pub fn wait_listening(&mut self, otherwise: impl Fn() -> bool) -> bool {
        for look in 1.. {
            if Instant::now() > self.limit || !matches!(self.child.try_wait(), Ok(None)) {
                break;
            }
            if listens(self.child.id()) || look % 20 == 0 && otherwise() {
                return true;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        false
    }

    /// Its process ID.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// True if it has ended.
    pub fn has_ended(&mut self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
    }

    /// Interrupts it, as Ctrl-C does.
    pub fn interrupt(&self) {
        signal(&self.child, libc::SIGINT);
    }

    /// Kills it at once, with its container.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
    }

    /// As [`Running::finish`], with this limit.
    pub fn finish_within(mut self, limit: Duration) -> Output {
        self.limit = Instant::now() + limit;
        self.finish()
    }

    /// Waits for the end, up to the limit.
    pub fn finish(mut self) -> Output {
        let code = loop {
            match self.child.try_wait() {
                Ok(Some(s)) => break s.code(),
                Ok(None) if Instant::now() < self.limit => std::thread::sleep(Duration::from_millis(2)),
                _ => {
                    self.kill();
                    let _ = self.child.wait();
                    break None;
                }
            }
        };
        Output { code, text: self.text() }
    }

    /// Its output so far.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.log).unwrap_or_default()).into_owned()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            self.kill();
            let _ = self.child.wait();
        }
    }
}

/// Sends SIGTERM to a program.
pub fn terminate(child: &Child) {
    signal(child, libc::SIGTERM);
}

/// Sends a signal to a child of this process.
pub fn signal(child: &Child, signal: libc::c_int) {
    // SAFETY: our own child, not waited for yet.
    unsafe { libc::kill(child.id() as i32, signal) };
}

/// True if a descendant of `pid` has a TCP socket of its own in state LISTEN.
pub fn listens(pid: u32) -> bool {
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    children.split_whitespace().filter_map(|c| c.parse().ok()).any(|c: u32| {
        let inodes = |f: &str| -> Vec<String> {
            let text = std::fs::read_to_string(format!("/proc/{c}/net/{f}")).unwrap_or_default();
            let rows = text.lines().map(|l| l.split_whitespace().collect::<Vec<_>>());
            rows.filter(|r| r.get(3) == Some(&"0A")).filter_map(|r| r.get(9).map(|s| format!("socket:[{s}]"))).collect()
        };
        let listening = [inodes("tcp"), inodes("tcp6")].concat();
        let fds = std::fs::read_dir(format!("/proc/{c}/fd")).into_iter().flatten().flatten();
        let mut names = fds.filter_map(|e| std::fs::read_link(e.path()).ok());
        names.any(|n| listening.iter().any(|l| n.as_os_str() == l.as_str())) || listens(c)
    })
}
