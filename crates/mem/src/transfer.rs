//! Copies between two places, each of which may be shared memory, another process, or private bytes.

use std::sync::atomic::{AtomicU64, Ordering, fence};

use crate::{Bell, ProcMem, Span, guard, holes};

/// Bytes at the end of a copy that are written one word at a time, last.
const TAIL: usize = 64;
/// A copy of more bytes than this may touch many pages, so that pages in holes are made in one step.
const MANY: usize = 4096;

/// Where memory is.
#[derive(Clone, Copy)]
pub enum Loc<'a> {
    /// Offset in a mapped window.
    Mapped(&'a Span, u64),
    /// As `Mapped`, where pages of the file may be missing ([`crate::holes`]). If `waits`, touching it may take as long
    /// as the file's owner likes; otherwise it takes as long as the kernel needs to make pages.
    Sparse {
        /// The window.
        span: &'a Span,
        /// Offset in it.
        off: u64,
        /// As explained above.
        waits: bool,
    },
    /// Address in another process, whose driver announces in its doorbell page when it moves pages.
    Process(&'a ProcMem, u64, Option<&'a Bell>),
    /// Private bytes; source only.
    Bytes(&'a [u8]),
    /// Nowhere: reads give zeros, and writes are lost.
    Null,
    /// Somewhere else for the moment: its driver announces in its doorbell page when it is back.
    Away,
}

/// One end of a copy: where memory is, and the number of bytes that may be touched from there on. Nothing in this
/// module goes beyond them.
#[derive(Clone, Copy)]
pub struct Place<'a> {
    at: Loc<'a>,
    len: u64,
}

impl<'a> Place<'a> {
    /// `len` bytes from `at` on.
    #[inline]
    pub fn new(at: Loc<'a>, len: u64) -> Self {
        Place { at, len }
    }

    /// Private bytes; source only.
    #[inline]
    pub fn bytes(bytes: &'a [u8]) -> Self {
        Place::new(Loc::Bytes(bytes), bytes.len() as u64)
    }

    /// Where it begins.
    #[inline]
    pub fn at(&self) -> Loc<'a> {
        self.at
    }

    /// The number of bytes that may be touched.
    #[inline]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// True if no byte may be touched.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Its first bytes, `most` of them if it has more.
    #[inline]
    #[must_use]
    pub fn up_to(self, most: u64) -> Self {
        Place { len: self.len.min(most), ..self }
    }

    /// The place, if `len` bytes may be touched.
    #[inline]
    fn of(&self, len: usize) -> Option<Loc<'a>> {
        (len as u64 <= self.len).then_some(self.at)
    }
}

const ZEROS: [u8; 4096] = [0; 4096];

impl Loc<'_> {
    /// The place `n` bytes on.
    fn after(self, n: u64) -> Option<Self> {
        Some(match self {
            Loc::Mapped(s, off) => Loc::Mapped(s, off.checked_add(n)?),
            Loc::Sparse { span, off, waits } => Loc::Sparse { span, off: off.checked_add(n)?, waits },
            Loc::Process(p, addr, bell) => Loc::Process(p, addr.checked_add(n)?, bell),
            Loc::Bytes(b) => Loc::Bytes(b.get(usize::try_from(n).ok()?..)?),
            Loc::Null => Loc::Null,
            Loc::Away => Loc::Away,
        })
    }

    /// True if a thread that others wait for must not touch it: it lies in the private memory of a process, or pages
    /// may be missing.
    #[inline]
    pub fn takes_time(&self) -> bool {
        matches!(self, Loc::Process(..) | Loc::Sparse { .. })
    }

    /// True if touching it may take as long as its owner likes.
    pub fn may_wait(&self) -> bool {
        matches!(self, Loc::Process(..) | Loc::Sparse { waits: true, .. })
    }

    /// The doorbell page of the process that it lies in.
    fn bell(&self) -> Option<&Bell> {
        if let Loc::Process(_, _, bell) = self { *bell } else { None }
    }
}

/// The end of a copy that could not be accessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The source.
    Source,
    /// The destination.
    Destination,
    /// The source, for the moment: its process moves pages.
    SourceMoves,
    /// The destination, for the moment: its process moves pages.
    DestinationMoves,
}

impl Fault {
    /// True if the copy may be tried again soon.
    pub fn passes(self) -> bool {
        matches!(self, Fault::SourceMoves | Fault::DestinationMoves)
    }

    /// The same fault once the copy will not be tried again.
    pub fn lasting(self) -> Self {
        match self {
            Fault::SourceMoves => Fault::Source,
            Fault::DestinationMoves => Fault::Destination,
            f => f,
        }
    }

    /// The same fault for a caller that calls the source the destination.
    pub fn reversed(self) -> Self {
        match self {
            Fault::Source => Fault::Destination,
            Fault::Destination => Fault::Source,
            Fault::SourceMoves => Fault::DestinationMoves,
            Fault::DestinationMoves => Fault::SourceMoves,
        }
    }

    fn moves(self) -> Self {
        match self {
            Fault::Source => Fault::SourceMoves,
            Fault::Destination => Fault::DestinationMoves,
            f => f,
        }
    }
}

/// Runs `f`, which accesses the process behind `bell`, while that process moves no pages. If it does, or if `f` could
/// not access `end` and pages moved meanwhile, the fault is a temporary one.
fn steady<R>(bell: Option<&Bell>, end: Fault, f: impl FnOnce() -> Result<R, Fault>) -> Result<R, Fault> {
    let Some(bell) = bell else { return f() };
    let before = bell.moves();
    if !bell.begin_copy() {
        return Err(end.moves());
    }
    let done = f();
    bell.end_copy();
    match done {
        Err(fault) if fault == end && bell.moves() != before => Err(fault.moves()),
        r => r,
    }
}

/// Copies `len` bytes. The destination sees them in address order, the last byte last: applications
/// poll on it (DESIGN, application memory). `scratch` bounces a copy between two processes.
///
/// # Errors
/// The end whose memory is gone, or moves, or has fewer bytes. A mapped range that leaves its window is a fault of that
/// end too.
///
/// # Panics
/// If the destination is [`Loc::Bytes`], or `scratch` is empty when both ends are processes.
pub fn transfer(src: Place<'_>, dst: Place<'_>, len: usize, scratch: &mut [u8]) -> Result<(), Fault> {
    let (src, dst) = (src.of(len).ok_or(Fault::Source)?, dst.of(len).ok_or(Fault::Destination)?);
    steady(src.bell(), Fault::Source, || steady(dst.bell(), Fault::Destination, || copy(src, dst, len, scratch)))
}

fn copy(src: Loc<'_>, dst: Loc<'_>, len: usize, scratch: &mut [u8]) -> Result<(), Fault> {
    match (src, dst) {
        (Loc::Away, _) => Err(Fault::SourceMoves),
        (_, Loc::Away) => Err(Fault::DestinationMoves),
        (Loc::Sparse { span, off, .. }, to) => copy(Loc::Mapped(span, off), to, len, scratch),
        (from, Loc::Sparse { span, off, .. }) => copy(from, Loc::Mapped(span, off), len, scratch),
        (Loc::Bytes(b), Loc::Mapped(d, doff)) => {
            let b = b.get(..len).ok_or(Fault::Source)?;
            d.write(range(d, doff, len).ok_or(Fault::Destination)?, b);
            Ok(())
        }
        (Loc::Bytes(b), Loc::Process(p, addr, _)) => {
            p.write(addr, b.get(..len).ok_or(Fault::Source)?).map_err(|_| Fault::Destination)
        }
        (Loc::Mapped(s, soff), Loc::Mapped(d, doff)) => copy_mapped((s, soff), (d, doff), len),
        (Loc::Mapped(s, soff), Loc::Process(p, addr, _)) => {
            let off = range(s, soff, len).ok_or(Fault::Source)?;
            p.write_span(addr, s, off, len).map_err(|_| Fault::Destination)
        }
        (Loc::Process(p, addr, _), Loc::Mapped(d, doff)) => {
            let off = range(d, doff, len).ok_or(Fault::Destination)?;
            p.read_span(addr, d, off, len).map_err(|_| Fault::Source)
        }
        (Loc::Process(p, from, _), Loc::Process(q, to, _)) => {
            assert!(!scratch.is_empty(), "a copy between processes needs scratch memory");
            let mut done = 0;
            while done < len {
                let n = scratch.len().min(len - done);
                let bounce = &mut scratch[..n];
                p.read(from + done as u64, bounce).map_err(|_| Fault::Source)?;
                q.write(to + done as u64, bounce).map_err(|_| Fault::Destination)?;
                done += n;
            }
            Ok(())
        }
        (_, Loc::Null) => Ok(()),
        (Loc::Null, to) => {
            let mut done = 0;
            while done < len {
                let n = ZEROS.len().min(len - done);
                copy(Loc::Bytes(&ZEROS), to.after(done as u64).ok_or(Fault::Destination)?, n, scratch)?;
                done += n;
            }
            Ok(())
        }
        (_, Loc::Bytes(_)) => panic!("private bytes are no destination"),
    }
}

/// As [`transfer`] from one window, at an offset, to another one.
///
/// # Errors
/// The end whose range leaves its window.
#[inline]
pub fn copy_mapped((s, soff): (&Span, u64), (d, doff): (&Span, u64), len: usize) -> Result<(), Fault> {
    let from = s.at(range(s, soff, len).ok_or(Fault::Source)?, len);
    let to = d.at(range(d, doff, len).ok_or(Fault::Destination)?, len);
    // SAFETY: both ranges lie in live windows that the borrows keep.
    unsafe { copy_raw(to, from, len) };
    Ok(())
}

/// Copies bytes at `src` into private memory, once.
///
/// # Errors
/// [`Fault::Source`] if the memory is gone or there are fewer bytes, or [`Fault::SourceMoves`].
pub fn fetch(src: Place<'_>, dst: &mut [u8]) -> Result<(), Fault> {
    match src.of(dst.len()).ok_or(Fault::Source)? {
        Loc::Bytes(b) => dst.copy_from_slice(b.get(..dst.len()).ok_or(Fault::Source)?),
        Loc::Mapped(s, off) | Loc::Sparse { span: s, off, .. } => {
            s.read(range(s, off, dst.len()).ok_or(Fault::Source)?, dst)
        }
        Loc::Process(p, addr, bell) => {
            steady(bell, Fault::Source, || p.read(addr, dst).map_err(|_| Fault::Source))?;
        }
        Loc::Null => dst.fill(0),
        Loc::Away => return Err(Fault::SourceMoves),
    }
    Ok(())
}

#[inline]
fn range(s: &Span, off: u64, len: usize) -> Option<usize> {
    let end = off.checked_add(len as u64)?;
    (end <= s.len() as u64).then_some(off as usize)
}

/// Applies `f` to the aligned 64-bit word at `at` and returns what was there. On mapped memory this is
/// a CPU atomic; in another process it is atomic against other requests of this device only
/// (`IBV_ATOMIC_HCA`).
///
/// # Errors
/// [`Fault::Destination`] if the word cannot be reached as a whole or is not 8-byte aligned, or
/// [`Fault::DestinationMoves`].
///
/// # Panics
/// If `at` is [`Loc::Bytes`].
pub fn atomic_u64(at: Place<'_>, f: impl Fn(u64) -> u64) -> Result<u64, Fault> {
    match at.of(size_of::<u64>()).ok_or(Fault::Destination)? {
        Loc::Mapped(s, off) | Loc::Sparse { span: s, off, .. } => {
            let off = range(s, off, 8).ok_or(Fault::Destination)?;
            let p = s.at(off, 8);
            if p as usize % 8 != 0 {
                return Err(Fault::Destination);
            }
            // SAFETY: in a live window and aligned.
            let word = unsafe { AtomicU64::from_ptr(p.cast()) };
            let mut old = word.load(Ordering::Relaxed);
            while let Err(now) = word.compare_exchange_weak(old, f(old), Ordering::SeqCst, Ordering::Relaxed) {
                old = now;
            }
            Ok(old)
        }
        Loc::Process(p, addr, bell) => {
            if addr % 8 != 0 {
                return Err(Fault::Destination);
            }
            steady(bell, Fault::Destination, || {
                let mut b = [0; 8];
                p.read(addr, &mut b).map_err(|_| Fault::Destination)?;
                let old = u64::from_ne_bytes(b);
                p.write(addr, &f(old).to_ne_bytes()).map_err(|_| Fault::Destination)?;
                Ok(old)
            })
        }
        Loc::Null => Err(Fault::Destination),
        Loc::Away => Err(Fault::DestinationMoves),
        Loc::Bytes(_) => panic!("private bytes hold no shared word"),
    }
}

/// Eight bytes at any address. The compiler moves it by one load and one store where the processor can; it moves the
/// elements of an array one by one, if the access is volatile.
#[derive(Clone, Copy)]
#[repr(C, packed)]
struct Word(u64);

/// Copies `len` bytes so that the last [`TAIL`] of them become visible after the rest, in address order. The ranges may
/// overlap, as two MRs of one application may.
///
/// # Safety
/// Both ranges must be valid; either may be written by others meanwhile, so the bytes copied are any
/// mixture of what was there.
#[inline]
pub(crate) unsafe fn copy_raw(dst: *mut u8, src: *const u8, len: usize) {
    let body = len.saturating_sub(TAIL);
    if body > 0 {
        // SAFETY: by the contract; both allow overlap.
        unsafe {
            if body > MANY && guard::watches_holes() {
                holes::copy(src, dst, body)
            } else {
                std::ptr::copy(src, dst, body)
            }
        }
        fence(Ordering::Release);
    }
    let mut i = body;
    // SAFETY: by the contract, the addresses up to `len` lie in the ranges.
    let aligned = unsafe { (dst.add(i) as usize | src.add(i) as usize) % 8 == 0 };
    while len - i >= 8 {
        // SAFETY: i + 8 <= len, so both stay in range, and `u64` is only used for addresses that are multiples of 8.
        unsafe {
            if aligned {
                std::ptr::write_volatile(dst.add(i).cast::<u64>(), std::ptr::read_volatile(src.add(i).cast::<u64>()));
            } else {
                std::ptr::write_volatile(dst.add(i).cast::<Word>(), std::ptr::read_volatile(src.add(i).cast::<Word>()));
            }
        }
        i += 8;
    }
    fence(Ordering::Release);
    while i < len {
        // SAFETY: i < len.
        unsafe { std::ptr::write_volatile(dst.add(i), std::ptr::read_volatile(src.add(i))) };
        i += 1;
    }
    fence(Ordering::Release);
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// A place that ends only where its memory ends.
    fn whole(at: Loc<'_>) -> Place<'_> {
        Place::new(at, u64::MAX)
    }

    fn pattern(n: usize) -> Vec<u8> {
        (0..n).map(|i| (i * 7 + i / 251) as u8).collect()
    }

    #[test]
    fn every_length_around_the_tail_arrives() {
        for len in [0, 1, 7, 8, 9, 63, 64, 65, 71, 72, 73, 200, 4096, 10_001] {
            let (s, d) = (Span::anonymous(len + 5), Span::anonymous(len + 5));
            s.write(5, &pattern(len));
            transfer(whole(Loc::Mapped(&s, 5)), whole(Loc::Mapped(&d, 3)), len, &mut []).unwrap();
            let mut got = vec![0; len];
            d.read(3, &mut got);
            assert_eq!(got, pattern(len), "length {len}");
        }
    }

    #[test]
    fn own_process_memory_is_reached_by_address() {
        let me = ProcMem::of_self().unwrap();
        let src = pattern(9000);
        let mut dst = vec![0u8; 9000];
        let to = dst.as_mut_ptr() as u64;
        let mut scratch = vec![0; 1000];
        transfer(
            whole(Loc::Process(&me, src.as_ptr() as u64, None)),
            whole(Loc::Process(&me, to, None)),
            9000,
            &mut scratch,
        )
        .unwrap();
        assert_eq!(dst, src);
        let bad = transfer(whole(Loc::Process(&me, 8, None)), whole(Loc::Process(&me, to, None)), 8, &mut scratch);
        assert_eq!(bad, Err(Fault::Source));
        let bad = transfer(Place::bytes(&src), whole(Loc::Process(&me, 8, None)), 8, &mut scratch);
        assert_eq!(bad, Err(Fault::Destination));
    }

    #[test]
    fn nowhere_gives_zeros_and_takes_anything() {
        let d = Span::anonymous(10_000);
        d.write(0, &[7; 10_000]);
        transfer(whole(Loc::Null), whole(Loc::Mapped(&d, 1)), 9_998, &mut []).unwrap();
        let mut all = [1; 10_000];
        fetch(whole(Loc::Mapped(&d, 0)), &mut all).unwrap();
        assert!(all[0] == 7 && all[9_999] == 7 && all[1..9_999].iter().all(|&b| b == 0));
        transfer(whole(Loc::Mapped(&d, 0)), whole(Loc::Null), 10_000, &mut []).unwrap();
        let mut some = [1; 5];
        fetch(whole(Loc::Null), &mut some).unwrap();
        assert_eq!(some, [0; 5]);
        assert_eq!(transfer(whole(Loc::Null), whole(Loc::Mapped(&d, 9_000)), 4096, &mut []), Err(Fault::Destination));
        assert_eq!(atomic_u64(whole(Loc::Null), |v| v), Err(Fault::Destination));
    }

    #[test]
    fn ranges_outside_are_faults() {
        let s = Span::anonymous(16);
        let r = transfer(whole(Loc::Mapped(&s, 9)), whole(Loc::Mapped(&s, 0)), 8, &mut []);
        assert_eq!(r, Err(Fault::Source));
        let r = transfer(whole(Loc::Mapped(&s, 0)), whole(Loc::Mapped(&s, u64::MAX)), 8, &mut []);
        assert_eq!(r, Err(Fault::Destination));
        assert_eq!(atomic_u64(whole(Loc::Mapped(&s, 16)), |v| v), Err(Fault::Destination));
    }

    #[test]
    fn a_process_that_moves_pages_is_left_alone() {
        let me = ProcMem::of_self().unwrap();
        let page = Span::anonymous(4096 + 64);
        let skip = (64 - page.addr() as u64 % 64) % 64;
        let bell = Bell::new(page.sub(skip, 4096).unwrap()).unwrap();
        let (src, mut dst) = (pattern(100), vec![0u8; 100]);
        let word = Box::new(AtomicU64::new(3));
        let from = whole(Loc::Process(&me, src.as_ptr() as u64, Some(&bell)));
        let to = whole(Loc::Process(&me, dst.as_mut_ptr() as u64, Some(&bell)));
        let counter = whole(Loc::Process(&me, word.as_ptr() as u64, Some(&bell)));
        let mut private = [0; 100];
        bell.begin_move();
        assert!(!bell.is_copying());
        assert_eq!(transfer(from, to, 100, &mut [0; 64]), Err(Fault::SourceMoves));
        assert_eq!(transfer(Place::bytes(&src), to, 100, &mut []), Err(Fault::DestinationMoves));
        assert_eq!(fetch(from, &mut private), Err(Fault::SourceMoves));
        assert_eq!(atomic_u64(counter, |v| v + 1), Err(Fault::DestinationMoves));
        assert!(bell.is_awaited() && !bell.is_copying());
        assert_eq!((word.load(Ordering::SeqCst), &private), (3, &[0; 100]));
        bell.end_move();
        transfer(from, to, 100, &mut [0; 64]).unwrap();
        fetch(from, &mut private).unwrap();
        assert_eq!(atomic_u64(counter, |v| v + 1), Ok(3));
        assert!(!bell.is_awaited() && !bell.is_copying());
        assert_eq!((&dst, &private[..]), (&src, &src[..]));
        // Memory that is not there is a lasting fault, unless pages moved during the access.
        let gone = whole(Loc::Process(&me, 8, Some(&bell)));
        assert_eq!(fetch(gone, &mut private), Err(Fault::Source));
        let moved = steady(Some(&bell), Fault::Source, || {
            assert!(bell.is_copying());
            bell.begin_move();
            p_read(&me, 8)
        });
        assert_eq!(moved, Err(Fault::SourceMoves));
    }

    fn p_read(p: &ProcMem, addr: u64) -> Result<(), Fault> {
        p.read(addr, &mut [0; 8]).map_err(|_| Fault::Source)
    }

    #[test]
    fn atomics_return_the_old_value() {
        let s = Span::anonymous(16);
        assert_eq!(atomic_u64(whole(Loc::Mapped(&s, 8)), |v| v + 5), Ok(0));
        assert_eq!(atomic_u64(whole(Loc::Mapped(&s, 8)), |v| v + 5), Ok(5));
        let me = ProcMem::of_self().unwrap();
        let word = Box::new(AtomicU64::new(3));
        let at = whole(Loc::Process(&me, word.as_ptr() as u64, None));
        assert_eq!(atomic_u64(at, |v| v * 2), Ok(3));
        assert_eq!(word.load(Ordering::SeqCst), 6);
    }

    /// There is memory behind each place here. An access beyond the place is a fault that changes nothing.
    #[test]
    fn no_copy_and_no_operation_goes_beyond_its_place() {
        let s = Span::anonymous(64);
        s.write(0, &[0xa5; 64]);
        let me = ProcMem::of_self().unwrap();
        let mut own = [0xa5_u8; 64];
        let process = Loc::Process(&me, own.as_mut_ptr() as u64, None);
        for at in [Loc::Mapped(&s, 0), Loc::Sparse { span: &s, off: 0, waits: true }, process] {
            let short = Place::new(at, 7);
            assert_eq!(atomic_u64(short, |v| v + 1), Err(Fault::Destination));
            assert_eq!(fetch(short, &mut [0; 8]), Err(Fault::Source));
            assert_eq!(transfer(short, whole(Loc::Mapped(&s, 32)), 8, &mut []), Err(Fault::Source));
            assert_eq!(transfer(Place::bytes(&[1; 8]), short, 8, &mut []), Err(Fault::Destination));
            assert_eq!(transfer(Place::bytes(&[1; 7]), whole(at), 8, &mut []), Err(Fault::Source));
            assert_eq!(transfer(Place::bytes(&[0xa5; 8]), whole(at).up_to(7), 7, &mut []), Ok(()));
        }
        let mut all = [0; 64];
        s.read(0, &mut all);
        assert_eq!((all, own), ([0xa5; 64], [0xa5; 64]));
    }
}
