//! Messages between the two ends of a stream, in the layout of rdma-core's rsockets.

/// Messages that one end may send before it is told of more room, which is the number of receives that the other has
/// posted.
pub(super) const QUEUE: u16 = 384;

// Kinds of messages, in the upper three bits of the immediate data.
pub(super) const OP_DATA: u32 = 0;
pub(super) const OP_SGL: u32 = 4;
pub(super) const OP_MAPPING: u32 = 6;
pub(super) const OP_CTRL: u32 = 7;
pub(super) const CTRL_DISCONNECT: u32 = 0;
pub(super) const CTRL_SHUTDOWN: u32 = 2;

/// Immediate data of a message.
pub(super) fn message(op: u32, data: u32) -> u32 {
    op << 29 | data & 0x1fff_ffff
}

/// Kind and data of a message.
pub(super) fn parts(imm: u32) -> (u32, u32) {
    (imm >> 29, imm & 0x1fff_ffff)
}

/// A part of the peer's receive buffer, or memory that it has mapped, as the peer writes it into ours.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(super) struct Sge {
    pub addr: u64,
    pub key: u32,
    pub length: u32,
}

impl Sge {
    pub fn into_host(self) -> Sge {
        Sge { addr: u64::from_be(self.addr), key: u32::from_be(self.key), length: u32::from_be(self.length) }
    }

    pub fn into_network(self) -> Sge {
        Sge { addr: self.addr.to_be(), key: self.key.to_be(), length: self.length.to_be() }
    }
}

/// Memory that the other end's `riowrite` reaches by offset. The entry is written into the other end's table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(super) struct Mapping {
    pub offset: u64,
    pub memory: Sge,
}
const _: () = assert!(size_of::<Mapping>() == 24);

/// Flag of a host that is big-endian. The numbers are in network order anyway.
pub(super) const BIG_ENDIAN: u8 = 1;
/// A table of mappings follows the SGEs.
pub(super) const HAS_TABLE: u8 = 2;

/// Data that each end sends when it connects; numbers in network order.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct ConnData {
    pub version: u8,
    pub flags: u8,
    pub credits: u16,
    pub reserved: [u8; 3],
    /// Entries of the table of mappings, encoded by [`to_scale`].
    pub table: u8,
    pub sgl: Sge,
    pub buffer: Sge,
}
const _: () = assert!(size_of::<ConnData>() == 40);

/// Encodes a number of up to 32,512 in 8 bits: exactly up to 128, in units of 256 above.
pub(super) fn to_scale(n: u32) -> u8 {
    if n <= 128 { n as u8 } else { 128 | (n >> 8).min(127) as u8 }
}

/// Decodes a number that [`to_scale`] has encoded.
pub(super) fn from_scale(scale: u8) -> u32 {
    if scale <= 128 { scale.into() } else { u32::from(scale & 127) << 8 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_of_tables_survive_their_eight_bits() {
        for (n, kept) in [(0, 0), (1, 1), (128, 128), (256, 256), (300, 256), (32_512, 32_512), (u32::MAX, 32_512)] {
            assert_eq!(from_scale(to_scale(n)), kept, "{n}");
        }
    }

    #[test]
    fn a_message_has_its_kind_and_29_bits() {
        assert_eq!(parts(message(OP_MAPPING, 5)), (OP_MAPPING, 5));
        assert_eq!(parts(message(OP_CTRL, u32::MAX)), (OP_CTRL, 0x1fff_ffff));
    }
}
