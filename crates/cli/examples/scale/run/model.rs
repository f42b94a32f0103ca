//! The declared objects, and the table that each host must have because of them. Tables are derived from the meaning of
//! groups and rules alone, independently of the centre's code.

use std::collections::{BTreeMap, BTreeSet};

use unirdma_fleet::agent::{Key, key_of};
use unirdma_fleet::v1::{self, item::Item, object::Object};

/// A random number generator with a fixed sequence.
pub struct Draw(u64);

impl Draw {
    pub fn new(seed: u64) -> Draw {
        Draw(seed)
    }

    /// A number below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        // SplitMix64.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ z >> 31) % n as u64) as usize
    }
}

pub struct Group {
    pub object: v1::Group,
    pub vrnics: BTreeSet<String>,
    rules: BTreeSet<String>,
}

/// One end of a rule: a group, or one vRNIC of it.
struct End {
    group: String,
    vrnic: Option<String>,
}

struct Rule {
    object: v1::Rule,
    ends: [End; 2],
}

/// All declared objects.
#[derive(Default)]
pub struct Fleet {
    pub hosts: Vec<String>,
    pub groups: BTreeMap<String, Group>,
    pub vrnics: BTreeMap<String, v1::Vrnic>,
    rules: BTreeMap<String, Rule>,
    on: BTreeMap<String, BTreeSet<String>>,
}

/// The pieces that a host must have. Of a secret only the key is known here, so its value is `None`.
pub type Table = BTreeMap<Key, Option<Item>>;

/// The group with vRNICs on all hosts.
pub const WIDEST: &str = "everywhere";

/// The objects of a fleet of this size: groups, vRNICs and rules. One group has a hundredth of the vRNICs, on all
/// hosts. A hundredth of the groups have a tenth of the vRNICs, on many hosts. All other groups are small, each on up
/// to four hosts. A rule joins each tenth small group with the next one; some of these rules name a single vRNIC. Each
/// twentieth group has a secret.
pub fn declare(hosts: &[String], vrnics: usize, groups: usize) -> [Vec<Object>; 3] {
    let mut draw = Draw::new(1);
    let medium = (groups / 100).max(1);
    let name = |g: usize| if g == 0 { WIDEST.to_string() } else { format!("g{g:05}") };
    let group = |g: usize| {
        let ranges = vec![format!("10.{}.0.0/16", g % 2)];
        v1::Group { name: name(g), ranges, secret: g % 20 == 3, ..v1::Group::default() }.into()
    };
    let (wide, spread) = (vrnics / 100, vrnics / 10);
    let mut members: Vec<Vec<String>> = vec![Vec::new(); groups];
    let all = (0..vrnics).map(|n| {
        let (group, host) = if n < wide {
            (0, n % hosts.len())
        } else if n < wide + spread {
            (1 + n % medium, draw.below(hosts.len()))
        } else {
            let group = 1 + medium + n % (groups - medium - 1);
            (group, (group * 7 + draw.below(4) * 13) % hosts.len())
        };
        let vrnic = format!("v{n:06}");
        members[group].push(vrnic.clone());
        v1::Vrnic { name: vrnic, group: name(group), host: hosts[host].clone(), ..v1::Vrnic::default() }.into()
    });
    let all = all.collect();
    let rule = |g: usize| {
        let one = members[g].first().filter(|_| g % 40 == 0);
        let from = one.map_or_else(|| format!("group:{}", name(g)), |v| format!("vrnic:{v}"));
        let (name, to) = (format!("r{g:05}"), format!("group:{}", name(g + 1)));
        v1::Rule { name, from, to, both: true, priority: 10, ..v1::Rule::default() }.into()
    };
    let joined = (medium + 1..groups - 1).filter(|g| g % 10 == 0);
    [(0..groups).map(group).collect(), all, joined.map(rule).collect()]
}

impl Fleet {
    /// An empty fleet of these hosts, which must be sorted.
    pub fn new(hosts: Vec<String>) -> Fleet {
        Fleet { hosts, ..Fleet::default() }
    }

    /// Applies changes that the centre has reported.
    ///
    /// # Panics
    /// A change names an object that does not exist.
    pub fn take(&mut self, changes: Vec<v1::Change>) {
        for change in changes {
            let of = |o: Option<v1::Object>| o.and_then(|o| o.object);
            match (of(change.before), of(change.after)) {
                (_, Some(Object::Group(g))) => {
                    let group = Group { object: g.clone(), vrnics: BTreeSet::new(), rules: BTreeSet::new() };
                    self.groups.insert(g.name, group);
                }
                (before, Some(Object::Vrnic(v))) => {
                    before.into_iter().for_each(|o| self.forget(&o));
                    self.groups.get_mut(&v.group).expect("its group").vrnics.insert(v.name.clone());
                    self.on.entry(v.host.clone()).or_default().insert(v.name.clone());
                    self.vrnics.insert(v.name.clone(), v);
                }
                (before, Some(Object::Rule(r))) => {
                    before.into_iter().for_each(|o| self.forget(&o));
                    let ends = [self.end(&r.from), self.end(&r.to)];
                    for end in &ends {
                        self.groups.get_mut(&end.group).expect("its group").rules.insert(r.name.clone());
                    }
                    self.rules.insert(r.name.clone(), Rule { object: r, ends });
                }
                (Some(before), None) => self.forget(&before),
                (_, Some(Object::Host(_))) | (None, None) => {}
            }
        }
    }

    fn forget(&mut self, object: &Object) {
        match object {
            Object::Vrnic(v) => {
                self.vrnics.remove(&v.name);
                self.groups.get_mut(&v.group).into_iter().for_each(|g| _ = g.vrnics.remove(&v.name));
                self.on.get_mut(&v.host).into_iter().for_each(|on| _ = on.remove(&v.name));
            }
            Object::Rule(r) => {
                for end in self.rules.remove(&r.name).into_iter().flat_map(|r| r.ends) {
                    self.groups.get_mut(&end.group).into_iter().for_each(|g| _ = g.rules.remove(&r.name));
                }
            }
            Object::Host(_) | Object::Group(_) => {}
        }
    }

    fn end(&self, text: &str) -> End {
        match text.split_once(':') {
            Some(("vrnic", v)) => End { group: self.vrnics[v].group.clone(), vrnic: Some(v.into()) },
            Some((_, g)) => End { group: g.into(), vrnic: None },
            None => unreachable!("rules of this program have ends"),
        }
    }

    /// The vRNICs of a host.
    pub fn on(&self, host: &str) -> impl Iterator<Item = &v1::Vrnic> {
        self.on.get(host).into_iter().flatten().map(|v| &self.vrnics[v])
    }

    /// The group, and the groups that rules join with it.
    pub fn joined(&self, group: &str) -> BTreeSet<String> {
        let ends = self.groups[group].rules.iter().flat_map(|r| &self.rules[r].ends).map(|e| e.group.clone());
        ends.chain([group.into()]).collect()
    }

    /// The hosts that have vRNICs of these groups.
    pub fn hosts_of(&self, groups: &BTreeSet<String>) -> BTreeSet<String> {
        let vrnics = groups.iter().flat_map(|g| &self.groups[g].vrnics);
        vrnics.map(|v| self.vrnics[v].host.clone()).filter(|h| !h.is_empty()).collect()
    }

    fn of_end<'a>(&'a self, end: &'a End) -> impl Iterator<Item = &'a v1::Vrnic> {
        let all = self.groups[&end.group].vrnics.iter().filter(|v| end.vrnic.as_ref().is_none_or(|e| e == *v));
        all.map(|v| &self.vrnics[v])
    }

    /// The table that a host must have.
    ///
    /// # Panics
    /// A piece has no key.
    pub fn table(&self, host: &str) -> Table {
        self.part(host, |_| true)
    }

    /// The part of a host's table that comes from its vRNICs in groups for which `of` is true. A change of a group
    /// affects only the parts that come from this group and from groups that rules join with it.
    pub fn part(&self, host: &str, of: impl Fn(&str) -> bool) -> Table {
        let mut items: Vec<Item> = Vec::new();
        let mut table = Table::new();
        let (mut groups, mut peers, mut rules) = (BTreeSet::new(), BTreeMap::new(), BTreeSet::new());
        let own: BTreeSet<&str> = self.on(host).map(|v| v.group.as_str()).filter(|g| of(g)).collect();
        for group in &own {
            groups.insert(*group);
            if self.groups[*group].object.secret {
                table.insert(Key::Secret((*group).into(), String::new(), 1), None);
            }
            let members = self.groups[*group].vrnics.iter().map(|v| &self.vrnics[v]);
            peers.extend(members.filter(|v| v.host != host).map(|v| (&v.name, v)));
            for rule in self.groups[*group].rules.iter().map(|r| &self.rules[r]) {
                let [from, to] = &rule.ends;
                for (near, far) in [(from, to), (to, from)] {
                    if near.group != *group || !self.of_end(near).any(|v| v.host == host) {
                        continue;
                    }
                    rules.insert(&rule.object.name);
                    groups.insert(&far.group);
                    peers.extend(self.of_end(far).map(|v| (&v.name, v)));
                    if self.groups[&near.group].object.secret || self.groups[&far.group].object.secret {
                        let (a, b) =
                            (near.group.clone().min(far.group.clone()), near.group.clone().max(far.group.clone()));
                        table.insert(Key::Secret(a, b, 1), None);
                    }
                }
            }
        }
        items.extend(self.on(host).filter(|v| of(&v.group)).map(|v| Item::Vrnic(v.clone())));
        items.extend(groups.into_iter().map(|g| {
            let g = &self.groups[g].object;
            Item::Group(v1::HostGroup { name: g.name.clone(), vni: g.vni.unwrap_or_default(), weight: 100, vlan: 0 })
        }));
        let bare = |v: &v1::Vrnic| v.ips.iter().filter_map(|a| a.split('/').next()).map(str::to_owned).collect();
        let places: BTreeSet<&str> = peers.values().map(|v| v.host.as_str()).filter(|h| *h != host).collect();
        items.extend(
            places
                .into_iter()
                .filter(|h| !h.is_empty())
                .map(|h| Item::Place(v1::Place { host: h.into(), addresses: vec![self.address(h)] })),
        );
        items.extend(peers.into_values().filter(|v| !v.host.is_empty()).map(|v| {
            let (name, group, host, mac) = (v.name.clone(), v.group.clone(), v.host.clone(), v.mac.clone());
            Item::Peer(v1::Peer { name, group, host, ips: bare(v), mac })
        }));
        items.extend(rules.into_iter().map(|r| {
            let rule = &self.rules[r];
            let selector = |e: &End| v1::HostSelector {
                group: e.group.clone(),
                ips: e.vrnic.as_ref().map(|v| bare(&self.vrnics[v])).unwrap_or_default(),
            };
            let (o, [from, to]) = (&rule.object, &rule.ends);
            let (from, to) = (Some(selector(from)), Some(selector(to)));
            Item::Rule(v1::HostRule { name: r.clone(), from, to, action: o.action, both: o.both, priority: o.priority })
        }));
        table.extend(items.into_iter().map(|i| (key_of(&i).expect("a piece"), Some(i))));
        table
    }

    /// The address that a host announces.
    pub fn address(&self, host: &str) -> String {
        let n = self.hosts.binary_search_by(|h| h.as_str().cmp(host)).expect("a host of this fleet");
        format!("192.168.{}.{}", n / 250, 1 + n % 250)
    }
}

/// Compares a host's table with the expected one and describes the first difference. `secrets` has the values that
/// other hosts have; new ones are added.
pub fn differs(due: &Table, has: v1::Update, secrets: &mut BTreeMap<Key, Vec<u8>>) -> Option<String> {
    let has: BTreeMap<Key, Item> =
        has.put.into_iter().filter_map(|i| i.item).filter_map(|i| Some((key_of(&i).ok()?, i))).collect();
    for (key, item) in &has {
        match (due.get(key), item) {
            (None, _) => return Some(format!("it has {key:?}, of which it must not know")),
            (Some(None), Item::Secret(s)) => {
                let known = secrets.entry(key.clone()).or_insert_with(|| s.value.clone());
                if *known != s.value || !s.send {
                    return Some(format!("its {key:?} is not that of other hosts"));
                }
            }
            (Some(Some(right)), item) if right == item => {}
            (Some(right), _) => return Some(format!("it has {item:?}, and not {right:?}")),
        }
    }
    due.keys().find(|k| !has.contains_key(*k)).map(|k| format!("it does not have {k:?}"))
}
