//! Ethernet between containers on different hosts: VXLAN (RFC 7348) over UDP 4789, with one network identifier (VNI)
//! for each group.
//!
//! Only hosts in the peers file are peers. A packet is dropped unless it comes from a peer's own port and is for a
//! group that this worker serves, that the peer has members of, and whose number the peer has announced
//! (`agreed`). A frame is dropped if it claims an address that lives elsewhere. If the group has a secret,
//! packets are sealed ([`crate::encryption`]), and numbers need no announcement. Frames to unknown and broadcast
//! destinations go to every host of the group; the hosts of addresses that answer are learned.

mod learned;

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use unirdma_device::{lock, now_ns};
use unirdma_formats::frame::{Claims, Heading};
use unirdma_formats::net::{ETH_BYTES, VXLAN_BYTES, VXLAN_PORT, vxlan, vxlan_from, vxlan_source};
use unirdma_ipc::counters::{SealInfo, TunnelDrops};
use unirdma_ipc::network::{Changes, Joined, Members};
use unirdma_ipc::secrets::{GroupSecrets, TAIL_BYTES};
use unirdma_ipc::timer::Timer;
use unirdma_rnic::{DATAGRAM_MAC, Sealed};

use crate::encryption::{Around, Handshakes, JoinedHosts, SessionTable, kind};
use learned::Learned;

/// A packet that has arrived through the tunnel. `source` is the number of the sender's group if that is another one.
#[derive(Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Tunneled<'a> {
    /// A frame of a container's interface, for a group.
    Frame { group: u32, source: Option<u32>, frame: &'a [u8] },
    /// The IP packet of an RDMA datagram, from a host.
    Datagram { from: IpAddr, group: u32, source: Option<u32>, packet: &'a [u8] },
    /// Nothing to pass on.
    Nothing,
}

/// A group that uses the tunnel.
struct Known {
    members: Members,
    /// Hosts that have announced this number for the group.
    agreed: BTreeSet<IpAddr>,
    /// By number.
    joined: HashMap<u32, Joined>,
}

struct State {
    groups: HashMap<u32, Known>,
    by_vni: HashMap<u32, u32>,
    learned: Learned,
    drops: TunnelDrops,
    handshakes: Handshakes,
    /// Buffer for an outgoing packet.
    packet: Vec<u8>,
}

/// The tunnel's sockets and what it knows of its peers.
pub struct Tunnel {
    sockets: Vec<(IpAddr, Arc<UdpSocket>)>,
    /// Readable when [`Tunnel::on_timer`] has to be called.
    timer: Timer,
    state: Mutex<State>,
}

impl Tunnel {
    /// A tunnel with these sockets, each on port 4789 of an address. Sessions are published in the table.
    ///
    /// # Errors
    /// Errors of timers.
    pub(crate) fn new(sockets: Vec<(IpAddr, Arc<UdpSocket>)>, table: Arc<SessionTable>) -> io::Result<Self> {
        let timer = Timer::new()?;
        let own = sockets.iter().map(|s| s.0).collect();
        let state = State {
            groups: HashMap::new(),
            by_vni: HashMap::new(),
            learned: Learned::default(),
            drops: TunnelDrops::default(),
            handshakes: Handshakes::new(table, own),
            packet: Vec::new(),
        };
        Ok(Tunnel { sockets, timer, state: Mutex::new(state) })
    }

    /// A descriptor that becomes readable when [`Tunnel::on_timer`] has to be called.
    pub(crate) fn timer(&self) -> BorrowedFd<'_> {
        self.timer.as_fd()
    }

    /// Repeats messages that peers have not answered.
    pub(crate) fn on_timer(&self) {
        let mut s = lock(&self.state);
        s.handshakes.on_timer(|p, to| self.send_to(p, to));
        self.arm(&s);
    }

    fn arm(&self, s: &State) {
        let _ = self.timer.set(s.handshakes.timer().map(|at| Duration::from_nanos(at.saturating_sub(now_ns()))));
    }

    /// Replaces the group's secrets.
    pub fn set_secrets(&self, secrets: GroupSecrets) {
        let mut s = lock(&self.state);
        s.handshakes.set_secrets(secrets, |p, to| self.send_to(p, to));
        self.arm(&s);
    }

    /// The packets to other hosts that are sealed.
    pub fn sealed(&self) -> Sealed {
        let s = lock(&self.state);
        Sealed { tail: TAIL_BYTES, all: s.handshakes.seals(None), across: s.handshakes.sealed_groups() }
    }

    /// State of the group's secrets.
    pub fn seal_info(&self) -> SealInfo {
        lock(&self.state).handshakes.info()
    }

    /// The sockets. Their positions are the numbers that [`Tunnel::receive`] takes.
    pub fn sockets(&self) -> impl Iterator<Item = &UdpSocket> {
        self.sockets.iter().map(|s| &*s.1)
    }

    fn send_to(&self, packet: &[u8], to: IpAddr) {
        if let Some((_, socket)) = self.sockets.iter().find(|(a, _)| a.is_ipv4() == to.is_ipv4()) {
            // A full queue drops the packet, as a wire would.
            let _ = socket.send_to(packet, SocketAddr::new(to, VXLAN_PORT));
        }
    }

    /// Replaces the data about a group: the places of its members, the hosts that have announced the same number, and
    /// the same data for joined groups. A group without members on other hosts and without joined groups is removed
    /// from the tunnel.
    pub fn set_plan(&self, group: u32, members: Members, agreed: BTreeSet<IpAddr>, joined: Vec<Joined>) {
        let mut s = lock(&self.state);
        if s.groups.get(&group).is_none_or(|g| g.members != members) {
            s.learned.clear();
        }
        s.groups.remove(&group);
        let joined = joined.into_iter().map(|j| (j.members.vni, j)).collect();
        let around = around(&members, &joined);
        if !members.hosts.is_empty() || !joined.is_empty() {
            s.groups.insert(group, Known { members, agreed, joined });
        }
        s.by_vni = s.groups.iter().map(|(&g, j)| (j.members.vni, g)).collect();
        s.handshakes.set_around(around, |p, to| self.send_to(p, to));
        self.arm(&s);
    }

    /// Applies changes to the data about a group.
    pub fn change_plan(&self, group: u32, changes: &Changes) {
        let mut s = lock(&self.state);
        let State { groups, by_vni, learned, .. } = &mut *s;
        let known = groups.entry(group).or_insert_with(|| Known {
            members: Members::new(&changes.group, changes.vni),
            agreed: BTreeSet::new(),
            joined: HashMap::new(),
        });
        by_vni.insert(changes.vni, group);
        let Known { members, agreed, joined } = known;
        for (vni, news) in &changes.joined {
            let Some(news) = news else {
                joined.remove(vni);
                continue;
            };
            let j = joined
                .entry(*vni)
                .or_insert_with(|| Joined { members: Members::new(&news.name, *vni), agreed: BTreeSet::new() });
            news.hosts.iter().for_each(|&(host, agrees)| set_host(&mut j.members, &mut j.agreed, host, agrees));
        }
        for (address, route) in &changes.addresses {
            members.places.remove(address);
            joined.values_mut().for_each(|j| _ = j.members.places.remove(address));
            let Some(r) = route.filter(|r| !r.foreign) else { continue };
            let of =
                if r.vni == members.vni { Some(&mut *members) } else { joined.get_mut(&r.vni).map(|j| &mut j.members) };
            if let Some(of) = of {
                of.places.insert(*address, r.host);
            }
        }
        for (mac, host) in &changes.macs {
            match host {
                Some(host) => members.macs.insert(*mac, *host),
                None => members.macs.remove(mac),
            };
            learned.forget(group, *mac);
        }
        changes.hosts.iter().for_each(|&(host, agrees)| set_host(members, agreed, host, agrees));
        let around = around(members, joined);
        if members.hosts.is_empty() && joined.is_empty() {
            groups.remove(&group);
            by_vni.remove(&changes.vni);
        }
        if !(changes.hosts.is_empty() && changes.joined.is_empty()) {
            s.handshakes.set_around(around, |p, to| self.send_to(p, to));
            self.arm(&s);
        }
    }

    /// Counters of dropped packets.
    pub fn drops(&self) -> TunnelDrops {
        lock(&self.state).drops
    }

    /// Counts a frame that claimed an address of this host.
    pub(crate) fn drop_claim(&self) {
        lock(&self.state).drops.address += 1;
    }

    /// Sends a frame of a local vRNIC to other hosts of its group.
    pub fn send(&self, group: u32, frame: &[u8]) {
        let mut s = lock(&self.state);
        let State { groups, learned, handshakes, packet, .. } = &mut *s;
        let Some(Known { members, .. }) = groups.get(&group) else { return };
        let mut dst = [0; 6];
        dst.copy_from_slice(&frame[..6]);
        packet.clear();
        packet.extend_from_slice(&vxlan(members.vni));
        packet.extend_from_slice(frame);
        let mut send = |host: IpAddr| {
            if handshakes.seals(None) {
                // Each host gets the packet with a different seal.
                packet.truncate(VXLAN_BYTES);
                packet.extend_from_slice(frame);
                packet.resize(VXLAN_BYTES + frame.len() + TAIL_BYTES, 0);
                if !handshakes.seal((host, None), packet) {
                    return;
                }
            }
            self.send_to(packet, host);
        };
        match members.macs.get(&dst).copied().or_else(|| learned.host(group, dst)) {
            Some(host) => send(host),
            None => members.hosts.iter().for_each(|&h| send(h)),
        }
    }

    /// Sends a frame of a local vRNIC to the host of an address in another group, if the group reaches that address.
    pub fn send_across(&self, group: u32, to: IpAddr, frame: &[u8]) {
        let mut s = lock(&self.state);
        let State { groups, handshakes, packet, .. } = &mut *s;
        let Some(Known { members, joined, .. }) = groups.get(&group) else { return };
        let Some((vni, host)) = joined.values().find_map(|j| Some((j.members.vni, *j.members.places.get(&to)?))) else {
            return;
        };
        packet.clear();
        packet.extend_from_slice(&vxlan_from(vni, members.vni));
        packet.extend_from_slice(frame);
        if handshakes.seals(Some(vni)) {
            packet.resize(VXLAN_BYTES + frame.len() + TAIL_BYTES, 0);
            if !handshakes.seal((host, Some(vni)), packet) {
                return;
            }
        }
        self.send_to(packet, host);
    }

    /// Takes one packet from a socket, using `buffer`; `None` if none waits.
    pub fn receive<'a>(&self, socket: usize, buffer: &'a mut [u8]) -> Option<Tunneled<'a>> {
        let (to, socket) = self.sockets.get(socket)?;
        let (n, from) = socket.recv_from(buffer).ok()?;
        let mut s = lock(&self.state);
        if from.port() == VXLAN_PORT && hello_of(&buffer[..n]).is_some_and(|group| s.handshakes.seals(group)) {
            if s.handshakes.on_message(from, &buffer[..n], |p, to| self.send_to(p, to)) {
                self.arm(&s);
            }
            return Some(Tunneled::Nothing);
        }
        Some(take(&mut s, from, *to, &mut buffer[..n]).unwrap_or_else(|why| {
            why.into_iter().for_each(|why| *why(&mut s.drops) += 1);
            Tunneled::Nothing
        }))
    }
}

/// The group and its joined groups, in the form that [`Handshakes`] takes.
fn around(members: &Members, joined: &HashMap<u32, Joined>) -> Around {
    let hosts_of = |j: &Joined| JoinedHosts { name: j.members.name.clone(), hosts: j.members.hosts.clone() };
    Around {
        name: members.name.clone(),
        vni: members.vni,
        hosts: members.hosts.clone(),
        joined: joined.iter().map(|(&vni, j)| (vni, hosts_of(j))).collect(),
    }
}

/// If a packet is a message of the handshake, `Some` with the number of its sender's group if that is another one.
/// `None` for other packets.
fn hello_of(packet: &[u8]) -> Option<Option<u32>> {
    let head = packet.first_chunk::<VXLAN_BYTES>().filter(|h| h[kind::AT] == kind::HELLO)?;
    Some(vxlan_source(head))
}

/// The counter of a dropped packet; `None` if the packet was counted already.
type Why = Option<fn(&mut TunnelDrops) -> &mut u64>;

/// Checks a packet that has arrived at an address of this host, and finds its group.
fn take<'a>(s: &mut State, from: SocketAddr, to: IpAddr, packet: &'a mut [u8]) -> Result<Tunneled<'a>, Why> {
    // Any user of a peer host can bind another port.
    if from.port() != VXLAN_PORT {
        return Err(Some(|d| &mut d.not_a_peer));
    }
    let from = from.ip();
    let head = packet.first_chunk::<VXLAN_BYTES>().ok_or(MALFORMED)?;
    if head[0] & 8 == 0 {
        return Err(MALFORMED);
    }
    let vni = u32::from_be_bytes([0, head[4], head[5], head[6]]);
    let State { groups, by_vni, learned, handshakes, .. } = s;
    let of = by_vni.get(&vni).and_then(|g| Some((*g, groups.get(g)?)));
    let (group, known) = of.ok_or(NO_GROUP)?;
    // If the sender is in another group, the data about that group applies.
    let source = vxlan_source(head);
    let (members, agreed) = match source {
        None => (&known.members, &known.agreed),
        Some(vni) => known.joined.get(&vni).map(|j| (&j.members, &j.agreed)).ok_or(NO_GROUP)?,
    };
    if !members.hosts.contains(&from) {
        return Err(NO_GROUP);
    }
    // A packet that can be opened was sealed for this number and name, so the host need not announce them.
    let packet = if handshakes.seals(source) {
        &*handshakes.open((from, source), to, packet).ok_or(None)?
    } else if head[kind::AT] != 0 {
        handshakes.complain_of_seal((from, source), head[kind::AT]);
        return Err(None);
    } else if !agreed.contains(&from) {
        return Err(Some(|d| &mut d.not_agreed));
    } else {
        packet
    };
    let frame = packet.get(VXLAN_BYTES..).filter(|f| f.len() >= ETH_BYTES).ok_or(MALFORMED)?;
    if frame[6..12] == DATAGRAM_MAC {
        return Ok(Tunneled::Datagram { from, group, source, packet: &frame[ETH_BYTES..] });
    }
    let mut src = [0; 6];
    src.copy_from_slice(&frame[6..12]);
    if source.is_some() {
        // There are no routers between groups: a packet from another group must have a source address of that group,
        // and come from the host of that address.
        let heading = Heading::read(frame).and_then(|h| h.from);
        let at_home = heading.is_some_and(|a| members.places.get(&a) == Some(&from));
        return if at_home { Ok(Tunneled::Frame { group, source, frame }) } else { Err(Some(|d| &mut d.address)) };
    }
    let known = members.macs.contains_key(&src);
    if is_elsewhere(members, src, frame, from) || !known && !learned.note(group, src, from, Instant::now()) {
        return Err(Some(|d| &mut d.address));
    }
    Ok(Tunneled::Frame { group, source, frame })
}

const MALFORMED: Why = Some(|d| &mut d.malformed);
const NO_GROUP: Why = Some(|d| &mut d.no_group);

/// True if a frame from a host claims an address of a group that is at another host. The source address of an IP packet
/// is not checked, since a router may have forwarded the packet.
fn is_elsewhere(members: &Members, src: [u8; 6], frame: &[u8], from: IpAddr) -> bool {
    let elsewhere = |a: IpAddr| members.places.get(&a).is_some_and(|&host| host != from);
    let stolen = members.macs.get(&src).is_some_and(|&host| host != from);
    let told = Claims::read(frame).ok().and_then(|c| c.located);
    src[0] & 1 != 0 || stolen || told.is_some_and(elsewhere)
}

/// Records whether a host has members of the group and agrees about its number; `None`: the host has no members any
/// more.
fn set_host(members: &mut Members, agreed: &mut BTreeSet<IpAddr>, host: IpAddr, agrees: Option<bool>) {
    match agrees {
        Some(_) => members.hosts.insert(host),
        None => members.hosts.remove(&host),
    };
    match agrees {
        Some(true) => agreed.insert(host),
        _ => agreed.remove(&host),
    };
}
