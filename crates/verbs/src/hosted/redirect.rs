//! Functions of the C library as the real libibverbs and its providers see them. What they look for in sysfs is in a
//! directory that the virtual layer has prepared, the device node is the descriptor of the lease, and there is no RDMA
//! netlink. Other libraries and the program see nothing of this: only the two libraries' own tables are changed.

use std::ffi::{CStr, CString, OsString, c_char, c_int, c_uint, c_ulong, c_void};
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use unirdma_verbs_abi::{ibv_ah_attr, ibv_context};

use super::async_events;
use crate::lock;

/// The lease for which the real library looks or looked last.
pub(super) struct Present {
    /// Directory in place of `/sys/class`.
    pub sysfs: PathBuf,
    /// The name of the node in `/dev/infiniband`.
    pub node: String,
    /// The name of the verbs device.
    pub device: String,
    /// The name that programs see.
    pub virtual_name: String,
    /// Descriptor of the node, until the real library has opened it.
    pub descriptor: Option<OwnedFd>,
    /// The number that it has had since then.
    pub opened: RawFd,
}

pub(super) static PRESENT: Mutex<Option<Present>> = Mutex::new(None);

/// Descriptors of device nodes that came by leases, by number: 0 or [`OURS`] with the kernel driver's number.
static DEVICES: [AtomicU32; 4096] = [const { AtomicU32::new(0) }; 4096];
const OURS: u32 = 1 << 31;
/// The kernel's soft RNIC, of `enum rdma_driver_id`.
const DRIVER_RXE: u32 = 14;

/// The address of libnl's `nl_connect`.
pub(super) static NL_CONNECT: AtomicUsize = AtomicUsize::new(0);
/// The address of the real `ibv_resolve_eth_l2_from_gid`.
pub(super) static RESOLVE: AtomicUsize = AtomicUsize::new(0);

const NETLINK_RDMA: c_int = 20;
const SYSFS: &[u8] = b"/sys/class/infiniband";
const NODES: &[u8] = b"/dev/infiniband/";

fn entry(fd: RawFd) -> Option<&'static AtomicU32> {
    DEVICES.get(usize::try_from(fd).ok()?)
}

/// The kernel driver of a device node that came by a lease, once it is known; 0 before.
fn driver(fd: RawFd) -> Option<u32> {
    let e = entry(fd)?.load(Ordering::Relaxed);
    (e & OURS != 0).then_some(e & !OURS)
}

/// Where a path leads; `None` if it is as it is.
fn redirected(path: &[u8], p: &Present) -> Option<CString> {
    let rest = path.strip_prefix(SYSFS)?;
    let class_end = rest.iter().position(|&b| b == b'/').unwrap_or(rest.len());
    // `infiniband` and what begins with it, such as `infiniband_verbs`.
    if rest[..class_end].first().is_some_and(|&b| b != b'_') {
        return None;
    }
    let mut to = p.sysfs.as_os_str().as_bytes().to_vec();
    to.extend(b"/infiniband");
    to.extend(&rest[..class_end]);
    let mut rest = &rest[class_end..];
    // A provider that makes a path of the device's name finds the name that programs see.
    let name = p.virtual_name.as_bytes();
    if class_end == 0
        && let Some(after) = rest.strip_prefix(b"/").and_then(|r| r.strip_prefix(name))
        && after.first().is_none_or(|&b| b == b'/')
    {
        to.push(b'/');
        to.extend(p.device.as_bytes());
        rest = after;
    }
    to.extend(rest);
    CString::new(to).ok()
}

/// Calls `f` with the path to use.
unsafe fn with_path<R>(path: *const c_char, f: impl FnOnce(*const c_char) -> R) -> R {
    // SAFETY: the library passes a path, or NULL, which is passed on.
    let bytes = if path.is_null() { &[][..] } else { unsafe { CStr::from_ptr(path) }.to_bytes() };
    let to = lock(&PRESENT).as_ref().and_then(|p| redirected(bytes, p));
    match to {
        Some(to) => f(to.as_ptr()),
        None => f(path),
    }
}

/// True if `path` is the node of the lease.
unsafe fn is_node(path: *const c_char, p: &Present) -> bool {
    // SAFETY: as above.
    !path.is_null() && unsafe { CStr::from_ptr(path) }.to_bytes().strip_prefix(NODES) == Some(p.node.as_bytes())
}

/// The descriptor of the lease's node, if `path` is it.
unsafe fn open_node(path: *const c_char) -> Option<RawFd> {
    let mut present = lock(&PRESENT);
    // SAFETY: as above.
    let p = present.as_mut().filter(|p| unsafe { is_node(path, p) })?;
    let fd = match p.descriptor.take() {
        Some(first) => first.into_raw_fd(),
        // SAFETY: a number; if it is open no more, this fails.
        None => unsafe { libc::fcntl(p.opened, libc::F_DUPFD_CLOEXEC, 3) },
    };
    p.opened = fd;
    match entry(fd) {
        Some(e) => e.store(OURS, Ordering::Relaxed),
        None if fd >= 0 => {
            // SAFETY: it has just been made.
            drop(unsafe { OwnedFd::from_raw_fd(fd) });
            crate::set_errno(libc::EMFILE);
            return Some(-1);
        }
        None => {}
    }
    Some(fd)
}

unsafe extern "C" fn open(path: *const c_char, flags: c_int, mode: c_uint) -> c_int {
    // SAFETY: the arguments of open(2).
    unsafe { open_node(path).unwrap_or_else(|| with_path(path, |p| libc::open(p, flags, mode))) }
}

/// As `open`, for libraries that were built with checks.
unsafe extern "C" fn open_2(path: *const c_char, flags: c_int) -> c_int {
    // SAFETY: as open.
    unsafe { open(path, flags, 0) }
}

unsafe extern "C" fn openat(dir: c_int, path: *const c_char, flags: c_int, mode: c_uint) -> c_int {
    // SAFETY: the arguments of openat(2).
    unsafe { open_node(path).unwrap_or_else(|| with_path(path, |p| libc::openat(dir, p, flags, mode))) }
}

unsafe extern "C" fn openat_2(dir: c_int, path: *const c_char, flags: c_int) -> c_int {
    // SAFETY: as openat.
    unsafe { openat(dir, path, flags, 0) }
}

unsafe extern "C" fn fopen(path: *const c_char, mode: *const c_char) -> *mut libc::FILE {
    // SAFETY: the arguments of fopen(3).
    unsafe { with_path(path, |p| libc::fopen(p, mode)) }
}

unsafe extern "C" fn opendir(path: *const c_char) -> *mut libc::DIR {
    // SAFETY: the argument of opendir(3).
    unsafe { with_path(path, |p| libc::opendir(p)) }
}

/// `stat` of the lease's node, if `path` is it.
unsafe fn stat_node(path: *const c_char, to: *mut libc::stat) -> Option<c_int> {
    let present = lock(&PRESENT);
    // SAFETY: as above.
    let p = present.as_ref().filter(|p| unsafe { is_node(path, p) })?;
    let fd = p.descriptor.as_ref().map_or(p.opened, AsRawFd::as_raw_fd);
    // SAFETY: the library's buffer.
    Some(unsafe { libc::fstat(fd, to) })
}

unsafe extern "C" fn stat(path: *const c_char, to: *mut libc::stat) -> c_int {
    // SAFETY: the arguments of stat(2).
    unsafe { stat_node(path, to).unwrap_or_else(|| with_path(path, |p| libc::stat(p, to))) }
}

unsafe extern "C" fn lstat(path: *const c_char, to: *mut libc::stat) -> c_int {
    // SAFETY: the arguments of lstat(2).
    unsafe { stat_node(path, to).unwrap_or_else(|| with_path(path, |p| libc::lstat(p, to))) }
}

unsafe extern "C" fn fstatat(dir: c_int, path: *const c_char, to: *mut libc::stat, flags: c_int) -> c_int {
    // SAFETY: the arguments of fstatat(2).
    unsafe { stat_node(path, to).unwrap_or_else(|| with_path(path, |p| libc::fstatat(dir, p, to, flags))) }
}

/// `stat` of libraries that were built with a C library before 2.33.
unsafe extern "C" fn xstat(_version: c_int, path: *const c_char, to: *mut libc::stat) -> c_int {
    // SAFETY: as stat; on 64-bit machines there is one version of the structure.
    unsafe { stat(path, to) }
}

unsafe extern "C" fn lxstat(_version: c_int, path: *const c_char, to: *mut libc::stat) -> c_int {
    // SAFETY: as xstat.
    unsafe { lstat(path, to) }
}

unsafe extern "C" fn access(path: *const c_char, mode: c_int) -> c_int {
    // SAFETY: the arguments of access(2).
    unsafe {
        if lock(&PRESENT).as_ref().is_some_and(|p| is_node(path, p)) {
            return 0;
        }
        with_path(path, |p| libc::access(p, mode))
    }
}

unsafe extern "C" fn readlink(path: *const c_char, to: *mut c_char, size: usize) -> isize {
    // SAFETY: the arguments of readlink(2).
    unsafe { with_path(path, |p| libc::readlink(p, to, size)) }
}

unsafe extern "C" fn readlink_chk(path: *const c_char, to: *mut c_char, size: usize, room: usize) -> isize {
    // SAFETY: the arguments of readlink(2), and the size of the buffer.
    unsafe { readlink(path, to, size.min(room)) }
}

unsafe extern "C" fn realpath(path: *const c_char, to: *mut c_char) -> *mut c_char {
    // SAFETY: the arguments of realpath(3).
    unsafe { with_path(path, |p| libc::realpath(p, to)) }
}

unsafe extern "C" fn realpath_chk(path: *const c_char, to: *mut c_char, _room: usize) -> *mut c_char {
    // SAFETY: the arguments of realpath(3); callers with checks have room for PATH_MAX bytes.
    unsafe { realpath(path, to) }
}

unsafe extern "C" fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    if domain == libc::AF_NETLINK && protocol == NETLINK_RDMA {
        crate::set_errno(libc::EPROTONOSUPPORT);
        return -1;
    }
    // SAFETY: plain numbers.
    unsafe { libc::socket(domain, kind, protocol) }
}

/// libnl makes its sockets itself.
unsafe extern "C" fn nl_connect(socket: *mut c_void, protocol: c_int) -> c_int {
    /// `NLE_PROTO_MISMATCH`.
    const MISMATCH: c_int = 13;
    let real = NL_CONNECT.load(Ordering::Relaxed);
    if protocol == NETLINK_RDMA || real == 0 {
        return -MISMATCH;
    }
    // SAFETY: libnl's function of this name, with the library's own arguments.
    unsafe { std::mem::transmute::<usize, unsafe extern "C" fn(*mut c_void, c_int) -> c_int>(real)(socket, protocol) }
}

unsafe extern "C" fn close(fd: c_int) -> c_int {
    if let Some(e) = entry(fd) {
        e.store(0, Ordering::Relaxed);
    }
    // SAFETY: the library's own descriptor.
    unsafe { libc::close(fd) }
}

/// `struct ib_uverbs_ioctl_hdr` (`rdma/rdma_user_ioctl_cmds.h`).
#[repr(C)]
#[derive(Clone, Copy)]
struct IoctlHeader {
    length: u16,
    object: u16,
    method: u16,
    attributes: u16,
    reserved: u64,
    driver: u32,
    reserved2: u32,
}

/// `struct ib_uverbs_attr`.
#[repr(C)]
struct Attribute {
    id: u16,
    len: u16,
    flags: u16,
    reserved: u16,
    data: u64,
}

/// `_IOWR(0x1b, 1, struct ib_uverbs_ioctl_hdr)`.
const VERBS_IOCTL: c_ulong = 0xc018_1b01;
const MANDATORY: u16 = 1;
/// Attributes of `UVERBS_METHOD_INVOKE_WRITE`, method 0 of `UVERBS_OBJECT_DEVICE`, object 0.
const CORE_IN: u16 = 0;
const CORE_OUT: u16 = 1;
const WRITE_CMD: u16 = 2;

/// Objects whose creation names the descriptor for their asynchronous events, and the attribute that does (`enum
/// uverbs_default_objects` and `uverbs_attrs_create_*` of `rdma/ib_user_ioctl_cmds.h`): CQ, QP, SRQ, WQ.
const EVENT_FDS: [(u16, u16); 4] = [(3, 7), (4, 12), (5, 10), (12, 5)];
/// The method that creates an object of these kinds.
const CREATE: u16 = 0;

/// Puts the kernel's descriptor for asynchronous events into a command that creates an object, in the place of the set
/// that the context has. `kernels_of` knows it.
///
/// # Safety
/// `command` is a whole command of `VERBS_IOCTL`.
unsafe fn name_kernels_events(command: *mut c_void, kernels_of: impl Fn(RawFd) -> Option<RawFd>) {
    // SAFETY: by the contract. The header is followed by its attributes.
    let attributes = unsafe {
        let header = *command.cast::<IoctlHeader>();
        if header.method != CREATE {
            return;
        }
        let Some((_, id)) = EVENT_FDS.iter().find(|(object, _)| *object == header.object) else { return };
        let first = command.cast::<IoctlHeader>().add(1).cast::<Attribute>();
        let all = std::slice::from_raw_parts_mut(first, header.attributes.into());
        all.iter_mut().filter(move |a| a.id == *id)
    };
    for attribute in attributes {
        if let Some(fd) = RawFd::try_from(attribute.data.cast_signed()).ok().and_then(&kernels_of) {
            attribute.data = i64::from(fd).cast_unsigned();
        }
    }
}

/// Learns the kernel driver of a node: each command names it.
unsafe extern "C" fn ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    if request == VERBS_IOCTL
        && let Some(e) = entry(fd).filter(|e| e.load(Ordering::Relaxed) & OURS != 0)
    {
        // SAFETY: the argument of this request begins with the header.
        e.store(OURS | unsafe { (*argument.cast::<IoctlHeader>()).driver }, Ordering::Relaxed);
        // SAFETY: the same.
        unsafe { name_kernels_events(argument, async_events::kernels_of) };
    }
    // SAFETY: the library's own arguments.
    unsafe { libc::ioctl(fd, request, argument) }
}

/// `struct ib_uverbs_cmd_hdr` and the head of `struct ib_uverbs_post_send`.
#[repr(C)]
#[derive(Clone, Copy)]
struct PostSend {
    command: u32,
    in_words: u16,
    out_words: u16,
    response: u64,
    qp: u32,
    wr_count: u32,
    sge_count: u32,
    wqe_size: u32,
}

const POST_SEND: u32 = 28;

/// The kernel's soft RNICs have a doorbell that is a `write` of the command POST_SEND without requests. The kernel
/// refuses `write` on a descriptor that somebody else has opened, and takes the same command by `ioctl`.
unsafe extern "C" fn write(fd: c_int, bytes: *const c_void, len: usize) -> isize {
    const HEADER: usize = 8;
    if let Some(driver) = driver(fd)
        && len >= size_of::<PostSend>()
        // SAFETY: the library passes `len` bytes.
        && unsafe { bytes.cast::<PostSend>().read_unaligned() }.command == POST_SEND
    {
        #[repr(C)]
        struct Command {
            header: IoctlHeader,
            attributes: [Attribute; 3],
        }
        let mut bad_request = 0u32;
        let attribute =
            |id, len: usize, data: u64| Attribute { id, len: len as u16, flags: MANDATORY, reserved: 0, data };
        let mut command = Command {
            header: IoctlHeader {
                length: size_of::<Command>() as u16,
                object: 0,
                method: 0,
                attributes: 3,
                reserved: 0,
                driver,
                reserved2: 0,
            },
            attributes: [
                attribute(WRITE_CMD, 8, POST_SEND.into()),
                attribute(CORE_IN, size_of::<PostSend>() - HEADER, bytes as u64 + HEADER as u64),
                attribute(CORE_OUT, 4, &raw mut bad_request as u64),
            ],
        };
        // SAFETY: a whole command, whose attributes point to memory that is as long as they say.
        let done = unsafe { libc::ioctl(fd, VERBS_IOCTL, &raw mut command) };
        return if done == 0 { len as isize } else { -1 };
    }
    // SAFETY: the library's own arguments.
    unsafe { libc::write(fd, bytes, len) }
}

/// Reads of a context's `async_fd`, which is an epoll set, go to the set's sources. The kernel refuses such a read, so
/// nothing is looked up for others.
unsafe extern "C" fn read(fd: c_int, to: *mut c_void, len: usize) -> isize {
    // SAFETY: the library's own arguments.
    let n = unsafe { libc::read(fd, to, len) };
    if n < 0 && super::errno() == libc::EINVAL {
        // SAFETY: as above.
        if let Some(n) = unsafe { async_events::read(fd, to, len) } {
            return n;
        }
        crate::set_errno(libc::EINVAL);
    }
    n
}

/// A provider asks how a destination's MAC is found. rxe does not use the answer, because the kernel finds it itself;
/// the program's network namespace knows nothing of the VF's network.
unsafe extern "C" fn resolve_mac(c: *mut ibv_context, attr: *mut ibv_ah_attr, mac: *mut u8, vid: *mut u16) -> c_int {
    type Resolve = unsafe extern "C" fn(*mut ibv_context, *mut ibv_ah_attr, *mut u8, *mut u16) -> c_int;
    // SAFETY: the provider passes its context and room for the answer.
    unsafe {
        if driver((*c).cmd_fd) == Some(DRIVER_RXE) {
            crate::device::no_mac(mac, vid);
            return 0;
        }
        match RESOLVE.load(Ordering::Relaxed) {
            0 => -libc::EOPNOTSUPP,
            real => std::mem::transmute::<usize, Resolve>(real)(c, attr, mac, vid),
        }
    }
}

/// The function for `name` in the tables of the real library and of providers; `None` if it stays as it is.
pub(super) fn function(name: &CStr) -> Option<usize> {
    Some(match name.to_bytes() {
        b"open" | b"open64" => open as *const () as usize,
        b"__open_2" | b"__open64_2" => open_2 as *const () as usize,
        b"openat" | b"openat64" => openat as *const () as usize,
        b"__openat_2" | b"__openat64_2" => openat_2 as *const () as usize,
        b"fopen" | b"fopen64" => fopen as *const () as usize,
        b"opendir" => opendir as *const () as usize,
        b"stat" | b"stat64" => stat as *const () as usize,
        b"lstat" | b"lstat64" => lstat as *const () as usize,
        b"fstatat" | b"fstatat64" => fstatat as *const () as usize,
        b"__xstat" | b"__xstat64" => xstat as *const () as usize,
        b"__lxstat" | b"__lxstat64" => lxstat as *const () as usize,
        b"access" => access as *const () as usize,
        b"readlink" => readlink as *const () as usize,
        b"__readlink_chk" => readlink_chk as *const () as usize,
        b"realpath" => realpath as *const () as usize,
        b"__realpath_chk" => realpath_chk as *const () as usize,
        b"socket" => socket as *const () as usize,
        b"nl_connect" => nl_connect as *const () as usize,
        b"close" => close as *const () as usize,
        b"ioctl" => ioctl as *const () as usize,
        b"read" => read as *const () as usize,
        b"write" => write as *const () as usize,
        b"ibv_resolve_eth_l2_from_gid" => resolve_mac as *const () as usize,
        _ => return None,
    })
}

/// The directory that is in place of `/sys/class`.
pub(super) fn sysfs_of(vrnic_directory: &std::path::Path) -> PathBuf {
    let mut path = OsString::from(vrnic_directory).into_vec();
    path.push(b'/');
    path.extend(unirdma_abi::lease::SYSFS.as_bytes());
    PathBuf::from(OsString::from_vec(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_are_made_with_the_kernels_descriptor_for_events() {
        const SET: u64 = 1000;
        #[repr(C)]
        struct Command {
            header: IoctlHeader,
            attributes: [Attribute; 3],
        }
        let named = |object, method, id| {
            let attribute = |id, data| Attribute { id, len: 0, flags: MANDATORY, reserved: 0, data };
            let (length, driver) = (size_of::<Command>() as u16, 0);
            let header = IoctlHeader { length, object, method, attributes: 3, reserved: 0, driver, reserved2: 0 };
            // The first one is another attribute with the same number, the last one another descriptor.
            let mut command = Command { header, attributes: [attribute(0, SET), attribute(id, SET), attribute(id, 7)] };
            // SAFETY: the command of this test.
            unsafe { name_kernels_events((&raw mut command).cast(), |fd| (fd == 1000).then_some(5)) };
            command.attributes.map(|a| a.data)
        };
        for (object, id) in EVENT_FDS {
            assert_eq!(named(object, CREATE, id), [SET, 5, 7], "object {object}");
            assert_eq!(named(object, CREATE + 1, id), [SET, SET, 7], "another method of object {object}");
        }
        assert_eq!(named(1, CREATE, 7), [SET, SET, 7], "a PD has no events");
    }

    fn present() -> Present {
        Present {
            sysfs: sysfs_of(std::path::Path::new("/run/unirdma")),
            node: "uverbs3".into(),
            device: "mlx5_7".into(),
            virtual_name: "unirdma0".into(),
            descriptor: None,
            opened: -1,
        }
    }

    #[test]
    fn paths_of_verbs_devices_are_redirected_and_no_others() {
        let p = present();
        let to = |path: &str| redirected(path.as_bytes(), &p).map(|c| c.into_string().unwrap());
        let at = |rest: &str| Some(format!("/run/unirdma/vf/sys/class/{rest}"));
        assert_eq!(to("/sys/class/infiniband"), at("infiniband"));
        assert_eq!(to("/sys/class/infiniband_verbs"), at("infiniband_verbs"));
        assert_eq!(to("/sys/class/infiniband_verbs/uverbs3/ibdev"), at("infiniband_verbs/uverbs3/ibdev"));
        assert_eq!(to("/sys/class/infiniband/mlx5_7/ports/1"), at("infiniband/mlx5_7/ports/1"));
        assert_eq!(to("/sys/class/infiniband/unirdma0/node_guid"), at("infiniband/mlx5_7/node_guid"));
        assert_eq!(to("/sys/class/infiniband/unirdma0"), at("infiniband/mlx5_7"));
        assert_eq!(to("/sys/class/infiniband/unirdma01"), at("infiniband/unirdma01"));
        for other in ["/sys/class/net/eth0", "/sys/class/infinibandx", "/etc/libibverbs.d", "/sys", "", "infiniband"] {
            assert_eq!(to(other), None, "{other}");
        }
    }

    #[test]
    fn rdma_netlink_does_not_exist_and_other_sockets_do() {
        // SAFETY: plain calls; what is opened is closed.
        unsafe {
            assert_eq!(socket(libc::AF_NETLINK, libc::SOCK_RAW, NETLINK_RDMA), -1);
            assert_eq!(super::super::errno(), libc::EPROTONOSUPPORT);
            let other = socket(libc::AF_UNIX, libc::SOCK_DGRAM, 0);
            assert!(other >= 0);
            close(other);
            assert!(nl_connect(std::ptr::null_mut(), NETLINK_RDMA) < 0);
        }
    }

    #[test]
    fn a_node_is_opened_once_and_then_duplicated() {
        let file = std::fs::File::open("/dev/null").unwrap();
        *lock(&PRESENT) = Some(Present { descriptor: Some(file.into()), ..present() });
        // SAFETY: paths of this test.
        unsafe {
            let first = open(c"/dev/infiniband/uverbs3".as_ptr(), libc::O_RDWR, 0);
            let second = open_2(c"/dev/infiniband/uverbs3".as_ptr(), libc::O_RDWR);
            assert!(first >= 0 && second >= 0 && first != second);
            assert_eq!((driver(first), driver(second)), (Some(0), Some(0)));
            assert_eq!(open(c"/dev/infiniband/uverbs4".as_ptr(), libc::O_RDWR, 0), -1);
            let mut s: libc::stat = std::mem::zeroed();
            assert_eq!(stat(c"/dev/infiniband/uverbs3".as_ptr(), &mut s), 0);
            assert_eq!(s.st_mode & libc::S_IFMT, libc::S_IFCHR);
            close(first);
            close(second);
            assert_eq!(driver(first), None);
            // A write that is not a doorbell goes through.
            assert_eq!(write(-1, c"".as_ptr().cast(), 0), -1);
        }
        *lock(&PRESENT) = None;
    }

    #[test]
    fn the_commands_of_a_doorbell_have_the_kernels_layout() {
        assert_eq!((size_of::<IoctlHeader>(), size_of::<Attribute>(), size_of::<PostSend>()), (24, 16, 32));
    }
}
