//! The state of a fleet, with indexes, so that the cost of a query depends on the size of its answer. All changes go
//! through [`State::set`], which returns the former value; setting that again undoes the change.

use std::borrow::Borrow;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use crate::audit::Audit;
use crate::error::Refusal;
use crate::model::{Kind, Selector, ips, ranges, selector};
use crate::net::{Net, Taken};
use crate::v1::{self, object::Object};

/// A name, which many indexes share.
pub type Name = Arc<str>;

/// A group and its content.
#[derive(Clone, Debug, Default)]
pub struct Group {
    pub(crate) object: v1::Group,
    pub(crate) revision: u64,
    pub(crate) ranges: Vec<Net>,
    pub(crate) vrnics: BTreeSet<Name>,
    /// Number of its vRNICs on each host.
    pub(crate) hosts: BTreeMap<Name, u32>,
    /// The rules that name the group or one of its vRNICs.
    pub(crate) rules: BTreeSet<Name>,
    /// Number of rules between this group and each group, including itself.
    pub(crate) beside: BTreeMap<Name, u32>,
    /// The groups that rules join with it.
    pub(crate) joins: BTreeMap<Name, Joins>,
    pub(crate) addresses: HashMap<IpAddr, Name>,
    pub(crate) taken: Taken,
}

/// The rules that join two groups: pairs of a vRNIC of the near group and a vRNIC of the far group, with the number of
/// rules that join them. `None` stands for all vRNICs of the group.
pub(crate) type Joins = BTreeMap<(Option<Name>, Option<Name>), u32>;

/// Whether a rule joins the whole near group (`None`), or this vRNIC of it, with something.
fn joins_near(joins: &Joins, near: Option<&Name>) -> bool {
    joins.range((near.cloned(), None)..).next().is_some_and(|((n, _), _)| n.as_ref() == near)
}

/// Two vRNICs with the same address that one group would both see.
pub(crate) struct Clash {
    pub ip: IpAddr,
    /// The vRNICs, with their groups.
    pub both: [(Name, Name); 2],
    pub viewer: Name,
}

impl From<Clash> for Refusal {
    fn from(c: Clash) -> Refusal {
        let [(vrnic, group), (other, others)] = &c.both;
        Refusal::conflict(format_args!(
            "vRNIC {vrnic} of group {group} and vRNIC {other} of group {others} both have {}, and group {} would see both: joined groups need different addresses",
            c.ip, c.viewer
        ))
    }
}

/// A vRNIC with its parsed addresses.
#[derive(Clone, Debug)]
pub struct Vrnic {
    pub(crate) object: v1::Vrnic,
    pub(crate) revision: u64,
    pub(crate) group: Name,
    pub(crate) host: Option<Name>,
    pub(crate) ips: Vec<IpAddr>,
}

/// One end of a rule: a group, or one vRNIC of it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct End {
    pub(crate) group: Name,
    pub(crate) vrnic: Option<Name>,
}

/// A rule with its ends looked up.
#[derive(Clone, Debug)]
pub struct Rule {
    pub(crate) object: v1::Rule,
    pub(crate) revision: u64,
    /// `from` and `to`.
    pub(crate) ends: [End; 2],
}

impl End {
    /// The end that is a whole group.
    pub(crate) fn whole(group: &Name) -> End {
        End { group: group.clone(), vrnic: None }
    }
}

impl Rule {
    /// True if the rule allows connections between different groups.
    pub(crate) fn joins(&self) -> bool {
        self.object.action() == v1::rule::Action::Allow && self.ends[0].group != self.ends[1].group
    }

    /// Its ends, each with the opposite one.
    pub(crate) fn sides(&self) -> [(&End, &End); 2] {
        [(&self.ends[0], &self.ends[1]), (&self.ends[1], &self.ends[0])]
    }
}

/// A host.
#[derive(Clone, Debug, Default)]
pub struct Host {
    pub(crate) object: v1::Host,
    pub(crate) revision: u64,
    pub(crate) vrnics: BTreeSet<Name>,
    /// Number of its vRNICs of each group.
    pub(crate) groups: BTreeMap<Name, u32>,
}

/// A group's name, another group's name or nothing, and the secret's number.
pub(crate) type SecretName = (String, String, u32);

/// The state of a fleet.
#[derive(Clone, Debug, Default)]
pub struct State {
    /// The state's number.
    pub(crate) fleet: String,
    /// Number of changes that made it.
    pub(crate) revision: u64,
    pub(crate) hosts: BTreeMap<Name, Host>,
    pub(crate) groups: BTreeMap<Name, Group>,
    pub(crate) vrnics: BTreeMap<Name, Vrnic>,
    pub(crate) rules: BTreeMap<Name, Rule>,
    /// The rules that name a vRNIC.
    pub(crate) naming: BTreeMap<Name, BTreeSet<Name>>,
    pub(crate) macs: HashMap<String, Name>,
    pub(crate) vnis: Taken,
    pub(crate) vni_of: HashMap<u32, Name>,
    pub(crate) vlan_of: HashMap<u32, Name>,
    pub(crate) tokens: BTreeMap<String, v1::TokenRecord>,
    pub(crate) secrets: BTreeMap<SecretName, v1::SecretRecord>,
    pub(crate) audit: Audit,
}

/// An object, and the revision that made it.
pub type Kept = (Object, u64);

impl State {
    /// An object's present value.
    pub(crate) fn get(&self, kind: Kind, name: &str) -> Option<Kept> {
        match kind {
            Kind::Host => self.hosts.get(name).map(|o| (o.object.clone().into(), o.revision)),
            Kind::Group => self.groups.get(name).map(|o| (o.object.clone().into(), o.revision)),
            Kind::Vrnic => self.vrnics.get(name).map(|o| (o.object.clone().into(), o.revision)),
            Kind::Rule => self.rules.get(name).map(|o| (o.object.clone().into(), o.revision)),
        }
    }

    /// Sets or removes an object. Returns its former value.
    ///
    /// # Errors
    /// It names a group, host or vRNIC that does not exist, or other objects depend on it. Nothing is changed then.
    pub(crate) fn set(&mut self, kind: Kind, name: &str, to: Option<Kept>) -> Result<Option<Kept>, Refusal> {
        let before = self.get(kind, name);
        match (kind, to) {
            (Kind::Host, Some((Object::Host(object), revision))) => {
                let host = self.hosts.entry(name.into()).or_default();
                (host.object, host.revision) = (object, revision);
            }
            (Kind::Group, Some((Object::Group(object), revision))) => self.set_group(object, revision)?,
            (Kind::Vrnic, Some((Object::Vrnic(object), revision))) => self.set_vrnic(object, revision)?,
            (Kind::Rule, Some((Object::Rule(object), revision))) => self.set_rule(object, revision)?,
            (Kind::Host, None) => {
                if self.hosts.get(name).is_some_and(|h| !h.vrnics.is_empty()) {
                    return Err(Refusal::conflict(format_args!("host {name} has vRNICs")));
                }
                self.hosts.remove(name);
            }
            (Kind::Group, None) => self.remove_group(name)?,
            (Kind::Vrnic, None) => self.remove_vrnic(name),
            (Kind::Rule, None) => self.remove_rule(name),
            (kind, Some(_)) => {
                return Err(Refusal::invalid(format_args!("{kind} {name} is an object of another kind")));
            }
        }
        Ok(before)
    }

    fn set_group(&mut self, object: v1::Group, revision: u64) -> Result<(), Refusal> {
        let ranges = ranges(&object)?;
        let vni = object.vni.unwrap_or_default();
        let name: Name = object.name.as_str().into();
        if let Some(old) = self.groups.get(&name).and_then(|g| g.object.vni).filter(|old| *old != vni) {
            self.free_vni(old, &name);
        }
        self.vnis.take_id(vni);
        self.vni_of.insert(vni, name.clone());
        self.free_vlan(&name);
        if let Some(vlan) = object.vlan {
            self.vlan_of.insert(vlan, name.clone());
        }
        let group = self.groups.entry(name).or_default();
        (group.object, group.revision, group.ranges) = (object, revision, ranges);
        Ok(())
    }

    fn remove_group(&mut self, name: &str) -> Result<(), Refusal> {
        let Some(group) = self.groups.get(name) else { return Ok(()) };
        if let Some(v) = group.vrnics.first() {
            let text = format!("group {name} has {} vRNICs, {v} among them", group.vrnics.len());
            return Err(Refusal::conflict(text));
        }
        if let Some(r) = group.rules.first() {
            return Err(Refusal::conflict(format_args!("rule {r} names group {name}")));
        }
        let vni = group.object.vni.unwrap_or_default();
        self.free_vni(vni, name);
        self.free_vlan(name);
        self.groups.remove(name);
        Ok(())
    }

    /// Frees a group's VLAN, unless another group has taken it meanwhile.
    fn free_vlan(&mut self, group: &str) {
        let vlan = self.groups.get(group).and_then(|g| g.object.vlan);
        if let Some(vlan) = vlan.filter(|v| self.vlan_of.get(v).is_some_and(|g| &**g == group)) {
            self.vlan_of.remove(&vlan);
        }
    }

    /// Frees a group's number, unless another group has taken it meanwhile.
    fn free_vni(&mut self, vni: u32, group: &str) {
        if self.vni_of.get(&vni).is_some_and(|g| &**g == group) {
            self.vnis.free_id(vni);
            self.vni_of.remove(&vni);
        }
    }

    fn set_vrnic(&mut self, object: v1::Vrnic, revision: u64) -> Result<(), Refusal> {
        let ips: Vec<IpAddr> = ips(&object)?.into_iter().map(|(a, _)| a).collect();
        let name: Name = object.name.as_str().into();
        let Some((group_name, group)) = self.groups.get_key_value(object.group.as_str()) else {
            return Err(Refusal::not_found(format_args!("vRNIC {name}: there is no group {}", object.group)));
        };
        for ip in &ips {
            if let Some(other) = group.addresses.get(ip).filter(|o| **o != name) {
                let text = format!("vRNIC {name}: {ip} is the address of vRNIC {other} in group {group_name} already");
                return Err(Refusal::conflict(text));
            }
        }
        let host = match object.host.as_str() {
            "" => None,
            h => Some(self.hosts.get_key_value(h).map(|(n, _)| n.clone()).ok_or_else(|| {
                Refusal::not_found(format_args!(
                    "vRNIC {name}: there is no host {h}; hosts join with `unirdma token create --role join`"
                ))
            })?),
        };
        if let Some(other) = self.macs.get(&object.mac).filter(|o| **o != name) {
            return Err(Refusal::conflict(format_args!(
                "vRNIC {name}: {} is the MAC of vRNIC {other} already",
                object.mac
            )));
        }
        let group_name = group_name.clone();
        self.unindex_vrnic(&name);
        if let Some(group) = self.groups.get_mut(&group_name) {
            group.vrnics.insert(name.clone());
            for ip in &ips {
                group.addresses.insert(*ip, name.clone());
                group.taken.take(*ip);
            }
            if let Some(h) = &host {
                *group.hosts.entry(h.clone()).or_default() += 1;
            }
        }
        if let Some(h) = host.as_ref().and_then(|h| self.hosts.get_mut(h)) {
            h.vrnics.insert(name.clone());
            *h.groups.entry(group_name.clone()).or_default() += 1;
        }
        self.macs.insert(object.mac.clone(), name.clone());
        self.vrnics.insert(name, Vrnic { object, revision, group: group_name, host, ips });
        Ok(())
    }

    fn unindex_vrnic(&mut self, name: &str) {
        let Some(v) = self.vrnics.get(name) else { return };
        self.macs.remove(&v.object.mac);
        if let Some(group) = self.groups.get_mut(&v.group) {
            group.vrnics.remove(name);
            for ip in &v.ips {
                group.addresses.remove(ip);
                group.taken.free(*ip);
            }
            v.host.iter().for_each(|h| count_down(&mut group.hosts, h));
        }
        if let Some(h) = v.host.as_ref().and_then(|h| self.hosts.get_mut(h)) {
            h.vrnics.remove(name);
            count_down(&mut h.groups, &v.group);
        }
    }

    fn remove_vrnic(&mut self, name: &str) {
        self.unindex_vrnic(name);
        self.vrnics.remove(name);
    }

    fn end(&self, rule: &str, text: &str) -> Result<End, Refusal> {
        match selector(text)? {
            Selector::Group(g) => match self.groups.get_key_value(g.as_str()) {
                Some((group, _)) => Ok(End { group: group.clone(), vrnic: None }),
                None => Err(Refusal::not_found(format_args!("rule {rule}: there is no group {g}"))),
            },
            Selector::Vrnic(v) => match self.vrnics.get_key_value(v.as_str()) {
                Some((name, v)) => Ok(End { group: v.group.clone(), vrnic: Some(name.clone()) }),
                None => Err(Refusal::not_found(format_args!("rule {rule}: there is no vRNIC {v}"))),
            },
        }
    }

    fn set_rule(&mut self, object: v1::Rule, revision: u64) -> Result<(), Refusal> {
        let ends = [self.end(&object.name, &object.from)?, self.end(&object.name, &object.to)?];
        self.remove_rule(&object.name);
        let name: Name = object.name.as_str().into();
        let rule = Rule { object, revision, ends };
        for (near, far) in rule.sides() {
            if let Some(vrnic) = &near.vrnic {
                self.naming.entry(vrnic.clone()).or_default().insert(name.clone());
            }
            let Some(group) = self.groups.get_mut(&near.group) else { continue };
            if group.rules.insert(name.clone()) {
                *group.beside.entry(far.group.clone()).or_default() += 1;
            }
            if rule.joins() {
                let joins = group.joins.entry(far.group.clone()).or_default();
                *joins.entry((near.vrnic.clone(), far.vrnic.clone())).or_default() += 1;
            }
        }
        self.rules.insert(name, rule);
        Ok(())
    }

    fn remove_rule(&mut self, name: &str) {
        let Some(rule) = self.rules.remove(name) else { return };
        for (near, far) in rule.sides() {
            if let Some(vrnic) = &near.vrnic
                && let Some(naming) = self.naming.get_mut(vrnic)
            {
                naming.remove(name);
                if naming.is_empty() {
                    self.naming.remove(vrnic);
                }
            }
            let Some(group) = self.groups.get_mut(&near.group) else { continue };
            if group.rules.remove(name) {
                count_down(&mut group.beside, &far.group);
            }
            if rule.joins()
                && let Some(joins) = group.joins.get_mut(&far.group)
            {
                count_down(joins, &(near.vrnic.clone(), far.vrnic.clone()));
                if joins.is_empty() {
                    group.joins.remove(&far.group);
                }
            }
        }
    }

    /// The rules that name a vRNIC.
    pub(crate) fn rules_naming(&self, vrnic: &str) -> impl Iterator<Item = &Name> {
        self.naming.get(vrnic).into_iter().flatten()
    }

    /// The groups that rules join with a group, with the joined ends.
    pub(crate) fn joins_of<'a>(&'a self, group: &str) -> impl Iterator<Item = (&'a Name, &'a Joins)> + use<'a> {
        self.groups.get(group).into_iter().flat_map(|g| &g.joins)
    }

    /// The ends that rules join with a whole group, or with one vRNIC of it.
    pub(crate) fn far_ends<'a>(&'a self, group: &str, near: Option<&'a Name>) -> impl Iterator<Item = End> + use<'a> {
        self.joins_of(group).flat_map(move |(far, joins)| {
            let of_near = joins.range((near.cloned(), None)..).take_while(move |((n, _), _)| n.as_ref() == near);
            of_near.map(|((_, vrnic), _)| End { group: far.clone(), vrnic: vrnic.clone() })
        })
    }

    /// The groups whose addresses are seen together with a group's addresses. A new address of the group must differ
    /// from theirs.
    pub(crate) fn joined_groups(&self, group: &str) -> BTreeSet<Name> {
        let near = self.joins_of(group).map(|(g, _)| g);
        let mut all: BTreeSet<Name> =
            near.flat_map(|g| self.joins_of(g).map(|(far, _)| far).chain([g])).cloned().collect();
        all.remove(group);
        all
    }

    /// Number of rules with both ends in these groups.
    pub(crate) fn rules_within(&self, groups: &BTreeSet<String>) -> usize {
        let of = |g: &String| {
            let beside = self.groups.get(g.as_str()).into_iter().flat_map(|g| &g.beside);
            let within = beside.filter(|(other, _)| g.as_str() <= &***other && groups.contains(&***other));
            within.map(|(_, n)| *n as usize).sum::<usize>()
        };
        groups.iter().map(of).sum()
    }

    /// Refuses two vRNICs that a third one, or one of them, would reach at the same address. `vrnic` has changed.
    /// `work` counts the groups whose addresses are compared.
    pub(crate) fn check_addresses_of(&self, vrnic: &str, work: &mut u64) -> Result<(), Clash> {
        let Some((name, v)) = self.vrnics.get_key_value(vrnic) else { return Ok(()) };
        for (far, joins) in self.joins_of(&v.group) {
            *work += 1;
            if joins_near(joins, None) || joins_near(joins, Some(name)) {
                self.check_seen_by(far, name, v, work)?;
            }
        }
        self.check_seen_by(&v.group, name, v, work)
    }

    /// Refuses a rule that would make one address stand for two vRNICs. A rule that joins the same ends as another one
    /// is not checked again.
    pub(crate) fn check_addresses_by(&self, rule: &str, work: &mut u64) -> Result<(), Clash> {
        let Some(rule) = self.rules.get(rule).filter(|r| r.joins()) else { return Ok(()) };
        let [from, to] = &rule.ends;
        let joins = self.groups.get(&from.group).and_then(|g| g.joins.get(&to.group));
        if joins.and_then(|j| j.get(&(from.vrnic.clone(), to.vrnic.clone()))).is_some_and(|n| *n > 1) {
            return Ok(());
        }
        for (near, far) in rule.sides() {
            match far.vrnic.as_ref().and_then(|v| self.vrnics.get(v).map(|object| (v, object))) {
                Some((name, v)) => self.check_seen_by(&near.group, name, v, work)?,
                None => self.check_group_seen_by(&near.group, &far.group, work)?,
            }
        }
        Ok(())
    }

    /// The groups of which `viewer` sees something, including itself.
    fn seen_by<'a>(&'a self, viewer: &'a Name) -> impl Iterator<Item = (&'a Name, &'a Group)> {
        let joined = self.joins_of(viewer).map(|(far, _)| far);
        joined.chain([viewer]).filter_map(|g| self.groups.get_key_value(g))
    }

    /// Whether `viewer` sees a vRNIC of the group `name`.
    fn is_seen_by(viewer: &Name, (name, group): (&Name, &Group), vrnic: &Name) -> bool {
        let seen = |j: &Joins| joins_near(j, None) || joins_near(j, Some(vrnic));
        name == viewer || group.joins.get(viewer).is_some_and(seen)
    }

    /// Refuses an address of vRNIC `name` that another vRNIC seen by the group `viewer` has.
    fn check_seen_by(&self, viewer: &Name, name: &Name, v: &Vrnic, work: &mut u64) -> Result<(), Clash> {
        for other in self.seen_by(viewer).filter(|(g, _)| **g != v.group) {
            *work += 1;
            for ip in &v.ips {
                if let Some(holder) = other.1.addresses.get(ip).filter(|h| Self::is_seen_by(viewer, other, h)) {
                    let both = [(name.clone(), v.group.clone()), (holder.clone(), other.0.clone())];
                    return Err(Clash { ip: *ip, both, viewer: viewer.clone() });
                }
            }
        }
        Ok(())
    }

    /// Refuses an address of any vRNIC of `group` that another vRNIC seen by the group `viewer` has. The smaller
    /// group's addresses are looked up in the larger group.
    fn check_group_seen_by(&self, viewer: &Name, group: &Name, work: &mut u64) -> Result<(), Clash> {
        let Some(mine) = self.groups.get(group) else { return Ok(()) };
        for other in self.seen_by(viewer).filter(|(g, _)| *g != group) {
            let theirs = &other.1.addresses;
            let (few, many) =
                if theirs.len() < mine.addresses.len() { (theirs, &mine.addresses) } else { (&mine.addresses, theirs) };
            *work += 1 + few.len() as u64;
            let common = few.keys().filter(|ip| many.contains_key(*ip));
            let mut clashes = common.filter_map(|ip| Some((ip, mine.addresses.get(ip)?, theirs.get(ip)?)));
            if let Some((ip, name, holder)) = clashes.find(|(_, _, h)| Self::is_seen_by(viewer, other, h)) {
                let both = [(name.clone(), group.clone()), (holder.clone(), other.0.clone())];
                return Err(Clash { ip: *ip, both, viewer: viewer.clone() });
            }
        }
        Ok(())
    }

    /// The hosts that have vRNICs at a rule's end.
    pub(crate) fn hosts_of(&self, end: &End) -> Vec<Name> {
        match &end.vrnic {
            Some(v) => self.vrnics.get(v).and_then(|v| v.host.clone()).into_iter().collect(),
            None => self.groups.get(&end.group).into_iter().flat_map(|g| g.hosts.keys().cloned()).collect(),
        }
    }

    /// The vRNICs at a rule's end.
    pub(crate) fn vrnics_of(&self, end: &End) -> Vec<Name> {
        match &end.vrnic {
            Some(v) => vec![v.clone()],
            None => self.groups.get(&end.group).into_iter().flat_map(|g| g.vrnics.iter().cloned()).collect(),
        }
    }
}

/// Decrements a count. An entry that reaches 0 is removed.
fn count_down<K: Ord + Borrow<Q>, Q: Ord + ?Sized>(counts: &mut BTreeMap<K, u32>, key: &Q) {
    if let Some(n) = counts.get_mut(key) {
        *n -= 1;
        if *n == 0 {
            counts.remove(key);
        }
    }
}
