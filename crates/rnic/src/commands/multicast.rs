//! Attaches QPs to multicast groups and detaches them.

use unirdma_abi::Status;
use unirdma_formats::{Gid, Qpn};

use super::Result;
use crate::core::Core;
use crate::objects::{Qp, SessionId};
use crate::slab::Handle;

/// Most groups that one QP may be attached to.
const MAX_GROUPS: usize = 64;
/// Most attachments of all QPs of a vRNIC.
const MAX_ATTACHED: usize = 65_536;

impl Core {
    /// ATTACH_MCAST.
    ///
    /// # Errors
    /// `BadHandle`, `BadValue` for a QP that is not UD or a GID that is not a multicast address, `Exhausted`.
    pub fn attach_mcast(&mut self, s: SessionId, qpn: u32, gid: Gid) -> Result<()> {
        let h = self.objects.own_qp(s, Qpn(qpn))?;
        let q = self.objects.qps.get_mut(h).ok_or(Status::BadHandle)?;
        if !gid.ip().is_multicast() {
            return Err(Status::BadValue);
        }
        let v = self.objects.vrnics.get_mut(q.vrnic.0).ok_or(Status::BadHandle)?;
        let groups = &mut q.datagrams_mut().ok_or(Status::BadValue)?.groups;
        if (groups.len() >= MAX_GROUPS || v.used.attached >= MAX_ATTACHED) && !groups.contains(&gid) {
            return Err(Status::Exhausted);
        }
        if self.multicast.attach(v.group, gid, h).ok_or(Status::Exhausted)? {
            groups.push(gid);
            v.used.attached += 1;
        }
        Ok(())
    }

    /// DETACH_MCAST.
    ///
    /// # Errors
    /// `BadHandle`, `BadValue` if the QP is not attached.
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
        if let Some(v) = self.objects.vrnic_of_qp(h).and_then(|v| self.objects.vrnics.get_mut(v.0)) {
            v.used.attached -= 1;
            self.multicast.detach(v.group, gid, h);
        }
    }

    /// Detaches QP `h` from all groups before it is removed.
    pub(crate) fn detach_all(&mut self, h: Handle<Qp>) {
        let groups = self.objects.qps.get_mut(h).and_then(Qp::datagrams_mut).map(|d| std::mem::take(&mut d.groups));
        for gid in groups.unwrap_or_default() {
            self.detach(h, gid);
        }
    }
}
