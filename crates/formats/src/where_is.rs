//! The message by which virtual layers ask each other how a GID is reached at present (`docs/spec/tunnel.md`, *Where a
//! GID is*): a MAD of a vendor's class (IBTA vol. 1, 16.5), from the asking vRNIC to QP 1 of the vRNIC in
//! question.

use crate::Gid;
use crate::cm::MAD_BYTES;

/// The QPN from which hosts send it. No program and no guest has this QP, so none can send it.
pub const HOST_QPN: u32 = 0;

/// Base version 1, a class of the second range for vendors, class version 1.
const PREFIX: [u8; 3] = [1, 0x3a, 1];
/// The vendor, who is none: a locally administered identifier.
const OUI: [u8; 3] = [0x06, 0x52, 0x6f];
const ATTRIBUTE: u16 = 1;

const METHOD_AT: usize = 3;
const TID_AT: usize = 8;
const ATTRIBUTE_AT: usize = 16;
const OUI_AT: usize = 37;
const WAY_AT: usize = 40;
const MTU_AT: usize = 41;
const GID_AT: usize = 48;

const WAY_SOFT: u8 = 0;
const WAY_VF: u8 = 1;

/// Whether the sender of a [`WhereIs`] wants an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Method {
    /// It does.
    Get = 1,
    /// It answers.
    GetResp = 0x81,
}

/// How a vRNIC is reached by a VF.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByVf {
    /// The VF's GID: a unicast address that other hosts reach.
    pub gid: Gid,
    /// The largest path MTU that it takes, a code of 1 to 5.
    pub mtu: u8,
}

/// A question or an answer. Both say how their sender is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WhereIs {
    /// Question or answer.
    pub method: Method,
    /// Chosen by the sender of the question, repeated in the answer.
    pub tid: u64,
    /// The sender's VF; `None`: its programs have none at present.
    pub vf: Option<ByVf>,
}

impl WhereIs {
    /// Reads a MAD. `None` for another class, version, vendor, method, attribute or way, for one that is too short, and
    /// for a VF that no host can be reached by.
    pub fn parse(bytes: &[u8]) -> Option<WhereIs> {
        let b: &[u8; MAD_BYTES] = bytes.get(..MAD_BYTES)?.try_into().ok()?;
        let attribute = u16::from_be_bytes([b[ATTRIBUTE_AT], b[ATTRIBUTE_AT + 1]]);
        if b[..3] != PREFIX || b[OUI_AT..][..3] != OUI || attribute != ATTRIBUTE {
            return None;
        }
        let method = match b[METHOD_AT] {
            1 => Method::Get,
            0x81 => Method::GetResp,
            _ => return None,
        };
        let mut tid = [0; 8];
        tid.copy_from_slice(&b[TID_AT..][..8]);
        let mut gid = Gid::default();
        gid.0.copy_from_slice(&b[GID_AT..][..16]);
        let vf = match b[WAY_AT] {
            WAY_SOFT => None,
            WAY_VF => Some(ByVf { gid, mtu: b[MTU_AT] }.checked()?),
            _ => return None,
        };
        Some(WhereIs { method, tid: u64::from_be_bytes(tid), vf })
    }

    /// Its bytes.
    pub fn bytes(&self) -> [u8; MAD_BYTES] {
        let mut b = [0; MAD_BYTES];
        b[..3].copy_from_slice(&PREFIX);
        b[METHOD_AT] = self.method as u8;
        b[TID_AT..][..8].copy_from_slice(&self.tid.to_be_bytes());
        b[ATTRIBUTE_AT..][..2].copy_from_slice(&ATTRIBUTE.to_be_bytes());
        b[OUI_AT..][..3].copy_from_slice(&OUI);
        if let Some(vf) = self.vf {
            (b[WAY_AT], b[MTU_AT]) = (WAY_VF, vf.mtu);
            b[GID_AT..][..16].copy_from_slice(&vf.gid.0);
        }
        b
    }
}

impl ByVf {
    /// `None` if no host can be reached by it: an address of several hosts, of none, or of each host itself; or an
    /// unknown MTU.
    fn checked(self) -> Option<ByVf> {
        let ip = self.gid.ip();
        let is_of_one = match ip {
            std::net::IpAddr::V4(a) => !a.is_broadcast() && !a.is_link_local(),
            std::net::IpAddr::V6(a) => !a.is_unicast_link_local(),
        };
        let is_address = is_of_one && !(ip.is_unspecified() || ip.is_loopback() || ip.is_multicast());
        (is_address && (1..=5).contains(&self.mtu)).then_some(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(vf: Option<(&str, u8)>) -> WhereIs {
        let vf = vf.map(|(ip, mtu)| ByVf { gid: Gid::from_ip(ip.parse().unwrap()), mtu });
        WhereIs { method: Method::GetResp, tid: 0x0102_0304_0506_0708, vf }
    }

    #[test]
    fn what_is_written_is_read() {
        let question = WhereIs { method: Method::Get, ..answer(None) };
        for m in [question, answer(None), answer(Some(("10.50.0.10", 3))), answer(Some(("fd00::7", 5)))] {
            assert_eq!(WhereIs::parse(&m.bytes()), Some(m));
        }
    }

    /// The bytes of `docs/spec/tunnel.md`.
    #[test]
    fn bytes_are_as_specified() {
        let b = answer(Some(("10.50.0.10", 3))).bytes();
        let mut expected = [0; MAD_BYTES];
        expected[..4].copy_from_slice(&[1, 0x3a, 1, 0x81]);
        expected[8..16].copy_from_slice(&[1, 2, 3, 4, 5, 6, 7, 8]);
        expected[17] = 1;
        expected[37..42].copy_from_slice(&[0x06, 0x52, 0x6f, 1, 3]);
        expected[58..64].copy_from_slice(&[0xff, 0xff, 10, 50, 0, 10]);
        assert_eq!(b, expected);
        // It is no message of connection management, so older hosts drop it.
        assert_eq!(crate::cm::Mad::parse(&b), None);
    }

    #[test]
    fn malformed_messages_are_refused() {
        let good = answer(Some(("10.50.0.10", 3))).bytes();
        for (at, value) in
            [(0, 2), (1, 7), (2, 2), (3, 2), (3, 0), (17, 2), (16, 1), (37, 0), (40, 2), (41, 0), (41, 6)]
        {
            let mut bad = good;
            bad[at] = value;
            assert_eq!(WhereIs::parse(&bad), None, "byte {at} is {value}");
        }
        for n in 0..MAD_BYTES {
            assert_eq!(WhereIs::parse(&good[..n]), None, "{n} bytes");
        }
        let nowhere =
            ["0.0.0.0", "127.0.0.1", "224.0.0.1", "255.255.255.255", "169.254.1.1", "::", "::1", "ff02::1", "fe80::1"];
        for ip in nowhere {
            assert_eq!(WhereIs::parse(&answer(Some((ip, 3))).bytes()), None, "{ip}");
        }
    }
}
