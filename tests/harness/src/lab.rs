//! A virtual layer with vRNICs, and programs that use it as a user would.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::Result;

/// This user's id.
pub(crate) fn uid() -> u32 {
    // SAFETY: cannot fail and touches no memory.
    unsafe { libc::geteuid() }
}

/// The workspace's directory.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new(".")).to_path_buf()
}

/// The built `unirdma`.
pub(crate) fn unirdma() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from).join("release/unirdma")
}

/// Builds the programs.
///
/// # Errors
/// If the build fails.
pub(crate) fn build() -> Result<()> {
    cargo_build(&[])
}

/// Builds an example program of a package. Returns its path.
///
/// # Errors
/// If the build fails.
pub(crate) fn build_example(package: &str, name: &str) -> Result<PathBuf> {
    cargo_build(&["--package", package, "--example", name])?;
    Ok(unirdma().with_file_name("examples").join(name))
}

/// Builds the programs of another checkout, into that checkout's `target`.
///
/// # Errors
/// If the build fails.
pub(crate) fn build_in(tree: &Path) -> Result<()> {
    let mut c = Command::new("cargo");
    c.args(["build", "--release", "--quiet"]).current_dir(tree).env_remove("CARGO_TARGET_DIR");
    succeed(c)
}

fn cargo_build(what: &[&str]) -> Result<()> {
    let mut c = Command::new("cargo");
    c.args(["build", "--release", "--quiet"]).args(what).current_dir(root());
    succeed(c)
}

fn succeed(mut build: Command) -> Result<()> {
    let ok = build.status().is_ok_and(|s| s.success());
    if ok { Ok(()) } else { Err("cargo build --release failed".into()) }
}

/// A virtual layer in a directory of its own. Dropping this value ends both.
pub(crate) struct Lab {
    pub dir: PathBuf,
    exe: PathBuf,
    host: Child,
    /// Arguments of `unirdma host`.
    args: Vec<String>,
    user: Option<u32>,
    netns: Option<String>,
    count: AtomicU32,
    /// Its containers have private file systems. Containers of older versions do not.
    has_sandbox: bool,
}

/// Result of a program.
#[derive(Debug, Default)]
pub(crate) struct Output {
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

    pub fn ok(&self) -> bool {
        self.code == Some(0)
    }
}

/// A running program.
pub(crate) struct Running {
    child: Child,
    log: PathBuf,
    limit: Instant,
}

/// Longest time for a program.
const LIMIT: Duration = Duration::from_secs(90);
/// Longest time for a virtual layer to end.
const LIMIT_OF_END: Duration = Duration::from_secs(30);

impl Lab {
    /// Starts a virtual layer, as `user` if one is given.
    ///
    /// # Errors
    /// If it does not come up.
    pub fn start(user: Option<u32>) -> Result<Lab> {
        Lab::start_in(user, None, &[])
    }

    /// Starts a virtual layer in a network namespace, with more arguments.
    ///
    /// # Errors
    /// The virtual layer's log, if it does not come up.
    pub fn start_in(user: Option<u32>, netns: Option<&str>, args: &[&str]) -> Result<Lab> {
        Lab::start_of(&unirdma(), user, netns, args)
    }

    /// As [`Lab::start_in`], with the `unirdma` and the libraries of any build.
    ///
    /// # Errors
    /// The virtual layer's log, if it does not come up.
    pub fn start_of(unirdma: &Path, user: Option<u32>, netns: Option<&str>, args: &[&str]) -> Result<Lab> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("unirdma-lab-{}-{count}-{}", std::process::id(), user.unwrap_or(0));
        let dir = std::env::temp_dir().join(name);
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir).map_err(|e| e.to_string())?;
        let mut exe = unirdma.to_path_buf();
        if let Some(u) = user {
            std::os::unix::fs::chown(&dir, Some(u), Some(u)).map_err(|e| e.to_string())?;
            exe = copy_programs(&exe, &dir).map_err(|e| format!("cannot copy the programs: {e}"))?;
        }
        let log = File::create(dir.join("host.log")).map_err(|e| e.to_string())?;
        let mut c = command(user, netns);
        c.arg(&exe).arg("--dir").arg(dir.join("run")).arg("host").args(args).current_dir(&dir);
        let host = c.stderr(log).stdin(Stdio::null()).spawn().map_err(|e| format!("unirdma host: {e}"))?;
        let netns = netns.map(String::from);
        let args = args.iter().map(ToString::to_string).collect();
        let mut lab = Lab { dir, exe, host, args, user, netns, count: AtomicU32::new(0), has_sandbox: true };
        lab.has_sandbox = lab.unirdma(&["run", "--help"]).text.contains("--bind");
        lab.wait_up()?;
        Ok(lab)
    }

    /// Path of the `unirdma` that it runs.
    pub fn exe(&self) -> &Path {
        &self.exe
    }

    /// Process ID of the virtual layer.
    pub fn pid(&self) -> u32 {
        self.host.id()
    }

    /// Group, process and number of restarts of each worker.
    ///
    /// # Errors
    /// If the virtual layer does not answer.
    pub fn workers(&self) -> Result<Vec<(String, i32, u64)>> {
        let o = self.unirdma(&["status", "--json"]);
        let status: serde_json::Value = serde_json::from_str(&o.text).map_err(|e| format!("{e}: {}", o.text))?;
        let worker = |w: &serde_json::Value| {
            let pid = w["pid"].as_i64().unwrap_or(0) as i32;
            (w["group"].as_str().unwrap_or_default().into(), pid, w["restarts"].as_u64().unwrap_or(0))
        };
        Ok(status["workers"].as_array().into_iter().flatten().map(worker).collect())
    }

    /// Process ID of a group's worker, and its number of restarts.
    ///
    /// # Errors
    /// If the group has no worker at the moment.
    pub fn worker(&self, group: &str) -> Result<(i32, u64)> {
        let found = self.workers()?.into_iter().find(|w| w.0 == group && w.1 > 0);
        found.map(|w| (w.1, w.2)).ok_or_else(|| format!("group {group} has no worker"))
    }

    /// Kills the supervisor. Its workers live on.
    pub fn kill_host(&mut self) {
        let _ = self.host.kill();
        let _ = self.host.wait();
    }

    /// Starts a new supervisor with the same arguments.
    ///
    /// # Errors
    /// The virtual layer's log, if it does not come up.
    pub fn start_again(&mut self) -> Result<()> {
        let log = File::options().append(true).open(self.dir.join("host.log")).map_err(|e| e.to_string())?;
        let mut c = command(self.user, self.netns.as_deref());
        c.arg(&self.exe).arg("--dir").arg(self.dir.join("run")).arg("host").args(&self.args).current_dir(&self.dir);
        self.host = c.stderr(log).stdin(Stdio::null()).spawn().map_err(|e| format!("unirdma host: {e}"))?;
        self.wait_up()
    }

    fn wait_up(&mut self) -> Result<()> {
        let start = Instant::now();
        while !self.unirdma(&["status"]).ok() {
            if start.elapsed() > Duration::from_secs(10) || matches!(self.host.try_wait(), Ok(Some(_))) {
                let log = std::fs::read_to_string(self.dir.join("host.log")).unwrap_or_default();
                return Err(format!("the virtual layer did not start: {log}"));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// The end of the virtual layer's log.
    pub fn log(&self) -> String {
        let text = std::fs::read_to_string(self.dir.join("host.log")).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        format!("log of the virtual layer:\n{}", lines[lines.len().saturating_sub(20)..].join("\n"))
    }

    /// Exit status of the virtual layer's process, if it has ended.
    pub fn how_it_ended(&mut self) -> Option<String> {
        self.host.try_wait().ok().flatten().map(|status| status.to_string())
    }

    /// Ends the virtual layer while programs may still use it; kills it if it does not end.
    pub fn stop_host(&mut self) {
        if self.how_it_ended().is_some() {
            return;
        }
        terminate(&self.host);
        let start = Instant::now();
        while self.how_it_ended().is_none() {
            if start.elapsed() > LIMIT_OF_END {
                let _ = self.host.kill();
                let _ = self.host.wait();
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Runs `unirdma` with these arguments.
    pub fn unirdma(&self, args: &[&str]) -> Output {
        let mut c = command(self.user, self.netns.as_deref());
        Output::of(c.arg(&self.exe).arg("--dir").arg(self.dir.join("run")).args(args).current_dir(&self.dir))
    }

    /// Starts `unirdma` with these arguments.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start_unirdma(&self, args: &[&str]) -> Result<Running> {
        let count = self.count.fetch_add(1, Ordering::Relaxed) + 1;
        let log = self.dir.join(format!("{count:03}-unirdma.log"));
        let mut c = command(self.user, self.netns.as_deref());
        c.arg(&self.exe).arg("--dir").arg(self.dir.join("run")).args(args).stdin(Stdio::null()).current_dir(&self.dir);
        Running::start(c, &log)
    }

    /// Creates a vRNIC.
    ///
    /// # Errors
    /// The virtual layer's error line.
    pub fn vrnic(&self, name: &str, more: &[&str]) -> Result<()> {
        let o = self.unirdma(&[&["vrnic", "add", name], more].concat());
        if o.ok() { Ok(()) } else { Err(o.text) }
    }

    /// The socket of a vRNIC, for programs that run outside of containers.
    pub fn socket(&self, vrnic: &str) -> PathBuf {
        self.dir.join("run/vrnics").join(vrnic).join("vhost.sock")
    }

    /// Starts a shell command in a container.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn spawn(&self, vrnic: &str, options: &[&str], shell: &str) -> Result<Running> {
        let count = self.count.fetch_add(1, Ordering::Relaxed) + 1;
        let log = self.dir.join(format!("{count:03}-{vrnic}.log"));
        let mut c = command(self.user, self.netns.as_deref());
        c.arg(&self.exe).arg("--dir").arg(self.dir.join("run")).args(["run", "--vrnic", vrnic]).args(self.binds());
        c.args(options).current_dir(&self.dir);
        c.args(["--", "sh", "-c", &format!("exec {shell}")]).stdin(Stdio::null());
        Running::start(c, &log)
    }

    /// Directories that its containers see in addition to the usual ones: its directory and, if this user runs it, the
    /// checkout.
    fn binds(&self) -> Vec<String> {
        if !self.has_sandbox {
            return Vec::new();
        }
        let mut binds = vec!["--bind".into(), self.dir.display().to_string()];
        if self.user.is_none_or(|u| u == uid()) {
            binds.extend(["--bind".into(), format!("{}:ro", root().display())]);
        }
        binds
    }

    /// Runs a shell script outside of containers, as the user of this lab. `$U` is `unirdma`, `$LAB` the lab's
    /// directory, and `$HOME` a directory in it.
    pub fn shell(&self, script: &str) -> Output {
        let home = self.dir.join("home");
        let mut c = command(self.user, self.netns.as_deref());
        c.env("U", format!("{} --dir {}", self.exe.display(), self.dir.join("run").display()));
        c.env("LAB", &self.dir).env("HOME", &home).stdin(Stdio::null()).current_dir(&self.dir);
        // script(1) runs its command by this shell. Bash continues after a command that handled Ctrl-C by itself; dash
        // ends.
        c.env("SHELL", "/bin/bash");
        c.args(["timeout", "60", "sh", "-c", &format!("mkdir -p $HOME; exec 2>&1; {script}")]);
        match c.output() {
            Ok(o) => Output { code: o.status.code(), text: String::from_utf8_lossy(&o.stdout).into_owned() },
            Err(e) => Output { code: None, text: e.to_string() },
        }
    }

    /// A vRNIC, as `unirdma vrnic show --json` prints it.
    ///
    /// # Errors
    /// If the virtual layer does not answer.
    pub fn show(&self, vrnic: &str) -> Result<serde_json::Value> {
        let o = self.unirdma(&["vrnic", "show", vrnic, "--json"]);
        serde_json::from_str(&o.text).map_err(|e| format!("{e}: {}", o.text))
    }

    /// True if a program of a vRNIC listens for RDMA connections.
    pub fn rdma_listens(&self, vrnic: &str) -> bool {
        self.unirdma(&["vrnic", "show", vrnic, "--json"]).text.contains("\"listeners\": [\n")
    }

    /// Runs a server in one container and, once it listens, its client in another. Returns both outputs.
    ///
    /// # Errors
    /// If one of them cannot be started.
    pub fn pair(&self, server: (&str, &str), client: (&str, &str), options: &[&str]) -> Result<(Output, Output)> {
        self.pair_with(self, server, client, options)
    }

    /// As [`Lab::pair`], with the client's container on another host.
    ///
    /// # Errors
    /// If one of them cannot be started.
    pub fn pair_with(
        &self,
        other: &Lab,
        server: (&str, &str),
        client: (&str, &str),
        options: &[&str],
    ) -> Result<(Output, Output)> {
        // perftest compares the processor's clock with the system's, and gives up if the machine was busy meanwhile.
        let gave_up = |o: &Output| o.text.contains("Can't produce a report");
        let run = || self.pair_once(other, server, client, options);
        let (s, c) = run()?;
        if gave_up(&s) || gave_up(&c) { run() } else { Ok((s, c)) }
    }

    fn pair_once(
        &self,
        other: &Lab,
        server: (&str, &str),
        client: (&str, &str),
        options: &[&str],
    ) -> Result<(Output, Output)> {
        let mut s = self.spawn(server.0, options, server.1)?;
        if !s.wait_listening(|| self.rdma_listens(server.0)) {
            return Ok((s.finish(), Output::default()));
        }
        let c = other.spawn(client.0, options, client.1)?.finish();
        if !c.ok() {
            s.limit = s.limit.min(Instant::now() + Duration::from_secs(10));
        }
        Ok((s.finish(), c))
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        self.stop_host();
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// Copies the programs to a place where any user can run them, because the checkout may be closed to others.
fn copy_programs(exe: &Path, dir: &Path) -> std::io::Result<PathBuf> {
    let bin = dir.join("bin");
    std::fs::create_dir_all(bin.join("dropin"))?;
    for name in ["libibverbs.so.1", "librdmacm.so.1"] {
        std::fs::copy(exe.with_file_name("libibverbs.so"), bin.join("dropin").join(name))?;
    }
    std::fs::copy(exe, bin.join("unirdma"))?;
    Ok(bin.join("unirdma"))
}

/// The cores that this program may use, in ascending order.
pub fn cores() -> Vec<usize> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let list = status.lines().find_map(|l| l.strip_prefix("Cpus_allowed_list:")).unwrap_or_default().trim();
    let range = |r: &str| {
        let (first, last) = r.split_once('-').unwrap_or((r, r));
        Some(first.parse().ok()?..=last.parse().ok()?)
    };
    list.split(',').filter_map(range).flatten().collect()
}

/// A command as another user or this one, in another network namespace or this one.
fn command(user: Option<u32>, netns: Option<&str>) -> Command {
    let me = uid();
    let mut words: Vec<String> = Vec::new();
    if let Some(n) = netns {
        words.extend(["ip", "netns", "exec", n].map(String::from));
    }
    match user.filter(|&u| u != me) {
        None => words.push("env".into()),
        Some(u) => {
            words.extend(["setpriv".into(), format!("--reuid={u}"), format!("--regid={u}"), "--clear-groups".into()]);
        }
    }
    let mut c = Command::new(&words[0]);
    c.args(&words[1..]);
    c
}

/// Two hosts: network namespaces joined by a veth pair, each with a virtual layer and one vRNIC (a on the first, b on
/// the second, 10.0.0.1 and 10.0.0.2, fd00::1 and fd00::2). Dropping this value ends them.
pub(crate) struct TwoHosts {
    pub labs: Vec<Lab>,
    names: [String; 2],
}

/// Parameters of the network between the two hosts.
#[derive(Clone, Copy)]
pub(crate) struct Link<'a> {
    /// Distinguishes pairs of hosts that exist at the same time.
    pub name: &'a str,
    pub ipv6: bool,
    /// MTU of the veth pair.
    pub mtu: u32,
    /// More arguments of both virtual layers.
    pub args: &'a [&'a str],
}

impl Link<'_> {
    /// Address of a host.
    pub fn address(&self, host: usize) -> String {
        if self.ipv6 { format!("fd07::{}", host + 1) } else { format!("192.168.7.{}", host + 1) }
    }
}

/// Runs `ip`.
///
/// # Errors
/// The output of `ip`, if it fails.
pub(crate) fn ip(args: &str) -> Result<()> {
    let o = Command::new("ip").args(args.split_whitespace()).output().map_err(|e| format!("ip: {e}"))?;
    if o.status.success() { Ok(()) } else { Err(format!("ip {args}: {}", String::from_utf8_lossy(&o.stderr))) }
}

impl TwoHosts {
    /// Makes the hosts. Needs root, for the network namespaces.
    ///
    /// # Errors
    /// The step that failed.
    pub fn start(link: Link<'_>) -> Result<TwoHosts> {
        TwoHosts::start_of(&unirdma(), link)
    }

    /// As [`TwoHosts::start`], with the `unirdma` and the libraries of any build.
    ///
    /// # Errors
    /// The step that failed.
    pub fn start_of(unirdma: &Path, link: Link<'_>) -> Result<TwoHosts> {
        let name = |i: usize| format!("ur{}-{}{i}", std::process::id(), link.name);
        let mut two = TwoHosts { labs: Vec::new(), names: [name(0), name(1)] };
        let [a, b] = two.names.clone();
        ip(&format!("netns add {a}"))?;
        ip(&format!("netns add {b}"))?;
        ip(&format!("link add veth0 mtu {0} netns {a} type veth peer name veth0 mtu {0} netns {b}", link.mtu))?;
        for (i, n) in [&a, &b].into_iter().enumerate() {
            let (prefix, nodad) = if link.ipv6 { (64, " nodad") } else { (24, "") };
            ip(&format!("-n {n} addr add {}/{prefix} dev veth0{nodad}", link.address(i)))?;
            ip(&format!("-n {n} link set lo up"))?;
            ip(&format!("-n {n} link set veth0 up"))?;
        }
        for (i, n) in [&a, &b].into_iter().enumerate() {
            let peers = std::env::temp_dir().join(format!("{n}.peers"));
            let (peer, host) = (2 - i, link.address(1 - i));
            let line = format!("10.0.0.{peer} default {host}\nfd00::{peer} default {host}\n");
            std::fs::write(&peers, line).map_err(|e| e.to_string())?;
            let address = link.address(i);
            let peers = peers.display().to_string();
            let args = [&["--address", &address, "--peers", &peers], link.args].concat();
            two.labs.push(Lab::start_of(unirdma, None, Some(n), &args)?);
        }
        two.labs[0].vrnic("a", &["--ip", "10.0.0.1", "--ip", "fd00::1"])?;
        two.labs[1].vrnic("b", &["--ip", "10.0.0.2", "--ip", "fd00::2"])?;
        Ok(two)
    }

    /// Network namespace of a host.
    pub fn netns(&self, host: usize) -> &str {
        &self.names[host]
    }

    /// The peers file of a host.
    pub fn peers(&self, host: usize) -> PathBuf {
        std::env::temp_dir().join(format!("{}.peers", self.names[host]))
    }

    /// Gives both hosts a new secret of the default group, and waits until each knows that the other one has it.
    ///
    /// # Errors
    /// The output of `unirdma`, if it fails, or an error if the hosts do not find each other.
    pub fn give_secret(&self, name: &str) -> Result<()> {
        let mut path = self.labs[0].dir.join(name).display().to_string();
        let run = |lab: &Lab, args: &[&str]| {
            let o = lab.unirdma(args);
            if o.ok() { Ok(()) } else { Err(o.text) }
        };
        run(&self.labs[0], &["secret", &path])?;
        // The number of a secret is one byte. A secret with the number of another one of the group is refused.
        while let Err(e) = run(&self.labs[0], &["group", "set", "default", "--secret", &path]) {
            if !e.contains("make another one") {
                return Err(e);
            }
            path += ".another";
            run(&self.labs[0], &["secret", &path])?;
        }
        run(&self.labs[1], &["group", "set", "default", "--secret", &path])?;
        self.wait_met()
    }

    /// Waits until each host knows that the other one has the current secret.
    ///
    /// # Errors
    /// If they do not find each other in time.
    pub fn wait_met(&self) -> Result<()> {
        for lab in &self.labs {
            let start = Instant::now();
            loop {
                let text = lab.unirdma(&["status"]).text;
                if text.contains("are sealed with secret") && !text.contains("has not shown that it has") {
                    break;
                }
                if start.elapsed() > Duration::from_secs(10) {
                    return Err(format!("no session: {text}{}", lab.log()));
                }
                std::thread::sleep(Duration::from_millis(10));
            }
        }
        Ok(())
    }

    /// Runs a server in the container of the first host, and its client in the container of the second.
    ///
    /// # Errors
    /// If one of them cannot be started.
    pub fn pair(&self, server: &str, client: &str) -> Result<(Output, Output)> {
        self.labs[0].pair_with(&self.labs[1], ("a", server), ("b", client), &[])
    }
}

impl Drop for TwoHosts {
    fn drop(&mut self) {
        self.labs.clear();
        for (i, n) in self.names.iter().enumerate() {
            let _ = std::fs::remove_file(self.peers(i));
            let _ = ip(&format!("netns del {n}"));
        }
    }
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
pub(crate) fn terminate(child: &Child) {
    signal(child, libc::SIGTERM);
}

/// Sends a signal to a child of this process.
pub(crate) fn signal(child: &Child, signal: libc::c_int) {
    // SAFETY: our own child, not waited for yet.
    unsafe { libc::kill(child.id() as i32, signal) };
}

/// Fails with this message unless `ok`.
pub(crate) fn require(ok: bool, what: impl Into<String>) -> Result<()> {
    if ok { Ok(()) } else { Err(what.into()) }
}

/// Waits until `is_so` returns true. Returns the time that it took.
///
/// # Errors
/// `otherwise`, if that does not happen within `limit`; or the error of `is_so`.
pub(crate) fn within(limit: Duration, mut is_so: impl FnMut() -> Result<bool>, otherwise: &str) -> Result<Duration> {
    let start = Instant::now();
    while !is_so()? {
        require(start.elapsed() < limit, otherwise)?;
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(start.elapsed())
}

/// As [`within`], with a condition that cannot fail.
pub(crate) fn wait_until(limit: Duration, mut is_so: impl FnMut() -> bool, otherwise: &str) -> Result<()> {
    within(limit, || Ok(is_so()), otherwise).map(drop)
}

/// True if a descendant of `pid` has a TCP socket of its own in state LISTEN.
pub(crate) fn listens(pid: u32) -> bool {
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

/// Rows of numbers in perftest's output.
pub(crate) fn rows(text: &str) -> Vec<Vec<f64>> {
    let numbers = |l: &str| l.split_whitespace().map(|w| w.parse::<f64>()).collect::<std::result::Result<Vec<_>, _>>();
    text.lines().filter_map(|l| numbers(l).ok()).filter(|r| r.len() >= 5).collect()
}
