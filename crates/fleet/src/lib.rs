//! A fleet of hosts and their control centre, as data: the messages that they exchange, and the state that follows from
//! them.
//!
//! [`v1`] has the messages of `proto/unirdma/fleet/v1/fleet.proto`, with proto3's JSON mapping. The feature `client`
//! adds code that calls the centre, the feature `server` code that answers calls.
//!
//! The crate has no socket, no file, no clock and no thread. It must never have one: the simulation runs it on a
//! virtual clock.

pub mod agent;

/// The messages and services of the centre.
#[allow(missing_docs, clippy::large_enum_variant)]
pub mod v1 {
    include!(concat!(env!("OUT_DIR"), "/unirdma.fleet.v1.rs"));
    include!(concat!(env!("OUT_DIR"), "/unirdma.fleet.v1.serde.rs"));
}

mod apply;
mod audit;
mod centre;
mod error;
mod host_view;
mod liveness;
mod model;
mod net;
mod planner;
mod queries;
mod records;
mod secrets;
mod state;
mod tokens;
mod transaction;

pub use centre::{Centre, Lacking};
#[cfg(any(feature = "client", feature = "server"))]
pub use error::said;
pub use error::{Kind as RefusalKind, Refusal, root_cause};
pub use liveness::{Figures, Greeted, PROTOCOL, SILENCE_MS};
pub use model::{Kind, Limit, MAX_APPLY, RULES, VRNICS, WATCHERS};
pub use net::{AddressError, Net, address};
pub use planner::{Facts, News, Outcome, Planner};
pub use queries::Seen;
pub use records::Write;
pub use secrets::STEP_DEADLINE_MS;
pub use state::Name;
pub use tokens::Actor;
pub use transaction::Plan;

/// The compiled .proto file, a `FileDescriptorSet`.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/fleet.descriptors"));
