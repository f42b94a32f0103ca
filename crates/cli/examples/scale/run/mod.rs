//! The measurements, one after the other.

mod centre;
mod dial;
mod host;
mod model;
mod report;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Notify;
use tokio::task::JoinSet;
use unirdma_fleet::agent::Key;
use unirdma_fleet::v1::{self, object::Object};

use centre::{Admin, Centre};
use host::{Host, InForce};
use model::{Draw, Fleet};
pub use report::Report;
use report::{Change, Declared, Memory, Restart, Sample};

/// Longest wait for any step.
const PATIENCE: Duration = Duration::from_secs(300);
/// Hosts that join at the same time.
const JOINING: usize = 16;
/// Wait after a change, to see whether hosts that it does not concern are told of it.
const AFTER: Duration = Duration::from_millis(30);

/// Size and duration of the measurement.
#[derive(Clone, Debug)]
pub struct Options {
    /// The program `unirdma`.
    pub exe: PathBuf,
    /// An empty directory for the centre.
    pub dir: PathBuf,
    pub hosts: usize,
    pub vrnics: usize,
    pub groups: usize,
    /// vRNICs that are moved, one after the other. Other kinds of change are made at most a fifth as often.
    pub moves: usize,
    /// Length of the idle measurement.
    pub quiet: Duration,
}

fn other(text: impl std::fmt::Display) -> io::Error {
    io::Error::other(text.to_string())
}

struct Run<'a> {
    options: &'a Options,
    centre: Centre,
    fleet: Fleet,
    hosts: BTreeMap<String, Arc<Host>>,
    news: Arc<Notify>,
    draw: Draw,
    /// For each secret, the value that hosts have.
    secrets: BTreeMap<Key, Vec<u8>>,
    say: &'a dyn Fn(&str),
}

/// Runs all measurements.
///
/// # Errors
/// The centre cannot be run, or a host's table is not the expected one.
pub async fn run(options: &Options, say: &dyn Fn(&str)) -> io::Result<Report> {
    let centre = Centre::begin(&options.exe, &options.dir).await?;
    let hosts: Vec<String> = (0..options.hosts).map(|n| format!("h{n:05}")).collect();
    let mut run = Run {
        options,
        centre,
        fleet: Fleet::new(hosts),
        hosts: BTreeMap::new(),
        news: Arc::default(),
        draw: Draw::new(2),
        secrets: BTreeMap::new(),
        say,
    };
    let mut tasks = JoinSet::new();
    let joined = run.join(&mut tasks).await?;
    let mut memory = Memory { joined: run.memory(), ..Memory::default() };
    let declared = run.declare().await?;
    memory.declared = run.memory();
    memory.table = run.hosts.values().map(|h| h.bytes() as u64).sum::<u64>() / run.hosts.len() as u64;
    memory.pieces = run.hosts.values().map(|h| h.table().put.len() as u64).sum::<u64>() / run.hosts.len() as u64;
    run.check_all()?;
    let quiet = run.quiet().await;
    let changes = run.changes().await?;
    let returned = run.come_back().await?;
    let restart = run.restart().await?;
    run.check_all()?;
    memory.end = run.memory();
    let store_bytes = run.centre.store_bytes();
    let (hosts, vrnics, groups) = (options.hosts, options.vrnics, options.groups);
    let joined_s = joined.as_secs_f64();
    Ok(Report { hosts, vrnics, groups, joined_s, declared, memory, store_bytes, quiet, changes, returned, restart })
}

impl Run<'_> {
    fn memory(&self) -> report::Resident {
        let (centre, centre_most) = centre::memory(self.centre.pid());
        let (hosts, _) = centre::memory(std::process::id());
        report::Resident { centre, centre_most, hosts }
    }

    /// Joins and connects all hosts.
    async fn join(&mut self, tasks: &mut JoinSet<()>) -> io::Result<Duration> {
        let began = Instant::now();
        let names = self.fleet.hosts.clone();
        for (n, part) in names.chunks(JOINING).enumerate() {
            if n % 16 == 0 {
                (self.say)(&format!("{} of {} hosts have joined", n * JOINING, names.len()));
            }
            let mut joins = JoinSet::new();
            for name in part {
                let (name, admin, news) = (name.clone(), self.centre.admin.clone(), self.news.clone());
                let (underlay, seed) = (self.fleet.address(&name), self.hosts.len() + joins.len() + 1);
                joins.spawn(async move {
                    let (certificate, key) = admin.join(&name).await?;
                    let tls = dial::trust(&admin.authority, Some((&certificate, &key)))?;
                    Host::new(&name, underlay, tls, admin.address, seed as u64, news)
                });
            }
            while let Some(host) = joins.join_next().await {
                let host = host.map_err(other)??;
                tasks.spawn(host.clone().run());
                self.hosts.insert(host.name.clone(), host);
            }
        }
        self.until("all hosts are connected", |r| r.hosts.values().all(|h| h.revision() > 0)).await?;
        Ok(began.elapsed())
    }

    /// Waits until `is_so` is true, at most [`PATIENCE`].
    async fn until(&self, what: &str, mut is_so: impl FnMut(&Self) -> bool) -> io::Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while !is_so(self) {
            if Instant::now() >= deadline {
                return Err(other(format!("after {} s it is not so that {what}", PATIENCE.as_secs())));
            }
            let _ = tokio::time::timeout(Duration::from_millis(20), self.news.notified()).await;
        }
        Ok(())
    }

    fn received(&self) -> u64 {
        self.hosts.values().map(|h| h.traffic.received()).sum()
    }

    fn sent(&self) -> u64 {
        self.hosts.values().map(|h| h.traffic.sent()).sum()
    }

    /// Declares everything and waits until every host has its table.
    async fn declare(&mut self) -> io::Result<Declared> {
        let parts = model::declare(&self.fleet.hosts, self.options.vrnics, self.options.groups);
        let objects = parts.iter().map(Vec::len).sum();
        let (received, sent, processor) = (self.received(), self.sent(), centre::processor_s(self.centre.pid()));
        let began = Instant::now();
        let mut calls_ms = Vec::new();
        for part in parts {
            for call in part.chunks(10_000) {
                let began = Instant::now();
                for answer in self.centre.admin.apply(call.to_vec()).await? {
                    self.fleet.take(answer.changes);
                }
                calls_ms.push(began.elapsed().as_secs_f64() * 1e3);
                (self.say)(&format!("{} vRNICs are declared", self.fleet.vrnics.len()));
            }
        }
        let declared = began.elapsed();
        // The last call declares rules, which do not concern all hosts. So each host's table is compared with the
        // expected one.
        let mut waits: BTreeSet<String> = self.fleet.hosts.iter().cloned().collect();
        let deadline = Instant::now() + PATIENCE;
        let mut last = began;
        while !waits.is_empty() && Instant::now() < deadline {
            let mut done = Vec::new();
            for name in &waits {
                let due = self.fleet.table(name);
                if model::differs(&due, self.hosts[name].table(), &mut self.secrets).is_none() {
                    done.push(name.clone());
                }
            }
            done.iter().for_each(|name| _ = waits.remove(name));
            if !waits.is_empty() {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
        for host in self.hosts.values() {
            last = last.max(host.take_news().last().map_or(began, |n| n.at));
        }
        if let Some(name) = waits.first() {
            let why = model::differs(&self.fleet.table(name), self.hosts[name].table(), &mut self.secrets);
            return Err(other(format!("host {name} is not as declared: {}", why.unwrap_or_default())));
        }
        Ok(Declared {
            objects,
            calls_ms,
            declared_s: declared.as_secs_f64(),
            converged_s: (last - began).as_secs_f64(),
            received: self.received() - received,
            sent: self.sent() - sent,
            processor_s: centre::processor_s(self.centre.pid()) - processor,
        })
    }

    /// Checks that every host has exactly its expected table.
    fn check_all(&mut self) -> io::Result<()> {
        for name in self.fleet.hosts.clone() {
            self.check(&name)?;
        }
        Ok(())
    }

    fn check(&mut self, name: &str) -> io::Result<()> {
        match model::differs(&self.fleet.table(name), self.hosts[name].table(), &mut self.secrets) {
            None => Ok(()),
            Some(why) => Err(other(format!("host {name} is not as declared: {why}"))),
        }
    }

    /// Idle traffic of one host, both directions, bytes per second.
    async fn quiet(&self) -> f64 {
        (self.say)("nothing happens");
        let (bytes, began) = (self.received() + self.sent(), Instant::now());
        tokio::time::sleep(self.options.quiet).await;
        (self.received() + self.sent() - bytes) as f64 / began.elapsed().as_secs_f64() / self.hosts.len() as f64
    }

    /// Makes and measures changes of each kind, one after the other.
    async fn changes(&mut self) -> io::Result<Vec<Change>> {
        let (moves, few) = (self.options.moves, (self.options.moves / 5).max(1));
        let small = self.options.groups - self.options.groups / 5;
        let mut changes: Vec<Change> = Vec::new();
        let mut add = |what: &str, samples: Vec<Sample>| changes.push(Change::new(what, samples));

        (self.say)("vRNICs are added");
        let mut samples = Vec::new();
        for n in 0..few {
            let group = format!("g{:05}", small + n % (self.options.groups - small));
            samples.push(self.add(format!("new{n}"), group, true).await?);
        }
        add("vRNIC added", samples);

        (self.say)("vRNICs are moved");
        let names: Vec<String> = self.fleet.vrnics.keys().cloned().collect();
        let mut samples = Vec::new();
        for _ in 0..moves {
            let name = &names[self.draw.below(names.len())];
            samples.push(self.move_one(name).await?);
        }
        add(report::MOVED, samples);

        let wide: Vec<String> = self.fleet.groups[model::WIDEST].vrnics.iter().cloned().collect();
        let mut samples = Vec::new();
        for _ in 0..few.div_ceil(4) {
            let name = &wide[self.draw.below(wide.len())];
            samples.push(self.move_one(name).await?);
        }
        add("vRNIC of the widest group moved", samples);

        (self.say)("vRNICs are deleted");
        let mut samples = Vec::new();
        for n in 0..few {
            let name = format!("new{n}");
            let group = self.fleet.vrnics[&name].group.clone();
            samples.push(self.change(&[&group], None, async |c| c.delete(v1::Kind::Vrnic, &name).await).await?);
        }
        add("vRNIC deleted", samples);

        (self.say)("rules are made and taken away");
        let (mut made, mut gone) = (Vec::new(), Vec::new());
        for n in 0..few {
            let first = (self.options.groups / 2 + 10 * n) / 10 * 10 % (self.options.groups - 10) + 5;
            let (a, b) = (format!("g{first:05}"), format!("g{:05}", first + 1));
            let (name, from, to) = (format!("more{n}"), format!("group:{a}"), format!("group:{b}"));
            let rule = v1::Rule { name: name.clone(), from, to, both: true, priority: 5, ..v1::Rule::default() };
            made.push(self.change(&[&a, &b], None, async |c| one(c.apply(vec![rule.into()]).await?)).await?);
            gone.push(self.change(&[&a, &b], None, async |c| c.delete(v1::Kind::Rule, &name).await).await?);
        }
        add("rule added", made);
        add("rule taken away", gone);

        let mut samples = Vec::new();
        for n in 0..few {
            samples.push(self.add(format!("aside{n}"), format!("g{:05}", small), false).await?);
        }
        add("vRNIC of no host added", samples);
        Ok(changes)
    }

    async fn add(&mut self, name: String, group: String, on_a_host: bool) -> io::Result<Sample> {
        let near: Vec<String> = self.fleet.hosts_of(&self.fleet.joined(&group)).into_iter().collect();
        let host = if on_a_host { near[self.draw.below(near.len())].clone() } else { String::new() };
        let vrnic = v1::Vrnic { name, group: group.clone(), host, ..v1::Vrnic::default() };
        self.change(&[&group], None, async |c| one(c.apply(vec![vrnic.into()]).await?)).await
    }

    async fn move_one(&mut self, name: &str) -> io::Result<Sample> {
        let v = &self.fleet.vrnics[name];
        let (group, old) = (v.group.clone(), v.host.clone());
        let to = loop {
            let to = &self.fleet.hosts[self.draw.below(self.fleet.hosts.len())];
            if *to != old {
                break to.clone();
            }
        };
        self.change(&[&group], Some(&to), async |c| c.move_vrnic(name, &to).await).await
    }

    /// Makes and measures one change. It may concern the hosts of `groups`, the hosts of groups that rules join with
    /// these, and `more`. Counts the hosts that were told of the change although their tables did not change, and
    /// checks the tables of all hosts that were told or concerned.
    async fn change(
        &mut self,
        groups: &[&str],
        more: Option<&String>,
        call: impl AsyncFnOnce(&Admin) -> io::Result<v1::ApplyResponse>,
    ) -> io::Result<Sample> {
        let joined: BTreeSet<String> = groups.iter().flat_map(|g| self.fleet.joined(g)).collect();
        let near: BTreeSet<String> = self.fleet.hosts_of(&joined).into_iter().chain(more.cloned()).collect();
        let part = |fleet: &Fleet, host: &String| fleet.part(host, |g| joined.contains(g));
        let before: Vec<model::Table> = near.iter().map(|h| part(&self.fleet, h)).collect();
        let has = |h: &String| self.fleet.on(h).any(|v| groups.contains(&v.group.as_str()));
        let had: BTreeSet<&String> = near.iter().filter(|h| has(h)).collect();
        self.hosts.values().for_each(|h| _ = h.take_news());
        let marks: BTreeMap<&String, u64> = self.hosts.iter().map(|(n, h)| (n, h.traffic.received())).collect();
        let began = Instant::now();
        let answer = call(&self.centre.admin).await?;
        let call_ms = began.elapsed().as_secs_f64() * 1e3;
        let revision = answer.revision;
        self.fleet.take(answer.changes);
        let after = near.iter().zip(before).filter(|(h, before)| part(&self.fleet, h) != *before);
        let concerned: BTreeSet<&String> = after.map(|(h, _)| h).collect();
        self.until("all hosts concerned know of a change", |r| {
            concerned.iter().all(|h| r.hosts[*h].revision() >= revision)
        })
        .await?;
        tokio::time::sleep(AFTER).await;
        let told: BTreeMap<&String, InForce> =
            self.hosts.iter().filter_map(|(n, h)| Some((n, h.take_news().pop()?))).collect();
        let mut sample = Sample { call_ms, told: told.len(), ..Sample::default() };
        for (name, news) in &told {
            let bytes = news.received - marks[name];
            sample.bytes += bytes;
            let most = if had.contains(name) { &mut sample.host_bytes } else { &mut sample.new_host_bytes };
            *most = (*most).max(bytes);
            if concerned.contains(*name) {
                sample.ms = sample.ms.max(news.at.duration_since(began).as_secs_f64() * 1e3);
            }
            if news.whole {
                return Err(other(format!("host {name} was told everything because of one change")));
            }
        }
        sample.needless = told.keys().filter(|n| !concerned.contains(*n)).count();
        let names: Vec<String> = told.into_keys().chain(concerned).cloned().collect();
        names.iter().try_for_each(|name| self.check(name))?;
        Ok(sample)
    }

    /// Disconnects a host, makes changes, and lets the host come back with its old table.
    async fn come_back(&mut self) -> io::Result<Restart> {
        (self.say)("a host comes back with what it had");
        let vrnic = self.fleet.vrnics.keys().nth(self.options.vrnics / 2).cloned().expect("there are vRNICs");
        let group = self.fleet.vrnics[&vrnic].group.clone();
        let name = self.fleet.vrnics[&vrnic].host.clone();
        let host = self.hosts[&name].clone();
        host.set_free(false);
        self.until("a host is away", |_| !host.is_connected()).await?;
        for n in 0..5 {
            let object = v1::Vrnic {
                name: format!("while{n}"),
                group: group.clone(),
                host: name.clone(),
                ..v1::Vrnic::default()
            };
            let answer = one(self.centre.admin.apply(vec![object.into()]).await?)?;
            self.fleet.take(answer.changes);
        }
        let revision = self.centre.admin.status().await?.revision;
        host.take_news();
        let (received, sent, began) = (host.traffic.received(), host.traffic.sent(), Instant::now());
        host.set_free(true);
        self.until("a host is back", |_| host.revision() >= revision).await?;
        let told_s = began.elapsed().as_secs_f64();
        let wholes = usize::from(host.take_news().iter().any(|n| n.whole));
        self.check(&name)?;
        let (received, sent) = (host.traffic.received() - received, host.traffic.sent() - sent);
        Ok(Restart { serves_s: 0.0, told_s, received, sent, wholes, processor_s: 0.0 })
    }

    /// Kills the centre and starts it again while all hosts are connected.
    async fn restart(&mut self) -> io::Result<Restart> {
        (self.say)("the centre is killed and started again");
        // Hosts are told the newest revision within two seconds.
        tokio::time::sleep(Duration::from_secs(3)).await;
        self.hosts.values().for_each(|h| _ = h.take_news());
        let (received, sent) = (self.received(), self.sent());
        let serves = self.centre.kill_and_start().await?;
        let began = Instant::now();
        let all = self.hosts.len() as u32;
        let deadline = Instant::now() + PATIENCE;
        while self.centre.admin.status().await?.hosts_connected < all {
            if Instant::now() >= deadline {
                return Err(other("hosts do not come back to a centre that was started again"));
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        let told_s = began.elapsed().as_secs_f64();
        // One more change, which must reach all hosts: adds a vRNIC to the widest group.
        let host = self.fleet.hosts[0].clone();
        let object = v1::Vrnic { name: "last".into(), group: model::WIDEST.into(), host, ..v1::Vrnic::default() };
        let answer = one(self.centre.admin.apply(vec![Object::from(object)]).await?)?;
        let revision = answer.revision;
        self.fleet.take(answer.changes);
        let near = self.fleet.hosts_of(&self.fleet.joined(model::WIDEST));
        self.until("all hosts hear of a change again", |r| near.iter().all(|h| r.hosts[h].revision() >= revision))
            .await?;
        let wholes = self.hosts.values().filter(|h| h.take_news().iter().any(|n| n.whole)).count();
        let processor_s = centre::processor_s(self.centre.pid());
        let (received, sent) = (self.received() - received, self.sent() - sent);
        Ok(Restart { serves_s: serves.as_secs_f64(), told_s, received, sent, wholes, processor_s })
    }
}

fn one(answers: Vec<v1::ApplyResponse>) -> io::Result<v1::ApplyResponse> {
    answers.into_iter().next().ok_or_else(|| other("the centre answered nothing"))
}

/// A temporary directory, removed on drop.
pub struct Scratch(PathBuf);

impl Scratch {
    /// # Errors
    /// The directory cannot be made.
    pub fn new() -> io::Result<Scratch> {
        let dir = std::env::temp_dir().join(format!("unirdma-scale-{}", std::process::id()));
        std::fs::create_dir(&dir)?;
        Ok(Scratch(dir))
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
