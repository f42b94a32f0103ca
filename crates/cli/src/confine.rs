//! Restrictions on a command in a container that namespaces do not impose: it cannot gain privileges by a setuid
//! program, type into the terminal that it was started from, use keys and descriptors of its starter, or ask the kernel
//! for the host's RDMA devices.

use std::io;

/// Requests of terminals that put characters into somebody's input: TIOCSTI, and TIOCLINUX on a console.
const TYPING: [u32; 2] = [0x5412, 0x541c];

#[cfg(target_arch = "aarch64")]
const NATIVE: u32 = 0xc000_00b7;
#[cfg(not(target_arch = "aarch64"))]
const NATIVE: u32 = 0xc000_003e;
/// Number of ioctl(2) for 32-bit programs, of x86 and of ARM.
const COMPAT_IOCTL: u32 = 54;
/// The same for socket(2). socketcall(2) of old x86 programs cannot be told apart by its arguments.
const COMPAT_SOCKET: u32 = if cfg!(target_arch = "aarch64") { 281 } else { 359 };
/// From here on x86-64 has system calls of x32 programs, whose ioctl(2) has another number; such programs do not run.
const X32: u32 = 0x4000_0000;

const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
const EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
const AT_LEAST: u16 = (libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K) as u16;
const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
/// Places in `struct seccomp_data`: the call's number, its architecture, the lower halves of its first arguments.
const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;
const ARGUMENTS: [u32; 3] = [16, 24, 32];

/// The filter: these ioctls fail with EPERM, sockets of RDMA netlink with EPROTONOSUPPORT, as without RDMA in the
/// kernel. Everything else is allowed.
fn filter() -> [libc::sock_filter; 20] {
    let op = |code, k, jt, jf| libc::sock_filter { code, jt, jf, k };
    let errno = |e: i32| libc::SECCOMP_RET_ERRNO | e as u32;
    [
        op(LOAD, ARCHITECTURE, 0, 0),
        op(EQUAL, NATIVE, 0, 4),
        op(LOAD, NUMBER, 0, 0),
        op(AT_LEAST, X32, 13, 0),
        op(EQUAL, libc::SYS_ioctl as u32, 4, 0),
        op(EQUAL, libc::SYS_socket as u32, 6, 10),
        // A call of another architecture.
        op(LOAD, NUMBER, 0, 0),
        op(EQUAL, COMPAT_IOCTL, 1, 0),
        op(EQUAL, COMPAT_SOCKET, 3, 7),
        // Any ioctl.
        op(LOAD, ARGUMENTS[1], 0, 0),
        op(EQUAL, TYPING[0], 7, 0),
        op(EQUAL, TYPING[1], 6, 4),
        // Any socket.
        op(LOAD, ARGUMENTS[0], 0, 0),
        op(EQUAL, libc::AF_NETLINK as u32, 0, 2),
        op(LOAD, ARGUMENTS[2], 0, 0),
        op(EQUAL, libc::NETLINK_RDMA as u32, 3, 0),
        op(RETURN, libc::SECCOMP_RET_ALLOW, 0, 0),
        op(RETURN, errno(libc::ENOSYS), 0, 0),
        op(RETURN, errno(libc::EPERM), 0, 0),
        op(RETURN, errno(libc::EPROTONOSUPPORT), 0, 0),
    ]
}

fn install_filter() -> io::Result<()> {
    let filter = filter();
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_ptr().cast_mut() };
    // Without this flag some kernels make every load wait for the stores before it, in all that the command runs.
    let flags = libc::SECCOMP_FILTER_FLAG_SPEC_ALLOW;
    // SAFETY: the program lives until the call returns; the kernel copies it.
    let r =
        unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, std::ptr::from_ref(&program)) };
    if r == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Confines this process and all that it starts.
///
/// # Errors
/// The kernel refuses `no_new_privs` or the filter.
pub(crate) fn confine() -> io::Result<()> {
    rustix::thread::set_no_new_privs(true)?;
    install_filter()?;
    const JOIN_SESSION_KEYRING: i32 = 1;
    // SAFETY: takes a name or null. Kernels without keys have none to take away.
    unsafe { libc::syscall(libc::SYS_keyctl, JOIN_SESSION_KEYRING, std::ptr::null::<libc::c_char>()) };
    Ok(())
}

/// Closes all descriptors but standard input, output and error: now, or when a program is executed.
pub(crate) fn close_descriptors(on_exec: bool) -> io::Result<()> {
    const CLOSE_RANGE_CLOEXEC: u32 = 4;
    let flags = if on_exec { CLOSE_RANGE_CLOEXEC } else { 0 };
    // SAFETY: either the process executes a program or ends next, or nothing uses its descriptors any more.
    let r = unsafe { libc::syscall(libc::SYS_close_range, 3u32, u32::MAX, flags) };
    if r == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Refuses a directory as standard input, output or error: the command could leave its container by it.
pub(crate) fn check_standard_descriptors() -> io::Result<()> {
    for (fd, name) in
        [(rustix::stdio::stdin(), "input"), (rustix::stdio::stdout(), "output"), (rustix::stdio::stderr(), "error")]
    {
        let is_dir = |s: rustix::fs::Stat| rustix::fs::FileType::from_raw_mode(s.st_mode).is_dir();
        if rustix::fs::fstat(fd).is_ok_and(is_dir) {
            return Err(io::Error::other(format!(
                "standard {name} is a directory, by which the command could leave its container"
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const I386: u32 = 0x4000_0003;
    const ALLOW: u32 = libc::SECCOMP_RET_ALLOW;

    fn errno(e: i32) -> u32 {
        libc::SECCOMP_RET_ERRNO | e as u32
    }

    /// Runs the filter as the kernel does.
    fn answer(arch: u32, number: u32, arguments: [u32; 3]) -> u32 {
        let (program, mut at, mut a) = (filter(), 0, 0);
        loop {
            let op = program[at];
            at += 1;
            let jump = |taken: bool| usize::from(if taken { op.jt } else { op.jf });
            match op.code {
                LOAD if op.k == NUMBER => a = number,
                LOAD if op.k == ARCHITECTURE => a = arch,
                LOAD => a = arguments[ARGUMENTS.iter().position(|&at| at == op.k).unwrap()],
                EQUAL => at += jump(a == op.k),
                AT_LEAST => at += jump(a >= op.k),
                _ => return op.k,
            }
        }
    }

    #[test]
    fn nobody_types_into_a_terminal() {
        let ioctl = libc::SYS_ioctl as u32;
        for typing in TYPING.map(|t| [0, t, 0]) {
            let both = (answer(NATIVE, ioctl, typing), answer(I386, COMPAT_IOCTL, typing));
            assert_eq!(both, (errno(libc::EPERM), errno(libc::EPERM)));
        }
        let size = [0, libc::TIOCGWINSZ as u32, 0];
        assert_eq!((answer(NATIVE, ioctl, size), answer(I386, COMPAT_IOCTL, size)), (ALLOW, ALLOW));
        let other = [0, TYPING[0], 0];
        assert_eq!((answer(NATIVE, 1, other), answer(I386, 1, other)), (ALLOW, ALLOW));
        assert_eq!(answer(NATIVE, X32 + 514, other), errno(libc::ENOSYS));
    }

    #[test]
    fn nobody_asks_the_kernel_for_rdma_devices() {
        let socket = libc::SYS_socket as u32;
        let (netlink, unix) = (libc::AF_NETLINK as u32, libc::AF_UNIX as u32);
        let rdma = [netlink, 3, libc::NETLINK_RDMA as u32];
        let both = (answer(NATIVE, socket, rdma), answer(I386, COMPAT_SOCKET, rdma));
        assert_eq!(both, (errno(libc::EPROTONOSUPPORT), errno(libc::EPROTONOSUPPORT)));
        for other in [[netlink, 3, libc::NETLINK_ROUTE as u32], [unix, 3, libc::NETLINK_RDMA as u32]] {
            assert_eq!((answer(NATIVE, socket, other), answer(I386, COMPAT_SOCKET, other)), (ALLOW, ALLOW));
        }
        assert_eq!(answer(NATIVE, 1, rdma), ALLOW);
    }
}
