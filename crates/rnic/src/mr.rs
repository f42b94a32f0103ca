//! Memory regions: keys, protection, and where their bytes lie.

use std::sync::Arc;

use unirdma_mem::{Loc, ProcMem, Span};

use crate::keys::{KeyCipher, Rng};
use crate::objects::SessionId;
use crate::slab::Slab;

/// Finds bus addresses in a session's memory as it is now.
pub trait Resolve: Send + Sync {
    /// The window that holds `[addr, addr + len)` whole, and the offset of `addr` in it.
    fn resolve(&self, addr: u64, len: u64) -> Option<(&Span, u64)>;
}

/// Where an MR's bytes lie.
pub enum Backing {
    /// Mapped here: the ways *direct* and *share*.
    Mapped(Span),
    /// In the application's private memory, from this address on: the way *copy*.
    Process(ProcMem, u64),
    /// All of the session's memory, by bus address (GET_DMA_MR).
    Session,
}

/// A memory region.
pub(crate) struct Mr {
    pub owner: SessionId,
    pub pd: u32,
    pub access: u32,
    /// First virtual address that WQEs use for it.
    pub iova: u64,
    pub len: u64,
    /// Memory regions of the session that it lies in; it dies with any of them.
    pub regions: Vec<u64>,
    pub backing: Backing,
}

/// Bytes of a process's whole address space.
const WHOLE_PROCESS: u64 = 1 << 47;

impl Mr {
    /// Bytes that count against the vRNIC's quota; a grant of all memory is not a size.
    pub fn counted(&self) -> u64 {
        match self.backing {
            Backing::Session => 0,
            Backing::Process(..) if self.len >= WHOLE_PROCESS => 0,
            _ => self.len,
        }
    }

    /// True if the MR belongs to `pd`, grants `access`, and holds `[addr, addr + len)`.
    #[inline]
    pub fn grants(&self, pd: u32, access: u32, addr: u64, len: u64) -> bool {
        let off = addr.wrapping_sub(self.iova);
        self.pd == pd && self.access & access == access && addr >= self.iova && off <= self.len && len <= self.len - off
    }

    /// The place of `addr`, which [`Mr::grants`] has allowed.
    #[inline]
    pub fn locate<'a>(&'a self, addr: u64, len: u64, memory: &'a Option<Arc<dyn Resolve>>) -> Option<Loc<'a>> {
        match &self.backing {
            Backing::Mapped(span) => Some(Loc::Mapped(span, addr - self.iova)),
            Backing::Process(mem, base) => Some(Loc::Process(mem, base.wrapping_add(addr - self.iova))),
            Backing::Session => memory.as_ref()?.resolve(addr, len).map(|(s, off)| Loc::Mapped(s, off)),
        }
    }
}

/// All MRs of the host, by handle and by key.
///
/// A key is the sealed handle: its table slot needs no search, and without the secret no key can be
/// told from another's. lkey and rkey of an MR are the same number, as on most hardware.
pub(crate) struct MrTable {
    mrs: Slab<Mr>,
    cipher: KeyCipher,
}

impl MrTable {
    pub fn new(rng: &mut Rng) -> Self {
        MrTable { mrs: Slab::default(), cipher: KeyCipher::new(rng) }
    }

    /// Stores `mr` and gives it its key; returns (handle, key).
    pub fn insert(&mut self, mr: Mr) -> Option<(u32, u32)> {
        let handle = self.mrs.insert_with(|_| mr)?;
        Some((handle, self.cipher.seal(handle)))
    }

    #[inline]
    pub fn by_key(&self, key: u32) -> Option<&Mr> {
        self.mrs.get(self.cipher.open(key))
    }

    pub fn get(&self, handle: u32) -> Option<&Mr> {
        self.mrs.get(handle)
    }

    pub fn remove(&mut self, handle: u32) -> Option<Mr> {
        self.mrs.remove(handle)
    }

    /// Puts `mr` in the place of another, under its key.
    pub fn replace(&mut self, handle: u32, mr: Mr) {
        if let Some(old) = self.mrs.get_mut(handle) {
            *old = mr;
        }
    }

    pub fn handles(&self, f: impl Fn(&Mr) -> bool) -> Vec<u32> {
        self.mrs.handles(f)
    }

    pub fn iter(&self) -> impl Iterator<Item = &Mr> {
        self.mrs.iter().map(|(_, m)| m)
    }
}
