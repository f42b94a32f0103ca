//! The functions of `rsocket(7)`.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::connection::{BUFFER, INLINE, Ready};
use super::datagram::Datagrams;
use super::protocol::QUEUE;
use super::stream::Socket;
use super::{Endpoint, SOCKETS, find};
use crate::lock;
use crate::set_errno;
use crate::trace::trace;

/// Longest sleep of `rpoll`: another thread may have taken an event.
const NAP_MS: u128 = 20;

/// The result of a call: -1 with errno for an error.
fn result(r: Result<usize, i32>) -> isize {
    match r {
        Ok(n) => n as isize,
        Err(e) => {
            set_errno(e);
            -1
        }
    }
}

fn done(r: Result<(), i32>) -> i32 {
    result(r.map(|()| 0)) as i32
}

fn keep(s: Arc<dyn Endpoint>) -> i32 {
    let fd = s.fd();
    lock(&SOCKETS).insert(fd, s);
    fd
}

/// Flags with the type are refused: librspreload takes sockets with flags for the kernel's, and does not hand over the
/// calls that such programs make (`accept4`).
pub unsafe extern "C" fn x_rsocket(domain: i32, typ: i32, protocol: i32) -> i32 {
    trace!("rsocket({domain}, {typ:#x}, {protocol})");
    let r: Result<Arc<dyn Endpoint>, i32> = match (domain, typ, protocol) {
        (libc::AF_INET | libc::AF_INET6, libc::SOCK_STREAM, 0 | libc::IPPROTO_TCP) => {
            Socket::create().map(|s| Arc::new(s) as _)
        }
        (libc::AF_INET | libc::AF_INET6, libc::SOCK_DGRAM, 0 | libc::IPPROTO_UDP) => {
            Datagrams::create(domain).map(|s| Arc::new(s) as _)
        }
        _ => Err(libc::ENOTSUP),
    };
    match r {
        Ok(s) => keep(s),
        Err(e) => done(Err(e)),
    }
}

/// Checks that an address of `len` bytes is as long as its family needs; NULL means no address.
///
/// # Safety
/// `addr` is NULL or has `len` bytes.
unsafe fn whole(addr: *const libc::sockaddr, len: u32) -> Result<*const libc::sockaddr, i32> {
    let len = len as usize;
    if addr.is_null() {
        return Ok(addr);
    }
    if len < size_of::<libc::sa_family_t>() {
        return Err(libc::EINVAL);
    }
    // SAFETY: the family is in the bytes that there are.
    let needed = match i32::from(unsafe { (&raw const (*addr).sa_family).read_unaligned() }) {
        libc::AF_INET => size_of::<libc::sockaddr_in>(),
        libc::AF_INET6 => size_of::<libc::sockaddr_in6>(),
        _ => 0,
    };
    if len < needed { Err(libc::EINVAL) } else { Ok(addr) }
}

pub unsafe extern "C" fn x_rbind(fd: i32, addr: *const libc::sockaddr, len: u32) -> i32 {
    // SAFETY: as bind(2) demands.
    done(find(fd).and_then(|s| s.bind(unsafe { whole(addr, len) }?)))
}

pub unsafe extern "C" fn x_rlisten(fd: i32, backlog: i32) -> i32 {
    done(find(fd).and_then(|s| s.listen(backlog)))
}

pub unsafe extern "C" fn x_raccept(fd: i32, addr: *mut libc::sockaddr, len: *mut u32) -> i32 {
    match find(fd).and_then(|s| s.accept()) {
        Ok(new) => {
            if !addr.is_null() {
                // SAFETY: the caller's room for an address.
                let _ = unsafe { put_name(&*new, true, addr, len) };
            }
            keep(new)
        }
        Err(e) => done(Err(e)),
    }
}

pub unsafe extern "C" fn x_rconnect(fd: i32, addr: *const libc::sockaddr, len: u32) -> i32 {
    // SAFETY: as connect(2) demands.
    done(find(fd).and_then(|s| s.connect(unsafe { whole(addr, len) }?)))
}

pub unsafe extern "C" fn x_rshutdown(fd: i32, how: i32) -> i32 {
    done(find(fd).and_then(|s| s.shutdown(how)))
}

pub unsafe extern "C" fn x_rclose(fd: i32) -> i32 {
    let Some(s) = lock(&SOCKETS).remove(&fd) else { return done(Err(libc::EBADF)) };
    let _ = s.shutdown(libc::SHUT_RDWR);
    0
}

/// Memory of the caller.
///
/// # Safety
/// It must be `len` bytes, which nobody else uses.
unsafe fn bytes<'a>(at: *mut c_void, len: usize) -> &'a mut [u8] {
    if len == 0 {
        return &mut [];
    }
    // SAFETY: by the contract.
    unsafe { std::slice::from_raw_parts_mut(at.cast(), len) }
}

pub unsafe extern "C" fn x_rrecv(fd: i32, buf: *mut c_void, len: usize, flags: i32) -> isize {
    // SAFETY: as recv(2) demands.
    unsafe { x_rrecvfrom(fd, buf, len, flags, std::ptr::null_mut(), std::ptr::null_mut()) }
}

pub unsafe extern "C" fn x_rrecvfrom(
    fd: i32,
    buf: *mut c_void,
    len: usize,
    flags: i32,
    addr: *mut libc::sockaddr,
    addr_len: *mut u32,
) -> isize {
    // SAFETY: as recvfrom(2) demands.
    let room = unsafe { bytes(buf, len) };
    result(find(fd).and_then(|s| s.recv(room, flags)).map(|r| {
        if let Some(from) = r.from.filter(|_| !addr.is_null() && !addr_len.is_null()) {
            // SAFETY: as above.
            unsafe { put_address(&from, addr, addr_len) };
        }
        r.bytes
    }))
}

pub unsafe extern "C" fn x_rread(fd: i32, buf: *mut c_void, len: usize) -> isize {
    // SAFETY: as read(2) demands.
    unsafe { x_rrecv(fd, buf, len, 0) }
}

pub unsafe extern "C" fn x_rsend(fd: i32, buf: *const c_void, len: usize, flags: i32) -> isize {
    // SAFETY: as send(2) demands.
    unsafe { x_rsendto(fd, buf, len, flags, std::ptr::null(), 0) }
}

pub unsafe extern "C" fn x_rsendto(
    fd: i32,
    buf: *const c_void,
    len: usize,
    flags: i32,
    addr: *const libc::sockaddr,
    addr_len: u32,
) -> isize {
    // SAFETY: as sendto(2) demands; the bytes are only read.
    let (data, addr): (&[u8], _) = unsafe { (bytes(buf.cast_mut(), len), whole(addr, addr_len)) };
    result(find(fd).and_then(|s| s.send(data, flags & libc::MSG_DONTWAIT != 0, addr?)))
}

pub unsafe extern "C" fn x_rwrite(fd: i32, buf: *const c_void, len: usize) -> isize {
    // SAFETY: as write(2) demands.
    unsafe { x_rsend(fd, buf, len, 0) }
}

/// Copies the pieces of a datagram into one buffer.
///
/// # Safety
/// `iov` has `n` elements of readable memory.
unsafe fn gather(iov: *const libc::iovec, n: usize) -> Vec<u8> {
    // SAFETY: by the contract.
    (0..n).flat_map(|i| unsafe { bytes((*iov.add(i)).iov_base, (*iov.add(i)).iov_len) }.iter().copied()).collect()
}

/// Receives a datagram into pieces.
///
/// # Safety
/// As for `recvmsg(2)`; `name` is NULL or has `*name_len` bytes.
unsafe fn scatter(
    s: &dyn Endpoint,
    iov: *const libc::iovec,
    n: usize,
    flags: i32,
    name: (*mut libc::sockaddr, *mut u32),
) -> Result<usize, i32> {
    // SAFETY: by the contract.
    let rooms = (0..n).map(|i| unsafe { bytes((*iov.add(i)).iov_base, (*iov.add(i)).iov_len) }).collect::<Vec<_>>();
    let mut all = vec![0; rooms.iter().map(|r| r.len()).sum()];
    let r = s.recv(&mut all, flags)?;
    let mut at = 0;
    for room in rooms {
        let some = room.len().min(r.bytes - at);
        room[..some].copy_from_slice(&all[at..at + some]);
        at += some;
    }
    if let Some(from) = r.from.filter(|_| !name.0.is_null()) {
        // SAFETY: by the contract.
        unsafe { put_address(&from, name.0, name.1) };
    }
    Ok(r.bytes)
}

/// True for a datagram socket.
fn is_datagram(fd: i32) -> bool {
    find(fd).is_ok_and(|s| s.stream().is_none())
}

/// Calls `f` for each piece until one is not done whole. Returns the number of bytes that were done.
///
/// # Safety
/// `iov` has `n` elements.
unsafe fn pieces(iov: *const libc::iovec, n: usize, mut f: impl FnMut(*mut c_void, usize, bool) -> isize) -> isize {
    let mut all = 0;
    for i in 0..n {
        // SAFETY: by the contract.
        let v = unsafe { *iov.add(i) };
        if v.iov_len == 0 {
            continue;
        }
        let r = f(v.iov_base, v.iov_len, all > 0);
        if r < 0 {
            return if all > 0 { all } else { r };
        }
        all += r;
        if (r as usize) < v.iov_len {
            break;
        }
    }
    all
}

pub unsafe extern "C" fn x_rreadv(fd: i32, iov: *const libc::iovec, n: i32) -> isize {
    if is_datagram(fd) {
        let none = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: as readv(2) demands.
        return result(find(fd).and_then(|s| unsafe { scatter(&*s, iov, n.max(0) as usize, 0, none) }));
    }
    // Only the first piece waits.
    let more = |later: bool| if later { libc::MSG_DONTWAIT } else { 0 };
    // SAFETY: as readv(2) demands.
    unsafe { pieces(iov, n.max(0) as usize, |at, len, later| x_rrecv(fd, at, len, more(later))) }
}

pub unsafe extern "C" fn x_rwritev(fd: i32, iov: *const libc::iovec, n: i32) -> isize {
    if is_datagram(fd) {
        // SAFETY: as writev(2) demands.
        let all = unsafe { gather(iov, n.max(0) as usize) };
        return result(find(fd).and_then(|s| s.send(&all, false, std::ptr::null())));
    }
    // SAFETY: as writev(2) demands.
    unsafe { pieces(iov, n.max(0) as usize, |at, len, _| x_rsend(fd, at, len, 0)) }
}

pub unsafe extern "C" fn x_rrecvmsg(fd: i32, msg: *mut libc::msghdr, flags: i32) -> isize {
    // SAFETY: as recvmsg(2) demands; a stream has no ancillary data.
    unsafe {
        (*msg).msg_controllen = 0;
        if is_datagram(fd) {
            let (m, name) = (&*msg, ((*msg).msg_name.cast(), &raw mut (*msg).msg_namelen));
            return result(find(fd).and_then(|s| scatter(&*s, m.msg_iov, m.msg_iovlen, flags, name)));
        }
        let more = |later: bool| if later { flags | libc::MSG_DONTWAIT } else { flags };
        pieces((*msg).msg_iov, (*msg).msg_iovlen, |at, len, later| x_rrecv(fd, at, len, more(later)))
    }
}

pub unsafe extern "C" fn x_rsendmsg(fd: i32, msg: *const libc::msghdr, flags: i32) -> isize {
    // SAFETY: as sendmsg(2) demands.
    unsafe {
        if (*msg).msg_controllen != 0 {
            return result(Err(libc::ENOTSUP));
        }
        if is_datagram(fd) {
            let all = gather((*msg).msg_iov, (*msg).msg_iovlen);
            let dontwait = flags & libc::MSG_DONTWAIT != 0;
            return result(
                find(fd).and_then(|s| s.send(&all, dontwait, whole((*msg).msg_name.cast(), (*msg).msg_namelen)?)),
            );
        }
        pieces((*msg).msg_iov, (*msg).msg_iovlen, |at, len, _| x_rsend(fd, at, len, flags))
    }
}

/// The events of `poll(2)` that were asked for and are there.
fn revents(r: Ready, asked: i16) -> i16 {
    let mut e = 0;
    for (is, bit) in [(r.read, libc::POLLIN), (r.write, libc::POLLOUT)] {
        e |= if is { asked & bit } else { 0 };
    }
    e |= if r.hang_up { libc::POLLHUP } else { 0 };
    e | if r.error { libc::POLLERR } else { 0 }
}

/// Looks once at all descriptors. Returns how many are ready. `sleep` collects the descriptors to sleep on.
///
/// # Safety
/// `fds` are the caller's.
unsafe fn look(fds: &mut [libc::pollfd], sleep: Option<&mut Vec<libc::pollfd>>) -> usize {
    let arm = sleep.is_some();
    let mut on = Vec::new();
    let mut ready = 0;
    for p in fds.iter_mut() {
        p.revents = 0;
        match find(p.fd) {
            Ok(s) => {
                let (r, descriptors) = s.poll(arm);
                p.revents = revents(r, p.events);
                on.extend(descriptors.into_iter().map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 }));
            }
            Err(_) if p.fd >= 0 => {
                // SAFETY: one descriptor.
                unsafe { libc::poll(p, 1, 0) };
                on.push(libc::pollfd { fd: p.fd, events: p.events, revents: 0 });
            }
            Err(_) => {}
        }
        ready += usize::from(p.revents != 0);
    }
    if let Some(sleep) = sleep {
        *sleep = on;
    }
    ready
}

pub unsafe extern "C" fn x_rpoll(fds: *mut libc::pollfd, n: libc::nfds_t, timeout_ms: i32) -> i32 {
    // SAFETY: as poll(2) demands.
    let fds = unsafe { if n == 0 { &mut [][..] } else { std::slice::from_raw_parts_mut(fds, n as usize) } };
    let begin = Instant::now();
    loop {
        // SAFETY: the caller's descriptors.
        let ready = unsafe { look(fds, None) };
        let left = (timeout_ms as u128).saturating_sub(begin.elapsed().as_millis());
        if ready > 0 || timeout_ms == 0 || timeout_ms > 0 && left == 0 {
            return ready as i32;
        }
        if begin.elapsed() < Duration::from_micros(50) {
            continue;
        }
        let mut sleep = Vec::new();
        // SAFETY: as above.
        let ready = unsafe { look(fds, Some(&mut sleep)) };
        if ready > 0 {
            return ready as i32;
        }
        let nap = if timeout_ms < 0 { NAP_MS } else { left.min(NAP_MS) };
        // SAFETY: as many descriptors as `sleep` has.
        let r = unsafe { libc::poll(sleep.as_mut_ptr(), sleep.len() as libc::nfds_t, nap as i32) };
        if r < 0 {
            return r;
        }
    }
}

pub unsafe extern "C" fn x_rselect(
    n: i32,
    read: *mut libc::fd_set,
    write: *mut libc::fd_set,
    except: *mut libc::fd_set,
    timeout: *mut libc::timeval,
) -> i32 {
    // SAFETY: as select(2) demands: sets of descriptors below `n`, or NULL.
    unsafe {
        let in_set = |fd: i32, set: *mut libc::fd_set| !set.is_null() && libc::FD_ISSET(fd, set);
        let mut fds = Vec::new();
        for fd in 0..n {
            let mut events = 0;
            events |= if in_set(fd, read) { libc::POLLIN } else { 0 };
            events |= if in_set(fd, write) { libc::POLLOUT } else { 0 };
            if events != 0 || in_set(fd, except) {
                fds.push(libc::pollfd { fd, events, revents: 0 });
            }
        }
        let ms = timeout.as_ref().map_or(-1, |t| (t.tv_sec * 1000 + t.tv_usec.div_euclid(1000)) as i32);
        let r = x_rpoll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, ms);
        if r < 0 {
            return r;
        }
        let mut ready = 0;
        let broken = libc::POLLHUP | libc::POLLERR;
        for (set, bits) in [(read, libc::POLLIN | broken), (write, libc::POLLOUT | broken), (except, libc::POLLPRI)] {
            if set.is_null() {
                continue;
            }
            for p in &fds {
                let was = libc::FD_ISSET(p.fd, set);
                if was && p.revents & bits == 0 {
                    libc::FD_CLR(p.fd, set);
                }
                ready += i32::from(was && p.revents & bits != 0);
            }
        }
        ready
    }
}

/// Writes an address, cut off at the size of the caller's buffer.
///
/// # Safety
/// `addr` has `*len` bytes.
unsafe fn put_address(a: &libc::sockaddr_storage, addr: *mut libc::sockaddr, len: *mut u32) {
    let is_v6 = i32::from(a.ss_family) == libc::AF_INET6;
    let size = if is_v6 { size_of::<libc::sockaddr_in6>() } else { size_of::<libc::sockaddr_in>() };
    // SAFETY: by the contract.
    unsafe {
        std::ptr::copy_nonoverlapping(std::ptr::from_ref(a).cast::<u8>(), addr.cast(), size.min(*len as usize));
        *len = size as u32;
    }
}

/// Writes the address of a socket or of its peer.
///
/// # Safety
/// As for [`put_address`].
unsafe fn put_name(s: &dyn Endpoint, peer: bool, addr: *mut libc::sockaddr, len: *mut u32) -> Result<(), i32> {
    let name = s.name(peer)?;
    // SAFETY: by the contract.
    unsafe { put_address(&name, addr, len) };
    Ok(())
}

pub unsafe extern "C" fn x_rgetpeername(fd: i32, addr: *mut libc::sockaddr, len: *mut u32) -> i32 {
    // SAFETY: as getpeername(2) demands.
    done(find(fd).and_then(|s| unsafe { put_name(&*s, true, addr, len) }))
}

pub unsafe extern "C" fn x_rgetsockname(fd: i32, addr: *mut libc::sockaddr, len: *mut u32) -> i32 {
    // SAFETY: as getsockname(2) demands.
    done(find(fd).and_then(|s| unsafe { put_name(&*s, false, addr, len) }))
}

// Level and names of options of `rsocket(7)`.
const SOL_RDMA: i32 = 0x10000;
const RDMA_SQSIZE: i32 = 0;
const RDMA_RQSIZE: i32 = 1;
const RDMA_INLINE: i32 = 2;
const RDMA_IOMAPSIZE: i32 = 3;
const RDMA_ROUTE: i32 = 4;

/// Accepts options that mean something to a stream of this kind. Sizes of buffers are not changed.
pub unsafe extern "C" fn x_rsetsockopt(fd: i32, level: i32, name: i32, value: *const c_void, len: u32) -> i32 {
    let Ok(s) = find(fd) else { return done(Err(libc::EBADF)) };
    match (level, name) {
        (libc::SOL_SOCKET, libc::SO_REUSEADDR) if len >= 4 => {
            const REUSE_ADDRESS: i32 = 1;
            // SAFETY: the caller's value has that many bytes.
            let on = unsafe { value.cast::<u32>().read_unaligned() };
            done(s.set_option(REUSE_ADDRESS, on))
        }
        (SOL_RDMA, RDMA_IOMAPSIZE) if len >= 4 => {
            // SAFETY: as above.
            let n = unsafe { value.cast::<i32>().read_unaligned() };
            done(s.stream().ok_or(libc::ENOTSUP).and_then(|s| s.set_table(n.max(0) as u32)))
        }
        (libc::SOL_SOCKET, libc::SO_RCVBUF | libc::SO_SNDBUF | libc::SO_KEEPALIVE | libc::SO_LINGER)
        | (libc::SOL_SOCKET, libc::SO_OOBINLINE)
        | (libc::IPPROTO_TCP, libc::TCP_NODELAY | libc::TCP_MAXSEG)
        | (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY)
        | (SOL_RDMA, RDMA_SQSIZE..=RDMA_INLINE | RDMA_ROUTE) => 0,
        _ => done(Err(libc::ENOTSUP)),
    }
}

pub unsafe extern "C" fn x_rgetsockopt(fd: i32, level: i32, name: i32, value: *mut c_void, len: *mut u32) -> i32 {
    let Ok(s) = find(fd) else { return done(Err(libc::EBADF)) };
    let v: i32 = match (level, name) {
        (libc::SOL_SOCKET, libc::SO_ERROR) => {
            s.poll(false);
            s.take_error()
        }
        (libc::SOL_SOCKET, libc::SO_RCVBUF | libc::SO_SNDBUF) => BUFFER as i32,
        (libc::SOL_SOCKET, libc::SO_REUSEADDR | libc::SO_KEEPALIVE | libc::SO_OOBINLINE) => 0,
        (libc::IPPROTO_TCP, libc::TCP_NODELAY) => 1,
        (libc::IPPROTO_TCP, libc::TCP_MAXSEG) => 4096,
        (SOL_RDMA, RDMA_SQSIZE | RDMA_RQSIZE) => QUEUE.into(),
        (SOL_RDMA, RDMA_INLINE) => INLINE as i32,
        (SOL_RDMA, RDMA_IOMAPSIZE) => s.stream().map_or(0, Socket::table) as i32,
        _ => return done(Err(libc::ENOTSUP)),
    };
    // SAFETY: the caller's room for a value.
    unsafe {
        if *len < 4 {
            return done(Err(libc::EINVAL));
        }
        value.cast::<i32>().write_unaligned(v);
        *len = 4;
    }
    0
}

/// `fcntl(2)` with the argument that F_SETFL has.
pub unsafe extern "C" fn x_rfcntl(fd: i32, cmd: i32, arg: i64) -> i32 {
    let Ok(s) = find(fd) else { return done(Err(libc::EBADF)) };
    match cmd {
        libc::F_GETFL => {
            if s.nonblocking().load(Ordering::Relaxed) {
                libc::O_RDWR | libc::O_NONBLOCK
            } else {
                libc::O_RDWR
            }
        }
        libc::F_SETFL => {
            s.nonblocking().store(arg as i32 & libc::O_NONBLOCK != 0, Ordering::Relaxed);
            0
        }
        _ => done(Err(libc::ENOTSUP)),
    }
}

/// Calls `f` with a stream socket.
fn with_stream<R>(fd: i32, f: impl FnOnce(&Socket) -> Result<R, i32>) -> Result<R, i32> {
    find(fd).and_then(|s| f(s.stream().ok_or(libc::EOPNOTSUPP)?))
}

/// # Errors
/// -1 with errno: `EINVAL` for a socket without a connection or another `prot`, `ENOMEM` if the peer has no room for
/// another mapping (its option `RDMA_IOMAPSIZE`), otherwise as `ibv_reg_mr(3)`.
pub unsafe extern "C" fn x_riomap(fd: i32, buf: *mut c_void, len: usize, prot: i32, _flags: i32, offset: i64) -> i64 {
    if prot & !libc::PROT_WRITE != 0 {
        return i64::from(done(Err(libc::EINVAL)));
    }
    let asked = (offset != -1).then_some(offset as u64);
    match with_stream(fd, |s| s.map(buf, len, prot & libc::PROT_WRITE != 0, asked)) {
        Ok(at) => at as i64,
        Err(e) => i64::from(done(Err(e))),
    }
}

pub unsafe extern "C" fn x_riounmap(fd: i32, buf: *mut c_void, len: usize) -> i32 {
    done(with_stream(fd, |s| s.unmap(buf, len)))
}

/// Returns the number of bytes written: fewer than `n`, or 0, if the peer has not mapped all of them.
pub unsafe extern "C" fn x_riowrite(fd: i32, buf: *const c_void, n: usize, offset: i64, flags: i32) -> usize {
    // SAFETY: as write(2) demands; the bytes are only read.
    let data: &[u8] = unsafe { bytes(buf.cast_mut(), n) };
    result(with_stream(fd, |s| s.write_at(data, offset as u64, flags & libc::MSG_DONTWAIT != 0))) as usize
}
