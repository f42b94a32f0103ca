//! Asynchronous events of contexts on a VF. Most of the kernel's drivers have no event for a device that is removed
//! while programs have it open, and the removal waits for these programs. The virtual layer tells them, on the
//! connection of the lease.
//!
//! So `ibv_context::async_fd` is an epoll set of the kernel's descriptor and that connection, which becomes readable
//! for the events of both. The real library reads events with `read`, which an epoll set does not have. `redirect`
//! leads this call here.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::io;
use std::mem::offset_of;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use unirdma_driver::fds::Known;
use unirdma_formats::AsyncEvent;
use unirdma_verbs_abi::ibv_context;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::lease::{Lease, News};
use crate::lock;
use crate::trace::trace;

/// `struct ib_uverbs_async_event_desc` of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Event {
    element: u64,
    kind: u32,
    reserved: u32,
}

const FATAL_KIND: u32 = AsyncEvent::DeviceFatal as u32;
const FATAL: Event = Event { element: 0, kind: FATAL_KIND, reserved: 0 };

/// The sources of a context's events.
pub(super) struct AsyncEvents {
    /// The epoll set.
    set: Known,
    /// The kernel's descriptor. The real context owns it.
    kernel: RawFd,
    lease: Lease,
    /// The lease's connection has nothing more to tell.
    has_ended: AtomicBool,
    /// The program has got DEVICE_FATAL, which it gets once.
    is_fatal: AtomicBool,
}

/// By the number of the epoll set.
static ALL: Mutex<BTreeMap<RawFd, Arc<AsyncEvents>>> = Mutex::new(BTreeMap::new());

/// The next step of a thread that reads an event.
enum Next {
    Returns(Event),
    Fails(Errno),
    Waits,
}

impl AsyncEvents {
    /// Puts an epoll set in the place of a context's `async_fd`.
    ///
    /// # Errors
    /// Those of `epoll_create1(2)` and `epoll_ctl(2)`. The context is as before then.
    ///
    /// # Safety
    /// `c` is an open context of the real library, which nobody else uses yet.
    pub unsafe fn take_over(c: *mut ibv_context, lease: Lease) -> io::Result<Arc<AsyncEvents>> {
        // SAFETY: by the contract.
        let kernel = unsafe { (*c).async_fd };
        let events = AsyncEvents::new(kernel, lease)?;
        // SAFETY: by the contract.
        unsafe { (*c).async_fd = events.set.as_raw_fd() };
        Ok(events)
    }

    fn new(kernel: RawFd, lease: Lease) -> io::Result<Arc<AsyncEvents>> {
        let set = Known::marked(epoll::create(CreateFlags::CLOEXEC)?)?;
        let events = Arc::new(AsyncEvents {
            set,
            kernel,
            lease,
            has_ended: AtomicBool::new(false),
            is_fatal: AtomicBool::new(false),
        });
        let fd = events.kernel();
        fcntl_setfl(fd, fcntl_getfl(fd)? | OFlags::NONBLOCK)?;
        epoll::add(events.set.get()?, fd, EventData::new_u64(0), EventFlags::IN)?;
        epoll::add(events.set.get()?, events.lease.get()?, EventData::new_u64(0), EventFlags::IN)?;
        lock(&ALL).insert(events.set.as_raw_fd(), events.clone());
        Ok(events)
    }

    /// Gives the kernel's descriptor back to the context, which is about to be closed.
    ///
    /// # Safety
    /// `c` is the context of [`AsyncEvents::take_over`].
    pub unsafe fn give_back(&self, c: *mut ibv_context) {
        lock(&ALL).remove(&self.set.as_raw_fd());
        // SAFETY: by the contract.
        unsafe { (*c).async_fd = self.kernel };
    }

    fn kernel(&self) -> BorrowedFd<'_> {
        // SAFETY: open as long as the context is. A program that closes a context while it reads events of it has the
        // same race without this library.
        unsafe { BorrowedFd::borrow_raw(self.kernel) }
    }

    /// Takes an event that has come. The calls are those of the kernel, which are no cancellation points.
    fn take(&self) -> Next {
        loop {
            let mut bytes = [0; size_of::<Event>()];
            match rustix::io::read(self.kernel(), &mut bytes) {
                Ok(n) => match Event::read_from_bytes(&bytes[..n]) {
                    Ok(Event { kind: FATAL_KIND, .. }) => {}
                    Ok(event) => return Next::Returns(event),
                    Err(_) => return Next::Fails(Errno::IO),
                },
                Err(Errno::AGAIN) if self.has_ended.load(Ordering::Relaxed) => return Next::Waits,
                Err(Errno::AGAIN) => match self.lease.news() {
                    News::None => return Next::Waits,
                    News::Evicted(why) => trace!("DEVICE_FATAL: {why}"),
                    News::End => {
                        self.forget_lease();
                        continue;
                    }
                },
                Err(Errno::INTR) => continue,
                Err(e) => return Next::Fails(e),
            }
            self.forget_lease();
            if !self.is_fatal.swap(true, Ordering::Relaxed) {
                return Next::Returns(FATAL);
            }
        }
    }

    /// The connection has nothing more to tell, and its end is not announced.
    fn forget_lease(&self) {
        self.has_ended.store(true, Ordering::Relaxed);
        if let (Ok(set), Ok(lease)) = (self.set.get(), self.lease.get()) {
            let _ = epoll::delete(set, lease);
        }
    }

    fn is_blocking(&self) -> bool {
        !self.set.get().and_then(|set| Ok(fcntl_getfl(set)?)).is_ok_and(|flags| flags.contains(OFlags::NONBLOCK))
    }
}

/// The kernel's descriptor for the events of the context that has this epoll set as `async_fd`.
pub(super) fn kernels_of(fd: RawFd) -> Option<RawFd> {
    lock(&ALL).get(&fd).filter(|e| e.set.still_ours()).map(|e| e.kernel)
}

/// `read` of an epoll set that is an `async_fd`; `None` if `fd` is none.
///
/// The wait is a cancellation point, as that of `EventSource::next` of the driver is: nothing is held meanwhile.
///
/// # Safety
/// `to` has room for `len` bytes.
pub(super) unsafe fn read(fd: RawFd, to: *mut c_void, len: usize) -> Option<isize> {
    loop {
        let e = match next(fd, len)? {
            Ok(Some(event)) => {
                // SAFETY: by the contract, and `len` was compared.
                unsafe { to.cast::<Event>().write_unaligned(event) };
                return Some(size_of::<Event>() as isize);
            }
            Ok(None) => wait(fd),
            Err(e) => e,
        };
        if e != 0 {
            crate::set_errno(e);
            return Some(-1);
        }
    }
}

/// The next event; `Ok(None)` if the caller is to wait for it.
fn next(fd: RawFd, len: usize) -> Option<Result<Option<Event>, i32>> {
    let events = lock(&ALL).get(&fd).cloned().filter(|e| e.set.still_ours())?;
    if len < size_of::<Event>() {
        return Some(Err(libc::EINVAL));
    }
    Some(match events.take() {
        Next::Returns(event) => Ok(Some(event)),
        Next::Waits if events.is_blocking() => Ok(None),
        Next::Waits => Err(libc::EAGAIN),
        Next::Fails(e) => Err(e.raw_os_error()),
    })
}

/// Waits until a descriptor is readable. Returns an errno, or 0.
fn wait(fd: RawFd) -> i32 {
    let mut set = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: one descriptor. This is the C library's function, not the system call, so that it can be cancelled.
    match unsafe { libc::poll(&raw mut set, 1, -1) } {
        0.. => 0,
        _ => match super::errno() {
            libc::EINTR if restarts() => 0,
            e => e,
        },
    }
}

/// True if no signal handler of the process ends calls that wait: all have SA_RESTART, which `read` obeys and `poll`
/// does not. Which signal has come is not known.
fn restarts() -> bool {
    /// `_NSIG` - 1.
    const LAST: i32 = 64;
    (1..=LAST).all(|signal| {
        // SAFETY: integers and an optional function.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: asks only. The C library refuses its own signals, which leaves the action as it is.
        unsafe { libc::sigaction(signal, std::ptr::null(), &raw mut action) };
        matches!(action.sa_sigaction, libc::SIG_DFL | libc::SIG_IGN) || action.sa_flags & libc::SA_RESTART != 0
    })
}

const _: () = assert!(size_of::<Event>() == 16 && offset_of!(Event, kind) == 8);

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, OwnedFd};

    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, send, socketpair};
    use unirdma_abi::lease::{EVICTED, Told, WAITS};
    use zerocopy::FromZeros;

    use super::*;

    const GID_CHANGE: u32 = 18;

    /// A context's events, with the kernel's and the virtual layer's ends.
    struct Ends {
        events: Arc<AsyncEvents>,
        kernel: OwnedFd,
        layer: OwnedFd,
        _read_by_us: OwnedFd,
    }

    fn pair() -> (OwnedFd, OwnedFd) {
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
    }

    impl Ends {
        fn new() -> Ends {
            let ((ours, kernel), (lease, layer)) = (pair(), pair());
            let events = AsyncEvents::new(ours.as_raw_fd(), Lease::keep(lease).unwrap()).unwrap();
            Ends { events, kernel, layer, _read_by_us: ours }
        }

        fn set(&self) -> RawFd {
            self.events.set.as_raw_fd()
        }

        fn raise(&self, kind: u32) {
            send(&self.kernel, Event { element: 7, kind, reserved: 0 }.as_bytes(), SendFlags::empty()).unwrap();
        }

        fn tell(&self, kind: u32) {
            send(&self.layer, Told { kind, ..Told::new_zeroed() }.as_bytes(), SendFlags::empty()).unwrap();
        }

        fn is_readable(&self) -> bool {
            let mut fds = [PollFd::from_borrowed_fd(self.events.set.get().unwrap(), PollFlags::IN)];
            poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() > 0
        }

        /// Reads, without waiting if `waits` is false.
        fn read(&self, waits: bool) -> Result<Event, i32> {
            let flags = if waits { OFlags::empty() } else { OFlags::NONBLOCK };
            fcntl_setfl(self.events.set.get().unwrap(), flags).unwrap();
            let mut event = Event { element: 0, kind: 0, reserved: 9 };
            // SAFETY: the event of this function.
            match unsafe { read(self.set(), (&raw mut event).cast(), size_of::<Event>()) } {
                Some(16) => Ok(event),
                Some(-1) => Err(super::super::errno()),
                other => panic!("{other:?}"),
            }
        }

        fn kind(&self) -> Result<u32, i32> {
            self.read(false).map(|e| e.kind)
        }
    }

    #[test]
    fn events_of_the_kernel_come_first_and_an_eviction_is_one_fatal_event() {
        let ends = Ends::new();
        assert_eq!((ends.is_readable(), ends.kind()), (false, Err(libc::EAGAIN)));
        ends.tell(WAITS);
        assert_eq!(ends.kind(), Err(libc::EAGAIN), "no news");
        ends.tell(EVICTED);
        ends.raise(GID_CHANGE);
        assert!(ends.is_readable());
        assert_eq!(ends.read(true), Ok(Event { element: 7, kind: GID_CHANGE, reserved: 0 }));
        assert_eq!(ends.read(true), Ok(FATAL));
        assert_eq!((ends.is_readable(), ends.kind()), (false, Err(libc::EAGAIN)));
        // The virtual layer hangs up afterwards.
        let Ends { events, kernel, layer, _read_by_us } = ends;
        drop(layer);
        let ends = Ends { events, kernel, layer: pair().0, _read_by_us };
        assert!(!ends.is_readable());
        ends.raise(GID_CHANGE);
        assert_eq!((ends.kind(), ends.kind()), (Ok(GID_CHANGE), Err(libc::EAGAIN)));
    }

    #[test]
    fn a_fatal_event_of_the_kernel_is_not_repeated() {
        for kernel_first in [true, false] {
            let ends = Ends::new();
            ends.tell(EVICTED);
            if kernel_first {
                ends.raise(FATAL.kind);
                assert_eq!(ends.kind(), Ok(FATAL.kind));
            } else {
                assert_eq!(ends.kind(), Ok(FATAL.kind));
                ends.raise(FATAL.kind);
            }
            assert_eq!((ends.kind(), ends.is_readable()), (Err(libc::EAGAIN), false));
        }
    }

    #[test]
    fn a_supervisor_that_ends_tells_nothing() {
        let Ends { events, kernel, layer, _read_by_us } = Ends::new();
        drop(layer);
        let ends = Ends { events, kernel, layer: pair().0, _read_by_us };
        assert!(ends.is_readable());
        assert_eq!((ends.kind(), ends.is_readable()), (Err(libc::EAGAIN), false));
    }

    #[test]
    fn a_thread_that_waits_is_woken() {
        for kernel in [true, false] {
            let ends = Ends::new();
            std::thread::scope(|s| {
                let waits = s.spawn(|| ends.read(true));
                std::thread::sleep(std::time::Duration::from_millis(50));
                assert!(!waits.is_finished());
                if kernel {
                    ends.raise(GID_CHANGE)
                } else {
                    ends.tell(EVICTED)
                }
                let kind = waits.join().unwrap().unwrap().kind;
                assert_eq!(kind, if kernel { GID_CHANGE } else { FATAL.kind });
            });
        }
    }

    #[test]
    fn other_descriptors_and_closed_contexts_are_none() {
        let ends = Ends::new();
        let mut event = FATAL;
        // SAFETY: the event of this test.
        let mut read = |fd, len| unsafe { read(fd, (&raw mut event).cast(), len) };
        assert_eq!(read(ends.kernel.as_raw_fd(), 16), None);
        assert_eq!(read(ends.set(), 8), Some(-1));
        // SAFETY: integers and optional functions.
        let mut context: ibv_context = unsafe { std::mem::zeroed() };
        // SAFETY: a context of this test.
        unsafe { ends.events.give_back(&raw mut context) };
        assert_eq!((context.async_fd, read(ends.set(), 16)), (ends.events.kernel, None));
        // The program has put another file in the place of the set.
        let ends = Ends::new();
        rustix::io::dup2(ends.kernel.as_fd(), &mut std::mem::ManuallyDrop::new(unsafe_owned(ends.set()))).unwrap();
        assert_eq!(read(ends.set(), 16), None);
    }

    fn unsafe_owned(fd: RawFd) -> OwnedFd {
        // SAFETY: the caller does not drop it.
        unsafe { std::os::fd::FromRawFd::from_raw_fd(fd) }
    }
}
