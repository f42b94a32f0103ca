//! The store as the centres see it: changes in order, a lease for the centre that allocates, and a bounded log of past
//! changes.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use unirdma_fleet::Write;

/// Duration of a lease that is not renewed, ms.
pub(super) const LEASE_MS: u64 = 5_000;
/// Number of past changes in the log.
const LOG: usize = 24;

/// A change: its revision and its writes.
pub(super) type Change = (u64, Arc<[Write]>);

/// The records, the log of changes, and the lease that permits changes.
pub(super) struct Store {
    records: BTreeMap<String, Vec<u8>>,
    pub revision: u64,
    log: VecDeque<Change>,
    lease: Option<Lease>,
    epochs: u64,
}

#[derive(Clone, Copy)]
struct Lease {
    holder: usize,
    epoch: u64,
    until: u64,
}

/// A granted lease: its epoch, and until when it lasts.
pub(super) type Granted = (u64, u64);

impl Store {
    pub fn new(records: Vec<Write>) -> Store {
        let mut store = Store { records: BTreeMap::new(), revision: 0, log: VecDeque::new(), lease: None, epochs: 0 };
        store.keep(records.into());
        store
    }

    fn keep(&mut self, writes: Arc<[Write]>) {
        for w in writes.iter() {
            match &w.value {
                Some(v) => drop(self.records.insert(w.key.clone(), v.clone())),
                None => drop(self.records.remove(&w.key)),
            }
        }
        self.revision += 1;
        self.log.push_back((self.revision, writes));
        if self.log.len() > LOG {
            self.log.pop_front();
        }
    }

    /// Grants or renews the lease, unless another centre has it.
    pub fn campaign(&mut self, now: u64, centre: usize) -> Option<Granted> {
        let until = now + LEASE_MS;
        match &mut self.lease {
            Some(l) if l.until > now && l.holder != centre => None,
            Some(l) if l.until > now => {
                l.until = until;
                Some((l.epoch, until))
            }
            _ => {
                self.epochs += 1;
                self.lease = Some(Lease { holder: centre, epoch: self.epochs, until });
                Some((self.epochs, until))
            }
        }
    }

    /// The centre that has the lease.
    pub fn holder(&self, now: u64) -> Option<usize> {
        self.lease.filter(|l| l.until > now).map(|l| l.holder)
    }

    /// Commits a change under lease `epoch`. False if the lease is over or `revision` is not the next one.
    pub fn commit(&mut self, now: u64, epoch: u64, revision: u64, writes: &Arc<[Write]>) -> bool {
        let holds = self.lease.is_some_and(|l| l.epoch == epoch && l.until > now);
        if !holds || revision != self.revision + 1 {
            return false;
        }
        self.keep(writes.clone());
        true
    }

    /// The changes after this revision; `None` if the log does not reach back that far.
    pub fn since(&self, revision: u64) -> Option<Vec<Change>> {
        let first = self.log.front().map_or(self.revision + 1, |(r, _)| *r);
        (revision + 1 >= first).then(|| self.log.iter().filter(|(r, _)| *r > revision).cloned().collect())
    }

    /// The newest revision and all records.
    pub fn all(&self) -> (u64, Vec<Write>) {
        let write = |(key, value): (&String, &Vec<u8>)| Write { key: key.clone(), value: Some(value.clone()) };
        (self.revision, self.records.iter().map(write).collect())
    }
}
