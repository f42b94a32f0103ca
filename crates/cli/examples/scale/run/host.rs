//! A host without a data path: the state machine of `unirdma_fleet::agent` with a certificate and a connection of its
//! own. It reports all work as done at once.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use prost::Message;
use tokio::sync::{Notify, mpsc};
use tokio_rustls::rustls::ClientConfig;
use tokio_stream::wrappers::UnboundedReceiverStream;
use unirdma_fleet::agent::{Agent, Config};
use unirdma_fleet::v1::hosts_client::HostsClient;
use unirdma_fleet::v1::{self, to_host};

use super::dial;

/// Interval of reports. A real host uses the same.
const REPORT: Duration = Duration::from_secs(5);
const MAX_MESSAGE: usize = 64 << 20;

/// An update that a host has put in force.
#[derive(Clone, Copy)]
pub struct InForce {
    pub at: Instant,
    /// TCP bytes that the host had received by then.
    pub received: u64,
    /// True if the update was the whole table.
    pub whole: bool,
}

pub struct Host {
    pub name: String,
    tls: Arc<ClientConfig>,
    address: String,
    began: Instant,
    agent: Mutex<Agent>,
    /// TCP bytes, which include TLS and HTTP/2.
    pub traffic: Arc<dial::Traffic>,
    in_force: Mutex<Vec<InForce>>,
    /// True while parts of a whole table arrive.
    whole: AtomicBool,
    revision: AtomicU64,
    /// True if the host may connect.
    free: AtomicBool,
    wake: Notify,
    /// Notified when this host has put an update in force.
    news: Arc<Notify>,
}

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn clock_ms() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |d| d.as_millis() as u64)
}

impl Host {
    pub fn new(
        name: &str,
        underlay: String,
        tls: Arc<ClientConfig>,
        address: String,
        seed: u64,
        news: Arc<Notify>,
    ) -> io::Result<Arc<Host>> {
        let config = Config { version: env!("CARGO_PKG_VERSION").into(), addresses: vec![underlay], instance: seed };
        let agent = Agent::new(config, [], seed).map_err(io::Error::other)?;
        Ok(Arc::new(Host {
            name: name.into(),
            tls,
            address,
            began: Instant::now(),
            agent: Mutex::new(agent),
            traffic: Arc::default(),
            in_force: Mutex::default(),
            whole: AtomicBool::new(false),
            revision: AtomicU64::new(0),
            free: AtomicBool::new(true),
            wake: Notify::new(),
            news,
        }))
    }

    /// Revision of the last update that is in force.
    pub fn revision(&self) -> u64 {
        self.revision.load(Ordering::Acquire)
    }

    /// Returns and clears the updates put in force since the last call.
    pub fn take_news(&self) -> Vec<InForce> {
        std::mem::take(&mut *locked(&self.in_force))
    }

    pub fn is_connected(&self) -> bool {
        locked(&self.agent).status(self.now()).connected
    }

    /// The whole table of this host.
    pub fn table(&self) -> v1::Update {
        locked(&self.agent).snapshot()
    }

    /// Size of the table as it is kept on disk, bytes.
    pub fn bytes(&self) -> usize {
        self.table().encoded_len()
    }

    /// Allows or forbids a connection. If forbidden, the present connection is closed.
    pub fn set_free(&self, free: bool) {
        self.free.store(free, Ordering::Release);
        self.wake.notify_one();
    }

    fn now(&self) -> u64 {
        self.began.elapsed().as_millis() as u64
    }

    fn until(&self) -> Instant {
        let at = locked(&self.agent).poll_timeout();
        at.map_or_else(|| Instant::now() + REPORT, |ms| self.began + Duration::from_millis(ms))
    }

    /// Runs the host until the task is aborted.
    pub async fn run(self: Arc<Self>) {
        loop {
            let free = self.free.load(Ordering::Acquire);
            if free && locked(&self.agent).poll_connect(self.now()) {
                let why = match dial::channel(&self.address, &self.tls, Some(self.traffic.clone())).await {
                    Ok(channel) => self.talk(channel).await,
                    Err(e) => e.to_string(),
                };
                locked(&self.agent).disconnected(self.now(), why);
                continue;
            }
            let until = if free { self.until() } else { Instant::now() + REPORT };
            tokio::select! {
                () = tokio::time::sleep_until(until.into()) => {}
                () = self.wake.notified() => {}
            }
        }
    }

    /// Does all due work and queues the messages to send. Returns a reason if the connection is to be closed.
    fn step(&self, out: &mpsc::UnboundedSender<v1::FromHost>) -> Option<String> {
        let mut agent = locked(&self.agent);
        let now = self.now();
        while agent.poll_record().is_some() {}
        let work = agent.poll_work(now);
        if !work.is_empty() {
            agent.carried(now, work, BTreeMap::new());
        }
        while let Some(message) = agent.poll_message() {
            let _ = out.send(message);
        }
        agent.poll_close(now)
    }

    async fn talk(&self, channel: tonic::transport::Channel) -> String {
        let (out, messages) = mpsc::unbounded_channel();
        locked(&self.agent).connected(self.now(), clock_ms());
        self.step(&out);
        let mut client = HostsClient::new(channel).max_decoding_message_size(MAX_MESSAGE);
        let mut stream = match client.attach(UnboundedReceiverStream::new(messages)).await {
            Ok(answer) => answer.into_inner(),
            Err(e) => return e.to_string(),
        };
        let mut reports = tokio::time::interval(REPORT);
        loop {
            if let Some(why) = self.step(&out) {
                return why;
            }
            if !self.free.load(Ordering::Acquire) {
                return "it is to be away".into();
            }
            tokio::select! {
                message = stream.message() => match message {
                    Ok(Some(message)) => self.hear(message),
                    Ok(None) => return "the centre has ended the connection".into(),
                    Err(e) => return e.to_string(),
                },
                _ = reports.tick() => {
                    let mut agent = locked(&self.agent);
                    let state = |v: &v1::Vrnic| v1::VrnicState { name: v.name.clone(), there: true, ..Default::default() };
                    let states = agent.vrnics().map(state).collect();
                    agent.report(states, Vec::new(), clock_ms());
                }
                () = tokio::time::sleep_until(self.until().into()) => {}
                () = self.wake.notified() => {}
            }
        }
    }

    fn hear(&self, message: v1::ToHost) {
        let part = match &message.message {
            Some(to_host::Message::Update(u)) => Some((u.whole, u.more)),
            _ => None,
        };
        let mut agent = locked(&self.agent);
        agent.handle(self.now(), message);
        let revision = agent.status(0).revision;
        drop(agent);
        let Some((whole, more)) = part else { return };
        // A whole table comes in several parts, of which only the first has the flag.
        self.whole.fetch_or(whole, Ordering::AcqRel);
        if !more {
            let whole = self.whole.swap(false, Ordering::AcqRel);
            let received = self.traffic.received();
            locked(&self.in_force).push(InForce { at: Instant::now(), received, whole });
            self.revision.store(revision, Ordering::Release);
            self.news.notify_one();
        }
    }
}
