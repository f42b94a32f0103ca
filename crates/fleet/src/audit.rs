//! The audit log. Each party that makes changes has a part of it, so that its changes do not push out the entries of
//! others. An entry is dropped if its party exceeds its part, or, when the whole log is full, if its party takes most:
//! each time the oldest entry of that party. Entries of administrators weigh an eighth.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use prost::Message;

use crate::model::AUDIT;
use crate::state::Name;
use crate::v1::AuditEntry;

/// Greatest age of an entry, seconds: 400 days.
const MAX_AGE_S: u64 = 400 * 86_400;
/// The weight of an administrator's entry is divided by this.
const PRIVILEGE: usize = 8;

/// The entries of one party.
#[derive(Clone, Debug, Default)]
struct Part {
    revisions: BTreeSet<u64>,
    weight: usize,
}

/// The audit log.
#[derive(Clone, Debug, Default)]
pub(crate) struct Audit {
    /// By revision.
    entries: BTreeMap<u64, Arc<AuditEntry>>,
    bytes: usize,
    parts: BTreeMap<Name, Part>,
    /// The parties, by weight.
    by_weight: BTreeSet<(usize, Name)>,
}

fn bytes(entry: &AuditEntry) -> usize {
    entry.encoded_len() + 64
}

fn weight(entry: &AuditEntry) -> usize {
    bytes(entry) / if entry.admin { PRIVILEGE } else { 1 }
}

impl Audit {
    /// The entries, oldest first.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &Arc<AuditEntry>> {
        self.entries.values()
    }

    /// The entries before a revision, newest first.
    pub fn before(&self, revision: u64) -> impl Iterator<Item = &Arc<AuditEntry>> {
        self.entries.range(..revision).rev().map(|(_, e)| e)
    }

    fn weigh(&mut self, who: &str, change: impl FnOnce(&mut Part)) {
        let (who, mut part) = self.parts.remove_entry(who).unwrap_or_else(|| (who.into(), Part::default()));
        self.by_weight.remove(&(part.weight, who.clone()));
        change(&mut part);
        if !part.revisions.is_empty() {
            self.by_weight.insert((part.weight, who.clone()));
            self.parts.insert(who, part);
        }
    }

    pub fn insert(&mut self, entry: Arc<AuditEntry>) {
        self.remove(entry.revision);
        self.bytes += bytes(&entry);
        self.weigh(&entry.who, |part| {
            part.revisions.insert(entry.revision);
            part.weight += weight(&entry);
        });
        self.entries.insert(entry.revision, entry);
    }

    pub fn remove(&mut self, revision: u64) -> Option<Arc<AuditEntry>> {
        let entry = self.entries.remove(&revision)?;
        self.bytes -= bytes(&entry);
        self.weigh(&entry.who, |part| {
            part.revisions.remove(&entry.revision);
            part.weight -= weight(&entry);
        });
        Some(entry)
    }

    /// The revision of the next entry that must be dropped after `newest` was added.
    fn surplus(&self, newest: &AuditEntry) -> Option<u64> {
        let (&oldest, first) = self.entries.first_key_value()?;
        if first.time.saturating_add(MAX_AGE_S) < newest.time {
            return Some(oldest);
        }
        let oldest_of = |part: &Part| part.revisions.first().copied().filter(|r| *r != newest.revision);
        let own = self.parts.get(newest.who.as_str()).filter(|p| p.weight > AUDIT.part()).and_then(oldest_of);
        own.or_else(|| {
            let full = self.bytes > AUDIT.all;
            let parts = self.by_weight.iter().rev().filter(|_| full).filter_map(|(_, who)| self.parts.get(who));
            parts.filter_map(oldest_of).next()
        })
    }

    /// The revisions of the entries that must be dropped if this entry is added. The log itself does not change.
    pub fn without(&mut self, entry: AuditEntry) -> Vec<u64> {
        let entry = Arc::new(entry);
        self.insert(entry.clone());
        let mut gone = Vec::new();
        while let Some(revision) = self.surplus(&entry) {
            gone.extend(self.remove(revision));
        }
        self.remove(entry.revision);
        let revisions = gone.iter().map(|e| e.revision).collect();
        gone.into_iter().for_each(|e| self.insert(e));
        revisions
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(revision: u64, who: &str, admin: bool, lines: usize) -> AuditEntry {
        let what = vec!["made vRNIC something-with-a-name: 10.77.0.9/16 in group blue, on host h1".into(); lines];
        AuditEntry { revision, time: 1_800_000_000 + revision, who: who.into(), what, admin }
    }

    fn add(log: &mut Audit, entry: AuditEntry) {
        let was = (log.bytes, log.entries.len());
        let gone = log.without(entry.clone());
        assert_eq!((log.bytes, log.entries.len()), was, "to ask changes nothing");
        gone.iter().for_each(|r| drop(log.remove(*r)));
        log.insert(Arc::new(entry));
        assert!(log.bytes <= AUDIT.all);
    }

    fn has(log: &Audit, who: &str) -> usize {
        log.iter().filter(|e| e.who == who).count()
    }

    #[test]
    fn whoever_changes_much_pushes_out_its_own_entries() {
        let mut log = Audit::default();
        add(&mut log, entry(1, "admin", true, 1));
        add(&mut log, entry(2, "other", false, 1));
        for n in 3..40_000 {
            add(&mut log, entry(n, "greedy", false, 1));
        }
        assert_eq!((has(&log, "admin"), has(&log, "other")), (1, 1));
        assert!((5_000..30_000).contains(&has(&log, "greedy")));
        assert_eq!(log.before(40_000).next().map(|e| e.revision), Some(39_999));
        // An entry of a large call stays complete, even if that pushes out earlier entries of its party.
        add(&mut log, entry(40_000, "greedy", false, 20_000));
        assert_eq!(log.before(u64::MAX).next().map(|e| e.what.len()), Some(20_000));
        assert_eq!((has(&log, "admin"), has(&log, "other")), (1, 1));
        assert_eq!(log.bytes, log.iter().map(|e| bytes(e)).sum());
    }

    #[test]
    fn a_full_log_forgets_what_those_did_that_have_most_of_it() {
        let mut log = Audit::default();
        add(&mut log, entry(1, "admin", true, 1_000));
        for n in 2..2_002 {
            let who = if n % 2 == 0 { format!("tenant-{}", n % 200) } else { "admin".into() };
            add(&mut log, entry(n, &who, n % 2 == 1, 300));
        }
        let tenants: Vec<usize> = (0..100).map(|n| has(&log, &format!("tenant-{}", 2 * n))).collect();
        assert!(log.bytes > AUDIT.all / 2 && tenants.iter().all(|n| *n >= 3), "{tenants:?}");
        assert!(has(&log, "admin") > 8 * tenants[0], "{} {}", has(&log, "admin"), tenants[0]);
    }

    #[test]
    fn entries_go_when_they_are_old() {
        let mut log = Audit::default();
        add(&mut log, entry(1, "a", true, 1));
        add(&mut log, AuditEntry { time: 1_800_000_001 + MAX_AGE_S, ..entry(2, "b", true, 1) });
        assert_eq!(has(&log, "a"), 1);
        add(&mut log, AuditEntry { time: 1_800_000_002 + MAX_AGE_S, ..entry(3, "b", true, 1) });
        assert_eq!(has(&log, "a"), 0);
    }
}
