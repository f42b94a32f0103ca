//! The invariant CRC of incoming packets.
//!
//! It covers the IPv4 Identification, which a UDP socket does not show. The CRC is linear, so the changes caused by
//! different Identifications form a 16-dimensional space, which is computed once for each length. A packet is accepted
//! if *some* Identification makes its ICRC correct. This way 16 of the 32 bits are still checked.

use std::collections::HashMap;

use unirdma_formats::wire::{Envelope, ICRC_BYTES, icrc};

/// Checks packets.
#[derive(Default)]
pub(super) struct Checker(HashMap<usize, IdSpace>);

impl Checker {
    /// The body of a packet with a correct ICRC. `e` has the Identification that the packet has if a port like this one
    /// sent it.
    pub fn open<'a>(&mut self, e: &Envelope, packet: &'a [u8]) -> Option<&'a [u8]> {
        let (body, wrong) = split(e, packet)?;
        if wrong == 0 {
            return Some(body);
        }
        if e.src.is_ipv6() {
            return None;
        }
        let space = self.0.entry(body.len()).or_insert_with(|| IdSpace::new(e, body));
        space.contains(wrong).then_some(body)
    }
}

/// The body of a packet with a correct ICRC.
pub(super) fn open<'a>(e: &Envelope, packet: &'a [u8]) -> Option<&'a [u8]> {
    split(e, packet).filter(|s| s.1 == 0).map(|s| s.0)
}

/// A packet's body, and the difference between its ICRC and the correct one.
fn split<'a>(e: &Envelope, packet: &'a [u8]) -> Option<(&'a [u8], u32)> {
    let (body, crc) = packet.split_last_chunk::<ICRC_BYTES>()?;
    Some((body, icrc(e, body) ^ u32::from_le_bytes(*crc)))
}

/// The changes of a packet's ICRC that changes of the IPv4 Identification cause: a linear space over bits, as a basis
/// with distinct leading bits.
struct IdSpace([u32; 32]);

impl IdSpace {
    fn new(e: &Envelope, body: &[u8]) -> Self {
        let zero = icrc(&Envelope { ip_id: 0, ..*e }, body);
        let mut basis = IdSpace([0; 32]);
        for bit in 0..16 {
            let change = icrc(&Envelope { ip_id: 1 << bit, ..*e }, body) ^ zero;
            let rest = basis.reduce(change);
            if rest != 0 {
                basis.0[rest.ilog2() as usize] = rest;
            }
        }
        basis
    }

    fn reduce(&self, mut v: u32) -> u32 {
        for bit in (0..32).rev() {
            if v >> bit & 1 != 0 {
                v ^= self.0[bit];
            }
        }
        v
    }

    fn contains(&self, change: u32) -> bool {
        self.reduce(change) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_identification_is_taken_and_no_changed_byte() {
        let mut checker = Checker::default();
        let e = Envelope { src: [10, 0, 0, 1].into(), dst: [10, 0, 0, 2].into(), src_port: 49_152, ip_id: 0 };
        for len in [12, 16, 1040, 4112] {
            let body: Vec<u8> = (0..len).map(|i| (i * 7) as u8).collect();
            for id in [0, 1, 63, 0x1234, 0xffff] {
                let mut packet = body.clone();
                packet.extend(icrc(&Envelope { ip_id: id, ..e }, &body).to_le_bytes());
                assert_eq!(checker.open(&e, &packet), Some(&body[..]), "length {len}, id {id:#x}");
                assert_eq!(open(&e, &packet).is_some(), id == 0);
                assert!(open(&Envelope { ip_id: id, ..e }, &packet).is_some());
                for at in [0, len / 2, len + 2] {
                    let mut bad = packet.clone();
                    bad[at] ^= 0x10;
                    assert_eq!(checker.open(&e, &bad), None, "length {len}, byte {at}");
                }
            }
        }
        assert_eq!(checker.open(&e, &[1, 2]), None);
    }
}
