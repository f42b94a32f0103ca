//! The core: the struct that holds the objects, the scheduler, jobs, the network and the outputs. Most of its methods
//! are in other modules.

use std::collections::VecDeque;

use unirdma_abi::Status;
use unirdma_formats::cm::MAD_BYTES;
use unirdma_formats::{AsyncEvent, Gid, Qpn};

use crate::capture::Tap;
use crate::doorbell_poll::Polled;
use crate::executor::{Executor, NoExecutor, Object};
use crate::job::Jobs;
use crate::multicast::Multicast;
use crate::net::{Doubts, Network};
use crate::objects::{MAX_MTU, Objects, Qp, SessionId, VrnicId};
use crate::output::Output;
use crate::random::{Rngs, Seed};
use crate::sched::{Due, Scheduler};
use crate::slab::{Handle, Slab};
use crate::vf_peers::VfPeers;

/// Estimated time of one operation, without its copy, ns. Turns are planned with estimates, and charged by the clock.
pub(crate) const OP_NS: u64 = 250;
/// Estimated number of bytes that are copied in a nanosecond.
const BYTES_PER_NS: u64 = 8;

/// Estimated longest time for each piece of a message after the first one, ns. Each piece is looked up at both ends.
/// The look-up takes longest if each list of the MR has one piece (`attack`: crumbs).
const PIECE_NS: u64 = 250;

/// Estimated time to copy bytes, ns.
pub(crate) fn copy_ns(bytes: u64) -> u64 {
    bytes / BYTES_PER_NS
}

/// The software RNIC without connection management. [`crate::Rnic`] documents the order of calls.
pub struct Core {
    pub(crate) objects: Objects,
    /// Executes the work of QPs. It is replaced by [`NoExecutor`] during its own calls.
    executor: Box<dyn Executor<Core>>,
    pub(crate) sched: Scheduler,
    pub(crate) jobs: Jobs,
    pub(crate) net: Network,
    pub(crate) multicast: Multicast,
    /// The VFs of other hosts' vRNICs, and the questions about them.
    pub(crate) vf_peers: VfPeers,
    /// QPs and address handles to be checked again, because the rules have changed.
    pub(crate) doubts: Doubts,
    /// The running capture.
    pub(crate) tap: Option<Box<Tap>>,
    pub(crate) random: Rngs,
    /// The time of the input or command that is being worked on, ns.
    pub(crate) now: u64,
    /// Number of wake channels, which is passed to drivers.
    pub(crate) wakes: u32,
    /// True while no thread polls doorbells and drivers have to kick ([`Core::doze`]).
    pub(crate) dozes: bool,
    /// True if other threads do jobs while the core is in use.
    pub(crate) has_helpers: bool,
    /// Sessions whose doorbells are polled.
    pub(crate) polled: Polled,
    /// True if a datagram has found no receive since the last call of [`Core::take_starved`].
    pub(crate) starved: bool,
    /// Result of [`Core::is_in_vain`].
    pub(crate) in_vain: bool,
    /// Buffer for the datagram that is being delivered on this host.
    pub(crate) datagram: Box<[u8]>,
    pub(crate) outputs: VecDeque<Output>,
    /// MADs between vRNICs of this host: the receiver, the receiver's GID, the sender's GID, and the message.
    pub(crate) mads: VecDeque<(VrnicId, Gid, Gid, Box<[u8; MAD_BYTES]>)>,
}

impl Core {
    /// Makes a core. `seed` determines its random numbers, `wakes` is the number of wake channels, which is passed to
    /// drivers, and `executor` executes the work of QPs.
    pub(crate) fn new(seed: &Seed, wakes: u32, executor: Box<dyn Executor<Core>>) -> Self {
        Core {
            objects: Objects::default(),
            executor,
            sched: Scheduler::default(),
            jobs: Jobs::default(),
            net: Network::default(),
            multicast: Multicast::default(),
            vf_peers: VfPeers::default(),
            doubts: Doubts::default(),
            tap: None,
            random: Rngs::new(seed),
            now: 0,
            wakes,
            dozes: false,
            has_helpers: true,
            polled: Polled::default(),
            starved: false,
            in_vain: false,
            datagram: vec![0; MAX_MTU as usize].into_boxed_slice(),
            outputs: VecDeque::new(),
            mads: VecDeque::new(),
        }
    }

    /// Calls the executor.
    pub(crate) fn execute_with<R>(&mut self, f: impl FnOnce(&mut dyn Executor<Core>, &mut Self) -> R) -> R {
        let mut executor = std::mem::replace(&mut self.executor, Box::new(NoExecutor));
        let r = f(&mut *executor, self);
        self.executor = executor;
        r
    }

    /// Tells the executor about a new object.
    ///
    /// # Errors
    /// The executor's error. The caller then removes the object again.
    pub(crate) fn made(&mut self, object: Object) -> Result<(), Status> {
        self.execute_with(|e, core| e.made(core, object))
    }

    /// Tells the executor that an object is about to be removed.
    pub(crate) fn gone(&mut self, object: Object) {
        self.execute_with(|e, core| e.gone(core, object));
    }

    /// Sets whether other threads do jobs while one thread has the core. If not, only copies that may be slow become
    /// jobs.
    pub fn set_helped(&mut self, on: bool) {
        self.has_helpers = on;
    }

    /// Estimated time of the pieces that messages were cut into since the last call, ns.
    pub(crate) fn pieces_ns(&self) -> u64 {
        self.objects.pieces.take() * PIECE_NS
    }

    /// Moves all outputs to the end of `out`.
    pub fn drain_outputs(&mut self, out: &mut Vec<Output>) {
        out.extend(self.outputs.drain(..));
    }

    /// Adds a QP to the agenda of its vRNIC.
    pub(crate) fn make_runnable(&mut self, qp: Handle<Qp>) {
        enqueue(&mut self.objects.qps, &mut self.sched, qp);
    }

    pub(crate) fn arm_timer(&mut self, qp: Handle<Qp>, delay_ns: u64) {
        let at = self.now.saturating_add(delay_ns);
        let Some(q) = self.objects.qps.get_mut(qp) else { return };
        q.timer = q.timer.wrapping_add(1);
        let (vrnic, due) = (q.vrnic, Due::Wait(qp, q.timer));
        self.arm(vrnic, at, due);
    }

    /// Sets a timer of a vRNIC.
    pub(crate) fn arm(&mut self, vrnic: VrnicId, at: u64, due: Due) {
        let (qps, cqs) = (&self.objects.qps, &self.objects.cqs);
        let stopped = |&(at, due): &(u64, Due)| match due {
            Due::Wait(qp, timer) => qps.get(qp).is_none_or(|q| q.timer != timer),
            Due::Pace(qp) => qps.get(qp).is_none(),
            Due::Backlog(qp) => qps.get(qp).and_then(Qp::datagrams).is_none_or(|d| d.backlog.due_at != at),
            Due::Events(cq) => cqs.get(cq).is_none(),
        };
        self.sched.arm(vrnic, at, due, stopped);
    }

    pub(crate) fn push_output(&mut self, o: Output) {
        self.outputs.push_back(o);
    }

    pub(crate) fn emit(&mut self, session: SessionId, kind: AsyncEvent, handle: u32) {
        self.outputs.push_back(Output::Async { session, kind, handle });
        let shared = kind
            .is_of_qp()
            .then(|| self.objects.qpns.get(&Qpn(handle)).and_then(|&h| self.objects.qps.get(h)))
            .flatten();
        for &(session, _) in shared.iter().flat_map(|q| &q.openers) {
            self.outputs.push_back(Output::Async { session, kind, handle });
        }
    }
}

/// Adds a QP to the agenda of its vRNIC, unless it is there already.
pub(crate) fn enqueue(qps: &mut Slab<Qp>, sched: &mut Scheduler, qp: Handle<Qp>) {
    if let Some(q) = qps.get_mut(qp)
        && !std::mem::replace(&mut q.queued, true)
    {
        sched.enqueue(q.vrnic, qp);
    }
}
