//! Completion queues of the RFC mode. The RNIC writes into a ring of the device, whose entries are copied into the
//! driver's buffers.

use unirdma_abi as abi;
use unirdma_abi::rfc;
use unirdma_link::Ticket;
use unirdma_mem::{CqRing, CqTail};
use zerocopy::IntoBytes;

use super::aligned;

/// Bytes of a completion of the RFC.
pub(super) const CQE_BYTES: usize = size_of::<rfc::Cqe>();

/// A completion queue.
pub(super) struct Cq {
    /// The RNIC's handle.
    pub number: u32,
    pub tail: CqTail,
    /// The driver is to be called for the next completion.
    pub asked: bool,
    pub _hold: Ticket,
}

/// Number of entries in the ring of a CQ for `cqe` completions.
pub(super) fn entries(cqe: u32) -> u32 {
    cqe.next_power_of_two()
}

/// Bytes of the ring of a CQ, with its control block.
pub(super) fn bytes(cqe: u32) -> usize {
    entries(cqe) as usize * size_of::<abi::Cqe>() + size_of::<abi::CqCtrl>()
}

/// Makes such a ring; returns the RNIC's end and the device's end.
pub(super) fn ring(cqe: u32) -> Option<(CqRing, CqTail)> {
    let (memory, n) = (aligned(bytes(cqe)), entries(cqe));
    let ctrl = memory.sub(0, size_of::<abi::CqCtrl>() as u64)?;
    let ring = memory.sub(ctrl.len() as u64, (memory.len() - ctrl.len()) as u64)?;
    let mut tail = CqTail::new(ctrl.clone(), ring.clone(), n)?;
    tail.arm(abi::NOTIFY_NEXT);
    Some((CqRing::new(ctrl, ring, n)?, tail))
}

/// A completion as the driver sees it. `opcode` is the opcode of the send WQE, or of the completion if it is a receive.
pub(super) fn to_driver(c: &abi::Cqe, opcode: u8) -> [u8; CQE_BYTES] {
    let flags = u32::from(c.wc_flags);
    let inv = if flags & unirdma_formats::wc_flags::WITH_INV != 0 { rfc::wc_flags::WITH_INVALIDATE } else { 0 };
    let cqe = rfc::Cqe {
        wr_id: c.wr_id.into(),
        status: c.status,
        opcode,
        vendor_err: c.vendor_err.into(),
        byte_len: c.byte_len.into(),
        ex: c.imm.into(),
        qp_num: c.qp_num.into(),
        src_qp: c.src_qp.into(),
        wc_flags: (flags & (rfc::wc_flags::GRH | rfc::wc_flags::WITH_IMM) | inv).into(),
        pkey_index: c.pkey_index.into(),
        sl: c.sl,
        port_num: c.port_num,
    };
    let mut bytes = [0; CQE_BYTES];
    bytes.copy_from_slice(cqe.as_bytes());
    bytes
}

/// True if a completion is of a receive.
pub(super) fn is_receive(c: &abi::Cqe) -> bool {
    c.opcode >= rfc::opcode::RECV
}
