//! The control centre as a state machine.
//!
//! *Changes* ([`Centre::apply`] and the calls beside it) look at the state and give a [`Plan`] of what is to be kept; they change nothing.
//! Who calls them keeps the plan in a store, and then makes it so by [`Centre::commit`]. There is one plan at a time. A centre that does not
//! allocate commits what it reads in the store.
//!
//! *Hosts* are heard by [`Centre::hello`], [`Centre::ask`], [`Centre::applied`] and [`Centre::report`]. What one is told is asked for by
//! [`Centre::updates`], with the revision that it has been told: nothing waits in queues, so a host that does not read costs nothing.
//!
//! *Questions* are [`Centre::get`], [`Centre::changes_since`] and [`Centre::status`]. The time comes with each call, in milliseconds since 1970.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

use rand_chacha::ChaCha20Rng;
use rand_chacha::rand_core::SeedableRng;

use crate::draft::{Draft, Plan};
use crate::error::Refusal;
use crate::live::Live;
use crate::model::{Kind, MAX_APPLY};
use crate::records::{self, Record, Write};
use crate::state::{Name, State};
use crate::tokens::Actor;
use crate::v1::{self, item::Item, object::Object};
use crate::view::{Key, Touched};

/// What a call changes, if it changes anything, and its answer.
#[derive(Debug)]
pub struct Outcome<T> {
    /// What is to be kept.
    pub plan: Option<Plan>,
    /// The answer, once it is kept.
    pub answer: T,
}

/// Most keys that are remembered for a host. One that lacks more is told everything.
const MAX_LOG: usize = 2_048;
/// Room for so many keys stays when they are forgotten.
const MAX_IDLE_LOG: usize = 16;
/// Most changes that are remembered for those who watch.
const MAX_CHANGES: usize = 16_384;
/// Most items of one message.
const ITEMS: usize = 256;

/// The latest changes of what a host is told.
#[derive(Debug, Default)]
struct Log {
    entries: VecDeque<(u64, Key)>,
    /// Changes up to this one may be missing.
    floor: u64,
}

impl Log {
    /// Forgets changes up to this one.
    fn forget(&mut self, revision: u64) {
        while let Some((first, _)) = self.entries.front().filter(|(r, _)| *r <= revision) {
            self.floor = *first;
            self.entries.pop_front();
        }
        self.entries.shrink_to(MAX_IDLE_LOG);
    }
}

/// The control centre.
pub struct Centre {
    pub(crate) state: State,
    pub(crate) live: Live,
    rng: ChaCha20Rng,
    logs: HashMap<Name, Log>,
    /// The revision with which this centre began.
    pub(crate) begun: u64,
    pub(crate) changes: VecDeque<(u64, Arc<v1::Change>)>,
    /// Changes up to this one may be missing.
    pub(crate) changes_floor: u64,
}

impl Centre {
    /// A centre with what a store has: its records and how many changes made them.
    ///
    /// # Errors
    /// A record is damaged, or of another version.
    pub fn load(revision: u64, records: &[Write], seed: [u8; 32]) -> Result<Centre, Refusal> {
        let mut centre = Centre {
            state: State { revision, ..State::default() },
            live: Live::default(),
            rng: ChaCha20Rng::from_seed(seed),
            logs: HashMap::new(),
            begun: revision,
            changes: VecDeque::new(),
            changes_floor: revision,
        };
        let records = records.iter().map(records::read).collect::<Result<Vec<_>, _>>()?;
        centre.take(records)?;
        if centre.state.fleet.is_empty() {
            return Err(Refusal::invalid("the store has no number of its fleet; restore the store from a backup"));
        }
        Ok(centre)
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

    /// Puts records into the state: first what goes, from what depends to what it depends on, then what comes.
    fn take(&mut self, records: Vec<Record>) -> Result<(), Refusal> {
        let mut objects = Vec::new();
        for record in records {
            match record {
                Record::Object(kind, name, object) => objects.push((kind, name, *object)),
                Record::Meta(m) if m.format == records::FORMAT => self.state.fleet = m.fleet,
                Record::Meta(m) => {
                    let text = format!(
                        "the store has records of version {}, this program reads version {}",
                        m.format,
                        records::FORMAT
                    );
                    return Err(Refusal::invalid(text));
                }
                Record::Token(id, Some(token)) => drop(self.state.tokens.insert(id, token)),
                Record::Token(id, None) => drop(self.state.tokens.remove(&id)),
                Record::Secret(name, Some(secret)) => drop(self.state.secrets.insert(name, secret)),
                Record::Secret(name, None) => drop(self.state.secrets.remove(&name)),
                Record::Audit(_, Some(entry)) => {
                    if self.state.audit.back().is_none_or(|last| last.revision < entry.revision) {
                        self.state.audit.push_back(entry);
                    }
                }
                // The oldest ones go first.
                Record::Audit(revision, None) => {
                    while self.state.audit.front().is_some_and(|e| e.revision <= revision) {
                        self.state.audit.pop_front();
                    }
                }
            }
        }
        objects.sort_by_key(|o| std::cmp::Reverse(o.0));
        for (kind, name, object) in &objects {
            if object.is_none() || matches!(kind, Kind::Vrnic | Kind::Rule) {
                self.state.set(*kind, name, None)?;
            }
        }
        for (kind, name, object) in objects.into_iter().rev() {
            if object.is_some() {
                self.state.set(kind, &name, object)?;
            }
        }
        Ok(())
    }

    /// Makes so what is in the store: the writes of change `revision`. Says which hosts have news.
    ///
    /// # Errors
    /// A record is damaged. The centre must be loaded anew.
    pub fn commit(&mut self, revision: u64, writes: &[Write]) -> Result<Vec<Name>, Refusal> {
        let records = writes.iter().map(records::read).collect::<Result<Vec<_>, _>>()?;
        let objects: BTreeSet<(Kind, String)> = records
            .iter()
            .filter_map(|r| if let Record::Object(kind, name, _) = r { Some((*kind, name.clone())) } else { None })
            .collect();
        let secrets: BTreeSet<_> = records
            .iter()
            .filter_map(|r| if let Record::Secret(name, _) = r { Some(name.clone()) } else { None })
            .collect();
        let mut touched = Touched::new(MAX_LOG);
        let befores: Vec<_> = objects.iter().map(|(kind, name)| self.state.get(*kind, name)).collect();
        let see = |state: &State, touched: &mut Touched| {
            objects.iter().for_each(|(kind, name)| state.touch_object(*kind, name, touched));
            let vrnics = objects.iter().filter(|(kind, _)| *kind == Kind::Vrnic);
            state.touch_groups_of(vrnics.map(|(_, name)| name.as_str()), touched);
            secrets.iter().for_each(|(group, other, id)| state.touch_secret(group, other, *id, touched));
        };
        see(&self.state, &mut touched);
        self.take(records)?;
        self.state.revision = revision;
        see(&self.state, &mut touched);
        let deleted: Vec<String> = objects.iter().filter(|(k, _)| *k == Kind::Host).map(|(_, n)| n.clone()).collect();
        for ((kind, name), before) in objects.into_iter().zip(befores) {
            let message = |kept: Option<(Object, u64)>| {
                kept.map(|(object, revision)| v1::Object { object: Some(object), revision })
            };
            if kind == Kind::Vrnic && self.state.vrnics.get(name.as_str()).is_none_or(|v| v.host.is_none()) {
                self.live.forget_vrnic(&name);
            }
            let change = v1::Change { before: message(before), after: message(self.state.get(kind, &name)) };
            self.changes.push_back((revision, Arc::new(change)));
        }
        while self.changes.len() > MAX_CHANGES {
            self.changes_floor = self.changes.pop_front().map_or(revision, |(r, _)| r);
        }
        let deleted = deleted.into_iter().filter(|h| !self.state.hosts.contains_key(h.as_str()));
        deleted.for_each(|h| touched.add(&h));
        let touched = touched.into_hosts();
        let hosts: Vec<Name> = touched.keys().cloned().collect();
        for (host, keys) in touched {
            if !self.state.hosts.contains_key(&host) {
                self.logs.remove(&host);
                self.live.forget_host(&host);
                continue;
            }
            let log = self.logs.entry(host).or_insert_with(|| Log { entries: VecDeque::new(), floor: self.begun });
            if keys.len() > MAX_LOG {
                // It is told everything.
                *log = Log { entries: VecDeque::new(), floor: revision };
                continue;
            }
            log.entries.extend(keys.into_iter().map(|k| (revision, k)));
            while log.entries.len() > MAX_LOG {
                log.floor = log.entries.pop_front().map_or(revision, |(r, _)| r);
            }
        }
        Ok(hosts)
    }

    /// A host has put this revision in force: it will hardly ask for what came before.
    pub(crate) fn forget_told(&mut self, host: &str, revision: u64) {
        if let Some(log) = self.logs.get_mut(host) {
            log.forget(revision);
        }
    }

    /// Makes the state that of a store, whatever has changed meanwhile: `records` are all of it, in the order of their keys. Says which hosts have
    /// news.
    ///
    /// # Errors
    /// It is not a later state of the same fleet, or a record is damaged. The centre must be loaded anew.
    pub fn catch_up(&mut self, revision: u64, records: &[Write]) -> Result<Vec<Name>, Refusal> {
        let meta = records::meta(&self.state.fleet);
        if revision < self.state.revision || !records.iter().any(|r| r.key == records::META && r.value == meta.value) {
            return Err(Refusal::conflict(format_args!(
                "the store has revision {revision} and not a later state than revision {} of this fleet: it was replaced; start this centre anew",
                self.state.revision
            )));
        }
        let now: BTreeMap<String, Option<Vec<u8>>> =
            self.state.records().into_iter().map(|w| (w.key, w.value)).collect();
        let there: BTreeSet<&str> = records.iter().map(|r| r.key.as_str()).collect();
        let gone = now.keys().filter(|k| !there.contains(k.as_str()) && *k != records::META);
        let gone = gone.map(|k| Write { key: k.clone(), value: None });
        let other = records.iter().filter(|r| now.get(&r.key) != Some(&r.value)).cloned();
        let writes: Vec<Write> = gone.chain(other).collect();
        self.commit(revision, &writes)
    }

    /// True if a host that has been told the state of `told` has to be told everything.
    pub fn lacks_all(&self, host: &str, told: Option<u64>) -> bool {
        let floor = self.logs.get(host).map_or(self.begun, |l| l.floor);
        !told.is_some_and(|t| (floor..=self.state.revision).contains(&t))
    }

    /// What a host is told that has been told the state of `told`; everything, in parts, if it has been told nothing or too long ago. Nothing
    /// if nothing of it concerns the host.
    pub fn updates(&self, host: &str, told: Option<u64>) -> Vec<v1::Update> {
        let revision = self.state.revision;
        let log = self.logs.get(host);
        let known = told.filter(|_| !self.lacks_all(host, told));
        let items: Vec<(Key, Option<v1::Item>)> = match known {
            None => self.state.whole(host).into_iter().map(|(k, i)| (k, Some(i))).collect(),
            Some(told) => {
                let news = log.into_iter().flat_map(|l| l.entries.iter().rev()).take_while(|(r, _)| *r > told);
                let keys: BTreeSet<&Key> = news.map(|(_, k)| k).collect();
                if keys.is_empty() {
                    return Vec::new();
                }
                self.without_what_follows(
                    keys.into_iter().map(|k| (k.clone(), self.state.item(host, k))).collect(),
                    told,
                )
            }
        };
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
        parts[0].whole = known.is_none();
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

    /// Whether a change since a revision may concern a host.
    pub(crate) fn concerned_since(&self, host: &str, revision: u64) -> bool {
        let log = self.logs.get(host);
        revision < log.map_or(self.begun, |l| l.floor)
            || log.and_then(|l| l.entries.back()).is_some_and(|(r, _)| *r > revision)
    }

    fn busy(live: &Live, name: &str) -> u32 {
        live.vrnic(name).map_or(0, |s| s.programs)
    }

    /// Makes a change of what `make` does with the state as it is.
    fn change<T>(
        &mut self,
        actor: &Actor,
        now_ms: u64,
        make: impl FnOnce(&mut Draft<'_>, &mut ChaCha20Rng, &Live) -> Result<(T, Vec<String>), Refusal>,
    ) -> Result<Outcome<T>, Refusal> {
        let mut draft = Draft::new(&mut self.state);
        let (answer, lines) = make(&mut draft, &mut self.rng, &self.live)?;
        draft.reconcile_secrets(&mut self.rng, now_ms);
        Ok(Outcome { plan: draft.finish(actor.who(), now_ms, lines), answer })
    }

    fn declared(&self, outcome: Outcome<()>, dry_run: bool) -> Outcome<v1::ApplyResponse> {
        let changes = outcome.plan.as_ref().map(|p| p.changes.clone()).unwrap_or_default();
        let plan = outcome.plan.filter(|_| !dry_run);
        let revision = plan.as_ref().map_or(self.state.revision, |p| p.revision);
        Outcome { plan, answer: v1::ApplyResponse { revision, changes } }
    }

    /// Makes objects what they are declared to be.
    ///
    /// # Errors
    /// What cannot be: nothing of it is done.
    pub fn apply(
        &mut self,
        actor: &Actor,
        request: v1::ApplyRequest,
        now_ms: u64,
    ) -> Result<Outcome<v1::ApplyResponse>, Refusal> {
        if request.objects.len() > MAX_APPLY {
            return Err(Refusal::invalid(format_args!(
                "a call has at most {MAX_APPLY} objects, not {}",
                request.objects.len()
            )));
        }
        let (prune, dry_run) = (request.prune, request.dry_run);
        let asked = request
            .objects
            .into_iter()
            .enumerate()
            .map(|(n, o)| match o.object {
                Some(object) => Ok((object, o.revision)),
                None => Err(Refusal::invalid(format_args!("object {} is neither host, group, vRNIC nor rule", n + 1))),
            })
            .collect::<Result<Vec<_>, _>>()?;
        let done = self.change(actor, now_ms, |draft, _, live| {
            draft.declare(actor, asked, prune, &|v| Self::busy(live, v)).map(|()| ((), Vec::new()))
        })?;
        Ok(self.declared(done, dry_run))
    }

    /// Deletes objects.
    ///
    /// # Errors
    /// What cannot be: nothing of it is done.
    pub fn delete(
        &mut self,
        actor: &Actor,
        request: &v1::DeleteRequest,
        now_ms: u64,
    ) -> Result<Outcome<v1::ApplyResponse>, Refusal> {
        if request.names.len() > MAX_APPLY {
            return Err(Refusal::invalid(format_args!(
                "a call has at most {MAX_APPLY} names, not {}",
                request.names.len()
            )));
        }
        let done = self.change(actor, now_ms, |draft, _, live| {
            draft.delete(actor, &request.names, request.force, &|v| Self::busy(live, v)).map(|()| ((), Vec::new()))
        })?;
        Ok(self.declared(done, request.dry_run))
    }

    /// Moves a vRNIC to another host.
    ///
    /// # Errors
    /// Programs use it, or one of them does not exist.
    pub fn move_vrnic(
        &mut self,
        actor: &Actor,
        request: &v1::MoveRequest,
        now_ms: u64,
    ) -> Result<Outcome<v1::ApplyResponse>, Refusal> {
        let missing = || Refusal::not_found(format_args!("there is no vRNIC {}", request.vrnic.escape_debug()));
        if request.vrnic.len() > 64 || request.host.len() > 64 {
            return Err(Refusal::invalid("the name is too long"));
        }
        let v = self.state.vrnics.get(request.vrnic.as_str()).ok_or_else(missing)?;
        actor.may_group(&v.group).map_err(|e| if actor.is_tenant() { missing() } else { e })?;
        if request.host.is_empty() {
            return Err(Refusal::invalid("say to which host it moves"));
        }
        let object = v1::Vrnic { host: request.host.clone(), ..v.object.clone() };
        let done = self.change(actor, now_ms, |draft, _, live| {
            draft.declare(actor, vec![(object.into(), 0)], false, &|v| Self::busy(live, v)).map(|()| ((), Vec::new()))
        })?;
        Ok(self.declared(done, false))
    }

    /// Begins to introduce another secret of a group.
    ///
    /// # Errors
    /// It has none, or another one is being introduced.
    pub fn rotate(
        &mut self,
        actor: &Actor,
        group: &str,
        now_ms: u64,
    ) -> Result<Outcome<v1::RotateSecretResponse>, Refusal> {
        actor.needs_admin("secrets")?;
        crate::model::check_name("group", group)?;
        self.change(actor, now_ms, |draft, rng, _| {
            let id = draft.rotate(group, rng, now_ms)?;
            Ok((v1::RotateSecretResponse { id }, vec![format!("introduces secret {id} of group {group}")]))
        })
    }

    /// What is due by itself: the next steps of secrets.
    pub fn tick(&mut self, now_ms: u64) -> Option<Plan> {
        if !self.state.has_steps() {
            return None;
        }
        let actor = Actor::centre();
        let done =
            self.change(&actor, now_ms, |draft, _, live| Ok(((), draft.make_steps(&|h| live.applied(h), now_ms))));
        done.ok()?.plan
    }

    /// Makes a token of 32 random bytes.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn create_token(
        &mut self,
        actor: &Actor,
        token: v1::Token,
        random: [u8; 32],
        now_ms: u64,
    ) -> Result<Outcome<v1::CreateTokenResponse>, Refusal> {
        actor.needs_admin("tokens")?;
        self.change(actor, now_ms, |draft, _, _| {
            let made = draft.create_token(token, random, now_ms)?;
            let line =
                made.token.as_ref().map(|t| format!("made token {} with the role {}", t.id, t.role().as_str_name()));
            Ok((made, line.into_iter().collect()))
        })
    }

    /// Takes a token away.
    ///
    /// # Errors
    /// There is none with this name.
    pub fn revoke_token(
        &mut self,
        actor: &Actor,
        id: &str,
        now_ms: u64,
    ) -> Result<Outcome<v1::RevokeTokenResponse>, Refusal> {
        actor.needs_admin("tokens")?;
        let plan = Draft::new(&mut self.state).revoke_token(actor, id, now_ms)?;
        Ok(Outcome { plan, answer: v1::RevokeTokenResponse {} })
    }

    /// Lets a host join by a token.
    ///
    /// # Errors
    /// The token is not for it, or a host has the name.
    pub fn join(&mut self, secret: &str, host: &str, now_ms: u64) -> Result<Outcome<()>, Refusal> {
        let token = self.state.join_token(secret, host, now_ms)?.clone();
        let exists = self.state.hosts.contains_key(host);
        if exists && token.host.is_empty() {
            return Err(Refusal::conflict(format_args!(
                "there is a host {host} already; choose another name, or let it join anew with `unirdma token create --role join --host {host}`"
            )));
        }
        if self.live.is_connected(host, now_ms) {
            return Err(Refusal::conflict(format_args!(
                "host {host} is connected: a host name is for one host; choose another one"
            )));
        }
        let actor = Actor::of_host(host);
        self.change(&actor, now_ms, |draft, _, _| {
            if !exists {
                let asked = vec![(v1::Host { name: host.into(), ..v1::Host::default() }.into(), 0)];
                draft.declare(&Actor::centre(), asked, false, &|_| 0)?;
            }
            draft.set_token(&token.id, None);
            Ok(((), vec![format!("host {host} joined by token {}", token.id)]))
        })
    }

    /// Who calls with a token.
    ///
    /// # Errors
    /// Nobody does.
    pub fn actor(&self, secret: &str, now_ms: u64) -> Result<Actor, Refusal> {
        self.state.actor(secret, now_ms)
    }
}
