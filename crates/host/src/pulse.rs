//! Whether a thread works or waits, for whoever looks after it (`worker::watchdog`).

use std::sync::atomic::{AtomicU64, Ordering};

use unirdma_device::now_ns;

/// Since when a thread has worked, nanoseconds; 0 while it waits.
#[derive(Default)]
pub(crate) struct Pulse(AtomicU64);

impl Pulse {
    /// It begins to work.
    pub fn begin(&self) {
        self.0.store(now_ns(), Ordering::Relaxed);
    }

    /// It waits from now on.
    pub fn rest(&self) {
        self.0.store(0, Ordering::Relaxed);
    }

    /// Since when it has worked, nanoseconds; 0 while it waits.
    pub fn since_ns(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
