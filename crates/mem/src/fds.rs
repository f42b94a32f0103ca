//! Descriptors that a library keeps in somebody else's process.
//!
//! The program owns the table of descriptors. It may close all that it does not know, and open files of its own under
//! the same numbers. So the library's descriptors stay away from the numbers that a program expects to get, and before
//! the library writes, reads or closes a number it checks which file is there now.

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use rustix::process::{Resource, getrlimit};

/// `select(2)` takes descriptors below this.
const SELECTABLE: RawFd = 1024;
/// Numbers below this are standard input, output and error, also while they are closed.
const STANDARD: RawFd = 3;

/// Numbers from which a free one is searched, the best first, in a process whose numbers end at `limit`.
fn bases(limit: u64) -> [RawFd; 5] {
    let top = RawFd::try_from(limit).unwrap_or(RawFd::MAX).clamp(STANDARD, SELECTABLE);
    [top - top / 16, top * 3 / 4, top / 2, top / 4, STANDARD].map(|b| b.max(STANDARD))
}

/// Moves a descriptor to a high number: never 0 to 2, close-on-exec, and below 1024 while there is room, since a
/// program may pass it to `select(2)`. The old number is closed; it stays if it is the last that the process may have.
///
/// # Errors
/// `EMFILE` if no number from 3 on is free. The descriptor is closed then.
pub fn high(fd: OwnedFd) -> io::Result<OwnedFd> {
    let mut last = Err(rustix::io::Errno::MFILE);
    for base in bases(getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)) {
        last = rustix::io::fcntl_dupfd_cloexec(&fd, base);
        if last.as_ref().is_ok_and(|new| new.as_raw_fd() < SELECTABLE) {
            break;
        }
    }
    match last {
        // The present number is as good as another one.
        Err(rustix::io::Errno::MFILE) if fd.as_raw_fd() >= STANDARD => {
            rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC)?;
            Ok(fd)
        }
        other => Ok(other?),
    }
}

/// By what an open file is recognized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Identity {
    /// Device and inode, which no other file has.
    Inode(u64, u64),
    /// The signal [`MARK`] of an eventfd. All eventfds, epoll sets and timers share one inode.
    Mark,
}

/// The signal that marks eventfds and epoll sets of the library (`F_SETSIG`). It belongs to the open file, is 0 in
/// those of a program, and is never sent, since these files have no signal-driven I/O. It is the last real-time signal.
const MARK: libc::c_int = 64;
const F_SETSIG: libc::c_int = 10;
const F_GETSIG: libc::c_int = 11;

fn identity(fd: BorrowedFd<'_>) -> io::Result<Identity> {
    let stat = rustix::fs::fstat(fd)?;
    Ok(Identity::Inode(stat.st_dev, stat.st_ino))
}

/// A descriptor and the identity of its file. It is closed when it is dropped, if it is still that file.
#[derive(Debug)]
pub struct Known {
    fd: ManuallyDrop<OwnedFd>,
    identity: Identity,
}

impl Known {
    /// Moves `fd` to a high number and remembers its identity. The file must have an inode of its own, as sockets,
    /// pipes, memory files and ordinary files do.
    ///
    /// # Errors
    /// As [`high`].
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        let fd = high(fd)?;
        let identity = identity(fd.as_fd())?;
        Ok(Known { fd: ManuallyDrop::new(fd), identity })
    }

    /// Moves an eventfd or an epoll set to a high number and marks it. Files of the program do not have the mark, so
    /// they are told apart from it; other files of the library with the mark are not.
    ///
    /// # Errors
    /// As [`high`], and `EINVAL` if the mark cannot be set.
    pub fn marked(fd: OwnedFd) -> io::Result<Self> {
        let fd = high(fd)?;
        // SAFETY: F_SETSIG takes a number, and changes nothing of an eventfd but this number.
        if unsafe { libc::fcntl(fd.as_raw_fd(), F_SETSIG, MARK) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Known { fd: ManuallyDrop::new(fd), identity: Identity::Mark })
    }

    /// An empty file of its own.
    ///
    /// # Errors
    /// Those of `memfd_create(2)`.
    pub fn empty() -> io::Result<Self> {
        Known::new(rustix::fs::memfd_create(c"unirdma", rustix::fs::MemfdFlags::CLOEXEC)?)
    }

    /// True while the number still names the first file.
    pub fn still_ours(&self) -> bool {
        match self.identity {
            Identity::Inode(..) => identity(self.fd.as_fd()).is_ok_and(|now| now == self.identity),
            // SAFETY: F_GETSIG has no argument. If the program has closed the number, the call fails.
            Identity::Mark => unsafe { libc::fcntl(self.as_raw_fd(), F_GETSIG) == MARK },
        }
    }

    /// The descriptor, if it is still ours. The check costs one system call.
    ///
    /// # Errors
    /// `EBADF` if the program has closed it.
    pub fn get(&self) -> io::Result<BorrowedFd<'_>> {
        if self.still_ours() { Ok(self.fd.as_fd()) } else { Err(rustix::io::Errno::BADF.into()) }
    }
}

impl Known {
    /// Closes the descriptor if it is still ours. It allocates nothing, for fork handlers.
    pub fn close(&self) {
        if self.still_ours() {
            // SAFETY: the number is this file's. Afterwards it is not, and it is not used any more.
            unsafe { libc::close(self.as_raw_fd()) };
        }
    }

    /// Puts another file with an inode of its own in the place of this one, under the same number; not if the program
    /// has done so already.
    pub fn replace(&mut self, with: OwnedFd) {
        if !self.still_ours() {
            return;
        }
        let place = rustix::io::dup3(&with, &mut self.fd, rustix::io::DupFlags::CLOEXEC);
        if let (Ok(()), Ok(identity)) = (place, identity(with.as_fd())) {
            self.identity = identity;
        }
    }
}

impl AsRawFd for Known {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

/// Without the check: for calls that do no harm to a file of the program, such as `send(2)`, which only sockets accept.
impl AsFd for Known {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Known {
    fn drop(&mut self) {
        if self.still_ours() {
            // SAFETY: dropped once, here.
            unsafe { ManuallyDrop::drop(&mut self.fd) };
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    use std::fs::File;
    use std::os::fd::FromRawFd;

    fn pair() -> (OwnedFd, OwnedFd) {
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
    }

    #[test]
    fn numbers_are_high_whatever_the_limit() {
        assert_eq!(bases(1024), [960, 768, 512, 256, 3]);
        assert_eq!(bases(u64::MAX), bases(1024));
        assert_eq!(bases(64), [60, 48, 32, 16, 3]);
        assert_eq!(bases(0), [3; 5]);
        assert!(bases(8).iter().all(|&b| (3..=8).contains(&b)));
    }

    #[test]
    fn a_moved_descriptor_is_the_same_file_and_closed_on_exec() {
        let (a, b) = pair();
        let old = rustix::fs::fstat(&a).unwrap();
        let a = high(a).unwrap();
        assert_eq!(old.st_ino, rustix::fs::fstat(&a).unwrap().st_ino);
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        assert!(a.as_raw_fd() >= bases(limit)[4] && a.as_raw_fd() < SELECTABLE);
        assert!(rustix::io::fcntl_getfd(&a).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
        // The old number is closed: dropping the new one ends the file.
        drop(a);
        assert_eq!(rustix::io::read(&b, &mut [0; 4]), Ok(0));
    }

    #[test]
    fn a_number_that_the_program_has_taken_is_left_alone() {
        let (a, b) = pair();
        let known = Known::new(a).unwrap();
        assert!(known.still_ours());
        let number = known.as_raw_fd();
        // As a program that closes all descriptors and opens its own files.
        let mine = File::open("/dev/null").unwrap();
        // SAFETY: the number is `known`'s, which sees that it is another file.
        let mut place = ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(number) });
        rustix::io::dup2(&mine, &mut place).unwrap();
        assert!(!known.still_ours());
        assert_eq!(known.get().unwrap_err().raw_os_error(), Some(9));
        drop(known);
        assert!(rustix::fs::fstat(&*place).is_ok(), "the program's own file was closed");
        drop(ManuallyDrop::into_inner(place));
        assert_eq!(rustix::io::read(&b, &mut [0; 4]), Ok(0));
    }

    #[test]
    fn an_eventfd_of_the_program_is_told_apart() {
        use rustix::event::{EventfdFlags, eventfd};
        let new = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let ours = new();
        let other_end = rustix::io::dup(&ours).unwrap();
        let known = Known::marked(ours).unwrap();
        // The mark takes nothing from what an eventfd does.
        rustix::io::write(known.get().unwrap(), &3u64.to_ne_bytes()).unwrap();
        let mut counter = [0; 8];
        assert_eq!(rustix::io::read(&other_end, &mut counter), Ok(8));
        assert_eq!(u64::from_ne_bytes(counter), 3);
        // As a daemon that closes all descriptors and makes an eventfd of its own, which gets the number.
        let mine = new();
        // SAFETY: the number is `known`'s, which sees that it is another file.
        let mut place = ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(known.as_raw_fd()) });
        rustix::io::dup2(&mine, &mut place).unwrap();
        assert_eq!(known.get().unwrap_err().raw_os_error(), Some(9));
        drop(known);
        assert_eq!(rustix::io::read(&*place, &mut counter), Err(rustix::io::Errno::AGAIN), "it is open, and 0");
        drop(ManuallyDrop::into_inner(place));
        let known = Known::marked(new()).unwrap();
        known.close();
        assert_eq!(known.get().unwrap_err().raw_os_error(), Some(9), "nothing is open");
    }

    #[test]
    fn a_descriptor_that_is_still_ours_is_closed() {
        let (a, b) = pair();
        drop(Known::new(a).unwrap());
        assert_eq!(rustix::io::read(&b, &mut [0; 4]), Ok(0));
    }
}
