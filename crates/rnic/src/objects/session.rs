//! Sessions: the frontends of vRNICs, with the numbers by which they call their objects.

use std::collections::BTreeSet;
use std::sync::Arc;

use unirdma_mem::Bell;

use super::datagram::Ah;
use super::ids::VnicId;
use super::mr::{Mr, Resolve};
use super::qp::Qp;
use super::queues::{Cq, Pd, Srq, Xrcd};
use super::stage::Stage;
use crate::random::Rng;
use crate::slab::{ByNumber, Handle};

/// What a session calls its objects. No number is used twice, and none means anything to another session. The first one is
/// random, so that a driver that takes another session's numbers for its own gets an error.
#[derive(Default)]
pub(crate) struct Names {
    pub last: u32,
    pub pds: ByNumber<Handle<Pd>>,
    pub cqs: ByNumber<Handle<Cq>>,
    pub mrs: ByNumber<Handle<Mr>>,
    pub ahs: ByNumber<Handle<Ah>>,
    pub srqs: ByNumber<Handle<Srq>>,
    pub xrcds: ByNumber<Handle<Xrcd>>,
    /// QPs that it owns or has opened.
    pub qps: BTreeSet<Handle<Qp>>,
}

impl Names {
    pub fn new(random: &mut Rng) -> Self {
        Names { last: random.next_u64() as u32 >> 1, ..Names::default() }
    }

    /// A new number; `None` after at least 2^31 of them.
    pub fn next(&mut self) -> Option<u32> {
        self.last = self.last.checked_add(1)?;
        Some(self.last)
    }
}

pub(crate) struct Session {
    pub vnic: VnicId,
    /// Which of its vRNIC's sessions it is: they are counted. It keeps this number when it is restored elsewhere.
    pub number: u32,
    pub names: Names,
    pub bell: Option<Bell>,
    pub slots: Vec<Option<Handle<Qp>>>,
    pub free_slots: Vec<u32>,
    /// False while the session is polled, true while it must kick.
    pub parked: bool,
    /// Its doorbell has rung, and it is in the agenda of its vRNIC.
    pub rung: bool,
    pub last_rung_ns: u64,
    /// The number by which its driver has said that the memory of its MRs is somewhere else; 0: it is in its place.
    pub away: u32,
    pub memory: Option<Arc<dyn Resolve>>,
    pub stage: Option<Stage>,
}

impl Session {
    /// A QP that had this doorbell bit is gone.
    pub fn free_slot(&mut self, slot: u32) {
        if let Some(s) = self.slots.get_mut(slot as usize) {
            *s = None;
            self.free_slots.push(slot);
        }
    }
}
