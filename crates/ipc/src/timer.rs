//! A timer as a descriptor that can be polled.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};

/// See `timerfd_create(2)`. It becomes readable at the time that was set.
pub struct Timer(OwnedFd);

impl Timer {
    /// A timer that is not set.
    ///
    /// # Errors
    /// The process has too many descriptors.
    pub fn new() -> io::Result<Self> {
        Ok(Timer(timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)?))
    }

    /// Sets the timer to fire after this time; `None`: never. An earlier setting is replaced.
    ///
    /// # Errors
    /// The thread's system call filter refuses the call.
    pub fn set(&self, after: Option<Duration>) -> io::Result<()> {
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        // A value of zero would disarm the timer.
        let value = after.map_or(zero, |t| t.max(Duration::from_nanos(1)).try_into().unwrap_or(zero));
        let set = Itimerspec { it_interval: zero, it_value: value };
        timerfd_settime(&self.0, TimerfdTimerFlags::empty(), &set)?;
        Ok(())
    }

    /// True if it has fired since the last call.
    pub fn has_fired(&self) -> bool {
        rustix::io::read(&self.0, &mut [0; 8]).is_ok()
    }
}

impl AsFd for Timer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_fires_once_each_time_that_it_is_set() {
        let timer = Timer::new().unwrap();
        timer.set(Some(Duration::ZERO)).unwrap();
        while !timer.has_fired() {}
        assert!(!timer.has_fired());
        timer.set(Some(Duration::from_millis(1))).unwrap();
        timer.set(None).unwrap();
        std::thread::sleep(Duration::from_millis(5));
        assert!(!timer.has_fired());
    }
}
