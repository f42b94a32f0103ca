//! A running virtual machine: QEMU, its monitor, its console, and commands in the guest.
//!
//! Commands need no network. Each uses a port of a virtio serial device, at whose other end the guest has a shell.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::{Output, Result, failed};

/// Number of commands that may run at a time.
pub(super) const PORTS: usize = 8;
/// Longest time for a guest to come up.
const BOOT: Duration = Duration::from_secs(120);
/// Longest time for a command.
const LIMIT: Duration = Duration::from_secs(120);
/// The byte between a command's output and its exit code.
const END: u8 = 1;

/// The device file of a port in the guest, counted from 1.
pub(super) fn port_in_guest(n: usize) -> String {
    format!("/dev/vport0p{n}")
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Configuration of a virtual machine.
pub(super) struct Config<'a> {
    /// The command that starts QEMU.
    pub qemu: Vec<String>,
    /// Directory of its sockets and files.
    pub dir: &'a Path,
    pub kernel: &'a Path,
    pub initrd: &'a Path,
    pub processors: u32,
    /// More arguments of QEMU: memory and devices.
    pub more: Vec<String>,
    /// The terminal is the guest's console.
    pub interactive: bool,
}

/// A virtual machine. Dropping this value ends it.
pub struct Machine {
    qemu: Mutex<Child>,
    dir: PathBuf,
    ports: Mutex<Ports>,
}

#[derive(Default)]
struct Ports {
    all: Vec<UnixStream>,
    /// Ports without a running command.
    free: Arc<Mutex<Vec<UnixStream>>>,
}

/// A running command in a guest.
pub struct Task {
    state: Arc<State>,
    limit: Instant,
}

#[derive(Default)]
struct State {
    progress: Mutex<Progress>,
    changed: Condvar,
}

#[derive(Default)]
struct Progress {
    text: Vec<u8>,
    ended: bool,
    code: Option<i32>,
}

impl Machine {
    /// Starts it. It takes commands after [`Machine::wait_up`].
    ///
    /// # Errors
    /// If QEMU cannot be started.
    pub fn start(config: &Config<'_>) -> Result<Machine> {
        let dir = config.dir.to_path_buf();
        let path = |name: &str| dir.join(name).display().to_string();
        let mut c = Command::new(&config.qemu[0]);
        c.args(&config.qemu[1..]).args(["-accel", "tcg,thread=multi", "-machine", "q35", "-cpu", "max", "-nodefaults"]);
        c.args(["-smp", &config.processors.to_string(), "-display", "none"]);
        c.arg("-kernel").arg(config.kernel).arg("-initrd").arg(config.initrd).arg("-no-reboot");
        c.args(["-append", "console=ttyS0 quiet panic=-1 nokaslr mitigations=off"]);
        c.args(["-qmp", &format!("unix:{},server=on,wait=off", path("monitor"))]);
        c.args(["-device", "virtio-serial-pci"]);
        for n in 1..=PORTS {
            c.args(["-chardev", &format!("socket,id=port{n},path={},server=on,wait=off", path(&format!("port{n}")))]);
            c.args(["-device", &format!("virtserialport,chardev=port{n},nr={n}")]);
        }
        c.args(&config.more);
        if config.interactive {
            c.args(["-serial", "mon:stdio"]);
        } else {
            let log = fs::File::create(dir.join("qemu.log")).map_err(failed("qemu.log"))?;
            let err = log.try_clone().map_err(failed("qemu.log"))?;
            c.args(["-serial", &format!("file:{}", path("console.log"))]).stdin(Stdio::null()).stdout(log).stderr(err);
        }
        let qemu = c.spawn().map_err(failed(&config.qemu[0]))?;
        Ok(Machine { qemu: Mutex::new(qemu), dir, ports: Mutex::default() })
    }

    /// Connects the ports, and waits until the guest takes commands.
    ///
    /// # Errors
    /// If it does not come up, with the end of its console.
    pub fn wait_up(&self) -> Result<()> {
        let start = Instant::now();
        let mut answer: Option<Task> = None;
        loop {
            if self.has_ended() || start.elapsed() > BOOT {
                return Err(format!("the virtual machine did not come up\n{}", self.console()));
            }
            if answer.is_none() && self.connect() {
                // A machine that has just ended takes no command; the next round says so.
                answer = self.spawn("true").ok();
            }
            if answer.as_ref().is_some_and(Task::succeeded) {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Connects the ports. True if all are connected.
    fn connect(&self) -> bool {
        let ports = &mut *lock(&self.ports);
        for n in ports.all.len() + 1..=PORTS {
            let connected =
                UnixStream::connect(self.dir.join(format!("port{n}"))).and_then(|p| Ok((p.try_clone()?, p)));
            let Ok((port, clone)) = connected else { return false };
            ports.all.push(clone);
            lock(&ports.free).push(port);
        }
        true
    }

    /// Resets the guest, and waits until it takes commands again. Running commands end without an exit code.
    ///
    /// # Errors
    /// If it does not come up again.
    pub fn reset(&self) -> Result<()> {
        self.monitor("set-action", "{\"reboot\": \"reset\"}")?;
        self.monitor("system_reset", "{}")?;
        for port in std::mem::take(&mut *lock(&self.ports)).all {
            let _ = port.shutdown(std::net::Shutdown::Both);
        }
        self.wait_up()
    }

    /// Ends it at once.
    pub fn kill(&self) {
        let _ = lock(&self.qemu).kill();
        self.wait();
    }

    /// True if QEMU has ended.
    pub fn has_ended(&self) -> bool {
        !matches!(lock(&self.qemu).try_wait(), Ok(None))
    }

    fn read(&self, name: &str) -> String {
        String::from_utf8_lossy(&fs::read(self.dir.join(name)).unwrap_or_default()).into_owned()
    }

    /// All output of QEMU.
    pub fn qemu_log(&self) -> String {
        self.read("qemu.log")
    }

    /// The end of the output of QEMU and of the guest's kernel.
    pub fn console(&self) -> String {
        let text = self.qemu_log() + &self.read("console.log");
        let lines: Vec<&str> = text.lines().map(str::trim_end).collect();
        format!("console of the guest:\n{}", lines[lines.len().saturating_sub(40)..].join("\n"))
    }

    /// Starts a command in the guest.
    ///
    /// # Errors
    /// If too many run already, or the guest has ended.
    pub fn spawn(&self, command: &str) -> Result<Task> {
        let free = lock(&self.ports).free.clone();
        let mut port = lock(&free).pop().ok_or("too many commands run in the guest")?;
        writeln!(port, "{}", command.replace('\n', "; ")).map_err(failed("the guest is gone"))?;
        let state = Arc::new(State::default());
        let s = state.clone();
        std::thread::spawn(move || s.follow(port, &free));
        Ok(Task { state, limit: Instant::now() + LIMIT })
    }

    /// Runs a command in the guest.
    ///
    /// # Errors
    /// As [`Machine::spawn`].
    pub fn run(&self, command: &str) -> Result<Output> {
        Ok(self.spawn(command)?.finish())
    }

    /// Executes a command of QEMU's monitor protocol, with its arguments as JSON.
    ///
    /// # Errors
    /// QEMU's error.
    pub fn monitor(&self, command: &str, arguments: &str) -> Result<()> {
        let wrong = failed("QEMU's monitor");
        let stream = UnixStream::connect(self.dir.join("monitor")).map_err(&wrong)?;
        stream.set_read_timeout(Some(LIMIT)).map_err(&wrong)?;
        let mut answers = BufReader::new(&stream);
        let commands = [("qmp_capabilities", "{}"), (command, arguments)];
        for (name, arguments) in commands {
            writeln!(&stream, "{{\"execute\": \"{name}\", \"arguments\": {arguments}}}").map_err(&wrong)?;
            loop {
                let mut line = String::new();
                if answers.read_line(&mut line).map_err(&wrong)? == 0 || line.starts_with("{\"error\"") {
                    return Err(format!("QEMU's monitor: {name}: {line}"));
                }
                if line.starts_with("{\"return\"") {
                    break;
                }
            }
        }
        Ok(())
    }

    /// Waits until the guest is powered off.
    pub fn wait(&self) {
        let _ = lock(&self.qemu).wait();
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.kill();
    }
}

impl State {
    /// Reads a command's output up to its end, and frees the port.
    fn follow(&self, mut port: UnixStream, ports: &Mutex<Vec<UnixStream>>) {
        let mut bytes = [0; 4096];
        let mut end: Option<Vec<u8>> = None;
        let code = loop {
            let n = match port.read(&mut bytes) {
                Ok(0) | Err(_) => break None,
                Ok(n) => n,
            };
            let mut p = lock(&self.progress);
            for b in &bytes[..n] {
                match (&mut end, *b) {
                    (None, END) => end = Some(Vec::new()),
                    (None, b) => p.text.push(b),
                    (Some(digits), b) => digits.push(b),
                }
            }
            self.changed.notify_all();
            if let Some(digits) = end.as_ref().filter(|d| d.ends_with(b"\n")) {
                lock(ports).push(port);
                break String::from_utf8_lossy(digits).trim().parse().ok();
            }
        };
        let mut p = lock(&self.progress);
        (p.code, p.ended) = (code, true);
        self.changed.notify_all();
    }
}

impl Task {
    /// True if it has ended.
    pub fn has_ended(&self) -> bool {
        lock(&self.state.progress).ended
    }

    /// True if it has ended with the exit code 0.
    fn succeeded(&self) -> bool {
        lock(&self.state.progress).code == Some(0)
    }

    /// Its output so far.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&lock(&self.state.progress).text).into_owned()
    }

    /// As [`Task::finish`], with this limit.
    pub fn finish_within(mut self, limit: Duration) -> Output {
        self.limit = Instant::now() + limit;
        self.finish()
    }

    /// Waits for the end, up to the limit. A command that takes longer continues; its result has no exit code.
    pub fn finish(self) -> Output {
        let mut p = lock(&self.state.progress);
        while !p.ended {
            let left = self.limit.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            p = self.state.changed.wait_timeout(p, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        Output { code: p.code, text: String::from_utf8_lossy(&p.text).into_owned() }
    }
}
