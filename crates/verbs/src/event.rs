//! Completion channels and asynchronous events.
//!
//! Destroying an object waits until every event of it that was handed out has been acknowledged (`ibv_get_cq_event(3)`,
//! `ibv_get_async_event(3)`).

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Condvar, Mutex};

use unirdma_driver as driver;
use unirdma_formats::AsyncEvent;
use unirdma_verbs_abi::*;

use crate::device::{ContextObj, context};
use crate::trace::trace;
use crate::{lock, null, set_errno};

/// Events handed out and not yet acknowledged.
#[derive(Default)]
pub(crate) struct Outstanding(Mutex<u32>, Condvar);

impl Outstanding {
    pub fn give(&self) {
        *lock(&self.0) += 1;
    }
    pub fn ack(&self, n: u32) {
        let mut left = lock(&self.0);
        *left = left.saturating_sub(n);
        self.1.notify_all();
    }
    pub fn wait(&self) {
        let mut left = lock(&self.0);
        while *left > 0 {
            left = self.1.wait(left).unwrap_or_else(std::sync::PoisonError::into_inner);
        }
    }
}

#[repr(C)]
pub(crate) struct ChannelObj {
    c: ibv_comp_channel,
    events: driver::EventSource,
    /// CQs that use it.
    users: Mutex<u32>,
}

impl ChannelObj {
    /// Number of its completion event queue.
    pub fn number(&self) -> u32 {
        self.events.number()
    }

    /// Called after CQs were destroyed: removes events of CQs that are not in the table, so that the descriptor does
    /// not announce them.
    pub fn forget_cqs(&self, ctx: &ContextObj) {
        ctx.driver.forget(&self.events, |e| !lock(&ctx.cqs).contains_key(&e.handle));
    }

    pub fn add_user(&self, up: bool) {
        let mut n = lock(&self.users);
        *n = if up { *n + 1 } else { n.saturating_sub(1) };
    }
}

pub unsafe extern "C" fn x_ibv_create_comp_channel(c: *mut ibv_context) -> *mut ibv_comp_channel {
    trace!("ibv_create_comp_channel()");
    // SAFETY: the caller passes its context.
    let ctx = unsafe { context(c) };
    match ctx.driver.open_channel() {
        Ok(events) => {
            ctx.born();
            let c = ibv_comp_channel { context: c, fd: events.raw_fd(), refcnt: 0 };
            Box::into_raw(Box::new(ChannelObj { c, events, users: Mutex::new(0) })).cast()
        }
        Err(e) => null(e),
    }
}

pub unsafe extern "C" fn x_ibv_destroy_comp_channel(ch: *mut ibv_comp_channel) -> i32 {
    trace!("ibv_destroy_comp_channel()");
    // SAFETY: the caller passes its channel.
    let obj = unsafe { &*ch.cast::<ChannelObj>() };
    if *lock(&obj.users) > 0 {
        return libc::EBUSY;
    }
    // SAFETY: boxed in ibv_create_comp_channel; no CQ refers to it.
    let obj = unsafe { Box::from_raw(ch.cast::<ChannelObj>()) };
    // SAFETY: a channel's context is open.
    let ctx = unsafe { context(obj.c.context) };
    ctx.driver.close_channel(obj.events);
    ctx.gone();
    0
}

pub unsafe extern "C" fn x_ibv_get_cq_event(
    ch: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    cq_context: *mut *mut c_void,
) -> i32 {
    // SAFETY: the caller passes its channel.
    let obj = unsafe { &*ch.cast::<ChannelObj>() };
    // SAFETY: a channel's context is open.
    let ctx = unsafe { context(obj.c.context) };
    // No lock is held here, and there is nothing to drop: see `EventSource::next`.
    loop {
        let event = match obj.events.next() {
            Ok(e) => e,
            Err(e) => {
                set_errno(e);
                return -1;
            }
        };
        // Events of a CQ that was destroyed meanwhile are ignored.
        if let Some(found) = give_event(&ctx.cqs, event.handle, |cq| &cq.comp_events) {
            // SAFETY: destroying it waits for the acknowledgement; the caller passes room for both.
            unsafe {
                *cq = found.cast();
                *cq_context = (*found).c.base.cq_context;
            }
            trace!("ibv_get_cq_event() = cq {:#x}", event.handle);
            return 0;
        }
    }
}

pub unsafe extern "C" fn x_ibv_ack_cq_events(cq: *mut ibv_cq, n: u32) {
    trace!("ibv_ack_cq_events({n})");
    // SAFETY: the caller passes its CQ.
    let obj = unsafe { &mut *cq.cast::<crate::cq::CqObj>() };
    let done = &mut obj.c.base.comp_events_completed;
    *done = done.wrapping_add(n);
    obj.comp_events.ack(n);
}

/// The object of an event; `None` if it is gone. From here on, destroying the object waits for this event.
fn give_event<T>(table: &Mutex<HashMap<u32, *mut T>>, handle: u32, of: impl Fn(&T) -> &Outstanding) -> Option<*mut T> {
    let table = lock(table);
    let found = table.get(&handle).copied()?;
    // SAFETY: the table holds live objects only, and is locked.
    of(unsafe { &*found }).give();
    Some(found)
}

pub(crate) fn is_cq_event(kind: u32) -> bool {
    kind == AsyncEvent::CqErr as u32
}

pub(crate) fn is_qp_event(kind: u32) -> bool {
    use AsyncEvent::*;
    [QpFatal, QpReqErr, QpAccessErr, CommEst, SqDrained, QpLastWqeReached].iter().any(|&k| k as u32 == kind)
}

pub(crate) fn is_srq_event(kind: u32) -> bool {
    [AsyncEvent::SrqErr, AsyncEvent::SrqLimitReached].iter().any(|&k| k as u32 == kind)
}

pub unsafe extern "C" fn x_ibv_get_async_event(c: *mut ibv_context, event: *mut ibv_async_event) -> i32 {
    // SAFETY: the caller passes its context.
    let ctx = unsafe { context(c) };
    // No lock is held here, and there is nothing to drop: see `EventSource::next`.
    loop {
        let e = match ctx.driver.next_async() {
            Ok(e) => e,
            Err(e) => {
                set_errno(e);
                return -1;
            }
        };
        let element: *mut c_void = if is_cq_event(e.kind) {
            let Some(cq) = give_event(&ctx.cqs, e.handle, |o| &o.async_events) else { continue };
            cq.cast()
        } else if is_qp_event(e.kind) {
            let Some(qp) = give_event(&ctx.qps, e.handle, |o| &o.async_events) else { continue };
            qp.cast()
        } else if is_srq_event(e.kind) {
            let Some(srq) = give_event(&ctx.srqs, e.handle, |o| &o.async_events) else { continue };
            srq.cast()
        } else {
            e.handle as usize as *mut c_void
        };
        trace!("ibv_get_async_event() = {} of {:#x}", e.kind, e.handle);
        // SAFETY: the caller passes room for the event.
        unsafe { *event = ibv_async_event { element, event_type: e.kind } };
        return 0;
    }
}

pub unsafe extern "C" fn x_ibv_ack_async_event(event: *mut ibv_async_event) {
    // SAFETY: the caller gives back an event that it got.
    if unsafe { crate::hosted::ack_async_event(event) } {
        return;
    }
    // SAFETY: as above; the event's object lives until then.
    unsafe {
        let e = &*event;
        if is_cq_event(e.event_type) {
            let cq = &mut *e.element.cast::<crate::cq::CqObj>();
            let done = &mut cq.c.base.async_events_completed;
            *done = done.wrapping_add(1);
            cq.async_events.ack(1);
        } else if is_qp_event(e.event_type) {
            let qp = &mut *e.element.cast::<crate::qp::QpObj>();
            let done = &mut qp.c.qp_base.events_completed;
            *done = done.wrapping_add(1);
            qp.async_events.ack(1);
        } else if is_srq_event(e.event_type) {
            let srq = &mut *e.element.cast::<crate::srq::SrqObj>();
            srq.c.events_completed = srq.c.events_completed.wrapping_add(1);
            srq.async_events.ack(1);
        }
    }
    trace!("ibv_ack_async_event()");
}
