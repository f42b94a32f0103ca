//! What is asked of the centre: objects, changes, tokens, the audit log, figures. Nothing here changes anything.

use std::collections::{BTreeMap, BTreeSet};

use crate::centre::Centre;
use crate::error::Refusal;
use crate::model::Kind;
use crate::state::Name;
use crate::tokens::Actor;
use crate::v1::{self, object::Object};

impl Centre {
    /// The changes since a revision; `None` if they are not remembered any more.
    pub fn changes_since(&self, actor: &Actor, watch: &v1::WatchRequest, told: u64) -> Option<Vec<v1::Change>> {
        if told < self.changes_floor {
            return None;
        }
        let kind = Kind::of(watch.kind).ok()?;
        let news = self.changes.iter().rev().take_while(|(r, _)| *r > told);
        let seen = |o: &Option<v1::Object>| {
            o.as_ref().and_then(|o| o.object.as_ref()).is_some_and(|o| {
                kind.is_none_or(|k| k == o.kind()) && self.shows(actor, o) && in_group(o, &watch.group)
            })
        };
        let mut out: Vec<v1::Change> =
            news.filter(|(_, c)| seen(&c.before) || seen(&c.after)).map(|(_, c)| (**c).clone()).collect();
        out.reverse();
        Some(out)
    }

    /// The tokens.
    ///
    /// # Errors
    /// The actor may not see them.
    pub fn tokens(&self, actor: &Actor) -> Result<v1::ListTokensResponse, Refusal> {
        actor.needs_reader("tokens")?;
        Ok(v1::ListTokensResponse { tokens: self.state.tokens.values().filter_map(|t| t.token.clone()).collect() })
    }

    /// Who changed what, newest first.
    ///
    /// # Errors
    /// The actor may not see it.
    pub fn audit(&self, actor: &Actor, request: v1::AuditRequest) -> Result<v1::AuditResponse, Refusal> {
        actor.needs_reader("the audit log")?;
        let most = if request.limit == 0 { 100 } else { request.limit.min(1_000) } as usize;
        let before = if request.before == 0 { u64::MAX } else { request.before };
        let entries = self.state.audit.iter().rev().filter(|e| e.revision < before).take(most).cloned().collect();
        Ok(v1::AuditResponse { entries })
    }

    /// The centre in figures; who asks fills in what this does not know.
    pub fn status(&self, now_ms: u64) -> v1::StatusResponse {
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        v1::StatusResponse {
            revision: self.state.revision,
            hosts: count(self.state.hosts.len()),
            hosts_connected: count(self.state.hosts.keys().filter(|h| self.live.is_connected(h, now_ms)).count()),
            groups: count(self.state.groups.len()),
            vrnics: count(self.state.vrnics.len()),
            rules: count(self.state.rules.len()),
            ..v1::StatusResponse::default()
        }
    }

    /// Whether an actor sees an object.
    fn shows(&self, actor: &Actor, object: &Object) -> bool {
        match object {
            _ if actor.sees_all() => true,
            Object::Host(_) => false,
            Object::Group(g) => actor.sees_group(&g.name),
            Object::Vrnic(v) => actor.sees_group(&v.group),
            Object::Rule(r) => match self.state.rules.get(r.name.as_str()) {
                Some(rule) => rule.ends.iter().all(|e| actor.sees_group(&e.group)),
                None => [&r.from, &r.to].iter().all(|t| t.strip_prefix("group:").is_some_and(|g| actor.sees_group(g))),
            },
        }
    }

    /// Objects, with what is known of them beside what is declared.
    ///
    /// # Errors
    /// The question cannot be.
    pub fn get(&self, actor: &Actor, q: &v1::GetRequest, now_ms: u64) -> Result<v1::GetResponse, Refusal> {
        let kind = Kind::of(q.kind)?;
        if kind.is_none() && !(q.after.is_empty() && q.name.is_empty()) {
            return Err(Refusal::invalid("say which kind: host, group, vrnic or rule"));
        }
        let most = if q.limit == 0 { 1_000 } else { q.limit.min(1_000) } as usize;
        let mut found: Vec<(Object, u64)> = Vec::new();
        for kind in Kind::ALL.into_iter().filter(|k| kind.is_none_or(|x| x == *k)) {
            let room = most + 1 - found.len();
            let named = self.names(kind, q);
            let fits = |o: &(Object, u64)| {
                let on = matches!(&o.0, Object::Vrnic(v) if v.host == q.host);
                self.shows(actor, &o.0) && in_group(&o.0, &q.group) && (q.host.is_empty() || on)
            };
            found.extend(named.filter_map(|n| self.state.get(kind, n)).filter(fits).take(room));
        }
        if !q.name.is_empty() && found.is_empty() {
            let shown: String = q.name.chars().take(40).collect();
            let kind = kind.map(|k| k.to_string()).unwrap_or_default();
            return Err(Refusal::not_found(format_args!("there is no {kind} {}", shown.escape_debug())));
        }
        let more = found.len() > most;
        found.truncate(most);
        let (mut hosts, mut vrnics) = (Vec::new(), Vec::new());
        for (object, _) in &found {
            match object {
                Object::Host(h) => hosts.push(self.host_state(&h.name, now_ms)),
                Object::Vrnic(v) => vrnics.extend(self.live.vrnic(&v.name).cloned()),
                _ => {}
            }
        }
        let objects = found.into_iter().map(|(o, revision)| v1::Object { object: Some(o), revision }).collect();
        Ok(v1::GetResponse { revision: self.state.revision, objects, hosts, vrnics, more })
    }

    /// The names of a kind that a question may be about, from where it goes on. The narrowest index is used.
    fn names<'a>(&'a self, kind: Kind, q: &'a v1::GetRequest) -> Box<dyn Iterator<Item = &'a str> + 'a> {
        use std::ops::Bound::{Excluded, Unbounded};
        if !q.name.is_empty() {
            return Box::new(std::iter::once(q.name.as_str()));
        }
        let from = if q.after.is_empty() { Unbounded } else { Excluded(q.after.as_str()) };
        fn keys<'a, V>(
            map: &'a BTreeMap<Name, V>,
            from: std::ops::Bound<&'a str>,
        ) -> Box<dyn Iterator<Item = &'a str> + 'a> {
            Box::new(map.range::<str, _>((from, Unbounded)).map(|(n, _)| &**n))
        }
        let narrow = |set: Option<&'a BTreeSet<Name>>| -> Box<dyn Iterator<Item = &'a str> + 'a> {
            Box::new(set.into_iter().flat_map(move |s| s.range::<str, _>((from, Unbounded))).map(|n| &**n))
        };
        match kind {
            Kind::Host => keys(&self.state.hosts, from),
            Kind::Group => keys(&self.state.groups, from),
            Kind::Vrnic if !q.host.is_empty() => narrow(self.state.hosts.get(q.host.as_str()).map(|h| &h.vrnics)),
            Kind::Vrnic if !q.group.is_empty() => narrow(self.state.groups.get(q.group.as_str()).map(|g| &g.vrnics)),
            Kind::Vrnic => keys(&self.state.vrnics, from),
            Kind::Rule => keys(&self.state.rules, from),
        }
    }
}

/// True for a vRNIC of the group, and the group itself; everything is if no group is asked for.
fn in_group(object: &Object, group: &str) -> bool {
    group.is_empty()
        || match object {
            Object::Vrnic(v) => v.group == group,
            Object::Group(g) => g.name == group,
            _ => false,
        }
}
