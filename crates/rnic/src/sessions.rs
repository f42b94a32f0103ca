//! Sessions: they are added and removed, and are polled or parked.

use std::any::Any;
use std::sync::Arc;

use unirdma_abi::Status;
use unirdma_mem::Bell;

use crate::core::Core;
use crate::doorbell_poll::Bells;
use crate::objects::{DoorbellPage, Dropped, Handles, Objects, Resolve, Revoked, Session, SessionId, VrnicId};
use crate::sched::Scheduler;
use crate::slab::Handle;

/// Approximate cost of a kick, nanoseconds: mostly the system call that takes its notification.
const KICK_NS: u64 = 500;

impl Core {
    /// Adds a frontend of `vrnic`.
    pub fn add_session(&mut self, vrnic: VrnicId) -> Option<SessionId> {
        let v = self.objects.vrnics.get_mut(vrnic.0)?;
        v.last_session += 1;
        let s = Session {
            vrnic,
            number: v.last_session,
            names: Handles::new(&mut self.random.numbers),
            door: None,
            bell: None,
            paused: false,
            gone: false,
            away: 0,
            dying: 0,
            ended: 0,
            revoked: Revoked::default(),
            memory: None,
            stage: None,
            memory_state: v.memory_state.clone(),
        };
        let id = self.objects.sessions.insert(s).map(SessionId)?;
        self.objects.count_used(id, |u| u.sessions += 1);
        Some(id)
    }

    /// Ends everything that a session has, except its connections, and the session itself.
    pub(crate) fn remove_session(&mut self, id: SessionId) {
        let Some(s) = self.objects.sessions.get_mut(id.0).filter(|s| !s.gone) else { return };
        s.gone = true;
        if let Some(memory) = s.memory.take() {
            self.objects.dropped.add(memory);
        }
        self.objects.count_used(id, |u| u.sessions -= 1);
        self.clear_session(id);
    }

    /// Ends everything that a session has, except its connections. It is then like a new session that keeps its memory,
    /// and goes on with its object numbers.
    pub(crate) fn clear_session(&mut self, id: SessionId) {
        while self.quiesce_objects(id, usize::MAX) {}
        self.objects.doors_of(id).into_iter().for_each(|door| self.remove_door(door));
        self.outputs.retain(|o| o.session() != id);
        self.jobs.forget(id);
        self.vf_peers.forget_session(id);
        if let Some(s) = self.objects.sessions.get_mut(id.0) {
            (s.door, s.bell, s.stage, s.away) = (None, None, None, 0);
        }
        self.end_objects(id);
    }

    /// A session has kicked its wake virtqueue: its pages are polled from now on. True if its vRNIC keeps kicking or
    /// ringing for nothing, so that the caller may ignore its next kicks for a moment.
    pub fn kick(&mut self, id: SessionId, now: u64) -> bool {
        let Some(s) = self.objects.sessions.get(id.0) else { return false };
        let vrnic = s.vrnic;
        let has_rung = s.doors().filter_map(|h| self.objects.doors.get(h)).any(|d| d.bell.has_rung());
        if let Some(v) = self.objects.vrnics.get_mut(vrnic.0) {
            v.kicks += 1;
        }
        self.sched.charge(vrnic, KICK_NS);
        if !has_rung {
            self.sched.spurious_kick(vrnic, now);
        }
        self.unpark(id, now);
        self.sched.is_muted(vrnic, now)
    }

    /// All pages of a session are polled from now on, and a doze ends. False if they were polled already, or if the
    /// session is paused.
    pub fn unpark(&mut self, id: SessionId, now: u64) -> bool {
        self.rouse();
        let runs = self.objects.sessions.get(id.0).is_some_and(|s| !s.paused);
        // The notification does not say which of its pages has rung.
        runs && self.objects.doors_of(id).into_iter().fold(false, |woken, door| woken | self.unpark_door(door, now))
    }

    /// A page is polled from now on; false if it was.
    pub(crate) fn unpark_door(&mut self, h: Handle<DoorbellPage>, now: u64) -> bool {
        let Some(d) = self.objects.doors.get_mut(h) else { return false };
        d.last_rung_ns = now;
        if d.parked
            && let Some(s) = self.objects.sessions.get(d.session.0)
        {
            d.bell.unpark();
            d.parked = false;
            self.polled.add(s.vrnic, h);
            self.rouse();
            return true;
        }
        false
    }

    /// Ends the polling of doorbells until the next kick: all polled pages ask for kicks. `None`, and nothing is
    /// changed, if a doorbell has rung. Otherwise true if the caller must poll again in a moment all the same, because
    /// a driver rings in bursts, or because a vRNIC keeps ringing for nothing. The pages of such a vRNIC, which may be
    /// many, are not changed. With `starves`, neither are the pages of vRNICs whose programs should run now to post
    /// receives: the caller polls again in a moment.
    pub fn doze(&mut self, starves: bool) -> Option<bool> {
        let bells = || self.bells_but(|s, v| s.is_muted(v, self.now) || starves && s.is_starved(v));
        let bursts = bells().any(Bell::bursts);
        let any_muted = self.polled.vrnics().any(|v| self.sched.is_muted(v, self.now));
        let dozes = bells().all(|b| b.park(bursts));
        if !dozes {
            bells().for_each(Bell::unpark);
        }
        self.dozes = dozes;
        dozes.then_some(bursts || any_muted)
    }

    /// Ends [`Core::doze`]: doorbells are polled again.
    #[inline]
    pub fn rouse(&mut self) {
        if std::mem::take(&mut self.dozes) {
            self.bells_but(|s, v| s.is_muted(v, self.now)).for_each(Bell::unpark);
        }
    }

    /// The doorbells that are polled, except for vRNICs for which `not` is true.
    fn bells_but(&self, not: impl Fn(&Scheduler, VrnicId) -> bool) -> impl Iterator<Item = &Bell> {
        self.polled.doors(move |v| !not(&self.sched, v)).filter_map(|h| self.objects.doors.get(h)).map(|d| &d.bell)
    }

    /// Parks doorbell pages that have not rung for `idle_ns`, of the pages that the last round has polled. The next
    /// doorbell there kicks.
    pub fn park_idle(&mut self, now: u64, idle_ns: u64) {
        let doors = &mut self.objects.doors;
        // Nobody knows whether the other pages have rung.
        self.polled.retain_looked(|h| {
            let Some(d) = doors.get_mut(h) else { return false };
            if now.saturating_sub(d.last_rung_ns) < idle_ns {
                return true;
            }
            d.parked = d.bell.park(false);
            !d.parked
        });
    }

    /// A number that changes whenever the result of [`crate::Core::active_bells`] would change.
    pub fn active_changes(&self) -> u64 {
        self.polled.changes()
    }

    /// Copies of the doorbells that [`crate::Rnic::poll`] reads. Their holder may read them without having the RNIC,
    /// and need not call [`crate::Rnic::poll`] while none has rung and nothing else is due.
    pub fn active_bells(&self) -> Bells {
        self.polled.bells(|door| self.objects.doors.get(door).map(|d| d.bell.clone()))
    }

    /// Gives a session its doorbell page, which it keeps.
    ///
    /// # Errors
    /// `BadState` if it has one.
    pub fn set_doorbell(&mut self, s: SessionId, bell: Bell) -> Result<(), Status> {
        let session = self.objects.sessions.get(s.0).ok_or(Status::BadHandle)?;
        if session.door.is_some() {
            return Err(Status::BadState);
        }
        let door = self.add_door(s, 0, bell.clone())?;
        if let Some(session) = self.objects.sessions.get_mut(s.0) {
            (session.door, session.bell) = (Some(door), Some(bell));
        }
        Ok(())
    }

    /// CREATE_DOORBELL: adds a doorbell page, and returns its number.
    ///
    /// # Errors
    /// `Exhausted` if the session has [`unirdma_abi::MAX_DOORBELLS`].
    pub fn create_doorbell(&mut self, s: SessionId, bell: Bell) -> Result<u32, Status> {
        let session = self.objects.sessions.get(s.0).ok_or(Status::BadHandle)?;
        if session.names.doors.len() >= unirdma_abi::MAX_DOORBELLS as usize {
            return Err(Status::Exhausted);
        }
        let number = self.objects.new_number(s)?;
        let door = self.add_door(s, number, bell)?;
        self.objects.names(s).and_then(|n| n.doors.insert(number, door));
        Ok(number)
    }

    /// DESTROY_DOORBELL.
    ///
    /// # Errors
    /// `BadHandle`, or `Busy` while QPs have bits of the page.
    pub fn destroy_doorbell(&mut self, s: SessionId, number: u32) -> Result<(), Status> {
        if number == 0 {
            return Err(Status::BadHandle);
        }
        let h = self.objects.own_door(s, number)?;
        if self.objects.doors.get(h).is_some_and(DoorbellPage::is_used) {
            return Err(Status::Busy);
        }
        self.remove_door(h);
        Ok(())
    }

    fn add_door(&mut self, s: SessionId, number: u32, bell: Bell) -> Result<Handle<DoorbellPage>, Status> {
        bell.set_wakes(self.wakes);
        let parked = bell.park(false);
        let door = self.objects.doors.insert(DoorbellPage::new(s, number, bell)).ok_or(Status::Exhausted)?;
        if !parked {
            self.unpark_door(door, self.now);
        }
        Ok(door)
    }

    /// Removes a doorbell page of which no QP has a bit any more.
    pub(crate) fn remove_door(&mut self, h: Handle<DoorbellPage>) {
        self.polled.remove(h);
        let Some(d) = self.objects.doors.remove(h) else { return };
        self.objects.names(d.session).and_then(|n| n.doors.remove(&d.number));
    }

    /// Replaces a session's memory, for GET_DMA_MR.
    pub fn set_memory(&mut self, s: SessionId, memory: Arc<dyn Resolve>) {
        if let Some(session) = self.objects.sessions.get_mut(s.0)
            && let Some(before) = session.memory.replace(memory)
        {
            self.objects.dropped.add(before);
        }
    }

    /// Lets `memory` be dropped after the RNIC is released.
    pub fn drop_later(&mut self, memory: impl Any + Send) {
        self.objects.dropped.add(memory);
    }

    /// The number of queues of a session: QPs that it owns or has opened, CQs and SRQs.
    pub fn queues_of(&self, s: SessionId) -> usize {
        let names = self.objects.sessions.get(s.0).map(|s| &s.names);
        names.map_or(0, |n| n.qps.len() + n.cqs.len() + n.srqs.len())
    }

    /// Memory that is not needed any more, to be dropped after the RNIC is released, because that may take the kernel
    /// long.
    pub fn take_dropped(&mut self) -> Dropped {
        std::mem::take(&mut self.objects.dropped)
    }
}

impl Objects {
    /// All doorbell pages of a session.
    pub(crate) fn doors_of(&self, s: SessionId) -> Vec<Handle<DoorbellPage>> {
        self.sessions.get(s.0).into_iter().flat_map(Session::doors).collect()
    }
}
