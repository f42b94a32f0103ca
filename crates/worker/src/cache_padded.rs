//! Values that threads share, in cache lines of their own.

use std::ops::Deref;

/// A value that one thread changes often while others read it, in cache lines of its own. Two lines, since processors
/// fetch lines in pairs.
#[derive(Default)]
#[repr(align(128))]
pub(crate) struct CachePadded<T>(T);

impl<T> CachePadded<T> {
    pub fn new(value: T) -> Self {
        CachePadded(value)
    }
}

impl<T> Deref for CachePadded<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.0
    }
}
