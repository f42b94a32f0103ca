//! The pages that the virtual layer allocates in the sparse files of a session, charged to its vRNIC.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use unirdma_mem::holes::{Account, Room};

use crate::accounts::Ledger;

/// Bytes that were allocated through the mappings of one region, or through mappings that span several regions of a
/// session. They are given back when the last of these mappings is gone.
#[derive(Debug, Default)]
pub(crate) struct SparseAccount {
    ledger: Ledger,
    bytes: AtomicU64,
    /// The part of `bytes` that is being allocated now.
    making: AtomicU64,
    /// The account had no room.
    refused: AtomicBool,
}

impl SparseAccount {
    pub fn new(ledger: Ledger) -> Self {
        SparseAccount { ledger, bytes: AtomicU64::new(0), making: AtomicU64::new(0), refused: AtomicBool::new(false) }
    }

    pub fn was_refused(&self) -> bool {
        self.refused.load(Ordering::Relaxed)
    }

    /// Gives back bytes that cannot be there any more, because `files` have fewer bytes.
    pub fn recount<'a>(&self, files: impl Iterator<Item = BorrowedFd<'a>>) {
        const BLOCK: u64 = 512;
        // Read before the files are examined, so that bytes allocated meanwhile stay counted.
        let counted = self.bytes.load(Ordering::SeqCst);
        // Read after `bytes`: a byte that is counted but not in the file yet is included in `making`.
        let making = self.making.load(Ordering::SeqCst);
        let known: BTreeMap<(u64, u64), u64> = files
            .filter_map(|fd| rustix::fs::fstat(fd).ok())
            .map(|s| ((s.st_dev, s.st_ino), s.st_blocks as u64 * BLOCK))
            .collect();
        self.give_back(counted.saturating_sub(making).saturating_sub(known.values().sum()));
    }

    fn give_back(&self, bytes: u64) {
        // A recount may have given back a part already.
        let rest = |counted: u64| Some(counted.saturating_sub(bytes));
        let (Ok(counted) | Err(counted)) = self.bytes.fetch_update(Ordering::SeqCst, Ordering::SeqCst, rest);
        self.ledger.empty(counted.min(bytes));
    }
}

impl Account for SparseAccount {
    fn take(&self, bytes: u64) -> Room {
        let room = self.ledger.fill(bytes);
        match room {
            Room::None => self.refused.store(true, Ordering::Relaxed),
            _ => {
                self.making.fetch_add(bytes, Ordering::SeqCst);
                self.bytes.fetch_add(bytes, Ordering::SeqCst);
            }
        }
        room
    }

    fn end(&self, taken: u64, made: u64) {
        self.give_back(taken - made);
        self.making.fetch_sub(taken, Ordering::SeqCst);
    }
}

impl Drop for SparseAccount {
    fn drop(&mut self) {
        self.ledger.empty(self.bytes.load(Ordering::SeqCst));
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    /// A recount between the charging of a page and its allocation does not give the page back.
    #[test]
    fn pages_that_are_being_made_stay_counted() {
        const PAGE: u64 = 4096;
        let filled = SparseAccount::new(Ledger::default());
        let fd = rustix::fs::memfd_create(c"t", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let counted = || filled.bytes.load(Ordering::SeqCst);
        assert_ne!(filled.take(2 * PAGE), Room::None);
        filled.recount([fd.as_fd()].into_iter());
        assert_eq!(counted(), 2 * PAGE);
        rustix::fs::fallocate(&fd, rustix::fs::FallocateFlags::empty(), 0, PAGE).unwrap();
        filled.end(2 * PAGE, PAGE);
        assert_eq!(counted(), PAGE);
        filled.recount([fd.as_fd()].into_iter());
        assert_eq!(counted(), PAGE);
        rustix::fs::ftruncate(&fd, 0).unwrap();
        filled.recount([fd.as_fd()].into_iter());
        assert_eq!(counted(), 0);
    }
}
