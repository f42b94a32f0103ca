//! Shared receive queues.

use std::os::raw::c_int;
use std::sync::Arc;

use unirdma_abi as abi;
use unirdma_mem::QpRings;
use unirdma_queues::requests::{each_receive, sges};
use unirdma_queues::{QueueLock, WorkQueue};
use unirdma_verbs_abi::*;

use crate::context::{Shared, shared};
use crate::ibverbs::*;
use crate::memory::{NONSENSE, map, room};
use crate::{code, done, kernel, null};

#[repr(C)]
struct SrqObj {
    c: ibv_srq,
    ctx: Arc<Shared>,
    max_sge: u32,
    rq: QueueLock<WorkQueue>,
}

/// The ring that the kernel has made.
///
/// # Safety
/// `ctx` is an open context.
unsafe fn ring(ctx: *mut ibv_context, r: &kernel::SrqResp) -> Result<QpRings, i32> {
    let least = abi::RQ_DATA as u32 + size_of::<abi::Sge>() as u32;
    if !r.entries.is_power_of_two() || r.stride < least || r.stride % 16 != 0 {
        return Err(NONSENSE);
    }
    let no_sq = abi::QpLayout::of(&abi::QpCap::default()).ok_or(NONSENSE)?;
    let layout = abi::QpLayout { rq_entries: r.entries, rq_stride: r.stride, ..no_sq };
    // SAFETY: by the contract.
    let memory = unsafe { map(ctx, r.offset, r.size) }?;
    let ctrl = memory.sub(0, size_of::<abi::QpCtrl>() as u64);
    let ring = memory.sub(r.ring_offset.into(), layout.rq_bytes() as u64);
    ctrl.zip(ring).and_then(|(ctrl, ring)| QpRings::receive_only(ctrl, ring, layout)).ok_or(NONSENSE)
}

/// Makes an SRQ.
///
/// # Safety
/// `pd` is the caller's.
unsafe fn make(pd: *mut ibv_pd, init: &mut ibv_srq_init_attr) -> Result<*mut SrqObj, i32> {
    // SAFETY: by the contract.
    let ctx = unsafe { (*pd).context };
    // SAFETY: a PD's context is open.
    let shared = unsafe { shared(ctx) };
    // Events name the SRQ by its address.
    let mut object = room::<SrqObj>()?;
    let obj = object.as_mut_ptr();
    let (mut cmd, mut resp) = (CreateSrq::new(), SrqAnswer::new());
    // SAFETY: by the contract; an SRQ that nobody else knows, and room for command and answer.
    unsafe {
        let srq = obj.cast();
        done(ibv_cmd_create_srq(pd, srq, init, &mut cmd, CreateSrq::SIZE, &mut resp, SrqAnswer::SIZE))?;
        let rings = match ring(ctx, &resp.driver) {
            Ok(rings) => rings,
            Err(e) => {
                ibv_cmd_destroy_srq(srq);
                return Err(e);
            }
        };
        let room = (resp.driver.stride - abi::RQ_DATA as u32) / size_of::<abi::Sge>() as u32;
        init.attr.max_sge = init.attr.max_sge.min(room);
        (&raw mut (*obj).ctx).write(shared);
        (&raw mut (*obj).max_sge).write(init.attr.max_sge);
        (&raw mut (*obj).rq).write(QueueLock::new(WorkQueue::new(rings), false));
    }
    // All is initialized: zeros are a valid value of the rest.
    Ok(Box::into_raw(object).cast())
}

pub unsafe extern "C" fn create(pd: *mut ibv_pd, init: *mut ibv_srq_init_attr) -> *mut ibv_srq {
    // SAFETY: as ibv_create_srq(3) demands.
    unsafe { make(pd, &mut *init) }.map_or_else(null, |o| o.cast())
}

pub unsafe extern "C" fn modify(srq: *mut ibv_srq, attr: *mut ibv_srq_attr, mask: c_int) -> c_int {
    /// `IBV_SRQ_LIMIT`. The kernel has no way to tell of another ring.
    const LIMIT: c_int = 2;
    if mask & !LIMIT != 0 {
        return code(Err(libc::EOPNOTSUPP));
    }
    // SAFETY: the caller passes its SRQ and attributes; room for the command.
    code(done(unsafe { ibv_cmd_modify_srq(srq, attr, mask, &mut ModifySrq::new(), ModifySrq::SIZE) }))
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
    // An SRQ has no doorbell: QPs look for its receives by themselves.
    rq.publish_receives();
    code(r)
}
