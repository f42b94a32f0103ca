//! The running centre: the state machine, its store, and the connections that wait for news. Every call of every
//! interface ends here.

use std::collections::HashMap;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tonic::Status;
use unirdma_fleet::{Actor, Centre, Facts, News, Outcome, Plan, Planner, Refusal, Write, v1};

use crate::calls::{self, Call, Context};
use crate::change_turns::Turns;
use crate::errors::{elsewhere, is_elsewhere, status};
use crate::metrics::Metrics;
use crate::peer_channels::Others;
use crate::pki::Authority;
use crate::rate_limits::UnderWay;
use crate::store::{Opened, Snapshot, StoreError};
use crate::watchers::Watchers;

/// Greatest number of hosts that are sent a complete update at the same time.
const MAX_WHOLES: usize = 16;
/// How long a change waits for a centre that allocates. A dead one is replaced when its lease of 5 s has ended.
const ELECTION: Duration = Duration::from_secs(8);
/// Interval of checks for a centre that allocates.
const PAUSE: Duration = Duration::from_millis(100);
/// Interval of checks whether anybody still reads the state from before a change.
const READING: Duration = Duration::from_millis(1);
/// Time limit for receiving a change that another centre has made.
const BEHIND: Duration = Duration::from_secs(5);

/// The connection of a host: its number, and its wake-up.
#[derive(Clone)]
pub(crate) struct Registration {
    pub number: u64,
    pub wake: Arc<Notify>,
}

/// The centre that makes changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// This centre, which is the only one with its store.
    Alone,
    /// This centre, elected among several.
    Allocates,
    /// Another centre, at this URL. `None`: no centre is elected yet.
    Follows(Option<String>),
    /// None, because the store is unreachable: the reason.
    Away(String),
}

/// The running centre.
pub struct Shared {
    centre: Mutex<Centre>,
    /// Prepares changes and applies them to the state. Long work is done here, while the state can be read.
    planner: Arc<tokio::sync::Mutex<Planner>>,
    /// A turn is held from the look at the state until the change is applied, so there is one plan at a time.
    turns: Arc<Turns>,
    pub(crate) store: Opened,
    /// `None`: plain text, on loopback only. Then hosts have no certificates.
    pub(crate) authority: Option<Authority>,
    pub(crate) revision: watch::Sender<u64>,
    pub(crate) role: watch::Sender<Role>,
    /// Where other centres reach this one.
    pub(crate) url: String,
    pub(crate) others: Others,
    /// The lease of this centre in etcd; 0: none yet.
    pub(crate) lease: AtomicI64,
    registrations: Mutex<HashMap<String, Registration>>,
    seat_numbers: AtomicU64,
    pub(crate) watchers: Arc<Watchers>,
    /// Permits of hosts that are sent a complete update.
    pub(crate) wholes: Arc<tokio::sync::Semaphore>,
    /// Calls and bytes under way, by caller.
    pub(crate) under_way: UnderWay,
    pub(crate) metrics: Metrics,
}

/// Milliseconds since 1970.
pub(crate) fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX))
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn cut_off(e: tokio::task::JoinError) -> Refusal {
    Refusal::unavailable(format_args!("the change was cut off: {e}"))
}

/// Why a change was not made here.
enum NotMade {
    Refused(Refusal),
    /// Another centre allocates, or this one lacks an earlier change. Nothing was changed.
    Elsewhere,
}

impl From<Refusal> for NotMade {
    fn from(e: Refusal) -> Self {
        NotMade::Refused(e)
    }
}

impl Shared {
    /// A centre with this state and store, which other centres reach at `url`.
    pub fn new(
        (centre, planner): (Centre, Planner),
        store: Opened,
        authority: Option<Authority>,
        url: String,
    ) -> std::io::Result<Arc<Shared>> {
        let (revision, _) = watch::channel(centre.revision());
        let role = if matches!(store, Opened::File(_)) { Role::Alone } else { Role::Follows(None) };
        let tls = authority.as_ref().map(Authority::client).transpose()?;
        Ok(Arc::new(Shared {
            centre: Mutex::new(centre),
            planner: Arc::new(tokio::sync::Mutex::new(planner)),
            turns: Arc::default(),
            store,
            authority,
            revision,
            role: watch::channel(role).0,
            url,
            others: Others::new(tls),
            lease: AtomicI64::new(0),
            registrations: Mutex::default(),
            seat_numbers: AtomicU64::new(0),
            watchers: Arc::default(),
            wholes: Arc::new(tokio::sync::Semaphore::new(MAX_WHOLES)),
            under_way: UnderWay::new(),
            metrics: Metrics::default(),
        }))
    }

    /// Locks the state. The caller must not wait while it holds the lock.
    pub(crate) fn centre(&self) -> MutexGuard<'_, Centre> {
        locked(&self.centre)
    }

    fn role(&self) -> Role {
        self.role.borrow().clone()
    }

    /// Whether this centre makes changes.
    fn allocates(&self) -> bool {
        matches!(self.role(), Role::Alone | Role::Allocates)
    }

    /// Makes a change, here or at the centre that allocates. If none allocates, waits for an election. `passed_on`: the
    /// call comes from another centre, so it is not passed on again.
    pub(crate) async fn run<C: Call>(self: &Arc<Self>, call: C, passed_on: bool) -> Result<C::Answer, Status> {
        let refused = |e: Refusal| status(&e);
        let deadline = Instant::now() + ELECTION;
        let mut roles = self.role.subscribe();
        loop {
            let role = roles.borrow_and_update().clone();
            match role {
                Role::Alone | Role::Allocates => match self.make(call.clone()).await {
                    Ok(answer) => return Ok(answer),
                    Err(NotMade::Refused(e)) => return Err(refused(e)),
                    Err(NotMade::Elsewhere) => {}
                },
                Role::Follows(_) if passed_on => return Err(elsewhere()),
                Role::Follows(Some(url)) => {
                    if let Some(done) = self.ask_other(&url, call.clone(), &mut roles).await {
                        return done;
                    }
                }
                Role::Follows(None) => {}
                Role::Away(why) => {
                    return Err(refused(Refusal::unavailable(format_args!("nothing can be changed now: {why}"))));
                }
            }
            if Instant::now() >= deadline {
                let text = "nothing can be changed now: no centre was elected to do so; `unirdma control status` shows when one is";
                return Err(refused(Refusal::unavailable(text)));
            }
            // A new role is examined in the next round.
            let _ = tokio::time::timeout(PAUSE, roles.changed()).await;
        }
    }

    /// Passes a call on to the centre that allocates. `None`: it had no effect, and can be tried again.
    async fn ask_other<C: Call>(
        &self,
        url: &str,
        call: C,
        roles: &mut watch::Receiver<Role>,
    ) -> Option<Result<C::Answer, Status>> {
        let channel = self.others.channel(url).await.ok()?;
        let may_repeat = call.may_repeat();
        let answer = tokio::select! {
            answer = call.pass_on(channel) => answer,
            // The centre may hang. Another one was elected.
            _ = roles.wait_for(|r| *r != Role::Follows(Some(url.into()))) => Err(Status::unavailable("")),
        };
        match answer {
            Ok(answer) => {
                // Waits until this centre has the change, so that the caller sees it here.
                self.wait_for(calls::revision_of(answer.metadata()), BEHIND).await;
                Some(Ok(answer.into_inner()))
            }
            Err(e) => match is_elsewhere(&e) {
                Some(true) => None,
                Some(false) => Some(Err(e)),
                None => {
                    self.others.forget(url);
                    let text = "the centre that allocates went away before it answered: look whether it was done, and do it again if not";
                    (!may_repeat).then(|| Err(status(&Refusal::unavailable(text))))
                }
            },
        }
    }

    /// Waits until the state has reached a revision; false if it does not within `most`.
    pub(crate) async fn wait_for(&self, revision: u64, most: Duration) -> bool {
        let mut now = self.revision.subscribe();
        tokio::time::timeout(most, now.wait_for(|r| *r >= revision)).await.is_ok_and(|r| r.is_ok())
    }

    /// Waits until this centre knows everything that a host has received elsewhere, so that the host is not sent an
    /// older state. False if that takes too long.
    pub(crate) async fn is_caught_up(&self, hello: &v1::Hello) -> bool {
        let behind = || {
            let centre = self.centre();
            hello.fleet == centre.fleet() && hello.revision > centre.revision()
        };
        // A centre that makes the changes knows all of them. The host has a higher revision only if the store was
        // replaced.
        self.allocates() || !behind() || self.wait_for(hello.revision, BEHIND).await || self.allocates()
    }

    /// Runs a function at the planner, on a thread that may block.
    pub(crate) async fn with_planner<T: Send + 'static>(
        self: &Arc<Self>,
        f: impl FnOnce(&Arc<Shared>, &mut Planner) -> T + Send + 'static,
    ) -> Result<T, Refusal> {
        let (shared, mut planner) = (self.clone(), self.planner.clone().lock_owned().await);
        let done = tokio::task::spawn_blocking(move || {
            while !planner.is_ready() {
                std::thread::sleep(READING);
            }
            f(&shared, &mut planner)
        });
        done.await.map_err(cut_off)
    }

    /// Makes a change completely, even if the caller disconnects meanwhile. If the caller disconnects before its turn,
    /// nothing is done.
    async fn make<C: Call>(self: &Arc<Self>, call: C) -> Result<C::Answer, NotMade> {
        let refused = |e: &NotMade| {
            if let NotMade::Refused(e) = e {
                self.metrics.refused(e);
            }
        };
        let line = call.line(&self.centre(), now_ms()).map_err(NotMade::from).inspect_err(refused)?;
        let turn = self.turns.take(line).await.map_err(NotMade::from).inspect_err(refused)?;
        let shared = self.clone();
        let done = tokio::spawn(async move {
            let _turn = turn;
            if !shared.allocates() {
                return Err(NotMade::Elsewhere);
            }
            let make = move |shared: &Arc<Shared>, planner: &mut Planner| {
                let authority = shared.authority.as_ref();
                call.make(Context { planner, facts: &**shared, authority, now_ms: now_ms() })
            };
            let outcome = shared.with_planner(make).await??;
            if let Some(plan) = outcome.plan {
                let begun = std::time::Instant::now();
                shared.keep(plan).await?;
                shared.metrics.kept(begun.elapsed());
            }
            Ok(outcome.answer)
        });
        done.await.unwrap_or_else(|e| Err(cut_off(e).into())).inspect_err(refused)
    }

    async fn keep(self: &Arc<Self>, plan: Plan) -> Result<(), NotMade> {
        match self.store.store().commit(plan.revision, &plan.writes).await {
            Ok(()) => {}
            // An earlier change whose answer was lost was kept after all, or another centre was elected. The news of it
            // will arrive.
            Err(StoreError::Moved { .. } | StoreError::Deposed) if matches!(self.store, Opened::Etcd(_)) => {
                return Err(NotMade::Elsewhere);
            }
            Err(e) => {
                tracing::error!("a change was refused: {e}");
                let later = match e {
                    StoreError::Away { .. } => "; this may be done all the same when it is back: ask again then",
                    _ => "",
                };
                return Err(Refusal::unavailable(format_args!("nothing can be changed now: {e}{later}")).into());
            }
        }
        self.adopt(plan.revision, plan.writes).await?;
        self.metrics.changed(&plan.changes);
        Ok(())
    }

    /// Applies a change that the store has already. False if changes before it are missing.
    pub(crate) async fn adopt(self: &Arc<Self>, revision: u64, writes: Vec<Write>) -> Result<bool, Refusal> {
        self.with_planner(move |shared, planner| {
            let has = shared.centre().revision();
            match revision.checked_sub(has) {
                Some(1) => {
                    let news = planner.commit(revision, &writes)?;
                    shared.publish(planner, news);
                    Ok(true)
                }
                None | Some(0) => Ok(true),
                Some(_) => Ok(false),
            }
        })
        .await?
    }

    /// Replaces the state by a snapshot of the store.
    pub(crate) async fn catch_up(self: &Arc<Self>, snapshot: Snapshot) -> Result<(), Refusal> {
        self.with_planner(move |shared, planner| {
            let news = planner.catch_up(snapshot.revision, &snapshot.records)?;
            shared.publish(planner, news);
            Ok(())
        })
        .await?
    }

    /// Publishes the changes made at the planner, and wakes hosts and watchers.
    fn publish(&self, planner: &mut Planner, news: News) {
        let (hosts, revision) = {
            let mut centre = self.centre();
            (centre.publish(planner, news), centre.revision())
        };
        self.tell(&hosts, revision);
    }

    fn tell(&self, hosts: &[unirdma_fleet::Name], revision: u64) {
        let registrations = locked(&self.registrations);
        for registration in hosts.iter().filter_map(|h| registrations.get(&**h)) {
            registration.wake.notify_one();
        }
        drop(registrations);
        self.revision.send_if_modified(|r| std::mem::replace(r, revision.max(*r)) < revision);
    }

    /// Makes timed changes, forever.
    pub(crate) async fn keep_time(self: Arc<Self>) {
        let mut ticks = tokio::time::interval(Duration::from_secs(1));
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            if !self.allocates() {
                continue;
            }
            if let Err(NotMade::Refused(e)) = self.make(Due).await {
                tracing::warn!("what was due is tried again: {e}");
            }
        }
    }

    /// Ends this centre's lease, so that another centre can be elected at once.
    pub(crate) async fn leave(&self) {
        let lease = self.lease.load(Ordering::Relaxed);
        if let (Opened::Etcd(store), true) = (&self.store, lease != 0)
            && let Err(e) = store.end(lease).await
        {
            tracing::warn!("the other centres will notice that this one has ended: {e}");
        }
    }

    /// Registers a new connection of a host. Its former connection ends.
    pub(crate) fn register(&self, host: &str) -> Registration {
        let number = self.seat_numbers.fetch_add(1, Ordering::Relaxed);
        let registration = Registration { number, wake: Arc::new(Notify::new()) };
        if let Some(old) = locked(&self.registrations).insert(host.into(), registration.clone()) {
            old.wake.notify_one();
        }
        registration
    }

    /// Closes this host's connection, because it has connected to another centre.
    pub(crate) fn evict(&self, host: &str) {
        if let Some(old) = locked(&self.registrations).remove(host) {
            old.wake.notify_one();
        }
    }

    /// Whether a connection is still the registered one.
    pub(crate) fn is_registered(&self, host: &str, registration: &Registration) -> bool {
        locked(&self.registrations).get(host).is_some_and(|s| s.number == registration.number)
    }

    /// The actor that a token stands for.
    pub(crate) fn actor(&self, token: Option<&str>) -> Result<Actor, Refusal> {
        let actor = match token {
            Some(token) if token.len() <= 256 => self.centre().actor(token, now_ms()),
            Some(_) => Err(Refusal::unknown("the token is too long to be one")),
            None => Err(Refusal::unknown(
                "the call has no token; send it as `authorization: Bearer TOKEN`, or set UNIRDMA_TOKEN",
            )),
        };
        actor.inspect_err(|e| self.metrics.refused(e))
    }

    /// Hides the store's errors from tenants: they are not told what is wrong with it, nor where it is.
    pub(crate) fn told(&self, actor: &Actor, e: Status) -> Status {
        if actor.sees_all() || e.code() != tonic::Code::Unavailable || is_elsewhere(&e) == Some(true) {
            return e;
        }
        status(&Refusal::unavailable("nothing can be changed now; look later whether it was done, and ask again"))
    }

    /// The centre's status: the figures that an actor may see.
    pub(crate) fn status(&self, actor: &Actor) -> v1::StatusResponse {
        let role = self.role();
        let status = self.centre().status(actor, now_ms());
        if !actor.sees_all() {
            return v1::StatusResponse { version: env!("CARGO_PKG_VERSION").into(), ..status };
        }
        v1::StatusResponse {
            version: env!("CARGO_PKG_VERSION").into(),
            store: self.store.store().name(),
            allocates: matches!(role, Role::Alone | Role::Allocates),
            allocator: match role {
                Role::Alone | Role::Allocates => self.url.clone(),
                Role::Follows(url) => url.unwrap_or_default(),
                Role::Away(_) => String::new(),
            },
            ..status
        }
    }
}

impl Facts for Shared {
    fn programs(&self, vrnic: &str) -> u32 {
        self.centre().programs(vrnic)
    }

    fn applied(&self, host: &str) -> u64 {
        Facts::applied(&*self.centre(), host)
    }

    fn is_connected(&self, host: &str, now_ms: u64) -> bool {
        self.centre().is_connected(host, now_ms)
    }
}

/// The call for timed changes.
#[derive(Clone)]
struct Due;

#[tonic::async_trait]
impl Call for Due {
    type Answer = ();

    fn may_repeat(&self) -> bool {
        true
    }

    fn line(&self, _: &Centre, _: u64) -> Result<Option<String>, Refusal> {
        Ok(None)
    }

    fn make(self, c: Context<'_>) -> Result<Outcome<()>, Refusal> {
        Ok(Outcome { plan: c.planner.tick(c.facts, c.now_ms), answer: () })
    }

    async fn pass_on(self, _: tonic::transport::Channel) -> Result<tonic::Response<()>, Status> {
        Err(elsewhere())
    }
}
