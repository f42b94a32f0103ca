//! The pollers of a worker: threads that run its RNIC while there is work, and sleep while there is none.
//!
//! `policy` decides which poller runs when and on which core; `poller` has the steps of one round.
//!
//! The RNIC is under a lock that is held only briefly. Long copies are jobs, which a poller runs after it has released
//! the RNIC; the system calls of the network happen there, too, and the port has a lock of its own. A thread that needs
//! both locks takes the port's first.

mod policy;
mod poller;
mod sleepers;

use std::collections::HashMap;
use std::io;
use std::net::IpAddr;
use std::ops::Deref;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, RwLock, RwLockReadGuard};

use unirdma_abi as abi;
use unirdma_device::{BackgroundLookup, EventQueues, Pollers, SharedRnic, lock, now_ns};
use unirdma_link::BlockingFd;
use unirdma_rnic::{Arrival, MAX_TORN_DOWN, Output, Rnic, Seed, SessionId, Tx, VrnicId};

use self::poller::Watch;
pub(crate) use self::sleepers::timespec;
use self::sleepers::{Sleeper, Sleepers};

use unirdma_confine::{self as confine, Kind, scheduling};
use unirdma_ipc::config::{EngineConfig, cores};
use unirdma_ipc::counters::PortCounters;

use crate::background::Background;
use crate::capture::Sink;
use crate::liveness::Liveness;
use crate::port::Port;

/// Most pollers that are started with the load by default.
const MOST_POLLERS: usize = 8;

/// The RNIC and the threads that run it.
pub struct Engine {
    /// The RNIC.
    pub rnic: Arc<SharedRnic>,
    events: RwLock<HashMap<SessionId, Arc<EventQueues>>>,
    /// Held for reading by threads that have taken outputs from the RNIC and not delivered them yet.
    delivering: RwLock<()>,
    /// Where pollers sleep.
    sleepers: Sleepers,
    stopping: AtomicBool,
    signs: CachePadded<PollHints>,
    /// [`PollHints::changes`] at the time when the twins were given their doorbells.
    twins_have: AtomicU64,
    /// When pollers on shared cores last found work, ns.
    worked_ns: AtomicU64,
    /// The way to other hosts.
    net: Option<Mutex<Net>>,
    /// Jobs wait for a poller.
    jobs_wait: CachePadded<AtomicBool>,
    /// Runs background lookups of commands. Set together with `on_release`.
    clerk: OnceLock<Arc<Background>>,
    /// The RNIC has dead objects to free.
    has_dead: AtomicBool,
    /// Sessions that the control thread has to serve, because their delayed command can be answered or, in the RFC
    /// mode, completions wait.
    released: Mutex<Vec<SessionId>>,
    on_release: OnceLock<Box<dyn Fn() + Send + Sync>>,
    /// IP multicast groups that the port should receive from; taken by [`Engine::wanted_groups`].
    wanted_groups: Mutex<Option<Vec<IpAddr>>>,
    /// The port is polled until this time, and once after it in case pollers had no turn in between, ns. 0: it is not
    /// polled, and its descriptors wake a poller.
    port_until_ns: AtomicU64,
    pub(crate) capture: Mutex<Option<Sink>>,
    idle_ns: u64,
    shares_cores: bool,
    /// Number of pollers in use. Pollers with higher numbers sleep until there is more work.
    wanted: AtomicUsize,
    /// Least and most pollers.
    pollers: (usize, usize),
    /// Since when rounds have left work over, ns; 0 if the last one has not.
    backlog_since_ns: AtomicU64,
    pub(crate) liveness: Liveness,
}

/// A value that one thread changes often while others read it, in cache lines of its own. Two lines, since processors
/// fetch lines in pairs.
#[derive(Default)]
#[repr(align(128))]
pub(crate) struct CachePadded<T>(T);

impl<T> Deref for CachePadded<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.0
    }
}

/// State of the RNIC that pollers can read without taking the RNIC.
struct PollHints {
    /// [`unirdma_rnic::Core::active_changes`].
    changes: AtomicU64,
    runnable: AtomicBool,
    due_ns: AtomicU64,
}

/// Most rounds of the RNIC that a command waits for, so that sends posted before it are executed first. A round
/// executes about 12 datagrams. If many vRNICs have work, or the network accepts no packets, the remaining sends are
/// lost.
const CATCH_UP_ROUNDS: u32 = 256;
/// Time that a command waits for a job that a poller runs, before it checks again.
const POLLER_HAS_IT: std::time::Duration = std::time::Duration::from_micros(20);

impl Engine {
    /// Starts the pollers. `port` leads to other hosts.
    ///
    /// # Errors
    /// Errors of epoll, eventfd and thread creation.
    pub fn start(c: &EngineConfig, port: Option<Box<dyn Port>>) -> io::Result<Arc<Self>> {
        let cores = cores();
        let shares_cores = c.shares_cores();
        let (wanted, pollers) = match c.pollers {
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
        let wakes = if shares_cores { abi::MAX_WAKES.min(pollers as u32) } else { 1 };
        let mut rnic = Rnic::new(seed, wakes);
        rnic.set_helped(wanted > 1);
        let sleepers = Sleepers::new(pollers)?;
        for fd in port.iter().flat_map(|p| p.descriptors()) {
            sleepers.hear_port(fd, shares_cores)?;
        }
        let engine = Arc::new(Engine {
            rnic: Arc::new(SharedRnic::new(rnic)),
            events: RwLock::default(),
            delivering: RwLock::default(),
            sleepers,
            stopping: AtomicBool::new(false),
            signs: CachePadded(PollHints {
                changes: AtomicU64::new(u64::MAX),
                runnable: AtomicBool::new(false),
                due_ns: AtomicU64::new(u64::MAX),
            }),
            twins_have: AtomicU64::new(0),
            worked_ns: AtomicU64::new(0),
            net: port.map(|port| Mutex::new(Net { port, out: Tx::default(), asked_ns: 0 })),
            jobs_wait: CachePadded::default(),
            clerk: OnceLock::new(),
            has_dead: AtomicBool::new(false),
            released: Mutex::default(),
            on_release: OnceLock::new(),
            wanted_groups: Mutex::default(),
            port_until_ns: AtomicU64::new(0),
            capture: Mutex::default(),
            idle_ns: c.spin_us * 1000,
            shares_cores,
            wanted: AtomicUsize::new(wanted),
            pollers: (wanted, pollers),
            backlog_since_ns: AtomicU64::new(0),
            liveness: Liveness::new(pollers),
        });
        for i in 0..pollers {
            engine.seat_thread(i)?;
        }
        if shares_cores {
            engine.start_twins(&cores)?;
        }
        Ok(engine)
    }

    /// Starts a thread that takes over seat `i` from the thread that has it.
    pub(crate) fn seat_thread(self: &Arc<Self>, i: usize) -> io::Result<()> {
        let (e, cores) = (self.clone(), cores());
        let core = self.shares_cores.then(|| cores[i % cores.len()]);
        let thread = self.liveness.give(i);
        let builder = std::thread::Builder::new().name(format!("poller{i}"));
        let started = builder.spawn(move || {
            core.into_iter().for_each(scheduling::pin);
            confine::thread(Kind::Poller);
            let mut watch = Watch::new(i, thread);
            e.poll(&mut watch);
            e.leave(&mut watch);
        });
        if started.is_err() {
            self.liveness.give_back(i);
        }
        started.map(|_| ())
    }

    /// True if control work of a vRNIC delays others: both need the RNIC, and another vRNIC of this worker has work or
    /// has just had some.
    pub(crate) fn delays_others(&self, vrnic: VrnicId) -> bool {
        self.rnic.lock().has_work_for_others(Some(vrnic))
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }

    /// Ends the pollers.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        self.sleepers.all().for_each(Sleeper::call);
        self.end_twins();
        self.liveness.wake();
    }

    /// The present time, as [`now_ns`].
    pub fn now(&self) -> u64 {
        now_ns()
    }

    /// Sets the callback for new data in [`Engine::released`] or [`Engine::wanted_groups`]. Only the first call has an
    /// effect.
    pub fn set_on_release(self: &Arc<Self>, f: Box<dyn Fn() + Send + Sync>) {
        let _ = self.on_release.set(f);
        // The engine owns the clerk, so the clerk's reference to the engine is weak.
        let engine = Arc::downgrade(self);
        let tell = move |session| engine.upgrade().into_iter().for_each(|e| e.release(session));
        let _ = self.clerk.set(Background::new(Box::new(tell)));
    }

    /// Takes the list of sessions that the control thread has to serve.
    pub fn released(&self) -> Vec<SessionId> {
        std::mem::take(&mut lock(&self.released))
    }

    /// Registers the queues to which a session's events are delivered.
    pub fn add_session(&self, s: SessionId, events: Arc<EventQueues>) {
        self.events.write().unwrap_or_else(|e| e.into_inner()).insert(s, events);
    }

    /// Removes the event queues of a session.
    pub fn remove_session(&self, s: SessionId) {
        self.events.write().unwrap_or_else(|e| e.into_inner()).remove(&s);
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

    /// True if the RNIC has dead objects to free: [`Engine::after_command`] must be called soon, and repeatedly.
    pub(crate) fn has_dead(&self) -> bool {
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
            (r.is_busy() || r.next_timeout().is_some(), self.begin_delivery(&out), r.multicast_changes())
        };
        if let Some(groups) = groups {
            self.want_groups(groups);
        }
        self.deliver(&mut out);
        drop(delivering);
        if busy {
            self.call_if_all_sleep();
        }
    }

    /// Returns a guard if there are outputs. It must be taken while the RNIC is still locked, and held until the
    /// outputs are delivered.
    fn begin_delivery(&self, out: &[Output]) -> Option<RwLockReadGuard<'_, ()>> {
        (!out.is_empty()).then(|| self.delivering.read().unwrap_or_else(|e| e.into_inner()))
    }

    /// Sets the IP multicast groups that plain devices may send to. The port leaves all others.
    fn want_groups(&self, groups: Vec<IpAddr>) {
        let Some(net) = &self.net else { return };
        lock(net).port.leave_others(&groups);
        *lock(&self.wanted_groups) = Some(groups);
        self.on_release.get().into_iter().for_each(|f| f());
    }

    /// The IP multicast groups that the port should receive from, if they have changed since the last call.
    pub fn wanted_groups(&self) -> Option<Vec<IpAddr>> {
        lock(&self.wanted_groups).take()
    }

    /// Adds sockets to the port, by which packets to IP multicast groups arrive.
    pub fn join(&self, sockets: Vec<(IpAddr, OwnedFd)>) {
        let Some(net) = &self.net else { return };
        let mut net = lock(net);
        net.port.join(sockets);
        for fd in net.port.descriptors() {
            // For descriptors that are watched already, this fails.
            let _ = self.sleepers.hear_port(fd, self.shares_cores);
        }
    }

    /// Handles a datagram from another host, or from another group whose number is `source`.
    pub fn datagram(&self, from: IpAddr, group: u32, source: Option<u32>, packet: &[u8]) {
        let now = self.now();
        self.rnic.lock().handle_packet(now, &Arrival { source, ..Arrival::inside(from, group) }, packet);
        self.after_command();
    }

    /// Asks the control thread to serve a session.
    fn release(&self, session: SessionId) {
        lock(&self.released).push(session);
        self.on_release.get().into_iter().for_each(|f| f());
    }

    fn deliver(&self, out: &mut Vec<Output>) {
        if out.is_empty() {
            return;
        }
        let events = self.events.read().unwrap_or_else(|e| e.into_inner());
        for o in out.drain(..) {
            let (session, queue, event) = match o {
                Output::Released { session } => {
                    self.release(session);
                    continue;
                }
                Output::Completion { session, queue, cqn, asked } => {
                    if events.get(&session).is_some_and(|q| q.complete(queue, cqn, asked)) {
                        self.release(session);
                    }
                    continue;
                }
                Output::Connection { session, queue } => {
                    let e = abi::Event { kind: abi::EVENT_CM, handle: 0, reserved: 0 };
                    (session, abi::VQ_COMP_FIRST + u32::from(queue), e)
                }
                Output::Async { session, kind, handle } => {
                    (session, abi::VQ_ASYNC, abi::Event { kind: kind as u32, handle, reserved: 0 })
                }
            };
            if let Some(q) = events.get(&session) {
                q.deliver(queue, event);
            }
        }
    }

    /// Publishes the RNIC's state for pollers.
    fn publish(&self, r: &Rnic) {
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

    fn port_is_polled(&self) -> bool {
        self.port_until_ns.load(Ordering::Relaxed) != 0
    }

    /// Polls the port for a while. On shared cores it is polled only once more, since a poller that spins would keep
    /// others from its core.
    fn poll_port(&self, now: u64) {
        let ns = if self.shares_cores { 1 } else { self.idle_ns.max(policy::ANSWER_NS) };
        self.port_until_ns.store(now + ns, Ordering::Relaxed);
    }

    /// Handles incoming packets if the port is polled; true if there were any.
    fn receive(&self, net: &mut Net, now: u64) -> bool {
        if !self.port_is_polled() {
            return false;
        }
        net.asked_ns = now;
        let any = net.port.receive(&mut |a, bytes| self.rnic.brief_lock().handle_packet(now, &a, bytes));
        if any {
            self.poll_port(now);
        } else if now >= self.port_until_ns.load(Ordering::Relaxed) {
            self.port_until_ns.store(0, Ordering::Relaxed);
        }
        any
    }

    /// Sends the packets that were taken from the RNIC, until the network accepts no more.
    fn send(&self, net: &mut Net, now: u64) {
        if !net.out.packets().is_empty() {
            net.port.send(&mut net.out);
            self.poll_port(now);
        }
    }

    /// Counters of the port.
    pub fn port_counters(&self) -> Option<PortCounters> {
        self.net.as_ref().map(|n| lock(n).port.counters())
    }

    /// Number of pollers in use.
    pub fn wanted(&self) -> usize {
        self.wanted.load(Ordering::Relaxed)
    }
}

impl Pollers for Engine {
    fn settle(&self) {
        self.after_command();
        drop(self.delivering.write().unwrap_or_else(|e| e.into_inner()));
    }

    fn catch_up(&self, s: SessionId, qpn: Option<u32>) {
        let mut scratch = Vec::new();
        for _ in 0..CATCH_UP_ROUNDS {
            let job = {
                let mut r = self.rnic.lock();
                if !r.is_behind(now_ns(), s, qpn) {
                    return;
                }
                let now = r.since_ns();
                r.poll_by(now, now_ns);
                r.take_brief_job()
            };
            match job {
                Some(mut job) => {
                    scratch.resize(SCRATCH_BYTES, 0);
                    job.run(&mut scratch, now_ns);
                    self.rnic.lock().end_job(job);
                }
                // A poller may be running the job.
                None => std::thread::sleep(POLLER_HAS_IT),
            }
        }
    }

    fn run_in_background(&self, vrnic: VrnicId, s: SessionId, lookup: BackgroundLookup) {
        match self.clerk.get() {
            Some(clerk) => clerk.take(vrnic, s, lookup),
            None => lookup.run(),
        }
    }
}

/// The way to other hosts.
struct Net {
    port: Box<dyn Port>,
    /// Packets that were taken from the RNIC and are not sent yet.
    out: Tx,
    /// When the port was last asked for packets, ns.
    asked_ns: u64,
}

/// Size of a poller's buffer for copies between two processes, bytes.
const SCRATCH_BYTES: usize = 64 << 10;

#[cfg(test)]
mod tests;
