//! Multicast groups: the QPs that are attached on this host, and the other hosts and plain devices (IBTA vol. 1, 10.5).
//! A group's GID is an IP multicast address (annex A17). Each other host gets one copy. All plain devices get one copy
//! together, because the network delivers to that address.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;

use unirdma_formats::Gid;

use crate::objects::Qp;
use crate::path::{Path, Route};
use crate::slab::Handle;

/// Destination QPN of multicast packets.
pub(crate) const MULTICAST_QPN: u32 = 0xff_ffff;
/// Most QPs that may be attached to one group.
pub const MAX_MULTICAST_QPS: usize = 1024;
/// Most IP multicast groups that the port joins.
const MAX_HEARD: usize = 1024;

/// Members of multicast groups.
#[derive(Default)]
pub(crate) struct Multicast {
    attached: HashMap<(u32, Gid), Vec<Handle<Qp>>>,
    /// The groups of vRNICs that have members, by multicast GID.
    by_gid: HashMap<Gid, Vec<u32>>,
    /// The IP multicast groups that the port has to join for plain devices, each with the number of groups of vRNICs
    /// that have members and plain devices.
    heard: BTreeMap<IpAddr, usize>,
    /// The other hosts of each group of vRNICs, with their VXLAN network identifiers, sorted by address so that a
    /// simulation can be repeated.
    hosts: HashMap<u32, Vec<(Path, u32)>>,
    /// Number of routes of a group of vRNICs to a host.
    leads: HashMap<(u32, IpAddr, u32), usize>,
    /// Number of plain devices of each group of vRNICs that has any.
    foreign: HashMap<u32, usize>,
    /// True if `heard` has changed since the last call of [`Multicast::take_changes`].
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
        if attached.len() == 1 {
            self.by_gid.entry(gid).or_default().push(group);
            self.hear(group, gid, true);
        }
        Some(true)
    }

    /// Notes that a group of vRNICs has members of a multicast group from now on, or none any more.
    fn hear(&mut self, group: u32, gid: Gid, on: bool) {
        if !self.has_foreign(group) {
            return;
        }
        let count = self.heard.entry(gid.ip()).or_default();
        *count = if on { *count + 1 } else { count.saturating_sub(1) };
        if *count == 0 {
            self.heard.remove(&gid.ip());
        }
        self.changed = true;
    }

    /// Counts `heard` again, because plain devices were added to or removed from a group of vRNICs.
    fn hear_anew(&mut self) {
        self.heard.clear();
        for (_, gid) in self.attached.keys().filter(|(group, _)| self.foreign.contains_key(group)) {
            *self.heard.entry(gid.ip()).or_default() += 1;
        }
        self.changed = true;
    }

    /// Detaches a QP.
    pub fn detach(&mut self, group: u32, gid: Gid, qp: Handle<Qp>) {
        let Some(attached) = self.attached.get_mut(&(group, gid)) else { return };
        if let Some(at) = attached.iter().position(|&a| a == qp) {
            attached.swap_remove(at);
        }
        if attached.is_empty() {
            self.attached.remove(&(group, gid));
            if let Entry::Occupied(mut groups) = self.by_gid.entry(gid) {
                groups.get_mut().retain(|&g| g != group);
                if groups.get().is_empty() {
                    groups.remove();
                }
            }
            self.hear(group, gid, false);
        }
    }

    /// Member number `at` on this host of a group.
    pub fn member(&self, group: u32, gid: Gid, at: usize) -> Option<Handle<Qp>> {
        self.attached.get(&(group, gid))?.get(at).copied()
    }

    /// The groups of vRNICs that have members of this multicast group on this host.
    pub fn groups_of(&self, gid: Gid) -> impl Iterator<Item = u32> {
        self.by_gid.get(&gid).into_iter().flatten().copied()
    }

    /// The other hosts of a group of vRNICs, with their VXLAN network identifiers.
    pub fn hosts(&self, group: u32) -> &[(Path, u32)] {
        self.hosts.get(&group).map_or(&[], |hosts| hosts)
    }

    /// True if a group of vRNICs has plain devices.
    pub fn has_foreign(&self, group: u32) -> bool {
        self.foreign.contains_key(&group)
    }

    /// Forgets all routes.
    pub fn clear_routes(&mut self) {
        self.hosts.clear();
        self.leads.clear();
        self.foreign.clear();
        self.hear_anew();
    }

    /// Notes that a group of vRNICs has one more route; `vni` is the group's own number between hosts, 0 if that is not
    /// known.
    pub fn add_route(&mut self, group: u32, vni: u32, r: &Route) {
        if r.foreign {
            let count = self.foreign.entry(group).or_default();
            *count += 1;
            if *count == 1 {
                self.hear_anew();
            }
        } else if !r.host.is_unspecified() {
            let count = self.leads.entry((group, r.host, r.vni)).or_default();
            *count += 1;
            if *count == 1 {
                let list = self.hosts.entry(group).or_default();
                // Sorted, so that a simulation can be repeated: the order of a hash table is random.
                let at = list.partition_point(|(path, vni)| (path.to, *vni) < (r.host, r.vni));
                list.insert(at, (Path::new(r.host).between(vni, r.vni), r.vni));
            }
        }
    }

    /// Notes that a group of vRNICs has one route less.
    pub fn remove_route(&mut self, group: u32, r: &Route) {
        if r.foreign {
            if let Entry::Occupied(mut count) = self.foreign.entry(group) {
                *count.get_mut() -= 1;
                if *count.get() == 0 {
                    count.remove();
                    self.hear_anew();
                }
            }
        } else if let Some(count) = self.leads.get_mut(&(group, r.host, r.vni)) {
            *count -= 1;
            if *count == 0 {
                self.leads.remove(&(group, r.host, r.vni));
                self.hosts.entry(group).or_default().retain(|(path, vni)| (path.to, *vni) != (r.host, r.vni));
            }
        }
    }

    /// The IP multicast groups that the port has to join for plain devices; `None` if they are the same as at the last
    /// call.
    pub fn take_changes(&mut self) -> Option<Vec<IpAddr>> {
        if !std::mem::take(&mut self.changed) {
            return None;
        }
        Some(self.heard.keys().take(MAX_HEARD).copied().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_devices_are_heard_by_the_groups_that_have_members() {
        let qp = |n: u64| Handle::from_raw(n | 1 << 24);
        let gid = |n: u8| Gid::from_ip(IpAddr::from([239, 1, 1, n]));
        let device = Route { host: [192, 168, 7, 9].into(), foreign: true, vni: 0 };
        let mut m = Multicast::default();
        assert_eq!((m.attach(3, gid(5), qp(1)), m.attach(3, gid(5), qp(1))), (Some(true), Some(false)));
        assert_eq!((m.attach(3, gid(5), qp(2)), m.attach(4, gid(5), qp(3))), (Some(true), Some(true)));
        assert_eq!((m.groups_of(gid(5)).collect::<Vec<_>>(), m.take_changes()), (vec![3, 4], None));
        m.add_route(4, 4, &device);
        m.add_route(4, 4, &device);
        assert_eq!(m.take_changes(), Some(vec![gid(5).ip()]));
        m.add_route(3, 3, &device);
        assert_eq!((m.attach(3, gid(6), qp(1)), m.take_changes()), (Some(true), Some(vec![gid(5).ip(), gid(6).ip()])));
        m.detach(3, gid(5), qp(1));
        assert_eq!((m.groups_of(gid(5)).count(), m.take_changes()), (2, None));
        m.detach(3, gid(5), qp(2));
        m.detach(4, gid(5), qp(3));
        assert_eq!((m.groups_of(gid(5)).count(), m.take_changes()), (0, Some(vec![gid(6).ip()])));
        m.remove_route(3, &device);
        assert_eq!(m.take_changes(), Some(Vec::new()));
    }

    #[test]
    fn a_host_is_there_as_long_as_a_route_leads_to_it() {
        let route = |host: [u8; 4], foreign| Route { host: host.into(), foreign, vni: 7 };
        let [a, b] = [route([192, 168, 7, 1], false), route([192, 168, 7, 2], false)];
        let device = route([192, 168, 7, 9], true);
        let mut m = Multicast::default();
        [&b, &a, &b, &device, &route([0, 0, 0, 0], false)].iter().for_each(|r| m.add_route(3, 3, r));
        let hosts = |m: &Multicast| m.hosts(3).iter().map(|(path, vni)| (path.to, *vni)).collect::<Vec<_>>();
        assert_eq!((hosts(&m), m.has_foreign(3)), (vec![(a.host, 7), (b.host, 7)], true));
        m.remove_route(3, &b);
        assert_eq!(hosts(&m).len(), 2);
        [&b, &device].iter().for_each(|r| m.remove_route(3, r));
        assert_eq!((hosts(&m), m.has_foreign(3), m.hosts(4).len()), (vec![(a.host, 7)], false, 0));
        m.clear_routes();
        assert!(hosts(&m).is_empty());
    }
}
