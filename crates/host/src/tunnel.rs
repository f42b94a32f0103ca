//! The containers' Ethernet across hosts: VXLAN (RFC 7348) over UDP 4789, one network identifier (VNI) for each group.
//!
//! Peers are those of the peers file and nobody else. A packet is dropped unless it comes from a peer's own port, for a group that
//! this host has, whose members that peer has too, and whose number that peer has announced ([`agree`]). A frame is dropped if it
//! claims an address that lives elsewhere. Unknown and broadcast destinations go to every host of the group; what answers is learned.

mod agree;
mod learned;

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec};
use serde::{Deserialize, Serialize};
use unirdma_device::lock;
use unirdma_formats::frame::Claims;
use unirdma_formats::net::{ETH_BYTES, VXLAN_BYTES, VXLAN_PORT, vxlan};
use unirdma_rnic::DATAGRAM_MAC;

pub use agree::Disagreement;
use agree::{ANNOUNCEMENT, Agreement};
use learned::Learned;

/// Bytes that a tunnel adds to a frame over IPv6; over IPv4 it is 20 less.
pub(crate) const TUNNEL_BYTES: u32 = 40 + 8 + (VXLAN_BYTES + ETH_BYTES) as u32;
/// What peers do not know is said again after this time, then after twice as long each time, up to the maximum.
const FIRST_REPEAT: Duration = Duration::from_millis(50);
const LAST_REPEAT: Duration = Duration::from_secs(30);
/// Most lines in the log about disagreements, for as long as the peers file is the same.
const MAX_LOGGED: usize = 100;

/// Where the members of one group are.
#[derive(Clone, Debug, Default)]
pub(crate) struct Members {
    pub name: String,
    pub vni: u32,
    pub hosts: BTreeSet<IpAddr>,
    /// The host of each virtual address.
    pub places: HashMap<IpAddr, IpAddr>,
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

struct State {
    groups: HashMap<u32, Members>,
    by_vni: HashMap<u32, u32>,
    learned: Learned,
    agreement: Agreement,
    disagreements: Vec<Disagreement>,
    /// The log has these.
    logged: BTreeSet<Disagreement>,
    drops: TunnelDrops,
    repeat: Duration,
}

/// The tunnel's sockets and what it knows of its peers.
pub(crate) struct Tunnel {
    pub sockets: Vec<UdpSocket>,
    addresses: Vec<IpAddr>,
    timer: OwnedFd,
    state: Mutex<State>,
}

impl Tunnel {
    /// Binds UDP port 4789 of each address.
    ///
    /// # Errors
    /// One line: which address, and why.
    pub fn open(addresses: &[IpAddr]) -> io::Result<Self> {
        let bind = |&a: &IpAddr| {
            let s = UdpSocket::bind(SocketAddr::new(a, VXLAN_PORT)).map_err(|e| {
                io::Error::new(e.kind(), format!("cannot bind UDP port {VXLAN_PORT} of {a} for VXLAN: {e}"))
            })?;
            s.set_nonblocking(true)?;
            crate::port::enlarge_buffers(&s);
            Ok(s)
        };
        let sockets = addresses.iter().map(bind).collect::<io::Result<_>>()?;
        let timer =
            rustix::time::timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)?;
        let state = State {
            groups: HashMap::new(),
            by_vni: HashMap::new(),
            learned: Learned::default(),
            agreement: Agreement::default(),
            disagreements: Vec::new(),
            logged: BTreeSet::new(),
            drops: TunnelDrops::default(),
            repeat: FIRST_REPEAT,
        };
        Ok(Tunnel { sockets, addresses: addresses.to_vec(), timer, state: Mutex::new(state) })
    }

    /// This host's address to a peer, and its socket.
    fn outlet(&self, to: IpAddr) -> Option<(IpAddr, &UdpSocket)> {
        let at = self.addresses.iter().position(|a| a.is_ipv4() == to.is_ipv4())?;
        Some((self.addresses[at], &self.sockets[at]))
    }

    fn send_to(&self, packet: &[u8], to: IpAddr) {
        if let Some((_, socket)) = self.outlet(to) {
            // A full queue drops the packet, as a wire would.
            let _ = socket.send_to(packet, SocketAddr::new(to, VXLAN_PORT));
        }
    }

    /// Replaces what is known of the groups, by group number, and tells the peers. Each group with members has a VNI of its own.
    pub fn set_groups(&self, groups: HashMap<u32, Members>) {
        let mut s = lock(&self.state);
        let epoch = getrandom::u64().unwrap_or_default().max(1);
        s.agreement.set_groups(groups.values(), epoch);
        s.by_vni = groups.iter().filter(|(_, m)| !m.hosts.is_empty()).map(|(&g, m)| (m.vni, g)).collect();
        s.groups = groups;
        s.learned.clear();
        s.logged.clear();
        s.repeat = FIRST_REPEAT;
        self.announce(&mut s);
        self.note_disagreements(&mut s);
    }

    /// What becomes readable when something is to be said again: [`Tunnel::on_timer`].
    pub fn timer(&self) -> BorrowedFd<'_> {
        self.timer.as_fd()
    }

    /// Says again what peers do not know.
    pub fn on_timer(&self) {
        let _ = rustix::io::read(&self.timer, &mut [0; 8]);
        self.announce(&mut lock(&self.state));
    }

    /// Says to all peers that do not know what this host has, and once more later.
    fn announce(&self, s: &mut State) {
        let uninformed = s.agreement.uninformed();
        for &host in &uninformed {
            s.agreement.messages(host).iter().for_each(|m| self.send_to(m, host));
        }
        let after = if uninformed.is_empty() { Duration::ZERO } else { s.repeat };
        s.repeat = (2 * s.repeat).min(LAST_REPEAT);
        let time = Timespec { tv_sec: after.as_secs() as i64, tv_nsec: after.subsec_nanos().into() };
        let never = Timespec { tv_sec: 0, tv_nsec: 0 };
        let timer = Itimerspec { it_interval: never, it_value: time };
        if let Err(e) = rustix::time::timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &timer) {
            tracing::error!("what peers do not know of this host's groups is not said again: {e}");
        }
    }

    /// Finds out who disagrees now, and logs what the log does not have yet.
    fn note_disagreements(&self, s: &mut State) {
        s.disagreements = s.agreement.disagreements(|peer| self.outlet(peer).map_or(peer, |(own, _)| own));
        for d in &s.disagreements {
            if s.logged.len() < MAX_LOGGED && s.logged.insert(d.clone()) {
                tracing::warn!("{d}");
            }
        }
    }

    /// What was dropped, and who disagrees.
    pub fn info(&self) -> TunnelInfo {
        let s = lock(&self.state);
        TunnelInfo { drops: s.drops, disagreements: s.disagreements.clone(), silent: s.agreement.silent() }
    }

    /// Counts a frame that claimed an address of this host.
    pub fn drop_claim(&self) {
        lock(&self.state).drops.address += 1;
    }

    /// Sends a frame of a local vRNIC to the hosts of its group.
    pub fn send(&self, group: u32, frame: &[u8]) {
        let s = lock(&self.state);
        let Some(members) = s.groups.get(&group) else { return };
        let mut dst = [0; 6];
        dst.copy_from_slice(&frame[..6]);
        let mut packet = Vec::with_capacity(VXLAN_BYTES + frame.len());
        packet.extend_from_slice(&vxlan(members.vni));
        packet.extend_from_slice(frame);
        match s.learned.host(group, dst) {
            Some(host) => self.send_to(&packet, host),
            None => members.hosts.iter().for_each(|&h| self.send_to(&packet, h)),
        }
    }

    /// Takes one packet off a socket, its frame in `buffer`; `None` if none waits.
    pub fn receive<'a>(&self, socket: usize, buffer: &'a mut [u8]) -> Option<Tunneled<'a>> {
        let (n, from) = self.sockets.get(socket)?.recv_from(buffer).ok()?;
        let mut s = lock(&self.state);
        Some(self.take(&mut s, from, &buffer[..n]).unwrap_or_else(|why| {
            *why(&mut s.drops) += 1;
            Tunneled::Nothing
        }))
    }

    /// Finds out whose a packet is; else which count it is in.
    fn take<'a>(
        &self,
        s: &mut State,
        from: SocketAddr,
        packet: &'a [u8],
    ) -> Result<Tunneled<'a>, fn(&mut TunnelDrops) -> &mut u64> {
        // Any user of a peer host can bind another port.
        if from.port() != VXLAN_PORT {
            return Err(NOT_A_PEER);
        }
        let from = from.ip();
        let (head, frame) = packet.split_first_chunk::<VXLAN_BYTES>().ok_or(MALFORMED)?;
        if head[0] & 8 == 0 || frame.len() < ETH_BYTES {
            return Err(MALFORMED);
        }
        let vni = u32::from_be_bytes([0, head[4], head[5], head[6]]);
        if vni == ANNOUNCEMENT {
            if !s.agreement.has_peer(from) {
                return Err(NOT_A_PEER);
            }
            let news = s.agreement.on_message(from, frame).ok_or(MALFORMED)?;
            if news {
                s.agreement.messages(from).iter().for_each(|m| self.send_to(m, from));
                self.note_disagreements(s);
            }
            return Ok(Tunneled::Nothing);
        }
        let State { groups, by_vni, agreement, learned, .. } = s;
        let of = by_vni.get(&vni).and_then(|g| Some((*g, groups.get(g)?)));
        let (group, members) = of.ok_or(NO_GROUP)?;
        if !members.hosts.contains(&from) {
            return Err(NO_GROUP);
        }
        if !agreement.agrees(from, vni, &members.name) {
            return Err(|d| &mut d.not_agreed);
        }
        if frame[6..12] == DATAGRAM_MAC {
            return Ok(Tunneled::Datagram { from, group, packet: &frame[ETH_BYTES..] });
        }
        let mut src = [0; 6];
        src.copy_from_slice(&frame[6..12]);
        if members.is_elsewhere(src, frame, from) || !learned.note(group, src, from, Instant::now()) {
            return Err(|d| &mut d.address);
        }
        Ok(Tunneled::Frame { group, frame })
    }
}

const NOT_A_PEER: fn(&mut TunnelDrops) -> &mut u64 = |d| &mut d.not_a_peer;
const MALFORMED: fn(&mut TunnelDrops) -> &mut u64 = |d| &mut d.malformed;
const NO_GROUP: fn(&mut TunnelDrops) -> &mut u64 = |d| &mut d.no_group;

impl Members {
    /// True if a frame that came from a host claims an address that is at another one. An IP packet may come from where its source
    /// address is not: a router may have sent it on.
    fn is_elsewhere(&self, src: [u8; 6], frame: &[u8], from: IpAddr) -> bool {
        let elsewhere = |a: IpAddr| self.places.get(&a).is_some_and(|&host| host != from);
        // A vRNIC's MAC has its IPv4 address in it.
        let own = if let [2, _, a, b, c, d] = src { Some(Ipv4Addr::from([a, b, c, d])) } else { None };
        let told = Claims::read(frame).ok().and_then(|c| c.located);
        src[0] & 1 != 0 || own.is_some_and(|a| elsewhere(a.into())) || told.is_some_and(elsewhere)
    }
}

#[cfg(test)]
mod tests;
