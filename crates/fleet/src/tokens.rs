//! Actors: tokens with their roles, and hosts. Only the hash of a token is kept.

use std::collections::BTreeSet;

use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use time::UtcDateTime;

use crate::error::Refusal;
use crate::model::{TOKENS, check_name};
use crate::state::State;
use crate::transaction::Transaction;
use crate::v1::{self, Role};

/// Most groups of a tenant's token, and most hosts.
const MAX_GROUPS: usize = 1_000;
/// Stands for all hosts.
const ALL_HOSTS: &str = "*";

/// A caller with its rights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Actor {
    who: String,
    power: Power,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Power {
    Admin,
    Reader,
    Tenant {
        groups: BTreeSet<String>,
        /// Hosts on which a tenant may put vRNICs, besides hosts that have vRNICs of its groups. `None`: any host.
        hosts: Option<BTreeSet<String>>,
    },
    Host(String),
}

impl Actor {
    /// The centre itself.
    pub fn centre() -> Actor {
        Actor { who: "centre".into(), power: Power::Admin }
    }

    /// A host, by its certificate.
    pub fn of_host(name: &str) -> Actor {
        Actor { who: format!("host {name}"), power: Power::Host(name.into()) }
    }

    /// Its name in the audit log.
    pub fn who(&self) -> &str {
        &self.who
    }

    /// Its name in a sentence.
    pub(crate) fn title(&self) -> String {
        if self.host().is_some() { self.who.clone() } else { format!("token {}", self.who) }
    }

    /// The groups of a tenant.
    pub(crate) fn groups(&self) -> Option<&BTreeSet<String>> {
        if let Power::Tenant { groups, .. } = &self.power { Some(groups) } else { None }
    }

    /// Hosts on which a tenant may put vRNICs, besides hosts that have vRNICs of its groups. `None`: any host.
    pub(crate) fn hosts(&self) -> Option<&BTreeSet<String>> {
        if let Power::Tenant { hosts, .. } = &self.power { hosts.as_ref() } else { None }
    }

    /// True for an administrator, and the centre itself.
    pub fn is_admin(&self) -> bool {
        self.power == Power::Admin
    }

    pub(crate) fn is_tenant(&self) -> bool {
        self.groups().is_some()
    }

    /// The host's name, if the actor is a host.
    pub(crate) fn host(&self) -> Option<&str> {
        if let Power::Host(name) = &self.power { Some(name) } else { None }
    }

    /// True if it sees everything.
    pub fn sees_all(&self) -> bool {
        matches!(self.power, Power::Admin | Power::Reader)
    }

    /// True if it sees the objects of a group.
    pub(crate) fn sees_group(&self, group: &str) -> bool {
        self.sees_all() || self.groups().is_some_and(|groups| groups.contains(group))
    }

    /// Whether a vRNIC is within the actor's reach, by its owner. A name that is out of a host's reach is used by
    /// somebody else.
    pub(crate) fn reaches(&self, v: &v1::Vrnic) -> bool {
        match &self.power {
            Power::Admin | Power::Reader => true,
            Power::Tenant { groups, .. } => groups.contains(&v.group),
            Power::Host(host) => v.by_host && v.host == *host,
        }
    }

    pub(crate) fn needs_admin(&self, what: &str) -> Result<(), Refusal> {
        if self.is_admin() {
            return Ok(());
        }
        Err(Refusal::denied(format_args!(
            "token {} may not change {what}: that takes a token with the role admin",
            self.who
        )))
    }

    /// Refuses actors that may not change anything.
    pub(crate) fn may_change(&self) -> Result<(), Refusal> {
        match self.power {
            Power::Reader => Err(Refusal::denied(format_args!("token {} may only read", self.who))),
            _ => Ok(()),
        }
    }

    /// Refuses actors that may not see data of the whole fleet.
    pub(crate) fn needs_reader(&self, what: &str) -> Result<(), Refusal> {
        if self.sees_all() {
            return Ok(());
        }
        Err(Refusal::denied(format_args!(
            "token {} may not see {what}: that takes a token with the role admin or reader",
            self.who
        )))
    }

    /// Refuses actors that may not change objects of a group.
    pub(crate) fn may_group(&self, group: &str) -> Result<(), Refusal> {
        self.may_change()?;
        match self.groups() {
            None => Ok(()),
            Some(groups) if groups.contains(group) => Ok(()),
            Some(groups) => {
                let list: Vec<&str> = groups.iter().map(String::as_str).collect();
                Err(Refusal::denied(format_args!(
                    "token {} is for group {}, not for {group}",
                    self.who,
                    list.join(", ")
                )))
            }
        }
    }
}

/// A time in readable form, in UTC.
pub(crate) fn date(seconds: u64) -> String {
    let t = i64::try_from(seconds).ok().and_then(|s| UtcDateTime::from_unix_timestamp(s).ok());
    let t = t.unwrap_or(UtcDateTime::MAX);
    let (year, month, day) = (t.year(), u8::from(t.month()), t.day());
    format!("{year:04}-{month:02}-{day:02} {:02}:{:02}:{:02} UTC", t.hour(), t.minute(), t.second())
}

fn hash(secret: &str) -> Vec<u8> {
    Sha256::digest(secret.as_bytes()).to_vec()
}

impl State {
    /// The token with a secret.
    fn token(&self, secret: &str, now_ms: u64) -> Result<(&v1::Token, &v1::TokenRecord), Refusal> {
        let unknown = || Refusal::unknown("the token is not known here; make one with `unirdma token create`");
        let (id, _) = secret.split_once('.').ok_or_else(unknown)?;
        // The hash is computed even if there is no such token, and compared in constant time, so that the time does not
        // tell which tokens exist or where the hashes differ.
        let hash = hash(secret);
        let record = self.tokens.get(id).filter(|t| t.hash.ct_eq(&hash).into()).ok_or_else(unknown)?;
        let token = record.token.as_ref().ok_or_else(unknown)?;
        let now = now_ms / 1000;
        if token.expires != 0 && token.expires <= now {
            return Err(Refusal::unknown(format_args!(
                "token {id} expired at {}; the centre's clock says {}",
                date(token.expires),
                date(now)
            )));
        }
        Ok((token, record))
    }

    /// The actor that a token stands for.
    ///
    /// # Errors
    /// The token is unknown, or it only lets a host join.
    pub(crate) fn actor(&self, secret: &str, now_ms: u64) -> Result<Actor, Refusal> {
        let (token, record) = self.token(secret, now_ms)?;
        let any = !record.lists_hosts || token.hosts.iter().any(|h| h == ALL_HOSTS);
        let power = match token.role() {
            Role::Admin => Power::Admin,
            Role::Reader => Power::Reader,
            Role::Tenant => Power::Tenant {
                groups: token.groups.iter().cloned().collect(),
                hosts: (!any).then(|| token.hosts.iter().cloned().collect()),
            },
            Role::Join => {
                let text = format!("token {} lets a host join, and no more: `unirdma host --centre`", token.id);
                return Err(Refusal::denied(text));
            }
        };
        Ok(Actor { who: token.id.clone(), power })
    }

    /// The token by which a host may join.
    pub(crate) fn join_token(&self, secret: &str, host: &str, now_ms: u64) -> Result<&v1::Token, Refusal> {
        check_name("host", host)?;
        let (token, _) = self.token(secret, now_ms)?;
        if token.role() != Role::Join {
            return Err(Refusal::denied(format_args!(
                "token {} lets no host join: make one with `unirdma token create --role join`",
                token.id
            )));
        }
        if !token.host.is_empty() && token.host != host {
            return Err(Refusal::denied(format_args!("token {} is for host {}, not for {host}", token.id, token.host)));
        }
        Ok(token)
    }
}

impl Transaction<'_> {
    /// Makes a token, with a secret derived from `random`.
    pub fn create_token(
        &mut self,
        actor: &Actor,
        token: v1::Token,
        random: [u8; 32],
        now_ms: u64,
    ) -> Result<v1::CreateTokenResponse, Refusal> {
        let mut token = token;
        let role = Role::try_from(token.role)
            .map_err(|_| Refusal::invalid("there is no such role; use reader, tenant, admin or join"))?;
        if token.id.is_empty() {
            let id = (1..=TOKENS.all + 1).map(|n| format!("token-{n}")).find(|id| !self.state.tokens.contains_key(id));
            token.id = id.ok_or_else(|| Refusal::full("the fleet has the most tokens"))?;
        }
        check_name("token", &token.id)?;
        if token.id.contains('.') {
            return Err(Refusal::invalid("a token's name has no `.`"));
        }
        if self.state.tokens.contains_key(&token.id) {
            return Err(Refusal::conflict(format_args!("there is a token {} already", token.id)));
        }
        let room = TOKENS.room(actor, self.state.tokens.len() + 1, 0, 0);
        room.map_err(|e| Refusal::full(format_args!("{}; revoke some", e.what)))?;
        if (role == Role::Tenant) == token.groups.is_empty() {
            return Err(Refusal::invalid("the token of a tenant names its groups, and no other token does"));
        }
        if token.groups.len() > MAX_GROUPS {
            return Err(Refusal::invalid(format_args!("a token has at most {MAX_GROUPS} groups")));
        }
        for g in &token.groups {
            if !self.state.groups.contains_key(g.as_str()) {
                let shown: String = g.chars().take(40).collect();
                return Err(Refusal::not_found(format_args!("there is no group {}", shown.escape_debug())));
            }
        }
        if !token.hosts.is_empty() && role != Role::Tenant {
            return Err(Refusal::invalid("only the token of a tenant names hosts on which it may put vRNICs"));
        }
        if token.hosts.len() > MAX_GROUPS {
            return Err(Refusal::invalid(format_args!("a token has at most {MAX_GROUPS} hosts")));
        }
        token.hosts.iter().filter(|h| *h != ALL_HOSTS).try_for_each(|h| check_name("host", h))?;
        if !token.host.is_empty() {
            check_name("host", &token.host)?;
            if role != Role::Join {
                return Err(Refusal::invalid("only a token by which a host joins names a host"));
            }
        }
        if token.expires != 0 && token.expires <= now_ms / 1000 {
            return Err(Refusal::invalid(format_args!(
                "it would be expired at once: {}; the centre's clock says {}",
                date(token.expires),
                date(now_ms / 1000)
            )));
        }
        let hex: String = random.iter().map(|b| format!("{b:02x}")).collect();
        let secret = format!("{}.{hex}", token.id);
        let record = v1::TokenRecord { token: Some(token.clone()), hash: hash(&secret), lists_hosts: true };
        self.set_token(&token.id, Some(record));
        Ok(v1::CreateTokenResponse { token: Some(token), secret })
    }

    /// Revokes a token.
    pub fn revoke_token(&mut self, id: &str) -> Result<(), Refusal> {
        if !self.state.tokens.contains_key(id) {
            let shown: String = id.chars().take(40).collect();
            return Err(Refusal::not_found(format_args!("there is no token {}", shown.escape_debug())));
        }
        self.set_token(id, None);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        assert_eq!(date(0), "1970-01-01 00:00:00 UTC");
        assert_eq!(date(951_826_154), "2000-02-29 12:09:14 UTC");
        assert_eq!(date(1_795_475_580), "2026-11-23 23:13:00 UTC");
        assert!(date(u64::MAX).ends_with("UTC"));
    }
}
