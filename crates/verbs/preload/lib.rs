//! The library that is preloaded into every program of a container. It leads the calls of libibverbs and librdmacm to
//! our library, whatever libraries of these kinds the program brings: the loader finds the symbols of a preloaded
//! library first.
//!
//! Until such a call is made, it does nothing: it loads nothing, and its one constructor looks up four functions.
//! `build/preload.rs` makes its symbols, and builds it.
//!
//! Nothing here may panic: the code of the standard library for panics does not link without all of that library.

#![no_std]

use core::ffi::{CStr, c_char, c_int, c_void};
use core::ptr;
use core::sync::atomic::{AtomicUsize, Ordering};

mod netlink;

include!(env!("TRAMPOLINES"));

/// The name of our library, which lies beside this one.
const LIBRARY: &[u8] = b"/libibverbs.so.1\0";
const RTLD_NOW: c_int = 2;
/// The handle of the library, 1 if it cannot be loaded, 0 if nothing has tried yet.
static OURS: AtomicUsize = AtomicUsize::new(0);
const NONE: usize = 1;
/// The handle RTLD_NEXT of dlsym(3): libraries after this one.
const NEXT: *mut c_void = ptr::without_provenance_mut(usize::MAX);
const STDERR: c_int = 2;
const EOPNOTSUPP: c_int = 95;

unsafe extern "C" {
    fn dlopen(path: *const c_char, mode: c_int) -> *mut c_void;
    fn dlerror() -> *const c_char;
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
    fn dlvsym(handle: *mut c_void, name: *const c_char, version: *const c_char) -> *mut c_void;
    /// `info` is a `Dl_info`, which begins with the path of the library that contains `at`.
    fn dladdr(at: *const c_void, info: *mut [*const c_char; 4]) -> c_int;
    fn write(fd: c_int, bytes: *const c_void, length: usize) -> isize;
    fn __errno_location() -> *mut c_int;
}

/// Finds the function of a symbol, when it is called for the first time.
///
/// # Safety
/// `record` is a symbol's record: two bytes of its number in [`SLOTS`], low first; how a missing function fails (`n`:
/// null, `m`: -1, `e`: an errno value); its name; its version.
unsafe extern "C" fn resolve(record: *const u8) -> usize {
    // SAFETY: as promised; both texts end with a zero.
    let (slot, missing, name, version) = unsafe {
        let slot = usize::from(*record) | usize::from(*record.add(1)) << 8;
        let name = record.add(3).cast::<c_char>();
        let length = CStr::from_ptr(name).count_bytes();
        (slot, *record.add(2), name, name.add(length + 1))
    };
    let mut function = ptr::null_mut();
    let ours = ours();
    if ours != NONE {
        // SAFETY: a handle of dlopen(3), and two texts.
        function = unsafe { dlvsym(ptr::with_exposed_provenance_mut(ours), name, version) };
    }
    if function.is_null() {
        // The program's own library may have it.
        // SAFETY: a text.
        function = unsafe { dlsym(NEXT, name) };
    }
    let address = match (function.is_null(), missing) {
        (false, _) => function.expose_provenance(),
        (_, b'n') => fail_null as *const () as usize,
        (_, b'm') => fail_minus_one as *const () as usize,
        (_, _) => fail_errno as *const () as usize,
    };
    if let Some(slot) = SLOTS.get(slot) {
        slot.store(address, Ordering::Release);
    }
    address
}

/// The handle of our library, or [`NONE`]. The first call loads it.
fn ours() -> usize {
    let handle = OURS.load(Ordering::Acquire);
    if handle != 0 {
        return handle;
    }
    let mut path = [0u8; 4096];
    let mut info = [ptr::null(); 4];
    // SAFETY: any address is allowed. The path is a text if the call succeeds.
    let own =
        unsafe { if dladdr(ptr::from_ref(&OURS).cast(), &mut info) == 0 { c"" } else { CStr::from_ptr(info[0]) } };
    let own = own.to_bytes();
    let directory = own.get(..own.iter().rposition(|&b| b == b'/').unwrap_or(0)).unwrap_or_default();
    if directory.len() + LIBRARY.len() > path.len() {
        return NONE;
    }
    for (to, from) in path.iter_mut().zip(directory.iter().chain(LIBRARY)) {
        *to = *from;
    }
    // SAFETY: the path ends with a zero.
    let found = unsafe { dlopen(path.as_ptr().cast(), RTLD_NOW) };
    let handle = if found.is_null() { NONE } else { found.expose_provenance() };
    // Threads that call at the same time get the same handle.
    if OURS.swap(handle, Ordering::AcqRel) == 0 && found.is_null() {
        // SAFETY: dlopen(3) has failed in this thread, so there is a text.
        let why = unsafe { CStr::from_ptr(dlerror()) };
        for part in [b"unirdma: this program does not find its vRNIC: ".as_slice(), why.to_bytes(), b"\n"] {
            // SAFETY: the bytes of a slice.
            unsafe { write(STDERR, part.as_ptr().cast(), part.len()) };
        }
    }
    handle
}

/// Stand for functions that neither our library nor the program's own has.
extern "C" fn fail_null() -> *mut c_void {
    fail_errno();
    ptr::null_mut()
}

extern "C" fn fail_minus_one() -> c_int {
    fail_errno();
    -1
}

extern "C" fn fail_errno() -> c_int {
    // SAFETY: the thread's own variable.
    unsafe { *__errno_location() = EOPNOTSUPP };
    EOPNOTSUPP
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}
