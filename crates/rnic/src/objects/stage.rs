//! The stage of a session, as an allocator: memory where messages wait for their receiver.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;

use unirdma_abi as abi;
use unirdma_mem::Span;
use zerocopy::IntoBytes;

use super::ids::SessionId;

/// For each new record, so many old ones are looked at, whether the driver has given them back.
const LOOKS: usize = 4;
/// The search for room begins at the start of the stage again once it has gone past twice the granules in use and this many
/// more. So the same memory, which is in the caches, is used again.
const NEAR: usize = 1024;
/// A message of this host that is at least so long waits for room while the driver gives records back at least so often, ns:
/// it is there sooner than by system calls.
const LONG_BYTES: u64 = 16 << 10;
const WAIT_NS: u64 = 5_000_000;
/// Such a message also waits while records of more than so many bytes are in use: the caches would not hold more.
const MUCH_BYTES: usize = 1 << 20;

/// The stage of a session, in granules.
pub(crate) struct Stage {
    pub span: Span,
    /// A bit for each granule in use.
    pub used: Box<[u64]>,
    pub granules: usize,
    /// Granules of all records.
    pub in_use: usize,
    /// Where the search for room begins.
    pub cursor: usize,
    /// Records in use: first granule and count. One that is looked at and still in use goes to the end.
    pub given: VecDeque<(u32, u32)>,
    /// When the driver was last seen to have given one back.
    pub released_at: Option<u64>,
}

/// A record that a message is being put into.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Staged {
    /// Whose stage it is in.
    pub owner: SessionId,
    /// Offset of the record.
    pub record: u32,
    /// Offset of its data, and the room there.
    pub data: u64,
    pub room: u64,
}

impl Stage {
    /// `None` unless the window is aligned and has at least two granules and at most [`abi::MAX_STAGE`] bytes.
    pub fn new(span: Span) -> Option<Self> {
        let granules = span.len() / abi::STAGE_GRANULE;
        let fits = granules >= 2 && span.len() as u64 <= abi::MAX_STAGE && span.addr() % 64 == 0;
        let mut used = vec![0; granules.div_ceil(64)].into_boxed_slice();
        *used.first_mut()? = 1;
        fits.then(|| Stage { span, used, granules, in_use: 0, cursor: 1, given: VecDeque::new(), released_at: None })
    }

    pub fn span(&self) -> &Span {
        &self.span
    }

    fn is_used(&self, g: usize) -> bool {
        self.used[g / 64] >> (g % 64) & 1 != 0
    }

    pub fn mark(&mut self, from: usize, count: usize, used: bool) {
        self.in_use = if used { self.in_use + count } else { self.in_use - count };
        let mut g = from;
        while g < from + count {
            let n = (64 - g % 64).min(from + count - g);
            let bits = (u64::MAX >> (64 - n)) << (g % 64);
            let word = &mut self.used[g / 64];
            *word = if used { *word | bits } else { *word & !bits };
            g += n;
        }
    }

    fn busy(&self, granule: u32) -> bool {
        self.span.load32(granule as usize * abi::STAGE_GRANULE, Ordering::Acquire) != 0
    }

    /// Takes back what the driver has given back.
    fn reclaim(&mut self, now: u64) {
        for _ in 0..LOOKS {
            let Some((g, n)) = self.given.pop_front() else { break };
            if self.busy(g) {
                self.given.push_back((g, n));
            } else {
                self.mark(g as usize, n as usize, false);
                self.released_at = Some(now);
            }
        }
        if self.given.is_empty() || self.cursor > 2 * self.in_use + NEAR {
            self.cursor = 1;
        }
    }

    /// `n` free granules between two others.
    fn find(&self, from: usize, to: usize, n: usize) -> Option<usize> {
        let (mut start, mut g) = (from, from);
        while g < to {
            if g % 64 == 0 && g + 64 <= to {
                match self.used[g / 64] {
                    u64::MAX => {
                        g += 64;
                        start = g;
                        continue;
                    }
                    0 if g + 64 - start < n => {
                        g += 64;
                        continue;
                    }
                    _ => {}
                }
            }
            g += 1;
            if self.is_used(g - 1) {
                start = g;
            } else if g - start == n {
                return Some(start);
            }
        }
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
        if n >= self.granules {
            return None;
        }
        let at = self.find(self.cursor, self.granules, n).or_else(|| self.find(1, self.granules, n))?;
        self.mark(at, n, true);
        self.cursor = at + n;
        self.given.push_back((at as u32, n as u32));
        let off = at * abi::STAGE_GRANULE;
        let record = abi::StageRecord { busy: 1, num_places: places.len() as u32, reserved: 0 };
        self.span.write(off, record.as_bytes());
        self.span.write(off + size_of::<abi::StageRecord>(), places.as_bytes());
        Some(Staged { owner, record: off as u32, data: (off + head) as u64, room: bytes })
    }

    /// True if a message of this length had better wait for room.
    pub fn is_worth_waiting(&self, now: u64, bytes: u64) -> bool {
        let fits = bytes >= LONG_BYTES && bytes <= self.span.len() as u64 / 2;
        fits && self.released_at.is_some_and(|at| now.saturating_sub(at) < WAIT_NS)
    }

    /// A message was shorter than the room that was taken for it.
    pub fn trim(&mut self, s: &Staged, bytes: u64) {
        let first = s.record / abi::STAGE_GRANULE as u32;
        let keep = (s.data - u64::from(s.record) + bytes).div_ceil(abi::STAGE_GRANULE as u64) as u32;
        let Some(i) = self.given.iter().rposition(|r| r.0 == first) else { return };
        let had = self.given[i].1;
        if keep < had {
            self.given[i].1 = keep;
            self.mark((first + keep) as usize, (had - keep) as usize, false);
            if self.cursor == (first + had) as usize {
                self.cursor = (first + keep) as usize;
            }
        }
    }

    /// Gives a record back that no completion names.
    pub fn give_back(&self, record: u32) {
        self.span.store32(record as usize, 0, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stage(bytes: usize) -> Stage {
        let s = Span::anonymous(bytes + 64);
        let skip = (64 - s.addr() as u64 % 64) % 64;
        Stage::new(s.sub(skip, bytes as u64).unwrap()).unwrap()
    }

    fn free(s: &Stage) -> usize {
        (0..s.granules).filter(|&g| !s.is_used(g)).count()
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

    #[test]
    fn windows_that_cannot_be_a_stage() {
        let s = Span::anonymous(4096);
        assert!(Stage::new(s.sub(0, 0).unwrap()).is_none());
        assert!(Stage::new(s.sub(0, 128).unwrap()).is_none());
        assert!(Stage::new(s.sub(1, 4000).unwrap()).is_none());
    }
}
