//! Memory that others can write while it is read: mappings, copies, rings.
//!
//! This is the one crate of the virtual layer that dereferences shared memory. It may depend on the
//! device ABI and on system calls; it must never hand out a Rust reference to shared bytes, trust an
//! index or a length found there, or decide what a work request means.
//!
//! The safety argument stands on two types. A [`Span`] is a window of a live mapping: its owner keeps the mapping, and
//! every access is checked against its length and is volatile or atomic. A [`ProcMem`] is another process's memory
//! behind a file descriptor, accessed by `pread`/`pwrite` alone. A file that is truncated under a mapping would raise
//! SIGBUS; [`guard`] turns that into zero pages for the mapping's owner. [`holes`] counts the pages that are made in
//! sparse files. [`fds`] keeps descriptors in a process that is not ours.

pub mod fds;
pub mod guard;
pub mod holes;
mod map;
mod pieces;
mod proc;
pub mod protocol;
mod ring;
mod slot;
mod span;
mod transfer;

pub use map::{MapError, MemFd, is_memory, map_device, map_file, map_pieces, set_size};
pub use pieces::{PIECE_ALIGN, Pieces};
pub use proc::ProcMem;
pub use ring::{Bell, CqRing, CqTail, QpRings, RingError};
pub use slot::Slot;
pub use span::Span;
pub use transfer::{Fault, Loc, Place, atomic_u64, copy_mapped, fetch, transfer};
