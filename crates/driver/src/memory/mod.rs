//! Memory registration. The device reaches each MR's bytes by one of three ways.
//!
//! | way | when | a transfer costs |
//! |---|---|---|
//! | direct | the range is shared memory already (memfd, `/dev/shm`) | one copy |
//! | share | private memory that can be moved into a memory file without anybody noticing | one copy |
//! | copy | everything else | three copies (`bounce`), or system calls and more copies |
//!
//! `UNIRDMA_MR=copy` forces the way *copy*, `UNIRDMA_MR=direct` never moves pages, `UNIRDMA_MR=share` moves them
//! whatever it costs.
//!
//! `share` knows what is in the memory file, `page_move` moves it there and back, `maps` and `sys` ask the kernel.

pub(crate) mod doorbells;
mod maps;
mod page_move;
mod refcount;
mod regions;
mod reuse_history;
mod share;
mod sys;
mod uffd;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use unirdma_abi as abi;
use unirdma_abi::Command;
use unirdma_formats::access;
use unirdma_link::{PROCESS_LIMIT, RegionDesc};
use unirdma_mem::MemFd;

use crate::bounce::Known;
use crate::clock::clock_ns;
use crate::context::Context;
use crate::queues::gone_is_fine;
use crate::sockets::socket_paths;
use crate::{Result, errno, lock, map_errno};

use maps::{FileId, Vma};
use page_move::PAGE;
pub(crate) use regions::Regions;
pub(crate) use reuse_history::Served;
pub(crate) use share::share_manager;
pub(crate) use share::{forks, prepare};

/// The way by which an MR's bytes are reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Mapped as it is.
    Direct,
    /// Moved into a memory file, then mapped.
    Share,
    /// Copied, by this process (`bounce`) or by system calls of the device.
    Copy,
}

/// The reason for an MR's way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Why {
    /// Nothing prevents the fastest way.
    Fastest = 0,
    /// `UNIRDMA_MR` asks for it.
    RegRequest = 1,
    /// On-demand paging looks its pages up at each access.
    OnDemand = 2,
    /// The process has threads, and may not stop them for a moment (userfaultfd).
    Threads = 3,
    /// This thread's own stack or data is in it, or the program watches it by a userfaultfd.
    InUse = 4,
    /// The kernel holds pages of it (io_uring, AF_XDP, input or output that is under way).
    Pinned = 5,
    /// It is not private anonymous memory, but a file, a device, read-only or executable memory.
    Kind = 6,
    /// Another copy of this library has moved it.
    Another = 7,
    /// The last MRs like it lived so briefly that moving their memory was not worth it.
    Brief = 8,
    /// A limit of the process or of the virtual layer.
    Limits = 9,
}

impl Why {
    /// The reason in words.
    pub fn text(self) -> &'static str {
        abi::mr_why(abi::mr_note(0, self as u8))
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Policy {
    Auto,
    Share,
    Direct,
    Copy,
}

fn policy() -> Policy {
    static P: OnceLock<Policy> = OnceLock::new();
    *P.get_or_init(|| match std::env::var("UNIRDMA_MR").as_deref() {
        Ok("copy") => Policy::Copy,
        Ok("direct") => Policy::Direct,
        Ok("share") => Policy::Share,
        _ => Policy::Auto,
    })
}

/// Memory of this process that is shared from the start: its MRs are *direct* whatever the process does.
pub struct Buffer(MemFd);

impl Buffer {
    /// Zeroed memory of at least `len` bytes, page aligned.
    ///
    /// # Errors
    /// `EINVAL` if `len` is 0; otherwise the errno of making the memory file.
    pub fn new(len: usize) -> Result<Self> {
        if len == 0 {
            return Err(libc::EINVAL);
        }
        MemFd::new(c"unirdma-buf", len).map(Buffer).map_err(|e| map_errno(&e))
    }

    /// Address of the first byte.
    pub fn addr(&self) -> usize {
        self.0.span().addr()
    }
}

/// Installs the fork handlers, and opens files that the program may not be able to open later. Called when the library
/// is loaded, so that the fork handlers run last before a fork and first after it.
pub fn loaded() {
    share::install_fork_handlers();
    if socket_paths().iter().any(|socket| socket.exists()) {
        sys::open_early();
    }
}

/// Parameters of a registration.
#[derive(Clone, Copy, Debug)]
struct RegRequest {
    pdn: u32,
    addr: u64,
    len: u64,
    iova: u64,
    flags: u32,
}

/// Where an MR's bytes are.
struct Placement {
    way: Way,
    why: Why,
    /// Bus address of the first byte.
    start: u64,
    /// The region in which it lies, if it is in one piece.
    region: Option<regions::Key>,
    /// Regions of its own, if it lies in several pieces.
    own: Vec<RegionDesc>,
    /// Ranges of the memory file that it holds: offset, and length in bytes.
    held: Vec<(u64, u64)>,
}

impl Placement {
    fn copied(start: u64, why: Why) -> Self {
        Placement { way: Way::Copy, why, start, region: None, own: Vec::new(), held: Vec::new() }
    }
}

/// A memory region.
pub struct Mr {
    /// Its handle.
    pub mrn: u32,
    /// Its lkey and rkey.
    pub key: u32,
    core: Arc<Core>,
}

/// The part of an MR that may change while it lives: an MR that was expected to be brief is moved later if it lives on.
struct Core {
    ctx: Arc<Context>,
    mrn: u32,
    key: u32,
    since_ns: u64,
    state: Mutex<Option<(RegRequest, Placement)>>,
}

/// Largest MR that is moved while the program polls, bytes. The thread that polls is stopped until the move is done,
/// about 1 ms.
const MOVED_IN_PASSING: u64 = 2 << 20;

/// MRs that are moved if they live on. MRs of up to [`MOVED_IN_PASSING`] bytes are moved while the program polls or
/// arms a CQ; larger ones wait for the next registration, which may take long.
static SMALL: DeferredMoves = DeferredMoves::new();
static LARGE: DeferredMoves = DeferredMoves::new();

/// A list of MRs that are moved if they live on, and the time of the next check.
struct DeferredMoves {
    list: Mutex<Vec<Weak<Core>>>,
    count: AtomicUsize,
    due_ns: AtomicU64,
}

/// Where the bytes of one mapping are, or will be.
enum Source {
    /// In the memory file of this process.
    Moved,
    /// In another memory file.
    File(FileId, OwnedFd),
    /// In private memory, to be moved.
    Private,
}

impl Mr {
    /// Registers `[addr, addr + len)` under virtual address `iova`.
    ///
    /// # Errors
    /// `EFAULT` if the range is not mapped with these rights, `EINVAL` for flags that do not go together, otherwise the
    /// device's errno.
    pub fn register(ctx: &Arc<Context>, pdn: u32, addr: u64, len: u64, iova: u64, flags: u32) -> Result<Self> {
        if flags & access::STAGE != 0 {
            return Err(libc::EINVAL);
        }
        look_at_brief();
        LARGE.look();
        let asked = RegRequest { pdn, addr, len, iova, flags };
        let (r, placed) = asked.register(ctx, true)?;
        let brief = placed.why == Why::Brief;
        let since_ns = clock_ns();
        let core = Arc::new(Core {
            ctx: ctx.clone(),
            mrn: r.mrn,
            key: r.lkey,
            since_ns,
            state: Mutex::new(Some((asked, placed))),
        });
        if brief {
            let later = if len <= MOVED_IN_PASSING { &SMALL } else { &LARGE };
            later.add(&core, since_ns + reuse_history::worth_ns(len));
        }
        Ok(Mr { mrn: r.mrn, key: r.lkey, core })
    }

    /// An MR without memory: zeros are read from any of its addresses, and written data is discarded. Its key serves as
    /// lkey only.
    ///
    /// # Errors
    /// The errno of the device.
    pub fn null(ctx: &Arc<Context>, pdn: u32) -> Result<Self> {
        let req = abi::HandleReq { handle: pdn, reserved: 0 };
        let r: abi::MrResp = ctx.command(Command::AllocNullMr, &req)?;
        let asked = RegRequest { pdn, addr: 0, len: 0, iova: 0, flags: access::LOCAL_WRITE };
        let placed = Placement { way: Way::Direct, ..Placement::copied(0, Why::Fastest) };
        let state = Mutex::new(Some((asked, placed)));
        let core = Arc::new(Core { ctx: ctx.clone(), mrn: r.mrn, key: r.lkey, since_ns: clock_ns(), state });
        Ok(Mr { mrn: r.mrn, key: r.lkey, core })
    }

    /// Its way, and the reason for it.
    pub fn way(&self) -> (Way, Why) {
        lock(&self.core.state).as_ref().map_or((Way::Copy, Why::Limits), |(_, p)| (p.way, p.why))
    }

    /// Makes this MR what `new` is, with the keys that this MR has. If the device refuses, this MR stays as it was, and
    /// `new` is gone.
    ///
    /// # Errors
    /// The errno of the device.
    pub fn replace(&mut self, mut new: Mr) -> Result<()> {
        let mut state = lock(&self.core.state);
        let ended = self.core.end(state.as_ref());
        if let Err(e) = replace(&self.core.ctx, self.core.mrn, new.mrn) {
            let _ = new.deregister();
            return Err(e);
        }
        let old = std::mem::replace(&mut *state, lock(&new.core.state).take());
        if let Some((asked, _)) = &*state {
            self.core.ctx.bounce.replace(self.key, new.key, asked.known());
        }
        drop(state);
        if let Some((_, placed)) = old {
            placed.release(&self.core.ctx, ended);
        }
        Ok(())
    }

    /// Deregisters the MR.
    ///
    /// # Errors
    /// The errno of the device; the MR lives on.
    pub fn deregister(&mut self) -> Result<()> {
        let core = &self.core;
        let mut state = lock(&core.state);
        let ended = core.end(state.as_ref());
        deregister(&core.ctx, core.mrn, core.key)?;
        let Some((_, placed)) = state.take() else { return Ok(()) };
        drop(state);
        placed.release(&core.ctx, ended);
        Ok(())
    }
}

fn deregister(ctx: &Context, mrn: u32, key: u32) -> Result<()> {
    let req = abi::HandleReq { handle: mrn, reserved: 0 };
    gone_is_fine(ctx.command_void(Command::DeregMr, &req), ctx)?;
    ctx.bounce.remove(ctx, key);
    Ok(())
}

fn replace(ctx: &Context, mrn: u32, by: u32) -> Result<()> {
    ctx.command_void(Command::ReregMr, &abi::ReregMrReq { mrn, by })
}

/// Moves the memory of small MRs that were expected to be brief, and are not. Cheap if there are none.
#[inline]
pub(crate) fn look_at_brief() {
    SMALL.look();
}

impl DeferredMoves {
    const fn new() -> Self {
        DeferredMoves { list: Mutex::new(Vec::new()), count: AtomicUsize::new(0), due_ns: AtomicU64::new(0) }
    }

    fn add(&self, core: &Arc<Core>, due_ns: u64) {
        let mut list = lock(&self.list);
        if list.is_empty() || due_ns < self.due_ns.load(Ordering::Relaxed) {
            self.due_ns.store(due_ns, Ordering::Relaxed);
        }
        list.push(Arc::downgrade(core));
        self.count.store(list.len(), Ordering::Relaxed);
    }

    /// Moves the memory of MRs that have lived long enough.
    #[inline]
    fn look(&self) {
        if self.count.load(Ordering::Relaxed) > 0 && clock_ns() >= self.due_ns.load(Ordering::Relaxed) {
            self.move_those_that_live();
        }
    }

    #[cold]
    fn move_those_that_live(&self) {
        let now = clock_ns();
        let mut due = Vec::new();
        {
            let mut list = lock(&self.list);
            let mut next = u64::MAX;
            list.retain(|w| {
                let Some(core) = w.upgrade() else { return false };
                // Its owner may be about to deregister it, or to register another one.
                let Ok(state) = core.state.try_lock() else { return true };
                let Some((asked, _)) = &*state else { return false };
                let at = core.since_ns + reuse_history::worth_ns(asked.len);
                drop(state);
                if at > now {
                    next = next.min(at);
                    return true;
                }
                due.push(core);
                false
            });
            self.due_ns.store(if next == u64::MAX { now } else { next }, Ordering::Relaxed);
            self.count.store(list.len(), Ordering::Relaxed);
        }
        for core in due {
            core.move_now();
        }
    }
}

/// Facts about an MR that ends, for the history.
struct Ended {
    /// Whole pages.
    range: (u64, u64),
    life_ns: u64,
    served: Served,
}

impl Core {
    /// The facts for the history if the MR ends now; `None` if it does not count there.
    fn end(&self, state: Option<&(RegRequest, Placement)>) -> Option<Ended> {
        let (asked, _) = state.filter(|(_, p)| p.why == Why::Brief || p.way == Way::Share)?;
        let range = (asked.addr / PAGE * PAGE, (asked.addr + asked.len).next_multiple_of(PAGE));
        let life_ns = clock_ns() - self.since_ns;
        let asks = reuse_history::depends_on_service(range.1 - range.0, life_ns);
        let served = if asks { self.served() } else { Served::default() };
        Some(Ended { range, life_ns, served })
    }

    /// Accesses by requests with its key: the device's count, and this process's own.
    fn served(&self) -> Served {
        if self.ctx.is_dead() {
            return Served::default();
        }
        let req = abi::HandleReq { handle: self.mrn, reserved: 0 };
        let r: abi::QueryMrResp = self.ctx.command(Command::QueryMr, &req).unwrap_or_default();
        let own = self.ctx.bounce.served(self.key);
        Served { accesses: r.accesses.saturating_add(own.accesses), bytes: r.bytes.saturating_add(own.bytes) }
    }

    /// Registers the same memory again, whatever life is expected of it, and lets this MR become the new one.
    fn move_now(&self) {
        let mut state = lock(&self.state);
        let Some((asked, old)) = state.as_mut() else { return };
        let Ok((r, placed)) = asked.register(&self.ctx, false) else { return };
        if placed.way != Way::Copy && replace(&self.ctx, self.mrn, r.mrn).is_ok() {
            self.ctx.bounce.replace(self.key, r.lkey, asked.known());
            *old = placed;
        } else {
            let _ = deregister(&self.ctx, r.mrn, r.lkey);
            placed.release(&self.ctx, None);
        }
    }
}

impl RegRequest {
    /// Places the memory and registers it with the device. `guess`: do not move the memory of an MR that is expected to
    /// be brief.
    fn register(&self, ctx: &Arc<Context>, guess: bool) -> Result<(abi::MrResp, Placement)> {
        let placed = if self.flags & access::ON_DEMAND != 0 { self.on_demand(ctx)? } else { self.place(ctx, guess)? };
        // On-demand pages may be gone when they are needed. The device reports that; this process would not survive it.
        let bounces = placed.way == Way::Copy && self.flags & access::ON_DEMAND == 0;
        let stage = if bounces { access::STAGE } else { 0 };
        let req = abi::RegUserMrReq {
            pdn: self.pdn,
            access_flags: self.flags & !(access::ON_DEMAND | access::HUGETLB | access::ZERO_BASED) | stage,
            start: placed.start,
            length: self.length(),
            virt_addr: self.iova,
            note: abi::mr_note(placed.way as u8, placed.why as u8),
            ..Default::default()
        };
        let done: Result<abi::MrResp> = ctx.command(Command::RegUserMr, &req);
        match done {
            Ok(r) => {
                if bounces {
                    ctx.bounce.add(r.lkey, self.known());
                    ctx.offer_stage();
                }
                Ok((r, placed))
            }
            Err(e) => {
                placed.release(ctx, None);
                Err(e)
            }
        }
    }

    /// Length of the MR. An implicit on-demand MR is all of the address space.
    fn length(&self) -> u64 {
        let implicit = self.flags & access::ON_DEMAND != 0 && self.addr == 0 && self.len == usize::MAX as u64;
        if implicit { PROCESS_LIMIT } else { self.len }
    }

    fn known(&self) -> Known {
        Known { pdn: self.pdn, addr: self.addr, iova: self.iova, len: self.len }
    }

    fn check_end(&self) -> Result<u64> {
        self.addr.checked_add(self.length()).filter(|&end| end <= PROCESS_LIMIT).ok_or(libc::EINVAL)
    }

    /// Places on-demand memory: its pages may change at any time, so each access looks them up.
    fn on_demand(&self, ctx: &Context) -> Result<Placement> {
        self.check_end()?;
        offer_process(ctx)?;
        Ok(Placement::copied(self.addr, Why::OnDemand))
    }

    /// Chooses the way of the range.
    fn place(&self, ctx: &Arc<Context>, guess: bool) -> Result<Placement> {
        let end = self.check_end()?;
        let lo = self.addr / PAGE * PAGE;
        let hi = if self.len == 0 { lo } else { end.next_multiple_of(PAGE) };
        match self.map(ctx, lo, hi, guess)? {
            Ok(p) => Ok(Placement { start: p.start + (self.addr - lo), ..p }),
            Err(why) => {
                offer_process(ctx)?;
                Ok(Placement::copied(self.addr, why))
            }
        }
    }

    /// Gives the pages to the device as mapped memory, or returns the reason why they cannot be mapped.
    fn map(&self, ctx: &Arc<Context>, lo: u64, hi: u64, guess: bool) -> Result<std::result::Result<Placement, Why>> {
        let mut m = share_manager();
        let Some(maps) = m.maps() else { return Ok(Err(Why::Limits)) };
        let map: Vec<Vma> = maps.range(lo, hi).collect();
        check_range(&map, lo, hi, self.flags)?;
        if map.is_empty() {
            return Ok(Err(Why::Kind));
        }
        if policy() == Policy::Copy {
            return Ok(Err(Why::RegRequest));
        }
        // Nothing is moved before it is known that every part can be mapped.
        let brief = guess && m.history.expects_brief(lo, hi);
        let full = lock(&ctx.regions).is_full();
        let mut sources = Vec::with_capacity(map.len());
        for v in &map {
            match source(&m, v, brief) {
                Ok(Source::Private) if full => return Ok(Err(Why::Limits)),
                Ok(s) => sources.push(s),
                Err(why) => return Ok(Err(why)),
            }
        }
        if sources.iter().any(|s| matches!(s, Source::Private)) {
            m.look_at_advice();
        }
        let mut placed = Placement { way: Way::Direct, ..Placement::copied(0, Why::Fastest) };
        let mut pieces = Vec::with_capacity(map.len());
        let mut failed = None;
        // Offset in the memory file behind the piece before, if that piece lies there.
        let mut next = None;
        for (i, (v, source)) in map.iter().zip(sources).enumerate() {
            let part = v.clip(lo, hi);
            let len = part.end - part.start;
            let off = match source {
                Source::File(id, fd) => {
                    let whole = Some((v.offset, v.end - v.start));
                    pieces.push(Piece { id, fd: Some(fd), off: part.offset, len, whole });
                    next = None;
                    continue;
                }
                Source::Moved => Ok(part.offset),
                Source::Private => {
                    let behind = map.get(i + 1).filter(|v| Some(v.file) == m.file_id());
                    m.take(&part, [next, behind.and_then(|v| v.offset.checked_sub(len))])
                }
            };
            match off {
                Ok(off) => {
                    m.hold(off, len);
                    placed.way = Way::Share;
                    placed.held.push((off, len));
                    match pieces.last_mut() {
                        Some(p) if next == Some(off) => p.len += len,
                        _ => {
                            pieces.push(Piece { id: m.file_id().unwrap_or_default(), fd: None, off, len, whole: None })
                        }
                    }
                    next = Some(off + len);
                }
                Err(why) => {
                    failed = Some(why);
                    break;
                }
            }
        }
        let file = m.file();
        drop(m);
        if failed.is_none() && placed.announce(ctx, &pieces, file.as_ref()).is_none() {
            failed = Some(Why::Limits);
        }
        Ok(match failed {
            None => Ok(placed),
            Some(why) => {
                placed.release(ctx, None);
                Err(why)
            }
        })
    }
}

/// A part of an MR in a memory file. Without a descriptor the file is the process's own memory file.
struct Piece {
    id: FileId,
    fd: Option<OwnedFd>,
    off: u64,
    len: u64,
    /// The range of another file that is worth being a region, because other MRs may lie in it: offset, and length in
    /// bytes.
    whole: Option<(u64, u64)>,
}

impl Placement {
    /// Gives the device regions for the pieces of the MR.
    fn announce(&mut self, ctx: &Context, pieces: &[Piece], moved: Option<&OwnedFd>) -> Option<()> {
        fn fd<'a>(p: &'a Piece, moved: Option<&'a OwnedFd>) -> Option<BorrowedFd<'a>> {
            p.fd.as_ref().or(moved).map(|fd| fd.as_fd())
        }
        if let [p] = pieces {
            let (key, bus) = regions::get(ctx, p.id, fd(p, moved)?, (p.off, p.len), p.whole)?;
            (self.region, self.start) = (Some(key), bus);
            return Some(());
        }
        // The parts of an MR follow each other on the bus.
        self.start = lock(&ctx.arena).take_bus(pieces.iter().map(|p| p.len).sum());
        let mut bus = self.start;
        for p in pieces {
            self.own.push(regions::add(ctx, fd(p, moved)?, (p.off, p.len), bus)?);
            bus += p.len;
        }
        Some(())
    }

    /// Gives back its regions and its memory. No MR of the device lies there any more.
    fn release(self, ctx: &Context, ended: Option<Ended>) {
        if let Some(key) = self.region {
            regions::put(ctx, key);
        }
        for d in self.own {
            regions::remove(ctx, d);
        }
        if ended.is_none() && self.held.is_empty() {
            return;
        }
        let mut m = share_manager();
        if let Some(Ended { range, life_ns, served }) = ended {
            m.history.note(range.0, range.1, life_ns, served);
        }
        m.release(&self.held);
    }
}

/// Where a mapping's bytes are, or will be; or the reason why they cannot be in a memory file.
fn source(m: &share::Moved, v: &Vma, brief: bool) -> std::result::Result<Source, Why> {
    if Some(v.file) == m.file_id() {
        return Ok(Source::Moved);
    }
    if v.is_anothers() {
        return Err(Why::Another);
    }
    if v.is_shared_memory() {
        let file = m.tools().and_then(|t| t.find_open_file(v.file)).or_else(|| sys::open_by_name(v.name(), v.file));
        return file.map(|fd| Source::File(v.file, fd)).ok_or(Why::Kind);
    }
    match policy() {
        _ if !v.is_movable() => Err(Why::Kind),
        Policy::Auto if brief => Err(Why::Brief),
        Policy::Auto | Policy::Share => Ok(Source::Private),
        Policy::Direct | Policy::Copy => Err(Why::RegRequest),
    }
}

/// `EFAULT` unless the mappings cover the range and allow the accesses that the MR allows.
fn check_range(map: &[Vma], lo: u64, hi: u64, flags: u32) -> Result<()> {
    let mut at = lo;
    for v in map {
        let stores = flags & access::LOCAL_WRITE != 0;
        if v.start > at || !v.read || stores && !v.write {
            return Err(libc::EFAULT);
        }
        at = v.end;
    }
    if at < hi { Err(libc::EFAULT) } else { Ok(()) }
}

/// Lets the device copy in and out of this process, once for each context. Other threads wait for it.
fn offer_process(ctx: &Context) -> Result<()> {
    let mut offered = lock(&ctx.process_offered);
    if *offered {
        return Ok(());
    }
    // Makes no descriptor, because the program may have none left.
    let mem = share_manager().tools().and_then(|t| t.process.clone()).ok_or(libc::EACCES)?;
    let fd = mem.get().map_err(|_| libc::EACCES)?;
    let d = RegionDesc { bus_addr: 0, size: PROCESS_LIMIT, user_addr: 0, mmap_offset: 0 };
    // From here on the device may copy, and is told of every move.
    if let Some(d) = share_manager().door(ctx.id) {
        d.copies = true;
    }
    lock(&ctx.frontend).add_region(d, fd).map_err(|e| errno(&e))?;
    *offered = true;
    Ok(())
}
