//! How calls of sockets wait: they look for a while, and then sleep on the descriptors of the socket.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use unirdma_verbs_abi::{ibv_comp_channel, ibv_cq, ibv_wc, rdma_cm_id};

use super::connection::errno;
use crate::cq::{poll_cq, req_notify_cq, x_ibv_create_cq, x_ibv_destroy_cq};
use crate::event::{x_ibv_ack_cq_events, x_ibv_create_comp_channel, x_ibv_destroy_comp_channel, x_ibv_get_cq_event};
use crate::lock;

/// An idle socket is looked at for so long before its thread sleeps.
const SPIN: Duration = Duration::from_micros(50);
/// Longest sleep: another thread of the socket may have taken the event.
const NAP_MS: i32 = 20;

/// What a socket waits for.
pub(super) trait Progress {
    /// Handles what has come.
    fn progress(&mut self);
    /// An event shall come when something does.
    fn rearm(&self);
    /// Descriptors that become readable when something happens.
    fn descriptors(&self) -> Vec<i32>;
    /// A call has taken what it wanted.
    fn taken(&mut self) {}
}

/// Waits until `f` has an answer; `EAGAIN` at once if the caller does not wait.
pub(super) fn wait<P: Progress, R>(
    socket: &Mutex<P>,
    waits: bool,
    mut f: impl FnMut(&mut P) -> Option<Result<R, i32>>,
) -> Result<R, i32> {
    let begin = Instant::now();
    loop {
        let fds = {
            let mut inner = lock(socket);
            inner.progress();
            if let Some(r) = f(&mut inner) {
                inner.taken();
                return r;
            }
            if !waits {
                return Err(libc::EAGAIN);
            }
            if begin.elapsed() < SPIN {
                continue;
            }
            inner.rearm();
            inner.progress();
            if let Some(r) = f(&mut inner) {
                inner.taken();
                return r;
            }
            inner.descriptors()
        };
        let mut polled: Vec<libc::pollfd> =
            fds.into_iter().map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 }).collect();
        // SAFETY: so many descriptors.
        unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, NAP_MS) };
    }
}

/// The completion queue of a socket, for both directions. It belongs to the socket's identifier, and is destroyed with
/// [`Completions::destroy`] after its QP.
#[derive(Clone, Copy)]
pub(super) struct Completions {
    channel: *mut ibv_comp_channel,
    pub cq: *mut ibv_cq,
}

impl Completions {
    /// # Safety
    /// `id` is an identifier that has a device.
    pub unsafe fn create(id: *mut rdma_cm_id, entries: i32) -> Result<Completions, i32> {
        // SAFETY: by the contract; what is made here does not block.
        unsafe {
            let channel = x_ibv_create_comp_channel((*id).verbs);
            if channel.is_null() {
                return Err(errno());
            }
            libc::fcntl((*channel).fd, libc::F_SETFL, libc::O_NONBLOCK);
            let cq = x_ibv_create_cq((*id).verbs, entries, std::ptr::null_mut(), channel, 0);
            if cq.is_null() {
                let e = errno();
                x_ibv_destroy_comp_channel(channel);
                return Err(e);
            }
            Ok(Completions { channel, cq })
        }
    }

    /// The descriptor that tells of completions.
    pub fn fd(&self) -> i32 {
        // SAFETY: a live channel.
        unsafe { (*self.channel).fd }
    }

    /// Takes completions; fewer than there is room for if there are no more. `EIO` if the device is lost.
    pub fn poll(&self, room: &mut [ibv_wc]) -> Result<usize, i32> {
        // SAFETY: a live CQ, and room for so many.
        let n = unsafe { poll_cq(self.cq, room.len() as i32, room.as_mut_ptr()) };
        usize::try_from(n).map_err(|_| libc::EIO)
    }

    pub fn arm(&self) {
        // SAFETY: a live CQ.
        unsafe { req_notify_cq(self.cq, 0) };
    }

    /// Takes the events that have come, and arms the CQ for the next.
    pub fn rearm(&self) {
        // SAFETY: a live CQ and its channel.
        unsafe {
            let (mut cq, mut context) = (std::ptr::null_mut(), std::ptr::null_mut());
            while x_ibv_get_cq_event(self.channel, &mut cq, &mut context) == 0 {
                x_ibv_ack_cq_events(cq, 1);
            }
        }
        self.arm();
    }

    /// # Safety
    /// Nothing uses it any more.
    pub unsafe fn destroy(self) {
        // SAFETY: by the contract.
        unsafe {
            x_ibv_destroy_cq(self.cq);
            x_ibv_destroy_comp_channel(self.channel);
        }
    }
}
