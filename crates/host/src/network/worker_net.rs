//! A worker's configuration of the network, and its port and tunnel, made from the received descriptors.

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use unirdma_formats::Gid;
use unirdma_formats::net::FIRST_SOURCE_PORT;
use unirdma_policy::Rule;
use unirdma_rnic::Route;

use super::qpn_ranges::Range;
use crate::encryption::{Board, Seals};
use crate::fault_injector::FaultyPort;
use crate::port::{PacketPort, Port, UdpPort};
use crate::tunnel::{Joined, Members, Tunnel};

/// The purpose of a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Role {
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
pub(crate) struct Enrolment {
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
    /// Largest path MTU as a code, and in bytes.
    pub mtu_code: u8,
    pub mtu: u32,
    /// MTU of the containers' interfaces.
    pub net_mtu: u32,
    /// Percentage of incoming packets to lose, to duplicate and to reorder; for tests.
    pub faults: Option<u64>,
}

/// The locations of a group's peers, for a new worker.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Plan {
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
pub(crate) struct Changes {
    pub group: String,
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
pub(crate) struct JoinedChanges {
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

/// Makes a worker's port and tunnel from the descriptors received with its configuration.
///
/// # Errors
/// The descriptors do not match the configuration.
pub(crate) fn open_worker(e: &Enrolment, sockets: Vec<OwnedFd>) -> io::Result<(Box<dyn Port>, Tunnel)> {
    let wrong = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
    if sockets.len() != e.roles.len() {
        let text = format!("group {} has {} sockets, but {} came", e.group, e.roles.len(), sockets.len());
        return Err(wrong(text));
    }
    let board = Arc::new(Board::default());
    let seals = Seals::new(board.clone(), &e.group);
    let mut port = UdpPort::new(e.first_port.unwrap_or(FIRST_SOURCE_PORT), e.icrc, seals);
    let (mut tunnel, mut packets) = (Vec::new(), Vec::new());
    for (&role, fd) in e.roles.iter().zip(sockets) {
        match role {
            Role::Roce(address) => port.add(address, fd.into()),
            Role::Tunnel(address) => {
                let udp = Arc::new(UdpSocket::from(fd));
                port.add_tunnel(address, udp.clone());
                tunnel.push((address, udp));
            }
            Role::Flow(address, flow) => {
                if !port.add_flow(address, flow, fd.into()) {
                    return Err(wrong(format!("there is no flow {flow} of {address}")));
                }
            }
            Role::Packets(address) => packets.push((address, fd)),
        }
    }
    let port: Box<dyn Port> =
        if packets.is_empty() { Box::new(port) } else { Box::new(PacketPort::new(port, packets)) };
    let port = match e.faults {
        Some(percent) => Box::new(FaultyPort::new(port, percent, 1)),
        None => port,
    };
    Ok((port, Tunnel::new(tunnel, board)?))
}
