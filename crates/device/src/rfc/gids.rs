//! The driver's GID table. Each entry is a GID that the virtual layer has granted (R26), at an index that may differ
//! from its index in the vRNIC's own table.

use unirdma_abi::Status;
use unirdma_abi::rfc::MAX_GIDS;
use unirdma_formats::Gid;

#[derive(Clone, Copy)]
struct Entry {
    gid: Gid,
    /// Index in the vRNIC's table; `None` once the GID was taken away.
    native: Option<u8>,
}

/// The GID table of one session.
#[derive(Default)]
pub(super) struct Gids {
    entries: [Option<Entry>; MAX_GIDS],
    /// The vRNIC's table has changed since the last update.
    pub stale: bool,
}

fn find(gid: Gid, granted: &[Gid]) -> Option<u8> {
    granted.iter().position(|g| *g == gid && !g.is_zero()).and_then(|i| u8::try_from(i).ok())
}

impl Gids {
    /// ADD_GID.
    ///
    /// # Errors
    /// `Denied` if the GID was not granted, `BadValue` if the index is beyond the table, `Busy` if the entry has
    /// another GID.
    pub fn add(&mut self, index: u16, gid: Gid, granted: &[Gid]) -> Result<(), Status> {
        let entry = self.entries.get_mut(usize::from(index)).ok_or(Status::BadValue)?;
        let native = Some(find(gid, granted).ok_or(Status::Denied)?);
        if entry.is_some_and(|e| e.gid != gid) {
            return Err(Status::Busy);
        }
        *entry = Some(Entry { gid, native });
        Ok(())
    }

    /// DEL_GID.
    ///
    /// # Errors
    /// `BadHandle` if the entry is empty.
    pub fn remove(&mut self, index: u16) -> Result<(), Status> {
        let entry = self.entries.get_mut(usize::from(index)).ok_or(Status::BadHandle)?;
        entry.take().map(|_| ()).ok_or(Status::BadHandle)
    }

    /// The vRNIC's index for a GID of the driver.
    pub fn native(&self, index: u8) -> Option<u8> {
        self.entries.get(usize::from(index))?.as_ref()?.native
    }

    /// Updates the vRNIC's index of each entry.
    pub fn look(&mut self, granted: &[Gid]) {
        self.entries.iter_mut().flatten().for_each(|e| e.native = find(e.gid, granted));
        self.stale = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gid(n: u8) -> Gid {
        Gid([n; 16])
    }

    #[test]
    fn r26_r27_a_table_holds_granted_gids_at_the_indices_of_its_driver() {
        let mut g = Gids::default();
        let granted = [gid(1), gid(0), gid(3)];
        assert_eq!((g.add(5, gid(3), &granted), g.native(5)), (Ok(()), Some(2)));
        assert_eq!(g.add(6, gid(9), &granted), Err(Status::Denied));
        assert_eq!(g.add(6, gid(0), &granted), Err(Status::Denied), "a hole is no GID");
        assert_eq!(g.add(32, gid(1), &granted), Err(Status::BadValue));
        assert_eq!((g.add(5, gid(1), &granted), g.add(5, gid(3), &granted)), (Err(Status::Busy), Ok(())));
        g.look(&[gid(3)]);
        assert_eq!(g.native(5), Some(0));
        g.look(&[gid(1)]);
        assert_eq!(g.native(5), None, "it was taken away");
        assert_eq!((g.remove(5), g.remove(5), g.remove(99)), (Ok(()), Err(Status::BadHandle), Err(Status::BadHandle)));
    }
}
