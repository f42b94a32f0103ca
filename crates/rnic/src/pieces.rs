//! Tests of the limits on the pieces of a message: slices, jobs, words, and lists of pages.

use std::sync::Arc;

use unirdma_abi as abi;
use unirdma_formats::access;
use unirdma_mem::{Fault, Loc, PIECE_ALIGN, Pieces, Span};

use crate::access::{MAX_PIECES, NeedsJob, SLICE_PIECES, Side};
use crate::job::{CopyMode, JobResult, Word};
use crate::objects::{Backing, Limits, PageList, Reach, Resolve, SessionId, VrnicConfig, VrnicId};
use crate::rnic::Rnic;
use crate::slab::Handle;

const PAGE: u64 = PIECE_ALIGN;
const PAGES: usize = 3 * MAX_PIECES;
const LEN: u64 = PAGES as u64 * PAGE;

fn pages(n: usize) -> Span {
    let span = Span::anonymous((n + 1) * PAGE as usize);
    let skip = (span.addr() as u64).next_multiple_of(PAGE) - span.addr() as u64;
    span.sub(skip, n as u64 * PAGE).unwrap()
}

/// Two regions that follow each other in bus addresses, from 0 on.
struct Two([Span; 2]);

impl Resolve for Two {
    fn resolve(&self, addr: u64, len: u64) -> Option<(&Span, u64)> {
        let first = self.0[0].len() as u64;
        let (span, off) = if addr < first { (&self.0[0], addr) } else { (&self.0[1], addr - first) };
        (off + len <= span.len() as u64).then_some((span, off))
    }
}

struct World {
    rnic: Rnic,
    session: SessionId,
    vrnic: VrnicId,
    pd: u32,
}

impl World {
    fn new() -> Self {
        let mut rnic = Rnic::new(1, 0);
        let vrnic = VrnicConfig { group: 0, gids: vec![], limits: Limits::default(), share: Default::default() };
        let vrnic = rnic.add_vrnic(vrnic).unwrap();
        let session = rnic.add_session(vrnic).unwrap();
        let pd = rnic.create_pd(session).unwrap();
        World { rnic, session, vrnic, pd }
    }

    /// Registers an MR of `len` bytes from address 0 on, and returns an SGE for all of it.
    fn mr(&mut self, len: u64, backing: Backing) -> abi::Sge {
        let mr = self.rnic.reg_mr(self.session, self.pd, access::LOCAL_WRITE, 0, len, (backing, vec![]));
        abi::Sge { addr: 0, length: len as u32, lkey: mr.unwrap().1 }
    }

    /// An MR of pages in the opposite order.
    fn scattered(&mut self, n: usize) -> (Span, abi::Sge) {
        let span = pages(n);
        let pieces = (0..n as u64).rev().map(|i| (0, i * PAGE, PAGE));
        let pieces = Pieces::new(vec![span.clone()], pieces, Box::new(())).unwrap();
        let sge = self.mr(n as u64 * PAGE, Backing::Pieces(Arc::new(pieces), 0));
        (span, sge)
    }

    fn list<'a>(&self, sges: &'a [abi::Sge]) -> Side<'a> {
        let pd = self.rnic.objects.own_pd(self.session, self.pd).unwrap();
        Side::List { reach: Reach { pd, session: self.session, access: access::LOCAL_WRITE }, sges }
    }
}

#[test]
fn a_slice_and_a_job_have_so_many_pieces_whatever_their_bytes() {
    let mut w = World::new();
    let ((source, from), target) = (w.scattered(PAGES), pages(PAGES));
    let to = w.mr(LEN, Backing::Mapped(target.clone()));
    source.write(0, &[7; LEN as usize]);
    let (from, to) = ([from], [to]);
    let sides = [w.list(&from), w.list(&to)];
    let tables = w.rnic.core.objects.memory();
    let slice = SLICE_PIECES as u64 * PAGE;
    // One of them begins inside a piece.
    for (off, moved) in (0..LEN / slice).map(|i| (i * slice, slice)).chain([(1, slice - 1), (LEN, 0)]) {
        tables.pieces.set(0);
        assert_eq!(tables.copy(sides[0], sides[1], off, LEN - off), Some(Ok(moved)));
        assert_eq!(tables.pieces.get(), (SLICE_PIECES as u64 - 1) * u64::from(moved > 0));
    }
    let mut copied = vec![0; LEN as usize];
    target.read(0, &mut copied);
    assert!(copied.iter().all(|&b| b == 7));
    // A range of one piece at both ends is one slice.
    tables.pieces.set(0);
    assert_eq!((tables.copy(sides[1], sides[1], 0, LEN), tables.pieces.get()), (Some(Ok(LEN)), 0));

    let (ends, most) = (sides.map(|side| (side, w.session, w.vrnic)), MAX_PIECES as u64 * PAGE);
    let made = w.rnic.core.jobs.make(&tables, [Handle::NONE; 2], ends, (5, LEN - 5), CopyMode::default());
    assert!(matches!(made, JobResult::Job(1)));
    // Nothing else may be copied before the rest.
    assert!(w.rnic.core.jobs.extend(&tables, sides, 1).is_none());
    let mut job = w.rnic.core.jobs.take().unwrap();
    assert_eq!(job.size(), (most - 5, MAX_PIECES + 1));
    target.write(0, &vec![0; LEN as usize]);
    job.run(&mut [], || 0);
    target.read(0, &mut copied);
    assert!(copied[..5] == [0; 5] && copied[5..most as usize].iter().all(|&b| b == 7) && copied[most as usize] == 0);
    assert_eq!(job.result().first, Some(Ok(most - 5)));
}

#[test]
fn a_job_for_several_requests_has_no_more_pieces() {
    let mut w = World::new();
    let (from, to) = ([w.scattered(9).1], [w.scattered(9).1]);
    let sides = [w.list(&from), w.list(&to)];
    let (tables, ends) = (w.rnic.core.objects.memory(), sides.map(|side| (side, w.session, w.vrnic)));
    let all = 9 * PAGE;
    w.rnic.core.jobs.make(&tables, [Handle::NONE; 2], ends, (0, all), CopyMode::default());
    let mut requests = 1;
    while let Some(next) = w.rnic.core.jobs.extend(&tables, sides, all) {
        next.push_back(Box::default());
        requests += 1;
    }
    assert_eq!(requests, MAX_PIECES / 9);
    assert_eq!(w.rnic.core.jobs.take().unwrap().size(), (requests as u64 * all, requests * 18));
}

#[test]
fn a_word_in_two_pieces_is_not_touched() {
    let mut w = World::new();
    let span = pages(1);
    let sge = w.mr(PAGE, Backing::Mapped(span.clone()));
    let word = [abi::Sge { length: 3, ..sge }, abi::Sge { addr: 8, length: 5, ..sge }];
    let (side, tables) = (w.list(&word), w.rnic.core.objects.memory());
    let faults = tables.word(side, Word::Add(u64::MAX));
    assert_eq!(faults, Err(NeedsJob::Fault(Fault::Destination)));
    let made = w.rnic.core.jobs.word(&tables, [Handle::NONE; 2], None, (side, w.session, w.vrnic), Word::Add(!0));
    assert!(matches!(made, JobResult::Job(1)));
    let mut job = w.rnic.core.jobs.take().unwrap();
    job.run(&mut [], || 0);
    assert_eq!(job.result().first, Some(Err(Fault::Destination)));
    let mut after = [1; PAGE as usize];
    span.read(0, &mut after);
    assert_eq!(after, [0; PAGE as usize]);
}

/// Pages that follow each other are one place, up to the end of their region.
#[test]
fn pages_of_a_list_are_found_in_each_region() {
    let regions = Two([pages(3), pages(5)]);
    let list = PageList::new(8, 0, Arc::new(()));
    let at = |pages: &[u64], off, len| {
        let list = list.with_parts((8, 0, 12, 100, Some(pages)));
        let place = list.locate(&regions, off, len)?;
        let Loc::Mapped(span, off) = place.at() else { panic!("it is mapped") };
        Some((span.len() as u64 / PAGE, off, place.len()))
    };
    let all: Vec<u64> = (0..8).map(|i| i * PAGE).collect();
    assert_eq!(at(&all, 0, 8 * PAGE - 100), Some((3, 100, 3 * PAGE - 100)));
    assert_eq!(at(&all, 3 * PAGE - 100, 5 * PAGE), Some((5, 0, 5 * PAGE)));
    assert_eq!(at(&all, 3 * PAGE - 101, 2), Some((3, 3 * PAGE - 1, 1)));
    assert_eq!((at(&all, 0, 10), at(&all, 8 * PAGE - 100, 1)), (Some((3, 100, 10)), None));
    let apart = [7 * PAGE, 0, PAGE, 4 * PAGE];
    assert_eq!(at(&apart, 0, 4 * PAGE - 100), Some((5, 4 * PAGE + 100, PAGE - 100)));
    assert_eq!(at(&apart, PAGE - 100 + 7, 3 * PAGE - 7), Some((3, 7, 2 * PAGE - 7)));
}
