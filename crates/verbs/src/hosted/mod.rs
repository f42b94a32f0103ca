//! Contexts on a VF of a real RNIC (the way `vf`). The real libibverbs is opened in the program's process, with the
//! RNIC's own provider, on a device descriptor that the virtual layer has passed. Its objects go to the program as they
//! are, so nothing here is on the data path. Only what names devices and addresses is renamed.
//!
//! Nothing of this happens in a program whose vRNIC uses the software RNIC.

mod async_events;
mod elf;
mod failure;
mod lease;
mod real;
mod redirect;
mod rename;

use std::collections::HashMap;
use std::mem::offset_of;
use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, LazyLock, Mutex};

use unirdma_abi::lease::SOCKET;
use unirdma_driver as driver;
use unirdma_verbs_abi::*;

use crate::device::DeviceObj;
use crate::lock;
use crate::trace::trace;

use async_events::AsyncEvents;
use failure::Failure;
pub(crate) use lease::Lease;
pub use real::{
    x_verbs_register_driver_34, x_verbs_register_driver_57, x_verbs_register_driver_59, x_verbs_register_driver_64,
    x_verbs_register_driver_65,
};
pub(crate) use rename::*;

/// Returns from a function, with the result of `$call`, if `$c` is a hosted context, here `$h`. A context of which the
/// library knows nothing is EINVAL, which `$failed` makes the function's result. The function's caller vouches for the
/// context, and for what the man page of the function demands.
macro_rules! return_if_hosted {
    ($c:expr, $failed:expr, |$h:ident| $call:expr) => {
        // SAFETY: by the contract.
        match unsafe { $crate::device::hosted_behind($c) } {
            // SAFETY: by the contract.
            Ok(Some($h)) => return unsafe { $call },
            Err(e) => return $failed(e),
            Ok(None) => {}
        }
    };
}
pub(crate) use return_if_hosted;

/// Offset of the function in a context by which the library tells its own contexts from hosted ones.
pub(crate) const POLL_CQ_AT: usize = offset_of!(ibv_context, ops) + offset_of!(ibv_context_ops, poll_cq);

/// A hosted context.
pub(crate) struct Hosted {
    context: *mut ibv_context,
    /// The device that the program has opened.
    device: &'static DeviceObj,
    /// The session with the worker, for names and connection management.
    pub driver: Arc<driver::Context>,
    /// The GID from which the VF's connections go.
    gid: [u8; 16],
    real: &'static real::Real,
    /// The real functions that inline code of programs would call, and calls ours in their place.
    query_port: QueryPort,
    query_device_ex: QueryDeviceEx,
    /// The names of the destinations of QPs.
    paths: Mutex<HashMap<usize, rename::Paths>>,
    /// The latest answers of RESOLVE.
    answers: rename::Answers,
    /// The sources of asynchronous events, one of which is the lease.
    events: Arc<AsyncEvents>,
}

type QueryPort = Option<unsafe extern "C" fn(*mut ibv_context, u8, *mut ibv_port_attr, usize) -> i32>;
type QueryDeviceEx =
    Option<unsafe extern "C" fn(*mut ibv_context, *const std::ffi::c_void, *mut ibv_device_attr_ex, usize) -> i32>;

// SAFETY: the pointer is to a context of the real library, which any thread may use.
unsafe impl Send for Hosted {}
// SAFETY: as above.
unsafe impl Sync for Hosted {}

static CONTEXTS: LazyLock<Mutex<HashMap<usize, Arc<Hosted>>>> = LazyLock::new(Mutex::default);

fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

/// True if a context is this library's own.
///
/// # Safety
/// `c` is an open context.
#[inline]
pub(crate) unsafe fn is_ours(c: *mut ibv_context) -> bool {
    // SAFETY: by the contract.
    let poll_cq = unsafe { (*c).ops.poll_cq };
    poll_cq.is_some_and(|f| f as usize == crate::cq::poll_cq as *const () as usize)
}

/// The hosted context behind `c`; `None` if `c` is this library's own.
///
/// # Safety
/// `c` is an open context.
pub(crate) unsafe fn of(c: *mut ibv_context) -> Option<Arc<Hosted>> {
    // SAFETY: by the contract.
    if unsafe { is_ours(c) } {
        return None;
    }
    lock(&CONTEXTS).get(&(c as usize)).cloned()
}

/// The device that a program has opened, by the real library's device of its context.
pub(crate) fn device_behind(d: *mut ibv_device) -> Option<&'static DeviceObj> {
    // SAFETY: hosted contexts in the table are open.
    lock(&CONTEXTS).values().find(|h| unsafe { (*h.context).device } == d).map(|h| h.device)
}

/// An answer to a program that opens its device.
pub(crate) enum Opened {
    Hosted(*mut ibv_context),
    /// The software RNIC is to be used, for as long as this lease.
    Soft(Lease),
}

/// Opens a context on a VF, after waiting for one if need be. The wait is a cancellation point: the caller may hold no
/// lock.
///
/// # Errors
/// The errno for the program. What is wrong has been told on standard error.
pub(crate) fn open(driver: &Arc<driver::Context>, device: &'static DeviceObj) -> Result<Opened, i32> {
    let told = |why: Failure| {
        crate::say(&why.to_string());
        trace!("ibv_open_device() = errno {}", why.errno());
        why.errno()
    };
    let socket = device.socket.with_file_name(SOCKET);
    match lease::ask(&socket).map_err(told)? {
        lease::Answer::Soft(lease) => Ok(Opened::Soft(lease)),
        lease::Answer::Refused(why) => Err(told(Failure::Refused(why))),
        lease::Answer::Has(lease, grant, fd) => {
            let node = lease::text(&grant.node);
            let present = redirect::Present {
                sysfs: redirect::sysfs_of(socket.parent().unwrap_or(&socket)),
                node: node.clone(),
                device: lease::text(&grant.device),
                virtual_name: device.name().into(),
                opened: fd.as_raw_fd(),
                descriptor: Some(fd),
            };
            trace!("has the VF {} ({node})", present.device);
            host(driver, device, lease, grant.gid, present).map(Opened::Hosted).map_err(told)
        }
    }
}

fn host(
    driver: &Arc<driver::Context>,
    opened: &'static DeviceObj,
    lease: Lease,
    gid: [u8; 16],
    present: redirect::Present,
) -> Result<*mut ibv_context, Failure> {
    let real = real::open()?;
    let (device, name) = (present.device.clone(), present.virtual_name.clone());
    let _opening = lock(&real::OPENING);
    let node = present.node.clone();
    *lock(&redirect::PRESENT) = Some(present);
    // SAFETY: the list is given back; a device that was opened stays with its context.
    let context = unsafe {
        let mut n = 0;
        let list = (real.calls.get_device_list)(&raw mut n);
        if list.is_null() {
            return Err(Failure::NoDevices(errno()));
        }
        let all = std::slice::from_raw_parts(list, usize::try_from(n).unwrap_or(0));
        let found = all.iter().copied().find(|&d| lease::text(&(*d).dev_name) == node);
        let context = found.map(|d| (real.calls.open_device)(d));
        let e = errno();
        (real.calls.free_device_list)(list);
        match context {
            Some(c) if !c.is_null() => c,
            Some(_) => return Err(Failure::NotOpened(device, e)),
            None => return Err(Failure::NoProvider(device)),
        }
    };
    // SAFETY: just opened.
    let events = match unsafe { AsyncEvents::take_over(context, lease) } {
        Ok(events) => events,
        Err(e) => {
            // SAFETY: nobody has it yet.
            unsafe { (real.calls.close_device)(context) };
            return Err(Failure::descriptors(e));
        }
    };
    // SAFETY: open, and of the newest layout or an older one, which `sz` tells.
    let (query_port, query_device_ex) = unsafe { take_inline_calls(context) };
    // SAFETY: a device of the real library, which looks at its own record of the name.
    unsafe {
        let shown = &mut (*(*context).device).name;
        shown.fill(0);
        shown[..name.len()].copy_from_slice(name.as_bytes());
    }
    let hosted = Hosted {
        context,
        device: opened,
        driver: driver.clone(),
        gid,
        real,
        query_port,
        query_device_ex,
        paths: Mutex::default(),
        answers: rename::Answers::default(),
        events,
    };
    lock(&CONTEXTS).insert(context as usize, Arc::new(hosted));
    trace!("ibv_open_device() = {device}");
    Ok(context)
}

/// Puts our functions in the place of those that inline code calls by the context. Returns the real ones.
///
/// # Safety
/// `c` is an open context of the real library.
unsafe fn take_inline_calls(c: *mut ibv_context) -> (QueryPort, QueryDeviceEx) {
    // SAFETY: by the contract; operations lie before the context, as many as `sz` tells.
    unsafe {
        if (*c).abi_compat != VERBS_ABI_IS_EXTENDED {
            return (None, None);
        }
        let v = c.cast::<u8>().sub(offset_of!(verbs_context, context)).cast::<verbs_context>();
        let has = |offset: usize| (*v).sz >= size_of::<verbs_context>() - offset;
        let port = if has(offset_of!(verbs_context, query_port)) {
            (*v).query_port.replace(rename::query_port_inline)
        } else {
            None
        };
        let device = if has(offset_of!(verbs_context, query_device_ex)) {
            (*v).query_device_ex.replace(rename::query_device_ex_inline)
        } else {
            None
        };
        (port, device)
    }
}

/// The operations of a hosted context that come after the first ones; those that it does not have are `None`.
///
/// # Safety
/// `c` is an open context.
pub(crate) unsafe fn extended<T: Copy>(c: *mut ibv_context, offset: usize) -> Option<T> {
    // SAFETY: as `take_inline_calls`; the caller names the field's type.
    unsafe {
        if (*c).abi_compat != VERBS_ABI_IS_EXTENDED {
            return None;
        }
        let v = c.cast::<u8>().sub(offset_of!(verbs_context, context));
        if (*v.cast::<verbs_context>()).sz < size_of::<verbs_context>() - offset {
            return None;
        }
        *v.add(offset).cast::<Option<T>>()
    }
}

/// Closes a hosted context: first the real one, then the lease, then the session.
///
/// # Safety
/// As ibv_close_device(3).
pub(crate) unsafe fn close(hosted: Arc<Hosted>) -> i32 {
    lock(&CONTEXTS).remove(&(hosted.context as usize));
    // SAFETY: the caller gives its context back. The real library closes the kernel's descriptors.
    let r = unsafe {
        hosted.events.give_back(hosted.context);
        (hosted.real.calls.close_device)(hosted.context)
    };
    trace!("ibv_close_device() of a VF = {r}");
    drop(hosted);
    r
}

/// `ibv_fork_init` for the real library, now or when it is opened.
pub(crate) fn fork_init() -> i32 {
    real::WANTS_FORK.store(true, Ordering::Relaxed);
    // SAFETY: takes nothing.
    real::get().map_or(0, |r| unsafe { (r.calls.fork_init)() })
}

/// The real library's answer; `None` if there is no real library, or if it is too old to know.
pub(crate) fn is_fork_initialized() -> Option<i32> {
    // SAFETY: takes nothing.
    real::get().and_then(|r| r.calls.is_fork_initialized).map(|f| unsafe { f() })
}

/// `ibv_dontfork_range` or `ibv_dofork_range` of the real library.
///
/// # Safety
/// As those functions.
pub(crate) unsafe fn fork_range(base: *mut std::ffi::c_void, size: usize, dont: bool) -> i32 {
    let Some(r) = real::get() else { return 0 };
    let f = if dont { r.calls.dontfork_range } else { r.calls.dofork_range };
    // SAFETY: by the contract.
    unsafe { f(base, size) }
}

/// `ibv_reg_mr_ex` of the real library, if it has it.
///
/// # Safety
/// As that function, with a hosted PD.
pub(crate) unsafe fn reg_mr_ex(pd: *mut ibv_pd, attr: *mut ibv_mr_init_attr) -> *mut ibv_mr {
    match real::get().and_then(|r| r.calls.reg_mr_ex) {
        // SAFETY: by the contract.
        Some(f) => unsafe { f(pd, attr) },
        None => crate::null(libc::EOPNOTSUPP),
    }
}

/// `ibv_ack_async_event` for an event of a hosted object. Returns false if the object is ours.
///
/// # Safety
/// An event that its program got.
pub(crate) unsafe fn ack_async_event(event: *mut ibv_async_event) -> bool {
    /// `enum ibv_event_type`: events of CQs, QPs, SRQs and WQs. All these objects begin with their context.
    const OF_OBJECTS: [u32; 12] = [0, 1, 2, 3, 4, 5, 6, 7, 14, 15, 16, 19];
    let Some(real) = real::get() else { return false };
    // SAFETY: by the contract; an object lives until its events are acknowledged.
    unsafe {
        let e = &*event;
        if !OF_OBJECTS.contains(&e.event_type) || e.element.is_null() || is_ours(*e.element.cast()) {
            return false;
        }
        (real.calls.ack_async_event)(event);
    }
    true
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::path::Path;

    const KINDS: [&str; 4] = ["context", "object", "renamed", "ours"];

    fn table() -> HashMap<&'static str, &'static str> {
        include_str!("../../data/dispatch.tsv").lines().filter_map(|l| l.split_once('\t')).collect()
    }

    /// The type of the first argument of each function that the sources have.
    fn first_arguments(dir: &Path, all: &mut HashMap<String, String>) {
        for entry in std::fs::read_dir(dir).unwrap().flatten() {
            if entry.path().is_dir() {
                first_arguments(&entry.path(), all);
                continue;
            }
            let text = std::fs::read_to_string(entry.path()).unwrap();
            for part in text.split("extern \"C\" fn x_").skip(1) {
                let (name, rest) = part.split_once('(').unwrap();
                let typ = rest.split_once(':').map_or("", |(_, r)| r).trim_start();
                let end = typ.find([',', ')']).unwrap_or(typ.len());
                all.insert(name.into(), typ[..end].into());
            }
        }
    }

    #[test]
    fn every_public_function_has_a_kind() {
        let table = table();
        let is_old = |l: &str| l.starts_with("IBVERBS_1.0\t") && l.ends_with("compat");
        let symbols = include_str!("../../data/ibverbs.tsv").lines();
        for line in symbols.filter(|l| !l.contains("PRIVATE") && !is_old(l)) {
            let name = line.split('\t').nth(1).unwrap();
            let kind = table.get(name).copied().unwrap_or_default();
            assert!(KINDS.contains(&kind), "data/dispatch.tsv: {name} has the kind `{kind}`");
        }
    }

    #[test]
    fn every_function_with_an_object_looks_at_its_context() {
        let (table, mut first) = (table(), HashMap::new());
        first_arguments(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut first);
        let of = |name: &&str| first.get(*name).map_or("", String::as_str);
        for (name, kind) in table.iter().filter(|(_, k)| **k != "renamed") {
            let object = match of(name) {
                "*mut ibv_context" => "context",
                "*mut ibv_device" | "*mut *mut ibv_device" | "*mut ibv_async_event" => "ours",
                t if t.starts_with("*mut ibv_") => "object",
                _ => continue,
            };
            assert_eq!(*kind, object, "data/dispatch.tsv: {name}");
        }
        assert_eq!(of(&"ibv_create_cq"), "*mut ibv_context");
        assert_eq!(of(&"ibv_dereg_mr"), "*mut ibv_mr");
    }
}
