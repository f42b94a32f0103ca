//! Devices and contexts.

use std::ffi::c_void;
use std::mem::offset_of;
use std::os::raw::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use unirdma_abi as abi;
use unirdma_formats::AsyncEvent;
use unirdma_mem::Bell;
use unirdma_verbs_abi::*;

use crate::ibverbs::*;
use crate::memory::{NONSENSE, map, room};
use crate::{OPERATIONS, done, null};

/// The kernel driver has no driver ID of its own.
const RDMA_DRIVER_UNKNOWN: u32 = 0;

/// State that all queues of a context share.
pub struct Shared {
    bell: Bell,
    /// True once the device is known to be gone.
    dead: AtomicBool,
}

impl Shared {
    /// True once the device is known to be gone.
    #[inline]
    pub fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Relaxed)
    }

    /// See [`Bell::expect_ring`].
    #[inline]
    pub fn expect_ring(&self, slot: u32) {
        self.bell.expect_ring(slot);
    }

    /// Rings for a QP. `cq` is one of its CQs, through which the kernel wakes the device if it sleeps.
    ///
    /// # Safety
    /// `cq` is a live CQ.
    #[inline]
    pub unsafe fn ring(&self, slot: u32, cq: *mut ibv_cq) {
        if self.bell.ring(slot) != abi::AWAKE {
            // SAFETY: by the contract.
            unsafe { self.wake(cq) };
        }
    }

    #[cold]
    unsafe fn wake(&self, cq: *mut ibv_cq) {
        // SAFETY: by the contract of `ring`. The kernel driver only wakes the device; CQs are armed in their rings.
        if unsafe { ibv_cmd_req_notify_cq(cq, 0) } == libc::EIO {
            self.dead.store(true, Ordering::Relaxed);
        }
    }
}

/// A context. libibverbs allocates it, all zeros.
#[repr(C)]
struct Context {
    verbs: verbs_context_34,
    /// From `Arc::into_raw`; NULL before the context is open.
    shared: *const Shared,
}

/// The context that contains `ctx`.
fn outer(ctx: *mut ibv_context) -> *mut Context {
    ctx.wrapping_byte_sub(offset_of!(Context, verbs) + offset_of!(verbs_context_34, context)).cast()
}

/// The state that all queues of a context share.
///
/// # Safety
/// `ctx` is an open context of this provider.
pub unsafe fn shared(ctx: *mut ibv_context) -> Arc<Shared> {
    // SAFETY: by the contract; the context has a share of its own.
    unsafe {
        let shared = (*outer(ctx)).shared;
        Arc::increment_strong_count(shared);
        Arc::from_raw(shared)
    }
}

pub unsafe extern "C" fn alloc_device(_sysfs: *mut c_void) -> *mut verbs_device {
    room::<verbs_device>().map_or_else(null, |d| Box::into_raw(d).cast())
}

pub unsafe extern "C" fn uninit_device(device: *mut verbs_device) {
    // SAFETY: made by `alloc_device`, and nobody uses it any more.
    drop(unsafe { Box::from_raw(device) });
}

pub unsafe extern "C" fn alloc_context(
    device: *mut ibv_device,
    cmd_fd: c_int,
    _private: *mut c_void,
) -> *mut verbs_context_34 {
    let (size, driver) = (size_of::<Context>(), RDMA_DRIVER_UNKNOWN);
    // SAFETY: a device of this provider, whose descriptor libibverbs takes over; the context is at the beginning of the
    // memory that libibverbs allocates.
    let ctx = unsafe { _verbs_init_and_alloc_context(device, cmd_fd, size, std::ptr::null_mut(), driver) };
    let ctx = ctx.cast::<Context>();
    if ctx.is_null() {
        return std::ptr::null_mut();
    }
    // SAFETY: just allocated; all zeros are valid for the members that libibverbs has not initialized.
    let context = unsafe { &mut *ctx };
    // SAFETY: as above.
    match unsafe { open(context) } {
        Ok(shared) => {
            context.shared = Arc::into_raw(Arc::new(shared));
            // SAFETY: as above.
            unsafe { verbs_set_ops(&mut context.verbs, &OPERATIONS) };
            &mut context.verbs
        }
        Err(e) => {
            // SAFETY: nobody else knows the context.
            unsafe { release(ctx) };
            null(e)
        }
    }
}

/// Creates the kernel's part of a context, and maps its doorbell page.
///
/// # Safety
/// The context was initialized by libibverbs.
unsafe fn open(context: &mut Context) -> Result<Shared, i32> {
    let (mut cmd, mut resp) = (GetContext::new(), GetContextAnswer::new());
    // SAFETY: the context, and room for command and answer.
    unsafe {
        let verbs = &raw mut context.verbs;
        done(ibv_cmd_get_context(verbs, &mut cmd, GetContext::SIZE, &mut resp, GetContextAnswer::SIZE))?;
    }
    let page = size_of::<abi::DoorbellPage>() as u64;
    // SAFETY: the context's device file is open.
    let page = unsafe { map(&mut context.verbs.context, resp.driver.db_offset, page) }?;
    Ok(Shared { bell: Bell::new(page).ok_or(NONSENSE)?, dead: AtomicBool::new(false) })
}

/// Frees a context, which closes its descriptors.
///
/// # Safety
/// Nobody uses it any more.
unsafe fn release(ctx: *mut Context) {
    // SAFETY: by the contract; libibverbs has allocated it with calloc(3).
    unsafe {
        if !(*ctx).shared.is_null() {
            drop(Arc::from_raw((*ctx).shared));
        }
        verbs_uninit_context(&raw mut (*ctx).verbs);
        libc::free(ctx.cast());
    }
}

pub unsafe extern "C" fn free_context(ctx: *mut ibv_context) {
    // SAFETY: the caller closes it.
    unsafe { release(outer(ctx)) };
}

/// Called for each asynchronous event that the program receives.
pub unsafe extern "C" fn async_event(ctx: *mut ibv_context, event: *mut ibv_async_event) {
    // SAFETY: the caller's context, and an event of it.
    let (ctx, event) = unsafe { (shared(ctx), (*event).event_type) };
    if event == AsyncEvent::DeviceFatal as u32 {
        ctx.dead.store(true, Ordering::Relaxed);
    }
}

pub unsafe extern "C" fn query_device_ex(
    ctx: *mut ibv_context,
    input: *const c_void,
    attr: *mut ibv_device_attr_ex,
    attr_size: usize,
) -> c_int {
    let (mut resp, mut size) = (QueryDeviceAnswer::new(), QueryDeviceAnswer::SIZE);
    // SAFETY: the caller's context, with room for the attributes; room for the answer.
    let r = unsafe { ibv_cmd_query_device_any(ctx, input, attr, attr_size, (&raw mut resp).cast(), &mut size) };
    if r != 0 {
        return r;
    }
    let v = resp.firmware();
    let version = format!("{}.{}.{}", v >> 32, v >> 16 & 0xffff, v & 0xffff);
    // SAFETY: the attributes begin with the original ones, whose first member is this.
    let room = unsafe { &mut (*attr).orig_attr.fw_ver };
    room.fill(0);
    room[..version.len()].copy_from_slice(version.as_bytes());
    0
}

/// The device's clock, ns. It is not the guest's clock.
///
/// # Errors
/// The errno of the kernel driver.
///
/// # Safety
/// `ctx` is an open context of this provider.
pub unsafe fn clock_ns(ctx: *mut ibv_context) -> Result<u64, i32> {
    // SAFETY: all zeros are valid.
    let mut attr: ibv_device_attr_ex = unsafe { std::mem::zeroed() };
    let (mut resp, mut size) = (QueryClockAnswer::new(), QueryClockAnswer::SIZE);
    let attr_size = size_of::<ibv_device_attr_ex>();
    // SAFETY: by the contract; room for attributes and answer.
    done(unsafe {
        ibv_cmd_query_device_any(ctx, std::ptr::null(), &mut attr, attr_size, (&raw mut resp).cast(), &mut size)
    })?;
    let [low, high] = resp.driver.clock_ns;
    Ok(u64::from(high) << 32 | u64::from(low))
}

pub unsafe extern "C" fn query_rt_values(ctx: *mut ibv_context, values: *mut ibv_values_ex) -> c_int {
    const RAW_CLOCK: u32 = 1;
    // SAFETY: the caller passes room for the values.
    let v = unsafe { &mut *values };
    v.comp_mask &= RAW_CLOCK;
    if v.comp_mask == 0 {
        return 0;
    }
    // SAFETY: the caller passes its context.
    match unsafe { clock_ns(ctx) } {
        Ok(now_ns) => {
            v.raw_clock = libc::timespec { tv_sec: 0, tv_nsec: now_ns as i64 };
            0
        }
        Err(e) => e,
    }
}

pub unsafe extern "C" fn query_port(ctx: *mut ibv_context, port: u8, attr: *mut ibv_port_attr) -> c_int {
    // SAFETY: the caller's context, with room for the attributes; room for the command.
    unsafe { ibv_cmd_query_port(ctx, port, attr, &mut QueryPort::new(), QueryPort::SIZE) }
}
