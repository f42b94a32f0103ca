//! The extended CQ: completions one at a time, each field by a call (`ibv_create_cq_ex(3)`).

use unirdma_abi as abi;
use unirdma_queues::polling::{self, ExtendedCq, Poller};
use unirdma_verbs_abi::*;

use crate::cq::{CqObj, create};
use crate::null;
use crate::trace::trace;

/// `IBV_WC_STANDARD_FLAGS`, completion timestamps by the device's clock and by the wall clock, and tag matching.
const WC_FLAGS: u64 = 0xff | 1 << 10 | 1 << 11;
const MASK_FLAGS: u32 = 1;
/// A parent domain. If it has a thread domain, one thread polls.
const MASK_PD: u32 = 2;
const FLAG_SINGLE_THREADED: u32 = 1;
const FLAG_IGNORE_OVERRUN: u32 = 2;

pub(crate) unsafe extern "C" fn create_cq_ex(c: *mut ibv_context, init: *mut ibv_cq_init_attr_ex) -> *mut ibv_cq_ex {
    // SAFETY: the caller passes its context and attributes.
    let a = unsafe { &*init };
    let flags = if a.comp_mask & MASK_FLAGS != 0 { a.flags } else { 0 };
    trace!("ibv_create_cq_ex(wc_flags {:#x}, flags {flags:#x})", a.wc_flags);
    // Ignoring overruns is accepted: this device never needs to.
    let known = flags & !(FLAG_SINGLE_THREADED | FLAG_IGNORE_OVERRUN) == 0;
    if a.comp_mask & !(MASK_FLAGS | MASK_PD) != 0 || a.wc_flags & !WC_FLAGS != 0 || !known {
        return null(libc::EOPNOTSUPP);
    }
    let (cqe, vector) = (i32::try_from(a.cqe).unwrap_or(-1), i32::try_from(a.comp_vector).unwrap_or(-1));
    // SAFETY: a parent domain of the caller.
    let alone = flags & FLAG_SINGLE_THREADED != 0
        || a.comp_mask & MASK_PD != 0 && unsafe { crate::domain::has_thread_domain(a.parent_domain) };
    // SAFETY: as ibv_create_cq_ex(3) demands.
    let made = unsafe { create(c, cqe, a.cq_context, a.channel, vector, alone) };
    let obj = match made {
        Ok(obj) => obj,
        Err(e) => return null(e),
    };
    // SAFETY: just made; nobody else knows it yet.
    let x = unsafe { &mut (*obj).c };
    polling::fill::<CqObj>(x);
    x.read_completion_wallclock_ns = Some(read_completion_wallclock_ns);
    x.read_tm_info = Some(read_tm_info);
    obj.cast()
}

// SAFETY: the object of every CQ begins with its C structure.
unsafe impl ExtendedCq for CqObj {
    unsafe fn poller<'a>(cq: *mut ibv_cq_ex) -> &'a Poller {
        // SAFETY: by the contract.
        unsafe { &(*cq.cast::<CqObj>()).poller }
    }

    unsafe fn take(cq: *mut ibv_cq_ex) -> Result<bool, i32> {
        let obj = cq.cast::<CqObj>();
        // SAFETY: by the contract.
        let (obj, current) = unsafe { (&*obj, (*obj).current.get()) };
        // SAFETY: by the contract; only the polling thread touches the current completion.
        let found = unsafe {
            match obj.tm.get() {
                None => obj.cq.poll(1, |_, c| (*current).cqe = *c),
                Some(tm) => tm.poll(&obj.cq, 1, |_, d| *current = *d),
            }
        };
        found.map(|n| n > 0)
    }

    unsafe fn current<'a>(cq: *mut ibv_cq_ex) -> &'a abi::Cqe {
        // SAFETY: by the contract.
        unsafe { &(*(*cq.cast::<CqObj>()).current.get()).cqe }
    }
}

unsafe extern "C" fn read_completion_wallclock_ns(cq: *mut ibv_cq_ex) -> u64 {
    // SAFETY: called between start_poll and end_poll, by the thread that polls.
    let written = unsafe { CqObj::current(cq) }.timestamp;
    // The device's clock is the monotonic one, which both sides share.
    let since_boot = clock_ns(libc::CLOCK_MONOTONIC);
    clock_ns(libc::CLOCK_REALTIME).saturating_sub(since_boot.saturating_sub(written))
}

unsafe extern "C" fn read_tm_info(cq: *mut ibv_cq_ex, info: *mut ibv_wc_tm_info) {
    // SAFETY: as the readers above, with room for the answer.
    unsafe {
        let d = &*(*cq.cast::<CqObj>()).current.get();
        *info = ibv_wc_tm_info { tag: d.tag, private: d.app_ctx };
    }
}

/// A clock of the system, ns.
fn clock_ns(clock: libc::clockid_t) -> u64 {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: room for a time.
    unsafe { libc::clock_gettime(clock, &mut t) };
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

/// The device's clock now, ns.
pub(crate) unsafe extern "C" fn query_rt_values(_c: *mut ibv_context, values: *mut ibv_values_ex) -> i32 {
    const RAW_CLOCK: u32 = 1;
    // SAFETY: the caller passes room for the values.
    let v = unsafe { &mut *values };
    if v.comp_mask & RAW_CLOCK != 0 {
        v.raw_clock = libc::timespec { tv_sec: 0, tv_nsec: clock_ns(libc::CLOCK_MONOTONIC) as i64 };
    }
    v.comp_mask &= RAW_CLOCK;
    0
}
