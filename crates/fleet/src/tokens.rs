//! Who calls: tokens with their roles, and hosts. Of a token only the hash is kept.

use std::collections::BTreeSet;

use sha2::{Digest, Sha256};

use crate::draft::{Draft, Plan};
use crate::error::Refusal;
use crate::model::check_name;
use crate::state::State;
use crate::v1::{self, Role};

/// Most tokens of a fleet.
const MAX_TOKENS: usize = 10_000;
/// Most groups of a tenant's token.
const MAX_GROUPS: usize = 1_000;

/// Somebody who calls, and what it may do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Actor {
    who: String,
    power: Power,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Power {
    Admin,
    Reader,
    Tenant(BTreeSet<String>),
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

    /// What it is called in the audit log.
    pub fn who(&self) -> &str {
        &self.who
    }

    /// True for an administrator.
    pub fn is_admin(&self) -> bool {
        self.power == Power::Admin
    }

    pub(crate) fn is_tenant(&self) -> bool {
        matches!(self.power, Power::Tenant(_))
    }

    /// The host that it is.
    pub(crate) fn host(&self) -> Option<&str> {
        if let Power::Host(name) = &self.power { Some(name) } else { None }
    }

    /// True if it sees everything.
    pub(crate) fn sees_all(&self) -> bool {
        matches!(self.power, Power::Admin | Power::Reader)
    }

    /// True if it sees what is in a group.
    pub(crate) fn sees_group(&self, group: &str) -> bool {
        self.sees_all() || matches!(&self.power, Power::Tenant(groups) if groups.contains(group))
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

    /// Refuses who may change nothing at all.
    pub(crate) fn may_change(&self) -> Result<(), Refusal> {
        match self.power {
            Power::Reader => Err(Refusal::denied(format_args!("token {} may only read", self.who))),
            _ => Ok(()),
        }
    }

    /// Refuses who may not see what belongs to all.
    pub(crate) fn needs_reader(&self, what: &str) -> Result<(), Refusal> {
        if self.sees_all() {
            return Ok(());
        }
        Err(Refusal::denied(format_args!(
            "token {} may not see {what}: that takes a token with the role admin or reader",
            self.who
        )))
    }

    /// Refuses who may not change what is in a group.
    pub(crate) fn may_group(&self, group: &str) -> Result<(), Refusal> {
        self.may_change()?;
        match &self.power {
            Power::Admin | Power::Host(_) | Power::Reader => Ok(()),
            Power::Tenant(groups) if groups.contains(group) => Ok(()),
            Power::Tenant(groups) => {
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

/// A time as people write it, in UTC.
pub(crate) fn date(seconds: u64) -> String {
    let (days, rest) = ((seconds / 86_400).min(3_000_000), seconds % 86_400);
    // Days since 1 March of the year 0, in eras of 400 years: the civil calendar without tables.
    let z = days + 719_468;
    let (era, doe) = (z / 146_097, z % 146_097);
    let yoe = (doe - doe / 1_460 + doe / 36_524 - doe / 146_096) / 365;
    let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
    let mp = (5 * doy + 2) / 153;
    let (day, month) = (doy - (153 * mp + 2) / 5 + 1, if mp < 10 { mp + 3 } else { mp - 9 });
    let year = yoe + era * 400 + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02} {:02}:{:02}:{:02} UTC", rest / 3600, rest / 60 % 60, rest % 60)
}

fn hash(secret: &str) -> Vec<u8> {
    Sha256::digest(secret.as_bytes()).to_vec()
}

/// Compares without telling by its time where they differ.
fn same(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |all, (x, y)| all | (x ^ y)) == 0
}

impl State {
    /// The token of a secret.
    fn token(&self, secret: &str, now_ms: u64) -> Result<&v1::Token, Refusal> {
        let unknown = || Refusal::unknown("the token is not known here; make one with `unirdma token create`");
        let (id, _) = secret.split_once('.').ok_or_else(unknown)?;
        // Made also if there is no such token, so that the time does not tell which there are.
        let hash = hash(secret);
        let record = self.tokens.get(id).filter(|t| same(&t.hash, &hash)).ok_or_else(unknown)?;
        let token = record.token.as_ref().ok_or_else(unknown)?;
        let now = now_ms / 1000;
        if token.expires != 0 && token.expires <= now {
            return Err(Refusal::unknown(format_args!(
                "token {id} expired at {}; the centre's clock says {}",
                date(token.expires),
                date(now)
            )));
        }
        Ok(token)
    }

    /// Who calls with this token.
    ///
    /// # Errors
    /// Nobody does, or the token lets a host join and no more.
    pub(crate) fn actor(&self, secret: &str, now_ms: u64) -> Result<Actor, Refusal> {
        let token = self.token(secret, now_ms)?;
        let power = match token.role() {
            Role::Admin => Power::Admin,
            Role::Reader => Power::Reader,
            Role::Tenant => Power::Tenant(token.groups.iter().cloned().collect()),
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
        let token = self.token(secret, now_ms)?;
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

impl Draft<'_> {
    /// Keeps a token. Its secret has been made of `random`.
    pub fn create_token(
        &mut self,
        token: v1::Token,
        random: [u8; 32],
        now_ms: u64,
    ) -> Result<v1::CreateTokenResponse, Refusal> {
        let mut token = token;
        let role = Role::try_from(token.role)
            .map_err(|_| Refusal::invalid("there is no such role; use reader, tenant, admin or join"))?;
        if token.id.is_empty() {
            let id = (1..=MAX_TOKENS + 1).map(|n| format!("token-{n}")).find(|id| !self.state.tokens.contains_key(id));
            token.id = id.ok_or_else(|| Refusal::full("the fleet has the most tokens"))?;
        }
        check_name("token", &token.id)?;
        if token.id.contains('.') {
            return Err(Refusal::invalid("a token's name has no `.`"));
        }
        if self.state.tokens.contains_key(&token.id) {
            return Err(Refusal::conflict(format_args!("there is a token {} already", token.id)));
        }
        if self.state.tokens.len() >= MAX_TOKENS {
            return Err(Refusal::full(format_args!("the fleet has {MAX_TOKENS} tokens, the most; revoke some")));
        }
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
        let record = v1::TokenRecord { token: Some(token.clone()), hash: hash(&secret) };
        self.set_token(&token.id, Some(record));
        Ok(v1::CreateTokenResponse { token: Some(token), secret })
    }

    /// Takes a token away.
    pub fn revoke_token(mut self, actor: &Actor, id: &str, now_ms: u64) -> Result<Option<Plan>, Refusal> {
        if !self.state.tokens.contains_key(id) {
            let shown: String = id.chars().take(40).collect();
            return Err(Refusal::not_found(format_args!("there is no token {}", shown.escape_debug())));
        }
        self.set_token(id, None);
        Ok(self.finish(actor.who(), now_ms, vec![format!("revoked token {id}")]))
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
