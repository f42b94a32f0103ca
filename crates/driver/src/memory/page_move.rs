//! Moving pages of the running program: private memory into the memory file, and back.
//!
//! Both directions replace a range by something else at the same address, in pieces, while other threads, the kernel
//! and other processes may write to it. A thread that touches the range meanwhile sleeps (userfaultfd) until the piece
//! is done, so no store is lost. Without userfaultfd only a process with one thread may do this; the caller makes sure
//! of that.
//!
//! The *shadow* of a range is its original mapping, emptied and kept at another address while the memory file is in its
//! place. It keeps the program's settings by `madvise(2)` and `mbind(2)`, and returns to the range when the memory
//! becomes private again.
//!
//! **While a piece is under way nothing but this thread's stack and the work area may be touched**: a page of the heap
//! may be one of those that are being moved, and then this thread would wait for itself. So: no allocation, no lock, no
//! log, no formatting. Signals are held by the caller.

use std::os::fd::RawFd;

use super::doorbells::{self, Doorbell};
use super::uffd::{NotMoved, Stops, Uffd};

pub(crate) const PAGE: u64 = 4096;
/// Bytes that are moved at a time while threads wait.
const STEP: u64 = 2 << 20;
/// Bytes of address space that are moved at a time if no thread waits.
const STEP_ALONE: u64 = 1 << 30;
/// Size from which a hole of the memory file is large, bytes.
const LARGE_HOLE: u64 = 64 << 20;
/// Bytes of one entry of `/proc/self/pagemap`.
const ENTRY: u64 = 8;
/// Most ranges that one scan of the page tables finds.
const FOUND: usize = 64;
/// Number of tries for a busy page.
const TRIES: u32 = 4;

const MADV_POPULATE_WRITE: i32 = 23;
const PAGEMAP_SCAN: libc::c_ulong = 0xc060_6610;

/// The reason why memory was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failed {
    /// The kernel holds pages of it for input or output.
    Pinned,
    /// The program watches it by a userfaultfd of its own.
    Watched,
    /// No memory, no room in the address space, or a limit of the process.
    Room,
}

/// The means to move pages: plain numbers, copied to the stack before a piece begins.
#[derive(Clone, Copy)]
pub(crate) struct MoveTools<'a> {
    /// The memory file.
    pub file: RawFd,
    /// `/proc/self/pagemap`; `None` if the process may not open it, because it is not dumpable.
    pub pagemap: Option<RawFd>,
    pub uffd: Option<&'a Uffd>,
    /// Address of the work area, where pages lie for a moment: [`STEP`] bytes at a multiple of it.
    pub side: u64,
    /// The devices that are told of each move.
    pub doors: &'a [Doorbell],
    /// True if there are other threads, or may be.
    pub threads: bool,
    /// True if pages of the range may be shared with a child that was just forked; then pages are not checked for pins.
    pub after_fork: bool,
}

/// A range of the program, its place in the memory file, and its shadow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub at: u64,
    pub len: u64,
    pub off: u64,
    pub shadow: u64,
}

impl Place {
    fn part(&self, skip: u64, len: u64) -> Place {
        Place { at: self.at + skip, len, off: self.off + skip, shadow: self.shadow + skip }
    }
}

/// The errno of the last system call of this thread.
pub(crate) fn last_errno() -> i32 {
    // SAFETY: a thread's own errno.
    unsafe { *libc::__errno_location() }
}

// Plain system calls: the wrappers of the C library may be replaced (AddressSanitizer, ThreadSanitizer, allocators),
// and the replacements look at memory that is being moved.

unsafe fn sys_mmap(at: u64, len: u64, prot: i32, flags: i32, fd: RawFd, off: u64) -> Option<u64> {
    // SAFETY: by the caller's contract about the range.
    let r = unsafe { libc::syscall(libc::SYS_mmap, at, len, prot, flags, fd, off) };
    (r != -1).then_some(r as u64)
}

unsafe fn sys_mremap(from: u64, len: u64, flags: i32, to: u64) -> bool {
    // SAFETY: by the caller's contract about both ranges.
    unsafe {
        libc::syscall(libc::SYS_mremap, from, len, len, libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | flags, to) != -1
    }
}

/// `madvise(2)`. Returns true if it succeeded.
pub(crate) unsafe fn sys_madvise(at: u64, len: u64, advice: i32) -> bool {
    // SAFETY: by the caller's contract about the range.
    unsafe { libc::syscall(libc::SYS_madvise, at, len, advice) == 0 }
}

unsafe fn sys_munmap(at: u64, len: u64) {
    // SAFETY: by the caller's contract about the range.
    unsafe { libc::syscall(libc::SYS_munmap, at, len) };
}

unsafe fn sys_mprotect(at: u64, len: u64, prot: i32) -> bool {
    // SAFETY: by the caller's contract about the range.
    unsafe { libc::syscall(libc::SYS_mprotect, at, len, prot) == 0 }
}

unsafe fn sys_lock(call: libc::c_long, at: u64, len: u64) -> bool {
    // SAFETY: locking changes no contents.
    unsafe { libc::syscall(call, at, len) == 0 }
}

const RESERVED: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
const READ_WRITE: i32 = libc::PROT_READ | libc::PROT_WRITE;

/// Reserves address space for the shadow of `len` bytes at `at`, at the same distance from a huge page's boundary.
pub(crate) fn reserve_shadow(at: u64, len: u64) -> Option<u64> {
    // SAFETY: a new mapping at a place of the kernel's choice, of which the ends are given back.
    unsafe {
        let all = sys_mmap(0, len + STEP, libc::PROT_NONE, RESERVED, -1, 0)?;
        let shadow = all + (at % STEP + STEP - all % STEP) % STEP;
        if shadow > all {
            sys_munmap(all, shadow - all);
        }
        if all + STEP > shadow {
            sys_munmap(shadow + len, all + STEP - shadow);
        }
        Some(shadow)
    }
}

/// Gives the address space of a shadow back.
///
/// # Safety
/// The range is a shadow that nothing needs any more.
pub(crate) unsafe fn drop_shadow(shadow: u64, len: u64) {
    // SAFETY: by the contract.
    unsafe { sys_munmap(shadow, len) };
}

/// The work area: [`STEP`] bytes at a multiple of it.
pub(crate) fn make_side() -> Option<u64> {
    let side = reserve_shadow(0, STEP)?;
    // SAFETY: our own new mapping. A child needs none of it.
    unsafe {
        if !sys_mprotect(side, STEP, READ_WRITE) {
            return None;
        }
        sys_madvise(side, STEP, libc::MADV_DONTFORK);
    }
    Some(side)
}

/// Finds ranges of `[from, end)` that have memory of their own, present or swapped out, in the kernel's format. Returns
/// their number, and where the scan stopped: at `end`, or when there was no more room, or after `pages` pages unless
/// that is 0. Pages that were only read are holes. `None` on kernels before 6.7.
fn scan(h: &MoveTools<'_>, from: u64, end: u64, found: &mut [[u64; 3]], pages: u64) -> Option<(usize, u64)> {
    // struct pm_scan_arg: neither a zero page, and present or swapped.
    const ZERO: u64 = 1 << 5;
    const THERE: u64 = 1 << 3 | 1 << 4;
    let pagemap = h.pagemap?;
    let (room, count) = (found.as_mut_ptr() as u64, found.len() as u64);
    let mut arg = [96, 0, from, end, 0, room, count, pages, ZERO, ZERO, THERE, THERE];
    // SAFETY: the kernel fills at most `count` ranges.
    let n = unsafe { libc::syscall(libc::SYS_ioctl, pagemap, PAGEMAP_SCAN, arg.as_mut_ptr()) };
    (n >= 0).then(|| (n as usize, if arg[4] > from { arg[4] } else { end }))
}

/// Calls `f` with each range of `[at, at + len)` that has memory of its own, until `f` returns false. Nobody else may
/// write to the range, and it must be readable.
fn each_present(h: &MoveTools<'_>, at: u64, len: u64, mut f: impl FnMut(u64, u64) -> bool) -> bool {
    let end = at + len;
    if h.pagemap.is_none() {
        return each_range(at, end, holds_more_than_zeros, f);
    }
    let mut from = at;
    let mut found = [[0u64; 3]; FOUND];
    while from < end {
        let Some((n, until)) = scan(h, from, end, &mut found, 0) else { return each_in_pagemap(h, from, end, f) };
        if !found[..n].iter().all(|r| f(r[0], r[1] - r[0])) {
            return false;
        }
        from = until;
    }
    true
}

/// The first page of `[at, at + len)` that has memory of its own; the end if there is none.
fn first_present(h: &MoveTools<'_>, at: u64, len: u64) -> u64 {
    let mut found = [[0u64; 3]];
    if let Some((n, _)) = scan(h, at, at + len, &mut found, 1) {
        return if n > 0 { found[0][0] } else { at + len };
    }
    let mut first = at + len;
    each_in_pagemap(h, at, at + len, |page, _| {
        first = page;
        false
    });
    first
}

/// Calls `f` with each range of pages for which `is_there` is true, until `f` returns false.
fn each_range(mut from: u64, end: u64, is_there: impl Fn(u64) -> bool, mut f: impl FnMut(u64, u64) -> bool) -> bool {
    while from < end {
        let first = from;
        while from < end && is_there(from) {
            from += PAGE;
        }
        if from > first && !f(first, from - first) {
            return false;
        }
        from += PAGE;
    }
    true
}

/// True unless a page is all zeros, so that it may as well be a hole. Reading a missing page does not make one.
fn holds_more_than_zeros(page: u64) -> bool {
    // SAFETY: a page of a mapping of ours; nobody writes to it.
    (0..PAGE).step_by(8).any(|off| unsafe { std::ptr::read_volatile((page + off) as *const u64) } != 0)
}

/// [`each_present`] on kernels before 6.7.
fn each_in_pagemap(h: &MoveTools<'_>, mut from: u64, end: u64, mut f: impl FnMut(u64, u64) -> bool) -> bool {
    let mut entries = [0u64; 256];
    let pagemap = h.pagemap.unwrap_or(-1);
    while from < end {
        let until = end.min(from + entries.len() as u64 * PAGE);
        let bytes = (until - from) / PAGE * ENTRY;
        // SAFETY: reads at most the buffer.
        let got =
            unsafe { libc::syscall(libc::SYS_pread64, pagemap, entries.as_mut_ptr(), bytes, from / PAGE * ENTRY) };
        // Without the file all pages count as present.
        let is_there = |page: u64| got < bytes as i64 || entries[((page - from) / PAGE) as usize] >> 62 != 0;
        if !each_range(from, until, is_there, &mut f) {
            return false;
        }
        from = until;
    }
    true
}

/// Bytes from `at` on that are moved at once: up to the next multiple of [`STEP`], and all of a hole. After a fork of a
/// process with one thread: up to [`STEP_ALONE`].
fn step(h: &MoveTools<'_>, at: u64, left: u64) -> u64 {
    if h.after_fork && !h.threads {
        return left.min(STEP_ALONE);
    }
    let window = STEP - at % STEP;
    if left <= window {
        return left;
    }
    let first = first_present(h, at, left);
    if first >= at + left { left } else { window.max((first / STEP * STEP).saturating_sub(at)) }
}

/// Moves private pages into the memory file, and maps the file over them: shared, and not inherited by children. A
/// range that is locked (`mlock(2)`) stays locked.
///
/// # Errors
/// See [`Failed`], with the number of bytes that were moved before. The rest is as it was, and its shadow is gone.
///
/// # Safety
/// `p.at` is private anonymous memory of protection `prot`, without this thread's stack; `p.shadow` is reserved.
/// Signals are held. Without a userfaultfd there is no other thread.
pub(crate) unsafe fn take(h: &MoveTools<'_>, p: &Place, prot: i32) -> Result<(), (Failed, u64)> {
    let mut done = 0;
    while done < p.len {
        let n = step(h, p.at + done, p.len - done);
        let piece = p.part(done, n);
        let taken = if doorbells::begin_move(h.doors) {
            // SAFETY: a part of the caller's range.
            unsafe { take_piece(h, &piece, prot) }
        } else {
            // SAFETY: only reserved so far.
            unsafe { sys_munmap(piece.shadow, n) };
            Err(Failed::Room)
        };
        doorbells::end_move(h.doors);
        done += n;
        if let Err(e) = taken {
            // SAFETY: only reserved so far.
            unsafe { sys_munmap(p.shadow + done, p.len - done) };
            return Err((e, done - n));
        }
    }
    Ok(())
}

unsafe fn take_piece(h: &MoveTools<'_>, p: &Place, prot: i32) -> Result<(), Failed> {
    // Locked pages are unlocked for the moment, so that they do not count twice against the limit of the process.
    let locked = is_locked(p.at);
    if locked {
        // SAFETY: changes no contents.
        unsafe { sys_lock(libc::SYS_munlock, p.at, p.len) };
    }
    // SAFETY: early failures leave a shadow that is only reserved, and locking changes no contents.
    let give_up = |why| unsafe {
        if locked {
            sys_lock(libc::SYS_mlock, p.at, p.len);
        }
        sys_munmap(p.shadow, p.len);
        Err(why)
    };
    if let Some(u) = h.uffd
        && !u.watch(p.at, p.len, Stops::Missing)
    {
        return give_up(Failed::Watched);
    }
    let aside = match h.uffd {
        Some(u) if u.moves && !h.after_fork && p.at % STEP + p.len <= STEP => {
            let side = h.side + p.at % STEP;
            match move_aside(u, p, side) {
                Ok(()) => Some(side),
                Err(NotMoved::Unable) => None,
                Err(NotMoved::Busy(_)) => return give_up(Failed::Pinned),
            }
        }
        _ => None,
    };
    // From here on nobody else reads or writes the pages.
    // SAFETY: the shadow is reserved for this range; the original mapping stays, empty.
    if !unsafe { sys_mremap(p.at, p.len, libc::MREMAP_DONTUNMAP, p.shadow) } {
        if let (Some(u), Some(side)) = (h.uffd, aside) {
            let _ = u.move_pages(side, p.at, p.len);
            u.forget(side, p.len);
        }
        h.uffd.inspect(|u| u.forget(p.at, p.len));
        return give_up(Failed::Room);
    }
    let source = aside.unwrap_or(p.shadow);
    if prot != READ_WRITE {
        // SAFETY: the shadow is ours.
        unsafe { sys_mprotect(p.shadow, p.len, READ_WRITE) };
    }
    if let (None, Some(u), Some(side)) = (h.pagemap, h.uffd, aside) {
        // All pages are read next, also missing ones, so the range must not be watched.
        u.forget(side, p.len);
    }
    let copied =
        each_present(h, source, p.len, |at, len| transfer(libc::SYS_pwrite64, h.file, at, len, p.off + (at - source)));
    let flags = libc::MAP_SHARED | libc::MAP_FIXED;
    // SAFETY: replaces the empty mapping by the file that has its bytes.
    if !copied || unsafe { sys_mmap(p.at, p.len, prot, flags, h.file, p.off) }.is_none() {
        // SAFETY: the shadow has the original mapping.
        unsafe {
            put_back(h, p, aside);
            if locked {
                sys_lock(libc::SYS_mlock, p.at, p.len);
            }
        }
        return Err(Failed::Room);
    }
    // SAFETY: advice and locks on mappings of ours; the pages aside are in the file now.
    unsafe {
        sys_madvise(p.at, p.len, libc::MADV_DONTFORK);
        if let Some(u) = h.uffd {
            u.wake(p.at, p.len);
        }
        sys_madvise(source, p.len, libc::MADV_DONTNEED);
        if let (Some(u), Some(side)) = (h.uffd, aside) {
            u.forget(side, p.len);
        }
        if locked {
            sys_lock(libc::SYS_mlock, p.at, p.len);
        }
    }
    Ok(())
}

/// True if the page is locked (`mlock(2)`): `msync(2)` cannot invalidate locked pages, and does nothing to others.
fn is_locked(at: u64) -> bool {
    // SAFETY: without MS_SYNC the call only checks the mapping. It leaves huge pages whole.
    let r = unsafe { libc::syscall(libc::SYS_msync, at, PAGE, libc::MS_ASYNC | libc::MS_INVALIDATE) };
    r == -1 && last_errno() == libc::EBUSY
}

/// Moves the pages to the work area. Pages that are shared with a child are first made this process's own.
fn move_aside(u: &Uffd, p: &Place, side: u64) -> Result<(), NotMoved> {
    let (mut from, mut tries) = (p.at, 0);
    // Watched only for the moment: a tool that reads all memory of the process (valgrind, gdb) would wait for missing
    // pages.
    if !u.watch(side, p.len, Stops::Missing) {
        return Err(NotMoved::Unable);
    }
    loop {
        let done = from - p.at;
        let busy = match u.move_pages(from, side + done, p.len - done) {
            Ok(()) => return Ok(()),
            Err(NotMoved::Busy(page)) => page,
            Err(NotMoved::Unable) => {
                let _ = u.move_pages(side, p.at, p.len);
                u.forget(side, p.len);
                return Err(NotMoved::Unable);
            }
        };
        tries = if busy > from { 1 } else { tries + 1 };
        from = busy;
        // SAFETY: a write fault that changes no byte: it ends copy-on-write.
        let own = unsafe { sys_madvise(busy, PAGE, MADV_POPULATE_WRITE) };
        if tries > TRIES || !own {
            let _ = u.move_pages(side, p.at, p.len);
            u.forget(side, p.len);
            u.forget(p.at, p.len);
            return Err(NotMoved::Busy(busy));
        }
    }
}

/// Undoes a piece that was begun: the shadow returns to its old place, with the pages in it.
unsafe fn put_back(h: &MoveTools<'_>, p: &Place, aside: Option<u64>) {
    if let (Some(u), Some(side)) = (h.uffd, aside)
        && u.watch(p.shadow, p.len, Stops::Missing)
    {
        let _ = u.move_pages(side, p.shadow, p.len);
        u.forget(side, p.len);
    }
    // SAFETY: the range is empty or unmapped, and the shadow is its original mapping.
    unsafe { sys_mremap(p.shadow, p.len, 0, p.at) };
    if let Some(u) = h.uffd {
        u.forget(p.at, p.len);
    }
    punch(h.file, p.off, p.len);
}

/// Writes `len` bytes at `at` to a file (`SYS_pwrite64`), or reads them from it (`SYS_pread64`). False if a part is
/// missing.
fn transfer(call: libc::c_long, file: RawFd, mut at: u64, mut len: u64, mut off: u64) -> bool {
    while len > 0 {
        // SAFETY: the kernel reads the range, or writes to a mapping of ours, or says that it cannot.
        let n = unsafe { libc::syscall(call, file, at, len, off) };
        if n <= 0 {
            return false;
        }
        (at, len, off) = (at + n as u64, len - n as u64, off + n as u64);
    }
    true
}

/// Frees a range of the memory file: it reads as zeros, and takes no memory.
pub(crate) fn punch(file: RawFd, off: u64, len: u64) {
    // SAFETY: changes the file only.
    unsafe {
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        libc::syscall(libc::SYS_fallocate, file, mode, off, len);
    }
}

/// True if all pages of a range of the memory file exist, in memory or swapped out; false on kernels before 6.5, which
/// do not say.
fn is_full(file: RawFd, off: u64, end: u64) -> bool {
    const SYS_CACHESTAT: libc::c_long = 451;
    // Counts of pages: present, dirty, under writeback, evicted, recently evicted.
    let (range, mut pages) = ([off, end - off], [0u64; 5]);
    // SAFETY: the kernel reads the range and fills the counts.
    let r = unsafe { libc::syscall(SYS_CACHESTAT, file, range.as_ptr(), pages.as_mut_ptr(), 0) };
    r == 0 && (pages[0] + pages[3]) * PAGE >= end - off
}

/// Finds the data of the memory file. Remembers the last range, because the kernel walks all of its pages to find its
/// end.
struct Data {
    file: RawFd,
    known: (u64, u64),
}

impl Data {
    fn new(file: RawFd) -> Self {
        Data { file, known: (0, 0) }
    }

    /// The next range in `[off, end)` that has data.
    fn next(&mut self, off: u64, end: u64) -> Option<(u64, u64)> {
        if off >= end {
            return None;
        }
        if !(self.known.0 <= off && off < self.known.1) {
            // SAFETY: moves the file's position, which nobody uses.
            let seek = |at: u64, whence: i32| unsafe { libc::syscall(libc::SYS_lseek, self.file, at, whence) };
            let first = seek(off, libc::SEEK_DATA);
            if first < 0 || first as u64 >= end {
                return None;
            }
            let first = first as u64;
            // The kernel looks for a hole page by page, and neighbours may follow without a hole.
            let last =
                if end - first <= STEP && is_full(self.file, first, end) { -1 } else { seek(first, libc::SEEK_HOLE) };
            self.known = (first, if last < 0 { end } else { last as u64 });
        }
        // The range may be from a look that went further than this one.
        Some((self.known.0.max(off), self.known.1.min(end)))
    }

    /// Calls `f` with each range of the shadow of `p` for which the file has data, and with its offset in the file,
    /// until `f` returns false.
    fn each(&mut self, p: &Place, mut f: impl FnMut(u64, u64, u64) -> bool) -> bool {
        let mut from = p.off;
        while let Some((data, hole)) = self.next(from, p.off + p.len) {
            if !f(p.shadow + (data - p.off), hole - data, data) {
                return false;
            }
            from = hole;
        }
        true
    }
}

/// Makes a range where the memory file is mapped private again, with the same bytes: its shadow takes its place. The
/// range may have other protection than its shadow, and lie at another address than when it was taken. The file keeps
/// its data. Returns how many bytes are private, from the beginning on; the shadow of these bytes is gone.
///
/// # Safety
/// `p.at` is a mapping of the memory file at `p.off`, and `p.shadow` its shadow. Signals are held. Without a
/// userfaultfd there is no other thread.
pub(crate) unsafe fn give_back(h: &MoveTools<'_>, p: &Place, prot: i32) -> u64 {
    let (mut done, mut data) = (0, Data::new(h.file));
    while done < p.len {
        let part = p.part(done, p.len - done);
        let (n, hole) = step_back(h, &mut data, &part);
        // SAFETY: a part of the caller's range.
        let placed =
            doorbells::begin_move(h.doors) && unsafe { give_back_piece(h, &mut data, &part.part(0, n), prot, hole) };
        doorbells::end_move(h.doors);
        if !placed {
            break;
        }
        done += n;
    }
    done
}

/// Bytes that are given back at once, and whether they are a large hole in a process with one thread: protecting each
/// of its pages would cost more than it is worth.
fn step_back(h: &MoveTools<'_>, data: &mut Data, p: &Place) -> (u64, bool) {
    let window = (STEP - p.at % STEP).min(p.len);
    if h.threads {
        return (window, false);
    }
    let first = data.next(p.off, p.off + p.len).map_or(p.len, |d| d.0 - p.off);
    if first > LARGE_HOLE { (first, true) } else { (window, false) }
}

unsafe fn give_back_piece(h: &MoveTools<'_>, data: &mut Data, p: &Place, prot: i32, hole: bool) -> bool {
    let locked = is_locked(p.at);
    // In a fork of a program with one thread only peers could be stopped, and their system calls would fail.
    let stops = h.uffd.filter(|u| u.protects && !hole && (u.full || h.threads || !h.after_fork));
    if stops.is_some() {
        // Allocates the pages of the shadow while nobody waits yet.
        data.each(p, |at, len, _| {
            // SAFETY: the shadow is ours.
            unsafe { sys_madvise(at, len, MADV_POPULATE_WRITE) };
            true
        });
    }
    if let Some(u) = stops {
        if !u.watch(p.at, p.len, Stops::Writes) {
            return false;
        }
        if !u.protect(p.at, p.len) {
            u.forget(p.at, p.len);
            return false;
        }
    }
    let filled = data.each(p, |at, len, off| transfer(libc::SYS_pread64, h.file, at, len, off));
    // SAFETY: the shadow is ours until it takes the range's place, at once and with the same bytes.
    let placed = filled
        && unsafe {
            let ready = prot == READ_WRITE || sys_mprotect(p.shadow, p.len, prot);
            if locked {
                sys_lock(libc::SYS_munlock, p.at, p.len);
            }
            // Another thread may have unmapped the range meanwhile, and the kernel may have given it to something else,
            // which is not watched.
            ready && stops.is_none_or(|u| u.protect(p.at, p.len)) && sys_mremap(p.shadow, p.len, 0, p.at)
        };
    if locked {
        // SAFETY: changes no contents.
        unsafe { sys_lock(libc::SYS_mlock, p.at, p.len) };
    }
    if !placed {
        // SAFETY: the shadow is emptied again.
        unsafe {
            sys_mprotect(p.shadow, p.len, READ_WRITE);
            sys_madvise(p.shadow, p.len, libc::MADV_DONTNEED);
        }
    }
    if let Some(u) = stops {
        // Threads that wait for the shared mapping go on with the present one.
        if placed { u.wake(p.at, p.len) } else { u.forget(p.at, p.len) }
    }
    placed
}

/// Makes a shadow longer, as the program has made its range longer, and returns its new address. The shadow becomes one
/// mapping, so that the range is one mapping again afterwards.
///
/// # Safety
/// The range is a shadow, or the end of one.
pub(crate) unsafe fn lengthen(shadow: u64, len: u64, by: u64) -> Option<u64> {
    // SAFETY: changes and moves an empty mapping of ours whose address only the caller has.
    unsafe {
        // Its pieces came one by one, watched, and the kernel joins such mappings only when they are changed next.
        if !sys_mprotect(shadow, len, libc::PROT_NONE) || !sys_mprotect(shadow, len, READ_WRITE) {
            return None;
        }
        let r = libc::syscall(libc::SYS_mremap, shadow, len, len + by, libc::MREMAP_MAYMOVE);
        (r != -1).then_some(r as u64)
    }
}

/// Makes a private mapping as the shadow of memory that has none, because the program has made its mapping longer.
pub(crate) fn fresh_shadow(at: u64, len: u64) -> Option<u64> {
    let shadow = reserve_shadow(at, len)?;
    // SAFETY: our own new mapping.
    unsafe { sys_mprotect(shadow, len, READ_WRITE) }.then_some(shadow)
}
