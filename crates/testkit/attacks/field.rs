//! Attackers of the published matrices: of Husky (NSDI 2023), each of which exhausts one resource of a NIC, and of
//! HT-Verbs (2025), three that flood a NIC with queues, with addresses and with requests. Each is one program of one
//! vRNIC that communicates with itself, and does nothing that a tenant may not do. `cargo xtask attack --matrix`
//! measures victims beside them.

use std::path::Path;
use std::time::Duration;

use unirdma_abi as abi;
use unirdma_formats::{QpType, WrOpcode};
use unirdma_mem::MemFd;
use unirdma_testkit::{Queue, Scripted};

use crate::{Until, ready};

/// Q_Key of the datagrams.
const QKEY: u32 = 0x1111_1111;
/// Most outstanding requests of a load, in all its send queues together.
const OUTSTANDING: u32 = 8192;
/// `min_rnr_timer`: 0.01 ms and 655.36 ms (IBTA vol. 1, 9.7.5.2.8).
const RNR_SHORTEST: u8 = 1;
const RNR_LONGEST: u8 = 0;

/// A load: requests of one kind without pause.
#[derive(Clone, Copy)]
struct Load {
    qp_type: QpType,
    op: WrOpcode,
    /// Bytes of each request.
    bytes: u32,
    /// Number of pairs of QPs.
    queues: u32,
    /// Number of MRs of `mr_bytes` each. The requests use them in turn.
    mrs: u32,
    mr_bytes: u64,
    /// Each request uses another address of its MR, as far from the last one as the MR allows.
    spread: bool,
    /// Slots of each receive queue, which are refilled. 0: no receive is posted.
    receives: u32,
    min_rnr_timer: u8,
}

/// WRITEs by 16 connections in one MR of 1 MiB. The other loads are changes of this one.
const WRITES: Load = Load {
    qp_type: QpType::Rc,
    op: WrOpcode::Write,
    bytes: 4096,
    queues: 16,
    mrs: 1,
    mr_bytes: 1 << 20,
    spread: false,
    receives: 0,
    min_rnr_timer: RNR_SHORTEST,
};
const READS: Load = Load { op: WrOpcode::Read, ..WRITES };
const SENDS: Load = Load { op: WrOpcode::Send, receives: 64, ..WRITES };
/// The request rate: 64 connections, 8 bytes each.
const RATE: Load = Load { bytes: 8, queues: 64, ..WRITES };
/// 4,096 MRs of 512 bytes.
const SMALL_MRS: Load = Load { bytes: 512, mrs: 4096, mr_bytes: 512, ..WRITES };
/// 1,024 MRs of 1 MiB.
const MANY_MRS: Load = Load { mrs: 1024, spread: true, ..WRITES };
/// One MR of 1 GiB.
const LARGE_MR: Load = Load { mr_bytes: 1 << 30, spread: true, ..WRITES };

const LOADS: &[(&str, Load)] = &[
    ("write-1m", Load { bytes: 1 << 20, ..WRITES }),
    ("read-1m", Load { bytes: 1 << 20, ..READS }),
    ("send-1m", Load { bytes: 1 << 20, ..SENDS }),
    ("write-4k", WRITES),
    ("read-4k", READS),
    ("send-4k", SENDS),
    ("write-257", Load { bytes: 257, ..WRITES }),
    ("write-129", Load { bytes: 129, ..WRITES }),
    ("write-8", RATE),
    ("read-8", Load { op: WrOpcode::Read, ..RATE }),
    ("send-8", Load { op: WrOpcode::Send, receives: 64, ..RATE }),
    ("cas-8", Load { op: WrOpcode::CmpSwap, ..RATE }),
    ("faa-8", Load { op: WrOpcode::FetchAdd, ..RATE }),
    ("rnr-short", Load { op: WrOpcode::Send, ..RATE }),
    ("rnr-long", Load { op: WrOpcode::Send, min_rnr_timer: RNR_LONGEST, ..RATE }),
    ("uc-no-recv", Load { qp_type: QpType::Uc, op: WrOpcode::Send, ..RATE }),
    ("ud-no-recv", Load { qp_type: QpType::Ud, op: WrOpcode::Send, ..RATE }),
    ("qps-512", Load { bytes: 512, queues: 512, ..WRITES }),
    ("mrs-write", SMALL_MRS),
    ("mrs-read", Load { op: WrOpcode::Read, ..SMALL_MRS }),
    ("mrs-send", Load { op: WrOpcode::Send, receives: 64, ..SMALL_MRS }),
    ("mrs-1m", MANY_MRS),
    ("mr-1g", LARGE_MR),
    ("deep-rq-rc", Load { receives: 4096, ..SENDS }),
    ("deep-rq-ud", Load { qp_type: QpType::Ud, receives: 4096, bytes: 1024, ..SENDS }),
    ("read-16k", Load { bytes: 16 << 10, ..READS }),
    ("ht-write", Load { bytes: 64, ..LARGE_MR }),
    ("ht-read", Load { bytes: 64, op: WrOpcode::Read, ..LARGE_MR }),
    ("ht-flood", Load { bytes: 0, ..RATE }),
];

/// Runs an attacker of the matrix. `None` if no attacker has that name.
pub(crate) fn run(socket: &Path, name: &str, until: Until) -> Option<()> {
    match name {
        "compute" => compute(until),
        "register" => register(socket, false, until),
        "register-pd" => register(socket, true, until),
        "ht-queues-rc" => queues(socket, QpType::Rc, until),
        "ht-queues-uc" => queues(socket, QpType::Uc, until),
        _ => requests(socket, &LOADS.iter().find(|l| l.0 == name)?.1, until),
    }
    Some(())
}

/// Only computes, as any program on the core may: no RDMA.
fn compute(until: Until) {
    ready();
    while !until.over() {
        (0..10_000).for_each(|i| _ = std::hint::black_box(i));
    }
}

/// Creates two connected QPs of this session.
fn pair(s: &mut Scripted, load: &Load, send_wr: u32) -> (Queue, Queue) {
    let a = s.queue_with(load.qp_type, send_wr, 1, 0);
    let b = s.queue_with(load.qp_type, 1, load.receives.max(1), 0);
    for (q, peer) in [(&a, &b), (&b, &a)] {
        match load.qp_type {
            QpType::Ud => s.enable(q, QKEY),
            _ => s.connect_with(q, s.gid, peer.qpn, |attr| abi::QpAttr {
                min_rnr_timer: load.min_rnr_timer,
                max_rd_atomic: 16,
                max_dest_rd_atomic: 16,
                ..attr
            }),
        }
    }
    (a, b)
}

fn requests(socket: &Path, load: &Load, until: Until) {
    let mut s = Scripted::new(socket);
    let file = MemFd::new(c"load", (u64::from(load.mrs) * load.mr_bytes).next_multiple_of(4096) as usize);
    let at = s.add_memory(&file.expect("memory file"));
    let mrs: Vec<abi::MrResp> = (0..u64::from(load.mrs)).map(|i| s.mr(at + i * load.mr_bytes, load.mr_bytes)).collect();
    s.own_cq(4 * OUTSTANDING, abi::NO_COMP_QUEUE);
    let slots = (OUTSTANDING / load.queues).max(load.mrs / load.queues);
    let pairs: Vec<(Queue, Queue)> = (0..load.queues).map(|_| pair(&mut s, load, slots)).collect();
    let ah = match load.qp_type {
        QpType::Ud => {
            let grh = abi::GlobalRoute { dgid: s.gid, hop_limit: 1, ..Default::default() };
            let attr = abi::AhAttr { grh, is_global: 1, port_num: 1, ..Default::default() };
            let request = abi::CreateAhReq { pdn: s.pdn, reserved: 0, attr };
            s.ask::<abi::HandleResp>(abi::Command::CreateAh, &request).handle
        }
        _ => 0,
    };
    let all = u64::from(slots * load.queues);
    for (n, (a, b)) in (0..).zip(&pairs) {
        for i in 0..a.entries().max(b.receives()) {
            let number = u64::from(n * slots + i);
            let mr = &mrs[number as usize % mrs.len()];
            // Whole granules of 64 bytes, so that atomics are aligned.
            let step = if load.spread { (load.mr_bytes - u64::from(load.bytes)) / all / 64 * 64 } else { 0 };
            let addr = number % all * step;
            let local = abi::Sge { addr, length: load.bytes, lkey: mr.lkey };
            if i < a.entries() {
                let wqe = abi::SqWqe {
                    opcode: load.op as u8,
                    remote_addr: addr,
                    rkey: mr.rkey,
                    ah,
                    dest_qpn: if ah == 0 { 0 } else { b.qpn },
                    qkey: QKEY,
                    ..Default::default()
                };
                s.write_wqe(a, i, wqe, local);
            }
            if load.receives > 0 {
                // The GRH of a datagram comes before its data (IBTA vol. 1, 11.4.1.2).
                let header = if load.qp_type == QpType::Ud { 40 } else { 0 };
                s.write_receive(b, i, 0, abi::Sge { length: load.bytes + header, ..local });
            }
        }
    }
    ready();
    while !until.over() {
        for (a, b) in &pairs {
            let executed = s.executed(a);
            if s.posted(a).wrapping_sub(executed) <= a.entries() / 2 {
                // Each executed request has taken at least one receive.
                if load.receives > 0 {
                    s.post_receives(b, executed.wrapping_add(b.receives()));
                }
                s.post(a, executed.wrapping_add(a.entries()));
            }
        }
        s.drain_cq();
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// Registers and deregisters 64 KiB without pause, in a new PD each time or always in the same one.
fn register(socket: &Path, own_pd: bool, until: Until) {
    let mut s = Scripted::new(socket);
    let at = s.hostile.bus(0);
    let one = |handle: u32| abi::HandleReq { handle, reserved: 0 };
    ready();
    while !until.over() {
        let pdn = if own_pd { s.ask::<abi::HandleResp>(abi::Command::CreatePd, &[0u8; 0]).handle } else { s.pdn };
        let request = abi::RegUserMrReq { pdn, ..s.mr_request(at, 64 << 10) };
        let mr: abi::MrResp = s.ask(abi::Command::RegUserMr, &request);
        s.order(abi::Command::DeregMr, &one(mr.mrn));
        if own_pd {
            s.order(abi::Command::DestroyPd, &one(pdn));
        }
    }
}

/// Creates, connects and destroys QPs, and a CQ for each 64 of them, without pause.
fn queues(socket: &Path, qp_type: QpType, until: Until) {
    let mut s = Scripted::new(socket);
    let load = Load { qp_type, ..WRITES };
    let one = |handle: u32| abi::HandleReq { handle, reserved: 0 };
    let (mark, first_cq) = (s.allocated(), s.cqn);
    ready();
    while !until.over() {
        s.release(mark);
        let entries = 64;
        let (ring, ctrl) = (s.alloc(u64::from(entries) * size_of::<abi::Cqe>() as u64), s.alloc(128));
        s.make_cq(entries, s.hostile.bus(ring), s.hostile.bus(ctrl), abi::NO_COMP_QUEUE);
        let pairs: Vec<(Queue, Queue)> = (0..32).map(|_| pair(&mut s, &load, 64)).collect();
        for q in pairs.iter().flat_map(|(a, b)| [a, b]) {
            s.order(abi::Command::DestroyQp, &one(q.qpn));
        }
        s.order(abi::Command::DestroyCq, &one(s.cqn));
        s.cqn = first_cq;
    }
}
