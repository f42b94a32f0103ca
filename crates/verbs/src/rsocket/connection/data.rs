//! The bytes of a stream: sending, receiving, and the messages by which each end announces its room.

use unirdma_verbs_abi::*;

use super::super::board::PARTS;
use super::super::protocol::*;
use super::super::wait::Progress;
use super::{BUFFER, CONTROLS, Connection, HALF, INLINE, State};
use crate::any::{post_recv, post_send};

/// Most bytes of one message.
const MOST: usize = 64 << 10;

const WR_RDMA_WRITE: u32 = 0;
const WR_RDMA_WRITE_IMM: u32 = 1;
const SEND_SIGNALED: u32 = 2;
const SEND_INLINE: u32 = 8;
const WC_RECV: u32 = 128;
/// In `wr_id`: marks a control send. Otherwise `wr_id` is the number of data bytes.
const CONTROL: u64 = 1 << 63;

/// Operations for which a socket is ready.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::rsocket) struct Ready {
    pub read: bool,
    pub write: bool,
    pub hang_up: bool,
    pub error: bool,
}

/// A place in the peer's memory: address and rkey.
type Place = (u64, u32);

impl Connection {
    pub(super) fn post_receive(&self) -> Result<(), i32> {
        let mut wr = ibv_recv_wr { wr_id: 0, next: std::ptr::null_mut(), sg_list: std::ptr::null_mut(), num_sge: 0 };
        let mut bad = std::ptr::null_mut();
        // SAFETY: the identifier's own QP.
        match unsafe { post_recv((*self.id).qp, &mut wr, &mut bad) } {
            0 => Ok(()),
            e => Err(e),
        }
    }

    /// Posts a WRITE to the peer, with immediate data or without.
    fn write(&mut self, sges: &mut [ibv_sge], wr_id: u64, imm: Option<u32>, to: Place, flags: u32) -> Result<(), i32> {
        let rdma = ibv_send_wr_rdma { remote_addr: to.0, rkey: to.1 };
        let mut wr = ibv_send_wr {
            wr_id,
            next: std::ptr::null_mut(),
            sg_list: sges.as_mut_ptr(),
            num_sge: sges.len() as i32,
            opcode: if imm.is_some() { WR_RDMA_WRITE_IMM } else { WR_RDMA_WRITE },
            send_flags: SEND_SIGNALED | flags,
            imm_data: imm.unwrap_or(0).to_be(),
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

    pub fn control(&mut self, imm: u32) -> Result<(), i32> {
        self.controls -= 1;
        self.write(&mut [], CONTROL, Some(imm), (0, 0), 0)
    }

    /// Writes one entry of the peer's board, and announces it.
    pub(super) fn write_entry<T: Copy>(&mut self, entry: &T, wr_id: u64, imm: u32, to: u64) -> Result<(), i32> {
        const { assert!(size_of::<T>() <= INLINE as usize) };
        let mut sge = [ibv_sge { addr: std::ptr::from_ref(entry) as u64, length: size_of::<T>() as u32, lkey: 0 }];
        self.write(&mut sge, wr_id, Some(imm), (to, self.peer_sgl.key), SEND_INLINE)
    }

    /// Announces to the peer that there is room again.
    pub fn tell(&mut self) -> Result<(), i32> {
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
        let to = self.peer_sgl.addr.wrapping_add(u64::from(self.peer_entry) * size_of::<Sge>() as u64);
        self.controls -= 1;
        self.write_entry(&half, CONTROL, imm, to)?;
        self.freed -= HALF;
        self.free_half = (self.free_half + HALF) % BUFFER;
        self.peer_entry = (self.peer_entry + 1) % self.peer_sgl.length;
        Ok(())
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
        match parts(u32::from_be(wc.imm_data)) {
            (OP_DATA, n) if n as usize <= BUFFER && self.arrived.len() < usize::from(QUEUE) => {
                self.arrived.push_back(n as usize);
            }
            // The peer has sent more than it was given room for.
            (OP_DATA, _) => self.hang_up(),
            (OP_SGL, limit) => self.send_limit = limit as u16,
            // Counts like a message with data, and is taken at once.
            (OP_MAPPING, _) => self.taken = self.taken.wrapping_add(1),
            (OP_CTRL, CTRL_DISCONNECT) => self.hang_up(),
            (OP_CTRL, CTRL_SHUTDOWN) => self.readable = false,
            _ => {}
        }
    }

    /// True if a request may be posted.
    pub(super) fn may_post(&self) -> bool {
        self.writable && self.state == State::Connected && self.sends_free > 0
    }

    /// True if a message may be sent, which takes one of the peer's receives.
    pub(super) fn may_tell(&self) -> bool {
        self.may_post() && self.sent != self.send_limit
    }

    /// True if all data is with the peer, so that the end can be announced.
    pub fn may_end(&self) -> bool {
        self.controls > 0 && self.sends_free == u32::from(QUEUE)
    }

    /// True if everything that was sent is with the peer.
    pub fn all_arrived(&self) -> bool {
        self.controls == CONTROLS && self.sends_free == u32::from(QUEUE)
    }

    /// Most bytes that the next request may take from the send buffer.
    pub(super) fn unsent(&self) -> usize {
        self.send_free.min(BUFFER - self.send_at).min(MOST)
    }

    /// The peer's memory for the next bytes: the free rest of the current part.
    fn part(&self) -> Sge {
        self.memory.as_ref().map_or(Sge::default(), |m| m.board.part(self.target))
    }

    /// Sends bytes, no more than [`Connection::unsent`].
    pub(super) fn transmit(&mut self, bytes: &[u8], imm: Option<u32>, to: Place) -> Result<(), i32> {
        let (at, n) = (self.send_at, bytes.len());
        let m = self.memory.as_mut().ok_or(libc::ENOTCONN)?;
        m.send[at..at + n].copy_from_slice(bytes);
        // SAFETY: a live MR.
        let lkey = unsafe { (*m.mrs[0]).lkey };
        let mut sge = [ibv_sge { addr: m.send.as_ptr() as u64 + at as u64, length: n as u32, lkey }];
        let flags = if n <= INLINE as usize { SEND_INLINE } else { 0 };
        self.write(&mut sge, n as u64, imm, to, flags)?;
        self.sends_free -= 1;
        self.send_free -= n;
        self.send_at = (at + n) % BUFFER;
        Ok(())
    }

    /// Sends as many bytes as there is room for. Returns their number.
    pub fn send(&mut self, bytes: &[u8]) -> Result<usize, i32> {
        let mut done = 0;
        if !self.tell_mappings()? {
            return Ok(0);
        }
        while done < bytes.len() && self.may_tell() {
            let part = self.part();
            let n = (part.length as usize).min(self.unsent()).min(bytes.len() - done);
            if n == 0 {
                break;
            }
            let left = Sge { addr: part.addr.wrapping_add(n as u64), length: part.length - n as u32, ..part };
            // Noted before the bytes go, because the peer may write a new grant here as soon as it has them.
            if let Some(m) = &self.memory {
                m.board.set_part(self.target, left);
            }
            self.transmit(&bytes[done..done + n], Some(message(OP_DATA, n as u32)), (part.addr, part.key))?;
            self.sent = self.sent.wrapping_add(1);
            if left.length == 0 {
                self.target = (self.target + 1) % PARTS;
            }
            done += n;
        }
        Ok(done)
    }

    /// Takes bytes that have arrived. Returns their number.
    pub fn receive(&mut self, bytes: &mut [u8], peek: bool) -> usize {
        let Some(m) = &self.memory else { return 0 };
        let (mut done, mut at) = (0, self.recv_at);
        let mut index = 0;
        while done < bytes.len()
            && let Some(&have) = self.arrived.get(index)
        {
            let n = have.min(bytes.len() - done);
            // The peer's WRITEs to these bytes are complete. A message may wrap around the buffer's end.
            let (head, tail) = bytes[done..done + n].split_at_mut(n.min(BUFFER - at));
            head.copy_from_slice(&m.recv[at..at + head.len()]);
            tail.copy_from_slice(&m.recv[..tail.len()]);
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
}

impl Progress for Connection {
    fn ready(&self) -> Ready {
        match self.state {
            State::Listening => Ready { read: !self.waiting.is_empty(), ..Ready::default() },
            State::Connected => Ready {
                read: !self.arrived.is_empty() || !self.readable,
                write: self.may_tell() && self.unsent() > 0 && self.part().length > 0 || !self.writable,
                ..Ready::default()
            },
            State::Ended => Ready { read: true, write: true, hang_up: true, error: self.error != 0 },
            _ => Ready::default(),
        }
    }

    fn progress(&mut self) {
        if self.state != State::Connected {
            self.connection_events();
        }
        let Some(queue) = self.queue.filter(|_| self.memory.is_some()) else { return };
        let any = queue.take(|wc| self.completed(wc));
        if any.is_err() {
            self.hang_up();
        }
        // Handling connection events takes system calls, and can wait until there is no data.
        if any == Ok(false) && self.state == State::Connected {
            self.connection_events();
        }
        if self.state == State::Connected
            && let Err(e) = self.tell()
        {
            self.fail(e);
        }
    }

    fn rearm(&self) {
        if let Some(queue) = self.queue.filter(|_| self.memory.is_some()) {
            queue.rearm();
        }
    }

    fn descriptors(&self) -> Vec<i32> {
        // SAFETY: the socket's own channel, or NULL.
        let channel = unsafe { self.channel.as_ref() }.map(|c| c.fd);
        channel.into_iter().chain(self.queue.map(|q| q.fd())).collect()
    }

    /// Data that was taken makes room.
    fn taken(&mut self) {
        let _ = self.tell();
    }
}
