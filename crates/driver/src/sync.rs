//! Mutexes of the control path. ThreadSanitizer knows the C library's mutexes, but not Rust's. It is told of these, so
//! that it reports no false races in programs that run under it.

use std::ffi::c_void;
use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

type Note = unsafe extern "C" fn(*const c_void);

/// `__tsan_acquire` and `__tsan_release`, if the program has ThreadSanitizer in it.
fn sanitizer() -> Option<(Note, Note)> {
    static NOTES: OnceLock<Option<(Note, Note)>> = OnceLock::new();
    *NOTES.get_or_init(|| {
        let find = |name: &std::ffi::CStr| {
            // SAFETY: looks a name up in what is loaded.
            let at = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
            // SAFETY: both functions take the address of the lock and return nothing (sanitizer/tsan_interface.h).
            (!at.is_null()).then(|| unsafe { std::mem::transmute::<*mut c_void, Note>(at) })
        };
        Some((find(c"__tsan_acquire")?, find(c"__tsan_release")?))
    })
}

/// A locked mutex.
pub(crate) struct Guard<'a, T> {
    mutex: &'a Mutex<T>,
    value: MutexGuard<'a, T>,
}

/// Locks a mutex, whatever happened to earlier holders: every critical section leaves valid state.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> Guard<'_, T> {
    let value = mutex.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((acquire, _)) = sanitizer() {
        // SAFETY: only the address counts.
        unsafe { acquire(std::ptr::from_ref(mutex).cast()) };
    }
    Guard { mutex, value }
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

impl<T> Drop for Guard<'_, T> {
    fn drop(&mut self) {
        if let Some((_, release)) = sanitizer() {
            // SAFETY: only the address counts.
            unsafe { release(std::ptr::from_ref(self.mutex).cast()) };
        }
    }
}
