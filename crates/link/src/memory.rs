//! A session's memory: regions by bus address, added and removed while the session lives.
//!
//! There are two kinds. A *mapped* region is a memory file. A *process* region is a `/proc/PID/mem` descriptor: its bus
//! addresses are virtual addresses of that process, below [`PROCESS_LIMIT`], and it can only be accessed by copying.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use unirdma_mem::{MapError, Pieces, ProcMem, Span, is_memory, map_pieces};
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{GuestAddress, GuestMemoryMmap, GuestRegionMmap};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::accounts::{Ledger, Resource, Ticket};
use crate::blocking_fd::BlockingFd;
use crate::sparse_account::SparseAccount;

/// Most regions of one session.
pub const MAX_REGIONS: usize = 1024;
/// Most pieces that are mapped side by side, so that access costs nothing extra. More are kept as a list.
pub const MAX_MAPPED: usize = 512;
/// Memory of a list without its pieces, in units of a piece.
const LIST_IN_PIECES: u64 = 16;
/// Bus addresses below this are a process's own virtual addresses. Mapped regions of a process lie above.
pub const PROCESS_LIMIT: u64 = 1 << 47;

/// A region as a vhost-user message describes it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RegionDesc {
    /// Bus address (guest physical address of a VM).
    pub bus_addr: u64,
    /// Bytes.
    pub size: u64,
    /// Address in the frontend's own address space, in which vring addresses are given.
    pub user_addr: u64,
    /// Offset of the region in the file.
    pub mmap_offset: u64,
}

/// The reason why a region was refused.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    /// It overlaps another region, is empty, or wraps around.
    #[error("the range is empty, wraps, or overlaps another region")]
    Range,
    /// No such region.
    #[error("there is no such region")]
    Unknown,
    /// There are [`MAX_REGIONS`] regions already.
    #[error("a session has at most {MAX_REGIONS} regions; a program with UNIRDMA_MR=copy needs few")]
    TooMany,
    /// The vRNIC or its host is at its limit of this resource.
    #[error("{}", used_up(*.0))]
    Exhausted(Resource),
    /// The file cannot be used.
    #[error("{0}")]
    File(String),
}

impl Refused {
    /// True if a resource is used up; false if the request is wrong.
    pub fn is_want(&self) -> bool {
        matches!(self, Refused::TooMany | Refused::Exhausted(_))
    }
}

impl From<MapError> for Refused {
    fn from(e: MapError) -> Self {
        match e {
            // The accounts allow less than the kernel does, unless this process has too many mappings of its own.
            MapError::Os(e) if e.raw_os_error() == Some(rustix::io::Errno::NOMEM.raw_os_error()) => {
                Refused::Exhausted(Resource::Mappings)
            }
            e => Refused::File(e.to_string()),
        }
    }
}

/// What a vRNIC has used up, and what limits it.
fn used_up(resource: Resource) -> &'static str {
    match resource {
        Resource::Descriptors => {
            "the vRNIC holds as many descriptors as it may (its --max-descriptors; ulimit -Hn of the virtual layer, of which it \
             has at most half of what others leave)"
        }
        Resource::Mappings => {
            "the vRNIC has as many mappings as it may (its --max-mappings; sysctl vm.max_map_count, of which it has at most \
             half of what others leave)"
        }
        Resource::Pieces => "the vRNIC has MRs of as many pieces as it may (its --max-pieces; the memory of this host)",
        Resource::AddressSpace => "the vRNIC has mapped as many bytes as it may (its --max-address-space)",
        Resource::Filled => "the vRNIC has filled as many bytes of sparse files as it may (its --max-filled)",
        Resource::Kept => "as much is kept for the vRNIC as may be",
    }
}

enum Kind {
    Mapped { span: Span, fd: OwnedFd, guest: Arc<GuestRegionMmap> },
    Process(ProcMem),
}

/// One region.
pub struct Region {
    /// Unique in the session, never reused.
    pub id: u64,
    /// As the frontend has described it.
    pub desc: RegionDesc,
    kind: Kind,
    /// Bytes that the virtual layer has allocated in the region's file.
    filled: Arc<SparseAccount>,
    /// For the region's descriptor.
    _ticket: Ticket,
}

/// Result of [`Memory::gather`].
pub enum Gathered {
    /// One window.
    Window(Span),
    /// Pieces of the windows of regions, too many to map each of them.
    Pieces(Pieces),
}

/// A part of a region.
struct Piece {
    /// The index of the region.
    region: usize,
    /// Offset in the region.
    off: u64,
    len: u64,
}

/// The regions of a session at one moment, sorted by bus address.
#[derive(Clone, Default)]
pub struct Memory {
    regions: Vec<Arc<Region>>,
    next_id: u64,
    ledger: Ledger,
    /// Bytes allocated through mappings that span several regions.
    filled: Arc<SparseAccount>,
}

impl Ledger {
    /// As [`Ledger::take`].
    ///
    /// # Errors
    /// [`Refused::Exhausted`] if that is too much.
    pub(crate) fn hold(&self, resource: Resource, n: u64) -> Result<Ticket, Refused> {
        self.take(resource, n).ok_or(Refused::Exhausted(resource))
    }
}

/// The indices of the regions that pieces lie in, sorted.
fn regions_of(pieces: &[Piece]) -> Vec<usize> {
    let mut used: Vec<usize> = pieces.iter().map(|p| p.region).collect();
    used.sort_unstable();
    used.dedup();
    used
}

/// Tickets for a mapping of `pieces` pieces and `bytes` bytes.
fn map_tickets(ledger: &Ledger, pieces: usize, bytes: u64) -> Result<[Ticket; 2], Refused> {
    Ok([ledger.hold(Resource::Mappings, pieces as u64)?, ledger.hold(Resource::AddressSpace, bytes)?])
}

impl Region {
    fn new(id: u64, desc: RegionDesc, fd: BlockingFd, ledger: &Ledger) -> Result<Self, Refused> {
        let file = |e: &dyn std::fmt::Display| Refused::File(e.to_string());
        let may_be_process = desc.bus_addr + desc.size <= PROCESS_LIMIT && desc.mmap_offset == desc.bus_addr;
        let memory = is_memory(fd.as_fd());
        if !memory && !may_be_process {
            return Err(MapError::NotMemory.into());
        }
        if !memory {
            ProcMem::check(fd.as_fd()).map_err(|e| file(&e))?;
        }
        let filled = Arc::new(SparseAccount::new(ledger.clone()));
        // Closing a descriptor of either kind does not wait.
        let (fd, ticket) = fd.into_parts().ok_or(Refused::Unknown)?;
        let kind = if !memory {
            Kind::Process(ProcMem::from_fd(fd).map_err(|e| file(&e))?)
        } else {
            let hold = map_tickets(ledger, 1, desc.size)?;
            let whole = [(fd.as_fd(), desc.mmap_offset, desc.size)];
            let span = map_pieces(&whole, Box::new(hold), Some(filled.clone()))?;
            // SAFETY: the pointer comes from a live mapping of that length; the region that is
            // built is kept beside `span`, which keeps the mapping.
            let raw = unsafe {
                MmapRegionBuilder::new(span.len())
                    .with_raw_mmap_pointer(span.addr() as *mut u8)
                    .with_mmap_prot(3)
                    .with_mmap_flags(1)
                    .build()
            };
            let raw = raw.map_err(|e| file(&e))?;
            let guest = GuestRegionMmap::new(raw, GuestAddress(desc.bus_addr)).ok_or(Refused::Range)?;
            Kind::Mapped { span, fd, guest: Arc::new(guest) }
        };
        Ok(Region { id, desc, kind, filled, _ticket: ticket })
    }

    /// The process memory, if this is a process region.
    pub fn process(&self) -> Option<&ProcMem> {
        match &self.kind {
            Kind::Process(p) => Some(p),
            Kind::Mapped { .. } => None,
        }
    }

    fn mapped(&self) -> Option<(&Span, BorrowedFd<'_>)> {
        match &self.kind {
            Kind::Mapped { span, fd, .. } => Some((span, fd.as_fd())),
            Kind::Process(_) => None,
        }
    }

    /// True if memory of the region is gone: an access has found that, or its file is shorter than the region.
    fn is_broken(&self) -> bool {
        self.mapped().is_some_and(|(span, fd)| {
            let size = rustix::fs::fstat(fd).map_or(0, |s| s.st_size as u64);
            span.is_broken() || size < self.desc.mmap_offset + self.desc.size
        })
    }

    fn holds(&self, addr: u64, len: u64) -> bool {
        let off = addr.wrapping_sub(self.desc.bus_addr);
        addr >= self.desc.bus_addr && off <= self.desc.size && len <= self.desc.size - off
    }
}

impl Memory {
    /// Memory without regions, on the account `ledger`.
    pub fn new(ledger: Ledger) -> Self {
        Memory { filled: Arc::new(SparseAccount::new(ledger.clone())), ledger, ..Memory::default() }
    }

    /// A ticket for an MR's list of `pages` pages.
    ///
    /// # Errors
    /// [`Refused::Exhausted`].
    pub fn hold_list(&self, pages: u32) -> Result<Ticket, Refused> {
        self.ledger.hold(Resource::Pieces, pages.into())
    }

    /// Regions, sorted by bus address.
    pub fn regions(&self) -> &[Arc<Region>] {
        &self.regions
    }

    /// Adds a region.
    ///
    /// # Errors
    /// See [`Refused`]; the memory is as before.
    pub fn add(&mut self, desc: RegionDesc, fd: BlockingFd) -> Result<(), Refused> {
        let end = desc.bus_addr.checked_add(desc.size).ok_or(Refused::Range)?;
        desc.user_addr.checked_add(desc.size).ok_or(Refused::Range)?;
        if self.regions.len() >= MAX_REGIONS {
            return Err(Refused::TooMany);
        }
        let at = self.regions.partition_point(|r| r.desc.bus_addr < desc.bus_addr);
        let before = at.checked_sub(1).map(|i| &self.regions[i].desc);
        let after = self.regions.get(at).map(|r| &r.desc);
        let free =
            before.is_none_or(|b| b.bus_addr + b.size <= desc.bus_addr) && after.is_none_or(|a| end <= a.bus_addr);
        if desc.size == 0 || !free {
            return Err(Refused::Range);
        }
        let region = Region::new(self.next_id, desc, fd, &self.ledger)?;
        self.next_id += 1;
        self.regions.insert(at, Arc::new(region));
        Ok(())
    }

    /// Removes the region that has this bus address and size; returns its id.
    ///
    /// # Errors
    /// [`Refused::Unknown`].
    pub fn remove(&mut self, desc: RegionDesc) -> Result<u64, Refused> {
        let same = |r: &Arc<Region>| r.desc.bus_addr == desc.bus_addr && r.desc.size == desc.size;
        let at = self.regions.iter().position(same).ok_or(Refused::Unknown)?;
        Ok(self.regions.remove(at).id)
    }

    /// Removes all regions; returns their ids.
    pub fn clear(&mut self) -> Vec<u64> {
        self.regions.drain(..).map(|r| r.id).collect()
    }

    /// True if memory of a region is gone: its owner has truncated the file, or no memory was left for it.
    pub fn is_broken(&self) -> bool {
        self.regions.iter().any(|r| r.is_broken())
    }

    /// True if memory is gone because its vRNIC has no room for pages allocated in holes.
    pub fn is_overfilled(&self) -> bool {
        self.filled.was_refused() || self.regions.iter().any(|r| r.filled.was_refused())
    }

    /// Checks how many of the pages that were allocated in holes can still be there: their owner may have punched holes
    /// again.
    pub fn recount(&self) {
        let files = || self.regions.iter().filter_map(|r| Some((&r.filled, r.mapped()?.1)));
        files().for_each(|(filled, fd)| filled.recount([fd].into_iter()));
        self.filled.recount(files().map(|f| f.1));
    }

    /// The region in which `addr` lies.
    pub fn region_at(&self, addr: u64) -> Option<&Arc<Region>> {
        self.index_at(addr).map(|i| &self.regions[i])
    }

    fn index_at(&self, addr: u64) -> Option<usize> {
        let at = self.regions.partition_point(|r| r.desc.bus_addr <= addr).checked_sub(1)?;
        self.regions[at].holds(addr, 1).then_some(at)
    }

    /// Translates an address in the frontend's address space to a bus address.
    pub fn bus_of_user(&self, user: u64) -> Option<u64> {
        let r =
            self.regions.iter().find(|r| user.wrapping_sub(r.desc.user_addr) < r.desc.size && r.mapped().is_some())?;
        Some(r.desc.bus_addr + (user - r.desc.user_addr))
    }

    /// The mapped window that contains all of `[addr, addr + len)`, and the offset in it.
    pub fn window(&self, addr: u64, len: u64) -> Option<(&Span, u64)> {
        let r = self.region_at(addr)?;
        let (span, _) = r.mapped().filter(|_| r.holds(addr, len))?;
        Some((span, addr - r.desc.bus_addr))
    }

    /// As [`Memory::window`], but a window of exactly this range.
    pub fn span(&self, addr: u64, len: u64) -> Option<Span> {
        let (span, off) = self.window(addr, len)?;
        span.sub(off, len)
    }

    /// The memory of `ranges`, in order, and the ids of the regions that it lies in (U20). Up to [`MAX_MAPPED`] pieces
    /// become one window. All pieces except the first must begin at a page boundary, and all except the last must end
    /// at one.
    ///
    /// # Errors
    /// [`Refused::Range`] if a range is not mapped memory of this session, or [`Refused::Exhausted`].
    pub fn gather(&self, ranges: &[(u64, u64)]) -> Result<(Gathered, Vec<u64>), Refused> {
        self.gather_mapping(ranges, MAX_MAPPED)
    }

    /// As [`Memory::gather`], but makes no new mapping: several pieces become a list.
    ///
    /// # Errors
    /// As [`Memory::gather`].
    pub fn gather_unmapped(&self, ranges: &[(u64, u64)]) -> Result<(Gathered, Vec<u64>), Refused> {
        self.gather_mapping(ranges, 0)
    }

    /// As [`Memory::gather`], but always returns a list, which can be appended to another one. The account is also
    /// charged for the list itself, since an MR may get any number of lists.
    ///
    /// # Errors
    /// As [`Memory::gather`].
    pub fn gather_list(&self, ranges: &[(u64, u64)]) -> Result<(Gathered, Vec<u64>), Refused> {
        let pieces = self.pieces(ranges)?;
        let used = regions_of(&pieces);
        let list = self.list(&pieces, &used, LIST_IN_PIECES)?;
        Ok((Gathered::Pieces(list), self.ids_of(&used)))
    }

    /// As [`Memory::gather`]. At most `most` pieces are mapped.
    fn gather_mapping(&self, ranges: &[(u64, u64)], most: usize) -> Result<(Gathered, Vec<u64>), Refused> {
        let pieces = self.pieces(ranges)?;
        let used = regions_of(&pieces);
        let memory = match &pieces[..] {
            [p] => Gathered::Window(self.part(p)?),
            few if few.len() <= most => Gathered::Window(self.map(few)?),
            many => Gathered::Pieces(self.list(many, &used, 0)?),
        };
        Ok((memory, self.ids_of(&used)))
    }

    fn ids_of(&self, regions: &[usize]) -> Vec<u64> {
        regions.iter().map(|&i| self.regions[i].id).collect()
    }

    /// One window over ranges that begin and end at page boundaries. There may be at most [`MAX_MAPPED`] pieces.
    ///
    /// # Errors
    /// As [`Memory::gather`].
    pub fn map_ranges(&self, ranges: &[(u64, u64)]) -> Result<Span, Refused> {
        match &self.pieces(ranges)?[..] {
            [p] => self.part(p),
            few if few.len() <= MAX_MAPPED => self.map(few),
            _ => Err(Refused::Exhausted(Resource::Mappings)),
        }
    }

    /// The pieces of regions that the ranges cover, in order. Adjacent pieces are joined.
    fn pieces(&self, ranges: &[(u64, u64)]) -> Result<Vec<Piece>, Refused> {
        let (held, limit) = self.ledger.usage(Resource::Pieces);
        let most = limit.saturating_sub(held).max(MAX_MAPPED as u64);
        let mut pieces: Vec<Piece> = Vec::new();
        for &(mut addr, mut len) in ranges {
            while len > 0 {
                let region = self.index_at(addr).ok_or(Refused::Range)?;
                let r = &self.regions[region];
                r.mapped().ok_or(Refused::Range)?;
                let off = addr - r.desc.bus_addr;
                let n = len.min(r.desc.size - off);
                let full = pieces.len() as u64 >= most;
                match pieces.last_mut() {
                    Some(p) if p.region == region && p.off + p.len == off => p.len += n,
                    _ if full => return Err(Refused::Exhausted(Resource::Pieces)),
                    _ => pieces.push(Piece { region, off, len: n }),
                }
                addr += n;
                len -= n;
            }
        }
        Ok(pieces)
    }

    /// A piece as a part of its region's window.
    fn part(&self, p: &Piece) -> Result<Span, Refused> {
        self.window_of(p.region)?.0.sub(p.off, p.len).ok_or(Refused::Range)
    }

    fn window_of(&self, region: usize) -> Result<(&Span, BorrowedFd<'_>), Refused> {
        self.regions[region].mapped().ok_or(Refused::Range)
    }

    /// One window over all pieces.
    fn map(&self, pieces: &[Piece]) -> Result<Span, Refused> {
        let files = pieces
            .iter()
            .map(|p| Ok((self.window_of(p.region)?.1, self.regions[p.region].desc.mmap_offset + p.off, p.len)));
        let mut files = files.collect::<Result<Vec<_>, Refused>>()?;
        // mmap needs whole pages: the first piece is extended down to its page, and the slack cut off afterwards.
        let slack = files.first().map_or(0, |p| p.1 % 4096);
        if let Some(p) = files.first_mut() {
            p.1 -= slack;
            p.2 += slack;
        }
        let hold = map_tickets(&self.ledger, files.len(), files.iter().map(|p| p.2).sum())?;
        let first = pieces.first().map_or(0, |p| p.region);
        let one = pieces.iter().all(|p| p.region == first);
        let filled = if one { &self.regions[first].filled } else { &self.filled };
        let whole = map_pieces(&files, Box::new(hold), Some(filled.clone()))?;
        let len = whole.len() as u64 - slack;
        whole.sub(slack, len).ok_or(Refused::Range)
    }

    /// A list of pieces. `used` are the indices of their regions, sorted. The account is charged for `more` pieces
    /// besides them.
    fn list(&self, pieces: &[Piece], used: &[usize], more: u64) -> Result<Pieces, Refused> {
        let hold = self.ledger.hold(Resource::Pieces, pieces.len() as u64 + more)?;
        let windows = used.iter().map(|&i| Ok(self.window_of(i)?.0.clone())).collect::<Result<_, Refused>>()?;
        let listed = pieces.iter().map(|p| (used.partition_point(|&i| i < p.region) as u32, p.off, p.len));
        Pieces::new(windows, listed, Box::new(hold)).ok_or(Refused::Range)
    }

    /// The mapped regions, in the form that the virtqueue library uses.
    pub fn guest(&self) -> Option<GuestMemoryMmap> {
        let regions = self.regions.iter().filter_map(|r| match &r.kind {
            Kind::Mapped { guest, .. } => Some(guest.clone()),
            Kind::Process(_) => None,
        });
        GuestMemoryMmap::from_arc_regions(regions.collect()).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::accounts::KINDS;
    use std::sync::atomic::Ordering;
    use unirdma_mem::{Loc, MemFd};

    fn add(m: &mut Memory, f: &MemFd, bus: u64, off: u64, size: u64) -> Result<(), Refused> {
        let desc = RegionDesc { bus_addr: bus, size, user_addr: bus + 7, mmap_offset: off };
        let ticket = m.ledger.hold(Resource::Descriptors, 1)?;
        m.add(desc, BlockingFd::new(f.fd().try_clone_to_owned().unwrap(), ticket))
    }

    fn window((memory, ids): (Gathered, Vec<u64>)) -> (Span, Vec<u64>) {
        match memory {
            Gathered::Window(s) => (s, ids),
            Gathered::Pieces(p) => panic!("{} bytes in pieces", p.len()),
        }
    }

    #[test]
    fn overlaps_wraps_and_foreign_files_are_refused() {
        let f = MemFd::new(c"t", 8192).unwrap();
        let mut m = Memory::default();
        add(&mut m, &f, 0x10000, 0, 8192).unwrap();
        for (bus, size) in [(0x10000, 8192), (0x11000, 4096), (0xf000, 8192), (0x20000, 0)] {
            assert!(matches!(add(&mut m, &f, bus, 0, size), Err(Refused::Range)), "{bus:#x}");
        }
        assert!(matches!(add(&mut m, &f, u64::MAX - 4095, 0, 8192), Err(Refused::Range)));
        assert!(matches!(add(&mut m, &f, 0x20000, 4096, 8192), Err(Refused::File(_))));
        let exe = OwnedFd::from(std::fs::File::open("/proc/self/exe").unwrap());
        let desc = RegionDesc { bus_addr: 0x40000, size: 4096, user_addr: 0, mmap_offset: 0 };
        assert!(matches!(m.add(desc, BlockingFd::refused(exe, &Ledger::default())), Err(Refused::File(_))));
        assert_eq!(m.regions().len(), 1);
    }

    #[test]
    fn what_regions_hold_is_on_the_account_as_long_as_it_is_held() {
        let f = MemFd::new(c"t", 4 * 4096).unwrap();
        let host = Ledger::of_host([20, 16, 1 << 20, 1000, 1 << 20, 0]);
        let ledger = host.for_vrnic([None; KINDS]);
        let used = |l: &Ledger| Resource::ALL.map(|r| l.usage(r).0);
        let (mut one, mut other) = (Memory::new(ledger.clone()), Memory::new(ledger.clone()));
        for i in 0..4 {
            add(&mut one, &f, (i + 1) << 20, i * 4096, 4096).unwrap();
            add(&mut other, &f, (i + 1) << 20, 0, 8192).unwrap();
        }
        assert_eq!(used(&ledger), [8, 8, 4 * (4096 + 8192), 0, 0, 0]);
        let too_many = add(&mut other, &f, 9 << 20, 0, 4096);
        assert!(matches!(too_many, Err(Refused::Exhausted(Resource::Mappings))));
        assert_eq!(used(&ledger)[0], 8, "what was refused is not counted");
        other.clear();
        // A window over several regions is a mapping of its own while it is used.
        let window = window(one.gather(&[(1 << 20, 4096), (3 << 20, 4096), (2 << 20, 4096)]).unwrap()).0;
        assert_eq!(used(&ledger), [4, 7, 4 * 4096 + 3 * 4096, 0, 0, 0]);
        let part = window.sub(0, 8).unwrap();
        drop(window);
        one.clear();
        assert_eq!(used(&ledger), [0, 3, 3 * 4096, 0, 0, 0]);
        drop(part);
        assert_eq!(used(&ledger), [0; KINDS]);
        let small = host.for_vrnic([None, None, Some(8192), None, None, None]);
        let mut third = Memory::new(small);
        add(&mut third, &f, 1 << 20, 0, 8192).unwrap();
        assert!(matches!(add(&mut third, &f, 2 << 20, 0, 4096), Err(Refused::Exhausted(Resource::AddressSpace))));
    }

    #[test]
    fn ranges_over_regions_become_one_window_in_order() {
        let f = MemFd::new(c"t", 4 * 4096).unwrap();
        for i in 0..4u32 {
            f.span().store32(i as usize * 4096 + 16, i, Ordering::Relaxed);
        }
        let mut m = Memory::default();
        // Two regions side by side on the bus, in reverse order in the file.
        add(&mut m, &f, 0x10000, 8192, 8192).unwrap();
        add(&mut m, &f, 0x12000, 0, 8192).unwrap();
        let (s, ids) = window(m.gather(&[(0x10010, 4 * 4096 - 16)]).unwrap());
        let at = |page: usize| s.load32(page * 4096, Ordering::Relaxed);
        assert_eq!([at(0), at(1), at(2), at(3)], [2, 3, 0, 1]);
        assert_eq!(ids, [0, 1]);
        let (p, _) = window(m.gather(&[(0x13000, 4096), (0x10000, 4096)]).unwrap());
        assert_eq!((p.load32(16, Ordering::Relaxed), p.load32(4096 + 16, Ordering::Relaxed)), (1, 2));
        assert!(m.gather(&[(0x13000, 8192)]).is_err());
        assert_eq!(m.bus_of_user(0x12007 + 5), Some(0x12005));
    }

    #[test]
    fn many_pieces_are_a_list_on_the_account() {
        let f = MemFd::new(c"t", 1 << 20).unwrap();
        let ledger = Ledger::of_host([20, 16, 1 << 40, 3000, 0, 0]).for_vrnic([None; KINDS]);
        let used = || Resource::ALL.map(|r| ledger.usage(r).0);
        let mut m = Memory::new(ledger.clone());
        add(&mut m, &f, 1 << 30, 0, 1 << 20).unwrap();
        add(&mut m, &f, 1 << 40, 0, 1 << 20).unwrap();
        // Pages of the two regions in turn. The first and the last entry are parts of pages.
        let pages =
            |n: u64| (0..n).map(|i| ([1 << 30, 1 << 40][i as usize % 2] + i / 2 * 8192, 4096)).collect::<Vec<_>>();
        let mut ranges = [pages(256), pages(256), pages(1)].concat();
        ranges[0] = (ranges[0].0 + 96, 4000);
        ranges[512].1 = 5;
        let before = used();
        let (Gathered::Pieces(p), ids) = m.gather(&ranges).unwrap() else { panic!("513 mappings") };
        assert_eq!((p.len(), ids), (4000 + 511 * 4096 + 5, vec![0, 1]));
        assert_eq!(used(), [before[0], before[1], before[2], 513, 0, 0]);
        let at = |off| {
            let place = p.at(off)?;
            let Loc::Mapped(_, off) = place.at() else { panic!("it is mapped") };
            Some((off, place.len()))
        };
        assert_eq!([at(0), at(4000), at(4000 + 4096)], [Some((96, 4000)), Some((0, 4096)), Some((8192, 4096))]);
        assert_eq!(at(p.len() - 1), Some((4, 1)));
        let more = m.gather(&pages(256).repeat(8));
        assert!(matches!(more, Err(Refused::Exhausted(Resource::Pieces))));
        drop(p);
        assert_eq!(used(), before);
        // A list that is added to another one is charged, even if it has one piece.
        let (Gathered::Pieces(one), _) = m.gather_list(&[(1 << 30, 5)]).unwrap() else { panic!("it is mapped") };
        assert_eq!((one.len(), used()[3]), (5, 1 + LIST_IN_PIECES));
        drop(one);
        // A list may not continue where one region ends and the next one begins within a page.
        let mut odd = Memory::new(ledger.clone());
        add(&mut odd, &f, 1 << 30, 0, 4096 + 5).unwrap();
        add(&mut odd, &f, (1 << 30) + 4096 + 5, 0, 8192).unwrap();
        assert!(matches!(odd.gather_unmapped(&[(1 << 30, 8192)]), Err(Refused::Range)));
        drop(odd);
        assert_eq!(used(), before);
        // A page of many regions, repeated: the search stops at the limit.
        let g = MemFd::new(c"t", 4096).unwrap();
        let mut crumbs = Memory::new(Ledger::default());
        (0..1024).for_each(|i| add(&mut crumbs, &g, (1 << 50) + i, 0, 1).unwrap());
        crumbs.ledger = ledger.clone();
        let endless = vec![(1 << 50, 1024); 1 << 20];
        assert!(matches!(crumbs.gather(&endless), Err(Refused::Exhausted(Resource::Pieces))));
    }

    /// Two mappings of one file, then holes punched in the allocated pages.
    #[test]
    fn what_is_made_in_holes_is_counted_once_and_only_while_it_is_there() {
        use rustix::fs::{FallocateFlags, MemfdFlags};
        unirdma_mem::guard::install().unwrap();
        if let Err(why) = unirdma_mem::guard::counts_holes() {
            return eprintln!("skipped: {why}");
        }
        let file = rustix::fs::memfd_create(c"t", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 1 << 20).unwrap();
        let ledger = Ledger::of_host([1 << 40; KINDS]).for_vrnic([None, None, None, None, Some(82 * 4096), None]);
        let used = || ledger.usage(Resource::Filled).0 / 4096;
        let mut m = Memory::new(ledger.clone());
        for bus_addr in [1 << 30, 1 << 31] {
            let desc = RegionDesc { bus_addr, size: 1 << 20, user_addr: bus_addr, mmap_offset: 0 };
            let ticket = ledger.take(Resource::Descriptors, 1).unwrap();
            m.add(desc, BlockingFd::new(file.try_clone().unwrap(), ticket)).unwrap();
        }
        let fill = |at: u64| m.span(at, 1 << 20).unwrap().write(0, &[1; 41 * 4096]);
        [1 << 30, 1 << 31].into_iter().for_each(fill);
        assert_eq!(used(), 41);
        assert!(ledger.wants_recount());
        for _ in 0..5 {
            rustix::fs::fallocate(&file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, 1 << 20).unwrap();
            fill(1 << 30);
            m.recount();
            ledger.was_recounted();
            assert_eq!((used(), m.is_broken()), (41, false));
        }
        m.span(1 << 30, 1 << 20).unwrap().write(41 * 4096, &[1; 50 * 4096]);
        assert!(m.is_broken() && m.is_overfilled() && used() <= 82);
        m.clear();
        drop(m);
        assert_eq!(used(), 0);
    }
}
