//! The frontend of a process: plays the part that QEMU plays for a guest (U11).

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use vhost::vhost_user::message::{FrontendReq, VhostUserProtocolFeatures as Proto};
use zerocopy::IntoBytes;

use crate::backend::Refusal;
use crate::memory::RegionDesc;
use crate::msg::{self, NEED_REPLY, REPLY, Receiver};
use crate::{VHOST_USER_F_PROTOCOL_FEATURES, VIRTIO_F_VERSION_1};

/// A connection to a vRNIC, frontend side. Calls block until the virtual layer has answered.
pub struct Frontend {
    sock: OwnedFd,
    rx: Receiver,
}

fn refused(what: FrontendReq, code: &[u8]) -> io::Error {
    if code == (Refusal::TooManyUsers as u64).to_ne_bytes() {
        return io::Error::from_raw_os_error(Refusal::TooManyUsers as i32);
    }
    io::Error::new(io::ErrorKind::InvalidInput, format!("the virtual layer refused {what:?}"))
}

impl Frontend {
    /// Connects to the socket of a vRNIC and agrees on features.
    ///
    /// # Errors
    /// Those of `connect(2)`, or `InvalidData` if something else listens there.
    pub fn connect(path: &Path) -> io::Result<Self> {
        let sock = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        rustix::net::connect(&sock, &SocketAddrUnix::new(path)?)?;
        let mut f = Frontend { sock, rx: Receiver::default() };
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

    /// The socket: it hangs up when the virtual layer goes.
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.sock.as_fd()
    }

    /// Sends a request; with `wait`, until it is acknowledged.
    ///
    /// # Errors
    /// `InvalidInput` if it was refused, `EUSERS` if the device has too many users, or those of the socket.
    pub fn tell(&mut self, req: FrontendReq, payload: &[u8], fds: &[BorrowedFd<'_>], wait: bool) -> io::Result<()> {
        msg::send(self.sock.as_fd(), req as u32, if wait { NEED_REPLY } else { 0 }, payload, fds)?;
        if !wait {
            return Ok(());
        }
        let code = self.answer(req)?;
        if code == 0u64.to_ne_bytes() { Ok(()) } else { Err(refused(req, &code)) }
    }

    fn answer(&mut self, req: FrontendReq) -> io::Result<Vec<u8>> {
        loop {
            match self.rx.receive(self.sock.as_fd()) {
                Ok(Some(m)) if m.request == req as u32 && m.flags & REPLY != 0 => return Ok(m.payload),
                Ok(Some(_)) => return Err(io::Error::new(io::ErrorKind::InvalidData, "unexpected answer")),
                Ok(None) => return Err(io::ErrorKind::ConnectionAborted.into()),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
    }

    fn ask_u64(&mut self, req: FrontendReq) -> io::Result<u64> {
        msg::send(self.sock.as_fd(), req as u32, 0, &[], &[])?;
        let b = self.answer(req)?;
        let b: [u8; 8] = b.try_into().map_err(|_| io::Error::from(io::ErrorKind::InvalidData))?;
        Ok(u64::from_ne_bytes(b))
    }

    /// Reads the configuration space from its start.
    ///
    /// # Errors
    /// `InvalidData` if the range is not there.
    pub fn config(&mut self, size: usize) -> io::Result<Vec<u8>> {
        let mut p = Vec::new();
        for w in [0u32, size as u32, 0] {
            p.extend_from_slice(&w.to_ne_bytes());
        }
        p.resize(12 + size, 0);
        msg::send(self.sock.as_fd(), FrontendReq::GET_CONFIG as u32, 0, &p, &[])?;
        let mut b = self.answer(FrontendReq::GET_CONFIG)?;
        if b.len() != 12 + size {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(b.split_off(12))
    }

    /// Shares a memory region.
    ///
    /// # Errors
    /// `InvalidInput` if it was refused.
    pub fn add_region(&mut self, d: RegionDesc, fd: BorrowedFd<'_>) -> io::Result<()> {
        self.tell(FrontendReq::ADD_MEM_REG, region_payload(d).as_bytes(), &[fd], true)
    }

    /// Takes a memory region back.
    ///
    /// # Errors
    /// `InvalidInput` if it was refused.
    pub fn remove_region(&mut self, d: RegionDesc) -> io::Result<()> {
        self.tell(FrontendReq::REM_MEM_REG, region_payload(d).as_bytes(), &[], true)
    }

    /// Sets a vring up and enables it. Addresses are this process's own.
    ///
    /// # Errors
    /// `InvalidInput` if it was refused.
    #[allow(clippy::too_many_arguments)]
    pub fn set_vring(
        &mut self,
        index: u32,
        size: u16,
        desc: u64,
        avail: u64,
        used: u64,
        kick: BorrowedFd<'_>,
        call: BorrowedFd<'_>,
    ) -> io::Result<()> {
        self.set_vring_at(index, size, 0, desc, avail, used, kick, call)
    }

    /// As [`Frontend::set_vring`], of a queue that has run before: `base` is where it stopped.
    ///
    /// # Errors
    /// `InvalidInput` if it was refused.
    #[allow(clippy::too_many_arguments)]
    pub fn set_vring_at(
        &mut self,
        index: u32,
        size: u16,
        base: u16,
        desc: u64,
        avail: u64,
        used: u64,
        kick: BorrowedFd<'_>,
        call: BorrowedFd<'_>,
    ) -> io::Result<()> {
        use FrontendReq as R;
        let state = |num: u32| [index, num];
        self.tell(R::SET_VRING_NUM, state(size.into()).as_bytes(), &[], false)?;
        self.tell(R::SET_VRING_BASE, state(base.into()).as_bytes(), &[], false)?;
        let addr = [u64::from(index), desc, used, avail, 0];
        self.tell(R::SET_VRING_ADDR, addr.as_bytes(), &[], true)?;
        self.set_call(index, call)?;
        self.set_kick(index, kick)?;
        self.tell(R::SET_VRING_ENABLE, state(1).as_bytes(), &[], true)
    }

    /// Gives a vring its kick descriptor.
    ///
    /// # Errors
    /// Those of the socket.
    pub fn set_kick(&mut self, index: u32, kick: BorrowedFd<'_>) -> io::Result<()> {
        self.tell(FrontendReq::SET_VRING_KICK, &u64::from(index).to_ne_bytes(), &[kick], true)
    }

    /// Gives a vring its call descriptor.
    ///
    /// # Errors
    /// Those of the socket.
    pub fn set_call(&mut self, index: u32, call: BorrowedFd<'_>) -> io::Result<()> {
        self.tell(FrontendReq::SET_VRING_CALL, &u64::from(index).to_ne_bytes(), &[call], false)
    }

    /// Stops a vring; where it stopped.
    ///
    /// # Errors
    /// Those of the socket.
    pub fn stop_vring(&mut self, index: u32) -> io::Result<u16> {
        msg::send(self.sock.as_fd(), FrontendReq::GET_VRING_BASE as u32, 0, [index, 0].as_bytes(), &[])?;
        let b = self.answer(FrontendReq::GET_VRING_BASE)?;
        Ok(b.get(4..6).map_or(0, |n| u16::from_ne_bytes([n[0], n[1]])))
    }
}

fn region_payload(d: RegionDesc) -> [u64; 5] {
    [0, d.bus_addr, d.size, d.user_addr, d.mmap_offset]
}
