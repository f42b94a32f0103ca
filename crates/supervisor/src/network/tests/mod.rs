mod sealed;

use unirdma_formats::net::{ETH_BYTES, vxlan};
use unirdma_formats::wire::{Envelope, ROCE_PORT, icrc};
use unirdma_ipc::network::Changes;
use unirdma_ipc::vrnic::mac_of;
use unirdma_rnic::{DATAGRAM_MAC, Path as To, Tx};
use unirdma_worker::{Port, Tunnel, Tunneled, open_worker};

use super::*;
use crate::peer_source::{self, CentrePeers};
use std::net::UdpSocket;
use std::path::PathBuf;
use std::time::{Duration, Instant};

fn hosts(third: u8) -> Vec<IpAddr> {
    (1..=3).map(|i| IpAddr::from([127, 0, third, i])).collect()
}

/// A directory that is removed when this is dropped.
struct Dir(PathBuf);

impl Dir {
    fn new() -> Self {
        let dir = std::env::temp_dir().join(format!("unirdma-net-{:016x}", getrandom::u64().unwrap()));
        std::fs::create_dir(&dir).unwrap();
        Dir(dir)
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn config(dir: &Dir, addresses: &[IpAddr], peers: &str) -> WireConfig {
    let file = dir.0.join("peers");
    std::fs::write(&file, peers).unwrap();
    WireConfig::new(addresses.to_vec(), Some(file))
}

fn source(c: &WireConfig) -> Box<dyn Source> {
    peer_source::of(c, &CentrePeers::default()).unwrap()
}

fn open(c: &WireConfig, dir: &Dir) -> io::Result<Network> {
    Network::open(c, &dir.0, source(c))
}

/// A group's worker.
struct Worker {
    enrolment: Enrolment,
    port: Box<dyn Port>,
    tunnel: Tunnel,
}

/// A host: its supervisor, and the workers of its groups.
struct Host {
    dir: Dir,
    network: Network,
    workers: BTreeMap<String, Worker>,
    /// Workers that were sent a plan, and changes sent to others, since the test has cleared the lists.
    plans: Vec<String>,
    changes: BTreeMap<String, Changes>,
}

impl Host {
    fn new(address: IpAddr, peers: &str, groups: &[&str]) -> Host {
        Host::with(address, peers, groups, |_| {})
    }

    fn with(address: IpAddr, peers: &str, groups: &[&str], change: impl FnOnce(&mut WireConfig)) -> Host {
        let dir = Dir::new();
        let mut c = config(&dir, &[address], peers);
        change(&mut c);
        let network = open(&c, &dir).unwrap();
        let mut host = Host::of(dir, network, BTreeMap::new());
        (0..).zip(groups).for_each(|(id, g)| host.add(g, id));
        host
    }

    fn of(dir: Dir, network: Network, workers: BTreeMap<String, Worker>) -> Host {
        Host { dir, network, workers, plans: Vec::new(), changes: BTreeMap::new() }
    }

    fn add(&mut self, group: &str, id: u32) {
        self.network.enroll(group, id).unwrap();
        let (enrolment, sockets) = self.network.sockets_of(group).unwrap();
        // Encoded and decoded, as on the way to a worker.
        let text = serde_json::to_string(&enrolment).unwrap();
        let enrolment: Enrolment = serde_json::from_str(&text).unwrap();
        let (port, tunnel) = open_worker(&enrolment, sockets).unwrap();
        self.workers.insert(group.into(), Worker { enrolment, port, tunnel });
        self.plan();
    }

    fn remove(&mut self, group: &str) {
        self.workers.remove(group);
        self.network.dismiss(group);
    }

    /// Sends the workers their messages.
    fn plan(&mut self) {
        for (name, w) in &self.workers {
            match self.network.next_update(name) {
                Some(PeerUpdate::Plan(plan)) => {
                    self.plans.push(name.clone());
                    w.tunnel.set_plan(w.enrolment.id, plan.members, plan.agreed, plan.joined);
                }
                Some(PeerUpdate::Changes(changes)) => {
                    // Encoded and decoded, as on the way to a worker.
                    let text = serde_json::to_string(&changes).unwrap();
                    w.tunnel.change_plan(w.enrolment.id, &serde_json::from_str(&text).unwrap());
                    self.changes.insert(name.clone(), changes);
                }
                None => {}
            }
        }
    }

    fn set_peers(&mut self, text: &str) {
        std::fs::write(self.dir.0.join("peers"), text).unwrap();
        assert!(self.network.on_event());
        self.plan();
    }

    fn tunnel(&self, group: &str) -> &Tunnel {
        &self.workers[group].tunnel
    }

    /// All frames for a group.
    fn drain(&self, group: &str) -> Vec<Vec<u8>> {
        let mut buffer = vec![0; 2000];
        let mut frames = Vec::new();
        while let Some(came) = self.tunnel(group).receive(0, &mut buffer) {
            if let Tunneled::Frame { frame, .. } = came {
                frames.push(frame.to_vec());
            }
        }
        frames
    }

    fn info(&self) -> TunnelInfo {
        let mut drops = TunnelDrops::default();
        self.workers.values().for_each(|w| drops += w.tunnel.drops());
        self.network.info(PortCounters::default(), WireDrops::default(), drops).tunnel
    }

    /// The QPNs of the RoCEv2 packets that each group has received.
    fn qpns(&mut self) -> BTreeMap<String, Vec<u32>> {
        let mut all = BTreeMap::new();
        for (name, w) in &mut self.workers {
            let mut got = Vec::new();
            while w.port.receive(&mut |_, p| got.push(u32::from_be_bytes([0, p[5], p[6], p[7]]))) {}
            if !got.is_empty() {
                all.insert(name.clone(), got);
            }
        }
        all
    }
}

/// Lets hosts exchange announcements until nothing changes.
fn settle(hosts: &mut [&mut Host]) {
    for _ in 0..6 {
        for h in hosts.iter_mut() {
            h.network.on_event();
            h.plan();
        }
    }
}

fn frame(src: [u8; 6]) -> Vec<u8> {
    [&[0xff; 6][..], &src, &[8, 0], &[7; 40]].concat()
}

/// Packets of one connection, which are sent as one train.
fn packets(tx: &mut Tx, to: IpAddr, qpn: u32, count: usize) {
    for _ in 0..count {
        let [_, a, b, c] = qpn.to_be_bytes();
        tx.push_raw(To::new(to), &[&[4, 0, 0xff, 0xff, 0, a, b, c][..], &[9; 600]].concat());
    }
}

#[test]
fn frames_come_from_peers_of_the_group_only() {
    let ips = hosts(48);
    let [a, b, c] = [ips[0], ips[1], ips[2]];
    let numbers = "group blue vni 5\ngroup red vni 6\n";
    let mut h0 = Host::new(a, &format!("{numbers}10.0.0.2 blue {b}"), &["default", "red", "blue"]);
    let mut h1 = Host::new(b, &format!("{numbers}10.0.0.1 blue {a}"), &["default", "blue", "red"]);
    let mut h2 = Host::new(c, &format!("{numbers}10.0.0.2 blue {b}\n10.0.0.2 red {b}"), &["default", "blue", "red"]);
    settle(&mut [&mut h0, &mut h1, &mut h2]);
    assert!(h0.info().silent.is_empty() && h1.info().silent.is_empty());
    // Host 2 is not in host 1's peers file, so host 1 does not answer it.
    assert_eq!((h2.info().silent, h1.info().drops.not_a_peer > 0), (vec![b], true));
    let frame = frame([6, 0, 0, 0, 0, 1]);
    let mut buffer = vec![0; 2000];
    h0.tunnel("blue").send(2, &frame);
    assert!(
        h1.tunnel("default").receive(0, &mut buffer).is_none() && h1.tunnel("red").receive(0, &mut buffer).is_none()
    );
    let got = h1.tunnel("blue").receive(0, &mut buffer);
    assert_eq!(got, Some(Tunneled::Frame { group: 1, source: None, frame: &frame }));
    let mut datagram = frame.clone();
    datagram[6..12].copy_from_slice(&DATAGRAM_MAC);
    h0.tunnel("blue").send(2, &datagram);
    let expected = Tunneled::Datagram { from: a, group: 1, source: None, packet: &datagram[ETH_BYTES..] };
    assert_eq!(h1.tunnel("blue").receive(0, &mut buffer), Some(expected));
    // Host 2 is no peer of host 1, and host 1 has no members of `red` elsewhere.
    let before = h1.info().drops;
    h2.tunnel("blue").send(1, &frame);
    h2.tunnel("red").send(2, &frame);
    assert!(h1.drain("blue").is_empty() && h1.drain("red").is_empty());
    assert_eq!(h1.info().drops, TunnelDrops { no_group: before.no_group + 2, ..before });
    // A number that no group has, and a packet without a number.
    let from = h0.workers["blue"].tunnel.sockets().next().unwrap().try_clone().unwrap();
    from.send_to(&[&vxlan(77)[..], &frame].concat(), (b, VXLAN_PORT)).unwrap();
    from.send_to(&[8, 0], (b, VXLAN_PORT)).unwrap();
    settle(&mut [&mut h1]);
    assert!(h1.drain("default").is_empty());
    assert_eq!(h1.info().drops.no_group, before.no_group + 3);
    assert_eq!((h1.info().drops.malformed, h1.tunnel("default").drops().malformed), (before.malformed + 1, 1));
    // An attacker who cannot bind port 4789 of a peer uses another port.
    let other = UdpSocket::bind((a, 0)).unwrap();
    other.send_to(&[&vxlan(5)[..], &frame].concat(), (b, VXLAN_PORT)).unwrap();
    assert!(h1.drain("blue").is_empty());
    assert_eq!(h1.info().drops.not_a_peer, before.not_a_peer + 1);
}

/// An ARP request from 10.0.0.`from` for 10.0.0.`to`.
fn arp(from: u8, to: u8) -> Vec<u8> {
    let mac = [2, 0, 10, 0, 0, from];
    [&[0xff; 6][..], &mac, &[8, 6, 0, 1, 8, 0, 6, 4, 0, 1], &mac, &[10, 0, 0, from], &[0; 6], &[10, 0, 0, to]].concat()
}

#[test]
fn groups_that_a_rule_joins_meet_on_one_host_and_between_two_until_the_rule_goes() {
    let ips = hosts(49);
    let [a, b] = [ips[0], ips[1]];
    let places = format!("10.0.0.1 red {a}\n10.0.0.2 blue {a}\n10.0.0.3 blue {b}\n10.0.0.4 green {b}\n");
    let joined = format!("{places}rule allow from group:red to group:blue both\n");
    // Blue is the only group that both hosts have.
    let mut h0 = Host::new(a, &joined, &["default", "red", "blue"]);
    let mut h1 = Host::new(b, &joined, &["default", "blue", "green"]);
    settle(&mut [&mut h0, &mut h1]);
    let red = h0.network.vni("red").unwrap();
    let plan = h0.network.plan("red");
    assert_eq!((plan.joined.len(), &plan.joined[0].agreed, plan.rules.len()), (1, &[a, b].into(), 1));
    assert!(h0.network.plan("default").rules.is_empty() && h1.network.plan("green").joined.is_empty());
    let mut buffer = vec![0; 2000];
    for (to, host) in [(2, &h0), (3, &h1)] {
        let frame = arp(1, to);
        h0.tunnel("red").send_across(1, [10, 0, 0, to].into(), &frame);
        let id = host.workers["blue"].enrolment.id;
        let expected = Tunneled::Frame { group: id, source: Some(red), frame: &frame };
        assert_eq!(host.tunnel("blue").receive(0, &mut buffer), Some(expected), "to {to}");
    }
    // Red does not know addresses of green, and no address of red is at host b.
    h0.tunnel("red").send_across(1, [10, 0, 0, 4].into(), &arp(1, 4));
    h1.tunnel("blue").send_across(1, [10, 0, 0, 1].into(), &arp(1, 2));
    assert!(h1.drain("blue").is_empty() && h1.drain("green").is_empty() && h0.drain("red").is_empty());
    assert_eq!(h0.tunnel("red").drops().address, 1);
    // A packet that claims to come from a group that no rule joins with this one is dropped.
    let liar = h1.workers["blue"].tunnel.sockets().next().unwrap().try_clone().unwrap();
    let (green, blue) = (h0.network.vni("green").unwrap(), h0.network.vni("blue").unwrap());
    let frame = arp(4, 2);
    liar.send_to(&[&unirdma_formats::net::vxlan_from(blue, green)[..], &frame].concat(), (a, VXLAN_PORT)).unwrap();
    assert!(h0.drain("blue").is_empty());
    assert_eq!(h0.tunnel("blue").drops().no_group, 1);
    h0.set_peers(&places);
    h1.set_peers(&places);
    settle(&mut [&mut h0, &mut h1]);
    h0.tunnel("red").send_across(1, [10, 0, 0, 3].into(), &arp(1, 3));
    assert!(h1.drain("blue").is_empty() && h0.network.plan("red").joined.is_empty());
}

#[test]
fn a_rule_more_is_told_to_the_two_workers_that_it_concerns_and_works_as_if_it_had_been_there() {
    let ips = hosts(63);
    let [a, b] = [ips[0], ips[1]];
    let names = ["default", "red", "blue", "green", "far"];
    let mut peers = names.iter().zip(1..).map(|(g, n)| format!("group {g} vni {n}\n")).collect::<String>();
    for (name, third) in names.iter().zip(0..) {
        peers += &format!("10.0.{third}.1 {name} {a}\n10.0.{third}.2 {name} {b}\n");
    }
    peers += "rule allow from group:green to group:far both\n";
    let mut h0 = Host::new(a, &peers, &names);
    let mut h1 = Host::new(b, &peers, &names);
    settle(&mut [&mut h0, &mut h1]);
    h0.plans.clear();
    h0.changes.clear();

    let with = format!("{peers}rule allow from group:red to group:blue both\n");
    h0.set_peers(&with);
    assert!(h0.plans.is_empty() && h0.changes.keys().eq(["blue", "red"]), "{:?} {:?}", h0.plans, h0.changes);
    let told = &h0.changes["red"];
    let addresses: Vec<String> = told.addresses.iter().map(|(a, _)| a.to_string()).collect();
    assert_eq!((addresses, told.hosts.len(), told.macs.len()), (vec!["10.0.2.1".into(), "10.0.2.2".into()], 0, 0));
    assert_eq!((told.joined.len(), told.rules.as_ref().unwrap().len()), (1, 1));
    h1.set_peers(&with);
    settle(&mut [&mut h0, &mut h1]);
    let arp = |from: [u8; 2], to: [u8; 2]| {
        let mut frame = arp(from[1], to[1]);
        // The third bytes of the sender's address and of the requested one name their groups.
        (frame[30], frame[40]) = (from[0], to[0]);
        frame
    };
    let frame = arp([1, 1], [2, 2]);
    h0.tunnel("red").send_across(1, [10, 0, 2, 2].into(), &frame);
    assert_eq!(h1.drain("blue"), std::slice::from_ref(&frame));

    // A moved address is one change for its group, and one for the joined group.
    h0.changes.clear();
    h0.set_peers(&with.replace(&format!("10.0.2.1 blue {a}"), &format!("10.0.2.1 blue {b}")));
    assert!(h0.plans.is_empty());
    let counts: Vec<(&str, usize)> = h0.changes.iter().map(|(g, c)| (g.as_str(), c.addresses.len())).collect();
    assert_eq!(counts, [("blue", 1), ("red", 1)]);
    h0.set_peers(&with);

    // A rule that denies concerns two groups, and reveals no addresses.
    h0.changes.clear();
    h0.set_peers(&format!("{with}rule deny from group:red to group:far\n"));
    let counts: Vec<(&str, usize)> = h0.changes.iter().map(|(g, c)| (g.as_str(), c.addresses.len())).collect();
    assert_eq!((h0.plans.len(), counts), (0, vec![("far", 0), ("red", 0)]));

    // Without the rule the groups are separate again.
    h0.changes.clear();
    h0.set_peers(&peers);
    assert_eq!((h0.plans.len(), h0.changes["red"].joined.len(), h0.changes.contains_key("green")), (0, 1, false));
    h1.set_peers(&peers);
    settle(&mut [&mut h0, &mut h1]);
    h0.tunnel("red").send_across(1, [10, 0, 2, 2].into(), &frame);
    assert!(h1.drain("blue").is_empty() && h0.plans.is_empty());
}

#[test]
fn a_number_that_means_another_group_there_leads_nowhere() {
    let ips = hosts(49);
    let [a, b] = [ips[0], ips[1]];
    let frame = frame([6, 0, 0, 0, 0, 1]);
    let both = |vni: u32, other: IpAddr| format!("group default vni {vni}\n10.0.0.2 default {other}\n");
    let mut h0 = Host::new(a, &format!("group blue vni 2\n10.0.0.2 blue {b}\n{}", both(1, b)), &["default", "blue"]);
    let mut h1 = Host::new(b, &both(2, a), &["default"]);
    // Before the other host has announced anything.
    h0.tunnel("blue").send(1, &frame);
    assert!(h1.drain("default").is_empty());
    settle(&mut [&mut h0, &mut h1]);
    h0.tunnel("blue").send(1, &frame);
    assert!(h1.drain("default").is_empty());
    assert_eq!(h1.info().drops.not_agreed, 2);
    let said = |h: &Host| h.info().disagreements.iter().map(ToString::to_string).collect::<Vec<_>>();
    assert!(
        said(&h0)[0].starts_with("VNI 2 is group blue at 127.0.49.1, this host, and group default at 127.0.49.2;"),
        "{:?}",
        said(&h0)
    );
    assert!(said(&h0)[1].starts_with("group default has VNI 1 at 127.0.49.1, this host, and 2 at 127.0.49.2;"));
    assert_eq!((said(&h0).len(), said(&h1).len()), (2, 2));
    // One of the two hosts changes its file.
    h1.set_peers(&both(1, a));
    settle(&mut [&mut h0, &mut h1]);
    assert!(said(&h0).is_empty() && said(&h1).is_empty());
    h0.tunnel("default").send(0, &frame);
    assert_eq!(h1.drain("default"), [frame]);
}

#[test]
fn a_host_claims_no_address_of_another_one() {
    let ips = hosts(50);
    let mut all: Vec<Host> = (0..3)
        .map(|i| {
            let others = (0..3).filter(|&j| j != i).map(|j| format!("10.0.0.{} default {}\n", j + 1, ips[j]));
            Host::new(ips[i], &others.collect::<String>(), &["default"])
        })
        .collect();
    settle(&mut all.iter_mut().collect::<Vec<_>>());
    let arp = |link: [u8; 6], sender: u8| {
        let head = [0, 1, 8, 0, 6, 4, 0, 2];
        [&[0xff; 6][..], &link, &[8, 6], &head, &link, &[10, 0, 0, sender], &[0; 10]].concat()
    };
    let macs: Vec<[u8; 6]> = (1..=3).map(|i| mac_of("default", [10, 0, 0, i].into()).0).collect();
    // Host 1 sends with its own MAC and address, then as a router with another source address, then with host 2's
    // addresses.
    let (own, routed) = (arp(macs[1], 2), frame(macs[1]));
    let from = all[1].tunnel("default");
    from.send(0, &own);
    from.send(0, &routed);
    assert_eq!(all[0].drain("default"), [own, routed]);
    for stolen in [arp(macs[1], 3), arp(macs[2], 2), frame(macs[2]), frame([3; 6])] {
        let before = all[0].info().drops;
        from.send(0, &stolen);
        assert!(all[0].drain("default").is_empty(), "{stolen:02x?}");
        assert_eq!(all[0].info().drops, TunnelDrops { address: before.address + 1, ..before });
    }
    // An address that is in no file belongs to the first host that uses it.
    let guest = frame([6, 0, 0, 0, 0, 9]);
    all[2].tunnel("default").send(0, &guest);
    assert_eq!(all[0].drain("default").len(), 1);
    from.send(0, &guest);
    assert!(all[0].drain("default").is_empty());
}

#[test]
fn what_the_network_loses_is_said_again() {
    let ips = hosts(51);
    let mut h: Vec<Host> =
        (0..2).map(|i| Host::new(ips[i], &format!("10.0.0.9 default {}", ips[1 - i]), &["default"])).collect();
    let mut lost = [0; 2000];
    while h
        .iter()
        .any(|h| h.network.reuseports.iter().filter_map(ReuseportGroup::own).any(|s| s.recv_from(&mut lost).is_ok()))
    {
    }
    assert_eq!((h[0].info().silent, h[1].info().silent), (vec![ips[1]], vec![ips[0]]));
    let limit = Instant::now() + Duration::from_secs(10);
    while h.iter().any(|h| !h.info().silent.is_empty()) {
        let mut ready =
            [rustix::event::PollFd::from_borrowed_fd(h[0].network.descriptor(), rustix::event::PollFlags::IN)];
        let wait = rustix::time::Timespec { tv_sec: 10, tv_nsec: 0 };
        assert_eq!(rustix::event::poll(&mut ready, Some(&wait)), Ok(1));
        h.iter_mut().for_each(|h| _ = h.network.on_event());
        assert!(Instant::now() < limit);
    }
}

#[test]
fn packets_find_the_group_of_their_qpn_also_while_groups_come_and_go() {
    let ips = hosts(52);
    let (here, mut tx) = (ips[0], Tx::default());
    let mut peer = Host::new(ips[1], "", &["default"]);
    let mut host = Host::new(here, "", &["default"]);
    let names: Vec<String> = (0..12).map(|i| format!("g{i}")).collect();
    (1..).zip(&names).for_each(|(id, n)| host.add(n, id));
    let mut check = |host: &mut Host, why: &str| {
        let groups: Vec<(String, Range)> = host.workers.iter().map(|(n, w)| (n.clone(), w.enrolment.qpns[0])).collect();
        let mut expected = BTreeMap::new();
        for (name, (start, length)) in groups {
            // Trains of ten, and single packets. QPNs 0 and 1 belong to no QP.
            let ends = [(start.max(2), 10), (start + length / 2, 1), (start + length - 1, 10)];
            for &(qpn, n) in &ends {
                packets(&mut tx, here, qpn, n);
                peer.workers.get_mut("default").unwrap().port.send(&mut tx);
            }
            expected.insert(name, ends.iter().flat_map(|&(q, n)| vec![q; n]).collect::<Vec<_>>());
        }
        packets(&mut tx, here, 0xff_fffe, 2);
        expected.get_mut("default").unwrap().extend([0xff_fffe; 2]);
        peer.workers.get_mut("default").unwrap().port.send(&mut tx);
        let mut got = host.qpns();
        got.values_mut().chain(expected.values_mut()).for_each(|v| v.sort_unstable());
        assert_eq!(got, expected, "{why}");
    };
    check(&mut host, "at first");
    // A group from the middle of the array, the first one, the last one, and one that is added again.
    for (i, gone) in ["g5", "g0", "g11", "g7"].into_iter().enumerate() {
        host.remove(gone);
        check(&mut host, gone);
        host.add(&format!("new{i}"), 50 + i as u32);
        check(&mut host, "one more");
    }
    host.add("g5", 60);
    check(&mut host, "a name comes again");
    // A worker that ends keeps its index. The next one gets the same sockets.
    host.workers.remove("g3");
    let (enrolment, sockets) = host.network.sockets_of("g3").unwrap();
    check(&mut host, "a worker is away");
    let (mut port, tunnel) = open_worker(&enrolment, sockets).unwrap();
    while port.receive(&mut |_, _| {}) {}
    host.workers.insert("g3".into(), Worker { enrolment, port, tunnel });
    check(&mut host, "it is back");
    // A process has kept a socket of a removed group. It receives nothing, and all indices are right.
    let (kept, sockets) = host.network.sockets_of("g4").unwrap();
    let (mut thief, _tunnel) = open_worker(&kept, sockets).unwrap();
    host.remove("g4");
    check(&mut host, "a socket is kept");
    let mut tx = Tx::default();
    packets(&mut tx, here, kept.qpns[0].0, 5);
    peer.workers.get_mut("default").unwrap().port.send(&mut tx);
    assert!(!thief.receive(&mut |_, _| {}));
    assert_eq!(host.qpns().keys().collect::<Vec<_>>(), ["default"]);
}

#[test]
fn requests_find_the_owner_of_their_address_and_more_qpns_their_group() {
    let ips = hosts(53);
    let (here, mut tx) = (ips[0], Tx::default());
    let mut peer = Host::new(ips[1], "", &["default"]);
    let mut host = Host::new(here, "", &["default", "blue", "red"]);
    let mut to = |host: &mut Host, qpn: u32| {
        packets(&mut tx, here, qpn, 3);
        peer.workers.get_mut("default").unwrap().port.send(&mut tx);
        host.qpns().into_keys().collect::<Vec<_>>()
    };
    assert_eq!(to(&mut host, 1), ["default"]);
    host.network.set_owner(here, Some("red"));
    assert_eq!((to(&mut host, 1), to(&mut host, 2)), (vec!["red".into()], vec!["default".into()]));
    host.network.set_owner(ips[2], Some("blue"));
    assert_eq!(to(&mut host, 1), ["red"], "an address of another host");
    let (start, length) = host.network.more_qpns("blue").unwrap()[1];
    assert_eq!((to(&mut host, start), to(&mut host, start + length - 1)), (vec!["blue".into()], vec!["blue".into()]));
    assert_eq!(host.network.sockets_of("blue").unwrap().0.qpns[1], (start, length));
    host.remove("red");
    assert_eq!(to(&mut host, 1), ["default"]);
    host.network.set_owner(here, Some("blue"));
    host.network.set_owner(here, None);
    assert_eq!(to(&mut host, 1), ["default"]);
}

#[test]
fn no_worker_changes_the_steering_and_descriptors_are_counted() {
    let ips = hosts(54);
    let mut host = Host::new(ips[0], "", &["default"]);
    host.network.enroll("blue", 1).unwrap();
    let (enrolment, sockets) = host.network.sockets_of("blue").unwrap();
    for (role, socket) in enrolment.roles.iter().zip(&sockets) {
        for option in [libc::SO_ATTACH_REUSEPORT_CBPF, libc::SO_ATTACH_FILTER] {
            let e = bpf::attach(socket, option, &[bpf::end(1)]).unwrap_err();
            assert_eq!(e.raw_os_error(), Some(libc::EPERM), "{role:?}");
        }
    }
    let flows = enrolment.roles.iter().filter(|r| matches!(r, Role::Flow(..))).count();
    assert_eq!((flows, sockets.len()), (SOURCE_PORTS.into(), 2 + usize::from(SOURCE_PORTS)));
    assert!(open_worker(&enrolment, sockets.into_iter().skip(1).collect()).is_err());
    assert_eq!(host.network.enroll("blue", 2).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
    assert!(host.network.sockets_of("red").is_err());
    host.network.dismiss("red");
}

#[test]
fn a_port_has_one_virtual_layer() {
    let ips = hosts(55);
    let dir = Dir::new();
    let host = Host::new(ips[0], "", &["default"]);
    let refused = |a: IpAddr| open(&config(&dir, &[a], ""), &dir).err().unwrap();
    let e = refused(ips[0]);
    assert_eq!(e.kind(), io::ErrorKind::AddrInUse);
    assert!(e.to_string().starts_with("UDP port 4791 of 127.0.55.1 is in use (another virtual layer"), "{e}");
    assert!(refused("203.0.113.1".parse().unwrap()).to_string().contains("no address of this host"));
    drop(host);
    // The ports are bound even before there is a group.
    let network = open(&config(&dir, &[ips[0]], ""), &dir).unwrap();
    assert_eq!(refused(ips[0]).kind(), io::ErrorKind::AddrInUse);
    drop(network);
    let vxlan = UdpSocket::bind((ips[1], VXLAN_PORT)).unwrap();
    assert!(refused(ips[1]).to_string().starts_with("cannot bind UDP port 4789 of 127.0.55.2 for VXLAN: "));
    drop(vxlan);
}

#[test]
fn packet_sockets_see_the_packets_of_their_group_only() {
    let ips = hosts(56);
    let (dir, here) = (Dir::new(), ips[0]);
    let mut c = config(&dir, &[here], "");
    c.full_icrc = true;
    match open(&c, &dir) {
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => return println!("skipped: {e}"),
        n => drop(n.unwrap()),
    }
    let (mut peer, mut tx) = (Host::new(ips[1], "", &["default"]), Tx::default());
    let mut host = Host::with(here, "", &["default", "blue", "red"], |c| c.full_icrc = true);
    let mut to = |host: &mut Host, qpn: u32| {
        packets(&mut tx, here, qpn, 10);
        peer.workers.get_mut("default").unwrap().port.send(&mut tx);
        host.qpns().into_iter().map(|(name, q)| (name, q.len())).collect::<Vec<_>>()
    };
    let only = |name: &str| vec![(name.to_string(), 10)];
    let blue = host.workers["blue"].enrolment.qpns[0].0;
    assert_eq!(
        (to(&mut host, blue), to(&mut host, 0xff_fffe), to(&mut host, 1)),
        (only("blue"), only("default"), only("default"))
    );
    host.network.set_owner(here, Some("red"));
    assert_eq!((to(&mut host, 1), to(&mut host, blue)), (only("red"), only("blue")));
    let more = host.network.more_qpns("red").unwrap()[1].0;
    assert_eq!(to(&mut host, more), only("red"));
    host.remove("blue");
    assert_eq!((to(&mut host, blue), to(&mut host, more)), (only("default"), only("red")));
}

/// A packet socket shows the IPv4 Identification, which the ICRC covers.
#[test]
fn the_identification_counts_with_packet_sockets() {
    let (dir, [ours, theirs]) = (Dir::new(), [5, 6].map(|n| IpAddr::from([127, 0, 47, n])));
    let mut c = config(&dir, &[ours], "");
    c.full_icrc = true;
    match open(&c, &dir) {
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => return println!("skipped: {e}"),
        n => drop(n.unwrap()),
    }
    let mut peer = Host::new(theirs, "", &["default"]);
    let mut host = Host::with(ours, "", &["default"], |c| c.full_icrc = true);
    let port = &mut host.workers.get_mut("default").unwrap().port;
    // Joined packets, which are not split on this machine, and single ones.
    let mut tx = Tx::default();
    for i in 0..150 {
        tx.push_raw(To::new(ours), &vec![i; if i == 140 { 40 } else { 600 }]);
    }
    peer.workers.get_mut("default").unwrap().port.send(&mut tx);
    let mut got = Vec::new();
    while port.receive(&mut |a, bytes| got.push((a.from, a.to, bytes[0]))) {}
    assert_eq!(got, (0..150).map(|i| (theirs, ours, i)).collect::<Vec<_>>());
    // Packets of a device: with an ICRC for another Identification than the packet has, and to another address.
    let plain = UdpSocket::bind((theirs, 0)).unwrap();
    open::set(&plain, libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_PROBE);
    let src_port = plain.local_addr().unwrap().port();
    for (ip_id, to) in [(0, ours), (77, ours), (0, theirs)] {
        let e = Envelope { src: theirs, dst: to, src_port, ip_id };
        plain.send_to(&[&[7; 40][..], &icrc(&e, &[7; 40]).to_le_bytes()].concat(), (to, ROCE_PORT)).unwrap();
    }
    got.clear();
    while port.receive(&mut |a, bytes| got.push((a.from, a.to, bytes[0]))) {}
    assert_eq!((got, port.counters().icrc_errors), (vec![(theirs, ours, 7)], 1));
}

#[test]
fn a_worker_hears_the_multicast_groups_that_it_asks_for() {
    let ips = hosts(57);
    let mut host = Host::new(ips[0], "", &["default", "blue"]);
    let wanted: Vec<IpAddr> = vec![[239, 1, 2, 3].into(), [239, 1, 2, 4].into(), [10, 0, 0, 1].into()];
    let made = host.network.join("blue", &wanted);
    assert_eq!(made.iter().map(|m| m.0).collect::<Vec<_>>(), wanted[..2]);
    assert!(host.network.join("blue", &wanted).is_empty(), "it has them");
    let worker = host.workers.get_mut("blue").unwrap();
    worker.port.join(made);
    let device = UdpSocket::bind((ips[1], 0)).unwrap();
    rustix::net::sockopt::set_ip_multicast_if(&device, &[127, 0, 57, 1].into()).unwrap();
    let src_port = device.local_addr().unwrap().port();
    let heard = |host: &mut Host| {
        for to in wanted.iter().filter(|a| a.is_multicast()) {
            let crc = icrc(&Envelope { src: ips[1], dst: *to, src_port, ip_id: 0 }, &[7; 40]);
            device.send_to(&[&[7; 40][..], &crc.to_le_bytes()].concat(), (*to, ROCE_PORT)).unwrap();
        }
        host.qpns().into_iter().map(|(name, q)| (name, q.len())).collect::<Vec<_>>()
    };
    assert_eq!(heard(&mut host), [("blue".to_string(), 2)]);
    let worker = host.workers.get_mut("blue").unwrap();
    worker.port.leave_others(&wanted[1..]);
    assert!(host.network.join("blue", &wanted[1..]).is_empty());
    assert_eq!(heard(&mut host), [("blue".to_string(), 1)]);
    // The worker has closed that socket, so it needs a new one.
    assert_eq!(host.network.join("blue", &wanted).len(), 1);
    let many: Vec<IpAddr> = (0..300u16).map(|i| IpAddr::from([239, 2, (i >> 8) as u8, i as u8])).collect();
    assert_eq!(host.network.join("default", &many).len(), MAX_MULTICAST);
}

/// The configuration and the sockets that a worker had.
type Given = (Enrolment, Vec<OwnedFd>);

/// Kills a host's supervisor. Returns what is left: its directory, its workers, and their configurations.
fn kill(host: Host) -> (Dir, BTreeMap<String, Worker>, Vec<Given>) {
    let Host { dir, mut network, workers, .. } = host;
    let given = workers.keys().map(|g| network.sockets_of(g).unwrap()).collect();
    drop(network);
    (dir, workers, given)
}

#[test]
fn a_new_supervisor_takes_over_the_sockets_of_workers_that_go_on() {
    let ips = hosts(58);
    let mut peer = Host::new(ips[1], "", &["default"]);
    let mut to = |host: &mut Host, qpn: u32| {
        let mut tx = Tx::default();
        packets(&mut tx, ips[0], qpn, 10);
        peer.workers.get_mut("default").unwrap().port.send(&mut tx);
        host.qpns().into_keys().collect::<Vec<_>>()
    };
    let mut host = Host::new(ips[0], "", &["default", "a", "b", "c", "d"]);
    // Makes the order of sockets differ from the order of names.
    host.remove("a");
    host.add("e", 7);
    let qpns: Vec<(String, u32)> = host.workers.iter().map(|(n, w)| (n.clone(), w.enrolment.qpns[0].0 + 5)).collect();
    let more = host.network.more_qpns("d").unwrap()[1].0;
    let (dir, workers, given) = kill(host);
    let c = config(&dir, &[ips[0]], "");
    assert_eq!(open(&c, &dir).err().unwrap().kind(), io::ErrorKind::AddrInUse, "the workers have the port");
    let network = Network::adopt(&c, &dir.0, source(&c), given).unwrap();
    let mut host = Host::of(dir, network, workers);
    let check = |host: &mut Host, to: &mut dyn FnMut(&mut Host, u32) -> Vec<String>| {
        for (name, qpn) in &qpns {
            assert_eq!(to(host, *qpn), [name.as_str()]);
        }
        assert_eq!(to(host, more), ["d"]);
    };
    check(&mut host, &mut to);
    host.add("f", 8);
    check(&mut host, &mut to);
    host.remove("f");
    // A second takeover gives the same result.
    let (dir, workers, given) = kill(host);
    let network = Network::adopt(&c, &dir.0, source(&c), given).unwrap();
    let mut host = Host::of(dir, network, workers);
    check(&mut host, &mut to);
    // A worker was lost meanwhile, so the assignment of packets to sockets is unknown.
    let (dir, mut workers, mut given) = kill(host);
    given.remove(1);
    workers.remove("b");
    assert_eq!(Network::adopt(&c, &dir.0, source(&c), given).err().unwrap().kind(), io::ErrorKind::InvalidData);
    drop(workers);
    assert!(open(&c, &dir).is_ok());
}

#[test]
fn a_thousand_groups_have_their_packets() {
    let (descriptors, needed) = (rustix::process::Resource::Nofile, Some(8192));
    let mut limit = rustix::process::getrlimit(descriptors);
    if limit.current < needed {
        limit.current = needed;
        if let Err(e) = rustix::process::setrlimit(descriptors, limit) {
            return println!("skipped: {e}");
        }
    }
    let ips = hosts(59);
    let vnis: String =
        (0..1000).map(|i| format!("group g{i} vni {}\n10.0.0.1 g{i} {}\n", 16_000 * (i + 1), ips[1])).collect();
    let mut peer = Host::new(ips[1], "", &["default"]);
    let mut host = Host::new(ips[0], "", &["default"]);
    let began = Instant::now();
    for i in 0..1000 {
        host.network.enroll(&format!("g{i}"), i + 1).unwrap();
    }
    println!("{:?} for each group", began.elapsed() / 1000);
    host.set_peers(&vnis);
    for i in [0, 1, 499, 998, 999] {
        let name = format!("g{i}");
        let (enrolment, sockets) = host.network.sockets_of(&name).unwrap();
        let (port, tunnel) = open_worker(&enrolment, sockets).unwrap();
        let mut tx = Tx::default();
        packets(&mut tx, ips[0], enrolment.qpns[0].0 + 77, 20);
        host.workers.insert(name.clone(), Worker { enrolment, port, tunnel });
        peer.workers.get_mut("default").unwrap().port.send(&mut tx);
        assert_eq!(host.qpns().into_keys().collect::<Vec<_>>(), [name.as_str()]);
        let from = peer.tunnel("default").sockets().next().unwrap();
        from.send_to(&[&vxlan(16_000 * (i + 1))[..], &frame([6, 0, 0, 0, 0, 1])].concat(), (ips[0], VXLAN_PORT))
            .unwrap();
        host.drain(&name);
        assert_eq!(host.tunnel(&name).drops(), TunnelDrops { no_group: 1, ..TunnelDrops::default() });
    }
}
