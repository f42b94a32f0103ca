//! Sockets of NETLINK_RDMA, by which programs ask the kernel for RDMA devices. A program gets another netlink socket in
//! their place, on which all calls but sending are the kernel's. What is sent there goes to our library, which answers.

use core::ffi::{c_int, c_void};
use core::mem::transmute;
use core::ptr;
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use super::{__errno_location, NEXT, NONE, dlsym, ours};

const AF_NETLINK: c_int = 16;
const NETLINK_RDMA: c_int = 20;
/// Netlink between programs.
const NETLINK_USERSOCK: c_int = 2;
const SOL_SOCKET: c_int = 1;
const SO_PROTOCOL: c_int = 38;
const SO_DOMAIN: c_int = 39;
const EPROTONOSUPPORT: c_int = 93;
const EMSGSIZE: c_int = 90;

/// `struct iovec`.
#[repr(C)]
struct Piece {
    at: *const u8,
    length: usize,
}

/// The beginning of `struct msghdr`.
#[repr(C)]
pub struct Message {
    name: *const c_void,
    name_length: u32,
    pieces: *const Piece,
    count: usize,
}

unsafe extern "C" {
    fn getsockopt(fd: c_int, level: c_int, option: c_int, value: *mut c_int, size: *mut u32) -> c_int;
    fn close(fd: c_int) -> c_int;
}

type Socket = unsafe extern "C" fn(c_int, c_int, c_int) -> c_int;
type Send = unsafe extern "C" fn(c_int, *const c_void, usize, c_int) -> isize;
type SendTo = unsafe extern "C" fn(c_int, *const c_void, usize, c_int, *const c_void, u32) -> isize;
type SendMessage = unsafe extern "C" fn(c_int, *const Message, c_int) -> isize;
type Answer = unsafe extern "C" fn(c_int, *const c_void, usize) -> isize;

/// The functions that those below replace: socket, send, sendto, sendmsg.
static REAL: [AtomicUsize; 4] = [const { AtomicUsize::new(0) }; 4];

/// Finds them before the program begins: `send` may be called in a handler of signals, which must not look for symbols.
#[used]
#[unsafe(link_section = ".init_array")]
static AT_START: extern "C" fn() = find_real;

extern "C" fn find_real() {
    for (real, name) in REAL.iter().zip([c"socket", c"send", c"sendto", c"sendmsg"]) {
        // SAFETY: a text.
        real.store(unsafe { dlsym(NEXT, name.as_ptr()) }.expose_provenance(), Ordering::Relaxed);
    }
}

/// One of these functions. Constructors of other libraries may call it before the one above.
fn real(n: usize) -> *const c_void {
    let found = || REAL.get(n).map_or(0, |r| r.load(Ordering::Relaxed));
    if found() == 0 {
        find_real();
    }
    ptr::with_exposed_provenance(found())
}

/// A bit for each descriptor that is such a socket, unless the program has closed it since.
static GIVEN: [AtomicU64; 16] = [const { AtomicU64::new(0) }; 16];

/// The word of a descriptor in [`GIVEN`], and its bit.
fn place(fd: c_int) -> Option<(&'static AtomicU64, u64)> {
    let fd = usize::try_from(fd).ok()?;
    Some((GIVEN.get(fd / 64)?, 1 << (fd % 64)))
}

fn is_given(fd: c_int) -> bool {
    let Some((word, bit)) = place(fd).filter(|(word, bit)| word.load(Ordering::Relaxed) & bit != 0) else {
        return false;
    };
    let option = |option| {
        let (mut value, mut size) = (0, size_of::<c_int>() as u32);
        // SAFETY: the value and its size live until the call returns.
        let r = unsafe { getsockopt(fd, SOL_SOCKET, option, &mut value, &mut size) };
        (r == 0).then_some(value)
    };
    let is = option(SO_DOMAIN) == Some(AF_NETLINK) && option(SO_PROTOCOL) == Some(NETLINK_USERSOCK);
    if !is {
        // The number is another file's by now.
        word.fetch_and(!bit, Ordering::Relaxed);
    }
    is
}

fn fail(errno: c_int) -> c_int {
    // SAFETY: the thread's own variable.
    unsafe { *__errno_location() = errno };
    -1
}

fn answerer() -> Option<Answer> {
    let ours = ours();
    if ours == NONE {
        return None;
    }
    // SAFETY: a handle of dlopen(3), and a text. The function has this type.
    unsafe {
        let found = dlsym(ptr::with_exposed_provenance_mut(ours), c"unirdma_answer_netlink".as_ptr());
        (!found.is_null()).then(|| transmute::<*mut c_void, Answer>(found))
    }
}

/// Hands on what is sent on such a socket. `length` bytes are at `bytes`.
unsafe fn answer(fd: c_int, bytes: *const c_void, length: usize) -> isize {
    match answerer() {
        // SAFETY: as the caller promises.
        Some(answer) => unsafe { answer(fd, bytes, length) },
        None => fail(EPROTONOSUPPORT) as isize,
    }
}

/// socket(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    // SAFETY: the function has this type.
    let real = unsafe { transmute::<*const c_void, Socket>(real(0)) };
    if (domain, protocol) != (AF_NETLINK, NETLINK_RDMA) {
        // SAFETY: as the caller promises.
        return unsafe { real(domain, kind, protocol) };
    }
    if answerer().is_none() {
        return fail(EPROTONOSUPPORT);
    }
    // SAFETY: makes a descriptor.
    let fd = unsafe { real(AF_NETLINK, kind, NETLINK_USERSOCK) };
    match place(fd) {
        Some((word, bit)) => {
            word.fetch_or(bit, Ordering::Relaxed);
            fd
        }
        None if fd < 0 => fd,
        None => {
            // SAFETY: closes what was made above.
            unsafe { close(fd) };
            fail(EPROTONOSUPPORT)
        }
    }
}

/// send(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn send(fd: c_int, bytes: *const c_void, length: usize, flags: c_int) -> isize {
    // SAFETY: as the caller promises; the function has this type.
    unsafe {
        if is_given(fd) { answer(fd, bytes, length) } else { transmute::<_, Send>(real(1))(fd, bytes, length, flags) }
    }
}

/// sendto(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendto(
    fd: c_int,
    bytes: *const c_void,
    length: usize,
    flags: c_int,
    to: *const c_void,
    size: u32,
) -> isize {
    // SAFETY: as the caller promises; the function has this type.
    unsafe {
        if is_given(fd) {
            answer(fd, bytes, length)
        } else {
            transmute::<_, SendTo>(real(2))(fd, bytes, length, flags, to, size)
        }
    }
}

/// sendmsg(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendmsg(fd: c_int, message: *const Message, flags: c_int) -> isize {
    if !is_given(fd) {
        // SAFETY: as the caller promises; the function has this type.
        return unsafe { transmute::<_, SendMessage>(real(3))(fd, message, flags) };
    }
    let mut whole = [0u8; 4096];
    let mut length = 0;
    // SAFETY: the caller promises that these are pieces of readable memory. Nothing is written beyond the buffer.
    unsafe {
        for n in 0..(*message).count {
            let piece = &*(*message).pieces.add(n);
            if piece.length > whole.len() - length {
                return fail(EMSGSIZE) as isize;
            }
            ptr::copy_nonoverlapping(piece.at, whole.as_mut_ptr().add(length), piece.length);
            length += piece.length;
        }
        answer(fd, whole.as_ptr().cast(), length)
    }
}
