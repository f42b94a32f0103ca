//! The supervisor. It starts a worker for each group, restarts workers that die, makes the directories and sockets of
//! vRNICs, and answers administrators. It executes nothing for a tenant. A worker that misbehaves or hangs does not
//! prevent it from serving others.
//!
//! Its main thread waits for events. Each administration connection has a thread, and so has all work that may wait for
//! a worker.
//!
//! Order of locks: first a group's lock (`Group::lock`), which is held while its worker answers. Then either the
//! keeper's lock (`Supervisor::keeper`) or the network's lock (`SupervisorShared::network`), never both. Last the lock
//! of the names ([`Supervisor::names`]), which is held only for moments. No thread holds the locks of two groups.

mod admin_requests;
#[cfg(feature = "fleet")]
mod centre_orders;
mod error;
mod group;
#[cfg(not(feature = "fleet"))]
mod no_fleet;
mod secrets;
pub(crate) mod stats;
mod taken;
mod takeover;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::mem::MaybeUninit;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, socket_with};
use unirdma_abi::lease;
use unirdma_confine::{self as confine, CgroupError, Cgroups, InForce, USUAL_GROUP_WEIGHT};
use unirdma_device::lock;
use unirdma_ipc::config::EngineConfig;
use unirdma_ipc::fdpass;
use unirdma_ipc::message::{Begin, Call, Event, MAX_NOTICE};
use unirdma_ipc::vrnic::{Hardware, IpNet};

use crate::admin::{self, Response};
use crate::cdi::{Cdi, Class};
use crate::fdstore::Keeper;
use crate::network::{Network, PeerUpdate};
use crate::peer_source::CentrePeers;
use crate::service_manager::ServiceManager;
use crate::vf::{Lender, Pool, PoolThread, serve_programs};
use crate::{DEFAULT_GROUP, HostConfig, Isolation, WireConfig, vrnic_dir};
use group::{Group, Inner, KeptGroup, Member, SupervisorShared, Taken};
use takeover::Takeover;

#[cfg(feature = "fleet")]
use centre_orders::Fleet;
#[cfg(feature = "fleet")]
pub(crate) use centre_orders::identity;
#[cfg(not(feature = "fleet"))]
use no_fleet::Fleet;
#[cfg(not(feature = "fleet"))]
pub(crate) use no_fleet::identity;

/// Tokens in the epoll set. A group's tokens have its number in their lower half.
const STOP: u64 = 0;
const ADMIN: u64 = 1;
const KEEPER: u64 = 2;
const NETWORK: u64 = 3;
const UNUSED: u64 = 4;
const DEATH: u64 = 1 << 32;
const NOTICE: u64 = 2 << 32;
/// The end of a container's first process, if the container's administration connection was one of an earlier
/// supervisor.
const CONTAINER: u64 = 3 << 32;

/// Number of notices of a worker that are handled at a time, and the pause before the next ones.
const NOTICES: u32 = 16;
const PAUSE: Duration = Duration::from_millis(20);
/// Programs of a vRNIC that may wait to be accepted for a lease.
const LEASE_BACKLOG: i32 = 128;

/// Classes of devices that a vRNIC and a group are for container engines.
const VRNIC_CLASSES: &[Class] = &[Class::Vrnic, Class::VrnicPreload];
const GROUP_CLASSES: &[Class] = &[Class::Group, Class::GroupEth0];

/// State of all groups: names, numbers and addresses.
struct Registry {
    groups: BTreeMap<String, Arc<Group>>,
    /// Names of groups that are being made or removed.
    busy: BTreeSet<String>,
    next_group: u32,
    vrnics: BTreeMap<String, VrnicEntry>,
    /// For each administration connection, the groups of which it holds an interface or a container.
    held: BTreeMap<u64, BTreeSet<String>>,
}

/// A vRNIC in the state of all groups.
struct VrnicEntry {
    group: String,
    hardware: Hardware,
    ips: Vec<IpNet>,
}

pub(crate) struct Supervisor {
    dir: PathBuf,
    engine: EngineConfig,
    cdi: Option<Cdi>,
    around: Arc<SupervisorShared>,
    /// The supervisor's confinement.
    in_force: InForce,
    /// The control centre's changes of peers, for the network.
    bulletin: CentrePeers,
    fleet: Fleet,
    /// The pool of VFs of real RNICs, and its thread until that starts.
    pub(crate) vfs: Option<Arc<Pool>>,
    pool_thread: Mutex<Option<PoolThread>>,
    /// vRNICs that an administrator removes although programs use them.
    forced_removals: Mutex<BTreeSet<String>>,
    names: Mutex<Registry>,
    /// `None` if workers are threads, and while there is no keeper.
    keeper: Mutex<Option<Keeper>>,
    epoll: OwnedFd,
    /// Number of the next administration connection.
    next_connection: AtomicU64,
    /// The administration connection that captures.
    capturing: Mutex<Option<u64>>,
    stopping: AtomicBool,
    /// If it is to end with its last vRNIC: becomes readable when that is so.
    unused: Option<OwnedFd>,
}

impl Supervisor {
    /// Takes over the workers that serve a directory, or empties it and begins anew.
    ///
    /// # Errors
    /// One line: the directory, or a worker that cannot be taken over.
    pub fn open(config: &HostConfig) -> io::Result<Arc<Supervisor>> {
        let takeover = match config.isolation {
            Isolation::Threads(_) => None,
            Isolation::Processes => Takeover::find(&config.dir)?,
        };
        let (confinement, in_force) = match config.isolation {
            Isolation::Threads(_) => (None, InForce::default()),
            Isolation::Processes => {
                let plan = confine::Plan::make(&confine::Options { user: config.user.clone() })?;
                let wire = config.wire.as_ref();
                // Each of the following steps needs only these privileges.
                let needs = confine::Needs {
                    workers: plan.user.is_ok(),
                    network: wire.is_some(),
                    packets: wire.is_some_and(|w| w.full_icrc),
                    vfs: config.vfs.is_some(),
                };
                (Some(plan), confine::confine_supervisor(needs))
            }
        };
        let bulletin = CentrePeers::default();
        let (takeover, network) = Takeover::network(takeover, config.wire.as_ref(), &config.dir, &bulletin)?;
        let (vfs, pool_thread) = config.vfs.clone().map(|c| Pool::open(c, &config.dir)).transpose()?.unzip();
        let around = SupervisorShared {
            lender: Arc::new(Lender::new(vfs.clone(), &config.dir)?),
            isolation: config.isolation,
            confinement,
            network: network.map(Mutex::new),
            cgroups: match config.isolation {
                Isolation::Threads(_) => Err(CgroupError::Threads),
                Isolation::Processes => Cgroups::open(&config.dir, !config.engine.shares_cores()),
            },
            doors: config.dir.join("workers"),
        };
        let s = Supervisor {
            vfs,
            pool_thread: Mutex::new(pool_thread),
            around: Arc::new(around),
            in_force,
            bulletin,
            fleet: Fleet::new(config.wire.as_ref().map_or(&[], |w| &w.addresses)),
            forced_removals: Mutex::default(),
            dir: config.dir.clone(),
            engine: config.engine.clone(),
            cdi: config.cdi.clone(),
            names: Mutex::new(Registry {
                groups: BTreeMap::new(),
                busy: BTreeSet::new(),
                next_group: 1,
                vrnics: BTreeMap::new(),
                held: BTreeMap::new(),
            }),
            keeper: Mutex::default(),
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            next_connection: AtomicU64::new(1),
            capturing: Mutex::default(),
            stopping: AtomicBool::new(false),
            unused: config.ends_unused.then(|| eventfd(0, EventfdFlags::CLOEXEC)).transpose()?,
        };
        let s = Arc::new(s);
        let begun = s.begin(takeover);
        if begun.is_err() {
            s.end();
        }
        begun.map(|()| s)
    }

    /// Starts the keeper and the default group, or takes over what an earlier supervisor has left.
    fn begin(self: &Arc<Self>, takeover: Option<Takeover>) -> io::Result<()> {
        let doors = &self.around.doors;
        let make = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(doors);
        make.map_err(crate::context("cannot create", doors))?;
        std::fs::set_permissions(doors, PermissionsExt::from_mode(0o700))?;
        if matches!(self.around.isolation, Isolation::Processes) {
            match takeover {
                Some(h) => self.take_over(h),
                None => *lock(&self.keeper) = Some(Keeper::start(&self.dir)?),
            }
            self.watch_keeper();
        }
        self.remove_unserved()?;
        if !self.names().groups.contains_key(DEFAULT_GROUP) {
            self.add_group(DEFAULT_GROUP, 0, USUAL_GROUP_WEIGHT)?;
        }
        self.offer_all()
    }

    /// Offers all vRNICs and groups to container engines.
    fn offer_all(&self) -> io::Result<()> {
        let Some(cdi) = &self.cdi else { return Ok(()) };
        cdi.clear()?;
        let names = self.names();
        names.vrnics.keys().for_each(|name| self.offer(VRNIC_CLASSES, name));
        names.groups.keys().for_each(|name| self.offer(GROUP_CLASSES, name));
        Ok(())
    }

    /// Offers a vRNIC or a group to container engines.
    fn offer(&self, classes: &[Class], name: &str) {
        if let Some(cdi) = &self.cdi {
            cdi.put(&self.dir, classes, name);
        }
    }

    /// Offers it no more.
    fn withdraw(&self, classes: &[Class], name: &str) {
        if let Some(cdi) = &self.cdi {
            cdi.remove(classes, name);
        }
    }

    fn names(&self) -> MutexGuard<'_, Registry> {
        lock(&self.names)
    }

    // --- groups ---

    fn groups(&self) -> Vec<Arc<Group>> {
        self.names().groups.values().cloned().collect()
    }

    /// Makes a group and starts its worker.
    fn add_group(self: &Arc<Self>, name: &str, id: u32, weight: u32) -> io::Result<()> {
        let begin = Begin {
            group: name.into(),
            id,
            engine: self.engine.clone(),
            network: None,
            confinement: self.around.confinement.clone(),
        };
        let group = Arc::new(Group::new(begin, weight, self.around.clone())?);
        let mut inner = group.lock();
        let enrolled = self.around.network.as_ref().map(|n| lock(n).enroll(name, id)).transpose();
        if let Err(e) = enrolled.and_then(|_| group.start(&mut inner)) {
            drop(inner);
            self.end_group(&group);
            return Err(e);
        }
        self.keep_group(&group, &inner);
        self.keep_sockets(name);
        // The group is registered before its worker is watched, because a death is reported only once.
        self.names().groups.insert(name.into(), group.clone());
        self.watch_worker(&group, &inner);
        Ok(())
    }

    /// Ends a group and its worker.
    fn end_group(&self, group: &Group) {
        group.end();
        if let Some(n) = &self.around.network {
            lock(n).dismiss(&group.name);
        }
    }

    /// Sends workers their missing knowledge about peers.
    fn tell_workers(&self) {
        let Some(n) = &self.around.network else { return };
        for group in self.groups().into_iter().filter(|g| lock(n).has_update(&g.name)) {
            let mut inner = group.lock();
            let call = match lock(n).next_update(&group.name) {
                Some(PeerUpdate::Plan(plan)) => Call::Plan(plan),
                Some(PeerUpdate::Changes(changes)) => Call::Changes(changes),
                None => continue,
            };
            // A worker that does not accept it is ended. The next one gets everything.
            let _ = group.call(&mut inner, &call, &[]);
        }
    }

    /// Tells a vRNIC's worker whether its programs have a VF. A worker that starts learns it with the vRNIC.
    fn tell_vf_use(&self, name: &str) {
        let Ok(group) = self.group_with(name) else { return };
        let mut inner = group.lock();
        if inner.members.contains_key(name) {
            let vf_use = self.around.lender.vf_use(name);
            let _ = group.call(&mut inner, &Call::VfUse { name: name.into(), vf_use }, &[]);
        }
    }

    /// Assigns packets for QPN 1 of this host's addresses, which plain devices send, to the group that has a vRNIC with
    /// the address.
    fn set_owners(&self) {
        let Some(n) = &self.around.network else { return };
        let mut n = lock(n);
        for address in n.addresses().to_vec() {
            let owner = {
                let names = self.names();
                let owner = names.vrnics.values().find(|v| v.ips.iter().any(|ip| ip.addr == address));
                owner.map(|v| v.group.clone())
            };
            n.set_owner(address, owner.as_deref());
        }
    }

    fn watch(&self, fd: BorrowedFd<'_>, token: u64) {
        if let Err(e) = epoll::add(&self.epoll, fd, epoll::EventData::new_u64(token), epoll::EventFlags::IN) {
            tracing::error!(error = %e, "cannot be watched");
        }
    }

    /// As [`Supervisor::watch`], for descriptors that stay readable: the event is reported once.
    fn watch_once(&self, fd: BorrowedFd<'_>, token: u64) {
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ONESHOT;
        if let Err(e) = epoll::add(&self.epoll, fd, epoll::EventData::new_u64(token), flags) {
            tracing::error!(error = %e, "cannot be watched");
        }
    }

    fn watch_worker(&self, group: &Group, inner: &Inner) {
        let Some(worker) = &inner.worker else { return };
        if let Some(fd) = worker.pidfd() {
            self.watch_once(fd, DEATH + u64::from(group.id));
        }
        // Reported again only after the thread that reads the notices has finished.
        self.watch_once(worker.notices(), NOTICE + u64::from(group.id));
    }

    /// Restarts a group's worker.
    fn revive(self: &Arc<Self>, group: Arc<Group>) {
        self.apart("revive", move |s| {
            group.revive(|inner| {
                s.keep_group(&group, inner);
                s.watch_worker(&group, inner);
            });
        });
    }

    /// The numbers of vRNICs and groups, in one line.
    pub fn summary(&self) -> String {
        let names = self.names();
        let counted = |n: usize, what: &str| format!("{n} {what}{}", if n == 1 { "" } else { "s" });
        let (vrnics, groups) = (counted(names.vrnics.len(), "vRNIC"), counted(names.groups.len(), "group"));
        format!("Serving {vrnics} in {groups}")
    }

    /// Serves until `stop` becomes readable. Each turn of the loop lets the service manager know that it goes on.
    ///
    /// # Errors
    /// Errors of epoll.
    pub fn run(
        self: &Arc<Self>,
        stop: BorrowedFd<'_>,
        admin: &UnixListener,
        manager: &mut ServiceManager,
    ) -> io::Result<()> {
        self.watch(stop, STOP);
        self.watch(admin.as_fd(), ADMIN);
        if let Some(n) = &self.around.network {
            self.watch(lock(n).descriptor(), NETWORK);
        }
        self.watch_unused();
        let mut events = [MaybeUninit::<epoll::Event>::uninit(); 64];
        loop {
            // The summary takes the lock of the names, so a thread that does not give that back is noticed, too.
            let limit = manager.keep_alive(|| self.summary()).and_then(|d| d.try_into().ok());
            let tokens: Vec<u64> = match epoll::wait(&self.epoll, &mut events, limit.as_ref()) {
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
                    _ if t == NETWORK => self.on_network(),
                    _ if t == KEEPER => self.apart("keeper", |s| s.replace_keeper()),
                    _ => return Ok(()),
                }
            }
        }
    }

    /// Lets the pool of VFs look and apply what it plans, and answers programs that ask for VFs.
    ///
    /// # Errors
    /// There is no thread for it.
    pub fn start_pool(self: &Arc<Self>) -> io::Result<()> {
        let me = Arc::downgrade(self);
        let tell = move |vrnic: String, told: Box<dyn FnOnce() + Send>| {
            if let Some(s) = me.upgrade() {
                s.apart("vf", move |s| {
                    s.tell_vf_use(&vrnic);
                    told();
                });
            }
        };
        serve_programs(&self.around.lender, Box::new(tell));
        let Some(thread) = lock(&self.pool_thread).take() else { return Ok(()) };
        let me = Arc::downgrade(self);
        thread.start(Box::new(move || {
            let keeper = me.upgrade().and_then(|s| lock(&s.keeper).as_ref().map(Keeper::pid));
            keeper.into_iter().chain([std::process::id()]).collect()
        }))
    }

    /// Ends all workers.
    pub fn end(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        if let Some(cdi) = &self.cdi {
            let _ = cdi.clear();
        }
        if let Some(pool) = &self.vfs {
            pool.stop();
        }
        self.around.lender.stop();
        self.fleet.stop();
        // First without the groups' locks, which threads that wait for workers may hold.
        self.groups().iter().for_each(|g| g.kill());
        self.groups().iter().for_each(|g| g.end());
        if let Some(n) = &self.around.network {
            // Connected administrators keep the network's object alive, so the firewall's rules must be removed
            // explicitly.
            lock(n).end();
        }
        if let Some(k) = lock(&self.keeper).take() {
            k.end();
        }
        if let Ok(c) = &self.around.cgroups {
            c.remove();
        }
    }

    fn group_of(&self, id: u32) -> Option<Arc<Group>> {
        self.names().groups.values().find(|g| g.id == id).cloned()
    }

    /// Runs `f` on a separate thread, where it may wait.
    fn apart(self: &Arc<Self>, what: &str, f: impl FnOnce(&Arc<Supervisor>) + Send + 'static) {
        let me = self.clone();
        if let Err(e) = std::thread::Builder::new().name(what.into()).spawn(move || f(&me)) {
            tracing::error!(error = %e, "no thread to {what}");
        }
    }

    fn on_death(self: &Arc<Self>, id: u32) {
        if let Some(group) = self.group_of(id) {
            self.revive(group);
        }
    }

    fn on_notice(self: &Arc<Self>, id: u32) {
        let Some(group) = self.group_of(id) else { return };
        self.apart("notices", move |s| {
            let mut buffer = vec![0; MAX_NOTICE];
            for _ in 0..NOTICES {
                let mut inner = group.lock();
                let Some(notice) = inner.worker.as_ref().and_then(|w| w.notice(&mut buffer)) else { break };
                s.handle_event(&group, &mut inner, notice);
            }
            // The pause limits the rate of a worker that sends notices endlessly.
            std::thread::sleep(PAUSE);
            let inner = group.lock();
            if let Some(w) = inner.worker.as_ref().filter(|w| w.listens()) {
                let (data, flags) = (epoll::EventData::new_u64(NOTICE + u64::from(id)), epoll::EventFlags::IN);
                let _ = epoll::modify(&s.epoll, w.notices(), data, flags | epoll::EventFlags::ONESHOT);
            }
        });
    }

    /// Handles a worker's notice.
    fn handle_event(&self, group: &Group, inner: &mut Inner, notice: Event) {
        match notice {
            Event::Groups(wanted) => {
                let Some(n) = &self.around.network else { return };
                let (groups, sockets): (Vec<IpAddr>, Vec<OwnedFd>) =
                    lock(n).join(&group.name, &wanted).into_iter().unzip();
                for (groups, sockets) in groups.chunks(fdpass::MOST).zip(sockets.chunks(fdpass::MOST)) {
                    let sockets: Vec<BorrowedFd<'_>> = sockets.iter().map(AsFd::as_fd).collect();
                    let _ = group.call(inner, &Call::Hear { groups: groups.to_vec() }, &sockets);
                }
            }
            Event::Stuck { thread, seconds } => {
                // Replaces the worker's former notice.
                inner.stuck = Some((format!("{thread} for {seconds} s"), Instant::now()));
            }
            Event::Qpns => {
                let more = self.around.network.as_ref().and_then(|n| lock(n).more_qpns(&group.name));
                if let Some(all) = more {
                    self.keep_sockets(&group.name);
                    let _ = group.call(inner, &Call::Qpns(all), &[]);
                }
            }
        }
    }

    fn on_network(self: &Arc<Self>) {
        if self.around.network.as_ref().is_some_and(|n| lock(n).on_event()) {
            self.apart("updates", |s| s.tell_workers());
        }
    }

    /// The first process of a container of an earlier supervisor's connection has ended. Releases everything that this
    /// connection held.
    fn on_container_end(self: &Arc<Self>, id: u64) {
        self.apart("detach", move |s| s.closed(id));
    }

    fn on_admin(self: &Arc<Self>, admin: &UnixListener) {
        let Ok((stream, _)) = admin.accept() else { return };
        let id = self.next_connection.fetch_add(1, Ordering::Relaxed);
        self.apart("admin", move |s| {
            admin::serve(stream, |request, fd| {
                let answer = s.answer(id, request, fd).unwrap_or_else(|e| Response::Error(e.to_string()));
                (!s.stopping.load(Ordering::SeqCst)).then_some(answer)
            });
            s.closed(id);
        });
    }
}

/// Makes the directory of a vRNIC and its sockets, in the order of [`Call::Add`].
fn listen(base: &Path, name: &str) -> io::Result<[UnixListener; 3]> {
    let dir = vrnic_dir(base, name);
    std::fs::create_dir(&dir)?;
    let open = || {
        std::fs::set_permissions(&dir, PermissionsExt::from_mode(0o755))?;
        let listen = |socket: &str| -> io::Result<UnixListener> {
            let path = dir.join(socket);
            let listener = UnixListener::bind(&path)?;
            listener.set_nonblocking(true)?;
            // The directory is mounted into one container only. Every process that sees it may connect.
            std::fs::set_permissions(&path, PermissionsExt::from_mode(0o666))?;
            Ok(listener)
        };
        Ok([listen(crate::VHOST_SOCKET)?, listen(crate::NET_SOCKET)?, listen(crate::RFC_SOCKET)?])
    };
    open().inspect_err(|_| _ = std::fs::remove_dir_all(&dir))
}

/// Makes the socket at which programs of a vRNIC ask for leases.
fn listen_for_leases(base: &Path, name: &str) -> io::Result<OwnedFd> {
    let path = vrnic_dir(base, name).join(lease::SOCKET);
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    bind(&listener, &SocketAddrUnix::new(&path)?)?;
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o666))?;
    rustix::net::listen(&listener, LEASE_BACKLOG)?;
    Ok(listener)
}
