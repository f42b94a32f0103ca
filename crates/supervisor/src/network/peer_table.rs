//! The knowledge about other hosts, and the part of it that workers have not been told yet.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use unirdma_ipc::network::{Changes, JoinedChanges, Plan};
use unirdma_ipc::network::{Joined, Members};
use unirdma_policy::{Rule, Selector};
use unirdma_rnic::Route;

use super::peered_groups::{JoinedGroup, Rules, View};
use crate::peer_change::{Change, Place};

/// Groups, with the locations of their virtual addresses and their hosts.
#[derive(Default)]
pub(super) struct PeerTable {
    pub(super) groups: BTreeMap<String, Known>,
    /// Number of virtual addresses at each virtual layer.
    hosts: BTreeMap<IpAddr, usize>,
    addresses: usize,
    /// This host's addresses.
    own: Vec<IpAddr>,
    pub(super) rules: Rules,
}

/// The knowledge about a group.
#[derive(Default)]
pub(super) struct Known {
    vni: Option<u32>,
    /// Its addresses on other hosts.
    pub(super) addresses: BTreeMap<IpAddr, Place>,
    /// Its addresses on this host.
    pub(super) here: BTreeMap<IpAddr, Place>,
    macs: HashMap<[u8; 6], IpAddr>,
    /// The virtual layers that have the group, with the number of its addresses there.
    hosts: BTreeMap<IpAddr, usize>,
    /// Those that have announced the same number for the group.
    agreed: BTreeSet<IpAddr>,
    /// The group's view of joined groups; `None`: it must be computed.
    pub(super) view: Option<Arc<View>>,
    told: Synced,
}

/// The knowledge that the worker of a group has.
#[derive(Default)]
enum Synced {
    /// Nothing, or nothing that is still true. It must be sent a plan.
    #[default]
    Nothing,
    /// Everything except these changes. Of joined groups it knows this state.
    AllBut(News, Across),
}

/// A worker's knowledge about joined groups.
#[derive(Clone, Default)]
struct Across {
    view: Arc<View>,
    /// Numbers and hosts of joined groups, if the host has announced the number.
    agreed: BTreeSet<(u32, IpAddr)>,
}

/// Keys of changes. Their present values are looked up when the worker is told.
#[derive(Default)]
struct News {
    addresses: BTreeSet<IpAddr>,
    macs: BTreeSet<[u8; 6]>,
    hosts: BTreeSet<IpAddr>,
    /// The rules or the joined groups may have changed.
    across: bool,
}

impl News {
    fn is_empty(&self) -> bool {
        self.addresses.is_empty() && self.macs.is_empty() && self.hosts.is_empty() && !self.across
    }
}

/// A message to a worker about other hosts.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum PeerUpdate {
    Plan(Plan),
    Changes(Changes),
}

/// Consequences of changes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Effect {
    /// Something has changed.
    pub any: bool,
    /// The number of a group has changed.
    pub numbers: bool,
    /// The hosts of a group have changed.
    pub hosts: bool,
    /// The set of virtual layers has changed.
    pub layers: bool,
}

impl Known {
    /// Notes a change for the worker.
    fn note(&mut self, f: impl FnOnce(&mut News)) {
        if let Synced::AllBut(news, _) = &mut self.told {
            f(news);
        }
    }

    /// Drops the view of joined groups, which may have changed. Returns it.
    pub(super) fn doubt(&mut self) -> Option<Arc<View>> {
        self.note(|n| n.across = true);
        self.view.take()
    }

    pub(super) fn vni(&self) -> u32 {
        self.vni.unwrap_or_default()
    }

    pub(super) fn route(&self, place: &Place) -> Route {
        Route { host: place.host, foreign: place.foreign, vni: self.vni() }
    }

    /// Counts an address at a place, or uncounts it; true if the group's hosts have changed.
    fn count(&mut self, place: &Place, more: bool) -> bool {
        if place.foreign {
            return false;
        }
        let changed = count(&mut self.hosts, place.host, more);
        if changed {
            self.note(|n| _ = n.hosts.insert(place.host));
        }
        changed
    }
}

impl Across {
    /// Adds the differences between `self` and `after`: the keys of changed addresses, which are looked up later, and
    /// all other changes.
    fn compare(&self, after: &Across, addresses: &mut BTreeSet<IpAddr>, changes: &mut Changes) {
        let (was, is) = (&self.view, &after.view);
        for (a, b) in [(was, is), (is, was)] {
            for (name, j) in &a.joined {
                let other = b.joined.get(name).map(|o| &o.peers);
                addresses
                    .extend(j.peers.iter().filter(|(a, r)| other.and_then(|o| o.get(a)) != Some(r)).map(|(a, _)| *a));
            }
        }
        let numbers = |view: &View| -> BTreeMap<u32, String> {
            view.joined.iter().map(|(name, j)| (j.vni, name.clone())).collect()
        };
        let (was_joined, is_joined) = (numbers(was), numbers(is));
        let gone = was_joined.iter().filter(|(vni, name)| is_joined.get(vni) != Some(name));
        changes.joined.extend(gone.map(|(&vni, _)| (vni, None)));
        let hosts = |across: &Across, vni: u32, name: &str| -> BTreeMap<IpAddr, bool> {
            let joined = across.view.joined.get(name).filter(|j| j.vni == vni);
            joined.into_iter().flat_map(|j| &j.hosts).map(|&h| (h, across.agreed.contains(&(vni, h)))).collect()
        };
        for (vni, name) in is_joined {
            let (before, now) = (hosts(self, vni, &name), hosts(after, vni, &name));
            let new = was_joined.get(&vni) != Some(&name);
            let gone = before.keys().filter(|h| !now.contains_key(h)).map(|&h| (h, None));
            let other = now.iter().filter(|(h, a)| before.get(h) != Some(a)).map(|(&h, &a)| (h, Some(a)));
            let hosts: Vec<(IpAddr, Option<bool>)> = gone.chain(other).collect();
            if new || !hosts.is_empty() {
                changes.joined.push((vni, Some(JoinedChanges { name, hosts })));
            }
        }
        changes.rules = (was.rules != is.rules).then(|| is.rules.clone());
    }
}

/// Sets or removes an entry. Returns the former one.
fn set(map: &mut BTreeMap<IpAddr, Place>, key: IpAddr, to: Option<Place>) -> Option<Place> {
    match to {
        Some(place) => map.insert(key, place),
        None => map.remove(&key),
    }
}

/// Increments or decrements a count; true if the key is new or removed.
fn count(counts: &mut BTreeMap<IpAddr, usize>, key: IpAddr, more: bool) -> bool {
    let n = counts.entry(key).or_default();
    if more {
        *n += 1;
        return *n == 1;
    }
    *n = n.saturating_sub(1);
    let last = *n == 0;
    if last {
        counts.remove(&key);
    }
    last
}

impl PeerTable {
    /// The directory of a host with these addresses.
    pub fn new(own: &[IpAddr]) -> PeerTable {
        PeerTable { own: own.to_vec(), ..PeerTable::default() }
    }

    /// Applies changes.
    pub fn apply(&mut self, changes: Vec<Change>) -> Effect {
        let mut effect = Effect::default();
        // Groups whose changes may concern the groups that rules join with them.
        let mut moved: BTreeSet<String> = BTreeSet::new();
        let joined_any = self.rules.join_any();
        for change in changes {
            match change {
                Change::Vni { group, vni } => {
                    let known = self.groups.entry(group.clone()).or_default();
                    if known.vni != vni {
                        // The number is part of each route.
                        (known.vni, known.told) = (vni, Synced::Nothing);
                        (effect.any, effect.numbers) = (true, true);
                        moved.insert(group);
                    }
                }
                Change::Address { group, address, place } => {
                    let known = self.groups.entry(group.clone()).or_default();
                    let is_here = |p: &Place| !p.foreign && self.own.contains(&p.host);
                    let (here, place) = (place.filter(is_here), place.filter(|p| !is_here(p)));
                    let was_here = set(&mut known.here, address, here);
                    let before = set(&mut known.addresses, address, place);
                    if was_here == here && before == place {
                        continue;
                    }
                    effect.any = true;
                    moved.insert(group);
                    if before == place {
                        continue;
                    }
                    known.note(|n| _ = n.addresses.insert(address));
                    // The new place is counted first, so that an unchanged host does not count as new.
                    for (p, more) in place.iter().map(|p| (p, true)).chain(before.iter().map(|p| (p, false))) {
                        effect.hosts |= known.count(p, more);
                        effect.layers |= !p.foreign && count(&mut self.hosts, p.host, more);
                    }
                    self.addresses = self.addresses + usize::from(place.is_some()) - usize::from(before.is_some());
                }
                Change::Mac { group, mac, host } => {
                    let known = self.groups.entry(group).or_default();
                    let host = host.filter(|h| !self.own.contains(h));
                    let before = match host {
                        Some(h) => known.macs.insert(mac.0, h),
                        None => known.macs.remove(&mac.0),
                    };
                    if before != host {
                        effect.any = true;
                        known.note(|n| _ = n.macs.insert(mac.0));
                    }
                }
                Change::Rule { rule, there } => {
                    if self.rules.set(&rule, there) {
                        effect.any = true;
                        moved.extend([rule.from.group().clone(), rule.to.group().clone()]);
                    }
                }
            }
        }
        effect.layers |= joined_any != self.rules.join_any();
        effect.hosts |= self.doubt(&moved);
        self.groups.retain(|_, k| {
            k.vni.is_some()
                || !k.addresses.is_empty()
                || !k.here.is_empty()
                || !k.macs.is_empty()
                || matches!(k.told, Synced::AllBut(..))
        });
        effect
    }

    /// Number of known virtual addresses on other hosts.
    pub fn addresses(&self) -> usize {
        self.addresses
    }

    /// The number of a group between hosts, if the group is known.
    pub fn vni(&self, group: &str) -> Option<u32> {
        self.groups.get(group)?.vni
    }

    /// The hosts that are virtual layers. This host is included if rules may join its groups.
    pub fn layers(&self) -> BTreeSet<IpAddr> {
        let own = self.own.iter().filter(|_| self.rules.join_any());
        self.hosts.keys().chain(own).copied().collect()
    }

    /// A group's number and hosts, without addresses.
    pub fn outline(&self, group: &str) -> Members {
        let known = self.groups.get(group);
        let hosts = known.map(|k| k.hosts.keys().copied().collect()).unwrap_or_default();
        Members { hosts, ..Members::new(group, known.map_or(0, Known::vni)) }
    }

    /// Hosts may have announced other numbers: one host, or all hosts of the group (`None`).
    pub fn note_agreement(&mut self, group: &str, host: Option<IpAddr>, agrees: impl Fn(IpAddr, u32) -> bool) {
        let Some(known) = self.groups.get_mut(group) else { return };
        let gone: Vec<IpAddr> = known.agreed.iter().filter(|h| !known.hosts.contains_key(h)).copied().collect();
        gone.iter().for_each(|h| _ = known.agreed.remove(h));
        let hosts: Vec<IpAddr> = match host {
            Some(h) => known.hosts.contains_key(&h).then_some(h).into_iter().collect(),
            None => known.hosts.keys().copied().collect(),
        };
        for h in hosts {
            let changed = if agrees(h, known.vni()) { known.agreed.insert(h) } else { known.agreed.remove(&h) };
            if changed {
                known.note(|n| _ = n.hosts.insert(h));
            }
        }
    }

    /// A host has announced other numbers. Groups that are joined with one of its groups must be compared again.
    pub fn doubt_host(&mut self, host: IpAddr) {
        for known in self.groups.values_mut() {
            if known.view.as_ref().is_some_and(|v| v.joined.values().any(|j| j.hosts.contains(&host))) {
                known.note(|n| n.across = true);
            }
        }
    }

    /// The present state of groups joined with a group. `agrees`: whether a host has announced a number for a group.
    fn across(&mut self, group: &str, agrees: &impl Fn(IpAddr, u32, &str) -> bool) -> Across {
        let view = self.view(group);
        // This host agrees with itself.
        let agreed = view.hosts().filter(|&(vni, name, h)| self.own.contains(&h) || agrees(h, vni, name));
        let agreed = agreed.map(|(vni, _, h)| (vni, h)).collect();
        Across { view, agreed }
    }

    /// Everything that a new worker of a group must know. Later changes are in [`PeerTable::next_update`].
    pub fn plan(&mut self, group: &str, agrees: &impl Fn(IpAddr, u32, &str) -> bool) -> Plan {
        self.groups.entry(group.into()).or_default();
        let across = self.across(group, agrees);
        let known = self.groups.entry(group.into()).or_default();
        known.told = Synced::AllBut(News::default(), across.clone());
        let members = Members {
            hosts: known.hosts.keys().copied().collect(),
            places: known.addresses.iter().filter(|(_, p)| !p.foreign).map(|(&a, p)| (a, p.host)).collect(),
            macs: known.macs.clone(),
            ..Members::new(group, known.vni())
        };
        let mut routes: Vec<(IpAddr, Route)> = known.addresses.iter().map(|(&a, p)| (a, known.route(p))).collect();
        let Across { view, agreed } = across;
        routes.extend(view.joined.values().flat_map(|j| j.peers.iter().map(|(&a, &r)| (a, r))));
        let joined = view.joined.iter().map(|(name, j)| Joined {
            members: j.members(name),
            agreed: j.hosts.iter().copied().filter(|h| agreed.contains(&(j.vni, *h))).collect(),
        });
        let (joined, rules) = (joined.collect(), view.rules.clone());
        Plan { routes, members, agreed: known.agreed.clone(), joined, rules }
    }

    /// The next message to a group's worker; `None`: it knows everything.
    pub fn next_update(&mut self, group: &str, agrees: &impl Fn(IpAddr, u32, &str) -> bool) -> Option<PeerUpdate> {
        let Some(Known { told: Synced::AllBut(news, _), .. }) = self.groups.get_mut(group) else {
            return Some(PeerUpdate::Plan(self.plan(group, agrees)));
        };
        let mut news = std::mem::take(news);
        let now = news.across.then(|| self.across(group, agrees));
        let Some(known @ Known { told: Synced::AllBut(..), .. }) = self.groups.get_mut(group) else { return None };
        let mut changes = Changes { group: group.into(), vni: known.vni(), ..Changes::default() };
        if let (Some(now), Synced::AllBut(_, told)) = (now, &mut known.told) {
            let before = std::mem::replace(told, now);
            before.compare(told, &mut news.addresses, &mut changes);
        }
        let Synced::AllBut(_, Across { view, .. }) = &known.told else { return None };
        let route_of = |a: IpAddr| known.addresses.get(&a).map(|p| known.route(p)).or_else(|| view.route(a));
        let of_host = |h: IpAddr| (h, known.hosts.contains_key(&h).then(|| known.agreed.contains(&h)));
        changes.addresses = news.addresses.iter().map(|&a| (a, route_of(a))).collect();
        changes.macs = news.macs.iter().map(|&m| (m, known.macs.get(&m).copied())).collect();
        changes.hosts = news.hosts.iter().map(|&h| of_host(h)).collect();
        (!changes.is_empty()).then_some(PeerUpdate::Changes(changes))
    }

    /// True if there may be a message to a group's worker.
    pub fn has_update(&self, group: &str) -> bool {
        match self.groups.get(group).map(|k| &k.told) {
            Some(Synced::AllBut(news, _)) => !news.is_empty(),
            _ => true,
        }
    }

    /// A group's worker has ended.
    pub fn forget_worker(&mut self, group: &str) {
        if let Some(k) = self.groups.get_mut(group) {
            k.told = Synced::Nothing;
        }
    }

    // --- views of joined groups ---

    /// A group's view of other groups. It is computed if there is none.
    pub fn view(&mut self, group: &str) -> Arc<View> {
        if let Some(view) = self.groups.get(group).and_then(|k| k.view.clone()) {
            return view;
        }
        let view = Arc::new(View { joined: self.joined_with(group), rules: self.rules_of(group) });
        if let Some(known) = self.groups.get_mut(group) {
            known.view = Some(view.clone());
        }
        view
    }

    /// The rules that concern a group. They name groups by their numbers.
    fn rules_of(&self, group: &str) -> Vec<Rule<u32>> {
        self.rules.of(group).filter_map(|r| r.translate(|name| self.vni(name), |a| *a)).collect()
    }

    /// The groups that rules join with a group, by name. The group's own addresses hide equal addresses of joined
    /// groups. If two joined groups have the same address, the first group by name has precedence.
    fn joined_with(&self, group: &str) -> BTreeMap<String, JoinedGroup> {
        let group = group.to_string();
        // Addresses of each joined group that a rule selects; `None`: all of them.
        let mut selected: BTreeMap<&String, Option<BTreeSet<IpAddr>>> = BTreeMap::new();
        for r in self.rules.of(&group) {
            let Some(name) = r.joins(&group) else { continue };
            let named = selected.entry(name).or_insert_with(|| Some(BTreeSet::new()));
            match if r.from.group() == name { &r.from } else { &r.to } {
                Selector::Group(_) => *named = None,
                Selector::Vrnic(_, address) => _ = named.as_mut().map(|n| n.insert(*address)),
            }
        }
        let all_of = |name: &str| {
            let known = self.groups.get(name).into_iter();
            known.flat_map(|k| k.here.iter().chain(&k.addresses).map(|(&a, p)| (a, k.route(p))))
        };
        let own = self.groups.get(&group);
        let is_own = |a: &IpAddr| own.is_some_and(|k| k.here.contains_key(a) || k.addresses.contains_key(a));
        let mut taken = BTreeSet::new();
        let mut joined = BTreeMap::new();
        for (name, named) in selected {
            let Some(vni) = self.vni(name) else { continue };
            let mut of_name = JoinedGroup { vni, ..JoinedGroup::default() };
            for (address, route) in all_of(name).filter(|(a, _)| named.as_ref().is_none_or(|n| n.contains(a))) {
                if is_own(&address) || !taken.insert(address) {
                    of_name.hidden.push(address);
                    continue;
                }
                if !route.foreign {
                    of_name.hosts.insert(route.host);
                }
                of_name.peers.insert(address, route);
            }
            joined.insert(name.clone(), of_name);
        }
        joined
    }

    /// Drops the views of these groups and of all groups joined with them, after a change of rules, addresses or
    /// numbers. True if the hosts in one of these views have changed.
    pub fn doubt(&mut self, changed: &BTreeSet<String>) -> bool {
        let rules = changed.iter().flat_map(|group| self.rules.of(group));
        let concerned = rules.flat_map(|r| [r.from.group(), r.to.group()]).chain(changed);
        let concerned: BTreeSet<String> = concerned.cloned().collect();
        let mut other_hosts = false;
        for group in concerned {
            let Some(before) = self.groups.get_mut(&group).and_then(|known| known.doubt()) else { continue };
            other_hosts |= !before.is_alike(&self.view(&group));
        }
        other_hosts
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use unirdma_formats::Mac;

    /// All hosts agree about all numbers.
    fn all(_: IpAddr, _: u32, _: &str) -> bool {
        true
    }

    fn host(n: u8) -> IpAddr {
        [192, 168, 7, n].into()
    }

    fn at(address: u32, host: Option<IpAddr>) -> Change {
        let place = host.map(|host| Place { host, foreign: false });
        Change::Address { group: "blue".into(), address: IpAddr::V4((0x0a00_0000 + address).into()), place }
    }

    #[test]
    fn one_move_among_a_hundred_thousand_is_one_change() {
        let mut d = PeerTable::new(&[host(250)]);
        let mut places = vec![Change::Vni { group: "blue".into(), vni: Some(5) }];
        places.extend((0..100_000).map(|i| at(i, Some(host(1 + (i % 200) as u8)))));
        let effect = d.apply(places);
        assert_eq!(effect, Effect { any: true, numbers: true, hosts: true, layers: true });
        assert!(
            matches!(d.next_update("blue", &all), Some(PeerUpdate::Plan(p)) if p.routes.len() == 100_000 && p.members.vni == 5)
        );
        assert!(!d.has_update("blue") && d.next_update("blue", &all).is_none());
        let mac = Mac([2, 0, 0, 0, 0, 1]);
        let moved = Change::Mac { group: "blue".into(), mac, host: Some(host(9)) };
        assert_eq!(d.apply(vec![at(1, Some(host(9))), moved]), Effect { any: true, ..Effect::default() });
        let Some(PeerUpdate::Changes(c)) = d.next_update("blue", &all) else { panic!("a plan") };
        assert_eq!(c.addresses, [([10, 0, 0, 1].into(), Some(Route { host: host(9), foreign: false, vni: 5 }))]);
        assert_eq!((c.macs, c.hosts.len()), (vec![(mac.0, Some(host(9)))], 0));
        // The same change again has no effect.
        assert_eq!(d.apply(vec![at(1, Some(host(9)))]), Effect::default());
        assert!(!d.has_update("blue") && d.addresses() == 100_000);
    }

    #[test]
    fn hosts_come_with_their_first_address_and_go_with_their_last() {
        let mut d = PeerTable::default();
        d.apply(vec![Change::Vni { group: "blue".into(), vni: Some(5) }, at(1, Some(host(1)))]);
        assert!(d.plan("blue", &all).members.hosts == [host(1)].into());
        let effect = d.apply(vec![at(2, Some(host(2))), at(3, Some(host(2)))]);
        assert_eq!((effect.hosts, effect.layers), (true, true));
        d.note_agreement("blue", Some(host(2)), |_, vni| vni == 5);
        let Some(PeerUpdate::Changes(c)) = d.next_update("blue", &all) else { panic!("a plan") };
        assert_eq!((c.addresses.len(), c.hosts), (2, vec![(host(2), Some(true))]));
        assert!(!d.apply(vec![at(2, None)]).hosts && d.apply(vec![at(3, None)]).hosts);
        d.note_agreement("blue", None, |_, _| false);
        let Some(PeerUpdate::Changes(c)) = d.next_update("blue", &all) else { panic!("a plan") };
        assert_eq!((c.addresses[1].1, c.hosts), (None, vec![(host(2), None)]));
        assert_eq!((d.layers(), d.addresses()), ([host(1)].into(), 1));
        // With another number, or for another worker, a whole plan is sent.
        assert!(d.apply(vec![Change::Vni { group: "blue".into(), vni: Some(6) }]).numbers);
        assert!(matches!(d.next_update("blue", &all), Some(PeerUpdate::Plan(p)) if p.routes[0].1.vni == 6));
        d.forget_worker("blue");
        assert!(d.has_update("blue") && matches!(d.next_update("blue", &all), Some(PeerUpdate::Plan(_))));
        d.forget_worker("blue");
        d.apply(vec![at(1, None), Change::Vni { group: "blue".into(), vni: None }]);
        assert!(d.groups.is_empty());
    }

    #[test]
    fn one_rule_among_many_is_told_to_the_two_groups_that_it_concerns() {
        let mut d = PeerTable::new(&[host(250)]);
        let name = |n: u32| format!("g{n}");
        let place = |n: u32| Some(Place { host: host(1 + (n % 200) as u8), foreign: false });
        let mut all_of = Vec::new();
        for n in 0..100 {
            all_of.push(Change::Vni { group: name(n), vni: Some(100 + n) });
            let address = |i: u32| Change::Address {
                group: name(n),
                address: IpAddr::V4((0x0a00_0000 + 1_000 * n + i).into()),
                place: place(i),
            };
            all_of.extend((0..100).map(address));
        }
        let rule =
            |n: u32| format!("allow from group:g{n} to group:g{}", n + 1).parse::<unirdma_policy::Rule>().unwrap();
        all_of.extend((0..99).filter(|n| *n != 50).map(|n| Change::Rule { rule: rule(n), there: true }));
        d.apply(all_of);
        assert!((0..100).all(|n| matches!(d.next_update(&name(n), &all), Some(PeerUpdate::Plan(_)))));
        let told = |d: &mut PeerTable| -> Vec<(u32, Changes)> {
            let told = |n| match d.next_update(&name(n), &all) {
                Some(PeerUpdate::Plan(_)) => panic!("a whole plan for {}", name(n)),
                Some(PeerUpdate::Changes(changes)) => Some((n, changes)),
                None => None,
            };
            (0..100).filter_map(told).collect()
        };
        let effect = d.apply(vec![Change::Rule { rule: rule(50), there: true }]);
        assert!(effect.any && effect.hosts && !effect.layers && !effect.numbers);
        let all_told = told(&mut d);
        assert_eq!(all_told.iter().map(|(n, _)| *n).collect::<Vec<_>>(), [50, 51]);
        for (n, changes) in all_told {
            // The addresses of the other group, and none of its own.
            assert!(
                changes.addresses.len() == 100
                    && changes.addresses.iter().all(|(_, r)| r.unwrap().vni == 100 + (101 - n))
            );
            assert_eq!((changes.joined.len(), changes.rules.unwrap().len(), changes.hosts.len()), (1, 2, 0));
        }
        assert!(told(&mut d).is_empty());
        // A moved address is one change for its group and for each of the two joined groups.
        let moved =
            Change::Address { group: name(20), address: IpAddr::V4((0x0a00_0000 + 20_000).into()), place: place(7) };
        d.apply(vec![moved]);
        let all_told = told(&mut d);
        assert_eq!(
            all_told.iter().map(|(n, c)| (*n, c.addresses.len())).collect::<Vec<_>>(),
            [(19, 1), (20, 1), (21, 1)]
        );
        // A rule that is added again is the same rule. A rule that denies reveals no addresses.
        assert_eq!(d.apply(vec![Change::Rule { rule: rule(50), there: true }]), Effect::default());
        let deny = "deny from group:g3 to group:g9".parse().unwrap();
        assert!(!d.apply(vec![Change::Rule { rule: deny, there: true }]).hosts);
        let all_told = told(&mut d);
        assert_eq!(all_told.iter().map(|(n, c)| (*n, c.addresses.len())).collect::<Vec<_>>(), [(3, 0), (9, 0)]);
        assert!(all_told.iter().all(|(_, c)| c.rules.is_some() && c.joined.is_empty()));
    }
}
