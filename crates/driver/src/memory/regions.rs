//! Memory files that the virtual layer maps for this context. MRs of one mapping share a region.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;

use unirdma_link::RegionDesc;

use super::maps::FileId;
use crate::context::Context;
use crate::lock;

/// Where a region begins: in which file, and where in it.
pub(crate) type Key = (FileId, u64);

struct Region {
    desc: RegionDesc,
    users: usize,
}

/// The shared regions of a context.
#[derive(Default)]
pub(crate) struct Regions(BTreeMap<Key, Region>);

impl Regions {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// True if there is no room for one more.
    pub fn is_full(&self) -> bool {
        self.len() >= MAX_SHARED
    }

    fn find(&mut self, file: FileId, off: u64, len: u64) -> Option<(Key, &mut Region)> {
        let (&key, r) = self.0.range_mut(..=(file, off)).next_back()?;
        (key.0 == file && off - key.1 <= r.desc.size && len <= r.desc.size - (off - key.1)).then_some((key, r))
    }
}

/// Regions for the memory of MRs at most: some of those that a session may have are for its rings, and for the process.
const MAX_SHARED: usize = unirdma_link::MAX_REGIONS * 7 / 8;

/// Tells the device of a range of a file, at a bus address of its own. `others`: regions of MRs that there are.
pub(crate) fn add(
    ctx: &Context,
    fd: BorrowedFd<'_>,
    (off, len): (u64, u64),
    bus: u64,
    others: usize,
) -> Option<RegionDesc> {
    if others >= MAX_SHARED {
        return None;
    }
    // No vring lies in application memory, so its own address needs no announcing.
    let desc = RegionDesc { bus_addr: bus, size: len, user_addr: bus, mmap_offset: off };
    lock(&ctx.frontend).add_region(desc, fd).ok()?;
    Some(desc)
}

/// The bus address of `[off, off + len)` of a file. If no region has it, `whole` of it becomes one: from where, and how
/// many bytes. Give the key back with [`put`].
pub(crate) fn get(
    ctx: &Context,
    file: FileId,
    fd: BorrowedFd<'_>,
    (off, len): (u64, u64),
    whole: (u64, u64),
) -> Option<(Key, u64)> {
    // Held while the device is told, so that no two threads tell it the same.
    let mut regions = lock(&ctx.regions);
    if let Some((key, r)) = regions.find(file, off, len) {
        r.users += 1;
        return Some((key, r.desc.bus_addr + (off - key.1)));
    }
    let key = (file, whole.0);
    // A shorter region may begin at the same place.
    if regions.0.contains_key(&key) {
        return None;
    }
    let bus = lock(&ctx.arena).take_bus(whole.1);
    let desc = add(ctx, fd, whole, bus, regions.0.len())?;
    regions.0.insert(key, Region { desc, users: 1 });
    Some((key, bus + (off - whole.0)))
}

/// An MR does not use the region any more.
pub(crate) fn put(ctx: &Context, key: Key) {
    let mut regions = lock(&ctx.regions);
    let Some(r) = regions.0.get_mut(&key) else { return };
    r.users -= 1;
    if r.users == 0 {
        let desc = r.desc;
        regions.0.remove(&key);
        remove(ctx, desc);
    }
}

/// Takes a range of a file back. In a forked child the device is its parent's, and keeps it.
pub(crate) fn remove(ctx: &Context, desc: RegionDesc) {
    if !ctx.is_dead() {
        let _ = lock(&ctx.frontend).remove_region(desc);
    }
}
