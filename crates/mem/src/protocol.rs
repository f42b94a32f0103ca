//! The handshakes between a driver and a device, over any words: the doorbell's need-kick word and the CQ's arm word,
//! for a device that may sleep, the flags by which either side of a split virtqueue asks the other for no
//! notifications, and the doorbell's copying and moving words, for a driver that moves pages of its process.
//!
//! All are the same pattern: each side stores its own word, fences, and only then loads the other's,
//! so at least one of the two sees the other. The functions are generic over the words so that `loom`
//! runs this very code (`RUSTFLAGS="--cfg loom" cargo test -p unirdma-mem --release loom`).

use unirdma_abi as abi;

/// A shared 32-bit word.
pub trait Word32 {
    /// Load with acquire order.
    fn load(&self) -> u32;
    /// Store with release order.
    fn store(&self, v: u32);
}

/// A shared 16-bit word, as split virtqueues have them.
pub trait Word16 {
    /// Load with acquire order.
    fn load(&self) -> u16;
    /// Store with release order.
    fn store(&self, v: u16);
}

/// A shared 64-bit word.
pub trait Word64 {
    /// Load, relaxed.
    fn peek(&self) -> u64;
    /// Ors `v` in with release order; returns the value before.
    fn or(&self, v: u64) -> u64;
    /// Take all bits with acquire order.
    fn take(&self) -> u64;
}

/// The full fence between a store and a load.
pub trait Fence {
    /// Sequentially consistent fence.
    fn fence(&self);
    /// The same right after [`Word64::or`] or [`Word64::take`]. On some processors such an instruction is a fence
    /// already.
    fn fence_after_change(&self) {
        self.fence();
    }
}

/// The words of a doorbell page that a driver writes to ring for a QP, and the word that says whether the device
/// sleeps.
pub struct BellWords<'a, B, K> {
    /// The word that has the QP's bit, and the number of the bit.
    pub bits: (&'a B, u32),
    /// The summary, and the number of the word's bit there.
    pub summary: (&'a B, u32),
    /// Not [`abi::AWAKE`] while the device sleeps.
    pub need_kick: &'a K,
}

/// Driver: announces work. Returns whether the device sleeps, and whether it had not taken the earlier announcement.
/// The WQE and the producer index must be stored before.
pub fn ring<B: Word64, K: Word32>(f: &impl Fence, w: &BellWords<'_, B, K>) -> (u32, bool) {
    w.bits.0.or(1 << w.bits.1);
    let before = w.summary.0.or(1 << w.summary.1);
    f.fence_after_change();
    (w.need_kick.load(), before >> w.summary.1 & 1 != 0)
}

/// Driver: as [`ring`], if the driver expects that the device has not taken its earlier announcement yet. `None` if it
/// has: then [`ring`] must be called. Otherwise nothing needs to be written, because the device reads the queue after
/// it has taken both bits.
pub fn ring_again<B: Word64, K: Word32>(f: &impl Fence, w: &BellWords<'_, B, K>) -> Option<u32> {
    f.fence();
    let waits = w.bits.0.peek() >> w.bits.1 & w.summary.0.peek() >> w.summary.1 & 1 != 0;
    waits.then(|| w.need_kick.load())
}

/// Device: takes all bits of the summary or of one of its words. Whatever it reads afterwards includes all work that
/// was announced by a bit that it has taken, also by a driver that has found the bit set.
pub fn take(f: &impl Fence, word: &impl Word64) -> u64 {
    let taken = word.take();
    f.fence_after_change();
    taken
}

/// Device: goes to sleep, [`abi::ASLEEP`] or [`abi::NAPS`]. False if work came in meanwhile: then it is awake.
pub fn park(f: &impl Fence, summary: &impl Word64, need_kick: &impl Word32, how: u32) -> bool {
    need_kick.store(how);
    f.fence();
    if summary.peek() != 0 {
        need_kick.store(abi::AWAKE);
        return false;
    }
    true
}

/// Driver: arms a CQ. The caller must look for completions once more afterwards.
pub fn arm(f: &impl Fence, word: &impl Word32, value: u32) {
    word.store(value);
    f.fence();
}

/// Device: after a CQE is written, the arm word if it differs from the last one served.
pub fn armed(f: &impl Fence, word: &impl Word32, served: u32) -> Option<u32> {
    f.fence();
    let v = word.load();
    (v != served).then_some(v)
}

/// Driver: is about to move pages of its process. It must not begin before [`abi::COPYING`] is gone from `copying`.
pub fn begin_move(f: &impl Fence, moving: &impl Word32) {
    moving.store(moving.load().wrapping_add(1) | 1);
    f.fence();
}

/// Driver: has moved its pages, or will not.
pub fn end_move(moving: &impl Word32) {
    moving.store((moving.load() | 1).wrapping_add(1));
}

/// Device: is about to copy through a process region. False if the driver moves pages: then it must not copy.
pub fn begin_copy(f: &impl Fence, copying: &impl Word32, moving: &impl Word32) -> bool {
    copying.store(abi::COPYING);
    f.fence();
    let may = !is_moving(moving);
    if !may {
        copying.store(abi::COPY_WAITS);
    }
    may
}

/// True between [`begin_move`] and [`end_move`].
pub fn is_moving(moving: &impl Word32) -> bool {
    moving.load() & 1 != 0
}

/// Device: has copied.
pub fn end_copy(copying: &impl Word32) {
    copying.store(0);
}

/// Bit 0 of a virtqueue's flags (`VRING_AVAIL_F_NO_INTERRUPT`, `VRING_USED_F_NO_NOTIFY`): the side that owns the flags
/// polls and wants no notifications.
pub const VRING_QUIET: u16 = 1;

/// Either side of a virtqueue: announces entries up to `index`, which were written before; true if the
/// other side must be notified.
pub fn announce(f: &impl Fence, own_index: &impl Word16, index: u16, other_flags: &impl Word16) -> bool {
    own_index.store(index);
    must_notify(f, other_flags)
}

/// The second half of [`announce`], after the index was stored.
pub fn must_notify(f: &impl Fence, other_flags: &impl Word16) -> bool {
    f.fence();
    other_flags.load() & VRING_QUIET == 0
}

/// Either side of a virtqueue: asks for notifications before it sleeps. False if the other side has announced more than
/// `seen` meanwhile: then it is awake and wants none.
pub fn listen(f: &impl Fence, own_flags: &impl Word16, other_index: &impl Word16, seen: u16) -> bool {
    own_flags.store(0);
    f.fence();
    if other_index.load() != seen {
        own_flags.store(VRING_QUIET);
        return false;
    }
    true
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering, fence};

    struct F;
    impl Fence for F {
        fn fence(&self) {
            fence(Ordering::SeqCst);
        }
    }
    impl Word32 for AtomicU32 {
        fn load(&self) -> u32 {
            AtomicU32::load(self, Ordering::Acquire)
        }
        fn store(&self, v: u32) {
            AtomicU32::store(self, v, Ordering::Release);
        }
    }
    impl Word16 for AtomicU16 {
        fn load(&self) -> u16 {
            AtomicU16::load(self, Ordering::Acquire)
        }
        fn store(&self, v: u16) {
            AtomicU16::store(self, v, Ordering::Release);
        }
    }
    impl Word64 for AtomicU64 {
        fn peek(&self) -> u64 {
            self.load(Ordering::Relaxed)
        }
        fn or(&self, v: u64) -> u64 {
            self.fetch_or(v, Ordering::Release)
        }
        fn take(&self) -> u64 {
            self.swap(0, Ordering::Acquire)
        }
    }

    #[derive(Default)]
    struct Page {
        bits: AtomicU64,
        summary: AtomicU64,
        kick: AtomicU32,
        prod: AtomicU32,
    }

    impl Page {
        fn words(&self) -> BellWords<'_, AtomicU64, AtomicU32> {
            BellWords { bits: (&self.bits, 5), summary: (&self.summary, 0), need_kick: &self.kick }
        }

        /// The device takes the words that have rung, and looks at the queue if bit 5 has rung, or if `alone` is set.
        /// Returns the queue's producer index that it finds then.
        fn look(&self, alone: bool) -> Option<u32> {
            let rung = take(&F, &self.summary) != 0 && (alone || take(&F, &self.bits) >> 5 & 1 != 0);
            rung.then(|| self.prod.load(Ordering::Relaxed))
        }
    }

    /// A driver that posts once. Its result is the state of the device that it finds when it rings.
    fn posts(page: &Arc<Page>) -> loom::thread::JoinHandle<u32> {
        let page = page.clone();
        loom::thread::spawn(move || {
            page.prod.store(1, Ordering::Relaxed);
            ring(&F, &page.words()).0
        })
    }

    #[test]
    fn loom_a_post_is_seen_or_the_sleeper_is_kicked() {
        loom::model(|| {
            let page = Arc::new(Page::default());
            let t = posts(&page);
            let parked = park(&F, &page.summary, &page.kick, abi::ASLEEP);
            let kicked = t.join().unwrap() != abi::AWAKE;
            assert!(!parked || kicked, "asleep with work and no kick");
            if !parked {
                assert_eq!(page.look(false), Some(1));
            }
        });
    }

    /// A driver that finds the device napping or awake puts its kick off. The device polls after its nap. It then finds
    /// what was rung, or does not fall asleep.
    #[test]
    fn loom_a_kick_that_was_put_off_is_not_lost() {
        loom::model(|| {
            let page = Arc::new(Page::default());
            let t = posts(&page);
            let napped = park(&F, &page.summary, &page.kick, abi::NAPS);
            // The nap ends by itself.
            page.kick.store(abi::AWAKE, Ordering::Relaxed);
            let seen = page.look(false);
            let parked = park(&F, &page.summary, &page.kick, abi::ASLEEP);
            let kicked = t.join().unwrap() == abi::ASLEEP;
            assert!(napped || seen.is_some(), "it had rung");
            assert!(seen.is_some() || !parked || kicked, "asleep with work and no kick");
            if seen.is_none() && !parked {
                assert_eq!(page.look(false), Some(1));
            }
        });
    }

    /// Two posts, the second of which writes nothing if the device has not taken the first one.
    fn two_posts(alone: bool) {
        loom::model(move || {
            let page = Arc::new(Page::default());
            let t = {
                let page = page.clone();
                loom::thread::spawn(move || {
                    page.prod.store(1, Ordering::Relaxed);
                    ring(&F, &page.words());
                    page.prod.store(2, Ordering::Relaxed);
                    if ring_again(&F, &page.words()).is_none() {
                        ring(&F, &page.words());
                    }
                })
            };
            let seen = page.look(alone).unwrap_or(0);
            t.join().unwrap();
            let last = page.look(alone).unwrap_or(seen);
            assert_eq!(last, 2, "a post that nobody looks for");
        });
    }

    #[test]
    fn loom_a_post_behind_one_that_waits_is_seen() {
        two_posts(false);
    }

    #[test]
    fn loom_a_post_behind_one_that_waits_alone_in_its_word_is_seen() {
        two_posts(true);
    }

    #[test]
    fn loom_a_completion_is_seen_or_an_event_is_raised() {
        loom::model(|| {
            let cqe = Arc::new(AtomicU32::new(0));
            let word = Arc::new(AtomicU32::new(0));
            let t = {
                let (cqe, word) = (cqe.clone(), word.clone());
                loom::thread::spawn(move || {
                    cqe.store(1, Ordering::Release);
                    armed(&F, &*word, 0).is_some()
                })
            };
            arm(&F, &*word, 4);
            let polled = cqe.load(Ordering::Acquire) == 1;
            let event = t.join().unwrap();
            assert!(polled || event, "a completion that nobody hears of");
        });
    }

    #[test]
    fn loom_nobody_copies_while_pages_move() {
        loom::model(|| {
            let copying = Arc::new(AtomicU32::new(0));
            let moving = Arc::new(AtomicU32::new(0));
            // Number of sides that use the pages: never two.
            let at_pages = Arc::new(AtomicU32::new(0));
            let t = {
                let (copying, moving, at_pages) = (copying.clone(), moving.clone(), at_pages.clone());
                loom::thread::spawn(move || {
                    let may = begin_copy(&F, &*copying, &*moving);
                    if may {
                        assert_eq!(at_pages.fetch_add(1, Ordering::Relaxed), 0, "the device copies what moves");
                        at_pages.fetch_sub(1, Ordering::Relaxed);
                        end_copy(&*copying);
                    }
                    may
                })
            };
            begin_move(&F, &*moving);
            let free = Word32::load(&*copying) & abi::COPYING == 0;
            if free {
                assert_eq!(at_pages.fetch_add(1, Ordering::Relaxed), 0, "the driver moves what is copied");
                at_pages.fetch_sub(1, Ordering::Relaxed);
            }
            end_move(&*moving);
            t.join().unwrap();
            assert_eq!(Word32::load(&*moving), 2);
        });
    }

    #[test]
    fn loom_an_entry_is_seen_or_the_sleeper_is_notified() {
        loom::model(|| {
            let entry = Arc::new(AtomicU32::new(0));
            let index = Arc::new(AtomicU16::new(0));
            // The sleeper has polled until now.
            let flags = Arc::new(AtomicU16::new(VRING_QUIET));
            let t = {
                let (entry, index, flags) = (entry.clone(), index.clone(), flags.clone());
                loom::thread::spawn(move || {
                    entry.store(7, Ordering::Relaxed);
                    announce(&F, &*index, 1, &*flags)
                })
            };
            let asleep = listen(&F, &*flags, &*index, 0);
            let notified = t.join().unwrap();
            assert!(!asleep || notified, "asleep with an entry and no notification");
            if !asleep {
                assert_eq!(Word16::load(&*index), 1);
                assert_eq!(entry.load(Ordering::Relaxed), 7);
            }
        });
    }
}
