//! Rules of the kernel's packet filter (nftables). With them, only the virtual layer of this host sends from its
//! addresses to RoCEv2 and VXLAN ports. Without them any user of the host can: a socket that is bound to a port of one
//! address may send with another address of the host (IP_PKTINFO), so that holding the port is not enough.
//!
//! The virtual layer's packets are recognized by their mark, which needs CAP_NET_ADMIN or CAP_NET_RAW to set. A match
//! on the user would also accept all services that run as root with few capabilities, and matching cgroups differs
//! between kernels. The rules come after NAT (postrouting, after `srcnat`), so that they also see packets of containers
//! that leave through this host.
//!
//! The rules are in a table of their own, named after the directory of the virtual layer. The process that sets them
//! removes them at its end; after a crash, the next start in that directory does. A file in the directory says that
//! there may be a table.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread::JoinHandle;

use unirdma_formats::net::VXLAN_PORT;
use unirdma_formats::wire::ROCE_PORT;

/// Mark of the virtual layer's packets. It uses few and low bits, since others use upper bits of marks as flags.
pub(crate) const MARK: u32 = 0x2a;
/// After NAT, whose priority is 100.
const AFTER_NAT: u32 = 300;
/// Name of the marker file in the directory of the virtual layer.
const FILE: &str = "firewall";

/// Name of the table of a directory. Names in nftables may have slashes; other characters that they may not have are
/// written in hexadecimal.
fn table(dir: &Path) -> String {
    let mut name = "unirdma".to_string();
    for &b in dir.as_os_str().as_encoded_bytes() {
        match b {
            b'/' | b'.' | b'-' => name.push(char::from(b)),
            _ if b.is_ascii_alphanumeric() => name.push(char::from(b)),
            _ => name += &format!("_{b:02x}"),
        }
    }
    name
}

/// The addresses of one family as a set of nftables; `None` if there are none.
fn set<'a>(addresses: impl IntoIterator<Item = &'a IpAddr>, ipv4: bool) -> Option<String> {
    let all: Vec<String> = addresses.into_iter().filter(|a| a.is_ipv4() == ipv4).map(ToString::to_string).collect();
    (!all.is_empty()).then(|| format!("{{ {} }}", all.join(", ")))
}

/// The rules as a script for `nft -f`, which replaces an existing table.
pub(crate) fn rules(dir: &Path, own: &[IpAddr], peers: &BTreeSet<IpAddr>) -> String {
    let name = table(dir);
    let (mut leaves, mut arrives) = (String::new(), String::new());
    for (family, ipv4) in [("ip", true), ("ip6", false)] {
        let Some(own) = set(own, ipv4) else { continue };
        for port in ["sport", "dport"] {
            let _ = writeln!(leaves, "    {family} saddr {own} udp {port} {{ {VXLAN_PORT}, {ROCE_PORT} }} drop");
        }
        let tunnel = format!("    {family} daddr {own} udp dport {VXLAN_PORT}");
        match set(peers, ipv4) {
            Some(peers) => {
                let _ = writeln!(arrives, "{tunnel} {family} saddr != {peers} drop");
                let _ = writeln!(arrives, "{tunnel} udp sport != {VXLAN_PORT} drop");
            }
            None => {
                let _ = writeln!(arrives, "{tunnel} drop");
            }
        }
    }
    format!(
        "\
# Made by `unirdma host --firewall`, which removes it at its end.
table inet {name}
delete table inet {name}
table inet {name} {{
  # From this host's addresses only the virtual layer sends from and to the ports of VXLAN and RoCEv2. Its packets have the mark.
  chain leaves {{
    type filter hook postrouting priority {AFTER_NAT}; policy accept;
    meta mark {MARK:#x} accept
{leaves}  }}
  # VXLAN comes from the peers' own port only.
  chain arrives {{
    type filter hook input priority filter; policy accept;
{arrives}  }}
}}
"
    )
}

/// Runs `nft` with a script.
fn nft(script: &str) -> io::Result<()> {
    let path = std::env::var("PATH").unwrap_or_default();
    let mut c = Command::new("nft");
    // The PATH of an ordinary user may lack the directory where Debian has `nft`.
    c.args(["-f", "-"]).env("PATH", format!("{path}:/usr/sbin:/sbin"));
    let mut child = c.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().map_err(|e| {
        let text = match e.kind() {
            io::ErrorKind::NotFound => {
                "--firewall takes the program `nft`, which is not installed (Debian: apt-get install nftables)".into()
            }
            _ => format!("nft: {e}"),
        };
        io::Error::new(e.kind(), text)
    })?;
    // If `nft` ends early, its error message says more than a broken pipe.
    let written = child.stdin.take().map_or(Ok(()), |mut i| i.write_all(script.as_bytes()));
    let done = child.wait_with_output()?;
    if done.status.success() {
        return written;
    }
    let said = String::from_utf8_lossy(&done.stderr);
    let line = said.lines().next().unwrap_or("it failed").to_string();
    Err(io::Error::other(format!("nft does not take the rules of --firewall: {line}")))
}

/// The rules in force, which are removed when this is dropped.
pub(crate) struct Firewall {
    dir: PathBuf,
    updates: Option<mpsc::Sender<BTreeSet<IpAddr>>>,
    thread: Option<JoinHandle<()>>,
}

impl Firewall {
    /// Sets the rules.
    ///
    /// # Errors
    /// One line that says what is wrong and what to do.
    pub fn start(dir: &Path, own: &[IpAddr], peers: &BTreeSet<IpAddr>) -> io::Result<Firewall> {
        // The file is written first, so that after a crash the next start always looks for rules.
        let note = dir.join(FILE);
        std::fs::write(&note, format!("{}\n", table(dir))).map_err(crate::context("cannot write", &note))?;
        if let Err(e) = nft(&rules(dir, own, peers)) {
            let _ = std::fs::remove_file(&note);
            return Err(e);
        }
        // From here on, dropping `firewall` removes the rules if anything fails.
        let mut firewall = Firewall { dir: dir.to_path_buf(), updates: None, thread: None };
        let (updates, later) = mpsc::channel::<BTreeSet<IpAddr>>();
        let (of_dir, own) = (dir.to_path_buf(), own.to_vec());
        // A thread runs `nft`, so that the supervisor's thread does not wait for it.
        let update = move || {
            while let Ok(peers) = later.recv() {
                if let Err(e) = nft(&rules(&of_dir, &own, &peers)) {
                    tracing::error!("the firewall has the peers as they were: {e}");
                }
            }
        };
        let thread = std::thread::Builder::new().name("firewall".into()).spawn(update)?;
        (firewall.updates, firewall.thread) = (Some(updates), Some(thread));
        Ok(firewall)
    }

    /// Updates the peers.
    pub fn set_peers(&self, peers: BTreeSet<IpAddr>) {
        if let Some(u) = &self.updates {
            let _ = u.send(peers);
        }
    }

    /// Name of its table.
    pub fn table(&self) -> String {
        table(&self.dir)
    }
}

impl Drop for Firewall {
    fn drop(&mut self) {
        self.updates = None;
        if let Some(t) = self.thread.take() {
            let _ = t.join();
        }
        remove(&self.dir);
    }
}

/// Removes rules that a crash has left in this directory's name.
pub(crate) fn remove_stale(dir: &Path) {
    if dir.join(FILE).exists() {
        remove(dir);
    }
}

fn remove(dir: &Path) {
    let name = table(dir);
    // The script creates the table first, so that deleting it always succeeds.
    match nft(&format!("table inet {name}\ndelete table inet {name}\n")) {
        Ok(()) => {
            let _ = std::fs::remove_file(dir.join(FILE));
        }
        Err(e) => tracing::error!("the rules of --firewall stay: {e}; remove them with `nft delete table inet {name}`"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ips(list: &[&str]) -> Vec<IpAddr> {
        list.iter().map(|s| s.parse().unwrap()).collect()
    }

    #[test]
    fn only_marked_packets_leave_and_only_those_of_peers_arrive() {
        let (own, peers) = (ips(&["192.168.7.1", "fd07::1"]), ips(&["192.168.7.2", "192.168.7.3"]));
        let text = rules(Path::new("/run/uni_rdma"), &own, &peers.into_iter().collect());
        let lines: Vec<&str> = text.lines().map(str::trim).filter(|l| !l.starts_with('#')).collect();
        assert_eq!(
            lines,
            [
                "table inet unirdma/run/uni_5frdma",
                "delete table inet unirdma/run/uni_5frdma",
                "table inet unirdma/run/uni_5frdma {",
                "chain leaves {",
                "type filter hook postrouting priority 300; policy accept;",
                "meta mark 0x2a accept",
                "ip saddr { 192.168.7.1 } udp sport { 4789, 4791 } drop",
                "ip saddr { 192.168.7.1 } udp dport { 4789, 4791 } drop",
                "ip6 saddr { fd07::1 } udp sport { 4789, 4791 } drop",
                "ip6 saddr { fd07::1 } udp dport { 4789, 4791 } drop",
                "}",
                "chain arrives {",
                "type filter hook input priority filter; policy accept;",
                "ip daddr { 192.168.7.1 } udp dport 4789 ip saddr != { 192.168.7.2, 192.168.7.3 } drop",
                "ip daddr { 192.168.7.1 } udp dport 4789 udp sport != 4789 drop",
                "ip6 daddr { fd07::1 } udp dport 4789 drop",
                "}",
                "}",
            ]
        );
    }
}
