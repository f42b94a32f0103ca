//! Several centres of one fleet, which follow the same store and exchange the reports of their hosts.

use unirdma_fleet::{Actor, Centre, Outcome, Planner, RefusalKind, Write, v1};

const NOW: u64 = 1_800_000_000_000;

/// Centres that commit the same changes, with their store.
struct Fleet {
    centres: Vec<Centre>,
    planners: Vec<Planner>,
    records: std::collections::BTreeMap<String, Vec<u8>>,
}

impl Fleet {
    fn new(n: u8) -> Fleet {
        let records = Centre::found("f");
        let (centres, planners) = (0..n).map(|i| Centre::load(1, &records, [i; 32]).unwrap()).unzip();
        let mut fleet = Fleet { centres, planners, records: Default::default() };
        fleet.keep(&records);
        for h in ["h1", "h2"] {
            fleet.apply(v1::Host { name: h.into(), ..Default::default() });
        }
        fleet.apply(v1::Vrnic { name: "v".into(), group: "default".into(), host: "h1".into(), ..Default::default() });
        fleet
    }

    fn keep(&mut self, writes: &[Write]) {
        for w in writes {
            match &w.value {
                Some(v) => drop(self.records.insert(w.key.clone(), v.clone())),
                None => drop(self.records.remove(&w.key)),
            }
        }
    }

    fn apply(&mut self, object: impl Into<v1::object::Object>) {
        let objects = vec![v1::Object { object: Some(object.into()), revision: 0 }];
        let request = v1::ApplyRequest { objects, ..Default::default() };
        let done = self.planners[0].apply(&Actor::centre(), request, &self.centres[0], NOW).unwrap();
        let plan = done.plan.unwrap();
        self.keep(&plan.writes);
        for (centre, planner) in self.centres.iter_mut().zip(&mut self.planners) {
            centre.commit(planner, plan.revision, &plan.writes).unwrap();
        }
    }

    fn list(&self) -> Vec<Write> {
        self.records.iter().map(|(k, v)| Write { key: k.clone(), value: Some(v.clone()) }).collect()
    }

    /// Passes a centre's reports of its hosts to all other centres. Returns the connections that must end.
    fn tell(&mut self, from: usize) -> Vec<(usize, String)> {
        let (_, news) = self.centres[from].live_since(0, NOW);
        let mut cut = Vec::new();
        for to in (0..self.centres.len()).filter(|to| *to != from) {
            let hosts = self.centres[to].hear_centre(&format!("centre{from}"), news.clone(), NOW);
            cut.extend(hosts.into_iter().map(|h| (to, h)));
        }
        cut
    }

    fn hello(&mut self, centre: usize, host: &str, instance: u64, clock_ms: u64) -> Result<(), RefusalKind> {
        let hello = v1::Hello { protocol: 1, instance, clock_ms, ..Default::default() };
        self.centres[centre].hello(host, &hello, NOW).map(drop).map_err(|e| e.kind)
    }

    fn state(&self, centre: usize, host: &str) -> v1::HostState {
        let q = v1::GetRequest { kind: v1::Kind::Host.into(), name: host.into(), ..Default::default() };
        self.centres[centre].get(&Actor::centre(), &q, NOW).unwrap().hosts.remove(0)
    }
}

#[test]
fn a_list_makes_a_follower_what_the_changes_would_have_made_it() {
    let mut fleet = Fleet::new(1);
    let (old, at) = (fleet.list(), fleet.centres[0].revision());
    let (mut late, mut planner) = Centre::load(at, &old, [7; 32]).unwrap();
    fleet.apply(v1::Group { name: "blue".into(), secret: true, ..Default::default() });
    fleet.apply(v1::Vrnic { name: "w".into(), group: "blue".into(), host: "h1".into(), ..Default::default() });
    let names = vec![v1::Name { kind: v1::Kind::Vrnic.into(), name: "v".into() }];
    let gone = v1::DeleteRequest { names, ..Default::default() };
    let Outcome { plan, .. } = fleet.planners[0].delete(&Actor::centre(), &gone, &fleet.centres[0], NOW).unwrap();
    let plan = plan.unwrap();
    fleet.keep(&plan.writes);
    fleet.centres[0].commit(&mut fleet.planners[0], plan.revision, &plan.writes).unwrap();
    let list = fleet.list();
    let news = planner.catch_up(plan.revision, &list).unwrap();
    let news = late.publish(&mut planner, news);
    assert!(news.iter().any(|h| &**h == "h1"));
    let all = |c: &Centre| c.get(&Actor::centre(), &v1::GetRequest::default(), NOW).unwrap();
    assert_eq!(all(&late), all(&fleet.centres[0]));
    assert_eq!(late.updates("h1", None), fleet.centres[0].updates("h1", None));
    let again = planner.catch_up(plan.revision, &list).unwrap();
    assert!(late.publish(&mut planner, again).is_empty());
    // A store with an older revision, and a store of another fleet.
    assert!(planner.catch_up(at, &old).err().unwrap().what.contains("it was replaced; start this centre anew"));
    assert!(planner.catch_up(99, &Centre::found("other")).is_err());
}

#[test]
fn what_hosts_say_to_one_centre_the_others_know() {
    let mut fleet = Fleet::new(2);
    fleet.hello(1, "h1", 5, 100).unwrap();
    let state = v1::VrnicState { name: "v".into(), there: true, programs: 2, ..Default::default() };
    let report = v1::Report { vrnics: vec![state], clock_ms: NOW, pools: Vec::new() };
    fleet.centres[1].report("h1", report, NOW);
    let applied = v1::Applied { revision: 3, problems: vec!["a problem".into()] };
    fleet.centres[1].applied("h1", &applied, NOW);
    assert!(!fleet.state(0, "h1").connected);
    assert!(fleet.tell(1).is_empty());
    assert_eq!(fleet.state(0, "h1"), fleet.state(1, "h1"));
    assert!(fleet.state(0, "h1").connected && fleet.state(0, "h1").applied == 3);
    // A centre passes on only reports of hosts that are connected to itself.
    assert_eq!(fleet.centres[0].live_since(0, NOW).1, v1::LiveNews::default());
    let to_h2 = v1::MoveRequest { vrnic: "v".into(), host: "h2".into() };
    let e = fleet.planners[0].move_vrnic(&Actor::centre(), &to_h2, &fleet.centres[0], NOW).unwrap_err();
    assert!(e.what.contains("2 programs use it on host h1"), "{e}");
    fleet.centres[0].lose_centre("centre1");
    assert!(!fleet.state(0, "h1").connected);
    assert!(
        fleet.planners[0].move_vrnic(&Actor::centre(), &to_h2, &fleet.centres[0], NOW).is_err(),
        "its programs still run"
    );
}

#[test]
fn one_identity_is_connected_at_one_centre() {
    let mut fleet = Fleet::new(3);
    fleet.hello(0, "h1", 5, 100).unwrap();
    assert!(fleet.tell(0).is_empty());
    assert_eq!(fleet.hello(1, "h1", 6, 200), Err(RefusalKind::Conflict));
    // The same host connects to another centre before the first one notices the end of its connection.
    fleet.hello(1, "h1", 5, 300).unwrap();
    assert_eq!(fleet.tell(1), [(0, "h1".into())]);
    assert!(fleet.tell(0).is_empty());
    // Late reports of the first centre are ignored.
    fleet.centres[0].goodbye("h1", 5, NOW);
    fleet.tell(0);
    assert!((0..3).all(|c| fleet.state(c, "h1").connected));
    fleet.centres[1].goodbye("h1", 5, NOW);
    fleet.tell(1);
    assert!((0..3).all(|c| !fleet.state(c, "h1").connected));
    // Two hosts connect at the same time: all centres choose the same one.
    fleet.hello(0, "h2", 9, 1).unwrap();
    fleet.hello(1, "h2", 8, 1).unwrap();
    assert_eq!(fleet.tell(0), []);
    assert_eq!(fleet.tell(1), [(0, "h2".into())]);
    assert_eq!(fleet.hello(0, "h2", 9, 2), Err(RefusalKind::Conflict));
}
