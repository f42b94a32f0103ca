//! What the black-box tests, attacks and benchmarks share: virtual layers with vRNICs and containers, hosts in network
//! namespaces, fleets, virtual machines, and the end of everything that was started.
//!
//! It uses the built programs as a user would, and depends on no crate of the product.

pub mod book;
mod checks;
pub mod cleanup;
pub mod cluster;
pub mod conformance;
mod figures;
pub mod fleet;
mod lab;
pub mod package;
pub mod packages;
mod process;
mod programs;
pub mod reruns;
mod siw;
pub mod tcp;
mod two_hosts;
pub mod vm;
mod wait;

pub use checks::{compile, compile_as, shown, soon, wait_for};
pub use figures::{figures, median, named, pollers, print_json, rows, topology};
pub use lab::Lab;
pub use process::{Output, Running, listens, signal, terminate};
pub use programs::{build, build_example, build_for_containers, build_in, cargo, cores, own_user, root, uid, unirdma};
pub use two_hosts::{Link, TwoHosts, ip};
pub use wait::{failed, require, wait_until, within};

/// A result whose error is for people.
pub type Result<T> = std::result::Result<T, String>;
