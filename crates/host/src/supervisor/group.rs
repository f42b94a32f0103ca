//! A group as the supervisor sees it: its worker, what that worker was told, and how it is started anew.
//!
//! The supervisor keeps a duplicate of every descriptor that it gives to a worker. So a worker that died loses the connections of its
//! programs and nothing else: programs that open their device meanwhile wait at the same listening socket.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};
use unirdma_device::lock;

use crate::line::Line;
use crate::protocol::{Answer, Begin, Call, Hello, Kept, NewVrnic, VERSION};
use crate::worker::Alone;
use crate::{Isolation, context};

/// How long a worker may take to answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// A worker that lived for so long is started anew at once when it dies.
const STEADY: Duration = Duration::from_secs(2);
/// Else it is started after a pause, twice as long each time, up to the maximum.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LAST_PAUSE: Duration = Duration::from_secs(5);

/// A vRNIC as the supervisor knows it.
pub(super) struct Member {
    pub new: NewVrnic,
    pub listener: UnixListener,
    /// The interface that its container holds, and the administration connection that brought it.
    pub attached: Option<(u64, OwnedFd)>,
    /// The first process of each container, by the connection that told of it.
    pub containers: BTreeMap<u64, OwnedFd>,
}

/// What a worker keeps of a vRNIC for a supervisor to come: beside it come the listening socket, the interface if it has one, and the
/// first processes of its containers.
#[derive(Serialize, Deserialize)]
struct KeptMember {
    new: NewVrnic,
    attached: Option<u64>,
    containers: Vec<u64>,
}

impl Member {
    fn keepsake(&self) -> (KeptMember, Vec<BorrowedFd<'_>>) {
        let kept = KeptMember {
            new: self.new.clone(),
            attached: self.attached.as_ref().map(|a| a.0),
            containers: self.containers.keys().copied().collect(),
        };
        let tap = self.attached.iter().map(|a| a.1.as_fd());
        let fds = [self.listener.as_fd()].into_iter().chain(tap).chain(self.containers.values().map(AsFd::as_fd));
        (kept, fds.collect())
    }

    fn of_keepsake(kept: &Kept, fds: Vec<OwnedFd>) -> Option<Member> {
        let k: KeptMember = serde_json::from_str(&kept.what).ok()?;
        let mut fds = fds.into_iter();
        let listener = fds.next()?.into();
        let attached = match k.attached {
            Some(id) => Some((id, fds.next()?)),
            None => None,
        };
        let containers: BTreeMap<u64, OwnedFd> = k.containers.iter().copied().zip(fds).collect();
        let whole = containers.len() == k.containers.len() && k.new.name == kept.key;
        whole.then_some(Member { new: k.new, listener, attached, containers })
    }
}

/// A capture that runs in a worker.
pub(super) struct Capturing {
    pub vrnic: Option<String>,
    pub snap: u32,
    pub to: OwnedFd,
}

/// The process of a worker.
enum Process {
    /// A thread of this process, for tests.
    Thread,
    Child(Child, OwnedFd),
    /// Started by a supervisor before this one.
    Adopted(OwnedFd),
}

/// A worker that runs.
pub(super) struct Worker {
    line: Line,
    process: Process,
    pub pid: u32,
    notices: OwnedFd,
    since: Instant,
    /// It did not answer as it should, and was killed.
    given_up: bool,
}

impl Worker {
    /// What becomes readable when it has died.
    pub fn pidfd(&self) -> Option<BorrowedFd<'_>> {
        match &self.process {
            Process::Thread => None,
            Process::Child(_, fd) | Process::Adopted(fd) => Some(fd.as_fd()),
        }
    }

    pub fn notices(&self) -> BorrowedFd<'_> {
        self.notices.as_fd()
    }

    /// Ends it at once. What its programs had is gone with it.
    fn kill(&mut self) {
        match &mut self.process {
            Process::Thread => _ = self.line.send(&Call::End, &[], PATIENCE),
            Process::Child(child, _) => _ = child.kill(),
            Process::Adopted(fd) => _ = pidfd_send_signal(&*fd, Signal::KILL),
        }
    }

    /// Waits until it has ended; in words how, if that is known.
    fn wait(&mut self) -> String {
        match &mut self.process {
            Process::Child(child, _) => child.wait().map_or_else(|e| e.to_string(), |s| s.to_string()),
            Process::Adopted(fd) => {
                let _ = rustix::event::poll(&mut [rustix::event::PollFd::new(fd, rustix::event::PollFlags::IN)], None);
                "it was started by another supervisor".into()
            }
            Process::Thread => "it is a thread".into(),
        }
    }

    fn ask(&mut self, call: &Call, fds: &[BorrowedFd<'_>]) -> io::Result<(Answer, Vec<OwnedFd>)> {
        self.line.send(call, fds, PATIENCE)?;
        self.line.receive(PATIENCE)
    }
}

/// What changes of a group.
pub(super) struct Inner {
    pub worker: Option<Worker>,
    pub members: BTreeMap<String, Member>,
    pub captures: BTreeMap<u64, Capturing>,
    /// How often its worker died and was started anew.
    pub restarts: u64,
    /// Since the last worker that lived long.
    failures: u32,
    /// The group is gone, or all are.
    pub removed: bool,
}

/// A group.
pub(super) struct Group {
    pub name: String,
    pub id: u32,
    begin: Begin,
    isolation: Isolation,
    /// Where a supervisor to come finds its worker.
    door: PathBuf,
    listener: UnixListener,
    inner: Mutex<Inner>,
}

impl Group {
    /// A group without a worker.
    ///
    /// # Errors
    /// The worker's socket cannot be made.
    pub fn new(begin: Begin, isolation: Isolation, workers: &Path) -> io::Result<Group> {
        let door = workers.join(format!("{}.sock", begin.group));
        let _ = std::fs::remove_file(&door);
        let listener = UnixListener::bind(&door).map_err(context("cannot listen on", &door))?;
        Ok(Group::with(begin, isolation, door, listener, BTreeMap::new(), None))
    }

    fn with(
        begin: Begin,
        isolation: Isolation,
        door: PathBuf,
        listener: UnixListener,
        members: BTreeMap<String, Member>,
        worker: Option<Worker>,
    ) -> Group {
        let captures = BTreeMap::new();
        let inner = Inner { worker, members, captures, restarts: 0, failures: 0, removed: false };
        let (name, id) = (begin.group.clone(), begin.id);
        Group { name, id, begin, isolation, door, listener, inner: Mutex::new(inner) }
    }

    /// Takes over the worker that listens at `door`, with all that it serves.
    ///
    /// # Errors
    /// `ConnectionRefused`: no worker is there. Else one line that says what is wrong with it.
    pub fn adopt(door: &Path, isolation: Isolation) -> io::Result<Group> {
        let socket = UnixStream::connect(door)?;
        let pid = rustix::net::sockopt::socket_peercred(&socket)?.pid;
        let line = Line::new(socket.into())?;
        let (notices, theirs) = notice_sockets()?;
        line.send(&Call::Hello { version: VERSION }, &[theirs.as_fd()], PATIENCE)?;
        let (answer, _) = line.receive::<Answer>(PATIENCE)?;
        let Answer::Hello(hello) = answer else { return Err(nonsense()) };
        check_version(&hello)?;
        // The socket was made by the supervisor before this one; who accepts is the worker.
        let pid = Pid::from_raw(hello.pid as i32).unwrap_or(pid);
        let process = Process::Adopted(pidfd_open(pid, PidfdFlags::empty())?);
        let number = pid.as_raw_nonzero().get() as u32;
        let mut worker = Worker { line, process, pid: number, notices, since: Instant::now(), given_up: false };
        let (mut members, mut group, mut after) = (BTreeMap::new(), None, None);
        loop {
            let (answer, mut fds) = worker.ask(&Call::Kept { after: after.clone() }, &[])?;
            let Answer::Kept(kept) = answer else { return Err(nonsense()) };
            let Some(kept) = kept.filter(|k| after.as_ref() < Some(&k.key)) else { break };
            if kept.key == GROUP {
                let begin: Begin = serde_json::from_str(&kept.what)?;
                group = fds.pop().map(|fd| (begin, UnixListener::from(fd)));
            } else if let Some(m) = Member::of_keepsake(&kept, fds) {
                members.insert(kept.key.clone(), m);
            }
            after = Some(kept.key);
        }
        let (begin, listener) = group.filter(|(b, _)| Some(&b.group) == hello.group.as_ref()).ok_or_else(nonsense)?;
        Ok(Group::with(begin, isolation, door.to_path_buf(), listener, members, Some(worker)))
    }

    /// Its state. A call to the worker may take as long as [`PATIENCE`]; so who holds this holds nothing else that others wait for.
    pub fn lock(&self) -> MutexGuard<'_, Inner> {
        lock(&self.inner)
    }

    /// Starts a worker, and tells it all that the one before it was told.
    ///
    /// # Errors
    /// One line: why there is none.
    pub fn start(&self, inner: &mut Inner) -> io::Result<()> {
        let mut worker = self.launch()?;
        let told = self.tell_all(&mut worker, inner);
        if told.is_err() {
            worker.kill();
            worker.wait();
        }
        told.map(|()| inner.worker = Some(worker))
    }

    fn launch(&self) -> io::Result<Worker> {
        let line = Line::new(UnixStream::connect(&self.door).map_err(context("cannot reach", &self.door))?.into())?;
        let door = self.listener.try_clone()?;
        door.set_nonblocking(false)?;
        let (process, pid) = match self.isolation {
            Isolation::Threads => {
                let name = format!("worker {}", self.name);
                std::thread::Builder::new().name(name).spawn(move || {
                    if let Err(e) = crate::work(door, Alone::Ends) {
                        tracing::error!("worker: {e}");
                    }
                })?;
                (Process::Thread, std::process::id())
            }
            Isolation::Processes => {
                // Not by its path: that may be another program by now.
                let mut c = Command::new("/proc/self/exe");
                c.arg("worker").arg(&self.name).env_clear().current_dir("/");
                c.envs(std::env::vars_os().filter(|(name, _)| name == "UNIRDMA_LOG" || name == "RUST_BACKTRACE"));
                c.stdin(Stdio::from(OwnedFd::from(door))).stdout(Stdio::null());
                // What a terminal sends to the supervisor's process group is the supervisor's.
                std::os::unix::process::CommandExt::process_group(&mut c, 0);
                let mut child = c.spawn().map_err(|e| io::Error::new(e.kind(), format!("cannot start a worker: {e}")))?;
                let pidfd = Pid::from_raw(child.id() as i32)
                    .ok_or(io::ErrorKind::NotFound.into())
                    .and_then(|p| pidfd_open(p, PidfdFlags::empty()).map_err(io::Error::from));
                match pidfd {
                    Ok(fd) => {
                        let pid = child.id();
                        (Process::Child(child, fd), pid)
                    }
                    Err(e) => {
                        let _ = child.kill();
                        let _ = child.wait();
                        return Err(e);
                    }
                }
            }
        };
        let (notices, theirs) = notice_sockets()?;
        let mut worker = Worker { line, process, pid, notices, since: Instant::now(), given_up: false };
        let begun = worker.begin(&self.begin, theirs.as_fd());
        if begun.is_err() {
            worker.kill();
            let how = worker.wait();
            return begun.map(|()| worker).map_err(|e| {
                io::Error::new(e.kind(), format!("the worker of group {} does not start: {e} ({how})", self.name))
            });
        }
        Ok(worker)
    }

    /// Tells a worker of everything that this group has.
    fn tell_all(&self, worker: &mut Worker, inner: &Inner) -> io::Result<()> {
        let mut tell = |call: &Call, fds: &[BorrowedFd<'_>]| match worker.ask(call, fds)?.0 {
            Answer::Error(e) => Err(io::Error::other(e)),
            _ => Ok(()),
        };
        let begin = serde_json::to_string(&self.begin)?;
        tell(&Call::Keep { key: GROUP.into(), what: begin }, &[self.listener.as_fd()])?;
        for m in inner.members.values() {
            tell(&Call::Add(m.new.clone()), &[m.listener.as_fd()])?;
            if let Some((id, tap)) = &m.attached {
                tell(&Call::Attach { name: m.new.name.clone(), id: *id }, &[tap.as_fd()])?;
            }
            let (call, fds) = keep(m)?;
            tell(&call, &fds)?;
        }
        for (&id, c) in &inner.captures {
            tell(&Call::Capture { id, vrnic: c.vrnic.clone(), snap: c.snap }, &[c.to.as_fd()])?;
        }
        Ok(())
    }

    /// Calls its worker.
    ///
    /// # Errors
    /// One line: the worker's, or that it does not answer. In that case it is killed, and will be started anew.
    pub fn call(&self, inner: &mut Inner, call: &Call, fds: &[BorrowedFd<'_>]) -> Result<Answer, String> {
        let gone = || format!("the worker of group {} has ended and is being started anew; try again", self.name);
        let worker = inner.worker.as_mut().filter(|w| !w.given_up).ok_or_else(gone)?;
        match worker.ask(call, fds) {
            Ok((Answer::Error(e), _)) => Err(e),
            Ok((answer, _)) => Ok(answer),
            Err(e) => {
                worker.given_up = true;
                worker.kill();
                if e.kind() == io::ErrorKind::UnexpectedEof {
                    return Err(gone());
                }
                tracing::error!(group = self.name, pid = worker.pid, error = %e, "the worker does not answer and is ended");
                Err(format!("the worker of group {} does not answer ({e}) and is started anew", self.name))
            }
        }
    }

    /// Lets the worker keep what a supervisor to come must know of a vRNIC. If that fails, the worker is ended anyway.
    pub fn keep(&self, inner: &mut Inner, name: &str) {
        let Some(m) = inner.members.remove(name) else { return };
        if let Ok((call, fds)) = keep(&m) {
            let _ = self.call(inner, &call, &fds);
        }
        inner.members.insert(name.into(), m);
    }

    /// Starts the worker anew after it has died, as often as it takes; `watch` is called with each that was started.
    pub fn revive(&self, watch: impl Fn(&Worker)) {
        loop {
            let mut inner = self.lock();
            let Some(mut worker) = inner.worker.take() else { return };
            let how = worker.wait();
            if inner.removed {
                return;
            }
            tracing::error!(group = self.name, pid = worker.pid, how, "the worker has ended; it is started anew");
            inner.failures = if worker.since.elapsed() > STEADY { 0 } else { inner.failures + 1 };
            inner.restarts += 1;
            drop(worker);
            while let Err(e) = {
                if inner.failures > 1 {
                    let pause = (FIRST_PAUSE * (1 << inner.failures.min(16))).min(LAST_PAUSE);
                    drop(inner);
                    std::thread::sleep(pause);
                    inner = self.lock();
                    if inner.removed {
                        return;
                    }
                }
                self.start(&mut inner)
            } {
                tracing::error!(group = self.name, error = %e, "no worker");
                inner.failures += 1;
            }
            match &inner.worker {
                Some(w) => watch(w),
                None => return,
            }
            return;
        }
    }

    /// Ends its worker. Nothing of the group is left.
    pub fn end(&self) {
        let mut inner = self.lock();
        inner.removed = true;
        if let Some(mut w) = inner.worker.take() {
            w.kill();
            w.wait();
        }
        inner.members.clear();
        let _ = std::fs::remove_file(&self.door);
    }
}

impl Worker {
    /// Says to a process that has just started whose worker it is.
    fn begin(&mut self, begin: &Begin, notices: BorrowedFd<'_>) -> io::Result<()> {
        match self.ask(&Call::Hello { version: VERSION }, &[notices])?.0 {
            Answer::Hello(hello) => check_version(&hello)?,
            _ => return Err(nonsense()),
        }
        match self.ask(&Call::Begin(begin.clone()), &[])?.0 {
            Answer::Done => Ok(()),
            Answer::Error(e) => Err(io::Error::other(e)),
            _ => Err(nonsense()),
        }
    }
}

/// Key of what a worker keeps of the group itself. No vRNIC has such a name.
const GROUP: &str = "/group";

fn keep(m: &Member) -> io::Result<(Call, Vec<BorrowedFd<'_>>)> {
    let (kept, fds) = m.keepsake();
    Ok((Call::Keep { key: m.new.name.clone(), what: serde_json::to_string(&kept)? }, fds))
}

fn nonsense() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the worker says something else than it was asked")
}

fn check_version(hello: &Hello) -> io::Result<()> {
    if hello.version == VERSION && hello.program == env!("CARGO_PKG_VERSION") {
        return Ok(());
    }
    let group = hello.group.as_deref().unwrap_or("a group");
    let text = format!(
        "the worker of {group} (pid {}) is of unirdma {}, and this is {}; serve with that version, or end its workers first",
        hello.pid,
        hello.program,
        env!("CARGO_PKG_VERSION")
    );
    Err(io::Error::new(io::ErrorKind::Unsupported, text))
}

/// Our end of a socket for notices, which does not block, and the worker's.
fn notice_sockets() -> io::Result<(OwnedFd, OwnedFd)> {
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    rustix::io::ioctl_fionbio(&ours, true)?;
    Ok((ours, theirs))
}
