//! The memory at the two sides of a message: the ranges that a work request names, and the checks that it may use them.

use std::cell::Cell;

use unirdma_abi as abi;
use unirdma_formats::{Lkey, Qpn, Rkey, WrOpcode, access, send_flags};
use unirdma_mem::{Fault, Loc, Place, Span, copy_mapped, fetch, holes, transfer};

use crate::objects::{
    Backing, BounceMemory, Mr, MrTable, Objects, Qp, Reach, Recv, SendOp, Session, SessionId, SessionKind, VrnicId,
};
use crate::slab::Slab;

/// Why bytes of a message were not moved at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NeedsJob {
    /// The memory is gone, or moves.
    Fault(Fault),
    /// Only a job can reach the bytes. They lie in the private memory of a process, which takes system calls and may be
    /// slow, or in pages that may be missing.
    Job,
}

impl From<Fault> for NeedsJob {
    fn from(fault: Fault) -> Self {
        NeedsJob::Fault(fault)
    }
}

/// One side of a message.
#[derive(Clone, Copy)]
pub(crate) enum Side<'a> {
    /// Gather or scatter list.
    List { reach: Reach, sges: &'a [abi::Sge] },
    /// One range of the peer's memory.
    Remote { reach: Reach, qpn: Qpn, key: Rkey, addr: u64 },
    /// Data in the WQE.
    Inline(&'a [u8]),
    /// Gather list of bus addresses of a session.
    Bus { session: SessionId, sges: &'a [abi::Sge] },
    /// A record of the session's stage.
    BounceMemory { session: SessionId, data: u64, room: u64 },
}

/// Most pieces that one slice of a message moves. To look up this many pieces takes about as long as a turn.
pub(crate) const SLICE_PIECES: usize = 8;
/// Most pieces that a job has at each end.
pub(crate) const MAX_PIECES: usize = 64;

/// Returned by [`Tables::grant`] for several grants. The upper 24 bits of a key never have this value.
pub(crate) const SEVERAL_GRANTS: u32 = u32::MAX;

/// Tables that keys and addresses are looked up in.
pub(crate) struct Tables<'a> {
    pub mrs: &'a MrTable,
    pub sessions: &'a Slab<Session, SessionKind>,
    /// The vRNIC in whose memory a hole was touched last.
    pub touched: &'a Cell<Option<VrnicId>>,
    /// Number of pieces that messages were cut into, not counting the first piece of each message.
    pub pieces: &'a Cell<u64>,
}

impl Objects {
    /// The tables that keys and addresses are looked up in.
    pub fn memory(&self) -> Tables<'_> {
        Tables { mrs: &self.mrs, sessions: &self.sessions, touched: &self.touched, pieces: &self.pieces }
    }
}

impl<'a> Tables<'a> {
    /// A place of `len` bytes in the stage of a session.
    fn stage(&self, session: SessionId, off: u64, len: u64) -> Option<Place<'a>> {
        let s = self.sessions.get(session.0)?;
        Some(s.memory_state.place(Place::new(Loc::Mapped(s.stage.as_ref().map(BounceMemory::span)?, off), len)))
    }

    /// The place of a range of an MR, or of its first bytes if the range lies in several places.
    #[inline]
    fn place(&self, mr: &'a Mr, reach: Reach, addr: u64, len: u64) -> Option<Place<'a>> {
        if !mr.grants(reach.pd, reach.access, addr, len) {
            return None;
        }
        let owner = self.sessions.get(mr.owner.0)?;
        if owner.dying != 0 && !owner.has(mr) {
            return None;
        }
        let memory = || self.sessions.get(reach.session.0).and_then(|s| s.memory.as_ref());
        let place = mr.locate(addr, len, memory, || owner.bell.as_ref(), || owner.away != 0)?;
        Some(owner.memory_state.place(place))
    }

    /// False if an MR or a window is dead and only not freed yet.
    pub fn lives(&self, m: &Mr) -> bool {
        self.sessions.get(m.owner.0).is_some_and(|s| s.dying == 0 || s.has(m))
    }

    /// Like [`Tables::place`], for the usual case: the range lies in one window of mapped memory that may be touched at
    /// once.
    #[inline(always)]
    fn window(&self, mr: &'a Mr, reach: Reach, addr: u64, len: u64) -> Option<(&'a Span, u64)> {
        let owner = self.sessions.get(mr.owner.0)?;
        match &mr.backing {
            Backing::Mapped(span)
                if owner.away | owner.dying == 0
                    && !owner.memory_state.is_sparse()
                    && mr.grants(reach.pd, reach.access, addr, len) =>
            {
                Some((span, addr - mr.iova))
            }
            _ => None,
        }
    }

    /// Like [`Tables::place`]. Counts the bytes as served by the MR.
    #[inline]
    fn access(&self, mr: &'a Mr, reach: Reach, addr: u64, len: u64) -> Option<Place<'a>> {
        self.place(mr, reach, addr, len).inspect(|place| mr.served.count(place.len()))
    }

    fn by_bus(&self, session: SessionId, addr: u64, len: u64) -> Option<Place<'a>> {
        let s = self.sessions.get(session.0)?;
        let (span, off) = s.memory.as_ref()?.resolve(addr, len)?;
        Some(s.memory_state.place(Place::new(Loc::Mapped(span, off), len)))
    }

    /// If work requests may revoke the grant that this side uses, returns the upper 24 bits of its key: the grant is a
    /// window, or an MR that work requests register. Returns [`SEVERAL_GRANTS`] for a list, which may use several such
    /// MRs.
    pub fn grant(&self, side: Side<'_>) -> Option<u32> {
        match side {
            Side::Remote { key, .. } => {
                self.mrs.remote(key).filter(|m| m.window.is_some() || m.page_list().is_some()).map(|_| key.0 >> 8)
            }
            Side::List { sges, .. } => {
                let mut mrs = sges.iter().filter_map(|s| self.mrs.local(Lkey(s.lkey)));
                mrs.any(|m| m.page_list().is_some()).then_some(SEVERAL_GRANTS)
            }
            _ => None,
        }
    }

    fn allows_sge(&self, s: &abi::Sge, reach: Reach) -> bool {
        let (addr, len) = (s.addr, s.length.into());
        let Some(mr) = self.mrs.local(Lkey(s.lkey)) else { return false };
        self.window(mr, reach, addr, len).is_some() || self.place(mr, reach, addr, len).is_some()
    }

    /// True if every byte of the side may be used.
    pub fn allows(&self, side: Side<'_>, len: u64) -> bool {
        match side {
            // A length of zero reaches no memory and needs no key (IBTA vol. 1, 10.7.2.2, 9.7.4.1.4).
            Side::List { reach, sges } => sges.iter().all(|s| s.length == 0 || self.allows_sge(s, reach)),
            Side::Remote { reach, qpn, key, addr } => {
                let place = || self.place(self.mrs.of_peer(key, qpn)?, reach, addr, len);
                len == 0 || place().is_some()
            }
            Side::Inline(b) => len <= b.len() as u64,
            Side::Bus { session, sges } => {
                sges.iter().all(|s| s.length == 0 || self.by_bus(session, s.addr, s.length.into()).is_some())
            }
            Side::BounceMemory { room, .. } => len <= room,
        }
    }

    /// True if the first `len` bytes of the side may be used.
    pub fn allows_first(&self, side: Side<'_>, len: u64) -> bool {
        let each = |sges: &[abi::Sge], allows: &dyn Fn(&abi::Sge) -> bool| {
            let mut left = len;
            for s in sges {
                let first = abi::Sge { length: left.min(s.length.into()) as u32, ..*s };
                if first.length > 0 && !allows(&first) {
                    return false;
                }
                left -= u64::from(first.length);
            }
            left == 0
        };
        match side {
            Side::List { reach, sges } => each(sges, &|s| self.allows_sge(s, reach)),
            Side::Bus { session, sges } => each(sges, &|s| self.by_bus(session, s.addr, s.length.into()).is_some()),
            _ => self.allows(side, len),
        }
    }

    /// The place of byte `off` of a side, of up to `max` bytes.
    #[inline]
    pub fn at<'b>(&self, side: Side<'b>, off: u64, max: u64) -> Option<Place<'b>>
    where
        'a: 'b,
    {
        match side {
            Side::Inline(b) => Some(Place::bytes(b.get(off as usize..)?).up_to(max)),
            Side::Remote { reach, qpn, key, addr } => {
                self.access(self.mrs.of_peer(key, qpn)?, reach, addr.checked_add(off)?, max)
            }
            Side::List { reach, sges } => {
                let (s, skip) = find(sges, off)?;
                let n = max.min(u64::from(s.length) - skip);
                // `local` finds no memory windows: a window cannot be local memory.
                self.access(self.mrs.local(Lkey(s.lkey))?, reach, s.addr.checked_add(skip)?, n)
            }
            Side::Bus { session, sges } => {
                let (s, skip) = find(sges, off)?;
                let n = max.min(u64::from(s.length) - skip);
                self.by_bus(session, s.addr.checked_add(skip)?, n)
            }
            Side::BounceMemory { session, data, room } => {
                let fits = off.checked_add(max).is_some_and(|end| end <= room);
                self.stage(session, data + off, max).filter(|_| fits)
            }
        }
    }

    /// Copies `dst.len()` bytes of a message, from `off` on, into private memory. `had` holds the bytes from `off` on
    /// that a job has fetched: either none, or at least `dst.len()`. They replace bytes that only a job can reach.
    pub fn load(&self, src: Side<'_>, off: u64, dst: &mut [u8], had: &[u8]) -> Result<(), NeedsJob> {
        self.watched(&[src], (off, dst.len() as u64), || {
            let mut done = 0;
            while done < dst.len() {
                let from = self.at(src, off + done as u64, (dst.len() - done) as u64).ok_or(Fault::Source)?;
                let end = done + from.len() as usize;
                if from.at().takes_time() {
                    dst[done..end].copy_from_slice(had.get(done..end).ok_or(NeedsJob::Job)?);
                } else {
                    fetch(from, &mut dst[done..end])?;
                }
                self.count_piece(done as u64);
                done = end;
            }
            Ok(())
        })
    }

    /// Stores `bytes` in the memory of a message, from `off` on.
    pub fn store(&self, dst: Side<'_>, off: u64, bytes: &[u8]) -> Result<(), NeedsJob> {
        self.watched(&[dst], (off, bytes.len() as u64), || {
            let mut done = 0;
            while done < bytes.len() {
                let left = (bytes.len() - done) as u64;
                let to = self.at(dst, off + done as u64, left).ok_or(Fault::Destination)?;
                if to.at().takes_time() {
                    return Err(NeedsJob::Job);
                }
                transfer(Place::bytes(&bytes[done..]), to, to.len() as usize, &mut [])?;
                self.count_piece(done as u64);
                done += to.len() as usize;
            }
            Ok(())
        })
    }

    /// The mapped window that holds bytes `[off, off + len)` of a side, and their offset in it. `None` unless all of
    /// them lie in one window and may be touched at once.
    #[inline(always)]
    fn simple(&self, side: Side<'_>, off: u64, len: u64) -> Option<(&'a Span, u64)> {
        match side {
            Side::List { reach, sges: [s] } if off <= s.length.into() && len <= u64::from(s.length) - off => {
                let mr = self.mrs.local(Lkey(s.lkey))?;
                self.window(mr, reach, s.addr.checked_add(off)?, len).inspect(|_| mr.served.count(len))
            }
            Side::Remote { reach, qpn, key, addr } => {
                let mr = self.mrs.of_peer(key, qpn)?;
                self.window(mr, reach, addr.checked_add(off)?, len).inspect(|_| mr.served.count(len))
            }
            _ => None,
        }
    }

    /// Copies bytes `[off, off + len)` of a message and returns the number copied. It is less than `len` if the bytes
    /// lie in more than [`SLICE_PIECES`] places. `None` if only a job can copy them.
    #[inline]
    pub fn copy(&self, src: Side<'_>, dst: Side<'_>, off: u64, len: u64) -> Option<Result<u64, Fault>> {
        self.watched(&[src, dst], (off, len), || {
            if len > 0
                && let Some(from) = self.simple(src, off, len)
                && let Some(to) = self.simple(dst, off, len)
            {
                return Some(copy_mapped(from, to, len as usize).map(|()| len));
            }
            self.copy_in_pieces(src, dst, off, len)
        })
    }

    /// The general case of [`Tables::copy`]: looks the pieces up one after the other.
    fn copy_in_pieces(&self, src: Side<'_>, dst: Side<'_>, off: u64, len: u64) -> Option<Result<u64, Fault>> {
        let mut done = 0;
        for _ in 0..SLICE_PIECES {
            if done == len {
                break;
            }
            let at = off + done;
            let Some(from) = self.at(src, at, len - done) else { return Some(Err(Fault::Source)) };
            let Some(to) = self.at(dst, at, from.len()) else { return Some(Err(Fault::Destination)) };
            if from.at().takes_time() || to.at().takes_time() {
                return None;
            }
            if let Err(fault) = transfer(from, to, to.len() as usize, &mut []) {
                return Some(Err(fault));
            }
            self.count_piece(done);
            done += to.len();
        }
        Some(Ok(done))
    }

    /// Counts a piece that begins `done` bytes after the beginning of the message. The first piece is not counted,
    /// because every message has one.
    #[inline]
    pub fn count_piece(&self, done: u64) {
        if done > 0 {
            self.pieces.set(self.pieces.get() + 1);
        }
    }

    /// Runs `f`, which touches bytes `[off, off + len)` of these sides. If pages were missing there, notes whose memory
    /// it is.
    #[inline]
    pub fn watched<R>(&self, sides: &[Side<'_>], (off, len): (u64, u64), f: impl FnOnce() -> R) -> R {
        let before = holes::touched().times;
        let r = f();
        if holes::touched().times != before {
            sides.iter().for_each(|&side| self.note_hole(side, off, len));
        }
        r
    }

    /// Notes the hole that was touched last, if it lies in a mapping that this side of the message uses.
    #[cold]
    fn note_hole(&self, side: Side<'_>, off: u64, len: u64) {
        let owner = match side {
            Side::List { reach, .. } | Side::Remote { reach, .. } => reach.session,
            Side::Bus { session, .. } | Side::BounceMemory { session, .. } => session,
            Side::Inline(_) => return,
        };
        let (mut at, addr) = (off, holes::touched().last);
        while at < off + len
            && let Some(place) = self.at(side, at, off + len - at)
        {
            if let Loc::Mapped(span, _) | Loc::Sparse { span, .. } = place.at()
                && addr.wrapping_sub(span.addr()) < span.len()
                && let Some(s) = self.sessions.get(owner.0)
            {
                s.memory_state.touch_hole();
                self.touched.set(Some(s.vrnic));
                return;
            }
            at += place.len();
        }
    }
}

/// The SGE that holds byte `off` of a list, and the offset of the byte within that SGE.
fn find(sges: &[abi::Sge], off: u64) -> Option<(&abi::Sge, u64)> {
    let mut skip = off;
    for s in sges {
        let len = u64::from(s.length);
        if skip < len {
            return Some((s, skip));
        }
        skip -= len;
    }
    None
}

/// A gather or scatter list of QP `q`.
#[inline]
pub(crate) fn list<'a>(q: &Qp, sges: &'a [abi::Sge], access: u32) -> Side<'a> {
    Side::List { reach: q.reach(access), sges }
}

/// The memory of the receive `r`, which QP `q` has taken.
pub(crate) fn recv_side<'a>(q: &Qp, r: &'a Recv) -> Side<'a> {
    match r.staged {
        Some(s) => Side::BounceMemory { session: s.owner, data: s.data, room: s.room },
        None => list(q, &r.sges[..r.num_sge], access::LOCAL_WRITE),
    }
}

/// The requester's side of a request.
#[inline]
pub(crate) fn local_side<'a>(q: &Qp, w: &'a SendOp) -> Side<'a> {
    if w.wqe.send_flags & send_flags::INLINE != 0 {
        return Side::Inline(&w.inline[..w.total as usize]);
    }
    if w.wqe.send_flags & send_flags::STAGED != 0 {
        return Side::Bus { session: q.memory, sges: &w.sges[..w.num_sge] };
    }
    list(q, &w.sges[..w.num_sge], if w.op.stores_locally() { access::LOCAL_WRITE } else { 0 })
}

/// Access flags that the responder's MR and QP must grant; 0 for SEND.
#[inline]
pub(crate) fn remote_access(op: WrOpcode) -> u32 {
    match op {
        WrOpcode::Write | WrOpcode::WriteImm | WrOpcode::AtomicWrite => access::REMOTE_WRITE,
        WrOpcode::Read => access::REMOTE_READ,
        WrOpcode::CmpSwap | WrOpcode::FetchAdd => access::REMOTE_ATOMIC,
        WrOpcode::Flush => access::FLUSH_GLOBAL,
        _ => 0,
    }
}

/// A range of memory that QP `p` accesses for its peer.
#[inline]
pub(crate) fn remote<'a>(p: &Qp, access: u32, key: Rkey, addr: u64) -> Side<'a> {
    Side::Remote { reach: p.reach(access), qpn: p.qpn, key, addr }
}

/// The responder's side of a one-sided request.
#[inline]
pub(crate) fn remote_side<'a>(p: &Qp, w: &SendOp) -> Side<'a> {
    remote(p, remote_access(w.op), Rkey(w.wqe.rkey), w.wqe.remote_addr)
}
