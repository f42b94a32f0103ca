//! A centre in a group of centres. It follows the store in etcd, registers itself there, and is elected to make changes
//! if no other centre is.
//!
//! All its keys in etcd are attached to one lease. While etcd is unreachable, the state in memory serves. Then the
//! watch continues from its last revision, or, if etcd has compacted that, everything is read again.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use unirdma_fleet::Refusal;

use crate::peer_centres;
use crate::shared::{Role, Shared};
use crate::store::etcd::{Follower, Lost, News, Office};
use crate::store::{EtcdStore, StoreError};

/// Lifetime of the lease, seconds: a centre that does not prolong it for this long is taken to be gone.
const LEASE_S: i64 = 5;
const LEASE: Duration = Duration::from_secs(5);
/// Interval between prolongations of the lease, and the pause after a failed one.
const PROLONG: Duration = Duration::from_millis(1_500);
const PAUSE: Duration = Duration::from_millis(300);

/// Why a session with etcd ends.
enum End {
    /// The session is begun again: etcd is unreachable, or the lease has ended.
    Again(String),
    /// The store was replaced by another one.
    Replaced(Refusal),
}

impl From<StoreError> for End {
    fn from(e: StoreError) -> Self {
        End::Again(e.to_string())
    }
}

impl From<Refusal> for End {
    fn from(e: Refusal) -> Self {
        End::Replaced(e)
    }
}

/// A task that is aborted when this is dropped.
struct Task(JoinHandle<()>);

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

struct Member {
    shared: Arc<Shared>,
    store: Arc<EtcdStore>,
    /// etcd's revision up to which everything is known; `None`: nothing is known.
    at: Option<i64>,
    /// The URL of the centre that allocates.
    allocator: Option<String>,
    /// Tasks that receive news of the other centres, by the centres' ids.
    centres: HashMap<String, Task>,
    /// This centre's election, and the revision of the last change at that time.
    elected: Option<(Office, u64)>,
}

/// Result of following the store: news, and the revision that they lead to; or the reason for the end.
type Heard = Result<(Vec<News>, i64), Lost>;

/// Takes part until the store is replaced by another one.
pub(crate) async fn take_part(shared: Arc<Shared>, store: Arc<EtcdStore>) -> io::Error {
    let (centres, allocator) = (HashMap::new(), None);
    let mut member = Member { shared, store, at: None, allocator, centres, elected: None };
    loop {
        match member.session().await {
            Ok(never) => match never {},
            Err(End::Again(why)) => {
                tracing::warn!("{why}");
                member.shared.role.send_replace(Role::Away(why));
                member.elected = None;
                member.store.set_office(None).await;
                tokio::time::sleep(PAUSE).await;
            }
            Err(End::Replaced(e)) => return io::Error::other(e.to_string()),
        }
    }
}

/// Prolongs a lease until it ends. Returns the reason.
async fn keep_lease(store: Arc<EtcdStore>, lease: i64) -> String {
    let mut until = Instant::now() + LEASE;
    loop {
        tokio::time::sleep(PROLONG.min(until.saturating_duration_since(Instant::now()))).await;
        let asked = Instant::now();
        loop {
            match store.prolong(lease).await {
                Ok(true) => {
                    until = asked + LEASE;
                    break;
                }
                Ok(false) => return format!("{}: this centre's lease has ended", crate::store::Store::name(&*store)),
                Err(e) if Instant::now() >= until => return e.to_string(),
                Err(_) => tokio::time::sleep(PAUSE).await,
            }
        }
    }
}

/// Follows the store on a separate task, so that no news is lost.
fn follow(store: Arc<EtcdStore>, mut follower: Follower) -> (mpsc::Receiver<Heard>, Task) {
    let (send, receive) = mpsc::channel(16);
    let task = tokio::spawn(async move {
        loop {
            let heard = store.next(&mut follower).await.map(|news| (news, follower.at));
            let last = heard.is_err();
            if send.send(heard).await.is_err() || last {
                return;
            }
        }
    });
    (receive, Task(task))
}

impl Member {
    /// Runs until the lease or the store is lost.
    async fn session(&mut self) -> Result<std::convert::Infallible, End> {
        let before = self.shared.lease.swap(0, Ordering::Relaxed);
        if before != 0 {
            // Ends the lease of the session before. Its keys would prevent the registration of this session. If the
            // call fails, the lease expires by itself.
            drop(self.store.end(before).await);
        }
        let (lease, id) = self.store.begin(LEASE_S, &self.shared.url).await?;
        self.shared.lease.store(lease, Ordering::Relaxed);
        let (say, mut ended) = oneshot::channel();
        let keeper = keep_lease(self.store.clone(), lease);
        let _keeper = Task(tokio::spawn(async move { drop(say.send(keeper.await)) }));
        let (mut news, mut _task) = self.hear().await?;
        loop {
            self.be_elected(lease).await?;
            tokio::select! {
                why = &mut ended => return Err(End::Again(why.unwrap_or_else(|_| "the lease is not kept".into()))),
                heard = news.recv() => match heard {
                    Some(Ok((all, at))) => {
                        for n in all {
                            self.take(n, &id).await?;
                        }
                        self.at = Some(at);
                    }
                    Some(Err(Lost::Forgotten)) => {
                        self.at = None;
                        (news, _task) = self.hear().await?;
                    }
                    // Another member of etcd may answer. If none does, the lease ends, and with it the session.
                    Some(Err(Lost::Away(e))) => {
                        tracing::warn!("{e}");
                        tokio::time::sleep(PAUSE).await;
                        (news, _task) = self.hear_again(&mut ended).await?;
                    }
                    None => return Err(End::Again("following the store has ended".into())),
                },
                // A failed election is tried again.
                () = tokio::time::sleep(LEASE) => {}
            }
        }
    }

    /// Follows the store from the last known revision, or from a list of everything.
    async fn hear(&mut self) -> Result<(mpsc::Receiver<Heard>, Task), End> {
        let follower = match self.at {
            Some(at) => self.store.follow(at).await?,
            None => {
                let (snapshot, news, follower) = self.store.list().await?;
                self.shared.catch_up(snapshot).await?;
                self.centres.drain().for_each(|(id, _)| self.shared.centre().lose_centre(&id));
                for n in news {
                    self.take(n, "").await?;
                }
                self.at = Some(follower.at);
                follower
            }
        };
        Ok(follow(self.store.clone(), follower))
    }

    /// As [`Member::hear`], repeated while the lease holds.
    async fn hear_again(
        &mut self,
        ended: &mut oneshot::Receiver<String>,
    ) -> Result<(mpsc::Receiver<Heard>, Task), End> {
        loop {
            match self.hear().await {
                Err(End::Again(_)) => tokio::select! {
                    why = &mut *ended => return Err(End::Again(why.unwrap_or_else(|_| "the lease is not kept".into()))),
                    () = tokio::time::sleep(PAUSE) => {}
                },
                other => return other,
            }
        }
    }

    /// Applies one piece of news. `id` is this centre's id.
    async fn take(&mut self, news: News, id: &str) -> Result<(), End> {
        match news {
            News::Change { revision, writes } => {
                if !self.shared.adopt(revision, writes).await? {
                    let text = format!("revision {revision} of the store came too early; everything is read again");
                    self.at = None;
                    return Err(End::Again(text));
                }
            }
            // The news is older than this centre's election.
            News::Allocator { at, .. } if self.elected.is_some_and(|(o, _)| at < o.created) => {}
            News::Allocator { url, .. } => {
                self.allocator = url;
                if self.elected.is_some() && self.allocator.as_ref() != Some(&self.shared.url) {
                    tracing::warn!("this centre's election has ended");
                    self.elected = None;
                    self.shared.role.send_replace(Role::Follows(None));
                    self.store.set_office(None).await;
                }
            }
            News::Centre { id: other, url: None } => {
                if self.centres.remove(&other).is_some() {
                    self.shared.centre().lose_centre(&other);
                }
            }
            News::Centre { id: other, url: Some(url) } => {
                if other != id && url != self.shared.url {
                    let listen = peer_centres::listen(self.shared.clone(), other.clone(), url);
                    self.centres.insert(other, Task(tokio::spawn(listen)));
                }
            }
        }
        Ok(())
    }

    /// Runs for election if no centre is elected. An elected centre makes changes once it knows all changes before its
    /// election.
    async fn be_elected(&mut self, lease: i64) -> Result<(), End> {
        if self.allocator.is_none() && self.elected.is_none() {
            self.elected = self.store.campaign(lease, &self.shared.url).await?;
        }
        let role = match self.elected {
            Some((office, head)) if self.shared.centre().revision() >= head => {
                if *self.shared.role.borrow() != Role::Allocates {
                    self.store.set_office(Some(office)).await;
                    tracing::info!("this centre allocates, from revision {head} on");
                }
                Role::Allocates
            }
            Some(_) => Role::Follows(None),
            None => Role::Follows(self.allocator.clone().filter(|url| *url != self.shared.url)),
        };
        self.shared.role.send_if_modified(|r| std::mem::replace(r, role.clone()) != role);
        Ok(())
    }
}
