//! The pollers of a worker: threads that run its RNIC while there is work and sleep while there is none.
//!
//! On a machine with few cores there is one poller for each core, pinned, and everybody yields: an
//! application that has posted yields to the poller of its own core, so a request never waits for a
//! peer that spins on the other core. With more cores one poller spins on its own and nobody yields.
//! The RNIC has one owner at a time, under a lock that is held for moments: long copies are jobs, which a poller does after it
//! has given the RNIC back, and so are the system calls of the network, for which the port has a lock of its own. Whoever wants
//! both locks takes the port's first.

use std::collections::HashMap;
use std::io;
use std::mem::MaybeUninit;
use std::net::IpAddr;
use std::ops::Deref;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, RwLock, RwLockReadGuard};

use rustix::event::{EventfdFlags, epoll};
use unirdma_abi as abi;
use unirdma_device::{Errand, EventQueues, Pollers, RnicGuard, SharedRnic, lock, now_ns};
use unirdma_rnic::{Arrival, Bells, Job, Output, Rnic, Seed, SessionId, Tx, VnicId};

use crate::clerk::Clerk;
use crate::confine::{self, Kind};
use crate::port::{Port, PortCounters};
use crate::seats::{self, Seats};
use crate::tap::Sink;

/// How the pollers run.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub struct EngineConfig {
    /// Whether pollers share their cores with applications.
    pub polling: Polling,
    /// Fewest and most threads: more than the fewest come and go with the load. `None`: one for each core if they share them, else
    /// one to half as many as cores.
    pub pollers: Option<(usize, usize)>,
    /// How long a session is polled after its last doorbell, microseconds.
    pub spin_us: u64,
    /// Determines QPNs and keys; `None`: the kernel's random numbers.
    pub seed: Option<u64>,
}

impl Default for EngineConfig {
    fn default() -> Self {
        EngineConfig { polling: Polling::Auto, pollers: None, spin_us: 500, seed: None }
    }
}

impl EngineConfig {
    /// Pollers and programs that find nothing to do yield to each other on this machine.
    pub(crate) fn yields(&self) -> bool {
        match self.polling {
            Polling::Auto => cores().len() <= FEW_CORES,
            polling => polling == Polling::Shared,
        }
    }
}

/// Whether pollers share their cores with applications.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Polling {
    /// [`Polling::Shared`] on few cores, else [`Polling::Dedicated`].
    #[default]
    Auto,
    /// One poller for each core. Pollers and programs that find nothing to do yield to each other.
    Shared,
    /// Pollers have cores for themselves, and nobody yields.
    Dedicated,
}

/// Cores up to which pollers share them with the applications, unless it is said otherwise.
const FEW_CORES: usize = 3;
/// Most pollers that come with the load.
const MOST_POLLERS: usize = 8;
/// Work must be left over for so long before another poller comes, nanoseconds.
const BACKLOG_NS: u64 = 50_000;
/// A poller that came with the load goes when it has found nothing for so long, nanoseconds.
const SPARE_NS: u64 = 1_000_000;

/// The RNIC and the threads that run it.
pub struct Engine {
    /// The RNIC.
    pub rnic: Arc<SharedRnic>,
    events: RwLock<HashMap<SessionId, Arc<EventQueues>>>,
    /// Held, shared, by whoever has outputs of the RNIC and has not delivered them yet.
    delivering: RwLock<()>,
    epoll: OwnedFd,
    wake: OwnedFd,
    /// Poller 0 is in, or about to enter, epoll_wait.
    sleeping: AtomicBool,
    stopping: AtomicBool,
    signs: Apart<Signs>,
    busy: Apart<Busy>,
    /// Counts the times the other pollers were woken; they sleep until it moves.
    wakes: Mutex<u64>,
    woken: Condvar,
    /// Other pollers that sleep.
    asleep: AtomicUsize,
    /// The way to other hosts.
    net: Option<Mutex<Net>>,
    /// Jobs wait for a poller.
    jobs_wait: Apart<AtomicBool>,
    /// Does errands of commands, once somebody is to be told of them.
    clerk: OnceLock<Arc<Clerk>>,
    /// Sessions that the control thread has to look at, since their delayed command can be answered or, in the RFC mode, completions
    /// wait; and whom to tell.
    released: Mutex<Vec<SessionId>>,
    on_release: OnceLock<Box<dyn Fn() + Send + Sync>>,
    /// IP multicast groups that the port should hear, until somebody asks.
    wanted_groups: Mutex<Option<Vec<IpAddr>>>,
    /// After this time the port is polled once more, in case pollers had no turn since, and then no longer. 0: it is not
    /// polled, and its descriptors wake poller 0.
    port_until_ns: AtomicU64,
    pub(crate) capture: Mutex<Option<Sink>>,
    idle_ns: u64,
    yields: bool,
    /// Pollers that work. Those beyond sleep until there is more work than these can do.
    wanted: AtomicUsize,
    /// Fewest and most of them.
    pollers: (usize, usize),
    /// Since when work was left over; 0 while none is.
    backlog_since_ns: AtomicU64,
    seats: Seats,
}

/// Something that one poller changes often while others look at it, in cache lines that nothing else shares. Two of them, since processors
/// fetch lines in pairs.
#[derive(Default)]
#[repr(align(128))]
struct Apart<T>(T);

impl<T> Deref for Apart<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.0
    }
}

/// What the RNIC waits for, so that pollers can look without taking it.
struct Signs {
    /// [`unirdma_rnic::Core::active_changes`].
    changes: AtomicU64,
    runnable: AtomicBool,
    due_ns: AtomicU64,
}

/// Which poller did much in its last round, and until when the others leave it the RNIC.
#[derive(Default)]
struct Busy {
    poller: AtomicUsize,
    until_ns: AtomicU64,
}

/// Rounds between two looks at the kicks of sleeping sessions: while nothing is found and each round
/// yields, while nothing is found and rounds are short, and while busy.
const KICK_ROUNDS_YIELDING: u32 = 8;
const KICK_ROUNDS_SPINNING: u32 = 256;
const KICK_ROUNDS_BUSY: u32 = 64;
/// Looks at the doorbells between two rounds that find idle sessions and let them sleep.
const LOOKS_BETWEEN_ROUNDS: u32 = 64;
/// Rounds of the RNIC, each with the lock for itself, before their events are delivered.
const ROUNDS_AT_ONCE: u32 = 8;
/// Yields of a poller to a thread that wants the RNIC, before it takes the RNIC again.
const MOST_PAUSES: u32 = 16;
/// Token of the engine's own eventfd; sessions have 32-bit tokens.
const WAKE: u64 = u64::MAX;
/// Token of the port's descriptors.
const PORT: u64 = u64::MAX - 1;
/// How long a busy poller keeps others off its core, nanoseconds.
const SHARE_NS: u64 = 2_000_000;
/// The same while whoever it lets in gives the core back soon.
const SHORT_SHARE_NS: u64 = 100_000;
/// A pause that took so long was taken by somebody who computes, nanoseconds.
const LONG_PAUSE_NS: u64 = 100_000;
/// Rounds that took so long together did much, nanoseconds: more than a few programs that each wait for an answer can ask for.
const LONG_ROUND_NS: u64 = 1_500;
/// How long its poller then keeps the RNIC, nanoseconds.
const KEEP_NS: u64 = 15_000;
/// Most rounds of the RNIC that a command waits for, so that sends posted before it are executed before it. A round is worth
/// some 25 datagrams. If many vRNICs have work, or the network takes no packets, the rest of the sends is lost.
const CATCH_UP_ROUNDS: u32 = 128;
/// A round that has work of the RNIC does not ask the port for packets if it was asked so short a time ago, nanoseconds: a reply leaves
/// one system call earlier.
const ASKED_NS: u64 = 3_000;
/// Least time that the port is polled after a packet, nanoseconds.
const PORT_POLL_NS: u64 = 20_000;

impl Engine {
    /// Starts the pollers; `port` leads to other hosts.
    ///
    /// # Errors
    /// Those of epoll, eventfd and thread creation.
    pub fn start(c: &EngineConfig, port: Option<Box<dyn Port>>) -> io::Result<Arc<Self>> {
        let cores = cores();
        let yields = c.yields();
        let (wanted, pollers) = match c.pollers {
            None if yields => (cores.len(), cores.len()),
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
        let mut rnic = Rnic::new(seed, if yields { abi::DB_YIELD } else { 0 });
        rnic.set_helped(wanted > 1);
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(&epoll, &wake, epoll::EventData::new_u64(WAKE), epoll::EventFlags::IN | epoll::EventFlags::ET)?;
        for fd in port.iter().flat_map(|p| p.descriptors()) {
            epoll::add(&epoll, fd, epoll::EventData::new_u64(PORT), epoll::EventFlags::IN)?;
        }
        let engine = Arc::new(Engine {
            rnic: Arc::new(SharedRnic::new(rnic)),
            events: RwLock::default(),
            delivering: RwLock::default(),
            epoll,
            wake,
            sleeping: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
            signs: Apart(Signs {
                changes: AtomicU64::new(u64::MAX),
                runnable: AtomicBool::new(false),
                due_ns: AtomicU64::new(u64::MAX),
            }),
            busy: Apart::default(),
            wakes: Mutex::new(0),
            woken: Condvar::new(),
            asleep: AtomicUsize::new(0),
            net: port.map(|port| Mutex::new(Net { port, out: Tx::default(), asked_ns: 0 })),
            jobs_wait: Apart::default(),
            clerk: OnceLock::new(),
            released: Mutex::default(),
            on_release: OnceLock::new(),
            wanted_groups: Mutex::default(),
            port_until_ns: AtomicU64::new(0),
            capture: Mutex::default(),
            idle_ns: c.spin_us * 1000,
            yields,
            wanted: AtomicUsize::new(wanted),
            pollers: (wanted, pollers),
            backlog_since_ns: AtomicU64::new(0),
            seats: Seats::new(pollers),
        });
        for i in 0..pollers {
            engine.seat_thread(i)?;
        }
        let e = engine.clone();
        std::thread::Builder::new().name("watcher".into()).spawn(move || {
            confine::thread(Kind::Watcher);
            seats::watch(&e);
        })?;
        Ok(engine)
    }

    /// Starts a thread that takes the seat of poller `i`, in the place of the one that has it.
    pub(crate) fn seat_thread(self: &Arc<Self>, i: usize) -> io::Result<()> {
        let (e, cores) = (self.clone(), cores());
        let core = self.yields.then(|| cores[i % cores.len()]);
        let (thread, before) = self.seats.give(i);
        let builder = std::thread::Builder::new().name(format!("poller{i}"));
        let started = builder.spawn(move || {
            if let Some(core) = core {
                let mut set = rustix::thread::CpuSet::new();
                set.set(core);
                let _ = rustix::thread::sched_setaffinity(None, &set);
            }
            confine::thread(Kind::Poller);
            let mut watch = Watch::new(i, thread);
            if i == 0 {
                e.first_poller(&mut watch)
            } else {
                e.other_poller(&mut watch)
            }
            e.leave(&mut watch);
        });
        if started.is_err() {
            self.seats.give_back(i, before);
        }
        started.map(|_| ())
    }

    pub(crate) fn seats(&self) -> &Seats {
        &self.seats
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }

    /// Ends the pollers.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        self.kick();
        self.wake_others();
        self.seats.wake_watcher();
    }

    /// The time of [`now_ns`].
    pub fn now(&self) -> u64 {
        now_ns()
    }

    /// `f` is called whenever [`Engine::released`] or [`Engine::wanted_groups`] has something new. Once.
    pub fn set_on_release(self: &Arc<Self>, f: Box<dyn Fn() + Send + Sync>) {
        let _ = self.on_release.set(f);
        // The engine has the clerk, not the other way round.
        let engine = Arc::downgrade(self);
        let tell = move |session| engine.upgrade().into_iter().for_each(|e| e.release(session));
        let _ = self.clerk.set(Clerk::new(Box::new(tell)));
    }

    /// The sessions that the control thread has to look at.
    pub fn released(&self) -> Vec<SessionId> {
        std::mem::take(&mut lock(&self.released))
    }

    /// Tells the pollers where a session's events go.
    pub fn add_session(&self, s: SessionId, events: Arc<EventQueues>) {
        self.events.write().unwrap_or_else(|e| e.into_inner()).insert(s, events);
    }

    /// Forgets a session.
    pub fn remove_session(&self, s: SessionId) {
        self.events.write().unwrap_or_else(|e| e.into_inner()).remove(&s);
    }

    /// Listens to a session's wake kicks, by a descriptor that is watched for edges.
    ///
    /// # Errors
    /// `epoll_ctl(2)` refuses what cannot be polled.
    pub fn watch(&self, s: SessionId, kick: BorrowedFd<'_>) -> io::Result<()> {
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        Ok(epoll::add(&self.epoll, kick, epoll::EventData::new_u64(s.number()), flags)?)
    }

    /// Stops listening to a session's wake kicks.
    pub fn unwatch(&self, kick: BorrowedFd<'_>) {
        let _ = epoll::delete(&self.epoll, kick);
    }

    /// After a command: delivers what it caused and wakes the pollers if it left them work.
    pub fn after_command(&self) {
        let mut out = Vec::new();
        let (busy, delivering, groups) = {
            let mut r = self.rnic.lock();
            r.drain_outputs(&mut out);
            self.publish(&r);
            (r.is_busy() || r.next_timeout().is_some(), self.begin_delivery(&out), r.multicast_changes())
        };
        if let Some(groups) = groups {
            self.want_groups(groups);
        }
        self.deliver(&mut out);
        drop(delivering);
        if busy && self.sleeping.load(Ordering::SeqCst) {
            self.kick();
        }
    }

    /// To be held from the moment when the RNIC, which is still locked, has given outputs until they are delivered.
    fn begin_delivery(&self, out: &[Output]) -> Option<RwLockReadGuard<'_, ()>> {
        (!out.is_empty()).then(|| self.delivering.read().unwrap_or_else(|e| e.into_inner()))
    }

    /// Notes which IP multicast groups plain devices may send to. The port hears no others any more.
    fn want_groups(&self, groups: Vec<IpAddr>) {
        let Some(net) = &self.net else { return };
        lock(net).port.leave_others(&groups);
        *lock(&self.wanted_groups) = Some(groups);
        self.on_release.get().into_iter().for_each(|f| f());
    }

    /// The IP multicast groups that the port should hear, if others than at the last call.
    pub fn wanted_groups(&self) -> Option<Vec<IpAddr>> {
        lock(&self.wanted_groups).take()
    }

    /// Lets the port hear IP multicast groups by these sockets.
    pub fn join(&self, sockets: Vec<(IpAddr, OwnedFd)>) {
        let Some(net) = &self.net else { return };
        let mut net = lock(net);
        net.port.join(sockets);
        for fd in net.port.descriptors() {
            // Those that were there before are watched already.
            let _ = epoll::add(&self.epoll, fd, epoll::EventData::new_u64(PORT), epoll::EventFlags::IN);
        }
    }

    /// A datagram came from another host, or from another group; `source` is then that group's number.
    pub fn datagram(&self, from: IpAddr, group: u32, source: Option<u32>, packet: &[u8]) {
        let now = self.now();
        let starved = {
            let mut r = self.rnic.lock();
            r.handle_packet(now, &Arrival { source, ..Arrival::inside(from, group) }, packet);
            r.take_starved()
        };
        self.after_command();
        if starved {
            self.pause();
        }
    }

    fn kick(&self) {
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// The control thread looks at a session.
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

    /// Notes what the RNIC waits for.
    fn publish(&self, r: &Rnic) {
        self.signs.changes.store(r.active_changes(), Ordering::Release);
        self.signs.runnable.store(r.has_runnable(), Ordering::Release);
        self.signs.due_ns.store(r.next_timeout().unwrap_or(u64::MAX), Ordering::Release);
        // The pollers that look at this have its cache line until it is stored to, so it is stored only when it changes. Nobody stores
        // in between, since only who has the RNIC does.
        let jobs_wait = r.has_jobs();
        if self.jobs_wait.load(Ordering::Relaxed) != jobs_wait {
            self.jobs_wait.store(jobs_wait, Ordering::Release);
        }
    }

    /// True if the RNIC must be taken, whatever the port has: a doorbell rang, time is due, or `watch` is out of date.
    #[inline]
    fn needs_round(&self, watch: &mut Watch) -> bool {
        watch.looks = watch.looks.wrapping_add(1);
        watch.changes != self.signs.changes.load(Ordering::Acquire)
            || watch.bells.look()
            || self.signs.runnable.load(Ordering::Acquire)
            || watch.looks % LOOKS_BETWEEN_ROUNDS == 0
            || self.is_due()
    }

    /// True if a timer of the RNIC has fired. While none runs, that needs no look at the clock.
    #[inline]
    fn is_due(&self) -> bool {
        let due_ns = self.signs.due_ns.load(Ordering::Acquire);
        due_ns != u64::MAX && due_ns <= self.now()
    }

    fn port_is_polled(&self) -> bool {
        self.port_until_ns.load(Ordering::Relaxed) != 0
    }

    /// Lets the port be polled for a while.
    fn poll_port(&self, now: u64) {
        self.port_until_ns.store(now + self.idle_ns.max(PORT_POLL_NS), Ordering::Relaxed);
    }

    /// Takes the packets that have come in, if the port is polled; true if there were any.
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

    /// Sends the packets that were taken off the RNIC, as many as the network takes now.
    fn send(&self, net: &mut Net, now: u64) {
        if !net.out.packets().is_empty() {
            net.port.send(&mut net.out);
            self.poll_port(now);
        }
    }

    /// What the port has done.
    pub fn port_counters(&self) -> Option<PortCounters> {
        self.net.as_ref().map(|n| lock(n).port.counters())
    }

    /// A poller that did much, and will do more, keeps the RNIC for a moment: its caches are warm, and the other core
    /// is for somebody else. Until then the others do not look again.
    fn left_to_other(&self, watch: &mut Watch) -> bool {
        // A look at the clock takes as long as all the other looks together.
        if watch.left_until_ns == 0 && self.busy.poller.load(Ordering::Relaxed) == watch.seat {
            return false;
        }
        let now = self.now();
        if now >= watch.left_until_ns && self.busy.poller.load(Ordering::Relaxed) != watch.seat {
            watch.left_until_ns = self.busy.until_ns.load(Ordering::Relaxed);
        }
        now < watch.left_until_ns
    }

    /// One look at the RNIC by a poller, and one job if there is any; `None` if nothing calls for it or another poller has it.
    fn round(&self, watch: &mut Watch) -> Option<Round> {
        let done = watch.job.take();
        let comes_back = done.is_some();
        let jobs_wait = self.jobs_wait.load(Ordering::Relaxed);
        let obliged = comes_back || jobs_wait;
        if !obliged && self.left_to_other(watch) {
            return None;
        }
        let calls = obliged || self.needs_round(watch);
        if !calls && !self.port_is_polled() {
            return None;
        }
        if !comes_back && self.rnic.is_wanted() && watch.pauses < MOST_PAUSES {
            watch.pauses += 1;
            return None;
        }
        watch.pauses = 0;
        let mut net = self.net.as_ref().and_then(|n| n.try_lock().ok());
        let received = net.as_mut().is_some_and(|n| {
            let now = self.now();
            (!calls || now.saturating_sub(n.asked_ns) >= ASKED_NS) && self.receive(n, now)
        });
        // If the port has nothing, nobody needs the RNIC.
        if !calls && !received && net.as_ref().is_none_or(|n| n.out.packets().is_empty()) {
            return None;
        }
        let mut r = if comes_back || received { self.rnic.spin_lock() } else { self.rnic.try_lock()? };
        let now = r.since_ns();
        if let Some(job) = done {
            r.end_job(job);
        }
        let mut found = r.poll_by(now, now_ns) || received || comes_back;
        for _ in 1..ROUNDS_AT_ONCE {
            if !r.has_turns() || r.has_jobs() {
                break;
            }
            // Nobody else takes it in between, unless for a job.
            self.keep(watch, r.since_ns() + KEEP_NS);
            r = self.reacquire(r.release());
            let since = r.since_ns();
            found |= r.poll_by(since, now_ns);
        }
        if !found {
            r.park_idle(now, self.idle_ns);
        }
        let left_over = r.has_turns() || r.has_jobs();
        watch.job = r.take_job();
        if self.grows() {
            r.set_helped(self.wanted() > 1);
        }
        r.drain_outputs(&mut watch.out);
        let sends = net.as_mut().is_some_and(|n| {
            if n.out.packets().is_empty() {
                r.tx().exchange(&mut n.out);
            }
            !n.out.packets().is_empty()
        });
        let found = found || sends || watch.job.is_some();
        let idle = !found && !r.is_busy() && !self.port_is_polled();
        if idle {
            // Under the lock, so that whoever makes work afterwards sees it.
            self.sleeping.store(true, Ordering::SeqCst);
        }
        let sleep_ns = r.next_timeout().map(|t| t.saturating_sub(now));
        let starved = r.take_starved();
        self.publish(&r);
        if watch.changes != r.active_changes() {
            watch.changes = r.active_changes();
            watch.bells = r.active_bells();
        }
        let delivering = self.begin_delivery(&watch.out);
        let end = r.release();
        if end - now >= LONG_ROUND_NS || watch.job.is_some() {
            self.keep(watch, end);
        }
        // Poller 0 may sleep until a time that is not right any more.
        if comes_back && self.sleeping.load(Ordering::SeqCst) {
            self.kick();
        }
        self.note_backlog(left_over, end);
        self.deliver(&mut watch.out);
        drop(delivering);
        if let Some(net) = &mut net {
            self.send(net, now);
        }
        drop(net);
        if watch.job.is_some() {
            self.do_job(watch);
        } else if starved {
            self.pause();
        }
        Some(Round { found, idle, sleep_ns })
    }

    /// How many pollers work.
    pub fn wanted(&self) -> usize {
        self.wanted.load(Ordering::Relaxed)
    }

    /// True if pollers come and go with the load.
    fn grows(&self) -> bool {
        self.pollers.0 < self.pollers.1
    }

    /// Notes whether a round has left work over, and lets another poller come if that goes on.
    fn note_backlog(&self, left_over: bool, now: u64) {
        if !left_over || !self.grows() {
            return self.backlog_since_ns.store(0, Ordering::Relaxed);
        }
        let since = self.backlog_since_ns.load(Ordering::Relaxed);
        if since == 0 {
            self.backlog_since_ns.store(now, Ordering::Relaxed);
        } else if now.saturating_sub(since) >= BACKLOG_NS {
            let wanted = self.wanted();
            let one_more = |n: usize| (n == wanted && n < self.pollers.1).then_some(n + 1);
            if self.wanted.fetch_update(Ordering::SeqCst, Ordering::Relaxed, one_more).is_ok() {
                self.backlog_since_ns.store(now, Ordering::Relaxed);
                self.wake_others();
            }
        }
    }

    /// The poller in `seat` has found nothing for long; true if it goes.
    fn is_spare(&self, seat: usize, idle_since_ns: u64) -> bool {
        let long = self.grows() && self.now().saturating_sub(idle_since_ns) >= SPARE_NS;
        let last = |n: usize| (n == seat + 1 && seat >= self.pollers.0).then_some(seat);
        long && self.wanted.fetch_update(Ordering::SeqCst, Ordering::Relaxed, last).is_ok()
    }

    /// The poller in `seat` sleeps until there is work for it.
    fn rest(&self, seat: usize) {
        let mut wakes = lock(&self.wakes);
        while self.wanted() <= seat && !self.is_stopping() {
            wakes = self.woken.wait(wakes).unwrap_or_else(|e| e.into_inner());
        }
    }

    /// A poller keeps the RNIC for a moment after time `since`.
    fn keep(&self, watch: &mut Watch, since: u64) {
        watch.left_until_ns = 0;
        self.busy.poller.store(watch.seat, Ordering::Relaxed);
        self.busy.until_ns.store(since + KEEP_NS, Ordering::Relaxed);
    }

    /// Takes the RNIC again, which this poller gave back at time `end`, after others could.
    fn reacquire(&self, end: u64) -> RnicGuard<'_> {
        let waited = self.rnic.let_in();
        let mut pauses = 0;
        while self.rnic.is_wanted() && pauses < MOST_PAUSES {
            std::thread::yield_now();
            pauses += 1;
        }
        if waited || pauses > 0 { self.rnic.spin_lock() } else { self.rnic.take_again(end) }
    }

    /// Does the job that a poller has. If it takes long, somebody else has the poller's seat afterwards.
    fn do_job(&self, watch: &mut Watch) {
        let Some(job) = &mut watch.job else { return };
        let (number, scratch) = (job.number(), &mut watch.scratch);
        let seated = if job.may_wait() {
            self.seats.do_slow(watch.seat, watch.thread, number, || job.run(scratch, now_ns))
        } else {
            job.run(scratch, now_ns);
            true
        };
        if !seated {
            self.leave(watch);
        }
    }

    /// A poller has lost its seat: what it has done goes back to the RNIC.
    fn leave(&self, watch: &mut Watch) {
        if let Some(job) = watch.job.take() {
            self.rnic.lock().end_job(job);
            self.after_command();
        }
    }

    /// A poller that is busy all the time lets others on its core in now and then: one of them may have been interrupted
    /// in a round of another virtual layer, which then waits for it as a whole.
    fn share_core(&self, watch: &mut Watch) {
        let now = self.now();
        if self.yields && now - watch.paused_ns > watch.share_ns {
            self.pause();
            let back = self.now();
            // Programs that look for completions come and go at once, but one that computes keeps the core for a time slice.
            watch.share_ns = if back - now > LONG_PAUSE_NS { SHARE_NS } else { SHORT_SHARE_NS };
            watch.paused_ns = back;
        }
    }

    /// Lets others run, between two looks at something that may come soon.
    pub(crate) fn pause(&self) {
        if self.yields {
            rustix::thread::sched_yield();
        } else {
            std::hint::spin_loop();
        }
    }

    fn first_poller(&self, watch: &mut Watch) {
        let mut rounds = 0u32;
        let idle_rounds = if self.yields { KICK_ROUNDS_YIELDING } else { KICK_ROUNDS_SPINNING };
        while self.goes_on(watch) {
            rounds = rounds.wrapping_add(1);
            match self.round(watch) {
                Some(r) if r.idle => {
                    self.listen(r.sleep_ns);
                }
                Some(r) if r.found => {
                    self.share_core(watch);
                    if self.asleep.load(Ordering::Relaxed) > 0 {
                        self.wake_others();
                    }
                    if rounds % KICK_ROUNDS_BUSY == 0 {
                        self.listen(Some(0));
                    }
                }
                _ => {
                    // Some sessions are polled while others sleep and kick.
                    if rounds % idle_rounds != 0 || !self.listen(Some(0)) {
                        self.pause();
                    }
                }
            }
        }
    }

    fn other_poller(&self, watch: &mut Watch) {
        let mut idle_since_ns = self.now();
        while self.goes_on(watch) {
            if self.wanted() <= watch.seat || self.is_spare(watch.seat, idle_since_ns) {
                self.rest(watch.seat);
                idle_since_ns = self.now();
                continue;
            }
            // Read before the look, so that a wake in between is not lost.
            let seen = *lock(&self.wakes);
            match self.round(watch) {
                // Nobody has anything to do.
                Some(r) if r.idle && self.is_spare(watch.seat, 0) => self.rest(watch.seat),
                Some(r) if r.idle => {
                    self.asleep.fetch_add(1, Ordering::SeqCst);
                    let mut wakes = lock(&self.wakes);
                    while *wakes == seen {
                        wakes = self.woken.wait(wakes).unwrap_or_else(|e| e.into_inner());
                    }
                    drop(wakes);
                    self.asleep.fetch_sub(1, Ordering::SeqCst);
                }
                Some(r) if r.found => {
                    idle_since_ns = self.now();
                    self.share_core(watch);
                }
                _ => self.pause(),
            }
        }
    }

    /// True while the engine runs and the poller has its seat.
    fn goes_on(&self, watch: &Watch) -> bool {
        !self.is_stopping() && self.seats.has(watch.seat, watch.thread)
    }

    fn wake_others(&self) {
        *lock(&self.wakes) += 1;
        self.woken.notify_all();
    }

    /// Poller 0 takes kicks on behalf of all, and waits for them and for timers up to the limit; false if none came.
    fn listen(&self, limit_ns: Option<u64>) -> bool {
        let mut events = [MaybeUninit::<epoll::Event>::uninit(); 64];
        let limit = limit_ns.map(|ns| rustix::time::Timespec {
            tv_sec: (ns / 1_000_000_000) as i64,
            tv_nsec: (ns % 1_000_000_000) as i64,
        });
        let got = match epoll::wait(&self.epoll, &mut events, limit.as_ref()) {
            Ok((ready, _)) => ready.iter().map(|e| e.data.u64()).collect::<Vec<u64>>(),
            Err(_) => Vec::new(),
        };
        self.sleeping.store(false, Ordering::SeqCst);
        let any = !got.is_empty();
        if limit_ns == Some(0) && !any {
            return false;
        }
        {
            let events = self.events.read().unwrap_or_else(|e| e.into_inner());
            let sessions = got.iter().filter(|&&t| t < PORT);
            sessions.filter_map(|&t| events.get(&SessionId::from_number(t))).for_each(|q| q.on_wake());
        }
        let mut r = self.rnic.lock();
        let now = self.now();
        for token in got {
            if token == PORT {
                self.poll_port(now);
            } else if token != WAKE {
                r.unpark(SessionId::from_number(token), now);
            }
        }
        let busy = r.is_busy() || self.port_is_polled();
        self.publish(&r);
        drop(r);
        if busy {
            self.wake_others();
        }
        any
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
                // A poller may have it.
                None => std::thread::yield_now(),
            }
        }
    }

    fn do_errand(&self, vnic: VnicId, s: SessionId, errand: Errand) {
        match self.clerk.get() {
            Some(clerk) => clerk.take(vnic, s, errand),
            None => errand.run(),
        }
    }
}

/// The way to other hosts.
struct Net {
    port: Box<dyn Port>,
    /// Packets that were taken off the RNIC and are not sent yet.
    out: Tx,
    /// When it was asked for packets last.
    asked_ns: u64,
}

/// Bytes of a poller's memory for copies between two processes.
const SCRATCH_BYTES: usize = 64 << 10;

impl Watch {
    fn new(seat: usize, thread: u64) -> Self {
        Watch {
            seat,
            thread,
            changes: 0,
            bells: Bells::default(),
            looks: 0,
            paused_ns: 0,
            share_ns: SHARE_NS,
            pauses: 0,
            left_until_ns: 0,
            out: Vec::new(),
            job: None,
            scratch: vec![0; SCRATCH_BYTES].into_boxed_slice(),
        }
    }
}

/// What a poller has and looks at between two rounds.
struct Watch {
    /// The poller's seat, and the number of its thread.
    seat: usize,
    thread: u64,
    /// [`unirdma_rnic::Core::active_changes`] when `bells` was copied.
    changes: u64,
    bells: Bells,
    looks: u32,
    /// When a busy poller let others in.
    paused_ns: u64,
    /// How long it then keeps them off its core, nanoseconds.
    share_ns: u64,
    /// How often it has left the RNIC to a thread that wants it, since it had the RNIC last.
    pauses: u32,
    /// Until when it leaves the RNIC to another poller.
    left_until_ns: u64,
    out: Vec<Output>,
    /// The job that it has done, which the RNIC has not heard of yet.
    job: Option<Box<Job>>,
    scratch: Box<[u8]>,
}

struct Round {
    found: bool,
    idle: bool,
    sleep_ns: Option<u64>,
}

fn cores() -> Vec<usize> {
    let set = rustix::thread::sched_getaffinity(None).unwrap_or_else(|_| rustix::thread::CpuSet::new());
    let cores: Vec<usize> = (0..rustix::thread::CpuSet::MAX_CPU).filter(|&i| set.is_set(i)).collect();
    if cores.is_empty() { vec![0] } else { cores }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use unirdma_rnic::Tx;

    /// A port that nothing comes in by; counts how often it was asked.
    struct Quiet(Arc<AtomicUsize>);

    impl Port for Quiet {
        fn send(&mut self, _: &mut Tx) {}
        fn receive(&mut self, _: &mut dyn FnMut(Arrival, &[u8])) -> bool {
            self.0.fetch_add(1, Ordering::Relaxed);
            false
        }
        fn join(&mut self, _: Vec<(IpAddr, OwnedFd)>) {}
        fn leave_others(&mut self, _: &[IpAddr]) {}
        fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
            Vec::new()
        }
        fn counters(&self) -> PortCounters {
            PortCounters::default()
        }
    }

    #[test]
    fn pollers_come_with_the_load_and_go() {
        let config = EngineConfig { polling: Polling::Dedicated, pollers: Some((1, 3)), ..EngineConfig::default() };
        let engine = Engine::start(&config, None).unwrap();
        assert_eq!(engine.wanted(), 1);
        engine.note_backlog(true, 1000);
        engine.note_backlog(true, 1000 + BACKLOG_NS / 2);
        assert_eq!(engine.wanted(), 1, "it may be over in a moment");
        engine.note_backlog(false, 1000 + BACKLOG_NS);
        engine.note_backlog(true, 2000 + BACKLOG_NS);
        assert_eq!(engine.wanted(), 1, "it was over in between");
        engine.note_backlog(true, 2000 + 2 * BACKLOG_NS);
        let began = Instant::now();
        while engine.wanted() != 1 {
            assert!(began.elapsed() < Duration::from_secs(20), "{} pollers stay", engine.wanted());
            engine.wake_others();
            std::thread::sleep(Duration::from_millis(1));
        }
        for i in 1..9 {
            engine.backlog_since_ns.store(1, Ordering::Relaxed);
            engine.note_backlog(true, 1 + i * BACKLOG_NS);
            assert!((1..=3).contains(&engine.wanted()));
        }
        engine.stop();
    }

    /// A round that finds nothing at the port leaves the RNIC alone, and one that has work of the RNIC does not ask the port again at once.
    #[test]
    fn a_port_without_packets_costs_no_look_at_the_rnic() {
        const ROUNDS: u64 = 640;
        let asked = Arc::new(AtomicUsize::new(0));
        let engine = Engine::start(&EngineConfig::default(), Some(Box::new(Quiet(asked.clone())))).unwrap();
        engine.stop();
        while Arc::strong_count(&engine) > 1 {
            std::thread::yield_now();
        }
        let mut watch = Watch::new(0, 1);
        engine.round(&mut watch);
        let count = |calls: bool, asked_ns: u64, watch: &mut Watch| {
            let before = (asked.load(Ordering::Relaxed) as u64, engine.rnic.held().times);
            for _ in 0..ROUNDS {
                engine.signs.runnable.store(calls, Ordering::Relaxed);
                engine.poll_port(engine.now() + 1_000_000_000);
                lock(engine.net.as_ref().unwrap()).asked_ns = asked_ns;
                engine.round(watch);
            }
            (asked.load(Ordering::Relaxed) as u64 - before.0, engine.rnic.held().times - before.1)
        };
        let (looks, holds) = count(false, u64::MAX, &mut watch);
        assert!(looks == ROUNDS - holds && holds <= 2 * ROUNDS / u64::from(LOOKS_BETWEEN_ROUNDS), "{looks}, {holds}");
        assert_eq!(count(true, u64::MAX, &mut watch), (0, ROUNDS));
        assert_eq!(count(true, 0, &mut watch), (ROUNDS, ROUNDS));
    }

    /// A program that spins on the poller's core can keep a poller from its turn for longer than the port is polled.
    #[test]
    fn a_port_with_packets_is_polled_however_late_the_turn_comes() {
        let asked = Arc::new(AtomicUsize::new(0));
        let engine = Engine::start(&EngineConfig::default(), Some(Box::new(Quiet(asked.clone())))).unwrap();
        engine.stop();
        while Arc::strong_count(&engine) > 1 {
            std::thread::yield_now();
        }
        engine.poll_port(engine.now());
        let late = engine.now() + 1_000_000_000;
        for turn in [late, late + 1] {
            engine.receive(&mut lock(engine.net.as_ref().unwrap()), turn);
            assert_eq!(asked.load(Ordering::Relaxed), 1);
        }
    }
}
