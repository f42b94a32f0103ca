//! Signals to an eventfd that another process holds, too. They never wait.
//!
//! A write to an eventfd whose counter is full waits, unless the open file is non-blocking, and the other holder may
//! change that between any two system calls. But the kernel itself signals eventfds without waiting when asynchronous
//! I/O ends (`io_submit(2)`, `IOCB_FLAG_RESFD`). So a read of an empty file is submitted here, which ends at once.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

use rustix::fs::MemfdFlags;

/// Most ended reads that the context may hold.
const DEPTH: u32 = 64;

/// `struct iocb` of the kernel's ABI (`linux/aio_abi.h`), on a little-endian machine.
#[derive(Default)]
#[repr(C)]
struct Iocb {
    data: u64,
    key: u32,
    rw_flags: u32,
    opcode: u16,
    priority: i16,
    fd: u32,
    buffer: u64,
    bytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    event: u32,
}

const PREAD: u16 = 0;
const SIGNALS_EVENT: u32 = 1;

/// A context of asynchronous I/O.
struct Context {
    id: libc::c_ulong,
    empty: OwnedFd,
    /// Number of reads that have ended, but whose events the context still holds.
    ended: u32,
}

/// `None` before the first signal; an error if the kernel offers no asynchronous I/O.
static CONTEXT: Mutex<Option<Result<Context, ()>>> = Mutex::new(None);

impl Context {
    fn new() -> io::Result<Self> {
        let empty = rustix::fs::memfd_create(c"empty", MemfdFlags::CLOEXEC)?;
        let mut id: libc::c_ulong = 0;
        // SAFETY: writes one number to `id`.
        if unsafe { libc::syscall(libc::SYS_io_setup, libc::c_ulong::from(DEPTH), &raw mut id) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Context { id, empty, ended: 0 })
    }

    /// Removes the events of reads that have ended.
    fn clear(&mut self) {
        let mut events = [[0u64; 4]; DEPTH as usize];
        let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: `events` has room for `DEPTH` events of 32 bytes.
        unsafe {
            libc::syscall(libc::SYS_io_getevents, self.id, 0, DEPTH as libc::c_long, &raw mut events, &raw const now)
        };
        self.ended = 0;
    }

    /// Signals `fd`; false if the kernel refuses.
    fn signal(&mut self, fd: BorrowedFd<'_>) -> bool {
        if self.ended >= DEPTH / 2 {
            self.clear();
        }
        let mut byte = 0u8;
        let mut request = Iocb {
            opcode: PREAD,
            fd: self.empty.as_raw_fd() as u32,
            buffer: (&raw mut byte) as u64,
            bytes: 1,
            flags: SIGNALS_EVENT,
            event: fd.as_raw_fd() as u32,
            ..Iocb::default()
        };
        let mut list = [&raw mut request];
        self.ended += 1;
        // SAFETY: one request, which lives until the call returns; a read of a memory file ends within the call.
        unsafe { libc::syscall(libc::SYS_io_submit, self.id, 1 as libc::c_long, list.as_mut_ptr()) == 1 }
    }
}

/// Adds 1 to an eventfd, whose counter may be full and which may be blocking. Nothing happens if `fd` is no eventfd.
pub fn signal(fd: impl AsFd) {
    let fd = fd.as_fd();
    let mut context = CONTEXT.lock().unwrap_or_else(PoisonError::into_inner);
    let context = context.get_or_insert_with(|| Context::new().map_err(|e| {
        tracing::warn!(error = %e, "no asynchronous I/O: the owner of a full eventfd can hold up who signals it (sysctl fs.aio-max-nr)");
    }));
    match context {
        Ok(context) => _ = context.signal(fd),
        Err(()) => {
            let _ = rustix::fs::fcntl_setfl(fd, rustix::fs::OFlags::NONBLOCK);
            let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};

    fn count(fd: &OwnedFd) -> u64 {
        let mut b = [0; 8];
        rustix::io::read(fd, &mut b).unwrap();
        u64::from_ne_bytes(b)
    }

    #[test]
    fn signals_are_counted() {
        let fd = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        for n in [1, 2, 500] {
            (0..n).for_each(|_| signal(&fd));
            assert_eq!(count(&fd), n);
        }
        let semaphore = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::SEMAPHORE).unwrap();
        signal(&semaphore);
        signal(&semaphore);
        assert_eq!((count(&semaphore), count(&semaphore)), (1, 1));
    }

    /// A full, blocking eventfd: a write would wait for ever.
    #[test]
    fn a_full_counter_holds_nobody_up() {
        let fd = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        rustix::io::write(&fd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        for _ in 0..200 {
            signal(&fd);
        }
        assert!(count(&fd) >= u64::MAX - 1);
        signal(&fd);
        assert_eq!(count(&fd), 1);
    }

    #[test]
    fn what_is_no_eventfd_is_left_alone() {
        let (a, b) = rustix::pipe::pipe().unwrap();
        signal(&a);
        signal(&b);
        let fd = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        signal(&fd);
        assert_eq!(count(&fd), 1);
    }
}
