//! The pool's thread: looks, plans and applies.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use unirdma_device::lock;
use unirdma_vf::{Change, Notice, Seen, Step, VfId};

use super::Pool;
use super::apply::{Shown, vf_of};
use super::look::Looker;
use super::netlink::Notices;
use super::{rdma, route};

/// The processes that do not count as users of a device.
type Pids = Box<dyn Fn() -> BTreeSet<u32> + Send>;

/// Longest time without a look.
pub(super) const LOOK_EVERY: Duration = Duration::from_secs(5);
/// Shortest time between two looks, also if the kernel tells of changes all the time.
const LOOK_AFTER: Duration = Duration::from_millis(500);
/// Shortest time from one look to the next.
const SHORTEST: Duration = Duration::from_millis(50);
/// Time from a step to the next look. It grows while steps have no effect, up to a second.
const STEP_TIME: Duration = Duration::from_millis(100);
/// Time after which a step that the kernel refused is tried again.
const AGAIN_AFTER: Duration = Duration::from_secs(30);
/// Number of times that a step is applied while it has no effect. Pauses grow to a second each, since a driver may be
/// loaded meanwhile.
const MOST_REPEATS: u32 = 8;

/// When the next look is.
enum Next {
    /// After this time, since steps were applied.
    After(Duration),
    /// When the kernel tells of a change, and after this time at the latest.
    Before(Duration),
}

/// What the kernel said when it refused a step.
struct Refused {
    what: String,
    since: Instant,
}

/// The pool's thread.
pub(crate) struct PoolThread {
    pool: Arc<Pool>,
    looker: Looker,
    /// Sockets on which the kernel tells changes.
    notices: Vec<Notices>,
    /// Refused steps of VFs.
    refused: BTreeMap<VfId, Refused>,
    /// PFs for which no VFs could be made.
    failed: BTreeMap<String, Refused>,
    /// Number of times that each step of the present plan has been applied.
    repeats: BTreeMap<String, u32>,
    /// Notices that have been logged and still hold.
    logged: BTreeSet<String>,
    /// Why the last look failed.
    blind: Option<String>,
}

impl PoolThread {
    pub(super) fn new(pool: Arc<Pool>, looker: Looker) -> PoolThread {
        let open = |protocol, groups: &[u32]| Notices::open(protocol, groups).ok();
        let route = open(netlink_sys::protocols::NETLINK_ROUTE, &route::GROUPS);
        let rdma = open(netlink_sys::protocols::NETLINK_RDMA, &[rdma::NOTIFY_GROUP]);
        PoolThread {
            pool,
            looker,
            notices: route.into_iter().chain(rdma).collect(),
            refused: BTreeMap::new(),
            failed: BTreeMap::new(),
            repeats: BTreeMap::new(),
            logged: BTreeSet::new(),
            blind: None,
        }
    }

    /// Starts it. `own` gives the processes that do not count as users of a device.
    ///
    /// # Errors
    /// There is no thread.
    pub fn start(self, own: Pids) -> io::Result<()> {
        std::thread::Builder::new().name("vfs".into()).spawn(move || self.run(&own)).map(drop)
    }

    fn run(mut self, own: &Pids) {
        while !self.pool.stopping.load(Ordering::SeqCst) {
            let began = Instant::now();
            let next = self.round(&own());
            // Programs that open and close a device all the time wake this thread as often.
            std::thread::sleep(SHORTEST.saturating_sub(began.elapsed()));
            match next {
                Next::After(time) => _ = self.wait(time, &[]),
                Next::Before(time) if self.wait(LOOK_AFTER.min(time), &[]) => {}
                Next::Before(time) => _ = self.wait(time.saturating_sub(LOOK_AFTER), &self.notices),
            }
            self.notices.iter().for_each(Notices::drain);
        }
    }

    /// Looks, plans and applies once.
    fn round(&mut self, own: &BTreeSet<u32>) -> Next {
        self.refused.retain(|_, r| r.since.elapsed() < AGAIN_AFTER);
        self.failed.retain(|_, r| r.since.elapsed() < AGAIN_AFTER);
        let looked = self.looker.look(&self.pool.config, self.pool.began.elapsed(), own);
        self.blind = looked.as_ref().err().map(ToString::to_string);
        let Ok(mut seen) = looked else {
            self.show(&[]);
            return Next::Before(LOOK_EVERY);
        };
        for (id, refused) in &self.refused {
            let vf = seen.pfs.get_mut(&id.pf).and_then(|pf| pf.vfs.get_mut(&id.index));
            vf.into_iter().for_each(|vf| vf.refused = Some(refused.what.clone()));
        }
        let (steps, timeout) = self.plan(seen);
        let most_repeats = self.count_repeats(&steps);
        let mut has_applied = false;
        for step in steps {
            if !self.pool.stopping.load(Ordering::SeqCst) {
                has_applied |= self.apply(&step);
            }
        }
        if has_applied { Next::After(STEP_TIME * most_repeats.min(10)) } else { Next::Before(timeout.min(LOOK_EVERY)) }
    }

    /// Takes over what was seen, and plans. Returns the steps, and the time until the leases must be looked at.
    fn plan(&mut self, seen: Seen) -> (Vec<Step>, Duration) {
        let (plan, changes, timeout) = self.pool.observe(seen);
        changes.iter().for_each(log_change);
        self.show(&plan.notices);
        (plan.steps, timeout)
    }

    /// Shows what was seen, and logs new notices.
    fn show(&mut self, planned: &[Notice]) {
        let config = &self.pool.config;
        let is_down = |pf: &&str| !self.looker.roots.is_up(pf) && self.looker.roots.pf_device(pf).exists();
        let down = config.pfs.iter().map(|pf| pf.netdev.as_str()).filter(is_down);
        let down =
            down.map(|pf| format!("PF `{pf}` is down, so its VFs have no link; take it up: ip link set {pf} up"));
        let failed = self.failed.values().map(|f| f.what.clone());
        let notices: Vec<String> =
            planned.iter().map(Notice::to_string).chain(down).chain(failed).chain(self.blind.clone()).collect();
        for notice in notices.iter().filter(|n| !self.logged.contains(*n)) {
            tracing::warn!("VFs: {notice}");
        }
        // A refused step is tried again, and is not worth a line each time.
        let is_refusal = |line: &String| line.starts_with(REFUSAL);
        self.logged.retain(is_refusal);
        self.logged.extend(notices.iter().cloned());
        lock(&self.pool.state).notices = notices;
    }

    /// Counts how often each step was planned one after the other. Returns the largest number.
    fn count_repeats(&mut self, steps: &[Step]) -> u32 {
        let mut repeats = BTreeMap::new();
        for step in steps {
            let name = Shown(step).to_string();
            let count = self.repeats.get(&name).copied().unwrap_or(0) + 1;
            repeats.insert(name, count);
        }
        self.repeats = repeats;
        self.repeats.values().copied().max().unwrap_or(0)
    }

    /// Applies a step. False if it is not tried at present.
    fn apply(&mut self, step: &Step) -> bool {
        let shown = Shown(step).to_string();
        if let Step::Evict { lease } = step {
            tracing::warn!("VFs: {shown}{}", self.pool.users(*lease));
            self.pool.evict(*lease);
            return true;
        }
        // The steps of a VF follow each other.
        if vf_of(step).is_some_and(|vf| self.refused.contains_key(vf)) {
            return false;
        }
        if let Step::Create { pf, .. } = step
            && self.failed.contains_key(pf)
        {
            return false;
        }
        if self.repeats.get(&shown).is_some_and(|n| *n > MOST_REPEATS) {
            self.refuse(step, format!("{shown}: done {MOST_REPEATS} times, without effect"));
            return true;
        }
        tracing::info!("VFs: {shown}");
        lock(&self.pool.state).step = Some((shown, Instant::now()));
        let done = self.looker.apply(step);
        lock(&self.pool.state).step = None;
        if let Err(e) = done {
            self.refuse(step, e.to_string());
        }
        true
    }

    fn refuse(&mut self, step: &Step, what: String) {
        let line = format!("{REFUSAL}{what}");
        if !self.logged.contains(&line) {
            tracing::warn!("VFs: {line}");
            self.logged.insert(line.clone());
        }
        let since = Instant::now();
        match (step, vf_of(step)) {
            (_, Some(vf)) => _ = self.refused.insert(vf.clone(), Refused { what, since }),
            (Step::Create { pf, .. }, _) => _ = self.failed.insert(pf.clone(), Refused { what: line, since }),
            _ => {}
        }
    }

    /// Waits until the pool is woken or there are notices, for at most this time. True if the pool was woken.
    fn wait(&self, most: Duration, notices: &[Notices]) -> bool {
        let fds = notices.iter().map(AsFd::as_fd).chain([self.pool.wake.as_fd()]);
        let mut fds: Vec<PollFd<'_>> = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        let time = Timespec { tv_sec: most.as_secs() as i64, tv_nsec: i64::from(most.subsec_nanos()) };
        let _ = poll(&mut fds, Some(&time));
        rustix::io::read(&self.pool.wake, &mut [0; 8]).is_ok()
    }
}

/// The beginning of a line about a step that the kernel refused.
const REFUSAL: &str = "the kernel refuses: ";

fn log_change(change: &Change) {
    match change {
        Change::Granted { lease, vf, .. } => tracing::info!("VFs: lease {lease} of VF {vf} begins"),
        Change::TimedOut { ticket } => tracing::info!("VFs: request {} has waited too long", ticket.0),
        Change::Ended { lease, vf } => tracing::info!("VFs: lease {lease} of VF {vf} has ended"),
        Change::Returned { lease, vf } => tracing::info!("VFs: VF {vf} of lease {lease} is free again"),
    }
}
