//! The network to other hosts: two UDP ports, socket buffers, and a firewall that lets packets in.

use std::collections::BTreeSet;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use unirdma_formats::net::VXLAN_PORT;
use unirdma_formats::wire::ROCE_PORT;
use unirdma_supervisor::SOCKET_BUFFER;

use super::Finding;
use super::software::{Told, run};
use crate::print::bytes;

pub(super) fn look() -> Vec<Finding> {
    vec![port("UDP port 4791", ROCE_PORT, "RoCEv2"), port("UDP port 4789", VXLAN_PORT, "VXLAN"), buffers(), firewall()]
}

/// A bound UDP socket.
#[derive(Debug, PartialEq)]
struct Bound {
    addr: IpAddr,
    inode: u64,
}

/// The sockets of a port in the text of `/proc/net/udp` or `/proc/net/udp6`. Addresses there are words of 32 bits in
/// this machine's order of bytes.
fn bound(text: &str, port: u16) -> Vec<Bound> {
    let address = |hex: &str| -> Option<IpAddr> {
        let word = |i: usize| Some(u32::from_str_radix(hex.get(8 * i..8 * i + 8)?, 16).ok()?.to_ne_bytes());
        if hex.len() == 8 {
            return Some(Ipv4Addr::from(word(0)?).into());
        }
        let bytes = [word(0)?, word(1)?, word(2)?, word(3)?].concat();
        Some(Ipv6Addr::from(<[u8; 16]>::try_from(bytes).ok()?).into())
    };
    let socket = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let (hex, number) = fields.get(1)?.split_once(':')?;
        let inode = fields.get(9)?.parse().ok()?;
        (u16::from_str_radix(number, 16).ok()? == port).then(|| Some(Bound { addr: address(hex)?, inode }))?
    };
    text.lines().skip(1).filter_map(socket).collect()
}

/// The processes that have one of these sockets, each as its name and its ID, and whether all could be looked at.
fn owners(sockets: &[Bound]) -> (BTreeSet<String>, bool) {
    let links: BTreeSet<String> = sockets.iter().map(|s| format!("socket:[{}]", s.inode)).collect();
    let (mut found, mut all) = (BTreeSet::new(), true);
    for process in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = process.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        let Ok(fds) = fs::read_dir(process.path().join("fd")) else {
            all = false;
            continue;
        };
        let mut fds = fds.flatten().filter_map(|fd| fs::read_link(fd.path()).ok());
        if fds.any(|link| links.contains(&*link.to_string_lossy())) {
            let name = fs::read_to_string(process.path().join("comm")).unwrap_or_default();
            found.insert(format!("{} ({pid})", name.trim()));
        }
    }
    (found, all)
}

fn port(topic: &'static str, port: u16, what: &str) -> Finding {
    let text = |file: &str| fs::read_to_string(file).unwrap_or_default();
    let mut sockets = bound(&text("/proc/self/net/udp"), port);
    sockets.extend(bound(&text("/proc/self/net/udp6"), port));
    if sockets.is_empty() {
        return Finding::ok(topic, format!("free ({what} between hosts)"));
    }
    let (owners, all) = owners(&sockets);
    taken(topic, &sockets, &owners, all)
}

/// The finding about a port that is taken.
fn taken(topic: &'static str, sockets: &[Bound], owners: &BTreeSet<String>, all: bool) -> Finding {
    let list = |names: &mut dyn Iterator<Item = String>| names.collect::<Vec<_>>().join(", ");
    let addresses: BTreeSet<_> = sockets.iter().map(|s| s.addr).collect();
    let addresses = list(&mut addresses.iter().map(ToString::to_string));
    if !owners.is_empty() && owners.iter().all(|name| name.starts_with("unirdma ")) {
        let names = list(&mut owners.iter().cloned());
        return Finding::ok(topic, format!("of a virtual layer, at {addresses}: {names}"));
    }
    let whose = match (owners.is_empty(), all) {
        (false, _) => list(&mut owners.iter().cloned()),
        (true, true) => "no process of this machine, so it is the kernel (`rdma link`, `ip -d link`)".into(),
        (true, false) => "no process that this user may look at (CAP_SYS_PTRACE); ask as root".into(),
    };
    Finding::warning(
        topic,
        format!("taken at {addresses} by {whose}"),
        "stop that, or give `unirdma host --address` another address",
    )
}

fn buffers() -> Finding {
    const TOPIC: &str = "socket buffers";
    let limit = |name: &str| fs::read_to_string(format!("/proc/sys/net/core/{name}")).ok()?.trim().parse::<u64>().ok();
    let wanted = u64::from(SOCKET_BUFFER.unsigned_abs());
    match (limit("rmem_max"), limit("wmem_max")) {
        (Some(receive), Some(send)) if receive < wanted || send < wanted => {
            let fact = format!("at most {} to receive and {} to send", bytes(receive), bytes(send));
            if rustix::process::geteuid().is_root() {
                return Finding::ok(TOPIC, format!("{fact}; a virtual layer of root has {}", bytes(wanted)));
            }
            let sysctl = format!("sysctl net.core.rmem_max={wanted} net.core.wmem_max={wanted}");
            Finding::warning(
                TOPIC,
                format!("{fact}, which costs bandwidth between hosts if no root runs the virtual layer"),
                sysctl,
            )
        }
        (Some(_), Some(_)) => Finding::ok(TOPIC, format!("{} and more", bytes(wanted))),
        _ => Finding::ok(TOPIC, "this network namespace does not show its limits"),
    }
}

/// Whether a chain of nftables drops arriving packets that no rule accepts. `chains`: the output of `nft list chains`.
fn drops(chains: &str) -> bool {
    chains.lines().any(|line| line.contains("hook input") && line.contains("policy drop"))
}

fn firewall() -> Finding {
    const TOPIC: &str = "firewall";
    let allow = || format!("allow UDP to ports {ROCE_PORT} and {VXLAN_PORT} from other hosts of vRNICs");
    match run("nft", &["list", "chains"]) {
        Told::Text(chains) if drops(&chains) => {
            Finding::warning(TOPIC, "nftables drops arriving packets that no rule accepts", allow())
        }
        Told::Text(_) => Finding::ok(TOPIC, "no chain of nftables drops arriving packets by its policy"),
        Told::Missing => Finding::ok(TOPIC, "not known: the program `nft` is not installed"),
        Told::Failed(_) if !rustix::process::geteuid().is_root() => Finding::warning(
            TOPIC,
            "not known: to read nftables takes CAP_NET_ADMIN",
            format!("ask as root; for other hosts, {}", allow()),
        ),
        Told::Failed(why) => Finding::warning(TOPIC, format!("not known: nft: {why}"), allow()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Level;
    use super::*;

    #[test]
    fn sockets_of_a_port_are_found() {
        let head =
            "   sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode ref\n";
        let word = |bytes: [u8; 4]| format!("{:08X}", u32::from_ne_bytes(bytes));
        let line = |addr: &str, port: &str, inode: u32| {
            format!(
                "  12: {addr}:{port} 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 {inode} 2 0 0\n"
            )
        };
        let v4 = word([10, 0, 0, 7]);
        let text = format!("{head}{}{}", line(&v4, "12B7", 77), line(&v4, "12B5", 78));
        assert_eq!(bound(&text, ROCE_PORT), [Bound { addr: "10.0.0.7".parse().unwrap(), inode: 77 }]);
        assert_eq!(bound(&text, VXLAN_PORT).len(), 1);
        assert!(bound(&text, 53).is_empty() && bound("", ROCE_PORT).is_empty() && bound("x\ny\n", 1).is_empty());
        let v6: String = [[0xfd, 0, 0, 0], [0; 4], [0; 4], [0, 0, 0, 1]].into_iter().map(word).collect();
        assert_eq!(
            bound(&format!("{head}{}", line(&v6, "12B7", 5)), ROCE_PORT)[0].addr,
            "fd00::1".parse::<IpAddr>().unwrap()
        );
    }

    #[test]
    fn a_port_of_others_is_a_warning() {
        let sockets = [Bound { addr: "10.0.0.7".parse().unwrap(), inode: 1 }];
        let level = |names: &[&str]| {
            let names = names.iter().map(ToString::to_string).collect();
            taken("port", &sockets, &names, true).level
        };
        assert_eq!(level(&["unirdma (7)", "unirdma (8)"]), Level::Ok);
        assert_eq!(level(&["unirdma (7)", "other (8)"]), Level::Warning);
        assert_eq!(level(&[]), Level::Warning);
        let unseen = taken("port", &sockets, &BTreeSet::new(), false);
        assert!(unseen.fact.contains("CAP_SYS_PTRACE"), "{unseen:?}");
    }

    #[test]
    fn a_policy_that_drops_is_found() {
        let chain = |policy: &str| {
            format!(
                "table inet filter {{\n\tchain input {{\n\t\ttype filter hook input priority filter; policy {policy};\n\t}}\n}}\n"
            )
        };
        assert!(drops(&chain("drop")) && !drops(&chain("accept")) && !drops(""));
        assert!(!drops("type filter hook forward priority filter; policy drop;"));
    }
}
