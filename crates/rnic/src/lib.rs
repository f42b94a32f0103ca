//! The software RNIC, sans-IO: vRNICs, their objects, and the work requests that flow between them.
//!
//! May depend on formats, the device ABI and the `mem` crate; it has no socket, clock, thread or
//! environment inside. It must never trust a handle, key, index or WQE of a session, and must do no
//! allocation, system call or log per work request (ARCHITECTURE.md, invariant 8, has the exceptions).
//!
//! The core type is [`Rnic`]. Its methods come in classes:
//!
//! * *commands* of the control path (`add_vnic`, `create_qp`, `modify_qp`, ...): answered at once;
//! * *inputs*: [`Rnic::unpark`] (a kick came), [`Rnic::handle_packet`] (a packet came), [`Rnic::poll_by`] (time has
//!   passed, look at the doorbells), [`Rnic::end_job`] (a copy was made);
//! * *outputs*: [`Rnic::drain_outputs`] (events for sessions), [`Rnic::tx`] (packets), [`Rnic::take_job`] (a copy that the caller
//!   makes without holding the RNIC), [`Rnic::next_timeout`].
//!
//! After every command or input the caller drains the outputs. After a poll it also sends the packets and does the jobs.
//! [`Rnic::poll_by`] says whether it did anything; a caller that gets `false` may let idle sessions fall asleep with
//! [`Rnic::park_idle`].

mod access;
mod attr;
mod capture;
mod cm;
mod commands;
mod datagram;
mod exec;
mod job;
mod mr;
mod multicast;
mod names;
mod objects;
mod pace;
mod port;
mod random;
mod rnic;
mod sched;
mod slab;
mod srq;
mod stage;
mod stall;
mod window;
mod wire;
mod wqe;
mod xrc;

pub use attr::{Transition, transition};
pub use capture::Capture;
pub use cm::CmEventKind;
pub use datagram::DATAGRAM_MAC;
pub use job::Job;
pub use mr::{Backing, Resolve};
pub use multicast::MAX_MULTICAST_QPS;
pub use objects::{Counters, CreateQp, QpInfo, SessionId, VnicId, WireCounters};
pub use pace::Share;
pub use random::{Rng, Seed};
pub use rnic::{Limits, MrNote, Output, Rnic, Usage, VnicConfig};
pub use sched::DEFAULT_WEIGHT;
pub use srq::{SrqAttr, SrqInfo};
pub use wire::{Arrival, MAX_OUTER_BYTES, Path, Route, Tx, TxPacket, WireDrops};
pub use xrc::OpenXrcd;
