//! The simulation of a fleet: hosts, two control centres, their store and an operator, on a network with partitions,
//! with crashes and slow disks.
//!
//! Hosts run [`Agent`] and centres run [`Centre`]. The rest is modelled here: connections, the store with its lease
//! ([`store`]), a host's disk and its vRNICs ([`host`]), and the program around a centre ([`process`]).
//!
//! The simulation panics if one of these conditions is violated after a step:
//!
//! * No address, MAC, GUID or VNI is assigned twice.
//! * The state that an agent has is exactly the state of its host at one revision.
//! * A host that nothing has disturbed for [`LAG_MS`] has the newest state, exactly the vRNICs that are declared for it
//!   (so no two hosts have the same address), and no connection that the rules forbid.
//! * Undisturbed hosts accept the secrets that they send to each other with.
//! * A change that was acknowledged is in the store.
//!
//! Once disturbances end, all hosts must reach the newest state and the centre must serve requests.

mod host;
mod process;
mod store;
mod truth;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::sync::Arc;

use unirdma_fleet::agent::{Agent, Work};
use unirdma_fleet::v1::{self, object::Object};
use unirdma_fleet::{Actor, Centre, Write};
use unirdma_rnic::Rng;

use host::Host;
use process::{Job, Process, Reply};
use store::{Change, Granted, Store};
use truth::Truth;

const HOSTS: usize = 5;
const CENTRES: usize = 2;
const GROUPS: [&str; 3] = ["blue", "red", "green"];
/// The virtual clock begins here, milliseconds since 1970.
const EPOCH: u64 = 1_800_000_000_000;
/// Interval at which hosts and centres are polled and checked, ms.
const TICK_MS: u64 = 50;
/// Longest time after which a host that nothing disturbs has a change, ms.
const LAG_MS: u64 = 1_000;
/// Length of one step of a simulation, ms.
const STEP_MS: u64 = 10_000;
/// Length of the time without disturbances at the end, ms. A host that a centre refuses because its former connection
/// is not closed yet waits for up to 23 s before it connects again.
const PEACE_MS: u64 = 90_000;

/// Statistics of a simulation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Changes that the store has kept.
    pub changes: u64,
    /// Calls that were refused.
    pub refused: u64,
    /// Crashes of hosts and of centres.
    pub crashes: u64,
    /// How often the lease went to another centre.
    pub elections: u64,
    /// Connections that were made between vRNICs.
    pub connections: u64,
    /// Connections between vRNICs that a change has ended.
    pub ended: u64,
    /// Changes that the administrators of hosts asked for.
    pub asked: u64,
    /// Answers that the administrators of hosts received.
    pub answered: u64,
    /// How often a host received the whole state.
    pub wholes: u64,
    /// Digest of all events and their times.
    pub digest: u64,
}

/// Runs the simulation of a seed: `steps` steps of ten seconds, then `PEACE_MS` without disturbances. Panics if a
/// condition is violated.
pub fn run(seed: u64, steps: u64) -> Report {
    let mut world = World::new(seed);
    world.run_until(steps * STEP_MS);
    world.heal();
    world.run_until(steps * STEP_MS + PEACE_MS);
    world.check_peace();
    world.report
}

/// A request of a centre to the store.
enum Question {
    Campaign,
    Commit { number: u64, epoch: u64, revision: u64, writes: Arc<[Write]> },
    Since(u64),
    All,
}

/// The store's answer to a [`Question`].
enum Answer {
    Campaign(Option<Granted>),
    Commit { number: u64, kept: bool },
    Since(Option<Vec<Change>>),
    All(u64, Vec<Write>),
}

/// An event of the simulation. `life` is the incarnation of the process that the event is for; later incarnations
/// ignore it.
enum Event {
    Asked {
        centre: usize,
        life: u64,
        question: Question,
    },
    Answered {
        centre: usize,
        life: u64,
        answer: Answer,
    },
    /// The connection is open at the centre; the host learns it a moment later.
    Opened(u64),
    /// The next message to the host, or to the centre, is due.
    Deliver {
        link: u64,
        to_host: bool,
    },
    /// One end learns that the other one has closed the connection.
    Closed {
        link: u64,
        to_host: bool,
        why: &'static str,
    },
    /// A host has done the work that its agent asked for.
    Carried {
        host: usize,
        life: u64,
        work: Vec<Work>,
    },
    /// A centre forwards a job to the centre that has the lease.
    Forwarded {
        to: usize,
        job: Job,
    },
    /// The centre that has the lease returns the outcome of a forwarded job.
    Returned {
        to: usize,
        life: u64,
        revision: u64,
        link: u64,
        reply: Box<v1::Reply>,
    },
    Tick,
    Operator,
    Talk,
    Disturb,
}

/// A change in the store: its revision and its writes.
type Kept = (u64, Arc<[Write]>);

/// A connection of a host with a centre.
struct Link {
    host: usize,
    host_life: u64,
    centre: usize,
    centre_life: u64,
    up: VecDeque<v1::FromHost>,
    down: VecDeque<v1::ToHost>,
    open: bool,
}

/// A connection between two vRNICs, and the hosts of both.
#[derive(Clone, Debug, PartialEq)]
struct Talk {
    names: [String; 2],
    hosts: [usize; 2],
}

/// The state of the whole simulation.
struct World {
    now: u64,
    rng: Rng,
    queue: BinaryHeap<Reverse<(u64, u64)>>,
    events: BTreeMap<u64, Event>,
    count: u64,
    store: Store,
    truth: Truth,
    hosts: Vec<Host>,
    centres: Vec<Process>,
    links: BTreeMap<u64, Link>,
    talks: Vec<Talk>,
    /// Number of connections that were made.
    talked: u64,
    /// For each host, the state that was checked last: revision of the store, [`Host::looked`], and `talked`.
    checked: [(u64, u64, u64); HOSTS],
    /// For each pair of hosts, the values of [`Host::looked`] at which their secrets were compared last.
    checked_secrets: [[(u64, u64); HOSTS]; HOSTS],
    /// Until when each host is cut off from each centre. `cut_store`: until when each centre is cut off from the store.
    cut: [[u64; CENTRES]; HOSTS],
    cut_store: [u64; CENTRES],
    slow_store: u64,
    /// Since when nothing has disturbed a host's path to the store.
    calm: [u64; HOSTS],
    peace: bool,
    /// Changes that the store has committed, by revision.
    kept: BTreeMap<u64, Arc<[Write]>>,
    made: u64,
    /// The last refusal that the operator received.
    refusal: String,
    leader: Option<usize>,
    report: Report,
}

impl World {
    fn new(seed: u64) -> World {
        let names: Vec<String> = (0..HOSTS).map(|i| format!("h{i}")).collect();
        let mut store = Store::new(Centre::found("fleet"));
        let (founder, mut planner) = Centre::load(store.revision, &store.all().1, [1; 32]).expect("a new fleet");
        let hosts = names.iter().map(|n| v1::Host { name: n.clone(), ..v1::Host::default() }.into());
        let groups = GROUPS.iter().map(|n| v1::Group { secret: *n != "red", ..declared_group(n) }.into());
        let objects = hosts.chain(groups).map(|o: Object| v1::Object { object: Some(o), revision: 0 }).collect();
        let request = v1::ApplyRequest { objects, ..v1::ApplyRequest::default() };
        let made = planner.apply(&Actor::centre(), request, &founder, EPOCH).expect("a good beginning");
        let plan = made.plan.expect("it is new");
        let granted = store.campaign(0, 0).expect("nobody has the lease");
        assert!(store.commit(0, granted.0, plan.revision, &plan.writes.into()));
        let mut rng = Rng::new(seed);
        let mut world = World {
            now: store::LEASE_MS,
            queue: BinaryHeap::new(),
            events: BTreeMap::new(),
            count: 0,
            truth: Truth::new(store.all(), names.clone()),
            store,
            hosts: names.iter().enumerate().map(|(i, n)| Host::new(i, n, rng.next_u64())).collect(),
            centres: (0..CENTRES).map(|_| Process::new(rng.next_u64())).collect(),
            links: BTreeMap::new(),
            talks: Vec::new(),
            talked: 0,
            checked: [(0, 0, 0); HOSTS],
            checked_secrets: [[(0, 0); HOSTS]; HOSTS],
            cut: [[0; CENTRES]; HOSTS],
            cut_store: [0; CENTRES],
            slow_store: 0,
            calm: [0; HOSTS],
            peace: false,
            kept: BTreeMap::new(),
            made: 0,
            refusal: String::new(),
            leader: None,
            report: Report::default(),
            rng,
        };
        world.at(0, Event::Tick);
        world.at(200, Event::Operator);
        world.at(500, Event::Talk);
        world.at(4_000, Event::Disturb);
        world
    }

    /// A number below `n`.
    fn draw(&mut self, n: u64) -> u64 {
        self.rng.next_u64() % n
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.draw(n) == 0
    }

    fn at(&mut self, after: u64, event: Event) {
        self.count += 1;
        self.queue.push(Reverse((self.now + after, self.count)));
        self.events.insert(self.count, event);
    }

    fn run_until(&mut self, after: u64) {
        let end = store::LEASE_MS + after;
        while let Some(&Reverse((at, number))) = self.queue.peek() {
            if at > end {
                break;
            }
            self.queue.pop();
            self.now = at;
            let event = self.events.remove(&number).expect("each event comes once");
            self.report.digest = (self.report.digest ^ at ^ number << 20).wrapping_mul(0x100_0000_01b3);
            self.step(event);
        }
        self.now = end;
    }

    fn step(&mut self, event: Event) {
        match event {
            Event::Tick => {
                (0..HOSTS).for_each(|h| self.host_tick(h));
                (0..CENTRES).for_each(|c| self.centre_tick(c));
                self.check();
                self.at(TICK_MS, Event::Tick);
            }
            Event::Operator => {
                if !self.peace && self.one_in(6) {
                    self.ask();
                } else if !self.peace {
                    self.operate();
                }
                let pause = 100 + self.draw(1_500);
                self.at(pause, Event::Operator);
            }
            Event::Talk => {
                self.talk();
                self.at(200, Event::Talk);
            }
            Event::Disturb => {
                if !self.peace {
                    self.disturb();
                }
                let pause = 500 + self.draw(8_000);
                self.at(pause, Event::Disturb);
            }
            Event::Asked { centre, life, question } => self.asked(centre, life, question),
            Event::Answered { centre, life, answer } => {
                if self.centres[centre].life == life {
                    self.answered(centre, answer);
                }
            }
            Event::Opened(link) => self.opened(link),
            Event::Deliver { link, to_host } => self.deliver(link, to_host),
            Event::Closed { link, to_host, why } => self.closed(link, to_host, why),
            Event::Carried { host, life, work } => {
                if self.hosts[host].life == life {
                    self.carried(host, work);
                }
            }
            Event::Forwarded { to, job } => self.take_job(to, job),
            Event::Returned { to, life, revision, link, reply } => {
                if self.centres[to].life == life {
                    self.centres[to].replies.push((revision, link, *reply));
                }
            }
        }
    }

    // --- the store ---

    fn asked(&mut self, centre: usize, life: u64, question: Question) {
        if self.cut_store[centre] > self.now {
            return;
        }
        let answer = match question {
            Question::Campaign => {
                let granted = self.store.campaign(self.now, centre);
                if granted.is_some() && self.leader != Some(centre) {
                    self.leader = Some(centre);
                    self.report.elections += 1;
                }
                Answer::Campaign(granted)
            }
            Question::Commit { number, epoch, revision, writes } => {
                let kept = self.store.commit(self.now, epoch, revision, &writes);
                if kept {
                    self.report.changes += 1;
                    self.truth.commit(self.now, revision, &writes);
                    self.kept.insert(revision, writes);
                }
                Answer::Commit { number, kept }
            }
            Question::Since(revision) => Answer::Since(self.store.since(revision)),
            Question::All => {
                let (revision, records) = self.store.all();
                Answer::All(revision, records)
            }
        };
        let delay = self.store_delay();
        self.at(delay, Event::Answered { centre, life, answer });
    }

    fn store_delay(&mut self) -> u64 {
        if self.slow_store > self.now { 50 + self.draw(3_000) } else { 1 + self.draw(10) }
    }

    // --- connections ---

    fn parted(&self, link: &Link) -> bool {
        self.cut[link.host][link.centre] > self.now
    }

    /// A host connects to some centre.
    fn connect(&mut self, host: usize) {
        let centre = self.draw(CENTRES as u64) as usize;
        let life = self.hosts[host].life;
        self.count += 1;
        let id = self.count;
        let link = Link {
            host,
            host_life: life,
            centre,
            centre_life: self.centres[centre].life,
            up: VecDeque::new(),
            down: VecDeque::new(),
            open: false,
        };
        self.hosts[host].link = Some(id);
        let why = if self.parted(&link) { Some((3_000, "no route")) } else { None };
        let down = self.centres[centre].centre.is_none();
        self.links.insert(id, link);
        match why.or(down.then_some((2, "nobody listens"))) {
            Some((after, why)) => self.at(after, Event::Closed { link: id, to_host: true, why }),
            None => {
                let after = 1 + self.draw(20);
                self.at(after, Event::Opened(id));
            }
        }
    }

    fn opened(&mut self, id: u64) {
        let now = self.now;
        let Some(link) = self.links.get_mut(&id) else { return };
        let (host, centre) = (link.host, link.centre);
        if self.centres[centre].life != link.centre_life || self.centres[centre].centre.is_none() {
            self.at(1, Event::Closed { link: id, to_host: true, why: "reset" });
            return;
        }
        if self.hosts[host].life != link.host_life || self.hosts[host].link != Some(id) {
            self.links.remove(&id);
            return;
        }
        link.open = true;
        self.calm[host] = now;
        let clock = EPOCH + now;
        if let Some(agent) = &mut self.hosts[host].agent {
            agent.connected(now, clock);
        }
    }

    /// Sends a message to the centre. Messages of a connection arrive in order.
    fn send_up(&mut self, id: u64, message: v1::FromHost) {
        let Some(link) = self.links.get_mut(&id) else { return };
        link.up.push_back(message);
        if link.up.len() == 1 {
            let after = 1 + self.draw(20);
            self.at(after, Event::Deliver { link: id, to_host: false });
        }
    }

    fn send_down(&mut self, id: u64, message: v1::to_host::Message) {
        let Some(link) = self.links.get_mut(&id) else { return };
        link.down.push_back(v1::ToHost { message: Some(message) });
        if link.down.len() == 1 {
            let after = 1 + self.draw(20);
            self.at(after, Event::Deliver { link: id, to_host: true });
        }
    }

    fn deliver(&mut self, id: u64, to_host: bool) {
        let Some(link) = self.links.get(&id) else { return };
        if self.parted(link) {
            // The message is sent again until it arrives or one end gives up.
            self.at(200, Event::Deliver { link: id, to_host });
            return;
        }
        let (host, centre) = (link.host, link.centre);
        let host_lives = self.hosts[host].life == link.host_life && self.hosts[host].link == Some(id);
        let centre_lives = self.centres[centre].life == link.centre_life
            && self.centres[centre].peers.contains_key(&id)
            || link.open && !to_host && self.centres[centre].life == link.centre_life;
        let lives = if to_host { host_lives } else { centre_lives };
        if !lives {
            // The receiver does not know the connection.
            self.at(1, Event::Closed { link: id, to_host: !to_host, why: "reset" });
            return;
        }
        let Some(link) = self.links.get_mut(&id) else { return };
        let more;
        if to_host {
            let message = link.down.pop_front();
            more = !link.down.is_empty();
            if let (Some(message), Some(agent)) = (message, &mut self.hosts[host].agent) {
                let is_whole = matches!(&message.message, Some(v1::to_host::Message::Update(u)) if u.whole);
                self.report.wholes += u64::from(is_whole);
                agent.handle(self.now, message);
                self.host_outputs(host);
            }
        } else {
            let message = link.up.pop_front();
            more = !link.up.is_empty();
            if let Some(message) = message.and_then(|m| m.message) {
                self.heard(centre, id, host, message);
            }
        }
        if more {
            self.at(1, Event::Deliver { link: id, to_host });
        }
    }

    /// One end closes a connection. It receives nothing from it any more.
    fn close(&mut self, id: u64, by_host: bool) {
        self.at(5, Event::Closed { link: id, to_host: !by_host, why: "closed" });
    }

    fn closed(&mut self, id: u64, to_host: bool, why: &'static str) {
        let Some(link) = self.links.get(&id) else { return };
        if self.parted(link) && link.open {
            self.at(200, Event::Closed { link: id, to_host, why });
            return;
        }
        let (host, centre) = (link.host, link.centre);
        if to_host {
            self.links.remove(&id);
            self.drop_host_link(host, id, why);
        } else {
            self.links.remove(&id);
            self.centres[centre].hang_up(id, EPOCH + self.now);
        }
    }

    fn drop_host_link(&mut self, host: usize, id: u64, why: &str) {
        let now = self.now;
        if self.hosts[host].link == Some(id) {
            self.hosts[host].link = None;
            self.calm[host] = now;
            if let Some(agent) = &mut self.hosts[host].agent {
                agent.disconnected(now, why.into());
            }
        }
    }

    // --- disturbances, users and programs ---

    /// An operator requests a random change from a random centre.
    fn operate(&mut self) {
        let centre = self.draw(CENTRES as u64) as usize;
        let mut names: Vec<String> = self.truth.vrnics.keys().cloned().collect();
        let any = |w: &mut World, names: &mut Vec<String>| {
            let n = names.len() as u64;
            if n == 0 { None } else { Some(names.swap_remove(w.draw(n) as usize)) }
        };
        let host = format!("h{}", self.draw(HOSTS as u64));
        let group = GROUPS[self.draw(3) as usize];
        let selector = |w: &mut World, names: &mut Vec<String>| match any(w, names).filter(|_| w.one_in(2)) {
            Some(v) => format!("vrnic:{v}"),
            None => format!("group:{}", GROUPS[w.draw(3) as usize]),
        };
        let rule = format!("r{}", self.draw(5));
        let apply = |o: Object| Job::Apply(vec![v1::Object { object: Some(o), revision: 0 }]);
        let job = match self.draw(13) {
            0..=3 => {
                self.made += 1;
                let host = if self.one_in(8) { String::new() } else { host };
                let ips = if self.one_in(6) { vec![format!("10.8.0.{}", 2 + self.draw(20))] } else { Vec::new() };
                let name = format!("v{}", self.made);
                apply(v1::Vrnic { name, group: group.into(), host, ips, ..v1::Vrnic::default() }.into())
            }
            4 => match any(self, &mut names) {
                Some(name) => Job::Delete(v1::Kind::Vrnic, name, self.one_in(3)),
                None => return,
            },
            5 | 6 => match any(self, &mut names) {
                Some(vrnic) => Job::Move(vrnic, host),
                None => return,
            },
            7..=9 => {
                let (from, to) = (selector(self, &mut names), selector(self, &mut names));
                let action = if self.one_in(3) { v1::rule::Action::Deny } else { v1::rule::Action::Allow };
                let (both, priority) = (self.one_in(2), self.draw(3) as u32);
                apply(v1::Rule { name: rule, from, to, action: action.into(), both, priority }.into())
            }
            10 => Job::Delete(v1::Kind::Rule, rule, false),
            11 => apply(
                v1::Group { weight: Some(1 + self.draw(9) as u32), secret: self.one_in(2), ..declared_group(group) }
                    .into(),
            ),
            _ => Job::Rotate(group.into()),
        };
        self.take_job(centre, job);
    }

    /// The administrator of a random host creates or removes a vRNIC.
    fn ask(&mut self) {
        let h = self.draw(HOSTS as u64) as usize;
        let own: Vec<String> = {
            let agent = self.hosts[h].agent.iter();
            agent.flat_map(|a| a.vrnics()).filter(|v| v.by_host).map(|v| v.name.clone()).collect()
        };
        let change = match own.first().filter(|_| self.one_in(2)) {
            Some(name) => v1::ask::Change::Remove(name.clone()),
            None => {
                self.made += 1;
                let group = GROUPS[self.draw(3) as usize].into();
                v1::ask::Change::Put(v1::Vrnic { name: format!("own{}", self.made), group, ..v1::Vrnic::default() })
            }
        };
        let now = self.now;
        if let Some(agent) = &mut self.hosts[h].agent
            && agent.ask(now, change).is_ok()
        {
            self.report.asked += 1;
            self.host_outputs(h);
        }
    }

    /// Causes a random fault.
    fn disturb(&mut self) {
        let (h, c) = (self.draw(HOSTS as u64) as usize, self.draw(CENTRES as u64) as usize);
        let long = if self.one_in(3) { 30_000 } else { 3_000 };
        let until = self.now + 1 + self.draw(long);
        match self.draw(8) {
            0 | 1 => self.cut[h][c] = until,
            2 => self.cut_store[c] = until,
            3 => self.slow_store = until,
            4 => self.hosts[h].slow_disk = until,
            5 | 6 => self.crash_host(h, until),
            _ => self.crash_centre(c, until),
        }
    }

    /// Ends all disturbances.
    fn heal(&mut self) {
        let now = self.now;
        self.peace = true;
        (self.cut, self.cut_store, self.slow_store) = ([[0; CENTRES]; HOSTS], [0; CENTRES], 0);
        for h in &mut self.hosts {
            (h.slow_disk, h.down_until) = (0, h.down_until.min(now));
            h.programs.clear();
        }
        self.centres.iter_mut().for_each(|c| c.down_until = c.down_until.min(now));
    }

    /// Two random vRNICs connect if both their hosts allow it. Programs start and end.
    fn talk(&mut self) {
        let h = self.draw(HOSTS as u64) as usize;
        let names: Vec<String> = self.hosts[h].made.keys().cloned().collect();
        if names.is_empty() || self.hosts[h].agent.is_none() {
            return;
        }
        let a = names[self.draw(names.len() as u64) as usize].clone();
        if !self.peace && self.one_in(4) && !self.hosts[h].programs.remove(&a) {
            self.hosts[h].programs.insert(a.clone());
        }
        let known: Vec<String> = self.hosts[h].known().map(|(n, _)| n.to_string()).filter(|n| *n != a).collect();
        if known.is_empty() {
            return;
        }
        let b = known[self.draw(known.len() as u64) as usize].clone();
        let Some(other) = (0..HOSTS).find(|&i| self.hosts[i].made.contains_key(&b)) else { return };
        let talk = Talk { names: [a, b], hosts: [h, other] };
        let new = !self.talks.contains(&talk);
        if new && self.hosts[h].allows(&talk.names) && self.hosts[other].allows(&talk.names) {
            self.talks.push(talk);
            self.talked += 1;
            self.report.connections += 1;
        }
    }

    /// Ends the connections that a host does not allow any more, after its state has changed.
    fn end_talks(&mut self, host: usize) {
        let before = self.talks.len();
        let mut talks = std::mem::take(&mut self.talks);
        talks.retain(|t| {
            let mine = (0..2).filter(|&i| t.hosts[i] == host);
            let there = mine.clone().all(|i| self.hosts[host].made.contains_key(&t.names[i]));
            mine.count() == 0 || there && self.hosts[host].allows(&t.names)
        });
        self.report.ended += (before - talks.len()) as u64;
        self.talks = talks;
    }

    fn crash_host(&mut self, h: usize, until: u64) {
        if self.hosts[h].agent.is_none() {
            return;
        }
        self.report.crashes += 1;
        // Either only its supervisor was killed, and its vRNICs live on, or the whole machine has crashed.
        let all = self.one_in(2);
        self.hosts[h].crash(self.now, until, all);
        self.calm[h] = self.now;
        if all {
            self.talks.retain(|t| !t.hosts.contains(&h));
        }
        // If only the process was killed, the kernel closes its connection. A machine without power sends nothing.
        if let Some(id) = self.hosts[h].link.take() {
            if all {
                self.links.remove(&id);
            } else {
                self.close(id, true);
            }
        }
    }

    fn crash_centre(&mut self, c: usize, until: u64) {
        if self.centres[c].centre.is_none() {
            return;
        }
        self.report.crashes += 1;
        let silent = self.one_in(2);
        for id in self.centres[c].crash(until) {
            if silent {
                self.links.get_mut(&id).into_iter().for_each(|l| l.down.clear());
            } else {
                self.close(id, false);
            }
        }
    }

    // --- checks ---

    fn check(&mut self) {
        let now = self.now;
        for h in 0..HOSTS {
            let cut = (0..CENTRES).any(|c| self.cut_store[c] > now) || self.slow_store > now;
            let link = self.hosts[h].link.and_then(|id| self.links.get(&id)).filter(|l| l.open);
            let well = link.is_some_and(|l| !self.parted(l) && self.centres[l.centre].is_well(now));
            if cut || !well || self.hosts[h].slow_disk > now {
                self.calm[h] = now;
            }
            self.hosts[h].check(h, &self.truth);
            if now - self.calm[h].max(self.truth.changed[h]) < LAG_MS {
                continue;
            }
            let host = &self.hosts[h];
            let Some(agent) = &host.agent else { continue };
            // A state that was checked need not be checked again.
            let is = (self.truth.centre.revision(), host.looked, self.talked);
            if self.checked[h] == is {
                continue;
            }
            let due = self.truth.table(h, u64::MAX).expect("there is something to have");
            if host.table != *due {
                let keys = due.keys().chain(host.table.keys()).filter(|k| due.get(*k) != host.table.get(*k));
                let keys: std::collections::BTreeSet<_> = keys.collect();
                panic!("at {now} ms h{h}, which nothing disturbs, does not have what it is to have: {keys:?}");
            }
            if host.working || !agent.status(now).problems.is_empty() {
                continue;
            }
            let declared = self.truth.vrnics.iter().filter(|(_, p)| p.host == host.name);
            assert!(host.made.iter().eq(declared), "at {now} ms h{h} has other vRNICs than those that it is to have");
            for t in self.talks.iter().filter(|t| t.hosts.contains(&h)) {
                let [a, b] = &t.names;
                assert!(self.truth.allows(a, b), "at {now} ms {a} and {b} are connected, which the rules forbid");
            }
            self.checked[h] = is;
        }
        for a in 0..HOSTS {
            for b in (0..HOSTS).filter(|b| *b != a) {
                let calm = |h: usize| now - self.calm[h].max(self.truth.declared) >= LAG_MS;
                let is = (self.hosts[a].looked, self.hosts[b].looked);
                if self.checked_secrets[a][b] != is && calm(a) && calm(b) {
                    self.hosts[a].check_secrets(&self.hosts[b]);
                    self.checked_secrets[a][b] = is;
                }
            }
        }
    }

    /// Checks the end of the simulation: every host has the newest state, and the centre serves a request.
    fn check_peace(&mut self) {
        let now = self.now;
        let c = self.store.holder(now).expect("a centre has the lease");
        assert!(self.centres[c].leads(now), "it knows that it has");
        let before = self.store.revision;
        let vrnic = v1::Vrnic { name: "last".into(), group: "green".into(), host: "h0".into(), ..v1::Vrnic::default() };
        self.take_job(c, Job::Apply(vec![v1::Object { object: Some(vrnic.into()), revision: 0 }]));
        self.run_until(now - store::LEASE_MS + 15_000);
        assert!(self.store.revision > before, "the centre does not serve: {}", self.refusal);
        for h in 0..HOSTS {
            let host = &self.hosts[h];
            let agent = host.agent.as_ref().expect("it runs");
            let status = agent.status(self.now);
            assert!(status.connected, "h{h} is not connected: {}", status.why);
            assert!(status.problems.is_empty(), "h{h}: {:?}", status.problems);
            assert!(self.truth.table(h, u64::MAX) == Some(&host.table), "h{h} does not have what it is to have");
            let declared: Vec<&String> =
                self.truth.vrnics.iter().filter(|(_, p)| p.host == host.name).map(|(n, _)| n).collect();
            assert_eq!(host.made.keys().collect::<Vec<_>>(), declared, "vRNICs of h{h}");
        }
    }

    /// Records the outcome of an operator's call, and checks that an acknowledged change is in the store.
    fn operator_hears(&mut self, outcome: Result<Kept, String>) {
        match outcome {
            Ok((_, writes)) if writes.is_empty() => {}
            // An acknowledged change is in the store, unmodified.
            Ok((revision, writes)) => {
                assert!(
                    self.kept.get(&revision) == Some(&writes),
                    "revision {revision} was acknowledged and is not kept"
                );
            }
            Err(why) => {
                assert!(!why.is_empty() && !why.contains('\n'), "a refusal is one line: {why:?}");
                self.report.refused += 1;
                self.refusal = why;
            }
        }
    }

    /// Sends the outcome of a change to the operator or host that requested it.
    fn reply(&mut self, reply: Reply, outcome: Result<Kept, String>, answer: Option<v1::Reply>) {
        match reply {
            Reply::Nobody => {}
            Reply::Operator => self.operator_hears(outcome),
            Reply::Host(from, id) => {
                let (revision, reply) = match outcome {
                    Ok((revision, _)) => (revision, answer.unwrap_or_default()),
                    Err(error) => (0, v1::Reply { id, error, ..v1::Reply::default() }),
                };
                let delay = 1 + self.draw(10);
                let (to, life, link) = (from.centre, from.life, from.link);
                self.at(delay, Event::Returned { to, life, revision, link, reply: Box::new(reply) });
            }
        }
    }
}

/// A group without a secret. Groups `blue` and `red` use the same addresses.
fn declared_group(name: &str) -> v1::Group {
    let range = if name == "green" { "10.9.0.0/24" } else { "10.8.0.0/27" };
    v1::Group { name: name.into(), ranges: vec![range.into()], ..v1::Group::default() }
}

/// Starts the agent of a host with the records that its disk has.
fn start_agent(host: &Host, kept: Vec<v1::Update>) -> Agent {
    let config = unirdma_fleet::agent::Config {
        version: "0.1.0".into(),
        addresses: vec![format!("192.168.0.{}", host.number + 1)],
        instance: host.seed ^ host.life,
    };
    Agent::new(config, kept, host.seed ^ host.life).expect("what was kept can be read")
}
