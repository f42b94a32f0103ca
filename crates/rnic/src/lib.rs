//! The software RNIC, sans-IO: vRNICs, their objects, and the work requests that flow between them.
//!
//! May depend on formats, the device ABI and the `mem` crate; it has no socket, clock, thread or environment inside. It
//! must never trust a handle, key, index or WQE of a session, and must do no allocation, system call or log per work
//! request (ARCHITECTURE.md, invariant 8, has the exceptions).
//!
//! Its modules, in layers. Each imports only from modules that are named before it; methods of `Core` are called from
//! any layer below `core`.
//!
//! * `slab`, `random`, `path`, `tx`, `pace`, `budget`, `backoff`, `attr`: tables with handles, random numbers, paths to
//!   hosts, packets to send, rate limits, time budgets, intervals between tries, the table of QP transitions;
//! * `objects`: the objects, as data: vRNICs, sessions, PDs, MRs, CQs, SRQs, QPs with their connections; names, use
//!   counts, quotas;
//! * `access`: from keys to memory; `sched`, `doorbell_poll`, `job`, `multicast`, `capture`, `net`, `vf_peers`,
//!   `output`: the order of turns, polled doorbell pages, copies made without holding the RNIC, group members, captured
//!   packets, routes, VFs of other hosts, events; `executor`: a trait, to which the modules below leave the work of
//!   QPs;
//! * `core`: the struct that holds all these;
//! * `complete` (completions, events, failures), `pacing`, `reroute` (destinations of connections), `policy_check`
//!   (rules); `exec`: work requests between QPs of this host, WQEs, receives, jobs; `wire`: connections to other hosts,
//!   with a requester and a responder; `datagram`: unreliable datagrams, local and remote; `capture_points`: captures
//!   packets; `to_wire`: moves connections within a host to the wire; `where_is`: questions to other hosts about VFs;
//! * `commands`, `vrnics`, `sessions`, `pause`: the control path; `teardown`: frees dead objects; `rx`: receives
//!   packets; `round`: rounds and turns;
//! * `software`: the executor that does all work in this process;
//! * `cm`: connection management, which sends and receives messages, and moves no QP; `rnic`: the core with connection
//!   management; `record`: a vRNIC as data, saved and restored.
//!
//! The type is [`Rnic`]. Its methods come in classes:
//!
//! * *commands* of the control path (`add_vrnic`, `create_qp`, `modify_qp`, ...): executed at once, at the time that
//!   [`Rnic::at`] sets;
//! * *inputs*: [`Core::unpark`] (a kick), [`Rnic::handle_packet`] (a packet), [`Rnic::poll_by`] (time has passed;
//!   doorbells are polled), [`Core::end_job`] (a job is done);
//! * *outputs*: [`Core::drain_outputs`] (events for sessions), [`Core::tx`] (packets), [`Core::take_job`] (a copy that
//!   the caller makes without holding the RNIC), [`Rnic::next_timeout`].
//!
//! After every command or input the caller drains the outputs. After a poll it also sends the packets and does the
//! jobs. [`Rnic::poll_by`] returns whether it did anything; after `false` the caller may park idle sessions with
//! [`Core::park_idle`].

mod access;
mod attr;
mod backoff;
mod budget;
mod capture;
mod capture_points;
mod cm;
mod commands;
mod complete;
mod core;
mod datagram;
mod doorbell_poll;
mod exec;
mod executor;
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
mod policy_check;
mod random;
mod record;
mod reroute;
mod rnic;
mod round;
mod rx;
mod sched;
#[cfg(test)]
mod scripted;
mod sessions;
mod slab;
mod software;
mod teardown;
mod to_wire;
mod tx;
mod vf_peers;
mod vrnics;
mod where_is;
mod wire;

pub use attr::{Transition, transition};
pub use budget::{Terms, TimeBudget};
pub use capture::{Capture, Captured};
pub use cm::CmEventKind;
pub use core::Core;
pub use doorbell_poll::Bells;
pub use job::Job;
pub use multicast::MAX_MULTICAST_QPS;
pub use objects::{
    Account, Backing, Counters, CreateQp, Dropped, Limits, MrNote, OpenXrcd, PageList, QpInfo, Resolve, SessionId,
    SrqAttr, SrqInfo, Usage, VfPath, VfUse, VrnicConfig, VrnicId, WireCounters,
};
pub use output::Output;
pub use pace::{DEFAULT_WEIGHT, Share};
pub use path::{Arrival, Path, Route, WireDrops};
pub use random::{Rng, Seed};
pub use record::{Attach, Attached, Flaw, Object, Record, RecordError, RestoreError, Way, What};
pub use rnic::Rnic;
pub use teardown::MAX_TORN_DOWN;
pub use tx::{DATAGRAM_MAC, MAX_OUTER_BYTES, Sealed, Tx, TxPacket};
pub use vf_peers::VfQuestions;
