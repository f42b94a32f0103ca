//! Memory registration: how the device reaches an MR's bytes. One of three ways for each MR.
//!
//! | way | when | a transfer costs |
//! |---|---|---|
//! | direct | the range is shared memory already (memfd, `/dev/shm`) | one copy |
//! | share | private memory of a process with one thread: moved into a memory file | one copy |
//! | copy | everything else | system calls and two copies |
//!
//! `UNIRDMA_MR=copy` forces the last, `UNIRDMA_MR=direct` never moves pages.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, LazyLock, Mutex, OnceLock};

use unirdma_abi as abi;
use unirdma_abi::Command;
use unirdma_formats::access;
use unirdma_link::{PROCESS_LIMIT, RegionDesc};
use unirdma_mem::{MemFd, ProcMem};

use crate::context::Context;
use crate::maps::{Vma, threads, vmas};
use crate::queues::gone_is_fine;
use crate::{Result, errno, lock, map_errno, share};

const PAGE: u64 = 4096;
/// Memory files of moved pages that a process keeps open at most.
const MAX_MOVED: usize = 256;

/// How an MR's bytes are reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Mapped as it is.
    Direct,
    /// Moved into a memory file, then mapped.
    Share,
    /// Copied by system calls.
    Copy,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Policy {
    Auto,
    Direct,
    Copy,
}

fn policy() -> Policy {
    static P: OnceLock<Policy> = OnceLock::new();
    *P.get_or_init(|| match std::env::var("UNIRDMA_MR").as_deref() {
        Ok("copy") => Policy::Copy,
        Ok("direct") => Policy::Direct,
        _ => Policy::Auto,
    })
}

/// Open files of moved pages by inode, with the number of MRs that lie in each, of all contexts of this
/// process: pages that one context has moved must not be moved again under it.
static MOVED_FILES: LazyLock<Mutex<HashMap<u64, (OwnedFd, usize)>>> = LazyLock::new(Mutex::default);

/// Memory of this process that is shared from the start: its MRs are *direct* whatever the process does.
pub struct Buffer(MemFd);

impl Buffer {
    /// Zeroed memory of at least `len` bytes, page aligned.
    ///
    /// # Errors
    /// `EINVAL` for no bytes, or those of the memory file.
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

    /// True if `[addr, addr + len)` lies in it.
    pub fn holds(&self, addr: usize, len: usize) -> bool {
        let off = addr.wrapping_sub(self.addr());
        addr >= self.addr() && off.checked_add(len).is_some_and(|end| end <= self.0.span().len())
    }
}

/// A memory region.
pub struct Mr {
    ctx: Arc<Context>,
    /// Its handle.
    pub mrn: u32,
    /// Its lkey and rkey.
    pub key: u32,
    /// How its bytes are reached.
    pub way: Way,
    regions: Vec<RegionDesc>,
    inodes: Vec<u64>,
}

/// How the bytes of one mapping come to lie in a memory file.
enum Source {
    /// They do, in this one.
    File(OwnedFd),
    /// By moving them.
    Move,
}

/// A part of an MR in a memory file.
struct Piece {
    fd: OwnedFd,
    off: u64,
    len: u64,
}

impl Mr {
    /// Registers `[addr, addr + len)` under virtual address `iova`.
    ///
    /// # Errors
    /// `EFAULT` if the range is not mapped so, `EINVAL` for flags that do not go together, or those of
    /// the device.
    pub fn register(ctx: &Arc<Context>, pdn: u32, addr: u64, len: u64, iova: u64, flags: u32) -> Result<Self> {
        share::install_fork_handlers();
        let mut mr = Mr { ctx: ctx.clone(), mrn: 0, key: 0, way: Way::Copy, regions: Vec::new(), inodes: Vec::new() };
        let on_demand = flags & access::ON_DEMAND != 0;
        let flags = flags & !(access::ON_DEMAND | access::HUGETLB | access::ZERO_BASED);
        let (start, len) = if on_demand {
            // Its pages may change at any time: each access looks them up. All of the address space is one MR, if asked.
            let implicit = addr == 0 && len == usize::MAX as u64;
            let len = if implicit { PROCESS_LIMIT } else { len };
            addr.checked_add(len).filter(|&end| end <= PROCESS_LIMIT).ok_or(libc::EINVAL)?;
            offer_process(ctx)?;
            (addr, len)
        } else {
            (mr.place(addr, len, flags)?, len)
        };
        let req =
            abi::RegUserMrReq { pdn, access_flags: flags, start, length: len, virt_addr: iova, ..Default::default() };
        let resp: Result<abi::MrResp> = ctx.command(Command::RegUserMr, &req);
        match resp {
            Ok(r) => {
                (mr.mrn, mr.key) = (r.mrn, r.lkey);
                Ok(mr)
            }
            Err(e) => {
                mr.take_regions_back();
                Err(e)
            }
        }
    }

    /// An MR of no memory: zeros are read from any address of it, and what is written is discarded. Its key serves as
    /// lkey only.
    ///
    /// # Errors
    /// Those of the device.
    pub fn null(ctx: &Arc<Context>, pdn: u32) -> Result<Self> {
        let req = abi::HandleReq { handle: pdn, reserved: 0 };
        let r: abi::MrResp = ctx.command(Command::AllocNullMr, &req)?;
        let (regions, inodes) = (Vec::new(), Vec::new());
        Ok(Mr { ctx: ctx.clone(), mrn: r.mrn, key: r.lkey, way: Way::Direct, regions, inodes })
    }

    /// Chooses the way of a range; its bus address.
    fn place(&mut self, addr: u64, len: u64, flags: u32) -> Result<u64> {
        addr.checked_add(len).filter(|&end| end <= PROCESS_LIMIT).ok_or(libc::EINVAL)?;
        let lo = addr / PAGE * PAGE;
        let hi = if len == 0 { lo } else { (addr + len).next_multiple_of(PAGE) };
        let map = if lo == hi { Vec::new() } else { vmas(lo, hi).map_err(|e| errno(&e))? };
        check_range(&map, lo, hi, flags)?;
        if let Some(bus) = self.map_in_place(&map, lo, hi) {
            return Ok(bus + (addr - lo));
        }
        self.take_regions_back();
        self.way = Way::Copy;
        offer_process(&self.ctx)?;
        Ok(addr)
    }

    /// Becomes what `new` is, with the keys that it has. If the device refuses, it stays as it was, and `new` is gone.
    ///
    /// # Errors
    /// Those of the device.
    pub fn replace(&mut self, mut new: Mr) -> Result<()> {
        let req = abi::ReregMrReq { mrn: self.mrn, by: new.mrn };
        if let Err(e) = self.ctx.command_void(Command::ReregMr, &req) {
            let _ = new.deregister();
            return Err(e);
        }
        self.way = new.way;
        std::mem::swap(&mut self.regions, &mut new.regions);
        std::mem::swap(&mut self.inodes, &mut new.inodes);
        new.take_regions_back();
        Ok(())
    }

    /// Deregisters the MR.
    ///
    /// # Errors
    /// Those of the device; the MR lives on.
    pub fn deregister(&mut self) -> Result<()> {
        let req = abi::HandleReq { handle: self.mrn, reserved: 0 };
        gone_is_fine(self.ctx.command_void(Command::DeregMr, &req), &self.ctx)?;
        self.take_regions_back();
        Ok(())
    }

    /// Gives the range to the device as mapped memory; its bus address. `None` if some part cannot be.
    fn map_in_place(&mut self, map: &[Vma], lo: u64, hi: u64) -> Option<u64> {
        if policy() == Policy::Copy || map.is_empty() {
            return None;
        }
        let may_move = policy() == Policy::Auto && threads() == 1;
        // Nothing is moved before it is known that every part can be mapped.
        let sources: Vec<Source> = map.iter().map(|v| source(v, may_move)).collect::<Option<_>>()?;
        self.way = if map.iter().all(|v| v.is_shared_memory() && !v.is_ours()) { Way::Direct } else { Way::Share };
        let mut pieces = Vec::new();
        for (v, source) in map.iter().zip(sources) {
            pieces.push(self.piece(&clip(v, lo, hi), source)?);
        }
        let ctx = self.ctx.clone();
        let mut arena = lock(&ctx.arena);
        let bus = arena.take_bus(hi - lo);
        drop(arena);
        let mut at = bus;
        for p in pieces {
            // No vring lies in application memory, so its own address needs no announcing.
            let d = RegionDesc { bus_addr: at, size: p.len, user_addr: at, mmap_offset: p.off };
            lock(&ctx.frontend).add_region(d, p.fd.as_fd()).ok()?;
            self.regions.push(d);
            at += p.len;
        }
        Some(bus)
    }

    /// The file of a part of one mapping.
    fn piece(&mut self, v: &Vma, source: Source) -> Option<Piece> {
        let mut moved = lock(&MOVED_FILES);
        let (fd, off, inode) = match source {
            Source::File(fd) => (fd, v.offset, v.inode),
            Source::Move => {
                if moved.len() >= MAX_MOVED {
                    return None;
                }
                let fd = share::move_pages(v).ok()?;
                let inode = rustix::fs::fstat(&fd).ok()?.st_ino;
                moved.insert(inode, (fd.try_clone().ok()?, 0));
                (fd, 0, inode)
            }
        };
        if let Some((_, users)) = moved.get_mut(&inode) {
            *users += 1;
            self.inodes.push(inode);
        }
        Some(Piece { fd, off, len: v.end - v.start })
    }

    fn take_regions_back(&mut self) {
        for d in self.regions.drain(..) {
            let _ = lock(&self.ctx.frontend).remove_region(d);
        }
        let mut moved = lock(&MOVED_FILES);
        for inode in self.inodes.drain(..) {
            if let Some((_, users)) = moved.get_mut(&inode) {
                *users -= 1;
                if *users == 0 {
                    moved.remove(&inode);
                }
            }
        }
    }
}

fn clip(v: &Vma, lo: u64, hi: u64) -> Vma {
    let start = v.start.max(lo);
    Vma { start, end: v.end.min(hi), offset: v.offset + (start - v.start), ..v.clone() }
}

fn known_file(v: &Vma) -> Option<OwnedFd> {
    lock(&MOVED_FILES).get(&v.inode).and_then(|(fd, _)| fd.try_clone().ok())
}

/// How a mapping's bytes come to lie in a memory file; `None` if they do not. Pages whose file is not open
/// any more are moved once more, under the same condition as private ones.
fn source(v: &Vma, may_move: bool) -> Option<Source> {
    let file = if v.is_ours() {
        known_file(v)
    } else if v.is_shared_memory() {
        share::find_open_file(v.inode).or_else(|| share::open_by_name(v))
    } else {
        None
    };
    match file {
        Some(fd) => Some(Source::File(fd)),
        None => (may_move && (v.is_ours() || v.is_movable())).then_some(Source::Move),
    }
}

/// `EFAULT` unless the mappings cover the range and allow what the MR allows.
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
    let mem = ProcMem::of_self().map_err(|e| errno(&e))?;
    let d = RegionDesc { bus_addr: 0, size: PROCESS_LIMIT, user_addr: 0, mmap_offset: 0 };
    lock(&ctx.frontend).add_region(d, mem.as_fd()).map_err(|e| errno(&e))?;
    *offered = true;
    Ok(())
}
