//! All statistics of this host, read from its workers.
//!
//! Each worker is called once, on a separate thread, so a worker that does not answer affects only its own group.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use unirdma_device::lock;
use unirdma_ipc::counters::PortCounters;
use unirdma_ipc::counters::TunnelDrops;
use unirdma_ipc::message::{Answer, Call, Figures};
use unirdma_rnic::WireDrops;

use super::group::{Group, Worker};
use super::{Supervisor, admin_requests};
use crate::admin::VfsInfo;
use crate::network::WireInfo;

/// How long workers may take. Slower ones are omitted.
const PATIENCE: Duration = Duration::from_secs(3);

/// The statistics of a group, and its supervisor's knowledge about its worker.
#[derive(Clone, Debug, Default)]
pub(crate) struct GroupFigures {
    pub group: String,
    /// The group could be read. If not, all following fields are empty.
    pub known: bool,
    pub vrnics: usize,
    pub restarts: u64,
    /// A thread of the worker is stuck.
    pub stuck: bool,
    /// The worker's anonymous memory, bytes.
    pub memory: u64,
    /// Processor time used by the worker; `None` if it is unknown.
    pub cpu: Option<Duration>,
    /// The worker's statistics; `None`: it does not answer.
    pub told: Option<Figures>,
}

/// The statistics of a host.
#[derive(Clone, Debug, Default)]
pub(crate) struct HostFigures {
    pub groups: Vec<Arc<GroupFigures>>,
    /// vRNICs of all groups.
    pub vrnics: usize,
    /// The pool of VFs, if there is one.
    pub vfs: Option<VfsInfo>,
    /// The network to other hosts, if there is one. The workers' counters are not included.
    pub wire: Option<WireInfo>,
}

/// Pending calls to workers, and their results.
#[derive(Default)]
pub(crate) struct Reader {
    cells: Mutex<BTreeMap<String, Cell>>,
    changed: Condvar,
}

#[derive(Default)]
struct Cell {
    /// A thread waits for the worker.
    asked: bool,
    /// Time of the call, and its result.
    read: Option<(Instant, Arc<GroupFigures>)>,
}

impl Supervisor {
    /// Reads the statistics of all groups, and of each group's first `most` vRNICs.
    pub(crate) fn figures(self: &Arc<Self>, reader: &Arc<Reader>, most: usize) -> HostFigures {
        let begun = Instant::now();
        let groups = self.groups();
        for asking in reader.ask(&groups) {
            self.apart("figures", move |_| asking.read(most));
        }
        let mut cells = lock(&reader.cells);
        loop {
            let fresh = |c: &Cell| !c.asked && c.read.as_ref().is_some_and(|r| r.0 >= begun);
            let left = PATIENCE.saturating_sub(begun.elapsed());
            if left.is_zero() || cells.values().all(fresh) {
                break;
            }
            cells = reader.changed.wait_timeout(cells, left).unwrap_or_else(|e| e.into_inner()).0;
        }
        let of = |group: &Arc<Group>| {
            let read = cells.get_mut(&group.name).and_then(|c| c.read.take()).filter(|r| r.0 >= begun);
            let silent = || Arc::new(GroupFigures { group: group.name.clone(), ..GroupFigures::default() });
            read.map_or_else(silent, |r| r.1)
        };
        let groups = groups.iter().map(of).collect();
        drop(cells);
        let none = (PortCounters::default(), WireDrops::default(), TunnelDrops::default());
        let wire = self.around.network.as_ref().map(|n| lock(n).info(none.0, none.1, none.2));
        let vfs = self.vfs.as_ref().map(|pool| pool.info());
        HostFigures { groups, vrnics: self.names().vrnics.len(), vfs, wire }
    }
}

impl Reader {
    /// Marks and returns the groups whose workers are not being called already.
    fn ask(self: &Arc<Self>, groups: &[Arc<Group>]) -> Vec<Asking> {
        let mut cells = lock(&self.cells);
        cells.retain(|name, _| groups.iter().any(|g| g.name == *name));
        let mut idle = |g: &&Arc<Group>| !std::mem::replace(&mut cells.entry(g.name.clone()).or_default().asked, true);
        let idle: Vec<&Arc<Group>> = groups.iter().filter(|g| idle(g)).collect();
        idle.into_iter().map(|group| Asking { reader: self.clone(), group: group.clone() }).collect()
    }
}

/// A pending call to a worker. Dropping it ends the call.
struct Asking {
    reader: Arc<Reader>,
    group: Arc<Group>,
}

impl Asking {
    fn read(&self, most: usize) {
        let at = Instant::now();
        let figures = Arc::new(self.group.figures(most));
        if let Some(cell) = lock(&self.reader.cells).get_mut(&self.group.name) {
            cell.read = Some((at, figures));
        }
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        if let Some(cell) = lock(&self.reader.cells).get_mut(&self.group.name) {
            cell.asked = false;
        }
        self.reader.changed.notify_all();
    }
}

impl Group {
    fn figures(&self, most: usize) -> GroupFigures {
        let mut inner = self.lock();
        let told = match self.call(&mut inner, &Call::Figures { most }, &[]) {
            Ok(Answer::Figures(told)) => Some(*told),
            _ => None,
        };
        let told = told.map(|mut told| {
            // Names and limits are taken from the supervisor.
            told.vrnics.retain_mut(|v| {
                let member = inner.members.get(&v.name);
                member.iter().for_each(|m| (v.limits, v.attached) = (m.new.limits, m.attached.is_some()));
                member.is_some()
            });
            told
        });
        let pid = inner.worker.as_ref().map(Worker::pid);
        GroupFigures {
            group: self.name.clone(),
            known: true,
            vrnics: inner.members.len(),
            restarts: inner.restarts,
            stuck: admin_requests::stuck(&inner).is_some(),
            memory: pid.map_or(0, admin_requests::memory_of),
            cpu: pid.and_then(cpu_of),
            told,
        }
    }
}

/// Processor time of a process, in user and kernel mode.
fn cpu_of(pid: u32) -> Option<Duration> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let ticks = ticks_of(&stat)?;
    let per_second = rustix::param::clock_ticks_per_second().max(1);
    Some(Duration::from_nanos(u64::try_from(u128::from(ticks) * 1_000_000_000 / u128::from(per_second)).ok()?))
}

/// Fields 14 and 15 of `/proc/PID/stat`, `utime` and `stime`. The second field is a name in parentheses, which may
/// contain anything.
fn ticks_of(stat: &str) -> Option<u64> {
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace().skip(11);
    let (user, system): (u64, u64) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
    Some(user + system)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_time_is_found_whatever_the_process_is_called() {
        let stat = "7 (a) b) (c) S 1 2 3 4 5 6 7 8 9 10 120 30 0 0 20 0 1 0 100 0";
        assert_eq!(ticks_of(stat), Some(150));
        assert_eq!((ticks_of("7 (a) S 1 2"), ticks_of("")), (None, None));
        assert!(cpu_of(std::process::id()).is_some());
    }
}
