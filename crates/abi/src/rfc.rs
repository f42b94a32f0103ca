//! The layouts of the RFC mode, which follow the virtio-rdma RFC of 2022. Twin of `docs/spec/virtio-rdma-rfc.md`.
//!
//! No structure has padding (virtio 1.3, section 1.4), so fields lie at any byte.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

macro_rules! packed {
    ($($(#[$doc:meta])* $name:ident = $size:literal { $($(#[$fdoc:meta])* $f:ident: $t:ty),* $(,)? })*) => {
        $(
            $(#[$doc])*
            #[derive(
                Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
            )]
            #[repr(C)]
            #[allow(missing_docs)]
            pub struct $name { $($(#[$fdoc])* pub $f: $t),* }
            const _: () = assert!(size_of::<$name>() == $size);
        )*
    };
}

/// Most completion virtqueues: virtqueues 1 to N.
pub const MAX_CQ: u32 = 127;
/// Most pairs of an SQ and an RQ, virtqueues N + 1 + 2 m and N + 2 + 2 m for pair m.
pub const MAX_QP: u32 = 64;
const _: () = assert!(1 + MAX_CQ + 2 * MAX_QP == 256, "a vhost-user vring index has 8 bits");
/// WQEs of one SQ or RQ that the device holds: a virtqueue has no more chains.
pub const MAX_QP_WR: u32 = crate::MAX_VQ_SIZE as u32;
/// Most completions that wait in the device for buffers of their virtqueue.
pub const MAX_CQE: u32 = 4096;
/// Entries of a driver's GID table.
pub const MAX_GIDS: usize = 32;
/// Bytes of a page that a page list names.
pub const PAGE: u64 = 4096;

/// `Config::device_cap_flags` that the RFC knows (R03).
#[allow(missing_docs)]
pub mod cap {
    pub const BAD_PKEY_CNTR: u64 = 1 << 1;
    pub const BAD_QKEY_CNTR: u64 = 1 << 2;
    pub const CHANGE_PHY_PORT: u64 = 1 << 5;
    pub const UD_AV_PORT_ENFORCE: u64 = 1 << 6;
    pub const SYS_IMAGE_GUID: u64 = 1 << 11;
    pub const RC_RNR_NAK_GEN: u64 = 1 << 12;
    pub const MEM_MGT_EXTENSIONS: u64 = 1 << 21;
    pub const BLOCK_MULTICAST_LOOPBACK: u64 = 1 << 22;
    pub const SG_GAPS_REG: u64 = 1 << 32;
}

/// Access flags (R46).
#[allow(missing_docs)]
pub mod access {
    /// LOCAL_WRITE, REMOTE_WRITE, REMOTE_READ, REMOTE_ATOMIC and MW_BIND, as in verbs.
    pub const BASIC: u32 = 0x1f;
    pub const ZERO_BASED: u32 = 1 << 5;
    pub const ON_DEMAND: u32 = 1 << 6;
    pub const HUGETLB: u32 = 1 << 7;
    pub const RELAXED_ORDERING: u32 = 1 << 20;
}

/// Opcodes of send WQEs (R42).
#[allow(missing_docs)]
pub mod opcode {
    pub const RDMA_WRITE: u32 = 0;
    pub const RDMA_WRITE_WITH_IMM: u32 = 1;
    pub const SEND: u32 = 2;
    pub const SEND_WITH_IMM: u32 = 3;
    pub const RDMA_READ: u32 = 4;
    pub const ATOMIC_CMP_AND_SWP: u32 = 5;
    pub const ATOMIC_FETCH_AND_ADD: u32 = 6;
    pub const LOCAL_INV: u32 = 7;
    pub const SEND_WITH_INV: u32 = 9;
    pub const RDMA_READ_WITH_INV: u32 = 11;
    pub const REG_MR: u32 = 0x20;
    /// Opcode in the completion of a receive.
    pub const RECV: u8 = 128;
    /// Opcode in the completion of a receive that a WRITE with immediate has consumed.
    pub const RECV_RDMA_WITH_IMM: u8 = 129;
}

/// Send flags (R43).
#[allow(missing_docs)]
pub mod send_flags {
    pub const FENCE: u32 = 1;
    pub const SIGNALED: u32 = 2;
    pub const SOLICITED: u32 = 4;
    pub const INLINE: u32 = 8;
    pub const IP_CSUM: u32 = 16;
    /// The flags that the device accepts.
    pub const KNOWN: u32 = FENCE | SIGNALED | SOLICITED | INLINE;
}

/// Completion flags, as in `enum ib_wc_flags`.
#[allow(missing_docs)]
pub mod wc_flags {
    pub const GRH: u32 = 1;
    pub const WITH_IMM: u32 = 2;
    pub const WITH_INVALIDATE: u32 = 4;
}

/// `CreateQp::sq_sig_type`: every send completes. Any other value means 1: only sends with [`send_flags::SIGNALED`]
/// complete.
pub const SIGNAL_ALL_WR: u8 = 0;
/// Types of a QP (R40).
#[allow(missing_docs)]
pub mod qp_type {
    pub const SMI: u8 = 0;
    pub const GSI: u8 = 1;
    pub const RC: u8 = 2;
    pub const UC: u8 = 3;
    pub const UD: u8 = 4;
}
/// `AddGid::gid_type` of RoCEv2 (`IB_GID_TYPE_ROCE_UDP_ENCAP`).
pub const GID_TYPE_ROCE_V2: u32 = 2;
/// `AhAttr::ah_flags`: `grh` is valid.
pub const AH_GRH: u8 = 1;

packed! {
    /// The first 128 bytes of the configuration space; 128 zeros follow.
    Config = 128 {
        phys_port_cnt: U32,
        /// In network byte order.
        sys_image_guid: [u8; 8],
        vendor_id: U32, vendor_part_id: U32, hw_ver: U32,
        max_mr_size: U64, page_size_cap: U64,
        max_qp: U32, max_qp_wr: U32, device_cap_flags: U64,
        max_send_sge: U32, max_recv_sge: U32, max_sge_rd: U32,
        max_cq: U32, max_cqe: U32, max_mr: U32, max_pd: U32,
        max_qp_rd_atom: U32, max_res_rd_atom: U32, max_qp_init_rd_atom: U32,
        atomic_cap: u8,
        max_mw: U32, max_mcast_grp: U32, max_mcast_qp_attach: U32, max_total_mcast_qp_attach: U32,
        max_ah: U32, max_fast_reg_page_list_len: U32, max_pi_fast_reg_page_list_len: U32,
        max_pkeys: U16, local_ca_ack_delay: u8,
    }

    /// No bytes.
    Nothing = 0 {}
    QueryPort = 1 { port: u8 }
    PortAttr = 161 {
        state: u8, max_mtu: u8, active_mtu: u8,
        phys_mtu: U32, gid_tbl_len: U32, port_cap_flags: U32, max_msg_sz: U32, bad_pkey_cntr: U32, qkey_viol_cntr: U32,
        pkey_tbl_len: U16, active_width: u8, active_speed: U16, phys_state: u8, reserved: [U32; 32],
    }
    CreateCq = 4 { cqe: U32 }
    CqCreated = 4 { cqn: U32 }
    /// Follows [`CqCreated`] if there is room.
    CqCaps = 4 { cqe: U32 }
    /// A CQ, PD, MR or QP, alone.
    Handle = 4 { handle: U32 }
    GetDmaMr = 8 { pdn: U32, access_flags: U32 }
    MrCreated = 12 { mrn: U32, lkey: U32, rkey: U32 }
    CreateMr = 12 { pdn: U32, access_flags: U32, max_num_sg: U32 }
    MapMrSg = 32 { mrn: U32, npages: U32, start: U64, length: U64, pages: U64 }
    RegUserMr = 44 {
        pdn: U32, access_flags: U32, start: U64, length: U64, virt_addr: U64, pages: U64, npages: U32,
    }
    CreateQp = 66 {
        pdn: U32, qp_type: u8, sq_sig_type: u8,
        max_send_wr: U32, max_send_sge: U32, send_cqn: U32, max_recv_wr: U32, max_recv_sge: U32, recv_cqn: U32,
        max_inline_data: U32, reserved: [U32; 8],
    }
    QpCreated = 4 { qpn: U32 }
    QpCap = 20 { max_send_wr: U32, max_recv_wr: U32, max_send_sge: U32, max_recv_sge: U32, max_inline_data: U32 }
    /// Follows [`QpCreated`] if there is room.
    QpCaps = 28 { sq_vq: U32, rq_vq: U32, cap: QpCap }
    GlobalRoute = 23 { dgid: [u8; 16], flow_label: U32, sgid_index: u8, hop_limit: u8, traffic_class: u8 }
    AhAttr = 33 { grh: GlobalRoute, sl: u8, static_rate: u8, port_num: u8, ah_flags: u8, dmac: [u8; 6] }
    QpAttr = 129 {
        qp_state: u8, cur_qp_state: u8, path_mtu: u8, path_mig_state: u8,
        qkey: U32, rq_psn: U32, sq_psn: U32, dest_qp_num: U32, qp_access_flags: U32,
        pkey_index: U16, alt_pkey_index: U16,
        en_sqd_async_notify: u8, sq_draining: u8, max_rd_atomic: u8, max_dest_rd_atomic: u8,
        min_rnr_timer: u8, port_num: u8, timeout: u8, retry_cnt: u8, rnr_retry: u8, alt_port_num: u8, alt_timeout: u8,
        rate_limit: U32, cap: QpCap, ah_attr: AhAttr, alt_ah_attr: AhAttr,
    }
    ModifyQp = 137 { qpn: U32, attr_mask: U32, attrs: QpAttr }
    QueryQp = 8 { qpn: U32, attr_mask: U32 }
    QueryPkey = 6 { port: U32, index: U16 }
    Pkey = 2 { pkey: U16 }
    AddGid = 26 { gid: [u8; 16], gid_type: U32, index: U16, port_num: U32 }
    DelGid = 6 { index: U16, port: U32 }
    /// `flags`: [`crate::NOTIFY_SOLICITED`], [`crate::NOTIFY_NEXT`].
    ReqNotify = 8 { cqn: U32, flags: U32 }

    /// The part of a send WQE that WRITE and READ use.
    Rdma = 12 { remote_addr: U64, rkey: U32 }
    Atomic = 28 { remote_addr: U64, compare_add: U64, swap: U64, rkey: U32 }
    /// `sl_tclass_flowlabel`, from the top bit down: 4 bits of service level, 8 of traffic class, 20 of flow label.
    Av = 43 {
        port: U32, pdn: U32, sl_tclass_flowlabel: U32, dgid: [u8; 16], gid_index: u8, static_rate: u8, hop_limit: u8,
        dmac: [u8; 6], reserved: [u8; 6],
    }
    Ud = 51 { remote_qpn: U32, remote_qkey: U32, av: Av }
    /// Head of a send WQE. `wr` is a union: [`Rdma`], [`Atomic`] or [`Ud`], from its first byte on.
    SqReq = 75 {
        num_sge: U32, send_flags: U32, opcode: U32, wr_id: U64,
        /// Immediate data as the application gave it, or an rkey.
        ex: U32,
        wr: Ud,
    }
    /// Head of a receive WQE.
    RqReq = 12 { num_sge: U32, wr_id: U64 }
    Sge = 16 { addr: U64, length: U32, lkey: U32 }
    Cqe = 38 {
        wr_id: U64, status: u8, opcode: u8, vendor_err: U32, byte_len: U32, ex: U32, qp_num: U32, src_qp: U32,
        wc_flags: U32, pkey_index: U16, sl: u8, port_num: u8,
    }
}

impl SqReq {
    /// The union read as a `T`, the part for this kind of request.
    pub fn part<T: FromBytes + Unaligned>(&self) -> T {
        let bytes = self.wr.as_bytes();
        T::read_from_prefix(bytes).map_or_else(|_| T::new_zeroed(), |(part, _)| part)
    }

    /// Writes `part` into the union.
    ///
    /// # Panics
    /// If it is longer than [`Ud`].
    pub fn set_part(&mut self, part: &(impl IntoBytes + Immutable)) {
        let bytes = part.as_bytes();
        self.wr.as_mut_bytes()[..bytes.len()].copy_from_slice(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    #[test]
    fn r05_the_fields_of_the_configuration_space_lie_as_the_rfc_has_them_without_padding() {
        type C = Config;
        assert_eq!((offset_of!(C, sys_image_guid), offset_of!(C, vendor_id), offset_of!(C, max_mr_size)), (4, 12, 24));
        assert_eq!((offset_of!(C, max_qp), offset_of!(C, device_cap_flags), offset_of!(C, max_cq)), (40, 48, 68));
        assert_eq!((offset_of!(C, atomic_cap), offset_of!(C, max_mw), offset_of!(C, max_ah)), (96, 97, 113));
        assert_eq!((offset_of!(C, max_pkeys), offset_of!(C, local_ca_ack_delay)), (125, 127));
    }

    #[test]
    fn commands_and_elements_lie_as_specified() {
        assert_eq!((offset_of!(PortAttr, pkey_tbl_len), offset_of!(PortAttr, phys_state)), (27, 32));
        assert_eq!((offset_of!(CreateQp, send_cqn), offset_of!(CreateQp, reserved)), (14, 34));
        assert_eq!(
            (offset_of!(QpAttr, pkey_index), offset_of!(QpAttr, rate_limit), offset_of!(QpAttr, cap)),
            (24, 39, 43)
        );
        assert_eq!((offset_of!(QpAttr, ah_attr), offset_of!(QpAttr, alt_ah_attr)), (63, 96));
        assert_eq!((offset_of!(SqReq, wr_id), offset_of!(SqReq, ex), offset_of!(SqReq, wr)), (12, 20, 24));
        assert_eq!((offset_of!(Ud, av), offset_of!(Av, dgid), offset_of!(Av, gid_index)), (8, 12, 28));
        assert_eq!((offset_of!(Cqe, vendor_err), offset_of!(Cqe, qp_num), offset_of!(Cqe, port_num)), (10, 22, 37));
    }

    #[test]
    fn the_union_of_a_send_has_what_was_put_into_it() {
        let mut r = SqReq::default();
        let atomic = Atomic { remote_addr: 7.into(), compare_add: 8.into(), swap: 9.into(), rkey: 10.into() };
        r.set_part(&atomic);
        assert_eq!(r.part::<Atomic>(), atomic);
        assert_eq!(r.part::<Rdma>().remote_addr.get(), 7);
    }
}
