//! A worker: the process that serves the vRNICs of one group. This file has its control thread: one non-blocking event
//! loop for the sockets of programs, control queues, sessions, and requests of the supervisor.

mod accounts;
mod channels;
mod commands;
mod control_budget;
mod device_config;
mod ipc_requests;
mod sessions;
mod vm_net;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io;
use std::mem::MaybeUninit;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::event::{EventfdFlags, epoll};
use rustix::net::SocketFlags;
use unirdma_confine::{self as confine, Kind};
use unirdma_device::{Device, Identity, KeptByRnic, lock};
use unirdma_formats::Gid;
use unirdma_ipc::connection::Connection;
use unirdma_ipc::message::{Answer, Begin, Call, Event, Figures, Hello, NewVrnic, VERSION, WorkerStatus};
use unirdma_ipc::network::Enrolment;
use unirdma_ipc::vrnic::{self, IpNet, LedgerInfo, VrnicInfo};
use unirdma_link::{
    Backend, BlockingFd, ChannelError, Closer, Handler, Ledger, Memory, Progress, Resource, Ticket, Vring,
};
use unirdma_rnic::{Account, Limits, VrnicConfig, VrnicId};

use crate::anti_spoof::Guard;
use crate::capture::CaptureDelivery;
use crate::engine::{self, Engine, PortIo, timespec};
use crate::switch::Switch;
use crate::worker_net::open_worker;
use control_budget::ControlBudget;
use vm_net::Machine;

/// Most messages of one session before the others get a turn.
const BURST: usize = 32;
/// Time for which a vRNIC accepts no programs while too many of its descriptors wait to be closed, ns.
const PAUSE_NS: u64 = 100_000_000;
/// Longest time for the rest of a message, ns.
const HALF_NS: u64 = 5_000_000_000;
/// Longest time for the supervisor to send a request, or to take an answer. It is trusted to be quick.
const PATIENCE: Duration = Duration::from_secs(10);
/// Below this number of free QPNs, the supervisor is asked for more.
const FEW_QPNS: u32 = 4096;

struct Vrnic {
    id: VrnicId,
    ips: Vec<IpNet>,
    guard: Arc<Guard>,
    identity: Arc<Identity>,
    limits: Limits,
    listener: (u64, OwnedFd),
    /// Socket to which a VMM connects for the network interface of its machine.
    net_listener: (u64, OwnedFd),
    /// Socket to which drivers of the RFC mode connect.
    rfc_listener: (u64, OwnedFd),
    /// Number of its interface in the switch.
    attached: Option<u64>,
    sessions: usize,
    /// It was logged that there are too many sessions.
    full: bool,
    ledger: Ledger,
    allowance: Rc<ControlBudget>,
}

/// A session: the protocol engine, the device behind it, and the descriptors that are watched for it.
struct Session {
    vrnic: String,
    backend: Backend,
    conn: Conn,
    _pidfd: Option<OwnedFd>,
    tokens: Vec<u64>,
    /// Commands of the session wait ([`Paused::Commands`]).
    commands_pause: bool,
    /// The allowance of its vRNIC.
    allowance: Rc<ControlBudget>,
    /// For the pidfd of its process.
    _ticket: Ticket,
}

impl Session {
    /// When the session's requests may be served again, if its vRNIC has used up its allowance.
    fn waits_until(&self, engine: &Engine, now: u64) -> Option<u64> {
        self.allowance.waits_until(now, || engine.delays_others(self.conn.device.vrnic()))
    }

    /// Charges the session's vRNIC for control work that began at time `began`.
    fn pays_since(&self, engine: &Engine, began: u64) {
        let now = engine.now();
        self.allowance.charge(now, now.saturating_sub(began) + self.conn.device.take_lookup_ns());
    }
}

/// A connection beyond the session limit: it may read the configuration, and gets the reason why it cannot use the
/// device.
struct RefusedSession {
    vrnic: String,
    backend: Backend,
    handler: RefusedHandler,
    token: u64,
}

struct RefusedHandler(Arc<Identity>, Mode);

impl Handler for RefusedHandler {
    fn config(&self) -> Vec<u8> {
        match self.1 {
            Mode::Native => self.0.config_space(0),
            Mode::Rfc => self.0.rfc_config_space(),
        }
    }
    fn memory_changed(&mut self, _: &Memory, _: &[u64]) {}
    fn vring_changed(&mut self, _: usize, _: &Vring) {}
    fn stop_vring(&mut self, _: usize) -> Option<u16> {
        None
    }
    fn reset(&mut self) {}
    fn refused(&self, _: u32, _: &str) {}
}

/// Passes the link's calls on to the device and notes the latest kick descriptor of each vring that changed.
struct Conn {
    /// Number of the session.
    id: u64,
    device: Device,
    /// By vring index, or [`channels::CONTROL`] and [`channels::WAKE`].
    kicks: HashMap<usize, Kick>,
    changed: HashMap<usize, Option<Arc<BlockingFd>>>,
    epoll: Arc<OwnedFd>,
    ledger: Ledger,
}

/// [`Kick::token`] of a descriptor that the pollers watch.
const OF_POLLERS: u64 = 0;

struct Kick {
    token: u64,
    fd: Arc<BlockingFd>,
}

impl Handler for Conn {
    fn features(&self) -> u64 {
        self.device.features()
    }
    fn config(&self) -> Vec<u8> {
        self.device.config()
    }
    fn memory_changed(&mut self, memory: &Memory, removed: &[u64]) {
        self.device.memory_changed(memory, removed);
    }
    fn vring_changed(&mut self, index: usize, v: &Vring) {
        self.changed.insert(index, v.kick.clone());
        self.device.vring_changed(index, v);
    }
    fn stop_vring(&mut self, index: usize) -> Option<u16> {
        self.changed.insert(index, None);
        self.device.stop_vring(index)
    }
    fn reset(&mut self) {
        self.changed.extend(self.kicks.keys().map(|&i| (i, None)));
        self.device.reset();
    }
    fn open_channel(&mut self, number: u32) -> Result<OwnedFd, ChannelError> {
        channels::open(self, number)
    }
    fn close_channel(&mut self, number: u32) -> Result<(), ChannelError> {
        channels::close(self, number)
    }
    fn return_events(&mut self, number: u32, events: &[u8]) -> Result<(), ChannelError> {
        channels::give_back(self, number, events)
    }
    fn refused(&self, request: u32, why: &str) {
        self.device.refused(request, why);
    }
}

/// The device interface of a session, determined by the socket to which its driver has connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Native,
    Rfc,
}

impl Vrnic {
    /// When it accepts programs again; `None` if it does now.
    fn accepts_from(&self, engine: &Engine, now: u64) -> Option<u64> {
        if self.ledger.is_overdrawn() {
            return Some(now + PAUSE_NS);
        }
        self.allowance.waits_until(now, || engine.delays_others(self.id))
    }

    fn listener(&mut self, mode: Mode) -> &mut (u64, OwnedFd) {
        match mode {
            Mode::Native => &mut self.listener,
            Mode::Rfc => &mut self.rfc_listener,
        }
    }
}

#[derive(Clone)]
enum Source {
    /// The socket to which supervisors connect.
    Door,
    /// The connected supervisor.
    Supervisor,
    Wake,
    Listener(String, Mode),
    MachineListener(String),
    Socket(u64),
    Kick(u64, usize),
    Exit(u64),
    Broken,
}

/// The connected supervisor.
struct SupervisorLink {
    line: Connection,
    token: u64,
}

/// A source of events that is not watched until a certain time.
enum Paused {
    /// A vRNIC accepts no programs by this socket.
    Listener(u64, String, Mode),
    /// Messages of a session wait.
    Session(u64, u64),
    /// Commands of a session wait.
    Commands(u64, u64),
}

impl Paused {
    fn until_ns(&self) -> u64 {
        match *self {
            Paused::Listener(until_ns, ..) | Paused::Session(until_ns, _) | Paused::Commands(until_ns, _) => until_ns,
        }
    }
}

/// The socket for notices to the connected supervisor, if it takes any.
#[derive(Default)]
struct Notices(Mutex<Option<OwnedFd>>);

impl Notices {
    fn send(&self, notice: &Event) {
        if let (Some(socket), Ok(bytes)) = (&*lock(&self.0), serde_json::to_vec(notice)) {
            let flags = rustix::net::SendFlags::DONTWAIT | rustix::net::SendFlags::NOSIGNAL;
            let _ = rustix::net::send(socket, &bytes, flags);
        }
    }
}

/// The control thread's state.
struct Worker {
    group: String,
    /// Number of the group.
    group_id: u32,
    /// The network to other hosts, if there is one.
    network: Option<Enrolment>,
    engine: Arc<Engine>,
    capture: Arc<CaptureDelivery>,
    switch: Switch,
    /// A number that differs between processes that have served the group.
    origin: u32,
    notices: Arc<Notices>,
    epoll: Arc<OwnedFd>,
    wake: Arc<OwnedFd>,
    door: UnixListener,
    above: Option<SupervisorLink>,
    sources: HashMap<u64, Source>,
    next_token: u64,
    vrnics: BTreeMap<String, Vrnic>,
    /// Totals of removed vRNICs, so that sums over the group never decrease.
    gone: VrnicInfo,
    sessions: HashMap<u64, Session>,
    lookers: BTreeMap<u64, RefusedSession>,
    machines: HashMap<u64, Machine>,
    /// The account of all vRNICs.
    ledger: Ledger,
    /// Sessions that have sent a part of a message, and since when, ns.
    half: Vec<(u64, u64)>,
    /// Connections of VMMs that get no network interface, and since when, ns.
    refused: VecDeque<(u64, BlockingFd)>,
    paused: Vec<Paused>,
    /// IP multicast groups from which the worker wants to receive.
    wanted: Vec<IpAddr>,
    /// The supervisor was asked for more QPNs and has not given any yet.
    asked_for_qpns: bool,
    ended: bool,
}

/// Behaviour of a worker whose supervisor is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Alone {
    /// It continues, and waits for another supervisor.
    Waits,
    /// It exits.
    Ends,
}

/// Serves the vRNICs of a group until a supervisor ends it. A supervisor that connects to `door` names the group.
///
/// # Errors
/// The supervisor sends something unexpected, or the system refuses something.
pub fn work(door: UnixListener, alone: Alone) -> io::Result<()> {
    let (socket, _) = door.accept()?;
    let line = Connection::new(socket.into())?;
    let (Call::Hello { version: VERSION }, notices) = line.receive(PATIENCE)? else {
        line.send(&Answer::Hello(hello(None)), &[], PATIENCE)?;
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the supervisor is of another version"));
    };
    line.send(&Answer::Hello(hello(None)), &[], PATIENCE)?;
    let (Call::Begin(begin), sockets) = line.receive(PATIENCE)? else {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the supervisor did not say which group this is"));
    };
    let ledger = accounts::Machine::look();
    // Before confinement, since a confined worker cannot make a userfaultfd.
    let guarded = unirdma_mem::guard::install();
    // Before another thread is started.
    let mut in_force = begin.confinement.as_ref().map(confine::enter).unwrap_or_default();
    let counted = unirdma_mem::guard::counts_holes().map(|()| "pages made in sparse files are counted".into());
    in_force.measures.push(confine::Measure::new("sparse_files", counted));
    let worker = guarded.and_then(|()| Worker::start(*begin, sockets, door, ledger));
    let answer = worker.as_ref().map_or_else(|e| Answer::Error(e.to_string()), |_| Answer::Begun(in_force));
    line.send(&answer, &[], PATIENCE)?;
    worker?.run(line, notices.into_iter().next(), alone)
}

fn hello(group: Option<&str>) -> Hello {
    Hello {
        version: VERSION,
        program: env!("CARGO_PKG_VERSION").into(),
        pid: std::process::id(),
        group: group.map(String::from),
    }
}

impl Worker {
    fn start(begin: Begin, sockets: Vec<OwnedFd>, door: UnixListener, machine: accounts::Machine) -> io::Result<Self> {
        let ledger = machine.ledger().with_closer(Closer::new(|| confine::thread(Kind::Closer)));
        let way = begin.network.as_ref().map(|e| open_worker(e, sockets)).transpose()?;
        let (port, tunnel) = way.unzip();
        let engine = Engine::start(&begin.engine, port)?;
        if let Some(e) = &begin.network {
            let mut rnic = engine.rnic.lock();
            rnic.set_wire_mtu(e.mtu);
            rnic.set_congestion_control(e.congestion_control);
            rnic.set_qpns(&e.qpns);
            e.first_port.into_iter().for_each(|port| rnic.set_first_source_port(port));
            e.addresses.first().into_iter().for_each(|&host| rnic.set_own_host(host));
        }
        let switch = Switch::start(tunnel, engine.clone())?;
        door.set_nonblocking(true)?;
        let notices: Arc<Notices> = Arc::default();
        let (of_watcher, group) = (notices.clone(), begin.group.clone());
        engine::watch(engine.pollers(), move |thread, seconds| {
            tracing::error!(group, seconds, "the {thread} is stuck");
            of_watcher.send(&Event::Stuck { thread: thread.into(), seconds });
        })?;
        Ok(Worker {
            group: begin.group,
            group_id: begin.id,
            network: begin.network,
            capture: CaptureDelivery::new(engine.rnic.clone()),
            engine,
            switch,
            origin: getrandom::u32().unwrap_or_default(),
            notices,
            epoll: Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC)?),
            wake: Arc::new(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?),
            door,
            above: None,
            sources: HashMap::new(),
            next_token: 1,
            vrnics: BTreeMap::new(),
            gone: VrnicInfo::default(),
            sessions: HashMap::new(),
            lookers: BTreeMap::new(),
            machines: HashMap::new(),
            ledger,
            half: Vec::new(),
            refused: VecDeque::new(),
            paused: Vec::new(),
            wanted: Vec::new(),
            asked_for_qpns: false,
            ended: false,
        })
    }

    fn watch(&mut self, fd: BorrowedFd<'_>, source: Source, edge: bool) -> io::Result<u64> {
        let token = self.next_token;
        let flags = if edge { epoll::EventFlags::IN | epoll::EventFlags::ET } else { epoll::EventFlags::IN };
        epoll::add(&self.epoll, fd, epoll::EventData::new_u64(token), flags)?;
        self.next_token += 1;
        self.sources.insert(token, source);
        Ok(token)
    }

    /// Runs the event loop until a supervisor ends the worker.
    fn run(mut self, line: Connection, notices: Option<OwnedFd>, alone: Alone) -> io::Result<()> {
        let wake = self.wake.clone();
        self.watch(wake.as_fd(), Source::Wake, true)?;
        self.engine.delivery().set_notify(Box::new(move || {
            let _ = rustix::io::write(&*wake, &1u64.to_ne_bytes());
        }));
        if let Some(events) = unirdma_mem::guard::events() {
            self.watch(events, Source::Broken, true)?;
        }
        let door = self.door.try_clone()?;
        self.watch(door.as_fd(), Source::Door, false)?;
        self.attach_supervisor(line, notices)?;
        // After all other threads were started.
        confine::thread(Kind::Control);
        let mut events = [MaybeUninit::<epoll::Event>::uninit(); 64];
        while !self.ended {
            let limit = self.wait_limit();
            self.engine.liveness().guard(!self.sessions.is_empty());
            self.engine.liveness().control.rest();
            let tokens: Vec<u64> = match epoll::wait(&self.epoll, &mut events, limit.as_ref()) {
                Ok((ready, _)) => ready.iter().map(|e| e.data.u64()).collect(),
                Err(rustix::io::Errno::INTR) => continue,
                Err(e) => return Err(e.into()),
            };
            self.engine.liveness().control.begin();
            for t in tokens {
                if let Some((id, index)) = channels::of_token(t) {
                    self.on_room(id, index);
                    continue;
                }
                match self.sources.get(&t).cloned() {
                    Some(Source::Door) => self.on_door(),
                    Some(Source::Supervisor) => self.on_supervisor(alone),
                    Some(Source::Wake) => {
                        self.on_released();
                        if let Some(wanted) = self.engine.port().and_then(PortIo::wanted_groups) {
                            self.notices.send(&Event::Groups(wanted.clone()));
                            self.wanted = wanted;
                        }
                    }
                    Some(Source::Listener(name, mode)) => self.on_listener(&name, mode),
                    Some(Source::MachineListener(name)) => self.on_machine_listener(&name),
                    Some(Source::Socket(id)) => self.on_socket(id),
                    Some(Source::Kick(id, vring)) => self.on_kick(id, vring),
                    Some(Source::Exit(id)) => {
                        self.close(id);
                        self.engine.after_command();
                    }
                    Some(Source::Broken) => self.on_broken(),
                    None => {}
                }
            }
            if self.engine.has_dead() {
                self.engine.after_command();
            }
            self.end_half();
            self.end_refused();
            self.resume();
        }
        self.capture.end();
        self.engine.stop();
        self.switch.stop();
        Ok(())
    }

    /// Longest time for which this thread may sleep.
    fn wait_limit(&self) -> Option<rustix::time::Timespec> {
        if self.engine.has_dead() {
            return Some(timespec(0));
        }
        let now = self.engine.now();
        let half = self.half.iter().map(|h| (h.1 + HALF_NS).saturating_sub(now)).min();
        let pause = self.paused.iter().map(|p| p.until_ns().saturating_sub(now)).min();
        Some(timespec(half.into_iter().chain(pause).chain(self.refused_limit()).min()?))
    }

    /// Records whether a session has sent only a part of a message.
    fn note_half(&mut self, id: u64, half: bool) {
        let known = self.half.iter().position(|h| h.0 == id);
        match (known, half) {
            (None, true) => self.half.push((id, self.engine.now())),
            (Some(at), false) => _ = self.half.swap_remove(at),
            _ => {}
        }
    }

    /// Ends the sessions of programs whose message is incomplete for too long.
    fn end_half(&mut self) {
        if self.half.is_empty() {
            return;
        }
        let now = self.engine.now();
        let over: Vec<u64> = self.half.iter().filter(|h| now.saturating_sub(h.1) >= HALF_NS).map(|h| h.0).collect();
        for id in over {
            self.note_half(id, false);
            self.end_look(id);
            self.end_machine(id);
            if let Some(s) = self.sessions.get(&id) {
                tracing::debug!(session = id, vrnic = s.vrnic, "half a message came, and no more; the session ends");
                self.close(id);
                self.engine.after_command();
            }
        }
    }
}
