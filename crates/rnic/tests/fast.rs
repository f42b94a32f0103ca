//! Fast registration (CREATE_MR, REG_MR, LOCAL_INV and SEND_WITH_INV of such MRs), on one host and over the wire.

use std::sync::Arc;

use unirdma_abi as abi;
use unirdma_abi::Status;
use unirdma_formats::{QpType, WcOpcode, WcStatus, WrOpcode, access, attr_mask, wc_flags};
use unirdma_mem::{Bell, QpRings, Span};
use unirdma_rnic::{Backing, CreateQp, Limits, Record, Resolve, Share, VrnicConfig};
use unirdma_simkit::net::{Faults, Net};
use unirdma_simkit::*;

const PAGE: u64 = 4096;
/// Where the memory of a session lies: two windows, the second right behind the first, so that pages follow each other
/// across them.
const BASE: u64 = 0x8000_0000;
const WINDOW: u64 = 16 * PAGE;
/// Where lists of pages are written.
const LIST: u64 = BASE + WINDOW - PAGE;
/// Addresses of an MR begin in the middle of a page.
const START: u64 = 0x7f00_0000_0000 + 1000;
const ALL_REMOTE: u32 = access::LOCAL_WRITE | access::REMOTE_WRITE | access::REMOTE_READ;
const OK: u8 = WcStatus::Success as u8;
const DENIED: u8 = WcStatus::RemAccessErr as u8;
const UNBOUND: u8 = WcStatus::MwBindErr as u8;

#[derive(Clone)]
struct Ram([Span; 2]);

impl Ram {
    fn new() -> Ram {
        Ram([(); 2].map(|()| aligned(WINDOW as usize)))
    }

    fn at(&self, addr: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let (span, off) = self.resolve(addr, len as u64).unwrap();
        span.read(off as usize, &mut bytes);
        bytes
    }

    fn put(&self, addr: u64, bytes: &[u8]) {
        let (span, off) = self.resolve(addr, bytes.len() as u64).unwrap();
        span.write(off as usize, bytes);
    }

    fn list(&self, pages: &[u64]) {
        pages.iter().zip(0..).for_each(|(p, i)| self.put(LIST + 8 * i, &p.to_le_bytes()));
    }
}

impl Resolve for Ram {
    fn resolve(&self, addr: u64, len: u64) -> Option<(&Span, u64)> {
        let off = addr.checked_sub(BASE)?;
        let (window, off) = (self.0.get((off / WINDOW) as usize)?, off % WINDOW);
        (off.checked_add(len)? <= WINDOW).then_some((window, off))
    }
}

/// Ends 0 and 1 are connected, and end 1 registers memory of its own.
struct Scene {
    place: &'static str,
    net: Net,
    ram: Ram,
    mr: u32,
    /// Its key, which changes.
    key: u32,
}

fn page(n: u64) -> u64 {
    BASE + n * PAGE
}

impl Scene {
    fn each_of(typ: QpType) -> [Scene; 2] {
        [1, 2].map(|hosts| {
            let mut net = Net::hosts(hosts, &[typ, typ], 3, Faults::default());
            net.connect(typ, 0, 1, &|a| a);
            net.connect(typ, 1, 0, &|a| a);
            let (ram, s, pd) = (Ram::new(), net.ends[1].session, net.ends[1].pd);
            net.rnic(1).set_memory(s, Arc::new(ram.clone()));
            let (mr, key) = net.rnic(1).create_mr(s, pd, access::FAST_SUPPORTED, 8, Arc::new(())).unwrap();
            Scene { place: ["one host", "two hosts"][hosts - 1], net, ram, mr, key }
        })
    }

    fn each() -> [Scene; 2] {
        Self::each_of(QpType::Rc)
    }

    /// A request that registers `len` bytes of these pages under a new key.
    fn register(&mut self, pages: &[u64], len: u64) -> abi::SqWqe {
        self.key = self.key & !0xff | (self.key.wrapping_add(1) & 0xff);
        self.ram.list(pages);
        abi::SqWqe {
            rkey: self.key,
            remote_addr: START,
            compare_add: len,
            swap: LIST,
            imm: ALL_REMOTE,
            ah: 12,
            dest_qpn: pages.len() as u32,
            ..wqe(WrOpcode::RegMr, 40)
        }
    }

    fn run(&mut self, end: usize, w: abi::SqWqe, sges: &[abi::Sge]) -> abi::Cqe {
        self.net.ends[end].post(w, sges);
        self.net.run(SECOND);
        self.net.ends[end].done()
    }

    fn must(&mut self, w: abi::SqWqe) {
        let c = self.run(1, w, &[]);
        assert_eq!((c.status, c.wr_id), (OK, w.wr_id), "{}", self.place);
    }

    /// A WRITE or READ of end 0.
    fn reach(&mut self, op: WrOpcode, addr: u64, len: u32) -> u8 {
        let sge = self.net.ends[0].sge(0, len);
        let w = abi::SqWqe { rkey: self.key, remote_addr: addr, ..wqe(op, 5) };
        self.run(0, w, &[sge]).status
    }

    /// Connects both QPs anew.
    fn again(&mut self) {
        for i in 0..2 {
            let (s, qpn) = (self.net.ends[i].session, self.net.ends[i].qpn);
            self.net.rnic(i).modify_qp(s, qpn, attr_mask::STATE, &abi::QpAttr::default()).unwrap();
            self.net.ends[i].poll();
            let e = &mut self.net.ends[i];
            (e.sq_prod, e.rq_prod) = (0, 0);
            e.rings.set_sq_prod(0);
            e.rings.set_rq_prod(0);
        }
        self.net.connect(QpType::Rc, 0, 1, &|a| a);
        self.net.connect(QpType::Rc, 1, 0, &|a| a);
    }

    fn local_inv(&self) -> abi::SqWqe {
        abi::SqWqe { imm: self.key, ..wqe(WrOpcode::LocalInv, 8) }
    }

    fn used(&mut self) -> u64 {
        let vrnic = self.net.ends[1].vrnic;
        self.net.rnic(1).usage(vrnic).bytes_mapped
    }
}

#[test]
fn registered_pages_are_one_range() {
    for mut s in Scene::each() {
        let before = s.used();
        // Pages 15 and 16 follow each other, but not in one window.
        let (pages, len) = ([page(3), page(14), page(15), page(16), page(1)], 4 * PAGE + 50);
        let w = s.register(&pages, len);
        let c = s.run(1, w, &[]);
        assert_eq!((c.status, c.opcode, c.wr_id), (OK, WcOpcode::RegMr as u8, 40), "{}", s.place);
        assert_eq!(s.used(), before + len, "{}", s.place);
        // The list was read; later changes of it have no effect.
        s.ram.list(&[0; 5]);
        let data = pattern(len as usize, 1);
        s.net.ends[0].fill(0, &data);
        assert_eq!(s.reach(WrOpcode::Write, START, len as u32), OK, "{}", s.place);
        let mut there = s.ram.at(page(3) + 1000, 3096);
        pages[1..4].iter().for_each(|&p| there.extend(s.ram.at(p, 4096)));
        there.extend(s.ram.at(page(1), len as usize - there.len()));
        assert!(there == data, "{}", s.place);
        s.net.ends[0].fill(0, &[0; 300]);
        assert_eq!(s.reach(WrOpcode::Read, START + 3000, 200), OK, "{}", s.place);
        assert_eq!(s.net.ends[0].bytes(0, 200), data[3000..3200], "{}", s.place);
        for addr in [START - 1, START + len - 199] {
            assert_eq!(s.reach(WrOpcode::Read, addr, 200), DENIED, "{}", s.place);
            s.again();
        }
        // The lkey is the same number.
        let to = s.net.ends[0].sge(0, 500);
        s.net.ends[0].recv(3, &[to]);
        let sge = abi::Sge { addr: START + 100, length: 500, lkey: s.key };
        assert_eq!(s.run(1, wqe(WrOpcode::Send, 6), &[sge]).status, OK, "{}", s.place);
        assert_eq!(s.net.ends[0].bytes(0, 500), data[100..600], "{}", s.place);
        s.net.ends[0].poll();
        let (session, mr) = (s.net.ends[1].session, s.mr);
        s.net.rnic(1).dereg_mr(session, mr).unwrap();
        assert_eq!((s.reach(WrOpcode::Read, START, 8), s.used()), (DENIED, before), "{}", s.place);
    }
}

#[test]
fn pages_may_be_large() {
    for mut s in Scene::each() {
        let w = s.register(&[page(8), page(24)], 16 * PAGE - 1000);
        s.must(abi::SqWqe { remote_addr: 5 * (8 * PAGE) + 1000, ah: 15, ..w });
        s.net.ends[0].fill(0, &[9; 100]);
        assert_eq!(s.reach(WrOpcode::Write, 6 * 8 * PAGE - 50, 100), OK, "{}", s.place);
        assert_eq!(s.ram.at(page(16) - 50, 50), [9; 50], "{}", s.place);
        assert_eq!(s.ram.at(page(24), 50), [9; 50], "{}", s.place);
    }
}

#[test]
fn grants_are_taken_back_and_given_anew() {
    for mut s in Scene::each() {
        let before = s.used();
        assert_eq!(s.reach(WrOpcode::Write, START, 8), DENIED, "{}: it is free", s.place);
        s.again();
        for by_peer in [false, true] {
            let old = s.key;
            let w = s.register(&[page(2)], 100);
            s.must(w);
            s.net.ends[0].fill(0, &[4; 100]);
            assert_eq!(s.reach(WrOpcode::Write, START, 100), OK, "{}", s.place);
            let key = std::mem::replace(&mut s.key, old);
            assert_eq!(s.reach(WrOpcode::Write, START, 100), DENIED, "{}: the key before", s.place);
            s.again();
            s.key = key;
            if by_peer {
                let to = s.net.ends[1].sge(0, 100);
                s.net.ends[1].recv(4, &[to]);
                let sge = s.net.ends[0].sge(0, 10);
                let c = s.run(0, abi::SqWqe { imm: key, ..wqe(WrOpcode::SendInv, 6) }, &[sge]);
                assert_eq!(c.status, OK, "{}", s.place);
                let c = s.net.ends[1].done();
                assert_eq!((c.imm, u32::from(c.wc_flags), c.byte_len), (key, wc_flags::WITH_INV, 10), "{}", s.place);
            } else {
                let c = s.run(1, s.local_inv(), &[]);
                assert_eq!((c.status, c.opcode), (OK, WcOpcode::LocalInv as u8), "{}", s.place);
            }
            assert_eq!((s.used(), s.reach(WrOpcode::Write, START, 100)), (before, DENIED), "{}", s.place);
            s.again();
            // To free it once more is no error.
            s.must(s.local_inv());
        }
    }
}

/// A change of a good request. The result must be refused.
type Change = fn(&mut Scene, &mut abi::SqWqe);
const BAD: &[(&str, Change)] = &[
    ("no such key", |_, w| w.rkey ^= 0x100),
    ("the key of an MR of a command", |s, w| w.rkey = s.net.ends[1].key),
    ("another PD's MR", |s, w| {
        let session = s.net.ends[1].session;
        let pd = s.net.rnic(1).create_pd(session).unwrap();
        w.rkey = s.net.rnic(1).create_mr(session, pd, access::FAST_SUPPORTED, 8, Arc::new(())).unwrap().1;
    }),
    ("another session's MR", |s, w| {
        let (session, pd) = (s.net.ends[0].session, s.net.ends[0].pd);
        w.rkey = s.net.rnic(0).create_mr(session, pd, access::FAST_SUPPORTED, 8, Arc::new(())).unwrap().1;
    }),
    ("a window", |s, w| {
        let (session, pd) = (s.net.ends[1].session, s.net.ends[1].pd);
        w.rkey = s.net.rnic(1).alloc_mw(session, pd, 2).unwrap().1;
    }),
    ("more than the MR may grant", |s, w| {
        let (session, pd) = (s.net.ends[1].session, s.net.ends[1].pd);
        w.rkey = s.net.rnic(1).create_mr(session, pd, access::LOCAL_WRITE, 8, Arc::new(())).unwrap().1;
    }),
    ("more pages than the MR may have", |s, w| {
        let (session, pd) = (s.net.ends[1].session, s.net.ends[1].pd);
        w.rkey = s.net.rnic(1).create_mr(session, pd, access::FAST_SUPPORTED, 1, Arc::new(())).unwrap().1;
    }),
    ("leave to bind windows", |_, w| w.imm |= access::MW_BIND),
    ("remote write without local write", |_, w| w.imm = access::REMOTE_WRITE),
    ("a page too many", |_, w| w.compare_add = 100),
    ("a page too few", |_, w| w.compare_add = 9000),
    ("no bytes", |_, w| (w.compare_add, w.dest_qpn) = (0, 0)),
    ("all bytes", |_, w| w.compare_add = u64::MAX),
    ("addresses that wrap", |_, w| w.remote_addr = u64::MAX - 4000),
    ("endless pages", |_, w| (w.dest_qpn, w.compare_add) = (u32::MAX, u64::from(u32::MAX) * PAGE - 2000)),
    ("pages of a byte", |_, w| w.ah = 0),
    ("pages of no size", |_, w| w.ah = 64),
    ("pages of all sizes", |_, w| w.ah = u32::MAX),
    ("too large pages", |_, w| (w.ah, w.dest_qpn) = (31, 1)),
    ("a list that is nowhere", |_, w| w.swap = BASE + 2 * WINDOW),
    ("a list that leaves its window", |_, w| w.swap = BASE + WINDOW - 8),
    ("a list at an odd address", |_, w| w.swap += 4),
    ("a page that is nowhere", |s, _| s.ram.list(&[page(2), page(32)])),
    ("a page below all memory", |s, _| s.ram.list(&[0, page(2)])),
    ("a page at the end of all addresses", |s, _| s.ram.list(&[page(2), u64::MAX - 4095])),
    ("a page that is none", |s, _| s.ram.list(&[page(2) + 8, page(3)])),
];

#[test]
fn what_cannot_be_registered_says_so_and_grants_nothing() {
    for mut s in Scene::each() {
        for (what, change) in BAD {
            let mut w = s.register(&[page(2), page(3)], 4096);
            change(&mut s, &mut w);
            assert_eq!(s.run(1, w, &[]).status, UNBOUND, "{}: {what}", s.place);
            s.again();
            assert_eq!(s.reach(WrOpcode::Read, START, 8), DENIED, "{}: {what}", s.place);
            s.again();
        }
        // The MR is unchanged. And an MR that is registered is not free.
        let w = s.register(&[page(2), page(3)], 4096);
        s.must(w);
        let w = s.register(&[page(4), page(5)], 4096);
        assert_eq!(s.run(1, w, &[]).status, UNBOUND, "{}: registered", s.place);
        s.again();
        s.key -= 1;
        assert_eq!(s.reach(WrOpcode::Read, START, 8), OK, "{}: it is what it was", s.place);
        // Keys of nothing, or of something that may not be taken back.
        for key in [s.key ^ 1, s.key ^ 0x100, s.net.ends[1].key] {
            let w = abi::SqWqe { imm: key, ..wqe(WrOpcode::LocalInv, 8) };
            assert_eq!(s.run(1, w, &[]).status, UNBOUND, "{}", s.place);
            s.again();
            s.net.ends[1].recv(4, &[]);
            let w = abi::SqWqe { imm: key, ..wqe(WrOpcode::SendInv, 8) };
            assert_eq!(s.run(0, w, &[]).status, DENIED, "{}", s.place);
            s.again();
        }
        assert_eq!(s.reach(WrOpcode::Read, START, 8), OK, "{}", s.place);
    }
}

#[test]
fn an_unreliable_connection_registers_and_a_datagram_qp_does_not() {
    for mut s in Scene::each_of(QpType::Uc) {
        let w = s.register(&[page(2)], 100);
        s.must(w);
        s.net.ends[0].fill(0, &[6; 100]);
        assert_eq!(s.reach(WrOpcode::Write, START, 100), OK, "{}", s.place);
        assert_eq!(s.ram.at(page(2) + 1000, 100), [6; 100], "{}", s.place);
        s.must(s.local_inv());
        s.net.ends[0].fill(0, &[7; 100]);
        assert_eq!(s.reach(WrOpcode::Write, START, 100), OK, "{}", s.place);
        assert_eq!(s.ram.at(page(2) + 1000, 100), [6; 100], "{}: dropped", s.place);
    }
    for mut s in Scene::each_of(QpType::Ud) {
        let w = s.register(&[page(2)], 100);
        assert_eq!(s.run(1, w, &[]).status, WcStatus::LocQpOpErr as u8, "{}", s.place);
    }
}

#[test]
fn commands_refuse_what_is_not_for_them() {
    for mut s in Scene::each() {
        let (session, pd) = (s.net.ends[1].session, s.net.ends[1].pd);
        for (flags, most) in [(access::MW_BIND, 8), (ALL_REMOTE, 0), (ALL_REMOTE, abi::MAX_FAST_PAGES + 1)] {
            assert_eq!(s.net.rnic(1).create_mr(session, pd, flags, most, Arc::new(())), Err(Status::BadValue));
        }
        // Commands that extend or replace an MR are not for such an MR.
        let (mr, other) = (s.mr, s.net.ends[1].mr);
        assert_eq!(s.net.rnic(1).rereg_mr(session, mr, other), Err(Status::BadState));
        assert_eq!(s.net.rnic(1).rereg_mr(session, other, mr), Err(Status::BadState));
        let more = (Backing::Mapped(Span::anonymous(4096)), vec![7]);
        assert_eq!(s.net.rnic(1).extend_mr(session, mr, 4096, more), Err(Status::BadState));
    }
}

/// Requests go out in the order in which they were posted, and complete in this order, whatever the network loses. A
/// registration does not wait for the answers of earlier requests, and is executed once.
#[test]
fn registrations_keep_their_place_on_a_bad_network() {
    for seed in 0..6 {
        let faults = Faults { loss: 10, duplication: 10, reordering: 10, corruption: 5 };
        let mut net = Net::hosts(2, &[QpType::Rc, QpType::Rc], seed, faults);
        let patient = |a| abi::QpAttr { timeout: 14, retry_cnt: 7, rnr_retry: 7, ..a };
        net.connect(QpType::Rc, 0, 1, &patient);
        net.connect(QpType::Rc, 1, 0, &patient);
        let (ram, session, pd) = (Ram::new(), net.ends[1].session, net.ends[1].pd);
        net.rnic(1).set_memory(session, Arc::new(ram.clone()));
        let (mr, key) = net.rnic(1).create_mr(session, pd, access::FAST_SUPPORTED, 8, Arc::new(())).unwrap();
        let mut s = Scene { place: "a bad network", net, ram, mr, key };
        for round in 0..30_u64 {
            // The key goes out in a message behind its registration. The peer writes there, and its answer invalidates
            // the key.
            let data = pattern(3000, seed << 32 | round);
            let to = s.net.ends[0].sge(0, 4096);
            s.net.ends[0].recv(round, &[to]);
            let to = s.net.ends[1].sge(0, 100);
            s.net.ends[1].recv(round, &[to]);
            let (w, long) = (s.register(&[page(round % 8), page(20)], 4096), s.net.ends[1].sge(0, 4000));
            let write = abi::SqWqe { rkey: s.net.ends[0].key, remote_addr: IOVA + 8192, ..wqe(WrOpcode::Write, 1) };
            s.net.ends[1].post(write, &[long]);
            s.net.ends[1].post(abi::SqWqe { wr_id: 2, ..w }, &[]);
            s.net.ends[1].post(wqe(WrOpcode::Send, 3), &[]);
            s.net.run(SECOND);
            let done: Vec<_> = s.net.ends[1].poll().iter().map(|c| (c.wr_id, c.status)).collect();
            assert_eq!(done, [(1, OK), (2, OK), (3, OK)], "seed {seed}");
            assert_eq!(s.net.ends[0].done().wr_id, round, "seed {seed}");
            s.net.ends[0].fill(0, &data);
            assert_eq!(s.reach(WrOpcode::Write, START, 3000), OK, "seed {seed}");
            assert!(s.ram.at(page(round % 8) + 1000, 3000) == data, "seed {seed}");
            let w = abi::SqWqe { imm: s.key, ..wqe(WrOpcode::SendInv, 9) };
            assert_eq!(s.run(0, w, &[]).status, OK, "seed {seed}");
            let c = s.net.ends[1].done();
            assert_eq!((c.imm, u32::from(c.wc_flags)), (s.key, wc_flags::WITH_INV), "seed {seed}");
        }
        assert_eq!(s.reach(WrOpcode::Write, START, 3000), DENIED, "seed {seed}");
    }
}

/// A process of a guest has a doorbell page of its own, and may post anything: it must not name the guest's memory by
/// bus address.
#[test]
fn only_queues_of_the_driver_itself_name_bus_addresses() {
    use unirdma_formats::send_flags::{SIGNALED, STAGED};
    for theirs in [false, true] {
        let mut p = Pair::new();
        let ram = Ram::new();
        ram.list(&[page(1), page(2)]);
        p.rnic.set_memory(p.b.session, Arc::new(ram));
        let (_, key) = p.rnic.create_mr(p.b.session, p.b.pd, access::FAST_SUPPORTED, 8, Arc::new(())).unwrap();
        if theirs {
            p.b.bell = Bell::new(aligned(4096)).unwrap();
            let door = p.rnic.create_doorbell(p.b.session, p.b.bell.clone()).unwrap();
            let cap = abi::QpCap { max_send_wr: 16, max_recv_wr: 16, max_send_sge: 4, ..Default::default() };
            let layout = abi::QpLayout::of(&cap).unwrap();
            let [sq, rq] = [layout.sq_bytes(), layout.rq_bytes()].map(aligned);
            p.b.rings = QpRings::new(aligned(128), sq, rq, layout).unwrap();
            let (pd, cq, rings) = (p.b.pd, p.b.cqn, p.b.rings.clone());
            let create =
                CreateQp { pd, send_cq: cq, recv_cq: cq, srq: None, xrcd: None, door, sig_all: false, cap, rings };
            (p.b.qpn, p.b.slot) = p.rnic.create_qp(p.b.session, QpType::Rc as u8, create).unwrap();
            p.rnic.unpark(p.b.session, 0);
            p.reconnect(true, |a| a);
            p.reconnect(false, |a| a);
        }
        let staged =
            abi::SqWqe { send_flags: SIGNALED | STAGED, remote_addr: IOVA, rkey: p.a.key, ..wqe(WrOpcode::Write, 2) };
        for (w, sges) in [(request(key, 5000), &[][..]), (staged, &[abi::Sge { addr: page(3), length: 8, lkey: 0 }])] {
            p.b.post(w, sges);
            p.run(SECOND);
            let want = if theirs { WcStatus::LocQpOpErr } else { WcStatus::Success };
            assert_eq!(status(&p.b.done()), want, "{theirs}");
            if theirs {
                p.reconnect(false, |a| a);
                p.reconnect(true, |a| a);
            }
        }
    }
}

#[test]
fn memory_that_is_removed_is_reached_no_more() {
    struct None;
    impl Resolve for None {
        fn resolve(&self, _: u64, _: u64) -> Option<(&Span, u64)> {
            Option::None
        }
    }
    for mut s in Scene::each() {
        let w = s.register(&[page(2)], 100);
        s.must(w);
        let session = s.net.ends[1].session;
        s.net.rnic(1).set_memory(session, Arc::new(None));
        assert_eq!(s.reach(WrOpcode::Write, START, 100), DENIED, "{}", s.place);
    }
}

/// A registration of `len` bytes from address 0 on.
fn request(key: u32, len: u64) -> abi::SqWqe {
    abi::SqWqe {
        rkey: key,
        compare_add: len,
        swap: LIST,
        imm: ALL_REMOTE,
        ah: 12,
        dest_qpn: len.div_ceil(PAGE) as u32,
        ..wqe(WrOpcode::RegMr, 1)
    }
}

#[test]
fn quotas_count_mrs_and_bytes() {
    let mut p = Pair::new();
    let limits = Limits { max_mr: 2, max_mr_bytes: MR_BYTES as u64 + 5000, ..Limits::default() };
    let vrnic = p.rnic.add_vrnic(VrnicConfig { group: 0, gids: vec![ip(7)], limits, share: Share::default() }).unwrap();
    p.b = End::of_vrnic(&mut p.rnic, vrnic, 64, QpType::Rc);
    for (mask, attr) in attrs(&p.a, ip(1)) {
        p.rnic.modify_qp(p.b.session, p.b.qpn, mask, &attr).unwrap();
    }
    let ram = Ram::new();
    ram.list(&[page(1), page(2)]);
    p.rnic.set_memory(p.b.session, Arc::new(ram));
    let create = |p: &mut Pair| p.rnic.create_mr(p.b.session, p.b.pd, access::FAST_SUPPORTED, 8, Arc::new(()));
    let (mr, key) = create(&mut p).unwrap();
    assert_eq!(create(&mut p), Err(Status::Exhausted));
    p.b.post(request(key, 5000), &[]);
    p.b.post(abi::SqWqe { imm: key, ..wqe(WrOpcode::LocalInv, 2) }, &[]);
    p.b.post(request(key, 5001), &[]);
    p.settle();
    assert_eq!(p.b.poll().iter().map(|c| c.status).collect::<Vec<_>>(), [OK, OK, UNBOUND]);
    p.rnic.dereg_mr(p.b.session, mr).unwrap();
    create(&mut p).unwrap();
}

/// A peer's copy that is under way as a job does not write to memory that was freed meanwhile.
#[test]
fn a_job_that_was_made_before_writes_nothing_to_an_mr_that_is_free() {
    const LEN: u64 = 15 * PAGE;
    let mut p = Pair::new();
    // Two others keep the RNIC busy, so that copies become jobs.
    let (mut c, d) = (End::new(&mut p.rnic, 0, 3), End::new(&mut p.rnic, 0, 4));
    for (e, to, n) in [(&c, &d, 4), (&d, &c, 3)] {
        for (mask, attr) in attrs(to, ip(n)) {
            p.rnic.modify_qp(e.session, e.qpn, mask, &attr).unwrap();
        }
    }
    let ram = Ram::new();
    ram.list(&(16..31).map(page).collect::<Vec<_>>());
    p.rnic.set_memory(p.b.session, Arc::new(ram.clone()));
    let (_, key) = p.rnic.create_mr(p.b.session, p.b.pd, access::FAST_SUPPORTED, 16, Arc::new(())).unwrap();
    p.b.post(request(key, LEN), &[]);
    p.run(SECOND);
    assert_eq!(p.b.done().status, OK);
    p.a.fill(0, &pattern(LEN as usize, 1));
    p.a.post(abi::SqWqe { rkey: key, ..wqe(WrOpcode::Write, 2) }, &[p.a.sge(0, LEN as u32)]);
    c.post(abi::SqWqe { rkey: d.key, remote_addr: IOVA, ..wqe(WrOpcode::Write, 3) }, &[c.sge(0, LEN as u32)]);
    let mut jobs = Vec::new();
    while jobs.len() < 2 {
        assert!(p.rnic.poll(0));
        jobs.extend(p.rnic.take_job());
    }
    p.b.post(abi::SqWqe { imm: key, ..wqe(WrOpcode::LocalInv, 4) }, &[]);
    p.rnic.poll(0);
    let done = p.b.done();
    assert_eq!((done.wr_id, done.status), (4, OK), "nobody copies at this moment");
    for mut job in jobs {
        job.run(&mut [0; 4096], || 0);
        p.rnic.end_job(job);
    }
    p.run(SECOND);
    assert!(ram.at(page(16), LEN as usize).iter().all(|&b| b == 0), "nothing was written after the completion");
    assert_eq!((p.a.done().status, c.done().status), (DENIED, OK));
}

#[test]
fn a_record_has_the_pages() {
    for registered in [false, true] {
        let [_, mut s] = Scene::each();
        let w = s.register(&[page(2), page(16)], 4096);
        if registered {
            s.must(w);
        }
        let (vrnic, used, now) = (s.net.ends[1].vrnic, s.used(), s.net.now);
        let (record, mut attached) = s.net.rnic(1).take_vrnic(now, vrnic).unwrap();
        let bytes = record.to_bytes().unwrap();
        let record = Record::from_bytes(&bytes).unwrap();
        s.net.ends[1].vrnic = s.net.rnic(1).restore_vrnic(now, &record, &mut attached).unwrap();
        assert_eq!(s.used(), used);
        let vrnic = s.net.ends[1].vrnic;
        assert!(s.net.rnic(1).save_vrnic(now, vrnic).unwrap().to_bytes().unwrap() == bytes);
        assert_eq!(s.reach(WrOpcode::Write, START, 4096), if registered { OK } else { DENIED });
    }
}
