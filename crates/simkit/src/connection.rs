//! The simulation of one connection: two hosts with an RC QP each, and a bad network between them.
//!
//! Every request must complete once, in order, with the right data.

use unirdma_abi as abi;
use unirdma_formats::WrOpcode;
use unirdma_rnic::Rng;

use crate::net::{Faults, Net};
use crate::{MR_BYTES, SECOND, pattern};

/// Number of requests in a round.
const REQUESTS: u64 = 8;
/// Size of the part of both ends' memory that each request has to itself.
const SLOT: u64 = (MR_BYTES / 2) as u64 / REQUESTS;
/// Operand that a fetch-and-add adds and a compare-and-swap compares with. The data never has this value, so the
/// comparison never succeeds.
const ADDEND: u64 = 3;

const OPCODES: [WrOpcode; 7] = [
    WrOpcode::Write,
    WrOpcode::WriteImm,
    WrOpcode::Send,
    WrOpcode::SendImm,
    WrOpcode::Read,
    WrOpcode::FetchAdd,
    WrOpcode::CmpSwap,
];

/// A request of end 0: opcode, offset in both ends' memory, length.
type Request = (WrOpcode, u64, u64);

/// Runs the simulation of a seed, with faults and a path MTU that follow from it. Panics if an outcome is not allowed.
pub fn run(seed: u64, rounds: u64) {
    let faults = Faults { loss: 10, duplication: 10, reordering: 10, corruption: 1 };
    run_with(seed, faults, 1 + (seed % 5) as u8, rounds);
}

/// Runs the simulation with these faults and this path MTU (1 to 5). Panics if an outcome is not allowed.
pub fn run_with(seed: u64, faults: Faults, mtu: u8, rounds: u64) {
    let mut net = Net::new(seed, faults, |a| abi::QpAttr { path_mtu: mtu, retry_cnt: 7, rnr_retry: 7, ..a });
    let mut rng = Rng::new(seed ^ 77);
    // The memory of one end or both may be reached through its process, by jobs that take their time.
    net.late_ns = [1, 3_000, 50_000, 1_000_000][seed as usize / 4 % 4];
    for end in (0..2).filter(|end| seed >> end & 1 != 0) {
        net.go_through_process(end);
    }
    for round in 0..rounds {
        let salt = seed << 8 | round;
        let before = pattern(MR_BYTES, salt);
        for e in &net.ends {
            e.fill(0, &before);
        }
        let sent = pattern(MR_BYTES / 2, salt ^ 0x55);
        net.ends[0].fill(0, &sent);
        let requests: Vec<Request> = (0..REQUESTS).map(|i| post(&mut net, &mut rng, i)).collect();
        net.run(30 * SECOND);
        check_completions(&mut net, &requests, &format!("seed {seed}, round {round}"));
        for request in requests {
            check_data(&net, request, &before, &sent, &format!("seed {seed}, round {round}, {request:?}"));
        }
    }
}

/// Posts request `i` at end 0. If it consumes a receive, posts that at end 1 before, sometimes after a while.
fn post(net: &mut Net, rng: &mut Rng, i: u64) -> Request {
    let op = OPCODES[rng.next_u64() as usize % OPCODES.len()];
    let len = match rng.next_u64() % 4 {
        _ if op.is_atomic() => 8,
        0 => rng.next_u64() % 16,
        1 => rng.next_u64() % 5000,
        _ => rng.next_u64() % SLOT,
    };
    let off = i * SLOT;
    if op.consumes_recv() {
        let sge = net.ends[1].sge(off, SLOT as u32);
        if rng.next_u64() % 2 != 0 {
            net.run(rng.next_u64() % 2_000_000);
        }
        net.ends[1].recv(100 + i, &[sge]);
    }
    let sge = net.ends[0].sge(off, len as u32);
    let w = abi::SqWqe { imm: i as u32, compare_add: ADDEND, swap: 9, ..net.remote(op, i, off) };
    net.ends[0].post(w, &[sge]);
    if rng.next_u64() % 3 == 0 {
        net.run(rng.next_u64() % 100_000);
    }
    (op, off, len)
}

fn check_completions(net: &mut Net, requests: &[Request], what: &str) {
    let done: Vec<_> = net.ends[0].poll().iter().map(|c| (c.wr_id, c.status)).collect();
    assert_eq!(done, (0..REQUESTS).map(|i| (i, 0)).collect::<Vec<_>>(), "{what}");
    let received: Vec<u64> = net.ends[1].poll().iter().map(|c| c.wr_id).collect();
    let consuming = (0..).zip(requests).filter(|(_, r)| r.0.consumes_recv());
    assert_eq!(received, consuming.map(|(i, _)| 100 + i).collect::<Vec<u64>>(), "{what}");
}

fn check_data(net: &Net, (op, off, len): Request, before: &[u8], sent: &[u8], what: &str) {
    let all = off as usize..(off + len) as usize;
    let [here, there] = [0, 1].map(|end| net.ends[end].bytes(all.start, all.len()));
    match op {
        WrOpcode::Read => assert!(here == before[all], "{what}"),
        WrOpcode::FetchAdd | WrOpcode::CmpSwap => {
            let old = u64::from_ne_bytes(before[all].try_into().unwrap());
            let new = if op == WrOpcode::FetchAdd { old.wrapping_add(ADDEND) } else { old };
            assert_eq!(here, old.to_ne_bytes(), "{what}");
            assert_eq!(there, new.to_ne_bytes(), "{what}");
        }
        _ => assert!(there == sent[all], "{what}"),
    }
}
