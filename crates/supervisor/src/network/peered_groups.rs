//! Rules between groups, and the views of other groups that they give to a group.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use unirdma_policy::{Action, Rule};
use unirdma_rnic::Route;

use unirdma_ipc::network::Members;

/// The present rules, by the groups that they concern.
#[derive(Default)]
pub(super) struct Rules {
    /// How often each rule was added. A rule between two groups is listed for both.
    of: BTreeMap<String, BTreeMap<Rule, usize>>,
    /// Number of rules that join two groups.
    joining: usize,
}

impl Rules {
    /// Adds or removes a rule once; true if it has come into force or has ceased to be in force.
    pub fn set(&mut self, rule: &Rule, there: bool) -> bool {
        let mut changed = false;
        let ends: BTreeSet<&String> = [rule.from.group(), rule.to.group()].into();
        for group in &ends {
            let of_group = self.of.entry((*group).clone()).or_default();
            let times = of_group.entry(rule.clone()).or_default();
            let before = *times;
            *times = if there { before + 1 } else { before.saturating_sub(1) };
            let gone = *times == 0;
            changed = (before == 0) != gone;
            if gone {
                of_group.remove(rule);
            }
            if of_group.is_empty() {
                self.of.remove(*group);
            }
        }
        if changed && rule.action == Action::Allow && ends.len() == 2 {
            self.joining = if there { self.joining + 1 } else { self.joining - 1 };
        }
        changed
    }

    /// True if any rule joins two groups.
    pub fn join_any(&self) -> bool {
        self.joining > 0
    }

    /// The rules that concern a group.
    pub fn of(&self, group: &str) -> impl Iterator<Item = &Rule> {
        self.of.get(group).into_iter().flat_map(BTreeMap::keys)
    }

    /// All rules, in arbitrary order.
    pub fn all(&self) -> BTreeSet<&Rule> {
        self.of.values().flat_map(BTreeMap::keys).collect()
    }
}

/// A group's view of other groups.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct View {
    /// The groups that rules join with it.
    pub joined: BTreeMap<String, JoinedGroup>,
    /// The rules that concern it. They name groups by their numbers.
    pub rules: Vec<Rule<u32>>,
}

/// A joined group, as the viewing group sees it.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct JoinedGroup {
    pub vni: u32,
    /// Routes to the addresses that the viewing group reaches.
    pub peers: BTreeMap<IpAddr, Route>,
    /// The virtual layers that have these addresses.
    pub hosts: BTreeSet<IpAddr>,
    /// Addresses that the viewing group cannot reach here, because they mean something else to it.
    pub hidden: Vec<IpAddr>,
}

impl JoinedGroup {
    /// Its number and hosts, without addresses.
    pub fn outline(&self, name: &str) -> Members {
        Members { hosts: self.hosts.clone(), ..Members::new(name, self.vni) }
    }

    /// The locations of its addresses, for the tunnel.
    pub fn members(&self, name: &str) -> Members {
        let places = self.peers.iter().filter(|(_, r)| !r.foreign).map(|(&a, r)| (a, r.host)).collect();
        Members { places, ..self.outline(name) }
    }
}

impl View {
    /// The route to an address of a joined group.
    pub fn route(&self, address: IpAddr) -> Option<Route> {
        self.joined.values().find_map(|j| j.peers.get(&address).copied())
    }

    /// Each host of each joined group, with the number and name of the group.
    pub fn hosts(&self) -> impl Iterator<Item = (u32, &str, IpAddr)> {
        self.joined.iter().flat_map(|(name, j)| j.hosts.iter().map(move |&h| (j.vni, name.as_str(), h)))
    }

    /// True if another view has the same groups at the same hosts, and hides the same addresses.
    pub fn is_alike(&self, other: &View) -> bool {
        let of = |j: &JoinedGroup| (j.vni, j.hosts.clone(), j.hidden.clone());
        self.joined.len() == other.joined.len()
            && self.joined.iter().zip(&other.joined).all(|(a, b)| a.0 == b.0 && of(a.1) == of(b.1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::network::peer_table::{PeerTable, PeerUpdate};
    use crate::peers_file::Peers;
    use unirdma_ipc::network::{Changes, Plan};

    fn directory(text: &str, own: IpAddr) -> PeerTable {
        let mut d = PeerTable::new(&[own]);
        d.apply(Peers::parse(text, &[own]).unwrap().changes(&Peers::default()));
        d
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    /// All hosts agree about all numbers.
    fn all(_: IpAddr, _: u32, _: &str) -> bool {
        true
    }

    fn changes(d: &mut PeerTable, group: &str) -> Changes {
        match d.next_update(group, &all) {
            Some(PeerUpdate::Changes(changes)) => changes,
            other => panic!("{group}: {other:?}"),
        }
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
        let routes: Vec<_> = d.plan("red", &all).routes.iter().map(|(a, r)| (*a, r.host, r.vni)).collect();
        // Blue's 10.0.0.2 is hidden by red's own, and green's 10.0.0.4 by blue's. No rule selects green's 10.0.0.5.
        assert_eq!(routes, [(ip("10.0.0.2"), other, red), (ip("10.0.0.3"), other, blue), (ip("10.0.0.4"), own, blue)]);
        let view = d.view("red");
        assert_eq!(view.joined.keys().collect::<Vec<_>>(), ["blue", "green"]);
        let hidden = |group: &str| view.joined[group].hidden.clone();
        assert_eq!((hidden("blue"), hidden("green")), (vec![ip("10.0.0.2")], vec![ip("10.0.0.4")]));
        assert_eq!(view.joined["blue"].members("blue").hosts, [own, other].into());
        assert!(d.view("far").joined.is_empty());
        let rules = ["red", "green", "x"].map(|group| d.view(group).rules.len());
        assert_eq!(rules, [3, 1, 0]);
        assert_eq!(d.layers(), [own, other].into(), "this host sends to itself");
    }

    #[test]
    fn what_changes_in_a_group_is_told_to_those_that_are_joined_with_it() {
        let own = ip("192.168.7.1");
        let mut d = directory(TEXT, own);
        let before = Peers::parse(TEXT, &[own]).unwrap();
        for group in ["red", "blue", "far"] {
            assert!(matches!(d.next_update(group, &all), Some(PeerUpdate::Plan(_))) && !d.has_update(group));
        }
        let text = TEXT.replace("10.0.0.4 blue 192.168.7.1", "10.0.0.4 blue 192.168.7.2");
        let after = Peers::parse(&text, &[own]).unwrap();
        d.apply(after.changes(&before));
        // Blue has no addresses at this host any more, except 10.0.0.2, which red does not reach.
        let told = changes(&mut d, "red");
        let route = |host: &str, vni| Some(Route { host: ip(host), foreign: false, vni });
        let (red, blue) = (d.vni("red").unwrap(), d.vni("blue").unwrap());
        assert_eq!(told.addresses, [(ip("10.0.0.4"), route("192.168.7.2", blue))]);
        let [(vni, Some(joined))] = &told.joined[..] else { panic!("{told:?}") };
        assert_eq!((*vni, &*joined.name, &joined.hosts[..]), (blue, "blue", &[(own, None)][..]));
        assert!(told.rules.is_none());
        let told = changes(&mut d, "blue");
        assert!(told.addresses == [(ip("10.0.0.4"), route("192.168.7.2", blue))] && told.joined.is_empty());
        assert!(!d.has_update("far") || d.next_update("far", &all).is_none());
        // An address of the group itself hides the other group's address, until it is removed.
        let hiding = format!("{text}10.0.0.3 red 192.168.7.2\n");
        let hiding = Peers::parse(&hiding, &[own]).unwrap();
        d.apply(hiding.changes(&after));
        assert_eq!(changes(&mut d, "red").addresses, [(ip("10.0.0.3"), route("192.168.7.2", red))]);
        d.apply(after.changes(&hiding));
        assert_eq!(changes(&mut d, "red").addresses, [(ip("10.0.0.3"), route("192.168.7.2", blue))]);
        // Without the rules, the groups no longer know each other.
        let alone: String = text.lines().filter(|l| !l.starts_with("rule allow")).map(|l| format!("{l}\n")).collect();
        d.apply(Peers::parse(&alone, &[own]).unwrap().changes(&after));
        let told = changes(&mut d, "red");
        assert_eq!(told.addresses.iter().filter(|(_, route)| route.is_none()).count(), told.addresses.len());
        assert_eq!((told.joined.len(), told.rules.unwrap().len()), (2, 1));
        let Plan { routes, joined, rules, .. } = d.plan("red", &all);
        assert_eq!((routes.len(), joined.len(), rules.len()), (1, 0, 1));
        assert_eq!(d.layers(), [ip("192.168.7.2")].into());
    }

    /// Applies changes to a worker's plan.
    fn worker(plan: &mut Plan, changes: &Changes) {
        for (address, route) in &changes.addresses {
            plan.routes.retain(|(a, _)| a != address);
            plan.routes.extend(route.map(|r| (*address, r)));
        }
        for (vni, news) in &changes.joined {
            match news {
                None => plan.joined.retain(|j| j.members.vni != *vni),
                Some(news) => {
                    if !plan.joined.iter().any(|j| j.members.vni == *vni) {
                        let members = Members::new(&news.name, *vni);
                        plan.joined.push(unirdma_ipc::network::Joined { members, agreed: BTreeSet::new() });
                    }
                    let j = plan.joined.iter_mut().find(|j| j.members.vni == *vni).unwrap();
                    for (host, agrees) in &news.hosts {
                        j.members.hosts.remove(host);
                        j.agreed.remove(host);
                        j.members.hosts.extend(agrees.map(|_| *host));
                        j.agreed.extend(agrees.filter(|a| *a).map(|_| *host));
                    }
                }
            }
        }
        plan.rules = changes.rules.clone().unwrap_or(std::mem::take(&mut plan.rules));
        for (host, agrees) in &changes.hosts {
            plan.members.hosts.remove(host);
            plan.members.hosts.extend(agrees.map(|_| *host));
        }
    }

    /// A worker that received all changes knows the same as a worker that begins now, and it is told nothing that it
    /// knows already.
    #[test]
    fn changes_come_to_the_same_as_plans() {
        let own = ip("192.168.7.1");
        let mut dice = 7u64;
        let mut draw = |n: u64| {
            dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (dice >> 33) % n
        };
        let names = ["red", "blue", "green", "far"];
        let mut d = PeerTable::new(&[own]);
        let mut told: BTreeMap<&str, Plan> = BTreeMap::new();
        let mut before = Peers::default();
        let (mut places, mut rules) = (BTreeMap::new(), BTreeSet::new());
        let mut quiet = 0;
        for _ in 0..400 {
            let group = |n: u64| names[n as usize];
            match draw(3) {
                0 => {
                    let rule = match draw(4) {
                        0 => format!("deny from group:{} to group:{}", group(draw(4)), group(draw(4))),
                        1 => format!(
                            "allow from vrnic:{}/10.0.0.{} to group:{}",
                            group(draw(4)),
                            draw(4),
                            group(draw(4))
                        ),
                        _ => format!(
                            "allow from group:{} to group:{} priority {}",
                            group(draw(4)),
                            group(draw(4)),
                            draw(2)
                        ),
                    };
                    if !rules.remove(&rule) {
                        rules.insert(rule);
                    }
                }
                _ => {
                    let key = (group(draw(4)), draw(5));
                    match draw(4) {
                        0 => _ = places.remove(&key),
                        n => _ = places.insert(key, n),
                    }
                }
            }
            let mut text: String = names.iter().zip(5..).map(|(g, n)| format!("group {g} vni {n}\n")).collect();
            text += &places.iter().map(|((g, a), h)| format!("10.0.0.{a} {g} 192.168.7.{h}\n")).collect::<String>();
            text += &rules.iter().map(|r| format!("rule {r}\n")).collect::<String>();
            let now = Peers::parse(&text, &[own]).unwrap();
            d.apply(now.changes(&before));
            before = now;
            for name in names {
                let old = told.get(name).cloned();
                let plan = match d.next_update(name, &all) {
                    Some(PeerUpdate::Plan(plan)) => {
                        assert!(old.is_none(), "a whole plan for {name}");
                        plan
                    }
                    Some(PeerUpdate::Changes(changes)) => {
                        let mut plan = old.unwrap();
                        worker(&mut plan, &changes);
                        plan
                    }
                    None => {
                        quiet += 1;
                        old.unwrap()
                    }
                };
                told.insert(name, plan);
            }
            let mut fresh = directory(&text, own);
            for (name, plan) in &mut told {
                let mut other = fresh.plan(name, &all);
                for p in [&mut *plan, &mut other] {
                    p.routes.sort_by_key(|(a, _)| *a);
                    p.joined.sort_by_key(|j| j.members.vni);
                    p.joined.iter_mut().for_each(|j| j.members.places.clear());
                }
                assert_eq!(
                    (&plan.routes, &plan.joined, &plan.rules),
                    (&other.routes, &other.joined, &other.rules),
                    "{name}\n{text}"
                );
                assert_eq!(plan.members.hosts, other.members.hosts, "{name}\n{text}");
            }
        }
        assert!(quiet > 400, "only {quiet} times somebody was not concerned");
    }

    #[test]
    fn a_rule_that_was_said_twice_holds_until_it_was_taken_back_twice() {
        let rule: Rule = "allow from group:red to group:blue".parse().unwrap();
        let within: Rule = "deny from group:red to group:red".parse().unwrap();
        let mut rules = Rules::default();
        assert!(rules.set(&rule, true) && !rules.set(&rule, true) && rules.set(&within, true));
        assert!(rules.join_any() && rules.of("red").count() == 2 && rules.of("blue").count() == 1);
        assert!(!rules.set(&rule, false) && rules.join_any());
        assert!(rules.set(&rule, false) && !rules.join_any() && rules.set(&within, false));
        assert!(rules.all().is_empty() && rules.of.is_empty());
    }
}
