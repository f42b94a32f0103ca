//! Memory windows of both types, on one host and over the wire: the access that they grant, to which QPs, and until
//! when.

use std::sync::atomic::{AtomicU64, Ordering};

use unirdma_abi as abi;
use unirdma_abi::Status;
use unirdma_formats::{QpType, WcOpcode, WcStatus, WrOpcode, access, wc_flags};
use unirdma_rnic::Job;
use unirdma_simkit::net::{Faults, Net};
use unirdma_simkit::*;

fn each() -> [(&'static str, Net); 2] {
    [1, 2].map(|hosts| {
        let mut net = Net::hosts(hosts, &[QpType::Rc, QpType::Rc], 3, Faults::default());
        net.connect(QpType::Rc, 0, 1, &|a| a);
        net.connect(QpType::Rc, 1, 0, &|a| a);
        (["one host", "two hosts"][hosts - 1], net)
    })
}

fn alloc(net: &mut Net, end: usize, typ: u32) -> (u32, u32) {
    let (s, pd) = (net.ends[end].session, net.ends[end].pd);
    net.rnic(end).alloc_mw(s, pd, typ).unwrap()
}

/// An MR of end 1 that windows may be bound to.
fn parent(net: &mut Net, flags: u32) -> (u32, u32) {
    let e = &net.ends[1];
    let (s, pd, memory) = (e.session, e.pd, e.memory.clone());
    let backing = unirdma_rnic::Backing::Mapped(memory);
    net.rnic(1).reg_mr(s, pd, flags | access::MW_BIND, IOVA, MR_BYTES as u64, (backing, vec![9])).unwrap()
}

fn bind(key: u32, lkey: u32, off: u64, len: u64, flags: u32) -> abi::SqWqe {
    abi::SqWqe {
        rkey: key,
        remote_addr: IOVA + off,
        compare_add: len,
        swap: u64::from(flags) << 32 | u64::from(lkey),
        ..wqe(WrOpcode::BindMw, 77)
    }
}

/// Posts a request at an end. Returns the status of its completion.
fn run(net: &mut Net, end: usize, w: abi::SqWqe, sges: &[abi::Sge]) -> u8 {
    net.ends[end].post(w, sges);
    net.run(SECOND);
    net.ends[end].done().status
}

/// A WRITE of end 0 by this key. Returns its status.
fn write(net: &mut Net, key: u32, addr: u64, len: u32) -> u8 {
    let sge = net.ends[0].sge(0, len);
    run(net, 0, abi::SqWqe { rkey: key, remote_addr: addr, ..wqe(WrOpcode::Write, 5) }, &[sge])
}

const OK: u8 = WcStatus::Success as u8;
const DENIED: u8 = WcStatus::RemAccessErr as u8;

/// Connects the two QPs anew after one has failed.
fn again(net: &mut Net) {
    for i in 0..2 {
        let (s, qpn) = (net.ends[i].session, net.ends[i].qpn);
        net.rnic(i).modify_qp(s, qpn, 1, &abi::QpAttr::default()).unwrap();
        net.ends[i].poll();
        let e = &mut net.ends[i];
        (e.sq_prod, e.rq_prod) = (0, 0);
        e.rings.set_sq_prod(0);
        e.rings.set_rq_prod(0);
    }
    net.connect(QpType::Rc, 0, 1, &|a| a);
    net.connect(QpType::Rc, 1, 0, &|a| a);
}

#[test]
fn a_window_grants_its_range_and_nothing_else() {
    for typ in [1, 2] {
        for (place, mut net) in each() {
            let (_, lkey) = parent(&mut net, access::LOCAL_WRITE);
            let (_, key) = alloc(&mut net, 1, typ);
            assert_eq!(write(&mut net, key, IOVA + 4096, 100), DENIED, "{place}: not bound yet");
            again(&mut net);
            let key = key ^ 0x55;
            assert_eq!(run(&mut net, 1, bind(key, lkey, 4096, 200, access::REMOTE_WRITE), &[]), OK, "{place}");
            net.ends[0].fill(0, &[7; 100]);
            assert_eq!(write(&mut net, key, IOVA + 4196, 100), OK, "{place}");
            assert_eq!(net.ends[1].bytes(4196, 100), [7; 100], "{place}");
            assert_eq!(write(&mut net, lkey, IOVA + 4096, 100), DENIED, "{place}: the MR grants no remote access");
            for (key, addr) in [(key, IOVA + 4197), (key, IOVA + 4095), (key ^ 1, IOVA + 4096)] {
                again(&mut net);
                assert_eq!(write(&mut net, key, addr, 100), DENIED, "{place}: {key:#x} {addr:#x}");
            }
            again(&mut net);
            let sge = net.ends[0].sge(0, 100);
            let read = abi::SqWqe { rkey: key, remote_addr: IOVA + 4096, ..wqe(WrOpcode::Read, 5) };
            assert_eq!(run(&mut net, 0, read, &[sge]), DENIED, "{place}: WRITE only");
        }
    }
}

#[test]
fn a_window_is_nobodys_local_memory() {
    let (_, mut net) = each().into_iter().next().unwrap();
    let (_, lkey) = parent(&mut net, access::LOCAL_WRITE);
    let (_, key) = alloc(&mut net, 1, 1);
    assert_eq!(run(&mut net, 1, bind(key, lkey, 0, 200, access::REMOTE_WRITE), &[]), OK);
    let sge = abi::Sge { addr: IOVA, length: 10, lkey: key };
    assert_eq!(run(&mut net, 1, wqe(WrOpcode::Send, 3), &[sge]), WcStatus::LocProtErr as u8);
}

#[test]
fn zero_based_windows_count_from_their_beginning() {
    for (place, mut net) in each() {
        let (_, lkey) = parent(&mut net, access::LOCAL_WRITE);
        let (_, key) = alloc(&mut net, 1, 2);
        let flags = access::REMOTE_WRITE | access::ZERO_BASED;
        assert_eq!(run(&mut net, 1, bind(key, lkey, 8192, 200, flags), &[]), OK, "{place}");
        net.ends[0].fill(0, &[3; 100]);
        assert_eq!(write(&mut net, key, 100, 100), OK, "{place}");
        assert_eq!(net.ends[1].bytes(8292, 100), [3; 100], "{place}");
    }
}

#[test]
fn what_cannot_be_bound_says_so() {
    for (place, mut net) in each() {
        let (_, lkey) = parent(&mut net, access::LOCAL_WRITE);
        let (_, read_only) = parent(&mut net, 0);
        let plain = net.ends[1].key;
        let (_, one) = alloc(&mut net, 1, 1);
        let (_, two) = alloc(&mut net, 1, 2);
        let w = access::REMOTE_WRITE;
        let long = MR_BYTES as u64 + 1;
        let foreign = alloc(&mut net, 0, 1).1;
        for (what, b) in [
            ("no leave to bind", bind(one, plain, 0, 100, w)),
            ("no local write", bind(one, read_only, 0, 100, w)),
            ("too long", bind(one, lkey, 0, long, w)),
            ("a window on a window", bind(one, two, 0, 100, w)),
            ("no window", bind(lkey, lkey, 0, 100, w)),
            ("another's window", bind(foreign, lkey, 0, 100, w)),
            ("leave to bind further", bind(one, lkey, 0, 100, access::MW_BIND)),
        ] {
            assert_eq!(run(&mut net, 1, b, &[]), WcStatus::MwBindErr as u8, "{place}: {what}");
            again(&mut net);
        }
        assert_eq!(run(&mut net, 1, bind(one, read_only, 0, 100, access::REMOTE_READ), &[]), OK, "{place}");
        assert_eq!(run(&mut net, 1, bind(two, lkey, 0, 100, w), &[]), OK, "{place}");
        // A window of type 2 must be free; one of type 1 moves.
        assert_eq!(run(&mut net, 1, bind(one, lkey, 0, 100, w), &[]), OK, "{place}");
        assert_eq!(run(&mut net, 1, bind(two, lkey, 0, 100, w), &[]), WcStatus::MwBindErr as u8, "{place}");
    }
}

/// A SEND with invalidate that fails, because it is too long for its receive, takes nothing back.
#[test]
fn a_message_that_fails_leaves_its_grant() {
    for (place, mut net) in each() {
        let (_, lkey) = parent(&mut net, access::LOCAL_WRITE);
        let (_, key) = alloc(&mut net, 1, 2);
        assert_eq!(run(&mut net, 1, bind(key, lkey, 0, 200, access::REMOTE_WRITE), &[]), OK, "{place}");
        let to = net.ends[1].sge(0, 100);
        net.ends[1].recv(4, &[to]);
        let sge = net.ends[0].sge(0, 101);
        let send = abi::SqWqe { imm: key, ..wqe(WrOpcode::SendInv, 6) };
        assert_eq!(run(&mut net, 0, send, &[sge]), WcStatus::RemInvReqErr as u8, "{place}");
        again(&mut net);
        assert_eq!(write(&mut net, key, IOVA, 100), OK, "{place}");
    }
}

#[test]
fn grants_are_taken_back_locally_and_by_the_peer() {
    for (place, mut net) in each() {
        let (mr, lkey) = parent(&mut net, access::LOCAL_WRITE);
        let (mw, key) = alloc(&mut net, 1, 2);
        let s = net.ends[1].session;
        let b = bind(key, lkey, 0, 200, access::REMOTE_WRITE);
        assert_eq!(run(&mut net, 1, b, &[]), OK, "{place}");
        assert_eq!(net.rnic(1).dereg_mr(s, mr), Err(Status::Busy), "{place}");
        net.ends[1].post(abi::SqWqe { imm: key, ..wqe(WrOpcode::LocalInv, 8) }, &[]);
        net.run(SECOND);
        let c = net.ends[1].done();
        assert_eq!((c.status, c.opcode), (OK, WcOpcode::LocalInv as u8), "{place}");
        assert_eq!(write(&mut net, key, IOVA, 100), DENIED, "{place}");
        again(&mut net);
        assert_eq!(run(&mut net, 1, b, &[]), OK, "{place}");
        let to = net.ends[1].sge(0, 100);
        net.ends[1].recv(4, &[to]);
        let sge = net.ends[0].sge(0, 10);
        assert_eq!(run(&mut net, 0, abi::SqWqe { imm: key, ..wqe(WrOpcode::SendInv, 6) }, &[sge]), OK, "{place}");
        let c = net.ends[1].done();
        assert_eq!((c.imm, u32::from(c.wc_flags), c.byte_len), (key, wc_flags::WITH_INV, 10), "{place}");
        assert_eq!(write(&mut net, key, IOVA, 100), DENIED, "{place}");
        again(&mut net);
        // A window that is not bound cannot be invalidated, and an MR never.
        for key in [key, lkey] {
            net.ends[1].recv(4, &[to]);
            assert_eq!(
                run(&mut net, 0, abi::SqWqe { imm: key, ..wqe(WrOpcode::SendInv, 6) }, &[sge]),
                DENIED,
                "{place}"
            );
            again(&mut net);
            let status = run(&mut net, 1, abi::SqWqe { imm: key, ..wqe(WrOpcode::LocalInv, 6) }, &[]);
            assert_eq!(status, WcStatus::MwBindErr as u8, "{place}");
            again(&mut net);
        }
        assert_eq!(run(&mut net, 1, b, &[]), OK, "{place}");
        net.rnic(1).dealloc_mw(s, mw).unwrap();
        assert_eq!(write(&mut net, key, IOVA, 100), DENIED, "{place}");
        net.rnic(1).dereg_mr(s, mr).unwrap();
    }
}

/// Bindings are executed in their turn among other requests, and complete in order.
#[test]
fn requests_around_a_binding_keep_their_order() {
    for (place, mut net) in each() {
        let (_, lkey) = parent(&mut net, access::LOCAL_WRITE);
        let (_, key) = alloc(&mut net, 1, 1);
        let sge = net.ends[1].sge(0, 5000);
        let to = abi::SqWqe { rkey: net.ends[0].key, remote_addr: IOVA, ..wqe(WrOpcode::Write, 0) };
        for i in 0..4 {
            net.ends[1].post(abi::SqWqe { wr_id: 2 * i, ..to }, &[sge]);
            let b = bind(key, lkey, i * 100, 100, access::REMOTE_WRITE);
            net.ends[1].post(abi::SqWqe { wr_id: 2 * i + 1, ..b }, &[]);
        }
        net.run(SECOND);
        let done: Vec<_> = net.ends[1].poll().iter().map(|c| (c.wr_id, c.status)).collect();
        assert_eq!(done, (0..8).map(|i| (i, OK)).collect::<Vec<_>>(), "{place}");
        assert_eq!(write(&mut net, key, IOVA + 300, 100), OK, "{place}");
    }
}

/// Two ends, of which the first writes `LEN` bytes to a window of the second.
struct Copying {
    pair: Pair,
    lkey: u32,
    key: u32,
    /// They keep the RNIC busy, so that copies become jobs.
    _others: [End; 2],
}

const LEN: u64 = 60 << 10;

impl Copying {
    /// Also returns the jobs that are to copy the bytes, which are not done yet.
    fn to_window(typ: u32) -> (Copying, [Box<Job>; 2]) {
        let mut p = Pair::new();
        let (mut c, d) = (End::new(&mut p.rnic, 0, 3), End::new(&mut p.rnic, 0, 4));
        for (e, to, n) in [(&c, &d, 4), (&d, &c, 3)] {
            for (mask, attr) in attrs(to, ip(n)) {
                p.rnic.modify_qp(e.session, e.qpn, mask, &attr).unwrap();
            }
        }
        let (s, pd, backing) = (p.b.session, p.b.pd, unirdma_rnic::Backing::Mapped(p.b.memory.clone()));
        let flags = access::LOCAL_WRITE | access::MW_BIND;
        let (_, lkey) = p.rnic.reg_mr(s, pd, flags, IOVA, MR_BYTES as u64, (backing, vec![9])).unwrap();
        let (_, key) = p.rnic.alloc_mw(s, pd, typ).unwrap();
        p.b.post(bind(key, lkey, 0, LEN, access::REMOTE_WRITE), &[]);
        p.run(SECOND);
        assert_eq!(p.b.done().status, OK);
        p.a.fill(0, &[7; LEN as usize]);
        p.a.post(abi::SqWqe { rkey: key, remote_addr: IOVA, ..wqe(WrOpcode::Write, 2) }, &[p.a.sge(0, LEN as u32)]);
        c.post(abi::SqWqe { rkey: d.key, remote_addr: IOVA, ..wqe(WrOpcode::Write, 3) }, &[c.sge(0, LEN as u32)]);
        let jobs = [(); 2].map(|()| {
            loop {
                match p.rnic.take_job() {
                    Some(job) => break job,
                    None => assert!(p.rnic.poll(0), "no job is made"),
                }
            }
        });
        (Copying { pair: p, lkey, key, _others: [c, d] }, jobs)
    }
}

/// A request that takes back the grant of a window of some type.
type TakesBack = fn(&Copying) -> abi::SqWqe;

const TAKE_BACK: [(u32, TakesBack); 3] = [
    (2, |c| abi::SqWqe { imm: c.key, ..wqe(WrOpcode::LocalInv, 8) }),
    (1, |c| bind(c.key ^ 1, c.lkey, 0, 0, 0)),
    (1, |c| bind(c.key ^ 1, c.lkey, LEN, 4096, access::REMOTE_WRITE)),
];

/// The job of a peer writes nothing more to a window once the request that invalidates it is completed.
#[test]
fn a_job_that_was_made_before_writes_nothing_to_a_window_that_is_taken_back() {
    for (typ, take_back) in TAKE_BACK {
        let (mut c, jobs) = Copying::to_window(typ);
        c.pair.b.post(take_back(&c), &[]);
        c.pair.rnic.poll(0);
        assert_eq!(c.pair.b.done().status, OK, "type {typ}: nobody copies at this moment");
        for mut job in jobs {
            job.run(&mut [0; 4096], || 0);
            c.pair.rnic.end_job(job);
        }
        c.pair.run(SECOND);
        assert_eq!(c.pair.b.bytes(0, LEN as usize), [0; LEN as usize], "type {typ}");
        assert_eq!(c.pair.a.done().status, DENIED, "type {typ}");
    }
}

/// As before, while another thread does the job: a request that finds it copying waits for its end.
#[test]
fn a_job_that_copies_ends_before_its_window_is_taken_back() {
    for (typ, take_back) in TAKE_BACK {
        for turn in 0..60 {
            let (mut c, mut jobs) = Copying::to_window(typ);
            c.pair.b.post(take_back(&c), &[]);
            // A job reads the clock before and after the copy.
            let looks = AtomicU64::new(0);
            std::thread::scope(|s| {
                let worker = s.spawn(|| {
                    jobs.iter_mut().for_each(|job| job.run(&mut [0; 4096], || looks.fetch_add(1, Ordering::SeqCst)));
                });
                while looks.load(Ordering::SeqCst) <= turn % 2 * 2 {
                    std::hint::spin_loop();
                }
                let mut done = Vec::new();
                for now in 0.. {
                    c.pair.rnic.poll(now * 1000);
                    done.extend(c.pair.b.poll());
                    if !done.is_empty() {
                        break;
                    }
                }
                assert_eq!((done[0].wr_id, done[0].status), (take_back(&c).wr_id, OK), "type {typ}");
                c.pair.b.fill(0, &[0; LEN as usize]);
                worker.join().unwrap();
            });
            assert_eq!(c.pair.b.bytes(0, LEN as usize), [0; LEN as usize], "type {typ}: written after the completion");
            jobs.into_iter().for_each(|job| c.pair.rnic.end_job(job));
        }
    }
}
