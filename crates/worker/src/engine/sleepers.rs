//! The places where pollers sleep, and the events that wake them.

use std::collections::HashMap;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::time::Timespec;
use unirdma_device::{lock, now_ns};
use unirdma_ipc::timer::Timer;
use unirdma_link::BlockingFd;
use unirdma_mem::Slot;
use unirdma_rnic::Bells;

/// Token of calls by the virtual layer itself. Tokens of sessions have 32 bits.
pub(super) const CALL: u64 = u64::MAX;
/// Token of the port's descriptors.
pub(super) const PORT: u64 = u64::MAX - 1;

/// Longest sleep of the last poller, ns, while a driver counts on that (`abi::NAPS`), or so that programs post
/// receives.
pub(super) const NAP_NS: u64 = 100_000;
/// Time for which a poller ignores the kicks of a vRNIC whose kicks are mostly spurious, ns. To stop and to start
/// listening costs 2 us for each session of that vRNIC. Beside 64 sessions with spurious kicks, another tenant's 64 KiB
/// WRITEs reached 200 MiB/s when the poller listened to all of them, and 17,000 MiB/s now.
const DEAF_NS: u64 = 10_000_000;

/// Edge-triggered: an event each time the descriptor becomes readable, and one at the start if it is readable.
const EDGES: epoll::EventFlags = epoll::EventFlags::IN.union(epoll::EventFlags::ET);

/// `ns` nanoseconds as a `timespec`.
pub(crate) fn timespec(ns: u64) -> Timespec {
    Timespec { tv_sec: (ns / 1_000_000_000) as i64, tv_nsec: (ns % 1_000_000_000) as i64 }
}

/// The place where a poller sleeps.
pub(super) struct Sleeper {
    epoll: OwnedFd,
    /// An eventfd that wakes the poller.
    call: OwnedFd,
    /// The poller sleeps, is about to, or is busy for an unknown time: it looks at nothing until it is woken.
    asleep: AtomicBool,
    pub twin: Twin,
    /// A timer that wakes the poller.
    timer: Timer,
    /// When the timer fires or has fired, ns.
    fires_ns: AtomicU64,
    kicks: Mutex<Kicks>,
    /// [`Kicks::unheard`] is not empty.
    leaves_out: AtomicBool,
}

/// The thread that looks at doorbells while a core would be idle.
#[derive(Default)]
pub(super) struct Twin {
    pub asleep: AtomicBool,
    /// The twin has woken its poller.
    pub called: AtomicBool,
    /// The doorbells that the twin has to look at next, and the ones that it has finished with. The poller frees the
    /// latter: a twin may lose its core for seconds at any point, so it takes no lock, and neither allocates nor frees
    /// memory.
    pub next: Slot<Bells>,
    pub last: Slot<Bells>,
    pub thread: OnceLock<std::thread::Thread>,
}

impl Twin {
    /// Wakes the thread.
    pub fn wake(&self) {
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }
}

/// The kick descriptors of sessions.
#[derive(Default)]
struct Kicks {
    /// The descriptors of each session, by its token.
    of: HashMap<u64, Vec<Arc<BlockingFd>>>,
    /// Sessions whose kicks are ignored until `until_ns`.
    unheard: Vec<u64>,
    until_ns: u64,
}

impl Sleeper {
    fn new() -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let call = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let s = Sleeper {
            epoll,
            call,
            asleep: AtomicBool::new(false),
            twin: Twin::default(),
            timer: Timer::new()?,
            fires_ns: AtomicU64::new(0),
            kicks: Mutex::default(),
            leaves_out: AtomicBool::new(false),
        };
        s.listen(&s.call, CALL, EDGES)?;
        s.listen(&s.timer, CALL, EDGES)?;
        Ok(s)
    }

    /// Lets events of a descriptor wake the poller.
    fn listen(&self, fd: impl AsFd, token: u64, flags: epoll::EventFlags) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, fd, epoll::EventData::new_u64(token), flags)?)
    }

    /// Lets kicks of a session by this descriptor wake the poller.
    pub fn hear(&self, session: u64, kick: Arc<BlockingFd>) -> io::Result<()> {
        let mut kicks = lock(&self.kicks);
        self.listen(&kick, session, EDGES)?;
        kicks.of.entry(session).or_default().push(kick);
        Ok(())
    }

    /// Kicks of a session by this descriptor no longer wake the poller.
    pub fn forget(&self, session: u64, kick: &Arc<BlockingFd>) {
        let mut kicks = lock(&self.kicks);
        // A descriptor that is left out now is not in the set.
        let _ = epoll::delete(&self.epoll, kick);
        if let Some(of) = kicks.of.get_mut(&session) {
            of.retain(|k| !Arc::ptr_eq(k, kick));
            if of.is_empty() {
                kicks.of.remove(&session);
            }
        }
    }

    /// Ignores a session's kicks for [`DEAF_NS`]. If the session has kicked meanwhile, that wakes the poller at the end
    /// of this time.
    pub fn leave_out(&self, session: u64) {
        let mut kicks = lock(&self.kicks);
        for kick in kicks.of.get(&session).into_iter().flatten() {
            let _ = epoll::delete(&self.epoll, kick);
        }
        if kicks.unheard.is_empty() {
            kicks.until_ns = now_ns() + DEAF_NS;
        }
        kicks.unheard.push(session);
        self.leaves_out.store(true, Ordering::Relaxed);
    }

    /// Listens to the ignored sessions again if [`DEAF_NS`] is over. If not, lets the timer wake the poller for another
    /// check.
    fn hear_again(&self) {
        let mut kicks = lock(&self.kicks);
        let Kicks { of, unheard, until_ns } = &mut *kicks;
        if now_ns() < *until_ns {
            return self.wake_within(NAP_NS);
        }
        for session in unheard.drain(..) {
            for kick in of.get(&session).into_iter().flatten() {
                let _ = self.listen(kick, session, EDGES);
            }
        }
        self.leaves_out.store(false, Ordering::Relaxed);
    }

    /// Wakes the poller.
    pub fn call(&self) {
        let _ = rustix::io::write(&self.call, &1u64.to_ne_bytes());
    }

    pub fn is_asleep(&self) -> bool {
        self.asleep.load(Ordering::SeqCst)
    }

    pub fn set_asleep(&self, asleep: bool) {
        self.asleep.store(asleep, Ordering::SeqCst);
    }

    /// Lets the timer wake the poller in `ns` nanoseconds. An earlier setting is replaced.
    pub fn wake_in(&self, ns: u64) {
        let now = now_ns();
        // Setting the timer also clears an expiration, for which the next wait would otherwise return.
        if self.timer.set(Some(Duration::from_nanos(ns))).is_ok() {
            self.fires_ns.store(now + ns, Ordering::Relaxed);
        }
    }

    /// Lets the timer wake the poller in `ns` nanoseconds at the latest. The timer is set only if it has fired: to set
    /// a kernel timer for each wait, as a timeout does, takes about 10 us on a virtual machine.
    pub fn wake_within(&self, ns: u64) {
        if self.fires_ns.load(Ordering::Relaxed) <= now_ns() {
            self.wake_in(ns);
        }
    }

    /// Waits up to `limit_ns`, to which the kernel adds the thread's timer slack, usually 50 us. Returns the tokens of
    /// the events.
    pub fn wait(&self, limit_ns: Option<u64>) -> Vec<u64> {
        if self.leaves_out.load(Ordering::Relaxed) {
            self.hear_again();
        }
        let mut events = [MaybeUninit::<epoll::Event>::uninit(); 64];
        let limit = limit_ns.map(timespec);
        match epoll::wait(&self.epoll, &mut events, limit.as_ref()) {
            Ok((ready, _)) => ready.iter().map(|e| e.data.u64()).collect(),
            Err(_) => Vec::new(),
        }
    }
}

/// The places of all pollers; at least one.
pub(super) struct Sleepers(Box<[Sleeper]>);

impl Sleepers {
    pub fn new(count: usize) -> io::Result<Self> {
        Ok(Sleepers((0..count.max(1)).map(|_| Sleeper::new()).collect::<io::Result<_>>()?))
    }

    pub fn count(&self) -> usize {
        self.0.len()
    }

    pub fn all(&self) -> impl Iterator<Item = &Sleeper> {
        self.0.iter()
    }

    pub fn all_sleep(&self) -> bool {
        self.all().all(Sleeper::is_asleep)
    }

    /// The place of poller `i`, or the one for wake channel `i`.
    pub fn of(&self, i: usize) -> &Sleeper {
        &self.0[i % self.0.len()]
    }

    /// Lets packets at a descriptor of the port wake the first poller. With `shares_cores` they wake any sleeping one,
    /// since the first may have been woken and still wait for its core: between two hosts on the same two cores, 64 KiB
    /// WRITEs then reach 2,240 MiB/s instead of 1,650.
    pub fn hear_port(&self, fd: BorrowedFd<'_>, shares_cores: bool) -> io::Result<()> {
        if !shares_cores {
            return self.0[0].listen(fd, PORT, epoll::EventFlags::IN);
        }
        self.all().try_for_each(|s| s.listen(fd, PORT, EDGES | epoll::EventFlags::EXCLUSIVE))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use unirdma_link::{Ledger, Resource};

    use super::*;

    fn eventfd_of(ledger: &Ledger) -> Arc<BlockingFd> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        Arc::new(BlockingFd::new(fd, ledger.take(Resource::Descriptors, 1).unwrap()))
    }

    fn kick(fd: &BlockingFd) {
        rustix::io::write(fd, &1u64.to_ne_bytes()).unwrap();
    }

    #[test]
    fn who_is_left_out_wakes_nobody_for_a_moment_and_no_kick_is_lost() {
        let (s, ledger) = (Sleeper::new().unwrap(), Ledger::default());
        let (noisy, second, quiet) = (eventfd_of(&ledger), eventfd_of(&ledger), eventfd_of(&ledger));
        s.hear(1, noisy.clone()).unwrap();
        s.hear(1, second.clone()).unwrap();
        s.hear(2, quiet.clone()).unwrap();
        // Waits until `most` sessions have kicked, not counting the place's own timer.
        let hear = |most: usize| {
            let mut heard = Vec::new();
            while heard.len() < most {
                heard.extend(s.wait(None).into_iter().filter(|&token| token != CALL));
            }
            heard.sort_unstable();
            heard
        };
        let began = Instant::now();
        let is_deaf = || began.elapsed() < Duration::from_nanos(DEAF_NS);
        s.leave_out(1);
        [&noisy, &second, &quiet].into_iter().for_each(|fd| kick(fd));
        let first = hear(1);
        if is_deaf() {
            assert_eq!(first, [2]);
        }
        // The place wakes by itself, and then gets the kicks that came meanwhile.
        assert_eq!([first.clone(), hear(3 - first.len())].concat().into_iter().filter(|&t| t == 1).count(), 2);
        assert!(!is_deaf());
        // A descriptor that is forgotten while it is left out does not come back.
        s.leave_out(1);
        s.forget(1, &noisy);
        kick(&noisy);
        kick(&second);
        assert_eq!(hear(1), [1]);
        s.forget(1, &second);
        assert!(lock(&s.kicks).of.keys().eq([&2]));
    }

    /// A timer that has fired while the poller was awake does not end its next sleep.
    #[test]
    fn a_timer_that_has_fired_does_not_wake_before_the_time_that_is_set_next() {
        let s = Sleeper::new().unwrap();
        s.wake_within(1);
        std::thread::sleep(Duration::from_millis(1));
        let began = Instant::now();
        s.wake_in(5_000_000);
        assert_eq!(s.wait(None), [CALL]);
        assert!(began.elapsed() >= Duration::from_millis(5));
    }

    /// `epoll_pwait` counts whole milliseconds; only `epoll_pwait2` counts nanoseconds. Another thread may have the
    /// core when a wait ends, so the shortest of 50 waits is checked.
    #[test]
    fn a_wait_may_be_shorter_than_a_millisecond() {
        let s = Sleeper::new().unwrap();
        let time = || {
            let began = Instant::now();
            s.wait(Some(100_000));
            began.elapsed()
        };
        let shortest = (0..50).map(|_| time()).min().unwrap();
        assert!((Duration::from_micros(100)..Duration::from_millis(1)).contains(&shortest), "{shortest:?}");
    }
}
