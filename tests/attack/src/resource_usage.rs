//! Resources that the processes of a virtual layer hold.

use std::path::Path;
use std::time::{Duration, Instant};

use harness::{Lab, Result};
use serde::Serialize;
use serde_json::Value;

/// Longest time for the virtual layer to report its status.
const STATUS: Duration = Duration::from_secs(5);
/// Time within which the resources of an attack must be released after it has ended.
const GIVEN_BACK: Duration = Duration::from_secs(10);
/// Resources that a process may hold in addition to those before the attack. Threads keep arenas of the heap, and the
/// heap keeps much of the memory that it once had: about 200 MiB after all attacks.
const SLACK: Held = Held { descriptors: 4, mappings: 64, rss_kib: 512 << 10 };

/// Resources of a process.
#[derive(Clone, Copy, Default, PartialEq, Debug, Serialize)]
pub struct Held {
    /// Open descriptors.
    pub descriptors: u64,
    /// Lines of `/proc/PID/maps`.
    pub mappings: u64,
    /// Resident memory, KiB.
    pub rss_kib: u64,
}

impl Held {
    fn of(pid: u32) -> Option<Held> {
        let proc = Path::new("/proc").join(pid.to_string());
        let maps = std::fs::read_to_string(proc.join("maps")).ok()?;
        Some(Held {
            descriptors: std::fs::read_dir(proc.join("fd")).ok()?.count() as u64,
            mappings: maps.lines().count() as u64,
            rss_kib: kib(pid, "VmRSS:")?,
        })
    }

    fn each(self, other: Held, f: impl Fn(u64, u64) -> u64) -> Held {
        Held {
            descriptors: f(self.descriptors, other.descriptors),
            mappings: f(self.mappings, other.mappings),
            rss_kib: f(self.rss_kib, other.rss_kib),
        }
    }

    /// The larger of both values of each resource.
    pub fn max(self, other: Held) -> Held {
        self.each(other, u64::max)
    }

    fn plus(self, other: Held) -> Held {
        self.each(other, |a, b| a + b)
    }

    /// True if it exceeds `before` by at most [`SLACK`].
    fn is_back_to(self, before: Held) -> bool {
        let most = before.plus(SLACK);
        self.max(most) == most
    }
}

/// A line of `/proc/PID/status`, in KiB.
fn kib(pid: u32, name: &str) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|l| l.strip_prefix(name))?.split_whitespace().next()?.parse().ok()
}

/// A process of the virtual layer.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Process {
    /// The group that it works for; `None` for the process that was started.
    pub group: Option<String>,
    /// Its process ID.
    pub pid: u32,
    /// How often it was started again.
    pub restarts: u64,
    /// What it holds now.
    pub held: Held,
    /// Its highest resident memory so far.
    pub peak_rss_kib: u64,
}

/// All processes of a virtual layer at some moment.
#[derive(Clone, Default, PartialEq, Debug, Serialize)]
pub struct Footprint(pub Vec<Process>);

impl Footprint {
    /// Reads the virtual layer's list of its processes, and the kernel's figures of each.
    ///
    /// # Errors
    /// If the virtual layer does not answer.
    pub fn of(lab: &Lab) -> Result<Footprint> {
        let o = lab.start_unirdma(&["status", "--json"])?.finish_within(STATUS);
        let why = || format!("`unirdma status` said nothing in {} s: {}", STATUS.as_secs(), o.text);
        let status: Value = if o.ok() { serde_json::from_str(&o.text).map_err(|_| why())? } else { return Err(why()) };
        let mut all = vec![(None, lab.pid(), 0)];
        for w in status.get("workers").and_then(Value::as_array).into_iter().flatten() {
            let number = |k: &str| w.get(k).and_then(Value::as_u64);
            let group = w.get("group").and_then(Value::as_str).unwrap_or_default();
            // A worker without a process is about to be restarted.
            let pid = number("pid").and_then(|n| u32::try_from(n).ok()).unwrap_or_default();
            all.push((Some(group.to_string()), pid, number("restarts").unwrap_or_default()));
        }
        let held = |pid| Held::of(pid).unwrap_or_default();
        let process = |(group, pid, restarts)| Process {
            group,
            pid,
            restarts,
            held: held(pid),
            peak_rss_kib: kib(pid, "VmHWM:").unwrap_or_default(),
        };
        Ok(Footprint(all.into_iter().map(process).collect()))
    }

    /// Sum over all processes.
    pub fn sum(&self) -> Held {
        self.0.iter().fold(Held::default(), |sum, p| sum.plus(p.held))
    }

    /// Sum of the highest resident memory of each process.
    pub fn peak_rss_kib(&self) -> u64 {
        self.0.iter().map(|p| p.peak_rss_kib).sum()
    }

    /// True if the workers are the same processes as before. `None` if there are no workers.
    pub fn workers_as(&self, before: &Footprint) -> Option<bool> {
        let workers = |f: &Footprint| -> Vec<(Option<String>, u32, u64)> {
            f.0.iter().skip(1).map(|p| (p.group.clone(), p.pid, p.restarts)).collect()
        };
        let old = workers(before);
        (!old.is_empty()).then(|| old == workers(self))
    }

    fn is_back_to(&self, before: &Footprint) -> bool {
        let held = |p: &Process| before.0.iter().find(|b| b.group == p.group).map(|b| b.held).unwrap_or_default();
        self.0.iter().all(|p| p.held.is_back_to(held(p)))
    }

    /// Waits until the processes hold no more than before. Returns their last state, and whether they released
    /// everything.
    ///
    /// # Errors
    /// If the virtual layer does not answer.
    pub fn settled(lab: &Lab, before: &Footprint) -> Result<(Footprint, bool)> {
        let start = Instant::now();
        loop {
            let now = Footprint::of(lab)?;
            let back = now.is_back_to(before);
            if back || start.elapsed() > GIVEN_BACK {
                return Ok((now, back));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn footprint(pid: u32, descriptors: u64, mappings: u64) -> Footprint {
        let process = |group: Option<&str>, pid, held| Process {
            group: group.map(Into::into),
            pid,
            restarts: 0,
            held,
            peak_rss_kib: 0,
        };
        let held = Held { descriptors, mappings, rss_kib: 1000 };
        Footprint(vec![process(None, 1, Held::default()), process(Some("g"), pid, held)])
    }

    #[test]
    fn each_process_gives_back_what_it_took() {
        let before = footprint(2, 40, 100);
        assert!(footprint(2, 44, 164).is_back_to(&before));
        assert!(!footprint(2, 45, 100).is_back_to(&before));
        assert!(!footprint(2, 40, 165).is_back_to(&before));
        assert_eq!(before.sum(), Held { descriptors: 40, mappings: 100, rss_kib: 1000 });
    }

    #[test]
    fn a_worker_with_another_pid_has_ended_meanwhile() {
        let before = footprint(2, 40, 100);
        assert_eq!(footprint(2, 99, 9).workers_as(&before), Some(true));
        assert_eq!(footprint(3, 40, 100).workers_as(&before), Some(false));
        let alone = Footprint(before.0[..1].to_vec());
        assert_eq!((alone.workers_as(&before), before.workers_as(&alone)), (Some(false), None));
    }
}
