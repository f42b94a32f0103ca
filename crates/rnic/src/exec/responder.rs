//! The responder's checks of a request, and the effect of a refusal on both ends: the same for requests of this host
//! and for requests in packets (IBTA vol. 1, 9.7.4.1).

use unirdma_formats::wire::{flush, syndrome};
use unirdma_formats::{AsyncEvent, MAX_MSG_BYTES, Rkey, WcStatus, WrOpcode};
use unirdma_mem::{Fault, atomic_u64};

use super::{NoRecv, RecvDone};
use crate::access::{NeedsJob, Side, Tables, recv_side, remote, remote_access};
use crate::core::Core;
use crate::job::Word;
use crate::objects::{Objects, Qp, Recv};
use crate::slab::Handle;

/// The fields of a request that its responder checks.
#[derive(Clone, Copy)]
pub(crate) struct Request {
    pub op: WrOpcode,
    pub va: u64,
    pub rkey: Rkey,
    /// Number of bytes that it accesses in the responder's memory.
    pub len: u64,
    /// Immediate data, the key to invalidate, or the word of a FLUSH.
    pub word: u32,
    /// Number of outstanding requests that return data: READs, atomics and others.
    pub pending: usize,
}

/// Why a responder does not execute a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The responder does not answer at all.
    Silent,
    /// An index of the responder's ring jumped.
    Broken,
    /// No receive is posted.
    NotReady,
    /// There is no room for the message now.
    Full,
    /// The responder's memory moves.
    Moves,
    /// A job accesses the private memory of a process for the request, which is executed again when that job has ended.
    Later,
    /// The request is wrong: the status at the requester, and the responder's event.
    Request(WcStatus, AsyncEvent),
    /// The receive is wrong: the status at each side (IBTA vol. 1, 9.7.4.1.6 and 9.9.6.3).
    Receive { responder: WcStatus, requester: WcStatus },
}

pub(crate) const INVALID: Refusal = Refusal::Request(WcStatus::RemInvReqErr, AsyncEvent::QpReqErr);
pub(crate) const NO_ACCESS: Refusal = Refusal::Request(WcStatus::RemAccessErr, AsyncEvent::QpAccessErr);
pub(crate) const BAD_RECV: Refusal =
    Refusal::Receive { responder: WcStatus::LocProtErr, requester: WcStatus::RemOpErr };

impl From<NoRecv> for Refusal {
    fn from(e: NoRecv) -> Self {
        match e {
            NoRecv::Empty => Refusal::NotReady,
            NoRecv::Broken => Refusal::Broken,
        }
    }
}

/// The requester's status for a refusal, and the syndrome of the NAK (IBTA vol. 1, table 46).
const NAKS: [(WcStatus, u8); 3] = [
    (WcStatus::RemInvReqErr, syndrome::NAK_INVALID),
    (WcStatus::RemAccessErr, syndrome::NAK_ACCESS),
    (WcStatus::RemOpErr, syndrome::NAK_OPERATION),
];

/// The requester's status for a NAK; `None` if the NAK does not end a request.
pub(crate) fn status_of_nak(code: u8) -> Option<WcStatus> {
    NAKS.iter().find(|n| n.1 == code).map(|n| n.0)
}

impl Refusal {
    /// The syndrome of this refusal in a packet of responder `p`; `None` for no answer.
    pub fn syndrome(self, p: &Qp) -> Option<u8> {
        if self == Refusal::NotReady {
            return Some(syndrome::RNR_NAK | p.attr.min_rnr_timer);
        }
        let status = self.requester()?;
        NAKS.iter().find(|n| n.0 == status).map(|n| n.1)
    }

    /// The status of the request at its requester; `None` if this refusal does not end it.
    pub fn requester(self) -> Option<WcStatus> {
        match self {
            Refusal::Request(status, _) => Some(status),
            Refusal::Receive { requester, .. } => Some(requester),
            _ => None,
        }
    }

    /// True if this refusal fails the responder of an unreliable connection. The responder drops any other request that
    /// it cannot execute, and the requester gets no answer (IBTA vol. 1, 9.8.3). A message that is too long leaves its
    /// receive to the next one.
    pub fn fails_unreliable(self) -> bool {
        matches!(self, Refusal::Receive { responder, .. } if responder != WcStatus::LocLenErr)
    }
}

/// Checks whether QP `p` is set up for such a request, and the request's form. These checks come before the checks of
/// the request's receive and of its keys. A request that the QP is not set up for is an unsupported one (IBTA vol. 1,
/// 9.7.4.1.2); only wrong keys are refused as access errors.
#[inline]
pub(crate) fn check_form(p: &Qp, r: &Request) -> Result<(), Refusal> {
    let words = r.op.is_atomic() || r.op == WrOpcode::AtomicWrite;
    let no_resources = r.op.returns_data() && r.pending >= usize::from(p.attr.max_dest_rd_atomic);
    let bad_form = if r.op == WrOpcode::Flush { !flush::is_known(r.word) } else { r.len > MAX_MSG_BYTES };
    let need = remote_access(r.op);
    let fits = p.attr.qp_access_flags & need == need;
    if words && r.va % 8 != 0 || no_resources || bad_form || !fits { Err(INVALID) } else { Ok(()) }
}

/// True if a peer of QP `p` may flush the memory that a FLUSH names: a range, or a whole memory region.
fn may_flush(tables: &Tables<'_>, p: &Qp, r: &Request) -> bool {
    let need = remote_access(WrOpcode::Flush);
    match flush::parts(r.word) {
        // No memory region grants the placement PERSISTENT: the memory of a virtual machine or a process does not
        // outlive a power failure.
        (placement, _) if placement != flush::GLOBAL => false,
        (_, flush::RANGE) => tables.allows(remote(p, need, r.rkey, r.va), r.len),
        _ => tables.mrs.remote(r.rkey).is_some_and(|m| m.pd == p.pd && m.access & need != 0 && tables.lives(m)),
    }
}

impl Objects {
    /// Checks a request for QP `p`, except for its receive.
    pub fn check_request(&self, p: &Qp, r: &Request) -> Result<(), Refusal> {
        check_form(p, r)?;
        self.check_keys(p, r)
    }

    /// Checks the keys of a request for QP `p`.
    pub fn check_keys(&self, p: &Qp, r: &Request) -> Result<(), Refusal> {
        let tables = self.memory();
        let allowed = match (r.op, remote_access(r.op)) {
            (WrOpcode::Flush, _) => may_flush(&tables, p, r),
            (WrOpcode::SendInv, _) => self.may_invalidate(p, Rkey(r.word)),
            (_, 0) => true,
            (_, need) => tables.allows(remote(p, need, r.rkey, r.va), r.len),
        };
        if allowed { Ok(()) } else { Err(NO_ACCESS) }
    }

    /// Checks that a receive can hold `len` bytes of a message; `None` for a message that is not stored in the receive.
    /// The keys are looked up when bytes are stored, because SGEs that the message does not reach need no valid key.
    pub fn check_recv(&self, recv: &Recv, len: Option<u64>) -> Result<(), Refusal> {
        if !recv.valid {
            return Err(Refusal::Receive { responder: WcStatus::LocQpOpErr, requester: WcStatus::RemOpErr });
        }
        if len.is_some_and(|len| len > recv.total) {
            return Err(Refusal::Receive { responder: WcStatus::LocLenErr, requester: WcStatus::RemInvReqErr });
        }
        Ok(())
    }

    /// The refusal that comes first for a receive of QP `p` that has the flaw `refusal`. Packets of a message that is
    /// too long are stored until one finds no room, and an earlier one may meet an SGE without a valid key.
    #[cold]
    pub fn first_refusal(&self, p: &Qp, recv: &Recv, refusal: Refusal) -> Refusal {
        let stored = recv.total - recv.total % u64::from(p.mtu);
        let granted = !recv.valid || self.memory().allows_first(recv_side(p, recv), stored);
        if granted { refusal } else { BAD_RECV }
    }
}

impl Core {
    /// Called for a request that is refused in a way that fails QP `h`. If the request has taken a receive, the receive
    /// completes with an error. Else returns the event to raise (IBTA vol. 1, C9-222.1.1).
    pub(crate) fn end_refused(&mut self, h: Handle<Qp>, refusal: Refusal) -> Option<AsyncEvent> {
        let (status, event) = match refusal {
            Refusal::Request(status, event) => (status, Some(event)),
            Refusal::Receive { responder, .. } => (responder, None),
            _ => return None,
        };
        if self.objects.qps.get(h).is_none_or(|q| q.recv.is_none()) {
            return event;
        }
        self.finish_recv(h, RecvDone { status, ..RecvDone::flushed() });
        None
    }
}

/// The operation of an atomic. `compare_add` is the value to compare with or the value to add.
pub(crate) fn word_of(op: WrOpcode, compare_add: u64, swap: u64) -> Word {
    if op == WrOpcode::CmpSwap { Word::Swap { compare: compare_add, swap } } else { Word::Add(compare_add) }
}

impl Tables<'_> {
    /// Executes an operation on the word at the beginning of `side`, and returns the old value.
    pub fn word(&self, side: Side<'_>, word: Word) -> Result<u64, NeedsJob> {
        let at = self.at(side, 0, 8).ok_or(Fault::Destination)?;
        if at.at().takes_time() {
            return Err(NeedsJob::Job);
        }
        Ok(self.watched(&[side], (0, 8), || atomic_u64(at, |v| word.apply(v)))?)
    }
}
