//! What sessions call their objects, and what these count for: numbers that are never used twice and that mean nothing to
//! anybody else, uses by other objects, and quotas. No command looks at another tenant's objects.

use unirdma_abi::Status;

use crate::datagram::Ah;
use crate::mr::Mr;
use crate::objects::{Cq, Names, Pd, Qp, SessionId, Srq, Used, VnicId};
use crate::rnic::{Limits, Rnic};
use crate::slab::{ByNumber, Handle};
use crate::xrc::Xrcd;

type Result<T> = std::result::Result<T, Status>;

impl Rnic {
    pub(crate) fn vnic_of(&self, s: SessionId) -> Result<VnicId> {
        self.sessions.get(s.0).map(|s| s.vnic).ok_or(Status::BadHandle)
    }

    /// `Exhausted` if the vRNIC of a session has all that it may have.
    pub(crate) fn quota(
        &self,
        s: SessionId,
        used: impl Fn(&Used) -> usize,
        max: impl Fn(&Limits) -> u32,
    ) -> Result<()> {
        let v = self.vnics.get(self.vnic_of(s)?.0).ok_or(Status::BadHandle)?;
        if used(&v.used) >= max(&v.limits) as usize { Err(Status::Exhausted) } else { Ok(()) }
    }

    /// Changes what a session's vRNIC has in use.
    pub(crate) fn count_used(&mut self, s: SessionId, f: impl FnOnce(&mut Used)) {
        if let Some(v) = self.vnic_of(s).ok().and_then(|v| self.vnics.get_mut(v.0)) {
            f(&mut v.used);
        }
    }

    /// A number for an object that session `s` is about to have.
    ///
    /// # Errors
    /// `Exhausted` after at least 2^31 of them.
    pub(crate) fn new_number(&mut self, s: SessionId) -> Result<u32> {
        self.sessions.get_mut(s.0).ok_or(Status::BadHandle)?.names.next().ok_or(Status::Exhausted)
    }

    /// What session `s` has.
    pub(crate) fn names(&mut self, s: SessionId) -> Option<&mut Names> {
        self.sessions.get_mut(s.0).map(|s| &mut s.names)
    }

    fn find<T>(&self, s: SessionId, n: u32, table: impl Fn(&Names) -> &ByNumber<Handle<T>>) -> Result<Handle<T>> {
        let names = &self.sessions.get(s.0).ok_or(Status::BadHandle)?.names;
        table(names).get(&n).copied().ok_or(Status::BadHandle)
    }

    pub(crate) fn own_pd(&self, s: SessionId, n: u32) -> Result<Handle<Pd>> {
        self.find(s, n, |t| &t.pds)
    }

    pub(crate) fn own_cq(&self, s: SessionId, n: u32) -> Result<Handle<Cq>> {
        self.find(s, n, |t| &t.cqs)
    }

    /// An MR or a window.
    pub(crate) fn own_mr(&self, s: SessionId, n: u32) -> Result<(Handle<Mr>, &Mr)> {
        let h = self.find(s, n, |t| &t.mrs)?;
        self.mrs.get(h).map(|m| (h, m)).ok_or(Status::BadHandle)
    }

    pub(crate) fn own_ah(&self, s: SessionId, n: u32) -> Result<Handle<Ah>> {
        self.find(s, n, |t| &t.ahs)
    }

    pub(crate) fn own_srq(&self, s: SessionId, n: u32) -> Result<(Handle<Srq>, &Srq)> {
        let h = self.find(s, n, |t| &t.srqs)?;
        self.srqs.get(h).map(|q| (h, q)).ok_or(Status::BadHandle)
    }

    /// An XRC domain: its handle, and which it is.
    pub(crate) fn own_xrcd(&self, s: SessionId, n: u32) -> Result<(Handle<Xrcd>, u32)> {
        let h = self.find(s, n, |t| &t.xrcds)?;
        self.xrcds.get(h).map(|x| (h, x.domain)).ok_or(Status::BadHandle)
    }

    /// A QP that the session has made, or opened.
    pub(crate) fn own_qp(&self, s: SessionId, qpn: u32) -> Result<Handle<Qp>> {
        let h = *self.qpns.get(&qpn).ok_or(Status::BadHandle)?;
        self.qps.get(h).filter(|q| q.is_open_to(s)).map(|_| h).ok_or(Status::BadHandle)
    }

    /// One object more, or less, is in a PD.
    pub(crate) fn use_pd(&mut self, pd: Handle<Pd>, more: bool) {
        if let Some(pd) = self.pds.get_mut(pd) {
            change(&mut pd.uses, more);
        }
    }

    /// One queue more, or less, completes to a CQ.
    pub(crate) fn use_cq(&mut self, cq: Handle<Cq>, more: bool) {
        if let Some(cq) = self.cqs.get_mut(cq) {
            change(&mut cq.uses, more);
        }
    }

    /// One QP more, or less, takes its receives from an SRQ.
    pub(crate) fn use_srq(&mut self, srq: Handle<Srq>, more: bool) {
        if let Some(srq) = self.srqs.get_mut(srq) {
            change(&mut srq.uses, more);
        }
    }

    /// One QP or SRQ more, or less, is in an XRC domain.
    pub(crate) fn use_xrcd(&mut self, xrcd: Handle<Xrcd>, more: bool) {
        if let Some(x) = self.xrcds.get_mut(xrcd) {
            change(&mut x.uses, more);
        }
    }
}

fn change(uses: &mut u32, more: bool) {
    *uses = if more { *uses + 1 } else { uses.saturating_sub(1) };
}
