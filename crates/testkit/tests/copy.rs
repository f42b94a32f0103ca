//! Memory of the way *copy*: the data of sends is copied when they are posted, the data of receives is placed when they
//! are polled, and a program sees no other difference.
#![allow(missing_docs)]

use unirdma_abi as abi;
use unirdma_driver::{Cq, Mr, Qp, QpInit, SendWr, Srq, Way};
use unirdma_formats::send_flags::FENCE;
use unirdma_formats::{WcStatus, WrOpcode, access, attr_mask as m};
use unirdma_testkit::{Program, TestHost, connect};

const MIB: usize = 1 << 20;

/// Starts a virtual layer for programs whose memory goes this way.
fn start() -> TestHost {
    static ONCE: std::sync::Once = std::sync::Once::new();
    // SAFETY: each test thread calls this before anything else; no C code reads the environment.
    ONCE.call_once(|| unsafe { std::env::set_var("UNIRDMA_MR", "copy") });
    TestHost::start()
}

fn pair(host: &TestHost, len: usize) -> (Program, Program) {
    let (a, b) = (Program::new(&host.add("a", "10.0.0.1"), len), Program::new(&host.add("b", "10.0.0.2"), len));
    assert_eq!((a.mr.way().0, b.mr.way().0), (Way::Copy, Way::Copy));
    connect(&a, &b);
    (a, b)
}

fn fill(p: &mut Program, from: usize, len: usize, salt: usize) {
    (from..from + len).for_each(|i| p.buf[i] = value(i - from, salt));
}

fn value(i: usize, salt: usize) -> u8 {
    (i * 7 + i / 251 + salt * 31 + 1) as u8
}

fn holds(p: &Program, from: usize, len: usize, salt: usize) -> bool {
    (0..len).all(|i| p.byte(from + i) == value(i, salt))
}

fn status(c: &abi::Cqe) -> WcStatus {
    WcStatus::from_raw(c.status.into()).expect("status")
}

#[test]
fn a_receive_is_placed_when_it_is_polled() {
    let host = start();
    let (mut a, b) = pair(&host, 4 * MIB);
    for (round, len) in [1, 64, 65, 4096, 100_000, 2 * MIB].into_iter().enumerate() {
        fill(&mut a, 0, len, round);
        b.recv(MIB, 2 * MIB + 5).unwrap();
        a.post(WrOpcode::Send, &b, 0, len).unwrap();
        assert_eq!(a.wait().unwrap().status, 0);
        // The sender's completion says that the data has arrived, but the receiver has not polled.
        let early = (0..len).filter(|&i| b.byte(MIB + i) == value(i, round)).count();
        assert!(early < len / 2 + 1, "{len} bytes, {early} are there already");
        let got = b.wait().unwrap();
        assert_eq!((got.status, got.byte_len as usize, got.wr_id as usize), (0, len, MIB));
        assert!(holds(&b, MIB, len, round), "{len} bytes");
        assert_eq!(b.byte(MIB + len), 0, "and no more");
    }
}

/// The program may reuse its buffer as soon as the request is posted. Programs must not rely on that.
#[test]
fn a_send_is_taken_when_it_is_posted() {
    let host = start();
    let (mut a, b) = pair(&host, 3 * MIB);
    for (round, len) in [1, 64, 65, 5000, MIB].into_iter().enumerate() {
        // No receive is posted yet.
        fill(&mut a, 0, len, round);
        a.post(WrOpcode::Send, &b, 0, len).unwrap();
        fill(&mut a, 0, len, 99);
        b.recv(MIB, MIB).unwrap();
        assert_eq!((a.wait().unwrap().status, b.wait().unwrap().status), (0, 0));
        assert!(holds(&b, MIB, len, round), "{len} bytes");
        fill(&mut a, 0, len, round);
        a.post(WrOpcode::Write, &b, 0, len).unwrap();
        assert_eq!(a.wait().unwrap().status, 0);
        assert!(holds(&b, 0, len, round), "WRITE of {len} bytes");
    }
}

/// A request with a fence sends the data that the READ before it has brought.
#[test]
fn a_fenced_send_is_not_taken_early() {
    let host = start();
    let (mut a, mut b) = pair(&host, MIB);
    for round in 0..20 {
        let len = [64, 3000][round % 2];
        fill(&mut a, 0, len, 50);
        fill(&mut b, 0, len, round);
        b.recv(MIB / 2, len).unwrap();
        {
            let sge = |p: &Program| abi::Sge { addr: p.buf.as_ptr() as u64, length: len as u32, lkey: p.mr.key };
            let read = abi::SqWqe {
                opcode: WrOpcode::Read as u8,
                remote_addr: b.buf.as_ptr() as u64,
                rkey: b.mr.key,
                ..Default::default()
            };
            let fenced = abi::SqWqe { opcode: WrOpcode::Send as u8, send_flags: FENCE, ..Default::default() };
            let mut batch = a.qp.send_batch();
            // SAFETY: the MR's memory lives.
            unsafe {
                batch.push(&read, SendWr::Sges(&[sge(&a)])).and_then(|()| batch.push(&fenced, SendWr::Sges(&[sge(&a)])))
            }
            .unwrap();
        }
        assert_eq!((a.wait().unwrap().status, a.wait().unwrap().status, b.wait().unwrap().status), (0, 0, 0));
        let got: Vec<u8> = (0..8).map(|i| b.byte(MIB / 2 + i)).collect();
        assert!(holds(&b, MIB / 2, len, round), "round {round}: {got:?}, not from {}", value(0, round));
    }
}

/// More data than the send ring and the stage hold. The rest goes through the process, in order.
#[test]
fn more_outstanding_than_there_is_room() {
    let host = start();
    let (mut a, b) = pair(&host, 17 * MIB);
    for round in 0..3 {
        for i in 0..16 {
            fill(&mut a, i * MIB, MIB, i + round);
            b.recv(i * MIB, MIB).unwrap();
        }
        for i in 0..16 {
            a.post(WrOpcode::Send, &b, i * MIB, MIB).unwrap();
        }
        for i in 0..16 {
            let sent = a.wait().unwrap();
            assert_eq!((sent.status, sent.wr_id as usize), (0, i * MIB));
        }
        for i in 0..16 {
            let got = b.wait().unwrap();
            assert_eq!((got.status, got.wr_id as usize, got.byte_len as usize), (0, i * MIB, MIB));
            assert!(holds(&b, i * MIB, MIB, i + round), "round {round}, message {i}");
        }
    }
}

#[test]
fn errors_are_what_the_device_says() {
    let host = start();
    let (a, b) = pair(&host, MIB);
    let reset = |p: &Program| p.qp.modify(m::STATE, &abi::QpAttr::default()).unwrap();
    let send = |sge: abi::Sge| {
        let wqe = abi::SqWqe { wr_id: 5, opcode: WrOpcode::Send as u8, ..Default::default() };
        // SAFETY: the part of the gather list that the MR covers is live memory.
        unsafe { a.qp.send_batch().push(&wqe, SendWr::Sges(&[sge])) }.unwrap();
    };
    let start = a.buf.as_ptr() as u64;
    let key = a.mr.key;
    let bad = [
        abi::Sge { addr: start, length: 10, lkey: key ^ 1 },
        abi::Sge { addr: start + MIB as u64 - 9, length: 10, lkey: key },
        abi::Sge { addr: start - 1, length: 10, lkey: key },
        abi::Sge { addr: start, length: MIB as u32 + 1, lkey: key },
        // Of another PD.
        abi::Sge { addr: start, length: 10, lkey: other_pd(&a).key },
    ];
    for sge in bad {
        b.recv(0, 100).unwrap();
        send(sge);
        assert_eq!(status(&a.wait().unwrap()), WcStatus::LocProtErr, "{sge:?}");
        reset(&a);
        reset(&b);
        connect(&a, &b);
    }
    // A receive that is too short, and one with an invalid key.
    b.recv(0, 50).unwrap();
    a.post(WrOpcode::Send, &b, 0, 51).unwrap();
    assert_eq!(status(&a.wait().unwrap()), WcStatus::RemInvReqErr);
    assert_eq!(status(&b.wait().unwrap()), WcStatus::LocLenErr);
    reset(&a);
    reset(&b);
    connect(&a, &b);
    let sge = abi::Sge { addr: b.buf.as_ptr() as u64, length: 100, lkey: b.mr.key ^ 1 };
    b.qp.recv_batch().push(1, &[sge]).unwrap();
    a.post(WrOpcode::Send, &b, 0, 51).unwrap();
    assert_eq!(status(&a.wait().unwrap()), WcStatus::RemOpErr);
    assert_eq!(status(&b.wait().unwrap()), WcStatus::LocProtErr);
    assert_eq!(b.byte(0), 0);
}

/// An MR of the program's memory in a PD of its own.
fn other_pd(p: &Program) -> Mr {
    let pd: abi::HandleResp = p.ctx.command(abi::Command::CreatePd, &[0u8; 0]).unwrap();
    let addr = p.buf.as_ptr() as u64;
    Mr::register(&p.ctx, pd.handle, addr, p.buf.len() as u64, addr, access::LOCAL_WRITE).unwrap()
}

#[test]
fn flushed_receives_place_nothing() {
    let host = start();
    let (mut a, b) = pair(&host, MIB);
    fill(&mut a, 0, 1000, 1);
    b.recv(0, 1000).unwrap();
    b.recv(2000, 1000).unwrap();
    b.recv(4000, 1000).unwrap();
    a.post(WrOpcode::Send, &b, 0, 1000).unwrap();
    assert_eq!(a.wait().unwrap().status, 0);
    b.qp.modify(m::STATE, &abi::QpAttr { qp_state: 6, ..Default::default() }).unwrap();
    let got: Vec<_> = (0..3).map(|_| b.wait().unwrap()).map(|c| (c.wr_id, status(&c))).collect();
    assert_eq!(got, [(0, WcStatus::Success), (2000, WcStatus::WrFlushErr), (4000, WcStatus::WrFlushErr)]);
    assert!(holds(&b, 0, 1000, 1));
    assert!((1000..6000).all(|i| b.byte(i) == 0));
}

/// The memory of a deregistered MR may have another owner.
#[test]
fn what_is_deregistered_has_nothing_placed_into_it() {
    let host = start();
    let (mut a, mut b) = pair(&host, MIB);
    fill(&mut a, 0, 1000, 1);
    b.recv(0, 1000).unwrap();
    a.post(WrOpcode::Send, &b, 0, 1000).unwrap();
    assert_eq!(a.wait().unwrap().status, 0);
    b.mr.deregister().unwrap();
    assert_eq!(b.wait().unwrap().status, 0);
    assert!((0..1000).all(|i| b.byte(i) == 0));
}

/// Receives whose completions are not polled do not fill the stage for ever.
#[test]
fn a_reset_gives_the_stage_back() {
    let host = start();
    let (mut a, b) = pair(&host, 3 * MIB);
    let reset = |p: &Program| {
        p.qp.modify(m::STATE, &abi::QpAttr::default()).unwrap();
        p.cq.forget(p.qp.qpn);
    };
    for _ in 0..30 {
        b.recv(0, MIB).unwrap();
        a.post(WrOpcode::Send, &b, 0, MIB).unwrap();
        assert_eq!(a.wait().unwrap().status, 0);
        reset(&a);
        reset(&b);
        assert_eq!(b.cq.poll(1, |_, _| panic!("forgotten")), Ok(0));
        connect(&a, &b);
    }
    fill(&mut a, 0, MIB, 3);
    b.recv(2 * MIB, MIB).unwrap();
    a.post(WrOpcode::Send, &b, 0, MIB).unwrap();
    assert_eq!(a.wait().unwrap().status, 0);
    assert!((0..MIB).all(|i| b.byte(2 * MIB + i) == 0), "there was no room in the stage");
    assert_eq!(b.wait().unwrap().status, 0);
    assert!(holds(&b, 2 * MIB, MIB, 3));
}

/// A shared receive queue with receives in two MRs. The addresses of one MR are not its virtual addresses.
#[test]
fn shared_receives_are_placed() {
    let host = start();
    let (mut a, mut b) = pair(&host, MIB);
    let pd: abi::HandleResp = b.ctx.command(abi::Command::CreatePd, &[0u8; 0]).unwrap();
    let (srq_max, srq_sge) = (16, 2);
    let srq = Srq::create(&b.ctx, pd.handle, srq_max, srq_sge, None, false).unwrap();
    let cq = Cq::create(&b.ctx, 64, None, false).unwrap();
    let init = QpInit {
        pdn: pd.handle,
        qp_type: 2,
        sig_all: true,
        send_cqn: cq.cqn,
        recv_cqn: cq.cqn,
        srqn: Some(srq.srqn),
        xrcdn: None,
        cap: abi::QpCap { max_send_wr: 1, max_send_sge: 1, ..Default::default() },
        alone: false,
    };
    b.qp = Qp::create(&b.ctx, &init).unwrap();
    b.cq = cq;
    let addr = b.buf.as_ptr() as u64;
    let half = (MIB / 2) as u64;
    let low = Mr::register(&b.ctx, pd.handle, addr, half, addr, access::LOCAL_WRITE).unwrap();
    let high = Mr::register(&b.ctx, pd.handle, addr + half, half, 0x5000, access::LOCAL_WRITE).unwrap();
    a.qp.modify(m::STATE, &abi::QpAttr::default()).unwrap();
    connect(&a, &b);
    for i in 0..16u64 {
        let first = abi::Sge { addr: addr + i * 1000, length: 600, lkey: low.key };
        let second = abi::Sge { addr: 0x5000 + i * 1000, length: 400, lkey: high.key };
        srq.recv_batch().push(i, &[second, first]).unwrap();
    }
    for i in 0..16 {
        fill(&mut a, 0, 900, i);
        a.post(WrOpcode::Send, &b, 0, 900).unwrap();
        assert_eq!(a.wait().unwrap().status, 0);
    }
    for i in 0..16 {
        let got = b.wait().unwrap();
        assert_eq!((got.status, got.wr_id as usize, got.byte_len), (0, i, 900));
        let second = (0..400).all(|j| b.byte(MIB / 2 + i * 1000 + j) == value(j, i));
        let first = (0..500).all(|j| b.byte(i * 1000 + j) == value(400 + j, i));
        assert!(first && second, "receive {i}");
        assert!((500..1000).all(|j| b.byte(i * 1000 + j) == 0), "receive {i} has what was sent and no more");
    }
}

/// An MR gets other memory while a message waits in the stage.
#[test]
fn a_message_goes_where_its_receive_said() {
    let host = start();
    let (mut a, mut b) = pair(&host, MIB);
    fill(&mut a, 0, 1000, 1);
    b.recv(0, 1000).unwrap();
    a.post(WrOpcode::Send, &b, 0, 1000).unwrap();
    assert_eq!(a.wait().unwrap().status, 0);
    let pd: abi::HandleResp = b.ctx.command(abi::Command::CreatePd, &[0u8; 0]).unwrap();
    let other = vec![0u8; 4096];
    let at = other.as_ptr() as u64;
    let new = Mr::register(&b.ctx, pd.handle, at, 4096, b.buf.as_ptr() as u64, access::LOCAL_WRITE).unwrap();
    b.mr.replace(new).unwrap();
    assert_eq!(b.wait().unwrap().status, 0);
    assert!((0..1000).all(|i| b.byte(i) == 0) && other.iter().all(|&v| v == 0), "that memory is not the MR's any more");
}

/// Many threads post and poll queue pairs of one context.
#[test]
fn threads_do_not_meet() {
    let host = start();
    let (sa, sb) = (host.add("a", "10.0.0.1"), host.add("b", "10.0.0.2"));
    std::thread::scope(|scope| {
        for t in 0..4 {
            let (sa, sb) = (&sa, &sb);
            scope.spawn(move || {
                let (mut a, b) = (Program::new(sa, MIB), Program::new(sb, MIB));
                connect(&a, &b);
                for i in 0..300 {
                    let len = [8, 200, 3000, 60_000][(i + t) % 4];
                    fill(&mut a, 0, len, i + t);
                    b.recv(1000, 100_000).unwrap();
                    a.post(WrOpcode::Send, &b, 0, len).unwrap();
                    assert_eq!((a.wait().unwrap().status, b.wait().unwrap().byte_len as usize), (0, len));
                    assert!(holds(&b, 1000, len, i + t));
                }
            });
        }
    });
}
