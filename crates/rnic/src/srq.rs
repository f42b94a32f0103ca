//! Shared receive queues (IBTA vol. 1, 10.2.9).

use unirdma_abi::Status;
use unirdma_formats::AsyncEvent;
use unirdma_mem::QpRings;

use crate::objects::{SessionId, Srq};
use crate::rnic::Rnic;
use crate::slab::Handle;
use crate::xrc::XrcSrq;

/// What an SRQ is: receives, SGEs of one, and the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SrqAttr {
    /// Receives that it holds.
    pub max_wr: u32,
    /// SGEs of one receive.
    pub max_sge: u32,
    /// An event is raised when fewer receives than this are left; 0: none.
    pub limit: u32,
    /// XRC domain and CQ, for an XRC SRQ.
    pub xrc: Option<(u32, u32)>,
}

/// An SRQ as QUERY_SRQ shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SrqInfo {
    /// As in [`SrqAttr`].
    pub max_wr: u32,
    /// As in [`SrqAttr`].
    pub max_sge: u32,
    /// As in [`SrqAttr`].
    pub limit: u32,
}

impl Rnic {
    /// CREATE_SRQ on a ring that the device has resolved. Returns (handle, number); a number of 0 is none.
    ///
    /// # Errors
    /// `BadHandle`, `BadValue` for a limit above its size, `Exhausted` at the vRNIC's quota.
    pub fn create_srq(&mut self, s: SessionId, pd: u32, a: SrqAttr, rings: QpRings) -> Result<(u32, u32), Status> {
        let pd = self.own_pd(s, pd)?;
        if a.limit > a.max_wr {
            return Err(Status::BadValue);
        }
        self.quota(s, |u| u.srqs, |l| l.max_srq)?;
        let xrc = match a.xrc {
            None => None,
            Some((xrcd, cq)) => {
                let ((xrcd, domain), cq) = (self.own_xrcd(s, xrcd)?, self.own_cq(s, cq)?);
                Some(XrcSrq { xrcd, domain, cq, number: self.new_srq_number() })
            }
        };
        let SrqAttr { max_wr, max_sge, limit, .. } = a;
        let number = self.new_number(s)?;
        let srq = Srq { owner: s, number, uses: 0, pd, rings, max_wr, max_sge, cons: 0, limit, broken: false, xrc };
        let h = self.srqs.insert(srq).ok_or(Status::Exhausted)?;
        self.names(s).and_then(|n| n.srqs.insert(number, h));
        self.count_used(s, |u| u.srqs += 1);
        self.use_pd(pd, true);
        if let Some(x) = xrc {
            self.use_cq(x.cq, true);
            self.use_xrcd(x.xrcd, true);
            self.srq_numbers.insert(x.number, h);
        }
        Ok((number, xrc.map_or(0, |x| x.number)))
    }

    pub(crate) fn remove_srq(&mut self, srq: Handle<Srq>) {
        let Some(q) = self.srqs.remove(srq) else { return };
        self.names(q.owner).and_then(|n| n.srqs.remove(&q.number));
        self.count_used(q.owner, |u| u.srqs -= 1);
        self.use_pd(q.pd, false);
        if let Some(x) = q.xrc {
            self.use_cq(x.cq, false);
            self.use_xrcd(x.xrcd, false);
            self.srq_numbers.remove(&x.number);
        }
    }

    /// DESTROY_SRQ.
    ///
    /// # Errors
    /// `Busy` while QPs use it, or a message for it is under way at the target of an XRC connection.
    pub fn destroy_srq(&mut self, s: SessionId, srq: u32) -> Result<(), Status> {
        let (h, q) = self.own_srq(s, srq)?;
        if q.uses > 0 {
            return Err(Status::Busy);
        }
        self.remove_srq(h);
        Ok(())
    }

    /// MODIFY_SRQ: arms the limit event; 0 disarms it.
    ///
    /// # Errors
    /// `BadValue` for a limit above its size.
    pub fn modify_srq(&mut self, s: SessionId, srq: u32, limit: u32) -> Result<(), Status> {
        let (srq, q) = self.own_srq(s, srq)?;
        if limit > q.max_wr {
            return Err(Status::BadValue);
        }
        if let Some(q) = self.srqs.get_mut(srq) {
            q.limit = limit;
        }
        self.check_srq_limit(srq);
        Ok(())
    }

    /// RESIZE_SRQ: receives are taken from another ring, which holds those that wait at the same indices.
    ///
    /// # Errors
    /// `BadValue` if more wait than it holds, or its limit is above its size; `BadState` for an SRQ that is lost.
    pub fn resize_srq(&mut self, s: SessionId, srq: u32, rings: QpRings) -> Result<(), Status> {
        let (srq, _) = self.own_srq(s, srq)?;
        let q = self.srqs.get_mut(srq).filter(|q| !q.broken).ok_or(Status::BadState)?;
        let size = rings.layout().rq_entries;
        if q.limit > size || rings.rq_pending(q.cons).is_err() {
            return Err(Status::BadValue);
        }
        (q.rings, q.max_wr) = (rings, size);
        Ok(())
    }

    /// QUERY_SRQ.
    ///
    /// # Errors
    /// `BadHandle` if the session has no such SRQ.
    pub fn query_srq(&self, s: SessionId, srq: u32) -> Result<SrqInfo, Status> {
        self.own_srq(s, srq).map(|(_, q)| SrqInfo { max_wr: q.max_wr, max_sge: q.max_sge, limit: q.limit })
    }

    /// Raises the limit event, once, if it is due.
    pub(crate) fn check_srq_limit(&mut self, srq: Handle<Srq>) {
        let Some(q) = self.srqs.get_mut(srq).filter(|q| q.limit > 0 && !q.broken) else { return };
        if q.rings.rq_pending(q.cons).is_ok_and(|left| left < q.limit) {
            q.limit = 0;
            let (owner, number) = (q.owner, q.number);
            self.emit(owner, AsyncEvent::SrqLimitReached, number);
        }
    }

    /// An index jumped: the SRQ is lost, and the QPs that use it.
    pub(crate) fn break_srq(&mut self, srq: Handle<Srq>) {
        let Some(q) = self.srqs.get_mut(srq) else { return };
        if !std::mem::replace(&mut q.broken, true) {
            let (owner, number) = (q.owner, q.number);
            self.emit(owner, AsyncEvent::SrqErr, number);
        }
    }
}
