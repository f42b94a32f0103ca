//! Queues of a driver for verbs programs: how work requests become WQEs, and CQEs completions.
//!
//! Two drivers use it: the in-process driver of containers, which makes the rings itself, and the provider of guests,
//! whose kernel makes them. It depends on the device ABI, on the rings of `mem` and on the structures of libibverbs. It
//! must never make a ring, ring a doorbell or make a system call. Of the C interface it knows work requests and
//! completions, how both are built and read call by call (`requests`, `builder`, `polling`), and PDs with thread
//! domains (`domain`); other objects belong to the libraries. Errors are Linux errno values.

pub mod builder;
mod completions;
pub mod domain;
mod lock;
pub mod polling;
pub mod requests;
mod work;

pub use completions::Completions;
pub use lock::{Held, QueueLock};
pub use work::{Batch, Post, SendWr, WorkQueue};

/// Result with an errno.
pub type Result<T> = std::result::Result<T, i32>;
