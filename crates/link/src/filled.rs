//! The pages that the virtual layer makes in the sparse files of a session, on the account of its vRNIC.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use unirdma_mem::holes::{Account, Room};

use crate::ledger::Ledger;

/// What was made through the mappings of one region, or through those of several regions of a session; it is given back with the last of
/// them.
#[derive(Debug, Default)]
pub(crate) struct Filled {
    ledger: Ledger,
    bytes: AtomicU64,
    /// There was no room on the account.
    refused: AtomicBool,
}

impl Filled {
    pub fn new(ledger: Ledger) -> Self {
        Filled { ledger, bytes: AtomicU64::new(0), refused: AtomicBool::new(false) }
    }

    pub fn was_refused(&self) -> bool {
        self.refused.load(Ordering::Relaxed)
    }

    /// Gives back what cannot be there any more: these files have fewer bytes.
    pub fn recount<'a>(&self, files: impl Iterator<Item = BorrowedFd<'a>>) {
        const BLOCK: u64 = 512;
        // Before the look, so that what is made meanwhile stays counted.
        let counted = self.bytes.load(Ordering::SeqCst);
        let known: BTreeMap<(u64, u64), u64> = files
            .filter_map(|fd| rustix::fs::fstat(fd).ok())
            .map(|s| ((s.st_dev, s.st_ino), s.st_blocks as u64 * BLOCK))
            .collect();
        self.give_back(counted.saturating_sub(known.values().sum()));
    }
}

impl Account for Filled {
    fn take(&self, bytes: u64) -> Room {
        let room = self.ledger.fill(bytes);
        match room {
            Room::None => self.refused.store(true, Ordering::Relaxed),
            _ => _ = self.bytes.fetch_add(bytes, Ordering::SeqCst),
        }
        room
    }

    fn give_back(&self, bytes: u64) {
        // A recount may have given a part of it back already.
        let rest = |counted: u64| Some(counted.saturating_sub(bytes));
        let (Ok(counted) | Err(counted)) = self.bytes.fetch_update(Ordering::SeqCst, Ordering::SeqCst, rest);
        self.ledger.empty(counted.min(bytes));
    }
}

impl Drop for Filled {
    fn drop(&mut self) {
        self.ledger.empty(self.bytes.load(Ordering::SeqCst));
    }
}
