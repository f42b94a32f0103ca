//! Datagram sockets: one unreliable-datagram QP each, which exchanges messages with any number of peers.
//!
//! A peer is an address and a port. Its QP number is asked for once by connection management, where the virtual layer
//! answers for the peer's program (`CmOp::Listen` with a QPN); or it is known from a datagram that came. Eight bytes
//! before the data contain the sender's port. The sender's address is in the header at the beginning of the receive,
//! which no sender can choose. A datagram is at most one packet: the path MTU less those eight bytes. Datagrams may be
//! lost, as with UDP.

use std::collections::{HashMap, VecDeque};
use std::ffi::c_void;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use unirdma_abi as abi;
use unirdma_abi::port_space;
use unirdma_formats::Gid;
use unirdma_formats::net::{GRH_BYTES, parse_grh};
use unirdma_verbs_abi::*;

use super::connection::{ACCESS_LOCAL_WRITE, ADDR_RESOLVED, ESTABLISHED, ROUTE_RESOLVED, Ready, check, errno};
use super::wait::{Completions, Progress, identifier, look, wait};
use super::{Endpoint, Received, set_option};
use crate::ah::{x_ibv_create_ah, x_ibv_init_ah_from_wc};
use crate::any::{self, post_recv, post_send};
use crate::lock;
use crate::qp::x_ibv_modify_qp;
use crate::rdmacm::*;

/// Number of posted receives, and most sends under way.
const RECVS: usize = 256;
const SENDS: usize = 64;
/// Size of a packet, and of a receive, bytes.
const PACKET: usize = 4096;
const ROOM: usize = GRH_BYTES + PACKET;
/// Bytes before the data: version, length, the sender's port, reserved.
const HEADER: usize = 8;
/// Most datagrams that wait until a peer is found.
const MAX_WAITING: usize = 64;
/// Most peers that are remembered.
const MAX_ROUTES: usize = 4096;
/// While completions keep coming, connection management is polled once per this number of looks.
const PUT_OFF: u32 = 32;
/// Longest wait of a blocking call until a peer is found, and of `rclose` until all sends are done.
const PATIENCE: Duration = Duration::from_secs(3);
/// The Q_Key of datagrams by address (`RDMA_UDP_QKEY`).
const QKEY: u32 = 0x0123_4567;

const QPT_UD: u32 = 4;
const WR_SEND: u32 = 2;
const SEND_SIGNALED: u32 = 2;
const WC_RECV: u32 = 128;
const RTS: u32 = 3;
const SQE: u32 = 5;

/// A peer: address, IPv4 as IPv4-mapped, and port.
type Key = ([u8; 16], u16);

enum Route {
    Known {
        ah: *mut ibv_ah,
        qpn: u32,
        qkey: u32,
    },
    /// The peer's QP is being asked for; `waiting` has the datagrams for it.
    Asking {
        id: *mut rdma_cm_id,
        waiting: VecDeque<Vec<u8>>,
    },
}

/// A datagram that has arrived.
struct Arrived {
    slot: usize,
    bytes: usize,
    from: Key,
}

/// The QP's memory.
struct Memory {
    recv: Box<[u8]>,
    send: Box<[u8]>,
    mrs: [*mut ibv_mr; 2],
}

struct Inner {
    domain: i32,
    id: *mut rdma_cm_id,
    channel: *mut rdma_event_channel,
    queue: Option<Completions>,
    /// `None` before the first address or datagram.
    memory: Option<Memory>,
    /// Longest datagram, bytes.
    most: usize,
    free: Vec<usize>,
    arrived: VecDeque<Arrived>,
    routes: HashMap<Key, Route>,
    /// Address handles by address.
    handles: HashMap<[u8; 16], *mut ibv_ah>,
    peer: Option<Key>,
    error: i32,
    /// Looks since answers of connection management were last handled.
    put_off: u32,
}

// SAFETY: the objects may be used by any thread; the socket's lock keeps them apart.
unsafe impl Send for Inner {}

/// A datagram socket.
pub(super) struct Datagrams {
    inner: Mutex<Inner>,
    nonblocking: AtomicBool,
}

impl Inner {
    fn create(domain: i32) -> Result<Inner, i32> {
        let (id, channel) = identifier(port_space::UDP)?;
        Ok(Inner {
            domain,
            id,
            channel,
            queue: None,
            memory: None,
            most: 0,
            free: (0..SENDS).collect(),
            arrived: VecDeque::new(),
            routes: HashMap::new(),
            handles: HashMap::new(),
            peer: None,
            error: 0,
            put_off: 0,
        })
    }

    /// Gives the socket an address, if it has none, and a QP.
    fn open(&mut self, addr: Option<*const libc::sockaddr>) -> Result<(), i32> {
        if self.memory.is_some() {
            return if addr.is_some() { Err(libc::EINVAL) } else { Ok(()) };
        }
        // SAFETY: all zero is a valid value.
        let mut any: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
        any.ss_family = self.domain as u16;
        let addr = addr.unwrap_or((&raw const any).cast());
        // SAFETY: the socket's own identifier, and what is made for it here; the caller's address.
        unsafe {
            crate::rdmacm::bind_to_device(self.id, addr)?;
            let mut port: ibv_port_attr = std::mem::zeroed();
            let r = crate::device::x_ibv_query_port((*self.id).verbs, 1, &mut port);
            if r != 0 {
                return Err(r);
            }
            self.most = (128usize << port.active_mtu).min(PACKET) - HEADER;
            let queue = Completions::create(self.id, (RECVS + SENDS) as i32)?;
            self.queue = Some(queue);
            let mut init: ibv_qp_init_attr = std::mem::zeroed();
            (init.send_cq, init.recv_cq, init.qp_type, init.sq_sig_all) = (queue.cq, queue.cq, QPT_UD, 1);
            init.cap.max_send_wr = SENDS as u32;
            init.cap.max_recv_wr = RECVS as u32;
            (init.cap.max_send_sge, init.cap.max_recv_sge) = (1, 1);
            check(x_rdma_create_qp(self.id, std::ptr::null_mut(), &mut init))?;
            let mut m = Memory {
                recv: vec![0; RECVS * ROOM].into_boxed_slice(),
                send: vec![0; SENDS * PACKET].into_boxed_slice(),
                mrs: [std::ptr::null_mut(); 2],
            };
            let areas = [(m.recv.as_mut_ptr(), m.recv.len()), (m.send.as_mut_ptr(), m.send.len())];
            for (mr, (at, len)) in m.mrs.iter_mut().zip(areas) {
                *mr = any::reg_mr((*self.id).pd, at.cast::<c_void>(), len, ACCESS_LOCAL_WRITE);
            }
            let made = m.mrs.iter().all(|mr| !mr.is_null());
            let e = errno();
            self.memory = Some(m);
            if !made {
                return Err(e);
            }
            (0..RECVS).for_each(|slot| self.post_receive(slot));
            queue.arm();
            crate::rdmacm::answer_by_itself(self.id)
        }
    }

    fn post_receive(&self, slot: usize) {
        let Some(m) = &self.memory else { return };
        // SAFETY: live MRs and QP; the slot is this socket's.
        unsafe {
            let at = m.recv.as_ptr() as u64 + (slot * ROOM) as u64;
            let mut sge = ibv_sge { addr: at, length: ROOM as u32, lkey: (*m.mrs[0]).lkey };
            let next = std::ptr::null_mut();
            let mut wr = ibv_recv_wr { wr_id: slot as u64, next, sg_list: &mut sge, num_sge: 1 };
            let mut bad = std::ptr::null_mut();
            // The queue holds as many receives as there are slots.
            post_recv((*self.id).qp, &mut wr, &mut bad);
        }
    }

    /// Sends a datagram to a QP, if a slot is free.
    fn transmit(&mut self, bytes: &[u8], ud: ibv_send_wr_ud) -> bool {
        let (Some(m), Some(slot)) = (&mut self.memory, self.free.pop()) else { return false };
        // SAFETY: live MRs and QP; the slot is free.
        unsafe {
            let port = x_rdma_get_src_port(self.id).to_ne_bytes();
            let packet = &mut m.send[slot * PACKET..][..HEADER + bytes.len()];
            packet[..HEADER].copy_from_slice(&[1, HEADER as u8, port[0], port[1], 0, 0, 0, 0]);
            packet[HEADER..].copy_from_slice(bytes);
            let mut sge = ibv_sge { addr: packet.as_ptr() as u64, length: packet.len() as u32, lkey: (*m.mrs[1]).lkey };
            let mut wr = ibv_send_wr {
                wr_id: slot as u64,
                next: std::ptr::null_mut(),
                sg_list: &mut sge,
                num_sge: 1,
                opcode: WR_SEND,
                send_flags: SEND_SIGNALED,
                imm_data: 0,
                wr: ibv_send_wr_target { ud },
                remote_srqn: 0,
                rest: ibv_send_wr_rest { tso: [0; 2] },
            };
            let mut bad = std::ptr::null_mut();
            if post_send((*self.id).qp, &mut wr, &mut bad) != 0 {
                // The datagram is lost, as datagrams may be.
                self.free.push(slot);
            }
        }
        true
    }

    /// Sends a datagram, or queues it until its peer is found. `None` if there is no room for it now.
    fn send(&mut self, to: Key, bytes: &[u8]) -> Option<Result<usize, i32>> {
        if bytes.len() > self.most {
            return Some(Err(libc::EMSGSIZE));
        }
        match self.routes.get_mut(&to) {
            Some(&mut Route::Known { ah, qpn, qkey }) => {
                let ud = ibv_send_wr_ud { ah, remote_qpn: qpn, remote_qkey: qkey };
                return self.transmit(bytes, ud).then_some(Ok(bytes.len()));
            }
            Some(Route::Asking { waiting, .. }) => {
                if waiting.len() >= MAX_WAITING {
                    waiting.pop_front();
                }
                waiting.push_back(bytes.to_vec());
            }
            None => {
                if let Err(e) = self.ask(to, VecDeque::from([bytes.to_vec()])) {
                    return Some(Err(e));
                }
            }
        }
        Some(Ok(bytes.len()))
    }

    /// Asks for the QP number of a peer.
    fn ask(&mut self, to: Key, waiting: VecDeque<Vec<u8>>) -> Result<(), i32> {
        let mut id = std::ptr::null_mut();
        let mut addr = self.address(to);
        // SAFETY: room for the identifier, which is kept, or given back here.
        unsafe {
            check(x_rdma_create_id(self.channel, &mut id, std::ptr::null_mut(), port_space::UDP.into()))?;
            let asked = check(x_rdma_resolve_addr(id, std::ptr::null_mut(), (&raw mut addr).cast(), 2000));
            if let Err(e) = asked {
                x_rdma_destroy_id(id);
                return Err(e);
            }
        }
        self.routes.insert(to, Route::Asking { id, waiting });
        Ok(())
    }

    fn is_asking(&self, to: &Key) -> bool {
        matches!(self.routes.get(to), Some(Route::Asking { .. }))
    }

    /// Called when a peer's QP is known: sends the datagrams that wait for it.
    fn found(&mut self, to: Key, attr: &mut ibv_ah_attr, qpn: u32, qkey: u32) {
        // SAFETY: the identifier's PD; attributes of a peer that exists.
        let ah = *self.handles.entry(to.0).or_insert_with(|| unsafe { x_ibv_create_ah((*self.id).pd, attr) });
        if ah.is_null() {
            self.handles.remove(&to.0);
            return self.lost(to);
        }
        if self.routes.len() >= MAX_ROUTES {
            let peer = self.peer;
            self.routes.retain(|k, r| matches!(r, Route::Asking { .. }) || Some(*k) == peer);
        }
        if let Some(Route::Asking { id, waiting }) = self.routes.insert(to, Route::Known { ah, qpn, qkey }) {
            for bytes in waiting {
                self.transmit(&bytes, ibv_send_wr_ud { ah, remote_qpn: qpn, remote_qkey: qkey });
            }
            // SAFETY: the identifier that asked; no event of it is held.
            unsafe { x_rdma_destroy_id(id) };
        }
    }

    /// Called when a peer was not found: if the socket is connected to it, the next call gets an error.
    fn lost(&mut self, to: Key) {
        if let Some(Route::Asking { id, .. }) = self.routes.remove(&to) {
            // SAFETY: as above.
            unsafe { x_rdma_destroy_id(id) };
        }
        if self.peer == Some(to) {
            self.error = libc::ECONNREFUSED;
        }
    }

    /// Handles answers of connection management.
    fn connection_events(&mut self) {
        loop {
            let mut event = std::ptr::null_mut();
            // SAFETY: the socket's own channel, which does not block; each event is given back before its identifier.
            unsafe {
                if x_rdma_get_cm_event(self.channel, &mut event) != 0 {
                    return;
                }
                let (kind, status, id) = ((*event).event, (*event).status, (*event).id);
                let param = std::ptr::read(&raw const (*event).param);
                x_rdma_ack_cm_event(event);
                let asks = |r: &Route| matches!(r, Route::Asking { id: i, .. } if *i == id);
                let Some(to) = self.routes.iter().find(|(_, r)| asks(r)).map(|(k, _)| *k) else { continue };
                let went_on = match kind {
                    ADDR_RESOLVED if status == 0 => x_rdma_resolve_route(id, 2000) == 0,
                    ROUTE_RESOLVED if status == 0 => {
                        let mut nothing: rdma_conn_param = std::mem::zeroed();
                        x_rdma_connect(id, &mut nothing) == 0
                    }
                    ESTABLISHED if status == 0 => {
                        let mut ud = param.ud;
                        self.found(to, &mut ud.ah_attr, ud.qp_num, ud.qkey);
                        true
                    }
                    _ => false,
                };
                if !went_on {
                    self.lost(to);
                }
            }
        }
    }

    fn completed(&mut self, wc: &mut ibv_wc) {
        let slot = wc.wr_id as usize;
        if wc.opcode & WC_RECV == 0 {
            self.free.push(slot);
            if wc.status != 0 {
                // Other sends go on.
                // SAFETY: all zero is valid; the identifier's own QP.
                unsafe {
                    let mut a: ibv_qp_attr = std::mem::zeroed();
                    (a.qp_state, a.cur_qp_state) = (RTS, SQE);
                    x_ibv_modify_qp((*self.id).qp, &mut a, 3);
                }
            }
            return;
        }
        if wc.status != 0 {
            return;
        }
        match self.sender(slot, wc) {
            Some(from) if self.peer.is_none_or(|p| p == from) => {
                let bytes = wc.byte_len as usize - GRH_BYTES - HEADER;
                self.arrived.push_back(Arrived { slot, bytes, from });
            }
            _ => self.post_receive(slot),
        }
    }

    /// The sender of the datagram in a receive, which is remembered as a peer; `None` if the receive is not such a
    /// datagram.
    fn sender(&mut self, slot: usize, wc: &mut ibv_wc) -> Option<Key> {
        let data = &self.memory.as_ref()?.recv[slot * ROOM..][..wc.byte_len as usize];
        let (grh, rest) = data.split_first_chunk::<GRH_BYTES>()?;
        let header = rest.first_chunk::<HEADER>().filter(|h| h[0] == 1 && usize::from(h[1]) == HEADER)?;
        let (ip, _) = parse_grh(grh)?;
        let from = (ip.0, u16::from_be_bytes([header[2], header[3]]));
        if self.domain == libc::AF_INET && !ip.ip().is_ipv4() {
            return None;
        }
        let known = matches!(self.routes.get(&from), Some(Route::Known { qpn, .. }) if *qpn == wc.src_qp);
        if !known {
            let mut grh = *grh;
            // SAFETY: all zero is valid; the identifier's device, a completion and the header that came with it.
            unsafe {
                let mut attr: ibv_ah_attr = std::mem::zeroed();
                let at = (&raw mut grh).cast::<ibv_grh>();
                // An address that has a handle already costs no command, however many ports it has.
                let there = self.handles.contains_key(&from.0);
                if there || x_ibv_init_ah_from_wc((*self.id).verbs, 1, wc, at, &mut attr) == 0 {
                    self.found(from, &mut attr, wc.src_qp, QKEY);
                }
            }
        }
        Some(from)
    }

    /// Takes the first datagram, or copies it without taking it.
    fn receive(&mut self, room: &mut [u8], peek: bool) -> Option<Received> {
        let first = self.arrived.front()?;
        let (slot, bytes, from) = (first.slot, first.bytes.min(room.len()), first.from);
        let data = &self.memory.as_ref()?.recv[slot * ROOM + GRH_BYTES + HEADER..];
        room[..bytes].copy_from_slice(&data[..bytes]);
        if !peek {
            self.arrived.pop_front();
            self.post_receive(slot);
        }
        Some(Received { bytes, from: Some(self.address(from)) })
    }

    /// The peer for an address. Loopback means the vRNIC's own first address of that family.
    fn key(&self, a: &abi::CmAddr) -> Key {
        let ip = Gid(address::gid(a)).ip();
        if !ip.is_loopback() {
            return (address::gid(a), a.port);
        }
        // SAFETY: the identifier has a device.
        let Ok(session) = (unsafe { crate::device::session((*self.id).verbs) }) else {
            return (address::gid(a), a.port);
        };
        let mut gids = (0..256).map_while(|i| crate::device::gid(&session, 1, i).ok()).map(Gid);
        let own = gids.find(|g| !g.is_zero() && g.ip().is_ipv4() == ip.is_ipv4());
        (own.map_or(address::gid(a), |g| g.0), a.port)
    }

    fn address(&self, (ip, port): Key) -> libc::sockaddr_storage {
        // SAFETY: all zero is a valid value.
        let mut a: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
        let family = if self.domain == libc::AF_INET { 4 } else { 6 };
        address::write(&abi::CmAddr { ip, port, family, ..Default::default() }, &mut a);
        a
    }

    /// True if no datagram waits or is under way.
    fn is_idle(&self) -> bool {
        self.free.len() == SENDS && !self.routes.values().any(|r| matches!(r, Route::Asking { .. }))
    }
}

impl Progress for Inner {
    fn progress(&mut self) {
        let Some(queue) = self.queue.filter(|_| self.memory.is_some()) else { return };
        let any = queue.take(|wc| self.completed(wc)).unwrap_or_else(|e| {
            self.error = e;
            false
        });
        // Handling answers of connection management takes system calls, and can wait until there are no completions,
        // but not for ever.
        self.put_off = if any { self.put_off.wrapping_add(1) } else { 0 };
        if self.put_off % PUT_OFF == 0 {
            self.connection_events();
        }
    }

    fn rearm(&self) {
        if let Some(queue) = self.queue.filter(|_| self.memory.is_some()) {
            queue.rearm();
        }
    }

    fn ready(&self) -> Ready {
        let error = self.error != 0;
        Ready { read: error || !self.arrived.is_empty(), write: !self.free.is_empty(), hang_up: false, error }
    }

    fn descriptors(&self) -> Vec<i32> {
        // SAFETY: the socket's own channel.
        std::iter::once(unsafe { (*self.channel).fd }).chain(self.queue.map(|q| q.fd())).collect()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: everything is this socket's own, and nobody uses it any more.
        unsafe {
            for (_, r) in self.routes.drain() {
                if let Route::Asking { id, .. } = r {
                    x_rdma_destroy_id(id);
                }
            }
            x_rdma_destroy_qp(self.id);
            for (_, ah) in self.handles.drain() {
                any::destroy_ah(ah);
            }
            if let Some(m) = self.memory.take() {
                for mr in m.mrs.into_iter().filter(|mr| !mr.is_null()) {
                    any::dereg_mr(mr);
                }
            }
            if let Some(queue) = self.queue.take() {
                queue.destroy();
            }
            x_rdma_destroy_id(self.id);
            x_rdma_destroy_event_channel(self.channel);
        }
    }
}

impl Datagrams {
    pub fn create(domain: i32) -> Result<Datagrams, i32> {
        Ok(Datagrams { inner: Mutex::new(Inner::create(domain)?), nonblocking: AtomicBool::new(false) })
    }

    fn waits(&self, dontwait: bool) -> bool {
        !dontwait && !self.nonblocking.load(Ordering::Relaxed)
    }

    /// Waits until `is_so` is true, at most [`PATIENCE`].
    fn wait_a_while(&self, mut is_so: impl FnMut(&Inner) -> bool) {
        let end = Instant::now() + PATIENCE;
        let _ = wait(&self.inner, true, |i| (is_so(i) || Instant::now() > end).then_some(Ok(())));
    }
}

impl Endpoint for Datagrams {
    fn fd(&self) -> i32 {
        // SAFETY: the socket's own channel.
        unsafe { (*lock(&self.inner).channel).fd }
    }

    fn nonblocking(&self) -> &AtomicBool {
        &self.nonblocking
    }

    fn bind(&self, addr: *const libc::sockaddr) -> Result<(), i32> {
        lock(&self.inner).open(Some(addr))
    }

    /// Datagrams go to this peer from now on, and are taken only from it. Without a family: to and from all peers
    /// again.
    fn connect(&self, addr: *const libc::sockaddr) -> Result<(), i32> {
        // SAFETY: the caller's address.
        let addr = unsafe { address::read(addr) }?;
        let key = {
            let mut inner = lock(&self.inner);
            if addr.family == 0 {
                inner.peer = None;
                return Ok(());
            }
            inner.open(None)?;
            let key = inner.key(&addr);
            if !inner.routes.contains_key(&key) {
                inner.ask(key, VecDeque::new())?;
            }
            inner.peer = Some(key);
            key
        };
        if self.waits(false) {
            self.wait_a_while(|i| !i.is_asking(&key));
            // The peer may come into being before something is sent.
            lock(&self.inner).error = 0;
        }
        Ok(())
    }

    fn send(&self, bytes: &[u8], dontwait: bool, to: *const libc::sockaddr) -> Result<usize, i32> {
        // SAFETY: the caller's address, or NULL.
        let to = unsafe { address::read(to) }?;
        let key = {
            let mut inner = lock(&self.inner);
            inner.open(None)?;
            if to.family != 0 { inner.key(&to) } else { inner.peer.ok_or(libc::EDESTADDRREQ)? }
        };
        let waits = self.waits(dontwait);
        let sent = wait(&self.inner, waits, |i| match std::mem::take(&mut i.error) {
            0 => i.send(key, bytes),
            e => Some(Err(e)),
        })?;
        if waits && lock(&self.inner).is_asking(&key) {
            self.wait_a_while(|i| !i.is_asking(&key));
        }
        Ok(sent)
    }

    fn recv(&self, bytes: &mut [u8], flags: i32) -> Result<Received, i32> {
        let [peek, dontwait] = [libc::MSG_PEEK, libc::MSG_DONTWAIT].map(|f| flags & f != 0);
        lock(&self.inner).open(None)?;
        wait(&self.inner, self.waits(dontwait), |i| match std::mem::take(&mut i.error) {
            0 => i.receive(bytes, peek).map(Ok),
            e => Some(Err(e)),
        })
    }

    fn shutdown(&self, how: i32) -> Result<(), i32> {
        if how != libc::SHUT_RD {
            self.wait_a_while(|i| i.is_idle() || i.error != 0);
        }
        Ok(())
    }

    fn poll(&self, arm: bool) -> (Ready, Vec<i32>) {
        look(&self.inner, arm)
    }

    fn take_error(&self) -> i32 {
        std::mem::take(&mut lock(&self.inner).error)
    }

    fn name(&self, peer: bool) -> Result<libc::sockaddr_storage, i32> {
        let inner = lock(&self.inner);
        if peer {
            return inner.peer.map(|p| inner.address(p)).ok_or(libc::ENOTCONN);
        }
        // SAFETY: the socket's own identifier.
        let mut own = unsafe { (*inner.id).route.addr.src };
        own.ss_family = inner.domain as u16;
        Ok(own)
    }

    fn set_option(&self, option: i32, value: u32) -> Result<(), i32> {
        set_option(lock(&self.inner).id, option, value)
    }
}
