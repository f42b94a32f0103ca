//! Work requests and completions as C programs have them.

use unirdma_abi as abi;
use unirdma_formats::{QpState, QpType, WrOpcode, access, send_flags};
use unirdma_verbs_abi::*;

use crate::{Result, SendWr};

/// The SGEs of a work request. `struct ibv_sge` and the device's SGE have the same layout.
///
/// # Errors
/// `EINVAL` for a negative number.
///
/// # Safety
/// `list` must hold `n` elements.
#[inline]
pub unsafe fn sges<'a>(list: *const ibv_sge, n: i32) -> Result<&'a [abi::Sge]> {
    const _: () = assert!(size_of::<abi::Sge>() == size_of::<ibv_sge>());
    match usize::try_from(n) {
        Err(_) => Err(libc::EINVAL),
        Ok(0) => Ok(&[]),
        // SAFETY: by the contract.
        Ok(n) => Ok(unsafe { std::slice::from_raw_parts(list.cast(), n) }),
    }
}

/// Posts a send work request of a QP of type `typ`: gives `post` the head of its WQE and its data. `ah` returns the
/// device's handle of an AH; `bind` makes the head of a request that binds a memory window.
///
/// # Errors
/// `EINVAL` for a request that such a QP cannot execute, or the errors of `bind` and `post`.
///
/// # Safety
/// `wr` and what it points to must be valid.
#[inline]
pub unsafe fn post_send_request(
    typ: QpType,
    wr: &ibv_send_wr,
    ah: impl FnOnce(*mut ibv_ah) -> u32,
    bind: impl FnOnce(&ibv_send_wr_bind) -> Result<abi::SqWqe>,
    post: impl FnOnce(&abi::SqWqe, SendWr<'_>) -> Result<()>,
) -> Result<()> {
    // Programs have no REG_MR.
    let known = |op: &WrOpcode| typ.allows(*op) && *op != WrOpcode::RegMr;
    let op = WrOpcode::from_raw(wr.opcode).filter(known).ok_or(libc::EINVAL)?;
    let mut head = abi::SqWqe {
        wr_id: wr.wr_id,
        opcode: op as u8,
        send_flags: wr.send_flags & send_flags::SUPPORTED,
        imm: wr.imm_data,
        ..abi::SqWqe::default()
    };
    // SAFETY: the QP's type and the opcode select the member of the union; all are plain integers and pointers.
    unsafe {
        if typ == QpType::Ud {
            let ud = wr.wr.ud;
            if ud.ah.is_null() {
                return Err(libc::EINVAL);
            }
            (head.ah, head.dest_qpn, head.qkey) = (ah(ud.ah), ud.remote_qpn, ud.remote_qkey);
        } else if op == WrOpcode::BindMw {
            let (wr_id, send_flags) = (head.wr_id, head.send_flags & !send_flags::INLINE);
            head = abi::SqWqe { wr_id, send_flags, ..bind(&wr.rest.bind_mw)? };
        } else if op.is_atomic() {
            let a = wr.wr.atomic;
            (head.remote_addr, head.compare_add, head.swap, head.rkey) = (a.remote_addr, a.compare_add, a.swap, a.rkey);
        } else {
            (head.remote_addr, head.rkey) = (wr.wr.rdma.remote_addr, wr.wr.rdma.rkey);
        }
    }
    if typ == QpType::XrcSend {
        head.dest_qpn = wr.remote_srqn;
    }
    // SAFETY: by the contract.
    let list = unsafe { sges(wr.sg_list, wr.num_sge) }?;
    let inline = wr.send_flags & send_flags::INLINE != 0;
    if inline && (op.stores_locally() || op.is_local()) {
        return Err(libc::EINVAL);
    }
    let list = if op.is_local() { &[] } else { list };
    post(&head, if inline { SendWr::Inline(list) } else { SendWr::Sges(list) })
}

/// The head of a request that binds the window with key `rkey`.
///
/// # Safety
/// `info` holds an MR of the caller, or none.
pub unsafe fn bind_request(rkey: u32, info: &ibv_mw_bind_info) -> abi::SqWqe {
    // SAFETY: by the contract; a bind of no bytes needs no MR.
    let lkey = unsafe { info.mr.as_ref() }.map_or(0, |m| m.lkey);
    abi::SqWqe {
        opcode: WrOpcode::BindMw as u8,
        rkey,
        remote_addr: info.addr,
        compare_add: info.length,
        swap: u64::from(info.mw_access_flags) << 32 | u64::from(lkey),
        ..abi::SqWqe::default()
    }
}

/// The head of a posted request that binds a window of type 2.
///
/// # Errors
/// `EINVAL` for another window, or one of another PD.
///
/// # Safety
/// The pointers in `qp` and `b` are valid or NULL.
pub unsafe fn bind_posted(qp: &ibv_qp, b: &ibv_send_wr_bind) -> Result<abi::SqWqe> {
    const TYPE_2: u32 = 2;
    // SAFETY: by the contract.
    unsafe {
        if b.mw.is_null() || (*b.mw).mw_type != TYPE_2 || (*(*b.mw).pd).handle != (*qp.pd).handle {
            return Err(libc::EINVAL);
        }
        Ok(bind_request(b.rkey, &b.bind_info))
    }
}

/// The next key of a window: the lower 8 bits are its user's (`ibv_inc_rkey(3)`).
fn next_key(rkey: u32) -> u32 {
    rkey & 0xffff_ff00 | rkey.wrapping_add(1) & 0xff
}

/// The head of the request by which `ibv_bind_mw(3)` binds a window of type 1, and the window's key afterwards: it
/// changes with each binding.
///
/// # Errors
/// `EINVAL` for objects of different PDs, an unknown access, a range without an MR, or a QP that is not in RTS.
///
/// # Safety
/// The pointers in `qp`, `mw` and `bind` are valid or NULL.
pub unsafe fn bind_window(qp: &ibv_qp, mw: &ibv_mw, bind: &ibv_mw_bind) -> Result<(u32, abi::SqWqe)> {
    let info = &bind.bind_info;
    let known = access::MW_SUPPORTED | access::OPTIONAL_RANGE;
    // SAFETY: by the contract; the target of an XRC connection has no PD.
    let other_pd = unsafe {
        let pd = (*mw.pd).handle;
        let other = |of: *mut ibv_pd| of.as_ref().is_none_or(|p| p.handle != pd);
        info.mr.as_ref().is_some_and(|m| other(m.pd)) || other(qp.pd)
    };
    if other_pd || info.mr.is_null() && info.length > 0 || info.mw_access_flags & !known != 0 {
        return Err(libc::EINVAL);
    }
    if qp.state != QpState::Rts as u32 {
        return Err(libc::EINVAL);
    }
    let rkey = next_key(mw.rkey);
    // SAFETY: by the contract.
    let head = unsafe { bind_request(rkey, info) };
    let send_flags = bind.send_flags & send_flags::SUPPORTED & !send_flags::INLINE;
    Ok((rkey, abi::SqWqe { wr_id: bind.wr_id, send_flags, ..head }))
}

macro_rules! lists {
    ($($(#[$doc:meta])* $name:ident($wr:ty);)*) => {
        $($(#[$doc])*
        ///
        /// # Errors
        /// The error of the first request which `post` refuses; `bad` points to that request then.
        ///
        /// # Safety
        /// `wr` is a list of valid work requests that ends with NULL, `bad` NULL or room for a pointer.
        #[inline]
        pub unsafe fn $name(
            mut wr: *mut $wr,
            bad: *mut *mut $wr,
            mut post: impl FnMut(&$wr) -> Result<()>,
        ) -> Result<()> {
            // SAFETY: by the contract.
            while let Some(r) = unsafe { wr.as_ref() } {
                if let Err(e) = post(r) {
                    if !bad.is_null() {
                        // SAFETY: by the contract.
                        unsafe { *bad = wr };
                    }
                    return Err(e);
                }
                wr = r.next;
            }
            Ok(())
        })*
    };
}
lists! {
    /// Posts a list of sends by `post`.
    each_send(ibv_send_wr);
    /// Posts a list of receives by `post`.
    each_receive(ibv_recv_wr);
}

/// A completion as `ibv_poll_cq(3)` shows it.
#[inline]
pub fn completion(c: &abi::Cqe) -> ibv_wc {
    ibv_wc {
        wr_id: c.wr_id,
        status: c.status.into(),
        opcode: c.opcode.into(),
        vendor_err: c.vendor_err,
        byte_len: c.byte_len,
        imm_data: c.imm,
        qp_num: c.qp_num,
        src_qp: c.src_qp,
        wc_flags: c.wc_flags.into(),
        pkey_index: c.pkey_index,
        slid: 0,
        sl: c.sl,
        dlid_path_bits: 0,
    }
}
