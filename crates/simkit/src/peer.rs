//! A hostile peer, driven by bytes: for fuzzing, and for its corpus.

use unirdma_formats::wire::{AtomicEth, Deth, Opcode, Packet, Reth, padding};
use unirdma_formats::{QpState, QpType, WrOpcode};

use crate::net::{Faults, Net, arrival, host};
use crate::{IOVA, MR_BYTES, QKEY, SECOND};

/// Reads numbers from the input. Yields 0 at its end.
pub(crate) struct Input<'a>(pub(crate) &'a [u8]);

impl Input<'_> {
    pub(crate) fn byte(&mut self) -> u8 {
        let Some((&b, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        b
    }

    pub(crate) fn word(&mut self) -> u32 {
        u32::from_le_bytes([self.byte(), self.byte(), self.byte(), self.byte()])
    }
}

/// Size of an area at the end of an end's memory that no receive and no grant covers.
const GUARD: usize = 4096;

/// Two hosts with QPs of types RC, UC and UD. The host of the even ends is real, the input plays the host of the odd
/// ones. Each step of the input is a packet, a request, a receive or time. Nothing may panic, and memory without a
/// grant must stay unchanged.
pub fn lying_peer(data: &[u8]) {
    let mut input = Input(data);
    let types = [QpType::Rc, QpType::Rc, QpType::Uc, QpType::Uc, QpType::Ud, QpType::Ud];
    let mut net = Net::hosts(2, &types, 7, Faults::default());
    for (i, &t) in types.iter().enumerate() {
        net.connect(t, i, i ^ 1, &|a| a);
    }
    let ah = net.ah(4, 5);
    for e in &net.ends {
        e.fill(MR_BYTES - GUARD, &[0xa5; GUARD]);
    }
    let payload = vec![7; 5000];
    for _ in 0..64 {
        if input.0.is_empty() {
            break;
        }
        let what = input.byte();
        let end = usize::from(what >> 6).min(2) * 2;
        match what & 7 {
            0 => {
                let op = WrOpcode::from_raw(u32::from(input.byte()) % 7).unwrap();
                let len = input.word() % 20_000;
                let (sge, w) = (net.ends[end].sge(0, len), net.remote(op, 1, 0));
                let peer = net.ends[end ^ 1].qpn;
                if net.state(end) == QpState::Rts as u8 {
                    net.ends[end].post_to(w, ah, peer, &[sge]);
                }
            }
            1 => {
                let sge = net.ends[end].sge(u64::from(input.byte()) * 64, input.word() % 8192);
                net.ends[end].recv(2, &[sge]);
            }
            2 => net.run(u64::from(input.word()) % SECOND),
            3 => {
                let n = usize::from(input.byte());
                let raw = &input.0[..n.min(input.0.len())];
                net.rnics[0].handle_packet(net.now, &arrival(host(1)), raw);
                net.rnics[0].handle_packet(net.now, &unirdma_rnic::Arrival::inside(host(1), 0), raw);
                input.0 = &input.0[raw.len()..];
            }
            _ => packet(&mut net, end, &mut input, &payload),
        }
        if what & 8 != 0 {
            net.run(1000);
        }
        for e in &mut net.ends {
            e.poll();
        }
    }
    net.run(SECOND);
    for e in &net.ends {
        assert_eq!(e.bytes(MR_BYTES - GUARD, GUARD), [0xa5; GUARD]);
    }
}

/// A packet for `end` that is nearly right.
fn packet(net: &mut Net, end: usize, input: &mut Input<'_>, payload: &[u8]) {
    let Some(opcode) = Opcode::from_raw(input.byte()) else { return };
    let flags = input.byte();
    let (session, qpn) = (net.ends[end].session, net.ends[end].qpn);
    let q = net.rnics[0].query_qp(session, qpn).unwrap();
    let near = if flags & 1 != 0 { q.rq_psn } else { q.sq_psn };
    let mut p = Packet::new(opcode, qpn, near.wrapping_add(input.byte() as i8 as u32) & 0xff_ffff);
    (p.ack_req, p.solicited, p.becn) = (flags & 2 != 0, flags & 4 != 0, flags & 8 != 0);
    let key = if flags & 16 != 0 { net.ends[end].key } else { input.word() };
    let va = if flags & 32 != 0 { IOVA } else { u64::from(input.word()) };
    // A grant never reaches the guard, unless an address or a length is computed wrongly.
    let dma_len = if flags & 64 != 0 { u32::from(input.byte()) * 100 } else { input.word() };
    let reaches = va.wrapping_add(dma_len.into()) > IOVA + (MR_BYTES - GUARD) as u64;
    if key == net.ends[end].key && (reaches || va >= IOVA + (MR_BYTES - GUARD) as u64) {
        return;
    }
    p.reth = Reth { va, rkey: key, dma_len };
    p.atomic = AtomicEth { va, rkey: key, swap_add: 3, compare: 0 };
    p.aeth.syndrome = input.byte();
    p.deth = Deth { qkey: if flags & 128 != 0 { QKEY } else { input.word() }, src_qp: 9 };
    let len = [0, 1, 4, 255, 1023, 1024, 1025, 4096][usize::from(input.byte() & 7)];
    let mut bytes = vec![0; 64 + len + 3];
    let n = p.put(&mut bytes, len);
    bytes[n..n + len].copy_from_slice(&payload[..len]);
    bytes.truncate(n + len + padding(len));
    net.rnics[0].handle_packet(net.now, &arrival(host(1)), &bytes);
}
