//! The network to other hosts in the supervisor: addresses, MTU, peers, and all sockets.
//!
//! The worker of each group gets its own sockets for the ports of RoCEv2 and VXLAN ([`Network::enroll`]). A BPF program
//! in the kernel selects the worker that gets a packet (`reuseport`, `bpf`). Only the supervisor makes sockets, in
//! `open`. It keeps a duplicate of each, so that a restarted worker gets the same ones. Matters of all groups stay
//! here: the knowledge about peers (`peer_table`, from a [`Source`]), the announcements of the groups' numbers
//! (`vni_announce`), the firewall, and the division of QPNs among the groups (`qpn_ranges`).

mod bpf;
mod interface;
mod open;
mod peer_table;
mod peered_groups;
mod qpn_ranges;
mod reuseport;
mod reuseport_order;
#[cfg(test)]
mod tests;
mod vni_agreement;
mod vni_announce;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::event::epoll;
use serde::{Deserialize, Serialize};
use unirdma_formats::mtu_bytes;
use unirdma_formats::net::{ETH_BYTES, FIRST_SOURCE_PORT, SOURCE_PORTS, VXLAN_BYTES, VXLAN_PORT};
use unirdma_formats::wire::{ICRC_BYTES, MAX_HEADER_BYTES};
use unirdma_rnic::{MAX_OUTER_BYTES, WireDrops};

use interface::interface_mtu;
use peer_table::PeerTable;
pub(crate) use peer_table::PeerUpdate;
use qpn_ranges::QpnRanges;
use reuseport::{Indices, Member, ReuseportGroup};
pub(crate) use reuseport_order::ORDER_FILE;
use reuseport_order::Orders;
use unirdma_ipc::counters::PortCounters;
use unirdma_ipc::counters::TunnelDrops;
use unirdma_ipc::network::{Enrolment, Members, Plan, Range, Role};
use unirdma_ipc::secrets::TAIL_BYTES;
use unirdma_ipc::vrnic;
pub use vni_agreement::Disagreement;
use vni_announce::{Announcer, Outlet};

use crate::firewall::{self, Firewall};
use crate::peer_source::Source;
use crate::{DEFAULT_GROUP, WireConfig};
use bpf::Table;
pub use open::SOCKET_BUFFER;
use open::{Kind, Options};

/// Bytes that the tunnel adds to a frame over IPv6; 20 less over IPv4. With a secret of the group, [`TAIL_BYTES`] more.
const TUNNEL_BYTES: u32 = 40 + 8 + (VXLAN_BYTES + ETH_BYTES) as u32;

/// Most IP multicast groups of a group of vRNICs. Each needs a socket.
const MAX_MULTICAST: usize = 256;
/// Most packets read from a socket before the next socket gets its turn.
const BURST: usize = 64;
/// Longest announcement that is accepted, bytes.
const MAX_PACKET: usize = 2048;
/// Result of a packet socket's filter that keeps the whole packet.
const ALL_BYTES: u32 = u32::MAX;

/// The state of the network to other hosts.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct WireInfo {
    pub addresses: Vec<IpAddr>,
    pub peers_file: String,
    /// Peers in force.
    pub peers: usize,
    /// Why the present content of the peers file is not in force.
    pub peers_error: Option<String>,
    /// Largest path MTU, bytes.
    pub mtu: u32,
    pub port: PortCounters,
    /// Packets that belonged to no QP, by reason.
    pub drops: WireDrops,
    /// The tunnel: the network of containers' interfaces between hosts.
    #[serde(default)]
    pub tunnel: TunnelInfo,
    /// The packet filter's table that lets only the virtual layer send from and to its ports, if there is one.
    #[serde(default)]
    pub firewall: Option<String>,
    /// Rules between groups.
    #[serde(default)]
    pub rules: RulesInfo,
}

/// State of the tunnel.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct TunnelInfo {
    /// Counters of dropped packets.
    pub drops: TunnelDrops,
    /// Disagreements with peers about the numbers of groups.
    pub disagreements: Vec<Disagreement>,
    /// Peers that have not announced their groups: none of their packets are accepted by the tunnel.
    pub silent: Vec<IpAddr>,
}

/// Most hidden addresses that are shown.
const MAX_HIDDEN: usize = 100;

/// Rules between groups that are in force on a host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RulesInfo {
    /// The rules, as text.
    pub rules: Vec<String>,
    /// Addresses that groups cannot reach in spite of a rule, because the addresses mean something else to them.
    pub hidden: Vec<Hidden>,
}

/// An address of a group that a joined group cannot reach, because the address means something else there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct Hidden {
    pub address: IpAddr,
    /// The group that has it.
    pub group: String,
    /// The group that cannot reach it.
    pub seer: String,
}

impl std::fmt::Display for Hidden {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Hidden { address, group, seer } = self;
        write!(
            f,
            "{address} of group {group} is not reached by group {seer}, where that address means another vRNIC; give one of them another address"
        )
    }
}

/// A group with sockets.
struct Group {
    id: u32,
    qpns: Vec<Range>,
    /// The first of its UDP source ports.
    first_port: Option<u16>,
    /// Its packet sockets, each with the QPNs in its filter.
    packets: Vec<Packets>,
    /// IP multicast groups for which its worker has sockets.
    joined: BTreeSet<IpAddr>,
    /// Its secrets. Groups with secrets need no announcements, because sessions prove their numbers.
    sealed: SealedWith,
}

/// The secrets of a group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct SealedWith {
    /// The group has a secret. It then talks to other groups only if it has a secret with them.
    pub own: bool,
    /// The groups with which it has a secret. It takes effect if a rule joins them.
    pub others: BTreeSet<String>,
}

impl Group {
    fn new(id: u32, qpns: Vec<Range>, first_port: Option<u16>) -> Self {
        Group { id, qpns, first_port, packets: Vec::new(), joined: BTreeSet::new(), sealed: SealedWith::default() }
    }
}

struct Packets {
    address: Ipv4Addr,
    socket: OwnedFd,
    filter: Option<(Table, u32)>,
}

/// The network of a host.
pub(crate) struct Network {
    addresses: Vec<IpAddr>,
    options: Options,
    icrc: bool,
    faults: Option<u64>,
    congestion_control: bool,
    mtu_code: u8,
    net_mtu: u32,
    source: Box<dyn Source>,
    known: PeerTable,
    /// The error in the source's last report, if there was one.
    error: Option<String>,
    /// Hidden addresses that were logged already.
    hidden: Vec<Hidden>,
    orders: Orders,
    /// Polls all descriptors that [`Network::on_event`] reads.
    epoll: OwnedFd,
    announcer: Announcer,
    reuseports: Vec<ReuseportGroup>,
    groups: BTreeMap<String, Group>,
    /// The group that has each of this host's addresses.
    owners: BTreeMap<IpAddr, String>,
    qpn_ranges: QpnRanges,
    firewall: Option<Firewall>,
}

impl Network {
    /// Binds the ports, and reads the peers.
    ///
    /// # Errors
    /// One line: an address, a port or the MTU does not fit this host, a privilege is missing, or the peers file is
    /// invalid.
    pub fn open(c: &WireConfig, dir: &Path, source: Box<dyn Source>) -> io::Result<Network> {
        let claim = |kind| c.addresses.iter().map(move |&a| ReuseportGroup::claim(kind, a));
        let reuseports = claim(Kind::Roce).chain(claim(Kind::Tunnel)).collect::<io::Result<_>>()?;
        Network::with_reuseports(c, dir, source, reuseports)
    }

    /// Takes over the network of a supervisor that was killed. `workers` has what [`Network::to_keep`] returned for
    /// each group.
    ///
    /// # Errors
    /// As [`Network::open`]. `InvalidData` if the assignment of packets to sockets is unknown, because the workers or
    /// the configuration have changed. Then all workers must be ended, and [`Network::open`] makes a new network.
    pub fn adopt(
        c: &WireConfig,
        dir: &Path,
        source: Box<dyn Source>,
        workers: Vec<(Enrolment, Vec<OwnedFd>)>,
    ) -> io::Result<Network> {
        let unfit = |why: &str| io::Error::new(io::ErrorKind::InvalidData, why.to_string());
        let (mut given, mut groups) = (HashMap::new(), BTreeMap::new());
        let mut qpn_ranges = QpnRanges::new();
        for (e, sockets) in workers {
            if e.roles.len() != sockets.len() || e.addresses != c.addresses || !qpn_ranges.take(&e.qpns) {
                return Err(unfit("a worker has other sockets, addresses or QPNs than it should"));
            }
            let mut group = Group::new(e.id, e.qpns, e.first_port);
            for (role, fd) in e.roles.into_iter().zip(sockets) {
                match role {
                    Role::Roce(address) => _ = given.insert((e.group.clone(), Kind::Roce, address), fd.into()),
                    Role::Tunnel(address) => _ = given.insert((e.group.clone(), Kind::Tunnel, address), fd.into()),
                    Role::Flow(..) => {}
                    Role::Packets(address) => group.packets.push(Packets { address, socket: fd, filter: None }),
                }
            }
            if groups.insert(e.group, group).is_some() {
                return Err(unfit("two workers have one group"));
            }
        }
        let packets = if c.full_icrc { ipv4(&c.addresses).count() } else { 0 };
        if groups.values().any(|g| g.packets.len() != packets) {
            return Err(unfit("--full-icrc is another one"));
        }
        let options = options(c);
        let mut reuseports = Vec::new();
        for order in Orders::new(dir).read().map_err(|e| unfit(&format!("the order of sockets is lost: {e}")))? {
            let mut sockets = Vec::new();
            for (group, inode) in order.sockets {
                let udp = given
                    .remove(&(group.clone(), order.kind, order.address))
                    .ok_or_else(|| unfit(&format!("group {group} has no worker any more")))?;
                let member = Member::new(&group, udp)?;
                if member.inode != inode {
                    return Err(unfit(&format!("a socket of group {group} is another one")));
                }
                sockets.push(member);
            }
            reuseports.push(ReuseportGroup::adopt(order.kind, order.address, options, sockets));
        }
        if !given.is_empty() || reuseports.len() != 2 * c.addresses.len() {
            return Err(unfit("there are more workers or fewer addresses than there were"));
        }
        let mut network = Network::with_reuseports(c, dir, source, reuseports)?;
        (network.groups, network.qpn_ranges) = (groups, qpn_ranges);
        network.steer()?;
        network.groups_changed();
        Ok(network)
    }

    fn with_reuseports(
        c: &WireConfig,
        dir: &Path,
        mut source: Box<dyn Source>,
        mut reuseports: Vec<ReuseportGroup>,
    ) -> io::Result<Network> {
        let options = options(c);
        for reuseport in &mut reuseports {
            reuseport.set_options(options).map_err(|e| {
                let text = format!("--firewall marks what this host sends ({e}): run as root, or with CAP_NET_ADMIN");
                io::Error::new(e.kind(), text)
            })?;
        }
        let (mtu_code, net_mtu) = mtus(c)?;
        let mut known = PeerTable::new(&c.addresses);
        if let Some(changes) = source.changes() {
            known.apply(changes.map_err(|e| io::Error::new(io::ErrorKind::InvalidInput, e))?);
        }
        let firewall = c.firewall.then(|| Firewall::start(dir, &c.addresses, &known.layers())).transpose()?;
        if c.full_icrc {
            // Tests whether this process has the privilege.
            ipv4(&c.addresses).try_for_each(|a| open::packets(a, &[bpf::end(0)]).map(drop))?;
        }
        let announcer = Announcer::new()?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for fd in source.descriptor().into_iter().chain([announcer.timer()]) {
            epoll::add(&epoll, fd, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        }
        let network = Network {
            addresses: c.addresses.clone(),
            options,
            icrc: c.icrc,
            faults: c.faults,
            congestion_control: c.congestion_control,
            mtu_code,
            net_mtu,
            source,
            known,
            error: None,
            hidden: Vec::new(),
            orders: Orders::new(dir),
            epoll,
            announcer,
            reuseports,
            groups: BTreeMap::new(),
            owners: BTreeMap::new(),
            qpn_ranges: QpnRanges::new(),
            firewall,
        };
        network.watch_own_sockets()?;
        Ok(network)
    }

    // --- groups and their sockets ---

    /// Makes the sockets of a group. The default group must be the first.
    ///
    /// # Errors
    /// The group has sockets already, no QPNs are left, or an error of sockets or BPF programs. The group then has
    /// nothing.
    pub fn enroll(&mut self, group: &str, id: u32) -> io::Result<()> {
        if self.groups.contains_key(group) {
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, format!("group {group} has sockets already")));
        }
        let qpns =
            self.qpn_ranges.first().ok_or_else(|| io::Error::other("all QPNs of this host are taken by groups"))?;
        self.groups.insert(group.into(), Group::new(id, vec![qpns], self.free_port()));
        let done = self.make_sockets(group);
        if done.is_err() {
            self.dismiss(group);
        }
        done
    }

    fn make_sockets(&mut self, group: &str) -> io::Result<()> {
        self.reuseports.iter_mut().try_for_each(|l| l.enter(group))?;
        if self.options.full_icrc {
            let packets = |address| {
                let socket = open::packets(address, &[bpf::end(0)])?;
                Ok(Packets { address, socket, filter: None })
            };
            let packets: io::Result<Vec<Packets>> = ipv4(&self.addresses).map(packets).collect();
            if let Some(g) = self.groups.get_mut(group) {
                g.packets = packets?;
            }
        }
        self.steer()?;
        self.groups_changed();
        Ok(())
    }

    /// The first of a range of UDP source ports that no group has; `None`: all are taken, and the group sends from the
    /// port of RoCEv2.
    fn free_port(&self) -> Option<u16> {
        let taken: BTreeSet<u16> = self.groups.values().filter_map(|g| g.first_port).collect();
        (FIRST_SOURCE_PORT..=u16::MAX).step_by(SOURCE_PORTS.into()).find(|p| !taken.contains(p))
    }

    /// The network's configuration for a new worker of a group, with duplicates of the group's sockets and new
    /// send-only sockets. The worker before must have ended, because its send-only sockets had the same ports.
    ///
    /// # Errors
    /// There is no such group, or no descriptor is left.
    pub fn sockets_of(&mut self, group: &str) -> io::Result<(Enrolment, Vec<OwnedFd>)> {
        if let Some(g) = self.groups.get_mut(group) {
            g.joined.clear();
        }
        let (mut enrolment, mut sockets) = self.to_keep(group)?;
        let ports = enrolment.first_port.into_iter().flat_map(|p| p..=p + (SOURCE_PORTS - 1));
        for (&address, port) in self.addresses.iter().flat_map(|a| ports.clone().map(move |p| (a, p))) {
            // A flow whose port is taken by another program sends from the port of RoCEv2.
            if let Ok(udp) = open::flow(SocketAddr::new(address, port), self.options) {
                enrolment.roles.push(Role::Flow(address, port));
                sockets.push(udp.into());
            }
        }
        Ok((enrolment, sockets))
    }

    /// The part of [`Network::sockets_of`] that must be kept for [`Network::adopt`].
    ///
    /// # Errors
    /// As [`Network::sockets_of`].
    pub fn to_keep(&self, group: &str) -> io::Result<(Enrolment, Vec<OwnedFd>)> {
        let g = self.groups.get(group).ok_or_else(|| io::Error::other(format!("group {group} has no sockets")))?;
        let (mut roles, mut sockets) = (Vec::new(), Vec::new());
        let mut give = |role, socket: BorrowedFd<'_>| -> io::Result<()> {
            roles.push(role);
            sockets.push(socket.try_clone_to_owned()?);
            Ok(())
        };
        for reuseport in &self.reuseports {
            let role = if reuseport.kind == Kind::Roce {
                Role::Roce(reuseport.address)
            } else {
                Role::Tunnel(reuseport.address)
            };
            if let Some(udp) = reuseport.socket(group) {
                give(role, udp.as_fd())?;
            }
        }
        for p in &g.packets {
            give(Role::Packets(p.address), p.socket.as_fd())?;
        }
        let enrolment = Enrolment {
            group: group.into(),
            id: g.id,
            addresses: self.addresses.clone(),
            roles,
            qpns: g.qpns.clone(),
            first_port: g.first_port,
            icrc: self.icrc,
            congestion_control: self.congestion_control,
            mtu_code: self.mtu_code,
            mtu: self.mtu(),
            net_mtu: self.net_mtu,
            faults: self.faults,
        };
        Ok((enrolment, sockets))
    }

    /// Removes the sockets of a group from their ports, even if other processes have them open, and frees its QPNs. Its
    /// worker must have ended.
    pub fn dismiss(&mut self, group: &str) {
        let Some(g) = self.groups.remove(group) else { return };
        self.known.forget_worker(group);
        self.qpn_ranges.give_back(&g.qpns);
        self.owners.retain(|_, owner| owner != group);
        self.reuseports.iter_mut().for_each(|l| l.leave(group));
        if let Err(e) = self.steer() {
            tracing::error!("packets may not find their groups any more: {e}");
        }
        self.groups_changed();
    }

    /// Gives a group another range of QPNs, if it may have one. Returns all its ranges.
    pub fn more_qpns(&mut self, group: &str) -> Option<Vec<Range>> {
        let g = self.groups.get_mut(group)?;
        let range = self.qpn_ranges.further(&g.qpns)?;
        g.qpns.push(range);
        let all = g.qpns.clone();
        if let Err(e) = self.steer() {
            tracing::error!("group {group} gets no more QPNs: {e}");
            self.qpn_ranges.give_back(&[range]);
            self.groups.get_mut(group).into_iter().for_each(|g| g.qpns.retain(|r| *r != range));
            return None;
        }
        Some(all)
    }

    /// Assigns packets for QPN 1 of one of this host's addresses to a group; `None`: to the default group.
    pub fn set_owner(&mut self, address: IpAddr, group: Option<&str>) {
        let before = match group {
            Some(g) if self.addresses.contains(&address) => self.owners.insert(address, g.into()),
            _ => self.owners.remove(&address),
        };
        if before.as_deref() != self.owners.get(&address).map(String::as_str)
            && let Err(e) = self.steer()
        {
            tracing::error!("requests to {address} may not find their group: {e}");
        }
    }

    /// Sockets of the IP multicast groups in `wanted` for which a group's worker has none yet. The worker has closed
    /// the sockets of groups that it no longer wants.
    pub fn join(&mut self, group: &str, wanted: &[IpAddr]) -> Vec<(IpAddr, OwnedFd)> {
        let Some(g) = self.groups.get_mut(group) else { return Vec::new() };
        let wanted: BTreeSet<IpAddr> =
            wanted.iter().copied().filter(IpAddr::is_multicast).take(MAX_MULTICAST).collect();
        let had = std::mem::take(&mut g.joined);
        let mut made = Vec::new();
        for &to in &wanted {
            if had.contains(&to) {
                g.joined.insert(to);
                continue;
            }
            match open::multicast(to, &self.addresses) {
                Ok(udp) => {
                    g.joined.insert(to);
                    made.push((to, udp.into()));
                }
                Err(e) => tracing::warn!("plain devices cannot be heard in multicast group {to}: {e}"),
            }
        }
        made
    }

    /// Updates the BPF programs that assign packets to sockets.
    fn steer(&mut self) -> io::Result<()> {
        let Network { reuseports, groups, owners, known, .. } = self;
        for reuseport in reuseports.iter_mut() {
            let (kind, address) = (reuseport.kind, reuseport.address);
            reuseport.steer(|at, own| match kind {
                Kind::Roce => {
                    let (table, manager) = qpn_table(groups, owners.get(&address), at);
                    bpf::by_qpn(&table, manager)
                }
                Kind::Tunnel => {
                    let range = |name: &String| Some((known.vni(name)?, 1, *at.get(name.as_str())?));
                    bpf::by_vni(&Table::new(groups.keys().filter_map(range), own))
                }
            })?;
        }
        self.orders.write(&self.reuseports)?;
        self.watch_own_sockets()?;
        self.set_filters()
    }

    /// Lets packet sockets receive the same packets as their groups' UDP sockets.
    fn set_filters(&mut self) -> io::Result<()> {
        if !self.options.full_icrc {
            return Ok(());
        }
        let names: Vec<String> = self.groups.keys().cloned().collect();
        let at: Indices<'_> = names.iter().map(String::as_str).zip(0..).collect();
        for address in ipv4(&self.addresses) {
            let (table, manager) = qpn_table(&self.groups, self.owners.get(&address.into()), &at);
            for (name, group) in &mut self.groups {
                let Some(p) = group.packets.iter_mut().find(|p| p.address == address) else { continue };
                let keep = |index: u32| if at.get(name.as_str()) == Some(&index) { ALL_BYTES } else { 0 };
                let filter = Some((table.map(keep), keep(manager)));
                if let Some((table, manager)) = filter.as_ref().filter(|_| filter != p.filter) {
                    let program = open::roce_to(address, table, *manager);
                    bpf::attach(&p.socket, libc::SO_ATTACH_FILTER, &program)?;
                    p.filter = filter;
                }
            }
        }
        Ok(())
    }

    /// Watches the supervisor's sockets. Each change of the steering may replace them.
    fn watch_own_sockets(&self) -> io::Result<()> {
        for udp in self.reuseports.iter().filter(|l| l.kind == Kind::Tunnel).filter_map(ReuseportGroup::own) {
            match epoll::add(&self.epoll, udp, epoll::EventData::new_u64(0), epoll::EventFlags::IN) {
                Ok(()) | Err(rustix::io::Errno::EXIST) => {}
                Err(e) => return Err(e.into()),
            }
        }
        Ok(())
    }

    // --- peers ---

    /// A descriptor that becomes readable when [`Network::on_event`] must be called.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Reads announcements of peers and changes of the source, and repeats announcements that are due. True if there
    /// may be messages to workers: [`Network::next_update`].
    pub fn on_event(&mut self) -> bool {
        let mut changed = self.learn();
        let mut buffer = [0; MAX_PACKET];
        let out = Out(&self.reuseports);
        self.announcer.on_timer(&out);
        for udp in self.reuseports.iter().filter(|l| l.kind == Kind::Tunnel).filter_map(ReuseportGroup::own) {
            for _ in 0..BURST {
                let Ok((n, from)) = udp.recv_from(&mut buffer) else { break };
                if self.announcer.on_packet(from, &buffer[..n], &out) {
                    changed = true;
                    for group in self.groups.keys() {
                        let agrees = |host, vni| self.announcer.agrees(host, vni, group);
                        self.known.note_agreement(group, Some(from.ip()), agrees);
                    }
                    // The peer may have announced the number of a group that a rule joins with a group of this host.
                    self.known.doubt_host(from.ip());
                }
            }
        }
        changed
    }

    /// Applies changes of the source; true if anything has changed. After an error nothing is changed.
    fn learn(&mut self) -> bool {
        let changes = match self.source.changes() {
            None => return false,
            Some(Ok(changes)) => changes,
            Some(Err(e)) => {
                let e = e.to_string();
                if self.error.as_ref() != Some(&e) {
                    tracing::warn!("{e}; the peers as they were stay in force");
                }
                self.error = Some(e);
                return false;
            }
        };
        self.error = None;
        let effect = self.known.apply(changes);
        if let Some(f) = self.firewall.as_ref().filter(|_| effect.layers) {
            f.set_peers(self.known.layers());
        }
        if effect.numbers
            && let Err(e) = self.steer()
        {
            tracing::error!("frames of other hosts may not find their groups: {e}");
        }
        if effect.numbers || effect.hosts {
            self.groups_changed();
        }
        effect.any
    }

    /// Announces this host's groups to the peers.
    fn groups_changed(&mut self) {
        let Network { groups, known, addresses, .. } = self;
        let (mut members, mut joined) = (Vec::new(), Vec::new());
        for (name, group) in groups.iter().filter(|(_, g)| !g.sealed.own) {
            let view = known.view(name);
            let plainly = view.joined.iter().filter(|(other, _)| !group.sealed.others.contains(*other));
            let of_joined: Vec<Members> = plainly.map(|(other, j)| j.outline(other)).collect();
            // Hosts that have only members of a joined group must know the number of this group, too.
            let mut own = known.outline(name);
            own.hosts.extend(of_joined.iter().flat_map(|j| &j.hosts).filter(|h| !addresses.contains(h)));
            members.push(own);
            joined.extend(of_joined);
        }
        let hidden = self.find_hidden();
        for h in hidden.iter().filter(|h| !self.hidden.contains(h)) {
            tracing::warn!("{h}");
        }
        self.hidden = hidden;
        self.announcer.set_groups(members, joined, &Out(&self.reuseports));
        for group in self.groups.keys() {
            self.known.note_agreement(group, None, |host, vni| self.announcer.agrees(host, vni, group));
        }
    }

    /// Sets which secrets a group has. A sealed packet proves the group's number and name, so groups with a secret are
    /// not announced.
    pub fn set_sealed(&mut self, group: &str, sealed: SealedWith) {
        let changed = self.groups.get_mut(group).filter(|g| g.sealed != sealed);
        if changed.map(|g| g.sealed = sealed).is_some() {
            self.groups_changed();
        }
    }

    /// Removes the firewall's rules, which would outlive this process.
    pub fn end(&mut self) {
        self.firewall = None;
    }

    /// The locations of a group's peers, for a new worker.
    pub fn plan(&mut self, group: &str) -> Plan {
        self.known.plan(group, &|host, vni, name: &str| self.announcer.agrees(host, vni, name))
    }

    /// The rules that concern a group, as text.
    pub fn rule_texts(&self, group: &str) -> Vec<String> {
        self.known.rules.of(group).map(ToString::to_string).collect()
    }

    /// The rules in force, and the addresses that are hidden in spite of them.
    pub fn rules(&self) -> RulesInfo {
        let rules = self.known.rules.all().into_iter().map(ToString::to_string).collect();
        RulesInfo { rules, hidden: self.hidden.clone() }
    }

    /// Addresses that are hidden from groups in spite of a rule.
    fn find_hidden(&mut self) -> Vec<Hidden> {
        let mut found = Vec::new();
        for seer in self.groups.keys() {
            let view = self.known.view(seer);
            let hidden = view.joined.iter().flat_map(|(group, j)| j.hidden.iter().map(move |&a| (group.clone(), a)));
            let hidden = hidden.map(|(group, address)| Hidden { address, group, seer: seer.clone() });
            found.extend(hidden.take(MAX_HIDDEN - found.len()));
        }
        found
    }

    /// The next message to a group's worker about other hosts.
    pub fn next_update(&mut self, group: &str) -> Option<PeerUpdate> {
        self.known.next_update(group, &|host, vni, name: &str| self.announcer.agrees(host, vni, name))
    }

    /// True if there may be such a message.
    pub fn has_update(&self, group: &str) -> bool {
        self.known.has_update(group)
    }

    /// The number of a group between hosts, if the source knows the group.
    pub fn vni(&self, group: &str) -> Option<u32> {
        self.known.vni(group)
    }

    // --- what there is to know ---

    /// This host's addresses.
    pub fn addresses(&self) -> &[IpAddr] {
        &self.addresses
    }

    /// MTU of the containers' interfaces. A frame of this size fits into one packet of the tunnel, even if it is
    /// sealed.
    pub fn net_mtu(&self, sealed: bool) -> u32 {
        self.net_mtu.saturating_sub(if sealed { TAIL_BYTES as u32 } else { 0 })
    }

    /// Largest path MTU, bytes.
    pub fn mtu(&self) -> u32 {
        mtu_bytes(self.mtu_code).unwrap_or(256)
    }

    /// The state of the network. The arguments are sums over all workers.
    pub fn info(&self, port: PortCounters, drops: WireDrops, mut tunnel: TunnelDrops) -> WireInfo {
        tunnel += self.announcer.drops();
        WireInfo {
            addresses: self.addresses.clone(),
            peers_file: self.source.name(),
            peers: self.known.addresses(),
            peers_error: self.error.clone(),
            mtu: self.mtu(),
            port,
            drops,
            tunnel: TunnelInfo {
                drops: tunnel,
                disagreements: self.announcer.disagreements().to_vec(),
                silent: self.announcer.silent(),
            },
            firewall: self.firewall.as_ref().map(Firewall::table),
            rules: self.rules(),
        }
    }
}

fn options(c: &WireConfig) -> Options {
    Options { mark: c.firewall.then_some(firewall::MARK), full_icrc: c.full_icrc }
}

/// The index of the group of each QPN, and of QPN 1 of an address. Other QPNs belong to the default group.
fn qpn_table(groups: &BTreeMap<String, Group>, owner: Option<&String>, at: &Indices<'_>) -> (Table, u32) {
    let default = at.get(DEFAULT_GROUP).copied().unwrap_or(0);
    let index = |name: &String| at.get(name.as_str()).copied();
    let ranges =
        groups.iter().flat_map(|(name, g)| g.qpns.iter().filter_map(move |&(s, n)| Some((s, n, index(name)?))));
    let manager = owner.and_then(index).unwrap_or(default);
    (Table::new(ranges, default), manager)
}

fn ipv4(addresses: &[IpAddr]) -> impl Iterator<Item = Ipv4Addr> {
    addresses.iter().filter_map(|a| if let IpAddr::V4(a) = a { Some(*a) } else { None })
}

/// Sends with the supervisor's VXLAN sockets.
struct Out<'a>(&'a [ReuseportGroup]);

impl Out<'_> {
    fn reuseport(&self, to: IpAddr) -> Option<&ReuseportGroup> {
        self.0.iter().find(|l| l.kind == Kind::Tunnel && l.address.is_ipv4() == to.is_ipv4())
    }
}

impl Outlet for Out<'_> {
    fn send(&self, packet: &[u8], to: IpAddr) {
        if let Some(udp) = self.reuseport(to).and_then(ReuseportGroup::own) {
            // If the queue is full, the packet is dropped, as on a wire.
            let _ = udp.send_to(packet, SocketAddr::new(to, VXLAN_PORT));
        }
    }

    fn own_address(&self, to: IpAddr) -> IpAddr {
        self.reuseport(to).map_or(to, |l| l.address)
    }
}

/// Code of the largest path MTU, and MTU of the containers' interfaces.
fn mtus(c: &WireConfig) -> io::Result<(u8, u32)> {
    let (mut fits, mut net_mtu) = (u32::MAX, vrnic::NET_MTU);
    for &a in &c.addresses {
        let mtu = interface_mtu(a)?;
        if let Some(wanted) = c.mtu.filter(|&m| m + overhead(a) > mtu) {
            let text = format!(
                "--mtu {wanted} and its headers take {} bytes, but the interface of {a} has an MTU of {mtu}; raise that or choose a smaller one",
                wanted + overhead(a)
            );
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        net_mtu = net_mtu.min(mtu.saturating_sub(TUNNEL_BYTES));
        fits = fits.min(mtu.saturating_sub(overhead(a)));
    }
    let limit = c.mtu.unwrap_or(fits);
    let mtu_code = (1..=5).rev().find(|&code| mtu_bytes(code).is_some_and(|b| b <= limit)).ok_or_else(|| {
        io::Error::new(
            io::ErrorKind::InvalidInput,
            "the interface's MTU is too small for RoCEv2 (256 bytes and headers)",
        )
    })?;
    Ok((mtu_code, net_mtu))
}

/// Most bytes that headers and ICRC add to a payload: the overhead of a sealed datagram inside VXLAN, because a group
/// may get a secret at any time.
fn overhead(a: IpAddr) -> u32 {
    let ip = if a.is_ipv4() { 20 } else { 40 };
    ip + 8 + (MAX_OUTER_BYTES + MAX_HEADER_BYTES + ICRC_BYTES + TAIL_BYTES) as u32
}
