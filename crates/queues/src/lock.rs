//! The lock of a queue. With a thread domain, one thread uses the queue at a time, and locking needs no atomic
//! exchange.

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A value behind a mutex, or behind the program's promise that no two threads use it at a time (`ibv_alloc_td(3)`).
pub struct QueueLock<T> {
    alone: bool,
    /// The value is in use, under that promise. It is only a flag: a thread that breaks the promise waits if it sees
    /// the flag.
    used: AtomicBool,
    mutex: Mutex<()>,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached through `Held` alone, of which there is one at a time: by the mutex, or by the promise.
unsafe impl<T: Send> Sync for QueueLock<T> {}

impl<T> QueueLock<T> {
    /// `alone`: the program promises to use it from one thread at a time.
    pub fn new(value: T, alone: bool) -> Self {
        QueueLock { alone, used: AtomicBool::new(false), mutex: Mutex::new(()), value: UnsafeCell::new(value) }
    }

    /// Waits until no other thread uses it.
    #[inline]
    pub fn lock(&self) -> Held<'_, T> {
        if !self.alone {
            return Held { of: self, guard: Some(self.mutex.lock().unwrap_or_else(PoisonError::into_inner)) };
        }
        while self.used.load(Ordering::Acquire) {
            std::hint::spin_loop();
        }
        self.used.store(true, Ordering::Relaxed);
        Held { of: self, guard: None }
    }
}

/// The value, in use.
pub struct Held<'a, T> {
    of: &'a QueueLock<T>,
    guard: Option<MutexGuard<'a, ()>>,
}

impl<T> Deref for Held<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: nobody else holds it, see `QueueLock`.
        unsafe { &*self.of.value.get() }
    }
}

impl<T> DerefMut for Held<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above.
        unsafe { &mut *self.of.value.get() }
    }
}

impl<T> Drop for Held<'_, T> {
    #[inline]
    fn drop(&mut self) {
        if self.guard.is_none() {
            self.of.used.store(false, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mutex_keeps_threads_apart_and_a_promise_is_taken() {
        for alone in [false, true] {
            let value = QueueLock::new(0u64, alone);
            let threads = if alone { 1 } else { 4 };
            std::thread::scope(|s| {
                for _ in 0..threads {
                    s.spawn(|| (0..10_000).for_each(|_| *value.lock() += 1));
                }
            });
            assert_eq!(*value.lock(), 10_000 * threads);
        }
    }
}
