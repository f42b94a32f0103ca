//! Creates, modifies, queries, resizes and destroys QPs.

use unirdma_abi as abi;
use unirdma_abi::Status;
use unirdma_formats::net::source_port;
use unirdma_formats::{Gid, Psn, QpState, QpType, Qpn, access, attr_mask, class_of, mtu_bytes, rate_kbps};
use unirdma_mem::QpRings;

use super::Result;
use crate::attr;
use crate::core::Core;
use crate::executor::{Object, Peer};
use crate::objects::{Connection, Counters, CreateQp, MAX_RD_ATOMIC, NO_SLOT, Pause, Qp, QpnSpace, SessionId, bit_of};
use crate::pace::Pace;
use crate::path::Path;
use crate::slab::Handle;

impl Core {
    /// Sets the ranges (first number, count) that the numbers of new QPs are drawn from. The ranges must not overlap.
    /// Existing QPs keep their numbers.
    pub fn set_qpns(&mut self, ranges: &[(u32, u32)]) {
        self.objects.qpn_space = QpnSpace::new(ranges);
    }

    /// Approximate number of QPNs that are free. It is not exact because restored QPs may have numbers outside the
    /// ranges.
    pub fn qpns_left(&self) -> u32 {
        self.objects.qpn_space.len().saturating_sub(self.objects.qpns.len() as u32)
    }

    /// CREATE_QP. Returns (QPN, doorbell slot).
    ///
    /// # Errors
    /// `Unsupported` for a type that is not offered, `BadHandle`, or `Exhausted` at a quota.
    pub fn create_qp(&mut self, s: SessionId, typ: u8, c: CreateQp) -> Result<(u32, u32)> {
        let gsi = typ == abi::QP_TYPE_GSI;
        let typ = if gsi { Some(QpType::Ud) } else { QpType::from_raw(typ.into()) }.ok_or(Status::Unsupported)?;
        // The target of an XRC connection has no PD and no CQs: each message uses the PD and the CQ of the SRQ that it
        // names.
        let (xrcd, pd, send_cq, recv_cq) = match (typ, c.xrcd) {
            (QpType::XrcRecv, Some(xrcd)) => {
                (Some(self.objects.own_xrcd(s, xrcd)?), Handle::NONE, Handle::NONE, Handle::NONE)
            }
            (QpType::XrcRecv, None) => return Err(Status::BadValue),
            _ => (
                None,
                self.objects.own_pd(s, c.pd)?,
                self.objects.own_cq(s, c.send_cq)?,
                self.objects.own_cq(s, c.recv_cq)?,
            ),
        };
        let srq = c.srq.map(|srq| self.objects.own_srq(s, srq).map(|q| q.0)).transpose()?.filter(|_| xrcd.is_none());
        let vrnic = self.objects.vrnic_of(s)?;
        self.objects.quota(s, |u| u.qps, |l| l.max_qp)?;
        if gsi && self.objects.gsi_of(vrnic).is_some() {
            return Err(Status::Exhausted);
        }
        // QPNs are random and unique on the host.
        let (random, objects) = (&mut self.random.qpns, &self.objects);
        let drawn = objects.qpn_space.draw(|| random.next_u64(), |n| objects.is_free_qpn(Qpn(n)));
        let qpn = Qpn(drawn.ok_or(Status::Exhausted)?);
        let door = self.objects.own_door(s, c.door)?;
        let slot = self.objects.doors.get_mut(door).ok_or(Status::BadHandle)?.take_slot()?;
        let qp = Qp {
            owner: s,
            openers: Vec::new(),
            memory: s,
            xrcd,
            vrnic,
            pd,
            qpn,
            typ,
            gsi,
            by_bus: c.door == 0,
            door,
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
            connection: Connection::of_type(typ),
            own: None,
            linked: self.is_up(vrnic),
            denied: false,
            work: None,
            recv: None,
            served_by: 0,
            pause: Pause::No,
            timer: 0,
            queued: false,
            broken: false,
            established: false,
            pace: Pace::default(),
            counters: Counters::default(),
        };
        let h = self.objects.qps.insert(qp).ok_or(Status::Exhausted)?;
        self.objects.qpns.insert(qpn, h);
        if let Some(session) = self.objects.sessions.get_mut(s.0) {
            session.names.qps.insert(h);
        }
        self.objects.doors.get_mut(door).into_iter().for_each(|d| d.fill_slot(slot, h));
        self.use_objects(h, true);
        if let Some(v) = self.objects.vrnics.get_mut(vrnic.0) {
            v.used.qps += 1;
            if gsi {
                v.gsi = Some(h);
            }
        }
        self.made(Object::Qp(h)).inspect_err(|_| self.remove_qp(h))?;
        Ok((qpn.0, bit_of(slot)))
    }

    /// Counts (`more`) or discounts QP `h` as a user of its PD, its CQs, its SRQ and its XRC domain.
    pub(crate) fn use_objects(&mut self, h: Handle<Qp>, more: bool) {
        let Some(q) = self.objects.qps.get(h) else { return };
        let (pd, cqs, srq, xrcd) = (q.pd, [q.send_cq, q.recv_cq], q.srq, q.xrcd);
        match xrcd {
            // Such a QP takes the PD, the CQ and the SRQ of each message, and is not counted as their user here.
            Some((xrcd, _)) => self.objects.use_xrcd(xrcd, more),
            None => {
                self.objects.use_pd(pd, more);
                cqs.into_iter().for_each(|cq| self.objects.use_cq(cq, more));
                srq.into_iter().for_each(|srq| self.objects.use_srq(srq, more));
            }
        }
    }

    /// DESTROY_QP. A QP that other sessions have opened exists until they leave it. Work requests that were posted and
    /// not yet sent are lost: ask [`crate::Core::is_behind`] before.
    ///
    /// # Errors
    /// `BadHandle` if the session has no such QP.
    pub fn destroy_qp(&mut self, s: SessionId, qpn: u32) -> Result<()> {
        let h = self.objects.own_qp(s, Qpn(qpn))?;
        self.leave_qp(h, s);
        Ok(())
    }

    pub(crate) fn remove_qp(&mut self, h: Handle<Qp>) {
        self.gone(Object::Qp(h));
        self.detach_all(h);
        self.use_objects(h, false);
        let Some(q) = self.objects.qps.remove(h) else { return };
        self.objects.qpns.remove(&q.qpn);
        if let Some(v) = self.objects.vrnics.get_mut(q.vrnic.0) {
            v.used.qps -= 1;
            v.gsi.take_if(|g| *g == h);
        }
        if let Some(s) = self.objects.sessions.get_mut(q.owner.0) {
            s.names.qps.remove(&h);
        }
        self.objects.free_slot(q.door, q.slot);
    }

    /// OPEN_QP: `s` shares the target of an XRC connection in this domain (`ibv_open_qp(3)`).
    ///
    /// # Errors
    /// `BadHandle` for the domain, `BadValue` if there is no such QP in it.
    pub fn open_qp(&mut self, s: SessionId, xrcd: u32, qpn: u32) -> Result<()> {
        let (xrcd, domain) = self.objects.own_xrcd(s, xrcd)?;
        let h = *self.objects.qpns.get(&Qpn(qpn)).ok_or(Status::BadValue)?;
        let q =
            self.objects.qps.get_mut(h).filter(|q| q.xrcd.is_some_and(|x| x.1 == domain)).ok_or(Status::BadValue)?;
        q.openers.push((s, xrcd));
        self.objects.use_xrcd(xrcd, true);
        self.objects.names(s).map(|n| n.qps.insert(h));
        Ok(())
    }

    /// Ends the use of QP `h` by session `s`. The QP is removed when no session uses it. True if `s` has opened it more
    /// than once and still uses it.
    pub(crate) fn leave_qp(&mut self, h: Handle<Qp>, s: SessionId) -> bool {
        let Some(q) = self.objects.qps.get_mut(h) else { return false };
        let left = match q.openers.iter().position(|o| o.0 == s) {
            Some(at) => q.openers.swap_remove(at).1,
            None if q.openers.is_empty() => {
                self.remove_qp(h);
                return false;
            }
            None => {
                // The QP loses its doorbell bit, because no program posts to the target of an XRC connection.
                let (heir, xrcd) = q.openers.swap_remove(0);
                let (door, slot) = (q.door, std::mem::replace(&mut q.slot, NO_SLOT));
                let left = q.xrcd.map_or(Handle::NONE, |x| x.0);
                (q.owner, q.xrcd) = (heir, q.xrcd.map(|x| (xrcd, x.1)));
                self.objects.free_slot(door, slot);
                left
            }
        };
        let stays = self.objects.qps.get(h).is_some_and(|q| q.is_open_to(s));
        self.objects.use_xrcd(left, false);
        if !stays {
            self.objects.names(s).map(|n| n.qps.remove(&h));
        }
        stays
    }

    /// RESIZE_QP: replaces the rings. The new ones, which were checked before, hold the waiting WQEs of the old ones at
    /// the same indices.
    ///
    /// # Errors
    /// `BadHandle` if the session has no such QP, `BadState` if it has failed, `BadValue` if the rings do not hold the
    /// waiting WQEs.
    pub fn resize_qp(&mut self, s: SessionId, qpn: u32, rings: QpRings) -> Result<()> {
        let h = self.objects.own_qp(s, Qpn(qpn))?;
        let q = self.objects.qps.get_mut(h).filter(|q| q.owner == s && !q.broken).ok_or(Status::BadState)?;
        let layout = *rings.layout();
        // WQEs under way are still in the ring, since slots are freed in order.
        let fits = rings.sq_pending(q.sq_cons).is_ok() && rings.rq_pending(q.rq_cons).is_ok();
        if !fits || layout.sq_stride != q.rings.layout().sq_stride || layout.rq_stride != q.rings.layout().rq_stride {
            return Err(Status::BadValue);
        }
        (q.cap.max_send_wr, q.cap.max_recv_wr) = (layout.sq_entries, layout.rq_entries);
        q.rings = rings;
        Ok(())
    }

    /// QUERY_QP: the present attributes.
    ///
    /// # Errors
    /// `BadHandle` if the session has no such QP.
    pub fn query_qp(&self, s: SessionId, qpn: u32) -> Result<abi::QpAttr> {
        let q = self.objects.qps.get(self.objects.own_qp(s, Qpn(qpn))?).ok_or(Status::BadHandle)?;
        Ok(abi::QpAttr {
            qp_state: q.state as u8,
            cur_qp_state: q.state as u8,
            sq_psn: q.sq_psn.get(),
            rq_psn: q.rq_psn.get(),
            cap: q.cap,
            sq_draining: u8::from(q.is_draining()),
            ..q.attr
        })
    }

    /// MODIFY_QP: all attributes are checked before any is changed.
    ///
    /// # Errors
    /// `BadState` for a transition that does not exist or takes other attributes, `BadValue` for a
    /// value out of range, `Unreachable` if no vRNIC of the group has the destination GID, or if its holder's
    /// programs use a VF.
    pub fn modify_qp(&mut self, s: SessionId, qpn: u32, mask: u32, a: &abi::QpAttr) -> Result<()> {
        use attr_mask as m;
        let a = &fitted(a);
        let h = self.objects.own_qp(s, Qpn(qpn))?;
        let vrnic = self.objects.vrnic_of(s)?;
        let q = self.objects.qps.get(h).ok_or(Status::BadHandle)?;
        let given = |bit: u32| mask & bit != 0;
        let raw = |v: u8| QpState::from_raw(v.into()).ok_or(Status::BadValue);
        if given(m::CUR_STATE) && raw(a.cur_qp_state)? != q.state {
            return Err(Status::BadState);
        }
        let to = if given(m::STATE) { raw(a.qp_state)? } else { q.state };
        // Kernels set no port for QP 1.
        let port = if q.gsi && q.state == QpState::Reset && to == QpState::Init { m::PORT } else { 0 };
        // A QP in SQD whose send queue still drains goes neither to RTS nor to SQD (IBTA vol. 1, 10.3.1.5).
        let goes_on = given(m::STATE) && matches!(to, QpState::Rts | QpState::Sqd);
        if !attr::allowed(q.typ, q.state, to, mask | port) || goes_on && q.is_draining() {
            return Err(Status::BadState);
        }
        let v = self.objects.vrnics.get(vrnic.0).ok_or(Status::BadHandle)?;
        let bad = given(m::PORT) && a.port_num != 1
            || given(m::PKEY_INDEX) && a.pkey_index != 0
            || given(m::PATH_MTU) && mtu_bytes(a.path_mtu).is_none()
            || given(m::MAX_QP_RD_ATOMIC) && a.max_rd_atomic > MAX_RD_ATOMIC
            || given(m::MAX_DEST_RD_ATOMIC) && a.max_dest_rd_atomic > MAX_RD_ATOMIC
            || given(m::ALT_PATH)
            || given(m::PATH_MIG_STATE) && a.path_mig_state != 0
            || given(m::ACCESS_FLAGS) && a.qp_access_flags & !access::QP_ACCEPTED != 0;
        if bad {
            return Err(Status::BadValue);
        }
        let (mut peer, mut own) = (None, q.own);
        if given(m::AV) {
            let ah = &a.ah_attr;
            // RoCE has no LIDs, so an address vector needs a GRH (annex A16).
            own = v.gid(ah.grh.sgid_index);
            if ah.is_global == 0 || own.is_none() || ah.port_num > 1 || rate_kbps(ah.static_rate).is_none() {
                return Err(Status::BadValue);
            }
            let dgid = Gid(ah.grh.dgid);
            let peer_qpn = if given(m::DEST_QPN) { a.dest_qp_num } else { q.attr.dest_qp_num };
            let peer_vrnic =
                self.objects.find_vrnic(v.group, dgid).filter(|&p| !self.is_wired(p, Qpn(peer_qpn), q.qpn));
            // This RNIC's packets do not get to the QPs of a VF.
            if peer_vrnic.is_some_and(|p| self.objects.vf_of(p).is_some()) {
                return Err(Status::Unreachable);
            }
            let port = source_port(self.net.first_port, ah.grh.flow_label, q.qpn.0, peer_qpn);
            peer = Some(match peer_vrnic {
                Some(vrnic) => Peer::Here(vrnic),
                None => {
                    let path = self.path_to(v, ah.grh.sgid_index, dgid).ok_or(Status::Unreachable)?;
                    if given(m::PATH_MTU) && mtu_bytes(a.path_mtu).is_some_and(|b| b > self.net.wire_mtu) {
                        return Err(Status::BadValue);
                    }
                    Peer::There(Path { port, class: class_of(ah.grh.traffic_class, ah.sl), ..path })
                }
            });
            let across = if let Some(Peer::There(path)) = peer { path.across.map(|(peer, _)| peer) } else { None };
            if !self.may_connect(vrnic, dgid, across) {
                self.count_refused(vrnic);
                return Err(Status::Unreachable);
            }
        }
        if to == QpState::Reset {
            self.reset_qp(h);
            return Ok(());
        }
        let linked = v.is_linked(own);
        if let Some(peer) = peer {
            self.execute_with(|e, core| e.connect(core, h, peer))?;
        }
        let Some(q) = self.objects.qps.get_mut(h) else { return Err(Status::BadHandle) };
        (q.own, q.linked) = (own, linked && !q.denied);
        apply(q, mask, a);
        let was = q.state;
        self.execute_with(|e, core| e.modified(core, h, mask));
        let Some(q) = self.objects.qps.get_mut(h) else { return Err(Status::BadHandle) };
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

    fn reset_qp(&mut self, h: Handle<Qp>) {
        self.execute_with(|e, core| e.reset(core, h));
        let Some(q) = self.objects.qps.get_mut(h) else { return };
        q.linked = self.objects.vrnics.get(q.vrnic.0).is_some_and(|v| v.is_linked(None));
        q.own = None;
        q.denied = false;
        q.state = QpState::Reset;
        q.attr = abi::QpAttr::default();
        (q.sq_cons, q.rq_cons) = (0, 0);
        (q.broken, q.established) = (false, false);
        q.pace = Pace::default();
        q.timer = q.timer.wrapping_add(1);
        q.rings.set_sq_cons(0);
        q.rings.set_rq_cons(0);
        q.rings.set_rq_notify(false);
    }
}

/// Cuts attributes to the size of their fields in packets and in a NIC's QP context. Excess bits are dropped, as by the
/// drivers of NICs.
fn fitted(a: &abi::QpAttr) -> abi::QpAttr {
    const BITS_3: u8 = 7;
    const BITS_5: u8 = 31;
    abi::QpAttr {
        timeout: a.timeout & BITS_5,
        retry_cnt: a.retry_cnt & BITS_3,
        rnr_retry: a.rnr_retry & BITS_3,
        min_rnr_timer: a.min_rnr_timer & BITS_5,
        dest_qp_num: a.dest_qp_num & Qpn::MASK,
        ..*a
    }
}

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
    if mask & m::AV != 0 {
        q.pace.path_kbps = rate_kbps(a.ah_attr.static_rate).unwrap_or(0);
    }
    if mask & m::RQ_PSN != 0 {
        q.rq_psn = Psn::new(a.rq_psn);
    }
    if mask & m::SQ_PSN != 0 {
        q.sq_psn = Psn::new(a.sq_psn);
    }
    if let Some(mtu) = mtu_bytes(q.attr.path_mtu).filter(|_| mask & m::PATH_MTU != 0) {
        q.mtu = mtu;
    }
}
