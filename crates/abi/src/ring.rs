//! Shared rings and the doorbell page (section 7 of the specification).

use std::mem::{offset_of, size_of};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Head of an SQ WQE; SGEs or inline data follow at byte 64.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
#[allow(missing_docs)]
pub struct SqWqe {
    pub wr_id: u64,
    /// `formats::WrOpcode`.
    pub opcode: u8,
    pub num_sge: u8,
    pub inline_len: u16,
    /// `formats::send_flags`.
    pub send_flags: u32,
    /// Immediate data, in network order as the application gave it; or the rkey to invalidate; or the access that an MR
    /// gets.
    pub imm: u32,
    /// rkey of the remote range; or the new key of a memory window or of an MR that is registered.
    pub rkey: u32,
    /// Address of the remote range; or of a memory window or MR.
    pub remote_addr: u64,
    /// Compare or add operand; or the length of a memory window or MR.
    pub compare_add: u64,
    /// Swap operand; or the lkey of the MR that a memory window is bound to, with the window's access in the upper
    /// half; or the bus address of an MR's page list.
    pub swap: u64,
    /// UD: the address handle, or the service level and static rate if the WQE holds the address itself; `dest_qpn` and
    /// `qkey` are the destination's. XRC: `dest_qpn` is the number of the SRQ. Registering an MR: `ah` is log2 of the
    /// page size, `dest_qpn` the number of pages.
    pub ah: u32,
    pub dest_qpn: u32,
    pub qkey: u32,
    pub reserved: u32,
}

impl SqWqe {
    /// The address of a datagram that holds its address in the WQE. Most of it uses the fields of the remote range.
    pub fn address(&self) -> crate::AhAttr {
        let at = offset_of!(SqWqe, remote_addr);
        let bytes = &self.as_bytes()[at..at + size_of::<crate::GlobalRoute>()];
        let grh = crate::GlobalRoute::read_from_bytes(bytes).unwrap_or_default();
        let [static_rate, sl, ..] = self.ah.to_le_bytes();
        crate::AhAttr { grh, static_rate, sl, is_global: 1, port_num: 1, ..Default::default() }
    }

    /// Stores an address where [`SqWqe::address`] reads it.
    pub fn set_address(&mut self, to: &crate::AhAttr) {
        let at = offset_of!(SqWqe, remote_addr);
        self.as_mut_bytes()[at..at + size_of::<crate::GlobalRoute>()].copy_from_slice(to.grh.as_bytes());
        self.ah = u32::from_le_bytes([to.static_rate, to.sl, 0, 0]);
    }
}

/// Head of an RQ WQE; SGEs follow at byte 16.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
#[allow(missing_docs)]
pub struct RqWqe {
    pub wr_id: u64,
    pub num_sge: u32,
    pub reserved: u32,
}

/// A scatter/gather element, as `struct ibv_sge`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
#[allow(missing_docs)]
pub struct Sge {
    pub addr: u64,
    pub length: u32,
    pub lkey: u32,
}

/// A completion. `valid` is written last: bit 0 is the phase of this lap of the ring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
#[allow(missing_docs)]
pub struct Cqe {
    pub wr_id: u64,
    pub status: u8,
    pub opcode: u8,
    pub wc_flags: u16,
    pub vendor_err: u32,
    pub byte_len: u32,
    pub imm: u32,
    pub qp_num: u32,
    pub src_qp: u32,
    pub pkey_index: u16,
    pub sl: u8,
    pub port_num: u8,
    /// SQ or RQ index after the WQE that this completes. Slots below it belong to the driver again.
    pub wqe_index: u32,
    /// Device clock when the completion was written, nanoseconds.
    pub timestamp: u64,
    /// If not 0, the data lies in the session's stage, in the record at this offset ([`StageRecord`]).
    pub staged: u32,
    pub reserved: [u32; 2],
    pub valid: u32,
}

/// Head of a record in the stage: a received message that the driver has to place. The places follow, then the data at
/// a multiple of [`STAGE_GRANULE`] / 2.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
#[allow(missing_docs)]
pub struct StageRecord {
    /// Device: 1 while the record is in use. Driver: 0 when the data is placed.
    pub busy: u32,
    /// [`StagePlace`]s that follow.
    pub num_places: u32,
    pub reserved: u64,
}

/// A range of the process that a received message is written to. The message fills the places in order, up to its
/// length.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
#[allow(missing_docs)]
pub struct StagePlace {
    /// Virtual address in the process, which may differ from the address in the SGE.
    pub addr: u64,
    pub length: u32,
    /// The MR that the SGE named.
    pub lkey: u32,
}

/// Records of the stage begin at multiples of this; the first granule is never used.
pub const STAGE_GRANULE: usize = 128;
/// Most bytes of a stage.
pub const MAX_STAGE: u64 = 64 << 20;

/// Bytes of a record before its data.
pub fn stage_head(places: usize) -> usize {
    (size_of::<StageRecord>() + places * size_of::<StagePlace>()).next_multiple_of(STAGE_GRANULE / 2)
}

/// Control block of a QP: the indices of its two rings, free-running modulo 2^32.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
#[allow(missing_docs)]
pub struct QpCtrl {
    /// Driver: WQEs posted.
    pub sq_prod: u32,
    pub rq_prod: u32,
    pub reserved: [u32; 14],
    /// Device: WQEs whose slot may be used again.
    pub sq_cons: u32,
    pub rq_cons: u32,
    /// Device: not 0 if it wants the doorbell rung for receives, too.
    pub rq_notify: u32,
    pub reserved2: [u32; 13],
}

/// Control block of a CQ.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
#[allow(missing_docs)]
pub struct CqCtrl {
    /// Driver: CQEs taken.
    pub cons: u32,
    /// Driver: `sequence << 2 | NOTIFY_*`; a new value arms the CQ once.
    pub arm: u32,
    pub reserved: [u32; 14],
    /// Device: CQEs written.
    pub prod: u32,
    /// Device: not 0 when the CQ has overrun.
    pub error: u32,
    pub reserved2: [u32; 14],
}

/// Words of the doorbell bitmap, 64 QPs each.
pub const DOORBELL_WORDS: usize = 64;

/// The doorbell page of a session.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
#[allow(missing_docs)]
pub struct DoorbellPage {
    /// Device: [`AWAKE`], [`ASLEEP`] or [`NAPS`], which says whether it needs a kick of the wake virtqueue.
    pub need_kick: u32,
    /// Device: number of its wake channels, at least 1. A program on CPU n kicks channel n modulo this number, so that
    /// the thread that executes its request wakes on the same CPU.
    pub wakes: u32,
    /// Device: [`COPYING`] and [`COPY_WAITS`].
    pub copying: u32,
    /// Device: the value of `away` that it has last read and acts on.
    pub away_seen: u32,
    pub reserved: [u32; 12],
    /// Driver sets, device clears: bit w says that `bits[w]` has a bit set.
    pub summary: u64,
    /// Driver: odd while it moves pages of its process.
    pub moving: u32,
    /// Driver: not 0 while the memory of its MRs is not where the device has mapped it. The value differs each time.
    pub away: u32,
    /// Driver: not 0 while it rings many times before it polls for completions, and would rather send one kick for all
    /// of them.
    pub bursts: u32,
    pub reserved2: [u32; 11],
    /// Driver sets, device clears: bit b of word w is the QP with `db_slot` 64 w + b.
    pub bits: [u64; DOORBELL_WORDS],
    pub reserved3: [u64; 432],
}

/// `DoorbellPage::need_kick`: the device polls the page.
pub const AWAKE: u32 = 0;
/// `DoorbellPage::need_kick`: the device does not read the page until it is kicked.
pub const ASLEEP: u32 = 1;
/// `DoorbellPage::need_kick`: the device reads the page when it is kicked, and soon in any case. The driver may delay
/// the kick until it has polled for completions and found none.
pub const NAPS: u32 = 2;

/// `DoorbellPage::copying`: the device copies through a process region of this session.
pub const COPYING: u32 = 1;
/// `DoorbellPage::copying`: a copy waits while the driver moves pages. The device retries soon.
pub const COPY_WAITS: u32 = 2;

macro_rules! offsets {
    ($($(#[$doc:meta])* $name:ident = $t:ty, $f:ident;)*) => {
        $($(#[$doc])* pub const $name: usize = offset_of!($t, $f);)*
    };
}
offsets! {
    /// Byte offset in [`QpCtrl`].
    QP_SQ_PROD = QpCtrl, sq_prod;
    /// Byte offset in [`QpCtrl`].
    QP_RQ_PROD = QpCtrl, rq_prod;
    /// Byte offset in [`QpCtrl`].
    QP_SQ_CONS = QpCtrl, sq_cons;
    /// Byte offset in [`QpCtrl`].
    QP_RQ_CONS = QpCtrl, rq_cons;
    /// Byte offset in [`QpCtrl`].
    QP_RQ_NOTIFY = QpCtrl, rq_notify;
    /// Byte offset in [`CqCtrl`].
    CQ_CONS = CqCtrl, cons;
    /// Byte offset in [`CqCtrl`].
    CQ_ARM = CqCtrl, arm;
    /// Byte offset in [`CqCtrl`].
    CQ_PROD = CqCtrl, prod;
    /// Byte offset in [`CqCtrl`].
    CQ_ERROR = CqCtrl, error;
    /// Byte offset in [`Cqe`].
    CQE_VALID = Cqe, valid;
    /// Byte offset in [`DoorbellPage`].
    DB_NEED_KICK = DoorbellPage, need_kick;
    /// Byte offset in [`DoorbellPage`].
    DB_WAKES = DoorbellPage, wakes;
    /// Byte offset in [`DoorbellPage`].
    DB_COPYING = DoorbellPage, copying;
    /// Byte offset in [`DoorbellPage`].
    DB_SUMMARY = DoorbellPage, summary;
    /// Byte offset in [`DoorbellPage`].
    DB_MOVING = DoorbellPage, moving;
    /// Byte offset in [`DoorbellPage`].
    DB_AWAY = DoorbellPage, away;
    /// Byte offset in [`DoorbellPage`].
    DB_BURSTS = DoorbellPage, bursts;
    /// Byte offset in [`DoorbellPage`].
    DB_AWAY_SEEN = DoorbellPage, away_seen;
    /// Byte offset in [`DoorbellPage`].
    DB_BITS = DoorbellPage, bits;
}

/// Byte offset of SGEs and inline data in an SQ WQE.
pub const SQ_DATA: usize = size_of::<SqWqe>();
/// Byte offset of the SGEs in an RQ WQE.
pub const RQ_DATA: usize = size_of::<RqWqe>();

/// Ring sizes derived from a QP's capabilities, the same way on both sides (section 7.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpLayout {
    /// Slots of the SQ, a power of two.
    pub sq_entries: u32,
    /// Bytes of an SQ slot, a multiple of 64.
    pub sq_stride: u32,
    /// Slots of the RQ, a power of two.
    pub rq_entries: u32,
    /// Bytes of an RQ slot, a multiple of 16.
    pub rq_stride: u32,
}

impl QpLayout {
    /// The layout of `cap`; `None` if a capability is above the device's limits.
    pub fn of(cap: &crate::QpCap) -> Option<Self> {
        let ok = cap.max_send_wr <= crate::MAX_QP_WR
            && cap.max_recv_wr <= crate::MAX_QP_WR
            && cap.max_send_sge <= crate::MAX_SGE
            && cap.max_recv_sge <= crate::MAX_SGE
            && cap.max_inline_data <= crate::MAX_INLINE;
        let sge = size_of::<Sge>() as u32;
        ok.then(|| QpLayout {
            sq_entries: cap.max_send_wr.max(1).next_power_of_two(),
            sq_stride: (SQ_DATA as u32 + (cap.max_send_sge * sge).max(cap.max_inline_data).max(8)).next_multiple_of(64),
            rq_entries: cap.max_recv_wr.max(1).next_power_of_two(),
            rq_stride: RQ_DATA as u32 + cap.max_recv_sge.max(1) * sge,
        })
    }
    /// Bytes of inline data that an SQ slot has room for.
    pub fn inline_room(&self) -> u32 {
        (self.sq_stride - SQ_DATA as u32).min(crate::MAX_INLINE)
    }
    /// Bytes of the SQ.
    pub fn sq_bytes(&self) -> usize {
        self.sq_entries as usize * self.sq_stride as usize
    }
    /// Bytes of the RQ.
    pub fn rq_bytes(&self) -> usize {
        self.rq_entries as usize * self.rq_stride as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::QpCap;

    #[test]
    fn sizes_and_offsets_match_the_specification() {
        assert_eq!(size_of::<SqWqe>(), 64);
        assert_eq!(offset_of!(SqWqe, imm), 16);
        assert_eq!((offset_of!(SqWqe, remote_addr), offset_of!(SqWqe, ah)), (24, 48));
        assert_eq!((size_of::<RqWqe>(), size_of::<Sge>(), size_of::<Cqe>()), (16, 16, 64));
        assert_eq!((CQE_VALID, offset_of!(Cqe, timestamp), offset_of!(Cqe, staged)), (60, 40, 48));
        assert_eq!((size_of::<StageRecord>(), size_of::<StagePlace>()), (16, 16));
        assert_eq!((stage_head(1), stage_head(3), stage_head(4)), (64, 64, 128));
        assert_eq!((size_of::<QpCtrl>(), size_of::<CqCtrl>()), (128, 128));
        assert_eq!((QP_SQ_PROD, QP_RQ_PROD, QP_SQ_CONS, QP_RQ_CONS, QP_RQ_NOTIFY), (0, 4, 64, 68, 72));
        assert_eq!((CQ_CONS, CQ_ARM, CQ_PROD, CQ_ERROR), (0, 4, 64, 68));
        assert_eq!(size_of::<DoorbellPage>(), 4096);
        assert_eq!((DB_NEED_KICK, DB_WAKES, DB_COPYING, DB_AWAY_SEEN), (0, 4, 8, 12));
        assert_eq!((DB_SUMMARY, DB_MOVING, DB_AWAY, DB_BURSTS, DB_BITS), (64, 72, 76, 80, 128));
    }

    #[test]
    fn layout_rounds_up_and_refuses_what_is_too_large() {
        let cap = QpCap { max_send_wr: 100, max_recv_wr: 1, max_send_sge: 1, max_recv_sge: 2, max_inline_data: 220 };
        let l = QpLayout::of(&cap).unwrap();
        assert_eq!((l.sq_entries, l.sq_stride, l.rq_entries, l.rq_stride), (128, 320, 1, 48));
        assert_eq!(QpLayout::of(&QpCap { max_send_sge: 33, ..cap }), None);
        assert_eq!(QpLayout::of(&QpCap { max_inline_data: 1025, ..cap }), None);
    }
}
