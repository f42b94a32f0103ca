//! Following the store in etcd: new changes, the centre that allocates, and the centres that exist.

use std::collections::BTreeMap;

use unirdma_fleet::{Write, said};

use super::{EtcdStore, StoreError, api, compare_create, get, mvccpb, number, pieces_of, put, range_end};
use crate::store::Snapshot;

/// The election of a centre: etcd's revision at which its key was made, which identifies the election.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Office {
    pub created: i64,
}

/// Something that has happened in the store.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum News {
    /// A change was made.
    Change { revision: u64, writes: Vec<Write> },
    /// The URL of the centre that allocates, since revision `at` of etcd. `None`: no centre allocates.
    Allocator { url: Option<String>, at: i64 },
    /// A centre has come, or has gone.
    Centre { id: String, url: Option<String> },
}

/// A key and its present value; `None`: it was deleted.
type Event = (String, Option<Vec<u8>>);

/// Why following has ended.
#[derive(Debug)]
pub(crate) enum Lost {
    /// etcd has compacted the revisions since then: everything must be read again.
    Forgotten,
    /// etcd does not answer.
    Away(StoreError),
}

/// A position in the history of a store.
pub(crate) struct Follower {
    stream: tonic::Streaming<api::WatchResponse>,
    /// etcd's revision up to which everything was received.
    pub at: i64,
}

/// The centre that allocates and the centres that exist, as news, from all keys.
pub(super) fn news_of(all: &BTreeMap<String, mvccpb::KeyValue>, at: i64) -> Vec<News> {
    let mut news = vec![News::Allocator { url: all.get("allocator").and_then(|kv| url_of(&kv.value)), at }];
    for (key, kv) in all.range("centre/".to_owned()..).take_while(|(k, _)| k.starts_with("centre/")) {
        news.push(News::Centre { id: key["centre/".len()..].into(), url: url_of(&kv.value) });
    }
    news
}

/// The URL in an entry of a centre, which is its lease and its URL.
fn url_of(value: &[u8]) -> Option<String> {
    Some(std::str::from_utf8(value).ok()?.split_once(' ')?.1.to_owned())
}

fn entry(lease: i64, url: &str) -> Vec<u8> {
    format!("{lease:016x} {url}").into_bytes()
}

impl EtcdStore {
    /// All records, the centres, and a follower of everything after that.
    pub(crate) async fn list(&self) -> Result<(Snapshot, Vec<News>, Follower), StoreError> {
        let (at, snapshot, news) = self.read().await?;
        Ok((snapshot, news, self.follow(at).await?))
    }

    /// A follower of everything after a revision of etcd.
    pub(crate) async fn follow(&self, at: i64) -> Result<Follower, StoreError> {
        let key = self.prefix.clone().into_bytes();
        let range_end = range_end(&key);
        let create = api::WatchCreateRequest { key, range_end, start_revision: at + 1, progress_notify: true };
        let stream = self.client.watch(create).await.map_err(|e| self.away(&e))?;
        Ok(Follower { stream, at })
    }

    /// Waits for the next news.
    pub(crate) async fn next(&self, follower: &mut Follower) -> Result<Vec<News>, Lost> {
        let away = |why: &str| Lost::Away(StoreError::Away { name: self.name.clone(), why: why.into() });
        let r = match follower.stream.message().await {
            Ok(Some(r)) => r,
            Ok(None) => {
                self.client.lost_watch();
                return Err(away("it has ended the connection"));
            }
            Err(e) => {
                self.client.lost_watch();
                return Err(away(&said(&e)));
            }
        };
        if r.compact_revision > 0 {
            return Err(Lost::Forgotten);
        }
        if r.canceled {
            self.client.lost_watch();
            return Err(away(&r.cancel_reason));
        }
        if r.events.is_empty() && !r.created {
            follower.at = follower.at.max(r.header.map_or(0, |h| h.revision));
        }
        // etcd sends all events of one transaction together.
        let mut steps: BTreeMap<i64, Vec<Event>> = BTreeMap::new();
        for e in r.events {
            let gone = e.r#type() == mvccpb::event::EventType::Delete;
            let Some(kv) = e.kv else { continue };
            let rest = kv.key.get(self.prefix.len()..).unwrap_or_default();
            let key = String::from_utf8_lossy(rest).into_owned();
            steps.entry(kv.mod_revision).or_default().push((key, (!gone).then_some(kv.value)));
        }
        let mut news = Vec::new();
        for (at, step) in steps {
            news.extend(self.news_of_step(at, step).await?);
            follower.at = at;
        }
        Ok(news)
    }

    /// The news in a transaction. Records without `head` are pieces of an earlier change, copied to their places, and
    /// are no news.
    async fn news_of_step(&self, at: i64, step: Vec<Event>) -> Result<Vec<News>, Lost> {
        let value = |key: &str| step.iter().find(|(k, _)| k == key).and_then(|(_, v)| v.as_deref());
        let change = value("head").and_then(number).zip(value("change").and_then(pieces_of));
        let mut news = Vec::new();
        match change {
            Some((revision, 0)) => {
                let record =
                    |(k, v): &Event| Some(Write { key: k.strip_prefix("record/")?.to_owned(), value: v.clone() });
                news.push(News::Change { revision, writes: step.iter().filter_map(record).collect() });
            }
            Some((revision, pieces)) => match self.staged(revision, pieces).await {
                Ok(writes) => news.push(News::Change { revision, writes }),
                // The pieces were copied to their places and removed already.
                Err(StoreError::Broken(_)) => return Err(Lost::Forgotten),
                Err(e) => return Err(Lost::Away(e)),
            },
            None => {}
        }
        for (key, value) in step {
            let url = value.as_deref().and_then(url_of);
            if key == "allocator" {
                news.push(News::Allocator { url, at });
            } else if let Some(id) = key.strip_prefix("centre/") {
                news.push(News::Centre { id: id.into(), url });
            }
        }
        Ok(news)
    }

    /// Makes a lease, and registers this centre under it. Returns the lease and the centre's id.
    pub(crate) async fn begin(&self, seconds: i64, url: &str) -> Result<(i64, String), StoreError> {
        let lease = self.client.grant(seconds).await.map_err(|e| self.away(&e))?;
        let id = format!("{lease:016x}");
        let ops = vec![put(self.key(format_args!("centre/{id}")), entry(lease, url), lease)];
        let request = api::TxnRequest { success: ops, ..Default::default() };
        self.client.txn(request).await.map_err(|e| self.away(&e))?;
        Ok((lease, id))
    }

    /// Prolongs a lease; false if it has ended.
    pub(crate) async fn prolong(&self, lease: i64) -> Result<bool, StoreError> {
        self.client.keep_alive(lease).await.map_err(|e| self.away(&e))
    }

    /// Ends a lease, which deletes the keys under it.
    pub(crate) async fn end(&self, lease: i64) -> Result<(), StoreError> {
        self.client.revoke(lease).await.map_err(|e| self.away(&e))
    }

    /// Runs for election, unless a centre is elected. If elected, returns the revision of the fleet's last change at
    /// that moment: after it, no other centre makes a change.
    pub(crate) async fn campaign(&self, lease: i64, url: &str) -> Result<Option<(Office, u64)>, StoreError> {
        let key = self.key("allocator");
        let request = api::TxnRequest {
            compare: vec![compare_create(key.clone(), 0)],
            success: vec![put(key.clone(), entry(lease, url), lease), get(self.key("head"))],
            failure: vec![get(key), get(self.key("head"))],
        };
        let done = self.client.txn(request).await.map_err(|e| self.away(&e))?;
        let now = done.header.map_or(0, |h| h.revision);
        let mut found = done.responses.into_iter().map(|r| match r.response {
            Some(api::response_op::Response::ResponseRange(r)) => r.kvs.into_iter().next(),
            _ => None,
        });
        let (holder, head) = (found.next().flatten(), found.next().flatten());
        let created = match holder {
            _ if done.succeeded => now,
            // An earlier attempt succeeded, but its answer was lost.
            Some(kv) if kv.value == entry(lease, url) => kv.create_revision,
            _ => return Ok(None),
        };
        let head = head.and_then(|kv| number(&kv.value)).ok_or_else(|| self.broken("`head` is missing"))?;
        Ok(Some((Office { created }, head)))
    }

    /// Sets the election in which this centre makes changes. `None`: another centre makes them.
    pub(crate) async fn set_office(&self, office: Option<Office>) {
        // The next change first completes the unfinished work of the centre before.
        *self.settled.lock().await = false;
        *self.office.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = office;
    }

    /// Writes only the pieces of a change, like a centre that dies at that point.
    #[cfg(test)]
    pub(crate) async fn stage_only(&self, revision: u64, writes: &[Write]) -> u32 {
        let pieces = super::pieces(writes);
        for (n, piece) in (0..).zip(&pieces) {
            let ops = vec![put(self.key(super::stage_key(revision, n)), piece.clone(), 0)];
            self.client.txn(api::TxnRequest { success: ops, ..Default::default() }).await.unwrap();
        }
        u32::try_from(pieces.len()).unwrap()
    }

    /// Only makes `head` name a change whose pieces are written.
    #[cfg(test)]
    pub(crate) async fn hold_only(&self, revision: u64, pieces: u32) {
        let deadline = std::time::Instant::now() + super::PERSISTENCE;
        assert!(matches!(
            self.decide((revision - 1, revision), pieces, Vec::new(), deadline).await,
            Ok(super::Decision::Done)
        ));
    }
}
