//! The peers file: which virtual addresses live on which other host, and which number each group has between hosts.
//!
//! ```text
//! # virtual address   group     host address    kind
//! 10.0.0.2            default   192.168.7.2
//! fd00::2             blue      fd07::2
//! 192.168.7.9         default   192.168.7.9     foreign
//! # numbers of groups in the tunnel (VNI)
//! group blue vni 42
//! # who may talk to whom
//! rule allow from group:blue to vrnic:default/10.0.0.2 both priority 100
//! ```
//!
//! A *foreign* peer is a plain RoCEv2 device. Lines about this host itself say nothing to it but to groups that a rule joins with theirs, so that
//! one file serves all hosts. A file with a bad line changes nothing.
//!
//! A group that a rule joins with another one reaches that one's addresses. Where such an address is also one of its own, it means the own one,
//! and the other is not reached; of two that are joined with it, that of the group whose name comes first.
//!
//! A group without a number gets one: `default` 1, the others the first free ones in the order of their names. So hosts that read
//! the same file agree, and no two groups of a file have one number. Hosts with different files hear of it if they do not agree
//! (`tunnel`).

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;

use unirdma_policy::{Action, Rule, Selector};
use unirdma_rnic::Route;

use crate::tunnel::Members;

/// A virtual address on another host.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Peer {
    address: IpAddr,
    route: Route,
}

/// The file's contents.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Peers {
    /// Of each group, in the order of the file.
    groups: BTreeMap<String, Vec<Peer>>,
    /// Those of them that live on this host.
    here: BTreeMap<String, Vec<Peer>>,
    vnis: BTreeMap<String, u32>,
    rules: Vec<Rule>,
}

/// A group that rules join with another one, as that one sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct JoinedGroup {
    /// Where the addresses are that the other one reaches.
    peers: Vec<(IpAddr, Route)>,
    /// Addresses that mean somebody else there.
    pub hidden: Vec<IpAddr>,
}

/// Longest file, bytes.
pub(crate) const MAX_BYTES: u64 = 16 << 20;
/// A VNI has 24 bits; 0 is no group's.
const VNIS: std::ops::RangeInclusive<u32> = 1..=0xff_ffff;

/// Reads `N` of `group NAME vni N`.
fn parse_vni(group: &str, number: &str) -> Result<u32, String> {
    crate::vrnic::check_name("group", group)?;
    let vni = number.parse().ok().filter(|n| VNIS.contains(n));
    vni.ok_or_else(|| format!("`{number}` is no VNI: those are the numbers from 1 to {}", VNIS.end()))
}

fn parse_rule(text: &str) -> Result<Rule, String> {
    let rule: Rule = text.parse().map_err(|e: unirdma_policy::ParseError| e.to_string())?;
    [&rule.from, &rule.to].into_iter().try_for_each(|s| crate::vrnic::check_name("group", s.group()))?;
    Ok(rule)
}

fn parse_peer(words: &[&str], own: &[IpAddr]) -> Result<(String, Peer), String> {
    let (address, group, host, foreign) = match *words {
        [address, group, host] => (address, group, host, false),
        [address, group, host, "foreign"] => (address, group, host, true),
        [_, _, _, kind] => return Err(format!("`{kind}` is no kind of peer; leave it out or write `foreign`")),
        _ => {
            return Err(
                "expected `VIRTUAL-ADDRESS GROUP HOST-ADDRESS [foreign]`, `group GROUP vni NUMBER` or `rule ...`"
                    .into(),
            );
        }
    };
    let ip = |text: &str| text.parse::<IpAddr>().map_err(|_| format!("`{text}` is no IP address"));
    let (address, host) = (ip(address)?, ip(host)?);
    crate::vrnic::check_name("group", group)?;
    if !own.iter().any(|o| o.is_ipv4() == host.is_ipv4()) {
        let family = if host.is_ipv4() { "IPv4" } else { "IPv6" };
        return Err(format!("{host} cannot be reached: this host serves no {family} address (--address)"));
    }
    Ok((group.into(), Peer { address, route: Route { host, foreign, vni: 0 } }))
}

impl Peers {
    /// Reads the file's text; `own` are this host's addresses.
    ///
    /// # Errors
    /// What is wrong, with the number of the line.
    pub fn parse(text: &str, own: &[IpAddr]) -> Result<Peers, String> {
        let mut groups: BTreeMap<String, Vec<Peer>> = BTreeMap::new();
        let mut lines = HashMap::new();
        let mut rules: Vec<Rule> = Vec::new();
        let (mut stated, mut stated_in) = (BTreeMap::new(), HashMap::new());
        for (i, line) in text.lines().enumerate() {
            let words: Vec<&str> = line.split('#').next().unwrap_or_default().split_whitespace().collect();
            let at = |e: String| format!("line {}: {e}", i + 1);
            match words[..] {
                [] => {}
                ["group", group, "vni", number] => {
                    let vni = parse_vni(group, number).map_err(at)?;
                    if let Some((before, line)) = stated_in.insert(vni, (group, i + 1)) {
                        return Err(at(format!("VNI {vni} is that of group {before} in line {line} already")));
                    }
                    if let Some(before) = stated.insert(group.to_string(), vni) {
                        return Err(at(format!("group {group} has VNI {before} already")));
                    }
                }
                ["rule", ref rule @ ..] => rules.push(parse_rule(&rule.join(" ")).map_err(at)?),
                _ => {
                    let (group, peer) = parse_peer(&words, own).map_err(at)?;
                    if let Some(before) = lines.insert((group.clone(), peer.address), i + 1) {
                        return Err(at(format!("{} of group {group} is in line {before} already", peer.address)));
                    }
                    groups.entry(group).or_default().push(peer);
                }
            }
        }
        let named = rules.iter().flat_map(|r| [r.from.group(), r.to.group()]);
        let vnis = allocate(stated, groups.keys().chain(named).map(String::as_str));
        let mut here = BTreeMap::new();
        for (name, peers) in &mut groups {
            peers.iter_mut().for_each(|p| p.route.vni = vnis.get(name).copied().unwrap_or_default());
            let (of_host, others) = std::mem::take(peers).into_iter().partition(|p| own.contains(&p.route.host));
            *peers = others;
            here.insert(name.clone(), of_host);
        }
        Ok(Peers { groups, here, vnis, rules })
    }

    /// The rules, in the order of the file.
    pub fn rules(&self) -> &[Rule] {
        &self.rules
    }

    /// The rules that concern a group, which call groups by their numbers.
    pub fn rules_of(&self, group: &str) -> Vec<Rule<u32>> {
        let group = group.to_string();
        let concern = self.rules.iter().filter(|r| r.concerns(&group));
        concern.filter_map(|r| r.translate(|name| self.vni(name), |a| *a)).collect()
    }

    fn all_of<'a>(&'a self, group: &str) -> impl Iterator<Item = &'a Peer> {
        let [here, there] = [&self.here, &self.groups].map(|peers| peers.get(group));
        here.into_iter().chain(there).flatten()
    }

    /// The groups that rules join with a group, by their names.
    pub fn joined_with(&self, group: &str) -> BTreeMap<String, JoinedGroup> {
        let group = group.to_string();
        let mut known: BTreeSet<IpAddr> = self.all_of(&group).map(|p| p.address).collect();
        let mut joined: BTreeMap<String, JoinedGroup> = BTreeMap::new();
        for name in self.rules.iter().filter_map(|r| r.joins(&group)).collect::<BTreeSet<_>>() {
            // Of the other group only those count that a rule selects.
            let (mut all, mut named) = (false, BTreeSet::new());
            for r in self.rules.iter().filter(|r| r.joins(&group) == Some(name)) {
                match if r.from.group() == name { &r.from } else { &r.to } {
                    Selector::Group(_) => all = true,
                    Selector::Vrnic(_, address) => _ = named.insert(*address),
                }
            }
            let mut of_name = JoinedGroup::default();
            for p in self.all_of(name).filter(|p| all || named.contains(&p.address)) {
                match known.insert(p.address) {
                    true => of_name.peers.push((p.address, p.route)),
                    false => of_name.hidden.push(p.address),
                }
            }
            joined.insert(name.clone(), of_name);
        }
        joined
    }

    /// How many virtual addresses of other hosts it has.
    pub fn len(&self) -> usize {
        self.groups.values().map(Vec::len).sum()
    }

    /// The number of a group between hosts, if the file has the group.
    pub fn vni(&self, group: &str) -> Option<u32> {
        self.vnis.get(group).copied()
    }

    /// The hosts that are virtual layers; this one too, if rules may join groups that it has.
    pub fn hosts(&self) -> BTreeSet<IpAddr> {
        let joins = self.rules.iter().any(|r| r.action == Action::Allow && r.from.group() != r.to.group());
        let here = self.here.values().flatten().filter(|_| joins);
        self.groups.values().flatten().chain(here).filter(|p| !p.route.foreign).map(|p| p.route.host).collect()
    }

    /// Where the virtual addresses are reached that a group reaches: its own ones on other hosts, and those of groups that are joined with it.
    pub fn routes_of(&self, group: &str) -> Vec<(IpAddr, Route)> {
        let own = self.groups.get(group).into_iter().flatten().map(|p| (p.address, p.route));
        own.chain(self.joined_with(group).into_values().flat_map(|j| j.peers)).collect()
    }

    /// Where a group's members are, for the tunnel; foreign peers have no part in it.
    pub fn members_of(&self, group: &str) -> Members {
        let mut members = Members::new(group, self.vni(group).unwrap_or_default());
        for p in self.groups.get(group).into_iter().flatten().filter(|p| !p.route.foreign) {
            members.hosts.insert(p.route.host);
            members.places.insert(p.address, p.route.host);
        }
        members
    }
}

impl JoinedGroup {
    /// Where its members are, for the tunnel.
    pub fn members(&self, name: &str, vni: u32) -> Members {
        let mut members = Members::new(name, vni);
        for (address, route) in self.peers.iter().filter(|(_, route)| !route.foreign) {
            members.hosts.insert(route.host);
            members.places.insert(*address, route.host);
        }
        members
    }
}

/// Gives each group a number: those that are stated, 1 to `default`, and to the others the first free ones, by name.
fn allocate<'a>(stated: BTreeMap<String, u32>, groups: impl Iterator<Item = &'a str>) -> BTreeMap<String, u32> {
    let taken: BTreeSet<u32> = stated.values().copied().collect();
    let mut free = VNIS.filter(|n| !taken.contains(n));
    let names: BTreeSet<&str> = groups.filter(|g| !stated.contains_key(*g)).collect();
    // The default group is first, whether the file has it or not, so that its number does not depend on that.
    let first = (!stated.contains_key(crate::DEFAULT_GROUP)).then_some(crate::DEFAULT_GROUP);
    let others = names.into_iter().filter(|&g| g != crate::DEFAULT_GROUP);
    let given: Vec<(String, u32)> = first.into_iter().chain(others).map(String::from).zip(&mut free).collect();
    stated.into_iter().chain(given).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own() -> Vec<IpAddr> {
        vec!["192.168.7.1".parse().unwrap()]
    }

    #[test]
    fn good_lines_are_routes_and_bad_lines_say_which() {
        let text = "# peers\n10.0.0.2 default 192.168.7.2\n\n192.168.7.9 blue 192.168.7.9 foreign # rxe\n10.0.0.1 default 192.168.7.1\n";
        let peers = Peers::parse(text, &own()).unwrap();
        let ip = |s: &str| s.parse::<IpAddr>().unwrap();
        let (blue, default) = (peers.routes_of("blue"), peers.routes_of("default"));
        assert_eq!((blue[0].0, blue[0].1.foreign, blue.len()), (ip("192.168.7.9"), true, 1));
        assert_eq!((default[0].0, default[0].1.foreign), (ip("10.0.0.2"), false));
        assert_eq!((default.len(), peers.len()), (1, 2), "this host's own line is left out");
        let members = peers.members_of("default");
        assert_eq!(members.places, HashMap::from([(ip("10.0.0.2"), ip("192.168.7.2"))]));
        assert!(peers.members_of("blue").hosts.is_empty() && peers.routes_of("red").is_empty());
        assert_eq!(peers.hosts(), [ip("192.168.7.2")].into());
        for (bad, what) in [
            ("10.0.0.2 default", "line 2: expected"),
            ("x default 192.168.7.2", "line 2: `x` is no IP"),
            ("10.0.0.2 default fd00::1", "no IPv6 address"),
            ("10.0.0.2 default 192.168.7.2 alien", "`alien`"),
            ("10.0.0.2 ../x 192.168.7.2", "no group name"),
            ("10.0.0.1 default 192.168.7.3", "10.0.0.1 of group default is in line 1 already"),
            ("group blue vni 0", "line 2: `0` is no VNI"),
            ("group blue vni 16777216", "is no VNI"),
            ("group blue vni", "line 2: `group` is no IP"),
            ("group ../x vni 2", "no group name"),
            ("group a vni 2\ngroup b vni 2", "line 3: VNI 2 is that of group a in line 2 already"),
            ("group a vni 2\ngroup a vni 3", "line 3: group a has VNI 2 already"),
        ] {
            let e = Peers::parse(&format!("10.0.0.1 default 192.168.7.2\n{bad}"), &own()).unwrap_err();
            assert!(e.contains(what), "{e}");
        }
    }

    #[test]
    fn rules_join_groups_and_an_own_address_hides_that_of_another_group() {
        let text = "10.0.0.1 red 192.168.7.1\n10.0.0.2 red 192.168.7.2\n10.0.0.2 blue 192.168.7.1\n10.0.0.3 blue 192.168.7.2\n\
                    10.0.0.4 blue 192.168.7.1\n10.0.0.4 green 192.168.7.2\n10.0.0.5 green 192.168.7.2\n10.0.0.9 far 192.168.7.2\n\
                    rule allow from group:red to group:blue both\nrule allow from vrnic:green/10.0.0.4 to group:red priority 7\n\
                    rule deny from group:far to group:red # and no more\n";
        let peers = Peers::parse(text, &own()).unwrap();
        let ip = |s: &str| s.parse::<IpAddr>().unwrap();
        let vni = |g: &str| peers.vni(g).unwrap();
        let routes: Vec<_> = peers.routes_of("red").iter().map(|(a, r)| (*a, r.host, r.vni)).collect();
        let (own, other) = (ip("192.168.7.1"), ip("192.168.7.2"));
        let blue = vni("blue");
        // Blue's 10.0.0.2 is red's own here, and blue's 10.0.0.4 comes before green's. Nothing is said of green's 10.0.0.5.
        let expected =
            [(ip("10.0.0.2"), other, vni("red")), (ip("10.0.0.4"), own, blue), (ip("10.0.0.3"), other, blue)];
        assert_eq!(routes, expected);
        let joined = peers.joined_with("red");
        assert_eq!(joined.keys().collect::<Vec<_>>(), ["blue", "green"]);
        assert_eq!((&joined["blue"].hidden, &joined["green"].hidden), (&vec![ip("10.0.0.2")], &vec![ip("10.0.0.4")]));
        assert_eq!(joined["blue"].members("blue", blue).hosts, [own, other].into());
        assert_eq!(peers.joined_with("far"), BTreeMap::new());
        assert_eq!((peers.rules_of("red").len(), peers.rules_of("green").len(), peers.rules_of("x").len()), (3, 1, 0));
        assert_eq!(peers.hosts(), [own, other].into(), "this host sends to itself");
        for (bad, what) in [
            ("rule", "line 2: a rule reads"),
            ("rule allow from red to group:blue", "line 2: `red` selects nobody"),
            ("rule allow from group:.x to group:blue", "no group name"),
            ("rule allow from group:a to group:b priority 65536", "no priority"),
        ] {
            let e = Peers::parse(&format!("10.0.0.1 default 192.168.7.2\n{bad}"), &[own]).unwrap_err();
            assert!(e.contains(what), "{e}");
        }
    }

    #[test]
    fn each_group_has_a_number_of_its_own_and_hosts_with_one_file_agree() {
        let text = "10.0.0.2 red 192.168.7.2\n10.0.0.2 blue 192.168.7.2\n10.0.0.1 green 192.168.7.1\n10.0.0.1 x 192.168.7.2\ngroup x vni 2\n";
        let numbers = |own: &str, text: &str| {
            let peers = Peers::parse(text, &[own.parse().unwrap()]).unwrap();
            ["default", "blue", "green", "red", "x", "y"].map(|g| peers.vni(g))
        };
        let here = numbers("192.168.7.1", text);
        assert_eq!(here, [Some(1), Some(3), Some(4), Some(5), Some(2), None]);
        assert_eq!(here, numbers("192.168.7.2", text));
        assert_eq!(
            numbers("192.168.7.1", "group blue vni 1\n10.0.0.2 red 192.168.7.2")[..4],
            [Some(2), Some(1), None, Some(3)]
        );
        let route = Peers::parse(text, &own()).unwrap().routes_of("red")[0].1;
        assert_eq!(route.vni, 5);
    }
}
