//! Packets that the Linux kernel's rxe made and a capture recorded: each is parsed, written again byte for byte,
//! and its ICRC computed.
#![allow(missing_docs)]

use std::collections::BTreeSet;
use std::net::IpAddr;

use unirdma_formats::cm::{GSI_QKEY, GSI_QPN, IpHeader, Mad, Message};
use unirdma_formats::wire::{BTH_BYTES, Envelope, ICRC_BYTES, MAX_HEADER_BYTES, Packet, ROCE_PORT, icrc, padding};

/// (envelope, from the BTH to the ICRC) of every RoCEv2 packet over IPv4 in the capture.
fn packets() -> Vec<(Envelope, Vec<u8>)> {
    let file = include_bytes!("data/golden-rxe.pcap");
    let mut rest = &file[24..];
    let mut found = Vec::new();
    while rest.len() >= 16 {
        let len = u32::from_le_bytes(rest[8..12].try_into().unwrap()) as usize;
        let frame = &rest[16..16 + len];
        rest = &rest[16 + len..];
        let ip = &frame[14..];
        if frame[12..14] != [8, 0] || ip[9] != 17 || ip[22..24] != ROCE_PORT.to_be_bytes() {
            continue;
        }
        let total = u16::from_be_bytes([ip[2], ip[3]]) as usize;
        let four = |at: usize| IpAddr::from(<[u8; 4]>::try_from(&ip[at..at + 4]).unwrap());
        let two = |at: usize| u16::from_be_bytes([ip[at], ip[at + 1]]);
        let e = Envelope { src: four(12), dst: four(16), src_port: two(20), ip_id: two(4) };
        found.push((e, ip[28..total].to_vec()));
    }
    found
}

#[test]
fn the_kernels_packets_are_understood_and_made_alike() {
    let all = packets();
    let mut opcodes = BTreeSet::new();
    for (e, bytes) in &all {
        let (body, crc) = bytes.split_at(bytes.len() - ICRC_BYTES);
        let p = Packet::parse(body).unwrap();
        opcodes.insert(p.opcode.raw().unwrap());
        let mut again = vec![0; MAX_HEADER_BYTES];
        let n = p.put(&mut again, p.payload.len());
        again.truncate(n);
        again.extend_from_slice(p.payload);
        // The sender may put anything into the padding.
        again.extend_from_slice(&body[body.len() - padding(p.payload.len())..]);
        assert_eq!(&again, body);
        assert_eq!(icrc(e, body).to_le_bytes(), crc);
        let mut changed = body.to_vec();
        changed[BTH_BYTES - 1] ^= 1;
        assert_ne!(icrc(e, &changed).to_le_bytes(), crc);
    }
    assert_eq!(all.len(), 178);
    assert!(opcodes.len() >= 12, "{opcodes:x?}");
}

#[test]
fn the_kernels_connection_management_is_understood_and_made_alike() {
    let mut seen = BTreeSet::new();
    for (_, bytes) in &packets() {
        let p = Packet::parse(&bytes[..bytes.len() - ICRC_BYTES]).unwrap();
        if p.dest_qp != GSI_QPN {
            continue;
        }
        assert_eq!((p.deth.qkey, p.deth.src_qp), (GSI_QKEY, GSI_QPN));
        let mad = Mad::parse(p.payload).unwrap();
        assert_eq!(mad.bytes()[..], *p.payload, "{mad:?}");
        if let Message::Req(r) = &mad.message {
            let (ip, user) = IpHeader::parse(&r.private).unwrap();
            assert_eq!(ip.before(user), r.private);
            assert_eq!(r.remote_gid.ip(), ip.dst);
        }
        seen.insert(p.payload[17]);
    }
    assert!(seen.len() >= 6, "{seen:x?}");
}
