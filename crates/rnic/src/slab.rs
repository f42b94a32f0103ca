//! A table whose handles go stale: a handle names one object, never its successor in the same slot.

const INDEX_BITS: u32 = 20;
const INDEX_MASK: u32 = (1 << INDEX_BITS) - 1;

struct Entry<T> {
    gen_bits: u32,
    value: Option<T>,
}

/// Values by 32-bit handle: 20 bits of slot, 12 bits of generation.
pub(crate) struct Slab<T> {
    entries: Vec<Entry<T>>,
    free: Vec<u32>,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Slab { entries: Vec::new(), free: Vec::new() }
    }
}

impl<T> Slab<T> {
    /// Stores what `make` returns for its handle; `None` when 2^20 slots are in use.
    pub(crate) fn insert_with(&mut self, make: impl FnOnce(u32) -> T) -> Option<u32> {
        let index = match self.free.pop() {
            Some(i) => i,
            None if self.entries.len() <= INDEX_MASK as usize => {
                self.entries.push(Entry { gen_bits: 0, value: None });
                self.entries.len() as u32 - 1
            }
            None => return None,
        };
        let e = &mut self.entries[index as usize];
        e.gen_bits = (e.gen_bits + 1) & (u32::MAX >> INDEX_BITS);
        let handle = e.gen_bits << INDEX_BITS | index;
        e.value = Some(make(handle));
        Some(handle)
    }

    fn live(&self, handle: u32) -> Option<&Entry<T>> {
        self.entries.get((handle & INDEX_MASK) as usize).filter(|e| e.gen_bits == handle >> INDEX_BITS)
    }

    #[inline]
    pub(crate) fn get(&self, handle: u32) -> Option<&T> {
        self.live(handle)?.value.as_ref()
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, handle: u32) -> Option<&mut T> {
        let e = self.entries.get_mut((handle & INDEX_MASK) as usize)?;
        if e.gen_bits == handle >> INDEX_BITS { e.value.as_mut() } else { None }
    }

    /// Handle and value in slot `index`, whatever its generation.
    #[inline]
    pub(crate) fn in_slot(&self, index: u32) -> Option<(u32, &T)> {
        let e = self.entries.get(index as usize)?;
        Some((e.gen_bits << INDEX_BITS | index, e.value.as_ref()?))
    }

    /// Slot of a handle.
    #[inline]
    pub(crate) fn slot_of(handle: u32) -> u32 {
        handle & INDEX_MASK
    }

    pub(crate) fn remove(&mut self, handle: u32) -> Option<T> {
        let v = self.get_mut(handle).is_some().then(|| self.entries[(handle & INDEX_MASK) as usize].value.take())?;
        self.free.push(handle & INDEX_MASK);
        v
    }

    /// Handles and values that are in use.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        self.entries
            .iter()
            .enumerate()
            .filter_map(|(i, e)| e.value.as_ref().map(|v| (e.gen_bits << INDEX_BITS | i as u32, v)))
    }

    /// Values that are in use.
    pub(crate) fn values_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.entries.iter_mut().filter_map(|e| e.value.as_mut())
    }

    /// Handles whose value satisfies `f`.
    pub(crate) fn handles(&self, f: impl Fn(&T) -> bool) -> Vec<u32> {
        self.iter().filter(|(_, v)| f(v)).map(|(h, _)| h).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_dies_with_its_object() {
        let mut s = Slab::default();
        let a = s.insert_with(|_| 'a').unwrap();
        assert_eq!(s.remove(a), Some('a'));
        assert_eq!(s.remove(a), None);
        let b = s.insert_with(|_| 'b').unwrap();
        assert_eq!(a & INDEX_MASK, b & INDEX_MASK, "the slot is used again");
        assert_eq!((s.get(a), s.get(b)), (None, Some(&'b')));
        assert_eq!(s.get(u32::MAX), None);
    }
}
