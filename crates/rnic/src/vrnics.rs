//! vRNICs: how they are added, shown and removed. Their ports: the virtual layer sets the link up and down, and adds
//! and removes addresses while programs run. The network that all vRNICs share.
//!
//! The packets of a QP or AH without a link are lost, and none come in, as on a NIC without a cable. Reliable
//! connections end in RETRY_EXC_ERR after their retries, or go on if the link comes back before. A QP whose own address
//! was removed has no link either.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use unirdma_abi as abi;
use unirdma_formats::{AsyncEvent, Gid};

use crate::budget::TimeBudget;
use crate::core::Core;
use crate::objects::{
    Account, Begun, Counters, MemoryState, Mr, MrNote, PAGE_TIME, Qp, QpInfo, Rooms, SessionId, Usage, Used, VfUse,
    Vrnic, VrnicConfig, VrnicId,
};
use crate::pace::{Limit, Share};
use crate::path::{Route, WireDrops};
use crate::tx::Tx;

/// Fewest entries of a GID table.
const MIN_GIDS: usize = 16;

impl Core {
    /// Adds a vRNIC; `None` if there are too many.
    pub(crate) fn add_vrnic(&mut self, c: VrnicConfig) -> Option<VrnicId> {
        let v = Vrnic {
            group: c.group,
            gids: c.gids,
            up: true,
            vf_use: VfUse::default(),
            limits: c.limits,
            limit: Limit::new(c.share),
            used: Used::default(),
            last_session: 0,
            counters: Counters::default(),
            kicks: 0,
            rooms: Rooms::default(),
            memory_state: MemoryState::default(),
            page_time: TimeBudget::new(&PAGE_TIME),
            begun: Begun::default(),
            gsi: None,
        };
        let id = self.objects.vrnics.insert(v).map(VrnicId)?;
        self.sched.add(id, c.share.weight);
        self.list_gids(id, true);
        Some(id)
    }

    /// Sets the account of a vRNIC for memory that is kept for it from now on. Without one, only its own limits apply.
    pub fn set_account(&mut self, id: VrnicId, account: &Arc<dyn Account>) {
        self.objects.vrnics.get_mut(id.0).into_iter().for_each(|v| v.rooms = Rooms::new(account));
    }

    /// The sessions of a vRNIC.
    pub(crate) fn sessions_of(&self, id: VrnicId) -> Vec<SessionId> {
        self.objects.sessions.handles(|s| s.vrnic == id && !s.gone).into_iter().map(SessionId).collect()
    }

    /// Removes a vRNIC, which has no sessions any more.
    pub(crate) fn remove_vrnic(&mut self, id: VrnicId) {
        while self.tear_down_of(id, usize::MAX) {}
        self.list_gids(id, false);
        self.set_vf_use(id, VfUse::default());
        self.sched.remove(id);
        self.objects.vrnics.remove(id.0);
    }

    /// Changes a vRNIC's part of the RNIC.
    pub fn set_share(&mut self, id: VrnicId, share: Share) {
        if let Some(v) = self.objects.vrnics.get_mut(id.0) {
            v.limit = Limit::new(share);
            self.sched.set_weight(id, share.weight);
        }
    }

    /// The part of the RNIC that a vRNIC has.
    pub fn share(&self, id: VrnicId) -> Share {
        self.objects.vrnics.get(id.0).map_or(Share::default(), |v| v.limit.share())
    }

    /// Charges the vRNIC of a session for a command that took `ns` nanoseconds.
    pub fn charge_command(&mut self, s: SessionId, ns: u64) {
        if let Some(s) = self.objects.sessions.get(s.0) {
            self.sched.charge(s.vrnic, ns);
        }
    }

    /// True if another vRNIC than this one has work, or is polled because it had work just now. `None`: any vRNIC.
    pub fn has_work_for_others(&self, id: Option<VrnicId>) -> bool {
        self.polled.vrnics().chain(self.sched.ready()).any(|v| Some(v) != id)
    }

    /// Time that the RNIC has worked for a vRNIC, nanoseconds.
    pub fn busy_ns(&self, id: VrnicId) -> u64 {
        self.sched.busy_ns(id)
    }

    /// Number of kicks by programs of a vRNIC, or by its guest, because they found the RNIC asleep.
    pub fn kicks(&self, id: VrnicId) -> u64 {
        self.objects.vrnics.get(id.0).map_or(0, |v| v.kicks)
    }

    /// The counters of a vRNIC.
    pub fn counters(&self, id: VrnicId) -> Option<Counters> {
        self.objects.vrnics.get(id.0).map(|v| v.counters)
    }

    /// The resources that a vRNIC uses.
    pub fn usage(&self, id: VrnicId) -> Usage {
        let Some(v) = self.objects.vrnics.get(id.0) else { return Usage::default() };
        let Used { sessions, cqs, qps, mrs, mr_bytes, copied, copied_bytes, windows, .. } = v.used;
        Usage {
            sessions,
            qps,
            cqs,
            mrs_mapped: mrs - windows - copied,
            bytes_mapped: mr_bytes - copied_bytes,
            mrs_copied: copied,
            bytes_copied: copied_bytes,
        }
    }

    /// The MRs of a vRNIC, without its windows.
    fn mrs_of(&self, id: VrnicId) -> impl Iterator<Item = &Mr> {
        let sessions = self.objects.sessions.iter().filter(move |(_, s)| s.vrnic == id);
        let mrs = sessions.flat_map(|(_, s)| s.names.mrs.values()).filter_map(|&h| self.objects.mrs.get(h));
        mrs.filter(|m| m.window.is_none())
    }

    /// The ways in which the memory of a vRNIC's MRs is reached, and the reasons that their drivers give.
    pub fn mr_notes(&self, id: VrnicId) -> Vec<MrNote> {
        let mut notes: BTreeMap<(&str, &str), (usize, u64)> = BTreeMap::new();
        for m in self.mrs_of(id) {
            let sum = notes.entry((abi::mr_way(m.note), abi::mr_why(m.note))).or_default();
            *sum = (sum.0 + 1, sum.1.saturating_add(m.counted()));
        }
        let note = |((way, why), (mrs, bytes)): ((&str, &str), (usize, u64))| MrNote {
            way: way.into(),
            why: why.into(),
            mrs,
            bytes,
        };
        notes.into_iter().map(note).collect()
    }

    /// The QPs of a vRNIC.
    pub fn queue_pairs(&self, id: VrnicId) -> Vec<QpInfo> {
        let name = |q: &Qp| QpInfo {
            qpn: q.qpn.0,
            kind: format!("{:?}", q.typ).to_uppercase(),
            state: format!("{:?}", q.state).to_uppercase(),
            peer_gid: (q.attr.ah_attr.is_global != 0).then(|| Gid(q.attr.ah_attr.grh.dgid).to_string()),
            peer_qpn: (q.attr.ah_attr.is_global != 0).then_some(q.attr.dest_qp_num),
            peer_host: q.wire().map(|w| w.path.to),
            counters: q.counters,
        };
        self.objects.qps.iter().filter(|(_, q)| q.vrnic == id).map(|(_, q)| name(q)).collect()
    }

    /// GID table of a vRNIC.
    pub fn gids(&self, id: VrnicId) -> &[Gid] {
        self.objects.vrnics.get(id.0).map_or(&[], |v| &v.gids)
    }

    /// True if the link of a vRNIC is up.
    pub fn is_up(&self, id: VrnicId) -> bool {
        self.objects.is_up(id)
    }

    /// Entries of the GID table of a vRNIC, with the empty ones for addresses to come.
    pub fn gid_table_len(&self, id: VrnicId) -> usize {
        self.gids(id).len().next_power_of_two().max(MIN_GIDS)
    }

    /// The GID at an index of the table, zero if that is empty; `None` beyond its end.
    pub fn gid_at(&self, id: VrnicId, index: usize) -> Option<Gid> {
        let gid = self.gids(id).get(index).copied().unwrap_or_default();
        (index < self.gid_table_len(id)).then_some(gid)
    }

    /// Sets the link of a vRNIC up or down; its programs get an event if it changes (`PORT_ACTIVE`, `PORT_ERR`).
    pub fn set_link(&mut self, id: VrnicId, up: bool) {
        let Some(v) = self.objects.vrnics.get_mut(id.0) else { return };
        if std::mem::replace(&mut v.up, up) != up {
            v.counters.wire.link_downed += u64::from(!up);
            self.relink(id);
            self.emit_to_port(id, if up { AsyncEvent::PortActive } else { AsyncEvent::PortErr });
        }
    }

    /// Replaces the GID table of a vRNIC; true if it has changed.
    pub(crate) fn set_gids(&mut self, id: VrnicId, gids: Vec<Gid>) -> bool {
        if self.gids(id) == gids {
            return false;
        }
        self.list_gids(id, false);
        if let Some(v) = self.objects.vrnics.get_mut(id.0) {
            v.gids = gids;
        }
        self.list_gids(id, true);
        self.relink(id);
        self.emit_to_port(id, AsyncEvent::GidChange);
        true
    }

    /// Adds the GIDs of a vRNIC to the look-up table, or removes them.
    pub(crate) fn list_gids(&mut self, id: VrnicId, on: bool) {
        let Some(v) = self.objects.vrnics.get(id.0) else { return };
        for &gid in v.gids.iter().filter(|g| !g.is_zero()) {
            let there = self.objects.by_gid.entry((v.group, gid)).or_default();
            there.retain(|&v| v != id);
            if on {
                there.push(id);
            } else if there.is_empty() {
                self.objects.by_gid.remove(&(v.group, gid));
            }
        }
    }

    /// Sets the way of a vRNIC's programs.
    pub fn set_vf_use(&mut self, id: VrnicId, vf_use: VfUse) {
        let Some(v) = self.objects.vrnics.get_mut(id.0) else { return };
        let (group, before) = (v.group, std::mem::replace(&mut v.vf_use, vf_use));
        if before.vf == vf_use.vf {
            return;
        }
        if let Some(vf) = before.vf {
            let key = (group, Gid(vf.gid));
            let there = self.objects.by_vf.entry(key).or_default();
            there.retain(|&v| v != id);
            if there.is_empty() {
                self.objects.by_vf.remove(&key);
            }
        }
        if let Some(vf) = vf_use.vf {
            self.objects.by_vf.entry((group, Gid(vf.gid))).or_default().push(id);
        }
    }

    /// The way of a vRNIC's programs.
    pub fn vf_use(&self, id: VrnicId) -> VfUse {
        self.objects.vrnics.get(id.0).map_or(VfUse::default(), |v| v.vf_use)
    }

    /// Updates at each QP and AH of a vRNIC whether it has a link.
    fn relink(&mut self, id: VrnicId) {
        let Some(v) = self.objects.vrnics.get(id.0) else { return };
        for h in self.objects.qps.handles(|q| q.vrnic == id) {
            if let Some(q) = self.objects.qps.get_mut(h) {
                let linked = v.is_linked(q.own) && !q.denied;
                q.counters.wire.link_downed += u64::from(q.linked && !linked);
                q.linked = linked;
                if let Some(w) = q.wire_mut() {
                    w.path.link(linked);
                }
            }
        }
        for &h in self.objects.sessions.iter().filter(|(_, s)| s.vrnic == id).flat_map(|(_, s)| s.names.ahs.values()) {
            if let Some(a) = self.objects.ahs.get_mut(h) {
                a.linked = v.is_linked(Some(a.own())) && !a.denied;
            }
        }
    }

    fn emit_to_port(&mut self, id: VrnicId, kind: AsyncEvent) {
        for s in self.objects.sessions.handles(|s| s.vrnic == id && !s.gone) {
            self.emit(SessionId(s), kind, 1);
        }
    }

    /// Sets the routes to GIDs of other hosts, by group.
    pub(crate) fn set_routes(&mut self, routes: HashMap<(u32, Gid), Route>) {
        self.vf_peers.retain(|key, host| routes.get(&key).is_some_and(|r| r.host == host));
        self.net.routes = routes;
        self.routes_changed();
    }

    /// Multicast goes to the hosts of all routes.
    pub(crate) fn routes_changed(&mut self) {
        self.multicast.clear_routes();
        for ((group, _), r) in &self.net.routes {
            self.multicast.add_route(*group, self.net.vni(*group), r);
        }
    }

    /// Changes the route to one GID of a group; `None` removes it.
    pub(crate) fn change_route(&mut self, group: u32, gid: Gid, route: Option<Route>) {
        let before = match route {
            Some(r) => self.net.routes.insert((group, gid), r),
            None => self.net.routes.remove(&(group, gid)),
        };
        self.vf_peers.reroute((group, gid), route.map(|r| r.host));
        // The new route is added first, so that a host that remains keeps its place.
        route.iter().for_each(|r| self.multicast.add_route(group, self.net.vni(group), r));
        before.iter().for_each(|r| self.multicast.remove_route(group, r));
    }

    /// The IP multicast groups by which plain devices may send to this host, if they have changed since the last call.
    pub fn multicast_changes(&mut self) -> Option<Vec<IpAddr>> {
        self.multicast.take_changes()
    }

    /// Sets the largest path MTU that the network to other hosts takes, bytes.
    pub fn set_wire_mtu(&mut self, bytes: u32) {
        self.net.wire_mtu = bytes;
    }

    /// Turns congestion control on or off for connections made from now on. When it is off, losses and notifications
    /// change no window, and no notification is sent.
    pub fn set_congestion_control(&mut self, on: bool) {
        self.net.adapts = on;
    }

    /// Packets from the network that were for no QP.
    pub fn wire_drops(&self) -> WireDrops {
        self.net.drops
    }

    /// Packets to send. The caller sends as many as it can and reports that by [`Tx::sent`].
    pub fn tx(&mut self) -> &mut Tx {
        &mut self.net.tx
    }
}
