//! Posting: work requests as WQEs of a ring.

use unirdma_abi as abi;
use unirdma_formats::WrOpcode;
use unirdma_mem::QpRings;
use zerocopy::IntoBytes;

use crate::Result;

/// Data of a send: its SGEs, or bytes to put into the WQE.
#[derive(Clone, Copy)]
pub enum SendWr<'a> {
    /// Gather list.
    Sges(&'a [abi::Sge]),
    /// Pieces of the application's memory, by address and length, to be copied now.
    Inline(&'a [abi::Sge]),
}

/// Sends that are being posted. They are published when it is dropped.
pub trait Batch {
    /// Writes one request.
    ///
    /// # Errors
    /// Why there is no room for it.
    ///
    /// # Safety
    /// The memory that `data` names must be readable in this process.
    unsafe fn push(&mut self, head: &abi::SqWqe, data: SendWr<'_>) -> Result<()>;

    /// Forgets all requests that were written.
    fn abort(self);
}

/// Progress of posting to a queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Post {
    /// WQEs that were written.
    pub prod: u32,
    /// WQEs that were published to the device.
    pub published: u32,
}

impl Post {
    /// True if there are WQEs that were not published; they are published now.
    #[inline]
    fn take_new(&mut self) -> bool {
        let new = self.prod != self.published;
        if new {
            self.published = self.prod;
        }
        new
    }

    /// Publishes the sends that were written to the SQ of `rings`. True if there are any: then the doorbell must be
    /// rung.
    #[inline]
    pub fn publish_sends(&mut self, rings: &QpRings) -> bool {
        let new = self.take_new();
        if new {
            rings.set_sq_prod(self.prod);
        }
        new
    }

    /// Forgets the WQEs that were not published.
    pub fn abort(&mut self) {
        self.prod = self.published;
    }
}

/// Where requests are posted: the rings, which a resize replaces, and the progress. An SQ and an RQ have one each,
/// which may share their rings.
#[derive(Debug)]
pub struct WorkQueue {
    /// The rings.
    pub rings: QpRings,
    /// The progress.
    pub post: Post,
}

impl WorkQueue {
    /// An empty queue.
    pub fn new(rings: QpRings) -> Self {
        WorkQueue { rings, post: Post::default() }
    }

    /// True if the SQ has a free slot.
    #[inline]
    pub fn has_room_to_send(&self) -> bool {
        self.rings.sq_free(self.post.prod) > 0
    }

    /// Writes the data of the next send behind its head, and the length of the data into the head.
    ///
    /// # Errors
    /// `EINVAL` for more inline data than `max_inline`.
    ///
    /// # Panics
    /// If there are more SGEs, or `max_inline` is more, than a slot has room for.
    ///
    /// # Safety
    /// The pieces of [`SendWr::Inline`] must be readable memory of this process.
    #[inline]
    pub unsafe fn put_data(&self, head: &mut abi::SqWqe, data: SendWr<'_>, max_inline: u32) -> Result<()> {
        let i = self.post.prod;
        match data {
            SendWr::Sges(s) => {
                head.num_sge = s.len() as u8;
                self.rings.sq_put(i, abi::SQ_DATA, s.as_bytes());
            }
            SendWr::Inline(s) => {
                let total: u64 = s.iter().map(|s| u64::from(s.length)).sum();
                let op = WrOpcode::from_raw(head.opcode.into()).ok_or(libc::EINVAL)?;
                if total > op.inline_bytes(max_inline).into() {
                    return Err(libc::EINVAL);
                }
                head.inline_len = total as u16;
                let mut off = abi::SQ_DATA;
                for s in s.iter().filter(|s| s.length > 0) {
                    // SAFETY: the caller vouches for the piece; it is copied at once.
                    let bytes = unsafe { std::slice::from_raw_parts(s.addr as *const u8, s.length as usize) };
                    self.rings.sq_put(i, off, bytes);
                    off += bytes.len();
                }
            }
        }
        Ok(())
    }

    /// Writes the head of the next send, whose data is in the slot already. The device sees it with
    /// [`Post::publish_sends`].
    #[inline]
    pub fn put_head(&mut self, head: &abi::SqWqe) {
        self.rings.sq_put(self.post.prod, 0, head.as_bytes());
        self.post.prod = self.post.prod.wrapping_add(1);
    }

    /// Writes a receive.
    ///
    /// # Errors
    /// `EINVAL` for more SGEs than `max_sge`, `ENOMEM` if the RQ is full.
    ///
    /// # Panics
    /// If `max_sge` is more than a slot has room for.
    #[inline]
    pub fn put_receive(&mut self, wr_id: u64, sges: &[abi::Sge], max_sge: u32) -> Result<()> {
        let prod = self.post.prod;
        if sges.len() > max_sge as usize {
            return Err(libc::EINVAL);
        }
        if self.rings.rq_free(prod) == 0 {
            return Err(libc::ENOMEM);
        }
        let head = abi::RqWqe { wr_id, num_sge: sges.len() as u32, reserved: 0 };
        self.rings.rq_put(prod, 0, head.as_bytes());
        self.rings.rq_put(prod, abi::RQ_DATA, sges.as_bytes());
        self.post.prod = prod.wrapping_add(1);
        Ok(())
    }

    /// Publishes the receives that were written. True if the device wants the doorbell rung for them.
    #[inline]
    pub fn publish_receives(&mut self) -> bool {
        let new = self.post.take_new();
        new && self.rings.set_rq_prod(self.post.prod)
    }

    /// Copies the receives that wait to other rings.
    ///
    /// # Errors
    /// `EINVAL` if there is no room for them.
    pub fn copy_receives(&self, to: &QpRings) -> Result<()> {
        let (from, prod) = (&self.rings, self.post.prod);
        let waiting = from.layout().rq_entries - from.rq_free(prod);
        copy(waiting, prod, to.layout().rq_entries, to.layout().rq_stride, |at, wqe| {
            from.rq_copy(at, wqe);
            to.rq_put(at, 0, wqe);
        })
    }

    /// Copies the sends that wait or are under way to other rings.
    ///
    /// # Errors
    /// `EINVAL` if there is no room for them.
    pub fn copy_sends(&self, to: &QpRings) -> Result<()> {
        let (from, prod) = (&self.rings, self.post.prod);
        let waiting = from.layout().sq_entries - from.sq_free(prod);
        copy(waiting, prod, to.layout().sq_entries, to.layout().sq_stride, |at, wqe| {
            from.sq_copy(at, wqe);
            to.sq_put(at, 0, wqe);
        })
    }
}

/// Copies the last `waiting` WQEs before index `prod`, one at a time, if there are no more than `room`.
fn copy(waiting: u32, prod: u32, room: u32, stride: u32, one: impl Fn(u32, &mut [u8])) -> Result<()> {
    if waiting > room {
        return Err(libc::EINVAL);
    }
    let mut wqe = vec![0; stride as usize];
    (1..=waiting).for_each(|i| one(prod.wrapping_sub(i), &mut wqe));
    Ok(())
}
