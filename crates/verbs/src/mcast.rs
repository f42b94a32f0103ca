//! Multicast groups of a UD QP.

use unirdma_abi as abi;
use unirdma_abi::Command;
use unirdma_formats::Gid;
use unirdma_verbs_abi::*;

use crate::code;
use crate::device::context;
use crate::trace::trace;

/// # Safety
/// The caller's QP and GID.
unsafe fn change(command: Command, qp: *mut ibv_qp, gid: *const ibv_gid) -> i32 {
    // SAFETY: by the contract; a QP's context is open.
    let (ctx, qpn, gid) = unsafe { (context((*qp).context), (*qp).qp_num, (*gid).raw) };
    let r = ctx.driver.command_void(command, &abi::McastReq { qpn, reserved: 0, gid });
    trace!("{command:?}({qpn:#x}, {}) = {r:?}", Gid(gid));
    code(r)
}

pub unsafe extern "C" fn x_ibv_attach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, _lid: u16) -> i32 {
    // SAFETY: as ibv_attach_mcast(3) demands.
    unsafe { change(Command::AttachMcast, qp, gid) }
}

pub unsafe extern "C" fn x_ibv_detach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, _lid: u16) -> i32 {
    // SAFETY: as ibv_detach_mcast(3) demands.
    unsafe { change(Command::DetachMcast, qp, gid) }
}
