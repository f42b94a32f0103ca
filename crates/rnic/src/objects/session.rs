//! Sessions: the frontends of vRNICs, with the numbers by which they name their objects.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use unirdma_mem::Bell;

use super::bounce_memory::BounceMemory;
use super::datagram::Ah;
use super::doorbell::DoorbellPage;
use super::ids::VrnicId;
use super::memory_state::MemoryState;
use super::mr::{Mr, Resolve};
use super::qp::Qp;
use super::queues::{Cq, Pd, Srq, Xrcd};
use super::revoked_regions::Revoked;
use crate::random::Rng;
use crate::slab::{ByNumber, Handle};

/// Objects of a session by their numbers. New objects get higher numbers, so that a walk may stop at a number and go on
/// from there later.
pub(crate) type Numbered<T> = BTreeMap<u32, Handle<T>>;

/// The numbers of a session's objects. No number is used twice, and each is valid in this session only. The first one
/// is random, so that a driver that uses the numbers of another session by mistake gets an error.
#[derive(Default)]
pub(crate) struct Handles {
    pub last: u32,
    pub pds: Numbered<Pd>,
    pub cqs: Numbered<Cq>,
    pub mrs: Numbered<Mr>,
    /// Every datagram looks one up, so this is a hash table.
    pub ahs: ByNumber<Handle<Ah>>,
    pub srqs: Numbered<Srq>,
    pub xrcds: Numbered<Xrcd>,
    /// Doorbell pages, except the page of SET_DOORBELL.
    pub doors: Numbered<DoorbellPage>,
    /// QPs that it owns or has opened.
    pub qps: BTreeSet<Handle<Qp>>,
}

impl Handles {
    pub fn new(random: &mut Rng) -> Self {
        Handles { last: random.next_u64() as u32 >> 1, ..Handles::default() }
    }

    /// A new number; `None` after at least 2^31 of them.
    pub fn next(&mut self) -> Option<u32> {
        self.last = self.last.checked_add(1)?;
        Some(self.last)
    }
}

pub(crate) struct Session {
    pub vrnic: VrnicId,
    /// Number of the session among all sessions of its vRNIC. It stays the same when the session is restored elsewhere.
    pub number: u32,
    pub names: Handles,
    /// The doorbell page of SET_DOORBELL; for a session that copies the memory of its process, the only one.
    pub door: Option<Handle<DoorbellPage>>,
    pub bell: Option<Bell>,
    /// Its frontend has stopped: nothing is done for it.
    pub paused: bool,
    /// Its frontend has left. The session is removed when the last of its dead objects is freed.
    pub gone: bool,
    /// The number by which its driver has announced that the memory of its MRs is somewhere else; 0: the memory is in
    /// its place.
    pub away: u32,
    /// While this is not 0, the session may have dead MRs that are not freed yet: see [`Session::has`]. It counts the
    /// session's graves.
    pub dying: u32,
    /// Objects with numbers up to this one are dead.
    pub ended: u32,
    /// Its memory regions that are gone while dead MRs in them are left.
    pub revoked: Revoked,
    pub memory: Option<Arc<dyn Resolve>>,
    pub stage: Option<BounceMemory>,
    /// The state of its vRNIC's memory.
    pub memory_state: MemoryState,
}

impl Session {
    /// All its doorbell pages.
    pub fn doors(&self) -> impl Iterator<Item = Handle<DoorbellPage>> {
        self.door.into_iter().chain(self.names.doors.values().copied())
    }

    /// True if one of its MRs, or windows, lives: neither the session nor a memory region of the MR has ended since it
    /// was made. While `dying` is 0, all of them live.
    #[cold]
    pub fn has(&self, m: &Mr) -> bool {
        m.number > self.ended && !self.revoked.concerns(m)
    }
}
