//! The kernel driver's own parts of the answers to uverbs commands; twin of `guest/linux/unirdma-abi.h`.

/// After GET_CONTEXT.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub struct ContextResp {
    /// Offset at which the process's doorbell page can be mapped.
    pub db_offset: u64,
    pub max_inline: u32,
    pub reserved: u32,
}

/// After CREATE_CQ and RESIZE_CQ. The control block is at the beginning of the mapping.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub struct CqResp {
    pub offset: u64,
    pub size: u64,
    pub ring_offset: u32,
    pub entries: u32,
    pub cqn: u32,
    pub reserved: u32,
}

/// After CREATE_QP. The target of an XRC connection has no such answer, because it has nothing to map. The control
/// block is at the beginning of the mapping.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub struct QpResp {
    pub offset: u64,
    pub size: u64,
    pub sq_offset: u32,
    pub rq_offset: u32,
    pub sq_entries: u32,
    pub sq_stride: u32,
    pub rq_entries: u32,
    pub rq_stride: u32,
    pub db_slot: u32,
    pub max_inline: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
}

/// After CREATE_SRQ. The control block is at the beginning of the mapping.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub struct SrqResp {
    pub offset: u64,
    pub size: u64,
    pub ring_offset: u32,
    pub entries: u32,
    pub stride: u32,
    pub srqn: u32,
}

/// After QUERY_DEVICE, if there is room.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub struct ClockResp {
    /// Present time by the clock of completions, ns. Two words, because the part before it is a multiple of four bytes
    /// long.
    pub clock_ns: [u32; 2],
}

/// Written by MODIFY_SRQ when it changes the size: a new ring, in a mapping of its own.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub struct ResizeSrqResp {
    pub offset: u64,
    pub size: u64,
    pub entries: u32,
    pub reserved: u32,
}

/// After CREATE_AH.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub struct AhResp {
    /// The device's handle, by which WQEs name the AH.
    pub ah: u32,
    pub reserved: u32,
}

const _: () = {
    assert!(size_of::<ContextResp>() == 16 && size_of::<AhResp>() == 8);
    assert!(size_of::<CqResp>() == 32 && size_of::<SrqResp>() == 32);
    assert!(size_of::<QpResp>() == 56 && size_of::<ResizeSrqResp>() == 24 && size_of::<ClockResp>() == 8);
};
