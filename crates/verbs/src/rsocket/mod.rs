//! rsockets: streams over RDMA with the calls of sockets (`rsocket(7)`).
//!
//! The protocol is rdma-core's, so that either end may be a program on the kernel's RDMA: data is WRITTEN into the peer's
//! receive buffer, half by half, and the immediate data of each WRITE says how much it was. `calls` has the functions of the
//! library, `stream` waits, `connection` never does; `protocol` is what the two ends tell each other, `board` the memory for it.

mod board;
mod calls;
mod connection;
mod protocol;
mod stream;

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex};

use crate::lock;
use stream::Socket;

pub use calls::*;

/// Sockets of this process by descriptor.
static SOCKETS: LazyLock<Mutex<HashMap<i32, Arc<Socket>>>> = LazyLock::new(Mutex::default);

fn find(fd: i32) -> Result<Arc<Socket>, i32> {
    lock(&SOCKETS).get(&fd).cloned().ok_or(libc::EBADF)
}
