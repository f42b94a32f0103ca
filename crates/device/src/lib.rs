//! The virtio RDMA device of one session: control commands, checks, and events.
//!
//! Depends on the RNIC and the link. It turns bus addresses into windows, commands into RNIC calls, and
//! RNIC outputs into event buffers. It must never read a shared byte twice, and never block.

mod commands;
mod events;
mod limits;
mod log_limit;
mod map_runs;
mod memory_lookup;
mod net;
mod rfc;
mod rnic_lock;

use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use commands::Reply;
use map_runs::Mapped;
use memory_lookup::Pending;
use unirdma_abi as abi;
use unirdma_link::{BlockingFd, Handler, Ledger, Memory, Vring};
use unirdma_mem::Span;
use unirdma_mem::protocol::{self, Fence, Word16};
use unirdma_rnic::{MAX_TORN_DOWN, Resolve, SessionId, VrnicId};
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use zerocopy::IntoBytes;

use rfc::Rfc;

pub use events::{EventQueues, OnRoom, queue_of_channel, take_notifications};
pub use limits::KeptByRnic;
pub use log_limit::LogLimit;
pub use memory_lookup::BackgroundLookup;
pub use net::{NET_TX, NetDevice, NetFrontend};
pub use rnic_lock::{HoldTimes, RnicGuard, SharedRnic, now_ns};

/// The vRNIC's properties that a device shows or uses. Programs see nothing of the host in them (U03).
#[derive(Debug)]
pub struct Identity {
    /// Its vRNIC.
    pub vrnic: VrnicId,
    /// The configuration space.
    pub config: abi::Config,
    /// A random number, different for each process that has served the vRNIC.
    pub origin: u32,
    /// Name for `ibv_devinfo`'s board id.
    pub name: String,
    /// Path MTU code of the port, 1..=5.
    pub active_mtu: u8,
    /// Limit on the log lines that its programs cause.
    pub log: Arc<LogLimit>,
}

impl Identity {
    /// The configuration space as drivers read it.
    pub fn config_space(&self, generation: u32) -> Vec<u8> {
        let more = abi::ConfigMore { generation, max_doorbells: abi::MAX_DOORBELLS, reserved: [0; 14] };
        [self.shown_config().as_bytes(), more.as_bytes()].concat()
    }

    /// The configuration, with limits of one session within the ranges of the specification (R06, R07), whatever the
    /// vRNIC may have in all its sessions together.
    pub(crate) fn shown_config(&self) -> abi::Config {
        let c = self.config;
        abi::Config { max_qp: c.max_qp.clamp(1, abi::MAX_QP), max_cq: c.max_cq.clamp(1, abi::MAX_CQ), ..c }
    }
}

/// Locks a mutex, poisoned or not: every critical section leaves valid state.
pub fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// `VIRTIO_F_RING_RESET`.
const VIRTIO_F_RING_RESET: u64 = 1 << 40;

/// Most commands of one session before other sessions get a turn.
const MAX_TURN: u16 = 16;

/// The flags of an available ring, by which a driver suppresses calls.
struct AvailFlags<'a> {
    guest: &'a GuestMemoryMmap,
    addr: GuestAddress,
}

impl Word16 for AvailFlags<'_> {
    fn load(&self) -> u16 {
        self.guest.load(self.addr, Ordering::Acquire).map_or(0, u16::from_le)
    }
    fn store(&self, v: u16) {
        let _ = self.guest.store(v.to_le(), self.addr, Ordering::Release);
    }
}

/// Result of a command.
enum Served {
    /// The response is written: its length in bytes.
    Answered(u32),
    /// As `Answered`, but the response must be held back.
    Held(u32),
    /// The command waits for a background lookup or for another host, and is executed again afterwards.
    Left,
}

struct Full;

impl Fence for Full {
    fn fence(&self) {
        fence(Ordering::SeqCst);
    }
}

struct MemoryTable(Arc<Memory>);

impl Resolve for MemoryTable {
    fn resolve(&self, addr: u64, len: u64) -> Option<(&Span, u64)> {
        self.0.window(addr, len)
    }
}

/// The threads that run the RNIC.
pub trait Pollers: Send + Sync {
    /// Delivers the events that the RNIC has raised, and waits until other threads have delivered theirs.
    fn settle(&self);

    /// For a bounded time, executes the work for which [`unirdma_rnic::Core::is_behind`] is true.
    fn catch_up(&self, s: SessionId, qpn: Option<u32>);

    /// Runs `lookup` of session `s` of `vrnic` on another thread, and then has [`Device::serve_control`] called.
    fn run_in_background(&self, vrnic: VrnicId, s: SessionId, lookup: BackgroundLookup);
}

/// The device as one session sees it.
pub struct Device {
    rnic: Arc<SharedRnic>,
    session: SessionId,
    identity: Arc<Identity>,
    memory: Arc<Memory>,
    /// The account of its vRNIC.
    ledger: Ledger,
    /// Ranges made by MAP_RUNS.
    mapped: Mutex<Mapped>,
    guest: Option<GuestMemoryMmap>,
    control: Option<Queue>,
    /// Index at which the control queue was stopped. The session is paused while it is stopped.
    stopped_at: Option<u16>,
    control_call: Option<Arc<BlockingFd>>,
    /// The channel by which a process kicks the control queue and is called for it.
    control_channel: Option<Arc<BlockingFd>>,
    /// A command that was executed but not answered, because jobs still access the memory that it releases: the head of
    /// its descriptor chain, and the length of its response.
    held: Option<(u16, u32)>,
    /// The background lookup of the command at the head of the queue.
    pending: Option<Pending>,
    /// The command at the head of the queue waits for the answer of another host.
    asks: bool,
    /// Time spent in background lookups and not yet returned by [`Device::take_lookup_ns`], ns.
    lookup_ns: AtomicU64,
    /// Kicks of the control queue are suppressed.
    control_quiet: bool,
    /// `FEATURE_*` bits that the driver may use: those that its last NEW_SESSION named, or all that are offered.
    features: AtomicU64,
    events: Arc<EventQueues>,
    pollers: Arc<dyn Pollers>,
}

impl Device {
    /// A device for a new session of `identity.vrnic`; `None` if the RNIC has no room for a session. Everything that
    /// the device keeps besides RNIC objects is charged to `ledger`.
    pub fn new(
        rnic: Arc<SharedRnic>,
        identity: Arc<Identity>,
        pollers: Arc<dyn Pollers>,
        ledger: Ledger,
    ) -> Option<Self> {
        let events = EventQueues::new(&identity.config, ledger.clone());
        Self::with_events(rnic, identity, pollers, events, ledger)
    }

    /// As [`Device::new`], in the RFC mode.
    pub fn new_rfc(
        rnic: Arc<SharedRnic>,
        identity: Arc<Identity>,
        pollers: Arc<dyn Pollers>,
        ledger: Ledger,
    ) -> Option<Self> {
        let rfc = Rfc::new(&identity.config, ledger.clone())?;
        let events = EventQueues::of_rfc(rfc, &identity.config, ledger.clone());
        let device = Self::with_events(rnic, identity, pollers, events, ledger)?;
        device.set_rfc_doorbell();
        Some(device)
    }

    fn with_events(
        rnic: Arc<SharedRnic>,
        identity: Arc<Identity>,
        pollers: Arc<dyn Pollers>,
        events: EventQueues,
        ledger: Ledger,
    ) -> Option<Self> {
        let session = rnic.lock().add_session(identity.vrnic)?;
        Some(Device {
            features: AtomicU64::new(identity.config.features),
            rnic,
            session,
            identity,
            memory: Arc::default(),
            mapped: Mutex::new(Mapped::new(ledger.clone())),
            ledger,
            guest: None,
            control: None,
            stopped_at: None,
            control_call: None,
            control_channel: None,
            held: None,
            pending: None,
            asks: false,
            lookup_ns: AtomicU64::new(0),
            control_quiet: false,
            events: Arc::new(events),
            pollers,
        })
    }

    /// Removes all ranges of MAP_RUNS. Unmapping them takes long, so the caller drops the result when nobody waits.
    fn forget_ranges(&self) -> Mapped {
        std::mem::replace(&mut lock(&self.mapped), Mapped::new(self.ledger.clone()))
    }

    /// Sets the doorbell page, which in the RFC mode is the device's own.
    fn set_rfc_doorbell(&self) {
        if let Some(rfc) = self.events.rfc() {
            // A new session has neither a doorbell page nor QPs, so the RNIC has no reason to refuse.
            let _ = self.rnic.lock().set_doorbell(self.session, rfc.bell());
        }
    }

    /// True if it is in the RFC mode.
    pub fn is_rfc(&self) -> bool {
        self.events.rfc().is_some()
    }

    /// The session in the RNIC.
    pub fn session(&self) -> SessionId {
        self.session
    }

    /// The vRNIC.
    pub fn vrnic(&self) -> VrnicId {
        self.identity.vrnic
    }

    /// A number that differs between sessions, and between processes that have served the vRNIC.
    pub(crate) fn generation(&self) -> u32 {
        self.identity.origin.wrapping_add(self.session.number() as u32)
    }

    /// The event queues, for the threads that drain the RNIC's outputs.
    pub fn events(&self) -> Arc<EventQueues> {
        self.events.clone()
    }

    /// Called when the session is about to end: stops its activity in small steps, and gives the RNIC back between
    /// them.
    pub(crate) fn quiesce(&self) {
        while self.rnic.lock().quiesce_session(self.session, MAX_TORN_DOWN) {}
    }

    /// Sets the channel by which the control queue is kicked and called from now on.
    pub fn set_control_channel(&mut self, channel: Option<Arc<BlockingFd>>) {
        self.control_channel = channel;
    }

    /// Time spent in background lookups since the last call, ns.
    pub fn take_lookup_ns(&self) -> u64 {
        self.lookup_ns.swap(0, Ordering::Relaxed)
    }

    /// Executes waiting control commands, at most [`MAX_TURN`]; true if there were any. In the RFC mode it also serves
    /// the virtqueues of QPs and CQs that were kicked.
    ///
    /// If there were any, kicks are suppressed until [`Device::listen`] has returned true.
    pub fn serve_control(&mut self) -> bool {
        // The session is paused while the control queue is stopped.
        let copied = self.control.is_some() && self.events.rfc().is_some_and(|rfc| self.serve_queues(rfc));
        self.serve_commands() || copied
    }

    fn serve_commands(&mut self) -> bool {
        let Some(guest) = self.guest.take() else { return false };
        let mut queue = self.control.take();
        let served = queue.as_mut().is_some_and(|q| self.serve(q, &guest));
        (self.control, self.guest) = (queue, Some(guest));
        served
    }

    fn serve(&mut self, queue: &mut Queue, guest: &GuestMemoryMmap) -> bool {
        if self.pending.as_ref().is_some_and(|p| !p.is_over()) || self.asks && self.rnic.lock().is_asking(self.session)
        {
            return false;
        }
        self.asks = false;
        let answered = match self.held {
            Some(_) if self.rnic.lock().is_delayed(self.session) => return false,
            Some((head, len)) => {
                self.held = None;
                let _ = queue.add_used(guest, head, len);
                true
            }
            None => false,
        };
        let served = self.serve_new(queue, guest);
        if answered || served {
            self.tell_answered(queue, guest);
        }
        answered || served
    }

    /// Executes the commands in the queue; true if there were any.
    fn serve_new(&mut self, queue: &mut Queue, guest: &GuestMemoryMmap) -> bool {
        // An index further ahead than the queue size is the driver's error. Nothing is executed then.
        let Ok(avail) = queue.avail_idx(guest, Ordering::Acquire) else { return false };
        let waiting = avail.0.wrapping_sub(queue.next_avail());
        if waiting == 0 || waiting > queue.size() {
            return false;
        }
        if !self.control_quiet {
            self.control_quiet = queue.disable_notification(guest).is_ok();
        }
        for _ in 0..waiting.min(MAX_TURN) {
            let Some(chain) = queue.pop_descriptor_chain(guest) else { break };
            let head = chain.head_index();
            match self.command(guest, chain) {
                Served::Answered(len) => _ = queue.add_used(guest, head, len),
                Served::Held(len) => {
                    self.held = Some((head, len));
                    break;
                }
                // The command stays at the head of the queue.
                Served::Left => {
                    queue.go_to_previous_position();
                    break;
                }
            }
        }
        true
    }

    /// Calls the driver for the responses in its queue, unless it suppresses calls.
    fn tell_answered(&self, queue: &Queue, guest: &GuestMemoryMmap) {
        let flags = AvailFlags { guest, addr: GuestAddress(queue.avail_ring()) };
        if (self.control_channel.is_some() || self.control_call.is_some()) && protocol::must_notify(&Full, &flags) {
            match (&self.control_channel, &self.control_call) {
                (Some(channel), _) => events::tell(channel),
                (None, Some(call)) => unirdma_link::signal(call.as_ref()),
                (None, None) => {}
            }
        }
    }

    /// Enables kicks again, because this side is about to wait for them. Returns false if commands wait already; kicks
    /// then stay unnecessary.
    pub fn listen(&mut self) -> bool {
        let others = self.events.rfc().is_none_or(Rfc::listen);
        self.listen_for_commands() && others
    }

    fn listen_for_commands(&mut self) -> bool {
        let (Some(queue), Some(guest)) = (&mut self.control, &self.guest) else { return true };
        self.control_quiet = false;
        !queue.enable_notification(guest).unwrap_or(false)
    }

    /// Executes a command.
    fn command(&mut self, guest: &GuestMemoryMmap, chain: virtio_queue::DescriptorChain<&GuestMemoryMmap>) -> Served {
        use std::io::{Read, Write};
        // If the driver has changed the request meanwhile, it is another request, and the outcome does not belong to
        // it.
        let pending = self.pending.take();
        let (Ok(mut reader), Ok(mut writer)) = (chain.clone().reader(guest), chain.writer(guest)) else {
            return Served::Answered(0);
        };
        let mut request = [0; abi::MAX_COMMAND_BYTES];
        let n = reader.available_bytes();
        let room = writer.available_bytes();
        let whole = request.get_mut(..n).is_some_and(|r| reader.read_exact(r).is_ok());
        let outcome = pending.filter(|p| whole && p.request == request[..n]).and_then(|p| p.outcome());
        let reply = match self.events.rfc() {
            Some(rfc) if whole => self.rfc_answer(rfc, &request[..n], room, outcome),
            Some(_) => Reply::Now(vec![abi::Status::BadLength as u8], None),
            None if whole => self.answer(&request[..n], room, outcome),
            None => Reply::Now(commands::head(abi::Status::BadLength), None),
        };
        let (response, command) = match reply {
            Reply::Now(response, command) => (response, command),
            Reply::Asks => {
                self.asks = true;
                return Served::Left;
            }
            Reply::After(search) => {
                let (pending, lookup) = Pending::new(&request[..n], search);
                self.pending = Some(pending);
                self.pollers.run_in_background(self.identity.vrnic, self.session, lookup);
                return Served::Left;
            }
        };
        let answer = response.len().min(room);
        let held = command.is_some_and(commands::takes_memory_away) && self.rnic.lock().delay_command(self.session);
        let len = if writer.write_all(&response[..answer]).is_err() { 0 } else { answer as u32 };
        if held { Served::Held(len) } else { Served::Answered(len) }
    }

    fn make_queue(&self, v: &Vring) -> Option<Queue> {
        make_queue(v, self.guest.as_ref()?)
    }
}

/// The device's side of a vring, if the vring runs and lies in the session's memory.
fn make_queue(v: &Vring, guest: &GuestMemoryMmap) -> Option<Queue> {
    if !(v.enabled && v.addressed) || v.size == 0 {
        return None;
    }
    let mut q = Queue::new(abi::MAX_VQ_SIZE).ok()?;
    q.set_size(v.size);
    q.try_set_desc_table_address(GuestAddress(v.desc)).ok()?;
    q.try_set_avail_ring_address(GuestAddress(v.avail)).ok()?;
    q.try_set_used_ring_address(GuestAddress(v.used)).ok()?;
    q.set_next_avail(v.base);
    q.set_next_used(v.base);
    q.set_ready(true);
    q.is_valid(guest).then_some(q)
}

/// Longest time to wait for jobs that access the memory of a frontend that stops, ms.
const PAUSE_MS: u64 = 200;

impl Device {
    /// The frontend stops. Its memory is not accessed after the return.
    fn pause(&mut self) {
        self.rnic.lock().pause_session(self.session);
        for _ in 0..PAUSE_MS * 10 {
            let reads = self.pending.as_ref().is_some_and(|p| !p.cancel());
            if !reads && !self.rnic.lock().has_copies(self.session) {
                break;
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        self.pollers.settle();
    }
}

impl Handler for Device {
    fn features(&self) -> u64 {
        // A driver of the RFC mode resets virtqueues one by one (R33, R38).
        if self.is_rfc() { VIRTIO_F_RING_RESET } else { 0 }
    }

    fn config(&self) -> Vec<u8> {
        if self.is_rfc() {
            return self.identity.rfc_config_space();
        }
        self.identity.config_space(self.generation())
    }

    fn memory_changed(&mut self, memory: &Memory, removed: &[u64]) {
        // The views of a region are replaced before the region goes, because pollers deliver events meanwhile.
        self.guest = memory.guest();
        self.events.set_memory(self.guest.clone());
        self.memory = Arc::new(memory.clone());
        let mut rnic = self.rnic.lock();
        rnic.revoke_regions(self.session, removed);
        rnic.set_memory(self.session, Arc::new(MemoryTable(self.memory.clone())));
    }

    fn vring_changed(&mut self, index: usize, v: &Vring) {
        let call = v.call.clone();
        if index == abi::VQ_CONTROL as usize {
            self.control_call = call;
            if self.control.is_none() || !v.enabled {
                self.control = self.make_queue(v);
                (self.pending, self.asks) = (None, false);
            }
            if self.control.is_some() {
                // A driver that begins anew says so with its first command. Until then, the RNIC must not write where
                // the objects of the driver before it were.
                if self.stopped_at.take().is_some_and(|at| at != v.base) {
                    self.quiesce();
                    let mut rnic = self.rnic.lock();
                    rnic.renew_session(self.session);
                    rnic.drop_later(self.forget_ranges());
                    drop(rnic);
                    self.events.forget_waiting();
                }
                self.rnic.lock().resume_session(self.session);
            }
        } else if let Some(rfc) = self.events.rfc() {
            rfc.set_queue(index, self.make_queue(v), v.base, call);
        } else if index != abi::VQ_WAKE as usize {
            let queue = self.make_queue(v);
            self.events.set_queue(index as u32, queue, call);
        }
    }

    fn stop_vring(&mut self, index: usize) -> Option<u16> {
        if index != abi::VQ_CONTROL as usize {
            return match self.events.rfc() {
                Some(rfc) => rfc.stop(index),
                None => self.events.stop(index as u32),
            };
        }
        // Kicks are enabled, since the next server of the queue may wait for them.
        self.listen();
        self.pause();
        // The command that waits is the first one when the queue is started again.
        (self.pending, self.asks) = (None, false);
        let mut queue = self.control.take()?;
        let held = self.held.take().filter(|_| !self.rnic.lock().is_delayed(self.session));
        if let (Some((head, len)), Some(guest)) = (held, &self.guest) {
            // Nobody else would answer this command: the queue will be started again behind it.
            let _ = queue.add_used(guest, head, len);
            self.tell_answered(&queue, guest);
        }
        self.stopped_at = Some(queue.next_avail());
        self.stopped_at
    }

    fn reset(&mut self) {
        self.quiesce();
        let mut rnic = self.rnic.lock();
        rnic.remove_session(self.session);
        if let Some(s) = rnic.add_session(self.identity.vrnic) {
            self.session = s;
            rnic.set_memory(s, Arc::new(MemoryTable(self.memory.clone())));
        }
        rnic.drop_later(self.forget_ranges());
        drop(rnic);
        self.control = None;
        self.stopped_at = None;
        self.held = None;
        (self.pending, self.asks) = (None, false);
        self.control_channel = None;
        self.features = AtomicU64::new(self.identity.config.features);
        self.events.clear();
        self.set_rfc_doorbell();
    }

    fn refused(&self, request: u32, why: &str) {
        if let Some(left_out) = self.identity.log.next(now_ns()) {
            tracing::warn!(vrnic = %self.identity.name, request, why, left_out, "vhost-user request refused");
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.quiesce();
        self.rnic.lock().remove_session(self.session);
        // A poller may still hold the queues, but the process must see its channels close now.
        self.events.clear();
    }
}
