//! The frontend of a process, which does for it what QEMU does for a guest (U11).

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::{Pid, getpid};
use unirdma_mem::fds::Known;
use vhost::vhost_user::message::{FrontendReq, VhostUserProtocolFeatures as Proto};
use zerocopy::IntoBytes;

use crate::backend::Refusal;
use crate::blocking_fd::BlockingFd;
use crate::memory::RegionDesc;
use crate::msg::{self, MAX_PAYLOAD, Message, NEED_REPLY, REPLY, Receiver};
use crate::{VHOST_USER_F_PROTOCOL_FEATURES, VIRTIO_F_VERSION_1};

/// The frontend's side of a connection to a vRNIC. Calls block until the virtual layer has answered. They fail with
/// `EBADF` once the program has closed the socket, and with `ECHILD` in a forked process.
pub struct Frontend {
    sock: Arc<Known>,
    pid: Pid,
    rx: Receiver,
}

fn refused(what: impl std::fmt::Debug, code: &[u8]) -> io::Error {
    for errno in [Refusal::TooManyUsers, Refusal::Exhausted] {
        if code == (errno as u64).to_ne_bytes() {
            return io::Error::from_raw_os_error(errno as i32);
        }
    }
    io::Error::new(io::ErrorKind::InvalidInput, format!("the virtual layer refused {what:?}"))
}

impl Frontend {
    /// Connects to the socket of a vRNIC and agrees on features.
    ///
    /// # Errors
    /// Errors of `connect(2)`, or `InvalidData` if another program listens there.
    pub fn connect(path: &Path) -> io::Result<Self> {
        let sock = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        rustix::net::connect(&sock, &SocketAddrUnix::new(path)?)?;
        let mut f = Frontend { sock: Arc::new(Known::new(sock)?), pid: getpid(), rx: Receiver::default() };
        f.tell(FrontendReq::SET_OWNER, &[], &[], false)?;
        let features = f.ask_u64(FrontendReq::GET_FEATURES)?;
        let wanted = VIRTIO_F_VERSION_1 | VHOST_USER_F_PROTOCOL_FEATURES;
        let proto = f.ask_u64(FrontendReq::GET_PROTOCOL_FEATURES)?;
        let need = (Proto::REPLY_ACK | Proto::CONFIG | Proto::CONFIGURE_MEM_SLOTS | Proto::MQ).bits();
        if features & wanted != wanted || proto & need != need {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the peer is no uniRDMA virtual layer"));
        }
        f.tell(FrontendReq::SET_PROTOCOL_FEATURES, &need.to_ne_bytes(), &[], false)?;
        f.tell(FrontendReq::SET_FEATURES, &wanted.to_ne_bytes(), &[], true)?;
        Ok(f)
    }

    /// The socket, which hangs up when the virtual layer ends.
    pub fn socket(&self) -> &Arc<Known> {
        &self.sock
    }

    /// Sends a request. With `wait`, returns after the acknowledgement.
    ///
    /// # Errors
    /// `InvalidInput` if the request was refused, `EUSERS` if the device has too many users, `ENOMEM` if the vRNIC is
    /// at one of its limits, or errors of the socket.
    pub fn tell(&mut self, req: FrontendReq, payload: &[u8], fds: &[BorrowedFd<'_>], wait: bool) -> io::Result<()> {
        self.send(req as u32, if wait { NEED_REPLY } else { 0 }, payload, fds)?;
        if !wait {
            return Ok(());
        }
        let code = self.answer(req as u32)?.payload;
        if code == 0u64.to_ne_bytes() { Ok(()) } else { Err(refused(req, &code)) }
    }

    fn send(&self, request: u32, flags: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        // The stream belongs to the parent, even if no fork handler has run.
        if getpid() != self.pid {
            return Err(rustix::io::Errno::CHILD.into());
        }
        msg::send(self.sock.get()?, request, flags, payload, fds)
    }

    fn answer(&mut self, request: u32) -> io::Result<Message> {
        loop {
            match self.rx.receive(self.sock.as_fd()) {
                Ok(Some(m)) if m.request == request && m.flags & REPLY != 0 => return Ok(m),
                Ok(Some(_)) => return Err(io::Error::new(io::ErrorKind::InvalidData, "unexpected answer")),
                Ok(None) => return Err(io::ErrorKind::ConnectionAborted.into()),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
    }

    fn ask_u64(&mut self, req: FrontendReq) -> io::Result<u64> {
        self.send(req as u32, 0, &[], &[])?;
        let b = self.answer(req as u32)?.payload;
        let b: [u8; 8] = b.try_into().map_err(|_| io::Error::from(io::ErrorKind::InvalidData))?;
        Ok(u64::from_ne_bytes(b))
    }

    /// Reads the configuration space from its start.
    ///
    /// # Errors
    /// `InvalidData` if the device has no such range.
    pub fn config(&mut self, size: usize) -> io::Result<Vec<u8>> {
        let mut p = Vec::new();
        for w in [0u32, size as u32, 0] {
            p.extend_from_slice(&w.to_ne_bytes());
        }
        p.resize(12 + size, 0);
        self.send(FrontendReq::GET_CONFIG as u32, 0, &p, &[])?;
        let mut b = self.answer(FrontendReq::GET_CONFIG as u32)?.payload;
        if b.len() != 12 + size {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(b.split_off(12))
    }

    /// Shares a memory region.
    ///
    /// # Errors
    /// As [`Frontend::tell`].
    pub fn add_region(&mut self, d: RegionDesc, fd: BorrowedFd<'_>) -> io::Result<()> {
        self.tell(FrontendReq::ADD_MEM_REG, region_payload(d).as_bytes(), &[fd], true)
    }

    /// Unshares a memory region.
    ///
    /// # Errors
    /// `InvalidInput` if it was refused.
    pub fn remove_region(&mut self, d: RegionDesc) -> io::Result<()> {
        self.tell(FrontendReq::REM_MEM_REG, region_payload(d).as_bytes(), &[], true)
    }

    /// Sets up and enables a vring. Addresses are this process's own. Kick and call descriptors must be set before, if
    /// there are any.
    ///
    /// # Errors
    /// `InvalidInput` if it was refused.
    pub fn set_vring(&mut self, index: u32, size: u16, desc: u64, avail: u64, used: u64) -> io::Result<()> {
        self.set_vring_at(index, size, 0, desc, avail, used)
    }

    /// As [`Frontend::set_vring`], for a queue that has run before and stopped at index `base`.
    ///
    /// # Errors
    /// `InvalidInput` if it was refused.
    pub fn set_vring_at(
        &mut self,
        index: u32,
        size: u16,
        base: u16,
        desc: u64,
        avail: u64,
        used: u64,
    ) -> io::Result<()> {
        use FrontendReq as R;
        let state = |num: u32| [index, num];
        self.tell(R::SET_VRING_NUM, state(size.into()).as_bytes(), &[], false)?;
        self.tell(R::SET_VRING_BASE, state(base.into()).as_bytes(), &[], false)?;
        let addr = [u64::from(index), desc, used, avail, 0];
        self.tell(R::SET_VRING_ADDR, addr.as_bytes(), &[], true)?;
        self.tell(R::SET_VRING_ENABLE, state(1).as_bytes(), &[], true)
    }

    /// Gives a vring its kick descriptor.
    ///
    /// # Errors
    /// Errors of the socket.
    pub fn set_kick(&mut self, index: u32, kick: BorrowedFd<'_>) -> io::Result<()> {
        self.tell(FrontendReq::SET_VRING_KICK, &u64::from(index).to_ne_bytes(), &[kick], true)
    }

    /// Gives a vring its call descriptor.
    ///
    /// # Errors
    /// Errors of the socket.
    pub fn set_call(&mut self, index: u32, call: BorrowedFd<'_>) -> io::Result<()> {
        self.tell(FrontendReq::SET_VRING_CALL, &u64::from(index).to_ne_bytes(), &[call], false)
    }

    /// Stops a vring; returns the index at which it stopped.
    ///
    /// # Errors
    /// Errors of the socket.
    pub fn stop_vring(&mut self, index: u32) -> io::Result<u16> {
        self.send(FrontendReq::GET_VRING_BASE as u32, 0, [index, 0].as_bytes(), &[])?;
        let b = self.answer(FrontendReq::GET_VRING_BASE as u32)?.payload;
        Ok(b.get(4..6).map_or(0, |n| u16::from_ne_bytes([n[0], n[1]])))
    }

    /// Opens an event channel; returns this end of it, with the lowest free descriptor number.
    ///
    /// # Errors
    /// `EMFILE` if there are too many channels or descriptors, or errors of the socket.
    pub fn open_channel(&mut self, number: u32) -> io::Result<OwnedFd> {
        self.send(msg::OPEN_CHANNEL, NEED_REPLY, [number, 0].as_bytes(), &[])?;
        let mut answer = self.answer(msg::OPEN_CHANNEL)?;
        if let Some((fd, _)) = answer.fds.pop().and_then(BlockingFd::into_parts) {
            return Ok(fd);
        }
        if answer.payload == (Refusal::TooManyUsers as u64).to_ne_bytes() {
            return Err(refused(msg::OPEN_CHANNEL, &answer.payload));
        }
        // The kernel drops the descriptor if this process has no free descriptor number.
        if answer.payload == 0u64.to_ne_bytes() {
            let _ = self.close_channel(number);
        }
        Err(rustix::io::Errno::MFILE.into())
    }

    /// Closes an event channel.
    ///
    /// # Errors
    /// `InvalidInput` if the channel was not open, or errors of the socket.
    pub fn close_channel(&mut self, number: u32) -> io::Result<()> {
        self.ask(msg::CLOSE_CHANNEL, [number, 0].as_bytes())
    }

    /// Gives events back to a channel, in their order.
    ///
    /// # Errors
    /// `InvalidInput` if the channel is not open, or errors of the socket.
    pub fn return_events(&mut self, number: u32, events: &[unirdma_abi::Event]) -> io::Result<()> {
        // The last events are sent first, because each message is put before the events that are there.
        for some in events.rchunks(MAX_PAYLOAD / size_of::<unirdma_abi::Event>() - 1) {
            let mut payload = [number, 0].as_bytes().to_vec();
            payload.extend_from_slice(some.as_bytes());
            self.ask(msg::RETURN_EVENTS, &payload)?;
        }
        Ok(())
    }

    fn ask(&mut self, request: u32, payload: &[u8]) -> io::Result<()> {
        self.send(request, NEED_REPLY, payload, &[])?;
        let code = self.answer(request)?.payload;
        if code == 0u64.to_ne_bytes() { Ok(()) } else { Err(refused(request, &code)) }
    }
}

fn region_payload(d: RegionDesc) -> [u64; 5] {
    [0, d.bus_addr, d.size, d.user_addr, d.mmap_offset]
}
