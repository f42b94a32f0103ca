//! Sparse memory files: which thread makes missing pages, when, and who is charged for the time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use unirdma_abi as abi;
use unirdma_formats::{QpType, WcStatus, WrOpcode};
use unirdma_mem::holes::{Account, Room};
use unirdma_mem::{MemFd, Span, guard, map_pieces};
use unirdma_rnic::Backing;
use unirdma_simkit::net::{Faults, Net};
use unirdma_simkit::*;

const PAGE: u64 = 4096;
const PAGES: u64 = 256;
/// Where the sparse file begins, as MRs have it.
const SPARSE: u64 = 0x9000_0000;
/// Most pages that a thread which touches a hole makes at once.
const RUN: u64 = 4;

/// Counts the bytes of the pages that were made, and the steps.
#[derive(Default)]
struct Counter {
    bytes: AtomicU64,
    steps: AtomicU64,
}

impl Account for Counter {
    fn take(&self, bytes: u64) -> Room {
        self.bytes.fetch_add(bytes, Ordering::SeqCst);
        self.steps.fetch_add(1, Ordering::SeqCst);
        Room::Enough
    }
    fn end(&self, taken: u64, made: u64) {
        self.bytes.fetch_sub(taken - made, Ordering::SeqCst);
    }
}

/// Two ends; b has an MR of a file without pages.
struct Scene {
    p: Pair,
    file: MemFd,
    sparse: Span,
    made: Arc<Counter>,
    key: u32,
}

impl Scene {
    /// `None` if pages cannot be counted here.
    fn new() -> Option<Scene> {
        Self::of(Pair::new)
    }

    fn of(pair: fn() -> Pair) -> Option<Scene> {
        guard::install().unwrap();
        if let Err(why) = guard::counts_holes() {
            eprintln!("skipped: {why}");
            return None;
        }
        let mut p = pair();
        let file = MemFd::new(c"t", (PAGES * PAGE) as usize).unwrap();
        let made = Arc::new(Counter::default());
        let sparse = map_pieces(&[(file.fd(), 0, PAGES * PAGE)], Box::new(()), Some(made.clone())).unwrap();
        let backing = Backing::Mapped(sparse.clone());
        let (_, key) = p.rnic.reg_mr(p.b.session, p.b.pd, ALL, SPARSE, PAGES * PAGE, (backing, vec![8])).unwrap();
        Some(Scene { p, file, sparse, made, key })
    }

    fn pages(&self) -> u64 {
        self.made.bytes.load(Ordering::SeqCst) / PAGE
    }

    /// a writes `bytes` bytes of its memory to page `page`.
    fn write(&mut self, wr_id: u64, page: u64, bytes: u32) {
        let wqe = abi::SqWqe { remote_addr: SPARSE + page * PAGE, rkey: self.key, ..wqe(WrOpcode::Write, wr_id) };
        self.p.a.post(wqe, &[self.p.a.sge(0, bytes)]);
    }

    /// A round without its job. Returns the number of pages that it makes.
    fn round(&mut self) -> u64 {
        let before = self.pages();
        self.p.rnic.poll(self.p.now);
        self.pages() - before
    }

    /// Does a job, which takes `ns`. Returns the number of pages that it makes, or `None` if there is no job.
    fn job(&mut self, ns: u64) -> Option<u64> {
        let before = self.pages();
        let mut job = self.p.rnic.take_job()?;
        let clock = AtomicU64::new(0);
        job.run(&mut [0; 65_536], || clock.fetch_add(ns, Ordering::Relaxed));
        self.p.rnic.end_job(job);
        Some(self.pages() - before)
    }
}

/// The thread that has the RNIC meets one hole. After that jobs make the pages, and others have their turns meanwhile.
#[test]
fn pages_are_made_by_jobs_and_not_while_others_wait() {
    let Some(mut s) = Scene::new() else { return };
    (0..16).for_each(|i| s.write(i, i * 2 * RUN, 8));
    assert_eq!(s.round(), 1, "the first one tells that there are holes");
    s.p.b.post(abi::SqWqe { remote_addr: IOVA, rkey: s.p.a.key, ..wqe(WrOpcode::Write, 99) }, &[s.p.b.sge(0, 8)]);
    for _ in 0..100 {
        assert_eq!(s.round(), 0, "no turn makes pages");
        while let Some(made) = s.job(0) {
            assert!(made <= 4, "{made} pages in one job");
        }
    }
    assert_eq!((s.pages(), s.p.a.poll().len(), s.p.b.done().wr_id), (16, 16, 99));
}

/// The kernel makes the pages of a message in one step, not one by one, whether the round or a job touches them first.
#[test]
fn the_pages_of_one_message_are_made_in_two_steps_at_most() {
    const BYTES: u32 = 64 << 10;
    let Some(mut s) = Scene::new() else { return };
    for (i, first) in [0, 16, 100].into_iter().enumerate() {
        s.made.steps.store(0, Ordering::SeqCst);
        s.write(i as u64, first, BYTES);
        s.p.settle();
        assert_eq!(status(&s.p.a.done()), WcStatus::Success);
        let steps = s.made.steps.load(Ordering::SeqCst);
        assert_eq!((s.pages(), steps <= 2), (16 * (i as u64 + 1), true), "message {i}: {steps} steps");
    }
}

/// The pages of a message are also made in two steps if the copies of the vRNIC have taken long before, for any reason:
/// the first job that touches a hole reports that there are holes, and the owner of the hole is charged for it.
#[test]
fn a_job_that_expects_no_holes_finds_them() {
    let Some(mut s) = Scene::new() else { return };
    const BYTES: u32 = 64 << 10;
    // Copies between existing memory: both vRNICs have work, so jobs copy, and take long.
    let (to_a, to_b) = (s.p.a.key, s.p.b.key);
    s.p.a.post(abi::SqWqe { remote_addr: IOVA, rkey: to_b, ..wqe(WrOpcode::Write, 8) }, &[s.p.a.sge(0, BYTES)]);
    s.p.b.post(abi::SqWqe { remote_addr: IOVA, rkey: to_a, ..wqe(WrOpcode::Write, 9) }, &[s.p.b.sge(0, BYTES)]);
    let mut jobs = 0;
    while {
        s.round();
        s.job(1_000_000).is_some()
    } {
        jobs += 1;
    }
    assert!(jobs > 0 && s.pages() == 0);
    s.made.steps.store(0, Ordering::SeqCst);
    s.write(1, 16, BYTES);
    s.p.settle();
    let steps = s.made.steps.load(Ordering::SeqCst);
    assert_eq!((s.pages(), steps <= 2), (16, true), "{steps} steps");
}

/// A message into holes arrives whole, whether the round, a job or packets bring it, and reading holes gives zeros.
#[test]
fn messages_into_holes_arrive_whole() {
    const BYTES: usize = 100_000;
    let Some(mut s) = Scene::new() else { return };
    s.p.a.fill(0, &pattern(BYTES, 1));
    for (i, first) in [0, 50, 100].into_iter().enumerate() {
        s.write(i as u64, first, BYTES as u32);
        s.p.settle();
        assert_eq!(status(&s.p.a.done()), WcStatus::Success);
        let mut got = vec![0; BYTES];
        s.sparse.read((first * PAGE) as usize, &mut got);
        assert!(got == pattern(BYTES, 1), "message {i}");
    }
    s.p.a.post(
        abi::SqWqe { remote_addr: SPARSE + 200 * PAGE, rkey: s.key, ..wqe(WrOpcode::Read, 7) },
        &[s.p.a.sge(0, BYTES as u32)],
    );
    s.p.settle();
    assert_eq!((status(&s.p.a.done()), s.p.a.bytes(0, BYTES)), (WcStatus::Success, vec![0; BYTES]));
    // Words, too, each once.
    for i in 0..3 {
        let add =
            abi::SqWqe { remote_addr: SPARSE + 255 * PAGE, rkey: s.key, compare_add: 5, ..wqe(WrOpcode::FetchAdd, i) };
        s.p.a.post(add, &[s.p.a.sge(0, 8)]);
        s.p.settle();
        assert_eq!(status(&s.p.a.done()), WcStatus::Success);
        assert_eq!(s.p.a.bytes(0, 8), (5 * i).to_ne_bytes());
    }
}

/// The time of a job that makes pages is charged to the vRNIC whose memory has holes; the time of any other job is
/// charged to the requester.
#[test]
fn who_has_holes_pays_for_them() {
    const TOOK_NS: u64 = 1_000_000;
    let Some(mut s) = Scene::new() else { return };
    s.write(1, 0, 8);
    s.round();
    let paid = |s: &mut Scene, page| {
        let before = [s.p.a.vrnic, s.p.b.vrnic].map(|v| s.p.rnic.busy_ns(v));
        s.write(2, page, 8);
        s.round();
        s.job(TOOK_NS).expect("a job");
        let after = [s.p.a.vrnic, s.p.b.vrnic].map(|v| s.p.rnic.busy_ns(v));
        [0, 1].map(|i| after[i] - before[i] >= TOOK_NS)
    };
    assert_eq!(paid(&mut s, 8), [false, true]);
    assert_eq!(paid(&mut s, 8), [true, false], "the page is there now");
}

/// Operations on one page after the other. Returns the number of jobs of 1 ms that make pages for them within 160 ms,
/// or until all pages are made.
fn jobs_that_make_pages(s: &mut Scene, op: WrOpcode) -> u32 {
    const TOOK_NS: u64 = 1_000_000;
    let (mut jobs, end) = (0, s.p.now + 160_000_000);
    for page in 0..PAGES {
        let remote_addr = SPARSE + page * PAGE;
        s.p.a.post(abi::SqWqe { remote_addr, rkey: s.key, ..wqe(op, 1) }, &[s.p.a.sge(0, 8)]);
        while s.p.a.poll().is_empty() {
            if s.p.now >= end {
                return jobs;
            }
            s.round();
            jobs += u32::from(s.job(TOOK_NS).is_some_and(|pages| pages > 0));
            s.p.now += 100_000;
        }
    }
    jobs
}

/// A vRNIC that has had many pages made gets further ones in a part of the time only, while other vRNICs have work.
#[test]
fn pages_take_a_part_of_the_time_from_others() {
    for op in [WrOpcode::Write, WrOpcode::FetchAdd] {
        let pairs: [fn() -> Pair; 2] = [Pair::new, Pair::of_one_vrnic];
        let jobs = pairs.map(|pair| Some(jobs_that_make_pages(&mut Scene::of(pair)?, op)));
        let [Some(beside_a_vrnic), Some(alone)] = jobs else { return };
        // The burst allows 10 jobs, and an eighth of the time 20.
        assert!((28..=33).contains(&beside_a_vrnic), "{op:?}: {beside_a_vrnic}");
        assert!(alone > 2 * beside_a_vrnic, "{op:?}: {alone}");
    }
}

/// Jobs go on until they have found no hole for a while. Then turns make short copies again.
#[test]
fn memory_without_holes_needs_no_jobs() {
    let Some(mut s) = Scene::new() else { return };
    s.write(0, 0, 8);
    assert_eq!(s.round(), 1);
    s.p.a.done();
    let mut jobs = 0;
    loop {
        s.write(1, 0, 8);
        s.round();
        if s.job(0).is_none() {
            break;
        }
        jobs += 1;
        assert_eq!(status(&s.p.a.done()), WcStatus::Success);
    }
    assert_eq!(jobs, 1000 - 16, "after them only long copies are made by jobs");
    // That lasts until its owner makes a hole there again.
    let flags = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(s.file.fd(), flags, 0, PAGE).unwrap();
    s.p.a.done();
    s.write(2, 0, 8);
    assert_eq!((s.round(), s.job(0)), (1, None));
    s.write(3, 0, 8);
    assert_eq!((s.round(), s.job(0)), (0, Some(0)));
}

/// Jobs for memory in which a thread was stuck are done one at a time, and by a thread that can be replaced.
#[test]
fn memory_that_somebody_was_stuck_in_is_treated_as_slow() {
    let Some(mut s) = Scene::new() else { return };
    s.write(0, 0, 8);
    s.round();
    s.write(1, 8, 8);
    s.round();
    assert_eq!(s.job(100_000_000), Some(1));
    s.write(2, 16, 8);
    s.round();
    let mut job = s.p.rnic.take_job().unwrap();
    assert!(job.may_wait());
    job.run(&mut [0; 4096], || 0);
    s.p.rnic.end_job(job);
    s.p.settle();
    assert_eq!(s.p.a.poll().len(), 3);
}

/// A datagram whose memory has a hole is sent by a job. A command that would take the datagram away waits for the job,
/// too.
#[test]
fn datagrams_that_jobs_send_are_waited_for() {
    let Some(Scene { sparse, .. }) = Scene::new() else { return };
    let mut net = Net::hosts(1, &[QpType::Ud; 2], 9, Faults::default());
    net.connect(QpType::Ud, 0, 1, &|a| a);
    net.connect(QpType::Ud, 1, 0, &|a| a);
    let (session, pd, qpn, dest) = (net.ends[0].session, net.ends[0].pd, net.ends[0].qpn, net.ends[1].qpn);
    let backing = (Backing::Mapped(sparse), vec![8]);
    let (_, lkey) = net.rnic(0).reg_mr(session, pd, ALL, SPARSE, PAGES * PAGE, backing).unwrap();
    let (ah, to) = (net.ah(0, 1), net.ends[1].sge(0, 2000));
    (1..=3).for_each(|id| net.ends[1].recv(id, &[to]));
    net.run(SECOND);
    for id in 1..=3 {
        let from = abi::Sge { addr: SPARSE + 8 * id * PAGE, lkey, length: 1000 };
        net.ends[0].post_to(wqe(WrOpcode::Send, id), ah, dest, &[from]);
    }
    let (now, mut jobs) = (net.now, 0);
    let rnic = net.rnic(0);
    while rnic.is_behind(now, session, Some(qpn)) {
        rnic.poll(now);
        if let Some(mut job) = rnic.take_brief_job() {
            assert!(rnic.is_behind(now, session, Some(qpn)), "a job sends");
            job.run(&mut [0; 65_536], || 0);
            rnic.end_job(job);
            jobs += 1;
        }
    }
    rnic.destroy_qp(session, qpn).unwrap();
    net.run(SECOND);
    assert_eq!(net.ends[1].poll().iter().map(|c| c.wr_id).collect::<Vec<_>>(), [1, 2, 3]);
    assert!(jobs > 0);
}
