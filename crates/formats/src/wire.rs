//! RoCEv2 packets from the base transport header on: headers, the opcode table, the invariant CRC.
//!
//! [`Packet::parse`] is the checked view of bytes from any sender: it never panics, and it returns complete packets
//! only. [`Packet::put`] writes the headers of a packet into a buffer, which its caller has made long enough. IBTA vol.
//! 1, chapter 9; annexes A16 and A17.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// UDP destination port of RoCEv2 (annex A17).
pub const ROCE_PORT: u16 = 4791;
/// Bytes of the invariant CRC at the end of a packet.
pub const ICRC_BYTES: usize = 4;
/// Bytes of a base transport header.
pub const BTH_BYTES: usize = 12;
/// Most bytes that the headers of one packet take.
pub const MAX_HEADER_BYTES: usize = BTH_BYTES + 4 + 28;
/// The P_Key of the default partition, for full members.
pub const DEFAULT_PKEY: u16 = 0xffff;

/// Transport of an opcode: its upper three bits (IBTA vol. 1, table 38).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Transport {
    /// Reliable connection.
    Rc,
    /// Unreliable connection.
    Uc,
    /// Unreliable datagram.
    Ud,
    /// Extended reliable connection (annex A14).
    Xrc,
    /// Congestion notification (annex A17): one opcode.
    Cnp,
}

/// Place of a packet in its message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Part {
    /// First of several.
    First,
    /// Neither first nor last.
    Middle,
    /// Last of several.
    Last,
    /// The whole message.
    Only,
}

impl Part {
    /// True if a message begins here.
    pub fn begins(self) -> bool {
        matches!(self, Part::First | Part::Only)
    }
    /// True if a message ends here.
    pub fn ends(self) -> bool {
        matches!(self, Part::Last | Part::Only)
    }
    /// The part that begins and ends a message or not.
    pub fn of(begins: bool, ends: bool) -> Part {
        match (begins, ends) {
            (true, true) => Part::Only,
            (true, false) => Part::First,
            (false, true) => Part::Last,
            (false, false) => Part::Middle,
        }
    }
}

/// The operation of a packet, without its transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// Part of a SEND.
    Send(Part),
    /// Part of a WRITE.
    Write(Part),
    /// READ request.
    ReadRequest,
    /// Part of a READ response.
    ReadResponse(Part),
    /// Acknowledge.
    Ack,
    /// Response of an atomic.
    AtomicAck,
    /// Compare and swap.
    CmpSwap,
    /// Fetch and add.
    FetchAdd,
    /// Atomic write.
    AtomicWrite,
    /// Flush.
    Flush,
    /// Congestion notification.
    Cnp,
}

/// The additional value that a packet carries to the receiver: immediate data, or a key to invalidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Extra {
    /// Nothing.
    None,
    /// Immediate data.
    Imm,
    /// rkey to invalidate (SEND with invalidate).
    Invalidate,
}

/// A row of the opcode table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Opcode {
    /// The transport.
    pub transport: Transport,
    /// The operation.
    pub op: Op,
    /// Whether the packet also carries immediate data or a key.
    pub extra: Extra,
}

impl std::fmt::Display for Opcode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (name, part) = match self.op {
            Op::Send(p) => ("SEND", Some(p)),
            Op::Write(p) => ("WRITE", Some(p)),
            Op::ReadRequest => ("READ request", None),
            Op::ReadResponse(p) => ("READ response", Some(p)),
            Op::Ack => ("ACK", None),
            Op::AtomicAck => ("atomic ACK", None),
            Op::CmpSwap => ("compare and swap", None),
            Op::FetchAdd => ("fetch and add", None),
            Op::AtomicWrite => ("atomic write", None),
            Op::Flush => ("flush", None),
            Op::Cnp => return f.write_str("CNP"),
        };
        let transport = format!("{:?}", self.transport).to_uppercase();
        write!(f, "{transport} {name}")?;
        if let Some(part) = part {
            write!(f, " {}", format!("{part:?}").to_lowercase())?;
        }
        f.write_str(match self.extra {
            Extra::None => "",
            Extra::Imm => " with immediate",
            Extra::Invalidate => " with invalidate",
        })
    }
}

/// The five low bits of each opcode (IBTA vol. 1, table 38; annex A19 for the last two).
const OPS: [(u8, Op, Extra); 25] = {
    use Extra::{Imm, Invalidate, None};
    use Part::{First, Last, Middle, Only};
    [
        (0x00, Op::Send(First), None),
        (0x01, Op::Send(Middle), None),
        (0x02, Op::Send(Last), None),
        (0x03, Op::Send(Last), Imm),
        (0x04, Op::Send(Only), None),
        (0x05, Op::Send(Only), Imm),
        (0x06, Op::Write(First), None),
        (0x07, Op::Write(Middle), None),
        (0x08, Op::Write(Last), None),
        (0x09, Op::Write(Last), Imm),
        (0x0a, Op::Write(Only), None),
        (0x0b, Op::Write(Only), Imm),
        (0x0c, Op::ReadRequest, None),
        (0x0d, Op::ReadResponse(First), None),
        (0x0e, Op::ReadResponse(Middle), None),
        (0x0f, Op::ReadResponse(Last), None),
        (0x10, Op::ReadResponse(Only), None),
        (0x11, Op::Ack, None),
        (0x12, Op::AtomicAck, None),
        (0x13, Op::CmpSwap, None),
        (0x14, Op::FetchAdd, None),
        (0x16, Op::Send(Last), Invalidate),
        (0x17, Op::Send(Only), Invalidate),
        (0x1c, Op::Flush, None),
        (0x1d, Op::AtomicWrite, None),
    ]
};

const CNP: u8 = 0x81;

impl Opcode {
    /// The row of a raw opcode; `None` if RC, UC and UD have no such opcode.
    pub fn from_raw(raw: u8) -> Option<Opcode> {
        let transport = match raw >> 5 {
            0 => Transport::Rc,
            1 => Transport::Uc,
            3 => Transport::Ud,
            5 => Transport::Xrc,
            _ if raw == CNP => return Some(Opcode { transport: Transport::Cnp, op: Op::Cnp, extra: Extra::None }),
            _ => return None,
        };
        let &(_, op, extra) = OPS.iter().find(|r| r.0 == raw & 0x1f)?;
        let row = Opcode { transport, op, extra };
        row.exists().then_some(row)
    }

    fn exists(self) -> bool {
        match self.transport {
            Transport::Rc | Transport::Xrc => self.op != Op::Cnp,
            // The acknowledgement is not IBTA's: hosts of this virtual layer use it as `docs/spec/tunnel.md` says.
            Transport::Uc => matches!(self.op, Op::Send(_) | Op::Write(_) | Op::Ack) && self.extra != Extra::Invalidate,
            Transport::Ud => matches!(self.op, Op::Send(Part::Only)) && self.extra != Extra::Invalidate,
            Transport::Cnp => self.op == Op::Cnp,
        }
    }

    /// The raw opcode; `None` for a combination that does not exist.
    pub fn raw(self) -> Option<u8> {
        let base = match self.transport {
            Transport::Rc => 0,
            Transport::Uc => 0x20,
            Transport::Ud => 0x60,
            Transport::Xrc => 0xa0,
            Transport::Cnp => return (self.op == Op::Cnp).then_some(CNP),
        };
        let low = OPS.iter().find(|r| (r.1, r.2) == (self.op, self.extra))?.0;
        self.exists().then_some(base | low)
    }

    fn has_reth(self) -> bool {
        matches!(self.op, Op::Write(p) if p.begins())
            || matches!(self.op, Op::ReadRequest | Op::AtomicWrite | Op::Flush)
    }
    fn has_aeth(self) -> bool {
        matches!(self.op, Op::ReadResponse(p) if p != Part::Middle) || matches!(self.op, Op::Ack | Op::AtomicAck)
    }
    fn has_atomic(self) -> bool {
        matches!(self.op, Op::CmpSwap | Op::FetchAdd)
    }
    /// Requests name their SRQ.
    fn has_xrceth(self) -> bool {
        let answer = matches!(self.op, Op::ReadResponse(_) | Op::Ack | Op::AtomicAck);
        self.transport == Transport::Xrc && !answer
    }
    fn has_payload(self) -> bool {
        matches!(self.op, Op::Send(_) | Op::Write(_) | Op::ReadResponse(_) | Op::AtomicWrite)
    }

    /// Bytes of all headers of a packet with this opcode.
    pub fn header_bytes(self) -> usize {
        BTH_BYTES
            + if self.transport == Transport::Ud { 8 } else { 0 }
            + if self.has_xrceth() { 4 } else { 0 }
            + if self.op == Op::Flush { 4 } else { 0 }
            + if self.has_reth() { 16 } else { 0 }
            + if self.has_aeth() { 4 } else { 0 }
            + if self.op == Op::AtomicAck { 8 } else { 0 }
            + if self.has_atomic() { 28 } else { 0 }
            + if self.extra != Extra::None { 4 } else { 0 }
            + if self.op == Op::Cnp { 16 } else { 0 }
    }
}

/// RDMA extended transport header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reth {
    /// Virtual address at the responder.
    pub va: u64,
    /// Its key.
    pub rkey: u32,
    /// Bytes of the whole message.
    pub dma_len: u32,
}

/// ACK extended transport header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Aeth {
    /// See [`syndrome`].
    pub syndrome: u8,
    /// Message sequence number, 24 bits.
    pub msn: u32,
}

/// AETH syndromes (IBTA vol. 1, 9.7.5.2).
pub mod syndrome {
    /// ACK; the low five bits 31 say that the responder gives no credits.
    pub const ACK: u8 = 0x1f;
    /// RNR NAK; the low five bits are the timer code.
    pub const RNR_NAK: u8 = 0x20;
    /// NAK: PSN sequence error.
    pub const NAK_SEQUENCE: u8 = 0x60;
    /// NAK: invalid request.
    pub const NAK_INVALID: u8 = 0x61;
    /// NAK: remote access error.
    pub const NAK_ACCESS: u8 = 0x62;
    /// NAK: remote operational error.
    pub const NAK_OPERATION: u8 = 0x63;
}

/// The flush extended transport header (annex A19).
pub mod flush {
    /// Placement: visible to everybody.
    pub const GLOBAL: u32 = 1;
    /// Placement: survives power failures.
    pub const PERSISTENT: u32 = 2;

    /// Level: a range.
    pub const RANGE: u32 = 0;
    /// Level: the whole memory region.
    pub const REGION: u32 = 1;

    /// The header's word of a placement and a level.
    pub fn word(placement: u8, level: u8) -> u32 {
        u32::from(placement & 0xf) | u32::from(level & 3) << 4
    }
    /// Placement and level of the header's word.
    pub fn parts(word: u32) -> (u32, u32) {
        (word & 0xf, word >> 4 & 3)
    }
    /// True for valid placements and levels (annex A19).
    pub fn is_known(word: u32) -> bool {
        const BOTH: u32 = GLOBAL | PERSISTENT;
        matches!(parts(word), (GLOBAL | PERSISTENT | BOTH, RANGE | REGION))
    }
}

/// Atomic extended transport header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AtomicEth {
    /// Virtual address at the responder.
    pub va: u64,
    /// Its key.
    pub rkey: u32,
    /// The value to swap in, or to add.
    pub swap_add: u64,
    /// The value that must be there.
    pub compare: u64,
}

/// Datagram extended transport header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Deth {
    /// Queue key.
    pub qkey: u32,
    /// QPN of the sender.
    pub src_qp: u32,
}

/// Why bytes are no packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Malformed {
    /// Shorter than its headers, its padding and the ICRC.
    Truncated,
    /// RC, UC and UD have no such opcode.
    Opcode,
    /// A transport header version other than 0.
    Version,
    /// A payload in a packet that must not have one.
    Length,
}

/// A packet: the base transport header, the headers that its opcode asks for, and the payload without padding.
///
/// Headers that the opcode does not have are ignored by [`Packet::put`] and zero after [`Packet::parse`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Packet<'a> {
    pub opcode: Opcode,
    /// Solicited event.
    pub solicited: bool,
    /// The migration bit: set in state MIGRATED.
    pub mig: bool,
    pub pkey: u16,
    pub dest_qp: u32,
    /// Forward and backward congestion notification.
    pub fecn: bool,
    pub becn: bool,
    pub ack_req: bool,
    pub psn: u32,
    pub reth: Reth,
    pub aeth: Aeth,
    pub atomic: AtomicEth,
    /// The value that an atomic found (AtomicAckETH).
    pub original: u64,
    pub deth: Deth,
    /// Number of the SRQ that an XRC request is for.
    pub srqn: u32,
    /// Placement and level of a flush: see [`flush`].
    pub flush: u32,
    /// Immediate data as the application gave it (network order in memory), or the rkey to invalidate.
    pub extra: u32,
    pub payload: &'a [u8],
}

impl<'a> Packet<'a> {
    /// A packet with zeroed headers but the default P_Key and the migration bit.
    pub fn new(opcode: Opcode, dest_qp: u32, psn: u32) -> Self {
        Packet {
            opcode,
            solicited: false,
            mig: true,
            pkey: DEFAULT_PKEY,
            dest_qp,
            fecn: false,
            becn: false,
            ack_req: false,
            psn,
            reth: Reth::default(),
            aeth: Aeth::default(),
            atomic: AtomicEth::default(),
            original: 0,
            deth: Deth::default(),
            srqn: 0,
            flush: 0,
            extra: 0,
            payload: &[],
        }
    }

    /// The packet without its payload.
    pub fn head(&self) -> Packet<'static> {
        Packet {
            opcode: self.opcode,
            solicited: self.solicited,
            mig: self.mig,
            pkey: self.pkey,
            dest_qp: self.dest_qp,
            fecn: self.fecn,
            becn: self.becn,
            ack_req: self.ack_req,
            psn: self.psn,
            reth: self.reth,
            aeth: self.aeth,
            atomic: self.atomic,
            original: self.original,
            deth: self.deth,
            srqn: self.srqn,
            flush: self.flush,
            extra: self.extra,
            payload: &[],
        }
    }

    /// Reads a packet without its ICRC.
    ///
    /// # Errors
    /// Why the bytes are no packet. Keys, sequence and lengths of a message are not checked here.
    pub fn parse(bytes: &'a [u8]) -> Result<Packet<'a>, Malformed> {
        let mut r = Reader(bytes);
        let raw = r.u8()?;
        let flags = r.u8()?;
        let pkey = r.u16()?;
        let qp = r.u32()?;
        let psn = r.u32()?;
        let opcode = Opcode::from_raw(raw).ok_or(Malformed::Opcode)?;
        if flags & 0xf != 0 {
            return Err(Malformed::Version);
        }
        let mut p = Packet::new(opcode, qp & 0xff_ffff, psn & 0xff_ffff);
        p.solicited = flags & 0x80 != 0;
        p.mig = flags & 0x40 != 0;
        p.pkey = pkey;
        (p.fecn, p.becn) = (qp >> 31 != 0, qp >> 30 & 1 != 0);
        p.ack_req = psn >> 31 != 0;
        if opcode.transport == Transport::Ud {
            p.deth = Deth { qkey: r.u32()?, src_qp: r.u32()? & 0xff_ffff };
        }
        if opcode.has_xrceth() {
            p.srqn = r.u32()? & 0xff_ffff;
        }
        if opcode.op == Op::Flush {
            p.flush = r.u32()?;
        }
        if opcode.has_reth() {
            p.reth = Reth { va: r.u64()?, rkey: r.u32()?, dma_len: r.u32()? };
        }
        if opcode.has_atomic() {
            p.atomic = AtomicEth { va: r.u64()?, rkey: r.u32()?, swap_add: r.u64()?, compare: r.u64()? };
        }
        if opcode.has_aeth() {
            let v = r.u32()?;
            p.aeth = Aeth { syndrome: (v >> 24) as u8, msn: v & 0xff_ffff };
        }
        if opcode.op == Op::AtomicAck {
            p.original = r.u64()?;
        }
        match opcode.extra {
            Extra::None => {}
            Extra::Imm => p.extra = r.u32()?.to_be(),
            Extra::Invalidate => p.extra = r.u32()?,
        }
        if opcode.op == Op::Cnp {
            r.take::<16>()?;
        }
        let pad = usize::from(flags >> 4 & 3);
        if opcode.has_payload() {
            let n = r.0.len().checked_sub(pad).ok_or(Malformed::Truncated)?;
            p.payload = &r.0[..n];
        } else if !r.0.is_empty() {
            return Err(Malformed::Length);
        }
        Ok(p)
    }

    /// Writes the headers, and returns their length. `payload_len` decides the pad count. The payload and the padding
    /// come after the headers ([`padding`]).
    ///
    /// # Panics
    /// If the opcode does not exist or `out` is shorter than [`Opcode::header_bytes`].
    pub fn put(&self, out: &mut [u8], payload_len: usize) -> usize {
        let raw = self.opcode.raw().expect("an opcode of the table");
        let mut w = Writer { out, at: 0 };
        w.put(&[raw]);
        let bit = |b: bool, n: u32| u32::from(b) << n;
        w.put(&[(bit(self.solicited, 7) | bit(self.mig, 6)) as u8 | (padding(payload_len) as u8) << 4]);
        w.put(&self.pkey.to_be_bytes());
        w.put(&(bit(self.fecn, 31) | bit(self.becn, 30) | self.dest_qp & 0xff_ffff).to_be_bytes());
        w.put(&(bit(self.ack_req, 31) | self.psn & 0xff_ffff).to_be_bytes());
        if self.opcode.transport == Transport::Ud {
            w.put(&self.deth.qkey.to_be_bytes());
            w.put(&(self.deth.src_qp & 0xff_ffff).to_be_bytes());
        }
        if self.opcode.has_xrceth() {
            w.put(&(self.srqn & 0xff_ffff).to_be_bytes());
        }
        if self.opcode.op == Op::Flush {
            w.put(&self.flush.to_be_bytes());
        }
        if self.opcode.has_reth() {
            w.put(&self.reth.va.to_be_bytes());
            w.put(&self.reth.rkey.to_be_bytes());
            w.put(&self.reth.dma_len.to_be_bytes());
        }
        if self.opcode.has_atomic() {
            w.put(&self.atomic.va.to_be_bytes());
            w.put(&self.atomic.rkey.to_be_bytes());
            w.put(&self.atomic.swap_add.to_be_bytes());
            w.put(&self.atomic.compare.to_be_bytes());
        }
        if self.opcode.has_aeth() {
            w.put(&(u32::from(self.aeth.syndrome) << 24 | self.aeth.msn & 0xff_ffff).to_be_bytes());
        }
        if self.opcode.op == Op::AtomicAck {
            w.put(&self.original.to_be_bytes());
        }
        match self.opcode.extra {
            Extra::None => {}
            Extra::Imm => w.put(&self.extra.to_ne_bytes()),
            Extra::Invalidate => w.put(&self.extra.to_be_bytes()),
        }
        if self.opcode.op == Op::Cnp {
            w.put(&[0; 16]);
        }
        w.at
    }
}

/// Bytes that fill a payload up to a multiple of four.
pub fn padding(payload_len: usize) -> usize {
    payload_len.wrapping_neg() & 3
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (head, tail) = self.0.split_first_chunk::<N>().ok_or(Malformed::Truncated)?;
        self.0 = tail;
        Ok(*head)
    }
    fn u8(&mut self) -> Result<u8, Malformed> {
        self.take().map(u8::from_be_bytes)
    }
    fn u16(&mut self) -> Result<u16, Malformed> {
        self.take().map(u16::from_be_bytes)
    }
    fn u32(&mut self) -> Result<u32, Malformed> {
        self.take().map(u32::from_be_bytes)
    }
    fn u64(&mut self) -> Result<u64, Malformed> {
        self.take().map(u64::from_be_bytes)
    }
}

struct Writer<'a> {
    out: &'a mut [u8],
    at: usize,
}

impl Writer<'_> {
    fn put(&mut self, bytes: &[u8]) {
        self.out[self.at..self.at + bytes.len()].copy_from_slice(bytes);
        self.at += bytes.len();
    }
}

/// The fields of the network and UDP headers that the ICRC covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Envelope {
    /// Sender; of the same family as `dst`.
    pub src: IpAddr,
    /// Receiver.
    pub dst: IpAddr,
    /// UDP source port.
    pub src_port: u16,
    /// IPv4 Identification; 0 for IPv6.
    pub ip_id: u16,
}

/// The ICRC of a packet in UDP/IP with DF set. `packet` has all bytes from the BTH up to the ICRC. The result goes on
/// the wire in little-endian order. Annex A17, 17.9.2: the fields that routers change count as ones.
pub fn icrc(e: &Envelope, packet: &[u8]) -> u32 {
    // 8 bytes of ones stand for the local route header; then IP (40 at most), UDP and BTH.
    let mut head = [0xff_u8; 8 + 40 + 8 + BTH_BYTES];
    let udp_len = (8 + packet.len() + ICRC_BYTES) as u16;
    let ip_len = match (e.src, e.dst) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => v4_header(&mut head[8..28], src, dst, e.ip_id, 20 + udp_len),
        (src, dst) => v6_header(&mut head[8..48], v6(src), v6(dst), udp_len),
    };
    let udp = 8 + ip_len;
    head[udp..udp + 2].copy_from_slice(&e.src_port.to_be_bytes());
    head[udp + 2..udp + 4].copy_from_slice(&ROCE_PORT.to_be_bytes());
    head[udp + 4..udp + 6].copy_from_slice(&udp_len.to_be_bytes());
    head[udp + 6..udp + 8].fill(0xff);
    let n = packet.len().min(BTH_BYTES);
    head[udp + 8..udp + 8 + n].copy_from_slice(&packet[..n]);
    // FECN, BECN and the reserved bits beside the destination QP.
    head[udp + 12] = 0xff;
    let mut h = crc32fast::Hasher::new();
    h.update(&head[..udp + 8 + n]);
    h.update(&packet[n..]);
    h.finalize()
}

fn v6(a: IpAddr) -> Ipv6Addr {
    match a {
        IpAddr::V4(a) => a.to_ipv6_mapped(),
        IpAddr::V6(a) => a,
    }
}

fn v4_header(h: &mut [u8], src: Ipv4Addr, dst: Ipv4Addr, id: u16, total: u16) -> usize {
    const DF: [u8; 2] = [0x40, 0];
    h[0] = 0x45;
    h[2..4].copy_from_slice(&total.to_be_bytes());
    h[4..6].copy_from_slice(&id.to_be_bytes());
    h[6..8].copy_from_slice(&DF);
    h[9] = 17;
    h[12..16].copy_from_slice(&src.octets());
    h[16..20].copy_from_slice(&dst.octets());
    20
}

fn v6_header(h: &mut [u8], src: Ipv6Addr, dst: Ipv6Addr, payload: u16) -> usize {
    // Traffic class and flow label count as ones, and so does the hop limit.
    h[0] = 0x6f;
    h[4..6].copy_from_slice(&payload.to_be_bytes());
    h[6] = 17;
    h[8..24].copy_from_slice(&src.octets());
    h[24..40].copy_from_slice(&dst.octets());
    40
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_opcode_is_its_own_inverse() {
        let known: Vec<u8> = (0..=255).filter(|&r| Opcode::from_raw(r).is_some()).collect();
        for &r in &known {
            assert_eq!(Opcode::from_raw(r).unwrap().raw(), Some(r));
        }
        // RC and XRC 25, UC 12 and the acknowledgement between our own hosts, UD 2, CNP.
        assert_eq!(known.len(), 2 * 25 + 13 + 2 + 1);
    }

    #[test]
    fn what_is_put_is_parsed() {
        for raw in 0..=255 {
            let Some(opcode) = Opcode::from_raw(raw) else { continue };
            let mut p = Packet::new(opcode, 0x12_3456, 0xab_cdef);
            (p.solicited, p.ack_req, p.fecn) = (true, true, true);
            if opcode.has_reth() {
                p.reth = Reth { va: 0x1122_3344_5566_7788, rkey: 7, dma_len: 9 };
            }
            if opcode.has_atomic() {
                p.atomic = AtomicEth { va: 8, rkey: 1, swap_add: 2, compare: 3 };
            }
            if opcode.has_aeth() {
                p.aeth = Aeth { syndrome: 0x61, msn: 77 };
            }
            if opcode.op == Op::AtomicAck {
                p.original = 5;
            }
            if opcode.transport == Transport::Ud {
                p.deth = Deth { qkey: 0x1111_1111, src_qp: 3 };
            }
            if opcode.extra != Extra::None {
                p.extra = 0xdead_beef;
            }
            let data: &[u8] = if opcode.has_payload() { b"hello" } else { b"" };
            let mut bytes = vec![0; MAX_HEADER_BYTES];
            let n = p.put(&mut bytes, data.len());
            assert_eq!(n, opcode.header_bytes());
            bytes.truncate(n);
            bytes.extend_from_slice(data);
            bytes.resize(bytes.len() + padding(data.len()), 0);
            p.payload = data;
            assert_eq!(Packet::parse(&bytes), Ok(p));
            for short in 0..n {
                assert!(Packet::parse(&bytes[..short]).is_err(), "{raw:#x} cut to {short}");
            }
        }
    }
}
