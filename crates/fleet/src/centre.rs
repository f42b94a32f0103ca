//! The control centre as a state machine: the state that is read, and the reports of hosts.
//!
//! *Changes* are prepared at a [`Planner`]; [`Centre::publish`] publishes one.
//!
//! *Hosts* are handled by [`Centre::hello`], [`Centre::applied`] and [`Centre::report`]. [`Centre::lacking`] computes
//! the updates of a host from the revision that it has. No update waits in a queue, so a host that does not read costs
//! nothing.
//!
//! *Questions* are [`Centre::get`], [`Centre::changes_since`] and [`Centre::status`]. Each call passes the time, in
//! milliseconds since 1970.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

use rand_chacha::ChaCha20Rng;
use rand_chacha::rand_core::SeedableRng;

use crate::error::Refusal;
use crate::host_view::{HostView, Key, Keys};
use crate::liveness::Live;
use crate::model::{Kind, MAX_APPLY};
use crate::planner::{Facts, Given, MAX_LOG, News, Planner};
use crate::queries::Seen;
use crate::records::{self, Write};
use crate::state::{Name, State};
use crate::tokens::Actor;
use crate::v1::{self, item::Item};

/// Capacity that a log keeps when its entries are dropped, in entries.
const MAX_IDLE_LOG: usize = 16;
/// Most changes that are kept for watchers. A single call does not fill it, so a watcher that reads is not cut off.
const MAX_CHANGES: usize = 2 * MAX_APPLY;
/// Most items of one message.
const ITEMS: usize = 256;

/// The latest changes that concern one host.
#[derive(Debug, Default)]
struct Log {
    /// Keys that concern the host, with the revision of the change. Hosts that a change concerns for the same reason
    /// share the set.
    entries: VecDeque<(u64, Arc<Keys>)>,
    /// Number of keys.
    keys: usize,
    /// Changes up to this revision may be missing.
    floor: u64,
}

impl Log {
    fn new(floor: u64) -> Log {
        Log { floor, ..Log::default() }
    }

    fn extend(&mut self, revision: u64, batches: Vec<Arc<Keys>>) {
        self.keys += batches.iter().map(|b| b.len()).sum::<usize>();
        self.entries.extend(batches.into_iter().map(|b| (revision, b)));
        while self.keys > MAX_LOG {
            self.pop();
        }
    }

    /// Drops the oldest change.
    fn pop(&mut self) {
        let Some((revision, keys)) = self.entries.pop_front() else { return };
        (self.keys, self.floor) = (self.keys - keys.len(), revision);
    }

    /// Drops changes up to this revision.
    fn forget(&mut self, revision: u64) {
        while self.entries.front().is_some_and(|(r, _)| *r <= revision) {
            self.pop();
        }
        self.entries.shrink_to(MAX_IDLE_LOG);
    }
}

/// The control centre.
pub struct Centre {
    pub(crate) state: Arc<State>,
    pub(crate) live: Live,
    logs: HashMap<Name, Log>,
    /// The revision that this centre was loaded with.
    pub(crate) begun: u64,
    pub(crate) changes: VecDeque<(u64, Arc<Seen>)>,
    /// Changes up to this revision may be missing.
    pub(crate) changes_floor: u64,
}

impl Facts for Centre {
    fn programs(&self, vrnic: &str) -> u32 {
        self.live.vrnic(vrnic).map_or(0, |s| s.programs)
    }

    fn applied(&self, host: &str) -> u64 {
        self.live.applied(host)
    }

    fn is_connected(&self, host: &str, now_ms: u64) -> bool {
        self.live.is_connected(host, now_ms)
    }
}

impl Centre {
    /// A centre with the content of a store: its records, and the number of changes that made them. Also returns the
    /// planner for its changes.
    ///
    /// # Errors
    /// A record is damaged, or of another version.
    pub fn load(revision: u64, records: &[Write], seed: [u8; 32]) -> Result<(Centre, Planner), Refusal> {
        let mut state = State { revision, ..State::default() };
        state.take(records.iter().map(records::read).collect::<Result<Vec<_>, _>>()?)?;
        if state.fleet.is_empty() {
            return Err(Refusal::invalid("the store has no number of its fleet; restore the store from a backup"));
        }
        let centre = Centre {
            state: Arc::new(state.clone()),
            live: Live::default(),
            logs: HashMap::new(),
            begun: revision,
            changes: VecDeque::new(),
            changes_floor: revision,
        };
        let planner = Planner { state, behind: None, rng: ChaCha20Rng::from_seed(seed), given: Given::default() };
        Ok((centre, planner))
    }

    /// The records of a new fleet.
    pub fn found(fleet: &str) -> Vec<Write> {
        let group = v1::Group { name: "default".into(), vni: Some(1), ..v1::Group::default() };
        vec![records::meta(fleet), records::object(Kind::Group, "default", Some((group.into(), 1)))]
    }

    /// The number of changes that made the state.
    pub fn revision(&self) -> u64 {
        self.state.revision
    }

    /// The state's number.
    pub fn fleet(&self) -> &str {
        &self.state.fleet
    }

    /// True if there is a host with this name.
    pub fn is_host(&self, name: &str) -> bool {
        self.state.hosts.contains_key(name)
    }

    /// Publishes a change made at the planner. Returns the hosts that it concerns.
    pub fn publish(&mut self, planner: &mut Planner, news: News) -> Vec<Name> {
        let new = Arc::new(std::mem::take(&mut planner.state));
        let old = std::mem::replace(&mut self.state, new);
        planner.behind = Some((old, news.revision, news.records));
        news.homeless.iter().for_each(|name| self.live.forget_vrnic(name));
        self.changes.extend(news.changes.into_iter().map(|c| (news.revision, c)));
        while self.changes.len() > MAX_CHANGES {
            self.changes_floor = self.changes.pop_front().map_or(news.revision, |(r, _)| r);
        }
        let hosts: Vec<Name> = news.hosts.keys().cloned().collect();
        for (host, keys) in news.hosts {
            if self.state.hosts.contains_key(&host) {
                // If the log overflows, the host is sent everything.
                self.logs.entry(host).or_insert_with(|| Log::new(self.begun)).extend(news.revision, keys);
            } else {
                self.logs.remove(&host);
                self.live.forget_host(&host);
            }
        }
        hosts
    }

    /// Applies a change that is in the store, to both copies of the state.
    ///
    /// # Errors
    /// As [`Planner::commit`].
    pub fn commit(&mut self, planner: &mut Planner, revision: u64, writes: &[Write]) -> Result<Vec<Name>, Refusal> {
        let news = planner.commit(revision, writes)?;
        Ok(self.publish(planner, news))
    }

    /// Drops log entries up to a revision that a host has put in force, because the host will hardly ask for them
    /// again.
    pub(crate) fn forget_told(&mut self, host: &str, revision: u64) {
        if let Some(log) = self.logs.get_mut(host) {
            log.forget(revision);
        }
    }

    /// True if a host with revision `told` must be sent a complete update.
    pub fn lacks_all(&self, host: &str, told: Option<u64>) -> bool {
        let floor = self.logs.get(host).map_or(self.begun, |l| l.floor);
        !told.is_some_and(|t| (floor..=self.state.revision).contains(&t))
    }

    /// The data for the updates of a host with revision `told`. They are complete if the host has no revision, or one
    /// that is too old.
    pub fn lacking(&self, host: &str, told: Option<u64>) -> Lacking {
        let known = told.filter(|_| !self.lacks_all(host, told)).map(|told| {
            let log = self.logs.get(host).into_iter().flat_map(|l| l.entries.iter().rev());
            (told, log.take_while(|(r, _)| *r > told).map(|(_, keys)| keys.clone()).collect())
        });
        Lacking { state: self.state.clone(), host: host.into(), known }
    }

    /// The updates for a host with revision `told`.
    pub fn updates(&self, host: &str, told: Option<u64>) -> Vec<v1::Update> {
        self.lacking(host, told).updates()
    }

    /// Whether a change since a revision may concern a host.
    pub(crate) fn concerned_since(&self, host: &str, revision: u64) -> bool {
        let log = self.logs.get(host);
        revision < log.map_or(self.begun, |l| l.floor)
            || log.and_then(|l| l.entries.back()).is_some_and(|(r, _)| *r > revision)
    }

    /// Checks that a host may join with a token.
    ///
    /// # Errors
    /// It may not.
    pub fn may_join(&self, secret: &str, host: &str, now_ms: u64) -> Result<(), Refusal> {
        self.state.join_token(secret, host, now_ms).map(drop)
    }

    /// The actor that a token stands for.
    ///
    /// # Errors
    /// The token is unknown.
    pub fn actor(&self, secret: &str, now_ms: u64) -> Result<Actor, Refusal> {
        self.state.actor(secret, now_ms)
    }
}

/// The data for a host's updates, at one revision.
pub struct Lacking {
    state: Arc<State>,
    host: String,
    /// The revision that the host has, and the keys changed since; `None`: it is sent everything.
    known: Option<(u64, Vec<Arc<Keys>>)>,
}

impl Lacking {
    /// The revision of the host after these updates.
    pub fn revision(&self) -> u64 {
        self.state.revision
    }

    /// The updates, in parts; empty if no change concerns the host. This may take long. It needs no lock on the centre.
    pub fn updates(self) -> Vec<v1::Update> {
        let sight = HostView::new(&self.state, &self.host);
        let items: Vec<(Key, Option<v1::Item>)> = match &self.known {
            None => sight.whole().into_iter().map(|(k, i)| (k, Some(i))).collect(),
            Some((told, keys)) => {
                let keys: BTreeSet<&Key> = keys.iter().flat_map(|k| &**k).collect();
                if keys.is_empty() {
                    return Vec::new();
                }
                let items = keys.into_iter().map(|k| (k.clone(), sight.item(k))).collect();
                self.without_what_follows(items, *told)
            }
        };
        let revision = self.state.revision;
        let update = || v1::Update { fleet: self.state.fleet.clone(), revision, ..v1::Update::default() };
        let mut parts: Vec<v1::Update> = items
            .chunks(ITEMS)
            .map(|chunk| {
                let mut part = v1::Update { more: true, ..update() };
                for (key, item) in chunk {
                    match item {
                        Some(item) => part.put.push(item.clone()),
                        None => {
                            let deleted = matches!(key, Key::Vrnic(v) if !self.state.vrnics.contains_key(v));
                            part.gone.push(key.message(deleted));
                        }
                    }
                }
                part
            })
            .collect();
        if parts.is_empty() {
            parts.push(update());
        }
        parts[0].whole = self.known.is_none();
        if let Some(last) = parts.last_mut() {
            last.more = false;
        }
        parts
    }

    /// Drops items that a host with revision `told` need not be sent. The host's agent removes the peers of a group
    /// with the group, and a place with its last peer. The host already has a place that has not changed since and has
    /// no new peer.
    fn without_what_follows(&self, mut items: Vec<(Key, Option<v1::Item>)>, told: u64) -> Vec<(Key, Option<v1::Item>)> {
        let lost: BTreeSet<Name> = items
            .iter()
            .filter_map(|(key, item)| if let (Key::Group(g), None) = (key, item) { Some(g.clone()) } else { None })
            .collect();
        let peer = |item: &Option<v1::Item>| match item.as_ref().and_then(|i| i.item.as_ref()) {
            Some(Item::Peer(p)) => Some(p.host.clone()),
            _ => None,
        };
        let with_new_peers: BTreeSet<String> = items.iter().filter_map(|(_, item)| peer(item)).collect();
        items.retain(|(key, item)| match key {
            Key::Place(host) if item.is_some() => {
                with_new_peers.contains(&**host) || self.state.hosts.get(host).is_some_and(|h| h.revision > told)
            }
            Key::Place(_) => false,
            _ if item.is_some() => true,
            // A vRNIC that has changed since may have been in another group before, and the host still has it in that
            // group.
            Key::Peer(name) => {
                let same = self.state.vrnics.get(name).filter(|v| v.revision <= told);
                same.is_none_or(|v| !lost.contains(&v.group))
            }
            _ => true,
        });
        items
    }
}
