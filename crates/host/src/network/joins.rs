//! Groups that rules join: what one of them knows of the others.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use unirdma_policy::{Action, Rule, Selector};
use unirdma_rnic::Route;

use super::directory::Directory;
use crate::tunnel::Members;

/// A group that rules join with another one, as that one sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct JoinedGroup {
    vni: u32,
    /// Where the addresses are that the other one reaches.
    pub peers: Vec<(IpAddr, Route)>,
    /// Addresses that mean somebody else there.
    pub hidden: Vec<IpAddr>,
}

impl JoinedGroup {
    /// Where its members are, for the tunnel.
    pub fn members(&self, name: &str) -> Members {
        let mut members = Members::new(name, self.vni);
        for (address, route) in self.peers.iter().filter(|(_, route)| !route.foreign) {
            members.hosts.insert(route.host);
            members.places.insert(*address, route.host);
        }
        members
    }
}

impl Directory {
    /// True if a rule lets vRNICs of two groups talk.
    pub fn joins_any(&self) -> bool {
        self.rules.iter().any(|r| r.action == Action::Allow && r.from.group() != r.to.group())
    }

    /// The rules that concern a group, which call groups by their numbers.
    pub fn rules_of(&self, group: &str) -> Vec<Rule<u32>> {
        let group = group.to_string();
        let concern = self.rules.iter().filter(|r| r.concerns(&group));
        concern.filter_map(|r| r.translate(|name| self.vni(name), |a| *a)).collect()
    }

    /// The groups that rules join with a group, by their names. An address of the group's own means that, whoever else has it; of two
    /// groups that are joined with it, that one counts whose name comes first.
    pub fn joined_with(&self, group: &str) -> BTreeMap<String, JoinedGroup> {
        let group = group.to_string();
        let names: BTreeSet<&String> = self.rules.iter().filter_map(|r| r.joins(&group)).collect();
        if names.is_empty() {
            return BTreeMap::new();
        }
        let all_of = |name: &str| {
            self.groups
                .get(name)
                .into_iter()
                .flat_map(|k| k.here.iter().chain(&k.addresses).map(|(&a, p)| (a, k.route(p))))
        };
        let mut known: BTreeSet<IpAddr> = all_of(&group).map(|(a, _)| a).collect();
        let mut joined = BTreeMap::new();
        for name in names {
            let Some(vni) = self.vni(name) else { continue };
            // Of the other group only those count that a rule selects.
            let (mut all, mut named) = (false, BTreeSet::new());
            for r in self.rules.iter().filter(|r| r.joins(&group) == Some(name)) {
                match if r.from.group() == name { &r.from } else { &r.to } {
                    Selector::Group(_) => all = true,
                    Selector::Vrnic(_, address) => _ = named.insert(*address),
                }
            }
            let mut of_name = JoinedGroup { vni, ..JoinedGroup::default() };
            for (address, route) in all_of(name).filter(|(a, _)| all || named.contains(a)) {
                match known.insert(address) {
                    true => of_name.peers.push((address, route)),
                    false => of_name.hidden.push(address),
                }
            }
            joined.insert(name.clone(), of_name);
        }
        joined
    }

    /// The groups with these names have changed: their workers, and those of groups that are joined with them, need whole plans if there are
    /// such. True if so.
    pub fn doubt_joined(&mut self, changed: &BTreeSet<String>) -> bool {
        let joins = self.rules.iter().filter(|r| r.action == Action::Allow && r.from.group() != r.to.group());
        let concerned = joins.filter(|r| changed.contains(r.from.group()) || changed.contains(r.to.group()));
        let names: BTreeSet<String> = concerned.flat_map(|r| [r.from.group(), r.to.group()]).cloned().collect();
        names.iter().for_each(|name| self.forget_worker(name));
        !names.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::network::directory::Tidings;
    use crate::peers::Peers;

    fn directory(text: &str, own: IpAddr) -> Directory {
        let mut d = Directory::new(&[own]);
        d.apply(Peers::parse(text, &[own]).unwrap().changes(&Peers::default()));
        d
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    const TEXT: &str = "10.0.0.1 red 192.168.7.1\n10.0.0.2 red 192.168.7.2\n10.0.0.2 blue 192.168.7.1\n10.0.0.3 blue 192.168.7.2\n\
        10.0.0.4 blue 192.168.7.1\n10.0.0.4 green 192.168.7.2\n10.0.0.5 green 192.168.7.2\n10.0.0.9 far 192.168.7.2\n\
        rule allow from group:red to group:blue both\nrule allow from vrnic:green/10.0.0.4 to group:red priority 7\n\
        rule deny from group:far to group:red # and no more\n";

    #[test]
    fn rules_join_groups_and_an_own_address_hides_that_of_another_group() {
        let (own, other) = (ip("192.168.7.1"), ip("192.168.7.2"));
        let mut d = directory(TEXT, own);
        let blue = d.vni("blue").unwrap();
        let red = d.vni("red").unwrap();
        let routes: Vec<_> = d.plan("red").routes.iter().map(|(a, r)| (*a, r.host, r.vni)).collect();
        // Blue's 10.0.0.2 is red's own here, and blue's 10.0.0.4 comes before green's. Nothing is said of green's 10.0.0.5.
        assert_eq!(routes, [(ip("10.0.0.2"), other, red), (ip("10.0.0.4"), own, blue), (ip("10.0.0.3"), other, blue)]);
        let joined = d.joined_with("red");
        assert_eq!(joined.keys().collect::<Vec<_>>(), ["blue", "green"]);
        assert_eq!((&joined["blue"].hidden, &joined["green"].hidden), (&vec![ip("10.0.0.2")], &vec![ip("10.0.0.4")]));
        assert_eq!(joined["blue"].members("blue").hosts, [own, other].into());
        assert_eq!(d.joined_with("far"), BTreeMap::new());
        assert_eq!((d.rules_of("red").len(), d.rules_of("green").len(), d.rules_of("x").len()), (3, 1, 0));
        assert_eq!(d.layers(), [own, other].into(), "this host sends to itself");
    }

    #[test]
    fn what_changes_in_a_group_is_told_to_those_that_are_joined_with_it() {
        let own = ip("192.168.7.1");
        let mut d = directory(TEXT, own);
        let before = Peers::parse(TEXT, &[own]).unwrap();
        for group in ["red", "blue", "far"] {
            assert!(matches!(d.tidings(group), Some(Tidings::Plan(_))) && !d.has_tidings(group));
        }
        let text = TEXT.replace("10.0.0.4 blue 192.168.7.1", "10.0.0.4 blue 192.168.7.2");
        let after = Peers::parse(&text, &[own]).unwrap();
        d.apply(after.changes(&before));
        let Some(Tidings::Plan(plan)) = d.tidings("red") else { panic!("no plan") };
        assert!(plan.routes.iter().any(|(a, r)| *a == ip("10.0.0.4") && r.host == ip("192.168.7.2")));
        assert!(d.has_tidings("blue") && !d.has_tidings("far"));
        // Without the rules they know of each other no more.
        let alone: String = text.lines().filter(|l| !l.starts_with("rule allow")).map(|l| format!("{l}\n")).collect();
        d.apply(Peers::parse(&alone, &[own]).unwrap().changes(&after));
        let Some(Tidings::Plan(plan)) = d.tidings("red") else { panic!("no plan") };
        assert_eq!((plan.routes.len(), plan.joined.len(), plan.rules.len()), (1, 0, 1));
        assert_eq!(d.layers(), [ip("192.168.7.2")].into());
    }
}
