//! The reports of hosts. They are kept only in memory: a restarted centre receives them again.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use crate::centre::Centre;
use crate::error::Refusal;
use crate::model::{Kind, check_addresses};
use crate::state::Name;
use crate::tokens::Actor;
use crate::v1;

/// The version of the messages between hosts and centre.
pub const PROTOCOL: u32 = 1;
/// A host that has been silent for this time counts as disconnected. Reports come every few seconds.
pub const SILENCE_MS: u64 = 60_000;
/// A host's clock is wrong if it differs by more than this from the centre's clock.
const MAX_CLOCK_MS: u64 = 5_000;
/// Most vRNICs that a host may have announced, or report on in one message.
pub(crate) const MAX_ANNOUNCED: usize = 10_000;
/// Most problems of a host that are kept, and the most characters of each.
const MAX_PROBLEMS: usize = 32;
const MAX_PROBLEM: usize = 300;
/// Most PFs of a host that are kept.
const MAX_POOLS: usize = 64;
/// Most connections of a vRNIC that are kept.
const MAX_CONNECTIONS: usize = 256;

#[derive(Debug, Default)]
struct Host {
    instance: Option<u64>,
    version: String,
    /// The revision that this centre has sent to the host, on any connection.
    told: u64,
    /// The last revision that the host has reported to be in force, here or at another centre. For later ones see
    /// [`Centre::host_state`].
    applied: u64,
    heard_ms: u64,
    clock_ms: i64,
    problems: Vec<String>,
    pools: Vec<v1::Pool>,
    changed: u64,
    /// The other centre that it is connected to; `None`: this one.
    via: Option<String>,
    /// Its clock when it said hello.
    hello_ms: u64,
    /// Time of the last report on this connection.
    reported_ms: Option<u64>,
    /// Its vRNICs whose statistics changed between the last two reports.
    moving: BTreeSet<String>,
}

/// Observed states of hosts and vRNICs, as opposed to declared ones.
#[derive(Debug, Default)]
pub struct Live {
    hosts: HashMap<String, Host>,
    vrnics: HashMap<String, (u64, Arc<v1::VrnicState>)>,
    /// vRNICs by the number of their last report.
    order: BTreeMap<u64, String>,
    count: u64,
}

impl Live {
    /// The last report on a vRNIC.
    pub(crate) fn vrnic(&self, name: &str) -> Option<&Arc<v1::VrnicState>> {
        self.vrnics.get(name).map(|(_, s)| s)
    }

    /// The last revision that a host has reported to be in force.
    pub(crate) fn applied(&self, host: &str) -> u64 {
        self.hosts.get(host).map_or(0, |h| h.applied)
    }

    pub(crate) fn is_connected(&self, host: &str, now_ms: u64) -> bool {
        self.hosts.get(host).is_some_and(|h| h.instance.is_some() && now_ms.saturating_sub(h.heard_ms) < SILENCE_MS)
    }

    pub(crate) fn host_state(&self, name: &str, now_ms: u64) -> v1::HostState {
        let Some(h) = self.hosts.get(name) else {
            return v1::HostState { name: name.into(), ..v1::HostState::default() };
        };
        v1::HostState {
            name: name.into(),
            connected: self.is_connected(name, now_ms),
            version: h.version.clone(),
            applied: h.applied,
            silent_ms: now_ms.saturating_sub(h.heard_ms),
            clock_ms: h.clock_ms,
            problems: h.problems.clone(),
            pools: h.pools.clone(),
        }
    }

    pub(crate) fn forget_vrnic(&mut self, name: &str) {
        if let Some((n, _)) = self.vrnics.remove(name) {
            self.order.remove(&n);
        }
    }

    fn put_vrnic(&mut self, state: v1::VrnicState) {
        self.forget_vrnic(&state.name);
        let n = self.next();
        self.order.insert(n, state.name.clone());
        self.vrnics.insert(state.name.clone(), (n, Arc::new(state)));
    }

    pub(crate) fn forget_host(&mut self, name: &str) {
        self.hosts.remove(name);
    }

    /// Sets the rates of these vRNICs to 0.
    fn rest(&mut self, names: BTreeSet<String>) {
        for name in names {
            if let Some((_, state)) = self.vrnics.get(&name) {
                let mut state = (**state).clone();
                rate(&mut state, None, 0);
                self.put_vrnic(state);
            }
        }
    }

    fn next(&mut self) -> u64 {
        self.count += 1;
        self.count
    }

    fn heard(&mut self, host: &str, now_ms: u64) -> &mut Host {
        let n = self.next();
        let h = self.hosts.entry(host.into()).or_default();
        (h.heard_ms, h.changed) = (now_ms, n);
        h
    }
}

fn short(text: &str, most: usize) -> String {
    text.chars().filter(|c| !c.is_control()).take(most).collect()
}

/// Computes the rates per second from two states that are `ms` milliseconds apart, and writes them into `state`. True
/// if one of them is not 0.
fn rate(state: &mut v1::VrnicState, was: Option<&v1::VrnicState>, ms: u64) -> bool {
    let per_second = |is: u64, was: Option<u64>| match was {
        // Counters become smaller only if a worker is restarted and counts from 0.
        Some(was) if ms > 0 => {
            let more = u128::from(if is >= was { is - was } else { is });
            u64::try_from(more * 1000 / u128::from(ms)).unwrap_or(u64::MAX)
        }
        _ => 0,
    };
    state.sent_rate = per_second(state.sent_bytes, was.map(|w| w.sent_bytes));
    state.received_rate = per_second(state.received_bytes, was.map(|w| w.received_bytes));
    state.operation_rate = per_second(state.operations, was.map(|w| w.operations));
    state.error_rate = per_second(state.errors, was.map(|w| w.errors));
    let before: Option<HashMap<&str, &v1::Connection>> =
        was.map(|w| w.connections.iter().map(|c| (c.address.as_str(), c)).collect());
    for c in &mut state.connections {
        // When a queue pair is closed, the sums of its connection become smaller. That is no restart of the counters,
        // so the rate is 0 then.
        let before = before.as_ref().map(|all| all.get(c.address.as_str()).copied());
        let before = |what: fn(&v1::Connection) -> u64, is: u64| before.map(|b| b.map_or(0, what).min(is));
        (c.sent_rate, c.received_rate) = (
            per_second(c.sent_bytes, before(|b| b.sent_bytes, c.sent_bytes)),
            per_second(c.received_bytes, before(|b| b.received_bytes, c.received_bytes)),
        );
    }
    state.sent_rate | state.received_rate | state.operation_rate | state.error_rate > 0
}

fn clock(host_ms: u64, now_ms: u64) -> i64 {
    i64::try_from(i128::from(host_ms) - i128::from(now_ms)).unwrap_or(i64::MAX)
}

/// The answer to a host's hello.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Greeted {
    /// The revision that the host has; `None`: it must be sent everything.
    pub told: Option<u64>,
}

/// Numbers of connected hosts in certain states.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// Hosts that have not yet put in force all that they were sent.
    pub behind: u64,
    /// Hosts that report problems.
    pub with_problems: u64,
    /// Hosts whose clocks differ too much from the centre's clock.
    pub clock_off: u64,
}

impl Centre {
    /// The state of a host. A host that no change since its last revision concerns has the newest revision in force.
    pub(crate) fn host_state(&self, name: &str, now_ms: u64) -> v1::HostState {
        let state = self.live.host_state(name, now_ms);
        let applied = if self.concerned_since(name, state.applied) { state.applied } else { self.state.revision };
        v1::HostState { applied, ..state }
    }

    /// The numbers of connected hosts.
    pub fn figures(&self, now_ms: u64) -> Figures {
        let mut f = Figures::default();
        let here = self.live.hosts.iter().filter(|(name, _)| self.live.is_connected(name, now_ms));
        for (name, h) in here.filter(|(name, _)| self.state.hosts.contains_key(name.as_str())) {
            f.behind += u64::from(self.concerned_since(name, h.applied));
            f.with_problems += u64::from(!h.problems.is_empty());
            f.clock_off += u64::from(h.clock_ms.unsigned_abs() > MAX_CLOCK_MS);
        }
        f
    }

    /// Handles the first message of a host.
    ///
    /// # Errors
    /// Another host has its certificate, it is not of this fleet, it is of another version, or the message is invalid.
    pub fn hello(&mut self, host: &str, hello: &v1::Hello, now_ms: u64) -> Result<Greeted, Refusal> {
        if hello.protocol != PROTOCOL {
            return Err(Refusal::invalid(format_args!(
                "the host speaks version {} of these messages, the centre version {PROTOCOL}; update the older one",
                hello.protocol
            )));
        }
        if !self.state.hosts.contains_key(host) {
            return Err(Refusal::denied(format_args!("host {host} is not of this fleet any more; let it join anew")));
        }
        check_addresses(&hello.addresses)?;
        if hello.vrnics.len() > MAX_ANNOUNCED {
            return Err(Refusal::invalid(format_args!(
                "the host has {} vRNICs; {MAX_ANNOUNCED} are the most",
                hello.vrnics.len()
            )));
        }
        if self.live.is_connected(host, now_ms)
            && self.live.hosts.get(host).is_some_and(|h| h.instance != Some(hello.instance))
        {
            return Err(Refusal::conflict(format_args!(
                "another host is connected with the certificate of host {host}; let each join with a name of its own"
            )));
        }
        // After a restore of the store from a backup, some revisions are counted a second time. The host's revision
        // counts only if this centre sent it or began with it.
        let known = self.begun.max(self.live.hosts.get(host).map_or(0, |h| h.told)).min(self.state.revision);
        let told = (hello.revision > 0 && hello.fleet == self.state.fleet && hello.revision <= known)
            .then_some(hello.revision);
        let h = self.live.heard(host, now_ms);
        (h.instance, h.hello_ms, h.via) = (Some(hello.instance), hello.clock_ms, None);
        h.version = short(&hello.version, 64);
        h.applied = told.unwrap_or(0);
        h.clock_ms = clock(hello.clock_ms, now_ms);
        h.problems.clear();
        h.reported_ms = None;
        Ok(Greeted { told })
    }

    /// Notes the revision that a host was sent.
    pub fn told(&mut self, host: &str, revision: u64) {
        self.live.hosts.entry(host.into()).or_default().told = revision;
    }

    /// Handles a host's report of the revision in force.
    pub fn applied(&mut self, host: &str, applied: &v1::Applied, now_ms: u64) {
        let revision = applied.revision.min(self.state.revision);
        let h = self.live.heard(host, now_ms);
        h.applied = h.applied.max(revision);
        let in_force = h.applied;
        h.problems = applied.problems.iter().take(MAX_PROBLEMS).map(|p| short(p, MAX_PROBLEM)).collect();
        self.forget_told(host, in_force);
    }

    /// Handles a host's report on its vRNICs. vRNICs on other hosts are ignored.
    pub fn report(&mut self, host: &str, report: v1::Report, now_ms: u64) {
        let h = self.live.heard(host, now_ms);
        h.clock_ms = clock(report.clock_ms, now_ms);
        h.pools = report.pools.into_iter().take(MAX_POOLS).map(|p| v1::Pool { pf: short(&p.pf, 32), ..p }).collect();
        let ms = h.reported_ms.replace(now_ms).map_or(0, |at| now_ms.saturating_sub(at));
        let mut resting = std::mem::take(&mut h.moving);
        let mut moving = BTreeSet::new();
        for mut state in report.vrnics.into_iter().take(MAX_ANNOUNCED) {
            let here = self.state.vrnics.get(state.name.as_str()).is_some_and(|v| v.host.as_deref() == Some(host));
            if !here {
                continue;
            }
            state.connections.truncate(MAX_CONNECTIONS);
            for c in &mut state.connections {
                (c.address, c.peer) = (short(&c.address, 64), short(&c.peer, 32));
            }
            // An unknown way becomes SOFT.
            state.set_way(state.way());
            (state.why, state.vf) = (short(&state.why, MAX_PROBLEM), short(&state.vf, 64));
            state.real_gid = short(&state.real_gid, 64);
            resting.remove(&state.name);
            let was = self.live.vrnic(&state.name).map(|s| &**s);
            if rate(&mut state, was, ms) {
                moving.insert(state.name.clone());
            }
            self.live.put_vrnic(state);
        }
        // vRNICs that are not in the report have not changed, so their rates are 0.
        self.live.rest(resting);
        self.live.hosts.entry(host.into()).or_default().moving = moving;
    }

    /// Handles the end of a host's connection, unless the host has a later one of another instance.
    pub fn goodbye(&mut self, host: &str, instance: u64, now_ms: u64) {
        if self.live.hosts.get(host).is_some_and(|h| h.instance == Some(instance) && h.via.is_none()) {
            let h = self.live.heard(host, now_ms);
            h.instance = None;
            let moving = std::mem::take(&mut h.moving);
            self.live.rest(moving);
        }
    }

    /// The reports since `told` of hosts connected to this centre, for other centres; and the next value of `told`.
    pub fn live_since(&self, told: u64, now_ms: u64) -> (u64, v1::LiveNews) {
        let here = |h: &Host| h.via.is_none();
        let hosts = self.live.hosts.iter().filter(|(_, h)| h.changed > told && here(h)).map(|(name, h)| v1::LiveHost {
            state: Some(self.live.host_state(name, now_ms)),
            instance: h.instance.unwrap_or_default(),
            hello_ms: h.hello_ms,
        });
        let of_host = |name: &String| self.state.vrnics.get(name.as_str()).and_then(|v| v.host.as_deref());
        let vrnics = self.live.order.range(told + 1..).map(|(_, name)| name);
        let vrnics = vrnics.filter(|n| of_host(n).and_then(|h| self.live.hosts.get(h)).is_some_and(here));
        let vrnics = vrnics.filter_map(|n| self.live.vrnic(n)).map(|s| (**s).clone());
        (self.live.count, v1::LiveNews { hosts: hosts.collect(), vrnics: vrnics.collect() })
    }

    /// Handles the reports of another centre's hosts. Returns hosts whose connections here must end: they have moved to
    /// that centre, or another host with the same certificate was there first.
    pub fn hear_centre(&mut self, centre: &str, news: v1::LiveNews, now_ms: u64) -> Vec<String> {
        let mut cut = Vec::new();
        for host in news.hosts {
            let Some(state) = host.state else { continue };
            if !self.state.hosts.contains_key(state.name.as_str()) {
                continue;
            }
            let connected = self.live.is_connected(&state.name, now_ms);
            if let Some(old) = self.live.hosts.get(&state.name) {
                let theirs = old.via.as_deref() == Some(centre);
                let instance = old.instance.unwrap_or_default();
                let wins = match () {
                    () if theirs => true,
                    () if !connected => state.connected || now_ms.saturating_sub(state.silent_ms) > old.heard_ms,
                    () if !state.connected => false,
                    () if instance == host.instance => host.hello_ms > old.hello_ms,
                    // Two hosts connected at the same time: both centres choose the same one.
                    () => host.instance < instance && old.via.is_none(),
                };
                if !wins {
                    continue;
                }
                if connected && old.via.is_none() {
                    cut.push(state.name.clone());
                }
            }
            let h = self.live.heard(&state.name, now_ms);
            h.heard_ms = now_ms.saturating_sub(state.silent_ms);
            h.instance = state.connected.then_some(host.instance);
            (h.via, h.hello_ms) = (Some(centre.into()), host.hello_ms);
            (h.applied, h.version, h.clock_ms) = (state.applied, state.version, state.clock_ms);
            (h.problems, h.pools) = (state.problems, state.pools);
        }
        for state in news.vrnics.into_iter().filter(|s| self.state.vrnics.contains_key(s.name.as_str())) {
            self.live.put_vrnic(state);
        }
        cut
    }

    /// Handles the loss of another centre. Its hosts count as disconnected until they are reported again.
    pub fn lose_centre(&mut self, centre: &str) {
        let hosts = self.live.hosts.iter().filter(|(_, h)| h.via.as_deref() == Some(centre) && h.instance.is_some());
        for name in hosts.map(|(n, _)| n.clone()).collect::<Vec<_>>() {
            let n = self.live.next();
            if let Some(h) = self.live.hosts.get_mut(&name) {
                (h.instance, h.changed) = (None, n);
            }
        }
    }

    /// The states of hosts and vRNICs that have changed since `told`, and the next value of `told`.
    pub fn states_since(
        &self,
        actor: &Actor,
        told: u64,
        now_ms: u64,
    ) -> (u64, Vec<v1::HostState>, Vec<Arc<v1::VrnicState>>) {
        let (count, all) = (self.live.count, actor.sees_all());
        let hosts =
            self.live.hosts.iter().filter(|(n, h)| h.changed > told && self.state.hosts.contains_key(n.as_str()));
        let hosts = if all { hosts.map(|(n, _)| self.host_state(n, now_ms)).collect() } else { Vec::new() };
        let mine = actor.groups().into_iter().flatten().filter_map(|g| self.state.groups.get(g.as_str()));
        let vrnics = if !all && (mine.clone().map(|g| g.vrnics.len() as u64).sum::<u64>() < count - told.min(count)) {
            // The actor has fewer vRNICs than there are changes.
            let later = |n: &&Name| self.live.vrnics.get(&***n).is_some_and(|(n, _)| *n > told);
            mine.flat_map(|g| &g.vrnics).filter(later).filter_map(|n| self.vrnic_state(actor, n)).collect()
        } else {
            let news = self.live.order.range(told.saturating_add(1)..).map(|(_, n)| n);
            let seen = news.filter(|n| self.state.is_seen(actor, Kind::Vrnic, n));
            seen.filter_map(|n| self.vrnic_state(actor, n)).collect()
        };
        (count, hosts, vrnics)
    }
}
