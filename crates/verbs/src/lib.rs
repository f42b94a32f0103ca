//! `libibverbs.so.1` and, in the same file, `librdmacm.so.1`: drop-ins for rdma-core's libraries whose device is a
//! uniRDMA vRNIC.
//!
//! A thin C skin over the driver crate: it checks pointers and values that C programs pass, keeps the public fields of
//! the C objects true, and reports errors as each man page says. It must never unwind, abort, or connect before it is
//! asked for devices.
//!
//! Symbols get their versions in `build/main.rs`; `x_NAME` is the implementation of `NAME`.
#![allow(clippy::missing_safety_doc, missing_docs, non_snake_case)]

mod ah;
mod any;
mod buf;
mod cq;
mod cq_ex;
mod device;
mod dm;
mod domain;
mod event;
mod hosted;
mod mcast;
mod mr;
mod mw;
mod netlink;
mod qp;
mod rdmacm;
mod rsocket;
mod srq;
mod strings;
mod stubs;
mod tm;
mod trace;
mod wr;
mod xrcd;

/// All implementations, for the trampolines.
mod api {
    pub use crate::ah::*;
    pub use crate::buf::*;
    pub use crate::cq::*;
    pub use crate::device::*;
    pub use crate::domain::*;
    pub use crate::event::*;
    pub use crate::hosted::{
        x_verbs_register_driver_34, x_verbs_register_driver_57, x_verbs_register_driver_59, x_verbs_register_driver_64,
        x_verbs_register_driver_65,
    };
    pub use crate::mcast::*;
    pub use crate::mr::*;
    pub use crate::netlink::*;
    pub use crate::qp::*;
    pub use crate::rdmacm::*;
    pub use crate::rsocket::*;
    pub use crate::srq::*;
    pub use crate::strings::*;
    pub use crate::stubs::*;
    pub use crate::wr::*;
}

/// The library's own heap (see [`unirdma_driver::heap`]).
#[global_allocator]
static GLOBAL: unirdma_driver::heap::Global = unirdma_driver::heap::Global;

/// Runs before the library's other constructors.
#[used]
#[unsafe(link_section = ".init_array.00101")]
static SET_UP_HEAP: extern "C" fn() = unirdma_driver::heap::set_up;

include!(concat!(env!("OUT_DIR"), "/exports.rs"));

/// Runs when the library is loaded: before the program has fork handlers, and before it drops its rights.
#[used]
#[unsafe(link_section = ".init_array")]
static LOADED: extern "C" fn() = {
    extern "C" fn loaded() {
        unirdma_driver::loaded();
    }
    loaded
};

/// Sets errno.
fn set_errno(e: i32) {
    // SAFETY: the location is this thread's own.
    unsafe { *libc::__errno_location() = e };
}

/// NULL, after setting errno.
fn null<T>(e: i32) -> *mut T {
    set_errno(e);
    std::ptr::null_mut()
}

/// A list for a program, which ends with NULL.
fn new_list<T>(mut all: Vec<*mut T>) -> *mut *mut T {
    all.push(std::ptr::null_mut());
    Box::into_raw(all.into_boxed_slice()).cast()
}

/// Frees a list, and nothing to which it points.
///
/// # Safety
/// `list` is NULL or of [`new_list`], and is given back once.
unsafe fn free_list<T>(list: *mut *mut T) {
    if list.is_null() {
        return;
    }
    let mut n = 0;
    // SAFETY: by the contract: n elements and a NULL in one boxed slice.
    unsafe {
        while !(*list.add(n)).is_null() {
            n += 1;
        }
        drop(Box::from_raw(std::ptr::slice_from_raw_parts_mut(list, n + 1)));
    }
}

/// The errno value that most verbs return, also put into errno.
fn code(r: Result<(), i32>) -> i32 {
    match r {
        Ok(()) => 0,
        Err(e) => {
            set_errno(e);
            e
        }
    }
}

/// 0, or -1 with errno: the result of calls of `librdmacm`.
fn done(r: Result<(), i32>) -> i32 {
    match r {
        Ok(()) => 0,
        Err(e) => {
            set_errno(e);
            -1
        }
    }
}

/// The words for an errno value.
fn words(e: i32) -> String {
    let text = std::io::Error::from_raw_os_error(e).to_string();
    text.split(" (os error").next().unwrap_or_default().into()
}

/// Tells the people who use the program.
fn say(line: &str) {
    let _ = std::io::Write::write_fmt(&mut std::io::stderr(), format_args!("unirdma: {line}\n"));
}

fn lock<T>(m: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    m.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
