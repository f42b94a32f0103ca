//! Tag matching (`ibv_create_srq_ex(3)`, `ibv_post_srq_ops(3)`): an SRQ that places messages by their tags.
//!
//! It is made of what every vRNIC has: a plain SRQ holds the program's buffers, and a message goes to its tagged buffer
//! when the CQ is polled. So it costs nothing if it is not used, works with every peer, and gives no peer more rights.
//! `list` decides which buffer matches, `srq` moves the data, and this module has the CQ's side.
//!
//! All completions pass through the CQ with which the SRQ was created. Completions of list operations come from a QP in
//! the error state, which completes its requests in order. So they also wake a program that waits for events.

mod list;
mod srq;

use std::collections::{HashMap, VecDeque};
use std::sync::Mutex;

use unirdma_abi as abi;
use unirdma_driver as driver;
use unirdma_formats::WcStatus;
use unirdma_verbs_abi::*;

use crate::cq::CqObj;
use crate::device::context;
use crate::qp::QpObj;
use crate::srq::SrqObj;
use crate::trace::trace;
use crate::{code, lock, null};
use list::{Entry, List};
pub(crate) use srq::MEMBER;
use srq::TagSrq;

/// Capabilities in `ibv_query_device_ex`.
const MAX_TAGS: u32 = 1024;
const MAX_OPS: u32 = 1024;
const MAX_SGE: u32 = 16;
/// Headers, and the same number of bytes for the program's own data.
const MAX_RNDV_HEADER: u32 = 64;
const CAP_RC: u32 = 1;
/// In the order of `struct ibv_tm_caps`.
pub(crate) const CAPS: [u32; 5] = [MAX_RNDV_HEADER, MAX_TAGS, CAP_RC, MAX_OPS, MAX_SGE];

/// `IBV_SRQ_INIT_ATTR_TM`, and the SRQ type that must be given with it.
pub(crate) const SRQ_TM: u32 = 1 << 4;
pub(crate) const SRQT_TM: u32 = 2;

// enum ibv_wc_opcode
const WC_RECV: u8 = 128;
const WC_TM_ADD: u8 = 130;
const WC_TM_DEL: u8 = 131;
const WC_TM_SYNC: u8 = 132;
const WC_TM_RECV: u8 = 133;
const WC_TM_NO_TAG: u8 = 134;
// enum ibv_wc_flags
const WC_SYNC_REQ: u16 = 1 << 4;
const WC_MATCH: u16 = 1 << 5;
const WC_DATA_VALID: u16 = 1 << 6;
// enum ibv_wc_status
const TM_ERR: u8 = 22;
const TM_RNDV_INCOMPLETE: u8 = 23;

// enum ibv_ops_wr_opcode
const TAG_ADD: u32 = 0;
const TAG_DEL: u32 = 1;
const TAG_SYNC: u32 = 2;
// enum ibv_ops_flags
const OPS_SIGNALED: i32 = 1;
const OPS_SYNC: i32 = 2;

/// A completion, with the values for `ibv_wc_read_tm_info`.
#[derive(Clone, Copy, Default)]
pub(crate) struct Done {
    pub cqe: abi::Cqe,
    pub tag: u64,
    pub app_ctx: u32,
}

/// The role of a QP in tag matching.
#[derive(Clone, Copy)]
enum Role {
    /// Completes the list operations of this SRQ.
    Operations(u32),
    /// Receives from this SRQ, and sends the SRQ's requests; `None` while the QP must not send.
    Member(u32, Option<*const QpObj>),
}

/// Tag matching of the SRQs of one CQ.
#[derive(Default)]
pub(crate) struct Matching(Mutex<Inner>);

#[derive(Default)]
struct Inner {
    /// Completions that wait for the program.
    ready: VecDeque<Done>,
    srqs: HashMap<u32, TagSrq>,
    qps: HashMap<u32, Role>,
}

impl Matching {
    /// As [`driver::Cq::poll`].
    pub fn poll(&self, cq: &driver::Cq, max: usize, mut f: impl FnMut(usize, &Done)) -> Result<usize, i32> {
        let mut inner = lock(&self.0);
        let mut n = 0;
        while n < max {
            if let Some(d) = inner.ready.pop_front() {
                f(n, &d);
                n += 1;
                continue;
            }
            match next(cq) {
                Ok(Some(cqe)) => inner.handle(cqe),
                Ok(None) => break,
                Err(_) if n > 0 => break,
                Err(e) => return Err(e),
            }
        }
        Ok(n)
    }

    /// Adds a QP of one of the SRQs.
    pub fn join(&self, srqn: u32, qp: *const QpObj, qpn: u32) {
        lock(&self.0).qps.insert(qpn, Role::Member(srqn, Some(qp)));
    }

    /// With `None`, nothing is sent by this QP until it is given here again.
    pub fn hold(&self, qpn: u32, given: Option<*const QpObj>) {
        if let Some(Role::Member(_, qp)) = lock(&self.0).qps.get_mut(&qpn) {
            *qp = given;
        }
    }

    /// Called when a held QP is gone. Its remaining completions go only to the program.
    pub fn leave(&self, cq: &driver::Cq, qpn: u32) {
        let mut inner = lock(&self.0);
        inner.drain(cq);
        if let Some(Role::Member(srqn, _)) = inner.qps.remove(&qpn)
            && let Some(s) = inner.srqs.get_mut(&srqn)
        {
            s.forget(qpn);
        }
    }

    /// Called when a held QP was reset, so that it has no completions.
    pub fn forget(&self, cq: &driver::Cq, qpn: u32) {
        let mut inner = lock(&self.0);
        inner.drain(cq);
        inner.ready.retain(|d| d.cqe.qp_num != qpn);
        inner.srqs.values_mut().for_each(|s| s.forget(qpn));
    }
}

/// The next completion of the device.
fn next(cq: &driver::Cq) -> Result<Option<abi::Cqe>, i32> {
    let mut found = None;
    cq.poll(1, |_, c| found = Some(*c))?;
    Ok(found)
}

impl Inner {
    /// Handles the completions that wait in the CQ, while the roles of their QPs are still known.
    fn drain(&mut self, cq: &driver::Cq) {
        while let Ok(Some(cqe)) = next(cq) {
            self.handle(cqe);
        }
    }

    fn handle(&mut self, cqe: abi::Cqe) {
        let Inner { ready, srqs, qps } = self;
        let plain = Done { cqe, ..Done::default() };
        match qps.get(&cqe.qp_num) {
            None => ready.push_back(plain),
            Some(Role::Operations(srqn)) => {
                let op = srqs.get_mut(srqn).and_then(|s| s.operations.pop_front());
                ready.extend(op.map(|op| Done { cqe: abi::Cqe { timestamp: cqe.timestamp, ..op }, ..plain }));
            }
            Some(&Role::Member(srqn, qp)) => {
                let Some(s) = srqs.get_mut(&srqn) else { return };
                if srq::is_sent(&cqe) {
                    ready.extend(s.sent(&cqe));
                } else {
                    ready.push_back(s.received(&cqe));
                }
                // SAFETY: a QP is held before it goes.
                if let Some(qp) = qp.map(|qp| unsafe { &(*qp).qp }) {
                    s.fetch(qp);
                }
            }
        }
    }
}

/// Makes a tag-matching SRQ.
///
/// # Safety
/// The CQ of `a` is the caller's, and so is its PD, which was checked.
pub(crate) unsafe fn create(c: *mut ibv_context, a: &mut ibv_srq_init_attr_ex) -> *mut ibv_srq {
    let [tags, ops] = a.tm_cap;
    let within = |n: u32, most: u32| (1..=most).contains(&n);
    // SAFETY: NULL or a CQ of the caller.
    let Some(cq) = (unsafe { a.cq.cast::<CqObj>().as_ref() }) else { return null(libc::EINVAL) };
    if !within(tags, MAX_TAGS) || !within(ops, MAX_OPS) || cq.c.base.context != c {
        return null(libc::EINVAL);
    }
    // SAFETY: the caller's context and PD.
    let (ctx, pdn, made) =
        unsafe { (context(c), (*a.pd).handle, crate::srq::create(a.pd, a.srq_context, &mut a.attr, None)) };
    // SAFETY: just made, or NULL.
    let Some(obj) = (unsafe { made.cast::<SrqObj>().as_mut() }) else { return made };
    match srq::operations_qp(&ctx.driver, pdn, cq.cq.cqn, ops) {
        Ok(qp) => {
            let (srqn, qpn) = (obj.c.handle, qp.qpn);
            obj.tm = Some(cq);
            let mut inner = lock(&cq.tm.get_or_init(Matching::default).0);
            inner.qps.insert(qpn, Role::Operations(srqn));
            inner.srqs.insert(srqn, TagSrq::new(ctx, obj, List::new(tags), qp, ops));
            trace!("ibv_create_srq_ex(): tag matching, {tags} tags");
            made
        }
        Err(e) => {
            // SAFETY: made above; nobody else knows it.
            unsafe { crate::srq::x_ibv_destroy_srq(made) };
            null(e)
        }
    }
}

/// Removes an SRQ that is about to be destroyed from its CQ.
///
/// # Errors
/// `EBUSY` while QPs use it.
pub(crate) fn destroy(cq: &CqObj, srqn: u32) -> Result<(), i32> {
    let Some(matching) = cq.tm.get() else { return Ok(()) };
    let mut inner = lock(&matching.0);
    if inner.qps.values().any(|r| matches!(r, Role::Member(n, _) if *n == srqn)) {
        return Err(libc::EBUSY);
    }
    let Some(s) = inner.srqs.get(&srqn) else { return Ok(()) };
    let qpn = s.operations_qp.qpn;
    s.operations_qp.destroy()?;
    inner.drain(&cq.cq);
    inner.qps.remove(&qpn);
    inner.srqs.remove(&srqn);
    Ok(())
}

/// The SGEs of a request. A list of more than `most` is refused without being read.
///
/// # Safety
/// `list` has `n` elements, unless `n` is above `most`.
unsafe fn some_sges(list: *const ibv_sge, n: i32, most: u32) -> Result<Vec<abi::Sge>, i32> {
    if !u32::try_from(n).is_ok_and(|n| n <= most) {
        return Err(libc::EINVAL);
    }
    // SAFETY: by the contract.
    unsafe { unirdma_queues::requests::sges(list, n) }.map(<[_]>::to_vec)
}

/// Posts receives for messages that match no tag.
///
/// # Safety
/// As ibv_post_srq_recv(3) demands.
pub(crate) unsafe fn post_receives(
    cq: &CqObj,
    obj: &SrqObj,
    mut wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> i32 {
    let mut inner = lock(&cq.tm.get_or_init(Matching::default).0);
    let mut r = Ok(());
    // SAFETY: by the contract.
    while let (Ok(()), Some(w)) = (r, unsafe { wr.as_ref() }) {
        // SAFETY: by the contract.
        let list = unsafe { some_sges(w.sg_list, w.num_sge, obj.srq.max_sge) };
        let srq = inner.srqs.get_mut(&obj.c.handle).ok_or(libc::EINVAL);
        r = list.and_then(|list| srq?.post(w.wr_id, list));
        if r.is_err() && !bad.is_null() {
            // SAFETY: room for the first request that was not posted.
            unsafe { *bad = wr };
        }
        wr = w.next;
    }
    code(r)
}

pub(crate) unsafe extern "C" fn post_srq_ops(
    srq: *mut ibv_srq,
    mut wr: *mut ibv_ops_wr,
    bad: *mut *mut ibv_ops_wr,
) -> i32 {
    // SAFETY: the caller passes its SRQ, whose CQ lives as long as it does.
    let (obj, cq) = unsafe {
        let obj = &*srq.cast::<SrqObj>();
        (obj, obj.tm.and_then(|cq| cq.as_ref()))
    };
    let mut r = Ok(());
    let matching = cq.and_then(|cq| cq.tm.get());
    // SAFETY: the caller passes a list that ends with NULL.
    while let (Ok(()), Some(w)) = (r, unsafe { wr.as_mut() }) {
        r = match matching {
            None => Err(libc::EOPNOTSUPP),
            Some(m) => lock(&m.0).srqs.get_mut(&obj.c.handle).ok_or(libc::EINVAL).and_then(|s| {
                // SAFETY: a request of the caller.
                unsafe { operate(s, w) }
            }),
        };
        trace!("ibv_post_srq_ops({:#x}): wr_id {:#x} opcode {} = {r:?}", obj.c.handle, w.wr_id, w.opcode);
        if r.is_err() && !bad.is_null() {
            // SAFETY: room for the first request that was not posted.
            unsafe { *bad = wr };
        }
        wr = w.next;
    }
    code(r)
}

/// Does one list operation.
///
/// # Safety
/// The SGEs of `w` are readable.
unsafe fn operate(s: &mut TagSrq, w: &mut ibv_ops_wr) -> Result<(), i32> {
    let signaled = w.flags & OPS_SIGNALED != 0;
    if w.flags & !(OPS_SIGNALED | OPS_SYNC) != 0 || w.opcode > TAG_SYNC {
        return Err(libc::EINVAL);
    }
    // A deletion that fails is always reported.
    if (signaled || w.opcode == TAG_DEL) && s.is_busy() {
        return Err(libc::ENOMEM);
    }
    let mut done = abi::Cqe { wr_id: w.wr_id, ..abi::Cqe::default() };
    let mut entry = None;
    if w.opcode == TAG_ADD {
        if s.list.is_full() {
            return Err(libc::ENOMEM);
        }
        // SAFETY: by the contract.
        let sges = unsafe { some_sges(w.tm.sg_list, w.tm.num_sge, MAX_SGE) }?;
        if !s.can_write(&sges) {
            return Err(libc::EINVAL);
        }
        entry = Some(Entry { wr_id: w.tm.recv_wr_id, tag: w.tm.tag, mask: w.tm.mask, sges });
    }
    if w.flags & OPS_SYNC != 0 {
        s.list.sync(w.tm.unexpected_cnt);
    }
    done.opcode = match (w.opcode, entry) {
        (TAG_ADD, Some(e)) => {
            w.tm.handle = s.list.add(e).ok_or(libc::ENOMEM)?;
            WC_TM_ADD
        }
        (TAG_DEL, _) => {
            let was = s.list.remove(w.tm.handle).is_some();
            done.status = if was { WcStatus::Success as u8 } else { TM_ERR };
            WC_TM_DEL
        }
        _ => WC_TM_SYNC,
    };
    if !s.list.in_step() {
        done.wc_flags = WC_SYNC_REQ;
    }
    if signaled || done.status != 0 { s.tell(done) } else { Ok(()) }
}
