//! The control centre's orders, and the remaining rights of this host's administrators.
//!
//! The centre's vRNICs are made, changed and removed as the centre orders. A vRNIC that this host's administrator wants
//! is requested from the centre, which determines its properties. vRNICs that the centre does not know belong to the
//! administrator, as without a fleet. They were made before the host joined the fleet, or by a centre whose store is
//! gone.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::OnceLock;

use unirdma_fleet::agent::{self, Key, Work};
use unirdma_fleet::v1::{self, ask, item::Item};
use unirdma_formats::{Guid, Mac};
use unirdma_ipc::secrets::{GroupSecrets, Secret, Secrets};
use unirdma_ipc::vrnic::{self, AddVrnic, Hardware, SetHeld, SetShare, VrnicInfo, Way};
use unirdma_policy::{Action, Rule, Selector};
use unirdma_rnic::Share;

use super::error::{AddressError, Reply, RequestError};
use super::*;
use crate::admin::Request;
use crate::centre::{self, Centre, Identity, Neighbours};
use crate::centre_config::{CentreConfig, CentreInfo};
use crate::peer_change::Change;
use zeroize::Zeroizing;

/// Most peers that are reported for a vRNIC.
const MAX_CONNECTIONS: usize = 64;

/// Most requests that are remembered because the centre did not answer them.
const MAX_UNGIVEN: usize = 1_000;

/// The centre's rules and secrets.
#[derive(Default)]
pub(super) struct CentreState {
    /// A rule of the centre may become several rules here, one for each address of a vRNIC.
    rules: BTreeMap<String, Vec<Rule>>,
    /// Secrets by number, for each group and each pair of groups in order of names. For a group alone, the second name
    /// is empty.
    secrets: BTreeMap<(String, String), BTreeMap<u8, Said>>,
}

/// A secret, and whether to send with it.
type Said = (Zeroizing<[u8; 32]>, bool);

impl CentreState {
    /// Sets or removes a rule. Returns the changes for the network.
    fn set_rule(&mut self, name: &str, rule: Option<&v1::HostRule>) -> Result<Vec<Change>, RequestError> {
        let new = rule.map(read_rule).transpose()?;
        let before = match &new {
            Some(new) => self.rules.insert(name.into(), new.clone()),
            None => self.rules.remove(name),
        };
        let of =
            |rules: Option<Vec<Rule>>, there| rules.into_iter().flatten().map(move |rule| Change::Rule { rule, there });
        Ok(of(new, true).chain(of(before, false)).collect())
    }

    /// A group, and the groups that rules join with it.
    fn reached_from(&self, group: &str) -> Vec<String> {
        let ends = self.rules.values().flatten().map(|r| (r.from.group(), r.to.group()));
        let others = ends.filter_map(|(from, to)| match (from == group, to == group) {
            (true, false) => Some(to.clone()),
            (false, true) => Some(from.clone()),
            _ => None,
        });
        let mut groups: Vec<String> = others.collect();
        groups.sort();
        groups.dedup();
        groups.insert(0, group.into());
        groups
    }

    fn set_secret(
        &mut self,
        group: &str,
        other: &str,
        id: u32,
        secret: Option<&v1::Secret>,
    ) -> Result<(), RequestError> {
        let id = u8::try_from(id).map_err(|_| RequestError::SecretNumber { id, group: group.into() })?;
        let of_group = self.secrets.entry((group.into(), other.into())).or_default();
        match secret {
            Some(s) => {
                let bytes = s.value.len();
                let key = <[u8; 32]>::try_from(s.value.as_slice()).map_err(|_| RequestError::SecretLength {
                    id,
                    group: group.into(),
                    bytes,
                })?;
                of_group.insert(id, (Zeroizing::new(key), s.send));
            }
            None => _ = of_group.remove(&id),
        }
        self.secrets.retain(|_, s| !s.is_empty());
        Ok(())
    }

    /// The secrets of a group, its own and those with other groups.
    fn secrets_of(&self, name: &str) -> Result<GroupSecrets, RequestError> {
        let mut found = GroupSecrets::default();
        for ((group, other), all) in self.secrets.iter().filter(|((g, o), _)| g == name || o == name) {
            let send = all.iter().find(|(_, s)| s.1).or(all.iter().next()).map_or(0, |(id, _)| *id);
            let secrets = Secrets::new(all.iter().map(|(&id, s)| Secret::new(id, &s.0)).collect(), send)?;
            let with = if other == name { group } else { other };
            found.set((!with.is_empty()).then_some(with.as_str()), Some(secrets))?;
        }
        Ok(found)
    }
}

/// Converts a rule of the centre to rules of this host's network.
fn read_rule(r: &v1::HostRule) -> Result<Vec<Rule>, RequestError> {
    let ends = |s: &Option<v1::HostSelector>| -> Result<Vec<Selector>, RequestError> {
        let s = s.as_ref().ok_or_else(|| RequestError::RuleEnd(r.name.clone()))?;
        if s.ips.is_empty() {
            return Ok(vec![Selector::Group(s.group.clone())]);
        }
        let one = |text: &String| match text.parse::<IpAddr>() {
            Ok(a) => Ok(Selector::Vrnic(s.group.clone(), a)),
            Err(_) => Err(RequestError::RuleAddress { rule: r.name.clone(), address: text.clone() }),
        };
        s.ips.iter().map(one).collect()
    };
    let (from, to) = (ends(&r.from)?, ends(&r.to)?);
    let action = if r.action() == v1::rule::Action::Allow { Action::Allow } else { Action::Deny };
    let priority = u16::try_from(r.priority)
        .map_err(|_| RequestError::RulePriority { rule: r.name.clone(), priority: r.priority })?;
    let one = |f: &Selector, t: &Selector| Rule { from: f.clone(), to: t.clone(), action, both: r.both, priority };
    Ok(from.iter().flat_map(|f| to.iter().map(move |t| one(f, t))).collect())
}

/// What a supervisor has of its control centre.
pub(super) struct Fleet {
    /// `None`: this host belongs to no fleet.
    centre: OnceLock<Arc<Centre>>,
    neighbours: Mutex<Neighbours>,
    /// The centre's rules and secrets.
    ordered: Mutex<CentreState>,
    /// The centre's groups, including groups that have no worker yet.
    groups: Mutex<BTreeMap<String, v1::HostGroup>>,
    /// vRNICs requested from the centre without success. The centre may have made one, and died before it answered.
    pending_grants: Mutex<BTreeMap<String, v1::Vrnic>>,
}

impl Fleet {
    /// That of a host with these addresses, before it joins a fleet.
    pub fn new(addresses: &[IpAddr]) -> Fleet {
        Fleet {
            centre: OnceLock::new(),
            neighbours: Mutex::new(Neighbours::new(addresses)),
            ordered: Mutex::default(),
            groups: Mutex::default(),
            pending_grants: Mutex::default(),
        }
    }

    /// The control centre's state; `None`: this host belongs to no fleet.
    pub fn info(&self) -> Option<CentreInfo> {
        self.centre.get().map(|c| c.info())
    }

    /// Ends the connection to the centre.
    pub fn stop(&self) {
        if let Some(c) = self.centre.get() {
            c.stop();
        }
    }
}

/// This host's identity in its fleet.
///
/// # Errors
/// Errors of [`Identity::load_or_join`].
pub(crate) fn identity(config: &CentreConfig) -> io::Result<Identity> {
    Identity::load_or_join(config)
}

impl Supervisor {
    /// Puts in force the control centre's updates on disk, and starts to talk to the centre.
    ///
    /// # Errors
    /// One line: the updates cannot be read.
    pub fn join(self: &Arc<Self>, identity: Identity) -> io::Result<()> {
        let addresses = self.around.network.as_ref().map(|n| lock(n).addresses().to_vec()).unwrap_or_default();
        lock(&self.fleet.neighbours).set_me(&identity.name);
        let centre = centre::start(identity, addresses.iter().map(ToString::to_string).collect(), self)?;
        let _ = self.fleet.centre.set(centre);
        Ok(())
    }

    fn centre(&self) -> Option<&Arc<Centre>> {
        self.fleet.centre.get()
    }

    /// Carries out the centre's orders. Returns the failed pieces, with the reasons.
    pub fn carry_out(self: &Arc<Self>, work: &[Work]) -> BTreeMap<Key, String> {
        let mut failed = BTreeMap::new();
        let mut news = Vec::new();
        self.note_groups(work);
        // Groups whose secrets have changed. All changes of a group are put in force together.
        let mut sealed: BTreeMap<String, Key> = BTreeMap::new();
        for w in work {
            if !matches!(w.key, Key::Secret(..)) {
                self.settle_all_secrets(&mut sealed, &mut failed);
            }
            let done = match (&w.key, &w.item) {
                (Key::Group(name), item) => {
                    let group = if let Some(Item::Group(g)) = item { Some(g) } else { None };
                    news.push(Change::Vni { group: name.clone(), vni: group.map(|g| g.vni) });
                    self.settle_group(name, group)
                }
                (Key::Place(host), item) => {
                    let place = if let Some(Item::Place(p)) = item { Some(p) } else { None };
                    news.extend(lock(&self.fleet.neighbours).set_place(host, place));
                    Ok(())
                }
                (Key::Peer(name), item) => {
                    let peer = if let Some(Item::Peer(p)) = item { Some(p) } else { None };
                    news.extend(lock(&self.fleet.neighbours).set_peer(name, peer));
                    Ok(())
                }
                (Key::Vrnic(_), Some(Item::Vrnic(v))) => {
                    news.extend(lock(&self.fleet.neighbours).set_own(&v.name, Some(v)));
                    // Routes to its peers are made first, so that its programs find them.
                    self.learn(&mut news);
                    self.settle_vrnic(v)
                }
                (Key::Vrnic(name), _) => {
                    let gone = self.drop_vrnic(name, w.force);
                    if gone.is_ok() {
                        news.extend(lock(&self.fleet.neighbours).set_own(name, None));
                    }
                    gone
                }
                (Key::Rule(name), item) => {
                    let rule = if let Some(Item::Rule(r)) = item { Some(r) } else { None };
                    lock(&self.fleet.ordered).set_rule(name, rule).map(|changes| news.extend(changes))
                }
                (Key::Secret(group, other, id), item) => {
                    let secret = if let Some(Item::Secret(s)) = item { Some(s) } else { None };
                    for name in [group, other].into_iter().filter(|name| !name.is_empty()) {
                        sealed.insert(name.clone(), w.key.clone());
                    }
                    lock(&self.fleet.ordered).set_secret(group, other, *id, secret)
                }
            };
            if let Err(e) = done {
                failed.insert(w.key.clone(), e.to_string());
            }
        }
        self.settle_all_secrets(&mut sealed, &mut failed);
        self.learn(&mut news);
        failed
    }

    /// Notes all groups before the first order is carried out, since one of them may need what another one gives up.
    fn note_groups(&self, work: &[Work]) {
        let mut groups = lock(&self.fleet.groups);
        for w in work {
            match (&w.key, &w.item) {
                (Key::Group(name), Some(Item::Group(g))) => _ = groups.insert(name.clone(), g.clone()),
                (Key::Group(name), _) => _ = groups.remove(name),
                _ => {}
            }
        }
    }

    fn settle_all_secrets(&self, sealed: &mut BTreeMap<String, Key>, failed: &mut BTreeMap<Key, String>) {
        for (group, key) in std::mem::take(sealed) {
            if let Err(e) = self.settle_secrets(&group) {
                failed.insert(key, e.to_string());
            }
        }
    }

    /// Gives a group the centre's secrets, if the group is on this host.
    fn settle_secrets(&self, name: &str) -> Result<(), RequestError> {
        let Some(group) = self.names().groups.get(name).cloned() else { return Ok(()) };
        let secrets = lock(&self.fleet.ordered).secrets_of(name)?;
        let mut inner = group.lock();
        if inner.removed {
            return Ok(());
        }
        self.set_secrets(&group, &mut inner, &secrets)
    }

    /// Passes changes of other hosts on to the network and the workers.
    fn learn(self: &Arc<Self>, news: &mut Vec<Change>) {
        if news.is_empty() {
            return;
        }
        self.bulletin.add(news.drain(..));
        if self.around.network.as_ref().is_some_and(|n| lock(n).on_event()) {
            self.tell_workers();
        }
    }

    /// Sets a group's weight and VLAN. The group gets a worker with its first vRNIC here. If `group` is `None`, the
    /// group and its worker are removed.
    fn settle_group(&self, name: &str, group: Option<&v1::HostGroup>) -> Result<(), RequestError> {
        let Some(there) = self.names().groups.get(name).cloned() else { return Ok(()) };
        match group {
            Some(g) => {
                if there.weight() != g.weight {
                    self.set_group(name, Some(g.weight), None, None, None)?;
                }
                self.settle_vlan(&there)
            }
            None if name != DEFAULT_GROUP => self.remove_group(name).map(drop),
            None => Ok(()),
        }
    }

    /// Gives a group the VLAN that the centre orders.
    fn settle_vlan(&self, group: &Group) -> Result<(), RequestError> {
        let ordered = |name: &str| lock(&self.fleet.groups).get(name).map(|g| g.vlan as u16);
        let Some(vlan) = ordered(&group.name).filter(|v| *v != group.vlan()) else { return Ok(()) };
        // While the centre exchanges VLANs of groups, a group may have one that is another one's from now on.
        let has_it = |g: &Arc<Group>| vlan > 0 && g.vlan() == vlan && ordered(&g.name).is_some_and(|o| o != vlan);
        let holders: Vec<Arc<Group>> = self.names().groups.values().filter(|g| has_it(g)).cloned().collect();
        for holder in holders {
            self.set_vlan(&holder.name, 0)?;
        }
        self.set_vlan(&group.name, vlan).map(drop)
    }

    /// Makes or changes a vRNIC as the centre orders.
    fn settle_vrnic(self: &Arc<Self>, v: &v1::Vrnic) -> Result<(), RequestError> {
        let (add, hardware) = read(v)?;
        let group = add.group.clone().unwrap_or_default();
        let now = self.names().vrnics.get(&v.name).map(|n| (n.group.clone(), n.hardware, n.ips.clone()));
        let Some((group_now, hardware_now, ips)) = now else { return self.make_of_fleet(&add, hardware, !v.down) };
        let now = self.member_of(&v.name, |m| (m.new.limits, m.new.way, m.new.instance.clone()))?;
        if (&group_now, hardware_now, now) != (&group, hardware, (add.limits(), add.way, add.instance.clone())) {
            self.drop_vrnic(&v.name, false)
                .map_err(|e| RequestError::ToBeMadeAnew { vrnic: v.name.clone(), error: e.into() })?;
            return self.make_of_fleet(&add, hardware, !v.down);
        }
        for ip in add.ips.iter().filter(|ip| !ips.iter().any(|o| vrnic::same_address(o, ip))) {
            self.add_address(&v.name, *ip)?;
        }
        for ip in ips.iter().filter(|ip| !add.ips.iter().any(|o| vrnic::same_address(o, ip))) {
            self.remove_address(&v.name, *ip)?;
        }
        let (share, spoof, held, up) =
            self.member_of(&v.name, |m| (m.new.share, m.new.allow_spoof, m.new.held, m.new.up))?;
        let wanted = add.share.apply(Share::default())?;
        if (share, spoof, held) != (wanted, add.allow_spoof, add.held) {
            self.set_whole(&v.name, wanted, add.allow_spoof, add.held)?;
        }
        if up == v.down {
            self.set_link(&v.name, !v.down)?;
        }
        Ok(())
    }

    fn make_of_fleet(self: &Arc<Self>, add: &AddVrnic, hardware: Hardware, up: bool) -> Result<(), RequestError> {
        let group = add.group.clone().unwrap_or_default();
        if !self.names().groups.contains_key(&group) {
            let weight = lock(&self.fleet.groups).get(&group).map_or(USUAL_GROUP_WEIGHT, |g| g.weight);
            self.make_group(&group, weight, None)?;
            let ordered = lock(&self.fleet.ordered).secrets_of(&group)?;
            if !ordered.is_empty() {
                self.settle_secrets(&group)?;
            }
        }
        let made = self.names().groups.get(&group).cloned();
        made.map_or(Ok(()), |g| self.settle_vlan(&g))?;
        self.add_vrnic_as(add, Some(hardware), up, None).map(drop)
    }

    /// Removes a vRNIC, if it is here.
    fn drop_vrnic(&self, name: &str, force: bool) -> Result<(), RequestError> {
        if !self.names().vrnics.contains_key(name) {
            return Ok(());
        }
        let force = force || lock(&self.forced_removals).remove(name);
        self.remove_vrnic(name, force).map(drop).map_err(|e| match e {
            RequestError::InUse { vrnic, .. } => RequestError::ToLeave(vrnic),
            e => e,
        })
    }

    fn member_of<T>(&self, name: &str, f: impl FnOnce(&Member) -> T) -> Result<T, RequestError> {
        let group = self.group_with(name)?;
        let inner = group.lock();
        inner.members.get(name).map(f).ok_or_else(|| missing(name))
    }

    /// vRNICs that were made without the centre, for its information. It accepts those that it wants into the fleet.
    pub fn strangers(&self) -> Vec<v1::Vrnic> {
        let Some(centre) = self.centre() else { return Vec::new() };
        let names: Vec<String> = self.names().vrnics.keys().filter(|n| centre.vrnic(n).is_none()).cloned().collect();
        names.iter().filter_map(|name| self.write(name).ok()).collect()
    }

    /// The description of a vRNIC of this host for the centre.
    fn write(&self, name: &str) -> Result<v1::Vrnic, RequestError> {
        let group = self.group_with(name)?;
        let host = self.centre().map(|c| c.host().to_string()).unwrap_or_default();
        self.member_of(name, |m| {
            let n = &m.new;
            let (l, s, h) = (n.limits, n.share, n.held);
            v1::Vrnic {
                name: name.into(),
                group: group.name.clone(),
                host,
                ips: n.ips.iter().map(ToString::to_string).collect(),
                mac: n.hardware.mac.to_string(),
                guid: format!("{:016x}", n.hardware.guid),
                limits: Some(v1::Limits {
                    max_qp: Some(l.max_qp),
                    max_cq: Some(l.max_cq),
                    max_mr: Some(l.max_mr),
                    max_mr_bytes: Some(l.max_mr_bytes),
                    max_sessions: Some(l.max_sessions),
                    ..limits_of(&h)
                }),
                share: Some(v1::Share {
                    weight: Some(s.weight),
                    rate: Some(s.rate_bps),
                    ops: Some(s.ops),
                    burst: Some(s.burst_us),
                }),
                allow_spoof: n.allow_spoof,
                down: !n.up,
                by_host: true,
                way: write_way(n.way).into(),
                instance: n.instance.clone().unwrap_or_default(),
            }
        })
    }

    /// The report on this host's vRNICs for the centre.
    pub fn report(&self) -> Vec<v1::VrnicState> {
        let mut reached = HashMap::new();
        self.list().into_iter().map(|v| self.figures_of(v, &mut reached)).collect()
    }

    /// `reached` caches the groups that each group reaches.
    fn figures_of(&self, v: VrnicInfo, reached: &mut HashMap<String, Vec<String>>) -> v1::VrnicState {
        let mut peers: HashMap<String, v1::Connection> = HashMap::new();
        if v.qps > 0
            && let Ok(Response::Vrnic(whole)) = self.show(&v.name, true)
        {
            // A failed queue pair is not connected any more.
            for q in whole.queue_pairs.into_iter().filter(|q| q.state != "ERR") {
                let Some(gid) = q.peer_gid else { continue };
                let c = peers.entry(gid).or_default();
                c.qps += 1;
                c.sent_bytes = c.sent_bytes.saturating_add(q.counters.sent_bytes);
                c.received_bytes = c.received_bytes.saturating_add(q.counters.received_bytes);
            }
        }
        let groups = reached.entry(v.group.clone()).or_insert_with(|| lock(&self.fleet.ordered).reached_from(&v.group));
        let neighbours = lock(&self.fleet.neighbours);
        let mut connections: Vec<v1::Connection> = peers
            .into_iter()
            .map(|(gid, c)| {
                let address = gid.strip_prefix("::ffff:").unwrap_or(&gid).to_string();
                let named = |a: IpAddr| groups.iter().find_map(|g| neighbours.name_of(g, a));
                let peer = address.parse().ok().and_then(named).unwrap_or_default().into();
                v1::Connection { address, peer, ..c }
            })
            .collect();
        connections.sort_by(|a, b| (b.qps, &a.address).cmp(&(a.qps, &b.address)));
        connections.truncate(MAX_CONNECTIONS);
        let c = &v.counters;
        v1::VrnicState {
            name: v.name,
            there: true,
            programs: v.sessions.max(v.way.contexts as usize) as u32,
            qps: v.qps as u32,
            mrs: (v.mrs_mapped + v.mrs_copied) as u32,
            sent_bytes: c.sent_bytes,
            received_bytes: c.received_bytes,
            operations: c.sent_wrs,
            errors: c.errors,
            connections,
            way: write_way(v.way.in_force).into(),
            why: v.way.why.unwrap_or_default(),
            vf: v.way.vf.unwrap_or_default(),
            real_gid: v.way.gid.unwrap_or_default(),
            ..v1::VrnicState::default()
        }
    }

    /// The report on this host's pool of VFs for the centre.
    pub fn report_pools(&self) -> Vec<v1::Pool> {
        let mut pools: BTreeMap<String, v1::Pool> = BTreeMap::new();
        let vfs = self.vfs.as_ref().map(|pool| pool.info().vfs).unwrap_or_default();
        for vf in vfs {
            let pool = pools.entry(vf.pf.clone()).or_insert_with(|| v1::Pool { pf: vf.pf, ..v1::Pool::default() });
            pool.vfs += 1;
            pool.ready += u32::from(vf.kind == "ready");
            pool.leased += u32::from(vf.kind == "leased");
        }
        pools.into_values().collect()
    }

    // --- administrators of this host ---

    /// Answers requests that concern the centre; `None`: the request concerns only this host.
    /// The URL of the control centre, if this host belongs to a fleet.
    pub(super) fn url_of_centre(&self) -> Option<String> {
        self.centre().map(|c| c.info().url)
    }

    pub(super) fn answer_of_fleet(&self, request: &Request) -> Option<Reply> {
        let centre = self.centre()?;
        let name = match request {
            Request::VrnicAdd(add) => return Some(self.ask_for(centre, add)),
            Request::GroupAdd { .. } | Request::GroupSet { .. } | Request::GroupRemove { .. } => {
                return Some(Err(RequestError::GroupOfCentre { url: centre.info().url }));
            }
            Request::VrnicRemove { name, .. }
            | Request::VrnicSet { name, .. }
            | Request::VrnicLink { name, .. }
            | Request::VrnicAddress { name, .. } => name,
            _ => return None,
        };
        let Some(v) = centre.vrnic(name) else {
            // The centre does not know this vRNIC. After its removal, the agent must no longer report it as a problem.
            if let Request::VrnicRemove { .. } = request {
                centre.removed(name);
            }
            return None;
        };
        if !v.by_host {
            let command = if matches!(request, Request::VrnicRemove { .. }) { "delete" } else { "apply" };
            return Some(Err(RequestError::VrnicOfCentre { vrnic: v.name, url: centre.info().url, command }));
        }
        Some(self.change_of_fleet(centre, v, request))
    }

    fn ask_for(&self, centre: &Centre, add: &AddVrnic) -> Reply {
        vrnic::check_name("vRNIC", &add.name)?;
        add.share.apply(Share::default())?;
        let put = wanted(add, centre.host());
        if self.names().vrnics.contains_key(&add.name) {
            // A repeated request whose first answer was lost gets its result.
            let asked_before = lock(&self.fleet.pending_grants).get(&add.name) == Some(&put);
            if asked_before && centre.vrnic(&add.name).is_some_and(|v| v.by_host) {
                lock(&self.fleet.pending_grants).remove(&add.name);
                return self.show(&add.name, false);
            }
            return Err(RequestError::VrnicExists(add.name.clone()));
        }
        let asked = centre.ask(ask::Change::Put(put.clone()));
        let mut pending_grants = lock(&self.fleet.pending_grants);
        match asked {
            Ok(_) => drop(pending_grants.remove(&add.name)),
            Err(e) => {
                if pending_grants.len() < MAX_UNGIVEN {
                    pending_grants.insert(add.name.clone(), put);
                }
                return Err(e.into());
            }
        }
        drop(pending_grants);
        self.show(&add.name, false)
    }

    fn change_of_fleet(&self, centre: &Centre, mut v: v1::Vrnic, request: &Request) -> Reply {
        let name = v.name.clone();
        match request {
            Request::VrnicRemove { force, .. } => {
                let Response::Vrnic(info) = self.show(&name, false)? else { return Err(missing(&name)) };
                let sessions = info.sessions.max(info.way.contexts as usize);
                if !force && (sessions > 0 || info.attached) {
                    return Err(RequestError::InUse { vrnic: name, sessions });
                }
                if *force {
                    lock(&self.forced_removals).insert(name.clone());
                }
                let asked = centre.ask(ask::Change::Remove(name.clone()));
                lock(&self.forced_removals).remove(&name);
                asked?;
                return Ok(Response::Done);
            }
            Request::VrnicLink { up, .. } => v.down = !up,
            Request::VrnicAddress { ip, add: true, .. } => v.ips.push(ip.to_string()),
            Request::VrnicAddress { ip, .. } => {
                let had = v.ips.len();
                v.ips.retain(|o| o.parse::<IpNet>().is_ok_and(|o| !vrnic::same_address(&o, ip)));
                if v.ips.len() == had || v.ips.is_empty() {
                    return Err(AddressError::NotItsOrOnly { ip: ip.addr, vrnic: name }.into());
                }
            }
            Request::VrnicSet { share, allow_spoof, held, .. } => {
                let s = v.share.get_or_insert_default();
                let new = share_of(share);
                (s.weight, s.rate) = (new.weight.or(s.weight), new.rate.or(s.rate));
                (s.ops, s.burst) = (new.ops.or(s.ops), new.burst.or(s.burst));
                v.allow_spoof = allow_spoof.unwrap_or(v.allow_spoof);
                let mut now = held_of(v.limits.unwrap_or_default());
                now.merge(held);
                let l = v.limits.get_or_insert_default();
                *l = v1::Limits {
                    max_qp: l.max_qp,
                    max_cq: l.max_cq,
                    max_mr: l.max_mr,
                    max_mr_bytes: l.max_mr_bytes,
                    max_sessions: l.max_sessions,
                    ..limits_of(&now)
                };
            }
            _ => return Err(RequestError::Malformed("this is no change of a vRNIC")),
        }
        centre.ask(ask::Change::Put(v))?;
        if matches!(request, Request::VrnicLink { .. }) { Ok(Response::Done) } else { self.show(&name, false) }
    }
}

fn missing(name: &str) -> RequestError {
    RequestError::Missing { what: "vRNIC", name: name.into() }
}

/// The vRNIC to request from the centre for this host's administrator.
fn wanted(add: &AddVrnic, host: &str) -> v1::Vrnic {
    v1::Vrnic {
        name: add.name.clone(),
        group: add.group.clone().unwrap_or_else(|| DEFAULT_GROUP.into()),
        host: host.into(),
        ips: add.ips.iter().map(ToString::to_string).collect(),
        limits: Some(v1::Limits {
            max_qp: add.max_qp,
            max_cq: add.max_cq,
            max_mr: add.max_mr,
            max_mr_bytes: add.max_mr_bytes,
            max_sessions: add.max_sessions,
            ..limits_of(&add.held)
        }),
        share: Some(share_of(&add.share)),
        allow_spoof: add.allow_spoof,
        by_host: true,
        way: write_way(add.way).into(),
        instance: add.instance.clone().unwrap_or_default(),
        ..v1::Vrnic::default()
    }
}

/// Converts the centre's description of a vRNIC.
fn read(v: &v1::Vrnic) -> Result<(AddVrnic, Hardware), RequestError> {
    let ips: Result<Vec<IpNet>, _> = v.ips.iter().map(|t| t.parse()).collect();
    let (mac, guid) = agent::mac(&v.mac).zip(agent::guid(&v.guid)).ok_or(RequestError::Hardware)?;
    let (l, s) = (v.limits.unwrap_or_default(), v.share.unwrap_or_default());
    let add = AddVrnic {
        name: v.name.clone(),
        ips: ips?,
        group: Some(v.group.clone()),
        max_qp: l.max_qp,
        max_cq: l.max_cq,
        max_mr: l.max_mr,
        max_mr_bytes: l.max_mr_bytes,
        max_sessions: l.max_sessions,
        allow_spoof: v.allow_spoof,
        share: SetShare { weight: s.weight, rate_bps: s.rate, ops: s.ops, burst_us: s.burst },
        held: held_of(l),
        way: read_way(v.way()),
        instance: Some(v.instance.clone()).filter(|i| !i.is_empty()),
    };
    Ok((add, Hardware { mac: Mac(mac), guid: Guid(guid).0 }))
}

fn read_way(way: v1::Way) -> Way {
    match way {
        v1::Way::Soft => Way::Soft,
        v1::Way::Vf => Way::Vf,
        v1::Way::Auto => Way::Auto,
    }
}

fn write_way(way: Way) -> v1::Way {
    match way {
        Way::Soft => v1::Way::Soft,
        Way::Vf => v1::Way::Vf,
        Way::Auto => v1::Way::Auto,
    }
}

fn held_of(l: v1::Limits) -> SetHeld {
    SetHeld {
        max_descriptors: l.max_descriptors,
        max_mappings: l.max_mappings,
        max_address_space: l.max_address_space,
        max_pieces: l.max_pieces,
        max_filled: l.max_filled,
    }
}

fn limits_of(held: &SetHeld) -> v1::Limits {
    v1::Limits {
        max_descriptors: held.max_descriptors,
        max_mappings: held.max_mappings,
        max_address_space: held.max_address_space,
        max_pieces: held.max_pieces,
        max_filled: held.max_filled,
        ..v1::Limits::default()
    }
}

fn share_of(s: &SetShare) -> v1::Share {
    v1::Share { weight: s.weight, rate: s.rate_bps, ops: s.ops, burst: s.burst_us }
}
