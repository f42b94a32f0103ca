//! Completion queues.

use std::cell::UnsafeCell;
use std::os::raw::c_int;
use std::sync::Arc;

use unirdma_abi as abi;
use unirdma_mem::CqTail;
use unirdma_queues::domain::has_thread_domain;
use unirdma_queues::polling::{self, ExtendedCq, Poller};
use unirdma_queues::requests::completion;
use unirdma_queues::{Completions, QueueLock};
use unirdma_verbs_abi::*;

use crate::context::{Shared, clock_ns, shared};
use crate::ibverbs::*;
use crate::memory::{NONSENSE, map, room};
use crate::{code, done, kernel, null};

#[repr(C)]
pub struct CqObj {
    c: ibv_cq_ex,
    ctx: Arc<Shared>,
    /// Each ring owns its memory.
    rings: QueueLock<Completions<()>>,
    poller: Poller,
    /// The completion that `start_poll` or `next_poll` has found.
    current: UnsafeCell<abi::Cqe>,
    /// Wall clock minus the device's clock when the CQ was made, ns; 0 unless wall-clock timestamps were asked for.
    wallclock_offset: u64,
}

impl CqObj {
    /// Takes up to `max` completions and gives each to `f`. Returns their number.
    ///
    /// # Errors
    /// `EIO` if the CQ has overrun or the device is gone.
    #[inline]
    fn poll(&self, max: usize, mut f: impl FnMut(usize, &abi::Cqe)) -> Result<usize, i32> {
        let mut rings = self.rings.lock();
        let mut n = 0;
        while n < max
            && let Some(cqe) = rings.pop(|_| (), |()| ())
        {
            f(n, &cqe);
            n += 1;
        }
        if n > 0 {
            rings.release();
            return Ok(n);
        }
        let lost = rings.overrun();
        drop(rings);
        if lost || self.ctx.is_dead() {
            return Err(libc::EIO);
        }
        Ok(0)
    }

    /// Drops the completions of QP `qpn` that wait in the CQ.
    pub fn forget(&self, qpn: u32) {
        self.rings.lock().forget(qpn);
    }
}

/// Maps the ring that the kernel has made.
///
/// # Safety
/// `ctx` is an open context.
unsafe fn ring(ctx: *mut ibv_context, r: &kernel::CqResp) -> Result<CqTail, i32> {
    // SAFETY: by the contract.
    let memory = unsafe { map(ctx, r.offset, r.size) }?;
    let bytes = u64::from(r.entries) * size_of::<abi::Cqe>() as u64;
    let ctrl = memory.sub(0, size_of::<abi::CqCtrl>() as u64);
    let ring = memory.sub(r.ring_offset.into(), bytes);
    ctrl.zip(ring).and_then(|(ctrl, ring)| CqTail::new(ctrl, ring, r.entries)).ok_or(NONSENSE)
}

/// Makes a CQ.
///
/// # Safety
/// `ctx` is the caller's context, `channel` NULL or one of its channels.
unsafe fn make(
    ctx: *mut ibv_context,
    cqe: c_int,
    channel: *mut ibv_comp_channel,
    vector: c_int,
    single_threaded: bool,
) -> Result<*mut CqObj, i32> {
    // SAFETY: by the contract.
    let shared = unsafe { shared(ctx) };
    // Events name the CQ by its address, so the address must not change.
    let mut object = room::<CqObj>()?;
    let obj = object.as_mut_ptr();
    let (mut cmd, mut resp) = (CreateCq::new(), CqAnswer::new());
    let (cmd_size, resp_size) = (CreateCq::SIZE, CqAnswer::SIZE);
    // SAFETY: by the contract; a CQ that nobody else knows, and room for command and answer.
    unsafe {
        let cq = obj.cast();
        done(ibv_cmd_create_cq(ctx, cqe, channel, vector, cq, &mut cmd, cmd_size, &mut resp, resp_size))?;
        let tail = match ring(ctx, &resp.driver) {
            Ok(tail) => tail,
            Err(e) => {
                ibv_cmd_destroy_cq(cq);
                return Err(e);
            }
        };
        (&raw mut (*obj).ctx).write(shared);
        (&raw mut (*obj).rings).write(QueueLock::new(Completions::new(tail, ()), single_threaded));
        (&raw mut (*obj).poller).write(Poller::new(single_threaded));
    }
    // Everything is initialized: zeros are valid for the remaining members.
    Ok(Box::into_raw(object).cast())
}

pub unsafe extern "C" fn create(
    ctx: *mut ibv_context,
    cqe: c_int,
    channel: *mut ibv_comp_channel,
    vector: c_int,
) -> *mut ibv_cq {
    // SAFETY: as ibv_create_cq(3) demands.
    unsafe { make(ctx, cqe, channel, vector, false) }.map_or_else(null, |o| o.cast())
}

pub unsafe extern "C" fn create_ex(ctx: *mut ibv_context, init: *mut ibv_cq_init_attr_ex) -> *mut ibv_cq_ex {
    /// `IBV_WC_STANDARD_FLAGS`, and completion timestamps by the device's clock.
    const WC_FLAGS: u64 = 0xff | 1 << 10 | WALLCLOCK;
    const WALLCLOCK: u64 = 1 << 11;
    const MASK_FLAGS: u32 = 1;
    /// A parent domain. If it has a thread domain, one thread polls.
    const MASK_PD: u32 = 2;
    const SINGLE_THREADED: u32 = 1;
    const IGNORE_OVERRUN: u32 = 2;
    // SAFETY: the caller passes its attributes.
    let a = unsafe { &*init };
    let flags = if a.comp_mask & MASK_FLAGS != 0 { a.flags } else { 0 };
    // Ignoring overruns is accepted: this device never needs to.
    let known = flags & !(SINGLE_THREADED | IGNORE_OVERRUN) == 0;
    if a.comp_mask & !(MASK_FLAGS | MASK_PD) != 0 || a.wc_flags & !WC_FLAGS != 0 || !known {
        return null(libc::EOPNOTSUPP);
    }
    let (cqe, vector) = (c_int::try_from(a.cqe).unwrap_or(-1), c_int::try_from(a.comp_vector).unwrap_or(-1));
    // SAFETY: the caller passes its context, and a parent domain if it says so.
    let (offset, alone) = unsafe {
        let offset = if a.wc_flags & WALLCLOCK != 0 { wallclock_offset(ctx) } else { Ok(0) };
        let of_one = a.comp_mask & MASK_PD != 0 && has_thread_domain(a.parent_domain);
        (offset, of_one || flags & SINGLE_THREADED != 0)
    };
    // SAFETY: as ibv_create_cq_ex(3) demands.
    let made = offset.and_then(|o| unsafe { make(ctx, cqe, a.channel, vector, alone) }.map(|obj| (obj, o)));
    match made {
        Ok((obj, offset)) => {
            // SAFETY: just made; nobody else knows it yet.
            let obj = unsafe { &mut *obj };
            polling::fill::<CqObj>(&mut obj.c);
            obj.c.read_completion_wallclock_ns = Some(read_completion_wallclock_ns);
            obj.wallclock_offset = offset;
            std::ptr::from_mut(obj).cast()
        }
        Err(e) => null(e),
    }
}

/// The guest's wall clock minus the device's clock, ns. The device's clock is another machine's.
///
/// # Errors
/// The errno of the kernel driver.
///
/// # Safety
/// `ctx` is an open context.
unsafe fn wallclock_offset(ctx: *mut ibv_context) -> Result<u64, i32> {
    let wall_ns = || {
        let t = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
        t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
    };
    let before = wall_ns();
    // SAFETY: by the contract.
    let device = unsafe { clock_ns(ctx) }?;
    // The device has read its clock at some time between.
    let middle = before + wall_ns().saturating_sub(before) / 2;
    Ok(middle.wrapping_sub(device))
}

unsafe extern "C" fn read_completion_wallclock_ns(cq: *mut ibv_cq_ex) -> u64 {
    // SAFETY: called between start_poll and end_poll, by the thread that polls.
    unsafe { CqObj::current(cq).timestamp.wrapping_add((*cq.cast::<CqObj>()).wallclock_offset) }
}

/// Changes the moderation of events.
pub unsafe extern "C" fn modify(cq: *mut ibv_cq, attr: *mut ibv_modify_cq_attr) -> c_int {
    // SAFETY: the caller passes its CQ and attributes; room for the command.
    code(done(unsafe { ibv_cmd_modify_cq(cq, attr, &mut ModifyCq::new(), ModifyCq::SIZE) }))
}

pub unsafe extern "C" fn destroy(cq: *mut ibv_cq) -> c_int {
    // SAFETY: the caller passes its CQ, which `make` has boxed.
    unsafe {
        let r = ibv_cmd_destroy_cq(cq);
        if r == 0 {
            drop(Box::from_raw(cq.cast::<CqObj>()));
        }
        code(done(r))
    }
}

pub unsafe extern "C" fn resize(cq: *mut ibv_cq, cqe: c_int) -> c_int {
    // SAFETY: the caller passes its CQ.
    let (obj, ctx) = unsafe { (&*cq.cast::<CqObj>(), (*cq).context) };
    let mut rings = obj.rings.lock();
    // The kernel refuses numbers below 1.
    if u32::try_from(cqe).is_ok_and(|cqe| rings.waiting() > cqe) {
        return code(Err(libc::EINVAL));
    }
    let (mut cmd, mut resp) = (ResizeCq::new(), CqAnswer::new());
    // SAFETY: the caller's CQ, and room for command and answer.
    let made = unsafe {
        done(ibv_cmd_resize_cq(cq, cqe, &mut cmd, ResizeCq::SIZE, &mut resp, CqAnswer::SIZE))
            .and_then(|()| ring(ctx, &resp.driver))
    };
    code(made.map(|tail| rings.replace(tail, ())))
}

pub unsafe extern "C" fn poll(cq: *mut ibv_cq, n: c_int, wc: *mut ibv_wc) -> c_int {
    // SAFETY: the caller passes its CQ.
    let obj = unsafe { &*cq.cast::<CqObj>() };
    let max = usize::try_from(n).unwrap_or(0);
    // SAFETY: room for `n` completions, and i < n.
    let got = obj.poll(max, |i, c| unsafe { wc.add(i).write(completion(c)) });
    got.map_or(-1, |n| n as c_int)
}

pub unsafe extern "C" fn req_notify(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: the caller passes its CQ.
    let obj = unsafe { &*cq.cast::<CqObj>() };
    let flags = if solicited_only != 0 { abi::NOTIFY_SOLICITED } else { abi::NOTIFY_NEXT };
    obj.rings.lock().arm(flags);
    0
}

// SAFETY: the object of every CQ begins with its C structure.
unsafe impl ExtendedCq for CqObj {
    unsafe fn poller<'a>(cq: *mut ibv_cq_ex) -> &'a Poller {
        // SAFETY: by the contract.
        unsafe { &(*cq.cast::<CqObj>()).poller }
    }

    unsafe fn take(cq: *mut ibv_cq_ex) -> Result<bool, i32> {
        // SAFETY: by the contract.
        let obj = unsafe { &*cq.cast::<CqObj>() };
        // SAFETY: by the contract only the polling thread touches the current completion.
        obj.poll(1, |_, c| unsafe { *obj.current.get() = *c }).map(|n| n > 0)
    }

    unsafe fn current<'a>(cq: *mut ibv_cq_ex) -> &'a abi::Cqe {
        // SAFETY: by the contract.
        unsafe { &*(*cq.cast::<CqObj>()).current.get() }
    }
}
