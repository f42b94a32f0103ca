//! The heap of the library: separate from the program's, and with a reserve.
//!
//! The library's own data never shares a page with the program's `malloc`. So whatever happens to pages that the
//! program registers, moves or gives back, the library can use its data meanwhile; and a program that writes beyond its
//! own blocks does not reach it as easily.
//!
//! When the kernel has no more memory for the process (`RLIMIT_AS`, cgroups without overcommit), an allocation takes
//! from the reserve, and [`Heap::is_low`] is true until memory can be had again: calls that would make something new
//! then fail with `ENOMEM` before they begin. Rust code cannot go on after a failed allocation, so this is what keeps
//! the library from ending the program.
//!
//! A fork holds the heap, by pthread_atfork handlers that [`set_up`] installs, so that the child finds it whole.
//!
//! With `UNIRDMA_HEAP=system`, or under a sanitizer, which knows only the system's heap, the library uses the system's
//! heap.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};

use dlmalloc::Dlmalloc;

/// Size of the reserve, bytes. One call allocates less, and no call that allocates begins while memory is low.
const RESERVE: usize = 512 << 10;
/// Memory is taken from the system in pieces of at least this size, bytes.
const PIECE: usize = 256 << 10;

/// Source of the heap's memory: mappings of its own, and the reserve.
struct Pages {
    /// The reserve; null if there is none, or it is in use.
    reserve: AtomicPtr<u8>,
    low: AtomicBool,
}

fn map(len: usize) -> *mut u8 {
    // SAFETY: a fresh mapping at an address of the kernel's choice.
    let p = unsafe {
        let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        libc::mmap(std::ptr::null_mut(), len, prot, flags, -1, 0)
    };
    if p == libc::MAP_FAILED { std::ptr::null_mut() } else { p.cast() }
}

impl Pages {
    /// Makes the reserve if there is none. Returns false if there is no memory for it.
    fn refill(&self) -> bool {
        if self.reserve.load(Ordering::Acquire).is_null() {
            let p = map(RESERVE);
            if p.is_null() {
                return false;
            }
            if self.reserve.compare_exchange(std::ptr::null_mut(), p, Ordering::AcqRel, Ordering::Acquire).is_err() {
                // SAFETY: mapped above; another thread was first.
                unsafe { libc::munmap(p.cast(), RESERVE) };
            }
        }
        self.low.store(false, Ordering::Relaxed);
        true
    }
}

// SAFETY: memory that is handed out is mapped for nobody else.
unsafe impl dlmalloc::Allocator for &Pages {
    fn alloc(&self, size: usize) -> (*mut u8, usize, u32) {
        let size = size.max(PIECE);
        let p = map(size);
        if !p.is_null() {
            return (p, size, 0);
        }
        self.low.store(true, Ordering::Relaxed);
        if size > RESERVE {
            return (p, 0, 0);
        }
        let p = self.reserve.swap(std::ptr::null_mut(), Ordering::AcqRel);
        (p, if p.is_null() { 0 } else { RESERVE }, 0)
    }

    fn remap(&self, _: *mut u8, _: usize, _: usize, _: bool) -> *mut u8 {
        std::ptr::null_mut()
    }

    fn free_part(&self, ptr: *mut u8, old: usize, new: usize) -> bool {
        // SAFETY: the end of a mapping of this heap, which nothing lies in.
        unsafe { libc::munmap(ptr.wrapping_add(new).cast(), old - new) == 0 }
    }

    fn free(&self, ptr: *mut u8, size: usize) -> bool {
        // SAFETY: a mapping of this heap, which nothing lies in.
        unsafe { libc::munmap(ptr.cast(), size) == 0 }
    }

    fn can_release_part(&self, _: u32) -> bool {
        true
    }

    fn allocates_zeros(&self) -> bool {
        true
    }

    fn page_size(&self) -> usize {
        4096
    }
}

/// The heap. [`HEAP`] is the only one outside of tests.
pub struct Heap {
    inner: UnsafeCell<Dlmalloc<&'static Pages>>,
    pages: &'static Pages,
    /// The thread that uses the heap, as the address of its errno; 0 for none.
    owner: AtomicUsize,
    /// Above 0 if the owner holds the heap for a fork; above 1 if a signal handler has forked meanwhile.
    held: AtomicUsize,
    /// True if the system's heap is used instead.
    system: AtomicBool,
}

// SAFETY: `inner` is touched by the owner only.
unsafe impl Sync for Heap {}

static PAGES: Pages = Pages { reserve: AtomicPtr::new(std::ptr::null_mut()), low: AtomicBool::new(false) };
/// The library's heap.
pub static HEAP: Heap = Heap::new(&PAGES);

/// The global allocator of the library, which uses [`HEAP`].
pub struct Global;

/// The address of this thread's errno. It identifies a thread of the process, stays the same in a forked child, and
/// costs no system call.
fn me() -> usize {
    // SAFETY: always valid.
    unsafe { libc::__errno_location() as usize }
}

struct Guard<'a>(&'a Heap);

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        self.0.owner.store(0, Ordering::Release);
    }
}

impl Heap {
    const fn new(pages: &'static Pages) -> Self {
        let inner = UnsafeCell::new(Dlmalloc::new_with_allocator(pages));
        Heap { inner, pages, owner: AtomicUsize::new(0), held: AtomicUsize::new(0), system: AtomicBool::new(false) }
    }

    fn enter(&self) {
        let mut tries = 0u32;
        while self.owner.compare_exchange_weak(0, me(), Ordering::Acquire, Ordering::Relaxed).is_err() {
            tries += 1;
            // The owner needs less than a microsecond, unless it lost its core.
            match tries {
                0..=50 => std::hint::spin_loop(),
                // SAFETY: plain system call.
                _ => drop(unsafe { libc::usleep(50) }),
            }
        }
    }

    fn with<T>(&self, f: impl FnOnce(&mut Dlmalloc<&'static Pages>) -> T) -> T {
        self.enter();
        let guard = Guard(self);
        // SAFETY: one owner at a time, and `f` of this module calls nothing that allocates.
        let r = f(unsafe { &mut *self.inner.get() });
        drop(guard);
        r
    }

    /// True while there is no more memory, and the reserve is in use or missing. Checks whether there is memory again.
    pub fn is_low(&self) -> bool {
        self.pages.low.load(Ordering::Relaxed) && !self.pages.refill()
    }

    /// Makes the reserve when a device is opened.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn reserve(&self) -> crate::Result<()> {
        let done = self.system.load(Ordering::Relaxed) || self.pages.refill();
        if done { Ok(()) } else { Err(libc::ENOMEM) }
    }

    /// Holds the heap for a fork. This thread may be in the heap already, if a signal handler forks; then it goes on
    /// there in the child, too.
    fn hold(&self) {
        if self.owner.load(Ordering::Relaxed) != me() {
            self.enter();
            self.held.store(1, Ordering::Relaxed);
        } else if self.held.load(Ordering::Relaxed) > 0 {
            self.held.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn give_back(&self) {
        if self.held.load(Ordering::Relaxed) > 0 && self.held.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.owner.store(0, Ordering::Release);
        }
    }
}

extern "C" fn before_fork() {
    HEAP.hold();
}

/// Called after a fork, in the parent and in the child.
extern "C" fn after_fork() {
    HEAP.give_back();
}

/// Chooses the heap, and makes forks hold it. Must be called when the library is loaded, before anything is allocated
/// and before other fork handlers are installed, because those may allocate.
pub extern "C" fn set_up() {
    // SAFETY: C strings; what is found is only compared with NULL.
    let system = unsafe {
        let wish = libc::getenv(c"UNIRDMA_HEAP".as_ptr());
        let asked = !wish.is_null() && libc::strcmp(wish, c"system".as_ptr()) == 0;
        asked || !libc::dlsym(libc::RTLD_DEFAULT, c"__sanitizer_set_death_callback".as_ptr()).is_null()
    };
    HEAP.system.store(system, Ordering::Relaxed);
    if !system {
        // The first handlers that are installed run last before a fork and first after it.
        // SAFETY: functions of this library, which stays loaded.
        unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(after_fork)) };
    }
}

// SAFETY: blocks come from one heap and go back to it: `system` never changes once something was allocated.
unsafe impl GlobalAlloc for Global {
    unsafe fn alloc(&self, l: Layout) -> *mut u8 {
        if HEAP.system.load(Ordering::Relaxed) {
            // SAFETY: by the caller's contract.
            return unsafe { System.alloc(l) };
        }
        // SAFETY: by the caller's contract.
        HEAP.with(|h| unsafe { h.malloc(l.size(), l.align()) })
    }

    unsafe fn dealloc(&self, p: *mut u8, l: Layout) {
        if HEAP.system.load(Ordering::Relaxed) {
            // SAFETY: by the caller's contract.
            return unsafe { System.dealloc(p, l) };
        }
        // SAFETY: by the caller's contract.
        HEAP.with(|h| unsafe { h.free(p, l.size(), l.align()) });
    }

    unsafe fn alloc_zeroed(&self, l: Layout) -> *mut u8 {
        if HEAP.system.load(Ordering::Relaxed) {
            // SAFETY: by the caller's contract.
            return unsafe { System.alloc_zeroed(l) };
        }
        // SAFETY: by the caller's contract.
        HEAP.with(|h| unsafe { h.calloc(l.size(), l.align()) })
    }

    unsafe fn realloc(&self, p: *mut u8, l: Layout, size: usize) -> *mut u8 {
        if HEAP.system.load(Ordering::Relaxed) {
            // SAFETY: by the caller's contract.
            return unsafe { System.realloc(p, l, size) };
        }
        // SAFETY: by the caller's contract.
        HEAP.with(|h| unsafe { h.realloc(p, l.size(), l.align(), size) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heap() -> &'static Heap {
        let pages =
            Box::leak(Box::new(Pages { reserve: AtomicPtr::new(std::ptr::null_mut()), low: AtomicBool::new(false) }));
        Box::leak(Box::new(Heap::new(pages)))
    }

    /// Runs `f` in a child, where limits and forks do no harm. Returns the child's wait status, which is 0 if `f`
    /// returned true.
    fn in_child(f: impl FnOnce() -> bool) -> i32 {
        // SAFETY: the child runs `f`, which uses a heap of its own, and ends.
        unsafe {
            let child = libc::fork();
            if child == 0 {
                libc::_exit(i32::from(!f()));
            }
            let mut status = -1;
            libc::waitpid(child, &mut status, 0);
            status
        }
    }

    fn limit_address_space(more: u64) {
        let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
        let pages: u64 = statm.split(' ').next().unwrap().parse().unwrap();
        let limit = libc::rlimit { rlim_cur: pages * 4096 + more, rlim_max: libc::RLIM_INFINITY };
        // SAFETY: plain system call.
        unsafe { libc::setrlimit(libc::RLIMIT_AS, &limit) };
    }

    #[test]
    fn blocks_keep_what_is_in_them_and_share_no_page_with_the_systems_heap() {
        let heap = heap();
        let theirs = Box::new(0u64);
        let mut blocks = Vec::new();
        for i in 0..5000usize {
            let size = 1 + i * 37 % 3000;
            // SAFETY: as many bytes as were asked for.
            let p = heap.with(|h| unsafe { h.malloc(size, 8) });
            assert!(!p.is_null() && p as usize / 4096 != std::ptr::from_ref(&*theirs) as usize / 4096);
            // SAFETY: as above.
            unsafe { p.write_bytes(i as u8, size) };
            blocks.push((p, size, i as u8));
            if i % 3 == 0 {
                let (p, size, tag) = blocks.swap_remove(i * 7 % blocks.len());
                // SAFETY: a live block of that size.
                assert!(unsafe { std::slice::from_raw_parts(p, size) }.iter().all(|&b| b == tag));
                // SAFETY: as above; it is not used afterwards.
                heap.with(|h| unsafe { h.free(p, size, 8) });
            }
        }
        for (p, size, tag) in blocks {
            // SAFETY: a live block of that size.
            assert!(unsafe { std::slice::from_raw_parts(p, size) }.iter().all(|&b| b == tag));
        }
    }

    #[test]
    fn without_memory_the_reserve_serves_until_there_is_memory_again() {
        let status = in_child(|| {
            let heap = heap();
            heap.reserve().unwrap();
            limit_address_space(64 << 10);
            let mut got = 0;
            while !heap.is_low() && got < 1000 {
                // SAFETY: an allocation that is not used.
                got += usize::from(!heap.with(|h| unsafe { h.malloc(8000, 8) }).is_null());
            }
            // The call that ran out of memory, and others like it, were still served.
            // SAFETY: as above.
            let served = (0..40).all(|_| !heap.with(|h| unsafe { h.malloc(8000, 8) }).is_null());
            limit_address_space(1 << 30);
            heap.pages.low.load(Ordering::Relaxed) && got > 0 && served && !heap.is_low() && heap.reserve().is_ok()
        });
        assert_eq!(status, 0);
    }

    #[test]
    fn a_child_finds_the_heap_whole_whatever_other_threads_do() {
        set_up();
        let stop = AtomicBool::new(false);
        std::thread::scope(|s| {
            for _ in 0..2 {
                s.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        // SAFETY: a block that is freed at once.
                        HEAP.with(|h| unsafe {
                            let p = h.malloc(100, 8);
                            h.free(p, 100, 8);
                        });
                    }
                });
            }
            let statuses: Vec<i32> = (0..200)
                .map(|_| {
                    in_child(|| {
                        // SAFETY: alarms end a child that hangs.
                        unsafe { libc::alarm(10) };
                        // SAFETY: the block is never used.
                        !HEAP.with(|h| unsafe { h.malloc(100, 8) }).is_null()
                    })
                })
                .collect();
            stop.store(true, Ordering::Relaxed);
            assert!(statuses.iter().all(|&s| s == 0), "{statuses:?}");
        });
    }

    #[test]
    fn a_fork_within_an_allocation_does_not_hang() {
        let heap = heap();
        heap.enter();
        heap.hold();
        heap.give_back();
        assert_ne!(heap.owner.load(Ordering::Relaxed), 0, "still in the allocation that the signal came into");
        drop(Guard(heap));
        heap.hold();
        heap.hold();
        heap.give_back();
        assert_ne!(heap.owner.load(Ordering::Relaxed), 0, "the outer fork still holds it");
        heap.give_back();
        assert_eq!(heap.owner.load(Ordering::Relaxed), 0);
    }
}
