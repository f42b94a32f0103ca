//! The backend's protocol engine: one connection, its memory and its vrings.
//!
//! Requests are served as the vhost-user specification says. A request that is malformed, out of order or refused is
//! answered (with a non-zero acknowledgement if the frontend asked for one) and changes nothing. A connection is closed
//! only if its stream cannot be followed, or if the frontend does not read.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use vhost::vhost_user::message::{FrontendReq, VhostUserProtocolFeatures as Proto};
use zerocopy::{FromBytes, IntoBytes};

use crate::accounts::Ledger;
use crate::blocking_fd::BlockingFd;
use crate::memory::{Memory, Refused, RegionDesc};
use crate::msg::{self, Message, NEED_REPLY, REPLY, Receiver, VERSION};
use crate::{VHOST_USER_F_PROTOCOL_FEATURES, VIRTIO_F_VERSION_1};

/// Flag in a kick, call or error message that carries no descriptor.
const NO_FD: u64 = 1 << 8;

fn features(h: &dyn Handler) -> u64 {
    VIRTIO_F_VERSION_1 | VHOST_USER_F_PROTOCOL_FEATURES | h.features()
}

fn protocol_features(h: &dyn Handler) -> u64 {
    let all =
        Proto::MQ | Proto::REPLY_ACK | Proto::CONFIG | Proto::CONFIGURE_MEM_SLOTS | Proto::RESET_DEVICE | Proto::STATUS;
    // A VMM warns of protocol features that it does not expect.
    (if h.config().is_empty() { all - Proto::CONFIG } else { all }).bits()
}

/// One vring as the frontend has set it up. Addresses are bus addresses.
#[derive(Debug, Default)]
#[allow(missing_docs)]
pub struct Vring {
    pub size: u16,
    pub desc: u64,
    pub avail: u64,
    pub used: u64,
    pub base: u16,
    pub kick: Option<Arc<BlockingFd>>,
    pub call: Option<Arc<BlockingFd>>,
    pub enabled: bool,
    pub addressed: bool,
}

/// Why a request for an event channel is refused.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ChannelError {
    #[error("this device has no event channels")]
    Unsupported,
    #[error("the RFC mode has no channels")]
    Rfc,
    #[error("there is no channel {0:#x}")]
    Unknown(u32),
    #[error("channel {0:#x} cannot be closed")]
    NotClosable(u32),
    #[error("the channel is open already")]
    Open,
    #[error("the channel is not open")]
    NotOpen,
    /// A limit of the vRNIC or its host, on what is named.
    #[error("this vRNIC or this host has too many {0}")]
    Exhausted(&'static str),
    #[error("these are no whole events")]
    PartialEvent,
    #[error("too many events wait")]
    Full,
    #[error(transparent)]
    System(#[from] rustix::io::Errno),
}

/// A device's reactions to changes of the link.
pub trait Handler {
    /// Feature bits of the device type.
    fn features(&self) -> u64 {
        0
    }
    /// The configuration space; empty if there is none.
    fn config(&self) -> Vec<u8>;
    /// Called when regions were added or removed. `removed` are the ids of removed ones.
    fn memory_changed(&mut self, memory: &Memory, removed: &[u64]);
    /// Called when any part of a vring has changed.
    fn vring_changed(&mut self, index: usize, vring: &Vring);
    /// Stops a vring if it was started; returns the next available index, from which it goes on when it is started
    /// again.
    fn stop_vring(&mut self, index: usize) -> Option<u16>;
    /// Returns to the initial state, except for the memory.
    fn reset(&mut self);
    /// Opens an event channel; returns the frontend's end.
    ///
    /// # Errors
    /// The reason why the channel cannot be opened.
    fn open_channel(&mut self, _number: u32) -> Result<OwnedFd, ChannelError> {
        Err(ChannelError::Unsupported)
    }
    /// Closes an event channel.
    ///
    /// # Errors
    /// The channel is not open.
    fn close_channel(&mut self, _number: u32) -> Result<(), ChannelError> {
        Err(ChannelError::Unsupported)
    }
    /// Puts events that the frontend has read from a channel back to the channel's front.
    ///
    /// # Errors
    /// The channel is not open, or the bytes are not a whole number of events.
    fn return_events(&mut self, _number: u32, _events: &[u8]) -> Result<(), ChannelError> {
        Err(ChannelError::Unsupported)
    }
    /// Logs that a request was refused.
    fn refused(&self, request: u32, why: &str);
}

/// State of a connection after input.
#[derive(Debug, PartialEq, Eq)]
pub enum Progress {
    /// Wait for more input.
    Open,
    /// The frontend is gone.
    Closed,
}

/// One vhost-user connection, backend side.
pub struct Backend {
    sock: BlockingFd,
    rx: Receiver,
    memory: Memory,
    vrings: Vec<Vring>,
    status: u64,
    /// Requests other than those that read the configuration are refused with this code.
    refuses: Option<Refusal>,
}

/// The answer to a refused request, not 0 as vhost-user demands. The virtual layer's own frontends take the value for
/// an errno.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Another reason, which is in the log.
    Other = 1,
    /// The vRNIC or its host is at its limit of a resource (`ENOMEM`), which is in the log.
    Exhausted = 12,
    /// The device has as many users as it may have (`EUSERS`).
    TooManyUsers = 87,
}

/// Why a request is refused. The text is for the log.
#[derive(Debug, thiserror::Error)]
enum Denied {
    #[error("payload over 4096 bytes")]
    Oversized,
    #[error("header flags {0:#x}")]
    Header(u32),
    #[error("payload of {0} bytes")]
    Payload(usize),
    #[error("{0:?} is not supported")]
    Unsupported(FrontendReq),
    #[error("unknown request")]
    Unknown,
    /// The frontend may only read the configuration space.
    #[error("{0:?}")]
    LookOnly(Refusal),
    #[error("event channels of a device that may only be looked at")]
    LookOnlyChannel,
    #[error("features {0:#x} were not offered")]
    Features(u64),
    #[error("protocol features {0:#x} were not offered")]
    ProtocolFeatures(u64),
    #[error("the configuration space is read only")]
    ReadOnly,
    #[error("no file descriptor")]
    NoDescriptor,
    #[error("the descriptor is no eventfd")]
    NoEventfd,
    #[error("vring {0} does not exist")]
    Vring(u32),
    #[error("{0} descriptors")]
    VringSize(u32),
    #[error("base {0}")]
    VringBase(u32),
    #[error("enable {0}")]
    VringEnable(u32),
    #[error("flags or alignment")]
    VringAddress,
    #[error("{0:#x} is in no region of memory")]
    NotInMemory(u64),
    #[error("{0:#x} is in no region of memory, there is none: the machine's memory is not shared (QEMU: share=on)")]
    NoMemory(u64),
    #[error("{regions} regions, {bytes} bytes, {descriptors} descriptors")]
    MemoryTable { regions: usize, bytes: usize, descriptors: usize },
    #[error(transparent)]
    Memory(#[from] Refused),
    #[error(transparent)]
    Channel(#[from] ChannelError),
}

impl Denied {
    fn code(&self) -> Refusal {
        match self {
            Denied::Memory(refused) if refused.is_want() => Refusal::Exhausted,
            _ => Refusal::Other,
        }
    }
}

type Answer = Result<Option<Vec<u8>>, Denied>;

fn payload<T: FromBytes>(m: &Message) -> Result<T, Denied> {
    T::read_from_bytes(&m.payload).map_err(|_| Denied::Payload(m.payload.len()))
}

/// Index and value of a vring state message, or flags of a descriptor message.
#[derive(FromBytes, IntoBytes, zerocopy::Immutable)]
#[repr(C)]
struct State {
    index: u32,
    num: u32,
}

#[derive(FromBytes)]
#[repr(C)]
struct Addr {
    index: u32,
    flags: u32,
    desc: u64,
    used: u64,
    avail: u64,
    _log: u64,
}

impl Backend {
    /// Serves `sock`, which must be non-blocking, with `queues` vrings. Resources are charged to `ledger`.
    pub fn new(sock: BlockingFd, queues: usize, ledger: Ledger) -> Self {
        let vrings = (0..queues).map(|_| Vring::default()).collect();
        let rx = Receiver::new(ledger.clone());
        Backend { sock, rx, memory: Memory::new(ledger), vrings, status: 0, refuses: None }
    }

    /// Serves `sock` for a frontend that may only read the configuration space.
    pub fn look_only(sock: BlockingFd, ledger: Ledger, why: Refusal) -> Self {
        Backend { refuses: Some(why), ..Self::new(sock, 0, ledger) }
    }

    /// True if only a part of a message was received.
    pub fn is_half(&self) -> bool {
        self.rx.is_half()
    }

    /// The socket, to be polled for input.
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.sock.as_fd()
    }

    /// The present memory.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Handles available input, at most `limit` messages.
    ///
    /// # Errors
    /// The stream cannot be followed, or the frontend does not read its answers. The caller must close it.
    pub fn on_readable(&mut self, h: &mut dyn Handler, limit: usize) -> io::Result<Progress> {
        for _ in 0..limit {
            let m = match self.rx.receive(self.sock.as_fd()) {
                Ok(Some(m)) => m,
                Ok(None) => return Ok(Progress::Closed),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => return Err(e),
            };
            self.dispatch(h, m)?;
        }
        Ok(Progress::Open)
    }

    fn dispatch(&mut self, h: &mut dyn Handler, m: Message) -> io::Result<()> {
        let (request, flags) = (m.request, m.flags);
        let mut given = None;
        let answer = if m.oversized {
            Err(Denied::Oversized)
        } else if flags & 3 != VERSION || flags & REPLY != 0 {
            Err(Denied::Header(flags))
        } else {
            match FrontendReq::try_from(request) {
                Ok(req) => self.handle(h, req, m),
                Err(_) if self.refuses.is_some() => Err(Denied::LookOnlyChannel),
                Err(_) => channel_request(h, &m).map(|fd| {
                    given = fd;
                    given.is_some().then(|| 0u64.to_ne_bytes().to_vec())
                }),
            }
        };
        let given: Vec<BorrowedFd<'_>> = given.iter().map(AsFd::as_fd).collect();
        let reply = |bytes: &[u8]| msg::send(self.sock.as_fd(), request, REPLY, bytes, &given);
        match answer {
            Ok(Some(bytes)) => reply(&bytes),
            Ok(None) if flags & NEED_REPLY != 0 => reply(&0u64.to_ne_bytes()),
            Ok(None) => Ok(()),
            Err(denied) => {
                h.refused(request, &denied.to_string());
                let code = self.refuses.unwrap_or(denied.code()) as u64;
                if flags & NEED_REPLY != 0 || always_answered(request) { reply(&code.to_ne_bytes()) } else { Ok(()) }
            }
        }
    }

    fn handle(&mut self, h: &mut dyn Handler, req: FrontendReq, mut m: Message) -> Answer {
        use FrontendReq as R;
        let u64_answer = |v: u64| Ok(Some(v.to_ne_bytes().to_vec()));
        if let Some(why) = self.refuses
            && !is_look(req)
        {
            return Err(Denied::LookOnly(why));
        }
        match req {
            R::GET_FEATURES => u64_answer(features(h)),
            R::SET_FEATURES => {
                let v: u64 = payload(&m)?;
                if v & !features(h) != 0 { Err(Denied::Features(v)) } else { Ok(None) }
            }
            R::SET_OWNER | R::RESET_OWNER => Ok(None),
            R::GET_PROTOCOL_FEATURES => u64_answer(protocol_features(h)),
            R::SET_PROTOCOL_FEATURES => {
                let v: u64 = payload(&m)?;
                if v & !protocol_features(h) != 0 { Err(Denied::ProtocolFeatures(v)) } else { Ok(None) }
            }
            R::GET_QUEUE_NUM => u64_answer(self.vrings.len() as u64),
            R::GET_MAX_MEM_SLOTS => u64_answer(crate::MAX_REGIONS as u64),
            R::GET_STATUS => u64_answer(self.status),
            R::SET_STATUS => {
                self.status = payload(&m)?;
                Ok(None)
            }
            R::RESET_DEVICE => {
                self.reset(h);
                Ok(None)
            }
            R::GET_CONFIG => Ok(Some(get_config(h, &m))),
            R::SET_CONFIG => Err(Denied::ReadOnly),
            R::SET_MEM_TABLE => self.set_mem_table(h, m),
            R::ADD_MEM_REG | R::REM_MEM_REG => {
                let (_pad, desc): (u64, RegionDesc) = {
                    let raw: [u64; 5] = payload(&m)?;
                    (raw[0], RegionDesc { bus_addr: raw[1], size: raw[2], user_addr: raw[3], mmap_offset: raw[4] })
                };
                if req == R::ADD_MEM_REG {
                    let fd = m.fds.pop().ok_or(Denied::NoDescriptor)?;
                    self.memory.add(desc, fd)?;
                    h.memory_changed(&self.memory, &[]);
                } else {
                    let id = self.memory.remove(desc)?;
                    h.memory_changed(&self.memory, &[id]);
                }
                Ok(None)
            }
            R::SET_VRING_NUM => {
                let s: State = payload(&m)?;
                let max = u32::from(unirdma_abi::MAX_VQ_SIZE);
                let size = u16::try_from(s.num).ok().filter(|n| n.is_power_of_two() && u32::from(*n) <= max);
                self.vring(s.index)?.size = size.ok_or(Denied::VringSize(s.num))?;
                self.changed(h, s.index)
            }
            R::SET_VRING_ADDR => {
                let a: Addr = payload(&m)?;
                let none = self.memory.regions().is_empty();
                let denied = if none { Denied::NoMemory } else { Denied::NotInMemory };
                let bus = |user| self.memory.bus_of_user(user).ok_or_else(|| denied(user));
                let (desc, avail, used) = (bus(a.desc)?, bus(a.avail)?, bus(a.used)?);
                if a.flags != 0 || desc % 16 != 0 || avail % 2 != 0 || used % 4 != 0 {
                    return Err(Denied::VringAddress);
                }
                let v = self.vring(a.index)?;
                (v.desc, v.avail, v.used, v.addressed) = (desc, avail, used, true);
                self.changed(h, a.index)
            }
            R::SET_VRING_BASE => {
                let s: State = payload(&m)?;
                self.vring(s.index)?.base = u16::try_from(s.num).map_err(|_| Denied::VringBase(s.num))?;
                self.changed(h, s.index)
            }
            R::GET_VRING_BASE => {
                let s: State = payload(&m)?;
                let base = self.stop(h, s.index)?;
                let v = self.vring(s.index)?;
                *v = Vring { size: v.size, base, ..Vring::default() };
                Ok(Some(State { index: s.index, num: base.into() }.as_bytes().to_vec()))
            }
            R::SET_VRING_ENABLE => {
                let s: State = payload(&m)?;
                if s.num > 1 {
                    return Err(Denied::VringEnable(s.num));
                }
                let was_enabled = std::mem::replace(&mut self.vring(s.index)?.enabled, s.num == 1);
                if was_enabled && s.num == 0 {
                    self.stop(h, s.index)?;
                }
                self.changed(h, s.index)
            }
            R::SET_VRING_KICK | R::SET_VRING_CALL | R::SET_VRING_ERR => {
                let v: u64 = payload(&m)?;
                let index = (v & 0xff) as u32;
                let fd = if v & NO_FD != 0 { None } else { Some(m.fds.pop().ok_or(Denied::NoDescriptor)?) };
                // Any other file could make a write, or even a poll, wait.
                if fd.as_ref().is_some_and(|fd| !is_eventfd(fd)) {
                    return Err(Denied::NoEventfd);
                }
                let fd = fd.map(Arc::new);
                let ring = self.vring(index)?;
                match req {
                    R::SET_VRING_KICK => ring.kick = fd,
                    R::SET_VRING_CALL => ring.call = fd,
                    _ => return Ok(None),
                }
                self.changed(h, index)
            }
            other => Err(Denied::Unsupported(other)),
        }
    }

    fn vring(&mut self, index: u32) -> Result<&mut Vring, Denied> {
        self.vrings.get_mut(index as usize).ok_or(Denied::Vring(index))
    }

    /// Stops a vring, which keeps its index: QEMU disables a vring before it asks for its index.
    fn stop(&mut self, h: &mut dyn Handler, index: u32) -> Result<u16, Denied> {
        let v = self.vring(index)?;
        if let Some(base) = h.stop_vring(index as usize) {
            v.base = base;
        }
        Ok(v.base)
    }

    fn changed(&mut self, h: &mut dyn Handler, index: u32) -> Answer {
        h.vring_changed(index as usize, &self.vrings[index as usize]);
        Ok(None)
    }

    fn reset(&mut self, h: &mut dyn Handler) {
        for v in &mut self.vrings {
            *v = Vring::default();
        }
        self.status = 0;
        h.reset();
    }

    fn set_mem_table(&mut self, h: &mut dyn Handler, m: Message) -> Answer {
        let bytes = m.payload.get(8..).ok_or(Denied::Payload(m.payload.len()))?;
        let count = u32::from_ne_bytes([m.payload[0], m.payload[1], m.payload[2], m.payload[3]]) as usize;
        if bytes.len() != count * size_of::<RegionDesc>() || m.fds.len() != count {
            let (bytes, descriptors) = (bytes.len(), m.fds.len());
            return Err(Denied::MemoryTable { regions: count, bytes, descriptors });
        }
        let mut memory = self.memory.clone();
        let removed = memory.clear();
        for (raw, fd) in bytes.chunks_exact(size_of::<RegionDesc>()).zip(m.fds) {
            let desc = RegionDesc::read_from_bytes(raw).map_err(|_| Denied::Payload(raw.len()))?;
            memory.add(desc, fd)?;
        }
        self.memory = memory;
        h.memory_changed(&self.memory, &removed);
        Ok(None)
    }
}

/// Serves the requests for event channels; returns the descriptor to send with the answer.
fn channel_request(h: &mut dyn Handler, m: &Message) -> Result<Option<OwnedFd>, Denied> {
    let wrong = || Denied::Payload(m.payload.len());
    let (head, events) = m.payload.split_at_checked(size_of::<State>()).ok_or_else(wrong)?;
    let number = State::read_from_bytes(head).map_err(|_| wrong())?.index;
    Ok(match m.request {
        msg::OPEN_CHANNEL if events.is_empty() => Some(h.open_channel(number)?),
        msg::CLOSE_CHANNEL if events.is_empty() => h.close_channel(number).map(|()| None)?,
        msg::RETURN_EVENTS => h.return_events(number, events).map(|()| None)?,
        msg::OPEN_CHANNEL | msg::CLOSE_CHANNEL => return Err(wrong()),
        _ => return Err(Denied::Unknown),
    })
}

fn is_eventfd(fd: &BlockingFd) -> bool {
    let name = std::fs::read_link(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&fd.as_fd())));
    name.is_ok_and(|n| n.as_os_str() == "anon_inode:[eventfd]")
}

/// Requests that only read information, or negotiate how to read it.
fn is_look(req: FrontendReq) -> bool {
    use FrontendReq as R;
    matches!(
        req,
        R::GET_FEATURES
            | R::SET_FEATURES
            | R::SET_OWNER
            | R::GET_PROTOCOL_FEATURES
            | R::SET_PROTOCOL_FEATURES
            | R::GET_QUEUE_NUM
            | R::GET_CONFIG
    )
}

/// Requests that are always answered, even if the frontend does not ask for an acknowledgement.
fn always_answered(request: u32) -> bool {
    use FrontendReq as R;
    [
        R::GET_FEATURES,
        R::GET_PROTOCOL_FEATURES,
        R::GET_QUEUE_NUM,
        R::GET_VRING_BASE,
        R::GET_MAX_MEM_SLOTS,
        R::GET_STATUS,
    ]
    .iter()
    .any(|r| *r as u32 == request)
        || request == msg::OPEN_CHANNEL
}

/// The answer to GET_CONFIG. An empty payload says that the range is wrong (vhost-user specification).
fn get_config(h: &dyn Handler, m: &Message) -> Vec<u8> {
    let word = |i: usize| m.payload.get(i..i + 4).map(|b| u32::from_ne_bytes([b[0], b[1], b[2], b[3]]) as usize);
    let config = h.config();
    let (Some(offset), Some(size)) = (word(0), word(4)) else { return Vec::new() };
    let Some(end) = offset.checked_add(size).filter(|&e| e <= 256 && m.payload.len() == 12 + size) else {
        return Vec::new();
    };
    let mut full = config;
    full.resize(256, 0);
    let mut answer = m.payload[..12].to_vec();
    answer.extend_from_slice(&full[offset..end]);
    answer
}
