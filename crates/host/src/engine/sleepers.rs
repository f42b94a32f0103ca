//! Where pollers sleep, and what wakes them.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::time::Timespec;

use super::policy::Twin;

/// Token of the virtual layer's own calls; sessions have 32-bit tokens.
pub(super) const CALL: u64 = u64::MAX;
/// Token of the port's descriptors.
pub(super) const PORT: u64 = u64::MAX - 1;

/// So many nanoseconds, for the kernel.
pub(crate) fn timespec(ns: u64) -> Timespec {
    Timespec { tv_sec: (ns / 1_000_000_000) as i64, tv_nsec: (ns % 1_000_000_000) as i64 }
}

/// Where a poller sleeps.
pub(super) struct Sleeper {
    epoll: OwnedFd,
    /// An eventfd that wakes it.
    call: OwnedFd,
    /// It sleeps, is about to, or is busy with something that may take long: it looks at nothing before it is woken.
    asleep: AtomicBool,
    pub twin: Twin,
}

impl Sleeper {
    fn new() -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let call = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let s = Sleeper { epoll, call, asleep: AtomicBool::new(false), twin: Twin::default() };
        s.listen(&s.call, CALL, epoll::EventFlags::IN | epoll::EventFlags::ET)?;
        Ok(s)
    }

    /// Whatever a descriptor tells wakes it from now on.
    pub fn listen(&self, fd: impl AsFd, token: u64, flags: epoll::EventFlags) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, fd, epoll::EventData::new_u64(token), flags)?)
    }

    pub fn ignore(&self, fd: impl AsFd) {
        let _ = epoll::delete(&self.epoll, fd);
    }

    /// Wakes it.
    pub fn call(&self) {
        let _ = rustix::io::write(&self.call, &1u64.to_ne_bytes());
    }

    pub fn is_asleep(&self) -> bool {
        self.asleep.load(Ordering::SeqCst)
    }

    pub fn set_asleep(&self, asleep: bool) {
        self.asleep.store(asleep, Ordering::SeqCst);
    }

    /// Waits up to the limit, nanoseconds; the kernel adds the thread's timer slack, usually 50 us. The tokens of what woke it.
    pub fn wait(&self, limit_ns: Option<u64>) -> Vec<u64> {
        let mut events = [MaybeUninit::<epoll::Event>::uninit(); 64];
        let limit = limit_ns.map(timespec);
        match epoll::wait(&self.epoll, &mut events, limit.as_ref()) {
            Ok((ready, _)) => ready.iter().map(|e| e.data.u64()).collect(),
            Err(_) => Vec::new(),
        }
    }
}

/// All places; at least one.
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

    /// That of a poller, or the one for a wake channel.
    pub fn of(&self, i: usize) -> &Sleeper {
        &self.0[i % self.0.len()]
    }

    /// Packets at a descriptor of the port wake the first poller. With `shares_cores` they wake one that sleeps, since the first one may have
    /// been woken and still wait for its core: between two hosts on the same two cores, 64 KiB WRITEs then reach 2,240 MiB/s in the place of 1,650.
    pub fn hear_port(&self, fd: BorrowedFd<'_>, shares_cores: bool) -> io::Result<()> {
        if !shares_cores {
            return self.0[0].listen(fd, PORT, epoll::EventFlags::IN);
        }
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET | epoll::EventFlags::EXCLUSIVE;
        self.all().try_for_each(|s| s.listen(fd, PORT, flags))
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    /// `epoll_pwait` counts whole milliseconds, and only `epoll_pwait2` counts nanoseconds. Another thread may have the core when a wait ends,
    /// so the shortest of 50 waits counts.
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
