//! Preparation of changes. A [`Planner`] has its own copy of the state, so its work delays nobody who reads the
//! [`Centre`](crate::Centre) or reports to it.
//!
//! Calls ([`Planner::apply`] and the like) examine the state and return a [`Plan`] of what to keep; they change
//! nothing. The caller keeps the plan in a store, and then applies it by [`Planner::commit`] and
//! [`Centre::publish`](crate::Centre::publish). There is one plan at a time. A centre that does not allocate commits
//! the changes that it reads from the store.
//!
//! There are two copies of the state. A change is made in the planner's copy, which is then exchanged with the copy
//! that is read. Once nobody reads the other copy any more ([`Planner::is_ready`]), the change is made in it, too.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use rand_chacha::ChaCha20Rng;

use crate::error::Refusal;
use crate::host_view::{Keys, Look, Touched};
use crate::model::{Kind, MAX_APPLY};
use crate::net::Net;
use crate::queries::Seen;
use crate::records::{self, Record, Write};
use crate::state::{Name, State};
use crate::tokens::Actor;
use crate::transaction::{Plan, Transaction};
use crate::v1::{self, object::Object};

/// Result of a call: the plan of its change, and its answer.
#[derive(Debug)]
pub struct Outcome<T> {
    /// The change to keep; `None`: nothing changes.
    pub plan: Option<Plan>,
    /// The answer, valid once the plan is kept.
    pub answer: T,
}

/// Observations of hosts that decide whether a change is allowed.
pub trait Facts {
    /// Number of programs that use a vRNIC.
    fn programs(&self, vrnic: &str) -> u32;
    /// The last revision that a host has reported to be in force.
    fn applied(&self, host: &str) -> u64;
    /// Whether a host is connected.
    fn is_connected(&self, host: &str, now_ms: u64) -> bool;
}

/// Most keys that are remembered for a host. A host that lacks more is sent everything.
pub(crate) const MAX_LOG: usize = 2_048;

/// The addresses that were given last, by group and range.
pub(crate) type Given = HashMap<String, BTreeMap<Net, IpAddr>>;

/// A change that was made at the planner, for the centre that publishes it.
pub struct News {
    pub(crate) revision: u64,
    pub(crate) changes: Vec<Arc<Seen>>,
    /// Hosts that the change concerns, with the keys that it may concern.
    pub(crate) hosts: BTreeMap<Name, Vec<Arc<Keys>>>,
    /// vRNICs that are not on any host now.
    pub(crate) homeless: Vec<String>,
    /// The change's records, for the other copy.
    pub(crate) records: Vec<Record>,
}

/// Prepares changes, in its own copy of the state.
pub struct Planner {
    pub(crate) state: State,
    /// The copy that was read before the last change, and the change that must still be made in it. Until then `state`
    /// is empty.
    pub(crate) behind: Option<(Arc<State>, u64, Vec<Record>)>,
    pub(crate) rng: ChaCha20Rng,
    pub(crate) given: Given,
}

impl Planner {
    /// Whether a call can be made; to be asked before each call. It cannot while somebody reads the state from before
    /// the last change, which lasts as long as the encoding of a host's updates.
    pub fn is_ready(&mut self) -> bool {
        let Some((old, revision, records)) = self.behind.take() else { return true };
        match Arc::try_unwrap(old) {
            Ok(mut state) => {
                state.take(records).expect("what was possible in one copy is possible in the other one");
                state.revision = revision;
                self.state = state;
                true
            }
            Err(old) => {
                self.behind = Some((old, revision, records));
                false
            }
        }
    }

    fn draft<'a>(&'a mut self, facts: &'a dyn Facts) -> (Transaction<'a>, &'a mut ChaCha20Rng) {
        assert!(self.is_ready(), "a planner is asked whether it is ready");
        (Transaction::new(&mut self.state, &mut self.given, facts), &mut self.rng)
    }

    /// Applies the writes of change `revision`, which are in the store. The result is for
    /// [`Centre::publish`](crate::Centre::publish).
    ///
    /// # Errors
    /// A record is damaged. The centre must be loaded again.
    pub fn commit(&mut self, revision: u64, writes: &[Write]) -> Result<News, Refusal> {
        assert!(self.is_ready(), "a planner is asked whether it is ready");
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
        let see = |state: &State, touched: &mut Touched| {
            let mut look = Look::new(state, touched);
            objects.iter().for_each(|(kind, name)| look.object(*kind, name));
            let vrnics = objects.iter().filter(|(kind, _)| *kind == Kind::Vrnic);
            look.scopes(vrnics.map(|(_, name)| name.as_str()));
            secrets.iter().for_each(|(group, other, id)| look.secret(group, other, *id));
        };
        let was = |state: &State| -> Vec<_> { objects.iter().map(|(kind, name)| state.seen(*kind, name)).collect() };
        see(&self.state, &mut touched);
        let befores = was(&self.state);
        self.state.take(records.clone())?;
        self.state.revision = revision;
        see(&self.state, &mut touched);
        let afters = was(&self.state);
        let mut homeless = Vec::new();
        for (kind, name) in &objects {
            match kind {
                Kind::Vrnic if self.state.vrnics.get(name.as_str()).is_none_or(|v| v.host.is_none()) => {
                    homeless.push(name.clone());
                }
                Kind::Host if !self.state.hosts.contains_key(name.as_str()) => touched.add(name),
                Kind::Group if !self.state.groups.contains_key(name.as_str()) => drop(self.given.remove(name)),
                _ => {}
            }
        }
        let kinds = objects.iter().map(|(kind, _)| *kind);
        let changes = kinds.zip(befores.into_iter().zip(afters)).map(|(k, (b, a))| Arc::new(Seen::new(k, b, a)));
        Ok(News { revision, changes: changes.collect(), hosts: touched.into_hosts(), homeless, records })
    }

    /// Changes the state to a later one in the store. `records` are all its records, in the order of their keys.
    ///
    /// # Errors
    /// It is not a later state of the same fleet, or a record is damaged. The centre must be loaded again.
    pub fn catch_up(&mut self, revision: u64, records: &[Write]) -> Result<News, Refusal> {
        assert!(self.is_ready(), "a planner is asked whether it is ready");
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

    /// Prepares a change by `make`.
    fn change<T>(
        &mut self,
        actor: &Actor,
        facts: &dyn Facts,
        now_ms: u64,
        make: impl FnOnce(&mut Transaction<'_>, &mut ChaCha20Rng) -> Result<(T, Vec<String>), Refusal>,
    ) -> Result<Outcome<T>, Refusal> {
        let (mut draft, rng) = self.draft(facts);
        let (answer, lines) = make(&mut draft, rng)?;
        draft.reconcile_secrets(rng, now_ms);
        Ok(Outcome { plan: draft.finish(actor, now_ms, lines), answer })
    }

    fn declared(&self, outcome: Outcome<()>, dry_run: bool) -> Outcome<v1::ApplyResponse> {
        let changes = outcome.plan.as_ref().map(|p| p.changes.clone()).unwrap_or_default();
        let plan = outcome.plan.filter(|_| !dry_run);
        let revision = plan.as_ref().map_or(self.state.revision, |p| p.revision);
        Outcome { plan, answer: v1::ApplyResponse { revision, changes } }
    }

    /// Puts declared objects.
    ///
    /// # Errors
    /// A declaration is refused. Then nothing is changed.
    pub fn apply(
        &mut self,
        actor: &Actor,
        request: v1::ApplyRequest,
        facts: &dyn Facts,
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
        let done = self
            .change(actor, facts, now_ms, |draft, _| draft.declare(actor, asked, prune).map(|()| ((), Vec::new())))?;
        Ok(self.declared(done, dry_run))
    }

    /// Deletes objects.
    ///
    /// # Errors
    /// A deletion is refused. Then nothing is changed.
    pub fn delete(
        &mut self,
        actor: &Actor,
        request: &v1::DeleteRequest,
        facts: &dyn Facts,
        now_ms: u64,
    ) -> Result<Outcome<v1::ApplyResponse>, Refusal> {
        if request.names.len() > MAX_APPLY {
            return Err(Refusal::invalid(format_args!(
                "a call has at most {MAX_APPLY} names, not {}",
                request.names.len()
            )));
        }
        let done = self.change(actor, facts, now_ms, |draft, _| {
            draft.delete(actor, &request.names, request.force).map(|()| ((), Vec::new()))
        })?;
        Ok(self.declared(done, request.dry_run))
    }

    /// Moves a vRNIC to another host.
    ///
    /// # Errors
    /// Programs use it, or the vRNIC or the host does not exist.
    pub fn move_vrnic(
        &mut self,
        actor: &Actor,
        request: &v1::MoveRequest,
        facts: &dyn Facts,
        now_ms: u64,
    ) -> Result<Outcome<v1::ApplyResponse>, Refusal> {
        if request.vrnic.len() > 64 || request.host.len() > 64 {
            return Err(Refusal::invalid("the name is too long"));
        }
        let done = self.change(actor, facts, now_ms, |draft, _| {
            let v = draft.state.vrnics.get(request.vrnic.as_str());
            // To the actor, a vRNIC that it does not see does not exist.
            let v = v.filter(|v| actor.sees_group(&v.group)).ok_or_else(|| {
                Refusal::not_found(format_args!("there is no vRNIC {}", request.vrnic.escape_debug()))
            })?;
            actor.may_group(&v.group)?;
            if request.host.is_empty() {
                return Err(Refusal::invalid("say to which host it moves"));
            }
            let object = v1::Vrnic { host: request.host.clone(), ..v.object.clone() };
            draft.declare(actor, vec![(object.into(), 0)], false).map(|()| ((), Vec::new()))
        })?;
        Ok(self.declared(done, false))
    }

    /// Begins to replace the secret of a group.
    ///
    /// # Errors
    /// The group has none, or it is being replaced already.
    pub fn rotate(
        &mut self,
        actor: &Actor,
        group: &str,
        facts: &dyn Facts,
        now_ms: u64,
    ) -> Result<Outcome<v1::RotateSecretResponse>, Refusal> {
        actor.needs_admin("secrets")?;
        crate::model::check_name("group", group)?;
        self.change(actor, facts, now_ms, |draft, rng| {
            let id = draft.rotate(group, rng, now_ms)?;
            Ok((v1::RotateSecretResponse { id }, vec![format!("introduces secret {id} of group {group}")]))
        })
    }

    /// The changes that are due at this time: the next steps of secrets.
    pub fn tick(&mut self, facts: &dyn Facts, now_ms: u64) -> Option<Plan> {
        let (draft, _) = self.draft(facts);
        if !draft.state.has_steps() {
            return None;
        }
        drop(draft);
        let done = self.change(&Actor::centre(), facts, now_ms, |draft, _| Ok(((), draft.make_steps(now_ms))));
        done.ok()?.plan
    }

    /// Makes a token from 32 random bytes.
    ///
    /// # Errors
    /// The token is invalid.
    pub fn create_token(
        &mut self,
        actor: &Actor,
        token: v1::Token,
        random: [u8; 32],
        facts: &dyn Facts,
        now_ms: u64,
    ) -> Result<Outcome<v1::CreateTokenResponse>, Refusal> {
        actor.needs_admin("tokens")?;
        self.change(actor, facts, now_ms, |draft, _| {
            let made = draft.create_token(actor, token, random, now_ms)?;
            let line =
                made.token.as_ref().map(|t| format!("made token {} with the role {}", t.id, t.role().as_str_name()));
            Ok((made, line.into_iter().collect()))
        })
    }

    /// Revokes a token.
    ///
    /// # Errors
    /// There is none with this name.
    pub fn revoke_token(
        &mut self,
        actor: &Actor,
        id: &str,
        facts: &dyn Facts,
        now_ms: u64,
    ) -> Result<Outcome<v1::RevokeTokenResponse>, Refusal> {
        actor.needs_admin("tokens")?;
        self.change(actor, facts, now_ms, |draft, _| {
            draft.revoke_token(id)?;
            Ok((v1::RevokeTokenResponse {}, vec![format!("revoked token {id}")]))
        })
    }

    /// Lets a host join by a token.
    ///
    /// # Errors
    /// The token does not let this host join, or there is a host of this name.
    pub fn join(&mut self, secret: &str, host: &str, facts: &dyn Facts, now_ms: u64) -> Result<Outcome<()>, Refusal> {
        self.change(&Actor::of_host(host), facts, now_ms, |draft, _| {
            let token = draft.state.join_token(secret, host, now_ms)?.clone();
            let exists = draft.state.hosts.contains_key(host);
            if exists && token.host.is_empty() {
                return Err(Refusal::conflict(format_args!(
                    "there is a host {host} already; choose another name, or let it join anew with `unirdma token create --role join --host {host}`"
                )));
            }
            if facts.is_connected(host, now_ms) {
                return Err(Refusal::conflict(format_args!(
                    "host {host} is connected: a host name is for one host; choose another one"
                )));
            }
            if !exists {
                let asked = vec![(v1::Host { name: host.into(), ..v1::Host::default() }.into(), 0)];
                draft.declare(&Actor::centre(), asked, false)?;
            }
            draft.set_token(&token.id, None);
            Ok(((), vec![format!("host {host} joined by token {}", token.id)]))
        })
    }

    /// The actor that a token stands for.
    ///
    /// # Errors
    /// The token is unknown.
    pub fn actor(&mut self, secret: &str, now_ms: u64) -> Result<Actor, Refusal> {
        assert!(self.is_ready(), "a planner is asked whether it is ready");
        self.state.actor(secret, now_ms)
    }

    /// The changes in a host's first message: its addresses, and the vRNICs that its own administrator has made or
    /// removed. The answer has the refusals.
    pub fn announce(&mut self, host: &str, hello: &v1::Hello, facts: &dyn Facts, now_ms: u64) -> Outcome<Vec<String>> {
        let actor = Actor::of_host(host);
        let (mut draft, _) = self.draft(facts);
        let mut refused = Vec::new();
        if let Some(h) = draft.state.hosts.get(host).map(|h| h.object.clone()) {
            let object = v1::Host { addresses: hello.addresses.clone(), ..h };
            refused.extend(draft.put(object.into()).err().map(|e| e.what));
        }
        let announced: BTreeSet<&str> = hello.vrnics.iter().map(|v| v.name.as_str()).collect();
        let vrnics = draft.state.hosts.get(host).map(|h| h.vrnics.clone()).unwrap_or_default();
        for v in vrnics {
            // A vRNIC that the host has not received yet was not removed there: the centre that made it may have died
            // before it told the host.
            let known = |o: &crate::state::Vrnic| o.object.by_host && o.revision <= hello.revision;
            let gone = draft.state.vrnics.get(&v).is_some_and(known) && !announced.contains(&*v);
            if gone {
                refused.extend(draft.delete_vrnic(&actor, &v, true).err().map(|e| e.what));
            }
        }
        for v in &hello.vrnics {
            refused.extend(draft.declare_host_vrnic(&actor, host, v.clone()).err().map(|e| e.what));
        }
        Outcome { plan: draft.finish(&actor, now_ms, Vec::new()), answer: refused }
    }

    /// A change requested by a host's own administrator.
    ///
    /// # Errors
    /// The change is refused.
    pub fn ask(
        &mut self,
        host: &str,
        ask: v1::Ask,
        facts: &dyn Facts,
        now_ms: u64,
    ) -> Result<Outcome<v1::Reply>, Refusal> {
        use v1::ask::Change;
        let actor = Actor::of_host(host);
        let (mut draft, _) = self.draft(facts);
        let mut reply = v1::Reply { id: ask.id, ..v1::Reply::default() };
        match ask.change {
            Some(Change::Put(v)) => {
                let name = v.name.clone();
                draft.declare_host_vrnic(&actor, host, v)?;
                reply.vrnic = draft.state.vrnics.get(name.as_str()).map(|v| v.object.clone());
            }
            Some(Change::Remove(name)) => {
                crate::model::check_name("vRNIC", &name)?;
                match draft.state.vrnics.get(name.as_str()).map(|v| &v.object) {
                    Some(v) if v.host == host && v.by_host => {}
                    Some(v) if v.host == host => {
                        return Err(Refusal::denied(format_args!(
                            "vRNIC {name} is declared at the centre: `unirdma delete vrnic {name}`"
                        )));
                    }
                    _ => return Err(Refusal::not_found(format_args!("there is no vRNIC {name} on host {host}"))),
                }
                // The host checks itself whether programs use it.
                draft.delete_vrnic(&actor, &name, true)?;
            }
            None => {
                return Err(Refusal::invalid(
                    "the host asks for nothing that this centre knows; update the centre first",
                ));
            }
        }
        Ok(Outcome { plan: draft.finish(&actor, now_ms, Vec::new()), answer: reply })
    }
}

impl Transaction<'_> {
    /// Declares a vRNIC made by a host's own administrator. A refused declaration leaves the draft unchanged.
    fn declare_host_vrnic(&mut self, actor: &Actor, host: &str, mut v: v1::Vrnic) -> Result<(), Refusal> {
        crate::model::check_name("vRNIC", &v.name)?;
        if !self.state.hosts.get(host).is_some_and(|h| h.object.may_add.unwrap_or(true)) {
            return Err(Refusal::denied(format_args!(
                "vRNIC {}: the centre lets host {host} make no vRNICs (may_add = false)",
                v.name
            )));
        }
        // The centre's values of MAC and GUID hold. The host's values are ignored.
        (v.host, v.by_host, v.mac, v.guid) = (host.into(), true, String::new(), String::new());
        let object = Object::Vrnic(v);
        crate::model::check(&object)?;
        let here = self.mark();
        let done = self.declare(actor, vec![(object, 0)], false);
        if done.is_err() {
            self.back_to(here);
        }
        done
    }
}

#[cfg(test)]
mod tests;
