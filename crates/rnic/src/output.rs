//! Notifications that the device delivers to sessions.

use unirdma_formats::AsyncEvent;

use crate::objects::SessionId;

/// A notification for a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// A completion event of CQ `cqn` on completion event virtqueue `queue`.
    Completion {
        /// The session that gets it.
        session: SessionId,
        /// The completion event virtqueue, counted from 0.
        queue: u16,
        /// The number of the CQ.
        cqn: u32,
        /// The program has asked for it by REQ_NOTIFY_CQ.
        asked: bool,
    },
    /// The command of this session that was delayed can be answered.
    Released {
        /// The session whose command it is.
        session: SessionId,
    },
    /// CM_EVENT has something for completion event virtqueue `queue`.
    Connection {
        /// The session that gets it.
        session: SessionId,
        /// The completion event virtqueue, counted from 0.
        queue: u16,
    },
    /// An asynchronous event.
    Async {
        /// The session that gets it.
        session: SessionId,
        /// The kind of event.
        kind: AsyncEvent,
        /// QPN, CQ handle or port.
        handle: u32,
    },
}

impl Output {
    /// The session that it is for.
    pub fn session(&self) -> SessionId {
        match *self {
            Output::Completion { session, .. }
            | Output::Connection { session, .. }
            | Output::Released { session }
            | Output::Async { session, .. } => session,
        }
    }
}
