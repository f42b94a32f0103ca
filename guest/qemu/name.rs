// SPDX-License-Identifier: MIT OR Apache-2.0
//! QEMU's generic vhost-user device refuses virtio device numbers that have no name in QEMU's table, and 42 has none.
//! Preloaded into QEMU, this gives it one; into other programs it does nothing.
//!
//! `unirdma` carries it (`crates/cli/build.rs`), and preloads it or writes it to a file (`unirdma vm preload`).

#![no_std]

use core::ffi::{CStr, c_char, c_int, c_void};
use core::ptr;

const VIRTIO_ID_RDMA: usize = 42;
const NAME: &CStr = c"virtio-rdma";
const TABLE: &CStr = c"virtio_device_names";

/// A symbol of an ELF file of 64 bits.
#[repr(C)]
struct Symbol {
    name: u32,
    info: u8,
    other: u8,
    section: u16,
    value: u64,
    size: u64,
}

/// For dladdr1(3), RTLD_DL_SYMENT: it gives the symbol's entry in the table of symbols.
const WITH_ENTRY: c_int = 1;

unsafe extern "C" {
    /// dlsym(3). The handle 0 (RTLD_DEFAULT) stands for the program and its libraries.
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
    /// dladdr1(3). `info` is a `Dl_info`: four pointers.
    fn dladdr1(at: *const c_void, info: *mut [*const c_void; 4], more: *mut *mut c_void, which: c_int) -> c_int;
}

extern "C" fn name_device() {
    // SAFETY: a program that has this symbol is QEMU, where it is an array of names by number; its size says whether
    // there is a place for 42, which older versions do not have. Nothing else runs yet, as the dynamic loader calls
    // this.
    unsafe {
        let names = dlsym(ptr::null_mut(), TABLE.as_ptr()).cast::<*const c_char>();
        let (mut info, mut entry) = ([ptr::null(); 4], ptr::null_mut());
        if names.is_null() || dladdr1(names.cast(), &mut info, &mut entry, WITH_ENTRY) == 0 || entry.is_null() {
            return;
        }
        let places = (*entry.cast::<Symbol>()).size as usize / size_of::<*const c_char>();
        let name = names.wrapping_add(VIRTIO_ID_RDMA);
        if places > VIRTIO_ID_RDMA && (*name).is_null() {
            *name = NAME.as_ptr();
        }
    }
}

#[used]
#[unsafe(link_section = ".init_array")]
static AT_START: extern "C" fn() = name_device;

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}
