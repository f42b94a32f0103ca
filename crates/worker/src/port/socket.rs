//! Addresses and control messages of the port, and its receive buffers.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsRawFd, BorrowedFd};

/// Datagrams in one system call.
pub(super) const BATCH: usize = 16;
const BUFFER: usize = 1 << 16;

/// A socket address in the kernel's form, and its length.
pub(super) fn sockaddr(ip: IpAddr, port: u16) -> (libc::sockaddr_storage, u32) {
    // SAFETY: an all-zero storage is valid.
    let mut s: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
    let p: *mut libc::sockaddr_storage = &mut s;
    // SAFETY: the storage is large enough and aligned for both address types.
    let len = unsafe {
        match ip {
            IpAddr::V4(a) => {
                let v4 = p.cast::<libc::sockaddr_in>();
                (*v4).sin_family = libc::AF_INET as u16;
                (*v4).sin_port = port.to_be();
                (*v4).sin_addr.s_addr = u32::from_ne_bytes(a.octets());
                size_of::<libc::sockaddr_in>()
            }
            IpAddr::V6(a) => {
                let v6 = p.cast::<libc::sockaddr_in6>();
                (*v6).sin6_family = libc::AF_INET6 as u16;
                (*v6).sin6_port = port.to_be();
                (*v6).sin6_addr.s6_addr = a.octets();
                size_of::<libc::sockaddr_in6>()
            }
        }
    };
    (s, len as u32)
}

fn sender(s: &libc::sockaddr_storage) -> Option<(IpAddr, u16)> {
    let p: *const libc::sockaddr_storage = s;
    // SAFETY: the family determines which of the two types it is.
    unsafe {
        match i32::from(s.ss_family) {
            libc::AF_INET => {
                let v4 = &*p.cast::<libc::sockaddr_in>();
                Some((Ipv4Addr::from(v4.sin_addr.s_addr.to_ne_bytes()).into(), u16::from_be(v4.sin_port)))
            }
            libc::AF_INET6 => {
                let v6 = &*p.cast::<libc::sockaddr_in6>();
                Some((Ipv6Addr::from(v6.sin6_addr.s6_addr).into(), u16::from_be(v6.sin6_port)))
            }
            _ => None,
        }
    }
}

/// Room for two control messages.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
pub(super) struct Control(pub [u8; 64]);

/// Appends a control message to a header. Its messages are stored in `control`.
pub(super) fn add_control<T: Copy>(h: &mut libc::msghdr, control: &mut Control, level: i32, typ: i32, value: T) {
    let at = h.msg_controllen;
    let size = size_of::<T>() as u32;
    // SAFETY: these functions only compute sizes.
    let (len, space, head) = unsafe { (libc::CMSG_LEN(size), libc::CMSG_SPACE(size), libc::CMSG_LEN(0) as usize) };
    let room = &mut control.0[at..at + space as usize];
    let message = room.as_mut_ptr().cast::<libc::cmsghdr>();
    // SAFETY: the room has the size of a message with this value, and each message before it ends aligned.
    unsafe {
        (*message).cmsg_level = level;
        (*message).cmsg_type = typ;
        (*message).cmsg_len = len as usize;
        room.as_mut_ptr().add(head).cast::<T>().write_unaligned(value);
    }
    h.msg_controllen = at + space as usize;
    h.msg_control = std::ptr::from_mut(control).cast();
}

/// Buffers for addresses and control messages of one system call's datagrams. They are reused between calls: clearing
/// them takes longer than handling a datagram.
pub(super) struct Room {
    pub names: Box<[libc::sockaddr_storage; BATCH]>,
    pub controls: Box<[Control; BATCH]>,
}

impl Room {
    pub fn new() -> Self {
        let (nobody, _) = sockaddr(Ipv4Addr::UNSPECIFIED.into(), 0);
        Room { names: Box::new([nobody; BATCH]), controls: Box::new([Control([0; 64]); BATCH]) }
    }
}

/// A header without pointers.
pub(super) const NO_HEADER: libc::mmsghdr = {
    // SAFETY: an all-zero header is valid.
    unsafe { std::mem::zeroed() }
};

/// Receive buffers for datagrams.
pub(super) struct Inbox {
    bytes: Vec<u8>,
    room: Room,
}

/// An incoming datagram.
pub(super) struct Incoming<'a> {
    /// Sender; only for UDP sockets.
    pub from: Option<(IpAddr, u16)>,
    pub header: &'a libc::msghdr,
    pub bytes: &'a mut [u8],
}

impl Inbox {
    pub fn new() -> Self {
        Inbox { bytes: vec![0; BATCH * BUFFER], room: Room::new() }
    }

    /// Hands at most [`BATCH`] datagrams of a socket to `f`; returns their number.
    pub fn receive(&mut self, fd: BorrowedFd<'_>, mut f: impl FnMut(Incoming<'_>)) -> usize {
        let mut headers = [NO_HEADER; BATCH];
        let mut iovs = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: BUFFER }; BATCH];
        let Room { names, controls } = &mut self.room;
        for (i, buffer) in self.bytes.chunks_exact_mut(BUFFER).enumerate() {
            iovs[i].iov_base = buffer.as_mut_ptr().cast();
            let h = &mut headers[i].msg_hdr;
            h.msg_name = std::ptr::from_mut(&mut names[i]).cast();
            h.msg_namelen = size_of::<libc::sockaddr_storage>() as u32;
            h.msg_iov = &mut iovs[i];
            h.msg_iovlen = 1;
            h.msg_control = std::ptr::from_mut(&mut controls[i]).cast();
            h.msg_controllen = size_of::<Control>();
        }
        let (headers_at, none) = (headers.as_mut_ptr(), std::ptr::null_mut());
        // SAFETY: BATCH headers are filled in, and everything that they point to lives until after the call.
        let n = unsafe { libc::recvmmsg(fd.as_raw_fd(), headers_at, BATCH as u32, libc::MSG_DONTWAIT, none) };
        let n = n.max(0) as usize;
        for (i, h) in headers[..n].iter().enumerate() {
            let bytes = &mut self.bytes[i * BUFFER..][..(h.msg_len as usize).min(BUFFER)];
            // The sender of a packet socket is no IP address. Without a name, the buffer has the address of another
            // packet.
            let from = if h.msg_hdr.msg_namelen > 0 { sender(&self.room.names[i]) } else { None };
            f(Incoming { from, header: &h.msg_hdr, bytes });
        }
        n
    }
}

/// True if datagrams arrive faster than they are read. `taken` datagrams were just read; those that still wait fill
/// more than half of the socket's buffer. The kernel counts read datagrams as waiting until they make up a quarter of
/// the buffer, so a lower threshold would be meaningless.
pub(super) fn is_behind(fd: BorrowedFd<'_>, taken: usize) -> bool {
    if taken < BATCH {
        return false;
    }
    // Waiting bytes, and bytes of the buffer (SK_MEMINFO_RMEM_ALLOC and SK_MEMINFO_RCVBUF).
    let mut memory = [0u32; 2];
    let mut size = size_of_val(&memory) as u32;
    let at = memory.as_mut_ptr().cast();
    // SAFETY: the kernel writes at most `size` bytes, which the array has.
    let done = unsafe { libc::getsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, libc::SO_MEMINFO, at, &mut size) };
    done == 0 && memory[0] > memory[1] / 2
}

/// Calls `f` for each control message of a datagram, with its level, type and data pointer.
pub(super) fn control_messages(h: &libc::msghdr, mut f: impl FnMut(i32, i32, *const u8)) {
    // SAFETY: the kernel has filled in the control buffer and its length; the macros stay within it.
    unsafe {
        let mut c = libc::CMSG_FIRSTHDR(h);
        while !c.is_null() {
            f((*c).cmsg_level, (*c).cmsg_type, libc::CMSG_DATA(c));
            c = libc::CMSG_NXTHDR(h, c);
        }
    }
}

/// Size of the packets that the kernel has joined, and whether they carry a congestion mark. The kernel joins only
/// packets with equal marks.
pub(super) fn notes(h: &libc::msghdr) -> (Option<usize>, bool) {
    let (mut segment, mut marks) = (None, 0u8);
    control_messages(h, |level, typ, data| {
        // SAFETY: each of these messages is a byte or an int. In host order (little-endian) the first byte of an int
        // has its low bits.
        unsafe {
            match (level, typ) {
                (libc::SOL_UDP, libc::UDP_GRO) => segment = Some(data.cast::<i32>().read_unaligned() as usize),
                (libc::IPPROTO_IP, libc::IP_TOS) => marks = *data,
                (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => marks = data.cast::<i32>().read_unaligned() as u8,
                _ => {}
            }
        }
    });
    (segment, is_congested(marks))
}

/// Offset of the IP header in a packet from a packet socket.
pub(super) fn ip_header_at(h: &libc::msghdr) -> Option<usize> {
    let mut at = None;
    control_messages(h, |level, typ, data| {
        if (level, typ) == (libc::SOL_PACKET, libc::PACKET_AUXDATA) {
            // SAFETY: a message of this type has this structure.
            at = Some(unsafe { data.cast::<libc::tpacket_auxdata>().read_unaligned() }.tp_net.into());
        }
    });
    at
}

/// True if a traffic class says "congestion experienced" (RFC 3168).
pub(super) fn is_congested(traffic_class: u8) -> bool {
    traffic_class & 3 == 3
}
