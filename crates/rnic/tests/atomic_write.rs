//! Atomic writes and flushes, on one host and over a network that loses packets: eight bytes at once, aligned, once; a
//! flush is answered when it may be made.

use unirdma_abi as abi;
use unirdma_formats::{QpType, WcOpcode, WcStatus, WrOpcode, send_flags};
use unirdma_simkit::net::{Faults, Net};
use unirdma_simkit::*;

fn each() -> [(&'static str, Net); 2] {
    [1, 2].map(|hosts| {
        let faults = Faults { loss: 50, duplication: 50, reordering: 50, corruption: 0 };
        let mut net = Net::hosts(hosts, &[QpType::Rc, QpType::Rc], 3, faults);
        for (a, b) in [(0, 1), (1, 0)] {
            net.connect(QpType::Rc, a, b, &|a| abi::QpAttr { retry_cnt: 7, ..a });
        }
        (["one host", "two hosts"][hosts - 1], net)
    })
}

#[test]
fn the_value_is_written_and_nothing_comes_back() {
    for (place, mut net) in each() {
        for i in 0..20u64 {
            net.ends[0].fill(0, &(i * 1_000_003).to_ne_bytes());
            let sge = net.ends[0].sge(0, 8);
            let write = net.remote(WrOpcode::AtomicWrite, i, 64 + 8 * i);
            net.ends[0].post(write, &[sge]);
            net.run(SECOND);
            let c = net.ends[0].done();
            assert_eq!((c.status, c.opcode), (0, WcOpcode::AtomicWrite as u8), "{place}");
            assert_eq!(net.ends[1].bytes(64 + 8 * i as usize, 8), (i * 1_000_003).to_ne_bytes(), "{place}");
            assert_eq!(net.ends[0].bytes(0, 8), (i * 1_000_003).to_ne_bytes(), "{place}");
        }
        assert!(net.ends[1].poll().is_empty(), "{place}");
    }
}

#[test]
fn inline_data_will_do() {
    for (place, mut net) in each() {
        let mut w = net.remote(WrOpcode::AtomicWrite, 1, 8);
        (w.send_flags, w.inline_len) = (w.send_flags | send_flags::INLINE, 8);
        let e = &mut net.ends[0];
        e.rings.sq_put(e.sq_prod, abi::SQ_DATA, &7u64.to_ne_bytes());
        e.post_raw(w);
        net.run(SECOND);
        assert_eq!(net.ends[0].done().status, 0, "{place}");
        assert_eq!(net.ends[1].bytes(8, 8), 7u64.to_ne_bytes(), "{place}");
    }
}

#[test]
fn wrong_lengths_and_places_are_refused() {
    for (len, off, status) in [
        (4, 8, WcStatus::LocLenErr),
        (16, 8, WcStatus::LocLenErr),
        (8, 12, WcStatus::RemInvReqErr),
        (8, MR_BYTES as u64, WcStatus::RemAccessErr),
    ] {
        for (place, mut net) in each() {
            let sge = net.ends[0].sge(0, len);
            let write = net.remote(WrOpcode::AtomicWrite, 1, off);
            net.ends[0].post(write, &[sge]);
            net.run(SECOND);
            assert_eq!(net.ends[0].done().status, status as u8, "{place}: {len} bytes at {off}");
        }
    }
}

#[test]
fn what_may_be_flushed_is_answered() {
    use unirdma_formats::access::{FLUSH_GLOBAL, LOCAL_WRITE};
    use unirdma_formats::wire::flush::{GLOBAL, PERSISTENT};
    let (ok, denied, invalid) = (WcStatus::Success as u8, WcStatus::RemAccessErr as u8, WcStatus::RemInvReqErr as u8);
    for (granted, word, off, len, status) in [
        (true, GLOBAL, 0, 4096, ok),
        (true, GLOBAL, 0, 0, ok),
        (true, GLOBAL | 1 << 4, u64::MAX / 2, 7, ok),
        (true, GLOBAL, 1, MR_BYTES as u64, denied),
        (true, PERSISTENT, 0, 4096, denied),
        (true, GLOBAL | PERSISTENT, 0, 4096, denied),
        (true, GLOBAL | 2 << 4, 0, 4096, invalid),
        (true, 0, 0, 4096, invalid),
        (false, GLOBAL, 0, 4096, denied),
    ] {
        for (place, mut net) in each() {
            let e = &net.ends[1];
            let (s, pd, qpn, backing) = (e.session, e.pd, e.qpn, unirdma_rnic::Backing::Mapped(e.memory.clone()));
            let flags = LOCAL_WRITE | if granted { FLUSH_GLOBAL } else { 0 };
            let (_, rkey) = net.rnic(1).reg_mr(s, pd, flags, IOVA, MR_BYTES as u64, (backing, vec![3])).unwrap();
            let a = abi::QpAttr { qp_access_flags: ALL | FLUSH_GLOBAL, ..Default::default() };
            net.rnic(1).modify_qp(s, qpn, unirdma_formats::attr_mask::ACCESS_FLAGS, &a).unwrap();
            let flush = abi::SqWqe {
                rkey,
                remote_addr: IOVA.wrapping_add(off),
                compare_add: len,
                imm: word,
                ..wqe(WrOpcode::Flush, 1)
            };
            net.ends[0].post(flush, &[]);
            net.run(SECOND);
            let c = net.ends[0].done();
            assert_eq!(c.status, status, "{place}: {granted} {word:#x} {off} {len}");
            assert_eq!(c.opcode, WcOpcode::Flush as u8);
        }
    }
}
