//! Makes sure that all processes which these commands start end with them, even on interruption: virtual layers,
//! attackers and guests that lived on would spoil later measurements.
//!
//! A child of the process that was started by hand does the work. That process waits, and adopts orphaned descendants.

use std::collections::HashSet;
use std::io;
use std::os::unix::process::{CommandExt, ExitStatusExt, parent_id};
use std::process::{Command, ExitCode, ExitStatus};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitOptions, getpid, kill_process, set_child_subreaper, wait};

use crate::Result;

/// Environment variable that is set in the child that does the work, to the pid of the process that waits for it.
/// Descendants inherit it, and are no children of that process.
const WAITS: &str = "UNIRDMA_TEST_WAITS";
/// Longest time for programs to end after SIGTERM. A virtual layer removes its interfaces and ends its workers
/// meanwhile.
const LIMIT: Duration = Duration::from_secs(10);
const LOOK: Duration = Duration::from_millis(20);

/// Does `work` in a child of this process, and returns the child's exit code. Everything that the work starts ends with
/// it. `name` begins the line that says which signal ended it.
pub fn guarded(name: &str, work: impl FnOnce() -> ExitCode) -> ExitCode {
    match watch(name) {
        Ok(None) => work(),
        Ok(Some(code)) => code,
        Err(e) => {
            eprintln!("{name}: cannot start itself again, to end what it starts: {e}");
            ExitCode::FAILURE
        }
    }
}

/// The exit code of a command. Its error is printed, after the name of the program.
pub fn exit_code(name: &str, done: Result<()>) -> ExitCode {
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("{name}: {e}");
            ExitCode::FAILURE
        }
    }
}

/// Starts a child that does the work of this process, and waits for it. Returns the child's exit code. Returns `None`
/// in the child itself, which then does the work.
fn watch(name: &str) -> io::Result<Option<ExitCode>> {
    if std::env::var(WAITS).is_ok_and(|pid| pid == parent_id().to_string()) {
        return Ok(None);
    }
    set_child_subreaper(Some(getpid()))?;
    let (child, status) = work()?;
    if let Some(by) = status.signal() {
        let count = end_descendants();
        remove_traces(child);
        eprintln!("{name}: ended by signal {by}; {count} processes that it had started were ended, too");
        return Ok(Some(ExitCode::from(128u8.wrapping_add(by as u8))));
    }
    Ok(Some(ExitCode::from(status.code().unwrap_or(1) as u8)))
}

/// Starts the child and waits for its end. Returns its pid and its exit status. Termination signals are forwarded to
/// the child.
fn work() -> io::Result<(Pid, ExitStatus)> {
    let asks = [Signal::INT, Signal::TERM, Signal::HUP].into_iter().filter(|&s| !is_ignored(s));
    let signals = SignalSet::of(asks.chain([Signal::CHILD]));
    signals.mask(libc::SIG_BLOCK)?;
    let mut command = Command::new(std::env::current_exe()?);
    command.args(std::env::args_os().skip(1)).env(WAITS, std::process::id().to_string());
    // SAFETY: the closure makes one system call and touches no memory but its own.
    unsafe { command.pre_exec(move || signals.mask(libc::SIG_UNBLOCK)) };
    let child = Pid::from_child(&command.spawn()?);
    loop {
        match signals.wait()? {
            Signal::CHILD => {
                if let Some(status) = reap(child) {
                    return Ok((child, status));
                }
            }
            ask => _ = kill_process(child, ask),
        }
    }
}

/// Signals that a thread waits for instead of handling them.
#[derive(Clone, Copy)]
struct SignalSet(libc::sigset_t);

impl SignalSet {
    fn of(signals: impl Iterator<Item = Signal>) -> SignalSet {
        let mut set = std::mem::MaybeUninit::uninit();
        // SAFETY: sigemptyset(3) initializes the set; the numbers are those of signals.
        unsafe {
            libc::sigemptyset(set.as_mut_ptr());
            signals.for_each(|s| _ = libc::sigaddset(set.as_mut_ptr(), s.as_raw()));
            SignalSet(set.assume_init())
        }
    }

    /// Blocks or unblocks the signals in this thread.
    fn mask(&self, how: libc::c_int) -> io::Result<()> {
        // SAFETY: the set is initialized, and the former mask is not asked for.
        match unsafe { libc::pthread_sigmask(how, &self.0, std::ptr::null_mut()) } {
            0 => Ok(()),
            e => Err(io::Error::from_raw_os_error(e)),
        }
    }

    /// Waits for one of the signals, which must be blocked.
    fn wait(&self) -> io::Result<Signal> {
        let mut signal = 0;
        // SAFETY: both arguments are valid for the call.
        match unsafe { libc::sigwait(&self.0, &mut signal) } {
            0 => Signal::from_named_raw(signal).ok_or_else(|| io::Error::other("a signal without a name")),
            e => Err(io::Error::from_raw_os_error(e)),
        }
    }
}

/// True if this process ignores a signal, as under nohup. Its child ignores that signal too.
fn is_ignored(signal: Signal) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|l| u64::from_str_radix(l.strip_prefix("SigIgn:")?.trim(), 16).ok());
    mask.is_some_and(|m| m & 1 << (signal.as_raw() - 1) != 0)
}

/// Reaps all processes that have ended, including adopted ones. Returns the exit status of `child` if it is among them.
fn reap(child: Pid) -> Option<ExitStatus> {
    let mut ended = None;
    while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG) {
        if pid == child {
            ended = Some(ExitStatus::from_raw(status.as_raw()));
        }
    }
    ended
}

/// Ends all descendants of this process. Returns their number.
fn end_descendants() -> usize {
    let began = Instant::now();
    let mut seen = HashSet::new();
    loop {
        let here = descendants();
        if here.is_empty() {
            return seen.len();
        }
        let too_late = began.elapsed() > LIMIT;
        for pid in here {
            if seen.insert(pid) || too_late {
                let _ = kill_process(pid, if too_late { Signal::KILL } else { Signal::TERM });
            }
        }
        std::thread::sleep(LOOK);
        while let Ok(Some(_)) = wait(WaitOptions::NOHANG) {}
    }
}

fn descendants() -> Vec<Pid> {
    let mut found = children(getpid());
    let mut i = 0;
    while let Some(&pid) = found.get(i) {
        found.extend(children(pid));
        i += 1;
    }
    found
}

fn children(pid: Pid) -> Vec<Pid> {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let lists = threads.filter_map(|t| std::fs::read_to_string(t.path().join("children")).ok());
    lists
        .flat_map(|l| l.split_whitespace().filter_map(|p| Pid::from_raw(p.parse().ok()?)).collect::<Vec<_>>())
        .collect()
}

/// Removes the directories and network namespaces of a process. Their names begin with our prefix and its pid.
fn remove_traces(of: Pid) {
    let named = |dir: &std::path::Path| {
        let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
        let names = entries.filter_map(|e| e.file_name().into_string().ok());
        names
            .filter(|n| n.starts_with("ur") || n.starts_with("unirdma-"))
            .filter(|n| first_number(n) == Some(of))
            .collect::<Vec<_>>()
    };
    for netns in named("/run/netns".as_ref()) {
        let _ = crate::ip(&format!("netns del {netns}"));
    }
    let temporary = std::env::temp_dir();
    for name in named(&temporary) {
        let path = temporary.join(name);
        let _ = std::fs::remove_dir_all(&path).or_else(|_| std::fs::remove_file(&path));
    }
}

fn first_number(name: &str) -> Option<Pid> {
    let digits = name.split(|c: char| !c.is_ascii_digit()).find(|d| !d.is_empty())?;
    Pid::from_raw(digits.parse().ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn children_of_children_are_found() {
        let mut shell = Command::new("sh").args(["-c", "sleep 60 & echo; wait"]).spawn().unwrap();
        let pid = Pid::from_child(&shell);
        let began = Instant::now();
        while children(pid).is_empty() && began.elapsed() < LIMIT {
            std::thread::sleep(LOOK);
        }
        let (here, sleeps) = (descendants(), children(pid));
        assert_eq!(sleeps.len(), 1);
        assert!(here.contains(&pid) && here.contains(&sleeps[0]), "{here:?}");
        kill_process(sleeps[0], Signal::KILL).unwrap();
        shell.wait().unwrap();
    }

    #[test]
    fn signals_that_are_ignored_stay_so() {
        // Programs in Rust begin by ignoring SIGPIPE.
        assert!(is_ignored(Signal::PIPE) && !is_ignored(Signal::SEGV));
    }

    #[test]
    fn names_tell_whose_they_are() {
        for (name, of) in
            [("ur12-f0", 12), ("ur12-f0.peers", 12), ("unirdma-lab-12-0-65534", 12), ("unirdma-12.peers", 12)]
        {
            assert_eq!(first_number(name), Pid::from_raw(of), "{name}");
        }
        assert_eq!(first_number("unirdma-demo"), None);
    }
}
