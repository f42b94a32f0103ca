//! Counters of calls and messages. Label values are fixed words, so the number of series is fixed, too.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use prost::Message;
use unirdma_fleet::{Kind, Refusal, RefusalKind, v1};
use unirdma_metrics::{Kind as Family, Value, Writer};

/// Upper edges of the histogram of store times: in microseconds, and as Prometheus reads them.
const EDGES: [(u64, &str); 10] = [
    (500, "0.0005"),
    (1_000, "0.001"),
    (2_500, "0.0025"),
    (5_000, "0.005"),
    (10_000, "0.01"),
    (25_000, "0.025"),
    (100_000, "0.1"),
    (500_000, "0.5"),
    (2_500_000, "2.5"),
    (10_000_000, "10"),
];

/// The ways in which a change affects an object.
const FATES: [&str; 3] = ["made", "changed", "deleted"];

const REASONS: [(RefusalKind, &str); 8] = [
    (RefusalKind::Invalid, "invalid"),
    (RefusalKind::NotFound, "not_found"),
    (RefusalKind::Conflict, "conflict"),
    (RefusalKind::Stale, "stale"),
    (RefusalKind::Unknown, "unauthenticated"),
    (RefusalKind::Denied, "denied"),
    (RefusalKind::Full, "full"),
    (RefusalKind::Unavailable, "unavailable"),
];

/// The counters.
#[derive(Default)]
pub(crate) struct Metrics {
    /// Changes by kind of object, and by index in [`FATES`].
    changes: [[AtomicU64; FATES.len()]; Kind::ALL.len()],
    refusals: [AtomicU64; REASONS.len()],
    hosts_refused: AtomicU64,
    /// Store times by the first edge that is not below them. The last slot is above all edges.
    kept: [AtomicU64; EDGES.len() + 1],
    kept_ns: AtomicU64,
    updates: AtomicU64,
    update_bytes: AtomicU64,
}

impl Metrics {
    /// Counts the changes of objects.
    pub fn changed(&self, changes: &[v1::Change]) {
        for change in changes {
            let object = change.after.as_ref().or(change.before.as_ref()).and_then(|o| o.object.as_ref());
            let fate = match (&change.before, &change.after) {
                (None, _) => 0,
                (_, None) => 2,
                _ => 1,
            };
            if let Some(kind) = object.map(|o| o.kind()) {
                self.changes[kind as usize][fate].fetch_add(1, Relaxed);
            }
        }
    }

    /// Counts a change that the store took `took` to keep.
    pub fn kept(&self, took: Duration) {
        let slot = EDGES.iter().position(|(us, _)| took <= Duration::from_micros(*us)).unwrap_or(EDGES.len());
        self.kept[slot].fetch_add(1, Relaxed);
        self.kept_ns.fetch_add(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX), Relaxed);
    }

    /// Counts the refusal of a change or of a caller.
    pub fn refused(&self, e: &Refusal) {
        if let Some(n) = REASONS.iter().position(|(kind, _)| *kind == e.kind) {
            self.refusals[n].fetch_add(1, Relaxed);
        }
    }

    /// Counts a host that is refused or cut off with a reason.
    pub fn host_refused(&self) {
        self.hosts_refused.fetch_add(1, Relaxed);
    }

    /// Counts an update that is sent to a host.
    pub fn updated(&self, update: &v1::Update) {
        self.updates.fetch_add(1, Relaxed);
        self.update_bytes.fetch_add(update.encoded_len() as u64, Relaxed);
    }

    /// Writes the counters to a page.
    pub fn write(&self, w: &mut Writer) {
        let read = |n: &AtomicU64| Value::N(n.load(Relaxed));
        let name = "unirdma_control_object_changes_total";
        w.head(name, "counter", "Objects that were made, changed and deleted, by kind.");
        for (kind, fates) in Kind::ALL.iter().zip(&self.changes) {
            for (fate, n) in FATES.iter().zip(fates) {
                w.line(name, &[("kind", kind.word()), ("change", fate)], read(n));
            }
        }
        let name = "unirdma_control_refusals_total";
        w.head(name, "counter", "Changes that were refused, and calls that were not admitted, by reason.");
        for ((_, reason), n) in REASONS.iter().zip(&self.refusals) {
            w.line(name, &[("reason", reason)], read(n));
        }
        let one = |w: &mut Writer, name: &str, help: &str, n: &AtomicU64| {
            w.one(name, Family::Counter, help, n.load(Relaxed));
        };
        let help = "Connections of hosts that were refused or cut off with a reason, which the log has.";
        one(w, "unirdma_control_host_refusals_total", help, &self.hosts_refused);
        let help = "Updates that were sent to hosts.";
        one(w, "unirdma_control_updates_sent_total", help, &self.updates);
        one(w, "unirdma_control_updates_sent_bytes_total", "Bytes of these updates, before TLS.", &self.update_bytes);
        let name = "unirdma_control_store_commit_seconds";
        w.head(name, "histogram", "How long a change took to be kept in the store and told to hosts' connections.");
        let mut count = 0;
        for ((_, edge), n) in EDGES.iter().zip(&self.kept) {
            count += n.load(Relaxed);
            w.line(&format!("{name}_bucket"), &[("le", edge)], Value::N(count));
        }
        count += self.kept[EDGES.len()].load(Relaxed);
        w.line(&format!("{name}_bucket"), &[("le", "+Inf")], Value::N(count));
        w.line(&format!("{name}_sum"), &[], Value::Ns(self.kept_ns.load(Relaxed)));
        w.line(&format!("{name}_count"), &[], Value::N(count));
    }
}
