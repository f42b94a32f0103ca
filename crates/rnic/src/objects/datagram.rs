//! Address handles, and datagrams that wait for a receive.

use std::collections::VecDeque;

use unirdma_formats::Gid;
use unirdma_formats::net::Flow;
use unirdma_formats::wire::{Extra, Packet};

use unirdma_mem::Fault;

use super::buffer_limits::{Room, Taken};
use super::ids::{SessionId, VrnicId};
use super::prefetch::Prefetched;
use super::queues::Pd;
use crate::path::Path;
use crate::slab::Handle;

/// An address handle.
pub(crate) struct Ah {
    pub owner: SessionId,
    /// Its number in its owner's session.
    pub number: u32,
    pub pd: Handle<Pd>,
    pub flow: Flow,
    pub target: Target,
    /// Datagrams sent with it leave: the vRNIC is up and has its source address, and no rule forbids them.
    pub linked: bool,
    /// A rule forbids to send with it.
    pub denied: bool,
    /// Static rate limit of datagrams sent with it ([`unirdma_formats::rate_kbps`]).
    pub static_rate: u8,
}

impl Ah {
    /// The address that it sends from.
    pub fn own(&self) -> Gid {
        Gid::from_ip(self.flow.src)
    }
}

#[derive(Clone, Copy)]
pub(crate) enum Target {
    /// A vRNIC of this host.
    Here(VrnicId),
    /// A plain RoCEv2 device.
    Foreign(Path),
    /// A vRNIC of another host: the host, and its group's VXLAN network identifier.
    There(Path, u32),
    /// The members of a multicast group.
    Many,
}

impl Target {
    /// The number of the group that it leads to, if that is another one.
    pub fn across(&self) -> Option<u32> {
        match self {
            Target::Foreign(path) | Target::There(path, _) => path.across.map(|(peer, _)| peer),
            Target::Here(_) | Target::Many => None,
        }
    }
}

/// The state of a UD QP beside its queues.
#[derive(Default)]
pub(crate) struct Datagrams {
    pub backlog: Backlog,
    /// The data of the next datagram to send, by the number of its WQE.
    pub fetched: Prefetched,
    /// Multicast groups that it is attached to.
    pub groups: Vec<Gid>,
}

/// Datagrams that wait a moment for a receive.
pub(crate) struct Backlog {
    pub held: VecDeque<Held>,
    /// Their bytes on the account of the receiver's vRNIC.
    pub taken: Taken,
    /// When its timer fires; `u64::MAX` if it has none.
    pub due_at: u64,
    pub placing: Placing,
}

impl Default for Backlog {
    fn default() -> Self {
        Backlog { held: VecDeque::new(), taken: Taken::default(), due_at: u64::MAX, placing: Placing::No }
    }
}

/// Progress of the first datagram of a backlog.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) enum Placing {
    /// It waits for a receive, or for the memory of one.
    #[default]
    No,
    /// The job with this number puts it into its receive, in the private memory of a process.
    Job(u64),
    /// The result of that job.
    Done(Result<(), Fault>),
}

pub(crate) struct Held {
    pub until: u64,
    pub flow: Flow,
    pub data: Box<[u8]>,
    pub note: Note,
}

impl Held {
    /// Bytes that it counts as.
    pub fn bytes(&self) -> usize {
        Self::bytes_of(self.data.len())
    }

    /// Bytes that a waiting datagram with `data` bytes of payload counts as.
    pub fn bytes_of(data: usize) -> usize {
        data + size_of::<Held>()
    }
}

impl Backlog {
    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// True while a job puts the first datagram into its receive.
    pub fn waits(&self) -> bool {
        matches!(self.placing, Placing::Job(_))
    }

    /// A job has ended.
    pub fn end(&mut self, number: u64, done: Result<u64, Fault>) {
        if matches!(self.placing, Placing::Job(job) if job == number) {
            // `SourceMoves` means here that the job was stopped: the datagram is tried again.
            let stopped = done == Err(Fault::SourceMoves);
            self.placing = if stopped { Placing::No } else { Placing::Done(done.map(|_| ())) };
        }
    }

    /// Appends a datagram, which has its room already.
    pub fn push(&mut self, d: Held) {
        self.held.push_back(d);
    }

    /// Takes the first datagram away.
    pub fn pop(&mut self) -> Option<Held> {
        let d = self.held.pop_front()?;
        self.taken.give(d.bytes());
        if self.held.is_empty() {
            // Otherwise the memory of a long list would never be freed.
            self.held.shrink_to(super::SPARE_ENTRIES);
        }
        Some(d)
    }

    /// Puts the last datagram that was taken back to the front.
    pub fn unpop(&mut self, d: Held, room: &Room) {
        self.taken.force(room, d.bytes());
        self.held.push_front(d);
    }

    /// Takes the first datagram away if it has waited too long.
    pub fn pop_expired(&mut self, now: u64) -> Option<Held> {
        let is_over = |d: &Held| d.until < now && matches!(self.placing, Placing::No);
        if self.held.front().is_some_and(is_over) { self.pop() } else { None }
    }
}

/// The parts of a datagram beside its payload that a completion reports.
#[derive(Clone, Copy)]
pub(crate) struct Note {
    pub imm: Option<u32>,
    pub src_qp: u32,
    pub solicited: bool,
    /// It came from another host or a plain device.
    pub wire: bool,
}

impl Note {
    /// The note of a datagram that stays on this host.
    pub fn of(p: &Packet<'_>) -> Self {
        let imm = (p.opcode.extra == Extra::Imm).then_some(p.extra);
        Note { imm, src_qp: p.deth.src_qp, solicited: p.solicited, wire: false }
    }

    /// The note of a packet that came in.
    pub fn of_arrival(p: &Packet<'_>) -> Self {
        Note { wire: true, ..Note::of(p) }
    }
}
