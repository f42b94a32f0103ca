//! Queue pairs and posting.

use unirdma_abi as abi;
use unirdma_driver as driver;
use unirdma_formats::QpType;
use unirdma_queues::requests::{bind_posted, each_receive, each_send, post_send_request, sges};
use unirdma_verbs_abi::*;

use crate::ah::{ah_in, ah_out};
use crate::cq::CqObj;
use crate::device::context;
use crate::domain::has_thread_domain;
use crate::event::{Outstanding, is_qp_event};
use crate::hosted::{self, return_if_hosted};
use crate::srq::SrqObj;
use crate::tm::Matching;
use crate::trace::trace;
use crate::wr::Builder;
use crate::{code, lock, null};

#[repr(C)]
pub(crate) struct QpObj {
    pub c: ibv_qp_ex,
    pub qp: driver::Qp,
    pub async_events: Outstanding,
    sig_all: bool,
    /// First state in which the program may post sends.
    sends_from: u32,
    pub typ: QpType,
    /// Requests under construction by `ibv_wr_*`; `None` unless the QP was created for that.
    pub builder: Option<Box<Builder>>,
}

impl QpObj {
    /// Its CQ and the tag matching of that CQ, if it has any.
    fn matching(&self) -> Option<(&CqObj, &Matching)> {
        // SAFETY: NULL or the QP's CQ, which lives as long as the QP.
        let cq = unsafe { self.c.qp_base.recv_cq.cast::<CqObj>().as_ref() }?;
        Some((cq, cq.tm.get()?))
    }
}

/// `IBV_QPS_RTS`.
const RTS: u32 = 3;

fn cap_in(c: &ibv_qp_cap) -> abi::QpCap {
    abi::QpCap {
        max_send_wr: c.max_send_wr,
        max_recv_wr: c.max_recv_wr,
        max_send_sge: c.max_send_sge,
        max_recv_sge: c.max_recv_sge,
        max_inline_data: c.max_inline_data,
    }
}

fn cap_out(c: &abi::QpCap) -> ibv_qp_cap {
    ibv_qp_cap {
        max_send_wr: c.max_send_wr,
        max_recv_wr: c.max_recv_wr,
        max_send_sge: c.max_send_sge,
        max_recv_sge: c.max_recv_sge,
        max_inline_data: c.max_inline_data,
    }
}

pub unsafe extern "C" fn x_ibv_create_qp(pd: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    // SAFETY: as ibv_create_qp(3) demands.
    unsafe {
        if pd.is_null() {
            return null(libc::EINVAL);
        }
        create((*pd).context, pd, &mut *init, None, None)
    }
}

/// Makes a QP. With `builder` it also gets the functions of `ibv_wr_*`. `xrcdn`: the XRC domain of a target, which
/// needs no PD.
///
/// # Safety
/// `c`, `pd`, and the CQs and the SRQ of `a`, are the caller's.
pub(crate) unsafe fn create(
    c: *mut ibv_context,
    pd: *mut ibv_pd,
    a: &mut ibv_qp_init_attr,
    xrcdn: Option<u32>,
    builder: Option<Box<Builder>>,
) -> *mut ibv_qp {
    let Some(typ) = QpType::from_raw(a.qp_type) else {
        trace!("ibv_create_qp(type {}): not supported", a.qp_type);
        return null(libc::EOPNOTSUPP);
    };
    match typ {
        QpType::XrcSend => {
            (a.recv_cq, a.srq) = (a.send_cq, std::ptr::null_mut());
            (a.cap.max_recv_wr, a.cap.max_recv_sge) = (0, 0);
        }
        QpType::XrcRecv => {
            (a.send_cq, a.recv_cq, a.srq) = (std::ptr::null_mut(), std::ptr::null_mut(), std::ptr::null_mut());
            a.cap = ibv_qp_cap::default();
        }
        _ => {}
    }
    // SAFETY: NULL or an SRQ of the caller.
    let tm = unsafe { a.srq.cast::<SrqObj>().as_ref() }.and_then(|s| s.tm);
    let mut cap = cap_in(&a.cap);
    if let Some(cq) = tm {
        if typ != QpType::Rc || builder.is_some() {
            return null(libc::EOPNOTSUPP);
        }
        // The QP completes to the SRQ's CQ, and its sends belong to the SRQ (`tm`).
        (a.send_cq, a.recv_cq, cap) = (cq.cast_mut().cast(), cq.cast_mut().cast(), crate::tm::MEMBER);
    }
    let target = typ == QpType::XrcRecv;
    if !target && (a.send_cq.is_null() || a.recv_cq.is_null()) || target && xrcdn.is_none() {
        return null(libc::EINVAL);
    }
    // SAFETY: by the contract; a target has neither CQs nor PD.
    let (ctx, send_cqn, recv_cqn, pdn) = unsafe {
        let cqn = |cq: *mut ibv_cq| cq.as_ref().map_or(0, |c| c.handle);
        (context(c), cqn(a.send_cq), cqn(a.recv_cq), pd.as_ref().map_or(0, |p| p.handle))
    };
    let q = driver::QpInit {
        pdn,
        xrcdn,
        qp_type: a.qp_type as u8,
        sig_all: a.sq_sig_all != 0,
        send_cqn,
        recv_cqn,
        // SAFETY: NULL or an SRQ of the caller.
        srqn: unsafe { a.srq.as_ref() }.map(|s| s.handle),
        cap: if a.srq.is_null() { cap } else { abi::QpCap { max_recv_wr: 0, max_recv_sge: 0, ..cap } },
        // SAFETY: NULL or the caller's PD.
        alone: unsafe { has_thread_domain(pd) },
    };
    let qp = match driver::Qp::create(&ctx.driver, &q) {
        Ok(qp) => qp,
        Err(e) => {
            trace!("ibv_create_qp({:?}): errno {e}", a.cap);
            return null(e);
        }
    };
    a.cap = if tm.is_some() { ibv_qp_cap::default() } else { cap_out(&qp.cap) };
    trace!("ibv_create_qp() = qpn {:#x}, {:?}", qp.qpn, a.cap);
    let (qpn, sends_from) = (qp.qpn, if tm.is_some() { u32::MAX } else { RTS });
    // SAFETY: by the contract.
    let obj = unsafe { wrap(c, pd, a, qp, typ, sends_from, builder) };
    // SAFETY: the SRQ's CQ.
    if let Some(tm) = tm.and_then(|cq| unsafe { &*cq }.tm.get()) {
        // SAFETY: checked above to be there.
        tm.join(unsafe { (*a.srq).handle }, obj, qpn);
    }
    obj.cast()
}

/// Makes the C object of a QP, and enters it into its context.
///
/// # Safety
/// As for [`create`].
pub(crate) unsafe fn wrap(
    c: *mut ibv_context,
    pd: *mut ibv_pd,
    a: &ibv_qp_init_attr,
    qp: driver::Qp,
    typ: QpType,
    sends_from: u32,
    builder: Option<Box<Builder>>,
) -> *mut QpObj {
    // SAFETY: integers, pointers, optional functions and zeroed pthread objects.
    let mut raw: ibv_qp_ex = unsafe { std::mem::zeroed() };
    let base = &mut raw.qp_base;
    base.context = c;
    base.qp_context = a.qp_context;
    base.pd = pd;
    base.send_cq = a.send_cq;
    base.recv_cq = a.recv_cq;
    base.srq = a.srq;
    base.handle = qp.qpn;
    base.qp_num = qp.qpn;
    base.qp_type = a.qp_type;
    if builder.is_some() {
        unirdma_queues::builder::fill::<QpObj>(&mut raw);
    }
    let qpn = qp.qpn;
    let sig_all = a.sq_sig_all != 0;
    let async_events = Outstanding::default();
    let obj = Box::into_raw(Box::new(QpObj { c: raw, qp, async_events, sig_all, sends_from, typ, builder }));
    // SAFETY: the caller's context.
    let ctx = unsafe { context(c) };
    ctx.born();
    // SAFETY: NULL or the caller's PD, which the QP names.
    unsafe { crate::domain::hold(pd) };
    // If a QP was made and opened in the same context, events go to the first object.
    lock(&ctx.qps).entry(qpn).or_insert(obj);
    obj
}

pub unsafe extern "C" fn x_ibv_destroy_qp(qp: *mut ibv_qp) -> i32 {
    return_if_hosted!((*qp).context, |e| code(Err(e)), |h| hosted::destroy_qp(&h, qp));
    // SAFETY: the caller passes its QP.
    let obj = unsafe { &*qp.cast::<QpObj>() };
    // SAFETY: a QP's context is open.
    let ctx = unsafe { context(obj.c.qp_base.context) };
    let tm = obj.matching();
    if let Some((_, tm)) = tm {
        tm.hold(obj.c.qp_base.qp_num, None);
    }
    let r = obj.qp.destroy();
    trace!("ibv_destroy_qp({:#x}) = {r:?}", obj.c.qp_base.qp_num);
    if r.is_err() {
        if let Some((_, tm)) = tm {
            tm.hold(obj.c.qp_base.qp_num, Some(obj));
        }
        return code(r);
    }
    {
        let mut qps = lock(&ctx.qps);
        if qps.get(&obj.c.qp_base.qp_num).is_some_and(|&q| std::ptr::eq(q, obj)) {
            qps.remove(&obj.c.qp_base.qp_num);
        }
    }
    if let Some((cq, tm)) = tm {
        tm.leave(&cq.cq, obj.c.qp_base.qp_num);
    }
    ctx.driver.forget_async(|e| is_qp_event(e.kind) && e.handle == obj.c.qp_base.qp_num);
    obj.async_events.wait();
    // SAFETY: boxed in ibv_create_qp; out of the table, all events acknowledged; its PD lives.
    unsafe {
        crate::domain::release((*qp).pd);
        drop(Box::from_raw(qp.cast::<QpObj>()));
    }
    ctx.gone();
    0
}

/// An attribute's value as a byte. A value that does not fit becomes 255, which no attribute has.
fn byte(v: u32) -> u8 {
    u8::try_from(v).unwrap_or(u8::MAX)
}

/// Changes attributes. The sizes of its queues are changed last, after the other attributes were accepted.
fn modify(obj: &QpObj, mask: u32, a: &abi::QpAttr) -> Result<(), i32> {
    use unirdma_formats::attr_mask::CAP;
    if mask & CAP == 0 {
        return obj.qp.modify(mask, a);
    }
    let (has, wants) = (&obj.qp.cap, &a.cap);
    // WQEs keep their size, and the queues of tag matching are not the program's.
    let same_wqes = wants.max_send_sge <= has.max_send_sge
        && wants.max_recv_sge <= has.max_recv_sge
        && wants.max_inline_data <= has.max_inline_data;
    if !same_wqes || obj.matching().is_some() {
        return Err(libc::EINVAL);
    }
    if mask != CAP {
        obj.qp.modify(mask & !CAP, a)?;
    }
    obj.qp.resize(wants.max_send_wr, wants.max_recv_wr)
}

pub(crate) unsafe extern "C" fn modify_qp_rate_limit(qp: *mut ibv_qp, attr: *mut ibv_qp_rate_limit_attr) -> i32 {
    // SAFETY: the caller passes its QP and attributes.
    let (obj, a) = unsafe { (&*qp.cast::<QpObj>(), &*attr) };
    if a.comp_mask != 0 {
        return libc::EINVAL;
    }
    let wire = abi::QpAttr { rate_limit: a.rate_limit, ..abi::QpAttr::default() };
    let r = obj.qp.modify(unirdma_formats::attr_mask::RATE_LIMIT, &wire);
    trace!("ibv_modify_qp_rate_limit({:#x}, {} kbps) = {r:?}", obj.c.qp_base.qp_num, a.rate_limit);
    code(r)
}

pub unsafe extern "C" fn x_ibv_modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: i32) -> i32 {
    return_if_hosted!((*qp).context, |e| code(Err(e)), |h| hosted::modify_qp(&h, qp, &*attr, mask, false));
    // SAFETY: the caller passes its QP and attributes. Fields outside the mask may be uninitialized
    // memory of integer type; the device ignores them.
    let (obj, a) = unsafe { (&mut *qp.cast::<QpObj>(), &*attr) };
    let wire = abi::QpAttr {
        qp_state: byte(a.qp_state),
        cur_qp_state: byte(a.cur_qp_state),
        path_mtu: byte(a.path_mtu),
        path_mig_state: byte(a.path_mig_state),
        qkey: a.qkey,
        rq_psn: a.rq_psn,
        sq_psn: a.sq_psn,
        dest_qp_num: a.dest_qp_num,
        qp_access_flags: a.qp_access_flags,
        pkey_index: a.pkey_index,
        alt_pkey_index: a.alt_pkey_index,
        en_sqd_async_notify: a.en_sqd_async_notify,
        sq_draining: 0,
        max_rd_atomic: a.max_rd_atomic,
        max_dest_rd_atomic: a.max_dest_rd_atomic,
        min_rnr_timer: a.min_rnr_timer,
        port_num: a.port_num,
        timeout: a.timeout,
        retry_cnt: a.retry_cnt,
        rnr_retry: a.rnr_retry,
        alt_port_num: a.alt_port_num,
        alt_timeout: a.alt_timeout,
        reserved: 0,
        rate_limit: a.rate_limit,
        cap: cap_in(&a.cap),
        ah_attr: ah_in(&a.ah_attr),
        alt_ah_attr: ah_in(&a.alt_ah_attr),
        reserved2: [0; 4],
    };
    let resets = mask as u32 & unirdma_formats::attr_mask::STATE != 0 && a.qp_state == 0;
    let hold = |obj: &QpObj, given| match obj.matching() {
        Some((_, tm)) if resets => tm.hold(obj.c.qp_base.qp_num, given),
        _ => {}
    };
    hold(obj, None);
    let r = modify(obj, mask as u32, &wire);
    trace!("ibv_modify_qp({:#x}, mask {mask:#x}, state {}) = {r:?}", obj.c.qp_base.qp_num, a.qp_state);
    if r.is_ok() && mask as u32 & unirdma_formats::attr_mask::STATE != 0 {
        obj.c.qp_base.state = a.qp_state;
        if resets {
            // A QP that was reset has no completions (ibv_modify_qp(3) of every provider).
            for cq in [obj.c.qp_base.send_cq, obj.c.qp_base.recv_cq] {
                // SAFETY: a QP's CQs live as long as it does; the target of an XRC connection has none.
                if let Some(cq) = unsafe { cq.cast::<CqObj>().as_ref() } {
                    match cq.tm.get() {
                        None => cq.cq.forget(obj.c.qp_base.qp_num),
                        Some(tm) => tm.forget(&cq.cq, obj.c.qp_base.qp_num),
                    }
                }
            }
        }
    }
    hold(obj, Some(qp.cast::<QpObj>().cast_const()));
    code(r)
}

/// Attributes as the application sees them.
pub(crate) fn attr_out(q: &abi::QpAttr) -> ibv_qp_attr {
    ibv_qp_attr {
        qp_state: q.qp_state.into(),
        cur_qp_state: q.cur_qp_state.into(),
        path_mtu: q.path_mtu.into(),
        path_mig_state: q.path_mig_state.into(),
        qkey: q.qkey,
        rq_psn: q.rq_psn,
        sq_psn: q.sq_psn,
        dest_qp_num: q.dest_qp_num,
        qp_access_flags: q.qp_access_flags,
        cap: cap_out(&q.cap),
        ah_attr: ah_out(&q.ah_attr),
        alt_ah_attr: ah_out(&q.alt_ah_attr),
        pkey_index: q.pkey_index,
        alt_pkey_index: q.alt_pkey_index,
        en_sqd_async_notify: q.en_sqd_async_notify,
        sq_draining: q.sq_draining,
        max_rd_atomic: q.max_rd_atomic,
        max_dest_rd_atomic: q.max_dest_rd_atomic,
        min_rnr_timer: q.min_rnr_timer,
        port_num: q.port_num,
        timeout: q.timeout,
        retry_cnt: q.retry_cnt,
        rnr_retry: q.rnr_retry,
        alt_port_num: q.alt_port_num,
        alt_timeout: q.alt_timeout,
        rate_limit: q.rate_limit,
    }
}

pub unsafe extern "C" fn x_ibv_query_qp(
    qp: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    mask: i32,
    init: *mut ibv_qp_init_attr,
) -> i32 {
    return_if_hosted!((*qp).context, |e| code(Err(e)), |h| hosted::query_qp(&h, qp, attr, mask, init));
    // SAFETY: the caller passes its QP.
    let obj = unsafe { &mut *qp.cast::<QpObj>() };
    let q = match obj.qp.query() {
        Ok(q) => q,
        Err(e) => return code(Err(e)),
    };
    trace!("ibv_query_qp({:#x}) = state {}", obj.c.qp_base.qp_num, q.qp_state);
    // UCX asks only for the capabilities, and expects the state to stay as it was.
    if mask as u32 & unirdma_formats::attr_mask::STATE != 0 {
        obj.c.qp_base.state = q.qp_state.into();
    }
    let init_out = ibv_qp_init_attr {
        qp_context: obj.c.qp_base.qp_context,
        send_cq: obj.c.qp_base.send_cq,
        recv_cq: obj.c.qp_base.recv_cq,
        srq: obj.c.qp_base.srq,
        cap: cap_out(&q.cap),
        qp_type: obj.c.qp_base.qp_type,
        sq_sig_all: obj.sig_all.into(),
    };
    // SAFETY: the caller passes room for both.
    unsafe {
        attr.write(attr_out(&q));
        init.write(init_out);
    }
    0
}

/// Writes one work request into the batch.
///
/// # Safety
/// `wr` and what it points to must be valid.
#[inline]
unsafe fn push(obj: &QpObj, batch: &mut driver::SendBatch<'_>, wr: &ibv_send_wr) -> Result<(), i32> {
    // SAFETY: the caller's AH.
    let ah = |ah: *mut ibv_ah| unsafe { (*ah).handle };
    // SAFETY: the caller's window and MR.
    let bind = |b: &ibv_send_wr_bind| unsafe { bind_posted(&obj.c.qp_base, b) };
    trace!(
        "ibv_post_send({:#x}): wr_id {:#x} opcode {} flags {:#x} sges {}",
        obj.c.qp_base.qp_num, wr.wr_id, wr.opcode, wr.send_flags, wr.num_sge
    );
    // SAFETY: by the contract. The application vouches for its inline data, as ibv_post_send(3) demands.
    unsafe { post_send_request(obj.typ, wr, ah, bind, |head, data| batch.push(head, data)) }
}

pub(crate) unsafe extern "C" fn post_send(qp: *mut ibv_qp, wr: *mut ibv_send_wr, bad: *mut *mut ibv_send_wr) -> i32 {
    // SAFETY: the caller passes its QP.
    let obj = unsafe { &*qp.cast::<QpObj>() };
    // Before RTS nothing may be posted to the SQ (ibv_post_send(3), IBTA vol. 1, 10.8.3.1).
    if obj.c.qp_base.state < obj.sends_from {
        if !bad.is_null() {
            // SAFETY: room for the first request that was not posted.
            unsafe { *bad = wr };
        }
        return code(Err(libc::EINVAL));
    }
    let mut batch = obj.qp.send_batch();
    // SAFETY: the caller passes a list of valid work requests that ends with NULL.
    let r = unsafe { each_send(wr, bad, |r| push(obj, &mut batch, r)) };
    drop(batch);
    code(r)
}

pub(crate) unsafe extern "C" fn post_recv(qp: *mut ibv_qp, wr: *mut ibv_recv_wr, bad: *mut *mut ibv_recv_wr) -> i32 {
    // SAFETY: the caller passes its QP.
    let obj = unsafe { &*qp.cast::<QpObj>() };
    // Nothing may be posted in RESET, nor to a QP with an SRQ.
    if obj.c.qp_base.state == 0 || !obj.c.qp_base.srq.is_null() {
        if !bad.is_null() {
            // SAFETY: room for the first request that was not posted.
            unsafe { *bad = wr };
        }
        return code(Err(libc::EINVAL));
    }
    trace!("ibv_post_recv({:#x})", obj.c.qp_base.qp_num);
    // SAFETY: as ibv_post_recv(3) demands of the caller.
    unsafe { push_receives(obj.qp.recv_batch(), wr, bad) }
}

/// Posts a list of receives.
///
/// # Safety
/// `wr` is a list of valid work requests that ends with NULL, `bad` NULL or room for a pointer.
pub(crate) unsafe fn push_receives(
    mut batch: driver::RecvBatch<'_>,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> i32 {
    let push = |r: &ibv_recv_wr| {
        trace!("receive: wr_id {:#x} sges {}", r.wr_id, r.num_sge);
        // SAFETY: by the contract.
        unsafe { sges(r.sg_list, r.num_sge) }.and_then(|s| batch.push(r.wr_id, s))
    };
    // SAFETY: by the contract.
    code(unsafe { each_receive(wr, bad, push) })
}
