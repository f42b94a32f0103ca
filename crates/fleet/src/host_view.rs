//! The view of each host: pieces with keys. [`HostView::item`] alone decides whether a host is sent a piece, and its
//! content. [`Look`] finds the keys and hosts that a change may concern. It may find too many, and must never miss one.

use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::model::Kind;
use crate::state::{End, Host, Joins, Name, Rule, State, Vrnic};
use crate::v1::{self, item::Item};

/// The key of a piece.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Key {
    /// A group that the host has, or that is joined with such a group.
    Group(Name),
    /// A secret of a group, or of a pair of groups.
    Secret(Name, Name, u32),
    /// Another host.
    Place(Name),
    /// A vRNIC on another host.
    Peer(Name),
    /// A vRNIC on this host.
    Vrnic(Name),
    /// A rule.
    Rule(Name),
}

impl Key {
    /// The key as a message. `force`: the vRNIC was deleted.
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

/// A set of keys.
pub(crate) type Keys = BTreeSet<Key>;

/// Why hosts are concerned. Hosts that are concerned for the same reason share one set of keys, so the cost of a change
/// of many vRNICs of a group on many hosts is the sum of both numbers, not the product.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Reason {
    /// The host itself is concerned.
    Host(Name),
    /// The host has a vRNIC at an end of a rule.
    Has(End),
    /// The host reaches a whole group.
    Reaches(Name),
    /// The host begins or ceases to reach an end, and is sent everything about that end.
    Joins(End),
    /// The host begins or ceases to have a group, and is sent everything that depends on that.
    Scope(Name),
}

#[derive(Default)]
struct Batch {
    keys: Keys,
    hosts: BTreeSet<Name>,
}

/// Keys that a change may concern, with the concerned hosts. A set has at most `most` + 1 keys: the last one shows that
/// there are more.
pub(crate) struct Touched {
    batches: BTreeMap<Reason, Batch>,
    most: usize,
}

impl Touched {
    pub fn new(most: usize) -> Touched {
        Touched { batches: BTreeMap::new(), most }
    }

    /// The keys for each host.
    pub fn into_hosts(self) -> BTreeMap<Name, Vec<Arc<Keys>>> {
        let mut hosts: BTreeMap<Name, Vec<Arc<Keys>>> = BTreeMap::new();
        for batch in self.batches.into_values() {
            let keys = Arc::new(batch.keys);
            batch.hosts.into_iter().for_each(|h| hosts.entry(h).or_default().push(keys.clone()));
        }
        hosts
    }

    /// Marks a host as concerned.
    pub fn add(&mut self, host: &str) {
        let host: Name = host.into();
        self.batches.entry(Reason::Host(host.clone())).or_default().hosts.insert(host);
    }
}

/// Adds keys to a set, up to `most` + 1 in total.
fn extend(to: &mut Keys, keys: impl IntoIterator<Item = Key>, most: usize) {
    for key in keys {
        if to.len() > most {
            return;
        }
        to.insert(key);
    }
}

/// Finds the hosts and keys that a change concerns in one state. It is applied to the states before and after the
/// change.
pub(crate) struct Look<'a> {
    state: &'a State,
    touched: &'a mut Touched,
    /// Reasons whose hosts were determined in this state already.
    looked: BTreeSet<Reason>,
    /// Pairs of ends that rules of the change join in this state and that were examined already.
    pairs: BTreeSet<(End, End)>,
}

impl<'a> Look<'a> {
    pub fn new(state: &'a State, touched: &'a mut Touched) -> Look<'a> {
        Look { state, touched, looked: BTreeSet::new(), pairs: BTreeSet::new() }
    }

    /// Adds keys for all hosts that are concerned for a reason.
    fn tell(&mut self, reason: Reason, keys: impl IntoIterator<Item = Key>) {
        let batch = self.touched.batches.entry(reason.clone()).or_default();
        extend(&mut batch.keys, keys, self.touched.most);
        if !self.looked.contains(&reason) {
            match &reason {
                Reason::Host(h) => drop(batch.hosts.insert(h.clone())),
                Reason::Has(end) => batch.hosts.extend(self.state.hosts_of(end)),
                Reason::Reaches(group) => {
                    batch.hosts.extend(self.state.hosts_of(&End::whole(group)));
                    for far in self.state.far_ends(group, None) {
                        batch.hosts.extend(self.state.hosts_of(&far));
                    }
                }
                // The hosts are determined from the change.
                Reason::Joins(_) | Reason::Scope(_) => {}
            }
            self.looked.insert(reason);
        }
    }

    /// An object changes.
    pub fn object(&mut self, kind: Kind, name: &str) {
        match kind {
            Kind::Host => self.host(name),
            Kind::Group => self.group(name),
            Kind::Vrnic => self.vrnic(name),
            Kind::Rule => self.rule(name),
        }
    }

    fn host(&mut self, name: &str) {
        let state = self.state;
        let Some((name, host)) = state.hosts.get_key_value(name) else { return };
        for group in host.groups.keys() {
            self.tell(Reason::Reaches(group.clone()), [Key::Place(name.clone())]);
        }
        let named =
            host.vrnics.iter().filter(|v| state.naming.contains_key(*v)).filter_map(|v| state.vrnics.get_key_value(v));
        for (vrnic, v) in named {
            for far in state.far_ends(&v.group, Some(vrnic)) {
                self.tell(Reason::Has(far), [Key::Place(name.clone())]);
            }
        }
    }

    fn group(&mut self, name: &str) {
        let state = self.state;
        let Some((name, group)) = state.groups.get_key_value(name) else { return };
        self.tell(Reason::Has(End::whole(name)), [Key::Group(name.clone())]);
        for (far, joins) in &group.joins {
            let ends: BTreeSet<&Option<Name>> = joins.keys().map(|(_, vrnic)| vrnic).collect();
            for vrnic in ends {
                let end = End { group: far.clone(), vrnic: vrnic.clone() };
                self.tell(Reason::Has(end), [Key::Group(name.clone())]);
            }
        }
        for (vrnic, v) in group.vrnics.iter().filter_map(|v| state.vrnics.get_key_value(v)) {
            v.host.iter().for_each(|h| self.tell(Reason::Host(h.clone()), [Key::Vrnic(vrnic.clone())]));
        }
    }

    fn vrnic(&mut self, name: &str) {
        let state = self.state;
        let Some((name, v)) = state.vrnics.get_key_value(name) else { return };
        // A vRNIC that is on no host is no peer.
        let keys = || v.host.iter().flat_map(|h| [Key::Peer(name.clone()), Key::Place(h.clone())]);
        if v.host.is_some() {
            self.tell(Reason::Reaches(v.group.clone()), keys());
        }
        if state.naming.contains_key(name) {
            for far in state.far_ends(&v.group, Some(name)) {
                self.tell(Reason::Has(far), keys());
            }
            state.rules_naming(name).for_each(|rule| self.rule(rule));
        }
        if let Some(host) = &v.host {
            let keys = [Key::Vrnic(name.clone()), Key::Peer(name.clone()), Key::Group(v.group.clone())];
            self.tell(Reason::Host(host.clone()), keys);
        }
    }

    fn rule(&mut self, name: &str) {
        let state = self.state;
        let Some((name, rule)) = state.rules.get_key_value(name) else { return };
        for (near, far) in rule.sides() {
            self.tell(Reason::Has(near.clone()), [Key::Rule(name.clone())]);
            if rule.joins() && self.pairs.insert((near.clone(), far.clone())) {
                self.tell(Reason::Has(near.clone()), state.secrets_of_pair(&near.group, &far.group));
                let reason = Reason::Joins(far.clone());
                if !self.looked.contains(&reason) {
                    self.tell(reason.clone(), state.keys_of(far));
                }
                self.touched.batches.entry(reason).or_default().hosts.extend(state.hosts_of(near));
            }
        }
    }

    /// Hosts that gain or lose their only vRNICs of a group with this change are sent everything that depends on the
    /// group.
    pub fn scopes<'b>(&mut self, vrnics: impl Iterator<Item = &'b str>) {
        let state = self.state;
        let mut counts: BTreeMap<(&Name, &Name), u32> = BTreeMap::new();
        for v in vrnics.filter_map(|name| state.vrnics.get(name)) {
            v.host.iter().for_each(|host| *counts.entry((&v.group, host)).or_default() += 1);
        }
        for ((group, host), n) in counts {
            if state.groups.get(group).is_some_and(|g| g.hosts.get(host) == Some(&n)) {
                let reason = Reason::Scope(group.clone());
                if !self.looked.contains(&reason) {
                    self.tell(reason.clone(), state.scope_of(group));
                }
                self.touched.batches.entry(reason).or_default().hosts.insert(host.clone());
            }
        }
    }

    /// A secret of a group, or of a pair, changes.
    pub fn secret(&mut self, group: &str, other: &str, id: u32) {
        let key = Key::Secret(group.into(), other.into(), id);
        for end in self.state.ends_with_secret(group, other) {
            self.tell(Reason::Has(end), [key.clone()]);
        }
    }
}

/// The part of a group that rules let a host reach.
#[derive(Default)]
struct Reached<'a> {
    whole: bool,
    vrnics: BTreeSet<&'a Name>,
}

/// The state as one host sees it.
pub(crate) struct HostView<'a> {
    state: &'a State,
    name: &'a str,
    host: Option<&'a Host>,
    /// The parts of groups that rules let the host reach. Computed on first use.
    reached: OnceCell<BTreeMap<&'a str, Reached<'a>>>,
}

impl<'a> HostView<'a> {
    pub fn new(state: &'a State, name: &'a str) -> HostView<'a> {
        HostView { state, name, host: state.hosts.get(name), reached: OnceCell::new() }
    }

    fn has_group(&self, group: &str) -> bool {
        self.host.is_some_and(|h| h.groups.contains_key(group))
    }

    fn has(&self, vrnic: &str) -> bool {
        self.state.vrnics.get(vrnic).is_some_and(|v| v.host.as_deref() == Some(self.name))
    }

    /// The part of a group that rules let the host reach.
    fn reached(&self, group: &str) -> Option<&Reached<'a>> {
        let look = || {
            let mut reached: BTreeMap<&str, Reached<'_>> = BTreeMap::new();
            let joins = self.host.into_iter().flat_map(|h| h.groups.keys()).flat_map(|g| self.state.joins_of(g));
            for (far, joins) in joins {
                for (_, vrnic) in joins.keys().filter(|(near, _)| near.as_ref().is_none_or(|v| self.has(v))) {
                    let of = reached.entry(far).or_default();
                    match vrnic {
                        None => of.whole = true,
                        Some(v) => drop(of.vrnics.insert(v)),
                    }
                }
            }
            reached
        };
        self.reached.get_or_init(look).get(group)
    }

    fn sees_group(&self, group: &str) -> bool {
        self.has_group(group) || self.reached(group).is_some()
    }

    /// Whether the host sees the secret of a pair: it has a vRNIC at one end of a rule that joins them.
    fn sees_pair(&self, group: &str, other: &str) -> bool {
        let has = |group: &str, vrnic: &Option<Name>| match vrnic {
            None => self.has_group(group),
            Some(v) => self.has(v),
        };
        let joins = self.state.groups.get(group).and_then(|g| g.joins.get(other));
        joins.into_iter().flat_map(Joins::keys).any(|(near, far)| has(group, near) || has(other, far))
    }

    fn sees_peer(&self, name: &Name, v: &Vrnic) -> bool {
        (v.host.as_deref() != Some(self.name) && self.has_group(&v.group))
            || self.reached(&v.group).is_some_and(|r| r.whole || r.vrnics.contains(name))
    }

    fn sees_place(&self, name: &str, other: &Host) -> bool {
        let Some(host) = self.host.filter(|_| name != self.name) else { return false };
        let on = |v: &&Name| self.state.vrnics.get(*v).is_some_and(|v| v.host.as_deref() == Some(name));
        let reaches = |g: &Name| self.reached(g).is_some_and(|r| r.whole || r.vrnics.iter().any(on));
        share_a_key(&host.groups, &other.groups) || other.groups.keys().any(reaches)
    }

    /// The piece of a key as the host sees it; `None` if it does not.
    pub fn item(&self, key: &Key) -> Option<v1::Item> {
        let item = match key {
            Key::Group(name) => {
                let g = self.state.groups.get(name).filter(|_| self.sees_group(name))?;
                let (vni, weight) = (g.object.vni.unwrap_or_default(), g.object.weight.unwrap_or(100));
                let vlan = g.object.vlan.unwrap_or_default();
                Item::Group(v1::HostGroup { name: name.to_string(), vni, weight, vlan })
            }
            Key::Vrnic(name) => {
                let v = self.state.vrnics.get(name).filter(|v| v.host.as_deref() == Some(self.name))?;
                let mut object = v.object.clone();
                if let Some(g) = self.state.groups.get(&v.group) {
                    object.limits = merge_limits(object.limits, g.object.limits);
                    object.share = merge_share(object.share, g.object.share);
                }
                Item::Vrnic(object)
            }
            Key::Place(name) => {
                let other = self.state.hosts.get(name).filter(|o| self.sees_place(name, o))?;
                Item::Place(v1::Place { host: name.to_string(), addresses: other.object.addresses.clone() })
            }
            Key::Peer(name) => {
                let v = self.state.vrnics.get(name)?;
                let at = v.host.as_ref().filter(|_| self.sees_peer(name, v))?;
                Item::Peer(v1::Peer {
                    name: name.to_string(),
                    group: v.group.to_string(),
                    host: at.to_string(),
                    ips: v.ips.iter().map(ToString::to_string).collect(),
                    mac: v.object.mac.clone(),
                })
            }
            Key::Rule(name) => {
                let has = |e: &End| match &e.vrnic {
                    None => self.has_group(&e.group),
                    Some(v) => self.has(v),
                };
                let r = self.state.rules.get(name).filter(|r| r.ends.iter().any(has))?;
                Item::Rule(self.state.host_rule(r))
            }
            Key::Secret(group, other, id) => {
                let s = self.state.secrets.get(&(group.to_string(), other.to_string(), *id))?;
                let sees = if other.is_empty() { self.has_group(group) } else { self.sees_pair(group, other) };
                sees.then(|| {
                    let send = s.step() == v1::secret_record::Step::Sent;
                    Item::Secret(v1::Secret { key: s.key.clone(), value: s.value.clone(), send })
                })?
            }
        };
        Some(v1::Item { item: Some(item) })
    }

    /// Everything that the host sees, in the order of keys.
    pub fn whole(&self) -> BTreeMap<Key, v1::Item> {
        let mut keys = Keys::new();
        if let Some(host) = self.host {
            keys.extend(host.vrnics.iter().cloned().map(Key::Vrnic));
            host.groups.keys().for_each(|g| keys.extend(self.state.scope_of(g)));
        }
        keys.into_iter().filter_map(|k| self.item(&k).map(|i| (k, i))).collect()
    }
}

impl State {
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

    /// All keys that a host may see because it has vRNICs of a group.
    fn scope_of<'a>(&'a self, group: &'a Name) -> impl Iterator<Item = Key> + 'a {
        let ends: BTreeSet<(&Name, &Option<Name>)> =
            self.joins_of(group).flat_map(|(far, joins)| joins.keys().map(move |(_, vrnic)| (far, vrnic))).collect();
        let ends = ends.into_iter().map(|(g, vrnic)| End { group: g.clone(), vrnic: vrnic.clone() });
        let rules = self.groups.get(group).into_iter().flat_map(|g| &g.rules).cloned().map(Key::Rule);
        let pairs = self.joins_of(group).flat_map(|(far, _)| self.secrets_of_pair(group, far));
        let told =
            std::iter::once(End::whole(group)).chain(ends).flat_map(|end| self.keys_of(&end).collect::<Vec<_>>());
        told.chain(self.secrets_of(group, "")).chain(pairs).chain(rules)
    }

    /// The keys that a host sees because it reaches an end.
    fn keys_of(&self, end: &End) -> impl Iterator<Item = Key> + use<> {
        let peers = self.vrnics_of(end).into_iter().map(Key::Peer);
        let places = self.hosts_of(end).into_iter().map(Key::Place);
        std::iter::once(Key::Group(end.group.clone())).chain(peers).chain(places)
    }

    /// The keys of the secrets of a pair of groups.
    fn secrets_of_pair(&self, a: &Name, b: &Name) -> impl Iterator<Item = Key> + use<'_> {
        self.secrets_of(a.min(b), a.max(b))
    }

    /// The keys of the secrets of a group, or of an ordered pair.
    fn secrets_of(&self, group: &str, other: &str) -> impl Iterator<Item = Key> + use<'_> {
        let first = (group.to_owned(), other.to_owned(), 0);
        let last = (group.to_owned(), other.to_owned(), u32::MAX);
        self.secrets.range(first..=last).map(|((g, o, id), _)| Key::Secret(g.as_str().into(), o.as_str().into(), *id))
    }

    /// The ends whose hosts need the secrets of a group, or of a pair.
    fn ends_with_secret(&self, group: &str, other: &str) -> BTreeSet<End> {
        let Some((group, g)) = self.groups.get_key_value(group) else { return BTreeSet::new() };
        if other.is_empty() {
            return BTreeSet::from([End::whole(group)]);
        }
        let Some((other, joins)) = g.joins.get_key_value(other) else { return BTreeSet::new() };
        let end = |group: &Name, vrnic: &Option<Name>| End { group: group.clone(), vrnic: vrnic.clone() };
        joins.keys().flat_map(|(near, far)| [end(group, near), end(other, far)]).collect()
    }

    /// The hosts that need the secrets of a group, or of a pair.
    pub(crate) fn hosts_with_secret(&self, group: &str, other: &str) -> BTreeSet<Name> {
        self.ends_with_secret(group, other).iter().flat_map(|end| self.hosts_of(end)).collect()
    }
}

/// True if a key is in both maps. The maps may be large: this goes through both once and does no look-ups.
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
