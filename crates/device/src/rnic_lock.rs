//! The RNIC behind its lock, and statistics of how long the lock is held.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use rustix::time::ClockId;
use unirdma_rnic::{Dropped, Rnic};

/// The monotonic clock, ns. Completions carry it, and programs of this machine can read it, too.
pub fn now_ns() -> u64 {
    let t = rustix::time::clock_gettime(ClockId::Monotonic);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

/// Attempts to take a lock that another thread holds briefly, before the thread sleeps.
const SPINS: u32 = 2_000;

/// A thread that has just released the lock lets spinning threads take it first, but checks this many times at most:
/// the spinning threads may have lost their core.
const MOST_LOOKS: u32 = 50;

/// An RNIC that several threads use, one at a time.
pub struct SharedRnic {
    rnic: Mutex<Rnic>,
    /// Threads that sleep until they get the lock.
    waiters: AtomicU32,
    /// Threads that spin until they get the lock.
    spinners: AtomicU32,
    held: Histogram,
}

impl SharedRnic {
    /// An unlocked RNIC.
    pub fn new(rnic: Rnic) -> Self {
        SharedRnic {
            rnic: Mutex::new(rnic),
            waiters: AtomicU32::new(0),
            spinners: AtomicU32::new(0),
            held: Histogram::default(),
        }
    }

    /// Locks the RNIC. A poisoned lock is used anyway, because every step leaves valid state.
    pub fn lock(&self) -> RnicGuard<'_> {
        self.guard(self.wait())
    }

    /// True if a thread sleeps on the lock. A thread that takes the lock repeatedly lets the sleeping one in first.
    pub fn is_wanted(&self) -> bool {
        self.waiters.load(Ordering::SeqCst) != 0
    }

    /// Locks the RNIC, unless another thread has locked it.
    pub fn try_lock(&self) -> Option<RnicGuard<'_>> {
        self.try_take().map(|r| self.guard(r))
    }

    /// As [`SharedRnic::lock`], but spins first. For callers who expect the holder to release the lock soon.
    pub fn spin_lock(&self) -> RnicGuard<'_> {
        self.guard(self.brief_lock())
    }

    /// As [`SharedRnic::spin_lock`], for a step that is known to be short: the time under the lock is not measured.
    pub fn brief_lock(&self) -> MutexGuard<'_, Rnic> {
        if let Some(r) = self.try_take() {
            return r;
        }
        self.spinners.fetch_add(1, Ordering::SeqCst);
        let taken = (0..SPINS).find_map(|_| {
            std::hint::spin_loop();
            self.try_take()
        });
        self.spinners.fetch_sub(1, Ordering::SeqCst);
        taken.unwrap_or_else(|| self.wait())
    }

    /// Called by a thread that has released the lock and will take it again: lets spinning threads take it first.
    /// Otherwise they would hardly ever find it free, because the lock is in the caches of the caller's core. True if
    /// there were any.
    pub fn let_in(&self) -> bool {
        let mut looks = 0;
        while self.spinners.load(Ordering::SeqCst) != 0 && looks < MOST_LOOKS {
            std::hint::spin_loop();
            looks += 1;
        }
        looks > 0
    }

    fn try_take(&self) -> Option<MutexGuard<'_, Rnic>> {
        match self.rnic.try_lock() {
            Ok(r) => Some(r),
            Err(TryLockError::Poisoned(p)) => Some(p.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Locks the RNIC. Sleeps, counted in `waiters`, while another thread holds the lock.
    fn wait(&self) -> MutexGuard<'_, Rnic> {
        if let Some(r) = self.try_take() {
            return r;
        }
        self.waiters.fetch_add(1, Ordering::SeqCst);
        let r = self.rnic.lock().unwrap_or_else(PoisonError::into_inner);
        self.waiters.fetch_sub(1, Ordering::SeqCst);
        r
    }

    /// As [`SharedRnic::spin_lock`], for a thread that released the lock at `now`: unless it had to wait, the clock is
    /// not read again.
    pub fn take_again(&self, now: u64) -> RnicGuard<'_> {
        match self.try_take() {
            Some(r) => self.guard_since(r, now),
            None => self.spin_lock(),
        }
    }

    fn guard<'a>(&'a self, rnic: MutexGuard<'a, Rnic>) -> RnicGuard<'a> {
        self.guard_since(rnic, now_ns())
    }

    fn guard_since<'a>(&'a self, mut rnic: MutexGuard<'a, Rnic>, since_ns: u64) -> RnicGuard<'a> {
        rnic.at(since_ns);
        RnicGuard { rnic, dropped: Dropped::default(), since_ns, noted_ns: None, held: &self.held }
    }

    /// Statistics of the times for which the RNIC was locked.
    pub fn held(&self) -> HoldTimes {
        self.held.read()
    }
}

/// The locked RNIC.
pub struct RnicGuard<'a> {
    rnic: MutexGuard<'a, Rnic>,
    /// Objects to drop after the RNIC is unlocked: fields are dropped in the order of their declaration.
    dropped: Dropped,
    since_ns: u64,
    /// How long the lock was held, once that is recorded.
    noted_ns: Option<u64>,
    held: &'a Histogram,
}

impl RnicGuard<'_> {
    /// When the lock was taken, ns.
    pub fn since_ns(&self) -> u64 {
        self.since_ns
    }

    /// Unlocks the RNIC; returns when that was, ns.
    pub fn release(mut self) -> u64 {
        self.note();
        self.since_ns + self.noted_ns.unwrap_or(0)
    }

    fn note(&mut self) {
        if self.noted_ns.is_none() {
            let ns = now_ns().saturating_sub(self.since_ns);
            self.held.note(ns);
            self.noted_ns = Some(ns);
        }
    }
}

impl Deref for RnicGuard<'_> {
    type Target = Rnic;
    fn deref(&self) -> &Rnic {
        &self.rnic
    }
}

impl DerefMut for RnicGuard<'_> {
    fn deref_mut(&mut self) -> &mut Rnic {
        &mut self.rnic
    }
}

impl Drop for RnicGuard<'_> {
    fn drop(&mut self) {
        self.note();
        self.dropped = self.rnic.take_dropped();
    }
}

/// How long the lock of the RNIC was held. Half of the times were at most `p50_ns`, and 999 of 1000 at most `p999_ns`;
/// both are exact to a quarter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[allow(missing_docs)]
pub struct HoldTimes {
    pub times: u64,
    pub p50_ns: u64,
    pub p999_ns: u64,
    pub worst_ns: u64,
    /// Sum of all times, ns.
    #[serde(default)]
    pub sum_ns: u64,
    /// The number of times that were shorter than each of [`HoldTimes::edges_ns`].
    #[serde(default)]
    pub shorter: [u64; HoldTimes::EDGES],
}

impl HoldTimes {
    /// Number of edges.
    pub const EDGES: usize = 12;
    /// log2 of the first edge in ns.
    const FIRST_EDGE: usize = 10;

    /// The edges of [`HoldTimes::shorter`]: powers of two from 1 us to 2 ms, in ns.
    pub fn edges_ns() -> [u64; HoldTimes::EDGES] {
        std::array::from_fn(|i| 1 << (Self::FIRST_EDGE + i))
    }
}

impl std::ops::AddAssign for HoldTimes {
    /// Adds the times of another lock. Each percentile of the sum is the larger of the two.
    fn add_assign(&mut self, o: Self) {
        let HoldTimes { times, p50_ns, p999_ns, worst_ns, sum_ns, shorter } = self;
        *times += o.times;
        *p50_ns = (*p50_ns).max(o.p50_ns);
        *p999_ns = (*p999_ns).max(o.p999_ns);
        *worst_ns = (*worst_ns).max(o.worst_ns);
        *sum_ns = sum_ns.saturating_add(o.sum_ns);
        shorter.iter_mut().zip(o.shorter).for_each(|(all, one)| *all += one);
    }
}

/// Buckets for each power of two.
const PARTS: u64 = 4;
const BUCKETS: usize = 64 * PARTS as usize;

/// Counts times by their length. Only the holder of the lock writes.
struct Histogram {
    buckets: Box<[AtomicU64]>,
    worst: AtomicU64,
    sum: AtomicU64,
}

impl Default for Histogram {
    fn default() -> Self {
        Histogram {
            buckets: (0..BUCKETS).map(|_| AtomicU64::new(0)).collect(),
            worst: AtomicU64::new(0),
            sum: AtomicU64::new(0),
        }
    }
}

impl Histogram {
    /// The bucket of a time.
    fn bucket(ns: u64) -> usize {
        let ns = ns.max(PARTS);
        let power = u64::from(ns.ilog2());
        (power * PARTS + (ns >> (power - PARTS.ilog2() as u64)) % PARTS) as usize
    }

    /// The longest time that a bucket holds.
    fn longest(bucket: usize) -> u64 {
        let (power, part) = (bucket as u64 / PARTS, bucket as u64 % PARTS);
        let step = (1u64 << power) / PARTS;
        (1 << power) + (part + 1) * step - 1
    }

    fn note(&self, ns: u64) {
        let bucket = &self.buckets[Self::bucket(ns).min(BUCKETS - 1)];
        bucket.store(bucket.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        self.sum.store(self.sum.load(Ordering::Relaxed).wrapping_add(ns), Ordering::Relaxed);
        if ns > self.worst.load(Ordering::Relaxed) {
            self.worst.store(ns, Ordering::Relaxed);
        }
    }

    fn read(&self) -> HoldTimes {
        let counts: Vec<u64> = self.buckets.iter().map(|b| b.load(Ordering::Relaxed)).collect();
        let times: u64 = counts.iter().sum();
        let worst_ns = self.worst.load(Ordering::Relaxed);
        let at = |thousandths: u64| {
            let mut left = (times * thousandths).div_ceil(1000);
            let found = counts.iter().position(|&n| {
                let found = n >= left && n > 0;
                left = left.saturating_sub(n);
                found
            });
            found.map_or(0, Self::longest).min(worst_ns)
        };
        let shorter = |power: usize| counts[..power * PARTS as usize].iter().sum();
        HoldTimes {
            times,
            p50_ns: at(500),
            p999_ns: at(999),
            worst_ns,
            sum_ns: self.sum.load(Ordering::Relaxed),
            shorter: std::array::from_fn(|i| shorter(HoldTimes::FIRST_EDGE + i)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use unirdma_mem::Span;
    use unirdma_rnic::{Limits, Resolve, Share, VrnicConfig};

    use super::*;

    /// Session memory that checks, when it is dropped, whether the RNIC is locked.
    struct Looks(Arc<SharedRnic>, Arc<AtomicU32>);

    impl Resolve for Looks {
        fn resolve(&self, _: u64, _: u64) -> Option<(&Span, u64)> {
            None
        }
    }

    impl Drop for Looks {
        fn drop(&mut self) {
            self.1.fetch_add(if self.0.try_lock().is_some() { 1 } else { 100 }, Ordering::SeqCst);
        }
    }

    #[test]
    fn memory_goes_after_the_rnic_is_given_back() {
        let (shared, free) = (Arc::new(SharedRnic::new(Rnic::new(1, 0))), Arc::new(AtomicU32::new(0)));
        let vrnic = VrnicConfig { group: 0, gids: Vec::new(), limits: Limits::default(), share: Share::default() };
        let mut rnic = shared.lock();
        let vrnic = rnic.add_vrnic(vrnic).unwrap();
        let session = rnic.add_session(vrnic).unwrap();
        for _ in 0..3 {
            rnic.set_memory(session, Arc::new(Looks(shared.clone(), free.clone())));
        }
        assert_eq!(free.load(Ordering::SeqCst), 0);
        drop(rnic);
        assert_eq!(free.load(Ordering::SeqCst), 2);
        shared.lock().remove_session(session);
        assert_eq!(free.load(Ordering::SeqCst), 3);
    }

    #[test]
    fn a_thread_that_spins_is_known_until_it_has_the_lock() {
        let shared = SharedRnic::new(Rnic::new(1, 0));
        let held = shared.lock();
        std::thread::scope(|scope| {
            scope.spawn(|| drop(shared.spin_lock()));
            while shared.spinners.load(Ordering::SeqCst) + shared.waiters.load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
            // `let_in` returns although the thread cannot have got the lock.
            shared.let_in();
            drop(held);
        });
        assert_eq!((shared.spinners.load(Ordering::SeqCst), shared.is_wanted()), (0, false));
        assert!(shared.try_lock().is_some());
    }

    #[test]
    fn times_are_counted_to_a_quarter() {
        let h = Histogram::default();
        assert_eq!(h.read(), HoldTimes::default());
        for ns in 1..=1000u64 {
            h.note(ns * 10);
        }
        let r = h.read();
        assert_eq!((r.times, r.worst_ns), (1000, 10_000));
        assert!((5_000..=6_250).contains(&r.p50_ns), "{r:?}");
        assert!((9_990..=10_000).contains(&r.p999_ns), "{r:?}");
        assert_eq!(r.sum_ns, 10 * 1000 * 1001 / 2);
        // The numbers of multiples of 10 up to 10,000 that are below 1024, 2048, 4096, 8192 and the other edges.
        assert_eq!(r.shorter, [102, 204, 409, 819, 1000, 1000, 1000, 1000, 1000, 1000, 1000, 1000]);
        let mut both = r;
        both += r;
        assert_eq!((both.times, both.p50_ns, both.worst_ns, both.shorter[1]), (2000, r.p50_ns, 10_000, 408));
        for ns in [0, 1, 3, 4, 5, 1023, 1024, u64::MAX] {
            let b = Histogram::bucket(ns).min(BUCKETS - 1);
            assert!(b == BUCKETS - 1 || ns <= Histogram::longest(b), "{ns}");
        }
    }
}
