//! All that a fleet is, with the indexes that make each question cost what its answer is about. Everything changes by [`State::set`], which
//! gives back what was there before; setting that again undoes it.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;

use crate::error::Refusal;
use crate::model::{Kind, Selector, ips, ranges, selector};
use crate::net::{Net, Taken};
use crate::v1::{self, object::Object};

/// A name. Many indexes share it.
pub type Name = Arc<str>;

/// A group with what is in it.
#[derive(Clone, Debug, Default)]
pub struct Group {
    pub(crate) object: v1::Group,
    pub(crate) revision: u64,
    pub(crate) ranges: Vec<Net>,
    pub(crate) vrnics: BTreeSet<Name>,
    /// How many of its vRNICs each host has.
    pub(crate) hosts: BTreeMap<Name, u32>,
    /// The rules that name it or one of its vRNICs.
    pub(crate) rules: BTreeSet<Name>,
    pub(crate) addresses: HashMap<IpAddr, Name>,
    pub(crate) taken: Taken,
    /// The address that was given last out of each range.
    pub(crate) given: BTreeMap<Net, IpAddr>,
}

/// A vRNIC with its addresses as such.
#[derive(Clone, Debug)]
pub struct Vrnic {
    pub(crate) object: v1::Vrnic,
    pub(crate) revision: u64,
    pub(crate) group: Name,
    pub(crate) host: Option<Name>,
    pub(crate) ips: Vec<IpAddr>,
}

/// One end of a rule: a group, or one vRNIC of it.
#[derive(Clone, Debug, PartialEq, Eq)]
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

impl Rule {
    /// True if it lets vRNICs of two groups talk.
    pub(crate) fn joins(&self) -> bool {
        self.object.action() == v1::rule::Action::Allow && self.ends[0].group != self.ends[1].group
    }

    /// Its ends, each with the other one.
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
    /// How many vRNICs of each group it has.
    pub(crate) groups: BTreeMap<Name, u32>,
}

/// A group's name, the other group's or nothing, and the secret's number.
pub(crate) type SecretName = (String, String, u32);

/// All that a fleet is.
#[derive(Clone, Debug, Default)]
pub struct State {
    /// The state's number.
    pub(crate) fleet: String,
    /// How many changes made it.
    pub(crate) revision: u64,
    pub(crate) hosts: BTreeMap<Name, Host>,
    pub(crate) groups: BTreeMap<Name, Group>,
    pub(crate) vrnics: BTreeMap<Name, Vrnic>,
    pub(crate) rules: BTreeMap<Name, Rule>,
    pub(crate) macs: HashMap<String, Name>,
    pub(crate) vnis: Taken,
    pub(crate) vni_of: HashMap<u32, Name>,
    pub(crate) tokens: BTreeMap<String, v1::TokenRecord>,
    pub(crate) secrets: BTreeMap<SecretName, v1::SecretRecord>,
    pub(crate) audit: VecDeque<v1::AuditEntry>,
}

/// An object with the change that made it what it is.
pub type Kept = (Object, u64);

impl State {
    /// An object as it is.
    pub(crate) fn get(&self, kind: Kind, name: &str) -> Option<Kept> {
        match kind {
            Kind::Host => self.hosts.get(name).map(|o| (o.object.clone().into(), o.revision)),
            Kind::Group => self.groups.get(name).map(|o| (o.object.clone().into(), o.revision)),
            Kind::Vrnic => self.vrnics.get(name).map(|o| (o.object.clone().into(), o.revision)),
            Kind::Rule => self.rules.get(name).map(|o| (o.object.clone().into(), o.revision)),
        }
    }

    /// Makes an object what it is to be, or removes it. Gives back what it was.
    ///
    /// # Errors
    /// It names a group, host or vRNIC that does not exist, or others need it. Nothing was changed.
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
        self.groups.remove(name);
        Ok(())
    }

    /// Gives a number back, unless another group has it by now.
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
        for end in &ends {
            if let Some(group) = self.groups.get_mut(&end.group) {
                group.rules.insert(name.clone());
            }
        }
        self.rules.insert(name, Rule { object, revision, ends });
        Ok(())
    }

    fn remove_rule(&mut self, name: &str) {
        for end in self.rules.remove(name).into_iter().flat_map(|r| r.ends) {
            if let Some(group) = self.groups.get_mut(&end.group) {
                group.rules.remove(name);
            }
        }
    }

    /// The rules that name a group or one of its vRNICs.
    pub(crate) fn rules_of(&self, group: &str) -> impl Iterator<Item = (&Name, &Rule)> {
        self.groups.get(group).into_iter().flat_map(|g| &g.rules).filter_map(|n| self.rules.get_key_value(n))
    }

    /// The rules that name a vRNIC itself.
    pub(crate) fn rules_naming(&self, vrnic: &str) -> Vec<Name> {
        let Some(v) = self.vrnics.get(vrnic) else { return Vec::new() };
        let names = |r: &Rule| r.ends.iter().any(|e| e.vrnic.as_deref() == Some(vrnic));
        self.rules_of(&v.group).filter(|(_, r)| names(r)).map(|(n, _)| n.clone()).collect()
    }

    /// What vRNICs of a group see of other groups: the other ends of the rules that join them with it.
    fn neighbours(&self, group: &str) -> impl Iterator<Item = (&Name, &End)> {
        self.rules_of(group)
            .filter(|(_, r)| r.joins())
            .flat_map(|(n, r)| r.sides().map(|(near, far)| (n, near, far)))
            .filter(move |(_, near, _)| &*near.group == group)
            .map(|(n, _, far)| (n, far))
    }

    /// The addresses of a group that vRNICs of joined groups see too, or whose addresses they see: a new one of it must be none of these.
    pub(crate) fn joined_groups(&self, group: &str) -> BTreeSet<Name> {
        let near: BTreeSet<Name> = self.neighbours(group).map(|(_, far)| far.group.clone()).collect();
        let mut all = near.clone();
        for g in &near {
            all.extend(self.neighbours(g).map(|(_, far)| far.group.clone()));
        }
        all.remove(group);
        all
    }

    /// Who of an end has an address.
    fn holder(&self, end: &End, ip: IpAddr) -> Option<&Name> {
        let name = self.groups.get(&end.group)?.addresses.get(&ip)?;
        end.vrnic.as_ref().is_none_or(|v| v == name).then_some(name)
    }

    /// Refuses two vRNICs that a third one, or one of them, would reach at the same address. `vrnic` has changed.
    pub(crate) fn check_addresses_of(&self, vrnic: &str) -> Result<(), Refusal> {
        let Some(v) = self.vrnics.get(vrnic) else { return Ok(()) };
        for (_, rule) in self.rules_of(&v.group).filter(|(_, r)| r.joins()) {
            for (near, far) in rule.sides() {
                if near.group == v.group && near.vrnic.as_ref().is_none_or(|n| &**n == vrnic) {
                    self.check_seen_by(&far.group, &[vrnic])?;
                }
            }
        }
        self.check_seen_by(&v.group, &[vrnic])
    }

    /// Refuses a rule by which one address would mean two vRNICs.
    pub(crate) fn check_addresses_by(&self, rule: &str) -> Result<(), Refusal> {
        let Some(rule) = self.rules.get(rule).filter(|r| r.joins()) else { return Ok(()) };
        for (near, far) in rule.sides() {
            let all: Vec<&str> = match &far.vrnic {
                Some(v) => vec![v],
                None => self.groups.get(&far.group).into_iter().flat_map(|g| &g.vrnics).map(|v| &**v).collect(),
            };
            self.check_seen_by(&near.group, &all)?;
        }
        Ok(())
    }

    /// Refuses an address of one of `vrnics` that somebody else has whom the group `viewer` sees, too.
    fn check_seen_by(&self, viewer: &str, vrnics: &[&str]) -> Result<(), Refusal> {
        let Some((viewer, _)) = self.groups.get_key_value(viewer) else { return Ok(()) };
        let own = End { group: viewer.clone(), vrnic: None };
        let mut ends: Vec<(Option<&Name>, &End)> = vec![(None, &own)];
        for (rule, end) in self.neighbours(viewer) {
            if !ends.iter().any(|(_, e)| *e == end) {
                ends.push((Some(rule), end));
            }
        }
        for v in vrnics.iter().filter_map(|v| self.vrnics.get(*v)) {
            for (rule, end) in ends.iter().filter(|(_, e)| e.group != v.group) {
                let Some((ip, other)) = v.ips.iter().find_map(|ip| Some((ip, self.holder(end, *ip)?))) else {
                    continue;
                };
                let by = rule.map(|r| format!(" (rule {r})")).unwrap_or_default();
                return Err(Refusal::conflict(format_args!(
                    "vRNIC {} of group {} and vRNIC {other} of group {} both have {ip}, and group {viewer} would see both{by}: joined groups need different addresses",
                    v.object.name, v.group, end.group
                )));
            }
        }
        Ok(())
    }

    /// True if a host has what a rule's end names.
    pub(crate) fn has_end(&self, host: &str, end: &End) -> bool {
        match &end.vrnic {
            Some(v) => self.vrnics.get(v).is_some_and(|v| v.host.as_deref() == Some(host)),
            None => self.has_group(host, &end.group),
        }
    }

    /// True if a host has vRNICs of a group.
    pub(crate) fn has_group(&self, host: &str, group: &str) -> bool {
        self.hosts.get(host).is_some_and(|h| h.groups.contains_key(group))
    }

    /// The hosts that have what a rule's end names.
    pub(crate) fn hosts_of(&self, end: &End) -> Vec<Name> {
        match &end.vrnic {
            Some(v) => self.vrnics.get(v).and_then(|v| v.host.clone()).into_iter().collect(),
            None => self.groups.get(&end.group).into_iter().flat_map(|g| g.hosts.keys().cloned()).collect(),
        }
    }

    /// The vRNICs that a rule's end names.
    pub(crate) fn vrnics_of(&self, end: &End) -> Vec<Name> {
        match &end.vrnic {
            Some(v) => vec![v.clone()],
            None => self.groups.get(&end.group).into_iter().flat_map(|g| g.vrnics.iter().cloned()).collect(),
        }
    }
}

fn count_down(counts: &mut BTreeMap<Name, u32>, name: &str) {
    if let Some(n) = counts.get_mut(name) {
        *n -= 1;
        if *n == 0 {
            counts.remove(name);
        }
    }
}
