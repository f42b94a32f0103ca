//! One stream: its beginning, its end, and its memory. `data` moves its bytes, `direct` places bytes in memory of
//! programs.

mod data;
mod direct;

use std::collections::VecDeque;
use std::ffi::c_void;

use unirdma_abi::port_space;
use unirdma_verbs_abi::*;

use super::board::{Board, PARTS};
use super::protocol::*;
use super::wait::{Completions, identifier};
use crate::any;
use crate::rdmacm::*;
pub(in crate::rsocket) use data::Ready;
use direct::Mapped;

/// Size of each buffer, bytes. The receive buffer has two halves.
pub(super) const BUFFER: usize = 128 << 10;
const HALF: usize = BUFFER / 2;
/// Most control messages under way.
const CONTROLS: u32 = 4;
/// Most bytes that lie in the request itself.
pub(super) const INLINE: u32 = 64;

// enum rdma_cm_event_type
pub(super) const ADDR_RESOLVED: u32 = 0;
pub(super) const ROUTE_RESOLVED: u32 = 2;
const CONNECT_REQUEST: u32 = 4;
const REJECTED: u32 = 8;
pub(super) const ESTABLISHED: u32 = 9;
const DISCONNECTED: u32 = 10;

pub(super) const ACCESS_LOCAL_WRITE: i32 = 1;
const ACCESS_REMOTE_WRITE: i32 = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Idle,
    Bound,
    Listening,
    Connecting,
    Connected,
    /// Ended or refused.
    Ended,
}

/// The registered memory of a stream.
struct Memory {
    send: Box<[u8]>,
    recv: Box<[u8]>,
    board: Board,
    mrs: [*mut ibv_mr; 3],
}

pub(super) struct Connection {
    pub id: *mut rdma_cm_id,
    pub channel: *mut rdma_event_channel,
    pub state: State,
    /// errno of a connection that failed.
    pub error: i32,
    pub readable: bool,
    pub writable: bool,
    /// Its completions, while there is `memory`.
    queue: Option<Completions>,
    memory: Option<Memory>,
    /// Number of mappings that the peer may announce.
    pub table: u32,
    /// Number of mappings that this end may announce to the peer.
    peer_table: u32,
    mapped: Vec<Mapped>,
    /// Incoming requests that were not accepted yet.
    pub waiting: VecDeque<Connection>,
    // Sending.
    send_at: usize,
    send_free: usize,
    sends_free: u32,
    sent: u16,
    /// Number of the last message that may be sent.
    send_limit: u16,
    target: usize,
    peer_sgl: Sge,
    /// Index of the entry at the peer that is written next.
    peer_entry: u32,
    controls: u32,
    // Receiving.
    arrived: VecDeque<usize>,
    recv_at: usize,
    taken: u16,
    /// When this number of messages was taken, the peer is told of more room.
    tell_at: u16,
    freed: usize,
    /// Offset of the half that is given to the peer next.
    free_half: usize,
}

// SAFETY: the objects may be used by any thread; the socket's lock keeps them apart.
unsafe impl Send for Connection {}

pub(super) fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

pub(super) fn check(r: i32) -> Result<(), i32> {
    if r == 0 { Ok(()) } else { Err(errno()) }
}

impl Connection {
    fn new(id: *mut rdma_cm_id, channel: *mut rdma_event_channel) -> Connection {
        Connection {
            id,
            channel,
            state: State::Idle,
            error: 0,
            readable: true,
            writable: true,
            queue: None,
            memory: None,
            table: 0,
            peer_table: 0,
            mapped: Vec::new(),
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

    pub fn create() -> Result<Connection, i32> {
        let (id, channel) = identifier(port_space::TCP)?;
        Ok(Connection::new(id, channel))
    }

    /// Makes the QP, buffers and receives of a connection.
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
            let queue = Completions::create(self.id, 4 * i32::from(QUEUE))?;
            self.queue = Some(queue);
            let mut init = ibv_qp_init_attr {
                qp_context: std::ptr::null_mut(),
                send_cq: queue.cq,
                recv_cq: queue.cq,
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
                board: Board::new(self.table),
                mrs: [std::ptr::null_mut(); 3],
            };
            let (board, board_bytes) = m.board.memory();
            for (i, (at, len, access)) in [
                (m.send.as_mut_ptr().cast::<c_void>(), BUFFER, ACCESS_LOCAL_WRITE),
                (m.recv.as_mut_ptr().cast(), BUFFER, ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE),
                (board, board_bytes, ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE),
            ]
            .into_iter()
            .enumerate()
            {
                m.mrs[i] = any::reg_mr(pd, at, len, access);
                if m.mrs[i].is_null() {
                    let e = errno();
                    for &mr in m.mrs.iter().filter(|m| !m.is_null()) {
                        any::dereg_mr(mr);
                    }
                    return Err(e);
                }
            }
            self.memory = Some(m);
            for _ in 0..u32::from(QUEUE) + CONTROLS {
                self.post_receive()?;
            }
            queue.arm();
        }
        Ok(())
    }

    fn conn_data(&self) -> Option<ConnData> {
        let m = self.memory.as_ref()?;
        // SAFETY: live MRs.
        let key = |i: usize| unsafe { (*m.mrs[i]).rkey };
        let board = m.board.memory().0 as u64;
        let sgl = Sge { addr: board, key: key(2), length: PARTS as u32 };
        let buffer = Sge { addr: m.recv.as_ptr() as u64, key: key(1), length: HALF as u32 };
        Some(ConnData {
            version: 1,
            flags: HAS_TABLE,
            credits: QUEUE.to_be(),
            reserved: [0; 3],
            table: to_scale(self.table),
            sgl: sgl.into_network(),
            buffer: buffer.into_network(),
        })
    }

    /// Saves the peer's connection data.
    fn save(&mut self, param: &rdma_conn_param) -> Result<(), i32> {
        if usize::from(param.private_data_len) < size_of::<ConnData>() || param.private_data.is_null() {
            return Err(libc::EINVAL);
        }
        // SAFETY: that many bytes are there.
        let d = unsafe { param.private_data.cast::<ConnData>().read_unaligned() };
        if d.version != 1 || d.flags & BIG_ENDIAN != 0 {
            return Err(libc::ENOTSUP);
        }
        self.peer_sgl = d.sgl.into_host();
        self.peer_table = if d.flags & HAS_TABLE != 0 { from_scale(d.table) } else { 0 };
        self.send_limit = u16::from_be(d.credits);
        if self.peer_sgl.length == 0 {
            return Err(libc::EINVAL);
        }
        if let Some(m) = &self.memory {
            m.board.set_part(0, d.buffer.into_host());
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
        if self.channel.is_null() {
            return;
        }
        loop {
            let mut event = std::ptr::null_mut();
            // SAFETY: the socket's own channel, which does not block; the event is given back below.
            unsafe {
                if x_rdma_get_cm_event(self.channel, &mut event) != 0 {
                    return;
                }
                let (kind, status, id) = ((*event).event, (*event).status, (*event).id);
                let r = match kind {
                    // An event of a connection that was not accepted yet.
                    _ if kind != CONNECT_REQUEST && id != self.id => {
                        self.waiting.iter_mut().filter(|w| w.id == id).for_each(Connection::hang_up);
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
                        let mut new = Connection::new(id, std::ptr::null_mut());
                        new.table = self.table;
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

    /// Called when the peer is gone. Data that has arrived can still be read.
    pub fn hang_up(&mut self) {
        self.state = State::Ended;
        self.writable = false;
    }

    fn is_client(&self) -> bool {
        self.peer_sgl.length == 0
    }

    /// Sends the request for the connection.
    fn ask(&mut self) -> Result<(), i32> {
        self.prepare()?;
        let data = self.conn_data().ok_or(libc::EIO)?;
        // SAFETY: the parameters live as long as the call.
        check(unsafe { x_rdma_connect(self.id, &mut Self::param(&data)) })
    }

    /// Accepts an incoming connection.
    pub fn answer(&mut self) -> Result<(), i32> {
        let data = self.conn_data().ok_or(libc::EIO)?;
        self.state = State::Connecting;
        // SAFETY: as above.
        check(unsafe { x_rdma_accept(self.id, &mut Self::param(&data)) })
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // SAFETY: everything is this socket's own, and nobody uses it any more.
        unsafe {
            x_rdma_destroy_qp(self.id);
            self.mapped.drain(..).for_each(Mapped::release);
            if let Some(m) = self.memory.take() {
                for mr in m.mrs {
                    any::dereg_mr(mr);
                }
            }
            if let Some(queue) = self.queue.take() {
                queue.destroy();
            }
            self.waiting.clear();
            x_rdma_destroy_id(self.id);
            if !self.channel.is_null() {
                x_rdma_destroy_event_channel(self.channel);
            }
        }
    }
}
