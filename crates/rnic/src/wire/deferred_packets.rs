//! Packets that need a job: their payload goes into the private memory of a process, which is not accessed while the
//! RNIC is locked.
//!
//! Such a packet waits in its QP's inbox, and later packets wait behind it. When the job has ended, the packet is
//! executed again, in the QP's turn, and uses the job's result instead of accessing the memory. So a packet is handled
//! in the same way whether its memory is mapped or not, and nothing is answered or completed before the memory has the
//! data. A job stores the waiting payload of a message, up to 64 KiB.
//!
//! Requests of the peer and its answers are two directions, and so two inboxes: neither waits for the other.

use unirdma_formats::QpState;
use unirdma_formats::wire::Packet;
use unirdma_mem::Fault;

use crate::core::{Core, OP_NS, copy_ns};
use crate::exec::Refusal;
use crate::job::JobResult;
use crate::objects::{DeferredPackets, PacketRun, Qp, Wire};
use crate::slab::Handle;

/// If a vRNIC has enough jobs, or no room for the bytes of a job, the next try is after this time, ns. A request that
/// was dropped for this reason must be sent again.
pub(super) const FULL_NS: u64 = 50_000;

/// The direction of packets of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    /// Requests of the peer.
    Requests,
    /// Its answers to our requests.
    Answers,
}

impl Direction {
    fn inbox(self, w: &mut Wire) -> &mut DeferredPackets {
        match self {
            Direction::Requests => &mut w.resp.inbox,
            Direction::Answers => &mut w.inbox,
        }
    }
}

/// Handles the outcome of creating a job for a request that needs a process's memory: the request waits for the job, is
/// executed later because there is no room for a job, or finds the returned fault.
pub(super) fn later(w: &mut Wire, made: JobResult, packets: u32, now: u64) -> Result<Fault, Refusal> {
    match made {
        JobResult::Job(number) => {
            w.resp.inbox.wait(number, packets);
            Err(Refusal::Later)
        }
        JobResult::Full => {
            w.resp.stall.rest(now, FULL_NS);
            Err(Refusal::Full)
        }
        JobResult::Slow => Ok(Fault::DestinationMoves),
        JobResult::Nothing(fault) => Ok(fault),
    }
}

impl Core {
    /// Executes a packet that came in, or lets it wait for a job.
    pub(super) fn take_in(&mut self, h: Handle<Qp>, w: &mut Wire, direction: Direction, p: &Packet<'_>) {
        let room = |core: &Core| core.objects.vrnic_of_qp(h).map(|id| core.objects.room(id)).unwrap_or_default();
        if !direction.inbox(w).is_empty() {
            // If there is no room, it is as if the network had lost the packet.
            if !direction.inbox(w).push(p, &room(self)) {
                self.objects.count_dropped(h);
            }
            return;
        }
        self.execute_packet(h, w, direction, PacketRun::of(p));
        if direction.inbox(w).waits() {
            let buffer = self.jobs.buffer();
            direction.inbox(w).begin(p, &room(self), buffer);
        }
    }

    fn execute_packet(&mut self, h: Handle<Qp>, w: &mut Wire, direction: Direction, run: PacketRun<'_>) {
        match direction {
            Direction::Requests => self.on_request(h, w, run),
            Direction::Answers => self.on_response(h, w, run),
        }
        if direction.inbox(w).waits() {
            self.objects.serve(h);
        }
    }

    /// Executes packets of QP `h` that have waited for a job. Returns the approximate cost, nanoseconds.
    pub(crate) fn take_up(&mut self, h: Handle<Qp>, allowance: u64) -> u64 {
        let turn = self.with_wire(h, |core, w| {
            let mut cost = 0;
            while cost < allowance {
                let Some(n) =
                    core.take_up_one(h, w, Direction::Requests).or_else(|| core.take_up_one(h, w, Direction::Answers))
                else {
                    break;
                };
                cost += OP_NS + copy_ns(n as u64) + core.pieces_ns();
            }
            cost
        });
        turn.unwrap_or(0)
    }

    /// Executes a packet that has waited for a job. Returns its length in bytes.
    fn take_up_one(&mut self, h: Handle<Qp>, w: &mut Wire, direction: Direction) -> Option<usize> {
        // Without a link no packets come in, but those that have come in are executed: a job may have executed an
        // atomic already.
        if self.objects.qps.get(h).is_none_or(|q| q.broken || q.state == QpState::Err) {
            *direction.inbox(w) = DeferredPackets::default();
            return None;
        }
        let lent = direction.inbox(w).lend()?;
        let p = lent.packet();
        let n = p.payload.len();
        self.execute_packet(h, w, direction, lent.run(&p));
        if let Some(buffer) = direction.inbox(w).take_back(lent) {
            self.jobs.keep_buffer(buffer);
        }
        Some(n)
    }
}
