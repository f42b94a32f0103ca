use super::*;

fn group(name: &str, vni: u32) -> Item {
    Item::Group(v1::HostGroup { name: name.into(), vni, weight: 100, vlan: 0 })
}

fn vrnic(name: &str, ip: &str) -> Item {
    Item::Vrnic(v1::Vrnic {
        name: name.into(),
        group: "blue".into(),
        host: "h1".into(),
        ips: vec![format!("{ip}/16")],
        mac: "02:00:00:00:00:01".into(),
        guid: "00000000000000ff".into(),
        ..v1::Vrnic::default()
    })
}

fn peer(name: &str, ip: &str) -> Item {
    let (ips, mac) = (vec![ip.into()], "02:00:00:00:00:02".into());
    Item::Peer(v1::Peer { name: name.into(), group: "blue".into(), host: "h2".into(), ips, mac })
}

fn place(host: &str) -> Item {
    Item::Place(v1::Place { host: host.into(), addresses: vec!["192.168.7.2".into()] })
}

fn update(revision: u64, whole: bool, put: &[Item], gone: &[(Key, bool)]) -> v1::Update {
    v1::Update {
        fleet: "f".into(),
        revision,
        whole,
        more: false,
        put: put.iter().map(|i| v1::Item { item: Some(i.clone()) }).collect(),
        gone: gone.iter().map(|(k, force)| k.message(*force)).collect(),
    }
}

fn say(message: to_host::Message) -> v1::ToHost {
    v1::ToHost { message: Some(message) }
}

/// An agent on a virtual clock, with a host that carries out all work except the keys in `fails`.
struct Host {
    agent: Agent,
    now: u64,
    done: Vec<String>,
    fails: BTreeMap<Key, String>,
    records: Vec<v1::Update>,
}

impl Host {
    fn new() -> Host {
        let agent = Agent::new(Config::default(), [], 7).unwrap();
        Host { agent, now: 1000, done: Vec::new(), fails: BTreeMap::new(), records: Vec::new() }
    }

    fn connect(&mut self) -> v1::Hello {
        while !self.agent.poll_connect(self.now) {
            self.now = self.agent.poll_timeout().unwrap();
        }
        self.agent.connected(self.now, 5);
        match self.agent.poll_message().unwrap().message.unwrap() {
            from_host::Message::Hello(hello) => hello,
            other => panic!("{other:?} is no Hello"),
        }
    }

    /// Does all work that is due.
    fn work(&mut self) {
        while let Some(r) = self.agent.poll_record() {
            self.records.push(r);
        }
        loop {
            let work = self.agent.poll_work(self.now);
            if work.is_empty() {
                return;
            }
            for w in &work {
                let what = if w.item.is_some() { "put" } else { "gone" };
                self.done.push(format!("{what} {:?}{}", w.key, if w.force { " by force" } else { "" }));
            }
            let fails = self.fails.clone();
            self.agent.carried(self.now, work, fails);
        }
    }

    fn update(&mut self, u: v1::Update) {
        self.agent.handle(self.now, say(to_host::Message::Update(u)));
        self.work();
    }

    fn done(&mut self) -> Vec<String> {
        std::mem::take(&mut self.done)
    }

    /// The reports of revisions in force, with their problems, that were sent to the centre.
    fn applied(&mut self) -> Vec<(u64, Vec<String>)> {
        let mut all = Vec::new();
        while let Some(m) = self.agent.poll_message() {
            if let Some(from_host::Message::Applied(a)) = m.message {
                all.push((a.revision, a.problems));
            }
        }
        all
    }
}

fn first() -> v1::Update {
    update(5, true, &[vrnic("a", "10.0.0.1"), peer("b", "10.0.0.2"), place("h2"), group("blue", 9)], &[])
}

#[test]
fn changes_are_done_in_order_and_only_what_is_other() {
    let mut h = Host::new();
    let hello = h.connect();
    assert_eq!((hello.revision, &*hello.fleet, hello.protocol), (0, "", 1));
    h.update(first());
    let all = ["put Group(\"blue\")", "put Place(\"h2\")", "put Peer(\"b\")", "put Vrnic(\"a\")"];
    assert_eq!((h.done(), h.applied()), (all.map(String::from).to_vec(), vec![(5, vec![])]));
    // The same update again, then a change of one piece.
    h.update(first());
    assert!(h.done().is_empty());
    h.update(update(6, false, &[peer("b", "10.0.0.3"), group("blue", 9)], &[]));
    assert_eq!((h.done(), h.applied()), (vec!["put Peer(\"b\")".to_string()], vec![(6, vec![])]));
    let gone = [(Key::Vrnic("a".into()), true), (Key::Group("blue".into()), false), (Key::Peer("b".into()), false)];
    h.update(update(7, false, &[], &gone));
    let all = ["gone Vrnic(\"a\") by force", "gone Peer(\"b\")", "gone Place(\"h2\")", "gone Group(\"blue\")"];
    assert_eq!(h.done(), all);
}

#[test]
fn peers_go_with_their_group_and_a_place_with_the_last_peer_there() {
    let mut h = Host::new();
    h.connect();
    let other = |name: &str, host: &str| {
        let Item::Peer(p) = peer(name, "10.0.0.9") else { unreachable!() };
        Item::Peer(v1::Peer { group: "red".into(), host: host.into(), ..p })
    };
    h.update(first());
    h.update(update(6, false, &[group("red", 10), other("c", "h2"), other("d", "h3"), place("h3")], &[]));
    h.done();
    // First one of two peers on a host is removed, then a host's last peer moves to another host.
    h.update(update(7, false, &[], &[(Key::Peer("c".into()), false)]));
    assert_eq!(h.done(), ["gone Peer(\"c\")"]);
    h.update(update(8, false, &[other("d", "h2")], &[]));
    assert_eq!(h.done(), ["put Peer(\"d\")", "gone Place(\"h3\")"]);
    h.update(update(9, false, &[], &[(Key::Vrnic("a".into()), false), (Key::Group("blue".into()), false)]));
    assert_eq!(h.done(), ["gone Vrnic(\"a\")", "gone Peer(\"b\")", "gone Group(\"blue\")"]);
    h.update(update(10, false, &[], &[(Key::Group("red".into()), false)]));
    assert_eq!(h.done(), ["gone Peer(\"d\")", "gone Place(\"h2\")", "gone Group(\"red\")"]);
    // An agent made from the kept records has the same state.
    let records: Vec<v1::Update> = std::iter::from_fn(|| h.agent.poll_record()).collect();
    let kept = h.records.iter().cloned().chain(records);
    let again = Agent::new(Config::default(), kept, 1).unwrap();
    assert_eq!((again.snapshot(), again.due.len()), (h.agent.snapshot(), 0));
    assert_eq!(again.snapshot().put, []);
}

#[test]
fn what_was_kept_is_put_in_force_and_resumed() {
    let mut h = Host::new();
    h.connect();
    h.update(first());
    h.update(update(6, false, &[vrnic("c", "10.0.0.4")], &[(Key::Peer("b".into()), false)]));
    assert_eq!(h.records.len(), 2);
    let mut again = Host { agent: Agent::new(Config::default(), h.records, 3).unwrap(), ..Host::new() };
    again.work();
    assert_eq!(again.done(), ["put Group(\"blue\")", "put Vrnic(\"a\")", "put Vrnic(\"c\")"]);
    assert_eq!(again.agent.snapshot(), h.agent.snapshot());
    let hello = again.connect();
    assert_eq!((hello.revision, &*hello.fleet), (6, "f"));
    // The agent reports the revision in force by itself.
    assert_eq!(again.applied(), [(6, vec![])]);
    // The centre no longer remembers the changes, so it sends a whole snapshot. Only differing pieces are touched.
    again.update(update(20, true, &[group("blue", 9), vrnic("a", "10.0.0.1")], &[]));
    assert_eq!(again.done(), ["gone Vrnic(\"c\")"]);
    // A new agent needs only the snapshot.
    let snapshot = again.agent.snapshot();
    assert_eq!(Agent::new(Config::default(), [snapshot.clone()], 3).unwrap().snapshot(), snapshot);
}

#[test]
fn parts_count_once_all_have_come_and_not_if_the_connection_ends() {
    let mut h = Host::new();
    h.connect();
    let part = |put: &[Item]| v1::Update { more: true, ..update(5, true, put, &[]) };
    let rest = |put: &[Item]| v1::Update { whole: false, ..update(5, true, put, &[]) };
    h.update(part(&[group("blue", 9)]));
    h.agent.disconnected(h.now, "gone".into());
    h.connect();
    h.update(rest(&[vrnic("a", "10.0.0.1")]));
    assert!(h.done().is_empty() && h.agent.poll_close(h.now).unwrap().contains("it changes the state f"));
    h.agent.disconnected(h.now, "gone".into());
    assert_eq!(h.connect().revision, 0);
    h.update(part(&[group("blue", 9)]));
    assert!(h.done().is_empty());
    h.update(rest(&[vrnic("a", "10.0.0.1")]));
    assert_eq!((h.done().len(), h.applied()), (2, vec![(5, vec![])]));
}

#[test]
fn bad_updates_are_refused_whole_and_everything_is_asked_for_again() {
    let bad = [
        (update(6, false, &[group("ok", 3), group("no", 0)], &[]), "VNI 0"),
        (update(6, false, &[vrnic("x/y", "10.0.0.9")], &[]), "is no name"),
        (update(6, false, &[vrnic("x", "10.0.0.999")], &[]), "10.0.0.999"),
        (update(6, false, &[peer("x", "10.0.0.1/16")], &[]), "peer x"),
        (update(6, true, &[vrnic("x", "10.0.0.9")], &[]), "of group blue, of which nothing is said"),
        (update(4, false, &[group("ok", 3)], &[]), "revision 4 came after revision 5"),
        (v1::Update { fleet: "g".into(), ..update(6, false, &[], &[]) }, "the state g"),
        (v1::Update { fleet: String::new(), ..first() }, "which fleet's"),
        (v1::Update { put: vec![v1::Item::default()], ..update(6, false, &[], &[]) }, "a piece is empty"),
        (v1::Update { gone: vec![v1::ItemKey::default()], ..update(6, false, &[], &[]) }, "a key is empty"),
    ];
    for (bad, why) in bad {
        let mut h = Host::new();
        h.connect();
        h.update(first());
        (_, _) = (h.done(), h.applied());
        let before = h.agent.snapshot();
        h.update(bad);
        assert!(h.done().is_empty() && h.agent.snapshot() == before, "{why}");
        let said = h.agent.poll_close(h.now).expect(why);
        assert!(said.contains(why), "{said}");
        assert_eq!(h.applied(), [(5, vec![said.clone()])]);
        h.agent.disconnected(h.now, said);
        assert_eq!(h.connect().revision, 0);
        h.update(first());
        assert!(h.done().is_empty() && h.agent.status(h.now).problems.is_empty());
    }
}

#[test]
fn what_fails_is_told_and_tried_again() {
    let mut h = Host::new();
    h.connect();
    h.fails.insert(Key::Vrnic("a".into()), "no room for vRNIC a".into());
    h.update(first());
    assert_eq!((h.done().len(), h.applied()), (4, vec![(5, vec!["no room for vRNIC a".into()])]));
    h.now = h.agent.poll_timeout().unwrap();
    h.work();
    assert_eq!((h.done(), h.applied()), (vec!["put Vrnic(\"a\")".to_string()], vec![]));
    h.fails.clear();
    h.now += RETRY_MS;
    h.work();
    assert_eq!((h.done().len(), h.applied()), (1, vec![(5, vec![])]));
    // A removal that has become obsolete is not tried again.
    h.fails.insert(Key::Vrnic("a".into()), "vRNIC a is in use".into());
    h.update(update(6, false, &[], &[(Key::Vrnic("a".into()), false)]));
    assert_eq!(h.applied(), [(6, vec!["vRNIC a is in use".into()])]);
    h.update(update(7, false, &[vrnic("a", "10.0.0.1")], &[]));
    h.fails.clear();
    h.now += RETRY_MS;
    h.work();
    assert_eq!(h.done().last().unwrap(), "put Vrnic(\"a\")");
}

#[test]
fn connections_are_tried_with_growing_pauses_and_given_up_in_silence() {
    let mut h = Host::new();
    let mut pauses = Vec::new();
    for _ in 0..12 {
        let before = h.now;
        while !h.agent.poll_connect(h.now) {
            h.now = h.agent.poll_timeout().unwrap();
        }
        pauses.push(h.now - before);
        assert_eq!(h.agent.poll_timeout(), None, "while it connects");
        h.agent.disconnected(h.now, "refused".into());
    }
    assert!(pauses[1] < 2 * FIRST_PAUSE_MS && pauses.iter().all(|&p| p < 2 * LAST_PAUSE_MS), "{pauses:?}");
    assert!(pauses[9..].iter().all(|&p| p >= LAST_PAUSE_MS / 2), "{pauses:?}");
    assert_eq!(h.agent.status(h.now).for_ms, h.now, "since it began");
    h.connect();
    let connected = h.now;
    assert_eq!(h.agent.poll_close(h.now + SILENCE_MS - 1), None);
    h.now += SILENCE_MS - 1;
    h.agent.handle(h.now, say(to_host::Message::Alive(v1::Alive::default())));
    assert_eq!((h.agent.poll_close(connected + SILENCE_MS), h.agent.poll_timeout()), (None, Some(h.now + SILENCE_MS)));
    h.now += SILENCE_MS;
    assert_eq!(h.agent.poll_close(h.now).unwrap(), "it has said nothing for 10 s");
    h.agent.disconnected(h.now, "silent".into());
    assert!(h.agent.poll_timeout().unwrap() < h.now + 2 * FIRST_PAUSE_MS, "after a good connection");
    assert_eq!((h.agent.status(h.now + 3000).for_ms, h.agent.status(h.now).connected), (3000, false));
}

#[test]
fn another_store_takes_no_vrnic_away() {
    let mut h = Host::new();
    h.connect();
    h.update(first());
    h.done();
    h.update(v1::Update { fleet: "new".into(), ..update(1, true, &[group("blue", 9)], &[]) });
    assert_eq!(h.done(), ["gone Peer(\"b\")", "gone Place(\"h2\")"]);
    let (revision, problems) = h.applied().pop().unwrap();
    assert!(
        revision == 1 && problems[0].starts_with("vRNIC a is of a control centre whose store is gone"),
        "{problems:?}"
    );
    // If the new centre declares the vRNIC, it belongs to the centre again.
    h.update(v1::Update { fleet: "new".into(), ..update(2, false, &[vrnic("a", "10.0.0.1")], &[]) });
    assert_eq!((h.done().len(), h.applied()), (1, vec![(2, vec![])]));
}

#[test]
fn who_asks_hears_when_it_is_done() {
    let mut h = Host::new();
    let change = || v1::ask::Change::Remove("a".into());
    let away = h.agent.ask(5000, change()).unwrap_err().to_string();
    assert!(away.starts_with("the control centre has been away for 5 s (it was not asked yet)"), "{away}");
    h.connect();
    h.update(first());
    let (id, other) = (h.agent.ask(h.now, change()).unwrap(), h.agent.ask(h.now, change()).unwrap());
    let reply = |id: u64, error: &str, name: &str| {
        let vrnic = (!name.is_empty()).then(|| v1::Vrnic { name: name.into(), ..v1::Vrnic::default() });
        say(to_host::Message::Reply(v1::Reply { id, error: error.into(), vrnic }))
    };
    // The update comes before the reply, and the work is done before the answer.
    let u = update(6, false, &[vrnic("n", "10.0.0.7")], &[]);
    h.agent.handle(h.now, say(to_host::Message::Update(u)));
    h.agent.handle(h.now, reply(id, "", "n"));
    h.agent.handle(h.now, reply(99, "", ""));
    assert_eq!(h.agent.poll_answer(), None);
    h.work();
    assert!(matches!(h.agent.poll_answer(), Some((i, Ok(Some(v)))) if i == id && v.name == "n"));
    h.agent.handle(h.now, reply(other, "group blue has its 5 vRNICs", ""));
    assert_eq!(h.agent.poll_answer(), Some((other, Err(AskError::Refused("group blue has its 5 vRNICs".into())))));
    // A failure on the host is an error.
    let id = h.agent.ask(h.now, change()).unwrap();
    h.fails.insert(Key::Vrnic("m".into()), "no room".into());
    h.update(update(7, false, &[vrnic("m", "10.0.0.8")], &[]));
    h.agent.handle(h.now, reply(id, "", "m"));
    assert_eq!(h.agent.poll_answer(), Some((id, Err(AskError::Refused("no room".into())))));
}

#[test]
fn what_a_lost_connection_left_open_is_asked_again() {
    let asked = |h: &mut Host| {
        let all = std::iter::from_fn(|| h.agent.poll_message());
        all.filter_map(|m| if let Some(from_host::Message::Ask(a)) = m.message { Some(a.id) } else { None })
            .collect::<Vec<_>>()
    };
    let reply = |id, error: &str| say(to_host::Message::Reply(v1::Reply { id, error: error.into(), vrnic: None }));
    let mut h = Host::new();
    h.connect();
    h.update(first());
    let remove = |h: &mut Host, name: &str| h.agent.ask(h.now, v1::ask::Change::Remove(name.into())).unwrap();
    let (a, other) = (remove(&mut h, "a"), remove(&mut h, "other"));
    assert_eq!(asked(&mut h), [a, other]);
    h.agent.disconnected(h.now, "cut".into());
    assert_eq!(h.agent.poll_answer(), None);
    h.connect();
    assert_eq!(asked(&mut h), [a, other]);
    // The first centre has made the change: the vRNIC is gone, so the repeated removal succeeds.
    h.update(update(6, false, &[], &[(Key::Vrnic("a".into()), true)]));
    h.agent.handle(h.now, reply(a, "there is no vRNIC a on host h1"));
    h.agent.handle(h.now, reply(a, "once more"));
    assert_eq!((h.agent.poll_answer(), h.agent.poll_answer()), (Some((a, Ok(None))), None));
    // A question without an answer in time is an error.
    h.agent.disconnected(h.now + ASK_MS, "cut".into());
    assert_eq!(h.agent.poll_answer(), Some((other, Err(AskError::Lost))));
    h.now += ASK_MS;
    h.connect();
    assert_eq!(asked(&mut h), [0; 0]);
}

#[test]
fn only_figures_that_have_changed_are_sent() {
    let mut h = Host::new();
    let state = |name: &str, qps| v1::VrnicState { name: name.into(), there: true, qps, ..v1::VrnicState::default() };
    h.agent.report(vec![state("a", 1)], Vec::new(), 1);
    h.connect();
    let sent = |h: &mut Host, states: Vec<v1::VrnicState>| {
        h.agent.report(states, Vec::new(), 1);
        match h.agent.poll_message().unwrap().message.unwrap() {
            from_host::Message::Report(r) => r.vrnics,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(sent(&mut h, vec![state("a", 1), state("b", 2)]).len(), 2);
    assert_eq!(sent(&mut h, vec![state("a", 1), state("b", 3)]), [state("b", 3)]);
    let gone = v1::VrnicState { name: "a".into(), ..v1::VrnicState::default() };
    assert_eq!(sent(&mut h, vec![state("b", 3)]), [gone]);
    assert!(sent(&mut h, vec![state("b", 3)]).is_empty());
}

#[test]
fn what_was_told_holds_for_the_revision_that_the_centre_says() {
    let mut h = Host::new();
    h.connect();
    let alive = |revision| say(to_host::Message::Alive(v1::Alive { revision, clock_ms: 0 }));
    // Without an update in force, `Alive` has no effect.
    h.agent.handle(h.now, alive(3));
    assert_eq!(h.agent.status(h.now).revision, 0);
    h.update(first());
    let revision = first().revision;
    assert_eq!(h.applied(), [(revision, Vec::new())]);
    h.agent.handle(h.now, alive(revision + 5));
    assert_eq!((h.agent.status(h.now).revision, h.applied()), (revision + 5, Vec::new()));
    // `Alive` has no effect while an update is incomplete, nor if its revision is older.
    h.agent.handle(
        h.now,
        say(to_host::Message::Update(v1::Update { more: true, ..update(revision + 6, false, &[], &[]) })),
    );
    h.agent.handle(h.now, alive(revision + 9));
    h.agent.handle(h.now, say(to_host::Message::Update(update(revision + 6, false, &[peer("new", "10.0.0.9")], &[]))));
    h.agent.handle(h.now, alive(revision + 2));
    assert_eq!(h.agent.status(h.now).revision, revision + 6);
    h.work();
    h.agent.handle(h.now, alive(revision + 8));
    // The next connection begins with this revision.
    h.agent.disconnected(h.now, "gone".into());
    assert_eq!(h.connect().revision, revision + 8);
}
