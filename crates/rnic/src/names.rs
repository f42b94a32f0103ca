//! The numbers by which sessions call their objects, the uses of an object by others, and quotas. A session uses no number twice,
//! and its numbers mean nothing in another session. Uses and quotas are counted when an object is made or goes, so that no
//! command has to search for them.

use unirdma_abi::Status;

use crate::datagram::Ah;
use crate::mr::Mr;
use crate::objects::{Cq, Names, Pd, Qp, SessionId, Srq, Used, VnicId};
use crate::rnic::{Limits, Rnic};
use crate::slab::{ByNumber, Handle, Slab};
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
        count_use(&mut self.pds, pd, |p| &mut p.uses, more);
    }

    /// One queue more, or less, completes to a CQ.
    pub(crate) fn use_cq(&mut self, cq: Handle<Cq>, more: bool) {
        count_use(&mut self.cqs, cq, |c| &mut c.uses, more);
    }

    /// One QP more, or less, takes its receives from an SRQ.
    pub(crate) fn use_srq(&mut self, srq: Handle<Srq>, more: bool) {
        count_use(&mut self.srqs, srq, |q| &mut q.uses, more);
    }

    /// One QP or SRQ more, or less, is in an XRC domain.
    pub(crate) fn use_xrcd(&mut self, xrcd: Handle<Xrcd>, more: bool) {
        count_use(&mut self.xrcds, xrcd, |x| &mut x.uses, more);
    }
}

fn count_use<T>(table: &mut Slab<T>, h: Handle<T>, uses: impl FnOnce(&mut T) -> &mut u32, more: bool) {
    if let Some(object) = table.get_mut(h) {
        let uses = uses(object);
        *uses = if more { *uses + 1 } else { uses.saturating_sub(1) };
    }
}
