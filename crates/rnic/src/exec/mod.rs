//! Execution of work requests between QPs of this host, and the parts that both transports share.

mod atomics;
mod fast_path;
mod jobs;
mod local;
mod receive;
mod responder;
mod wqe;

pub(crate) use local::{Outcome, SMALL_SLICE};
pub(crate) use receive::{NoRecv, RecvDone};
pub(crate) use responder::{BAD_RECV, INVALID, NO_ACCESS, Refusal, Request, check_form, status_of_nak, word_of};
pub(crate) use wqe::load;
