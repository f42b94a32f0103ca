//! Work queue elements under execution: private copies, in boxes that are used again.

use unirdma_abi as abi;

use unirdma_formats::WrOpcode;

use super::bounce_memory::Staged;
use crate::backoff::Stall;

/// Why a send WQE stands still.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Wait {
    #[default]
    No,
    /// No answer: try again at the deadline.
    Ack,
    /// No receive at the peer: try again at the deadline.
    Rnr,
    /// No room for a datagram's packet.
    Tx,
    /// The process of some memory moves its pages or is slow, or there is no room in the receiver's stage or among the
    /// jobs: try again at the deadline.
    Memory,
    /// The job with this number copies.
    Job(u64),
}

/// A send WQE under execution: a private copy, so that the driver cannot change it after it was checked.
pub(crate) struct SendOp {
    pub wqe: abi::SqWqe,
    /// The opcode that `wqe.opcode` stands for. SEND for an opcode that does not exist; such a WQE has failed already.
    pub op: WrOpcode,
    pub wait: Wait,
    pub sges: [abi::Sge; abi::MAX_SGE as usize],
    pub num_sge: usize,
    pub inline: [u8; abi::MAX_INLINE as usize],
    pub total: u64,
    pub done: u64,
    /// Checked, and under way at the peer.
    pub started: bool,
    /// Members of a multicast group on this host that have a datagram already.
    pub served: u32,
    pub retries_left: u8,
    pub rnr_left: u8,
    /// The value that an atomic has found at the peer, once it was executed there.
    pub found: Option<u64>,
    pub stall: Stall,
}

impl Default for SendOp {
    fn default() -> Self {
        SendOp {
            wqe: abi::SqWqe::default(),
            op: WrOpcode::Send,
            wait: Wait::No,
            sges: [abi::Sge::default(); abi::MAX_SGE as usize],
            num_sge: 0,
            inline: [0; abi::MAX_INLINE as usize],
            total: 0,
            done: 0,
            started: false,
            served: 0,
            retries_left: 0,
            rnr_left: 0,
            found: None,
            stall: Stall::default(),
        }
    }
}

/// A receive WQE that a message is being put into.
pub(crate) struct Recv {
    pub wr_id: u64,
    pub sges: [abi::Sge; abi::MAX_SGE as usize],
    pub num_sge: usize,
    pub total: u64,
    /// The WQE was well-formed.
    pub valid: bool,
    /// Where its message waits to be placed.
    pub staged: Option<Staged>,
}

impl Default for Recv {
    fn default() -> Self {
        Recv {
            wr_id: 0,
            sges: [abi::Sge::default(); abi::MAX_SGE as usize],
            num_sge: 0,
            total: 0,
            valid: false,
            staged: None,
        }
    }
}

/// Boxes of WQEs that are over, for new ones: no allocation for each request.
#[derive(Default)]
#[allow(clippy::vec_box)]
pub(crate) struct Spare {
    works: Vec<Box<SendOp>>,
    recvs: Vec<Box<Recv>>,
}

impl Spare {
    /// Most boxes of each kind that are kept.
    const MAX: usize = 4096;

    pub fn work(&mut self) -> Box<SendOp> {
        self.works.pop().unwrap_or_default()
    }

    pub fn keep_work(&mut self, w: Box<SendOp>) {
        if self.works.len() < Self::MAX {
            self.works.push(w);
        }
    }

    pub fn recv(&mut self) -> Box<Recv> {
        self.recvs.pop().unwrap_or_default()
    }

    pub fn keep_recv(&mut self, r: Box<Recv>) {
        if self.recvs.len() < Self::MAX {
            self.recvs.push(r);
        }
    }
}
