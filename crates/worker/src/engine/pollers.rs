//! The pollers together: their shared state, and what wakes them.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use unirdma_abi as abi;
use unirdma_device::{SharedRnic, now_ns};
use unirdma_ipc::config::{EngineConfig, cores};
use unirdma_link::BlockingFd;
use unirdma_rnic::{MAX_TORN_DOWN, Rnic, Seed, SessionId};

use super::delivery::EventDelivery;
use super::port_io::PortIo;
use super::sleepers::{Sleeper, Sleepers};
use crate::cache_padded::CachePadded;
use crate::liveness::Liveness;
use crate::port::Port;

/// Most pollers that are started with the load by default.
const MOST_POLLERS: usize = 8;
/// Time in which a program answers, ns. After a wake-up by its twin, and after its last work, a poller keeps looking
/// for this time: its core was idle, and 8-byte WRITEs one by one take 0.9 us instead of 7 us. A dedicated poller polls
/// the port for at least this time after a packet.
pub(super) const ANSWER_NS: u64 = 20_000;

/// The pollers of a worker, and what they use in a round.
pub(crate) struct Pollers {
    /// The RNIC.
    pub rnic: Arc<SharedRnic>,
    /// Where the RNIC's events go.
    pub delivery: EventDelivery,
    /// The way to other hosts.
    pub port: Option<PortIo>,
    /// What the watcher knows of the worker's threads.
    pub liveness: Liveness,
    /// Where pollers sleep.
    pub(super) sleepers: Sleepers,
    stopping: AtomicBool,
    pub(super) signs: CachePadded<PollHints>,
    /// [`PollHints::changes`] at the time when the twins were given their doorbells.
    pub(super) twins_have: AtomicU64,
    /// When pollers on shared cores last found work, ns.
    pub(super) worked_ns: AtomicU64,
    /// Jobs wait for a poller.
    pub(super) jobs_wait: CachePadded<AtomicBool>,
    /// The RNIC has dead objects to free.
    has_dead: AtomicBool,
    pub(super) idle_ns: u64,
    pub(super) shares_cores: bool,
    /// Number of pollers in use. Pollers with higher numbers sleep until there is more work.
    pub(super) wanted: AtomicUsize,
    /// Least and most pollers.
    pub(super) range: (usize, usize),
    /// Since when rounds have left work over, ns; 0 if the last one has not.
    pub(super) backlog_since_ns: AtomicU64,
}

/// State of the RNIC that pollers can read without taking the RNIC.
pub(super) struct PollHints {
    /// [`unirdma_rnic::Core::active_changes`].
    pub changes: AtomicU64,
    pub runnable: AtomicBool,
    pub due_ns: AtomicU64,
}

impl Pollers {
    /// Starts the pollers. `port` leads to other hosts.
    ///
    /// # Errors
    /// Errors of epoll, eventfd and thread creation.
    pub fn start(c: &EngineConfig, port: Option<Box<dyn Port>>) -> io::Result<Arc<Self>> {
        let cores = cores();
        let shares_cores = c.shares_cores();
        let (wanted, most) = match c.pollers {
            None if shares_cores => (cores.len(), cores.len()),
            None => (1, (cores.len() / 2).clamp(1, MOST_POLLERS)),
            Some((fewest, most)) => (fewest.max(1), most.max(fewest).max(1)),
        };
        let seed = match c.seed {
            Some(s) => Seed::from(s),
            None => {
                let mut b = [0; 32];
                getrandom::fill(&mut b)?;
                Seed::from(b)
            }
        };
        // On dedicated cores, one poller receives all kicks.
        let wakes = if shares_cores { abi::MAX_WAKES.min(most as u32) } else { 1 };
        let mut rnic = Rnic::new(seed, wakes);
        rnic.set_helped(wanted > 1);
        let sleepers = Sleepers::new(most)?;
        for fd in port.iter().flat_map(|p| p.descriptors()) {
            sleepers.hear_port(fd, shares_cores)?;
        }
        let idle_ns = c.spin_us * 1000;
        // On shared cores the port is polled only once more after a packet, since a poller that spins would keep others
        // from its core.
        let poll_port_ns = if shares_cores { 1 } else { idle_ns.max(ANSWER_NS) };
        let pollers = Arc::new(Pollers {
            rnic: Arc::new(SharedRnic::new(rnic)),
            delivery: EventDelivery::default(),
            port: port.map(|port| PortIo::new(port, poll_port_ns)),
            liveness: Liveness::new(most),
            sleepers,
            stopping: AtomicBool::new(false),
            signs: CachePadded::new(PollHints {
                changes: AtomicU64::new(u64::MAX),
                runnable: AtomicBool::new(false),
                due_ns: AtomicU64::new(u64::MAX),
            }),
            twins_have: AtomicU64::new(0),
            worked_ns: AtomicU64::new(0),
            jobs_wait: CachePadded::default(),
            has_dead: AtomicBool::new(false),
            idle_ns,
            shares_cores,
            wanted: AtomicUsize::new(wanted),
            range: (wanted, most),
            backlog_since_ns: AtomicU64::new(0),
        });
        for i in 0..most {
            pollers.start_in_slot(i)?;
        }
        if shares_cores {
            pollers.start_twins(&cores)?;
        }
        Ok(pollers)
    }

    /// Ends the pollers.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        self.sleepers.all().for_each(Sleeper::call);
        self.end_twins();
        self.liveness.wake();
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }

    /// The present time, as [`now_ns`].
    pub(super) fn now(&self) -> u64 {
        now_ns()
    }

    /// Watches the kicks of a session on one of its wake channels. The descriptor is edge-triggered.
    ///
    /// # Errors
    /// `epoll_ctl(2)` refuses the descriptor.
    pub fn watch(&self, s: SessionId, channel: usize, kick: Arc<BlockingFd>) -> io::Result<()> {
        self.sleepers.of(channel).hear(s.number(), kick)
    }

    /// Stops watching the kicks of a session on a wake channel.
    pub fn unwatch(&self, s: SessionId, channel: usize, kick: &Arc<BlockingFd>) {
        self.sleepers.of(channel).forget(s.number(), kick);
    }

    /// Watches a descriptor of the port.
    ///
    /// # Errors
    /// `epoll_ctl(2)` refuses the descriptor.
    pub(super) fn watch_port(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        self.sleepers.hear_port(fd, self.shares_cores)
    }

    /// True if the RNIC has dead objects to free: [`Pollers::after_command`] must be called soon, and repeatedly.
    pub fn has_dead(&self) -> bool {
        self.has_dead.load(Ordering::Relaxed)
    }

    /// To be called after a command: frees some dead objects, delivers the command's events, and wakes the pollers if
    /// they have work.
    pub fn after_command(&self) {
        let mut out = Vec::new();
        let (busy, delivering, groups) = {
            let mut r = self.rnic.lock();
            self.has_dead.store(r.tear_down(MAX_TORN_DOWN), Ordering::Relaxed);
            r.drain_outputs(&mut out);
            self.publish(&r);
            (r.is_busy() || r.next_timeout().is_some(), self.delivery.begin(&out), r.multicast_changes())
        };
        if let (Some(groups), Some(port)) = (groups, &self.port) {
            port.want_groups(groups);
            self.delivery.notify();
        }
        self.delivery.deliver(&mut out);
        drop(delivering);
        if busy {
            self.call_if_all_sleep();
        }
    }

    /// Publishes the RNIC's state for pollers.
    pub(super) fn publish(&self, r: &Rnic) {
        self.signs.changes.store(r.active_changes(), Ordering::Release);
        self.signs.runnable.store(r.has_runnable(), Ordering::Release);
        self.signs.due_ns.store(r.next_timeout().unwrap_or(u64::MAX), Ordering::Release);
        // Pollers that read this flag keep its cache line until it is stored to, so it is stored only if it changes.
        // Only the holder of the RNIC stores to it.
        let jobs_wait = r.has_jobs();
        if self.jobs_wait.load(Ordering::Relaxed) != jobs_wait {
            self.jobs_wait.store(jobs_wait, Ordering::Release);
        }
    }

    #[inline]
    pub(super) fn port_is_polled(&self) -> bool {
        self.port.as_ref().is_some_and(PortIo::is_polled)
    }

    /// Number of pollers in use.
    pub(super) fn wanted(&self) -> usize {
        self.wanted.load(Ordering::Relaxed)
    }
}
