//! The evaluation of rules.

use std::collections::{HashMap, HashSet};
use std::hash::Hash;

use crate::{Action, Rule, Selector};

/// A vRNIC to ask a [`Policy`] about: its group, and its known addresses. A host knows all addresses of its own vRNICs,
/// and of a vRNIC of another host the one address that it deals with.
#[derive(Debug)]
pub struct Party<'a, G, A> {
    /// Its group.
    pub group: &'a G,
    /// Its addresses.
    pub addresses: &'a [A],
}

// Derived, these would need a group that can be copied.
impl<G, A> Clone for Party<'_, G, A> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<G, A> Copy for Party<'_, G, A> {}

/// The side that begins, and the other side.
type Pair<G, A> = (Selector<G, A>, Selector<G, A>);

/// Rules in the form in which they are evaluated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy<G: Eq + Hash, A: Eq + Hash> {
    /// For each pair, the winner of the rules for exactly these two selectors: its priority and its verdict.
    pairs: HashMap<Pair<G, A>, (u16, Action)>,
    /// vRNICs that a rule names one by one. All others are known by their groups only.
    named: HashSet<(G, A)>,
}

impl<G: Eq + Hash, A: Eq + Hash> Default for Policy<G, A> {
    fn default() -> Self {
        Policy { pairs: HashMap::new(), named: HashSet::new() }
    }
}

impl<G: Clone + Eq + Hash, A: Copy + Eq + Hash> Policy<G, A> {
    /// Prepares rules. Their order does not matter.
    pub fn new<'a>(rules: impl IntoIterator<Item = &'a Rule<G, A>>) -> Self
    where
        G: 'a,
        A: 'a,
    {
        let mut policy = Policy::default();
        for rule in rules {
            for s in [&rule.from, &rule.to] {
                if let Selector::Vrnic(g, a) = s {
                    policy.named.insert((g.clone(), *a));
                }
            }
            let said = (rule.priority, rule.action);
            let mut note = |from: &Selector<G, A>, to: &Selector<G, A>| {
                let entry = policy.pairs.entry((from.clone(), to.clone())).or_insert(said);
                *entry = said.max(*entry);
            };
            note(&rule.from, &rule.to);
            if rule.both {
                note(&rule.to, &rule.from);
            }
        }
        policy
    }

    /// True if there are no rules: within a group everything is allowed, and between groups nothing.
    pub fn is_empty(&self) -> bool {
        self.pairs.is_empty()
    }

    /// True if `from` may begin to talk to `to`. The matching rule with the highest priority decides; among several, a
    /// denial wins. If none matches: within a group yes, between groups no.
    pub fn may_begin(&self, from: Party<'_, G, A>, to: Party<'_, G, A>) -> bool {
        let default = from.group == to.group;
        if self.pairs.is_empty() {
            return default;
        }
        let ends = |p: Party<'_, G, A>| -> Vec<Selector<G, A>> {
            let named = p.addresses.iter().filter(|&&a| self.named.contains(&(p.group.clone(), a)));
            let named = named.map(|&a| Selector::Vrnic(p.group.clone(), a));
            std::iter::once(Selector::Group(p.group.clone())).chain(named).collect()
        };
        let to = ends(to);
        let pairs = ends(from).into_iter().flat_map(|f| to.iter().map(move |t| (f.clone(), t.clone())));
        let said = pairs.filter_map(|pair| self.pairs.get(&pair)).max();
        said.map_or(default, |&(_, action)| action == Action::Allow)
    }

    /// True if one of the two may begin to talk to the other one.
    pub fn may_talk(&self, a: Party<'_, G, A>, b: Party<'_, G, A>) -> bool {
        self.may_begin(a, b) || self.may_begin(b, a)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Asks rules, in their text form, whether vRNIC `from` may begin to talk to vRNIC `to`.
    fn ask(rules: &[&str], from: (&str, &[u8]), to: (&str, &[u8])) -> bool {
        let rules: Vec<Rule> = rules.iter().map(|r| r.parse().unwrap()).collect();
        let policy = Policy::new(&rules);
        let ips = |last: &[u8]| last.iter().map(|&n| [10, 0, 0, n].into()).collect::<Vec<_>>();
        let (a, b, from_ips, to_ips) = (from.0.to_string(), to.0.to_string(), ips(from.1), ips(to.1));
        policy.may_begin(Party { group: &a, addresses: &from_ips }, Party { group: &b, addresses: &to_ips })
    }

    #[test]
    fn without_a_rule_groups_are_kept_apart_and_members_of_one_are_not() {
        assert!(ask(&[], ("red", &[1]), ("red", &[2])));
        assert!(!ask(&[], ("red", &[1]), ("blue", &[2])));
        let other = ["allow from group:red to group:green both", "deny from group:green to group:green"];
        assert!(ask(&other, ("red", &[1]), ("red", &[2])) && !ask(&other, ("red", &[1]), ("blue", &[2])));
    }

    #[test]
    fn one_way_is_one_way_and_both_is_both() {
        let (one, both) = ("allow from group:red to group:blue", "allow from group:red to group:blue both");
        let (red, blue) = (("red", &[1][..]), ("blue", &[2][..]));
        assert_eq!([ask(&[one], red, blue), ask(&[one], blue, red)], [true, false]);
        assert_eq!([ask(&[both], red, blue), ask(&[both], blue, red)], [true, true]);
        // A denial in one direction does not affect the other one.
        let denied = [both, "deny from group:blue to group:red"];
        assert_eq!([ask(&denied, red, blue), ask(&denied, blue, red)], [true, false]);
    }

    #[test]
    fn the_highest_priority_wins_and_a_denial_among_equals() {
        let allow = "allow from group:red to group:blue priority 7";
        for (deny, allowed) in [(6, true), (7, false), (8, false), (65535, false)] {
            // A rule for one vRNIC weighs as much as one for its group: only the priority counts.
            for who in
                ["group:red to group:blue", "vrnic:red/10.0.0.1 to group:blue", "group:red to vrnic:blue/10.0.0.2"]
            {
                let deny = format!("deny from {who} priority {deny}");
                assert_eq!(ask(&[allow, &deny], ("red", &[1]), ("blue", &[2])), allowed, "{deny}");
                assert_eq!(ask(&[&deny, allow], ("red", &[1]), ("blue", &[2])), allowed, "{deny}, first");
            }
        }
    }

    #[test]
    fn a_vrnic_is_selected_by_any_of_its_addresses_and_by_its_own_group_only() {
        let rule = ["allow from vrnic:red/10.0.0.1 to vrnic:blue/10.0.0.2"];
        for (from, to, allowed) in [
            (("red", &[1][..]), ("blue", &[2][..]), true),
            (("red", &[9, 1]), ("blue", &[2, 8]), true),
            (("red", &[9]), ("blue", &[2]), false),
            (("red", &[1]), ("blue", &[9]), false),
            (("green", &[1]), ("blue", &[2]), false),
            (("red", &[1]), ("green", &[2]), false),
        ] {
            assert_eq!(ask(&rule, from, to), allowed, "{from:?} {to:?}");
        }
        let within = ["deny from vrnic:red/10.0.0.1 to group:red"];
        assert!(!ask(&within, ("red", &[1]), ("red", &[2])) && ask(&within, ("red", &[2]), ("red", &[1])));
    }

    #[test]
    fn what_joins_groups_is_a_rule_that_allows_something_between_them() {
        let rule = |text: &str| text.parse::<Rule>().unwrap();
        let (red, blue, green) = ("red".to_string(), "blue".to_string(), "green".to_string());
        let r = rule("allow from vrnic:red/10.0.0.1 to group:blue");
        assert_eq!((r.joins(&red), r.joins(&blue), r.joins(&green)), (Some(&blue), Some(&red), None));
        assert!(r.concerns(&red) && r.concerns(&blue) && !r.concerns(&green));
        assert_eq!(rule("deny from group:red to group:blue").joins(&red), None);
        assert_eq!(rule("allow from group:red to group:red").joins(&red), None);
        let numbers = |g: &String| if *g == red { Some(1) } else { (*g == blue).then_some(2) };
        assert_eq!(r.translate(numbers, |a| *a).unwrap().to, Selector::Group(2));
        assert_eq!(r.translate(|g| (*g == red).then_some(1), |a| *a), None);
    }
}
