//! Pages of the program that lie in the memory file: how many MRs each has, when it goes there, and when it comes back.
//!
//! One lock guards all of it. Signals are held while it is locked, so that a signal handler may fork. The fork handlers
//! of this process are here, too: before a fork all moved pages become private, so that the kernel gives the child a
//! copy of everything; after the fork the pages go back to the file.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, Once};

use unirdma_mem::Bell;
use unirdma_mem::fds::Known;

use super::Why;
use super::doorbells::{self, Doorbell};
use super::maps::{FileId, Maps, Vma};
use super::page_move::{self, Failed, MoveTools, PAGE, Place};
use super::refcount::Refcounts;
use super::reuse_history::ReuseHistory;
use super::sys::{self, Advice, Tools};
use crate::clock::clock_ns;
use crate::lock;
use crate::sync::Guard;

/// Most parts of the program's memory that are moved. Each is a mapping, and its shadow is another.
const MAX_PLACES: usize = 8192;
/// Bytes of the memory file that a part has for itself, or together with its neighbours: a program may make its mapping
/// longer.
pub(super) const SLOT: u64 = 1 << 40;
/// Offset of the first part in its slot. The bytes before it are for neighbours at lower addresses.
const BEFORE: u64 = SLOT / 4;
/// Most slots of the memory file that are given out.
const MAX_SLOTS: u64 = 1 << 21;
/// This thread's stack counts as used up to this distance from a local variable, bytes.
const NEAR: u64 = 128 << 10;
/// Spare room in a list of parts, so that a fork handler need not allocate.
const SPARE: usize = 64;

/// A part of the program that lies in the memory file: one mapping of it.
#[derive(Clone, Copy, Debug)]
struct Part {
    place: Place,
    /// Protection bits, as the program has set them.
    prot: i32,
    advice: Advice,
    /// Time since when it lies at its address, on the monotonic clock.
    since_ns: u64,
    /// True while it is private for the moment of a fork.
    out: bool,
}

impl Part {
    fn end(&self) -> u64 {
        self.place.off + self.place.len
    }

    /// Gives the mapping of the file the program's advice for the range. No child gets this mapping in any case.
    fn advise(&self) {
        let Place { at, len, .. } = self.place;
        // SAFETY: such advice changes no contents.
        Advice::default().changes(self.advice).for_each(|a| _ = unsafe { page_move::sys_madvise(at, len, a) });
    }

    /// Gives the shadow the advice that the program has given since the file was mapped, so that the range still has it
    /// when it is private again. `now`: advice of the file's mapping.
    fn renew(&mut self, now: Advice) {
        // The library sets MADV_DONTFORK on the file's mapping, so only its absence tells of the program's own advice.
        // It counts also if the look before the move has not seen that the memory had MADV_DONTFORK.
        let was = Advice { unforked: self.advice.unforked || !now.unforked, ..self.advice };
        let now = Advice { unforked: self.advice.unforked && now.unforked, ..now };
        let Place { shadow, len, .. } = self.place;
        if shadow != 0 {
            // SAFETY: as above.
            was.changes(now).for_each(|a| _ = unsafe { page_move::sys_madvise(shadow, len, a) });
        }
        self.advice = now;
    }

    fn cut(&self, off: u64, len: u64) -> Part {
        let skip = off - self.place.off;
        let shadow = if self.place.shadow == 0 { 0 } else { self.place.shadow + skip };
        Part { place: Place { at: self.place.at + skip, len, off, shadow }, ..*self }
    }
}

/// The moved memory of this process.
pub(crate) struct Moved {
    /// Value of [`forks`] when the tools were opened.
    forks: u32,
    tools: Option<Tools>,
    /// In the order of their offsets in the file.
    parts: Vec<Part>,
    /// Storage for the next list of parts.
    spare: Vec<Part>,
    cover: Refcounts,
    slots: u64,
    free_slots: Vec<u64>,
    /// True if there may be parts without an MR, because they could not be given back.
    has_free_parts: bool,
    /// Recent MRs that were brief.
    pub history: ReuseHistory,
    pins: Option<(u64, bool)>,
    doors: Vec<Doorbell>,
    next_door: u64,
}

static MOVED: Mutex<Moved> = Mutex::new(Moved::empty());

static FORKS: AtomicU32 = AtomicU32::new(0);

/// Number of forks between the first process and this one. Contexts with an older number belong to a parent.
#[inline]
pub(crate) fn forks() -> u32 {
    FORKS.load(Ordering::Relaxed)
}

/// Blocks all signals of this thread until dropped.
struct HoldSignals(libc::sigset_t);

impl HoldSignals {
    fn new() -> Self {
        // SAFETY: both sets are initialized by the calls that write them.
        unsafe {
            let (mut all, mut old) = (std::mem::zeroed(), std::mem::zeroed());
            libc::sigfillset(&mut all);
            libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut old);
            HoldSignals(old)
        }
    }
}

impl Drop for HoldSignals {
    fn drop(&mut self) {
        // SAFETY: restores the mask that `new` saved.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.0, std::ptr::null_mut()) };
    }
}

/// The lock, with signals blocked.
pub(crate) struct Held {
    guard: Guard<'static, Moved>,
    // Dropped after the lock.
    _signals: HoldSignals,
}

impl std::ops::Deref for Held {
    type Target = Moved;
    fn deref(&self) -> &Moved {
        &self.guard
    }
}

impl std::ops::DerefMut for Held {
    fn deref_mut(&mut self) -> &mut Moved {
        &mut self.guard
    }
}

/// Takes the lock.
pub(crate) fn share_manager() -> Held {
    let signals = HoldSignals::new();
    Held { guard: lock(&MOVED), _signals: signals }
}

/// Opens the tools for moving memory, once for each process. Called when a device is opened.
pub(crate) fn prepare() {
    install_fork_handlers();
    let mut m = share_manager();
    if m.tools.is_some() && m.forks == forks() {
        return;
    }
    // A child's parts are its own private memory, and its parent's tools would act on the parent.
    let fresh = Moved { forks: forks(), tools: Some(Tools::open()), next_door: m.next_door, ..Moved::empty() };
    let stale = std::mem::replace(&mut *m, fresh);
    m.parts.reserve(SPARE);
    m.spare.reserve(SPARE);
    drop(stale);
}

impl Moved {
    const fn empty() -> Self {
        Moved {
            forks: 0,
            tools: None,
            parts: Vec::new(),
            spare: Vec::new(),
            cover: Refcounts::new(),
            slots: 0,
            free_slots: Vec::new(),
            has_free_parts: false,
            history: ReuseHistory::new(),
            pins: None,
            doors: Vec::new(),
            next_door: 0,
        }
    }

    /// The tools, if this process has opened them itself.
    pub fn tools(&self) -> Option<&Tools> {
        self.tools.as_ref().filter(|_| self.forks == forks())
    }

    /// The file to which private memory is moved.
    pub fn file_id(&self) -> Option<FileId> {
        self.tools()?.file_id()
    }

    /// A descriptor of that file.
    pub fn file(&self) -> Option<OwnedFd> {
        sys::dup_high(self.tools()?.file()?)
    }

    /// Mappings of this process.
    pub fn maps(&self) -> Option<&Maps> {
        self.tools()?.maps.as_ref()
    }

    /// Adds the door of a device that was opened. Returns its number.
    pub fn add_door(&mut self, bell: Bell, wake: Arc<Known>, socket: Arc<Known>) -> u64 {
        self.next_door += 1;
        let id = self.next_door;
        self.doors.push(Doorbell { id, bell, wake, copies: false, socket });
        id
    }

    /// The door of an open device.
    pub fn door(&mut self, id: u64) -> Option<&mut Doorbell> {
        self.doors.iter_mut().find(|d| d.id == id)
    }

    /// Removes the door of a device that was closed.
    pub fn remove_door(&mut self, id: u64) {
        self.doors.retain(|d| d.id != id);
    }

    /// Adds an MR to a range of the file.
    pub fn hold(&mut self, off: u64, len: u64) {
        self.cover.add(off, off + len);
    }

    /// Reads the advice that the program has given by `madvise(2)`, for the memory that is moved next.
    pub fn look_at_advice(&mut self) {
        if let Some(t) = &mut self.tools {
            t.look_at_advice();
        }
    }

    /// Moves private memory into the file and returns its offset there. The offset is one of `beside` if that is free,
    /// so that an MR over this memory and its neighbours lies in one piece. The range has no holder yet.
    /// [`Moved::look_at_advice`] must have been called before.
    ///
    /// # Errors
    /// The reason why not. The memory is private, as it was.
    pub fn take(&mut self, v: &Vma, beside: [Option<u64>; 2]) -> Result<u64, Why> {
        let len = v.end - v.start;
        let t = self.tools().ok_or(Why::Limits)?;
        if sys::limited() || self.parts.len() >= MAX_PLACES || len > SLOT - BEFORE - (2 << 20) {
            return Err(Why::Limits);
        }
        if is_used(v) {
            return Err(Why::InUse);
        }
        let threads = t.threads() > 1;
        if threads && !t.stops_threads() {
            return Err(Why::Threads);
        }
        if !t.sees_pins() && self.may_be_pinned() {
            return Err(Why::Pinned);
        }
        let beside = beside.into_iter().flatten().find(|&off| self.is_vacant(off, len));
        let slot = match beside {
            Some(_) => None,
            None => Some(self.free_slots.pop().or_else(|| self.new_slot()).ok_or(Why::Limits)?),
        };
        // Huge pages have the same alignment in the memory and in the file.
        let off = beside.unwrap_or(slot.unwrap_or(0) * SLOT + BEFORE + v.start % (2 << 20));
        let advice = self.tools().map_or(Advice::default(), |t| t.advice(v.start).0);
        let Some(shadow) = page_move::reserve_shadow(v.start, len) else {
            self.free_slots.extend(slot);
            return Err(Why::Limits);
        };
        let place = Place { at: v.start, len, off, shadow };
        self.parts.reserve(SPARE);
        let Some(h) = self.tools().and_then(|t| t.hands(&self.doors, false)) else {
            // SAFETY: our own new mapping.
            unsafe { page_move::drop_shadow(shadow, len) };
            self.free_slots.extend(slot);
            return Err(Why::Threads);
        };
        // SAFETY: the caller has found private anonymous memory there; it is not this thread's stack; signals are held.
        let taken = unsafe { page_move::take(&h, &place, libc::PROT_READ | libc::PROT_WRITE) };
        let done = taken.map_or_else(|(_, done)| done, |()| len);
        if done > 0 {
            let part =
                Part { place: Place { len: done, ..place }, prot: v.prot(), advice, since_ns: clock_ns(), out: false };
            part.advise();
            let at = self.parts.partition_point(|p| p.place.off < off);
            self.parts.insert(at, part);
            self.reserve();
        }
        match taken {
            Ok(()) => Ok(off),
            Err((why, _)) => {
                if done == 0 {
                    self.free_slots.extend(slot);
                }
                self.give_back_free(&[(off, done)]);
                Err(match why {
                    Failed::Pinned => Why::Pinned,
                    Failed::Watched => Why::InUse,
                    Failed::Room => Why::Limits,
                })
            }
        }
    }

    fn new_slot(&mut self) -> Option<u64> {
        self.slots += 1;
        (self.slots <= MAX_SLOTS).then_some(self.slots)
    }

    /// True if this range of the file is within one slot, nothing lies in it, and no mapping can have grown into it.
    fn is_vacant(&self, off: u64, len: u64) -> bool {
        let end = off + len;
        let before = self.parts.partition_point(|p| p.place.off < off).checked_sub(1).map(|i| &self.parts[i]);
        off / SLOT == (end - 1) / SLOT
            && self.parts_in(off, end).is_empty()
            && self.cover.first_free(off, end) == Some((off, end))
            && before.is_none_or(|p| p.end() / SLOT != off / SLOT || self.is_as_expected(p))
    }

    /// The parts that overlap `[lo, hi)` of the file.
    fn parts_in(&self, lo: u64, hi: u64) -> std::ops::Range<usize> {
        let first = self.parts.partition_point(|p| p.end() <= lo);
        first..self.parts.partition_point(|p| p.place.off < hi).max(first)
    }

    /// True if the program has left the mapping of a part as it was.
    fn is_as_expected(&self, p: &Part) -> bool {
        let found = self.maps().and_then(|maps| maps.find(p.place.at));
        found.is_some_and(|v| {
            let (end, at) = (p.place.at + p.place.len, p.place.at);
            let there = Some(v.file) == self.file_id() && v.start <= at && end <= v.end && v.prot() == p.prot;
            there && v.offset + (at - v.start) == p.place.off && !grown(&self.parts, &v, p)
        })
    }

    /// Makes room in the lists, so that a fork handler need not allocate.
    fn reserve(&mut self) {
        self.parts.reserve(SPARE);
        let need = self.parts.len() + SPARE;
        self.spare.reserve(need);
        self.tools.iter_mut().for_each(|t| t.reserve(2 * need));
    }

    /// Removes an MR from these ranges of the file. Memory without an MR becomes private again.
    pub fn release(&mut self, ranges: &[(u64, u64)]) {
        if self.forks != forks() {
            return;
        }
        for &(off, len) in ranges {
            self.cover.remove(off, off + len);
        }
        self.give_back_free(ranges);
        for &(off, len) in ranges {
            let mut at = off;
            while let Some((lo, hi)) = self.cover.first_free(at, off + len) {
                at = hi;
                // The program has unmapped this memory meanwhile, so it has no part, and nobody reads its data.
                if self.parts_in(lo, hi).is_empty()
                    && let Some(h) = self.tools().and_then(|t| t.hands(&self.doors, false))
                {
                    page_move::punch(h.file, lo, hi - lo);
                }
            }
            let slot = off / SLOT;
            let (lo, hi) = (slot * SLOT, (slot + 1) * SLOT);
            if self.parts_in(lo, hi).is_empty()
                && self.cover.first_free(lo, hi) == Some((lo, hi))
                && !self.free_slots.contains(&slot)
            {
                self.free_slots.push(slot);
            }
        }
    }

    /// Gives back all parts that overlap these ranges and have no MR; also parts that could not be given back before.
    fn give_back_free(&mut self, ranges: &[(u64, u64)]) {
        let whole = [(0, u64::MAX)];
        let ranges = if self.has_free_parts { &whole[..] } else { ranges };
        let is_free = |p: &Part| self.cover.first_free(p.place.off, p.end()).is_some();
        if !ranges.iter().any(|&(off, len)| self.parts[self.parts_in(off, off + len)].iter().any(is_free)) {
            return;
        }
        // While the kernel holds pages of the memory file, data that it writes there would be lost.
        self.has_free_parts = self.may_be_pinned();
        if self.has_free_parts {
            return;
        }
        self.look(ranges);
        self.look_at_advice();
        for &(off, len) in ranges {
            self.give_back_free_in(off, off + len);
        }
        self.reserve();
    }

    fn give_back_free_in(&mut self, lo: u64, hi: u64) {
        self.renew(lo, hi);
        let mut i = self.parts_in(lo, hi).start;
        while i < self.parts.len() && self.parts[i].place.off < hi {
            let part = self.parts[i];
            let Some((lo, hi)) = self.cover.first_free(part.place.off, part.end()) else {
                i += 1;
                continue;
            };
            // Ends of the part that have a holder become parts of their own.
            if lo > part.place.off {
                self.parts[i] = part.cut(part.place.off, lo - part.place.off);
                i += 1;
                self.parts.insert(i, part.cut(lo, part.end() - lo));
            }
            if hi < part.end() {
                self.parts[i] = part.cut(lo, hi - lo);
                self.parts.insert(i + 1, part.cut(hi, part.end() - hi));
            }
            let mut free = part.cut(lo, hi - lo);
            let Some(h) = self.tools().and_then(|t| t.hands(&self.doors, false)) else {
                self.has_free_parts = true;
                break;
            };
            let done = give_back(&h, &mut free);
            if done > 0 {
                page_move::punch(h.file, lo, done);
            }
            if done == free.place.len {
                self.parts.remove(i);
            } else {
                self.parts[i] = free.cut(lo + done, free.place.len - done);
                self.has_free_parts = true;
                i += 1;
            }
        }
    }

    /// Gives the parts that overlap `[lo, hi)` the advice that the last look has found. Allocates nothing.
    fn renew(&mut self, lo: u64, hi: u64) {
        let mut i = self.parts_in(lo, hi).start;
        let Some(tools) = &self.tools else { return };
        while i < self.parts.len() && self.parts[i].place.off < hi {
            let part = self.parts[i];
            let Place { at, len, off, .. } = part.place;
            let (now, until) = tools.advice(at);
            if part.since_ns <= tools.looked_ns() {
                // If the advice is for a piece of the part, that piece is cut off, as long as there is room.
                if until < at + len && self.parts.len() < self.parts.capacity() {
                    let first = until - at;
                    self.parts[i] = part.cut(off, first);
                    self.parts.insert(i + 1, part.cut(off + first, len - first));
                }
                self.parts[i].renew(now);
            }
            i += 1;
        }
    }

    /// True if the kernel may hold pages of this process. The check takes time for each open file, so its result is
    /// used for a while.
    fn may_be_pinned(&mut self) -> bool {
        let now = clock_ns();
        if let Some((until, known)) = self.pins
            && now < until
        {
            return known;
        }
        let held = self.tools().is_none_or(Tools::holds_pages);
        // At most a twentieth of the time is spent on the check.
        self.pins = Some((clock_ns() + (clock_ns() - now) * 20, held));
        held
    }

    /// Updates the list of parts after changes that the program has made to its mappings: it may have moved, cut,
    /// protected or unmapped them, or made them longer. Only parts that overlap `ranges` must be right afterwards.
    fn look(&mut self, ranges: &[(u64, u64)]) {
        let (Some(tools), Some(id)) = (self.tools.as_ref(), self.file_id()) else { return };
        let Some(maps) = &tools.maps else { return };
        let in_ranges = ranges.iter().flat_map(|&(off, len)| &self.parts[self.parts_in(off, off + len)]);
        if in_ranges.into_iter().all(|p| self.is_as_expected(p)) {
            return;
        }
        self.spare.clear();
        for v in maps.range(0, u64::MAX).filter(|v| v.file == id) {
            let (mut off, end) = (v.offset, v.offset + (v.end - v.start));
            while off < end && self.spare.len() < self.spare.capacity() {
                let i = self.parts.partition_point(|p| p.end() <= off);
                let known = self.parts.get(i).filter(|p| p.place.off < end);
                let at = v.start + (off - v.offset);
                let part = match known {
                    Some(p) if p.place.off <= off => {
                        let cut = p.cut(off, p.end().min(end) - off);
                        let since_ns = if cut.place.at == at { p.since_ns } else { clock_ns() };
                        Part { place: Place { at, ..cut.place }, prot: v.prot(), since_ns, ..cut }
                    }
                    // The mapping is longer than when it was taken.
                    next => {
                        let len = next.map_or(end, |p| p.place.off) - off;
                        let before = self.spare.last_mut().filter(|p| {
                            let meets = p.end() == off && p.place.at + p.place.len == at;
                            meets && p.prot == v.prot() && p.place.shadow != 0
                        });
                        let longer = |p: &Part| {
                            // SAFETY: the shadow of a part, or the end of one.
                            unsafe { page_move::lengthen(p.place.shadow, p.place.len, len) }.map(|s| (s, len))
                        };
                        if let Some(p) = before
                            && let Some((shadow, len)) = longer(p)
                        {
                            (p.place.shadow, p.place.len) = (shadow, p.place.len + len);
                            off += len;
                            continue;
                        }
                        let place = Place { at, len, off, shadow: 0 };
                        Part { place, prot: v.prot(), advice: Advice::default(), since_ns: clock_ns(), out: false }
                    }
                };
                off += part.place.len;
                self.spare.push(part);
            }
        }
        self.spare.sort_unstable_by_key(|p| p.place.off);
        // Drops the shadows of ranges that were unmapped.
        for p in &self.parts {
            let mut off = p.place.off;
            while off < p.end() {
                let next = self.spare.iter().find(|s| s.end() > off);
                let until = next.map_or(p.end(), |s| s.place.off.clamp(off, p.end()));
                if until > off && p.place.shadow != 0 {
                    // SAFETY: a part of a shadow whose range is gone.
                    unsafe { page_move::drop_shadow(p.place.shadow + (off - p.place.off), until - off) };
                }
                off = next.map_or(p.end(), |s| s.end()).max(until);
            }
        }
        std::mem::swap(&mut self.parts, &mut self.spare);
    }
}

/// True if all of `[at, end)` is private anonymous memory.
fn is_private(maps: &Maps, mut at: u64, end: u64) -> bool {
    for v in maps.range(at, end) {
        if v.start > at || v.shared || v.file.inode != 0 {
            return false;
        }
        at = v.end;
    }
    at >= end
}

/// True if mapping `v` continues behind part `p` with memory that is not a part yet.
fn grown(parts: &[Part], v: &Vma, p: &Part) -> bool {
    let goes_on = v.end > p.place.at + p.place.len;
    let i = parts.partition_point(|q| q.place.off < p.end());
    goes_on && parts.get(i).is_none_or(|q| q.place.off != p.end())
}

/// Makes a part private again. Returns how many of its bytes are private, from its beginning.
fn give_back(h: &MoveTools<'_>, part: &mut Part) -> u64 {
    if part.place.shadow == 0 {
        match page_move::fresh_shadow(part.place.at, part.place.len) {
            Some(s) => part.place.shadow = s,
            None => return 0,
        }
        let now = std::mem::take(&mut part.advice);
        part.renew(now);
    }
    // SAFETY: `look` has found the mapping there; signals are held, and `hands` has looked at the threads.
    unsafe { page_move::give_back(h, &part.place, part.prot) }
}

/// True if this thread uses the range while it moves memory: its stack, or its thread control block, which has errno
/// and the kernel's data for restartable sequences.
fn is_used(v: &Vma) -> bool {
    let meets = |from: u64, to: u64| v.start < to && from < v.end;
    let here = 0u8;
    let stack = (&raw const here) as u64;
    // SAFETY: glibc's own addresses; the block is at most a page long from where pthread_self(3) points.
    let (own, errno) = unsafe { (libc::pthread_self() as u64, libc::__errno_location() as u64) };
    meets(stack.saturating_sub(NEAR), stack + NEAR) || meets(own.min(errno) & !(PAGE - 1), own.max(errno) + PAGE)
}

// --- fork ---

/// The lock, during a fork.
static FORKING: Mutex<Option<ForkGuard>> = Mutex::new(None);

struct ForkGuard(Held);
// SAFETY: the guard is taken and dropped by the one thread that forks.
unsafe impl Send for ForkGuard {}

extern "C" fn before_fork() {
    let mut m = share_manager();
    m.leave_file();
    *lock(&FORKING) = Some(ForkGuard(m));
}

extern "C" fn after_in_parent() {
    let held = lock(&FORKING).take();
    if let Some(mut m) = held {
        m.0.enter_file();
    }
}

extern "C" fn after_in_child() {
    FORKS.fetch_add(1, Ordering::SeqCst);
    let held = lock(&FORKING).take();
    sys::close_early();
    held.iter().flat_map(|m| &m.0.tools).flat_map(|t| &t.process).for_each(|p| p.close());
}

impl Moved {
    /// Makes everything that is moved private memory, for the moment of a fork. Memory that cannot be made private is
    /// not inherited: a child that touches it crashes.
    fn leave_file(&mut self) {
        if self.parts.is_empty() || self.forks != forks() || !doorbells::leave(&self.doors) {
            return;
        }
        self.look(&[(0, u64::MAX)]);
        if self.tools.as_mut().is_some_and(Tools::look_at_advice_in_fork) {
            self.renew(0, u64::MAX);
        }
        let Some(h) = self.tools.as_ref().and_then(|t| t.hands(&self.doors, true)) else { return };
        let mut i = 0;
        while i < self.parts.len() {
            let mut part = self.parts[i];
            let done = give_back(&h, &mut part);
            part.out = done == part.place.len;
            // If the list has no room, the rest of the part could not be recorded, so the part is not cut.
            if !part.out && done > 0 && self.parts.len() < self.parts.capacity() {
                self.parts[i] = Part { out: true, ..part.cut(part.place.off, done) };
                i += 1;
                self.parts.insert(i, part.cut(part.place.off + done, part.place.len - done));
            } else {
                self.parts[i] = part;
            }
            i += 1;
        }
    }

    /// Moves everything that [`Moved::leave_file`] made private back to its place in the file.
    fn enter_file(&mut self) {
        if self.parts.is_empty() || self.forks != forks() {
            return;
        }
        let mut whole = true;
        let Some(h) = self.tools.as_ref().and_then(|t| t.hands(&self.doors, true)) else {
            // Then nothing has left the file either.
            return doorbells::come_back(&self.doors);
        };
        let maps = self.tools.as_ref().and_then(|t| t.maps.as_ref());
        for part in self.parts.iter_mut().filter(|p| p.out) {
            part.out = false;
            let Place { at, len, .. } = part.place;
            let taken = match page_move::reserve_shadow(at, len) {
                Some(shadow) => {
                    part.place.shadow = shadow;
                    // SAFETY: the range was made private memory in `leave_file`; signals are held.
                    unsafe { page_move::take(&h, &part.place, part.prot) }.map_err(|e| e.1)
                }
                None => Err(0),
            };
            if let Err(done) = taken {
                // If another thread has unmapped the range meanwhile, there is nothing to move, which is no failure.
                whole &= maps.is_some_and(|m| !is_private(m, at + done, at + len));
                part.place.len = done;
            }
            part.advise();
        }
        self.parts.retain(|p| p.place.len > 0);
        // If some memory could not go back, its MRs would have other bytes than the program. Then the MRs stay away,
        // and requests that need them fail.
        if whole {
            doorbells::come_back(&self.doors);
        }
    }
}

/// Installs the fork handlers, once.
pub(super) fn install_fork_handlers() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: registers three functions that live as long as this library, which is never unloaded.
        unsafe { libc::pthread_atfork(Some(before_fork), Some(after_in_parent), Some(after_in_child)) };
    });
}
