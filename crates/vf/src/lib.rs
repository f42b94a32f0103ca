//! The pool of VFs of a host's real RNICs, and their leases, as data and pure functions.
//!
//! It uses MAC addresses of the formats and no other crate of the workspace. It must never open a file or socket, read
//! a clock, or start a thread: the supervisor looks at the kernel ([`Seen`]), applies steps ([`Step`]), and keeps the
//! log of leases. Times are durations since any fixed instant, for instance the supervisor's start.
//!
//! The order of calls:
//!
//! 1. [`Config::check`], once. [`log::read`] and [`Leases::adopt`], once, with the log of the last supervisor.
//! 2. [`plan`] after each look at the kernel and each change of a lease. The supervisor applies the steps and looks
//!    again until the plan is empty.
//! 3. [`Leases::ask`] when a program opens a device, [`Leases::end`] when it closes the device, [`Leases::tick`] after
//!    each look and at [`Leases::next_timeout`].
//! 4. [`Leases::take_records`] after each of these. The records are appended to the log before the program gets its
//!    answer. The plan is applied before it gets the device, because the VF does not have the group's VLAN before. If
//!    the kernel refuses a step, the lease is ended by [`Leases::evict`].

mod address;
mod adopt;
mod config;
mod lease;
mod leases;
pub mod log;
mod plan;
mod seen;
mod state;

pub use address::Address;
pub use adopt::Problem;
pub use config::{Config, ConfigError, Dry, Isolation, PfConfig};
pub use lease::{Contexts, Lease, LeaseId, Part, Phase, Purpose};
pub use leases::{Answer, Change, Leases, Refusal, Request, Ticket, Waiter};
pub use plan::{Notice, Plan, plan, states};
pub use seen::{NetdevSeen, PfSeen, Seen, Settings, VerbsSeen, VfId, VfSeen};
pub use state::{ARP_IGNORE, Driver, Holder, NODE_MODE, Setting, State, Step, Why};
