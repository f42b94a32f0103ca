//! The peers file: which virtual addresses live on which other host. One line each:
//!
//! ```text
//! # virtual address   group     host address    kind
//! 10.0.0.2            default   192.168.7.2
//! fd00::2             blue      fd07::2
//! 192.168.7.9         default   192.168.7.9     foreign
//! ```
//!
//! A *foreign* peer is a plain RoCEv2 device. A file with a bad line changes nothing.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;

use unirdma_formats::Gid;
use unirdma_rnic::Route;

use crate::tunnel::{self, Members};

/// A line of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Peer {
    gid: Gid,
    group: String,
    route: Route,
}

/// Longest file, bytes.
pub(crate) const MAX_BYTES: u64 = 16 << 20;

fn parse_line(line: &str, own: &[IpAddr]) -> Result<Peer, String> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let (gid, group, host, foreign) = match words[..] {
        [gid, group, host] => (gid, group, host, false),
        [gid, group, host, "foreign"] => (gid, group, host, true),
        [_, _, _, kind] => return Err(format!("`{kind}` is no kind of peer; leave it out or write `foreign`")),
        _ => return Err("expected `VIRTUAL-ADDRESS GROUP HOST-ADDRESS [foreign]`".into()),
    };
    let ip = |text: &str| text.parse::<IpAddr>().map_err(|_| format!("`{text}` is no IP address"));
    let (gid, host) = (ip(gid)?, ip(host)?);
    crate::vrnic::check_name("group", group)?;
    if own.contains(&host) {
        return Err(format!("{host} is this host's own address; vRNICs of this host find each other by themselves"));
    }
    if !own.iter().any(|o| o.is_ipv4() == host.is_ipv4()) {
        let family = if host.is_ipv4() { "IPv4" } else { "IPv6" };
        return Err(format!("{host} cannot be reached: this host serves no {family} address (--address)"));
    }
    let route = Route { host, foreign, vni: tunnel::vni(group) };
    Ok(Peer { gid: Gid::from_ip(gid), group: group.into(), route })
}

/// Reads the file's text; `own` are this host's addresses.
///
/// # Errors
/// What is wrong, with the number of the line.
pub(crate) fn parse(text: &str, own: &[IpAddr]) -> Result<Vec<Peer>, String> {
    let mut peers = Vec::new();
    let mut lines = HashMap::new();
    for (i, line) in text.lines().enumerate() {
        let line = line.split('#').next().unwrap_or_default().trim();
        if line.is_empty() {
            continue;
        }
        let peer = parse_line(line, own).map_err(|e| format!("line {}: {e}", i + 1))?;
        if let Some(before) = lines.insert((peer.group.clone(), peer.gid), i + 1) {
            return Err(format!("line {}: {} of group {} is in line {before} already", i + 1, peer.gid, peer.group));
        }
        peers.push(peer);
    }
    Ok(peers)
}

/// The RNIC's routes. Peers of groups that this host does not have are left out.
pub(crate) fn routes(peers: &[Peer], groups: &BTreeMap<String, u32>) -> HashMap<(u32, Gid), Route> {
    peers.iter().filter_map(|p| Some(((*groups.get(&p.group)?, p.gid), p.route))).collect()
}

/// Where the members of this host's groups are, for the tunnel; foreign peers have no part in it.
pub(crate) fn members(peers: &[Peer], groups: &BTreeMap<String, u32>) -> HashMap<u32, Members> {
    let of = |name: &str| {
        let here = peers.iter().filter(|p| p.group == name && !p.route.foreign);
        Members { vni: tunnel::vni(name), hosts: here.map(|p| p.route.host).collect() }
    };
    groups.iter().map(|(name, &id)| (id, of(name))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn good_lines_are_routes_and_bad_lines_say_which() {
        let own: Vec<IpAddr> = vec!["192.168.7.1".parse().unwrap()];
        let text = "# peers\n10.0.0.2 default 192.168.7.2\n\n192.168.7.9 blue 192.168.7.9 foreign # rxe\n";
        let peers = parse(text, &own).unwrap();
        let groups = BTreeMap::from([("default".to_string(), 0), ("blue".to_string(), 4)]);
        let r = routes(&peers, &groups);
        let gid = |s: &str| Gid::from_ip(s.parse().unwrap());
        assert!(!r[&(0, gid("10.0.0.2"))].foreign && r[&(4, gid("192.168.7.9"))].foreign);
        for (bad, what) in [
            ("10.0.0.2 default", "line 2: expected"),
            ("x default 192.168.7.2", "line 2: `x` is no IP"),
            ("10.0.0.2 default 192.168.7.1", "line 2: 192.168.7.1 is this host's own"),
            ("10.0.0.2 default fd00::1", "no IPv6 address"),
            ("10.0.0.2 default 192.168.7.2 alien", "`alien`"),
            ("10.0.0.2 ../x 192.168.7.2", "no group name"),
            ("10.0.0.1 default 192.168.7.3", "in line 1 already"),
        ] {
            let e = parse(&format!("10.0.0.1 default 192.168.7.2\n{bad}"), &own).unwrap_err();
            assert!(e.contains(what), "{e}");
        }
    }
}
