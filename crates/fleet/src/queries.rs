//! Queries: objects, changes, tokens, the audit log, the status. They change nothing.
//!
//! A tenant's query visits only the tenant's groups. To the tenant, objects outside them do not exist.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::ops::Bound::{self, Excluded, Unbounded};
use std::sync::Arc;

use prost::Message;

use crate::centre::Centre;
use crate::error::Refusal;
use crate::model::Kind;
use crate::state::{Group, Name, State};
use crate::tokens::Actor;
use crate::v1;

/// Bytes of an answer about the audit log after which the answer ends.
const MAX_AUDIT_BYTES: usize = 4 << 20;

/// An object, and the groups that an actor must see to see it. An object without groups is visible only to readers.
pub(crate) type Owned = (v1::Object, Vec<Name>);

/// A change, with the groups that decide who sees it.
#[derive(Debug)]
pub struct Seen {
    kind: Kind,
    before: Option<Owned>,
    after: Option<Owned>,
}

impl Seen {
    pub(crate) fn new(kind: Kind, before: Option<Owned>, after: Option<Owned>) -> Seen {
        Seen { kind, before, after }
    }

    /// The change as an actor sees it who watches; `None` if it does not.
    pub fn told(&self, actor: &Actor, watch: &v1::WatchRequest) -> Option<v1::Change> {
        let in_group = |groups: &[Name]| {
            watch.group.is_empty() || self.kind != Kind::Rule && groups.iter().any(|g| **g == *watch.group)
        };
        let sees = |groups: &[Name]| match groups {
            [] => actor.sees_all(),
            groups => groups.iter().all(|g| actor.sees_group(g)),
        };
        let told = |o: &Option<Owned>| {
            o.as_ref().filter(|(_, groups)| sees(groups) && in_group(groups)).map(|(o, _)| o.clone())
        };
        let kind = Kind::of(watch.kind).ok()?;
        if kind.is_some_and(|k| k != self.kind) {
            return None;
        }
        let change = v1::Change { before: told(&self.before), after: told(&self.after) };
        (change.before.is_some() || change.after.is_some()).then_some(change)
    }
}

impl State {
    /// The groups that an actor must see to see an object.
    fn groups_of(&self, kind: Kind, name: &str) -> Option<Vec<Name>> {
        Some(match kind {
            Kind::Host => Vec::new(),
            Kind::Group => vec![self.groups.get_key_value(name)?.0.clone()],
            Kind::Vrnic => vec![self.vrnics.get(name)?.group.clone()],
            Kind::Rule => self.rules.get(name)?.ends.iter().map(|e| e.group.clone()).collect(),
        })
    }

    /// Whether an object exists and an actor sees it. To the actor, an object that it does not see does not exist.
    pub(crate) fn is_seen(&self, actor: &Actor, kind: Kind, name: &str) -> bool {
        match kind {
            Kind::Host => actor.sees_all() && self.hosts.contains_key(name),
            Kind::Group => actor.sees_group(name) && self.groups.contains_key(name),
            Kind::Vrnic => self.vrnics.get(name).is_some_and(|v| actor.sees_group(&v.group)),
            Kind::Rule => self.rules.get(name).is_some_and(|r| r.ends.iter().all(|e| actor.sees_group(&e.group))),
        }
    }

    /// An object with its groups.
    pub(crate) fn seen(&self, kind: Kind, name: &str) -> Option<Owned> {
        let (object, revision) = self.get(kind, name)?;
        Some((v1::Object { object: Some(object), revision }, self.groups_of(kind, name)?))
    }
}

impl Centre {
    /// The changes since a revision; `None` if they are no longer remembered.
    pub fn changes_since(&self, told: u64) -> Option<Vec<Arc<Seen>>> {
        if told < self.changes_floor {
            return None;
        }
        let first = self.changes.partition_point(|(r, _)| *r <= told);
        Some(self.changes.range(first..).map(|(_, c)| c.clone()).collect())
    }

    /// The tokens.
    ///
    /// # Errors
    /// The actor may not see them.
    pub fn tokens(&self, actor: &Actor) -> Result<v1::ListTokensResponse, Refusal> {
        actor.needs_reader("tokens")?;
        Ok(v1::ListTokensResponse { tokens: self.state.tokens.values().filter_map(|t| t.token.clone()).collect() })
    }

    /// The audit log, newest entry first.
    ///
    /// # Errors
    /// The actor may not see it.
    pub fn audit(&self, actor: &Actor, request: v1::AuditRequest) -> Result<v1::AuditResponse, Refusal> {
        actor.needs_reader("the audit log")?;
        let most = if request.limit == 0 { 100 } else { request.limit.min(1_000) } as usize;
        let before = if request.before == 0 { u64::MAX } else { request.before };
        let mut bytes = 0;
        let fits = |e: &&Arc<v1::AuditEntry>| {
            let room = bytes < MAX_AUDIT_BYTES;
            bytes += e.encoded_len();
            room
        };
        let entries = self.state.audit.before(before).take(most).take_while(fits).map(|e| (**e).clone()).collect();
        Ok(v1::AuditResponse { entries })
    }

    /// The status that an actor may see. The caller adds the fields that are unknown here.
    pub fn status(&self, actor: &Actor, now_ms: u64) -> v1::StatusResponse {
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let revision = self.state.revision;
        if let Some(mine) = actor.groups() {
            let groups: Vec<_> = mine.iter().filter_map(|g| self.state.groups.get(g.as_str())).collect();
            return v1::StatusResponse {
                revision,
                groups: count(groups.len()),
                vrnics: count(groups.iter().map(|g| g.vrnics.len()).sum()),
                rules: count(self.state.rules_within(mine)),
                ..v1::StatusResponse::default()
            };
        }
        v1::StatusResponse {
            revision,
            hosts: count(self.state.hosts.len()),
            hosts_connected: count(self.state.hosts.keys().filter(|h| self.live.is_connected(h, now_ms)).count()),
            groups: count(self.state.groups.len()),
            vrnics: count(self.state.vrnics.len()),
            rules: count(self.state.rules.len()),
            ..v1::StatusResponse::default()
        }
    }

    /// The last report on a vRNIC for an actor. It has the addresses of connected vRNICs that the actor does not see,
    /// but not their names.
    pub(crate) fn vrnic_state(&self, actor: &Actor, name: &str) -> Option<Arc<v1::VrnicState>> {
        let state = self.live.vrnic(name)?;
        let hidden = |c: &v1::Connection| !c.peer.is_empty() && !self.state.is_seen(actor, Kind::Vrnic, &c.peer);
        if actor.sees_all() || !state.connections.iter().any(hidden) {
            return Some(state.clone());
        }
        let mut state = (**state).clone();
        state.connections.iter_mut().filter(|c| hidden(c)).for_each(|c| c.peer.clear());
        Some(Arc::new(state))
    }

    /// Objects, with their observed states.
    ///
    /// # Errors
    /// The query is invalid.
    pub fn get(&self, actor: &Actor, q: &v1::GetRequest, now_ms: u64) -> Result<v1::GetResponse, Refusal> {
        let kind = Kind::of(q.kind)?;
        if kind.is_none() && !(q.after.is_empty() && q.name.is_empty()) {
            return Err(Refusal::invalid("say which kind: host, group, vrnic or rule"));
        }
        let most = if q.limit == 0 { 1_000 } else { q.limit.min(1_000) } as usize;
        let mut found: Vec<(Kind, &str)> = Vec::new();
        for kind in Kind::ALL.into_iter().filter(|k| kind.is_none_or(|x| x == *k)) {
            let room = most + 1 - found.len();
            let fits = |name: &&str| self.state.is_seen(actor, kind, name) && self.fits(kind, name, q);
            found.extend(self.names(actor, kind, q).filter(fits).take(room).map(|n| (kind, n)));
        }
        if !q.name.is_empty() && found.is_empty() {
            let shown: String = q.name.chars().take(40).collect();
            let kind = kind.map(|k| k.to_string()).unwrap_or_default();
            return Err(Refusal::not_found(format_args!("there is no {kind} {}", shown.escape_debug())));
        }
        let more = found.len() > most;
        found.truncate(most);
        let of = |kind| found.iter().filter(move |(k, _)| *k == kind).map(|(_, name)| *name);
        let hosts = of(Kind::Host).map(|n| self.host_state(n, now_ms)).collect();
        let vrnics = of(Kind::Vrnic).filter_map(|n| self.vrnic_state(actor, n)).map(|s| (*s).clone()).collect();
        let objects = found.iter().filter_map(|(kind, name)| self.state.get(*kind, name));
        let objects = objects.map(|(o, revision)| v1::Object { object: Some(o), revision }).collect();
        Ok(v1::GetResponse { revision: self.state.revision, objects, hosts, vrnics, more })
    }

    /// Whether an object matches the group and the host of a query. Only vRNICs and groups can.
    fn fits(&self, kind: Kind, name: &str, q: &v1::GetRequest) -> bool {
        let (group, host) = (q.group.as_str(), q.host.as_str());
        match kind {
            Kind::Vrnic => self.state.vrnics.get(name).is_some_and(|v| {
                (group.is_empty() || *v.group == *group) && (host.is_empty() || v.host.as_deref() == Some(host))
            }),
            Kind::Group => (group.is_empty() || name == group) && host.is_empty(),
            Kind::Host | Kind::Rule => group.is_empty() && host.is_empty(),
        }
    }

    /// The names of a kind that a query may match, from its position on. The narrowest index is used.
    fn names<'a>(&'a self, actor: &'a Actor, kind: Kind, q: &'a v1::GetRequest) -> Names<'a> {
        let state = &self.state;
        if !q.name.is_empty() {
            return Box::new(std::iter::once(q.name.as_str()));
        }
        let from = if q.after.is_empty() { Unbounded } else { Excluded(q.after.as_str()) };
        let one = |set: Option<&'a BTreeSet<Name>>| merged(set.into_iter(), from);
        let nothing = || -> Names<'a> { Box::new(std::iter::empty()) };
        let of = |groups: &'a BTreeSet<String>, set: fn(&Group) -> &BTreeSet<Name>| {
            merged(groups.iter().filter_map(|g| state.groups.get(g.as_str())).map(set), from)
        };
        match (kind, actor.groups()) {
            (Kind::Host | Kind::Rule, _) if !(q.group.is_empty() && q.host.is_empty()) => nothing(),
            (Kind::Host, Some(_)) => nothing(),
            (Kind::Host, None) => keys(&state.hosts, from),
            (Kind::Group, _) if !q.group.is_empty() => {
                Box::new(std::iter::once(q.group.as_str()).filter(|g| *g > q.after.as_str()))
            }
            (Kind::Group, Some(mine)) => Box::new(mine.range::<str, _>((from, Unbounded)).map(String::as_str)),
            (Kind::Group, None) => keys(&state.groups, from),
            (Kind::Vrnic, _) if !(q.group.is_empty() || actor.sees_group(&q.group)) => nothing(),
            (Kind::Vrnic, None) if !q.host.is_empty() => one(state.hosts.get(q.host.as_str()).map(|h| &h.vrnics)),
            (Kind::Vrnic, _) if !q.group.is_empty() => one(state.groups.get(q.group.as_str()).map(|g| &g.vrnics)),
            (Kind::Vrnic, Some(mine)) => of(mine, |g| &g.vrnics),
            (Kind::Vrnic, None) => keys(&state.vrnics, from),
            (Kind::Rule, Some(mine)) => of(mine, |g| &g.rules),
            (Kind::Rule, None) => keys(&state.rules, from),
        }
    }
}

type Names<'a> = Box<dyn Iterator<Item = &'a str> + 'a>;

fn keys<'a, V>(map: &'a BTreeMap<Name, V>, from: Bound<&'a str>) -> Names<'a> {
    Box::new(map.range::<str, _>((from, Unbounded)).map(|(n, _)| &**n))
}

/// The union of all sets, in order.
fn merged<'a>(sets: impl Iterator<Item = &'a BTreeSet<Name>>, from: Bound<&'a str>) -> Names<'a> {
    let mut ranges: Vec<_> = sets.map(|s| s.range::<str, _>((from, Unbounded))).collect();
    let firsts = ranges.iter_mut().enumerate().filter_map(|(i, r)| r.next().map(|n| Reverse((&**n, i))));
    let mut next: BinaryHeap<Reverse<(&str, usize)>> = firsts.collect();
    let mut last = None;
    Box::new(
        std::iter::from_fn(move || {
            let Reverse((name, i)) = next.pop()?;
            next.extend(ranges[i].next().map(|n| Reverse((&**n, i))));
            Some(name)
        })
        .filter(move |name| last.replace(*name) != Some(*name)),
    )
}
