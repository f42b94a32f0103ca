//! Shared receive queues.

use unirdma_driver as driver;
use unirdma_verbs_abi::*;

use crate::cq::CqObj;
use crate::device::context;
use crate::event::{Outstanding, is_srq_event};
use crate::qp::push_receives;
use crate::trace::trace;
use crate::{code, lock, null};

#[repr(C)]
pub(crate) struct SrqObj {
    pub c: ibv_srq,
    pub srq: driver::Srq,
    pub async_events: Outstanding,
    /// The CQ of a tag-matching SRQ; `None` for other SRQs.
    pub tm: Option<*const CqObj>,
}

const SRQ_MAX_WR: i32 = 1;
const SRQ_LIMIT: i32 = 2;

pub unsafe extern "C" fn x_ibv_create_srq(pd: *mut ibv_pd, init: *mut ibv_srq_init_attr) -> *mut ibv_srq {
    // SAFETY: the caller passes its PD and attributes.
    unsafe { create(pd, (*init).srq_context, &mut (*init).attr, None) }
}

/// Makes an SRQ; `xrc`: the handles of its XRC domain and CQ.
///
/// # Safety
/// `pd` is the caller's.
pub(crate) unsafe fn create(
    pd: *mut ibv_pd,
    srq_context: *mut std::ffi::c_void,
    attr: &mut ibv_srq_attr,
    xrc: Option<(u32, u32)>,
) -> *mut ibv_srq {
    // SAFETY: by the contract.
    let (c, pdn) = unsafe { ((*pd).context, (*pd).handle) };
    // SAFETY: a PD's context is open.
    let ctx = unsafe { context(c) };
    let a = *attr;
    // SAFETY: the caller's PD.
    let alone = unsafe { crate::domain::has_thread_domain(pd) };
    match driver::Srq::create(&ctx.driver, pdn, a.max_wr, a.max_sge, xrc, alone) {
        Ok(srq) => {
            trace!("ibv_create_srq({a:?}) = {:#x}", srq.srqn);
            attr.max_wr = srq.max_wr();
            // SAFETY: integers, pointers and zeroed pthread objects.
            let mut raw: ibv_srq = unsafe { std::mem::zeroed() };
            (raw.context, raw.srq_context, raw.pd, raw.handle) = (c, srq_context, pd, srq.srqn);
            let handle = srq.srqn;
            let obj = Box::into_raw(Box::new(SrqObj { c: raw, srq, async_events: Outstanding::default(), tm: None }));
            ctx.born();
            // SAFETY: the caller's PD, which the object names.
            unsafe { crate::domain::hold(pd) };
            lock(&ctx.srqs).insert(handle, obj);
            obj.cast()
        }
        Err(e) => {
            trace!("ibv_create_srq({a:?}): errno {e}");
            null(e)
        }
    }
}

pub unsafe extern "C" fn x_ibv_destroy_srq(srq: *mut ibv_srq) -> i32 {
    // SAFETY: the caller passes its SRQ.
    let obj = unsafe { &*srq.cast::<SrqObj>() };
    // SAFETY: an SRQ's context is open.
    let ctx = unsafe { context(obj.c.context) };
    // SAFETY: the CQ of a tag-matching SRQ lives as long as it does.
    let left = obj.tm.map_or(Ok(()), |cq| crate::tm::destroy(unsafe { &*cq }, obj.c.handle));
    let r = left.and_then(|()| obj.srq.destroy());
    trace!("ibv_destroy_srq({:#x}) = {r:?}", obj.c.handle);
    if r.is_err() {
        return code(r);
    }
    lock(&ctx.srqs).remove(&obj.c.handle);
    ctx.driver.forget_async(|e| is_srq_event(e.kind) && e.handle == obj.c.handle);
    obj.async_events.wait();
    // SAFETY: boxed in ibv_create_srq; out of the table, all events acknowledged; its PD lives.
    unsafe {
        crate::domain::release((*srq).pd);
        drop(Box::from_raw(srq.cast::<SrqObj>()));
    }
    ctx.gone();
    0
}

pub unsafe extern "C" fn x_ibv_modify_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr, mask: i32) -> i32 {
    // SAFETY: the caller passes its SRQ and attributes.
    let (obj, a) = unsafe { (&*srq.cast::<SrqObj>(), &*attr) };
    trace!("ibv_modify_srq({:#x}, mask {mask:#x})", obj.c.handle);
    if mask & !(SRQ_MAX_WR | SRQ_LIMIT) != 0 {
        return code(Err(libc::EINVAL));
    }
    if mask & SRQ_MAX_WR != 0
        && let Err(e) = obj.srq.resize(a.max_wr)
    {
        return code(Err(e));
    }
    if mask & SRQ_LIMIT == 0 {
        return 0;
    }
    code(obj.srq.set_limit(a.srq_limit))
}

pub unsafe extern "C" fn x_ibv_query_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr) -> i32 {
    // SAFETY: the caller passes its SRQ.
    let obj = unsafe { &*srq.cast::<SrqObj>() };
    match obj.srq.query() {
        Ok(a) => {
            // SAFETY: room for the attributes.
            unsafe { *attr = ibv_srq_attr { max_wr: a.max_wr, max_sge: a.max_sge, srq_limit: a.limit } };
            0
        }
        Err(e) => code(Err(e)),
    }
}

pub(crate) unsafe extern "C" fn post_srq_recv(
    srq: *mut ibv_srq,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> i32 {
    // SAFETY: the caller passes its SRQ.
    let obj = unsafe { &*srq.cast::<SrqObj>() };
    trace!("ibv_post_srq_recv({:#x})", obj.c.handle);
    if let Some(cq) = obj.tm {
        // SAFETY: as above, and as ibv_post_srq_recv(3) demands of the caller.
        return unsafe { crate::tm::post_receives(&*cq, obj, wr, bad) };
    }
    // SAFETY: as ibv_post_srq_recv(3) demands of the caller.
    unsafe { push_receives(obj.srq.recv_batch(), wr, bad) }
}
