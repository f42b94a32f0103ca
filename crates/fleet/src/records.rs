//! The content of a store: records with keys, as text and bytes. The store does not interpret them.

use std::sync::Arc;

use prost::Message;

use crate::error::Refusal;
use crate::model::{Kind, check};
use crate::state::{SecretName, State};
use crate::v1::{self, object::Object};

/// A record that is made, replaced or, without a value, removed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Write {
    /// Its key: letters, digits, `_`, `.`, `-` and `/`.
    pub key: String,
    /// Its new value; `None`: it is removed.
    pub value: Option<Vec<u8>>,
}

/// Version of the records.
pub const FORMAT: u32 = 1;
/// The key of the first record.
pub const META: &str = "meta";

/// A record that was read.
#[derive(Clone)]
pub(crate) enum Record {
    Meta(v1::Meta),
    Object(Kind, String, Box<Option<(Object, u64)>>),
    Token(String, Option<v1::TokenRecord>),
    Secret(SecretName, Option<v1::SecretRecord>),
    Audit(u64, Option<Arc<v1::AuditEntry>>),
}

fn write(key: String, value: Option<Vec<u8>>) -> Write {
    Write { key, value }
}

pub(crate) fn object(kind: Kind, name: &str, object: Option<(Object, u64)>) -> Write {
    let value = object.map(|(object, revision)| v1::Object { object: Some(object), revision }.encode_to_vec());
    write(format!("object/{}/{name}", kind.word()), value)
}

pub(crate) fn token(id: &str, token: Option<&v1::TokenRecord>) -> Write {
    write(format!("token/{id}"), token.map(Message::encode_to_vec))
}

pub(crate) fn secret((group, other, id): &SecretName, secret: Option<&v1::SecretRecord>) -> Write {
    write(format!("secret/{group}/{other}/{id}"), secret.map(Message::encode_to_vec))
}

pub(crate) fn audit(revision: u64, entry: Option<&v1::AuditEntry>) -> Write {
    write(format!("audit/{revision:016x}"), entry.map(Message::encode_to_vec))
}

impl State {
    /// Applies records to the state: first removals, dependent objects first, then new values.
    pub(crate) fn take(&mut self, records: Vec<Record>) -> Result<(), Refusal> {
        let mut objects = Vec::new();
        for record in records {
            match record {
                Record::Object(kind, name, object) => objects.push((kind, name, *object)),
                Record::Meta(m) if m.format == FORMAT => self.fleet = m.fleet,
                Record::Meta(m) => {
                    let text =
                        format!("the store has records of version {}, this program reads version {}", m.format, FORMAT);
                    return Err(Refusal::invalid(text));
                }
                Record::Token(id, Some(token)) => drop(self.tokens.insert(id, token)),
                Record::Token(id, None) => drop(self.tokens.remove(&id)),
                Record::Secret(name, Some(secret)) => drop(self.secrets.insert(name, secret)),
                Record::Secret(name, None) => drop(self.secrets.remove(&name)),
                Record::Audit(_, Some(entry)) => self.audit.insert(entry),
                Record::Audit(revision, None) => drop(self.audit.remove(revision)),
            }
        }
        objects.sort_by_key(|o| std::cmp::Reverse(o.0));
        for (kind, name, object) in &objects {
            if object.is_none() || matches!(kind, Kind::Vrnic | Kind::Rule) {
                self.set(*kind, name, None)?;
            }
        }
        for (kind, name, object) in objects.into_iter().rev() {
            if object.is_some() {
                self.set(kind, &name, object)?;
            }
        }
        Ok(())
    }

    /// All records, except the first one.
    pub(crate) fn records(&self) -> Vec<Write> {
        let mut all = Vec::new();
        let mut objects = |kind: Kind, name: &str| all.push(object(kind, name, self.get(kind, name)));
        self.hosts.keys().for_each(|n| objects(Kind::Host, n));
        self.groups.keys().for_each(|n| objects(Kind::Group, n));
        self.vrnics.keys().for_each(|n| objects(Kind::Vrnic, n));
        self.rules.keys().for_each(|n| objects(Kind::Rule, n));
        all.extend(self.tokens.iter().map(|(id, t)| token(id, Some(t))));
        all.extend(self.secrets.iter().map(|(name, s)| secret(name, Some(s))));
        all.extend(self.audit.iter().map(|e| audit(e.revision, Some(e))));
        all
    }
}

/// The first record of a new store.
pub fn meta(fleet: &str) -> Write {
    write(META.into(), Some(v1::Meta { fleet: fleet.into(), format: FORMAT }.encode_to_vec()))
}

/// Parses a record.
///
/// # Errors
/// It is damaged, or of another version of this program.
pub(crate) fn read(w: &Write) -> Result<Record, Refusal> {
    parse(w).ok_or_else(|| {
        let key: String = w.key.chars().take(100).collect();
        Refusal::invalid(format_args!(
            "the store's record `{}` is damaged; restore the store from a backup",
            key.escape_debug()
        ))
    })
}

fn decode<M: Message + Default>(value: Option<&Vec<u8>>) -> Option<Option<M>> {
    value.map(|v| M::decode(v.as_slice()).ok()).map_or(Some(None), |m| m.map(Some))
}

fn parse(w: &Write) -> Option<Record> {
    let value = w.value.as_ref();
    let parts: Vec<&str> = w.key.split('/').collect();
    Some(match parts.as_slice() {
        [META] => Record::Meta(decode::<v1::Meta>(value)??),
        ["object", kind, name] => {
            let kind = Kind::of_word(kind)?;
            let object = match decode::<v1::Object>(value)? {
                None => None,
                Some(o) => {
                    let object = o.object.filter(|x| x.kind() == kind && x.name() == *name && check(x).is_ok())?;
                    Some((object, o.revision))
                }
            };
            Record::Object(kind, (*name).into(), Box::new(object))
        }
        ["token", id] => Record::Token((*id).into(), decode(value)?),
        ["secret", group, other, id] => {
            Record::Secret(((*group).into(), (*other).into(), id.parse().ok()?), decode(value)?)
        }
        ["audit", revision] => {
            let entry = decode::<v1::AuditEntry>(value)?;
            let revision = u64::from_str_radix(revision, 16).ok()?;
            Record::Audit(revision, entry.map(|e| Arc::new(v1::AuditEntry { revision, ..e })))
        }
        _ => return None,
    })
}
