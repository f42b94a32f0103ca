//! Secrets of groups, and of two groups that a rule joins. Another one is introduced in steps: all hosts take it, then all send it, then the
//! one before is dropped. A step is made when each host concerned has put the one before in force, or after a deadline.

use std::collections::BTreeSet;

use rand_chacha::ChaCha20Rng;
use rand_chacha::rand_core::Rng;

use crate::draft::Draft;
use crate::error::Refusal;
use crate::model::Kind;
use crate::state::{SecretName, State};
use crate::v1::{self, secret_record::Step};

/// How long a step waits for hosts that do not answer.
pub const STEP_DEADLINE_MS: u64 = 600_000;
/// The largest number of a secret.
const MAX_ID: u32 = 255;

impl State {
    /// Whose secrets there are to be: a group and nothing, or two groups in their order.
    fn wanted_secrets(&self) -> BTreeSet<(String, String)> {
        let has = |g: &str| self.groups.get(g).is_some_and(|g| g.object.secret);
        let own = self.groups.iter().filter(|(_, g)| g.object.secret).map(|(n, _)| (n.to_string(), String::new()));
        let joins = self.rules.values().filter(|r| r.joins()).map(|r| [&r.ends[0].group, &r.ends[1].group]);
        let pairs = joins.filter(|[a, b]| has(a) || has(b)).map(|[a, b]| (a.min(b).to_string(), a.max(b).to_string()));
        own.chain(pairs).collect()
    }

    /// The secrets of a group or of two.
    fn secrets_with(&self, of: &(String, String)) -> Vec<(SecretName, v1::SecretRecord)> {
        let (first, last) = ((of.0.clone(), of.1.clone(), 0), (of.0.clone(), of.1.clone(), u32::MAX));
        self.secrets.range(first..=last).map(|(n, s)| (n.clone(), s.clone())).collect()
    }

    /// True if a secret waits for its next step.
    pub(crate) fn has_steps(&self) -> bool {
        self.secrets.values().any(|s| s.step() != Step::Sent)
    }
}

impl Draft<'_> {
    fn new_secret(&mut self, of: &(String, String), id: u32, step: Step, rng: &mut ChaCha20Rng, now_ms: u64) {
        let mut value = vec![0; 32];
        rng.fill_bytes(&mut value);
        let key = v1::SecretKey { group: of.0.clone(), other: of.1.clone(), id };
        let (revision, since) = (self.revision(), now_ms / 1000);
        let record = v1::SecretRecord { key: Some(key), value, step: step.into(), revision, since };
        self.set_secret((of.0.clone(), of.1.clone(), id), Some(record));
    }

    /// Makes the secrets that are wanted, and drops those that are not.
    pub fn reconcile_secrets(&mut self, rng: &mut ChaCha20Rng, now_ms: u64) {
        if !self.changed().keys().any(|(kind, _)| matches!(kind, Kind::Group | Kind::Rule)) {
            return;
        }
        let mut wanted = self.state.wanted_secrets();
        let names: Vec<SecretName> = self.state.secrets.keys().cloned().collect();
        for name in names {
            let of = (name.0.clone(), name.1.clone());
            if wanted.contains(&of) {
                continue;
            }
            self.set_secret(name, None);
        }
        wanted.retain(|of| self.state.secrets_with(of).is_empty());
        for of in wanted {
            self.new_secret(&of, 1, Step::Sent, rng, now_ms);
        }
    }

    /// Begins to introduce another secret of a group, and of the pairs that it is in. Gives the number of the group's own.
    pub fn rotate(&mut self, group: &str, rng: &mut ChaCha20Rng, now_ms: u64) -> Result<u32, Refusal> {
        let Some(g) = self.state.groups.get(group) else {
            return Err(Refusal::not_found(format_args!("there is no group {group}")));
        };
        if !g.object.secret {
            return Err(Refusal::conflict(format_args!(
                "group {group} has no secret; declare it with `secret = true`"
            )));
        }
        let all: Vec<_> = self.state.wanted_secrets().into_iter().filter(|(a, b)| a == group || b == group).collect();
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

    /// Makes the steps that are due. `applied` says which revision a host has put in force.
    pub fn make_steps(&mut self, applied: &dyn Fn(&str) -> u64, now_ms: u64) -> Vec<String> {
        let (now, revision) = (now_ms / 1000, self.revision());
        let due: Vec<(SecretName, v1::SecretRecord)> = self
            .state
            .secrets
            .iter()
            .filter(|(_, s)| s.step() != Step::Sent)
            .filter(|(n, s)| {
                let hosts = self.state.hosts_with_secret(&n.0, &n.1);
                now >= s.since + STEP_DEADLINE_MS / 1000 || hosts.iter().all(|h| applied(h) >= s.revision)
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
