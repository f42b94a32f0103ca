//! Secrets of groups, and of pairs of groups that a rule joins. A secret is replaced in steps: all hosts accept the new
//! one, then all hosts send with it, then the old one is dropped. The next step is made when each concerned host has
//! put the one before in force, or after a deadline.

use std::collections::BTreeSet;

use rand_chacha::ChaCha20Rng;
use rand_chacha::rand_core::Rng;

use crate::error::Refusal;
use crate::model::{Kind, Selector, selector};
use crate::state::{SecretName, State};
use crate::transaction::Transaction;
use crate::v1::{self, object::Object, secret_record::Step};

/// How long a step waits for hosts that do not answer.
pub const STEP_DEADLINE_MS: u64 = 600_000;
/// The largest number of a secret.
const MAX_ID: u32 = 255;

impl State {
    /// Whether a group (with an empty second name) or a pair of groups must have a secret.
    fn wants_secret(&self, of: &(String, String)) -> bool {
        let has = |g: &str| self.groups.get(g).is_some_and(|g| g.object.secret);
        let (a, b) = of;
        has(a) && b.is_empty()
            || (has(a) || has(b)) && self.groups.get(a.as_str()).is_some_and(|g| g.joins.contains_key(b.as_str()))
    }

    /// The group and the pairs whose secrets may change with a group.
    fn secrets_beside<'a>(&'a self, group: &'a str) -> impl Iterator<Item = (String, String)> + 'a {
        let pairs = self.joins_of(group).map(|(far, _)| pair(group, far));
        pairs.chain([(group.to_owned(), String::new())])
    }

    /// The secrets of a group or of a pair.
    fn secrets_with(&self, of: &(String, String)) -> Vec<(SecretName, v1::SecretRecord)> {
        let (first, last) = ((of.0.clone(), of.1.clone(), 0), (of.0.clone(), of.1.clone(), u32::MAX));
        self.secrets.range(first..=last).map(|(n, s)| (n.clone(), s.clone())).collect()
    }

    /// True if a secret waits for its next step.
    pub(crate) fn has_steps(&self) -> bool {
        self.secrets.values().any(|s| s.step() != Step::Sent)
    }
}

/// Two groups in order.
fn pair(a: &str, b: &str) -> (String, String) {
    (a.min(b).to_owned(), a.max(b).to_owned())
}

impl Transaction<'_> {
    fn new_secret(&mut self, of: &(String, String), id: u32, step: Step, rng: &mut ChaCha20Rng, now_ms: u64) {
        let mut value = vec![0; 32];
        rng.fill_bytes(&mut value);
        let key = v1::SecretKey { group: of.0.clone(), other: of.1.clone(), id };
        let (revision, since) = (self.revision(), now_ms / 1000);
        let record = v1::SecretRecord { key: Some(key), value, step: step.into(), revision, since };
        self.set_secret((of.0.clone(), of.1.clone(), id), Some(record));
    }

    /// Makes missing secrets that the draft's changes require, and drops secrets that they make superfluous.
    pub fn reconcile_secrets(&mut self, rng: &mut ChaCha20Rng, now_ms: u64) {
        for of in self.secrets_concerned() {
            let there = self.state.secrets_with(&of);
            match self.state.wants_secret(&of) {
                true if there.is_empty() => self.new_secret(&of, 1, Step::Sent, rng, now_ms),
                true => {}
                false => there.into_iter().for_each(|(name, _)| self.set_secret(name, None)),
            }
        }
    }

    /// Groups and pairs whose secrets may have to be made or dropped because of the draft's changes.
    fn secrets_concerned(&self) -> BTreeSet<(String, String)> {
        let mut concerned = BTreeSet::new();
        let changed = self.changed();
        // The group at an end of a rule that existed before this change. The vRNIC at that end may have been removed by
        // the change.
        let group_before = |end: &str| match selector(end).ok()? {
            Selector::Group(g) => Some(g),
            Selector::Vrnic(v) => match changed.get(&(Kind::Vrnic, v.clone())) {
                Some(Some((Object::Vrnic(old), _))) => Some(old.group.clone()),
                _ => self.state.vrnics.get(v.as_str()).map(|v| v.group.to_string()),
            },
        };
        for ((kind, name), before) in &changed {
            match kind {
                Kind::Group => concerned.extend(self.state.secrets_beside(name)),
                Kind::Rule => {
                    if let Some((Object::Rule(old), _)) = before
                        && let (Some(a), Some(b)) = (group_before(&old.from), group_before(&old.to))
                    {
                        concerned.insert(pair(&a, &b));
                    }
                    let now = self.state.rules.get(name.as_str());
                    concerned.extend(now.map(|r| pair(&r.ends[0].group, &r.ends[1].group)));
                }
                Kind::Host | Kind::Vrnic => {}
            }
        }
        // Within a group, the group's own secret is used.
        concerned.retain(|(a, b)| a != b);
        concerned
    }

    /// Begins to replace the secrets of a group and of its pairs. Returns the number of the group's new secret.
    pub fn rotate(&mut self, group: &str, rng: &mut ChaCha20Rng, now_ms: u64) -> Result<u32, Refusal> {
        let Some(g) = self.state.groups.get(group) else {
            return Err(Refusal::not_found(format_args!("there is no group {group}")));
        };
        if !g.object.secret {
            return Err(Refusal::conflict(format_args!(
                "group {group} has no secret; declare it with `secret = true`"
            )));
        }
        let all: BTreeSet<_> = self.state.secrets_beside(group).filter(|of| self.state.wants_secret(of)).collect();
        let mut own = 0;
        for of in all {
            let there = self.state.secrets_with(&of);
            if there.iter().any(|(_, s)| s.step() != Step::Sent) {
                if of.1.is_empty() {
                    let text = format!(
                        "another secret of group {group} is being introduced already; wait until all hosts have it"
                    );
                    return Err(Refusal::conflict(text));
                }
                continue;
            }
            let last = there.iter().map(|(n, _)| n.2).max().unwrap_or(0);
            let id = last % MAX_ID + 1;
            self.new_secret(&of, id, Step::Taken, rng, now_ms);
            if of.1.is_empty() {
                own = id;
            }
        }
        Ok(own)
    }

    /// Makes the steps that are due.
    pub fn make_steps(&mut self, now_ms: u64) -> Vec<String> {
        let (now, revision) = (now_ms / 1000, self.revision());
        let due: Vec<(SecretName, v1::SecretRecord)> = self
            .state
            .secrets
            .iter()
            .filter(|(_, s)| s.step() != Step::Sent)
            .filter(|(n, s)| {
                let hosts = self.state.hosts_with_secret(&n.0, &n.1);
                now >= s.since + STEP_DEADLINE_MS / 1000 || hosts.iter().all(|h| self.facts.applied(h) >= s.revision)
            })
            .map(|(n, s)| (n.clone(), s.clone()))
            .collect();
        let mut lines = Vec::new();
        for (name, secret) in due {
            let of = (name.0.clone(), name.1.clone());
            let of_text = if of.1.is_empty() { of.0.clone() } else { format!("{} and {}", of.0, of.1) };
            if secret.step() == Step::Old {
                lines.push(format!("secret {} of {of_text} is dropped", name.2));
                self.set_secret(name, None);
                continue;
            }
            lines.push(format!("secret {} of {of_text} is sent by all hosts", name.2));
            for (other, old) in self.state.secrets_with(&of).into_iter().filter(|(_, s)| s.step() == Step::Sent) {
                self.set_secret(other, Some(v1::SecretRecord { step: Step::Old.into(), revision, since: now, ..old }));
            }
            self.set_secret(name, Some(v1::SecretRecord { step: Step::Sent.into(), revision, since: now, ..secret }));
        }
        lines
    }
}
