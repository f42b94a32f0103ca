//! Rules between groups of vRNICs: which side may begin to talk to which. `docs/rules.md` has the full meaning.
//!
//! This crate has the rules as data, their text, and their evaluation. It knows no host, no connection and no packet,
//! and depends on no other crate of the workspace, so that the control centre, the supervisor, the workers and the
//! tests all ask the same code.
//!
//! The time of an answer of a [`Policy`] does not depend on the number of rules.

mod policy;
mod text;

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

pub use policy::{Party, Policy};
pub use text::ParseError;

/// The vRNICs that a rule concerns. `G` is the type of a group's name: a string where people write rules, a number in
/// workers. Addresses are of type `A`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Selector<G = String, A = IpAddr> {
    /// All vRNICs of a group.
    Group(G),
    /// The vRNIC of a group that has an address.
    Vrnic(G, A),
}

impl<G, A> Selector<G, A> {
    /// The group of the vRNICs that it selects.
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
    /// The vRNICs that begin.
    pub from: Selector<G, A>,
    /// The vRNICs that they talk to.
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

    /// The other group, if this rule allows something between it and `group`.
    pub fn joins(&self, group: &G) -> Option<&G>
    where
        G: PartialEq,
    {
        let (from, to) = (self.from.group(), self.to.group());
        let other = if from == group { to } else { from };
        (self.action == Action::Allow && self.concerns(group) && other != group).then_some(other)
    }
}
