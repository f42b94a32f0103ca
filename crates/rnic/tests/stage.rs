//! The stage: messages for memory of the way *copy* wait there, with their destinations, until the driver copies them
//! there.

use unirdma_abi as abi;
use unirdma_formats::{QpType, WcStatus, WrOpcode, access, attr_mask as m};
use unirdma_mem::{ProcMem, Span};
use unirdma_rnic::Backing;
use unirdma_simkit::net::{Faults, Net};
use unirdma_simkit::*;

const STAGE_BYTES: usize = 256 << 10;

/// A stage that is large enough, and the ends' memory behind their processes.
struct Staged {
    net: Net,
    stages: Vec<Span>,
}

impl Staged {
    /// On one host, and on two.
    fn places(typ: QpType) -> Vec<(&'static str, Staged)> {
        let mut one = Net::hosts(1, &[typ, typ], 9, Faults::default());
        one.connect(typ, 0, 1, &|a| a);
        one.connect(typ, 1, 0, &|a| a);
        let two = Net::of_type(typ, 9, Faults::default(), |a| a);
        [("one host", one), ("two hosts", two)].into_iter().map(|(name, net)| (name, Staged::new(net))).collect()
    }

    fn new(mut net: Net) -> Staged {
        let mut stages = Vec::new();
        for i in 0..2 {
            let e = &net.ends[i];
            let backing = Backing::Process(ProcMem::of_self().unwrap(), e.memory.addr() as u64);
            let (session, pd, flags) = (e.session, e.pd, ALL | access::STAGE);
            let stage = aligned(STAGE_BYTES);
            let rnic = net.rnic(i);
            rnic.set_stage(session, stage.clone()).unwrap();
            assert!(rnic.set_stage(session, stage.clone()).is_err(), "only one");
            let (mr, key) = rnic.reg_mr(session, pd, flags, IOVA, MR_BYTES as u64, (backing, vec![8])).unwrap();
            (net.ends[i].mr, net.ends[i].key) = (mr, key);
            stages.push(stage);
        }
        Staged { net, stages }
    }

    /// Handles a completion as a driver does.
    fn place(&self, end: usize, cqe: &abi::Cqe) {
        assert_ne!(cqe.staged, 0);
        let (stage, at) = (&self.stages[end], cqe.staged as usize);
        let head: abi::StageRecord = stage.read_obj(at);
        assert_eq!(head.busy, 1);
        let (mut off, mut left) = (at + abi::stage_head(head.num_places as usize), cqe.byte_len as usize);
        for i in 0..head.num_places as usize {
            let p: abi::StagePlace = stage.read_obj(at + 16 + 16 * i);
            assert_eq!(p.lkey, self.net.ends[end].key);
            let n = left.min(p.length as usize);
            let mut bytes = vec![0; n];
            stage.read(off, &mut bytes);
            self.net.ends[end].fill(p.addr as usize - self.net.ends[end].memory.addr(), &bytes);
            (off, left) = (off + n, left - n);
        }
        stage.store32(at, 0, std::sync::atomic::Ordering::Release);
    }
}

#[test]
fn messages_wait_until_they_are_placed() {
    for typ in [QpType::Rc, QpType::Uc, QpType::Ud] {
        for (place, mut s) in Staged::places(typ) {
            let ah = s.net.ah(0, 1);
            let dest = s.net.ends[1].qpn;
            let grh = if typ == QpType::Ud { 40 } else { 0 };
            for round in 0..200u64 {
                let len = match round % 4 {
                    0 => 1,
                    1 => 1000,
                    _ if typ == QpType::Ud => 900,
                    2 => 5000,
                    _ => 150_000,
                };
                let about = format!("{typ:?}, {place}, round {round}, {len} bytes");
                let data = pattern(len, round);
                s.net.ends[0].fill(0, &data);
                s.net.ends[1].fill(0, &[0; 200_000]);
                // Two pieces, the second before the first in memory.
                let sges = [s.net.ends[1].sge(1000, 500), s.net.ends[1].sge(2000, 190_000)];
                s.net.ends[1].recv(round, &sges);
                let sge = s.net.ends[0].sge(0, len as u32);
                s.net.ends[0].post_to(wqe(WrOpcode::Send, round), ah, dest, &[sge]);
                s.net.run(SECOND);
                assert_eq!(status(&s.net.ends[0].done()), WcStatus::Success, "{about}");
                let got = s.net.ends[1].done();
                assert_eq!((got.status, got.wr_id, got.byte_len as usize), (0, round, len + grh), "{about}");
                assert_eq!(s.net.ends[1].bytes(0, 200_000), vec![0; 200_000], "{about}: nothing is there yet");
                s.place(1, &got);
                let there = [s.net.ends[1].bytes(1000, 500), s.net.ends[1].bytes(2000, 190_000)].concat();
                assert_eq!(there[grh..grh + len], data, "{about}");
                assert!(there[grh + len..].iter().all(|&b| b == 0), "{about}: and no more");
            }
        }
    }
}

/// A message that finds no room in the stage is written through the process.
#[test]
fn without_room_it_goes_the_old_way() {
    for (place, mut s) in Staged::places(QpType::Rc) {
        let data = pattern(100_000, 4);
        s.net.ends[0].fill(0, &data);
        for i in 0..6 {
            let to = s.net.ends[1].sge(i * 110_000, 100_000);
            s.net.ends[1].recv(i, &[to]);
            let sge = s.net.ends[0].sge(0, 100_000);
            s.net.ends[0].post(wqe(WrOpcode::Send, i), &[sge]);
        }
        s.net.run(SECOND);
        assert_eq!(s.net.ends[0].poll().len(), 6);
        let got = s.net.ends[1].poll();
        let staged: Vec<bool> = got.iter().map(|c| c.staged != 0).collect();
        assert_eq!(staged, [true, true, false, false, false, false], "{place}");
        got.iter().filter(|c| c.staged != 0).for_each(|c| s.place(1, c));
        for i in 0..6 {
            assert_eq!(s.net.ends[1].bytes(i * 110_000, 100_000), data, "{place}, {i}");
        }
        // Now the device has seen that the driver gives records back. Long messages of the same host wait for that for
        // a moment.
        for i in 0..3 {
            let to = s.net.ends[1].sge(i * 110_000, 100_000);
            s.net.ends[1].recv(i, &[to]);
            let sge = s.net.ends[0].sge(0, 100_000);
            s.net.ends[0].post(wqe(WrOpcode::Send, i), &[sge]);
        }
        s.net.run(1_000_000);
        let got = s.net.ends[1].poll();
        assert_eq!(got.len(), if place == "one host" { 2 } else { 3 }, "{place}");
        s.place(1, &got[0]);
        s.net.run(if place == "one host" { 20_000 } else { 0 });
        let more = s.net.ends[1].poll();
        assert!(more.iter().all(|c| c.staged != 0) && got.len() + more.len() == 3, "{place}");
        // But they do not wait for ever.
        let (to, sge) = (s.net.ends[1].sge(0, 100_000), s.net.ends[0].sge(0, 100_000));
        s.net.ends[1].recv(9, &[to]);
        s.net.ends[0].post(wqe(WrOpcode::Send, 9), &[sge]);
        s.net.run(10_000_000);
        assert_eq!(s.net.ends[1].done().status, 0, "{place}");
    }
}

/// Receives that fail, are flushed, or end with their QP leave nothing in the stage.
#[test]
fn nothing_stays_behind() {
    for (place, mut s) in Staged::places(QpType::Rc) {
        for round in 0..40 {
            let (to, from) = (s.net.ends[1].sge(0, 60_000), s.net.ends[0].sge(0, 60_000));
            // A long message that is aborted by an error, or by a reset.
            s.net.ends[1].recv(1, &[to]);
            s.net.ends[1].recv(2, &[to]);
            s.net.ends[0].post(wqe(WrOpcode::Send, 1), &[from]);
            s.net.run(1000 * (round % 20));
            let state = if round % 2 == 0 { 6 } else { 0 };
            let e = &s.net.ends[1];
            let (session, qpn) = (e.session, e.qpn);
            s.net
                .rnic(1)
                .modify_qp(session, qpn, m::STATE, &abi::QpAttr { qp_state: state, ..Default::default() })
                .unwrap();
            s.net.run(5 * SECOND);
            for c in s.net.ends[1].poll() {
                assert!(c.staged == 0 || c.status == 0);
                if c.staged != 0 {
                    s.place(1, &c);
                }
            }
            s.net.ends[0].poll();
            for i in 0..2 {
                let (session, qpn) = (s.net.ends[i].session, s.net.ends[i].qpn);
                s.net.rnic(i).modify_qp(session, qpn, m::STATE, &abi::QpAttr::default()).unwrap();
                let e = &mut s.net.ends[i];
                (e.sq_prod, e.rq_prod) = (0, 0);
                e.rings.set_sq_prod(0);
                e.rings.set_rq_prod(0);
                s.net.connect(QpType::Rc, i, 1 - i, &|a| a);
            }
        }
        // The whole stage is free for one message again.
        let (to, from) = (s.net.ends[1].sge(0, 250_000), s.net.ends[0].sge(0, 250_000));
        s.net.ends[1].recv(3, &[to]);
        s.net.ends[0].post(wqe(WrOpcode::Send, 3), &[from]);
        s.net.run(SECOND);
        let got = s.net.ends[1].done();
        assert_eq!((got.wr_id, got.status), (3, 0), "{place}");
        assert_ne!(got.staged, 0, "{place}: something is still in the stage");
    }
}

/// Keys, ranges and rights of a receive are checked as without a stage.
#[test]
fn errors_are_what_they_were() {
    for (place, mut s) in Staged::places(QpType::Rc) {
        for (bad, there, here) in [
            (abi::Sge { lkey: 1, ..s.net.ends[1].sge(0, 5000) }, WcStatus::LocProtErr, WcStatus::RemOpErr),
            (s.net.ends[1].sge(MR_BYTES as u64 - 10, 5000), WcStatus::LocProtErr, WcStatus::RemOpErr),
            (s.net.ends[1].sge(0, 50), WcStatus::LocLenErr, WcStatus::RemInvReqErr),
        ] {
            s.net.ends[1].recv(1, &[bad]);
            let from = s.net.ends[0].sge(0, 3000);
            s.net.ends[0].post(wqe(WrOpcode::Send, 1), &[from]);
            s.net.run(5 * SECOND);
            let (b, a) = (s.net.ends[1].done(), s.net.ends[0].done());
            assert_eq!((status(&b), status(&a), b.staged), (there, here, 0), "{place}, {bad:?}");
            for i in 0..2 {
                let (session, qpn) = (s.net.ends[i].session, s.net.ends[i].qpn);
                s.net.rnic(i).modify_qp(session, qpn, m::STATE, &abi::QpAttr::default()).unwrap();
                let e = &mut s.net.ends[i];
                (e.sq_prod, e.rq_prod) = (0, 0);
                e.rings.set_sq_prod(0);
                e.rings.set_rq_prod(0);
                s.net.connect(QpType::Rc, i, 1 - i, &|a| a);
            }
        }
        // The receive of an immediate has no destination.
        let to = s.net.ends[1].sge(0, 5000);
        s.net.ends[1].recv(1, &[to]);
        let (w, from) = (s.net.remote(WrOpcode::WriteImm, 1, 9000), s.net.ends[0].sge(0, 3000));
        s.net.ends[0].post(w, &[from]);
        s.net.run(SECOND);
        assert_eq!((s.net.ends[1].done().staged, s.net.ends[0].done().status), (0, 0), "{place}");
    }
}

/// Data of a send that lies in the session's own memory needs no key. Only sends may have such data.
#[test]
fn sends_from_the_sessions_memory() {
    use unirdma_formats::send_flags::{INLINE, SIGNALED, STAGED};
    struct Window(Span);
    impl unirdma_rnic::Resolve for Window {
        fn resolve(&self, addr: u64, len: u64) -> Option<(&Span, u64)> {
            let off = addr.checked_sub(0x4000)?;
            (off.checked_add(len)? <= self.0.len() as u64).then_some((&self.0, off))
        }
    }
    let cases = [
        (WrOpcode::Write, 0x4000, STAGED, WcStatus::Success),
        (WrOpcode::Write, 0x4000 + 5001, STAGED, WcStatus::LocProtErr),
        (WrOpcode::Write, 0, STAGED, WcStatus::LocProtErr),
        (WrOpcode::Read, 0x4000, STAGED, WcStatus::LocQpOpErr),
        (WrOpcode::Write, 0x4000, STAGED | INLINE, WcStatus::LocQpOpErr),
        (WrOpcode::Write, 0x4000, STAGED >> 1, WcStatus::LocQpOpErr),
    ];
    for (op, addr, flags, want) in cases {
        for (place, mut s) in Staged::places(QpType::Rc) {
            let memory = aligned(10_000);
            let data = pattern(10_000, 8);
            memory.write(0, &data);
            let session = s.net.ends[0].session;
            s.net.rnic(0).set_memory(session, std::sync::Arc::new(Window(memory)));
            let w = abi::SqWqe { send_flags: SIGNALED | flags, ..s.net.remote(op, 1, 100) };
            s.net.ends[0].post(w, &[abi::Sge { addr, length: 5000, lkey: 0 }]);
            s.net.run(SECOND);
            assert_eq!(status(&s.net.ends[0].done()), want, "{place}, {op:?} {addr:#x} {flags:#x}");
            if want == WcStatus::Success {
                assert_eq!(s.net.ends[1].bytes(100, 5000), data[..5000], "{place}");
            }
        }
    }
}

/// Processes of a virtual machine have doorbell pages of their own: their QPs can only name memory by the keys of MRs.
#[test]
fn only_qps_of_the_first_doorbell_page_send_from_the_sessions_memory() {
    use unirdma_formats::send_flags::{SIGNALED, STAGED};
    struct All(Span);
    impl unirdma_rnic::Resolve for All {
        fn resolve(&self, addr: u64, len: u64) -> Option<(&Span, u64)> {
            (addr.checked_add(len)? <= self.0.len() as u64).then_some((&self.0, addr))
        }
    }
    let mut p = Pair::new();
    p.settle();
    let (session, pd, cqn) = (p.a.session, p.a.pd, p.a.cqn);
    p.rnic.set_memory(session, std::sync::Arc::new(All(aligned(8192))));
    let page = unirdma_mem::Bell::new(aligned(4096)).unwrap();
    let door = p.rnic.create_doorbell(session, page.clone()).unwrap();
    for (door, want) in [(0, WcStatus::Success), (door, WcStatus::LocQpOpErr)] {
        let cap = abi::QpCap { max_send_wr: 1, max_recv_wr: 1, max_send_sge: 1, max_recv_sge: 1, max_inline_data: 0 };
        let layout = abi::QpLayout::of(&cap).unwrap();
        let [ctrl, sq, rq] = [128, layout.sq_bytes(), layout.rq_bytes()].map(aligned);
        let rings = unirdma_mem::QpRings::new(ctrl, sq, rq, layout).unwrap();
        let (send_cq, recv_cq, ring) = (cqn, cqn, rings.clone());
        let create =
            unirdma_rnic::CreateQp { pd, send_cq, recv_cq, srq: None, xrcd: None, door, sig_all: true, cap, rings };
        let (qpn, slot) = p.rnic.create_qp(session, QpType::Rc as u8, create).unwrap();
        for (mask, attr) in attrs(&p.b, ip(2)) {
            p.rnic.modify_qp(session, qpn, mask, &attr).unwrap();
        }
        p.reconnect(false, |a| abi::QpAttr { dest_qp_num: qpn, ..a });
        let w = abi::SqWqe { send_flags: SIGNALED | STAGED, num_sge: 1, ..wqe(WrOpcode::Write, 1) };
        let w = abi::SqWqe { remote_addr: IOVA, rkey: p.b.key, ..w };
        ring.sq_put(0, 0, zerocopy::IntoBytes::as_bytes(&w));
        ring.sq_put(0, 64, zerocopy::IntoBytes::as_bytes(&abi::Sge { addr: 0, length: 4096, lkey: 0 }));
        ring.set_sq_prod(1);
        let bell = if door == 0 { &p.a.bell } else { &page };
        bell.ring(slot);
        p.rnic.unpark(session, p.now);
        p.run(SECOND);
        assert_eq!(status(&p.a.done()), want, "page {door}");
        p.rnic.destroy_qp(session, qpn).unwrap();
    }
}
