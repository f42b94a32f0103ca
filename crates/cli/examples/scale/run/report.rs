//! The figures, and whether they are good enough.

use std::fmt::{self, Display};

use serde::Serialize;

/// How long a vRNIC's move may take until all hosts concerned know it, and how many bytes each of them may be sent for it.
const MOVE_MS: f64 = 100.0;
const MOVE_BYTES: u64 = 10 << 10;
/// The change that these limits are for.
pub const MOVED: &str = "vRNIC moved";

/// All figures. Bytes are those of TCP, so with TLS and HTTP/2; `received` is what hosts receive, `sent` what they send.
#[derive(Serialize)]
pub struct Report {
    pub hosts: usize,
    pub vrnics: usize,
    pub groups: usize,
    /// Until all hosts had joined and were connected.
    pub joined_s: f64,
    pub declared: Declared,
    pub memory: Memory,
    pub store_bytes: u64,
    /// Bytes a second of one host to which nothing happens.
    pub quiet: f64,
    pub changes: Vec<Change>,
    /// A host that came back after five changes.
    pub returned: Restart,
    /// A centre that was killed and started again under all hosts.
    pub restart: Restart,
}

/// Everything was declared while all hosts were connected.
#[derive(Serialize)]
pub struct Declared {
    pub objects: usize,
    /// Of each call.
    pub calls_ms: Vec<f64>,
    /// Until the last call was answered, and until the last host had all that it must have.
    pub declared_s: f64,
    pub converged_s: f64,
    pub received: u64,
    pub sent: u64,
    /// Of the centre.
    pub processor_s: f64,
}

/// Resident memory of the centre, at most so far too, and of the process of all hosts.
#[derive(Default, Serialize)]
pub struct Resident {
    pub centre: u64,
    pub centre_most: u64,
    pub hosts: u64,
}

#[derive(Default, Serialize)]
pub struct Memory {
    /// All hosts have joined, nothing is declared.
    pub joined: Resident,
    /// Everything is declared.
    pub declared: Resident,
    pub end: Resident,
    /// What a host has on average: bytes on its disk, and pieces.
    pub table: u64,
    pub pieces: u64,
}

/// One change.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sample {
    /// Until the centre has answered, and until the last host concerned has it in force.
    pub call_ms: f64,
    pub ms: f64,
    /// Hosts that were told something, and those of them that it does not concern.
    pub told: usize,
    pub needless: usize,
    /// What all of them received.
    pub bytes: u64,
    /// Most that one of them received; and most that one did that had nothing of the group before.
    pub host_bytes: u64,
    pub new_host_bytes: u64,
}

/// Many changes of one kind.
#[derive(Serialize)]
pub struct Change {
    pub what: String,
    pub times: usize,
    /// The answer of the centre.
    pub call_p50_ms: f64,
    /// All hosts concerned have it in force.
    pub p50_ms: f64,
    pub p99_ms: f64,
    pub worst_ms: f64,
    pub told_p50: usize,
    pub told_most: usize,
    pub needless: usize,
    /// What all hosts received for one change.
    pub bytes_p50: u64,
    pub bytes_most: u64,
    /// The most that a host received which had the group, and one to which the group was new.
    pub host_bytes_most: u64,
    pub new_host_bytes_most: u64,
}

/// The value that `percent` of 100 are not above. `all` is in order.
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

/// Hosts that have come back.
#[derive(Serialize)]
pub struct Restart {
    /// Until the centre listened, and until the last host was connected and had all.
    pub serves_s: f64,
    pub told_s: f64,
    pub received: u64,
    pub sent: u64,
    /// Hosts that were told everything.
    pub wholes: usize,
    /// Of the centre.
    pub processor_s: f64,
}

impl Report {
    /// What is not as it must be, on any machine.
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

    /// What takes too long.
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
