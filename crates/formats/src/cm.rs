//! Messages of connection management: MADs of the communication management class (IBTA vol. 1, 12.6), and the header
//! that RDMA connections over IP put before their private data (annex A11).

use std::net::IpAddr;

use crate::Gid;

/// Bytes of a MAD.
pub const MAD_BYTES: usize = 256;
/// Q_Key of the general services interface (IBTA vol. 1, 3.5.3).
pub const GSI_QKEY: u32 = 0x8001_0000;
/// QPN of the general services interface.
pub const GSI_QPN: u32 = 1;
/// Q_Key of datagram services over IP (annex A11; `RDMA_UDP_QKEY`).
pub const UDP_QKEY: u32 = 0x0123_4567;
/// Bytes of the header that holds addresses and the source port.
pub const IP_HEADER_BYTES: usize = 36;

const HEADER: usize = 24;
/// Base version 1, class 7, class version 2, method Send.
const PREFIX: [u8; 4] = [1, 7, 2, 3];

/// Reasons of a REJ (IBTA vol. 1, table 108).
pub mod reason {
    /// No resources.
    pub const NO_RESOURCES: u16 = 3;
    /// Nobody answered in time.
    pub const TIMEOUT: u16 = 4;
    /// The communication ID is unknown.
    pub const INVALID_COMM_ID: u16 = 6;
    /// Nobody listens to the service ID.
    pub const INVALID_SERVICE: u16 = 8;
    /// A connection is there already.
    pub const STALE_CONNECTION: u16 = 10;
    /// The consumer refuses.
    pub const CONSUMER: u16 = 28;
}

/// Status of a SIDR_REP (IBTA vol. 1, table 118).
pub mod sidr {
    /// The QPN and the Q_Key are valid.
    pub const OK: u8 = 0;
    /// Nobody listens to the service ID.
    pub const UNSUPPORTED: u8 = 1;
    /// The consumer refuses.
    pub const REJECTED: u8 = 2;
}

/// Which message a REJ or an MRA is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[allow(missing_docs)]
pub enum About {
    Req = 0,
    Rep = 1,
    Other = 2,
}

impl About {
    fn from_raw(v: u8) -> Self {
        match v {
            0 => About::Req,
            1 => About::Rep,
            _ => About::Other,
        }
    }
}

/// A request for a connection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Req {
    pub local_id: u32,
    pub service_id: u64,
    pub guid: u64,
    pub qkey: u32,
    pub qpn: u32,
    pub responder_resources: u8,
    pub initiator_depth: u8,
    /// Encoded times: 4.096 us * 2^value.
    pub remote_response_timeout: u8,
    pub local_response_timeout: u8,
    /// 0 RC, 1 UC, 3 extended: see `extended_transport`.
    pub transport: u8,
    /// 1 XRC.
    pub extended_transport: u8,
    pub flow_control: bool,
    pub psn: u32,
    pub retry_count: u8,
    pub pkey: u16,
    /// Code 1 to 5.
    pub mtu: u8,
    pub rnr_retry_count: u8,
    pub max_cm_retries: u8,
    pub srq: bool,
    pub local_lid: u16,
    pub remote_lid: u16,
    pub local_gid: Gid,
    pub remote_gid: Gid,
    /// 20 bits.
    pub flow_label: u32,
    pub packet_rate: u8,
    pub traffic_class: u8,
    pub hop_limit: u8,
    pub sl: u8,
    pub subnet_local: bool,
    pub ack_timeout: u8,
    pub private: Vec<u8>,
}

/// The answer to a [`Req`] that accepts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Rep {
    pub local_id: u32,
    pub remote_id: u32,
    pub qkey: u32,
    pub qpn: u32,
    pub psn: u32,
    pub responder_resources: u8,
    pub initiator_depth: u8,
    pub ack_delay: u8,
    pub flow_control: bool,
    pub rnr_retry_count: u8,
    pub srq: bool,
    pub guid: u64,
    pub private: Vec<u8>,
}

/// A message of connection management.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Message {
    Req(Req),
    /// The receiver of a message needs more time: 4.096 us * 2^`timeout`.
    Mra {
        local_id: u32,
        remote_id: u32,
        about: About,
        timeout: u8,
        private: Vec<u8>,
    },
    Rej {
        local_id: u32,
        remote_id: u32,
        about: About,
        reason: u16,
        /// Additional rejection information.
        info: Vec<u8>,
        private: Vec<u8>,
    },
    Rep(Rep),
    Rtu {
        local_id: u32,
        remote_id: u32,
        private: Vec<u8>,
    },
    Dreq {
        local_id: u32,
        remote_id: u32,
        remote_qpn: u32,
        private: Vec<u8>,
    },
    Drep {
        local_id: u32,
        remote_id: u32,
        private: Vec<u8>,
    },
    SidrReq {
        request_id: u32,
        pkey: u16,
        service_id: u64,
        private: Vec<u8>,
    },
    SidrRep {
        request_id: u32,
        status: u8,
        qpn: u32,
        service_id: u64,
        qkey: u32,
        info: Vec<u8>,
        private: Vec<u8>,
    },
}

/// A MAD.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mad {
    /// Chosen by the requester, repeated in answers.
    pub tid: u64,
    /// The message.
    pub message: Message,
}

/// Offsets and sizes of private data, after the header.
const REQ_PRIVATE: (usize, usize) = (140, 92);
const MRA_PRIVATE: (usize, usize) = (10, 222);
const REJ_PRIVATE: (usize, usize) = (84, 148);
const REP_PRIVATE: (usize, usize) = (36, 196);
const RTU_PRIVATE: (usize, usize) = (8, 224);
const DREQ_PRIVATE: (usize, usize) = (12, 220);
const SIDR_REQ_PRIVATE: (usize, usize) = (16, 216);
const SIDR_REP_PRIVATE: (usize, usize) = (96, 136);

/// Bytes that a program may put into each message, without the IP header in messages that have one.
pub mod user_bytes {
    /// REQ.
    pub const REQ: usize = super::REQ_PRIVATE.1 - super::IP_HEADER_BYTES;
    /// REP.
    pub const REP: usize = super::REP_PRIVATE.1;
    /// REJ.
    pub const REJ: usize = super::REJ_PRIVATE.1;
    /// SIDR_REQ.
    pub const SIDR_REQ: usize = super::SIDR_REQ_PRIVATE.1 - super::IP_HEADER_BYTES;
    /// SIDR_REP.
    pub const SIDR_REP: usize = super::SIDR_REP_PRIVATE.1;
}

/// The bytes after the header. Fields are read and written by their offsets.
struct Body<'a>(&'a [u8]);

impl Body<'_> {
    fn bytes<const N: usize>(&self, at: usize) -> [u8; N] {
        self.0.get(at..at + N).and_then(|b| b.try_into().ok()).unwrap_or([0; N])
    }
    fn u8(&self, at: usize) -> u8 {
        self.0.get(at).copied().unwrap_or(0)
    }
    fn u16(&self, at: usize) -> u16 {
        u16::from_be_bytes(self.bytes(at))
    }
    fn u32(&self, at: usize) -> u32 {
        u32::from_be_bytes(self.bytes(at))
    }
    /// The upper 24 bits.
    fn u24(&self, at: usize) -> u32 {
        self.u32(at) >> 8
    }
    fn u64(&self, at: usize) -> u64 {
        u64::from_be_bytes(self.bytes(at))
    }
    fn gid(&self, at: usize) -> Gid {
        Gid(self.bytes(at))
    }
    fn private(&self, (at, len): (usize, usize)) -> Vec<u8> {
        self.0.get(at..at + len).unwrap_or_default().to_vec()
    }
}

impl Mad {
    /// Reads a MAD; `None` for another class, version, method or attribute, and for one that is too short.
    pub fn parse(bytes: &[u8]) -> Option<Mad> {
        let (head, body) = bytes.get(..MAD_BYTES)?.split_at(HEADER);
        if head[..4] != PREFIX {
            return None;
        }
        let tid = u64::from_be_bytes(head[8..16].try_into().ok()?);
        let b = Body(body);
        let (local_id, remote_id) = (b.u32(0), b.u32(4));
        let message = match u16::from_be_bytes([head[16], head[17]]) {
            0x10 => Message::Req(Self::parse_req(&b)),
            0x11 => Message::Mra {
                local_id,
                remote_id,
                about: About::from_raw(b.u8(8) >> 6),
                timeout: b.u8(9) >> 3,
                private: b.private(MRA_PRIVATE),
            },
            0x12 => {
                let len = usize::from(b.u8(9) >> 1).min(72);
                Message::Rej {
                    local_id,
                    remote_id,
                    about: About::from_raw(b.u8(8) >> 6),
                    reason: b.u16(10),
                    info: b.private((12, len)),
                    private: b.private(REJ_PRIVATE),
                }
            }
            0x13 => Message::Rep(Rep {
                local_id,
                remote_id,
                qkey: b.u32(8),
                qpn: b.u24(12),
                psn: b.u24(20),
                responder_resources: b.u8(24),
                initiator_depth: b.u8(25),
                ack_delay: b.u8(26) >> 3,
                flow_control: b.u8(26) & 1 != 0,
                rnr_retry_count: b.u8(27) >> 5,
                srq: b.u8(27) & 0x10 != 0,
                guid: b.u64(28),
                private: b.private(REP_PRIVATE),
            }),
            0x14 => Message::Rtu { local_id, remote_id, private: b.private(RTU_PRIVATE) },
            0x15 => Message::Dreq { local_id, remote_id, remote_qpn: b.u24(8), private: b.private(DREQ_PRIVATE) },
            0x16 => Message::Drep { local_id, remote_id, private: b.private(RTU_PRIVATE) },
            0x17 => Message::SidrReq {
                request_id: local_id,
                pkey: b.u16(4),
                service_id: b.u64(8),
                private: b.private(SIDR_REQ_PRIVATE),
            },
            0x18 => Message::SidrRep {
                request_id: local_id,
                status: b.u8(4),
                qpn: b.u24(8),
                service_id: b.u64(12),
                qkey: b.u32(20),
                info: b.private((24, usize::from(b.u8(5)).min(72))),
                private: b.private(SIDR_REP_PRIVATE),
            },
            _ => return None,
        };
        Some(Mad { tid, message })
    }

    fn parse_req(b: &Body<'_>) -> Req {
        Req {
            local_id: b.u32(0),
            service_id: b.u64(8),
            guid: b.u64(16),
            qkey: b.u32(28),
            qpn: b.u24(32),
            responder_resources: b.u8(35),
            initiator_depth: b.u8(39),
            remote_response_timeout: b.u8(43) >> 3,
            transport: b.u8(43) >> 1 & 3,
            flow_control: b.u8(43) & 1 != 0,
            psn: b.u24(44),
            local_response_timeout: b.u8(47) >> 3,
            retry_count: b.u8(47) & 7,
            pkey: b.u16(48),
            mtu: b.u8(50) >> 4,
            rnr_retry_count: b.u8(50) & 7,
            max_cm_retries: b.u8(51) >> 4,
            srq: b.u8(51) & 8 != 0,
            extended_transport: b.u8(51) & 7,
            local_lid: b.u16(52),
            remote_lid: b.u16(54),
            local_gid: b.gid(56),
            remote_gid: b.gid(72),
            flow_label: b.u32(88) >> 12,
            packet_rate: b.u8(91) & 0x3f,
            traffic_class: b.u8(92),
            hop_limit: b.u8(93),
            sl: b.u8(94) >> 4,
            subnet_local: b.u8(94) & 8 != 0,
            ack_timeout: b.u8(95) >> 3,
            private: b.private(REQ_PRIVATE),
        }
    }

    /// Its bytes. Private data that is too long is cut off.
    pub fn bytes(&self) -> [u8; MAD_BYTES] {
        let mut all = [0; MAD_BYTES];
        let (head, b) = all.split_at_mut(HEADER);
        head[..4].copy_from_slice(&PREFIX);
        head[8..16].copy_from_slice(&self.tid.to_be_bytes());
        fn put(b: &mut [u8], at: usize, bytes: &[u8]) {
            b[at..at + bytes.len()].copy_from_slice(bytes);
        }
        fn private(b: &mut [u8], (at, room): (usize, usize), bytes: &[u8]) {
            put(b, at, &bytes[..bytes.len().min(room)]);
        }
        /// 24 bits of `v`, and the 8 bits of `low` after them.
        fn high(b: &mut [u8], at: usize, v: u32, low: u8) {
            put(b, at, &(v << 8 | u32::from(low)).to_be_bytes());
        }
        let ids = |b: &mut [u8], local: u32, remote: u32| {
            put(b, 0, &local.to_be_bytes());
            put(b, 4, &remote.to_be_bytes());
        };
        let attribute: u16 = match &self.message {
            Message::Req(r) => {
                put(b, 0, &r.local_id.to_be_bytes());
                put(b, 8, &r.service_id.to_be_bytes());
                put(b, 16, &r.guid.to_be_bytes());
                put(b, 28, &r.qkey.to_be_bytes());
                high(b, 32, r.qpn, r.responder_resources);
                b[39] = r.initiator_depth;
                b[43] = r.remote_response_timeout << 3 | (r.transport & 3) << 1 | u8::from(r.flow_control);
                high(b, 44, r.psn, r.local_response_timeout << 3 | r.retry_count & 7);
                put(b, 48, &r.pkey.to_be_bytes());
                b[50] = r.mtu << 4 | r.rnr_retry_count & 7;
                b[51] = r.max_cm_retries << 4 | u8::from(r.srq) << 3 | r.extended_transport & 7;
                put(b, 52, &r.local_lid.to_be_bytes());
                put(b, 54, &r.remote_lid.to_be_bytes());
                put(b, 56, &r.local_gid.0);
                put(b, 72, &r.remote_gid.0);
                put(b, 88, &(r.flow_label << 12 | u32::from(r.packet_rate & 0x3f)).to_be_bytes());
                (b[92], b[93]) = (r.traffic_class, r.hop_limit);
                b[94] = r.sl << 4 | u8::from(r.subnet_local) << 3;
                b[95] = r.ack_timeout << 3;
                private(b, REQ_PRIVATE, &r.private);
                0x10
            }
            Message::Mra { local_id, remote_id, about, timeout, private: p } => {
                ids(b, *local_id, *remote_id);
                (b[8], b[9]) = ((*about as u8) << 6, timeout << 3);
                private(b, MRA_PRIVATE, p);
                0x11
            }
            Message::Rej { local_id, remote_id, about, reason, info, private: p } => {
                ids(b, *local_id, *remote_id);
                let info = &info[..info.len().min(72)];
                (b[8], b[9]) = ((*about as u8) << 6, (info.len() as u8) << 1);
                put(b, 10, &reason.to_be_bytes());
                put(b, 12, info);
                private(b, REJ_PRIVATE, p);
                0x12
            }
            Message::Rep(r) => {
                ids(b, r.local_id, r.remote_id);
                put(b, 8, &r.qkey.to_be_bytes());
                high(b, 12, r.qpn, 0);
                high(b, 20, r.psn, 0);
                (b[24], b[25]) = (r.responder_resources, r.initiator_depth);
                b[26] = r.ack_delay << 3 | u8::from(r.flow_control);
                b[27] = r.rnr_retry_count << 5 | u8::from(r.srq) << 4;
                put(b, 28, &r.guid.to_be_bytes());
                private(b, REP_PRIVATE, &r.private);
                0x13
            }
            Message::Rtu { local_id, remote_id, private: p } => {
                ids(b, *local_id, *remote_id);
                private(b, RTU_PRIVATE, p);
                0x14
            }
            Message::Dreq { local_id, remote_id, remote_qpn, private: p } => {
                ids(b, *local_id, *remote_id);
                high(b, 8, *remote_qpn, 0);
                private(b, DREQ_PRIVATE, p);
                0x15
            }
            Message::Drep { local_id, remote_id, private: p } => {
                ids(b, *local_id, *remote_id);
                private(b, RTU_PRIVATE, p);
                0x16
            }
            Message::SidrReq { request_id, pkey, service_id, private: p } => {
                put(b, 0, &request_id.to_be_bytes());
                put(b, 4, &pkey.to_be_bytes());
                put(b, 8, &service_id.to_be_bytes());
                private(b, SIDR_REQ_PRIVATE, p);
                0x17
            }
            Message::SidrRep { request_id, status, qpn, service_id, qkey, info, private: p } => {
                put(b, 0, &request_id.to_be_bytes());
                let info = &info[..info.len().min(72)];
                (b[4], b[5]) = (*status, info.len() as u8);
                high(b, 8, *qpn, 0);
                put(b, 12, &service_id.to_be_bytes());
                put(b, 20, &qkey.to_be_bytes());
                put(b, 24, info);
                private(b, SIDR_REP_PRIVATE, p);
                0x18
            }
        };
        head[16..18].copy_from_slice(&attribute.to_be_bytes());
        all
    }
}

/// The addresses of a connection over IP, before a program's private data in a REQ or SIDR_REQ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IpHeader {
    /// Source port.
    pub src_port: u16,
    /// Source address.
    pub src: IpAddr,
    /// Destination address, of the same family.
    pub dst: IpAddr,
}

impl IpHeader {
    /// Reads it and what follows; `None` for another version.
    pub fn parse(private: &[u8]) -> Option<(IpHeader, &[u8])> {
        let (h, rest) = private.split_first_chunk::<IP_HEADER_BYTES>()?;
        if h[0] != 0 {
            return None;
        }
        let b = Body(h);
        let ip = |at: usize| -> Option<IpAddr> {
            match h[1] >> 4 {
                4 => Some(IpAddr::from(b.bytes::<4>(at + 12))),
                6 => Some(IpAddr::from(b.bytes::<16>(at))),
                _ => None,
            }
        };
        Some((IpHeader { src_port: b.u16(2), src: ip(4)?, dst: ip(20)? }, rest))
    }

    /// Its bytes, and `user` after them.
    pub fn before(&self, user: &[u8]) -> Vec<u8> {
        let mut b = vec![0; IP_HEADER_BYTES];
        b[1] = if self.src.is_ipv4() { 0x40 } else { 0x60 };
        b[2..4].copy_from_slice(&self.src_port.to_be_bytes());
        for (at, ip) in [(4, self.src), (20, self.dst)] {
            match ip {
                IpAddr::V4(a) => b[at + 12..at + 16].copy_from_slice(&a.octets()),
                IpAddr::V6(a) => b[at..at + 16].copy_from_slice(&a.octets()),
            }
        }
        b.extend_from_slice(user);
        b
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_but_messages_of_its_class_is_read() {
        let rtu = Mad { tid: 7, message: Message::Rtu { local_id: 1, remote_id: 2, private: vec![9; 224] } };
        let bytes = rtu.bytes();
        assert_eq!(Mad::parse(&bytes), Some(rtu));
        assert_eq!(Mad::parse(&bytes[..255]), None);
        for at in [0, 1, 2, 3, 17] {
            let mut other = bytes;
            other[at] ^= 0x40;
            assert_eq!(Mad::parse(&other), None, "byte {at}");
        }
    }

    #[test]
    fn addresses_come_back() {
        for (src, dst) in [("10.0.0.1", "10.0.0.2"), ("fd00::1", "fd00::2")] {
            let h = IpHeader { src_port: 7000, src: src.parse().unwrap(), dst: dst.parse().unwrap() };
            let bytes = h.before(b"hello");
            assert_eq!(IpHeader::parse(&bytes), Some((h, &b"hello"[..])));
        }
        assert_eq!(IpHeader::parse(&[0; 36]), None);
        assert_eq!(IpHeader::parse(&[0; 35]), None);
    }
}
