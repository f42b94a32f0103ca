//! The interface between QPs and the code that executes their work. Objects, names, quotas, groups, the scheduler and
//! connection management are above it, and the software RNIC ([`crate::software`]) is below it. Programs that have a VF
//! of a real RNIC have no objects here.

use unirdma_abi::Status;
use unirdma_formats::wire::Packet;

use crate::objects::{Ah, Cq, Mr, Pd, Qp, Srq, VrnicId};
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

/// The place of a connection's peer. The caller has checked that the peer is known in the vRNIC's group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Peer {
    /// A vRNIC of this host.
    Here(VrnicId),
    /// On another host.
    There(Path),
}

/// Executes the work of a core's QPs.
pub(crate) trait Executor<Core>: Send {
    /// Called after an object was made.
    ///
    /// # Errors
    /// The command that made the object fails with this status, and the object is removed again.
    fn made(&mut self, _core: &mut Core, _object: Object) -> Result<(), Status> {
        Ok(())
    }

    /// Called before an object is removed.
    fn gone(&mut self, _core: &mut Core, _object: Object) {}

    /// Connects a QP to another peer.
    ///
    /// # Errors
    /// The command that changes the peer fails with this status.
    fn connect(&mut self, core: &mut Core, qp: Handle<Qp>, peer: Peer) -> Result<(), Status>;

    /// Called after the attributes in `mask` (`IBV_QP_*`) of a QP were changed.
    fn modified(&mut self, core: &mut Core, qp: Handle<Qp>, mask: u32);

    /// Called before a QP goes to RESET: forgets all its work.
    fn reset(&mut self, core: &mut Core, qp: Handle<Qp>);

    /// Fails a reliable QP at once, as if its peer could not be reached any more, because a rule does not allow its
    /// connection.
    fn disconnect(&mut self, core: &mut Core, qp: Handle<Qp>);

    /// Gives a QP a turn of `allowance_ns` nanoseconds. Returns the estimated time that it took, and whether there is
    /// more to do.
    fn step(&mut self, core: &mut Core, qp: Handle<Qp>, allowance_ns: u64) -> (u64, bool);

    /// Called when a QP's timer fires.
    fn timer(&mut self, core: &mut Core, qp: Handle<Qp>);

    /// Handles a packet for a QP: `p` is parsed from `bytes`.
    fn packet(&mut self, core: &mut Core, qp: Handle<Qp>, a: &Arrival, p: &Packet<'_>, bytes: &[u8]);
}

/// Placeholder for an executor during its own calls.
pub(crate) struct NoExecutor;

impl<Core> Executor<Core> for NoExecutor {
    fn connect(&mut self, _: &mut Core, _: Handle<Qp>, _: Peer) -> Result<(), Status> {
        Err(Status::BadState)
    }

    fn modified(&mut self, _: &mut Core, _: Handle<Qp>, _: u32) {}

    fn reset(&mut self, _: &mut Core, _: Handle<Qp>) {}

    fn disconnect(&mut self, _: &mut Core, _: Handle<Qp>) {}

    fn step(&mut self, _: &mut Core, _: Handle<Qp>, _: u64) -> (u64, bool) {
        (0, false)
    }

    fn timer(&mut self, _: &mut Core, _: Handle<Qp>) {}

    fn packet(&mut self, _: &mut Core, _: Handle<Qp>, _: &Arrival, _: &Packet<'_>, _: &[u8]) {}
}
