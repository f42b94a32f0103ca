//! What centres see of each other in etcd: changes as they come to hold, who allocates, and which centres there are.

use std::collections::BTreeMap;

use unirdma_fleet::{Write, said};

use super::{EtcdStore, StoreError, api, compare_create, get, mvccpb, number, pieces_of, put, range_end};
use crate::store::Snapshot;

/// The election of a centre: when etcd made the key that says so. Another election has another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Office {
    pub created: i64,
}

/// What has happened.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum News {
    /// A change holds.
    Change { revision: u64, writes: Vec<Write> },
    /// The URL of the centre that allocates, since this revision of etcd.
    Allocator { url: Option<String>, at: i64 },
    /// A centre has come, or is gone.
    Centre { id: String, url: Option<String> },
}

/// A key and what it is now; `None`: it is gone.
type Event = (String, Option<Vec<u8>>);

/// Why nothing more is heard.
#[derive(Debug)]
pub(crate) enum Lost {
    /// What has happened since is not remembered any more: everything is to be read again.
    Forgotten,
    /// etcd does not answer.
    Away(StoreError),
}

/// Follows what happens in a store.
pub(crate) struct Follower {
    stream: tonic::Streaming<api::WatchResponse>,
    /// etcd's revision up to which everything was heard.
    pub at: i64,
}

/// Of the keys as they are: who allocates, and which centres there are.
pub(super) fn news_of(all: &BTreeMap<String, mvccpb::KeyValue>, at: i64) -> Vec<News> {
    let mut news = vec![News::Allocator { url: all.get("allocator").and_then(|kv| url_of(&kv.value)), at }];
    for (key, kv) in all.range("centre/".to_owned()..).take_while(|(k, _)| k.starts_with("centre/")) {
        news.push(News::Centre { id: key["centre/".len()..].into(), url: url_of(&kv.value) });
    }
    news
}

/// A centre writes its lease and its URL.
fn url_of(value: &[u8]) -> Option<String> {
    Some(std::str::from_utf8(value).ok()?.split_once(' ')?.1.to_owned())
}

fn entry(lease: i64, url: &str) -> Vec<u8> {
    format!("{lease:016x} {url}").into_bytes()
}

impl EtcdStore {
    /// Everything, and a follower of what comes after that.
    pub(crate) async fn list(&self) -> Result<(Snapshot, Vec<News>, Follower), StoreError> {
        let (at, snapshot, news) = self.read().await?;
        Ok((snapshot, news, self.follow(at).await?))
    }

    /// What has happened after a revision of etcd.
    pub(crate) async fn follow(&self, at: i64) -> Result<Follower, StoreError> {
        let key = self.prefix.clone().into_bytes();
        let range_end = range_end(&key);
        let create = api::WatchCreateRequest { key, range_end, start_revision: at + 1, progress_notify: true };
        let stream = self.client.watch(create).await.map_err(|e| self.away(&e))?;
        Ok(Follower { stream, at })
    }

    /// The next things that have happened.
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
        // All events of one transaction come together.
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

    /// What a transaction means. Records without a head are pieces of an earlier change that were copied to their places.
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
                // They were copied to their places and removed already.
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

    /// Makes a lease, and writes under it that there is this centre. Gives the lease, and the centre's id.
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

    /// Ends a lease, and with it what is written under it.
    pub(crate) async fn end(&self, lease: i64) -> Result<(), StoreError> {
        self.client.revoke(lease).await.map_err(|e| self.away(&e))
    }

    /// Is elected, unless another centre is. Gives the revision of the fleet's last change at that moment: no other centre makes one after it.
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
            // An attempt before this one, whose answer was lost.
            Some(kv) if kv.value == entry(lease, url) => kv.create_revision,
            _ => return Ok(None),
        };
        let head = head.and_then(|kv| number(&kv.value)).ok_or_else(|| self.broken("`head` is missing"))?;
        Ok(Some((Office { created }, head)))
    }

    /// Changes are made in this office from now on; `None`: by others.
    pub(crate) async fn set_office(&self, office: Option<Office>) {
        // What a centre before it has left is finished first.
        *self.settled.lock().await = false;
        *self.office.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = office;
    }

    /// Writes the pieces of a change, and nothing more, as a centre does that dies then.
    #[cfg(test)]
    pub(crate) async fn stage_only(&self, revision: u64, writes: &[Write]) -> u32 {
        let pieces = super::pieces(writes);
        for (n, piece) in (0..).zip(&pieces) {
            let ops = vec![put(self.key(super::stage_key(revision, n)), piece.clone(), 0)];
            self.client.txn(api::TxnRequest { success: ops, ..Default::default() }).await.unwrap();
        }
        u32::try_from(pieces.len()).unwrap()
    }

    /// Makes a change of pieces hold, and nothing more.
    #[cfg(test)]
    pub(crate) async fn hold_only(&self, revision: u64, pieces: u32) {
        let deadline = std::time::Instant::now() + super::PERSISTENCE;
        assert!(matches!(
            self.decide((revision - 1, revision), pieces, Vec::new(), deadline).await,
            Ok(super::Decision::Done)
        ));
    }
}
