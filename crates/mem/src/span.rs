//! Checked windows of shared memory.

use std::any::Any;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};

use zerocopy::{FromBytes, IntoBytes};

/// A window of a live mapping that others may write at any time.
///
/// # Panics
/// Every method panics if its range leaves the window: ranges are computed by this side, never taken
/// from the shared bytes, so leaving is a bug here. Use [`Span::sub`] to check a range that came from
/// outside.
#[derive(Clone)]
pub struct Span {
    ptr: NonNull<u8>,
    len: usize,
    owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: the pointer stays valid as long as the owner, which is Send and Sync; every access goes
// through volatile or atomic operations, so races between threads have no Rust-level data race on
// references.
unsafe impl Send for Span {}
// SAFETY: as for Send.
unsafe impl Sync for Span {}

impl Span {
    /// A window of `len` bytes at `ptr`.
    ///
    /// # Safety
    /// `ptr..ptr + len` must be mapped readable and writable for as long as `owner` lives, and nothing
    /// may hold a Rust reference into it.
    pub unsafe fn new(ptr: NonNull<u8>, len: usize, owner: Arc<dyn Any + Send + Sync>) -> Self {
        Span { ptr, len, owner }
    }

    pub(crate) fn owner(&self) -> &(dyn Any + Send + Sync) {
        &*self.owner
    }

    /// True if the mapping has no other window at this moment: it goes with this one.
    pub fn is_last(&self) -> bool {
        Arc::strong_count(&self.owner) == 1
    }

    /// Fresh zeroed private memory, for tests and in-process rings.
    pub fn anonymous(len: usize) -> Self {
        let words: Box<[AtomicU64]> = (0..len.div_ceil(8)).map(|_| AtomicU64::new(0)).collect();
        let owner: Arc<Box<[AtomicU64]>> = Arc::new(words);
        let ptr = NonNull::new(owner.as_ptr().cast_mut().cast::<u8>()).unwrap_or(NonNull::dangling());
        // SAFETY: the boxed atomics are interior-mutable, live as long as `owner`, and are never
        // referenced again but through this pointer.
        unsafe { Span::new(ptr, len, owner) }
    }

    /// Bytes in the window.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True for a window of no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Address of the first byte, for placing it in another address space's table.
    pub fn addr(&self) -> usize {
        self.ptr.as_ptr() as usize
    }

    /// The window `[off, off + len)` of this one; `None` if it leaves it.
    pub fn sub(&self, off: u64, len: u64) -> Option<Span> {
        let end = off.checked_add(len)?;
        if end > self.len as u64 {
            return None;
        }
        // SAFETY: off <= self.len, so the result is within the mapping or one past its end.
        let ptr = unsafe { self.ptr.add(off as usize) };
        Some(Span { ptr, len: len as usize, owner: self.owner.clone() })
    }

    /// Raw address of `[off, off + len)`, for [`crate::transfer`] only.
    #[inline]
    pub(crate) fn at(&self, off: usize, len: usize) -> *mut u8 {
        assert!(off.checked_add(len).is_some_and(|end| end <= self.len), "span range {off}+{len} of {}", self.len);
        // SAFETY: just checked to lie in the window.
        unsafe { self.ptr.as_ptr().add(off) }
    }

    fn word16(&self, off: usize) -> &AtomicU16 {
        let p = self.at(off, 2);
        assert!(p as usize % 2 == 0, "unaligned 16-bit word at {off}");
        // SAFETY: as in word32.
        unsafe { AtomicU16::from_ptr(p.cast()) }
    }

    fn word32(&self, off: usize) -> &AtomicU32 {
        let p = self.at(off, 4);
        assert!(p as usize % 4 == 0, "unaligned 32-bit word at {off}");
        // SAFETY: in the window, aligned; an atomic tolerates concurrent writers, and the borrow of
        // self keeps the mapping.
        unsafe { AtomicU32::from_ptr(p.cast()) }
    }

    fn word64(&self, off: usize) -> &AtomicU64 {
        let p = self.at(off, 8);
        assert!(p as usize % 8 == 0, "unaligned 64-bit word at {off}");
        // SAFETY: as in word32.
        unsafe { AtomicU64::from_ptr(p.cast()) }
    }

    /// Loads the 16-bit word at `off`.
    pub fn load16(&self, off: usize, order: Ordering) -> u16 {
        self.word16(off).load(order)
    }
    /// Stores the 16-bit word at `off`.
    pub fn store16(&self, off: usize, v: u16, order: Ordering) {
        self.word16(off).store(v, order);
    }
    /// Loads the 32-bit word at `off`.
    pub fn load32(&self, off: usize, order: Ordering) -> u32 {
        self.word32(off).load(order)
    }
    /// Stores the 32-bit word at `off`.
    pub fn store32(&self, off: usize, v: u32, order: Ordering) {
        self.word32(off).store(v, order);
    }
    /// Loads the 64-bit word at `off`.
    pub fn load64(&self, off: usize, order: Ordering) -> u64 {
        self.word64(off).load(order)
    }
    /// Stores the 64-bit word at `off`.
    pub fn store64(&self, off: usize, v: u64, order: Ordering) {
        self.word64(off).store(v, order);
    }
    /// Ors `v` into the 64-bit word at `off` and returns what was there.
    pub fn or64(&self, off: usize, v: u64, order: Ordering) -> u64 {
        self.word64(off).fetch_or(v, order)
    }
    /// Replaces the 64-bit word at `off` and returns what was there.
    pub fn swap64(&self, off: usize, v: u64, order: Ordering) -> u64 {
        self.word64(off).swap(v, order)
    }

    /// Asks for the cache line of a byte that is about to be read; nothing if the byte is not in the window.
    #[inline]
    pub(crate) fn prefetch(&self, off: usize) {
        #[cfg(target_arch = "x86_64")]
        if off < self.len() {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            // SAFETY: in the window. It reads nothing and never faults.
            unsafe { _mm_prefetch::<_MM_HINT_T0>((self.addr() as *const i8).add(off)) };
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = off;
    }

    /// Asks for the cache line of a byte that is about to be written, so that no other core has it then; nothing if the
    /// byte is not in the window.
    #[inline]
    pub(crate) fn prefetch_to_write(&self, off: usize) {
        #[cfg(target_arch = "x86_64")]
        if off < self.len() {
            let at = self.addr() as *const i8;
            // SAFETY: in the window. It changes nothing and never faults; processors that do not know it do nothing.
            unsafe {
                std::arch::asm!("prefetchw [{}]", in(reg) at.add(off), options(nostack, preserves_flags, readonly))
            };
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = off;
    }

    /// Copies bytes at `off` out, once, into private memory.
    #[inline]
    pub fn read(&self, off: usize, dst: &mut [u8]) {
        let src = self.at(off, dst.len());
        // SAFETY: source checked, destination private and exclusive. A concurrent writer can tear the copy; its reader
        // validates the private copy.
        unsafe { crate::transfer::copy_raw(dst.as_mut_ptr(), src, dst.len()) };
    }

    /// Copies one plain value out.
    #[inline]
    pub fn read_obj<T: FromBytes + IntoBytes>(&self, off: usize) -> T {
        let mut v = T::new_zeroed();
        self.read(off, v.as_mut_bytes());
        v
    }

    /// Copies `len` bytes at `off` to `dst`, which others may write too.
    ///
    /// # Safety
    /// `dst..dst + len` must be memory of this process that may be written, and outside of this window.
    pub unsafe fn copy_to(&self, off: usize, dst: *mut u8, len: usize) {
        // SAFETY: source checked, destination by the contract.
        unsafe { crate::transfer::copy_raw(dst, self.at(off, len), len) };
    }

    /// Copies `len` bytes at `src`, which others may write meanwhile, to `off`.
    ///
    /// # Safety
    /// `src..src + len` must be memory of this process that may be read, and outside of this window.
    pub unsafe fn copy_from(&self, off: usize, src: *const u8, len: usize) {
        // SAFETY: destination checked, source by the contract.
        unsafe { crate::transfer::copy_raw(self.at(off, len), src, len) };
    }

    /// Copies private bytes in, in address order.
    #[inline]
    pub fn write(&self, off: usize, src: &[u8]) {
        let dst = self.at(off, src.len());
        // SAFETY: destination checked; the source is a private slice.
        unsafe { crate::transfer::copy_raw(dst, src.as_ptr(), src.len()) };
    }
}

impl std::fmt::Debug for Span {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Span({} bytes)", self.len)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn sub_checks_ranges_from_outside() {
        let s = Span::anonymous(100);
        assert_eq!(s.sub(90, 10).unwrap().len(), 10);
        assert!(s.sub(90, 11).is_none());
        assert!(s.sub(u64::MAX, 2).is_none());
        assert!(s.sub(100, 0).unwrap().is_empty());
    }

    #[test]
    fn bytes_and_words_are_the_same_memory() {
        let s = Span::anonymous(64);
        s.write(8, &[1, 0, 0, 0, 2, 0, 0, 0]);
        assert_eq!(s.load32(12, Ordering::Relaxed), 2);
        assert_eq!(s.or64(8, 4, Ordering::Relaxed), 0x2_0000_0001);
        let mut b = [0; 8];
        s.read(8, &mut b);
        assert_eq!(b, [5, 0, 0, 0, 2, 0, 0, 0]);
        s.store16(14, 0x0102, Ordering::Relaxed);
        assert_eq!((s.load16(14, Ordering::Relaxed), s.load32(12, Ordering::Relaxed)), (0x0102, 0x0102_0002));
    }
}
