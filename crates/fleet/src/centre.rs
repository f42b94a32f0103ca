//! The control centre as a state machine: what everybody reads, and what hosts say.
//!
//! *Changes* are made ready at a [`Desk`], beside this; [`Centre::publish`] makes one known.
//!
//! *Hosts* are heard by [`Centre::hello`], [`Centre::applied`] and [`Centre::report`]. What one is told is asked for by [`Centre::lacking`], with
//! the revision that it has been told: nothing waits in queues, so a host that does not read costs nothing.
//!
//! *Questions* are [`Centre::get`], [`Centre::changes_since`] and [`Centre::status`]. The time comes with each call, in milliseconds since 1970.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

use rand_chacha::ChaCha20Rng;
use rand_chacha::rand_core::SeedableRng;

use crate::desk::{Desk, Facts, Given, MAX_LOG, News};
use crate::error::Refusal;
use crate::live::Live;
use crate::model::{Kind, MAX_APPLY};
use crate::questions::Seen;
use crate::records::{self, Write};
use crate::state::{Name, State};
use crate::tokens::Actor;
use crate::v1::{self, item::Item};
use crate::view::{Key, Keys, Sight};

/// Room for so many keys stays when they are forgotten.
const MAX_IDLE_LOG: usize = 16;
/// Most changes that are remembered for those who watch: one that reads is not cut off by one call.
const MAX_CHANGES: usize = 2 * MAX_APPLY;
/// Most items of one message.
const ITEMS: usize = 256;

/// The latest changes of what a host is told.
#[derive(Debug, Default)]
struct Log {
    /// Keys that concern it, with the change. Hosts that one change concerns for one reason share them.
    entries: VecDeque<(u64, Arc<Keys>)>,
    /// How many keys there are.
    keys: usize,
    /// Changes up to this one may be missing.
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

    /// Forgets the change that is the oldest.
    fn pop(&mut self) {
        let Some((revision, keys)) = self.entries.pop_front() else { return };
        (self.keys, self.floor) = (self.keys - keys.len(), revision);
    }

    /// Forgets changes up to this one.
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
    /// The revision with which this centre began.
    pub(crate) begun: u64,
    pub(crate) changes: VecDeque<(u64, Arc<Seen>)>,
    /// Changes up to this one may be missing.
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
    /// A centre with what a store has: its records and how many changes made them. And the desk at which its changes are made ready.
    ///
    /// # Errors
    /// A record is damaged, or of another version.
    pub fn load(revision: u64, records: &[Write], seed: [u8; 32]) -> Result<(Centre, Desk), Refusal> {
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
        let desk = Desk { state, behind: None, rng: ChaCha20Rng::from_seed(seed), given: Given::default() };
        Ok((centre, desk))
    }

    /// The records of a new fleet.
    pub fn found(fleet: &str) -> Vec<Write> {
        let group = v1::Group { name: "default".into(), vni: Some(1), ..v1::Group::default() };
        vec![records::meta(fleet), records::object(Kind::Group, "default", Some((group.into(), 1)))]
    }

    /// How many changes made the state.
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

    /// Makes known a change that the desk has made. Says which hosts have news.
    pub fn publish(&mut self, desk: &mut Desk, news: News) -> Vec<Name> {
        let new = Arc::new(std::mem::take(&mut desk.state));
        let old = std::mem::replace(&mut self.state, new);
        desk.behind = Some((old, news.revision, news.records));
        news.homeless.iter().for_each(|name| self.live.forget_vrnic(name));
        self.changes.extend(news.changes.into_iter().map(|c| (news.revision, c)));
        while self.changes.len() > MAX_CHANGES {
            self.changes_floor = self.changes.pop_front().map_or(news.revision, |(r, _)| r);
        }
        let hosts: Vec<Name> = news.hosts.keys().cloned().collect();
        for (host, keys) in news.hosts {
            if self.state.hosts.contains_key(&host) {
                // If there are more than it remembers, the host is told everything.
                self.logs.entry(host).or_insert_with(|| Log::new(self.begun)).extend(news.revision, keys);
            } else {
                self.logs.remove(&host);
                self.live.forget_host(&host);
            }
        }
        hosts
    }

    /// Makes so what is in the store, in both copies.
    ///
    /// # Errors
    /// As [`Desk::commit`].
    pub fn commit(&mut self, desk: &mut Desk, revision: u64, writes: &[Write]) -> Result<Vec<Name>, Refusal> {
        let news = desk.commit(revision, writes)?;
        Ok(self.publish(desk, news))
    }

    /// A host has put this revision in force: it will hardly ask for what came before.
    pub(crate) fn forget_told(&mut self, host: &str, revision: u64) {
        if let Some(log) = self.logs.get_mut(host) {
            log.forget(revision);
        }
    }

    /// True if a host that has been told the state of `told` has to be told everything.
    pub fn lacks_all(&self, host: &str, told: Option<u64>) -> bool {
        let floor = self.logs.get(host).map_or(self.begun, |l| l.floor);
        !told.is_some_and(|t| (floor..=self.state.revision).contains(&t))
    }

    /// What a host lacks that has been told the state of `told`: everything, if it has been told nothing or too long ago.
    pub fn lacking(&self, host: &str, told: Option<u64>) -> Lacking {
        let known = told.filter(|_| !self.lacks_all(host, told)).map(|told| {
            let log = self.logs.get(host).into_iter().flat_map(|l| l.entries.iter().rev());
            (told, log.take_while(|(r, _)| *r > told).map(|(_, keys)| keys.clone()).collect())
        });
        Lacking { state: self.state.clone(), host: host.into(), known }
    }

    /// What a host is told that has been told the state of `told`.
    pub fn updates(&self, host: &str, told: Option<u64>) -> Vec<v1::Update> {
        self.lacking(host, told).updates()
    }

    /// Whether a change since a revision may concern a host.
    pub(crate) fn concerned_since(&self, host: &str, revision: u64) -> bool {
        let log = self.logs.get(host);
        revision < log.map_or(self.begun, |l| l.floor)
            || log.and_then(|l| l.entries.back()).is_some_and(|(r, _)| *r > revision)
    }

    /// Whether a host may join by a token.
    ///
    /// # Errors
    /// It may not.
    pub fn may_join(&self, secret: &str, host: &str, now_ms: u64) -> Result<(), Refusal> {
        self.state.join_token(secret, host, now_ms).map(drop)
    }

    /// Who calls with a token.
    ///
    /// # Errors
    /// Nobody does.
    pub fn actor(&self, secret: &str, now_ms: u64) -> Result<Actor, Refusal> {
        self.state.actor(secret, now_ms)
    }
}

/// What a host lacks of the state at one revision.
pub struct Lacking {
    state: Arc<State>,
    host: String,
    /// What it has been told, and the keys of which it has not; `None`: it is told everything.
    known: Option<(u64, Vec<Arc<Keys>>)>,
}

impl Lacking {
    /// The revision that the host has when it has been told this.
    pub fn revision(&self) -> u64 {
        self.state.revision
    }

    /// What the host is told, in parts; nothing if nothing of it concerns the host. This may take long, and needs no centre.
    pub fn updates(self) -> Vec<v1::Update> {
        let sight = Sight::new(&self.state, &self.host);
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

    /// Leaves out of the news of a host that has been told the state of `told` what need not be sent. The host's agent removes the peers of a
    /// group with the group, and a place with the last peer there. A place that has not changed since, and has no new peer, the host has already.
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
            // A vRNIC that has changed since may have been in another group before, which the host still has.
            Key::Peer(name) => {
                let same = self.state.vrnics.get(name).filter(|v| v.revision <= told);
                same.is_none_or(|v| !lost.contains(&v.group))
            }
            _ => true,
        });
        items
    }
}
