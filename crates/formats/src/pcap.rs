//! The pcap file format, with nanoseconds and raw IP packets (`pcap-savefile(5)`, link type 101).

/// Bytes of a file's header.
pub const HEADER_BYTES: usize = 24;
/// Bytes of a record's header.
pub const RECORD_BYTES: usize = 16;
const MAGIC_NS: u32 = 0xa1b2_3c4d;
const LINKTYPE_RAW: u32 = 101;

/// The header of a file whose packets are cut after `snap` bytes.
pub fn header(snap: u32) -> [u8; HEADER_BYTES] {
    let mut b = [0; HEADER_BYTES];
    b[..4].copy_from_slice(&MAGIC_NS.to_le_bytes());
    b[4..6].copy_from_slice(&2u16.to_le_bytes());
    b[6..8].copy_from_slice(&4u16.to_le_bytes());
    b[16..20].copy_from_slice(&snap.to_le_bytes());
    b[20..].copy_from_slice(&LINKTYPE_RAW.to_le_bytes());
    b
}

/// The header of a record: nanoseconds since 1970, bytes in the file, and bytes of the whole packet.
pub fn record(ns: u64, kept: u32, all: u32) -> [u8; RECORD_BYTES] {
    let words = [(ns / 1_000_000_000) as u32, (ns % 1_000_000_000) as u32, kept, all];
    let mut b = [0; RECORD_BYTES];
    for (to, w) in b.chunks_exact_mut(4).zip(words) {
        to.copy_from_slice(&w.to_le_bytes());
    }
    b
}

/// Bytes of the record that starts here, with its header; `None` if it is not complete.
fn record_bytes(bytes: &[u8]) -> Option<usize> {
    let kept = bytes.get(8..12)?;
    let all = RECORD_BYTES + u32::from_le_bytes([kept[0], kept[1], kept[2], kept[3]]) as usize;
    (all <= bytes.len()).then_some(all)
}

/// Records that lie one after the other, with their headers.
pub fn records(mut bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let (record, rest) = bytes.split_at(record_bytes(bytes)?);
        bytes = rest;
        Some(record)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_told_apart() {
        let mut bytes = Vec::new();
        for n in [0usize, 3, 100] {
            bytes.extend(record(1_500_000_007, n as u32, 100));
            bytes.extend(vec![n as u8; n]);
        }
        let sizes: Vec<usize> = records(&bytes).map(|r| r.len() - RECORD_BYTES).collect();
        assert_eq!(sizes, [0, 3, 100]);
        assert_eq!(bytes[..8], [1, 0, 0, 0, 0x07, 0x65, 0xcd, 0x1d]);
        bytes.pop();
        assert_eq!(records(&bytes).count(), 2);
        assert_eq!(header(96)[16..24], [96, 0, 0, 0, 101, 0, 0, 0]);
    }
}
