//! The stage of a session, as an allocator: memory where messages wait for their receiver.
//!
//! The driver decides in which order records come back, so it can leave the stage in any pattern. A request therefore
//! looks at a bounded part of it ([`LOOK_WORDS`]), and the next request goes on where that ended.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;

use unirdma_abi as abi;
use unirdma_mem::Span;
use zerocopy::IntoBytes;

use super::buffer_limits::{Room, Taken};
use super::ids::SessionId;

/// Number of old records that are checked for each new one: has the driver given them back?
const LOOKS: usize = 4;
/// The search for room begins at the start of the stage again once it has gone past twice the granules in use and this
/// many more. So the same memory, which is in the caches, is used again.
const NEAR: usize = 1024;
/// A search for room reads this number of words of 64 granules, and in addition twice the words that the record takes.
/// That costs little beside the copy of a long record, and 0.2 us for a short one.
const LOOK_WORDS: usize = 64;
/// Longest record, granules (8 MiB). A message of unknown length takes room for the length of its whole receive.
const MAX_RECORD: usize = (8 << 20) / abi::STAGE_GRANULE;
/// Most records at a time, and the number for which the list has room at first.
const MAX_RECORDS: usize = 32_768;
const FEW_RECORDS: usize = 256;
/// A message of this host with at least `LONG_BYTES` waits for room if the driver has given a record back within the
/// last `WAIT_NS`: that is faster than system calls.
const LONG_BYTES: u64 = 16 << 10;
const WAIT_NS: u64 = 5_000_000;
/// Such a message also waits while records of more than this number of bytes are in use, because the caches would not
/// hold more.
const MUCH_BYTES: usize = 1 << 20;

/// A bit for each granule.
pub(crate) struct Bits(Box<[u64]>);

impl Bits {
    fn new(granules: usize) -> Self {
        Bits(vec![0; granules.div_ceil(64)].into_boxed_slice())
    }

    fn has(&self, g: usize) -> bool {
        self.0[g / 64] >> (g % 64) & 1 != 0
    }

    /// Sets, or clears, `count` bits.
    fn set(&mut self, from: usize, count: usize, on: bool) {
        let mut g = from;
        while g < from + count {
            let n = (64 - g % 64).min(from + count - g);
            let bits = (u64::MAX >> (64 - n)) << (g % 64);
            let word = &mut self.0[g / 64];
            *word = if on { *word | bits } else { *word & !bits };
            g += n;
        }
    }

    /// The first bit from `from` on that is set.
    fn next(&self, from: usize) -> Option<usize> {
        let first = self.0.get(from / 64)? & u64::MAX << (from % 64);
        let words = std::iter::once(first).chain(self.0[from / 64 + 1..].iter().copied());
        let (i, word) = words.enumerate().find(|(_, word)| *word != 0)?;
        Some((from / 64 + i) * 64 + word.trailing_zeros() as usize)
    }
}

/// The stage of a session, in granules.
pub(crate) struct BounceMemory {
    pub span: Span,
    /// The granules in use.
    pub used: Bits,
    /// The last granule of each record.
    pub ends: Bits,
    pub granules: usize,
    /// Granules of all records.
    pub in_use: usize,
    /// Where the search for room begins.
    pub cursor: usize,
    /// First granules of records in use. A record that is checked and still in use goes to the end.
    pub given: VecDeque<u32>,
    /// When the driver was last seen to have given a record back.
    pub released_at: Option<u64>,
    /// The bytes of these tables on the account of the vRNIC.
    pub kept: Taken,
}

/// A record that a message is being put into.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Staged {
    /// The session that owns the stage.
    pub owner: SessionId,
    /// Offset of the record.
    pub record: u32,
    /// Offset of its data, and the room there.
    pub data: u64,
    pub room: u64,
}

impl BounceMemory {
    /// `None` unless the window is aligned and has at least two granules and at most [`abi::MAX_STAGE`] bytes.
    pub fn new(span: Span) -> Option<Self> {
        let granules = span.len() / abi::STAGE_GRANULE;
        let fits = granules >= 2 && span.len() as u64 <= abi::MAX_STAGE && span.addr() % 64 == 0;
        let [mut used, ends] = fits.then(|| [(); 2].map(|()| Bits::new(granules)))?;
        used.set(0, 1, true);
        let (given, kept) = (VecDeque::new(), Taken::default());
        Some(BounceMemory { span, used, ends, granules, in_use: 0, cursor: 1, given, released_at: None, kept })
    }

    /// Charges the memory of its tables to an account; false if there is no room.
    pub fn charge(&mut self, room: &Room) -> bool {
        self.kept.take(room, size_of_val(&*self.used.0) + size_of_val(&*self.ends.0))
    }

    pub fn span(&self) -> &Span {
        &self.span
    }

    /// The records in use: first granule and count.
    pub fn records(&self) -> impl Iterator<Item = (u32, u32)> {
        self.given.iter().map(|&g| (g, self.length(g as usize) as u32))
    }

    /// A record is in use from now on.
    pub fn add(&mut self, first: usize, count: usize) {
        self.used.set(first, count, true);
        self.ends.set(first + count - 1, 1, true);
        self.in_use += count;
        self.given.push_back(first as u32);
    }

    /// Shortens the record of `count` granules that begins with granule `first` to `keep` granules; 0 frees it.
    fn cut(&mut self, first: usize, count: usize, keep: usize) {
        self.used.set(first + keep, count - keep, false);
        self.ends.set(first + count - 1, 1, false);
        if keep > 0 {
            self.ends.set(first + keep - 1, 1, true);
        }
        self.in_use -= count - keep;
    }

    /// Granules of the record that begins with granule `first`.
    fn length(&self, first: usize) -> usize {
        self.ends.next(first).map_or(0, |end| end + 1 - first)
    }

    fn busy(&self, granule: u32) -> bool {
        self.span.load32(granule as usize * abi::STAGE_GRANULE, Ordering::Acquire) != 0
    }

    /// Frees records that the driver has given back.
    fn reclaim(&mut self, now: u64) {
        for _ in 0..LOOKS {
            let Some(g) = self.given.pop_front() else { break };
            if self.busy(g) {
                self.given.push_back(g);
            } else {
                self.cut(g as usize, self.length(g as usize), 0);
                self.released_at = Some(now);
            }
        }
        if self.given.is_empty() || self.cursor > 2 * self.in_use + NEAR {
            self.cursor = 1;
        }
    }

    /// Finds `n` free granules in succession, in the bounded part that one search reads. The next search goes on behind
    /// them, or where this one has ended.
    fn find(&mut self, n: usize) -> Option<usize> {
        let words = (LOOK_WORDS + n.div_ceil(64) * 2).min(2 * self.used.0.len());
        // The granules from `start` to `g` are free.
        let (mut start, mut g) = (self.cursor, self.cursor);
        for _ in 0..words {
            if g >= self.granules {
                (start, g) = (1, 1);
            }
            let left = (64 - g % 64).min(self.granules - g);
            let free = !(self.used.0[g / 64] >> (g % 64)) & u64::MAX >> (64 - left);
            let next = free.trailing_ones() as usize;
            let found = if g - start + next >= n { Some(start) } else { run_of(free, n).map(|at| g + at) };
            if let Some(at) = found {
                self.cursor = at + n;
                return Some(at);
            }
            if next < left {
                start = g + left - (free << (64 - left)).leading_ones() as usize;
            }
            g += left;
        }
        self.cursor = start;
        None
    }

    /// A record with these places and room for `bytes`.
    pub fn take(&mut self, now: u64, owner: SessionId, places: &[abi::StagePlace], bytes: u64) -> Option<Staged> {
        self.reclaim(now);
        if self.in_use * abi::STAGE_GRANULE > MUCH_BYTES && self.is_worth_waiting(now, bytes) {
            return None;
        }
        let head = abi::stage_head(places.len());
        let n = (usize::try_from(bytes).ok()?.checked_add(head)?).div_ceil(abi::STAGE_GRANULE);
        if n >= self.granules || n > MAX_RECORD || self.given.len() >= MAX_RECORDS {
            return None;
        }
        let at = self.find(n)?;
        if self.given.len() == self.given.capacity() {
            let more = self.given.len().max(FEW_RECORDS);
            if !self.kept.more(more * size_of::<u32>()) {
                return None;
            }
            self.given.reserve_exact(more);
        }
        self.add(at, n);
        let off = at * abi::STAGE_GRANULE;
        let record = abi::StageRecord { busy: 1, num_places: places.len() as u32, reserved: 0 };
        self.span.write(off, record.as_bytes());
        self.span.write(off + size_of::<abi::StageRecord>(), places.as_bytes());
        Some(Staged { owner, record: off as u32, data: (off + head) as u64, room: bytes })
    }

    /// True if a message of this length should wait for room.
    pub fn is_worth_waiting(&self, now: u64, bytes: u64) -> bool {
        let fits = bytes >= LONG_BYTES && bytes <= self.span.len() as u64 / 2;
        fits && self.released_at.is_some_and(|at| now.saturating_sub(at) < WAIT_NS)
    }

    /// A message was shorter than the room that was taken for it.
    pub fn trim(&mut self, s: &Staged, bytes: u64) {
        let first = s.record as usize / abi::STAGE_GRANULE;
        let keep = (s.data - u64::from(s.record) + bytes).div_ceil(abi::STAGE_GRANULE as u64) as usize;
        // A driver that gives a record back before its message is complete may have another record in its place.
        if !self.used.has(first) || self.used.has(first - 1) && first > 1 && !self.ends.has(first - 1) {
            return;
        }
        let had = self.length(first);
        if keep < had {
            self.cut(first, had, keep);
            if self.cursor == first + had {
                self.cursor = first + keep;
            }
        }
    }

    /// Gives a record back that no completion names.
    pub fn give_back(&self, record: u32) {
        self.span.store32(record as usize, 0, Ordering::Release);
    }
}

/// The position of the first `n` set bits in succession, if there are any.
fn run_of(mut bits: u64, n: usize) -> Option<usize> {
    let mut len = 1;
    while len < n.min(64) && bits != 0 {
        let more = len.min(n - len);
        bits &= bits >> more;
        len += more;
    }
    (n <= 64 && bits != 0).then(|| bits.trailing_zeros() as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stage(bytes: usize) -> BounceMemory {
        let s = Span::anonymous(bytes + 64);
        let skip = (64 - s.addr() as u64 % 64) % 64;
        BounceMemory::new(s.sub(skip, bytes as u64).unwrap()).unwrap()
    }

    fn free(s: &BounceMemory) -> usize {
        (0..s.granules).filter(|&g| !s.used.has(g)).count()
    }

    #[test]
    fn records_do_not_overlap_and_come_back() {
        let mut s = stage(64 << 10);
        let all = free(&s);
        let place = abi::StagePlace { addr: 5, length: 6, lkey: 7 };
        let mut rng = crate::random::Rng::new(7);
        let mut live: Vec<Staged> = Vec::new();
        let mut full = 0;
        for round in 0..20_000u64 {
            let bytes = rng.next_u64() % 3000;
            match s.take(round, SessionId::from_number(1), &[place], bytes) {
                Some(r) => {
                    let (from, to) = (u64::from(r.record), r.data + r.room);
                    assert!(from >= 128 && to <= 64 << 10);
                    for o in &live {
                        assert!(to <= o.record.into() || from >= o.data + o.room, "round {round}");
                    }
                    let mut r = r;
                    if rng.next_u64() % 4 == 0 {
                        r.room /= 2;
                        s.trim(&r, r.room);
                    }
                    live.push(r);
                }
                None => full += 1,
            }
            while live.len() > 30 || !live.is_empty() && rng.next_u64() % 2 == 0 {
                let r = live.swap_remove(rng.next_u64() as usize % live.len());
                s.give_back(r.record);
            }
        }
        assert!(full < 2000, "{full} found no room");
        live.iter().for_each(|r| s.give_back(r.record));
        (0..20).for_each(|_| s.reclaim(0));
        assert_eq!((free(&s), s.given.len(), s.cursor), (all, 0, 1));
    }

    #[test]
    fn one_that_is_kept_does_not_stop_the_others() {
        let mut s = stage(8 << 10);
        let me = SessionId::from_number(1);
        let kept = s.take(0, me, &[], 100).unwrap();
        for _ in 0..1000 {
            let r = s.take(0, me, &[], 2000).unwrap();
            s.give_back(r.record);
        }
        assert!(s.busy(kept.record / 128));
        assert!(s.take(0, me, &[], 8 << 10).is_none() && s.take(0, me, &[], u64::MAX).is_none());
    }

    /// The driver has given back every second granule, and keeps the others.
    #[test]
    fn a_search_is_bounded_and_the_next_one_goes_on() {
        let mut s = stage(4 << 20);
        let me = SessionId::from_number(1);
        let busy = 15_000;
        (0..busy).for_each(|i| s.add(1 + 2 * i, 1));
        (0..busy).for_each(|i| s.span.store32((1 + 2 * i) * 128, 1, Ordering::Relaxed));
        let most = 64 * (LOOK_WORDS + 2);
        for searches in 1.. {
            let before = s.cursor;
            let taken = s.take(0, me, &[], 150);
            if let Some(r) = taken {
                // Behind the granules that are kept: between two of them there is no room of this length.
                assert_eq!((r.record as usize / 128, searches), (2 * busy, (2 * busy).div_ceil(most)));
                break;
            }
            assert!(s.cursor > before && s.cursor <= before + most, "{before} to {}", s.cursor);
        }
        let holes = (0..10).map(|_| s.take(0, me, &[], 64).is_some()).collect::<Vec<_>>();
        assert_eq!(holes, [true; 10]);
    }

    /// The first of those that a program could see to be free, if any is, wherever the search begins.
    #[test]
    fn a_small_stage_is_searched_whole() {
        let mut rng = crate::random::Rng::new(3);
        for round in 0..2000 {
            let granules = 2 + rng.next_u64() as usize % 300;
            let mut s = stage(granules * abi::STAGE_GRANULE);
            let dense = rng.next_u64() % 5;
            for g in 1..granules {
                if rng.next_u64() % 5 < dense {
                    s.used.set(g, 1, true);
                }
            }
            s.cursor = 1 + rng.next_u64() as usize % granules;
            let n = 1 + rng.next_u64() as usize % [3, 70, 200][round % 3];
            let is_free = |at: usize, s: &BounceMemory| at + n <= granules && (at..at + n).all(|g| !s.used.has(g));
            let there = (1..granules).any(|at| is_free(at, &s));
            match s.find(n) {
                Some(at) => assert!(at > 0 && is_free(at, &s), "round {round}: {n} at {at}"),
                None => assert!(!there, "round {round}: {n} of {granules}"),
            }
            assert!((1..=granules).contains(&s.cursor));
        }
    }

    /// A driver that gives records back while messages are being put into them harms itself only.
    #[test]
    fn records_that_come_back_too_early() {
        let mut s = stage(64 << 10);
        let mut rng = crate::random::Rng::new(5);
        let mut live: Vec<Staged> = Vec::new();
        for round in 0..20_000 {
            if let Some(r) = s.take(0, SessionId::from_number(1), &[], rng.next_u64() % 4000) {
                s.give_back(r.record);
                live.push(r);
            }
            if live.len() > 20 {
                let r = live.swap_remove(rng.next_u64() as usize % live.len());
                s.trim(&r, rng.next_u64() % (r.room + 1));
            }
            assert_eq!(s.in_use, s.granules - 1 - free(&s), "round {round}");
            assert_eq!(s.in_use, s.records().map(|r| r.1 as usize).sum::<usize>(), "round {round}");
        }
    }

    #[test]
    fn records_are_bounded_in_length_and_number() {
        let mut s = stage(16 << 20);
        let me = SessionId::from_number(1);
        assert!(s.take(0, me, &[], 8 << 20).is_none());
        let r = s.take(0, me, &[], 7 << 20).unwrap();
        s.give_back(r.record);
        let taken = (0..2 * MAX_RECORDS).filter(|_| s.take(0, me, &[], 1).is_some()).count();
        assert_eq!(taken, MAX_RECORDS);
    }

    #[test]
    fn windows_that_cannot_be_a_stage() {
        let s = Span::anonymous(4096);
        assert!(BounceMemory::new(s.sub(0, 0).unwrap()).is_none());
        assert!(BounceMemory::new(s.sub(0, 128).unwrap()).is_none());
        assert!(BounceMemory::new(s.sub(1, 4000).unwrap()).is_none());
    }
}
