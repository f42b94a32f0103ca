//! Commands of programs whose QPs are on a VF of a real RNIC: from virtual GIDs to the VFs' own, and back.

use unirdma_abi::Status;
use unirdma_formats::{Gid, QpType};

use super::Result;
use crate::core::Core;
use crate::objects::{SessionId, VfPath, VrnicId};

impl Core {
    /// RESOLVE: how the VF of the session's vRNIC reaches the holder of GID `dgid`. The GID of a VF of the group, which
    /// a program has from a GRH, and a multicast group are reached by themselves.
    ///
    /// # Errors
    /// `BadState` if the vRNIC has no VF, `BadValue` if `sgid_index` is of none of its GIDs, `Unreachable` if the
    /// holder has no VF, or the rules do not let it be reached.
    pub fn resolve_by_vf(&mut self, s: SessionId, sgid_index: u32, dgid: Gid, typ: QpType) -> Result<VfPath> {
        let vrnic = self.objects.vrnic_of(s)?;
        let v = self.objects.vrnics.get(vrnic.0).ok_or(Status::BadHandle)?;
        let own = v.vf_use.vf.ok_or(Status::BadState)?;
        u8::try_from(sgid_index).ok().and_then(|i| v.gid(i)).ok_or(Status::BadValue)?;
        if dgid.ip().is_multicast() {
            let is_datagram = typ == QpType::Ud;
            return if is_datagram { Ok(VfPath { gid: dgid.0, ..own }) } else { Err(Status::Unreachable) };
        }
        if let Some(there) = self.objects.find_vrnic(v.group, dgid) {
            let path = self.objects.vf_of(there).ok_or(Status::Unreachable)?;
            return self.may_reach_by_vf(vrnic, dgid, typ).then_some(path).ok_or_else(|| self.refuse_reach(vrnic));
        }
        let on_vf = self.objects.vrnics_on_vf(v.group, dgid);
        let holders: Vec<(Gid, VfPath)> =
            on_vf.iter().filter_map(|&id| Some((self.first_gid(id)?, self.objects.vf_of(id)?))).collect();
        if holders.is_empty() {
            return Err(Status::Unreachable);
        }
        let reached = holders.into_iter().find(|(gid, _)| self.may_reach_by_vf(vrnic, *gid, typ));
        reached.map(|(_, path)| path).ok_or_else(|| self.refuse_reach(vrnic))
    }

    /// NAME_GID: the GID of the vRNIC of the session's group that has the VF with the GID `real`. If several vRNICs
    /// share the VF, the one that has had it for the longest time.
    ///
    /// # Errors
    /// `Unreachable` if there is none.
    pub fn name_of_vf(&self, s: SessionId, real: Gid) -> Result<Gid> {
        let v = self.objects.vrnics.get(self.objects.vrnic_of(s)?.0).ok_or(Status::BadHandle)?;
        let on_vf = self.objects.vrnics_on_vf(v.group, real);
        on_vf.iter().find_map(|&id| self.first_gid(id)).ok_or(Status::Unreachable)
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
