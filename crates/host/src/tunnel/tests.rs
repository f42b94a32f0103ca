use super::*;

fn hosts(third: u8) -> Vec<IpAddr> {
    (1..=3).map(|i| IpAddr::from([127, 0, third, i])).collect()
}

fn members(name: &str, vni: u32, at: &[IpAddr]) -> Members {
    Members { hosts: at.iter().copied().collect(), ..Members::new(name, vni) }
}

/// Everything that waits, until nothing comes any more.
fn drain(t: &Tunnel) -> Vec<Vec<u8>> {
    let mut buffer = vec![0; 2000];
    let mut frames = Vec::new();
    while let Some(came) = t.receive(0, &mut buffer) {
        if let Tunneled::Frame { frame, .. } = came {
            frames.push(frame.to_vec());
        }
    }
    frames
}

fn settle(tunnels: &[&Tunnel]) {
    for _ in 0..6 {
        tunnels.iter().for_each(|t| assert!(drain(t).is_empty()));
    }
}

fn frame(src: [u8; 6]) -> Vec<u8> {
    [&[0xff; 6][..], &src, &[8, 0], &[7; 40]].concat()
}

#[test]
fn frames_come_from_peers_of_the_group_only() {
    let ips = hosts(48);
    let t: Vec<Tunnel> = ips.iter().map(|&ip| Tunnel::open(&[ip]).unwrap()).collect();
    t[0].set_groups(HashMap::from([(3, members("blue", 5, &[ips[1]]))]));
    t[1].set_groups(HashMap::from([(7, members("blue", 5, &[ips[0]])), (8, members("red", 6, &[]))]));
    t[2].set_groups(HashMap::from([(7, members("blue", 5, &[ips[1]])), (2, members("red", 6, &[ips[1]]))]));
    settle(&[&t[0], &t[1], &t[2]]);
    assert!(t[0].info().silent.is_empty() && t[1].info().silent.is_empty());
    // Nobody has told host 1 that host 2 is a peer, so it does not answer.
    assert_eq!((t[2].info().silent, t[1].info().drops.not_a_peer > 0), (vec![ips[1]], true));
    let frame = frame([6, 0, 0, 0, 0, 1]);
    let mut buffer = vec![0; 2000];
    t[0].send(3, &frame);
    assert_eq!(t[1].receive(0, &mut buffer), Some(Tunneled::Frame { group: 7, frame: &frame }));
    let mut datagram = frame.clone();
    datagram[6..12].copy_from_slice(&DATAGRAM_MAC);
    t[0].send(3, &datagram);
    let expected = Tunneled::Datagram { from: ips[0], group: 7, packet: &datagram[ETH_BYTES..] };
    assert_eq!(t[1].receive(0, &mut buffer), Some(expected));
    // Host 2 is nobody to host 1, nor has host 1 members of `red` elsewhere.
    let before = t[1].info().drops;
    t[2].send(7, &frame);
    t[2].send(2, &frame);
    assert!(drain(&t[1]).is_empty());
    assert_eq!(t[1].info().drops, TunnelDrops { no_group: before.no_group + 2, ..before });
    // Whoever cannot have a peer's port 4789 takes another one.
    let other = UdpSocket::bind((ips[0], 0)).unwrap();
    other.send_to(&[&vxlan(5)[..], &frame].concat(), (ips[1], VXLAN_PORT)).unwrap();
    assert!(drain(&t[1]).is_empty());
    assert_eq!(t[1].info().drops.not_a_peer, before.not_a_peer + 1);
}

#[test]
fn a_number_that_means_another_group_there_leads_nowhere() {
    let ips = hosts(49);
    let t: Vec<Tunnel> = ips[..2].iter().map(|&ip| Tunnel::open(&[ip]).unwrap()).collect();
    let frame = frame([6, 0, 0, 0, 0, 1]);
    // Before the other host has said anything.
    t[0].set_groups(HashMap::from([(0, members("default", 1, &[ips[1]])), (1, members("blue", 2, &[ips[1]]))]));
    t[0].send(1, &frame);
    t[1].set_groups(HashMap::from([(0, members("default", 2, &[ips[0]]))]));
    let mut buffer = vec![0; 2000];
    while t[1].receive(0, &mut buffer).is_some_and(|came| came == Tunneled::Nothing) {}
    settle(&[&t[0], &t[1]]);
    t[0].send(1, &frame);
    assert!(drain(&t[1]).is_empty());
    assert!(t[1].info().drops.not_agreed >= 1);
    let said = |i: usize| t[i].info().disagreements.iter().map(ToString::to_string).collect::<Vec<_>>();
    assert!(
        said(0)[0].starts_with("VNI 2 is group blue at 127.0.49.1, this host, and group default at 127.0.49.2;"),
        "{:?}",
        said(0)
    );
    assert!(said(0)[1].starts_with("group default has VNI 1 at 127.0.49.1, this host, and 2 at 127.0.49.2;"));
    assert_eq!((said(0).len(), said(1).len()), (2, 2));
    // One of the two changes its file.
    t[1].set_groups(HashMap::from([(0, members("default", 1, &[ips[0]]))]));
    settle(&[&t[0], &t[1]]);
    assert!(said(0).is_empty() && said(1).is_empty());
    t[0].send(0, &frame);
    assert_eq!(drain(&t[1]), [frame]);
}

#[test]
fn a_host_claims_no_address_of_another_one() {
    let ips = hosts(50);
    let t: Vec<Tunnel> = ips.iter().map(|&ip| Tunnel::open(&[ip]).unwrap()).collect();
    let address: [IpAddr; 3] = [1, 2, 3].map(|i| [10, 0, 0, i].into());
    for (i, t) in t.iter().enumerate() {
        let others = (0..3).filter(|&j| j != i);
        let m = members("default", 1, &others.clone().map(|j| ips[j]).collect::<Vec<_>>());
        let places = others.map(|j| (address[j], ips[j])).collect();
        t.set_groups(HashMap::from([(0, Members { places, ..m })]));
    }
    settle(&[&t[0], &t[1], &t[2]]);
    let arp = |link: [u8; 6], sender: u8| {
        let head = [0, 1, 8, 0, 6, 4, 0, 2];
        [&[0xff; 6][..], &link, &[8, 6], &head, &link, &[10, 0, 0, sender], &[0; 10]].concat()
    };
    let macs: Vec<[u8; 6]> = (1..=3).map(|i| [2, 0, 10, 0, 0, i]).collect();
    // Host 1 with its own MAC and address, and as a router with another source; then as host 2.
    let (own, routed) = (arp(macs[1], 2), frame(macs[1]));
    t[1].send(0, &own);
    t[1].send(0, &routed);
    assert_eq!(drain(&t[0]), [own, routed]);
    for stolen in [arp(macs[1], 3), arp(macs[2], 2), frame(macs[2]), frame([2, 9, 10, 0, 0, 3]), frame([3; 6])] {
        let before = t[0].info().drops;
        t[1].send(0, &stolen);
        assert!(drain(&t[0]).is_empty(), "{stolen:02x?}");
        assert_eq!(t[0].info().drops, TunnelDrops { address: before.address + 1, ..before });
    }
    // Of an address that no file places, the first host that uses it has it.
    let guest = frame([6, 0, 0, 0, 0, 9]);
    t[2].send(0, &guest);
    assert_eq!(drain(&t[0]).len(), 1);
    t[1].send(0, &guest);
    assert!(drain(&t[0]).is_empty());
}

#[test]
fn what_the_network_loses_is_said_again() {
    let ips = hosts(51);
    let t: Vec<Tunnel> = ips[..2].iter().map(|&ip| Tunnel::open(&[ip]).unwrap()).collect();
    for (i, t) in t.iter().enumerate() {
        t.set_groups(HashMap::from([(0, members("default", 1, &[ips[1 - i]]))]));
    }
    let mut lost = [0; 2000];
    while t.iter().any(|t| t.sockets[0].recv_from(&mut lost).is_ok()) {}
    settle(&[&t[0], &t[1]]);
    assert_eq!((t[0].info().silent, t[1].info().silent), (vec![ips[1]], vec![ips[0]]));
    let mut ready = [rustix::event::PollFd::from_borrowed_fd(t[0].timer(), rustix::event::PollFlags::IN)];
    let limit = rustix::time::Timespec { tv_sec: 10, tv_nsec: 0 };
    assert_eq!(rustix::event::poll(&mut ready, Some(&limit)), Ok(1));
    t[0].on_timer();
    settle(&[&t[1], &t[0]]);
    assert!(t.iter().all(|t| t.info().silent.is_empty()));
}
