//! The thread that talks to the control centre. It owns the [`Agent`], which decides; here are its socket, its clock
//! and its disk. Work that may wait for a worker is done on another thread, so that the connection to the centre stays
//! alive.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::mpsc::{self, Receiver, Sender, UnboundedReceiver, UnboundedSender};
use tokio::task::JoinHandle;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::transport::Channel;
use unirdma_device::lock;
use unirdma_fleet::agent::{Agent, Config, Key, Work};
use unirdma_fleet::said;
use unirdma_fleet::v1::hosts_client::HostsClient;
use unirdma_fleet::v1::{self, to_host};

use super::dial::{self, DialError, Trust};
use super::update_log::UpdateLog;
use super::{Answerer, Centre, Identity, Order, Shared};
use crate::supervisor::Supervisor;

/// Interval of reports.
const REPORT: Duration = Duration::from_secs(5);
/// Longest message of the centre, bytes.
const MAX_MESSAGE: usize = 64 << 20;
/// Greatest number of events that wait for the thread.
const QUEUE: usize = 64;
/// Metadata key of this host's name, for plain text without certificates.
const HOST_NAME: &str = "unirdma-host";

/// An event for the thread.
enum Event {
    /// The result of dialling, and the vRNICs that were made without the centre.
    Dialled(Result<Channel, DialError>, Vec<v1::Vrnic>),
    /// A message, with the number of its connection.
    Said(u64, Box<v1::ToHost>),
    Ended(u64, String),
    Done(Vec<Work>, BTreeMap<Key, String>),
    Figures(Vec<v1::VrnicState>, Vec<v1::Pool>),
}

/// An open connection.
struct Open {
    out: UnboundedSender<v1::FromHost>,
    task: JoinHandle<()>,
}

struct Talker {
    identity: Identity,
    agent: Agent,
    kept: UpdateLog,
    supervisor: Arc<Supervisor>,
    shared: Arc<Mutex<Shared>>,
    began: Instant,
    events: Sender<Event>,
    open: Option<Open>,
    /// Number of the present or last connection.
    connection: u64,
    /// How often a centre was dialled.
    dialled: usize,
    waiting: HashMap<u64, Answerer>,
    /// When the next report is due; `None`: its figures are being collected.
    report_at: Option<Instant>,
    disk: Option<String>,
}

/// Puts in force the updates on disk, and starts the thread.
///
/// # Errors
/// One line: the updates cannot be read, or no thread can be started.
pub(crate) fn start(
    identity: Identity,
    addresses: Vec<String>,
    supervisor: &Arc<Supervisor>,
) -> io::Result<Arc<Centre>> {
    let (kept, updates) = UpdateLog::open(&identity.state)?;
    let config = Config {
        version: env!("CARGO_PKG_VERSION").into(),
        addresses,
        instance: getrandom::u64().unwrap_or_else(|_| u64::from(std::process::id())),
    };
    let seed = getrandom::u64().unwrap_or(config.instance);
    let agent = Agent::new(config.clone(), updates, seed).or_else(|e| {
        // The centre will send everything again.
        tracing::warn!("what was kept of the control centre is left out: {e}");
        Agent::new(config, [], seed)
    });
    let agent = agent.map_err(io::Error::other)?;
    let (orders, ordered) = mpsc::unbounded_channel();
    let (events, happened) = mpsc::channel(QUEUE);
    let shared = Arc::<Mutex<Shared>>::default();
    let centre = Arc::new(Centre {
        url: identity.urls.iter().map(|u| u.text.as_str()).collect::<Vec<_>>().join(","),
        host: identity.name.clone(),
        orders,
        shared: shared.clone(),
        thread: Mutex::default(),
    });
    let began = Instant::now();
    let supervisor = supervisor.clone();
    let (open, connection, waiting) = (None, 0, HashMap::new());
    let mut talker = Talker {
        identity,
        agent,
        kept,
        supervisor,
        shared,
        began,
        events,
        open,
        connection,
        dialled: 0,
        waiting,
        report_at: Some(began + REPORT),
        disk: None,
    };
    let work = talker.agent.poll_work(0);
    let failed = talker.supervisor.carry_out(&work);
    talker.agent.carried(0, work, failed);
    talker.publish();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let run = move || {
        runtime.block_on(talker.run(ordered, happened));
        // Work that waits for a worker ends by its own deadline.
        runtime.shutdown_background();
    };
    *lock(&centre.thread) = Some(std::thread::Builder::new().name("centre".into()).spawn(run)?);
    Ok(centre)
}

fn clock_ms() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |d| d.as_millis() as u64)
}

impl Talker {
    fn now(&self) -> u64 {
        self.began.elapsed().as_millis() as u64
    }

    async fn run(mut self, mut orders: UnboundedReceiver<Order>, mut events: Receiver<Event>) {
        loop {
            self.step();
            let until = self.agent.poll_timeout().map(|ms| self.began + Duration::from_millis(ms));
            let until = [until, self.report_at].into_iter().flatten().min().unwrap_or(Instant::now() + REPORT);
            tokio::select! {
                order = orders.recv() => match order {
                    Some(Order::Ask(change, answerer)) => match self.agent.ask(self.now(), *change) {
                        Ok(id) => _ = self.waiting.insert(id, answerer),
                        Err(e) => _ = answerer.send(Err(e)),
                    },
                    Some(Order::Removed(name)) => self.agent.forget_orphan(&name),
                    Some(Order::Stop) | None => return,
                },
                Some(event) = events.recv() => self.on_event(event),
                () = tokio::time::sleep_until(until.into()) => {}
            }
        }
    }

    fn on_event(&mut self, event: Event) {
        let now = self.now();
        match event {
            Event::Dialled(Ok(channel), own) => {
                self.agent.set_own(own);
                self.agent.connected(now, clock_ms());
                self.connection += 1;
                let (out, messages) = mpsc::unbounded_channel();
                let name = matches!(self.identity.trust, Trust::None).then(|| self.identity.name.clone());
                let task = tokio::spawn(listen(self.connection, channel, messages, name, self.events.clone()));
                self.open = Some(Open { out, task });
            }
            Event::Dialled(Err(why), _) => self.agent.disconnected(now, why.to_string()),
            Event::Said(connection, message) => {
                if connection == self.connection && self.open.is_some() {
                    if let Some(to_host::Message::Alive(a)) = &message.message {
                        let off = clock_ms() as i64 - a.clock_ms as i64;
                        lock(&self.shared).clock_ms = (a.clock_ms > 0).then_some(off);
                    }
                    self.agent.handle(now, *message);
                }
            }
            Event::Ended(connection, why) => {
                if connection == self.connection && self.open.take().is_some() {
                    self.agent.disconnected(now, why);
                }
            }
            Event::Done(work, failed) => self.agent.carried(now, work, failed),
            Event::Figures(vrnics, pools) => {
                self.agent.report(vrnics, pools, clock_ms());
                self.report_at = Some(Instant::now() + REPORT);
            }
        }
    }

    /// Calls the agent's `poll_` methods, and does what they ask for.
    fn step(&mut self) {
        let now = self.now();
        if let Some(why) = self.agent.poll_close(now) {
            if let Some(open) = self.open.take() {
                open.task.abort();
            }
            tracing::warn!("the connection to the control centre ends: {why}");
            self.agent.disconnected(now, why);
        }
        if self.agent.poll_connect(now) {
            // Each attempt goes to the next centre, because the present one has ended the connection or is unreachable.
            let url = self.identity.urls[self.dialled % self.identity.urls.len()].clone();
            self.dialled += 1;
            let (trust, events) = (self.identity.trust.clone(), self.events.clone());
            let supervisor = self.supervisor.clone();
            tokio::spawn(async move {
                let channel = dial::channel(&url, &trust).await;
                let own = tokio::task::spawn_blocking(move || supervisor.strangers()).await.unwrap_or_default();
                let _ = events.send(Event::Dialled(channel, own)).await;
            });
        }
        while let Some(record) = self.agent.poll_record() {
            let kept = self.kept.add(&record, || self.agent.snapshot()).map_err(|e| e.to_string()).err();
            if let Some(e) = kept.as_ref().filter(|e| self.disk.as_ref() != Some(e)) {
                tracing::error!("{e}");
            }
            self.disk = kept;
        }
        // The work reads the vRNICs from there.
        self.publish();
        let work = self.agent.poll_work(now);
        if !work.is_empty() {
            let (supervisor, events) = (self.supervisor.clone(), self.events.clone());
            tokio::task::spawn_blocking(move || {
                let failed = supervisor.carry_out(&work);
                let _ = events.blocking_send(Event::Done(work, failed));
            });
        }
        while let Some(message) = self.agent.poll_message() {
            if let Some(open) = &self.open {
                let _ = open.out.send(message);
            }
        }
        while let Some((id, answer)) = self.agent.poll_answer() {
            if let Some(answerer) = self.waiting.remove(&id) {
                let _ = answerer.send(answer);
            }
        }
        if self.open.is_some() && self.report_at.is_some_and(|at| at <= Instant::now()) {
            self.report_at = None;
            let (supervisor, events) = (self.supervisor.clone(), self.events.clone());
            tokio::task::spawn_blocking(move || {
                let figures = Event::Figures(supervisor.report(), supervisor.report_pools());
                let _ = events.blocking_send(figures);
            });
        } else if self.report_at.is_some_and(|at| at <= Instant::now()) {
            self.report_at = Some(Instant::now() + REPORT);
        }
    }

    /// Updates the state shared with other threads.
    fn publish(&self) {
        let mut s = lock(&self.shared);
        s.status = self.agent.status(self.now());
        s.disk.clone_from(&self.disk);
        s.vrnics = self.agent.vrnics().map(|v| (v.name.clone(), v.clone())).collect();
    }
}

/// Reads the centre's messages on a connection, until it ends.
async fn listen(
    connection: u64,
    channel: Channel,
    messages: UnboundedReceiver<v1::FromHost>,
    name: Option<String>,
    events: Sender<Event>,
) {
    let attach = async {
        let mut request = tonic::Request::new(UnboundedReceiverStream::new(messages));
        if let Some(name) = name.and_then(|n| n.parse().ok()) {
            request.metadata_mut().insert(HOST_NAME, name);
        }
        let mut client = HostsClient::new(channel).max_decoding_message_size(MAX_MESSAGE);
        let mut stream = client.attach(request).await?.into_inner();
        while let Some(message) = stream.message().await? {
            if events.send(Event::Said(connection, Box::new(message))).await.is_err() {
                break;
            }
        }
        Ok::<(), tonic::Status>(())
    };
    let why = attach.await.map_or_else(|s| said(&s), |()| "it has ended the connection".into());
    let _ = events.send(Event::Ended(connection, why)).await;
}
