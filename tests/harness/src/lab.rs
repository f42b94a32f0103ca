//! A virtual layer with vRNICs, and programs that use it as a user would.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::process::terminate;
use crate::{Output, Result, Running, reruns, root, uid, unirdma};

/// A virtual layer in a directory of its own. Dropping this value ends both.
pub struct Lab {
    /// Its directory, which its containers see too.
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
        reruns::of_perftest(|| self.pair_once(other, server, client, options))
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
    let preload = "dropin/libunirdma-preload.so";
    std::fs::copy(exe.with_file_name(preload), bin.join(preload))?;
    std::fs::copy(exe, bin.join("unirdma"))?;
    Ok(bin.join("unirdma"))
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
