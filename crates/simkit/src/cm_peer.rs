//! A hostile peer of connection management, driven by bytes: for fuzzing, for its corpus, and for random tests.

use unirdma_abi as abi;
use unirdma_abi::{CmOp, port_space};
use unirdma_formats::attr_mask as m;
use unirdma_formats::cm::{About, GSI_QKEY, GSI_QPN, IpHeader, MAD_BYTES, Mad, Message, Rep, Req};
use unirdma_formats::net::Flow;
use unirdma_formats::wire::{Deth, Extra, ICRC_BYTES, Op, Opcode, Packet, Part, Transport, icrc};
use unirdma_rnic::CmEventKind::ConnectRequest;

use crate::SECOND;
use crate::cm::{Cm, PORT, addr};
use crate::net::{Faults, gid, host};
use crate::peer::Input;

/// Service of [`PORT`] in the TCP port space.
const SERVICE: u64 = 1 << 24 | (port_space::TCP as u64 & 0xff) << 16 | PORT as u64;

/// End 0 listens and connects. All packets that it receives come from the input, which can name every number that end 0
/// has sent. Nothing may panic, and end 0's program may call anything meanwhile. Once the input ends, two honest
/// programs can connect. Returns the number of requests that have reached the listener of end 0.
pub fn lying_cm_peer(data: &[u8]) -> usize {
    let mut input = Input(data);
    let mut cm = Cm::new(2, port_space::TCP, 7, Faults::default());
    cm.net.cut(1, true);
    let mut requests = 0;
    let mut ids = vec![cm.listen(0), cm.connect(b"x")];
    for _ in 0..200 {
        if input.0.is_empty() {
            break;
        }
        match input.byte() {
            what @ 0..16 => {
                let op = CmOp::from_raw(what);
                let id = ids[usize::from(input.byte()) % ids.len()];
                let value = input.word();
                if let Some(op) = op.filter(|&op| op != CmOp::Create) {
                    let _ = cm.ask(0, op, id, |r| {
                        r.value = value & 7;
                        r.dst = addr(2, PORT);
                        r.src = addr(1, PORT);
                        r.param.private_len = (value >> 8) as u8;
                        r.param.qpn = value;
                    });
                }
            }
            16..24 => cm.net.run(u64::from(input.word()) % (3 * SECOND)),
            24..28 if ids.len() < 50 => ids.push(cm.connect_unseen()),
            28..40 => {
                let n = usize::from(input.byte());
                let mut raw = [0; MAD_BYTES];
                let n = n.min(input.0.len());
                raw[..n].copy_from_slice(&input.0[..n]);
                input.0 = &input.0[n..];
                lie(&mut cm, GSI_QKEY, &raw);
            }
            40..44 => {
                let (key, mad) = (input.word(), mad(&cm, &mut input));
                lie(&mut cm, key, &mad.bytes());
            }
            _ => {
                let mad = mad(&cm, &mut input);
                lie(&mut cm, GSI_QKEY, &mad.bytes());
            }
        }
        let before = ids.len();
        ids.extend(cm.events(0).iter().filter(|e| e.kind == ConnectRequest as u32).map(|e| e.id));
        requests += ids.len() - before;
    }
    for id in ids {
        let _ = cm.ask(0, CmOp::Destroy, id, |_| ());
    }
    cm.net.run(300 * SECOND);
    cm.events(0);
    cm.net.cut(1, false);
    for end in [0, 1] {
        let (s, qpn) = (cm.net.ends[end].session, cm.net.ends[end].qpn);
        let reset = abi::QpAttr::default();
        cm.net.rnic(end).modify_qp(s, qpn, m::STATE, &reset).unwrap();
    }
    cm.connected();
    requests
}

/// A message that is nearly right.
fn mad(cm: &Cm, input: &mut Input<'_>) -> Mad {
    let seen: Vec<u32> = cm.net.mads.iter().filter_map(sender_id).collect();
    let kind = input.byte();
    let near = usize::from(input.byte());
    let remote_id = seen.get(near % seen.len().max(1)).copied().filter(|_| near < 250).unwrap_or(near as u32);
    let local_id = u32::from(input.byte() & 7);
    let number = input.word();
    let private = {
        let dst = if number & 1 != 0 { gid(0) } else { gid(1) };
        IpHeader { src_port: 9, src: gid(1).ip(), dst: dst.ip() }.before(&[number as u8; 40])
    };
    let service_id = if number & 2 != 0 { SERVICE } else { u64::from(number) };
    let about = [About::Req, About::Rep, About::Other][number as usize % 3];
    let message = match kind % 9 {
        0 => Message::Req(Req {
            local_id,
            service_id,
            qpn: number & 0xff_ffff,
            transport: (number >> 8) as u8 & 3,
            extended_transport: (number >> 10) as u8 & 7,
            psn: number & 0xff_ffff,
            mtu: (number >> 12) as u8 & 15,
            responder_resources: (number >> 16) as u8,
            initiator_depth: (number >> 16) as u8,
            ack_timeout: (number >> 24) as u8 & 31,
            remote_response_timeout: (number >> 24) as u8 & 31,
            local_gid: gid(1),
            remote_gid: gid(usize::from(number & 4 != 0)),
            private,
            ..Req::default()
        }),
        1 => Message::Rep(Rep { local_id, remote_id, qpn: number & 0xff_ffff, private, ..Rep::default() }),
        2 => Message::Rtu { local_id, remote_id, private },
        3 => Message::Rej { local_id, remote_id, about, reason: number as u16, info: Vec::new(), private },
        4 => Message::Mra { local_id, remote_id, about, timeout: (number >> 8) as u8 & 31, private },
        5 => Message::Dreq { local_id, remote_id, remote_qpn: cm.net.ends[0].qpn ^ (number & 1), private },
        6 => Message::Drep { local_id, remote_id, private },
        7 => Message::SidrReq { request_id: local_id, pkey: 0xffff, service_id, private },
        _ => Message::SidrRep {
            request_id: remote_id,
            status: number as u8 & 3,
            qpn: number & 0xff_ffff,
            service_id,
            qkey: number,
            info: Vec::new(),
            private,
        },
    };
    Mad { tid: u64::from(remote_id), message }
}

/// The communication ID that the sender of a message uses.
fn sender_id(mad: &Mad) -> Option<u32> {
    match &mad.message {
        Message::Req(r) => Some(r.local_id),
        Message::Rep(r) => Some(r.local_id),
        Message::Mra { local_id, .. } | Message::Rej { local_id, .. } | Message::Dreq { local_id, .. } => {
            Some(*local_id)
        }
        Message::SidrReq { request_id, .. } => Some(*request_id),
        _ => None,
    }
}

/// Sends a MAD to end 0 as if end 1 had.
fn lie(cm: &mut Cm, qkey: u32, mad: &[u8; MAD_BYTES]) {
    let flow = Flow::roce(gid(1), gid(0));
    let opcode = Opcode { transport: Transport::Ud, op: Op::Send(Part::Only), extra: Extra::None };
    let mut head = Packet::new(opcode, GSI_QPN, 0);
    head.deth = Deth { qkey, src_qp: GSI_QPN };
    let start = flow.header_bytes();
    let mut bytes = vec![0; start + opcode.header_bytes() + MAD_BYTES + ICRC_BYTES];
    let end = bytes.len() - ICRC_BYTES;
    flow.put(&mut bytes, end + ICRC_BYTES - start);
    head.put(&mut bytes[start..], MAD_BYTES);
    bytes[end - MAD_BYTES..end].copy_from_slice(mad);
    let crc = icrc(&flow.envelope(), &bytes[start..end]);
    bytes[end..].copy_from_slice(&crc.to_le_bytes());
    let now = cm.net.now;
    cm.net.rnic(0).handle_packet(now, &unirdma_rnic::Arrival::inside(host(1), 0), &bytes);
}
