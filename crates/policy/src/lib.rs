//! Rules between groups of vRNICs: who may begin to talk to whom. `docs/rules.md` has the meaning in full.
//!
//! This crate has the rules as data, their text, and their evaluation. It knows no host, no connection and no packet, and depends on no other
//! crate of the workspace, so that the control centre, the supervisor, the workers and the tests all ask the same code.
//!
//! A [`Policy`] answers in a time that does not depend on how many rules there are.

mod policy;
mod text;

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

pub use policy::{Party, Policy};
pub use text::ParseError;

/// Whom a rule concerns. Groups are named by `G`: by their names where people write rules, by their numbers in workers.
/// Addresses are of type `A`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Selector<G = String, A = IpAddr> {
    /// All vRNICs of a group.
    Group(G),
    /// The vRNIC of a group that has an address.
    Vrnic(G, A),
}

impl<G, A> Selector<G, A> {
    /// The group of those whom it selects.
    pub fn group(&self) -> &G {
        match self {
            Selector::Group(g) | Selector::Vrnic(g, _) => g,
        }
    }

    fn translate<H, B>(&self, group: impl Fn(&G) -> Option<H>, address: impl Fn(&A) -> B) -> Option<Selector<H, B>> {
        Some(match self {
            Selector::Group(g) => Selector::Group(group(g)?),
            Selector::Vrnic(g, a) => Selector::Vrnic(group(g)?, address(a)),
        })
    }
}

/// The verdict of a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Action {
    /// `from` may begin to talk to `to`.
    Allow,
    /// It may not. Of two rules with one priority this one wins.
    Deny,
}

/// A rule.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Rule<G = String, A = IpAddr> {
    /// Those who begin.
    pub from: Selector<G, A>,
    /// Those with whom they begin.
    pub to: Selector<G, A>,
    /// Whether they may.
    pub action: Action,
    /// The rule holds in the other direction, too.
    #[serde(default)]
    pub both: bool,
    /// The rule with the highest priority wins.
    #[serde(default)]
    pub priority: u16,
}

impl<G, A> Rule<G, A> {
    /// This rule with other names of groups and addresses; `None` if one of its groups has no other name.
    pub fn translate<H, B>(&self, group: impl Fn(&G) -> Option<H>, address: impl Fn(&A) -> B) -> Option<Rule<H, B>> {
        let (from, to) = (self.from.translate(&group, &address)?, self.to.translate(&group, &address)?);
        Some(Rule { from, to, action: self.action, both: self.both, priority: self.priority })
    }

    /// True if it concerns vRNICs of this group.
    pub fn concerns(&self, group: &G) -> bool
    where
        G: PartialEq,
    {
        self.from.group() == group || self.to.group() == group
    }

    /// The group that this rule joins with `group`: it allows something between the two.
    pub fn joins(&self, group: &G) -> Option<&G>
    where
        G: PartialEq,
    {
        let (from, to) = (self.from.group(), self.to.group());
        let other = if from == group { to } else { from };
        (self.action == Action::Allow && self.concerns(group) && other != group).then_some(other)
    }
}
