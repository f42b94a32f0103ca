//! The control path: every handle is checked for existence and owner, every value for its range.

use std::sync::Arc;

use unirdma_abi as abi;
use unirdma_abi::Status;
use unirdma_formats::net::source_port;
use unirdma_formats::{Gid, Psn, QpState, QpType, access, attr_mask, mtu_bytes};
use unirdma_mem::{Bell, CqRing, QpRings};

use crate::attr;
use crate::datagram::Backlog;
use crate::mr::{Backing, Mr, Resolve};
use crate::objects::{Counters, Cq, CreateQp, Moderation, Pd, Qp, SessionId, Srq, VnicId, Wait};
use crate::pace::Pace;
use crate::rnic::Rnic;
use crate::wire::{DSCP, Path, Wire};

type Result<T> = std::result::Result<T, Status>;

impl Rnic {
    pub(crate) fn vnic_of(&self, s: SessionId) -> Result<VnicId> {
        self.sessions.get(s.0).map(|s| s.vnic).ok_or(Status::BadHandle)
    }

    pub(crate) fn quota(&self, s: SessionId, used: usize, max: impl Fn(&crate::Limits) -> u32) -> Result<()> {
        let v = self.vnics.get(self.vnic_of(s)?.0).ok_or(Status::BadHandle)?;
        if used >= max(&v.limits) as usize { Err(Status::Exhausted) } else { Ok(()) }
    }

    pub(crate) fn same_vnic(&self, s: SessionId) -> impl Fn(SessionId) -> bool + '_ {
        let vnic = self.vnic_of(s).ok();
        move |o| self.sessions.get(o.0).map(|x| x.vnic) == vnic
    }

    /// Gives a session its doorbell page. Once.
    ///
    /// # Errors
    /// `BadState` if it has one.
    pub fn set_doorbell(&mut self, s: SessionId, bell: Bell) -> Result<()> {
        let hints = self.hints;
        let session = self.sessions.get_mut(s.0).ok_or(Status::BadHandle)?;
        if session.bell.is_some() {
            return Err(Status::BadState);
        }
        bell.set_hints(hints);
        let parked = bell.park();
        session.bell = Some(bell);
        session.parked = true;
        if !parked {
            self.unpark(s, self.now);
        }
        Ok(())
    }

    /// Tells the RNIC what a session's memory is now, for GET_DMA_MR.
    pub fn set_memory(&mut self, s: SessionId, memory: Arc<dyn Resolve>) {
        if let Some(session) = self.sessions.get_mut(s.0) {
            session.memory = Some(memory);
        }
    }

    /// CREATE_PD.
    ///
    /// # Errors
    /// `Exhausted` at the vRNIC's quota.
    pub fn create_pd(&mut self, s: SessionId) -> Result<u32> {
        let used = self.pds.iter().filter(|(_, p)| self.same_vnic(s)(p.owner)).count();
        self.quota(s, used, |l| l.max_pd)?;
        self.pds.insert_with(|_| Pd { owner: s }).ok_or(Status::Exhausted)
    }

    pub(crate) fn own_pd(&self, s: SessionId, pd: u32) -> Result<()> {
        self.pds.get(pd).filter(|p| p.owner == s).map(|_| ()).ok_or(Status::BadHandle)
    }

    /// DESTROY_PD.
    ///
    /// # Errors
    /// `Busy` while it has MRs, AHs, SRQs or QPs.
    pub fn destroy_pd(&mut self, s: SessionId, pd: u32) -> Result<()> {
        self.own_pd(s, pd)?;
        let used = self.mrs.iter().any(|m| m.pd == pd)
            || self.ahs.iter().any(|(_, a)| a.pd == pd)
            || self.srqs.iter().any(|(_, a)| a.pd == pd)
            || self.qps.iter().any(|(_, q)| q.pd == pd && q.typ != QpType::XrcRecv);
        if used {
            return Err(Status::Busy);
        }
        self.pds.remove(pd);
        Ok(())
    }

    /// CREATE_CQ on a ring that the device has resolved.
    ///
    /// # Errors
    /// `Exhausted` at the vRNIC's quota.
    pub fn create_cq(&mut self, s: SessionId, ring: CqRing, comp_queue: Option<u16>) -> Result<u32> {
        let used = self.cqs.iter().filter(|(_, c)| self.same_vnic(s)(c.owner)).count();
        self.quota(s, used, |l| l.max_cq)?;
        let cq = Cq { owner: s, ring, comp_queue, notify: 0, moderation: None, dead: false };
        self.cqs.insert_with(|_| cq).ok_or(Status::Exhausted)
    }

    pub(crate) fn own_cq(&self, s: SessionId, cq: u32) -> Result<&Cq> {
        self.cqs.get(cq).filter(|c| c.owner == s).ok_or(Status::BadHandle)
    }

    /// RESIZE_CQ: further completions go to another ring; an arming that was not served yet holds for it.
    ///
    /// # Errors
    /// `BadHandle`, or `BadState` for a CQ that has overrun.
    pub fn resize_cq(&mut self, s: SessionId, cq: u32, ring: CqRing) -> Result<()> {
        self.own_cq(s, cq)?;
        let c = self.cqs.get_mut(cq).filter(|c| !c.dead).ok_or(Status::BadState)?;
        c.notify |= c.ring.armed();
        c.ring = ring;
        Ok(())
    }

    /// MODIFY_CQ: completion events come after `count` completions or `period_us` microseconds after the first of them;
    /// at once if one of both is 0. What waits already is reported now.
    ///
    /// # Errors
    /// `BadHandle`.
    pub fn modify_cq(&mut self, s: SessionId, cq: u32, count: u16, period_us: u16) -> Result<()> {
        self.own_cq(s, cq)?;
        self.end_moderation(cq);
        let wanted = Moderation { count, period_ns: u64::from(period_us) * 1000, ..Moderation::default() };
        if let Some(c) = self.cqs.get_mut(cq) {
            c.moderation = (count > 1 && period_us > 0).then_some(wanted);
        }
        Ok(())
    }

    /// DESTROY_CQ.
    ///
    /// # Errors
    /// `Busy` while QPs or XRC SRQs use it.
    pub fn destroy_cq(&mut self, s: SessionId, cq: u32) -> Result<()> {
        self.own_cq(s, cq)?;
        let of_qp = |q: &Qp| (q.send_cq == cq || q.recv_cq == cq) && q.typ != QpType::XrcRecv;
        let of_srq = |q: &Srq| q.xrc.is_some_and(|x| x.cq == cq);
        if self.qps.iter().any(|(_, q)| of_qp(q)) || self.srqs.iter().any(|(_, q)| of_srq(q)) {
            return Err(Status::Busy);
        }
        self.cqs.remove(cq);
        Ok(())
    }

    /// REQ_NOTIFY_CQ, for drivers that do not use the arm word.
    ///
    /// # Errors
    /// `BadValue` for unknown flags, `BadState` for a CQ without an event queue.
    pub fn req_notify_cq(&mut self, s: SessionId, cq: u32, flags: u32) -> Result<()> {
        if self.own_cq(s, cq)?.comp_queue.is_none() {
            return Err(Status::BadState);
        }
        if flags == 0 || flags & !(abi::NOTIFY_NEXT | abi::NOTIFY_SOLICITED) != 0 {
            return Err(Status::BadValue);
        }
        if let Some(c) = self.cqs.get_mut(cq) {
            c.notify |= flags;
        }
        Ok(())
    }

    /// REG_USER_MR and GET_DMA_MR. `regions` are the session's memory regions below it.
    /// Returns (handle, key); the key serves as lkey and rkey.
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
        backing: Backing,
        regions: Vec<u64>,
    ) -> Result<(u32, u32)> {
        self.own_pd(s, pd)?;
        let flags = flags & !access::OPTIONAL_RANGE;
        // ibv_reg_mr(3): remote write and atomic need local write.
        let remote_store = flags & (access::REMOTE_WRITE | access::REMOTE_ATOMIC) != 0;
        if flags & !access::MR_SUPPORTED != 0 || remote_store && flags & access::LOCAL_WRITE == 0 {
            return Err(Status::BadValue);
        }
        if iova.checked_add(len).is_none() {
            return Err(Status::BadValue);
        }
        let same = self.same_vnic(s);
        let (count, bytes) = self.mrs.used(&same);
        drop(same);
        self.quota(s, count, |l| l.max_mr)?;
        let vnic = self.vnic_of(s)?;
        let limit = self.vnics.get(vnic.0).map_or(0, |v| v.limits.max_mr_bytes);
        let away = self.sessions.get(s.0).is_some_and(|s| s.away != 0);
        let mr = Mr { access: flags, iova, len, regions: regions.into(), backing, away, ..Mr::empty(s, pd) };
        if bytes.checked_add(mr.counted()).is_none_or(|b| b > limit) {
            return Err(Status::Exhausted);
        }
        self.mrs.insert(mr).ok_or(Status::Exhausted)
    }

    /// Keeps what a driver says of the way that its MR's memory goes.
    pub fn note_mr(&mut self, mr: u32, note: u32) {
        if let Some(m) = self.mrs.get_mut(mr) {
            m.note = note;
        }
    }

    /// An MR of the session that no window is bound to.
    fn free_mr(&self, s: SessionId, mr: u32) -> Result<()> {
        let m = self.mrs.get(mr).filter(|m| m.owner == s && m.window.is_none()).ok_or(Status::BadHandle)?;
        if m.windows > 0 { Err(Status::Busy) } else { Ok(()) }
    }

    /// DEREG_MR.
    ///
    /// # Errors
    /// `BadHandle` if the session has no such MR, `Busy` while windows are bound to it.
    pub fn dereg_mr(&mut self, s: SessionId, mr: u32) -> Result<()> {
        self.free_mr(s, mr)?;
        self.mrs.remove(mr);
        Ok(())
    }

    /// REREG_MR: `mr` becomes what `by` is, and keeps its keys; `by` is gone.
    ///
    /// # Errors
    /// `BadHandle` if the session has no such MRs, or they are one; `Busy` while windows are bound to them.
    pub fn rereg_mr(&mut self, s: SessionId, mr: u32, by: u32) -> Result<()> {
        if mr == by {
            return Err(Status::BadHandle);
        }
        self.free_mr(s, mr)?;
        self.free_mr(s, by)?;
        if let Some(new) = self.mrs.remove(by) {
            self.mrs.replace(mr, new);
        }
        Ok(())
    }

    /// A memory region of the session is gone: MRs in it grant nothing any more (X28).
    pub fn revoke_region(&mut self, s: SessionId, region: u64) {
        for h in self.mrs.handles(|m| m.owner == s && m.regions.contains(&region)) {
            match self.mrs.get(h).and_then(|m| m.window) {
                Some(_) => self.unbind(h),
                None => drop(self.mrs.remove(h)),
            }
        }
    }

    /// CREATE_QP. Returns (QPN, doorbell slot).
    ///
    /// # Errors
    /// `Unsupported` for a type that is not offered, `BadHandle`, or `Exhausted` at a quota.
    pub fn create_qp(&mut self, s: SessionId, typ: u8, c: CreateQp) -> Result<(u32, u32)> {
        let typ = QpType::from_raw(typ.into()).ok_or(Status::Unsupported)?;
        let xrcd = match (typ, c.xrcd) {
            (QpType::XrcRecv, Some(xrcd)) => Some((xrcd, self.own_xrcd(s, xrcd)?)),
            (QpType::XrcRecv, None) => return Err(Status::BadValue),
            _ => {
                self.own_pd(s, c.pd)?;
                self.own_cq(s, c.send_cq)?;
                self.own_cq(s, c.recv_cq)?;
                None
            }
        };
        if let Some(srq) = c.srq {
            self.own_srq(s, srq)?;
        }
        let vnic = self.vnic_of(s)?;
        let used = self.qps.iter().filter(|(_, q)| q.vnic == vnic).count();
        self.quota(s, used, |l| l.max_qp)?;
        let session = self.sessions.get_mut(s.0).ok_or(Status::BadHandle)?;
        if session.bell.is_none() {
            return Err(Status::BadState);
        }
        let slot = match session.free_slots.pop() {
            Some(slot) => slot,
            None if session.slots.len() < abi::MAX_QP as usize => {
                session.slots.push(None);
                session.slots.len() as u32 - 1
            }
            None => return Err(Status::Exhausted),
        };
        // QPNs are random and unique on the host; 0 and 1 are the management QPs.
        let qpn = loop {
            let n = self.rng.next_u64() as u32 & unirdma_formats::Qpn::MASK;
            if n > 1 && !self.qpns.contains_key(&n) {
                break n;
            }
        };
        let of_target = |handle: u32| if xrcd.is_some() { NOBODY } else { handle };
        let qp = Qp {
            owner: s,
            openers: Vec::new(),
            memory: s,
            xrcd,
            vnic,
            pd: of_target(c.pd),
            qpn,
            typ,
            slot,
            sig_all: c.sig_all,
            send_cq: of_target(c.send_cq),
            recv_cq: of_target(c.recv_cq),
            srq: c.srq,
            cap: c.cap,
            rings: c.rings,
            state: QpState::Reset,
            attr: abi::QpAttr::default(),
            sq_cons: 0,
            rq_cons: 0,
            sq_psn: Psn::default(),
            rq_psn: Psn::default(),
            mtu: 1024,
            peer_vnic: None,
            own: None,
            linked: self.is_up(vnic),
            peer: None,
            work: Some(Box::default()),
            busy: false,
            recv: Some(Box::default()),
            receiving: false,
            wait: Wait::No,
            timer: 0,
            queued: false,
            broken: false,
            established: false,
            wire: None,
            pace: Pace::default(),
            backlog: Backlog::default(),
            counters: Counters::default(),
        };
        let Some(h) = self.qps.insert_with(|_| qp) else {
            return Err(Status::Exhausted);
        };
        self.qpns.insert(qpn, h);
        if let Some(session) = self.sessions.get_mut(s.0) {
            session.slots[slot as usize] = Some(h);
        }
        Ok((qpn, slot))
    }

    pub(crate) fn own_qp(&self, s: SessionId, qpn: u32) -> Result<u32> {
        let h = *self.qpns.get(&qpn).ok_or(Status::BadHandle)?;
        self.qps.get(h).filter(|q| q.is_open_to(s)).map(|_| h).ok_or(Status::BadHandle)
    }

    /// DESTROY_QP. One that others have opened lives on for them.
    ///
    /// # Errors
    /// `BadHandle` if the session has no such QP.
    pub fn destroy_qp(&mut self, s: SessionId, qpn: u32) -> Result<()> {
        let h = self.own_qp(s, qpn)?;
        self.leave_qp(h, s);
        Ok(())
    }

    pub(crate) fn remove_qp(&mut self, h: u32) {
        self.acknowledge_all(h);
        self.unstage(h);
        self.detach_all(h);
        let Some(q) = self.qps.remove(h) else { return };
        self.qpns.remove(&q.qpn);
        if let Some(s) = self.sessions.get_mut(q.owner.0) {
            s.free_slot(q.slot);
        }
    }

    /// OPEN_QP: `s` shares the target of an XRC connection that somebody made in this domain (`ibv_open_qp(3)`).
    ///
    /// # Errors
    /// `BadHandle` for the domain, `BadValue` if there is no such QP in it.
    pub fn open_qp(&mut self, s: SessionId, xrcd: u32, qpn: u32) -> Result<()> {
        let domain = self.own_xrcd(s, xrcd)?;
        let h = *self.qpns.get(&qpn).ok_or(Status::BadValue)?;
        let q = self.qps.get_mut(h).filter(|q| q.xrcd.is_some_and(|x| x.1 == domain)).ok_or(Status::BadValue)?;
        q.openers.push((s, xrcd));
        Ok(())
    }

    /// `s` uses QP `h` no more. It goes with the last one that does; true if `s` uses it still.
    pub(crate) fn leave_qp(&mut self, h: u32, s: SessionId) -> bool {
        let Some(q) = self.qps.get_mut(h) else { return false };
        match q.openers.iter().position(|o| o.0 == s) {
            Some(at) => drop(q.openers.swap_remove(at)),
            None if q.openers.is_empty() => {
                self.remove_qp(h);
                return false;
            }
            None => {
                // The doorbell bit goes: nothing is posted to such a QP.
                let (heir, xrcd) = q.openers.swap_remove(0);
                let slot = std::mem::replace(&mut q.slot, NO_SLOT);
                (q.owner, q.xrcd) = (heir, q.xrcd.map(|x| (xrcd, x.1)));
                if let Some(s) = self.sessions.get_mut(s.0) {
                    s.free_slot(slot);
                }
            }
        }
        self.qps.get(h).is_some_and(|q| q.is_open_to(s))
    }

    /// RESIZE_QP: the rings, already checked, hold what waited in those before, at the same indices.
    ///
    /// # Errors
    /// `BadHandle` if the session has no such QP, `BadState` if it is lost, `BadValue` if the rings do not hold what waits.
    pub fn resize_qp(&mut self, s: SessionId, qpn: u32, rings: QpRings) -> Result<()> {
        let h = self.own_qp(s, qpn)?;
        let q = self.qps.get_mut(h).filter(|q| q.owner == s && !q.broken).ok_or(Status::BadState)?;
        let layout = *rings.layout();
        // Those under way are still in the ring: their slots are freed in order.
        let fits = rings.sq_pending(q.sq_cons).is_ok() && rings.rq_pending(q.rq_cons).is_ok();
        if !fits || layout.sq_stride != q.rings.layout().sq_stride || layout.rq_stride != q.rings.layout().rq_stride {
            return Err(Status::BadValue);
        }
        (q.cap.max_send_wr, q.cap.max_recv_wr) = (layout.sq_entries, layout.rq_entries);
        q.rings = rings;
        Ok(())
    }

    /// QUERY_QP: the attributes as they are now.
    ///
    /// # Errors
    /// `BadHandle` if the session has no such QP.
    pub fn query_qp(&self, s: SessionId, qpn: u32) -> Result<abi::QpAttr> {
        let q = self.qps.get(self.own_qp(s, qpn)?).ok_or(Status::BadHandle)?;
        Ok(abi::QpAttr {
            qp_state: q.state as u8,
            cur_qp_state: q.state as u8,
            sq_psn: q.sq_psn.get(),
            rq_psn: q.rq_psn.get(),
            cap: q.cap,
            sq_draining: u8::from(q.state == QpState::Sqd && q.is_sending()),
            ..q.attr
        })
    }

    /// MODIFY_QP: all attributes are checked before any is changed.
    ///
    /// # Errors
    /// `BadState` for a transition that does not exist or takes other attributes, `BadValue` for a
    /// value out of range, `Unreachable` if no vRNIC of the group has the destination GID.
    pub fn modify_qp(&mut self, s: SessionId, qpn: u32, mask: u32, a: &abi::QpAttr) -> Result<()> {
        use attr_mask as m;
        let h = self.own_qp(s, qpn)?;
        let vnic = self.vnic_of(s)?;
        let q = self.qps.get(h).ok_or(Status::BadHandle)?;
        let given = |bit: u32| mask & bit != 0;
        let raw = |v: u8| QpState::from_raw(v.into()).ok_or(Status::BadValue);
        if given(m::CUR_STATE) && raw(a.cur_qp_state)? != q.state {
            return Err(Status::BadState);
        }
        let to = if given(m::STATE) { raw(a.qp_state)? } else { q.state };
        if !attr::allowed(q.typ, q.state, to, mask) {
            return Err(Status::BadState);
        }
        let v = self.vnics.get(vnic.0).ok_or(Status::BadHandle)?;
        let bad = given(m::PORT) && a.port_num != 1
            || given(m::PKEY_INDEX) && a.pkey_index != 0
            || given(m::PATH_MTU) && mtu_bytes(a.path_mtu).is_none()
            || given(m::TIMEOUT) && a.timeout > 31
            || given(m::RETRY_CNT) && a.retry_cnt > 7
            || given(m::RNR_RETRY) && a.rnr_retry > 7
            || given(m::MIN_RNR_TIMER) && a.min_rnr_timer > 31
            || given(m::MAX_QP_RD_ATOMIC) && a.max_rd_atomic > MAX_RD_ATOMIC
            || given(m::MAX_DEST_RD_ATOMIC) && a.max_dest_rd_atomic > MAX_RD_ATOMIC
            || given(m::DEST_QPN) && a.dest_qp_num > unirdma_formats::Qpn::MASK
            || given(m::ALT_PATH)
            || given(m::PATH_MIG_STATE) && a.path_mig_state != 0
            || given(m::ACCESS_FLAGS) && a.qp_access_flags & !access::QP_ACCEPTED != 0;
        if bad {
            return Err(Status::BadValue);
        }
        let (mut peer_vnic, mut path, mut own) = (q.peer_vnic, q.wire.as_ref().map(|w| w.path), q.own);
        if given(m::AV) {
            let ah = &a.ah_attr;
            // RoCE has no LIDs: an address vector without a GRH names nobody (annex A16).
            own = v.gid(ah.grh.sgid_index);
            if ah.is_global == 0 || own.is_none() || ah.port_num > 1 {
                return Err(Status::BadValue);
            }
            let dgid = Gid(ah.grh.dgid);
            peer_vnic = self.find_vnic(v.group, dgid);
            path = self.route(vnic, ah.grh.sgid_index, dgid).filter(|_| peer_vnic.is_none());
            let peer_qpn = if given(m::DEST_QPN) { a.dest_qp_num } else { q.attr.dest_qp_num };
            let port = source_port(ah.grh.flow_label, q.qpn, peer_qpn);
            path = path.map(|path| Path { port, class: ah.grh.traffic_class & DSCP, ..path });
            if peer_vnic.is_none() && path.is_none() {
                return Err(Status::Unreachable);
            }
            if path.is_some() && given(m::PATH_MTU) && mtu_bytes(a.path_mtu).is_some_and(|b| b > self.wire_mtu) {
                return Err(Status::BadValue);
            }
        }
        if to == QpState::Reset {
            self.reset_qp(h);
            return Ok(());
        }
        let (adapts, linked) = (self.adapts, v.is_linked(own));
        let Some(q) = self.qps.get_mut(h) else { return Err(Status::BadHandle) };
        (q.peer_vnic, q.own, q.linked) = (peer_vnic, own, linked);
        match (&mut q.wire, path) {
            (Some(w), Some(path)) => w.path = path,
            (_, path) => q.wire = path.map(|p| Box::new(Wire::new(p, adapts))),
        }
        apply(q, mask, a);
        let was = q.state;
        if to == QpState::Err {
            self.fail_qp(h, None);
        } else {
            q.state = to;
            if was != to || to == QpState::Sqd {
                self.make_runnable(h);
            }
        }
        Ok(())
    }

    pub(crate) fn find_vnic(&self, group: u32, gid: Gid) -> Option<VnicId> {
        if gid.is_zero() {
            return None;
        }
        self.vnics.iter().find(|(_, v)| v.group == group && v.gids.contains(&gid)).map(|(h, _)| VnicId(h))
    }

    fn reset_qp(&mut self, h: u32) {
        self.acknowledge_all(h);
        self.unstage(h);
        let Some(q) = self.qps.get_mut(h) else { return };
        q.linked = self.vnics.get(q.vnic.0).is_some_and(|v| v.is_linked(None));
        q.own = None;
        q.state = QpState::Reset;
        q.attr = abi::QpAttr::default();
        (q.sq_cons, q.rq_cons) = (0, 0);
        (q.busy, q.receiving, q.broken, q.established) = (false, false, false, false);
        (q.peer, q.peer_vnic, q.wait) = (None, None, Wait::No);
        q.wire = None;
        q.backlog = Backlog::default();
        q.pace = Pace::default();
        q.timer = q.timer.wrapping_add(1);
        q.rings.set_sq_cons(0);
        q.rings.set_rq_cons(0);
        q.rings.set_rq_notify(false);
    }
}

/// Most outstanding READs and atomics of a QP, each way.
pub(crate) const MAX_RD_ATOMIC: u8 = 128;
/// A handle that no object has: the target of an XRC connection has neither PD nor CQs.
const NOBODY: u32 = u32::MAX;
/// A doorbell bit that no session has.
const NO_SLOT: u32 = u32::MAX;

fn apply(q: &mut Qp, mask: u32, a: &abi::QpAttr) {
    use attr_mask as m;
    macro_rules! set {
        ($($bit:ident => $($f:ident),+;)*) => {
            $(if mask & m::$bit != 0 { $(q.attr.$f = a.$f;)+ })*
        };
    }
    set! {
        ACCESS_FLAGS => qp_access_flags;
        PKEY_INDEX => pkey_index;
        PORT => port_num;
        QKEY => qkey;
        AV => ah_attr;
        PATH_MTU => path_mtu;
        TIMEOUT => timeout;
        RETRY_CNT => retry_cnt;
        RNR_RETRY => rnr_retry;
        MAX_QP_RD_ATOMIC => max_rd_atomic;
        MIN_RNR_TIMER => min_rnr_timer;
        MAX_DEST_RD_ATOMIC => max_dest_rd_atomic;
        DEST_QPN => dest_qp_num;
        RATE_LIMIT => rate_limit;
        EN_SQD_ASYNC_NOTIFY => en_sqd_async_notify;
    }
    if mask & m::RQ_PSN != 0 {
        q.rq_psn = Psn::new(a.rq_psn);
    }
    if mask & m::SQ_PSN != 0 {
        q.sq_psn = Psn::new(a.sq_psn);
        if let Some(w) = &mut q.wire {
            w.start(q.sq_psn);
        }
    }
    if let Some(mtu) = mtu_bytes(q.attr.path_mtu) {
        q.mtu = mtu;
    }
}
