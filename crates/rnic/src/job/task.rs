//! A job: work that a thread does outside of every lock.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use unirdma_mem::{Fault, Loc, Place, atomic_u64, fetch, holes, transfer};

use super::end::Part;
use crate::objects::{Qp, SendOp, VrnicId};
use crate::slab::Handle;

/// Number of bytes after which a job checks the clock, and whether it was stopped.
const PIECE: u64 = 64 << 10;
/// The same number for a vRNIC whose earlier copies took long. To map the pages of one such piece takes some 15 us.
const SLOW_PIECE: u64 = 8 << 10;
/// Time after which a job begins no further piece, ns. Other jobs may be waiting for the thread.
const ENOUGH_NS: u64 = 10_000;

/// An operation on a word of 8 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Word {
    /// Writes `swap` if the old value is `compare`.
    Swap { compare: u64, swap: u64 },
    /// Adds to the old value.
    Add(u64),
    /// Writes a value.
    Write(u64),
}

impl Word {
    /// The new value of the word.
    pub fn apply(self, found: u64) -> u64 {
        match self {
            Word::Swap { compare, swap } => {
                if found == compare {
                    swap
                } else {
                    found
                }
            }
            Word::Add(n) => found.wrapping_add(n),
            Word::Write(value) => value,
        }
    }
}

/// How a job copies.
#[derive(Clone, Copy, Default)]
pub(crate) struct CopyMode {
    /// The copied bytes are kept, for a capture.
    pub keeps: bool,
    /// It checks the clock often, because copies of its vRNIC have taken long.
    pub careful: bool,
}

/// The kind of a job.
#[derive(Clone, Copy)]
pub(super) enum Task {
    /// Copies from one end to the other, as many bytes as there is time for.
    Copy(CopyMode),
    /// Stores its own bytes in its destination.
    Store,
    /// Fetches the bytes of its source.
    Fetch,
    /// Executes an operation on the word at its destination. If there is a source, its value is written.
    Word(Word),
}

impl Default for Task {
    fn default() -> Self {
        Task::Copy(CopyMode::default())
    }
}

impl Task {
    /// True if the job returns bytes.
    pub fn gives_data(self) -> bool {
        !matches!(self, Task::Copy(CopyMode { keeps: false, .. }) | Task::Store)
    }
}

/// The access that a job makes at this moment. The thread that does the job and the core share it.
#[derive(Default)]
pub(super) struct Phase {
    state: AtomicU8,
    /// The old value that an operation on a word has read. It is known before the word is written.
    found: AtomicU64,
}

impl Phase {
    pub const READS: u8 = 1;
    pub const WRITES: u8 = 2;
    const STOPPED: u8 = 4;
    /// The word has been written.
    const EXECUTED: u8 = 8;

    /// Runs `f`, which reads, writes, or both, as `what` says. Does nothing and returns `None` if the job was stopped.
    /// A stopped job must never appear to be reading or writing: else the core would take a word that no thread writes
    /// for one that is being written.
    pub fn enter<R>(&self, what: u8, f: impl FnOnce() -> R) -> Option<R> {
        let go_on = |state| (state & Self::STOPPED == 0).then_some(state | what);
        self.state.fetch_update(Ordering::SeqCst, Ordering::SeqCst, go_on).ok()?;
        let r = f();
        self.state.fetch_and(!what, Ordering::SeqCst);
        Some(r)
    }

    /// Stops the job: an access that has begun goes on to its end, and no other begins.
    pub fn stop(&self) {
        self.state.fetch_or(Self::STOPPED, Ordering::SeqCst);
    }

    pub fn is_at(&self, what: u8) -> bool {
        self.state.load(Ordering::SeqCst) & what != 0
    }

    /// The old value of the word, if the word was written or is being written at this moment.
    pub fn executed(&self) -> Option<u64> {
        self.is_at(Self::EXECUTED | Self::WRITES).then(|| self.found.load(Ordering::SeqCst))
    }
}

/// A copy of a part of a message and of the short messages that follow it, a fetch or a store of bytes for packets, or
/// an operation on a word.
#[derive(Default)]
pub struct Job {
    number: u64,
    pub(super) phase: Arc<Phase>,
    task: Task,
    pub(crate) qp: Handle<Qp>,
    /// The QP at the other end of a copy within this host. A job for packets has `qp` itself or none.
    pub(crate) peer: Handle<Qp>,
    /// One part for the request at the head of the QP's send queue, and one for each of `next`. Any further parts are
    /// left over from older jobs.
    pub(super) parts: Vec<Part>,
    /// The requests behind the head of the send queue that it copies as well.
    pub(super) next: VecDeque<Box<SendOp>>,
    /// Fetched bytes, or copied bytes that are kept.
    pub(crate) data: Vec<u8>,
    result: Copied,
    took_ns: u64,
    /// Number of bytes that it has copied between mappings.
    copied: u64,
    /// The vRNICs whose memory it reads and writes.
    pub(super) owners: [Option<VrnicId>; 2],
    /// The owner whose memory may have holes, and the owner in whose memory it has touched a hole last.
    pub(super) sparse: Option<VrnicId>,
    touched: Option<VrnicId>,
}

/// The result of a job.
#[derive(Clone, Copy, Default)]
pub(crate) struct Copied {
    /// Bytes copied for the first request, or the old value of a word, or the reason for neither.
    pub first: Option<Result<u64, Fault>>,
    /// Number of the requests behind the first one that were copied whole.
    pub next: usize,
}

impl Job {
    /// Makes this a new job with the parts that were pinned.
    pub(super) fn begin(&mut self, number: u64, [qp, peer]: [Handle<Qp>; 2], task: Task) {
        (self.number, self.qp, self.peer, self.task) = (number, qp, peer, task);
        (self.result, self.took_ns, self.phase) = (Copied::default(), 0, Arc::default());
        self.touched = None;
    }

    /// Does the job, for some 10 us at most unless its memory is slow. `scratch` buffers bytes from or to private
    /// memory of a process; `clock` returns the time in ns.
    pub fn run(&mut self, scratch: &mut [u8], clock: impl Fn() -> u64) {
        // A stopped request is tried again, as if its memory had moved.
        const STOPPED: Fault = Fault::SourceMoves;
        let (began, touched) = (clock(), holes::touched().times);
        (self.result, self.copied) = (Copied::default(), 0);
        let Some(first) = self.parts.first() else { return };
        let all = |done: Option<Result<(), Fault>>| Some(done.unwrap_or(Err(STOPPED)).map(|()| first.bytes));
        match self.task {
            Task::Copy(CopyMode { keeps, .. }) if keeps || first.may_wait() => {
                self.data.clear();
                self.result.first = all(first.bounce(&self.phase, scratch, keeps.then_some(&mut self.data)));
            }
            Task::Copy(CopyMode { careful, .. }) => {
                let parts = &self.parts[..=self.next.len()];
                let goes_on = || clock().saturating_sub(began) < ENOUGH_NS;
                for (i, part) in parts.iter().enumerate() {
                    let mut done = 0;
                    let mut copied = Ok(());
                    let is_first_piece = |done| i == 0 && done == 0;
                    while copied.is_ok() && done < part.bytes && (is_first_piece(done) || goes_on()) {
                        let both = Phase::READS | Phase::WRITES;
                        // The pages of a hole are made and mapped all at once for each piece.
                        let has_holes = part.is_sparse() || holes::touched().times != touched;
                        let piece = if careful && !has_holes { SLOW_PIECE } else { PIECE };
                        copied = self.phase.enter(both, || part.copy(done, piece)).unwrap_or(Err(STOPPED));
                        done = if copied.is_ok() { part.bytes.min(done + piece) } else { done };
                    }
                    match i {
                        0 => self.result.first = Some(copied.map(|()| done)),
                        _ => self.result.next += usize::from(done == part.bytes),
                    }
                    self.copied += done;
                    if done < part.bytes {
                        break;
                    }
                }
            }
            Task::Store => self.result.first = all(first.bounce(&self.phase, scratch, None)),
            Task::Fetch => {
                self.data.resize(first.bytes as usize, 0);
                self.result.first = all(first.bring(&self.phase, &mut self.data));
            }
            Task::Word(word) => {
                self.data.clear();
                self.result.first = Some(execute(&self.phase, first, word, &mut self.data).unwrap_or(Err(STOPPED)));
            }
        }
        self.took_ns = clock().saturating_sub(began);
        self.touched = if holes::touched().times != touched { self.owner_of(holes::touched().last) } else { None };
    }

    /// The vRNIC in whose memory an address lies that the job has accessed.
    fn owner_of(&self, addr: usize) -> Option<VrnicId> {
        let parts = &self.parts[..self.parts.len().min(1 + self.next.len())];
        let [reads, writes] = self.owners;
        if parts.iter().any(|p| p.to.holds(addr)) {
            writes
        } else if parts.iter().any(|p| p.from.holds(addr)) {
            reads
        } else {
            self.sparse
        }
    }

    /// Number of the job, counted from 1.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// True if it may take as long as an owner of its memory likes, for example because it uses private memory of a
    /// process.
    pub fn may_wait(&self) -> bool {
        self.parts.first().is_some_and(Part::may_wait)
    }

    /// The vRNIC in whose memory it has touched a hole, or else may have touched one, and whether it has touched any.
    pub(crate) fn sparse(&self) -> (Option<VrnicId>, bool) {
        (self.touched.or(self.sparse), self.touched.is_some())
    }

    /// Time that it took, ns. [`crate::Core::end_job`] charges a vRNIC for it.
    pub(crate) fn took_ns(&self) -> u64 {
        self.took_ns
    }

    /// Number of bytes that it has copied between mappings.
    pub(crate) fn copied(&self) -> u64 {
        self.copied
    }

    /// Its result; empty before it was done.
    pub(crate) fn result(&self) -> Copied {
        self.result
    }

    /// The requests behind the first one that it copies as well.
    pub(crate) fn next(&mut self) -> &mut VecDeque<Box<SendOp>> {
        &mut self.next
    }

    /// Number of bytes, and number of places at both ends.
    pub(crate) fn size(&self) -> (u64, usize) {
        let parts = self.parts[..=self.next.len()].iter();
        parts.fold((0, 0), |(bytes, pieces), p| (bytes + p.bytes, pieces + p.pieces()))
    }
}

/// Executes an operation on the word at the destination once, and returns the old value. `None` if the job was stopped
/// before. If there is a source, its value is written, and is appended to `data`.
fn execute(phase: &Phase, part: &Part, mut word: Word, data: &mut Vec<u8>) -> Option<Result<u64, Fault>> {
    if part.from.len() > 0 {
        let mut value = [0; 8];
        if let Err(fault) = part.bring(phase, &mut value)? {
            return Some(Err(fault));
        }
        word = Word::Write(u64::from_ne_bytes(value));
        data.extend_from_slice(&value);
    }
    let to = part.to.at(0)?;
    let executed = |found: u64| {
        phase.found.store(found, Ordering::SeqCst);
        phase.state.fetch_or(Phase::EXECUTED, Ordering::SeqCst);
        found
    };
    let Loc::Process(_, addr, _) = to.at() else {
        return phase.enter(Phase::WRITES, || atomic_u64(to, |v| word.apply(v)).map(executed));
    };
    if addr % 8 != 0 {
        return Some(Err(Fault::Destination));
    }
    let mut found = [0; 8];
    if let Err(fault) = phase.enter(Phase::READS, || fetch(to, &mut found))? {
        return Some(Err(fault.reversed()));
    }
    let found = u64::from_ne_bytes(found);
    phase.found.store(found, Ordering::SeqCst);
    let new = word.apply(found).to_ne_bytes();
    phase.enter(Phase::WRITES, || transfer(Place::bytes(&new), to, new.len(), &mut []).map(|()| executed(found)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    /// The core stops a job, and then checks whether the word was written, while another thread begins to write it.
    #[test]
    fn a_stopped_job_never_seems_to_write() {
        const TRIES: u32 = 500_000;
        let (phase, tries) = (Phase::default(), AtomicU32::new(0));
        phase.stop();
        std::thread::scope(|s| {
            let entered = |n: &u32| {
                let entered = phase.enter(Phase::WRITES, || ()).is_some();
                tries.store(*n, Ordering::Relaxed);
                entered
            };
            let writer = s.spawn(move || (1..=TRIES).filter(entered).count());
            while tries.load(Ordering::Relaxed) < TRIES {
                assert_eq!(phase.executed(), None);
            }
            assert_eq!(writer.join().expect("it ends"), 0);
        });
    }
}
