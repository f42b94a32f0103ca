//! Random verbs traffic against a model that knows the only allowed outcome: each request completes exactly
//! once, in order, with the right data at both ends.

use std::collections::VecDeque;

use proptest::prelude::*;
use unirdma_abi as abi;
use unirdma_formats::WrOpcode;
use unirdma_simkit::*;

/// Bytes of each end's memory that the traffic uses.
const SPACE: u64 = 40_000;
const DEPTH: usize = 16;

#[derive(Clone, Copy, Debug)]
struct Op {
    from_a: bool,
    op: WrOpcode,
    local: u64,
    remote: u64,
    len: u64,
    value: u64,
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Post(Op),
    Recv { at_a: bool, off: u64, len: u64 },
}

fn step() -> impl Strategy<Value = Step> {
    use WrOpcode::*;
    let op =
        prop_oneof![Just(Write), Just(WriteImm), Just(Send), Just(SendImm), Just(Read), Just(CmpSwap), Just(FetchAdd)];
    let len = prop_oneof![Just(0), 1..64u64, 1..9000u64];
    let post =
        (any::<bool>(), op, 0..SPACE, 0..SPACE, len, 0..4u64).prop_map(|(from_a, op, local, remote, len, value)| {
            let len = if op.is_atomic() { 8 } else { len };
            let remote = if op.is_atomic() { remote & !7 } else { remote };
            Step::Post(Op { from_a, op, local: local.min(SPACE - len), remote: remote.min(SPACE - len), len, value })
        });
    // Receives are always long enough for any message: errors have tests of their own.
    let recv = (any::<bool>(), 0..SPACE - 9000).prop_map(|(at_a, off)| Step::Recv { at_a, off, len: 9000 });
    prop_oneof![3 => post, 2 => recv]
}

/// One end as the model sees it.
struct Side {
    memory: Vec<u8>,
    sends: VecDeque<(u64, Op)>,
    recvs: VecDeque<(u64, u64)>,
    /// (wr_id, opcode, byte_len) in the order of completion.
    expected: Vec<(u64, u8, u32)>,
}

fn word(memory: &[u8], at: u64) -> u64 {
    u64::from_ne_bytes(memory[at as usize..at as usize + 8].try_into().unwrap())
}

/// Executes those requests of `from` to `to` that may be executed.
fn drain(from: &mut Side, to: &mut Side) {
    while let Some(&(id, o)) = from.sends.front() {
        if o.op.consumes_recv() && to.recvs.is_empty() {
            return;
        }
        from.sends.pop_front();
        let (l, r, n) = (o.local as usize, o.remote as usize, o.len as usize);
        match o.op {
            WrOpcode::Write | WrOpcode::WriteImm => to.memory[r..r + n].copy_from_slice(&from.memory[l..l + n]),
            WrOpcode::Read => from.memory[l..l + n].copy_from_slice(&to.memory[r..r + n]),
            WrOpcode::CmpSwap | WrOpcode::FetchAdd => {
                let old = word(&to.memory, o.remote);
                let new = match o.op {
                    WrOpcode::CmpSwap if old == o.value => 77,
                    WrOpcode::CmpSwap => old,
                    _ => old.wrapping_add(o.value),
                };
                to.memory[r..r + 8].copy_from_slice(&new.to_ne_bytes());
                from.memory[l..l + 8].copy_from_slice(&old.to_ne_bytes());
            }
            _ => {}
        }
        if o.op.consumes_recv()
            && let Some((rid, off)) = to.recvs.pop_front()
        {
            let write = o.op == WrOpcode::WriteImm;
            if !write {
                to.memory[off as usize..off as usize + n].copy_from_slice(&from.memory[l..l + n]);
            }
            to.expected.push((rid, if write { 129 } else { 128 }, o.len as u32));
        }
        let returns = o.op == WrOpcode::Read || o.op.is_atomic();
        from.expected.push((id, o.op.wc() as u8, if returns { o.len as u32 } else { 0 }));
    }
}

fn patient_pair() -> Pair {
    let mut p = Pair::new();
    for of_a in [true, false] {
        p.reconnect(of_a, |attr| abi::QpAttr { rnr_retry: 7, ..attr });
    }
    p
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn every_request_has_the_outcome_of_the_model(steps in proptest::collection::vec(step(), 1..60), seed in any::<u8>()) {
        let mut p = patient_pair();
        let fill = |salt: u8| -> Vec<u8> { (0..SPACE as usize).map(|i| (i as u8).wrapping_mul(7) ^ salt ^ seed).collect() };
        let side = |memory| Side { memory, sends: VecDeque::new(), recvs: VecDeque::new(), expected: Vec::new() };
        let (mut ma, mut mb) = (side(fill(1)), side(fill(2)));
        p.a.fill(0, &ma.memory);
        p.b.fill(0, &mb.memory);
        let (mut got_a, mut got_b) = (Vec::new(), Vec::new());
        for (id, s) in steps.into_iter().enumerate() {
            let id = id as u64;
            match s {
                Step::Post(o) => {
                    let (model, end, key) =
                        if o.from_a { (&mut ma, &mut p.a, p.b.key) } else { (&mut mb, &mut p.b, p.a.key) };
                    if model.sends.len() == DEPTH {
                        continue;
                    }
                    let w = abi::SqWqe {
                        remote_addr: IOVA + o.remote, rkey: key, compare_add: o.value, swap: 77, imm: 5, ..wqe(o.op, id)
                    };
                    let sge = end.sge(o.local, o.len as u32);
                    end.post(w, &[sge]);
                    model.sends.push_back((id, o));
                }
                Step::Recv { at_a, off, len } => {
                    let (model, end) = if at_a { (&mut ma, &mut p.a) } else { (&mut mb, &mut p.b) };
                    if model.recvs.len() == DEPTH {
                        continue;
                    }
                    let sge = end.sge(off, len as u32);
                    end.recv(id, &[sge]);
                    model.recvs.push_back((id, off));
                }
            }
            drain(&mut ma, &mut mb);
            drain(&mut mb, &mut ma);
            p.run(1_000_000);
            for (end, got) in [(&mut p.a, &mut got_a), (&mut p.b, &mut got_b)] {
                for c in end.poll() {
                    prop_assert_eq!(c.status, 0);
                    got.push((c.wr_id, c.opcode, c.byte_len));
                }
            }
            prop_assert_eq!(&got_a, &ma.expected);
            prop_assert_eq!(&got_b, &mb.expected);
        }
        prop_assert_eq!(p.a.bytes(0, SPACE as usize), ma.memory);
        prop_assert_eq!(p.b.bytes(0, SPACE as usize), mb.memory);
        prop_assert_eq!((p.state(true), p.state(false)), (3, 3));
    }
}
