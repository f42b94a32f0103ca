//! Attacks by the session's socket and virtqueues: descriptors that block the threads that use them, buffers that are
//! too small, messages that never end, and requests that are refused.

use std::io::{IoSlice, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg, sockopt};
use unirdma_abi as abi;
use unirdma_formats::{WrOpcode, send_flags};
use unirdma_testkit::{Hostile, Scripted};
use vhost::vhost_user::message::FrontendReq;
use zerocopy::IntoBytes;

use crate::{MTU_4096, Until, broken, ready};

/// Most descriptors of a message.
const DESCRIPTORS: usize = 32;

fn event(flags: EventfdFlags) -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | flags).expect("eventfd")
}

/// A call eventfd that is blocking and always full, for the responses to its owner's own commands.
pub(crate) fn blocking_call(socket: &Path, until: Until) {
    let mut h = Hostile::new(socket);
    let call = event(EventfdFlags::empty());
    rustix::io::write(&call, &(u64::MAX - 1).to_ne_bytes()).expect("a full eventfd");
    h.frontend.set_call(abi::VQ_CONTROL, call.as_fd()).expect("call");
    std::thread::spawn(move || {
        loop {
            let _ = rustix::fs::fcntl_setfl(&call, rustix::fs::OFlags::empty());
            // A busy thread of this process would slow others down without any help of the virtual layer.
            std::thread::sleep(Duration::from_micros(10));
        }
    });
    let head = abi::ReqHeader { command: abi::Command::QueryDevice as u8, ..Default::default() };
    ready();
    while !until.over() {
        if h.request(head.as_bytes(), 1024).is_none() {
            return broken("the control thread has not answered for 5 s");
        }
    }
}

/// Event buffers of one byte, returned as fast as the device takes them. No completion event fits into one.
pub(crate) fn tiny_buffers(socket: &Path, until: Until) {
    const SIZE: u16 = 256;
    /// Most buffers that the device may use each time that it looks at the queue, for an event or a kick.
    const FOR_EACH_LOOK: u64 = 2 * SIZE as u64;
    let mut s = Scripted::new(socket);
    let (desc, avail, used, buffer) = (s.alloc(16 * 256), s.alloc(1024), s.alloc(4096), s.alloc(64));
    let memory = s.hostile.memory().clone();
    for i in 0..SIZE {
        let at = desc as usize + 16 * usize::from(i);
        memory.write(at, s.hostile.bus(buffer).as_bytes());
        // A writable buffer of one byte.
        memory.write(at + 8, [1u32, 2].as_bytes());
        memory.write(avail as usize + 4 + 2 * usize::from(i), i.as_bytes());
    }
    let (kick, user) = (event(EventfdFlags::NONBLOCK), memory.addr() as u64);
    s.hostile.frontend.set_kick(abi::VQ_COMP_FIRST, kick.as_fd()).expect("kick");
    s.hostile.frontend.set_vring(abi::VQ_COMP_FIRST, SIZE, user + desc, user + avail, user + used).expect("vring");
    s.own_cq(64, 0);
    let (q, _) = s.pair(16, MTU_4096);
    let taken = AtomicU64::new(0);
    ready();
    std::thread::scope(|t| {
        t.spawn(|| {
            let mut last = 0u16;
            while !until.over() {
                let now = memory.load16(used as usize + 2, SeqCst);
                taken.fetch_add(now.wrapping_sub(last).into(), SeqCst);
                last = now;
                memory.store16(avail as usize + 2, now.wrapping_add(200), SeqCst);
            }
        });
        let mut looks = 1;
        while !until.over() {
            s.arm_cq();
            let index = s.posted(&q);
            s.write_with(&q, index, WrOpcode::Send, abi::Sge::default(), (0, 0), send_flags::SIGNALED);
            s.post(&q, index.wrapping_add(1));
            let _ = rustix::io::write(&kick, &1u64.to_ne_bytes());
            std::thread::sleep(Duration::from_millis(1));
            s.drain_cq();
            looks += 2;
            let taken = taken.load(SeqCst);
            if taken > FOR_EACH_LOOK * looks {
                return broken(&format!("{taken} buffers were used when the device looked {looks} times"));
            }
        }
    });
}

/// Sends one byte with descriptors.
fn send_beside(s: &UnixStream, fds: &[BorrowedFd<'_>]) -> rustix::io::Result<usize> {
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(fds)), "too many descriptors");
    sendmsg(s, &[IoSlice::new(&[0])], &mut control, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)
}

/// True if the other end has closed the connection.
fn is_closed(mut s: &UnixStream) -> bool {
    let _ = s.set_nonblocking(true);
    s.read(&mut [0]).map_or_else(|e| e.kind() != std::io::ErrorKind::WouldBlock, |n| n == 0)
}

/// Half a message, with the most descriptors that are accepted, on the most connections that are accepted.
pub(crate) fn half_messages(socket: &Path, until: Until) {
    const CONNECTIONS: usize = 500;
    let call = event(EventfdFlags::NONBLOCK);
    let many = [call.as_fd(); DESCRIPTORS];
    let mut open: Vec<UnixStream> = Vec::new();
    let mut told = false;
    while !until.over() {
        open.retain(|s| !is_closed(s));
        while open.len() < CONNECTIONS {
            let Ok(s) = UnixStream::connect(socket) else { break };
            let _ = send_beside(&s, &many);
            open.push(s);
        }
        if !std::mem::replace(&mut told, true) {
            ready();
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A TCP socket with unread data. Closing its last descriptor blocks for ten minutes.
fn lingering() -> std::io::Result<(OwnedFd, TcpStream)> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut s = TcpStream::connect(listener.local_addr()?)?;
    let (peer, _) = listener.accept()?;
    s.set_nonblocking(true)?;
    while s.write(&[0; 1 << 16]).is_ok() {}
    sockopt::set_socket_linger(&s, Some(Duration::from_secs(600)))?;
    s.set_nonblocking(false)?;
    Ok((s.into(), peer))
}

/// Descriptors whose closing blocks. The virtual layer closes them last.
pub(crate) fn slow_to_close(socket: &Path, until: Until) {
    const DESCRIPTORS: usize = 100;
    // The other ends. Closing them would end the wait.
    let mut peers = Vec::new();
    while peers.len() < DESCRIPTORS && !until.over() {
        let (fd, peer) = match lingering() {
            Ok(l) => l,
            Err(e) => return println!("skip: no TCP: {e}"),
        };
        let session = UnixStream::connect(socket);
        if session.as_ref().is_ok_and(|s| send_beside(s, &[fd.as_fd()]).is_ok()) {
            // By now the virtual layer has received the descriptor. It has to close it when the session ends.
            std::thread::sleep(Duration::from_millis(50));
        } else {
            sockopt::set_socket_linger(&fd, None).expect("a socket");
        }
        drop((fd, session));
        peers.push(peer);
        if peers.len() == 1 {
            ready();
        }
    }
    until.sleep();
}

/// Short connections, some with a whole session.
pub(crate) fn connections(socket: &Path, until: Until) {
    ready();
    for i in 0.. {
        if until.over() {
            break;
        }
        drop(UnixStream::connect(socket));
        if i % 16 == 0 {
            drop(Scripted::new(socket));
        }
    }
}

/// Random bytes, in connections of their own.
pub(crate) fn junk(socket: &Path, until: Until) {
    let mut n = 1u64;
    ready();
    while !until.over() {
        // A linear congruential generator is random enough here.
        let bytes: Vec<u8> = (0..n % 300)
            .map(|_| {
                n = n.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (n >> 56) as u8
            })
            .collect();
        n = n.wrapping_add(1);
        Hostile::raw(socket, &bytes);
    }
}

/// Refused requests. The virtual layer might write each to its log.
pub(crate) fn refused(socket: &Path, until: Until) {
    let mut h = Hostile::new(socket);
    ready();
    while !until.over() {
        if h.frontend.tell(FrontendReq::SET_LOG_BASE, &[0; 16], &[], true).is_err() && h.frontend.config(8).is_err() {
            h = Hostile::new(socket);
        }
    }
}

/// Event channels that are opened and closed, and notifications that are never read.
pub(crate) fn channels(socket: &Path, until: Until) {
    let mut s = Scripted::new(socket);
    let held: Vec<OwnedFd> = (1..abi::MAX_CHANNELS).map_while(|n| s.hostile.frontend.open_channel(n).ok()).collect();
    if held.is_empty() {
        return broken("no channel can be opened");
    }
    let last = held.len() as u32;
    ready();
    while !until.over() {
        // Either may be refused: other vRNICs may have taken the last channels meanwhile.
        let _ = s.hostile.frontend.close_channel(last);
        drop(s.hostile.frontend.open_channel(last));
    }
}

/// Requests whose answers are never read.
pub(crate) fn unread(socket: &Path, until: Until) {
    /// GET_FEATURES, version 1, no payload.
    const REQUEST: [u32; 3] = [1, 1, 0];
    let many = REQUEST.repeat(1000);
    let mut connections = Vec::new();
    ready();
    while !until.over() {
        if connections.len() < 16
            && let Ok(s) = UnixStream::connect(socket)
        {
            let _ = s.set_nonblocking(true);
            connections.push(s);
        }
        connections.retain_mut(|s| match s.write(many.as_bytes()) {
            Ok(_) => true,
            Err(e) => e.kind() == std::io::ErrorKind::WouldBlock,
        });
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// Kicks the control virtqueue without pause, with no request in it.
pub(crate) fn kicks(socket: &Path, until: Until) {
    let sessions: Vec<Hostile> = (0..16).map(|_| Hostile::new(socket)).collect();
    ready();
    while !until.over() {
        sessions.iter().for_each(Hostile::kick);
    }
}

/// Kick descriptors that are always readable or hung up, so that a thread that waits for them never sleeps.
pub(crate) fn strange_kicks(socket: &Path, until: Until) {
    let hung_up = UnixStream::pair().expect("sockets").0;
    let (pipe, _) = rustix::pipe::pipe().expect("pipe");
    let (with_data, _kept) = UnixStream::pair().expect("sockets");
    let _ = (&_kept).write_all(&[0; 4096]);
    let process = rustix::process::pidfd_open(rustix::process::getpid(), rustix::process::PidfdFlags::empty());
    let directory = std::fs::File::open("/").expect("directory");
    let semaphore = event(EventfdFlags::SEMAPHORE);
    let _ = rustix::io::write(&semaphore, &(u64::MAX - 1).to_ne_bytes());
    let mut strange = vec![hung_up.as_fd(), pipe.as_fd(), with_data.as_fd(), directory.as_fd(), semaphore.as_fd()];
    strange.extend(process.as_ref().map(AsFd::as_fd));
    let mut sessions = Vec::new();
    for fd in strange {
        let mut h = Hostile::new(socket);
        let user = h.memory().addr() as u64;
        // A refused queue is no attack. The control virtqueue and the wake virtqueue are set up already.
        for queue in [abi::VQ_ASYNC, abi::VQ_COMP_FIRST] {
            let _ = h.frontend.set_kick(queue, fd);
            let _ = h.frontend.set_vring(queue, 4, user + 0x8_0000, user + 0x8_1000, user + 0x8_2000);
        }
        let _ = h.frontend.set_kick(abi::VQ_CONTROL, fd);
        let _ = h.frontend.set_kick(abi::VQ_WAKE, fd);
        sessions.push(h);
    }
    ready();
    until.sleep();
}

/// Half-closed connections, with and without a session.
pub(crate) fn half_closed(socket: &Path, until: Until) {
    let sessions: Vec<Scripted> = (0..16).map(|_| Scripted::new(socket)).collect();
    for s in &sessions {
        let Ok(fd) = s.hostile.frontend.socket().as_fd().try_clone_to_owned() else { continue };
        let _ = UnixStream::from(fd).shutdown(Shutdown::Read);
    }
    let mut connections = Vec::new();
    for how in [Shutdown::Read, Shutdown::Write].into_iter().cycle().take(64) {
        let Ok(s) = UnixStream::connect(socket) else { break };
        let _ = s.shutdown(how);
        connections.push(s);
    }
    ready();
    until.sleep();
}
