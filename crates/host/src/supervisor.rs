//! The supervisor: it starts a worker for each group and again if it dies, makes the directories and sockets of vRNICs, and answers
//! administrators. It executes nothing for a tenant, and nothing that a worker does or leaves undone keeps it from serving others.
//!
//! Its thread waits for what happens; each administration connection and whatever has to wait for a worker has a thread of its own.
//! Two locks, in this order: a group's own (`Group::lock`), which is held while its worker answers, and that of the names
//! ([`Supervisor::names`]), which is held for moments.

mod group;
mod manage;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use rustix::event::epoll;
use unirdma_device::lock;
use unirdma_formats::Mac;

use crate::admin::{self, Response};
use crate::engine::EngineConfig;
use crate::protocol::{Begin, MAX_NOTICE, Notice};
use crate::vrnic::{IpNet, mac_of};
use crate::{DEFAULT_GROUP, HostConfig, Isolation, vrnic_dir};
use group::{Group, Worker};

/// Tokens in the epoll set. Those of a group have its number in their lower half.
const STOP: u64 = 0;
const ADMIN: u64 = 1;
const DEATH: u64 = 1 << 32;
const NOTICE: u64 = 2 << 32;
/// The first process of a container whose administration connection was that of another supervisor.
const CONTAINER: u64 = 3 << 32;

/// What is one for all groups: names, numbers and addresses.
struct Names {
    groups: BTreeMap<String, Arc<Group>>,
    next_group: u32,
    vrnics: BTreeMap<String, Named>,
    /// The groups of which an administration connection holds something.
    held: BTreeMap<u64, BTreeSet<String>>,
}

/// A vRNIC among all.
struct Named {
    group: String,
    mac: Mac,
    ips: Vec<IpNet>,
}

pub(crate) struct Supervisor {
    dir: PathBuf,
    engine: EngineConfig,
    isolation: Isolation,
    names: Mutex<Names>,
    epoll: OwnedFd,
    /// Number of the next administration connection.
    next_connection: AtomicU64,
    /// The connection that captures.
    capturing: Mutex<Option<u64>>,
    stopping: AtomicBool,
}

impl Supervisor {
    /// Takes over the workers that serve a directory, or empties it and begins anew.
    ///
    /// # Errors
    /// One line: the directory, or a worker that cannot be taken over.
    pub fn open(config: &HostConfig) -> io::Result<Arc<Supervisor>> {
        let s = Supervisor {
            dir: config.dir.clone(),
            engine: config.engine.clone(),
            isolation: config.isolation,
            names: Mutex::new(Names {
                groups: BTreeMap::new(),
                next_group: 1,
                vrnics: BTreeMap::new(),
                held: BTreeMap::new(),
            }),
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            next_connection: AtomicU64::new(1),
            capturing: Mutex::default(),
            stopping: AtomicBool::new(false),
        };
        let s = Arc::new(s);
        for d in [s.workers_dir(), s.dir.join("vrnics")] {
            std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&d).map_err(crate::context("cannot create", &d))?;
            std::fs::set_permissions(&d, PermissionsExt::from_mode(0o700))?;
        }
        s.adopt_all()?;
        if !s.names().groups.contains_key(DEFAULT_GROUP) {
            s.add_group(DEFAULT_GROUP, 0).map_err(io::Error::other)?;
        }
        Ok(s)
    }

    fn workers_dir(&self) -> PathBuf {
        self.dir.join("workers")
    }

    fn names(&self) -> MutexGuard<'_, Names> {
        lock(&self.names)
    }

    /// Takes over the workers whose supervisor died, and removes what is left of those that died too.
    fn adopt_all(self: &Arc<Self>) -> io::Result<()> {
        for entry in std::fs::read_dir(self.workers_dir())? {
            let door = entry?.path();
            let name = door.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            match Group::adopt(&door, self.isolation) {
                Ok(group) if group.name == name => self.take_over(group),
                Ok(group) => tracing::error!("the worker at {} says that its group is {}", door.display(), group.name),
                Err(e) if e.kind() == io::ErrorKind::Unsupported => return Err(e),
                Err(e) => {
                    tracing::warn!(group = name, error = %e, "a worker of another supervisor is gone");
                    let _ = std::fs::remove_file(&door);
                }
            }
        }
        // What nobody serves.
        let names = self.names();
        for entry in std::fs::read_dir(self.dir.join("vrnics"))? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if !names.vrnics.contains_key(&name) {
                let _ = std::fs::remove_dir_all(path);
            }
        }
        Ok(())
    }

    /// A worker's group and vRNICs are known from now on.
    fn take_over(self: &Arc<Self>, group: Group) {
        let group = Arc::new(group);
        let mut inner = group.lock();
        let mut names = self.names();
        if names.groups.values().any(|g| g.id == group.id) {
            tracing::error!(group = group.name, "the worker says that it has the number of another group; it is left alone");
            return;
        }
        names.next_group = names.next_group.max(group.id + 1);
        let twice: Vec<String> = inner.members.keys().filter(|n| names.vrnics.contains_key(*n)).cloned().collect();
        for name in twice {
            tracing::error!(group = group.name, vrnic = name, "two workers say that they have this vRNIC");
            inner.members.remove(&name);
        }
        for (name, m) in &inner.members {
            let mac = mac_of(&m.new.ips, group.id);
            names.vrnics.insert(name.clone(), Named { group: group.name.clone(), mac, ips: m.new.ips.clone() });
            for (&id, first) in &m.containers {
                names.held.entry(id).or_default().insert(group.name.clone());
                let next = self.next_connection.load(Ordering::Relaxed).max(id + 1);
                self.next_connection.store(next, Ordering::Relaxed);
                self.watch(first.as_fd(), CONTAINER + id);
            }
        }
        tracing::info!(group = group.name, vrnics = inner.members.len(), "took over its worker");
        names.groups.insert(group.name.clone(), group.clone());
        if let Some(w) = &inner.worker {
            self.watch_worker(&group, w);
        }
    }

    /// Makes a group and starts its worker.
    fn add_group(self: &Arc<Self>, name: &str, id: u32) -> Result<(), String> {
        let begin = Begin { group: name.into(), id, engine: self.engine.clone() };
        let group = Group::new(begin, self.isolation, &self.workers_dir()).map_err(|e| e.to_string())?;
        let group = Arc::new(group);
        {
            let mut inner = group.lock();
            if let Err(e) = group.start(&mut inner) {
                drop(inner);
                group.end();
                return Err(e.to_string());
            }
            if let Some(w) = &inner.worker {
                self.watch_worker(&group, w);
            }
        }
        self.names().groups.insert(name.into(), group);
        Ok(())
    }

    fn watch(&self, fd: BorrowedFd<'_>, token: u64) {
        if let Err(e) = epoll::add(&self.epoll, fd, epoll::EventData::new_u64(token), epoll::EventFlags::IN) {
            tracing::error!(error = %e, "cannot be watched");
        }
    }

    fn watch_worker(&self, group: &Group, worker: &Worker) {
        if let Some(fd) = worker.pidfd() {
            // Once: it stays readable until the thread that starts the next worker has closed it.
            let (data, flags) = (epoll::EventData::new_u64(DEATH + u64::from(group.id)), epoll::EventFlags::IN);
            if let Err(e) = epoll::add(&self.epoll, fd, data, flags | epoll::EventFlags::ONESHOT) {
                tracing::error!(group = group.name, error = %e, "its worker cannot be watched");
            }
        }
        self.watch(worker.notices(), NOTICE + u64::from(group.id));
    }

    /// Serves until `stop` becomes readable.
    ///
    /// # Errors
    /// Those of epoll.
    pub fn run(self: &Arc<Self>, stop: BorrowedFd<'_>, admin: &UnixListener) -> io::Result<()> {
        self.watch(stop, STOP);
        self.watch(admin.as_fd(), ADMIN);
        let mut events = [MaybeUninit::<epoll::Event>::uninit(); 64];
        loop {
            let tokens: Vec<u64> = match epoll::wait(&self.epoll, &mut events, None) {
                Ok((ready, _)) => ready.iter().map(|e| e.data.u64()).collect(),
                Err(rustix::io::Errno::INTR) => continue,
                Err(e) => return Err(e.into()),
            };
            for t in tokens {
                let number = t as u32;
                match t >> 32 << 32 {
                    DEATH => self.on_death(number),
                    NOTICE => self.on_notice(number),
                    CONTAINER => self.on_container_end(u64::from(number)),
                    _ if t == ADMIN => self.on_admin(admin),
                    _ => return Ok(()),
                }
            }
        }
    }

    /// Ends all workers.
    pub fn end(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        let groups: Vec<Arc<Group>> = self.names().groups.values().cloned().collect();
        groups.iter().for_each(|g| g.end());
    }

    fn group_of(&self, id: u32) -> Option<Arc<Group>> {
        self.names().groups.values().find(|g| g.id == id).cloned()
    }

    /// Runs `f` where it may wait.
    fn apart(self: &Arc<Self>, what: &str, f: impl FnOnce(&Arc<Supervisor>) + Send + 'static) {
        let me = self.clone();
        if let Err(e) = std::thread::Builder::new().name(what.into()).spawn(move || f(&me)) {
            tracing::error!(error = %e, "no thread to {what}");
        }
    }

    fn on_death(self: &Arc<Self>, id: u32) {
        if let Some(group) = self.group_of(id) {
            self.apart("revive", move |s| group.revive(|w| s.watch_worker(&group, w)));
        }
    }

    fn on_notice(self: &Arc<Self>, id: u32) {
        let Some(group) = self.group_of(id) else { return };
        let _ = (group, MAX_NOTICE, None::<Notice>);
    }

    /// The container of another supervisor's connection has ended, and with it what that connection held.
    fn on_container_end(self: &Arc<Self>, id: u64) {
        self.apart("detach", move |s| s.closed(id));
    }

    fn on_admin(self: &Arc<Self>, admin: &UnixListener) {
        let Ok((stream, _)) = admin.accept() else { return };
        let id = self.next_connection.fetch_add(1, Ordering::Relaxed);
        self.apart("admin", move |s| {
            admin::serve(stream, |request, fd| {
                let answer = s.answer(id, request, fd).unwrap_or_else(Response::Error);
                (!s.stopping.load(Ordering::SeqCst)).then_some(answer)
            });
            s.closed(id);
        });
    }
}

/// The directory of a vRNIC and the socket in it.
fn listen(base: &Path, name: &str) -> io::Result<UnixListener> {
    let dir = vrnic_dir(base, name);
    std::fs::create_dir(&dir)?;
    let open = || {
        std::fs::set_permissions(&dir, PermissionsExt::from_mode(0o755))?;
        let path = dir.join(crate::VHOST_SOCKET);
        let listener = UnixListener::bind(&path)?;
        listener.set_nonblocking(true)?;
        // Who may see the directory may connect: it is mounted into one container only.
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o666))?;
        Ok(listener)
    };
    open().inspect_err(|_| _ = std::fs::remove_dir_all(&dir))
}
