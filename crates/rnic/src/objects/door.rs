//! Doorbell pages: which QPs their bits stand for, and whether they are polled.

use unirdma_abi as abi;
use unirdma_abi::Status;
use unirdma_mem::Bell;

use super::ids::SessionId;
use super::qp::Qp;
use crate::slab::Handle;

/// A doorbell bit that no page has.
pub(crate) const NO_SLOT: u32 = u32::MAX;

/// A doorbell page. A process has one; a virtual machine has one for each of its processes, so that none can touch another's bits.
pub(crate) struct Door {
    pub session: SessionId,
    /// What its session calls it. 0: the page of SET_DOORBELL.
    pub number: u32,
    pub bell: Bell,
    pub slots: Vec<Option<Handle<Qp>>>,
    pub free_slots: Vec<u32>,
    /// False while the page is polled, true while its driver must kick.
    pub parked: bool,
    /// It has rung, and is in the agenda of its vRNIC.
    pub rung: bool,
    pub last_rung_ns: u64,
    /// The bit that was taken last, which mostly is the next one too.
    pub last_slot: u32,
}

impl Door {
    /// A page that nobody polls and that no QP has a bit of.
    pub fn new(session: SessionId, number: u32, bell: Bell) -> Self {
        Door {
            session,
            number,
            bell,
            slots: Vec::new(),
            free_slots: Vec::new(),
            parked: true,
            rung: false,
            last_rung_ns: 0,
            last_slot: 0,
        }
    }

    /// A bit that no QP has.
    ///
    /// # Errors
    /// `Exhausted` if QPs have all of them.
    pub fn take_slot(&mut self) -> Result<u32, Status> {
        match self.free_slots.pop() {
            Some(slot) => Ok(slot),
            None if self.slots.len() < abi::MAX_QP as usize => {
                self.slots.push(None);
                Ok(self.slots.len() as u32 - 1)
            }
            None => Err(Status::Exhausted),
        }
    }

    /// A QP that had this bit is gone.
    pub fn free_slot(&mut self, slot: u32) {
        if let Some(s) = self.slots.get_mut(slot as usize) {
            *s = None;
            self.free_slots.push(slot);
        }
    }

    /// True if QPs have bits of it.
    pub fn is_used(&self) -> bool {
        self.free_slots.len() < self.slots.len()
    }
}
