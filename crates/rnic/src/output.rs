//! What sessions must be told.

use unirdma_formats::AsyncEvent;

use crate::objects::SessionId;

/// Something a session must be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// A completion event of CQ `cqn` on completion event virtqueue `queue`.
    Completion {
        /// Whom.
        session: SessionId,
        /// Which queue, counted from 0.
        queue: u16,
        /// Which CQ.
        cqn: u32,
    },
    /// The command of this session that was delayed can be answered.
    Released {
        /// Whose.
        session: SessionId,
    },
    /// CM_EVENT has something for completion event virtqueue `queue`.
    Connection {
        /// Whom.
        session: SessionId,
        /// Which queue, counted from 0.
        queue: u16,
    },
    /// An asynchronous event.
    Async {
        /// Whom.
        session: SessionId,
        /// What.
        kind: AsyncEvent,
        /// QPN, CQ handle or port.
        handle: u32,
    },
}

impl Output {
    /// Whom it is for.
    pub fn session(&self) -> SessionId {
        match *self {
            Output::Completion { session, .. }
            | Output::Connection { session, .. }
            | Output::Released { session }
            | Output::Async { session, .. } => session,
        }
    }
}
