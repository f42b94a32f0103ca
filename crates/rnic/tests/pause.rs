//! Sessions that pause: their memory is not touched, and everything goes on afterwards.

use unirdma_abi as abi;
use unirdma_formats::{QpType, WcStatus, WrOpcode};
use unirdma_mem::Bell;
use unirdma_rnic::CreateQp;
use unirdma_simkit::net::{Faults, Net};
use unirdma_simkit::*;

const MS: u64 = 1_000_000;
const LEN: usize = 30_000;
const OPS: [WrOpcode; 6] =
    [WrOpcode::Write, WrOpcode::Send, WrOpcode::WriteImm, WrOpcode::Read, WrOpcode::CmpSwap, WrOpcode::FetchAdd];

/// Two RC QPs on one host, and on two, which retry for 8 times 67 ms.
fn places() -> Vec<(&'static str, Net)> {
    let patient = |a| abi::QpAttr { retry_cnt: 7, rnr_retry: 7, ..a };
    let typ = QpType::Rc;
    let mut one = Net::hosts(1, &[typ, typ], 9, Faults::default());
    one.connect(typ, 0, 1, &patient);
    one.connect(typ, 1, 0, &patient);
    vec![("one host", one), ("two hosts", Net::of_type(typ, 9, Faults::default(), patient))]
}

fn pause(net: &mut Net, end: usize, on: bool) {
    let s = net.session(end);
    let rnic = net.rnic(end);
    if on {
        rnic.pause_session(s);
    } else {
        rnic.resume_session(s);
    }
}

/// Everything of an end that the RNIC writes to.
fn written(net: &Net, end: usize) -> (Vec<u8>, u32, [u32; 2]) {
    let e = &net.ends[end];
    (e.bytes(0, MR_BYTES), e.cq.waiting(), [e.rings.sq_free(0), e.rings.rq_free(0)])
}

#[test]
fn nothing_of_a_paused_session_is_touched_and_nothing_is_lost() {
    for pauses in [vec![0], vec![1], vec![0, 1]] {
        for op in OPS {
            for (place, mut net) in places() {
                let about = format!("{place}, {op:?}, {pauses:?} pause");
                let mine = pattern(LEN, 1);
                net.ends[0].fill(0, &mine);
                net.ends[1].fill(0, &pattern(LEN, 2));
                if op.consumes_recv() {
                    let sge = net.ends[1].sge(0, LEN as u32);
                    net.ends[1].recv(50, &[sge]);
                }
                net.run(MS);
                pauses.iter().for_each(|&end| pause(&mut net, end, true));
                let before: Vec<_> = pauses.iter().map(|&end| written(&net, end)).collect();
                let len = if op.is_atomic() { 8 } else { LEN as u32 };
                let (w, sge) = (net.remote(op, 7, 0), net.ends[0].sge(0, len));
                net.ends[0].post(w, &[sge]);
                net.run(200 * MS);
                let now: Vec<_> = pauses.iter().map(|&end| written(&net, end)).collect();
                assert!(before == now, "{about}");
                assert!(net.ends[0].poll().is_empty(), "{about}");
                pauses.iter().for_each(|&end| pause(&mut net, end, false));
                net.run(500 * MS);
                assert_eq!(status(&net.ends[0].done()), WcStatus::Success, "{about}");
                if op.consumes_recv() {
                    assert_eq!(status(&net.ends[1].done()), WcStatus::Success, "{about}");
                }
                if !op.is_atomic() {
                    assert_eq!(net.ends[0].bytes(0, LEN), net.ends[1].bytes(0, LEN), "{about}");
                }
            }
        }
    }
}

#[test]
fn time_that_passes_in_a_pause_uses_up_no_retries() {
    for (place, mut net) in places() {
        pause(&mut net, 1, true);
        let (w, sge) = (net.remote(WrOpcode::Write, 7, 0), net.ends[0].sge(0, 8));
        net.ends[0].post(w, &[sge]);
        net.run(100 * MS);
        pause(&mut net, 0, true);
        net.run(10_000 * MS);
        assert!(net.ends[0].poll().is_empty(), "{place}");
        pause(&mut net, 1, false);
        pause(&mut net, 0, false);
        net.run(500 * MS);
        assert_eq!(status(&net.ends[0].done()), WcStatus::Success, "{place}");
    }
}

#[test]
fn a_peer_that_pauses_too_long_is_gone() {
    for (place, mut net) in places() {
        pause(&mut net, 1, true);
        let (w, sge) = (net.remote(WrOpcode::Write, 7, 0), net.ends[0].sge(0, 8));
        net.ends[0].post(w, &[sge]);
        net.run(10_000 * MS);
        assert_eq!(status(&net.ends[0].done()), WcStatus::RetryExcErr, "{place}");
    }
}

#[test]
fn each_doorbell_page_has_its_own_bits() {
    let mut p = Pair::new();
    p.settle();
    let (session, pd, cqn) = (p.a.session, p.a.pd, p.a.cqn);
    let page = Bell::new(aligned(4096)).unwrap();
    let door = p.rnic.create_doorbell(session, page.clone()).unwrap();
    let cap = abi::QpCap { max_send_wr: 4, max_recv_wr: 4, max_send_sge: 1, max_recv_sge: 1, max_inline_data: 0 };
    let layout = abi::QpLayout::of(&cap).unwrap();
    let rings =
        || unirdma_mem::QpRings::new(aligned(128), aligned(layout.sq_bytes()), aligned(layout.rq_bytes()), layout);
    let mut create = |door| {
        let rings = rings().unwrap();
        let (send_cq, recv_cq, ring) = (cqn, cqn, rings.clone());
        let c = CreateQp { pd, send_cq, recv_cq, srq: None, xrcd: None, door, sig_all: true, cap, rings };
        (p.rnic.create_qp(session, QpType::Rc as u8, c).unwrap(), ring)
    };
    let (((qpn, slot), ring), ((other, _), _)) = (create(door), create(0));
    for (e, qpn) in [(&p.b, qpn), (&p.b, other)] {
        for (mask, attr) in attrs(e, ip(2)) {
            p.rnic.modify_qp(session, qpn, mask, &attr).unwrap();
        }
    }
    p.settle();
    // A request that the QP must not take. A page without a bit of the QP does not wake it.
    ring.sq_put(0, 0, zerocopy::IntoBytes::as_bytes(&abi::SqWqe { opcode: 99, ..Default::default() }));
    ring.set_sq_prod(1);
    let state = |p: &Pair| p.rnic.query_qp(session, qpn).unwrap().qp_state;
    assert_eq!(slot, 0);
    p.a.bell.ring(1);
    p.run(1000 * MS);
    assert_eq!(u32::from(state(&p)), unirdma_formats::QpState::Rts as u32);
    assert_eq!(page.ring(slot), abi::ASLEEP, "a page that nobody has notified sleeps");
    p.rnic.unpark(session, p.now);
    p.run(MS);
    assert_eq!(u32::from(state(&p)), unirdma_formats::QpState::Err as u32);
    assert_eq!(p.rnic.destroy_doorbell(session, door), Err(abi::Status::Busy));
    p.rnic.destroy_qp(session, qpn).unwrap();
    p.rnic.destroy_doorbell(session, door).unwrap();
}
