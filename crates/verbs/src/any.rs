//! Verbs on contexts of either kind, for calls from within this library: `librdmacm` and rsockets use whatever context
//! their device has. `build/main.rs` writes a second name for each trampoline that goes by its object's context.

use std::ffi::c_void;
use std::mem::offset_of;

use unirdma_verbs_abi::*;

use crate::hosted::{extended, is_ours};
use crate::null;

/// Declares functions by the trampolines that programs call.
macro_rules! trampolines {
    ($($(#[$doc:meta])* fn $name:ident = $symbol:literal ($($arg:ident: $typ:ty),*) -> $out:ty;)*) => {
        unsafe extern "C" {
            $(
                #[link_name = $symbol]
                pub(crate) fn $name($($arg: $typ),*) -> $out;
            )*
        }
    };
}

trampolines! {
    fn alloc_pd = "__unirdma_any_ibv_alloc_pd" (c: *mut ibv_context) -> *mut ibv_pd;
    fn reg_mr = "__unirdma_any_ibv_reg_mr"
        (pd: *mut ibv_pd, addr: *mut c_void, len: usize, access: i32) -> *mut ibv_mr;
    fn reg_mr_iova2 = "__unirdma_any_ibv_reg_mr_iova2"
        (pd: *mut ibv_pd, addr: *mut c_void, len: usize, iova: u64, access: u32) -> *mut ibv_mr;
    fn reg_dmabuf_mr = "__unirdma_any_ibv_reg_dmabuf_mr"
        (pd: *mut ibv_pd, offset: u64, len: usize, iova: u64, fd: i32, access: i32) -> *mut ibv_mr;
    fn dereg_mr = "__unirdma_any_ibv_dereg_mr" (mr: *mut ibv_mr) -> i32;
    fn create_comp_channel = "__unirdma_any_ibv_create_comp_channel" (c: *mut ibv_context) -> *mut ibv_comp_channel;
    fn destroy_comp_channel = "__unirdma_any_ibv_destroy_comp_channel" (channel: *mut ibv_comp_channel) -> i32;
    fn create_cq = "__unirdma_any_ibv_create_cq"
        (c: *mut ibv_context, cqe: i32, cq_context: *mut c_void, channel: *mut ibv_comp_channel, vector: i32) -> *mut ibv_cq;
    fn destroy_cq = "__unirdma_any_ibv_destroy_cq" (cq: *mut ibv_cq) -> i32;
    fn get_cq_event = "__unirdma_any_ibv_get_cq_event"
        (channel: *mut ibv_comp_channel, cq: *mut *mut ibv_cq, cq_context: *mut *mut c_void) -> i32;
    fn ack_cq_events = "__unirdma_any_ibv_ack_cq_events" (cq: *mut ibv_cq, n: u32) -> ();
    fn create_qp = "__unirdma_any_ibv_create_qp" (pd: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> *mut ibv_qp;
    fn create_srq = "__unirdma_any_ibv_create_srq" (pd: *mut ibv_pd, init: *mut ibv_srq_init_attr) -> *mut ibv_srq;
    fn destroy_srq = "__unirdma_any_ibv_destroy_srq" (srq: *mut ibv_srq) -> i32;
    fn destroy_ah = "__unirdma_any_ibv_destroy_ah" (ah: *mut ibv_ah) -> i32;
    fn attach_mcast = "__unirdma_any_ibv_attach_mcast" (qp: *mut ibv_qp, gid: *const ibv_gid, lid: u16) -> i32;
    fn detach_mcast = "__unirdma_any_ibv_detach_mcast" (qp: *mut ibv_qp, gid: *const ibv_gid, lid: u16) -> i32;
}

/// Calls an operation that inline code of programs calls by the context.
macro_rules! inline_call {
    ($c:expr, $op:ident ($($arg:expr),*)) => {
        // SAFETY: by the contract, with an open context.
        unsafe {
            match (*$c).ops.$op {
                Some(f) => f($($arg),*),
                None => libc::EOPNOTSUPP,
            }
        }
    };
}

/// # Safety
/// As ibv_post_send(3).
#[inline]
pub(crate) unsafe fn post_send(qp: *mut ibv_qp, wr: *mut ibv_send_wr, bad: *mut *mut ibv_send_wr) -> i32 {
    inline_call!((*qp).context, post_send(qp, wr, bad))
}

/// # Safety
/// As ibv_post_recv(3).
#[inline]
pub(crate) unsafe fn post_recv(qp: *mut ibv_qp, wr: *mut ibv_recv_wr, bad: *mut *mut ibv_recv_wr) -> i32 {
    inline_call!((*qp).context, post_recv(qp, wr, bad))
}

/// # Safety
/// As ibv_poll_cq(3).
#[inline]
pub(crate) unsafe fn poll_cq(cq: *mut ibv_cq, n: i32, wc: *mut ibv_wc) -> i32 {
    inline_call!((*cq).context, poll_cq(cq, n, wc))
}

/// # Safety
/// As ibv_req_notify_cq(3).
#[inline]
pub(crate) unsafe fn req_notify_cq(cq: *mut ibv_cq, solicited: i32) -> i32 {
    inline_call!((*cq).context, req_notify_cq(cq, solicited))
}

/// # Safety
/// As ibv_open_xrcd(3).
pub(crate) unsafe fn open_xrcd(c: *mut ibv_context, attr: *mut ibv_xrcd_init_attr) -> *mut ibv_xrcd {
    type F = unsafe extern "C" fn(*mut ibv_context, *mut ibv_xrcd_init_attr) -> *mut ibv_xrcd;
    // SAFETY: by the contract; the operation of this name.
    match unsafe { extended::<F>(c, offset_of!(verbs_context, open_xrcd)) } {
        // SAFETY: by the contract.
        Some(f) => unsafe { f(c, attr) },
        None => null(libc::EOPNOTSUPP),
    }
}

/// # Safety
/// As ibv_create_srq_ex(3).
pub(crate) unsafe fn create_srq_ex(c: *mut ibv_context, attr: &mut ibv_srq_init_attr_ex) -> *mut ibv_srq {
    const TYPE: u32 = 1;
    // SAFETY: by the contract. The header's inline function makes a basic SRQ by the older call, too.
    unsafe {
        if (attr.comp_mask & TYPE == 0 || attr.srq_type == 0) && !is_ours(c) {
            let mut basic = ibv_srq_init_attr { srq_context: attr.srq_context, attr: attr.attr };
            let srq = create_srq(attr.pd, &raw mut basic);
            attr.attr = basic.attr;
            return srq;
        }
    }
    type F = unsafe extern "C" fn(*mut ibv_context, *mut ibv_srq_init_attr_ex) -> *mut ibv_srq;
    // SAFETY: by the contract; the operation of this name.
    match unsafe { extended::<F>(c, offset_of!(verbs_context, create_srq_ex)) } {
        // SAFETY: by the contract.
        Some(f) => unsafe { f(c, attr) },
        None => null(libc::EOPNOTSUPP),
    }
}

/// # Safety
/// As ibv_create_qp_ex(3).
pub(crate) unsafe fn create_qp_ex(c: *mut ibv_context, attr: *mut ibv_qp_init_attr_ex) -> *mut ibv_qp {
    type F = unsafe extern "C" fn(*mut ibv_context, *mut ibv_qp_init_attr_ex) -> *mut ibv_qp;
    // SAFETY: by the contract; the operation of this name.
    match unsafe { extended::<F>(c, offset_of!(verbs_context, create_qp_ex)) } {
        // SAFETY: by the contract.
        Some(f) => unsafe { f(c, attr) },
        None => null(libc::EOPNOTSUPP),
    }
}
