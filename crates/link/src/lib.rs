//! The vhost-user link: framing, the backend's protocol engine, the frontend of a process, and the driver's side of a
//! split virtqueue.
//!
//! May depend on the device ABI, the `mem` crate, and the vhost and vm-memory crates (which only this crate and the
//! device crate use). It must never know what a control command means. A malformed or refused request must never end a
//! session by itself: it is answered.

mod accounts;
mod async_signal;
mod backend;
mod blocking_fd;
mod closer;
mod driver_queue;
mod frontend;
mod memory;
mod msg;
mod sparse_account;

pub use accounts::{KINDS, Kept, Ledger, Resource, Ticket};
pub use async_signal::signal;
pub use backend::{Backend, ChannelError, Handler, Progress, Refusal, Vring};
pub use blocking_fd::BlockingFd;
pub use closer::Closer;
pub use driver_queue::{DriverQueue, Segment};
pub use frontend::Frontend;
pub use memory::{Gathered, MAX_MAPPED, MAX_REGIONS, Memory, PROCESS_LIMIT, Refused, Region, RegionDesc};
pub use msg::{CLOSE_CHANNEL, MAX_FDS, MAX_PAYLOAD, Message, OPEN_CHANNEL, RETURN_EVENTS, Receiver, send};
pub use unirdma_mem::fds;

/// `VIRTIO_F_VERSION_1`.
pub const VIRTIO_F_VERSION_1: u64 = 1 << 32;
/// `VHOST_USER_F_PROTOCOL_FEATURES`.
pub const VHOST_USER_F_PROTOCOL_FEATURES: u64 = 1 << 30;
