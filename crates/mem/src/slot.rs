//! A place for one value that threads hand to each other.

use std::marker::PhantomData;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};

/// A place for one shared value. No thread waits for another there, and nothing is allocated or freed. A thread may
/// lose its core at any point, for seconds, without delaying others that use the place.
pub struct Slot<T>(AtomicPtr<T>, PhantomData<Arc<T>>);

impl<T> Default for Slot<T> {
    fn default() -> Self {
        Slot(AtomicPtr::new(null_mut()), PhantomData)
    }
}

impl<T> Slot<T> {
    /// True if nothing is in it.
    pub fn is_empty(&self) -> bool {
        self.0.load(Ordering::Relaxed).is_null()
    }

    /// Puts a value in, or empties the place, and returns the earlier value.
    pub fn swap(&self, new: Option<Arc<T>>) -> Option<Arc<T>> {
        let new = new.map_or(null_mut(), |value| Arc::into_raw(value).cast_mut());
        let old = self.0.swap(new, Ordering::AcqRel);
        // SAFETY: what is in the slot came from `Arc::into_raw`, and this swap has taken it out for this caller alone.
        (!old.is_null()).then(|| unsafe { Arc::from_raw(old) })
    }
}

impl<T> Drop for Slot<T> {
    fn drop(&mut self) {
        self.swap(None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_there_once_and_goes_with_its_slot() {
        let value = Arc::new(7);
        let slot = Slot::default();
        assert!(slot.is_empty() && slot.swap(Some(value.clone())).is_none());
        assert_eq!((Arc::strong_count(&value), slot.is_empty()), (2, false));
        let threads: Vec<_> = std::thread::scope(|s| {
            let took = || s.spawn(|| slot.swap(None).is_some());
            [took(), took(), took()].into_iter().map(|t| t.join().unwrap()).collect()
        });
        assert_eq!(threads.iter().filter(|&&took| took).count(), 1);
        assert_eq!(Arc::strong_count(&value), 1);
        slot.swap(Some(value.clone()));
        drop(slot);
        assert_eq!(Arc::strong_count(&value), 1);
    }
}
