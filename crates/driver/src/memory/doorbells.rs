//! The doorbell pages of this process's open devices, by which the devices learn that memory is being moved.
//!
//! Two states are announced there (section 7.5 of the specification). *Moving*: pages of the process are being
//! replaced, so the device does not copy through the process's address space. *Away*: the memory of MRs is not in the
//! memory file, for the moment of a fork, so the device leaves all MRs of this process alone.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use unirdma_mem::Bell;
use unirdma_mem::fds::Known;

use crate::clock::clock_ns;
use crate::context::wake;

/// Longest time for a device to finish its present access, ns. It takes microseconds, unless the machine is busy.
const PATIENCE_NS: u64 = 30_000_000_000;
/// Pause between two checks whether the device has finished.
const LOOK: std::time::Duration = std::time::Duration::from_micros(20);
/// Time that a device gets between two moves for copies that have waited for them, ns.
const TURN_NS: u64 = 200_000;

/// One open device.
pub(crate) struct Doorbell {
    /// Number of the device in this process.
    pub id: u64,
    pub bell: Bell,
    /// Wakes the device.
    pub wake: Arc<Known>,
    /// True if the device was given the process's address space.
    pub copies: bool,
    /// The connection, which hangs up when the virtual layer goes.
    pub socket: Arc<Known>,
}

impl Doorbell {
    fn is_gone(&self) -> bool {
        use rustix::event::{PollFd, PollFlags, poll};
        let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
        // A program that has closed the connection has ended the session.
        self.socket.get().map_or(true, |socket| {
            let mut fds = [PollFd::from_borrowed_fd(socket, PollFlags::RDHUP)];
            poll(&mut fds, Some(&now)).is_ok_and(|n| n > 0)
        })
    }

    fn set_away(&self, away: u32) {
        if self.bell.set_away(away) {
            let _ = wake(&self.wake);
        }
    }
}

/// Waits until `done` returns true. Returns false if that takes too long.
fn wait(mut done: impl FnMut() -> bool) -> bool {
    let until = clock_ns() + PATIENCE_NS;
    while !done() {
        if clock_ns() > until {
            return false;
        }
        std::thread::sleep(LOOK);
    }
    true
}

/// Tells all devices that pages move from now on. Returns false if one of them does not stop copying; then nothing may
/// move, and [`end_move`] must still be called.
pub(crate) fn begin_move(doors: &[Doorbell]) -> bool {
    let copying = || doors.iter().filter(|d| d.copies);
    copying().for_each(|d| d.bell.begin_move());
    copying().all(|d| wait(|| !d.bell.is_copying()) || d.is_gone())
}

/// Tells all devices that pages have moved. If a device has waited for that, it gets time before the next move.
pub(crate) fn end_move(doors: &[Doorbell]) {
    let mut awaited = false;
    for d in doors.iter().filter(|d| d.copies) {
        awaited |= d.bell.is_awaited();
        d.bell.end_move();
    }
    if awaited {
        let until = clock_ns() + TURN_NS;
        while clock_ns() < until {
            std::thread::sleep(LOOK);
        }
    }
}

/// Tells all devices to leave the memory of MRs alone. Returns false if one of them does not.
pub(crate) fn leave(doors: &[Doorbell]) -> bool {
    // Each time has a number of its own; 0 means not away.
    static TIMES: AtomicU32 = AtomicU32::new(0);
    let away = TIMES.fetch_add(1, Ordering::Relaxed) | 1 << 31;
    doors.iter().for_each(|d| d.set_away(away));
    doors.iter().all(|d| wait(|| d.bell.is_left_alone(away) || d.is_gone()))
}

/// Tells all devices that the memory of MRs is back.
pub(crate) fn come_back(doors: &[Doorbell]) {
    doors.iter().for_each(|d| d.set_away(0));
}
