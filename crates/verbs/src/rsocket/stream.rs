//! One stream: its connection, its buffers, and what the two ends tell each other.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use unirdma_abi::port_space;
use unirdma_verbs_abi::*;

use crate::cq::{poll_cq, req_notify_cq};
use crate::event::{x_ibv_ack_cq_events, x_ibv_get_cq_event};
use crate::lock;
use crate::mr::{x_ibv_dereg_mr, x_ibv_reg_mr};
use crate::qp::{post_recv, post_send};
use crate::rdmacm::*;

/// Messages that one end may send before it hears of more room; the receives that the other has posted.
const QUEUE: u16 = 384;
/// Bytes of each buffer. The receive buffer has two halves.
const BUFFER: usize = 128 << 10;
const HALF: usize = BUFFER / 2;
const MOST: usize = 64 << 10;
/// Control messages that may be under way.
const CONTROLS: u32 = 4;
/// An idle stream is looked at for so long before its thread sleeps.
const SPIN: Duration = Duration::from_micros(50);
/// Longest sleep: another thread of the socket may have taken the event.
const NAP_MS: i32 = 20;

// Kinds of messages, in the upper three bits of the immediate data.
const OP_DATA: u32 = 0;
const OP_SGL: u32 = 4;
const OP_CTRL: u32 = 7;
const CTRL_DISCONNECT: u32 = 0;
const CTRL_SHUTDOWN: u32 = 2;

// enum rdma_cm_event_type
const ADDR_RESOLVED: u32 = 0;
const ROUTE_RESOLVED: u32 = 2;
const CONNECT_REQUEST: u32 = 4;
const REJECTED: u32 = 8;
const ESTABLISHED: u32 = 9;
const DISCONNECTED: u32 = 10;

const WR_RDMA_WRITE_IMM: u32 = 1;
const SEND_SIGNALED: u32 = 2;
const SEND_INLINE: u32 = 8;
const INLINE: u32 = 64;
const WC_RECV: u32 = 128;
const ACCESS_LOCAL_WRITE: i32 = 1;
const ACCESS_REMOTE_WRITE: i32 = 2;
/// A send of control, in `wr_id`; else the bytes of data.
const CONTROL: u64 = 1 << 63;

fn message(op: u32, data: u32) -> u32 {
    op << 29 | data & 0x1fff_ffff
}

/// Part of the peer's receive buffer, as it writes it into ours.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Sge {
    addr: u64,
    key: u32,
    length: u32,
}

/// What each end says when it connects; numbers in network order.
#[derive(Clone, Copy)]
#[repr(C)]
struct ConnData {
    version: u8,
    flags: u8,
    credits: u16,
    reserved: [u8; 3],
    iomap_size: u8,
    sgl: Sge,
    buffer: Sge,
}
const _: () = assert!(size_of::<ConnData>() == 40);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Idle,
    Bound,
    Listening,
    Connecting,
    Connected,
    /// Over, or refused.
    Ended,
}

/// The registered memory of a stream.
struct Memory {
    send: Box<[u8]>,
    recv: Box<[u8]>,
    /// Where the peer writes which parts of its buffer are free.
    sgl: Box<[Sge; 2]>,
    mrs: [*mut ibv_mr; 3],
}

struct Inner {
    id: *mut rdma_cm_id,
    channel: *mut rdma_event_channel,
    state: State,
    /// errno of a connection that failed.
    error: i32,
    readable: bool,
    writable: bool,
    memory: Option<Memory>,
    /// Requests that came in and were not accepted yet.
    waiting: VecDeque<Inner>,
    // Sending.
    send_at: usize,
    send_free: usize,
    sends_free: u32,
    sent: u16,
    /// Messages that may be sent: up to this number.
    send_limit: u16,
    target: usize,
    peer_sgl: Sge,
    /// Which of the peer's entries is told next.
    peer_entry: u32,
    controls: u32,
    // Receiving.
    arrived: VecDeque<usize>,
    recv_at: usize,
    taken: u16,
    /// When this number is taken, the peer hears of more room.
    tell_at: u16,
    freed: usize,
    /// Where the half begins that is given to the peer next.
    free_half: usize,
}

// SAFETY: the objects may be used by any thread; the socket's lock keeps them apart.
unsafe impl Send for Inner {}

/// A socket of this library.
pub(super) struct Socket {
    inner: Mutex<Inner>,
    pub nonblocking: AtomicBool,
}

fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

fn check(r: i32) -> Result<(), i32> {
    if r == 0 { Ok(()) } else { Err(errno()) }
}

/// What a socket is ready for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Ready {
    pub read: bool,
    pub write: bool,
    pub hang_up: bool,
    pub error: bool,
}

impl Inner {
    fn new(id: *mut rdma_cm_id, channel: *mut rdma_event_channel) -> Inner {
        Inner {
            id,
            channel,
            state: State::Idle,
            error: 0,
            readable: true,
            writable: true,
            memory: None,
            waiting: VecDeque::new(),
            send_at: 0,
            send_free: BUFFER,
            sends_free: QUEUE.into(),
            sent: 0,
            send_limit: 0,
            target: 0,
            peer_sgl: Sge::default(),
            peer_entry: 1,
            controls: CONTROLS,
            arrived: VecDeque::new(),
            recv_at: 0,
            taken: 0,
            tell_at: QUEUE / 2,
            freed: HALF,
            free_half: HALF,
        }
    }

    fn create() -> Result<Inner, i32> {
        let mut id = std::ptr::null_mut();
        // SAFETY: room for the identifier; the channel is given back with it.
        unsafe {
            let channel = x_rdma_create_event_channel();
            if channel.is_null() {
                return Err(errno());
            }
            let made = x_rdma_create_id(channel, &mut id, std::ptr::null_mut(), port_space::TCP.into());
            if let Err(e) = check(made) {
                x_rdma_destroy_event_channel(channel);
                return Err(e);
            }
            // Its calls do not block: this library waits itself, without its lock.
            libc::fcntl((*channel).fd, libc::F_SETFL, libc::O_NONBLOCK);
            Ok(Inner::new(id, channel))
        }
    }

    /// QP, buffers and receives of a connection.
    fn prepare(&mut self) -> Result<(), i32> {
        // SAFETY: the identifier has a device and a PD; what is made here lives until `drop`.
        unsafe {
            let cap = ibv_qp_cap {
                max_send_wr: u32::from(QUEUE) + 2 * CONTROLS,
                max_recv_wr: u32::from(QUEUE) + 2 * CONTROLS,
                max_send_sge: 2,
                max_recv_sge: 1,
                max_inline_data: INLINE,
            };
            let c = &*self.id;
            let channel = crate::event::x_ibv_create_comp_channel(c.verbs);
            if channel.is_null() {
                return Err(errno());
            }
            libc::fcntl((*channel).fd, libc::F_SETFL, libc::O_NONBLOCK);
            let cq = crate::cq::x_ibv_create_cq(c.verbs, 4 * i32::from(QUEUE), std::ptr::null_mut(), channel, 0);
            if cq.is_null() {
                let e = errno();
                crate::event::x_ibv_destroy_comp_channel(channel);
                return Err(e);
            }
            ((*self.id).recv_cq_channel, (*self.id).recv_cq) = (channel, cq);
            let mut init = ibv_qp_init_attr {
                qp_context: std::ptr::null_mut(),
                send_cq: cq,
                recv_cq: cq,
                srq: std::ptr::null_mut(),
                cap,
                qp_type: 2,
                sq_sig_all: 1,
            };
            check(x_rdma_create_qp(self.id, std::ptr::null_mut(), &mut init))?;
            let pd = (*self.id).pd;
            let mut m = Memory {
                send: vec![0; BUFFER].into_boxed_slice(),
                recv: vec![0; BUFFER].into_boxed_slice(),
                sgl: Box::new([Sge::default(); 2]),
                mrs: [std::ptr::null_mut(); 3],
            };
            let sgl: *mut [Sge; 2] = &mut *m.sgl;
            for (i, (at, len, access)) in [
                (m.send.as_mut_ptr().cast::<c_void>(), BUFFER, ACCESS_LOCAL_WRITE),
                (m.recv.as_mut_ptr().cast(), BUFFER, ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE),
                (sgl.cast(), size_of::<[Sge; 2]>(), ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE),
            ]
            .into_iter()
            .enumerate()
            {
                m.mrs[i] = x_ibv_reg_mr(pd, at, len, access);
                if m.mrs[i].is_null() {
                    let e = errno();
                    for &mr in m.mrs.iter().filter(|m| !m.is_null()) {
                        x_ibv_dereg_mr(mr);
                    }
                    return Err(e);
                }
            }
            self.memory = Some(m);
            for _ in 0..u32::from(QUEUE) + CONTROLS {
                self.post_receive()?;
            }
        }
        self.arm();
        Ok(())
    }

    fn post_receive(&self) -> Result<(), i32> {
        let mut wr = ibv_recv_wr { wr_id: 0, next: std::ptr::null_mut(), sg_list: std::ptr::null_mut(), num_sge: 0 };
        let mut bad = std::ptr::null_mut();
        // SAFETY: the identifier's own QP.
        match unsafe { post_recv((*self.id).qp, &mut wr, &mut bad) } {
            0 => Ok(()),
            e => Err(e),
        }
    }

    fn conn_data(&self) -> Option<ConnData> {
        let m = self.memory.as_ref()?;
        // SAFETY: live MRs.
        let key = |i: usize| unsafe { (*m.mrs[i]).rkey }.to_be();
        let sgl: *const [Sge; 2] = &*m.sgl;
        Some(ConnData {
            version: 1,
            flags: 0,
            credits: QUEUE.to_be(),
            reserved: [0; 3],
            iomap_size: 0,
            sgl: Sge { addr: (sgl as u64).to_be(), key: key(2), length: 2u32.to_be() },
            buffer: Sge { addr: (m.recv.as_ptr() as u64).to_be(), key: key(1), length: (HALF as u32).to_be() },
        })
    }

    /// What the peer has said of itself.
    fn save(&mut self, param: &rdma_conn_param) -> Result<(), i32> {
        const BIG_ENDIAN_PEER: u8 = 1;
        if usize::from(param.private_data_len) < size_of::<ConnData>() || param.private_data.is_null() {
            return Err(libc::EINVAL);
        }
        // SAFETY: that many bytes are there.
        let d = unsafe { param.private_data.cast::<ConnData>().read_unaligned() };
        if d.version != 1 || d.flags & BIG_ENDIAN_PEER != 0 {
            return Err(libc::ENOTSUP);
        }
        let host =
            |s: Sge| Sge { addr: u64::from_be(s.addr), key: u32::from_be(s.key), length: u32::from_be(s.length) };
        self.peer_sgl = host(d.sgl);
        self.send_limit = u16::from_be(d.credits);
        if self.peer_sgl.length == 0 {
            return Err(libc::EINVAL);
        }
        if let Some(m) = &mut self.memory {
            m.sgl[0] = host(d.buffer);
        }
        Ok(())
    }

    fn param(data: &ConnData) -> rdma_conn_param {
        rdma_conn_param {
            private_data: std::ptr::from_ref(data).cast(),
            private_data_len: size_of::<ConnData>() as u8,
            responder_resources: 0,
            initiator_depth: 0,
            flow_control: 1,
            retry_count: 7,
            rnr_retry_count: 7,
            srq: 0,
            qp_num: 0,
        }
    }

    fn fail(&mut self, e: i32) {
        (self.state, self.error) = (State::Ended, e);
        (self.readable, self.writable) = (false, false);
    }

    /// Handles events of the connection that have come.
    fn connection_events(&mut self) {
        loop {
            let mut event = std::ptr::null_mut();
            // SAFETY: the socket's own channel, which does not block; the event is given back below.
            unsafe {
                if x_rdma_get_cm_event(self.channel, &mut event) != 0 {
                    return;
                }
                let (kind, status, id) = ((*event).event, (*event).status, (*event).id);
                let r = match kind {
                    // Of a connection that was not accepted yet.
                    _ if kind != CONNECT_REQUEST && id != self.id => {
                        self.waiting.iter_mut().filter(|w| w.id == id).for_each(Inner::hang_up);
                        Ok(())
                    }
                    ADDR_RESOLVED => check(x_rdma_resolve_route(self.id, 2000)),
                    ROUTE_RESOLVED => self.ask(),
                    ESTABLISHED if self.state == State::Connecting => {
                        let saved = if self.is_client() { self.save(&(*event).param.conn) } else { Ok(()) };
                        self.state = State::Connected;
                        saved.and_then(|()| self.tell())
                    }
                    CONNECT_REQUEST => {
                        let mut new = Inner::new(id, std::ptr::null_mut());
                        match new.prepare().and_then(|()| new.save(&(*event).param.conn)) {
                            Ok(()) => self.waiting.push_back(new),
                            Err(_) => drop(x_rdma_reject(id, std::ptr::null(), 0)),
                        }
                        Ok(())
                    }
                    REJECTED => Err(libc::ECONNREFUSED),
                    DISCONNECTED => {
                        self.hang_up();
                        Ok(())
                    }
                    _ if status != 0 => Err(status.abs()),
                    _ => Ok(()),
                };
                x_rdma_ack_cm_event(event);
                if let Err(e) = r {
                    self.fail(e);
                }
            }
        }
    }

    /// The peer is gone. What has arrived can still be read.
    fn hang_up(&mut self) {
        self.state = State::Ended;
        self.writable = false;
    }

    fn is_client(&self) -> bool {
        self.peer_sgl.length == 0
    }

    /// Asks for the connection.
    fn ask(&mut self) -> Result<(), i32> {
        self.prepare()?;
        let data = self.conn_data().ok_or(libc::EIO)?;
        // SAFETY: the parameters live as long as the call.
        check(unsafe { x_rdma_connect(self.id, &mut Self::param(&data)) })
    }

    /// Accepts the connection that came in.
    fn answer(&mut self) -> Result<(), i32> {
        let data = self.conn_data().ok_or(libc::EIO)?;
        self.state = State::Connecting;
        // SAFETY: as above.
        check(unsafe { x_rdma_accept(self.id, &mut Self::param(&data)) })
    }

    /// Posts a WRITE with immediate data to the peer.
    fn write(&mut self, sges: &mut [ibv_sge], wr_id: u64, imm: u32, to: (u64, u32), flags: u32) -> Result<(), i32> {
        let rdma = ibv_send_wr_rdma { remote_addr: to.0, rkey: to.1 };
        let mut wr = ibv_send_wr {
            wr_id,
            next: std::ptr::null_mut(),
            sg_list: sges.as_mut_ptr(),
            num_sge: sges.len() as i32,
            opcode: WR_RDMA_WRITE_IMM,
            send_flags: SEND_SIGNALED | flags,
            imm_data: imm.to_be(),
            wr: ibv_send_wr_target { rdma },
            remote_srqn: 0,
            rest: ibv_send_wr_rest { tso: [0; 2] },
        };
        let mut bad = std::ptr::null_mut();
        // SAFETY: the identifier's own QP; the SGEs name memory of this socket.
        match unsafe { post_send((*self.id).qp, &mut wr, &mut bad) } {
            0 => Ok(()),
            e => Err(e),
        }
    }

    fn control(&mut self, imm: u32) -> Result<(), i32> {
        self.controls -= 1;
        self.write(&mut [], CONTROL, imm, (0, 0), 0)
    }

    /// Tells the peer of room that there is again.
    fn tell(&mut self) -> Result<(), i32> {
        let due = self.freed >= HALF || self.taken.wrapping_sub(self.tell_at) as i16 >= 0;
        if !due || self.controls == 0 || self.state != State::Connected {
            return Ok(());
        }
        self.tell_at = self.taken.wrapping_add(QUEUE / 2);
        let imm = message(OP_SGL, self.taken.wrapping_add(QUEUE).into());
        if self.freed < HALF {
            return self.control(imm);
        }
        let Some(m) = &self.memory else { return Ok(()) };
        // SAFETY: a live MR.
        let key = unsafe { (*m.mrs[1]).rkey };
        let half = Sge { addr: m.recv.as_ptr() as u64 + self.free_half as u64, key, length: HALF as u32 };
        let mut sge = [ibv_sge { addr: &raw const half as u64, length: size_of::<Sge>() as u32, lkey: 0 }];
        let to = self.peer_sgl.addr + u64::from(self.peer_entry) * size_of::<Sge>() as u64;
        self.controls -= 1;
        self.write(&mut sge, CONTROL, imm, (to, self.peer_sgl.key), SEND_INLINE)?;
        self.freed -= HALF;
        self.free_half = (self.free_half + HALF) % BUFFER;
        self.peer_entry = (self.peer_entry + 1) % self.peer_sgl.length;
        Ok(())
    }

    fn arm(&self) {
        // SAFETY: the identifier's own CQ.
        unsafe { req_notify_cq((*self.id).recv_cq, 0) };
    }

    /// Takes the completions that there are.
    fn progress(&mut self) {
        if !self.channel.is_null() {
            self.connection_events();
        }
        if self.memory.is_none() {
            return;
        }
        let mut wcs = [ibv_wc::default(); 16];
        loop {
            // SAFETY: the identifier's own CQ, and room for so many.
            let n = unsafe { poll_cq((*self.id).recv_cq, wcs.len() as i32, wcs.as_mut_ptr()) };
            for wc in wcs.iter().take(usize::try_from(n).unwrap_or(0)) {
                self.completed(wc);
            }
            if n < 0 {
                self.hang_up();
            }
            if n <= 0 {
                break;
            }
        }
        if self.state == State::Connected
            && let Err(e) = self.tell()
        {
            self.fail(e);
        }
    }

    fn completed(&mut self, wc: &ibv_wc) {
        if wc.opcode & WC_RECV == 0 {
            if wc.wr_id & CONTROL != 0 {
                self.controls += 1;
            } else {
                self.send_free += wc.wr_id as usize;
                self.sends_free += 1;
            }
            if wc.status != 0 && self.state == State::Connected {
                self.hang_up();
            }
            return;
        }
        if wc.status != 0 {
            if self.state == State::Connected {
                self.hang_up();
            }
            return;
        }
        let _ = self.post_receive();
        let imm = u32::from_be(wc.imm_data);
        let data = imm & 0x1fff_ffff;
        match imm >> 29 {
            OP_DATA => self.arrived.push_back(data as usize),
            OP_SGL => self.send_limit = data as u16,
            OP_CTRL if data == CTRL_DISCONNECT => self.hang_up(),
            OP_CTRL if data == CTRL_SHUTDOWN => self.readable = false,
            _ => {}
        }
    }

    /// The peer's memory for the next bytes: what is free there of the entry that is written now.
    fn room(&self) -> usize {
        let Some(m) = &self.memory else { return 0 };
        // SAFETY: the peer writes entries as a whole, and says so before this end looks.
        let length = unsafe { (&raw const m.sgl[self.target].length).read_volatile() } as usize;
        let may =
            self.writable && self.state == State::Connected && self.sends_free > 0 && self.sent != self.send_limit;
        if may { length.min(self.send_free).min(MOST) } else { 0 }
    }

    /// Sends as much as there is room for; how much that was.
    fn send(&mut self, bytes: &[u8]) -> Result<usize, i32> {
        let mut done = 0;
        while done < bytes.len() {
            let n = self.room().min(bytes.len() - done).min(BUFFER - self.send_at);
            if n == 0 {
                break;
            }
            let (at, target) = (self.send_at, self.target);
            let Some(m) = &mut self.memory else { break };
            m.send[at..at + n].copy_from_slice(&bytes[done..done + n]);
            // SAFETY: as in `room`.
            let entry = unsafe { (&raw const m.sgl[target]).read_volatile() };
            m.sgl[target].addr += n as u64;
            m.sgl[target].length -= n as u32;
            // SAFETY: a live MR.
            let lkey = unsafe { (*m.mrs[0]).lkey };
            let mut sge = [ibv_sge { addr: m.send.as_ptr() as u64 + at as u64, length: n as u32, lkey }];
            if entry.length as usize == n {
                self.target = (target + 1) % 2;
            }
            let flags = if n <= INLINE as usize { SEND_INLINE } else { 0 };
            self.write(&mut sge, n as u64, message(OP_DATA, n as u32), (entry.addr, entry.key), flags)?;
            self.sent = self.sent.wrapping_add(1);
            self.sends_free -= 1;
            self.send_free -= n;
            self.send_at = (at + n) % BUFFER;
            done += n;
        }
        Ok(done)
    }

    /// Takes bytes that have arrived; how many there were.
    fn receive(&mut self, bytes: &mut [u8], peek: bool) -> usize {
        let Some(m) = &self.memory else { return 0 };
        let (mut done, mut at) = (0, self.recv_at);
        let mut index = 0;
        while done < bytes.len()
            && let Some(&have) = self.arrived.get(index)
        {
            let n = have.min(bytes.len() - done);
            for i in 0..n {
                // The peer's WRITEs are over; a byte at a time, since a message may wrap around the buffer's end.
                bytes[done + i] = m.recv[(at + i) % BUFFER];
            }
            done += n;
            at = (at + n) % BUFFER;
            if peek {
                index += 1;
                continue;
            }
            self.freed += n;
            if n == have {
                self.arrived.pop_front();
                self.taken = self.taken.wrapping_add(1);
            } else {
                self.arrived[0] -= n;
            }
        }
        if !peek {
            self.recv_at = at;
        }
        done
    }

    fn ready(&self) -> Ready {
        match self.state {
            State::Listening => Ready { read: !self.waiting.is_empty(), ..Ready::default() },
            State::Connected => Ready {
                read: !self.arrived.is_empty() || !self.readable,
                write: self.room() > 0 || !self.writable,
                ..Ready::default()
            },
            State::Ended => Ready { read: true, write: true, hang_up: true, error: self.error != 0 },
            _ => Ready::default(),
        }
    }

    /// Descriptors that become readable when something happens.
    fn descriptors(&self) -> Vec<i32> {
        let mut v = Vec::new();
        // SAFETY: the socket's own channels.
        unsafe {
            if !self.channel.is_null() {
                v.push((*self.channel).fd);
            }
            if self.memory.is_some() {
                v.push((*(*self.id).recv_cq_channel).fd);
            }
        }
        v
    }

    /// Takes the completion events that have come, and arms the CQ for the next.
    fn rearm(&self) {
        if self.memory.is_none() {
            return;
        }
        // SAFETY: the identifier's own CQ and channel, which does not block.
        unsafe {
            let (mut cq, mut context) = (std::ptr::null_mut(), std::ptr::null_mut());
            while x_ibv_get_cq_event((*self.id).recv_cq_channel, &mut cq, &mut context) == 0 {
                x_ibv_ack_cq_events(cq, 1);
            }
        }
        self.arm();
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: everything is this socket's own, and nobody uses it any more.
        unsafe {
            let (cq, channel) = ((*self.id).recv_cq, (*self.id).recv_cq_channel);
            x_rdma_destroy_qp(self.id);
            if let Some(m) = self.memory.take() {
                for mr in m.mrs {
                    x_ibv_dereg_mr(mr);
                }
            }
            if !cq.is_null() {
                crate::cq::x_ibv_destroy_cq(cq);
                crate::event::x_ibv_destroy_comp_channel(channel);
            }
            self.waiting.clear();
            x_rdma_destroy_id(self.id);
            if !self.channel.is_null() {
                x_rdma_destroy_event_channel(self.channel);
            }
        }
    }
}

impl Socket {
    fn of(inner: Inner) -> Socket {
        Socket { inner: Mutex::new(inner), nonblocking: AtomicBool::new(false) }
    }

    pub fn create() -> Result<Socket, i32> {
        Inner::create().map(Socket::of)
    }

    /// The descriptor that stands for it.
    pub fn fd(&self) -> i32 {
        let inner = lock(&self.inner);
        // SAFETY: a socket that was created has a channel; one that was accepted, its completion channel.
        unsafe { if inner.channel.is_null() { (*(*inner.id).recv_cq_channel).fd } else { (*inner.channel).fd } }
    }

    /// Calls `f` with the identifier.
    pub fn with_id<R>(&self, f: impl FnOnce(*mut rdma_cm_id) -> R) -> R {
        f(lock(&self.inner).id)
    }

    /// Waits until `f` has an answer; `EAGAIN` if the caller or the socket does not wait.
    fn wait<R>(&self, dontwait: bool, f: impl FnMut(&mut Inner) -> Option<Result<R, i32>>) -> Result<R, i32> {
        self.wait_if(!dontwait && !self.nonblocking.load(Ordering::Relaxed), f)
    }

    /// As [`Socket::wait`], where it is known whether to wait.
    fn wait_if<R>(&self, waits: bool, mut f: impl FnMut(&mut Inner) -> Option<Result<R, i32>>) -> Result<R, i32> {
        let begin = Instant::now();
        loop {
            let fds = {
                let mut inner = lock(&self.inner);
                inner.progress();
                if let Some(r) = f(&mut inner) {
                    // What was taken makes room.
                    let _ = inner.tell();
                    return r;
                }
                if !waits {
                    return Err(libc::EAGAIN);
                }
                if begin.elapsed() < SPIN {
                    continue;
                }
                inner.rearm();
                inner.progress();
                if let Some(r) = f(&mut inner) {
                    let _ = inner.tell();
                    return r;
                }
                inner.descriptors()
            };
            let mut polled: Vec<libc::pollfd> =
                fds.into_iter().map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 }).collect();
            // SAFETY: so many descriptors.
            unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, NAP_MS) };
        }
    }

    pub fn bind(&self, addr: *const libc::sockaddr) -> Result<(), i32> {
        let mut inner = lock(&self.inner);
        if inner.state != State::Idle {
            return Err(libc::EINVAL);
        }
        // SAFETY: the caller's address.
        check(unsafe { x_rdma_bind_addr(inner.id, addr.cast_mut()) })?;
        inner.state = State::Bound;
        Ok(())
    }

    pub fn listen(&self, backlog: i32) -> Result<(), i32> {
        let mut inner = lock(&self.inner);
        if !matches!(inner.state, State::Idle | State::Bound | State::Listening) {
            return Err(libc::EINVAL);
        }
        // SAFETY: the socket's own identifier.
        check(unsafe { x_rdma_listen(inner.id, backlog) })?;
        inner.state = State::Listening;
        Ok(())
    }

    pub fn connect(&self, addr: *const libc::sockaddr) -> Result<(), i32> {
        {
            let mut inner = lock(&self.inner);
            match inner.state {
                State::Connected => return Err(libc::EISCONN),
                State::Connecting => {}
                State::Idle | State::Bound => {
                    // SAFETY: the caller's address.
                    check(unsafe { x_rdma_resolve_addr(inner.id, std::ptr::null_mut(), addr.cast_mut(), 2000) })?;
                    inner.state = State::Connecting;
                }
                _ => return Err(libc::EINVAL),
            }
        }
        let r = self.wait(false, |inner| match inner.state {
            State::Connected => Some(Ok(())),
            State::Ended => Some(Err(if inner.error != 0 { inner.error } else { libc::ECONNRESET })),
            _ => None,
        });
        r.map_err(|e| if e == libc::EAGAIN { libc::EINPROGRESS } else { e })
    }

    /// A connection that came in.
    pub fn accept(&self) -> Result<Socket, i32> {
        let mut new = self.wait(false, |inner| {
            if inner.state != State::Listening {
                return Some(Err(libc::EINVAL));
            }
            inner.waiting.pop_front().map(Ok)
        })?;
        // It gets a channel of its own.
        // SAFETY: the channel and the identifier are this library's.
        unsafe {
            let channel = x_rdma_create_event_channel();
            if channel.is_null() {
                return Err(errno());
            }
            libc::fcntl((*channel).fd, libc::F_SETFL, libc::O_NONBLOCK);
            new.channel = channel;
            check(x_rdma_migrate_id(new.id, channel))?;
        }
        new.answer()?;
        let socket = Socket::of(new);
        socket.wait(false, |inner| (inner.state != State::Connecting).then_some(Ok(())))?;
        Ok(socket)
    }

    pub fn send(&self, bytes: &[u8], dontwait: bool) -> Result<usize, i32> {
        let mut done = 0;
        let r = self.wait(dontwait, |inner| {
            if inner.state != State::Connected || !inner.writable {
                let e = match inner.state {
                    State::Connected => libc::EPIPE,
                    State::Ended if inner.error != 0 => inner.error,
                    State::Ended => libc::ECONNRESET,
                    _ => libc::ENOTCONN,
                };
                return Some(Err(e));
            }
            match inner.send(&bytes[done..]) {
                Ok(n) => done += n,
                Err(e) => return Some(Err(e)),
            }
            (done == bytes.len()).then_some(Ok(()))
        });
        // What was sent counts, whatever came after.
        if done > 0 { Ok(done) } else { r.map(|()| 0) }
    }

    pub fn recv(&self, bytes: &mut [u8], all: bool, peek: bool, dontwait: bool) -> Result<usize, i32> {
        let mut done = 0;
        let r = self.wait(dontwait, |inner| {
            if matches!(inner.state, State::Idle | State::Bound | State::Listening | State::Connecting) {
                return Some(Err(libc::ENOTCONN));
            }
            done += inner.receive(&mut bytes[done..], peek);
            let over = inner.state == State::Ended || !inner.readable;
            let enough = done == bytes.len() || done > 0 && !all || peek && done > 0;
            (enough || over).then_some(Ok(()))
        });
        if done > 0 { Ok(done) } else { r.map(|()| 0) }
    }

    pub fn shutdown(&self, how: i32) -> Result<(), i32> {
        let (read, write) = (how != libc::SHUT_WR, how != libc::SHUT_RD);
        {
            let mut inner = lock(&self.inner);
            inner.progress();
            if read {
                inner.readable = false;
            }
            if !write || inner.state != State::Connected || !inner.writable {
                return Ok(());
            }
            inner.writable = false;
        }
        // Everything that was sent arrives before the peer hears of the end. This waits on a non-blocking socket too: nobody
        // would send the rest after a `rclose`.
        self.wait_if(true, |inner| {
            let idle = inner.controls > 0 && inner.send_free == BUFFER;
            (idle || inner.state != State::Connected).then_some(Ok(()))
        })?;
        let mut inner = lock(&self.inner);
        if inner.state != State::Connected {
            return Ok(());
        }
        let kind = if inner.readable { CTRL_SHUTDOWN } else { CTRL_DISCONNECT };
        inner.control(message(OP_CTRL, kind))?;
        if kind == CTRL_DISCONNECT {
            drop(inner);
            let _ = self.wait_if(true, |i| (i.controls == CONTROLS || i.state != State::Connected).then_some(Ok(())));
            lock(&self.inner).hang_up();
        }
        Ok(())
    }

    /// What it is ready for now; `arm`: and an event shall come when that changes.
    pub fn poll(&self, arm: bool) -> (Ready, Vec<i32>) {
        let mut inner = lock(&self.inner);
        inner.progress();
        if arm {
            inner.rearm();
            inner.progress();
        }
        (inner.ready(), inner.descriptors())
    }

    /// Its pending error, once.
    pub fn take_error(&self) -> i32 {
        std::mem::take(&mut lock(&self.inner).error)
    }
}
