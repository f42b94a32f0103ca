//! Simulation kit: RNICs on a virtual clock, the programs that drive them, and a network that loses packets.
//!
//! May depend on the RNIC and the crates below it; nothing but tests, fuzz targets and `cargo xtask sim` depends on it.
//! It must never read a clock, open a socket or start a thread: everything that it does follows from a seed or from the
//! bytes that it was given, so that every failure can be repeated.
//!
//! The parts, from the smallest:
//!
//! * [`End`] is a program with one QP. It posts to its rings and polls its CQ as a driver does.
//! * [`Pair`] is two connected ends on one RNIC; [`net::Net`] is several hosts with ends, and the network between them.
//! * [`cm`] connects ends by address, [`xrc`] gives them shared receive queues, [`multicast`] makes groups of them.
//! * [`peer`] and [`cm_peer`] put a hostile peer in the place of a host. Fuzz targets call them.
//! * [`connection`] and [`fabric`] are the simulations: random traffic on a bad network, all of whose outcomes are
//!   checked.
//! * [`differ`] executes a random program within one host and between two hosts, and compares the results.
//!
//! All of them panic when they find an error, as tests do.

mod attr;
pub mod cm;
pub mod cm_peer;
pub mod connection;
pub mod differ;
mod end;
pub mod fabric;
pub mod fleet;
pub mod multicast;
pub mod net;
mod pair;
pub mod peer;
pub mod xrc;

pub use attr::{QKEY, address, attrs, attrs_of};
pub use end::{ALL, CAP, End, IOVA, MR_BYTES, Queues, aligned, create_of, ip, new_cq, pattern, status, wqe};
pub use pair::{Pair, poll};

/// One second of the virtual clock, which counts nanoseconds.
pub const SECOND: u64 = 1_000_000_000;
