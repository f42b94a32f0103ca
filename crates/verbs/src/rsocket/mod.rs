//! rsockets: streams and datagrams over RDMA with the calls of sockets (`rsocket(7)`).
//!
//! The protocol of streams is rdma-core's, so that either end may be a program on the kernel's RDMA: data is written by
//! RDMA WRITE into the peer's receive buffer, half by half, and the immediate data of each WRITE has the number of
//! bytes. `calls` has the functions of the library. `stream` waits, `connection` never does. `protocol` has the
//! messages between the two ends, `board` the memory for them. `datagram` has the datagram sockets, `wait` the parts
//! that both kinds share.

mod board;
mod calls;
mod connection;
mod datagram;
mod protocol;
mod stream;
mod wait;

use std::collections::HashMap;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, LazyLock, Mutex};

use unirdma_verbs_abi::rdma_cm_id;

use crate::lock;
use connection::{Ready, check};
use stream::Socket;

pub use calls::*;

/// Received bytes, and their sender if they are a datagram.
struct Received {
    bytes: usize,
    from: Option<libc::sockaddr_storage>,
}

/// A socket of either kind, as the calls see it. Errors are errno values.
trait Endpoint: Send + Sync {
    /// The descriptor of the socket.
    fn fd(&self) -> i32;
    /// True if its calls do not wait.
    fn nonblocking(&self) -> &AtomicBool;
    /// The socket, if it is a stream.
    fn stream(&self) -> Option<&Socket> {
        None
    }
    fn bind(&self, addr: *const libc::sockaddr) -> Result<(), i32>;
    fn listen(&self, _backlog: i32) -> Result<(), i32> {
        Err(libc::EOPNOTSUPP)
    }
    /// Accepts a connection that came in.
    fn accept(&self) -> Result<Arc<dyn Endpoint>, i32> {
        Err(libc::EOPNOTSUPP)
    }
    fn connect(&self, addr: *const libc::sockaddr) -> Result<(), i32>;
    /// Sends bytes. A datagram goes to the address, or to the connected peer if the address is NULL.
    fn send(&self, bytes: &[u8], dontwait: bool, to: *const libc::sockaddr) -> Result<usize, i32>;
    /// Receives bytes, as `recv(2)` does with these flags.
    fn recv(&self, bytes: &mut [u8], flags: i32) -> Result<Received, i32>;
    fn shutdown(&self, how: i32) -> Result<(), i32>;
    /// The operations for which it is ready now. With `arm`, its descriptors become readable when that changes.
    fn poll(&self, arm: bool) -> (Ready, Vec<i32>);
    /// Returns and clears its pending error.
    fn take_error(&self) -> i32;
    /// Its own address, or its peer's.
    fn name(&self, peer: bool) -> Result<libc::sockaddr_storage, i32>;
    /// Sets an `RDMA_OPTION_ID_*` of its identifier.
    fn set_option(&self, option: i32, value: u32) -> Result<(), i32>;
}

/// Sockets of this process by descriptor.
static SOCKETS: LazyLock<Mutex<HashMap<i32, Arc<dyn Endpoint>>>> = LazyLock::new(Mutex::default);

fn find(fd: i32) -> Result<Arc<dyn Endpoint>, i32> {
    lock(&SOCKETS).get(&fd).cloned().ok_or(libc::EBADF)
}

fn set_option(id: *mut rdma_cm_id, option: i32, mut value: u32) -> Result<(), i32> {
    const LEVEL_ID: i32 = 0;
    // SAFETY: a socket's own identifier.
    check(unsafe { crate::rdmacm::x_rdma_set_option(id, LEVEL_ID, option, (&raw mut value).cast(), 4) })
}
