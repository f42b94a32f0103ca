//! The centre without a network: choices, refusals and updates. Updates in pieces lead to the same state as a whole
//! update.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use unirdma_fleet::agent::Agent;
use unirdma_fleet::v1::{self, item::Item, object::Object};
use unirdma_fleet::{Actor, Centre, Outcome, Plan, Planner, Refusal, RefusalKind, STEP_DEADLINE_MS, Write};

const NOW: u64 = 1_800_000_000_000;

/// A centre with its store, and hosts that apply their updates.
struct World {
    centre: Centre,
    planner: Planner,
    store: BTreeMap<String, Vec<u8>>,
    hosts: BTreeMap<String, Told>,
    admin: Actor,
    now: u64,
}

/// The updates that a host was sent, put in force by its agent.
struct Told {
    agent: Agent,
    items: BTreeMap<String, Item>,
}

/// The key of an item as text.
fn key(item: &Item) -> String {
    match item {
        Item::Group(g) => format!("group {}", g.name),
        Item::Vrnic(v) => format!("vrnic {}", v.name),
        Item::Place(p) => format!("place {}", p.host),
        Item::Peer(p) => format!("peer {}", p.name),
        Item::Rule(r) => format!("rule {}", r.name),
        Item::Secret(s) => {
            let k = s.key.as_ref().unwrap();
            format!("secret {} {} {}", k.group, k.other, k.id)
        }
    }
}

impl Default for Told {
    fn default() -> Told {
        let mut agent = Agent::new(Default::default(), [], 1).unwrap();
        assert!(agent.poll_connect(0));
        agent.connected(0, NOW);
        Told { agent, items: BTreeMap::new() }
    }
}

impl Told {
    /// The revision that the host has.
    fn revision(&self) -> Option<u64> {
        Some(self.agent.status(0).revision).filter(|r| *r > 0)
    }

    fn take(&mut self, updates: Vec<v1::Update>) {
        for (n, u) in updates.into_iter().enumerate() {
            assert!(!u.whole || n == 0);
            self.agent.handle(0, v1::ToHost { message: Some(v1::to_host::Message::Update(u)) });
            assert_eq!(self.agent.poll_close(0), None);
        }
        let all = self.agent.snapshot().put.into_iter().map(|i| i.item.unwrap());
        self.items = all.map(|i| (key(&i), i)).collect();
    }
}

fn group(name: &str, ranges: &[&str]) -> v1::Group {
    v1::Group { name: name.into(), ranges: ranges.iter().map(ToString::to_string).collect(), ..Default::default() }
}

fn vrnic(name: &str, group: &str, host: &str, ips: &[&str]) -> v1::Vrnic {
    let ips = ips.iter().map(ToString::to_string).collect();
    v1::Vrnic { name: name.into(), group: group.into(), host: host.into(), ips, ..Default::default() }
}

fn rule(name: &str, from: &str, to: &str) -> v1::Rule {
    v1::Rule { name: name.into(), from: from.into(), to: to.into(), both: true, ..Default::default() }
}

impl World {
    fn new(hosts: &[&str]) -> World {
        let store: BTreeMap<String, Vec<u8>> =
            Centre::found("f").into_iter().filter_map(|w| w.value.map(|v| (w.key, v))).collect();
        let (centre, planner) = Centre::load(1, &records(&store), [7; 32]).unwrap();
        let mut w = World { centre, planner, store, hosts: BTreeMap::new(), admin: Actor::centre(), now: NOW };
        for h in hosts {
            w.apply([v1::Host { name: h.to_string(), ..Default::default() }]).unwrap();
            w.hosts.insert(h.to_string(), Told::default());
        }
        w
    }

    fn keep<T>(&mut self, outcome: Outcome<T>) -> T {
        self.keep_plan(outcome.plan);
        outcome.answer
    }

    fn keep_plan(&mut self, plan: Option<Plan>) {
        let Some(plan) = plan else { return };
        assert_eq!(plan.revision, self.centre.revision() + 1);
        for w in &plan.writes {
            match &w.value {
                Some(v) => drop(self.store.insert(w.key.clone(), v.clone())),
                None => drop(self.store.remove(&w.key)),
            }
        }
        self.centre.commit(&mut self.planner, plan.revision, &plan.writes).unwrap();
        assert!(self.planner.is_ready());
    }

    fn apply_as(&mut self, actor: &Actor, request: v1::ApplyRequest) -> Result<v1::ApplyResponse, Refusal> {
        let before = self.all();
        match self.planner.apply(actor, request, &self.centre, self.now) {
            Ok(done) => {
                if done.plan.is_none() {
                    assert_eq!(self.all(), before);
                }
                Ok(self.keep(done))
            }
            Err(e) => {
                assert_eq!(self.all(), before, "a refusal changes nothing");
                assert!(!e.what.contains('\n') && e.what.len() < 400, "{e}");
                Err(e)
            }
        }
    }

    fn apply<O: Into<Object>>(&mut self, objects: impl IntoIterator<Item = O>) -> Result<v1::ApplyResponse, Refusal> {
        let objects = objects.into_iter().map(|o| v1::Object { object: Some(o.into()), revision: 0 }).collect();
        let admin = self.admin.clone();
        self.apply_as(&admin, v1::ApplyRequest { objects, ..Default::default() })
    }

    fn delete(&mut self, kind: v1::Kind, name: &str, force: bool) -> Result<v1::ApplyResponse, Refusal> {
        let names = vec![v1::Name { kind: kind.into(), name: name.into() }];
        let admin = self.admin.clone();
        let done =
            self.planner.delete(&admin, &v1::DeleteRequest { names, force, dry_run: false }, &self.centre, self.now)?;
        Ok(self.keep(done))
    }

    fn all(&self) -> Vec<v1::Object> {
        self.centre.get(&self.admin, &v1::GetRequest::default(), self.now).unwrap().objects
    }

    fn vrnic(&self, name: &str) -> v1::Vrnic {
        let found = self.all().into_iter().filter_map(|o| o.object);
        found.filter_map(|o| if let Object::Vrnic(v) = o { Some(v) } else { None }).find(|v| v.name == name).unwrap()
    }

    /// Sends all hosts their updates. Returns the number of items that each got.
    fn tell(&mut self) -> BTreeMap<String, usize> {
        let mut counts = BTreeMap::new();
        for (name, told) in &mut self.hosts {
            let updates = self.centre.updates(name, told.revision());
            counts.insert(name.clone(), updates.iter().map(|u| u.put.len() + u.gone.len()).sum());
            told.take(updates);
            let mut whole = Told::default();
            whole.take(self.centre.updates(name, None));
            assert_eq!(told.items, whole.items, "host {name}");
        }
        counts
    }

    fn sees(&self, host: &str) -> Vec<&str> {
        self.hosts[host].items.keys().map(String::as_str).collect()
    }
}

fn records(store: &BTreeMap<String, Vec<u8>>) -> Vec<Write> {
    store.iter().map(|(k, v)| Write { key: k.clone(), value: Some(v.clone()) }).collect()
}

fn refused<T: std::fmt::Debug>(result: Result<T, Refusal>, kind: RefusalKind, what: &str) {
    let e = result.unwrap_err();
    assert!(e.kind == kind && e.what.contains(what), "{:?}: {}", e.kind, e.what);
}

#[test]
fn what_is_missing_is_given_and_kept() {
    let mut w = World::new(&["h1", "h2"]);
    w.apply([group("blue", &["10.0.0.0/16", "fd00::/64"]), group("red", &["10.0.0.0/16"])]).unwrap();
    w.apply([
        vrnic("b", "blue", "h1", &[]),
        vrnic("a", "blue", "h2", &["10.0.0.1"]),
        vrnic("r", "red", "h1", &["10.0.0.1/24"]),
    ])
    .unwrap();
    let (a, b, r) = (w.vrnic("a"), w.vrnic("b"), w.vrnic("r"));
    assert_eq!(
        (a.ips, b.ips.clone(), r.ips),
        (vec!["10.0.0.1/16".into()], vec!["10.0.0.2/16".into(), "fd00::1/64".into()], vec!["10.0.0.1/24".into()])
    );
    assert!(b.mac.len() == 17 && b.guid.len() == 16 && a.mac != b.mac && a.guid != b.guid);
    let again = w.apply([vrnic("b", "blue", "", &[])]).unwrap();
    assert!(again.changes.is_empty(), "{again:?}");
    assert_eq!(w.centre.revision(), again.revision);
    // Addresses are exchanged within one call.
    w.apply([vrnic("b", "blue", "", &["10.0.0.1"]), vrnic("a", "blue", "", &["10.0.0.2"])]).unwrap();
    assert_eq!((w.vrnic("a").ips, w.vrnic("b").mac), (vec!["10.0.0.2/16".to_owned()], b.mac));
    // Stated addresses are taken before the centre chooses others, and a freed address is not reused at once.
    w.apply([vrnic("x", "red", "", &[]), vrnic("y", "red", "", &["10.0.0.2"])]).unwrap();
    assert_eq!(w.vrnic("x").ips, ["10.0.0.3/16"]);
    w.delete(v1::Kind::Vrnic, "x", false).unwrap();
    w.apply([vrnic("z", "red", "", &[])]).unwrap();
    assert_eq!(w.vrnic("z").ips, ["10.0.0.4/16"]);
}

#[test]
fn what_contradicts_itself_is_refused() {
    use RefusalKind::*;
    let mut w = World::new(&["h1"]);
    w.apply([group("blue", &["10.0.0.0/16"]), v1::Group { max_vrnics: Some(1), ..group("red", &["10.0.0.0/29"]) }])
        .unwrap();
    w.apply([vrnic("a", "blue", "h1", &["10.0.0.1"]), vrnic("r", "red", "h1", &["10.0.0.1"])]).unwrap();
    refused(w.apply([vrnic("b", "green", "", &[])]), NotFound, "vRNIC b: there is no group green");
    refused(w.apply([vrnic("b", "blue", "h9", &[])]), NotFound, "there is no host h9");
    refused(
        w.apply([vrnic("b", "blue", "", &["10.1.0.1"])]),
        Invalid,
        "10.1.0.1 is outside the ranges of group blue: 10.0.0.0/16",
    );
    refused(w.apply([vrnic("b", "blue", "", &["10.0.0.1"])]), Conflict, "the address of vRNIC a in group blue already");
    refused(w.apply([vrnic("s", "red", "", &[])]), Full, "group red would have 2 vRNICs, and may have 1 at most");
    refused(
        w.apply([vrnic("s", "red", "", &["10.0.0.2"]), vrnic("r", "red", "", &["10.0.0.3"])]),
        Full,
        "group red would have 2 vRNICs",
    );
    refused(w.apply([vrnic("a", "red", "", &[])]), Conflict, "stays there");
    refused(
        w.apply([v1::Group { vni: Some(1), ..group("g", &[]) }]),
        Conflict,
        "group g: VNI 1 is that of group default already",
    );
    refused(w.apply([group("blue", &["10.1.0.0/16"])]), Conflict, "which is outside its new ranges");
    refused(
        w.apply([v1::Vrnic { mac: "02:00:00:00:00:01".into(), ..vrnic("a", "blue", "", &[]) }]),
        Invalid,
        "given for good",
    );
    refused(w.apply([vrnic("b", "blue", "", &[]), vrnic("b", "blue", "", &[])]), Invalid, "vRNIC b is declared twice");
    refused(w.apply([rule("x", "group:blue", "group:green")]), NotFound, "there is no group green");
    refused(w.apply([rule("x", "group:blue", "group:red")]), Conflict, "both have 10.0.0.1");
    w.apply([rule("x", "group:blue", "group:default"), rule("y", "vrnic:a", "vrnic:a")]).unwrap();
    refused(w.apply([rule("z", "group:red", "group:default")]), Conflict, "group default would see both");
    refused(w.delete(v1::Kind::Vrnic, "a", false), Conflict, "rule y names vRNIC a");
    refused(w.delete(v1::Kind::Group, "blue", false), Conflict, "group blue has 1 vRNICs");
    refused(w.delete(v1::Kind::Host, "h1", false), Conflict, "host h1 has 2 vRNICs");
    refused(w.delete(v1::Kind::Any, "h1", false), Invalid, "of which kind");
    let stale = v1::Object { object: Some(vrnic("a", "blue", "", &[]).into()), revision: 2 };
    let admin = w.admin.clone();
    refused(
        w.apply_as(&admin, v1::ApplyRequest { objects: vec![stale], ..Default::default() }),
        Stale,
        "vRNIC a was changed since",
    );
    w.delete(v1::Kind::Group, "blue", true).unwrap();
    assert!(w.all().iter().all(|o| !matches!(&o.object, Some(Object::Rule(_)))), "the rules went with what they name");
}

#[test]
fn hosts_learn_of_what_they_have_and_no_more() {
    let mut w = World::new(&["h1", "h2", "h3"]);
    w.apply([group("blue", &["10.0.0.0/16"]), group("red", &["10.1.0.0/16"]), group("green", &["10.0.0.0/16"])])
        .unwrap();
    w.apply([
        vrnic("a", "blue", "h1", &[]),
        vrnic("b", "blue", "h2", &[]),
        vrnic("r", "red", "h2", &[]),
        vrnic("s", "red", "h2", &[]),
        vrnic("g", "green", "h3", &[]),
    ])
    .unwrap();
    w.tell();
    assert_eq!(w.sees("h1"), ["group blue", "peer b", "place h2", "vrnic a"]);
    assert_eq!(w.sees("h3"), ["group green", "vrnic g"]);
    w.apply([rule("ab", "vrnic:a", "vrnic:r")]).unwrap();
    let counts = w.tell();
    assert_eq!(w.sees("h1"), ["group blue", "group red", "peer b", "peer r", "place h2", "rule ab", "vrnic a"]);
    assert_eq!(
        w.sees("h2"),
        ["group blue", "group red", "peer a", "place h1", "rule ab", "vrnic b", "vrnic r", "vrnic s"]
    );
    assert_eq!(counts["h3"], 0, "it does not concern h3");
    let request = v1::MoveRequest { vrnic: "a".into(), host: "h3".into() };
    let admin = w.admin.clone();
    let moved = w.planner.move_vrnic(&admin, &request, &w.centre, w.now).unwrap();
    w.keep(moved);
    w.tell();
    assert!(w.sees("h1").is_empty(), "{:?}", w.sees("h1"));
    assert!(w.sees("h3").contains(&"peer r"));
    w.delete(v1::Kind::Rule, "ab", false).unwrap();
    w.tell();
    assert_eq!(w.sees("h3"), ["group blue", "group green", "peer b", "place h2", "vrnic a", "vrnic g"]);
}

#[test]
fn a_host_learns_of_a_group_whose_vrnics_come_and_go_in_one_change() {
    let mut w = World::new(&["h1", "h2"]);
    w.apply([v1::Group { secret: true, ..group("blue", &["10.0.0.0/16"]) }]).unwrap();
    w.apply([vrnic("far", "blue", "h2", &[])]).unwrap();
    w.tell();
    w.apply([vrnic("a", "blue", "h1", &[]), vrnic("b", "blue", "h1", &[])]).unwrap();
    w.tell();
    assert_eq!(w.sees("h1"), ["group blue", "peer far", "place h2", "secret blue  1", "vrnic a", "vrnic b"]);
    let names = ["a", "b"].map(|n| v1::Name { kind: v1::Kind::Vrnic.into(), name: n.into() }).to_vec();
    let request = v1::DeleteRequest { names, ..Default::default() };
    let done = w.planner.delete(&w.admin.clone(), &request, &w.centre, NOW).unwrap();
    w.keep(done);
    w.tell();
    assert!(w.sees("h1").is_empty(), "{:?}", w.sees("h1"));
}

#[test]
fn a_secret_of_two_groups_is_for_hosts_that_have_one_of_them_as_long_as_a_rule_joins_the_two() {
    let mut w = World::new(&["h1", "h2", "h3", "h4"]);
    w.apply([v1::Group { secret: true, ..group("red", &[]) }, group("blue", &["10.1.0.0/16"])]).unwrap();
    w.apply([group("green", &["10.2.0.0/16"])]).unwrap();
    w.apply([vrnic("r", "red", "h1", &[]), vrnic("b", "blue", "h2", &[]), vrnic("g", "green", "h3", &[])]).unwrap();
    w.apply([vrnic("c", "blue", "h4", &[])]).unwrap();
    let secrets = |w: &World, host: &str| -> Vec<String> {
        w.sees(host).into_iter().filter(|k| k.starts_with("secret ")).map(String::from).collect()
    };
    let pair = "secret blue red 1";
    w.tell();
    assert_eq!((secrets(&w, "h1"), secrets(&w, "h2")), (vec!["secret red  1".to_owned()], vec![]));
    // The rule names a single vRNIC of blue. A host that has only other vRNICs of blue needs no secret with red.
    w.apply([rule("x", "group:red", "vrnic:b")]).unwrap();
    w.tell();
    assert_eq!(
        (secrets(&w, "h1"), secrets(&w, "h2")),
        (vec![pair.into(), "secret red  1".into()], vec![pair.to_owned()])
    );
    assert!(secrets(&w, "h3").is_empty() && secrets(&w, "h4").is_empty(), "{:?}", w.sees("h4"));
    let value = |w: &World| match &w.hosts["h1"].items[pair] {
        Item::Secret(s) => s.value.clone(),
        _ => Vec::new(),
    };
    let before = value(&w);
    w.delete(v1::Kind::Rule, "x", false).unwrap();
    w.tell();
    assert_eq!((secrets(&w, "h1"), secrets(&w, "h2")), (vec!["secret red  1".to_owned()], vec![]));
    w.apply([rule("x", "group:red", "group:blue")]).unwrap();
    w.tell();
    assert_eq!((secrets(&w, "h4"), secrets(&w, "h3").len()), (vec![pair.to_owned()], 0));
    assert!(before.len() == 32 && value(&w) != before, "another rule, another secret");
}

#[test]
fn a_secret_is_introduced_in_steps() {
    let mut w = World::new(&["h1", "h2"]);
    w.apply([v1::Group { secret: true, ..group("blue", &[]) }, group("red", &["10.1.0.0/16"])]).unwrap();
    w.apply([vrnic("a", "blue", "h1", &[]), vrnic("b", "blue", "h2", &[]), vrnic("r", "red", "h2", &[])]).unwrap();
    w.apply([rule("x", "group:blue", "group:red")]).unwrap();
    w.tell();
    let sent = |w: &World, host: &str| -> Vec<(String, bool)> {
        let secrets = w.hosts[host]
            .items
            .iter()
            .filter_map(|(k, i)| if let Item::Secret(s) = i { Some((k.clone(), s.send)) } else { None });
        secrets.collect()
    };
    let (one, pair) = (("secret blue  1".to_owned(), true), ("secret blue red 1".to_owned(), true));
    assert_eq!(sent(&w, "h2"), [one.clone(), pair.clone()]);
    let admin = w.admin.clone();
    let done = w.planner.rotate(&admin, "blue", &w.centre, w.now).unwrap();
    assert_eq!(w.keep(done).id, 2);
    w.tell();
    assert_eq!(sent(&w, "h1")[..2], [one, ("secret blue  2".into(), false)]);
    refused(
        w.planner.rotate(&admin, "blue", &w.centre, w.now).map(|o| o.answer),
        RefusalKind::Conflict,
        "introduced already",
    );
    assert_eq!(w.planner.tick(&w.centre, w.now), None, "no host has put it in force");
    let applied = |w: &mut World, hosts: &[&str]| {
        for h in hosts {
            w.centre.applied(h, &v1::Applied { revision: w.centre.revision(), problems: vec![] }, w.now);
        }
        let plan = w.planner.tick(&w.centre, w.now);
        w.keep_plan(plan);
        w.tell();
    };
    applied(&mut w, &["h1"]);
    assert_eq!(sent(&w, "h1").iter().filter(|(_, s)| *s).map(|(k, _)| k.as_str()).next(), Some("secret blue  1"));
    applied(&mut w, &["h1", "h2"]);
    assert_eq!(sent(&w, "h2")[..2], [("secret blue  1".into(), false), ("secret blue  2".into(), true)]);
    // A step waits for an absent host until the deadline, and no longer.
    w.now += STEP_DEADLINE_MS;
    applied(&mut w, &[]);
    assert_eq!(sent(&w, "h2")[..1], [("secret blue  2".into(), true)]);
    w.apply([group("blue", &[])]).unwrap();
    w.tell();
    assert!(sent(&w, "h1").is_empty());
}

fn token(w: &mut World, token: v1::Token) -> String {
    let admin = w.admin.clone();
    let made = w.planner.create_token(&admin, token, [9; 32], &w.centre, w.now).unwrap();
    w.keep(made).secret
}

#[test]
fn a_host_is_not_behind_for_what_does_not_concern_it() {
    let mut w = World::new(&["h1", "h2"]);
    w.apply([group("blue", &[]), group("red", &[])]).unwrap();
    w.apply([vrnic("a", "blue", "h1", &[])]).unwrap();
    w.tell();
    let shown = |w: &World| {
        let q = v1::GetRequest { kind: v1::Kind::Host.into(), name: "h1".into(), ..Default::default() };
        let answer = w.centre.get(&w.admin, &q, w.now).unwrap();
        (answer.hosts[0].applied, answer.revision)
    };
    assert_eq!(shown(&w).0, 0, "it has said nothing yet");
    let revision = w.centre.revision();
    w.centre.applied("h1", &v1::Applied { revision, problems: vec![] }, w.now);
    w.apply([vrnic("b", "red", "h2", &[])]).unwrap();
    assert_eq!(shown(&w), (revision + 1, revision + 1));
    w.apply([vrnic("c", "blue", "h2", &[])]).unwrap();
    assert_eq!(shown(&w), (revision, revision + 2), "it has a peer that it does not know yet");
}

#[test]
fn tokens_reach_as_far_as_their_roles() {
    use RefusalKind::*;
    let mut w = World::new(&["h1"]);
    w.apply([
        v1::Group { limits: Some(v1::Limits { max_qp: Some(10), ..Default::default() }), ..group("blue", &[]) },
        group("red", &["10.1.0.0/16"]),
    ])
    .unwrap();
    w.apply([vrnic("r", "red", "", &[]), vrnic("b", "blue", "", &[])]).unwrap();
    let secret = token(
        &mut w,
        v1::Token {
            id: "t".into(),
            role: v1::Role::Tenant.into(),
            groups: vec!["blue".into()],
            hosts: vec!["h1".into()],
            expires: NOW / 1000 + 60,
            ..Default::default()
        },
    );
    let tenant = w.centre.actor(&secret, w.now).unwrap();
    let one = |o: Object| v1::ApplyRequest {
        objects: vec![v1::Object { object: Some(o), revision: 0 }],
        ..Default::default()
    };
    w.apply_as(&tenant, one(vrnic("c", "blue", "h1", &[]).into())).unwrap();
    refused(
        w.apply_as(&tenant, one(vrnic("d", "red", "", &[]).into())),
        Denied,
        "token t is for group blue, not for red",
    );
    refused(w.apply_as(&tenant, one(group("green", &[]).into())), Denied, "may not change groups");
    refused(w.apply_as(&tenant, one(rule("x", "group:blue", "group:red").into())), Denied, "not for red");
    refused(
        w.apply_as(&tenant, one(v1::Vrnic { allow_spoof: true, ..vrnic("c", "blue", "", &[]) }.into())),
        Denied,
        "allow_spoof",
    );
    let greedy = v1::Limits { max_qp: Some(11), ..Default::default() };
    refused(
        w.apply_as(&tenant, one(v1::Vrnic { limits: Some(greedy), ..vrnic("c", "blue", "", &[]) }.into())),
        Denied,
        "max_qp may be 10 at most",
    );
    let sees = |actor: &Actor| w.centre.get(actor, &v1::GetRequest::default(), w.now).unwrap().objects.len();
    assert_eq!((sees(&tenant), sees(&w.admin)), (3, 7));
    refused(w.centre.audit(&tenant, v1::AuditRequest::default()), Denied, "may not see the audit log");
    refused(
        w.planner
            .move_vrnic(&tenant, &v1::MoveRequest { vrnic: "r".into(), host: "h1".into() }, &w.centre, w.now)
            .map(|o| o.answer),
        NotFound,
        "there is no vRNIC r",
    );
    let prune = v1::ApplyRequest { prune: true, ..Default::default() };
    assert_eq!(w.apply_as(&tenant, prune).unwrap().changes.len(), 2, "b and c, and nothing of others");
    refused(
        w.centre.actor(&secret, w.now + 60_000),
        Unknown,
        "token t expired at 2027-01-15 08:01:00 UTC; the centre's clock says 2027-01-15 08:01:00 UTC",
    );
    refused(w.centre.actor("t.00", w.now), Unknown, "not known");
    refused(w.planner.join(&secret, "h9", &w.centre, w.now).map(|o| o.answer), Denied, "lets no host join");
    let join = token(
        &mut w,
        v1::Token { id: "j".into(), role: v1::Role::Join.into(), host: "h2".into(), ..Default::default() },
    );
    refused(w.centre.actor(&join, w.now), Denied, "lets a host join, and no more");
    refused(
        w.planner.join(&join, "h3", &w.centre, w.now).map(|o| o.answer),
        Denied,
        "token j is for host h2, not for h3",
    );
    let joined = w.planner.join(&join, "h2", &w.centre, w.now).unwrap();
    w.keep(joined);
    refused(w.planner.join(&join, "h2", &w.centre, w.now).map(|o| o.answer), Unknown, "not known");
    let any = token(&mut w, v1::Token { role: v1::Role::Join.into(), ..Default::default() });
    refused(w.planner.join(&any, "h2", &w.centre, w.now).map(|o| o.answer), Conflict, "there is a host h2 already");
    let audit = w.centre.audit(&w.admin, v1::AuditRequest::default()).unwrap().entries;
    assert!(
        audit
            .iter()
            .any(|e| e.who == "t" && e.what[0].starts_with("made vRNIC c: 10.77.0.2/16 in group blue, on host h1")),
        "{audit:?}"
    );
}

#[test]
fn hosts_bring_what_their_administrators_made() {
    use RefusalKind::*;
    let mut w = World::new(&["h1", "h2"]);
    let mut hello = v1::Hello {
        protocol: 1,
        instance: 5,
        addresses: vec!["192.168.7.1".into()],
        vrnics: vec![vrnic("a", "default", "", &[]), vrnic("x", "nowhere", "", &[])],
        ..Default::default()
    };
    assert_eq!(w.centre.hello("h1", &hello, w.now).unwrap().told, None);
    let announced = w.planner.announce("h1", &hello, &w.centre, w.now);
    let refusals = w.keep(announced);
    assert!(refusals.len() == 1 && refusals[0].contains("there is no group nowhere"), "{refusals:?}");
    let a = w.vrnic("a");
    assert!(a.by_host && a.host == "h1" && a.ips == ["10.77.0.1/16"]);
    refused(w.apply([vrnic("a", "default", "h2", &[])]), Denied, "made on host h1 by its administrator");
    refused(
        w.centre.hello("h1", &v1::Hello { instance: 6, ..hello.clone() }, w.now),
        Conflict,
        "another host is connected",
    );
    refused(w.centre.hello("h7", &hello, w.now), Denied, "let it join anew");
    refused(w.centre.hello("h1", &v1::Hello { protocol: 2, ..hello.clone() }, w.now), Invalid, "update the older one");
    let ask = |change| v1::Ask { id: 3, change: Some(change) };
    let put = |v: v1::Vrnic| ask(v1::ask::Change::Put(v));
    let done = w.planner.ask("h2", put(vrnic("c", "default", "", &[])), &w.centre, w.now).unwrap();
    assert_eq!(w.keep(done).vrnic.unwrap().ips, ["10.77.0.2/16"]);
    refused(
        w.planner.ask("h2", put(vrnic("a", "default", "", &[])), &w.centre, w.now).map(|o| o.answer),
        Conflict,
        "the name is not free",
    );
    refused(
        w.planner.ask("h2", ask(v1::ask::Change::Remove("a".into())), &w.centre, w.now).map(|o| o.answer),
        NotFound,
        "no vRNIC a on host h2",
    );
    w.apply([v1::Host { name: "h2".into(), may_add: Some(false), ..Default::default() }]).unwrap();
    refused(
        w.planner.ask("h2", put(vrnic("d", "default", "", &[])), &w.centre, w.now).map(|o| o.answer),
        Denied,
        "may_add = false",
    );
    // The vRNIC cannot be moved while programs use it.
    w.apply([vrnic("m", "default", "h1", &[])]).unwrap();
    w.centre.report(
        "h1",
        v1::Report {
            vrnics: vec![
                v1::VrnicState { name: "m".into(), programs: 2, ..Default::default() },
                v1::VrnicState { name: "c".into(), programs: 9, ..Default::default() },
            ],
            clock_ms: w.now + 7_000,
            pools: Vec::new(),
        },
        w.now,
    );
    let admin = w.admin.clone();
    refused(
        w.planner
            .move_vrnic(&admin, &v1::MoveRequest { vrnic: "m".into(), host: "h2".into() }, &w.centre, w.now)
            .map(|o| o.answer),
        Conflict,
        "2 programs use it on host h1",
    );
    let (_, hosts, vrnics) = w.centre.states_since(&admin, 0, w.now);
    assert!(
        vrnics.len() == 1 && hosts.iter().any(|h| h.name == "h1" && h.connected && h.clock_ms == 7_000),
        "{hosts:?} {vrnics:?}"
    );
    // A vRNIC that the host has received and does not announce any more is removed. One that it has not received yet
    // stays, as if the centre that made it had died before it told the host.
    let heard = w.centre.revision();
    let done = w.planner.ask("h1", put(vrnic("late", "default", "", &[])), &w.centre, w.now).unwrap();
    w.keep(done);
    hello.vrnics.clear();
    w.centre.goodbye("h1", 5, w.now);
    for (revision, left) in [(0, ["a", "late"].as_slice()), (heard, &["late"]), (heard + 9, &[])] {
        let announced = w.planner.announce("h1", &v1::Hello { revision, ..hello.clone() }, &w.centre, w.now);
        w.keep(announced);
        let all = w.all();
        let has = |name: &&&str| all.iter().any(|o| matches!(&o.object, Some(Object::Vrnic(v)) if v.name == **name));
        assert_eq!(["a", "late"].iter().filter(has).copied().collect::<Vec<_>>(), left, "revision {revision}");
    }
}

#[test]
fn vlans_and_ways_are_declared_and_told_to_hosts() {
    use RefusalKind::*;
    let mut w = World::new(&["h1"]);
    let with = |name: &str, vlan| v1::Group { vlan, ..group(name, &["10.0.0.0/16"]) };
    let asks =
        |way: v1::Way| v1::Vrnic { way: way.into(), instance: "pod".into(), ..vrnic("a", "blue", "h1", &["10.0.0.1"]) };
    w.apply([with("blue", Some(100)), with("red", None)]).unwrap();
    w.apply([asks(v1::Way::Vf)]).unwrap();
    w.tell();
    let told = |w: &World, group: &str| match &w.hosts["h1"].items[group] {
        Item::Group(g) => g.vlan,
        other => panic!("{other:?}"),
    };
    assert_eq!(told(&w, "group blue"), 100);
    let Item::Vrnic(a) = &w.hosts["h1"].items["vrnic a"] else { panic!("no vRNIC") };
    assert_eq!((a.way(), a.instance.as_str()), (v1::Way::Vf, "pod"));
    // A VLAN is one group's, and free again when the group has another one, or is deleted.
    refused(w.apply([with("red", Some(100))]), Conflict, "group red: VLAN 100 is that of group blue already");
    w.apply([with("blue", Some(101)), with("red", Some(100))]).unwrap();
    w.tell();
    assert_eq!(told(&w, "group blue"), 101);
    refused(w.apply([with("blue", Some(100))]), Conflict, "VLAN 100 is that of group red already");
    w.delete(v1::Kind::Group, "red", false).unwrap();
    w.apply([with("blue", None)]).unwrap();
    w.apply([with("green", Some(101)), with("blue", Some(100))]).unwrap();
    // A VF does not encrypt.
    let sealed = |name: &str| v1::Group { secret: true, ..group(name, &["10.0.0.0/16"]) };
    refused(w.apply([sealed("blue")]), Conflict, "its vRNIC a has the way VF");
    w.apply([asks(v1::Way::Auto)]).unwrap();
    w.apply([sealed("blue")]).unwrap();
    refused(w.apply([asks(v1::Way::Vf)]), Conflict, "vRNIC a: group blue has a secret");
    // A tenant takes VFs only where an administrator has given the group a VLAN, and keeps a way that it was given.
    let of_blue = v1::Token {
        id: "t".into(),
        role: v1::Role::Tenant.into(),
        groups: vec!["blue".into()],
        expires: NOW / 1000 + 60,
        ..Default::default()
    };
    let secret = token(&mut w, of_blue);
    let tenant = w.centre.actor(&secret, w.now).unwrap();
    let one = |v: v1::Vrnic| v1::ApplyRequest {
        objects: vec![v1::Object { object: Some(v.into()), revision: 0 }],
        ..Default::default()
    };
    let second = v1::Vrnic { way: v1::Way::Auto.into(), ..vrnic("b", "blue", "", &[]) };
    refused(w.apply_as(&tenant, one(second.clone())), Denied, "group blue has no VLAN");
    w.apply_as(&tenant, one(v1::Vrnic { instance: "x".into(), ..asks(v1::Way::Auto) })).unwrap();
    w.apply([with("blue", Some(100))]).unwrap();
    w.apply_as(&tenant, one(second)).unwrap();
}

#[test]
fn ways_and_pools_are_reported_without_what_a_host_should_not_say() {
    let mut w = World::new(&["h1"]);
    w.apply([vrnic("a", "default", "h1", &[])]).unwrap();
    w.centre.hello("h1", &v1::Hello { protocol: 1, instance: 5, ..Default::default() }, w.now).unwrap();
    let long = "x\n".repeat(1_000);
    let pool = v1::Pool { pf: long.clone(), vfs: 8, ready: 3, leased: 5 };
    let state = v1::VrnicState {
        name: "a".into(),
        way: 77,
        why: long.clone(),
        vf: long.clone(),
        real_gid: long,
        ..Default::default()
    };
    w.centre.report("h1", v1::Report { vrnics: vec![state], clock_ms: w.now, pools: vec![pool; 1_000] }, w.now);
    let (_, hosts, vrnics) = w.centre.states_since(&w.admin, 0, w.now);
    let x = |n| "x".repeat(n);
    assert_eq!((hosts[0].pools.len(), &hosts[0].pools[0]), (64, &v1::Pool { pf: x(32), vfs: 8, ready: 3, leased: 5 }));
    let a = &vrnics[0];
    assert_eq!((a.way, &a.why, &a.vf, &a.real_gid), (0, &x(300), &x(64), &x(64)));
}

#[test]
fn rates_follow_from_two_reports_and_end_with_the_traffic() {
    let mut w = World::new(&["h1"]);
    w.apply([vrnic("a", "default", "h1", &[]), vrnic("b", "default", "h1", &[])]).unwrap();
    w.centre.hello("h1", &v1::Hello { protocol: 1, instance: 5, ..Default::default() }, w.now).unwrap();
    let admin = w.admin.clone();
    let connection = |peer: &str, sent_bytes| v1::Connection {
        address: peer.into(),
        peer: peer.into(),
        qps: 1,
        sent_bytes,
        // Rates in the host's report are ignored.
        sent_rate: 77,
        ..Default::default()
    };
    let state = |sent_bytes, connections| v1::VrnicState {
        name: "a".into(),
        sent_bytes,
        errors: sent_bytes / 1_000,
        sent_rate: 77,
        connections,
        ..Default::default()
    };
    let report = |w: &mut World, vrnics: Vec<v1::VrnicState>| {
        w.now += 5_000;
        w.centre.report("h1", v1::Report { vrnics, clock_ms: w.now, pools: Vec::new() }, w.now);
    };
    let mut told = 0;
    let mut news = |w: &World| {
        let (now, _, vrnics) = w.centre.states_since(&admin, told, w.now);
        told = now;
        let of = |v: std::sync::Arc<v1::VrnicState>| {
            (v.sent_rate, v.error_rate, v.connections.iter().map(|c| c.sent_rate).collect())
        };
        vrnics.into_iter().map(of).collect::<Vec<(u64, u64, Vec<u64>)>>()
    };
    report(&mut w, vec![state(50_000, vec![connection("p", 50_000)])]);
    assert_eq!(news(&w), [(0, 0, vec![0])], "one report says nothing of time");
    report(&mut w, vec![state(80_000, vec![connection("p", 70_000), connection("q", 10_000)])]);
    assert_eq!(news(&w), [(6_000, 6, vec![4_000, 2_000])]);
    // All queue pairs of q are closed, and some of p's.
    report(&mut w, vec![state(90_000, vec![connection("p", 40_000)])]);
    assert_eq!(news(&w), [(2_000, 2, vec![0])]);
    // A restarted worker counts from 0.
    report(&mut w, vec![state(5_000, Vec::new())]);
    assert_eq!(news(&w), [(1_000, 1, vec![])]);
    // A vRNIC that is not reported has not changed: its rates become 0, which is reported once.
    report(&mut w, Vec::new());
    assert_eq!(news(&w), [(0, 0, vec![])]);
    report(&mut w, Vec::new());
    assert!(news(&w).is_empty());
    report(&mut w, vec![state(10_000, Vec::new())]);
    assert_eq!(news(&w), [(1_000, 1, vec![])], "by the time since the last report, in which it did nothing");
    w.centre.goodbye("h1", 5, w.now);
    assert_eq!(news(&w), [(0, 0, vec![])], "nothing is known of a host that is away");
    // A clock that goes backwards, and the largest numbers, are harmless.
    w.now -= 60_000;
    report(&mut w, vec![state(u64::MAX, vec![connection("p", u64::MAX)])]);
    w.now -= 60_000;
    report(&mut w, vec![state(0, vec![connection("p", 0)])]);
    report(&mut w, vec![state(u64::MAX, vec![connection("p", u64::MAX)])]);
    assert_eq!(news(&w), [(u64::MAX / 5, u64::MAX / 1_000 / 5, vec![u64::MAX / 5])]);
}

#[test]
fn a_host_that_was_away_a_moment_gets_what_it_lacks_and_one_of_another_past_gets_all() {
    let mut w = World::new(&["h1"]);
    w.apply([vrnic("a", "default", "h1", &[])]).unwrap();
    let backup = (w.centre.revision(), records(&w.store));
    let hello = |revision| v1::Hello { protocol: 1, revision, fleet: "f".into(), ..Default::default() };
    let begun = w.centre.hello("h1", &hello(0), w.now).unwrap().told;
    assert_eq!(begun, None);
    w.centre.told("h1", w.centre.revision());
    let told = w.centre.revision();
    w.apply([vrnic("b", "default", "h1", &[])]).unwrap();
    assert_eq!(w.centre.hello("h1", &hello(told), w.now).unwrap().told, Some(told));
    let lacks = w.centre.updates("h1", Some(told));
    assert!(
        lacks.len() == 1 && !lacks[0].whole && lacks[0].put.iter().any(|i| key(i.item.as_ref().unwrap()) == "vrnic b"),
        "{lacks:?}"
    );
    assert_eq!(w.centre.updates("h1", Some(w.centre.revision())), []);
    assert!(w.centre.updates("h1", Some(told + 99))[0].whole);
    // The backup does not contain b, and the centre uses the same revision for another change.
    let later = w.centre.revision();
    (w.centre, w.planner) = Centre::load(backup.0, &backup.1, [1; 32]).unwrap();
    w.store = backup.1.into_iter().map(|r| (r.key, r.value.unwrap())).collect();
    w.apply([vrnic("c", "default", "h1", &[])]).unwrap();
    assert_eq!(w.centre.revision(), later);
    assert_eq!(w.centre.hello("h1", &hello(later), w.now).unwrap().told, None);
}

#[test]
fn what_does_not_concern_a_host_is_in_force_there_at_once() {
    let mut w = World::new(&["h1", "h2"]);
    w.apply([vrnic("a", "default", "h1", &[])]).unwrap();
    let applied = |w: &World| w.centre.get(&w.admin, &host_question("h1"), w.now).unwrap().hosts[0].applied;
    let hello = v1::Hello { protocol: 1, fleet: "f".into(), ..Default::default() };
    w.centre.hello("h1", &hello, w.now).unwrap();
    let first = w.centre.revision();
    w.centre.told("h1", first);
    assert_eq!(applied(&w), 0);
    // The host has not yet reported the first revision when a change comes that does not concern it.
    w.apply([group("red", &[])]).unwrap();
    assert_eq!(w.centre.updates("h1", Some(first)), []);
    w.centre.told("h1", w.centre.revision());
    assert_eq!(applied(&w), 0);
    w.centre.applied("h1", &v1::Applied { revision: first, ..Default::default() }, w.now);
    assert_eq!(applied(&w), w.centre.revision());
    // Then earlier changes are no longer remembered for the host.
    assert!(w.centre.updates("h1", Some(first - 1))[0].whole && w.centre.updates("h1", Some(first)).is_empty());
    // A change that concerns the host is in force only when the host has reported it.
    w.apply([vrnic("b", "default", "h1", &[])]).unwrap();
    assert_eq!(applied(&w), first);
    w.centre.told("h1", w.centre.revision());
    assert_eq!(applied(&w), first);
    // An update that was sent on an ended connection may not have arrived.
    w.centre.hello("h1", &v1::Hello { revision: first, ..hello }, w.now).unwrap();
    assert_eq!(applied(&w), first);
}

#[test]
fn what_a_host_loses_with_a_group_is_not_told_one_by_one() {
    let mut w = World::new(&["h1", "h2", "h3"]);
    w.apply([group("blue", &["10.0.0.0/16"]), group("red", &[])]).unwrap();
    w.apply((0..1_000).map(|n| vrnic(&format!("v{n}"), "blue", ["h2", "h3"][n % 2], &[]))).unwrap();
    w.apply([vrnic("a", "blue", "h1", &[]), vrnic("r", "red", "h1", &[]), vrnic("s", "red", "h3", &[])]).unwrap();
    w.tell();
    assert_eq!(w.sees("h1").len(), 2 + 2 + 2 + 1_001, "groups, vRNICs, places, peers");
    let told = w.hosts["h1"].revision();
    w.apply([vrnic("a", "blue", "h2", &[])]).unwrap();
    let news = w.centre.updates("h1", told);
    assert!(news.len() == 1 && !news[0].whole && news[0].put.is_empty() && news[0].gone.len() <= 3, "{news:?}");
    // The same in several steps. In one of them, a vRNIC is removed from a group that stays, and made again in a group
    // that goes.
    w.tell();
    assert_eq!(w.sees("h1"), ["group red", "peer s", "place h3", "vrnic r"]);
    w.apply([vrnic("a", "blue", "h1", &[])]).unwrap();
    w.tell();
    w.delete(v1::Kind::Vrnic, "s", true).unwrap();
    w.apply([vrnic("s", "blue", "h3", &[])]).unwrap();
    w.apply([vrnic("a", "blue", "h2", &[])]).unwrap();
    w.tell();
    assert_eq!(w.sees("h1"), ["group red", "vrnic r"]);
}

#[test]
fn a_host_that_more_concerns_than_is_remembered_is_told_everything() {
    let mut w = World::new(&["h1", "h2", "h3"]);
    w.apply([group("blue", &["10.0.0.0/16"]), group("red", &[])]).unwrap();
    w.apply([vrnic("a", "blue", "h1", &[]), vrnic("r", "red", "h3", &[])]).unwrap();
    w.tell();
    let before = w.centre.revision();
    let many = (0..3_000).map(|n| vrnic(&format!("v{n}"), "blue", "h2", &[]));
    w.apply(many).unwrap();
    assert!(w.centre.updates("h1", Some(before))[0].whole);
    assert_eq!(w.centre.updates("h3", Some(before)), []);
    w.tell();
    // Afterwards the host gets single changes again. A vRNIC on no host concerns nobody.
    let told = w.centre.revision();
    w.apply([vrnic("aside", "blue", "", &[])]).unwrap();
    assert_eq!(w.centre.updates("h1", Some(told)), []);
    w.apply([vrnic("b", "blue", "h2", &[])]).unwrap();
    let news = w.centre.updates("h1", Some(told));
    assert!(news.len() == 1 && !news[0].whole && news[0].put.len() + news[0].gone.len() <= 2, "{news:?}");
    w.tell();
}

fn host_question(name: &str) -> v1::GetRequest {
    v1::GetRequest { kind: v1::Kind::Host.into(), name: name.into(), ..Default::default() }
}

#[test]
fn a_change_among_many_costs_what_it_touches() {
    let mut w = World::new(&["h0", "h1", "h2", "h3"]);
    let groups: Vec<v1::Group> = (0..200).map(|n| group(&format!("g{n}"), &["10.0.0.0/8"])).collect();
    w.apply(groups).unwrap();
    for part in 0..20 {
        let all = (0..1_000)
            .map(|n| part * 1_000 + n)
            .map(|n| vrnic(&format!("v{n}"), &format!("g{}", n % 200), &format!("h{}", n % 4), &[]));
        let objects = all.map(|v| v1::Object { object: Some(v.into()), revision: 0 }).collect();
        let admin = w.admin.clone();
        let done =
            w.planner.apply(&admin, v1::ApplyRequest { objects, ..Default::default() }, &w.centre, w.now).unwrap();
        w.keep(done);
    }
    w.tell();
    let admin = w.admin.clone();
    let moved = w
        .planner
        .move_vrnic(&admin, &v1::MoveRequest { vrnic: "v4".into(), host: "h3".into() }, &w.centre, w.now)
        .unwrap();
    assert!(moved.plan.as_ref().is_some_and(|p| p.writes.len() == 2), "the vRNIC and the audit log");
    w.keep(moved);
    // Group g4 is only on h0, with 100 vRNICs, so h3 gets 99 peers. No other host gets anything.
    let told = w.tell();
    assert!(told["h1"] == 0 && told["h2"] == 0 && told["h0"] <= 5 && (100..110).contains(&told["h3"]), "{told:?}");
}

#[derive(Clone, Debug)]
enum Op {
    Group { n: u8, secret: bool, weight: u32, vni: Option<u32>, vlan: Option<u32> },
    Vrnic { n: u8, group: u8, host: u8, ip: Option<u8>, rate: u64 },
    Rule { n: u8, from: (bool, u8), to: (bool, u8), deny: bool },
    Delete { kind: u8, n: u8, force: bool },
    Move { n: u8, host: u8 },
    Ask { host: u8, n: u8, group: u8 },
    Rotate { group: u8 },
    Pass { applied: bool },
    Tell,
}

fn op() -> impl Strategy<Value = Op> {
    let end = || (any::<bool>(), 0u8..6);
    prop_oneof![
        1 => (0u8..4, any::<bool>(), 1u32..5, proptest::option::of(1u32..6), proptest::option::of(1u32..6)).prop_map(|(n, secret, weight, vni, vlan)| Op::Group { n, secret, weight, vni, vlan }),
        4 => (0u8..8, 0u8..4, 0u8..4, proptest::option::of(1u8..9), 0u64..3).prop_map(|(n, group, host, ip, rate)| Op::Vrnic { n, group, host, ip, rate }),
        3 => (0u8..4, end(), end(), any::<bool>()).prop_map(|(n, from, to, deny)| Op::Rule { n, from, to, deny }),
        1 => (0u8..4, 0u8..8, any::<bool>()).prop_map(|(kind, n, force)| Op::Delete { kind, n, force }),
        2 => (0u8..8, 0u8..3).prop_map(|(n, host)| Op::Move { n, host }),
        1 => (0u8..3, 0u8..8, 0u8..4).prop_map(|(host, n, group)| Op::Ask { host, n, group }),
        1 => (0u8..4).prop_map(|group| Op::Rotate { group }),
        1 => any::<bool>().prop_map(|applied| Op::Pass { applied }),
        2 => Just(Op::Tell),
    ]
}

impl World {
    fn run(&mut self, op: Op) {
        let admin = self.admin.clone();
        let end = |(group, n): (bool, u8)| if group { format!("group:g{}", n % 4) } else { format!("vrnic:v{n}") };
        match op {
            Op::Group { n, secret, weight, vni, vlan } => {
                let _ = self.apply([v1::Group {
                    secret,
                    weight: Some(weight),
                    vni,
                    vlan,
                    ..group(&format!("g{n}"), &["10.0.0.0/28"])
                }]);
            }
            Op::Vrnic { n, group, host, ip, rate } => {
                let host = if host < 3 { format!("h{host}") } else { String::new() };
                let ip: Vec<String> = ip.iter().map(|i| format!("10.0.0.{i}")).collect();
                let ips: Vec<&str> = ip.iter().map(String::as_str).collect();
                let share = Some(v1::Share { rate: Some(rate), ..Default::default() });
                let _ = self.apply([v1::Vrnic { share, ..vrnic(&format!("v{n}"), &format!("g{group}"), &host, &ips) }]);
            }
            Op::Rule { n, from, to, deny } => {
                let action = if deny { v1::rule::Action::Deny } else { v1::rule::Action::Allow };
                let _ =
                    self.apply([v1::Rule { action: action.into(), ..rule(&format!("r{n}"), &end(from), &end(to)) }]);
            }
            Op::Delete { kind, n, force } => {
                let (kind, word) =
                    [(v1::Kind::Group, "g"), (v1::Kind::Vrnic, "v"), (v1::Kind::Rule, "r"), (v1::Kind::Vrnic, "v")]
                        [kind as usize];
                let _ = self.delete(kind, &format!("{word}{n}"), force);
            }
            Op::Move { n, host } => {
                let request = v1::MoveRequest { vrnic: format!("v{n}"), host: format!("h{host}") };
                if let Ok(done) = self.planner.move_vrnic(&admin, &request, &self.centre, self.now) {
                    self.keep(done);
                }
            }
            Op::Ask { host, n, group } => {
                let put = v1::ask::Change::Put(vrnic(&format!("v{n}"), &format!("g{group}"), "", &[]));
                if let Ok(done) =
                    self.planner.ask(&format!("h{host}"), v1::Ask { id: 1, change: Some(put) }, &self.centre, self.now)
                {
                    self.keep(done);
                }
            }
            Op::Rotate { group } => {
                if let Ok(done) = self.planner.rotate(&admin, &format!("g{group}"), &self.centre, self.now) {
                    self.keep(done);
                }
            }
            Op::Pass { applied } => {
                self.now += 1_000;
                for host in ["h0", "h1", "h2"].into_iter().filter(|_| applied) {
                    self.centre.applied(
                        host,
                        &v1::Applied { revision: self.centre.revision(), ..Default::default() },
                        self.now,
                    );
                }
                let plan = self.planner.tick(&self.centre, self.now);
                self.keep_plan(plan);
            }
            Op::Tell => drop(self.tell()),
        }
    }

    /// Exactly the groups with `secret`, and the pairs with such a group that rules join, have secrets.
    fn check_secrets(&self) {
        let objects: Vec<Object> = self.all().into_iter().filter_map(|o| o.object).collect();
        let of = |end: &str| match end.split_once(':').unwrap() {
            ("group", g) => g.to_owned(),
            (_, v) => self.vrnic(v).group,
        };
        let secret = |name: &str| objects.iter().any(|o| matches!(o, Object::Group(g) if g.name == name && g.secret));
        let wanted = objects.iter().filter_map(|o| match o {
            Object::Group(g) if g.secret => Some((g.name.clone(), String::new())),
            Object::Rule(r) if r.action() == v1::rule::Action::Allow => {
                let (a, b) = (of(&r.from), of(&r.to));
                (a != b && (secret(&a) || secret(&b))).then(|| (a.clone().min(b.clone()), a.max(b)))
            }
            _ => None,
        });
        let kept = self.store.keys().filter_map(|k| k.strip_prefix("secret/")).map(|k| {
            let mut parts = k.split('/').map(str::to_owned);
            (parts.next().unwrap(), parts.next().unwrap())
        });
        assert_eq!(kept.collect::<BTreeSet<_>>(), wanted.collect());
    }

    /// No group sees two vRNICs of different groups at one address.
    fn check_addresses(&self) {
        let objects: Vec<Object> = self.all().into_iter().filter_map(|o| o.object).collect();
        let vrnics = || objects.iter().filter_map(|o| if let Object::Vrnic(v) = o { Some(v) } else { None });
        let at = |end: &str| match end.split_once(':').unwrap() {
            ("group", g) => (g.to_owned(), vrnics().filter(|v| v.group == g).collect::<Vec<_>>()),
            (_, name) => (self.vrnic(name).group, vrnics().filter(|v| v.name == name).collect()),
        };
        let mut seen: BTreeMap<(String, String), BTreeSet<String>> = BTreeMap::new();
        let mut see = |viewer: &str, vrnics: &[&v1::Vrnic]| {
            for (v, ip) in vrnics.iter().flat_map(|v| v.ips.iter().map(move |ip| (v, ip))) {
                let address = ip.split('/').next().unwrap().to_owned();
                seen.entry((viewer.into(), address)).or_default().insert(v.group.clone());
            }
        };
        for v in vrnics() {
            see(&v.group, &[v]);
        }
        for o in &objects {
            if let Object::Rule(r) = o
                && r.action() == v1::rule::Action::Allow
            {
                let ((a, from), (b, to)) = (at(&r.from), at(&r.to));
                if a != b {
                    see(&a, &to);
                    see(&b, &from);
                }
            }
        }
        assert!(seen.values().all(|groups| groups.len() == 1), "{seen:?}");
    }

    fn check(&self) {
        self.check_secrets();
        self.check_addresses();
        let (mut addresses, mut ids, mut vnis, mut vlans) =
            (BTreeSet::new(), BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
        for o in self.all().into_iter().filter_map(|o| o.object) {
            match o {
                Object::Vrnic(v) => {
                    assert!(!v.ips.is_empty());
                    assert!(
                        v.ips
                            .iter()
                            .all(|ip| addresses.insert((v.group.clone(), ip.split('/').next().unwrap().to_owned())))
                    );
                    assert!(ids.insert(v.mac) && ids.insert(v.guid));
                }
                Object::Group(g) => assert!(vnis.insert(g.vni.unwrap()) && g.vlan.is_none_or(|v| vlans.insert(v))),
                _ => {}
            }
        }
        for told in self.hosts.values() {
            // One group of a host never sees two vRNICs at one address.
            let secrets = told.items.values().filter_map(|i| if let Item::Secret(s) = i { Some(s) } else { None });
            let mut sent = BTreeMap::<(String, String), usize>::new();
            for s in secrets {
                let k = s.key.clone().unwrap();
                *sent.entry((k.group, k.other)).or_default() += usize::from(s.send);
            }
            assert!(sent.values().all(|n| *n == 1), "each secret has one number that is sent: {sent:?}");
        }
        let (again, _) = Centre::load(self.centre.revision(), &records(&self.store), [0; 32]).unwrap();
        for host in self.hosts.keys() {
            let (mut one, mut two) = (Told::default(), Told::default());
            one.take(self.centre.updates(host, None));
            two.take(again.updates(host, None));
            assert_eq!(one.items, two.items, "what the store has is what is told");
        }
        assert_eq!(again.get(&self.admin, &v1::GetRequest::default(), 0).unwrap().objects, self.all());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]
    #[test]
    fn whatever_is_asked_for_nothing_is_given_twice_and_deltas_are_the_whole(ops in proptest::collection::vec(op(), 1..60)) {
        let mut w = World::new(&["h0", "h1", "h2"]);
        for op in ops {
            w.run(op);
        }
        w.tell();
        w.check();
    }
}
