//! How messages go through the stage of a session: memory where they wait for their receiver.
//!
//! A receive into memory of the way *copy* would cost system calls here. If the session has a stage, the message is put
//! there instead, with its destination addresses, and the driver copies it to them when the program polls the
//! completion. A message that finds no room goes through the process's memory as it does without a stage.

use unirdma_abi as abi;
use unirdma_formats::{Lkey, access};

use super::Objects;
use super::ids::SessionId;
use super::mr::Backing;
use super::qp::Qp;
use crate::slab::Handle;

impl Objects {
    /// Lets a message of at most `bytes` for the receive that QP `h` has taken go through the stage, if there is a
    /// stage with room, and all of the receive lies in the process's memory. False if there is no room and the message
    /// should wait a moment.
    pub fn stage_receive(&mut self, now: u64, h: Handle<Qp>, bytes: u64) -> bool {
        let Some(q) = self.qps.get(h) else { return true };
        let Some(r) = &q.recv else { return true };
        if let Some(s) = r.staged {
            // An earlier message was broken off and has left its receive, and the record, to this one.
            if s.owner == q.memory && s.room >= bytes {
                return true;
            }
            self.unstage(h);
            return self.stage_receive(now, h, bytes);
        }
        let Some(session) = self.sessions.get(q.memory.0) else { return true };
        if session.stage.is_none() || bytes == 0 {
            return true;
        }
        let mut places = [abi::StagePlace::default(); abi::MAX_SGE as usize];
        let n = self.places(q, &r.sges[..r.num_sge], &mut places);
        let owner = q.memory;
        let (Some(n), Some(session)) = (n, self.sessions.get_mut(owner.0)) else { return true };
        let Some(stage) = &mut session.stage else { return true };
        let Some(staged) = stage.take(now, owner, &places[..n], bytes) else {
            return !stage.is_worth_waiting(now, bytes);
        };
        if let Some(r) = self.qps.get_mut(h).and_then(|q| q.recv.as_mut()) {
            r.staged = Some(staged);
        }
        true
    }

    /// The addresses in the process of the ranges of a receive, and their number. `None` if not all lie there, or if
    /// one is refused.
    fn places(&self, q: &Qp, sges: &[abi::Sge], out: &mut [abi::StagePlace]) -> Option<usize> {
        let mut n = 0;
        for s in sges.iter().filter(|s| s.length > 0) {
            let mr = self.mrs.local(Lkey(s.lkey)).filter(|m| m.owner == q.memory)?;
            let Backing::Process(_, base) = &mr.backing else { return None };
            if !mr.grants(q.pd, access::LOCAL_WRITE | access::STAGE, s.addr, s.length.into()) {
                return None;
            }
            let addr = base.wrapping_add(s.addr - mr.iova);
            *out.get_mut(n)? = abi::StagePlace { addr, length: s.length, lkey: s.lkey };
            n += 1;
        }
        Some(n)
    }

    /// The message of QP `h`'s receive does not go through the stage, or will not be completed.
    pub fn unstage(&mut self, h: Handle<Qp>) {
        let Some(q) = self.qps.get_mut(h) else { return };
        let Some(s) = q.recv.as_mut().and_then(|r| r.staged.take()) else { return };
        self.give_stage_back(s.owner, s.record);
    }

    pub fn give_stage_back(&self, s: SessionId, record: u32) {
        if let Some(stage) = self.sessions.get(s.0).and_then(|s| s.stage.as_ref()) {
            stage.give_back(record);
        }
    }

    /// The record of a receive that completes with `bytes`, as its completion names it; 0 if it has none.
    pub fn finish_stage(&mut self, h: Handle<Qp>, placed: bool, bytes: u64) -> u32 {
        let Some(q) = self.qps.get_mut(h) else { return 0 };
        let Some(s) = q.recv.as_mut().and_then(|r| r.staged.take()) else { return 0 };
        if !placed {
            self.give_stage_back(s.owner, s.record);
            return 0;
        }
        if bytes < s.room
            && let Some(stage) = self.sessions.get_mut(s.owner.0).and_then(|s| s.stage.as_mut())
        {
            stage.trim(&s, bytes);
        }
        s.record
    }
}
