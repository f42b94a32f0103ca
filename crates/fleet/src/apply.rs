//! Turns declarations into objects: fills in missing values (addresses, numbers, MACs), and refuses contradictions.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use sha2::{Digest, Sha256};
use unirdma_formats::Mac;

use crate::error::Refusal;
use crate::liveness::MAX_ANNOUNCED;
use crate::model::{self, GROUPS, HOSTS, Kind, Limit, MAX_VNI, RULES, VRNICS, check};
use crate::net::{Net, Taken};
use crate::state::{Clash, Name};
use crate::tokens::Actor;
use crate::transaction::Transaction;
use crate::v1::{self, object::Object};

/// A declared object, and the revision that the present object must have (0: any).
pub(crate) type Asked = (Object, u64);

/// Most groups and addresses that a call of a non-administrator may compare to check the addresses of joined groups.
const MAX_WORK: u64 = 4_000_000;

/// Objects that a call creates: the number of each kind, and their groups.
#[derive(Default)]
struct Made {
    vrnics: usize,
    rules: usize,
    vrnics_in: BTreeSet<Name>,
    rules_in: BTreeSet<Name>,
}

/// The limit of a group: the administrator's value, or else, for other actors, a group's default part.
fn limit(actor: &Actor, said: Option<u32>, limit: &Limit) -> usize {
    said.map_or(if actor.is_admin() { usize::MAX } else { limit.part() }, |m| m as usize)
}

/// Refusal for a name that is taken by an object invisible to the actor. It does not reveal what the object is.
fn taken() -> Refusal {
    Refusal::conflict("the name is not free; choose another one")
}

impl Transaction<'_> {
    /// Puts declared objects. With `prune`, deletes all other objects within the actor's reach.
    pub fn declare(&mut self, actor: &Actor, asked: Vec<Asked>, prune: bool) -> Result<(), Refusal> {
        actor.may_change()?;
        let mut names = BTreeSet::new();
        for (object, revision) in &asked {
            check(object)?;
            let (kind, name) = (object.kind(), object.name());
            if !names.insert((kind, name.to_owned())) {
                return Err(Refusal::invalid(format_args!("{kind} {name} is declared twice; leave one of them out")));
            }
            self.may_declare(actor, object).map_err(|e| e.within(format_args!("{kind} {name}")))?;
            self.check_revision(actor, kind, name, *revision)?;
        }
        if prune {
            self.prune(actor, &names)?;
        }
        let (mut made, mut changed) = (Made::default(), BTreeSet::new());
        // Addresses and rules may change hands within one call, so changed objects are removed first. Stated values are
        // taken before the centre chooses others.
        let mut olds: BTreeMap<String, v1::Vrnic> = BTreeMap::new();
        for (object, _) in &asked {
            match object {
                Object::Rule(r) if self.state.rules.get(r.name.as_str()).is_some_and(|old| old.object != *r) => {
                    self.remove(Kind::Rule, &r.name)?;
                    changed.insert(r.name.clone());
                }
                Object::Vrnic(v) if !v.ips.is_empty() => {
                    if let Some(old) = self.state.vrnics.get(v.name.as_str()).map(|o| o.object.clone()) {
                        let same_group = old.group == v.group;
                        olds.insert(v.name.clone(), old);
                        if same_group {
                            self.remove(Kind::Vrnic, &v.name)?;
                        }
                    }
                }
                _ => {}
            }
        }
        let mut asked: Vec<Object> = asked.into_iter().map(|(o, _)| o).collect();
        asked.sort_by_key(|o| {
            let chosen = match o {
                Object::Group(g) => g.vni.is_none() && !self.state.groups.contains_key(g.name.as_str()),
                Object::Vrnic(v) => v.ips.is_empty(),
                _ => false,
            };
            (o.kind(), chosen)
        });
        for object in asked {
            let place = format!("{} {}", object.kind(), object.name());
            let done = match object {
                Object::Host(h) => self.declare_host(actor, h),
                Object::Group(g) => self.declare_group(actor, g),
                Object::Vrnic(v) => {
                    let old = olds
                        .remove(&v.name)
                        .or_else(|| self.state.vrnics.get(v.name.as_str()).map(|o| o.object.clone()));
                    self.declare_vrnic(actor, v, old, &mut made)
                }
                Object::Rule(r) => {
                    let old = changed.contains(&r.name);
                    self.declare_rule(actor, r, old, &mut made)
                }
            };
            done.map_err(|e| if e.what.starts_with(&place) { e } else { e.within(&place) })?;
            if self.work > MAX_WORK && !actor.is_admin() {
                return Err(Refusal::full(
                    "too many addresses of joined groups would have to be compared; declare less in one call, or ask an administrator",
                ));
            }
        }
        self.check_room(actor, &made)
    }

    /// Refuses objects that the actor may not declare, before any lookup of something that it does not see.
    fn may_declare(&self, actor: &Actor, object: &Object) -> Result<(), Refusal> {
        match object {
            Object::Host(_) => actor.needs_admin("hosts"),
            Object::Group(_) => actor.needs_admin("groups"),
            Object::Vrnic(v) => {
                actor.may_group(&v.group)?;
                let other = self.state.vrnics.get(v.name.as_str()).is_some_and(|old| !actor.reaches(&old.object));
                if other { Err(taken()) } else { Ok(()) }
            }
            Object::Rule(r) => {
                let other =
                    self.state.rules.contains_key(r.name.as_str()) && !self.state.is_seen(actor, Kind::Rule, &r.name);
                if other { Err(taken()) } else { Ok(()) }
            }
        }
    }

    /// Refuses a call that creates more than the limits allow. A group above its limit may still be changed otherwise.
    fn check_room(&self, actor: &Actor, made: &Made) -> Result<(), Refusal> {
        let state = &*self.state;
        let of =
            |names: &BTreeSet<Name>| names.iter().filter_map(|g| state.groups.get_key_value(g)).collect::<Vec<_>>();
        for (name, g) in of(&made.vrnics_in) {
            let most = limit(actor, g.object.max_vrnics, &VRNICS);
            VRNICS.room_in_group(name, g.vrnics.len(), most, "max_vrnics")?;
        }
        for (name, g) in of(&made.rules_in) {
            RULES.room_in_group(name, g.rules.len(), limit(actor, g.object.max_rules, &RULES), "max_rules")?;
        }
        // A limit that an administrator sets for a group holds for the group's tenants, too.
        let mine: Vec<_> = actor.groups().into_iter().flatten().filter_map(|g| state.groups.get(g.as_str())).collect();
        let part = |all: &Limit, of: &dyn Fn(&v1::Group) -> Option<u32>| {
            mine.iter().map(|g| limit(actor, of(&g.object), all)).max().unwrap_or(0).max(all.part())
        };
        if made.vrnics > 0 {
            let (own, part) = match actor.host() {
                Some(host) => (state.hosts.get(host).map_or(0, |h| h.vrnics.len()), MAX_ANNOUNCED),
                None => (mine.iter().map(|g| g.vrnics.len()).sum(), part(&VRNICS, &|g| g.max_vrnics)),
            };
            VRNICS.room(actor, state.vrnics.len(), own, part)?;
        }
        if made.rules > 0 {
            let own = actor.groups().map_or(0, |mine| state.rules_within(mine));
            RULES.room(actor, state.rules.len(), own, part(&RULES, &|g| g.max_rules))?;
        }
        Ok(())
    }

    fn check_revision(&self, actor: &Actor, kind: Kind, name: &str, asked: u64) -> Result<(), Refusal> {
        if asked == 0 {
            return Ok(());
        }
        match self.state.get(kind, name).filter(|_| self.state.is_seen(actor, kind, name)) {
            Some((_, revision)) if revision == asked => Ok(()),
            Some((_, revision)) => Err(Refusal::stale(format_args!(
                "{kind} {name} was changed since: it has revision {revision}, not {asked}; get it again"
            ))),
            None => Err(Refusal::stale(format_args!("{kind} {name} does not exist any more; get it again"))),
        }
    }

    fn declare_host(&mut self, actor: &Actor, mut h: v1::Host) -> Result<(), Refusal> {
        actor.needs_admin("hosts")?;
        let old = self.state.hosts.get(h.name.as_str()).map(|o| &o.object);
        if let Some(old) = old {
            if !h.addresses.is_empty() && h.addresses != old.addresses {
                return Err(Refusal::invalid(
                    "its addresses are those that it announces (unirdma host --address); leave them out",
                ));
            }
            h.addresses = old.addresses.clone();
        } else if !h.addresses.is_empty() {
            return Err(Refusal::invalid(
                "its addresses are those that it will announce (unirdma host --address); leave them out",
            ));
        }
        if old.is_none() {
            HOSTS.room(actor, self.state.hosts.len() + 1, 0, 0)?;
        }
        self.put(h.into())
    }

    fn declare_group(&mut self, actor: &Actor, mut g: v1::Group) -> Result<(), Refusal> {
        actor.needs_admin("groups")?;
        let old = self.state.groups.get(g.name.as_str());
        if old.is_none() {
            GROUPS.room(actor, self.state.groups.len() + 1, 0, 0)?;
        }
        let vni = match (g.vni, old.and_then(|o| o.object.vni)) {
            (Some(vni), _) | (None, Some(vni)) => vni,
            (None, None) => {
                let free = self.state.vnis.find_number(1, MAX_VNI);
                free.ok_or_else(|| Refusal::full("all VNIs are taken"))?
            }
        };
        if let Some(other) = self.state.vni_of.get(&vni).filter(|o| ***o != *g.name) {
            return Err(Refusal::conflict(format_args!("VNI {vni} is that of group {other} already")));
        }
        g.vni = Some(vni);
        let other = g.vlan.and_then(|vlan| self.state.vlan_of.get(&vlan)).filter(|o| ***o != *g.name);
        if let (Some(vlan), Some(other)) = (g.vlan, other) {
            return Err(Refusal::conflict(format_args!("VLAN {vlan} is that of group {other} already")));
        }
        if let Some(old) = old {
            let needs_vf = |v: &&Name| self.state.vrnics.get(*v).is_some_and(|v| v.object.way() == v1::Way::Vf);
            if g.secret
                && !old.object.secret
                && let Some(v) = old.vrnics.iter().find(needs_vf)
            {
                return Err(Refusal::conflict(format_args!(
                    "its vRNIC {v} has the way VF, and a VF does not encrypt; give that another way first"
                )));
            }
            let ranges = model::ranges(&g)?;
            if ranges != old.ranges
                && let Some((ip, vrnic)) = old.addresses.iter().find(|(ip, _)| !ranges.iter().any(|r| r.contains(**ip)))
            {
                return Err(Refusal::conflict(format_args!(
                    "its vRNIC {vrnic} has {ip}, which is outside its new ranges"
                )));
            }
            for (have, most, what) in [
                (old.vrnics.len(), g.max_vrnics, "vRNICs, more than max_vrnics"),
                (old.rules.len(), g.max_rules, "rules, more than max_rules"),
            ] {
                if let Some(most) = most.filter(|m| (*m as usize) < have) {
                    return Err(Refusal::conflict(format_args!("it has {have} {what}, {most}")));
                }
            }
        }
        self.put(g.into())
    }

    /// `old` is the vRNIC before this change.
    fn declare_vrnic(
        &mut self,
        actor: &Actor,
        mut v: v1::Vrnic,
        old: Option<v1::Vrnic>,
        made: &mut Made,
    ) -> Result<(), Refusal> {
        let Some(group) = self.state.groups.get(v.group.as_str()) else {
            return Err(Refusal::not_found(format_args!("there is no group {}", v.group)));
        };
        if v.way() == v1::Way::Vf && group.object.secret {
            return Err(Refusal::conflict(format_args!(
                "group {} has a secret, and a VF does not encrypt; choose another group, or the way SOFT",
                v.group
            )));
        }
        if let Some(old) = &old {
            if old.group != v.group {
                let text = format!(
                    "it is in group {}, and stays there: delete it and make it anew in group {}",
                    old.group, v.group
                );
                return Err(Refusal::conflict(text));
            }
            if v.host.is_empty() {
                v.host.clone_from(&old.host);
            }
            for (stated, given, what) in [(&v.mac, &old.mac, "MAC"), (&v.guid, &old.guid, "GUID")] {
                if !stated.is_empty() && stated != given {
                    return Err(Refusal::invalid(format_args!(
                        "its {what} is {given}, which the centre has given for good; leave it out"
                    )));
                }
            }
            (v.mac, v.guid) = (old.mac.clone(), old.guid.clone());
            if actor.host().is_none() {
                v.by_host = old.by_host;
            }
        } else {
            made.vrnics += 1;
            made.vrnics_in.insert(v.group.as_str().into());
            if !(v.mac.is_empty() && v.guid.is_empty()) {
                return Err(Refusal::invalid("its MAC and GUID are given by the centre; leave them out"));
            }
            if v.by_host != actor.host().is_some() {
                return Err(Refusal::invalid("by_host says that a host's own administrator made it; leave it out"));
            }
            (v.mac, v.guid) = self.identity(&v);
        }
        self.fill_ips(&mut v, old.as_ref())?;
        if let Some(old) = &old {
            self.check_vrnic_change(actor, old, &v)?;
        }
        if old.as_ref().is_none_or(|old| old.host != v.host) && !self.may_use_host(actor, &v.host) {
            return Err(Refusal::not_found(format_args!(
                "there is no host {} for {}; an administrator makes a token that names it",
                v.host,
                actor.title()
            )));
        }
        self.tenant_limits(actor, old.as_ref(), &v)?;
        let name = v.name.clone();
        self.put(v.into())?;
        self.state.check_addresses_of(&name, &mut self.work).map_err(|clash| self.told(actor, clash))
    }

    /// The refusal of an address clash. It names only what the actor sees.
    fn told(&self, actor: &Actor, clash: Clash) -> Refusal {
        if clash.both.iter().all(|(_, group)| actor.sees_group(group)) && actor.sees_group(&clash.viewer) {
            return clash.into();
        }
        Refusal::conflict(format_args!("{} is taken in a group that a rule joins with this one", clash.ip))
    }

    /// Whether an actor may put vRNICs on a host. A tenant may if its token names the host, or if the host has vRNICs
    /// of its groups.
    fn may_use_host(&self, actor: &Actor, host: &str) -> bool {
        let Some(named) = actor.hosts().filter(|_| !host.is_empty()) else { return true };
        let has = |g: &String| self.state.groups.get(g.as_str()).is_some_and(|g| g.hosts.contains_key(host));
        self.state.hosts.contains_key(host) && (named.contains(host) || actor.groups().into_iter().flatten().any(has))
    }

    fn check_vrnic_change(&self, actor: &Actor, old: &v1::Vrnic, new: &v1::Vrnic) -> Result<(), Refusal> {
        if old == new {
            return Ok(());
        }
        match actor.host() {
            None if old.by_host => {
                let text = format!(
                    "it was made on host {} by its administrator, who alone changes it: `unirdma vrnic` there",
                    old.host
                );
                return Err(Refusal::denied(text));
            }
            _ => {}
        }
        let programs = self.facts.programs(&old.name);
        if old.host != new.host && !old.host.is_empty() && programs > 0 {
            let text = format!("{programs} programs use it on host {}; end them before it is moved", old.host);
            return Err(Refusal::conflict(text));
        }
        Ok(())
    }

    /// Tenants may set limits only up to the limits of their groups.
    fn tenant_limits(&self, actor: &Actor, old: Option<&v1::Vrnic>, v: &v1::Vrnic) -> Result<(), Refusal> {
        let Some(group) = self.state.groups.get(v.group.as_str()).filter(|_| actor.is_tenant()) else { return Ok(()) };
        if v.allow_spoof && !old.is_some_and(|o| o.allow_spoof) {
            return Err(Refusal::denied(
                "only an administrator may let it send with the addresses of others (allow_spoof)",
            ));
        }
        if v.way() != v1::Way::Soft && group.object.vlan.is_none() && old.is_none_or(|o| o.way != v.way) {
            return Err(Refusal::denied(format_args!(
                "group {} has no VLAN, so only an administrator may let its vRNICs use VFs",
                v.group
            )));
        }
        let own = v.limits.unwrap_or_default();
        let most = group.object.limits.unwrap_or_default();
        let wide = |n: Option<u32>| n.map(u64::from);
        let share = (v.share.unwrap_or_default(), group.object.share.unwrap_or_default());
        // A rate or a number of operations of 0 means no limit.
        let rate = |n: Option<u64>| n.map(|n| if n == 0 { u64::MAX } else { n });
        for (what, own, most) in [
            ("max_qp", wide(own.max_qp), wide(most.max_qp)),
            ("max_cq", wide(own.max_cq), wide(most.max_cq)),
            ("max_mr", wide(own.max_mr), wide(most.max_mr)),
            ("max_mr_bytes", own.max_mr_bytes, most.max_mr_bytes),
            ("max_sessions", wide(own.max_sessions), wide(most.max_sessions)),
            ("max_descriptors", own.max_descriptors, most.max_descriptors),
            ("max_mappings", own.max_mappings, most.max_mappings),
            ("max_address_space", own.max_address_space, most.max_address_space),
            ("max_pieces", own.max_pieces, most.max_pieces),
            ("max_filled", own.max_filled, most.max_filled),
            ("weight", wide(share.0.weight), wide(share.1.weight)),
            ("rate", rate(share.0.rate), rate(share.1.rate)),
            ("ops", rate(share.0.ops), rate(share.1.ops)),
            ("burst", share.0.burst, share.1.burst),
        ] {
            if let (Some(own), Some(most)) = (own, most)
                && own > most
            {
                return Err(Refusal::denied(format_args!("{what} may be {most} at most in group {}", v.group)));
            }
        }
        Ok(())
    }

    /// Chooses the addresses that the vRNIC does not state, and checks the stated ones.
    fn fill_ips(&mut self, v: &mut v1::Vrnic, old: Option<&v1::Vrnic>) -> Result<(), Refusal> {
        let Some(group) = self.state.groups.get(v.group.as_str()) else { return Ok(()) };
        if v.ips.is_empty() {
            v.ips = match old {
                Some(old) => old.ips.clone(),
                None => self.choose_ips(&v.group)?,
            };
            return Ok(());
        }
        let range_of = |ip: IpAddr| group.ranges.iter().find(|r| r.contains(ip));
        let ips = model::ips(v)?;
        v.ips = ips
            .into_iter()
            .map(|(ip, prefix)| match range_of(ip) {
                Some(range) => Ok(Net { addr: ip, prefix: prefix.unwrap_or(range.prefix) }.to_string()),
                None => {
                    let ranges: Vec<String> = group.ranges.iter().map(ToString::to_string).collect();
                    let text = format!("{ip} is outside the ranges of group {}: {}", v.group, ranges.join(", "));
                    Err(Refusal::invalid(text))
                }
            })
            .collect::<Result<_, _>>()?;
        Ok(())
    }

    fn choose_ips(&mut self, group: &str) -> Result<Vec<String>, Refusal> {
        if !self.joined.contains_key(group) {
            self.joined.insert(group.into(), self.state.joined_groups(group));
        }
        let joined = &self.joined[group];
        let Some(g) = self.state.groups.get(group) else { return Ok(Vec::new()) };
        let others: Vec<&Taken> = joined.iter().filter_map(|o| self.state.groups.get(o)).map(|o| &o.taken).collect();
        let given = self.given.get(group);
        let mut chosen = Vec::new();
        for range in &g.ranges {
            match g.taken.find(range, &others, given.and_then(|g| g.get(range)).copied()) {
                Some(addr) => chosen.push((*range, addr)),
                None => return Err(Refusal::full(format_args!("all addresses of {range} in group {group} are taken"))),
            }
        }
        let texts = chosen.iter().map(|(range, addr)| Net { addr: *addr, prefix: range.prefix }.to_string()).collect();
        self.given.entry(group.into()).or_default().extend(chosen);
        Ok(texts)
    }

    /// A MAC derived from the vRNIC's names, which no other vRNIC of the fleet has; and the GUID derived from it.
    fn identity(&self, v: &v1::Vrnic) -> (String, String) {
        for turn in 0u64.. {
            let mut hash = Sha256::new();
            for part in [&self.state.fleet, &v.group, &v.name] {
                hash.update((part.len() as u64).to_be_bytes());
                hash.update(part);
            }
            hash.update(turn.to_be_bytes());
            let bytes = hash.finalize();
            let mut mac = [0; 6];
            mac.copy_from_slice(&bytes[..6]);
            // The MAC is locally administered, and not multicast.
            mac[0] = mac[0] & 0xfc | 2;
            let mac = Mac(mac);
            if !self.state.macs.contains_key(&mac.to_string()) {
                return (mac.to_string(), format!("{:016x}", mac.guid().0));
            }
        }
        unreachable!("there are more numbers than vRNICs")
    }

    /// Refuses a rule if an end of it is outside the actor's groups.
    fn may_rule(&self, actor: &Actor, rule: &v1::Rule) -> Result<(), Refusal> {
        for text in [&rule.from, &rule.to] {
            match model::selector(text)? {
                model::Selector::Group(g) => actor.may_group(&g)?,
                model::Selector::Vrnic(_) if actor.groups().is_none() => {}
                model::Selector::Vrnic(v) if self.state.is_seen(actor, Kind::Vrnic, &v) => {}
                model::Selector::Vrnic(v) => {
                    return Err(Refusal::denied(format_args!("vRNIC {v} is in no group of {}", actor.title())));
                }
            }
        }
        Ok(())
    }

    /// `existed`: the rule existed before this call, and is changed by it.
    fn declare_rule(&mut self, actor: &Actor, r: v1::Rule, existed: bool, made: &mut Made) -> Result<(), Refusal> {
        self.may_rule(actor, &r)?;
        if self.state.rules.get(r.name.as_str()).is_some_and(|old| old.object == r) {
            return Ok(());
        }
        let name = r.name.clone();
        self.put(r.into())?;
        if !existed {
            made.rules += 1;
        }
        let ends = self.state.rules.get(name.as_str()).into_iter().flat_map(|r| &r.ends);
        made.rules_in.extend(ends.map(|e| e.group.clone()));
        self.state.check_addresses_by(&name, &mut self.work).map_err(|clash| self.told(actor, clash))
    }

    fn prune(&mut self, actor: &Actor, keep: &BTreeSet<(Kind, String)>) -> Result<(), Refusal> {
        let kept = |kind, name: &str| keep.contains(&(kind, name.to_owned()));
        let state = &*self.state;
        let mine = actor.groups().map(|mine| mine.iter().filter_map(|g| state.groups.get(g.as_str())));
        let (rules, vrnics): (BTreeSet<&Name>, BTreeSet<&Name>) = match mine {
            None => (state.rules.keys().collect(), state.vrnics.keys().collect()),
            Some(mine) => (mine.clone().flat_map(|g| &g.rules).collect(), mine.flat_map(|g| &g.vrnics).collect()),
        };
        let rules = rules.into_iter().filter(|n| !kept(Kind::Rule, n) && state.is_seen(actor, Kind::Rule, n));
        let by_host = |n: &Name| state.vrnics.get(n).is_some_and(|v| v.object.by_host);
        let vrnics = vrnics.into_iter().filter(|n| !kept(Kind::Vrnic, n) && !by_host(n));
        let (rules, vrnics): (Vec<Name>, Vec<Name>) = (rules.cloned().collect(), vrnics.cloned().collect());
        rules.iter().try_for_each(|name| self.remove(Kind::Rule, name))?;
        vrnics.iter().try_for_each(|name| self.delete_vrnic(actor, name, false))?;
        if !actor.is_admin() {
            return Ok(());
        }
        let groups = self.state.groups.iter().filter(|(n, g)| !kept(Kind::Group, n) && g.vrnics.is_empty());
        for name in groups.map(|(n, _)| n.to_string()).collect::<Vec<_>>() {
            self.remove(Kind::Group, &name)?;
        }
        Ok(())
    }

    /// Deletes objects. With `force`, also deletes objects that depend on them, and vRNICs that programs use.
    pub fn delete(&mut self, actor: &Actor, names: &[v1::Name], force: bool) -> Result<(), Refusal> {
        actor.may_change()?;
        for n in names {
            let Some(kind) = Kind::of(n.kind)? else {
                return Err(Refusal::invalid(format_args!(
                    "say of which kind {} is: host, group, vrnic or rule",
                    n.name
                )));
            };
            model::check_name(kind, &n.name)?;
            // To the actor, an object that it does not see does not exist.
            if !self.state.is_seen(actor, kind, &n.name) {
                return Err(Refusal::not_found(format_args!("there is no {kind} {}", n.name)));
            }
            match kind {
                Kind::Rule => self.remove(kind, &n.name)?,
                Kind::Vrnic => self.delete_vrnic(actor, &n.name, force)?,
                Kind::Group => self.delete_group(actor, &n.name, force)?,
                Kind::Host => self.delete_host(actor, &n.name, force)?,
            }
        }
        Ok(())
    }

    /// Deletes a vRNIC.
    pub fn delete_vrnic(&mut self, actor: &Actor, name: &str, force: bool) -> Result<(), Refusal> {
        let Some(v) = self.state.vrnics.get(name).map(|v| v.object.clone()) else { return Ok(()) };
        if v.by_host && actor.host() != Some(&v.host) && !force {
            return Err(Refusal::denied(format_args!(
                "vRNIC {name} was made on host {} by its administrator, who removes it there, or you with --force",
                v.host
            )));
        }
        let programs = self.facts.programs(name);
        if programs > 0 && !force {
            return Err(Refusal::conflict(format_args!(
                "{programs} programs use vRNIC {name}; end them, or delete it with --force"
            )));
        }
        for rule in self.state.rules_naming(name).cloned().collect::<Vec<_>>() {
            if actor.groups().is_some() && !self.state.is_seen(actor, Kind::Rule, &rule) {
                return Err(Refusal::denied(format_args!(
                    "a rule that joins vRNIC {name} with other groups names it, which an administrator deletes first"
                )));
            }
            if !force && actor.host().is_none() {
                return Err(Refusal::conflict(format_args!(
                    "rule {rule} names vRNIC {name}; delete it too, or use --force"
                )));
            }
            self.remove(Kind::Rule, &rule)?;
        }
        self.remove(Kind::Vrnic, name)
    }

    fn delete_group(&mut self, actor: &Actor, name: &str, force: bool) -> Result<(), Refusal> {
        actor.needs_admin("groups")?;
        if force && let Some(g) = self.state.groups.get(name).cloned() {
            for rule in &g.rules {
                self.remove(Kind::Rule, rule)?;
            }
            for v in &g.vrnics {
                self.delete_vrnic(actor, v, true)?;
            }
        }
        self.remove(Kind::Group, name)
            .map_err(|e| Refusal { what: format!("{}; delete it too, or use --force", e.what), ..e })
    }

    fn delete_host(&mut self, actor: &Actor, name: &str, force: bool) -> Result<(), Refusal> {
        actor.needs_admin("hosts")?;
        let Some(h) = self.state.hosts.get(name).cloned() else { return Ok(()) };
        if let Some(v) = h.vrnics.first().filter(|_| !force) {
            let text = format!("host {name} has {} vRNICs, {v} among them; move them, or use --force", h.vrnics.len());
            return Err(Refusal::conflict(text));
        }
        for v in &h.vrnics {
            let Some(object) = self.state.vrnics.get(v).map(|v| v.object.clone()) else { continue };
            if object.by_host {
                self.delete_vrnic(actor, v, true)?;
            } else {
                self.put(v1::Vrnic { host: String::new(), ..object }.into())?;
            }
        }
        self.remove(Kind::Host, name)
    }
}
