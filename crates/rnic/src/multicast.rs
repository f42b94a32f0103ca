//! Multicast groups: who is attached on this host, and which other hosts and plain devices there are (IBTA vol. 1, 10.5). A
//! group's GID is an IP multicast address (annex A17). Other hosts get one copy each; plain devices, which the network finds by
//! that address, one for all.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;

use unirdma_formats::Gid;

use crate::objects::Qp;
use crate::path::{Path, Route};
use crate::slab::Handle;

/// Destination QPN of multicast packets.
pub(crate) const MULTICAST_QPN: u32 = 0xff_ffff;
/// QPs that may be attached to one group.
pub const MAX_MULTICAST_QPS: usize = 1024;

/// Who is attached, by group of vRNICs and multicast GID.
#[derive(Default)]
pub(crate) struct Multicast {
    attached: HashMap<(u32, Gid), Vec<Handle<Qp>>>,
    /// Other hosts of each group of vRNICs, with their VXLAN network identifier.
    hosts: HashMap<u32, Vec<(Path, u32)>>,
    /// Groups of vRNICs that have plain devices.
    foreign: HashSet<u32>,
    /// Something has changed since the port was told the last time.
    changed: bool,
}

impl Multicast {
    /// Attaches a QP; false if it is attached already, `None` if the group has no room.
    pub fn attach(&mut self, group: u32, gid: Gid, qp: Handle<Qp>) -> Option<bool> {
        let attached = self.attached.entry((group, gid)).or_default();
        if attached.contains(&qp) {
            return Some(false);
        }
        if attached.len() >= MAX_MULTICAST_QPS {
            return None;
        }
        attached.push(qp);
        self.changed = true;
        Some(true)
    }

    /// Detaches a QP.
    pub fn detach(&mut self, group: u32, gid: Gid, qp: Handle<Qp>) {
        let Some(attached) = self.attached.get_mut(&(group, gid)) else { return };
        attached.retain(|&a| a != qp);
        if attached.is_empty() {
            self.attached.remove(&(group, gid));
        }
        self.changed = true;
    }

    /// Member number `at` on this host of a group.
    pub fn member(&self, group: u32, gid: Gid, at: usize) -> Option<Handle<Qp>> {
        self.attached.get(&(group, gid))?.get(at).copied()
    }

    /// The groups of vRNICs that have members of a multicast group on this host.
    pub fn groups_of(&self, gid: Gid) -> impl Iterator<Item = u32> {
        self.attached.keys().filter(move |(_, g)| *g == gid).map(|(group, _)| *group)
    }

    /// The other hosts of a group of vRNICs, with its VXLAN network identifier.
    pub fn hosts(&self, group: u32) -> &[(Path, u32)] {
        self.hosts.get(&group).map_or(&[], |hosts| hosts)
    }

    /// True if a group of vRNICs has plain devices.
    pub fn has_foreign(&self, group: u32) -> bool {
        self.foreign.contains(&group)
    }

    /// Notes which hosts each group of vRNICs reaches. `vni` is the number of a group between hosts, 0 if that is not known.
    pub fn set_routes(&mut self, routes: &HashMap<(u32, Gid), Route>, vni: impl Fn(u32) -> u32) {
        let mut hosts: HashMap<u32, Vec<(Path, u32)>> = HashMap::new();
        for ((group, _), r) in routes.iter().filter(|(_, r)| !r.foreign && !r.host.is_unspecified()) {
            let path = Path::new(r.host).between(vni(*group), r.vni);
            let list = hosts.entry(*group).or_default();
            if !list.iter().any(|(p, _)| *p == path) {
                list.push((path, r.vni));
            }
        }
        // In an order that does not depend on the table's, so that a simulation can be repeated.
        hosts.values_mut().for_each(|list| list.sort_unstable_by_key(|(path, vni)| (path.to, *vni)));
        self.hosts = hosts;
        self.foreign = routes.iter().filter(|(_, r)| r.foreign).map(|((group, _), _)| *group).collect();
        self.changed = true;
    }

    /// The IP multicast groups by which plain devices may send to this host, if others than at the last call.
    pub fn take_changes(&mut self) -> Option<Vec<IpAddr>> {
        if !std::mem::take(&mut self.changed) {
            return None;
        }
        let heard = self.attached.keys().filter(|(group, _)| self.foreign.contains(group)).map(|(_, gid)| gid.ip());
        let mut heard: Vec<IpAddr> = heard.collect();
        heard.sort_unstable();
        heard.dedup();
        Some(heard)
    }
}
