//! The connection to the lease socket ([`unirdma_abi::lease`]). It stands for the context, and is open as long.

use std::cell::Cell;
use std::ffi::c_void;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use unirdma_abi::lease::{Ask, EVICTED, HAS, REFUSED, SOFT, Told, VERSION, WAITS};
use unirdma_driver::fds::{Known, high};
use zerocopy::{FromZeros, IntoBytes};

use super::errno;
use super::failure::Failure;
use crate::trace::trace;

/// The decision of the virtual layer.
pub(super) enum Answer {
    /// A VF, with a descriptor of its device node.
    Has(Lease, Box<Told>, OwnedFd),
    /// The software RNIC.
    Soft(Lease),
    /// Nothing, for this reason.
    Refused(String),
}

/// Keeps the connection. Dropping it ends the context for the virtual layer.
pub(crate) struct Lease(Known);

/// A message of the virtual layer since the decision.
pub(crate) enum News {
    /// Nothing.
    None,
    /// The VF is gone, for this reason.
    Evicted(String),
    /// The connection has ended. A supervisor that is started anew ends it, too, and the program keeps its VF.
    End,
}

impl Lease {
    /// Keeps a connection at a high number.
    ///
    /// # Errors
    /// There are too many descriptors.
    pub fn keep(socket: OwnedFd) -> io::Result<Lease> {
        Known::new(socket).map(Lease)
    }

    /// The connection, if the program has not closed it.
    ///
    /// # Errors
    /// The program has.
    pub fn get(&self) -> io::Result<BorrowedFd<'_>> {
        self.0.get()
    }

    /// The news, without waiting. Not a cancellation point.
    pub fn news(&self) -> News {
        let Ok(socket) = self.get() else { return News::End };
        loop {
            let mut told = Told::new_zeroed();
            match recv(socket, told.as_mut_bytes(), RecvFlags::DONTWAIT) {
                Ok((_, size)) if size == size_of::<Told>() && told.kind == EVICTED => {
                    return News::Evicted(text(&told.text));
                }
                // News of later versions.
                Ok((_, 1..)) | Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return News::None,
                Ok((_, 0)) | Err(_) => return News::End,
            }
        }
    }
}

/// A text of the virtual layer. It ends with a zero byte, and has no control characters for a terminal.
pub(super) fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|&b| b == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).chars().filter(|c| !c.is_control()).collect()
}

/// Asks for a context, and waits until the virtual layer has decided.
///
/// The wait is a cancellation point, as `EventSource::next` of the driver is: the caller may hold no lock. If the
/// thread is cancelled, its end closes the connection.
///
/// # Errors
/// The socket does not answer.
pub(super) fn ask(path: &Path) -> Result<Answer, Failure> {
    ask_over(path, connect(path).map_err(|e| Failure::Ask(path.into(), e))?)
}

fn ask_over(path: &Path, socket: OwnedFd) -> Result<Answer, Failure> {
    let ask = Ask { version: VERSION, reserved: [0; 3] };
    // SAFETY: sends the bytes of `ask`, to a socket of this function.
    let sent = unsafe { libc::send(socket.as_raw_fd(), (&raw const ask).cast(), size_of::<Ask>(), libc::MSG_NOSIGNAL) };
    // A virtual layer that refuses before it was asked has closed its side, and its answer can be read.
    if sent < 0 && errno() != libc::EPIPE {
        return Err(Failure::Ask(path.into(), errno()));
    }
    let number = socket.as_raw_fd();
    WAITING.set(Some(socket));
    let answer = wait(path, number);
    let socket = WAITING.take().ok_or(Failure::Descriptors(libc::EBADF))?;
    match answer? {
        (told, Some(fd)) if told.kind == HAS => Ok(Answer::Has(keep(socket)?, told, fd)),
        (told, _) if told.kind == HAS => Err(Failure::Answer(path.into(), libc::EPROTO)),
        (told, _) if told.kind == SOFT => {
            trace!("the software RNIC is used: {}", text(&told.text));
            Ok(Answer::Soft(keep(socket)?))
        }
        (told, _) => Ok(Answer::Refused(text(&told.text))),
    }
}

thread_local! {
    /// The connection of a thread that waits. Nothing on the stack of a cancelled thread is dropped.
    static WAITING: Cell<Option<OwnedFd>> = const { Cell::new(None) };
}

/// Waits for a decision.
fn wait(path: &Path, socket: RawFd) -> Result<(Box<Told>, Option<OwnedFd>), Failure> {
    let mut has_told = false;
    loop {
        let (told, fd) = receive(socket).map_err(|e| Failure::Answer(path.into(), e))?;
        match told.kind {
            WAITS => {
                trace!("no VF is free: waits at place {}", told.place);
                if !has_told {
                    has_told = true;
                    crate::say(&format!("no VF is free: this program waits for one, at place {}", told.place));
                }
            }
            HAS | SOFT | REFUSED => return Ok((told, fd)),
            // News of later versions.
            _ => {}
        }
    }
}

fn keep(socket: OwnedFd) -> Result<Lease, Failure> {
    Lease::keep(socket).map_err(Failure::descriptors)
}

fn connect(path: &Path) -> Result<OwnedFd, i32> {
    // SAFETY: integers and bytes.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as u16;
    let bytes = path.as_os_str().as_bytes();
    if bytes.len() >= address.sun_path.len() {
        return Err(libc::ENAMETOOLONG);
    }
    for (to, from) in address.sun_path.iter_mut().zip(bytes) {
        *to = from.cast_signed();
    }
    // SAFETY: makes a socket.
    let fd = unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(errno());
    }
    // SAFETY: just made, and nobody else's.
    let socket = high(unsafe { OwnedFd::from_raw_fd(fd) }).map_err(|e| e.raw_os_error().unwrap_or(libc::EMFILE))?;
    loop {
        // SAFETY: an address of this function, with its size.
        let done = unsafe {
            libc::connect(socket.as_raw_fd(), (&raw const address).cast(), size_of::<libc::sockaddr_un>() as u32)
        };
        match done {
            0 => return Ok(socket),
            _ if errno() == libc::EINTR => {}
            _ => return Err(errno()),
        }
    }
}

/// The next message, with the descriptor that came along. This is the C library's function, not the system call, so
/// that it can be cancelled. A signal does not end the wait.
fn receive(socket: RawFd) -> Result<(Box<Told>, Option<OwnedFd>), i32> {
    /// Room for one descriptor, aligned as control messages are.
    #[repr(C, align(8))]
    struct Room([u8; 24]);
    let mut told = Box::new(Told::new_zeroed());
    let n = loop {
        let mut room = Room([0; 24]);
        let mut part = libc::iovec { iov_base: (&raw mut *told).cast::<c_void>(), iov_len: size_of::<Told>() };
        // SAFETY: integers and pointers.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
        (message.msg_control, message.msg_controllen) = ((&raw mut room).cast(), size_of::<Room>() as _);
        // SAFETY: all buffers are this function's, with their sizes.
        let n = unsafe { libc::recvmsg(socket, &raw mut message, libc::MSG_CMSG_CLOEXEC) };
        if n < 0 && errno() == libc::EINTR {
            continue;
        }
        if n < 0 {
            return Err(errno());
        }
        break (n as usize, take_descriptor(&message));
    };
    match n {
        (size, fd) if size == told.as_bytes().len() => Ok((told, fd)),
        (0, _) => Err(libc::ECONNRESET),
        _ => Err(libc::EPROTO),
    }
}

fn take_descriptor(message: &libc::msghdr) -> Option<OwnedFd> {
    // SAFETY: the control messages that the kernel has written; a descriptor that comes so is this process's own.
    unsafe {
        let head = libc::CMSG_FIRSTHDR(message).as_ref()?;
        let is_descriptor = head.cmsg_level == libc::SOL_SOCKET && head.cmsg_type == libc::SCM_RIGHTS;
        if !is_descriptor || (head.cmsg_len as usize) < libc::CMSG_LEN(4) as usize {
            return None;
        }
        Some(OwnedFd::from_raw_fd(libc::CMSG_DATA(head).cast::<RawFd>().read_unaligned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::IntoRawFd;

    #[test]
    fn texts_end_at_a_zero_and_keep_no_control_characters() {
        assert_eq!(text(b"uverbs0\0rest"), "uverbs0");
        assert_eq!(text(b"a\x1b[31mb"), "a[31mb");
        assert_eq!(text(b""), "");
    }

    /// Serves one program: reads its question and sends these messages, the last with a descriptor.
    fn serve(name: &str, messages: Vec<Told>) -> Result<Answer, Failure> {
        let dir = std::env::temp_dir().join(format!("unirdma-lease-{}-{name}", std::process::id()));
        let _ = std::fs::remove_file(&dir);
        // SAFETY: plain calls on a socket of this test.
        let listener = unsafe {
            let fd = libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0);
            let mut address: libc::sockaddr_un = std::mem::zeroed();
            address.sun_family = libc::AF_UNIX as u16;
            for (to, from) in address.sun_path.iter_mut().zip(dir.as_os_str().as_bytes()) {
                *to = from.cast_signed();
            }
            let size = size_of::<libc::sockaddr_un>() as u32;
            assert_eq!(libc::bind(fd, (&raw const address).cast(), size), 0);
            assert_eq!(libc::listen(fd, 1), 0);
            OwnedFd::from_raw_fd(fd)
        };
        let server = std::thread::spawn(move || {
            // SAFETY: plain calls; all buffers are as long as they are said to be.
            unsafe {
                let fd = libc::accept(listener.as_raw_fd(), std::ptr::null_mut(), std::ptr::null_mut());
                let peer = OwnedFd::from_raw_fd(fd);
                let mut ask = Ask { version: 0, reserved: [1; 3] };
                assert_eq!(libc::recv(peer.as_raw_fd(), (&raw mut ask).cast(), 16, 0), 16);
                assert_eq!(ask, Ask { version: VERSION, reserved: [0; 3] });
                for told in &messages {
                    let passed = std::fs::File::open("/dev/null").unwrap().into_raw_fd();
                    let mut control = [0u64; 3];
                    let mut part = libc::iovec { iov_base: std::ptr::from_ref(told) as *mut c_void, iov_len: 256 };
                    let mut m: libc::msghdr = std::mem::zeroed();
                    (m.msg_iov, m.msg_iovlen) = (&raw mut part, 1);
                    (m.msg_control, m.msg_controllen) = ((&raw mut control).cast(), 24);
                    let head = libc::CMSG_FIRSTHDR(&m);
                    ((*head).cmsg_level, (*head).cmsg_type) = (libc::SOL_SOCKET, libc::SCM_RIGHTS);
                    (*head).cmsg_len = libc::CMSG_LEN(4) as _;
                    libc::CMSG_DATA(head).cast::<RawFd>().write_unaligned(passed);
                    assert_eq!(libc::sendmsg(peer.as_raw_fd(), &m, 0), 256);
                    libc::close(passed);
                }
            }
        });
        let answer = ask(&dir);
        server.join().unwrap();
        let _ = std::fs::remove_file(&dir);
        answer
    }

    fn told(kind: u32, reason: &str) -> Told {
        let mut t = Told::new_zeroed();
        t.kind = kind;
        t.text[..reason.len()].copy_from_slice(reason.as_bytes());
        t
    }

    #[test]
    fn a_grant_comes_with_a_descriptor_after_any_number_of_waits() {
        let mut has = told(HAS, "");
        has.node[..7].copy_from_slice(b"uverbs3");
        let answer = serve("has", vec![told(WAITS, ""), told(77, "later"), told(WAITS, ""), has]);
        let Ok(Answer::Has(_, told, fd)) = answer else { panic!("no grant") };
        assert_eq!(text(&told.node), "uverbs3");
        // SAFETY: asks for the flags of a descriptor.
        assert_eq!(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFD) }, libc::FD_CLOEXEC);
    }

    #[test]
    fn a_refusal_that_did_not_wait_for_the_question_is_read() {
        let mut ends = [-1; 2];
        // SAFETY: plain calls on sockets of this test; the message is 256 bytes long.
        let mine = unsafe {
            assert_eq!(libc::socketpair(libc::AF_UNIX, libc::SOCK_SEQPACKET, 0, ends.as_mut_ptr()), 0);
            assert_eq!(libc::send(ends[1], told(REFUSED, "too many").as_bytes().as_ptr().cast(), 256, 0), 256);
            libc::close(ends[1]);
            OwnedFd::from_raw_fd(ends[0])
        };
        assert!(matches!(ask_over(Path::new("lease.sock"), mine), Ok(Answer::Refused(why)) if why == "too many"));
    }

    #[test]
    fn refusals_and_a_virtual_layer_that_hangs_up_are_told_apart() {
        let refused = serve("refused", vec![told(REFUSED, "no VF is free")]);
        assert!(matches!(refused, Ok(Answer::Refused(why)) if why == "no VF is free"));
        assert!(matches!(serve("soft", vec![told(SOFT, "dry")]), Ok(Answer::Soft(_))));
        assert!(matches!(serve("gone", vec![]), Err(Failure::Answer(_, libc::ECONNRESET))));
        assert!(matches!(ask(Path::new("/nowhere/lease.sock")), Err(Failure::Ask(_, libc::ENOENT))));
    }
}
