//! A worker: the process that serves the vRNICs of one group. This is its control thread: the sockets of programs, control queues,
//! sessions, and what the supervisor calls for; one event loop, no blocking.

mod calls;
mod channels;
mod idle;
mod ledger;
mod machine;
mod watchdog;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io;
use std::mem::MaybeUninit;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::event::{EventfdFlags, epoll};
use rustix::net::SocketFlags;
use unirdma_abi as abi;
use unirdma_device::{Device, Identity, lock};
use unirdma_formats::Gid;
use unirdma_link::{Backend, Closer, Foreign, Handler, Ledger, Memory, Progress, Refusal, Resource, Ticket, Vring};
use unirdma_rnic::{Limits, VnicConfig, VnicId};

use crate::confine::{self, Kind};
use crate::engine::Engine;
use crate::guard::Guard;
use crate::line::Line;
use crate::network::{Enrolment, open_worker};
use crate::protocol::{Answer, Begin, Call, Figures, Hello, NewVrnic, Notice, VERSION, WorkerStatus};
use crate::pulse::Pulse;
use crate::switch::Switch;
use crate::vrnic::{self, IpNet, LedgerInfo, VrnicInfo};
pub(crate) use ledger::raise_limit;
use machine::Machine;
use watchdog::Watchdog;

/// Programs of one vRNIC that look at its configuration while it has all the sessions that it may have. The oldest look
/// ends for a new one.
const MAX_LOOKERS: usize = 64;
/// Messages of one session before the others get a turn.
const BURST: usize = 32;
/// How long the control queue of a session is looked at after its last command, nanoseconds. Programs send commands in
/// quick succession, and one that is found by a look costs neither side a wake-up.
const LINGER_NS: u64 = 50_000;
/// Only a command that follows another one of its session within this time is taken for one of several, nanoseconds.
const QUICK_NS: u64 = 200_000;
/// If a look comes so long after the one before, somebody computes on this core, nanoseconds.
const CROWD_NS: u64 = 100_000;
/// Then there are no looks for this long, nanoseconds: who sleeps and is woken has its core sooner than who waits in turn.
/// Twice as long each time that this is found again right afterwards, up to the maximum.
const CROWDED_NS: u64 = 500_000_000;
const CROWDED_MAX_NS: u64 = 16_000_000_000;
/// Rounds of looks, and nanoseconds of serving, between two looks at everything else.
const LINGER_ROUNDS: u32 = 16;
const LINGER_TURN_NS: u64 = 100_000;
/// How long a vRNIC accepts no program that has too many descriptors waiting to be closed, nanoseconds.
const PAUSE_NS: u64 = 100_000_000;
/// How long the rest of a message may take, nanoseconds.
const HALF_NS: u64 = 5_000_000_000;
/// How long the supervisor may take to send a call, or to take an answer. It is believed to be quick.
const PATIENCE: Duration = Duration::from_secs(10);
/// With fewer QPNs left than this, the supervisor is asked for more.
const FEW_QPNS: u32 = 4096;

struct Vrnic {
    id: VnicId,
    ips: Vec<IpNet>,
    guard: Arc<Guard>,
    identity: Arc<Identity>,
    limits: Limits,
    listener: (u64, OwnedFd),
    /// Where a VMM gets the network interface of its machine.
    net_listener: (u64, OwnedFd),
    /// Where drivers of the RFC mode connect.
    rfc_listener: (u64, OwnedFd),
    /// Its interface in the switch.
    attached: Option<u64>,
    sessions: usize,
    /// The log has it that there are too many sessions.
    full: bool,
    ledger: Ledger,
}

/// A session: the protocol engine, the device behind it, and the descriptors that are watched for it.
struct Session {
    vrnic: String,
    backend: Backend,
    conn: Conn,
    _pidfd: Option<OwnedFd>,
    tokens: Vec<u64>,
    /// It is in [`Control::lingering`].
    lingers: bool,
    /// When commands of it were served last.
    served_ns: u64,
    /// For the descriptor of its process.
    _ticket: Ticket,
}

/// A session whose control queue is looked at without a kick, and until when.
struct Lingering {
    session: u64,
    until_ns: u64,
}

/// A program that came too many: it may see what there is, and hears why it cannot use it.
struct Looker {
    vrnic: String,
    backend: Backend,
    sight: Sight,
    token: u64,
}

struct Sight(Arc<Identity>, Mode);

impl Handler for Sight {
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
    /// Of the session.
    id: u64,
    device: Device,
    /// By vring, or [`channels::CONTROL`] and [`channels::WAKE`].
    kicks: HashMap<usize, Kick>,
    changed: HashMap<usize, Option<Arc<Foreign>>>,
    epoll: Arc<OwnedFd>,
    ledger: Ledger,
}

/// [`Kick::token`] of a descriptor that the pollers watch.
const OF_POLLERS: u64 = 0;

struct Kick {
    token: u64,
    fd: Arc<Foreign>,
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
    fn open_channel(&mut self, number: u32) -> Result<OwnedFd, String> {
        channels::open(self, number)
    }
    fn close_channel(&mut self, number: u32) -> Result<(), String> {
        channels::close(self, number)
    }
    fn return_events(&mut self, number: u32, events: &[u8]) -> Result<(), String> {
        channels::give_back(self, number, events)
    }
    fn refused(&self, request: u32, why: &str) {
        self.device.refused(request, why);
    }
}

/// How a session speaks to its device: by which socket its driver came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Native,
    Rfc,
}

impl Vrnic {
    fn listener(&mut self, mode: Mode) -> &mut (u64, OwnedFd) {
        match mode {
            Mode::Native => &mut self.listener,
            Mode::Rfc => &mut self.rfc_listener,
        }
    }
}

#[derive(Clone)]
enum Source {
    /// Supervisors that come.
    Door,
    /// The supervisor that is here.
    Supervisor,
    Wake,
    Listener(String, Mode),
    MachineListener(String),
    Socket(u64),
    Kick(u64, usize),
    Exit(u64),
    Broken,
}

/// The supervisor that is here.
struct Above {
    line: Line,
    token: u64,
}

/// The way to say something to the supervisor that is here, if it listens.
#[derive(Default)]
struct Notices(Mutex<Option<OwnedFd>>);

impl Notices {
    fn send(&self, notice: &Notice) {
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
    switch: Switch,
    /// Tells this process from those before.
    origin: u32,
    /// Of this thread.
    pulse: Arc<Pulse>,
    watchdog: Watchdog,
    notices: Arc<Notices>,
    epoll: Arc<OwnedFd>,
    wake: Arc<OwnedFd>,
    door: UnixListener,
    above: Option<Above>,
    sources: HashMap<u64, Source>,
    next_token: u64,
    vrnics: BTreeMap<String, Vrnic>,
    /// What vRNICs have done that are gone, so that sums over the group never get smaller.
    gone: VrnicInfo,
    sessions: HashMap<u64, Session>,
    lookers: BTreeMap<u64, Looker>,
    machines: HashMap<u64, Machine>,
    lingering: Vec<Lingering>,
    /// Until when nobody lingers.
    crowded_until_ns: u64,
    /// Kicks that came for nothing.
    idle_kicks: idle::IdleKicks,
    crowded_ns: u64,
    /// What all vRNICs may hold.
    ledger: Ledger,
    /// Sessions that have sent a part of a message, and since when, nanoseconds.
    half: Vec<(u64, u64)>,
    /// Connections of VMMs that get no network interface, and since when, nanoseconds.
    refused: VecDeque<(u64, Foreign)>,
    /// vRNICs that accept no program now, by these sockets.
    paused: Vec<(String, Mode)>,
    /// IP multicast groups that it wants to hear.
    wanted: Vec<IpAddr>,
    /// The supervisor has been asked for more QPNs, and has not given any.
    asked_for_qpns: bool,
    ended: bool,
}

/// What becomes of a worker whose supervisor is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Alone {
    /// It goes on, and waits for another one.
    Waits,
    /// It ends.
    Ends,
}

/// Serves the vRNICs of a group, which a supervisor that comes to `door` will name, until a supervisor ends it.
///
/// # Errors
/// The supervisor says something else, or the system lacks something.
pub fn work(door: UnixListener, alone: Alone) -> io::Result<()> {
    let (socket, _) = door.accept()?;
    let line = Line::new(socket.into())?;
    let (Call::Hello { version: VERSION }, notices) = line.receive(PATIENCE)? else {
        line.send(&Answer::Hello(hello(None)), &[], PATIENCE)?;
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the supervisor is of another version"));
    };
    line.send(&Answer::Hello(hello(None)), &[], PATIENCE)?;
    let (Call::Begin(begin), sockets) = line.receive(PATIENCE)? else {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the supervisor did not say which group this is"));
    };
    let ledger = ledger::Machine::look();
    // A worker that is confined makes no userfaultfd.
    let guarded = unirdma_mem::guard::install();
    // Before there is another thread.
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
    fn start(begin: Begin, sockets: Vec<OwnedFd>, door: UnixListener, machine: ledger::Machine) -> io::Result<Self> {
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
        let pulse = Arc::new(Pulse::default());
        let notices: Arc<Notices> = Arc::default();
        let (of_watchdog, group) = (notices.clone(), begin.group.clone());
        let watchdog = Watchdog::start(pulse.clone(), switch.pulse(), move |thread, seconds| {
            tracing::error!(group, seconds, "the {thread} is stuck");
            of_watchdog.send(&Notice::Stuck { thread: thread.into(), seconds });
        })?;
        Ok(Worker {
            group: begin.group,
            group_id: begin.id,
            network: begin.network,
            engine,
            switch,
            origin: getrandom::u32().unwrap_or_default(),
            pulse,
            watchdog,
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
            lingering: Vec::new(),
            crowded_until_ns: 0,
            idle_kicks: idle::IdleKicks::default(),
            crowded_ns: 0,
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

    /// Serves until a supervisor ends it.
    fn run(mut self, line: Line, notices: Option<OwnedFd>, alone: Alone) -> io::Result<()> {
        let wake = self.wake.clone();
        self.watch(wake.as_fd(), Source::Wake, true)?;
        self.engine.set_on_release(Box::new(move || {
            let _ = rustix::io::write(&*wake, &1u64.to_ne_bytes());
        }));
        if let Some(events) = unirdma_mem::guard::events() {
            self.watch(events, Source::Broken, true)?;
        }
        let door = self.door.try_clone()?;
        self.watch(door.as_fd(), Source::Door, false)?;
        self.welcome(line, notices)?;
        // The threads that do the work are there.
        confine::thread(Kind::Control);
        let mut events = [MaybeUninit::<epoll::Event>::uninit(); 64];
        while !self.ended {
            let limit = self.wait_limit();
            self.watchdog.guard(!self.sessions.is_empty());
            self.pulse.rest();
            let tokens: Vec<u64> = match epoll::wait(&self.epoll, &mut events, limit.as_ref()) {
                Ok((ready, _)) => ready.iter().map(|e| e.data.u64()).collect(),
                Err(rustix::io::Errno::INTR) => continue,
                Err(e) => return Err(e.into()),
            };
            self.pulse.begin();
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
                        if let Some(wanted) = self.engine.wanted_groups() {
                            self.notices.send(&Notice::Groups(wanted.clone()));
                            self.wanted = wanted;
                        }
                    }
                    Some(Source::Listener(name, mode)) => self.on_listener(&name, mode),
                    Some(Source::MachineListener(name)) => self.on_machine_listener(&name),
                    Some(Source::Socket(id)) => self.on_socket(id),
                    Some(Source::Kick(id, vring)) => self.on_kick(id, vring),
                    Some(Source::Exit(id)) => self.close(id),
                    Some(Source::Broken) => self.on_broken(),
                    None => {}
                }
            }
            self.linger();
            if let Some(rest) = self.idle_kicks.rest(self.engine.now()) {
                std::thread::sleep(rest);
            }
            self.end_half();
            self.end_refused();
            self.resume_listeners();
        }
        self.engine.stop();
        self.switch.stop();
        self.watchdog.stop();
        Ok(())
    }

    /// How long this thread may sleep.
    fn wait_limit(&self) -> Option<rustix::time::Timespec> {
        let after = |ns: u64| rustix::time::Timespec {
            tv_sec: (ns / 1_000_000_000) as i64,
            tv_nsec: (ns % 1_000_000_000) as i64,
        };
        if !self.lingering.is_empty() {
            return Some(after(0));
        }
        let half = self.half.iter().map(|h| (h.1 + HALF_NS).saturating_sub(self.engine.now())).min();
        let pause = (!self.paused.is_empty()).then_some(PAUSE_NS);
        Some(after(half.into_iter().chain(pause).chain(self.refused_limit()).min()?))
    }

    /// A program has sent a part of a message, or all of it.
    fn note_half(&mut self, id: u64, half: bool) {
        let known = self.half.iter().position(|h| h.0 == id);
        match (known, half) {
            (None, true) => self.half.push((id, self.engine.now())),
            (Some(at), false) => _ = self.half.swap_remove(at),
            _ => {}
        }
    }

    /// Ends the sessions of programs that have not sent the rest of a message for too long.
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

    // --- sessions ---

    fn on_listener(&mut self, name: &str, mode: Mode) {
        let Some(v) = self.vrnics.get_mut(name) else { return };
        if v.ledger.is_overdrawn() {
            let (token, listener) = v.listener(mode);
            let _ = epoll::delete(&self.epoll, listener);
            self.sources.remove(token);
            return self.paused.push((name.into(), mode));
        }
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let Ok(sock) = rustix::net::accept_with(&v.listener(mode).1, flags) else { return };
        // It may have sent descriptors already, which go when the socket goes.
        let Some(ticket) = v.ledger.take(Resource::Descriptors, 1) else {
            return drop(Foreign::refused(sock, &v.ledger));
        };
        let sock = Foreign::new(sock, ticket);
        // Urgent bytes come in line. The kernel would drop others, and what is beside them, in the thread that receives.
        if rustix::net::sockopt::set_socket_oobinline(&sock, true).is_err() {
            return;
        }
        if v.sessions >= v.limits.max_sessions as usize {
            // Once, not for each program that tries.
            if !std::mem::replace(&mut v.full, true) {
                let max = v.limits.max_sessions;
                tracing::warn!(vrnic = name, max, "too many programs; further ones get EUSERS (--max-sessions)");
            }
            let (sight, ledger) = (Sight(v.identity.clone(), mode), v.ledger.clone());
            return self.add_looker(name, sock, sight, ledger);
        }
        let (rnic, engine) = (self.engine.rnic.clone(), self.engine.clone());
        let (identity, ledger) = (v.identity.clone(), v.ledger.clone());
        let device = match mode {
            Mode::Native => Device::new(rnic, identity, engine),
            Mode::Rfc => Device::new_rfc(rnic, identity, engine, ledger.clone()),
        };
        let Some(device) = device else { return };
        let Some(ticket) = ledger.take(Resource::Descriptors, 1) else { return };
        let id = self.next_token;
        // The process may be gone while somebody else still holds its socket.
        let pidfd = rustix::net::sockopt::socket_peercred(&sock)
            .ok()
            .and_then(|c| rustix::process::pidfd_open(c.pid, rustix::process::PidfdFlags::empty()).ok());
        let mut tokens = Vec::new();
        let Ok(token) = self.watch(sock.as_fd(), Source::Socket(id), false) else { return };
        tokens.push(token);
        if let Some(p) = &pidfd
            && let Ok(token) = self.watch(p.as_fd(), Source::Exit(id), false)
        {
            tokens.push(token);
        }
        // Counted and known from here on, where nothing can fail any more.
        if let Some(v) = self.vrnics.get_mut(name) {
            v.sessions += 1;
        }
        self.engine.add_session(device.session(), device.events());
        let backend = Backend::new(sock, abi::NUM_QUEUES as usize, ledger.clone());
        let epoll = self.epoll.clone();
        let conn = Conn { id, device, kicks: HashMap::new(), changed: HashMap::new(), epoll, ledger };
        let session = Session {
            vrnic: name.into(),
            backend,
            conn,
            _pidfd: pidfd,
            tokens,
            lingers: false,
            served_ns: 0,
            _ticket: ticket,
        };
        self.sessions.insert(id, session);
    }

    fn add_looker(&mut self, name: &str, sock: Foreign, sight: Sight, ledger: Ledger) {
        let mut others = self.lookers.iter().filter(|(_, l)| l.vrnic == name).map(|(&id, _)| id);
        if let (Some(oldest), true) = (others.next(), others.count() + 1 >= MAX_LOOKERS) {
            self.end_look(oldest);
        }
        let id = self.next_token;
        let Ok(token) = self.watch(sock.as_fd(), Source::Socket(id), false) else { return };
        let backend = Backend::look_only(sock, ledger, Refusal::TooManyUsers);
        self.lookers.insert(id, Looker { vrnic: name.into(), backend, sight, token });
    }

    fn end_look(&mut self, id: u64) {
        self.note_half(id, false);
        if let Some(l) = self.lookers.remove(&id) {
            self.sources.remove(&l.token);
            let _ = epoll::delete(&self.epoll, l.backend.socket());
        }
    }

    /// Accepts programs again, or looks whether they may be.
    fn resume_listeners(&mut self) {
        for (name, mode) in std::mem::take(&mut self.paused) {
            let Some(v) = self.vrnics.get_mut(&name) else { continue };
            if v.ledger.is_overdrawn() {
                self.paused.push((name, mode));
                continue;
            }
            let token = self.next_token;
            let listener = v.listener(mode);
            let added = epoll::add(&self.epoll, &listener.1, epoll::EventData::new_u64(token), epoll::EventFlags::IN);
            if added.is_err() {
                self.paused.push((name, mode));
                continue;
            }
            listener.0 = token;
            self.next_token += 1;
            self.sources.insert(token, Source::Listener(name, mode));
        }
    }

    fn on_socket(&mut self, id: u64) {
        if let Some(l) = self.lookers.get_mut(&id) {
            let open = matches!(l.backend.on_readable(&mut l.sight, BURST), Ok(Progress::Open));
            let half = l.backend.is_half();
            self.note_half(id, open && half);
            if !open {
                self.end_look(id);
            }
            return;
        }
        if self.on_machine_socket(id) {
            return;
        }
        let Some(s) = self.sessions.get_mut(&id) else { return };
        let before = s.conn.device.session();
        let result = s.backend.on_readable(&mut s.conn, BURST);
        let after = s.conn.device.session();
        if before != after {
            self.engine.remove_session(before);
            self.engine.add_session(after, s.conn.device.events());
        }
        let (changed, half) = (std::mem::take(&mut s.conn.changed), s.backend.is_half());
        let rfc = s.conn.device.is_rfc();
        self.note_half(id, half);
        // A queue that begins, or begins again, may hold commands that nobody kicks for, and in the RFC mode WQEs.
        let begins = changed.contains_key(&(abi::VQ_CONTROL as usize)) || rfc && !changed.is_empty();
        for (vring, fd) in changed {
            self.set_kick(id, vring, fd);
        }
        match result {
            Ok(Progress::Open) => {}
            Ok(Progress::Closed) => self.close(id),
            Err(e) => {
                self.note(id, |left_out, vrnic| {
                    tracing::warn!(session = id, vrnic, error = %e, left_out, "vhost-user session closed");
                });
                self.close(id);
            }
        }
        self.engine.after_command();
        if begins {
            self.serve(id);
        }
    }

    fn set_kick(&mut self, id: u64, vring: usize, fd: Option<Arc<Foreign>>) {
        let Some(s) = self.sessions.get_mut(&id) else { return };
        let device_session = s.conn.device.session();
        let wakes = channels::wakes(vring) && !s.conn.device.is_rfc();
        if let Some(old) = s.conn.kicks.remove(&vring) {
            self.unwatch_kick(&old);
        }
        let Some(fd) = fd else { return };
        let token = if wakes {
            self.engine.watch(device_session, fd.as_fd()).map(|()| OF_POLLERS)
        } else {
            self.watch(fd.as_fd(), Source::Kick(id, vring), true)
        };
        match (token, self.sessions.get_mut(&id)) {
            (Ok(token), Some(s)) => {
                s.conn.kicks.insert(vring, Kick { token, fd });
            }
            (Err(e), _) => self.note(id, |left_out, vrnic| {
                tracing::warn!(session = id, vrnic, vring, error = %e, left_out, "kick descriptor refused");
            }),
            _ => {}
        }
    }

    /// Writes a line that a session has caused to the log, unless its vRNIC has caused many; the arguments of `line` are how many
    /// were left out, and the vRNIC's name.
    fn note(&self, session: u64, line: impl FnOnce(u64, &str)) {
        let Some(s) = self.sessions.get(&session) else { return };
        let limit = self.vrnics.get(&s.vrnic).map(|v| &v.identity.log);
        if let Some(left_out) = limit.and_then(|l| l.next(self.engine.now())) {
            line(left_out, &s.vrnic);
        }
    }

    /// Others may hold the same open file, so closing ours would not end the watch.
    fn unwatch_kick(&mut self, kick: &Kick) {
        if kick.token == OF_POLLERS {
            self.engine.unwatch(kick.fd.as_fd());
        } else {
            let _ = epoll::delete(&self.epoll, kick.fd.as_fd());
            self.sources.remove(&kick.token);
        }
    }

    fn on_kick(&mut self, id: u64, vring: usize) {
        if [abi::VQ_CONTROL as usize, channels::CONTROL].contains(&vring) {
            if let Some(kick) = self.sessions.get(&id).and_then(|s| s.conn.kicks.get(&channels::CONTROL)) {
                drop(unirdma_device::take_notifications(&kick.fd));
            }
            if !self.serve(id) {
                self.idle_kicks.note(self.engine.now());
            }
        } else if self.sessions.get(&id).is_some_and(|s| s.conn.device.events().on_kick(vring as u32)) {
            self.serve(id);
        }
    }

    /// Looks which of the pages that transfers have made in sparse files of a vRNIC's programs are still there.
    fn recount(&self, vrnic: &str) {
        let sessions = self.sessions.values().filter(|s| s.vrnic == vrnic).map(|s| s.backend.memory());
        let machines = self.machines.values().filter(|m| m.is_of(vrnic)).map(|m| m.memory());
        sessions.chain(machines).for_each(Memory::recount);
    }

    /// Memory of some program is gone: the program loses its session, and hears of it as of a device that is gone. Or some vRNIC has filled
    /// many pages of sparse files.
    fn on_broken(&mut self) {
        for (name, v) in self.vrnics.iter().filter(|(_, v)| v.ledger.wants_recount()) {
            self.recount(name);
            v.ledger.was_recounted();
        }
        self.end_broken_machines();
        let broken: Vec<u64> =
            self.sessions.iter().filter(|(_, s)| s.backend.memory().is_broken()).map(|(&id, _)| id).collect();
        for id in broken {
            let overfilled = self.sessions.get(&id).is_some_and(|s| s.backend.memory().is_overfilled());
            self.note(id, |left_out, vrnic| {
                let why = match overfilled {
                    true => {
                        "transfers have made as many pages of its sparse files as the vRNIC may have (--max-filled)"
                    }
                    false => "its file was truncated, or there is no memory left",
                };
                tracing::warn!(session = id, vrnic, why, left_out, "memory of a program is gone; its session ends");
            });
            self.close(id);
        }
        self.engine.after_command();
    }

    /// Serves the sessions whose command was held back until jobs had ended, or that the pollers leave something to.
    fn on_released(&mut self) {
        for released in self.engine.released() {
            let session = self.sessions.iter().find(|(_, s)| s.conn.device.session() == released).map(|(&id, _)| id);
            if let Some(id) = session {
                self.serve(id);
            }
        }
    }

    /// Executes commands of a session, and looks for more for a while if there were some just before. False if there were none: then
    /// nothing was done that others would have to hear of, and the RNIC is not asked.
    fn serve(&mut self, session: u64) -> bool {
        let Some(s) = self.sessions.get_mut(&session) else { return false };
        let now = self.engine.now();
        if !s.conn.device.serve_control() {
            return false;
        }
        let quick = now - s.served_ns < QUICK_NS && now >= self.crowded_until_ns;
        s.served_ns = now;
        // What has come since the driver was told not to kick is served by the look that ends the lingering.
        if (quick || !s.conn.device.listen()) && !std::mem::replace(&mut s.lingers, true) {
            let until_ns = if quick { now + LINGER_NS } else { now };
            self.lingering.push(Lingering { session, until_ns });
        }
        self.ask_for_qpns();
        self.engine.after_command();
        true
    }

    /// Looks at the control queues of sessions that sent a command just now, each in its turn.
    fn linger(&mut self) {
        let began = self.engine.now();
        let mut last = None;
        for _ in 0..LINGER_ROUNDS {
            let now = self.engine.now();
            if self.lingering.is_empty() || now - began > LINGER_TURN_NS {
                return;
            }
            if let Some(last) = last.filter(|last| now - last > CROWD_NS)
                && last >= self.crowded_until_ns
            {
                let again = last - self.crowded_until_ns < CROWDED_NS;
                self.crowded_ns = if again { (self.crowded_ns * 2).min(CROWDED_MAX_NS) } else { CROWDED_NS };
                self.crowded_until_ns = now + self.crowded_ns;
            }
            let crowded = now < self.crowded_until_ns;
            let sessions = &mut self.sessions;
            let mut served = false;
            self.lingering.retain_mut(|l| {
                let Some(s) = sessions.get_mut(&l.session) else { return false };
                // At the end, what came between the last look and the driver's news that it must kick again is served.
                // A queue that then has nothing to serve is broken, and is left alone until its next kick.
                let ends = crowded || now >= l.until_ns;
                let found =
                    s.conn.device.serve_control() || ends && !s.conn.device.listen() && s.conn.device.serve_control();
                served |= found;
                if found {
                    (s.served_ns, l.until_ns) = (now, now + LINGER_NS);
                }
                s.lingers = found || !ends;
                s.lingers
            });
            last = (!served).then_some(now);
            if served {
                self.engine.after_command();
            } else {
                self.engine.pause();
            }
        }
    }

    /// Ends a session and frees all that it had.
    fn close(&mut self, id: u64) {
        self.note_half(id, false);
        let Some(s) = self.sessions.remove(&id) else { return };
        for t in &s.tokens {
            self.sources.remove(t);
        }
        for kick in s.conn.kicks.values() {
            self.unwatch_kick(kick);
        }
        let _ = epoll::delete(&self.epoll, s.backend.socket());
        self.engine.remove_session(s.conn.device.session());
        if let Some(v) = self.vrnics.get_mut(&s.vrnic) {
            v.sessions -= 1;
            v.full = false;
        }
    }
}
