//! The peers file: the host of each virtual address, and the number (VNI) of each group between hosts.
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
//! A *foreign* peer is a plain RoCEv2 device. All hosts may use one file: a host ignores lines about itself, except for
//! groups that a rule joins. A file with an invalid line changes nothing.
//!
//! A group without a number gets one: `default` gets 1, the others get the first free ones in the order of their names.
//! So hosts that read the same file agree, and no two groups of a file have the same number. Hosts with different files
//! notice if they do not agree (`tunnel`).

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use unirdma_ipc::vrnic::{self, InvalidValue};
use unirdma_policy::{ParseError, Rule};

use crate::peer_change::{Change, Place};

/// The file's contents.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Peers {
    /// The host of each virtual address, by group and address.
    places: BTreeMap<(String, IpAddr), Place>,
    vnis: BTreeMap<String, u32>,
    rules: BTreeSet<Rule>,
}

/// Why a peers file cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PeersError {
    #[error("peers file {}: {error}", .file.display())]
    Read { file: PathBuf, error: io::Error },
    #[error("peers file {}, {error}", .file.display())]
    Line { file: PathBuf, error: LineError },
}

/// A mistake, and the number of its line.
#[derive(Debug, thiserror::Error)]
#[error("line {line}: {mistake}")]
pub(crate) struct LineError {
    line: usize,
    mistake: Mistake,
}

#[derive(Debug, thiserror::Error)]
enum Mistake {
    #[error("expected `VIRTUAL-ADDRESS GROUP HOST-ADDRESS [foreign]` or `group GROUP vni NUMBER`")]
    Form,
    #[error("`{0}` is no kind of peer; leave it out or write `foreign`")]
    Kind(String),
    #[error("`{0}` is no IP address")]
    Address(String),
    #[error("{host} cannot be reached: this host serves no {family} address (--address)")]
    Unreachable { host: IpAddr, family: &'static str },
    #[error("`{0}` is no VNI: those are the numbers from 1 to {last}", last = VNIS.end())]
    Vni(String),
    #[error("VNI {vni} is that of group {group} in line {line} already")]
    VniTaken { vni: u32, group: String, line: usize },
    #[error("group {group} has VNI {vni} already")]
    SecondVni { group: String, vni: u32 },
    #[error("{address} of group {group} is in line {line} already")]
    SecondPlace { group: String, address: IpAddr, line: usize },
    #[error(transparent)]
    Name(#[from] InvalidValue),
    #[error(transparent)]
    Rule(#[from] ParseError),
}

/// Longest file, bytes.
const MAX_BYTES: u64 = 16 << 20;
/// A VNI has 24 bits; 0 belongs to no group.
const VNIS: std::ops::RangeInclusive<u32> = 1..=0xff_ffff;

/// Parses `N` of `group NAME vni N`.
fn parse_vni(group: &str, number: &str) -> Result<u32, Mistake> {
    vrnic::check_name("group", group)?;
    let vni = number.parse().ok().filter(|n| VNIS.contains(n));
    vni.ok_or_else(|| Mistake::Vni(number.into()))
}

fn parse_rule(text: &str) -> Result<Rule, Mistake> {
    let rule: Rule = text.parse()?;
    [&rule.from, &rule.to].into_iter().try_for_each(|s| vrnic::check_name("group", s.group()))?;
    Ok(rule)
}

fn parse_peer(words: &[&str], own: &[IpAddr]) -> Result<(String, IpAddr, Place), Mistake> {
    let (address, group, host, foreign) = match *words {
        [address, group, host] => (address, group, host, false),
        [address, group, host, "foreign"] => (address, group, host, true),
        [_, _, _, kind] => return Err(Mistake::Kind(kind.into())),
        _ => return Err(Mistake::Form),
    };
    let ip = |text: &str| text.parse::<IpAddr>().map_err(|_| Mistake::Address(text.into()));
    let (address, host) = (ip(address)?, ip(host)?);
    vrnic::check_name("group", group)?;
    if !own.iter().any(|o| o.is_ipv4() == host.is_ipv4()) {
        let family = if host.is_ipv4() { "IPv4" } else { "IPv6" };
        return Err(Mistake::Unreachable { host, family });
    }
    Ok((group.into(), address, Place { host, foreign }))
}

impl Peers {
    /// Parses the file's text. `own` are this host's addresses.
    ///
    /// # Errors
    /// The mistake, with the number of the line.
    pub fn parse(text: &str, own: &[IpAddr]) -> Result<Peers, LineError> {
        let mut places = BTreeMap::new();
        let mut lines = HashMap::new();
        let mut rules = BTreeSet::new();
        let (mut stated, mut stated_in) = (BTreeMap::new(), HashMap::new());
        for (i, line) in text.lines().enumerate() {
            let words: Vec<&str> = line.split('#').next().unwrap_or_default().split_whitespace().collect();
            let at = |mistake| LineError { line: i + 1, mistake };
            match words[..] {
                [] => {}
                ["group", group, "vni", number] => {
                    let vni = parse_vni(group, number).map_err(at)?;
                    if let Some((group, line)) = stated_in.insert(vni, (group, i + 1)) {
                        return Err(at(Mistake::VniTaken { vni, group: group.into(), line }));
                    }
                    if let Some(vni) = stated.insert(group.to_string(), vni) {
                        return Err(at(Mistake::SecondVni { group: group.into(), vni }));
                    }
                }
                ["rule", ref rule @ ..] => _ = rules.insert(parse_rule(&rule.join(" ")).map_err(at)?),
                _ => {
                    let (group, address, place) = parse_peer(&words, own).map_err(at)?;
                    if let Some(line) = lines.insert((group.clone(), address), i + 1) {
                        return Err(at(Mistake::SecondPlace { group, address, line }));
                    }
                    places.insert((group, address), place);
                }
            }
        }
        let named = rules.iter().flat_map(|r| [r.from.group(), r.to.group()]);
        let vnis = allocate(stated, places.keys().map(|(group, _)| group).chain(named).map(String::as_str));
        Ok(Peers { places, vnis, rules })
    }

    /// The hosts that are virtual layers. It includes this host if the file does.
    pub fn hosts(&self) -> BTreeSet<IpAddr> {
        self.places.values().filter(|p| !p.foreign).map(|p| p.host).collect()
    }

    /// The changes that lead from `before` to `self`.
    pub fn changes(&self, before: &Peers) -> Vec<Change> {
        let mut changes = Vec::new();
        for (group, vni) in changed(&before.vnis, &self.vnis) {
            changes.push(Change::Vni { group: group.clone(), vni });
        }
        for ((group, address), place) in changed(&before.places, &self.places) {
            changes.push(Change::Address { group: group.clone(), address: *address, place });
            // That of a vRNIC whose first address this is. An address that is another one's second has none.
            let (mac, host) = (vrnic::mac_of(group, *address), place.filter(|p| !p.foreign).map(|p| p.host));
            changes.push(Change::Mac { group: group.clone(), mac, host });
        }
        let (new, gone) = (self.rules.difference(&before.rules), before.rules.difference(&self.rules));
        let both = new.map(|r| (r, true)).chain(gone.map(|r| (r, false)));
        changes.extend(both.map(|(rule, there)| Change::Rule { rule: rule.clone(), there }));
        changes
    }
}

/// The keys whose values differ between `before` and `after`; removed keys first.
fn changed<'a, K: Ord, V: Copy + PartialEq>(
    before: &'a BTreeMap<K, V>,
    after: &'a BTreeMap<K, V>,
) -> impl Iterator<Item = (&'a K, Option<V>)> {
    let gone = before.keys().filter(|k| !after.contains_key(*k)).map(|k| (k, None));
    gone.chain(after.iter().filter(|(k, v)| before.get(*k) != Some(v)).map(|(k, v)| (k, Some(*v))))
}

/// Reads a peers file for a host with these addresses.
///
/// # Errors
/// An error, and its place.
pub(crate) fn read(file: &Path, addresses: &[IpAddr]) -> Result<Peers, PeersError> {
    let text = match std::fs::metadata(file) {
        Ok(m) if m.len() > MAX_BYTES => Err(io::Error::other("too long")),
        Ok(_) => std::fs::read_to_string(file),
        Err(e) => Err(e),
    };
    let text = text.map_err(|error| PeersError::Read { file: file.into(), error })?;
    Peers::parse(&text, addresses).map_err(|error| PeersError::Line { file: file.into(), error })
}

/// Gives each group a number: the stated one, 1 for `default`, and for the others the first free ones, by name.
fn allocate<'a>(stated: BTreeMap<String, u32>, groups: impl Iterator<Item = &'a str>) -> BTreeMap<String, u32> {
    let taken: BTreeSet<u32> = stated.values().copied().collect();
    let mut free = VNIS.filter(|n| !taken.contains(n));
    let names: BTreeSet<&str> = groups.filter(|g| !stated.contains_key(*g)).collect();
    // The default group is first even if the file does not have it, so that its number does not depend on the file.
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
        let place = |group: &str, address: &str| peers.places.get(&(group.into(), ip(address))).copied();
        assert_eq!(place("blue", "192.168.7.9"), Some(Place { host: ip("192.168.7.9"), foreign: true }));
        assert_eq!(place("default", "10.0.0.2"), Some(Place { host: ip("192.168.7.2"), foreign: false }));
        assert_eq!(place("default", "10.0.0.1"), Some(Place { host: ip("192.168.7.1"), foreign: false }));
        assert_eq!(peers.hosts(), own().into_iter().chain([ip("192.168.7.2")]).collect());
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
            ("rule", "line 2: a rule reads"),
            ("rule allow from red to group:blue", "line 2: `red` selects nobody"),
            ("rule allow from group:.x to group:blue", "no group name"),
            ("rule allow from group:a to group:b priority 65536", "no priority"),
        ] {
            let e = Peers::parse(&format!("10.0.0.1 default 192.168.7.2\n{bad}"), &own()).unwrap_err();
            assert!(e.to_string().contains(what), "{e}");
        }
    }

    #[test]
    fn each_group_has_a_number_of_its_own_and_hosts_with_one_file_agree() {
        let text = "10.0.0.2 red 192.168.7.2\n10.0.0.2 blue 192.168.7.2\n10.0.0.1 green 192.168.7.1\n10.0.0.1 x 192.168.7.2\ngroup x vni 2\n";
        let numbers = |own: &str, text: &str| {
            let peers = Peers::parse(text, &[own.parse().unwrap()]).unwrap();
            ["default", "blue", "green", "red", "x", "y"].map(|g| peers.vnis.get(g).copied())
        };
        let here = numbers("192.168.7.1", text);
        assert_eq!(here, [Some(1), Some(3), Some(4), Some(5), Some(2), None]);
        assert_eq!(here, numbers("192.168.7.2", text));
        assert_eq!(
            numbers("192.168.7.1", "group blue vni 1\n10.0.0.2 red 192.168.7.2")[..4],
            [Some(2), Some(1), None, Some(3)]
        );
    }

    #[test]
    fn only_what_is_other_is_a_change() {
        let lines =
            |n: u32| (2..n).map(|i| format!("10.0.{}.{} default 192.168.7.2\n", i >> 8, i & 255)).collect::<String>();
        let before = Peers::parse(&lines(1000), &own()).unwrap();
        assert_eq!(before.changes(&Peers::default()).len(), 1 + 2 * 998);
        assert!(before.changes(&before).is_empty());
        let text = lines(999).replace("10.0.0.7 default 192.168.7.2", "10.0.0.7 default 192.168.7.3");
        let after = Peers::parse(&format!("{text}group default vni 9"), &own()).unwrap();
        let changes = after.changes(&before);
        let ip = |s: &str| s.parse::<IpAddr>().unwrap();
        let address = |address: &str, host: Option<&str>| Change::Address {
            group: "default".into(),
            address: ip(address),
            place: host.map(|h| Place { host: ip(h), foreign: false }),
        };
        let mac = |address: &str, host: Option<&str>| Change::Mac {
            group: "default".into(),
            mac: vrnic::mac_of("default", ip(address)),
            host: host.map(ip),
        };
        let expected = [
            Change::Vni { group: "default".into(), vni: Some(9) },
            address("10.0.3.231", None),
            mac("10.0.3.231", None),
            address("10.0.0.7", Some("192.168.7.3")),
            mac("10.0.0.7", Some("192.168.7.3")),
        ];
        assert!(expected.iter().all(|e| changes.contains(e)), "{changes:?}");
        // A number is part of each route, but only one change here.
        assert_eq!(changes.len(), expected.len(), "{changes:?}");
    }
}
