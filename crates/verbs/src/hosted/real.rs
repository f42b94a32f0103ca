//! The real libibverbs: it is found, opened, and changed so that its calls and its providers' calls do not reach this
//! library.

use std::ffi::{CStr, CString, c_char, c_void};
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock};

use unirdma_verbs_abi::*;

use super::failure::{Failure, VARIABLE};
use super::{elf, redirect};
use crate::lock;
use crate::trace::trace;

/// Where the real library may be, the best first.
const PLACES: [&str; 7] = [
    "/run/unirdma-lib/real/libibverbs.so.1",
    #[cfg(target_arch = "x86_64")]
    "/usr/lib/x86_64-linux-gnu/libibverbs.so.1",
    #[cfg(target_arch = "aarch64")]
    "/usr/lib/aarch64-linux-gnu/libibverbs.so.1",
    #[cfg(target_arch = "x86_64")]
    "/lib/x86_64-linux-gnu/libibverbs.so.1",
    #[cfg(target_arch = "aarch64")]
    "/lib/aarch64-linux-gnu/libibverbs.so.1",
    "/usr/lib64/libibverbs.so.1",
    "/lib64/libibverbs.so.1",
    "/usr/lib/libibverbs.so.1",
    "/usr/local/lib/libibverbs.so.1",
];
/// A symbol that this library has and the real one does not: our file is both libraries.
const MARK: &[u8] = b"rdma_create_id";
/// The private interfaces of rdma-core's versions that are known.
const PRIVATE: [&CStr; 5] = [
    c"verbs_register_driver_34",
    c"verbs_register_driver_57",
    c"verbs_register_driver_59",
    c"verbs_register_driver_64",
    c"verbs_register_driver_65",
];

type RegMrEx = unsafe extern "C" fn(*mut ibv_pd, *mut ibv_mr_init_attr) -> *mut ibv_mr;

/// Declares [`Calls`], and how it is filled in.
macro_rules! calls {
    ($($field:ident = $name:literal $version:literal ($($arg:ty),*) $(-> $out:ty)?;)*) => {
        /// Functions of the real library.
        pub(super) struct Calls {
            $(pub $field: unsafe extern "C" fn($($arg),*) $(-> $out)?,)*
            /// Newer than the others, as is the next one.
            pub is_fork_initialized: Option<unsafe extern "C" fn() -> i32>,
            pub reg_mr_ex: Option<RegMrEx>,
        }

        impl Calls {
            fn find(handle: *mut c_void) -> Result<Calls, &'static CStr> {
                let must = |name: &'static CStr, version| find(handle, name, version).ok_or(name);
                let is_fork_initialized = find(handle, c"ibv_is_fork_initialized", c"IBVERBS_1.13");
                let reg_mr_ex = find(handle, c"ibv_reg_mr_ex", c"IBVERBS_1.15");
                // SAFETY: the functions of these names and versions have these types.
                unsafe {
                    Ok(Calls {
                        $($field: std::mem::transmute::<usize, unsafe extern "C" fn($($arg),*) $(-> $out)?>(
                            must($name, $version)?
                        ),)*
                        is_fork_initialized: is_fork_initialized
                            .map(|at| std::mem::transmute::<usize, unsafe extern "C" fn() -> i32>(at)),
                        reg_mr_ex: reg_mr_ex.map(|at| std::mem::transmute::<usize, RegMrEx>(at)),
                    })
                }
            }
        }
    };
}

calls! {
    get_device_list = c"ibv_get_device_list" c"IBVERBS_1.1" (*mut i32) -> *mut *mut ibv_device;
    free_device_list = c"ibv_free_device_list" c"IBVERBS_1.1" (*mut *mut ibv_device);
    open_device = c"ibv_open_device" c"IBVERBS_1.1" (*mut ibv_device) -> *mut ibv_context;
    close_device = c"ibv_close_device" c"IBVERBS_1.1" (*mut ibv_context) -> i32;
    query_device = c"ibv_query_device" c"IBVERBS_1.1" (*mut ibv_context, *mut ibv_device_attr) -> i32;
    query_port = c"ibv_query_port" c"IBVERBS_1.1" (*mut ibv_context, u8, *mut ibv_port_attr) -> i32;
    query_gid_ex = c"_ibv_query_gid_ex" c"IBVERBS_1.11"
        (*mut ibv_context, u32, u32, *mut ibv_gid_entry, u32, usize) -> i32;
    create_ah = c"ibv_create_ah" c"IBVERBS_1.1" (*mut ibv_pd, *mut ibv_ah_attr) -> *mut ibv_ah;
    init_ah_from_wc = c"ibv_init_ah_from_wc" c"IBVERBS_1.1"
        (*mut ibv_context, u8, *mut ibv_wc, *mut ibv_grh, *mut ibv_ah_attr) -> i32;
    resolve_mac = c"ibv_resolve_eth_l2_from_gid" c"IBVERBS_1.1"
        (*mut ibv_context, *mut ibv_ah_attr, *mut u8, *mut u16) -> i32;
    modify_qp = c"ibv_modify_qp" c"IBVERBS_1.1" (*mut ibv_qp, *mut ibv_qp_attr, i32) -> i32;
    query_qp = c"ibv_query_qp" c"IBVERBS_1.1" (*mut ibv_qp, *mut ibv_qp_attr, i32, *mut ibv_qp_init_attr) -> i32;
    destroy_qp = c"ibv_destroy_qp" c"IBVERBS_1.1" (*mut ibv_qp) -> i32;
    ack_async_event = c"ibv_ack_async_event" c"IBVERBS_1.1" (*mut ibv_async_event);
    fork_init = c"ibv_fork_init" c"IBVERBS_1.1" () -> i32;
    dontfork_range = c"ibv_dontfork_range" c"IBVERBS_1.1" (*mut c_void, usize) -> i32;
    dofork_range = c"ibv_dofork_range" c"IBVERBS_1.1" (*mut c_void, usize) -> i32;
}

/// The real library. It is never closed.
pub(super) struct Real {
    handle: usize,
    pub calls: Calls,
}

static REAL: OnceLock<Real> = OnceLock::new();
/// Held while the real library is opened, and while a device is opened with it.
pub(super) static OPENING: Mutex<()> = Mutex::new(());
/// True once the program has asked for protection of pages from copy-on-write.
pub(super) static WANTS_FORK: AtomicBool = AtomicBool::new(false);
/// Providers that have registered while there was no real library: the name of the function, and their operations.
static EARLY: Mutex<Vec<(&'static CStr, usize)>> = Mutex::new(Vec::new());

/// The real library, if it was opened.
pub(super) fn get() -> Option<&'static Real> {
    REAL.get()
}

impl Real {
    fn symbol(&self, name: &CStr, version: &CStr) -> Option<usize> {
        find(self.handle as *mut c_void, name, version)
    }

    /// Changes a library: its symbols of libibverbs become the real ones, and its files those of the lease.
    fn change(&self, object: &elf::Object) -> Result<(), i32> {
        let choose = |e: &elf::Entry| {
            redirect::function(e.name).or_else(|| {
                let version = e.version.filter(|v| v.to_bytes().starts_with(b"IBVERBS_"))?;
                self.symbol(e.name, version)
            })
        };
        // SAFETY: each function of `redirect` has the type of the C library's function of that name. Providers were
        // built for the symbols of the real library.
        let set = unsafe { object.set(choose) }?;
        trace!("{}: {set} entries changed", object.path);
        Ok(())
    }

    /// Hands a provider on that registers itself.
    fn register(&self, function: &'static CStr, operations: usize) {
        let number = function.to_bytes().rsplit(|&b| b == b'_').next().unwrap_or_default();
        let version = CString::new([b"IBVERBS_PRIVATE_", number].concat()).unwrap_or_default();
        let Some(to) = self.symbol(function, &version) else {
            return trace!("a provider for another version of libibverbs is ignored: {function:?}");
        };
        if let Some(object) = elf::containing(operations)
            && let Err(e) = self.change(&object)
        {
            return trace!("{} cannot be changed: errno {e}", object.path);
        }
        // SAFETY: the function of this name takes a provider's table of operations.
        unsafe { std::mem::transmute::<usize, unsafe extern "C" fn(usize)>(to)(operations) };
    }
}

fn find(handle: *mut c_void, name: &CStr, version: &CStr) -> Option<usize> {
    // SAFETY: looks a symbol up in a library that is open.
    let at = unsafe { libc::dlvsym(handle, name.as_ptr(), version.as_ptr()) };
    (!at.is_null()).then_some(at as usize)
}

/// A provider's call of `verbs_register_driver_NN`, from its constructor.
fn registers(function: &'static CStr, operations: *const c_void) {
    trace!("{function:?}");
    match get() {
        Some(real) => real.register(function, operations as usize),
        // The program is linked with the provider. Whether it is ever used is not known yet.
        None => lock(&EARLY).push((function, operations as usize)),
    }
}

pub unsafe extern "C" fn x_verbs_register_driver_34(operations: *const c_void) {
    registers(c"verbs_register_driver_34", operations);
}
pub unsafe extern "C" fn x_verbs_register_driver_57(operations: *const c_void) {
    registers(c"verbs_register_driver_57", operations);
}
pub unsafe extern "C" fn x_verbs_register_driver_59(operations: *const c_void) {
    registers(c"verbs_register_driver_59", operations);
}
pub unsafe extern "C" fn x_verbs_register_driver_64(operations: *const c_void) {
    registers(c"verbs_register_driver_64", operations);
}
pub unsafe extern "C" fn x_verbs_register_driver_65(operations: *const c_void) {
    registers(c"verbs_register_driver_65", operations);
}

/// Opens the real library, once.
///
/// # Errors
/// There is none, or it is not as expected.
pub(super) fn open() -> Result<&'static Real, Failure> {
    let _opening = lock(&OPENING);
    if let Some(real) = get() {
        return Ok(real);
    }
    let path = choose()?;
    let name = CString::new(path.as_os_str().as_encoded_bytes()).map_err(|_| Failure::NoLibrary)?;
    // SAFETY: a library that runs its constructors, as if the program had been linked with it.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if handle.is_null() {
        return Err(Failure::NotLoaded(path, dl_error()));
    }
    let real = prepare(handle, &path)?;
    trace!("the real library is {}", path.display());
    let real = REAL.get_or_init(|| real);
    for (function, operations) in std::mem::take(&mut *lock(&EARLY)) {
        real.register(function, operations);
    }
    if WANTS_FORK.load(Ordering::Relaxed) {
        // SAFETY: before the first device is opened, as ibv_fork_init(3) demands.
        unsafe { (real.calls.fork_init)() };
    }
    Ok(real)
}

/// Looks functions up, and changes the library.
fn prepare(handle: *mut c_void, path: &Path) -> Result<Real, Failure> {
    let known = |f: &&CStr| {
        // SAFETY: looks a name up.
        let at = unsafe { libc::dlsym(handle, f.as_ptr()) };
        !at.is_null()
    };
    if !PRIVATE.iter().any(known) {
        return Err(Failure::Unknown(path.into()));
    }
    let calls = Calls::find(handle).map_err(|name| Failure::Lacks(path.into(), name))?;
    let real = Real { handle: handle as usize, calls };
    redirect::RESOLVE.store(real.calls.resolve_mac as usize, Ordering::Relaxed);
    // SAFETY: looks a name up in the library and what it needs.
    let nl_connect = unsafe { libc::dlsym(handle, c"nl_connect".as_ptr()) };
    redirect::NL_CONNECT.store(nl_connect as usize, Ordering::Relaxed);
    let unchangeable = |e| Failure::Unchangeable(path.into(), e);
    let object = elf::containing(real.calls.open_device as usize).ok_or_else(|| unchangeable(libc::EFAULT))?;
    real.change(&object).map_err(unchangeable)?;
    for (slot, (name, version)) in crate::SLOTS.iter().zip(&crate::SLOT_NAMES) {
        slot.store(real.symbol(name, version).unwrap_or(0), Ordering::Relaxed);
    }
    Ok(real)
}

fn dl_error() -> String {
    // SAFETY: the loader's text, which lives until its next call; NULL if there is none.
    unsafe {
        let text: *const c_char = libc::dlerror();
        if text.is_null() { String::new() } else { CStr::from_ptr(text).to_string_lossy().into_owned() }
    }
}

/// The file of the real library.
fn choose() -> Result<PathBuf, Failure> {
    if let Some(path) = std::env::var_os(VARIABLE).filter(|p| !p.is_empty()) {
        let path = PathBuf::from(path);
        return match is_ours(&path) {
            _ if !path.is_absolute() => Err(Failure::Relative(path)),
            Ok(false) => Ok(path),
            Ok(true) => Err(Failure::Ours(path)),
            Err(e) => Err(Failure::Unreadable(path, e)),
        };
    }
    let is_real = |p: &PathBuf| is_ours(p).is_ok_and(|ours| !ours);
    PLACES.iter().map(PathBuf::from).find(is_real).ok_or(Failure::NoLibrary)
}

/// True if the file is this library, which must not be loaded a second time.
fn is_ours(path: &Path) -> std::io::Result<bool> {
    /// Longest part of a file that is read.
    const MOST: u64 = 64 << 20;
    let mut file = std::fs::File::open(path)?.take(MOST);
    let mut part = vec![0; 64 << 10];
    let mut kept = 0;
    loop {
        let n = file.read(&mut part[kept..])?;
        let end = kept + n;
        if part[..end].windows(MARK.len()).any(|w| w == MARK) {
            return Ok(true);
        }
        if n == 0 {
            return Ok(false);
        }
        // The name may lie across two reads.
        kept = end.min(MARK.len() - 1);
        part.copy_within(end - kept..end, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_library_is_told_apart_by_a_symbol() {
        let path = std::env::temp_dir().join(format!("unirdma-mark-{}", std::process::id()));
        let put = |text: &[u8]| std::fs::write(&path, text).unwrap();
        put(&[0; 200_000]);
        assert!(!is_ours(&path).unwrap());
        // Across two reads.
        let mut long = vec![b'x'; 65_530];
        long.extend(MARK);
        long.extend([b'x'; 70_000]);
        put(&long);
        assert!(is_ours(&path).unwrap());
        std::fs::remove_file(&path).unwrap();
        assert!(is_ours(&path).is_err());
    }
}
