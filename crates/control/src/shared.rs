//! The centre while it runs: the state machine, its store, and those who wait for news. Every call of every interface ends here.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use tokio::sync::{Notify, watch};
use unirdma_fleet::{Actor, Centre, Outcome, Plan, Refusal, v1};

use crate::pki::Authority;
use crate::store::Store;

/// Most hosts that are told everything at a time.
const MAX_WHOLES: usize = 16;
/// Most that watch at a time.
const MAX_WATCHERS: usize = 256;

/// The connection of a host: its number, and how it is woken.
#[derive(Clone)]
pub(crate) struct Seat {
    pub number: u64,
    pub wake: Arc<Notify>,
}

/// The centre while it runs.
pub struct Shared {
    centre: Mutex<Centre>,
    /// Held from the look at the state until the change is in it: there is one plan at a time.
    turn: tokio::sync::Mutex<()>,
    store: Box<dyn Store>,
    /// `None`: plain text, on loopback only. Then hosts have no certificates.
    pub(crate) authority: Option<Authority>,
    pub(crate) revision: watch::Sender<u64>,
    seats: Mutex<HashMap<String, Seat>>,
    /// Permits of those who watch.
    pub(crate) watchers: Arc<tokio::sync::Semaphore>,
    /// Permits of hosts that are told everything.
    pub(crate) wholes: Arc<tokio::sync::Semaphore>,
}

/// Milliseconds since 1970.
pub(crate) fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX))
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    /// A centre of a state and its store.
    pub fn new(centre: Centre, store: Box<dyn Store>, authority: Option<Authority>) -> Arc<Shared> {
        let (revision, _) = watch::channel(centre.revision());
        Arc::new(Shared {
            centre: Mutex::new(centre),
            turn: tokio::sync::Mutex::new(()),
            store,
            authority,
            revision,
            seats: Mutex::default(),
            watchers: Arc::new(tokio::sync::Semaphore::new(MAX_WATCHERS)),
            wholes: Arc::new(tokio::sync::Semaphore::new(MAX_WHOLES)),
        })
    }

    /// The state, for a moment: nothing that waits is done meanwhile.
    pub(crate) fn centre(&self) -> MutexGuard<'_, Centre> {
        locked(&self.centre)
    }

    /// Makes a change. It is made as a whole even if the caller goes away.
    pub(crate) async fn change<T: Send + 'static>(
        self: &Arc<Self>,
        make: impl FnOnce(&mut Centre, u64) -> Result<Outcome<T>, Refusal> + Send + 'static,
    ) -> Result<T, Refusal> {
        let shared = self.clone();
        let done = tokio::spawn(async move {
            let _turn = shared.turn.lock().await;
            let outcome = make(&mut shared.centre(), now_ms())?;
            if let Some(plan) = outcome.plan {
                shared.keep(plan).await?;
            }
            Ok(outcome.answer)
        });
        done.await.unwrap_or_else(|e| Err(Refusal::unavailable(format_args!("the change was cut off: {e}"))))
    }

    async fn keep(self: &Arc<Self>, plan: Plan) -> Result<(), Refusal> {
        let shared = self.clone();
        let kept = tokio::task::spawn_blocking(move || {
            let kept = shared.store.commit(plan.revision, &plan.writes);
            kept.map(|()| plan)
        });
        let plan = match kept.await {
            Ok(Ok(plan)) => plan,
            Ok(Err(e)) => {
                tracing::error!("a change was refused: {e}");
                return Err(Refusal::unavailable(format_args!("nothing can be changed now: {e}")));
            }
            Err(e) => return Err(Refusal::unavailable(format_args!("the change was cut off: {e}"))),
        };
        let hosts = self.centre().commit(plan.revision, &plan.writes)?;
        let seats = locked(&self.seats);
        for seat in hosts.iter().filter_map(|h| seats.get(&**h)) {
            seat.wake.notify_one();
        }
        drop(seats);
        self.revision.send_replace(plan.revision);
        Ok(())
    }

    /// Does what is due by itself, until the end.
    pub(crate) async fn keep_time(self: Arc<Self>) {
        let mut ticks = tokio::time::interval(std::time::Duration::from_secs(1));
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let done = self.change(|centre, now| Ok(Outcome { plan: centre.tick(now), answer: () })).await;
            if let Err(e) = done {
                tracing::warn!("what was due is tried again: {e}");
            }
        }
    }

    /// Gives a host's connection its seat. One that it had before ends.
    pub(crate) fn sit(&self, host: &str) -> Seat {
        let mut seats = locked(&self.seats);
        let number = seats.get(host).map_or(0, |s| s.number) + 1;
        let seat = Seat { number, wake: Arc::new(Notify::new()) };
        if let Some(old) = seats.insert(host.into(), seat.clone()) {
            old.wake.notify_one();
        }
        seat
    }

    /// Whether a connection still has its seat.
    pub(crate) fn has_seat(&self, host: &str, seat: &Seat) -> bool {
        locked(&self.seats).get(host).is_some_and(|s| s.number == seat.number)
    }

    /// Who calls with a token.
    pub(crate) fn actor(&self, token: Option<&str>) -> Result<Actor, Refusal> {
        match token {
            Some(token) if token.len() <= 256 => self.centre().actor(token, now_ms()),
            Some(_) => Err(Refusal::unknown("the token is too long to be one")),
            None => Err(Refusal::unknown(
                "the call has no token; send it as `authorization: Bearer TOKEN`, or set UNIRDMA_TOKEN",
            )),
        }
    }

    pub(crate) async fn create_token(
        self: &Arc<Self>,
        actor: Actor,
        request: v1::CreateTokenRequest,
    ) -> Result<v1::CreateTokenResponse, Refusal> {
        let mut random = [0; 32];
        getrandom::fill(&mut random)
            .map_err(|e| Refusal::unavailable(format_args!("there are no random bytes: {e}")))?;
        let token = request.token.unwrap_or_default();
        let mut made = self.change(move |c, now| c.create_token(&actor, token, random, now)).await?;
        let joins = made.token.as_ref().is_some_and(|t| t.role() == v1::Role::Join);
        if let Some(authority) = self.authority.as_ref().filter(|_| joins) {
            // A host that joins has nothing else by which it would know the centre.
            made.secret = format!("{}.{}", made.secret, authority.pin());
        }
        Ok(made)
    }

    pub(crate) async fn join(self: &Arc<Self>, request: v1::JoinRequest) -> Result<v1::JoinResponse, Refusal> {
        if request.token.len() > 256 || request.host.len() > 64 {
            return Err(Refusal::invalid("the token or the host's name is too long"));
        }
        // The certificate is made first: a request that is none uses up no token. It is worth nothing unless the token is good.
        let made = match &self.authority {
            Some(a) => {
                v1::JoinResponse { certificate: a.host(&request.host, &request.request)?, authority: a.pem().into() }
            }
            None => v1::JoinResponse::default(),
        };
        self.change(move |c, now| {
            // `ID.SECRET` or `ID.SECRET.PIN`: the last part is for the host.
            let token = match request.token.rsplit_once('.') {
                Some((token, _)) if token.contains('.') => token,
                _ => &request.token,
            };
            c.join(token, &request.host, now)
        })
        .await?;
        Ok(made)
    }

    pub(crate) fn status(&self) -> v1::StatusResponse {
        v1::StatusResponse {
            version: env!("CARGO_PKG_VERSION").into(),
            store: self.store.name(),
            allocates: true,
            ..self.centre().status(now_ms())
        }
    }
}
