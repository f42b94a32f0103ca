//! PFs and VFs as sysfs and netlink show them. The supervisor fills this in.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use unirdma_formats::Mac;

use crate::address::Address;

/// The name of a VF: the network device of its PF, and its number.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct VfId {
    /// The PF's network device.
    pub pf: String,
    /// The VF's number, from 0.
    pub index: u16,
}

impl fmt::Display for VfId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.pf, self.index)
    }
}

/// A look at the kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// When the look began.
    pub at: Duration,
    /// PFs by the name of their network device.
    pub pfs: BTreeMap<String, PfSeen>,
    /// VFs that the kernel is removing, with the processes that still have their devices open. Where the removal waits
    /// for these, nothing else can be done with the PF.
    pub leaving: BTreeMap<VfId, BTreeSet<u32>>,
    /// `net.ipv4.conf.all.rp_filter`. The kernel uses the maximum of it and the network device's own value.
    pub rp_filter_all: u8,
}

/// A PF.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PfSeen {
    /// Its driver.
    pub driver: String,
    /// The number of its VFs, as in `sriov_numvfs`.
    pub numvfs: u16,
    /// `sriov_totalvfs`; 0 if it has no SR-IOV.
    pub totalvfs: u16,
    /// Its VFs by number.
    pub vfs: BTreeMap<u16, VfSeen>,
}

/// A VF.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VfSeen {
    /// Its PCI address, such as `0000:01:10.0`.
    pub pci: String,
    /// Its driver; `None`: none is bound.
    pub driver: Option<String>,
    /// Its network device, if that is in the network namespace of the supervisor.
    pub netdev: Option<NetdevSeen>,
    /// Its settings at the PF.
    pub settings: Settings,
    /// Its verbs device.
    pub verbs: Option<VerbsSeen>,
    /// Verbs objects of programs. Objects of the kernel do not count: a device always has some.
    pub objects: u32,
    /// Processes with a descriptor of its verbs or VFIO device, also of a device that has been removed. The supervisor
    /// and the keeper do not count.
    pub users: BTreeSet<u32>,
    /// Descriptors of its verbs device that programs have got by leases and not closed, also those that no process
    /// shows.
    pub descriptors: u32,
    /// The step that the kernel refused, and its error. No step is planned for the VF until the supervisor forgets
    /// this, to try again.
    pub refused: Option<String>,
}

/// The settings of a VF at its PF (`ip link set PF vf N ...`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// The MAC; all zero if none is set.
    pub mac: Mac,
    /// The VLAN that the NIC adds and removes; 0: none.
    pub vlan: u16,
    /// `max_tx_rate`, Mbit/s; 0: no limit.
    pub rate_mbps: u32,
    /// The VF cannot send with another MAC.
    pub spoof_check: bool,
    /// The VF may change its MAC and receive everything.
    pub trust: bool,
}

/// The network device of a VF.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NetdevSeen {
    /// Its name.
    pub name: String,
    /// Its own MAC: the PF's setting at the time when the driver was bound.
    pub mac: Mac,
    /// It is up.
    pub up: bool,
    /// Its MTU, bytes.
    pub mtu: u32,
    /// Addresses that somebody gave it, so without link-local and autoconfigured ones.
    pub addresses: BTreeSet<Address>,
    /// `accept_local`.
    pub accept_local: bool,
    /// `rp_filter`.
    pub rp_filter: u8,
    /// `arp_ignore`.
    pub arp_ignore: u8,
    /// Its permanent neighbours.
    pub neighbours: BTreeMap<IpAddr, Mac>,
}

/// The verbs device of a VF.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VerbsSeen {
    /// Its name, such as `mlx5_3`.
    pub name: String,
    /// The permissions of its device node.
    pub mode: u32,
    /// It has an active port.
    pub active: bool,
}

impl Seen {
    /// A VF of a PF; `None` if the kernel has none of this number.
    pub fn vf(&self, id: &VfId) -> Option<&VfSeen> {
        self.pfs.get(&id.pf)?.vfs.get(&id.index)
    }
}

impl VfSeen {
    /// True if a program may use it.
    pub fn is_used(&self) -> bool {
        self.objects > 0 || !self.users.is_empty() || self.descriptors > 0
    }
}
