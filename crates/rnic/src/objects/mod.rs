//! The objects of all vRNICs of a host, as data: their fields, the numbers by which sessions name them, their users,
//! and their share of quotas. Nothing here sends, copies or completes anything.

mod bounce;
mod bounce_memory;
mod buffer_limits;
mod datagram;
mod dead_objects;
mod deferred_drop;
mod deferred_packets;
mod doorbell;
mod fast_reg;
mod handles;
mod ids;
mod memory_state;
mod mr;
mod prefetch;
mod qp;
mod qpns;
mod queues;
mod revoked_regions;
mod send_op;
mod session;
mod vrnic;
mod window;
mod wire;

use std::cell::Cell;
use std::collections::HashMap;

use unirdma_formats::{Gid, QpType, Qpn};

use crate::slab::{Handle, Slab};
pub(crate) use bounce_memory::{BounceMemory, Staged};
pub use buffer_limits::Account;
pub(crate) use buffer_limits::{Room, Rooms, Taken};
pub(crate) use datagram::{Ah, Backlog, Datagrams, Held, Note, Placing, Target};
pub(crate) use dead_objects::{Dead, DeadObject, DeadObjects, Remains};
pub use deferred_drop::Dropped;
pub(crate) use deferred_packets::{DeferredPackets, PacketRun};
pub(crate) use doorbell::{DoorbellPage, NO_SLOT, bit_of};
pub(crate) use fast_reg::Freed;
pub use fast_reg::PageList;
pub use ids::{SessionId, VrnicId};
pub(crate) use ids::{SessionKind, VrnicKind};
pub(crate) use memory_state::{MemoryState, PAGE_TIME};
pub use mr::{Backing, Resolve, Served};
pub(crate) use mr::{Mr, MrTable, Reach, Window, is_range};
pub(crate) use prefetch::Prefetched;
pub(crate) use qp::{Connection, Local, Pause, Qp};
pub use qp::{CreateQp, QpInfo};
pub(crate) use qpns::QpnSpace;
pub(crate) use queues::{Cq, Domains, Moderation, Pd, Srq, XrcSrq, Xrcd};
pub use queues::{OpenXrcd, SrqAttr, SrqInfo};
pub(crate) use revoked_regions::Revoked;
pub(crate) use send_op::{Recv, SendOp, Spare, Wait};
pub(crate) use session::{Handles, Session};
pub(crate) use vrnic::{Begun, Used, Vrnic};
pub use vrnic::{Counters, Failures, Limits, MrNote, Usage, VfPath, VfUse, VrnicConfig, WireCounters};
pub(crate) use wire::{
    Answer, Copies, Flight, Message, Responder, WINDOW_MAX, WINDOW_MIN, Window as CongestionWindow, Wire, transport_of,
};

/// An empty queue of packets keeps its memory for this number of entries, so that a packet that comes alone needs no
/// allocation.
const SPARE_ENTRIES: usize = 4;

/// Largest path MTU, bytes.
pub(crate) const MAX_MTU: u32 = 4096;
/// Most outstanding READs and atomics of a QP, each way.
pub(crate) const MAX_RD_ATOMIC: u8 = 128;

/// The tables of objects.
#[derive(Default)]
pub(crate) struct Objects {
    pub vrnics: Slab<Vrnic, VrnicKind>,
    /// By group and GID.
    pub by_gid: HashMap<(u32, Gid), Vec<VrnicId>>,
    /// vRNICs that have VFs, by group and the VF's GID. vRNICs of one instance share a VF.
    pub by_vf: HashMap<(u32, Gid), Vec<VrnicId>>,
    pub sessions: Slab<Session, SessionKind>,
    pub dropped: Dropped,
    pub dead_objects: DeadObjects,
    pub doors: Slab<DoorbellPage>,
    pub pds: Slab<Pd>,
    pub mrs: MrTable,
    pub ahs: Slab<Ah>,
    pub srqs: Slab<Srq>,
    /// XRC SRQs by number.
    pub srq_numbers: HashMap<u32, Handle<Srq>>,
    pub xrcds: Slab<Xrcd>,
    pub domains: Domains,
    pub cqs: Slab<Cq>,
    pub qps: Slab<Qp>,
    pub qpns: HashMap<Qpn, Handle<Qp>>,
    /// Which numbers new QPs may get.
    pub qpn_space: QpnSpace,
    pub spare: Spare,
    /// The vRNIC in whose memory a hole was touched last, until the value is taken.
    pub touched: Cell<Option<VrnicId>>,
    /// The number of pieces that messages were cut into, without the first one of each, until the value is taken.
    pub pieces: Cell<u64>,
}

impl Objects {
    /// The vRNIC of a group that has a GID.
    pub fn find_vrnic(&self, group: u32, gid: Gid) -> Option<VrnicId> {
        if gid.is_zero() {
            return None;
        }
        self.by_gid.get(&(group, gid))?.first().copied()
    }

    /// The vRNICs of a group that have the VF with this GID.
    pub fn vrnics_on_vf(&self, group: u32, gid: Gid) -> &[VrnicId] {
        self.by_vf.get(&(group, gid)).map_or(&[], |v| v)
    }

    /// The VF that the programs of a vRNIC have.
    pub fn vf_of(&self, id: VrnicId) -> Option<VfPath> {
        self.vrnics.get(id.0)?.vf_use.vf
    }

    /// The vRNIC of a QP.
    pub fn vrnic_of_qp(&self, h: Handle<Qp>) -> Option<VrnicId> {
        self.qps.get(h).map(|q| q.vrnic)
    }

    /// The QP of a vRNIC for the general services, if a driver has made one.
    pub fn gsi_of(&self, id: VrnicId) -> Option<Handle<Qp>> {
        self.vrnics.get(id.0)?.gsi
    }

    /// True if the link of a vRNIC is up.
    pub fn is_up(&self, id: VrnicId) -> bool {
        self.vrnics.get(id.0).is_some_and(|v| v.up)
    }

    /// Counts something for a QP and its vRNIC.
    pub fn count(&mut self, h: Handle<Qp>, f: impl Fn(&mut Counters)) {
        let Some(q) = self.qps.get_mut(h) else { return };
        f(&mut q.counters);
        if let Some(v) = self.vrnics.get_mut(q.vrnic.0) {
            f(&mut v.counters);
        }
    }

    /// A message for an unreliable QP was dropped.
    pub fn count_dropped(&mut self, h: Handle<Qp>) {
        self.count(h, |c| c.dropped += 1);
    }

    /// The room of a vRNIC for packets that wait for jobs.
    pub fn room(&self, id: VrnicId) -> Room {
        self.vrnics.get(id.0).map(|v| v.rooms.jobs.clone()).unwrap_or_default()
    }

    /// The room of a vRNIC for things other than packets and datagrams.
    pub fn other_room(&self, id: VrnicId) -> Room {
        self.vrnics.get(id.0).map(|v| v.rooms.others.clone()).unwrap_or_default()
    }

    /// The room of a vRNIC for copies of requests that are under way.
    pub fn copies_room(&self, id: VrnicId) -> Room {
        self.vrnics.get(id.0).map(|v| v.rooms.copies.clone()).unwrap_or_default()
    }

    /// A job reaches the memory that QP `h` answers for.
    pub fn serve(&mut self, h: Handle<Qp>) {
        self.qps.get_mut(h).into_iter().for_each(|q| q.served_by += 1);
    }

    /// QP `h` no longer needs the receive that it has taken, if it has one: returns its `wr_id`.
    pub fn end_recv(&mut self, h: Handle<Qp>) -> Option<u64> {
        let q = self.qps.get_mut(h)?;
        let recv = q.recv.take()?;
        if let Some(srq) = q.srq.filter(|_| q.typ == QpType::XrcRecv) {
            self.use_srq(srq, false);
        }
        let wr_id = recv.wr_id;
        self.spare.keep_recv(recv);
        Some(wr_id)
    }

    /// QP `h` no longer executes its send WQE, if it has one.
    pub fn end_work(&mut self, h: Handle<Qp>) {
        if let Some(w) = self.qps.get_mut(h).and_then(|q| q.work.take()) {
            self.spare.keep_work(w);
        }
    }

    /// True if a QP may get this number.
    pub fn is_free_qpn(&self, qpn: Qpn) -> bool {
        qpns::is_ordinary(qpn.0) && !self.qpns.contains_key(&qpn)
    }

    /// The peer QP, if it would answer: connected to us, able to receive, at our PSN, and both have a link.
    pub fn answering_peer(&mut self, h: Handle<Qp>) -> Option<Handle<Qp>> {
        let q = self.qps.get(h).filter(|q| q.linked)?;
        let (dest, local) = (q.dest(), q.local()?);
        let cached = local.qp.filter(|&p| self.qps.get(p).is_some_and(|p| p.qpn == dest));
        let ph = match cached {
            Some(p) => p,
            None => *self.qpns.get(&dest)?,
        };
        let p = self.qps.get(ph)?;
        let connected = p.vrnic == local.vrnic
            && p.dest() == q.qpn
            && p.local().is_some_and(|l| l.vrnic == q.vrnic)
            && p.typ == q.typ.peer();
        // An unreliable responder takes any PSN where a message begins.
        let in_sequence = p.rq_psn == q.sq_psn || !q.typ.is_reliable();
        if !(p.receives() && connected && in_sequence) {
            return None;
        }
        if cached.is_none()
            && let Some(q) = self.qps.get_mut(h)
        {
            q.connection = Connection::Local(Local { qp: Some(ph), ..local });
        }
        Some(ph)
    }
}
