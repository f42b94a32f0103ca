//! Memory regions: keys, protection, and where their bytes lie.

use std::cell::Cell;
use std::sync::Arc;

use unirdma_abi::Status;
use unirdma_formats::{Lkey, Qpn, Rkey};
use unirdma_mem::{Bell, Loc, Pieces, Place, ProcMem, Span};

use super::fast_reg::PageList;
use super::ids::SessionId;
use super::queues::Pd;
use crate::random::Rng;
use crate::slab::{ByNumber, Handle, Slab};

/// Finds bus addresses in a session's memory as it is now.
pub trait Resolve: Send + Sync {
    /// The window that holds `[addr, addr + len)` whole, and the offset of `addr` in it. Bus addresses within the
    /// window are contiguous.
    fn resolve(&self, addr: u64, len: u64) -> Option<(&Span, u64)>;
}

/// Where an MR's bytes lie.
pub enum Backing {
    /// Mapped here: the ways *direct* and *share*.
    Mapped(Span),
    /// Mapped here in too many pieces to be one window, from this byte of the whole on.
    Pieces(Arc<Pieces>, u64),
    /// In the application's private memory, from this address on: the way *copy*.
    Process(ProcMem, u64),
    /// All of the session's memory, by bus address (GET_DMA_MR).
    Session,
    /// Pages of the session's memory, by bus address, that work requests name (CREATE_MR, REG_MR).
    Pages(PageList),
    /// Nowhere: a null MR.
    Null,
}

/// A memory region, or a memory window: the access that its key grants.
pub(crate) struct Mr {
    pub key: u32,
    /// It is a window.
    pub window: Option<Window>,
    /// Windows that are bound to it.
    pub windows: u32,
    pub owner: SessionId,
    /// Its number in its owner's session.
    pub number: u32,
    pub pd: Handle<Pd>,
    pub access: u32,
    /// First virtual address that WQEs use for it.
    pub iova: u64,
    pub len: u64,
    /// Memory regions of the session that it lies in; it dies with any of them.
    pub regions: Arc<[u64]>,
    /// Number of times that the session had lost regions when none of `regions` was found to be lost.
    pub checked: Cell<u32>,
    pub backing: Backing,
    /// Its driver's reason for the way that the memory is reached: [`unirdma_abi::mr_way`] and [`unirdma_abi::mr_why`].
    pub note: u32,
    pub served: Served,
}

/// Reads and writes by the key of an MR, roughly.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Served {
    accesses: Cell<u64>,
    bytes: Cell<u64>,
}

/// Most bytes that one access counts as. A longer request makes several accesses and names all bytes that are left each
/// time.
const MOST_AT_ONCE: u64 = 64 << 10;

impl Served {
    /// Counts an access to `bytes` bytes.
    #[inline]
    pub fn count(&self, bytes: u64) {
        self.accesses.set(self.accesses.get().wrapping_add(1));
        self.bytes.set(self.bytes.get().wrapping_add(bytes.min(MOST_AT_ONCE)));
    }

    /// The number of accesses.
    pub fn accesses(&self) -> u64 {
        self.accesses.get()
    }

    /// The bytes of all accesses, of each at most 64 KiB.
    pub fn bytes(&self) -> u64 {
        self.bytes.get()
    }
}

/// The additional state of a memory window (IBTA vol. 1, 10.6.7).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Window {
    /// Type 2: it is bound by work requests, for one QP, and its grant can be taken back. Else type 1.
    pub second: bool,
    /// The MR that it is bound to.
    pub parent: Option<Handle<Mr>>,
    /// The QP that it was bound by; `None`: it is not bound by a work request.
    pub qpn: Option<Qpn>,
}

/// The memory that a QP may access by keys: MRs of `session` in `pd` that grant `access`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reach {
    pub pd: Handle<Pd>,
    pub session: SessionId,
    pub access: u32,
}

impl Backing {
    /// True if dropping it unmaps memory, or frees much.
    pub(crate) fn is_slow_to_drop(&self) -> bool {
        match self {
            Backing::Mapped(span) => span.is_last(),
            Backing::Pieces(..) => true,
            Backing::Process(..) | Backing::Session | Backing::Pages(_) | Backing::Null => false,
        }
    }

    /// Adds the other memory at the end of this one. The present memory is neither copied nor read.
    ///
    /// # Errors
    /// `BadState` unless both are mapped here and have no other owner, `BadValue` if the sum is too long.
    /// Nothing is changed then.
    pub fn extend(&mut self, other: Backing) -> Result<(), Status> {
        let other = match other {
            Backing::Mapped(span) => Pieces::of(span),
            Backing::Pieces(pieces, 0) => Arc::into_inner(pieces).ok_or(Status::BadState)?,
            _ => return Err(Status::BadState),
        };
        let fits = match self {
            Backing::Mapped(span) => {
                let mut all = Pieces::of(span.clone());
                let fits = all.extend(other);
                if fits {
                    *self = Backing::Pieces(Arc::new(all), 0);
                }
                fits
            }
            Backing::Pieces(pieces, 0) => Arc::get_mut(pieces).ok_or(Status::BadState)?.extend(other),
            _ => return Err(Status::BadState),
        };
        if fits { Ok(()) } else { Err(Status::BadValue) }
    }

    /// `len` bytes of the same memory from `off` on; all of it if addresses are not counted from its beginning. `None`
    /// if it is shorter.
    pub fn part(&self, off: u64, len: u64) -> Option<Backing> {
        Some(match self {
            Backing::Mapped(span) => Backing::Mapped(span.sub(off, len)?),
            Backing::Pieces(pieces, base) => {
                let start = base.checked_add(off)?;
                let fits = start.checked_add(len).is_some_and(|end| end <= pieces.len());
                Backing::Pieces(pieces.clone(), fits.then_some(start)?)
            }
            Backing::Process(mem, base) => Backing::Process(mem.clone(), base.wrapping_add(off)),
            Backing::Session => Backing::Session,
            Backing::Null => Backing::Null,
            // No window is bound to such an MR.
            Backing::Pages(_) => return None,
        })
    }
}

/// True if all of `len` bytes from address `iova` on have addresses. The last byte may have the highest address, so
/// that the end would be 2^64.
pub(crate) fn is_range(iova: u64, len: u64) -> bool {
    len == 0 || iova.checked_add(len - 1).is_some()
}

/// Bytes of a process's whole address space.
const WHOLE_PROCESS: u64 = 1 << 47;

impl Mr {
    /// An MR that grants nothing.
    pub fn empty(owner: SessionId, pd: Handle<Pd>) -> Self {
        Mr {
            key: 0,
            window: None,
            windows: 0,
            owner,
            number: 0,
            pd,
            access: 0,
            iova: 0,
            len: 0,
            regions: [].into(),
            checked: Cell::new(0),
            backing: Backing::Mapped(Span::anonymous(0)),
            note: 0,
            served: Served::default(),
        }
    }

    /// True if bytes are copied in and out of the private memory of a process.
    pub fn is_copied(&self) -> bool {
        self.window.is_none() && matches!(self.backing, Backing::Process(..))
    }

    /// Bytes that count against the vRNIC's quota; a grant of all memory is not a size.
    pub fn counted(&self) -> u64 {
        match self.backing {
            _ if self.window.is_some() => 0,
            Backing::Session | Backing::Null => 0,
            Backing::Process(..) if self.len >= WHOLE_PROCESS => 0,
            _ => self.len,
        }
    }

    /// True if the MR belongs to `pd`, grants `access`, and holds `[addr, addr + len)`.
    #[inline]
    pub fn grants(&self, pd: Handle<Pd>, access: u32, addr: u64, len: u64) -> bool {
        let off = addr.wrapping_sub(self.iova);
        self.pd == pd && self.access & access == access && addr >= self.iova && off <= self.len && len <= self.len - off
    }

    /// The place of `addr`, of up to `len` bytes, which [`Mr::grants`] has allowed. `memory` and `bell` belong to the
    /// MR's session. `away` says whether the memory of the session's MRs is somewhere else at the moment (section 7.5
    /// of the specification).
    #[inline]
    pub fn locate<'a>(
        &'a self,
        addr: u64,
        len: u64,
        memory: impl FnOnce() -> Option<&'a Arc<dyn Resolve>>,
        bell: impl FnOnce() -> Option<&'a Bell>,
        away: impl Fn() -> bool,
    ) -> Option<Place<'a>> {
        let at = match &self.backing {
            Backing::Mapped(_) | Backing::Pieces(..) | Backing::Pages(_) if away() => Loc::Away,
            Backing::Mapped(span) => Loc::Mapped(span, addr - self.iova),
            Backing::Pieces(pieces, base) => {
                return Some(pieces.at(base + (addr - self.iova))?.up_to(len));
            }
            Backing::Process(mem, base) => Loc::Process(mem, base.wrapping_add(addr - self.iova), bell()),
            Backing::Session => memory()?.resolve(addr, len).map(|(s, off)| Loc::Mapped(s, off))?,
            Backing::Pages(pages) => {
                return pages.locate(&**memory()?, addr - self.iova, len);
            }
            Backing::Null => Loc::Null,
        };
        Some(Place::new(at, len))
    }
}

/// All MRs of the host, by handle and by key.
///
/// The upper 24 bits of a key are random and unique. The lower 8 bits are random too, unless the owner of a memory
/// window, or of an MR that work requests register, has chosen them. lkey and rkey of an MR are the same number, as on
/// most hardware.
#[derive(Default)]
pub(crate) struct MrTable {
    mrs: Slab<Mr>,
    /// By the upper 24 bits of the key. The four uppermost bits, which are random, select the table. Several tables,
    /// because a table that grows is copied as a whole, and no command may take the time to copy the entries of many
    /// others.
    by_key: [ByNumber<Handle<Mr>>; KEY_TABLES],
}

const KEY_TABLES: usize = 16;

impl MrTable {
    #[inline]
    fn table(&self, key: u32) -> &ByNumber<Handle<Mr>> {
        &self.by_key[(key >> 28) as usize % KEY_TABLES]
    }

    fn table_mut(&mut self, key: u32) -> &mut ByNumber<Handle<Mr>> {
        &mut self.by_key[(key >> 28) as usize % KEY_TABLES]
    }

    /// Stores `mr` and gives it its key; returns handle and key.
    pub fn insert(&mut self, mut mr: Mr, random: &mut Rng) -> Option<(Handle<Mr>, u32)> {
        let key = loop {
            let key = random.next_u64() as u32;
            if !self.table(key).contains_key(&(key >> 8)) {
                break key;
            }
        };
        mr.key = key;
        let handle = self.mrs.insert(mr)?;
        self.table_mut(key).insert(key >> 8, handle);
        Some((handle, key))
    }

    /// Stores `mr`, which has its key already.
    pub fn insert_known(&mut self, mr: Mr) -> Option<Handle<Mr>> {
        let key = mr.key;
        let handle = self.mrs.insert(mr)?;
        self.table_mut(key).insert(key >> 8, handle);
        Some(handle)
    }

    /// True if an MR or a window has this key, or one that differs in its lower 8 bits only.
    pub fn is_taken(&self, key: u32) -> bool {
        self.table(key).contains_key(&(key >> 8))
    }

    /// The number of further MRs that it has room for.
    pub fn room(&self) -> usize {
        self.mrs.room()
    }

    #[inline]
    fn by_key(&self, key: u32) -> Option<&Mr> {
        self.mrs.get(*self.table(key).get(&(key >> 8))?).filter(|m| m.key == key)
    }

    /// The MR that a WQE names. A window cannot be local memory.
    #[inline]
    pub fn local(&self, key: Lkey) -> Option<&Mr> {
        self.by_key(key.0).filter(|m| m.window.is_none())
    }

    /// The MR or window that a peer names.
    #[inline]
    pub fn remote(&self, key: Rkey) -> Option<&Mr> {
        self.by_key(key.0)
    }

    /// The MR or window that a request to QP `qpn` may name: a window of type 2 is for its own QP.
    #[inline]
    pub fn of_peer(&self, key: Rkey, qpn: Qpn) -> Option<&Mr> {
        self.by_key(key.0).filter(|m| m.window.is_none_or(|w| !w.second || w.qpn == Some(qpn)))
    }

    /// The handle of the MR that a WQE names.
    pub fn local_handle(&self, key: Lkey) -> Option<Handle<Mr>> {
        let h = *self.table(key.0).get(&(key.0 >> 8))?;
        self.mrs.get(h).filter(|m| m.key == key.0 && m.window.is_none()).map(|_| h)
    }

    /// The handle of the MR or window that a peer names.
    pub fn remote_handle(&self, key: Rkey) -> Option<Handle<Mr>> {
        let h = *self.table(key.0).get(&(key.0 >> 8))?;
        self.mrs.get(h).filter(|m| m.key == key.0).map(|_| h)
    }

    /// The handle of the MR or window whose key differs from this one in its lower 8 bits at most.
    pub fn like(&self, key: Rkey) -> Option<Handle<Mr>> {
        self.table(key.0).get(&(key.0 >> 8)).copied()
    }

    pub fn get(&self, handle: Handle<Mr>) -> Option<&Mr> {
        self.mrs.get(handle)
    }

    pub fn get_mut(&mut self, handle: Handle<Mr>) -> Option<&mut Mr> {
        self.mrs.get_mut(handle)
    }

    pub fn remove(&mut self, handle: Handle<Mr>) -> Option<Mr> {
        let mr = self.mrs.remove(handle)?;
        self.table_mut(mr.key).remove(&(mr.key >> 8));
        Some(mr)
    }

    /// Puts `mr` in the place of another, under its key. Returns the other.
    pub fn replace(&mut self, handle: Handle<Mr>, mr: Mr) -> Option<Mr> {
        let old = self.mrs.get_mut(handle)?;
        let served = std::mem::take(&mut old.served);
        let new = Mr { key: old.key, number: old.number, owner: old.owner, served, ..mr };
        Some(std::mem::replace(old, new))
    }
}
