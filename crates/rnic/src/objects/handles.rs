//! The numbers by which sessions name their objects, the uses of an object by others, and quotas. A session uses no
//! number twice, and a number is valid in its session only. Uses and quotas are counted when an object is made or
//! destroyed, so that no command has to search for them.

use unirdma_abi::Status;

use unirdma_formats::Qpn;

use super::session::Numbered;
use super::{Ah, Backing, Cq, DoorbellPage, Handles, Limits, Mr, Objects, Pd, Qp, SessionId, Srq, Used, VrnicId, Xrcd};
use crate::random::Rng;
use crate::slab::{Handle, Slab};

type Result<T> = std::result::Result<T, Status>;

impl Objects {
    pub fn vrnic_of(&self, s: SessionId) -> Result<VrnicId> {
        self.sessions.get(s.0).map(|s| s.vrnic).ok_or(Status::BadHandle)
    }

    /// `Exhausted` if the vRNIC of a session has reached its quota.
    pub fn quota(&self, s: SessionId, used: impl Fn(&Used) -> usize, max: impl Fn(&Limits) -> u32) -> Result<()> {
        let v = self.vrnics.get(self.vrnic_of(s)?.0).ok_or(Status::BadHandle)?;
        if used(&v.used) >= max(&v.limits) as usize { Err(Status::Exhausted) } else { Ok(()) }
    }

    /// Changes the resources that a session's vRNIC uses.
    pub fn count_used(&mut self, s: SessionId, f: impl FnOnce(&mut Used)) {
        if let Some(v) = self.vrnic_of(s).ok().and_then(|v| self.vrnics.get_mut(v.0)) {
            f(&mut v.used);
        }
    }

    /// Counts an MR or a window that was just made.
    pub fn count_mr(&mut self, h: Handle<Mr>) {
        let Some(m) = self.mrs.get(h) else { return };
        let vrnic = self.sessions.get(m.owner.0).and_then(|s| self.vrnics.get_mut(s.vrnic.0));
        vrnic.into_iter().for_each(|v| v.used.add_mr(m));
    }

    /// A new number for an object of session `s`.
    ///
    /// # Errors
    /// `BadHandle` if the session is gone, `Exhausted` after at least 2^31 numbers.
    pub fn new_number(&mut self, s: SessionId) -> Result<u32> {
        let session = self.sessions.get_mut(s.0).filter(|s| !s.gone).ok_or(Status::BadHandle)?;
        session.names.next().ok_or(Status::Exhausted)
    }

    /// The objects of session `s`.
    pub fn names(&mut self, s: SessionId) -> Option<&mut Handles> {
        self.sessions.get_mut(s.0).map(|s| &mut s.names)
    }

    fn find<T>(&self, s: SessionId, n: u32, table: impl Fn(&Handles) -> &Numbered<T>) -> Result<Handle<T>> {
        let names = &self.sessions.get(s.0).ok_or(Status::BadHandle)?.names;
        table(names).get(&n).copied().ok_or(Status::BadHandle)
    }

    pub fn own_pd(&self, s: SessionId, n: u32) -> Result<Handle<Pd>> {
        self.find(s, n, |t| &t.pds)
    }

    pub fn own_cq(&self, s: SessionId, n: u32) -> Result<Handle<Cq>> {
        self.find(s, n, |t| &t.cqs)
    }

    /// An MR or a window.
    pub fn own_mr(&self, s: SessionId, n: u32) -> Result<(Handle<Mr>, &Mr)> {
        let h = self.find(s, n, |t| &t.mrs)?;
        self.mrs.get(h).filter(|m| self.lives(m)).map(|m| (h, m)).ok_or(Status::BadHandle)
    }

    /// False if an MR or a window is dead and only not freed yet.
    pub fn lives(&self, m: &Mr) -> bool {
        self.memory().lives(m)
    }

    pub fn own_ah(&self, s: SessionId, n: u32) -> Result<Handle<Ah>> {
        self.sessions.get(s.0).and_then(|s| s.names.ahs.get(&n)).copied().ok_or(Status::BadHandle)
    }

    pub fn own_srq(&self, s: SessionId, n: u32) -> Result<(Handle<Srq>, &Srq)> {
        let h = self.find(s, n, |t| &t.srqs)?;
        self.srqs.get(h).map(|q| (h, q)).ok_or(Status::BadHandle)
    }

    /// An XRC domain: its handle, and which it is.
    pub fn own_xrcd(&self, s: SessionId, n: u32) -> Result<(Handle<Xrcd>, u32)> {
        let h = self.find(s, n, |t| &t.xrcds)?;
        self.xrcds.get(h).map(|x| (h, x.domain)).ok_or(Status::BadHandle)
    }

    /// Doorbell page `n` of session `s`; 0 names the page of SET_DOORBELL.
    ///
    /// # Errors
    /// `BadHandle`; `BadState` if the session has no page 0.
    pub fn own_door(&self, s: SessionId, n: u32) -> Result<Handle<DoorbellPage>> {
        match n {
            0 => self.sessions.get(s.0).ok_or(Status::BadHandle)?.door.ok_or(Status::BadState),
            n => self.find(s, n, |t| &t.doors),
        }
    }

    /// A QP that the session has made, or opened.
    pub fn own_qp(&self, s: SessionId, qpn: Qpn) -> Result<Handle<Qp>> {
        let h = *self.qpns.get(&qpn).ok_or(Status::BadHandle)?;
        self.qps.get(h).filter(|q| q.is_open_to(s)).map(|_| h).ok_or(Status::BadHandle)
    }

    /// One object more, or less, is in a PD.
    pub fn use_pd(&mut self, pd: Handle<Pd>, more: bool) {
        count_use(&mut self.pds, pd, |p| &mut p.uses, more);
    }

    /// An MR or a window is in its PD from now on.
    pub fn enter_pd(&mut self, h: Handle<Mr>) {
        let Some(m) = self.mrs.get(h) else { return };
        match m.backing {
            Backing::Null => _ = self.pds.get_mut(m.pd).and_then(|p| p.nulls.insert(m.number, h)),
            _ => self.use_pd(m.pd, true),
        }
    }

    /// An MR or a window has left its PD.
    pub fn leave_pd(&mut self, m: &Mr) {
        match m.backing {
            Backing::Null => _ = self.pds.get_mut(m.pd).and_then(|p| p.nulls.remove(&m.number)),
            _ => self.use_pd(m.pd, false),
        }
    }

    /// One queue more, or less, completes to a CQ.
    pub fn use_cq(&mut self, cq: Handle<Cq>, more: bool) {
        count_use(&mut self.cqs, cq, |c| &mut c.uses, more);
    }

    /// One QP more, or less, takes its receives from an SRQ.
    pub fn use_srq(&mut self, srq: Handle<Srq>, more: bool) {
        count_use(&mut self.srqs, srq, |q| &mut q.uses, more);
    }

    /// One QP or SRQ more, or less, is in an XRC domain.
    pub fn use_xrcd(&mut self, xrcd: Handle<Xrcd>, more: bool) {
        count_use(&mut self.xrcds, xrcd, |x| &mut x.uses, more);
    }

    /// Gives an MR or a window its number and its key, and returns both, after its handle.
    pub fn insert_mr(&mut self, mr: Mr, random: &mut Rng) -> Result<(Handle<Mr>, (u32, u32))> {
        let (s, number) = (mr.owner, self.new_number(mr.owner)?);
        let made = self.mrs.insert(Mr { number, ..mr }, random);
        let (h, key) = made.ok_or(Status::Exhausted)?;
        self.names(s).and_then(|n| n.mrs.insert(number, h));
        self.enter_pd(h);
        self.count_mr(h);
        Ok((h, (number, key)))
    }

    /// A QP loses its doorbell bit.
    pub fn free_slot(&mut self, door: Handle<DoorbellPage>, slot: u32) {
        self.doors.get_mut(door).into_iter().for_each(|d| d.free_slot(slot));
    }

    pub fn remove_pd(&mut self, h: Handle<Pd>) {
        let Some(p) = self.pds.remove(h) else { return };
        self.names(p.owner).and_then(|n| n.pds.remove(&p.number));
        self.count_used(p.owner, |u| u.pds -= 1);
    }

    pub fn remove_cq(&mut self, h: Handle<Cq>) {
        let Some(c) = self.cqs.remove(h) else { return };
        self.names(c.owner).and_then(|n| n.cqs.remove(&c.number));
        self.count_used(c.owner, |u| u.cqs -= 1);
    }

    pub fn remove_mr(&mut self, h: Handle<Mr>) {
        let Some(m) = self.mrs.remove(h) else { return };
        self.names(m.owner).and_then(|n| n.mrs.remove(&m.number));
        self.leave_pd(&m);
        self.count_used(m.owner, |u| u.remove_mr(&m));
        if m.backing.is_slow_to_drop() {
            self.dropped.add(m.backing);
        }
    }

    pub fn remove_srq(&mut self, srq: Handle<Srq>) {
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

    pub fn remove_xrcd(&mut self, h: Handle<Xrcd>) {
        let Some(x) = self.xrcds.remove(h) else { return };
        self.names(x.owner).and_then(|n| n.xrcds.remove(&x.number));
        self.count_used(x.owner, |u| u.xrcds -= 1);
        if let Some(file) = x.file {
            self.domains.close(file);
        }
    }

    /// A random number of 24 bits for an XRC SRQ. It could be guessed, but access depends on the domain.
    pub fn new_srq_number(&self, random: &mut Rng) -> u32 {
        loop {
            let n = random.next_u64() as u32 & Qpn::MASK;
            if n != 0 && !self.srq_numbers.contains_key(&n) {
                return n;
            }
        }
    }

    pub fn remove_ah(&mut self, h: Handle<Ah>) {
        let Some(ah) = self.ahs.remove(h) else { return };
        self.names(ah.owner).and_then(|n| n.ahs.remove(&ah.number));
        self.count_used(ah.owner, |u| u.ahs -= 1);
        self.use_pd(ah.pd, false);
    }
}

fn count_use<T>(table: &mut Slab<T>, h: Handle<T>, uses: impl FnOnce(&mut T) -> &mut u32, more: bool) {
    if let Some(object) = table.get_mut(h) {
        let uses = uses(object);
        *uses = if more { *uses + 1 } else { uses.saturating_sub(1) };
    }
}
