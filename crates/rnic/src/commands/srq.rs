//! Shared receive queues (IBTA vol. 1, 10.2.9).

use unirdma_abi::Status;
use unirdma_mem::QpRings;

use super::Result;
use crate::core::Core;
use crate::executor::Object;
use crate::objects::{SessionId, Srq, SrqAttr, SrqInfo, XrcSrq};

impl Core {
    /// CREATE_SRQ on a ring that the device has resolved. Returns (handle, number); a number of 0 means that there is
    /// none.
    ///
    /// # Errors
    /// `BadHandle`, `BadValue` for a limit above its size, `Exhausted` at the vRNIC's quota.
    pub fn create_srq(&mut self, s: SessionId, pd: u32, a: SrqAttr, rings: QpRings) -> Result<(u32, u32)> {
        let pd = self.objects.own_pd(s, pd)?;
        if a.limit > a.max_wr {
            return Err(Status::BadValue);
        }
        self.objects.quota(s, |u| u.srqs, |l| l.max_srq)?;
        let xrc = match a.xrc {
            None => None,
            Some((xrcd, cq)) => {
                let ((xrcd, domain), cq) = (self.objects.own_xrcd(s, xrcd)?, self.objects.own_cq(s, cq)?);
                Some(XrcSrq { xrcd, domain, cq, number: self.objects.new_srq_number(&mut self.random.srq_numbers) })
            }
        };
        let SrqAttr { max_wr, max_sge, limit, .. } = a;
        let number = self.objects.new_number(s)?;
        let srq = Srq { owner: s, number, uses: 0, pd, rings, max_wr, max_sge, cons: 0, limit, broken: false, xrc };
        let h = self.objects.srqs.insert(srq).ok_or(Status::Exhausted)?;
        self.objects.names(s).and_then(|n| n.srqs.insert(number, h));
        self.objects.count_used(s, |u| u.srqs += 1);
        self.objects.use_pd(pd, true);
        if let Some(x) = xrc {
            self.objects.use_cq(x.cq, true);
            self.objects.use_xrcd(x.xrcd, true);
            self.objects.srq_numbers.insert(x.number, h);
        }
        self.made(Object::Srq(h)).inspect_err(|_| self.objects.remove_srq(h))?;
        Ok((number, xrc.map_or(0, |x| x.number)))
    }

    /// DESTROY_SRQ.
    ///
    /// # Errors
    /// `Busy` while QPs use it, or a message for it is under way at the target of an XRC connection.
    pub fn destroy_srq(&mut self, s: SessionId, srq: u32) -> Result<()> {
        let (h, q) = self.objects.own_srq(s, srq)?;
        if q.uses > 0 {
            return Err(Status::Busy);
        }
        self.remove(Object::Srq(h));
        Ok(())
    }

    /// MODIFY_SRQ: arms the limit event; 0 disarms it.
    ///
    /// # Errors
    /// `BadValue` for a limit above its size.
    pub fn modify_srq(&mut self, s: SessionId, srq: u32, limit: u32) -> Result<()> {
        let (srq, q) = self.objects.own_srq(s, srq)?;
        if limit > q.max_wr {
            return Err(Status::BadValue);
        }
        if let Some(q) = self.objects.srqs.get_mut(srq) {
            q.limit = limit;
        }
        self.check_srq_limit(srq);
        Ok(())
    }

    /// RESIZE_SRQ: replaces the ring. The new one holds the waiting receives at the same indices.
    ///
    /// # Errors
    /// `BadValue` if more receives wait than the ring holds, or the limit is above its size; `BadState` for an SRQ that
    /// has failed.
    pub fn resize_srq(&mut self, s: SessionId, srq: u32, rings: QpRings) -> Result<()> {
        let (srq, _) = self.objects.own_srq(s, srq)?;
        let q = self.objects.srqs.get_mut(srq).filter(|q| !q.broken).ok_or(Status::BadState)?;
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
    pub fn query_srq(&self, s: SessionId, srq: u32) -> Result<SrqInfo> {
        self.objects.own_srq(s, srq).map(|(_, q)| SrqInfo { max_wr: q.max_wr, max_sge: q.max_sge, limit: q.limit })
    }
}
