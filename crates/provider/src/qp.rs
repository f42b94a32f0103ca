//! Queue pairs and posting.

use std::mem::offset_of;
use std::os::raw::c_int;
use std::ptr::null_mut;
use std::sync::Arc;

use unirdma_abi as abi;
use unirdma_formats::{QpState, QpType, attr_mask};
use unirdma_mem::{QpRings, Span};
use unirdma_queues::builder::{self, Builder, ExtendedQp};
use unirdma_queues::domain::has_thread_domain;
use unirdma_queues::requests::{bind_posted, each_receive, each_send, post_send_request, sges};
use unirdma_queues::{Batch, Held, Post, QueueLock, SendWr, WorkQueue};
use unirdma_verbs_abi::*;

use crate::context::{Shared, shared};
use crate::cq::CqObj;
use crate::ibverbs::*;
use crate::memory::{NONSENSE, map, room};
use crate::{ah, code, done, kernel, null};

#[repr(C)]
pub struct QpObj {
    c: ibv_qp_ex,
    /// `comp_mask` and `xrcd` of libibverbs' `verbs_qp`, in the layout of versions since 45.
    mask: u64,
    xrcd: usize,
    ctx: Arc<Shared>,
    typ: QpType,
    slot: u32,
    max_inline: u32,
    max_send_sge: u32,
    max_recv_sge: u32,
    sq: QueueLock<WorkQueue>,
    rq: QueueLock<WorkQueue>,
    /// Requests under construction by `ibv_wr_*`; `None` unless the QP was created for that.
    builder: Option<Box<Builder<Sends<'static>>>>,
}

const _: () =
    assert!(offset_of!(QpObj, mask) == 360 + MUTEX_EXTRA && offset_of!(ibv_qp_ex, wr_flush) == 352 + MUTEX_EXTRA);

impl QpObj {
    /// Its CQs.
    fn cqs(&self) -> impl Iterator<Item = &CqObj> {
        let base = &self.c.qp_base;
        // SAFETY: a QP's CQs live as long as it does.
        [base.send_cq, base.recv_cq].into_iter().filter_map(|cq| unsafe { cq.cast::<CqObj>().as_ref() })
    }

    fn begin_sends(&self) -> Sends<'_> {
        self.ctx.expect_ring(self.slot);
        Sends { qp: self, sq: self.sq.lock() }
    }

    fn state(&self) -> u32 {
        self.c.qp_base.state
    }

    /// Posts one request without data.
    ///
    /// # Errors
    /// `EIO` if the device is gone, `ENOMEM` if the SQ is full.
    pub fn push_alone(&self, head: &abi::SqWqe) -> Result<(), i32> {
        // SAFETY: no inline data.
        unsafe { self.begin_sends().push(head, SendWr::Sges(&[])) }
    }
}

/// The rings of a QP, and the capacity of their slots.
struct Made {
    rings: QpRings,
    max_inline: u32,
    max_send_sge: u32,
    max_recv_sge: u32,
}

/// Maps the rings that the kernel has made.
///
/// # Safety
/// `ctx` is an open context.
unsafe fn rings(ctx: *mut ibv_context, r: &kernel::QpResp) -> Result<Made, i32> {
    const SGE: u32 = size_of::<abi::Sge>() as u32;
    if r.size == 0 {
        return nothing_to_post();
    }
    // A QP with an SRQ may have no RQ.
    let (rq_entries, rq_stride) =
        if r.rq_entries == 0 { (1, abi::RQ_DATA as u32 + SGE) } else { (r.rq_entries, r.rq_stride) };
    let layout = abi::QpLayout { sq_entries: r.sq_entries, sq_stride: r.sq_stride, rq_entries, rq_stride };
    let sound = layout.sq_entries.is_power_of_two()
        && layout.rq_entries.is_power_of_two()
        && layout.sq_stride > abi::SQ_DATA as u32
        && layout.sq_stride % 64 == 0
        && layout.rq_stride >= abi::RQ_DATA as u32 + SGE
        && layout.rq_stride % 16 == 0
        && r.db_slot < abi::MAX_QP;
    if !sound {
        return Err(NONSENSE);
    }
    // SAFETY: by the contract.
    let memory = unsafe { map(ctx, r.offset, r.size) }?;
    let part = |off: u32, bytes: usize| memory.sub(off.into(), bytes as u64).ok_or(NONSENSE);
    let (ctrl, sq) = (part(0, size_of::<abi::QpCtrl>())?, part(r.sq_offset, layout.sq_bytes())?);
    let rings = if r.rq_entries == 0 {
        QpRings::send_only(ctrl, sq, layout)
    } else {
        QpRings::new(ctrl, sq, part(r.rq_offset, layout.rq_bytes())?, layout)
    };
    Ok(Made {
        rings: rings.ok_or(NONSENSE)?,
        max_inline: r.max_inline.min(layout.inline_room()),
        max_send_sge: r.max_send_sge.min((layout.sq_stride - abi::SQ_DATA as u32) / SGE),
        max_recv_sge: if r.rq_entries == 0 {
            0
        } else {
            r.max_recv_sge.min((layout.rq_stride - abi::RQ_DATA as u32) / SGE)
        },
    })
}

/// Rings that only this process has, for the target of an XRC connection: nothing is ever posted to it.
fn nothing_to_post() -> Result<Made, i32> {
    const ALIGN: usize = 64;
    let layout = abi::QpLayout::of(&abi::QpCap::default()).ok_or(NONSENSE)?;
    let sizes = [size_of::<abi::QpCtrl>(), layout.sq_bytes(), layout.rq_bytes()].map(|n| n.next_multiple_of(ALIGN));
    let memory = Span::anonymous(ALIGN + sizes.iter().sum::<usize>());
    let mut at = memory.addr().next_multiple_of(ALIGN) - memory.addr();
    let [ctrl, sq, rq] = sizes.map(|n| {
        let part = memory.sub(at as u64, n as u64);
        at += n;
        part
    });
    let rings = ctrl.zip(sq).zip(rq).and_then(|((ctrl, sq), rq)| QpRings::new(ctrl, sq, rq, layout));
    Ok(Made { rings: rings.ok_or(NONSENSE)?, max_inline: 0, max_send_sge: 0, max_recv_sge: 0 })
}

const MASK_PD: u32 = 1;
const MASK_XRCD: u32 = 2;
const MASK_CREATE_FLAGS: u32 = 1 << 2;
const MASK_SEND_OPS: u32 = 1 << 6;

/// Makes a QP.
///
/// # Safety
/// The context and what the attributes name are the caller's.
unsafe fn make(ctx: *mut ibv_context, a: &mut ibv_qp_init_attr_ex, extended: bool) -> Result<*mut QpObj, i32> {
    let typ = QpType::from_raw(a.qp_type)
        .filter(|t| matches!(t, QpType::Rc | QpType::Uc | QpType::Ud | QpType::XrcSend | QpType::XrcRecv));
    let typ = typ.ok_or(libc::EOPNOTSUPP)?;
    let target = typ == QpType::XrcRecv;
    let given = |bit: u32| a.comp_mask & bit != 0;
    // SAFETY: a PD of the caller, if there is one.
    let has_pd = given(MASK_PD) && unsafe { a.pd.as_ref() }.is_some_and(|pd| pd.context == ctx);
    let complete = match typ {
        QpType::XrcRecv => given(MASK_XRCD) && !a.xrcd.is_null(),
        QpType::XrcSend => has_pd && !a.send_cq.is_null(),
        _ => has_pd && !a.send_cq.is_null() && !a.recv_cq.is_null(),
    };
    if !complete {
        return Err(libc::EINVAL);
    }
    if target {
        (a.pd, a.send_cq, a.recv_cq, a.srq) = (null_mut(), null_mut(), null_mut(), null_mut());
        a.cap = ibv_qp_cap::default();
    }
    // SAFETY: by the contract.
    let (shared, alone) = unsafe { (shared(ctx), has_thread_domain(a.pd)) };
    // Events name the QP by its address, so the address must not change.
    let mut object = room::<QpObj>()?;
    let obj = object.as_mut_ptr();
    let (mut cmd, mut resp) = (CreateQp::new(), QpAnswer::new());
    let (cmd_size, resp_size) = (CreateQp::SIZE, QpAnswer::SIZE);
    let asked = std::mem::replace(&mut a.comp_mask, if target { MASK_XRCD } else { MASK_PD });
    // SAFETY: by the contract; a QP that nobody else knows, and room for command and answer.
    unsafe {
        let r = ibv_cmd_create_qp_ex(ctx, obj.cast(), a, &mut cmd, cmd_size, &mut resp, resp_size);
        a.comp_mask = asked;
        done(r)?;
        let made = match rings(ctx, &resp.driver) {
            Ok(made) => made,
            Err(e) => {
                ibv_cmd_destroy_qp(obj.cast());
                return Err(e);
            }
        };
        a.cap.max_inline_data = made.max_inline;
        (&raw mut (*obj).slot).write(resp.driver.db_slot);
        fill(obj, shared, typ, made, alone);
        (&raw mut (*obj).builder).write(extended.then(|| Box::new(Builder::new())));
    }
    // Everything is initialized: zeros are valid for the remaining members.
    Ok(Box::into_raw(object).cast())
}

/// Initializes the members that all QPs have. Zeros are valid for the remaining members.
///
/// # Safety
/// `obj` is zeroed room for a QP, which libibverbs has filled in.
unsafe fn fill(obj: *mut QpObj, shared: Arc<Shared>, typ: QpType, made: Made, alone: bool) {
    // SAFETY: by the contract.
    unsafe {
        (&raw mut (*obj).ctx).write(shared);
        (&raw mut (*obj).typ).write(typ);
        (&raw mut (*obj).max_inline).write(made.max_inline);
        (&raw mut (*obj).max_send_sge).write(made.max_send_sge);
        (&raw mut (*obj).max_recv_sge).write(made.max_recv_sge);
        (&raw mut (*obj).sq).write(QueueLock::new(WorkQueue::new(made.rings.clone()), alone));
        (&raw mut (*obj).rq).write(QueueLock::new(WorkQueue::new(made.rings), alone));
        (&raw mut (*obj).builder).write(None);
    }
}

/// Opens the target of an XRC connection that somebody has made.
pub unsafe extern "C" fn open(ctx: *mut ibv_context, attr: *mut ibv_qp_open_attr) -> *mut ibv_qp {
    // SAFETY: the caller passes its context and attributes.
    let (shared, typ) = unsafe { (shared(ctx), QpType::from_raw((*attr).qp_type)) };
    let (Some(typ @ QpType::XrcRecv), Ok(made)) = (typ, nothing_to_post()) else { return null(libc::EINVAL) };
    // Events name the QP by its address, so the address must not change.
    let mut object = match room::<QpObj>() {
        Ok(object) => object,
        Err(e) => return null(e),
    };
    let obj = object.as_mut_ptr();
    let (mut cmd, mut resp) = (OpenQp::new(), OpenQpAnswer::new());
    let (cmd_size, resp_size, size) = (OpenQp::SIZE, OpenQpAnswer::SIZE, size_of::<QpObj>() as c_int);
    // SAFETY: the caller's context and attributes, a QP that nobody else knows, and room for command and answer.
    unsafe {
        let r = ibv_cmd_open_qp(ctx, obj.cast(), size, attr, &mut cmd, cmd_size, &mut resp, resp_size);
        if r != 0 {
            return null(r);
        }
        fill(obj, shared, typ, made, false);
    }
    Box::into_raw(object).cast()
}

pub unsafe extern "C" fn create(pd: *mut ibv_pd, attr: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    // SAFETY: the caller passes its PD and attributes; all zeros are valid.
    let (a, mut all) = unsafe { (&mut *attr, std::mem::zeroed::<ibv_qp_init_attr_ex>()) };
    (all.qp_context, all.send_cq, all.recv_cq, all.srq) = (a.qp_context, a.send_cq, a.recv_cq, a.srq);
    (all.cap, all.qp_type, all.sq_sig_all, all.comp_mask, all.pd) = (a.cap, a.qp_type, a.sq_sig_all, MASK_PD, pd);
    // SAFETY: as ibv_create_qp(3) demands.
    let made = unsafe { make((*pd).context, &mut all, false) };
    a.cap = all.cap;
    made.map_or_else(null, |o| o.cast())
}

pub unsafe extern "C" fn create_ex(ctx: *mut ibv_context, init: *mut ibv_qp_init_attr_ex) -> *mut ibv_qp {
    // SAFETY: the caller passes its attributes.
    let a = unsafe { &mut *init };
    let known = MASK_PD | MASK_XRCD | MASK_CREATE_FLAGS | MASK_SEND_OPS;
    if a.comp_mask & !known != 0 || a.comp_mask & MASK_CREATE_FLAGS != 0 && a.create_flags != 0 {
        return null(libc::EOPNOTSUPP);
    }
    let extended = a.comp_mask & MASK_SEND_OPS != 0;
    let offered = QpType::from_raw(a.qp_type).map_or(0, builder::send_ops);
    if extended && a.send_ops_flags & !offered != 0 {
        return null(libc::EOPNOTSUPP);
    }
    // SAFETY: as ibv_create_qp_ex(3) demands.
    match unsafe { make(ctx, a, extended) } {
        Ok(obj) => {
            if extended {
                // SAFETY: just made; nobody else knows it yet.
                unsafe { show_extended(&mut *obj, a.send_ops_flags & FLUSH != 0) };
            }
            obj.cast()
        }
        Err(e) => null(e),
    }
}

/// `IBV_QP_EX_WITH_FLUSH`, which libibverbs has since version 45.
const FLUSH: u64 = 1 << 11;

/// Gives a QP the functions of `ibv_wr_*`, and lets `ibv_qp_to_qp_ex(3)` find them. `flushes`: it was also created for
/// FLUSH.
fn show_extended(obj: &mut QpObj, flushes: bool) {
    /// `VERBS_QP_EX` in the `comp_mask` of a `verbs_qp`.
    const EXTENDED: u64 = 2;
    builder::fill::<QpObj>(&mut obj.c);
    obj.mask = EXTENDED;
    if flushes {
        return;
    }
    // Before version 45 the mask was in the place of `wr_flush`, which nobody calls without having asked for it.
    let old_mask = (&raw mut obj.c.wr_flush).cast::<u64>();
    // SAFETY: the member has 8 bytes, and any value but 0 is a function to it.
    unsafe { old_mask.write(EXTENDED) };
}

pub unsafe extern "C" fn destroy(qp: *mut ibv_qp) -> c_int {
    // SAFETY: the caller passes its QP.
    let r = unsafe { ibv_cmd_destroy_qp(qp) };
    if r == 0 {
        // SAFETY: boxed by `make`.
        let obj = unsafe { Box::from_raw(qp.cast::<QpObj>()) };
        // A program must find no completion of a QP that is gone.
        obj.cqs().for_each(|cq| cq.forget(obj.c.qp_base.qp_num));
    }
    code(done(r))
}

pub unsafe extern "C" fn modify(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int {
    // SAFETY: the caller passes its QP.
    let obj = unsafe { &*qp.cast::<QpObj>() };
    let (mut sq, mut rq) = (obj.sq.lock(), obj.rq.lock());
    // SAFETY: the caller's QP and attributes, and room for the command.
    let r = unsafe { ibv_cmd_modify_qp(qp, attr, mask, &mut ModifyQp::new(), ModifyQp::SIZE) };
    // SAFETY: the caller's attributes.
    let to = unsafe { (*attr).qp_state };
    if r == 0 && mask as u32 & attr_mask::STATE != 0 && to == QpState::Reset as u32 {
        (sq.post, rq.post) = (Post::default(), Post::default());
        sq.rings.set_sq_prod(0);
        rq.rings.set_rq_prod(0);
        obj.cqs().for_each(|cq| cq.forget(obj.c.qp_base.qp_num));
    }
    code(done(r))
}

pub unsafe extern "C" fn query(
    qp: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    mask: c_int,
    init: *mut ibv_qp_init_attr,
) -> c_int {
    // SAFETY: the caller passes its QP with room for the attributes; room for the command.
    code(done(unsafe { ibv_cmd_query_qp(qp, attr, mask, init, &mut QueryQp::new(), QueryQp::SIZE) }))
}

/// Sends that are being posted. On drop they are published, and the bell rings once.
pub struct Sends<'a> {
    qp: &'a QpObj,
    sq: Held<'a, WorkQueue>,
}

impl Batch for Sends<'_> {
    #[inline]
    unsafe fn push(&mut self, head: &abi::SqWqe, data: SendWr<'_>) -> Result<(), i32> {
        if self.qp.ctx.is_dead() {
            return Err(libc::EIO);
        }
        if !self.sq.has_room_to_send() {
            return Err(libc::ENOMEM);
        }
        let (SendWr::Sges(list) | SendWr::Inline(list)) = data;
        if list.len() > self.qp.max_send_sge as usize {
            return Err(libc::EINVAL);
        }
        let mut head = *head;
        // SAFETY: by the contract.
        unsafe { self.sq.put_data(&mut head, data, self.qp.max_inline) }?;
        self.sq.put_head(&head);
        Ok(())
    }

    fn abort(mut self) {
        self.sq.post.abort();
    }
}

impl Drop for Sends<'_> {
    fn drop(&mut self) {
        let WorkQueue { rings, post } = &mut *self.sq;
        if post.publish_sends(rings) {
            // SAFETY: a QP's CQs live as long as it does.
            unsafe { self.qp.ctx.ring(self.qp.slot, self.qp.c.qp_base.send_cq) };
        }
    }
}

pub unsafe extern "C" fn post_send(qp: *mut ibv_qp, wr: *mut ibv_send_wr, bad: *mut *mut ibv_send_wr) -> c_int {
    // SAFETY: the caller passes its QP.
    let obj = unsafe { &*qp.cast::<QpObj>() };
    // Before RTS nothing may be posted to the SQ (ibv_post_send(3), IBTA vol. 1, 10.8.3.1).
    if obj.state() < QpState::Rts as u32 {
        return refuse(wr, bad);
    }
    let mut sends = obj.begin_sends();
    // SAFETY: the caller passes a list of valid work requests that ends with NULL, and vouches for its inline data.
    let r = unsafe {
        let bind = |b: &ibv_send_wr_bind| bind_posted(&obj.c.qp_base, b);
        each_send(wr, bad, |r| {
            post_send_request(obj.typ, r, |a| ah::handle(a), bind, |head, data| sends.push(head, data))
        })
    };
    drop(sends);
    code(r)
}

pub unsafe extern "C" fn post_recv(qp: *mut ibv_qp, wr: *mut ibv_recv_wr, bad: *mut *mut ibv_recv_wr) -> c_int {
    // SAFETY: the caller passes its QP.
    let obj = unsafe { &*qp.cast::<QpObj>() };
    // Nothing may be posted in RESET, nor to a QP with an SRQ.
    let shared = !obj.c.qp_base.srq.is_null() || matches!(obj.typ, QpType::XrcSend | QpType::XrcRecv);
    if obj.state() == QpState::Reset as u32 || shared {
        return refuse(wr, bad);
    }
    let mut rq = obj.rq.lock();
    // SAFETY: the caller passes a list of valid work requests that ends with NULL.
    let r = unsafe {
        each_receive(wr, bad, |r| match obj.ctx.is_dead() {
            true => Err(libc::EIO),
            false => rq.put_receive(r.wr_id, sges(r.sg_list, r.num_sge)?, obj.max_recv_sge),
        })
    };
    if rq.publish_receives() {
        // SAFETY: a QP's CQs live as long as it does.
        unsafe { obj.ctx.ring(obj.slot, obj.c.qp_base.recv_cq) };
    }
    code(r)
}

/// Refuses a list of work requests without posting any.
fn refuse<W>(wr: *mut W, bad: *mut *mut W) -> c_int {
    // SAFETY: NULL or room for the first request that was not posted.
    if let Some(bad) = unsafe { bad.as_mut() } {
        *bad = wr;
    }
    code(Err(libc::EINVAL))
}

// SAFETY: a QP for which `builder::fill` was called has a builder. Its batch has the lock of the SQ, and is gone before
// the QP: wr_complete and wr_abort end it.
unsafe impl ExtendedQp for QpObj {
    type Batch = Sends<'static>;

    unsafe fn builder(qp: *mut ibv_qp_ex) -> *mut Builder<Sends<'static>> {
        // SAFETY: by the contract.
        unsafe { &raw mut **(*qp.cast::<QpObj>()).builder.as_mut().unwrap_unchecked() }
    }

    unsafe fn begin(qp: *mut ibv_qp_ex) -> (Sends<'static>, Result<(), i32>) {
        // SAFETY: by the contract.
        let obj = unsafe { &*qp.cast::<QpObj>() };
        // Before RTS nothing may be posted.
        let may = if obj.state() < QpState::Rts as u32 { Err(libc::EINVAL) } else { Ok(()) };
        (obj.begin_sends(), may)
    }

    unsafe fn typ(qp: *mut ibv_qp_ex) -> QpType {
        // SAFETY: by the contract.
        unsafe { (*qp.cast::<QpObj>()).typ }
    }

    unsafe fn ah(ah: *mut ibv_ah) -> u32 {
        // SAFETY: by the contract.
        unsafe { ah::handle(ah) }
    }
}
