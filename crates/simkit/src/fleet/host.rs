//! A host: its agent, its disk, and the vRNICs, rules and peers that are in force on it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;

use unirdma_fleet::agent::{Agent, Key, Work};
use unirdma_fleet::v1::{self, item::Item};
use unirdma_policy::Policy;

use super::truth::{self, Place, Table, Truth};
use super::{EPOCH, Event, World};

/// Interval at which a host reports the state of its vRNICs, ms.
const REPORT_MS: u64 = 2_000;

/// A host.
pub(super) struct Host {
    pub number: usize,
    pub name: String,
    pub seed: u64,
    /// Incarnation: the number of crashes so far.
    pub life: u64,
    /// `None` while the host is down.
    pub agent: Option<Agent>,
    pub down_until: u64,
    pub link: Option<u64>,
    /// Records that are on disk durably. The first one is a whole state.
    disk: Vec<v1::Update>,
    /// Records that are being written, in order, each with the time at which its write completes.
    writing: VecDeque<(u64, v1::Update)>,
    pub slow_disk: u64,
    /// Items in force: all that the agent has had carried out.
    force: Table,
    policy: Policy<String, IpAddr>,
    /// Its vRNICs.
    pub made: BTreeMap<String, Place>,
    /// The vRNICs that programs use.
    pub programs: BTreeSet<String>,
    pub working: bool,
    reported: u64,
    /// The agent's state as of `as_of` (fleet and revision).
    pub table: Table,
    as_of: (String, u64),
    /// Number of times that `table` was updated.
    pub looked: u64,
    /// The secrets in `table`.
    secrets: Secrets,
}

/// For a group, or a pair of groups: the numbers of the secrets that are accepted, and the number of the one to send
/// with.
type Secrets = BTreeMap<(String, String), (Vec<u32>, Option<u32>)>;

impl Host {
    pub fn new(number: usize, name: &str, seed: u64) -> Host {
        Host {
            number,
            name: name.into(),
            seed,
            life: 0,
            agent: None,
            down_until: 0,
            link: None,
            disk: Vec::new(),
            writing: VecDeque::new(),
            slow_disk: 0,
            force: Table::new(),
            policy: Policy::default(),
            made: BTreeMap::new(),
            programs: BTreeSet::new(),
            working: false,
            reported: 0,
            table: Table::new(),
            as_of: (String::new(), 0),
            looked: 0,
            secrets: Secrets::new(),
        }
    }

    /// The agent ends without warning. `all`: the machine ends, and all vRNICs with it.
    pub fn crash(&mut self, now: u64, until: u64, all: bool) {
        self.agent = None;
        self.life += 1;
        self.down_until = until;
        self.working = false;
        while self.writing.front().is_some_and(|(done, _)| *done <= now) {
            self.written();
        }
        self.writing.clear();
        if all {
            self.made.clear();
            self.programs.clear();
            self.force.clear();
            self.policy = Policy::default();
        }
    }

    fn written(&mut self) {
        let Some((_, record)) = self.writing.pop_front() else { return };
        if record.whole {
            self.disk.clear();
        }
        self.disk.push(record);
    }

    /// Names and places of the vRNICs in force, own ones and peers.
    pub fn known(&self) -> impl Iterator<Item = (&str, Place)> {
        self.force.values().filter_map(|i| match i {
            Item::Peer(p) => Some((p.name.as_str(), Place::of_peer(p))),
            Item::Vrnic(v) => Some((v.name.as_str(), Place::of_vrnic(v))),
            _ => None,
        })
    }

    fn place(&self, name: &str) -> Option<Place> {
        match self.force.get(&Key::Vrnic(name.into())).or_else(|| self.force.get(&Key::Peer(name.into())))? {
            Item::Peer(p) => Some(Place::of_peer(p)),
            Item::Vrnic(v) => Some(Place::of_vrnic(v)),
            _ => None,
        }
    }

    /// True if this host allows a connection between these two vRNICs.
    pub fn allows(&self, names: &[String; 2]) -> bool {
        let [Some(a), Some(b)] = names.each_ref().map(|n| self.place(n)) else { return false };
        self.policy.may_talk(a.party(), b.party())
    }

    /// Checks that the agent's state is exactly the state that the centre published for this host at the agent's
    /// revision.
    pub fn check(&mut self, number: usize, truth: &Truth) {
        let Some(agent) = &self.agent else { return };
        let status = agent.status(0);
        let has = (status.fleet, status.revision);
        if has == self.as_of || has.1 == 0 {
            return;
        }
        let table = truth::table(vec![agent.snapshot()]);
        let due = truth.table(number, has.1);
        let due = due.cloned().unwrap_or_default();
        let differ: Vec<_> = due.keys().chain(table.keys()).filter(|k| due.get(*k) != table.get(*k)).collect();
        assert!(differ.is_empty(), "h{number} has other pieces than revision {} says: {differ:?}", has.1);
        (self.table, self.as_of) = (table, has);
        self.looked += 1;
        self.secrets = self.secrets();
    }

    fn secrets(&self) -> Secrets {
        let mut secrets = Secrets::new();
        for item in self.table.values() {
            if let Item::Secret(s) = item
                && let Some(k) = &s.key
            {
                let (taken, sent) = secrets.entry((k.group.clone(), k.other.clone())).or_default();
                taken.push(k.id);
                assert!(!(s.send && sent.replace(k.id).is_some()), "two secrets to send with");
            }
        }
        secrets
    }

    /// Checks that `other` accepts the secrets that this host sends with.
    pub fn check_secrets(&self, other: &Host) {
        for (of, (_, sent)) in &self.secrets {
            if let (Some(sent), Some((taken, _))) = (sent, other.secrets.get(of)) {
                assert!(
                    taken.contains(sent),
                    "{} does not take secret {sent} of {of:?}, with which {} sends",
                    other.name,
                    self.name
                );
            }
        }
    }
}

impl World {
    pub(super) fn host_tick(&mut self, h: usize) {
        let now = self.now;
        let host = &mut self.hosts[h];
        while host.writing.front().is_some_and(|(done, _)| *done <= now) {
            host.written();
        }
        if host.agent.is_none() {
            if now < host.down_until {
                return;
            }
            let agent = super::start_agent(host, host.disk.clone());
            // A vRNIC that lived on and that the disk does not have is removed first.
            let known: BTreeSet<String> = agent.vrnics().map(|v| v.name.clone()).collect();
            host.made.retain(|n, _| known.contains(n));
            host.force.retain(|k, _| agent.item(k).is_some());
            (host.table, host.as_of) = (Table::new(), (String::new(), 0));
            host.looked += 1;
            host.secrets = Secrets::new();
            host.policy = truth::policy(&host.force);
            host.agent = Some(agent);
            self.end_talks(h);
        }
        let host = &mut self.hosts[h];
        let Some(agent) = &mut host.agent else { return };
        if now >= host.reported + REPORT_MS {
            host.reported = now;
            let state = |n: &String| v1::VrnicState {
                name: n.clone(),
                there: true,
                programs: u32::from(host.programs.contains(n)),
                ..v1::VrnicState::default()
            };
            agent.report(host.made.keys().map(state).collect(), Vec::new(), EPOCH + now);
        }
        if agent.poll_connect(now) {
            self.connect(h);
        }
        if let Some(why) = self.hosts[h].agent.as_mut().and_then(|a| a.poll_close(now))
            && let Some(id) = self.hosts[h].link
        {
            self.drop_host_link(h, id, &why);
            self.close(id, true);
        }
        self.host_outputs(h);
    }

    /// Handles the agent's outputs: messages, records, answers and work.
    pub(super) fn host_outputs(&mut self, h: usize) {
        let now = self.now;
        while let Some(message) = self.hosts[h].agent.as_mut().and_then(Agent::poll_message) {
            if let Some(id) = self.hosts[h].link {
                self.send_up(id, message);
            }
        }
        while let Some(record) = self.hosts[h].agent.as_mut().and_then(Agent::poll_record) {
            let delay = if self.hosts[h].slow_disk > now { 50 + self.draw(4_000) } else { self.draw(10) };
            let host = &mut self.hosts[h];
            let after = host.writing.back().map_or(0, |(done, _)| *done);
            host.writing.push_back(((now + delay).max(after), record));
        }
        while let Some((_, answer)) = self.hosts[h].agent.as_mut().and_then(Agent::poll_answer) {
            self.report.answered += 1;
            if let Err(why) = answer.map_err(|e| e.to_string()) {
                assert!(!why.is_empty() && !why.contains('\n'), "a refusal is one line: {why:?}");
            }
        }
        let work = self.hosts[h].agent.as_mut().map(|a| a.poll_work(now)).unwrap_or_default();
        if !work.is_empty() {
            self.hosts[h].working = true;
            let (life, delay) = (self.hosts[h].life, self.draw(50));
            self.at(delay, Event::Carried { host: h, life, work });
        }
    }

    /// A host has done `work`; some of it may have failed.
    pub(super) fn carried(&mut self, h: usize, work: Vec<Work>) {
        let mut failed = BTreeMap::new();
        for w in &work {
            if !self.peace && self.one_in(40) {
                failed.insert(w.key.clone(), "no room".to_string());
                continue;
            }
            let host = &mut self.hosts[h];
            if let Key::Vrnic(name) = &w.key {
                match &w.item {
                    Some(Item::Vrnic(v)) => _ = host.made.insert(name.clone(), Place::of_vrnic(v)),
                    _ if host.programs.contains(name) && !w.force => {
                        failed.insert(w.key.clone(), format!("programs use vRNIC {name}"));
                        continue;
                    }
                    _ => {
                        host.made.remove(name);
                        host.programs.remove(name);
                    }
                }
            }
            match &w.item {
                Some(item) => _ = host.force.insert(w.key.clone(), item.clone()),
                None => _ = host.force.remove(&w.key),
            }
        }
        let host = &mut self.hosts[h];
        host.policy = truth::policy(&host.force);
        host.working = false;
        if let Some(agent) = &mut host.agent {
            agent.carried(self.now, work, failed);
        }
        self.end_talks(h);
        self.host_outputs(h);
    }
}
