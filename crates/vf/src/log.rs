//! The log of leases: records that are appended to a file. A damaged record costs only itself, and a record may follow
//! a damaged one.
//!
//! ```text
//! "VFL1" | length of the body, 4 bytes | CRC-32 of the length and the body | body, a Record (postcard) | "VFL1" | ...
//! ```
//!
//! Numbers are little-endian.

use serde::{Deserialize, Serialize};

use crate::lease::{Lease, LeaseId, Part};

/// The beginning of each record, with the version of the format.
const MARK: &[u8; 4] = b"VFL1";
/// Bytes before the body.
const HEAD_BYTES: usize = 12;
/// The longest body.
const MAX_BODY_BYTES: usize = 1 << 20;

/// A change of the leases. Later records win.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum Record {
    /// A lease as it is now.
    Lease(Lease),
    /// The VF of this lease is free again.
    Returned(LeaseId),
    /// Whether a part of the pool takes new leases.
    Drain { part: Part, on: bool },
}

/// The records of a log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Kept {
    /// Whole records, in order.
    pub records: Vec<Record>,
    /// Bytes between and behind them that are no record.
    pub damage: Vec<Damage>,
}

/// Bytes of a log that are no record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum Damage {
    #[error(
        "the log of leases is damaged: {bytes} bytes from byte {at} are left out; VFs used by their leases are free again when they are unused"
    )]
    Bytes { at: usize, bytes: usize },
    #[error("the log of leases ends in the middle of a record, at byte {at}; the {bytes} bytes behind it are left out")]
    Cut { at: usize, bytes: usize },
}

/// The bytes of a record.
pub fn encode(record: &Record) -> Vec<u8> {
    // A `Vec` takes any number of bytes, and the record has no type that postcard cannot encode.
    let body = postcard::to_allocvec(record).unwrap_or_default();
    let length = (body.len() as u32).to_le_bytes();
    [MARK, &length[..], &checksum(length, &body).to_le_bytes(), &body].concat()
}

/// Reads a log. Any bytes are a log.
pub fn read(bytes: &[u8]) -> Kept {
    let mut kept = Kept::default();
    // `at`: the place where the next record may begin. `good`: the end of the last record.
    let (mut at, mut good) = (0, 0);
    while let Some(next) = find_mark(bytes, at) {
        let Some((record, length)) = decode(&bytes[next..]) else {
            at = next + 1;
            continue;
        };
        if next > good {
            kept.damage.push(Damage::Bytes { at: good, bytes: next - good });
        }
        kept.records.push(record);
        (at, good) = (next + length, next + length);
    }
    if good < bytes.len() {
        kept.damage.push(Damage::Cut { at: good, bytes: bytes.len() - good });
    }
    kept
}

fn find_mark(bytes: &[u8], from: usize) -> Option<usize> {
    bytes[from..].windows(MARK.len()).position(|w| w == MARK).map(|n| from + n)
}

/// The record at the beginning of the bytes, and its length.
fn decode(bytes: &[u8]) -> Option<(Record, usize)> {
    let (head, rest) = bytes.split_first_chunk::<HEAD_BYTES>()?;
    let [_, _, _, _, a, b, c, d, e, f, g, h] = *head;
    let length = [a, b, c, d];
    let body = rest.get(..u32::from_le_bytes(length) as usize).filter(|b| b.len() <= MAX_BODY_BYTES)?;
    let is_whole = checksum(length, body) == u32::from_le_bytes([e, f, g, h]);
    let record = is_whole.then(|| postcard::from_bytes(body).ok()).flatten()?;
    Some((record, HEAD_BYTES + body.len()))
}

fn checksum(length: [u8; 4], body: &[u8]) -> u32 {
    let mut crc = crc32fast::Hasher::new();
    crc.update(&length);
    crc.update(body);
    crc.finalize()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn returned(n: u64) -> Record {
        Record::Returned(LeaseId(n))
    }

    #[test]
    fn a_log_cut_at_any_byte_gives_the_whole_records_before_it_and_says_so() {
        let log: Vec<Vec<u8>> = (0..4).map(|n| encode(&returned(n * 1_000))).collect();
        let ends: Vec<usize> = (0..=log.len()).map(|n| log[..n].concat().len()).collect();
        let bytes = log.concat();
        for cut in 0..=bytes.len() {
            let whole = ends.iter().filter(|e| **e <= cut).count() - 1;
            let kept = read(&bytes[..cut]);
            assert_eq!(kept.records, (0..whole as u64).map(|n| returned(n * 1_000)).collect::<Vec<_>>());
            let (at, rest) = (ends[whole], cut - ends[whole]);
            assert_eq!(kept.damage, (rest > 0).then_some(Damage::Cut { at, bytes: rest }).as_slice(), "{cut}");
        }
    }

    #[test]
    fn a_damaged_record_costs_only_itself() {
        let (a, b, c) = (encode(&returned(1)), encode(&returned(2)), encode(&returned(3)));
        for at in 0..b.len() {
            for bit in 0..8 {
                let mut wrong = b.clone();
                wrong[at] ^= 1 << bit;
                let kept = read(&[&a[..], &wrong, &c].concat());
                assert_eq!(kept.records, [returned(1), returned(3)], "byte {at}");
                assert_eq!(kept.damage, [Damage::Bytes { at: a.len(), bytes: b.len() }]);
            }
        }
        // A record that was appended behind a torn one is found.
        let torn = [&a[..a.len() - 1], &b].concat();
        assert_eq!(read(&torn).records, [returned(2)]);
    }
}
