//! rsockets: streams and datagrams over RDMA with the calls of sockets (`rsocket(7)`).
//!
//! The protocol of streams is rdma-core's, so that either end may be a program on the kernel's RDMA: data is WRITTEN into the
//! peer's receive buffer, half by half, and the immediate data of each WRITE says how much it was. `calls` has the functions of the
//! library, `stream` waits, `connection` never does; `protocol` is what the two ends tell each other, `board` the memory for it.
//! `datagram` has the sockets for datagrams, `wait` what both kinds share.

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

/// What came in.
struct Received {
    bytes: usize,
    from: Option<libc::sockaddr_storage>,
}

/// A socket of either kind, as its calls see it. Errors are numbers of errno.
trait Endpoint: Send + Sync {
    /// The descriptor that stands for it.
    fn fd(&self) -> i32;
    /// Its calls do not wait.
    fn nonblocking(&self) -> &AtomicBool;
    /// The socket, if it is a stream.
    fn stream(&self) -> Option<&Socket> {
        None
    }
    fn bind(&self, addr: *const libc::sockaddr) -> Result<(), i32>;
    fn listen(&self, _backlog: i32) -> Result<(), i32> {
        Err(libc::EOPNOTSUPP)
    }
    /// A connection that came in.
    fn accept(&self) -> Result<Arc<dyn Endpoint>, i32> {
        Err(libc::EOPNOTSUPP)
    }
    fn connect(&self, addr: *const libc::sockaddr) -> Result<(), i32>;
    /// Sends bytes; a datagram to an address, or to the peer if that is NULL.
    fn send(&self, bytes: &[u8], dontwait: bool, to: *const libc::sockaddr) -> Result<usize, i32>;
    /// Takes bytes, as `recv(2)` does with these flags.
    fn recv(&self, bytes: &mut [u8], flags: i32) -> Result<Received, i32>;
    fn shutdown(&self, how: i32) -> Result<(), i32>;
    /// What it is ready for now; `arm`: and an event shall come when that changes.
    fn poll(&self, arm: bool) -> (Ready, Vec<i32>);
    /// Its pending error, once.
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
