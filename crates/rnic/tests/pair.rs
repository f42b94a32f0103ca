//! Work requests between two QPs: data, completions, and every error that a peer can cause.

use unirdma_abi as abi;
use unirdma_formats::{AsyncEvent, WcOpcode, WcStatus, WrOpcode, access, attr_mask as m, send_flags, wc_flags};
use unirdma_mem::Span;
use unirdma_rnic::{Backing, Output};
use unirdma_simkit::*;

fn pattern(n: usize) -> Vec<u8> {
    (0..n).map(|i| (i * 31 + i / 997) as u8).collect()
}

fn remote(op: WrOpcode, wr_id: u64, peer: &End, off: u64) -> abi::SqWqe {
    abi::SqWqe { remote_addr: IOVA + off, rkey: peer.key, ..wqe(op, wr_id) }
}

fn asyncs(p: &Pair) -> Vec<(u32, AsyncEvent)> {
    let kind = |o: &Output| match *o {
        Output::Async { kind, handle, .. } => Some((handle, kind)),
        _ => None,
    };
    p.outputs.iter().filter_map(kind).collect()
}

#[test]
fn send_gathers_and_scatters() {
    let mut p = Pair::new();
    p.a.fill(0, &pattern(3000));
    let (r1, r2) = (p.b.sge(100, 700), p.b.sge(5000, 4000));
    p.b.recv(77, &[r1, r2]);
    let s = [p.a.sge(0, 1000), p.a.sge(1000, 0), p.a.sge(1000, 2000)];
    p.a.post(abi::SqWqe { imm: 0xdead, ..wqe(WrOpcode::SendImm, 5) }, &s);
    p.settle();
    let c = p.a.done();
    assert_eq!((c.wr_id, status(&c), c.opcode), (5, WcStatus::Success, WcOpcode::Send as u8));
    let c = p.b.done();
    assert_eq!(
        (c.wr_id, c.byte_len, c.imm, c.wc_flags, c.opcode),
        (77, 3000, 0xdead, wc_flags::WITH_IMM as u16, WcOpcode::Recv as u8)
    );
    assert_eq!((c.qp_num, c.src_qp), (p.b.qpn, p.a.qpn));
    assert_eq!([p.b.bytes(100, 700), p.b.bytes(5000, 2300)].concat(), pattern(3000));
    assert_eq!(asyncs(&p), []);
}

#[test]
fn write_read_and_inline_move_the_bytes() {
    let mut p = Pair::new();
    p.a.fill(0, &pattern(500_000));
    let (w, r) = (remote(WrOpcode::Write, 1, &p.b, 64), remote(WrOpcode::Read, 2, &p.b, 64));
    p.a.post(w, &[p.a.sge(0, 500_000)]);
    p.a.post(r, &[p.a.sge(500_000, 500_000)]);
    let inline = abi::SqWqe {
        send_flags: send_flags::INLINE | send_flags::SIGNALED,
        inline_len: 5,
        ..remote(WrOpcode::Write, 3, &p.b, 0)
    };
    p.a.rings.sq_put(p.a.sq_prod, abi::SQ_DATA, b"hello");
    p.a.post_raw(inline);
    p.settle();
    let got: Vec<(u64, u8, u32)> = p.a.poll().iter().map(|c| (c.wr_id, c.status, c.byte_len)).collect();
    assert_eq!(got, [(1, 0, 0), (2, 0, 500_000), (3, 0, 0)]);
    assert_eq!(p.b.bytes(64, 500_000), pattern(500_000));
    assert_eq!(p.a.bytes(500_000, 500_000), pattern(500_000));
    assert_eq!(p.b.bytes(0, 5), b"hello");
    assert!(p.b.poll().is_empty(), "one-sided operations complete at the requester only");
}

#[test]
fn write_with_immediate_consumes_a_receive() {
    let mut p = Pair::new();
    p.b.recv(9, &[]);
    let w = abi::SqWqe { imm: 42, ..remote(WrOpcode::WriteImm, 1, &p.b, 0) };
    p.a.post(w, &[p.a.sge(0, 100)]);
    p.settle();
    let c = p.b.done();
    assert_eq!((c.wr_id, c.opcode, c.byte_len, c.imm), (9, WcOpcode::RecvWriteImm as u8, 100, 42));
    assert_eq!(status(&p.a.done()), WcStatus::Success);
}

#[test]
fn atomics_return_what_was_there() {
    let mut p = Pair::new();
    p.b.fill(16, &7u64.to_ne_bytes());
    let add = abi::SqWqe { compare_add: 5, ..remote(WrOpcode::FetchAdd, 1, &p.b, 16) };
    let swap = abi::SqWqe { compare_add: 12, swap: 99, ..remote(WrOpcode::CmpSwap, 2, &p.b, 16) };
    let miss = abi::SqWqe { compare_add: 1, swap: 2, ..remote(WrOpcode::CmpSwap, 3, &p.b, 16) };
    for (i, w) in [add, swap, miss].into_iter().enumerate() {
        p.a.post(w, &[p.a.sge(8 * i as u64, 8)]);
    }
    p.settle();
    assert!(p.a.poll().iter().all(|c| c.status == 0 && c.byte_len == 8));
    let old: Vec<u64> = p.a.bytes(0, 24).chunks(8).map(|b| u64::from_ne_bytes(b.try_into().unwrap())).collect();
    assert_eq!(old, [7, 12, 99]);
    assert_eq!(p.b.bytes(16, 8), 99u64.to_ne_bytes());
}

#[test]
fn only_signaled_requests_and_errors_complete() {
    let mut p = Pair::new();
    for i in 0..4 {
        let flags = if i == 3 { send_flags::SIGNALED } else { 0 };
        p.a.post(abi::SqWqe { send_flags: flags, ..remote(WrOpcode::Write, i, &p.b, 0) }, &[p.a.sge(0, 8)]);
    }
    p.settle();
    assert_eq!(p.a.done().wr_id, 3);
    p.a.post(abi::SqWqe { send_flags: 0, rkey: 1, ..remote(WrOpcode::Write, 4, &p.b, 0) }, &[p.a.sge(0, 8)]);
    p.settle();
    assert_eq!(status(&p.a.done()), WcStatus::RemAccessErr);
}

#[test]
fn events_come_once_for_each_arming() {
    let mut p = Pair::new();
    let completions = |p: &Pair| p.outputs.iter().filter(|o| matches!(o, Output::Completion { .. })).count();
    p.b.cq.arm(abi::NOTIFY_SOLICITED);
    for (i, solicited) in [(0, false), (1, true), (2, true)] {
        let s = p.b.sge(0, 64);
        p.b.recv(i, &[s]);
        let extra = if solicited { send_flags::SOLICITED } else { 0 };
        p.a.post(abi::SqWqe { send_flags: extra, ..wqe(WrOpcode::Send, i) }, &[p.a.sge(0, 8)]);
        p.settle();
        assert_eq!(completions(&p), usize::from(i > 0), "message {i}");
    }
    p.b.cq.arm(abi::NOTIFY_NEXT);
    p.b.recv(3, &[]);
    p.a.post(wqe(WrOpcode::Send, 3), &[]);
    p.settle();
    assert_eq!(completions(&p), 2);
}

#[test]
fn a_null_mr_gives_zeros_takes_anything_and_is_for_nobody_else() {
    let mut p = Pair::new();
    let (_, key) =
        p.rnic.reg_mr(p.a.session, p.a.pd, access::LOCAL_WRITE, 0, u64::MAX, (Backing::Null, Vec::new())).unwrap();
    let nowhere = abi::Sge { addr: 1 << 40, length: 16, lkey: key };
    p.b.fill(0, &[7; 64]);
    p.a.fill(0, &[9; 64]);
    p.a.post(remote(WrOpcode::Write, 1, &p.b, 8), &[nowhere, p.a.sge(0, 8)]);
    p.a.post(remote(WrOpcode::Read, 2, &p.b, 0), &[nowhere, p.a.sge(32, 4)]);
    p.settle();
    assert!(p.a.poll().iter().all(|c| c.status == 0));
    assert_eq!(p.b.bytes(0, 40), [[7; 8].as_slice(), &[0; 16], &[9; 8], &[7; 8]].concat());
    assert_eq!(p.a.bytes(28, 12), [[9; 4].as_slice(), &[0; 4], &[9; 4]].concat());
    p.b.post(abi::SqWqe { rkey: key, remote_addr: 0, ..wqe(WrOpcode::Write, 3) }, &[p.b.sge(0, 8)]);
    p.settle();
    assert_eq!(status(&p.b.done()), WcStatus::RemAccessErr);
}

#[test]
fn a_null_mr_does_not_keep_its_pd() {
    let mut p = Pair::new();
    let s = p.a.session;
    let null = |p: &mut Pair, pd| {
        p.rnic.reg_mr(s, pd, access::LOCAL_WRITE, 0, u64::MAX, (Backing::Null, Vec::new())).unwrap().0
    };
    let pd = p.rnic.create_pd(s).unwrap();
    let (first, second) = (null(&mut p, pd), null(&mut p, pd));
    p.rnic.dereg_mr(s, first).unwrap();
    p.rnic.destroy_pd(s, pd).unwrap();
    assert_eq!(p.rnic.dereg_mr(s, second), Err(unirdma_abi::Status::BadHandle), "it went with its PD");
    // A null MR that becomes another MR keeps its PD; an MR that becomes a null MR no longer does.
    let backing = || (Backing::Mapped(Span::anonymous(4096)), Vec::new());
    let pd = p.rnic.create_pd(s).unwrap();
    let (kept, by) = (null(&mut p, pd), p.rnic.reg_mr(s, pd, access::LOCAL_WRITE, 0, 4096, backing()).unwrap().0);
    p.rnic.rereg_mr(s, kept, by).unwrap();
    assert_eq!(p.rnic.destroy_pd(s, pd), Err(unirdma_abi::Status::Busy));
    let by = null(&mut p, pd);
    p.rnic.rereg_mr(s, kept, by).unwrap();
    p.rnic.destroy_pd(s, pd).unwrap();
    assert_eq!(p.rnic.dereg_mr(s, kept), Err(unirdma_abi::Status::BadHandle));
}

#[test]
fn moderated_events_come_after_a_count_or_a_period() {
    let mut p = Pair::new();
    let completions = |p: &Pair| p.outputs.iter().filter(|o| matches!(o, Output::Completion { .. })).count();
    let send = |p: &mut Pair, n: u64| {
        for i in 0..n {
            p.b.recv(i, &[]);
            p.a.post(wqe(WrOpcode::Send, i), &[]);
        }
        p.run(1000);
    };
    assert_eq!(p.rnic.modify_cq(p.a.session, p.b.cqn, 3, 50), Err(unirdma_abi::Status::BadHandle));
    p.rnic.modify_cq(p.b.session, p.b.cqn, 3, 50).unwrap();
    send(&mut p, 3);
    assert_eq!(completions(&p), 0, "nobody has asked");
    p.b.cq.arm(abi::NOTIFY_NEXT);
    send(&mut p, 2);
    assert_eq!(completions(&p), 0);
    send(&mut p, 2);
    assert_eq!(completions(&p), 1, "the third of them; the fourth finds nothing armed");
    p.b.cq.arm(abi::NOTIFY_NEXT);
    send(&mut p, 1);
    p.run(40_000);
    assert_eq!(completions(&p), 1);
    p.run(10_000);
    assert_eq!(completions(&p), 2, "50 us after the first");
    // A completion that waits is reported when the moderation ends. After that each one is reported at once.
    p.b.cq.arm(abi::NOTIFY_NEXT);
    send(&mut p, 1);
    p.rnic.modify_cq(p.b.session, p.b.cqn, 0, 0).unwrap();
    p.run(0);
    assert_eq!(completions(&p), 3);
    p.b.cq.arm(abi::NOTIFY_NEXT);
    send(&mut p, 1);
    assert_eq!(completions(&p), 4);
}

#[test]
fn a_missing_receive_waits_for_the_rnr_timer_and_then_gives_up() {
    let mut p = Pair::new();
    p.a.post(wqe(WrOpcode::Send, 1), &[p.a.sge(0, 8)]);
    p.run(600_000);
    assert!(p.a.poll().is_empty(), "timer 12 is 640 us");
    let s = p.b.sge(0, 8);
    p.b.recv(1, &[s]);
    p.run(100_000);
    assert_eq!(status(&p.a.done()), WcStatus::Success);
    assert_eq!(p.b.done().wr_id, 1);
    // rnr_retry 3: the first try and three more.
    let start = p.now;
    p.a.post(wqe(WrOpcode::Send, 2), &[p.a.sge(0, 8)]);
    p.run(3 * 640_000 - 1000);
    assert!(p.a.poll().is_empty());
    p.run(10_000);
    assert_eq!(status(&p.a.done()), WcStatus::RnrRetryExcErr);
    assert!(p.now - start < 3 * 640_000 + 20_000);
    assert_eq!((p.state(true), p.state(false)), (6, 3));
}

#[test]
fn rnr_retry_7_never_gives_up() {
    let mut p = Pair::new();
    p.reconnect(true, |attr| abi::QpAttr { rnr_retry: 7, ..attr });
    p.a.post(wqe(WrOpcode::Send, 1), &[]);
    p.run(60_000_000_000);
    assert!(p.a.poll().is_empty());
    p.b.recv(1, &[]);
    p.run(700_000);
    assert_eq!(status(&p.a.done()), WcStatus::Success);
}

#[test]
fn a_silent_peer_ends_in_retry_exceeded_after_the_time_of_the_attributes() {
    let mut p = Pair::new();
    p.rnic.remove_session(p.b.session);
    p.a.post(remote(WrOpcode::Write, 1, &p.b, 0), &[p.a.sge(0, 8)]);
    p.a.post(remote(WrOpcode::Write, 2, &p.b, 0), &[p.a.sge(0, 8)]);
    // timeout 14 is 67.1 ms; retry_cnt 3: four tries.
    p.run(4 * 67_108_864 - 1_000_000);
    assert!(p.a.poll().is_empty());
    p.run(2_000_000);
    let got: Vec<(u64, WcStatus)> = p.a.poll().iter().map(|c| (c.wr_id, status(c))).collect();
    assert_eq!(got, [(1, WcStatus::RetryExcErr), (2, WcStatus::WrFlushErr)]);
}

#[test]
fn a_peer_that_becomes_ready_within_the_retries_is_served() {
    let mut p = Pair::new();
    p.modify(false, m::STATE, abi::QpAttr::default());
    p.a.post(remote(WrOpcode::Write, 1, &p.b, 0), &[p.a.sge(0, 8)]);
    p.run(100_000_000);
    for (mask, attr) in attrs(&p.a, ip(1)).into_iter().take(2) {
        p.modify(false, mask, attr);
    }
    p.run(70_000_000);
    assert_eq!(status(&p.a.done()), WcStatus::Success);
    assert_eq!(asyncs(&p), [(p.b.qpn, AsyncEvent::CommEst)]);
}

/// A wrong request, and the errors that each side must see.
struct Wrong {
    name: &'static str,
    make: fn(&mut Pair) -> (abi::SqWqe, Vec<abi::Sge>),
    requester: WcStatus,
    responder: Option<WcStatus>,
    event: Option<AsyncEvent>,
}

const WRONG: &[Wrong] = &[
    Wrong {
        name: "foreign lkey",
        make: |p| (remote(WrOpcode::Write, 1, &p.b, 0), vec![abi::Sge { lkey: p.b.key, ..p.a.sge(0, 8) }]),
        requester: WcStatus::LocProtErr,
        responder: None,
        event: None,
    },
    Wrong {
        name: "SGE past the end of its MR",
        make: |p| (remote(WrOpcode::Write, 1, &p.b, 0), vec![p.a.sge(MR_BYTES as u64 - 4, 8)]),
        requester: WcStatus::LocProtErr,
        responder: None,
        event: None,
    },
    Wrong {
        name: "unknown opcode",
        make: |p| (abi::SqWqe { opcode: 200, ..remote(WrOpcode::Write, 1, &p.b, 0) }, vec![]),
        requester: WcStatus::LocQpOpErr,
        responder: None,
        event: None,
    },
    Wrong {
        name: "more SGEs than max_send_sge",
        make: |p| (remote(WrOpcode::Write, 1, &p.b, 0), vec![p.a.sge(0, 1); 5]),
        requester: WcStatus::LocQpOpErr,
        responder: None,
        event: None,
    },
    Wrong {
        name: "message over 2 GiB",
        make: |p| (remote(WrOpcode::Write, 1, &p.b, 0), vec![p.a.sge(0, u32::MAX); 2]),
        requester: WcStatus::LocLenErr,
        responder: None,
        event: None,
    },
    Wrong {
        name: "guessed rkey",
        make: |p| (abi::SqWqe { rkey: p.b.key ^ 1, ..remote(WrOpcode::Write, 1, &p.b, 0) }, vec![p.a.sge(0, 8)]),
        requester: WcStatus::RemAccessErr,
        responder: None,
        event: Some(AsyncEvent::QpAccessErr),
    },
    Wrong {
        name: "rkey of the requester's own PD",
        make: |p| (abi::SqWqe { rkey: p.a.key, ..remote(WrOpcode::Read, 1, &p.b, 0) }, vec![p.a.sge(0, 8)]),
        requester: WcStatus::RemAccessErr,
        responder: None,
        event: Some(AsyncEvent::QpAccessErr),
    },
    Wrong {
        name: "remote range that wraps around",
        make: |p| {
            (abi::SqWqe { remote_addr: u64::MAX - 3, ..remote(WrOpcode::Write, 1, &p.b, 0) }, vec![p.a.sge(0, 8)])
        },
        requester: WcStatus::RemAccessErr,
        responder: None,
        event: Some(AsyncEvent::QpAccessErr),
    },
    Wrong {
        name: "misaligned atomic",
        make: |p| (remote(WrOpcode::FetchAdd, 1, &p.b, 4), vec![p.a.sge(0, 8)]),
        requester: WcStatus::RemInvReqErr,
        responder: None,
        event: Some(AsyncEvent::QpReqErr),
    },
    Wrong {
        name: "receive buffer too short",
        make: |p| {
            let s = p.b.sge(0, 7);
            p.b.recv(50, &[s]);
            (wqe(WrOpcode::Send, 1), vec![p.a.sge(0, 8)])
        },
        requester: WcStatus::RemInvReqErr,
        responder: Some(WcStatus::LocLenErr),
        event: None,
    },
    Wrong {
        name: "receive with a foreign lkey",
        make: |p| {
            let s = abi::Sge { lkey: p.a.key, ..p.b.sge(0, 8) };
            p.b.recv(50, &[s]);
            (wqe(WrOpcode::Send, 1), vec![p.a.sge(0, 8)])
        },
        requester: WcStatus::RemOpErr,
        responder: Some(WcStatus::LocProtErr),
        event: None,
    },
];

#[test]
fn wrong_requests_get_the_status_of_the_specification_and_flush_the_rest() {
    for case in WRONG {
        let mut p = Pair::new();
        let (w, sges) = (case.make)(&mut p);
        let n = sges.len().min(4);
        p.a.rings.sq_put(p.a.sq_prod, abi::SQ_DATA, zerocopy::IntoBytes::as_bytes(&sges[..n]));
        p.a.post_raw(abi::SqWqe { num_sge: sges.len() as u8, ..w });
        p.a.post(remote(WrOpcode::Write, 2, &p.b, 0), &[p.a.sge(0, 8)]);
        p.settle();
        let got: Vec<WcStatus> = p.a.poll().iter().map(status).collect();
        assert_eq!(got, [case.requester, WcStatus::WrFlushErr], "{}", case.name);
        let got: Vec<WcStatus> = p.b.poll().iter().map(status).collect();
        assert_eq!(got, case.responder.into_iter().collect::<Vec<_>>(), "{}", case.name);
        assert_eq!(asyncs(&p), case.event.map(|e| (p.b.qpn, e)).into_iter().collect::<Vec<_>>(), "{}", case.name);
        assert_eq!(p.state(true), 6, "{}", case.name);
        let responder_fails = case.responder.is_some() || case.event.is_some();
        assert_eq!(p.state(false) == 6, responder_fails, "{}", case.name);
    }
}

#[test]
fn access_flags_of_mr_and_qp_both_count() {
    for (mr_flags, qp_flags, refused) in [
        (access::LOCAL_WRITE | access::REMOTE_READ, ALL, WcStatus::RemAccessErr),
        (ALL, access::REMOTE_READ, WcStatus::RemInvReqErr),
    ] {
        let mut p = Pair::new();
        let (_, key) = p
            .rnic
            .reg_mr(p.b.session, p.b.pd, mr_flags, IOVA, 4096, (Backing::Mapped(p.b.memory.clone()), vec![]))
            .unwrap();
        p.modify(false, m::ACCESS_FLAGS, abi::QpAttr { qp_access_flags: qp_flags, ..Default::default() });
        p.a.post(abi::SqWqe { rkey: key, ..remote(WrOpcode::Read, 1, &p.b, 0) }, &[p.a.sge(0, 8)]);
        p.a.post(abi::SqWqe { rkey: key, ..remote(WrOpcode::Write, 2, &p.b, 0) }, &[p.a.sge(0, 8)]);
        p.settle();
        let got: Vec<WcStatus> = p.a.poll().iter().map(status).collect();
        assert_eq!(got, [WcStatus::Success, refused]);
    }
}

#[test]
fn a_zero_length_message_needs_no_key() {
    let mut p = Pair::new();
    p.a.post(abi::SqWqe { rkey: 0, remote_addr: 3, ..wqe(WrOpcode::Write, 1) }, &[]);
    p.settle();
    assert_eq!(status(&p.a.done()), WcStatus::Success);
}

#[test]
fn deregistered_and_revoked_memory_is_out_of_reach() {
    for revoke in [false, true] {
        let mut p = Pair::new();
        if revoke {
            p.rnic.revoke_regions(p.b.session, &[7]);
        } else {
            p.rnic.dereg_mr(p.b.session, p.b.mr).unwrap();
        }
        p.a.post(remote(WrOpcode::Write, 1, &p.b, 0), &[p.a.sge(0, 8)]);
        p.settle();
        assert_eq!(status(&p.a.done()), WcStatus::RemAccessErr);
    }
}

#[test]
fn err_flushes_both_queues_and_what_is_posted_later() {
    let mut p = Pair::new();
    let s = p.b.sge(0, 8);
    p.b.recv(1, &[s]);
    p.b.recv(2, &[s]);
    p.modify(false, m::STATE, abi::QpAttr { qp_state: 6, ..Default::default() });
    p.settle();
    p.b.recv(3, &[s]);
    p.b.post(wqe(WrOpcode::Send, 4), &[]);
    p.settle();
    let mut got: Vec<(u64, WcStatus)> = p.b.poll().iter().map(|c| (c.wr_id, status(c))).collect();
    got.sort_by_key(|c| c.0);
    assert_eq!(got, [1, 2, 3, 4].map(|i| (i, WcStatus::WrFlushErr)));
}

#[test]
fn a_reset_qp_starts_over() {
    let mut p = Pair::new();
    p.a.post(remote(WrOpcode::Write, 1, &p.b, 0), &[p.a.sge(0, 8)]);
    p.settle();
    p.a.poll();
    for of_a in [true, false] {
        p.reconnect(of_a, |attr| attr);
    }
    p.a.post(remote(WrOpcode::Write, 2, &p.b, 0), &[p.a.sge(0, 8)]);
    p.settle();
    assert_eq!((p.a.done().wr_id, p.state(true)), (2, 3));
}

#[test]
fn sqd_finishes_what_has_begun_and_says_so() {
    let mut p = Pair::new();
    p.modify(
        true,
        m::STATE | m::EN_SQD_ASYNC_NOTIFY,
        abi::QpAttr { qp_state: 4, en_sqd_async_notify: 1, ..Default::default() },
    );
    p.a.post(remote(WrOpcode::Write, 1, &p.b, 0), &[p.a.sge(0, 8)]);
    p.settle();
    assert!(p.a.poll().is_empty());
    assert_eq!(asyncs(&p), [(p.a.qpn, AsyncEvent::SqDrained)]);
    p.modify(true, m::STATE, abi::QpAttr { qp_state: 3, ..Default::default() });
    p.settle();
    assert_eq!(p.a.done().wr_id, 1);
}

#[test]
fn groups_do_not_connect_and_may_use_the_same_address() {
    let mut p = Pair::new();
    let other = End::new(&mut p.rnic, 1, 2);
    let [init, rtr, _] = attrs(&p.b, ip(1));
    p.rnic.modify_qp(other.session, other.qpn, init.0, &init.1).unwrap();
    assert_eq!(p.rnic.modify_qp(other.session, other.qpn, rtr.0, &rtr.1), Err(abi::Status::Unreachable));
    // Its own group has that address, too: the QP connects there, and not to b, which has it in another group.
    let [_, rtr, rts] = attrs(&p.b, ip(2));
    p.rnic.modify_qp(other.session, other.qpn, rtr.0, &rtr.1).unwrap();
    p.rnic.modify_qp(other.session, other.qpn, rts.0, &rts.1).unwrap();
    let mut other = other;
    other.post(remote(WrOpcode::Write, 1, &p.b, 0), &[other.sge(0, 8)]);
    p.run(1_000_000_000);
    assert_eq!(status(&other.done()), WcStatus::RetryExcErr);
    assert_eq!(p.state(false), 3, "the namesake in the other group is not disturbed");
}

#[test]
fn a_qp_that_is_connected_to_somebody_else_does_not_answer() {
    let mut p = Pair::new();
    let mut c = End::new(&mut p.rnic, 0, 3);
    for (mask, attr) in attrs(&p.b, ip(2)) {
        p.rnic.modify_qp(c.session, c.qpn, mask, &attr).unwrap();
    }
    c.post(remote(WrOpcode::Write, 1, &p.b, 0), &[c.sge(0, 8)]);
    p.run(1_000_000_000);
    assert_eq!(status(&c.done()), WcStatus::RetryExcErr);
    assert_eq!(p.b.bytes(0, 8), [0; 8]);
}

#[test]
fn handles_of_another_session_are_no_handles() {
    let mut p = Pair::new();
    let (a, b) = (p.a.session, &p.b);
    assert_eq!(p.rnic.destroy_qp(a, b.qpn), Err(abi::Status::BadHandle));
    assert_eq!(p.rnic.destroy_cq(a, b.cqn), Err(abi::Status::BadHandle));
    assert_eq!(p.rnic.destroy_pd(a, b.pd), Err(abi::Status::BadHandle));
    assert_eq!(p.rnic.dereg_mr(a, b.mr), Err(abi::Status::BadHandle));
    assert_eq!(p.rnic.query_qp(a, b.qpn), Err(abi::Status::BadHandle));
    assert_eq!(p.rnic.destroy_pd(b.session, b.pd), Err(abi::Status::Busy));
    assert_eq!(p.rnic.destroy_cq(b.session, b.cqn), Err(abi::Status::Busy));
}

#[test]
fn an_overrun_cq_takes_its_qps_down_and_nobody_else() {
    let mut p = Pair::new();
    let small = End::of_vrnic(&mut p.rnic, p.a.vrnic, 2, unirdma_formats::QpType::Rc);
    let mut small = small;
    let peer = End::new(&mut p.rnic, 0, 9);
    for (mask, attr) in attrs(&peer, ip(9)) {
        p.rnic.modify_qp(small.session, small.qpn, mask, &attr).unwrap();
    }
    for (mask, attr) in attrs(&small, ip(1)) {
        p.rnic.modify_qp(peer.session, peer.qpn, mask, &attr).unwrap();
    }
    for i in 0..4 {
        small.post(remote(WrOpcode::Write, i, &peer, 0), &[small.sge(0, 8)]);
    }
    p.settle();
    let events = asyncs(&p);
    assert!(
        events.contains(&(small.cqn, AsyncEvent::CqErr)) && events.contains(&(small.qpn, AsyncEvent::QpFatal)),
        "{events:?}"
    );
    p.a.post(remote(WrOpcode::Write, 1, &p.b, 0), &[p.a.sge(0, 8)]);
    p.settle();
    assert_eq!(status(&p.a.done()), WcStatus::Success);
}

/// REREG_MR: the keys stay, but name other memory.
#[test]
fn an_mr_can_become_another_one() {
    let mut p = Pair::new();
    let (session, pd, mr) = (p.b.session, p.b.pd, p.b.mr);
    let memory = aligned(4096);
    let backing = unirdma_rnic::Backing::Mapped(memory.clone());
    let (by, key) = p.rnic.reg_mr(session, pd, ALL, 0x9000, 4096, (backing, vec![8])).unwrap();
    p.rnic.rereg_mr(session, mr, by).unwrap();
    for (bad, other) in [(mr, mr), (mr, by), (by, mr), (p.a.mr, mr), (mr, p.a.mr)] {
        assert_eq!(p.rnic.rereg_mr(session, bad, other).unwrap_err(), abi::Status::BadHandle);
    }
    p.a.fill(0, &[5; 64]);
    let sge = p.a.sge(0, 64);
    p.a.post(abi::SqWqe { remote_addr: 0x9000, rkey: p.b.key, ..wqe(WrOpcode::Write, 1) }, &[sge]);
    p.settle();
    assert_eq!(status(&p.a.done()), WcStatus::Success);
    let mut got = [0; 64];
    memory.read(0, &mut got);
    assert_eq!(got, [5; 64]);
    // The other's key is gone with it, and so is the old range.
    for (addr, rkey) in [(0x9000, key), (IOVA, p.b.key)] {
        p.reconnect(true, |a| a);
        p.reconnect(false, |a| a);
        p.a.post(abi::SqWqe { remote_addr: addr, rkey, ..wqe(WrOpcode::Write, 2) }, &[sge]);
        p.settle();
        assert_eq!(status(&p.a.done()), WcStatus::RemAccessErr);
    }
}

#[test]
fn a_jumping_index_breaks_its_own_qp_only() {
    let mut p = Pair::new();
    p.a.rings.set_sq_prod(1000);
    p.a.bell.ring(p.a.slot);
    p.settle();
    assert_eq!(asyncs(&p), [(p.a.qpn, AsyncEvent::QpFatal)]);
    assert_eq!((p.state(true), p.state(false)), (6, 3));
    // A receiver that breaks the rules does not hurt the sender's host either: the sender gets no answer.
    let mut p = Pair::new();
    p.b.rings.set_rq_prod(1000);
    p.a.post(wqe(WrOpcode::Send, 1), &[]);
    p.run(1_000_000_000);
    assert_eq!(status(&p.a.done()), WcStatus::RetryExcErr);
}

#[test]
fn tenants_share_by_turns() {
    let mut p = Pair::new();
    // a posts many large writes, b one small one, which completes long before a's backlog.
    for i in 0..16 {
        p.a.post(remote(WrOpcode::Write, i, &p.b, 0), &[p.a.sge(0, MR_BYTES as u32)]);
    }
    p.b.post(remote(WrOpcode::Write, 100, &p.a, 0), &[p.b.sge(0, 8)]);
    poll(&mut p.rnic, 0);
    poll(&mut p.rnic, 0);
    assert_eq!(p.b.poll().len(), 1);
    assert!(p.a.poll().len() < 4);
}

#[test]
fn a_message_that_breaks_off_loses_no_receive() {
    let mut p = Pair::new();
    let s = p.b.sge(0, MR_BYTES as u32);
    p.b.recv(1, &[s]);
    p.b.recv(2, &[s]);
    p.settle();
    p.a.post(wqe(WrOpcode::Send, 1), &[p.a.sge(0, MR_BYTES as u32)]);
    p.rnic.poll(0);
    assert!(p.a.poll().is_empty() && p.b.poll().is_empty(), "under way");
    // The sender starts over, with the same sequence number, and sends something else.
    p.reconnect(true, |attr| attr);
    for i in 0..2 {
        p.a.post(wqe(WrOpcode::Send, i), &[p.a.sge(0, 8)]);
    }
    p.settle();
    let got: Vec<(u64, u32)> = p.b.poll().iter().map(|c| (c.wr_id, c.byte_len)).collect();
    assert_eq!(got, [(1, 8), (2, 8)]);
}

#[test]
fn a_qp_may_be_connected_to_itself() {
    let mut p = Pair::new();
    p.modify(true, m::STATE, abi::QpAttr::default());
    let steps = attrs(&p.a, ip(1));
    for (mask, attr) in steps {
        p.modify(true, mask, attr);
    }
    p.a.fill(0, b"loop");
    let s = p.a.sge(100, 8);
    p.a.recv(1, &[s]);
    p.a.post(wqe(WrOpcode::Send, 2), &[p.a.sge(0, 4)]);
    p.settle();
    assert_eq!(p.a.poll().len(), 2);
    assert_eq!(p.a.bytes(100, 4), b"loop");
}
