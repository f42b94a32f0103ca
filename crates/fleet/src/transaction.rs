//! A change in preparation. Its steps are made in the state one after the other, so that each step sees the former
//! ones, and then undone. The result is a [`Plan`], which is kept in the store first and applied to the state after
//! that.

use std::collections::{BTreeMap, BTreeSet};

use crate::error::Refusal;
use crate::model::{Kind, MAX_APPLY};
use crate::planner::{Facts, Given};
use crate::records::{self, Write};
use crate::state::{Kept, Name, SecretName, State};
use crate::tokens::Actor;
use crate::v1;

/// A change that is possible, and is not made yet.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// The revision after the change: one more than the present one.
    pub revision: u64,
    /// The store keeps all of these writes or none.
    pub writes: Vec<Write>,
    /// The objects before and after.
    pub changes: Vec<v1::Change>,
}

enum Undo {
    Object(Kind, String, Box<Option<Kept>>),
    Secret(SecretName, Option<v1::SecretRecord>),
    Token(String, Option<v1::TokenRecord>),
}

/// A change in preparation. Dropping it restores the state.
pub(crate) struct Transaction<'a> {
    pub state: &'a mut State,
    pub given: &'a mut Given,
    pub facts: &'a dyn Facts,
    undo: Vec<Undo>,
    /// Number of groups and addresses compared so far.
    pub work: u64,
    /// For each group, the groups with which it must not share addresses. Valid until a rule changes.
    pub joined: BTreeMap<String, BTreeSet<Name>>,
}

impl<'a> Transaction<'a> {
    pub fn new(state: &'a mut State, given: &'a mut Given, facts: &'a dyn Facts) -> Self {
        Transaction { state, given, facts, undo: Vec::new(), work: 0, joined: BTreeMap::new() }
    }

    /// The revision after the change.
    pub fn revision(&self) -> u64 {
        self.state.revision + 1
    }

    /// Sets an object.
    pub fn put(&mut self, object: v1::object::Object) -> Result<(), Refusal> {
        let (kind, name) = (object.kind(), object.name().to_owned());
        let revision = self.revision();
        let before = self.state.set(kind, &name, Some((object, revision)))?;
        self.set(kind, name, before);
        Ok(())
    }

    /// Removes an object.
    pub fn remove(&mut self, kind: Kind, name: &str) -> Result<(), Refusal> {
        let before = self.state.set(kind, name, None)?;
        self.set(kind, name.into(), before);
        Ok(())
    }

    /// Records the former value of an object that was set.
    fn set(&mut self, kind: Kind, name: String, before: Option<Kept>) {
        self.undo.push(Undo::Object(kind, name, Box::new(before)));
        if kind == Kind::Rule {
            self.joined.clear();
        }
    }

    pub fn set_secret(&mut self, name: SecretName, to: Option<v1::SecretRecord>) {
        let before = replace(&mut self.state.secrets, &name, to);
        self.undo.push(Undo::Secret(name, before));
    }

    pub fn set_token(&mut self, id: &str, to: Option<v1::TokenRecord>) {
        let before = replace(&mut self.state.tokens, &id.to_owned(), to);
        self.undo.push(Undo::Token(id.into(), before));
    }

    /// The objects that the draft changes, with their former values.
    pub fn changed(&self) -> BTreeMap<(Kind, String), Option<Kept>> {
        let mut first = BTreeMap::new();
        for undo in &self.undo {
            if let Undo::Object(kind, name, before) = undo {
                first.entry((*kind, name.clone())).or_insert_with(|| (**before).clone());
            }
        }
        first.retain(|(kind, name), before| {
            self.state.get(*kind, name).map(|(object, _)| object) != before.as_ref().map(|(object, _)| object.clone())
        });
        first
    }

    /// The change as a plan; `None` if nothing changes. The state is restored.
    pub fn finish(self, actor: &Actor, now_ms: u64, mut lines: Vec<String>) -> Option<Plan> {
        let revision = self.revision();
        let message = |kept: Option<Kept>| kept.map(|(object, revision)| v1::Object { object: Some(object), revision });
        let (mut gone, mut put, mut changes) = (Vec::new(), Vec::new(), Vec::new());
        for ((kind, name), before) in self.changed() {
            let after = self.state.get(kind, &name);
            lines.push(line(kind, &name, before.as_ref(), after.as_ref()));
            let list = if after.is_some() { &mut put } else { &mut gone };
            list.push(records::object(kind, &name, after.clone()));
            changes.push(v1::Change { before: message(before), after: message(after) });
        }
        gone.reverse();
        let mut writes = [gone, put].concat();
        let (mut secrets, mut tokens) = (BTreeSet::new(), BTreeSet::new());
        for undo in &self.undo {
            match undo {
                Undo::Secret(name, _) => drop(secrets.insert(name)),
                Undo::Token(id, _) => drop(tokens.insert(id)),
                Undo::Object(..) => {}
            }
        }
        writes.extend(secrets.into_iter().map(|n| records::secret(n, self.state.secrets.get(n))));
        writes.extend(tokens.into_iter().map(|id| records::token(id, self.state.tokens.get(id))));
        if writes.is_empty() {
            return None;
        }
        let more = lines.len().saturating_sub(MAX_LINES);
        if more > 0 {
            lines.truncate(MAX_LINES);
            lines.push(format!("and {more} more"));
        }
        let (who, admin) = (actor.who().to_owned(), actor.is_admin());
        let entry = v1::AuditEntry { revision, time: now_ms / 1000, who, what: lines, admin };
        writes.push(records::audit(revision, Some(&entry)));
        writes.extend(self.state.audit.without(entry).into_iter().map(|old| records::audit(old, None)));
        Some(Plan { revision, writes, changes })
    }
}

/// Most lines of an entry of the audit log. A call's own objects all fit; objects deleted along with a group or a host
/// may not.
const MAX_LINES: usize = MAX_APPLY;

fn line(kind: Kind, name: &str, before: Option<&Kept>, after: Option<&Kept>) -> String {
    let verb = match (before, after) {
        (None, _) => "made",
        (_, None) => "deleted",
        _ => "changed",
    };
    let more = match after.or(before) {
        Some((v1::object::Object::Vrnic(v), _)) => {
            let at = if v.host.is_empty() { String::new() } else { format!(", on host {}", v.host) };
            format!(": {} in group {}{at}", v.ips.join(" "), v.group)
        }
        Some((v1::object::Object::Rule(r), _)) => {
            let both = if r.both { ", both ways" } else { "" };
            format!(": {} {} to {}, priority {}{both}", r.action().as_str_name(), r.from, r.to, r.priority)
        }
        _ => String::new(),
    };
    format!("{verb} {kind} {name}{more}")
}

fn replace<K: Ord + Clone, V>(map: &mut BTreeMap<K, V>, key: &K, to: Option<V>) -> Option<V> {
    match to {
        Some(v) => map.insert(key.clone(), v),
        None => map.remove(key),
    }
}

impl Transaction<'_> {
    /// The present position, for [`Transaction::back_to`].
    pub fn mark(&self) -> usize {
        self.undo.len()
    }

    /// Undoes all steps after a mark.
    pub fn back_to(&mut self, mark: usize) {
        while self.undo.len() > mark {
            let Some(undo) = self.undo.pop() else { return };
            match undo {
                Undo::Object(kind, name, before) => {
                    self.joined.clear();
                    // A group that never existed has given no addresses: its first vRNIC gets its first address.
                    if kind == Kind::Group && before.is_none() {
                        self.given.remove(&name);
                    }
                    self.state.set(kind, &name, *before).expect("a state that was possible is possible again");
                }
                Undo::Secret(name, before) => drop(replace(&mut self.state.secrets, &name, before)),
                Undo::Token(id, before) => drop(replace(&mut self.state.tokens, &id, before)),
            }
        }
    }
}

impl Drop for Transaction<'_> {
    fn drop(&mut self) {
        self.back_to(0);
    }
}
