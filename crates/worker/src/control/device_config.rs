//! The configuration space of a vRNIC.

use unirdma_abi as abi;
use unirdma_ipc::vrnic::Hardware;
use unirdma_rnic::{Limits, MAX_MULTICAST_QPS};

/// Number of multicast groups in the device attributes. Only the attachments of a QP, of a vRNIC and of a group are
/// limited.
const MAX_MULTICAST_GROUPS: u32 = 8192;

/// The configuration space of a vRNIC.
pub(super) fn of(hardware: Hardware, l: &Limits) -> abi::Config {
    // RESIZE_MAX_WR | BAD_PKEY_CNTR | BAD_QKEY_CNTR | CURR_QP_STATE_MOD | PORT_ACTIVE_EVENT | SYS_IMAGE_GUID |
    // RC_RNR_NAK_GEN | SRQ_RESIZE | MEM_WINDOW | XRC | MEM_MGT_EXTENSIONS | MEM_WINDOW_TYPE_2B | FLUSH_GLOBAL |
    // ATOMIC_WRITE.
    const CAPS: u64 = 1 << 0
        | 1 << 1
        | 1 << 2
        | 1 << 7
        | 1 << 10
        | 1 << 11
        | 1 << 12
        | 1 << 13
        | 1 << 17
        | 1 << 20
        | 1 << 21
        | 1 << 24
        | 1 << 38
        | 1 << 40;
    abi::Config {
        magic: abi::CONFIG_MAGIC,
        version: abi::CONFIG_VERSION,
        phys_port_cnt: 1,
        atomic_cap: 1,
        features: abi::FEATURE_INVALIDATE | abi::FEATURE_GSI | abi::FEATURE_FAST_REG,
        node_guid: hardware.guid,
        sys_image_guid: hardware.guid,
        device_cap_flags: CAPS,
        max_mr_size: 1 << 47,
        page_size_cap: 0xffff_ffff_ffff_f000,
        max_qp: l.max_qp.min(abi::MAX_QP),
        max_cq: l.max_cq,
        max_mr: l.max_mr,
        max_pd: l.max_pd,
        max_qp_wr: abi::MAX_QP_WR,
        max_cqe: abi::MAX_CQE,
        max_sge: abi::MAX_SGE,
        max_inline: abi::MAX_INLINE,
        max_qp_rd_atom: 128,
        num_comp_queues: abi::MAX_COMP_QUEUES,
        // A private vendor ID of this project: locally administered, not a manufacturer's OUI.
        vendor_id: 0x02_7552,
        vendor_part_id: 42,
        hw_ver: 1,
        max_pkeys: 1,
        local_ca_ack_delay: 15,
        max_ah: l.max_ah,
        max_srq: l.max_srq,
        max_mcast_grp: MAX_MULTICAST_GROUPS,
        max_mcast_qp_attach: MAX_MULTICAST_QPS as u32,
        ..abi::Config::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `IBV_DEVICE_MEM_MGT_EXTENSIONS` promises both.
    #[test]
    fn the_device_says_that_it_invalidates_and_registers_by_requests() {
        let hardware = Hardware::derived("default", &["10.0.0.1".parse().unwrap()]);
        let c = of(hardware, &Limits::default());
        assert_eq!(c.node_guid, hardware.mac.guid().0);
        assert_eq!((c.features & abi::FEATURE_INVALIDATE, c.features & abi::FEATURE_FAST_REG), (1, 4));
        assert_ne!(c.device_cap_flags & 1 << 21, 0);
    }

    /// `IBV_QP_CAP` and `IBV_QP_CUR_STATE` of `ibv_modify_qp(3)` are optional features of a device.
    #[test]
    fn the_device_says_which_optional_attributes_of_qps_it_takes() {
        let hardware = Hardware::derived("default", &["10.0.0.1".parse().unwrap()]);
        let c = of(hardware, &Limits::default());
        let (resize_max_wr, curr_qp_state_mod) = (1, 1 << 7);
        assert_eq!(!c.device_cap_flags & (resize_max_wr | curr_qp_state_mod), 0);
    }
}
