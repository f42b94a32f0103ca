//! The uniVerbs driver of a process. It does what a guest's kernel driver and provider do for a VM, in one address
//! space with the application.
//!
//! Depends on the device ABI, the `mem` crate and the frontend of the link. It knows nothing of the C
//! interface of libibverbs. It must never abort the application: everything fails with an errno, and a
//! virtual layer that is gone is an event. Errors of this crate are Linux errno values.

mod arena;
mod bounce;
mod clock;
mod context;
mod events;
pub mod heap;
mod memory;
mod poll_rest;
mod queues;
mod sockets;
mod sync;

pub use unirdma_mem::fds;

use sync::lock;

pub use arena::Block;
pub use context::{Context, device_config};
pub use events::EventSource;
pub use heap::HEAP;
pub use memory::{Buffer, Mr, Way, Why, loaded};
pub use queues::{Cq, Qp, QpInit, RecvBatch, SendBatch, Srq};
pub use sockets::socket_paths;
pub use unirdma_queues::SendWr;

/// An errno value.
pub type Errno = i32;
/// Result with an errno.
pub type Result<T> = std::result::Result<T, Errno>;

/// The errno of an I/O error; `EIO` if it has none.
pub(crate) fn errno(e: &std::io::Error) -> Errno {
    use std::io::ErrorKind as K;
    match (e.raw_os_error(), e.kind()) {
        (Some(n), _) => n,
        (None, K::InvalidInput) => libc::EINVAL,
        (None, K::WouldBlock) => libc::EAGAIN,
        _ => libc::EIO,
    }
}

/// The errno of a memory file that could not be made; `ENOMEM` if its size is the cause.
pub(crate) fn map_errno(e: &unirdma_mem::MapError) -> Errno {
    match e {
        unirdma_mem::MapError::Os(e) => errno(e),
        _ => libc::ENOMEM,
    }
}
