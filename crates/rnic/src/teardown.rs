//! Ends many objects at once: a session with all its objects, or a memory region with the MRs in it. Look-ups find a
//! dead object no more from that moment on. The objects are freed afterwards, [`MAX_TORN_DOWN`] each time that the RNIC
//! is held, so that the end of many objects delays no other user of the RNIC.

use crate::core::Core;
use crate::executor::Object;
use crate::objects::{Dead, DeadObject, Mr, Remains, SessionId, VrnicId};

/// Most objects that are freed or checked while the RNIC is held once.
pub const MAX_TORN_DOWN: usize = 64;
/// Estimated time to free an object, ns. It is charged to the vRNIC that owned the object.
const TEARDOWN_NS: u64 = 200;

/// The next object to free of a session that has ended. MRs and AHs come first, because PDs are freed after the objects
/// in them.
fn next(remains: &mut Remains) -> Option<Object> {
    let mr = remains.mrs.next().map(|e| Object::Mr(e.1));
    let ah = || remains.ahs.next().map(|e| Object::Ah(e.1));
    mr.or_else(ah).or_else(|| remains.pds.next().map(|e| Object::Pd(e.1)))
}

impl Core {
    /// True while there are dead objects to free with [`Core::tear_down`].
    pub fn has_dead(&self) -> bool {
        !self.objects.dead_objects.is_empty()
    }

    /// Frees up to `most` dead objects; true if others are left.
    pub fn tear_down(&mut self, most: usize) -> bool {
        if let Some(entry) = self.objects.dead_objects.pop_front() {
            self.tear_down_entry(entry, most);
        }
        self.has_dead()
    }

    /// Like [`Core::tear_down`], but frees only objects of one vRNIC, and returns true if others of that vRNIC are
    /// left.
    pub fn tear_down_of(&mut self, id: VrnicId, most: usize) -> bool {
        let is_of = |g: &DeadObject| g.vrnic == id;
        if let Some(entry) =
            self.objects.dead_objects.iter().position(is_of).and_then(|at| self.objects.dead_objects.remove(at))
        {
            self.tear_down_entry(entry, most);
        }
        self.objects.dead_objects.iter().any(is_of)
    }

    /// Removes up to `most` null MRs of a PD that has no other objects; true if null MRs are left. The control path
    /// calls this repeatedly before it destroys the PD, and lets others have the RNIC between the calls.
    pub fn remove_nulls(&mut self, s: SessionId, pd: u32, most: usize) -> bool {
        let Ok(h) = self.objects.own_pd(s, pd) else { return false };
        let Some(p) = self.objects.pds.get(h).filter(|p| p.uses == 0) else { return false };
        let nulls: Vec<_> = p.nulls.values().copied().take(most).collect();
        let left = p.nulls.len() > nulls.len();
        for &null in &nulls {
            self.remove(Object::Mr(null));
        }
        if let Ok(vrnic) = self.objects.vrnic_of(s) {
            self.sched.charge(vrnic, nulls.len() as u64 * TEARDOWN_NS);
        }
        left
    }

    /// Removes up to `most` active objects of a session, in the order QPs, SRQs, CQs, XRC domains, because each kind
    /// uses those that follow. True if active objects are left.
    pub(crate) fn quiesce_objects(&mut self, id: SessionId, most: usize) -> bool {
        for _ in 0..most {
            let Some(s) = self.objects.sessions.get_mut(id.0) else { return false };
            let (vrnic, names) = (s.vrnic, &mut s.names);
            if let Some(h) = names.qps.pop_first() {
                while self.leave_qp(h, id) {}
            } else if let Some((_, h)) = names.srqs.pop_first() {
                self.remove(Object::Srq(h));
            } else if let Some((_, h)) = names.cqs.pop_first() {
                self.remove(Object::Cq(h));
            } else if let Some((_, h)) = names.xrcds.pop_first() {
                self.objects.remove_xrcd(h);
            } else {
                return false;
            }
            self.sched.charge(vrnic, TEARDOWN_NS);
        }
        true
    }

    /// Declares all remaining objects of a session dead. Its active objects have been removed before by
    /// [`Core::quiesce_objects`].
    pub(crate) fn end_objects(&mut self, id: SessionId) {
        let Some(s) = self.objects.sessions.get_mut(id.0) else { return };
        let (vrnic, names) = (s.vrnic, &mut s.names);
        let remains = Remains {
            mrs: std::mem::take(&mut names.mrs).into_iter(),
            ahs: std::mem::take(&mut names.ahs).into_iter(),
            pds: std::mem::take(&mut names.pds).into_iter(),
        };
        s.ended = names.last;
        s.dying += 1;
        self.tear_down_entry(DeadObject { vrnic, session: id, dead: Dead::Session(Box::new(remains)) }, MAX_TORN_DOWN);
    }

    /// Declares the MRs in these memory regions of a session dead, because the regions are gone (X28).
    pub fn revoke_regions(&mut self, id: SessionId, regions: &[u64]) {
        let Some(s) = self.objects.sessions.get_mut(id.0) else { return };
        if regions.is_empty() || s.names.mrs.is_empty() {
            return;
        }
        let (vrnic, looks) = (s.vrnic, s.revoked.looks());
        s.revoked.add(regions);
        if !looks {
            s.revoked.begin_look();
            s.dying += 1;
            self.tear_down_entry(DeadObject { vrnic, session: id, dead: Dead::Regions }, MAX_TORN_DOWN);
        }
        // Stops the jobs of the session. Their requests are tried again; those that use a dead MR fail then.
        self.jobs.stop(id);
    }

    /// Frees up to `most` objects of an entry. The entry is kept if objects are left.
    fn tear_down_entry(&mut self, mut entry: DeadObject, most: usize) {
        let (done, more) = match &mut entry.dead {
            Dead::Session(remains) => {
                let before = remains.len();
                std::iter::from_fn(|| next(remains)).take(most).for_each(|object| self.remove(object));
                (before - remains.len(), remains.len() > 0)
            }
            Dead::Regions => self.tear_down_revoked(entry.session, most),
        };
        self.sched.charge(entry.vrnic, done as u64 * TEARDOWN_NS);
        if more {
            return self.objects.dead_objects.push_back(entry);
        }
        let Some(s) = self.objects.sessions.get_mut(entry.session.0) else { return };
        s.dying -= 1;
        if s.gone && s.dying == 0 {
            self.objects.sessions.remove(entry.session.0);
        }
    }

    /// Checks up to `most` further MRs of a session, and frees those in memory regions that the session has lost.
    /// Returns the number checked, and whether MRs are left to check.
    fn tear_down_revoked(&mut self, id: SessionId, most: usize) -> (usize, bool) {
        let Some(s) = self.objects.sessions.get(id.0) else { return (0, false) };
        let mrs: Vec<_> = s.names.mrs.range(s.revoked.next..).take(most).map(|(&n, &h)| (n, h)).collect();
        for &(_, h) in &mrs {
            let revoked = |m: &&Mr| self.objects.sessions.get(id.0).is_some_and(|s| s.revoked.concerns(m));
            match self.objects.mrs.get(h).filter(revoked).map(|m| m.window.is_some()) {
                Some(true) => self.objects.unbind(h),
                Some(false) => self.remove(Object::Mr(h)),
                None => {}
            }
        }
        let Some(s) = self.objects.sessions.get_mut(id.0) else { return (mrs.len(), false) };
        let more = match mrs.last() {
            Some((last, _)) if mrs.len() == most => {
                s.revoked.next = last.saturating_add(1);
                true
            }
            _ => s.revoked.begin_look(),
        };
        (mrs.len(), more)
    }
}
