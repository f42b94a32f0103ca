//! Names, addresses and limits of vRNICs: requests, derived values and checks.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use serde::{Deserialize, Serialize};
use unirdma_formats::{Gid, Mac};
use unirdma_link::{Ledger, Resource};
use unirdma_rnic::{Counters, Limits, MrNote, QpInfo, Share};

use crate::counters::FrameDrops;

/// A name, an address or a share that a vRNIC or group cannot have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum InvalidValue {
    #[error("`{name}` is no {what} name: use 1 to 32 letters, digits, `_`, `.` or `-`, a letter or digit first")]
    Name { what: &'static str, name: String },
    #[error("`{0}` is no IP address; write 10.0.0.1, 10.0.0.1/16 or fd00::1/64")]
    Address(String),
    #[error("`{address}`: the prefix length must be 0 to {max}")]
    Prefix { address: String, max: u8 },
    /// An address such as a multicast address.
    #[error("`{0}` cannot be the address of a vRNIC")]
    Unusable(String),
    #[error("the weight {0} is not 1 to {MAX_WEIGHT}")]
    Weight(u32),
    #[error("the burst is at most {} s", MAX_BURST_US / 1_000_000)]
    Burst,
}

/// An address with its prefix length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IpNet {
    /// The address.
    pub addr: IpAddr,
    /// Bits of the network part.
    pub prefix: u8,
}

impl std::fmt::Display for IpNet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.addr, self.prefix)
    }
}

impl std::str::FromStr for IpNet {
    type Err = InvalidValue;

    fn from_str(s: &str) -> Result<Self, InvalidValue> {
        let (addr, prefix) = s.split_once('/').map_or((s, None), |(a, p)| (a, Some(p)));
        let addr: IpAddr = addr.parse().map_err(|_| InvalidValue::Address(s.into()))?;
        let (max, default) = if addr.is_ipv4() { (32, 16) } else { (128, 64) };
        let prefix = match prefix {
            None => default,
            Some(p) => {
                let prefix = p.parse().ok().filter(|p| *p <= max);
                prefix.ok_or_else(|| InvalidValue::Prefix { address: s.into(), max })?
            }
        };
        let usable = match addr {
            IpAddr::V4(a) => !(a.is_unspecified() || a.is_multicast() || a.is_broadcast() || a.is_loopback()),
            IpAddr::V6(a) => {
                !(a.is_unspecified() || a.is_multicast() || a.is_loopback()) && a.to_ipv4_mapped().is_none()
            }
        };
        if usable { Ok(IpNet { addr, prefix }) } else { Err(InvalidValue::Unusable(s.into())) }
    }
}

/// The way of a vRNIC's programs to their peers, as an administrator asks for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Way {
    /// By the software RNIC.
    #[default]
    Soft,
    /// By a VF of a real RNIC.
    Vf,
    /// By a VF if this host has a pool that serves the vRNIC, else by the software RNIC.
    Auto,
}

impl Way {
    /// The word for it.
    pub fn name(self) -> &'static str {
        match self {
            Way::Soft => "soft",
            Way::Vf => "vf",
            Way::Auto => "auto",
        }
    }

    /// True if programs may get a VF, so that they ask for a lease.
    pub fn asks(self) -> bool {
        self != Way::Soft
    }
}

/// The way of a vRNIC's programs: the one asked for, and the one in force.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct WayInfo {
    /// As an administrator asks for it.
    pub asked: Way,
    /// `soft` or `vf`: the way of the next program, as far as it is known before the program asks.
    pub in_force: Way,
    /// Why it is not a VF although one was asked for, or what a VF does not hold.
    pub why: Option<String>,
    /// The VF that its programs have, such as `ens1f0/3`.
    pub vf: Option<String>,
    /// The GID of this VF.
    pub gid: Option<String>,
    /// The programs that have this VF.
    pub contexts: u32,
}

/// A request for a new vRNIC.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
#[allow(missing_docs)]
pub struct AddVrnic {
    pub name: String,
    /// At most one IPv4 address, and as many IPv6 addresses as the GID table can hold. If empty, the next free
    /// 10.77.x.y is taken.
    pub ips: Vec<IpNet>,
    pub group: Option<String>,
    pub max_qp: Option<u32>,
    pub max_cq: Option<u32>,
    pub max_mr: Option<u32>,
    pub max_mr_bytes: Option<u64>,
    pub max_sessions: Option<u32>,
    /// Its interface may send with any IP address, as a router does.
    pub allow_spoof: bool,
    pub way: Way,
    /// The container or virtual machine that it belongs to; `None`: it is one by itself.
    pub instance: Option<String>,
    #[serde(flatten)]
    pub share: SetShare,
    #[serde(flatten)]
    pub held: SetHeld,
}

impl AddVrnic {
    /// The limits of its objects.
    pub fn limits(&self) -> Limits {
        let d = Limits::default();
        Limits {
            max_qp: self.max_qp.unwrap_or(d.max_qp),
            max_cq: self.max_cq.unwrap_or(d.max_cq),
            max_mr: self.max_mr.unwrap_or(d.max_mr),
            max_mr_bytes: self.max_mr_bytes.unwrap_or(d.max_mr_bytes),
            max_sessions: self.max_sessions.unwrap_or(d.max_sessions),
            ..d
        }
    }
}

/// Changes to a vRNIC's resource limits; `None` keeps the present one. Default: half of what other vRNICs leave free.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[allow(missing_docs)]
pub struct SetHeld {
    pub max_descriptors: Option<u64>,
    pub max_mappings: Option<u64>,
    /// Bytes.
    pub max_address_space: Option<u64>,
    pub max_pieces: Option<u64>,
    /// Bytes. It may be set to more than half of what other vRNICs leave free.
    pub max_filled: Option<u64>,
}

impl SetHeld {
    /// Applies `change` to these limits.
    pub fn merge(&mut self, change: &SetHeld) {
        self.max_descriptors = change.max_descriptors.or(self.max_descriptors);
        self.max_mappings = change.max_mappings.or(self.max_mappings);
        self.max_address_space = change.max_address_space.or(self.max_address_space);
        self.max_pieces = change.max_pieces.or(self.max_pieces);
        self.max_filled = change.max_filled.or(self.max_filled);
    }

    /// The limits in the order of [`Resource::ALL`].
    pub fn limits(&self) -> [Option<u64>; unirdma_link::KINDS] {
        Resource::ALL.map(|r| match r {
            Resource::Descriptors => self.max_descriptors,
            Resource::Mappings => self.max_mappings,
            Resource::AddressSpace => self.max_address_space,
            Resource::Pieces => self.max_pieces,
            Resource::Filled => self.max_filled,
            // The worker's own memory has no settable limit: a program that needs much of it is faulty.
            Resource::Kept => None,
        })
    }
}

/// The amount of a resource that a vRNIC uses in the virtual layer, and its present limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct Held {
    pub used: u64,
    pub limit: u64,
}

/// The resources that a vRNIC uses in the virtual layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct LedgerInfo {
    pub descriptors: Held,
    pub mappings: Held,
    /// Bytes.
    pub address_space: Held,
    /// Pieces of MRs that are kept as lists.
    pub pieces: Held,
    /// Bytes of pages that transfers have made in sparse memory files.
    #[serde(default)]
    pub filled: Held,
    /// Bytes of the worker's own memory, for pending events, pending datagrams and the like.
    #[serde(default)]
    pub kept: Held,
}

impl LedgerInfo {
    /// The present state of a vRNIC's account.
    pub fn of(ledger: &Ledger) -> Self {
        let [descriptors, mappings, address_space, pieces, filled, kept] = Resource::ALL.map(|r| {
            let (used, limit) = ledger.usage(r);
            Held { used, limit }
        });
        LedgerInfo { descriptors, mappings, address_space, pieces, filled, kept }
    }
}

/// Changes to a vRNIC's share of the virtual layer (see [`Share`]); `None` keeps the present value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[allow(missing_docs)]
pub struct SetShare {
    pub weight: Option<u32>,
    pub rate_bps: Option<u64>,
    pub ops: Option<u64>,
    pub burst_us: Option<u64>,
}

/// Largest weight of a vRNIC.
pub const MAX_WEIGHT: u32 = 10_000;
/// Longest burst of a vRNIC, microseconds.
pub const MAX_BURST_US: u64 = 10_000_000;

impl SetShare {
    /// `share` with these changes.
    ///
    /// # Errors
    /// A value is out of its range.
    pub fn apply(&self, share: Share) -> Result<Share, InvalidValue> {
        let share = Share {
            weight: self.weight.unwrap_or(share.weight),
            rate_bps: self.rate_bps.unwrap_or(share.rate_bps),
            ops: self.ops.unwrap_or(share.ops),
            burst_us: self.burst_us.unwrap_or(share.burst_us),
        };
        if !(1..=MAX_WEIGHT).contains(&share.weight) {
            return Err(InvalidValue::Weight(share.weight));
        }
        if share.burst_us > MAX_BURST_US {
            return Err(InvalidValue::Burst);
        }
        Ok(share)
    }
}

/// A vRNIC as it is shown to people.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct VrnicInfo {
    pub name: String,
    pub group: String,
    pub ips: Vec<IpNet>,
    pub gids: Vec<String>,
    /// Its link is up.
    pub up: bool,
    pub mac: String,
    pub guid: String,
    pub mtu: u32,
    pub dir: String,
    /// A container holds its network interface.
    pub attached: bool,
    /// Its interface may send with any IP address.
    #[serde(default)]
    pub allow_spoof: bool,
    /// Frames of its interface that were refused.
    #[serde(default)]
    pub frames_refused: FrameDrops,
    /// PID of the first process of its container. If several were started, of the last one.
    #[serde(default)]
    pub container: Option<i32>,
    /// It was made for its container, and ends with it.
    #[serde(default)]
    pub temporary: bool,
    pub sessions: usize,
    pub qps: usize,
    pub cqs: usize,
    pub mrs_mapped: usize,
    pub mrs_copied: usize,
    pub bytes_mapped: u64,
    pub bytes_copied: u64,
    pub limits: Limits,
    #[serde(default)]
    pub held: LedgerInfo,
    #[serde(default)]
    pub share: Share,
    /// How long the RNIC has worked for it, nanoseconds.
    #[serde(default)]
    pub busy_ns: u64,
    /// Number of kicks by its programs or its guest while the RNIC was asleep.
    #[serde(default)]
    pub kicks: u64,
    pub counters: Counters,
    /// The rules that concern its group.
    #[serde(default)]
    pub rules: Vec<String>,
    /// Addresses at which its programs listen for RDMA connections, such as `TCP 0.0.0.0:7174`. Not in lists.
    #[serde(default)]
    pub listeners: Vec<String>,
    /// How the memory of its MRs is accessed, and why. Not in lists.
    #[serde(default)]
    pub memory: Vec<MrNote>,
    /// Its QPs. Not in lists.
    #[serde(default)]
    pub queue_pairs: Vec<QpInfo>,
    /// The way of its programs.
    #[serde(default)]
    pub way: WayInfo,
}

impl VrnicInfo {
    /// Adds the counters of another vRNIC.
    pub fn add_done(&mut self, o: &VrnicInfo) {
        self.counters += o.counters;
        self.frames_refused += o.frames_refused;
        self.busy_ns += o.busy_ns;
        self.kicks += o.kicks;
    }

    /// Adds the counters and the resources of another vRNIC.
    pub fn add(&mut self, o: &VrnicInfo) {
        self.add_done(o);
        self.sessions += o.sessions;
        self.qps += o.qps;
        self.cqs += o.cqs;
        self.mrs_mapped += o.mrs_mapped;
        self.mrs_copied += o.mrs_copied;
        self.bytes_mapped = self.bytes_mapped.saturating_add(o.bytes_mapped);
        self.bytes_copied = self.bytes_copied.saturating_add(o.bytes_copied);
        let LedgerInfo { descriptors, mappings, address_space, pieces, filled, kept } = &mut self.held;
        let sums = [
            (descriptors, o.held.descriptors),
            (mappings, o.held.mappings),
            (address_space, o.held.address_space),
            (pieces, o.held.pieces),
            (filled, o.held.filled),
            (kept, o.held.kept),
        ];
        sums.into_iter().for_each(|(all, one)| all.used += one.used);
    }
}

/// MTU of the containers' interfaces, bytes.
pub const NET_MTU: u32 = 9000;
/// Path MTU code of the RDMA port: 4096.
pub const PORT_MTU: u8 = 5;

/// Longest name of a vRNIC or group.
pub(crate) const MAX_NAME_BYTES: usize = 32;

/// Checks a name of a vRNIC or group, which becomes a directory and a command's argument.
pub fn check_name(what: &'static str, name: &str) -> Result<(), InvalidValue> {
    let ok = (1..=MAX_NAME_BYTES).contains(&name.len())
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"_.-".contains(&b))
        && name.as_bytes()[0].is_ascii_alphanumeric();
    if ok { Ok(()) } else { Err(InvalidValue::Name { what, name: name.into() }) }
}

/// The identity of a vRNIC besides its addresses. It keeps both values while it exists, regardless of changed
/// addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hardware {
    #[serde(with = "mac_bytes")]
    /// The address of its interface.
    pub mac: Mac,
    /// Its node GUID.
    pub guid: u64,
}

impl Hardware {
    /// The identity of a vRNIC to which no control centre has given one: see [`mac_of`].
    pub fn derived(group: &str, ips: &[IpNet]) -> Hardware {
        let first = ips.iter().find(|i| i.addr.is_ipv4()).or(ips.first());
        let mac = mac_of(group, first.map_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED), |i| i.addr));
        Hardware { mac, guid: mac.guid().0 }
    }
}

/// A MAC as a list of bytes.
mod mac_bytes {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};
    use unirdma_formats::Mac;

    pub fn serialize<S: Serializer>(mac: &Mac, s: S) -> Result<S::Ok, S::Error> {
        mac.0.serialize(s)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Mac, D::Error> {
        <[u8; 6]>::deserialize(d).map(Mac)
    }
}

/// The Ethernet address of a vRNIC, from its group and its first address (the IPv4 address, if it has one): 46 bits of
/// a hash of both. It is the same on all hosts, so a host with a peers file knows the Ethernet addresses of the vRNICs
/// in it.
pub fn mac_of(group: &str, address: IpAddr) -> Mac {
    let text = format!("uniRDMA vRNIC {group} {address}");
    let hash = ring::digest::digest(&ring::digest::SHA256, text.as_bytes());
    let mut mac: [u8; 6] = std::array::from_fn(|i| hash.as_ref()[i]);
    // Unicast, and locally administered.
    mac[0] = mac[0] & !1 | 2;
    Mac(mac)
}

/// The GID table: IPv4 first, then IPv6, then the link-local address of the MAC (VERBS-ABI, section 7).
pub fn gid_table(ips: &[IpNet], mac: Mac) -> Vec<Gid> {
    let (v4, v6): (Vec<&IpNet>, Vec<&IpNet>) = ips.iter().partition(|i| i.addr.is_ipv4());
    let mut gids: Vec<Gid> = v4.iter().chain(&v6).map(|i| Gid::from_ip(i.addr)).collect();
    let ll = Gid::link_local(mac);
    if !gids.contains(&ll) {
        gids.push(ll);
    }
    gids
}

/// Most entries of a GID table, including the holes that removed addresses leave.
pub const MAX_GIDS: usize = 256;

/// The `n`-th automatic address.
pub fn auto_ip(n: u32) -> IpNet {
    let host = 1 + n % 0xfffe;
    IpNet { addr: IpAddr::V4(Ipv4Addr::new(10, 77, (host >> 8) as u8, host as u8)), prefix: 16 }
}

/// True if two addresses would be the same GID.
pub fn same_address(a: &IpNet, b: &IpNet) -> bool {
    a.addr == b.addr
}

/// True for the IPv6 link-local range, whose address follows from the MAC.
pub fn is_link_local(a: Ipv6Addr) -> bool {
    a.segments()[0] & 0xffc0 == 0xfe80
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_people_write_them() {
        let ip = |s: &str| s.parse::<IpNet>();
        assert_eq!(ip("10.0.0.1").unwrap().to_string(), "10.0.0.1/16");
        assert_eq!(ip("10.0.0.1/24").unwrap().prefix, 24);
        assert_eq!(ip("fd00::1").unwrap().prefix, 64);
        for bad in ["", "10.0.0", "10.0.0.1/33", "0.0.0.0", "224.0.0.1", "::ffff:1.2.3.4", "127.0.0.1", "::1/129"] {
            assert!(ip(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn names_that_could_leave_the_directory_are_refused() {
        for bad in ["", ".", "..", "a/b", "-x", "a b", &"x".repeat(33)] {
            assert!(check_name("vRNIC", bad).is_err(), "{bad}");
        }
        assert!(check_name("vRNIC", "web-1.a_b").is_ok());
    }

    #[test]
    fn the_gid_table_has_ipv4_first_and_no_duplicates() {
        let ips = ["fd00::1", "10.1.2.3"].map(|s| s.parse().unwrap());
        let t: Vec<String> = gid_table(&ips, Mac([2, 3, 10, 1, 2, 3])).iter().map(|g| g.to_string()).collect();
        assert_eq!(t, ["::ffff:10.1.2.3", "fd00::1", "fe80::3:aff:fe01:203"]);
    }

    #[test]
    fn ethernet_addresses_follow_from_the_group_and_the_whole_address() {
        let ips = |list: &[&str]| list.iter().map(|s| s.parse().unwrap()).collect::<Vec<IpNet>>();
        let of = |group: &str, list: &[&str]| Hardware::derived(group, &ips(list)).mac;
        // Hosts rely on the same values, so they must never change.
        assert_eq!(of("default", &["10.0.0.1"]).to_string(), "4a:9d:75:33:48:0a");
        assert_eq!(of("default", &["fd00::1", "10.0.0.1"]), of("default", &["10.0.0.1"]));
        assert_eq!(of("default", &["10.0.0.1"]), mac_of("default", "10.0.0.1".parse().unwrap()));
        let mut all = std::collections::HashSet::new();
        for i in 0..=0xffff_u32 {
            let [_, _, c, d] = i.to_be_bytes();
            for group in ["default", "blue"] {
                let mac = mac_of(group, IpAddr::from([10, 0, c, d]));
                assert_eq!(mac.0[0] & 3, 2);
                assert!(all.insert(mac), "{group} {i}");
            }
        }
    }
}
