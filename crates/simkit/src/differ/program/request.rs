//! Requests and receives: mostly right, and wrong in many ways.

use unirdma_formats::{QpType, WrOpcode, access, send_flags};

use super::{
    Act, At, GONE, Key, Kind, OTHER_PD, OWN, PART, Piece, Program, Queue, READABLE, Request, SMALL, SOURCE, To, WHOLE,
    WINDOWS, WRITABLE, iova,
};
use crate::ALL;

impl Program {
    /// Bytes that a receive for this request needs.
    pub(super) fn room_for(&self, kind: Kind, r: &Request) -> u64 {
        let header = if kind.typ == QpType::Ud { 40 } else { 0 };
        let pieces = r.pieces.iter().map(|p| u64::from(p.len)).sum();
        header + r.inline.map_or(pieces, u64::from)
    }

    /// A receive of program `end` for a message of this length.
    pub(super) fn receive(&mut self, end: usize, queue: Queue, len: u64, spoils: bool) -> Option<Act> {
        let len = match self.below(8) {
            0 => len + self.below(500),
            1 if spoils => self.below(len + 1),
            _ => len,
        };
        let mut pieces = Vec::new();
        let mut left = len;
        for i in 0..1 + self.below(3) {
            let n = if i == 2 { left } else { left.min(1 + self.below(len.max(1))) };
            pieces.push(self.place_of_receive(end, n)?);
            left -= n;
        }
        if left > 0 {
            pieces.push(self.place_of_receive(end, left)?);
        }
        let mut num_sge = None;
        if spoils && self.once_in(4) {
            let i = self.below(pieces.len() as u64) as usize;
            match self.below(7) {
                0 => num_sge = Some(self.pick(&[5, 33, 1000])),
                1 => pieces.truncate(self.below(2) as usize),
                // Beyond the longest message, a receive may name anything.
                2 => pieces.last_mut()?.len += 100_000,
                3 if pieces.len() < 4 => pieces.push(Piece { region: 0, off: 2 * PART, len: 77, key: Key::Nobodys }),
                _ => self.spoil(end, &mut pieces[i]),
            }
        }
        let wr_id = self.wr_id();
        self.receives.insert(wr_id, (queue, pieces.clone()));
        Some(Act::Recv { queue, wr_id, pieces, num_sge })
    }

    /// Memory for a part of a receive that no other receive uses.
    fn place_of_receive(&mut self, end: usize, len: u64) -> Option<Piece> {
        if self.cursor[end] + len > PART {
            self.cursor[end] = 0;
        }
        let off = 2 * PART + self.cursor[end];
        let meets = |p: &Piece| p.region == 0 && p.off < off + len && off < p.off + u64::from(p.len);
        if self.receives.values().any(|(q, pieces)| q.end() == end && pieces.iter().any(meets)) {
            return None;
        }
        self.cursor[end] += len;
        Some(Piece { region: 0, off, len: len as u32, key: Key::Region(end, 0) })
    }

    /// Makes an SGE of program `end` wrong.
    fn spoil(&mut self, end: usize, p: &mut Piece) {
        match self.below(6) {
            0 => p.key = Key::Nobodys,
            1 => p.key = Key::Nearly(end),
            2 => p.key = Key::Region(1 - end, 0),
            3 => p.key = Key::Region(end, GONE),
            4 => (p.region, p.off, p.key) = (OTHER_PD, 0, Key::Region(end, OTHER_PD)),
            // Half of it lies beyond the end of the region.
            _ => {
                let off = SMALL - u64::from(p.len / 2).min(SMALL / 2);
                (p.region, p.off, p.key) = (OWN, off, Key::Region(end, OWN));
            }
        }
    }

    /// Memory of a program that messages go to in this phase and that nothing else uses.
    fn target(&mut self, end: usize, region: usize, len: u64) -> Option<u64> {
        let (base, size) = if region == 0 { ((self.phase % 2) * PART, PART) } else { (0, SMALL / 2) };
        let given = &mut self.given[end][region];
        let at = given.next_multiple_of(8);
        (at + len <= size).then(|| {
            *given = at + len;
            base + at
        })
    }

    /// Memory of a program that messages come from in this phase.
    fn source(&mut self, end: usize, len: u64) -> Piece {
        let region = if len <= SMALL && self.once_in(4) { SOURCE } else { 0 };
        let (base, size) = if region == 0 { ((1 - self.phase % 2) * PART, PART) } else { (0, SMALL) };
        let off = base + self.below(size - len.min(size) + 1);
        Piece { region, off, len: len as u32, key: Key::Region(end, region) }
    }

    fn length(&mut self, typ: QpType) -> u64 {
        match self.below(12) {
            _ if typ == QpType::Ud => self.below(1200),
            0 => 0,
            1 => self.pick(&[256, 512, 1024, 2048, 4096, 8192]),
            2 => 8192 + self.below(30_000),
            3 => self.below(8),
            _ => self.below(3000),
        }
    }

    fn opcode(&mut self, typ: QpType) -> WrOpcode {
        use WrOpcode::*;
        let connected = [Send, SendImm, Write, WriteImm];
        let reliable = [
            Send,
            SendImm,
            Write,
            WriteImm,
            Read,
            Read,
            CmpSwap,
            FetchAdd,
            AtomicWrite,
            Flush,
            SendInv,
            BindMw,
            LocalInv,
        ];
        match typ {
            QpType::Ud => self.pick(&connected[..2]),
            QpType::Uc => self.pick(&connected),
            _ => self.pick(&reliable),
        }
    }

    /// A request of QP `from`.
    pub(super) fn request(&mut self, from: At, spoils: bool) -> Request {
        let (end, c) = from;
        let typ = self.kinds[c].typ;
        let peer = 1 - end;
        let mut op = self.opcode(typ);
        // Invalidating a window that is not bound fails, so that is done rarely.
        let second = WINDOWS * c + 1;
        let holder = if op == WrOpcode::LocalInv { end } else { peer };
        let vain = matches!(op, WrOpcode::LocalInv | WrOpcode::SendInv) && !self.bound.contains(&(holder, second));
        if vain && !self.once_in(6) {
            op = WrOpcode::BindMw;
        }
        let eight = op.is_atomic() || op == WrOpcode::AtomicWrite;
        let mut len = if eight { 8 } else { self.length(typ) };
        if op == WrOpcode::SendInv {
            len = len.min(256);
        }
        let mut r = Request {
            op,
            raw_op: None,
            flags: [send_flags::SIGNALED, 0][usize::from(self.once_in(5))],
            pieces: Vec::new(),
            num_sge: None,
            inline: None,
            rkey: Key::Region(peer, 0),
            addr: iova(0),
            other: Key::Nobodys,
            imm: self.below(1 << 32) as u32,
            operands: (0, 0),
            to: To::Peer,
        };
        for flag in [send_flags::SOLICITED, send_flags::FENCE] {
            r.flags |= if self.once_in(4) { flag } else { 0 };
        }
        // Without the fence an earlier READ may be answered after its grant was invalidated.
        r.flags |= if op == WrOpcode::SendInv { send_flags::FENCE } else { 0 };
        self.local_part(end, &mut r, len);
        self.remote_part(peer, c, &mut r, len);
        if spoils && self.once_in(4) {
            self.spoil_request(from, &mut r);
        }
        r
    }

    /// Adds the local part of a request: its SGEs, or data in the WQE.
    fn local_part(&mut self, end: usize, r: &mut Request, len: u64) {
        if r.op.is_local() || r.op == WrOpcode::Flush {
            return;
        }
        if r.op.stores_locally() {
            let region = if len <= 1000 && self.once_in(3) { OWN } else { 0 };
            if let Some(off) = self.target(end, region, len) {
                let first = if r.op == WrOpcode::Read { self.below(len + 1) } else { len };
                let piece = |off, len: u64| Piece { region, off, len: len as u32, key: Key::Region(end, region) };
                r.pieces = vec![piece(off, first)];
                if first < len {
                    r.pieces.push(piece(off + first, len - first));
                }
                return;
            }
            // There is no memory left for the result.
            r.op = WrOpcode::Write;
        }
        if len <= 256 && self.once_in(4) {
            (r.inline, r.flags) = (Some(len as u16), r.flags | send_flags::INLINE);
            return;
        }
        let mut left = len;
        for i in 0..1 + self.below(3) {
            let n = if i == 2 { left } else { self.below(left + 1) };
            r.pieces.push(self.source(end, n));
            left -= n;
        }
        if left > 0 {
            r.pieces.push(self.source(end, left));
        }
    }

    /// Adds the remote part of a request: the address and the keys that it names.
    fn remote_part(&mut self, peer: usize, c: usize, r: &mut Request, len: u64) {
        let window = WINDOWS * c + self.below(WINDOWS as u64) as usize;
        let windowed = self.once_in(if self.bound.contains(&(peer, window)) { 2 } else { 40 });
        let second = WINDOWS * c + usize::from(!self.once_in(10));
        match r.op {
            WrOpcode::Read => {
                let region = if len <= SMALL && self.once_in(4) { READABLE } else { 0 };
                let base = if region == 0 { (1 - self.phase % 2) * PART } else { 0 };
                let size = if region == 0 { PART } else { SMALL };
                r.addr = iova(region) + base + self.below(size - len.min(size) + 1);
                r.rkey = Key::Region(peer, region);
            }
            WrOpcode::Write | WrOpcode::WriteImm | WrOpcode::AtomicWrite | WrOpcode::CmpSwap | WrOpcode::FetchAdd => {
                let region = if len <= 1000 && !r.op.is_atomic() && self.once_in(4) { WRITABLE } else { 0 };
                match self.target(peer, region, len) {
                    Some(off) => (r.rkey, r.addr) = (Key::Region(peer, region), iova(region) + off),
                    None => (r.op, r.flags) = (WrOpcode::Send, r.flags),
                }
                r.operands = (self.below(3), self.below(1000));
            }
            WrOpcode::Flush => {
                r.operands.0 = self.below(5000);
                // Global visibility of the range, or of the region.
                r.imm = self.pick(&[1, 1 | 1 << 4]);
            }
            WrOpcode::SendInv => r.other = Key::Window(peer, second),
            WrOpcode::LocalInv => r.other = Key::Window(1 - peer, second),
            WrOpcode::BindMw => {
                let own = 1 - peer;
                r.rkey = Key::Window(own, window);
                r.other = Key::Region(own, 0);
                (r.addr, r.operands) = (iova(0), WHOLE);
                if self.once_in(4) {
                    let flags = self.pick(&[ALL | access::ZERO_BASED, access::REMOTE_READ, access::REMOTE_WRITE, ALL]);
                    (r.addr, r.operands) = (iova(0) + self.below(2 * PART), (self.below(PART), u64::from(flags)));
                }
            }
            _ => {}
        }
        if windowed && !r.op.is_local() && r.rkey == Key::Region(peer, 0) {
            r.rkey = Key::Window(peer, window);
        }
    }

    /// Makes a request wrong.
    fn spoil_request(&mut self, (end, c): At, r: &mut Request) {
        let peer = 1 - end;
        let typ = self.kinds[c].typ;
        let i = self.below(r.pieces.len().max(1) as u64) as usize;
        let odd = self.pick(&[4, 16]);
        match self.below(12) {
            0..3 if !r.pieces.is_empty() => {
                let mut piece = r.pieces[i];
                self.spoil(end, &mut piece);
                r.pieces[i] = piece;
            }
            0..3 => r.rkey = Key::Nobodys,
            3 => r.raw_op = Some(self.pick(&[11, 77, 255])),
            4 => r.flags |= 1 << 20,
            5 => r.num_sge = Some(self.pick(&[5, 40, 255])),
            6 if typ == QpType::Ud => {
                let to = [To::Nobody, To::WrongKey, To::OwnKey, To::OtherHandle, To::NoHandle, To::Itself];
                r.to = self.pick(&to);
            }
            6 if r.op.is_atomic() || r.op == WrOpcode::AtomicWrite => r.addr += 1 + self.below(7),
            6 => r.addr = r.addr.wrapping_add(self.pick(&[3 * PART, 1 << 40, u64::MAX >> 1])),
            7 => r.rkey = self.pick(&[Key::Nearly(peer), Key::Nobodys, Key::Region(end, 0), Key::Region(peer, GONE)]),
            8 => {
                let region = self.pick(&[OWN, SOURCE, READABLE, OTHER_PD]);
                (r.rkey, r.addr) = (Key::Region(peer, region), iova(region));
            }
            9 => r.other = self.pick(&[Key::Nobodys, Key::Region(peer, 0), Key::Region(end, 0), Key::Region(end, OWN)]),
            10 if r.op.is_atomic() || r.op == WrOpcode::AtomicWrite => r.pieces.iter_mut().for_each(|p| p.len = odd),
            10 if !r.pieces.is_empty() => r.pieces[i].len = self.pick(&[0x8000_0001, 4 * PART as u32]),
            10 => (r.inline, r.flags) = (Some(self.pick(&[257, 2000])), r.flags | send_flags::INLINE),
            // Too long for any datagram, and for most receives.
            _ if r.op.is_send() && r.op != WrOpcode::SendInv => r.pieces = vec![self.source(end, 6000)],
            _ => r.imm = 7,
        }
    }
}
