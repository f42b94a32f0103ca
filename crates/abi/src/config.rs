//! The configuration space (section 4 of the specification) and the virtqueues (section 3).

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Virtio device ID of an RDMA device (seed 002, R01).
pub const VIRTIO_ID_RDMA: u32 = 42;
/// Index of the control virtqueue.
pub const VQ_CONTROL: u32 = 0;
/// Index of the asynchronous event virtqueue.
pub const VQ_ASYNC: u32 = 1;
/// Index of the wake virtqueue: it carries no buffers; its kick wakes a sleeping device.
pub const VQ_WAKE: u32 = 2;
/// Index of the first completion event virtqueue.
pub const VQ_COMP_FIRST: u32 = 3;
/// Completion event virtqueues, so virtqueues 3..=255.
pub const MAX_COMP_QUEUES: u32 = 253;
/// All virtqueues.
pub const NUM_QUEUES: u32 = VQ_COMP_FIRST + MAX_COMP_QUEUES;
const _: () = assert!(NUM_QUEUES <= 256, "a vhost-user vring index has 8 bits");
/// Event channels of a process (section 8.1): completion event queue `n` is channel `n`, if that is open.
pub const MAX_CHANNELS: u32 = 65_536;
/// Channel of asynchronous events.
pub const CHANNEL_ASYNC: u32 = 0xffff_ffff;
/// Channels `CHANNEL_WAKE + i` are eventfds that notify virtqueue 2. `DoorbellPage::wakes` says how many of them exist.
pub const CHANNEL_WAKE: u32 = 0xffff_ff00;
/// Most wake channels.
pub const MAX_WAKES: u32 = 64;
/// Channel for virtqueue 0: a message from the driver is a kick, a message from the device is a call.
pub const CHANNEL_CONTROL: u32 = 0xffff_fffd;
/// Largest size of a virtqueue, in descriptors.
pub const MAX_VQ_SIZE: u16 = 1024;

/// `Config::magic`: "uRDM".
pub const CONFIG_MAGIC: u32 = 0x4d44_5275;
/// `Config::version` that this crate describes.
pub const CONFIG_VERSION: u16 = 1;

/// `Config::features`: LOCAL_INV, SEND_WITH_INV and memory windows of type 2.
pub const FEATURE_INVALIDATE: u64 = 1;
/// `Config::features`: a QP for the general services (QP 1), and addresses in WQEs.
pub const FEATURE_GSI: u64 = 2;
/// `Config::features`: fast registration, by CREATE_MR and REG_MR.
pub const FEATURE_FAST_REG: u64 = 4;

/// Most pages of an MR that is registered by work requests: their list is a page.
pub const MAX_FAST_PAGES: u32 = 512;
/// log2 of the largest page size of such an MR.
pub const MAX_FAST_PAGE_SHIFT: u32 = 30;

/// Most SGEs of one WQE.
pub const MAX_SGE: u32 = 32;
/// Most inline bytes of one WQE.
pub const MAX_INLINE: u32 = 1024;
/// Most WQEs of one SQ or RQ.
pub const MAX_QP_WR: u32 = 32768;
/// Most CQEs of one CQ. The ring has the next power of two of slots.
pub const MAX_CQE: u32 = 4_194_303;
/// Most CQs of one session.
pub const MAX_CQ: u32 = 16_384;
/// Most QPs of one session: one doorbell bit each, of one page.
pub const MAX_QP: u32 = 4096;

/// Most doorbell pages of one session, not counting the one of SET_DOORBELL.
pub const MAX_DOORBELLS: u32 = 1024;

/// The first 128 bytes of the device configuration space, which is read only. [`ConfigMore`] follows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
#[allow(missing_docs)]
pub struct Config {
    /// [`CONFIG_MAGIC`].
    pub magic: u32,
    /// [`CONFIG_VERSION`].
    pub version: u16,
    pub phys_port_cnt: u8,
    /// 0 none, 1 within the device, 2 global (R04).
    pub atomic_cap: u8,
    /// `FEATURE_*` bits; a driver ignores those that it does not know.
    pub features: u64,
    /// EUI-64 of the vRNIC.
    pub node_guid: u64,
    pub sys_image_guid: u64,
    /// R03.
    pub device_cap_flags: u64,
    pub max_mr_size: u64,
    pub page_size_cap: u64,
    pub max_qp: u32,
    pub max_cq: u32,
    pub max_mr: u32,
    pub max_pd: u32,
    pub max_qp_wr: u32,
    pub max_cqe: u32,
    pub max_sge: u32,
    pub max_inline: u32,
    pub max_qp_rd_atom: u32,
    pub num_comp_queues: u32,
    pub vendor_id: u32,
    pub vendor_part_id: u32,
    pub hw_ver: u32,
    pub max_pkeys: u16,
    pub local_ca_ack_delay: u8,
    pub reserved: u8,
    pub max_ah: u32,
    pub max_srq: u32,
    pub max_mcast_grp: u32,
    pub max_mcast_qp_attach: u32,
}

/// The last 64 bytes of the configuration space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ConfigMore {
    /// Changes whenever the device has lost all objects without being asked.
    pub generation: u32,
    /// [`MAX_DOORBELLS`].
    pub max_doorbells: u32,
    /// Zero.
    pub reserved: [u32; 14],
}

/// Bytes of the configuration space.
pub const CONFIG_BYTES: usize = size_of::<Config>() + size_of::<ConfigMore>();

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::{offset_of, size_of};

    #[test]
    fn config_matches_the_specification() {
        assert_eq!((size_of::<Config>(), CONFIG_BYTES), (128, 192));
        assert_eq!(offset_of!(Config, features), 8);
        assert_eq!(offset_of!(Config, max_mr_size), 40);
        assert_eq!(offset_of!(Config, max_qp), 56);
        assert_eq!((offset_of!(Config, max_pkeys), offset_of!(Config, max_ah)), (108, 112));
    }
}
