//! Memory of the way *copy* without system calls: the calling thread copies a send's data when the send is posted, and
//! a receive's data when its completion is polled.
//!
//! A send's data goes into the WQE if there is room, else into a ring of the QP ([`SendRing`]) that the device can map.
//! The device puts a message that arrives for such memory into the stage, which is shared memory of the context, with
//! the addresses to which the message belongs. If there is no room, the device copies the data, as it always does for
//! READs, atomics and the passive side of a WRITE.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};

use unirdma_abi as abi;
use unirdma_abi::Command;
use unirdma_formats::{ByNumber, WrOpcode, send_flags};
use unirdma_mem::{QpRings, Span};
use zerocopy::IntoBytes;

use crate::arena::Block;
use crate::context::Context;
use crate::lock;
use crate::memory::Served;

/// Size of the stage, bytes. Its pages take memory on first use.
const STAGE_BYTES: usize = 8 << 20;
/// Messages for which a send ring has room, within the bounds below.
const MESSAGES: usize = 8;
/// Smallest send ring, bytes.
const SMALLEST_RING: usize = 64 << 10;
/// Largest send ring, bytes, unless one message is longer. A ring that does not fit into the caches is slower.
const USUAL_RING: usize = 2 << 20;
/// Longest message that goes through a send ring, bytes.
const LARGEST_RING: usize = 4 << 20;
/// A post that waits for room gives up if the device retires no request within this time.
const PATIENCE: Duration = Duration::from_millis(5);

/// An MR that was registered with the way *copy*.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Known {
    pub pdn: u32,
    /// First byte in this process, address by which WQEs name it, and length.
    pub addr: u64,
    pub iova: u64,
    pub len: u64,
}

impl Known {
    /// The address in this process of `[addr, addr + len)` of WQEs of PD `pdn`, if it lies in this MR.
    fn place(&self, pdn: u32, addr: u64, len: u64) -> Option<u64> {
        let off = addr.checked_sub(self.iova)?;
        (self.pdn == pdn && off <= self.len && len <= self.len - off).then(|| self.addr + off)
    }

    fn holds(&self, addr: u64, len: u64) -> bool {
        addr.checked_sub(self.addr).is_some_and(|off| off <= self.len && len <= self.len - off)
    }
}

/// An MR and its counters.
struct Entry {
    mr: Known,
    /// True if data is taken from it. False for an MR that is mapped by now: only messages that are already in the
    /// stage are placed into it.
    is_taken: bool,
    /// Accesses that took data from it or placed data into it, and their bytes.
    accesses: AtomicU64,
    bytes: AtomicU64,
}

impl Entry {
    fn new(mr: Known, is_taken: bool) -> Self {
        Entry { mr, is_taken, accesses: AtomicU64::new(0), bytes: AtomicU64::new(0) }
    }

    fn count(&self, bytes: u64) {
        self.accesses.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// Entries by key.
type Table = ByNumber<Entry>;

/// A context's MRs of the way *copy*, and its stage.
#[derive(Default)]
pub(crate) struct Bounce {
    known: RwLock<Table>,
    /// Number of MRs from which data is taken.
    copied: AtomicU32,
    stage: OnceLock<Span>,
    /// True once the stage was made, or making it has failed.
    made: Mutex<bool>,
}

impl Bounce {
    fn read(&self) -> RwLockReadGuard<'_, Table> {
        self.known.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds, replaces or removes the entry of a key.
    fn set(&self, table: &mut Table, key: u32, to: Option<Entry>) -> Option<Entry> {
        let is_taken = to.as_ref().is_some_and(|e| e.is_taken);
        let old = match to {
            Some(entry) => table.insert(key, entry),
            None => table.remove(&key),
        };
        match (old.as_ref().is_some_and(|e| e.is_taken), is_taken) {
            (false, true) => _ = self.copied.fetch_add(1, Ordering::Relaxed),
            (true, false) => _ = self.copied.fetch_sub(1, Ordering::Relaxed),
            _ => {}
        }
        old
    }

    fn write(&self) -> RwLockWriteGuard<'_, Table> {
        self.known.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds an MR of the way *copy* under its key.
    pub fn add(&self, key: u32, mr: Known) {
        self.set(&mut self.write(), key, Some(Entry::new(mr, true)));
    }

    /// The MR with key `key` has become the MR that had key `by`, which is gone.
    pub fn replace(&self, key: u32, by: u32, mr: Known) {
        let table = &mut *self.write();
        match self.set(table, by, None) {
            Some(new) => _ = self.set(table, key, Some(new)),
            // It is mapped from now on. Messages that are in the stage already are still placed.
            None if table.contains_key(&key) => _ = self.set(table, key, Some(Entry::new(mr, false))),
            None => {}
        }
    }

    /// The counters of the MR with this key.
    pub fn served(&self, key: u32) -> Served {
        let counted =
            |e: &Entry| Served { accesses: e.accesses.load(Ordering::Relaxed), bytes: e.bytes.load(Ordering::Relaxed) };
        self.read().get(&key).map(counted).unwrap_or_default()
    }

    /// Removes a deregistered MR: its program may use the memory for something else.
    pub fn remove(&self, ctx: &Context, key: u32) {
        // The lock may have been held by another thread when this child was forked.
        if !ctx.is_inherited() {
            self.set(&mut self.write(), key, None);
        }
    }

    /// True if there are MRs whose data is taken when a send is posted.
    #[inline]
    pub fn is_used(&self) -> bool {
        self.copied.load(Ordering::Relaxed) != 0
    }
}

impl Context {
    /// Gives the device a stage, once. Without a stage the device copies.
    pub(crate) fn offer_stage(&self) {
        let mut made = lock(&self.bounce.made);
        if std::mem::replace(&mut *made, true) {
            return;
        }
        let Ok(block) = self.alloc(STAGE_BYTES) else { return };
        let req = abi::SetStageReq { addr: block.bus, length: STAGE_BYTES as u64 };
        match self.command_void(Command::SetStage, &req) {
            Ok(()) => drop(self.bounce.stage.set(block.span)),
            Err(_) => self.free(block),
        }
    }

    /// Places the message of a completion that names a record of the stage.
    #[cold]
    #[inline(never)]
    pub(crate) fn place(&self, cqe: &abi::Cqe) {
        let Some(record) = Record::of(self, cqe) else { return };
        // Held until the data is placed, so that nothing is placed into an MR that is deregistered.
        let known = self.bounce.read();
        let (mut off, mut left) = (record.data, cqe.byte_len as usize);
        for i in 0..record.places {
            let p = record.place(i);
            let n = left.min(p.length as usize);
            let lives = known.get(&p.lkey).filter(|e| e.mr.holds(p.addr, n as u64));
            if let Some(entry) = lives.filter(|_| off + n <= record.stage.len()) {
                entry.count(n as u64);
                // SAFETY: the program has registered this memory, and has named it in the receive of this message.
                unsafe { record.stage.copy_to(off, p.addr as *mut u8, n) };
            }
            (off, left) = (off + n, left - n);
        }
        drop(known);
        record.give_back();
    }

    /// Gives back the record of a completion that is not delivered.
    pub(crate) fn discard(&self, cqe: &abi::Cqe) {
        if cqe.staged != 0
            && let Some(record) = Record::of(self, cqe)
        {
            record.give_back();
        }
    }
}

/// A record of the stage.
struct Record<'a> {
    stage: &'a Span,
    at: usize,
    places: usize,
    data: usize,
}

impl<'a> Record<'a> {
    fn of(ctx: &'a Context, cqe: &abi::Cqe) -> Option<Self> {
        let stage = ctx.bounce.stage.get().filter(|_| !ctx.is_inherited())?;
        let at = cqe.staged as usize;
        if at % abi::STAGE_GRANULE != 0 || at + abi::STAGE_GRANULE > stage.len() {
            return None;
        }
        let head: abi::StageRecord = stage.read_obj(at);
        let places = head.num_places as usize;
        let data = at + abi::stage_head(places.min(abi::MAX_SGE as usize));
        (places <= abi::MAX_SGE as usize && data <= stage.len()).then_some(Record { stage, at, places, data })
    }

    fn place(&self, i: usize) -> abi::StagePlace {
        self.stage.read_obj(self.at + size_of::<abi::StageRecord>() + i * size_of::<abi::StagePlace>())
    }

    fn give_back(&self) {
        self.stage.store32(self.at, 0, Ordering::Release);
    }
}

/// A ring for the data of a QP's sends, in the order of the WQEs. Data stays until the device has sent it.
#[derive(Default)]
pub(crate) struct SendRing {
    block: Option<Block>,
    size: usize,
    /// Offset of the next data.
    head: usize,
    /// WQEs with data here: index, and offset of the data.
    used: VecDeque<(u32, usize)>,
    /// True if the device retired nothing while a post waited.
    stuck: bool,
}

impl SendRing {
    /// Frees the room of WQEs with an index below `retired`, which the device has retired.
    fn reclaim(&mut self, retired: u32) {
        while self.used.front().is_some_and(|u| retired.wrapping_sub(u.0.wrapping_add(1)) as i32 >= 0) {
            self.used.pop_front();
            self.stuck = false;
        }
    }

    /// Frees the room of the WQEs from index `from` on, which were never published.
    pub fn forget_from(&mut self, from: u32) {
        while self.used.back().is_some_and(|u| u.0.wrapping_sub(from) as i32 >= 0) {
            if let Some((_, start)) = self.used.pop_back() {
                self.head = start;
            }
        }
    }

    /// Frees all room, because the QP has no WQEs any more.
    pub fn clear(&mut self) {
        self.used.clear();
    }

    /// Frees the memory of the ring.
    pub fn free(&mut self, ctx: &Context) {
        self.clear();
        self.size = 0;
        if let Some(b) = self.block.take() {
            ctx.free(b);
        }
    }

    /// Offset of `n` free bytes, if there are any now.
    fn find(&mut self, n: usize) -> Option<usize> {
        let Some(&(_, tail)) = self.used.front() else {
            // An empty ring begins at 0 again, because bytes that were used before are still in the caches.
            return (n <= self.size).then_some(0);
        };
        if self.head <= tail {
            return (tail - self.head > n).then_some(self.head);
        }
        if self.size - self.head >= n { Some(self.head) } else { (tail > n).then_some(0) }
    }

    /// Enlarges the ring for messages of `n` bytes, if it is empty.
    fn grow(&mut self, ctx: &Context, n: usize) {
        let most = USUAL_RING.max(n.next_power_of_two());
        let wanted = n.saturating_mul(MESSAGES).next_power_of_two().clamp(SMALLEST_RING, most);
        if wanted <= self.size || !self.used.is_empty() {
            return;
        }
        self.free(ctx);
        if let Ok(b) = ctx.alloc(wanted) {
            self.size = wanted;
            self.block = Some(b);
        }
    }

    /// Takes `n` bytes for WQE `index`. Calls `publish` before it waits for room, and does not wait if `publish`
    /// returns false.
    fn take(
        &mut self,
        ctx: &Context,
        rings: &QpRings,
        index: u32,
        n: usize,
        publish: impl FnOnce() -> bool,
    ) -> Option<usize> {
        if n > LARGEST_RING {
            return None;
        }
        self.reclaim(rings.sq_retired());
        self.grow(ctx, n);
        if n > self.size {
            return None;
        }
        let mut at = self.find(n);
        if at.is_none() && !self.stuck && publish() {
            at = self.wait(ctx, rings, n);
        }
        let at = at?;
        self.head = at + n;
        self.used.push_back((index, at));
        Some(at)
    }

    #[cold]
    fn wait(&mut self, ctx: &Context, rings: &QpRings, n: usize) -> Option<usize> {
        let (mut since, mut seen) = (Instant::now(), None);
        loop {
            ctx.relax();
            let retired = rings.sq_retired();
            if seen != Some(retired) {
                self.reclaim(retired);
                if let Some(at) = self.find(n) {
                    return Some(at);
                }
                (since, seen) = (Instant::now(), Some(retired));
            } else if since.elapsed() > PATIENCE || ctx.is_dead() {
                self.stuck = true;
                return None;
            }
        }
    }
}

/// A QP's send queue, for taking the data of one request.
pub(crate) struct BounceReader<'a> {
    pub ctx: &'a Context,
    pub pdn: u32,
    pub max_inline: u32,
    pub rings: &'a QpRings,
    pub ring: &'a mut SendRing,
    /// Index of the WQE that the data is for.
    pub index: u32,
}

impl BounceReader<'_> {
    /// Takes the data of a request into its WQE or into the ring, if its whole gather list lies in MRs of the way
    /// *copy*. Returns false if the data stays where it is; then the device reads it.
    #[cold]
    #[inline(never)]
    pub fn take(self, head: &mut abi::SqWqe, list: &[abi::Sge], publish: impl FnOnce() -> bool) -> bool {
        use WrOpcode::{Send, SendImm, SendInv, Write, WriteImm};
        let Some(op) = WrOpcode::from_raw(head.opcode.into()) else { return false };
        let total: u64 = list.iter().map(|s| u64::from(s.length)).sum();
        // With a fence, the data may be the result of an earlier READ.
        let now = head.send_flags & send_flags::FENCE == 0 && matches!(op, Send | SendImm | SendInv | Write | WriteImm);
        if !now || total == 0 || list.len() > abi::MAX_SGE as usize {
            return false;
        }
        let mut pieces = [(0, 0); abi::MAX_SGE as usize];
        {
            let known = self.ctx.bounce.read();
            for (piece, s) in pieces.iter_mut().zip(list).filter(|p| p.1.length > 0) {
                let Some(entry) = known.get(&s.lkey).filter(|e| e.is_taken) else { return false };
                let Some(addr) = entry.mr.place(self.pdn, s.addr, s.length.into()) else { return false };
                entry.count(s.length.into());
                *piece = (addr, s.length as usize);
            }
        }
        let pieces = pieces[..list.len()].iter().filter(|p| p.1 > 0).map(|p| (p.0 as *const u8, p.1));
        let i = self.index;
        if total <= op.inline_bytes(self.max_inline).into() {
            let mut off = abi::SQ_DATA;
            for (from, n) in pieces {
                // SAFETY: the program has registered this memory, and asks for it to be sent.
                unsafe { self.rings.sq_put_from(i, off, from, n) };
                off += n;
            }
            head.send_flags |= send_flags::INLINE;
            head.inline_len = total as u16;
            return true;
        }
        let n = usize::try_from(total).unwrap_or(usize::MAX).saturating_add(63) / 64 * 64;
        let Some(at) = self.ring.take(self.ctx, self.rings, i, n, publish) else { return false };
        let Some(block) = &self.ring.block else { return false };
        let mut off = at;
        for (from, n) in pieces {
            // SAFETY: as above.
            unsafe { block.span.copy_from(off, from, n) };
            off += n;
        }
        let sge = abi::Sge { addr: block.bus + at as u64, length: total as u32, lkey: 0 };
        self.rings.sq_put(i, abi::SQ_DATA, sge.as_bytes());
        head.send_flags |= send_flags::STAGED;
        head.num_sge = 1;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_gives_out_what_is_free_and_nothing_else() {
        let mut ring = SendRing { size: 1024, ..SendRing::default() };
        let mut live: VecDeque<(u32, usize, usize)> = VecDeque::new();
        let (mut index, mut n, mut full) = (u32::MAX - 50, 64, 0);
        for round in 0..10_000u32 {
            n = (n * 7 + 64) % 704 / 64 * 64 + 64;
            match ring.find(n) {
                Some(at) => {
                    assert!(at + n <= 1024);
                    assert!(live.iter().all(|o| at + n <= o.1 || at >= o.1 + o.2), "round {round}");
                    ring.head = at + n;
                    ring.used.push_back((index, at));
                    live.push_back((index, at, n));
                    index = index.wrapping_add(1);
                }
                None => {
                    full += 1;
                    assert!(!live.is_empty());
                    let (done, ..) = live.pop_front().unwrap();
                    ring.reclaim(done.wrapping_add(1));
                }
            }
        }
        assert!(full > 1000 && full < 9000);
        // WQEs that were not published leave nothing behind.
        let (head, first) = (ring.head, index);
        ring.reclaim(index);
        live.clear();
        let at = ring.find(64).unwrap();
        (ring.head, _) = (at + 64, ring.used.push_back((index, at)));
        ring.forget_from(first);
        assert!(ring.used.is_empty() && ring.head == at && head <= 1024);
    }

    #[test]
    fn only_the_right_part_of_the_right_memory_is_taken() {
        let mr = Known { pdn: 3, addr: 0x1000, iova: 0x10, len: 100 };
        assert_eq!(mr.place(3, 0x10, 100), Some(0x1000));
        assert_eq!(mr.place(3, 0x20, 1), Some(0x1010));
        assert_eq!(mr.place(3, 0x74, 0), Some(0x1064));
        for (pdn, addr, len) in [(4, 0x10, 1), (3, 0xf, 1), (3, 0x11, 100), (3, 0x75, 0), (3, 0x20, u64::MAX)] {
            assert_eq!(mr.place(pdn, addr, len), None, "{pdn} {addr} {len}");
        }
        assert!(mr.holds(0x1000, 100) && !mr.holds(0xfff, 1) && !mr.holds(0x1001, 100));
    }

    #[test]
    fn an_mr_that_is_mapped_by_now_still_has_its_messages_placed() {
        let b = Bounce::default();
        let mr = |addr| Known { pdn: 1, addr, iova: addr, len: 10 };
        assert!(!b.is_used());
        b.add(5, mr(100));
        b.add(6, mr(200));
        assert!(b.is_used());
        // Replaced by an MR of the same way at another place.
        b.replace(5, 6, mr(200));
        assert!(b.read().get(&5).is_some_and(|e| e.mr.addr == 200 && e.is_taken) && !b.read().contains_key(&6));
        // Replaced by an MR of another way.
        b.replace(5, 7, mr(200));
        assert!(b.read().get(&5).is_some_and(|e| !e.is_taken) && !b.is_used());
        // An MR that never was of this way.
        b.replace(9, 8, mr(1));
        assert!(!b.read().contains_key(&9));
        b.set(&mut b.write(), 5, None);
        assert!(!b.read().contains_key(&5) && !b.is_used());
    }
}
