//! Tables of objects. A handle names one object, and never a later one, however many objects are made.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::marker::PhantomData;

pub(crate) use unirdma_formats::ByNumber;

const INDEX_BITS: u32 = 24;
const INDEX_MASK: u64 = (1 << INDEX_BITS) - 1;

/// Names an object of a [`Slab`]: 24 bits are the number of the slot, and 40 bits count the objects that the slot has
/// had. 40 bits are never used up.
pub(crate) struct Handle<T>(u64, PhantomData<fn() -> T>);

impl<T> Handle<T> {
    /// A handle that no object ever has.
    pub const NONE: Self = Handle(0, PhantomData);

    /// The handle with this number.
    pub fn from_raw(raw: u64) -> Self {
        Handle(raw, PhantomData)
    }

    /// Its number.
    pub fn raw(self) -> u64 {
        self.0
    }

    fn index(self) -> usize {
        (self.0 & INDEX_MASK) as usize
    }
}

impl<T> Clone for Handle<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Handle<T> {}
impl<T> Default for Handle<T> {
    fn default() -> Self {
        Self::NONE
    }
}
impl<T> PartialEq for Handle<T> {
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}
impl<T> Eq for Handle<T> {}
impl<T> PartialOrd for Handle<T> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl<T> Ord for Handle<T> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.cmp(&other.0)
    }
}
impl<T> Hash for Handle<T> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.hash(state);
    }
}
impl<T> fmt::Debug for Handle<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0 & INDEX_MASK, self.0 >> INDEX_BITS)
    }
}

struct Entry<T> {
    generation: u64,
    value: Option<T>,
}

impl<T> Entry<T> {
    fn handle<K>(&self, index: usize) -> Handle<K> {
        Handle::from_raw(self.generation << INDEX_BITS | index as u64)
    }
}

/// Values by [`Handle`]. Handles are of type `Handle<K>`, so that code that only passes them on need not know `T`.
pub(crate) struct Slab<T, K = T> {
    entries: Vec<Entry<T>>,
    free: Vec<usize>,
    kind: PhantomData<fn() -> K>,
}

impl<T, K> Default for Slab<T, K> {
    fn default() -> Self {
        Slab { entries: Vec::new(), free: Vec::new(), kind: PhantomData }
    }
}

impl<T, K> Slab<T, K> {
    /// Stores a value; `None` when 2^24 slots are in use.
    pub(crate) fn insert(&mut self, value: T) -> Option<Handle<K>> {
        let index = match self.free.pop() {
            Some(i) => i,
            None if self.entries.len() <= INDEX_MASK as usize => {
                self.entries.push(Entry { generation: 0, value: None });
                self.entries.len() - 1
            }
            None => return None,
        };
        let e = &mut self.entries[index];
        e.generation += 1;
        e.value = Some(value);
        Some(e.handle(index))
    }

    #[inline]
    pub(crate) fn get(&self, handle: Handle<K>) -> Option<&T> {
        let e = self.entries.get(handle.index())?;
        if e.generation == handle.0 >> INDEX_BITS { e.value.as_ref() } else { None }
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, handle: Handle<K>) -> Option<&mut T> {
        let e = self.entries.get_mut(handle.index())?;
        if e.generation == handle.0 >> INDEX_BITS { e.value.as_mut() } else { None }
    }

    pub(crate) fn remove(&mut self, handle: Handle<K>) -> Option<T> {
        self.get(handle)?;
        self.free.push(handle.index());
        self.entries[handle.index()].value.take()
    }

    /// The number of further values that it has room for.
    pub(crate) fn room(&self) -> usize {
        self.free.len() + (INDEX_MASK as usize + 1 - self.entries.len())
    }

    /// Handles and values that are in use.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (Handle<K>, &T)> {
        self.entries.iter().enumerate().filter_map(|(i, e)| e.value.as_ref().map(|v| (e.handle(i), v)))
    }

    /// Handles whose value satisfies `f`.
    pub(crate) fn handles(&self, f: impl Fn(&T) -> bool) -> Vec<Handle<K>> {
        self.iter().filter(|(_, v)| f(v)).map(|(h, _)| h).collect()
    }
}

/// A table of further values for the objects of a [`Slab`], by the same handles.
pub(crate) struct SideTable<K, V>(Vec<Option<(Handle<K>, V)>>);

impl<K, V> Default for SideTable<K, V> {
    fn default() -> Self {
        SideTable(Vec::new())
    }
}

impl<K, V> SideTable<K, V> {
    pub(crate) fn insert(&mut self, handle: Handle<K>, value: V) {
        if self.0.len() <= handle.index() {
            self.0.resize_with(handle.index() + 1, || None);
        }
        self.0[handle.index()] = Some((handle, value));
    }

    #[inline]
    pub(crate) fn get(&self, handle: Handle<K>) -> Option<&V> {
        let (h, v) = self.0.get(handle.index())?.as_ref()?;
        (*h == handle).then_some(v)
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, handle: Handle<K>) -> Option<&mut V> {
        let (h, v) = self.0.get_mut(handle.index())?.as_mut()?;
        (*h == handle).then_some(v)
    }

    pub(crate) fn remove(&mut self, handle: Handle<K>) -> Option<V> {
        self.0.get_mut(handle.index())?.take_if(|e| e.0 == handle).map(|e| e.1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_dies_with_its_object() {
        let mut s: Slab<char> = Slab::default();
        let a = s.insert('a').unwrap();
        assert_eq!(s.remove(a), Some('a'));
        assert_eq!(s.remove(a), None);
        let b = s.insert('b').unwrap();
        assert_eq!(a.index(), b.index(), "the slot is used again");
        assert_eq!((s.get(a), s.get(b)), (None, Some(&'b')));
        assert_eq!((s.get(Handle::NONE), s.get(Handle::from_raw(u64::MAX))), (None, None));
    }

    #[test]
    fn no_object_of_a_slot_has_the_handle_of_an_earlier_one() {
        let mut s: Slab<u32> = Slab::default();
        let first = s.insert(0).unwrap();
        s.remove(first);
        for i in 1..1_000_000 {
            let h = s.insert(i).unwrap();
            assert_ne!(h, first);
            s.remove(h);
        }
    }
}
