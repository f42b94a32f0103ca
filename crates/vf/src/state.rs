//! One VF: its state, and the steps from what is seen to what its lease wants. It is ready when there is no such step.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;

use unirdma_formats::Mac;

use crate::address::Address;
use crate::config::{Config, PfConfig};
use crate::lease::{Lease, LeaseId, Phase, Purpose};
use crate::seen::{NetdevSeen, Seen, Settings, VfId, VfSeen};

/// The permissions of a pooled verbs device's node. Programs get a descriptor from the supervisor.
pub const NODE_MODE: u32 = 0o600;

/// `arp_ignore` of a VF's network device: it answers for its own addresses only, so that a host that asks for the MAC
/// of one VF does not get another VF's, which is in the same network.
pub const ARP_IGNORE: u8 = 1;

const VFIO: &str = "vfio-pci";

/// The state of a VF of the pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// The kernel does not have it.
    Absent,
    /// It is not set up yet.
    Raw,
    /// It is set up, and its port is not active. A driver may need seconds to find out that there is a link.
    NoLink,
    /// It can be leased.
    Ready,
    /// An instance has it.
    Leased(LeaseId),
    /// Nobody gets it at present.
    Dirty(Why),
    /// It belongs to somebody else and is never touched.
    Foreign(Holder),
}

/// Why a VF is dirty.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Why {
    /// Programs use it and have no lease, or not any more.
    Used { objects: u32, users: BTreeSet<u32>, descriptors: u32 },
    /// The kernel refused to set it up.
    Refused(String),
    /// It is being set up as it was before its lease.
    Returning,
}

/// The holder of a foreign VF.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Holder {
    /// A VMM, by VFIO.
    Vfio,
    /// A driver without a network device here: that is in another network namespace, for instance in a container's.
    Namespace,
    /// The host itself, by an address that is not of the pool.
    Address(Address),
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            State::Absent => f.write_str("absent"),
            State::Raw => f.write_str("not set up yet"),
            State::NoLink => f.write_str("its port is not active, as long as there is no link"),
            State::Ready => f.write_str("ready"),
            State::Leased(id) => write!(f, "lease {id}"),
            State::Dirty(Why::Used { objects, users, descriptors }) => {
                let users: Vec<String> = users.iter().map(u32::to_string).collect();
                write!(f, "{objects} objects, {descriptors} descriptors and processes ")?;
                write!(f, "[{}] without a lease; end them", users.join(" "))
            }
            State::Dirty(Why::Refused(what)) => write!(f, "the kernel refuses: {what}"),
            State::Dirty(Why::Returning) => f.write_str("being returned"),
            State::Foreign(Holder::Vfio) => f.write_str("somebody else's: bound to vfio-pci"),
            State::Foreign(Holder::Namespace) => f.write_str("somebody else's: no network device in this namespace"),
            State::Foreign(Holder::Address(a)) => write!(f, "somebody else's: has the address {a}; remove it"),
        }
    }
}

/// A change of the kernel's state. Each can be repeated without harm.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Step {
    /// Writes `sriov_numvfs`, which is 0.
    Create { pf: String, vfs: u16 },
    /// Changes a setting of a VF at its PF.
    Set { vf: VfId, what: Setting },
    /// Takes the VF from its driver, if it has one, and binds it to another or the same.
    Rebind { vf: VfId, pci: String, driver: Driver },
    /// Takes a VF's network device up, with `accept_local=1`, `rp_filter=0` and [`ARP_IGNORE`], and adds what it lacks.
    Netdev { vf: VfId, netdev: String, addresses: Vec<Address>, neighbours: BTreeMap<IpAddr, Mac> },
    /// Makes a verbs device of the kernel's software RNIC on a network device.
    AddRxe { vf: VfId, netdev: String },
    /// Changes the permissions of the device node of a verbs device.
    NodeMode { vf: VfId, verbs: String, mode: u32 },
    /// The device of a lease is gone: tells its programs to close it, and calls [`crate::Leases::evict`].
    Evict { lease: LeaseId },
}

/// A setting of a VF, see [`Settings`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Setting {
    Mac(Mac),
    Vlan(u16),
    RateMbps(u32),
    SpoofCheck(bool),
    Trust(bool),
}

/// The driver of a VF.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Driver {
    /// The one that the kernel chooses.
    Kernel,
    /// `vfio-pci`.
    Vfio,
}

/// The state of a VF of the pool.
pub(crate) fn state(config: &Config, pf: &PfConfig, id: &VfId, seen: &Seen, lease: Option<&Lease>) -> State {
    if let Some(lease) = lease.filter(|l| l.is_live()) {
        return State::Leased(lease.id);
    }
    let Some(vf) = seen.vf(id) else {
        return match seen.leaving.get(id) {
            Some(users) => State::Dirty(Why::Used { objects: 0, users: users.clone(), descriptors: 0 }),
            None => State::Absent,
        };
    };
    match holder(pf, id.index, vf, lease) {
        Some(holder) => State::Foreign(holder),
        None if vf.is_used() => {
            let (objects, users, descriptors) = (vf.objects, vf.users.clone(), vf.descriptors);
            State::Dirty(Why::Used { objects, users, descriptors })
        }
        None if vf.refused.is_some() => State::Dirty(Why::Refused(vf.refused.clone().unwrap_or_default())),
        None if lease.is_some() => State::Dirty(Why::Returning),
        None => match &vf.verbs {
            Some(verbs) if steps(config, pf, id, vf, None).is_empty() => {
                if verbs.active {
                    State::Ready
                } else {
                    State::NoLink
                }
            }
            _ => State::Raw,
        },
    }
}

/// True if the VF of a lease that returns can be leased again.
pub(crate) fn is_returned(config: &Config, seen: &Seen, lease: &Lease) -> bool {
    let Phase::Returning { since, .. } = lease.phase else { return false };
    // An older look may show the VF before its first use.
    seen.at > since
        && config.pf_of(&lease.vf).is_none_or(|pf| {
            let state = state(config, pf, &lease.vf, seen, None);
            matches!(state, State::Ready | State::NoLink | State::Absent)
        })
}

/// The holder of a VF that is foreign. A VF with a lease is not.
fn holder(pf: &PfConfig, index: u16, vf: &VfSeen, lease: Option<&Lease>) -> Option<Holder> {
    if lease.is_some() {
        return None;
    }
    match (&vf.driver, &vf.netdev) {
        (Some(driver), _) if driver == VFIO => Some(Holder::Vfio),
        (Some(_), None) => Some(Holder::Namespace),
        (_, Some(netdev)) => {
            let own = pf.addresses_of(index);
            netdev.addresses.iter().find(|a| !own.contains(a)).copied().map(Holder::Address)
        }
        (None, None) => None,
    }
}

/// The steps that a VF needs next. After some of them, such as [`Step::Rebind`], more follow.
pub(crate) fn steps(config: &Config, pf: &PfConfig, id: &VfId, vf: &VfSeen, lease: Option<&Lease>) -> Vec<Step> {
    let live = lease.filter(|l| l.is_live());
    let is_lent = live.is_some_and(|l| l.purpose == Purpose::Vfio);
    if let Some(lease) = live.filter(|_| !is_lent && (vf.netdev.is_none() || vf.verbs.is_none())) {
        return vec![Step::Evict { lease: lease.id }];
    }
    let is_held = holder(pf, id.index, vf, lease).is_some();
    // A program that keeps the device after its lease stays in the VLAN of its group.
    if vf.refused.is_some() || is_held || (live.is_none() && vf.is_used()) {
        return Vec::new();
    }
    let wanted = Settings {
        mac: pf.mac_of(id.index),
        vlan: live.and_then(|l| l.vlan).unwrap_or(0),
        rate_mbps: live.map_or(0, |l| l.rate_mbps),
        spoof_check: true,
        trust: false,
    };
    let mut steps: Vec<Step> =
        settings(&vf.settings, &wanted).into_iter().map(|what| Step::Set { vf: id.clone(), what }).collect();
    let is_vfio = vf.driver.as_deref() == Some(VFIO);
    if is_lent {
        if !is_vfio && !vf.is_used() {
            steps.push(Step::Rebind { vf: id.clone(), pci: vf.pci.clone(), driver: Driver::Vfio });
        }
        return steps;
    }
    let is_bound = |n: &&NetdevSeen| live.is_some() || (n.mac == wanted.mac && !is_vfio);
    let Some(netdev) = vf.netdev.as_ref().filter(is_bound) else {
        steps.push(Step::Rebind { vf: id.clone(), pci: vf.pci.clone(), driver: Driver::Kernel });
        return steps;
    };
    let (addresses, neighbours) = (pf.addresses_of(id.index), config.neighbours(pf, id.index));
    let is_set_up = netdev.up
        && netdev.accept_local
        && netdev.rp_filter == 0
        && netdev.arp_ignore == ARP_IGNORE
        && addresses.iter().all(|a| netdev.addresses.contains(a))
        && neighbours.iter().all(|(addr, mac)| netdev.neighbours.get(addr) == Some(mac));
    if !is_set_up {
        steps.push(Step::Netdev { vf: id.clone(), netdev: netdev.name.clone(), addresses, neighbours });
    }
    match &vf.verbs {
        Some(v) if v.mode != NODE_MODE => {
            steps.push(Step::NodeMode { vf: id.clone(), verbs: v.name.clone(), mode: NODE_MODE });
        }
        None if pf.rxe => steps.push(Step::AddRxe { vf: id.clone(), netdev: netdev.name.clone() }),
        _ => {}
    }
    steps
}

/// The settings that must change.
fn settings(seen: &Settings, wanted: &Settings) -> Vec<Setting> {
    [
        (seen.mac != wanted.mac, Setting::Mac(wanted.mac)),
        (seen.vlan != wanted.vlan, Setting::Vlan(wanted.vlan)),
        (seen.rate_mbps != wanted.rate_mbps, Setting::RateMbps(wanted.rate_mbps)),
        (seen.spoof_check != wanted.spoof_check, Setting::SpoofCheck(wanted.spoof_check)),
        (seen.trust != wanted.trust, Setting::Trust(wanted.trust)),
    ]
    .into_iter()
    .filter_map(|(is_other, setting)| is_other.then_some(setting))
    .collect()
}
