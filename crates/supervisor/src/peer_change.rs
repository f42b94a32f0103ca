//! Changes of the knowledge about other hosts.

use std::net::IpAddr;

use unirdma_formats::Mac;
use unirdma_policy::Rule;

/// The location of a virtual address. The host may be this one, for groups that a rule joins with the group of the
/// address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub host: IpAddr,
    /// The host is a plain RoCEv2 device.
    pub foreign: bool,
}

/// A change of the knowledge about other hosts. `None` removes an entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// The number of a group between hosts.
    Vni { group: String, vni: Option<u32> },
    /// The location of a virtual address of a group.
    Address { group: String, address: IpAddr, place: Option<Place> },
    /// The host of the vRNIC of a group that has this Ethernet address.
    Mac { group: String, mac: Mac, host: Option<IpAddr> },
    /// A rule between groups is added or removed. It holds while it was added more often than removed.
    Rule { rule: Rule, there: bool },
}
