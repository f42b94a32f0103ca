//! The software RNIC, sans-IO: vRNICs, their objects, and the work requests that flow between them.
//!
//! May depend on formats, the device ABI and the `mem` crate; it has no socket, clock, thread or
//! environment inside. It must never trust a handle, key, index or WQE of a session, and must do no
//! allocation, system call or log per work request (ARCHITECTURE.md, invariant 8, has the exceptions).
//!
//! Its rooms, each of which knows only those above it:
//!
//! * `objects`: what there is, as data: vRNICs, sessions, PDs, MRs, CQs, SRQs, QPs with their connections; names, uses, quotas;
//! * `budget`, `sched`, `polled`, `pace`, `job`, `multicast`, `capture`, `net` with `tx` and `path`: whose turn it is, doorbell pages
//!   that are polled, limits, copies that are done elsewhere, group members, captured packets, routes and packets to send; none of them knows the core;
//! * `core`: the struct that holds those, and what every room does with it: `complete` (completions, events, failures), `pacing`,
//!   `tapping`, `access` (keys to memory), `follow` (where connections lead), `uncouple` (connections within a host that leave it);
//! * `commands`, `vnics`, `sessions`, `pause`: what the control path asks; `burial`: how dead objects are freed; `arrivals`:
//!   packets that come in; `turns`: rounds and turns. They leave the work of QPs to an `executor`, which is a trait;
//! * `software`: the executor that does all in this process. `exec`: work requests between QPs of this host, WQEs, receives, jobs;
//!   `wire`: connections to other hosts, with a requester and a responder; `datagram`: the unreliable datagrams of both;
//! * `cm`: connection management, which sends and hears messages, and moves no QP; `rnic`: the whole; `record`: a vRNIC as data,
//!   saved and restored.
//!
//! The type is [`Rnic`]. Its methods come in classes:
//!
//! * *commands* of the control path (`add_vnic`, `create_qp`, `modify_qp`, ...): answered at once, at the time that [`Rnic::at`] says;
//! * *inputs*: [`Core::unpark`] (a kick came), [`Rnic::handle_packet`] (a packet came), [`Rnic::poll_by`] (time has
//!   passed, look at the doorbells), [`Core::end_job`] (a copy was made);
//! * *outputs*: [`Core::drain_outputs`] (events for sessions), [`Core::tx`] (packets), [`Core::take_job`] (a copy that the caller
//!   makes without holding the RNIC), [`Rnic::next_timeout`].
//!
//! After every command or input the caller drains the outputs. After a poll it also sends the packets and does the jobs.
//! [`Rnic::poll_by`] says whether it did anything; a caller that gets `false` may let idle sessions fall asleep with
//! [`Core::park_idle`].

mod access;
mod arrivals;
mod attr;
mod budget;
mod burial;
mod capture;
mod cm;
mod commands;
mod complete;
mod core;
mod datagram;
mod exec;
mod executor;
mod follow;
mod job;
mod multicast;
mod net;
mod objects;
mod output;
mod pace;
mod pacing;
mod path;
mod pause;
#[cfg(test)]
mod pieces;
mod polled;
mod random;
mod reach;
mod record;
mod rnic;
mod sched;
#[cfg(test)]
mod scripted;
mod sessions;
mod slab;
mod software;
mod stall;
mod tapping;
mod turns;
mod tx;
mod uncouple;
mod vnics;
mod wire;

pub use attr::{Transition, transition};
pub use budget::{Terms, TimeBudget};
pub use burial::MAX_BURIED;
pub use capture::{Capture, Captured};
pub use cm::CmEventKind;
pub use core::Core;
pub use job::Job;
pub use multicast::MAX_MULTICAST_QPS;
pub use objects::{
    Account, Backing, Counters, CreateQp, Dropped, Limits, MrNote, OpenXrcd, PageList, QpInfo, Resolve, SessionId,
    SrqAttr, SrqInfo, Usage, VnicConfig, VnicId, WireCounters,
};
pub use output::Output;
pub use pace::{DEFAULT_WEIGHT, Share};
pub use path::{Arrival, Path, Route, WireDrops};
pub use polled::Bells;
pub use random::{Rng, Seed};
pub use record::{Attach, Attached, Flaw, Object, Record, RecordError, RestoreError, Way, What};
pub use rnic::Rnic;
pub use tx::{DATAGRAM_MAC, MAX_OUTER_BYTES, Sealed, Tx, TxPacket};
