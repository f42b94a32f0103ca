//! The control path: every handle is checked for existence and owner, every value for its range.

mod fast_reg;
mod multicast;
pub(crate) mod qp;
mod srq;
mod vf;
mod window;
mod xrc;

use unirdma_abi as abi;
use unirdma_abi::Status;
use unirdma_formats::net::{Flow, HOP_LIMIT, source_port};
use unirdma_formats::{ECN, Gid, access, class_of, rate_kbps};
use unirdma_mem::{CqRing, Span};

use crate::core::Core;
use crate::executor::Object;
use crate::objects::{Ah, Backing, BounceMemory, Cq, Moderation, Mr, Pd, Served, SessionId, Target, VrnicId, is_range};
use crate::slab::Handle;

type Result<T> = std::result::Result<T, Status>;

impl Core {
    /// CREATE_PD.
    ///
    /// # Errors
    /// `Exhausted` at the vRNIC's quota.
    pub fn create_pd(&mut self, s: SessionId) -> Result<u32> {
        self.objects.quota(s, |u| u.pds, |l| l.max_pd)?;
        let number = self.objects.new_number(s)?;
        let h = self.objects.pds.insert(Pd::new(s, number)).ok_or(Status::Exhausted)?;
        self.objects.names(s).and_then(|n| n.pds.insert(number, h));
        self.objects.count_used(s, |u| u.pds += 1);
        self.made(Object::Pd(h)).inspect_err(|_| self.objects.remove_pd(h))?;
        Ok(number)
    }

    /// DESTROY_PD. Null MRs go with it.
    ///
    /// # Errors
    /// `Busy` while it has other MRs, AHs, SRQs or QPs.
    pub fn destroy_pd(&mut self, s: SessionId, pd: u32) -> Result<()> {
        let h = self.objects.own_pd(s, pd)?;
        let p = self.objects.pds.get_mut(h).ok_or(Status::BadHandle)?;
        if p.uses > 0 {
            return Err(Status::Busy);
        }
        for null in std::mem::take(&mut p.nulls).into_values() {
            self.remove(Object::Mr(null));
        }
        self.remove(Object::Pd(h));
        Ok(())
    }

    /// CREATE_CQ on a ring that the device has resolved.
    ///
    /// # Errors
    /// `Exhausted` at the vRNIC's quota.
    pub fn create_cq(&mut self, s: SessionId, ring: CqRing, comp_queue: Option<u16>) -> Result<u32> {
        self.objects.quota(s, |u| u.cqs, |l| l.max_cq)?;
        let number = self.objects.new_number(s)?;
        let cq = Cq { owner: s, number, uses: 0, ring, comp_queue, notify: 0, moderation: None, dead: false };
        let h = self.objects.cqs.insert(cq).ok_or(Status::Exhausted)?;
        self.objects.names(s).and_then(|n| n.cqs.insert(number, h));
        self.objects.count_used(s, |u| u.cqs += 1);
        self.made(Object::Cq(h)).inspect_err(|_| self.objects.remove_cq(h))?;
        Ok(number)
    }

    /// RESIZE_CQ: further completions go to another ring. If the CQ is armed, the other ring is armed too.
    ///
    /// # Errors
    /// `BadHandle`, or `BadState` for a CQ that has overrun.
    pub fn resize_cq(&mut self, s: SessionId, cq: u32, ring: CqRing) -> Result<()> {
        let cq = self.objects.own_cq(s, cq)?;
        let c = self.objects.cqs.get_mut(cq).filter(|c| !c.dead).ok_or(Status::BadState)?;
        c.notify |= c.ring.armed();
        c.ring = ring;
        Ok(())
    }

    /// MODIFY_CQ: completion events come after `count` completions or `period_us` microseconds after the first of them;
    /// at once if either is 0. Completions that wait already are reported now.
    ///
    /// # Errors
    /// `BadHandle`.
    pub fn modify_cq(&mut self, s: SessionId, cq: u32, count: u16, period_us: u16) -> Result<()> {
        let cq = self.objects.own_cq(s, cq)?;
        self.end_moderation(cq);
        let wanted = Moderation { count, period_ns: u64::from(period_us) * 1000, ..Moderation::default() };
        if let Some(c) = self.objects.cqs.get_mut(cq) {
            c.moderation = (count > 1 && period_us > 0).then_some(wanted);
        }
        Ok(())
    }

    /// DESTROY_CQ.
    ///
    /// # Errors
    /// `Busy` while QPs or XRC SRQs use it.
    pub fn destroy_cq(&mut self, s: SessionId, cq: u32) -> Result<()> {
        let h = self.objects.own_cq(s, cq)?;
        if self.objects.cqs.get(h).is_some_and(|c| c.uses > 0) {
            return Err(Status::Busy);
        }
        self.remove(Object::Cq(h));
        Ok(())
    }

    /// REQ_NOTIFY_CQ, for drivers that do not use the arm word.
    ///
    /// # Errors
    /// `BadValue` for unknown flags, `BadState` for a CQ without an event queue.
    pub fn req_notify_cq(&mut self, s: SessionId, cq: u32, flags: u32) -> Result<()> {
        let cq = self.objects.own_cq(s, cq)?;
        if self.objects.cqs.get(cq).is_none_or(|c| c.comp_queue.is_none()) {
            return Err(Status::BadState);
        }
        if flags == 0 || flags & !(abi::NOTIFY_NEXT | abi::NOTIFY_SOLICITED) != 0 {
            return Err(Status::BadValue);
        }
        if let Some(c) = self.objects.cqs.get_mut(cq) {
            c.notify |= flags;
        }
        Ok(())
    }

    /// REG_USER_MR and GET_DMA_MR. `regions` are the session's memory regions that the MR lies in. Returns (handle,
    /// key); the key serves as lkey and rkey.
    ///
    /// # Errors
    /// `BadValue` for flags that do not go together, `Exhausted` at a quota.
    pub fn reg_mr(
        &mut self,
        s: SessionId,
        pd: u32,
        flags: u32,
        iova: u64,
        len: u64,
        (backing, regions): (Backing, Vec<u64>),
    ) -> Result<(u32, u32)> {
        let pd = self.objects.own_pd(s, pd)?;
        let flags = flags & !access::OPTIONAL_RANGE;
        // ibv_reg_mr(3): remote write and atomic need local write.
        let remote_store = flags & (access::REMOTE_WRITE | access::REMOTE_ATOMIC) != 0;
        if flags & !access::MR_SUPPORTED != 0 || remote_store && flags & access::LOCAL_WRITE == 0 {
            return Err(Status::BadValue);
        }
        if !is_range(iova, len) {
            return Err(Status::BadValue);
        }
        self.objects.quota(s, |u| u.mrs, |l| l.max_mr)?;
        let v = self.objects.vrnics.get(self.objects.vrnic_of(s)?.0).ok_or(Status::BadHandle)?;
        let (bytes, limit) = (v.used.mr_bytes, v.limits.max_mr_bytes);
        let mr = Mr { access: flags, iova, len, regions: regions.into(), backing, ..Mr::empty(s, pd) };
        if bytes.checked_add(mr.counted()).is_none_or(|b| b > limit) {
            return Err(Status::Exhausted);
        }
        self.make_mr(mr)
    }

    /// Makes an MR or a window. Returns its number and its key.
    fn make_mr(&mut self, mr: Mr) -> Result<(u32, u32)> {
        let (h, named) = self.objects.insert_mr(mr, &mut self.random.keys)?;
        self.made(Object::Mr(h)).inspect_err(|_| self.objects.remove_mr(h))?;
        Ok(named)
    }

    /// Removes an object, unless it is a QP ([`Core::remove_qp`]). The executor is notified before.
    pub(crate) fn remove(&mut self, object: Object) {
        self.gone(object);
        match object {
            Object::Pd(h) => self.objects.remove_pd(h),
            Object::Cq(h) => self.objects.remove_cq(h),
            Object::Srq(h) => self.objects.remove_srq(h),
            Object::Mr(h) => self.objects.remove_mr(h),
            Object::Ah(h) => self.objects.remove_ah(h),
            Object::Qp(_) => {}
        }
    }

    /// Keeps a driver's note about the way in which an MR's memory is reached.
    pub fn note_mr(&mut self, s: SessionId, mr: u32, note: u32) {
        if let Ok((h, _)) = self.objects.own_mr(s, mr)
            && let Some(m) = self.objects.mrs.get_mut(h)
        {
            m.note = note;
        }
    }

    /// QUERY_MR: the approximate number of accesses that the key of an MR has served, and of their bytes.
    ///
    /// # Errors
    /// `BadHandle` if the session has no such MR.
    pub fn query_mr(&self, s: SessionId, mr: u32) -> Result<Served> {
        let (_, m) = self.objects.own_mr(s, mr).ok().filter(|m| m.1.window.is_none()).ok_or(Status::BadHandle)?;
        Ok(m.served.clone())
    }

    /// An MR of the session that no window is bound to, and that no work request registers.
    fn plain_mr(&self, s: SessionId, mr: u32) -> Result<Handle<Mr>> {
        let h = self.free_mr(s, mr)?;
        if self.objects.mrs.get(h).is_some_and(|m| m.page_list().is_some()) { Err(Status::BadState) } else { Ok(h) }
    }

    /// An MR of the session that no window is bound to.
    fn free_mr(&self, s: SessionId, mr: u32) -> Result<Handle<Mr>> {
        let (h, m) = self.objects.own_mr(s, mr)?;
        match m.windows {
            _ if m.window.is_some() => Err(Status::BadHandle),
            0 => Ok(h),
            _ => Err(Status::Busy),
        }
    }

    /// DEREG_MR.
    ///
    /// # Errors
    /// `BadHandle` if the session has no such MR, `Busy` while windows are bound to it.
    pub fn dereg_mr(&mut self, s: SessionId, mr: u32) -> Result<()> {
        let h = self.free_mr(s, mr)?;
        self.remove(Object::Mr(h));
        Ok(())
    }

    /// EXTEND_MR: appends `len` bytes of mapped memory to an MR.
    ///
    /// # Errors
    /// `BadHandle` if the session has no such MR, `BadState` if it has no mapped memory or windows are bound to it,
    /// `BadValue` if its addresses would wrap, `Exhausted`.
    pub fn extend_mr(
        &mut self,
        s: SessionId,
        mr: u32,
        len: u64,
        (backing, regions): (Backing, Vec<u64>),
    ) -> Result<()> {
        let h = self.plain_mr(s, mr).map_err(|e| if e == Status::Busy { Status::BadState } else { e })?;
        let v = self.objects.vrnics.get(self.objects.vrnic_of(s)?.0).ok_or(Status::BadHandle)?;
        if v.used.mr_bytes.checked_add(len).is_none_or(|b| b > v.limits.max_mr_bytes) {
            return Err(Status::Exhausted);
        }
        let m = self.objects.mrs.get_mut(h).ok_or(Status::BadHandle)?;
        if len == 0 {
            return Ok(());
        }
        let whole = m.len.checked_add(len).filter(|&n| is_range(m.iova, n)).ok_or(Status::BadValue)?;
        match m.len {
            0 => m.backing = backing,
            _ => m.backing.extend(backing)?,
        }
        m.len = whole;
        let known: Vec<u64> = regions.into_iter().filter(|r| !m.regions.contains(r)).collect();
        if !known.is_empty() {
            m.regions = m.regions.iter().copied().chain(known).collect();
        }
        self.objects.count_used(s, |u| u.mr_bytes += len);
        Ok(())
    }

    /// Draws a new number for an object that the device keeps for a session.
    ///
    /// # Errors
    /// `Exhausted` after at least 2^31 numbers.
    pub fn new_number(&mut self, s: SessionId) -> Result<u32> {
        self.objects.new_number(s)
    }

    /// REREG_MR: `mr` keeps its keys and takes everything else from `by`, which is removed.
    ///
    /// # Errors
    /// `BadHandle` if the session has no such MRs, or they are one; `Busy` while windows are bound to them; `BadState`
    /// if work requests register one.
    pub fn rereg_mr(&mut self, s: SessionId, mr: u32, by: u32) -> Result<()> {
        if mr == by {
            return Err(Status::BadHandle);
        }
        let (mr, by_handle) = (self.plain_mr(s, mr)?, self.plain_mr(s, by)?);
        self.gone(Object::Mr(by_handle));
        self.gone(Object::Mr(mr));
        let new = self.objects.mrs.remove(by_handle).ok_or(Status::BadHandle)?;
        self.objects.names(s).and_then(|n| n.mrs.remove(&by));
        self.objects.leave_pd(&new);
        // `mr` has the memory of `by` now, so the bytes of `by` stay counted.
        let old = self.objects.mrs.replace(mr, new).ok_or(Status::BadHandle)?;
        self.objects.leave_pd(&old);
        self.objects.enter_pd(mr);
        self.objects.count_used(s, |u| u.remove_mr(&old));
        self.made(Object::Mr(mr)).inspect_err(|_| self.objects.remove_mr(mr))
    }

    /// CREATE_AH. The destination is looked up once, here.
    ///
    /// # Errors
    /// `BadValue` for an address vector that is not global, names no own GID or has an unknown rate, `Unreachable`,
    /// `Exhausted`.
    pub fn create_ah(&mut self, s: SessionId, pd: u32, a: &abi::AhAttr) -> Result<u32> {
        let pd = self.objects.own_pd(s, pd)?;
        self.objects.quota(s, |u| u.ahs, |l| l.max_ah)?;
        if a.is_global == 0 || a.port_num != 1 || rate_kbps(a.static_rate).is_none() {
            return Err(Status::BadValue);
        }
        let vrnic = self.objects.vrnic_of(s)?;
        let (flow, target, linked) = self.resolve_address(vrnic, a, true)?;
        if !matches!(target, Target::Many) {
            let (gid, across) = (Gid(a.grh.dgid), target.across());
            if let Target::Here(there) = target
                && self.objects.vf_of(there).is_some()
            {
                return Err(Status::Unreachable);
            }
            if !self.may_send_to(vrnic, gid, across) {
                self.count_refused(vrnic);
                return Err(Status::Unreachable);
            }
            self.note_begun(vrnic, gid, across);
        }
        let number = self.objects.new_number(s)?;
        let h = self
            .objects
            .ahs
            .insert(Ah { owner: s, number, pd, flow, target, linked, denied: false, static_rate: a.static_rate })
            .ok_or(Status::Exhausted)?;
        self.objects.names(s).and_then(|n| n.ahs.insert(number, h));
        self.objects.count_used(s, |u| u.ahs += 1);
        self.objects.use_pd(pd, true);
        self.made(Object::Ah(h)).inspect_err(|_| self.objects.remove_ah(h))?;
        Ok(number)
    }

    /// Resolves the destination of a vRNIC's datagrams: the header fields, the target, and whether there is a link.
    ///
    /// # Errors
    /// `BadValue` if the address vector names no own GID, `Unreachable` if `must` is set and nobody has the destination
    /// GID.
    pub(crate) fn resolve_address(&self, vrnic: VrnicId, to: &abi::AhAttr, must: bool) -> Result<(Flow, Target, bool)> {
        let (v, grh) = (self.objects.vrnics.get(vrnic.0).ok_or(Status::BadHandle)?, &to.grh);
        let own = v.gid(grh.sgid_index);
        let linked = v.is_linked(own);
        let (own, dgid) = (own.ok_or(Status::BadValue)?, Gid(grh.dgid));
        if must && !self.is_reachable(v.group, dgid) {
            return Err(Status::Unreachable);
        }
        let hop_limit = if grh.hop_limit == 0 { HOP_LIMIT } else { grh.hop_limit };
        let traffic_class = class_of(grh.traffic_class, to.sl) | grh.traffic_class & ECN;
        let flow = Flow { traffic_class, hop_limit, ..Flow::roce(own, dgid) };
        let port = source_port(self.net.first_port, grh.flow_label, own.low_bits(), dgid.low_bits());
        Ok((flow, self.target_of(vrnic, &flow, port), linked))
    }

    /// DESTROY_AH. Datagrams that were posted with it and not sent yet fail: ask [`crate::Core::is_behind`] before.
    ///
    /// # Errors
    /// `BadHandle` if the session has no such AH.
    pub fn destroy_ah(&mut self, s: SessionId, ah: u32) -> Result<()> {
        let h = self.objects.own_ah(s, ah)?;
        self.remove(Object::Ah(h));
        Ok(())
    }

    /// SET_STAGE: gives a session its stage, for as long as the session exists.
    ///
    /// # Errors
    /// `BadAddress` for a window that cannot be a stage, `BadState` if the session has a stage, `Exhausted`.
    pub fn set_stage(&mut self, s: SessionId, span: Span) -> Result<()> {
        let session = self.objects.sessions.get_mut(s.0).ok_or(Status::BadHandle)?;
        if session.stage.is_some() {
            return Err(Status::BadState);
        }
        let v = self.objects.vrnics.get(session.vrnic.0).ok_or(Status::BadHandle)?;
        let mut stage = BounceMemory::new(span).ok_or(Status::BadAddress)?;
        if !stage.charge(&v.rooms.others) {
            return Err(Status::Exhausted);
        }
        session.stage = Some(stage);
        Ok(())
    }
}
