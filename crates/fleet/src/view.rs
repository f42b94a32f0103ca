//! What each host is told: pieces with keys. [`State::item`] says whether a host is told of a key, and what; it is the only place that
//! decides. [`State::touch_object`] says of a change which keys of which hosts it may concern. It may name too many, and never too few.

use std::collections::{BTreeMap, BTreeSet};

use crate::model::Kind;
use crate::state::{End, Name, Rule, State};
use crate::v1::{self, item::Item};

/// Which piece of what a host is told.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Key {
    /// A group that the host has, or that is joined with one.
    Group(Name),
    /// A secret of a group, or of two.
    Secret(Name, Name, u32),
    /// Another host.
    Place(Name),
    /// A vRNIC elsewhere.
    Peer(Name),
    /// A vRNIC of the host.
    Vrnic(Name),
    /// A rule.
    Rule(Name),
}

impl Key {
    /// As it is sent. `force`: a vRNIC was deleted.
    pub fn message(&self, force: bool) -> v1::ItemKey {
        use v1::item_key::Key as K;
        let key = match self {
            Key::Group(n) => K::Group(n.to_string()),
            Key::Secret(g, o, id) => K::Secret(v1::SecretKey { group: g.to_string(), other: o.to_string(), id: *id }),
            Key::Place(n) => K::Place(n.to_string()),
            Key::Peer(n) => K::Peer(n.to_string()),
            Key::Vrnic(n) => K::Vrnic(n.to_string()),
            Key::Rule(n) => K::Rule(n.to_string()),
        };
        v1::ItemKey { key: Some(key), force }
    }
}

/// Keys that a change may concern, by host. Of a host with more than `most` it is only known that they are more.
pub(crate) struct Touched {
    hosts: BTreeMap<Name, BTreeSet<Key>>,
    most: usize,
}

impl Touched {
    pub fn new(most: usize) -> Touched {
        Touched { hosts: BTreeMap::new(), most }
    }

    /// The keys of each host.
    pub fn into_hosts(self) -> BTreeMap<Name, BTreeSet<Key>> {
        self.hosts
    }

    /// A host is concerned in whatever way.
    pub fn add(&mut self, host: &str) {
        self.hosts.entry(host.into()).or_default();
    }

    fn of(&mut self, host: &Name) -> &mut BTreeSet<Key> {
        if !self.hosts.contains_key(host) {
            self.hosts.insert(host.clone(), BTreeSet::new());
        }
        self.hosts.get_mut(host).expect("it was made")
    }

    fn extend(&mut self, host: &Name, keys: impl Iterator<Item = Key>) {
        let most = self.most;
        let of = self.of(host);
        for key in keys {
            if of.len() > most {
                return;
            }
            of.insert(key);
        }
    }
}

fn touch(touched: &mut Touched, host: &Name, key: Key) {
    touched.extend(host, std::iter::once(key));
}

impl State {
    /// What a host is told of a key, if it is told of it.
    pub(crate) fn item(&self, host: &str, key: &Key) -> Option<v1::Item> {
        let item = match key {
            Key::Group(name) => {
                let g = self.groups.get(name).filter(|_| self.sees_group(host, name))?;
                let (vni, weight) = (g.object.vni.unwrap_or_default(), g.object.weight.unwrap_or(100));
                Item::Group(v1::HostGroup { name: name.to_string(), vni, weight })
            }
            Key::Vrnic(name) => {
                let v = self.vrnics.get(name).filter(|v| v.host.as_deref() == Some(host))?;
                let mut object = v.object.clone();
                if let Some(g) = self.groups.get(&v.group) {
                    object.limits = merge_limits(object.limits, g.object.limits);
                    object.share = merge_share(object.share, g.object.share);
                }
                Item::Vrnic(object)
            }
            Key::Place(name) => {
                let other = self.hosts.get(name).filter(|_| self.sees_place(host, name))?;
                Item::Place(v1::Place { host: name.to_string(), addresses: other.object.addresses.clone() })
            }
            Key::Peer(name) => {
                let v = self.vrnics.get(name)?;
                let at = v.host.as_ref().filter(|_| self.sees_peer(host, name))?;
                Item::Peer(v1::Peer {
                    name: name.to_string(),
                    group: v.group.to_string(),
                    host: at.to_string(),
                    ips: v.ips.iter().map(ToString::to_string).collect(),
                    mac: v.object.mac.clone(),
                })
            }
            Key::Rule(name) => {
                let r = self.rules.get(name).filter(|r| r.ends.iter().any(|e| self.has_end(host, e)))?;
                Item::Rule(self.host_rule(r))
            }
            Key::Secret(group, other, id) => {
                let s = self.secrets.get(&(group.to_string(), other.to_string(), *id))?;
                let sees =
                    if other.is_empty() { self.has_group(host, group) } else { self.sees_pair(host, group, other) };
                sees.then(|| {
                    let send = s.step() == v1::secret_record::Step::Sent;
                    Item::Secret(v1::Secret { key: s.key.clone(), value: s.value.clone(), send })
                })?
            }
        };
        Some(v1::Item { item: Some(item) })
    }

    fn host_rule(&self, r: &Rule) -> v1::HostRule {
        let [from, to] = &r.ends;
        let selector = |e: &End| v1::HostSelector {
            group: e.group.to_string(),
            ips: match e.vrnic.as_ref().and_then(|v| self.vrnics.get(v)) {
                Some(v) => v.ips.iter().map(ToString::to_string).collect(),
                None => Vec::new(),
            },
        };
        let o = &r.object;
        let (name, action, both, priority) = (o.name.clone(), o.action, o.both, o.priority);
        v1::HostRule { name, from: Some(selector(from)), to: Some(selector(to)), action, both, priority }
    }

    /// The rules that join groups, of a group, each seen from its end in the group: that end, and the other.
    pub(crate) fn joins_of<'a>(&'a self, group: &'a str) -> impl Iterator<Item = (&'a End, &'a End)> {
        self.rules_of(group)
            .filter(|(_, r)| r.joins())
            .flat_map(|(_, r)| r.sides())
            .filter(move |(near, _)| &*near.group == group)
    }

    fn sees_group(&self, host: &str, group: &str) -> bool {
        self.has_group(host, group) || self.joins_of(group).any(|(_, far)| self.has_end(host, far))
    }

    fn sees_pair(&self, host: &str, group: &str, other: &str) -> bool {
        self.joins_of(group)
            .any(|(near, far)| &*far.group == other && (self.has_end(host, near) || self.has_end(host, far)))
    }

    fn sees_peer(&self, host: &str, name: &str) -> bool {
        let Some(v) = self.vrnics.get(name) else { return false };
        let named = |e: &End| e.vrnic.as_ref().is_none_or(|n| &**n == name);
        (v.host.as_deref() != Some(host) && self.has_group(host, &v.group))
            || self.joins_of(&v.group).any(|(near, far)| named(near) && self.has_end(host, far))
    }

    fn sees_place(&self, host: &str, other: &str) -> bool {
        let (Some(h), Some(o)) = (self.hosts.get(host), self.hosts.get(other)) else { return false };
        let joined = |g| self.joins_of(g).any(|(near, far)| self.has_end(host, near) && self.has_end(other, far));
        host != other && (share_a_key(&h.groups, &o.groups) || h.groups.keys().any(|g| joined(g)))
    }

    /// Everything that a host is told, in the order of the keys.
    pub(crate) fn whole(&self, host: &str) -> BTreeMap<Key, v1::Item> {
        let mut touched = Touched::new(usize::MAX);
        if let Some((name, h)) = self.hosts.get_key_value(host) {
            h.vrnics.iter().for_each(|v| touch(&mut touched, name, Key::Vrnic(v.clone())));
            h.groups.keys().for_each(|g| self.touch_scope(name, g, &mut touched));
        }
        let keys = touched.into_hosts().remove(host).unwrap_or_default();
        keys.into_iter().filter_map(|k| self.item(host, &k).map(|i| (k, i))).collect()
    }

    /// All that a host may be told because it has vRNICs of a group.
    fn touch_scope(&self, host: &Name, group: &Name, out: &mut Touched) {
        self.touch_end(host, &End { group: group.clone(), vrnic: None }, out);
        self.secrets_of(group, "").for_each(|k| touch(out, host, k));
        for (name, rule) in self.rules_of(group) {
            touch(out, host, Key::Rule(name.clone()));
            if rule.joins() {
                let [a, b] = &rule.ends;
                self.touch_end(host, if a.group == *group { b } else { a }, out);
                self.touch_pair(host, rule, out);
            }
        }
    }

    /// What a host is told of vRNICs that it reaches.
    fn touch_end(&self, host: &Name, end: &End, out: &mut Touched) {
        touch(out, host, Key::Group(end.group.clone()));
        out.extend(host, self.vrnics_of(end).into_iter().map(Key::Peer));
        out.extend(host, self.hosts_of(end).into_iter().map(Key::Place));
    }

    fn touch_pair(&self, host: &Name, rule: &Rule, out: &mut Touched) {
        let [a, b] = &rule.ends;
        let (a, b) = if a.group <= b.group { (&a.group, &b.group) } else { (&b.group, &a.group) };
        self.secrets_of(a, b).for_each(|k| touch(out, host, k));
    }

    /// The keys of the secrets of a group, or of two.
    fn secrets_of(&self, group: &str, other: &str) -> impl Iterator<Item = Key> {
        let first = (group.to_owned(), other.to_owned(), 0);
        let last = (group.to_owned(), other.to_owned(), u32::MAX);
        self.secrets.range(first..=last).map(|((g, o, id), _)| Key::Secret(g.as_str().into(), o.as_str().into(), *id))
    }

    /// What an object has to do with hosts as the state is. A change is asked before and after it was made.
    pub(crate) fn touch_object(&self, kind: Kind, name: &str, out: &mut Touched) {
        match kind {
            Kind::Host => self.touch_host(name, out),
            Kind::Group => self.touch_group(name, out),
            Kind::Vrnic => self.touch_vrnic(name, out),
            Kind::Rule => self.touch_rule(name, out),
        }
    }

    fn touch_host(&self, name: &str, out: &mut Touched) {
        let Some((name, host)) = self.hosts.get_key_value(name) else { return };
        for group in host.groups.keys() {
            for other in self.groups.get(group).into_iter().flat_map(|g| g.hosts.keys()) {
                touch(out, other, Key::Place(name.clone()));
            }
            for (_, far) in self.joins_of(group) {
                self.hosts_of(far).iter().for_each(|other| touch(out, other, Key::Place(name.clone())));
            }
        }
    }

    fn touch_group(&self, name: &str, out: &mut Touched) {
        let Some((name, group)) = self.groups.get_key_value(name) else { return };
        for host in group.hosts.keys() {
            touch(out, host, Key::Group(name.clone()));
        }
        for (_, far) in self.joins_of(name) {
            self.hosts_of(far).iter().for_each(|h| touch(out, h, Key::Group(name.clone())));
        }
        for v in group.vrnics.iter().filter_map(|v| self.vrnics.get_key_value(v)) {
            v.1.host.iter().for_each(|h| touch(out, h, Key::Vrnic(v.0.clone())));
        }
    }

    fn touch_vrnic(&self, name: &str, out: &mut Touched) {
        let Some((name, v)) = self.vrnics.get_key_value(name) else { return };
        let own = End { group: v.group.clone(), vrnic: Some(name.clone()) };
        let group = self.groups.get(&v.group);
        // One that is on no host is nobody's peer.
        let see = |other: &Name, out: &mut Touched| {
            if let Some(h) = &v.host {
                touch(out, other, Key::Peer(name.clone()));
                touch(out, other, Key::Place(h.clone()));
            }
        };
        group.into_iter().flat_map(|g| g.hosts.keys()).for_each(|other| see(other, out));
        for (near, far) in self.joins_of(&v.group) {
            if near.vrnic.is_none() || near.vrnic.as_ref() == Some(name) {
                self.hosts_of(far).iter().for_each(|other| see(other, out));
            }
        }
        for rule in self.rules_naming(name).iter().filter_map(|r| self.rules.get_key_value(r)) {
            self.touch_rule(rule.0, out);
        }
        let Some(host) = &v.host else { return };
        touch(out, host, Key::Vrnic(name.clone()));
        self.touch_end(host, &own, out);
    }

    /// What else hosts are told, or not any more, because these vRNICs of one change may be all that they have of a group. A change is asked
    /// before and after it was made.
    pub(crate) fn touch_groups_of<'a>(&self, vrnics: impl Iterator<Item = &'a str>, out: &mut Touched) {
        let mut counts: BTreeMap<(&Name, &Name), u32> = BTreeMap::new();
        for v in vrnics.filter_map(|name| self.vrnics.get(name)) {
            v.host.iter().for_each(|host| *counts.entry((host, &v.group)).or_default() += 1);
        }
        for ((host, group), n) in counts {
            if self.groups.get(group).is_some_and(|g| g.hosts.get(host) == Some(&n)) {
                self.touch_scope(host, group, out);
            }
        }
    }

    fn touch_rule(&self, name: &str, out: &mut Touched) {
        let Some((name, rule)) = self.rules.get_key_value(name) else { return };
        for (near, far) in rule.sides() {
            for host in self.hosts_of(near) {
                touch(out, &host, Key::Rule(name.clone()));
                if rule.joins() {
                    self.touch_end(&host, far, out);
                    self.touch_pair(&host, rule, out);
                }
            }
        }
    }

    /// The hosts that have a secret of a group, or of two.
    pub(crate) fn touch_secret(&self, group: &str, other: &str, id: u32, out: &mut Touched) {
        let key = Key::Secret(group.into(), other.into(), id);
        self.hosts_with_secret(group, other).iter().for_each(|h| touch(out, h, key.clone()));
    }

    /// The hosts that are to have the secrets of a group, or of two.
    pub(crate) fn hosts_with_secret(&self, group: &str, other: &str) -> BTreeSet<Name> {
        if other.is_empty() {
            return self.groups.get(group).into_iter().flat_map(|g| g.hosts.keys().cloned()).collect();
        }
        let joins = self.joins_of(group).filter(|(_, far)| &*far.group == other);
        joins.flat_map(|(near, far)| [self.hosts_of(near), self.hosts_of(far)].concat()).collect()
    }
}

/// True if a key is in both maps. A host is told of many others, so this goes through both once and looks nothing up.
fn share_a_key<V>(a: &BTreeMap<Name, V>, b: &BTreeMap<Name, V>) -> bool {
    let (mut a, mut b) = (a.keys(), b.keys());
    let (mut x, mut y) = (a.next(), b.next());
    while let (Some(one), Some(other)) = (x, y) {
        match one.cmp(other) {
            std::cmp::Ordering::Equal => return true,
            std::cmp::Ordering::Less => x = a.next(),
            std::cmp::Ordering::Greater => y = b.next(),
        }
    }
    false
}

fn merge_limits(own: Option<v1::Limits>, group: Option<v1::Limits>) -> Option<v1::Limits> {
    let (Some(a), Some(b)) = (own, group) else { return own.or(group) };
    Some(v1::Limits {
        max_qp: a.max_qp.or(b.max_qp),
        max_cq: a.max_cq.or(b.max_cq),
        max_mr: a.max_mr.or(b.max_mr),
        max_mr_bytes: a.max_mr_bytes.or(b.max_mr_bytes),
        max_sessions: a.max_sessions.or(b.max_sessions),
        max_descriptors: a.max_descriptors.or(b.max_descriptors),
        max_mappings: a.max_mappings.or(b.max_mappings),
        max_address_space: a.max_address_space.or(b.max_address_space),
        max_pieces: a.max_pieces.or(b.max_pieces),
        max_filled: a.max_filled.or(b.max_filled),
    })
}

fn merge_share(own: Option<v1::Share>, group: Option<v1::Share>) -> Option<v1::Share> {
    let (Some(a), Some(b)) = (own, group) else { return own.or(group) };
    Some(v1::Share {
        weight: a.weight.or(b.weight),
        rate: a.rate.or(b.rate),
        ops: a.ops.or(b.ops),
        burst: a.burst.or(b.burst),
    })
}
