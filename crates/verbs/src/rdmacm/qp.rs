//! QPs, SRQs and completion queues of identifiers.

use std::ffi::c_void;

use unirdma_abi as abi;
use unirdma_abi::Command;
use unirdma_formats::attr_mask as m;
use unirdma_verbs_abi::*;

use super::{IdObj, object, with_device};
use crate::any;
use crate::device::{hosted_behind, x_ibv_query_device};
use crate::done;
use crate::hosted;
use crate::qp::{attr_out, x_ibv_destroy_qp, x_ibv_modify_qp};
use crate::xrcd::handle_of;

const INIT: u32 = 1;
const RTR: u32 = 2;
const RTS: u32 = 3;
const ERR: u32 = 6;
const QPT_UD: u32 = 4;
const QPT_XRC_SEND: u32 = 9;
const QPT_XRC_RECV: u32 = 10;
const MASK_PD: u32 = 1;

fn last_error() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

/// The PD of QPs that are created without one.
pub(super) fn default_pd(device: usize) -> Result<*mut ibv_pd, i32> {
    with_device(device, |d| {
        if d.pd.is_null() {
            // SAFETY: the shared device is open.
            d.pd = unsafe { any::alloc_pd(d.verbs) };
        }
        if d.pd.is_null() { Err(last_error()) } else { Ok(d.pd) }
    })?
}

/// The XRC domain of QPs and SRQs that are created without one.
fn default_xrcd(device: usize) -> Result<*mut ibv_xrcd, i32> {
    const FD_AND_FLAGS: u32 = 3;
    with_device(device, |d| {
        if d.xrcd.is_null() {
            let mut attr = ibv_xrcd_init_attr { comp_mask: FD_AND_FLAGS, fd: -1, oflags: libc::O_CREAT };
            // SAFETY: the shared device is open.
            d.xrcd = unsafe { any::open_xrcd(d.verbs, &mut attr) };
        }
        if d.xrcd.is_null() { Err(last_error()) } else { Ok(d.xrcd) }
    })?
}

impl IdObj {
    /// The PD for an object of this identifier.
    fn choose_pd(&mut self, pd: *mut ibv_pd) -> Result<*mut ibv_pd, i32> {
        if self.c.verbs.is_null() {
            return Err(libc::EINVAL);
        }
        let pd = if pd.is_null() { default_pd(self.at.device)? } else { pd };
        // SAFETY: the caller's PD or the default one.
        if unsafe { (*pd).context } != self.c.verbs {
            return Err(libc::EINVAL);
        }
        Ok(pd)
    }

    /// The attributes with which the QP goes to `state`, and their mask.
    pub(super) fn qp_attr(&self, state: u32) -> Result<(u32, abi::QpAttr), i32> {
        let session = with_device(self.at.device, |d| d.session.clone())?;
        let r: abi::CmQpAttrResp =
            session.command(Command::CmQpAttr, &abi::CmQpAttrReq { id: self.at.handle, state })?;
        Ok((r.attr_mask, r.attr))
    }

    fn modify(&self, state: u32, change: impl FnOnce(&mut ibv_qp_attr)) -> Result<(), i32> {
        let (mask, a) = self.qp_attr(state)?;
        let mut attr = attr_out(&a);
        change(&mut attr);
        // SAFETY: the identifier's own QP.
        let r = unsafe {
            match hosted_behind((*self.c.qp).context)? {
                Some(h) => hosted::modify_qp(&h, self.c.qp, &attr, mask as i32, true),
                None => x_ibv_modify_qp(self.c.qp, &mut attr, mask as i32),
            }
        };
        if r == 0 { Ok(()) } else { Err(r) }
    }

    /// Connects the QP. `limits`: READs and atomics that it may answer, and that it may have outstanding, instead of
    /// the numbers agreed upon.
    pub(super) fn to_rts(&self, limits: Option<(u8, u8)>) -> Result<(), i32> {
        // The program may have changed the QP's state itself.
        self.modify(INIT, |_| ())?;
        self.modify(RTR, |a| a.max_dest_rd_atomic = limits.map_or(a.max_dest_rd_atomic, |l| l.0))?;
        self.modify(RTS, |a| a.max_rd_atomic = limits.map_or(a.max_rd_atomic, |l| l.1))?;
        if limits.is_none() {
            super::request(unirdma_abi::CmOp::Establish, self.at, |_| ())?;
        }
        Ok(())
    }

    /// Moves the QP to ERR, if there is one, which flushes its work.
    pub(super) fn to_error(&self) {
        if !self.c.qp.is_null() && self.c.qp_type != QPT_UD {
            // SAFETY: zero is valid for all fields; the QP is the identifier's own.
            unsafe {
                let mut a: ibv_qp_attr = std::mem::zeroed();
                a.qp_state = ERR;
                x_ibv_modify_qp(self.c.qp, &mut a, m::STATE as i32);
            }
        }
    }

    /// Makes a completion queue with a channel, for one side of the QP.
    fn make_cq(&mut self, wr: u32) -> Result<(*mut ibv_comp_channel, *mut ibv_cq), i32> {
        // SAFETY: the identifier's device is open.
        unsafe {
            let channel = any::create_comp_channel(self.c.verbs);
            if channel.is_null() {
                return Err(last_error());
            }
            let context: *mut c_void = std::ptr::from_mut(self).cast();
            let cq = any::create_cq(self.c.verbs, wr.clamp(1, i32::MAX as u32) as i32, context, channel, 0);
            if cq.is_null() {
                let e = last_error();
                any::destroy_comp_channel(channel);
                return Err(e);
            }
            Ok((channel, cq))
        }
    }

    fn destroy_cqs(&mut self) {
        // SAFETY: made by make_cq; one that an XRC SRQ still uses goes with it.
        unsafe {
            let c = &mut self.c;
            if self.own_send_cq && any::destroy_cq(c.send_cq) == 0 {
                any::destroy_comp_channel(c.send_cq_channel);
                (self.own_send_cq, c.send_cq, c.send_cq_channel) = (false, std::ptr::null_mut(), std::ptr::null_mut());
            }
            if self.own_recv_cq && any::destroy_cq(c.recv_cq) == 0 {
                any::destroy_comp_channel(c.recv_cq_channel);
                (self.own_recv_cq, c.recv_cq, c.recv_cq_channel) = (false, std::ptr::null_mut(), std::ptr::null_mut());
            }
        }
    }

    /// Makes completion queues for a new QP if its program gives none.
    fn choose_cqs(&mut self, send: &mut *mut ibv_cq, recv: &mut *mut ibv_cq, cap: &ibv_qp_cap) -> Result<(), i32> {
        if recv.is_null() && cap.max_recv_wr > 0 {
            (self.c.recv_cq_channel, self.c.recv_cq) = self.make_cq(cap.max_recv_wr)?;
            self.own_recv_cq = true;
            *recv = self.c.recv_cq;
        }
        if send.is_null() && cap.max_send_wr > 0 {
            (self.c.send_cq_channel, self.c.send_cq) = self.make_cq(cap.max_send_wr)?;
            self.own_send_cq = true;
            *send = self.c.send_cq;
        }
        // A side that is never used shares the other side's queue.
        if recv.is_null() {
            *recv = *send;
        }
        if send.is_null() {
            *send = *recv;
        }
        Ok(())
    }

    /// Takes over a QP that was made, and prepares it for a connection.
    fn adopt(&mut self, qp: *mut ibv_qp, pd: *mut ibv_pd) -> Result<(), i32> {
        if qp.is_null() {
            let e = last_error();
            self.destroy_cqs();
            return Err(e);
        }
        (self.c.qp, self.c.pd) = (qp, pd);
        let r = if self.c.qp_type == QPT_UD {
            [INIT, RTR, RTS].into_iter().try_for_each(|s| self.modify(s, |_| ()))
        } else {
            self.modify(INIT, |_| ())
        };
        if r.is_err() {
            // SAFETY: just made.
            unsafe { x_ibv_destroy_qp(qp) };
            self.c.qp = std::ptr::null_mut();
            self.destroy_cqs();
        }
        r
    }
}

pub unsafe extern "C" fn x_rdma_create_qp(id: *mut rdma_cm_id, pd: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> i32 {
    // SAFETY: the caller passes its identifier, PD and attributes.
    done(unsafe { create(object(id), pd, &mut *init) })
}

/// # Safety
/// `pd` is NULL or the caller's; what `init` names is the caller's.
pub(super) unsafe fn create(obj: &mut IdObj, pd: *mut ibv_pd, init: &mut ibv_qp_init_attr) -> Result<(), i32> {
    if obj.c.qp_type != init.qp_type || !obj.c.qp.is_null() {
        return Err(libc::EINVAL);
    }
    let pd = obj.choose_pd(pd)?;
    if init.qp_type == QPT_XRC_RECV {
        // SAFETY: an open context.
        if !unsafe { hosted::is_ours(obj.c.verbs) } {
            // The real librdmacm makes it by ibv_create_qp_ex.
            return Err(libc::EOPNOTSUPP);
        }
        // SAFETY: a domain of this library.
        let xrcd = unsafe { handle_of(default_xrcd(obj.at.device)?) };
        // SAFETY: by the contract.
        let qp = unsafe { crate::qp::create(obj.c.verbs, std::ptr::null_mut(), init, xrcd, None) };
        return obj.adopt(qp, pd);
    }
    if init.qp_type == QPT_XRC_SEND {
        init.cap.max_recv_wr = 0;
    }
    if init.srq.is_null() {
        init.srq = obj.c.srq;
    }
    let (mut send, mut recv) = (init.send_cq, init.recv_cq);
    if let Err(e) = obj.choose_cqs(&mut send, &mut recv, &init.cap) {
        obj.destroy_cqs();
        return Err(e);
    }
    (init.send_cq, init.recv_cq) = (send, recv);
    // SAFETY: by the contract.
    let qp = unsafe { any::create_qp(pd, init) };
    obj.adopt(qp, pd)
}

pub unsafe extern "C" fn x_rdma_create_qp_ex(id: *mut rdma_cm_id, init: *mut ibv_qp_init_attr_ex) -> i32 {
    // SAFETY: the caller passes its identifier and attributes.
    let (obj, a) = unsafe { (object(id), &mut *init) };
    if obj.c.qp_type != a.qp_type || !obj.c.qp.is_null() {
        return done(Err(libc::EINVAL));
    }
    let wanted = if a.comp_mask & MASK_PD != 0 { a.pd } else { std::ptr::null_mut() };
    let made = obj.choose_pd(wanted).and_then(|pd| {
        a.pd = pd;
        a.comp_mask |= MASK_PD;
        if a.srq.is_null() {
            a.srq = obj.c.srq;
        }
        let (mut send, mut recv) = (a.send_cq, a.recv_cq);
        if let Err(e) = obj.choose_cqs(&mut send, &mut recv, &a.cap) {
            obj.destroy_cqs();
            return Err(e);
        }
        (a.send_cq, a.recv_cq) = (send, recv);
        // SAFETY: the caller's attributes, completed.
        let qp = unsafe { any::create_qp_ex(obj.c.verbs, a) };
        obj.adopt(qp, pd)
    });
    done(made)
}

pub unsafe extern "C" fn x_rdma_destroy_qp(id: *mut rdma_cm_id) {
    // SAFETY: the caller passes its identifier.
    let obj = unsafe { object(id) };
    if !obj.c.qp.is_null() {
        // SAFETY: the identifier's own QP.
        unsafe { x_ibv_destroy_qp(obj.c.qp) };
        obj.c.qp = std::ptr::null_mut();
    }
    obj.destroy_cqs();
}

const SRQ_TYPE: u32 = 1;
const SRQ_PD: u32 = 2;
const SRQ_XRCD: u32 = 4;
const SRQ_CQ: u32 = 8;
const SRQT_BASIC: u32 = 0;
const SRQT_XRC: u32 = 1;

/// Makes the SRQ of an identifier. For an XRC target it is an XRC SRQ.
pub unsafe extern "C" fn x_rdma_create_srq(id: *mut rdma_cm_id, pd: *mut ibv_pd, attr: *mut ibv_srq_init_attr) -> i32 {
    // SAFETY: the caller passes its identifier and attributes.
    let (xrc, a) = unsafe { ((*id).qp_type == QPT_XRC_RECV, &mut *attr) };
    let mut ex = ibv_srq_init_attr_ex {
        srq_context: a.srq_context,
        attr: a.attr,
        comp_mask: SRQ_TYPE | SRQ_PD,
        srq_type: if xrc { SRQT_XRC } else { SRQT_BASIC },
        pd,
        xrcd: std::ptr::null_mut(),
        cq: std::ptr::null_mut(),
        tm_cap: [0; 2],
    };
    // SAFETY: as above.
    let r = unsafe { x_rdma_create_srq_ex(id, &mut ex) };
    a.attr = ex.attr;
    r
}

/// Makes an SRQ with more attributes. For XRC, a domain and a completion queue are made if none are given.
pub unsafe extern "C" fn x_rdma_create_srq_ex(id: *mut rdma_cm_id, attr: *mut ibv_srq_init_attr_ex) -> i32 {
    // SAFETY: the caller passes its identifier and attributes.
    let (obj, a) = unsafe { (object(id), &mut *attr) };
    let wanted = if a.comp_mask & SRQ_PD != 0 { a.pd } else { std::ptr::null_mut() };
    let made = obj.choose_pd(wanted).and_then(|pd| {
        (a.pd, a.comp_mask) = (pd, a.comp_mask | SRQ_PD);
        if a.comp_mask & SRQ_TYPE != 0 && a.srq_type == SRQT_XRC {
            if a.comp_mask & SRQ_XRCD == 0 || a.xrcd.is_null() {
                (a.xrcd, a.comp_mask) = (default_xrcd(obj.at.device)?, a.comp_mask | SRQ_XRCD);
            }
            if a.comp_mask & SRQ_CQ == 0 || a.cq.is_null() {
                (obj.c.recv_cq_channel, obj.c.recv_cq) = obj.make_cq(a.attr.max_wr)?;
                obj.own_recv_cq = true;
                (a.cq, a.comp_mask) = (obj.c.recv_cq, a.comp_mask | SRQ_CQ);
            }
        }
        // SAFETY: the caller's attributes, completed.
        let srq = unsafe { any::create_srq_ex(obj.c.verbs, a) };
        if srq.is_null() {
            let e = last_error();
            obj.destroy_cqs();
            return Err(e);
        }
        (obj.c.srq, obj.c.pd) = (srq, pd);
        Ok(())
    });
    done(made)
}

pub unsafe extern "C" fn x_rdma_destroy_srq(id: *mut rdma_cm_id) {
    // SAFETY: the caller passes its identifier.
    let obj = unsafe { object(id) };
    if !obj.c.srq.is_null() {
        // SAFETY: the identifier's own SRQ.
        unsafe { any::destroy_srq(obj.c.srq) };
        obj.c.srq = std::ptr::null_mut();
        if obj.c.qp.is_null() {
            obj.destroy_cqs();
        }
    }
}

pub unsafe extern "C" fn x_rdma_init_qp_attr(id: *mut rdma_cm_id, attr: *mut ibv_qp_attr, mask: *mut i32) -> i32 {
    // SAFETY: the caller passes its identifier and attributes with a state.
    let (obj, state) = unsafe { (object(id), (*attr).qp_state) };
    let r = obj.qp_attr(state).and_then(|(bits, a)| {
        let mut a = attr_out(&a);
        // SAFETY: the identifier's device is open.
        let hosted = if obj.c.verbs.is_null() { None } else { unsafe { hosted_behind(obj.c.verbs) }? };
        if let Some(h) = hosted {
            hosted::fit_mtu(&h, &mut a, bits)?;
        }
        // SAFETY: room for both.
        unsafe { (*attr, *mask) = (a, bits as i32) };
        Ok(())
    });
    done(r)
}

/// Most READs and atomics that the device can have outstanding.
pub(super) fn max_rd_atomic(verbs: *mut ibv_context) -> u8 {
    // SAFETY: all zero is valid; the context is open.
    unsafe {
        let mut a: ibv_device_attr = std::mem::zeroed();
        if x_ibv_query_device(verbs, &mut a) != 0 {
            return 1;
        }
        a.max_qp_rd_atom.clamp(0, 254) as u8
    }
}
