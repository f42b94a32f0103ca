//! The checks that the fuzz targets and the tests with their corpus make.
#![allow(missing_docs)]

use unirdma_formats::cm::{IpHeader, Mad};
use unirdma_formats::frame::Claims;
use unirdma_formats::net::{Flow, GRH_BYTES, parse_grh, seal};
use unirdma_formats::wire::{Envelope, Packet, padding};
use unirdma_formats::{pcap, wire};

/// Gives bytes to every parser. If a parser accepts them, they must come out again unchanged.
pub fn parse_everything(data: &[u8]) {
    if let Ok(p) = Packet::parse(data) {
        let mut again = vec![0; wire::MAX_HEADER_BYTES + p.payload.len() + 3];
        let n = p.put(&mut again, p.payload.len());
        assert_eq!(n, p.opcode.header_bytes());
        again[n..n + p.payload.len()].copy_from_slice(p.payload);
        again.truncate(n + p.payload.len() + padding(p.payload.len()));
        let q = Packet::parse(&again).expect("what was written can be read");
        assert_eq!(p.payload, q.payload);
        assert_eq!((p.opcode, p.dest_qp, p.psn, p.pkey), (q.opcode, q.dest_qp, q.psn, q.pkey));
        assert!(!p.opcode.to_string().is_empty());
    }
    if let Some((flow, payload)) = Flow::parse(data) {
        let mut again = vec![0; flow.header_bytes()];
        flow.put(&mut again, payload.len());
        again.extend_from_slice(payload);
        assert_eq!(Flow::parse(&again), Some((flow, payload)));
        assert!(parse_grh(&flow.grh(payload.len())).is_some());
    }
    if let Some(grh) = data.first_chunk::<GRH_BYTES>() {
        let _ = parse_grh(grh);
    }
    if let Some(mad) = Mad::parse(data) {
        let again = Mad::parse(&mad.bytes()).expect("what was written can be read");
        assert_eq!(mad, again);
    }
    let _ = IpHeader::parse(data);
    let _ = Claims::read(data);
    let _ = pcap::records(data).map(<[u8]>::len).sum::<usize>();
    let plain = Envelope { src: [10, 0, 0, 1].into(), dst: [10, 0, 0, 2].into(), src_port: 1, ip_id: 2 };
    for outer in [0, 50, 70] {
        seal(&mut data.to_vec(), outer, plain);
    }
}
