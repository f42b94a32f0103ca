//! userfaultfd(2): threads that touch a range sleep while its pages are moved.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// A userfaultfd and its features. It belongs to the address space in which it was opened.
pub(crate) struct Uffd {
    fd: OwnedFd,
    /// System calls that touch the range sleep too; otherwise they fail with `EFAULT` meanwhile.
    pub full: bool,
    /// It moves pages within the address space, and refuses pinned pages (Linux 6.8).
    pub moves: bool,
    /// It protects shared memory against writes (Linux 5.19).
    pub protects: bool,
}

const API: libc::c_ulong = 0xc018_aa3f;
const REGISTER: libc::c_ulong = 0xc020_aa00;
const UNREGISTER: libc::c_ulong = 0x8010_aa01;
const WAKE: libc::c_ulong = 0x8010_aa02;
const MOVE: libc::c_ulong = 0xc028_aa05;
const WRITEPROTECT: libc::c_ulong = 0xc018_aa06;
/// `USERFAULTFD_IOC_NEW` of /dev/userfaultfd.
const NEW: libc::c_ulong = 0xaa00;

const VERSION: u64 = 0xaa;
const FEATURE_WP: u64 = 1;
const FEATURE_WP_SHMEM: u64 = 1 << 12;
const FEATURE_MOVE: u64 = 1 << 16;
const USER_MODE_ONLY: i32 = 1;
const ALLOW_HOLES: u64 = 2;

/// Accesses that put a thread to sleep.
#[derive(Clone, Copy)]
pub(crate) enum Stops {
    /// Any access to a missing page.
    Missing = 1,
    /// A write to a protected page.
    Writes = 2,
}

/// The reason why pages were not moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NotMoved {
    /// This page and those after it are held by the kernel, or are shared with a child.
    Busy(u64),
    /// Memory of this kind cannot be moved by it.
    Unable,
}

impl Uffd {
    /// Opens the most capable userfaultfd that this process may have.
    pub fn open() -> Option<Self> {
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
        let call = |flags: i32| {
            // SAFETY: makes a descriptor, which nobody else owns.
            let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
            // SAFETY: as above.
            (fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
        };
        let device = || {
            let dev = std::fs::File::options().read(true).write(true).open("/dev/userfaultfd").ok()?;
            // SAFETY: makes a descriptor, which nobody else owns.
            let fd = unsafe { libc::ioctl(dev.as_raw_fd(), NEW, flags) };
            // SAFETY: as above.
            (fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd) })
        };
        let full = call(flags);
        if full.is_none() && super::page_move::last_errno() == libc::ENOSYS {
            // The kernel lacks it; or this is valgrind, which must not get requests that it does not know.
            return None;
        }
        let (fd, full) = match full.or_else(device) {
            Some(fd) => (fd, true),
            None => (call(flags | USER_MODE_ONLY)?, false),
        };
        let mut u = Uffd { fd, full, moves: false, protects: false };
        let protects = FEATURE_WP | FEATURE_WP_SHMEM;
        for features in [protects | FEATURE_MOVE, protects, 0] {
            let mut api = [VERSION, features, 0];
            if u.ioctl(API, api.as_mut_ptr()) == 0 {
                (u.moves, u.protects) = (features & FEATURE_MOVE != 0, features & FEATURE_WP_SHMEM != 0);
                return Some(u);
            }
        }
        None
    }

    /// Replaces the descriptor.
    pub fn with_fd(self, f: impl FnOnce(OwnedFd) -> Option<OwnedFd>) -> Option<Self> {
        Some(Uffd { fd: f(self.fd)?, ..self })
    }

    /// Returns 0 or an errno.
    fn ioctl(&self, request: libc::c_ulong, arg: *mut u64) -> i32 {
        // SAFETY: each caller passes the structure of its request, of full length.
        let r = unsafe { libc::syscall(libc::SYS_ioctl, self.fd.as_raw_fd(), request, arg) };
        if r == 0 { 0 } else { super::page_move::last_errno() }
    }

    /// Watches a range. Returns false if memory of this kind cannot be watched, or something else watches it.
    pub fn watch(&self, at: u64, len: u64, stops: Stops) -> bool {
        let mut arg = [at, len, stops as u64, 0];
        self.ioctl(REGISTER, arg.as_mut_ptr()) == 0
    }

    /// Stops watching; threads that sleep go on.
    pub fn forget(&self, at: u64, len: u64) {
        let mut arg = [at, len];
        self.ioctl(UNREGISTER, arg.as_mut_ptr());
        self.wake(at, len);
    }

    /// Wakes threads that sleep for a page of the range, whatever is mapped there now.
    pub fn wake(&self, at: u64, len: u64) {
        let mut arg = [at, len];
        self.ioctl(WAKE, arg.as_mut_ptr());
    }

    /// Lets writers of a watched range sleep from now on. Returns false if it is not watched any more.
    pub fn protect(&self, at: u64, len: u64) -> bool {
        loop {
            let mut arg = [at, len, 1];
            match self.ioctl(WRITEPROTECT, arg.as_mut_ptr()) {
                0 => return true,
                // A mapping is being changed.
                libc::EAGAIN => {}
                _ => return false,
            }
        }
    }

    /// Moves the pages of `[from, from + len)` to `to`; both ranges are watched. Holes stay holes.
    ///
    /// # Errors
    /// See [`NotMoved`]; pages before the failing one have moved.
    pub fn move_pages(&self, from: u64, to: u64, len: u64) -> Result<(), NotMoved> {
        let mut done = 0;
        while done < len {
            let mut arg = [to + done, from + done, len - done, ALLOW_HOLES, 0];
            let e = self.ioctl(MOVE, arg.as_mut_ptr());
            let moved = arg[4] as i64;
            if moved > 0 {
                done += moved as u64;
            }
            match e {
                0 | libc::EAGAIN => {}
                libc::EBUSY => return Err(NotMoved::Busy(from + done)),
                _ => return Err(NotMoved::Unable),
            }
        }
        Ok(())
    }
}
