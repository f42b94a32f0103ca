//! Memory regions. The kernel driver pins them and tells the device their addresses.

use std::ffi::c_void;
use std::os::raw::c_int;

use unirdma_verbs_abi::*;

use crate::ibverbs::*;
use crate::memory::room;
use crate::{code, done, null};

pub unsafe extern "C" fn reg(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    hca_va: u64,
    access: c_int,
) -> *mut ibv_mr {
    let mr = match room::<verbs_mr>() {
        Ok(mr) => Box::into_raw(mr).cast::<verbs_mr>(),
        Err(e) => return null(e),
    };
    let (mut cmd, mut resp) = (RegMr::new(), RegMrAnswer::new());
    let (cmd_size, resp_size) = (RegMr::SIZE, RegMrAnswer::SIZE);
    // SAFETY: the caller's PD, an MR that nobody else knows, and room for command and answer.
    let r = unsafe { ibv_cmd_reg_mr(pd, addr, length, hca_va, access, mr, &mut cmd, cmd_size, &mut resp, resp_size) };
    if r != 0 {
        // SAFETY: boxed above.
        drop(unsafe { Box::from_raw(mr) });
        return null(r);
    }
    mr.cast()
}

pub unsafe extern "C" fn rereg(
    mr: *mut verbs_mr,
    flags: c_int,
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> c_int {
    let (mut cmd, mut resp) = (ReregMr::new(), ReregMrAnswer::new());
    let (cmd_size, resp_size) = (ReregMr::SIZE, ReregMrAnswer::SIZE);
    let (flags, va) = (flags as u32, addr as u64);
    // SAFETY: the caller's MR and PD, and room for command and answer.
    let r =
        unsafe { ibv_cmd_rereg_mr(mr, flags, addr, length, va, access, pd, &mut cmd, cmd_size, &mut resp, resp_size) };
    code(done(r))
}

pub unsafe extern "C" fn dereg(mr: *mut verbs_mr) -> c_int {
    // SAFETY: the caller passes its MR, which `reg` has boxed.
    unsafe {
        let r = ibv_cmd_dereg_mr(mr);
        if r == 0 {
            drop(Box::from_raw(mr));
        }
        code(done(r))
    }
}
