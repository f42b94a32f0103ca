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
use crate::objects::{Counters, Cq, CreateQp, Moderation, Pd, Qp, SessionId, VnicId, Wait};
use crate::pace::Pace;
use crate::rnic::Rnic;
use crate::slab::Handle;
use crate::wire::{DSCP, Path, Wire};

type Result<T> = std::result::Result<T, Status>;

impl Rnic {
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
        self.quota(s, |u| u.pds, |l| l.max_pd)?;
        let number = self.new_number(s)?;
        let h = self.pds.insert(Pd { uses: 0 }).ok_or(Status::Exhausted)?;
        self.names(s).and_then(|n| n.pds.insert(number, h));
        self.count_used(s, |u| u.pds += 1);
        Ok(number)
    }

    /// DESTROY_PD.
    ///
    /// # Errors
    /// `Busy` while it has MRs, AHs, SRQs or QPs.
    pub fn destroy_pd(&mut self, s: SessionId, pd: u32) -> Result<()> {
        let h = self.own_pd(s, pd)?;
        if self.pds.get(h).is_some_and(|p| p.uses > 0) {
            return Err(Status::Busy);
        }
        self.pds.remove(h);
        self.names(s).and_then(|n| n.pds.remove(&pd));
        self.count_used(s, |u| u.pds -= 1);
        Ok(())
    }

    /// CREATE_CQ on a ring that the device has resolved.
    ///
    /// # Errors
    /// `Exhausted` at the vRNIC's quota.
    pub fn create_cq(&mut self, s: SessionId, ring: CqRing, comp_queue: Option<u16>) -> Result<u32> {
        self.quota(s, |u| u.cqs, |l| l.max_cq)?;
        let number = self.new_number(s)?;
        let cq = Cq { owner: s, number, uses: 0, ring, comp_queue, notify: 0, moderation: None, dead: false };
        let h = self.cqs.insert(cq).ok_or(Status::Exhausted)?;
        self.names(s).and_then(|n| n.cqs.insert(number, h));
        self.count_used(s, |u| u.cqs += 1);
        Ok(number)
    }

    /// RESIZE_CQ: further completions go to another ring; an arming that was not served yet holds for it.
    ///
    /// # Errors
    /// `BadHandle`, or `BadState` for a CQ that has overrun.
    pub fn resize_cq(&mut self, s: SessionId, cq: u32, ring: CqRing) -> Result<()> {
        let cq = self.own_cq(s, cq)?;
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
        let cq = self.own_cq(s, cq)?;
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
        let h = self.own_cq(s, cq)?;
        if self.cqs.get(h).is_some_and(|c| c.uses > 0) {
            return Err(Status::Busy);
        }
        self.cqs.remove(h);
        self.names(s).and_then(|n| n.cqs.remove(&cq));
        self.count_used(s, |u| u.cqs -= 1);
        Ok(())
    }

    /// REQ_NOTIFY_CQ, for drivers that do not use the arm word.
    ///
    /// # Errors
    /// `BadValue` for unknown flags, `BadState` for a CQ without an event queue.
    pub fn req_notify_cq(&mut self, s: SessionId, cq: u32, flags: u32) -> Result<()> {
        let cq = self.own_cq(s, cq)?;
        if self.cqs.get(cq).is_none_or(|c| c.comp_queue.is_none()) {
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
        (backing, regions): (Backing, Vec<u64>),
    ) -> Result<(u32, u32)> {
        let pd = self.own_pd(s, pd)?;
        let flags = flags & !access::OPTIONAL_RANGE;
        // ibv_reg_mr(3): remote write and atomic need local write.
        let remote_store = flags & (access::REMOTE_WRITE | access::REMOTE_ATOMIC) != 0;
        if flags & !access::MR_SUPPORTED != 0 || remote_store && flags & access::LOCAL_WRITE == 0 {
            return Err(Status::BadValue);
        }
        if iova.checked_add(len).is_none() {
            return Err(Status::BadValue);
        }
        self.quota(s, |u| u.mrs, |l| l.max_mr)?;
        let v = self.vnics.get(self.vnic_of(s)?.0).ok_or(Status::BadHandle)?;
        let (bytes, limit) = (v.used.mr_bytes, v.limits.max_mr_bytes);
        let away = self.sessions.get(s.0).is_some_and(|s| s.away != 0);
        let mr = Mr { access: flags, iova, len, regions: regions.into(), backing, away, ..Mr::empty(s, pd) };
        if bytes.checked_add(mr.counted()).is_none_or(|b| b > limit) {
            return Err(Status::Exhausted);
        }
        self.insert_mr(mr)
    }

    /// Gives an MR or a window its number and its key, and returns both.
    pub(crate) fn insert_mr(&mut self, mr: Mr) -> Result<(u32, u32)> {
        let (s, pd, bytes, number) = (mr.owner, mr.pd, mr.counted(), self.new_number(mr.owner)?);
        let made = self.mrs.insert(Mr { number, ..mr }, &mut self.random.keys);
        let (h, key) = made.ok_or(Status::Exhausted)?;
        self.names(s).and_then(|n| n.mrs.insert(number, h));
        self.use_pd(pd, true);
        self.count_used(s, |u| (u.mrs, u.mr_bytes) = (u.mrs + 1, u.mr_bytes + bytes));
        Ok((number, key))
    }

    pub(crate) fn remove_mr(&mut self, h: Handle<Mr>) {
        let Some(m) = self.mrs.remove(h) else { return };
        self.names(m.owner).and_then(|n| n.mrs.remove(&m.number));
        self.use_pd(m.pd, false);
        self.count_used(m.owner, |u| (u.mrs, u.mr_bytes) = (u.mrs - 1, u.mr_bytes.saturating_sub(m.counted())));
    }

    /// Keeps what a driver says of the way that its MR's memory goes.
    pub fn note_mr(&mut self, s: SessionId, mr: u32, note: u32) {
        if let Ok((h, _)) = self.own_mr(s, mr)
            && let Some(m) = self.mrs.get_mut(h)
        {
            m.note = note;
        }
    }

    /// An MR of the session that no window is bound to.
    fn free_mr(&self, s: SessionId, mr: u32) -> Result<Handle<Mr>> {
        let (h, m) = self.own_mr(s, mr)?;
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
        self.remove_mr(h);
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
        let (mr, by_handle) = (self.free_mr(s, mr)?, self.free_mr(s, by)?);
        let new = self.mrs.remove(by_handle).ok_or(Status::BadHandle)?;
        self.names(s).and_then(|n| n.mrs.remove(&by));
        // The bytes and the place in the PD of `by` are those of `mr` now.
        let old = self.mrs.replace(mr, new).ok_or(Status::BadHandle)?;
        self.use_pd(old.0, false);
        self.count_used(s, |u| (u.mrs, u.mr_bytes) = (u.mrs - 1, u.mr_bytes.saturating_sub(old.1)));
        Ok(())
    }

    /// A memory region of the session is gone: MRs in it grant nothing any more (X28).
    pub fn revoke_region(&mut self, s: SessionId, region: u64) {
        let Some(session) = self.sessions.get(s.0) else { return };
        let lies_there = |h: &Handle<Mr>| self.mrs.get(*h).is_some_and(|m| m.regions.contains(&region));
        let gone: Vec<Handle<Mr>> = session.names.mrs.values().copied().filter(lies_there).collect();
        for h in gone {
            match self.mrs.get(h).and_then(|m| m.window) {
                Some(_) => self.unbind(h),
                None => self.remove_mr(h),
            }
        }
    }

    /// CREATE_QP. Returns (QPN, doorbell slot).
    ///
    /// # Errors
    /// `Unsupported` for a type that is not offered, `BadHandle`, or `Exhausted` at a quota.
    pub fn create_qp(&mut self, s: SessionId, typ: u8, c: CreateQp) -> Result<(u32, u32)> {
        let typ = QpType::from_raw(typ.into()).ok_or(Status::Unsupported)?;
        // The target of an XRC connection has neither PD nor CQs: each message is for an SRQ that has.
        let (xrcd, pd, send_cq, recv_cq) = match (typ, c.xrcd) {
            (QpType::XrcRecv, Some(xrcd)) => (Some(self.own_xrcd(s, xrcd)?), Handle::NONE, Handle::NONE, Handle::NONE),
            (QpType::XrcRecv, None) => return Err(Status::BadValue),
            _ => (None, self.own_pd(s, c.pd)?, self.own_cq(s, c.send_cq)?, self.own_cq(s, c.recv_cq)?),
        };
        let srq = c.srq.map(|srq| self.own_srq(s, srq).map(|q| q.0)).transpose()?.filter(|_| xrcd.is_none());
        let vnic = self.vnic_of(s)?;
        self.quota(s, |u| u.qps, |l| l.max_qp)?;
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
            let n = self.random.qpns.next_u64() as u32 & unirdma_formats::Qpn::MASK;
            if n > 1 && !self.qpns.contains_key(&n) {
                break n;
            }
        };
        let qp = Qp {
            owner: s,
            openers: Vec::new(),
            memory: s,
            xrcd,
            vnic,
            pd,
            qpn,
            typ,
            slot,
            sig_all: c.sig_all,
            send_cq,
            recv_cq,
            srq,
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
            served_by: 0,
            wait: Wait::No,
            timer: 0,
            queued: false,
            broken: false,
            established: false,
            wire: None,
            pace: Pace::default(),
            backlog: Backlog::default(),
            groups: Vec::new(),
            counters: Counters::default(),
        };
        let h = self.qps.insert(qp).ok_or(Status::Exhausted)?;
        self.qpns.insert(qpn, h);
        if let Some(session) = self.sessions.get_mut(s.0) {
            session.slots[slot as usize] = Some(h);
            session.names.qps.insert(h);
        }
        self.use_objects(h, true);
        if let Some(v) = self.vnics.get_mut(vnic.0) {
            v.used.qps += 1;
        }
        Ok((qpn, slot))
    }

    /// QP `h` begins, or ends, to use its PD, its CQs, its SRQ and its XRC domain.
    fn use_objects(&mut self, h: Handle<Qp>, more: bool) {
        let Some(q) = self.qps.get(h) else { return };
        let (pd, cqs, srq, xrcd) = (q.pd, [q.send_cq, q.recv_cq], q.srq, q.xrcd);
        match xrcd {
            // It was aimed at the PD, the CQ and the SRQ of a message.
            Some((xrcd, _)) => self.use_xrcd(xrcd, more),
            None => {
                self.use_pd(pd, more);
                cqs.into_iter().for_each(|cq| self.use_cq(cq, more));
                srq.into_iter().for_each(|srq| self.use_srq(srq, more));
            }
        }
    }

    /// DESTROY_QP. One that others have opened lives on for them. What was posted to it and not sent yet is lost: ask
    /// [`Rnic::is_behind`] before.
    ///
    /// # Errors
    /// `BadHandle` if the session has no such QP.
    pub fn destroy_qp(&mut self, s: SessionId, qpn: u32) -> Result<()> {
        let h = self.own_qp(s, qpn)?;
        self.leave_qp(h, s);
        Ok(())
    }

    pub(crate) fn remove_qp(&mut self, h: Handle<Qp>) {
        self.acknowledge_all(h);
        self.unstage(h);
        self.detach_all(h);
        self.set_receiving(h, false);
        self.use_objects(h, false);
        let Some(q) = self.qps.remove(h) else { return };
        self.qpns.remove(&q.qpn);
        if let Some(v) = self.vnics.get_mut(q.vnic.0) {
            v.used.qps -= 1;
        }
        if let Some(s) = self.sessions.get_mut(q.owner.0) {
            s.free_slot(q.slot);
            s.names.qps.remove(&h);
        }
    }

    /// OPEN_QP: `s` shares the target of an XRC connection that somebody made in this domain (`ibv_open_qp(3)`).
    ///
    /// # Errors
    /// `BadHandle` for the domain, `BadValue` if there is no such QP in it.
    pub fn open_qp(&mut self, s: SessionId, xrcd: u32, qpn: u32) -> Result<()> {
        let (xrcd, domain) = self.own_xrcd(s, xrcd)?;
        let h = *self.qpns.get(&qpn).ok_or(Status::BadValue)?;
        let q = self.qps.get_mut(h).filter(|q| q.xrcd.is_some_and(|x| x.1 == domain)).ok_or(Status::BadValue)?;
        q.openers.push((s, xrcd));
        self.use_xrcd(xrcd, true);
        self.names(s).map(|n| n.qps.insert(h));
        Ok(())
    }

    /// `s` uses QP `h` no more. It goes with the last one that does; true if `s` uses it still.
    pub(crate) fn leave_qp(&mut self, h: Handle<Qp>, s: SessionId) -> bool {
        let Some(q) = self.qps.get_mut(h) else { return false };
        let left = match q.openers.iter().position(|o| o.0 == s) {
            Some(at) => q.openers.swap_remove(at).1,
            None if q.openers.is_empty() => {
                self.remove_qp(h);
                return false;
            }
            None => {
                // The doorbell bit goes: nothing is posted to such a QP.
                let (heir, xrcd) = q.openers.swap_remove(0);
                let slot = std::mem::replace(&mut q.slot, NO_SLOT);
                let left = q.xrcd.map_or(Handle::NONE, |x| x.0);
                (q.owner, q.xrcd) = (heir, q.xrcd.map(|x| (xrcd, x.1)));
                if let Some(s) = self.sessions.get_mut(s.0) {
                    s.free_slot(slot);
                }
                left
            }
        };
        let stays = self.qps.get(h).is_some_and(|q| q.is_open_to(s));
        self.use_xrcd(left, false);
        if !stays {
            self.names(s).map(|n| n.qps.remove(&h));
        }
        stays
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
        self.by_gid.get(&(group, gid))?.first().copied()
    }

    fn reset_qp(&mut self, h: Handle<Qp>) {
        self.acknowledge_all(h);
        self.unstage(h);
        self.set_receiving(h, false);
        let Some(q) = self.qps.get_mut(h) else { return };
        q.linked = self.vnics.get(q.vnic.0).is_some_and(|v| v.is_linked(None));
        q.own = None;
        q.state = QpState::Reset;
        q.attr = abi::QpAttr::default();
        (q.sq_cons, q.rq_cons) = (0, 0);
        (q.busy, q.broken, q.established) = (false, false, false);
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
