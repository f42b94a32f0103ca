//! Shared receive queues (IBTA vol. 1, 10.2.9).

use unirdma_abi::Status;
use unirdma_formats::{AsyncEvent, QpType};
use unirdma_mem::QpRings;

use crate::objects::{SessionId, Srq};
use crate::rnic::Rnic;
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

impl Rnic {
    /// CREATE_SRQ on a ring that the device has resolved. Returns (handle, number); a number of 0 is none.
    ///
    /// # Errors
    /// `BadHandle`, `BadValue` for a limit above its size, `Exhausted` at the vRNIC's quota.
    pub fn create_srq(&mut self, s: SessionId, pd: u32, a: SrqAttr, rings: QpRings) -> Result<(u32, u32), Status> {
        self.own_pd(s, pd)?;
        if a.limit > a.max_wr {
            return Err(Status::BadValue);
        }
        let used = self.srqs.iter().filter(|(_, q)| self.same_vnic(s)(q.owner)).count();
        self.quota(s, used, |l| l.max_srq)?;
        let xrc = match a.xrc {
            None => None,
            Some((xrcd, cq)) => {
                let domain = self.own_xrcd(s, xrcd)?;
                self.own_cq(s, cq)?;
                Some(XrcSrq { xrcd, domain, cq, number: self.new_srq_number() })
            }
        };
        let SrqAttr { max_wr, max_sge, limit, .. } = a;
        let srq = Srq { owner: s, pd, rings, max_wr, max_sge, cons: 0, limit, broken: false, xrc };
        let handle = self.srqs.insert_with(|_| srq).ok_or(Status::Exhausted)?;
        let number = xrc.map_or(0, |x| x.number);
        if number != 0 {
            self.srq_numbers.insert(number, handle);
        }
        Ok((handle, number))
    }

    pub(crate) fn remove_srq(&mut self, srq: u32) {
        if let Some(x) = self.srqs.remove(srq).and_then(|q| q.xrc) {
            self.srq_numbers.remove(&x.number);
        }
    }

    pub(crate) fn own_srq(&self, s: SessionId, srq: u32) -> Result<&Srq, Status> {
        self.srqs.get(srq).filter(|q| q.owner == s).ok_or(Status::BadHandle)
    }

    /// DESTROY_SRQ.
    ///
    /// # Errors
    /// `Busy` while QPs use it.
    pub fn destroy_srq(&mut self, s: SessionId, srq: u32) -> Result<(), Status> {
        self.own_srq(s, srq)?;
        // The target of an XRC connection only uses it for each message.
        if self.qps.iter().any(|(_, q)| q.srq == Some(srq) && q.typ != QpType::XrcRecv) {
            return Err(Status::Busy);
        }
        self.remove_srq(srq);
        Ok(())
    }

    /// MODIFY_SRQ: arms the limit event; 0 disarms it.
    ///
    /// # Errors
    /// `BadValue` for a limit above its size.
    pub fn modify_srq(&mut self, s: SessionId, srq: u32, limit: u32) -> Result<(), Status> {
        if limit > self.own_srq(s, srq)?.max_wr {
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
        self.own_srq(s, srq)?;
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
    pub fn query_srq(&self, s: SessionId, srq: u32) -> Result<SrqAttr, Status> {
        self.own_srq(s, srq).map(|q| SrqAttr {
            max_wr: q.max_wr,
            max_sge: q.max_sge,
            limit: q.limit,
            xrc: q.xrc.map(|x| (x.xrcd, x.cq)),
        })
    }

    /// Raises the limit event, once, if it is due.
    pub(crate) fn check_srq_limit(&mut self, srq: u32) {
        let Some(q) = self.srqs.get_mut(srq).filter(|q| q.limit > 0 && !q.broken) else { return };
        if q.rings.rq_pending(q.cons).is_ok_and(|left| left < q.limit) {
            q.limit = 0;
            let owner = q.owner;
            self.emit(owner, AsyncEvent::SrqLimitReached, srq);
        }
    }

    /// An index jumped: the SRQ is lost, and the QPs that use it.
    pub(crate) fn break_srq(&mut self, srq: u32) {
        let Some(q) = self.srqs.get_mut(srq) else { return };
        if !std::mem::replace(&mut q.broken, true) {
            let owner = q.owner;
            self.emit(owner, AsyncEvent::SrqErr, srq);
        }
    }
}
