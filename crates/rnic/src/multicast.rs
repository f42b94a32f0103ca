//! Multicast: datagrams to a group go to every QP that is attached to it, on this host and on the others (IBTA vol. 1,
//! 10.5). A group's GID is an IP multicast address (annex A17). Other hosts get one copy each; plain devices, which the network
//! finds by that address, one for all.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;

use unirdma_abi::Status;
use unirdma_formats::net::Flow;
use unirdma_formats::wire::{Packet, Transport};
use unirdma_formats::{Gid, QpType};
use unirdma_mem::Fault;

use crate::datagram::Note;
use crate::objects::{Qp, SessionId};
use crate::rnic::Rnic;
use crate::slab::Handle;
use crate::wire::{Arrival, DSCP, Path};

/// Destination QPN of multicast packets.
pub(crate) const MULTICAST_QPN: u32 = 0xff_ffff;
/// QPs that may be attached to one group.
pub const MAX_MULTICAST_QPS: usize = 1024;
/// Groups that one QP may be attached to.
const MAX_GROUPS: usize = 64;

/// Who is attached, by group of vRNICs and multicast GID.
#[derive(Default)]
pub(crate) struct Multicast {
    attached: HashMap<(u32, Gid), Vec<Handle<Qp>>>,
    /// Other hosts of each group of vRNICs, with their VXLAN network identifier.
    hosts: HashMap<u32, Vec<(Path, u32)>>,
    /// Groups of vRNICs that have plain devices.
    foreign: HashSet<u32>,
    /// Something of this is other than when the port was told of it.
    changed: bool,
}

impl Rnic {
    /// ATTACH_MCAST.
    ///
    /// # Errors
    /// `BadHandle`, `BadValue` for a QP that is not UD or a GID that is no group's, `Exhausted`.
    pub fn attach_mcast(&mut self, s: SessionId, qpn: u32, gid: Gid) -> Result<(), Status> {
        let h = self.own_qp(s, qpn)?;
        let q = self.qps.get(h).filter(|q| q.typ == QpType::Ud && gid.ip().is_multicast()).ok_or(Status::BadValue)?;
        let group = self.vnics.get(q.vnic.0).ok_or(Status::BadHandle)?.group;
        let groups = q.groups.len();
        let attached = self.multicast.attached.entry((group, gid)).or_default();
        if attached.contains(&h) {
            return Ok(());
        }
        if attached.len() >= MAX_MULTICAST_QPS || groups >= MAX_GROUPS {
            return Err(Status::Exhausted);
        }
        attached.push(h);
        if let Some(q) = self.qps.get_mut(h) {
            q.groups.push(gid);
        }
        self.multicast.changed = true;
        Ok(())
    }

    /// DETACH_MCAST.
    ///
    /// # Errors
    /// `BadHandle`, `BadValue` if it is not attached.
    pub fn detach_mcast(&mut self, s: SessionId, qpn: u32, gid: Gid) -> Result<(), Status> {
        let h = self.own_qp(s, qpn)?;
        let q = self.qps.get_mut(h).ok_or(Status::BadHandle)?;
        let at = q.groups.iter().position(|g| *g == gid).ok_or(Status::BadValue)?;
        q.groups.swap_remove(at);
        self.detach(h, gid);
        Ok(())
    }

    fn detach(&mut self, h: Handle<Qp>, gid: Gid) {
        let Some(group) = self.vnic_id(h).and_then(|v| self.vnics.get(v.0)).map(|v| v.group) else { return };
        let Some(attached) = self.multicast.attached.get_mut(&(group, gid)) else { return };
        attached.retain(|&a| a != h);
        if attached.is_empty() {
            self.multicast.attached.remove(&(group, gid));
        }
        self.multicast.changed = true;
    }

    /// QP `h` is about to go.
    pub(crate) fn detach_all(&mut self, h: Handle<Qp>) {
        for gid in self.qps.get_mut(h).map(|q| std::mem::take(&mut q.groups)).unwrap_or_default() {
            self.detach(h, gid);
        }
    }

    /// Notes which hosts each group of vRNICs reaches.
    pub(crate) fn find_group_hosts(&mut self) {
        let mut hosts: HashMap<u32, Vec<(Path, u32)>> = HashMap::new();
        for ((group, _), r) in self.routes.iter().filter(|(_, r)| !r.foreign) {
            let path = Path::new(r.host);
            let list = hosts.entry(*group).or_default();
            if !list.iter().any(|(p, _)| *p == path) {
                list.push((path, r.vni));
            }
        }
        self.multicast.hosts = hosts;
        self.multicast.foreign = self.routes.iter().filter(|(_, r)| r.foreign).map(|((group, _), _)| *group).collect();
        self.multicast.changed = true;
    }

    /// The IP multicast groups by which plain devices may send to this host, if others than at the last call.
    pub fn multicast_changes(&mut self) -> Option<Vec<IpAddr>> {
        if !std::mem::take(&mut self.multicast.changed) {
            return None;
        }
        let Multicast { attached, foreign, .. } = &self.multicast;
        let heard = attached.keys().filter(|(group, _)| foreign.contains(group)).map(|(_, gid)| gid.ip());
        let mut heard: Vec<IpAddr> = heard.collect();
        heard.sort_unstable();
        heard.dedup();
        Some(heard)
    }

    /// A plain packet to an IP multicast group came in. It is for the groups of vRNICs that have its sender.
    pub(crate) fn on_multicast(&mut self, a: &Arrival, p: &Packet<'_>) {
        if p.opcode.transport != Transport::Ud || p.dest_qp != MULTICAST_QPN {
            self.drops.bad_state += 1;
            return;
        }
        let (src, dst) = (Gid::from_ip(a.from), Gid::from_ip(a.to));
        let knows = |group: u32| self.routes.get(&(group, src)).is_some_and(|r| r.foreign && r.host == a.from);
        let listens = self.multicast.attached.keys().filter(|(_, gid)| *gid == dst).map(|(group, _)| *group);
        let groups: Vec<u32> = listens.filter(|&group| knows(group)).collect();
        self.drops.wrong_source += u64::from(groups.is_empty());
        for group in groups {
            self.deliver_multicast(group, &Flow::roce(src, dst), p, p.payload);
        }
    }

    /// Sends a datagram of QP `h` to all members of its multicast group, the QP itself if it is one.
    pub(crate) fn send_multicast(
        &mut self,
        h: Handle<Qp>,
        flow: &Flow,
        head: &Packet<'_>,
        data: &[u8],
    ) -> Result<(), Fault> {
        let Some(group) = self.qps.get(h).and_then(|q| self.vnics.get(q.vnic.0)).map(|v| v.group) else {
            return Ok(());
        };
        self.tap_datagram(h, None, flow, head, data);
        self.deliver_multicast(group, flow, head, data);
        for (path, vni) in self.multicast.hosts.get(&group).into_iter().flatten() {
            self.tx.push_datagram(*path, Some((*vni, *flow)), head, data.len(), |to| {
                to.copy_from_slice(data);
                Ok(())
            })?;
        }
        if self.multicast.foreign.contains(&group) && flow.src.is_ipv4() == flow.dst.is_ipv4() {
            let path = Path { from: Some(flow.src), class: flow.traffic_class & DSCP, ..Path::new(flow.dst) };
            self.tx.push_datagram(path, None, head, data.len(), |to| {
                to.copy_from_slice(data);
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Gives a datagram to the members of its multicast group on this host.
    pub(crate) fn deliver_multicast(&mut self, group: u32, flow: &Flow, p: &Packet<'_>, data: &[u8]) {
        let key = (group, Gid::from_ip(flow.dst));
        let mut at = 0;
        while let Some(&h) = self.multicast.attached.get(&key).and_then(|v| v.get(at)) {
            self.accept(h, p.deth.qkey, flow, data, Note::of(p));
            at += 1;
        }
    }
}
