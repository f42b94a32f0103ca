//! Processes: started in new namespaces, waited for, and sent the signals that the command line receives meanwhile.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

use rustix::process::Pid;
use rustix::thread::UnshareFlags;

/// Signals that are for the command, not for the process that waits for it.
const PASSED: [libc::c_int; 6] =
    [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM, libc::SIGUSR1, libc::SIGUSR2];

/// The process that gets the signals; 0 for none.
static CHILD: AtomicI32 = AtomicI32::new(0);
/// True if only signals from another PID namespace are passed on.
static ONLY_FROM_OUTSIDE: AtomicBool = AtomicBool::new(false);

/// Forks. The child begins in new namespaces if `spaces` names any. Returns `None` in the child.
///
/// # Errors
/// As `clone(2)`.
pub(crate) fn fork(spaces: UnshareFlags) -> io::Result<Option<i32>> {
    let flags = i64::from(spaces.bits()) | i64::from(libc::SIGCHLD);
    // SAFETY: this program has one thread, so the child may run ordinary code; without a stack of its own, `clone` is
    // `fork`.
    match unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) } {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(None),
        pid => Ok(Some(pid as i32)),
    }
}

/// A child that has ended.
pub(crate) struct Ended {
    pub pid: i32,
    /// Its exit code, or 128 and the signal that ended it.
    pub code: u8,
}

/// Waits until a child ends: `pid`, or any child if `pid` is -1.
///
/// # Errors
/// As `waitpid(2)`. Signals do not interrupt the wait.
pub(crate) fn wait(pid: i32) -> io::Result<Ended> {
    loop {
        let mut status = 0;
        // SAFETY: waits for our own child, and writes its status into room for it.
        let pid = unsafe { libc::waitpid(pid, &mut status, 0) };
        if pid > 0 {
            let signaled = libc::WIFSIGNALED(status);
            let code = if signaled { 128 + libc::WTERMSIG(status) as u8 } else { libc::WEXITSTATUS(status) as u8 };
            return Ok(Ended { pid, code });
        }
        let e = io::Error::last_os_error();
        if e.kind() != io::ErrorKind::Interrupted {
            return Err(e);
        }
    }
}

/// Asks a process to end.
pub(crate) fn terminate(pid: u32) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
    }
}

/// Ends all children of this process for which `which` says so, and the processes that become its children by that.
pub(crate) fn end_children(which: impl Fn(u32) -> bool) {
    let children = || {
        let text = std::fs::read_to_string("/proc/thread-self/children").unwrap_or_default();
        let all: Vec<i32> = text.split_whitespace().filter_map(|pid| pid.parse().ok()).collect();
        all.into_iter().filter(|&pid| which(pid as u32)).collect::<Vec<_>>()
    };
    loop {
        let found = children();
        if found.is_empty() {
            return;
        }
        for pid in found {
            kill(pid);
            let _ = wait(pid);
        }
    }
}

/// Ends a child at once.
pub(crate) fn kill(pid: i32) {
    // SAFETY: the child is ours and was not waited for yet.
    unsafe { libc::kill(pid, libc::SIGKILL) };
}

extern "C" fn pass_on(signal: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel has filled the structure for a handler with SA_SIGINFO. A signal sent by a process has its
    // PID; the field is not used for other signals.
    let (code, from) = unsafe { ((*info).si_code, (*info).si_pid()) };
    let child = CHILD.load(Ordering::Relaxed);
    // A signal from the terminal goes to all processes in the foreground, so the command has it already.
    let by_a_process = code <= 0;
    if child > 0 && by_a_process && (from == 0 || !ONLY_FROM_OUTSIDE.load(Ordering::Relaxed)) {
        // SAFETY: kill is async-signal-safe, and the location of errno is this thread's own.
        unsafe {
            let errno = *libc::__errno_location();
            libc::kill(child, signal);
            *libc::__errno_location() = errno;
        }
    }
}

/// True if this process ignores a signal, as its starter has set it.
pub(crate) fn is_ignored(signal: libc::c_int) -> bool {
    // SAFETY: zero is a valid sigaction, into which the kernel writes the present one.
    unsafe {
        let mut old: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, std::ptr::null(), &mut old) == 0 && old.sa_sigaction == libc::SIG_IGN
    }
}

/// Passes signals on to a child from now on. `only_from_outside`: this is the first process of a PID namespace, whose
/// other processes can signal the child themselves.
pub(crate) fn pass_signals_to(child: i32, only_from_outside: bool) {
    CHILD.store(child, Ordering::Relaxed);
    ONLY_FROM_OUTSIDE.store(only_from_outside, Ordering::Relaxed);
    // Signals that were ignored before stay ignored, for `nohup` and background jobs of scripts.
    for signal in PASSED.into_iter().filter(|&s| !is_ignored(s)) {
        // SAFETY: zero is a valid sigaction; the handler does only what handlers may.
        unsafe {
            let mut new: libc::sigaction = std::mem::zeroed();
            new.sa_sigaction = pass_on as *const () as usize;
            new.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
            libc::sigaction(signal, &new, std::ptr::null_mut());
        }
    }
}

/// Blocks or unblocks the signals that are passed on.
pub(crate) fn hold_signals(hold: bool) {
    // SAFETY: the set is initialized by sigemptyset.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        for signal in PASSED {
            libc::sigaddset(&mut set, signal);
        }
        let how = if hold { libc::SIG_BLOCK } else { libc::SIG_UNBLOCK };
        libc::sigprocmask(how, &set, std::ptr::null_mut());
    }
}

/// The terminal's foreground process group, if this process is in it. A shell in the container takes the terminal for
/// its jobs and cannot give it back, because it does not see the processes outside.
pub(crate) struct Foreground(Option<Pid>);

impl Foreground {
    pub fn now() -> Foreground {
        let group = rustix::termios::tcgetpgrp(rustix::stdio::stdin()).ok();
        Foreground(group.filter(|&g| g == rustix::process::getpgrp()))
    }

    /// Takes the terminal back if its foreground process group has ended.
    pub fn restore(&self) {
        let stdin = rustix::stdio::stdin();
        let (Some(was), Ok(is)) = (self.0, rustix::termios::tcgetpgrp(stdin)) else { return };
        if rustix::process::test_kill_process_group(is) != Err(rustix::io::Errno::SRCH) {
            return;
        }
        // SAFETY: ignoring a signal runs no code. SIGTTOU would stop a process in the background.
        unsafe { libc::signal(libc::SIGTTOU, libc::SIG_IGN) };
        let _ = rustix::termios::tcsetpgrp(stdin, was);
    }
}
