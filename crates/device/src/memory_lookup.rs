//! Finding and mapping the memory that a command names. A list may have 2^20 pages, and mapping many pieces takes one
//! system call for each, so a long search is a [`BackgroundLookup`]: another thread does it while the control thread
//! serves other sessions.
//!
//! A search reads its list once. Its only side effect is on the account of its vRNIC, which is undone when a result is
//! dropped unused.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use unirdma_abi as abi;
use unirdma_abi::Status;
use unirdma_link::{Gathered, Memory, Refused};
use unirdma_mem::Span;
use unirdma_rnic::Backing;
use zerocopy::FromBytes;

use crate::{lock, now_ns};

pub(crate) const PAGE: u64 = 4096;
/// Most pages that REG_USER_MR may list.
const MAX_PAGES: u32 = 1 << 20;
/// Longest list, in entries, that is read at once. Longer ones take more than about 20 us to read and look up.
const LONG_LIST: u64 = 512;
/// Most pieces that are mapped at once. More take as long.
const LONG_MAPPING: usize = 4;

/// Result of a search.
pub(crate) enum Found {
    /// The memory of an MR, and the regions that it lies in.
    Memory(Backing, Vec<u64>),
    /// A window.
    Window(Span),
}

/// The bus addresses to find.
enum List {
    /// The pages of a table: the bytes from `first` to `end`, counted from the start of the first page.
    Pages {
        table: Span,
        first: u64,
        end: u64,
    },
    /// The runs of a list; `length` is their total in bytes.
    Runs {
        list: Span,
        length: u64,
    },
    Ranges(Vec<(u64, u64)>),
}

/// The kind of object that the ranges become.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Becomes {
    /// An MR. Its ranges are mapped if there are few of them.
    Mr,
    /// An MR whose ranges are never mapped anew.
    UnmappedMr,
    /// A further part of an MR, kept as a list.
    PartOfMr,
    /// One contiguous window. All its ranges begin and end at page boundaries.
    Window,
}

/// A search that was not started.
pub(crate) struct MemoryLookup {
    memory: Arc<Memory>,
    list: List,
    becomes: Becomes,
}

impl MemoryLookup {
    /// For REG_USER_MR with a range.
    pub fn range(memory: &Arc<Memory>, start: u64, length: u64) -> Self {
        MemoryLookup { memory: memory.clone(), list: List::Ranges(vec![(start, length)]), becomes: Becomes::Mr }
    }

    /// For REG_USER_MR with a page list. `at` translates the list's bus address.
    pub fn pages(
        memory: &Arc<Memory>,
        r: &abi::RegUserMrReq,
        at: impl FnOnce(u64, u64) -> Result<Span, Status>,
    ) -> Result<Self, Status> {
        let first = r.start % PAGE;
        let end = first.checked_add(r.length).ok_or(Status::BadValue)?;
        if r.npages > MAX_PAGES || u64::from(r.npages) != end.div_ceil(PAGE) || r.pages_addr % 8 != 0 {
            return Err(Status::BadValue);
        }
        let table = at(r.pages_addr, u64::from(r.npages) * 8)?;
        Ok(MemoryLookup { memory: memory.clone(), list: List::Pages { table, first, end }, becomes: Becomes::Mr })
    }

    /// For an MR of runs, `length` bytes in all. `at` translates the bus address of the list.
    pub fn runs(
        memory: &Arc<Memory>,
        (addr, count, length): (u64, u32, u64),
        at: impl FnOnce(u64, u64) -> Result<Span, Status>,
    ) -> Result<Self, Status> {
        if count > abi::MAX_RUNS || addr % 8 != 0 || (count == 0) != (length == 0) {
            return Err(Status::BadValue);
        }
        let list = match count {
            0 => List::Ranges(Vec::new()),
            n => List::Runs { list: at(addr, u64::from(n) * size_of::<abi::Run>() as u64)?, length },
        };
        Ok(MemoryLookup { memory: memory.clone(), list, becomes: Becomes::UnmappedMr })
    }

    /// The same search, for EXTEND_MR.
    pub fn for_part(self) -> Self {
        MemoryLookup { becomes: Becomes::PartOfMr, ..self }
    }

    /// The same search, for MAP_RUNS.
    pub fn for_window(self) -> Self {
        MemoryLookup { becomes: Becomes::Window, ..self }
    }

    /// Reads the list if it is short.
    fn read_short(&mut self) -> Result<(), Status> {
        let entries = match &self.list {
            List::Pages { table, .. } => table.len() / size_of::<u64>(),
            List::Runs { list, .. } => list.len() / size_of::<abi::Run>(),
            List::Ranges(_) => return Ok(()),
        };
        if entries as u64 <= LONG_LIST { self.read() } else { Ok(()) }
    }

    /// Reads the list, once.
    fn read(&mut self) -> Result<(), Status> {
        let ranges = match &self.list {
            List::Pages { table, first, end } => pages(table, *first, *end)?,
            List::Runs { list, length } => runs(list, *length)?,
            List::Ranges(_) => return Ok(()),
        };
        self.list = List::Ranges(ranges);
        Ok(())
    }

    /// Does the part of the search that is known to be short: all of it, or enough to see that the rest is long.
    ///
    /// # Errors
    /// The status with which the command is refused.
    pub fn begin(mut self) -> Result<Begun, Status> {
        self.read_short()?;
        let is_short = match (&self.list, self.becomes) {
            (List::Ranges(_), Becomes::UnmappedMr | Becomes::PartOfMr) => true,
            (List::Ranges(ranges), _) => ranges.len() <= LONG_MAPPING,
            _ => false,
        };
        if is_short { self.finish().map(Begun::Found) } else { Ok(Begun::Long(self)) }
    }

    /// Does the whole search.
    ///
    /// # Errors
    /// The status with which the command is refused.
    pub fn run(mut self) -> Result<Found, Status> {
        self.read()?;
        self.finish()
    }

    fn finish(self) -> Result<Found, Status> {
        let List::Ranges(ranges) = &self.list else { return Err(Status::BadValue) };
        let gathered = match self.becomes {
            Becomes::Window if ranges.is_empty() || !is_of_pages(ranges) => return Err(Status::BadValue),
            Becomes::Window => return self.memory.map_ranges(ranges).map(Found::Window).map_err(refused),
            _ if ranges.is_empty() => return Ok(Found::Memory(Backing::Mapped(Span::anonymous(0)), Vec::new())),
            Becomes::Mr => self.memory.gather(ranges),
            Becomes::UnmappedMr => self.memory.gather_unmapped(ranges),
            Becomes::PartOfMr => self.memory.gather_list(ranges),
        };
        let (memory, regions) = gathered.map_err(refused)?;
        let backing = match memory {
            Gathered::Window(span) => Backing::Mapped(span),
            Gathered::Pieces(pieces) => Backing::Pieces(Arc::new(pieces), 0),
        };
        Ok(Found::Memory(backing, regions))
    }
}

/// The ranges of a table of pages. Adjacent pages are joined.
fn pages(table: &Span, first: u64, end: u64) -> Result<Vec<(u64, u64)>, Status> {
    let mut bytes = vec![0; table.len()];
    table.read(0, &mut bytes);
    let mut ranges: Vec<(u64, u64)> = Vec::new();
    for (i, raw) in bytes.chunks_exact(8).enumerate() {
        let page = u64::from_le_bytes(raw.try_into().unwrap_or_default());
        if page % PAGE != 0 {
            return Err(Status::BadValue);
        }
        let skip = if i == 0 { first } else { 0 };
        let len = (end - i as u64 * PAGE).min(PAGE) - skip;
        match ranges.last_mut() {
            Some((addr, n)) if *addr + *n == page + skip => *n += len,
            _ => ranges.push((page + skip, len)),
        }
    }
    Ok(ranges)
}

/// True if all ranges begin and end at page boundaries.
fn is_of_pages(ranges: &[(u64, u64)]) -> bool {
    ranges.iter().all(|(addr, len)| (addr | len) % PAGE == 0)
}

/// The ranges of a list of runs, `length` bytes in all. Only the first may begin, and only the last may end, within a
/// page.
fn runs(list: &Span, length: u64) -> Result<Vec<(u64, u64)>, Status> {
    let mut bytes = vec![0; list.len()];
    list.read(0, &mut bytes);
    let mut left = length;
    let ranges = bytes.chunks_exact(size_of::<abi::Run>()).map(|raw| {
        let run = abi::Run::read_from_bytes(raw).map_err(|_| Status::BadLength)?;
        left = left.checked_sub(run.length).filter(|_| run.length > 0).ok_or(Status::BadValue)?;
        Ok((run.addr, run.length))
    });
    let ranges = ranges.collect::<Result<Vec<_>, Status>>()?;
    let begin_at_pages = ranges.iter().skip(1).all(|(addr, _)| addr % PAGE == 0);
    let end_at_pages = ranges.iter().rev().skip(1).all(|(addr, len)| addr.wrapping_add(*len) % PAGE == 0);
    if left == 0 && begin_at_pages && end_at_pages { Ok(ranges) } else { Err(Status::BadValue) }
}

pub(crate) fn refused(why: Refused) -> Status {
    if why.is_want() { Status::Exhausted } else { Status::BadAddress }
}

/// Result of [`MemoryLookup::begin`].
pub(crate) enum Begun {
    Found(Found),
    /// The search is long. Another thread must run it.
    Long(MemoryLookup),
}

/// State shared by the session and the thread that runs its background lookup.
#[derive(Default)]
struct Course {
    /// The list is being read.
    reads: AtomicBool,
    /// The session does not want the result any more.
    is_cancelled: AtomicBool,
    outcome: Mutex<Option<Outcome>>,
}

/// Outcome of a background lookup.
pub(crate) struct Outcome {
    pub found: Result<Found, Status>,
    /// Time that the lookup took, ns.
    pub took_ns: u64,
}

/// A long search, to be run on another thread. The session's control queue waits for it.
pub struct BackgroundLookup {
    search: MemoryLookup,
    course: Arc<Course>,
}

impl BackgroundLookup {
    /// Runs the search. Afterwards the session's control queue must be served.
    pub fn run(self) {
        let began = now_ns();
        let BackgroundLookup { mut search, course } = self;
        let is_cancelled = || course.is_cancelled.load(Ordering::SeqCst);
        course.reads.store(true, Ordering::SeqCst);
        let read = if is_cancelled() { Ok(()) } else { search.read() };
        course.reads.store(false, Ordering::SeqCst);
        if !is_cancelled() {
            let found = read.and_then(|()| search.finish());
            *lock(&course.outcome) = Some(Outcome { found, took_ns: now_ns().saturating_sub(began) });
        }
    }
}

/// The session's handle on a background lookup. Dropping it cancels the lookup.
pub(crate) struct Pending {
    /// The request that needs the search.
    pub request: Vec<u8>,
    course: Arc<Course>,
}

impl Pending {
    pub fn new(request: &[u8], search: MemoryLookup) -> (Self, BackgroundLookup) {
        let course: Arc<Course> = Arc::default();
        (Pending { request: request.into(), course: course.clone() }, BackgroundLookup { search, course })
    }

    pub fn is_over(&self) -> bool {
        lock(&self.course.outcome).is_some()
    }

    /// Takes the outcome, if there is one.
    pub fn outcome(&self) -> Option<Outcome> {
        lock(&self.course.outcome).take()
    }

    /// Cancels the lookup. Returns true if it does not read the session's memory from now on.
    pub fn cancel(&self) -> bool {
        self.course.is_cancelled.store(true, Ordering::SeqCst);
        !self.course.reads.load(Ordering::SeqCst)
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        self.cancel();
    }
}
