//! The seam between what QPs are and what executes their work. Objects, names, quotas, groups, the scheduler and connection management
//! are above it; the software RNIC ([`crate::software`]) is below it, and a real RNIC would be.
//!
//! A real RNIC has a PD, a CQ, an SRQ, an MR and a QP of its own for each of those here. It makes them in [`Executor::made`], moves its
//! QPs in [`Executor::connect`], [`Executor::modified`] and [`Executor::reset`], and frees them in [`Executor::gone`]: so everything
//! that maps one to the other is done on the control path, once (U05, U10).

use unirdma_abi::Status;
use unirdma_formats::wire::Packet;

use crate::objects::{Ah, Cq, Mr, Pd, Qp, Srq, VnicId};
use crate::path::{Arrival, Path};
use crate::slab::Handle;

/// An object that an executor may have a counterpart of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Object {
    Pd(Handle<Pd>),
    Cq(Handle<Cq>),
    Srq(Handle<Srq>),
    Mr(Handle<Mr>),
    Ah(Handle<Ah>),
    Qp(Handle<Qp>),
}

/// Where the peer of a connection is. Its group has it: that was checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Peer {
    /// A vRNIC of this host.
    Here(VnicId),
    /// On another host.
    There(Path),
}

/// What executes the work of QPs of a core.
pub(crate) trait Executor<Core>: Send {
    /// An object was made.
    ///
    /// # Errors
    /// The command that made it fails with this status, and the object is gone again.
    fn made(&mut self, _core: &mut Core, _object: Object) -> Result<(), Status> {
        Ok(())
    }

    /// An object is about to go.
    fn gone(&mut self, _core: &mut Core, _object: Object) {}

    /// A QP gets another peer.
    ///
    /// # Errors
    /// The command that wanted it fails with this status.
    fn connect(&mut self, core: &mut Core, qp: Handle<Qp>, peer: Peer) -> Result<(), Status>;

    /// The attributes of a QP were changed: those of `mask` (`IBV_QP_*`).
    fn modified(&mut self, core: &mut Core, qp: Handle<Qp>, mask: u32);

    /// A QP goes to RESET: whatever was under way is forgotten.
    fn reset(&mut self, core: &mut Core, qp: Handle<Qp>);

    /// A rule does not allow the connection of a reliable QP any more: it fails as one that has lost its way, at once.
    fn sever(&mut self, core: &mut Core, qp: Handle<Qp>);

    /// A QP has its turn, for `allowance_ns` nanoseconds. Returns what it took, roughly, and whether there is more to do.
    fn step(&mut self, core: &mut Core, qp: Handle<Qp>, allowance_ns: u64) -> (u64, bool);

    /// The time for which a QP waited has come.
    fn timer(&mut self, core: &mut Core, qp: Handle<Qp>);

    /// A packet came in for a QP: what it says, and all its bytes.
    fn packet(&mut self, core: &mut Core, qp: Handle<Qp>, a: &Arrival, p: &Packet<'_>, bytes: &[u8]);
}

/// Stands in the place of an executor while that works.
pub(crate) struct Away;

impl<Core> Executor<Core> for Away {
    fn connect(&mut self, _: &mut Core, _: Handle<Qp>, _: Peer) -> Result<(), Status> {
        Err(Status::BadState)
    }

    fn modified(&mut self, _: &mut Core, _: Handle<Qp>, _: u32) {}

    fn reset(&mut self, _: &mut Core, _: Handle<Qp>) {}

    fn sever(&mut self, _: &mut Core, _: Handle<Qp>) {}

    fn step(&mut self, _: &mut Core, _: Handle<Qp>, _: u64) -> (u64, bool) {
        (0, false)
    }

    fn timer(&mut self, _: &mut Core, _: Handle<Qp>) {}

    fn packet(&mut self, _: &mut Core, _: Handle<Qp>, _: &Arrival, _: &Packet<'_>, _: &[u8]) {}
}
