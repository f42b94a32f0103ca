//! Memory files that the virtual layer maps for this context. MRs of one mapping share a region, and so do MRs that lie
//! near each other in the memory file of the process.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;

use unirdma_link::RegionDesc;

use super::maps::FileId;
use super::share::SLOT;
use crate::context::Context;
use crate::lock;

/// Key of a region: its file, its offset in the file, and its length in bytes.
pub(crate) type Key = (FileId, u64, u64);

struct Region {
    desc: RegionDesc,
    users: usize,
}

/// The regions of a context in which MRs lie.
#[derive(Default)]
pub(crate) struct Regions {
    shared: BTreeMap<Key, Region>,
    /// Number of all regions, with the regions of MRs that lie in several pieces.
    count: usize,
}

impl Regions {
    /// True if there is no room for one more.
    pub fn is_full(&self) -> bool {
        self.count >= MAX_FOR_MRS
    }

    fn find(&mut self, file: FileId, off: u64, len: u64) -> Option<(Key, &mut Region)> {
        let holds = |&(_, start, size): &Key| len <= size && off - start <= size - len;
        let before = self.shared.range_mut(..=(file, off, u64::MAX)).rev();
        before.take_while(|(key, _)| key.0 == file).find(|(key, _)| holds(key)).map(|(&key, r)| (key, r))
    }

    /// The range that becomes a region for bytes `[off, off + len)` of the process's memory file. Behind them it has as
    /// much room as the regions of their slot have together, for neighbours that come later. So a growing heap has few
    /// regions, and none of them is much larger than the registered part of it.
    fn with_room_behind(&self, file: FileId, off: u64, len: u64) -> (u64, u64) {
        let slot = off / SLOT * SLOT;
        let near = self.shared.range((file, slot, 0)..(file, slot + SLOT, 0));
        let room: u64 = near.map(|(key, _)| key.2).sum();
        (off, (len + room).min(slot + SLOT - off))
    }

    /// Gives the device a region for a range of a file, at its own bus address.
    fn add(&mut self, ctx: &Context, fd: BorrowedFd<'_>, (off, len): (u64, u64), bus: u64) -> Option<RegionDesc> {
        if self.is_full() {
            return None;
        }
        // No vring lies in application memory, so its own address needs no announcing.
        let desc = RegionDesc { bus_addr: bus, size: len, user_addr: bus, mmap_offset: off };
        lock(&ctx.frontend).add_region(desc, fd).ok()?;
        self.count += 1;
        Some(desc)
    }

    /// Takes a region back. In a forked child the device is its parent's, and keeps it.
    fn remove(&mut self, ctx: &Context, desc: RegionDesc) {
        self.count -= 1;
        if !ctx.is_dead() {
            let _ = lock(&ctx.frontend).remove_region(desc);
        }
    }
}

/// Most regions for the memory of MRs. A session needs others for its rings, and for the process's memory.
const MAX_FOR_MRS: usize = unirdma_link::MAX_REGIONS * 7 / 8;

/// Adds a region that no other MR shares.
pub(crate) fn add(ctx: &Context, fd: BorrowedFd<'_>, range: (u64, u64), bus: u64) -> Option<RegionDesc> {
    lock(&ctx.regions).add(ctx, fd, range, bus)
}

/// Removes such a region.
pub(crate) fn remove(ctx: &Context, desc: RegionDesc) {
    lock(&ctx.regions).remove(ctx, desc);
}

/// The bus address of `[off, off + len)` of a file. If no region contains it, the range `whole` (offset, and length in
/// bytes) becomes one; without `whole` the file is the process's own. Give the key back with [`put`].
pub(crate) fn get(
    ctx: &Context,
    file: FileId,
    fd: BorrowedFd<'_>,
    (off, len): (u64, u64),
    whole: Option<(u64, u64)>,
) -> Option<(Key, u64)> {
    // Held while the device is told, so that no two threads add the same region.
    let regions = &mut *lock(&ctx.regions);
    if let Some((key, r)) = regions.find(file, off, len) {
        r.users += 1;
        return Some((key, r.desc.bus_addr + (off - key.1)));
    }
    let whole = whole.unwrap_or_else(|| regions.with_room_behind(file, off, len));
    let mut make = |(start, size)| {
        let bus = lock(&ctx.arena).take_bus(size);
        let desc = regions.add(ctx, fd, (start, size), bus)?;
        let key = (file, start, size);
        regions.shared.insert(key, Region { desc, users: 1 });
        Some((key, bus + (off - start)))
    };
    make(whole).or_else(|| make((off, len)).filter(|_| whole != (off, len)))
}

/// Removes an MR from a region.
pub(crate) fn put(ctx: &Context, key: Key) {
    let regions = &mut *lock(&ctx.regions);
    let Some(r) = regions.shared.get_mut(&key) else { return };
    r.users -= 1;
    if r.users == 0 {
        let desc = r.desc;
        regions.shared.remove(&key);
        regions.remove(ctx, desc);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: FileId = FileId { dev: 1, inode: 2 };

    fn insert(r: &mut Regions, (start, size): (u64, u64)) {
        r.shared.insert((FILE, start, size), Region { desc: RegionDesc::default(), users: 1 });
    }

    #[test]
    fn a_region_is_found_behind_shorter_ones() {
        let mut r = Regions::default();
        [(0, 100), (0, 10), (20, 10), (25, 2)].into_iter().for_each(|range| insert(&mut r, range));
        let mut find = |off, len| r.find(FILE, off, len).map(|(key, _)| (key.1, key.2));
        assert_eq!((find(0, 5), find(25, 2), find(25, 5)), (Some((0, 100)), Some((25, 2)), Some((20, 10))));
        assert_eq!((find(25, 75), find(25, 76), find(100, 1)), (Some((0, 100)), None, None));
        assert!(r.find(FileId { dev: 1, inode: 3 }, 0, 1).is_none());
    }

    /// Neighbours that are registered one after the other need another region only when their number has doubled.
    #[test]
    fn a_growing_heap_has_few_regions() {
        const MR: u64 = 700 << 10;
        let mut r = Regions::default();
        let start = 7 * SLOT + SLOT / 4;
        for off in (0..6000).map(|i| start + i * (MR - 4096)) {
            if r.find(FILE, off, MR).is_none() {
                let (whole, size) = r.with_room_behind(FILE, off, MR);
                assert!(whole <= off && off + MR <= whole + size && whole + size <= 8 * SLOT);
                insert(&mut r, (whole, size));
            }
        }
        let bytes: u64 = r.shared.keys().map(|k| k.2).sum();
        assert!(r.shared.len() <= 15 && bytes < 4 * 6000 * MR, "{} regions of {bytes} bytes", r.shared.len());
        // The next slot has nothing to do with it.
        assert_eq!(r.with_room_behind(FILE, 8 * SLOT, MR), (8 * SLOT, MR));
        assert_eq!(r.with_room_behind(FILE, 8 * SLOT - 8192, 4096), (8 * SLOT - 8192, 8192));
    }
}
