//! The control thread: sockets, control queues, sessions, administration; one event loop, no blocking.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::{Arc, mpsc};

use rustix::event::{EventfdFlags, epoll};
use rustix::net::SocketFlags;
use unirdma_abi as abi;
use unirdma_device::{Device, Identity, lock};
use unirdma_formats::Mac;
use unirdma_link::{Backend, Handler, Memory, Progress, RegionBudget, Vring};
use unirdma_rnic::{Limits, VnicConfig, VnicId};

use crate::admin::{self, GroupInfo, Request, Response, StatusInfo, WireInfo};
use crate::engine::Engine;
use crate::peers;
use crate::switch::Switch;
use crate::tunnel;
use crate::vrnic::{self, AddVrnic, IpNet, VrnicInfo};
use crate::wire::Wire;
use crate::{VHOST_SOCKET, vrnic_dir};

/// Most sessions of one vRNIC.
const MAX_SESSIONS: usize = 256;
/// Messages of one session before the others get a turn.
const BURST: usize = 32;
/// The group that always exists.
const DEFAULT_GROUP: &str = "default";

struct Vrnic {
    id: VnicId,
    group: String,
    ips: Vec<IpNet>,
    mac: Mac,
    identity: Arc<Identity>,
    limits: Limits,
    listener: (u64, UnixListener),
    attached: Option<u64>,
    sessions: usize,
    budget: RegionBudget,
}

/// A session: the protocol engine, the device behind it, and the descriptors that are watched for it.
struct Session {
    vrnic: String,
    backend: Backend,
    conn: Conn,
    _pidfd: Option<OwnedFd>,
    tokens: Vec<u64>,
}

/// Passes the link's calls on to the device and notes the latest kick descriptor of each vring that changed.
struct Conn {
    device: Device,
    kicks: HashMap<usize, Kick>,
    changed: HashMap<usize, Option<OwnedFd>>,
}

struct Kick {
    token: u64,
    fd: OwnedFd,
}

impl Handler for Conn {
    fn config(&self) -> Vec<u8> {
        self.device.config()
    }
    fn memory_changed(&mut self, memory: &Memory, removed: &[u64]) {
        self.device.memory_changed(memory, removed);
    }
    fn vring_changed(&mut self, index: usize, v: &Vring) {
        self.changed.insert(index, v.kick.as_ref().and_then(|fd| fd.try_clone().ok()));
        self.device.vring_changed(index, v);
    }
    fn stop_vring(&mut self, index: usize) -> u16 {
        self.changed.insert(index, None);
        self.device.stop_vring(index)
    }
    fn reset(&mut self) {
        self.changed.extend(self.kicks.keys().map(|&i| (i, None)));
        self.device.reset();
    }
    fn refused(&self, request: u32, why: &str) {
        self.device.refused(request, why);
    }
}

#[derive(Clone)]
enum Source {
    Stop,
    Wake,
    Admin,
    Listener(String),
    Socket(u64),
    Kick(u64, usize),
    Exit(u64),
    Peers,
}

/// A request of an administration connection, or its end.
enum Ask {
    Request(u64, Request, Option<OwnedFd>, mpsc::Sender<Response>),
    Closed(u64),
}

pub(crate) struct Control {
    dir: PathBuf,
    engine: Arc<Engine>,
    switch: Switch,
    admin: UnixListener,
    epoll: OwnedFd,
    wake: Arc<OwnedFd>,
    asks: (mpsc::Sender<Ask>, mpsc::Receiver<Ask>),
    sources: HashMap<u64, Source>,
    next_token: u64,
    vrnics: BTreeMap<String, Vrnic>,
    groups: BTreeMap<String, u32>,
    next_group: u32,
    sessions: HashMap<u64, Session>,
    wire: Option<Wire>,
}

type Answer = Result<Response, String>;

impl Control {
    pub(crate) fn new(
        dir: PathBuf,
        engine: Arc<Engine>,
        switch: Switch,
        admin: UnixListener,
        wire: Option<Wire>,
    ) -> io::Result<Self> {
        if let Some(w) = &wire {
            lock(&engine.rnic).set_wire_mtu(w.mtu());
        }
        Ok(Control {
            dir,
            engine,
            switch,
            admin,
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            wake: Arc::new(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?),
            asks: mpsc::channel(),
            sources: HashMap::new(),
            next_token: 1,
            vrnics: BTreeMap::new(),
            groups: BTreeMap::from([(DEFAULT_GROUP.to_string(), 0)]),
            next_group: 1,
            sessions: HashMap::new(),
            wire,
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

    /// Serves until `stop` is readable.
    pub(crate) fn run(mut self, stop: BorrowedFd<'_>, ready: impl FnOnce()) -> io::Result<()> {
        self.watch(stop, Source::Stop, false)?;
        let wake = self.wake.clone();
        self.watch(wake.as_fd(), Source::Wake, true)?;
        let admin = self.admin.try_clone()?;
        self.watch(admin.as_fd(), Source::Admin, false)?;
        if let Some(w) = self.wire.take() {
            self.watch(w.changes(), Source::Peers, false)?;
            self.wire = Some(w);
            self.set_routes();
        }
        ready();
        let mut events = [MaybeUninit::<epoll::Event>::uninit(); 64];
        loop {
            let tokens: Vec<u64> = match epoll::wait(&self.epoll, &mut events, None) {
                Ok((ready, _)) => ready.iter().map(|e| e.data.u64()).collect(),
                Err(rustix::io::Errno::INTR) => continue,
                Err(e) => return Err(e.into()),
            };
            for t in tokens {
                match self.sources.get(&t).cloned() {
                    Some(Source::Stop) => return Ok(()),
                    Some(Source::Wake) => self.on_asks(),
                    Some(Source::Admin) => self.on_admin(),
                    Some(Source::Listener(name)) => self.on_listener(&name),
                    Some(Source::Socket(id)) => self.on_socket(id),
                    Some(Source::Kick(id, vring)) => self.on_kick(id, vring),
                    Some(Source::Exit(id)) => self.close(id),
                    Some(Source::Peers) if self.wire.as_mut().is_some_and(Wire::reload) => self.set_routes(),
                    Some(Source::Peers) => {}
                    None => {}
                }
            }
        }
    }

    /// Tells the RNIC where peers are; after a change of the file or of the groups.
    fn set_routes(&self) {
        if let Some(w) = &self.wire {
            lock(&self.engine.rnic).set_routes(peers::routes(w.peers(), &self.groups));
            self.switch.set_groups(peers::members(w.peers(), &self.groups));
        }
    }

    // --- sessions ---

    fn on_listener(&mut self, name: &str) {
        let Some(v) = self.vrnics.get_mut(name) else { return };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let Ok(sock) = rustix::net::accept_with(&v.listener.1, flags) else { return };
        if v.sessions >= MAX_SESSIONS {
            tracing::warn!(vrnic = name, "too many sessions");
            return;
        }
        let Some(device) = Device::new(self.engine.rnic.clone(), v.identity.clone()) else { return };
        let budget = v.budget.clone();
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
        let backend = Backend::new(sock, abi::NUM_QUEUES as usize, budget);
        let conn = Conn { device, kicks: HashMap::new(), changed: HashMap::new() };
        self.sessions.insert(id, Session { vrnic: name.into(), backend, conn, _pidfd: pidfd, tokens });
    }

    fn on_socket(&mut self, id: u64) {
        let Some(s) = self.sessions.get_mut(&id) else { return };
        let before = s.conn.device.session();
        let result = s.backend.on_readable(&mut s.conn, BURST);
        let after = s.conn.device.session();
        if before != after {
            self.engine.remove_session(before);
            self.engine.add_session(after, s.conn.device.events());
        }
        let changed = std::mem::take(&mut s.conn.changed);
        for (vring, fd) in changed {
            self.set_kick(id, vring, fd);
        }
        match result {
            Ok(Progress::Open) => {}
            Ok(Progress::Closed) => self.close(id),
            Err(e) => {
                tracing::warn!(session = id, error = %e, "vhost-user session closed");
                self.close(id);
            }
        }
        self.engine.after_command();
    }

    fn set_kick(&mut self, id: u64, vring: usize, fd: Option<OwnedFd>) {
        let Some(s) = self.sessions.get_mut(&id) else { return };
        let device_session = s.conn.device.session();
        if let Some(old) = s.conn.kicks.remove(&vring) {
            self.unwatch_kick(vring, &old);
        }
        let Some(fd) = fd else { return };
        let token = if vring == abi::VQ_WAKE as usize {
            self.engine.watch(device_session, fd.as_fd()).map(|()| 0)
        } else {
            self.watch(fd.as_fd(), Source::Kick(id, vring), true)
        };
        match (token, self.sessions.get_mut(&id)) {
            (Ok(token), Some(s)) => {
                s.conn.kicks.insert(vring, Kick { token, fd });
            }
            (Err(e), _) => tracing::warn!(session = id, vring, error = %e, "kick descriptor refused"),
            _ => {}
        }
    }

    /// Others may hold the same open file, so closing ours would not end the watch.
    fn unwatch_kick(&mut self, vring: usize, kick: &Kick) {
        if vring == abi::VQ_WAKE as usize {
            self.engine.unwatch(kick.fd.as_fd());
        } else {
            let _ = epoll::delete(&self.epoll, &kick.fd);
            self.sources.remove(&kick.token);
        }
    }

    fn on_kick(&mut self, id: u64, vring: usize) {
        let Some(s) = self.sessions.get_mut(&id) else { return };
        if vring == abi::VQ_CONTROL as usize {
            s.conn.device.on_control_kick();
            self.engine.after_command();
        } else {
            s.conn.device.events().on_kick(vring as u16);
        }
    }

    /// Ends a session and frees all that it had.
    fn close(&mut self, id: u64) {
        let Some(s) = self.sessions.remove(&id) else { return };
        for t in &s.tokens {
            self.sources.remove(t);
        }
        for (&vring, kick) in &s.conn.kicks {
            self.unwatch_kick(vring, kick);
        }
        let _ = epoll::delete(&self.epoll, s.backend.socket());
        self.engine.remove_session(s.conn.device.session());
        if let Some(v) = self.vrnics.get_mut(&s.vrnic) {
            v.sessions -= 1;
        }
    }

    // --- administration ---

    fn on_admin(&mut self) {
        let Ok((stream, _)) = self.admin.accept() else { return };
        let id = self.next_token;
        self.next_token += 1;
        let (asks, wake) = (self.asks.0.clone(), self.wake.clone());
        let kick = move || rustix::io::write(&*wake, &1u64.to_ne_bytes()).is_ok();
        let spawned = std::thread::Builder::new().name("admin".into()).spawn(move || {
            admin::serve(stream, |request, fd| {
                let (tx, rx) = mpsc::channel();
                asks.send(Ask::Request(id, request, fd, tx)).ok()?;
                kick();
                rx.recv().ok()
            });
            let _ = asks.send(Ask::Closed(id));
            kick();
        });
        if let Err(e) = spawned {
            tracing::warn!(error = %e, "administration connection refused");
        }
    }

    fn on_asks(&mut self) {
        while let Ok(ask) = self.asks.1.try_recv() {
            match ask {
                Ask::Request(id, request, fd, reply) => {
                    let answer = self.answer(id, request, fd).unwrap_or_else(Response::Error);
                    let _ = reply.send(answer);
                }
                Ask::Closed(id) => {
                    for v in self.vrnics.values_mut().filter(|v| v.attached == Some(id)) {
                        v.attached = None;
                        self.switch.remove(id);
                    }
                }
            }
        }
    }

    fn answer(&mut self, id: u64, request: Request, fd: Option<OwnedFd>) -> Answer {
        match request {
            Request::VrnicAdd(add) => self.add_vrnic(&add),
            Request::VrnicList => Ok(Response::Vrnics(self.vrnics.keys().filter_map(|n| self.info(n)).collect())),
            Request::VrnicShow { name } => {
                self.info(&name).map(|i| Response::Vrnic(Box::new(i))).ok_or_else(|| self.unknown(&name))
            }
            Request::VrnicRemove { name, force } => self.remove_vrnic(&name, force),
            Request::GroupAdd { name } => {
                vrnic::check_name("group", &name)?;
                if self.groups.contains_key(&name) {
                    return Err(format!("group {name} exists already"));
                }
                let same = self.groups.keys().find(|g| tunnel::vni(g) == tunnel::vni(&name));
                if let Some(g) = same.filter(|_| self.wire.is_some()) {
                    return Err(format!(
                        "group {name} would share its VXLAN identifier with group {g}; choose another name"
                    ));
                }
                self.groups.insert(name, self.next_group);
                self.next_group += 1;
                self.set_routes();
                Ok(Response::Done)
            }
            Request::GroupList => {
                let count = |g: &str| self.vrnics.values().filter(|v| v.group == g).count();
                let infos = self.groups.keys().map(|g| GroupInfo { name: g.clone(), vrnics: count(g) });
                Ok(Response::Groups(infos.collect()))
            }
            Request::GroupRemove { name } => self.remove_group(&name),
            Request::Attach { name } => self.attach(id, &name, fd),
            Request::Status => Ok(Response::Status(Box::new(StatusInfo {
                pid: std::process::id(),
                version: env!("CARGO_PKG_VERSION").into(),
                dir: self.dir.display().to_string(),
                vrnics: self.vrnics.len(),
                sessions: self.sessions.len(),
                wire: self.wire.as_ref().map(|w| WireInfo {
                    addresses: w.addresses().to_vec(),
                    peers_file: w.file().display().to_string(),
                    peers: w.peers().len(),
                    peers_error: w.error().map(str::to_string),
                    mtu: w.mtu(),
                    port: self.engine.port_counters().unwrap_or_default(),
                    drops: lock(&self.engine.rnic).wire_drops(),
                }),
            }))),
        }
    }

    fn unknown(&self, name: &str) -> String {
        format!("there is no vRNIC {name}; `unirdma vrnic ls` lists those that exist")
    }

    fn remove_group(&mut self, name: &str) -> Answer {
        if name == DEFAULT_GROUP {
            return Err("the group `default` always exists".into());
        }
        if let Some((v, _)) = self.vrnics.iter().find(|(_, v)| v.group == name) {
            return Err(format!("group {name} still has the vRNIC {v}; remove its vRNICs first"));
        }
        self.groups.remove(name).ok_or(format!("there is no group {name}"))?;
        self.set_routes();
        Ok(Response::Done)
    }

    fn add_vrnic(&mut self, add: &AddVrnic) -> Answer {
        vrnic::check_name("vRNIC", &add.name)?;
        if self.vrnics.contains_key(&add.name) {
            return Err(format!(
                "vRNIC {} exists already; choose another name or remove it with `unirdma vrnic rm {}`",
                add.name, add.name
            ));
        }
        let group = add.group.clone().unwrap_or(DEFAULT_GROUP.into());
        let Some(&group_id) = self.groups.get(&group) else {
            let known: Vec<&str> = self.groups.keys().map(String::as_str).collect();
            return Err(format!(
                "there is no group {group} (there are: {}); create it with `unirdma group add {group}`",
                known.join(", ")
            ));
        };
        let ips = self.choose_ips(add, &group)?;
        let mac = vrnic::mac_of(&ips, group_id);
        if let Some((n, _)) = self.vrnics.iter().find(|(_, v)| v.group == group && v.mac == mac) {
            return Err(format!("the virtual MAC {mac} of these addresses is that of vRNIC {n}; choose another --ip"));
        }
        let d = Limits::default();
        let limits = Limits {
            max_qp: add.max_qp.unwrap_or(d.max_qp),
            max_cq: add.max_cq.unwrap_or(d.max_cq),
            max_mr: add.max_mr.unwrap_or(d.max_mr),
            max_mr_bytes: add.max_mr_bytes.unwrap_or(d.max_mr_bytes),
            ..d
        };
        let config = VnicConfig { group: group_id, gids: vrnic::gid_table(&ips, mac), limits };
        let id = lock(&self.engine.rnic).add_vnic(config).ok_or("too many vRNICs")?;
        let identity = Arc::new(Identity {
            vnic: id,
            config: vrnic::device_config(mac, &limits),
            name: add.name.clone(),
            active_mtu: self.wire.as_ref().map_or(vrnic::PORT_MTU, Wire::mtu_code),
        });
        let listener = self.listen(&add.name).map_err(|e| {
            lock(&self.engine.rnic).remove_vnic(id);
            format!("cannot serve vRNIC {}: {e}", add.name)
        })?;
        let v = Vrnic {
            id,
            group,
            ips,
            mac,
            identity,
            limits,
            listener,
            attached: None,
            sessions: 0,
            budget: RegionBudget::default(),
        };
        self.vrnics.insert(add.name.clone(), v);
        self.info(&add.name).map(|i| Response::Vrnic(Box::new(i))).ok_or_else(|| self.unknown(&add.name))
    }

    fn choose_ips(&self, add: &AddVrnic, group: &str) -> Result<Vec<IpNet>, String> {
        let taken = |ip: &IpNet| {
            let mut members = self.vrnics.iter().filter(|(_, v)| v.group == group);
            members.find(|(_, v)| v.ips.iter().any(|o| vrnic::same_address(o, ip))).map(|(n, _)| n.clone())
        };
        if add.ips.is_empty() {
            let mut free = (0..0xfffe).map(vrnic::auto_ip).filter(|ip| taken(ip).is_none());
            return free.next().map(|ip| vec![ip]).ok_or("no automatic address is left; give one with --ip".into());
        }
        for (i, ip) in add.ips.iter().enumerate() {
            if let Some(other) = taken(ip) {
                return Err(format!(
                    "{} belongs to vRNIC {other} of group {group} already; choose another --ip or another --group",
                    ip.addr
                ));
            }
            let again =
                add.ips[..i].iter().any(|o| vrnic::same_address(o, ip) || o.addr.is_ipv4() && ip.addr.is_ipv4());
            if again {
                return Err(format!("{}: a vRNIC has at most one IPv4 address, and no address twice", ip.addr));
            }
            if let std::net::IpAddr::V6(v6) = ip.addr
                && vrnic::is_link_local(v6)
            {
                return Err(format!("{v6} is link-local; a vRNIC has one of those by itself"));
            }
        }
        Ok(add.ips.clone())
    }

    fn listen(&mut self, name: &str) -> io::Result<(u64, UnixListener)> {
        let dir = vrnic_dir(&self.dir, name);
        std::fs::create_dir(&dir)?;
        std::fs::set_permissions(&dir, PermissionsExt::from_mode(0o755))?;
        let path = dir.join(VHOST_SOCKET);
        let listener = UnixListener::bind(&path)?;
        listener.set_nonblocking(true)?;
        // Who may see the directory may connect: it is mounted into one container only.
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o666))?;
        let token = self.watch(listener.as_fd(), Source::Listener(name.into()), false)?;
        Ok((token, listener))
    }

    fn remove_vrnic(&mut self, name: &str, force: bool) -> Answer {
        let v = self.vrnics.get(name).ok_or_else(|| self.unknown(name))?;
        if !force && (v.sessions > 0 || v.attached.is_some()) {
            return Err(format!(
                "vRNIC {name} is in use ({} sessions); end its container first, or add --force",
                v.sessions
            ));
        }
        let ids: Vec<u64> = self.sessions.iter().filter(|(_, s)| s.vrnic == name).map(|(&id, _)| id).collect();
        for id in ids {
            self.close(id);
        }
        if let Some(v) = self.vrnics.remove(name) {
            let _ = epoll::delete(&self.epoll, &v.listener.1);
            self.sources.remove(&v.listener.0);
            if let Some(id) = v.attached {
                self.switch.remove(id);
            }
            lock(&self.engine.rnic).remove_vnic(v.id);
            let _ = std::fs::remove_dir_all(vrnic_dir(&self.dir, name));
        }
        Ok(Response::Done)
    }

    fn attach(&mut self, id: u64, name: &str, fd: Option<OwnedFd>) -> Answer {
        let unknown = self.unknown(name);
        let v = self.vrnics.get_mut(name).ok_or(unknown)?;
        if v.attached.is_some() {
            return Err(format!(
                "vRNIC {name} has a container already; end it first, or give this one a vRNIC of its own"
            ));
        }
        let group = *self.groups.get(&v.group).ok_or("the group is gone")?;
        let fd = fd.ok_or("attach needs a descriptor")?;
        self.switch.add(id, fd, group, v.mac).map_err(|e| format!("cannot use that interface: {e}"))?;
        v.attached = Some(id);
        Ok(Response::Done)
    }

    fn info(&self, name: &str) -> Option<VrnicInfo> {
        let v = self.vrnics.get(name)?;
        let rnic = lock(&self.engine.rnic);
        let u = rnic.usage(v.id);
        Some(VrnicInfo {
            name: name.into(),
            group: v.group.clone(),
            ips: v.ips.clone(),
            gids: rnic.gids(v.id).iter().map(|g| g.to_string()).collect(),
            mac: v.mac.to_string(),
            guid: v.mac.guid().to_string(),
            mtu: self.wire.as_ref().map_or(vrnic::NET_MTU, Wire::net_mtu),
            dir: vrnic_dir(&self.dir, name).display().to_string(),
            attached: v.attached.is_some(),
            sessions: u.sessions,
            qps: u.qps,
            cqs: u.cqs,
            mrs_mapped: u.mrs_mapped,
            mrs_copied: u.mrs_copied,
            bytes_mapped: u.bytes_mapped,
            bytes_copied: u.bytes_copied,
            limits: v.limits,
            counters: rnic.counters(v.id).unwrap_or_default(),
        })
    }
}
