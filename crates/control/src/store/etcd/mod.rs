//! The store in etcd, which several centres can share. Keys under its prefix:
//!
//! * `record/KEY`: a record;
//! * `head`: the revision of the last change; `change`: the number of its pieces, and the attempt that made it;
//! * `stage/REVISION/N`: the pieces of a change that is too large for one transaction;
//! * `allocator`: the URL of the centre that allocates; `centre/ID`: the URL of each centre. Each is attached to its
//!   centre's lease.
//!
//! A change is made by the transaction that makes `head` name it. The transaction compares `head` with the revision
//! before, and the creation revision of `allocator` with the writer's election. A small change has its records in the
//! same transaction. The pieces of a large change are written before it, and its records are copied from them
//! afterwards. A reader takes records that are not copied yet from the pieces. The next change, or a newly elected
//! centre, first copies the rest ([`EtcdStore::settle`]).

mod client;
mod follow;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use prost::Message;
use unirdma_fleet::{Write, said};

use super::{Snapshot, Store, StoreError};
use client::{Client, is_unclear};

pub(crate) use follow::{Follower, Lost, News, Office};

/// etcd's messages.
#[allow(missing_docs, clippy::large_enum_variant, clippy::enum_variant_names)]
mod api {
    include!(concat!(env!("OUT_DIR"), "/etcdserverpb.rs"));
}

#[allow(missing_docs)]
mod mvccpb {
    include!(concat!(env!("OUT_DIR"), "/mvccpb.rs"));
}

#[allow(missing_docs)]
mod staged {
    include!(concat!(env!("OUT_DIR"), "/unirdma.staged.rs"));
}

/// Most operations of a transaction (etcd allows 128), and most bytes (etcd allows 1.5 MiB).
const MAX_OPS: usize = 120;
const MAX_BYTES: usize = 1 << 20;
/// Keys in one answer.
const PAGE: i64 = 1_000;
/// How long a change is retried.
const PERSISTENCE: Duration = Duration::from_secs(5);
/// Time between two attempts.
const PAUSE: Duration = Duration::from_millis(200);

/// A store in etcd.
pub struct EtcdStore {
    client: Client,
    name: String,
    /// Ends in `/`.
    prefix: String,
    /// The election that this centre has won. `None`: it is not elected, as when a fleet is made.
    office: Mutex<Option<Office>>,
    /// Locked while a change is made. True if all pieces of the last change are copied.
    settled: tokio::sync::Mutex<bool>,
}

/// Result of a transaction.
enum Decision {
    Done,
    /// `head` has another revision, which is given.
    Moved(u64),
    /// Another centre was elected.
    Deposed,
}

impl EtcdStore {
    /// The store at an address: the text after `etcd://`.
    ///
    /// # Errors
    /// The address is invalid, or `etcd.toml` in `dir` is wrong.
    pub fn open(address: &str, dir: &Path) -> Result<EtcdStore, StoreError> {
        let wrong = |what: &str| Err(StoreError::Broken(format!("cannot be used: {what}")));
        let (members, prefix) = address.split_once('/').unwrap_or((address, ""));
        if members.contains('@') {
            return wrong(
                "others see the command line: put user and password into `etcd.toml` in the centre's directory",
            );
        }
        let prefix = prefix.trim_matches('/');
        let plain = |b: u8| b.is_ascii_alphanumeric() || b"._-/".contains(&b);
        if prefix.len() > 200 || !prefix.bytes().all(plain) {
            return wrong("a prefix has letters, digits, `.`, `_`, `-` and `/`");
        }
        let members: Vec<&str> = members.split(',').collect();
        let port = |m: &&str| m.rsplit_once(':').is_some_and(|(h, p)| !h.is_empty() && p.parse::<u16>().is_ok());
        if !members.iter().all(port) {
            return wrong("write etcd://HOST:PORT[,HOST:PORT...][/PREFIX]");
        }
        let client = Client::new(&members, dir)?;
        let prefix = if prefix.is_empty() { "unirdma" } else { prefix };
        Ok(EtcdStore {
            client,
            name: format!("etcd://{}/{prefix}", members.join(",")),
            prefix: format!("/{prefix}/"),
            office: Mutex::default(),
            settled: tokio::sync::Mutex::new(false),
        })
    }

    fn key(&self, rest: impl std::fmt::Display) -> Vec<u8> {
        format!("{}{rest}", self.prefix).into_bytes()
    }

    fn away(&self, why: &tonic::Status) -> StoreError {
        StoreError::Away { name: self.name.clone(), why: said(why) }
    }

    fn broken(&self, what: impl std::fmt::Display) -> StoreError {
        StoreError::Broken(format!("{}: {what}; restore it from a backup", self.name))
    }

    /// All keys under `start` at one moment: etcd's revision then, and each key's value and revisions.
    async fn pages(&self, start: &str) -> Result<(i64, BTreeMap<String, mvccpb::KeyValue>), StoreError> {
        let mut attempt = 0;
        loop {
            attempt += 1;
            match self.read_pages(start).await {
                Ok(all) => return Ok(all),
                // The revision was compacted meanwhile, or another member must be asked.
                Err(_) if attempt <= self.client.members() => tokio::time::sleep(PAUSE).await,
                Err(e) => return Err(self.away(&e)),
            }
        }
    }

    async fn read_pages(&self, start: &str) -> Result<(i64, BTreeMap<String, mvccpb::KeyValue>), tonic::Status> {
        let (mut from, end) = (self.key(start), range_end(&self.key(start)));
        let (mut revision, mut all) = (0, BTreeMap::new());
        loop {
            let request = api::RangeRequest { key: from, range_end: end.clone(), limit: PAGE, revision };
            let page = self.client.range(request).await?;
            if revision == 0 {
                revision = page.header.map_or(0, |h| h.revision);
            }
            let last = page.kvs.last().map(|kv| kv.key.clone());
            for kv in page.kvs {
                let rest = kv.key.get(self.prefix.len()..).unwrap_or_default();
                all.insert(String::from_utf8_lossy(rest).into_owned(), kv);
            }
            match last.filter(|_| page.more) {
                Some(mut last) => {
                    last.push(0);
                    from = last;
                }
                None => return Ok((revision, all)),
            }
        }
    }

    /// All records and centres, and etcd's revision of this state.
    pub(super) async fn read(&self) -> Result<(i64, Snapshot, Vec<News>), StoreError> {
        let (at, mut all) = self.pages("").await?;
        let news = follow::news_of(&all, at);
        let Some(head) = all.get("head") else { return Ok((at, Snapshot::default(), news)) };
        let revision = number(&head.value).ok_or_else(|| self.broken("`head` is damaged"))?;
        let pieces = all.get("change").and_then(|c| pieces_of(&c.value));
        let pieces = pieces.ok_or_else(|| self.broken("`change` is damaged"))?;
        let mut changed = Vec::new();
        for n in 0..pieces {
            let piece =
                all.get(&stage_key(revision, n)).ok_or_else(|| self.broken("a piece of a change is missing"))?;
            changed.extend(self.piece(&piece.value)?);
        }
        let later = all.split_off("record/");
        let mut records: BTreeMap<String, Vec<u8>> = later
            .into_iter()
            .map_while(|(key, kv)| Some((key.strip_prefix("record/")?.to_owned(), kv.value)))
            .collect();
        for w in changed {
            match w.value {
                Some(value) => drop(records.insert(w.key, value)),
                None => drop(records.remove(&w.key)),
            }
        }
        let records = records.into_iter().map(|(key, value)| Write { key, value: Some(value) }).collect();
        Ok((at, Snapshot { revision, records }, news))
    }

    fn piece(&self, value: &[u8]) -> Result<Vec<Write>, StoreError> {
        let piece = staged::Piece::decode(value).map_err(|_| self.broken("a piece of a change is damaged"))?;
        Ok(piece.records.into_iter().map(|r| Write { key: r.key, value: r.value }).collect())
    }

    /// The writes of a change that was made in pieces.
    async fn staged(&self, revision: u64, pieces: u32) -> Result<Vec<Write>, StoreError> {
        let (_, all) = self.pages(&format!("stage/{revision:016x}/")).await?;
        let mut writes = Vec::new();
        for n in 0..pieces {
            let piece =
                all.get(&stage_key(revision, n)).ok_or_else(|| self.broken("a piece of a change is missing"))?;
            writes.extend(self.piece(&piece.value)?);
        }
        Ok(writes)
    }

    fn office(&self) -> Option<Office> {
        *self.office.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The condition that this centre is still elected.
    fn fence(&self) -> Vec<api::Compare> {
        let office = self.office();
        office.map(|o| compare_create(self.key("allocator"), o.created)).into_iter().collect()
    }

    /// A transaction that succeeds only while this centre is elected. It is repeated until its result is known.
    async fn fenced(&self, ops: Vec<api::RequestOp>, deadline: Instant) -> Result<(), StoreError> {
        let request = api::TxnRequest { compare: self.fence(), success: ops, failure: Vec::new() };
        loop {
            match self.client.txn(request.clone()).await {
                Ok(done) if done.succeeded => return Ok(()),
                Ok(_) => return Err(StoreError::Deposed),
                Err(e) if is_unclear(&e) && Instant::now() < deadline => tokio::time::sleep(PAUSE).await,
                Err(e) => return Err(self.away(&e)),
            }
        }
    }

    /// Replaces `from` by `to` in `head`, together with these operations. `change` tells whether an attempt whose
    /// answer was lost has succeeded.
    async fn decide(
        &self,
        (from, to): (u64, u64),
        pieces: u32,
        mut ops: Vec<api::RequestOp>,
        deadline: Instant,
    ) -> Result<Decision, StoreError> {
        let mut random = [0; 8];
        getrandom::fill(&mut random).map_err(|e| self.broken(e))?;
        let attempt = format!("{pieces} {:016x}", u64::from_ne_bytes(random)).into_bytes();
        ops.push(put(self.key("head"), to.to_string().into_bytes(), 0));
        ops.push(put(self.key("change"), attempt.clone(), 0));
        let mut compare = self.fence();
        compare.push(match from {
            0 => compare_create(self.key("head"), 0),
            _ => api::Compare {
                result: api::compare::CompareResult::Equal.into(),
                target: api::compare::CompareTarget::Value.into(),
                key: self.key("head"),
                target_union: Some(api::compare::TargetUnion::Value(from.to_string().into_bytes())),
            },
        });
        let failure = ["head", "change"].map(|k| get(self.key(k))).into();
        let request = api::TxnRequest { compare, success: ops, failure };
        loop {
            let done = match self.client.txn(request.clone()).await {
                Ok(done) => done,
                Err(e) if is_unclear(&e) && Instant::now() < deadline => {
                    tokio::time::sleep(PAUSE).await;
                    continue;
                }
                Err(e) => return Err(self.away(&e)),
            };
            if done.succeeded {
                return Ok(Decision::Done);
            }
            let mut found = done.responses.into_iter().map(|r| match r.response {
                Some(api::response_op::Response::ResponseRange(r)) => r.kvs.into_iter().next().map(|kv| kv.value),
                _ => None,
            });
            let (head, change) = (found.next().flatten(), found.next().flatten());
            let head = head.as_deref().and_then(number).unwrap_or(0);
            return Ok(match () {
                () if head == to && change.as_ref() == Some(&attempt) => Decision::Done,
                () if head == from => Decision::Deposed,
                () => Decision::Moved(head),
            });
        }
    }

    /// Copies the pieces of the last change to their places, and removes the pieces of changes that were never made.
    async fn settle(&self) -> Result<(), StoreError> {
        let (_, snapshot) = self.pages("head").await?;
        let (_, change) = self.pages("change").await?;
        let revision = snapshot.get("head").and_then(|kv| number(&kv.value)).unwrap_or(0);
        let change = change.get("change").map(|kv| kv.value.clone());
        let pieces = change.as_deref().and_then(pieces_of).unwrap_or(0);
        let deadline = Instant::now() + 6 * PERSISTENCE;
        if pieces > 0 {
            let writes = self.staged(revision, pieces).await?;
            let mut parts = parts(&writes);
            let copy = async |part: Option<&[Write]>| match part {
                Some(part) => self.fenced(part.iter().map(|w| self.op(w)).collect(), deadline).await,
                None => Ok(()),
            };
            // Several transactions at a time, which etcd writes to its disk together.
            while let Some(first) = parts.next() {
                let (a, b, c) = (copy(parts.next()), copy(parts.next()), copy(parts.next()));
                tokio::try_join!(copy(Some(first)), a, b, c)?;
            }
        }
        let stage = self.key("stage/");
        let mut ops = vec![delete(stage.clone(), range_end(&stage))];
        if pieces > 0 {
            ops.push(put(self.key("change"), b"0 settled".to_vec(), 0));
        }
        self.fenced(ops, deadline).await
    }

    fn op(&self, w: &Write) -> api::RequestOp {
        let key = self.key(format_args!("record/{}", w.key));
        match &w.value {
            Some(value) => put(key, value.clone(), 0),
            None => delete(key, Vec::new()),
        }
    }
}

/// Splits writes into parts that fit into a transaction.
fn parts(writes: &[Write]) -> impl Iterator<Item = &[Write]> {
    let mut rest = writes;
    std::iter::from_fn(move || {
        let mut bytes = 0;
        let fits = |w: &&Write| {
            bytes += size(w);
            bytes <= MAX_BYTES
        };
        let n = rest.iter().take(MAX_OPS).take_while(fits).count().max(1).min(rest.len());
        let (part, after) = rest.split_at(n);
        rest = after;
        (!part.is_empty()).then_some(part)
    })
}

fn size(w: &Write) -> usize {
    w.key.len() + w.value.as_ref().map_or(0, Vec::len) + 64
}

/// Encodes writes as pieces for `stage/`.
fn pieces(writes: &[Write]) -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    let (mut piece, mut bytes) = (staged::Piece::default(), 0);
    for w in writes {
        if bytes + size(w) > MAX_BYTES && !piece.records.is_empty() {
            all.push(std::mem::take(&mut piece).encode_to_vec());
            bytes = 0;
        }
        bytes += size(w);
        piece.records.push(staged::Record { key: w.key.clone(), value: w.value.clone() });
    }
    all.push(piece.encode_to_vec());
    all
}

#[tonic::async_trait]
impl Store for EtcdStore {
    async fn load(&self) -> Result<Snapshot, StoreError> {
        self.read().await.map(|(_, snapshot, _)| snapshot)
    }

    async fn advance(&self, from: u64, to: u64, writes: &[Write]) -> Result<(), StoreError> {
        let mut settled = self.settled.lock().await;
        if !*settled {
            self.settle().await?;
            *settled = true;
        }
        let deadline = Instant::now() + PERSISTENCE;
        let small = writes.len() + 2 <= MAX_OPS && writes.iter().map(size).sum::<usize>() <= MAX_BYTES;
        let (mut staged, mut ops) = (0, Vec::new());
        if small {
            ops = writes.iter().map(|w| self.op(w)).collect();
        } else {
            *settled = false;
            for (n, piece) in (0..).zip(pieces(writes)) {
                let key = self.key(stage_key(to, n));
                self.fenced(vec![put(key, piece, 0)], deadline).await?;
                staged = n + 1;
            }
        }
        match self.decide((from, to), staged, ops, deadline).await? {
            Decision::Done => {}
            Decision::Moved(has) => {
                return Err(StoreError::Moved { has, expected: from });
            }
            Decision::Deposed => return Err(StoreError::Deposed),
        }
        if !*settled {
            // The change is made already. If copying fails, the next change begins with it.
            match self.settle().await {
                Ok(()) => *settled = true,
                Err(e) => tracing::warn!("a change was kept, and is copied to its place later: {e}"),
            }
        }
        Ok(())
    }

    fn name(&self) -> String {
        self.name.clone()
    }
}

fn stage_key(revision: u64, piece: u32) -> String {
    format!("stage/{revision:016x}/{piece:08x}")
}

fn number(value: &[u8]) -> Option<u64> {
    std::str::from_utf8(value).ok()?.parse().ok()
}

/// The number of pieces in which a change was made.
fn pieces_of(value: &[u8]) -> Option<u32> {
    std::str::from_utf8(value).ok()?.split(' ').next()?.parse().ok()
}

/// The first key after all keys that begin with `start`.
fn range_end(start: &[u8]) -> Vec<u8> {
    let mut end = start.to_vec();
    if let Some(last) = end.last_mut() {
        // Prefixes are ASCII.
        *last += 1;
    }
    end
}

fn put(key: Vec<u8>, value: Vec<u8>, lease: i64) -> api::RequestOp {
    op(api::request_op::Request::RequestPut(api::PutRequest { key, value, lease }))
}

fn get(key: Vec<u8>) -> api::RequestOp {
    op(api::request_op::Request::RequestRange(api::RangeRequest { key, ..Default::default() }))
}

fn delete(key: Vec<u8>, range_end: Vec<u8>) -> api::RequestOp {
    op(api::request_op::Request::RequestDeleteRange(api::DeleteRangeRequest { key, range_end }))
}

fn op(request: api::request_op::Request) -> api::RequestOp {
    api::RequestOp { request: Some(request) }
}

/// The condition that a key was made at this revision of etcd; 0: that it does not exist.
fn compare_create(key: Vec<u8>, created: i64) -> api::Compare {
    api::Compare {
        result: api::compare::CompareResult::Equal.into(),
        target: api::compare::CompareTarget::Create.into(),
        key,
        target_union: Some(api::compare::TargetUnion::CreateRevision(created)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_etcd_are_read_and_wrong_ones_say_what_to_write() {
        let dir = std::env::temp_dir();
        let _runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let _inside = _runtime.enter();
        let open = |text: &str| EtcdStore::open(text, &dir);
        let store = open("127.0.0.1:1,[::1]:2/a/b/").unwrap();
        assert_eq!((store.name().as_str(), store.prefix.as_str()), ("etcd://127.0.0.1:1,[::1]:2/a/b", "/a/b/"));
        assert_eq!(open("x:2379").unwrap().name(), "etcd://x:2379/unirdma");
        for (bad, what) in [
            ("", "write etcd://"),
            ("x", "write etcd://"),
            ("x:99999", "write etcd://"),
            ("x:1,", "write etcd://"),
            ("root:secret@x:1", "put user and password into `etcd.toml`"),
            ("x:1/a b", "a prefix has letters"),
        ] {
            let e = open(bad).err().unwrap().to_string();
            assert!(e.contains(what) && !e.contains("secret@") && !e.contains('\n'), "{bad}: {e}");
        }
    }

    #[test]
    fn large_changes_are_parted_and_nothing_of_them_is_lost() {
        let writes: Vec<Write> =
            (0..20_000).map(|n| Write { key: format!("k{n}"), value: (n % 7 != 0).then(|| vec![1; 150]) }).collect();
        let all: Vec<Write> = parts(&writes).flatten().cloned().collect();
        assert_eq!(all, writes);
        assert!(parts(&writes).all(|p| p.len() <= MAX_OPS && p.iter().map(size).sum::<usize>() <= MAX_BYTES));
        let pieces = pieces(&writes);
        assert!(pieces.len() > 1 && pieces.iter().all(|p| p.len() <= MAX_BYTES + 1024), "{}", pieces.len());
        let again: Vec<Write> = pieces
            .iter()
            .flat_map(|p| staged::Piece::decode(p.as_slice()).unwrap().records)
            .map(|r| Write { key: r.key, value: r.value })
            .collect();
        assert_eq!(again, writes);
        assert_eq!(parts(&[]).count(), 0);
        let one = [Write { key: "k".into(), value: Some(vec![0; 2 * MAX_BYTES]) }];
        assert_eq!(parts(&one).count(), 1);
    }
}
