//! A fleet of hosts in network namespaces with a control centre, set up as an operator would do it.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::{Lab, Result};

/// Address and port of the centre.
const CENTRE: &str = "192.168.8.1";
const PORT: u16 = 7443;
/// Longest time for the centre's first answer, and for a host to create its declared vRNICs.
const LIMIT: Duration = Duration::from_secs(20);

/// The address of a host, by its number from 0.
pub fn address(host: usize) -> String {
    format!("192.168.8.{}", host + 11)
}

/// All addresses of a host, in the order in which it names them. Two of three hosts also have IPv6, one before and one
/// after IPv4.
fn addresses(host: usize) -> Vec<String> {
    let (v4, v6) = (address(host), format!("fd08::{}", host + 11));
    match host % 3 {
        0 => vec![v4, v6],
        1 => vec![v6, v4],
        _ => vec![v4],
    }
}

/// Network namespaces joined by a bridge, a centre, and the hosts h0, h1 and so on that have joined it. Dropping this
/// value ends them.
pub struct Fleet {
    /// The virtual layers of the hosts.
    pub labs: Vec<Lab>,
    /// The namespaces of the hosts.
    pub netns: Vec<String>,
    centre: Option<Child>,
    dir: PathBuf,
    hub: String,
}

impl Fleet {
    /// Starts the centre and the hosts. Needs root, for the network namespaces.
    ///
    /// # Errors
    /// The step that failed.
    pub fn start(hosts: usize) -> Result<Fleet> {
        if crate::uid() != 0 {
            return Err("network namespaces need root: run this as root".into());
        }
        let name = |what: &str| format!("ur{}-{what}", std::process::id());
        let dir = std::env::temp_dir().join(name("fleet"));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir).map_err(|e| e.to_string())?;
        let mut fleet = Fleet { labs: Vec::new(), netns: Vec::new(), centre: None, dir, hub: name("hub") };
        let hub = fleet.hub.clone();
        crate::ip(&format!("netns add {hub}"))?;
        for words in ["link add br0 type bridge", "link set br0 up", "link set lo up"] {
            crate::ip(&format!("-n {hub} {words}"))?;
        }
        crate::ip(&format!("-n {hub} addr add {CENTRE}/24 dev br0"))?;
        let url = format!("https://{CENTRE}:{PORT}");
        fleet.unirdma(&["control", "init", "centre", "--url", &url])?;
        fleet.start_centre()?;
        for host in 0..hosts {
            fleet.add_host(&name(&format!("h{host}")), host, &url)?;
        }
        Ok(fleet)
    }

    fn add_host(&mut self, netns: &str, host: usize, url: &str) -> Result<()> {
        crate::ip(&format!("netns add {netns}"))?;
        self.netns.push(netns.into());
        let hub = &self.hub;
        crate::ip(&format!("link add veth0 netns {netns} type veth peer name h{host} netns {hub}"))?;
        crate::ip(&format!("-n {hub} link set h{host} master br0 up"))?;
        for a in addresses(host) {
            let rest = if a.contains(':') { "/64 dev veth0 nodad" } else { "/24 dev veth0" };
            crate::ip(&format!("-n {netns} addr add {a}{rest}"))?;
        }
        crate::ip(&format!("-n {netns} link set lo up"))?;
        crate::ip(&format!("-n {netns} link set veth0 up"))?;
        let name = format!("h{host}");
        let token = self.unirdma(&["token", "create", "--role", "join", "--host", &name])?;
        let (own, state) = (addresses(host), self.dir.join(format!("state{host}")).display().to_string());
        let mut args = vec!["--centre", url, "--join", token.trim(), "--name", &name, "--state", &state];
        args.extend(own.iter().flat_map(|a| ["--address", a]));
        self.labs.push(Lab::start_in(None, Some(netns), &args)?);
        Ok(())
    }

    /// An `unirdma` command in the namespace of the centre, as an administrator of the fleet.
    fn command(&self, args: &[&str]) -> Command {
        let mut c = Command::new("ip");
        c.args(["netns", "exec", &self.hub]).arg(crate::unirdma()).args(args);
        c.env("HOME", &self.dir).env_remove("XDG_CONFIG_HOME");
        c.env_remove("UNIRDMA_TOKEN").env_remove("UNIRDMA_CENTRE").env_remove("UNIRDMA_AUTHORITY");
        c.stdin(Stdio::null()).current_dir(&self.dir);
        c
    }

    /// Runs `unirdma` as an administrator of the fleet. Returns its output.
    ///
    /// # Errors
    /// Its output, if it fails.
    pub fn unirdma(&self, args: &[&str]) -> Result<String> {
        let o = self.command(args).output().map_err(|e| e.to_string())?;
        if o.status.success() {
            return Ok(String::from_utf8_lossy(&o.stdout).into_owned());
        }
        Err(format!("unirdma {}: {}", args.join(" "), String::from_utf8_lossy(&o.stderr)))
    }

    /// Starts the centre and waits until it answers.
    ///
    /// # Errors
    /// If it does not answer.
    pub fn start_centre(&mut self) -> Result<()> {
        let path = self.dir.join("centre.log");
        let log = std::fs::File::options().append(true).create(true).open(&path).map_err(|e| e.to_string())?;
        let mut c = self.command(&["control", "run", "centre", "--listen", &format!("{CENTRE}:{PORT}")]);
        self.centre = Some(c.stderr(log).stdout(Stdio::null()).spawn().map_err(|e| e.to_string())?);
        crate::wait_until(LIMIT, || self.unirdma(&["control", "status"]).is_ok(), "the centre did not start")
            .map_err(|e| format!("{e}: {}", std::fs::read_to_string(&path).unwrap_or_default()))
    }

    /// Kills the centre.
    pub fn kill_centre(&mut self) {
        if let Some(mut c) = self.centre.take() {
            let _ = c.kill();
            let _ = c.wait();
        }
    }

    /// Applies this TOML text.
    ///
    /// # Errors
    /// The centre's message, if it refuses.
    pub fn apply(&self, toml: &str) -> Result<()> {
        write(&self.dir.join("network.toml"), toml)?;
        self.unirdma(&["apply", "-f", "network.toml"]).map(drop)
    }

    /// Waits until a host has made its vRNIC.
    ///
    /// # Errors
    /// If the host does not do so in time.
    pub fn wait_for(&self, host: usize, vrnic: &str) -> Result<()> {
        let there = || self.labs[host].socket(vrnic).exists();
        crate::wait_until(LIMIT, there, &format!("host h{host} did not make {vrnic}"))
            .map_err(|e| format!("{e}\n{}", self.labs[host].log()))
    }

    /// Waits until each host has put the centre's newest state in force.
    ///
    /// # Errors
    /// If one host does not do so in time.
    pub fn wait_applied(&self) -> Result<()> {
        let all = || -> Option<bool> {
            let text = self.unirdma(&["get", "host", "--json"]).ok()?;
            let answer: serde_json::Value = serde_json::from_str(&text).ok()?;
            let hosts = answer["hosts"].as_array()?;
            Some(hosts.iter().all(|h| h["applied"] == answer["revision"]))
        };
        crate::wait_until(LIMIT, || all() == Some(true), "a host does not put in force what the centre says")
    }
}

fn write(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, text).map_err(|e| format!("{}: {e}", path.display()))
}

impl Drop for Fleet {
    fn drop(&mut self) {
        self.labs.clear();
        self.kill_centre();
        for n in self.netns.iter().chain([&self.hub]) {
            let _ = crate::ip(&format!("netns del {n}"));
        }
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}
