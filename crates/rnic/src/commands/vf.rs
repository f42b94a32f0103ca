//! Commands of programs whose QPs are on a VF of a real RNIC: from virtual GIDs to the VFs' own, and back.

use unirdma_abi::Status;
use unirdma_formats::{Gid, QpType};

use super::Result;
use crate::core::Core;
use crate::objects::{SessionId, VfPath, VrnicId};

impl Core {
    /// RESOLVE: how the VF of the session's vRNIC reaches the holder of GID `dgid`. Datagrams also reach a multicast
    /// group, and the GID of a VF of the group, which a program has from a GRH. Connections do not: a vRNIC is
    /// connected to by its own GIDs only. vRNICs on other hosts are known after [`Core::ask_to_resolve`].
    ///
    /// # Errors
    /// `BadState` if the vRNIC has no VF, `BadValue` if `sgid_index` is of none of its GIDs, `Unreachable` if the
    /// holder has no VF, or the rules do not let it be reached.
    pub fn resolve_by_vf(&mut self, s: SessionId, sgid_index: u32, dgid: Gid, typ: QpType) -> Result<VfPath> {
        let vrnic = self.objects.vrnic_of(s)?;
        let v = self.objects.vrnics.get(vrnic.0).ok_or(Status::BadHandle)?;
        let own = v.vf_use.vf.ok_or(Status::BadState)?;
        u8::try_from(sgid_index).ok().and_then(|i| v.gid(i)).ok_or(Status::BadValue)?;
        let is_datagram = typ == QpType::Ud;
        if dgid.ip().is_multicast() && is_datagram {
            return Ok(VfPath { gid: dgid.0, ..own });
        }
        let is_of_vrnic =
            || self.objects.find_vrnic(v.group, dgid).is_some() || self.net.routes.contains_key(&(v.group, dgid));
        if !is_datagram && !is_of_vrnic() {
            return Err(Status::Unreachable);
        }
        let holders = self.holders_by_vf(v.group, dgid);
        if holders.is_empty() {
            // A host is not asked about a GID that the rules keep out of reach.
            let is_ruled_out = self.host_of_peer(v.group, dgid).is_some() && !self.may_connect(vrnic, dgid, None);
            return Err(if is_ruled_out { self.refuse_reach(vrnic) } else { Status::Unreachable });
        }
        let reached = holders.into_iter().find(|(gid, _)| self.may_reach_by_vf(vrnic, *gid, typ));
        reached.map(|(_, path)| path).ok_or_else(|| self.refuse_reach(vrnic))
    }

    /// The vRNICs of a group that have this GID, or a VF with this GID, and the paths to them.
    fn holders_by_vf(&self, group: u32, gid: Gid) -> Vec<(Gid, VfPath)> {
        if let Some(here) = self.objects.find_vrnic(group, gid) {
            return self.objects.vf_of(here).map(|path| (gid, path)).into_iter().collect();
        }
        let on_vf = self.objects.vrnics_on_vf(group, gid);
        let here = on_vf.iter().filter_map(|&id| Some((self.first_gid(id)?, self.objects.vf_of(id)?)));
        if on_vf.is_empty() { self.peers_by_vf(group, gid) } else { here.collect() }
    }

    /// NAME_GID: the GID of the vRNIC of the session's group that has the VF with the GID `real`. If several vRNICs
    /// share the VF, the one that has had it for the longest time. vRNICs on other hosts are known after
    /// [`Core::ask_to_name`].
    ///
    /// # Errors
    /// `Unreachable` if there is none.
    pub fn name_of_vf(&self, s: SessionId, real: Gid) -> Result<Gid> {
        let v = self.objects.vrnics.get(self.objects.vrnic_of(s)?.0).ok_or(Status::BadHandle)?;
        let on_vf = self.objects.vrnics_on_vf(v.group, real);
        let here = on_vf.iter().find_map(|&id| self.first_gid(id));
        let there = || self.peers_by_vf(v.group, real).first().filter(|(_, path)| path.gid == real.0).map(|p| p.0);
        here.or_else(there).ok_or(Status::Unreachable)
    }

    fn first_gid(&self, id: VrnicId) -> Option<Gid> {
        self.gids(id).iter().copied().find(|g| !g.is_zero())
    }

    /// Whether the rules let a vRNIC reach the holder of a GID of its group, as for MODIFY_QP and CREATE_AH.
    fn may_reach_by_vf(&mut self, vrnic: VrnicId, gid: Gid, typ: QpType) -> bool {
        if typ != QpType::Ud {
            return self.may_connect(vrnic, gid, None);
        }
        let may = self.may_send_to(vrnic, gid, None);
        if may {
            self.note_begun(vrnic, gid, None);
        }
        may
    }

    fn refuse_reach(&mut self, vrnic: VrnicId) -> Status {
        self.count_refused(vrnic);
        Status::Unreachable
    }
}
