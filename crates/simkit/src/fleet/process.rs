//! The program around a centre: it follows the store, campaigns for the lease, commits one change at a time, and sends
//! updates to hosts.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use unirdma_fleet::v1::{self, from_host, to_host};
use unirdma_fleet::{Actor, Centre, Outcome, Plan, Planner, Refusal, Write};

use super::store::{Granted, LEASE_MS};
use super::{Answer, EPOCH, Event, Question, World};

/// Intervals, ms: of `Alive` messages to hosts, of reading the changes of the store, of renewing the lease, and of the
/// centre's own changes.
const ALIVE_MS: u64 = 2_000;
const FOLLOW_MS: u64 = 100;
const RENEW_MS: u64 = 1_000;
const OWN_MS: u64 = 1_000;
/// A host from which nothing was received for this time is disconnected, ms.
const SILENCE_MS: u64 = 15_000;
/// Longest queue of waiting jobs.
const MAX_WAITING: usize = 1_000;
/// Longest time to wait for the store to answer a commit, ms.
const PATIENCE_MS: u64 = 8_000;

/// A request for a change.
pub(super) enum Job {
    Apply(Vec<v1::Object>),
    Delete(v1::Kind, String, bool),
    Move(String, String),
    Rotate(String),
    /// The first message of a host, received by a centre.
    Announce {
        host: String,
        hello: Box<v1::Hello>,
    },
    /// A request of a host's administrator, and the connection over which it came.
    Ask {
        host: String,
        ask: Box<v1::Ask>,
        from: From,
    },
    /// Changes that the centre makes by itself.
    Own,
}

/// Connection `link` of incarnation `life` of a centre.
#[derive(Clone, Copy)]
pub(super) struct From {
    pub centre: usize,
    pub life: u64,
    pub link: u64,
}

/// The requester of a job, to which its outcome is sent.
pub(super) enum Reply {
    Nobody,
    Operator,
    /// A host, and the number of its request.
    Host(From, u64),
}

/// A host that is connected to a centre.
pub(super) struct Peer {
    host: String,
    instance: u64,
    told: Option<u64>,
    heard: u64,
}

struct Pending {
    /// Identifies the store's answer.
    number: u64,
    since: u64,
    revision: u64,
    writes: Arc<[Write]>,
    reply: Reply,
    /// The answer to the host that asked for the change.
    answer: Option<v1::Reply>,
}

/// A centre's program.
pub(super) struct Process {
    seed: u64,
    pub life: u64,
    pub down_until: u64,
    pub centre: Option<Centre>,
    /// `Some` if `centre` is.
    planner: Option<Planner>,
    pub peers: BTreeMap<u64, Peer>,
    lease: Option<Granted>,
    pending: Option<Pending>,
    waiting: VecDeque<Job>,
    /// Answers that wait until this centre has a revision: revision, connection, answer.
    pub replies: Vec<(u64, u64, v1::Reply)>,
    next_follow: u64,
    next_renew: u64,
    next_own: u64,
    next_alive: u64,
    /// When this centre last had the newest state of the store.
    followed: u64,
}

impl Process {
    pub fn new(seed: u64) -> Process {
        Process {
            seed,
            life: 0,
            down_until: 0,
            centre: None,
            planner: None,
            peers: BTreeMap::new(),
            lease: None,
            pending: None,
            waiting: VecDeque::new(),
            replies: Vec::new(),
            next_follow: 0,
            next_renew: 0,
            next_own: 0,
            next_alive: 0,
            followed: 0,
        }
    }

    /// The program ends without warning. Returns its connections.
    pub fn crash(&mut self, until: u64) -> Vec<u64> {
        let links = std::mem::take(&mut self.peers).into_keys().collect();
        *self = Process { life: self.life + 1, down_until: until, ..Process::new(self.seed) };
        links
    }

    /// True if it has the lease, and so may make changes.
    pub fn leads(&self, now: u64) -> bool {
        self.centre.is_some() && self.lease.is_some_and(|(_, until)| until > now)
    }

    /// True if it has read the store a moment ago.
    pub fn is_well(&self, now: u64) -> bool {
        self.centre.is_some() && now < self.followed + 3 * FOLLOW_MS
    }

    pub fn hang_up(&mut self, link: u64, clock: u64) {
        if let Some(peer) = self.peers.remove(&link)
            && let Some(centre) = &mut self.centre
        {
            centre.goodbye(&peer.host, peer.instance, clock);
        }
    }
}

impl World {
    fn ask_store(&mut self, c: usize, question: Question) {
        if self.cut_store[c] > self.now {
            return;
        }
        let (delay, life) = (self.store_delay(), self.centres[c].life);
        self.at(delay, Event::Asked { centre: c, life, question });
    }

    pub(super) fn centre_tick(&mut self, c: usize) {
        let now = self.now;
        let p = &mut self.centres[c];
        if now < p.down_until {
            return;
        }
        if p.centre.is_none() {
            if now >= p.next_follow {
                p.next_follow = now + 1_000;
                self.ask_store(c, Question::All);
            }
            return;
        }
        if now >= p.next_renew {
            p.next_renew = now + RENEW_MS;
            self.ask_store(c, Question::Campaign);
        }
        let p = &mut self.centres[c];
        let late = p.pending.as_ref().is_some_and(|x| now >= x.since + PATIENCE_MS);
        if late || p.lease.is_some_and(|(_, until)| until <= now) {
            p.lease = None;
            // The outcome of the commit is unknown. If the store has the change, it arrives with the changes of the
            // store.
            if let Some(pending) = p.pending.take() {
                self.reply(pending.reply, Err("the store does not answer; look whether it was done".into()), None);
            }
        }
        let p = &mut self.centres[c];
        if now >= p.next_follow {
            p.next_follow = now + FOLLOW_MS;
            let revision = p.centre.as_ref().map_or(0, Centre::revision);
            self.ask_store(c, Question::Since(revision));
        }
        let p = &mut self.centres[c];
        if now >= p.next_own && p.leads(now) {
            p.next_own = now + OWN_MS;
            p.waiting.push_back(Job::Own);
        }
        let p = &mut self.centres[c];
        let links: Vec<u64> = p.peers.keys().copied().collect();
        if now >= p.next_alive {
            p.next_alive = now + ALIVE_MS;
            self.tell(c);
            for &id in &links {
                let revision = self.centres[c].peers.get(&id).and_then(|p| p.told).unwrap_or(0);
                self.send_down(id, to_host::Message::Alive(v1::Alive { revision, clock_ms: EPOCH + now }));
            }
        }
        for id in links {
            if self.centres[c].peers.get(&id).is_some_and(|p| now >= p.heard + SILENCE_MS) {
                self.centres[c].hang_up(id, EPOCH + now);
                self.close(id, false);
            }
        }
        let revision = self.centres[c].centre.as_ref().map_or(0, Centre::revision);
        let (ready, wait) =
            std::mem::take(&mut self.centres[c].replies).into_iter().partition(|(r, _, _)| *r <= revision);
        self.centres[c].replies = wait;
        let ready: Vec<(u64, u64, v1::Reply)> = ready;
        for (_, id, reply) in ready {
            self.send_down(id, to_host::Message::Reply(reply));
        }
        self.work(c);
        self.tell(c);
    }

    /// Sends to each host the updates that it lacks.
    fn tell(&mut self, c: usize) {
        let p = &mut self.centres[c];
        let Some(centre) = &mut p.centre else { return };
        let (mut out, revision) = (Vec::new(), centre.revision());
        for (id, peer) in p.peers.iter_mut().filter(|(_, peer)| peer.told != Some(revision)) {
            let updates = centre.updates(&peer.host, peer.told);
            peer.told = Some(revision);
            centre.told(&peer.host, revision);
            out.extend(updates.into_iter().map(|u| (*id, u)));
        }
        for (id, update) in out {
            self.send_down(id, to_host::Message::Update(update));
        }
    }

    /// Queues a job here if this centre has the lease, else forwards it to the centre that has it.
    pub(super) fn take_job(&mut self, c: usize, job: Job) {
        let now = self.now;
        let reply = job.reply();
        let refuse = |w: &mut World, why: &str| w.reply(reply, Err(why.into()), None);
        if self.centres[c].leads(now) {
            if self.centres[c].waiting.len() >= MAX_WAITING {
                refuse(self, "too much is waiting already; try again");
                return;
            }
            self.centres[c].waiting.push_back(job);
            self.work(c);
            return;
        }
        let leader = self.store.holder(now).filter(|&l| l != c && self.centres[c].centre.is_some());
        match leader {
            Some(to) => {
                let delay = 1 + self.draw(10);
                self.at(delay, Event::Forwarded { to, job });
            }
            // A host's first message is not dropped: it is retried until a centre has the lease.
            None if matches!(job, Job::Announce { .. }) => self.at(500, Event::Forwarded { to: c, job }),
            None => refuse(self, "no centre allocates at the moment; try again in some seconds"),
        }
    }

    /// Starts the next change if no commit is pending.
    fn work(&mut self, c: usize) {
        let now = self.now;
        while self.centres[c].leads(now) && self.centres[c].pending.is_none() {
            let p = &mut self.centres[c];
            let (Some(centre), Some(planner)) = (&p.centre, &mut p.planner) else { return };
            let Some(job) = p.waiting.pop_front() else { return };
            let reply = job.reply();
            let Some((epoch, _)) = p.lease else { return };
            let (plan, answer) = match job.plan(planner, centre, EPOCH + now) {
                Ok((Some(plan), answer)) => (plan, answer),
                Ok((None, answer)) => {
                    let nothing = (centre.revision(), Vec::new().into());
                    self.reply(reply, Ok(nothing), answer);
                    continue;
                }
                Err(e) => {
                    self.reply(reply, Err(e.what), None);
                    continue;
                }
            };
            let (revision, writes): (u64, Arc<[Write]>) = (plan.revision, plan.writes.into());
            self.count += 1;
            let (number, since) = (self.count, now);
            let p = &mut self.centres[c];
            p.pending = Some(Pending { number, since, revision, writes: writes.clone(), reply, answer });
            self.ask_store(c, Question::Commit { number, epoch, revision, writes });
        }
    }

    pub(super) fn answered(&mut self, c: usize, answer: Answer) {
        let now = self.now;
        if self.cut_store[c] > now {
            return;
        }
        let p = &mut self.centres[c];
        match answer {
            Answer::All(revision, records) => {
                let seed = [self.rng.next_u64() as u8; 32];
                let (centre, planner) = Centre::load(revision, &records, seed).expect("the store can be read");
                (p.centre, p.planner) = (Some(centre), Some(planner));
                p.followed = now;
                // The new state has no hosts, so their connections are closed.
                for (id, _) in std::mem::take(&mut p.peers) {
                    self.close(id, false);
                }
            }
            Answer::Campaign(granted) => {
                // An answer may be late, so a lease that has already expired is ignored.
                p.lease = granted.filter(|(_, until)| *until > now && *until <= now + LEASE_MS);
            }
            Answer::Since(None) => {
                p.centre = None;
                p.pending = None;
                p.next_follow = now;
            }
            Answer::Since(Some(changes)) => {
                p.followed = now;
                for (revision, writes) in changes {
                    self.commit(c, revision, &writes);
                }
            }
            Answer::Commit { number, kept } => {
                let Some(pending) = p.pending.take_if(|x| x.number == number) else { return };
                if kept {
                    self.commit(c, pending.revision, &pending.writes);
                    self.reply(pending.reply, Ok((pending.revision, pending.writes)), pending.answer);
                } else {
                    p.lease = None;
                    self.reply(pending.reply, Err("another centre allocates now; try again".into()), None);
                }
            }
        }
        self.work(c);
        self.tell(c);
    }

    fn commit(&mut self, c: usize, revision: u64, writes: &[Write]) {
        let p = &mut self.centres[c];
        if let (Some(centre), Some(planner)) = (&mut p.centre, &mut p.planner)
            && revision == centre.revision() + 1
        {
            centre.commit(planner, revision, writes).expect("what was kept can be read");
        }
    }

    /// Handles a message from a host.
    pub(super) fn heard(&mut self, c: usize, id: u64, host: usize, message: from_host::Message) {
        let (now, clock) = (self.now, EPOCH + self.now);
        let name = self.hosts[host].name.clone();
        let p = &mut self.centres[c];
        let Some(centre) = &mut p.centre else {
            // The centre is loading the store again, and accepts no connection meanwhile.
            return self.close(id, false);
        };
        if let Some(peer) = p.peers.get_mut(&id) {
            peer.heard = now;
        }
        match message {
            from_host::Message::Hello(hello) => match centre.hello(&name, &hello, clock) {
                Err(e) => {
                    self.send_down(id, to_host::Message::Refused(e.what));
                }
                Ok(greeted) => {
                    let peer = Peer { host: name.clone(), instance: hello.instance, told: greeted.told, heard: now };
                    p.peers.insert(id, peer);
                    self.take_job(c, Job::Announce { host: name, hello: Box::new(hello) });
                    self.tell(c);
                }
            },
            from_host::Message::Ask(ask) => {
                let from = From { centre: c, life: p.life, link: id };
                self.take_job(c, Job::Ask { host: name, ask: Box::new(ask), from });
            }
            from_host::Message::Applied(applied) => centre.applied(&name, &applied, clock),
            from_host::Message::Report(report) => centre.report(&name, report, clock),
        }
    }
}

impl Job {
    fn reply(&self) -> Reply {
        match self {
            Job::Announce { .. } | Job::Own => Reply::Nobody,
            Job::Ask { ask, from, .. } => Reply::Host(*from, ask.id),
            _ => Reply::Operator,
        }
    }

    /// Plans the change.
    fn plan(
        self,
        planner: &mut Planner,
        centre: &Centre,
        clock: u64,
    ) -> Result<(Option<Plan>, Option<v1::Reply>), Refusal> {
        let operator = Actor::centre();
        fn of<T>(outcome: Outcome<T>) -> Option<Plan> {
            outcome.plan
        }
        let plan = match self {
            Job::Apply(objects) => {
                let request = v1::ApplyRequest { objects, ..v1::ApplyRequest::default() };
                planner.apply(&operator, request, centre, clock).map(of)
            }
            Job::Delete(kind, name, force) => {
                let names = vec![v1::Name { kind: kind.into(), name }];
                planner.delete(&operator, &v1::DeleteRequest { names, force, dry_run: false }, centre, clock).map(of)
            }
            Job::Move(vrnic, host) => {
                planner.move_vrnic(&operator, &v1::MoveRequest { vrnic, host }, centre, clock).map(of)
            }
            Job::Rotate(group) => planner.rotate(&operator, &group, centre, clock).map(of),
            Job::Announce { host, hello } => Ok(of(planner.announce(&host, &hello, centre, clock))),
            Job::Ask { host, ask, .. } => {
                return planner.ask(&host, *ask, centre, clock).map(|o| (o.plan, Some(o.answer)));
            }
            Job::Own => Ok(planner.tick(centre, clock)),
        };
        Ok((plan?, None))
    }
}
