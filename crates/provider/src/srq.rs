//! Shared receive queues.

use std::os::raw::c_int;
use std::sync::Arc;

use unirdma_abi as abi;
use unirdma_mem::{QpRings, Span};
use unirdma_queues::domain::has_thread_domain;
use unirdma_queues::requests::{each_receive, sges};
use unirdma_queues::{QueueLock, WorkQueue};
use unirdma_verbs_abi::*;

use crate::context::{Shared, shared};
use crate::ibverbs::*;
use crate::memory::{NONSENSE, map, room};
use crate::{code, done, kernel, null};

#[repr(C)]
struct SrqObj {
    c: verbs_srq,
    ctx: Arc<Shared>,
    max_sge: u32,
    /// The control block, which a resize keeps.
    ctrl: Span,
    rq: QueueLock<WorkQueue>,
}

/// Maps the ring that the kernel has made.
///
/// # Safety
/// `ctx` is an open context.
unsafe fn ring(ctx: *mut ibv_context, r: &kernel::SrqResp) -> Result<(Span, QpRings), i32> {
    // SAFETY: by the contract.
    let memory = unsafe { map(ctx, r.offset, r.size) }?;
    let ctrl = memory.sub(0, size_of::<abi::QpCtrl>() as u64).ok_or(NONSENSE)?;
    let rings = rings(&ctrl, &memory, r.ring_offset.into(), layout(r.entries, r.stride)?)?;
    Ok((ctrl, rings))
}

/// The layout of a ring of the kernel.
fn layout(entries: u32, stride: u32) -> Result<abi::QpLayout, i32> {
    let least = abi::RQ_DATA as u32 + size_of::<abi::Sge>() as u32;
    if !entries.is_power_of_two() || stride < least || stride % 16 != 0 {
        return Err(NONSENSE);
    }
    let no_sq = abi::QpLayout::of(&abi::QpCap::default()).ok_or(NONSENSE)?;
    Ok(abi::QpLayout { rq_entries: entries, rq_stride: stride, ..no_sq })
}

/// A ring at `offset` of a mapping, with its control block.
fn rings(ctrl: &Span, memory: &Span, offset: u64, layout: abi::QpLayout) -> Result<QpRings, i32> {
    let ring = memory.sub(offset, layout.rq_bytes() as u64).ok_or(NONSENSE)?;
    QpRings::receive_only(ctrl.clone(), ring, layout).ok_or(NONSENSE)
}

/// Makes an SRQ.
///
/// # Safety
/// The PD and the other objects that the attributes name are the caller's.
unsafe fn make(init: &mut ibv_srq_init_attr_ex) -> Result<*mut SrqObj, i32> {
    let pd = init.pd;
    // SAFETY: by the contract.
    let (ctx, alone) = unsafe { ((*pd).context, has_thread_domain(pd)) };
    // SAFETY: a PD's context is open.
    let shared = unsafe { shared(ctx) };
    // Events name the SRQ by its address, so the address must not change.
    let mut object = room::<SrqObj>()?;
    let obj = object.as_mut_ptr();
    let (mut cmd, mut resp) = (CreateXsrq::new(), SrqAnswer::new());
    let (cmd_size, resp_size) = (CreateXsrq::SIZE, SrqAnswer::SIZE);
    // SAFETY: by the contract; an SRQ that nobody else knows, and room for command and answer.
    unsafe {
        done(ibv_cmd_create_srq_ex(ctx, obj.cast(), init, &mut cmd, cmd_size, &mut resp, resp_size))?;
        let (ctrl, rings) = match ring(ctx, &resp.driver) {
            Ok(made) => made,
            Err(e) => {
                ibv_cmd_destroy_srq(obj.cast());
                return Err(e);
            }
        };
        let room = (resp.driver.stride - abi::RQ_DATA as u32) / size_of::<abi::Sge>() as u32;
        init.attr.max_sge = init.attr.max_sge.min(room);
        // libibverbs sets these only for ibv_create_srq(3).
        ((*obj).c.srq.srq_context, (*obj).c.srq.pd) = (init.srq_context, pd);
        (&raw mut (*obj).ctx).write(shared);
        (&raw mut (*obj).max_sge).write(init.attr.max_sge);
        (&raw mut (*obj).ctrl).write(ctrl);
        (&raw mut (*obj).rq).write(QueueLock::new(WorkQueue::new(rings), alone));
    }
    // Everything is initialized: zeros are valid for the remaining members.
    Ok(Box::into_raw(object).cast())
}

pub unsafe extern "C" fn create(pd: *mut ibv_pd, init: *mut ibv_srq_init_attr) -> *mut ibv_srq {
    // SAFETY: the caller passes its attributes; all zeros are valid.
    let (a, mut all) = unsafe { (&mut *init, std::mem::zeroed::<ibv_srq_init_attr_ex>()) };
    (all.srq_context, all.attr, all.comp_mask, all.srq_type, all.pd) = (a.srq_context, a.attr, TYPE | PD, BASIC, pd);
    // SAFETY: as ibv_create_srq(3) demands.
    let made = unsafe { make(&mut all) };
    a.attr = all.attr;
    made.map_or_else(null, |o| o.cast())
}

/// `IBV_SRQ_MAX_WR` and `IBV_SRQ_LIMIT`.
const MAX_WR: c_int = 1;
const LIMIT: c_int = 2;

/// `IBV_SRQ_INIT_ATTR_*`, and two types.
const TYPE: u32 = 1;
const PD: u32 = 2;
const XRCD: u32 = 4;
const CQ: u32 = 8;
const BASIC: u32 = 0;
const XRC: u32 = 1;

pub unsafe extern "C" fn create_ex(ctx: *mut ibv_context, init: *mut ibv_srq_init_attr_ex) -> *mut ibv_srq {
    // SAFETY: the caller passes its attributes.
    let a = unsafe { &mut *init };
    let given = |bit: u32| a.comp_mask & bit != 0;
    let typ = if given(TYPE) { a.srq_type } else { BASIC };
    if a.comp_mask & !(TYPE | PD | XRCD | CQ) != 0 || typ > XRC {
        return null(libc::EOPNOTSUPP);
    }
    // SAFETY: a PD of the caller, if there is one.
    let has_pd = given(PD) && unsafe { a.pd.as_ref() }.is_some_and(|pd| pd.context == ctx);
    let has_xrc = given(XRCD) && given(CQ) && !a.xrcd.is_null() && !a.cq.is_null();
    if !has_pd || typ == XRC && !has_xrc {
        return null(libc::EINVAL);
    }
    if typ == BASIC {
        (a.comp_mask, a.srq_type) = (TYPE | PD, BASIC);
    }
    // SAFETY: as ibv_create_srq_ex(3) demands.
    unsafe { make(a) }.map_or_else(null, |o| o.cast())
}

/// The number by which XRC requests name it.
pub unsafe extern "C" fn number(srq: *mut ibv_srq, number: *mut u32) -> c_int {
    // SAFETY: the caller passes its SRQ, and room for a number.
    unsafe {
        let c = &(*srq.cast::<SrqObj>()).c;
        if c.srq_type != XRC {
            return libc::EINVAL;
        }
        *number = c.srq_num;
    }
    0
}

pub unsafe extern "C" fn modify(srq: *mut ibv_srq, attr: *mut ibv_srq_attr, mask: c_int) -> c_int {
    if mask & !(MAX_WR | LIMIT) != 0 {
        return code(Err(libc::EINVAL));
    }
    // One after the other: it must be known whether the ring was replaced.
    // SAFETY: the caller passes its SRQ and attributes.
    unsafe {
        let resized = if mask & MAX_WR != 0 { resize(&mut *srq, attr) } else { Ok(()) };
        code(resized.and_then(|()| match mask & LIMIT {
            0 => Ok(()),
            _ => done(ibv_cmd_modify_srq(srq, attr, LIMIT, &mut ModifySrq::new(), ModifySrq::SIZE)),
        }))
    }
}

/// Changes the size.
///
/// # Safety
/// SRQ and attributes are the caller's.
unsafe fn resize(srq: &mut ibv_srq, attr: *mut ibv_srq_attr) -> Result<(), i32> {
    let (srq, ctx) = (std::ptr::from_mut(srq), srq.context);
    // SAFETY: by the contract.
    let obj = unsafe { &*srq.cast::<SrqObj>() };
    // Nothing is posted while the kernel copies the waiting receives.
    let mut rq = obj.rq.lock();
    let mut resp = kernel::ResizeSrqResp::default();
    let mut cmd = ModifySrq::answer(&mut resp);
    // SAFETY: by the contract; the command names the room for the answer. An SRQ's context is open.
    let memory = unsafe {
        done(ibv_cmd_modify_srq(srq, attr, MAX_WR, &mut cmd, ModifySrq::SIZE))?;
        map(ctx, resp.offset, resp.size)
    }?;
    let layout = layout(resp.entries, rq.rings.layout().rq_stride)?;
    rq.rings = rings(&obj.ctrl, &memory, 0, layout)?;
    Ok(())
}

pub unsafe extern "C" fn query(srq: *mut ibv_srq, attr: *mut ibv_srq_attr) -> c_int {
    // SAFETY: the caller passes its SRQ with room for the attributes; room for the command.
    code(done(unsafe { ibv_cmd_query_srq(srq, attr, &mut QuerySrq::new(), QuerySrq::SIZE) }))
}

pub unsafe extern "C" fn destroy(srq: *mut ibv_srq) -> c_int {
    // SAFETY: the caller passes its SRQ, which `make` has boxed.
    unsafe {
        let r = ibv_cmd_destroy_srq(srq);
        if r == 0 {
            drop(Box::from_raw(srq.cast::<SrqObj>()));
        }
        code(done(r))
    }
}

pub unsafe extern "C" fn post_recv(srq: *mut ibv_srq, wr: *mut ibv_recv_wr, bad: *mut *mut ibv_recv_wr) -> c_int {
    // SAFETY: the caller passes its SRQ.
    let obj = unsafe { &*srq.cast::<SrqObj>() };
    let mut rq = obj.rq.lock();
    // SAFETY: the caller passes a list of valid work requests that ends with NULL.
    let r = unsafe {
        each_receive(wr, bad, |r| match obj.ctx.is_dead() {
            true => Err(libc::EIO),
            false => rq.put_receive(r.wr_id, sges(r.sg_list, r.num_sge)?, obj.max_sge),
        })
    };
    // An SRQ has no doorbell: the device looks for its receives when a QP needs one.
    rq.publish_receives();
    code(r)
}
