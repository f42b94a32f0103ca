//! The figures, and whether they are good enough.

use std::fmt::{self, Display};

use serde::Serialize;

/// Limits: time until all hosts concerned know of a vRNIC's move, and bytes sent for any change to a host that had the
/// group before.
const MOVE_MS: f64 = 100.0;
const MOVE_BYTES: u64 = 10 << 10;
/// The kind of change to which [`MOVE_MS`] applies.
pub const MOVED: &str = "vRNIC moved";

/// All figures. Bytes are TCP payload, so they include TLS and HTTP/2. `received` counts bytes that hosts receive,
/// `sent` bytes that hosts send.
#[derive(Serialize)]
pub struct Report {
    pub hosts: usize,
    pub vrnics: usize,
    pub groups: usize,
    /// Time until all hosts had joined and were connected.
    pub joined_s: f64,
    pub declared: Declared,
    pub memory: Memory,
    pub store_bytes: u64,
    /// Idle traffic of one host, bytes per second.
    pub quiet: f64,
    pub changes: Vec<Change>,
    /// A host that came back after five changes.
    pub returned: Restart,
    /// A centre that was killed and started again under all hosts.
    pub restart: Restart,
}

/// The declaration of all objects, made while all hosts were connected.
#[derive(Serialize)]
pub struct Declared {
    pub objects: usize,
    /// Duration of each call.
    pub calls_ms: Vec<f64>,
    /// Times until the last call was answered, and until the last host had its whole table.
    pub declared_s: f64,
    pub converged_s: f64,
    pub received: u64,
    pub sent: u64,
    /// Processor time of the centre.
    pub processor_s: f64,
}

/// Resident memory of the centre, now and at its peak, and of the process that runs all hosts.
#[derive(Default, Serialize)]
pub struct Resident {
    pub centre: u64,
    pub centre_most: u64,
    pub hosts: u64,
}

#[derive(Default, Serialize)]
pub struct Memory {
    /// After all hosts have joined; nothing is declared.
    pub joined: Resident,
    /// After everything was declared.
    pub declared: Resident,
    pub end: Resident,
    /// Averages of one host: bytes on its disk, and pieces.
    pub table: u64,
    pub pieces: u64,
}

/// One change.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sample {
    /// Times until the centre has answered, and until the last host concerned has it in force.
    pub call_ms: f64,
    pub ms: f64,
    /// Hosts that were told something, and hosts among them that it does not concern.
    pub told: usize,
    pub needless: usize,
    /// Bytes that all of them received.
    pub bytes: u64,
    /// Most bytes that one host received which had the group before, and one to which the group was new.
    pub host_bytes: u64,
    pub new_host_bytes: u64,
}

/// Many changes of one kind.
#[derive(Serialize)]
pub struct Change {
    pub what: String,
    pub times: usize,
    /// Time until the centre's answer.
    pub call_p50_ms: f64,
    /// Time until all hosts concerned have it in force.
    pub p50_ms: f64,
    pub p99_ms: f64,
    pub worst_ms: f64,
    pub told_p50: usize,
    pub told_most: usize,
    pub needless: usize,
    /// Bytes that all hosts received for one change.
    pub bytes_p50: u64,
    pub bytes_most: u64,
    /// Most bytes that one host received which had the group before, and one to which the group was new.
    pub host_bytes_most: u64,
    pub new_host_bytes_most: u64,
}

/// The value at this percentile. `all` is sorted.
fn percentile<T: Copy + Default>(all: &[T], percent: usize) -> T {
    let n = (all.len() * percent).div_ceil(100).saturating_sub(1);
    all.get(n).copied().unwrap_or_default()
}

impl Change {
    pub fn new(what: &str, samples: Vec<Sample>) -> Change {
        let ms = |of: fn(&Sample) -> f64| {
            let mut all: Vec<f64> = samples.iter().map(of).collect();
            all.sort_by(f64::total_cmp);
            all
        };
        let counts = |of: fn(&Sample) -> u64| {
            let mut all: Vec<u64> = samples.iter().map(of).collect();
            all.sort_unstable();
            all
        };
        let (call, all, told) = (ms(|s| s.call_ms), ms(|s| s.ms), counts(|s| s.told as u64));
        let bytes = counts(|s| s.bytes);
        Change {
            what: what.into(),
            times: samples.len(),
            call_p50_ms: percentile(&call, 50),
            p50_ms: percentile(&all, 50),
            p99_ms: percentile(&all, 99),
            worst_ms: percentile(&all, 100),
            told_p50: percentile(&told, 50) as usize,
            told_most: percentile(&told, 100) as usize,
            needless: samples.iter().map(|s| s.needless).sum(),
            bytes_p50: percentile(&bytes, 50),
            bytes_most: percentile(&bytes, 100),
            host_bytes_most: samples.iter().map(|s| s.host_bytes).max().unwrap_or(0),
            new_host_bytes_most: samples.iter().map(|s| s.new_host_bytes).max().unwrap_or(0),
        }
    }
}

/// One host, or all hosts, that came back to a centre.
#[derive(Serialize)]
pub struct Restart {
    /// Times until the centre listened, and until the last host was connected and up to date.
    pub serves_s: f64,
    pub told_s: f64,
    pub received: u64,
    pub sent: u64,
    /// Hosts that were told the whole table.
    pub wholes: usize,
    /// Processor time of the centre.
    pub processor_s: f64,
}

impl Report {
    /// Faults that do not depend on the machine's speed.
    pub fn wrong(&self) -> Vec<String> {
        let mut wrong = Vec::new();
        for c in &self.changes {
            if c.host_bytes_most > MOVE_BYTES {
                wrong.push(format!("{}: a host was sent {} bytes, more than {MOVE_BYTES}", c.what, c.host_bytes_most));
            }
            if c.needless > 0 {
                wrong.push(format!("{}: {} hosts were told of what does not concern them", c.what, c.needless));
            }
        }
        for (what, r) in [("a host that came back", &self.returned), ("a centre that was started anew", &self.restart)]
        {
            if r.wholes > 0 {
                wrong.push(format!("{what}: {} hosts were told everything, though they had it", r.wholes));
            }
        }
        wrong
    }

    /// Time limits that were exceeded.
    pub fn slow(&self) -> Vec<String> {
        let slow = self.changes.iter().filter(|c| c.what == MOVED && c.p99_ms > MOVE_MS);
        let line = |c: &Change| {
            format!(
                "99 of 100 moves took up to {:.0} ms until all hosts concerned knew it, more than {MOVE_MS}",
                c.p99_ms
            )
        };
        slow.map(line).collect()
    }
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

fn kib(bytes: u64) -> f64 {
    bytes as f64 / 1024.0
}

impl Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (d, m, n) = (&self.declared, &self.memory, self.hosts as u64);
        writeln!(
            f,
            "{} hosts, {} vRNICs in {} groups, one centre with TLS and its store in a file\n",
            self.hosts, self.vrnics, self.groups
        )?;
        writeln!(f, "all hosts joined and connected          {:>9.1} s", self.joined_s)?;
        writeln!(f, "declared, {:>6} objects in {:>3} calls    {:>9.1} s", d.objects, d.calls_ms.len(), d.declared_s)?;
        let longest = d.calls_ms.iter().fold(0.0f64, |a, b| a.max(*b));
        writeln!(f, "  the longest call                      {:>9.0} ms", longest)?;
        writeln!(f, "every host has all that it must have    {:>9.1} s", d.converged_s)?;
        writeln!(
            f,
            "  sent to all hosts, to one             {:>9.1} MiB {:>9.1} KiB",
            mib(d.received),
            kib(d.received / n)
        )?;
        writeln!(f, "  processor time of the centre          {:>9.1} s", d.processor_s)?;
        writeln!(f, "memory of the centre: hosts joined      {:>9.1} MiB", mib(m.joined.centre))?;
        writeln!(
            f,
            "  everything declared, most so far      {:>9.1} MiB {:>9.1} MiB",
            mib(m.declared.centre),
            mib(m.declared.centre_most)
        )?;
        writeln!(
            f,
            "  at the end, of a centre started again {:>9.1} MiB {:>9.1} MiB",
            mib(m.end.centre),
            mib(m.end.centre_most)
        )?;
        let host = m.declared.hosts.saturating_sub(m.joined.hosts) / n;
        writeln!(f, "memory of a host's state, {:>5} pieces  {:>9.1} KiB", m.pieces, kib(host))?;
        writeln!(f, "  on its disk                           {:>9.1} KiB", kib(m.table))?;
        writeln!(f, "the store's file                        {:>9.1} MiB", mib(self.store_bytes))?;
        writeln!(f, "nothing happens: each host              {:>9.0} bytes/s\n", self.quiet)?;
        writeln!(
            f,
            "{:<32} {:>5} {:>8} {:>8} {:>8} {:>8} {:>6} {:>6} {:>10} {:>10} {:>10}",
            "CHANGE", "TIMES", "CALL", "P50", "P99", "WORST", "TOLD", "MOST", "KIB", "A HOST", "NEW HOST"
        )?;
        for c in &self.changes {
            writeln!(
                f,
                "{:<32} {:>5} {:>5.1} ms {:>5.1} ms {:>5.1} ms {:>5.1} ms {:>6} {:>6} {:>10.1} {:>10.1} {:>10.1}",
                c.what,
                c.times,
                c.call_p50_ms,
                c.p50_ms,
                c.p99_ms,
                c.worst_ms,
                c.told_p50,
                c.told_most,
                kib(c.bytes_p50),
                kib(c.host_bytes_most),
                kib(c.new_host_bytes_most)
            )?;
        }
        let r = &self.returned;
        writeln!(
            f,
            "\na host came back after five changes     {:>9.2} s   {:>9.1} KiB received, {:.1} KiB sent",
            r.told_s,
            kib(r.received),
            kib(r.sent)
        )?;
        let r = &self.restart;
        writeln!(f, "the centre was killed: it serves again  {:>9.2} s   after its start", r.serves_s)?;
        writeln!(
            f,
            "  all hosts are connected               {:>9.2} s   {:>9.1} MiB received, {:.1} MiB sent, {} told everything",
            r.told_s,
            mib(r.received),
            mib(r.sent),
            r.wholes
        )?;
        writeln!(f, "  processor time of the centre          {:>9.1} s", r.processor_s)?;
        write!(
            f,
            "\nBytes are those of TCP, with TLS and HTTP/2. TOLD: hosts that were told; KIB: what they received together; A HOST: the most of one that\nhad the group, NEW HOST: of one to which the group was new and which was told all of it."
        )
    }
}
