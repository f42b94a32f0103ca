//! A capture holds whole packets with right ICRCs, of the network and of messages that never left the host.

use unirdma_abi as abi;
use unirdma_formats::net::{ETH_BYTES, Flow, VXLAN_BYTES, VXLAN_PORT};
use unirdma_formats::pcap::RECORD_BYTES;
use unirdma_formats::wire::{ICRC_BYTES, Packet, icrc};
use unirdma_formats::{QpType, WrOpcode};
use unirdma_rnic::{Capture, Captured};
use unirdma_simkit::net::{Faults, Net, gid, host};
use unirdma_simkit::*;

/// The captured packets of a host: source, destination and opcode of each, all checked.
fn captured(net: &mut Net, at: usize) -> Vec<(String, String, String)> {
    let mut all = Captured::default();
    net.rnics[at].take_captured(&mut all);
    let mut packets = Vec::new();
    all.records(|r| {
        let (mut flow, mut payload) = Flow::parse(&r[RECORD_BYTES..]).expect("IP and UDP");
        if flow.dst_port == VXLAN_PORT {
            (flow, payload) = Flow::parse(&payload[VXLAN_BYTES + ETH_BYTES..]).expect("IP and UDP in VXLAN");
        }
        let (body, crc) = payload.split_last_chunk::<ICRC_BYTES>().unwrap();
        assert_eq!(icrc(&flow.envelope(), body).to_le_bytes(), *crc, "ICRC");
        let p = Packet::parse(body).unwrap();
        packets.push((flow.src.to_string(), flow.dst.to_string(), p.opcode.to_string()));
    });
    packets
}

fn start(net: &mut Net, at: usize, vrnic: Option<unirdma_rnic::VrnicId>) {
    net.rnics[at].start_capture(Capture { vrnic, snap: 65_535, epoch_ns: 5, hosts: vec![host(at)] });
}

fn strings(of: &[(&str, &str, &str)]) -> Vec<(String, String, String)> {
    of.iter().map(|(a, b, c)| (a.to_string(), b.to_string(), c.to_string())).collect()
}

fn post_all(net: &mut Net) {
    let (to, data) = (net.ends[1].sge(0, 5000), net.ends[0].sge(0, 1500));
    net.ends[1].recv(1, &[to]);
    net.ends[0].post(abi::SqWqe { imm: 5, ..wqe(WrOpcode::SendImm, 1) }, &[data]);
    let eight = net.ends[0].sge(0, 8);
    let add = net.remote(WrOpcode::FetchAdd, 2, 0);
    net.ends[0].post(add, &[eight]);
    let read = net.remote(WrOpcode::Read, 3, 0);
    net.ends[0].post(read, &[data]);
    let bad = abi::SqWqe { rkey: 1, ..net.remote(WrOpcode::Write, 4, 0) };
    net.ends[0].post(bad, &[data]);
    net.run(SECOND);
}

const ALL_OF_IT: [&str; 10] = [
    "RC SEND first",
    "RC SEND last with immediate",
    "RC ACK",
    "RC fetch and add",
    "RC atomic ACK",
    "RC READ request",
    "RC READ response first",
    "RC READ response last",
    "RC WRITE first",
    "RC ACK",
];

#[test]
fn messages_of_one_host_are_the_packets_that_they_would_have_been() {
    let mut net = Net::hosts(1, &[QpType::Rc, QpType::Rc], 3, Faults::default());
    net.connect(QpType::Rc, 0, 1, &|a| a);
    net.connect(QpType::Rc, 1, 0, &|a| a);
    start(&mut net, 0, None);
    post_all(&mut net);
    let got = captured(&mut net, 0);
    assert_eq!(got.iter().map(|p| p.2.as_str()).collect::<Vec<_>>(), ALL_OF_IT);
    assert_eq!((got[0].0.as_str(), got[0].1.as_str()), ("10.0.0.1", "10.0.0.2"));
    assert_eq!((got[2].0.as_str(), got[2].1.as_str()), ("10.0.0.2", "10.0.0.1"));
    assert_eq!(net.rnics[0].stop_capture(), 0);
    post_all(&mut net);
    assert!(captured(&mut net, 0).is_empty());
}

#[test]
fn both_hosts_capture_what_went_between_them() {
    let mut net = Net::of_type(QpType::Rc, 3, Faults::default(), |a| a);
    start(&mut net, 0, None);
    start(&mut net, 1, None);
    post_all(&mut net);
    for at in 0..2 {
        let mut got: Vec<String> = captured(&mut net, at).into_iter().map(|p| p.2).collect();
        let mut want: Vec<String> = ALL_OF_IT.map(String::from).to_vec();
        // The rest of the refused WRITE was sent already.
        want.push("RC WRITE last".into());
        got.sort();
        want.sort();
        assert_eq!(got, want, "host {at}");
    }
}

#[test]
fn datagrams_are_captured_with_their_virtual_addresses() {
    for hosts in [1, 2] {
        let mut net = Net::hosts(hosts, &[QpType::Ud; 4], 3, Faults::default());
        for (a, b) in [(0, 1), (1, 0), (2, 3), (3, 2)] {
            net.connect(QpType::Ud, a, b, &|a| a);
        }
        // Only end 0 is of interest.
        let vrnic = net.ends[0].vrnic;
        start(&mut net, 0, Some(vrnic));
        for (a, b) in [(0, 1), (1, 0), (2, 3)] {
            let (ah, qpn) = (net.ah(a, b), net.ends[b].qpn);
            let sge = net.ends[a].sge(0, 33);
            net.ends[a].post_to(wqe(WrOpcode::Send, 1), ah, qpn, &[sge]);
            net.run(SECOND);
        }
        let (own, peer) = (gid(0).ip().to_string(), gid(1).ip().to_string());
        let want = strings(&[(&own, &peer, "UD SEND only"), (&peer, &own, "UD SEND only")]);
        assert_eq!(captured(&mut net, 0), want, "{hosts} hosts");
    }
}

#[test]
fn long_packets_are_cut_and_too_many_are_counted() {
    let mut net = Net::hosts(1, &[QpType::Rc, QpType::Rc], 3, Faults::default());
    net.connect(QpType::Rc, 0, 1, &|a| a);
    net.connect(QpType::Rc, 1, 0, &|a| a);
    net.rnics[0].start_capture(Capture { vrnic: None, snap: 64, epoch_ns: 0, hosts: Vec::new() });
    let (sge, w) = (net.ends[0].sge(0, 1 << 19), net.remote(WrOpcode::Write, 1, 0));
    for _ in 0..300 {
        net.ends[0].post(w, &[sge]);
        net.run(1000);
        net.ends[0].poll();
    }
    let (mut all, mut count) = (Captured::default(), 0u64);
    net.rnics[0].take_captured(&mut all);
    all.records(|r| {
        assert!(r.len() <= RECORD_BYTES + 64);
        count += 1;
    });
    let lost = net.rnics[0].stop_capture();
    assert_eq!(count + lost, 300 * (512 + 1));
    assert!(lost > 0);
}

/// A long message that is captured holds the RNIC for no longer than others, and loses no packet.
#[test]
fn a_long_message_is_captured_in_steps() {
    const PACKETS: usize = 512;
    // Beside the packets with data there is the acknowledgment, or the request.
    for op in [WrOpcode::Write, WrOpcode::Read] {
        let mut net = Net::hosts(1, &[QpType::Rc, QpType::Rc], 3, Faults::default());
        net.connect(QpType::Rc, 0, 1, &|a| a);
        net.connect(QpType::Rc, 1, 0, &|a| a);
        start(&mut net, 0, None);
        let (sge, w) = (net.ends[0].sge(0, 1 << 19), net.remote(op, 1, 0));
        net.ends[0].post(w, &[sge]);
        let mut got = Vec::new();
        loop {
            let now = net.now;
            let found = net.rnics[0].poll(now);
            assert!(!net.rnics[0].has_jobs(), "what is captured is copied in the turn that is charged for it");
            let of_round = captured(&mut net, 0);
            assert!(of_round.len() <= 2 * 16 + 1, "{} packets in one round", of_round.len());
            got.extend(of_round);
            if !found {
                break;
            }
        }
        assert_eq!(got.len(), PACKETS + 1, "{op:?}");
        assert_eq!(net.ends[0].poll().len(), 1);
        assert_eq!(net.rnics[0].stop_capture(), 0);
    }
}

const IPV4_AND_UDP: usize = 28;

/// Bytes that jobs copy from private memory of processes are captured as they were copied. For a refused request nobody
/// has read any payload, so its packet ends with its headers.
#[test]
fn messages_of_private_memory_are_captured_as_they_were_copied() {
    for ends in [&[0][..], &[1], &[0, 1]] {
        let mut net = Net::hosts(1, &[QpType::Rc, QpType::Rc], 3, Faults::default());
        net.connect(QpType::Rc, 0, 1, &|a| a);
        net.connect(QpType::Rc, 1, 0, &|a| a);
        ends.iter().for_each(|&end| net.go_through_process(end));
        start(&mut net, 0, None);
        let data = pattern(40_000, 1);
        for op in [WrOpcode::Write, WrOpcode::Read] {
            net.ends[0].fill(0, &data);
            let (w, sge) = (net.remote(op, 1, 0), net.ends[0].sge(0, 40_000));
            net.ends[0].post(w, &[sge]);
        }
        let eight = net.ends[0].sge(0, 8);
        for op in [WrOpcode::AtomicWrite, WrOpcode::FetchAdd] {
            let w = net.request(op, 2);
            net.ends[0].post(w, &[eight]);
        }
        let bad = abi::SqWqe { rkey: 1, ..net.remote(WrOpcode::Write, 4, 0) };
        let sge = net.ends[0].sge(0, 40_000);
        net.ends[0].post(bad, &[sge]);
        net.run(SECOND);
        let mut all = Captured::default();
        net.rnics[0].take_captured(&mut all);
        let (mut written, mut read, mut cut) = (Vec::new(), Vec::new(), Vec::new());
        all.records(|r| {
            // A record says how many bytes it has, and how many the packet had.
            let size = |at: usize| u32::from_ne_bytes(r[at..at + 4].try_into().unwrap()) as usize;
            assert_eq!(r.len(), RECORD_BYTES + size(8));
            if size(8) < size(12) {
                let body = &r[RECORD_BYTES + IPV4_AND_UDP..];
                return cut.push((size(12) - size(8), Packet::parse(body).unwrap().opcode.to_string()));
            }
            let (flow, payload) = Flow::parse(&r[RECORD_BYTES..]).expect("IP and UDP");
            let (body, crc) = payload.split_last_chunk::<ICRC_BYTES>().unwrap();
            assert_eq!(icrc(&flow.envelope(), body).to_le_bytes(), *crc, "ICRC");
            let p = Packet::parse(body).unwrap();
            match p.opcode.to_string() {
                o if o.contains("WRITE") && !o.contains("atomic") => written.extend_from_slice(p.payload),
                o if o.contains("READ response") => read.extend_from_slice(p.payload),
                o if o.contains("atomic ACK") => assert_eq!(p.original.to_ne_bytes(), data[..8]),
                _ => {}
            }
        });
        assert!(written[..40_000] == data && read[..40_000] == data, "{ends:?}");
        let want = if ends.contains(&0) { vec![(1024 + ICRC_BYTES, "RC WRITE first".to_string())] } else { vec![] };
        assert_eq!(cut, want, "{ends:?}");
    }
}
