//! Sessions: they come and go, and are polled or parked.

use std::sync::Arc;

use unirdma_abi::Status;
use unirdma_mem::Bell;

use crate::core::Core;
use crate::executor::Object;
use crate::objects::{Names, Resolve, Session, SessionId, VnicId};
use crate::polled::Bells;

impl Core {
    /// Adds a frontend of `vnic`.
    pub fn add_session(&mut self, vnic: VnicId) -> Option<SessionId> {
        let v = self.objects.vnics.get_mut(vnic.0)?;
        v.last_session += 1;
        let s = Session {
            vnic,
            number: v.last_session,
            names: Names::new(&mut self.random.numbers),
            bell: None,
            slots: Vec::new(),
            free_slots: Vec::new(),
            parked: true,
            rung: false,
            last_rung_ns: 0,
            away: 0,
            memory: None,
            stage: None,
        };
        let id = self.objects.sessions.insert(s).map(SessionId)?;
        self.objects.count_used(id, |u| u.sessions += 1);
        Some(id)
    }

    /// Frees everything that a session had, its connections aside.
    pub(crate) fn remove_session(&mut self, id: SessionId) {
        // The QPs first, since they use the others.
        let Some(names) = self.objects.names(id).map(std::mem::take) else { return };
        for h in names.qps {
            while self.leave_qp(h, id) {}
        }
        let srqs = names.srqs.into_values().map(Object::Srq);
        let mrs = names.mrs.into_values().map(Object::Mr);
        let ahs = names.ahs.into_values().map(Object::Ah);
        let cqs = names.cqs.into_values().map(Object::Cq);
        for object in srqs.chain(mrs).chain(ahs).chain(cqs) {
            self.remove(object);
        }
        for h in names.xrcds.into_values() {
            self.objects.remove_xrcd(h);
        }
        for h in names.pds.into_values() {
            self.remove(Object::Pd(h));
        }
        self.objects.count_used(id, |u| u.sessions -= 1);
        self.polled.remove(id);
        self.outputs.retain(|o| o.session() != id);
        self.jobs.forget(id);
        self.objects.sessions.remove(id.0);
    }

    /// A session kicked its wake virtqueue: poll it from now on.
    pub fn unpark(&mut self, id: SessionId, now: u64) {
        if let Some(s) = self.objects.sessions.get_mut(id.0) {
            s.last_rung_ns = now;
            if s.parked
                && let Some(bell) = &s.bell
            {
                bell.unpark();
                s.parked = false;
                self.polled.add(s.vnic, id);
            }
        }
    }

    /// Lets sessions sleep that have not rung for `idle_ns`, of those whose doorbells the last round has looked at. Their next
    /// doorbell kicks.
    pub fn park_idle(&mut self, now: u64, idle_ns: u64) {
        let sessions = &mut self.objects.sessions;
        // Of the others nobody knows whether they have rung.
        self.polled.retain_looked(|id| {
            let Some(s) = sessions.get_mut(id.0) else { return false };
            if now.saturating_sub(s.last_rung_ns) < idle_ns {
                return true;
            }
            s.parked = s.bell.as_ref().is_none_or(|b| b.park());
            !s.parked
        });
    }

    /// Changes whenever [`crate::Core::active_bells`] would.
    pub fn active_changes(&self) -> u64 {
        self.polled.changes()
    }

    /// Copies of the doorbells that [`crate::Rnic::poll`] looks at. Whoever has them may look at them without having the RNIC, and
    /// need not call [`crate::Rnic::poll`] while none has rung and nothing else is due.
    pub fn active_bells(&self) -> Bells {
        self.polled.bells(|s| self.objects.sessions.get(s.0)?.bell.clone())
    }

    /// Gives a session its doorbell page, which it has from then on.
    ///
    /// # Errors
    /// `BadState` if it has one.
    pub fn set_doorbell(&mut self, s: SessionId, bell: Bell) -> Result<(), Status> {
        let hints = self.hints;
        let session = self.objects.sessions.get_mut(s.0).ok_or(Status::BadHandle)?;
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
        if let Some(session) = self.objects.sessions.get_mut(s.0) {
            session.memory = Some(memory);
        }
    }
}
