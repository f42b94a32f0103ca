//! MRs whose memory lies in pieces of several windows: every operation finds each byte where it is.

use std::sync::Arc;

use unirdma_abi as abi;
use unirdma_formats::{QpType, WcStatus, WrOpcode, access};
use unirdma_mem::{Loc, Pieces, Span};
use unirdma_rnic::Backing;
use unirdma_simkit::net::{Faults, Net};
use unirdma_simkit::*;

const PAGE: u64 = 4096;
/// Window and page of each page of the MR.
const PAGES: [(u32, u64); 6] = [(0, 3), (1, 0), (0, 1), (1, 3), (1, 2), (0, 0)];
const LEN: usize = PAGES.len() * PAGE as usize;
const OK: u8 = WcStatus::Success as u8;

/// A window that begins at a page.
fn pages(n: u64) -> Span {
    let span = Span::anonymous(((n + 1) * PAGE) as usize);
    let skip = (span.addr() as u64).next_multiple_of(PAGE) - span.addr() as u64;
    span.sub(skip, n * PAGE).unwrap()
}

struct Scattered {
    pieces: Arc<Pieces>,
    key: u32,
}

impl Scattered {
    /// An MR of an end, from address `IOVA` on.
    fn new(net: &mut Net, end: usize) -> Self {
        let windows = (0..2).map(|_| pages(4)).collect();
        let pieces = PAGES.map(|(window, page)| (window, page * PAGE, PAGE)).into_iter();
        let pieces = Arc::new(Pieces::new(windows, pieces, Box::new(())).unwrap());
        let (s, pd) = (net.ends[end].session, net.ends[end].pd);
        let backing = (Backing::Pieces(pieces.clone(), 0), vec![9]);
        let (_, key) = net.rnic(end).reg_mr(s, pd, ALL | access::MW_BIND, IOVA, LEN as u64, backing).unwrap();
        Scattered { pieces, key }
    }

    fn each(&self, mut f: impl FnMut(usize, &Span, usize)) {
        for page in (0..LEN).step_by(PAGE as usize) {
            let place = self.pieces.at(page as u64).unwrap();
            let Loc::Mapped(span, off) = place.at() else { panic!("it is mapped") };
            assert_eq!(place.len(), PAGE);
            f(page, span, off as usize);
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut v = vec![0; LEN];
        self.each(|at, span, off| span.read(off, &mut v[at..at + PAGE as usize]));
        v
    }

    fn fill(&self, bytes: &[u8]) {
        self.each(|at, span, off| span.write(off, &bytes[at..at + PAGE as usize]));
    }

    fn sge(&self, off: u64, length: u32) -> abi::Sge {
        abi::Sge { addr: IOVA + off, length, lkey: self.key }
    }

    fn remote(&self, op: WrOpcode, off: u64) -> abi::SqWqe {
        abi::SqWqe { remote_addr: IOVA + off, rkey: self.key, ..wqe(op, 1) }
    }
}

fn each() -> [(&'static str, Net); 2] {
    [1, 2].map(|hosts| {
        let mut net = Net::hosts(hosts, &[QpType::Rc, QpType::Rc], 3, Faults::default());
        net.connect(QpType::Rc, 0, 1, &|a| a);
        net.connect(QpType::Rc, 1, 0, &|a| a);
        (["one host", "two hosts"][hosts - 1], net)
    })
}

/// Posts a request of end 0; the status of its completion.
fn run(net: &mut Net, w: abi::SqWqe, sges: &[abi::Sge]) -> u8 {
    net.ends[0].post(w, sges);
    net.run(SECOND);
    net.ends[0].done().status
}

#[test]
fn messages_cross_from_piece_to_piece_on_both_sides() {
    for (place, mut net) in each() {
        let (ours, theirs) = (Scattered::new(&mut net, 0), Scattered::new(&mut net, 1));
        let (a, mut b) = (pattern(LEN, 1), pattern(LEN, 2));
        ours.fill(&a);
        theirs.fill(&b);
        let (from, to, n) = (1001, 4090, 3 * 4096 + 7);
        let sges = [ours.sge(from as u64, 5), ours.sge(from as u64 + 5, n as u32 - 5)];
        assert_eq!(run(&mut net, theirs.remote(WrOpcode::Write, to as u64), &sges), OK, "{place}");
        b[to..to + n].copy_from_slice(&a[from..from + n]);
        assert_eq!(theirs.bytes(), b, "{place}: WRITE");

        let whole = ours.sge(0, LEN as u32);
        assert_eq!(run(&mut net, theirs.remote(WrOpcode::Read, 0), &[whole]), OK, "{place}");
        assert_eq!(ours.bytes(), b, "{place}: READ");

        ours.fill(&a);
        net.ends[1].recv(3, &[theirs.sge(4095, 2), theirs.sge(8000, 9000)]);
        assert_eq!(run(&mut net, wqe(WrOpcode::Send, 2), &[ours.sge(4000, 9002)]), OK, "{place}");
        assert_eq!(net.ends[1].done().status, OK);
        b[4095..4097].copy_from_slice(&a[4000..4002]);
        b[8000..17_000].copy_from_slice(&a[4002..13_002]);
        assert_eq!(theirs.bytes(), b, "{place}: SEND");
    }
}

#[test]
fn atomics_and_windows_find_their_piece() {
    for (place, mut net) in each() {
        let theirs = Scattered::new(&mut net, 1);
        let mut b = pattern(LEN, 2);
        theirs.fill(&b);
        for off in [2 * 4096 - 8, 2 * 4096] {
            let before = u64::from_ne_bytes(b[off..off + 8].try_into().unwrap());
            let add = abi::SqWqe { compare_add: 5, ..theirs.remote(WrOpcode::FetchAdd, off as u64) };
            let sge = net.ends[0].sge(64, 8);
            assert_eq!(run(&mut net, add, &[sge]), OK, "{place}");
            assert_eq!(net.ends[0].bytes(64, 8), before.to_ne_bytes(), "{place}: what was there");
            b[off..off + 8].copy_from_slice(&before.wrapping_add(5).to_ne_bytes());
        }
        assert_eq!(theirs.bytes(), b, "{place}: FETCH_ADD");

        // A window over the end of one piece and the beginning of the next, whose addresses begin at 0.
        let (s, pd) = (net.ends[1].session, net.ends[1].pd);
        let (_, key) = net.rnic(1).alloc_mw(s, pd, 2).unwrap();
        let flags = access::REMOTE_WRITE | access::ZERO_BASED;
        let bind = abi::SqWqe {
            rkey: key,
            remote_addr: IOVA + 4000,
            compare_add: 200,
            swap: u64::from(flags) << 32 | u64::from(theirs.key),
            ..wqe(WrOpcode::BindMw, 7)
        };
        net.ends[1].post(bind, &[]);
        net.run(SECOND);
        assert_eq!(net.ends[1].done().status, OK, "{place}: bind");
        let data = pattern(200, 9);
        net.ends[0].fill(0, &data);
        let sge = net.ends[0].sge(0, 200);
        let write = |off| abi::SqWqe { rkey: key, remote_addr: off, ..wqe(WrOpcode::Write, 8) };
        assert_eq!(run(&mut net, write(0), &[sge]), OK, "{place}");
        b[4000..4200].copy_from_slice(&data);
        assert_eq!(theirs.bytes(), b, "{place}: window");
        assert_eq!(run(&mut net, write(1), &[sge]), WcStatus::RemAccessErr as u8, "{place}: one byte too many");
        assert_eq!(theirs.bytes(), b, "{place}: nothing was written");
    }
}

/// Each EXTEND_MR adds a list of its own behind the ones before.
#[test]
fn an_mr_gets_longer_while_it_is_used() {
    const PARTS: u64 = 300;
    for (place, mut net) in each() {
        let (window, sge) = (pages(PARTS), net.ends[0].sge(0, 8));
        let (s, pd) = (net.ends[1].session, net.ends[1].pd);
        let part = |i: u64| Backing::Mapped(window.sub((PARTS - 1 - i) * PAGE, PAGE).unwrap());
        let (mr, key) = net.rnic(1).reg_mr(s, pd, ALL, IOVA, PAGE, (part(0), vec![9])).unwrap();
        let write = |off| abi::SqWqe { remote_addr: IOVA + off, rkey: key, ..wqe(WrOpcode::Write, 1) };
        for i in 1..PARTS {
            if i % 60 == 1 {
                let beyond = write(i * PAGE - 4);
                net.ends[0].fill(0, &i.to_ne_bytes());
                let four = abi::Sge { length: 4, ..sge };
                assert_eq!(run(&mut net, beyond, &[four]), OK, "{place}: {i}");
                let mut last = [0; 4];
                window.read(((PARTS - i) * PAGE + PAGE - 4) as usize, &mut last);
                assert_eq!(last, (i as u32).to_ne_bytes(), "{place}: {i}");
            }
            net.rnic(1).extend_mr(s, mr, PAGE, (part(i), vec![9])).unwrap();
        }
        net.ends[0].fill(0, &[5; 8]);
        // Across the ends of two lists.
        assert_eq!(run(&mut net, write(200 * PAGE - 4), &[sge]), OK, "{place}");
        let mut halves = [0; 8];
        window.read(((PARTS - 200) * PAGE + PAGE - 4) as usize, &mut halves[..4]);
        window.read(((PARTS - 201) * PAGE) as usize, &mut halves[4..]);
        assert_eq!(halves, [5; 8], "{place}");
        // The end may lie within a page.
        let end = Backing::Mapped(window.sub(5, 7).unwrap());
        net.rnic(1).extend_mr(s, mr, 7, (end, vec![9])).unwrap();
        assert_eq!(
            run(&mut net, write(PARTS * PAGE), &[sge]),
            WcStatus::RemAccessErr as u8,
            "{place}: the last byte is 7"
        );
    }
}

/// An MR of pieces of three bytes: a word of eight at its beginning is refused as a whole.
#[test]
fn an_atomic_changes_nothing_beyond_the_piece_that_it_begins_in() {
    for op in [WrOpcode::FetchAdd, WrOpcode::CmpSwap, WrOpcode::AtomicWrite] {
        for (place, mut net) in each() {
            let (window, sge) = (pages(1), net.ends[0].sge(0, 8));
            window.write(0, &[0xa5; PAGE as usize]);
            let (s, pd) = (net.ends[1].session, net.ends[1].pd);
            let crumb = |i: u64| (Backing::Mapped(window.sub(64 * i, 3).unwrap()), vec![9]);
            let (mr, key) = net.rnic(1).reg_mr(s, pd, ALL, IOVA, 3, crumb(0)).unwrap();
            (1..8).for_each(|i| net.rnic(1).extend_mr(s, mr, 3, crumb(i)).unwrap());
            let compare_add = u64::from_ne_bytes([0xa5; 8]);
            let w = abi::SqWqe { remote_addr: IOVA, rkey: key, compare_add, swap: 7, ..wqe(op, 1) };
            assert_eq!(run(&mut net, w, &[sge]), WcStatus::RemAccessErr as u8, "{place}: {op:?}");
            let mut after = [0; PAGE as usize];
            window.read(0, &mut after);
            assert!(after == [0xa5; PAGE as usize], "{place}: {op:?}");
        }
    }
}
