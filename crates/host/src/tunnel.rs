//! The containers' Ethernet across hosts: VXLAN (RFC 7348) over UDP 4789, one network identifier (VNI) for each group.
//!
//! Peers are those of the peers file and nobody else. A packet is dropped unless it comes from a peer's own port, for a group that
//! this worker has, whose members that peer has too, and whose number that peer has announced ([`crate::network`]). A frame is dropped if
//! it claims an address that lives elsewhere. Unknown and broadcast destinations go to every host of the group; what answers is learned.

mod learned;

use std::collections::{BTreeSet, HashMap};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use serde::{Deserialize, Serialize};
use unirdma_device::lock;
use unirdma_formats::frame::Claims;
use unirdma_formats::net::{ETH_BYTES, VXLAN_BYTES, VXLAN_PORT, vxlan};
use unirdma_rnic::DATAGRAM_MAC;

use crate::network::{Changes, Disagreement};
use learned::Learned;

/// Bytes that a tunnel adds to a frame over IPv6; over IPv4 it is 20 less.
pub(crate) const TUNNEL_BYTES: u32 = 40 + 8 + (VXLAN_BYTES + ETH_BYTES) as u32;

/// Where the members of one group are.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Members {
    pub name: String,
    pub vni: u32,
    pub hosts: BTreeSet<IpAddr>,
    /// The host of each virtual address.
    pub places: HashMap<IpAddr, IpAddr>,
    /// The host of each Ethernet address of a vRNIC that is known.
    #[serde(with = "pairs")]
    pub macs: HashMap<[u8; 6], IpAddr>,
}

/// A table as a list, since names of JSON are text.
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

/// What came through the tunnel.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Tunneled<'a> {
    /// A frame of a container's interface, for a group.
    Frame { group: u32, frame: &'a [u8] },
    /// The IP packet of an RDMA datagram, from a host.
    Datagram { from: IpAddr, group: u32, packet: &'a [u8] },
    /// Nothing for a group.
    Nothing,
}

/// Packets of the tunnel that were dropped, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TunnelDrops {
    /// From a host or port that is no peer's.
    pub not_a_peer: u64,
    /// For a group that this host does not have, or its sender's host does not.
    pub no_group: u64,
    /// With a number that its sender's host has not announced as this group's.
    pub not_agreed: u64,
    /// With an Ethernet, ARP or neighbour discovery address that lives elsewhere.
    pub address: u64,
    /// Too short, or no VXLAN.
    pub malformed: u64,
}

impl std::ops::AddAssign for TunnelDrops {
    fn add_assign(&mut self, o: Self) {
        let TunnelDrops { not_a_peer, no_group, not_agreed, address, malformed } = self;
        *not_a_peer += o.not_a_peer;
        *no_group += o.no_group;
        *not_agreed += o.not_agreed;
        *address += o.address;
        *malformed += o.malformed;
    }
}

/// What there is to know of the tunnel.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct TunnelInfo {
    /// What was dropped.
    pub drops: TunnelDrops,
    /// Where a peer has other numbers for groups than this host.
    pub disagreements: Vec<Disagreement>,
    /// Peers that have not announced their groups: nothing that they send by the tunnel passes.
    pub silent: Vec<IpAddr>,
}

/// A group whose frames come through the tunnel.
struct Joined {
    members: Members,
    /// Hosts that have said that the group has this number there.
    agreed: BTreeSet<IpAddr>,
}

#[derive(Default)]
struct State {
    groups: HashMap<u32, Joined>,
    by_vni: HashMap<u32, u32>,
    learned: Learned,
    drops: TunnelDrops,
}

/// The tunnel's sockets and what it knows of its peers.
pub(crate) struct Tunnel {
    sockets: Vec<(IpAddr, Arc<UdpSocket>)>,
    state: Mutex<State>,
}

impl Tunnel {
    /// A tunnel by these sockets, each of which has port 4789 of an address.
    pub fn new(sockets: Vec<(IpAddr, Arc<UdpSocket>)>) -> Self {
        Tunnel { sockets, state: Mutex::default() }
    }

    /// The sockets, in the order of the numbers that [`Tunnel::receive`] takes.
    pub fn sockets(&self) -> impl Iterator<Item = &UdpSocket> {
        self.sockets.iter().map(|s| &*s.1)
    }

    fn send_to(&self, packet: &[u8], to: IpAddr) {
        if let Some((_, socket)) = self.sockets.iter().find(|(a, _)| a.is_ipv4() == to.is_ipv4()) {
            // A full queue drops the packet, as a wire would.
            let _ = socket.send_to(packet, SocketAddr::new(to, VXLAN_PORT));
        }
    }

    /// Replaces what is known of a group: where its members are, and which hosts have said that it has the same number there. Without
    /// members on other hosts the group has no part in the tunnel.
    pub fn set_plan(&self, group: u32, members: Members, agreed: BTreeSet<IpAddr>) {
        let mut s = lock(&self.state);
        if s.groups.get(&group).is_none_or(|g| g.members != members) {
            s.learned.clear();
        }
        s.groups.remove(&group);
        if !members.hosts.is_empty() {
            s.groups.insert(group, Joined { members, agreed });
        }
        s.by_vni = s.groups.iter().map(|(&g, j)| (j.members.vni, g)).collect();
    }

    /// Changes what is known of a group.
    pub fn change_plan(&self, group: u32, changes: &Changes) {
        let mut s = lock(&self.state);
        let State { groups, by_vni, learned, .. } = &mut *s;
        let joined = groups
            .entry(group)
            .or_insert_with(|| Joined { members: Members::new(&changes.group, changes.vni), agreed: BTreeSet::new() });
        by_vni.insert(changes.vni, group);
        let members = &mut joined.members;
        for (address, route) in &changes.addresses {
            match route.filter(|r| !r.foreign) {
                Some(r) => members.places.insert(*address, r.host),
                None => members.places.remove(address),
            };
        }
        for (mac, host) in &changes.macs {
            match host {
                Some(host) => members.macs.insert(*mac, *host),
                None => members.macs.remove(mac),
            };
            learned.forget(group, *mac);
        }
        for (host, agrees) in &changes.hosts {
            match agrees {
                Some(_) => members.hosts.insert(*host),
                None => members.hosts.remove(host),
            };
            match agrees {
                Some(true) => joined.agreed.insert(*host),
                _ => joined.agreed.remove(host),
            };
        }
        if members.hosts.is_empty() {
            groups.remove(&group);
            by_vni.remove(&changes.vni);
        }
    }

    /// What was dropped.
    pub fn drops(&self) -> TunnelDrops {
        lock(&self.state).drops
    }

    /// Counts a frame that claimed an address of this host.
    pub fn drop_claim(&self) {
        lock(&self.state).drops.address += 1;
    }

    /// Sends a frame of a local vRNIC to the hosts of its group.
    pub fn send(&self, group: u32, frame: &[u8]) {
        let s = lock(&self.state);
        let Some(Joined { members, .. }) = s.groups.get(&group) else { return };
        let mut dst = [0; 6];
        dst.copy_from_slice(&frame[..6]);
        let mut packet = Vec::with_capacity(VXLAN_BYTES + frame.len());
        packet.extend_from_slice(&vxlan(members.vni));
        packet.extend_from_slice(frame);
        match members.macs.get(&dst).copied().or_else(|| s.learned.host(group, dst)) {
            Some(host) => self.send_to(&packet, host),
            None => members.hosts.iter().for_each(|&h| self.send_to(&packet, h)),
        }
    }

    /// Takes one packet off a socket, its frame in `buffer`; `None` if none waits.
    pub fn receive<'a>(&self, socket: usize, buffer: &'a mut [u8]) -> Option<Tunneled<'a>> {
        let (n, from) = self.sockets.get(socket)?.1.recv_from(buffer).ok()?;
        let mut s = lock(&self.state);
        Some(take(&mut s, from, &buffer[..n]).unwrap_or_else(|why| {
            *why(&mut s.drops) += 1;
            Tunneled::Nothing
        }))
    }
}

/// Finds out whose a packet is; else which count it is in.
fn take<'a>(
    s: &mut State,
    from: SocketAddr,
    packet: &'a [u8],
) -> Result<Tunneled<'a>, fn(&mut TunnelDrops) -> &mut u64> {
    // Any user of a peer host can bind another port.
    if from.port() != VXLAN_PORT {
        return Err(|d| &mut d.not_a_peer);
    }
    let from = from.ip();
    let (head, frame) = packet.split_first_chunk::<VXLAN_BYTES>().ok_or(MALFORMED)?;
    if head[0] & 8 == 0 || frame.len() < ETH_BYTES {
        return Err(MALFORMED);
    }
    let vni = u32::from_be_bytes([0, head[4], head[5], head[6]]);
    let State { groups, by_vni, learned, .. } = s;
    let of = by_vni.get(&vni).and_then(|g| Some((*g, groups.get(g)?)));
    let (group, Joined { members, agreed }) = of.ok_or(NO_GROUP)?;
    if !members.hosts.contains(&from) {
        return Err(NO_GROUP);
    }
    if !agreed.contains(&from) {
        return Err(|d| &mut d.not_agreed);
    }
    if frame[6..12] == DATAGRAM_MAC {
        return Ok(Tunneled::Datagram { from, group, packet: &frame[ETH_BYTES..] });
    }
    let mut src = [0; 6];
    src.copy_from_slice(&frame[6..12]);
    let known = members.macs.contains_key(&src);
    if members.is_elsewhere(src, frame, from) || !known && !learned.note(group, src, from, Instant::now()) {
        return Err(|d| &mut d.address);
    }
    Ok(Tunneled::Frame { group, frame })
}

const MALFORMED: fn(&mut TunnelDrops) -> &mut u64 = |d| &mut d.malformed;
const NO_GROUP: fn(&mut TunnelDrops) -> &mut u64 = |d| &mut d.no_group;

impl Members {
    /// True if a frame that came from a host claims an address that is at another one. An IP packet may come from where its source
    /// address is not: a router may have sent it on.
    fn is_elsewhere(&self, src: [u8; 6], frame: &[u8], from: IpAddr) -> bool {
        let elsewhere = |a: IpAddr| self.places.get(&a).is_some_and(|&host| host != from);
        let stolen = self.macs.get(&src).is_some_and(|&host| host != from);
        let told = Claims::read(frame).ok().and_then(|c| c.located);
        src[0] & 1 != 0 || stolen || told.is_some_and(elsewhere)
    }
}
