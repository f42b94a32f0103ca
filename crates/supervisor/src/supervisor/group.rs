//! A group in the supervisor: its worker, the knowledge that the worker was given, and its restarts.
//!
//! The supervisor has a duplicate of every descriptor that it gives to a worker. So if a worker dies, only the
//! connections of its programs are lost: programs that open their device meanwhile wait at the same listening socket.
//! The keeper has another duplicate, for the next supervisor.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU16, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{Pid, Signal, pidfd_send_signal};
use serde::{Deserialize, Serialize};
use unirdma_confine::{self as confine, Cgroup, CgroupError, CgroupLimits, Cgroups, InForce, Measure};
use unirdma_device::{LogLimit, lock, now_ns};
use unirdma_ipc::connection::Connection;
use unirdma_ipc::message::{Answer, Begin, Call, Event, NewVrnic, VERSION};
use unirdma_ipc::network::Plan;

use crate::network::Network;
use crate::process::{self, Child};
use crate::vf::{Borrower, Lender};
use crate::{Isolation, context};

/// Time limit for a worker's answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// A worker that dies within this time after its start is restarted when the time has passed. Any other worker is
/// restarted at once.
const STEADY: Duration = Duration::from_millis(50);
/// If a worker cannot be started, it is tried again after a pause that doubles each time, up to this one.
const LAST_PAUSE: Duration = Duration::from_secs(5);

/// The connection that has taken a vRNIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Taken {
    /// The administration connection.
    pub by: u64,
    /// The vRNIC was made for the connection, and is removed with it.
    pub temporary: bool,
}

/// A vRNIC in the supervisor.
pub(super) struct Member {
    pub new: NewVrnic,
    /// The listening sockets for its programs, for its network interface in a virtual machine, and for the RFC mode.
    pub listeners: [UnixListener; 3],
    /// The listening socket for requests for leases, if its programs may ask. It is this process's own.
    pub lease_listener: Option<OwnedFd>,
    /// The interface of its container, and the administration connection that brought it.
    pub attached: Option<(u64, OwnedFd)>,
    /// The first process of each container, by its administration connection.
    pub containers: BTreeMap<u64, OwnedFd>,
    /// The administration connection that has taken it.
    pub taken: Option<Taken>,
}

/// A vRNIC in the keeper. The listening sockets, with the one for leases if its programs may ask, the interface if it
/// has one, and the pidfds of its containers are stored along with it.
#[derive(Serialize, Deserialize)]
pub(super) struct KeptMember {
    new: NewVrnic,
    attached: Option<u64>,
    containers: Vec<u64>,
    #[serde(default)]
    taken: Option<Taken>,
}

impl Member {
    /// Nothing uses it and nobody has taken it. Programs are not looked at.
    pub fn is_free(&self) -> bool {
        self.taken.is_none() && self.attached.is_none() && self.containers.is_empty()
    }

    pub fn to_keep(&self) -> (KeptMember, Vec<BorrowedFd<'_>>) {
        let kept = KeptMember {
            new: self.new.clone(),
            attached: self.attached.as_ref().map(|a| a.0),
            containers: self.containers.keys().copied().collect(),
            taken: self.taken,
        };
        let tap = self.attached.iter().map(|a| a.1.as_fd());
        let listeners = self.listeners.iter().map(AsFd::as_fd).chain(self.lease_listener.iter().map(AsFd::as_fd));
        let fds = listeners.chain(tap).chain(self.containers.values().map(AsFd::as_fd));
        (kept, fds.collect())
    }

    pub fn of_kept(k: KeptMember, fds: Vec<OwnedFd>) -> Option<Member> {
        let mut fds = fds.into_iter();
        let listeners = [fds.next()?.into(), fds.next()?.into(), fds.next()?.into()];
        let lease_listener = if k.new.way.asks() { Some(fds.next()?) } else { None };
        let attached = match k.attached {
            Some(id) => Some((id, fds.next()?)),
            None => None,
        };
        let containers: BTreeMap<u64, OwnedFd> = k.containers.iter().copied().zip(fds).collect();
        (containers.len() == k.containers.len()).then_some(Member {
            new: k.new,
            listeners,
            lease_listener,
            attached,
            containers,
            taken: k.taken,
        })
    }
}

/// A group in the keeper. The listening socket of its worker and the worker's pidfd are stored along with it.
#[derive(Serialize, Deserialize)]
pub(super) struct KeptGroup {
    pub begin: Begin,
    weight: u32,
    #[serde(default)]
    vlan: u16,
    pub pid: u32,
    in_force: InForce,
}

/// A capture that runs in a worker.
pub(super) struct Capturing {
    pub vrnic: Option<String>,
    pub snap: u32,
    pub to: OwnedFd,
}

/// A running worker.
pub(super) struct Worker {
    line: Connection,
    /// `None`: it is a thread of this process.
    child: Option<Child>,
    notices: OwnedFd,
    /// Its confinement.
    in_force: InForce,
    since: Instant,
    /// It gave no valid answer, and was killed.
    given_up: bool,
}

impl Worker {
    fn new(line: Connection, child: Option<Child>, notices: OwnedFd) -> Worker {
        Worker { line, child, notices, in_force: InForce::default(), since: Instant::now(), given_up: false }
    }

    /// A descriptor that becomes readable when the worker has died.
    pub fn pidfd(&self) -> Option<BorrowedFd<'_>> {
        self.child.as_ref().map(Child::pidfd)
    }

    pub fn pid(&self) -> u32 {
        self.child.as_ref().map_or_else(std::process::id, Child::pid)
    }

    pub fn in_force(&self) -> &InForce {
        &self.in_force
    }

    pub fn notices(&self) -> BorrowedFd<'_> {
        self.notices.as_fd()
    }

    /// The next notice received. Messages that do not parse are skipped.
    pub fn notice(&self, buffer: &mut [u8]) -> Option<Event> {
        while let Ok((n @ 1.., _)) = rustix::net::recv(&self.notices, &mut *buffer, rustix::net::RecvFlags::DONTWAIT) {
            if let Ok(notice) = serde_json::from_slice(&buffer[..n]) {
                return Some(notice);
            }
        }
        None
    }

    /// True if it has not closed its end of the socket for notices.
    pub fn listens(&self) -> bool {
        let peek = rustix::net::RecvFlags::DONTWAIT | rustix::net::RecvFlags::PEEK;
        !matches!(rustix::net::recv(&self.notices, &mut [0], peek), Ok((0, _)))
    }

    /// Ends it at once. Its programs lose their objects.
    fn kill(&mut self) {
        match &self.child {
            Some(child) => child.kill(),
            None => _ = self.ask(&Call::End, &[]),
        }
    }

    fn wait(&mut self) -> String {
        self.child.as_mut().map_or_else(|| "it was a thread".into(), Child::wait)
    }

    fn ask(&mut self, call: &Call, fds: &[BorrowedFd<'_>]) -> io::Result<Answer> {
        self.line.send(call, fds, PATIENCE)?;
        Ok(self.line.receive(PATIENCE)?.0)
    }

    /// As [`Worker::ask`], but an error answer becomes an error.
    fn tell(&mut self, call: &Call, fds: &[BorrowedFd<'_>]) -> io::Result<Answer> {
        match self.ask(call, fds)? {
            Answer::Error(e) => Err(io::Error::other(e)),
            answer => Ok(answer),
        }
    }

    /// Opens a connection. Returns the group for which the worker has begun.
    fn handshake(&mut self, notices: BorrowedFd<'_>) -> io::Result<Option<String>> {
        match self.ask(&Call::Hello { version: VERSION }, &[notices])? {
            Answer::Hello(h) if h.version == VERSION && h.program == env!("CARGO_PKG_VERSION") => Ok(h.group),
            Answer::Hello(h) => {
                let text = format!("it is of unirdma {}, and this is {}", h.program, env!("CARGO_PKG_VERSION"));
                Err(io::Error::new(io::ErrorKind::Unsupported, text))
            }
            _ => Err(nonsense()),
        }
    }
}

/// Why a worker does not do what it is asked.
#[derive(Debug, thiserror::Error)]
pub(super) enum CallError {
    #[error("the worker of group {0} has ended and is being started anew; try again")]
    Ended(String),
    #[error("the worker of group {group} does not answer ({error}) and is started anew")]
    NoAnswer { group: String, error: io::Error },
    /// What the worker says.
    #[error("{0}")]
    Refused(String),
}

/// The mutable state of a group.
pub(super) struct Inner {
    pub worker: Option<Worker>,
    pub members: BTreeMap<String, Member>,
    pub captures: BTreeMap<u64, Capturing>,
    /// The secrets of the group, if it has any: the memory file that its worker was given. This process has no other
    /// copy of them.
    pub secrets: Option<OwnedFd>,
    /// The worker's last notice of a stuck thread, and its time.
    pub stuck: Option<(String, Instant)>,
    /// How often its worker died and was restarted.
    pub restarts: u64,
    /// Limits log messages about deaths.
    log: LogLimit,
    /// The group was removed, or the supervisor ends.
    pub removed: bool,
}

/// State shared by all groups.
pub(super) struct SupervisorShared {
    pub isolation: Isolation,
    pub confinement: Option<confine::Plan>,
    pub network: Option<Mutex<Network>>,
    /// The parent of the workers' cgroups; or why there are none.
    pub cgroups: Result<Cgroups, CgroupError>,
    /// The directory of the workers' listening sockets.
    pub doors: PathBuf,
    /// VFs for programs.
    pub lender: Arc<Lender>,
}

impl SupervisorShared {
    /// Why weights of groups have no effect; `None` if they have.
    pub fn why_no_weights(&self) -> Option<String> {
        match &self.cgroups {
            Ok(c) => c.why_no_weights().map(String::from),
            Err(why) => Some(why.to_string()),
        }
    }

    fn door(&self, group: &str) -> PathBuf {
        self.doors.join(format!("{group}.sock"))
    }
}

/// Properties of a group's secrets that are known without reading them.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SealNote {
    /// Number of its own secret that it sends with.
    pub number: Option<u8>,
    /// It has secrets, its own or with other groups.
    pub any: bool,
}

/// A group.
pub(super) struct Group {
    pub name: String,
    pub id: u32,
    begin: Begin,
    /// Its worker's share of the processors, in hundredths of the default share.
    weight: AtomicU32,
    /// Its VLAN on real RNICs; 0: none.
    vlan: AtomicU16,
    seal: Mutex<SealNote>,
    around: Arc<SupervisorShared>,
    /// The listening socket of its worker.
    door: PathBuf,
    listener: UnixListener,
    /// Its worker's pidfd, for threads that must not wait for `inner`.
    process: Mutex<Option<OwnedFd>>,
    inner: Mutex<Inner>,
}

impl Group {
    /// A group without a worker.
    ///
    /// # Errors
    /// The worker's socket cannot be made.
    pub fn new(begin: Begin, weight: u32, around: Arc<SupervisorShared>) -> io::Result<Group> {
        let door = around.door(&begin.group);
        let _ = std::fs::remove_file(&door);
        let listener = UnixListener::bind(&door).map_err(context("cannot listen on", &door))?;
        Ok(Group::with(begin, (weight, 0), around, listener, BTreeMap::new()))
    }

    fn with(
        begin: Begin,
        (weight, vlan): (u32, u16),
        around: Arc<SupervisorShared>,
        listener: UnixListener,
        members: BTreeMap<String, Member>,
    ) -> Group {
        let captures = BTreeMap::new();
        let inner = Inner {
            worker: None,
            members,
            captures,
            secrets: None,
            stuck: None,
            restarts: 0,
            log: LogLimit::default(),
            removed: false,
        };
        let (name, id, door) = (begin.group.clone(), begin.id, around.door(&begin.group));
        let (weight, process, inner) = (AtomicU32::new(weight), Mutex::default(), Mutex::new(inner));
        let (vlan, seal) = (AtomicU16::new(vlan), Mutex::default());
        let group = Group { name, id, begin, weight, vlan, seal, around, door, listener, process, inner };
        group.lock().members.values().for_each(|m| group.lend_to(m));
        group
    }

    /// A group of a supervisor that died, with its worker if that is alive. Otherwise the caller must start a worker.
    pub fn adopt(
        kept: KeptGroup,
        fds: Vec<OwnedFd>,
        members: BTreeMap<String, Member>,
        secrets: Option<OwnedFd>,
        around: Arc<SupervisorShared>,
    ) -> Option<Group> {
        let mut fds = fds.into_iter();
        let (listener, pidfd) = (fds.next()?.into(), fds.next()?);
        let group = Group::with(kept.begin, (kept.weight, kept.vlan), around, listener, members);
        let child = Child::of_pidfd(kept.pid, pidfd);
        group.lock().secrets = secrets;
        if !child.has_ended() {
            let mut inner = group.lock();
            match group.take_over(child, &inner) {
                Ok(worker) => {
                    group.limit_again();
                    group.install(&mut inner, Worker { in_force: kept.in_force, ..worker });
                }
                Err(e) => {
                    tracing::error!(group = group.name, error = %e, "its worker cannot be taken over and is ended")
                }
            }
        }
        Some(group)
    }

    /// Takes over a living worker. Afterwards it serves exactly these vRNICs.
    fn take_over(&self, child: Child, Inner { members, secrets, .. }: &Inner) -> io::Result<Worker> {
        let taken = || {
            let (notices, theirs) = notice_sockets()?;
            let line = Connection::new(UnixStream::connect(&self.door)?.into())?;
            let mut worker = Worker::new(line, None, notices);
            if worker.handshake(theirs.as_fd())?.as_deref() != Some(&self.name) {
                return Err(nonsense());
            }
            worker.send_secrets(secrets.as_ref())?;
            let Answer::Names(names) = worker.tell(&Call::Names, &[])? else { return Err(nonsense()) };
            let names: BTreeSet<String> = names.into_iter().collect();
            for name in names.iter().filter(|n| !members.contains_key(*n)) {
                worker.tell(&Call::Remove { name: name.clone() }, &[])?;
            }
            for m in members.values() {
                if names.contains(&m.new.name) {
                    worker.remind(&m.new, &self.around.lender)?;
                } else {
                    worker.introduce(m, &self.around.lender)?;
                }
            }
            Ok(worker)
        };
        match taken() {
            Ok(worker) => Ok(Worker { child: Some(child), ..worker }),
            Err(e) => {
                child.kill();
                Err(e)
            }
        }
    }

    /// Locks its state. A call to the worker may last [`PATIENCE`], so the caller must not hold another lock that
    /// others wait for.
    pub fn lock(&self) -> MutexGuard<'_, Inner> {
        lock(&self.inner)
    }

    /// Its description and its descriptors for the keeper; `None` if it has no worker that is a process.
    pub fn to_keep<'a>(&'a self, inner: &'a Inner) -> Option<(KeptGroup, [BorrowedFd<'a>; 2])> {
        let child = inner.worker.as_ref()?.child.as_ref()?;
        let in_force = inner.worker.as_ref()?.in_force.clone();
        let kept = KeptGroup {
            begin: self.begin.clone(),
            weight: self.weight(),
            vlan: self.vlan(),
            pid: child.pid(),
            in_force,
        };
        Some((kept, [self.listener.as_fd(), child.pidfd()]))
    }

    /// Starts a worker, and gives it all knowledge that the worker before had.
    ///
    /// # Errors
    /// One line: why there is none.
    pub fn start(&self, inner: &mut Inner) -> io::Result<()> {
        let mut worker = self.launch()?;
        match worker.introduce_all(inner, self.plan(), &self.around.lender) {
            Ok(()) => {
                self.install(inner, worker);
                Ok(())
            }
            Err(e) => Err(self.failed(worker, &e)),
        }
    }

    fn install(&self, inner: &mut Inner, worker: Worker) {
        *lock(&self.process) = worker.pidfd().and_then(|fd| fd.try_clone_to_owned().ok());
        inner.worker = Some(worker);
    }

    /// The locations of its peers, if there is a network.
    pub fn plan(&self) -> Option<Plan> {
        self.around.network.as_ref().map(|n| lock(n).plan(&self.name))
    }

    fn launch(&self) -> io::Result<Worker> {
        let line =
            Connection::new(UnixStream::connect(&self.door).map_err(context("cannot reach", &self.door))?.into())?;
        let (notices, theirs) = notice_sockets()?;
        let door = self.listener.try_clone()?;
        let child = match self.around.isolation {
            Isolation::Processes => Some(process::start(&["worker", &self.name], door.into())?),
            Isolation::Threads(work) => {
                let serve = move || {
                    if let Err(e) = work(door) {
                        tracing::error!("worker: {e}");
                    }
                };
                std::thread::Builder::new().name(format!("worker {}", self.name)).spawn(serve)?;
                None
            }
        };
        let cgroup = child.as_ref().map(|c| self.make_cgroup(c.pid()));
        let mut worker = Worker::new(line, child, notices);
        let begin = || {
            worker.handshake(theirs.as_fd())?;
            let network = self.around.network.as_ref().map(|n| lock(n).sockets_of(&self.name)).transpose()?;
            let (network, sockets) = network.map_or((None, Vec::new()), |(e, s)| (Some(e), s));
            let sockets: Vec<BorrowedFd<'_>> = sockets.iter().map(AsFd::as_fd).collect();
            match worker.tell(&Call::Begin(Box::new(Begin { network, ..self.begin.clone() })), &sockets)? {
                Answer::Begun(in_force) => worker.in_force = in_force,
                _ => return Err(nonsense()),
            }
            worker.in_force.measures.extend(cgroup.map(|c| Measure::new("cgroup", c)));
            Ok(())
        };
        match begin() {
            Ok(()) => Ok(worker),
            Err(e) => Err(self.failed(worker, &e)),
        }
    }

    /// Ends a worker that could not be started. Returns the reason, in one line.
    fn failed(&self, mut worker: Worker, e: &io::Error) -> io::Error {
        worker.kill();
        let how = worker.wait();
        io::Error::new(e.kind(), format!("the worker of group {} does not start: {e} ({how})", self.name))
    }

    /// Its worker's share of the processors, in hundredths of the default share.
    pub fn weight(&self) -> u32 {
        self.weight.load(Ordering::Relaxed)
    }

    /// Properties of its secrets.
    pub fn seal_note(&self) -> SealNote {
        *lock(&self.seal)
    }

    /// Sets the properties of its secrets.
    pub fn set_seal_note(&self, note: SealNote) {
        *lock(&self.seal) = note;
        self.tell_lender();
    }

    /// Its VLAN on real RNICs; 0: none.
    pub fn vlan(&self) -> u16 {
        self.vlan.load(Ordering::Relaxed)
    }

    /// Changes its VLAN on real RNICs.
    pub fn set_vlan(&self, vlan: u16) {
        self.vlan.store(vlan, Ordering::Relaxed);
        self.tell_lender();
    }

    fn tell_lender(&self) {
        self.around.lender.set_group(&self.name, self.vlan(), self.seal_note().number.is_some());
    }

    /// Lets the programs of a vRNIC of this group ask for VFs, if they may.
    pub fn lend_to(&self, m: &Member) {
        let Some(listener) = &m.lease_listener else { return };
        match listener.try_clone() {
            Ok(listener) => self.around.lender.add(&m.new.name, self.borrower(&m.new), listener),
            Err(e) => tracing::error!(vrnic = m.new.name, error = %e, "its programs get no VFs"),
        }
    }

    /// A vRNIC of this group whose programs may ask for VFs, for the lender.
    pub fn borrower(&self, new: &NewVrnic) -> Borrower {
        Borrower {
            way: new.way,
            instance: new.instance.clone().unwrap_or_else(|| new.name.clone()),
            group: self.name.clone(),
            vlan: self.vlan(),
            is_sealed: self.seal_note().number.is_some(),
            share: new.share,
            max_programs: new.limits.max_sessions,
        }
    }

    /// Changes its worker's share.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn set_weight(&self, weight: u32) -> Result<(), CgroupError> {
        let before = self.weight.swap(weight, Ordering::Relaxed);
        let Ok(cgroups) = &self.around.cgroups else { return Ok(()) };
        let set = cgroups.make(&self.name, &self.limits()).map(drop);
        set.inspect_err(|_| self.weight.store(before, Ordering::Relaxed))
    }

    fn limits(&self) -> CgroupLimits {
        CgroupLimits { weight: self.weight(), ..CgroupLimits::of_machine() }
    }

    /// Makes a cgroup for a new worker. It replaces the former worker's cgroup. Returns a description, or why there is
    /// none.
    fn make_cgroup(&self, pid: u32) -> Result<String, CgroupError> {
        let cgroups = self.around.cgroups.as_ref().map_err(Clone::clone)?;
        let limits = self.limits();
        let pid = Pid::from_raw(pid as i32).ok_or(CgroupError::NoProcess)?;
        let made = |c: Cgroup| c.enter(pid).inspect_err(|_| c.remove());
        // The old cgroup is removed, because memory that the former worker had touched is still charged to it.
        cgroups.make(&self.name, &limits)?.remove();
        cgroups.make(&self.name, &limits).and_then(made)?;
        Ok(cgroups.describe(&limits))
    }

    /// Sets the limits of the cgroup of a worker that was taken over. In version 2 the kernel forgets them when the
    /// controllers are disabled, as our systemd unit does so that a supervisor can be started beside workers.
    fn limit_again(&self) {
        if let Ok(c) = &self.around.cgroups
            && let Err(e) = c.make(&self.name, &self.limits())
        {
            tracing::warn!(group = self.name, error = %e, "the limits of its worker's cgroup cannot be set again");
        }
    }

    fn remove_cgroup(&self) {
        if let Ok(c) = &self.around.cgroups
            && let Ok(c) = c.make(&self.name, &self.limits())
        {
            c.remove();
        }
    }

    /// Calls its worker.
    ///
    /// # Errors
    /// The worker's error, or that it does not answer. In the second case it is killed, and will be restarted.
    pub fn call(&self, inner: &mut Inner, call: &Call, fds: &[BorrowedFd<'_>]) -> Result<Answer, CallError> {
        let gone = || CallError::Ended(self.name.clone());
        let worker = inner.worker.as_mut().filter(|w| !w.given_up).ok_or_else(gone)?;
        match worker.ask(call, fds) {
            Ok(Answer::Error(e)) => Err(CallError::Refused(e)),
            Ok(answer) => Ok(answer),
            Err(e) => {
                worker.given_up = true;
                worker.kill();
                if matches!(
                    e.kind(),
                    io::ErrorKind::UnexpectedEof | io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset
                ) {
                    return Err(gone());
                }
                tracing::error!(group = self.name, pid = worker.pid(), error = %e, "the worker does not answer and is ended");
                Err(CallError::NoAnswer { group: self.name.clone(), error: e })
            }
        }
    }

    /// Restarts the worker after it has died, and repeats failed attempts. Calls `begun` with the state when there is a
    /// worker again.
    pub fn revive(&self, begun: impl FnOnce(&Inner)) {
        let mut pause = Duration::ZERO;
        let mut inner = self.lock();
        if let Some(mut worker) = inner.worker.take() {
            let how = worker.wait();
            if inner.removed {
                return;
            }
            if let Some(left_out) = inner.log.next(now_ns()) {
                let why = if how.contains("signal: 31") { ": it made a system call that it may not make" } else { "" };
                let pid = worker.pid();
                tracing::error!(group = self.name, pid, how, left_out, "the worker has ended and is started anew{why}");
            }
            pause = STEADY.saturating_sub(worker.since.elapsed());
            inner.restarts += 1;
        }
        loop {
            drop(inner);
            std::thread::sleep(pause);
            inner = self.lock();
            if inner.removed || inner.worker.is_some() {
                return;
            }
            match self.start(&mut inner) {
                Ok(()) => return begun(&inner),
                Err(e) => tracing::error!(group = self.name, error = %e, "there is no worker"),
            }
            pause = (2 * pause).clamp(STEADY, LAST_PAUSE);
        }
    }

    /// The administration connections of which the former supervisor had an interface or a taken vRNIC when it died,
    /// but not yet the first process of their container. They are gone, and no event would report their end.
    pub fn orphans(&self, inner: &Inner) -> BTreeSet<u64> {
        let has_container = |id: &u64| inner.members.values().any(|m| m.containers.contains_key(id));
        let of = |m: &Member| m.attached.as_ref().map(|a| a.0).into_iter().chain(m.taken.map(|t| t.by));
        inner.members.values().flat_map(of).filter(|id| !has_container(id)).collect()
    }

    /// Kills its worker at once, without waiting for a thread that holds the group's lock.
    pub fn kill(&self) {
        if let Some(pidfd) = &*lock(&self.process) {
            let _ = pidfd_send_signal(pidfd, Signal::KILL);
        }
    }

    /// Ends its worker, and removes the group.
    pub fn end(&self) {
        let mut inner = self.lock();
        inner.removed = true;
        if let Some(mut w) = inner.worker.take() {
            w.kill();
            w.wait();
        }
        inner.members.clear();
        if matches!(self.around.isolation, Isolation::Processes) {
            self.remove_cgroup();
        }
        let _ = std::fs::remove_file(&self.door);
    }
}

impl Worker {
    /// Tells it everything about its group.
    fn introduce_all(&mut self, inner: &Inner, plan: Option<Plan>, lender: &Lender) -> io::Result<()> {
        if let Some(plan) = plan {
            // The secrets and the plan come before the vRNICs, because nobody can send yet.
            self.send_secrets(inner.secrets.as_ref())?;
            self.tell(&Call::Plan(plan), &[])?;
        }
        for m in inner.members.values() {
            self.introduce(m, lender)?;
        }
        for (&id, c) in &inner.captures {
            self.tell(&Call::Capture { id, vrnic: c.vrnic.clone(), snap: c.snap }, &[c.to.as_fd()])?;
        }
        Ok(())
    }

    /// Gives it the secrets of its group, if there are any.
    fn send_secrets(&mut self, secrets: Option<&OwnedFd>) -> io::Result<()> {
        match secrets {
            Some(file) => self.tell(&Call::Secrets { any: true }, &[file.as_fd()]).map(drop),
            None => Ok(()),
        }
    }

    /// Repeats settings of a vRNIC that may have changed just before the former supervisor died.
    fn remind(&mut self, new: &NewVrnic, lender: &Lender) -> io::Result<()> {
        let name = || new.name.clone();
        self.tell(&Call::VfUse { name: name(), vf_use: lender.vf_use(&new.name) }, &[])?;
        self.tell(&Call::Share { name: name(), share: new.share }, &[])?;
        self.tell(&Call::Held { name: name(), held: new.held }, &[])?;
        self.tell(&Call::AllowSpoof { name: name(), on: new.allow_spoof }, &[])?;
        self.tell(&Call::Link { name: name(), up: new.up }, &[]).map(drop)
    }

    /// Tells it about a vRNIC and its interface.
    fn introduce(&mut self, m: &Member, lender: &Lender) -> io::Result<()> {
        let new = NewVrnic { vf_use: lender.vf_use(&m.new.name), ..m.new.clone() };
        self.tell(&Call::Add(new), &m.listeners.each_ref().map(AsFd::as_fd))?;
        if let Some((id, tap)) = &m.attached {
            self.tell(&Call::Attach { name: m.new.name.clone(), id: *id }, &[tap.as_fd()])?;
        }
        Ok(())
    }
}

/// Ends an unknown worker, if one listens at this socket.
pub(super) fn end_stranger(door: &Path) {
    let end = || -> io::Result<()> {
        let line = Connection::new(UnixStream::connect(door)?.into())?;
        line.send(&Call::Hello { version: VERSION }, &[], PATIENCE)?;
        line.receive::<Answer>(PATIENCE)?;
        line.send(&Call::End, &[], PATIENCE)
    };
    let _ = end();
}

pub(super) fn nonsense() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the worker says something else than it was asked")
}

/// A pair of sockets for notices: the supervisor's end, which is non-blocking, and the worker's end.
fn notice_sockets() -> io::Result<(OwnedFd, OwnedFd)> {
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    rustix::io::ioctl_fionbio(&ours, true)?;
    Ok((ours, theirs))
}
