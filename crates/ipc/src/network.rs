//! The network to other hosts, as a worker is told of it: its descriptors, and the locations of peers.

use std::collections::{BTreeSet, HashMap};
use std::net::{IpAddr, Ipv4Addr};

use serde::{Deserialize, Serialize};
use unirdma_formats::Gid;
use unirdma_policy::Rule;
use unirdma_rnic::Route;

/// ECT(0) of RFC 3168, with which all packets of RoCEv2 leave. The supervisor sets it for each socket; a packet with
/// another traffic class needs a control message.
pub const ECN_CAPABLE: i32 = 2;

/// A range of QPNs: the first one, and their number.
pub type Range = (u32, u32);

/// The purpose of a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Role {
    /// A UDP socket of port 4791 of an address.
    Roce(IpAddr),
    /// A UDP socket of port 4789 of an address.
    Tunnel(IpAddr),
    /// A UDP socket that only sends, from a port of an address.
    Flow(IpAddr, u16),
    /// A packet socket for RoCEv2 to an address.
    Packets(Ipv4Addr),
}

/// The network's configuration for the worker of a group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Enrolment {
    /// Name of the group.
    pub group: String,
    /// The number of the group on this host.
    pub id: u32,
    /// This host's addresses.
    pub addresses: Vec<IpAddr>,
    /// The purposes of the descriptors sent along.
    pub roles: Vec<Role>,
    /// The QPNs of the group: first number and length of each range.
    pub qpns: Vec<Range>,
    /// UDP source port of its first flow, if it has flows. Groups have separate ports: packets that the receiving host
    /// coalesces are of one flow, and so of one group.
    pub first_port: Option<u16>,
    /// Make and check the ICRC.
    pub icrc: bool,
    /// React to losses and ECN marks.
    pub congestion_control: bool,
    /// Largest path MTU as a code.
    pub mtu_code: u8,
    /// The same, bytes.
    pub mtu: u32,
    /// MTU of the containers' interfaces.
    pub net_mtu: u32,
    /// Percentage of incoming packets to lose, to duplicate and to reorder; for tests.
    pub faults: Option<u64>,
}

/// The locations of a group's peers, for a new worker.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// Routes to virtual addresses on other hosts, including addresses of joined groups.
    pub routes: Vec<(IpAddr, Route)>,
    /// The hosts of the group, for the tunnel.
    pub members: Members,
    /// Its hosts that have announced the same number for the group.
    pub agreed: BTreeSet<IpAddr>,
    /// The groups that rules join with it.
    pub joined: Vec<Joined>,
    /// The rules that concern it. They name groups by their numbers.
    pub rules: Vec<Rule<u32>>,
}

impl Plan {
    /// The rules in the RNIC's form.
    pub fn gid_rules(&self) -> Vec<Rule<u32, Gid>> {
        gid_rules(&self.rules)
    }

    /// The RNIC's routes of the group with this number.
    pub fn routes(&self, group: u32) -> HashMap<(u32, Gid), Route> {
        self.routes.iter().map(|&(address, route)| ((group, Gid::from_ip(address)), route)).collect()
    }
}

fn gid_rules(rules: &[Rule<u32>]) -> Vec<Rule<u32, Gid>> {
    rules.iter().filter_map(|r| r.translate(|&vni| Some(vni), |&a| Gid::from_ip(a))).collect()
}

/// Changes of a [`Plan`]. The number does not change: a new number needs a new plan.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Changes {
    /// Name of the group.
    pub group: String,
    /// Its number between hosts.
    pub vni: u32,
    /// Present routes to changed virtual addresses, including the addresses of joined groups; `None`: unreachable.
    pub addresses: Vec<(IpAddr, Option<Route>)>,
    /// The present host of each changed Ethernet address.
    pub macs: Vec<([u8; 6], Option<IpAddr>)>,
    /// Changed hosts of the group. `Some` tells whether the host has announced the same number, `None` that the host no
    /// longer has the group.
    pub hosts: Vec<(IpAddr, Option<bool>)>,
    /// New and changed joined groups, by their numbers; `None`: no longer joined.
    pub joined: Vec<(u32, Option<JoinedChanges>)>,
    /// All rules that concern the group, if they have changed.
    pub rules: Option<Vec<Rule<u32>>>,
}

/// Changes of a joined group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JoinedChanges {
    /// Name of the group.
    pub name: String,
    /// As [`Changes::hosts`].
    pub hosts: Vec<(IpAddr, Option<bool>)>,
}

impl Changes {
    /// True if nothing has changed.
    pub fn is_empty(&self) -> bool {
        *self == Changes { group: self.group.clone(), vni: self.vni, ..Changes::default() }
    }

    /// The rules in the RNIC's form, if they have changed.
    pub fn gid_rules(&self) -> Option<Vec<Rule<u32, Gid>>> {
        self.rules.as_deref().map(gid_rules)
    }

    /// The changed routes in the RNIC's form.
    pub fn routes(&self) -> impl Iterator<Item = (Gid, Option<Route>)> {
        self.addresses.iter().map(|&(address, route)| (Gid::from_ip(address), route))
    }
}

/// The places of one group's members.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Members {
    /// Name of the group.
    pub name: String,
    /// Its number between hosts.
    pub vni: u32,
    /// The virtual layers that have members.
    pub hosts: BTreeSet<IpAddr>,
    /// The host of each virtual address.
    pub places: HashMap<IpAddr, IpAddr>,
    /// The host of each known Ethernet address of a vRNIC.
    #[serde(with = "pairs")]
    pub macs: HashMap<[u8; 6], IpAddr>,
}

/// Serializes a table as a list, since keys in JSON are text.
mod pairs {
    use super::{HashMap, IpAddr};
    use serde::{Deserialize, Deserializer, Serializer};

    pub fn serialize<S: Serializer>(macs: &HashMap<[u8; 6], IpAddr>, s: S) -> Result<S::Ok, S::Error> {
        s.collect_seq(macs)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<HashMap<[u8; 6], IpAddr>, D::Error> {
        Ok(Vec::deserialize(d)?.into_iter().collect())
    }
}

impl Members {
    /// A group without members.
    pub fn new(name: &str, vni: u32) -> Self {
        Members { name: name.into(), vni, ..Members::default() }
    }
}

/// A group that rules join with another one, as known to that other one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Joined {
    /// The group and its members.
    pub members: Members,
    /// Hosts that have announced this number for the group.
    pub agreed: BTreeSet<IpAddr>,
}
