//! Jobs: copies that are made without holding the core. The core makes a job, a free thread does it outside of every
//! lock, and its result is an input to the core again. A job copies between two QPs of this host, fetches bytes for
//! packets to send, stores bytes of received packets, or executes an operation on a word. Mapped memory needs jobs only
//! for long copies; private memory of a process is reached by jobs only.
//!
//! A job pins its memory, which therefore outlives the MRs that the job was made from. So an operation that takes
//! memory away (a command that ends an MR or a QP, a driver whose memory is not reachable for a moment) stops the jobs
//! that were made before, and waits for those that access the memory at that moment: a *fence*. A stopped copy is tried
//! again, with the keys that are valid then. A work request that revokes a grant, of an MR or of a window, waits in the
//! same way, but only for the jobs that use that grant.
//!
//! Private memory of a process may be slow: a page may belong to a file system of the process, or a `fork` of a large
//! process may hold a lock. A sparse file may be slow as well, while its owner makes a hole there
//! ([`crate::objects::MemoryState`]); jobs that use it are treated alike. A job that uses such memory accesses one end
//! at a time, so that a fence for one end never waits for the process at the other end, and a vRNIC has few such jobs.
//! A job that takes long is noted as slow; its process gets no further jobs until it has ended. A job that takes far
//! too long is given up, and its QP fails.

mod end;
mod task;

use std::collections::VecDeque;
use std::sync::Arc;

use unirdma_mem::Fault;

use crate::access::{MAX_PIECES, SEVERAL_GRANTS, Side, Tables};
use crate::objects::{Freed, Prefetched, Qp, Room, SendOp, SessionId, VrnicId};
use crate::slab::Handle;
use end::Part;
pub use task::Job;
pub(crate) use task::{CopyMode, Word};
use task::{Phase, Task};

/// No turn begins while this number of jobs waits.
const MAX_WAITING: usize = 8;
/// Most jobs of one vRNIC that use private memory of processes, waiting ones included.
const MAX_PROCESS_WAITING: usize = 64;
/// A vRNIC with this number of slow jobs gets no more jobs that use private memory of processes.
const MAX_SLOW: usize = 4;
/// Most boxes of ended jobs, and most buffers, that are kept for new jobs.
const MAX_SPARE: usize = 16;
/// Most requests of a QP that one job copies, and most bytes of them. For a longer message the keys are looked up again
/// for each job.
const MAX_PARTS: usize = 32;
const MAX_BYTES: u64 = 1 << 20;
/// Most requests of one job where pages may be missing. A job seldom has time for more of them.
const MAX_SPARSE_PARTS: usize = 4;
/// Most bytes that a job copies from or to private memory of a process.
const MAX_PROCESS_BYTES: u64 = 128 << 10;
/// Largest buffer that is kept, in bytes.
const MAX_SPARE_BYTES: usize = 512 << 10;
/// Most bytes that one job fetches or stores for packets.
pub(crate) const MAX_PAYLOAD: u64 = 64 << 10;

/// An operation that waits for a fence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Waiter {
    /// The answer of a command.
    Command,
    /// A driver that has announced, with this number, that its memory is not reachable for a moment.
    Away(u32),
}

/// A job that waits or is being done.
pub(crate) struct Flying {
    number: u64,
    pub qp: Handle<Qp>,
    pub peer: Handle<Qp>,
    phase: Arc<Phase>,
    /// The sessions whose memory it reads and writes.
    sessions: [SessionId; 2],
    /// The revocable grants by which it reads and writes, as returned by [`Tables::grant`].
    grants: [Option<u32>; 2],
    /// The sessions of `sessions` whose memory may make the job wait, with their vRNICs. Such memory is private memory
    /// of a process, for example.
    processes: [Option<(SessionId, VrnicId)>; 2],
    /// True while a thread does it. Not set for jobs that never wait for a process.
    runs: bool,
    /// It was noted as slow.
    slow: bool,
    /// Its QP does not wait for it any more.
    given_up: bool,
    /// True for an operation on a word.
    is_word: bool,
}

impl Flying {
    /// True if it accesses memory of this session at this moment.
    fn reaches(&self, session: SessionId) -> bool {
        self.sessions[0] == session && self.phase.is_at(Phase::READS)
            || self.sessions[1] == session && self.phase.is_at(Phase::WRITES)
    }

    /// True if its end `i` uses the grant that was revoked.
    fn goes_by(&self, freed: Freed, i: usize) -> bool {
        let several = self.grants[i] == Some(SEVERAL_GRANTS) && self.sessions[i] == freed.session;
        self.grants[i] == Some(freed.grant) || several
    }

    fn is_of(&self, vrnic: VrnicId) -> bool {
        self.processes.iter().flatten().any(|p| p.1 == vrnic)
    }
}

/// Result of an attempt to make a job.
pub(crate) enum JobResult {
    /// The job with this number.
    Job(u64),
    /// No job, because memory is not there.
    Nothing(Fault),
    /// No job for the moment, because the memory of its process is slow.
    Slow,
    /// No job for the moment, because the vRNIC has enough of them.
    Full,
}

/// One end of a job to be made: the side of the message, and the session and the vRNIC that own it.
pub(crate) type Whose<'a> = (Side<'a>, SessionId, VrnicId);

struct Fence {
    session: SessionId,
    /// The fence waits for jobs with smaller numbers than this one.
    before: u64,
    waiter: Waiter,
}

/// The jobs of an RNIC.
#[derive(Default)]
pub(crate) struct Jobs {
    made: u64,
    waiting: VecDeque<Box<Job>>,
    /// Waiting jobs that use private memory of processes.
    waiting_process: VecDeque<Box<Job>>,
    /// Number of jobs with private memory of processes that are being done, without slow ones.
    in_process: usize,
    flying: Vec<Flying>,
    /// The QP of the job that ended last. The thread that did that job has the QP's memory in its caches.
    warm: Handle<Qp>,
    fences: Vec<Fence>,
    #[allow(clippy::vec_box)]
    spare: Vec<Box<Job>>,
    buffers: Vec<Vec<u8>>,
}

impl Jobs {
    /// True if enough jobs wait to keep all threads busy.
    pub fn is_full(&self) -> bool {
        self.waiting.len() >= MAX_WAITING
    }

    /// Number of jobs made so far.
    pub fn made(&self) -> u64 {
        self.made
    }

    /// True if jobs wait or are being done.
    pub fn are_flying(&self) -> bool {
        !self.flying.is_empty()
    }

    /// True if [`Jobs::take`] has a job to return.
    pub fn has_any(&self) -> bool {
        !self.waiting.is_empty() || self.in_process == 0 && !self.waiting_process.is_empty()
    }

    /// Makes a job that copies up to `bytes` bytes, from `off` on, of a message of a QP to or from its peer.
    pub fn make(
        &mut self,
        tables: &Tables<'_>,
        qps: [Handle<Qp>; 2],
        ends: [Whose<'_>; 2],
        (off, bytes): (u64, u64),
        manner: CopyMode,
    ) -> JobResult {
        let grants = ends.map(|e| tables.grant(e.0));
        self.begin(qps, ends.map(|e| (e.1, e.2)), grants, Task::Copy(manner), |part| {
            part.pin(tables, ends.map(|e| e.0), (off, bytes.min(MAX_BYTES)), MAX_PIECES)?;
            if part.may_wait() {
                part.bytes = part.bytes.min(MAX_PROCESS_BYTES);
            }
            Ok(())
        })
    }

    /// Makes a job that fetches `bytes` bytes, from `off` on, of the source of request or response `of` of a QP. Makes
    /// none if a job for `to` is under way, or has found that the bytes cannot be read.
    pub fn fetch(
        &mut self,
        tables: &Tables<'_>,
        qp: Handle<Qp>,
        from: Whose<'_>,
        (of, off, bytes): (u32, u64, u64),
        (to, room): (&mut Prefetched, &Room),
    ) -> JobResult {
        if let Some(number) = to.coming() {
            return JobResult::Job(number);
        }
        if let Some(fault) = to.take_fault(of, off) {
            return JobResult::Nothing(fault);
        }
        if !to.reserve(room, bytes as usize) {
            return JobResult::Full;
        }
        let made =
            self.begin([qp, Handle::NONE], [(from.1, from.2); 2], [tables.grant(from.0), None], Task::Fetch, |part| {
                part.bytes = part.from.pin(tables, from.0, (off, bytes), usize::MAX, Fault::Source)?;
                Ok(())
            });
        if let JobResult::Job(number) = made {
            to.begin(number, of, off);
        } else {
            to.clear();
        }
        made
    }

    /// Makes a job that stores these parts, one after the other, in the destination of a message for a QP, from `off`
    /// on.
    pub fn store(
        &mut self,
        tables: &Tables<'_>,
        qp: Handle<Qp>,
        to: Whose<'_>,
        off: u64,
        parts: &[&[u8]],
    ) -> JobResult {
        self.begin([qp, qp], [(to.1, to.2); 2], [None, tables.grant(to.0)], Task::Store, |part| {
            part.from.copy_of(parts);
            part.bytes = part.to.pin(tables, to.0, (off, part.from.len()), usize::MAX, Fault::Destination)?;
            Ok(())
        })
    }

    /// Makes a job that executes an operation once, on the word of 8 bytes at the beginning of `to`. If there is a
    /// source, its value is written.
    pub fn word(
        &mut self,
        tables: &Tables<'_>,
        qps: [Handle<Qp>; 2],
        from: Option<Whose<'_>>,
        to: Whose<'_>,
        word: Word,
    ) -> JobResult {
        let source = from.unwrap_or(to);
        let grants = [from.and_then(|f| tables.grant(f.0)), tables.grant(to.0)];
        self.begin(qps, [(source.1, source.2), (to.1, to.2)], grants, Task::Word(word), |part| {
            let word = (0, size_of::<u64>() as u64);
            if let Some(from) = from {
                part.from.pin(tables, from.0, word, usize::MAX, Fault::Source)?;
            }
            part.bytes = part.to.pin(tables, to.0, word, usize::MAX, Fault::Destination)?;
            Ok(())
        })
    }

    /// Makes a job whose two ends have these owners and grants. `pin` pins the memory of both.
    fn begin(
        &mut self,
        [qp, peer]: [Handle<Qp>; 2],
        owners: [(SessionId, VrnicId); 2],
        grants: [Option<u32>; 2],
        task: Task,
        pin: impl FnOnce(&mut Part) -> Result<(), Fault>,
    ) -> JobResult {
        let mut job = self.spare.pop().unwrap_or_default();
        job.parts.resize_with(job.parts.len().max(1), Part::default);
        let part = &mut job.parts[0];
        if let Err(fault) = pin(part) {
            self.keep(job);
            return JobResult::Nothing(fault);
        }
        let process = |is_there: bool, owner| is_there.then_some(owner);
        let processes = [process(part.from.may_wait(), owners[0]), process(part.to.may_wait(), owners[1])];
        let sparse = [(&part.to, owners[1].1), (&part.from, owners[0].1)].into_iter().find(|e| e.0.is_sparse());
        (job.sparse, job.owners) = (sparse.map(|e| e.1), owners.map(|o| Some(o.1)));
        for &(session, vrnic) in processes.iter().flatten() {
            if self.is_slow(session, vrnic) {
                self.keep(job);
                return JobResult::Slow;
            }
            if self.flying.iter().filter(|f| f.is_of(vrnic)).count() >= MAX_PROCESS_WAITING {
                self.keep(job);
                return JobResult::Full;
            }
        }
        self.made += 1;
        if task.gives_data() {
            job.data = self.buffer();
        }
        job.begin(self.made, [qp, peer], task);
        self.flying.push(Flying {
            number: job.number(),
            qp,
            peer,
            phase: job.phase.clone(),
            sessions: [owners[0].0, owners[1].0],
            grants,
            processes,
            runs: false,
            slow: false,
            given_up: false,
            is_word: matches!(task, Task::Word(_)),
        });
        let through_process = processes.iter().any(Option::is_some);
        let queue = if through_process { &mut self.waiting_process } else { &mut self.waiting };
        queue.push_back(job);
        JobResult::Job(self.made)
    }

    /// Extends the job that was made last by one more message: a copy between memory of the same sessions by the same
    /// grants, for the next request of the QP. Returns the list to which the caller adds the request. `None` if the job
    /// has enough requests, or if the copy is not one between mappings.
    pub fn extend(
        &mut self,
        tables: &Tables<'_>,
        ends: [Side<'_>; 2],
        bytes: u64,
    ) -> Option<&mut VecDeque<Box<SendOp>>> {
        let (made, grants) = (self.made, ends.map(|e| tables.grant(e)));
        self.flying.iter().rfind(|f| f.number == made).filter(|f| f.grants == grants)?;
        let job = self.waiting.back_mut().filter(|j| j.number() == made)?;
        let at = job.next.len() + 1;
        let most = if job.sparse.is_some() { MAX_SPARSE_PARTS } else { MAX_PARTS };
        let (had, pieces) = job.size();
        let room = (2 * MAX_PIECES).saturating_sub(pieces) / 2;
        if at >= most || had + bytes > MAX_BYTES || job.parts[at - 1].cut {
            return None;
        }
        job.parts.resize_with(job.parts.len().max(at + 1), Part::default);
        let part = &mut job.parts[at];
        let whole = part.pin(tables, ends, (0, bytes), room).is_ok() && !part.cut && !part.may_wait();
        whole.then_some(&mut job.next)
    }

    /// An empty buffer for packets.
    pub fn buffer(&mut self) -> Vec<u8> {
        self.buffers.pop().unwrap_or_default()
    }

    /// Keeps a buffer for another job.
    pub fn keep_buffer(&mut self, mut buffer: Vec<u8>) {
        if self.buffers.len() < MAX_SPARE && (1..=MAX_SPARE_BYTES).contains(&buffer.capacity()) {
            buffer.clear();
            self.buffers.push(buffer);
        }
    }

    /// True if no jobs may use private memory of this session of this vRNIC for the moment.
    fn is_slow(&self, session: SessionId, vrnic: VrnicId) -> bool {
        let slow = || self.flying.iter().filter(|f| f.slow && f.is_of(vrnic));
        slow().any(|f| f.processes.iter().flatten().any(|p| p.0 == session)) || slow().count() >= MAX_SLOW
    }

    /// The next job for the caller to do. A caller that has just ended a job gets one of the same QP if there is one.
    /// Only one job that may be slow is given out at a time, so that not every poller waits.
    pub fn take(&mut self) -> Option<Box<Job>> {
        if self.in_process == 0
            && let Some(job) = self.waiting_process.pop_front()
        {
            self.in_process += 1;
            self.flying.iter_mut().filter(|f| f.number == job.number()).for_each(|f| f.runs = true);
            return Some(job);
        }
        let warm = std::mem::take(&mut self.warm);
        let at = self.waiting.iter().position(|j| j.qp == warm).unwrap_or(0);
        self.waiting.remove(at)
    }

    /// The next job that does not wait for a process.
    pub fn take_brief(&mut self) -> Option<Box<Job>> {
        self.waiting.pop_front()
    }

    /// True if a job that does not wait for a process copies for a QP for which `concerns` is true.
    pub fn copies_for(&self, concerns: impl Fn(&Handle<Qp>) -> bool) -> bool {
        let brief = |f: &&Flying| !f.given_up && f.processes.iter().all(Option::is_none);
        self.flying.iter().filter(brief).any(|f| concerns(&f.qp))
    }

    /// Notes that the job with this number takes long, so that other jobs do not wait for it. Returns the waiting jobs
    /// that are withdrawn because they use the same memory.
    pub fn note_slow(&mut self, number: u64) -> VecDeque<Box<Job>> {
        let Some(f) = self.flying.iter_mut().find(|f| f.number == number && f.runs && !f.slow) else {
            return VecDeque::new();
        };
        f.slow = true;
        self.in_process -= 1;
        let (mut kept, mut withdrawn) = (VecDeque::new(), VecDeque::new());
        for job in std::mem::take(&mut self.waiting_process) {
            let of = self.flying.iter().find(|f| f.number == job.number()).map_or([None; 2], |f| f.processes);
            if of.iter().flatten().any(|&(session, vrnic)| self.is_slow(session, vrnic)) {
                withdrawn.push_back(job);
            } else {
                kept.push_back(job);
            }
        }
        self.waiting_process = kept;
        withdrawn
    }

    /// Gives up the job with this number: nothing waits for it any more. Returns the job, and the fault that names the
    /// end at which it is stuck.
    pub fn give_up(&mut self, number: u64) -> Option<(&Flying, Fault)> {
        let f = self.flying.iter_mut().find(|f| f.number == number && !f.given_up)?;
        f.given_up = true;
        f.phase.stop();
        let fault = if f.phase.is_at(Phase::WRITES) { Fault::Destination } else { Fault::Source };
        Some((f, fault))
    }

    /// Removes a job that has ended. False if it was given up before.
    pub fn end(&mut self, job: &Job) -> bool {
        let Some(at) = self.flying.iter().position(|f| f.number == job.number()) else { return false };
        let f = self.flying.swap_remove(at);
        self.warm = job.qp;
        self.in_process -= usize::from(f.runs && !f.slow);
        !f.given_up
    }

    /// Keeps the box of an ended job for another one.
    pub fn keep(&mut self, mut job: Box<Job>) {
        self.keep_buffer(std::mem::take(&mut job.data));
        if self.spare.len() < MAX_SPARE {
            job.parts.iter_mut().for_each(Part::clear);
            self.spare.push(job);
        }
    }

    /// Gives up the operations on words that were executed, or are being executed at this moment, for a QP for which
    /// `concerns` is true. Returns each job's QPs, its number, and the old value of the word. A word that is being
    /// written at this moment counts as written, because its end cannot be awaited here. If that write fails after all,
    /// its requester gets no error.
    pub fn take_executed(&mut self, concerns: impl Fn(Handle<Qp>) -> bool) -> Vec<([Handle<Qp>; 2], u64, u64)> {
        let mut all = Vec::new();
        let those = |f: &&mut Flying| f.is_word && !f.given_up && (concerns(f.qp) || concerns(f.peer));
        for f in self.flying.iter_mut().filter(those) {
            f.phase.stop();
            if let Some(found) = f.phase.executed() {
                f.given_up = true;
                all.push(([f.qp, f.peer], f.number, found));
            }
        }
        all
    }

    fn is_clear(&self, session: SessionId, before: u64) -> bool {
        !self.flying.iter().any(|f| f.number < before && f.reaches(session))
    }

    /// Stops the present jobs for memory of `session`, and lets `waiter` wait for those that access it at this moment.
    /// False if there are none.
    pub fn fence(&mut self, session: SessionId, waiter: Waiter) -> bool {
        let before = self.made + 1;
        self.flying.iter().filter(|f| f.sessions.contains(&session)).for_each(|f| f.phase.stop());
        let waits = !self.is_clear(session, before);
        if waits {
            self.fences.push(Fence { session, before, waiter });
        }
        waits
    }

    /// Stops the present jobs for memory of `session`, without a waiter.
    pub fn stop(&mut self, session: SessionId) {
        self.flying.iter().filter(|f| f.sessions.contains(&session)).for_each(|f| f.phase.stop());
    }

    /// Stops the jobs that use a revoked grant. True if one of them accesses the memory at this moment.
    pub fn withdraw(&self, freed: Freed) -> bool {
        let goes = |f: &&Flying| f.goes_by(freed, 0) || f.goes_by(freed, 1);
        self.flying.iter().filter(goes).for_each(|f| f.phase.stop());
        let at_work = |f: &Flying| {
            [Phase::READS, Phase::WRITES].iter().enumerate().any(|(i, &w)| f.goes_by(freed, i) && f.phase.is_at(w))
        };
        self.flying.iter().any(at_work)
    }

    /// True if a job with memory of `session` at either end is copying at this moment.
    pub fn reach(&self, session: SessionId) -> bool {
        let at_work = |f: &Flying| f.phase.is_at(Phase::READS | Phase::WRITES);
        self.flying.iter().any(|f| f.sessions.contains(&session) && at_work(f))
    }

    /// Removes and returns a fence that has passed.
    pub fn passed(&mut self) -> Option<(SessionId, Waiter)> {
        let at = self.fences.iter().position(|f| self.is_clear(f.session, f.before))?;
        let f = self.fences.swap_remove(at);
        Some((f.session, f.waiter))
    }

    /// Forgets the fences of a session.
    pub fn forget(&mut self, session: SessionId) {
        self.fences.retain(|f| f.session != session);
    }

    /// True if a command of a session waits.
    pub fn delays(&self, session: SessionId) -> bool {
        self.fences.iter().any(|f| f.session == session && f.waiter == Waiter::Command)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A request that frees an MR waits for the job that accesses the MR's memory at that moment, and stops the other
    /// jobs that would.
    #[test]
    fn a_grant_is_withdrawn_from_the_jobs_that_go_by_it() {
        let owner = SessionId::default();
        let flying = |number, grants| Flying {
            number,
            qp: Handle::NONE,
            peer: Handle::NONE,
            phase: Arc::default(),
            sessions: [owner; 2],
            grants,
            processes: [None; 2],
            runs: false,
            slow: false,
            given_up: false,
            is_word: false,
        };
        let grants = [[None, Some(7)], [Some(7), None], [None, Some(8)], [None, Some(SEVERAL_GRANTS)], [None, None]];
        let jobs = Jobs { flying: (1..).zip(grants).map(|(n, g)| flying(n, g)).collect(), ..Jobs::default() };
        let freed = Freed { session: owner, grant: 7 };
        let during = |i: usize, what| jobs.flying[i].phase.enter(what, || jobs.withdraw(freed));
        // Jobs without this grant are not waited for.
        assert_eq!((during(4, Phase::WRITES), during(2, Phase::WRITES)), (Some(false), Some(false)));
        let fresh = |i: usize, what| {
            let jobs = Jobs { flying: vec![flying(1, grants[i])], ..Jobs::default() };
            let waits = jobs.flying[0].phase.enter(what, || jobs.withdraw(freed));
            (waits, jobs.flying[0].phase.enter(what, || ()).is_none())
        };
        assert_eq!((fresh(0, Phase::READS), fresh(0, Phase::WRITES)), ((Some(false), true), (Some(true), true)));
        assert_eq!((fresh(1, Phase::READS), fresh(1, Phase::WRITES)), ((Some(true), true), (Some(false), true)));
        assert_eq!((fresh(2, Phase::WRITES), fresh(3, Phase::WRITES)), ((Some(false), false), (Some(true), true)));
    }
}
