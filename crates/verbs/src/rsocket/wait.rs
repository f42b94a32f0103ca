//! Waiting in the calls of sockets: a call polls for a while, and then sleeps on the descriptors of the socket.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use unirdma_verbs_abi::{ibv_comp_channel, ibv_cq, ibv_wc, rdma_cm_id, rdma_event_channel};

use super::connection::{Ready, check, errno};
use crate::any;
use crate::lock;
use crate::rdmacm::{x_rdma_create_event_channel, x_rdma_create_id, x_rdma_destroy_event_channel};

/// Time for which an idle socket is polled before its thread sleeps.
const SPIN: Duration = Duration::from_micros(50);
/// Longest sleep: another thread of the socket may have taken the event.
const NAP_MS: i32 = 20;

/// A socket's progress, for which calls wait.
pub(super) trait Progress {
    /// Handles events and completions that have come.
    fn progress(&mut self);
    /// Makes the descriptors announce the next event.
    fn rearm(&self);
    /// Descriptors that become readable when something happens.
    fn descriptors(&self) -> Vec<i32>;
    /// The operations for which it is ready now.
    fn ready(&self) -> Ready;
    /// Called after a call has taken data.
    fn taken(&mut self) {}
}

/// The operations for which a socket is ready, and its descriptors. With `arm`, the descriptors become readable when
/// that changes.
pub(super) fn look<P: Progress>(socket: &Mutex<P>, arm: bool) -> (Ready, Vec<i32>) {
    let mut inner = lock(socket);
    inner.progress();
    if arm {
        inner.rearm();
        inner.progress();
    }
    (inner.ready(), inner.descriptors())
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
        // SAFETY: as many descriptors as `polled` has.
        unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, NAP_MS) };
    }
}

/// Makes an identifier for a socket, and its event channel. Its calls do not block: the socket itself waits, without
/// its lock.
pub(super) fn identifier(port_space: u16) -> Result<(*mut rdma_cm_id, *mut rdma_event_channel), i32> {
    let mut id = std::ptr::null_mut();
    // SAFETY: room for the identifier; the channel is given back with it.
    unsafe {
        let channel = x_rdma_create_event_channel();
        if channel.is_null() {
            return Err(errno());
        }
        let made = x_rdma_create_id(channel, &mut id, std::ptr::null_mut(), port_space.into());
        if let Err(e) = check(made) {
            x_rdma_destroy_event_channel(channel);
            return Err(e);
        }
        libc::fcntl((*channel).fd, libc::F_SETFL, libc::O_NONBLOCK);
        Ok((id, channel))
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
            let channel = any::create_comp_channel((*id).verbs);
            if channel.is_null() {
                return Err(errno());
            }
            libc::fcntl((*channel).fd, libc::F_SETFL, libc::O_NONBLOCK);
            let cq = any::create_cq((*id).verbs, entries, std::ptr::null_mut(), channel, 0);
            if cq.is_null() {
                let e = errno();
                any::destroy_comp_channel(channel);
                return Err(e);
            }
            Ok(Completions { channel, cq })
        }
    }

    /// The descriptor that announces completions.
    pub fn fd(&self) -> i32 {
        // SAFETY: a live channel.
        unsafe { (*self.channel).fd }
    }

    /// Calls `f` with all completions that there are. Returns whether there were any.
    ///
    /// # Errors
    /// `EIO` if the device is lost.
    pub fn take(&self, mut f: impl FnMut(&mut ibv_wc)) -> Result<bool, i32> {
        let mut wcs = [ibv_wc::default(); 16];
        let mut any = false;
        loop {
            // SAFETY: a live CQ, and room for `wcs.len()` completions.
            let n = unsafe { any::poll_cq(self.cq, wcs.len() as i32, wcs.as_mut_ptr()) };
            match usize::try_from(n).map_err(|_| libc::EIO)? {
                0 => return Ok(any),
                n => wcs[..n].iter_mut().for_each(&mut f),
            }
            any = true;
        }
    }

    pub fn arm(&self) {
        // SAFETY: a live CQ.
        unsafe { any::req_notify_cq(self.cq, 0) };
    }

    /// Takes the events that have come, and arms the CQ for the next.
    pub fn rearm(&self) {
        // SAFETY: a live CQ and its channel.
        unsafe {
            let (mut cq, mut context) = (std::ptr::null_mut(), std::ptr::null_mut());
            while any::get_cq_event(self.channel, &mut cq, &mut context) == 0 {
                any::ack_cq_events(cq, 1);
            }
        }
        self.arm();
    }

    /// # Safety
    /// Nothing uses it any more.
    pub unsafe fn destroy(self) {
        // SAFETY: by the contract.
        unsafe {
            any::destroy_cq(self.cq);
            any::destroy_comp_channel(self.channel);
        }
    }
}
