//! The reference state of a fleet by all changes in the store: the state of each host, and the pairs of vRNICs that may
//! connect.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use unirdma_fleet::agent::{self, Key};
use unirdma_fleet::v1::{self, item::Item, object::Object};
use unirdma_fleet::{Actor, Centre, Planner, Write};
use unirdma_policy::{Action, Party, Policy, Rule, Selector};

/// The state of a host: items by their keys.
pub(super) type Table = BTreeMap<Key, Item>;

/// The items of updates or of a snapshot.
pub(super) fn table(updates: Vec<v1::Update>) -> Table {
    let items = updates.into_iter().flat_map(|u| u.put).filter_map(|i| i.item);
    items.map(|i| (agent::key_of(&i).expect("the centre tells nothing that is wrong in itself"), i)).collect()
}

fn rule(from: &[Selector], to: &[Selector], action: i32, both: bool, priority: u32) -> Vec<Rule> {
    let action = if action == v1::rule::Action::Allow as i32 { Action::Allow } else { Action::Deny };
    let priority = u16::try_from(priority).expect("a priority of 16 bits");
    let one = |f: &Selector, t: &Selector| Rule { from: f.clone(), to: t.clone(), action, both, priority };
    from.iter().flat_map(|f| to.iter().map(move |t| one(f, t))).collect()
}

fn ip(text: &str) -> IpAddr {
    text.split('/').next().and_then(|a| a.parse().ok()).expect("an address")
}

/// The policy of the rules in a host's state.
pub(super) fn policy(table: &Table) -> Policy<String, IpAddr> {
    let ends = |s: &Option<v1::HostSelector>| -> Vec<Selector> {
        let s = s.as_ref().expect("a rule has two ends");
        match s.ips.as_slice() {
            [] => vec![Selector::Group(s.group.clone())],
            ips => ips.iter().map(|a| Selector::Vrnic(s.group.clone(), ip(a))).collect(),
        }
    };
    let rules: Vec<Rule> = table
        .values()
        .filter_map(|i| if let Item::Rule(r) = i { Some(r) } else { None })
        .flat_map(|r| rule(&ends(&r.from), &ends(&r.to), r.action, r.both, r.priority))
        .collect();
    Policy::new(&rules)
}

/// A vRNIC: its group, its addresses, and its host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub group: String,
    pub ips: Vec<IpAddr>,
    pub host: String,
}

impl Place {
    pub fn of_vrnic(v: &v1::Vrnic) -> Place {
        Place { group: v.group.clone(), ips: v.ips.iter().map(|a| ip(a)).collect(), host: v.host.clone() }
    }

    pub fn of_peer(p: &v1::Peer) -> Place {
        Place { group: p.group.clone(), ips: p.ips.iter().map(|a| ip(a)).collect(), host: p.host.clone() }
    }

    pub fn party(&self) -> Party<'_, String, IpAddr> {
        Party { group: &self.group, addresses: &self.ips }
    }
}

/// A centre that receives each change at the moment it is committed.
pub(super) struct Truth {
    pub centre: Centre,
    planner: Planner,
    hosts: Vec<String>,
    /// For each host, its states in order, each with the first revision at which it is valid.
    history: Vec<Vec<(u64, Table)>>,
    /// When the state of each host changed last.
    pub changed: Vec<u64>,
    /// When a group or a rule was declared last. Such a declaration may replace a secret at once, not step by step as a
    /// rotation does.
    pub declared: u64,
    pub vrnics: BTreeMap<String, Place>,
    policy: Policy<String, IpAddr>,
}

impl Truth {
    pub fn new(all: (u64, Vec<Write>), hosts: Vec<String>) -> Truth {
        let (centre, planner) = Centre::load(all.0, &all.1, [0; 32]).expect("the store can be read");
        let history = vec![Vec::new(); hosts.len()];
        let changed = vec![0; hosts.len()];
        let mut truth = Truth {
            centre,
            planner,
            hosts,
            history,
            changed,
            declared: 0,
            vrnics: BTreeMap::new(),
            policy: Policy::default(),
        };
        truth.look(0);
        truth
    }

    /// The store has committed a change.
    pub fn commit(&mut self, now: u64, revision: u64, writes: &[Write]) {
        self.centre.commit(&mut self.planner, revision, writes).expect("what a centre planned can be read");
        if writes.iter().any(|w| w.key.starts_with("object/group/") || w.key.starts_with("object/rule/")) {
            self.declared = now;
        }
        self.look(now);
    }

    /// Recomputes all from the new state. Panics if an address, MAC, GUID or VNI is assigned twice.
    fn look(&mut self, now: u64) {
        for (i, host) in self.hosts.iter().enumerate() {
            let is = table(self.centre.updates(host, None));
            if self.history[i].last().is_none_or(|(_, was)| *was != is) {
                self.history[i].push((self.centre.revision(), is));
                self.changed[i] = now;
            }
        }
        let question = v1::GetRequest::default();
        let all = self.centre.get(&Actor::centre(), &question, now).expect("the centre answers");
        assert!(!all.more, "a small fleet");
        let (mut seen, mut rules) = (BTreeSet::new(), Vec::new());
        let mut once = |what: String| assert!(seen.insert(what.clone()), "{what} is there twice");
        self.vrnics.clear();
        let objects: Vec<Object> = all.objects.into_iter().filter_map(|o| o.object).collect();
        for object in &objects {
            match object {
                Object::Group(g) => once(format!("VNI {:?}", g.vni)),
                Object::Vrnic(v) => {
                    let place = Place::of_vrnic(v);
                    place.ips.iter().for_each(|a| once(format!("{a} of group {}", v.group)));
                    assert!(!place.ips.is_empty(), "{} has no address", v.name);
                    once(format!("MAC {}", v.mac));
                    once(format!("GUID {}", v.guid));
                    self.vrnics.insert(v.name.clone(), place);
                }
                Object::Host(_) | Object::Rule(_) => {}
            }
        }
        for object in &objects {
            if let Object::Rule(r) = object {
                let ends = |text: &str| -> Vec<Selector> {
                    match text.split_once(':').expect("a selector has a kind") {
                        ("group", g) => vec![Selector::Group(g.into())],
                        (_, v) => {
                            let p = &self.vrnics[v];
                            p.ips.iter().map(|a| Selector::Vrnic(p.group.clone(), *a)).collect()
                        }
                    }
                };
                rules.extend(rule(&ends(&r.from), &ends(&r.to), r.action, r.both, r.priority));
            }
        }
        self.policy = Policy::new(&rules);
    }

    /// The state of a host at this revision.
    pub fn table(&self, host: usize, revision: u64) -> Option<&Table> {
        self.history[host].iter().rev().find(|(r, _)| *r <= revision).map(|(_, t)| t)
    }

    /// True if two vRNICs may be connected now.
    pub fn allows(&self, a: &str, b: &str) -> bool {
        let (Some(a), Some(b)) = (self.vrnics.get(a), self.vrnics.get(b)) else { return false };
        self.policy.may_talk(a.party(), b.party())
    }
}
