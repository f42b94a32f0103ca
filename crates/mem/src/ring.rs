//! Rings and the doorbell over a [`Span`], with both sides' halves of each.
//!
//! | word | owner | order |
//! |---|---|---|
//! | `sq_prod`, `rq_prod` | driver | WQE bytes, then a release store; the device acquires |
//! | `sq_cons`, `rq_cons` | device | after the WQE was copied or retired, release; the driver acquires |
//! | `rq_notify` | device | store, full fence, then it looks at `rq_prod` again |
//! | `Cqe::valid` | device | the other 60 bytes, then a release store; the driver acquires |
//! | `CqCtrl::cons` | driver | after the CQE was copied, release |
//! | `CqCtrl::arm` | driver | store, full fence, then it polls once more |
//! | doorbell words | both | atomic or / swap; see [`crate::protocol`] |
//! | `copying` | device | store, full fence, then it looks at `moving`; 0 again with release after the copy |
//! | `away` | driver | release; it waits until `away_seen` is the same |
//! | `away_seen` | device | release, when it has finished what it was at |
//! | `moving` | driver | store, full fence, then it waits for `copying` |
//!
//! Pointers are resolved once, when a ring is set up. Each index read from the other side is checked
//! here: a producer that runs ahead by more than the ring is a [`RingError`].

use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};

use unirdma_abi as abi;
use zerocopy::IntoBytes;

use crate::Span;
use crate::protocol::{self, BellWords, Fence, Word32, Word64};

struct W<'a>(&'a Span, usize);

impl Word32 for W<'_> {
    fn load(&self) -> u32 {
        self.0.load32(self.1, Ordering::Acquire)
    }
    fn store(&self, v: u32) {
        self.0.store32(self.1, v, Ordering::Release);
    }
}

impl Word64 for W<'_> {
    fn peek(&self) -> u64 {
        self.0.load64(self.1, Ordering::Relaxed)
    }
    fn or(&self, v: u64) -> u64 {
        self.0.or64(self.1, v, Ordering::Release)
    }
    fn take(&self) -> u64 {
        self.0.swap64(self.1, 0, Ordering::Acquire)
    }
}

struct Full;

impl Fence for Full {
    fn fence(&self) {
        fence(Ordering::SeqCst);
    }
    #[inline]
    fn fence_after_change(&self) {
        // On x86 an instruction that both reads and writes memory is a full fence, so only the compiler must be kept
        // from reordering.
        #[cfg(target_arch = "x86_64")]
        std::sync::atomic::compiler_fence(Ordering::SeqCst);
        #[cfg(not(target_arch = "x86_64"))]
        fence(Ordering::SeqCst);
    }
}

/// The other side moved an index out of its range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingError;

/// SQ and RQ of one QP, either side's view.
#[derive(Clone, Debug)]
pub struct QpRings {
    ctrl: Span,
    sq: Span,
    rq: Span,
    layout: abi::QpLayout,
}

impl QpRings {
    /// `None` if a window is smaller than its part of `layout`.
    pub fn new(ctrl: Span, sq: Span, rq: Span, layout: abi::QpLayout) -> Option<Self> {
        let fits = ctrl.len() >= size_of::<abi::QpCtrl>()
            && ctrl.addr() % 64 == 0
            && sq.len() >= layout.sq_bytes()
            && sq.addr() % 8 == 0
            && rq.len() >= layout.rq_bytes()
            && rq.addr() % 8 == 0;
        fits.then_some(QpRings { ctrl, sq, rq, layout })
    }

    /// The rings of a shared receive queue: no SQ.
    pub fn receive_only(ctrl: Span, rq: Span, layout: abi::QpLayout) -> Option<Self> {
        Self::new(ctrl, Span::anonymous(layout.sq_bytes()), rq, layout)
    }

    /// The rings of a QP whose receives come from a shared receive queue: no RQ.
    pub fn send_only(ctrl: Span, sq: Span, layout: abi::QpLayout) -> Option<Self> {
        Self::new(ctrl, sq, Span::anonymous(layout.rq_bytes()), layout)
    }

    /// Other rings with the same control block; `None` as of [`QpRings::new`].
    pub fn with_rings(&self, sq: Span, rq: Span, layout: abi::QpLayout) -> Option<Self> {
        Self::new(self.ctrl.clone(), sq, rq, layout)
    }

    /// Sizes of the rings.
    pub fn layout(&self) -> &abi::QpLayout {
        &self.layout
    }

    fn sq_at(&self, index: u32) -> usize {
        (index & (self.layout.sq_entries - 1)) as usize * self.layout.sq_stride as usize
    }

    fn rq_at(&self, index: u32) -> usize {
        (index & (self.layout.rq_entries - 1)) as usize * self.layout.rq_stride as usize
    }

    #[inline]
    fn pending(&self, prod_off: usize, cons: u32, entries: u32) -> Result<u32, RingError> {
        let n = self.ctrl.load32(prod_off, Ordering::Acquire).wrapping_sub(cons);
        if n > entries { Err(RingError) } else { Ok(n) }
    }

    /// Device: WQEs in the SQ past `cons`.
    ///
    /// # Errors
    /// The driver's index jumped.
    #[inline]
    pub fn sq_pending(&self, cons: u32) -> Result<u32, RingError> {
        self.pending(abi::QP_SQ_PROD, cons, self.layout.sq_entries)
    }

    /// Device: WQEs in the RQ past `cons`.
    ///
    /// # Errors
    /// The driver's index jumped.
    #[inline]
    pub fn rq_pending(&self, cons: u32) -> Result<u32, RingError> {
        self.pending(abi::QP_RQ_PROD, cons, self.layout.rq_entries)
    }

    /// Device: will read WQE `cons` of the SQ in a moment. Prefetches the cache lines from the driver's core.
    #[inline]
    pub fn expect_sq(&self, cons: u32) {
        self.ctrl.prefetch(abi::QP_SQ_PROD);
        let at = self.sq_at(cons);
        self.sq.prefetch(at);
        self.sq.prefetch(at + abi::SQ_DATA);
    }

    /// Device: copies the head of SQ WQE `index`, once.
    #[inline]
    pub fn sq_head(&self, index: u32) -> abi::SqWqe {
        self.sq.read_obj(self.sq_at(index))
    }

    /// Device: copies what follows the head of SQ WQE `index`; false if it is longer than a slot.
    #[inline]
    pub fn sq_data(&self, index: u32, dst: &mut [u8]) -> bool {
        let fits = abi::SQ_DATA + dst.len() <= self.layout.sq_stride as usize;
        if fits {
            self.sq.read(self.sq_at(index) + abi::SQ_DATA, dst);
        }
        fits
    }

    /// Device: copies the head of RQ WQE `index`, once.
    #[inline]
    pub fn rq_head(&self, index: u32) -> abi::RqWqe {
        self.rq.read_obj(self.rq_at(index))
    }

    /// Device: copies the SGEs of RQ WQE `index`; false if they are longer than a slot.
    #[inline]
    pub fn rq_data(&self, index: u32, dst: &mut [u8]) -> bool {
        let fits = abi::RQ_DATA + dst.len() <= self.layout.rq_stride as usize;
        if fits {
            self.rq.read(self.rq_at(index) + abi::RQ_DATA, dst);
        }
        fits
    }

    /// Driver: copies SQ WQE `index` as it was put, at most a slot.
    pub fn sq_copy(&self, index: u32, dst: &mut [u8]) {
        let n = dst.len().min(self.layout.sq_stride as usize);
        self.sq.read(self.sq_at(index), &mut dst[..n]);
    }

    /// Driver: copies RQ WQE `index` as it was put, at most a slot.
    pub fn rq_copy(&self, index: u32, dst: &mut [u8]) {
        let n = dst.len().min(self.layout.rq_stride as usize);
        self.rq.read(self.rq_at(index), &mut dst[..n]);
    }

    /// Device: gives SQ slots below `cons` back.
    #[inline]
    pub fn set_sq_cons(&self, cons: u32) {
        self.ctrl.store32(abi::QP_SQ_CONS, cons, Ordering::Release);
    }

    /// Device: gives RQ slots below `cons` back.
    #[inline]
    pub fn set_rq_cons(&self, cons: u32) {
        self.ctrl.store32(abi::QP_RQ_CONS, cons, Ordering::Release);
    }

    /// Device: asks for doorbells on receives (or not). Read [`QpRings::rq_pending`] afterwards.
    pub fn set_rq_notify(&self, on: bool) {
        self.ctrl.store32(abi::QP_RQ_NOTIFY, u32::from(on), Ordering::Release);
        fence(Ordering::SeqCst);
    }

    /// Driver: slots of the SQ that are free when `prod` WQEs were posted.
    pub fn sq_free(&self, prod: u32) -> u32 {
        let used = prod.wrapping_sub(self.ctrl.load32(abi::QP_SQ_CONS, Ordering::Acquire));
        self.layout.sq_entries.saturating_sub(used)
    }

    /// Driver: WQEs of the SQ that are retired.
    pub fn sq_retired(&self) -> u32 {
        self.ctrl.load32(abi::QP_SQ_CONS, Ordering::Acquire)
    }

    /// Driver: slots of the RQ that are free when `prod` WQEs were posted.
    pub fn rq_free(&self, prod: u32) -> u32 {
        let used = prod.wrapping_sub(self.ctrl.load32(abi::QP_RQ_CONS, Ordering::Acquire));
        self.layout.rq_entries.saturating_sub(used)
    }

    /// Driver: writes bytes of SQ slot `index` at `off` in the slot.
    pub fn sq_put(&self, index: u32, off: usize, bytes: &[u8]) {
        assert!(off + bytes.len() <= self.layout.sq_stride as usize, "SQ slot overrun");
        self.sq.write(self.sq_at(index) + off, bytes);
    }

    /// Driver: as [`QpRings::sq_put`], from memory that others may write meanwhile.
    ///
    /// # Safety
    /// As of [`Span::copy_from`].
    pub unsafe fn sq_put_from(&self, index: u32, off: usize, src: *const u8, len: usize) {
        assert!(off + len <= self.layout.sq_stride as usize, "SQ slot overrun");
        // SAFETY: by the contract.
        unsafe { self.sq.copy_from(self.sq_at(index) + off, src, len) };
    }

    /// Driver: writes RQ slot `index`.
    pub fn rq_put(&self, index: u32, off: usize, bytes: &[u8]) {
        assert!(off + bytes.len() <= self.layout.rq_stride as usize, "RQ slot overrun");
        self.rq.write(self.rq_at(index) + off, bytes);
    }

    /// Driver: publishes `prod` SQ WQEs.
    pub fn set_sq_prod(&self, prod: u32) {
        self.ctrl.store32(abi::QP_SQ_PROD, prod, Ordering::Release);
    }

    /// Driver: publishes `prod` RQ WQEs; true if the device wants the doorbell for them.
    pub fn set_rq_prod(&self, prod: u32) -> bool {
        self.ctrl.store32(abi::QP_RQ_PROD, prod, Ordering::Release);
        fence(Ordering::SeqCst);
        self.ctrl.load32(abi::QP_RQ_NOTIFY, Ordering::Relaxed) != 0
    }
}

/// Device half of a CQ.
#[derive(Debug)]
pub struct CqRing {
    ctrl: Span,
    ring: Span,
    mask: u32,
    prod: u32,
    served: u32,
}

impl CqRing {
    /// `None` if `entries` is no power of two or a window is too small.
    pub fn new(ctrl: Span, ring: Span, entries: u32) -> Option<Self> {
        let fits = entries.is_power_of_two()
            && ctrl.len() >= size_of::<abi::CqCtrl>()
            && ctrl.addr() % 64 == 0
            && ring.len() >= entries as usize * size_of::<abi::Cqe>()
            && ring.addr() % 64 == 0;
        fits.then(|| CqRing { ctrl, ring, mask: entries - 1, prod: 0, served: 0 })
    }

    /// Entries of the ring.
    pub fn entries(&self) -> u32 {
        self.mask + 1
    }

    /// The state beside its memory: completions written so far, and the arming that it served last.
    pub fn position(&self) -> (u32, u32) {
        (self.prod, self.served)
    }

    /// The same memory at another position.
    pub fn at(&self, (prod, served): (u32, u32)) -> CqRing {
        CqRing { ctrl: self.ctrl.clone(), ring: self.ring.clone(), mask: self.mask, prod, served }
    }

    /// Writes a completion.
    ///
    /// # Errors
    /// The ring is full, or the driver's index jumped: the CQ has overrun (R84b).
    #[inline]
    pub fn push(&mut self, mut cqe: abi::Cqe) -> Result<(), RingError> {
        let used = self.prod.wrapping_sub(self.ctrl.load32(abi::CQ_CONS, Ordering::Acquire));
        if used > self.mask {
            self.ctrl.store32(abi::CQ_ERROR, 1, Ordering::Release);
            return Err(RingError);
        }
        cqe.valid = phase(self.prod, self.mask);
        let at = (self.prod & self.mask) as usize * size_of::<abi::Cqe>();
        self.ring.write(at, &cqe.as_bytes()[..abi::CQE_VALID]);
        self.ring.store32(at + abi::CQE_VALID, cqe.valid, Ordering::Release);
        self.prod = self.prod.wrapping_add(1);
        self.ctrl.store32(abi::CQ_PROD, self.prod, Ordering::Release);
        Ok(())
    }

    /// True if a completion event is due now; each arming is served once.
    pub fn take_event(&mut self, solicited: bool) -> bool {
        let Some(arm) = protocol::armed(&Full, &W(&self.ctrl, abi::CQ_ARM), self.served) else {
            return false;
        };
        if arm & abi::NOTIFY_NEXT == 0 && !solicited {
            return false;
        }
        self.served = arm;
        true
    }

    /// `NOTIFY_*` flags that it is armed with; 0 for none.
    pub fn armed(&self) -> u32 {
        protocol::armed(&Full, &W(&self.ctrl, abi::CQ_ARM), self.served).map_or(0, |arm| arm & 3)
    }
}

/// Phase bit of slot number `index`: 1 on the first lap, so that zeroed memory is invalid.
fn phase(index: u32, mask: u32) -> u32 {
    let lap = index >> mask.count_ones().min(31);
    (lap & 1) ^ 1
}

/// Driver half of a CQ.
#[derive(Debug)]
pub struct CqTail {
    ctrl: Span,
    ring: Span,
    mask: u32,
    cons: u32,
    arm_seq: u32,
    /// QPs whose completions before these indices are not wanted any more.
    forgotten: Vec<(u32, u32)>,
}

impl CqTail {
    /// As [`CqRing::new`]; the memory must be zero.
    pub fn new(ctrl: Span, ring: Span, entries: u32) -> Option<Self> {
        CqRing::new(ctrl.clone(), ring.clone(), entries)?;
        Some(CqTail { ctrl, ring, mask: entries - 1, cons: 0, arm_seq: 0, forgotten: Vec::new() })
    }

    /// The next completion, if there is one; its slot stays taken until [`CqTail::release`].
    #[inline]
    pub fn pop(&mut self) -> Option<abi::Cqe> {
        self.pop_wanted(|_| ())
    }

    /// As [`CqTail::pop`]; `skipped` is called for each completion that is not wanted any more.
    #[inline]
    pub fn pop_wanted(&mut self, skipped: impl Fn(&abi::Cqe)) -> Option<abi::Cqe> {
        loop {
            let at = (self.cons & self.mask) as usize * size_of::<abi::Cqe>();
            if self.ring.load32(at + abi::CQE_VALID, Ordering::Acquire) != phase(self.cons, self.mask) {
                return None;
            }
            let cqe: abi::Cqe = self.ring.read_obj(at);
            let index = self.cons;
            self.cons = index.wrapping_add(1);
            if self.forgotten.is_empty() || !self.skips(index, cqe.qp_num) {
                return Some(cqe);
            }
            skipped(&cqe);
            self.release();
        }
    }

    /// Completions of QP `qpn` that the device has written so far are not wanted any more.
    pub fn forget(&mut self, qpn: u32) {
        let written = self.ctrl.load32(abi::CQ_PROD, Ordering::Acquire);
        self.forgotten.retain(|f| f.0 != qpn);
        if written != self.cons {
            self.forgotten.push((qpn, written));
        }
    }

    #[cold]
    fn skips(&mut self, index: u32, qpn: u32) -> bool {
        self.forgotten.retain(|f| (f.1.wrapping_sub(index) as i32) > 0);
        self.forgotten.iter().any(|f| f.0 == qpn)
    }

    /// Gives the slots of popped completions back.
    #[inline]
    pub fn release(&mut self) {
        self.ctrl.store32(abi::CQ_CONS, self.cons, Ordering::Release);
    }

    /// Arms the CQ with `NOTIFY_*` flags.
    pub fn arm(&mut self, flags: u32) {
        self.arm_seq = self.arm_seq.wrapping_add(1);
        protocol::arm(&Full, &W(&self.ctrl, abi::CQ_ARM), self.arm_seq << 2 | flags & 3);
    }

    /// Completions that wait.
    pub fn waiting(&self) -> u32 {
        self.ctrl.load32(abi::CQ_PROD, Ordering::Acquire).wrapping_sub(self.cons)
    }

    /// True once the device has found the CQ overrun.
    pub fn overrun(&self) -> bool {
        self.ctrl.load32(abi::CQ_ERROR, Ordering::Relaxed) != 0
    }
}

/// The doorbell page, either side's view. Its clones share this side's state.
#[derive(Clone, Debug)]
pub struct Bell(Span, Arc<Beside>);

/// The state of a doorbell page beside its bytes.
#[derive(Debug, Default)]
struct Beside {
    /// Device: copies that are under way.
    copies: Mutex<u32>,
    /// Driver: the device had not taken the last ring when it was checked. Then the next ring checks first. A check
    /// costs less than two changes of cache lines that the device reads, but adds to them if they are needed all the
    /// same.
    behind: AtomicBool,
}

impl Bell {
    /// `None` if the window is no aligned doorbell page.
    pub fn new(page: Span) -> Option<Self> {
        (page.len() >= size_of::<abi::DoorbellPage>() && page.addr() % 64 == 0).then(|| Bell(page, Arc::default()))
    }

    /// Driver: will ring for `slot` in a moment. Prefetches the cache line of its bit from the device's core.
    #[inline]
    pub fn expect_ring(&self, slot: u32) {
        self.0.prefetch_to_write(abi::DB_BITS + slot as usize / 64 * 8);
    }

    /// Driver: rings for `slot`. Unless it returns [`abi::AWAKE`], the wake virtqueue must be kicked: at once or, if it
    /// returns [`abi::NAPS`], after completions were looked for and none was found.
    ///
    /// # Panics
    /// If `slot` is not below [`abi::MAX_QP`].
    #[inline]
    pub fn ring(&self, slot: u32) -> u32 {
        let (word, bit) = (slot / 64, slot % 64);
        assert!((word as usize) < abi::DOORBELL_WORDS);
        let (bits, summary) = (W(&self.0, abi::DB_BITS + word as usize * 8), W(&self.0, abi::DB_SUMMARY));
        let need_kick = &W(&self.0, abi::DB_NEED_KICK);
        let words = BellWords { bits: (&bits, bit), summary: (&summary, word), need_kick };
        let behind = self.1.behind.load(Ordering::Relaxed);
        if behind && let Some(kick) = protocol::ring_again(&Full, &words) {
            return kick;
        }
        let (kick, is_behind) = protocol::ring(&Full, &words);
        if is_behind != behind {
            self.1.behind.store(is_behind, Ordering::Relaxed);
        }
        kick
    }

    /// Driver: the number of wake channels that the device has announced.
    pub fn wakes(&self) -> u32 {
        self.0.load32(abi::DB_WAKES, Ordering::Relaxed)
    }

    /// Device: announces its number of wake channels.
    pub fn set_wakes(&self, wakes: u32) {
        self.0.store32(abi::DB_WAKES, wakes, Ordering::Release);
    }

    /// Driver: announces whether it rings many times before it looks for completions.
    #[inline]
    pub fn set_bursts(&self, bursts: bool) {
        self.0.store32(abi::DB_BURSTS, u32::from(bursts), Ordering::Relaxed);
    }

    /// Device: true if the driver rings in bursts.
    pub fn bursts(&self) -> bool {
        self.0.load32(abi::DB_BURSTS, Ordering::Relaxed) != 0
    }

    /// Device: the words that have rung, a bit for each; they are not taken.
    #[inline]
    pub fn rung_words(&self) -> u64 {
        let words = W(&self.0, abi::DB_SUMMARY).peek();
        if words != 0 {
            // The caller will take them next.
            self.0.prefetch_to_write(abi::DB_SUMMARY);
        }
        words
    }

    /// Device: true if a bell has rung.
    #[inline]
    pub fn has_rung(&self) -> bool {
        self.rung_words() != 0
    }

    /// Device: takes the words that have rung, a bit for each. If only one slot of a word is in use, that slot has
    /// rung; otherwise [`Bell::take_bits`] says which ones have.
    #[inline]
    pub fn take_words(&self) -> u64 {
        let summary = W(&self.0, abi::DB_SUMMARY);
        if summary.peek() == 0 { 0 } else { protocol::take(&Full, &summary) }
    }

    /// Device: takes the slots of a word that have rung, and calls `f` with each.
    ///
    /// # Panics
    /// If `word` is not below [`abi::DOORBELL_WORDS`].
    #[inline]
    pub fn take_bits(&self, word: u32, mut f: impl FnMut(u32)) {
        assert!((word as usize) < abi::DOORBELL_WORDS);
        let mut bits = protocol::take(&Full, &W(&self.0, abi::DB_BITS + word as usize * 8));
        while bits != 0 {
            f(word * 64 + bits.trailing_zeros());
            bits &= bits - 1;
        }
    }

    /// Device: asks for a kick. False if a bell rang meanwhile: then it asks for none. `naps`: it polls again in a
    /// moment in any case.
    pub fn park(&self, naps: bool) -> bool {
        let how = if naps { abi::NAPS } else { abi::ASLEEP };
        protocol::park(&Full, &W(&self.0, abi::DB_SUMMARY), &W(&self.0, abi::DB_NEED_KICK), how)
    }

    /// Device: wants no kicks, it is polling.
    pub fn unpark(&self) {
        self.0.store32(abi::DB_NEED_KICK, 0, Ordering::Release);
    }

    /// Driver: is about to move pages of its process, which the device may access through a process region. It begins
    /// when [`Bell::is_copying`] is false, and must call [`Bell::end_move`] in any case. One move at a time: the caller
    /// has a lock.
    pub fn begin_move(&self) {
        protocol::begin_move(&Full, &W(&self.0, abi::DB_MOVING));
    }

    /// Driver: true while the device copies, after [`Bell::begin_move`] not for long.
    pub fn is_copying(&self) -> bool {
        W(&self.0, abi::DB_COPYING).load() & abi::COPYING != 0
    }

    /// Driver: has moved its pages, or given up.
    pub fn end_move(&self) {
        protocol::end_move(&W(&self.0, abi::DB_MOVING));
    }

    /// Driver: true if the device waits to copy because it has found pages moving. A driver that moves much in pieces
    /// leaves it time between two of them.
    pub fn is_awaited(&self) -> bool {
        W(&self.0, abi::DB_COPYING).load() & abi::COPY_WAITS != 0
    }

    /// Driver: the memory of its MRs leaves the place where the device has it, for a period with the number `away`, or
    /// is back (0). True if the wake virtqueue must be kicked, at once. Memory may leave when [`Bell::is_left_alone`].
    pub fn set_away(&self, away: u32) -> bool {
        self.0.store32(abi::DB_AWAY, away, Ordering::Release);
        // A bit that no QP has, so that the device polls.
        self.ring(abi::MAX_QP - 1) != abi::AWAKE
    }

    /// Driver: true once the device touches no memory of its MRs, for the period with the number `away`. A confirmation
    /// of an earlier period does not count: the device may just have seen that one end.
    pub fn is_left_alone(&self, away: u32) -> bool {
        self.0.load32(abi::DB_AWAY_SEEN, Ordering::Acquire) == away
    }

    /// Device: not 0 while the memory of the session's MRs must not be touched.
    #[inline]
    pub fn away(&self) -> u32 {
        self.0.load32(abi::DB_AWAY, Ordering::Acquire)
    }

    /// Device: confirms that it obeys the value of [`Bell::away`].
    pub fn confirm_away(&self, away: u32) {
        self.0.store32(abi::DB_AWAY_SEEN, away, Ordering::Release);
    }

    /// Device: is about to copy. False if the driver moves pages: then nothing may be copied, and the copy is tried
    /// again soon. Several threads of the device may copy at a time; to the driver it is one copy.
    pub fn begin_copy(&self) -> bool {
        let mut copies = self.1.copies.lock().unwrap_or_else(PoisonError::into_inner);
        let moving = W(&self.0, abi::DB_MOVING);
        let may = match *copies {
            0 => protocol::begin_copy(&Full, &W(&self.0, abi::DB_COPYING), &moving),
            // The driver waits only for copies that are under way already.
            _ => !protocol::is_moving(&moving),
        };
        *copies += u32::from(may);
        may
    }

    /// Device: has copied.
    pub fn end_copy(&self) {
        let mut copies = self.1.copies.lock().unwrap_or_else(PoisonError::into_inner);
        *copies -= 1;
        if *copies == 0 {
            protocol::end_copy(&W(&self.0, abi::DB_COPYING));
        }
    }

    /// Device: a number that changes whenever the driver begins or ends a move.
    pub fn moves(&self) -> u32 {
        W(&self.0, abi::DB_MOVING).load()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn cq(entries: u32) -> (CqRing, CqTail) {
        let (ctrl, ring) = (Span::anonymous(192), Span::anonymous(entries as usize * 64 + 64));
        let align = |s: &Span, n: u64| s.sub((64 - s.addr() as u64 % 64) % 64, n).unwrap();
        let (c, r) = (align(&ctrl, 128), align(&ring, u64::from(entries) * 64));
        (CqRing::new(c.clone(), r.clone(), entries).unwrap(), CqTail::new(c, r, entries).unwrap())
    }

    #[test]
    fn completions_come_out_in_order_over_many_laps() {
        let (mut dev, mut drv) = cq(4);
        for lap in 0..10u64 {
            for i in 0..3 {
                dev.push(abi::Cqe { wr_id: lap * 3 + i, ..Default::default() }).unwrap();
            }
            for i in 0..3 {
                assert_eq!(drv.pop().unwrap().wr_id, lap * 3 + i);
            }
            assert!(drv.pop().is_none());
            drv.release();
        }
    }

    #[test]
    fn forgotten_completions_are_passed_over() {
        let (mut dev, mut drv) = cq(8);
        let mut push = |qp_num, wr_id| dev.push(abi::Cqe { qp_num, wr_id, ..Default::default() }).unwrap();
        for lap in 0..20 {
            push(1, lap);
            push(2, 100 + lap);
            push(1, 200 + lap);
            drv.forget(1);
            // Later completions are wanted again.
            push(1, 300 + lap);
            let got: Vec<u64> = std::iter::from_fn(|| drv.pop()).map(|c| c.wr_id).collect();
            assert_eq!(got, [100 + lap, 300 + lap]);
            drv.release();
            drv.forget(2);
        }
        assert!(drv.forgotten.is_empty());
    }

    #[test]
    fn a_full_ring_overruns_and_says_so() {
        let (mut dev, drv) = cq(2);
        dev.push(Default::default()).unwrap();
        dev.push(Default::default()).unwrap();
        assert!(!drv.overrun());
        assert_eq!(dev.push(Default::default()), Err(RingError));
        assert!(drv.overrun());
    }

    #[test]
    fn a_ring_of_one_entry_works() {
        let (mut dev, mut drv) = cq(1);
        for i in 0..5 {
            dev.push(abi::Cqe { wr_id: i, ..Default::default() }).unwrap();
            assert_eq!(drv.pop().unwrap().wr_id, i);
            assert!(drv.pop().is_none());
            drv.release();
        }
    }

    #[test]
    fn each_arming_is_served_once_and_solicited_waits_for_solicited() {
        let (mut dev, mut drv) = cq(4);
        assert!(!dev.take_event(true));
        drv.arm(abi::NOTIFY_NEXT);
        assert!(dev.take_event(false));
        assert!(!dev.take_event(false));
        drv.arm(abi::NOTIFY_SOLICITED);
        assert!(!dev.take_event(false));
        assert!(dev.take_event(true));
    }

    #[test]
    fn copies_of_several_threads_are_one_to_the_driver() {
        let page = Span::anonymous(4096 + 64);
        let bell = Bell::new(page.sub((64 - page.addr() as u64 % 64) % 64, 4096).unwrap()).unwrap();
        let other = bell.clone();
        assert!(bell.begin_copy() && other.begin_copy());
        bell.end_copy();
        assert!(bell.is_copying(), "the other one copies");
        bell.begin_move();
        assert!(!bell.begin_copy(), "none begins while the driver waits");
        assert!(bell.is_copying());
        other.end_copy();
        assert!(!bell.is_copying());
        assert!(!other.begin_copy() && bell.is_awaited());
        bell.end_move();
        assert!(other.begin_copy());
        other.end_copy();
    }

    #[test]
    fn bells_carry_every_slot_once() {
        let page = Span::anonymous(4096 + 64);
        let bell = Bell::new(page.sub((64 - page.addr() as u64 % 64) % 64, 4096).unwrap()).unwrap();
        for slot in [0, 63, 64, 4095] {
            assert_eq!(bell.ring(slot), abi::AWAKE);
        }
        let take = || {
            let (mut words, mut got) = (bell.take_words(), vec![]);
            while words != 0 {
                bell.take_bits(words.trailing_zeros(), |s| got.push(s));
                words &= words - 1;
            }
            got
        };
        assert_eq!(take(), [0, 63, 64, 4095]);
        assert_eq!(take(), []);
        bell.ring(65);
        assert_eq!((bell.rung_words(), bell.rung_words()), (2, 2));
        assert_eq!(take(), [65]);
        // Further rings before the device has taken the first one, of this slot and of others.
        [65, 65, 65, 66, 64, 65, 66].into_iter().for_each(|slot| assert_eq!(bell.ring(slot), abi::AWAKE));
        assert_eq!(take(), [64, 65, 66]);
        assert_eq!(take(), []);
        bell.ring(65);
        assert_eq!(take(), [65], "what was taken is rung for again");
        assert!(!bell.has_rung());
        assert!(bell.park(false));
        assert_eq!(bell.ring(1), abi::ASLEEP, "a parked device must be kicked");
        assert!(!bell.park(true), "work is waiting");
        assert_eq!(bell.ring(1), abi::AWAKE);
        assert_eq!(take(), [1]);
        assert!(bell.park(true));
        assert_eq!(bell.ring(1), abi::NAPS);
    }

    #[test]
    fn a_jumping_producer_is_an_error() {
        let cap = abi::QpCap { max_send_wr: 4, max_recv_wr: 4, max_send_sge: 1, max_recv_sge: 1, max_inline_data: 0 };
        let layout = abi::QpLayout::of(&cap).unwrap();
        let s = Span::anonymous(8192);
        let base = (64 - s.addr() as u64 % 64) % 64;
        let part = |o, n: usize| s.sub(base + o, n as u64).unwrap();
        let r =
            QpRings::new(part(0, 128), part(128, layout.sq_bytes()), part(2048, layout.rq_bytes()), layout).unwrap();
        r.set_sq_prod(4);
        assert_eq!(r.sq_pending(0), Ok(4));
        r.set_sq_prod(5);
        assert_eq!(r.sq_pending(0), Err(RingError));
        r.set_sq_prod(u32::MAX);
        assert_eq!(r.sq_pending(0), Err(RingError));
        assert!(!r.sq_data(0, &mut [0; 65]));
    }
}
