//! The extended CQ and QP: function pointers inside the objects, called by inline code.

use std::ffi::c_void;

use crate::objects::*;
use crate::requests::*;

#[repr(C)]
pub struct ibv_poll_cq_attr {
    pub comp_mask: u32,
}

type Cq = *mut ibv_cq_ex;

/// Begins like [`ibv_cq`].
#[repr(C)]
pub struct ibv_cq_ex {
    pub base: ibv_cq,
    pub comp_mask: u32,
    pub status: u32,
    pub wr_id: u64,
    pub start_poll: Option<unsafe extern "C" fn(Cq, *mut ibv_poll_cq_attr) -> i32>,
    pub next_poll: Option<unsafe extern "C" fn(Cq) -> i32>,
    pub end_poll: Option<unsafe extern "C" fn(Cq)>,
    pub read_opcode: Option<unsafe extern "C" fn(Cq) -> u32>,
    pub read_vendor_err: Option<unsafe extern "C" fn(Cq) -> u32>,
    pub read_byte_len: Option<unsafe extern "C" fn(Cq) -> u32>,
    pub read_imm_data: Option<unsafe extern "C" fn(Cq) -> u32>,
    pub read_qp_num: Option<unsafe extern "C" fn(Cq) -> u32>,
    pub read_src_qp: Option<unsafe extern "C" fn(Cq) -> u32>,
    pub read_wc_flags: Option<unsafe extern "C" fn(Cq) -> u32>,
    pub read_slid: Option<unsafe extern "C" fn(Cq) -> u32>,
    pub read_sl: Option<unsafe extern "C" fn(Cq) -> u8>,
    pub read_dlid_path_bits: Option<unsafe extern "C" fn(Cq) -> u8>,
    pub read_completion_ts: Option<unsafe extern "C" fn(Cq) -> u64>,
    pub read_cvlan: Option<unsafe extern "C" fn(Cq) -> u16>,
    pub read_flow_tag: Option<unsafe extern "C" fn(Cq) -> u32>,
    pub read_tm_info: Option<unsafe extern "C" fn(Cq, *mut ibv_wc_tm_info)>,
    pub read_completion_wallclock_ns: Option<unsafe extern "C" fn(Cq) -> u64>,
}

#[repr(C)]
pub struct ibv_cq_init_attr_ex {
    pub cqe: u32,
    pub cq_context: *mut c_void,
    pub channel: *mut ibv_comp_channel,
    pub comp_vector: u32,
    pub wc_flags: u64,
    pub comp_mask: u32,
    pub flags: u32,
    pub parent_domain: *mut ibv_pd,
}

#[repr(C)]
pub struct ibv_qp_init_attr_ex {
    pub qp_context: *mut c_void,
    pub send_cq: *mut ibv_cq,
    pub recv_cq: *mut ibv_cq,
    pub srq: *mut ibv_srq,
    pub cap: ibv_qp_cap,
    pub qp_type: u32,
    pub sq_sig_all: i32,
    pub comp_mask: u32,
    pub pd: *mut ibv_pd,
    pub xrcd: *mut ibv_xrcd,
    pub create_flags: u32,
    pub max_tso_header: u16,
    pub rwq_ind_tbl: *mut c_void,
    pub rx_hash_conf: [u64; 3],
    pub source_qpn: u32,
    pub send_ops_flags: u64,
}

#[repr(C)]
pub struct ibv_xrcd_init_attr {
    pub comp_mask: u32,
    pub fd: i32,
    pub oflags: i32,
}

#[repr(C)]
pub struct ibv_srq_init_attr_ex {
    pub srq_context: *mut c_void,
    pub attr: ibv_srq_attr,
    pub comp_mask: u32,
    pub srq_type: u32,
    pub pd: *mut ibv_pd,
    pub xrcd: *mut ibv_xrcd,
    pub cq: *mut ibv_cq,
    pub tm_cap: [u32; 2],
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct ibv_ops_tm {
    pub unexpected_cnt: u32,
    pub handle: u32,
    pub recv_wr_id: u64,
    pub sg_list: *mut ibv_sge,
    pub num_sge: i32,
    pub tag: u64,
    pub mask: u64,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct ibv_ops_wr {
    pub wr_id: u64,
    pub next: *mut ibv_ops_wr,
    pub opcode: u32,
    pub flags: i32,
    pub tm: ibv_ops_tm,
}
const _: () = assert!(size_of::<ibv_ops_wr>() == 72 && std::mem::offset_of!(ibv_ops_wr, tm) == 24);

/// Result of `ibv_wc_read_tm_info`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub struct ibv_wc_tm_info {
    pub tag: u64,
    pub private: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct ibv_data_buf {
    pub addr: *mut c_void,
    pub length: usize,
}

#[repr(C)]
pub struct ibv_values_ex {
    pub comp_mask: u32,
    pub raw_clock: libc::timespec,
}

/// `IBV_CQ_ATTR_MODERATE`: an event after `cq_count` completions or `cq_period` microseconds.
pub const IBV_CQ_ATTR_MODERATE: u32 = 1;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_modify_cq_attr {
    pub attr_mask: u32,
    pub cq_count: u16,
    pub cq_period: u16,
}

#[repr(C)]
pub struct ibv_parent_domain_init_attr {
    pub pd: *mut ibv_pd,
    pub td: *mut c_void,
    pub comp_mask: u32,
    pub alloc: *mut c_void,
    pub free: *mut c_void,
    pub pd_context: *mut c_void,
}

type Qp = *mut ibv_qp_ex;

/// Begins like [`ibv_qp`].
#[repr(C)]
pub struct ibv_qp_ex {
    pub qp_base: ibv_qp,
    pub comp_mask: u64,
    pub wr_id: u64,
    pub wr_flags: u32,
    pub wr_atomic_cmp_swp: Option<unsafe extern "C" fn(Qp, u32, u64, u64, u64)>,
    pub wr_atomic_fetch_add: Option<unsafe extern "C" fn(Qp, u32, u64, u64)>,
    pub wr_bind_mw: Option<unsafe extern "C" fn(Qp, *mut ibv_mw, u32, *const ibv_mw_bind_info)>,
    pub wr_local_inv: Option<unsafe extern "C" fn(Qp, u32)>,
    pub wr_rdma_read: Option<unsafe extern "C" fn(Qp, u32, u64)>,
    pub wr_rdma_write: Option<unsafe extern "C" fn(Qp, u32, u64)>,
    pub wr_rdma_write_imm: Option<unsafe extern "C" fn(Qp, u32, u64, u32)>,
    pub wr_send: Option<unsafe extern "C" fn(Qp)>,
    pub wr_send_imm: Option<unsafe extern "C" fn(Qp, u32)>,
    pub wr_send_inv: Option<unsafe extern "C" fn(Qp, u32)>,
    pub wr_send_tso: Option<unsafe extern "C" fn(Qp, *mut c_void, u16, u16)>,
    pub wr_set_ud_addr: Option<unsafe extern "C" fn(Qp, *mut ibv_ah, u32, u32)>,
    pub wr_set_xrc_srqn: Option<unsafe extern "C" fn(Qp, u32)>,
    pub wr_set_inline_data: Option<unsafe extern "C" fn(Qp, *mut c_void, usize)>,
    pub wr_set_inline_data_list: Option<unsafe extern "C" fn(Qp, usize, *const ibv_data_buf)>,
    pub wr_set_sge: Option<unsafe extern "C" fn(Qp, u32, u64, u32)>,
    pub wr_set_sge_list: Option<unsafe extern "C" fn(Qp, usize, *const ibv_sge)>,
    pub wr_start: Option<unsafe extern "C" fn(Qp)>,
    pub wr_complete: Option<unsafe extern "C" fn(Qp) -> i32>,
    pub wr_abort: Option<unsafe extern "C" fn(Qp)>,
    pub wr_atomic_write: Option<unsafe extern "C" fn(Qp, u32, u64, *const c_void)>,
    pub wr_flush: Option<unsafe extern "C" fn(Qp, u32, u64, usize, u8, u8)>,
}

const _: () = {
    use std::mem::{offset_of, size_of};
    assert!(size_of::<ibv_cq_ex>() == 288 + MUTEX_EXTRA && offset_of!(ibv_cq_ex, start_poll) == 144 + MUTEX_EXTRA);
    assert!(size_of::<ibv_qp_ex>() == 360 + MUTEX_EXTRA && offset_of!(ibv_qp_ex, wr_start) == 320 + MUTEX_EXTRA);
    assert!(size_of::<ibv_srq_init_attr_ex>() == 64 && size_of::<ibv_xrcd_init_attr>() == 12);
    assert!(size_of::<ibv_cq_init_attr_ex>() == 56 && size_of::<ibv_parent_domain_init_attr>() == 48);
    assert!(size_of::<ibv_qp_init_attr_ex>() == 136 && offset_of!(ibv_qp_init_attr_ex, send_ops_flags) == 128);
};
