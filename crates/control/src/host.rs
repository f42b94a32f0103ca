//! The connection of one host. Only the few messages under way are queued for it: its updates are computed from the
//! state when it can take more. A host that reads nothing for [`PATIENCE`] is cut off, and gets its updates when it
//! connects again.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tonic::{Code, Status, Streaming};
use unirdma_fleet::v1::{self, from_host, to_host};
use unirdma_fleet::{Refusal, SILENCE_MS};

use crate::errors::refusal;
use crate::shared::{Registration, Shared, now_ms};

/// Time limit for a host's hello, and for its reading of a message.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long the host's announcement may wait for a centre that allocates. After that the host is served without it, and
/// the announcement is tried again.
const ANNOUNCE: Duration = Duration::from_secs(3);
/// How long a host that is sent everything holds its permit.
const HOLD: Duration = Duration::from_secs(1);
/// Interval of `Alive` messages to the host.
const ALIVE: Duration = Duration::from_secs(2);

type Sender = mpsc::Sender<Result<v1::ToHost, Status>>;

fn message(message: to_host::Message) -> Result<v1::ToHost, Status> {
    Ok(v1::ToHost { message: Some(message) })
}

/// Why a connection ends.
enum End {
    /// The host is gone, or does not read.
    Gone,
    /// The centre ends the connection.
    Refused(Refusal),
}

impl From<Refusal> for End {
    fn from(e: Refusal) -> Self {
        End::Refused(e)
    }
}

struct Connection {
    shared: Arc<Shared>,
    host: String,
    send: Sender,
    registration: Registration,
    told: Option<u64>,
}

/// Serves a host until its connection ends.
pub(crate) async fn serve(shared: Arc<Shared>, host: String, mut receive: Streaming<v1::FromHost>, send: Sender) {
    let first = match tokio::time::timeout(PATIENCE, receive.message()).await {
        Ok(Ok(Some(v1::FromHost { message: Some(from_host::Message::Hello(hello)) }))) => Ok(hello),
        Ok(Ok(Some(_))) => Err(Refusal::invalid("the first message of a host is Hello")),
        Ok(_) => return,
        Err(_) => Err(Refusal::invalid("the host said nothing for 10 s")),
    };
    if let Ok(hello) = &first
        && !shared.is_caught_up(hello).await
    {
        // The host connects again, here or to another centre, and goes on with its present state.
        tracing::warn!("host {host} has heard more than this centre, which cannot hear of it now");
        return;
    }
    let greeted = first.and_then(|hello| shared.centre().hello(&host, &hello, now_ms()).map(|g| (hello, g)));
    let (hello, greeted) = match greeted {
        Ok(both) => both,
        Err(e) => {
            tracing::warn!("host {host} is refused: {e}");
            shared.metrics.host_refused();
            let _ = tokio::time::timeout(PATIENCE, send.send(message(to_host::Message::Refused(e.what)))).await;
            return;
        }
    };
    tracing::info!("host {host} is here, version {}", hello.version);
    let instance = hello.instance;
    let registration = shared.register(&host);
    let mut connection =
        Connection { shared: shared.clone(), host: host.clone(), send, registration, told: greeted.told };
    if let Err(End::Refused(e)) = connection.run(hello, &mut receive).await {
        tracing::warn!("host {host} is cut off: {e}");
        shared.metrics.host_refused();
        let _ = connection.say(to_host::Message::Refused(e.what)).await;
    }
    if shared.is_registered(&host, &connection.registration) {
        shared.centre().goodbye(&host, instance, now_ms());
        tracing::info!("host {host} is gone");
    }
}

impl Connection {
    async fn say(&self, m: to_host::Message) -> Result<(), End> {
        match tokio::time::timeout(PATIENCE, self.send.send(message(m))).await {
            Ok(Ok(())) => Ok(()),
            _ => Err(End::Gone),
        }
    }

    fn alive(&self) -> to_host::Message {
        to_host::Message::Alive(v1::Alive { revision: self.told.unwrap_or(0), clock_ms: now_ms() })
    }

    /// Waits for a future that may take long, and sends `Alive` meanwhile. Otherwise the host would believe that the
    /// centre is gone, connect again, and cause the same wait once more.
    async fn meanwhile<T>(&self, what: impl Future<Output = T>) -> Result<T, End> {
        let mut what = std::pin::pin!(what);
        loop {
            match tokio::time::timeout(ALIVE, &mut what).await {
                Ok(done) => return Ok(done),
                Err(_) => self.say(self.alive()).await?,
            }
        }
    }

    /// Sends the host the updates that it lacks.
    async fn tell(&mut self) -> Result<(), End> {
        // A complete update is long, so the number of hosts that get one at the same time is limited.
        let all = self.shared.centre().lacks_all(&self.host, self.told);
        let room = self.shared.wholes.clone();
        let mut permit = match all {
            true => self.meanwhile(room.acquire_owned()).await?.ok(),
            false => None,
        };
        if !self.shared.is_registered(&self.host, &self.registration) {
            // The host has connected again while this connection waited.
            return Err(End::Gone);
        }
        let until = tokio::time::Instant::now() + HOLD;
        let lacking = {
            let centre = self.shared.centre();
            if self.told == Some(centre.revision()) {
                return Ok(());
            }
            centre.lacking(&self.host, self.told)
        };
        let revision = lacking.revision();
        let updates = match all {
            true => tokio::task::spawn_blocking(|| lacking.updates()).await.map_err(|_| End::Gone)?,
            false => lacking.updates(),
        };
        for update in updates {
            self.shared.metrics.updated(&update);
            let mut said = std::pin::pin!(self.say(to_host::Message::Update(update)));
            match tokio::time::timeout_at(until, &mut said).await {
                Ok(done) => done?,
                Err(_) => {
                    // A host that reads slowly gives its permit back, so that others need not wait for it.
                    permit = None;
                    said.await?;
                }
            }
        }
        drop(permit);
        self.told = Some(revision);
        self.shared.centre().told(&self.host, revision);
        Ok(())
    }

    /// Makes the changes of the host's first message, unless they are made already. A host that changes nothing is
    /// served from memory, even while no change can be made.
    async fn announce(&mut self, hello: &mut Option<v1::HostHello>) -> Result<(), End> {
        let Some(announced) = hello.take() else { return Ok(()) };
        let (host, asked) = (self.host.clone(), announced.hello.clone().unwrap_or_default());
        let looked =
            self.shared.with_planner(move |shared, planner| planner.announce(&host, &asked, &**shared, now_ms()));
        let looked = self.meanwhile(tokio::time::timeout(ANNOUNCE, looked)).await?;
        let same = looked.ok().and_then(Result::ok).filter(|made| made.plan.is_none()).map(|made| made.answer);
        let refused = match same {
            Some(refused) => refused,
            None => {
                match self.meanwhile(tokio::time::timeout(ANNOUNCE, self.shared.run(announced.clone(), false))).await? {
                    Ok(Ok(done)) => done.refused,
                    Ok(Err(e)) if e.code() != Code::Unavailable => return Err(refusal(&e).into()),
                    _ => {
                        *hello = Some(announced);
                        return Ok(());
                    }
                }
            }
        };
        for error in refused {
            self.say(to_host::Message::Reply(v1::Reply { id: 0, error, vrnic: None })).await?;
        }
        Ok(())
    }

    async fn run(&mut self, hello: v1::Hello, receive: &mut Streaming<v1::FromHost>) -> Result<(), End> {
        let mut hello = Some(v1::HostHello { host: self.host.clone(), hello: Some(hello) });
        self.announce(&mut hello).await?;
        self.tell().await?;
        let mut alive = tokio::time::interval(ALIVE);
        alive.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let wake = self.registration.wake.clone();
        let mut heard = tokio::time::Instant::now();
        loop {
            if !self.shared.is_registered(&self.host, &self.registration) {
                let text = format!("host {} has connected anew, or another host has its certificate", self.host);
                return Err(Refusal::conflict(text).into());
            }
            tokio::select! {
                () = wake.notified() => {
                    if self.shared.centre().is_host(&self.host) {
                        self.tell().await?;
                    } else {
                        return Err(Refusal::denied(format_args!("host {} was deleted from the fleet", self.host)).into());
                    }
                }
                m = receive.message() => match m {
                    Ok(Some(v1::FromHost { message: Some(m) })) => {
                        heard = tokio::time::Instant::now();
                        self.hear(m).await?;
                    }
                    Ok(Some(_)) => return Err(Refusal::invalid("a message that this centre does not know; update the centre first").into()),
                    Err(e) if e.code() == Code::ResourceExhausted => return Err(refusal(&e).into()),
                    _ => return Err(End::Gone),
                },
                _ = alive.tick() => {
                    if heard.elapsed() > Duration::from_millis(SILENCE_MS) {
                        return Err(Refusal::unavailable("the host said nothing for 60 s").into());
                    }
                    self.announce(&mut hello).await?;
                    // Tells the host that its state holds for the newest revision, so that a restarted centre does not
                    // send the same again.
                    self.tell().await?;
                    self.say(self.alive()).await?;
                }
            }
        }
    }

    async fn hear(&mut self, m: from_host::Message) -> Result<(), End> {
        match m {
            from_host::Message::Hello(_) => return Err(Refusal::invalid("a host says Hello once").into()),
            from_host::Message::Applied(applied) => self.shared.centre().applied(&self.host, &applied, now_ms()),
            from_host::Message::Report(report) => self.shared.centre().report(&self.host, report, now_ms()),
            from_host::Message::Ask(ask) => {
                let (id, host) = (ask.id, self.host.clone());
                let done = self.meanwhile(self.shared.run(v1::HostAsk { host, ask: Some(ask) }, false)).await?;
                let reply = match done {
                    Ok(done) => done.reply.unwrap_or_default(),
                    Err(e) => v1::Reply { id, error: e.message().into(), vrnic: None },
                };
                // The update is sent before the reply, so that the vRNIC exists when the program that asked for it gets
                // the reply.
                self.tell().await?;
                self.say(to_host::Message::Reply(reply)).await?;
            }
        }
        Ok(())
    }
}
