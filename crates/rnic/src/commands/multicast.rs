//! QPs join and leave multicast groups.

use unirdma_abi::Status;
use unirdma_formats::{Gid, Qpn};

use super::Result;
use crate::core::Core;
use crate::objects::{Qp, SessionId};
use crate::slab::Handle;

/// Groups that one QP may be attached to.
const MAX_GROUPS: usize = 64;

impl Core {
    /// ATTACH_MCAST.
    ///
    /// # Errors
    /// `BadHandle`, `BadValue` for a QP that is not UD or a GID that is no group's, `Exhausted`.
    pub fn attach_mcast(&mut self, s: SessionId, qpn: u32, gid: Gid) -> Result<()> {
        let h = self.objects.own_qp(s, Qpn(qpn))?;
        let q = self.objects.qps.get_mut(h).ok_or(Status::BadHandle)?;
        if !gid.ip().is_multicast() {
            return Err(Status::BadValue);
        }
        let group = self.objects.vnics.get(q.vnic.0).ok_or(Status::BadHandle)?.group;
        let groups = &mut q.datagrams_mut().ok_or(Status::BadValue)?.groups;
        if groups.len() >= MAX_GROUPS && !groups.contains(&gid) {
            return Err(Status::Exhausted);
        }
        if self.multicast.attach(group, gid, h).ok_or(Status::Exhausted)? {
            groups.push(gid);
        }
        Ok(())
    }

    /// DETACH_MCAST.
    ///
    /// # Errors
    /// `BadHandle`, `BadValue` if it is not attached.
    pub fn detach_mcast(&mut self, s: SessionId, qpn: u32, gid: Gid) -> Result<()> {
        let h = self.objects.own_qp(s, Qpn(qpn))?;
        let q = self.objects.qps.get_mut(h).ok_or(Status::BadHandle)?;
        let groups = &mut q.datagrams_mut().ok_or(Status::BadValue)?.groups;
        let at = groups.iter().position(|g| *g == gid).ok_or(Status::BadValue)?;
        groups.swap_remove(at);
        self.detach(h, gid);
        Ok(())
    }

    fn detach(&mut self, h: Handle<Qp>, gid: Gid) {
        let vnic = self.objects.vnic_of_qp(h).and_then(|v| self.objects.vnics.get(v.0));
        if let Some(group) = vnic.map(|v| v.group) {
            self.multicast.detach(group, gid, h);
        }
    }

    /// QP `h` is about to go.
    pub(crate) fn detach_all(&mut self, h: Handle<Qp>) {
        let groups = self.objects.qps.get_mut(h).and_then(Qp::datagrams_mut).map(|d| std::mem::take(&mut d.groups));
        for gid in groups.unwrap_or_default() {
            self.detach(h, gid);
        }
    }
}
