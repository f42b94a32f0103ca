//! MRs whose memory lies in pieces of several windows: every operation finds each byte where it is.

use std::sync::Arc;

use unirdma_abi as abi;
use unirdma_formats::{QpType, WcStatus, WrOpcode, access};
use unirdma_mem::{Pieces, Span};
use unirdma_rnic::Backing;
use unirdma_simkit::net::{Faults, Net};
use unirdma_simkit::*;

const PAGE: u64 = 4096;
/// Window and page of each page of the MR.
const PAGES: [(u32, u64); 6] = [(0, 3), (1, 0), (0, 1), (1, 3), (1, 2), (0, 0)];
const LEN: usize = PAGES.len() * PAGE as usize;
const OK: u8 = WcStatus::Success as u8;

struct Scattered {
    pieces: Arc<Pieces>,
    key: u32,
}

impl Scattered {
    /// An MR of an end, from address `IOVA` on.
    fn new(net: &mut Net, end: usize) -> Self {
        let windows = (0..2).map(|_| aligned(4 * PAGE as usize)).collect();
        let pieces = PAGES.map(|(window, page)| (window, page * PAGE, PAGE)).into_iter();
        let pieces = Arc::new(Pieces::new(windows, pieces, Box::new(())).unwrap());
        let (s, pd) = (net.ends[end].session, net.ends[end].pd);
        let backing = (Backing::Pieces(pieces.clone(), 0), vec![9]);
        let (_, key) = net.rnic(end).reg_mr(s, pd, ALL | access::MW_BIND, IOVA, LEN as u64, backing).unwrap();
        Scattered { pieces, key }
    }

    fn each(&self, mut f: impl FnMut(usize, &Span, usize)) {
        for page in (0..LEN).step_by(PAGE as usize) {
            let (span, off, n) = self.pieces.at(page as u64).unwrap();
            assert_eq!(n, PAGE);
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
