//! Bytes placed in memory of programs, by offset (`riomap` and `riowrite` of `rsocket(7)`).

use std::ffi::c_void;

use unirdma_verbs_abi::ibv_mr;

use super::super::protocol::*;
use super::{ACCESS_LOCAL_WRITE, ACCESS_REMOTE_WRITE, Connection, errno};
use crate::any;

/// Memory of this program that is registered with a stream.
pub(super) struct Mapped {
    mr: *mut ibv_mr,
    offset: u64,
    /// Its index in the peer's table, if the peer may write to it.
    index: Option<u32>,
    told: bool,
}

impl Mapped {
    pub fn release(self) {
        // SAFETY: an MR of this stream's own.
        unsafe { any::dereg_mr(self.mr) };
    }
}

impl Connection {
    /// Registers memory of the caller. Returns its offset: `offset`, or else its address. The peer is told of it with
    /// the next bytes that are sent.
    ///
    /// # Errors
    /// `EINVAL` before the connection is there, `ENOMEM` when the peer's table is full, otherwise as `ibv_reg_mr(3)`.
    pub fn map(&mut self, buf: *mut c_void, len: usize, peer_writes: bool, offset: Option<u64>) -> Result<u64, i32> {
        if self.memory.is_none() {
            return Err(libc::EINVAL);
        }
        // The length of an entry has 32 bits.
        if peer_writes && u32::try_from(len).is_err() {
            return Err(libc::EINVAL);
        }
        let free = |i: &u32| self.mapped.iter().all(|m| m.index != Some(*i));
        let index = if peer_writes { Some((0..self.peer_table).find(free).ok_or(libc::ENOMEM)?) } else { None };
        let access = ACCESS_LOCAL_WRITE | if peer_writes { ACCESS_REMOTE_WRITE } else { 0 };
        // SAFETY: the identifier's PD, and memory that the caller owns.
        let mr = unsafe { any::reg_mr((*self.id).pd, buf, len, access) };
        if mr.is_null() {
            return Err(errno());
        }
        let offset = offset.unwrap_or(buf as u64);
        self.mapped.push(Mapped { mr, offset, index, told: !peer_writes });
        Ok(offset)
    }

    /// Ends a mapping of exactly this memory.
    ///
    /// # Errors
    /// `EINVAL` if there is none.
    pub fn unmap(&mut self, buf: *mut c_void, len: usize) -> Result<(), i32> {
        // SAFETY: live MRs.
        let this = |m: &Mapped| unsafe { (*m.mr).addr == buf && (*m.mr).length == len };
        let i = self.mapped.iter().position(this).ok_or(libc::EINVAL)?;
        self.mapped.remove(i).release();
        Ok(())
    }

    /// Announces new mappings to the peer. Returns true if all of them are announced now.
    pub(super) fn tell_mappings(&mut self) -> Result<bool, i32> {
        while let Some(i) = self.mapped.iter().position(|m| !m.told) {
            if !self.may_tell() {
                return Ok(false);
            }
            let m = &self.mapped[i];
            let index = m.index.unwrap_or(0);
            // SAFETY: a live MR.
            let mr = unsafe { &*m.mr };
            let memory = Sge { addr: mr.addr as u64, key: mr.rkey, length: mr.length as u32 };
            let entry = Mapping { offset: m.offset, memory };
            let before = u64::from(self.peer_sgl.length) * size_of::<Sge>() as u64;
            let to = self.peer_sgl.addr.wrapping_add(before + u64::from(index) * size_of::<Mapping>() as u64);
            self.write_entry(&entry, 0, message(OP_MAPPING, index), to)?;
            self.sends_free -= 1;
            self.sent = self.sent.wrapping_add(1);
            self.mapped[i].told = true;
        }
        Ok(true)
    }

    /// Writes into memory that the peer has mapped, as much as there is room for. Returns the number of bytes, and
    /// whether more can follow; no more can follow if nothing is mapped there.
    pub fn write_at(&mut self, bytes: &[u8], offset: u64) -> Result<(usize, bool), i32> {
        let mut done = 0;
        if !self.tell_mappings()? {
            return Ok((0, true));
        }
        while done < bytes.len() {
            let at = self.memory.as_ref().and_then(|m| m.board.find(offset.checked_add(done as u64)?));
            let Some(there) = at else { return Ok((done, false)) };
            let n = (there.length as usize).min(self.unsent()).min(bytes.len() - done);
            if n == 0 || !self.may_post() {
                break;
            }
            self.transmit(&bytes[done..done + n], None, (there.addr, there.key))?;
            done += n;
        }
        Ok((done, true))
    }
}
