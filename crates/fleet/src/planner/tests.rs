//! Costs of changes, counted in looked-up items, and tests of limits.

use super::*;
use crate::centre::Centre;
use crate::error::Kind as Reason;
use crate::model::{RULES, VRNICS};

const NOW: u64 = 1_800_000_000_000;

struct World {
    centre: Centre,
    planner: Planner,
    tokens: u8,
}

fn object(o: impl Into<Object>) -> v1::Object {
    v1::Object { object: Some(o.into()), revision: 0 }
}

fn group(name: &str, range: &str) -> v1::Object {
    object(v1::Group { name: name.into(), ranges: vec![range.into()], ..Default::default() })
}

fn vrnic(name: &str, group: &str, host: &str) -> v1::Object {
    object(v1::Vrnic { name: name.into(), group: group.into(), host: host.into(), ..Default::default() })
}

fn rule(name: &str, from: &str, to: &str) -> v1::Object {
    object(v1::Rule { name: name.into(), from: from.into(), to: to.into(), ..Default::default() })
}

fn host(name: &str) -> v1::Object {
    object(v1::Host { name: name.into(), ..Default::default() })
}

impl World {
    fn new() -> World {
        let (centre, planner) = Centre::load(1, &Centre::found("f"), [7; 32]).unwrap();
        let mut w = World { centre, planner, tokens: 0 };
        let objects = ["h0", "h1", "h2"].map(host).into_iter();
        let groups = [group("blue", "10.0.0.0/8"), group("red", "11.0.0.0/8")];
        w.apply(&Actor::centre(), objects.chain(groups)).unwrap();
        w
    }

    fn plan(&mut self, actor: &Actor, objects: impl IntoIterator<Item = v1::Object>) -> Result<Option<Plan>, Refusal> {
        let request = v1::ApplyRequest { objects: objects.into_iter().collect(), ..Default::default() };
        self.planner.apply(actor, request, &self.centre, NOW).map(|o| o.plan)
    }

    /// Puts objects. Returns the keys that hosts are told.
    fn apply(
        &mut self,
        actor: &Actor,
        objects: impl IntoIterator<Item = v1::Object>,
    ) -> Result<BTreeMap<Name, Vec<Arc<Keys>>>, Refusal> {
        let plan = self.plan(actor, objects)?;
        Ok(plan.map(|p| self.keep(&p)).unwrap_or_default())
    }

    fn keep(&mut self, plan: &Plan) -> BTreeMap<Name, Vec<Arc<Keys>>> {
        let news = self.planner.commit(plan.revision, &plan.writes).unwrap();
        let hosts = news.hosts.clone();
        self.centre.publish(&mut self.planner, news);
        hosts
    }

    fn tenant(&mut self, groups: &[&str], hosts: &[&str]) -> Actor {
        self.tokens += 1;
        let list = |names: &[&str]| names.iter().map(ToString::to_string).collect();
        let token =
            v1::Token { role: v1::Role::Tenant.into(), groups: list(groups), hosts: list(hosts), ..Default::default() };
        let random = [self.tokens; 32];
        let made = self.planner.create_token(&Actor::centre(), token, random, &self.centre, NOW).unwrap();
        self.keep(&made.plan.unwrap());
        self.centre.actor(&made.answer.secret, NOW).unwrap()
    }

    /// The number of groups and addresses compared for these objects.
    fn work(&mut self, objects: impl IntoIterator<Item = v1::Object>) -> u64 {
        let (mut draft, _) = self.planner.draft(&self.centre);
        let asked = objects.into_iter().map(|o| (o.object.unwrap(), 0)).collect();
        draft.declare(&Actor::centre(), asked, false).unwrap();
        draft.work
    }
}

#[test]
fn a_vrnic_costs_the_same_however_many_rules_there_are() {
    let mut w = World::new();
    let admin = Actor::centre();
    let new = || (0..200).map(|n| vrnic(&format!("new{n}"), "blue", "h0"));
    let alone = w.work(new());
    let within = (0..3_000).map(|n| rule(&format!("w{n}"), "group:blue", "group:blue"));
    w.apply(&admin, within).unwrap();
    assert_eq!(w.work(new()), alone);
    // All rules between the same two groups count once, whichever vRNICs they name.
    w.apply(&admin, (0..500).map(|n| vrnic(&format!("r{n}"), "red", "h1"))).unwrap();
    w.apply(&admin, (0..500).map(|n| rule(&format!("j{n}"), "group:blue", &format!("vrnic:r{n}")))).unwrap();
    w.apply(&admin, (0..500).map(|n| rule(&format!("k{n}"), "group:blue", "group:red"))).unwrap();
    let joined = w.work(new());
    assert!(joined <= alone + 200 * 4, "{joined} after {alone}");
    // A rule between ends that are joined already needs no comparison.
    assert_eq!(w.work([rule("again", "group:blue", "group:red")]), 0);
}

#[test]
fn a_change_of_many_vrnics_on_many_hosts_costs_their_sum() {
    let mut w = World::new();
    let admin = Actor::centre();
    w.apply(&admin, (0..300).map(|n| host(&format!("x{n}")))).unwrap();
    w.apply(&admin, (0..300).map(|n| vrnic(&format!("at{n}"), "blue", &format!("x{n}")))).unwrap();
    w.apply(&admin, (0..1_000).map(|n| rule(&format!("w{n}"), "group:blue", "group:blue"))).unwrap();
    let told = w.apply(&admin, (0..600).map(|n| vrnic(&format!("v{n}"), "blue", &format!("x{}", n % 300)))).unwrap();
    assert_eq!(told.len(), 300);
    let batches: BTreeMap<*const Keys, usize> = told.values().flatten().map(|b| (Arc::as_ptr(b), b.len())).collect();
    let (keys, shared) = (batches.values().sum::<usize>(), told.values().flatten().count());
    assert!(keys <= 600 * 5 && shared <= 300 * 2, "{keys} keys, {shared} times told of");
    let read = |w: &World| w.centre.updates("x7", Some(w.centre.revision() - 1));
    let items: usize = read(&w).iter().map(|u| u.put.len()).sum();
    assert!((600..=600 + 300).contains(&items), "{items}");
    // If a change has more keys than are remembered, no host keeps all of them.
    let told = w.apply(&admin, (0..5_000).map(|n| vrnic(&format!("y{n}"), "blue", "x0"))).unwrap();
    assert!(told.values().flatten().all(|b| b.len() <= MAX_LOG + 1));
    assert!(w.centre.lacks_all("x7", Some(w.centre.revision() - 1)));
}

#[test]
fn a_tenants_questions_walk_over_its_own_groups() {
    let mut w = World::new();
    let admin = Actor::centre();
    w.apply(&admin, (0..50).map(|n| vrnic(&format!("r{n}"), "red", "h1"))).unwrap();
    w.apply(&admin, [vrnic("b", "blue", "h0"), vrnic("z", "blue", "h0"), vrnic("m", "default", "h1")]).unwrap();
    w.apply(&admin, [rule("in", "vrnic:b", "group:blue"), rule("across", "group:blue", "group:red")]).unwrap();
    let tenant = w.tenant(&["blue", "default"], &[]);
    let names = |w: &World, q: v1::GetRequest| -> Vec<String> {
        let found = w.centre.get(&tenant, &q, NOW).unwrap().objects;
        found.into_iter().map(|o| o.object.unwrap().name().to_owned()).collect()
    };
    let of = |kind: v1::Kind| v1::GetRequest { kind: kind.into(), ..Default::default() };
    assert_eq!(names(&w, v1::GetRequest::default()), ["blue", "default", "b", "m", "z", "in"]);
    assert_eq!(names(&w, v1::GetRequest { after: "b".into(), limit: 1, ..of(v1::Kind::Vrnic) }), ["m"]);
    assert_eq!(names(&w, v1::GetRequest { host: "h1".into(), ..of(v1::Kind::Vrnic) }), ["m"]);
    assert_eq!(names(&w, v1::GetRequest { group: "red".into(), ..Default::default() }), [""; 0]);
    assert_eq!(names(&w, v1::GetRequest { group: "blue".into(), ..Default::default() }), ["blue", "b", "z"]);
    let s = w.centre.status(&tenant, NOW);
    assert_eq!((s.groups, s.vrnics, s.rules, s.hosts), (2, 3, 1, 0));
}

#[test]
fn what_a_tenant_does_not_see_and_what_does_not_exist_are_said_in_the_same_words() {
    let mut w = World::new();
    let admin = Actor::centre();
    w.apply(&admin, [vrnic("mine", "blue", "h0"), vrnic("secret", "red", "h1")]).unwrap();
    w.apply(&admin, [rule("theirs", "group:red", "group:red"), rule("across", "vrnic:mine", "vrnic:secret")]).unwrap();
    let tenant = w.tenant(&["blue"], &["h2"]);
    let mut same = |call: &dyn Fn(&mut World, &str) -> Refusal, there: &str, nowhere: &str| {
        let (one, other) = (call(&mut w, there), call(&mut w, nowhere));
        assert_eq!((one.kind, one.what.replace(there, "X")), (other.kind, other.what.replace(nowhere, "X")));
    };
    let apply = |o: v1::Object| {
        let tenant = tenant.clone();
        move |w: &mut World| w.plan(&tenant, [o.clone()]).unwrap_err()
    };
    let stale = |o: v1::Object| v1::Object { revision: 3, ..o };
    same(&|w, n| apply(vrnic("new", n, ""))(w), "red", "nowhere");
    same(&|w, n| apply(vrnic("new", "blue", n))(w), "h1", "h9");
    same(&|w, n| apply(vrnic("mine", "blue", n))(w), "h1", "h9");
    same(&|w, n| apply(host(n))(w), "h1", "h9");
    same(&|w, n| apply(stale(host(n)))(w), "h1", "h9");
    same(&|w, n| apply(stale(group(n, "10.0.0.0/8")))(w), "red", "nowhere");
    same(&|w, n| apply(rule("new", "group:blue", &format!("group:{n}")))(w), "red", "nowhere");
    same(&|w, n| apply(rule("new", "group:blue", &format!("vrnic:{n}")))(w), "secret", "nothing");
    for (kind, there) in [
        (v1::Kind::Vrnic, "secret"),
        (v1::Kind::Rule, "theirs"),
        (v1::Kind::Rule, "across"),
        (v1::Kind::Group, "red"),
        (v1::Kind::Host, "h1"),
    ] {
        let name = |n: &str| v1::Name { kind: kind.into(), name: n.into() };
        let delete = |w: &mut World, n: &str| {
            let r = v1::DeleteRequest { names: vec![name(n)], force: true, ..Default::default() };
            w.planner.delete(&tenant, &r, &w.centre, NOW).unwrap_err()
        };
        same(&delete, there, "nothing");
        let get = |w: &mut World, n: &str| {
            let q = v1::GetRequest { kind: kind.into(), name: n.into(), ..Default::default() };
            w.centre.get(&tenant, &q, NOW).unwrap_err()
        };
        same(&get, there, "nothing");
    }
    let moved = |w: &mut World, vrnic: &str, host: &str| {
        let r = v1::MoveRequest { vrnic: vrnic.into(), host: host.into() };
        w.planner.move_vrnic(&tenant, &r, &w.centre, NOW).unwrap_err()
    };
    same(&|w, n| moved(w, n, "h2"), "secret", "nothing");
    same(&|w, n| moved(w, "mine", n), "h1", "h9");
    // A name is taken regardless of its owner, and of the revision that the call states for it.
    for o in [vrnic("secret", "blue", ""), rule("theirs", "group:blue", "group:blue")] {
        for o in [o.clone(), stale(o)] {
            let e = w.plan(&tenant, [o]).unwrap_err();
            assert!(e.kind == Reason::Conflict && e.what.ends_with("the name is not free; choose another one"), "{e}");
        }
    }
    // The refusal does not name a rule that joins the tenant's vRNIC with another's, and the tenant cannot delete the
    // rule along with its vRNIC.
    let r = v1::DeleteRequest {
        names: vec![v1::Name { kind: v1::Kind::Vrnic.into(), name: "mine".into() }],
        force: true,
        ..Default::default()
    };
    let e = w.planner.delete(&tenant, &r, &w.centre, NOW).unwrap_err();
    assert!(e.kind == Reason::Denied && !e.what.contains("across") && !e.what.contains("secret"), "{e}");
    // The tenant takes an address of the vRNIC that the rule joins with its own.
    let theirs = w.centre.state.vrnics["secret"].ips[0];
    w.apply(&admin, [group("blue", "0.0.0.0/0")]).unwrap();
    let taking =
        v1::Vrnic { name: "mine".into(), group: "blue".into(), ips: vec![theirs.to_string()], ..Default::default() };
    let e = w.plan(&tenant, [object(taking)]).unwrap_err();
    assert_eq!(e.what, format!("vRNIC mine: {theirs} is taken in a group that a rule joins with this one"));
    // The hosts on which tenants may put vRNICs.
    w.apply(&tenant, [vrnic("new", "blue", "h2"), vrnic("beside", "blue", "h0")]).unwrap();
    let any = w.tenant(&["blue"], &["*"]);
    w.apply(&any, [vrnic("new", "blue", "h1")]).unwrap();
}

#[test]
fn what_one_watches_ends_at_what_it_sees() {
    let mut w = World::new();
    let admin = Actor::centre();
    w.apply(&admin, [vrnic("b", "blue", "h0"), vrnic("r", "red", "h1")]).unwrap();
    w.apply(&admin, [rule("x", "vrnic:b", "group:blue")]).unwrap();
    let tenant = w.tenant(&["blue"], &[]);
    let told = w.centre.revision();
    w.apply(&admin, [rule("x", "vrnic:b", "vrnic:r"), rule("y", "group:red", "group:red")]).unwrap();
    let changes = w.centre.changes_since(told).unwrap();
    let hears = |actor, q: &v1::WatchRequest| changes.iter().filter_map(|c| c.told(actor, q)).collect::<Vec<_>>();
    let heard = hears(&tenant, &v1::WatchRequest::default());
    assert!(heard.len() == 1 && heard[0].before.is_some() && heard[0].after.is_none(), "{heard:?}");
    assert_eq!(hears(&admin, &v1::WatchRequest::default()).len(), 2);
    assert_eq!(hears(&admin, &v1::WatchRequest { kind: v1::Kind::Vrnic.into(), ..Default::default() }), []);
}

#[test]
fn a_tenant_has_a_part_of_what_there_is_and_administrators_the_last_of_it() {
    let mut w = World::new();
    let (admin, part) = (Actor::centre(), RULES.part());
    let (tenant, other) = (w.tenant(&["blue"], &[]), w.tenant(&["red", "default"], &[]));
    let many = |group: &str, n: std::ops::Range<usize>| {
        let end = format!("group:{group}");
        n.map(move |i| rule(&format!("{end}{i}").replace(':', "-"), &end, &end)).collect::<Vec<_>>()
    };
    w.apply(&tenant, many("blue", 0..part)).unwrap();
    let e = w.plan(&tenant, many("blue", part..part + 1)).unwrap_err();
    assert!(
        e.kind == Reason::Full && e.what.contains("group blue would have 4097 rules, and may have 4096 at most"),
        "{e}"
    );
    assert_eq!(w.plan(&tenant, many("blue", 0..part)).unwrap(), None, "what is there is no more");
    w.plan(&other, many("red", 0..10)).unwrap();
    w.apply(&admin, many("blue", part..part + 10)).unwrap();
    // All groups of a token share its part, unless an administrator gives a group more.
    w.apply(&other, many("red", 0..part / 2)).unwrap();
    let e = w.plan(&other, many("default", 0..part / 2 + 1)).unwrap_err();
    assert_eq!(e.what, "token token-2 would have 4097 rules, and may have 4096 at most");
    w.plan(&other, many("default", 0..part / 2)).unwrap();
    let wide = v1::Group {
        name: "red".into(),
        ranges: vec!["11.0.0.0/8".into()],
        max_rules: Some(9_000),
        ..Default::default()
    };
    w.apply(&admin, [object(wide)]).unwrap();
    w.plan(&other, many("red", 0..9_000)).unwrap();
    let e = w.plan(&admin, many("red", 0..9_001)).unwrap_err();
    assert!(e.what.contains("group red would have 9001 rules, and may have 9000 at most"), "{e}");
    // A change of existing objects creates none, so it is allowed at a limit or above it.
    let deny = v1::rule::Action::Deny.into();
    let changed = many("blue", 0..5).into_iter().map(|o| match o.object {
        Some(Object::Rule(r)) => object(v1::Rule { action: deny, ..r }),
        _ => unreachable!("it is a rule"),
    });
    let plan = w.plan(&other, [vrnic("mine", "red", "")]).unwrap();
    assert!(plan.is_some() && w.plan(&admin, changed).unwrap().is_some());
    // The last eighth is reserved for administrators.
    let limit = VRNICS;
    let last = limit.all - limit.all / 8;
    assert!(limit.room(&tenant, last, 0, limit.part()).is_ok() && limit.room(&admin, last + 1, 0, 0).is_ok());
    let e = limit.room(&tenant, last + 1, 0, limit.part()).unwrap_err();
    assert!(!e.what.contains(char::is_numeric), "a tenant hears of no sum: {e}");
    assert!(limit.room(&admin, limit.all + 1, 0, 0).is_err());
}

#[test]
fn a_planner_waits_for_those_who_still_read_what_was_so_before() {
    let mut w = World::new();
    let admin = Actor::centre();
    w.apply(&admin, [vrnic("a", "blue", "h0")]).unwrap();
    assert!(w.planner.is_ready());
    let lacking = w.centre.lacking("h0", None);
    w.apply(&admin, [vrnic("b", "blue", "h1")]).unwrap();
    assert!(!w.planner.is_ready());
    let named = |n: &str| v1::GetRequest { kind: v1::Kind::Vrnic.into(), name: n.into(), ..Default::default() };
    assert_eq!(w.centre.get(&admin, &named("b"), NOW).unwrap().objects.len(), 1, "it is known all the same");
    assert!(!w.planner.is_ready());
    let revision = lacking.revision();
    let before = lacking.updates();
    assert!(before.iter().all(|u| u.revision == revision) && revision < w.centre.revision());
    assert!(w.planner.is_ready());
    assert_eq!(w.plan(&admin, [vrnic("a", "blue", "h0"), vrnic("b", "blue", "h1")]).unwrap(), None);
}

#[test]
fn a_token_of_an_earlier_version_names_any_host() {
    let mut w = World::new();
    let tenant = w.tenant(&["blue"], &[]);
    assert!(w.plan(&tenant, [vrnic("a", "blue", "h1")]).is_err());
    let (id, record) = w.planner.state.tokens.first_key_value().map(|(i, t)| (i.clone(), t.clone())).unwrap();
    let old = records::token(&id, Some(&v1::TokenRecord { lists_hosts: false, ..record }));
    let plan = Plan { revision: w.centre.revision() + 1, writes: vec![old], changes: Vec::new() };
    w.keep(&plan);
    let secret = format!("{id}.{}", "01".repeat(32));
    let tenant = w.centre.actor(&secret, NOW).unwrap();
    assert!(w.plan(&tenant, [vrnic("a", "blue", "h1")]).is_ok());
}
