//! The extended CQ: completions one at a time, each field by a call (`ibv_create_cq_ex(3)`).

use std::sync::atomic::Ordering;

use unirdma_abi as abi;
use unirdma_verbs_abi::*;

use crate::cq::{CqObj, create};
use crate::null;
use crate::trace::trace;

/// `IBV_WC_STANDARD_FLAGS`, completion timestamps by the device's clock and by the wall clock, and tag matching.
const WC_FLAGS: u64 = 0xff | 1 << 10 | 1 << 11;
const MASK_FLAGS: u32 = 1;
/// A parent domain: its thread domain says that one thread polls.
const MASK_PD: u32 = 2;
const FLAG_SINGLE_THREADED: u32 = 1;
const FLAG_IGNORE_OVERRUN: u32 = 2;

pub(crate) unsafe extern "C" fn create_cq_ex(c: *mut ibv_context, init: *mut ibv_cq_init_attr_ex) -> *mut ibv_cq_ex {
    // SAFETY: the caller passes its context and attributes.
    let a = unsafe { &*init };
    let flags = if a.comp_mask & MASK_FLAGS != 0 { a.flags } else { 0 };
    trace!("ibv_create_cq_ex(wc_flags {:#x}, flags {flags:#x})", a.wc_flags);
    // A program that ignores overruns asks for what this device never needs to do.
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
    x.start_poll = Some(start_poll);
    x.next_poll = Some(next_poll);
    x.end_poll = Some(end_poll);
    x.read_opcode = Some(read_opcode);
    x.read_vendor_err = Some(read_vendor_err);
    x.read_byte_len = Some(read_byte_len);
    x.read_imm_data = Some(read_imm_data);
    x.read_qp_num = Some(read_qp_num);
    x.read_src_qp = Some(read_src_qp);
    x.read_wc_flags = Some(read_wc_flags);
    x.read_slid = Some(read_slid);
    x.read_sl = Some(read_sl);
    x.read_dlid_path_bits = Some(read_dlid_path_bits);
    x.read_completion_ts = Some(read_completion_ts);
    x.read_completion_wallclock_ns = Some(read_completion_wallclock_ns);
    x.read_tm_info = Some(read_tm_info);
    obj.cast()
}

/// Takes the next completion, if there is one.
///
/// # Safety
/// `cq` is an extended CQ of this library, polled by this thread alone.
unsafe fn take(cq: *mut ibv_cq_ex) -> i32 {
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
    match found {
        Ok(0) => libc::ENOENT,
        Ok(_) => {
            // SAFETY: as above.
            unsafe {
                (*cq).status = (*current).cqe.status.into();
                (*cq).wr_id = (*current).cqe.wr_id;
            }
            0
        }
        Err(e) => e,
    }
}

unsafe extern "C" fn start_poll(cq: *mut ibv_cq_ex, attr: *mut ibv_poll_cq_attr) -> i32 {
    // SAFETY: the caller passes its CQ.
    let obj = unsafe { &*cq.cast::<CqObj>() };
    // SAFETY: NULL or attributes.
    if unsafe { attr.as_ref() }.is_some_and(|a| a.comp_mask != 0) {
        return libc::EINVAL;
    }
    while !obj.single_threaded && obj.polled.swap(true, Ordering::Acquire) {
        std::thread::yield_now();
    }
    // SAFETY: the flag keeps other threads out.
    let r = unsafe { take(cq) };
    if r != 0 {
        obj.polled.store(false, Ordering::Release);
    }
    r
}

unsafe extern "C" fn next_poll(cq: *mut ibv_cq_ex) -> i32 {
    // SAFETY: between start_poll and end_poll the CQ is this thread's.
    unsafe { take(cq) }
}

unsafe extern "C" fn end_poll(cq: *mut ibv_cq_ex) {
    // SAFETY: the caller passes its CQ.
    unsafe { &*cq.cast::<CqObj>() }.polled.store(false, Ordering::Release);
}

/// The completion that was found last.
///
/// # Safety
/// As [`take`].
unsafe fn current<'a>(cq: *mut ibv_cq_ex) -> &'a abi::Cqe {
    // SAFETY: by the contract.
    unsafe { &(*(*cq.cast::<CqObj>()).current.get()).cqe }
}

macro_rules! readers {
    ($($name:ident -> $t:ty = |$c:ident| $e:expr;)*) => {
        $(unsafe extern "C" fn $name(cq: *mut ibv_cq_ex) -> $t {
            // SAFETY: called between start_poll and end_poll, by the thread that polls.
            let $c = unsafe { current(cq) };
            $e
        })*
    };
}
readers! {
    read_opcode -> u32 = |c| c.opcode.into();
    read_vendor_err -> u32 = |c| c.vendor_err;
    read_byte_len -> u32 = |c| c.byte_len;
    read_imm_data -> u32 = |c| c.imm;
    read_qp_num -> u32 = |c| c.qp_num;
    read_src_qp -> u32 = |c| c.src_qp;
    read_wc_flags -> u32 = |c| c.wc_flags.into();
    read_slid -> u32 = |_c| 0;
    read_sl -> u8 = |c| c.sl;
    read_dlid_path_bits -> u8 = |_c| 0;
    read_completion_ts -> u64 = |c| c.timestamp;
    read_completion_wallclock_ns -> u64 = |c| {
        // The device's clock is the monotonic one, which both sides share.
        let since_boot = clock_ns(libc::CLOCK_MONOTONIC);
        clock_ns(libc::CLOCK_REALTIME).saturating_sub(since_boot.saturating_sub(c.timestamp))
    };
}

unsafe extern "C" fn read_tm_info(cq: *mut ibv_cq_ex, info: *mut ibv_wc_tm_info) {
    // SAFETY: as the readers above, with room for the answer.
    unsafe {
        let d = &*(*cq.cast::<CqObj>()).current.get();
        *info = ibv_wc_tm_info { tag: d.tag, private: d.app_ctx };
    }
}

/// A clock of the system, nanoseconds.
fn clock_ns(clock: libc::clockid_t) -> u64 {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: room for a time.
    unsafe { libc::clock_gettime(clock, &mut t) };
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

/// The device's clock now, in its own unit, nanoseconds.
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
