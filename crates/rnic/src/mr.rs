//! Memory regions: keys, protection, and where their bytes lie.

use std::collections::HashMap;
use std::sync::Arc;

use unirdma_mem::{Bell, Loc, ProcMem, Span};

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
    /// Nowhere: a null MR.
    Null,
}

/// A memory region, or a memory window: what it grants by its key.
pub(crate) struct Mr {
    pub key: u32,
    /// It is a window.
    pub window: Option<Window>,
    /// Windows that are bound to it.
    pub windows: u32,
    pub owner: SessionId,
    pub pd: u32,
    pub access: u32,
    /// First virtual address that WQEs use for it.
    pub iova: u64,
    pub len: u64,
    /// Memory regions of the session that it lies in; it dies with any of them.
    pub regions: Arc<[u64]>,
    pub backing: Backing,
    /// Its memory is somewhere else for the moment (section 7.5 of the specification).
    pub away: bool,
    /// What its driver says of the way that its memory goes: [`unirdma_abi::mr_way`] and [`unirdma_abi::mr_why`].
    pub note: u32,
}

/// What makes a memory window of a key (IBTA vol. 1, 10.6.7).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Window {
    /// Type 2: it is bound by work requests, for one QP, and its grant can be taken back. Else type 1.
    pub second: bool,
    /// The MR that it is bound to.
    pub parent: Option<u32>,
    /// QP that it was bound by.
    pub qpn: u32,
}

/// Bytes of a process's whole address space.
const WHOLE_PROCESS: u64 = 1 << 47;

impl Mr {
    /// One that grants nothing.
    pub fn empty(owner: SessionId, pd: u32) -> Self {
        Mr {
            key: 0,
            window: None,
            windows: 0,
            owner,
            pd,
            access: 0,
            iova: 0,
            len: 0,
            regions: [].into(),
            backing: Backing::Mapped(Span::anonymous(0)),
            away: false,
            note: 0,
        }
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
    pub fn grants(&self, pd: u32, access: u32, addr: u64, len: u64) -> bool {
        let off = addr.wrapping_sub(self.iova);
        self.pd == pd && self.access & access == access && addr >= self.iova && off <= self.len && len <= self.len - off
    }

    /// The place of `addr`, which [`Mr::grants`] has allowed; `memory` and `bell` are those of its session.
    #[inline]
    pub fn locate<'a>(
        &'a self,
        addr: u64,
        len: u64,
        memory: impl FnOnce() -> Option<&'a Arc<dyn Resolve>>,
        bell: impl FnOnce() -> Option<&'a Bell>,
    ) -> Option<Loc<'a>> {
        match &self.backing {
            Backing::Mapped(_) if self.away => Some(Loc::Away),
            Backing::Mapped(span) => Some(Loc::Mapped(span, addr - self.iova)),
            Backing::Process(mem, base) => Some(Loc::Process(mem, base.wrapping_add(addr - self.iova), bell())),
            Backing::Session => memory()?.resolve(addr, len).map(|(s, off)| Loc::Mapped(s, off)),
            Backing::Null => Some(Loc::Null),
        }
    }
}

/// All MRs of the host, by handle and by key.
///
/// The upper 24 bits of a key are its sealed place in the table, so that it needs no search; the lower 8 are random, or what
/// the owner of a memory window has chosen. Without the secret no key can be told from another's. lkey and rkey of an MR
/// are the same number, as on most hardware.
pub(crate) struct MrTable {
    mrs: Slab<Mr>,
    /// MRs and windows of each session, and the bytes that count.
    used: HashMap<SessionId, (usize, u64)>,
    cipher: KeyCipher,
    rng: Rng,
}

impl MrTable {
    pub fn new(rng: &mut Rng) -> Self {
        MrTable {
            mrs: Slab::default(),
            used: HashMap::new(),
            cipher: KeyCipher::new(rng),
            rng: Rng::new(rng.next_u64()),
        }
    }

    /// Stores `mr` and gives it its key; returns (handle, key).
    pub fn insert(&mut self, mut mr: Mr) -> Option<(u32, u32)> {
        let (cipher, noise) = (&self.cipher, self.rng.next_u64() as u32);
        let mut key = 0;
        let (owner, bytes) = (mr.owner, mr.counted());
        let handle = self.mrs.insert_with(|handle| {
            // Four of the bits above the slot's are noise too, so that a slot's next key differs in more than 8 bits.
            let place = Slab::<Mr>::slot_of(handle) | noise >> 8 << 20;
            key = cipher.seal(place & 0xff_ffff) << 8 | noise & 0xff;
            mr.key = key;
            mr
        })?;
        let used = self.used.entry(owner).or_default();
        *used = (used.0 + 1, used.1.saturating_add(bytes));
        Some((handle, key))
    }

    fn in_place(&self, key: u32) -> Option<(u32, &Mr)> {
        self.mrs.in_slot(Slab::<Mr>::slot_of(self.cipher.open(key >> 8)))
    }

    #[inline]
    pub fn by_key(&self, key: u32) -> Option<&Mr> {
        self.in_place(key).map(|f| f.1).filter(|m| m.key == key)
    }

    /// The handle of the MR or window with this key.
    pub fn handle_of(&self, key: u32) -> Option<u32> {
        self.in_place(key).filter(|f| f.1.key == key).map(|f| f.0)
    }

    /// The handle of the window whose key differs from this one in its lower 8 bits at most.
    pub fn window_like(&self, key: u32) -> Option<u32> {
        self.in_place(key).filter(|f| f.1.window.is_some() && f.1.key >> 8 == key >> 8).map(|f| f.0)
    }

    pub fn get(&self, handle: u32) -> Option<&Mr> {
        self.mrs.get(handle)
    }

    pub fn remove(&mut self, handle: u32) -> Option<Mr> {
        let mr = self.mrs.remove(handle)?;
        if let Some(used) = self.used.get_mut(&mr.owner) {
            *used = (used.0 - 1, used.1.saturating_sub(mr.counted()));
            if used.0 == 0 {
                self.used.remove(&mr.owner);
            }
        }
        Some(mr)
    }

    /// How many MRs and windows the sessions have that `f` names, and how many bytes.
    pub fn used(&self, f: impl Fn(SessionId) -> bool) -> (usize, u64) {
        let of = self.used.iter().filter(|u| f(*u.0)).map(|u| *u.1);
        of.fold((0, 0), |a, u| (a.0 + u.0, u64::saturating_add(a.1, u.1)))
    }

    pub fn get_mut(&mut self, handle: u32) -> Option<&mut Mr> {
        self.mrs.get_mut(handle)
    }

    /// Puts `mr` in the place of another, under its key.
    pub fn replace(&mut self, handle: u32, mr: Mr) {
        let Some(old) = self.mrs.get_mut(handle) else { return };
        if let Some(used) = self.used.get_mut(&old.owner) {
            used.1 = used.1.saturating_sub(old.counted()).saturating_add(mr.counted());
        }
        *old = Mr { key: old.key, owner: old.owner, ..mr };
    }

    /// The memory of all MRs of `owner` is somewhere else, or back.
    pub fn set_away(&mut self, owner: SessionId, away: bool) {
        for mr in self.mrs.values_mut().filter(|m| m.owner == owner) {
            mr.away = away;
        }
    }

    pub fn handles(&self, f: impl Fn(&Mr) -> bool) -> Vec<u32> {
        self.mrs.handles(f)
    }

    pub fn iter(&self) -> impl Iterator<Item = &Mr> {
        self.mrs.iter().map(|(_, m)| m)
    }
}
