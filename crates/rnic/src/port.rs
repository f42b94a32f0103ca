//! The port of a vRNIC: its link, which the virtual layer sets up and down, and its addresses, which it gives and takes away
//! while programs run.
//!
//! A QP or AH that has no link sends into the void and hears nothing, as on a NIC without a cable: reliable connections end in
//! RETRY_EXC_ERR after their retries, or go on if the link comes back before. So does one whose own address was taken away.

use unirdma_formats::{AsyncEvent, Gid};

use crate::objects::{Vnic, VnicId};
use crate::rnic::Rnic;

/// Fewest entries of a GID table.
const MIN_GIDS: usize = 16;

impl Vnic {
    /// True if packets from this own address may leave; `None` stands for no address in particular.
    pub fn is_linked(&self, own: Option<Gid>) -> bool {
        self.up && own.is_none_or(|gid| self.gids.contains(&gid))
    }

    /// Its first address of a family.
    pub fn first(&self, is_ipv4: bool) -> Option<Gid> {
        self.gids.iter().copied().find(|g| !g.is_zero() && g.ip().is_ipv4() == is_ipv4)
    }

    /// The GID at an index, unless there is a hole.
    pub fn gid(&self, index: u8) -> Option<Gid> {
        self.gids.get(usize::from(index)).copied().filter(|g| !g.is_zero())
    }
}

impl Rnic {
    /// True if the link of a vRNIC is up.
    pub fn is_up(&self, id: VnicId) -> bool {
        self.vnics.get(id.0).is_some_and(|v| v.up)
    }

    /// Entries of the GID table of a vRNIC, with the empty ones for addresses to come.
    pub fn gid_table_len(&self, id: VnicId) -> usize {
        self.gids(id).len().next_power_of_two().max(MIN_GIDS)
    }

    /// The GID at an index of the table, zero if that is empty; `None` beyond its end.
    pub fn gid_at(&self, id: VnicId, index: usize) -> Option<Gid> {
        let gid = self.gids(id).get(index).copied().unwrap_or_default();
        (index < self.gid_table_len(id)).then_some(gid)
    }

    /// Sets the link of a vRNIC up or down; its programs hear of a change (`PORT_ACTIVE`, `PORT_ERR`).
    pub fn set_link(&mut self, id: VnicId, up: bool) {
        let Some(v) = self.vnics.get_mut(id.0) else { return };
        if std::mem::replace(&mut v.up, up) != up {
            v.counters.wire.link_downed += u64::from(!up);
            self.relink(id);
            self.emit_to_port(id, if up { AsyncEvent::PortActive } else { AsyncEvent::PortErr });
        }
    }

    /// Replaces the GID table of a vRNIC; a zero GID is a hole. Its programs hear of a change (`GID_CHANGE`).
    pub fn set_gids(&mut self, id: VnicId, gids: Vec<Gid>) {
        if self.gids(id) != gids {
            self.list_gids(id, false);
            if let Some(v) = self.vnics.get_mut(id.0) {
                v.gids = gids;
            }
            self.list_gids(id, true);
            self.relink(id);
            self.emit_to_port(id, AsyncEvent::GidChange);
            self.cm_addresses_changed();
        }
    }

    /// A vRNIC is found by its GIDs from now on, or no more.
    pub(crate) fn list_gids(&mut self, id: VnicId, on: bool) {
        let Some(v) = self.vnics.get(id.0) else { return };
        for &gid in v.gids.iter().filter(|g| !g.is_zero()) {
            let there = self.by_gid.entry((v.group, gid)).or_default();
            there.retain(|&v| v != id);
            if on {
                there.push(id);
            } else if there.is_empty() {
                self.by_gid.remove(&(v.group, gid));
            }
        }
    }

    /// Notes at each QP and AH of a vRNIC whether it has a link.
    fn relink(&mut self, id: VnicId) {
        let Some(v) = self.vnics.get(id.0) else { return };
        for h in self.qps.handles(|q| q.vnic == id) {
            if let Some(q) = self.qps.get_mut(h) {
                let linked = v.is_linked(q.own);
                q.counters.wire.link_downed += u64::from(q.linked && !linked);
                q.linked = linked;
                if let Some(w) = &mut q.wire {
                    w.path.cut = !q.linked;
                }
            }
        }
        for &h in self.sessions.iter().filter(|(_, s)| s.vnic == id).flat_map(|(_, s)| s.names.ahs.values()) {
            if let Some(a) = self.ahs.get_mut(h) {
                a.linked = v.is_linked(Some(a.own()));
            }
        }
    }

    fn emit_to_port(&mut self, id: VnicId, kind: AsyncEvent) {
        for s in self.sessions.handles(|s| s.vnic == id) {
            self.emit(crate::SessionId(s), kind, 1);
        }
    }
}
