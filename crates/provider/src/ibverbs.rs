//! The private interface between libibverbs and its providers, as in rdma-core 44 to 56 (`IBVERBS_PRIVATE_34`).
//!
//! `build.rs` reads the functions that are declared here: it looks for lines that begin with `pub fn`.
#![allow(non_camel_case_types)]

use std::ffi::{c_char, c_int, c_void};

use unirdma_verbs_abi::*;

use crate::kernel;

type Unused = Option<unsafe extern "C" fn()>;

/// An entry of the table by which a provider says which devices are its own.
#[repr(C)]
pub struct verbs_match_ent {
    pub driver_data: *const c_void,
    pub modalias: *const c_char,
    pub vendor: u16,
    pub device: u16,
    pub kind: u8,
}

impl verbs_match_ent {
    /// The end of a table.
    pub const END: Self =
        verbs_match_ent { driver_data: std::ptr::null(), modalias: std::ptr::null(), vendor: 0, device: 0, kind: 0 };

    /// Functions of PCI with these identifiers.
    pub const fn pci(vendor: u16, device: u16) -> Self {
        verbs_match_ent { vendor, device, kind: 1, ..Self::END }
    }

    /// Devices whose modalias matches a shell pattern.
    pub const fn modalias(pattern: &'static std::ffi::CStr) -> Self {
        verbs_match_ent { modalias: pattern.as_ptr(), kind: 2, ..Self::END }
    }
}

/// The table that a provider registers.
#[repr(C)]
pub struct verbs_device_ops {
    pub name: *const c_char,
    pub match_min_abi_version: u32,
    pub match_max_abi_version: u32,
    pub match_table: *const verbs_match_ent,
    pub static_providers: *const c_void,
    pub match_device: Unused,
    pub alloc_context: unsafe extern "C" fn(*mut ibv_device, c_int, *mut c_void) -> *mut verbs_context_34,
    pub import_context: Unused,
    pub alloc_device: unsafe extern "C" fn(*mut c_void) -> *mut verbs_device,
    pub uninit_device: unsafe extern "C" fn(*mut verbs_device),
}

// SAFETY: the pointers are to constants.
unsafe impl Sync for verbs_device_ops {}
// SAFETY: as above.
unsafe impl Sync for verbs_match_ent {}

/// A context. Newer versions of rdma-core have more members before it, so it differs from the one in `verbs-abi`.
#[repr(C)]
pub struct verbs_context_34 {
    before: [usize; 40],
    pub context: ibv_context,
}

/// An SRQ, as libibverbs has it.
#[repr(C)]
pub struct verbs_srq {
    pub srq: ibv_srq,
    pub srq_type: u32,
    pub xrcd: *mut verbs_xrcd,
    pub cq: *mut ibv_cq,
    pub srq_num: u32,
}

/// An XRC domain, as libibverbs has it.
#[repr(C)]
pub struct verbs_xrcd {
    pub xrcd: ibv_xrcd,
    pub comp_mask: u32,
    pub handle: u32,
}

#[repr(C)]
pub struct verbs_mr {
    pub ibv_mr: ibv_mr,
    pub mr_type: u32,
    pub access: i32,
}

macro_rules! operations {
    ($($name:ident $(: $t:ty)?;)*) => {
        /// The functions of a context.
        #[repr(C)]
        pub struct verbs_context_ops { $(pub $name: operations!(@ $($t)?),)* }
        impl verbs_context_ops {
            /// No operations. libibverbs has a function for each that reports `EOPNOTSUPP`.
            pub const NONE: Self = verbs_context_ops { $($name: None,)* };
        }
    };
    (@ $t:ty) => { Option<$t> };
    (@) => { Unused };
}
operations! {
    advise_mr;
    alloc_dm;
    alloc_mw: unsafe extern "C" fn(*mut ibv_pd, u32) -> *mut ibv_mw;
    alloc_null_mr;
    alloc_parent_domain: unsafe extern "C" fn(*mut ibv_context, *mut ibv_parent_domain_init_attr) -> *mut ibv_pd;
    alloc_pd: unsafe extern "C" fn(*mut ibv_context) -> *mut ibv_pd;
    alloc_td: unsafe extern "C" fn(*mut ibv_context, *mut u32) -> *mut c_void;
    async_event: unsafe extern "C" fn(*mut ibv_context, *mut ibv_async_event);
    attach_counters_point_flow;
    attach_mcast: unsafe extern "C" fn(*mut ibv_qp, *const ibv_gid, u16) -> c_int;
    bind_mw: unsafe extern "C" fn(*mut ibv_qp, *mut ibv_mw, *mut ibv_mw_bind) -> c_int;
    close_xrcd: unsafe extern "C" fn(*mut ibv_xrcd) -> c_int;
    cq_event;
    create_ah: unsafe extern "C" fn(*mut ibv_pd, *mut ibv_ah_attr) -> *mut ibv_ah;
    create_counters;
    create_cq: unsafe extern "C" fn(*mut ibv_context, c_int, *mut ibv_comp_channel, c_int) -> *mut ibv_cq;
    create_cq_ex: unsafe extern "C" fn(*mut ibv_context, *mut ibv_cq_init_attr_ex) -> *mut ibv_cq_ex;
    create_flow;
    create_flow_action_esp;
    create_qp: unsafe extern "C" fn(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp;
    create_qp_ex: unsafe extern "C" fn(*mut ibv_context, *mut ibv_qp_init_attr_ex) -> *mut ibv_qp;
    create_rwq_ind_table;
    create_srq: unsafe extern "C" fn(*mut ibv_pd, *mut ibv_srq_init_attr) -> *mut ibv_srq;
    create_srq_ex: unsafe extern "C" fn(*mut ibv_context, *mut ibv_srq_init_attr_ex) -> *mut ibv_srq;
    create_wq;
    dealloc_mw: unsafe extern "C" fn(*mut ibv_mw) -> c_int;
    dealloc_pd: unsafe extern "C" fn(*mut ibv_pd) -> c_int;
    dealloc_td: unsafe extern "C" fn(*mut c_void) -> c_int;
    dereg_mr: unsafe extern "C" fn(*mut verbs_mr) -> c_int;
    destroy_ah: unsafe extern "C" fn(*mut ibv_ah) -> c_int;
    destroy_counters;
    destroy_cq: unsafe extern "C" fn(*mut ibv_cq) -> c_int;
    destroy_flow;
    destroy_flow_action;
    destroy_qp: unsafe extern "C" fn(*mut ibv_qp) -> c_int;
    destroy_rwq_ind_table;
    destroy_srq: unsafe extern "C" fn(*mut ibv_srq) -> c_int;
    destroy_wq;
    detach_mcast: unsafe extern "C" fn(*mut ibv_qp, *const ibv_gid, u16) -> c_int;
    free_context: unsafe extern "C" fn(*mut ibv_context);
    free_dm;
    get_srq_num: unsafe extern "C" fn(*mut ibv_srq, *mut u32) -> c_int;
    import_dm;
    import_mr;
    import_pd;
    modify_cq: unsafe extern "C" fn(*mut ibv_cq, *mut ibv_modify_cq_attr) -> c_int;
    modify_flow_action_esp;
    modify_qp: unsafe extern "C" fn(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
    modify_qp_rate_limit;
    modify_srq: unsafe extern "C" fn(*mut ibv_srq, *mut ibv_srq_attr, c_int) -> c_int;
    modify_wq;
    open_qp: unsafe extern "C" fn(*mut ibv_context, *mut ibv_qp_open_attr) -> *mut ibv_qp;
    open_xrcd: unsafe extern "C" fn(*mut ibv_context, *mut ibv_xrcd_init_attr) -> *mut ibv_xrcd;
    poll_cq: unsafe extern "C" fn(*mut ibv_cq, c_int, *mut ibv_wc) -> c_int;
    post_recv: unsafe extern "C" fn(*mut ibv_qp, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int;
    post_send: unsafe extern "C" fn(*mut ibv_qp, *mut ibv_send_wr, *mut *mut ibv_send_wr) -> c_int;
    post_srq_ops;
    post_srq_recv: unsafe extern "C" fn(*mut ibv_srq, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int;
    query_device_ex: unsafe extern "C" fn(*mut ibv_context, *const c_void, *mut ibv_device_attr_ex, usize) -> c_int;
    query_ece;
    query_port: unsafe extern "C" fn(*mut ibv_context, u8, *mut ibv_port_attr) -> c_int;
    query_qp: unsafe extern "C" fn(*mut ibv_qp, *mut ibv_qp_attr, c_int, *mut ibv_qp_init_attr) -> c_int;
    query_qp_data_in_order;
    query_rt_values: unsafe extern "C" fn(*mut ibv_context, *mut ibv_values_ex) -> c_int;
    query_srq: unsafe extern "C" fn(*mut ibv_srq, *mut ibv_srq_attr) -> c_int;
    read_counters;
    reg_dm_mr;
    reg_dmabuf_mr;
    reg_mr: unsafe extern "C" fn(*mut ibv_pd, *mut c_void, usize, u64, c_int) -> *mut ibv_mr;
    req_notify_cq: unsafe extern "C" fn(*mut ibv_cq, c_int) -> c_int;
    rereg_mr: unsafe extern "C" fn(*mut verbs_mr, c_int, *mut ibv_pd, *mut c_void, usize, c_int) -> c_int;
    resize_cq: unsafe extern "C" fn(*mut ibv_cq, c_int) -> c_int;
    set_ece;
    unimport_dm;
    unimport_mr;
    unimport_pd;
}

/// Room for a uverbs command of `N` 64-bit words, header included, which libibverbs fills in. The driver adds nothing
/// to it.
#[repr(C)]
pub struct Command<const N: usize>([u64; N]);

impl<const N: usize> Command<N> {
    /// A command of zeros.
    pub fn new() -> Self {
        Command([0; N])
    }

    /// Its size, bytes.
    pub const SIZE: usize = N * 8;
}

/// The answer to a uverbs command: `N` 32-bit words that libibverbs reads, and the kernel driver's own part.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Answer<const N: usize, T> {
    core: [u32; N],
    pub driver: T,
}

impl<const N: usize, T: Default> Answer<N, T> {
    /// An answer of zeros.
    pub fn new() -> Self {
        Answer { core: [0; N], driver: T::default() }
    }

    /// Its size, bytes.
    pub const SIZE: usize = size_of::<Self>();
}

pub type GetContext = Command<2>;
pub type GetContextAnswer = Answer<2, kernel::ContextResp>;
pub type AllocPd = Command<2>;
pub type AllocPdAnswer = Answer<1, [u32; 0]>;
pub type RegMr = Command<6>;
pub type RegMrAnswer = Answer<3, [u32; 0]>;
pub type ReregMr = Command<7>;
pub type ReregMrAnswer = Answer<2, [u32; 0]>;
pub type CreateCq = Command<5>;
pub type ResizeCq = Command<3>;
pub type CqAnswer = Answer<2, kernel::CqResp>;
pub type CreateQp = Command<8>;
pub type QpAnswer = Answer<8, kernel::QpResp>;
pub type ModifyQp = Command<15>;
pub type QueryQp = Command<3>;
pub type SrqAnswer = Answer<4, kernel::SrqResp>;
/// With one word for the kernel driver.
pub type ModifySrq = Command<4>;
pub type QuerySrq = Command<3>;
pub type AhAnswer = Answer<1, kernel::AhResp>;
pub type QueryPort = Command<3>;
pub type AllocMw = Command<3>;
pub type AllocMwAnswer = Answer<2, [u32; 0]>;
pub type OpenXrcd = Command<3>;
pub type OpenXrcdAnswer = Answer<1, [u32; 0]>;
pub type CreateXsrq = Command<7>;
pub type OpenQp = Command<5>;
pub type OpenQpAnswer = Answer<8, [u32; 0]>;
/// An extended command, whose header is longer.
pub type ModifyCq = Command<5>;
/// `struct ib_uverbs_ex_query_device_resp`; the firmware's version is its first member.
pub type QueryDeviceAnswer = Answer<76, [u32; 0]>;
/// The same, with the device's clock.
pub type QueryClockAnswer = Answer<76, kernel::ClockResp>;

impl QueryDeviceAnswer {
    /// The firmware's version.
    pub fn firmware(&self) -> u64 {
        u64::from(self.core[1]) << 32 | u64::from(self.core[0])
    }
}

impl ModifySrq {
    /// A command that names the place for the kernel driver's answer to a change of the size.
    pub fn answer(resp: *mut kernel::ResizeSrqResp) -> Self {
        Command([0, 0, 0, resp as u64])
    }
}

unsafe extern "C" {
    pub fn verbs_register_driver_34(ops: *const verbs_device_ops);
    pub fn _verbs_init_and_alloc_context(
        device: *mut ibv_device,
        cmd_fd: c_int,
        size: usize,
        offset: *mut c_void,
        driver_id: u32,
    ) -> *mut c_void;
    pub fn verbs_uninit_context(ctx: *mut verbs_context_34);
    pub fn verbs_set_ops(ctx: *mut verbs_context_34, ops: *const verbs_context_ops);
    pub fn ibv_cmd_get_context(
        ctx: *mut verbs_context_34,
        cmd: *mut GetContext,
        cmd_size: usize,
        resp: *mut GetContextAnswer,
        resp_size: usize,
    ) -> c_int;
    pub fn ibv_cmd_query_device_any(
        ctx: *mut ibv_context,
        input: *const c_void,
        attr: *mut ibv_device_attr_ex,
        attr_size: usize,
        resp: *mut c_void,
        resp_size: *mut usize,
    ) -> c_int;
    pub fn ibv_cmd_query_port(
        ctx: *mut ibv_context,
        port: u8,
        attr: *mut ibv_port_attr,
        cmd: *mut QueryPort,
        cmd_size: usize,
    ) -> c_int;
    pub fn ibv_cmd_alloc_pd(
        ctx: *mut ibv_context,
        pd: *mut ibv_pd,
        cmd: *mut AllocPd,
        cmd_size: usize,
        resp: *mut AllocPdAnswer,
        resp_size: usize,
    ) -> c_int;
    pub fn ibv_cmd_dealloc_pd(pd: *mut ibv_pd) -> c_int;
    pub fn ibv_cmd_reg_mr(
        pd: *mut ibv_pd,
        addr: *mut c_void,
        length: usize,
        hca_va: u64,
        access: c_int,
        mr: *mut verbs_mr,
        cmd: *mut RegMr,
        cmd_size: usize,
        resp: *mut RegMrAnswer,
        resp_size: usize,
    ) -> c_int;
    pub fn ibv_cmd_rereg_mr(
        mr: *mut verbs_mr,
        flags: u32,
        addr: *mut c_void,
        length: usize,
        hca_va: u64,
        access: c_int,
        pd: *mut ibv_pd,
        cmd: *mut ReregMr,
        cmd_size: usize,
        resp: *mut ReregMrAnswer,
        resp_size: usize,
    ) -> c_int;
    pub fn ibv_cmd_dereg_mr(mr: *mut verbs_mr) -> c_int;
    pub fn ibv_cmd_create_cq(
        ctx: *mut ibv_context,
        cqe: c_int,
        channel: *mut ibv_comp_channel,
        comp_vector: c_int,
        cq: *mut ibv_cq,
        cmd: *mut CreateCq,
        cmd_size: usize,
        resp: *mut CqAnswer,
        resp_size: usize,
    ) -> c_int;
    pub fn ibv_cmd_resize_cq(
        cq: *mut ibv_cq,
        cqe: c_int,
        cmd: *mut ResizeCq,
        cmd_size: usize,
        resp: *mut CqAnswer,
        resp_size: usize,
    ) -> c_int;
    pub fn ibv_cmd_req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int;
    pub fn ibv_cmd_destroy_cq(cq: *mut ibv_cq) -> c_int;
    pub fn ibv_cmd_create_qp_ex(
        ctx: *mut ibv_context,
        qp: *mut c_void,
        attr: *mut ibv_qp_init_attr_ex,
        cmd: *mut CreateQp,
        cmd_size: usize,
        resp: *mut QpAnswer,
        resp_size: usize,
    ) -> c_int;
    pub fn ibv_cmd_open_qp(
        ctx: *mut ibv_context,
        qp: *mut c_void,
        size: c_int,
        attr: *mut ibv_qp_open_attr,
        cmd: *mut OpenQp,
        cmd_size: usize,
        resp: *mut OpenQpAnswer,
        resp_size: usize,
    ) -> c_int;
    pub fn ibv_cmd_modify_qp(
        qp: *mut ibv_qp,
        attr: *mut ibv_qp_attr,
        attr_mask: c_int,
        cmd: *mut ModifyQp,
        cmd_size: usize,
    ) -> c_int;
    pub fn ibv_cmd_query_qp(
        qp: *mut ibv_qp,
        attr: *mut ibv_qp_attr,
        attr_mask: c_int,
        init: *mut ibv_qp_init_attr,
        cmd: *mut QueryQp,
        cmd_size: usize,
    ) -> c_int;
    pub fn ibv_cmd_destroy_qp(qp: *mut ibv_qp) -> c_int;
    pub fn ibv_cmd_create_srq_ex(
        ctx: *mut ibv_context,
        srq: *mut verbs_srq,
        attr: *mut ibv_srq_init_attr_ex,
        cmd: *mut CreateXsrq,
        cmd_size: usize,
        resp: *mut SrqAnswer,
        resp_size: usize,
    ) -> c_int;
    pub fn ibv_cmd_open_xrcd(
        ctx: *mut ibv_context,
        xrcd: *mut verbs_xrcd,
        size: c_int,
        attr: *mut ibv_xrcd_init_attr,
        cmd: *mut OpenXrcd,
        cmd_size: usize,
        resp: *mut OpenXrcdAnswer,
        resp_size: usize,
    ) -> c_int;
    pub fn ibv_cmd_close_xrcd(xrcd: *mut verbs_xrcd) -> c_int;
    pub fn ibv_cmd_alloc_mw(
        pd: *mut ibv_pd,
        typ: u32,
        mw: *mut ibv_mw,
        cmd: *mut AllocMw,
        cmd_size: usize,
        resp: *mut AllocMwAnswer,
        resp_size: usize,
    ) -> c_int;
    pub fn ibv_cmd_dealloc_mw(mw: *mut ibv_mw) -> c_int;
    pub fn ibv_cmd_modify_cq(
        cq: *mut ibv_cq,
        attr: *mut ibv_modify_cq_attr,
        cmd: *mut ModifyCq,
        cmd_size: usize,
    ) -> c_int;
    pub fn ibv_cmd_modify_srq(
        srq: *mut ibv_srq,
        attr: *mut ibv_srq_attr,
        attr_mask: c_int,
        cmd: *mut ModifySrq,
        cmd_size: usize,
    ) -> c_int;
    pub fn ibv_cmd_query_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr, cmd: *mut QuerySrq, cmd_size: usize) -> c_int;
    pub fn ibv_cmd_destroy_srq(srq: *mut ibv_srq) -> c_int;
    pub fn ibv_cmd_create_ah(
        pd: *mut ibv_pd,
        ah: *mut ibv_ah,
        attr: *mut ibv_ah_attr,
        resp: *mut AhAnswer,
        resp_size: usize,
    ) -> c_int;
    pub fn ibv_cmd_destroy_ah(ah: *mut ibv_ah) -> c_int;
    pub fn ibv_cmd_attach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, lid: u16) -> c_int;
    pub fn ibv_cmd_detach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, lid: u16) -> c_int;
}

const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<verbs_match_ent>() == 24 && size_of::<verbs_device_ops>() == 72);
    assert!(offset_of!(verbs_device_ops, match_table) == 16 && offset_of!(verbs_device_ops, alloc_context) == 40);
    assert!(size_of::<verbs_context_34>() == 648 + MUTEX_EXTRA && offset_of!(verbs_context_34, context) == 320);
    assert!(size_of::<verbs_device>() == 712);
    assert!(size_of::<verbs_mr>() == 56);
    assert!(size_of::<verbs_context_ops>() == 76 * 8);
    assert!(offset_of!(verbs_context_ops, poll_cq) == 53 * 8 && offset_of!(verbs_context_ops, resize_cq) == 71 * 8);
    assert!(GetContextAnswer::SIZE == 24 && CqAnswer::SIZE == 40 && QpAnswer::SIZE == 88);
    assert!(SrqAnswer::SIZE == 48 && AhAnswer::SIZE == 12 && RegMrAnswer::SIZE == 12 && AllocPdAnswer::SIZE == 4);
    assert!(size_of::<verbs_srq>() == size_of::<ibv_srq>() + 32 && size_of::<verbs_xrcd>() == 16);
    assert!(ModifySrq::SIZE == 32 && CreateXsrq::SIZE == 56 && OpenQp::SIZE == 40 && QueryClockAnswer::SIZE == 312);
    assert!(QueryDeviceAnswer::SIZE == 304 && CreateQp::SIZE == 64 && ModifyQp::SIZE == 120);
};
