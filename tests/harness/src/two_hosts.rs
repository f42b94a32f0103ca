//! Two hosts in network namespaces, each with a virtual layer.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::{Lab, Output, Result, unirdma};

/// Two hosts: network namespaces joined by a veth pair, each with a virtual layer and one vRNIC (a on the first, b on
/// the second, 10.0.0.1 and 10.0.0.2, fd00::1 and fd00::2). Dropping this value ends them.
pub struct TwoHosts {
    /// The virtual layers of the hosts.
    pub labs: Vec<Lab>,
    names: [String; 2],
}

/// Parameters of the network between the two hosts.
#[derive(Clone, Copy)]
pub struct Link<'a> {
    /// Distinguishes pairs of hosts that exist at the same time.
    pub name: &'a str,
    /// The hosts have IPv6 addresses; otherwise IPv4.
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
pub fn ip(args: &str) -> Result<()> {
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
