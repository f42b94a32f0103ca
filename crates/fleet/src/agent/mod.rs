//! A host's half of the protocol with the centre (`Hosts.Attach`): the state in force, the work left to do on the host,
//! and the times to connect, to send and to close a connection.
//!
//! It has no socket, file, clock or thread. The caller passes times in milliseconds, connects when
//! [`Agent::poll_connect`] says so, and calls
//!
//! * on events: [`Agent::connected`], [`Agent::handle`], [`Agent::disconnected`], [`Agent::carried`] and
//!   [`Agent::ask`];
//! * after each event, and when [`Agent::poll_timeout`] has come, the `poll_` methods: messages to send
//!   ([`Agent::poll_message`]), a reason to close the connection ([`Agent::poll_close`]), records to keep on disk
//!   ([`Agent::poll_record`]), work on the host ([`Agent::poll_work`]), and answers to requests
//!   ([`Agent::poll_answer`]).
//!
//! The centre's messages describe a table of pieces, each with a key. An update changes some of them, and is put in
//! force completely or not at all. The work on the host follows from the table alone: each changed piece is applied,
//! and retried until that succeeds.

mod desired;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

pub use desired::{ItemError, Key, addresses, guid, key_of, mac, network};

use crate::v1::{self, from_host, item::Item, to_host};

/// Version of the messages.
const PROTOCOL: u32 = 1;
/// A centre that has been silent for this time is gone. It sends something every 2 s.
const SILENCE_MS: u64 = 10_000;
/// First and longest pause before another connection.
const FIRST_PAUSE_MS: u64 = 200;
const LAST_PAUSE_MS: u64 = 15_000;
/// A connection that lasted this long was good: the pause after it is the first one.
const STEADY_MS: u64 = 10_000;
/// Pause before failed work is tried again.
const RETRY_MS: u64 = 3_000;
/// How long a question that a lost connection left unanswered is asked again on new connections.
const ASK_MS: u64 = 20_000;
/// Most pieces of one update.
const MAX_PIECES: usize = 4_000_000;
/// Most problems that are reported.
const MAX_PROBLEMS: usize = 100;

/// A host's description of itself.
#[derive(Clone, Debug, Default)]
pub struct Config {
    /// Version of its program.
    pub version: String,
    /// Addresses at which other hosts reach it.
    pub addresses: Vec<String>,
    /// A different number after each start of the program.
    pub instance: u64,
}

/// A piece of work: a piece to apply on the host, or to remove from it.
#[derive(Clone, Debug, PartialEq)]
pub struct Work {
    /// Its key.
    pub key: Key,
    /// The piece; `None`: it must be removed.
    pub item: Option<Item>,
    /// Remove the vRNIC even if programs use it.
    pub force: bool,
}

/// The state of the connection and of the update, for people.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// It is connected.
    pub connected: bool,
    /// For how long it has been connected, or not connected.
    pub for_ms: u64,
    /// Why it is not connected.
    pub why: String,
    /// The revision in force. It counts changes of `fleet`.
    pub revision: u64,
    /// The number of the centre's state.
    pub fleet: String,
    /// Failed work, and other problems; a line each.
    pub problems: Vec<String>,
}

/// The connection to the centre.
enum Link {
    Away { since: u64, retry_at: u64, why: String },
    Connecting { since: u64, why: String },
    Connected { since: u64, heard: u64 },
}

/// Received parts of an incomplete update.
struct Coming {
    fleet: String,
    revision: u64,
    whole: bool,
    put: BTreeMap<Key, Item>,
    /// Removed pieces, with `force`.
    gone: BTreeMap<Key, bool>,
}

/// A change that was asked for.
struct Asked {
    change: v1::ask::Change,
    /// The question is answered with an error if it is still unanswered then.
    until: u64,
    /// It was asked on an earlier connection, too, so it may have been done already.
    again: bool,
}

struct Failed {
    problem: String,
    retry_at: u64,
    force: bool,
}

/// See the [module](self).
pub struct Agent {
    config: Config,
    fleet: String,
    revision: u64,
    items: BTreeMap<Key, Item>,
    /// Number of peers on each other host.
    peers_on: BTreeMap<String, u32>,
    /// vRNICs made by the centre of another store and unknown to the present one.
    orphans: BTreeSet<String>,
    /// vRNICs of the host that the centre does not know.
    own: Vec<v1::Vrnic>,
    link: Link,
    /// Number of failed connections in a row.
    attempts: u32,
    random: u64,
    coming: Option<Coming>,
    /// Pieces to be applied or removed, with `force`.
    due: BTreeMap<Key, bool>,
    failed: BTreeMap<Key, Failed>,
    /// Work was handed out, and its result has not been reported yet.
    working: bool,
    /// Why an update was refused. If set, the next connection asks for everything.
    refused: Option<String>,
    close: Option<String>,
    out: VecDeque<v1::FromHost>,
    records: VecDeque<v1::Update>,
    /// Questions that the centre has not answered yet.
    asked: BTreeMap<u64, Asked>,
    next_ask: u64,
    /// Answers whose work on the host may not be done yet.
    answered: VecDeque<(u64, Answer)>,
    reported: BTreeMap<String, v1::VrnicState>,
    /// Revision and problems that the centre was told last.
    applied: Option<(u64, Vec<String>)>,
}

/// The answer to [`Agent::ask`].
pub type Answer = Result<Option<v1::Vrnic>, AskError>;

/// Why a change that was asked for is not made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum AskError {
    #[error(
        "the control centre has been away for {seconds} s ({why}); vRNICs of a fleet can be changed when it is back"
    )]
    Away { seconds: u64, why: String },
    #[error(
        "the connection to the control centre was lost before it answered; `unirdma vrnic ls` shows whether it was done"
    )]
    Lost,
    /// The refusal of the centre or of the host, a text.
    #[error("{0}")]
    Refused(String),
}

/// Why an update of the centre is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum UpdateError {
    #[error("it does not say which fleet's it is")]
    NoFleet,
    #[error("a part of revision {revision} came among those of revision {coming}")]
    PartOfAnother { revision: u64, coming: u64 },
    #[error("it changes the state {fleet}, and this host has that of {own:?}")]
    AnotherFleet { fleet: String, own: String },
    #[error("revision {revision} came after revision {own}")]
    Late { revision: u64, own: u64 },
    #[error("a piece is empty")]
    EmptyItem,
    #[error("a key is empty")]
    EmptyKey,
    #[error("it has more than {} pieces", MAX_PIECES)]
    TooLong,
    /// A vRNIC or peer (`what`) is in a group that the host does not know.
    #[error("{what} {name} is of group {group}, of which nothing is said")]
    UnknownGroup { what: &'static str, name: String, group: String },
    #[error(transparent)]
    Item(#[from] ItemError),
}

impl Agent {
    /// An agent that continues from the kept records of [`Agent::poll_record`], in their order, from a whole one on.
    /// Every piece in them is applied again. `seed` makes its pauses differ from other hosts' pauses.
    ///
    /// # Errors
    /// A record is wrong.
    pub fn new(config: Config, kept: impl IntoIterator<Item = v1::Update>, seed: u64) -> Result<Agent, UpdateError> {
        let mut agent = Agent {
            config,
            fleet: String::new(),
            revision: 0,
            items: BTreeMap::new(),
            peers_on: BTreeMap::new(),
            orphans: BTreeSet::new(),
            own: Vec::new(),
            link: Link::Away { since: 0, retry_at: 0, why: "it was not asked yet".into() },
            attempts: 0,
            random: seed | 1,
            coming: None,
            due: BTreeMap::new(),
            failed: BTreeMap::new(),
            working: false,
            refused: None,
            close: None,
            out: VecDeque::new(),
            records: VecDeque::new(),
            asked: BTreeMap::new(),
            next_ask: 1,
            answered: VecDeque::new(),
            reported: BTreeMap::new(),
            applied: None,
        };
        for record in kept {
            agent.take_update(record)?;
        }
        // These records are on disk already. Removed pieces need no work.
        agent.records.clear();
        agent.due.retain(|k, _| agent.items.contains_key(k));
        Ok(agent)
    }

    /// Sets the vRNICs that the host's administrator has made without the centre. They are announced on the next
    /// connection.
    pub fn set_own(&mut self, own: Vec<v1::Vrnic>) {
        self.own = own;
    }

    // --- the connection ---

    /// True if it is time to connect. The result is reported by [`Agent::connected`] or [`Agent::disconnected`].
    pub fn poll_connect(&mut self, now: u64) -> bool {
        let Link::Away { since, retry_at, why } = &mut self.link else { return false };
        if now < *retry_at {
            return false;
        }
        self.link = Link::Connecting { since: *since, why: std::mem::take(why) };
        true
    }

    /// A connection was made. `clock_ms` is the host's clock, milliseconds since 1970.
    pub fn connected(&mut self, now: u64, clock_ms: u64) {
        self.link = Link::Connected { since: now, heard: now };
        self.close = None;
        self.coming = None;
        self.applied = None;
        self.reported.clear();
        self.out.clear();
        let mut vrnics: Vec<v1::Vrnic> = self.vrnics().filter(|v| v.by_host).cloned().collect();
        vrnics.extend(self.own.iter().filter(|o| !self.items.contains_key(&Key::Vrnic(o.name.clone()))).cloned());
        let revision = if self.refused.is_some() { 0 } else { self.revision };
        self.send(from_host::Message::Hello(v1::Hello {
            protocol: PROTOCOL,
            version: self.config.version.clone(),
            addresses: self.config.addresses.clone(),
            instance: self.config.instance,
            revision,
            fleet: self.fleet.clone(),
            vrnics,
            clock_ms,
        }));
        // The centre that was asked may have died before or after it made the change. Repeating a change that is made
        // already does no harm.
        self.give_up_asking(now);
        let again: Vec<_> = self.asked.iter().map(|(id, a)| (*id, a.change.clone())).collect();
        for (id, change) in again {
            self.send(from_host::Message::Ask(v1::Ask { id, change: Some(change) }));
        }
        self.tell_applied();
    }

    /// Answers questions that are too old with an error.
    fn give_up_asking(&mut self, now: u64) {
        let late: Vec<u64> = self.asked.iter().filter(|(_, a)| a.until <= now).map(|(id, _)| *id).collect();
        for id in late {
            self.asked.remove(&id);
            self.answered.push_back((id, Err(AskError::Lost)));
        }
    }

    /// The connection has ended, or could not be made.
    pub fn disconnected(&mut self, now: u64, why: String) {
        let since = match &self.link {
            Link::Connected { since, .. } => {
                if now - since >= STEADY_MS {
                    self.attempts = 0;
                }
                now
            }
            Link::Away { since, .. } | Link::Connecting { since, .. } => *since,
        };
        let pause = (FIRST_PAUSE_MS << self.attempts.min(10)).min(LAST_PAUSE_MS);
        self.attempts += 1;
        // The pause is randomized between half and one and a half of it, so that a thousand hosts do not connect at
        // once.
        let retry_at = now + pause / 2 + self.draw() % pause;
        self.link = Link::Away { since, retry_at, why };
        (self.close, self.coming) = (None, None);
        self.out.clear();
        self.asked.values_mut().for_each(|a| a.again = true);
        self.give_up_asking(now);
    }

    fn draw(&mut self) -> u64 {
        // xorshift64 is good enough for pauses.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }

    /// The reason to close the connection; `None`: keep it.
    pub fn poll_close(&mut self, now: u64) -> Option<String> {
        if let Link::Connected { heard, .. } = self.link
            && now >= heard + SILENCE_MS
        {
            return Some(format!("it has said nothing for {} s", SILENCE_MS / 1000));
        }
        self.close.take()
    }

    /// When the `poll_` methods must be called again at the latest.
    pub fn poll_timeout(&self) -> Option<u64> {
        let link = match &self.link {
            Link::Away { retry_at, .. } => Some(*retry_at),
            Link::Connecting { .. } => None,
            Link::Connected { heard, .. } => Some(heard + SILENCE_MS),
        };
        let retry = self.failed.values().map(|f| f.retry_at).min().filter(|_| !self.working);
        [link, retry].into_iter().flatten().min()
    }

    /// The next message to the centre.
    pub fn poll_message(&mut self) -> Option<v1::FromHost> {
        self.out.pop_front()
    }

    fn send(&mut self, message: from_host::Message) {
        self.out.push_back(v1::FromHost { message: Some(message) });
    }

    /// Handles a message of the centre.
    pub fn handle(&mut self, now: u64, message: v1::ToHost) {
        let Link::Connected { heard, .. } = &mut self.link else { return };
        *heard = now;
        match message.message {
            Some(to_host::Message::Update(update)) => {
                if let Err(e) = self.take_update(update) {
                    let problem = format!("an update of the control centre is refused: {e}");
                    self.close = Some(problem.clone());
                    self.coming = None;
                    self.refused = Some(problem);
                }
            }
            Some(to_host::Message::Reply(reply)) => {
                if let Some(asked) = self.asked.remove(&reply.id) {
                    // A repeated removal may be refused because it was made the first time.
                    let gone = matches!(&asked.change, v1::ask::Change::Remove(v) if asked.again && !self.items.contains_key(&Key::Vrnic(v.clone())));
                    let is_done = reply.error.is_empty() || gone;
                    let answer = if is_done { Ok(reply.vrnic) } else { Err(AskError::Refused(reply.error)) };
                    self.answered.push_back((reply.id, answer));
                }
            }
            Some(to_host::Message::Refused(why)) => {
                self.close = Some(format!("it refuses this host: {why}"));
                // The refusal will probably last, so the pause before the next connection is long.
                self.attempts = self.attempts.max(6);
            }
            Some(to_host::Message::Alive(alive)) => self.holds_for(alive.revision),
            None => {}
        }
        self.tell_applied();
    }

    /// The state in force holds for this revision, too, so the next hello has this revision. The centre knows that
    /// already, and is not told.
    fn holds_for(&mut self, revision: u64) {
        if revision <= self.revision || self.revision == 0 || self.coming.is_some() || self.refused.is_some() {
            return;
        }
        if let Some((applied, _)) = self.applied.as_mut().filter(|(applied, _)| *applied == self.revision) {
            *applied = revision;
        }
        self.revision = revision;
    }

    // --- the table ---

    /// Takes a part of an update, and puts the update in force if it is the last part.
    fn take_update(&mut self, update: v1::Update) -> Result<(), UpdateError> {
        let v1::Update { fleet, revision, whole, more, put, gone } = update;
        if fleet.is_empty() {
            return Err(UpdateError::NoFleet);
        }
        let coming = match self.coming.take() {
            // A whole update replaces the parts received before.
            Some(_) | None if whole => Coming { fleet, revision, whole, put: BTreeMap::new(), gone: BTreeMap::new() },
            Some(c) if c.fleet == fleet && c.revision == revision => c,
            Some(c) => {
                return Err(UpdateError::PartOfAnother { revision, coming: c.revision });
            }
            None if fleet != self.fleet => {
                return Err(UpdateError::AnotherFleet { fleet, own: self.fleet.clone() });
            }
            None if revision < self.revision => {
                return Err(UpdateError::Late { revision, own: self.revision });
            }
            None => Coming { fleet, revision, whole, put: BTreeMap::new(), gone: BTreeMap::new() },
        };
        let mut coming = coming;
        for item in put {
            let item = item.item.ok_or(UpdateError::EmptyItem)?;
            let key = key_of(&item)?;
            coming.gone.remove(&key);
            coming.put.insert(key, item);
        }
        for key in gone {
            let force = key.force;
            let key = Key::of(key).ok_or(UpdateError::EmptyKey)?;
            coming.put.remove(&key);
            coming.gone.insert(key, force);
        }
        if coming.put.len() + coming.gone.len() > MAX_PIECES {
            return Err(UpdateError::TooLong);
        }
        if more {
            self.coming = Some(coming);
            return Ok(());
        }
        self.check(&coming)?;
        self.put_in_force(coming);
        Ok(())
    }

    /// Refuses an update that contradicts itself.
    fn check(&self, c: &Coming) -> Result<(), UpdateError> {
        let group_is_there = |name: &str| {
            let key = Key::Group(name.into());
            c.put.contains_key(&key) || !c.whole && self.items.contains_key(&key) && !c.gone.contains_key(&key)
        };
        for item in c.put.values() {
            let (what, name, group) = match item {
                Item::Vrnic(v) => ("vRNIC", &v.name, &v.group),
                Item::Peer(p) => ("peer", &p.name, &p.group),
                _ => continue,
            };
            if !group_is_there(group) {
                return Err(UpdateError::UnknownGroup { what, name: name.clone(), group: group.clone() });
            }
        }
        Ok(())
    }

    fn put_in_force(&mut self, c: Coming) {
        let Coming { fleet, revision, whole, put, mut gone } = c;
        let anew = !self.fleet.is_empty() && fleet != self.fleet;
        if whole {
            gone = self.items.keys().filter(|k| !put.contains_key(k)).map(|k| (k.clone(), false)).collect();
        }
        let keep = |m: &BTreeMap<Key, Item>| m.values().map(|i| v1::Item { item: Some(i.clone()) }).collect();
        let record = v1::Update {
            fleet: fleet.clone(),
            revision,
            whole,
            more: false,
            put: keep(&put),
            gone: if whole { Vec::new() } else { gone.iter().map(|(k, force)| k.message(*force)).collect() },
        };
        let changes = whole || !record.put.is_empty() || !record.gone.is_empty();
        // The centre does not list the peers that are removed together with their group.
        if gone.keys().any(|k| matches!(k, Key::Group(_))) {
            let is_lost =
                |item: &Item| matches!(item, Item::Peer(p) if gone.contains_key(&Key::Group(p.group.clone())));
            let peers = self.items.range(Key::Peer(String::new())..).filter(|(_, i)| is_lost(i));
            let peers: Vec<Key> = peers.map(|(k, _)| k.clone()).filter(|k| !put.contains_key(k)).collect();
            gone.extend(peers.into_iter().map(|k| (k, false)));
        }
        // Hosts that may have lost their last peer.
        let mut left = BTreeSet::new();
        for (key, force) in gone {
            let Some(item) = self.items.remove(&key) else { continue };
            left.extend(self.one_peer_less(&item));
            self.failed.remove(&key);
            match &key {
                // The centre's store was made anew. Nobody has asked to remove the vRNIC, so it stays.
                Key::Vrnic(name) if anew => _ = self.orphans.insert(name.clone()),
                _ => _ = self.due.insert(key, force),
            }
        }
        for (key, item) in put {
            if let Key::Vrnic(name) = &key {
                self.orphans.remove(name);
            }
            if self.items.get(&key) != Some(&item) {
                self.failed.remove(&key);
                self.due.insert(key.clone(), false);
                if let Item::Peer(p) = &item {
                    *self.peers_on.entry(p.host.clone()).or_default() += 1;
                }
                let was = self.items.insert(key, item);
                left.extend(was.and_then(|was| self.one_peer_less(&was)));
            }
        }
        // Nor does the centre list the place that is removed with its last peer.
        for host in left.into_iter().filter(|h| !self.peers_on.contains_key(h)) {
            let key = Key::Place(host);
            if self.items.remove(&key).is_some() {
                self.failed.remove(&key);
                self.due.insert(key, false);
            }
        }
        (self.fleet, self.revision, self.refused) = (fleet, revision, None);
        if changes {
            self.records.push_back(record);
        }
    }

    /// Uncounts a removed peer, if the piece is a peer. Returns its host if that has no other peer.
    fn one_peer_less(&mut self, item: &Item) -> Option<String> {
        let Item::Peer(p) = item else { return None };
        let n = self.peers_on.get_mut(&p.host)?;
        *n -= 1;
        if *n > 0 {
            return None;
        }
        self.peers_on.remove_entry(&p.host).map(|(host, _)| host)
    }

    /// The next record to keep on disk. A whole record replaces all records before it.
    pub fn poll_record(&mut self) -> Option<v1::Update> {
        self.records.pop_front()
    }

    /// The table as one whole record.
    pub fn snapshot(&self) -> v1::Update {
        v1::Update {
            fleet: self.fleet.clone(),
            revision: self.revision,
            whole: true,
            more: false,
            put: self.items.values().map(|i| v1::Item { item: Some(i.clone()) }).collect(),
            gone: Vec::new(),
        }
    }

    /// A piece by its key.
    pub fn item(&self, key: &Key) -> Option<&Item> {
        self.items.get(key)
    }

    /// The vRNICs in the table.
    pub fn vrnics(&self) -> impl Iterator<Item = &v1::Vrnic> {
        let from = Key::Vrnic(String::new());
        self.items.range(from..).map_while(|(_, i)| if let Item::Vrnic(v) = i { Some(v) } else { None })
    }

    // --- what is to be done on the host ---

    /// All work to do now, in this order. More work is handed out only after [`Agent::carried`].
    pub fn poll_work(&mut self, now: u64) -> Vec<Work> {
        if self.working {
            return Vec::new();
        }
        let again: Vec<Key> = self.failed.iter().filter(|(_, f)| f.retry_at <= now).map(|(k, _)| k.clone()).collect();
        for key in again {
            if let Some(f) = self.failed.get(&key) {
                self.due.entry(key).or_insert(f.force);
            }
        }
        let due = std::mem::take(&mut self.due);
        let mut work: Vec<Work> =
            due.into_iter().map(|(key, force)| Work { item: self.items.get(&key).cloned(), key, force }).collect();
        // vRNICs are removed first, to make room for new ones. Pieces are applied in the order of their dependencies,
        // and removed in the reverse order.
        work.sort_by_key(|w| match (&w.key, &w.item) {
            (Key::Vrnic(_), None) => 0,
            (_, Some(_)) => 1,
            (_, None) => 2,
        });
        let first_gone = work.partition_point(|w| w.item.is_some() || matches!(w.key, Key::Vrnic(_)));
        work[first_gone..].reverse();
        self.working = !work.is_empty();
        work
    }

    /// Reports the result of work: the keys that failed, with the reasons.
    pub fn carried(&mut self, now: u64, work: Vec<Work>, failed: BTreeMap<Key, String>) {
        self.working = false;
        for w in work {
            match failed.get(&w.key) {
                None => _ = self.failed.remove(&w.key),
                Some(problem) => {
                    let f = Failed { problem: problem.clone(), retry_at: now + RETRY_MS, force: w.force };
                    self.failed.insert(w.key, f);
                }
            }
        }
        self.tell_applied();
    }

    fn problems(&self) -> Vec<String> {
        let orphan = |name: &String| {
            format!(
                "vRNIC {name} is of a control centre whose store is gone: declare it there again, or remove it with `unirdma vrnic rm {name}`"
            )
        };
        let all = self.refused.iter().cloned().chain(self.failed.values().map(|f| f.problem.clone()));
        all.chain(self.orphans.iter().map(orphan)).take(MAX_PROBLEMS).collect()
    }

    /// Reports the revision in force and the problems, if no work is left and they differ from the last report.
    fn tell_applied(&mut self) {
        let idle = !self.working && self.due.is_empty() && self.revision > 0;
        if !idle || !matches!(self.link, Link::Connected { .. }) {
            return;
        }
        let now = (self.revision, self.problems());
        if self.applied.as_ref() != Some(&now) {
            let (revision, problems) = now.clone();
            self.send(from_host::Message::Applied(v1::Applied { revision, problems }));
            self.applied = Some(now);
        }
    }

    /// The host's administrator has removed a vRNIC of a lost centre.
    pub fn forget_orphan(&mut self, name: &str) {
        self.orphans.remove(name);
        self.tell_applied();
    }

    // --- what the host asks ---

    /// Asks the centre for a change. Returns the number of its answer.
    ///
    /// # Errors
    /// There is no connection.
    pub fn ask(&mut self, now: u64, change: v1::ask::Change) -> Result<u64, AskError> {
        let Link::Connected { .. } = self.link else {
            let s = self.status(now);
            return Err(AskError::Away { seconds: s.for_ms / 1000, why: s.why });
        };
        let id = self.next_ask;
        self.next_ask += 1;
        self.asked.insert(id, Asked { change: change.clone(), until: now + ASK_MS, again: false });
        self.send(from_host::Message::Ask(v1::Ask { id, change: Some(change) }));
        Ok(id)
    }

    /// The next answer: a refusal, or a change whose work on the host is done.
    pub fn poll_answer(&mut self) -> Option<(u64, Answer)> {
        let (_, answer) = self.answered.front()?;
        if answer.is_ok() && (self.working || !self.due.is_empty()) {
            return None;
        }
        let (id, answer) = self.answered.pop_front()?;
        let failed = |v: &v1::Vrnic| self.failed.get(&Key::Vrnic(v.name.clone())).map(|f| f.problem.clone());
        let problem = answer.as_ref().ok().and_then(Option::as_ref).and_then(failed);
        Some((id, problem.map_or(answer, |p| Err(AskError::Refused(p)))))
    }

    /// Reports the state of the vRNICs and of the pool of VFs. Of the vRNICs, only changed ones are sent.
    pub fn report(&mut self, states: Vec<v1::VrnicState>, pools: Vec<v1::Pool>, clock_ms: u64) {
        if !matches!(self.link, Link::Connected { .. }) {
            return;
        }
        let now: BTreeMap<String, v1::VrnicState> = states.into_iter().map(|s| (s.name.clone(), s)).collect();
        let gone = self.reported.keys().filter(|n| !now.contains_key(*n));
        let mut vrnics: Vec<v1::VrnicState> =
            gone.map(|n| v1::VrnicState { name: n.clone(), ..v1::VrnicState::default() }).collect();
        vrnics.extend(now.values().filter(|s| self.reported.get(&s.name) != Some(*s)).cloned());
        self.reported = now;
        self.send(from_host::Message::Report(v1::Report { vrnics, clock_ms, pools }));
    }

    /// The state of the connection and of the update.
    pub fn status(&self, now: u64) -> Status {
        let (connected, since, why) = match &self.link {
            Link::Connected { since, .. } => (true, *since, ""),
            Link::Away { since, why, .. } | Link::Connecting { since, why } => (false, *since, &**why),
        };
        Status {
            connected,
            for_ms: now.saturating_sub(since),
            why: why.into(),
            revision: self.revision,
            fleet: self.fleet.clone(),
            problems: self.problems(),
        }
    }
}

#[cfg(test)]
mod tests;
