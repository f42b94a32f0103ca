//! Shared memory for rings: sealed memory files, cut into blocks. Each file is given to the virtual layer as a region
//! when it is needed.

use std::collections::BTreeMap;

use unirdma_link::{Frontend, PROCESS_LIMIT, RegionDesc};
use unirdma_mem::{MemFd, Span};

use crate::{HEAP, Result, errno, map_errno};

/// Smallest region, bytes.
const REGION: usize = 2 << 20;

struct Region {
    span: Span,
    bus: u64,
    /// Free ranges by offset.
    free: BTreeMap<usize, usize>,
}

/// A zeroed piece of shared memory. Give it back with [`Arena::free`].
#[derive(Debug)]
pub struct Block {
    /// The memory.
    pub span: Span,
    /// Its bus address.
    pub bus: u64,
    region: usize,
    off: usize,
    len: usize,
}

pub(crate) struct Arena {
    regions: Vec<Region>,
    next_bus: u64,
}

/// Makes a memory file of `wanted` bytes, or fewer if the process may have no more (`RLIMIT_FSIZE`, `RLIMIT_AS`), but
/// at least `len`.
fn region(len: usize, wanted: usize) -> Result<MemFd> {
    let mut size = len.max(wanted);
    loop {
        match MemFd::new(c"unirdma-rings", size).map_err(|e| map_errno(&e)) {
            Err(libc::EFBIG | libc::ENOMEM) if size > len => size = (size / 2).next_multiple_of(4096).max(len),
            r => return r,
        }
    }
}

impl Arena {
    pub fn new() -> Self {
        Arena { regions: Vec::new(), next_bus: PROCESS_LIMIT * 2 }
    }

    /// Takes `len` bytes of bus address space, which are never given out again.
    pub fn take_bus(&mut self, len: u64) -> u64 {
        let at = self.next_bus;
        self.next_bus += len.next_multiple_of(1 << 21) + (1 << 21);
        at
    }

    /// A block of `len` bytes at a multiple of `align`, a power of two up to a page.
    pub fn alloc(&mut self, f: &mut Frontend, len: usize, align: usize) -> Result<Block> {
        if HEAP.is_low() {
            return Err(libc::ENOMEM);
        }
        let len = len.next_multiple_of(64).max(64);
        for i in 0..self.regions.len() {
            if let Some(b) = self.take(i, len, align) {
                return Ok(b);
            }
        }
        // As large as all other regions together, so that there are few, however many rings a program has. Unused parts
        // are holes of the file.
        let all: usize = self.regions.iter().map(|r| r.span.len()).sum();
        let memfd = region(len.next_multiple_of(4096), all.max(REGION))?;
        let size = memfd.span().len();
        let bus = self.take_bus(size as u64);
        let desc =
            RegionDesc { bus_addr: bus, size: size as u64, user_addr: memfd.span().addr() as u64, mmap_offset: 0 };
        f.add_region(desc, memfd.fd()).map_err(|e| errno(&e))?;
        // The mapping stays; its descriptor is not needed any more.
        self.regions.push(Region { span: memfd.span().clone(), bus, free: BTreeMap::from([(0, size)]) });
        self.take(self.regions.len() - 1, len, align).ok_or(libc::ENOMEM)
    }

    fn take(&mut self, region: usize, len: usize, align: usize) -> Option<Block> {
        let r = &mut self.regions[region];
        let (&start, &have) = r.free.iter().find(|&(&o, &n)| o.next_multiple_of(align) + len <= o + n)?;
        let off = start.next_multiple_of(align);
        r.free.remove(&start);
        if off > start {
            r.free.insert(start, off - start);
        }
        if off + len < start + have {
            r.free.insert(off + len, start + have - off - len);
        }
        let span = r.span.sub(off as u64, len as u64)?;
        Some(Block { span, bus: r.bus + off as u64, region, off, len })
    }

    /// Takes a block back and zeroes it for its next user.
    pub fn free(&mut self, b: Block) {
        const ZERO: [u8; 4096] = [0; 4096];
        for at in (0..b.len).step_by(ZERO.len()) {
            b.span.write(at, &ZERO[..ZERO.len().min(b.len - at)]);
        }
        let free = &mut self.regions[b.region].free;
        let (mut off, mut len) = (b.off, b.len);
        if let Some((&o, &n)) = free.range(..off).next_back()
            && o + n == off
        {
            free.remove(&o);
            (off, len) = (o, n + len);
        }
        if let Some(n) = free.remove(&(off + len)) {
            len += n;
        }
        free.insert(off, len);
    }
}
