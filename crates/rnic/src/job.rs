//! Jobs: copies that leave the core. The core says what is to be copied, whoever is free does it outside of every lock, and
//! what came of it is an input again.
//!
//! A job pins its memory: it outlives the MRs that it was made from. So whoever takes memory away (a command that ends an MR or a
//! QP, a driver whose memory goes away for a moment) stops the jobs that were made before, and waits for those that reach the
//! memory at that very moment: a *fence*. What was stopped is tried again, with the keys that hold then.
//!
//! Private memory of a process may be slow: a page of its own file system, a lock that a `fork` of a large process holds. A job
//! that goes through such memory holds one end at a time, so that nobody waits for the other end's process, and few such jobs of
//! a vRNIC are under way. One that takes long is noted as slow, and then its process gets no further ones until it has ended; one
//! that takes far too long is given up, and its QP fails.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use unirdma_mem::{Bell, Fault, Loc, ProcMem, Span, fetch, transfer};

use crate::access::{Side, Tables};
use crate::objects::{Qp, SessionId, VnicId, Work};
use crate::slab::Handle;

/// While so many jobs wait for somebody to do them, no turn begins.
const MAX_WAITING: usize = 8;
/// Most jobs of one vRNIC that go through private memory of processes, waiting ones included.
const MAX_PROCESS_WAITING: usize = 64;
/// A vRNIC that has so many slow jobs gets no more jobs that go through private memory of processes.
const MAX_SLOW: usize = 4;
/// Boxes of jobs that are over, which are kept for new ones.
const MAX_SPARE: usize = 16;
/// Most requests of a QP that one job copies for, and most of their bytes. The keys of a longer message are looked up again for each
/// job.
const MAX_PARTS: usize = 32;
const MAX_BYTES: u64 = 1 << 20;
/// Most bytes that a job copies through private memory of a process.
const MAX_PROCESS_BYTES: u64 = 128 << 10;
/// A job looks at the clock, and whether it was stopped, after so many bytes.
const PIECE: u64 = 64 << 10;
/// After this time a job begins nothing more, nanoseconds: others may wait for whoever does it.
const ENOUGH_NS: u64 = 10_000;

/// Memory that a job holds: it stays mapped until the job lets it go.
enum Place {
    Mapped(Span, u64),
    Process(ProcMem, u64, Option<Bell>),
    Null,
    Away,
    /// Private bytes of the job, from here on.
    Own(usize),
}

/// One end of a copy.
#[derive(Default)]
struct End {
    /// Places and their lengths.
    places: Vec<(Place, u64)>,
    /// Data that came with the WQE.
    own: Vec<u8>,
}

impl End {
    fn clear(&mut self) {
        self.places.clear();
        self.own.clear();
    }

    /// Pins bytes `[off, off + len)` of a side of a message.
    ///
    /// # Errors
    /// `fault` if they are not all there.
    fn pin(&mut self, tables: &Tables<'_>, side: Side<'_>, off: u64, len: u64, fault: Fault) -> Result<(), Fault> {
        self.clear();
        let mut done = 0;
        while done < len {
            let (at, n) = tables.at(side, off + done, len - done).ok_or(fault)?;
            let place = match at {
                Loc::Mapped(span, off) => Place::Mapped(span.clone(), off),
                Loc::Process(mem, addr, bell) => Place::Process(mem.clone(), addr, bell.cloned()),
                Loc::Null => Place::Null,
                Loc::Away => Place::Away,
                Loc::Bytes(b) => {
                    let start = self.own.len();
                    self.own.extend_from_slice(b.get(..n as usize).ok_or(fault)?);
                    Place::Own(start)
                }
            };
            self.places.push((place, n));
            done += n;
        }
        Ok(())
    }

    /// True if it lies in the private memory of a process, which takes system calls and may be slow.
    fn is_in_process(&self) -> bool {
        self.places.iter().any(|(p, _)| matches!(p, Place::Process(..)))
    }

    /// The place of byte `off`, and how many bytes follow it there.
    fn at(&self, mut off: u64) -> Option<(Loc<'_>, u64)> {
        for (place, len) in &self.places {
            if off < *len {
                let at = match place {
                    Place::Mapped(span, start) => Loc::Mapped(span, start + off),
                    Place::Process(mem, addr, bell) => Loc::Process(mem, addr.wrapping_add(off), bell.as_ref()),
                    Place::Null => Loc::Null,
                    Place::Away => Loc::Away,
                    Place::Own(start) => Loc::Bytes(self.own.get(start + off as usize..)?),
                };
                return Some((at, len - off));
            }
            off -= len;
        }
        None
    }
}

/// What a job does at this moment. Both the thread that does it and the core see it.
#[derive(Default)]
struct Phase(AtomicU8);

impl Phase {
    const READS: u8 = 1;
    const WRITES: u8 = 2;
    const STOPPED: u8 = 4;

    /// Begins to read or write, or both; does nothing and gives `None` if the job was stopped.
    fn enter<R>(&self, what: u8, f: impl FnOnce() -> R) -> Option<R> {
        let stopped = self.0.fetch_or(what, Ordering::SeqCst) & Self::STOPPED != 0;
        let r = (!stopped).then(f);
        self.0.fetch_and(!what, Ordering::SeqCst);
        r
    }

    /// Stops the job: a read or write that runs at this moment goes on to its end, and no other begins.
    fn stop(&self) {
        self.0.fetch_or(Self::STOPPED, Ordering::SeqCst);
    }

    fn is_at(&self, what: u8) -> bool {
        self.0.load(Ordering::SeqCst) & what != 0
    }
}

/// What a job copies for one request.
#[derive(Default)]
struct Part {
    from: End,
    to: End,
    bytes: u64,
}

impl Part {
    fn clear(&mut self) {
        self.from.clear();
        self.to.clear();
    }

    /// Pins both ends of a copy.
    fn pin(&mut self, tables: &Tables<'_>, [from, to]: [Side<'_>; 2], off: u64, bytes: u64) -> Result<(), Fault> {
        self.bytes = bytes;
        self.from.pin(tables, from, off, bytes, Fault::Source)?;
        self.to.pin(tables, to, off, bytes, Fault::Destination)
    }

    fn is_in_process(&self) -> bool {
        self.from.is_in_process() || self.to.is_in_process()
    }

    /// Copies up to `most` bytes from `done` on.
    fn copy(&self, mut done: u64, most: u64) -> Result<(), Fault> {
        let end = self.bytes.min(done + most);
        while done < end {
            let (from, n) = self.from.at(done).ok_or(Fault::Source)?;
            let (to, room) = self.to.at(done).ok_or(Fault::Destination)?;
            let n = n.min(room).min(end - done);
            transfer(from, to, n as usize, &mut [])?;
            done += n;
        }
        Ok(())
    }

    /// Copies by way of `scratch`, one end at a time; `None` if it was stopped.
    fn bounce(&self, phase: &Phase, scratch: &mut [u8]) -> Option<Result<(), Fault>> {
        let mut done = 0;
        while done < self.bytes {
            let (from, n) = self.from.at(done)?;
            let (to, room) = self.to.at(done)?;
            let n = n.min(room).min(scratch.len() as u64);
            let bytes = &mut scratch[..n as usize];
            let moved = match phase.enter(Phase::READS, || fetch(from, bytes))? {
                Ok(()) => phase.enter(Phase::WRITES, || transfer(Loc::Bytes(bytes), to, bytes.len(), &mut []))?,
                Err(fault) => Err(fault),
            };
            if moved.is_err() {
                return Some(moved);
            }
            done += n;
        }
        Some(Ok(()))
    }
}

/// A copy of a part of a message between two QPs of this host, and of the short messages that follow it.
#[derive(Default)]
pub struct Job {
    number: u64,
    phase: Arc<Phase>,
    pub(crate) qp: Handle<Qp>,
    pub(crate) peer: Handle<Qp>,
    /// What it copies: for the request at the head of the QP's send queue, and then for each of `next`. What follows is from older jobs.
    parts: Vec<Part>,
    /// The requests behind the head of the send queue that it copies for.
    next: VecDeque<Box<Work>>,
    result: Copied,
    took_ns: u64,
}

/// What a job has copied.
#[derive(Clone, Copy, Default)]
pub(crate) struct Copied {
    /// How many bytes for the first request, or why none.
    pub first: Option<Result<u64, Fault>>,
    /// For how many of the requests behind it everything.
    pub next: usize,
}

impl Job {
    /// Copies, for some 10 us at most unless its memory is slow. `scratch` bounces what goes through the private memory of a process;
    /// `clock` tells the time, nanoseconds.
    pub fn run(&mut self, scratch: &mut [u8], clock: impl Fn() -> u64) {
        // What is stopped is tried again, as if its memory had moved.
        const STOPPED: Fault = Fault::SourceMoves;
        let began = clock();
        self.result = Copied::default();
        let Some(first) = self.parts.first() else { return };
        if self.is_in_process() {
            let copied = first.bounce(&self.phase, scratch).unwrap_or(Err(STOPPED));
            self.result.first = Some(copied.map(|()| first.bytes));
        } else {
            let parts = &self.parts[..=self.next.len()];
            let goes_on = || clock().saturating_sub(began) < ENOUGH_NS;
            for (i, part) in parts.iter().enumerate() {
                let mut done = 0;
                let mut copied = Ok(());
                while copied.is_ok() && done < part.bytes && (i + done as usize == 0 || goes_on()) {
                    let both = Phase::READS | Phase::WRITES;
                    copied = self.phase.enter(both, || part.copy(done, PIECE)).unwrap_or(Err(STOPPED));
                    done = if copied.is_ok() { part.bytes.min(done + PIECE) } else { done };
                }
                match i {
                    0 => self.result.first = Some(copied.map(|()| done)),
                    _ => self.result.next += usize::from(done == part.bytes),
                }
                if done < part.bytes {
                    break;
                }
            }
        }
        self.took_ns = clock().saturating_sub(began);
    }

    /// Its number. Jobs are counted from 1.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// True if it goes through the private memory of a process, and may take long.
    pub fn is_in_process(&self) -> bool {
        self.parts.first().is_some_and(Part::is_in_process)
    }

    /// How long it took, nanoseconds: its vRNIC is charged for it.
    pub(crate) fn took_ns(&self) -> u64 {
        self.took_ns
    }

    /// What came of it: nothing before it was done.
    pub(crate) fn result(&self) -> Copied {
        self.result
    }

    /// The requests behind the first one that it has copied for.
    pub(crate) fn next(&mut self) -> &mut VecDeque<Box<Work>> {
        &mut self.next
    }

    fn bytes(&self) -> u64 {
        self.parts[..=self.next.len()].iter().map(|p| p.bytes).sum()
    }
}

/// What waits for a fence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Waiter {
    /// The answer of a command.
    Command,
    /// A driver that has said, with this number, that its memory goes away.
    Away(u32),
}

/// A job that waits or is done by somebody.
pub(crate) struct Flying {
    number: u64,
    pub qp: Handle<Qp>,
    pub peer: Handle<Qp>,
    phase: Arc<Phase>,
    /// Whose memory it reads, and whose it writes.
    sessions: [SessionId; 2],
    /// The sessions among those whose private memory it goes through, with their vRNICs.
    processes: [Option<(SessionId, VnicId)>; 2],
    /// Somebody does it.
    runs: bool,
    /// It takes long.
    slow: bool,
    /// Its QP waits for it no more.
    given_up: bool,
}

impl Flying {
    /// True if it reaches memory of a session now.
    fn reaches(&self, session: SessionId) -> bool {
        self.sessions[0] == session && self.phase.is_at(Phase::READS)
            || self.sessions[1] == session && self.phase.is_at(Phase::WRITES)
    }

    fn is_of(&self, vnic: VnicId) -> bool {
        self.processes.iter().flatten().any(|p| p.1 == vnic)
    }
}

/// What came of an attempt to make a job.
pub(crate) enum Made {
    /// The job with this number.
    Job(u64),
    /// Nothing: memory is not there.
    Nothing(Fault),
    /// Nothing for the moment: memory of its process is slow.
    Slow,
    /// Nothing for the moment: the vRNIC has enough of them.
    Full,
}

/// One end of a job that is to be made: the side of the message, and the session and vRNIC that it belongs to.
pub(crate) type Whose<'a> = (Side<'a>, SessionId, VnicId);

struct Fence {
    session: SessionId,
    /// The jobs before this one must end.
    before: u64,
    waiter: Waiter,
}

/// The jobs of an RNIC.
#[derive(Default)]
pub(crate) struct Jobs {
    made: u64,
    waiting: VecDeque<Box<Job>>,
    /// Those that go through private memory of processes.
    waiting_process: VecDeque<Box<Job>>,
    /// How many of the jobs through private memory somebody does now, slow ones aside.
    in_process: usize,
    flying: Vec<Flying>,
    /// The QP of the job that ended last: who did that job has the QP's memory in its caches.
    warm: Handle<Qp>,
    fences: Vec<Fence>,
    #[allow(clippy::vec_box)]
    spare: Vec<Box<Job>>,
}

impl Jobs {
    /// True if enough wait to keep everybody busy.
    pub fn is_full(&self) -> bool {
        self.waiting.len() >= MAX_WAITING
    }

    /// True if somebody does jobs, or some wait.
    pub fn are_flying(&self) -> bool {
        !self.flying.is_empty()
    }

    /// True if [`Jobs::take`] has something.
    pub fn has_any(&self) -> bool {
        !self.waiting.is_empty() || self.in_process == 0 && !self.waiting_process.is_empty()
    }

    /// A copy for a QP of `bytes` from `off` on of a message to or from its peer.
    pub fn make(
        &mut self,
        tables: &Tables<'_>,
        [qp, peer]: [Handle<Qp>; 2],
        ends: [Whose<'_>; 2],
        off: u64,
        bytes: u64,
    ) -> Made {
        let mut job = self.spare.pop().unwrap_or_default();
        job.parts.resize_with(job.parts.len().max(1), Part::default);
        let part = &mut job.parts[0];
        if let Err(fault) = part.pin(tables, [ends[0].0, ends[1].0], off, bytes.min(MAX_BYTES)) {
            self.keep(job);
            return Made::Nothing(fault);
        }
        if part.is_in_process() {
            part.bytes = part.bytes.min(MAX_PROCESS_BYTES);
        }
        let process = |end: &End, w: &Whose<'_>| end.is_in_process().then_some((w.1, w.2));
        let processes = [process(&part.from, &ends[0]), process(&part.to, &ends[1])];
        for &(session, vnic) in processes.iter().flatten() {
            if self.is_slow(session, vnic) {
                self.keep(job);
                return Made::Slow;
            }
            if self.flying.iter().filter(|f| f.is_of(vnic)).count() >= MAX_PROCESS_WAITING {
                self.keep(job);
                return Made::Full;
            }
        }
        self.made += 1;
        (job.number, job.qp, job.peer) = (self.made, qp, peer);
        (job.result, job.took_ns, job.phase) = (Copied::default(), 0, Arc::default());
        self.flying.push(Flying {
            number: job.number,
            qp,
            peer,
            phase: job.phase.clone(),
            sessions: [ends[0].1, ends[1].1],
            processes,
            runs: false,
            slow: false,
            given_up: false,
        });
        let through_process = processes.iter().any(Option::is_some);
        let queue = if through_process { &mut self.waiting_process } else { &mut self.waiting };
        queue.push_back(job);
        Made::Job(self.made)
    }

    /// Lets the job that was made last copy one more message, from and to memory of the same sessions, for the request behind those that
    /// it copies for already. Returns the list that the request is to be put into, or `None` if the job has enough, or if more than a
    /// copy between mappings is to be done.
    pub fn extend(&mut self, tables: &Tables<'_>, ends: [Side<'_>; 2], bytes: u64) -> Option<&mut VecDeque<Box<Work>>> {
        let made = self.made;
        let job = self.waiting.back_mut().filter(|j| j.number == made)?;
        let at = job.next.len() + 1;
        if at >= MAX_PARTS || job.bytes() + bytes > MAX_BYTES {
            return None;
        }
        job.parts.resize_with(job.parts.len().max(at + 1), Part::default);
        let part = &mut job.parts[at];
        (part.pin(tables, ends, 0, bytes).is_ok() && !part.is_in_process()).then_some(&mut job.next)
    }

    /// True if private memory of a session of this vRNIC gets no more jobs for the moment.
    fn is_slow(&self, session: SessionId, vnic: VnicId) -> bool {
        let slow = || self.flying.iter().filter(|f| f.slow && f.is_of(vnic));
        slow().any(|f| f.processes.iter().flatten().any(|p| p.0 == session)) || slow().count() >= MAX_SLOW
    }

    /// The next job for the caller to do. A caller that has just ended a job gets one of the same QP if there is one. Of the jobs
    /// that may be slow only one is given out at a time, so that not every poller waits.
    pub fn take(&mut self) -> Option<Box<Job>> {
        if self.in_process == 0
            && let Some(job) = self.waiting_process.pop_front()
        {
            self.in_process += 1;
            self.flying.iter_mut().filter(|f| f.number == job.number).for_each(|f| f.runs = true);
            return Some(job);
        }
        let warm = std::mem::take(&mut self.warm);
        let at = self.waiting.iter().position(|j| j.qp == warm).unwrap_or(0);
        self.waiting.remove(at)
    }

    /// The job with this number takes long: others need not wait for it. Returns those that nobody shall do now, since they go through
    /// the same memory.
    pub fn note_slow(&mut self, number: u64) -> VecDeque<Box<Job>> {
        let Some(f) = self.flying.iter_mut().find(|f| f.number == number && f.runs && !f.slow) else {
            return VecDeque::new();
        };
        f.slow = true;
        self.in_process -= 1;
        let (mut kept, mut withdrawn) = (VecDeque::new(), VecDeque::new());
        for job in std::mem::take(&mut self.waiting_process) {
            let of = self.flying.iter().find(|f| f.number == job.number).map_or([None; 2], |f| f.processes);
            if of.iter().flatten().any(|&(session, vnic)| self.is_slow(session, vnic)) {
                withdrawn.push_back(job);
            } else {
                kept.push_back(job);
            }
        }
        self.waiting_process = kept;
        withdrawn
    }

    /// Notes that nobody waits for the job with this number any more. Returns the job, and the fault that names the end which it is
    /// stuck in.
    pub fn give_up(&mut self, number: u64) -> Option<(&Flying, Fault)> {
        let f = self.flying.iter_mut().find(|f| f.number == number && !f.given_up)?;
        f.given_up = true;
        f.phase.stop();
        let fault = if f.phase.is_at(Phase::WRITES) { Fault::Destination } else { Fault::Source };
        Some((f, fault))
    }

    /// A job has ended; false if it was given up before.
    pub fn end(&mut self, job: &Job) -> bool {
        let Some(at) = self.flying.iter().position(|f| f.number == job.number) else { return false };
        let f = self.flying.swap_remove(at);
        self.warm = job.qp;
        self.in_process -= usize::from(f.runs && !f.slow);
        !f.given_up
    }

    /// Keeps the box of a job that has ended for another one.
    pub fn keep(&mut self, mut job: Box<Job>) {
        if self.spare.len() < MAX_SPARE {
            job.parts.iter_mut().for_each(Part::clear);
            self.spare.push(job);
        }
    }

    fn is_clear(&self, session: SessionId, before: u64) -> bool {
        !self.flying.iter().any(|f| f.number < before && f.reaches(session))
    }

    /// Stops the jobs that there are for memory of `session`, and lets `waiter` wait for those that reach it now; false if none
    /// does.
    pub fn fence(&mut self, session: SessionId, waiter: Waiter) -> bool {
        let before = self.made + 1;
        self.flying.iter().filter(|f| f.sessions.contains(&session)).for_each(|f| f.phase.stop());
        let waits = !self.is_clear(session, before);
        if waits {
            self.fences.push(Fence { session, before, waiter });
        }
        waits
    }

    /// Stops the jobs that there are for memory of `session`, and lets nobody wait.
    pub fn stop(&mut self, session: SessionId) {
        self.flying.iter().filter(|f| f.sessions.contains(&session)).for_each(|f| f.phase.stop());
    }

    /// True if somebody copies now for a request with memory of `session` at one of its ends.
    pub fn reach(&self, session: SessionId) -> bool {
        let at_work = |f: &Flying| f.phase.is_at(Phase::READS | Phase::WRITES);
        self.flying.iter().any(|f| f.sessions.contains(&session) && at_work(f))
    }

    /// A fence that has passed.
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
