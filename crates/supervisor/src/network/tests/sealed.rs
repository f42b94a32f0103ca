//! Groups with a secret.

use unirdma_ipc::secrets::{GroupSecrets, Secret, Secrets, TAIL_BYTES};
use unirdma_rnic::Sealed;
use unirdma_worker::kind;

use super::*;
use crate::network::SealedWith;

fn secret(n: u8) -> Secret {
    Secret::new(n, &[n; 32])
}

impl Host {
    fn set_secrets(&mut self, group: &str, secrets: Option<Secrets>) {
        self.set_all_secrets(group, GroupSecrets { own: secrets, ..GroupSecrets::default() });
    }

    fn set_all_secrets(&mut self, group: &str, secrets: GroupSecrets) {
        let sealed = SealedWith { own: secrets.own.is_some(), others: secrets.with.keys().cloned().collect() };
        self.network.set_sealed(group, sealed);
        self.tunnel(group).set_secrets(secrets);
    }

    /// Number of RoCEv2 packets that a group has received.
    fn count(&mut self, group: &str) -> usize {
        let mut n = 0;
        let port = &mut self.workers.get_mut(group).unwrap().port;
        while port.receive(&mut |_, _| n += 1) {}
        n
    }

    /// Dropped packets: unsealed, with a wrong tag, replayed.
    fn seal_drops(&self, group: &str) -> [u64; 3] {
        let d = self.tunnel(group).seal_info().drops;
        [d.unsealed, d.wrong_tag, d.replayed]
    }
}

/// A send buffer that leaves room for the tail of sealed packets.
fn sealed_tx() -> Tx {
    let mut tx = Tx::default();
    tx.set_sealed(Sealed { tail: TAIL_BYTES, all: true, ..Sealed::default() });
    tx
}

/// The addresses of two hosts with the default group and of a plain device, and the two hosts.
fn two(third: u8) -> ([IpAddr; 3], Host, Host) {
    let ips = hosts(third);
    let [a, b, c] = [ips[0], ips[1], ips[2]];
    let mut h0 = Host::new(a, &format!("10.0.0.2 default {b}\n{c} default {c} foreign"), &["default"]);
    let mut h1 = Host::new(b, &format!("10.0.0.1 default {a}\n{c} default {c} foreign"), &["default"]);
    settle(&mut [&mut h0, &mut h1]);
    ([a, b, c], h0, h1)
}

/// Lets two hosts finish their handshakes. Returns the frames that the second one received.
fn talk(h0: &Host, h1: &Host) -> Vec<Vec<u8>> {
    (0..4).flat_map(|_| [h0.drain("default"), h1.drain("default")].into_iter().nth(1)).flatten().collect()
}

fn sealed(third: u8) -> ([IpAddr; 3], Host, Host) {
    let (ips, mut h0, mut h1) = two(third);
    for h in [&mut h0, &mut h1] {
        h.set_secrets("default", Some(Secrets::one(secret(7))));
    }
    assert!(talk(&h0, &h1).is_empty());
    (ips, h0, h1)
}

fn send(h: &mut Host, tx: &mut Tx) -> u64 {
    let port = &mut h.workers.get_mut("default").unwrap().port;
    port.send(tx);
    port.counters().send_errors
}

#[test]
fn what_hosts_with_a_secret_say_is_sealed_and_nothing_else_counts() {
    let ([a, b, c], mut h0, mut h1) = sealed(64);
    assert!(h0.tunnel("default").seal_info().silent.is_empty() && h1.info().silent.is_empty());
    let frame = frame([6, 0, 0, 0, 0, 1]);
    let qpn = h1.workers["default"].enrolment.qpns[0].0 + 5;
    for _ in 0..3 {
        h0.tunnel("default").send(0, &frame);
        assert_eq!(talk(&h0, &h1), std::slice::from_ref(&frame));
        let mut tx = sealed_tx();
        packets(&mut tx, b, qpn, 200);
        assert_eq!((send(&mut h0, &mut tx), h1.count("default")), (0, 200));
    }
    assert_eq!(h1.seal_drops("default"), [0; 3]);
    // Packets of attackers from the host's address and port: in the form of packets without a secret, and as if they
    // had a secret.
    let plain = |from: IpAddr, qpn: u32, port: u16| {
        let [_, x, y, z] = qpn.to_be_bytes();
        let body = [&[4, 0, 0xff, 0xff, 0, x, y, z][..], &[9; 600]].concat();
        let e = Envelope { src: from, dst: b, src_port: port, ip_id: 0 };
        [&body[..], &icrc(&e, &body).to_le_bytes()].concat()
    };
    let forger = UdpSocket::bind((a, 0)).unwrap();
    let forged = plain(a, qpn, forger.local_addr().unwrap().port());
    forger.send_to(&forged, (b, ROCE_PORT)).unwrap();
    forger.send_to(&[&forged[..], &[0; TAIL_BYTES]].concat(), (b, ROCE_PORT)).unwrap();
    forger.send_to(&[4, 0], (b, ROCE_PORT)).unwrap();
    assert_eq!((h1.count("default"), h1.seal_drops("default")), (0, [1, 2, 0]));
    let own = h0.workers["default"].tunnel.sockets().next().unwrap().try_clone().unwrap();
    let mut header = vxlan(1);
    own.send_to(&[&header[..], &frame].concat(), (b, VXLAN_PORT)).unwrap();
    for (kind, n) in [(kind::FRAME, 2), (kind::DATAGRAM, 3), (kind::HELLO, 4)] {
        header[kind::AT] = kind;
        own.send_to(&[&header[..], &frame].concat(), (b, VXLAN_PORT)).unwrap();
        assert!(h1.drain("default").is_empty());
        assert_eq!(h1.seal_drops("default")[1], 1 + n, "kind {kind}");
    }
    assert_eq!(h1.seal_drops("default"), [2, 5, 0]);
    // Sealed packets are replayed, also to another address than they were sealed for.
    let theirs = h1.workers["default"].tunnel.sockets().next().unwrap().try_clone().unwrap();
    h0.tunnel("default").send(0, &frame);
    let mut bytes = vec![0; 2000];
    let (n, _) = theirs.recv_from(&mut bytes).unwrap();
    assert!(!bytes[..n].windows(frame.len()).any(|w| w == frame), "it can be read on the way");
    for _ in 0..3 {
        own.send_to(&bytes[..n], (b, VXLAN_PORT)).unwrap();
    }
    assert_eq!((h1.drain("default"), h1.seal_drops("default")), (vec![frame.clone()], [2, 5, 2]));
    theirs.send_to(&bytes[..n], (a, VXLAN_PORT)).unwrap();
    assert_eq!((h0.drain("default").len(), h0.seal_drops("default")), (0, [0, 1, 0]));
    // A plain device works as before, in both directions.
    let device = UdpSocket::bind((c, ROCE_PORT)).unwrap();
    device.send_to(&plain(c, qpn, ROCE_PORT), (b, ROCE_PORT)).unwrap();
    assert_eq!((h1.count("default"), h1.seal_drops("default")), (1, [2, 5, 2]));
    let mut tx = sealed_tx();
    tx.push_raw(To { from: Some(a), ..To::new(c) }, &[9; 40]);
    send(&mut h0, &mut tx);
    let (n, from) = device.recv_from(&mut bytes).unwrap();
    let e = Envelope { src: a, dst: c, src_port: from.port(), ip_id: 0 };
    assert_eq!(bytes[..n], [&[9; 40][..], &icrc(&e, &[9; 40]).to_le_bytes()].concat());
}

#[test]
fn what_the_network_does_not_take_at_once_is_sealed_once() {
    let ([a, b, _], mut h0, mut h1) = sealed(68);
    let qpn = h1.workers["default"].enrolment.qpns[0].0 + 5;
    let mut tx = sealed_tx();
    for _ in 0..10 {
        packets(&mut tx, b, qpn, 7);
        // This destination is not permitted, so the system call ends at this packet.
        tx.push_raw(To { from: Some(a), ..To::new(IpAddr::from([255; 4])) }, &[9; 40]);
        packets(&mut tx, b, qpn, 70);
    }
    assert_eq!((send(&mut h0, &mut tx), h1.count("default"), h1.seal_drops("default")), (10, 770, [0; 3]));
}

#[test]
fn a_host_without_the_secret_gets_nothing_through_and_is_told_of() {
    let ([a, b, _], mut h0, mut h1) = two(65);
    let frame = frame([6, 0, 0, 0, 0, 1]);
    h1.set_secrets("default", Some(Secrets::one(secret(7))));
    let qpn = h1.workers["default"].enrolment.qpns[0].0 + 5;
    h0.tunnel("default").send(0, &frame);
    let mut tx = Tx::default();
    packets(&mut tx, b, qpn, 3);
    send(&mut h0, &mut tx);
    assert_eq!((talk(&h0, &h1).len(), h1.count("default"), h1.seal_drops("default")), (0, 0, [4, 0, 0]));
    assert_eq!(h1.tunnel("default").seal_info().silent, [a]);
    // A host sends nothing to a peer that cannot open it.
    h1.tunnel("default").send(0, &frame);
    tx = sealed_tx();
    packets(&mut tx, a, qpn, 3);
    assert_eq!(send(&mut h1, &mut tx), 3);
    assert_eq!((h0.drain("default").len(), h0.count("default")), (0, 0));
    // Another secret with the same number does not work either.
    h0.set_secrets("default", Some(Secrets::one(Secret::new(7, &[8; 32]))));
    assert!(talk(&h0, &h1).is_empty());
    assert_eq!((h0.tunnel("default").seal_info().silent, h1.tunnel("default").seal_info().silent), (vec![b], vec![a]));
    assert!(h1.seal_drops("default")[1] > 0);
    // The right secret works, and so does no secret on both sides.
    h0.set_secrets("default", Some(Secrets::one(secret(7))));
    talk(&h0, &h1);
    h0.tunnel("default").send(0, &frame);
    assert_eq!(talk(&h0, &h1), std::slice::from_ref(&frame));
    h0.set_secrets("default", None);
    h1.set_secrets("default", None);
    settle(&mut [&mut h0, &mut h1]);
    h0.tunnel("default").send(0, &frame);
    assert_eq!(talk(&h0, &h1), [frame]);
}

#[test]
fn secrets_change_one_host_after_the_other_and_no_packet_is_lost() {
    let ([_, b, _], mut h0, mut h1) = sealed(66);
    let frame = frame([6, 0, 0, 0, 0, 1]);
    let qpn = h1.workers["default"].enrolment.qpns[0].0 + 5;
    let (mut secrets, mut tx) = ([Secrets::one(secret(7)), Secrets::one(secret(7))], sealed_tx());
    let mut pass = |h0: &mut Host, h1: &mut Host| {
        // Packets that were sealed before the hosts agree on the new secret arrive, too.
        h0.tunnel("default").send(0, &frame);
        packets(&mut tx, b, qpn, 5);
        assert_eq!(send(h0, &mut tx), 0);
        let before: Vec<_> = (0..3).flat_map(|_| h0.drain("default")).collect();
        assert!(before.is_empty());
        assert_eq!((talk(h0, h1).len(), h1.count("default")), (1, 5));
    };
    for n in 8..14 {
        for i in [0, 1] {
            secrets[i].rotate(secret(n)).unwrap();
            let host = if i == 0 { &mut h0 } else { &mut h1 };
            host.set_secrets("default", Some(secrets[i].clone()));
            (0..3).for_each(|_| pass(&mut h0, &mut h1));
            let behind = h0.tunnel("default").seal_info().behind;
            assert_eq!(behind, [[b]][i..].concat(), "the other host has the new one, too, or not yet");
        }
    }
    for i in [0, 1] {
        secrets[i].forget_others();
        let host = if i == 0 { &mut h0 } else { &mut h1 };
        host.set_secrets("default", Some(secrets[i].clone()));
        pass(&mut h0, &mut h1);
    }
    assert_eq!((h1.seal_drops("default"), h1.tunnel("default").seal_info().secrets), ([0; 3], vec![13]));
}

#[test]
fn nobody_without_the_secret_can_disagree_about_a_number() {
    let ([a, b, _], mut h0, mut h1) = sealed(67);
    let frame = frame([6, 0, 0, 0, 0, 1]);
    // An attacker announces another number, as a host with another peers file would.
    let mut liar = crate::network::vni_agreement::Agreement::default();
    let mut members = Members::new("default", 9);
    members.hosts.insert(b);
    liar.set_groups([&members].into_iter(), 77);
    let own = h0.workers["default"].tunnel.sockets().next().unwrap().try_clone().unwrap();
    for m in liar.messages(b) {
        own.send_to(&m, (b, VXLAN_PORT)).unwrap();
    }
    settle(&mut [&mut h0, &mut h1]);
    assert!(h1.info().disagreements.is_empty() && h1.info().silent.is_empty());
    h0.tunnel("default").send(0, &frame);
    assert_eq!(talk(&h0, &h1), std::slice::from_ref(&frame));
    // If the host's number really differs, no frame gets through.
    h0.set_peers(&format!("group default vni 9\n10.0.0.2 default {b}\n"));
    h0.tunnel("default").send(0, &frame);
    assert!(talk(&h0, &h1).is_empty());
    h1.set_peers(&format!("group default vni 9\n10.0.0.1 default {a}\n"));
    talk(&h0, &h1);
    h0.tunnel("default").send(0, &frame);
    assert_eq!(talk(&h0, &h1), [frame]);
}

/// The peers file of the hosts of two groups that a rule joins.
fn joined_places(red: IpAddr, blue: IpAddr) -> String {
    format!(
        "group red vni 7\ngroup blue vni 8\n10.0.0.1 red {red}\n10.0.0.2 blue {blue}\nrule allow from group:red to group:blue both\n"
    )
}

fn pair(other: &str, secrets: &Secrets, own: Option<Secrets>) -> GroupSecrets {
    GroupSecrets { own, with: BTreeMap::from([(other.to_string(), secrets.clone())]) }
}

/// A frame of red's 10.0.0.1 to blue's 10.0.0.2, with the fields that the tunnel reads.
fn ip_frame() -> Vec<u8> {
    let mut f = frame([6, 0, 0, 0, 0, 1]);
    f[12..14].copy_from_slice(&[8, 0]);
    f.truncate(ETH_BYTES);
    f.extend_from_slice(&[0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2, 0, 9, 0, 9, 0, 8, 0, 0]);
    f
}

fn across(h: &Host) {
    h.tunnel("red").send_across(0, "10.0.0.2".parse().unwrap(), &ip_frame());
}

/// Sends packets of red to a QP of blue. Returns the number of packets that could not be sent.
fn send_across(h: &mut Host, tx: &mut Tx, to: IpAddr, qpn: u32, n: u8) -> u64 {
    let [_, x, y, z] = qpn.to_be_bytes();
    for i in 0..n {
        tx.push_raw(To { across: Some((8, 7)), ..To::new(to) }, &[4, 0, 0x80, 8, 0, x, y, z, i, i, i, i, i]);
    }
    let port = &mut h.workers.get_mut("red").unwrap().port;
    let before = port.counters().send_errors;
    port.send(tx);
    port.counters().send_errors - before
}

/// The packets received at blue's port: the group of each sender, and whether it was sealed.
fn came(h: &mut Host) -> Vec<(Option<u32>, bool)> {
    let mut all = Vec::new();
    let port = &mut h.workers.get_mut("blue").unwrap().port;
    while port.receive(&mut |a, _| all.push((a.source, a.sealed))) {}
    all
}

fn say_all(hosts: &[&Host]) -> Vec<Vec<u8>> {
    let mut frames = Vec::new();
    for _ in 0..5 {
        for h in hosts {
            h.workers.keys().for_each(|g| frames.extend(h.drain(g)));
        }
    }
    frames
}

#[test]
fn joined_groups_talk_under_a_secret_of_the_two_and_under_no_other() {
    let ips = hosts(70);
    let [a, b] = [ips[0], ips[1]];
    let text = joined_places(a, b);
    let (mut h0, mut h1) = (Host::new(a, &text, &["red"]), Host::new(b, &text, &["blue"]));
    settle(&mut [&mut h0, &mut h1]);
    let qpn = h1.workers["blue"].enrolment.qpns[0].0 + 5;
    // Without any secret.
    across(&h0);
    assert_eq!(say_all(&[&h1]), [ip_frame()]);
    let mut tx = Tx::default();
    assert_eq!((send_across(&mut h0, &mut tx, b, qpn, 2), came(&mut h1)), (0, vec![(None, false); 2]));
    // Each group has only its own secret. Nothing passes, even if both secrets are equal.
    for (h, group) in [(&mut h0, "red"), (&mut h1, "blue")] {
        h.set_secrets(group, Some(Secrets::one(secret(7))));
    }
    assert!(say_all(&[&h0, &h1]).is_empty());
    across(&h0);
    let mut tx = sealed_tx();
    assert_eq!((send_across(&mut h0, &mut tx, b, qpn, 2), came(&mut h1).len()), (2, 0));
    assert!(say_all(&[&h0, &h1]).is_empty());
    let info = h0.tunnel("red").seal_info();
    assert_eq!((info.joined.len(), &*info.joined[0].group, info.joined[0].secrets.len()), (1, "blue", 0));
    // With a secret of the pair they can talk.
    let both = Secrets::one(secret(9));
    h0.set_all_secrets("red", pair("blue", &both, Some(Secrets::one(secret(7)))));
    h1.set_all_secrets("blue", pair("red", &both, Some(Secrets::one(secret(7)))));
    assert!(say_all(&[&h0, &h1]).is_empty());
    for _ in 0..3 {
        across(&h0);
        assert_eq!(say_all(&[&h1]), [ip_frame()]);
        assert_eq!((send_across(&mut h0, &mut tx, b, qpn, 70), came(&mut h1)), (0, vec![(Some(7), true); 70]));
    }
    let silent = |h: &Host, g: &str| h.tunnel(g).seal_info().joined[0].silent.clone();
    assert!(silent(&h0, "red").is_empty() && silent(&h1, "blue").is_empty());
    assert_eq!(h1.seal_drops("blue"), [0; 3]);
    // Attacks from red's host without the secret of the two groups: a plain packet, and a replay.
    let own = h0.workers["red"].tunnel.sockets().next().unwrap().try_clone().unwrap();
    let theirs = h1.workers["blue"].tunnel.sockets().next().unwrap().try_clone().unwrap();
    let plain = [&unirdma_formats::net::vxlan_from(8, 7)[..], &ip_frame()].concat();
    own.send_to(&plain, (b, VXLAN_PORT)).unwrap();
    assert!(say_all(&[&h1]).is_empty());
    assert_eq!(h1.seal_drops("blue"), [1, 0, 0]);
    across(&h0);
    let mut bytes = vec![0; 2000];
    let (n, _) = theirs.recv_from(&mut bytes).unwrap();
    for _ in 0..3 {
        own.send_to(&bytes[..n], (b, VXLAN_PORT)).unwrap();
    }
    assert_eq!((say_all(&[&h1]), h1.seal_drops("blue")), (vec![ip_frame()], [1, 0, 2]));
    // The same packet without the sender's group, and sent back to its origin.
    bytes[1..4].fill(0);
    own.send_to(&bytes[..n], (b, VXLAN_PORT)).unwrap();
    assert!(say_all(&[&h1]).is_empty());
    bytes[1..7].copy_from_slice(&[0, 0, 8, 0, 0, 7]);
    theirs.send_to(&bytes[..n], (a, VXLAN_PORT)).unwrap();
    assert!(say_all(&[&h0]).is_empty());
    assert_eq!(h0.seal_drops("red")[1], 1);
    // A new secret replaces the first one on one host after the other, while packets are sent.
    let mut next = both.clone();
    next.rotate(secret(10)).unwrap();
    for i in [0, 1] {
        let (h, group, other) = if i == 0 { (&mut h0, "red", "blue") } else { (&mut h1, "blue", "red") };
        h.set_all_secrets(group, pair(other, &next, Some(Secrets::one(secret(7)))));
        for _ in 0..3 {
            assert_eq!((send_across(&mut h0, &mut tx, b, qpn, 5), came(&mut h1).len()), (0, 5));
            across(&h0);
            assert_eq!(say_all(&[&h0, &h1]), [ip_frame()]);
        }
    }
    let numbers = h1.tunnel("blue").seal_info().joined[0].clone();
    assert_eq!((numbers.sends_with, numbers.behind), (Some(10), vec![]));
    // Without the rule the groups no longer know each other, and packets sealed for the session are dropped.
    across(&h0);
    h1.set_peers(&text.replace("rule allow", "#"));
    assert!(say_all(&[&h1]).is_empty() && h1.tunnel("blue").seal_info().joined.is_empty());
    assert_eq!((send_across(&mut h0, &mut tx, b, qpn, 5), came(&mut h1).len()), (0, 0));
}

#[test]
fn only_packets_between_the_two_groups_are_sealed_if_only_the_two_have_a_secret() {
    let ips = hosts(71);
    let [a, b] = [ips[0], ips[1]];
    let text = joined_places(a, b) + &format!("10.0.0.3 blue {a}\n10.0.0.4 red {b}\n");
    let (mut h0, mut h1) = (Host::new(a, &text, &["red", "blue"]), Host::new(b, &text, &["red", "blue"]));
    settle(&mut [&mut h0, &mut h1]);
    let both = Secrets::one(secret(9));
    for h in [&mut h0, &mut h1] {
        h.set_all_secrets("red", pair("blue", &both, None));
        h.set_all_secrets("blue", pair("red", &both, None));
    }
    assert!(say_all(&[&h0, &h1]).is_empty());
    settle(&mut [&mut h0, &mut h1]);
    assert!(h0.info().silent.is_empty() && h1.info().silent.is_empty());
    let qpn = h1.workers["blue"].enrolment.qpns[0].0 + 5;
    // Packets within blue stay unsealed, although the same host seals red's packets. The RNIC learns the sender's group
    // and whether a packet was sealed.
    let mut tx = Tx::default();
    packets(&mut tx, b, qpn, 3);
    h0.workers.get_mut("blue").unwrap().port.send(&mut tx);
    assert_eq!(came(&mut h1), [(None, false); 3]);
    tx.set_sealed(h0.tunnel("red").sealed());
    assert_eq!((send_across(&mut h0, &mut tx, b, qpn, 3), came(&mut h1)), (0, vec![(Some(7), true); 3]));
    across(&h0);
    assert_eq!(say_all(&[&h1]), [ip_frame()]);
    assert_eq!(h1.seal_drops("blue"), [0; 3]);
    // An unsealed frame that names red as its sender's group.
    let own = h0.workers["red"].tunnel.sockets().next().unwrap().try_clone().unwrap();
    own.send_to(&[&unirdma_formats::net::vxlan_from(8, 7)[..], &ip_frame()].concat(), (b, VXLAN_PORT)).unwrap();
    assert!(say_all(&[&h1]).is_empty());
    assert_eq!(h1.seal_drops("blue"), [1, 0, 0]);
}

#[test]
fn joined_groups_of_one_host_talk_under_their_secret() {
    let a = hosts(72)[0];
    let text = joined_places(a, a);
    let mut h = Host::new(a, &text, &["red", "blue"]);
    h.plan();
    let both = Secrets::one(secret(9));
    for (group, other) in [("red", "blue"), ("blue", "red")] {
        h.set_all_secrets(group, pair(other, &both, Some(Secrets::one(secret(group.len() as u8)))));
    }
    assert!(say_all(&[&h]).is_empty());
    across(&h);
    assert_eq!(say_all(&[&h]), [ip_frame()]);
    let qpn = h.workers["blue"].enrolment.qpns[0].0 + 5;
    let mut tx = sealed_tx();
    assert_eq!((send_across(&mut h, &mut tx, a, qpn, 4), came(&mut h)), (0, vec![(Some(7), true); 4]));
    assert_eq!((h.seal_drops("red"), h.seal_drops("blue")), ([0; 3], [0; 3]));
}
