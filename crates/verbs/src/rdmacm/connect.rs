//! Connecting, accepting, refusing, disconnecting, and multicast groups.

use std::ffi::c_void;

use unirdma_abi as abi;
use unirdma_abi::CmOp;
use unirdma_verbs_abi::*;

use super::qp::max_rd_atomic;
use super::{Group, IdObj, address, object, request};
use crate::{any, done, hosted};

/// `RDMA_MAX_RESP_RES`, `RDMA_MAX_INIT_DEPTH`: the device's maximum.
const MOST: u8 = 0xff;
const QPT_UD: u32 = 4;

/// Puts private data into a request.
///
/// # Safety
/// `data` is NULL or holds `len` bytes.
unsafe fn put_private(r: &mut abi::CmReq, data: *const c_void, len: u8) {
    if data.is_null() {
        return;
    }
    let n = usize::from(len).min(abi::CM_PRIVATE_BYTES);
    // SAFETY: by the contract.
    let data = unsafe { std::slice::from_raw_parts(data.cast::<u8>(), n) };
    r.private.as_flattened_mut()[..n].copy_from_slice(data);
    r.param.private_len = len;
}

impl IdObj {
    /// Fills in the parameters of a connection: the program's, or defaults.
    fn fill(&self, r: &mut abi::CmReq, p: Option<&rdma_conn_param>) {
        let p = p.copied().unwrap_or(rdma_conn_param {
            private_data: std::ptr::null(),
            private_data_len: 0,
            responder_resources: MOST,
            initiator_depth: MOST,
            flow_control: 0,
            retry_count: 7,
            rnr_retry_count: 7,
            srq: 0,
            qp_num: 0,
        });
        // SAFETY: the identifier's own QP, or none.
        let own = unsafe { self.c.qp.as_ref() };
        // The maximum is the VF's if the identifier has one, and else known to the virtual layer.
        let most = match self.c.verbs {
            verbs if verbs.is_null() => MOST,
            // SAFETY: the identifier's device is open.
            verbs if unsafe { crate::hosted::is_ours(verbs) } => MOST,
            verbs => max_rd_atomic(verbs),
        };
        let number = |n: u8| if n == MOST { most } else { n };
        r.param = abi::CmParam {
            qpn: own.map_or(p.qp_num, |q| q.qp_num),
            responder_resources: number(p.responder_resources),
            initiator_depth: number(p.initiator_depth),
            flow_control: p.flow_control,
            retry_count: p.retry_count,
            rnr_retry_count: p.rnr_retry_count,
            srq: own.map_or(p.srq, |q| u8::from(!q.srq.is_null())),
            ..Default::default()
        };
        // SAFETY: as rdma_connect(3) demands of the caller.
        unsafe { put_private(r, p.private_data, p.private_data_len) };
    }

    /// Refuses parameters above the device's limits.
    fn check(&self, p: Option<&rdma_conn_param>) -> Result<(), i32> {
        let Some(p) = p.filter(|_| self.c.qp_type != QPT_UD) else { return Ok(()) };
        if self.c.verbs.is_null() {
            return Err(libc::EINVAL);
        }
        let most = max_rd_atomic(self.c.verbs);
        let fits = |n: u8| n == MOST || n <= most;
        if fits(p.responder_resources) && fits(p.initiator_depth) { Ok(()) } else { Err(libc::EINVAL) }
    }

    /// Handles the news that a group was joined. Returns the context with which it was joined.
    pub(super) fn on_joined(&mut self, token: u32) -> Result<*mut c_void, i32> {
        let qp = self.c.qp;
        let g = self.groups.iter_mut().find(|g| g.token == token).ok_or(libc::EINVAL)?;
        if !qp.is_null() {
            // SAFETY: the identifier's own QP.
            match unsafe { any::attach_mcast(qp, &g.mgid, 0) } {
                0 => g.attached = true,
                e => return Err(e),
            }
        }
        Ok(g.context)
    }
}

pub unsafe extern "C" fn x_rdma_connect(id: *mut rdma_cm_id, param: *mut rdma_conn_param) -> i32 {
    // SAFETY: the caller passes its identifier, and parameters or NULL.
    let (obj, param) = unsafe { (object(id), param.as_ref()) };
    let connected = obj.check(param).and_then(|()| {
        let data = std::mem::take(&mut obj.connect_data);
        request(CmOp::Connect, obj.at, |r| {
            obj.fill(r, param);
            if r.param.private_len == 0 {
                // SAFETY: the data is right here.
                unsafe { put_private(r, data.as_ptr().cast(), data.len() as u8) };
            }
        })?;
        obj.complete()
    });
    done(connected)
}

pub unsafe extern "C" fn x_rdma_accept(id: *mut rdma_cm_id, param: *mut rdma_conn_param) -> i32 {
    // SAFETY: the caller passes its identifier, and parameters or NULL.
    let (obj, param) = unsafe { (object(id), param.as_ref()) };
    done(accept(obj, param))
}

fn accept(obj: &mut IdObj, param: Option<&rdma_conn_param>) -> Result<(), i32> {
    obj.check(param)?;
    let datagram = obj.c.qp_type == QPT_UD;
    if !obj.c.qp.is_null() && !datagram {
        let (_, agreed) = obj.qp_attr(2)?;
        let (_, asked) = obj.qp_attr(3)?;
        let choose = |wanted: Option<u8>, offered: u8| wanted.filter(|w| *w != MOST).unwrap_or(offered);
        // The QP must be ready before the peer learns that it is.
        obj.to_rts(Some((
            choose(param.map(|p| p.responder_resources), agreed.max_dest_rd_atomic),
            choose(param.map(|p| p.initiator_depth), asked.max_rd_atomic),
        )))?;
    }
    let accepted = request(CmOp::Accept, obj.at, |r| obj.fill(r, param));
    if let Err(e) = accepted {
        obj.to_error();
        return Err(e);
    }
    if datagram { Ok(()) } else { obj.complete() }
}

pub unsafe extern "C" fn x_rdma_reject(id: *mut rdma_cm_id, data: *const c_void, len: u8) -> i32 {
    // SAFETY: the caller passes its identifier and `len` bytes.
    unsafe { done(request(CmOp::Reject, object(id).at, |r| put_private(r, data, len)).map(|_| ())) }
}

/// As `rdma_reject`, with the reason that enhanced connection options do not fit (IBTA: vendor option not supported).
pub unsafe extern "C" fn x_rdma_reject_ece(id: *mut rdma_cm_id, data: *const c_void, len: u8) -> i32 {
    const VENDOR_OPTION: u32 = 35;
    let refuse = |r: &mut abi::CmReq| {
        r.value = VENDOR_OPTION;
        // SAFETY: the caller passes `len` bytes.
        unsafe { put_private(r, data, len) };
    };
    // SAFETY: the caller passes its identifier.
    done(unsafe { request(CmOp::Reject, object(id).at, refuse) }.map(|_| ()))
}

pub unsafe extern "C" fn x_rdma_establish(id: *mut rdma_cm_id) -> i32 {
    // SAFETY: the caller passes its identifier.
    let obj = unsafe { object(id) };
    // If the identifier has its own QP, this has been done.
    if !obj.c.qp.is_null() {
        return done(Err(libc::EINVAL));
    }
    done(request(CmOp::Establish, obj.at, |_| ()).map(|_| ()))
}

/// The program reports that the connection works (`IBV_EVENT_COMM_EST`).
pub unsafe extern "C" fn x_rdma_notify(id: *mut rdma_cm_id, event: u32) -> i32 {
    const COMM_EST: u32 = unirdma_formats::AsyncEvent::CommEst as u32;
    if event != COMM_EST {
        return done(Err(libc::EINVAL));
    }
    // SAFETY: the caller passes its identifier.
    let r = request(CmOp::Establish, unsafe { object(id) }.at, |_| ());
    // The connection may be known to work already.
    done(r.map(|_| ()).or_else(|e| if e == libc::EINVAL { Ok(()) } else { Err(e) }))
}

pub unsafe extern "C" fn x_rdma_disconnect(id: *mut rdma_cm_id) -> i32 {
    // SAFETY: the caller passes its identifier.
    let obj = unsafe { object(id) };
    obj.to_error();
    done(request(CmOp::Disconnect, obj.at, |_| ()).and_then(|_| obj.complete()))
}

/// # Safety
/// `addr` is an address of the caller.
unsafe fn join(obj: &mut IdObj, addr: *const libc::sockaddr, context: *mut c_void) -> Result<(), i32> {
    // A VF receives what its network interface has joined, which the container does not have.
    // SAFETY: an open context, once the identifier has a device.
    if !obj.c.verbs.is_null() && !unsafe { hosted::is_ours(obj.c.verbs) } {
        return Err(libc::EOPNOTSUPP);
    }
    // SAFETY: by the contract.
    let addr = unsafe { address::read(addr) }?;
    let token = obj.groups.iter().map(|g| g.token).max().unwrap_or(0) + 1;
    let mgid = ibv_gid { raw: address::gid(&addr) };
    obj.groups.push(Group { token, mgid, context, attached: false });
    if let Err(e) = request(CmOp::Join, obj.at, |r| (r.dst, r.value) = (addr, token)) {
        obj.groups.retain(|g| g.token != token);
        return Err(e);
    }
    obj.complete()
}

pub unsafe extern "C" fn x_rdma_join_multicast(
    id: *mut rdma_cm_id,
    addr: *mut libc::sockaddr,
    context: *mut c_void,
) -> i32 {
    // SAFETY: the caller passes its identifier and an address.
    done(unsafe { join(object(id), addr, context) })
}

pub unsafe extern "C" fn x_rdma_join_multicast_ex(
    id: *mut rdma_cm_id,
    attr: *mut rdma_cm_join_mc_attr_ex,
    context: *mut c_void,
) -> i32 {
    const ADDRESS: u32 = 1;
    const FLAGS: u32 = 2;
    const LAST_FLAG: u32 = 1;
    // SAFETY: the caller passes attributes.
    let a = unsafe { &*attr };
    if a.comp_mask & !(ADDRESS | FLAGS) != 0 || a.comp_mask & ADDRESS == 0 || a.comp_mask & FLAGS == 0 {
        return done(Err(libc::ENOTSUP));
    }
    if a.join_flags > LAST_FLAG {
        return done(Err(libc::EINVAL));
    }
    // SAFETY: as above.
    done(unsafe { join(object(id), a.addr, context) })
}

pub unsafe extern "C" fn x_rdma_leave_multicast(id: *mut rdma_cm_id, addr: *mut libc::sockaddr) -> i32 {
    // SAFETY: the caller passes its identifier and an address.
    let (obj, addr) = unsafe { (object(id), address::read(addr)) };
    let addr = match addr {
        Ok(a) => a,
        Err(e) => return done(Err(e)),
    };
    let mgid = address::gid(&addr);
    // SAFETY: both views of a GID are plain bytes.
    let Some(at) = obj.groups.iter().position(|g| unsafe { g.mgid.raw } == mgid) else {
        return done(Err(libc::EADDRNOTAVAIL));
    };
    let g = obj.groups.remove(at);
    if g.attached && !obj.c.qp.is_null() {
        // SAFETY: the identifier's own QP.
        unsafe { any::detach_mcast(obj.c.qp, &g.mgid, 0) };
    }
    done(request(CmOp::Leave, obj.at, |r| r.dst = addr).map(|_| ()))
}
