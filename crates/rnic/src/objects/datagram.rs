//! Address handles, and datagrams that wait for a receive.

use std::collections::VecDeque;

use unirdma_formats::Gid;
use unirdma_formats::net::Flow;
use unirdma_formats::wire::{Extra, Packet};

use super::ids::{SessionId, VnicId};
use super::queues::Pd;
use crate::path::Path;
use crate::slab::Handle;

/// An address handle.
pub(crate) struct Ah {
    pub owner: SessionId,
    /// What its owner calls it.
    pub number: u32,
    pub pd: Handle<Pd>,
    pub flow: Flow,
    pub target: Target,
    /// What is sent with it leaves.
    pub linked: bool,
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
    Here(VnicId),
    /// A plain RoCEv2 device.
    Foreign(Path),
    /// A vRNIC of another host: the host, and its group's VXLAN network identifier.
    There(Path, u32),
    /// The members of a multicast group.
    Many,
}

/// The state of a UD QP beside its queues.
#[derive(Default)]
pub(crate) struct Datagrams {
    pub backlog: Backlog,
    /// Multicast groups that it is attached to.
    pub groups: Vec<Gid>,
}

/// Datagrams that wait a moment for a receive.
#[derive(Default)]
pub(crate) struct Backlog {
    pub held: VecDeque<Held>,
    pub bytes: usize,
    /// Its QP stands among those that want a turn in a moment.
    pub listed: bool,
}

pub(crate) struct Held {
    pub until: u64,
    pub flow: Flow,
    pub data: Box<[u8]>,
    pub note: Note,
}

impl Backlog {
    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// Its QP has its turn.
    pub fn has_turn(&mut self) {
        self.listed = false;
    }
}

/// What a datagram says beside its bytes.
#[derive(Clone, Copy)]
pub(crate) struct Note {
    pub imm: Option<u32>,
    pub src_qp: u32,
    pub solicited: bool,
}

impl Note {
    pub fn of(p: &Packet<'_>) -> Self {
        let imm = (p.opcode.extra == Extra::Imm).then_some(p.extra);
        Note { imm, src_qp: p.deth.src_qp, solicited: p.solicited }
    }
}
