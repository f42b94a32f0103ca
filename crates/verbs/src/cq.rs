//! Completion queues.

use std::cell::UnsafeCell;
use std::ffi::c_void;
use std::sync::OnceLock;

use unirdma_abi as abi;
use unirdma_driver as driver;
use unirdma_queues::polling::Poller;
use unirdma_queues::requests::completion;
use unirdma_verbs_abi::*;

use crate::device::context;
use crate::event::{ChannelObj, Outstanding, is_cq_event};
use crate::tm::{Done, Matching};
use crate::trace::trace;
use crate::{code, lock, null};

#[repr(C)]
pub(crate) struct CqObj {
    pub c: ibv_cq_ex,
    pub cq: driver::Cq,
    pub comp_events: Outstanding,
    pub async_events: Outstanding,
    pub poller: Poller,
    /// The completion that `start_poll` or `next_poll` has found.
    pub current: UnsafeCell<Done>,
    /// Tag matching, if SRQs with tag matching use this CQ.
    pub tm: OnceLock<Matching>,
}

pub unsafe extern "C" fn x_ibv_create_cq(
    c: *mut ibv_context,
    cqe: i32,
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    comp_vector: i32,
) -> *mut ibv_cq {
    // SAFETY: as ibv_create_cq(3) demands.
    unsafe { create(c, cqe, cq_context, channel, comp_vector, false) }.map_or_else(null, |o| o.cast())
}

/// Makes a CQ.
///
/// # Safety
/// `c` is the caller's context, `channel` NULL or one of its channels.
pub(crate) unsafe fn create(
    c: *mut ibv_context,
    cqe: i32,
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    comp_vector: i32,
    single_threaded: bool,
) -> Result<*mut CqObj, i32> {
    // SAFETY: by the contract.
    let ctx = unsafe { context(c) };
    if comp_vector < 0 || comp_vector >= ctx.c.context.num_comp_vectors || cqe <= 0 {
        return Err(libc::EINVAL);
    }
    // SAFETY: NULL or a channel of this context.
    let channel_obj = unsafe { channel.cast::<ChannelObj>().as_ref() };
    let made = driver::Cq::create(&ctx.driver, cqe as u32, channel_obj.map(ChannelObj::number), single_threaded);
    trace!("ibv_create_cq({cqe}) = {:?}", made.as_ref().map(|cq| cq.cqn));
    let cq = made?;
    // SAFETY: integers, pointers, optional functions and zeroed pthread objects.
    let mut raw: ibv_cq_ex = unsafe { std::mem::zeroed() };
    raw.base.context = c;
    raw.base.channel = channel;
    raw.base.cq_context = cq_context;
    raw.base.handle = cq.cqn;
    raw.base.cqe = cq.capacity() as i32;
    let handle = cq.cqn;
    let obj = Box::into_raw(Box::new(CqObj {
        c: raw,
        cq,
        comp_events: Outstanding::default(),
        async_events: Outstanding::default(),
        poller: Poller::new(single_threaded),
        current: UnsafeCell::default(),
        tm: OnceLock::new(),
    }));
    if let Some(ch) = channel_obj {
        ch.add_user(true);
    }
    ctx.born();
    lock(&ctx.cqs).insert(handle, obj);
    Ok(obj)
}

pub unsafe extern "C" fn x_ibv_resize_cq(cq: *mut ibv_cq, cqe: i32) -> i32 {
    // SAFETY: the caller passes its CQ.
    let obj = unsafe { &mut *cq.cast::<CqObj>() };
    let r = u32::try_from(cqe).map_err(|_| libc::EINVAL).and_then(|n| obj.cq.resize(n));
    trace!("ibv_resize_cq({:#x}, {cqe}) = {r:?}", obj.c.base.handle);
    obj.c.base.cqe = obj.cq.capacity() as i32;
    code(r)
}

pub(crate) unsafe extern "C" fn modify_cq(cq: *mut ibv_cq, attr: *mut ibv_modify_cq_attr) -> i32 {
    // SAFETY: the caller passes its CQ and the attributes.
    let (obj, a) = unsafe { (&*cq.cast::<CqObj>(), *attr) };
    let r = match a.attr_mask {
        0 => Ok(()),
        IBV_CQ_ATTR_MODERATE => obj.cq.moderate(a.cq_count, a.cq_period),
        _ => Err(libc::EOPNOTSUPP),
    };
    trace!("ibv_modify_cq({:#x}, {:#x}, {}, {}) = {r:?}", obj.c.base.handle, a.attr_mask, a.cq_count, a.cq_period);
    code(r)
}

pub unsafe extern "C" fn x_ibv_destroy_cq(cq: *mut ibv_cq) -> i32 {
    // SAFETY: the caller passes its CQ.
    let obj = unsafe { &*cq.cast::<CqObj>() };
    // SAFETY: a CQ's context is open.
    let ctx = unsafe { context(obj.c.base.context) };
    let r = obj.cq.destroy();
    trace!("ibv_destroy_cq({:#x}) = {r:?}", obj.c.base.handle);
    if r.is_err() {
        return code(r);
    }
    lock(&ctx.cqs).remove(&obj.c.base.handle);
    // SAFETY: NULL or the CQ's channel, which lives while CQs use it.
    let channel = unsafe { obj.c.base.channel.cast::<ChannelObj>().as_ref() };
    if let Some(ch) = channel {
        ch.forget_cqs(ctx);
    }
    ctx.driver.forget_async(|e| is_cq_event(e.kind) && e.handle == obj.c.base.handle);
    obj.comp_events.wait();
    obj.async_events.wait();
    if let Some(ch) = channel {
        ch.add_user(false);
    }
    // SAFETY: boxed in ibv_create_cq; out of the table, all events acknowledged.
    unsafe { drop(Box::from_raw(cq.cast::<CqObj>())) };
    ctx.gone();
    0
}

/// Its address tells this library's contexts from others, so there must be one of it.
#[inline(never)]
pub(crate) unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, n: i32, wc: *mut ibv_wc) -> i32 {
    // SAFETY: the caller passes its CQ.
    let obj = unsafe { &*cq.cast::<CqObj>() };
    let max = usize::try_from(n).unwrap_or(0);
    let put = |i: usize, c: &abi::Cqe| {
        // SAFETY: room for `n` completions, and i < n.
        unsafe { wc.add(i).write(completion(c)) };
        trace!(
            "ibv_poll_cq({:#x}): wr_id {:#x} status {} opcode {} len {}",
            obj.c.base.handle, c.wr_id, c.status, c.opcode, c.byte_len
        );
    };
    let got = match obj.tm.get() {
        None => obj.cq.poll(max, put),
        Some(tm) => tm.poll(&obj.cq, max, |i, d| put(i, &d.cqe)),
    };
    got.map_or(-1, |n| n as i32)
}

pub(crate) unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, solicited_only: i32) -> i32 {
    // SAFETY: the caller passes its CQ.
    let obj = unsafe { &*cq.cast::<CqObj>() };
    trace!("ibv_req_notify_cq({:#x}, {solicited_only})", obj.c.base.handle);
    obj.cq.arm(solicited_only != 0);
    0
}
