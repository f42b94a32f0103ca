//! A control centre of its own, and hosts without a data path that join it, report traffic, go away and come back.

use std::collections::{BTreeMap, BTreeSet};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use harness::Result;
use rcgen::{CertificateParams, KeyPair};
use tokio::runtime::Runtime;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use unirdma_fleet::v1::fleet_client::FleetClient;
use unirdma_fleet::v1::hosts_client::HostsClient;
use unirdma_fleet::v1::{self, from_host, item::Item, object::Object, to_host};

/// Time between two reports of a host. Real ones take 5 s.
const REPORT: Duration = Duration::from_millis(1000);

/// A connection of two vRNICs.
#[derive(Clone)]
pub(super) struct Link {
    pub ends: [String; 2],
    pub qps: u32,
    /// Bytes per second that each end sends, averaged over half a minute.
    pub rates: [f64; 2],
}

/// The state that the hosts report.
#[derive(Default)]
pub(super) struct World {
    pub links: Vec<Link>,
    /// Errors per second of a vRNIC.
    pub errors: BTreeMap<String, f64>,
    /// Problems of hosts.
    pub problems: BTreeMap<String, Vec<String>>,
}

/// The centre and its hosts. Dropping this value ends them.
pub(super) struct Fleet {
    pub dir: PathBuf,
    pub url: String,
    pub admin: String,
    world: Arc<Mutex<World>>,
    unirdma: PathBuf,
    listen: String,
    centre: Option<Child>,
    runtime: Runtime,
    authority: String,
    hosts: BTreeMap<String, (Identity, Option<JoinHandle<()>>)>,
}

impl Fleet {
    /// Starts a centre in a new directory.
    pub fn start(unirdma: &Path, dir: &Path) -> Result<Fleet> {
        let port = TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).map_err(|e| e.to_string())?.port();
        let (listen, url) = (format!("127.0.0.1:{port}"), format!("https://127.0.0.1:{port}"));
        let state = dir.join("centre");
        let mut init = Command::new(unirdma);
        init.args(["control", "init", "--url", &url]).arg(&state).env("HOME", dir).env_remove("XDG_CONFIG_HOME");
        let o = init.output().map_err(|e| format!("{}: {e}", unirdma.display()))?;
        let said = String::from_utf8_lossy(&o.stdout);
        let admin = said.lines().find_map(|l| l.split("not shown again: ").nth(1)).map(|t| t.trim().to_owned());
        let admin = admin.ok_or_else(|| format!("control init: {said}{}", String::from_utf8_lossy(&o.stderr)))?;
        let authority = std::fs::read_to_string(state.join("authority.pem")).map_err(|e| e.to_string())?;
        let runtime = Runtime::new().map_err(|e| e.to_string())?;
        let mut fleet = Fleet {
            dir: dir.into(),
            url,
            admin,
            world: Arc::default(),
            unirdma: unirdma.into(),
            listen,
            centre: None,
            runtime,
            authority,
            hosts: BTreeMap::new(),
        };
        fleet.start_centre()?;
        Ok(fleet)
    }

    /// The certificate of the centre's authority.
    pub fn authority(&self) -> PathBuf {
        self.dir.join("centre/authority.pem")
    }

    /// Starts the stopped centre.
    pub fn start_centre(&mut self) -> Result<()> {
        let log = std::fs::File::options().append(true).create(true).open(self.dir.join("centre.log"));
        let mut c = Command::new(&self.unirdma);
        c.args(["control", "run", "--listen", &self.listen]).arg(self.dir.join("centre")).env("HOME", &self.dir);
        c.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log.map_err(|e| e.to_string())?);
        self.centre = Some(c.spawn().map_err(|e| e.to_string())?);
        let until = Instant::now() + Duration::from_secs(10);
        while std::net::TcpStream::connect(&self.listen).is_err() {
            if Instant::now() > until {
                let log = std::fs::read_to_string(self.dir.join("centre.log")).unwrap_or_default();
                return Err(format!("the centre did not start: {log}"));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Ends the centre.
    pub fn stop_centre(&mut self) {
        if let Some(mut centre) = self.centre.take() {
            let _ = centre.kill();
            let _ = centre.wait();
        }
    }

    /// Makes a call as the administrator.
    fn call<T>(
        &self,
        call: impl AsyncFnOnce(FleetClient<Channel>) -> std::result::Result<T, tonic::Status>,
    ) -> Result<T> {
        self.runtime.block_on(async {
            let channel = endpoint(&self.url, &self.authority, None)?.connect().await.map_err(|e| e.to_string())?;
            let client = FleetClient::new(channel).max_decoding_message_size(usize::MAX);
            call(client).await.map_err(|e| e.message().to_owned())
        })
    }

    fn by_admin<T>(&self, message: T) -> Result<tonic::Request<T>> {
        let mut request = tonic::Request::new(message);
        let bearer = format!("Bearer {}", self.admin).parse().map_err(|_| "the token is none")?;
        request.metadata_mut().insert("authorization", bearer);
        Ok(request)
    }

    /// Declares objects.
    pub fn apply(&self, objects: Vec<Object>) -> Result<()> {
        let objects = objects.into_iter().map(|o| v1::Object { object: Some(o), revision: 0 }).collect();
        let request = self.by_admin(v1::ApplyRequest { objects, ..Default::default() })?;
        self.call(async |mut c| c.apply(request).await).map(drop)
    }

    /// Deletes an object, and all objects that depend on it.
    pub fn delete(&self, kind: v1::Kind, name: &str) -> Result<()> {
        let names = vec![v1::Name { kind: kind.into(), name: name.into() }];
        let request = self.by_admin(v1::DeleteRequest { names, force: true, dry_run: false })?;
        self.call(async |mut c| c.delete(request).await).map(drop)
    }

    /// The state that the hosts report.
    pub fn world(&self) -> Result<MutexGuard<'_, World>> {
        self.world.lock().map_err(|e| e.to_string())
    }

    /// Revokes a token.
    pub fn revoke(&self, id: &str) -> Result<()> {
        let request = self.by_admin(v1::RevokeTokenRequest { id: id.into() })?;
        self.call(async |mut c| c.revoke_token(request).await).map(drop)
    }

    /// Makes a token.
    pub fn token(&self, token: v1::Token) -> Result<String> {
        let request = self.by_admin(v1::CreateTokenRequest { token: Some(token) })?;
        Ok(self.call(async |mut c| c.create_token(request).await)?.into_inner().secret)
    }

    /// Makes a token with which a host may join.
    pub fn join_token(&self, host: &str) -> Result<String> {
        self.token(v1::Token { role: v1::Role::Join.into(), host: host.into(), ..Default::default() })
    }

    /// The reported state of a vRNIC.
    pub fn state(&self, vrnic: &str) -> Result<v1::VrnicState> {
        let request = v1::GetRequest { kind: v1::Kind::Vrnic.into(), name: vrnic.into(), ..Default::default() };
        let request = self.by_admin(request)?;
        let got = self.call(async |mut c| c.get(request).await)?.into_inner();
        Ok(got.vrnics.into_iter().next().unwrap_or_default())
    }

    /// Lets a host join, and connects it.
    pub fn join(&mut self, host: &str) -> Result<()> {
        let token = self.join_token(host)?;
        let key = KeyPair::generate().map_err(|e| e.to_string())?;
        let csr =
            CertificateParams::default().serialize_request(&key).and_then(|r| r.pem()).map_err(|e| e.to_string())?;
        let joined = self.runtime.block_on(async {
            let channel = endpoint(&self.url, &self.authority, None)?.connect().await.map_err(|e| e.to_string())?;
            let request = v1::JoinRequest { token, host: host.into(), request: csr };
            HostsClient::new(channel).join(request).await.map_err(|e| e.message().to_owned())
        })?;
        let identity = Identity::from_pem(joined.into_inner().certificate, key.serialize_pem());
        self.hosts.insert(host.into(), (identity, None));
        self.connect(host)
    }

    /// Connects a host.
    pub fn connect(&mut self, host: &str) -> Result<()> {
        let number = self.hosts.keys().position(|h| h == host).ok_or("the host has not joined")?;
        let (identity, task) = self.hosts.get_mut(host).ok_or("the host has not joined")?;
        let endpoint = endpoint(&self.url, &self.authority, Some(identity.clone()))?;
        let (name, world) = (host.to_owned(), self.world.clone());
        let address = format!("192.168.7.{}", number + 1);
        *task = Some(self.runtime.spawn(async move {
            let mut host = Host { name, address, world, vrnics: BTreeMap::new(), counters: BTreeMap::new() };
            loop {
                // The centre may be away.
                let _ = host.attach(&endpoint).await;
                tokio::time::sleep(Duration::from_millis(300)).await;
            }
        }));
        Ok(())
    }

    /// Cuts a host's connection. The host stays away.
    pub fn disconnect(&mut self, host: &str) {
        if let Some(task) = self.hosts.get_mut(host).and_then(|h| h.1.take()) {
            task.abort();
        }
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        self.stop_centre();
    }
}

fn endpoint(url: &str, authority: &str, identity: Option<Identity>) -> Result<Endpoint> {
    let mut tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(authority));
    if let Some(identity) = identity {
        tls = tls.identity(identity);
    }
    let endpoint = Endpoint::from_shared(url.to_owned()).map_err(|e| e.to_string())?;
    endpoint.tls_config(tls).map_err(|e| e.to_string())
}

/// Counters of a vRNIC, or of one of its connections, which is named by its peer.
#[derive(Clone, Copy, Default)]
struct Sums {
    sent: f64,
    received: f64,
    errors: f64,
}

/// A host without a data path.
struct Host {
    name: String,
    address: String,
    world: Arc<Mutex<World>>,
    vrnics: BTreeMap<String, v1::Vrnic>,
    counters: BTreeMap<(String, String), Sums>,
}

impl Host {
    /// Connects, and returns when the connection fails.
    async fn attach(&mut self, endpoint: &Endpoint) -> std::result::Result<(), tonic::Status> {
        let gone = |_| tonic::Status::unavailable("the connection has ended");
        let channel = endpoint.connect().await.map_err(|e| tonic::Status::unavailable(e.to_string()))?;
        let (send, receive) = mpsc::channel(8);
        let message = |m| v1::FromHost { message: Some(m) };
        let hello = v1::Hello {
            protocol: unirdma_fleet::PROTOCOL,
            version: env!("CARGO_PKG_VERSION").into(),
            addresses: vec![self.address.clone()],
            instance: 1,
            clock_ms: clock_ms(),
            ..Default::default()
        };
        send.send(message(from_host::Message::Hello(hello))).await.map_err(gone)?;
        let mut from = HostsClient::new(channel).attach(ReceiverStream::new(receive)).await?.into_inner();
        let mut reports = tokio::time::interval(REPORT);
        let mut last = Instant::now();
        loop {
            tokio::select! {
                m = from.message() => match m?.and_then(|m| m.message) {
                    Some(to_host::Message::Update(u)) => {
                        let revision = u.revision;
                        self.take(u);
                        let applied = v1::Applied { revision, problems: self.problems() };
                        send.send(message(from_host::Message::Applied(applied))).await.map_err(gone)?;
                    }
                    Some(_) => {}
                    None => return Ok(()),
                },
                _ = reports.tick() => {
                    let vrnics = self.report(last.elapsed().as_secs_f64());
                    last = Instant::now();
                    let report = v1::Report { vrnics, clock_ms: clock_ms(), pools: Vec::new() };
                    send.send(message(from_host::Message::Report(report))).await.map_err(gone)?;
                }
            }
        }
    }

    fn problems(&self) -> Vec<String> {
        let world = self.world.lock().unwrap_or_else(PoisonError::into_inner);
        world.problems.get(&self.name).cloned().unwrap_or_default()
    }

    fn take(&mut self, update: v1::Update) {
        if update.whole {
            self.vrnics.clear();
        }
        for item in update.put {
            if let Some(Item::Vrnic(v)) = item.item {
                self.vrnics.insert(v.name.clone(), v);
            }
        }
        for key in update.gone {
            if let Some(v1::item_key::Key::Vrnic(name)) = key.key {
                self.vrnics.remove(&name);
            }
        }
    }

    /// Advances the counters of its vRNICs by `seconds`, and returns their state.
    fn report(&mut self, seconds: f64) -> Vec<v1::VrnicState> {
        let world = self.world.lock().unwrap_or_else(PoisonError::into_inner);
        let wave = |i: usize| 1.0 + 0.4 * (clock_ms() as f64 / 4700.0 + i as f64).sin();
        let mut states: BTreeMap<&String, v1::VrnicState> = BTreeMap::new();
        for (i, link) in world.links.iter().enumerate() {
            for (me, other) in [(0, 1), (1, 0)] {
                let (name, peer) = (&link.ends[me], &link.ends[other]);
                if !self.vrnics.contains_key(name) {
                    continue;
                }
                let sums = self.counters.entry((name.clone(), peer.clone())).or_default();
                sums.sent += link.rates[me] * wave(i) * seconds;
                sums.received += link.rates[other] * wave(i) * seconds;
                let state = states.entry(name).or_default();
                state.sent_bytes += sums.sent as u64;
                state.received_bytes += sums.received as u64;
                state.qps += link.qps;
                state.connections.push(v1::Connection {
                    address: format!("10.0.0.{}", i % 250 + 1),
                    peer: peer.clone(),
                    qps: link.qps,
                    sent_bytes: sums.sent as u64,
                    received_bytes: sums.received as u64,
                    ..Default::default()
                });
            }
        }
        let names: BTreeSet<&String> = self.vrnics.keys().collect();
        let mut all = Vec::new();
        for name in names {
            let mut state = states.remove(name).unwrap_or_default();
            let sums = self.counters.entry((name.clone(), String::new())).or_default();
            sums.errors += world.errors.get(name).copied().unwrap_or(0.0) * seconds;
            state.name.clone_from(name);
            state.errors = sums.errors as u64;
            state.there = true;
            state.programs = u32::from(state.qps > 0);
            state.mrs = 2 * state.programs;
            state.operations = state.sent_bytes / 65536;
            all.push(state);
        }
        all
    }
}

fn clock_ms() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::SystemTime::UNIX_EPOCH);
    now.map_or(0, |d| d.as_millis() as u64)
}
