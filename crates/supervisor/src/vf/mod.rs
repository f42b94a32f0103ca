//! The pool of VFs of this host's real RNICs. [`unirdma_vf`] plans, this module looks at the kernel and applies the
//! plan.
//!
//! A thread of its own looks, plans and applies until the plan is empty ([`PoolThread`]). It looks again when the
//! kernel tells of a change, and every few seconds. A step may wait in the kernel for a program that has a device open,
//! so nothing else is done by this thread, and the pool's lock is not held meanwhile. Another thread answers programs
//! that ask for VFs ([`lease_server`]).

mod apply;
mod given;
mod lease_server;
mod lender;
mod loans;
mod log_file;
mod look;
mod netlink;
mod pool_thread;
mod rdma;
mod route;
mod sysfs_copy;
mod tree;
mod users;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use rustix::thread::CapabilitySet;
use unirdma_device::lock;
use unirdma_vf::{Change, Config, LeaseId, Leases, Part, Phase, Problem, Seen, State, VfId, states};

use crate::admin::{VF_KINDS, VfAnswers, VfInfo, VfsInfo};
use given::Given;
use lease_server::{LeaseServer, Tell};
pub(crate) use lender::{Borrower, LendError, Lender};
use log_file::LogFile;
use look::Looker;
pub(crate) use pool_thread::PoolThread;
use tree::Roots;

/// Time for which a step may take until administrators are told that it does.
const PATIENCE: Duration = Duration::from_secs(3);

/// Answers programs that ask for VFs, on a thread of its own.
pub(crate) fn serve_programs(lender: &Arc<Lender>, tell: Tell) {
    lender.start(Box::new(|lender| LeaseServer::new(lender, tell).run()));
}

/// A descriptor to wake a thread.
fn event() -> io::Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

fn signal(event: &OwnedFd) {
    let _ = rustix::io::write(event, &1u64.to_ne_bytes());
}

/// The pool of VFs.
pub(crate) struct Pool {
    config: Config,
    began: Instant,
    /// Where the kernel shows its state.
    roots: Roots,
    /// The descriptors that programs have got.
    given: Arc<Given>,
    /// Wakes the pool's thread.
    wake: OwnedFd,
    /// Wakes the thread that answers programs, after each look.
    changed: OwnedFd,
    stopping: AtomicBool,
    state: Mutex<PoolState>,
}

/// The pool as it was seen last.
struct PoolState {
    seen: Seen,
    leases: Leases,
    log: LogFile,
    /// Counters of answers to programs.
    answers: VfAnswers,
    /// Requests that have waited and got a VF, or have waited for too long, until the programs are told.
    changes: Vec<Change>,
    /// Contexts that programs have got from this supervisor, by lease and vRNIC. Their number is at least 1.
    contexts: BTreeMap<(LeaseId, String), u32>,
    /// Leases of the last supervisor whose programs may live.
    adopted: BTreeSet<LeaseId>,
    /// What the last supervisor's log of leases lacks. It does not change.
    problems: Vec<String>,
    notices: Vec<String>,
    /// The step that is being applied.
    step: Option<(String, Instant)>,
}

/// Why a part of the pool cannot be drained.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PartError {
    #[error("`{0}` is neither a PF of the pool nor a VF such as PF/0; `unirdma vf ls` lists them")]
    Unknown(String),
    #[error("the log of leases cannot be written: {0}")]
    Log(io::Error),
}

impl Pool {
    /// Looks at the kernel once, and takes over the leases of the last supervisor. The log of leases is in `dir`.
    ///
    /// # Errors
    /// One line.
    pub fn open(config: Config, dir: &Path) -> io::Result<(Arc<Pool>, PoolThread)> {
        let has = rustix::thread::capabilities(None)?.effective;
        if !has.contains(CapabilitySet::NET_ADMIN | CapabilitySet::MKNOD) {
            let text = "a pool of VFs (--vf-pf) needs root with CAP_NET_ADMIN and CAP_MKNOD; run it as root, or \
                        without --vf-pf";
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
        }
        Pool::open_at(config, dir, Roots::default())
    }

    fn open_at(config: Config, dir: &Path, roots: Roots) -> io::Result<(Arc<Pool>, PoolThread)> {
        let failed = |e: io::Error| io::Error::new(e.kind(), format!("no pool of VFs: {e}"));
        config.check().map_err(|e| io::Error::new(io::ErrorKind::InvalidInput, e.to_string()))?;
        let began = Instant::now();
        let given = Arc::new(Given::new().map_err(failed)?);
        let mut looker = Looker::new(roots, given.clone()).map_err(failed)?;
        let first = looker.look(&config, began.elapsed(), &BTreeSet::new());
        let seen = first.map_err(|e| failed(io::Error::other(e.to_string())))?;
        let kept = LogFile::read(dir).map_err(crate::context("cannot read", &dir.join(log_file::NAME)))?;
        let (leases, problems) = Leases::adopt(&config, &seen, kept, began.elapsed());
        problems.iter().for_each(|p| tracing::warn!("VFs: {p}"));
        let log = LogFile::create(dir, &leases.snapshot());
        let log = log.map_err(crate::context("cannot write", &dir.join(log_file::NAME)))?;
        // Users without a lease are in the states of their VFs, and may end.
        let problems = problems.iter().filter(|p| !matches!(p, Problem::Used { .. })).map(Problem::to_string).collect();
        let adopted = leases.iter().filter(|l| l.phase == Phase::Open).map(|l| l.id).collect();
        let (changes, contexts) = (Vec::new(), BTreeMap::new());
        let notices = Vec::new();
        let answers = VfAnswers::default();
        let state = PoolState { seen, leases, log, answers, changes, contexts, adopted, problems, notices, step: None };
        let (wake, changed) = (event()?, event()?);
        let (stopping, state) = (AtomicBool::new(false), Mutex::new(state));
        let pool = Arc::new(Pool { config, began, roots: looker.roots.clone(), given, wake, changed, stopping, state });
        Ok((pool.clone(), PoolThread::new(pool, looker)))
    }

    /// Ends the pool's thread after the step that it is in, and does not wait for it. The VFs stay as they are.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        self.wake();
    }

    fn wake(&self) {
        signal(&self.wake);
    }

    /// Takes a PF (`NETDEV`) or a VF (`NETDEV/N`) out of use, or back.
    ///
    /// # Errors
    /// It is not of the pool, or the log cannot be written.
    pub fn drain(&self, name: &str, on: bool) -> Result<(), PartError> {
        let part = self.part(name).ok_or_else(|| PartError::Unknown(name.into()))?;
        let mut state = lock(&self.state);
        state.leases.drain(part, on);
        state.keep_records().map_err(PartError::Log)?;
        drop(state);
        self.wake();
        Ok(())
    }

    fn part(&self, name: &str) -> Option<Part> {
        let Some((pf, index)) = name.split_once('/') else {
            return self.config.pfs.iter().any(|pf| pf.netdev == name).then(|| Part::Pf(name.into()));
        };
        let vf = VfId { pf: pf.into(), index: index.parse().ok()? };
        self.config.pf_of(&vf).is_some().then_some(Part::Vf(vf))
    }

    /// All VFs, and what an operator should know.
    pub fn info(&self) -> VfsInfo {
        let state = lock(&self.state);
        let leases = &state.leases;
        let vfs = states(&self.config, &state.seen, leases).into_iter().map(|(id, s)| info(&state, &id, &s)).collect();
        let late = state.step.as_ref().filter(|(_, since)| since.elapsed() > PATIENCE).map(|(step, since)| {
            let seconds = since.elapsed().as_secs();
            format!("the kernel has worked on this for {seconds} s: {step}; it waits for programs that use the device")
        });
        let notices = state.problems.iter().chain(&state.notices).cloned().chain(late).collect();
        let drained = leases.drained().map(Part::to_string).collect();
        VfsInfo { vfs, waiting: leases.waiting().count(), drained, notices, answers: state.answers }
    }
}

fn info(state: &PoolState, id: &VfId, s: &State) -> VfInfo {
    let vf = state.seen.vf(id);
    let lease = state.leases.of(id);
    VfInfo {
        name: id.to_string(),
        pf: id.pf.clone(),
        pci: vf.map(|v| v.pci.clone()),
        driver: vf.and_then(|v| v.driver.clone()),
        netdev: vf.and_then(|v| v.netdev.as_ref()).map(|n| n.name.clone()),
        verbs: vf.and_then(|v| v.verbs.as_ref()).map(|v| v.name.clone()),
        kind: kind(s).into(),
        state: s.to_string(),
        lease: lease.map(|l| l.id.0),
        group: lease.map(|l| l.group.clone()),
        instance: lease.map(|l| l.instance.clone()),
    }
}

/// The word for a kind of state, in JSON and metrics.
fn kind(state: &State) -> &'static str {
    let [absent, raw, ready, leased, dirty, foreign] = VF_KINDS;
    match state {
        State::Absent => absent,
        State::Raw | State::NoLink => raw,
        State::Ready => ready,
        State::Leased(_) => leased,
        State::Dirty(_) => dirty,
        State::Foreign(_) => foreign,
    }
}

impl PoolState {
    /// As [`PoolState::keep_records`]; an error is logged only.
    fn keep_records_or_log(&mut self) {
        if let Err(e) = self.keep_records() {
            tracing::error!("VFs: the log of leases cannot be written: {e}");
        }
    }

    /// Writes the changes of leases to the log.
    fn keep_records(&mut self) -> io::Result<()> {
        let records = self.leases.take_records();
        self.log.append(&records, || self.leases.snapshot())
    }
}

#[cfg(test)]
mod tests {
    use unirdma_vf::{Address, Dry, Isolation, PfConfig};

    use super::tree::tests::Temporary;
    use super::*;

    fn config() -> Config {
        let addresses = vec![Address { addr: [10, 50, 0, 10].into(), prefix: 24 }];
        let pfs = vec![PfConfig { netdev: "lo".into(), vfs: 2, isolation: Isolation::Vlan, addresses, rxe: false }];
        Config { pfs, when_dry: Dry::Soft, linger: Duration::ZERO }
    }

    fn open(tree: &Temporary) -> (Arc<Pool>, PoolThread) {
        let dir = tree.0.sys.parent().unwrap();
        Pool::open_at(config(), dir, tree.0.clone()).unwrap()
    }

    #[test]
    fn parts_of_the_pool_are_drained_also_for_the_next_supervisor() {
        let tree = Temporary::new();
        let (pool, _) = open(&tree);
        for wrong in ["", "pf", "lo/2", "lo/x", "lo/", "/", "lo/0/0"] {
            let e = pool.drain(wrong, true).unwrap_err().to_string();
            assert!(e.starts_with(&format!("`{wrong}` is neither")), "{e}");
        }
        pool.drain("lo", true).unwrap();
        pool.drain("lo/1", true).unwrap();
        pool.drain("lo", false).unwrap();
        assert_eq!(pool.info().drained, ["lo/1"]);
        let (pool, _) = open(&tree);
        assert_eq!(pool.info().drained, ["lo/1"]);
    }

    #[test]
    fn vfs_that_the_kernel_does_not_have_are_absent() {
        let tree = Temporary::new();
        let info = open(&tree).0.info();
        let shown: Vec<_> = info.vfs.iter().map(|v| (v.name.as_str(), v.kind.as_str(), v.pci.as_deref())).collect();
        assert_eq!(shown, [("lo/0", "absent", None), ("lo/1", "absent", None)]);
    }

    #[test]
    fn a_damaged_log_is_told() {
        let tree = Temporary::new();
        let (pool, _) = open(&tree);
        pool.drain("lo", true).unwrap();
        let file = tree.0.sys.parent().unwrap().join(log_file::NAME);
        let bytes = std::fs::read(&file).unwrap();
        std::fs::write(&file, &bytes[..bytes.len() - 1]).unwrap();
        let info = open(&tree).0.info();
        assert!(info.drained.is_empty() && info.notices[0].contains("ends in the middle"), "{info:?}");
    }
}
