//! Hosts tell each other the number that each group has in the tunnel. So contradictory peers files are detected before
//! a frame arrives in the wrong group.
//!
//! A host announces to each peer all groups that the peer has, too, and repeats that until the peer has acknowledged
//! it. An announcement replaces the former one. A frame with a number is accepted for a group only if its sender has
//! announced that number for that group's name.
//!
//! ```text
//! VXLAN header with the number 0, which no group has; Ethernet header with type 0x88b5 (experimental)
//! version 1 | part | parts | epoch, 8 bytes | heard, 8 bytes | groups: number, 3 bytes | length of the name | name
//! ```
//!
//! The *epoch* changes whenever a host's announcement changes. *heard* is the receiver's epoch of which the sender
//! knows all parts, or 0. Numbers are big-endian.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use unirdma_formats::net::{ETH_BYTES, vxlan};

use unirdma_ipc::network::Members;

/// The number in announcements.
pub(super) const ANNOUNCEMENT: u32 = 0;
const VERSION: u8 = 1;
/// Both Ethernet addresses of an announcement.
const MAC: [u8; 6] = *b"\x06VNIs.";
const ETHER_TYPE: [u8; 2] = [0x88, 0xb5];
const HEAD_BYTES: usize = 3 + 8 + 8;
/// Most bytes of the groups in one message. Such a message fits into the packets of any network.
const MAX_PART_BYTES: usize = 1100;
/// Most parts of an announcement. Groups beyond that are not announced, so they have no frames between hosts.
const MAX_PARTS: usize = 250;
/// Longest message that is accepted, from its Ethernet header on.
const MAX_BYTES: usize = ETH_BYTES + HEAD_BYTES + MAX_PART_BYTES;
/// Most disagreements that are shown.
const MAX_DISAGREEMENTS: usize = 100;

/// Two hosts that have different numbers for a group, or one number for two groups.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct Disagreement {
    pub here: IpAddr,
    pub group_here: String,
    pub vni_here: u32,
    pub there: IpAddr,
    pub group_there: String,
    pub vni_there: u32,
}

impl fmt::Display for Disagreement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Disagreement { here, group_here, vni_here, there, group_there, vni_there } = self;
        if group_here == group_there {
            write!(f, "group {group_here} has VNI {vni_here} at {here}, this host, and {vni_there} at {there}")?;
        } else {
            write!(f, "VNI {vni_here} is group {group_here} at {here}, this host, and group {group_there} at {there}")?;
        }
        write!(f, "; use one peers file on both, or write `group {group_here} vni N` into both")
    }
}

/// The announcement of a peer.
#[derive(Default)]
struct Said {
    epoch: u64,
    names: BTreeMap<u32, String>,
    /// Received parts of a newer epoch.
    coming: Coming,
    /// It has acknowledged this host's present announcement.
    knows_us: bool,
}

#[derive(Default)]
struct Coming {
    epoch: u64,
    parts: BTreeSet<u8>,
    names: BTreeMap<u32, String>,
}

/// This host's announcement, and its peers' announcements.
#[derive(Default)]
pub(super) struct Agreement {
    epoch: u64,
    /// This host's groups that other hosts have, too: number, and the hosts.
    groups: BTreeMap<String, (u32, BTreeSet<IpAddr>)>,
    /// The same for groups that rules join with those. This host need not have them.
    joined: BTreeMap<String, (u32, BTreeSet<IpAddr>)>,
    said: HashMap<IpAddr, Said>,
}

impl Agreement {
    /// Sets this host's groups. `epoch` is a new number, not 0.
    pub fn set_groups<'a>(&mut self, groups: impl Iterator<Item = &'a Members>, epoch: u64) {
        let groups = groups.filter(|m| !m.hosts.is_empty()).map(|m| (m.name.clone(), (m.vni, m.hosts.clone())));
        self.groups = groups.collect();
        self.epoch = epoch;
        let peers: BTreeSet<IpAddr> = self.groups.values().flat_map(|g| &g.1).copied().collect();
        self.said.retain(|host, _| peers.contains(host));
        for host in peers {
            self.said.entry(host).or_default().knows_us = false;
        }
    }

    /// Sets the groups that rules join with this host's groups.
    pub fn set_joined<'a>(&mut self, groups: impl Iterator<Item = &'a Members>) {
        self.joined.clear();
        // A group may be joined with several groups. Each of them sees only the addresses that a rule selects.
        for m in groups {
            let (_, hosts) = self.joined.entry(m.name.clone()).or_insert((m.vni, BTreeSet::new()));
            hosts.extend(m.hosts.iter().copied());
        }
    }

    /// True if this host and `host` have a group in common.
    pub fn has_peer(&self, host: IpAddr) -> bool {
        self.said.contains_key(&host)
    }

    /// Peers that have not acknowledged this host's announcement.
    pub fn uninformed(&self) -> Vec<IpAddr> {
        let mut hosts: Vec<IpAddr> = self.said.iter().filter(|(_, s)| !s.knows_us).map(|(&h, _)| h).collect();
        hosts.sort_unstable();
        hosts
    }

    /// Peers that have announced nothing yet.
    pub fn silent(&self) -> Vec<IpAddr> {
        let mut hosts: Vec<IpAddr> = self.said.iter().filter(|(_, s)| s.epoch == 0).map(|(&h, _)| h).collect();
        hosts.sort_unstable();
        hosts
    }

    /// The packets of this host's announcement to `to`.
    pub fn messages(&self, to: IpAddr) -> Vec<Vec<u8>> {
        let mut parts = vec![Vec::new()];
        for (name, (vni, _)) in self.groups.iter().filter(|(_, (_, hosts))| hosts.contains(&to)) {
            let full = parts.last().is_some_and(|p: &Vec<u8>| p.len() + 4 + name.len() > MAX_PART_BYTES);
            if full {
                parts.push(Vec::new());
            }
            if let Some(p) = parts.last_mut() {
                p.extend_from_slice(&vni.to_be_bytes()[1..]);
                p.push(name.len() as u8);
                p.extend_from_slice(name.as_bytes());
            }
        }
        parts.truncate(MAX_PARTS);
        let heard = self.said.get(&to).map_or(0, |s| s.epoch);
        let count = parts.len() as u8;
        let message = |(i, groups): (usize, &Vec<u8>)| {
            let head = [VERSION, i as u8, count];
            let (epoch, heard) = (self.epoch.to_be_bytes(), heard.to_be_bytes());
            [&vxlan(ANNOUNCEMENT)[..], &MAC, &MAC, &ETHER_TYPE, &head, &epoch, &heard, groups].concat()
        };
        parts.iter().enumerate().map(message).collect()
    }

    /// Handles a frame with the number 0 from a host, from its Ethernet header on. True if this host must announce its
    /// groups to that host, because one of the two has announced something new. `None`: the frame is not an
    /// announcement of a peer.
    pub fn on_message(&mut self, from: IpAddr, frame: &[u8]) -> Option<bool> {
        let said = self.said.get_mut(&from)?;
        let (part, parts, epoch, heard, names) = parse(frame)?;
        said.knows_us = heard == self.epoch;
        if epoch == said.epoch {
            return Some(!said.knows_us);
        }
        if said.coming.epoch != epoch {
            said.coming = Coming { epoch, ..Coming::default() };
        }
        if said.coming.parts.insert(part) {
            said.coming.names.extend(names);
        }
        let whole = said.coming.parts.len() >= parts.into();
        if whole {
            let Coming { epoch, names, .. } = std::mem::take(&mut said.coming);
            (said.epoch, said.names) = (epoch, names);
        }
        Some(whole)
    }

    /// True if a host has announced this number for the group of this name.
    pub fn agrees(&self, from: IpAddr, vni: u32, name: &str) -> bool {
        self.said.get(&from).and_then(|s| s.names.get(&vni)).is_some_and(|n| n == name)
    }

    /// Differences between this host's numbers and announced ones, at most [`MAX_DISAGREEMENTS`]. `here` gives the
    /// address of this host that a peer sees.
    pub fn disagreements(&self, here: impl Fn(IpAddr) -> IpAddr) -> Vec<Disagreement> {
        let by_vni: BTreeMap<u32, &String> =
            self.joined.iter().chain(&self.groups).map(|(name, g)| (g.0, name)).collect();
        let mut found = BTreeSet::new();
        for (&there, said) in &self.said {
            for (&vni_there, group_there) in &said.names {
                // This host's group of that name, and its group of that number.
                let same_number = by_vni.get(&vni_there).copied();
                for name in [Some(group_there), same_number].into_iter().flatten() {
                    let is_there = |(_, hosts): &&(u32, BTreeSet<IpAddr>)| hosts.contains(&there);
                    let group = self.groups.get(name).filter(is_there).or(self.joined.get(name).filter(is_there));
                    let Some(&(vni_here, _)) = group else { continue };
                    let agrees = name == group_there && vni_here == vni_there;
                    if !agrees && found.len() < MAX_DISAGREEMENTS {
                        let (group_here, group_there) = (name.clone(), group_there.clone());
                        let here = here(there);
                        found.insert(Disagreement { here, group_here, vni_here, there, group_there, vni_there });
                    }
                }
            }
        }
        found.into_iter().collect()
    }
}

type Parsed = (u8, u8, u64, u64, BTreeMap<u32, String>);

/// Part, parts, epoch, heard and groups of a message; `None` if it is invalid.
fn parse(frame: &[u8]) -> Option<Parsed> {
    let (eth, body) = frame.split_first_chunk::<ETH_BYTES>()?;
    let (head, mut rest) = body.split_first_chunk::<HEAD_BYTES>()?;
    let [version, part, parts] = [head[0], head[1], head[2]];
    let number = |at: usize| Some(u64::from_be_bytes(*head[at..].first_chunk()?));
    let (epoch, heard) = (number(3)?, number(11)?);
    let is_one = eth[6..12] == MAC && eth[12..] == ETHER_TYPE && version == VERSION;
    if !is_one || frame.len() > MAX_BYTES || part >= parts || usize::from(parts) > MAX_PARTS || epoch == 0 {
        return None;
    }
    let mut names = BTreeMap::new();
    while let Some((&[a, b, c, length], after)) = rest.split_first_chunk::<4>() {
        let (name, after) = after.split_at_checked(length.into())?;
        let name = std::str::from_utf8(name).ok()?;
        unirdma_ipc::vrnic::check_name("group", name).ok()?;
        names.insert(u32::from_be_bytes([0, a, b, c]), name.to_string());
        rest = after;
    }
    rest.is_empty().then_some((part, parts, epoch, heard, names))
}

#[cfg(test)]
mod tests {
    use super::*;
    use unirdma_formats::net::VXLAN_BYTES as BEFORE;

    fn host(n: u8) -> IpAddr {
        [192, 168, 7, n].into()
    }

    fn members(groups: &[(&str, u32, u8)]) -> Vec<Members> {
        let one = |&(name, vni, at): &(&str, u32, u8)| Members { hosts: [host(at)].into(), ..Members::new(name, vni) };
        groups.iter().map(one).collect()
    }

    fn tell(from: &Agreement, at: u8, to: &mut Agreement, there: u8) -> bool {
        let messages = from.messages(host(there));
        let news: Vec<_> = messages.iter().map(|m| to.on_message(host(at), &m[BEFORE..])).collect();
        news.contains(&Some(true))
    }

    #[test]
    fn three_messages_and_both_know() {
        let (mut a, mut b) = (Agreement::default(), Agreement::default());
        a.set_groups(members(&[("blue", 2, 2), ("default", 1, 2)]).iter(), 11);
        b.set_groups(members(&[("blue", 2, 1), ("default", 1, 1)]).iter(), 12);
        assert_eq!((a.uninformed(), a.silent()), (vec![host(2)], vec![host(2)]));
        assert!(!b.agrees(host(1), 2, "blue"));
        assert!(tell(&a, 1, &mut b, 2) && tell(&b, 2, &mut a, 1) && !tell(&a, 1, &mut b, 2));
        for (x, other) in [(&a, host(2)), (&b, host(1))] {
            assert!(x.uninformed().is_empty() && x.silent().is_empty());
            assert!(x.agrees(other, 2, "blue") && x.agrees(other, 1, "default") && !x.agrees(other, 2, "default"));
            assert!(x.disagreements(|_| host(9)).is_empty());
        }
        // The announcement of a host that is no peer is ignored.
        let stranger = a.messages(host(2)).remove(0);
        assert_eq!((b.on_message(host(3), &stranger[BEFORE..]), b.agrees(host(3), 2, "blue")), (None, false));
        // Another number replaces the old one, and both hosts notice the difference.
        b.set_groups(members(&[("blue", 1, 1)]).iter(), 13);
        assert!(tell(&b, 2, &mut a, 1) && !a.agrees(host(2), 2, "blue"));
        tell(&a, 1, &mut b, 2);
        assert!(b.uninformed().is_empty());
        let found: Vec<String> = a.disagreements(|_| host(1)).iter().map(ToString::to_string).collect();
        assert!(
            found[0].starts_with("group blue has VNI 2 at 192.168.7.1, this host, and 1 at 192.168.7.2;"),
            "{found:?}"
        );
        assert!(
            found[1].starts_with("VNI 1 is group default at 192.168.7.1, this host, and group blue at 192.168.7.2;")
        );
        assert_eq!((found.len(), b.disagreements(|_| host(2)).len()), (2, 2));
        // A group that only the other host has, and that a rule joins with a group of this host.
        b.set_groups(members(&[("blue", 2, 1), ("red", 7, 1)]).iter(), 14);
        tell(&b, 2, &mut a, 1);
        assert!(a.disagreements(|_| host(1)).is_empty());
        a.set_joined(members(&[("red", 8, 2)]).iter());
        let found = a.disagreements(|_| host(1));
        assert_eq!((found.len(), found[0].vni_here, found[0].vni_there), (1, 8, 7));
    }

    #[test]
    fn what_takes_many_packets_counts_once_all_have_come() {
        let names: Vec<String> = (0..1000).map(|i| format!("a-group-with-a-long-name-{i:04}")).collect();
        let groups: Vec<(&str, u32, u8)> = names.iter().zip(1..).map(|(n, vni)| (n.as_str(), vni, 2)).collect();
        let (mut a, mut b) = (Agreement::default(), Agreement::default());
        a.set_groups(members(&groups).iter(), 5);
        b.set_groups(members(&[("default", 1, 1)]).iter(), 6);
        let messages = a.messages(host(2));
        assert!(messages.len() > 20 && messages.iter().all(|m| m.len() < 1200));
        for m in messages.iter().skip(1) {
            // A repeated part changes nothing.
            assert_eq!(b.on_message(host(1), &m[BEFORE..]), Some(false));
            assert_eq!(b.on_message(host(1), &m[BEFORE..]), Some(false));
        }
        assert!(!b.agrees(host(1), 1000, &names[999]) && b.silent() == [host(1)]);
        assert_eq!(b.on_message(host(1), &messages[0][BEFORE..]), Some(true));
        assert!(b.agrees(host(1), 1000, &names[999]) && b.agrees(host(1), 1, &names[0]));
    }

    #[test]
    fn damaged_messages_say_nothing() {
        let mut a = Agreement::default();
        a.set_groups(members(&[("blue", 2, 2), ("default", 1, 2)]).iter(), 11);
        let message = a.messages(host(2)).remove(0);
        let whole = parse(&message[BEFORE..]).unwrap();
        assert_eq!(whole.4, BTreeMap::from([(2, "blue".to_string()), (1, "default".to_string())]));
        let after_first = ETH_BYTES + HEAD_BYTES + 4 + 4;
        for cut in (0..message.len() - BEFORE).filter(|&n| n != after_first && n != ETH_BYTES + HEAD_BYTES) {
            assert!(parse(&message[BEFORE..][..cut]).is_none(), "{cut} bytes");
        }
        for (at, value) in [(6, 0), (13, 0), (14, 2), (15, 1), (16, 255), (33 + 4, b'/')] {
            let mut bad = message[BEFORE..].to_vec();
            bad[at] = value;
            assert!(parse(&bad).is_none(), "byte {at}");
        }
    }
}
